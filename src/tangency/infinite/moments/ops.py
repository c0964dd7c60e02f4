"""Operations on moments beside the basic three of `core.py`: other sources, norms, dropout, and joining branches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from .batchdraws import drawn_normalized
from .batchnorm import normalized, slopes
from .core import EXACT as ANY_WIDTH
from .core import Grid, Here, Moments, Need, Op, Taken, drawn_with, embed

# Numbers of a batch (samples times positions) up to which BatchNorm before ReLU is exact, and up to which it is drawn:
# the first costs their cube a hundred times, the second the root of their covariance (heuristics).
EXACT, DRAWN = 512, 4096


@dataclass(frozen=True)
class SameRow(Op):
    """Known indices [*grid, n]: 1 where both are the same row of a table (an Embedding of unit variance), else 0."""

    slot: int
    grid: Grid
    padding: int | None = None
    what: ClassVar[str] = "lookup"
    limit: ClassVar[str] = ANY_WIDTH  # that rows are independent is said by what scales them

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        whole = here.whole(self.grid)
        a, b = here.pairs.spread(*here.known(self.slot), len(self.grid), whole)
        met = a == b
        if self.padding is not None:
            # The padding row stays zero, so it has no variance, not even with itself.
            met = met & (a != self.padding)
        return Moments(met.to(here.pairs.a.energy), None, self.grid, whole)


@dataclass(frozen=True)
class Drawn(Op):
    """A parameter used as it is (a position embedding, a class token): independent entries of unit variance."""

    grid: Grid
    what: ClassVar[str] = "parameter as a value"
    limit: ClassVar[str] = "independent entries, the same for every sample, channels → ∞"

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        whole, pairs = here.whole(self.grid), here.pairs
        sizes = (pairs.a.size,) if pairs.zipped else (pairs.a.size, pairs.b.size)
        # The same entries for every sample: a parameter does not depend on the input.
        ones = pairs.a.energy.new_ones(*self.grid, *sizes)
        return Moments(embed(ones, self.grid) if whole else ones, None, self.grid, whole)


@dataclass(frozen=True)
class Rescale(Op):
    """h → factor·h."""

    factor: float
    what: ClassVar[str] = "known factor"
    limit: ClassVar[str] = ANY_WIDTH
    carries_gap: ClassVar[bool] = True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        return inputs[0].map(lambda v: v * self.factor**2)

    def on_side(self, here: Here, first: bool) -> float:
        """What the values of one side are multiplied by."""
        return self.factor


@dataclass(frozen=True)
class Normalize(Op):
    """LayerNorm over the channels (and over the positions on `axes`): by the variance, as the mean vanishes."""

    axes: tuple[int, ...] = ()
    eps: float = 1e-5
    mask: int | None = None  # the slot of the positions that count [*grid, n]
    what: ClassVar[str] = "norm"
    limit: ClassVar[str] = (
        "channels → ∞: their mean and mean square are expectations, known numbers of each sample; nothing is learnt "
        "through them"
    )
    own: ClassVar[Need] = Need.DIAGONAL

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        # A gap would have to be divided by different numbers for p and q, so it is not carried on.
        p, q = here.pairs.spread(self.on_side(here, True), self.on_side(here, False), len(s.grid), s.whole)
        return replace(s.map(lambda v: v * p * q), gap=None)

    def on_side(self, here: Here, first: bool) -> Tensor:
        """What the values of one side are multiplied by."""
        # Infinitely many channels: a sample's own mean square is its variance itself, not an estimate of it.
        v = here.own_of(first)
        if self.mask is not None:
            m = here.known(self.mask)[0 if first else 1]
            v = (v * m).sum(self.axes, keepdim=True) / m.sum(self.axes, keepdim=True)
        elif self.axes:
            v = v.mean(self.axes, keepdim=True)
        return (v + self.eps).rsqrt()


@dataclass(frozen=True)
class ByStatistic(Op):
    """h times fn(E[s²]), E over the channels of s (and its positions on `axes`): norms of any form.

    With infinitely many channels E[s²] is a known number of each sample, and its own gradient vanishes beside that of
    h: it is a mean over channels of terms of both signs.
    """

    fn: Callable[[Tensor], Tensor] = field(repr=False)
    axes: tuple[int, ...] = ()
    what: ClassVar[str] = "norm"
    limit: ClassVar[str] = Normalize.limit
    own: ClassVar[Need] = Need.DIAGONAL

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        s = inputs[0]
        p, q = here.pairs.spread(self.on_side(here, True), self.on_side(here, False), len(s.grid), s.whole)
        return replace(s.map(lambda v: v * p * q), gap=None)

    def on_side(self, here: Here, first: bool) -> Tensor:
        """What the values of one side are multiplied by."""
        v = here.own_of(first, 1)
        return self.fn(v.mean(self.axes, keepdim=True) if self.axes else v)


@dataclass(frozen=True)
class DropChannels(Op):
    """Channels kept with probability `keep` and divided by it, anew for each sample: E[mask²] = 1/keep on the diagonal.

    Two forward passes of one sample draw two masks unless they are the same pass, which is what k(x, x)'s diagonal
    means here.
    """

    keep: float
    what: ClassVar[str] = "dropout"
    limit: ClassVar[str] = "a mask of each sample's own: variances are divided by 1 − p, covariances stay"

    def alone(self) -> bool:
        """Yes: a sample meets its own mask."""
        return True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        # Two samples, or one twice: independent masks have the mean 1, so nothing changes.
        if not here.pairs.same:
            return replace(s, gap=None)
        if not s.whole:
            return s.map(lambda v: v / self.keep)
        size = prod(s.grid)
        # Positions have masks of their own, so only the diagonal over positions grows.
        factor = 1 + torch.eye(size, dtype=s.cov.dtype, device=s.cov.device) * (1 / self.keep - 1)
        return s.map(lambda v: v * factor.view(*s.grid, *s.grid, 1))


@dataclass(frozen=True)
class BatchNormalize(Op):
    """BatchNorm over the batch at hand with all its positions, then an activation; rates are those of scale and shift.

    The limit: infinitely many channels, each normalised by the mean and variance of its n·P numbers, which stay as many
    as they are. ReLU and no activation exactly (up to EXACT numbers where there are positions), others by points.
    """

    relu: bool
    eps: float
    scale_rate: float
    shift_rate: float
    positions: bool = False
    fn: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)  # the activation, if it is drawn
    samples: int = 4096
    seed: int = 0
    what: ClassVar[str] = "BatchNorm of the batch"
    limit: ClassVar[str] = (
        "channels → ∞, each normalised by the mean and variance of its samples·positions numbers, which stay as many "
        "as they are"
    )
    batchwise: ClassVar[bool] = True

    def taken(self) -> Taken:
        """As `Op.taken`, with the activation that follows."""
        return Taken(
            self.what + (", Relu" if self.relu else ", activation" if self.fn is not None else ""),
            self.limit,
            "exact" if self.fn is None else drawn_with(self.samples),
        )

    def reads(self, asked: Need) -> Need:
        """All pairs of positions, which the statistics mix."""
        return Need.WHOLE if asked and self.positions else asked

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        rows, shape, size = s.cov.shape[-1], s.cov.shape, prod(s.grid)

        def batch(v: Tensor) -> Tensor:
            """Samples with their positions as one batch [n·P, n·P]."""
            return v.reshape(size, size, rows, rows).permute(2, 0, 3, 1).reshape(rows * size, -1) if s.grid else v

        def back(v: Tensor) -> Tensor:
            """Positions first again."""
            return v.view(rows, size, rows, size).permute(1, 3, 0, 2).reshape(shape) if s.grid else v

        cov, ntk = self._moments(batch(s.cov), None if s.ntk is None else batch(s.ntk), here.tangent)
        after = replace(s, cov=back(cov), ntk=None if ntk is None else back(ntk), gap=None)
        return after.at(here.asked)

    def _moments(self, cov: Tensor, below: Tensor | None, tangent: bool) -> tuple[Tensor, Tensor | None]:
        # Without a tangent kernel from below, that of scale and shift is still wanted.
        below = torch.zeros_like(cov) if below is None and tangent else below
        if self.fn is not None:
            theta = torch.zeros_like(cov) if below is None else below
            drawn = drawn_normalized(cov, theta, self.fn, self.eps, self.samples, self.seed)
            trained = drawn.ntk + self.scale_rate * drawn.scale + self.shift_rate * drawn.shift
            return drawn.cov, trained if tangent else None
        found, ntk = normalized(cov, below, relu=self.relu, eps=self.eps)
        if tangent and ntk is not None:
            # ∂y/∂γ = y where γ = 1 and β = 0; ∂y/∂β is the slope of what follows.
            ntk = ntk + self.scale_rate * found
            ntk = ntk + self.shift_rate * slopes(cov, relu=self.relu) if self.shift_rate else ntk
        return found, ntk


@dataclass(frozen=True)
class Add(Op):
    """The sum of uncorrelated branches."""

    what: ClassVar[str] = "sum"
    limit: ClassVar[str] = "the branches have weights of their own: they are uncorrelated"
    carries_gap: ClassVar[bool] = True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        return combined(inputs)


@dataclass(frozen=True)
class Mix(Op):
    """Channels side by side: the mean of the branches' covariances, weighted by their widths."""

    weights: tuple[float, ...]
    what: ClassVar[str] = "channels side by side"
    limit: ClassVar[str] = "channels of every branch → ∞, in the proportions of the module at hand"
    carries_gap: ClassVar[bool] = True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        scaled = [s.map(lambda v, w=w: v * w) for s, w in zip(inputs, self.weights, strict=True)]  # type: ignore[misc]
        return combined(scaled)


