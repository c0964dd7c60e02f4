"""The law of Marchenko and Pastur: what eigenvalues of a random matrix look like, and where their bulk ends."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result
from .._base.types import Float
from ..errors import InputError
from .edges import Edge

# The Tracy–Widom law (β = 1) lies below this with probability 0.99 (Johnstone 2001).
TRACY_WIDOM_99 = 2.0234


@dataclass(frozen=True, repr=False)
class MarchenkoPastur(Result):
    """Eigenvalues of WᵀW / n, W [n, m] of independent entries with mean 0 and variance σ²: on σ²(1 ± √q)², q = m/n.

    `rows` ≥ `columns`: those of W, or of its transpose, which has the same eigenvalues but for zeros.
    """

    rows: int
    columns: int
    variance: float

    @property
    def ratio(self) -> float:
        """q = columns / rows, at most 1."""
        return self.columns / self.rows

    @property
    def lower(self) -> float:
        """σ²(1 − √q)², where the bulk begins."""
        return self.variance * (1 - math.sqrt(self.ratio)) ** 2

    @property
    def upper(self) -> float:
        """σ²(1 + √q)², where the bulk ends."""
        return self.variance * (1 + math.sqrt(self.ratio)) ** 2

    def density(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """√((λ₊ − x)(x − λ₋)) / (2π q σ² x) within the bulk, 0 outside."""
        inside = ((self.upper - x) * (x - self.lower)).clamp_min(0).sqrt()
        safe = torch.where(inside > 0, x, torch.ones_like(x))
        return inside / (2 * math.pi * self.ratio * self.variance * safe)

    def moment(self, k: int) -> float:
        """E λᵏ = σ²ᵏ Σ_{r<k} q^r / (r + 1) · C(k, r) C(k − 1, r)."""
        checks.positive(k, "k", "the moment's order")
        terms = (self.ratio**r / (r + 1) * math.comb(k, r) * math.comb(k - 1, r) for r in range(k))
        return self.variance**k * sum(terms)

    def quantiles(self, parts: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """Below which these parts of the eigenvalues lie, by quadrature."""
        # x = middle + half·cos φ takes the roots at both ends away, so that the trapezoidal rule is exact to 1e-7.
        phi = torch.linspace(math.pi, 0, 4097, dtype=torch.float64)
        root = math.sqrt(self.ratio)
        x = 1 + self.ratio + 2 * root * phi.cos()  # in units of σ²
        weight = (2 * root * phi.sin()) ** 2 / (2 * math.pi * self.ratio * x.clamp_min(1e-300))
        weight[0] = weight[-1] = 0.0
        if self.ratio == 1:  # the density's pole at 0: sin²φ / (1 + cos φ) → 1 − cos φ
            weight[0] = 4 / math.pi
        steps = (weight[1:] + weight[:-1]) / 2
        cdf = torch.cat([steps.new_zeros(1), steps.cumsum(0)])
        cdf = cdf / cdf[-1]
        at = torch.searchsorted(cdf, parts.double().clamp(0, 1)).clamp(1, len(cdf) - 1)
        share = (parts - cdf[at - 1]) / (cdf[at] - cdf[at - 1]).clamp_min(1e-300)
        return self.variance * (x[at - 1] + share.clamp(0, 1) * (x[at] - x[at - 1]))

    def edge(self) -> Edge:
        """Where the largest eigenvalue lies: centre and scale of its Tracy–Widom law, and the value that 1 % exceed.

        Johnstone 2001, "On the distribution of the largest eigenvalue in principal components analysis".
        """
        a, b = math.sqrt(max(self.rows - 1, 1)), math.sqrt(self.columns)
        centre, scale = (a + b) ** 2 / self.rows, (a + b) * (1 / a + 1 / b) ** (1 / 3) / self.rows
        high = centre + TRACY_WIDOM_99 * scale
        return Edge(self.variance * centre, self.variance * scale, self.variance * high, "Marchenko–Pastur")


def marchenko_pastur(rows: int, columns: int, *, variance: float = 1.0) -> MarchenkoPastur:
    """σ²(1 ± √q)², q = columns/rows: the bulk of WᵀW / rows for independent entries of variance σ².

    The larger of the two sizes counts as rows. Marchenko & Pastur 1967.

    >>> import tangency as tg
    >>> bulk = tg.spectra.marchenko_pastur(400, 100)
    >>> bulk.lower, bulk.upper
    (0.25, 2.25)
    >>> bulk.moment(1), bulk.moment(2)
    (1.0, 1.25)
    """
    for value, name in ((rows, "rows"), (columns, "columns")):
        checks.positive(value, name, "a size of the matrix")
    if not checks.nonnegative(variance, "variance"):
        raise InputError("variance=0; needed: above 0. A matrix of zeros has no bulk.")
    return MarchenkoPastur(max(rows, columns), min(rows, columns), float(variance))
