"""Whether pairs go through the fused recursion, and what computes it there: a compiled loop on a CPU."""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from ...activations.dual import recording
from ..core import Moments, Side
from ..recursion import Recursion
from .plan import Met, Plan, find_plan


class Backend(Protocol):
    """What computes a plan: samples last on each side, as everywhere."""

    def fused_moments(self, plan: Plan, a: Side, b: Side, tangent: bool, half: bool) -> Met:
        """All pairs [n, m]; `half`: both sides are one, and (j, i) is (i, j)."""

    def fused_own(self, plan: Plan, side: Side, tangent: bool) -> Moments:
        """The moments of each sample with itself [n] where the plan ends."""

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
    if not known or recording(*known) or any(v.device.type != "cpu" for v in known) or min(s.size for s in sides) == 0:
        return None
    if known[0].dtype not in (torch.float64, torch.float32) or any(v.dtype != known[0].dtype for v in known):
        return None
    plan = find_plan(recursion)
    backend = None if isinstance(plan, str) else compiled_backend()
    return None if backend is None or isinstance(plan, str) else Fused(plan, backend)


@cache
def compiled_backend() -> Backend | None:
    """The loop that numba compiles; None where numba is missing, or does not go with this Python or NumPy."""
    try:
        from . import lanes
    except ImportError:  # the plain recursion gives the same, in more time
        return None
    return lanes
