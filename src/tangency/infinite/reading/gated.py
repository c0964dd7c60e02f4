"""torch's gated recurrent modules, nn.LSTM and nn.GRU, as layers."""

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..layers.gated import GRU, LSTM
from ..moments.fields import Builder, Field, Value
from ..moments.joins import concat_channels
from ..moments.ops import DropChannels
from ..moments.shapes import take_positions
from .calls import RANDOM, Call, Keywords
from .modules import reads
from .sequences import Finals
from .tensors import read_item, read_reduction


@dataclass(frozen=True)
class TimeFirst:
    """Values [time, batch, channels], as a recurrent module without batch_first gives them; `field` has batch first."""

    field: Field
    call: Call

    @property
    def shape(self) -> tuple[int, ...]:
        """With the batch on axis 1."""
        time, width = self.field.shape
        return time, self.call.build.size, width

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """As torch has it."""
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: object) -> object:
        """Times by numbers and slices, of all samples."""
        time, *rest = index if isinstance(index, tuple) else (index,)
        if rest and rest[0] != slice(None):
            raise self.call.build.unsupported("indexes the batch, on axis 1.", "Keep all samples: x[t].")
        after = read_item(self._with(self.field, (slice(None), time, *rest[1:])))
        return after if isinstance(time, int) or not isinstance(after, Field) else replace(self, field=after)

    def mean(self, dim: int) -> Field:
        """Over the times alone."""
        return self._reduced(dim, mean=True)

    def sum(self, dim: int) -> Field:
        """Over the times alone."""
        return self._reduced(dim, mean=False)

    def _reduced(self, dim: int, mean: bool) -> Field:
        if dim not in (0, -3):
            raise self.call.build.unsupported(f"reduces axis {dim}, of [time, batch, channels].", "Name axis 0.")
        return read_reduction(self._with(self.field, 1), mean)

    def transpose(self, a: int, b: int) -> Field:
        """The batch first again."""
        if {a % 3, b % 3} != {0, 1}:
            raise self.call.build.unsupported("moves the channels.", "Put the batch first: transpose(0, 1).")
        return self.field

    def permute(self, *order: int) -> Field:
        """The batch first again."""
        if order != (1, 0, 2):
            raise self.call.build.unsupported("moves the channels.", "Put the batch first: permute(1, 0, 2).")
        return self.field

    def _with(self, *args: object) -> Call:
        return replace(self.call, args=args, kwargs=Keywords())


@reads(nn.LSTM)
def _lstm(m: nn.LSTM, call: Call) -> tuple[Value | TimeFirst, tuple[Finals, Finals]]:
    out, hidden, states = _recurrent(m, call)
    return out, (hidden, states)


@reads(nn.GRU)
def _gru(m: nn.GRU, call: Call) -> tuple[Value | TimeFirst, Finals]:
    out, hidden, _ = _recurrent(m, call)
    return out, hidden


def _recurrent(m: nn.LSTM | nn.GRU, call: Call) -> tuple[Value | TimeFirst, Finals, Finals]:
    """The last layer's outputs at all times, and the final hidden values and states by layer and direction."""
    build = call.build
    options = call.named("input", "hx")
    value = _batch_first(m, build, options["input"])
    _check(m, build, options.get("hx"))
    kind = LSTM if isinstance(m, nn.LSTM) else GRU
    hidden: list[Field] = []
    states: list[Field] = []
    for k in range(m.num_layers):
        layer = kind(m.bidirectional, bias=m.bias, width=m.hidden_size, suffix=f"_l{k}", of=m)
        ways = layer.ways(build, build.field(value, -1), call.weights, call.name, m.hidden_size)
        for back, (way, state) in enumerate(ways):
            end = 0 if back else way.shape[0] - 1  # the way back ends at the first time
            hidden.append(take_positions(build, way, 0, (end,), drop=True))
            states.append(take_positions(build, state, 0, (end,), drop=True))
        after = ways[0][0] if len(ways) == 1 else concat_channels(build, [way for way, _ in ways])
        # As torch does: after each layer but the last.
        if m.dropout and m.training and k + 1 < m.num_layers:
            after = build.apply(DropChannels(1 - m.dropout), after)
        value = after
    assert isinstance(value, Field)
    return value if m.batch_first else TimeFirst(value, call), Finals(tuple(hidden)), Finals(tuple(states))


def _batch_first(m: nn.LSTM | nn.GRU, build: Builder, value: object) -> Value:
    """Its input [batch, time, channels]; of known values in another order the batch is on axis 1."""
    if isinstance(value, PackedSequence):
        raise build.unsupported(
            "is given a packed sequence, whose lengths differ.", "Give padded sequences of one length [batch, time, …]."
        )
    if isinstance(value, TimeFirst) and not m.batch_first:
        return value.field
    if m.batch_first and isinstance(value, (Tensor, *RANDOM)):
        return value
    # A sample by itself is looked at too (`Infinite.prepare`), so that an axis of times of the batch's size shows.
    if not m.batch_first and isinstance(value, Tensor) and value.dim() == 3 and value.shape[1] == build.size:
        return value.transpose(0, 1)
    raise build.unsupported(
        "has its batch on another axis than its input.", "Use batch_first=True, with samples on axis 0 throughout."
    )


def _check(m: nn.LSTM | nn.GRU, build: Builder, first: object) -> None:
    """Refuse what these layers do not read."""
    # Many write out the zeros that torch would take.
    given = first if isinstance(first, (tuple, list)) else () if first is None else (first,)
    if any(not isinstance(v, Tensor) or bool(v.any()) for v in given):
        raise build.unsupported("is given a first hidden value or state.", "Leave it out, or give zeros.")
    if getattr(m, "proj_size", 0):
        raise build.unsupported("projects its hidden values.", "Use proj_size=0, and a Linear layer after it.")
