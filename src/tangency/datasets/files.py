"""Local files, and what to say where they are missing or damaged. Nothing is downloaded, nothing is unpickled."""

import gzip
import io
import os
import zlib
from pathlib import Path

from .._base.files import path, read
from .._base.types import FilePath
from ..errors import InputError

# What a gzipped file may unpack to: in any case the first, a hundredfold up to the second (heuristic: tables and
# pictures shrink to a tenth or so, and the official sets are smaller; a gzip bomb holds a thousandfold).
UNPACKED = 2**26, 2**30


def title(file: Path) -> str:
    """What a set from this file is called."""
    return text_of(file.stem)


def text_of(name: str) -> str:
    """The name of a file as text; bytes of it that are no text are shown as \\x…"""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def read_bytes(file: Path, need: str) -> bytes:
    """The bytes of a file, unpacked if they are gzipped, whatever its name; within limits (`UNPACKED`)."""
    try:
        raw = read(file)
    except FileNotFoundError:
        raise InputError(f"{file} does not exist; needed: {need}.") from None
    except IsADirectoryError:
        raise InputError(f"{file} is a folder, not a file; needed: {need}.") from None
    except PermissionError:
        raise InputError(f"{file} may not be read by you; needed: {need}. Try chmod u+r.") from None
    except OSError as e:
        raise InputError(f"{file} cannot be read ({e.strerror or e}); needed: {need}.") from None
    if raw[:2] != b"\x1f\x8b":
        return raw
    limit = min(max(UNPACKED[0], 100 * len(raw)), UNPACKED[1])
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as packed:
            data = packed.read(limit + 1)
    except EOFError:
        raise InputError(f"{file} is truncated: its gzip stream ends early. Get it again.") from None
    except (gzip.BadGzipFile, zlib.error) as e:
        raise InputError(f"{file} is damaged: it cannot be unpacked ({e}). Get it again.") from None
    if len(data) > limit:
        raise InputError(
            f"{file} has {len(raw):,} bytes and unpacks to more than {limit:,}; needed: {need}. If it is right, "
            "unpack it first (gunzip): unpacked files may have any size."
        )
    return data


def locate(folder: FilePath, places: tuple[str, ...], file: str, need: str) -> Path:
    """The first of the folder and these places in it that has the file, gzipped or not."""
    root = path(folder, "folder")
    if not os.path.lexists(root):
        raise InputError(f"the folder {root} does not exist; needed: {need}.")
    if not os.path.isdir(root):
        raise InputError(f"{root} is not a folder; needed: the folder of {need}.")
    if not os.access(root, os.R_OK | os.X_OK):
        raise InputError(f"the folder {root} may not be read by you; needed: {need}. Try chmod u+rx.")
    tried = [root, *(root / place for place in places)]
    for place in tried:
        if find_file(place, file) is not None:
            return place
    raise InputError(f"there is no {file} in {', '.join(map(str, tried))}; needed: {need}.")


def find_file(folder: Path, file: str) -> Path | None:
    """The path of the file, gzipped or not, if it is there."""
    return next((folder / f for f in (file, f"{file}.gz") if os.path.lexists(folder / f)), None)
