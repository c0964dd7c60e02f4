"""What reading asks of an activation beside its dual: whether its mean is zero, what a scale before it changes."""

from functools import lru_cache

import torch

from .dual import Dual
from .quadrature import Quadrature


@lru_cache(maxsize=256)
def centered(dual: Dual) -> bool:
    """Whether E φ(u) = 0 (an odd function)."""
    return float(dual.mean(torch.ones((), dtype=torch.float64)).abs()) < 1e-12


def turned(dual: Dual) -> Dual:
    """x φ'(x): what a scale before φ changes."""
    if dual.homogeneous:
        return dual  # x φ'(x) = φ(x)
    return Quadrature(lambda x: torch.func.jvp(dual, (x,), (x,))[1], name=f"x·{type(dual).__name__}'")
