"""Functions of windows that stay functions where positions are repeated or padded (moved ones: `origins.py`).

What follows elementwise, or over windows again, is then drawn from the same Gaussian fields.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from torch import Tensor

from .fields import Builder
from .patches import as_patches
from .values import Field, Patched, Random
from .windows import MOST, Parameters, Windows, place_of


def repeated_windows(value: Patched, full: tuple[int, ...]) -> Patched:
    """The function with its positions of size 1 repeated."""
    old = value.at[0].grid
    grid = (*full[: value.channel], *full[value.channel + 1 :])
    places = product(*(range(n) if n == m else (0,) * m for n, m in zip(old, grid, strict=True)))
    seen = Windows(grid, tuple((place_of(old, at),) for at in places))
    at = tuple(windows.within(seen) for windows in value.at)
    shape = tuple(n if k == value.channel else m for k, (n, m) in enumerate(zip(value.shape, full, strict=True)))
    return replace(value, at=at, shape=shape, core=None, known=None)  # whose moments are of fewer positions


def carry_padded(build: Builder, value: Random, after: Field, padding: Sequence[tuple[int, int]]) -> Field:
    """The field with zeros around: a function that is 0 there, for depthwise layers that follow (TensorFlow's padding).

    A Gaussian field stays one, of no variance there.
    """
    old = (*value.shape[: value.channel], *value.shape[value.channel + 1 :])
    if after.gaussian or len(places := list(product(*map(range, after.grid)))) > 4 * MOST:
        return after
    patches = as_patches(build, value)
    if patches is None:
        return after
    moved = [tuple(p - before for p, (before, _) in zip(at, padding, strict=True)) for at in places]
    inside = [all(0 <= p < n for p, n in zip(at, old, strict=True)) for at in moved]
    seen = Windows(
        after.grid, tuple((place_of(old, at) if here else 0,) for at, here in zip(moved, inside, strict=True))
    )
    # A parameter that is 1, and nothing outside.
    one, inner = Parameters(1, 1.0, 0.0, 0.0), patches.fn
    mask = Windows(after.grid, tuple((0,) if here else (-1,) for here in inside))

    def surrounded(*x: Tensor) -> Tensor:
        """The mask comes last."""
        return x[-1][0] * inner(*x[:-1])

    at = (*(windows.within(seen) for windows in patches.at), mask)
    build.memory.functions[after.node] = Patched(
        (*patches.of, one), at, surrounded, after.shape, after.channel, f"padded {patches.label}"
    )
    return after
