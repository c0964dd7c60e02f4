"""torch's gated recurrent modules, nn.LSTM and nn.GRU, as layers."""

from torch import Tensor, nn

from ..layers.gated import GRU, LSTM
from ..moments.fields import Builder
from ..moments.values import Field, Value
from .calls import Call
from .modules import reads
from .sequences import Finals, batch_first, batch_second, through_layers


@reads(nn.LSTM)
def _lstm(m: nn.LSTM, call: Call) -> tuple[Value, tuple[Finals, Finals]]:
    out, hidden, states = _recurrent(m, call)
    return out, (hidden, states)


@reads(nn.GRU)
def _gru(m: nn.GRU, call: Call) -> tuple[Value, Finals]:
    out, hidden, _ = _recurrent(m, call)
    return out, hidden


def _recurrent(m: nn.LSTM | nn.GRU, call: Call) -> tuple[Value, Finals, Finals]:
    """The last layer's outputs at all times, and the final hidden values and states by layer and direction."""
    build = call.build
    options = call.named("input", "hx")
    value = batch_first(build, options["input"], m.batch_first)
    _check(m, build, options.get("hx"))
    kind = LSTM if isinstance(m, nn.LSTM) else GRU

    def ways(k: int, f: Field) -> list[tuple[Field, ...]]:
        """The directions of layer k: hidden values and states."""
        layer = kind(m.bidirectional, bias=m.bias, width=m.hidden_size, suffix=f"_l{k}", of=m)
        return list(layer.ways(build, f, call.weights, call.name, m.hidden_size))

    after, (hidden, states) = through_layers(m, build, value, ways)
    return batch_second(build, after, m.batch_first), hidden, states


def _check(m: nn.LSTM | nn.GRU, build: Builder, first: object) -> None:
    """Refuse what these layers do not read."""
    # Many write out the zeros that torch would take.
    given = first if isinstance(first, (tuple, list)) else () if first is None else (first,)
    if any(not isinstance(v, Tensor) or bool(v.any()) for v in given):
        raise build.unsupported("is given a first hidden value or state.", "Leave it out, or give zeros.")
    if getattr(m, "proj_size", 0):
        raise build.unsupported("projects its hidden values.", "Use proj_size=0, and a Linear layer after it.")
