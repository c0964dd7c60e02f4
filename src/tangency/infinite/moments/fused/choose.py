"""Whether pairs go through the fused recursion, and what computes it: a compiled loop on a CPU, kernels on a GPU."""

import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

import torch

from ....errors import PerformanceWarning
from ...activations.dual import recording
from ..core import Moments, Side
from ..positions import Window
from ..recursion import Recursion
from .gpu import GpuBackend, why_not
from .plan import Met, Plan, find_plan


class Backend(Protocol):
    """What computes a plan: samples last on each side, as everywhere."""

    exact: bool  # whether a sample with itself comes out as in the plain recursion, its angle exactly 0

    def fused_moments(self, plan: Plan, a: Side, b: Side, tangent: bool, half: bool) -> Met:
        """All pairs [n, m]; `half`: both sides are one, and (j, i) is (i, j)."""

    def fused_pairs(self, plan: Plan, a: Side, b: Side, tangent: bool) -> Moments:
        """The moments where the plan ends of samples that meet one by one [n]."""

    def learn_variances(self, plan: Plan, side: Side) -> None:
        """Put the variances that the plan's activations read into `side.own`, by the same sums as those of pairs."""

    def rows_at_a_time(self, plan: Plan, workspace: int | None) -> int:
        """How many samples of each side to give it at a time."""


@dataclass(frozen=True)
class Fused:
    """A plan, and what computes it."""

    plan: Plan
    backend: Backend


def find_fused(recursion: Recursion, *sides: Side) -> Fused | None:
    """How a network goes through the fused recursion; None where the plain one has to do."""
    known = [v for side in sides for v in side.known.values()]
    if not known or recording(*known) or min(s.size for s in sides) == 0:
        return None
    if known[0].dtype not in (torch.float64, torch.float32) or any(v.dtype != known[0].dtype for v in known):
        return None
    found = choose(recursion, known[0].device, known[0].dtype)
    if isinstance(found, str):
        if known[0].is_cuda and any(isinstance(node.op, Window) and len(node.grid) == 2 for node in recursion.nodes):
            warn_once(found)
        return None
    return found


def choose(recursion: Recursion, device: torch.device, dtype: torch.dtype) -> Fused | str:
    """What computes a network on a device; or, as a clause, why it is the plain recursion."""
    plan = find_plan(recursion)
    if isinstance(plan, str):
        return plan
    if device.type == "cuda":
        why = why_not(plan, device, dtype)
        return why if why is not None else Fused(plan, GpuBackend(device))
    if device.type != "cpu":
        return f"the inputs are on {device.type}"
    backend = compiled_backend()
    return "numba is not installed (pip install 'tangency[compiled]')" if backend is None else Fused(plan, backend)


@cache
def compiled_backend() -> Backend | None:
    """The loop that numba compiles; None where numba is missing, or does not go with this Python or NumPy."""
    try:
        from . import lanes
    except ImportError:  # the plain recursion gives the same, in more time
        return None
    return lanes


@lru_cache(maxsize=256)
def warn_once(why: str) -> None:
    """Say once that a GPU does not do what it could."""
    said = f"{why}: these convolutions go through the plain recursion, which takes tens of times as long on a GPU."
    warnings.warn(said, PerformanceWarning, stacklevel=2)
