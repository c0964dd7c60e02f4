"""Layers with positions: convolutions, pooling, flattening, picking and mixing positions; channels come first."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..moments.core import DEPTHWISE, GROUPED, VALUE, WEIGHTS, RandomAffine, Taken
from ..moments.depthwise import as_depthwise
from ..moments.fields import Builder
from ..moments.functions import scale_by
from ..moments.joins import add_fields
from ..moments.ops import Weigh
from ..moments.positions import Apart, Pool, Resample, Spread, Total, Window
from ..moments.shapes import flatten_positions, take_positions
from ..moments.values import Field, Value
from .basic import Argument, Layer, Pair, Times, input_misfit, per_axis
from .groups import warn_few
from .weights import Weights, dotted


@dataclass(frozen=True)
class Conv(Layer):
    """A convolution over one to three axes, with shared weights or (`local`) weights of each position's own.

    Groups have infinitely many channels each, and change nothing; but as many groups as channels (a depthwise layer)
    do not mix them: each channel has a filter of its own, of variance w_var over the window's size. Covariances are
    the same sums over windows, yet the values are products of a filter and a channel, not Gaussian.
    """

    size: tuple[int, ...]
    stride: Pair = 1
    padding: Pair | str = 0
    dilation: Pair = 1
    groups: int = 1
    circular: bool = False
    w_var: float | None = None
    b_var: float | None = None
    bias: bool = True
    width: int | None = None
    local: bool = False
    of: nn.Module | None = field(default=None, repr=False, compare=False)

    def _pads(self, dims: int) -> tuple[tuple[int, int], ...]:
        """Zeros before and after each axis, as torch pads."""
        if isinstance(self.padding, str):
            if self.padding == "valid":
                return ((0, 0),) * dims
            if self.padding != "same" or per_axis(self.stride, dims) != (1,) * dims:
                raise InputError(f"padding={self.padding!r}; needed: 'valid', 'same' (with stride 1), or numbers.")
            # Where the window is even, torch has the odd zero after.
            reach = [d * (k - 1) for d, k in zip(per_axis(self.dilation, dims), self.size, strict=True)]
            return tuple((r // 2, r - r // 2) for r in reach)
        return tuple((p, p) for p in per_axis(self.padding, dims, "padding"))

    def grow(
        self, build: Builder, value: Argument, weights: Weights, name: str,
        names: tuple[str, str] = ("weight", "bias"), whole: int | None = None,
    ) -> Field:  # fmt: skip
        """As `Layer.grow`; `names`: of its parameters; `whole`: the fan-in of what its weights are a slice of."""
        dims = len(self.size)
        f = build.field(value, 0)
        needed: int = getattr(self.of, "in_channels", f.width)
        if f.width != needed:
            raise input_misfit(build, needed, f.width)
        if len(f.grid) != dims:
            raise InputError(f"{build.where}: a convolution over {dims} axes was given values of shape {f.shape}.")
        depthwise = check_groups(build, value, f, self.groups)
        stride, dilation = per_axis(self.stride, dims, "stride"), per_axis(self.dilation, dims, "dilation")
        window = Window(self.size, stride, self._pads(dims), dilation, self.circular)
        grid = window.grid(f.grid)
        if min(grid) < 1:
            raise InputError(f"{build.where}: windows of {self.size} do not fit into positions {f.grid}.")
        # A convolution is the sum of moments over windows, then weights as in a dense layer of fan-in width·window.
        patched = build.apply(window, f, shape=(f.width, *grid))
        if build.mask is not None:
            build.mask = _mask_after(build.mask, window.size, window.stride, window.padding, grid)
        tensors = (getattr(self.of, "weight", None), getattr(self.of, "bias", None))
        patch = prod(self.size)
        fan_in, variances = f.width // self.groups * patch, (self.w_var, self.b_var)
        op = weights.layer(
            name, fan_in, patch=patch, bias=self.bias, variances=variances, tensors=tensors, names=names, whole=whole
        )
        op = replace(op, means=weights_in_groups(self.groups, depthwise))
        after = build.affine(patched, self.width or f.width, op)
        if depthwise and not isinstance(value, Tensor):
            after = replace(as_depthwise(build, value, after, window, op), alike=f.alike)
        return build.apply(Apart(), after) if self.local else after  # weights of its own: positions are independent

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        if self.local:
            raise InputError("torch has no locally connected layer; build the finite one with unfold.")
        # Lazy modules find the number of input channels at their first call.
        kinds: tuple[Callable[..., nn.Module], ...] = (nn.LazyConv1d, nn.LazyConv2d, nn.LazyConv3d)
        mode = "circular" if self.circular else "zeros"
        return kinds[len(self.size) - 1](
            self.width or width, self.size, self.stride, self.padding, self.dilation, self.groups, self.bias, mode
        )


def check_groups(build: Builder, value: Argument, f: Field, groups: int) -> bool:
    """Whether a convolution is depthwise: as many groups as channels. Groups without a limit are refused."""
    if groups == 1:
        return False
    if isinstance(value, Tensor):
        raise build.unsupported(
            "has groups that see few channels of the input each, so its outputs are not alike in the limit.",
            "Give each group infinitely many channels: a layer with groups=1 (or a 1×1 convolution) before it.",
        )
    # Channels that were put side by side (Concat) would fall into groups by the branch that they came from.
    if f.width != groups and not f.alike:
        raise build.unsupported(
            f"has {groups} groups of channels that were joined from several layers, so its outputs are not alike.",
            "Use groups=1, groups for each layer before torch.cat, or one group for each channel.",
        )
    if f.width != groups:
        warn_few(build, f.width, groups)
    return f.width == groups


def weights_in_groups(groups: int, depthwise: bool) -> Taken:
    """What the weights of a convolution are taken for."""
    return DEPTHWISE if depthwise else GROUPED if groups > 1 else WEIGHTS


def _mask_after(
    mask: Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    pads: tuple[tuple[int, int], ...],
    grid: tuple[int, ...],
) -> Tensor:
    """The mask after windows: that of the position at each window's place (k − 1)//2."""
    for axis, (k, s, p, m) in enumerate(zip(size, stride, pads, grid, strict=True)):
        # The input's position at the middle of each window (the left one of two), as odd windows with padding keep it.
        at = torch.arange(m, device=mask.device) * s - p[0] + (k - 1) // 2
        inside = (at >= 0) & (at < mask.shape[axis + 1])
        taken = mask.index_select(axis + 1, at.clamp(0, mask.shape[axis + 1] - 1))
        mask = taken & inside.view(-1, *[1] * (mask.dim() - axis - 2))
    return mask


