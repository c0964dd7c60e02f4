"""What forward() does to the shapes of tensors: reshaping, indexing, sums over positions, joining."""

from dataclasses import replace
from math import prod
from typing import Any

import torch

from ...errors import InputError
from ..moments.fields import Field
from ..moments.positions import Pad, Permute, Total
from .calls import RANDOM, Call, Parameter


def reshape(call: Call) -> Field:
    f = call.field()
    given = call.args[1] if len(call.args) == 2 and not isinstance(call.args[1], int) else call.args[1:]
    new = list(given) or list(call.kwargs.get("shape", call.kwargs.get("size", ())))
    total = call.build.size * prod(f.shape)
    if -1 in new:
        new[new.index(-1)] = total // max(1, prod(n for n in new if n != -1))
    if prod(new) != total or not new or new[0] != call.build.size:
        raise call.build.unsupported(
            f"gives values of shape {(call.build.size, *f.shape)} the shape {tuple(new)}.", "Keep the batch as axis 0."
        )
    return reshaped(call, f, tuple(new[1:]))


def reshaped(call: Call, f: Field, new: tuple[int, ...]) -> Field:
    """Merge and split axes; positions merged with the channels become channels."""
    for old_dims, new_dims in _groups(f.shape, new):
        if f.channel in old_dims:
            big = [k for k in new_dims if new[k] != 1]
            if len(big) > 1:
                raise call.build.unsupported(
                    "splits the channels over several axes.",
                    "For attention use nn.MultiheadAttention; else keep the channels on one axis.",
                )
            place = big[0] if big else new_dims[0]
            merged = tuple(f.axis(k) for k in old_dims if k != f.channel and f.shape[k] != 1)
            out = call.build.flatten(f, merged) if merged else f
            return call.build.regrid(out, new, place)
    raise AssertionError("no axis holds the channels")


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of axes with equal products, in order."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        left, right, a, b = [i], [j], old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                left, a, i = [*left, i], a * old[i], i + 1
            else:
                right, b, j = [*right, j], b * new[j], j + 1
        found.append((left, right))
    found[-1][0].extend(range(i, len(old)))  # axes of size 1 that are left
    found[-1][1].extend(range(j, len(new)))
    return found


def flatten(call: Call) -> Field:
    f = call.field()
    every = len(f.shape) + 1
    start, end = call.get(1, "start_dim", 0) % every, call.get(2, "end_dim", -1) % every
    full = (call.build.size, *f.shape)
    new = (*full[:start], prod(full[start : end + 1]), *full[end + 1 :])
    return reshape(replace(call, args=(f, tuple(new)), kwargs={}))


def permute(call: Call) -> Any:
    if isinstance(call.args[0], Parameter):
        return _turned(call)
    f = call.field()
    given = call.args[1] if len(call.args) == 2 and not isinstance(call.args[1], int) else call.args[1:]
    return _permuted(call, f, tuple(given) or tuple(call.kwargs["dims"]))


def _turned(call: Call) -> Parameter:
    """A parameter's transpose."""
    value: Parameter = call.args[0]
    if value.value.dim() != 2:
        raise call.build.unsupported(f"turns the axes of the parameter {value.name}.", "Store it in that order.")
    return replace(value, value=value.value.T)


def transpose(call: Call) -> Any:
    if isinstance(call.args[0], Parameter):
        return _turned(call)
    f = call.field()
    order = list(range(len(f.shape) + 1))
    a, b = call.get(1, "dim0") % len(order), call.get(2, "dim1") % len(order)
    order[a], order[b] = order[b], order[a]
    return _permuted(call, f, tuple(order))


def _permuted(call: Call, f: Field, order: tuple[int, ...]) -> Field:
    if order[0] % (len(f.shape) + 1) != 0:
        raise call.build.unsupported("moves the batch from axis 0.", "Use batch_first layers, and leave axis 0 alone.")
    dims = call.dims(order[1:], f)
    shape = tuple(f.shape[d] for d in dims)
    grid = tuple(f.axis(d) for d in dims if d != f.channel)
    new = replace(f, shape=shape, channel=dims.index(f.channel))
    if grid == tuple(range(len(grid))):
        return new
    return call.build.same(Permute(grid), f, shape=shape, channel=new.channel)


def unsqueeze(call: Call) -> Field:
    f = call.field()
    dim = call.get(1, "dim") % (len(f.shape) + 2)
    if dim == 0:
        raise call.build.unsupported("puts an axis before the batch.", "Keep the batch as axis 0.")
    shape = (*f.shape[: dim - 1], 1, *f.shape[dim - 1 :])
    return call.build.regrid(f, shape, f.channel + (dim - 1 <= f.channel))


def squeeze(call: Call) -> Field:
    f = call.field()
    given = call.get(1, "dim")
    dims = call.dims(given, f) if given is not None else tuple(range(len(f.shape)))
    gone = [d for d in dims if f.shape[d] == 1 and d != f.channel]  # an only channel stays: it is the output
    shape = tuple(n for k, n in enumerate(f.shape) if k not in gone)
    return call.build.regrid(f, shape, f.channel - sum(d < f.channel for d in gone)) if gone else f


def reduce(call: Call, mean: bool) -> Field:
    f = call.build.settled(call.get(0, "input"))
    given = call.get(1, "dim", call.kwargs.get("axis"))
    if given is None:
        raise call.build.unsupported("reduces everything to one number.", "Name the positions' axes: dim=…")
    dims = call.dims(given, f)
    if f.channel in dims:
        raise call.build.unsupported(
            f"takes the {'mean' if mean else 'sum'} over the channels (axis {f.channel + 1}).",
            "That is one fixed read-out; use a Linear layer.",
        )
    keep = call.get(2, "keepdim", False)
    axes = tuple(f.axis(d) for d in dims)
    shape = tuple(n for k, n in enumerate(f.shape) if k not in dims)
    channel = f.channel - sum(d < f.channel for d in dims)
    found = call.build.same(Total(axes, mean), f, shape=shape, channel=channel)
    if not keep:
        return found
    return call.build.regrid(found, tuple(1 if k in dims else n for k, n in enumerate(f.shape)), f.channel)


