"""What a value is as a function of Gaussian fields, where it is one: what follows elementwise is applied to that."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .fields import Builder
from .values import Field, Joint, Lazy, Patched, Value

Origin = tuple[tuple[Field, ...], Callable[..., Tensor]]


def gaussian_origin(build: Builder, value: Value) -> Origin | None:
    """The Gaussian fields that a value is an elementwise function of, and that function; None if it is none."""
    memory = build.memory
    if isinstance(value, Field) and not value.gaussian:
        known = function_of(build, value)
        return None if known is None else gaussian_origin(build, known)
    if isinstance(value, Field):
        before, factor = memory.multiples.get(value.node, (value, 1.0))
        return (before,), _itself if factor == 1 else lambda x: factor * x
    if isinstance(value, Lazy):
        fn, scale = value.fn, value.scale
        before, factor = memory.multiples.get(value.of.node, (value.of, 1.0))
        return (before,), lambda x: scale * fn(factor * x)
    return (value.of, value.fn) if isinstance(value, Joint) else None


def function_of(build: Builder, value: Field) -> Joint | Patched | Field | None:
    """What is known of a field as a function of Gaussian ones, along the field's own axes; None if it is none."""
    known, shape, channel = build.memory.functions.get(value.node), value.shape, value.channel
    if known is None or (known.shape, known.channel) == (shape, channel):
        return known
    # The channels were moved since: positions are in the same order, or it would be another node.
    if isinstance(known, Joint):
        return replace(known, of=tuple(replace(f, shape=shape, channel=channel) for f in known.of))
    return replace(known, shape=shape, channel=channel)


def _itself(x: Tensor) -> Tensor:
    return x
