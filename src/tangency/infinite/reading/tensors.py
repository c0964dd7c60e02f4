"""What forward() does to the shapes of tensors: reshaping, indexing, sums over positions, joining."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ...errors import InputError
from ..moments.axes import arranged, expanded, permuted, plain, regrouped, reshaped, seen, taken
from ..moments.fields import Builder
from ..moments.positions import Permute, Total
from ..moments.shapes import flatten_positions, regrid, take_positions
from ..moments.values import Field, Lazy, Random, Seen, Unsettled
from .attention import Scores, reshape_scores
from .calls import RANDOM, Call, Keywords, Parameter


def _sizes(call: Call) -> tuple[int, ...]:
    """The numbers after the first argument: f(x, 2, 3), f(x, (2, 3)), or those of a tensor's shape."""
    if len(call.args) != 2 or isinstance(call.args[1], (int, *RANDOM)):
        return call.args[1:]
    return tuple(call.args[1].shape if isinstance(call.args[1], Tensor) else call.args[1])


def full_shape(build: Builder, value: Random | Parameter) -> tuple[int, ...]:
    """The tensor's shape, its batch counted; that of a parameter has none."""
    if isinstance(value, Parameter):
        return tuple(value.value.shape)
    return value.sizes if isinstance(value, Unsettled) else (build.size, *value.shape)


def _inside(call: Call, rule: Callable[[Call], object]) -> Lazy:
    """A rule that only changes the form, applied within an elementwise function: what follows may still join it."""
    value: Lazy = call.args[0]
    f = rule(replace(call, args=(value.of, *call.args[1:])))
    assert isinstance(f, Field)
    return replace(value, of=f)


def _ones_apart(sizes: Sequence[int]) -> list[int]:
    """Sizes other than 1."""
    return [n for n in sizes if n != 1]


def read_reshape(call: Call) -> Random | Parameter:
    """view and reshape."""
    value, build = call.args[0], call.build
    if isinstance(value, Lazy) and _ones_apart(_sizes(call)) == _ones_apart((build.size, *value.shape)):
        return _inside(call, read_reshape)
    new = list(_sizes(call)) or list(call.kwargs.get("shape", call.kwargs.get("size", ())))
    # Sizes that forward() computed are of this batch, so its size may stand among them.
    full = full_shape(build, value)
    if -1 in new:
        new[new.index(-1)] = prod(full) // max(1, prod(n for n in new if n != -1))
    if prod(new) != prod(full) or not new:
        raise build.unsupported(f"gives values of shape {full} the shape {tuple(new)}.", "Keep all of them.")
    if isinstance(value, Parameter):  # of one sample: it is a value of its own where it is added or joined
        return value.formed(lambda v: v.reshape(new))
    if isinstance(value, Scores):
        return reshape_scores(build, value, new)
    if isinstance(value, Seen) or new[0] != build.size:
        return reshaped(build, seen(build, value), new)
    after = _reshaped(call, f := call.form(), tuple(new[1:]))
    copies = build.memory.copied.get(f.node)
    if isinstance(after, Field) and copies is not None and (axes := regrouped(copies.axes, new)) is not None:
        build.memory.copied[after.node] = replace(copies, axes=axes)
    return after


def _reshaped(call: Call, f: Field, new: tuple[int, ...]) -> Random:
    """Merge and split axes; positions merged with the channels become channels."""
    for old_dims, new_dims in _groups(f.shape, new):
        if f.channel in old_dims:
            big = [k for k in new_dims if new[k] != 1]
            if len(big) > 1:  # the channels are split over several axes, as into heads
                # As it was given: what is not applied yet stays so.
                return reshaped(call.build, seen(call.build, call.args[0]), (call.build.size, *new))
            place = big[0] if big else new_dims[0]
            merged = tuple(f.axis(k) for k in old_dims if k != f.channel and f.shape[k] != 1)
            # Merged with the channels, positions are averaged over in the moments; merged among themselves, they stay.
            out = flatten_positions(call.build, call.build.settled(f), merged) if merged else f
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