def getitem(call: Call) -> Any:
    value, index = call.args[0], call.args[1]
    if isinstance(value, Parameter):
        return replace(value, value=value.value[index])
    if not isinstance(value, RANDOM):
        return value[index]
    f = call.field()
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        at = items.index(Ellipsis)
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
            f = call.build.take(f, dim, (item % f.shape[dim],), drop=True)
        else:
            raise call.build.unsupported(f"indexes by {item!r}.", "Use numbers and slices.")
    return f


def _sliced(call: Call, f: Field, dim: int, item: slice) -> Field:
    index = tuple(range(*item.indices(f.shape[dim])))
    if len(index) == f.shape[dim] and item.step in (None, 1):
        return f
    if dim == f.channel:
        raise call.build.unsupported("takes some of the channels.", "Use two layers, one for each part.")
    return call.build.take(f, dim, index, drop=False)


def cat(call: Call) -> Field:
    values = list(call.args[0] if call.args else call.kwargs["tensors"])
    build = call.build
    like = next(v for v in values if isinstance(v, RANDOM))
    dim = call.get(1, "dim", 0) % (len(like.shape) + 1) - 1
    if dim < 0:
        raise build.unsupported("joins batches.", "Samples must not mix: use another axis.")
    if dim == like.channel:
        return build.concat_channels(values)
    fields = build.fields([_token(call, v, like) for v in values])
    return build.concat_positions(fields, fields[0].axis(dim))


def _token(call: Call, value: Any, like: Any) -> Any:
    """A parameter among the values of cat: a class token."""
    if not isinstance(value, Parameter):
        return value
    shape = tuple(value.value.shape[-len(like.shape) :])
    f = call.build.drawn(shape, like.channel)
    return call.build.affine(f, f.width, call.weights.value(value.name, value.value, value.factor))


def pad(call: Call) -> Field:
    f = call.field()
    amounts = list(call.get(1, "pad"))
    mode, value = call.get(2, "mode", "constant"), call.get(3, "value", 0)
    if mode != "constant" or value not in (0, None):
        raise call.build.unsupported(f"pads by {mode} {value}.", "Pad with zeros, or use padding_mode='circular'.")
    every = [(0, 0)] * len(f.shape)
    for k in range(len(amounts) // 2):
        every[len(f.shape) - 1 - k] = (amounts[2 * k], amounts[2 * k + 1])
    if every[f.channel] != (0, 0):
        raise call.build.unsupported("pads the channels.", "Use a 1×1 convolution.")
    grid = tuple(p for k, p in enumerate(every) if k != f.channel)
    shape = tuple(n + sum(p) for n, p in zip(f.shape, every, strict=True))
    return call.build.same(Pad(grid), f, shape=shape)


def shape_of(call: Call) -> Any:
    value = call.args[0]
    sizes = torch.Size((call.build.size, *value.shape))
    dim = call.get(1, "dim")
    return sizes if dim is None else sizes[dim]


def attribute(call: Call) -> Any:
    value, name = call.args[0], call.args[1]
    if isinstance(value, Parameter):
        if name in ("T", "mT"):
            return replace(value, value=value.value.mT if value.value.dim() > 1 else value.value)
        if name in ("shape", "ndim", "dtype", "device"):
            return getattr(value.value, name)
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


def unchanged(call: Call) -> Any:
    kinds = [v for v in call.args[1:] if isinstance(v, torch.dtype)]
    kinds += [v.dtype for v in call.args[1:] if isinstance(v, torch.Tensor)]
    if any(not k.is_floating_point for k in kinds):
        raise call.build.unsupported(f"casts random values to {kinds[0]}.", "Keep them floating point.")
    return call.args[0]


def expand(call: Call) -> Any:
    """A parameter for each sample of the batch; a random value along positions of size 1."""
    value, like = call.args[0], call.args[1:]
    if len(like) == 1 and not isinstance(like[0], int):
        like = (
            (call.build.size, *like[0].shape)
            if isinstance(like[0], RANDOM)
            else tuple(getattr(like[0], "shape", like[0]))
        )
    if isinstance(value, Parameter):
        own = value.value.shape
        if like[-len(own) :][1:] and any(n not in (-1, m) for n, m in zip(like[-len(own) :][1:], own[1:], strict=True)):
            raise call.build.unsupported(f"repeats the parameter {value.name}.", "Expand it along the batch alone.")
        return value
    f = call.field()
    if len(like) != len(f.shape) + 1 or like[0] not in (-1, call.build.size):
        raise call.build.unsupported(f"expands values of shape {f.shape} to {tuple(like)}.", "Keep their axes.")
    for dim, (have, want) in enumerate(zip(f.shape, like[1:], strict=True)):
        if want in (-1, have):
            continue
        if dim == f.channel:
            raise call.build.unsupported("repeats one channel.", "Use a Linear layer.")
        f = call.build.take(f, dim, (0,) * want, drop=False)
    return f


def repeat(call: Call) -> Any:
    """A parameter repeated for each sample of the batch."""
    value, sizes = call.args[0], call.args[1:]
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)
    if isinstance(value, Parameter) and all(n == 1 for n in sizes[1:]):
        return value
    raise call.build.unsupported("repeats values.", "Use expand along the batch, or index.")
