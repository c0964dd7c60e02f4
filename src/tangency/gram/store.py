"""Gram matrices on disk: a zarr v3 array, one checksummed chunk per tile, and a manifest of what decides its numbers.

Each tile is written atomically (to a temporary name, then renamed). Beside it lies its seal, an empty file whose name
is a digest of the tile's checksum, of its place and of the store's manifest: a tile of another place or another store
has no seal here. Which tiles are finished is which chunks are there with a seal: no log that could disagree with the
data. Of a symmetric matrix only the upper half is stored.
"""

import errno
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DamagedTile, IncompleteGram, InputError, StoreError, StoreMismatch, StoreWarning
from .gram import Gram, Index, Wanted, mirror
from .manifest import Manifest, chunk, differences, digest, plan_of, read, written
from .plan import TilePlan
from .shelf import Shelf, shelf

# Tiles that are read ahead (heuristic: enough to keep a disk busy).
AHEAD = 3
ABOUT, CHUNKS, SEALS = "zarr.json", "c", "seal"
Heal = Callable[[int, int, Exception], Tensor]
At = tuple[int, int]


class Store:
    """The array, by tiles."""

    def __init__(self, shelf: Shelf, manifest: Manifest, function: str | None = None) -> None:
        self.shelf, self.manifest, self.function = shelf, manifest, function
        self.key = digest(manifest).encode()
        self.plan: TilePlan = plan_of(manifest)
        self.chunk = chunk(manifest)
        self.crc = _crc32c()

    @staticmethod
    def find(where: Any) -> "Store | None":
        """What is at a path or URL: a store of ours, or nothing yet. Anything else is refused."""
        place = shelf(where)
        _crc32c()
        with _told(place.name, "opened"):
            if place.foreign():
                raise StoreError(f"{place.name} exists and is not a Gram store. Give an empty or a new folder.")
            raw = place.read(ABOUT)
        return None if raw is None else Store(place, *read(raw.tobytes(), place.name))

    @staticmethod
    def create(where: Any, manifest: Manifest, function: str | None = None) -> "Store":
        """A new store. If another process has just made one here, that one: of several, one is first."""
        place = shelf(where)
        with _told(place.name, "made"):
            place.make()
            place.begin(ABOUT, written(manifest, function))
        found = Store.find(place)
        if found is None:
            raise StoreError(f"{place.name} was taken away while the store was being made. Call again.")
        return found

    def replace(self, manifest: Manifest) -> None:
        """Begin again with another manifest, if nothing was put in yet."""
        self.require_here()
        with _told(self.url, "made"):
            self.shelf.write(ABOUT, written(manifest, self.function))

    @property
    def url(self) -> str:
        return self.shelf.name

    @property
    def complete(self) -> bool:
        return len(self.finished()) == self.plan.count

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.manifest["dtype"])

    def shape(self, n: int, m: int) -> torch.Size:
        """The array's shape with other numbers of samples."""
        shape = self.manifest["shape"]
        return torch.Size([n, m] if len(shape) == 2 else [n, shape[1], m, shape[3]])

    def require_here(self) -> None:
        """Refuse if the store was moved, removed or replaced since it was opened."""
        with _told(self.url, "read"):
            raw = self.shelf.read(ABOUT)
        if raw is None:
            raise StoreError(f"{self.url} is not there any more: somebody moved or removed it, or its zarr.json.")
        if digest(read(raw.tobytes(), self.url)[0]).encode() != self.key:
            raise StoreError(f"{self.url} is another store now: somebody replaced it while this one was at work.")

    def require_same(self, now: Mapping[str, Any], tile: int | None) -> None:
        """Refuse if `now`, a part of a manifest, or a tile that was asked for is not ours; say it if only the libraries
        differ."""
        was, given = {k: self.manifest[k] for k in now}, dict(now)
        versions = differences(was.pop("versions"), given.pop("versions"))
        if tile is not None:
            was["tile"], given["tile"] = self.plan.rows, tile
        different = differences(was, given)
        if different:
            raise StoreMismatch(self.url, different)
        if versions:
            changed = ", ".join(f"{k} {then} → {here}" for k, (then, here) in versions.items())
            warnings.warn(
                f"{self.url} was begun with other versions ({changed}): new tiles may differ from the old ones in "
                "their last bits.",
                StoreWarning,
                stacklevel=6,
            )

    def finished(self) -> set[At]:
        """The tiles of the plan whose chunks are there, with a seal."""
        with _told(self.url, "read"):
            there = {_place(key.split("/")[1:]) for key in self.shelf.keys(CHUNKS)}
            sealed = {_place(key.split("/")[-1].split(".")[:2]) for key in self.shelf.keys(SEALS)}
        return {at for at in there & sealed if at is not None and self.plan.has(*at)}

    def write(self, i: int, j: int, tile: np.ndarray) -> None:
        if list(tile.shape) != self.chunk:  # at an edge
            whole = np.full(self.chunk, np.nan, tile.dtype)
            whole[tuple(slice(0, size) for size in tile.shape)] = tile
            tile = whole
        body = np.ascontiguousarray(tile).reshape(-1).view(np.uint8)
        checksum = self.crc(body)
        with _told(self.url, "written"):
            self.shelf.begin(self._seal(i, j, checksum), b"")  # first: a chunk that is there has its seal
            self.shelf.write(self._chunk(i, j), body.data, checksum.to_bytes(4, "little"))

    def read(self, i: int, j: int) -> np.ndarray:
        """A finished tile, if it is the one that was written here."""
        with _told(f"tile {i}, {j} of {self.url}", "read"):
            raw = self.shelf.read(self._chunk(i, j))
        size = int(np.prod(self.chunk)) * self.dtype.itemsize
        if raw is None:
            raise self._damaged(i, j, "is gone")
        if raw.size != size + 4:
            raise self._damaged(i, j, f"does not match its checksum: it has {raw.size} bytes of {size + 4}")
        checksum = self.crc(raw[:-4])
        if checksum.to_bytes(4, "little") != raw[-4:].tobytes():
            raise self._damaged(i, j, "does not match its checksum")
        if not self.shelf.has(self._seal(i, j, checksum)):
            raise self._damaged(i, j, "was not written there by this store: it is from another place or another store")
        tile = raw[:-4].view(self.manifest["dtype"]).reshape(self.chunk)
        rows, columns = self.plan.block(i), self.plan.block(j, 1)
        if tile.ndim == 2:
            return tile[: rows.stop - rows.start, : columns.stop - columns.start]
        return tile[: rows.stop - rows.start, :, : columns.stop - columns.start]

    def _damaged(self, i: int, j: int, what: str) -> DamagedTile:
        return DamagedTile(
            f"tile {i}, {j} of {self.url} {what}. Compute it again: call tg.compute with what the store was begun "
            "with, or `tangency gram`."
        )

    def damaged(self, tiles: set[At]) -> Iterator[tuple[At, DamagedTile]]:
        """Those of the finished tiles that are not what was written. Cost: reads them all."""

        def bad(at: At) -> tuple[At, DamagedTile] | None:
            try:
                self.read(*at)
            except DamagedTile as e:
                return at, e
            return None

        with ThreadPoolExecutor(AHEAD) as pool:
            yield from (found for found in pool.map(bad, sorted(tiles)) if found is not None)

    def discard(self, i: int, j: int) -> None:
        with _told(self.url, "written"):
            self.shelf.delete(self._chunk(i, j))
            for key in [k for k in self.shelf.keys(SEALS) if k.startswith(f"{SEALS}/{i}.{j}.")]:
                self.shelf.delete(key)

    def clear_leftovers(self) -> None:
        """Remove what writers that were killed left behind (files no process can still be writing)."""
        for under in (CHUNKS, SEALS):
            self.shelf.tidy(under)

    def require_space(self, tiles: int) -> None:
        """Refuse before the work if the disk cannot hold the tiles that are still to come."""
        need = tiles * int(np.prod(self.chunk)) * self.dtype.itemsize
        with _told(self.url, "written"):
            free = self.shelf.free()
        if free is not None and need > free:
            raise StoreError(
                f"{self.url} needs {need / 1e9:.3g} GB more and the disk has {free / 1e9:.3g} GB free. Free some, or "
                "give a folder on another disk."
            )

    def _chunk(self, i: int, j: int) -> str:
        return "/".join(map(str, (CHUNKS, i, j) if len(self.chunk) == 2 else (CHUNKS, i, 0, j, 0)))

    def _seal(self, i: int, j: int, checksum: int) -> str:
        told = hashlib.blake2b(f"{i} {j} {checksum}".encode(), key=self.key, digest_size=8)
        return f"{SEALS}/{i}.{j}.{told.hexdigest()}"


