"""torch's recurrent networks as layers. Attention is in `multihead`."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...errors import InputError
from ..activations.recognize import recognize
from ..layers.sequences import RNN
from ..moments.axes import permuted, seen
from ..moments.fields import Builder
from ..moments.joins import concat_channels
from ..moments.ops import DropChannels
from ..moments.shapes import take_positions
from ..moments.values import Field, Seen, Value
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


def batch_first(build: Builder, value: Value, first: bool) -> Value:
    """A sequence [batch, time, channels] of one that may have its times first."""
    if isinstance(value, PackedSequence):
        raise build.unsupported(
            "is given a packed sequence, whose lengths differ and whose samples are mixed over times.",
            "Give the padded tensor, and take each sample's own last time, or a mean by a mask.",
        )
    if first:
        if isinstance(value, Seen):
            build.settled(value)  # refuses
        return value
    if not isinstance(value, Tensor):
        moved = permuted(build, seen(build, value), (1, 0, 2))
        if isinstance(moved, Seen):
            raise build.unsupported(
                "has its batch on axis 1, and is given values that have it on another.",
                "Use batch_first=True, or give it x.transpose(0, 1).",
            )
        return moved
    if value.dim() != 3 or value.shape[1] != build.size:
        raise build.unsupported(
            f"has its batch on axis 1, but inputs of shape {tuple(value.shape)} have {build.size} samples on axis 0.",
            "Use batch_first=True; samples are on axis 0 of what a kernel is given.",
        )
    return value.transpose(0, 1)


def batch_second(build: Builder, value: Value, first: bool) -> Value:
    """Back to where the module has its batch."""
    if first or isinstance(value, Tensor):
        return value
    return permuted(build, seen(build, value), (1, 0, 2))


@reads(nn.RNN)
def _rnn(m: nn.RNN, call: Call) -> tuple[Value, Finals]:
    value = batch_first(call.build, call.args[0], m.batch_first)
    after, finals = _recurrence(m, replace(call, args=(value, *call.args[1:])))
    return batch_second(call.build, after, m.batch_first), finals


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

    def ways(k: int, f: Field) -> list[tuple[Field, ...]]:
        """The directions of layer k."""
        layer = RNN(dual, m.bidirectional, bias=m.bias, width=m.hidden_size, suffix=f"_l{k}", of=m)
        return [(way,) for way in layer.ways(build, f, call.weights, call.name, m.hidden_size)]

    after, (finals,) = through_layers(m, build, call.args[0], ways)
    return after, finals


def through_layers(
    m: nn.RNNBase, build: Builder, value: Value, ways: Callable[[int, Field], list[tuple[Field, ...]]]
) -> tuple[Field, tuple[Finals, ...]]:
    """The last layer's values at all times, and the final ones of all that `ways` gives, by layer and direction.

    `ways` of a layer and its input: for each direction the hidden values at all times, and what else has final values.
    """
    finals: list[list[Field]] = []
    for k in range(m.num_layers):
        directions = ways(k, build.field(value, -1))
        for back, way in enumerate(directions):
            end = 0 if back else way[0].shape[0] - 1  # the way back ends at the first time
            finals.append([take_positions(build, f, 0, (end,), drop=True) for f in way])
        hidden = [way[0] for way in directions]
        after = hidden[0] if len(hidden) == 1 else concat_channels(build, hidden)
        # As torch does: after each layer but the last.
        if m.dropout and m.training and k + 1 < m.num_layers:
            after = build.apply(DropChannels(1 - m.dropout), after)
        value = after
    assert isinstance(value, Field)
    return value, tuple(Finals(of_all) for of_all in zip(*finals, strict=True))
