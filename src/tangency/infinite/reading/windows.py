"""Max pooling, by modules and by functions."""

from collections import namedtuple
from collections.abc import Sequence
from math import prod
from typing import Any

from torch import nn

from ..layers.basic import per_axis
from ..moments.maxima import max_over
from ..moments.patches import AVERAGE
from ..moments.positions import windows
from ..moments.values import Random
from ..moments.windows import MOST, Windows
from .calls import Call
from .modules import reads

# What x.max(dim) returns; the places of the maxima are no values.
Largest = namedtuple("Largest", ["values", "indices"])


@reads(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def read_max_pool(m: nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d, call: Call) -> Random:
    """The largest value in each window, by channel. The limit: infinitely many channels, the window stays."""
    value = _value(call)
    grid = value.shape[1:]
    dims = int(type(m).__name__[-2])  # MaxPool2d: the digit before the last letter
    _check_axes(call, value, dims)
    if m.return_indices:
        raise call.build.unsupported("returns the places of the maxima.", "Leave return_indices at False.")
    options = (m.kernel_size, m.kernel_size if m.stride is None else m.stride, m.padding, m.dilation)
    per = zip(grid, *(per_axis(v, dims) for v in options), strict=True)
    return _largest(call, value, [_sliding(n, k, s, p, d, m.ceil_mode) for n, k, s, p, d in per])


def _sliding(n: int, size: int, stride: int, padding: int, dilation: int, up: bool) -> list[list[int]]:
    """The positions in each window along one axis; what lies in the padding is left out."""
    count = windows(n, size, stride, (padding, padding), dilation, up)
    if up and (count - 1) * stride >= n + padding:  # torch: a window must begin inside
        count -= 1
    starts = [w * stride - padding for w in range(count)]
    return [[s + k * dilation for k in range(size) if 0 <= s + k * dilation < n] for s in starts]


@reads(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
def read_adaptive_max_pool(m: nn.AdaptiveMaxPool1d | nn.AdaptiveMaxPool2d | nn.AdaptiveMaxPool3d, call: Call) -> Random:
    """The largest value in each of so many windows, by channel."""
    value = _value(call)
    grid = value.shape[1:]
    _check_axes(call, value, int(type(m).__name__[-2]))
    if m.return_indices:
        raise call.build.unsupported("returns the places of the maxima.", "Leave return_indices at False.")
    asked = per_axis(m.output_size, len(grid))  # type: ignore[arg-type]  # None keeps an axis as it is
    wanted = [n if w is None else w for w, n in zip(asked, grid, strict=True)]
    # As torch: windows from ⌊w·n/m⌋ to ⌈(w + 1)·n/m⌉.
    axes = [
        [list(range(w * n // m, -(-(w + 1) * n // m))) for w in range(m)] for n, m in zip(grid, wanted, strict=True)
    ]
    return _largest(call, value, axes)


def read_amax(call: Call) -> Random:
    """x.amax(dim): the largest over whole axes of positions."""
    value, asked = _value(call), call.get(1, "dim", call.kwargs.get("axis"))
    if asked is None or asked == ():
        raise call.build.unsupported("reduces everything to one number.", "Name the positions' axes: dim=…")
    rank = len(value.shape) + 1
    dims = tuple(d % rank - 1 for d in ((asked,) if isinstance(asked, int) else tuple(asked)))
    if -1 in dims or value.channel in dims:
        raise call.build.unsupported(
            "takes the maximum over the batch, or over the channels (infinitely many have none).",
            "Reduce over positions, or use a Linear layer as read-out.",
        )
    keep = bool(call.get(2, "keepdim", False))
    grid = [k for k in range(len(value.shape)) if k != value.channel]
    axes = [[list(range(value.shape[k]))] if k in dims else [[p] for p in range(value.shape[k])] for k in grid]
    whole = Windows.along(tuple(value.shape[k] for k in grid), axes)
    kept = [k for k in range(len(value.shape)) if keep or k not in dims]
    shape = tuple(1 if k in dims else value.shape[k] for k in kept)
    channel = kept.index(value.channel)
    seen = Windows((*shape[:channel], *shape[channel + 1 :]), whole.index)
    _check_sizes(call, seen)
    return max_over(call.build, value, seen, shape, channel)


def read_max(call: Call) -> Largest:
    """x.max(dim) and torch.max(x, dim): its values alone are read."""
    asked = call.get(1, "dim", call.kwargs.get("axis"))
    if not isinstance(asked, int):
        raise call.build.unsupported("takes the largest of everything.", "Name an axis of positions: x.amax(dim).")
    return Largest(read_amax(call), None)


def _value(call: Call) -> Random:
    value: Any = call.get(0, "input")
    return value


def _check_axes(call: Call, value: Random, dims: int) -> None:
    if value.channel != 0 or len(value.shape) != dims + 1:
        raise call.build.unsupported(
            f"pools {dims} axes after the channels; given were values of shape {value.shape}, channels on axis "
            f"{value.channel + 1}.",
            "Give [batch, channels, *positions].",
        )


def _largest(call: Call, value: Random, axes: Sequence[Sequence[Sequence[int]]]) -> Random:
    seen = Windows.along(value.shape[1:], axes)
    _check_sizes(call, seen)
    if call.build.mask is not None:
        raise call.build.unsupported("takes the maximum over masked positions.", "Use average pooling.")
    return max_over(call.build, value, seen, (value.shape[0], *seen.grid), 0)


def _check_sizes(call: Call, seen: Windows) -> None:
    """Before the windows of the fields below are made."""
    if prod(seen.grid) > MOST:
        raise call.build.unsupported(
            f"takes the maximum over {prod(seen.grid)} windows; the moments of all their pairs are drawn for up to "
            f"{MOST}.",
            f"Give smaller images. {AVERAGE}.",
        )
