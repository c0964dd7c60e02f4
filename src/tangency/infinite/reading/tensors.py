"""What forward() does to the shapes of tensors: reshaping, indexing, sums over positions, joining."""

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ...errors import InputError
from ..moments.fields import Field, Random, Value
from ..moments.joins import as_fields, concat_channels, concat_positions
from ..moments.positions import Pad, Permute, Total
from ..moments.shapes import flatten_positions, regrid, take_positions
from .calls import RANDOM, Call, Keywords, Parameter


def _sizes(call: Call) -> tuple[int, ...]:
    """The numbers after the first argument: f(x, 2, 3), f(x, (2, 3)), or those of a tensor's shape."""
    if len(call.args) != 2 or isinstance(call.args[1], (int, *RANDOM)):
        return call.args[1:]
    return tuple(call.args[1].shape if isinstance(call.args[1], Tensor) else call.args[1])


def read_reshape(call: Call) -> Field:
    """view and reshape."""
    f = call.field()
    new = list(_sizes(call)) or list(call.kwargs.get("shape", call.kwargs.get("size", ())))
    # Sizes that forward() computed are of this batch, so its size may stand among them.
    total = call.build.size * prod(f.shape)
    if -1 in new:
        new[new.index(-1)] = total // max(1, prod(n for n in new if n != -1))
    if prod(new) != total or not new or new[0] != call.build.size:
        raise call.build.unsupported(
            f"gives values of shape {(call.build.size, *f.shape)} the shape {tuple(new)}.", "Keep the batch as axis 0."
        )
    return _reshaped(call, f, tuple(new[1:]))


def _reshaped(call: Call, f: Field, new: tuple[int, ...]) -> Field:
    """Merge and split axes; positions merged with the channels become channels."""
    for old_dims, new_dims in _groups(f.shape, new):
        if f.channel in old_dims:
            # The channels are infinitely many: they may take in positions, but not be split over axes (as into heads).
            big = [k for k in new_dims if new[k] != 1]
            if len(big) > 1:
                raise call.build.unsupported(
                    "splits the channels over several axes.",
                    "For attention use nn.MultiheadAttention; else keep the channels on one axis.",
                )
            place = big[0] if big else new_dims[0]
            merged = tuple(f.axis(k) for k in old_dims if k != f.channel and f.shape[k] != 1)
            # Merged with the channels, positions are averaged over in the moments; merged among themselves, they stay.
            out = flatten_positions(call.build, f, merged) if merged else f
            return regrid(call.build, out, new, place)
    raise AssertionError("no axis holds the channels")


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of axes with equal products, in order."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        left, right, a, b = [i], [j], old[i], new[j]
        i, j = i + 1, j + 1
        # Axes are taken from the side with the smaller product until both are equal: the shortest run that is kept.
        while a != b:
            if a < b:
                left, a, i = [*left, i], a * old[i], i + 1
            else:
                right, b, j = [*right, j], b * new[j], j + 1
        groups.append((left, right))
    groups[-1][0].extend(range(i, len(old)))  # axes of size 1 that are left
    groups[-1][1].extend(range(j, len(new)))
    return groups


def read_flatten(call: Call) -> Field:
    """flatten from one axis to another."""
    f = call.field()
    rank = len(f.shape) + 1
    start, end = call.get(1, "start_dim", 0) % rank, call.get(2, "end_dim", -1) % rank
    full = (call.build.size, *f.shape)
    new = (*full[:start], prod(full[start : end + 1]), *full[end + 1 :])
    return read_reshape(replace(call, args=(f, tuple(new)), kwargs=Keywords()))


def read_permute(call: Call) -> Field | Parameter:
    """The axes in another order."""
    if isinstance(call.args[0], Parameter):
        return _transposed(call)
    return _permuted(call, call.field(), _sizes(call) or tuple(call.kwargs.get("dims")))


def _transposed(call: Call) -> Parameter:
    """A parameter's transpose."""
    value: Parameter = call.args[0]
    if value.value.dim() != 2:
        raise call.build.unsupported(f"turns the axes of the parameter {value.name}.", "Store it in that order.")
    return replace(value, value=value.value.T)


def read_transpose(call: Call) -> Field | Parameter:
    """Two axes exchanged."""
    if isinstance(call.args[0], Parameter):
        return _transposed(call)
    f = call.field()
    order = list(range(len(f.shape) + 1))
    a, b = call.get(1, "dim0") % len(order), call.get(2, "dim1") % len(order)
    order[a], order[b] = order[b], order[a]
    return _permuted(call, f, tuple(order))


