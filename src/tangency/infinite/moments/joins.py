"""Several values become one: sums, products, concatenation; and what correlated ones have in common.

Where a sum or product is not Gaussian, what it is as a function of Gaussian fields is remembered: an activation that
follows is applied to that function (a post-activation ResNet's ReLU(ReLU(u) + z)).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import UnsupportedModule
from .carried import repeated_windows
from .correlations import Correlations, NotKnown
from .crossed import CorrelatedAdd, CorrelatedJoin, CorrelatedMultiply
from .fields import Builder
from .nongaussian import first_doubt
from .ops import Add, Mix, Multiply
from .origins import Origin, gaussian_origin
from .patches import is_patched, joined_patches
from .positions import Join
from .recursion import Node
from .shapes import take_positions
from .values import Field, Joint, Lazy, Patched, Random, Value, all_sources, correlated, dependent, overlapping


def joined_function(
    build: Builder, values: Sequence[Value], op: Callable[[Tensor, Tensor], Tensor]
) -> Joint | Patched | None:
    """Values that are functions of independent Gaussian fields, as one function of all of them."""
    if any(is_patched(build, value) for value in values):
        patches = joined_patches(build, values, op)
        return None if patches is None or _related(build, patches.fields) else patches
    origins: list[Origin] = []
    fields: list[Field] = []
    for value in values:
        known = gaussian_origin(build, value)
        if known is None:
            return None
        origins.append(known)
        if any(f.node == g.node and f.gain != g.gain for f in known[0] for g in fields):
            return None  # the same values with a trained scale and without
        fields += [f for f in known[0] if all(f.node != g.node for g in fields)]
    # Uncorrelated Gaussian fields are independent; for others the joint law is not known here. One norm's trained scale
    # moves two fields at once, which is not in the slopes of each.
    if _related(build, fields):
        return None
    index = {f.node: k for k, f in enumerate(fields)}
    # Functions and places alone: what another call makes of the same code is then the same function (`equal_ops.py`).
    functions, places = [fn for _, fn in origins], [tuple(index[f.node] for f in of) for of, _ in origins]

    def together(*x: Tensor) -> Tensor:
        """The sum (or product) of all functions, each of its own fields."""
        parts = [fn(*(x[k] for k in place)) for fn, place in zip(functions, places, strict=True)]
        total = parts[0]
        for v in parts[1:]:
            total = op(total, v)
        return total

    return Joint(tuple(fields), together, "joint")


def as_fields(build: Builder, values: Sequence[Value]) -> list[Field]:
    """Values as fields, known ones with the channels where the others have theirs."""
    channel = next((v.channel for v in values if not isinstance(v, Tensor)), None)
    if channel is None:
        raise build.unsupported("joins inputs.", "Put a layer with weights into one of the branches.")
    return [build.field(v, channel) if isinstance(v, Tensor) else build.settled(v) for v in values]


def add_fields(build: Builder, values: Sequence[Value]) -> Field:
    """The sum of values: of correlated ones, with what each two of them have in common."""
    values = _broadcast(build, values)
    fields = as_fields(build, values)
    _check_alike(build, fields, "adds")
    gaussian, centered = all(f.gaussian for f in fields), all(f.centered for f in fields)
    apart = not _related(build, fields)
    # A sum of Gaussian fields is one itself; what follows needs no function of several.
    joint = None if gaussian else joined_function(build, values, torch.add)
    if sum(not f.centered for f in fields) > 1 and joint is not None and apart:
        return build.settled(joint)
    try:
        common = [node for node in _in_common(build, fields, "adds").values() if node is not None]
    except UnsupportedModule:
        if joint is None:
            raise
        return build.settled(joint)  # of the same fields (a highway's gates), which are drawn together
    if common:
        nodes = [*(f.node for f in fields), *common]
        build.nodes.append(Node(CorrelatedAdd(len(fields)), tuple(nodes), build.name, fields[0].grid))
        node = len(build.nodes) - 1
    else:
        node = build.add(Add(), fields, fields[0].grid)
    if joint is not None:
        build.memory.functions[node] = joint
    if not all_alike(fields):
        build.memory.sums[node] = [f if isinstance(v, Tensor) else v for f, v in zip(fields, values, strict=True)]
    law = first_doubt([f.doubt for f in fields])
    return replace(
        fields[0], node=node, gaussian=gaussian, centered=centered, sources=all_sources(fields), few=False, doubt=law,
        alike=all_alike(fields), through=_all_through(fields),
    )  # fmt: skip


def multiply_fields(build: Builder, values: Sequence[Value]) -> Field:
    """The product of values, elementwise: a gate, whose one position may serve all of the other's."""
    values = _broadcast(build, values)
    fields = as_fields(build, values)
    _check_alike(build, fields, "multiplies")
    shared = any(correlated(a, b) for k, a in enumerate(fields) for b in fields[:k])
    product = _correlated_product(build, fields) if shared else None
    if product is not None:
        return product
    if any(dependent(a, b) for k, a in enumerate(fields) for b in fields[:k]):
        raise build.unsupported(
            "multiplies values by a depthwise convolution of the same ones, which are not independent.",
            "Put a Conv layer with groups=1 into one of the branches, or use smaller windows.",
        )
    related = _related(build, fields)
    if related and not shared:
        raise _too_close(build, "multiplies", "one norm's trained scale or shift is in both")
    node = build.add(Multiply(), fields, fields[0].grid)
    if any(f.gaussian and f.centered for f in fields) and not related:
        build.memory.dotted.add(node)
    joint = None if related else joined_function(build, values, torch.mul)
    if joint is not None:
        build.memory.functions[node] = joint
    centered = any(f.centered for f in fields)
    after = replace(fields[0].activated(), node=node, centered=centered, sources=all_sources(fields))
    return replace(after, alike=all_alike(fields), through=_all_through(fields))


