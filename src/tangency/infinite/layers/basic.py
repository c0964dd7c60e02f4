"""The layers of wide networks, to be composed by hand: `Serial(Linear(w_var=2), Relu(), Linear())`.

They follow torch's conventions: Linear acts on the last axis, Conv has its channels on the first axis after the batch.
Each knows the finite module that it is the limit of. What is read from an nn.Module becomes the same layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..._base.fingerprint import describe, digest
from ..._base.types import Json, Spec
from ...errors import InputError
from ..activations.duals import Dual
from ..moments.core import RandomAffine
from ..moments.fields import Builder, Field, Value
from ..moments.ops import DropChannels, Normalize, Weigh
from ..moments.positions import Apart, Pool, Total, Window
from ..moments.shapes import flatten_positions
from .weights import Weights

Pair = int | tuple[int, ...]
# What a layer is given: a known tensor or a random value; several of them where a Masked or an nn.Module comes first.
Argument: TypeAlias = Any


class Layer(ABC):
    """One layer: how it makes the moments of its output from those of its input, and its finite form."""

    @abstractmethod
    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """The value after this layer, its operations added to the plan."""

    @abstractmethod
    def module(self, width: int) -> nn.Module:
        """The finite network of this width (input sizes are found at the first call, as torch's lazy modules do)."""

    def spec(self) -> Spec:
        """What decides its numbers besides the weights' options, as JSON values."""
        # Fields that do not count for equality (the module that a layer was read from) do not count here either.
        options = {f.name: _as_json(getattr(self, f.name)) for f in fields(self) if f.compare}  # type: ignore[arg-type]
        return {"layer": type(self).__name__, **options}

    def numbers(self, weights: Weights) -> dict[str, Json]:
        """Variances and rates by layer, where they can be told without an input."""
        return {}  # a layer's own numbers are in its spec


def _as_json(value: object) -> Json:
    """A layer's field as a JSON value; functions by their code, tensors by their digest."""
    if isinstance(value, Layer):
        return value.spec()
    if isinstance(value, Dual):
        fn = getattr(value, "fn", None)
        return {**value.spec(), **({} if fn is None else {"fn": describe(fn)})}
    if isinstance(value, (tuple, list)):
        return [_as_json(v) for v in value]
    if isinstance(value, Tensor):
        return digest({"": value})
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def per_axis(value: Pair, dims: int, what: str = "size") -> tuple[int, ...]:
    """A number for each axis of positions; one number is that of all."""
    numbers = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(numbers) != dims:
        raise InputError(f"{what}={value} for {dims} axes; needed: a number, or one for each axis.")
    return numbers


def _misfit(build: Builder, needed: int, given: int) -> InputError:
    """The error of a module whose input has another size than its weights."""
    return InputError(f"{build.where}: takes {needed} features or channels; it was given {given}.")


@dataclass(frozen=True)
class Linear(Layer):
    """Wx + b on the last axis. w_var and b_var: its own, else the kernel's; `width`: the finite layer's, if fixed."""

    w_var: float | None = None
    b_var: float | None = None
    bias: bool = True
    width: int | None = None
    of: nn.Module | None = field(default=None, repr=False, compare=False)  # the module it was read from

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        f = build.field(value, -1)
        needed: int = getattr(self.of, "in_features", f.width)
        if f.width != needed:
            raise _misfit(build, needed, f.width)
        tensors = (getattr(self.of, "weight", None), getattr(self.of, "bias", None))
        op = weights.layer(name, f.width, bias=self.bias, variances=(self.w_var, self.b_var), tensors=tensors)
        return build.affine(f, self.width or f.width, op)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return nn.LazyLinear(self.width or width, bias=self.bias)


@dataclass(frozen=True)
class Conv(Layer):
    """A convolution over one to three axes, with shared weights or (`local`) weights of each position's own."""

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
        self, build: Builder, value: Argument, weights: Weights, name: str, names: tuple[str, str] = ("weight", "bias")
    ) -> Field:
        """As `Layer.grow`; `names` are those of its parameters, within the layer `name`."""
        dims = len(self.size)
        f = build.field(value, 0)
        needed: int = getattr(self.of, "in_channels", f.width)
        if f.width != needed:
            raise _misfit(build, needed, f.width)
        if len(f.grid) != dims:
            raise InputError(f"{build.where}: a convolution over {dims} axes was given values of shape {f.shape}.")
        # Channels that were put side by side (Concat) would fall into groups by the branch that they came from.
        joined = f.node in build.memory.parts
        if self.groups > 1 and (isinstance(value, Tensor) or f.width == self.groups or joined):
            raise build.unsupported(
                "has groups that see few channels each, so its outputs are not alike and Gaussian in the limit.",
                "Give each group infinitely many channels (groups > 1 with several channels each, not on the input).",
            )
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
        op = weights.layer(name, fan_in, patch=patch, bias=self.bias, variances=variances, tensors=tensors, names=names)
        after = build.affine(patched, self.width or f.width, op)
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
class Embedding(Layer):
    """Rows of a table for integer inputs; the entries have variance w_var."""

    w_var: float | None = None
    width: int | None = None
    count: int | None = None  # rows of the finite table
    padding: int | None = None
    of: nn.Module | None = field(default=None, repr=False, compare=False)

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        if not isinstance(value, Tensor) or value.is_floating_point():
            raise InputError(f"{build.where}: an Embedding takes integer inputs; it was given {_kind(value)}.")
        rows = self.count if self.count is not None else getattr(self.of, "num_embeddings", None)
        if rows is not None and (int(value.min()) < 0 or int(value.max()) >= rows):
            raise InputError(f"{build.where}: indices {int(value.min())} to {int(value.max())} into {rows} rows.")
        f = build.table(value, self.width or 1, self.padding)
        tensor = getattr(self.of, "weight", None)
        if tensor is not None and self.padding is not None:
            # That row is zero, not drawn: it would spoil the statistics that tell the initialisation.
            tensor = torch.cat([tensor[: self.padding], tensor[self.padding + 1 :]])
        op = weights.layer(name, 1, bias=False, variances=(self.w_var, None), tensors=(tensor, None))
        return build.affine(f, self.width or 1, op)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        if self.count is None:
            raise InputError("Embedding.module needs count=, the number of rows of its table.")
        return nn.Embedding(self.count, self.width or width, padding_idx=self.padding)


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
class Dropout(Layer):
    """As at training: channels dropped with probability `rate`, the others divided by 1 − rate."""

    rate: float

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        if isinstance(value, Tensor):
            raise build.unsupported(
                "drops inputs, which are not infinitely many.", "Put it after a layer with weights."
            )
        f = build.settled(value)
        if not 0 <= self.rate < 1:
            raise InputError(f"{build.where}: Dropout({self.rate}); needed: at least 0, below 1.")
        return build.apply(DropChannels(1 - self.rate), f, gaussian=False) if self.rate else f

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return nn.Dropout(self.rate)


