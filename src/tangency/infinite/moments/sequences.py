"""Operations that mix the positions of a sequence: attention, and recurrence over time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..activations.dual import Dual
from .core import Here, Moments, Need, Op, RandomAffine, Taken, drawn_with
from .draws import Sequences
from .heads import (
    AttentionLayer,
    OutputMoments,
    Projection,
    SequencePairs,
    linear_heads,
    own_softmax_heads,
    quadratic_heads,
    softmax_heads,
)

Mechanism = Literal["softmax", "identity", "relu", "abs"]
Scaling = Literal["sqrt", "linear"]


@dataclass(frozen=True)
class Attend(Op):
    """Attention over the positions of a sequence, with infinitely many heads."""

    q: RandomAffine
    k: RandomAffine
    v: RandomAffine
    o: RandomAffine
    scaling: Scaling = "sqrt"
    mechanism: Mechanism = "softmax"
    causal: bool = False
    samples: int = 4096
    seed: int = 0
    mask: int | None = None  # the slot of the valid positions [T, n]
    limit: ClassVar[str] = (
        "heads → ∞, each infinitely wide (one head is taken for many); projections of variance w_var/fan-in"
    )
    own: ClassVar[Need] = Need.WHOLE

    def taken(self) -> Taken:
        """As `Op.taken`, with the scaling of the scores."""
        linear = self.scaling == "linear"
        scores = "scores q·k/d, which are constants" if linear else "scores q·k/√d, which are Gaussian"
        drawn = self.mechanism == "softmax" and not linear
        how = drawn_with(self.samples) if drawn else "exact"
        return Taken(f"attention ({self.mechanism})", f"{self.limit}; {scores}", how)

    def alone(self) -> bool:
        """As `Op.alone`: heads of a sample with itself are drawn otherwise than with others."""
        return True

    def reads(self, asked: Need) -> Need:
        """As `Op.reads`: every position attends to all."""
        return Need.WHOLE if asked else asked

    def __call__(self, states: Sequence[Moments], here: Here) -> Moments:
        (s,) = states
        masks = (None, None) if self.mask is None else tuple(v.movedim(-1, 0) for v in here.known(self.mask))
        left, right = (Sequences(v.movedim(-1, 0), mask) for v, mask in zip(here.own(), masks, strict=True))
        last, first = ((-1,), (0,)) if here.pairs.zipped else ((-2, -1), (0, 1))  # heads takes the samples first
        ntk = None if s.ntk is None else s.ntk.movedim(last, first)
        pairs = SequencePairs(s.cov.movedim(last, first), ntk, left, right, here.tangent)
        cov, tangent = self._moments(pairs, here.pairs.same)
        tangent = None if tangent is None else tangent.movedim(first, last)
        return Moments(cov.movedim(first, last), tangent, s.grid, whole=True).at(here.asked)

    def _moments(self, pairs: SequencePairs, same: bool) -> OutputMoments:
        q, k, v, o = (Projection.of(affine) for affine in (self.q, self.k, self.v, self.o))
        layer = AttentionLayer(q, k, v, o, self.causal, self.samples, self.seed)
        if self.scaling == "linear":
            return linear_heads(layer, pairs, self.mechanism)
        if self.mechanism == "identity":
            return quadratic_heads(layer, pairs)
        return own_softmax_heads(layer, pairs) if same else softmax_heads(layer, pairs)


@dataclass(frozen=True)
class Recur(Op):
    """h_t = φ(W x_t + U h_{t−1} + b): each pair of times (t, t') from the pair before, (t − 1, t' − 1).

    Alemohammad, Wang, Balestriero and Baraniuk 2021, 'The recurrent neural tangent kernel'.
    """

    dual: Dual
    inputs: RandomAffine
    hidden: RandomAffine
    backward: bool = False
    limit: ClassVar[str] = (
        "hidden width → ∞, weights of variance w_var/fan-in of inputs and of hidden values, the same at every time; a "
        "first state of 0"
    )
    own: ClassVar[Need] = Need.DIAGONAL

    def taken(self) -> Taken:
        """As `Op.taken`, with the method of its activation."""
        return Taken("RNN", self.limit, self.dual.how())

    def alone(self) -> bool:
        """As `Op.alone`: where the dual rounds the angle of two equal inputs."""
        return not self.dual.exact

    def __call__(self, states: Sequence[Moments], here: Here) -> Moments:
        (s,) = states
        s = self._turned(s)
        alone = here.pairs.same and not s.whole
        # What is known of each side is its input's variance at every time; those of hidden values follow from them.
        left, right = (self._variances(v.flip(0) if self.backward else v) for v in here.own())
        covs: list[Tensor] = []
        ntks: list[Tensor] = []
        for t in range(s.grid[0]):
            cov, ntk = self._before(s, t, covs, ntks, here.tangent)
            if alone:
                value, slope = self.dual.own(cov, slope=here.tangent)
            else:
                p, q = here.pairs.spread(left[t : t + 1], right if s.whole else right[t : t + 1], 1, whole=False)
                value, slope = self.dual.both(cov, p, q, slope=here.tangent)
            covs.append(value)
            if here.tangent:
                assert ntk is not None
                assert slope is not None
                ntks.append(ntk * slope)
        joined = torch.stack(covs) if s.whole else torch.cat(covs)
        tangent = (torch.stack(ntks) if s.whole else torch.cat(ntks)) if ntks else None
        return self._turned(replace(s, cov=joined, ntk=tangent, gap=None))

    def _before(
        self, s: Moments, t: int, covs: list[Tensor], ntks: list[Tensor], tangent: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The moments before φ at time t, with all times t' (whole) or with t itself: [T' or 1, *pairs]."""
        i, h = self.inputs, self.hidden
        x = s.cov[t] if s.whole else s.cov[t : t + 1]
        last = self._shifted(covs[-1], s.whole) if covs else None
        cov = x * i.w_var + (i.b_var + h.b_var)
        cov = cov if last is None else cov + h.w_var * last
        if not tangent:
            return cov, None
        # The layer's own weights, then what comes through them: the tangents of its inputs, and of the time before.
        ntk = x * i.w_rate + (i.b_rate + h.b_rate)
        if s.ntk is not None:
            ntk = ntk + i.w_var * (s.ntk[t] if s.whole else s.ntk[t : t + 1])
        if last is not None:
            ntk = ntk + h.w_rate * last + h.w_var * self._shifted(ntks[-1], s.whole)
        return cov, ntk

    def _shifted(self, v: Tensor, whole: bool) -> Tensor:
        """Each time t' takes what time t' − 1 had; before the first there was nothing."""
        return torch.cat([torch.zeros_like(v[:1]), v[:-1]]) if whole else v

    def _variances(self, own: Tensor) -> Tensor:
        """Of the values before φ: [T, n]."""
        variances: list[Tensor] = []
        for x in own:
            v = x * self.inputs.w_var + (self.inputs.b_var + self.hidden.b_var)
            if variances:
                v = v + self.hidden.w_var * self.dual.own(variances[-1], slope=False)[0]
            variances.append(v)
        return torch.stack(variances)

    def _turned(self, s: Moments) -> Moments:
        """Times in the order in which they are gone through."""
        if not self.backward:
            return s
        return s.map(lambda v: v.flip((0, 1) if s.whole else (0,)))
