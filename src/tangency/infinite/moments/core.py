"""Second moments of a wide network's hidden values, and the three operations that every network consists of.

A hidden layer with infinitely many channels is known by its covariance over inputs and positions, the same for every
channel. `Moments` holds it for the pairs of samples at hand, positions first and samples last: `cov[s, t, i, j]` is
that of sample i at position s with sample j at position t. So a shift of positions moves whole blocks of pairs.

An operation maps moments to moments: `Input`, `RandomAffine` (weights and biases) and `Activation` are here, the
others in `ops.py`, `positions.py`, `sampled.py` and `nongaussian.py`. It says what it reads: `reads(asked)` how much of
its inputs' covariance over positions it takes for what is asked of its output, and `own` how much of each side's
covariance with itself (a variance, for an activation).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..activations.dual import Dual

Law = Literal["normal", "uniform", "other"]  # of weights at initialisation
Grid = tuple[int, ...]  # the sizes of the axes of positions, channels not among them
SHORT = 8  # channels up to which products are summed one by one rather than by a matrix product (heuristic)


class Need(IntEnum):
    """How much of the covariance over positions is asked for."""

    NOTHING = 0
    DIAGONAL = 1  # cov[s, s]
    WHOLE = 2  # cov[s, t]


@dataclass(frozen=True)
class Moments:
    """Moments at one place in the network: [*grid, *pairs], or [*grid, *grid, *pairs] if whole.

    `pairs` is [n, m], or [n] where samples meet one by one. `ntk` None is zero: nothing trained lies below. `gap` is
    (p + q)/2 − cov, kept beside cov only where inputs nearly coincide and it is known without cancellation. `other` is
    the grid of the second side, where two nodes meet whose positions differ.
    """

    cov: Tensor
    ntk: Tensor | None
    grid: Grid
    whole: bool = False
    gap: Tensor | None = None
    other: Grid | None = None

    def at(self, need: Need) -> "Moments":
        """As much as is needed of it."""
        return self.diagonal() if self.whole and need < Need.WHOLE and self.other is None else self

    def diagonal(self) -> "Moments":
        """Those of equal positions alone."""
        return replace(self.map(lambda v: at_equal_positions(v, self.grid), self.grid), whole=False)

    def map(self, linear: Callable[[Tensor], Tensor], grid: Grid | None = None) -> "Moments":
        """The same linear function of cov, ntk and gap: what is linear in the covariance does the same to all three."""
        ntk = None if self.ntk is None else linear(self.ntk)
        gap = None if self.gap is None else linear(self.gap)
        other = self.other if grid is None else None
        return Moments(linear(self.cov), ntk, self.grid if grid is None else grid, self.whole, gap, other)


def at_equal_positions(v: Tensor, grid: Grid) -> Tensor:
    """[*grid, *grid, ...] at equal positions: [*grid, ...]."""
    pairs, size = v.shape[2 * len(grid) :], prod(grid)
    return v.reshape(size, size, *pairs).diagonal(dim1=0, dim2=1).movedim(-1, 0).reshape(*grid, *pairs)


def embed(v: Tensor, grid: Grid) -> Tensor:
    """[*grid, ...] put at equal positions of zeros [*grid, *grid, ...]."""
    pairs, size = v.shape[len(grid) :], prod(grid)
    flat = v.reshape(size, *pairs)
    out = flat.new_zeros(size, size, *pairs)
    index = torch.arange(size, device=v.device)
    return out.index_put((index, index), flat).reshape(*grid, *grid, *pairs)


@dataclass
class Side:
    """One batch: its known tensors by slot, and its own moments where a layer reads them. Samples are the last axis."""

    known: Mapping[int, Tensor]
    size: int
    energy: Tensor  # [n]: the mean square of its inputs, summed over the slots; its type is that of the pairs' moments
    own: dict[int, Tensor] = field(default_factory=dict)
    exact: "Side | None" = None  # the batch in float64, where pairs are computed in another type
    places: Tensor | None = None  # [n]: which of the exact side's samples these are

    def rows(self, index: slice | Tensor) -> "Side":
        """Some of its samples."""
        known = {slot: _take_samples(v, index) for slot, v in self.known.items()}
        own = {node: _take_samples(v, index) for node, v in self.own.items()}
        energy = self.energy[index]
        places = None if self.places is None else self.places[index]
        return Side(known, len(energy), energy, own, self.exact, places)

    def exact_rows(self, index: Tensor) -> "Side":
        """Some of its samples in float64."""
        if self.exact is None or self.places is None:
            return self.rows(index)
        return self.exact.rows(self.places[index])

    def rounded(self, dtype: torch.dtype) -> "Side":
        """The batch in this type, without own moments; it keeps itself in float64 beside it."""
        known = {slot: v.to(dtype) if v.is_floating_point() else v for slot, v in self.known.items()}
        places = torch.arange(self.size, device=self.energy.device)
        return Side(known, self.size, self.energy.to(dtype), {}, self, places)


def _take_samples(v: Tensor, index: slice | Tensor) -> Tensor:
    if isinstance(index, slice):
        return v[..., index]
    # torch.gather takes a third of the time of indexing along the last axis
    flat = v.reshape(-1, v.shape[-1])
    return flat.gather(1, index.expand(len(flat), -1)).view(*v.shape[:-1], len(index))


@dataclass(frozen=True)
class Pairs:
    """Two sides that meet: all with all, or one by one (`zipped`).

    `same`: one by one, each with itself. `gaps`: they nearly coincide, and what sets them apart is to be kept exact.
    """

    a: Side
    b: Side
    zipped: bool = False
    same: bool = False
    gaps: bool = False

    def spread(self, left: Tensor, right: Tensor, dims: int, whole: bool) -> tuple[Tensor, Tensor]:
        """[*grid, n] and [*grid, m], shaped to broadcast against the tensors of `Moments`; grid has `dims` axes."""
        if whole:
            left = left.reshape(*left.shape[:dims], *[1] * dims, left.shape[-1])
            right = right.reshape(*[1] * dims, *right.shape)
        return (left, right) if self.zipped else (left.unsqueeze(-1), right.unsqueeze(-2))

    def keep_own(self, node: int, cov: Tensor) -> None:
        """Keep the own moments of a node [*grid, n] on the first side; where all meet all, they are on the diagonal."""
        own, kept = cov if self.zipped else cov.diagonal(dim1=-2, dim2=-1), self.a.own
        if node not in kept or kept[node].dim() < own.dim():  # the whole covariance serves who reads its diagonal
            kept[node] = own


class OneSide(NamedTuple):
    """What an operation reads of one side's own moments: those of these nodes, which have these grids."""

    nodes: tuple[int, ...]
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True)
class Here:
    """What an operation may ask besides its inputs' moments: where it stands, and what is wanted of it.

    Where two nodes meet (`crossed.py`), the second side has inputs of its own, and known tensors in slots of its own.
    """

    pairs: Pairs
    left: OneSide  # its inputs
    asked: Need
    tangent: bool  # whether the ntk is wanted
    takes: Need = Need.WHOLE  # how much it reads of each side's own moments
    right: OneSide | None = None  # the second side's inputs, where they are others
    slots: Mapping[int, int] = field(default_factory=dict)  # the second side's slots, where they are others

    def own(self, k: int = 0) -> tuple[Tensor, Tensor]:
        """The moments of each side with itself at input k, as much as the operation's `own` says."""
        return self.own_of(True, k), self.own_of(False, k)

    def own_of(self, first: bool, k: int = 0) -> Tensor:
        """Those of the first side, or of the second."""
        nodes, grids = self.left if first or self.right is None else self.right
        v = (self.pairs.a if first else self.pairs.b).own[nodes[k]]
        # Another reader of the same node may have asked for its whole covariance.
        if self.takes < Need.WHOLE and grids and grids[k] and v.dim() > len(grids[k]) + 1:
            return at_equal_positions(v, grids[k])
        return v

    def known(self, slot: int) -> tuple[Tensor, Tensor]:
        """Each side's known tensor of this slot."""
        return self.pairs.a.known[slot], self.pairs.b.known[self.slots.get(slot, slot)]

    def whole(self, grid: Grid) -> bool:
        """Whether all pairs of positions are asked for."""
        return self.asked == Need.WHOLE and len(grid) > 0


