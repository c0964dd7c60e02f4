"""nn.MultiheadAttention, and torch's transformers: encoders, decoders, both.

Self-attention without masks, with a causal one or with padding is one operation (`moments.sequences.Attend`); all else
is read as queries, keys and values (`attention`). Both are the limit of infinitely many heads and scores q·k/√d.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..activations.recognize import recognize
from ..layers.sequences import attended
from ..layers.weights import dotted
from ..moments.axes import permuted, reshaped, seen
from ..moments.core import RandomAffine
from ..moments.fields import Builder
from ..moments.functions import apply_function
from ..moments.joins import add_fields
from ..moments.sequences import Attend
from ..moments.values import Field, Value
from .attention import add_known, attend, make_scores
from .calls import Call, Keywords, Kwargs
from .faithful import check_leaf
from .modules import read_part, reads
from .sequences import batch_first, batch_second

ORDER = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
DECODER = (
    "tgt", "memory", "tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask", "tgt_is_causal",
    "memory_is_causal",
)  # fmt: skip
WHOLE = (
    "src", "tgt", "src_mask", "tgt_mask", "memory_mask", "src_key_padding_mask", "tgt_key_padding_mask",
    "memory_key_padding_mask", "src_is_causal", "tgt_is_causal", "memory_is_causal",
)  # fmt: skip


@dataclass(frozen=True)
class Masks:
    """What a query may not see: [T, S] or [n·heads, T, S], and keys [n, S] that are padding."""

    scores: Tensor | None = None
    padding: Tensor | None = None
    causal: bool = False

    @classmethod
    def of(cls, options: Kwargs, prefix: str = "", scores: str = "mask") -> "Masks":
        """From a call's arguments of these names."""
        padding, hint = options.get(f"{prefix}key_padding_mask"), options.get(f"{prefix}is_causal")
        return cls(options.get(f"{prefix}{scores}"), padding, bool(hint))

    def plain(self) -> bool | None:
        """Whether positions attend to those before them alone (True) or to all; None where it is neither."""
        if self.padding is not None and self.padding.dtype != torch.bool:
            return None  # numbers may be other than 0 and −∞
        if self.scores is None:
            return self.causal
        blocked = self.scores if self.scores.dtype == torch.bool else torch.isneginf(self.scores)
        if blocked.dim() == 2 and bool((blocked == torch.ones_like(blocked).triu(1)).all()):
            others = self.scores.masked_fill(blocked, 0)  # numbers beside −inf are biases
            return None if bool(others.any()) else True
        if blocked.dim() == 2 and not bool(blocked.any()) and not bool(self.scores.any()):
            return False
        return None

    def additive(self, build: Builder, heads: int, queries: int, keys: int) -> list[Tensor]:
        """As summands of scores [n, heads, T, S]."""
        parts = []
        if self.scores is not None:
            mask = _summand(self.scores)
            parts.append(mask if mask.dim() == 2 else mask.reshape(build.size, heads, queries, keys))
        elif self.causal:
            parts.append(_summand(torch.ones(queries, keys, dtype=torch.bool).triu(1)))
        if self.padding is not None:
            parts.append(_summand(self.padding).reshape(build.size, 1, 1, keys))
        return parts


def _summand(mask: Tensor) -> Tensor:
    """torch marks what to leave out by True, or by −inf to be added to the scores."""
    if mask.dtype != torch.bool:
        return mask.double()
    return torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_fill(mask, -torch.inf)


@reads(nn.MultiheadAttention)
def _multihead(m: nn.MultiheadAttention, call: Call) -> tuple[Value, None]:
    options = call.named(*ORDER)
    options = dict.fromkeys(ORDER[:3], options[ORDER[0]]) | options
    # need_weights and average_attn_weights concern the second output, which is not read.
    given: list[Value] = [options[name] for name in ORDER[:3]]
    alone = all(v is given[0] for v in given)
    q = batch_first(call.build, given[0], m.batch_first)
    k, v = (q, q) if alone else (batch_first(call.build, x, m.batch_first) for x in given[1:])
    after = attention(m, call, (q, k, v), Masks.of(options, scores="attn_mask"))
    return batch_second(call.build, after, m.batch_first), None