def read_new(call: Call, number: float) -> Tensor:
    """x.new_zeros(sizes) and x.new_ones(sizes): known numbers that take no more of x than its type."""
    sizes = _sizes(call) or tuple(call.kwargs.get("size"))
    kind = call.kwargs.get("dtype")
    device = next((v.device for v in call.build.known.values()), None)
    # In float64, as all that is known, unless another kind of number was asked for.
    kind = torch.float64 if kind is None or kind.is_floating_point else kind
    return torch.full(sizes, number, dtype=kind, device=device)


def read_flatten(call: Call) -> Random | Parameter:
    """flatten from one axis to another."""
    value = call.args[0]
    full = full_shape(call.build, value)
    start, end = call.get(1, "start_dim", 0) % len(full), call.get(2, "end_dim", -1) % len(full)
    new = (*full[:start], prod(full[start : end + 1]), *full[end + 1 :])
    return read_reshape(replace(call, args=(value, tuple(new)), kwargs=Keywords()))


def read_unflatten(call: Call) -> Random | Parameter:
    """One axis split into several."""
    value, sizes = call.args[0], list(call.get(2, "sizes"))
    full = full_shape(call.build, value)
    dim = call.get(1, "dim") % len(full)
    if -1 in sizes:
        sizes[sizes.index(-1)] = full[dim] // max(1, prod(n for n in sizes if n != -1))
    new = (*full[:dim], *sizes, *full[dim + 1 :])
    return read_reshape(replace(call, args=(value, new), kwargs=Keywords()))


def read_permute(call: Call) -> Random | Parameter:
    """The axes in another order."""
    return _permuted(call, call.args[0], _sizes(call) or tuple(call.kwargs.get("dims")))


def read_transpose(call: Call) -> Random | Parameter:
    """Two axes exchanged."""
    value = call.args[0]
    order = list(range(len(full_shape(call.build, value))))
    a, b = call.get(1, "dim0", 0) % len(order), call.get(2, "dim1", 1) % len(order)
    order[a], order[b] = order[b], order[a]
    return _permuted(call, value, tuple(order))


def read_movedim(call: Call) -> Random | Parameter:
    """One or several axes to other places."""
    value = call.args[0]
    rank = len(full_shape(call.build, value))
    # torch itself knows where the others go: sizes 0, 1, 2, … name the axes.
    places = torch.empty(tuple(range(rank))).movedim(call.get(1, "source"), call.get(2, "destination"))
    return _permuted(call, value, tuple(places.shape))


def _permuted(call: Call, value: Random | Parameter, order: tuple[int, ...]) -> Random | Parameter:
    """The axes in this order, the batch counted."""
    if isinstance(value, Parameter):
        return value.moved(lambda v: v.permute(order))
    rank = len(full_shape(call.build, value))
    if sorted(k % rank for k in order) != list(range(rank)):
        raise call.build.unsupported(
            f"gives {len(order)} axes to values that have {rank}, {full_shape(call.build, value)} with the batch.",
            "Give one number for each of their axes.",
        )
    if isinstance(value, Scores):
        return replace(value, axes=tuple(value.axes[k] for k in order))
    if isinstance(value, Seen) or order[0] % len(order) != 0:
        return permuted(call.build, seen(call.build, value), order)
    f = value if isinstance(value, Field) else call.build.settled(value)
    dims = call.axes(order[1:], f)
    shape = tuple(f.shape[d] for d in dims)
    grid = tuple(f.axis(d) for d in dims if d != f.channel)
    channel = dims.index(f.channel)
    if grid == tuple(range(len(grid))):  # the channels alone have moved, and they are no axis of the moments
        return replace(f, shape=shape, channel=channel)
    return call.build.apply(Permute(grid), f, shape=shape, channel=channel)


def read_unsqueeze(call: Call) -> Random | Parameter:
    """A new axis of size 1."""
    value, build = call.args[0], call.build
    if isinstance(value, Parameter):
        at = int(call.get(1, "dim"))
        return value.moved(lambda v: v.unsqueeze(at))
    dim = call.get(1, "dim") % (len(full_shape(build, value)) + 1)
    if isinstance(value, Unsettled) or dim == 0:
        other = value if isinstance(value, Scores) else seen(build, value)
        wider = replace(other, axes=(*other.axes[:dim], (), *other.axes[dim:]))
        return plain(build, wider) if isinstance(wider, Seen) else wider
    if isinstance(value, Lazy):
        return _inside(call, read_unsqueeze)
    f = call.form()
    # Axes of shape do not count the batch, so they are one less than forward()'s.
    shape = (*f.shape[: dim - 1], 1, *f.shape[dim - 1 :])
    return regrid(call.build, f, shape, f.channel + (dim - 1 <= f.channel))


