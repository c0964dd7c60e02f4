"""How much memory there is, how much of it we take where the user says nothing, and sizes rounded to powers of two."""

import os

import torch

# Where the user gives no budget: for a Gram on a CPU, for what one micro-batch keeps on a CPU (both heuristics).
GRAM_ON_CPU, BATCH_ON_CPU = 4 << 30, 1 << 28


def machine_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: torch.device) -> int:
    """Bytes that a GPU has free, torch's own cache included; of a CPU, all that the machine has."""
    if device.type != "cuda":
        return machine_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def gram_budget(device: torch.device) -> int:
    """Bytes for computing a Gram matrix: all that a GPU has free, 4 GiB on a CPU."""
    return free_memory(device) if device.type == "cuda" else GRAM_ON_CPU


def batch_budget(device: torch.device) -> int:
    """Bytes for one micro-batch: a third of what a GPU has free, 256 MiB on a CPU."""
    return free_memory(device) // 3 if device.type == "cuda" else BATCH_ON_CPU


def power_of_two(v: int) -> int:
    """The smallest power of two that is at least v.

    >>> [power_of_two(v) for v in (1, 2, 3, 1000)]
    [1, 2, 4, 1024]
    """
    return 1 << (v - 1).bit_length()