@dataclass(frozen=True)
class ConvTranspose(Layer):
    """A transposed convolution: zeros between the positions, then a convolution (groups as in `Conv`)."""

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
    groups: int = 1

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        f, dims = build.field(value, 0), len(self.size)
        depthwise = check_groups(build, value, f, self.groups)
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
        fan_in = f.width // self.groups * patch
        affine = weights.layer(name, fan_in, patch=patch, bias=self.bias, variances=variances, tensors=tensors)
        affine = replace(affine, means=weights_in_groups(self.groups, depthwise))
        out = build.affine(f, self.width or f.width, affine)
        return replace(out, gaussian=False, alike=f.alike) if depthwise else out

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        kinds: tuple[Callable[..., nn.Module], ...] = (
            nn.LazyConvTranspose1d,
            nn.LazyConvTranspose2d,
            nn.LazyConvTranspose3d,
        )
        return kinds[len(self.size) - 1](
            self.width or width, self.size, self.stride, self.padding, self.output_padding, self.groups, self.bias,
            self.dilation,
        )  # fmt: skip


@dataclass(frozen=True)
class AvgPool(Layer):
    """The mean over windows (`SumPool`: the sum). `edges`: means over what lies inside only."""

    size: tuple[int, ...]
    stride: Pair | None = None
    padding: Pair = 0
    edges: bool = False
    circular: bool = False
    ceil: bool = False
    mean: bool = True

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        dims = len(self.size)
        f = build.field(value, 0)
        if len(f.grid) != dims:
            raise InputError(f"{build.where}: pooling over {dims} axes was given values of shape {f.shape}.")
        stride = per_axis(self.stride or self.size, dims, "stride")
        pads = tuple((p, p) for p in per_axis(self.padding, dims, "padding"))
        op = Pool(self.size, stride, pads, self.mean, self.edges, self.circular, self.ceil)
        grid = op.grid(f.grid)
        build.mask = None if build.mask is None else _mask_after(build.mask, self.size, stride, pads, grid)
        return build.apply(op, f, shape=(f.width, *grid))

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        if self.circular:
            raise InputError("torch has no pooling with circular borders; pad before it.")
        kinds: tuple[Callable[..., nn.Module], ...] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
        pool = kinds[len(self.size) - 1](self.size, self.stride, self.padding, self.ceil, not self.edges)
        return pool if self.mean else nn.Sequential(pool, Times(prod(self.size)))


