"""`compute`: what is missing, made here or on workers, and put where it belongs."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.memory import gram_budget
from .._base.progress import bar
from .._base.types import Inputs
from ..errors import (
    InputError,
    MemoryBudgetError,
    PerformanceWarning,
    StoreError,
    StoreMismatch,
    StoreWarning,
    WorkerLost,
)
from ..kernels.kernel import Kernel, all_finite
from .executors import check, connect, results
from .gram import Gram
from .manifest import MOST_TILES, differences, manifest
from .plan import Footprint, Task, TilePlan, grouped, plan
from .shelf import shelf
from .source import Source, Watched, batch, source
from .store import Store
from .sweep import Sweep
from .target import InMemory, Stored, Target
from .witness import Sample, positions, precision, require_witness, witness
from .work import Job, perform

# Tiles between two looks at what other processes have put into a store meanwhile (heuristic).
LOOK = 64


def compute(
    kernel: Kernel,
    x1: Any,
    x2: Any = None,
    *,
    store: Any = None,
    tile: int | None = None,
    memory: int | str | None = None,
    executor: Any = None,
    progress: bool = True,
) -> Gram:
    """The Gram matrix of x1 with x2 (with itself if left out), tile by tile, for any number of samples.

    Inputs: a tensor, NumPy array or memmap, zarr array, a tuple or dict of these, a `Dataset` (`tg.from_dataset`); only
    the blocks at work are loaded. `memory` bounds what is allocated on the way, on the kernel's device and by each
    worker, beyond the model (default: 4GiB on a CPU, what is free on a GPU). The symmetric half is computed once.

    `store`: a folder or zarr URL. Tiles are written there as they are finished; calling again with the same arguments
    goes on where it stopped, and returns at once when all is there. `tile`: samples on a side of a tile (default: from
    the memory). `executor`: "gpus" for a worker on every visible GPU, `tg.Workers`, `tg.RayExecutor`, or anything with
    `submit(f, *args).result()`. `progress` shows a bar on a terminal.

    >>> import tangency as tg
    >>> gram = tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(100, 3), memory="64MB")
    >>> gram.shape, (gram @ torch.ones(100)).shape
    (torch.Size([100, 100]), torch.Size([100]))
    """
    if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 1):
        raise InputError(f"tile={tile!r}; needed: a number of samples, at least 1.")
    return Run(kernel, x1, x2, memory).compute(store, tile, executor, progress)


class Run:
    """A kernel, its inputs and a memory budget. `function` is what the command line was given to make them."""

    def __init__(
        self, kernel: Kernel, x1: Any, x2: Any = None, memory: int | str | None = None, function: str | None = None
    ) -> None:
        if not isinstance(kernel, Kernel):
            raise InputError(
                f"kernel is a {type(kernel).__name__}; needed: a tangency kernel, e.g. tg.trace_ntk(model)."
            )
        self.kernel, self.function, self._memory = kernel, function, checks.memory(memory)
        self.x = Watched(source(x1, "x1"), "x1")
        self.y = None if x2 is None else Watched(source(x2, "x2"), "x2")
        self.n, self.m = len(self.x), len(self.x if self.y is None else self.y)

    def compute(self, store: Any, tile: int | None, executor: Any, progress: bool) -> Gram:
        check(executor, self.kernel)
        tile = None if tile is None else min(tile, max(self.n, self.m))
        with torch.no_grad():
            while True:
                target = self.in_memory(tile) if store is None else self.stored(store, tile)
                try:
                    return self.fill(target, executor, progress)
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    tile = target.smaller()
                    warnings.warn(
                        f"CUDA ran out of memory; going on with blocks of {tile} samples.",
                        PerformanceWarning,
                        stacklevel=3,
                    )

    def in_memory(self, tile: int | None) -> Target:
        return InMemory(plan(self.n, self.m, self.y is None, self.memory, self.size, tile), self.shape)

    def stored(self, where: Any, tile: int | None) -> Target:
        """The store, begun or gone on with. One that is finished costs no more than hashing the inputs and a look at a
        few samples."""
        place = shelf(where)
        store = Store.find(place)
        job = self._job()
        if store is None:
            cut = plan(self.n, self.m, self.y is None, self.memory, replace(self.size, result=0), tile)
            _few_enough(cut)
            said = manifest(*job, self.shape, self._cell.dtype, cut, self.witness)
            store = Store.create(place, said, self.function)
        self._same(store, job, tile)
        if store.complete:
            return Stored(store, store.plan, self.again(store), self._still)
        cut = grouped(store.plan, self.memory, replace(self.size, result=0))
        return Stored(store, cut, self.again(store), self._still)

    def require_same(self, store: Store) -> None:
        """Refuse a store that holds something else."""
        self._same(store, self._job(), None)

    def _job(self) -> tuple[dict[str, Any], dict[str, str | None]]:
        """The kernel's spec and the inputs' hashes."""
        return self.kernel.spec(), {"x1": self.x.digest(), "x2": None if self.y is None else self.y.digest()}

    def _same(self, store: Store, job: tuple[dict[str, Any], dict[str, str | None]], tile: int | None) -> None:
        cut = replace(store.plan, symmetric=self.y is None)
        now = manifest(*job, store.shape(self.n, self.m), store.dtype, cut, {})
        store.require_same({k: now[k] for k in ("kernel", "inputs", "shape", "symmetric", "versions")}, tile)
        require_witness(store.url, store.manifest, self.witness, precision(job[0]))

    def _still(self, store: Store) -> None:
        """Refuse to make a tile with a model that was changed since the store was opened."""
        spec = self.kernel.spec()
        different = differences(store.manifest["kernel"], spec)
        if different:
            raise StoreMismatch(store.url, {f"kernel.{k}": pair for k, pair in different.items()})
        require_witness(store.url, store.manifest, witness(self.kernel, self.samples), precision(spec))

    @cached_property
    def samples(self) -> list[Sample]:
        """Some of each side, one by one."""
        sides = ((0, self.x, self.n),) if self.y is None else ((0, self.x, self.n), (1, self.y, self.m))
        return [Sample(side, k, given.take(slice(k, k + 1))) for side, given, n in sides for k in positions(n)]

    @cached_property
    def witness(self) -> dict[str, Any]:
        return witness(self.kernel, self.samples)

    def fill(self, target: Target, executor: Any, progress: bool) -> Gram:
        """Compute what is missing."""
        missing = target.missing()
        if missing:
            try:
                count = target.cut.count
                show = progress and len(missing) > 1
                with bar(count, "kernel", "tile", done=count - len(missing), show=show) as step, target:
                    if executor is None:
                        self._here(target, missing, step)
                    else:
                        self._there(target, missing, step, executor)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(target.stopped()) from None
            target.require_all()
        return target.gram()

    def _here(self, target: Target, missing: set[tuple[int, int]], step: Callable[[int], Any]) -> None:
        sweep = self.sweep(target.cut)
        for planned in target.cut.tasks(missing, LOOK * target.cut.group, target.first):
            task = planned.without(target.finished() & missing)
            step(planned.count - task.count)  # another process was quicker
            for i, j, tile in sweep.tiles(task) if task.count else ():
                target.put(i, j, tile)
                step(1)
                if target.bad is not None:
                    break
            if target.bad is not None:
                break
        target.flush()
        if target.bad is not None:
            raise sweep.diagnose(*target.bad)

    def _there(self, target: Target, missing: set[tuple[int, int]], step: Callable[[int], Any], executor: Any) -> None:
        cut = target.cut
        with connect(executor) as (submit, workers):
            job = Job.of(self.kernel, cut, self.samples, self.witness)
            # Tasks large enough to reuse their rows, small enough that all workers stay busy (heuristic).
            most = max(1, min(16 * cut.group, len(missing) // (4 * workers())))
            tasks = ((perform, job, task, self._inputs(cut, task)) for task in cut.tasks(missing, most, target.first))
            for tiles in results(submit, tasks, workers):
                if not isinstance(tiles, list):
                    raise WorkerLost(f"the executor returned a {type(tiles).__name__} in place of a task's tiles.")
                for i, j, tile in tiles:
                    target.put(i, j, torch.from_numpy(tile))
                    step(1)
        target.flush()

    def _inputs(self, cut: TilePlan, task: Task) -> dict[tuple[int, int], Inputs]:
        """What a worker needs for a task, on the CPU."""
        side = 0 if self.y is None else 1
        blocks = {(0, i) for i in task.rows} | {(side, j) for j, _ in task.columns}
        taken = {(s, k): self._given(s).take(cut.block(k, s)) for s, k in sorted(blocks)}
        return {key: tree.transform(lambda v: v.cpu(), x) for key, x in taken.items()}

    def sweep(self, cut: TilePlan) -> Sweep:
        def load(side: int, k: int) -> Inputs:
            return self._ready(side, cut.block(k, side))

        return Sweep(self.kernel, load, cut)

    def one(self, cut: TilePlan, i: int, j: int) -> Tensor:
        """A single tile, as the whole run would make it."""
        sweep = self.sweep(cut)
        with torch.no_grad():
            tile = next(iter(sweep.tiles(Task((i,), ((j, (i,)),)))))[2].cpu()
        if not all_finite(tile):
            raise sweep.diagnose(i, j)
        return tile

    def again(self, store: Store) -> Callable[[int, int, Exception], Tensor]:
        """How a damaged tile is made anew."""

        def heal(i: int, j: int, why: Exception) -> Tensor:
            self._still(store)
            warnings.warn(f"{why} It was computed again.", StoreWarning, stacklevel=2)
            tile = self.one(store.plan, i, j)
            try:
                store.write(i, j, tile.numpy())
            except StoreError as e:  # a store that may only be read
                warnings.warn(f"tile {i}, {j} could not be put back: {e}", StoreWarning, stacklevel=2)
            return tile

        return heal

    def _given(self, side: int) -> Source:
        return self.x if side == 0 or self.y is None else self.y

    def _ready(self, side: int, block: slice) -> Inputs:
        return batch(self.kernel, self._given(side).take(block), ("x1", "x2")[side], block.stop - block.start)

    @cached_property
    def _few(self) -> list[Inputs]:
        """A sample or two of each side, from the end with the larger ones (lengths may differ, and be sorted)."""
        found = []
        for side in (0,) if self.y is None else (0, 1):
            n = (self.n, self.m)[side]
            ends = [self._ready(side, s) for s in (slice(0, min(2, n)), slice(max(0, n - 2), n))]
            found.append(max(ends, key=lambda x: sum(v[0].numel() for _, v in tree.leaves(x))))
        if len(found) > 1:
            self.kernel.alike(*found)
        return found

    @cached_property
    def _cell(self) -> Tensor:
        """The kernel of one sample with itself."""
        return self.kernel.pair(*[self.kernel.prepare(tree.take(self._few[0], slice(0, 1)))] * 2)

    @cached_property
    def size(self) -> Footprint:
        each = [self.kernel.footprint(x) for x in self._few]
        cell = self._cell.numel() * self._cell.element_size()
        kept, transient = max(k for k, _ in each), max(t for _, t in each)
        device = self._cell.device.type
        return Footprint(self.n * self.m * cell, kept, transient, cell, device, self.m, self.kernel.by_rows)

    @cached_property
    def memory(self) -> int:
        if self._memory is not None:
            return self._memory
        return gram_budget(self._cell.device)

    @property
    def shape(self) -> torch.Size:
        k = self._cell
        return torch.Size([self.n, self.m] if k.dim() == 2 else [self.n, k.shape[1], self.m, k.shape[3]])


def _few_enough(cut: TilePlan) -> None:
    if cut.count > MOST_TILES:
        side = math.isqrt(max(cut.n, cut.m) ** 2 // MOST_TILES) + 1
        raise MemoryBudgetError(
            f"with tiles of {cut.rows} samples a side the store would be {cut.count:,} files; at most {MOST_TILES:,}. "
            f"Give more memory, or tile={side} or more."
        )
