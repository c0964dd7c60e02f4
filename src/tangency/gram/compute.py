"""`compute`: what is missing, made here or on workers, and put where it belongs."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.memory import gram_budget, ran_out
from .._base.progress import bar
from .._base.types import Executor, Inputs, Memory, Spec, StorePlace
from ..errors import InputError, MemoryBudgetError, PerformanceWarning, StoreError, StoreWarning, WorkerLost
from ..kernels.kernel import Kernel, all_finite, check_tile
from .executors import check_executor, connect, results, workers_here
from .gram import Gram
from .manifest import MOST_TILES, Witness, manifest
from .plan import Footprint, TilePlan, grouped, held_by, plan
from .rows import NO_COLUMNS, RowMap
from .shelf import Shelf, shelf
from .source import Watched, batch, source
from .spill import disks
from .store import Store
from .sweep import RowSweep, Sweep, TileTask, sweep_of, tile_tasks
from .target import InMemory, Overtaken, Stored, Target
from .witness import Sample, require_witness, some_samples, witness
from .work import CPU, Blocks, TileJob, perform

# Tiles between two looks at what other processes have put into a store meanwhile (heuristic).
LOOK = 64
Hashes = dict[str, str | None]


def compute(
    kernel: Kernel,
    x1: object,
    x2: object = None,
    *,
    store: StorePlace | None = None,
    tile: int | None = None,
    memory: Memory = None,
    executor: Executor | str | None = None,
    progress: bool = True,
) -> Gram:
    """The Gram matrix of x1 with x2 (with itself if left out), tile by tile, for any number of samples.

    Inputs: a tensor, NumPy array or memmap, zarr array, a tuple or dict of these, a `Dataset` (`tg.from_dataset`); only
    the blocks at work are loaded. `memory` bounds what is allocated on the way, on the kernel's device and by each
    worker, beyond the model (default: what is free on a GPU; on a CPU 70 % of it, shared by the workers on this
    machine). The symmetric half is computed once.

    `store`: a folder or zarr URL. Tiles are written there as they are finished; calling again with the same arguments
    goes on where it stopped, and returns at once when all is there. `tile`: samples on a side of a tile (default: from
    the memory). `executor`: "gpus" for a worker on every visible GPU, `tg.Workers`, `tg.RayExecutor`, or anything with
    `submit(f, *args).result()`. `progress` shows a bar on a terminal.

    >>> import tangency as tg
    >>> gram = tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(100, 3), memory="64MB")
    >>> gram.shape, (gram @ torch.ones(100)).shape
    (torch.Size([100, 100]), torch.Size([100]))
    """
    return Run(kernel, x1, x2, memory, executor).compute(store, tile, progress)


@dataclass(frozen=True)
class Facts:
    """What a run must know to be planned, found out once, from a sample or two."""

    shape: torch.Size  # of the whole result
    dtype: torch.dtype
    memory: int
    size: Footprint


class _Larger(Exception):
    """Blocks take more than the budget has room for: a signal of a run to itself, never shown to users."""


@contextmanager
def _told(when: str) -> Iterator[None]:
    """No raw exception where memory runs out: there is no smaller block than one sample to go on with."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not ran_out(e):
            raise
        raise MemoryBudgetError(
            f"memory ran out {when} ({str(e).splitlines()[0][:200] if str(e) else type(e).__name__}). Free some, use a "
            "machine with more, or leave parameters out: trainable=…"
        ) from e


