"""torch's recurrent networks as layers. Attention is in `multihead`."""

from dataclasses import dataclass

from torch import nn

from ...errors import InputError
from ..activations.recognize import recognize
from ..layers.sequences import RNN
from ..moments.fields import Field, Value
from ..moments.joins import concat_channels
from ..moments.ops import DropChannels
from ..moments.shapes import take_positions
from .calls import Call
from .modules import reads


@dataclass(frozen=True)
class Finals:
    """nn.RNN's second output: the last hidden values, by layer and direction."""

    fields: tuple[Field, ...]

    def __getitem__(self, k: int) -> Field:
        return self.fields[k]

    def squeeze(self, dim: int = 0) -> Field:
        """The only one, without the axis of layers and directions."""
        if len(self.fields) != 1 or dim != 0:
            raise InputError(f"squeeze({dim}) of {len(self.fields)} final values; index them: h[-1].")
        return self.fields[0]


@reads(nn.RNN)
def _rnn(m: nn.RNN, call: Call) -> tuple[Value, Finals]:
    build = call.build
    if not m.batch_first:
        raise build.unsupported("has its batch on axis 1.", "Use batch_first=True.")
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
