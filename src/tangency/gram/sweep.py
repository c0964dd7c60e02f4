"""Making tiles: prepare a group of row blocks once, let the column blocks pass by.

On a GPU a column block that is slow to make and quick to copy is kept in pinned host memory for the next sweep, and the
next one can be prepared on a stream of its own while the present one is contracted (`plan.AHEAD`).
"""

import os
import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from .._base.types import Inputs, T
from ..errors import NonFiniteError
from ..kernels.kernel import Kernel, Prepared, check_tile
from . import plan
from .indices import length
from .plan import TilePlan
from .rows import RowMap

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


class Sweep:
    """The tiles of pairs of samples, a task at a time."""

    def __init__(self, kernel: Kernel, load: Load, cut: TilePlan) -> None:
        self.maker, self.load, self.cut = kernel, load, cut
        self.rows: dict[int, Prepared] = {}
        self._columns_side = 0 if cut.symmetric else 1
        cuda = kernel.device is not None and kernel.device.type == "cuda"
        self._side = SideStream(kernel.device) if cuda and plan.AHEAD else None
        self._together = plan.TOGETHER["cuda" if cuda else "cpu"]
        sweeps = -(-cut.grid[0] // cut.group)
        # A block on the host pays off only if several sweeps will meet it.
        self._host = Host(kernel.device, uses=sweeps // 2) if cuda and sweeps > 2 else None

    def tiles(self, task: TileTask) -> Iterator[tuple[int, int, Tensor]]:
        """(i, j, tile) of every tile of the task. A GPU may still be at work on a tile, and nobody has looked at it."""
        self.rows = {i: a for i, a in self.rows.items() if i in task.rows}
        held = set(task.rows) if self.cut.symmetric else set()  # columns that are rows of this sweep as well
        passing = self._columns([j for j, _ in task.columns if j not in held])
        if self._side is not None:
            self._side.follow()
        for i in task.rows:
            if i not in self.rows:
                self.rows[i] = self._block(0, i)
        if self._host is not None and self.cut.symmetric:
            self._host.forget_below(min(task.rows) + self.cut.group)
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

    def _block(self, side: int, k: int) -> Prepared:
        if self._host is None:
            return self._prepare(side, k)
        return self._host.get((side, k), lambda: self._known(side, k), lambda x: self._prepare(side, k, x))

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
        self.room = int(HOST_SHARE * _available()) if room is None else room
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
        seconds, size = time.perf_counter() - start, _bytes(made)
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
            self.room += _bytes(self.kept.pop(key))


def moved(prepared: Prepared, f: Callable[[Tensor], Tensor]) -> Prepared:
    """A prepared batch with every tensor in it replaced."""
    if isinstance(prepared, Tensor):
        return f(prepared)
    if isinstance(prepared, dict):
        return {k: moved(v, f) for k, v in prepared.items()}
    if isinstance(prepared, tuple) and hasattr(prepared, "_fields"):  # a named tuple
        return type(prepared)(*(moved(v, f) for v in prepared))
    if isinstance(prepared, (tuple, list)):
        return type(prepared)(moved(v, f) for v in prepared)
    if is_dataclass(prepared) and not isinstance(prepared, type):
        return replace(prepared, **{k.name: moved(getattr(prepared, k.name), f) for k in fields(prepared) if k.init})
    return prepared


def _bytes(prepared: Prepared) -> int:
    sizes: list[int] = []

    def count(t: Tensor) -> Tensor:
        """t itself; its size is noted."""
        sizes.append(t.numel() * t.element_size())
        return t

    moved(prepared, count)
    return sum(sizes)


def _pinned(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="cpu", pin_memory=torch.cuda.is_available()).copy_(t)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _available() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
