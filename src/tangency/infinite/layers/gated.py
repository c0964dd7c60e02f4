"""Gated recurrent layers, LSTM and GRU, over the positions of a sequence."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..moments.core import RandomAffine
from ..moments.fields import Builder
from ..moments.gated import Cell, Gates, Source
from ..moments.joins import concat_channels
from ..moments.nongaussian import find_doubt
from ..moments.values import Field
from .basic import Argument, Layer
from .weights import Weights

ROWS: dict[Cell, str] = {"lstm": "ifgo", "gru": "rzn"}  # torch's order of the gates in one tensor
NOTHING = RandomAffine(0.0)


@dataclass(frozen=True)
class Gated(Layer):
    """What LSTM and GRU have in common: gates over [batch, time, channels]; all times' hidden values come out.

    The limit: weights of variance w_var/fan-in, of inputs and of hidden values, the same ones at every time, two biases
    of variance b_var each, a first state of zero, and all widths infinite (Yang 2019, 2020). Drawn: `Gates`.
    """

    bidirectional: bool = False
    w_var: float | None = None
    b_var: float | None = None
    bias: bool = True
    width: int | None = None
    suffix: str = "_l0"
    of: nn.LSTM | nn.GRU | None = field(default=None, repr=False, compare=False)
    cell: ClassVar[Cell]

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        f = build.field(value, -1)
        ways = [hidden for hidden, _ in self.ways(build, f, weights, name, self.width or f.width)]
        return ways[0] if len(ways) == 1 else concat_channels(build, ways)

    def ways(self, build: Builder, f: Field, weights: Weights, name: str, width: int) -> list[tuple[Field, Field]]:
        """The hidden values and the states of each direction."""
        if len(f.grid) != 1:
            raise InputError(f"{build.where}: a recurrent layer takes [batch, time, channels]; it was given {f.shape}.")
        directions = (False, True) if self.bidirectional else (False,)
        return [self._way(build, f, weights, name, width, back) for back in directions]

    def _way(
        self, build: Builder, f: Field, weights: Weights, name: str, width: int, back: bool
    ) -> tuple[Field, Field]:
        """The hidden values and the states of one direction."""
        end = self.suffix + ("_reverse" if back else "")
        inputs, means = self._numbers(weights, name, f.width, f"ih{end}")
        hidden, more = self._numbers(weights, name, width, f"hh{end}")
        for affine in inputs:
            law = find_doubt(build.nodes, build.known, f.node, f.few, affine, build.where)
            build.warn(replace(f, doubt=law))
        if self.cell == "gru":
            # Its reset gate multiplies U h + b alone, so the inputs' part of n is a value of its own.
            inputs, hidden = [*inputs, NOTHING], [*hidden[:2], NOTHING, hidden[2]]
            means, more = [*means, 0.0], [*more[:2], 0.0, more[2]]
        sources = tuple(Source(i, h, m + n) for i, h, m, n in zip(inputs, hidden, means, more, strict=True))
        op = Gates(self.cell, sources, back, samples=build.samples, seed=build.seed)
        node, shared = build.with_weights(op, f)
        # Turning the sign of tanh's arguments turns that of h and c, unless they have a bias of one sign.
        centered = not any(means[2:] + more[2:]) if self.cell == "gru" else not (means[2] or more[2])
        out = Field(node, (*f.grid, width), 1, gaussian=False, centered=centered, sources=shared)
        if self.cell == "gru":
            return out, out
        # h and c are made of the same weights, so they share their source; what is not read is not computed.
        state = build.add(replace(op, state=True), (f,), f.grid)
        build.random[state] = build.random[node]
        return out, replace(out, node=state)

    def _numbers(self, weights: Weights, name: str, fan_in: int, kind: str) -> tuple[list[RandomAffine], list[float]]:
        """The numbers of each gate's weights and biases, and the biases' means."""
        names = (f"weight_{kind}", f"bias_{kind}")
        parts: Iterable[tuple[Tensor | None, Tensor | None]] = ((None, None) for _ in ROWS[self.cell])
        if self.of is not None:
            parts = gate_rows(self.of, names).values()
        numbers, means = [], []
        for weight, bias in parts:
            mean = _constant(bias) if weights.w_var == "init" and bias is not None and self.b_var is None else 0.0
            variances = (self.w_var, 0.0 if mean else self.b_var)
            affine = weights.layer(
                name, fan_in, bias=self.bias, variances=variances, tensors=(weight, bias), names=names
            )
            numbers.append(affine)
            means.append(mean)
        return numbers, means

    def module(self, width: int) -> nn.Module:
        """Refused: torch has no lazy LSTM or GRU."""
        kind = self.cell.upper()
        raise InputError(f"an {kind}'s finite form needs its input size: nn.{kind}(inputs, width, batch_first=True).")


@dataclass(frozen=True)
class LSTM(Gated):
    """c_t = σ(f) c_{t−1} + σ(i) tanh(g), h_t = σ(o) tanh(c_t), each gate of W x_t + U h_{t−1} + b.

    Sources i, f, g, o are independent, for each has rows of W and U of its own.
    """

    cell: ClassVar[Cell] = "lstm"


@dataclass(frozen=True)
class GRU(Gated):
    """n_t = tanh(W x_t + b + σ(r) (U h_{t−1} + b')), h_t = (1 − σ(z)) n_t + σ(z) h_{t−1}, as torch has it.

    Not Cho et al.'s (2014) form, in which the reset gate acts on h before U, and whose kernel Yang (2019) gives.
    """

    cell: ClassVar[Cell] = "gru"


def gate_rows(m: nn.LSTM | nn.GRU, names: tuple[str, str]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Each gate's rows of a module's weight and bias (None if it has none), by the gate's letter."""
    gates = ROWS["lstm" if isinstance(m, nn.LSTM) else "gru"]
    weight, bias = getattr(m, names[0]), getattr(m, names[1]) if m.bias else None
    biases = [None] * len(gates) if bias is None else bias.chunk(len(gates))
    return dict(zip(gates, zip(weight.chunk(len(gates)), biases, strict=True), strict=True))


def _constant(bias: Tensor) -> float:
    """The number that all of a gate's biases are (a forget gate's 1); 0 if they differ."""
    with torch.no_grad():
        return float(bias[0]) if len(bias) > 1 and bool((bias == bias[0]).all()) else 0.0
