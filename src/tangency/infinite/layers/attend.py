"""Self-attention with infinitely many heads: what it does to moments, and the layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal, get_args

from torch import nn

from ..._base import checks
from ...errors import InputError
from ..moments.core import Here, Moments, Need, Op, RandomAffine
from ..moments.draws import Sequences
from ..moments.fields import Builder, Field
from ..moments.heads import (
    AttentionLayer,
    OutputMoments,
    Projection,
    SequencePairs,
    linear_heads,
    own_softmax_heads,
    quadratic_heads,
    softmax_heads,
)
from ..moments.shapes import regrid
from .basic import Argument, Layer
from .weights import Weights

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
    own: ClassVar[Need] = Need.WHOLE

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
class SelfAttention(Layer):
    """Attention of all positions to all, heads and widths infinite (Hron et al. 2020); `channel`: the channels' axis.

    scaling "sqrt": scores q·k/√d with independent weights, as everywhere; its softmax is an expectation that is drawn
    (the kernel's `samples`). "linear": q·k/d with one matrix for both, whose scores are constants in the limit.
    """

    scaling: Scaling = "sqrt"
    mechanism: Mechanism = "softmax"
    qk_var: float = 1.0  # of queries' times of keys' weights
    ov_var: float = 1.0
    b_var: float = 0.0
    channel: int = -1

    def __post_init__(self) -> None:
        checks.choice(self.scaling, "scaling", get_args(Scaling))
        checks.choice(self.mechanism, "mechanism", get_args(Mechanism))
        if self.scaling == "sqrt" and self.mechanism in ("relu", "abs"):
            raise InputError(
                f"mechanism={self.mechanism!r} with scaling='sqrt' has no rule. Use 'softmax' or 'identity', or "
                "scaling='linear'."
            )

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        f = build.field(value, self.channel)
        # Only the products of variances are given: queries and keys, values and outputs share them equally.
        qk, ov = self.qk_var**0.5, self.ov_var**0.5
        q, k, v, o = (
            weights.layer(name, f.width, own=(var, b), names=(f"{part}.weight", f"{part}.bias"))
            for part, var, b in (("q", qk, 0.0), ("k", qk, 0.0), ("v", ov, 0.0), ("o", ov, self.b_var))
        )
        slot = None if build.mask is None else build.slot(build.mask.flatten(1).movedim(0, -1))
        op = Attend(q, k, v, o, self.scaling, self.mechanism, False, build.samples, build.seed, slot)
        # Positions of a picture are one sequence here.
        line = regrid(build, f, (prod(f.grid), f.width), 1)  # all positions attend to all
        return regrid(build, attended(build, line, op, f.width), f.shape, f.channel)

    def module(self, width: int) -> nn.Module:
        """Refused: torch has no such module."""
        raise InputError("attention's finite form is nn.MultiheadAttention(width, heads, batch_first=True).")


def attended(build: Builder, f: Field, op: Attend, width: int) -> Field:
    """The field [*positions, width] after attention."""
    node = build.add(op, (f,), f.grid)
    return Field(node, (*f.grid, width), 1, gaussian=True, centered=True, sources=frozenset([node]))
