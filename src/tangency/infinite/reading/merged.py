"""Layers over pictures whose batch is merged with positions, as [batch·frames, channels, height, width] has them.

Frames are positions that the layer does not mix: a convolution over them too, with a window of 1 there.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from torch import Tensor

from ..moments.axes import arranged, atoms_of, plain, reshaped, seen
from ..moments.fields import Builder
from ..moments.shapes import regrid
from ..moments.values import Atom, Field, Random, Seen


def merged_input(build: Builder, value: Tensor, channels_first: bool) -> Random:
    """Known rows [samples·positions, …] as a value whose batch is merged with positions.

    That they are in this order is held against each sample by itself (`Infinite.prepare`), as all known values are.
    """
    apart = value.view(build.size, -1, *value.shape[1:])
    f = build.field(apart, 1 if channels_first else apart.dim() - 2)
    return reshaped(build, seen(build, f), value.shape)


def beside_batch(build: Builder, value: Seen) -> tuple[Field, Callable[[Field], Random]]:
    """The value as a field [channels, merged positions, *others], and the way back for what a layer makes of it."""
    first, channels, *rest = value.axes if len(value.axes) > 1 else (*value.axes, ())
    merged = [a for a in first if a.kind == "position"]
    at = [a.kind for a in first].index("batch") if "batch" in [a.kind for a in first] else -1
    kinds = {a.kind for axis in rest for a in axis}
    in_order = tuple(sorted(atoms_of(value.axes, "channel"), key=lambda a: a.place)) == channels
    if at not in (0, len(first) - 1) or kinds - {"position"} or not in_order or value.turn is not None:
        raise build.unsupported(*value.why())
    f = arranged(build, value, [*merged, *(a for axis in rest for a in axis)])
    count = prod(a.size for a in merged)
    f = regrid(build, f, (f.width, count, *(prod(a.size for a in axis) for axis in rest)), 0)
    one = Atom("position", (0,), count)
    lead = (first[at], one) if at == 0 else (one, first[at])

    def back(after: Field) -> Random:
        """With the positions beside the batch again."""
        width, _, *sizes = after.shape
        others = tuple((Atom("position", (k + 1,), n),) if n > 1 else () for k, n in enumerate(sizes))
        return plain(build, Seen(after, (lead, (Atom("channel", (0,), width),), *others)))

    return f, back


def channel_by_channel(build: Builder, value: Seen, layer: Callable[[Random], Random]) -> Random:
    """What acts on each channel of axis 1 by itself, whatever the other axes are."""
    if len(value.axes) < 2 or not value.axes[1] or atoms_of(value.axes, "channel") != list(value.axes[1]):
        raise build.unsupported(*value.why())
    return plain(build, replace(value, of=layer(value.of)))
