"""What carries a shift: which components, each tested by itself, and which samples, by the ratio of the densities."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float, Int
from ..regress import LogisticModel, logistic_features
from ..spectra.compare import kolmogorov

# Cross-fitting: how many parts; the penalty on the weights of standardised features (heuristics).
FOLDS, REG = 5, 1.0
# Standard deviations beyond which a sample counts no more: a few far ones shall not decide (heuristic).
FAR = 3.0
# A set whose deviation along a component is so small a part of both sets' together is constant there (heuristic).
LEAST = 1e-6
# Samples whose density is estimated at a time.
_ROWS = 256


@dataclass(frozen=True, eq=False, repr=False)
class Components(Result):
    """How far the two sets lie apart along each principal component, in its pooled standard deviation.

    `distance`: Wasserstein's, ∫|F_source − F_target|. `difference`: the target's mean less the source's. `spread`: the
    target's standard deviation over the source's. `ks`: Kolmogorov and Smirnov's statistic, max |F_source − F_target|,
    with `p`, corrected for all components (Holm 1979). `explained`: the part of the variance.
    """

    distance: Float[Tensor, " r"]
    difference: Float[Tensor, " r"]
    spread: Float[Tensor, " r"]
    ks: Float[Tensor, " r"]
    p: Float[Tensor, " r"]
    explained: Float[Tensor, " r"]

    def __len__(self) -> int:
        return len(self.p)

    @property
    def order(self) -> Int[Tensor, " r"]:
        """The components, those that lie farthest apart first."""
        return self.distance.argsort(descending=True, stable=True)

    def table(self, most: int = 10) -> str:
        """The components that lie farthest apart, numbered from 1."""
        header = ["component", "distance", "difference", "spread", "KS", "p", "explained"]
        columns = (self.distance, self.difference, self.spread, self.ks, self.p, self.explained)
        rows = [[k + 1, *(f"{float(c[k]):.3g}" for c in columns)] for k in self.order[:most].tolist()]
        return text_table(header, rows)


def compare_components(a: Float[Tensor, "n r"], b: Float[Tensor, "m r"], explained: Tensor) -> Components:
    """Of samples in principal components.

    >>> import torch
    >>> a, b = torch.randn(300, 2).double(), torch.randn(200, 2).double() + torch.tensor([1.0, 0.0])
    >>> found = compare_components(a, b, torch.tensor([0.5, 0.5]))
    >>> int(found.order[0]), bool(found.p[0] < 0.01)
    (0, True)
    """
    scale = torch.cat([a, b]).std(0, correction=0).clamp_min(torch.finfo(a.dtype).tiny)
    values, order = torch.cat([a, b]).sort(dim=0)
    steps = torch.full_like(values, -1 / len(b)).masked_fill(order < len(a), 1 / len(a))
    apart = steps.cumsum(0)[:-1]  # F_source − F_target between one value and the next
    gaps = values.diff(dim=0)
    # Between equal values the distribution functions have no value.
    ks = apart.abs().masked_fill(gaps == 0, 0.0).amax(0)
    p = torch.tensor([two_sample_p(float(d), len(a), len(b)) for d in ks], dtype=torch.float64)
    deviations = torch.maximum(a.std(0, correction=0), LEAST * scale)
    return Components(
        (apart.abs() * gaps).sum(0) / scale,
        (b.mean(0) - a.mean(0)) / scale,
        b.std(0, correction=0) / deviations,
        ks,
        holm(p),
        explained.cpu(),
    )


def two_sample_p(d: float, n: int, m: int) -> float:
    """P(D ≥ d) of two samples of n and m of one law: Kolmogorov's limit, for few samples or ties too large (below 0.1).

    Stephens's correction (1970) is that of one sample; of two small ones it would halve the p-value.
    """
    return kolmogorov(math.sqrt(n * m / (n + m)) * d)


def holm(p: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """p-values of k hypotheses, corrected such that any false rejection at a level is no likelier than it (Holm 1979).

    >>> holm(torch.tensor([0.01, 0.2, 0.03]))
    tensor([0.0300, 0.2000, 0.0600])
    """
    order = p.argsort(stable=True)
    times = torch.arange(len(p), 0, -1, dtype=p.dtype)
    return torch.empty_like(p).scatter(0, order, (p[order] * times).cummax(0).values.clamp_max(1))


def bent(z: Float[Tensor, "n r"], scale: Float[Tensor, " r"]) -> Float[Tensor, "n q"]:
    """φ(z): each component in standard deviations u, and (u² − 1)/√2.

    The logarithm of the ratio of two Gaussian densities whose axes are the components is linear in these.
    """
    u = (z / scale).clamp(-FAR, FAR)
    return torch.cat([u, (u.square() - 1) / math.sqrt(2)], 1)


def log_ratio(
    a: Float[Tensor, "n r"], b: Float[Tensor, "m r"], most: int, draw: torch.Generator
) -> tuple[Float[Tensor, " n"], Float[Tensor, " m"]]:
    """log p_target(x)/p_source(x) of every sample of both sets, estimated without the sample.

    Logistic regression tells the sets apart, weighted as if they were of one size; in turn it is fitted to four fifths
    of each set (`most` samples at most) and asked about the others (Bickel, Brückner & Scheffer 2009). What it says of
    samples that it has not seen is then scaled to be as sure as it is right (Platt 1999).
    """
    scale = torch.cat([a, b]).std(0, correction=0).clamp_min(torch.finfo(a.dtype).tiny)
    parts = [torch.randperm(len(v), generator=draw) % min(FOLDS, len(a), len(b)) for v in (a, b)]
    out = [v.new_empty(len(v)) for v in (a, b)]
    for fold in range(min(FOLDS, len(a), len(b))):
        chosen = [_some((part != fold).nonzero()[:, 0], most, draw) for part in parts]
        fit = _told_apart(*(bent(v[rows], scale) for v, rows in zip((a, b), chosen, strict=True)))
        for v, part, values in zip((a, b), parts, out, strict=True):
            asked = part == fold
            values[asked] = fit.logits(bent(v[asked], scale)).to(values)
    return _calibrated(out[0], out[1])


def _told_apart(a: Tensor, b: Tensor) -> LogisticModel:
    """Logistic regression, source 0 and target 1, each set with half of the weight."""
    n = len(a) + len(b)
    y = torch.cat([torch.full((len(v),), k) for k, v in enumerate((a, b))])
    weights = torch.cat([torch.full((len(v),), n / (2 * len(v)), dtype=torch.float64) for v in (a, b)])
    # To half of the digits: nobody reads more of an estimate.
    return logistic_features(torch.cat([a, b]), y, reg=REG, sample_weights=weights, bias=True, tol=1e-8)


def _calibrated(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Log odds times a factor and plus a number, the likeliest."""
    scale = torch.cat([a, b]).std(correction=0).clamp_min(torch.finfo(a.dtype).tiny)
    fit = _told_apart(a[:, None] / scale, b[:, None] / scale)
    # Where it is no better than chance, the order is kept and the ratios are all about 1.
    slope = fit.model.coefficients.flatten().clamp_min(0) + 1e-9
    return tuple(v / scale * slope + fit.bias.flatten() for v in (a, b))  # type: ignore[return-value]  # two


