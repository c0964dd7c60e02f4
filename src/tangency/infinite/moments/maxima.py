"""The maximum over windows of positions (max pooling), and norms at their start, of what may be such a maximum."""

from dataclasses import replace

from torch import Tensor

from ..activations.dual import Relu
from .channels import each_part
from .core import RUNNING, RandomAffine
from .fields import Builder
from .functions import apply_function, scale_by
from .origins import function_of
from .patches import AVERAGE, as_patches, checked_patches, scaled_patches
from .values import Field, Lazy, Patched, Random
from .windows import Windows


def max_over(build: Builder, value: Random, windows: Windows, shape: tuple[int, ...], channel: int) -> Random:
    """The maximum over windows of positions, as a function of the fields that the value is of.

    The limit is that of infinitely many channels, each with its own maximum; windows stay as large as they are.
    """
    if isinstance(value, Field):
        pooled = each_part(
            build, value, lambda part: max_over(build, part, windows, _narrower(shape, channel, part), channel)
        )
        if pooled is not None:
            return replace(pooled, shape=shape, channel=channel)
        value = function_of(build, value) or value
    if value in build.memory.maxima:  # the maximum of maxima is one over all that they see
        value, inner = build.memory.maxima[value]
        windows = inner.within(windows).without_copies()
    largest = build.of_this_layer(_maximum(build, value, windows, shape, channel))
    build.memory.maxima[largest] = value, windows
    return largest


def _maximum(build: Builder, value: Random, windows: Windows, shape: tuple[int, ...], channel: int) -> Random:
    if isinstance(value, Lazy) and value.dual == Relu() and value.scale > 0 and not value.rate:
        # ReLU is monotone: of the maximum it costs a window's size less.
        before = _maximum(build, value.of, windows, shape, channel)
        return scale_by(build, apply_function(build, before, value.fn, value.dual, value.label), value.scale)
    patches = as_patches(build, value)
    if patches is None:
        raise build.unsupported(
            "takes the maximum over positions of values that are no function of Gaussian ones.",
            f"Put it after a Linear or Conv layer, its norm or its activation. {AVERAGE}.",
        )
    sizes, inner = [w.size for w in patches.at], patches.fn

    def largest(*x: Tensor) -> Tensor:
        """Of g at each position of the window."""
        each = (v.unflatten(0, (windows.size, k)).transpose(0, 1) for v, k in zip(x, sizes, strict=True))
        return inner(*each).amax(0)

    at = tuple(w.within(windows) for w in patches.at)
    return checked_patches(build, Patched(patches.of, at, largest, shape, channel, "max"))


def _narrower(shape: tuple[int, ...], channel: int, part: Random) -> tuple[int, ...]:
    return (*shape[:channel], part.shape[part.channel], *shape[channel + 1 :])


def scale_and_shift(build: Builder, value: Random, variance: float, rates: tuple[float, float]) -> Field:
    """√variance·y, then a scale of 1 and a shift of 0 of each channel's own, trained at these rates.

    What is a function of Gaussian fields stays one, for an activation that follows.
    """
    f = build.settled(value)
    normed = each_part(build, f, lambda part: scale_and_shift(build, part, variance, rates))
    if normed is not None:
        return replace(normed, shape=f.shape, channel=f.channel)
    op, scale = RandomAffine(variance, 0.0, 0.0, rates[1], means=RUNNING), RandomAffine(1.0, 0.0, rates[0])
    after = build.trained_pass(op, f, build.identity(op))
    after = replace(after, gain=rates[0], gained=build.identity(scale) if rates[0] else None)
    function = None if f.gaussian else scaled_patches(build, value, variance**0.5, rates)
    if function is not None:
        build.memory.functions[after.node] = function
    return after
