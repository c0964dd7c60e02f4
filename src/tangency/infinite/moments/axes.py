"""Values along other axes than their own: channels split into heads, a batch that is not first, or merged.

Moments know the batch, axes of positions, and channels that are all alike. What forward() does to the axes of a tensor
is followed by `Atom`s, the pieces that its axes are made of, and computes nothing: `Seen` is the value and its axes.
Where these are again the batch, positions and one axis of all channels, `plain` gives the value back, with the very
node that it had if nothing has moved.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from .channels import take_channels
from .fields import Builder
from .ops import Rescale
from .positions import Permute
from .shapes import flatten_positions, regrid, take_positions
from .values import Atom, Axes, Field, Random, Seen, Unsettled, Value


def seen(build: Builder, value: Random) -> Seen:
    """A value along its own axes."""
    if isinstance(value, Seen):
        return value
    if isinstance(value, Unsettled):
        raise build.unsupported(*value.why())
    axes: list[tuple[Atom, ...]] = [(Atom("batch", (), build.size),)]
    place = 0
    for dim, size in enumerate(value.shape):
        if dim == value.channel:
            axes.append((Atom("channel", (0,), size),))
        else:
            axes.append((Atom("position", (place,), size),) if size > 1 else ())
            place += 1
    return Seen(value, tuple(axes))


def atoms_of(axes: Axes, *kinds: str) -> list[Atom]:
    """The atoms of these kinds, as they come along the axes."""
    return [a for axis in axes for a in axis if a.kind in kinds]


def _in_order(atoms: Sequence[Atom]) -> list[Atom]:
    return sorted(atoms, key=lambda a: a.place)


def plain(build: Builder, value: Seen) -> Random:
    """The value itself where its axes are batch, positions and all channels; else as it was given."""
    if value.turn is not None:
        return value
    if value.axes == seen(build, value.of).axes:
        return value.of
    at = [k for k, axis in enumerate(value.axes) if any(a.kind == "channel" for a in axis)]
    if len(at) == 1 and len(value.axes[at[0]]) > 1 and not atoms_of(value.axes[at[0] : at[0] + 1], "position", "batch"):
        return plain(build, _with_channels_on(build, value, at[0]))
    if len(at) != 1 or at[0] == 0 or [a.kind for a in value.axes[0]] != ["batch"] or atoms_of(value.axes, "copy"):
        return value
    kept = [a for k, axis in enumerate(value.axes) if k != at[0] for a in axis if a.kind == "position"]
    gone = [a for a in value.axes[at[0]] if a.kind == "position"]
    f = arranged(build, value, [*kept, *gone])
    if gone:  # positions beside the channels become channels
        f = flatten_positions(build, build.settled(f), tuple(range(len(kept), len(kept) + len(gone))))
    channels = atoms_of(value.axes, "channel")
    if channels != _in_order(channels):
        # Channels in another order have the same law, but are no longer one by one those of the field.
        f = build.apply(Rescale(1.0), f)
        build.memory.shuffled.add(f.node)
    return regrid(build, f, value.shape, at[0] - 1)


def _with_channels_on(build: Builder, value: Seen, dim: int) -> Seen:
    """The value with all channels on this axis as one atom; in another order, they are those of the value in it."""
    inside = value.axes[dim]
    numbers = _numbers(_in_order(inside), inside).flatten().tolist()
    whole = (Atom("channel", (0,), len(numbers)),)
    return Seen(take_channels(build, value.of, numbers), (*value.axes[:dim], whole, *value.axes[dim + 1 :]))


def _numbers(channels: Sequence[Atom], order: Sequence[Atom]) -> Tensor:
    """The channels' numbers as a tensor with an axis for each of these atoms, in this order."""
    sizes = [a.size for a in channels]
    return torch.arange(prod(sizes)).reshape(sizes).permute([channels.index(a) for a in order])


def arranged(build: Builder, value: Seen, order: Sequence[Atom]) -> Field:
    """The field with its positions on axes of their own in this order, and its channels last."""
    # A scale of each channel's own that was just applied still waits: an activation, or scores, may follow.
    f, places = value.of if isinstance(value.of, Field) else build.settled(value.of), _in_order(order)
    sizes = tuple(a.size for a in places)
    f = regrid(build, f, (*sizes, f.width), len(sizes))
    turn = tuple(places.index(a) for a in order)
    if turn == tuple(range(len(turn))):
        return f
    return build.apply(Permute(turn), f, shape=(*(a.size for a in order), f.width))


