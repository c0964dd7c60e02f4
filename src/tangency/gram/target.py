"""Where tiles go: into one tensor, or into a store."""

import secrets
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .._base.files import nearest
from .._base.memory import ran_out
from ..errors import (
    DamagedTile,
    IncompleteGram,
    MemoryBudgetError,
    StoreMismatch,
    StoreWarning,
    TangencyError,
    WorkerLost,
)
from ..kernels.kernel import all_finite
from .gram import DenseGram, Gram
from .indices import mirror_tile, place_tile
from .plan import TilePlan
from .shelf import Folder
from .store import Heal, Store, StoredGram

# Tiles on their way to the disk, at most (they are counted in plan.TILES), and who writes them.
QUEUE, WRITERS = 2, 2

At = tuple[int, int]


class Overtaken(Exception):
    """Another process has begun the store, in its own way: a signal of a run to itself, never shown to users."""


class Target(ABC):
    """Takes tiles."""

    cut: TilePlan
    first: int = 0  # the row block to begin with
    folder: Path | None = None  # on a disk of this machine, where the tiles go
    bad: At | None = None  # a tile that was taken and is not finite

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

    def close(self) -> None:
        """End with every tile that was handed over in its place, whatever happened."""
        return None

    @abstractmethod
    def gram(self) -> Gram:
        """What was made."""

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


class InMemory(Target):
    """One tensor on the kernel's device; of a symmetric matrix the lower half is copied from the upper."""

    def __init__(self, cut: TilePlan, shape: torch.Size) -> None:
        self.cut, self.shape = cut, shape
        self._out: Tensor | None = None
        self._unseen: deque[tuple[At, Tensor, Tensor]] = deque()
        self._taken: set[At] = set()

    def missing(self) -> set[At]:
        """All of them."""
        return set(self.cut.tiles())

    def finished(self) -> set[At]:
        """Those that were taken."""
        return self._taken

    def put(self, i: int, j: int, tile: Tensor) -> None:
        """Copy a tile, and its mirror image, to their places."""
        if self._out is None:
            try:
                self._out = tile.new_empty(self.shape)
            except (MemoryError, RuntimeError) as e:
                if not ran_out(e):
                    raise
                size = self.shape.numel() * tile.element_size()
                raise MemoryBudgetError(
                    f"the result takes {size} bytes, and there is no memory for it. Keep it on disk: store='folder'."
                ) from e
        rows, columns = self.cut.block(i), self.cut.block(j, 1)
        place_tile(self._out, rows, columns, tile)
        if self.cut.symmetric and i != j:
            place_tile(self._out, columns, rows, mirror_tile(tile))
        self._taken.add((i, j))
        # The sum is begun now and looked at when the next tile is under way: a GPU is never waited for in vain.
        self._unseen.append(((i, j), tile, tile.sum()))
        if len(self._unseen) > 1:  # not the last one: a GPU may still be at work on it
            self._look()

    def flush(self) -> None:
        """Look at the last tile."""
        while self._unseen:
            self._look()

    def _look(self) -> None:
        at, tile, total = self._unseen.popleft()
        if not all_finite(tile, total):
            self.bad = at

    def gram(self) -> Gram:
        """The matrix in memory."""
        assert self._out is not None
        return DenseGram(self._out, self.cut.symmetric)

    def smaller(self) -> int:
        """Half of what it was: nothing was kept, so everything is made again."""
        return self.cut.halved().rows

    def lost(self, absent: set[At]) -> TangencyError:
        """Only an executor can lose them."""
        return WorkerLost(
            f"{len(absent)} of {self.cut.count} tiles did not come back from the executor, first {min(absent)}. "
            "It must return the result of every task that it was given."
        )

    def stopped(self) -> str:
        """How much is lost, and how it would not be."""
        return (
            f"stopped after {len(self._taken)} of {self.cut.count} tiles, which are lost. With store='folder' they "
            "would be kept."
        )


