"""How faithful a surrogate is to its network: Kendall's τ, accuracies, correlation, and the best increasing map."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result
from .._base.types import Array, Float, Int, Numbers
from ..engine.outputs import NEARLY, Kind, check_kind, sums_to_one
from ..errors import InputError, TangencyWarning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Numbers that are ranked at a time when bootstrapping (heuristic: some 10 arrays of this many must fit a cache or so).
BATCH = 2_000_000
# Log-odds that agree in this part of the digits of the type they were computed in count as equal (heuristic: a network
# and a surrogate lose some digits to rounding, and this leaves them half): ε^½, 1.5e-8 in float64, 3.5e-4 in float32.
TIES = 0.5


def kendall(a: Array, b: Array, *, ties: float = 0.0) -> Tensor:
    """τ_b = (P − Q) / √((n₀ − n₁)(n₀ − n₂)) over the last dimension: P, Q pairs ordered alike and oppositely.

    n₀ = n(n − 1)/2 pairs, n₁ and n₂ of them tied in a and in b; tied pairs count neither as P nor as Q. Without ties
    it is (P − Q)/(P + Q). NaN where a or b is constant. Leading dimensions are a batch. Exact (integer counts); cost:
    n log n, after Knight 1966. Equal to scipy.stats.kendalltau. `ties`: nearly equal numbers are made equal before, by
    `levelled`, in a and in b alike.

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
        checks.beside(v, a.device, name, "a")
        if v.is_floating_point() and bool(v.isnan().any()):
            where = tuple(v.isnan().nonzero()[0].tolist())
            raise InputError(f"{name}[{', '.join(map(str, where))}] is NaN; needed: numbers that can be ordered.")
    a, b = levelled(a, ties), levelled(b, ties)
    n, shape = a.shape[-1], a.shape[:-1]
    # Whole numbers below n, so that x·n + y orders pairs (and no sum below rounds).
    x, y = _ranks(a.reshape(-1, n)), _ranks(b.reshape(-1, n))
    # In order of a, and of b where a is tied: a pair of different a is out of order if and only if its b falls.
    order = (x * n + y).argsort(-1)
    opposite = _inversions(y.gather(-1, order), n)
    pairs = n * (n - 1) // 2
    tied_a, tied_b, tied_both = _tied(x), _tied(y), _tied(x * n + y)
    alike = pairs - tied_a - tied_b + tied_both - opposite
    scale = ((pairs - tied_a).double() * (pairs - tied_b).double()).sqrt()
    return ((alike - opposite).double() / scale).reshape(shape)


def levelled(values: Array, ties: float) -> Tensor:
    """Numbers that are nearly equal, made equal: over the last dimension, within `ties` times the largest finite |v|.

    Being near is not transitive, so they are put into groups: the smallest number begins a group that holds all within
    the tolerance of it, the next number begins the next. So no two that are further apart than the tolerance become
    equal, and those that lie together within it, and further than it from all others, do. Each gets the middle one's
    value: the order of different groups is kept. Infinities of one sign are a group. Cost: n log n.

    >>> levelled(torch.tensor([1.0, 2.0, 1.0001, 1.9999]), 1e-3)
    tensor([1.0000, 1.9999, 1.0000, 1.9999])
    """
    if not (isinstance(ties, (int, float)) and 0 <= ties < 1):
        raise InputError(f"ties={ties!r}; needed: a part of the largest number, from 0 to below 1, such as 1e-8.")
    v = torch.as_tensor(values)
    if ties == 0 or not v.numel():
        return v
    v = v if v.is_floating_point() else v.double()
    # Infinities have no part in the width, or all finite numbers would be one group.
    n = v.shape[-1]
    ordered, order = v.reshape(-1, n).sort(-1)
    width = ties * torch.where(ordered.isfinite(), ordered.abs(), 0).amax(-1, keepdim=True)
    after = torch.searchsorted(ordered, ordered + width, right=True)  # who begins the next group, if this one did one
    begins = _visited(after)
    first = torch.where(begins, torch.arange(n, device=v.device), 0).cummax(-1).values
    middle = (first + after.gather(-1, first) - 1) // 2
    return torch.empty_like(ordered).scatter_(-1, order, ordered.gather(-1, middle)).reshape(v.shape)