class Taken(NamedTuple):
    """What an operation is, which limit is taken there, and how its moments are computed, in plain words."""

    what: str
    limit: str
    how: str = "exact"


EXACT = "none: the same at every width"  # sums and moved positions need no limit


class Op:
    """One operation of the recursion. Each says which limit is taken: `what` and `limit`, or `taken` where it depends.

    `k.limits(x)` shows these words, layer by layer.
    """

    what: ClassVar[str]
    limit: ClassVar[str]
    own: ClassVar[Need] = Need.NOTHING
    carries_gap: ClassVar[bool] = False  # whether nearly equal inputs stay exact through it
    batchwise: ClassVar[bool] = False  # whether it mixes the samples of a batch
    linear: ClassVar[bool] = False  # whether it moves or sums positions, the same for both sides: zeros stay zeros
    featured: ClassVar[bool] = False  # whether it makes features of each sample, so that pairs one by one are dear

    def taken(self) -> Taken:
        """Which limit is taken, and how its moments are computed."""
        return Taken(self.what, self.limit)

    def reads(self, asked: Need) -> Need:
        """How much of its inputs' covariance it takes for what is asked of its output."""
        return asked

    def alone(self) -> bool:
        """Whether a sample with itself is computed otherwise than two that are equal."""
        return False

    def rounds(self) -> bool:
        """Whether the last bits depend on which pairs are computed together (sums in an order of torch's choice)."""
        return False

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        """The moments of its output from those of its inputs."""
        raise NotImplementedError


