"""How much memory there is, how much of it we take where the user says nothing, and sizes rounded to powers of two."""

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from ..errors import MemoryBudgetError

# What is taken where the user gives no budget, in bytes; all of them heuristics. (How many numbers one loop of an
# algorithm holds at a time stands beside the loop.)
GRAM_ON_CPU = 0.7  # of what is free, for computing a Gram: other things grow meanwhile
GRAM_ELSEWHERE = 4 << 30  # the same on machines that we do not see
BATCH_ON_CPU = 1 << 29  # for what one micro-batch keeps
WORKSPACE = {"cpu": 1 << 28, "cuda": 1 << 32}  # for each large temporary of a contraction
TILE_WORKSPACE = {"cpu": 1 << 28, "cuda": 1 << 31}  # the same in a run of tiles, at most
TILE_CAPTURE = {"cpu": 1 << 30, "cuda": 3 << 33}  # for making a block of a run of tiles, at most
WIDENED_ON_CPU = 4 << 30  # a Gram in float32 is copied to float64 once if that takes no more
ATTRIBUTIONS = "256MB"  # for the attributions of one band of test samples


def machine_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Where Linux says what is free, and what a container may take: the files of both versions of control groups, with the
# line of memory.stat that counts pages of files, which are given back when memory is wanted.
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int:
    """Bytes that may still be taken without swapping: what is free or can be freed, within the limits of all control
    groups that this process is in (a container's, a job's) and of its address space."""
    free = _said(_PROC / "meminfo", "MemAvailable:")
    free = machine_memory() if free is None else free << 10
    for group in _control_groups():
        for most, now, cached in _LIMITS:
            limit, used = _said(group / most), _said(group / now)
            if limit is not None and used is not None:
                free = min(free, limit - used + min(used, _said(group / "memory.stat", cached) or 0))
    space = _said(_PROC / "self" / "limits", "Max address space")
    if space is not None:
        free = min(free, space - ((_said(_PROC / "self" / "status", "VmSize:") or 0) << 10))
    return max(0, free)


def _control_groups() -> Iterator[Path]:
    """The folders of the groups that this process is in, and of those around them: each may have a limit."""
    yield from (_CGROUPS, _CGROUPS / "memory")  # inside a container its own group stands there, whatever its name
    for line in _text(_PROC / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        for root in (_CGROUPS / "memory",) if controllers else (_CGROUPS, _CGROUPS / "unified"):
            group = root
            for part in Path(path.lstrip("/")).parts:
                group /= part
                yield group


def _said(file: Path, line: str = "") -> int | None:
    """The number that a file of the system says, in the line that begins so; None where it says none."""
    for words in (text.removeprefix(line).split() for text in _text(file).splitlines() if text.startswith(line)):
        if words and words[0].isdigit():
            return int(words[0])
    return None


def _text(file: Path) -> str:
    """What a file of the system says; nothing where there is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8")
    return ""


def free_memory(device: torch.device) -> int:
    """Bytes that a GPU has free, torch's own cache included; of a CPU, all that the machine has."""
    if device.type != "cuda":
        return machine_memory()
    # What torch holds without using it can be had again, though the driver does not count it as free.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def gram_budget(device: torch.device, workers: int = 1) -> int:
    """Bytes for computing a Gram matrix: all that a GPU has free; of what a CPU has free 70 %, shared by the workers.

    `workers` share this machine; 0 says that they are on others, of which nothing is known.
    """
    if device.type == "cuda":
        return free_memory(device)
    share = int(GRAM_ON_CPU * available_memory()) // max(1, workers)
    share = min(share, GRAM_ELSEWHERE) if workers == 0 else share
    # In steps of about a tenth: what is free changes all the time, and with the budget may change how blocks are cut.
    step = 1 << max(0, share.bit_length() - 4)
    return max(1, share // step * step)


def batch_budget(device: torch.device) -> int:
    """Bytes for one micro-batch: a third of what a GPU has free, 512 MiB on a CPU."""
    return free_memory(device) // 3 if device.type == "cuda" else BATCH_ON_CPU


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that this process holds on the device now, and the most that it has ever held there (0 where unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    now, most = (_said(_PROC / "self" / "status", line) for line in ("VmRSS:", "VmHWM:"))
    return (now or 0) << 10, (most or 0) << 10


def ran_out(e: BaseException) -> bool:
    """Whether an exception says that there was no memory left: Python's own, CUDA's, or what torch says on a CPU.

    Our own, which says what to do, is not meant.
    """
    if isinstance(e, MemoryBudgetError):
        return False
    return isinstance(e, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(e, RuntimeError) and any(words in str(e) for words in _NO_MEMORY)
    )


# What torch says in a plain RuntimeError: of Linux and of macOS, of Windows, of a file that was to be mapped.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


@cache
def keep_memory() -> None:
    """Let malloc keep what is freed: else every temporary is paged in anew, at about the cost of its arithmetic.

    glibc returns blocks above a limit to the system at once, and raises the limit when one is freed (mallopt(3),
    M_MMAP_THRESHOLD); 31 MB is just below what it takes note of. Nothing is touched, so nothing is used.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def give_back() -> None:
    """Let malloc give unused pages back, also those between others in use (glibc's; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def own_pages(size: int) -> torch.Tensor:
    """So many zero bytes on the CPU, in pages of their own: written where they are looked at, given back at once.

    Of large blocks that come and go malloc keeps more and more (`keep_memory`). NumPy's zeros would be in huge pages,
    which a virtual machine may fetch from its host at twice the cost.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=torch.uint8)


def power_of_two(v: int) -> int:
    """The smallest power of two that is at least v.

    >>> [power_of_two(v) for v in (1, 2, 3, 1000)]
    [1, 2, 4, 1024]
    """
    return 1 << (v - 1).bit_length()
