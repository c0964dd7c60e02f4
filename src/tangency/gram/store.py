"""Gram matrices on disk: a zarr v3 array, one checksummed chunk per tile, and a manifest of what decides its numbers.

Each tile is written atomically (to a temporary name, then renamed). Beside it lies its seal, an empty file whose name
is a digest of the tile's checksum, of its place and of the store's manifest: a tile of another place or another store
has no seal here. Which tiles are finished is which chunks are there with a seal: no log that could disagree with the
data. Of a symmetric matrix only the upper half is stored.
"""

import errno
import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .._base.extras import needed
from .._base.progress import bar
from .._base.types import Spec, StorePlace
from ..errors import DamagedTile, IncompleteGram, StoreError, StoreMismatch, StoreWarning
from .gram import Gram
from .indices import Index, Wanted, mirror_tile
from .manifest import (
    NEW_FOLDER,
    VERSIONS,
    Manifest,
    chunk_shape,
    differences,
    manifest_digest,
    manifest_file,
    only_looks,
    plan_fields,
    plan_of,
    read_manifest,
)
from .plan import TilePlan
from .shelf import Shelf, Unfit, shelf

# Tiles that are read ahead (heuristic: enough to keep a disk busy).
AHEAD = 3
ABOUT, CHUNKS, SEALS = "zarr.json", "c", "seal"
# Bytes of a zarr.json (heuristic: names of parameters and witnesses of the largest models take some megabytes).
MOST_ABOUT = 2**28
# The keys of a chunk, c/i/j or c/i/0/j/0, and of its seal, seal/i.j.digest; longer numbers are nobody's tile.
CHUNK_KEY = re.compile(rf"{CHUNKS}/(\d{{1,9}})/(?:\d{{1,9}}/(\d{{1,9}})/\d{{1,9}}|(\d{{1,9}}))")
SEAL_KEY = re.compile(rf"{SEALS}/(?:.*/)?(\d{{1,9}})\.(\d{{1,9}})(?:\..*)?")
At: TypeAlias = tuple[int, int]  # a tile, by its row and column of tiles
Heal: TypeAlias = Callable[[int, int, Exception], Tensor]


