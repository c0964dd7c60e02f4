"""Layers that move, mix or mask positions."""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import InputError
from ..moments.fields import Builder, Field
from ..moments.ops import Affine
from ..moments.positions import Patch, Resample, Spread
from ..reading.modules import reads
from .basic import Layer, Pair, Times, each
from .compose import Serial, as_layer, inside
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

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Field:
        f, dims = build.field(value, 0), len(self.size)
        if len(f.grid) != dims:
            raise InputError(f"{build.where}: a convolution over {dims} axes was given values of shape {f.shape}.")
        stride, padding, more, dilation = (
            each(v, dims) for v in (self.stride, self.padding, self.output_padding, self.dilation)
        )
        if any(s != 1 for s in stride):
            spread = Spread(stride)
            f = build.same(spread, f, shape=(f.width, *spread.grid(f.grid)))
        reach = [d * (k - 1) for d, k in zip(dilation, self.size, strict=True)]
        pads = tuple((r - p, r - p + o) for r, p, o in zip(reach, padding, more, strict=True))
        if any(p < 0 for pair in pads for p in pair):
            raise build.unsupported("cuts more than its window reaches.", "Use padding ≤ dilation·(kernel_size − 1).")
        op = Patch(self.size, (1,) * dims, pads, dilation)
        f = build.same(op, f, shape=(f.width, *op.grid(f.grid)))
        patch = prod(self.size)
        tensors, own = (getattr(self.of, "weight", None), getattr(self.of, "bias", None)), (self.w_var, self.b_var)
        affine = weights.layer(name, f.width * patch, patch=patch, bias=self.bias, own=own, tensors=tensors)
        return build.affine(f, self.width or f.width, affine)

    def module(self, width: int) -> nn.Module:
        kinds: tuple[Any, ...] = (nn.LazyConvTranspose1d, nn.LazyConvTranspose2d, nn.LazyConvTranspose3d)
        return kinds[len(self.size) - 1](
            self.width or width, self.size, self.stride, self.padding, self.output_padding, 1, self.bias, self.dilation
        )


@reads(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _conv_transpose(m: Any, build: Builder, weights: Weights, name: str, args: Any) -> Any:
    if m.groups > 1:
        raise build.unsupported("has groups.", "Use groups=1.")
    layer = ConvTranspose(
        tuple(m.kernel_size), m.stride, m.padding, m.output_padding, m.dilation,
        bias=m.bias is not None, width=m.out_channels, of=m,
    )  # fmt: skip
    return layer.grow(build, args[0], weights, name)


@dataclass(frozen=True)
class Scale(Layer):
    """factor · x."""

    factor: float

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        return value * self.factor if isinstance(value, Tensor) else build.scaled(value, self.factor)

    def module(self, width: int) -> nn.Module:
        return Times(self.factor)


@dataclass(frozen=True)
class Index(Layer):
    """Positions by numbers and slices, one for each axis of the grid: `Index(0)`, `Index(slice(1, 4), 2)`."""

    items: tuple[int | slice, ...]

    def __init__(self, *items: int | slice) -> None:
        object.__setattr__(self, "items", items)

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        f = build.settled(value)
        if len(self.items) != len(f.grid):
            raise InputError(
                f"{build.where}: {len(self.items)} indices for positions {f.grid}; give one for each axis."
            )
        dim = 0
        for item in self.items:
            dim += dim == f.channel
            if isinstance(item, slice):
                f = build.take(f, dim, tuple(range(*item.indices(f.shape[dim]))), drop=False)
                dim += 1
            else:
                f = build.take(f, dim, (item % f.shape[dim],), drop=True)
        return f

    def module(self, width: int) -> nn.Module:
        raise InputError("Index has no finite module: index in forward().")


@dataclass(frozen=True)
class Positions(Layer):
    """x + p, with a parameter p of each position and channel, of variance `variance` (a learned position embedding)."""

    variance: float = 1.0

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        f = build.settled(value)
        p = build.drawn(f.shape, f.channel)
        rate = weights.rate(dotted(name, "weight")) * (1.0 if weights.parametrization == "standard" else self.variance)
        return build.sum([f, build.affine(p, f.width, Affine(self.variance, 0.0, rate))])

    def module(self, width: int) -> nn.Module:
        raise InputError("Positions has no finite module: add an nn.Parameter in forward().")


@dataclass(frozen=True)
class PositionMatrix(Layer):
    """A known matrix [out, in] over the positions of one axis, the same for all samples: P x."""

    matrix: Tensor
    axis: int = 0

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        f = build.settled(value)
        return resampled(build, f, {self.axis: self.matrix})

    def module(self, width: int) -> nn.Module:
        raise InputError("PositionMatrix has no finite module: multiply in forward().")


def resampled(build: Builder, f: Field, matrices: dict[int, Tensor]) -> Field:
    op = Resample(tuple(sorted((axis, _rows(matrix)) for axis, matrix in matrices.items())))
    grid = list(op.grid(f.grid))
    shape = [*grid[: f.channel], f.width, *grid[f.channel :]]
    return build.same(op, f, shape=tuple(shape))


def _rows(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.double().tolist())


@reads(nn.Upsample)
def _upsample(m: nn.Upsample, build: Builder, weights: Weights, name: str, args: Any) -> Any:
    """Interpolation is a matrix over each axis: what it does to the identity."""
    f = build.field(args[0], 0)
    dims = len(f.grid)
    size = each(m.size, dims) if m.size is not None else _grown(f.grid, m.scale_factor)
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(m.mode, m.mode)
    if mode not in ("nearest", "linear", "nearest-exact"):
        raise build.unsupported(f"interpolates by {m.mode!r}.", "Use nearest or (bi-, tri-)linear.")
    corners = m.align_corners if mode == "linear" else None
    matrices = {}
    for axis, (n, k) in enumerate(zip(f.grid, size, strict=True)):
        eye = torch.eye(n, dtype=torch.float64).unsqueeze(0)
        matrices[axis] = F.interpolate(eye, size=k, mode=mode, align_corners=corners)[0].T
    return resampled(build, f, matrices)


def _grown(grid: tuple[int, ...], factor: Any) -> tuple[int, ...]:
    factors = tuple(factor) if isinstance(factor, (tuple, list)) else (factor,) * len(grid)
    return tuple(int(n * float(s)) for n, s in zip(grid, factors, strict=True))


@dataclass(frozen=True)
class Masked(Layer):
    """Layers on sequences of different lengths: inputs (x, mask), mask [n, *positions] True where a position is real.

    The others are zero after every layer; pooling, attention and norms leave them out. After a window of k positions,
    one is real if that at the window's place (k − 1)//2 was. In an nn.Module, multiply by the mask instead.
    """

    inner: Layer

    def __init__(self, *layers: Any) -> None:
        object.__setattr__(self, "inner", Serial(*layers) if len(layers) > 1 else as_layer(layers[0]))

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        if not isinstance(value, (tuple, list)) or len(value) != 2 or value[1].dtype != torch.bool:
            raise InputError("Masked takes inputs (x, mask) with a mask of bools, True where a position is real.")
        x, mask = value
        if not bool(mask.flatten(1).any(1).all()):
            raise InputError("a sample has no real position: its mask is False everywhere.")
        build.mask = mask
        wide = mask.unsqueeze(-1) if x.shape[1 : mask.dim()] == mask.shape[1:] else mask.unsqueeze(1)
        return inside(build, self.inner, x * wide, weights, name)

    def module(self, width: int) -> nn.Module:
        raise InputError("Masked has no finite module: multiply by the mask in forward().")
