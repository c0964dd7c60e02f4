"""Randomness that depends on a seed alone, and leaves the caller's generators as they were."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def seeded(seed: int, device: str | torch.device | None = None) -> Iterator[None]:
    """Within it, torch's generators of the CPU and of `device` start from `seed`; after it, they are as before.

    `device` is by default the one on which torch makes tensors by default.

    >>> with seeded(3):
    ...     a = torch.randn(2)
    >>> with seeded(3):
    ...     b = torch.randn(2)
    >>> torch.equal(a, b)
    True
    """
    place = torch.get_default_device() if device is None else torch.device(device)
    on_gpu = place.type == "cuda"
    # Not torch.manual_seed: it would seed every GPU of the machine, and those are not kept here.
    with torch.random.fork_rng(devices=[place] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(place):
                torch.cuda.manual_seed(seed)
        yield


def initialized(factory: Callable[[], Model], seed: int) -> Model:
    """factory(), its parameters drawn from `seed` alone; the caller's generators are untouched.

    >>> from tangency.models import mlp
    >>> a, b = (initialized(lambda: mlp([3, 8, 1]), seed=5) for _ in range(2))
    >>> torch.equal(a[0].weight, b[0].weight)
    True
    """
    with seeded(seed):
        return factory()