def read_squeeze(call: Call) -> Random:
    """Without axes of size 1."""
    value = call.args[0]
    if isinstance(value, Seen):
        asked = call.get(1, "dim")
        here = range(len(value.axes)) if asked is None else [asked % len(value.axes)]
        gone = [k for k in here if not value.axes[k]]
        return plain(call.build, replace(value, axes=tuple(v for k, v in enumerate(value.axes) if k not in gone)))
    f = call.form()
    asked = call.get(1, "dim")
    dims = call.axes(asked, f) if asked is not None else tuple(range(len(f.shape)))
    gone = [d for d in dims if f.shape[d] == 1 and d != f.channel]  # an only channel stays: it is the output
    shape = tuple(n for k, n in enumerate(f.shape) if k not in gone)
    return regrid(call.build, f, shape, f.channel - sum(d < f.channel for d in gone)) if gone else f


def read_reduction(call: Call, mean: bool) -> Random:
    """The mean or sum over positions."""
    value, asked = call.get(0, "input"), call.get(1, "dim", call.kwargs.get("axis"))
    if isinstance(value, Seen) and asked is not None:
        along = [d % len(value.axes) for d in ((asked,) if isinstance(asked, int) else asked)]
        return _reduced_along(call, value, along, mean, bool(call.get(2, "keepdim", False)))
    f = call.build.settled(value)
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


def _reduced_along(call: Call, value: Seen, dims: list[int], mean: bool, keep: bool) -> Random:
    """Over axes of positions, where the batch lies elsewhere or is merged: [time, batch, channels], windows."""
    build = call.build
    gone = [a for d in dims for a in value.axes[d]]
    if any(a.kind != "position" for a in gone) or value.turn is not None:
        raise build.unsupported(*value.why())
    kept = [a for axis in value.axes for a in axis if a.kind == "position" and a not in gone]
    f = arranged(build, value, [*kept, *gone])
    lost = tuple(range(len(kept), len(kept) + len(gone)))
    if lost:  # axes of size 1 have no positions, and torch's mean over no axes is one over all
        f = build.apply(Total(lost, mean), f, shape=(*(a.size for a in kept), f.width), channel=len(kept))
    names = {a: replace(a, place=(k,)) for k, a in enumerate(kept)}
    axes = [tuple(names.get(a, a) for a in axis) for axis in value.axes]
    left = [() if d in dims else axis for d, axis in enumerate(axes) if keep or d not in dims]
    return plain(build, Seen(f, tuple(left)))


def read_item(call: Call) -> object:
    """x[…]: positions by numbers and slices, or an entry of a tuple."""
    value, index = call.args[0], call.args[1]
    if isinstance(value, Parameter):
        return value.part(index if isinstance(index, tuple) else (index,))
    if not isinstance(value, RANDOM):
        entry: object = value[index]
        return entry
    items = [_as_list(item) for item in (index if isinstance(index, tuple) else (index,))]
    if any(item is Ellipsis for item in items):
        at = next(k for k, item in enumerate(items) if item is Ellipsis)
        # All axes that are not named: those of the tensor, less the items beside the ellipsis.
        named = sum(item is not None for item in items) - 1
        items[at : at + 1] = [slice(None)] * (len(full_shape(call.build, value)) - named)
    if isinstance(value, Lazy) and any(item is None for item in items):
        return _inside(call, read_item)
    other = any(item is None or isinstance(item, list) for item in items)
    if isinstance(value, Unsettled) or other or _takes_channels(value, items):
        return _indexed(call, value, items)
    f = call.form()
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
        elif item is None:
            f = regrid(call.build, f, (*f.shape[:dim], 1, *f.shape[dim:]), f.channel + (dim <= f.channel))
            dim += 1
        else:
            raise call.build.unsupported(f"indexes by {item!r}.", "Use numbers and slices.")
    return f


