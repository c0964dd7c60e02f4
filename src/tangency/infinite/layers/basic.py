"""What a layer of a wide network is, and the plain ones: Linear, Dropout, LayerNorm.

To be composed by hand: `Serial(Linear(w_var=2), Relu(), Linear())`. They follow torch's conventions: Linear acts on the
last axis. Each knows the finite module that it is the limit of. What is read from an nn.Module becomes the same layers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..._base.fingerprint import describe, digest
from ..._base.types import Json, Spec
from ...errors import InputError
from ..activations.duals import Dual
from ..moments.channels import each_part
from ..moments.core import SCALES, RandomAffine
from ..moments.fields import Builder
from ..moments.ops import ByStatistic, DropChannels, Normalize
from ..moments.origins import function_of
from ..moments.values import Field, Lazy, Statistic, Value
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

    def says(self) -> dict[str, Json]:
        """Which limit is taken, by layer, where the module alone decides."""
        return {}  # layers say it in their docstrings; `Infinite.limits` tells for given inputs


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


def input_misfit(build: Builder, needed: int, given: int) -> InputError:
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
            raise input_misfit(build, needed, f.width)
        tensors = (getattr(self.of, "weight", None), getattr(self.of, "bias", None))
        op = weights.layer(name, f.width, bias=self.bias, variances=(self.w_var, self.b_var), tensors=tensors)
        return build.affine(f, self.width or f.width, op)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return nn.LazyLinear(self.width or width, bias=self.bias)


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
    """Normalised over the channels, and over all positions too if `positions`; `affine`: a trained scale and shift.

    In the limit its statistics are expectations: known numbers of each sample, whose own gradient vanishes.
    """

    channel: int = -1
    positions: bool = False
    eps: float = 1e-5
    affine: bool = False
    shift: bool = True  # RMSNorm has a scale alone

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        f = normed(build, centred(build, value, self.channel, self.positions), self.positions, self.eps)
        if not self.affine:
            return f
        scale, shift = weights.rates(name)
        return scaled_and_shifted(build, f, scale, shift if self.shift else 0.0)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        # GroupNorm of one group normalises over channels and positions, its channels after the batch.
        if self.positions or self.channel != -1:
            return nn.GroupNorm(1, width, eps=self.eps, affine=self.affine)
        return nn.LayerNorm(width, eps=self.eps, elementwise_affine=self.affine)


def centred(build: Builder, value: Value, channel: int, positions: bool = False) -> Field:
    """A value less its mean over the channels, which lie on axis `channel`, and over all positions too."""
    if isinstance(value, Lazy):
        axes = tuple(range(len(value.of.grid))) if positions else ()
        return build.field(build.centred(value, axes), channel)
    f = build.field(value, channel)
    known = None if f.centered else function_of(build, f)
    if isinstance(known, Lazy):
        return centred(build, known, channel, positions)
    if not f.centered:
        raise build.unsupported(
            "normalises values that are not Gaussian in the limit, and whose mean over the channels is not known.",
            "Put a Linear or Conv layer before the norm, or use RMSNorm, which subtracts no mean.",
        )
    return f


def normed(build: Builder, f: Field, positions: bool, eps: float) -> Field:
    """The field over the root of its mean square over the channels, and over all positions too if `positions`."""
    axes = tuple(range(len(f.grid))) if positions else ()
    mask = build.slot(build.mask.double().movedim(0, -1)) if axes and build.mask is not None else None
    if f.node in build.memory.parts and mask is None:
        return by_statistic(build, f, Statistic(f, axes, lambda v: (v + eps).rsqrt()))
    after = build.apply(Normalize(axes, eps, mask), f)
    build.memory.normed_nodes.add(after.node)
    return after


def by_statistic(build: Builder, f: Field, by: Statistic) -> Field:
    """The field times a function of a mean over channels; channels side by side stay apart, for what follows."""
    joined = each_part(build, f, lambda part: by_statistic(build, build.settled(part), by))
    if joined is not None:
        after = replace(joined, shape=f.shape, channel=f.channel)
    else:
        node = build.add(ByStatistic(by.fn, by.axes), (f, by.of), f.grid)
        after = replace(f, node=node)
    build.memory.normed_nodes.add(after.node)
    return after


def scaled_and_shifted(build: Builder, f: Field, scale: float, shift: float) -> Field:
    """A norm's trained scale and shift by their rates; at the start they are 1 and 0, and change no value."""
    joined = each_part(build, f, lambda part: scaled_and_shifted(build, build.settled(part), scale, shift))
    if joined is not None:
        return replace(joined, shape=f.shape, channel=f.channel)
    if shift:
        op = RandomAffine(1.0, 0.0, 0.0, shift, means=SCALES)
        f = build.trained_pass(op, f, build.identity(op))
    return replace(f, gain=scale, gained=build.identity(RandomAffine(1.0, 0.0, scale)) if scale else None)


class Times(nn.Module):
    """A constant multiple."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """factor · x."""
        return x * self.factor
