"""Files of the user's: paths as they are given, what cannot be written refused before the work, and one way to write.

A file is written beside its place and renamed: what was there is whole until the new one is. See `write`.
"""

import contextlib
import errno
import io
import os
import secrets
import stat
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Bytes of a name that file systems take (all but a few), and a file that is not whole.
LONGEST, PARTIAL = 255, ".partial"
KINDS = {
    stat.S_IFDIR: "it is a folder", stat.S_IFIFO: "it is a FIFO (a named pipe), not a file",
    stat.S_IFSOCK: "it is a socket, not a file", stat.S_IFCHR: "it is a device, not a file",
    stat.S_IFBLK: "it is a device, not a file",
}  # fmt: skip
ADVICE = "Give a file where you may write."
Content = str | bytes | Callable[[BinaryIO], object]
Places = Mapping[str, Path | None]


def path(given: object, what: str) -> Path:
    """What the user gave as a path; ~ is the home folder."""
    if not isinstance(given, (str, os.PathLike)):
        raise InputError(f"{what} is a {type(given).__name__}; needed: a path (a string or a pathlib.Path).")
    expanded = os.path.expanduser(os.fsdecode(given))
    try:
        encodable = b"\0" not in os.fsencode(expanded)
    except UnicodeEncodeError:
        encodable = False
    if not encodable:
        raise InputError(f"{what} is {expanded!r}, which no file can be called; needed: a path.")
    return Path(expanded)


def writable(given: object, what: str, advice: str = ADVICE) -> Path:
    """A file that can be written, as an absolute path; refused where it cannot be. Nothing is made: `write` does that.

    >>> writable("/dev/null", "--out", "Give a file.")
    Traceback (most recent call last):
    ...
    tangency.errors.InputError: /dev/null cannot be written: it is a device, not a file. Give a file.
    """
    to = path(given, what)
    why = obstacle(to)
    if why is not None:
        raise InputError(f"{to} cannot be written: {why}. {advice}")
    return to.absolute()


def obstacle(to: Path) -> str | None:
    """Why no file can be written there, if so: looked at through links, and without a trace."""
    try:
        real = Path(os.path.realpath(to))
        if there := _there(real):
            _require_file(there)
            if not os.access(real, os.W_OK):
                return os.strerror(errno.EACCES)
        if any(len(os.fsencode(part)) > LONGEST for part in real.parts):
            return os.strerror(errno.ENAMETOOLONG)
        with tempfile.TemporaryFile(dir=nearest(real.parent)):  # tells more than permissions do
            return None
    except OSError as e:
        return e.strerror or str(e)


def nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))


def read(file: Path) -> bytes:
    """The bytes of a file of ours; an OSError says why not. A FIFO or a device, which may never end, is not read."""
    there = os.stat(file)
    if not stat.S_ISDIR(there.st_mode):  # of which reading itself says what it is
        _require_file(there)
    return file.read_bytes()


def apart(files: Places, *, inputs: Places | None = None, folders: Places | None = None) -> None:
    """Refuse two outputs in one place, and an output that is an input: one of the two would be lost.

    By where links lead, by hard links, and by names that some file systems take for one. `folders`: outputs that are
    folders, such as stores; files may lie in them.

    >>> apart({"--out": Path("a.csv"), "--csv": Path("./a.csv")})
    Traceback (most recent call last):
    ...
    tangency.errors.InputError: --out and --csv are one place, a.csv; needed: another for one of them.
    """
    outputs = {name: to for name, to in files.items() if to is not None}
    both = {name: to for name, to in {**outputs, **(folders or {})}.items() if to is not None}
    for (one, a), (other, b) in combinations(both.items(), 2):
        if _same(a, b) or _alike(a) == _alike(b):
            raise InputError(f"{one} and {other} are one place, {a}; needed: another for one of them.")
    for one, a in outputs.items():
        for other, b in both.items():
            if Path(os.path.realpath(a)) in Path(os.path.realpath(b)).parents:
                raise InputError(f"{other} {b} lies in {one} {a}, which is to be a file; needed: another place.")
        for other, read in (inputs or {}).items():
            if read is not None and _same(a, read):
                raise InputError(f"{one} is {a}, which is {other} too and would be overwritten. Give another file.")