class Store:
    """The array, by tiles."""

    def __init__(
        self, shelf: Shelf, manifest: Manifest, function: str | None = None, about: bytes | None = None
    ) -> None:
        """`function` is what the command line was given to make it, `about` its zarr.json as it was read."""
        self.shelf, self.manifest, self.function = shelf, manifest, function
        self.url, self.begun = shelf.name, about is not None  # a new one is made with its first tile
        self.key = manifest_digest(manifest).encode()
        self.plan: TilePlan = plan_of(manifest)
        self.chunk = chunk_shape(manifest)
        self.dtype: torch.dtype = getattr(torch, manifest["dtype"])
        self.crc = _crc32c()  # here, so that a package that is missing is missed before the work
        self.about = manifest_file(manifest, function) if about is None else about

    @staticmethod
    def find(where: StorePlace | Shelf) -> "Store | None":
        """What is at a path or URL: a store of ours, or nothing yet. Anything else is refused."""
        place = shelf(where)
        _crc32c()
        with _disk_errors(place.name, "opened"):
            if place.foreign():
                raise StoreError(f"{place.name} exists and is not a Gram store. Give an empty or a new folder.")
            raw = _about(place)
        if raw is None:
            return None
        about = raw.tobytes()
        return Store(place, *read_manifest(about, place.name), about)

    @staticmethod
    def planned(where: StorePlace | Shelf, manifest: Manifest, function: str | None = None) -> "Store":
        """A new store, which is made when there is a tile for it; refused where none can be made."""
        store = Store(shelf(where), manifest, function)
        if (why := store.shelf.obstacle(ABOUT)) is not None:
            raise StoreError(f"{store.url} cannot be made: {why}.")
        return store

    def begin(self) -> bool:
        """Make it if it is not there. Of several processes one is first: whether the one that is there is this one."""
        if self.begun:
            return True
        with _disk_errors(self.url, "made"):
            self.shelf.make()
            if self.shelf.begin(ABOUT, self.about):
                self.begun = True
                return True
        first = Store.find(self.shelf)
        if first is None:
            raise StoreError(f"{self.url} was taken away while the store was being made. Call again.")
        self.begun = first.key == self.key
        return self.begun

    def recut(self, cut: TilePlan) -> None:
        """Begin again with other tiles, if nothing was put in yet."""
        if not self.begun:
            return
        self.require_here()
        with _disk_errors(self.url, "made"):
            self.shelf.write(ABOUT, manifest_file({**self.manifest, "plan": plan_fields(cut)}, self.function))

    @property
    def complete(self) -> bool:
        """Whether every tile is there."""
        return len(self.finished()) == self.plan.count

    def require_here(self) -> None:
        """Refuse if the store was moved, removed or replaced since it was opened."""
        if not self.begun:
            return
        with _disk_errors(self.url, "read"):
            raw = _about(self.shelf)
        if raw is None:
            raise StoreError(f"{self.url} is not there any more: somebody moved or removed it, or its zarr.json.")
        about = raw.tobytes()
        # Other bytes may say the same: another program may have written the file anew.
        if about != self.about and manifest_digest(read_manifest(about, self.url)[0]).encode() != self.key:
            raise StoreError(f"{self.url} is another store now: somebody replaced it while this one was at work.")

    def require_same(
        self, spec: Spec, inputs: Mapping[str, str | None], samples: At, symmetric: bool, tile: int | None
    ) -> None:
        """Refuse if the kernel, the inputs, the numbers of samples (n, m) or the tile that was asked for are not ours;
        say it if only the libraries differ."""
        shape, (n, m) = self.manifest["shape"], samples
        now: dict[str, object] = {
            "kernel": spec,
            "inputs": inputs,
            "shape": [n, m] if len(shape) == 2 else [n, shape[1], m, shape[3]],
            "symmetric": symmetric,
        }
        said: Mapping[str, object] = self.manifest
        was = {name: said[name] for name in now}
        if tile is not None:
            was["tile"], now["tile"] = self.plan.rows, tile
        looks = self._require_alike(was, now)
        if others := differences(self.manifest["versions"], VERSIONS):
            changed = ", ".join(f"{k} {then} → {here}" for k, (then, here) in others.items())
            by_numbers = f" By its numbers alone is known to be the same: {', '.join(looks)}." if looks else ""
            warnings.warn(
                f"{self.url} was begun with other versions ({changed}): new tiles may differ from the old ones in "
                f"their last bits.{by_numbers}",
                StoreWarning,
                stacklevel=6,
            )

    def require_kernel(self, spec: Spec) -> None:
        """Refuse a kernel whose spec is not ours."""
        self._require_alike({"kernel": self.manifest["kernel"]}, {"kernel": spec})

    def _require_alike(self, was: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
        """Refuse what differs; the fields that only look otherwise because Python or torch is another."""
        others, different = differences(self.manifest["versions"], VERSIONS), differences(was, now)
        looks = [field for field, pair in different.items() if only_looks(field, *pair, others)]
        if len(looks) < len(different):
            raise StoreMismatch(self.url, different)
        return looks

    def finished(self) -> set[At]:
        """The tiles of the plan whose chunks are there, with a seal."""
        there: set[At] = set()
        sealed: set[At] = set()
        if not self.begun:  # what may be there is another's
            return there
        high, wide = self.plan.grid
        with _disk_errors(self.url, "read"):
            for key in self.shelf.keys(CHUNKS):
                if match := CHUNK_KEY.fullmatch(key):
                    i, j = int(match[1]), int(match[2] or match[3])
                    if i < high and j < wide and (i <= j or not self.plan.symmetric):
                        there.add((i, j))
            for key in self.shelf.keys(SEALS):
                if match := SEAL_KEY.fullmatch(key):
                    sealed.add((int(match[1]), int(match[2])))
        return there & sealed

    def write(self, i: int, j: int, tile: np.ndarray) -> None:
        """Put a tile in its place, with its checksum and its seal."""
        if list(tile.shape) != self.chunk:  # at an edge: zarr's chunks are all of one shape
            whole = np.full(self.chunk, np.nan, tile.dtype)
            whole[tuple(slice(0, size) for size in tile.shape)] = tile
            tile = whole
        body = np.ascontiguousarray(tile).reshape(-1).view(np.uint8)
        checksum = self.crc(body)
        with _disk_errors(self.url, "written"):
            # The seal first: a process that is killed in between leaves a seal without a chunk, which is no tile.
            self.shelf.begin(self._seal(i, j, checksum), b"")
            self.shelf.write(self._chunk(i, j), body.data, checksum.to_bytes(4, "little"))

    def read(self, i: int, j: int) -> np.ndarray:
        """A finished tile, if it is the one that was written here."""
        size = int(np.prod(self.chunk)) * self.dtype.itemsize
        try:
            with _disk_errors(f"tile {i}, {j} of {self.url}", "read"):
                raw = self.shelf.read(self._chunk(i, j), size + 4)
        except Unfit as e:
            raise self._damaged(i, j, str(e)) from None
        if raw is None:
            raise self._damaged(i, j, "is gone")
        if raw.size != size + 4:
            raise self._damaged(i, j, f"does not match its checksum: it has {raw.size} bytes of {size + 4}")
        checksum = self.crc(raw[:-4])  # the last four bytes are that of zarr's crc32c codec
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

    def faults(self, tiles: set[At], step: Callable[[], object] | None = None) -> Iterator[tuple[At, StoreError]]:
        """Those of the finished tiles that are not what was written (`DamagedTile`), or cannot be read. Reads all."""

        def fault(at: At) -> StoreError | None:
            """What is wrong with one tile, if anything."""
            try:
                self.read(*at)
            except StoreError as e:
                return e
            return None

        there = sorted(tiles)
        with ThreadPoolExecutor(AHEAD) as pool:
            for at, why in zip(there, pool.map(fault, there), strict=True):
                if step is not None:
                    step()
                if why is not None:
                    yield at, why

    def discard(self, i: int, j: int) -> None:
        """Take a tile out, with its seals: whoever wrote it."""
        with _disk_errors(self.url, "written"):
            # The chunk first: a seal without a chunk does no harm.
            self.shelf.delete(self._chunk(i, j))
            for key in [k for k in self.shelf.keys(SEALS) if k.startswith(f"{SEALS}/{i}.{j}.")]:
                self.shelf.delete(key)

    def make_room(self, tiles: int) -> None:
        """Remove what writers that were killed left behind, and refuse, before the work, if the disk cannot hold so
        many more tiles."""
        need = tiles * int(np.prod(self.chunk)) * self.dtype.itemsize
        with _disk_errors(self.url, "written"):
            free = self.shelf.tidy(CHUNKS, SEALS)
        if free is not None and need > free:
            raise StoreError(
                f"{self.url} needs {need / 1e9:.3g} GB more and the disk has {free / 1e9:.3g} GB free. Free some, or "
                "give a folder on another disk."
            )

    def _chunk(self, i: int, j: int) -> str:
        """The key of a tile, as zarr's default encoding has it."""
        return "/".join(map(str, (CHUNKS, i, j) if len(self.chunk) == 2 else (CHUNKS, i, 0, j, 0)))

    def _seal(self, i: int, j: int, checksum: int) -> str:
        """The key of a tile's seal."""
        # Keyed by the manifest: a tile of another store, or of another place in this one, has no seal here.
        digest = hashlib.blake2b(f"{i} {j} {checksum}".encode(), key=self.key, digest_size=8).hexdigest()
        return f"{SEALS}/{i}.{j}.{digest}"


class Progress(NamedTuple):
    """How much of a store is there."""

    finished: int  # tiles
    tiles: int  # in all


class Verified(NamedTuple):
    """What of a store is as it was written."""

    finished: int  # tiles that are there
    tiles: int  # in all
    faults: tuple[tuple[At, str], ...]  # those of them that are not as they were written, and what is wrong

    @property
    def sound(self) -> bool:
        """Whether every tile is there, as it was written."""
        return self.finished == self.tiles and not self.faults


class _Reading(NamedTuple):
    """A tile to be read: whether it is wanted itself, and whether its mirror image is."""

    i: int
    j: int
    straight: bool
    mirrored: bool


@dataclass(frozen=True, eq=False)
class StoredGram(Gram):
    """A Gram matrix on disk, finished or not."""

    store: Store
    heal: Heal | None = None  # computes a damaged tile again; without it a damaged tile is an error

    @property
    def path(self) -> str:
        """The folder or URL that it is in."""
        return self.store.url

    @property
    def manifest(self) -> Manifest:
        """What decides the numbers: kernel, hashes of inputs, plan, versions."""
        return self.store.manifest

    @property
    def shape(self) -> torch.Size:
        """That of the stored array."""
        return torch.Size(self.store.manifest["shape"])

    @property
    def dtype(self) -> torch.dtype:
        """That of the stored array."""
        return self.store.dtype

    @property
    def _same_samples(self) -> bool:
        return self.store.plan.symmetric

    @property
    def progress(self) -> Progress:
        """(finished tiles, all tiles)."""
        return Progress(len(self.store.finished()), self.store.plan.count)

    def verify(self, *, progress: bool = True) -> Verified:
        """Whether every finished tile is there as it was written, by its checksum and seal. Cost: reads them all."""
        finished, faults = self.store.finished(), list[tuple[At, StoreError]]()
        with bar(len(finished), "verify", "tile", show=progress and len(finished) > 1) as step:
            faults += self.store.faults(finished, step)
        return Verified(len(finished), self.store.plan.count, tuple((at, str(e)) for at, e in faults))

    def tiles(self, wanted: Wanted | None = None) -> Iterator[tuple[Index, Index, Tensor]]:
        """The stored tiles, and of a symmetric matrix their mirror images; each is read once."""
        cut = self.store.plan
        todo: list[_Reading] = []
        for i, j in cut.tiles():
            rows, columns = cut.block(i), cut.block(j, 1)
            straight = wanted is None or wanted(rows, columns)
            mirrored = cut.symmetric and i != j and (wanted is None or wanted(columns, rows))
            if straight or mirrored:
                todo.append(_Reading(i, j, straight, mirrored))
        self._require_present({(t.i, t.j) for t in todo})
        for t, tile in self._read(todo):
            rows, columns = cut.block(t.i), cut.block(t.j, 1)
            if t.straight:
                yield rows, columns, tile
            if t.mirrored:
                yield columns, rows, mirror_tile(tile)

    def _require_present(self, needed: set[At]) -> None:
        finished = self.store.finished()
        absent = needed - finished
        if absent:
            raise IncompleteGram(
                f"{self.path} is not finished ({len(finished)} of {self.store.plan.count} tiles), and {len(absent)} "
                f"of the tiles needed here are missing, first {min(absent)}. Go on with tg.compute(…, "
                f"store={self.path!r}), or take a part that is there."
            )

    def _read(self, todo: list[_Reading]) -> Iterator[tuple[_Reading, Tensor]]:
        """The tiles in order, a few read ahead."""
        # Threads: reading and checksums let go of Python's lock.
        with ThreadPoolExecutor(AHEAD) as pool:
            ahead: list[Future[np.ndarray]] = []
            for k, t in enumerate(todo):
                while len(ahead) < min(AHEAD, len(todo) - k):
                    following = todo[k + len(ahead)]
                    ahead.append(pool.submit(self.store.read, following.i, following.j))
                try:
                    tile = torch.from_numpy(ahead.pop(0).result())
                except DamagedTile as e:
                    if self.heal is None:
                        raise
                    tile = self.heal(t.i, t.j, e)
                yield t, tile

    def __reduce__(self) -> tuple[Callable[[str], "StoredGram"], tuple[str]]:
        """Pickled by its path: another process reads the same files."""
        return open_store, (self.path,)

    def __repr__(self) -> str:
        done, count = self.progress
        state = "" if done == count else f", {done} of {count} tiles"
        return f"StoredGram({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype}{state})"


def open_gram(path: StorePlace) -> StoredGram:
    """The Gram matrix in a store, finished or unfinished, without the kernel that made it.

    >>> import tempfile, tangency as tg
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(9, 3), store=folder + "/gram")
    ...     tg.open_gram(folder + "/gram").shape
    torch.Size([9, 9])
    """
    gram = open_store(path)
    if gram.manifest["kernel"]["kernel"] == "features":
        raise StoreError(f"{path} holds features, not a Gram matrix. Open them with tg.projection.open_features.")
    return gram


def open_store(path: StorePlace) -> StoredGram:
    """What a store holds: a Gram matrix, or features, which are stored as one."""
    store = Store.find(path)
    if store is None:
        raise StoreError(f"there is no Gram store at {path}. Make one: tg.compute(kernel, x, store={str(path)!r}).")
    return StoredGram(store)


def _about(place: Shelf) -> np.ndarray | None:
    """The bytes of a store's zarr.json, if there is one."""
    try:
        return place.read(ABOUT, MOST_ABOUT)
    except Unfit as e:
        raise StoreError(f"{place.name} cannot be opened as a Gram store: its zarr.json {e}. {NEW_FOLDER}") from None


@contextmanager
def _disk_errors(what: str, done: str) -> Iterator[None]:
    """Errors of the disk as StoreError: what could not be done, and what is safe."""
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


def _crc32c() -> Callable[[np.ndarray], int]:
    """The checksum of some bytes, as zarr's codec computes it."""
    with needed("google_crc32c", "store="):
        from google_crc32c import value
    return value
