"""Jobs that say how much memory they took; `tests/gram/test_compute.py` runs each in a process of its own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tangency as tg

MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: tg.models.mlp([784, 100, 100, 10]),
    "lenet": lambda: nn.Sequential(tg.models.lenet5(10)),
    "resnet": lambda: tg.models.resnet18(3, width=16),
}


def peak() -> int:
    """The most bytes that this process has held; not ru_maxrss, which begins at the parent's."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def in_memory(model: str, shape: tuple[int, ...], n: int, memory: int) -> int:
    """Bytes beyond what was there before, for n samples and a budget."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernel, x = tg.trace_ntk(MODELS[model]().eval()), torch.randn(n, *shape)
    kernel(x[:2])
    tg.compute(kernel, x[:4], memory="1GiB", progress=False)  # libraries' own first allocations
    before = peak()
    tg.compute(kernel, x, memory=memory, progress=False)
    return peak() - before


def on_disk(inputs: str, store: str, memory: int) -> int:
    """The same with samples from a file and tiles in a store, which is read once."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernel, x = tg.trace_ntk(MODELS["dense"]()), np.load(inputs, mmap_mode="r")
    tg.compute(kernel, np.array(x[:40]), memory="1GiB", store=f"{store}-warm", progress=False)  # libraries' own
    before = peak()
    gram = tg.compute(kernel, x, memory=memory, store=store, progress=False)
    gram @ torch.ones(len(x))
    return peak() - before