def attention(m: nn.MultiheadAttention, call: Call, qkv: tuple[Value, Value, Value], masks: Masks) -> Field:
    """nn.MultiheadAttention of sequences [batch, time, channels]."""
    build, size = call.build, m.embed_dim
    if m.bias_k is not None or m.add_zero_attn or (m.training and m.dropout):
        raise build.unsupported(
            "has extra keys, or dropout at training.", "Use plain attention, and dropout=0 or model.eval()."
        )
    fields = [build.field(qkv[0], -1)]
    fields += [fields[0] if x is qkv[0] else build.field(x, -1) for x in qkv[1:]]
    for f, needed in zip(fields, (size, m.kdim, m.vdim), strict=True):
        if len(f.grid) != 1 or f.width != needed:
            raise InputError(
                f"{build.where}: attention takes [batch, time, {needed}]; it was given values of shape {f.shape}."
            )
    q, k, v, o = _projections(m, call)
    causal = masks.plain()
    if causal is not None and m.in_proj_weight is not None and all(f is fields[0] for f in fields):
        slot = None
        if masks.padding is not None:
            slot = build.slot((~masks.padding).movedim(0, -1))
        op = Attend(q, k, v, o, causal=causal, samples=build.samples, seed=build.seed, mask=slot)
        return attended(build, fields[0], op, size)
    projected = [build.affine(f, size, op) for f, op in zip(fields, (q, k, v), strict=True)]
    heads = m.num_heads
    split = []
    for f in projected:
        apart = reshaped(build, seen(build, f), (build.size, f.shape[0], heads, size // heads))
        split.append(permuted(build, seen(build, apart), (0, 2, 1, 3)))
    scores = replace(make_scores(build, split[0], split[1]), scale=1.0)  # q·k/√d
    for mask in masks.additive(build, heads, fields[0].shape[0], fields[1].shape[0]):
        scores = add_known(build, scores, mask)
    mixed = seen(build, attend(build, replace(scores, done=True), split[2]))
    joined = reshaped(build, seen(build, permuted(build, mixed, (0, 2, 1, 3))), (build.size, fields[0].shape[0], size))
    return build.affine(build.field(joined, -1), size, o)


def _projections(m: nn.MultiheadAttention, call: Call) -> tuple[RandomAffine, RandomAffine, RandomAffine, RandomAffine]:
    """The numbers of queries', keys', values' and outputs' weights."""
    weights, size = call.weights, m.embed_dim
    biased = m.in_proj_bias is not None
    biases = m.in_proj_bias.chunk(3) if biased else (None,) * 3
    if m.in_proj_weight is not None:
        # One tensor holds queries', keys' and values' weights; each third has its own variance, all share the name.
        names, tensors = ("in_proj_weight",) * 3, tuple(m.in_proj_weight.chunk(3))
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        tensors = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    q, k, v = (
        weights.layer(call.name, w.shape[1], bias=biased, names=(name, "in_proj_bias"), tensors=(w, b))
        for name, w, b in zip(names, tensors, biases, strict=True)
    )
    out, label = m.out_proj, dotted(call.name, "out_proj")
    return q, k, v, weights.layer(label, size, bias=out.bias is not None, tensors=(out.weight, out.bias))


Block = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def _inner(m: Block, call: Call, part: str, x: Value) -> Value:
    """x after a module of the block."""
    return read_part(getattr(m, part), x, call, dotted(call.name, part))


def _attend(m: Block, call: Call, part: str, qkv: tuple[Value, Value, Value], masks: Masks, drop: str) -> Value:
    """An attention of the block, and the dropout after it."""
    label = dotted(call.name, part)
    call.build.name, call.build.where = label, f"layer {label} (MultiheadAttention)"
    mixed = attention(getattr(m, part), replace(call, args=(), kwargs=Keywords(), name=label), qkv, masks)
    return _inner(m, call, drop, mixed)


def _feed(m: Block, call: Call, x: Value, drop: str) -> Value:
    """The block's last branch."""
    hidden = _inner(m, call, "linear1", x)
    assert not isinstance(hidden, Tensor)
    hidden = apply_function(call.build, hidden, m.activation, recognize(m.activation), "activation")
    return _inner(m, call, drop, _inner(m, call, "linear2", _inner(m, call, "dropout", hidden)))


@reads(nn.TransformerEncoderLayer)
def _encoder_layer(m: nn.TransformerEncoderLayer, call: Call) -> Value:
    options, build = call.named("src", "src_mask", "src_key_padding_mask", "is_causal"), call.build
    masks = Masks(options.get("src_mask"), options.get("src_key_padding_mask"), bool(options.get("is_causal")))
    first = m.self_attn.batch_first
    return batch_second(build, _encode(m, call, batch_first(build, options["src"], first), masks), first)


def _encode(m: nn.TransformerEncoderLayer, call: Call, value: Value, masks: Masks) -> Value:
    """One block of an encoder, [batch, time, channels]."""
    build = call.build
    if m.norm_first:
        normed = _inner(m, call, "norm1", value)
        x: Value = add_fields(build, [value, _attend(m, call, "self_attn", (normed,) * 3, masks, "dropout1")])
        return add_fields(build, [x, _feed(m, call, _inner(m, call, "norm2", x), "dropout2")])
    mixed = _attend(m, call, "self_attn", (value,) * 3, masks, "dropout1")
    x = _inner(m, call, "norm1", add_fields(build, [value, mixed]))
    return _inner(m, call, "norm2", add_fields(build, [x, _feed(m, call, x, "dropout2")]))


@reads(nn.TransformerEncoder)
def _encoder(m: nn.TransformerEncoder, call: Call) -> Value:
    options, build = call.named("src", "mask", "src_key_padding_mask", "is_causal"), call.build
    masks = Masks(options.get("mask"), options.get("src_key_padding_mask"), bool(options.get("is_causal")))
    first = _is_batch_first(m.layers)
    return batch_second(build, _encode_all(m, call, batch_first(build, options["src"], first), masks), first)


def _is_batch_first(layers: nn.ModuleList) -> bool:
    attention = getattr(layers[0], "self_attn", None) if len(layers) else None
    return bool(getattr(attention, "batch_first", True))


def _encode_all(m: nn.TransformerEncoder, call: Call, value: Value, masks: Masks) -> Value:
    """All blocks of an encoder, and its norm."""
    for k, layer in enumerate(m.layers):
        label = dotted(call.name, "layers", str(k))
        assert isinstance(layer, nn.TransformerEncoderLayer)
        check_leaf(layer, label)
        value = _encode(layer, replace(call, name=label), value, masks)
    return value if m.norm is None else read_part(m.norm, value, call, dotted(call.name, "norm"))


@reads(nn.TransformerDecoderLayer)
def _decoder_layer(m: nn.TransformerDecoderLayer, call: Call) -> Value:
    options, build, first = call.named(*DECODER), call.build, m.self_attn.batch_first
    x, memory = (batch_first(build, options[name], first) for name in DECODER[:2])
    masks = Masks.of(options, "tgt_"), Masks.of(options, "memory_")
    return batch_second(build, _decode(m, call, x, memory, masks), first)


def _decode(m: nn.TransformerDecoderLayer, call: Call, x: Value, memory: Value, masks: tuple[Masks, Masks]) -> Value:
    """One block of a decoder: attention to itself, to the memory, and the feed-forward branch."""
    build = call.build
    if m.norm_first:
        normed = _inner(m, call, "norm1", x)
        x = add_fields(build, [x, _attend(m, call, "self_attn", (normed,) * 3, masks[0], "dropout1")])
        normed = _inner(m, call, "norm2", x)
        mixed = _attend(m, call, "multihead_attn", (normed, memory, memory), masks[1], "dropout2")
        x = add_fields(build, [x, mixed])
        return add_fields(build, [x, _feed(m, call, _inner(m, call, "norm3", x), "dropout3")])
    mixed = _attend(m, call, "self_attn", (x, x, x), masks[0], "dropout1")
    x = _inner(m, call, "norm1", add_fields(build, [x, mixed]))
    mixed = _attend(m, call, "multihead_attn", (x, memory, memory), masks[1], "dropout2")
    x = _inner(m, call, "norm2", add_fields(build, [x, mixed]))
    return _inner(m, call, "norm3", add_fields(build, [x, _feed(m, call, x, "dropout3")]))


@reads(nn.TransformerDecoder)
def _decoder(m: nn.TransformerDecoder, call: Call) -> Value:
    options, build, first = call.named(*DECODER), call.build, _is_batch_first(m.layers)
    x, memory = (batch_first(build, options[name], first) for name in DECODER[:2])
    masks = Masks.of(options, "tgt_"), Masks.of(options, "memory_")
    return batch_second(build, _decode_all(m, call, x, memory, masks), first)


def _decode_all(m: nn.TransformerDecoder, call: Call, x: Value, memory: Value, masks: tuple[Masks, Masks]) -> Value:
    """All blocks of a decoder, and its norm."""
    for k, layer in enumerate(m.layers):
        label = dotted(call.name, "layers", str(k))
        assert isinstance(layer, nn.TransformerDecoderLayer)
        check_leaf(layer, label)
        x = _decode(layer, replace(call, name=label), x, memory, masks)
    return x if m.norm is None else read_part(m.norm, x, call, dotted(call.name, "norm"))


@reads(nn.Transformer)
def _transformer(m: nn.Transformer, call: Call) -> Value:
    options, build, first = call.named(*WHOLE), call.build, m.batch_first
    source, target = (batch_first(build, options[name], first) for name in WHOLE[:2])
    assert isinstance(m.encoder, nn.TransformerEncoder)
    assert isinstance(m.decoder, nn.TransformerDecoder)
    name = dotted(call.name, "encoder")
    memory = _encode_all(m.encoder, replace(call, name=name), source, Masks.of(options, "src_"))
    masks = Masks.of(options, "tgt_"), Masks.of(options, "memory_")
    after = _decode_all(m.decoder, replace(call, name=dotted(call.name, "decoder")), target, memory, masks)
    return batch_second(build, after, first)
