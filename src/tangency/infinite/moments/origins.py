"""What a value is as a function of Gaussian fields, where it is one: what follows elementwise is applied to that."""

from collections.abc import Callable

from torch import Tensor

from .fields import Builder
from .values import Field, Joint, Lazy, Value

Origin = tuple[tuple[Field, ...], Callable[..., Tensor]]


def gaussian_origin(build: Builder, value: Value) -> Origin | None:
    """The Gaussian fields that a value is an elementwise function of, and that function; None if it is none."""
    memory = build.memory
    if isinstance(value, Field) and not value.gaussian:
        joint = memory.functions.get(value.node)
        return (joint.of, joint.fn) if isinstance(joint, Joint) else None
    if isinstance(value, Field):
        before, factor = memory.multiples.get(value.node, (value, 1.0))
        return (before,), _itself if factor == 1 else lambda x: factor * x
    if isinstance(value, Lazy):
        fn, scale = value.fn, value.scale
        before, factor = memory.multiples.get(value.of.node, (value.of, 1.0))
        return (before,), lambda x: scale * fn(factor * x)
    return (value.of, value.fn) if isinstance(value, Joint) else None


def _itself(x: Tensor) -> Tensor:
    return x
