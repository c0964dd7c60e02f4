"""Where a bulk of eigenvalues ends: read off a spectrum at initialisation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.results import Result
from .._base.types import Float
from .values import Values, given

# Fewer values show no bulk (heuristic).
LEAST = 10
# Of the values, the part at the top that may be no bulk (heuristic); four times as many say where the bulk ends.
TOP = 0.025
# Units of `scale` above the edge that count as inside: the Tracy–Widom law has 99 % below 2, and the edge itself is
# estimated. Calibrated in tests/spectra/test_classify.py.
SLACK = 3.0
WIDE = 12


@dataclass(frozen=True, repr=False)
class Edge(Result):
    """The upper end of a bulk: values above `threshold` are outside of it."""

    upper: float
    scale: float  # by how much the largest eigenvalue of a draw differs from `upper`
    threshold: float
    source: str  # where it is from

    def spikes(self, values: Values) -> Float[Tensor, " k"]:
        """Those of the values that lie outside, largest first."""
        found = given(values)
        return found[found > self.threshold]


def bulk_edge(initial: Values) -> Edge:
    """λ_i ≈ E − τ a_i − b a_i², a_i = (3π(4i − 1)/8)^⅔, by least squares: E is where a bulk ends, past its spikes.

    A density that ends as a square root has its i-th value τ a_i below its end, and the largest of a draw fluctuates
    by τ; limits of weights and kernels of random networks do. Fitted are those of ranks j to 4j, j = n/40, so that up
    to j spikes of its own do not move the edge. `threshold` is some τ above it. `initial`: eigenvalues (or a Gram) at
    initialisation. Donoho, Gavish & Romanov 2023, "ScreeNOT", extrapolate by the same law from two values.

    >>> import tangency as tg
    >>> w = torch.randn(400, 100, generator=torch.Generator().manual_seed(0)).double()
    >>> edge = tg.spectra.bulk_edge(w.T @ w / 400)
    >>> abs(edge.upper - 2.25) < 0.1  # (1 + √q)²
    True
    """
    values = given(initial, "initial", LEAST)
    j = max(2, round(TOP * len(values)))
    last = min(WIDE * j, len(values) - 1)
    ranks = torch.arange(j + 1, last + 2, dtype=torch.float64)
    a = (3 * math.pi * (4 * ranks - 1) / 8) ** (2 / 3)
    scale = max(float(values.abs().max()), 1e-300)  # so that 1e30 and 1e-30 are as good as 1
    there = values[j : last + 1] / scale
    design = torch.stack([torch.ones_like(a), -a, -(a**2)], 1)
    end, fall, _ = torch.linalg.lstsq(design, there[:, None]).solution[:, 0].tolist()
    # What is no square root (a tail, a step) may bend so far that it has no end above its values.
    if not (fall > 0 and end >= float(there[0])):
        fall = max(0.0, float(there[0] - there[-1]) / float(a[-1] - a[0]))
        end = float(there[0]) + fall * float(a[0])
    upper, width = scale * end, scale * fall
    return Edge(upper, width, upper + SLACK * width, f"{len(values)} eigenvalues at initialisation")
