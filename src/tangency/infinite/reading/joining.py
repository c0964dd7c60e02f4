"""Several tensors become one, and borders are added: cat, stack, pad."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..moments.axes import seen
from ..moments.carried import carry_padded
from ..moments.fields import Builder
from ..moments.joins import as_fields, concat_channels, concat_positions
from ..moments.positions import Pad
from ..moments.shapes import take_positions
from ..moments.values import Field, Random, Seen, Value
from .calls import RANDOM, Call, JoinedBias, Parameter
from .parameters import as_value
from .rotary import is_head, join_turned
from .tensors import full_shape


def read_cat(call: Call) -> Random | JoinedBias:
    """Values side by side, along the channels or along positions."""
    # What is empty adds nothing: a cache of keys before its first use.
    values = [v for v in call.get(0, "tensors") if not (isinstance(v, Tensor) and v.numel() == 0)]
    build = call.build
    if len(values) == 1:
        only: Field = values[0]
        return only
    if not any(isinstance(v, RANDOM) for v in values):
        return _joined_bias(call, values)
    _check_once(build, [v for v in values if isinstance(v, Parameter)])
    # Where the channels lie is known of random values alone; known tensors and parameters follow them.
    like = next(v for v in values if isinstance(v, RANDOM))
    if isinstance(like, Seen):
        return _join_along(call, values, call.get(1, "dim", 0) % len(like.axes) == len(like.axes) - 1, stacked=False)
    dim = call.get(1, "dim", 0) % (len(like.shape) + 1) - 1
    if dim < 0:
        raise build.unsupported("joins batches.", "Samples must not mix: use another axis.")
    if dim == like.channel:
        joined = concat_channels(build, values)
        # A single head's channels are those of a field by themselves; rotary embeddings may turn them all the same.
        if all(is_head(v) for v in values) and (turned := join_turned(build, [seen(build, v) for v in values], False)):
            build.memory.turned[joined.node] = turned
        return joined
    fields = as_fields(build, [_as_token(call, v, like) for v in values])
    return concat_positions(build, fields, fields[0].axis(dim))


def _joined_bias(call: Call, values: list[Tensor | Parameter]) -> JoinedBias:
    """Biases of queries, keys and values as that of one layer, zeros among them known (BEiT)."""
    for v in values:
        numbers = v.value if isinstance(v, Parameter) else v
        if numbers.dim() != 1 or (isinstance(v, Tensor) and bool(v.any())):
            raise call.build.unsupported(
                "joins parameters, or parameters and known numbers.",
                "Biases of one layer can be joined, [q, 0, v]; else use each parameter by itself.",
            )
    return JoinedBias(tuple(values))


def _check_once(build: Builder, given: list[Parameter]) -> None:
    """Refuse one parameter in two places of a join: as fields they would be independent."""
    for k, a in enumerate(given):
        for b in given[:k]:
            same = a.whole_table().data_ptr() == b.whole_table().data_ptr()
            if same and bool(torch.isin(a.entries(), b.entries()).any()):
                raise build.unsupported(
                    f"joins the parameter {a.name} in several places.",
                    "Join it once, and take its position again: torch.cat([c, h], 1)[:, [0, 1, 2, 0]].",
                )


def _join_along(call: Call, values: list[Value | Parameter], last: bool, stacked: bool) -> Random:
    """Values along other axes joined: parts of one field's channels, as rotary embeddings turn them."""
    turned = join_turned(call.build, values, stacked) if last else None
    if turned is None:
        raise call.build.unsupported(
            "joins values whose channels are split over several axes.",
            "Join them before they are split into heads; of heads, parts of one layer's channels can be joined.",
        )
    return turned


def read_stack(call: Call) -> Random:
    """torch.stack along the last axis, of parts of a head's channels."""
    values = list(call.get(0, "tensors"))
    like, dim = next(v for v in values if isinstance(v, RANDOM)), call.get(1, "dim", 0)
    rank = len(full_shape(call.build, like))
    return _join_along(call, values, dim in (-1, rank), stacked=True)


def _as_token(call: Call, value: Value | Parameter, like: Random) -> Value:
    """A parameter among values that are joined is a class token: the same for every sample."""
    if not isinstance(value, Parameter):
        return value
    # Without the batch, which it was expanded to or has as 1.
    shape = tuple(value.value.shape[-len(like.shape) :])
    shape = (1,) * (len(like.shape) - len(shape)) + shape  # one token, by its channels alone
    return as_value(call, value, shape, like.channel)


def read_pad(call: Call) -> Value:
    """F.pad: zeros, or copies of positions, around the positions."""
    value, amounts = call.args[0], list(call.get(1, "pad"))
    number, channel = call.get(3, "value", 0), call.form().channel
    return padded(call.build, value, amounts, call.get(2, "mode", "constant"), channel, float(number or 0))


def padded(
    build: Builder, value: Value, amounts: list[int], mode: str, channel: int, number: float = 0.0
) -> Tensor | Field:
    """The value with borders as F.pad has them, `amounts` for the last axis first: zeros, or copies of positions."""
    if isinstance(value, Tensor):
        return F.pad(value, amounts, mode, number if mode == "constant" else None)
    f = value if isinstance(value, Field) else build.settled(value)
    pads = [(0, 0)] * len(f.shape)
    for k in range(len(amounts) // 2):
        pads[len(f.shape) - 1 - k] = (amounts[2 * k], amounts[2 * k + 1])
    if pads[f.channel] != (0, 0) or channel != f.channel:
        raise build.unsupported("pads the channels.", "Pad positions; for more channels use a 1×1 convolution.")
    if mode == "constant":
        if number:
            raise build.unsupported(f"pads random values by {number}.", "Pad with zeros, or by 'reflect'.")
        grid = tuple(p for k, p in enumerate(pads) if k != f.channel)
        after = build.apply(Pad(grid), f, shape=tuple(n + sum(p) for n, p in zip(f.shape, pads, strict=True)))
        return carry_padded(build, value, after, grid)
    if build.mask is not None:
        raise build.unsupported(f"pads a masked sequence by {mode!r}.", "Pad with zeros.")
    for dim, pair in enumerate(pads):
        if pair != (0, 0):  # which position lies where, by torch's own rule
            places = torch.arange(f.shape[dim], dtype=torch.float64).view(1, 1, -1)
            index = tuple(int(k) for k in F.pad(places, pair, mode).flatten())
            f = take_positions(build, f, dim, index, drop=False)
    return f