def matched(build: Builder, a: Seen, b: Seen) -> tuple[Seen, Seen] | None:
    """Two values along other axes as fields of one form, for a sum or product; None where their axes do not agree."""
    if a.turn is not None or b.turn is not None or atoms_of((*a.axes, *b.axes), "copy"):
        return None
    if [_runs(axis) for axis in a.axes] != [_runs(axis) for axis in b.axes]:
        return None
    return _canonical(build, a), _canonical(build, b)


def _runs(axis: Sequence[Atom]) -> list[tuple[str, int]]:
    """What an axis is made of, however it is cut: its kinds in order, and their sizes."""
    runs: list[tuple[str, int]] = []
    for a in axis:
        if runs and runs[-1][0] == a.kind:
            runs[-1] = a.kind, runs[-1][1] * a.size
        else:
            runs.append((a.kind, a.size))
    return runs


def _canonical(build: Builder, value: Seen) -> Seen:
    """The value as a field whose positions and channels come in the order of the axes, its channels last."""
    channels = atoms_of(value.axes, "channel")
    of = take_channels(build, value.of, _numbers(_in_order(channels), channels).flatten().tolist())
    f = arranged(build, replace(value, of=of), atoms_of(value.axes, "position"))
    counts = {"position": 0, "channel": 0}
    axes: list[tuple[Atom, ...]] = []
    for axis in value.axes:
        new: list[Atom] = []
        for kind, size in _runs(axis):
            if kind == "batch":
                new.append(Atom("batch", (), size))
                continue
            new.append(Atom("position" if kind == "position" else "channel", (counts[kind],), size))
            counts[kind] += 1
        axes.append(tuple(new))
    grid = tuple(a.size for a in atoms_of(tuple(axes), "position"))
    return Seen(regrid(build, f, (*grid, f.width), len(grid)), tuple(axes))