def _visited(after: Tensor) -> Tensor:
    """Which places [k, n] are visited by going from place 0 to after[0], and so on up to n: by steps that double."""
    n = after.shape[1]
    jump = torch.cat([after, torch.full_like(after[:, :1], n)], 1)  # who is at the end stays there
    seen = torch.zeros_like(jump)
    seen[:, 0] = 1
    for _ in range(n.bit_length()):
        seen = (seen + torch.zeros_like(seen).scatter_add_(1, jump, seen)).clamp_max(1)
        jump = jump.gather(1, jump)
    return seen[:, :n] > 0


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
    # All of [k, n]: rows are counted side by side, and no step depends on the numbers, so that a GPU need not wait.
    edge = torch.ones_like(v[:, :1], dtype=torch.bool)
    for bit in reversed(range(max(1, (n - 1).bit_length()))):
        group, digit = v >> (bit + 1), (v >> bit) & 1
        differs = group[:, 1:] != group[:, :-1]
        start = torch.where(torch.cat([edge, differs], 1), here, 0).cummax(-1).values  # of each number's group
        ones = digit.cumsum(-1) - digit  # before it
        ones_here = ones - ones.gather(-1, start)  # and in its group
        count = count + torch.where(digit == 0, ones_here, 0).sum(-1)
        # Zeros before the last number of the group, with it.
        ends = torch.where(torch.cat([differs, edge], 1), here - ones - digit, n)
        zeros = ends.flip(-1).cummin(-1).values.flip(-1) - (start - ones.gather(-1, start)) + 1
        to = start + torch.where(digit == 0, here - start - ones_here, zeros + ones_here)
        v = torch.empty_like(v).scatter_(-1, to, v)
    return count


@dataclass(frozen=True, eq=False, repr=False)
class MonotoneMap(Result):
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
        """The u with m(u) = v; refuses a constant map."""
        if len(self.knots) < 2:
            raise InputError("the map is constant (the surrogate does not follow the network), so it has no inverse.")
        return _interpolate(v, self.values, self.knots)


