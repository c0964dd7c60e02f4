"""Where tiles go: into one tensor, or into a store."""

import secrets
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..errors import IncompleteGram, MemoryBudgetError, StoreMismatch, StoreWarning, TangencyError, WorkerLost
from ..kernels.kernel import all_finite
from .gram import DenseGram, Gram, mirror, place
from .plan import TilePlan
from .store import Heal, Store, StoredGram

# Tiles on their way to the disk, at most (they are counted in plan.TILES), and who writes them.
QUEUE, WRITERS = 2, 2

At = tuple[int, int]


class Target(ABC):
    """Takes tiles. As a context it ends with every tile that it took in its place."""

    cut: TilePlan

    @abstractmethod
    def missing(self) -> set[At]:
        """The tiles that are to be computed."""

    @abstractmethod
    def finished(self) -> set[At]:
        """The tiles that are there now, whoever made them."""

    @abstractmethod
    def put(self, i: int, j: int, tile: Tensor) -> None:
        """Take a tile."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until every tile that was taken has been looked at and is in its place."""

    @abstractmethod
    def gram(self) -> Gram: ...

    def require_all(self) -> None:
        """Look, before it is said to be complete."""
        absent = set(self.cut.tiles()) - self.finished()
        if absent:
            raise self.lost(absent)

    @abstractmethod
    def lost(self, absent: set[At]) -> TangencyError:
        """What to say of tiles that were made, or should have been, and are not there."""

    @abstractmethod
    def smaller(self) -> int:
        """Samples on a side of a smaller tile, after the device ran out of memory."""

    @abstractmethod
    def stopped(self) -> str:
        """What someone who stopped the run wants to know."""

    @property
    @abstractmethod
    def bad(self) -> At | None:
        """A tile that was taken and is not finite."""

    @property
    def first(self) -> int:
        """The row block to begin with."""
        return 0

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class InMemory(Target):
    """One tensor on the kernel's device; of a symmetric matrix the lower half is copied from the upper."""

    def __init__(self, cut: TilePlan, shape: torch.Size) -> None:
        self.cut, self.shape = cut, shape
        self._out: Tensor | None = None
        self._unseen: deque[tuple[At, Tensor, Tensor]] = deque()
        self._bad: At | None = None
        self._taken: set[At] = set()

    def missing(self) -> set[At]:
        return set(self.cut.tiles())

    def finished(self) -> set[At]:
        return self._taken

    def put(self, i: int, j: int, tile: Tensor) -> None:
        if self._out is None:
            self._out = tile.new_empty(self.shape)
        rows, columns = self.cut.block(i), self.cut.block(j, 1)
        place(self._out, rows, columns, tile)
        if self.cut.symmetric and i != j:
            place(self._out, columns, rows, mirror(tile))
        self._taken.add((i, j))
        self._unseen.append(((i, j), tile, tile.sum()))
        if len(self._unseen) > 1:  # not the last one: a GPU may still be at work on it
            self._look()

    def flush(self) -> None:
        while self._unseen:
            self._look()

    def _look(self) -> None:
        at, tile, total = self._unseen.popleft()
        if not all_finite(tile, total):
            self._bad = at

    @property
    def bad(self) -> At | None:
        return self._bad

    def gram(self) -> Gram:
        assert self._out is not None
        return DenseGram(self._out, self.cut.symmetric)

    def smaller(self) -> int:
        return self.cut.halved().rows

    def lost(self, absent: set[At]) -> TangencyError:
        return WorkerLost(
            f"{len(absent)} of {self.cut.count} tiles did not come back from the executor, first {min(absent)}. "
            "It must return the result of every task that it was given."
        )

    def stopped(self) -> str:
        return (
            f"stopped after {len(self._taken)} of {self.cut.count} tiles, which are lost. With store='folder' they "
            "would be kept."
        )