def drawn_with(samples: int) -> str:
    """How an expectation that is drawn is computed."""
    return f"drawn, {samples} points"


@dataclass(frozen=True)
class Input(Op):
    """Known values [*grid, channels, n]: the mean over channels of their products. All that is random comes later."""

    slot: int
    grid: Grid
    channels: int
    what: ClassVar[str] = "input"
    limit: ClassVar[str] = "the input's channels stay as many as they are"
    carries_gap: ClassVar[bool] = True

    def rounds(self) -> bool:
        """Whether the products are one matrix product, whose order of summation is torch's."""
        return self.channels > SHORT

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        x, y = here.known(self.slot)
        d, whole, pairs = len(self.grid), here.whole(self.grid), here.pairs
        # |x − y|²/2c is (p + q)/2 − cov, without the cancellation that the difference would have.
        gap = (x - y).square().sum(d) / (2 * x.shape[d]) if pairs.gaps and not whole else None
        cov = channel_products(x, y, d, whole, pairs.zipped) / x.shape[d]
        return Moments(cov, None, self.grid, whole, gap)


def channel_products(x: Tensor, y: Tensor, d: int, whole: bool, zipped: bool) -> Tensor:
    """Σ over channels of x[*S, c, i] y[*T, c, j], at equal positions if not whole, at equal samples if zipped."""
    if x.shape[d] > SHORT:
        if not whole:
            if zipped:  # a norm takes no room for the squares
                return torch.linalg.vector_norm(x, dim=d).square() if x is y else (x * y).sum(d)
            return torch.matmul(x.movedim(-1, -2), y)
        left, right = x.reshape(-1, *x.shape[d:]), y.reshape(-1, *y.shape[d:])
        out = torch.einsum("scn,tcn->stn" if zipped else "sci,tcj->stij", left, right)
        return out.reshape(*x.shape[:d], *y.shape[:d], *out.shape[2:])
    total: Tensor | None = None
    for c in range(x.shape[d]):  # one after the other: equal values give equal sums, to the last bit
        a, b = x.select(d, c), y.select(d, c)
        if whole:
            a, b = a.reshape(*a.shape[:d], *[1] * d, a.shape[-1]), b.reshape(*[1] * d, *b.shape)
        term = a * b if zipped else a.unsqueeze(-1) * b.unsqueeze(-2)
        total = term if total is None else total + term
    assert total is not None
    return total


# What a `RandomAffine` may be: what it is, and the limit.
WEIGHTS = Taken("weights", "weights of variance w_var/fan-in, biases of variance b_var, channels → ∞: Gaussian values")
ROWS = Taken("embedding", "independent rows of entries of variance w_var, channels → ∞")
GROUPED = Taken(
    "grouped weights", "weights of variance w_var/fan-in, channels of every group → ∞: groups change nothing"
)
DEPTHWISE = Taken(
    "depthwise weights",
    "channels → ∞, each with a filter of its own, of variance w_var/window, that stays as large as it is: channels do "
    "not mix, values are not Gaussian",
)
SCALES = Taken("scale and shift", "channels → ∞, each with a scale of 1 and a shift of 0 of its own, which are trained")
RUNNING = Taken("BatchNorm", f"statistics stay 0 and 1, as it begins (evaluation mode): {SCALES.limit}")
GAIN = Taken(
    "scale of each channel", "channels → ∞; the scales are those of the module at hand, their mean square counts"
)
VALUE = Taken("parameter as a value", "independent entries of the variance that the module at hand has, channels → ∞")


