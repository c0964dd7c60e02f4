"""How much memory there is, how much of it we take where the user says nothing, and sizes rounded to powers of two."""

import os
from functools import cache

import torch

# What is taken where the user gives no budget, in bytes; all of them heuristics. (How many numbers one loop of an
# algorithm holds at a time stands beside the loop.)
GRAM_ON_CPU = 4 << 30  # for computing a Gram
BATCH_ON_CPU = 1 << 29  # for what one micro-batch keeps
WORKSPACE = {"cpu": 1 << 28, "cuda": 1 << 32}  # for each large temporary of a contraction
TILE_WORKSPACE = {"cpu": 1 << 28, "cuda": 1 << 31}  # the same in a run of tiles, at most
TILE_CAPTURE = 3 << 33  # for making a block of a run of tiles, at most
WIDENED_ON_CPU = 4 << 30  # a Gram in float32 is copied to float64 once if that takes no more
ATTRIBUTIONS = "256MB"  # for the attributions of one band of test samples


def machine_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: torch.device) -> int:
    """Bytes that a GPU has free, torch's own cache included; of a CPU, all that the machine has."""
    if device.type != "cuda":
        return machine_memory()
    # What torch holds without using it can be had again, though the driver does not count it as free.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def gram_budget(device: torch.device) -> int:
    """Bytes for computing a Gram matrix: all that a GPU has free, 4 GiB on a CPU."""
    return free_memory(device) if device.type == "cuda" else GRAM_ON_CPU


def batch_budget(device: torch.device) -> int:
    """Bytes for one micro-batch: a third of what a GPU has free, 512 MiB on a CPU."""
    return free_memory(device) // 3 if device.type == "cuda" else BATCH_ON_CPU


@cache
def keep_memory() -> None:
    """Let malloc keep what is freed: else every temporary is paged in anew, at about the cost of its arithmetic.

    glibc returns blocks above a limit to the system at once, and raises the limit when one is freed (mallopt(3),
    M_MMAP_THRESHOLD); 31 MB is just below what it takes note of. Nothing is touched, so nothing is used.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def power_of_two(v: int) -> int:
    """The smallest power of two that is at least v.

    >>> [power_of_two(v) for v in (1, 2, 3, 1000)]
    [1, 2, 4, 1024]
    """
    return 1 << (v - 1).bit_length()