@dataclass(frozen=True)
class LayerNorm(Layer):
    """Normalised over the channels, and over all positions too if `positions`; `affine`: a trained scale and shift."""

    channel: int = -1
    positions: bool = False
    eps: float = 1e-5
    affine: bool = False
    shift: bool = True  # RMSNorm has a scale alone

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        f = build.field(value, self.channel)
        # The mean over channels of what is not centred does not vanish, and the variance is not the second moment.
        if not f.gaussian:
            raise build.unsupported(
                "normalises values that are not Gaussian in the limit.", "Put a Linear or Conv layer before the norm."
            )
        axes = tuple(range(len(f.grid))) if self.positions else ()
        mask = build.slot(build.mask.double().movedim(0, -1)) if axes and build.mask is not None else None
        f = build.apply(Normalize(axes, self.eps, mask), f)
        if not self.affine:
            return f
        scale, shift = weights.rates(name)
        shift = shift if self.shift else 0.0
        # At the start the scale is 1 and the shift 0: they enter the tangent kernel alone, with their rates.
        f = build.apply(RandomAffine(1.0, 0.0, 0.0, shift), f) if shift else f
        return replace(f, gain=scale)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        # GroupNorm of one group normalises over channels and positions, its channels after the batch.
        if self.positions or self.channel != -1:
            return nn.GroupNorm(1, width, eps=self.eps, affine=self.affine)
        return nn.LayerNorm(width, eps=self.eps, elementwise_affine=self.affine)


class Times(nn.Module):
    """A constant multiple."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """factor · x."""
        return x * self.factor


class Reduce(nn.Module):
    """The mean or sum over all positions."""

    def __init__(self, channel: int, mean: bool) -> None:
        super().__init__()
        self.channel, self.mean = channel, mean

    def forward(self, x: Tensor) -> Tensor:
        """[batch, *positions and channels] to [batch, channels]."""
        axes = [k for k in range(1, x.dim()) if k != 1 + self.channel % (x.dim() - 1)]
        return x.mean(axes) if self.mean else x.sum(axes)


def _kind(value: object) -> str:
    """What a layer was given, in words."""
    return f"{value.dtype} values" if isinstance(value, Tensor) else "hidden values"
