"""torch's modules over sequences as layers: attention, transformer blocks, recurrent networks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...errors import InputError, UnsupportedModule
from ..activations.recognize import recognize
from ..layers.sequences import RNN, attended
from ..layers.weights import dotted
from ..moments.fields import Builder, Field, Value
from ..moments.functions import apply_function
from ..moments.joins import add_fields, concat_channels
from ..moments.ops import DropChannels
from ..moments.positions import Total
from ..moments.sequences import Attend
from ..moments.shapes import take_positions
from .calls import Call, Kwargs
from .faithful import check_leaf
from .modules import read_part, reads


@reads(nn.MultiheadAttention)
def _multihead(m: nn.MultiheadAttention, call: Call) -> tuple[Field, None]:
    order = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights")
    options = call.named(*order, "is_causal")
    sides = [options[k] for k in order[:3] if k in options]
    if any(v is not sides[0] for v in sides):
        raise call.build.unsupported(
            "attends from one sequence to another.", "Only self-attention has a rule: q = k = v."
        )
    # need_weights and average_attn_weights concern the second output, which is not read.
    causal = _is_causal(call.build, options)
    return _attention(m, replace(call, args=(sides[0],)), options.get("key_padding_mask"), causal), None


def _is_causal(build: Builder, options: Kwargs) -> bool:
    """Whether positions attend to those before them alone; masks of another form are refused."""
    mask = options.get("attn_mask", options.get("mask", options.get("src_mask")))
    if mask is None:
        return bool(options.get("is_causal", False))
    blocked = mask if mask.dtype == torch.bool else torch.isneginf(mask)
    if blocked.dim() == 2 and bool((blocked == torch.ones_like(blocked).triu(1)).all()):
        return True
    if not bool(blocked.any()) and (mask.dtype == torch.bool or not bool(mask.any())):
        return False
    raise build.unsupported("has an attention mask that is not causal.", "Use key_padding_mask, or a causal mask.")


def _attention(m: nn.MultiheadAttention, call: Call, padding: Tensor | None, causal: bool) -> Field:
    """Self-attention of a call's first argument, [batch, time, channels]."""
    build, weights = call.build, call.weights
    if not m.batch_first:
        raise build.unsupported("has its batch on axis 1.", "Use batch_first=True.")
    if m.in_proj_weight is None or m.bias_k is not None or m.add_zero_attn or (m.training and m.dropout):
        raise build.unsupported(
            "has other sizes for keys or values, extra keys, or dropout at training.",
            "Use plain self-attention, and dropout=0 or model.eval().",
        )
    f = build.field(call.args[0], -1)
    if len(f.grid) != 1:
        raise InputError(f"{build.where}: attention takes [batch, time, channels]; it was given {f.shape}.")
    size = m.embed_dim
    biased = m.in_proj_bias is not None
    # One tensor holds queries', keys' and values' weights; each third has its own variance, all share the name.
    q, k, v = (
        weights.layer(call.name, size, bias=biased, names=("in_proj_weight", "in_proj_bias"), tensors=(weight, bias))
        for weight, bias in zip(
            m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3) if biased else (None,) * 3, strict=True
        )
    )
    out, label = m.out_proj, dotted(call.name, "out_proj")
    o = weights.layer(label, size, bias=out.bias is not None, tensors=(out.weight, out.bias))
    slot = None
    if padding is not None:
        # torch marks what to leave out: by True, or by −inf to be added to the scores.
        valid = ~padding if padding.dtype == torch.bool else ~torch.isneginf(padding)
        slot = build.slot(valid.movedim(0, -1))
    op = Attend(q, k, v, o, causal=causal, samples=build.samples, seed=build.seed, mask=slot)
    return attended(build, f, op, size)


@reads(nn.TransformerEncoderLayer)
def _encoder_layer(m: nn.TransformerEncoderLayer, call: Call) -> Value:
    options = call.named("src", "src_mask", "src_key_padding_mask", "is_causal")
    return _block(m, call, options.get("src_key_padding_mask"), _is_causal(call.build, options))


def _block(m: nn.TransformerEncoderLayer, call: Call, padding: Tensor | None, causal: bool) -> Value:
    """One transformer block of a call's first argument."""
    build = call.build

    def inner(part: str, x: Value) -> Value:
        """x after a module of the block."""
        return read_part(getattr(m, part), x, call, dotted(call.name, part))

    def attend(x: Value) -> Value:
        """The block's first branch."""
        label = dotted(call.name, "self_attn")
        build.name, build.where = label, f"layer {label} (MultiheadAttention)"
        mixed = _attention(m.self_attn, replace(call, args=(x,), name=label), padding, causal)
        return inner("dropout1", mixed)

    def feed(x: Value) -> Value:
        """The block's second branch."""
        hidden = inner("linear1", x)
        assert not isinstance(hidden, Tensor)
        hidden = apply_function(build, hidden, m.activation, recognize(m.activation), "activation")
        return inner("dropout2", inner("linear2", inner("dropout", hidden)))

    value: Value = call.args[0]
    if m.norm_first:
        x: Value = add_fields(build, [value, attend(inner("norm1", value))])
        return add_fields(build, [x, feed(inner("norm2", x))])
    x = inner("norm1", add_fields(build, [value, attend(value)]))
    return inner("norm2", add_fields(build, [x, feed(x)]))


@reads(nn.TransformerEncoder)
def _encoder(m: nn.TransformerEncoder, call: Call) -> Value:
    options = call.named("src", "mask", "src_key_padding_mask", "is_causal")
    causal, padding = _is_causal(call.build, options), options.get("src_key_padding_mask")
    value: Value = call.args[0]
    for k, layer in enumerate(m.layers):
        label = dotted(call.name, "layers", str(k))
        assert isinstance(layer, nn.TransformerEncoderLayer)
        check_leaf(layer, label)
        value = _block(layer, replace(call, args=(value,), name=label), padding, causal)
    return value if m.norm is None else read_part(m.norm, value, call, dotted(call.name, "norm"))


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