class Run:
    """A kernel, or a map of rows, with its inputs, a memory budget, and who computes it.

    `function` is what the command line was given to make them.
    """

    def __init__(
        self,
        kernel: Kernel | RowMap,
        x1: object,
        x2: object = None,
        memory: Memory = None,
        executor: Executor | str | None = None,
        function: str | None = None,
    ) -> None:
        if not isinstance(kernel, (Kernel, RowMap)):
            raise InputError(
                f"kernel is a {type(kernel).__name__}; needed: a tangency kernel, e.g. tg.trace_ntk(model)."
            )
        self.kernel, self.function, self._memory = kernel, function, checks.memory(memory)
        check_executor(executor, kernel)
        self.executor = executor
        self.x = Watched(source(x1, "x1"), "x1")
        self.y = None if x2 is None else Watched(source(x2, "x2"), "x2")
        self.n = len(self.x)
        # Rows that have values by themselves are a matrix with one column, which has no samples.
        self.m = 1 if isinstance(kernel, RowMap) else self.n if self.y is None else len(self.y)
        self.symmetric = self.y is None and not isinstance(kernel, RowMap)

    def compute(self, store: StorePlace | Shelf | None, tile: int | None, progress: bool) -> Gram:
        """The Gram matrix, in memory or in the store; blocks get smaller where memory runs out all the same."""
        if tile is not None:
            checks.positive(tile, "tile", "a number of samples")
            tile = min(tile, max(self.n, self.m))
        store = None if store is None else shelf(store)  # once: the working folder may change
        with torch.no_grad():
            while True:
                with _told("while two samples were looked at, to find out what one takes"):
                    target = self.in_memory(tile) if store is None else self.stored(store, tile)
                    missing = target.missing()
                try:
                    if missing:
                        self._fill(target, missing, progress)
                    return target.gram()
                except Overtaken:  # go on with what another process has begun, if it is the same
                    continue
                except (_Larger, MemoryError, RuntimeError) as e:
                    # A footprint is an estimate, and other processes use the memory too.
                    if not isinstance(e, _Larger) and not ran_out(e):
                        raise
                    cuda = isinstance(e, torch.OutOfMemoryError)
                    why = str(e) if isinstance(e, _Larger) else f"{'CUDA' if cuda else 'the CPU'} ran out of memory"
                # Not in the except clause: the exception's frames hold tensors.
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                tile = self._smaller(target, why)
                warnings.warn(f"{why}; going on with blocks of {tile} samples.", PerformanceWarning, stacklevel=3)

    def _smaller(self, target: Target, why: str) -> int:
        """Samples on a side of a smaller tile; where there is none, what was needed."""
        if target.cut.rows > 1:
            return target.smaller()
        size, taken = self.facts.size, self.facts.memory
        raise MemoryBudgetError(
            f"{why} with blocks of a single sample, which takes {size.kept} bytes and {size.transient} more while it "
            f"is captured; the budget was {taken}. Use a machine with more memory free, leave parameters out "
            "(trainable=), or halve what is kept: dtype='float16'."
        )

    def in_memory(self, tile: int | None) -> Target:
        """One tensor, to be filled."""
        facts = self.facts
        return InMemory(plan(self.n, self.m, self.symmetric, facts.memory, facts.size, tile), facts.shape)

    def stored(self, where: StorePlace | Shelf, tile: int | None) -> Target:
        """The store, begun or gone on with. One that is finished costs no more than hashing the inputs and a look at a
        few samples."""
        place = shelf(where)
        store = Store.find(place)
        spec, hashes = self._job()
        if store is None:
            facts = self.facts
            # Tiles are written as they are finished: the result takes no memory.
            cut = plan(self.n, self.m, self.symmetric, facts.memory, replace(facts.size, result=0), tile)
            if cut.count > MOST_TILES:
                side = math.isqrt(max(cut.n, cut.m) ** 2 // MOST_TILES) + 1
                raise MemoryBudgetError(
                    f"with tiles of {cut.rows} samples a side the store would be {cut.count:,} files; at most "
                    f"{MOST_TILES:,}. Give more memory, or tile={side} or more."
                )
            about = manifest(spec, hashes, facts.shape, facts.dtype, cut, self.witness)
            store = Store.planned(place, about, self.function)
            return Stored(store, cut, partial(self._heal, store), self._require_unchanged)
        self._require_same(store, spec, hashes, tile)
        cut = store.plan
        if not store.complete:
            cut = grouped(cut, self.facts.memory, replace(self.facts.size, result=0))
        return Stored(store, cut, partial(self._heal, store), self._require_unchanged)

    def require_same(self, store: Store) -> None:
        """Refuse a store that holds something else."""
        self._require_same(store, *self._job(), None)

    def _job(self) -> tuple[Spec, Hashes]:
        """The kernel's spec and the inputs' hashes."""
        no_columns = NO_COLUMNS if isinstance(self.kernel, RowMap) else None
        return self.kernel.spec(), {"x1": self.x.digest(), "x2": no_columns if self.y is None else self.y.digest()}

    def _require_same(self, store: Store, spec: Spec, hashes: Hashes, tile: int | None) -> None:
        store.require_same(spec, hashes, (self.n, self.m), self.symmetric, tile)
        require_witness(store.url, store.manifest, self.witness)

    def _require_unchanged(self, store: Store) -> None:
        """Refuse to make a tile with a model that was changed since the store was opened."""
        # The hash of the weights tells at once; what no hash sees, the numbers tell.
        store.require_kernel(self.kernel.spec())
        require_witness(store.url, store.manifest, witness(self.kernel, self.samples))

    @cached_property
    def samples(self) -> list[Sample]:
        """Some of each side, one by one."""
        return some_samples(self.x, self.y)

    @cached_property
    def witness(self) -> Witness:
        """What the kernel gives for the samples."""
        return witness(self.kernel, self.samples)

    @cached_property
    def facts(self) -> Facts:
        """Shape and type of the result, the budget, and what a sample and an entry take of it."""
        few: list[Inputs] = []
        kept = transient = 0
        for side, samples in enumerate((self.x, self.y)):
            if samples is not None:
                few.append(self._largest(side, len(samples)))
        if len(few) > 1:
            assert isinstance(self.kernel, Kernel)
            self.kernel.alike(*few)
        for x in few:
            held, besides = self.kernel.footprint(x)
            kept, transient = max(kept, held), max(transient, besides)
        first = tree.take(few[0], slice(0, 1))
        if isinstance(self.kernel, RowMap):
            cell, by_rows = self.kernel.values(first)[:, :, None], self.kernel.together
        else:
            cell, by_rows = self.kernel.entry(first), 0
            check_tile(cell, 1, 1)
        entry = cell.numel() * cell.element_size()
        size = Footprint(self.n * self.m * entry, kept, transient, entry, cell.device.type, self.m, by_rows)
        shape = [self.n, self.m] if cell.dim() == 2 else [self.n, cell.shape[1], self.m, cell.shape[3]]
        memory = self._memory
        if memory is None:
            memory = gram_budget(cell.device, workers_here(self.executor))
        return Facts(torch.Size(shape), cell.dtype, memory, size)

    def _largest(self, side: int, n: int) -> Inputs:
        """A sample or two, from the end with the larger ones: lengths may differ, and be sorted."""
        largest, most = None, -1
        for block in (slice(0, min(2, n)), slice(max(0, n - 2), n)):
            x, numbers = self._load(side, block), 0
            for _, v in tree.leaves(x):
                numbers += v[0].numel()
            if numbers > most:
                largest, most = x, numbers
        assert largest is not None
        return largest

    def _fill(self, target: Target, missing: set[tuple[int, int]], progress: bool) -> None:
        """Compute what is missing."""
        count = target.cut.count
        show = progress and len(missing) > 1
        try:
            with bar(count, "kernel", "tile", done=count - len(missing), show=show) as step, closing(target):
                if self.executor is None:
                    self._here(target, missing, step)
                else:
                    self._there(target, missing, step, self.executor)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(target.stopped()) from None
        target.require_all()

    def _here(self, target: Target, missing: set[tuple[int, int]], step: Callable[[int], object]) -> None:
        sweep = sweep_of(self.kernel, self._load, target.cut)
        with closing(sweep):
            self._sweep(sweep, target, missing, step)

    def _sweep(
        self, sweep: Sweep | RowSweep, target: Target, missing: set[tuple[int, int]], step: Callable[[int], object]
    ) -> None:
        cut = self._held(sweep, target, missing) if isinstance(sweep, Sweep) else target.cut
        for planned in tile_tasks(cut, missing, LOOK * cut.group, target.first):
            task = planned.without(target.finished() & missing)
            if planned.count > task.count:  # another process was quicker
                step(planned.count - task.count)
            for i, j, tile in sweep.tiles(task) if task.count else ():
                target.put(i, j, tile)
                step(1)
                if target.bad is not None:
                    break
            if target.bad is not None:
                break
        target.flush()
        # Only now, since a GPU works on while we look: the tile that was bad may be some tiles back.
        if target.bad is not None:
            raise sweep.diagnose(*target.bad)

    def _held(self, sweep: Sweep, target: Target, missing: set[tuple[int, int]]) -> TilePlan:
        """The plan with as many blocks held as the budget has room for, by what the first one really takes."""
        cut, size = target.cut, self.facts.size
        size = replace(size, result=size.result if isinstance(target, InMemory) else 0)
        begun = sweep.begin(next(tile_tasks(cut, missing, None, target.first)).rows[0])
        # Other blocks may have longer samples, to which the guess still applies: it is right or wrong in proportion.
        kept = -(-size.kept * begun.kept // max(1, begun.guessed))
        room, measured = size.room(self.facts.memory), replace(size, kept=kept)
        held = held_by(cut, room, measured)
        if held.group == 0 and cut.rows > 1:
            raise _Larger(f"a sample takes {begun.kept} bytes, where {begun.guessed} were expected")
        if begun.transient > cut.capture:
            held = held_by(replace(cut, capture=begun.transient), room, measured)
        # What decides the bits of a tile is as it was.
        sweep.disks = disks(target.folder)
        held = replace(cut, group=max(1, held.group), columns=held.columns)
        sweep.hold(held)
        return held

    def _there(
        self, target: Target, missing: set[tuple[int, int]], step: Callable[[int], object], executor: Executor | str
    ) -> None:
        cut = target.cut
        with connect(executor) as (submit, workers):
            # The witness goes along: a worker must give the same numbers before its tiles are believed.
            job = TileJob.of(self.kernel, cut, self.samples, self.witness)
            # Tasks large enough to reuse their rows, small enough that all workers stay busy (heuristic).
            most = max(1, min(16 * cut.group, len(missing) // (4 * workers())))
            tasks = tile_tasks(cut, missing, most, target.first)
            for tiles in results(submit, ((perform, job, task, self._blocks(cut, task)) for task in tasks), workers):
                if not isinstance(tiles, list):
                    raise WorkerLost(f"the executor returned a {type(tiles).__name__} in place of a task's tiles.")
                for i, j, tile in tiles:
                    target.put(i, j, torch.from_numpy(tile))
                    step(1)
        target.flush()

    def _blocks(self, cut: TilePlan, task: TileTask) -> Blocks:
        """What a worker needs for a task, on the CPU."""
        side = 0 if cut.symmetric else 1
        numbers = {(0, i) for i in task.rows}
        if not isinstance(self.kernel, RowMap):
            numbers |= {(side, j) for j, _ in task.columns}
        blocks: dict[tuple[int, int], Inputs] = {}
        for side, k in sorted(numbers):
            block = cut.block(k, side)
            blocks[side, block.start] = tree.to((self.y if side and self.y is not None else self.x).take(block), CPU)
        return blocks

    def tile(self, cut: TilePlan, i: int, j: int) -> Tensor:
        """A single tile, as the whole run would make it."""
        sweep = sweep_of(self.kernel, self._load, cut)
        with torch.no_grad():
            tile = next(iter(sweep.tiles(TileTask((i,), ((j, (i,)),)))))[2].cpu()
        if not all_finite(tile):
            raise sweep.diagnose(i, j)
        return tile

    def _heal(self, store: Store, i: int, j: int, why: Exception) -> Tensor:
        """A damaged tile, made anew and put back."""
        self._require_unchanged(store)
        warnings.warn(f"{why} It was computed again.", StoreWarning, stacklevel=2)
        tile = self.tile(store.plan, i, j)
        try:
            store.write(i, j, tile.numpy())
        except StoreError as e:  # a store that may only be read
            warnings.warn(f"tile {i}, {j} could not be put back: {e}", StoreWarning, stacklevel=2)
        return tile

    def _load(self, side: int, block: slice) -> Inputs:
        """Samples of a side as the kernel takes them."""
        samples = self.y if side and self.y is not None else self.x
        # Errors number the rows of what they name: those of the block.
        name = f"x{side + 1}" + f"[{block.start}:{block.stop}]" * (block.start > 0)
        return batch(self.kernel, samples.take(block), name, block.stop - block.start)
