"""Making tiles: prepare a group of row blocks once, let the column blocks pass by.

A column block that is slow to make is kept for the next sweep: on a GPU in pinned host memory, if it is quickly copied,
on a CPU on disk (`spill.py`), if it is quickly read. On a GPU the next one can be prepared on a stream of its own while
the present one is contracted (`plan.AHEAD`).
"""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .._base import tree
from .._base.memory import available_memory, peak_memory
from .._base.types import Inputs, T
from ..errors import NonFiniteError
from ..kernels.kernel import Kernel, Prepared, check_tile
from . import plan
from .indices import length
from .plan import TilePlan
from .prepared import moved, size_of
from .rows import RowMap
from .spill import Spill

Load = Callable[[int, slice], Inputs]  # (side, samples) → inputs as the kernel takes them
# Bytes per second from pinned host memory to a GPU, and for a first copy into memory that must be pinned (heuristics).
HOST_BANDWIDTH, PINNING = 2.5e10, 2e9
# The part of the machine's free memory that kept blocks may take (heuristic).
HOST_SHARE = 0.4


@dataclass(frozen=True)
class TileTask:
    """A sweep: row blocks, and the column blocks with the rows that each must meet."""

    rows: tuple[int, ...]
    columns: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def count(self) -> int:
        """How many tiles it makes."""
        return sum(len(rows) for _, rows in self.columns)

    def without(self, done: Collection[tuple[int, int]]) -> "TileTask":
        """What is left of it when these tiles are there."""
        left = ((j, tuple(i for i in rows if (i, j) not in done)) for j, rows in self.columns)
        columns = tuple((j, rows) for j, rows in left if rows)
        return TileTask(tuple(i for i in self.rows if any(i in rows for _, rows in columns)), columns)