def SumPool(  # noqa: N802 (a layer like the others)
    size: tuple[int, ...], stride: Pair | None = None, padding: Pair = 0, circular: bool = False
) -> AvgPool:
    """The sum over windows."""
    return AvgPool(size, stride, padding, circular=circular, mean=False)


@dataclass(frozen=True)
class GlobalAvgPool(Layer):
    """The mean over all positions; `channel`: the axis of the channels (0: after the batch, as for Conv; -1: last)."""

    channel: int = 0
    mean: bool = True

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        f = build.field(value, self.channel)
        axes = tuple(range(len(f.grid)))
        if build.mask is None:
            return build.apply(Total(axes, self.mean), f, shape=(f.width,), channel=0)
        # Positions that are not real hold zeros, so the sum leaves them out; the mean is over a sample's real ones.
        count, build.mask = build.mask.flatten(1).sum(1), None
        if bool((count == 0).any()):
            raise InputError(f"{build.where}: a sample has no real position left to pool.")
        total = build.apply(Total(axes, False), f, shape=(f.width,), channel=0)
        return build.apply(Weigh(build.slot(1 / count.double())), total) if self.mean else total

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return Reduce(self.channel, self.mean)


def GlobalSumPool(channel: int = 0) -> GlobalAvgPool:  # noqa: N802
    """The sum over all positions."""
    return GlobalAvgPool(channel, mean=False)


@dataclass(frozen=True)
class Flatten(Layer):
    """Positions become channels."""

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        if isinstance(value, Tensor):
            return value.flatten(1)
        f = build.settled(value)
        build.mask = None
        return flatten_positions(build, f, tuple(range(len(f.grid))))

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return nn.Flatten()


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
        return add_fields(build, [f, build.affine(p, f.width, RandomAffine(self.variance, 0.0, rate, means=VALUE))])

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


def resampled_value(build: Builder, value: Value, f: Field, matrices: dict[int, Tensor]) -> Field:
    """As above, of a value and the field that it is; a scale of each channel's own may wait on for an activation."""
    after = resampled(build, f, matrices)
    if isinstance(value, Field) and value.gaussian and value.gain:
        build.memory.functions[after.node] = resampled(build, value, matrices)
    return after


def _rows(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    """A matrix as numbers."""
    return tuple(tuple(row) for row in matrix.double().tolist())


class Reduce(nn.Module):
    """The mean or sum over all positions."""

    def __init__(self, channel: int, mean: bool) -> None:
        super().__init__()
        self.channel, self.mean = channel, mean

    def forward(self, x: Tensor) -> Tensor:
        """[batch, *positions and channels] to [batch, channels]."""
        axes = [k for k in range(1, x.dim()) if k != 1 + self.channel % (x.dim() - 1)]
        return x.mean(axes) if self.mean else x.sum(axes)
