"""Layers over sequences: tables of tokens, self-attention with infinitely many heads, simple recurrent networks.

A recurrent network has the same weights at every time, so the moments of two times know of one another.
"""

from dataclasses import dataclass, field, replace
from math import prod
from typing import get_args

import torch
from torch import Tensor, nn

from ..._base import checks
from ...errors import InputError
from ..activations.dual import Dual, Relu
from ..moments.fields import Builder
from ..moments.joins import concat_channels
from ..moments.nongaussian import find_doubt
from ..moments.sequences import Attend, Mechanism, Recur, Scaling
from ..moments.shapes import regrid
from ..moments.values import Field
from .basic import Argument, Layer
from .weights import Weights


@dataclass(frozen=True)
class Embedding(Layer):
    """Rows of a table for integer inputs; the entries have variance w_var."""

    w_var: float | None = None
    width: int | None = None
    count: int | None = None  # rows of the finite table
    padding: int | None = None
    of: nn.Module | None = field(default=None, repr=False, compare=False)

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        if not isinstance(value, Tensor) or value.is_floating_point():
            raise InputError(f"{build.where}: an Embedding takes integer inputs; it was given {_kind(value)}.")
        rows = self.count if self.count is not None else getattr(self.of, "num_embeddings", None)
        if rows is not None and (int(value.min()) < 0 or int(value.max()) >= rows):
            raise InputError(f"{build.where}: indices {int(value.min())} to {int(value.max())} into {rows} rows.")
        f = build.table(value, self.width or 1, self.padding)
        tensor = getattr(self.of, "weight", None)
        if tensor is not None and self.padding is not None:
            # That row is zero, not drawn: it would spoil the statistics that tell the initialisation.
            tensor = torch.cat([tensor[: self.padding], tensor[self.padding + 1 :]])
        op = weights.layer(name, 1, bias=False, variances=(self.w_var, None), tensors=(tensor, None))
        return build.affine(f, self.width or 1, op)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        if self.count is None:
            raise InputError("Embedding.module needs count=, the number of rows of its table.")
        return nn.Embedding(self.count, self.width or width, padding_idx=self.padding)


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
            weights.layer(name, f.width, variances=(var, b), names=(f"{part}.weight", f"{part}.bias"))
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
    node, sources = build.with_weights(op, f)
    return Field(node, (*f.grid, width), 1, gaussian=True, centered=True, sources=sources)


@dataclass(frozen=True)
class RNN(Layer):
    """φ(W x_t + U h_{t−1} + b) over the positions of [batch, time, channels]; all times' hidden values come out."""

    dual: Dual = field(default_factory=Relu)
    bidirectional: bool = False
    w_var: float | None = None
    b_var: float | None = None
    bias: bool = True
    width: int | None = None
    suffix: str = "_l0"
    of: nn.Module | None = field(default=None, repr=False, compare=False)

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        f = build.field(value, -1)
        if len(f.grid) != 1:
            raise InputError(f"{build.where}: a recurrent layer takes [batch, time, channels]; it was given {f.shape}.")
        width = self.width or f.width
        ways = self.ways(build, f, weights, name, width)
        return ways[0] if len(ways) == 1 else concat_channels(build, ways)

    def ways(self, build: Builder, f: Field, weights: Weights, name: str, width: int) -> list[Field]:
        """The hidden values of each direction."""
        directions = (False, True) if self.bidirectional else (False,)
        return [self._way(build, f, weights, name, width, back) for back in directions]

    def _way(self, build: Builder, f: Field, weights: Weights, name: str, width: int, back: bool) -> Field:
        """The hidden values of one direction."""
        # torch's names of an RNN's parameters: weight_ih_l0, bias_hh_l1_reverse, …
        end = self.suffix + ("_reverse" if back else "")
        numbers = []
        for kind, fan_in in (("ih", f.width), ("hh", width)):
            names = (f"weight_{kind}{end}", f"bias_{kind}{end}")
            tensors = (getattr(self.of, names[0], None), getattr(self.of, names[1], None) if self.bias else None)
            # Inputs and hidden values have weights and a bias each, as in torch; the variances of both biases add.
            variances = (self.w_var, self.b_var)
            op = weights.layer(name, fan_in, bias=self.bias, variances=variances, tensors=tensors, names=names)
            numbers.append(op)
        law = find_doubt(build.nodes, build.known, f.node, f.few, numbers[0], build.where)
        build.warn(replace(f, doubt=law))
        node, sources = build.with_weights(Recur(self.dual, numbers[0], numbers[1], back), f)
        return Field(node, (*f.grid, width), 1, gaussian=False, centered=self.dual.centered(), sources=sources)

    def module(self, width: int) -> nn.Module:
        """Refused: torch has no lazy RNN."""
        raise InputError("an RNN's finite form needs its input size: nn.RNN(inputs, width, batch_first=True).")


def _kind(value: object) -> str:
    """What a layer was given, in words."""
    return f"{value.dtype} values" if isinstance(value, Tensor) else "hidden values"
