"""Where a store keeps its files: a folder, or whatever zarr reaches by a URL. Keys are paths below it, with slashes."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np

from .._base.extras import needed
from .._base.files import nearest, obstacle
from .._base.types import StorePlace
from ..errors import InputError, StoreError

if TYPE_CHECKING:
    from zarr.abc.buffer import Buffer
    from zarr.storage import StorePath

PARTIAL = ".partial"  # what a file is called until it is whole
# Seconds after which a file that is not whole is nobody's any more (heuristic: no tile takes an hour to write).
ABANDONED = 3600
Bytes: TypeAlias = bytes | memoryview
Value = TypeVar("Value")


class Unfit(Exception):
    """Why something is not what was written there: its kind, or its size."""


class Shelf(ABC):
    """Files by their keys. A file is there whole or not at all."""

    name: str  # as messages call it, and as it is opened again

    @abstractmethod
    def read(self, key: str, most: int) -> np.ndarray | None:
        """The bytes, or None; `Unfit` where there are more than `most`, or where it is no file."""

    @abstractmethod
    def write(self, key: str, *parts: Bytes) -> None:
        """Put the parts, one after the other, in the place of what is there."""

    def obstacle(self, key: str) -> str | None:
        """Why nothing can be put there, where that is known."""
        return None

    def make(self) -> None:
        """Make room for a new store."""
        return None

    @abstractmethod
    def begin(self, key: str, value: bytes) -> bool:
        """Put it there if nothing is: of many that try at once, one succeeds. Whether it is known that this one did."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether something is there."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Take away what is there, if anything."""

    @abstractmethod
    def keys(self, under: str) -> Iterator[str]:
        """The keys below a folder."""

    def tidy(self, *under: str) -> int | None:
        """Remove what writers that were killed left behind in these folders; the bytes that can then still be put
        there, where that is known."""
        return None

    def foreign(self) -> bool:
        """Whether something is there, and no array."""
        return False


class Folder(Shelf):
    """A folder of this machine. Only the folder itself may be a link: whoever sends a store decides what is in it, and
    a link in it would have us write elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        # Folders that are known to be there: to ask for every tile takes longer than writing it, on a network's disk.
        self._made: set[Path] = set()

    def read(self, key: str, most: int) -> np.ndarray | None:
        """The bytes of a file, or None; its kind and size are looked at first."""
        try:
            # A FIFO would wait for somebody who writes to it, for ever.
            with open(os.open(self._at(key), os.O_RDONLY | os.O_NONBLOCK), "rb") as f:
                there = os.fstat(f.fileno())
                if not stat.S_ISREG(there.st_mode):
                    raise Unfit("is no file, but a FIFO, a device or a folder")
                if there.st_size > most:
                    raise Unfit(f"has {there.st_size:,} bytes, and what was written there has {most:,} at most")
                return np.fromfile(f, np.uint8)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            if e.errno != errno.ENXIO:  # a socket
                raise
            raise Unfit("is no file, but a socket") from None

    def write(self, key: str, *parts: Bytes) -> None:
        """A file beside it that takes its place when it is whole."""
        path = self._room(key)
        # Renaming is atomic: whoever reads sees the old file or the new one, also after a crash of this process.
        try:
            os.replace(self._partial(path, parts), path)
        except FileNotFoundError:  # the folder was taken away after it was made
            self._made.clear()
            raise

    def obstacle(self, key: str) -> str | None:
        """Why no file can be written there, looked at without a trace."""
        return obstacle(self.path / key)

    def make(self) -> None:
        """The folder, and those above it."""
        self.path.mkdir(parents=True, exist_ok=True)

    def begin(self, key: str, value: bytes) -> bool:
        """A file that is whole as soon as it can be seen, where the disk has links."""
        path = self._room(key)
        partial = self._partial(path, [value])
        try:
            os.link(partial, path)  # unlike a renaming, it does not replace
        except FileExistsError:
            return False
        except OSError:  # a disk without links
            # It can be seen before it is whole; whoever finds half a zarr.json is told so, and calls again.
            with contextlib.suppress(FileExistsError), open(path, "xb") as f:
                f.write(value)
            return False
        finally:
            partial.unlink()
        return True

    def has(self, key: str) -> bool:
        """Whether there is a file."""
        return os.path.lexists(self._at(key))

    def delete(self, key: str) -> None:
        """Remove the file."""
        with contextlib.suppress(FileNotFoundError):
            self._at(key).unlink()

    def keys(self, under: str) -> Iterator[str]:
        """The files that are whole, of all folders below."""
        root = self.path / under
        if root.is_symlink():
            raise _link(root)
        for folder, _, files in os.walk(root, onerror=_raise_unless_absent):
            below = Path(folder).relative_to(self.path).as_posix()
            for name in files:
                if not name.endswith(PARTIAL):
                    yield f"{below}/{name}"

    def tidy(self, *under: str) -> int:
        """Only what no process can still be writing; the bytes that the disk has free."""
        for top in under:
            for folder, _, files in os.walk(self.path / top):
                for path in (Path(folder) / name for name in files if name.endswith(PARTIAL)):
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - path.stat().st_mtime > ABANDONED:
                            path.unlink()
        return shutil.disk_usage(nearest(self.path)).free

    def foreign(self) -> bool:
        """Whether it is a file, or a folder of other things."""
        if not self.path.exists() or (self.path / "zarr.json").is_file():
            return False
        return not self.path.is_dir() or any(p.suffix != PARTIAL for p in self.path.iterdir())

    def _at(self, key: str) -> Path:
        """The path of a key, which is no link."""
        path = self.path / key
        if path.is_symlink():
            raise _link(path)
        return path

    def _room(self, key: str) -> Path:
        """The path of a key, with the folders above it made; never the outermost, which may have been moved away."""
        path = self.path / key
        for folder in reversed(path.relative_to(self.path).parents[:-1]):
            folder = self.path / folder
            if folder not in self._made:
                with contextlib.suppress(FileExistsError):
                    folder.mkdir()
                if folder.is_symlink():
                    raise _link(folder)
                self._made.add(folder)
        return path

    def _partial(self, path: Path, parts: Sequence[Bytes]) -> Path:
        """The parts in a file beside the path, with a name that nobody else has."""
        # Beside it, since only within one disk can a file be renamed; two processes may be writing the same tile.
        made = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
        try:
            with open(made, "xb") as f:
                for part in parts:
                    f.write(part)
        except BaseException:  # Ctrl-C too
            made.unlink(missing_ok=True)
            raise
        return made