def tile_tasks(
    cut: TilePlan, missing: Collection[tuple[int, int]], most: int | None = None, first: int = 0
) -> Iterator[TileTask]:
    """Sweeps that make the missing tiles, each of about `most` tiles at most, beginning with row block `first`."""
    high = cut.grid[0]
    by_row: dict[int, list[int]] = {}
    for i, j in sorted(missing):
        by_row.setdefault(i, []).append(j)
    starts = list(range(0, high, cut.group))
    first = min(first // cut.group, len(starts) - 1)
    for start in starts[first:] + starts[:first]:
        rows = tuple(i for i in range(start, min(start + cut.group, high)) if i in by_row)
        columns: dict[int, list[int]] = {}
        for i in rows:
            for j in by_row[i]:
                columns.setdefault(j, []).append(i)
        order = sorted(columns)
        step = len(order) if most is None else max(1, most // max(1, len(rows)))
        for k in range(0, len(order), step):
            passing = tuple((j, tuple(columns[j])) for j in order[k : k + step])
            yield TileTask(tuple(i for i in rows if any(i in met for _, met in passing)), passing)


def sweep_of(maker: Kernel | RowMap, load: Load, cut: TilePlan) -> "Sweep | RowSweep":
    """What makes the tiles of a plan, a task at a time."""
    return RowSweep(maker, load, cut) if isinstance(maker, RowMap) else Sweep(maker, load, cut)


class RowSweep:
    """Tiles [n, c, 1, k] of rows that have values by themselves; nothing is kept from one to the next."""

    def __init__(self, rows: RowMap, load: Load, cut: TilePlan) -> None:
        self.maker, self.load, self.cut = rows, load, cut

    def tiles(self, task: TileTask) -> Iterator[tuple[int, int, Tensor]]:
        """(i, 0, tile) of every row block of the task, as `Sweep.tiles`."""
        for i in task.rows:
            yield i, 0, self._values(i)[:, :, None]

    def close(self) -> None:
        """Nothing was put aside."""
        return None

    def diagnose(self, i: int, j: int) -> NonFiniteError:
        """What made tile (i, 0) not finite. Cost: makes it again."""
        values = self._values(i)
        try:
            self.maker.diagnose(values)
        except NonFiniteError as e:
            return e.shifted(self.cut.block(i).start)
        return _overflow(i, j)

    def _values(self, i: int) -> Tensor:
        block = self.cut.block(i)
        inputs = self.load(0, block)
        try:
            return self.maker.values(inputs, self.cut.capture)
        except NonFiniteError as e:
            raise e.shifted(block.start) from None


class Begun(NamedTuple):
    """What the first block of a run took, where it was known only from two samples before."""

    kept: int  # bytes per sample that it holds
    guessed: int  # and what was thought of samples like these
    transient: int  # bytes that were held at the peak besides, as far as that shows; else 0


class Sweep:
    """The tiles of pairs of samples, a task at a time."""

    def __init__(self, kernel: Kernel, load: Load, cut: TilePlan) -> None:
        self.maker, self.load, self.cut = kernel, load, cut
        self.disks: Sequence[Path] = ()  # folders where prepared blocks may be put aside
        self.rows: dict[int, Prepared] = {}
        self._passed: dict[int, Prepared] = {}  # columns, where all are held
        self._columns_side = 0 if cut.symmetric else 1
        cuda = kernel.device is not None and kernel.device.type == "cuda"
        self._side = SideStream(kernel.device) if cuda and plan.AHEAD else None
        self._together = plan.TOGETHER["cuda" if cuda else "cpu"]
        self._aside: Host | Spill | None = None  # blocks that later sweeps meet again
        self._later = 0  # the first row block of the sweeps to come
        self.hold(cut)

    def hold(self, cut: TilePlan) -> None:
        """Go by a plan with the same tiles that holds more or fewer of them."""
        self.cut = cut
        cuda = self.maker.device is not None and self.maker.device.type == "cuda"
        high, wide = cut.grid
        sweeps = -(-high // cut.group)
        self.close()
        if cut.columns or sweeps == 1:
            self._aside = None
        elif cuda:
            # A block on the host pays off only if several sweeps will meet it.
            self._aside = Host(self.maker.device, uses=sweeps // 2) if sweeps > 2 else None
        elif self.disks:
            # Of a symmetric matrix those of the first sweep are met no more, the last ones in every sweep to come.
            blocks, uses = (high - cut.group, sweeps / 2) if cut.symmetric else (wide, sweeps - 1)
            self._aside = Spill(self.disks, blocks, uses)

    def close(self) -> None:
        """Give back what was put aside."""
        if isinstance(self._aside, Spill):
            self._aside.close()

    def tiles(self, task: TileTask) -> Iterator[tuple[int, int, Tensor]]:
        """(i, j, tile) of every tile of the task. A GPU may still be at work on a tile, and nobody has looked at it."""
        self.rows = {i: a for i, a in self.rows.items() if i in task.rows}
        held = set(task.rows) if self.cut.symmetric else set()  # columns that are rows of this sweep as well
        self._later = (min(task.rows) // self.cut.group + 1) * self.cut.group
        passing = self._columns([j for j, _ in task.columns if j not in held])
        if self._side is not None:
            self._side.follow()
        for i in task.rows:
            if i not in self.rows:
                self.rows[i] = self._block(0, i)
        if self._aside is not None and self.cut.symmetric:
            self._aside.forget_below(self._later)
        for j, rows in task.columns:
            b = self.rows[j] if j in held else next(passing)
            for k in range(0, len(rows), self._together):
                few = rows[k : k + self._together]
                tiles = self.maker.pairs([self.rows[i] for i in few], b, self.cut.workspace)
                for i in few:
                    tile = tiles.pop(0)
                    check_tile(tile, length(self.cut.block(i)), length(self.cut.block(j, self._columns_side)))
                    yield i, j, tile
            del b  # the next one is made in its place
        passing.close()

    def begin(self, i: int) -> Begun:
        """Make row block i, which is held for the first task, and say what it took."""
        device = torch.device("cpu") if self.maker.device is None else self.maker.device
        inputs = self.load(0, self.cut.block(i))
        guessed = self.maker.footprint(inputs)[0]
        self._later = (i // self.cut.group + 1) * self.cut.group
        before = peak_memory(device)
        block = self.rows[i] = self._block(0, i, inputs)
        size, after = size_of(block), peak_memory(device)
        # The peak of a process only grows: where it did, it was this block's.
        transient = after[1] - before[0] - size if after[1] > before[1] else 0
        return Begun(-(-size // tree.size(inputs)), guessed, max(0, transient))

    def diagnose(self, i: int, j: int) -> NonFiniteError:
        """What made tile (i, j) not finite. Cost: prepares both sides again."""
        for side, k in ((0, i), (self._columns_side, j)):
            prepared = self._prepare(side, k)
            try:
                self.maker.diagnose(prepared)
            except NonFiniteError as e:
                return e.shifted(self.cut.block(k, side).start)
        return _overflow(i, j)

    def _columns(self, blocks: list[int]) -> Generator[Prepared, None, None]:
        """The column blocks in turn; on a GPU the next is begun when the contraction of the present one has been."""
        ahead = None
        for k, j in enumerate(blocks):
            b = self._block(self._columns_side, j) if ahead is None else ahead
            if self._side is None:
                yield b
                del b
                continue
            self._side.join()
            yield b
            contracted = self._side.mark()
            ahead = self._side.run(self._block, self._columns_side, blocks[k + 1]) if k + 1 < len(blocks) else None
            # The memory of b goes back to the side stream's pool: nothing may be put there before b was used.
            self._side.wait(contracted)
            del b

    def _block(self, side: int, k: int, inputs: Inputs | None = None) -> Prepared:
        if self.cut.columns and side == 1:
            if k not in self._passed:
                self._passed[k] = self._prepare(side, k)
            return self._passed[k]
        # On a disk goes only what will be met again; what is in pinned memory is dropped when it no longer is.
        known = isinstance(self._aside, Spill) and (side, k) in self._aside
        again = k >= self._later if self.cut.symmetric else side == 1 and self._later < self.cut.grid[0]
        if self._aside is None or (isinstance(self._aside, Spill) and not (known or again)):
            return self._prepare(side, k, inputs)
        load = partial(self._known, side, k) if inputs is None else lambda: inputs
        return self._aside.get((side, k), load, lambda x: self._prepare(side, k, x))

    def _known(self, side: int, k: int) -> Inputs:
        """The block's samples, of which the kernel knows all it must find out first: what follows can be timed."""
        inputs = self.load(side, self.cut.block(k, side))
        self.maker.footprint(inputs)
        return inputs

    def _prepare(self, side: int, k: int, inputs: Inputs | None = None) -> Prepared:
        block = self.cut.block(k, side)
        inputs = self.load(side, block) if inputs is None else inputs
        try:
            return self.maker.prepare(inputs, self.cut.capture)
        except NonFiniteError as e:
            raise e.shifted(block.start) from None


def _overflow(i: int, j: int) -> NonFiniteError:
    return NonFiniteError(
        f"the kernel overflowed in tile {i}, {j} although all gradients are finite; use a wider dtype.", 0, ""
    )


class SideStream:
    """A second queue of work for a GPU."""

    def __init__(self, device: torch.device | None) -> None:
        # First in line: its many small kernels slip in where the contraction's few large ones leave room.
        self.device, self.stream = device, torch.cuda.Stream(device, priority=-1)

    def run(self, f: Callable[[int, int], T], side: int, k: int) -> T:
        """f(side, k) with everything that it launches and allocates on this stream."""
        with torch.cuda.stream(self.stream):
            return f(side, k)

    def follow(self) -> None:
        """This stream waits for all that the main one has been given."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """The main stream waits for all that this one has been given."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def mark(self) -> torch.cuda.Event:
        """An event that happens when the main stream has done what it was given until now."""
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """This stream goes on after the event only."""
        self.stream.wait_event(event)


class Host:
    """Prepared blocks in pinned host memory, if the second one shows that copying beats preparing again over the `uses`
    that it will find on average (the first one is slow for other reasons).

    First come, first kept: sweeps pass the same blocks in the same order, where throwing out the oldest would throw out
    the one needed next.
    """

    def __init__(self, device: torch.device | None, uses: int, room: int | None = None) -> None:
        self.device, self.uses = device, uses
        self.room = int(HOST_SHARE * available_memory()) if room is None else room
        self.kept: dict[tuple[int, int], Prepared] = {}
        self.worth: bool | None = None  # not known yet
        self._made = 0

    def get(self, key: tuple[int, int], load: Callable[[], Inputs], prepare: Callable[[Inputs], Prepared]) -> Prepared:
        """The block (side, number), from here or made; the first ones are timed, to know which is quicker."""
        if key in self.kept:
            return moved(self.kept[key], lambda t: t.to(self.device, non_blocking=True))
        if self.worth is False:
            return prepare(load())
        # Until it is known whether blocks are worth keeping, the GPU is waited for, or the times would mean nothing.
        inputs = load()
        _synchronize()
        start = time.perf_counter()
        made = prepare(inputs)
        _synchronize()
        seconds, size = time.perf_counter() - start, size_of(made)
        self._made += 1
        if self.worth is None and self._made > 1:
            self.worth = self.uses * (seconds - size / HOST_BANDWIDTH) > size / PINNING
        if self.worth and size <= self.room:
            self.room -= size
            self.kept[key] = moved(made, _pinned)
        return made

    def forget_below(self, block: int) -> None:
        """Drop blocks that no later sweep will meet."""
        for key in [key for key in self.kept if key[1] < block]:
            self.room += size_of(self.kept.pop(key))


def _pinned(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="cpu", pin_memory=torch.cuda.is_available()).copy_(t)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
