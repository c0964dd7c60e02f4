"""Self-attention as a layer: nn.MultiheadAttention, transformer blocks, and the limit with scores over d."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ..._base import checks
from ...errors import InputError
from ..activations.quadrature import recognize
from ..moments import heads
from ..moments.fields import Builder, Field
from ..moments.ops import Affine, Op
from ..moments.state import Here, Need, State
from ..reading.faithful import check_leaf
from ..reading.modules import convert, reads
from .basic import Layer
from .weights import Weights, dotted

Mechanism = Literal["softmax", "identity", "relu", "abs"]
Scaling = Literal["sqrt", "linear"]


@dataclass(frozen=True)
class Attend(Op):
    """Attention over the positions of a sequence, with infinitely many heads."""

    q: Affine
    k: Affine
    v: Affine
    o: Affine
    scaling: Scaling = "sqrt"
    mechanism: Mechanism = "softmax"
    causal: bool = False
    samples: int = 4096
    seed: int = 0
    mask: int | None = None  # the slot of the valid positions [T, n]
    own: ClassVar[Need] = Need.WHOLE

    def alone(self) -> bool:
        return True

    def reads(self, asked: Need) -> Need:
        return Need.WHOLE if asked else asked

    def __call__(self, states: Sequence[State], here: Here) -> State:
        (s,) = states
        left, right = (v.movedim(-1, 0) for v in here.own())
        masks = (None, None) if self.mask is None else tuple(v.movedim(-1, 0) for v in here.known(self.mask))
        last, first = ((-1,), (0,)) if here.pairs.zipped else ((-2, -1), (0, 1))  # heads takes the samples first
        ntk = None if s.ntk is None else s.ntk.movedim(last, first)
        cov, tangent = self._moments(s.cov.movedim(last, first), ntk, left, right, masks, here)
        tangent = None if tangent is None else tangent.movedim(first, last)
        return State(cov.movedim(first, last), tangent, s.grid, whole=True).at(here.asked)

    def _moments(
        self, cov: Tensor, ntk: Tensor | None, left: Tensor, right: Tensor, masks: Any, here: Here
    ) -> heads.Moments:
        rates: Any = tuple(a.w_rate / a.w_var if a.w_var else 0.0 for a in (self.q, self.k, self.v, self.o))
        if self.scaling == "linear" or self.mechanism == "identity":
            common: dict[str, Any] = {
                "qk_var": self.q.w_var * self.k.w_var, "ov_var": self.o.w_var * self.v.w_var, "b_var": self.o.b_var,
                "b_rate": self.o.b_rate, "rates": rates, "mask1": masks[0], "mask2": masks[1], "tangent": here.tangent,
            }  # fmt: skip
            if self.scaling == "linear":
                return heads.linear(cov, ntk, left, right, mechanism=self.mechanism, **common)
            return heads.quadratic(cov, ntk, left, right, **common)
        four: Any = (self.q, self.k, self.v, self.o)
        options: dict[str, Any] = {
            "q_var": self.q.w_var, "k_var": self.k.w_var, "v_var": self.v.w_var, "o_var": self.o.w_var,
            "samples": self.samples, "seed": self.seed, "rates": rates, "biases": tuple(a.b_var for a in four),
            "bias_rates": tuple(a.b_rate for a in four), "causal": self.causal, "tangent": here.tangent,
        }  # fmt: skip
        if here.pairs.same:
            return heads.own(cov, ntk, mask=masks[0], **options)
        return heads.softmax(cov, ntk, left, right, mask1=masks[0], mask2=masks[1], **options)


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

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Field:
        f = build.field(value, self.channel)
        qk, ov = self.qk_var**0.5, self.ov_var**0.5
        q, k, v, o = (
            weights.layer(name, f.width, own=(var, b), names=(f"{part}.weight", f"{part}.bias"))
            for part, var, b in (("q", qk, 0.0), ("k", qk, 0.0), ("v", ov, 0.0), ("o", ov, self.b_var))
        )
        slot = None if build.mask is None else build.slot(build.mask.flatten(1).movedim(0, -1))
        op = Attend(q, k, v, o, self.scaling, self.mechanism, False, build.samples, build.seed, slot)
        line = build.regrid(f, (prod(f.grid), f.width), 1)  # all positions attend to all
        return build.regrid(attended(build, line, op, f.width), f.shape, f.channel)

    def module(self, width: int) -> nn.Module:
        raise InputError("attention's finite form is nn.MultiheadAttention(width, heads, batch_first=True).")


def sequence(build: Builder, value: Any) -> Field:
    f = build.field(value, -1)
    if len(f.grid) != 1:
        raise InputError(f"{build.where}: attention takes [batch, time, channels]; it was given {f.shape}.")
    return f


def attended(build: Builder, f: Field, op: Attend, width: int) -> Field:
    node = build.add(op, (f,), f.grid)
    return Field(node, (*f.grid, width), 1, gaussian=True, centered=True, sources=frozenset([node]))


@reads(nn.MultiheadAttention)
def _multihead(m: nn.MultiheadAttention, build: Builder, weights: Weights, name: str, args: Any) -> tuple[Field, None]:
    named = dict(args.named)
    given = [*args, *(named[k] for k in ("query", "key", "value") if k in named)][:3]
    if any(v is not given[0] for v in given):
        raise build.unsupported("attends from one sequence to another.", "Only self-attention has a rule: q = k = v.")
    order = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    options = {**dict(zip(order, args[3:], strict=False)), **named}
    found = attention(m, build, weights, name, given[0], options.get("key_padding_mask"), _is_causal(build, options))
    return found, None


def _is_causal(build: Builder, options: dict[str, Any]) -> bool:
    mask = options.get("attn_mask", options.get("mask", options.get("src_mask")))
    if mask is None:
        return bool(options.get("is_causal", False))
    blocked = mask if mask.dtype == torch.bool else torch.isneginf(mask)
    if blocked.dim() == 2 and bool((blocked == torch.ones_like(blocked).triu(1)).all()):
        return True
    if not bool(blocked.any()) and (mask.dtype == torch.bool or not bool(mask.any())):
        return False
    raise build.unsupported("has an attention mask that is not causal.", "Use key_padding_mask, or a causal mask.")


def attention(
    m: nn.MultiheadAttention, build: Builder, weights: Weights, name: str, value: Any, padding: Any, causal: bool
) -> Field:
    if not m.batch_first:
        raise build.unsupported("has its batch on axis 1.", "Use batch_first=True.")
    if m.in_proj_weight is None or m.bias_k is not None or m.add_zero_attn or (m.training and m.dropout):
        raise build.unsupported(
            "has other sizes for keys or values, extra keys, or dropout at training.",
            "Use plain self-attention, and dropout=0 or model.eval().",
        )
    f = sequence(build, value)
    size = m.embed_dim
    biased = m.in_proj_bias is not None
    q, k, v = (
        weights.layer(name, size, bias=biased, names=("in_proj_weight", "in_proj_bias"), tensors=(weight, bias))
        for weight, bias in zip(
            m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3) if biased else (None,) * 3, strict=True
        )
    )
    out = m.out_proj
    label = dotted(name, "out_proj")
    o = weights.layer(label, size, bias=out.bias is not None, tensors=(out.weight, out.bias))
    slot = None
    if padding is not None:
        valid = ~padding if padding.dtype == torch.bool else ~torch.isneginf(padding)
        slot = build.slot(valid.movedim(0, -1))
    return attended(
        build, f, Attend(q, k, v, o, causal=causal, samples=build.samples, seed=build.seed, mask=slot), size
    )


@reads(nn.TransformerEncoderLayer)
def _encoder_layer(m: nn.TransformerEncoderLayer, build: Builder, weights: Weights, name: str, args: Any) -> Any:
    order = ("src_mask", "src_key_padding_mask", "is_causal")
    options = {**dict(zip(order, args[1:], strict=False)), **args.named}
    return block(m, build, weights, name, args[0], options.get("src_key_padding_mask"), _is_causal(build, options))


def block(
    m: nn.TransformerEncoderLayer, build: Builder, weights: Weights, name: str, value: Any, padding: Any, causal: bool
) -> Any:
    check_leaf(m, name)

    def inner(part: str, x: Any) -> Any:
        label = dotted(name, part)
        build.name, build.where = label, f"{label} ({type(getattr(m, part)).__name__})"
        return convert(getattr(m, part), build, weights, label, (x,), {})

    def attend(x: Any) -> Any:
        label = dotted(name, "self_attn")
        build.name, build.where = label, f"{label} (MultiheadAttention)"
        return inner("dropout1", attention(m.self_attn, build, weights, label, x, padding, causal))

    def feed(x: Any) -> Any:
        hidden = inner("linear1", x)
        hidden = build.elementwise(hidden, m.activation, recognize(m.activation), "activation")
        return inner("dropout2", inner("linear2", inner("dropout", hidden)))

    if m.norm_first:
        x = build.sum([value, attend(inner("norm1", value))])
        return build.sum([x, feed(inner("norm2", x))])
    x = inner("norm1", build.sum([value, attend(value)]))
    return inner("norm2", build.sum([x, feed(x)]))


@reads(nn.TransformerEncoder)
def _encoder(m: nn.TransformerEncoder, build: Builder, weights: Weights, name: str, args: Any) -> Any:
    order = ("mask", "src_key_padding_mask", "is_causal")
    options = {**dict(zip(order, args[1:], strict=False)), **args.named}
    causal, value = _is_causal(build, options), args[0]
    for k, layer in enumerate(m.layers):
        label = dotted(name, "layers", str(k))
        value = block(layer, build, weights, label, value, options.get("src_key_padding_mask"), causal)
    if m.norm is None:
        return value
    label = dotted(name, "norm")
    build.name, build.where = label, f"{label} ({type(m.norm).__name__})"
    return convert(m.norm, build, weights, label, (value,), {})
