"""torch's recurrent networks as layers. Attention is in `multihead`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...errors import InputError, UnsupportedModule
from ..activations.recognize import recognize
from ..layers.sequences import RNN
from ..moments.fields import Builder, Field, Value
from ..moments.joins import concat_channels
from ..moments.ops import DropChannels
from ..moments.positions import Total
from ..moments.shapes import take_positions
from .calls import Call
from .modules import reads


@dataclass(frozen=True)
class Finals:
    """A recurrent module's second output: the last hidden values (or states), by layer and direction."""

    fields: tuple[Field, ...]

    def __getitem__(self, index: int | tuple[object, ...]) -> Field:
        k, *rest = index if isinstance(index, tuple) else (index,)
        # h[-1, :, :] is h[-1]; some samples or channels alone are not read.
        if not isinstance(k, int) or any(not isinstance(v, slice) or v != slice(None) for v in rest):
            raise InputError(f"final values are indexed by {index!r}; needed: one number, h[-1] or h[-1, :, :].")
        return self.fields[k]

    def squeeze(self, dim: int = 0) -> Field:
        """The only one, without the axis of layers and directions."""
        if len(self.fields) != 1 or dim != 0:
            raise InputError(f"squeeze({dim}) of {len(self.fields)} final values; index them: h[-1].")
        return self.fields[0]


@dataclass(frozen=True)
class TimeFirst:
    """What a recurrent layer with its batch on axis 1 gives: [time, batch, channels] to forward()."""

    build: Builder
    of: Field  # [time, channels] of each sample

    @property
    def shape(self) -> torch.Size:
        """[time, batch, channels]."""
        return torch.Size((self.of.shape[0], self.build.size, self.of.width))

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As torch has it."""
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: object) -> "Field | TimeFirst":
        """Times by a number or a slice: out[-1]."""
        times, *rest = index if isinstance(index, tuple) else (index,)
        if any(not isinstance(k, slice) or k != slice(None) for k in rest):
            raise self._refusal("indexes more than the times")
        if isinstance(times, int):
            return take_positions(self.build, self.of, 0, (times % self.of.shape[0],), drop=True)
        if not isinstance(times, slice):
            raise self._refusal(f"indexes the times by {times!r}")
        index = tuple(range(*times.indices(self.of.shape[0])))
        return replace(self, of=take_positions(self.build, self.of, 0, index, drop=False))

    def transpose(self, dim0: int, dim1: int) -> Field:
        """The batch to axis 0: [batch, time, channels], as all other layers have it."""
        if {dim0 % 3, dim1 % 3} != {0, 1}:
            raise self._refusal(f"exchanges axes {dim0} and {dim1}")
        return self.of

    def permute(self, *dims: int | tuple[int, ...]) -> Field:
        """As `transpose`."""
        order = dims[0] if isinstance(dims[0], (tuple, list)) else dims
        if tuple(order) != (1, 0, 2):
            raise self._refusal(f"permutes its axes by {order}")
        return self.of

    def mean(self, dim: int, keepdim: bool = False) -> Field:
        """Over the times."""
        return self._total(dim, keepdim, mean=True)

    def sum(self, dim: int, keepdim: bool = False) -> Field:
        """Over the times."""
        return self._total(dim, keepdim, mean=False)

    def _total(self, dim: int, keepdim: bool, mean: bool) -> Field:
        if dim % 3 != 0 or keepdim:
            raise self._refusal(f"sums over axis {dim}")
        return self.build.apply(Total((0,), mean), self.of, shape=(self.of.width,), channel=0)

    def _refusal(self, what: str) -> UnsupportedModule:
        return self.build.unsupported(
            f"{what} of [time, batch, channels].", "Move the batch to axis 0 first: out.transpose(0, 1)."
        )


@reads(nn.RNN)
def _rnn(m: nn.RNN, call: Call) -> tuple[Value | TimeFirst, Finals]:
    if isinstance(call.args[0], PackedSequence):
        raise call.build.unsupported(
            "is given a packed sequence, whose samples are mixed over times.",
            "Give the padded tensor, and take each sample's own last time, or a mean by a mask.",
        )
    if m.batch_first:
        return _recurrence(m, call)
    after, finals = _recurrence(m, replace(call, args=(_batch_to_front(call), *call.args[1:])))
    assert not isinstance(after, Tensor)
    return TimeFirst(call.build, call.build.settled(after)), finals


def _batch_to_front(call: Call) -> Value:
    """A recurrent layer's input [time, batch, channels] as [batch, time, channels]."""
    value = call.args[0]
    if isinstance(value, TimeFirst):
        return value.of
    if isinstance(value, Tensor) and value.dim() == 3 and value.shape[1] == call.build.size:
        return value.transpose(0, 1)
    raise call.build.unsupported(
        "has its batch on axis 1 (batch_first=False), and is given values with samples on axis 0.",
        "Use batch_first=True, or give it x.transpose(0, 1) of inputs [batch, time, features].",
    )


def _recurrence(m: nn.RNN, call: Call) -> tuple[Value, Finals]:
    """All layers and directions over [batch, time, channels]."""
    build = call.build
    if call.named("input", "hx").get("hx") is not None:
        raise build.unsupported("is given a first hidden value.", "Leave it out: it is zero.")
    if getattr(m, "proj_size", 0):
        raise build.unsupported("projects its hidden values.", "Use proj_size=0, and a Linear layer after it.")
    # nn.RNN knows these two nonlinearities alone.
    dual = recognize(nn.ReLU() if m.nonlinearity == "relu" else nn.Tanh())
    assert dual is not None
    value: Value = call.args[0]
    finals: list[Field] = []
    for k in range(m.num_layers):
        layer = RNN(dual, m.bidirectional, bias=m.bias, width=m.hidden_size, suffix=f"_l{k}", of=m)
        ways = layer.ways(build, build.field(value, -1), call.weights, call.name, m.hidden_size)
        for back, way in enumerate(ways):
            end = 0 if back else way.shape[0] - 1  # the way back ends at the first time
            finals.append(take_positions(build, way, 0, (end,), drop=True))
        after = ways[0] if len(ways) == 1 else concat_channels(build, ways)
        # As torch does: after each layer but the last.
        if m.dropout and m.training and k + 1 < m.num_layers:
            after = build.apply(DropChannels(1 - m.dropout), after)
        value = after
    return value, Finals(tuple(finals))
