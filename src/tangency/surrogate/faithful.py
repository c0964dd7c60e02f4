"""How faithful a surrogate is to its network: Kendall's τ, accuracies, correlation, and the best increasing map."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _check
from .._types import Float
from ..errors import InputError
from ..regress.model import Array

# Numbers that are ranked at a time when bootstrapping (heuristic: some 10 arrays of this many must fit a cache or so).
BATCH = 2_000_000


def kendall(a: Array, b: Array) -> Tensor:
    """τ_b = (P − Q) / √((n₀ − n₁)(n₀ − n₂)) over the last dimension: P, Q pairs ordered alike and oppositely.

    n₀ = n(n − 1)/2 pairs, n₁ and n₂ of them tied in a and in b; tied pairs count neither as P nor as Q. Without ties
    it is (P − Q)/(P + Q). NaN where a or b is constant. Leading dimensions are a batch. Exact (integer counts); cost:
    n log n, after Knight 1966. Equal to scipy.stats.kendalltau.

    >>> kendall(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 3, 2, 4]))
    tensor(0.6667, dtype=torch.float64)
    """
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if a.shape != b.shape or a.dim() == 0 or a.shape[-1] < 2:
        raise InputError(
            f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}; needed: two of the same shape, with two numbers or "
            "more in the last dimension."
        )
    for name, v in (("a", a), ("b", b)):
        _check.beside(v, a.device, name, "a")
        if v.is_floating_point() and bool(v.isnan().any()):
            where = tuple(v.isnan().nonzero()[0].tolist())
            raise InputError(f"{name}[{', '.join(map(str, where))}] is NaN; needed: numbers that can be ordered.")
    n, shape = a.shape[-1], a.shape[:-1]
    x, y = _ranks(a.reshape(-1, n)), _ranks(b.reshape(-1, n))
    # In order of a, and of b where a is tied: a pair of different a is out of order if and only if its b falls.
    order = (x * n + y).argsort(-1)
    opposite = _inversions(y.gather(-1, order), n)
    pairs = n * (n - 1) // 2
    tied_a, tied_b, tied_both = _tied(x), _tied(y), _tied(x * n + y)
    alike = pairs - tied_a - tied_b + tied_both - opposite
    scale = ((pairs - tied_a).double() * (pairs - tied_b).double()).sqrt()
    return ((alike - opposite).double() / scale).reshape(shape)


def _ranks(v: Tensor) -> Tensor:
    """Dense ranks [k, n] of each row: equal numbers have equal ranks."""
    ordered, order = v.sort(-1)
    new = torch.cat([torch.zeros_like(order[:, :1]), (ordered[:, 1:] != ordered[:, :-1]).long()], 1)
    return torch.empty_like(order).scatter_(-1, order, new.cumsum(-1))


def _tied(ranks: Tensor) -> Tensor:
    """How many pairs of each row are equal."""
    ordered = ranks.sort(-1).values
    new = torch.cat([torch.ones_like(ordered[:, :1]), (ordered[:, 1:] != ordered[:, :-1]).long()], 1)
    counts = torch.zeros_like(ordered).scatter_add_(-1, new.cumsum(-1) - 1, torch.ones_like(ordered))
    return (counts * (counts - 1) // 2).sum(-1)


def _inversions(v: Tensor, n: int) -> Tensor:
    """Pairs i < j with v_i > v_j, for each row of whole numbers [k, n] below n.

    Bit by bit from the highest: among numbers that agree above the bit, in their order, a 1 before a 0 is an inversion
    that this bit decides. Each bit then parts every group stably, as a radix sort does.
    """
    count, here = torch.zeros_like(v[:, 0]), torch.arange(n, device=v.device).expand_as(v)
    edge = torch.ones_like(v[:, :1], dtype=torch.bool)
    for bit in reversed(range(max(1, (n - 1).bit_length()))):
        group, one = v >> (bit + 1), (v >> bit) & 1
        differs = group[:, 1:] != group[:, :-1]
        start = torch.where(torch.cat([edge, differs], 1), here, 0).cummax(-1).values  # of each number's group
        ones = one.cumsum(-1) - one  # before it
        ones_here = ones - ones.gather(-1, start)  # and in its group
        count = count + torch.where(one == 0, ones_here, 0).sum(-1)
        ends = torch.where(
            torch.cat([differs, edge], 1), here - ones - one, n
        )  # zeros before the group's last, with it
        zeros = ends.flip(-1).cummin(-1).values.flip(-1) - (start - ones.gather(-1, start)) + 1
        to = start + torch.where(one == 0, here - start - ones_here, zeros + ones_here)
        v = torch.empty_like(v).scatter_(-1, to, v)
    return count


@dataclass(frozen=True, eq=False)
class MonotoneMap:
    """An increasing, piecewise linear map of log-odds, straight on beyond its first and last knot; so invertible.

    With a single knot nothing increases: the map is constant.

    >>> m = MonotoneMap(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 3.0]))
    >>> m(torch.tensor([0.5, 2.0])), m.inverse(torch.tensor([1.5, 6.0]))
    (tensor([1.5000, 6.0000]), tensor([0.5000, 2.0000]))
    """

    knots: Float[Tensor, " k"]
    values: Float[Tensor, " k"]

    def __call__(self, u: Tensor) -> Tensor:
        return _interpolate(u, self.knots, self.values)

    def inverse(self, v: Tensor) -> Tensor:
        if len(self.knots) < 2:
            raise InputError("the map is constant (the surrogate does not follow the network), so it has no inverse.")
        return _interpolate(v, self.values, self.knots)


def _interpolate(u: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    if len(knots) < 2:
        return torch.full_like(u, float(values[0]))
    at = torch.searchsorted(knots, u.contiguous()).clamp(1, len(knots) - 1)
    low, high = knots[at - 1], knots[at]
    return values[at - 1] + (u - low) * (values[at] - values[at - 1]) / (high - low)


def monotone(u: Tensor, v: Tensor, bins: int = 30) -> MonotoneMap:
    """The increasing map nearest to v = m(u) in squares, through the means of `bins` equal groups in order of u.

    Groups whose means would fall are pooled (pool adjacent violators), so that knots and values both increase.

    >>> u = torch.linspace(-3, 3, 300)
    >>> m = monotone(u, u**3)
    >>> bool((m(u) - u**3).abs().max() < 2)
    True
    """
    if u.dim() != 1 or u.shape != v.shape or not len(u) or bins < 1:
        raise InputError(
            f"u has shape {tuple(u.shape)}, v {tuple(v.shape)}, bins={bins}; needed: one number u and one v for each "
            "sample, [n] twice, and at least one group."
        )
    _check.finite(u, "u")
    _check.finite(v, "v")
    at, which, counts = torch.unique(u, return_inverse=True, return_counts=True)  # equal u stay together
    group = ((counts.cumsum(0) - counts) * bins // len(u))[which]
    sizes, sum_u, sum_v = (
        torch.zeros(bins, dtype=torch.float64, device=u.device).index_add_(0, group, w.double())
        for w in (torch.ones_like(u), at[which], v)
    )
    pools: list[tuple[float, float, float]] = []  # mean of u, mean of v, how many
    for k, total_u, total_v in zip(sizes.tolist(), sum_u.tolist(), sum_v.tolist(), strict=True):
        if not k:
            continue
        pools.append((total_u / k, total_v / k, k))
        while len(pools) > 1 and (pools[-1][1] <= pools[-2][1] or pools[-1][0] <= pools[-2][0]):
            (u1, v1, k1), (u0, v0, k0) = pools.pop(), pools.pop()
            both = k0 + k1
            pools.append(((k0 * u0 + k1 * u1) / both, (k0 * v0 + k1 * v1) / both, both))
    knots, values, _ = zip(*pools, strict=True)
    return MonotoneMap(u.new_tensor(knots), v.new_tensor(values))


@dataclass(frozen=True)
class Interval:
    """Holds `level` of the bootstrap's resamples, an equal share of the rest on either side."""

    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """How a surrogate's probability of the correct class follows the network's, over test samples.

    `tau`: Kendall's τ_K. `tad`: the surrogate's accuracy less the network's. `pearson`: of the probabilities, for
    contrast: two clouds at 0 and 1 make it large. `map`, `r2`: the best increasing map from the surrogate's log-odds
    to the network's, and the part of their variance that it explains. `intervals`: bootstrap over the test samples of
    tau, tad, pearson.
    """

    tau: float
    tad: float
    pearson: float
    r2: float
    map: MonotoneMap
    accuracy: float  # the surrogate's
    network_accuracy: float
    intervals: dict[str, Interval]
    level: float
    samples: int

    def __repr__(self) -> str:
        low, high = self.intervals["tau"].low, self.intervals["tau"].high
        return (
            f"Faithfulness(τ_K {self.tau:.3f} [{low:.3f}, {high:.3f}], TAD {self.tad:+.2%}, Pearson "
            f"{self.pearson:.3f}, R² {self.r2:.3f}, {self.samples} samples)"
        )