def _correlated_product(build: Builder, fields: Sequence[Field]) -> Field | None:
    """The product of two Gaussian values that share weights; None where these are independent all the same."""
    if len(fields) != 2 or not all(f.gaussian and f.centered for f in fields):
        raise _too_close(build, "multiplies", "their product is known right after a Linear or Conv layer")
    common = [node for node in _in_common(build, fields, "multiplies").values() if node is not None]
    if not common:
        return None
    nodes = (*(f.node for f in fields), *common)
    build.nodes.append(Node(CorrelatedMultiply(), nodes, build.name, fields[0].grid))
    return replace(fields[0].activated(), node=len(build.nodes) - 1, sources=all_sources(fields))


def _broadcast(build: Builder, values: Sequence[Value]) -> Sequence[Value]:
    """Positions of size 1 repeated, as torch does: g[:, :, None, None] beside [batch, channels, height, width]."""
    shapes = {tuple(v.shape[1:]) if isinstance(v, Tensor) else v.shape for v in values}
    if len(shapes) == 1 or len({len(s) for s in shapes}) > 1:
        return values
    full = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    return [v if isinstance(v, Tensor) else _repeated(build, v, full) for v in values]


def _repeated(build: Builder, value: Random, full: tuple[int, ...]) -> Random:
    """The value with its positions of size 1 repeated; an elementwise function stays one, of the repeated field."""
    if value.shape == full:  # as it is: a scale that was just applied still waits
        return value
    if isinstance(value, Patched):
        return repeated_windows(value, full)
    if isinstance(value, Lazy):
        return replace(value, of=_repeated_field(build, value.of, full))
    if isinstance(value, Joint):
        return replace(value, of=tuple(_repeated_field(build, f, full) for f in value.of))
    return _repeated_field(build, build.settled(value), full)


def _repeated_field(build: Builder, f: Field, full: tuple[int, ...]) -> Field:
    for dim, (have, want) in enumerate(zip(f.shape, full, strict=True)):
        if have == 1 and want > 1 and dim != f.channel:
            f = take_positions(build, f, dim, (0,) * want, drop=False)
    return f


