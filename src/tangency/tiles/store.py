"""Gram matrices on disk: a zarr v3 array, one checksummed chunk per tile, and a manifest of what decides its numbers.

Each tile is written atomically (to a temporary name, then renamed). Which tiles are finished is which chunks are there:
no log that could disagree with the data. Of a symmetric matrix only the upper half is stored.
"""

import contextlib
import errno
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._version import __version__
from ..errors import DamagedTile, IncompleteGram, InputError, StoreError, StoreMismatch, StoreWarning
from ..gram import Gram, Index, Wanted, mirror
from .plan import TilePlan

FORMAT = 1
CONFIG = {"write_empty_chunks": True}  # zarr would compare every tile with the fill value
# Tiles that are read ahead (heuristic: enough to keep a disk busy).
AHEAD = 3
Heal = Callable[[int, int, Exception], Tensor]


class Store:
    """The array, by tiles."""

    def __init__(self, array: Any, url: str) -> None:
        self.array, self.url = array, url
        self.manifest: dict[str, Any] = dict(array.attrs["tangency"])

    @staticmethod
    def find(where: Any) -> "Store | None":
        """What is at a path or URL: a store of ours, or nothing yet. Anything else is refused."""
        zarr, where = _zarr(), _where(where)
        url = str(where)
        path = None if "://" in url or not isinstance(where, (str, Path)) else Path(where)
        if path is not None and path.exists() and not (path / "zarr.json").is_file():
            if not path.is_dir() or any(p.suffix != ".partial" for p in path.iterdir()):
                raise StoreError(f"{url} exists and is not a Gram store. Give an empty or a new folder.")
            return None
        try:
            array = zarr.open_array(store=where, mode="r+", config=CONFIG)
        except (FileNotFoundError, zarr.errors.NodeNotFoundError):
            return None
        except ImportError as e:
            raise InputError(f"store={url!r} needs another package: {e}.") from e
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise StoreError(f"{url} cannot be opened as a Gram store ({e}). Give an empty or a new folder.") from e
        if "tangency" not in array.attrs:
            raise StoreError(f"{url} is a zarr array, but not one that tangency made. Give another folder.")
        store = Store(array, url)
        if store.manifest.get("format") != FORMAT:
            raise StoreError(
                f"{url} has format {store.manifest.get('format')}; this version of tangency reads {FORMAT}. Use the "
                f"version that made it: {store.manifest.get('versions', {}).get('tangency')}."
            )
        return store

    @staticmethod
    def create(where: Any, manifest: Mapping[str, Any], overwrite: bool = False) -> "Store":
        """A new store; if another process has just made one here, that one."""
        zarr, where = _zarr(), _where(where)
        rows, shape = manifest["plan"]["rows"], manifest["shape"]
        chunks = [rows, rows] if len(shape) == 2 else [rows, shape[1], rows, shape[3]]
        try:
            array = zarr.create_array(
                store=where,
                shape=shape,
                chunks=[min(c, s) for c, s in zip(chunks, shape, strict=True)] if min(shape) else chunks,
                dtype=manifest["dtype"],
                fill_value=float("nan"),
                compressors=[zarr.codecs.Crc32cCodec()],
                filters=None,
                attributes={"tangency": dict(manifest)},
                config=CONFIG,
                overwrite=overwrite,
            )
        except zarr.errors.ContainsArrayError:
            found = Store.find(where)
            assert found is not None
            return found
        except OSError as e:
            raise StoreError(f"the store {where} cannot be made: {e}. Give a folder that can be written.") from e
        return Store(array, str(where))

    @property
    def function(self) -> str | None:
        """The MODULE:FUNCTION of the command line that made it."""
        return self.array.attrs.get("function")

    def remember(self, function: str) -> None:
        self.array.attrs["function"] = function

    @property
    def local(self) -> Path | None:
        """The folder, if it is one of this machine."""
        return None if "://" in self.url or not Path(self.url).is_dir() else Path(self.url)

    @property
    def plan(self) -> TilePlan:
        shape, symmetric = self.manifest["shape"], self.manifest["symmetric"]
        return TilePlan(shape[0], shape[len(shape) // 2], symmetric, **self.manifest["plan"])

    @property
    def complete(self) -> bool:
        return not set(self.plan.tiles()) - self.finished()

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, str(self.array.dtype))

    def shape(self, n: int, m: int) -> torch.Size:
        """The array's shape with other numbers of samples."""
        return torch.Size([n, m] if self.array.ndim == 2 else [n, self.array.shape[1], m, self.array.shape[3]])

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

    def finished(self) -> set[tuple[int, int]]:
        """The tiles whose chunks are there."""
        found = set()
        for key in _list(self.array.store_path):
            parts = key.split("/")
            if parts[0] == "c" and len(parts) > 2 and all(p.isdigit() for p in parts[1:]):
                numbers = [int(p) for p in parts[1:]]
                found.add((numbers[0], numbers[len(numbers) // 2]))
        return found

    def write(self, i: int, j: int, tile: np.ndarray) -> None:
        try:
            self.array.set_block_selection(self._at(i, j), tile)
        except OSError as e:
            raise _failed(self.url, e) from e

    def read(self, i: int, j: int) -> np.ndarray:
        """A finished tile, if it matches its checksum."""
        try:
            tile = np.asarray(self.array.get_block_selection(self._at(i, j)))
        except (ValueError, RuntimeError, EOFError) as e:
            raise DamagedTile(
                f"tile {i}, {j} of {self.url} does not match its checksum ({e}). Compute it again: call tg.compute "
                f"with what the store was begun with, or `tangency gram`."
            ) from e
        except OSError as e:
            raise StoreError(f"tile {i}, {j} of {self.url} cannot be read: {e}.") from e
        return tile

    def damaged(self, tiles: set[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], DamagedTile]]:
        """Those of the finished tiles that do not match their checksums. Cost: reads them all."""

        def bad(at: tuple[int, int]) -> tuple[tuple[int, int], DamagedTile] | None:
            try:
                self.read(*at)
            except DamagedTile as e:
                return at, e
            return None

        with ThreadPoolExecutor(AHEAD) as pool:
            yield from (found for found in pool.map(bad, sorted(tiles)) if found is not None)

    def discard(self, i: int, j: int) -> None:
        where = self.array.store_path
        _sync(where.store.delete("/".join([*filter(None, [where.path]), "c", *map(str, self._at(i, j))])))

    def clear_leftovers(self) -> None:
        """Remove what writers that were killed left behind (files no process can still be writing)."""
        if self.local is not None:
            for path in self.local.glob("c/**/*.partial"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > 3600:
                        path.unlink()

    def require_space(self, tiles: int) -> None:
        """Refuse before the work if the disk cannot hold the tiles that are still to come."""
        if self.local is None:
            return
        need = tiles * int(np.prod(self.array.chunks)) * self.array.dtype.itemsize
        free = shutil.disk_usage(self.local).free
        if need > free:
            raise StoreError(
                f"{self.url} needs {need / 1e9:.3g} GB more and the disk has {free / 1e9:.3g} GB free. Free some, or "
                "give a folder on another disk."
            )

    def _at(self, i: int, j: int) -> tuple[int, ...]:
        return (i, j) if self.array.ndim == 2 else (i, 0, j, 0)


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
        return torch.Size(self.store.array.shape)

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
        return open_gram, (self.path,)

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
    store = Store.find(path)
    if store is None:
        raise StoreError(f"there is no Gram store at {path}. Make one: tg.compute(kernel, x, store={str(path)!r}).")
    return StoredGram(store)


def manifest(
    spec: Mapping[str, Any], inputs: Mapping[str, str | None], shape: torch.Size, dtype: torch.dtype, cut: TilePlan
) -> dict[str, Any]:
    """Everything that decides the numbers, and with what they were made."""
    return {
        "format": FORMAT,
        "kernel": dict(spec),
        "inputs": dict(inputs),
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "symmetric": cut.symmetric,
        "plan": cut.decisive,
        "versions": {
            "tangency": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every field in which two trees differ, with its path: (then, now)."""
    before, given, absent = dict(_flatten(was)), dict(_flatten(now)), "(absent)"
    both = {k: (before.get(k, absent), given.get(k, absent)) for k in [*given, *before]}
    return {k: pair for k, pair in both.items() if pair[0] != pair[1]}


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for k, v in tree.items():
            yield from _flatten(v, f"{prefix}.{k}" if prefix else str(k))
    elif isinstance(tree, list) and any(isinstance(v, Mapping) for v in tree):
        for k, v in enumerate(tree):
            yield from _flatten(v, f"{prefix}[{k}]")
    else:
        yield prefix, list(tree) if isinstance(tree, tuple) else tree


def _failed(url: str, e: OSError) -> StoreError:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"the disk of {url} is full. The finished tiles are safe: free some space and call again with the same "
            "arguments to go on."
        )
    return StoreError(f"{url} cannot be written: {e}. The finished tiles are safe; call again to go on.")


def _where(store: Any) -> Any:
    """What zarr opens: a path, a URL or a store of its own."""
    if isinstance(store, str):
        store = store.removeprefix("file://")
        if not store:
            raise InputError("store='' is no place; needed: a folder or a URL.")
    return store


def _zarr() -> Any:
    try:
        import zarr
        import zarr.codecs
        import zarr.errors
    except ImportError as e:
        raise InputError("store= needs zarr: pip install 'tangency[store]'.") from e
    return zarr


def _sync(coroutine: Any) -> Any:
    from zarr.core.sync import sync

    return sync(coroutine)


def _list(where: Any) -> list[str]:
    """Keys of the chunks below a zarr store path, relative to it."""

    async def collect() -> list[str]:
        prefix = f"{where.path}/c/" if where.path else "c/"
        return [key async for key in where.store.list_prefix(prefix)]

    cut = len(where.path) + 1 if where.path else 0
    return [key[cut:] for key in _sync(collect())]
