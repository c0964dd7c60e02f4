"""Full disks while each kind of file is written over an old one: by a limit on files, and by a small disk in memory."""

import contextlib
import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from tangency.errors import InputError

from .cases import Case, state, writers


def attack(folder: Path, count: int, draw: Random) -> list[Case]:
    """`count` limits for each kind, and as many disks with that much room where the system lets us mount one."""
    found: list[Case] = []
    for kind, (to, works) in writers(folder).items():
        for work in works:
            work()
        size = to.stat().st_size
        for k in range(count):
            found.append(_case(kind, f"limit {k}", to, works[k % 2], full_disk(draw.randrange(size))))
    with _small_disk(2**22) as disk:
        if disk is None:
            return found
        for kind, (to, works) in writers(disk).items():
            for work in works:
                work()
            for k in range(count):
                room = draw.randrange(to.stat().st_size)
                found.append(_case(kind, f"tmpfs {k}", to, works[k % 2], _filled(disk, room)))
            to.unlink()
    return found


def _case(
    kind: str, name: str, to: Path, work: Callable[[], object], full: contextlib.AbstractContextManager[object]
) -> Case:
    to.chmod(0o640)
    was = state(to.parent)
    try:
        with full:
            work()
        return Case(kind, name, "done")  # there was room enough
    except InputError as e:
        said, outcome = str(e), "refused"
    except BaseException as e:
        said, outcome = repr(e), "raw"
    now = state(to.parent)
    if now != was:
        outcome = "left" if set(now) - set(was) else "half"
    return Case(kind, name, outcome, said)


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes: as on a disk that is full, but for the words."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def _small_disk(size: int) -> Iterator[Path | None]:
    """A disk in memory, if it may be mounted here."""
    with tempfile.TemporaryDirectory() as folder:
        how = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        if os.getuid() != 0 or subprocess.run(how, check=False, capture_output=True).returncode != 0:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def _filled(disk: Path, room: int) -> Iterator[None]:
    """All of a disk but so many bytes is taken (by the page)."""
    free = os.statvfs(disk)
    taken = max(0, free.f_bavail * free.f_bsize - room)
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * taken)
    try:
        yield
    finally:
        ballast.unlink()