def _permuted(call: Call, f: Field, order: tuple[int, ...]) -> Field:
    """The axes in this order, the batch counted and first."""
    if order[0] % (len(f.shape) + 1) != 0:
        raise call.build.unsupported("moves the batch from axis 0.", "Use batch_first layers, and leave axis 0 alone.")
    dims = call.axes(order[1:], f)
    shape = tuple(f.shape[d] for d in dims)
    grid = tuple(f.axis(d) for d in dims if d != f.channel)
    channel = dims.index(f.channel)
    if grid == tuple(range(len(grid))):  # the channels alone have moved, and they are no axis of the moments
        return replace(f, shape=shape, channel=channel)
    return call.build.apply(Permute(grid), f, shape=shape, channel=channel)


def read_unsqueeze(call: Call) -> Field:
    """A new axis of size 1."""
    f = call.field()
    dim = call.get(1, "dim") % (len(f.shape) + 2)
    if dim == 0:
        raise call.build.unsupported("puts an axis before the batch.", "Keep the batch as axis 0.")
    # Axes of shape do not count the batch, so they are one less than forward()'s.
    shape = (*f.shape[: dim - 1], 1, *f.shape[dim - 1 :])
    return regrid(call.build, f, shape, f.channel + (dim - 1 <= f.channel))


def read_squeeze(call: Call) -> Field:
    """Without axes of size 1."""
    f = call.field()
    asked = call.get(1, "dim")
    dims = call.axes(asked, f) if asked is not None else tuple(range(len(f.shape)))
    gone = [d for d in dims if f.shape[d] == 1 and d != f.channel]  # an only channel stays: it is the output
    shape = tuple(n for k, n in enumerate(f.shape) if k not in gone)
    return regrid(call.build, f, shape, f.channel - sum(d < f.channel for d in gone)) if gone else f


def read_reduction(call: Call, mean: bool) -> Field:
    """The mean or sum over positions."""
    f = call.build.settled(call.get(0, "input"))
    asked = call.get(1, "dim", call.kwargs.get("axis"))
    if asked is None:
        raise call.build.unsupported("reduces everything to one number.", "Name the positions' axes: dim=…")
    dims = call.axes(asked, f)
    if f.channel in dims:
        raise call.build.unsupported(
            f"takes the {'mean' if mean else 'sum'} over the channels (axis {f.channel + 1}).",
            "That is one fixed read-out; use a Linear layer.",
        )
    keep = call.get(2, "keepdim", False)
    axes = tuple(f.axis(d) for d in dims)
    shape = tuple(n for k, n in enumerate(f.shape) if k not in dims)
    channel = f.channel - sum(d < f.channel for d in dims)
    reduced = call.build.apply(Total(axes, mean), f, shape=shape, channel=channel)
    if not keep:
        return reduced
    return regrid(call.build, reduced, tuple(1 if k in dims else n for k, n in enumerate(f.shape)), f.channel)


def read_item(call: Call) -> object:
    """x[…]: positions by numbers and slices, or an entry of a tuple."""
    value, index = call.args[0], call.args[1]
    if isinstance(value, Parameter):
        return replace(value, value=value.value[index])
    if not isinstance(value, RANDOM):
        entry: object = value[index]
        return entry
    f = call.field()
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        # All axes that are not named: those of shape and the batch, less the items beside the ellipsis.
        items[at : at + 1] = [slice(None)] * (len(f.shape) + 2 - len(items))
    if not (isinstance(items[0], slice) and items[0] == slice(None)):
        raise call.build.unsupported("indexes the batch.", "Keep all samples: x[:, …].")
    dim = 0
    for item in items[1:]:
        if isinstance(item, slice):
            f = _sliced(call, f, dim, item)
            dim += 1
        elif isinstance(item, int):
            if dim == f.channel:
                raise call.build.unsupported("picks one channel.", "Use a Linear layer as read-out.")
            if not -f.shape[dim] <= item < f.shape[dim]:
                raise InputError(f"{call.build.where}: index {item} of {f.shape[dim]} positions.")
            f = take_positions(call.build, f, dim, (item % f.shape[dim],), drop=True)
        else:
            raise call.build.unsupported(f"indexes by {item!r}.", "Use numbers and slices.")
    return f


def _sliced(call: Call, f: Field, dim: int, item: slice) -> Field:
    """Positions dim of shape by a slice; of the channels, all or none."""
    index = tuple(range(*item.indices(f.shape[dim])))
    if len(index) == f.shape[dim] and item.step in (None, 1):
        return f
    if dim == f.channel:
        raise call.build.unsupported("takes some of the channels.", "Use two layers, one for each part.")
    return take_positions(call.build, f, dim, index, drop=False)


def read_cat(call: Call) -> Field:
    """Values side by side, along the channels or along positions."""
    values = list(call.get(0, "tensors"))
    build = call.build
    # Where the channels lie is known of random values alone; known tensors and parameters follow them.
    like = next(v for v in values if isinstance(v, RANDOM))
    dim = call.get(1, "dim", 0) % (len(like.shape) + 1) - 1
    if dim < 0:
        raise build.unsupported("joins batches.", "Samples must not mix: use another axis.")
    if dim == like.channel:
        return concat_channels(build, values)
    fields = as_fields(build, [_as_token(call, v, like) for v in values])
    return concat_positions(build, fields, fields[0].axis(dim))


