"""torch's modules over sequences as layers: attention, transformer blocks, recurrent networks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..activations.recognize import recognize
from ..layers.sequences import RNN, attended
from ..layers.weights import dotted
from ..moments.fields import Builder, Field, Value
from ..moments.functions import apply_function
from ..moments.joins import add_fields, concat_channels
from ..moments.ops import DropChannels
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
