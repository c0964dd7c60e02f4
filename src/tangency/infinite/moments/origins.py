"""What a value is as a function of Gaussian fields, where it is one: what follows elementwise is applied to that."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .fields import Builder
from .positions import Permute, Regrid, Take
from .values import Field, Joint, Lazy, Patched, Value, laid

Origin = tuple[tuple[Field, ...], Callable[..., Tensor]]


def gaussian_origin(build: Builder, value: Value) -> Origin | None:
    """The Gaussian fields that a value is an elementwise function of, and that function; None if it is none."""
    memory = build.memory
    if isinstance(value, Field) and not value.gaussian:
        found = found_function(build, value)
        if found is None:
            return None
        value = found
    if isinstance(value, Field):
        before, factor = memory.multiples.get(value.node, (value, 1.0))
        return (before,), _itself if factor == 1 else lambda x: factor * x
    if isinstance(value, Lazy):
        fn, scale = value.fn, value.scale
        before, factor = memory.multiples.get(value.of.node, (value.of, 1.0))
        return (before,), lambda x: scale * fn(factor * x)
    return (value.of, value.fn) if isinstance(value, Joint) else None


def found_function(build: Builder, f: Field) -> Lazy | Joint | None:
    """What a field that is not Gaussian is as a function of Gaussian ones, be it from before its positions moved."""
    memory = build.memory
    known = memory.functions.get(f.node) or memory.lazies.get(f.node)
    if isinstance(known, (Lazy, Joint)) and known.channel != f.channel:  # the channels alone have moved since
        found = laid(known, f.shape, f.channel)
        assert isinstance(found, (Lazy, Joint))
        return found
    if known is not None:
        return None if isinstance(known, Patched) else known
    before, op = memory.before.get(f.node), build.nodes[f.node].op
    inner = found_function(build, before) if before is not None and isinstance(op, (Permute, Regrid, Take)) else None
    if inner is None:
        return None
    of = inner.of if isinstance(inner, Joint) else (inner.of,)
    moved = tuple(build.apply(op, g, shape=f.shape, channel=f.channel) for g in of)
    if isinstance(inner, Lazy):
        memory.lazies[f.node] = lazy = replace(inner, of=moved[0])
        return lazy
    memory.functions[f.node] = joint = replace(inner, of=moved)
    return joint


def _itself(x: Tensor) -> Tensor:
    return x