def _as_token(call: Call, value: Value | Parameter, like: Random) -> Value:
    """A parameter among values that are joined is a class token: the same for every sample."""
    if not isinstance(value, Parameter):
        return value
    # Without the batch, which it was expanded to or has as 1.
    shape = tuple(value.value.shape[-len(like.shape) :])
    shape = (1,) * (len(like.shape) - len(shape)) + shape  # one token, by its channels alone
    f = call.build.drawn(shape, like.channel)
    return call.build.affine(f, f.width, call.weights.value(value.name, value.value, value.factor))


def read_pad(call: Call) -> Field:
    """Zeros around the positions."""
    f = call.field()
    amounts = list(call.get(1, "pad"))
    mode, value = call.get(2, "mode", "constant"), call.get(3, "value", 0)
    if mode != "constant" or value not in (0, None):
        raise call.build.unsupported(f"pads by {mode} {value}.", "Pad with zeros, or use padding_mode='circular'.")
    pads = [(0, 0)] * len(f.shape)
    for k in range(len(amounts) // 2):  # torch names the last axis first
        pads[len(f.shape) - 1 - k] = (amounts[2 * k], amounts[2 * k + 1])
    if pads[f.channel] != (0, 0):
        raise call.build.unsupported("pads the channels.", "Use a 1×1 convolution.")
    grid = tuple(p for k, p in enumerate(pads) if k != f.channel)
    shape = tuple(n + sum(p) for n, p in zip(f.shape, pads, strict=True))
    return call.build.apply(Pad(grid), f, shape=shape)


def read_size(call: Call) -> torch.Size | int:
    """x.size() or x.size(dim), the batch counted."""
    sizes = torch.Size((call.build.size, *call.args[0].shape))
    dim = call.get(1, "dim")
    return sizes if dim is None else sizes[dim]


def read_attribute(call: Call) -> object:
    """What forward() asks of a value's form: its shape, dtype, device; a parameter's transpose."""
    value, name = call.args[0], call.args[1]
    if isinstance(value, Parameter):
        if name in ("T", "mT"):
            return replace(value, value=value.value.mT if value.value.dim() > 1 else value.value)
        if name in ("shape", "ndim", "dtype", "device"):
            fact: object = getattr(value.value, name)
            return fact
        raise call.build.unsupported(f"reads .{name} of the parameter {value.name}.", "Use it as it is.")
    if name == "shape":
        return torch.Size((call.build.size, *value.shape))
    if name == "ndim":
        return len(value.shape) + 1
    if name == "dtype":
        return torch.float64
    if name == "device":
        return next(iter(call.build.known.values())).device
    raise call.build.unsupported(f"reads .{name} of random values.", "Use shape, size() or dim().")


def read_cast(call: Call) -> object:
    """What returns its input as it is: casts between floating-point types, copies."""
    # All is computed in float64, whatever floating-point type forward() asks for: x.to(dtype), x.type_as(y).
    kinds = [v for v in call.args[1:] if isinstance(v, torch.dtype)]
    kinds += [v.dtype for v in call.args[1:] if isinstance(v, Tensor)]
    if any(not k.is_floating_point for k in kinds):
        raise call.build.unsupported(f"casts random values to {kinds[0]}.", "Keep them floating point.")
    value: object = call.args[0]
    return value


def read_expand(call: Call) -> Field | Parameter:
    """A parameter for each sample of the batch; a random value along positions of size 1."""
    value, like = call.args[0], _sizes(call)
    if len(call.args) == 2 and isinstance(call.args[1], RANDOM):  # expand_as
        like = (call.build.size, *call.args[1].shape)
    if isinstance(value, Parameter):
        have = value.value.shape
        want = like[-len(have) :]
        if want[1:] and any(n not in (-1, m) for n, m in zip(want[1:], have[1:], strict=True)):
            raise call.build.unsupported(f"repeats the parameter {value.name}.", "Expand it along the batch alone.")
        return value
    f = call.field()
    if len(like) != len(f.shape) + 1 or like[0] not in (-1, call.build.size):
        raise call.build.unsupported(f"expands values of shape {f.shape} to {tuple(like)}.", "Keep their axes.")
    for dim, (n, m) in enumerate(zip(f.shape, like[1:], strict=True)):
        if m in (-1, n):
            continue
        if dim == f.channel:
            raise call.build.unsupported("repeats one channel.", "Use a Linear layer.")
        f = take_positions(call.build, f, dim, (0,) * m, drop=False)
    return f


def read_repeat(call: Call) -> Parameter:
    """A parameter repeated for each sample of the batch."""
    value, sizes = call.args[0], _sizes(call)
    if isinstance(value, Parameter) and all(n == 1 for n in sizes[1:]):
        return value
    raise call.build.unsupported("repeats values.", "Use expand along the batch, or index.")
