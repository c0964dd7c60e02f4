"""Local files, and what to say where they are missing or damaged. Nothing is downloaded, nothing is unpickled."""

import gzip
import os
import zlib
from pathlib import Path
from typing import Any

from ..errors import InputError

Named = str | os.PathLike[str]


def path(given: Any, what: str) -> Path:
    """What the user gave as a path; ~ is the home folder."""
    if not isinstance(given, (str, os.PathLike)):
        raise InputError(f"{what} is a {type(given).__name__}; needed: a path (a string or a pathlib.Path).")
    return Path(os.path.expanduser(os.fsdecode(given)))


def read(file: Path, need: str) -> bytes:
    """The bytes of a file, unpacked if they are gzipped, whatever its name."""
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{file} does not exist; needed: {need}.") from None
    except IsADirectoryError:
        raise InputError(f"{file} is a folder, not a file; needed: {need}.") from None
    except PermissionError:
        raise InputError(f"{file} may not be read by you; needed: {need}. Try chmod u+r.") from None
    except OSError as e:
        raise InputError(f"{file} cannot be read ({e.strerror}); needed: {need}.") from None
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except EOFError:
        raise InputError(f"{file} is truncated: its gzip stream ends early. Get it again.") from None
    except (gzip.BadGzipFile, zlib.error) as e:
        raise InputError(f"{file} is damaged: it cannot be unpacked ({e}). Get it again.") from None


def locate(folder: Named, places: tuple[str, ...], file: str, need: str) -> Path:
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
        if present(place, file) is not None:
            return place
    raise InputError(f"there is no {file} in {', '.join(map(str, tried))}; needed: {need}.")


def present(folder: Path, file: str) -> Path | None:
    """The path of the file, gzipped or not, if it is there."""
    return next((folder / f for f in (file, f"{file}.gz") if os.path.lexists(folder / f)), None)