def _some(rows: Tensor, most: int, draw: torch.Generator) -> Tensor:
    """At most so many of them, at random."""
    return rows if len(rows) <= most else rows[torch.randperm(len(rows), generator=draw)[:most]]


def density_ratio(a: Float[Tensor, "n r"], b: Float[Tensor, "m r"]) -> Float[Tensor, " n"]:
    """log p_target/p_source at the source samples, by Gaussian kernel density estimates along the components.

    Scott's bandwidth along each component; the source's density at a sample is estimated without it. Cost: n·(n + m)·r.
    """
    least = LEAST * torch.cat([a, b]).std(0, correction=0)
    return _log_density(a, b, least, own=False) - _log_density(a, a, least, own=True)


def _log_density(at: Tensor, of: Tensor, least: Tensor, own: bool) -> Tensor:
    """`own`: the samples are those of the estimate, and each leaves itself out; `least`: deviations at least."""
    n, r = of.shape
    width = torch.maximum(of.std(0, correction=0), least) * n ** (-1 / (4 + r))
    out = []
    for start in range(0, len(at), _ROWS):
        rows = at[start : start + _ROWS]
        far = -(((rows[:, None] - of) / width).square().sum(2)) / 2
        if own:
            far[torch.arange(len(rows)), torch.arange(start, start + len(rows))] = -math.inf
        out.append(far.logsumexp(1))
    # What two estimates have in common, powers of 2π, is left out.
    return torch.cat(out) - math.log(n - own) - width.log().sum()
