"""What the layers do to second moments. Each operation is a map of States; most are linear in the covariance.

An operation says what it reads: `reads(asked)` how much of its inputs' covariance over positions it takes for what is
asked of its output, and `own` how much of each side's covariance with itself (a variance, for an activation).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from ..activations.duals import Dual
from ..reading.initial import Law
from .batchnorm import normalized, slopes
from .state import Here, Need, State, embed


class Op:
    """One node of a plan."""

    own: ClassVar[Need] = Need.NOTHING
    carries_gap: ClassVar[bool] = False  # whether nearly equal inputs stay exact through it
    batchwise: ClassVar[bool] = False  # whether it mixes the samples of a batch
    featured: ClassVar[bool] = False  # whether it makes features of each sample, so that pairs one by one are dear

    def reads(self, asked: Need) -> Need:
        return asked

    def alone(self) -> bool:
        """Whether a sample with itself is computed otherwise than two that are equal."""
        return False

    def rounds(self) -> bool:
        """Whether the last bits depend on which pairs are computed together (sums in an order of torch's choice)."""
        return False

    def __call__(self, states: Sequence[State], here: Here) -> State:
        """The moments of its output from those of its inputs."""
        raise NotImplementedError


@dataclass(frozen=True)
class Input(Op):
    """Known values [*grid, channels, n]: the mean over channels of their products. All that is random comes later."""

    slot: int
    grid: tuple[int, ...]
    channels: int
    carries_gap: ClassVar[bool] = True

    def rounds(self) -> bool:
        return self.channels > SHORT

    def __call__(self, states: Sequence[State], here: Here) -> State:
        x, y = here.known(self.slot)
        d, whole, pairs = len(self.grid), here.whole(self.grid), here.pairs
        gap = (x - y).square().sum(d) / (2 * x.shape[d]) if pairs.gaps and not whole else None
        return State(products(x, y, d, whole, pairs.zipped) / x.shape[d], None, self.grid, whole, gap)


def products(x: Tensor, y: Tensor, d: int, whole: bool, zipped: bool) -> Tensor:
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


SHORT = 8  # channels up to which products are summed one by one rather than by a matrix product (heuristic)


@dataclass(frozen=True)
class Same(Op):
    """Known indices [*grid, n]: 1 where both are the same row of a table (an Embedding of unit variance), else 0."""

    slot: int
    grid: tuple[int, ...]
    padding: int | None = None

    def __call__(self, states: Sequence[State], here: Here) -> State:
        whole = here.whole(self.grid)
        a, b = here.pairs.spread(*here.known(self.slot), len(self.grid), whole)
        met = a == b
        if self.padding is not None:
            met = met & (a != self.padding)
        return State(met.double(), None, self.grid, whole)


@dataclass(frozen=True)
class Drawn(Op):
    """A parameter used as it is (a position embedding, a class token): independent entries of unit variance."""

    grid: tuple[int, ...]

    def __call__(self, states: Sequence[State], here: Here) -> State:
        whole, pairs = here.whole(self.grid), here.pairs
        sizes = (pairs.a.size,) if pairs.zipped else (pairs.a.size, pairs.b.size)
        one = torch.ones(*self.grid, *sizes, dtype=torch.float64, device=pairs.a.tensors()[0].device)
        return State(embed(one, self.grid) if whole else one, None, self.grid, whole)


@dataclass(frozen=True)
class Affine(Op):
    """Weights and bias: cov' = w_var·cov + b_var; ntk' = w_rate·cov + b_rate + w_var·ntk.

    The rates are how much each parameter moves: w_var and b_var in the NTK parametrisation, the fan-in and 1 in the
    standard one, times a learning rate; 0 if frozen.
    """

    w_var: float
    b_var: float = 0.0
    w_rate: float = 0.0
    b_rate: float = 0.0
    laws: tuple[Law, Law] = ("normal", "normal")  # of weights and bias; of account where they act on few inputs
    carries_gap: ClassVar[bool] = True

    def __call__(self, states: Sequence[State], here: Here) -> State:
        (s,) = states
        cov = s.cov * self.w_var if self.w_var != 1 else s.cov
        cov = cov + self.b_var if self.b_var else cov
        gap = None if s.gap is None else s.gap * self.w_var
        if not here.tangent:
            return replace(s, cov=cov, ntk=None, gap=gap)
        if (self.w_rate, self.b_rate) == (self.w_var, self.b_var):
            ntk: Tensor | None = cov
        elif self.w_rate or self.b_rate:
            ntk = s.cov * self.w_rate + self.b_rate
        else:
            ntk = None
        if s.ntk is not None:
            ntk = s.ntk * self.w_var if ntk is None else torch.add(ntk, s.ntk, alpha=self.w_var)
        return State(cov, ntk, s.grid, s.whole, gap)


@dataclass(frozen=True)
class Activation(Op):
    """φ of a Gaussian: cov' = E[φ(u)φ(v)], ntk' = E[φ'(u)φ'(v)]·ntk.

    A parameter of each channel's own, such as the scale γ of a norm before it, adds rate·E[ψ(u)ψ(v)], ψ = ∂φ/∂γ: it is
    no independent factor, for ψ(u) = u φ'(u) is of the same u.
    """

    dual: Dual
    inner: Dual | None = None  # ψ
    rate: float = 0.0
    own: ClassVar[Need] = Need.DIAGONAL
    carries_gap: ClassVar[bool] = True

    def alone(self) -> bool:
        return not self.dual.exact

    def __call__(self, states: Sequence[State], here: Here) -> State:
        (s,) = states
        slope = s.ntk is not None
        added = here.tangent and self.inner is not None and self.rate > 0
        if here.pairs.same and not s.whole:
            cov, factor = self.dual.own(s.cov, slope=slope)
            more = self.inner.own(s.cov, slope=False)[0] if added and self.inner else None
            return State(cov, self._tangent(_times(s.ntk, factor), more), s.grid)
        p, q = here.pairs.spread(*here.own(), len(s.grid), s.whole)
        more = self.inner.both(s.cov, p, q, slope=False)[0] if added and self.inner else None
        if s.gap is not None and (found := self.dual.gap(s.gap, p, q)) is not None:
            gap, cov, factor = found
        else:
            gap = None
            cov, factor = self.dual.both(s.cov, p, q, slope=slope)
        return State(cov, self._tangent(_times(s.ntk, factor), more), s.grid, s.whole, gap)

    def _tangent(self, ntk: Tensor | None, more: Tensor | None) -> Tensor | None:
        if more is None:
            return ntk
        return self.rate * more if ntk is None else torch.add(ntk, more, alpha=self.rate)


def _times(ntk: Tensor | None, factor: Tensor | None) -> Tensor | None:
    return None if ntk is None or factor is None else ntk * factor


@dataclass(frozen=True)
class Scale(Op):
    """h → factor·h."""

    factor: float
    carries_gap: ClassVar[bool] = True

    def __call__(self, states: Sequence[State], here: Here) -> State:
        return states[0].map(lambda v: v * self.factor**2)


@dataclass(frozen=True)
class Normalize(Op):
    """LayerNorm over the channels (and over the positions on `axes`): by the variance, as the mean vanishes."""

    axes: tuple[int, ...] = ()
    eps: float = 1e-5
    mask: int | None = None  # the slot of the positions that count [*grid, n]
    own: ClassVar[Need] = Need.DIAGONAL

    def __call__(self, states: Sequence[State], here: Here) -> State:
        (s,) = states
        left, right = here.own()
        if self.mask is not None:
            left, right = (
                (v * m).sum(self.axes, keepdim=True) / m.sum(self.axes, keepdim=True)
                for v, m in zip((left, right), here.known(self.mask), strict=True)
            )
        elif self.axes:
            left, right = (v.mean(self.axes, keepdim=True) for v in (left, right))
        p, q = here.pairs.spread((left + self.eps).rsqrt(), (right + self.eps).rsqrt(), len(s.grid), s.whole)
        return replace(s.map(lambda v: v * p * q), gap=None)


@dataclass(frozen=True)
class Dropout(Op):
    """Channels kept with probability `keep` and divided by it, anew for each sample: E[mask²] = 1/keep on the diagonal.

    Two forward passes of one sample draw two masks unless they are the same pass, which is what k(x, x)'s diagonal
    means here.
    """

    keep: float

    def alone(self) -> bool:
        return True

    def __call__(self, states: Sequence[State], here: Here) -> State:
        (s,) = states
        if not here.pairs.same:
            return replace(s, gap=None)
        if not s.whole:
            return s.map(lambda v: v / self.keep)
        size = prod(s.grid)
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

    def __call__(self, states: Sequence[State], here: Here) -> State:
        (s,) = states
        below = torch.zeros_like(s.cov) if s.ntk is None and here.tangent else s.ntk
        cov, ntk = normalized(s.cov, below, relu=self.relu, eps=self.eps)
        if here.tangent and ntk is not None:
            ntk = ntk + self.scale_rate * cov
            ntk = ntk + self.shift_rate * slopes(s.cov, relu=self.relu) if self.shift_rate else ntk
        return replace(s, cov=cov, ntk=ntk, gap=None)


@dataclass(frozen=True)
class Add(Op):
    """The sum of uncorrelated branches."""

    carries_gap: ClassVar[bool] = True

    def __call__(self, states: Sequence[State], here: Here) -> State:
        return _combined(states)


@dataclass(frozen=True)
class Mix(Op):
    """Channels side by side: the mean of the branches' covariances, weighted by their widths."""

    weights: tuple[float, ...]
    carries_gap: ClassVar[bool] = True

    def __call__(self, states: Sequence[State], here: Here) -> State:
        scaled = [s.map(lambda v, w=w: v * w) for s, w in zip(states, self.weights, strict=True)]  # type: ignore[misc]
        return _combined(scaled)


@dataclass(frozen=True)
class Multiply(Op):
    """The product of independent branches: cov₁cov₂, and cov₁ntk₂ + ntk₁cov₂."""

    def __call__(self, states: Sequence[State], here: Here) -> State:
        first, *rest = states
        cov, ntk = first.cov, first.ntk
        for s in rest:
            parts = [a * b for a, b in ((ntk, s.cov), (cov, s.ntk)) if a is not None and b is not None]
            ntk = _sum(parts) if parts else None
            cov = cov * s.cov
        return replace(first, cov=cov, ntk=ntk, gap=None)


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for v in values[1:]:
        total = total + v
    return total


def _combined(states: Sequence[State]) -> State:
    ntks = [s.ntk for s in states if s.ntk is not None]
    gaps = [s.gap for s in states if s.gap is not None]
    cov = _sum([s.cov for s in states])
    ntk = _sum(ntks) if ntks else None
    gap = _sum(gaps) if len(gaps) == len(states) else None
    return replace(states[0], cov=cov, ntk=ntk, gap=gap)


@dataclass(frozen=True)
class Weigh(Op):
    """h at each position times a known number of that sample [*grid, n]: a mask, a count to divide by."""

    slot: int

    def __call__(self, states: Sequence[State], here: Here) -> State:
        (s,) = states
        p, q = here.pairs.spread(*here.known(self.slot), len(s.grid), s.whole)
        return replace(s.map(lambda v: v * p * q), gap=None)