def regrouped(axes: Axes, sizes: Sequence[int]) -> Axes | None:
    """The same atoms over axes of these sizes, cut where they must be; None where that cannot be."""
    waiting = [a for axis in axes for a in axis]
    new: list[tuple[Atom, ...]] = []
    for size in sizes:
        axis: list[Atom] = []
        left = size
        # A batch or a width of 1 has an axis too: the first that is free for it.
        while left > 1 or (not axis and waiting and waiting[0].size == 1):
            if not waiting:
                return None
            atom = waiting.pop(0)
            if atom.size > left:
                if atom.size % left or atom.kind == "batch":
                    return None
                waiting.insert(0, Atom(atom.kind, (*atom.place, 1), atom.size // left))
                atom = Atom(atom.kind, (*atom.place, 0), left)
            elif left % atom.size:
                return None
            axis.append(atom)
            left //= atom.size
        new.append(tuple(axis))
    if any(a.size > 1 for a in waiting) or not new:
        return None
    new[-1] = (*new[-1], *waiting)
    return tuple(new)


def reshaped(build: Builder, value: Seen, sizes: Sequence[int]) -> Random:
    """view and reshape."""
    axes = regrouped(value.axes, sizes)
    if axes is None:
        raise build.unsupported(
            f"gives values of shape {value.sizes} the shape {tuple(sizes)}, which cuts its batch or its axes apart.",
            "Merge and split whole axes, and keep each sample whole.",
        )
    return plain(build, replace(value, axes=axes))


def permuted(build: Builder, value: Seen, order: Sequence[int]) -> Random:
    """The axes in another order."""
    return plain(build, replace(value, axes=tuple(value.axes[k] for k in order)))


def expanded(build: Builder, value: Seen, sizes: Sequence[int]) -> Random:
    """Axes of size 1 repeated."""
    axes = []
    for k, (axis, now, size) in enumerate(zip(value.axes, value.sizes, sizes, strict=True)):
        if size not in (-1, now) and now != 1:
            raise build.unsupported(f"expands values of shape {value.sizes} to {tuple(sizes)}.", "Expand size 1 alone.")
        axes.append(axis if size in (-1, now) else (*axis, Atom("copy", (k,), size)))
    return plain(build, replace(value, axes=tuple(axes)))


def taken(build: Builder, value: Seen, dim: int, index: Sequence[int], drop: bool) -> Random:
    """Some entries along an axis, which goes if `drop`: positions, or channels."""
    if value.turn is not None:
        raise build.unsupported(*value.why())
    dim %= len(value.axes)
    axis, rest = value.axes[dim], (value.axes[:dim], value.axes[dim + 1 :])
    kinds = {a.kind for a in axis}
    if list(index) == list(range(value.sizes[dim])) and not (drop and axis):
        return plain(build, replace(value, axes=(*rest[0], *rest[1])) if drop else value)
    if kinds == {"channel"}:
        return _taken_channels(build, value, dim, index, drop)
    if kinds != {"position"}:
        raise build.unsupported(
            f"takes entries along an axis of {sorted(kinds) or 'size 1'}.", "Keep all samples; index positions."
        )
    # Its positions become the last axis of the grid, and all atoms are named anew.
    others = [a for a in _in_order(atoms_of(value.axes, "position")) if a not in axis]
    f = arranged(build, value, [*others, *axis])
    f = regrid(build, f, (*(a.size for a in others), value.sizes[dim], f.width), len(others) + 1)
    f = take_positions(build, f, len(others), tuple(index), drop=drop)
    names = {a: replace(a, place=(k,)) for k, a in enumerate(others)}
    left, right = ([tuple(names.get(a, a) for a in axis) for axis in part] for part in rest)
    middle = [] if drop else [(Atom("position", (len(others),), len(index)),) if len(index) > 1 else ()]
    return plain(build, Seen(f, (*left, *middle, *right)))


def _taken_channels(build: Builder, value: Seen, dim: int, index: Sequence[int], drop: bool) -> Random:
    """Some channels along an axis of them: different rows of the weights before."""
    inside, channels = value.axes[dim], _in_order(atoms_of(value.axes, "channel"))
    # The axis' atoms lie together where its first one lies; the others keep their places.
    first = sum(a not in inside for a in channels[: channels.index(inside[0])])
    others = [a for a in channels if a not in inside]
    if drop and not others:
        raise build.unsupported("picks one channel.", "Use a Linear layer as read-out.")
    numbers = _numbers(channels, [*others[:first], *inside, *others[first:]])
    rows = numbers.flatten(first, first + len(inside) - 1).index_select(first, torch.tensor(index)).flatten().tolist()
    part = take_channels(build, value.of, rows)
    new = () if drop else ((Atom("channel", inside[0].place, len(index)),),)
    return plain(build, Seen(part, (*value.axes[:dim], *new, *value.axes[dim + 1 :])))


def by_heads(value: Seen) -> bool:
    """Whether the last axis has the channels of each head, and another axis the heads."""
    channels, last = atoms_of(value.axes, "channel"), value.axes[-1]
    plainly = value.turn is None and not atoms_of(value.axes, "copy")
    return plainly and bool(last) and all(a.kind == "channel" for a in last) and len(channels) > len(last)


def on_channels(build: Builder, value: Seen, layer: Callable[[Field], Value]) -> Random:
    """The value after a layer that takes the last axis, where that is all channels, whatever the other axes are."""
    channels = atoms_of(value.axes, "channel")
    if tuple(_in_order(channels)) != value.axes[-1] or atoms_of(value.axes, "copy") or value.turn is not None:
        raise build.unsupported(*value.why())
    places = _in_order(atoms_of(value.axes, "position"))
    after = layer(arranged(build, value, places))
    assert not isinstance(after, Tensor)
    names = {a: replace(a, place=(k,)) for k, a in enumerate(places)}
    axes = [tuple(names.get(a, a) for a in axis) for axis in value.axes[:-1]]
    return plain(build, Seen(after, (*axes, (Atom("channel", (0,), after.shape[-1]),))))


def aligned(tensor: Tensor, axes: Axes, order: Sequence[Atom]) -> Tensor:
    """A known tensor that is broadcast against these axes, with an axis for each atom: of size 1 where it is alike."""
    tensor = tensor.reshape(*[1] * (len(axes) - tensor.dim()), *tensor.shape)
    flat = [1 if tensor.shape[k] == 1 else a.size for k, axis in enumerate(axes) for a in axis]
    atoms = [a for axis in axes for a in axis]
    return tensor.reshape(flat).permute([atoms.index(a) for a in order])
