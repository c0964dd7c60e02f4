"""What is done with the positions of fields: merged into channels, put on another grid, picked, weighed, masked."""

from dataclasses import replace
from math import prod
from typing import TypeVar

from torch import Tensor

from .carried import carry_windows
from .fields import Builder
from .ops import Weigh
from .positions import Regrid, Take, Trace
from .values import Field, Random

V = TypeVar("V")


def flatten_positions(build: Builder, f: Field, axes: tuple[int, ...]) -> Field:
    """Positions on `axes` of the grid become channels, at the place of the first axis that goes."""
    dims = [k for k in range(len(f.shape)) if k != f.channel]
    gone = sorted([f.channel, *(dims[a] for a in axes)])
    width = prod(f.shape[k] for k in gone)
    rest = [k for k in range(len(f.shape)) if k not in gone]
    channel = sum(k < gone[0] for k in rest)
    shape = [f.shape[k] for k in rest]
    shape.insert(channel, width)
    # Channels of different positions have different laws, so they are no longer Gaussian as one
    return build.apply(Trace(axes), f, shape=tuple(shape), channel=channel, gaussian=f.gaussian and not axes)


def regrid(build: Builder, f: Field, shape: tuple[int, ...], channel: int) -> Field:
    """The field with this shape: positions merged or split, in order."""
    grid = (*shape[:channel], *shape[channel + 1 :])
    if grid == f.grid:
        return replace(f, shape=shape, channel=channel)
    return carry_windows(build, f, build.apply(Regrid(grid), f, shape=shape, channel=channel))


def take_positions(build: Builder, f: Field, dim: int, index: tuple[int, ...], drop: bool) -> Field:
    """Positions along axis `dim` of shape; the axis goes if `drop`."""
    shape = (*f.shape[:dim], *(() if drop else (len(index),)), *f.shape[dim + 1 :])
    channel = f.channel - (drop and dim < f.channel)
    return build.apply(Take(f.axis(dim), index, drop), f, shape=shape, channel=channel)


def weigh_by(build: Builder, value: Random, weights: Tensor) -> Field:
    """Times a known tensor [n, *shape] that is the same for all channels."""
    f = value if isinstance(value, Field) else build.settled(value)  # a scale that was just applied still waits
    # Samples last, as all known tensors; the channels' axis has size 1 or repeats one number.
    moved = weights.double().movedim(0, -1).select(f.channel, 0)
    return build.apply(Weigh(build.slot(moved.expand(*f.grid, moved.shape[-1]))), f)


def mask_out(build: Builder, value: V) -> V | Field:
    """The value with zeros where no position is real."""
    if build.mask is None or not isinstance(value, Random):
        return value
    f = value if isinstance(value, Field) else build.settled(value)
    if tuple(build.mask.shape[1:]) != f.grid:
        return value
    return build.apply(Weigh(build.slot(build.mask.double().movedim(0, -1))), f)