@dataclass(frozen=True)
class Multiply(Op):
    """The product of independent branches: cov₁cov₂, and cov₁ntk₂ + ntk₁cov₂."""

    what: ClassVar[str] = "product"
    limit: ClassVar[str] = "channels → ∞: a gate and what it multiplies are independent, their moments multiply"

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        first, *rest = inputs
        cov, ntk = first.cov, first.ntk
        for s in rest:
            # The product rule; a branch without trained weights has no ntk and adds nothing.
            parts = [a * b for a, b in ((ntk, s.cov), (cov, s.ntk)) if a is not None and b is not None]
            ntk = _sum(parts) if parts else None
            cov = cov * s.cov
        return replace(first, cov=cov, ntk=ntk, gap=None)


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for v in values[1:]:
        total = total + v
    return total


def combined(inputs: Sequence[Moments]) -> Moments:
    ntks = [s.ntk for s in inputs if s.ntk is not None]
    gaps = [s.gap for s in inputs if s.gap is not None]
    cov = _sum([s.cov for s in inputs])
    ntk = _sum(ntks) if ntks else None
    # (p + q)/2 − cov is linear in the branches too, but all of them must have kept theirs.
    gap = _sum(gaps) if len(gaps) == len(inputs) else None
    return replace(inputs[0], cov=cov, ntk=ntk, gap=gap)


@dataclass(frozen=True)
class Weigh(Op):
    """h at each position times a known number of that sample [*grid, n]: a mask, a count to divide by."""

    slot: int
    what: ClassVar[str] = "known factor"
    limit: ClassVar[str] = ANY_WIDTH

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        p, q = here.pairs.spread(*here.known(self.slot), len(s.grid), s.whole)
        return replace(s.map(lambda v: v * p * q), gap=None)

    def on_side(self, here: Here, first: bool) -> Tensor:
        """What the values of one side are multiplied by."""
        return here.known(self.slot)[0 if first else 1]