@dataclass(frozen=True, eq=False)
class StoredGram(Gram):
    """A Gram matrix on disk, finished or not."""

    store: Store
    heal: Heal | None = None  # computes a damaged tile again; without it a damaged tile is an error

    @property
    def path(self) -> str:
        return self.store.url

    @property
    def manifest(self) -> dict[str, Any]:
        """What decides the numbers: kernel, hashes of inputs, plan, versions."""
        return self.store.manifest

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.store.manifest["shape"])

    @property
    def dtype(self) -> torch.dtype:
        return self.store.dtype

    @property
    def _same_samples(self) -> bool:
        return self.store.plan.symmetric

    @property
    def progress(self) -> tuple[int, int]:
        """(finished tiles, all tiles)."""
        return len(self.store.finished()), self.store.plan.count

    def tiles(self, wanted: Wanted | None = None) -> Iterator[tuple[Index, Index, Tensor]]:
        cut = self.store.plan
        todo: list[tuple[int, int, bool, bool]] = []  # with: is this tile wanted, is its mirror image
        for i, j in cut.tiles():
            rows, columns = cut.block(i), cut.block(j, 1)
            straight = wanted is None or wanted(rows, columns)
            mirrored = cut.symmetric and i != j and (wanted is None or wanted(columns, rows))
            if straight or mirrored:
                todo.append((i, j, straight, mirrored))
        self._present({(i, j) for i, j, _, _ in todo})
        for (i, j, straight, mirrored), tile in self._read(todo):
            rows, columns = cut.block(i), cut.block(j, 1)
            if straight:
                yield rows, columns, tile
            if mirrored:
                yield columns, rows, mirror(tile)

    def _present(self, needed: set[tuple[int, int]]) -> None:
        finished = self.store.finished()
        absent = needed - finished
        if absent:
            raise IncompleteGram(
                f"{self.path} is not finished ({len(finished)} of {self.store.plan.count} tiles), and {len(absent)} "
                f"of the tiles needed here are missing, first {min(absent)}. Go on with tg.compute(…, "
                f"store={self.path!r}), or take a part that is there."
            )

    def _read(self, todo: list[tuple[int, int, bool, bool]]) -> Iterator[tuple[tuple[int, int, bool, bool], Tensor]]:
        """The tiles in order, a few read ahead."""
        with ThreadPoolExecutor(AHEAD) as pool:
            ahead: list[Future[np.ndarray]] = []
            for k, at in enumerate(todo):
                while len(ahead) < min(AHEAD, len(todo) - k):
                    ahead.append(pool.submit(self.store.read, *todo[k + len(ahead)][:2]))
                try:
                    tile = torch.from_numpy(ahead.pop(0).result())
                except DamagedTile as e:
                    if self.heal is None:
                        raise
                    tile = self.heal(at[0], at[1], e)
                yield at, tile

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return opened, (self.path,)

    def __repr__(self) -> str:
        done, count = self.progress
        state = "" if done == count else f", {done} of {count} tiles"
        return f"StoredGram({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype}{state})"