@dataclass(frozen=True)
class RandomAffine(Op):
    """Weights and bias, random and trained: cov' = w_var·cov + b_var; ntk' = w_rate·cov + b_rate + w_var·ntk.

    The rates are how much each parameter moves: w_var and b_var in the NTK parametrisation, the fan-in and 1 in the
    standard one, times a learning rate; 0 if frozen.
    """

    w_var: float
    b_var: float = 0.0
    w_rate: float = 0.0
    b_rate: float = 0.0
    laws: tuple[Law, Law] = ("normal", "normal")  # of weights and bias; of account where they act on few inputs
    means: Taken = field(default=WEIGHTS, compare=False, repr=False)  # what it is in the network
    carries_gap: ClassVar[bool] = True

    def taken(self) -> Taken:
        """As `Op.taken`: by what it is in the network."""
        return self.means

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        cov = s.cov * self.w_var if self.w_var != 1 else s.cov
        cov = cov + self.b_var if self.b_var else cov
        gap = None if s.gap is None else s.gap * self.w_var  # a bias moves p, q and cov alike
        if not here.tangent:
            return replace(s, cov=cov, ntk=None, gap=gap)
        if (self.w_rate, self.b_rate) == (self.w_var, self.b_var):
            ntk: Tensor | None = cov  # the NTK parametrisation at rate 1: no second pass over the pairs
        elif self.w_rate or self.b_rate:
            ntk = s.cov * self.w_rate + self.b_rate
        else:
            ntk = None
        if s.ntk is not None:
            ntk = s.ntk * self.w_var if ntk is None else torch.add(ntk, s.ntk, alpha=self.w_var)
        return Moments(cov, ntk, s.grid, s.whole, gap)


@dataclass(frozen=True)
class Activation(Op):
    """φ of a Gaussian: cov' = E[φ(u)φ(v)], ntk' = E[φ'(u)φ'(v)]·ntk.

    A parameter of each channel's own, such as the scale γ of a norm before it, adds rate·E[ψ(u)ψ(v)], ψ = ∂φ/∂γ: it is
    no independent factor, for ψ(u) = u φ'(u) is of the same u.
    """

    dual: Dual
    inner: Dual | None = None  # ψ
    rate: float = 0.0
    limit: ClassVar[str] = "channels → ∞: E[φ(u)φ(v)] over Gaussian values (u, v) of one channel"
    own: ClassVar[Need] = Need.DIAGONAL
    carries_gap: ClassVar[bool] = True

    def taken(self) -> Taken:
        """As `Op.taken`, with the function's name."""
        return Taken(getattr(self.dual, "name", "") or type(self.dual).__name__, self.limit, self.dual.how())

    def alone(self) -> bool:
        """Whether the dual rounds the angle of two equal inputs, which a sample with itself is spared."""
        return not self.dual.exact

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        slope = s.ntk is not None
        inner = self.inner if here.tangent and self.rate > 0 else None
        gap: Tensor | None = None
        if here.pairs.same and not s.whole:
            cov, factor = self.dual.own(s.cov, slope=slope)
            more = None if inner is None else inner.own(s.cov, slope=False)[0]
        else:
            p, q = here.pairs.spread(*here.own(), len(s.grid), s.whole)
            more = None if inner is None else inner.both(s.cov, p, q, slope=False)[0]
            exact = None if s.gap is None else self.dual.gap(s.gap, p, q)
            if exact is None:
                cov, factor = self.dual.both(s.cov, p, q, slope=slope)
            else:
                gap, cov, factor = exact
        ntk = None if s.ntk is None or factor is None else s.ntk * factor
        if more is not None:
            ntk = self.rate * more if ntk is None else torch.add(ntk, more, alpha=self.rate)
        return Moments(cov, ntk, s.grid, s.whole, gap)


@dataclass(frozen=True)
class CentredActivation(Op):
    """φ(u) less its mean over the channels, and over the positions on `axes`: what LayerNorm and GroupNorm subtract.

    With infinitely many channels that is E φ(u), a number of each sample. Its gradient is a mean of terms of both signs
    and vanishes, so that ntk' is the activation's.
    """

    activation: Activation
    axes: tuple[int, ...] = ()
    limit: ClassVar[str] = "its mean over the channels is an expectation, a known number of each sample"
    own: ClassVar[Need] = Need.DIAGONAL

    def taken(self) -> Taken:
        """As `Op.taken`: the activation's, and what is subtracted."""
        of = self.activation.taken()
        return Taken(f"{of.what} less its mean", f"{of.limit}; {self.limit}", of.how)

    def alone(self) -> bool:
        """As the activation."""
        return self.activation.alone()

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        after = self.activation([replace(s, gap=None)], here)
        alone = here.pairs.same and not s.whole
        means = [self.activation.dual.mean(v) for v in ((s.cov, s.cov) if alone else here.own())]
        pooled = [m.mean(self.axes, keepdim=True) if self.axes else m for m in means]
        # E[(φ − a)(φ' − b)] = E[φφ'] − m b − a m' + a b, m the mean at each position, a and b what is subtracted.
        (m, n), (a, b) = (
            (left, right) if alone else here.pairs.spread(left, right, len(s.grid), s.whole)
            for left, right in (means, pooled)
        )
        return replace(after, cov=after.cov - m * b - a * n + a * b)