def _as_list(item: object) -> object:
    """A known row of numbers, or of answers, as a list of numbers; anything else as it is."""
    if not isinstance(item, Tensor) or item.dim() != 1 or item.is_floating_point():
        return item
    return (item.nonzero().flatten() if item.dtype == torch.bool else item).tolist()


def _takes_channels(value: Random, items: list[object]) -> bool:
    """Whether some of the channels are asked for."""
    item = items[value.channel + 1] if len(items) > value.channel + 1 else None
    size = value.shape[value.channel]
    return isinstance(item, slice) and list(range(*item.indices(size))) != list(range(size))


def _is_one_list(item: object, items: list[object]) -> bool:
    """Whether it is the only list of numbers: several would pick entries together."""
    numbers = isinstance(item, list) and all(isinstance(k, int) and not isinstance(k, bool) for k in item)
    return numbers and sum(isinstance(v, list) for v in items) == 1


def _indexed(call: Call, value: Random, items: list[object]) -> Random:
    """x[…] along any axes: slices, numbers, and None for a new one."""
    build = call.build
    if isinstance(value, Scores):
        raise build.unsupported(*value.why())
    found, dim = seen(build, value), 0
    for item in items:
        after: Random
        if item is None:
            after = replace(found, axes=(*found.axes[:dim], (), *found.axes[dim:]))
        elif isinstance(item, (slice, int)) or _is_one_list(item, items):
            size = found.sizes[dim]
            if isinstance(item, int) and not -size <= item < size:
                raise InputError(f"{build.where}: index {item} of {size} positions.")
            if isinstance(item, slice):
                index: Sequence[int] = range(*item.indices(size))
            else:
                index = [k % size for k in (item if isinstance(item, list) else [item])]  # type: ignore[operator]
            # The whole of an axis stays as it is.
            whole = isinstance(item, slice) and list(index) == list(range(size))
            after = found if whole else taken(build, found, dim, index, drop=isinstance(item, int))
        else:
            raise build.unsupported(f"indexes by {item!r}.", "Use numbers and slices.")
        found = seen(build, after)
        dim += not isinstance(item, int)
    return plain(build, found)


def read_parts(call: Call, sizes: list[int], dim: int) -> tuple[Random | Parameter, ...]:
    """Parts of these sizes along an axis, of positions or of channels; or of a parameter."""
    build, value = call.build, call.args[0]
    if isinstance(value, Scores):
        raise build.unsupported(*value.why())
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    if isinstance(value, Parameter):
        before = (slice(None),) * (dim % value.value.dim())
        return tuple(value.part((*before, slice(s, s + n))) for s, n in zip(starts, sizes, strict=True))
    return tuple(
        taken(build, seen(build, value), dim, range(s, s + n), drop=False) for s, n in zip(starts, sizes, strict=True)
    )


def read_split(call: Call) -> tuple[Random | Parameter, ...]:
    """split by a size, or by a list of them."""
    asked = call.get(1, "split_size_or_sections", call.kwargs.get("split_size"))
    dim = call.get(2, "dim", 0)
    total = full_shape(call.build, call.args[0])[dim]
    sizes = [min(asked, total - s) for s in range(0, total, asked)] if isinstance(asked, int) else list(asked)
    if sum(sizes) != total:
        raise InputError(f"{call.build.where}: parts of {sizes} of {total}.")
    return read_parts(call, sizes, dim)


def read_unbind(call: Call) -> tuple[Random, ...]:
    """All entries along an axis, one by one."""
    build, value, dim = call.build, call.args[0], call.get(1, "dim", 0)
    if isinstance(value, Scores):
        raise build.unsupported(*value.why())
    count = full_shape(build, value)[dim]
    return tuple(taken(build, seen(build, value), dim % len(full_shape(build, value)), [k], True) for k in range(count))


def read_select(call: Call) -> Random:
    """One entry along an axis."""
    build, found = call.build, seen(call.build, call.args[0])
    dim = call.get(1, "dim") % len(found.axes)
    return taken(build, found, dim, [call.get(2, "index") % found.sizes[dim]], drop=True)


