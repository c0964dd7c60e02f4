"""Some of a value's channels, or all of them in another order: slices, chunks, channel shuffles.

Channels of one law are exchangeable, so some of them have the moments of all; different ones are independent given the
layers below. Which rows of the weights gave them is kept (`Rows`): parts that share a channel are correlated, and what
joins them is refused. Values side by side (torch.cat) are of several laws: each part gives the channels that are asked
of it, and where they then lie is kept too (`Memory.orders`), for the next slice.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from .fields import Builder
from .joins import add_fields, concat_channels
from .ops import Rescale, Weigh
from .positions import Pad, Permute, Pool, Regrid, Resample, Take, Total
from .values import Field, Joint, Lazy, Normed, Patched, Random, Rows, Unsettled, laid
from .windows import Parameters

F = TypeVar("F", bound=Lazy | Joint | Patched)


def take_channels(build: Builder, value: Random, rows: Sequence[int]) -> Random:
    """The channels of these numbers, in this order, each once."""
    if isinstance(value, Unsettled):
        raise build.unsupported(*value.why())
    if len(set(rows)) < len(rows):
        raise build.unsupported("takes a channel twice.", "Take each channel once; a Linear layer makes more of them.")
    if list(rows) == list(range(value.shape[value.channel])):
        return value
    if isinstance(value, (Lazy, Joint, Patched)):
        return _part_of_function(build, value, rows)
    if isinstance(value, Normed):  # each channel is normalised by itself
        return replace(value, of=_cut(build, value.of, rows))
    # A scale of each channel's own that was just applied still waits: each part has its own.
    f = value if isinstance(value, Field) else build.settled(value)
    if find_parts(build, f):
        return _of_parts(build, f, rows)
    part = _cut(build, f, rows)
    known = build.memory.functions.get(f.node)
    if known is not None and part.node not in build.memory.functions:
        build.memory.functions[part.node] = (
            _cut(build, known, rows) if isinstance(known, Field) else _function_of_rows(build, known, rows)
        )
    return part


def _part_of_function(build: Builder, value: Lazy | Joint | Patched, rows: Sequence[int]) -> Lazy | Joint | Patched:
    """The function of these channels of its fields. Its moments are those of the whole, and are computed once."""
    part = _function_of_rows(build, value, rows)
    whole, have = build.memory.wholes.get(value, (value, tuple(range(value.shape[value.channel]))))
    build.memory.wholes[part] = whole, tuple(have[r] for r in rows)
    return part


def _function_of_rows(build: Builder, value: F, rows: Sequence[int]) -> F:
    """The same function, of these channels of what it is of."""
    if isinstance(value, Lazy):
        whose = None if value.whose is None else _rows_of(value.whose, rows)
        return replace(value, of=_cut(build, value.of, rows), whose=whose)
    if isinstance(value, Joint):
        return replace(value, of=tuple(_cut(build, f, rows) for f in value.of))
    of = tuple(_cut(build, f, rows) if isinstance(f, Field) else _parameters(build, f, rows) for f in value.of)
    return replace(value, of=of, shape=_narrowed(value.shape, value.channel, len(rows)))


def _parameters(build: Builder, whole: Parameters, rows: Sequence[int]) -> Parameters:
    """The parameters of these channels: the same object for the same ones, for they are told apart by identity."""
    root, have = build.memory.shares.get(whole, (whole, None))
    numbers = tuple(rows) if have is None else tuple(have[r] for r in rows)
    if (root, numbers) not in build.memory.parameters:
        part = replace(root)
        build.memory.parameters[root, numbers] = part
        build.memory.shares[part] = root, numbers
    return build.memory.parameters[root, numbers]


def _cut(build: Builder, f: Field, rows: Sequence[int]) -> Field:
    """These channels of a field of one law; the same node for the same ones."""
    memory = build.memory
    base, numbers = f, tuple(rows)
    # All channels in another order are those of the first field: a shuffle and its inverse give the field itself.
    whole, order = memory.cuts.get(f.node, (f, ()))
    if len(order) == whole.width:
        base, numbers = whole, tuple(order[r] for r in rows)
    shape = _narrowed(f.shape, f.channel, len(numbers))
    gained = None if f.gained is None else _rows_of(f.gained, rows)
    if numbers == tuple(range(base.width)):
        return replace(base, shape=shape, channel=f.channel, gain=f.gain, gained=gained)
    if not base.alike:
        raise build.unsupported(
            f"takes {len(rows)} of {f.width} channels, which are not of one law (inputs, or joined from several layers "
            "or positions), after something that no longer tells which is which.",
            "Take them right after torch.cat, or before the values are joined or flattened.",
        )
    if (base.node, numbers) not in memory.rows:
        part = build.apply(Rescale(1.0), base, shape=_narrowed(base.shape, base.channel, len(numbers)))
        law = base.doubt if base.doubt is None or base.doubt.node != base.node else replace(base.doubt, node=part.node)
        sources = frozenset(_rows_of(s, numbers) for s in base.sources)
        through = frozenset(_rows_of(s, numbers) for s in base.through)
        memory.rows[base.node, numbers] = replace(part, sources=sources, through=through, doubt=law)
        memory.cuts[part.node] = base, numbers
    # The same channels may have been asked for when they lay on another axis.
    return replace(memory.rows[base.node, numbers], shape=shape, channel=f.channel, gain=f.gain, gained=gained)


def _rows_of(source: object, rows: Sequence[int]) -> Rows:
    """These rows of a source, or of those rows that it has already."""
    if not isinstance(source, Rows):
        return Rows(source, tuple(rows))
    return Rows(source.source, tuple(source.numbers[r] for r in rows))


def _of_parts(build: Builder, f: Field, rows: Sequence[int]) -> Random:
    """Channels of values that lie side by side: those of each part, side by side."""
    memory = build.memory
    order = memory.orders.get(f.node, range(f.width))
    wanted = [order[r] for r in rows]  # by their numbers among the parts' channels, one part after the other
    pieces: list[Random] = []
    numbers: list[int] = []
    start = 0
    for part in memory.parts[f.node]:
        width = part.shape[part.channel]
        own = sorted(k - start for k in wanted if start <= k < start + width)
        if own:
            part = part if part.channel == f.channel else laid(part, _narrowed(f.shape, f.channel, width), f.channel)
            if len(own) == len(wanted):  # of one part alone
                return take_channels(build, part, [k - start for k in wanted])
            pieces.append(take_channels(build, part, own))
            numbers += [start + k for k in own]
        start += width
    joined = concat_channels(build, pieces)
    place = {k: at for at, k in enumerate(numbers)}
    if numbers != wanted:
        memory.orders[joined.node] = tuple(place[k] for k in wanted)
    return replace(joined, gain=f.gain)


# What is done to the positions of each channel by itself.
_CHANNELWISE = (Pad, Permute, Pool, Regrid, Resample, Rescale, Take, Total, Weigh)


def find_parts(build: Builder, f: Field) -> bool:
    """Whether the values side by side in a field's channels are known, be it from before what was done to them all."""
    memory = build.memory
    if f.alike or f.node in memory.parts:
        return f.node in memory.parts
    op, before, summed = build.nodes[f.node].op, memory.before.get(f.node), memory.sums.get(f.node)
    if before is not None and isinstance(op, _CHANNELWISE) and find_parts(build, before):
        each = [build.settled(part) for part in memory.parts[before.node]]
        memory.parts[f.node] = [
            build.apply(op, part, shape=_narrowed(f.shape, f.channel, part.width), channel=f.channel) for part in each
        ]
        memory.orders[f.node] = memory.orders.get(before.node, tuple(range(f.width)))
    elif summed is not None:
        first = next((build.settled(v) for v in summed if not build.settled(v).alike), f)
        if first.node == f.node or not find_parts(build, first):
            return False
        order = memory.orders.get(first.node, range(f.width))
        numbers: list[int] = []
        start, parts = 0, []
        for width in (part.shape[part.channel] for part in memory.parts[first.node]):
            own = [k for k in range(f.width) if start <= order[k] < start + width]
            parts.append(add_fields(build, [take_channels(build, v, own) for v in summed]))
            numbers += own
            start += width
        memory.parts[f.node] = list(parts)
        memory.orders[f.node] = tuple(numbers.index(k) for k in range(f.width))
    return f.node in memory.parts


def each_part(build: Builder, f: Field, after: Callable[[Random], Random]) -> Field | None:
    """What is done to each channel by itself, done to each of the values side by side; None if f is a single one."""
    parts = build.memory.parts.get(f.node)
    if parts is None:
        return None
    joined = concat_channels(build, [after(part) for part in parts])
    if f.node in build.memory.orders:
        build.memory.orders[joined.node] = build.memory.orders[f.node]
    return joined


def _narrowed(shape: tuple[int, ...], channel: int, width: int) -> tuple[int, ...]:
    return (*shape[:channel], width, *shape[channel + 1 :])
