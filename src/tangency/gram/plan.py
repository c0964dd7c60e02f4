"""How a Gram matrix is cut into tiles that a memory budget can hold.

A tile is `rows` × `rows` samples. A sweep prepares a group of row blocks once and lets the column blocks pass by; each
column block is prepared once per sweep. What decides the bits of a tile (`rows`, `capture`, `workspace`) is kept apart
from what does not (`group`, the order, who computes it), so that a run can be resumed on another machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .._base.memory import TILE_CAPTURE, TILE_WORKSPACE
from ..errors import MemoryBudgetError

# Samples on a side of a tile, at most (heuristic): larger ones gain no speed, and only finished tiles survive a crash.
LARGEST = {"cpu": 1024, "cuda": 4096}
# Row blocks that a sweep should hold, unless tiles would get small (heuristic): gradients that are formed for every
# tile want large tiles, blocks that are prepared for every sweep want many rows in it. On a GPU preparing weighs more.
HELD, SMALL = {"cpu": 1, "cuda": 3}, 1024
# Whether a GPU makes the next column block while the present one is contracted. It gains nothing where the contraction
# fills the card, and the memory of a second block makes tiles larger, which then need not be formed as often.
AHEAD = False
# Row blocks that meet a column block at once, so that gradients of its samples are formed once for all of them, at the
# price of their activations, unfolded, side by side (heuristic).
TOGETHER = {"cpu": 1, "cuda": 3}
# Buffers of `workspace` bytes that a contraction holds at its peak (measured; on a GPU two more for `TOGETHER`).
BUFFERS = {"cpu": 8, "cuda": 7}
# The part of a budget that is ours to plan with; the rest is for allocators and libraries (heuristic).
USABLE = {"cpu": 0.8, "cuda": 0.9}
# Tiles that lie about at once: the one being made, those being copied and written, and what writing takes (heuristic).
TILES = 6


@dataclass(frozen=True)
class TilePlan:
    """Blocks of `rows` samples a side; `capture` and `workspace` are the bytes their making may take besides."""

    n: int
    m: int  # 1 where each row has values by itself (`RowMap`)
    symmetric: bool
    rows: int
    capture: int
    workspace: int
    group: int = 1  # row blocks that are held prepared at once
    columns: bool = False  # all column blocks are held, and the row blocks pass by

    def block(self, k: int, side: int = 0) -> slice:
        """The samples of row (side 0) or column (side 1) block k."""
        return slice(k * self.rows, min((k + 1) * self.rows, (self.n, self.m)[side]))

    @property
    def grid(self) -> tuple[int, int]:
        """Row blocks and column blocks in all."""
        return -(-self.n // self.rows), -(-self.m // self.rows)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile that must be computed: the upper half only, where both sides are the same."""
        high, wide = self.grid
        return ((i, j) for i in range(high) for j in range(i if self.symmetric else 0, wide))

    @property
    def count(self) -> int:
        """How many `tiles` there are."""
        high, wide = self.grid
        return high * (high + 1) // 2 if self.symmetric else high * wide

    @property
    def once(self) -> bool:
        """Whether every sample is prepared only once."""
        return self.columns or self.group >= self.grid[0]

    def halved(self) -> "TilePlan":
        """Half the block, for when a device ran out of memory all the same."""
        if self.rows == 1:
            raise MemoryBudgetError(
                "out of memory with blocks of a single sample. Use a larger device or a smaller dtype."
            )
        return replace(self, rows=self.rows // 2, capture=self.capture // 2, workspace=self.workspace // 2)


@dataclass(frozen=True)
class Footprint:
    """Bytes: `result` in all, `kept` and `transient` per sample, `cell` per pair of samples."""

    result: int
    kept: int
    transient: int
    cell: int
    device: str = "cpu"
    m: int = 1 << 62  # columns in all
    by_rows: int = 0  # `RowMap.together`; 0 for pairs

    @property
    def columns(self) -> int:
        """Column blocks at once."""
        return 2 if self.device == "cuda" and AHEAD else 1

    def room(self, memory: int) -> int:
        """What is left for blocks and their making."""
        return int(memory * USABLE[self.device]) - self.result

    def memory(self, room: int) -> int:
        """The budget that leaves so much room."""
        return int((room + self.result) / USABLE[self.device]) + 1

    def besides(self, rows: int, capture: int, workspace: int) -> int:
        """What a plan takes besides the result and the blocks that it holds."""
        return TILES * rows * min(rows, self.m) * self.cell + capture + BUFFERS[self.device] * workspace

    def least(self, rows: int, capture: int, workspace: int, held: int = 1) -> int:
        """What a plan that holds so many row blocks, and lets columns pass by, takes besides the result."""
        return (held + self.columns) * rows * self.kept + self.besides(rows, capture, workspace)

    def making(self, room: int, part: int = 1) -> tuple[int, int]:
        """What of the room the making of a block and a temporary of a contraction may take; a `part`-th of the usual
        where that is all that is wanted to hold every block."""
        # Powers of two: what is free may differ a little from run to run, and these decide the bits of a tile.
        workspace = _floor(room // (32 * part), TILE_WORKSPACE[self.device])
        capture = _floor(room // (4 * part), TILE_CAPTURE[self.device])
        # Of one sample alone two are captured, so that no plan of fewer would take less.
        return max(min(2, part) * (self.kept + self.transient), capture), max(self.cell, workspace)


def plan(n: int, m: int, symmetric: bool, memory: int, size: Footprint, tile: int | None = None) -> TilePlan:
    """Cut the budget: the result, the blocks, the making of a block, the contraction's temporaries."""
    if not size.by_rows and (cut := _at_once(n, m, symmetric, memory, size, tile)) is not None:
        return cut
    room = size.room(memory)
    capture, workspace = size.making(room)
    fewest = tile or max(1, min(n, size.by_rows))
    least = size.least(fewest, capture if room > 0 else 0, workspace if room > 0 else 0)
    if room < least:  # small temporaries cost time, which is less than a refusal
        capture, workspace = size.kept + size.transient, size.cell
        least = size.least(fewest, capture, workspace)
    if room < least:
        what = "one pair of samples" if tile is None else f"a tile of {tile} samples a side"
        fix = ", or store= to keep the result on disk" if room + size.result >= least else ""
        raise MemoryBudgetError(
            f"memory={memory} bytes is too small: the result takes {size.result} and {what} {least} more, and "
            f"{1 - USABLE[size.device]:.0%} are for the allocator. Give at least memory={size.memory(least)}{fix}."
        )
    rows = tile or min(max(n, m), LARGEST[size.device])
    held = HELD[size.device]
    while tile is None and rows > fewest and size.least(rows, capture, workspace, held) > room:
        # Small tiles cost more than fewer blocks held; steps of a sixteenth find the largest that fits closely enough.
        if rows <= SMALL and held > 1:
            held -= 1
        else:
            rows = max(fewest, rows * 15 // 16)
    if tile is None and size.by_rows and rows < n:
        rows -= rows % size.by_rows
    elif tile is None:
        rows = _even(max(n, m), rows)
    return grouped(TilePlan(n, m, symmetric, rows, capture, workspace), memory, size)


def _at_once(n: int, m: int, symmetric: bool, memory: int, size: Footprint, tile: int | None) -> TilePlan | None:
    """A plan by which every sample is prepared only once, if the budget has room for one.

    To prepare samples again costs more than anything that is gained by large tiles or large temporaries.
    """
    room = size.room(memory)
    for part in (1, 2, 4):
        capture, workspace = size.making(room, part)
        rows = tile or min(max(n, m), LARGEST[size.device])
        while True:
            cut = TilePlan(n, m, symmetric, tile or _even(max(n, m), rows), capture, workspace)
            if (held := held_by(cut, room, size)).once:
                return held
            if tile or rows == 1:
                break
            rows //= 2
    return None


def grouped(cut: TilePlan, memory: int, size: Footprint) -> TilePlan:
    """The plan with as many blocks held at once as the budget has room for."""
    held = held_by(cut, size.room(memory), size)
    if held.group == 0:
        least = size.least(cut.rows, cut.capture, cut.workspace)
        raise MemoryBudgetError(
            f"memory={memory} bytes is too small for tiles of {cut.rows} samples a side, with which this was begun. "
            f"Give at least memory={size.memory(least)}."
        )
    return held


def held_by(cut: TilePlan, room: int, size: Footprint) -> TilePlan:
    """The plan with as many row blocks held as there is room for: none, if not even one fits; or with all columns."""
    free = room - size.besides(cut.rows, cut.capture, cut.workspace)
    if size.by_rows:
        return replace(cut, group=int(free >= (1 + size.columns) * cut.rows * size.kept))
    if cut.symmetric and cut.n * size.kept <= free:  # rows are their own columns: nothing passes by
        return replace(cut, group=cut.grid[0], columns=False)
    if not cut.symmetric and cut.m < cut.n and (cut.m + min(cut.n, cut.rows)) * size.kept <= free:
        return replace(cut, group=1, columns=True)
    block = max(1, cut.rows * size.kept)
    return replace(cut, group=max(0, min(cut.grid[0], free // block - size.columns)), columns=False)


def _floor(v: int, most: int) -> int:
    """The largest power of two that is at most v, or `most`."""
    return most if v >= most else 1 << max(0, max(0, v).bit_length() - 1)


def _even(count: int, most: int) -> int:
    """Blocks about equal, at most `most`, and aligned where they are large (matrix units want multiples)."""
    rows = -(-count // -(-count // most))
    if rows < 256 or rows == count:
        return rows
    return -(-rows // 64) * 64 if -(-rows // 64) * 64 <= most else most // 64 * 64