def read_narrow(call: Call) -> Random | Parameter:
    """A run of entries along an axis."""
    if isinstance(call.args[0], Parameter):
        at, begin = call.get(1, "dim") % call.args[0].value.dim(), call.get(2, "start")
        return call.args[0].part((*(slice(None),) * at, slice(begin, begin + call.get(3, "length"))))
    build, found = call.build, seen(call.build, call.args[0])
    dim, start = call.get(1, "dim") % len(found.axes), call.get(2, "start")
    return taken(build, found, dim, range(start, start + call.get(3, "length")), drop=False)


def entries_along(call: Call, value: Random, dim: int, index: Sequence[int]) -> Random:
    """Entries along any axis of positions or channels, in this order."""
    build, axis = call.build, dim % len(full_shape(call.build, value)) - 1
    if isinstance(value, Unsettled) or axis in (-1, value.channel):
        return taken(build, seen(build, value), axis + 1, index, drop=False)
    f = value if isinstance(value, Field) else build.settled(value)
    return take_positions(build, f, axis, tuple(index), drop=False)


def _sliced(call: Call, f: Field, dim: int, item: slice) -> Field:
    """Positions dim of shape by a slice; of the channels, all or none."""
    index = tuple(range(*item.indices(f.shape[dim])))
    if len(index) == f.shape[dim] and item.step in (None, 1):
        return f
    if dim == f.channel:
        raise call.build.unsupported("takes some of the channels.", "Use two layers, one for each part.")
    return take_positions(call.build, f, dim, index, drop=False)


def read_size(call: Call) -> torch.Size | int:
    """x.size() or x.size(dim), the batch counted."""
    sizes = torch.Size(full_shape(call.build, call.args[0]))
    dim = call.get(1, "dim")
    return sizes if dim is None else sizes[dim]


def read_attribute(call: Call) -> object:
    """What forward() asks of a value's form: its shape, dtype, device; a parameter's transpose."""
    value, name = call.args[0], call.args[1]
    if isinstance(value, Parameter):
        if name in ("T", "mT"):
            return value.moved(lambda v: v.mT if v.dim() > 1 else v)
        if name in ("shape", "ndim", "dtype", "device"):
            fact: object = getattr(value.value, name)
            return fact
        raise call.build.unsupported(f"reads .{name} of the parameter {value.name}.", "Use it as it is.")
    if isinstance(value, tuple):  # x.max(dim).values
        entry: object = getattr(value, name)
        return entry
    if name == "shape":
        return torch.Size(full_shape(call.build, value))
    if name == "ndim":
        return len(full_shape(call.build, value))
    if name == "mT" or (name == "T" and len(full_shape(call.build, value)) == 2):
        return read_transpose(replace(call, args=(value, -2, -1)))
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


def read_expand(call: Call) -> Random | Parameter:
    """A parameter for each sample of the batch; a random value along positions of size 1."""
    value, like = call.args[0], _sizes(call)
    if len(call.args) == 2 and isinstance(call.args[1], RANDOM):  # expand_as
        like = (call.build.size, *call.args[1].shape)
    if isinstance(value, Parameter):
        have = (1,) * (len(like) - value.value.dim()) + tuple(value.value.shape)
        if all(n in (-1, m) for n, m in zip(like[1:], have[1:], strict=True)):
            return value
        return value.formed(lambda v: v.expand(-1 if len(like) == v.dim() else 1, *like[1:]))
    if isinstance(value, Seen) and len(like) == len(value.axes):
        return expanded(call.build, value, like)
    if isinstance(value, Lazy):
        return _inside(call, read_expand)
    f = call.form()
    if len(like) != len(f.shape) + 1 or like[0] not in (-1, call.build.size):
        raise call.build.unsupported(f"expands values of shape {f.shape} to {tuple(like)}.", "Keep their axes.")
    copies = expanded(call.build, seen(call.build, f), like) if f.shape != tuple(like[1:]) else f
    for dim, (n, m) in enumerate(zip(f.shape, like[1:], strict=True)):
        if m in (-1, n):
            continue
        if dim == f.channel:
            raise call.build.unsupported("repeats one channel.", "Use a Linear layer.")
        f = take_positions(call.build, f, dim, (0,) * m, drop=False)
    if isinstance(copies, Seen):  # heads that attention shares, if it is they that are expanded
        call.build.memory.copied[f.node] = copies
    return f
