"""Two nodes that meet, one on each side: E[h_j(x) h_k(y)] of equal channels, where they share weights.

Operations that both nodes have in common act on such moments as on those of two samples. What one of them has alone,
and what joins correlated values, is here. Which of them two nodes need is found by `correlations.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..activations.dual import Dual
from .core import Grid, Here, Moments, Need, Op
from .ops import Add, ByStatistic, Normalize, Rescale, Weigh, combined
from .positions import Aggregate, Join, PositionOp

Factor = Rescale | Weigh | Normalize | ByStatistic


def _pairs_of(here: Here) -> tuple[int, ...]:
    """The sizes of the axes of pairs."""
    pairs = here.pairs
    return (pairs.a.size,) if pairs.zipped else (pairs.a.size, pairs.b.size)


def _met(cov: Tensor, ntk: Tensor | None, left: Grid, right: Grid) -> Moments:
    """Whole moments of two sides with these positions."""
    return Moments(cov, ntk, left, bool(left or right), other=None if left == right else right)


class Crossed(Op):
    """An operation on the moments of two nodes, one on each side."""

    what: ClassVar[str] = "shared weights"
    limit: ClassVar[str] = (
        "channels → ∞; what the same weights give at two places is jointly Gaussian, and correlated (Yang 2019)"
    )


@dataclass(frozen=True)
class Nothing(Crossed):
    """Uncorrelated values: zeros, for an operation that takes several inputs of which others are correlated."""

    left: Grid
    right: Grid

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        whole = here.asked == Need.WHOLE and bool(self.left or self.right)
        shape = (*self.left, *self.right, *_pairs_of(here)) if whole else (*self.left, *_pairs_of(here))
        return Moments(here.pairs.a.energy.new_zeros(shape), None, self.left, whole)


@dataclass(frozen=True)
class Means(Crossed):
    """φ(u) and ψ(v) of independent u and v: the product of their means. Nothing trained moves both."""

    left: Dual
    right: Dual
    own: ClassVar[Need] = Need.DIAGONAL

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        u, v = self.left.mean(here.own_of(True)), self.right.mean(here.own_of(False))
        grids = u.shape[:-1], v.shape[:-1]
        whole = here.asked == Need.WHOLE and bool(grids[0] or grids[1])
        if whole:
            u, v = u.reshape(*grids[0], *[1] * len(grids[1]), -1), v.reshape(*[1] * len(grids[0]), *v.shape)
        cov = u * v if here.pairs.zipped else u.unsqueeze(-1) * v.unsqueeze(-2)
        return Moments(cov, None, tuple(grids[0]), whole)


@dataclass(frozen=True)
class SameParameter(Crossed):
    """Scales (or shifts) of one parameter on both sides, by themselves: no value, but the same thing is trained.

    At the start a scale is 1 and a shift 0: what passes through them is met by itself.
    """

    w_rate: float
    b_rate: float

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        ntk = s.cov * self.w_rate + self.b_rate if here.tangent else None
        return replace(s, cov=torch.zeros_like(s.cov), ntk=ntk)


@dataclass(frozen=True)
class Factored(Crossed):
    """One side's values at each position times a number: a norm, a mask, a multiple."""

    by: Factor
    first: bool
    grids: tuple[Grid, Grid]
    own: ClassVar[Need] = Need.DIAGONAL

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        factor = self.by.on_side(here, self.first)
        if isinstance(factor, float):
            return s.map(lambda v: v * factor)
        left, right = self.grids
        if s.whole:
            shape = (*factor.shape[:-1], *[1] * len(right), factor.shape[-1]) if self.first else None
            factor = factor.reshape(shape or (*[1] * len(left), *factor.shape))
        if not here.pairs.zipped:
            factor = factor.unsqueeze(-1 if self.first else -2)
        return s.map(lambda v: v * factor)


@dataclass(frozen=True)
class Placed(Crossed):
    """What one side does to its positions alone: pooled values beside those that they were pooled from."""

    by: PositionOp | Aggregate
    first: bool
    grids: tuple[Grid, Grid]  # before it

    def reads(self, asked: Need) -> Need:
        """All pairs of positions: what is equal after it was not before."""
        return Need.WHOLE if asked else asked

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        left, right = self.grids
        after = self._after(here, left if self.first else right)
        grids = (after, right) if self.first else (left, after)
        ntk = None if s.ntk is None else self._through(s.ntk, here)
        return _met(self._through(s.cov, here), ntk, *grids)

    def _after(self, here: Here, grid: Grid) -> Grid:
        if isinstance(self.by, Aggregate):
            return (here.known(self.by.slot)[0 if self.first else 1].shape[0],)
        return self.by.grid(grid)

    def _through(self, v: Tensor, here: Here) -> Tensor:
        left, right = self.grids
        if self.first:
            return self._leading(v, left, here)
        # The other side's positions to the front, and back again.
        a, b = len(left), len(right)
        out = self._leading(v.movedim(tuple(range(a, a + b)), tuple(range(b))), right, here)
        rank = out.dim() - v.dim() + b
        return out.movedim(tuple(range(rank)), tuple(range(a, a + rank)))

    def _leading(self, v: Tensor, grid: Grid, here: Here) -> Tensor:
        """The first axes of v, this side's positions, after it."""
        if not isinstance(self.by, Aggregate):
            return self.by.apply(v, grid, False)
        matrix = here.known(self.by.slot)[0 if self.first else 1]
        pairs = len(_pairs_of(here))
        flat = v.reshape(v.shape[0], -1, *v.shape[v.dim() - pairs :])
        rule = "asn,srn->arn" if here.pairs.zipped else "asi,srij->arij" if self.first else "asj,srij->arij"
        return torch.einsum(rule, matrix, flat).reshape(-1, *v.shape[1:])