def open_gram(path: Any) -> StoredGram:
    """The Gram matrix in a store, finished or unfinished, without the kernel that made it.

    >>> import tempfile, tangency as tg
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(9, 3), store=folder + "/gram")
    ...     tg.open_gram(folder + "/gram").shape
    torch.Size([9, 9])
    """
    found = opened(path)
    if found.manifest["kernel"]["kernel"] == "features":
        raise StoreError(f"{path} holds features, not a Gram matrix. Open them with tg.projection.open_features.")
    return found


def opened(path: Any) -> StoredGram:
    """What a store holds: a Gram matrix, or features, which are stored as one."""
    store = Store.find(path)
    if store is None:
        raise StoreError(f"there is no Gram store at {path}. Make one: tg.compute(kernel, x, store={str(path)!r}).")
    return StoredGram(store)


@contextmanager
def _told(what: str, done: str) -> Iterator[None]:
    """Errors of the disk, in words."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"the disk of {what} is full. The finished tiles are safe: free some space and call again with the "
                "same arguments to go on."
            ) from e
        safe = " The finished tiles are safe; call again to go on." if done == "written" else ""
        raise StoreError(f"{what} cannot be {done}: {e.strerror or e}.{safe}") from e


def _place(parts: list[str]) -> At | None:
    """The tile of a key."""
    if len(parts) not in (2, 4) or not all(p.isdecimal() and len(p) < 10 for p in parts):
        return None
    numbers = [int(p) for p in parts]
    return numbers[0], numbers[len(numbers) // 2]


def _crc32c() -> Callable[[np.ndarray], int]:
    try:
        from google_crc32c import value
    except ImportError as e:
        raise InputError("store= needs zarr and google-crc32c: pip install 'tangency[store]'.") from e
    return value
