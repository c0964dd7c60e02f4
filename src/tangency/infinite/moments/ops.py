"""Operations on moments beside the basic three of `core.py`: other sources, norms, dropout, and joining branches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from .batchnorm import normalized, slopes
from .core import Grid, Here, Moments, Need, Op, embed


@dataclass(frozen=True)
class SameRow(Op):
    """Known indices [*grid, n]: 1 where both are the same row of a table (an Embedding of unit variance), else 0."""

    slot: int
    grid: Grid
    padding: int | None = None

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
    carries_gap: ClassVar[bool] = True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        return inputs[0].map(lambda v: v * self.factor**2)


@dataclass(frozen=True)
class Normalize(Op):
    """LayerNorm over the channels (and over the positions on `axes`): by the variance, as the mean vanishes."""

    axes: tuple[int, ...] = ()
    eps: float = 1e-5
    mask: int | None = None  # the slot of the positions that count [*grid, n]
    own: ClassVar[Need] = Need.DIAGONAL

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        # Infinitely many channels: a sample's own mean square is its variance itself, not an estimate of it.
        left, right = here.own()
        if self.mask is not None:
            left, right = (
                (v * m).sum(self.axes, keepdim=True) / m.sum(self.axes, keepdim=True)
                for v, m in zip((left, right), here.known(self.mask), strict=True)
            )
        elif self.axes:
            left, right = (v.mean(self.axes, keepdim=True) for v in (left, right))
        # A gap would have to be divided by different numbers for p and q, so it is not carried on.
        p, q = here.pairs.spread((left + self.eps).rsqrt(), (right + self.eps).rsqrt(), len(s.grid), s.whole)
        return replace(s.map(lambda v: v * p * q), gap=None)


@dataclass(frozen=True)
class ByStatistic(Op):
    """h times fn(E[s²]), E over the channels of s (and its positions on `axes`): norms of any form.

    With infinitely many channels E[s²] is a known number of each sample, and its own gradient vanishes beside that of
    h: it is a mean over channels of terms of both signs.
    """

    fn: Callable[[Tensor], Tensor] = field(repr=False)
    axes: tuple[int, ...] = ()
    own: ClassVar[Need] = Need.DIAGONAL

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        s = inputs[0]
        left, right = (v.mean(self.axes, keepdim=True) if self.axes else v for v in here.own(1))
        p, q = here.pairs.spread(self.fn(left), self.fn(right), len(s.grid), s.whole)
        return replace(s.map(lambda v: v * p * q), gap=None)


@dataclass(frozen=True)
class DropChannels(Op):
    """Channels kept with probability `keep` and divided by it, anew for each sample: E[mask²] = 1/keep on the diagonal.

    Two forward passes of one sample draw two masks unless they are the same pass, which is what k(x, x)'s diagonal
    means here.
    """

    keep: float

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
    """BatchNorm over the batch at hand, then ReLU or nothing; the rates are those of its scale and shift."""

    relu: bool
    eps: float
    scale_rate: float
    shift_rate: float
    batchwise: ClassVar[bool] = True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        # Without a tangent kernel from below, that of scale and shift is still wanted.
        below = torch.zeros_like(s.cov) if s.ntk is None and here.tangent else s.ntk
        cov, ntk = normalized(s.cov, below, relu=self.relu, eps=self.eps)
        if here.tangent and ntk is not None:
            # ∂y/∂γ = y where γ = 1 and β = 0; ∂y/∂β is the slope of what follows.
            ntk = ntk + self.scale_rate * cov
            ntk = ntk + self.shift_rate * slopes(s.cov, relu=self.relu) if self.shift_rate else ntk
        return replace(s, cov=cov, ntk=ntk, gap=None)


@dataclass(frozen=True)
class Add(Op):
    """The sum of uncorrelated branches."""

    carries_gap: ClassVar[bool] = True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        return _combined(inputs)


@dataclass(frozen=True)
class Mix(Op):
    """Channels side by side: the mean of the branches' covariances, weighted by their widths."""

    weights: tuple[float, ...]
    carries_gap: ClassVar[bool] = True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        scaled = [s.map(lambda v, w=w: v * w) for s, w in zip(inputs, self.weights, strict=True)]  # type: ignore[misc]
        return _combined(scaled)


@dataclass(frozen=True)
class Multiply(Op):
    """The product of independent branches: cov₁cov₂, and cov₁ntk₂ + ntk₁cov₂."""

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


def _combined(inputs: Sequence[Moments]) -> Moments:
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

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        p, q = here.pairs.spread(*here.known(self.slot), len(s.grid), s.whole)
        return replace(s.map(lambda v: v * p * q), gap=None)