class Stored(Target):
    """A store. Tiles are copied and written while the next ones are computed."""

    def __init__(self, store: Store, cut: TilePlan, heal: Heal, still: Callable[[Store], None]) -> None:
        self.store, self.cut, self.heal, self.still = store, cut, heal, still
        self._begun: bool | None = None
        self._copies: deque[tuple[At, Tensor, Any]] = deque()
        self._writing: deque[Future[None]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._bad: At | None = None
        self._put: set[At] = set()

    def missing(self) -> set[At]:
        """What is not there or does not match its checksum. In a finished store the checksums wait until it is read."""
        wanted, there = set(self.cut.tiles()), self.finished()
        self._begun = bool(there)
        missing = wanted - there
        if missing:
            self.store.clear_leftovers()
            for at, why in self.store.damaged(there & wanted):
                warnings.warn(f"{why} It will be computed again.", StoreWarning, stacklevel=4)
                self.store.discard(*at)
                missing.add(at)
            self.store.require_space(len(missing))
        return missing

    def finished(self) -> set[At]:
        self.store.require_here()
        return self.store.finished()

    @property
    def first(self) -> int:
        """Where a store was begun another process may be at work on it: begin somewhere else."""
        return secrets.randbelow(self.cut.grid[0]) if self._begun else 0  # not the user's random numbers

    def put(self, i: int, j: int, tile: Tensor) -> None:
        self._copies.append(((i, j), *_to_host(tile)))
        while len(self._copies) > 1:  # not the last one: a GPU may still be at work on it
            self._hand_over()

    def flush(self) -> None:
        while self._copies:
            self._hand_over()
        while self._writing:
            self._writing.popleft().result()

    def _hand_over(self) -> None:
        at, tile, copied = self._copies.popleft()
        if copied is not None:
            copied.synchronize()
        if not all_finite(tile):
            self._bad = at
            return
        while len(self._writing) >= QUEUE:
            self._writing.popleft().result()
        assert self._pool is not None
        self._put.add(at)
        self._writing.append(self._pool.submit(self.store.write, *at, tile.numpy()))

    @property
    def bad(self) -> At | None:
        return self._bad

    def gram(self) -> Gram:
        return StoredGram(self.store, self.heal)

    def require_all(self) -> None:
        """Also that the kernel is still what it was: tiles that another one made are taken out again."""
        super().require_all()
        try:
            self.still(self.store)
        except StoreMismatch:
            for at in self._put:
                self.store.discard(*at)
            raise

    def smaller(self) -> int:
        if self.finished():
            raise MemoryBudgetError(
                f"CUDA ran out of memory with tiles of {self.cut.rows} samples a side, with which {self.store.url} "
                f"was begun. Give it more room, or begin another store with tile={max(1, self.cut.rows // 2)}."
            )
        half = self.cut.halved()
        self.store.replace({**self.store.manifest, "plan": half.decisive})
        return half.rows

    def lost(self, absent: set[At]) -> TangencyError:
        return IncompleteGram(
            f"{len(absent)} of {self.cut.count} tiles are not in {self.store.url} at the end, first {min(absent)}: "
            "somebody removed them, or the executor did not return them. The others are safe; call again to go on."
        )

    def stopped(self) -> str:
        return (
            f"stopped: {len(self.finished())} of {self.cut.count} tiles are safe in {self.store.url}. Call again "
            "with the same arguments to go on."
        )

    def __enter__(self) -> "Stored":
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="tangency-writer")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._pool is not None
        self._pool.shutdown(wait=True)  # what was handed over is written, whatever happened


def _to_host(tile: Tensor) -> tuple[Tensor, Any]:
    """A copy of the tile in host memory and, on a GPU, the event that says when it is there."""
    if tile.device.type != "cuda":
        return tile.contiguous(), None
    host = torch.empty(tile.shape, dtype=tile.dtype, pin_memory=True)
    host.copy_(tile, non_blocking=True)
    return host, torch.cuda.current_stream(tile.device).record_event()
