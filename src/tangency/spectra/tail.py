"""Does a spectrum have a heavy tail? A power law fitted to the largest values, and what speaks for it.

Clauset, Shalizi & Newman 2009, "Power-law distributions in empirical data": where the tail begins by the smallest
Kolmogorov–Smirnov distance, the exponent by maximum likelihood, the fit judged by drawn samples, other laws by the
likelihood ratio (Vuong 1989).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float, Int
from ..errors import InputError
from .values import Values, given

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Values that a fit needs, and those that a tail has at least (heuristics: exponents of fewer are off by a third).
LEAST, LEAST_TAIL = 20, 10
# Where a tail may begin: at most so many places, evenly over the ranks (heuristic: more hardly change α).
PLACES = 100


@dataclass(frozen=True, repr=False)
class Ratio(Result):
    """Power law against another law on the same tail: `ratio` > 0 speaks for the power law, if `p` is small."""

    ratio: float  # Σ log p₁ − log p₂, over its standard deviation
    p: float  # how likely one as far from 0 is if both fit alike


@dataclass(frozen=True, eq=False, repr=False)
class PowerLaw(Result):
    """A tail p(λ) ∝ λ^−α above `start`."""

    alpha: float
    error: float  # standard deviation of alpha, (α − 1)/√tail
    start: float
    tail: int  # values at and above `start`
    n: int  # positive values in all
    distance: float  # Kolmogorov–Smirnov, of the tail
    p: float  # the part of drawn power laws whose distance is as large; NaN if none were drawn
    against: Mapping[str, Ratio]  # lognormal, exponential
    values: Float[Tensor, " n"]  # the positive values, largest first

    @property
    def plausible(self) -> bool:
        """Whether the power law is not ruled out: p ≥ 0.1, as the paper has it."""
        return self.p >= 0.1

    def table(self) -> str:
        """The fit, then the other laws."""
        head = text_table(
            ["alpha", "±", "start", "tail", "KS", "p"],
            [[self.alpha, self.error, self.start, f"{self.tail}/{self.n}", self.distance, self.p]],
        )
        rows = [[name, r.ratio, r.p] for name, r in self.against.items()]
        return head + "\n\n" + text_table(["against", "ratio", "p"], rows)

    def plot(self) -> "Figure":
        """The part of the values above each value, on two logarithmic axes, with the fit."""
        from .pictures import draw_tail

        line = self.tail / self.n * (self.values[: self.tail] / self.start) ** (1 - self.alpha)
        return draw_tail(self.values, line, f"α = {self.alpha:.2f} ± {self.error:.2f}, p = {self.p:.2g}")


def power_law(values: Values, *, draws: int = 100, start: float | None = None, seed: int = 0) -> PowerLaw:
    """p(λ) = (α − 1)/λ₀ · (λ/λ₀)^−α for λ ≥ λ₀, fitted to the positive eigenvalues, with what speaks for it.

    α = 1 + k / Σ log(λ_i/λ₀) over the k values of the tail. λ₀ (`start`, where none is given) is where the distance of
    the tail to its fit is smallest. p: the part of `draws` samples, whose tails are drawn from the fit and the rest
    from the values below it, that are as far from their own fits. Cost: 100·draws·n operations.
    Clauset, Shalizi & Newman 2009.

    >>> import tangency as tg
    >>> u = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> fit = tg.spectra.power_law(u ** (-1 / 1.5))  # a density λ^−2.5
    >>> abs(fit.alpha - 2.5) < 3 * fit.error, fit.plausible
    (True, True)
    """
    found = given(values)
    x = found[found > 0].flip(0)  # smallest first
    least = LEAST if start is None else 2
    if len(x) < least:
        raise InputError(
            f"values has {len(x)} eigenvalues above 0; needed: at least {least} for a tail fit. Take more samples."
        )
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 0:
        raise InputError(f"draws={draws!r}; needed: a number of samples, or 0 for no p.")
    if float(x[0]) == float(x[-1]):
        raise InputError(f"all positive values are {float(x[0]):.6g}: they have no tail. Needed: different ones.")
    if start is not None and not start > 0:
        raise InputError(f"start={start:g}; needed: a value above 0, from which on there is a tail.")
    if start is not None and (int((x >= start).sum()) < 2 or not float(x[-1]) > start):
        raise InputError(f"start={start:g} has fewer than 2 of the values above it; the largest is {float(x[-1]):.6g}.")
    scale = float(x[-1])  # in units of the largest: 1e±30 are as good as 1
    logs = (x / scale).log()
    if not bool(logs.isfinite().all()):
        logs = x.log() - x[-1].log()
    if start is not None:  # from here on, logarithms of λ/λ₀ for the tail alone
        logs = logs[x >= start] - (math.log(start) - math.log(scale))
    fit = _fit(logs[None], start is not None)
    k = int(fit.start[0])
    distance, alpha, tail = float(fit.distance[0]), float(fit.alpha[0]), len(logs) - k
    p = _bootstrap(logs, k, alpha, distance, draws, seed, start is not None) if draws else math.nan
    above = logs[k:] - (logs[k] if start is None else 0)
    against = {"lognormal": _lognormal(above, alpha), "exponential": _exponential(above, alpha)}
    error, begin = (alpha - 1) / math.sqrt(tail), float(x[k]) if start is None else float(start)
    return PowerLaw(alpha, error, begin, tail, len(x), distance, p, against, x.flip(0))


@dataclass(frozen=True, eq=False)
class _Fits:
    """The best fit of each row."""

    alpha: Float[Tensor, " b"]
    start: Int[Tensor, " b"]  # the place of the tail's first value
    distance: Float[Tensor, " b"]


def _fit(logs: Float[Tensor, "b n"], fixed: bool) -> _Fits:
    """Of each row of logarithms, smallest first, by trying the values where a tail may begin; `fixed`: it does at 0."""
    n = logs.shape[1]
    last = 0 if fixed else n - LEAST_TAIL
    places = sorted({round(float(v)) for v in torch.linspace(0, last, min(PLACES, last + 1))})
    distances, alphas = [], []
    for k in places:
        above = logs if fixed else logs[:, k:] - logs[:, k : k + 1]
        m = n - k
        slope = m / above.sum(1).clamp_min(1e-300)  # α − 1
        fitted = -torch.expm1(-slope[:, None] * above)
        steps = torch.arange(m + 1, dtype=logs.dtype) / m
        distance = torch.maximum((fitted - steps[:-1]).abs(), (fitted - steps[1:]).abs()).amax(1)
        # Values that are all the same are no tail.
        distances.append(torch.where(above[:, -1] > 0, distance, math.inf))
        alphas.append(1 + slope)
    best = torch.stack(distances).argmin(0)
    rows = torch.arange(len(logs))
    return _Fits(torch.stack(alphas)[best, rows], torch.tensor(places)[best], torch.stack(distances)[best, rows])


def _bootstrap(
    logs: Float[Tensor, " n"], k: int, alpha: float, distance: float, draws: int, seed: int, fixed: bool
) -> float:
    """The part of `draws` samples, tails from the fit and the rest from below it, that lie as far from their fits."""
    n, generator = len(logs), torch.Generator().manual_seed(seed)
    as_far, left = 0, draws
    while left:
        b = min(left, max(1, 4_000_000 // n))  # numbers at a time (heuristic)
        u = torch.rand(b, n, generator=generator, dtype=logs.dtype)
        # 1 − u is never 0, of which there is no logarithm.
        drawn = (0 if fixed else logs[k]) - torch.log1p(-u) / (alpha - 1)
        if k:
            in_tail = torch.rand(b, n, generator=generator) < (n - k) / n
            below = logs[torch.randint(0, k, (b, n), generator=generator)]
            drawn = torch.where(in_tail, drawn, below)
        as_far += int((_fit(drawn.sort(1).values, fixed).distance >= distance).sum())
        left -= b
    return as_far / draws


def _vuong(ours: Float[Tensor, " k"], theirs: Float[Tensor, " k"]) -> Ratio:
    """Of log densities at the same values."""
    difference = ours - theirs
    spread = float(difference.std(correction=0)) * math.sqrt(len(difference))
    total = float(difference.sum())
    # The same to rounding: a lognormal can be as good as a power law.
    if spread <= 1e-9 * len(difference) or not math.isfinite(total):
        return Ratio(0.0 if math.isfinite(total) else total, 1.0 if math.isfinite(total) else 0.0)
    ratio = total / spread
    return Ratio(ratio, math.erfc(abs(ratio) / math.sqrt(2)))


def _power_density(above: Float[Tensor, " k"], alpha: float) -> Float[Tensor, " k"]:
    """log p of λ/λ₀ = exp(above)."""
    return math.log(alpha - 1) - alpha * above


def _exponential(above: Float[Tensor, " k"], alpha: float) -> Ratio:
    """p = r exp(−r (λ/λ₀ − 1)), r the inverse of the mean excess."""
    excess = torch.expm1(above)
    rate = 1 / float(excess.mean())
    return _vuong(_power_density(above, alpha), math.log(rate) - rate * excess)


def _lognormal(above: Float[Tensor, " k"], alpha: float) -> Ratio:
    """log λ/λ₀ = x normal, cut off at 0: p(x) ∝ exp(−b x − a x²/2), by maximum likelihood, which is concave in a and b.

    The power law is a = 0, so that no ratio is above 0 but for rounding: small p say that the lognormal is better.
    """
    unit = above / above.mean()
    first, second = 1.0, float(unit.square().mean())
    with torch.inference_mode(False):  # also where the caller wants no gradients at all
        place = torch.tensor([0.5, math.log(0.5)], dtype=unit.dtype, requires_grad=True)  # b and log a
    steps = torch.optim.LBFGS([place], max_iter=60, line_search_fn="strong_wolfe", tolerance_change=1e-10)

    def log_total(b: Tensor, a: Tensor) -> Tensor:
        """log ∫ exp(−b x − a x²/2) dx over x > 0."""
        t = b / (2 * a).sqrt()
        # Each where it neither overflows nor cancels; the other gets an argument that does no harm.
        right = torch.special.erfcx(t.clamp_min(0)).log()
        left = t.clamp_max(0).square() + torch.special.log_ndtr(-(2**0.5) * t.clamp_max(0)) + math.log(2)
        return 0.5 * (math.pi / (2 * a)).log() + torch.where(t > 0, right, left)

    def loss() -> Tensor:
        """The mean negative log likelihood, and its gradient."""
        steps.zero_grad()
        b, a = place[0], place[1].clamp(-15, 25).exp()
        value = b * first + a * second / 2 + log_total(b, a)
        value.backward()
        return value

    with torch.inference_mode(False), torch.enable_grad():
        steps.step(loss)
    b, a = place.detach()[0], place.detach()[1].clamp(-15, 25).exp()
    found = -b * unit - a * unit.square() / 2 - log_total(b, a)
    # From log λ/λ₀ in units of its mean to λ/λ₀.
    return _vuong(_power_density(above, alpha), found - math.log(float(above.mean())) - above)
