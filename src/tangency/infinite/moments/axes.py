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

from .fields import Builder
from .ops import Rescale
from .positions import Permute
from .shapes import flatten_positions, regrid, take_positions
from .values import Atom, Axes, Field, Joint, Lazy, Patched, Random, Rows, Seen, Unsettled, Value


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
    if len(at) != 1 or at[0] == 0 or [a.kind for a in value.axes[0]] != ["batch"] or atoms_of(value.axes, "copy"):
        return value
    kept = [a for k, axis in enumerate(value.axes) if k != at[0] for a in axis if a.kind == "position"]
    gone = [a for a in value.axes[at[0]] if a.kind == "position"]
    f = arranged(build, value, [*kept, *gone])
    if gone:  # positions beside the channels become channels
        f = flatten_positions(build, f, tuple(range(len(kept), len(kept) + len(gone))))
    channels = atoms_of(value.axes, "channel")
    if channels != _in_order(channels):
        # Channels in another order have the same law, but are no longer one by one those of the field.
        f = build.apply(Rescale(1.0), f)
        build.memory.shuffled.add(f.node)
    return regrid(build, f, value.shape, at[0] - 1)


def arranged(build: Builder, value: Seen, order: Sequence[Atom]) -> Field:
    """The field with its positions on axes of their own in this order, and its channels last."""
    f, places = build.settled(value.of), _in_order(order)
    sizes = tuple(a.size for a in places)
    f = regrid(build, f, (*sizes, f.width), len(sizes))
    turn = tuple(places.index(a) for a in order)
    if turn == tuple(range(len(turn))):
        return f
    return build.apply(Permute(turn), f, shape=(*(a.size for a in order), f.width))


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
    first = channels.index(inside[0])
    if tuple(channels[first : first + len(inside)]) != inside:
        raise build.unsupported("takes some of the channels in another order.", "Slice them before they are turned.")
    sizes = [a.size for a in channels]
    before, after = prod(sizes[:first]), prod(sizes[first + len(inside) :])
    if drop and before * after == 1:
        raise build.unsupported("picks one channel.", "Use a Linear layer as read-out.")
    rows = torch.arange(prod(sizes)).reshape(before, -1, after)[:, list(index)].flatten().tolist()
    part = take_channels(build, value.of, rows)
    new = () if drop else ((Atom("channel", inside[0].place, len(index)),),)
    return plain(build, Seen(part, (*value.axes[:dim], *new, *value.axes[dim + 1 :])))


def take_channels(build: Builder, value: Random, rows: Sequence[int]) -> Random:
    """Some of the channels: independent of the others, for different rows of weights gave them."""
    if isinstance(value, Lazy):
        of = take_channels(build, value.of, rows)
        assert isinstance(of, Field)
        return replace(value, of=of, whose=None if value.whose is None else _rows_of(value.whose, rows))
    if isinstance(value, Joint) or (isinstance(value, Patched) and all(isinstance(f, Field) for f in value.of)):
        parts = [take_channels(build, f, rows) for f in value.of if isinstance(f, Field)]
        return replace(value, of=tuple(f for f in parts if isinstance(f, Field)))
    if (
        isinstance(value, Field)
        and not value.gaussian
        and isinstance(joint := build.memory.functions.get(value.node), Joint)
    ):
        return take_channels(build, joint, rows)
    # A scale of each channel's own that was just applied still waits: each part has its own.
    f = value if isinstance(value, Field) else build.settled(value)
    if list(rows) == list(range(f.width)):
        return f
    start = 0
    for part in build.memory.parts.get(f.node, []):  # one of the values that lie side by side
        width = part.shape[part.channel]
        if list(rows) == list(range(start, start + width)) and part.channel == f.channel:
            return part
        start += width
    if not f.gaussian or sorted(set(rows)) != list(rows):
        raise build.unsupported(
            f"takes {len(rows)} of {f.width} channels of values that are not Gaussian in the limit, or some twice.",
            "Do so right after a Linear or Conv, each channel once.",
        )
    bits = sum(1 << r for r in rows)
    if (f.node, bits) not in build.memory.rows:
        shape = (*f.shape[: f.channel], len(rows), *f.shape[f.channel + 1 :])
        part = build.apply(Rescale(1.0), f, shape=shape)
        law = f.doubt if f.doubt is None or f.doubt.node != f.node else replace(f.doubt, node=part.node)
        sources = frozenset(_rows_of(s, rows) for s in f.sources)
        gained = None if f.gained is None else _rows_of(f.gained, rows)
        build.memory.rows[f.node, bits] = replace(part, sources=sources, doubt=law, gained=gained)
        build.memory.cuts[part.node] = f, tuple(rows)
    found = build.memory.rows[f.node, bits]
    # The same channels may have been asked for when they lay on another axis.
    return replace(found, shape=(*f.shape[: f.channel], len(rows), *f.shape[f.channel + 1 :]), channel=f.channel)


def _rows_of(source: object, rows: Sequence[int]) -> Rows:
    """These rows of a source, or of those rows that it has already."""
    if not isinstance(source, Rows):
        return Rows(source, sum(1 << r for r in rows))
    have = [k for k in range(source.bits.bit_length()) if source.bits >> k & 1]
    return Rows(source.source, sum(1 << have[r] for r in rows))


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
