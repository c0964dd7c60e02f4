"""Two spectra beside each other: are their bulks the same?"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result, text_table
from .._base.types import Float
from ..errors import InputError
from .values import Values, given

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# A bulk that moved by this part of its spread has changed, whatever p says: of few values p says little (heuristic).
FAR = 0.25


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """How two sets of eigenvalues differ; the first is called trained, the second initial."""

    trained: Float[Tensor, " q"]  # quantiles of both at the same parts, smallest first: the Q–Q plot
    initial: Float[Tensor, " q"]
    ks: float  # Kolmogorov–Smirnov: the largest difference of the distribution functions
    p: float  # how likely one as large is for as many independent values of one distribution
    wasserstein: float  # ∫ |F − G|: by how much a value moved on average, in the units of the values
    shift: float  # how far the middle 95 % of the quantiles moved on average, relative to their spread
    level: float

    @property
    def invariant(self) -> bool:
        """Whether they may be of one distribution: p above the level, and a shift below a quarter of the spread."""
        return self.p > self.level and self.shift <= FAR

    @property
    def verdict(self) -> str:
        """In words."""
        return "invariant bulk" if self.invariant else "changed bulk"

    def table(self) -> str:
        """The numbers, and the verdict."""
        row = [self.verdict, self.ks, self.p, self.wasserstein, self.shift]
        return text_table(["verdict", "KS", "p", "Wasserstein", "of the spread"], [row])

    def plot(self) -> "Figure":
        """The Q–Q plot."""
        from .pictures import draw_quantiles

        return draw_quantiles(self.initial, self.trained, f"{self.verdict}, KS {self.ks:.3f}")


def compare(trained: Values, initial: Values, *, level: float = 0.01, points: int = 200) -> Comparison:
    """sup |F − G| and ∫ |F − G| of two sets of eigenvalues, with their Q–Q plot, and whether the bulk is invariant.

    Both may be eigenvalues [n], Grams or results that have eigenvalues, of any two sizes. `invariant` if p > `level`, p
    of the two-sample Kolmogorov–Smirnov test. Eigenvalues repel each other and so differ less from draw to draw than
    independent values: two draws of one ensemble are practically never told apart, and a small change is not seen; the
    shift says how large it is, and above a quarter of the spread it counts as a change. Cost: sorting.
    Wang et al. 2024, "Spectral evolution and invariance in linear-width neural networks", Fig. 1.

    >>> import tangency as tg
    >>> values = torch.linspace(0, 1, 300)
    >>> tg.spectra.compare(values, values).verdict, tg.spectra.compare(2 * values, values).verdict
    ('invariant bulk', 'changed bulk')
    """
    a, b = given(trained, "trained").flip(0), given(initial, "initial").flip(0)
    checks.positive(points, "points", "of the Q–Q plot")
    if not 0 < level < 1:
        raise InputError(f"level={level}; needed: a probability between 0 and 1, such as 0.01.")
    ks, moved = distance_ks(a, b), wasserstein(a, b)
    size = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    parts = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    trained_q, initial_q = quantiles(a, parts), quantiles(b, parts)
    middle = torch.linspace(0.025, 0.975, 96, dtype=torch.float64)  # few spikes at either end do not count
    shift = _shift(quantiles(a, middle), quantiles(b, middle))
    return Comparison(trained_q, initial_q, ks, kolmogorov(size * ks), moved, shift, level)


def _shift(a: Float[Tensor, " q"], b: Float[Tensor, " q"]) -> float:
    """Mean |a − b| over the standard deviation of b, also of huge and tiny values."""
    scale = max(float(a.abs().max()), float(b.abs().max()), 1e-300)
    moved, spread = float((a / scale - b / scale).abs().mean()), float((b / scale).std(correction=0))
    if spread <= 1e-12:
        return 0.0 if moved <= 1e-12 else math.inf
    return moved / spread


def quantiles(values: Float[Tensor, " n"], parts: Float[Tensor, " q"]) -> Float[Tensor, " q"]:
    """Of values, smallest first; the i-th is that of the part (i + ½)/n."""
    at = (parts * len(values) - 0.5).clamp(0, len(values) - 1)
    below = at.floor().long()
    above = (below + 1).clamp_max(len(values) - 1)
    return values[below] + (at - below) * (values[above] - values[below])


def distance_ks(a: Float[Tensor, " n"], b: Float[Tensor, " m"]) -> float:
    """sup |F − G| of two samples, smallest first."""
    both = torch.cat([a, b])
    f, g = (torch.searchsorted(v, both, right=True).double() / len(v) for v in (a, b))
    return float((f - g).abs().max())


def wasserstein(
    a: Float[Tensor, " n"],
    b: Float[Tensor, " m"],
    a_weights: Float[Tensor, " n"] | None = None,
    b_weights: Float[Tensor, " m"] | None = None,
) -> float:
    """∫ |F − G| of two discrete measures, points smallest first; equal weights where none are given."""
    both = torch.cat([a, b]).sort().values
    f, g = (
        _cdf(points, torch.full_like(points, 1 / len(points)) if weights is None else weights, both[:-1])
        for points, weights in ((a, a_weights), (b, b_weights))
    )
    return float(((f - g).abs() * both.diff()).sum())


def _cdf(points: Float[Tensor, " n"], weights: Float[Tensor, " n"], x: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    total = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    return total[torch.searchsorted(points, x, right=True)]


def kolmogorov(t: float) -> float:
    """P(sup |B| > t) = 2 Σ (−1)^{k−1} exp(−2k²t²) for a Brownian bridge B."""
    if t < 0.2:  # there the series converges slowly, and the probability is 1 to 12 digits
        return 1.0
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * t) ** 2) for k in range(1, 30))))