def _interpolate(u: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Piecewise linear through (knots, values), with the first and last slope beyond them."""
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
    checks.finite(u, "u")
    checks.finite(v, "v")
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
            total = k0 + k1
            pools.append(((k0 * u0 + k1 * u1) / total, (k0 * v0 + k1 * v1) / total, total))
    knots, values, _ = zip(*pools, strict=True)
    return MonotoneMap(u.new_tensor(knots), v.new_tensor(values))


@dataclass(frozen=True, repr=False)
class Interval(Result):
    """Holds the part `Faithfulness.level` of the bootstrap's resamples, an equal share of the rest on either side."""

    low: float
    high: float


@dataclass(frozen=True, eq=False, repr=False)
class Faithfulness(Result):
    """How a surrogate's probability of the correct class follows the network's, over test samples.

    `tau`: Kendall's τ_K. `tad`: the surrogate's accuracy less the network's. `pearson`: of the probabilities, for
    contrast: two clouds at 0 and 1 make it large. `map`, `r2`: the best increasing map from the surrogate's log-odds
    to the network's, and the part of their variance that it explains. `intervals`: bootstrap over the test samples of
    tau, tad, pearson. `ties`: log-odds that differ by at most this part of the largest count as equal (`levelled`).
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
    ties: float = 0.0
    balanced_accuracy: float = float("nan")  # the surrogate's: the mean over classes of the part that is right
    network_balanced_accuracy: float = float("nan")

    UNITS: ClassVar[Mapping[str, str]] = {
        "tad": "fraction", "accuracy": "fraction", "network_accuracy": "fraction", "level": "fraction",
        "balanced_accuracy": "fraction", "network_balanced_accuracy": "fraction",
    }  # fmt: skip

    def table(self) -> str:
        """A line for each figure, with its interval where there is one."""
        lines = [f"{'':27s}{'value':>9s}{f'{self.level:.0%} interval':>20s}"]
        accuracies = ("accuracy", "balanced_accuracy", "network_accuracy", "network_balanced_accuracy")
        for name in ("tau", "tad", "pearson", "r2", *accuracies):
            ends = self.intervals.get(name)
            between = "" if ends is None else f"[{ends.low:.3f}, {ends.high:.3f}]"
            lines.append(f"{name.replace('_', ' '):27s}{getattr(self, name):9.3f}{between:>20s}".rstrip())
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """A figure: the figures with their intervals, and the map from the surrogate's log-odds to the network's."""
        from ..plots import draw_faithfulness

        return draw_faithfulness(self)

    def __repr__(self) -> str:
        low, high = self.intervals["tau"].low, self.intervals["tau"].high
        return (
            f"Faithfulness(τ_K {self.tau:.3f} [{low:.3f}, {high:.3f}], TAD {self.tad:+.2%}, Pearson "
            f"{self.pearson:.3f}, R² {self.r2:.3f}, {self.samples} samples)"
        )


def log_odds(outputs: Tensor, y: Tensor, *, outputs_are: Kind = "probabilities") -> Tensor:
    """log p_y − log Σ_{c≠y} p_c: orders samples as p_y does, and does not round to a tie where p_y is near 1.

    `outputs` [m, c]: probabilities, or what does not round to 0 or 1: logits, log-probabilities.

    >>> odds = log_odds(torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.25, 0.25]]), torch.tensor([0, 0])).exp()
    >>> [round(float(v), 3) for v in odds]
    [4.0, 1.0]
    >>> log_odds(torch.tensor([[1000.0, 0.0]]), torch.tensor([0]), outputs_are="logits")
    tensor([1000.])
    """
    if outputs_are != "logits":
        check_kind(outputs_are)
    z = outputs.log() if outputs_are == "probabilities" else outputs
    return z.gather(1, y[:, None])[:, 0] - z.scatter(1, y[:, None], -torch.inf).logsumexp(1)


def faithfulness(
    network: Array,
    surrogate: Array,
    y: Numbers,
    *,
    outputs_are: Kind = "probabilities",
    ties: float | None = None,
    resamples: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Faithfulness:
    """τ_K, TAD, Pearson's r and R² of the outputs [m, c] of a network and of its surrogate; y [m] is correct.

    `outputs_are`: "probabilities", "logits" or "log-probabilities", of both. Logits are best: τ_K ranks the samples by
    the log-odds of the correct class, which is the order of its probability in exact arithmetic, and a probability
    that has rounded to 0 or 1 ties where its logits do not (this is warned of). `ties`: the part of the largest
    log-odds within which two are equal (`levelled`; default: ε^½ of the coarser type given), since rounding parts what
    is equal. `resamples`: of the bootstrap, which takes nearly all of the time where samples are many (200 of 100,000
    samples: half a minute on one core; 40 give rougher intervals, in a third of it). Engel et al. 2024, §3.

    >>> z = torch.randn(50, 3).double()
    >>> faithfulness(z, z, torch.randint(3, (50,)), outputs_are="logits").tau
    1.0
    """
    (p, u), (q, v) = _read(network, "network", outputs_are), _read(surrogate, "surrogate", outputs_are)
    y = tree.numbers(y)
    if p.shape != q.shape or y.shape != p.shape[:1] or y.is_floating_point():
        raise InputError(
            f"network has shape {tuple(p.shape)}, surrogate {tuple(q.shape)}, y {tuple(y.shape)} {y.dtype}; needed: "
            "[m, c] twice, and m classes as integers."
        )
    for name, other in (("surrogate", q), ("y", y)):
        checks.beside(other, p.device, name, "network")
    if int(y.min()) < 0 or int(y.max()) >= p.shape[1]:
        raise InputError(f"y has classes from {int(y.min())} to {int(y.max())}; needed: 0 to {p.shape[1] - 1}.")
    if not 0 < level < 1 or resamples < 2:
        raise InputError(f"level={level}, resamples={resamples}; needed: 0 < level < 1, and two resamples or more.")
    y = y.long()
    near = rounding(*(torch.as_tensor(v).dtype for v in (network, surrogate))) if ties is None else ties
    odds = levelled(torch.stack([log_odds(z, y, outputs_are="logits") for z in (u, v)]), near)
    if outputs_are != "logits" and (lost := int(odds.isinf().any(0).sum())):
        warnings.warn(
            f"the probability of the correct class is exactly 0 or 1 in {lost} of {len(y)} samples: it has rounded, "
            "and these samples tie. Give logits, with outputs_are='logits', to have them in their order.",
            TangencyWarning, stacklevel=2,
        )  # fmt: skip
    # The network's first, then the surrogate's, [2, m] each.
    correct = torch.stack([chances.gather(1, y[:, None])[:, 0] for chances in (p, q)])
    right = torch.stack([logits.argmax(1) == y for logits in (u, v)]).double()
    increasing, r2 = _mapped(odds[1], odds[0])
    intervals = _bootstrap(odds, correct, right, resamples, level, seed)
    return Faithfulness(
        float(kendall(odds[0], odds[1])), float((right[1] - right[0]).mean()), float(_pearson(correct[0], correct[1])),
        r2, increasing, float(right[1].mean()), float(right[0].mean()), intervals, level, len(y), near,
        *(balanced_accuracy(logits, y) for logits in (v, u)),
    )  # fmt: skip


def balanced_accuracy(logits: Float[Tensor, "m c"], y: Int[Tensor, " m"]) -> float:
    """(1/C) Σ_c (samples of class c that are taken for c)/(samples of class c), over the C classes that y has.

    Each class counts alike, so that always saying the most frequent one gives 1/C. Equal to scikit-learn's
    balanced_accuracy_score.

    >>> balanced_accuracy(torch.tensor([[1.0, 0.0]]).expand(4, 2), torch.tensor([0, 0, 0, 1]))
    0.5
    """
    counts = torch.bincount(y, minlength=logits.shape[1])
    right = torch.bincount(y[logits.argmax(1) == y], minlength=logits.shape[1])
    return float((right[counts > 0].double() / counts[counts > 0]).mean())


def rounding(*kinds: torch.dtype) -> float:
    """The part of the largest log-odds within which those computed in these types count as equal: ε^TIES.

    >>> [f"{v:.1e}" for v in (rounding(torch.float64), rounding(torch.float32, torch.float64))]
    ['1.5e-08', '3.5e-04']
    """
    return max(torch.finfo(k if k.is_floating_point else torch.float64).eps for k in kinds) ** TIES


def _mapped(u: Tensor, v: Tensor) -> tuple[MonotoneMap, float]:
    """The increasing map u ↦ v and its R², over the samples whose log-odds are finite."""
    finite = u.isfinite() & v.isfinite()
    if not bool(finite.any()):
        return MonotoneMap(u.new_zeros(1), v.new_zeros(1)), float("nan")
    u, v = u[finite], v[finite]
    increasing = monotone(u, v)
    if bool((v == v[0]).all()):  # nothing to explain
        return increasing, float("nan")
    return increasing, 1 - float((v - increasing(u)).square().sum() / (v - v.mean()).square().sum())


def _read(outputs: Array, name: str, kind: Kind) -> tuple[Tensor, Tensor]:
    """Probabilities and logits [m, c] in float64, checked."""
    if kind != "logits":
        check_kind(kind)
    v = tree.numbers(outputs, "outputs")
    if v.dim() != 2 or v.shape[1] < 2 or len(v) < 2:
        raise InputError(
            f"{name} has shape {tuple(v.shape)}; needed: {kind} [m, c] of two samples and two classes or more (of a "
            "network with one logit z: torch.stack([torch.sigmoid(-z), torch.sigmoid(z)], 1), or as logits "
            "torch.stack([-z, z], 1) / 2)."
        )
    # Also of float32: differences of log-odds are what is ranked, and must not round further.
    v = v.double()
    if kind == "logits":
        checks.finite(v, name)
        return torch.softmax(v, 1), v
    p = v if kind == "probabilities" else v.exp()
    checks.finite(p, name)
    sums = p.sum(1)
    worst = int((sums - 1).abs().argmax())
    if bool((p < 0).any()) or not sums_to_one(p):
        fix = f"apply {'' if p is v else 'log_'}softmax first, or say outputs_are='logits' if these are logits."
        if not bool((p < 0).any()) and abs(float(sums[worst]) - 1) <= NEARLY:
            divide = "p / p.sum(1, keepdim=True)" if p is v else "v - v.logsumexp(1, keepdim=True)"
            fix = f"if they were rounded or clamped, make rows sum to 1: {divide}."
        raise InputError(
            f"{name} holds no {kind} (a row {'' if p is v else 'of exponentials '}sums to {float(sums[worst]):.4g}, "
            f"the smallest entry is {float(v.min()):.4g}): {fix}"
        )
    return p, p.log() if p is v else v


def _pearson(a: Tensor, b: Tensor) -> Tensor:
    """NaN where one of them is constant, but for rounding."""
    # A constant that was computed is not quite one: what is left of it would correlate at random.
    constant = torch.zeros_like(a[..., 0], dtype=torch.bool)
    for v in (a, b):
        constant |= v.amax(-1) - v.amin(-1) <= 8 * torch.finfo(v.dtype).eps * v.abs().amax(-1)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    r = (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return torch.where(constant, torch.nan, r)


def _bootstrap(
    odds: Tensor, correct: Tensor, right: Tensor, resamples: int, level: float, seed: int
) -> dict[str, Interval]:
    """Percentiles over resamples of the test samples, drawn with replacement, the same for network and surrogate."""
    m = odds.shape[1]
    generator = torch.Generator().manual_seed(seed)
    taus, tads, pearsons = [], [], []
    # Drawn on the CPU, so that a GPU gives the same intervals.
    for count in torch.ones(resamples).split(max(1, BATCH // m)):
        pick = torch.randint(m, (len(count), m), generator=generator).to(odds.device)
        taus.append(kendall(odds[0][pick], odds[1][pick]))
        tads.append((right[1] - right[0])[pick].mean(1))
        pearsons.append(_pearson(correct[0][pick], correct[1][pick]))
    tail = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=odds.device)
    ends = {
        name: torch.nanquantile(torch.cat(values), tail).tolist()
        for name, values in (("tau", taus), ("tad", tads), ("pearson", pearsons))
    }
    return {name: Interval(*pair) for name, pair in ends.items()}