def log_odds(probabilities: Tensor, y: Tensor) -> Tensor:
    """log p_y − log Σ_{c≠y} p_c: orders samples as p_y does, and does not round to a tie where p_y is near 1.

    >>> odds = log_odds(torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.25, 0.25]]), torch.tensor([0, 0])).exp()
    >>> [round(float(v), 3) for v in odds]
    [4.0, 1.0]
    """
    own = probabilities.gather(1, y[:, None])[:, 0]
    others = probabilities.scatter(1, y[:, None], 0).sum(1)
    return own.log() - others.log()


def faithfulness(
    network: Array, surrogate: Array, y: Array, *, resamples: int = 200, level: float = 0.95, seed: int = 0
) -> Faithfulness:
    """τ_K, TAD, Pearson's r and R² of class probabilities [m, c] of a network and of its surrogate; y [m] is correct.

    τ_K ranks the samples by the log-odds of the correct class, which is the order of its probability in exact
    arithmetic; what still ties (a probability that underflows to 0 or 1) is handled as in `kendall`. Give
    probabilities in float64 to have few ties. Engel et al. 2024, §3.

    >>> p = torch.softmax(torch.randn(50, 3).double(), 1)
    >>> faithfulness(p, p, torch.randint(3, (50,))).tau
    1.0
    """
    p, q, y = _probabilities(network, "network"), _probabilities(surrogate, "surrogate"), torch.as_tensor(y)
    if p.shape != q.shape or y.shape != p.shape[:1] or y.is_floating_point():
        raise InputError(
            f"network has shape {tuple(p.shape)}, surrogate {tuple(q.shape)}, y {tuple(y.shape)} {y.dtype}; needed: "
            "[m, c] twice, and m classes as integers."
        )
    for name, other in (("surrogate", q), ("y", y)):
        _check.beside(other, p.device, name, "network")
    if int(y.min()) < 0 or int(y.max()) >= p.shape[1]:
        raise InputError(f"y has classes from {int(y.min())} to {int(y.max())}; needed: 0 to {p.shape[1] - 1}.")
    if not 0 < level < 1 or resamples < 2:
        raise InputError(f"level={level}, resamples={resamples}; needed: 0 < level < 1, and two resamples or more.")
    y = y.long()
    odds = torch.stack([log_odds(v, y) for v in (p, q)])
    own = torch.stack([v.gather(1, y[:, None])[:, 0] for v in (p, q)])
    right = torch.stack([v.argmax(1) == y for v in (p, q)]).double()
    found, r2 = _mapped(odds[1], odds[0])
    intervals = _bootstrap(odds, own, right, resamples, level, seed)
    return Faithfulness(
        float(kendall(odds[0], odds[1])), float((right[1] - right[0]).mean()), float(_pearson(own[0], own[1])), r2,
        found, float(right[1].mean()), float(right[0].mean()), intervals, level, len(y),
    )  # fmt: skip


