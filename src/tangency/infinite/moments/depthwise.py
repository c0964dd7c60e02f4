"""Depthwise convolutions: one filter for each channel, which does not mix them."""

from dataclasses import replace
from itertools import product
from math import prod

from torch import Tensor

from .core import Grid, RandomAffine
from .fields import Builder
from .patches import as_patches
from .positions import Window
from .values import Field, Lazy, Random
from .windows import WIDEST, Core, Parameters, Windows, place_of

# Positions up to which the exact moments of what is convolved are computed for the sake of a smaller error (heuristic:
# for more of them, or for functions without a quick closed form, they cost as much as the draws).
EXACT = 64


def as_depthwise(build: Builder, value: Random, after: Field, window: Window, op: RandomAffine) -> Field:
    """The field after a depthwise convolution of `value`, for what follows: z(p) = Σ_k w_k h(p + k) + b.

    The limit: infinitely many channels, each with a filter of its own that stays as large as it is. So z is not
    Gaussian; for an activation it is a function of the Gaussian fields that h is of, and of w and b. Where h is none,
    or the windows are too large to draw, only moments are known.
    """
    f = build.settled(value)
    after = replace(after, gaussian=False, through=f.sources | f.through)
    grid = (*value.shape[: value.channel], *value.shape[value.channel + 1 :])
    patches = as_patches(build, value)
    if patches is None or "other" in op.laws or patches.width * prod(window.size) > WIDEST:
        return after
    seen, filters = _entries(grid, window)
    weights = Parameters(prod(window.size), 0.0, op.w_var**0.5, op.w_rate, op.laws[0] == "uniform")
    bias = Parameters(1, 0.0, op.b_var**0.5, op.b_rate, op.laws[1] == "uniform")
    one = Windows(seen.grid, ((0,),) * len(seen.index))
    sizes, inner = [w.size for w in patches.at], patches.fn

    def convolved(*x: Tensor) -> Tensor:
        """Weights and bias come last."""
        *values, w, b = x
        each = (v.unflatten(0, (seen.size, k)).transpose(0, 1) for v, k in zip(values, sizes, strict=True))
        return (w * inner(*each)).sum(0) + b[0]

    # Moments of z that are exact are worth more than drawn ones.
    core = Core(convolved, lambda z, *_: z) if _has_quick_moments(value) and prod(grid) <= EXACT else None
    of, at = (*patches.of, weights, bias), (*(w.within(seen) for w in patches.at), filters, one)
    build.memory.functions[after.node] = replace(
        patches, of=of, at=at, fn=convolved, shape=after.shape, channel=after.channel, label="depthwise",
        core=core, known=after if core else None,
    )  # fmt: skip
    return after


def _has_quick_moments(value: Random) -> bool:
    """Whether the moments of a value are those of a Gaussian field, or of ReLU and its kin of one."""
    if isinstance(value, Lazy):
        return value.dual is not None and value.dual.homogeneous
    return isinstance(value, Field) and value.gaussian


def _entries(grid: Grid, window: Window) -> tuple[Windows, Windows]:
    """For each window, its positions and the filter's numbers; outside of the grid any position, and no number."""
    axes = []
    for n, size, stride, pad, dilation in zip(
        grid, window.size, window.stride, window.padding, window.dilation, strict=True
    ):
        count = (n + sum(pad) - dilation * (size - 1) - 1) // stride + 1
        starts = [w * stride - pad[0] for w in range(count)]
        axes.append(
            [[(s + k * dilation) % n if window.circular else s + k * dilation for k in range(size)] for s in starts]
        )
    positions, numbers = [], []
    for box in product(*axes):
        inside = [all(0 <= p < n for p, n in zip(at, grid, strict=True)) for at in product(*box)]
        places = [place_of(grid, at) for at in product(*box)]
        # A position that is there stands for those that are not; their weight is 0.
        spare = next((p for p, here in zip(places, inside, strict=True) if here), 0)
        positions.append(tuple(p if here else spare for p, here in zip(places, inside, strict=True)))
        numbers.append(tuple(k if here else -1 for k, here in enumerate(inside)))
    sizes = tuple(len(windows) for windows in axes)
    return Windows(sizes, tuple(positions)), Windows(sizes, tuple(numbers))