class Stored(Target):
    """A store. Tiles are copied and written while the next ones are computed."""

    def __init__(self, store: Store, cut: TilePlan, heal: Heal, still: Callable[[Store], None]) -> None:
        self.store, self.cut, self.heal, self.still = store, cut, heal, still
        self.folder = nearest(store.shelf.path.parent) if isinstance(store.shelf, Folder) else None
        self._copies: deque[tuple[At, Tensor, torch.cuda.Event | None]] = deque()
        self._writing: deque[Future[None]] = deque()
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="tangency-writer")  # threads start when needed
        self._put: set[At] = set()

    def missing(self) -> set[At]:
        """What is not there or does not match its checksum. In a finished store the checksums wait until it is read."""
        there = self.finished()
        wanted = set(self.cut.tiles())
        missing = wanted - there
        if there:
            # Another process may be at work on it: begin somewhere else. (`secrets`: not the user's random numbers.)
            self.first = secrets.randbelow(self.cut.grid[0])
        if missing:
            # Whoever goes on with a store reads what is in it once: a damaged tile is cheaper to find now than later.
            for at, why in self.store.faults(there & wanted) if there else ():
                if not isinstance(why, DamagedTile):  # it may be whole, and is only not to be read
                    raise why
                warnings.warn(f"{why} It will be computed again.", StoreWarning, stacklevel=4)
                self.store.discard(*at)
                missing.add(at)
            self.store.make_room(len(missing))
        return missing

    def finished(self) -> set[At]:
        """Those on disk, if the store is still the one that was opened."""
        self.store.require_here()
        return self.store.finished()

    def put(self, i: int, j: int, tile: Tensor) -> None:
        """Begin to copy a tile to the host, and hand those before it to the writers."""
        self._copies.append(((i, j), *_to_host(tile)))
        while len(self._copies) > 1:  # not the last one: a GPU may still be at work on it
            self._hand_over()

    def flush(self) -> None:
        """Wait until all are written."""
        while self._copies:
            self._hand_over()
        while self._writing:
            self._writing.popleft().result()

    def _hand_over(self) -> None:
        at, tile, copied = self._copies.popleft()
        if copied is not None:
            copied.synchronize()
        if not all_finite(tile):
            self.bad = at
            return
        # Only now is there something to keep: a run that failed before leaves no store behind.
        if not self.store.begin():
            raise Overtaken
        while len(self._writing) >= QUEUE:  # a slow disk holds the computation up, not the memory
            self._writing.popleft().result()
        self._put.add(at)
        self._writing.append(self._pool.submit(self.store.write, *at, tile.numpy()))

    def close(self) -> None:
        """What was handed over is written."""
        self._pool.shutdown(wait=True)

    def gram(self) -> Gram:
        """The matrix on disk, which mends its damaged tiles."""
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
        """Half of what it was, which the store must know; one that holds tiles already cannot change."""
        if self.finished():
            raise MemoryBudgetError(
                f"memory ran out with tiles of {self.cut.rows} samples a side, with which {self.store.url} "
                f"was begun. Give it more room, or begin another store with tile={max(1, self.cut.rows // 2)}."
            )
        half = self.cut.halved()
        self.store.recut(half)
        return half.rows

    def lost(self, absent: set[At]) -> TangencyError:
        """They were removed, or an executor lost them."""
        return IncompleteGram(
            f"{len(absent)} of {self.cut.count} tiles are not in {self.store.url} at the end, first {min(absent)}: "
            "somebody removed them, or the executor did not return them. The others are safe; call again to go on."
        )

    def stopped(self) -> str:
        """How much is safe."""
        return (
            f"stopped: {len(self.finished())} of {self.cut.count} tiles are safe in {self.store.url}. Call again "
            "with the same arguments to go on."
        )


def _to_host(tile: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of the tile in host memory and, on a GPU, the event that says when it is there."""
    if tile.device.type != "cuda":
        return tile.contiguous(), None
    # Pinned, or the copy would hold up the computation.
    host = torch.empty(tile.shape, dtype=tile.dtype, pin_memory=True)
    host.copy_(tile, non_blocking=True)
    return host, torch.cuda.current_stream(tile.device).record_event()
