"""What this process may use of its machine: cores, memory, how busy it is."""

import os
import sys
from pathlib import Path

from .memory import available_memory

__all__ = ["available_memory", "busy", "cores", "load", "tell_if_busy"]

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: those of the machine, less what affinity or a container's limit takes away."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _limit("cpu.max") or [*_limit("cpu/cpu.cfs_quota_us"), *_limit("cpu/cpu.cfs_period_us")]
    if len(quota) == 2 and all(part.isdigit() for part in quota):
        there = min(there, -(-int(quota[0]) // int(quota[1])))
    return max(1, there)


def load() -> float | None:
    """Processes that want to compute, averaged over the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def busy(threads: int) -> str:
    """A sentence if computing with several threads will stall because others compute too, else nothing.

    `threads`: how many torch uses. A user who has set OMP_NUM_THREADS knows.
    """
    now, have = load(), cores()
    if threads < 2 or now is None or now <= have or "OMP_NUM_THREADS" in os.environ:
        return ""
    return (
        f"this machine is busy (load {now:.1f} on {have} cores), where {threads} threads of torch wait for each other: "
        "OMP_NUM_THREADS=1 before the command is often faster."
    )


def tell_if_busy(threads: int) -> None:
    """Say so on standard error, where it is so."""
    said = busy(threads)
    if said:
        print(f"note: {said}", file=sys.stderr)


def _limit(name: str) -> list[str]:
    """The words of one of a container's limits (Linux control groups, of either version); none where there is none."""
    return _read(_CGROUP / name).split()


def _read(file: Path) -> str:
    """What a file of the system says; nothing where there is none."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
