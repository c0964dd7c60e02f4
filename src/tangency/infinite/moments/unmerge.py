"""Channels that become positions (PixelShuffle, Unflatten): each new position has channels of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from .core import Here, Moments, Op
from .fields import Builder
from .positions import Permute
from .values import Field, Lazy, Random


@dataclass(frozen=True)
class Unmerge(Op):
    """New last axes of the grid, of these sizes: different positions on them are independent, and alike."""

    sizes: tuple[int, ...]
    what: ClassVar[str] = "channels to positions"
    limit: ClassVar[str] = "channels → ∞ at every new position, each with channels of its own: independent"
    linear: ClassVar[bool] = True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        grid, d, k = (*s.grid, *self.sizes), len(s.grid), len(self.sizes)
        whole = here.whole(grid)

        def spread(v: Tensor) -> Tensor:
            """A covariance with the new axes, on each side."""
            if not whole:
                pairs = v.shape[d:]
                return v.reshape(*s.grid, *[1] * k, *pairs).expand(*grid, *pairs)
            pairs = v.shape[2 * d :]
            eye = torch.eye(prod(self.sizes), dtype=v.dtype, device=v.device)
            eye = eye.view(*[1] * d, *self.sizes, *[1] * d, *self.sizes, *[1] * len(pairs))
            return v.reshape(*s.grid, *[1] * k, *s.grid, *[1] * k, *pairs) * eye

        ntk = None if s.ntk is None else spread(s.ntk)
        return Moments(spread(s.cov), ntk, grid, whole)


def channels_to_positions(build: Builder, value: Random, sizes: tuple[int, ...]) -> Field | Lazy:
    """The value with the last factors of its channels, of these sizes, as positions right after the channels' axis."""
    if isinstance(value, Lazy):  # within the function: of one channel it is the same
        inner = channels_to_positions(build, value.of, sizes)
        assert isinstance(inner, Field)
        return replace(value, of=inner)
    f = value if isinstance(value, Field) else build.settled(value)
    if not f.alike:
        raise build.unsupported(
            "makes positions of channels that were joined from several layers, and are not of one law.",
            "Put a Conv or Linear layer after torch.cat.",
        )
    if not f.centered:
        raise build.unsupported(
            "makes positions of channels whose mean is not zero.", "Put it right after a Conv or Linear layer."
        )
    width, before, after = f.width // prod(sizes), f.shape[: f.channel], f.shape[f.channel + 1 :]
    out = build.apply(Unmerge(sizes), f, shape=(*before, width, *after, *sizes))
    if not after:
        return out
    # From behind the other positions to right after the channels.
    b, a, k = len(before), len(after), len(sizes)
    order = (*range(b), *range(b + a, b + a + k), *range(b, b + a))
    return build.apply(Permute(order), out, shape=(*before, width, *sizes, *after))