def _mapped(u: Tensor, v: Tensor) -> tuple[MonotoneMap, float]:
    """The increasing map u ↦ v and its R², over the samples whose log-odds are finite."""
    finite = u.isfinite() & v.isfinite()
    if not bool(finite.any()):
        return MonotoneMap(u.new_zeros(1), v.new_zeros(1)), float("nan")
    u, v = u[finite], v[finite]
    found = monotone(u, v)
    if bool((v == v[0]).all()):  # nothing to explain
        return found, float("nan")
    return found, 1 - float((v - found(u)).square().sum() / (v - v.mean()).square().sum())


def _probabilities(given: Array, name: str) -> Tensor:
    p = torch.as_tensor(given).detach()
    if p.dim() != 2 or p.shape[1] < 2 or len(p) < 2:
        raise InputError(
            f"{name} has shape {tuple(p.shape)}; needed: probabilities [m, c] of two samples and two classes or more "
            "(of a network with one logit z: torch.stack([torch.sigmoid(-z), torch.sigmoid(z)], 1))."
        )
    p = p.double()
    _check.finite(p, name)
    sums = p.sum(1)
    worst = int((sums - 1).abs().argmax())
    if bool((p < 0).any()) or abs(float(sums[worst]) - 1) > 1e-3:
        raise InputError(
            f"{name} holds no probabilities (a row sums to {float(sums[worst]):.4g}, the smallest entry is "
            f"{float(p.min()):.4g}): apply softmax first."
        )
    return p


def _pearson(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()


def _bootstrap(
    odds: Tensor, own: Tensor, right: Tensor, resamples: int, level: float, seed: int
) -> dict[str, Interval]:
    """Percentiles over resamples of the test samples, drawn with replacement."""
    m = odds.shape[1]
    generator = torch.Generator().manual_seed(seed)
    taus, tads, pearsons = [], [], []
    for count in torch.ones(resamples).split(max(1, BATCH // m)):
        pick = torch.randint(m, (len(count), m), generator=generator).to(odds.device)
        taus.append(kendall(odds[0][pick], odds[1][pick]))
        tads.append((right[1] - right[0])[pick].mean(1))
        pearsons.append(_pearson(own[0][pick], own[1][pick]))
    tail = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=odds.device)
    ends = {
        name: torch.nanquantile(torch.cat(values), tail).tolist()
        for name, values in (("tau", taus), ("tad", tads), ("pearson", pearsons))
    }
    return {name: Interval(*pair) for name, pair in ends.items()}