@dataclass(frozen=True)
class JoinedSide(Crossed):
    """Positions side by side along an axis of one side; `parts`: which of its branches are correlated with the other.

    `left` and `right` are the grids of both sides after it, `sizes` those of the branches on the axis.
    """

    axis: int
    first: bool
    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    left: Grid
    right: Grid

    def reads(self, asked: Need) -> Need:
        """All pairs of positions: what is equal after it was not before."""
        return Need.WHOLE if asked else asked

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        axis = self.axis if self.first else len(self.left) + self.axis
        found = dict(zip(self.parts, inputs, strict=True))
        trained = any(s.ntk is not None for s in inputs)

        def joined(tangent: bool) -> Tensor:
            """The covariances, or tangent kernels, of all branches."""
            blocks = []
            for k, size in enumerate(self.sizes):
                v = (found[k].ntk if tangent else found[k].cov) if k in found else None
                if v is None:
                    shape = [*self.left, *self.right, *_pairs_of(here)]
                    shape[axis] = size
                    v = inputs[0].cov.new_zeros(shape)
                blocks.append(v)
            return torch.cat(blocks, axis)

        return _met(joined(False), joined(True) if trained else None, self.left, self.right)


@dataclass(frozen=True)
class CorrelatedAdd(Add):
    """The sum of branches, the first `count` inputs; the others are what correlated ones of them have in common."""

    count: int
    carries_gap: ClassVar[bool] = False

    def alone(self) -> bool:
        """Yes: two branches of one sample are no sample with itself, so that their angle is rounded."""
        return True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        return combined([replace(s, gap=None) for s in inputs])


@dataclass(frozen=True)
class CorrelatedMultiply(Crossed):
    """The product of two correlated Gaussian values u and w of mean zero, elementwise.

    Inputs: u, w, u with w, w with u. E[u w u' w'] = E[uu']E[ww'] + E[uw']E[wu'] + E[uw]E[u'w'], as all fourth moments
    of Gaussians are.
    """

    own: ClassVar[Need] = Need.DIAGONAL

    def alone(self) -> bool:
        """As `CorrelatedAdd.alone`."""
        return True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        u, w, uw, wu = inputs
        p, q = here.pairs.spread(*here.own(2), len(u.grid), u.whole)
        cov = u.cov * w.cov + uw.cov * wu.cov + p * q
        # The product rule, of both sides: u u'·⟨∂w, ∂w'⟩, u w'·⟨∂w, ∂u'⟩, and so on.
        terms = ((u.cov, w.ntk), (w.cov, u.ntk), (uw.cov, wu.ntk), (wu.cov, uw.ntk))
        parts = [a * b for a, b in terms if b is not None]
        return replace(u, cov=cov, ntk=torch.stack(parts).sum(0) if parts else None, gap=None)


@dataclass(frozen=True)
class CorrelatedJoin(Join):
    """Positions side by side; after the branches, the inputs are what the two branches of each of `blocks` share."""

    blocks: tuple[tuple[int, int], ...]

    def alone(self) -> bool:
        """As `CorrelatedAdd.alone`."""
        return True

    def reads(self, asked: Need) -> Need:
        """All pairs of positions, for those of two branches need not be as many."""
        return Need.WHOLE if asked else asked

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        count = len(inputs) - len(self.blocks)
        branches, d = inputs[:count], len(inputs[0].grid)
        found = {(k, k): s for k, s in enumerate(branches)} | dict(zip(self.blocks, inputs[count:], strict=True))
        grids = [s.grid for s in branches]
        total = (*grids[0][: self.axis], sum(g[self.axis] for g in grids), *grids[0][self.axis + 1 :])

        def joined(tangent: bool) -> Tensor:
            """The covariances, or tangent kernels, of all branches with all."""
            rows = []
            for k, left in enumerate(grids):
                row = []
                for n, right in enumerate(grids):
                    s = found.get((k, n))
                    v = None if s is None else s.ntk if tangent else s.cov
                    zeros = inputs[0].cov.new_zeros(*left, *right, *_pairs_of(here)) if v is None else v
                    row.append(zeros)
                rows.append(torch.cat(row, d + self.axis))
            return torch.cat(rows, self.axis)

        ntk = joined(True) if any(s.ntk is not None for s in inputs) else None
        return Moments(joined(False), ntk, total, True).at(here.asked)
