"""Layers that move or mix positions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from torch import Tensor, nn

from ...errors import InputError
from ..moments.core import RandomAffine
from ..moments.fields import Builder, Field, Value
from ..moments.functions import scale_by
from ..moments.joins import add_fields
from ..moments.positions import Resample, Spread, Window
from ..moments.shapes import take_positions
from .basic import Argument, Layer, Pair, Times, per_axis
from .weights import Weights, dotted


@dataclass(frozen=True)
class ConvTranspose(Layer):
    """A transposed convolution: zeros between the positions, then a convolution."""

    size: tuple[int, ...]
    stride: Pair = 1
    padding: Pair = 0
    output_padding: Pair = 0
    dilation: Pair = 1
    w_var: float | None = None
    b_var: float | None = None
    bias: bool = True
    width: int | None = None
    of: nn.Module | None = field(default=None, repr=False, compare=False)

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        f, dims = build.field(value, 0), len(self.size)
        if len(f.grid) != dims:
            raise InputError(f"{build.where}: a convolution over {dims} axes was given values of shape {f.shape}.")
        stride, padding, after, dilation = (
            per_axis(v, dims) for v in (self.stride, self.padding, self.output_padding, self.dilation)
        )
        if any(s != 1 for s in stride):
            spread = Spread(stride)
            f = build.apply(spread, f, shape=(f.width, *spread.grid(f.grid)))
        # The transpose of a convolution that pads by p is one that pads by its reach less p.
        reach = [d * (k - 1) for d, k in zip(dilation, self.size, strict=True)]
        pads = tuple((r - p, r - p + o) for r, p, o in zip(reach, padding, after, strict=True))
        if any(p < 0 for pair in pads for p in pair):
            raise build.unsupported("cuts more than its window reaches.", "Use padding ≤ dilation·(kernel_size − 1).")
        op = Window(self.size, (1,) * dims, pads, dilation)
        f = build.apply(op, f, shape=(f.width, *op.grid(f.grid)))
        patch = prod(self.size)
        tensors = (getattr(self.of, "weight", None), getattr(self.of, "bias", None))
        variances = (self.w_var, self.b_var)
        affine = weights.layer(name, f.width * patch, patch=patch, bias=self.bias, variances=variances, tensors=tensors)
        return build.affine(f, self.width or f.width, affine)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        kinds: tuple[Callable[..., nn.Module], ...] = (
            nn.LazyConvTranspose1d,
            nn.LazyConvTranspose2d,
            nn.LazyConvTranspose3d,
        )
        return kinds[len(self.size) - 1](
            self.width or width, self.size, self.stride, self.padding, self.output_padding, 1, self.bias, self.dilation
        )


@dataclass(frozen=True)
class Scale(Layer):
    """factor · x."""

    factor: float

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        return value * self.factor if isinstance(value, Tensor) else scale_by(build, value, self.factor)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return Times(self.factor)


@dataclass(frozen=True)
class Index(Layer):
    """Positions by numbers and slices, one for each axis of the grid: `Index(0)`, `Index(slice(1, 4), 2)`."""

    items: tuple[int | slice, ...]

    def __init__(self, *items: int | slice) -> None:
        object.__setattr__(self, "items", items)

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        f = build.settled(value)
        if len(self.items) != len(f.grid):
            raise InputError(
                f"{build.where}: {len(self.items)} indices for positions {f.grid}; give one for each axis."
            )
        dim = 0
        for item in self.items:
            # Indices are for the grid; the channels' axis is stepped over.
            dim += dim == f.channel
            if isinstance(item, slice):
                f = take_positions(build, f, dim, tuple(range(*item.indices(f.shape[dim]))), drop=False)
                dim += 1
            else:
                f = take_positions(build, f, dim, (item % f.shape[dim],), drop=True)
        return f

    def module(self, width: int) -> nn.Module:
        """Refused: torch has no such module."""
        raise InputError("Index has no finite module: index in forward().")


@dataclass(frozen=True)
class Positions(Layer):
    """x + p, with a parameter p of each position and channel, of variance `variance` (a learned position embedding)."""

    variance: float = 1.0

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        f = build.settled(value)
        # Independent of x, so the moments add: those of p are `variance` at equal positions.
        p = build.drawn(f.shape, f.channel)
        rate = weights.rate(dotted(name, "weight")) * (1.0 if weights.parametrization == "standard" else self.variance)
        return add_fields(build, [f, build.affine(p, f.width, RandomAffine(self.variance, 0.0, rate))])

    def module(self, width: int) -> nn.Module:
        """Refused: torch has no such module."""
        raise InputError("Positions has no finite module: add an nn.Parameter in forward().")


@dataclass(frozen=True)
class PositionMatrix(Layer):
    """A known matrix [out, in] over the positions of one axis, the same for all samples: P x."""

    matrix: Tensor
    axis: int = 0

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        f = build.settled(value)
        return resampled(build, f, {self.axis: self.matrix})

    def module(self, width: int) -> nn.Module:
        """Refused: torch has no such module."""
        raise InputError("PositionMatrix has no finite module: multiply in forward().")


def resampled(build: Builder, f: Field, matrices: dict[int, Tensor]) -> Field:
    """A known matrix [out, in] over the positions of each of these axes of the grid."""
    # As tuples, for operations are compared and hashed by their numbers.
    op = Resample(tuple(sorted((axis, _rows(matrix)) for axis, matrix in matrices.items())))
    grid = list(op.grid(f.grid))
    shape = [*grid[: f.channel], f.width, *grid[f.channel :]]
    return build.apply(op, f, shape=tuple(shape))


def _rows(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    """A matrix as numbers."""
    return tuple(tuple(row) for row in matrix.double().tolist())