def write(to: Path, content: Content) -> None:
    """Put the content in the place of what is there, whole or not at all; where it fails, all is as it was.

    Written beside it, to the disk, and then renamed: whoever reads sees the old file or the new one, whenever this
    process is killed. Through a link, what it leads to is replaced. The mode stays, and the owner where the system lets
    us; another hard link keeps the old content. Text is UTF-8; a function writes to the file that it is given.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder, "new", "a.txt"), "whole")
    ...     Path(folder, "new", "a.txt").read_text()
    'whole'
    """
    made: list[Path] = []
    was: os.stat_result | None = None
    try:
        data = content.encode() if isinstance(content, str) else content
        real = Path(os.path.realpath(to))
        was = _there(real)
        if was is not None:
            _require_file(was)
        made += _make_folders(real.parent)
        _put(real, data, was)
    except BaseException as e:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(e, UnicodeEncodeError):
            bad = f"U+{ord(e.object[e.start]):04X}"
            raise InputError(f"{to} cannot be written: a text holds {bad}, which is half a letter. Mend it.") from None
        if not isinstance(e, OSError):
            raise
        left = "Nothing was written" if was is None else "What was there is as it was"
        raise InputError(f"{to} cannot be written: {e.strerror or e}. {left}. {_remedy(e)}") from None


def _remedy(e: OSError) -> str:
    """What to do about it."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some room, or give a file on another disk."
    return ADVICE


def _there(real: Path) -> os.stat_result | None:
    """What is there, if anything."""
    try:
        return os.stat(real)
    except FileNotFoundError:
        return None


def _require_file(there: os.stat_result) -> None:
    """Refuse what is no file: a FIFO waits for ever, a device takes everything."""
    if not stat.S_ISREG(there.st_mode):
        raise OSError(None, KINDS.get(stat.S_IFMT(there.st_mode), "it is not a file"))


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and those above it; those that were made, outermost first."""
    missing = [folder] if not folder.exists() else []
    while missing and not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _put(real: Path, data: bytes | Callable[[BinaryIO], object], was: os.stat_result | None) -> None:
    """A whole file beside it takes its place."""
    partial = real.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    try:
        if not _nameless(partial, data, was):
            with _File(io.FileIO(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _mode(was)), "wb")) as file:
                _fill(file, data, was)
        os.replace(partial, real)
    except BaseException:  # Ctrl-C too
        partial.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError), _opened(real.parent) as folder:
        os.fsync(folder)


def _nameless(partial: Path, data: bytes | Callable[[BinaryIO], object], was: os.stat_result | None) -> bool:
    """Write a file that has no name until it is whole, so that a process that is killed leaves nothing behind; whether
    this system can (Linux, on most of its disks)."""
    try:
        # Asked first, since to write it in vain may take long.
        made = os.open(partial.parent, os.O_TMPFILE | os.O_WRONLY, _mode(was)) if os.path.isdir("/proc/self/fd") else -1
    except (AttributeError, OSError):
        return False
    if made < 0:
        return False
    with _File(io.FileIO(made, "wb")) as file, _opened(partial.parent) as folder:
        _fill(file, data, was)
        try:
            # The folder's descriptor makes Python call linkat, which goes through the link in /proc to the file.
            os.link(f"/proc/self/fd/{made}", partial.name, dst_dir_fd=folder)
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A folder's descriptor."""
    number = os.open(folder, os.O_RDONLY)
    try:
        yield number
    finally:
        os.close(number)


def _mode(was: os.stat_result | None) -> int:
    """What a file begins with: nobody else reads one that others may not."""
    return 0o666 if was is None else 0o600


class _File(io.BufferedWriter):
    """A file that remembers why it could not be written: `torch.save` makes an error of its own of that."""

    failed: OSError | None = None

    def write(self, data: "Buffer") -> int:
        """As any file's."""
        try:
            return super().write(data)
        except OSError as e:
            self.failed = e
            raise


def _fill(file: _File, data: bytes | Callable[[BinaryIO], object], was: os.stat_result | None) -> None:
    """The content, on the disk, with the mode and owner of what was there."""
    if isinstance(data, bytes):
        file.write(data)
    else:
        try:
            data(file)
        except Exception:
            if file.failed is not None:
                raise file.failed from None
            raise
    file.flush()
    if was is not None:
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), was.st_uid, was.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(was.st_mode))
    os.fsync(file.fileno())


def _same(a: Path, b: Path) -> bool:
    """Whether two paths lead to one place."""
    try:
        return os.path.realpath(a) == os.path.realpath(b) or os.path.samefile(a, b)
    except OSError:  # one of them is not there
        return False


def _alike(to: Path) -> str:
    """What some file systems take for the same name: letters large or small, composed or not."""
    return unicodedata.normalize("NFC", os.path.realpath(to)).casefold()
