"""Positions and channels in another order: PixelShuffle, ChannelShuffle, Unflatten, Unfold, roll, flip, stack.

The limit of each: channels are alike and independent, so another order of them is the same in law; channels that become
positions are independent positions; positions that become channels are averaged over, as Flatten does.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..layers.basic import per_axis
from ..moments.axes import permuted, seen
from ..moments.channels import take_channels
from ..moments.joins import concat_positions
from ..moments.ops import Rescale
from ..moments.positions import Permute, Window
from ..moments.shapes import flatten_positions, regrid
from ..moments.unmerge import channels_to_positions
from ..moments.values import Field, Lazy, Random, Value
from .calls import RANDOM, Call, Keywords, Rule, TorchFunction
from .modules import reads
from .tensors import entries_along, full_shape, read_reshape, read_unsqueeze


@reads(nn.PixelShuffle)
def _pixel_shuffle(m: nn.PixelShuffle, call: Call) -> Value:
    """[C·r², H, W] to [C, H·r, W·r]: r × r independent positions of each."""
    r, value = m.upscale_factor, call.args[0]
    _check_picture(call, value)
    build = call.build
    split = channels_to_positions(build, value, (r, r))
    f = split.of if isinstance(split, Lazy) else split
    c, _, _, h, w = f.shape
    mixed = build.apply(Permute((2, 0, 3, 1)), f, shape=(c, h, r, w, r))
    merged = regrid(build, mixed, (c, h * r, w * r), 0)
    return replace(split, of=merged) if isinstance(split, Lazy) else merged


@reads(nn.PixelUnshuffle)
def _pixel_unshuffle(m: nn.PixelUnshuffle, call: Call) -> Field:
    """[C, H·r, W·r] to [C·r², H, W]: positions become channels, as by Flatten."""
    r = m.downscale_factor
    _check_picture(call, call.args[0])
    f = call.field()
    c, h, w = f.shape
    split = regrid(call.build, f, (c, h // r, r, w // r, r), 0)
    return flatten_positions(call.build, split, (1, 3))


def _check_picture(call: Call, value: Field) -> None:
    """Channels first, and two axes of positions."""
    if len(value.shape) != 3 or value.channel != 0:
        raise call.build.unsupported(f"is given values of shape {value.shape}.", "Needed: [channels, height, width].")


@reads(nn.ChannelShuffle)
def _channel_shuffle(m: nn.ChannelShuffle, call: Call) -> object:
    """[groups, C/groups] to [C/groups, groups]: the same channels in another order."""
    value = call.args[0]
    if value.channel != 0:
        raise call.build.unsupported(f"has its channels on axis {value.channel + 1}.", "Needed: [channels, …].")
    numbers = torch.arange(value.shape[0]).reshape(m.groups, -1).T.flatten().tolist()
    return take_channels(call.build, value, numbers)


@reads(nn.Unflatten)
def _unflatten(m: nn.Unflatten, call: Call) -> object:
    """Of channels: the first factor stays the channels, the others become positions, as convolutions have them."""
    value = call.args[0]
    rank, sizes = len(value.shape) + 1, [int(n) for n in m.unflattened_size]
    dim = int(m.dim) % rank
    if -1 in sizes:
        rest = -torch.tensor(sizes).prod()
        sizes[sizes.index(-1)] = value.shape[dim - 1] // int(rest)
    if dim == value.channel + 1:
        return channels_to_positions(call.build, value, tuple(sizes[1:]))
    full = (call.build.size, *value.shape)
    return read_reshape(replace(call, args=(value, (*full[:dim], *sizes, *full[dim + 1 :])), kwargs=Keywords()))


@reads(nn.Unfold)
def _unfold(m: nn.Unfold, call: Call) -> Field:
    """[C, H, W] to [C·k², positions]: the window's positions become channels, and are averaged over."""
    _check_picture(call, call.args[0])
    f = call.field()
    size, stride, padding, dilation = (per_axis(v, 2) for v in (m.kernel_size, m.stride, m.padding, m.dilation))
    op = Window(size, stride, tuple((p, p) for p in padding), dilation)
    h, w = op.grid(f.grid)
    count = size[0] * size[1]
    windows = call.build.apply(op, f, shape=(f.width * count, h, w), gaussian=False)
    mean = replace(call.build.apply(Rescale(count**-0.5), windows), alike=False)  # those of several positions
    return regrid(call.build, mean, (f.width * count, h * w), 0)


def read_roll(call: Call) -> Random:
    """torch.roll along axes of positions or channels."""
    value: Random = call.args[0]
    shifts, dims = call.get(1, "shifts"), call.get(2, "dims")
    if dims is None:
        raise call.build.unsupported("rolls all values as one row.", "Name the positions' axes: dims=…")
    for shift, dim in zip(_several(shifts), _several(dims), strict=True):
        size = full_shape(call.build, value)[dim]
        value = entries_along(call, value, dim, [(k - shift) % size for k in range(size)])
    return value


def read_flip(call: Call) -> Random:
    """torch.flip along axes of positions or channels."""
    value: Random = call.args[0]
    given = call.args[1:] if len(call.args) > 2 else _several(call.get(1, "dims"))
    for dim in given:
        value = entries_along(call, value, dim, range(full_shape(call.build, value)[dim])[::-1])
    return value


def read_index_select(call: Call) -> Random:
    """Entries along an axis by known numbers, the same for all samples."""
    value, dim, index = call.args[0], call.get(1, "dim"), call.get(2, "index")
    return entries_along(call, value, dim, [int(k) % full_shape(call.build, value)[dim] for k in index])


def read_repeat_interleave(call: Call) -> Random:
    """Each position several times."""
    value, times, dim = call.args[0], call.get(1, "repeats"), call.get(2, "dim")
    if not isinstance(times, int) or dim is None:
        raise call.build.unsupported("repeats by a tensor, or without an axis.", "Give a number, and dim=….")
    return entries_along(call, value, dim, [k // times for k in range(full_shape(call.build, value)[dim] * times)])


def _several(numbers: int | Sequence[int]) -> Sequence[int]:
    return (numbers,) if isinstance(numbers, int) else numbers


def read_stack(call: Call) -> Random:
    """torch.stack along a new axis of positions, which may be the first (an ensemble's members)."""
    values = list(call.get(0, "tensors"))
    if not all(isinstance(v, RANDOM) for v in values):
        raise call.build.unsupported("stacks inputs or parameters with random values.", "Use torch.cat.")
    rank = len(values[0].shape) + 2
    dim = call.get(1, "dim", 0) % rank
    axis = max(dim, 1)  # the batch is first in a field
    fields = []
    for v in values:
        one = read_unsqueeze(replace(call, args=(call.build.settled(v), axis), kwargs=Keywords()))
        assert isinstance(one, Field)
        fields.append(one)
    after = concat_positions(call.build, fields, fields[0].axis(axis - 1))
    return after if dim else permuted(call.build, seen(call.build, after), (1, 0, *range(2, rank)))


METHODS: dict[str, Rule] = {
    "roll": read_roll, "flip": read_flip, "index_select": read_index_select,
    "repeat_interleave": read_repeat_interleave,
}  # fmt: skip
FUNCTIONS: dict[TorchFunction, Rule] = {
    torch.roll: read_roll, torch.flip: read_flip, torch.index_select: read_index_select, torch.stack: read_stack,
    torch.repeat_interleave: read_repeat_interleave,
}  # fmt: skip