def concat_channels(build: Builder, values: Sequence[Value]) -> Field:
    """Channels side by side. An activation that follows is applied to each part by itself."""
    fields = as_fields(build, values)
    first, total = fields[0], sum(f.width for f in fields)
    # Widths are finite here only to say which part of the channels each branch has.
    node = build.add(Mix(tuple(f.width / total for f in fields)), fields, first.grid)
    parts: list[Random] = [f if isinstance(v, Tensor) else v for f, v in zip(fields, values, strict=True)]
    build.memory.parts[node] = parts
    shape = (*first.shape[: first.channel], total, *first.shape[first.channel + 1 :])
    centered = all(f.centered for f in fields)
    return Field(
        node, shape, first.channel, False, centered, all_sources(fields), alike=False, through=_all_through(fields)
    )


def concat_positions(build: Builder, fields: Sequence[Field], axis: int) -> Field:
    """Positions side by side along an axis of the grid."""
    common = {at: node for at, node in _in_common(build, fields, "joins").items() if node is not None}
    first = fields[0]
    dim = axis + (axis >= first.channel)
    shape = (*first.shape[:dim], sum(f.shape[dim] for f in fields), *first.shape[dim + 1 :])
    grid = (*shape[: first.channel], *shape[first.channel + 1 :])
    if common:
        nodes = (*(f.node for f in fields), *common.values())
        build.nodes.append(Node(CorrelatedJoin(axis, tuple(common)), nodes, build.name, grid))
        node = len(build.nodes) - 1
    else:
        node = build.add(Join(axis), fields, grid)
    gaussian, centered = all(f.gaussian for f in fields), all(f.centered for f in fields)
    law = first_doubt([f.doubt for f in fields])
    sources, alike = all_sources(fields), all_alike(fields)
    through = _all_through(fields)
    return Field(node, shape, first.channel, gaussian, centered, sources, doubt=law, alike=alike, through=through)


def _all_through(fields: Sequence[Field]) -> frozenset[object]:
    return frozenset().union(*(f.through for f in fields))


def all_alike(fields: Sequence[Field]) -> bool:
    """Whether what is made of these, channel by channel, is of one law."""
    return all(f.alike for f in fields)


def _in_common(build: Builder, fields: Sequence[Field], what: str) -> dict[tuple[int, int], int | None]:
    """By two of the fields' places: the moments of one with the other, where these are not zero for certain."""
    common: dict[tuple[int, int], int | None] = {}
    known = Correlations(build)
    for k, a in enumerate(fields):
        for n, b in enumerate(fields):
            close = correlated(a, b) or known.related(a.node, b.node)
            # Means that are not zero multiply into the covariance.
            if k == n or not (close or not (a.centered or b.centered)):
                continue
            try:
                common[k, n] = known.meet(a.node, b.node)
            except NotKnown as e:
                if close:
                    raise _too_close(build, what, str(e)) from e
                raise build.unsupported(
                    f"{what} two values whose means are not zero ({e}).",
                    "Put a Linear or Conv layer after one of the activations.",
                ) from e
    return common


def _related(build: Builder, fields: Sequence[Field]) -> bool:
    """Whether any two of them share weights, or a norm's trained scale or shift."""
    known = Correlations(build)
    return any(
        correlated(a, b) or known.related(a.node, b.node) or _same_scale(a, b)
        for k, a in enumerate(fields)
        for b in fields[:k]
    )


def _same_scale(a: Field, b: Field) -> bool:
    """Whether one trained scale waits on both."""
    return a.gained is not None and b.gained is not None and overlapping(a.gained, b.gained)


def _too_close(build: Builder, what: str, why: str) -> UnsupportedModule:
    return build.unsupported(
        f"{what} two values that share their last weights, so that they are correlated: {why}.",
        "Put a Linear or Conv layer into one of the branches.",
    )


def _check_alike(build: Builder, fields: Sequence[Field], what: str) -> None:
    if len({(f.shape, f.channel) for f in fields}) > 1:
        raise build.unsupported(
            f"{what} values of shapes {[f.shape for f in fields]}, channels on {[f.channel + 1 for f in fields]}.",
            "Give both the same axes, the channels in the same place; positions of size 1 are repeated.",
        )