class Remote(Shelf):
    """A store of zarr's: fsspec's URLs, memory, an object store."""

    def __init__(self, path: "StorePath", name: str) -> None:
        self.path, self.name = path, name

    def read(self, key: str, most: int) -> np.ndarray | None:
        """The bytes of an object, or None; one byte more than `most` is asked for, and no more."""
        from zarr.abc.store import RangeByteRequest

        buffer = _wait((self.path / key).get(byte_range=RangeByteRequest(0, most + 1)))
        if buffer is None:
            return None
        if len(buffer) > most:
            raise Unfit(f"has more bytes than what was written there, {most:,} at most")
        return np.array(buffer.as_numpy_array()).view(np.uint8).reshape(-1)

    def write(self, key: str, *parts: Bytes) -> None:
        """One object of all parts; object stores replace whole objects."""
        _wait((self.path / key).set(_buffer(b"".join(bytes(p) for p in parts))))

    def begin(self, key: str, value: bytes) -> bool:
        """Not all stores of zarr's can say whether it was there: never known."""
        _wait((self.path / key).set_if_not_exists(_buffer(value)))
        return False

    def has(self, key: str) -> bool:
        """Whether there is an object."""
        return bool(_wait((self.path / key).exists()))

    def delete(self, key: str) -> None:
        """Remove the object."""
        _wait((self.path / key).delete())

    def keys(self, under: str) -> Iterator[str]:
        """The objects with this prefix."""

        async def collect() -> list[str]:
            return [key async for key in self.path.store.list_prefix(f"{self.path.path}/{under}/".lstrip("/"))]

        cut = len(self.path.path) + 1 if self.path.path else 0
        for key in _wait(collect()):
            yield key[cut:]


def _wait(coroutine: Coroutine[object, object, Value]) -> Value:
    """What zarr, which is asynchronous, answers."""
    from zarr.core.sync import sync

    return sync(coroutine)


def _raise_unless_absent(e: OSError) -> None:
    """What is not there has nothing in it; what may not be read is not nothing."""
    if not isinstance(e, FileNotFoundError):
        raise e


def shelf(where: StorePlace | Shelf) -> Shelf:
    """What the user gave: a path, a URL, or a store of zarr's. A path is made absolute here, once: the working folder
    may change later."""
    if isinstance(where, Shelf):
        return where
    if isinstance(where, (str, os.PathLike)) and not (isinstance(where, str) and "://" in where.replace("file://", "")):
        return Folder(_path(where))
    zarr = _zarr(where)
    if isinstance(where, str):
        try:
            store = zarr.storage.FsspecStore.from_url(where)
        except ImportError as e:
            raise InputError(f"store={where!r} needs another package: {e}.") from e
        except (OSError, ValueError, TypeError) as e:
            raise StoreError(f"{where} cannot be opened ({e}). Give a folder, or a URL that fsspec knows.") from e
        return Remote(zarr.storage.StorePath(store), where)
    if isinstance(where, dict):
        where = zarr.storage.MemoryStore(where)
    if isinstance(where, zarr.abc.store.Store):
        where = zarr.storage.StorePath(where)
    if not isinstance(where, zarr.storage.StorePath):
        raise InputError(f"store is a {type(where).__name__}; needed: a folder, a URL, or a store of zarr's.")
    if isinstance(where.store, zarr.storage.LocalStore):
        return Folder((where.store.root / where.path).absolute())
    return Remote(where, str(where))


def _path(where: str | os.PathLike[str] | os.PathLike[bytes]) -> Path:
    """A folder as an absolute path."""
    text = os.fspath(where)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if text.startswith("file:"):
        url = urlsplit(text)
        if url.netloc not in ("", "localhost"):
            raise InputError(f"store={text!r} names the machine {url.netloc!r}; needed: file:///folder, or a path.")
        text = url2pathname(url.path)
    if not text or "\0" in text:
        raise InputError(f"store={text!r} is no place; needed: a folder or a URL.")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as e:  # ~somebody, who is not there
        raise InputError(f"store={text!r}: {e}") from e


def _link(path: Path) -> StoreError:
    """What to say of a link inside a store."""
    return StoreError(
        f"{path} is a link to {os.readlink(path)!r}. What is inside a store must be its own: only the store's folder "
        "itself may be a link."
    )


def _zarr(where: object) -> ModuleType:
    """The library, which only some places need."""
    with needed("zarr", f"store={where!r}"):
        import zarr
        import zarr.abc.store
        import zarr.storage
    return zarr


def _buffer(value: bytes) -> "Buffer":
    """Bytes as zarr takes them."""
    from zarr.core.buffer import default_buffer_prototype

    return default_buffer_prototype().buffer.from_bytes(value)
