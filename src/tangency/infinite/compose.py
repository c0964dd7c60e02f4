"""Layers made of others: one after the other, side by side, with a mask. Activations and nn.Modules count as layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..errors import InputError
from .activations.duals import Dual
from .layers.basic import Argument, Layer
from .layers.weights import Weights, dotted
from .moments.fields import Builder
from .moments.functions import apply_function
from .moments.joins import add_fields, as_fields, concat_channels, concat_positions, multiply_fields
from .moments.shapes import mask_out
from .moments.values import Value
from .reading.recorded import read_source

Composable: TypeAlias = Layer | Dual | nn.Module  # a layer, or what becomes one


@dataclass(frozen=True)
class Serial(Layer):
    """One layer after the other: layers, activations (`Relu()`) and nn.Modules.

    >>> import torch, tangency as tg
    >>> from tangency.infinite import Linear, Relu, Serial
    >>> k = tg.infinite_ntk(Serial(Linear(w_var=2.0), Relu(), Linear(w_var=1.0)))
    >>> k(torch.eye(2)).shape
    torch.Size([2, 2])
    """

    layers: tuple[Layer, ...]

    def __init__(self, *layers: Composable) -> None:
        object.__setattr__(self, "layers", tuple(as_layer(layer) for layer in layers))

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        for k, layer in enumerate(self.layers):
            # Named by their number, as in nn.Sequential: mappings of variances go by these names.
            value = _grow_within(build, layer, value, weights, dotted(name, str(k)))
        return value

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return nn.Sequential(*(layer.module(width) for layer in self.layers))


def _grow_within(build: Builder, layer: Layer, value: Argument, weights: Weights, name: str) -> Value:
    """A layer within another one: messages name it."""
    was = build.where, build.name
    build.name, build.where = name, f"{type(layer).__name__} {name}"
    try:
        return mask_out(build, layer.grow(build, value, weights, name))
    finally:
        build.where, build.name = was


@dataclass(frozen=True)
class Elementwise(Layer):
    """An activation."""

    dual: Dual

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        if isinstance(value, Tensor):
            return self.dual(value)
        return apply_function(build, value, self.dual, self.dual, type(self.dual).__name__)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return self.dual.module()


@dataclass(frozen=True)
class _Branches(Layer):
    """Layers that all get the same value."""

    layers: tuple[Layer, ...]

    def __init__(self, *layers: Composable) -> None:
        if len(layers) < 2:
            raise InputError(f"{type(self).__name__} takes two or more branches; it was given {len(layers)}.")
        object.__setattr__(self, "layers", tuple(as_layer(layer) for layer in layers))

    def _grown(self, build: Builder, value: Argument, weights: Weights, name: str) -> list[Value]:
        """The value after each branch; each begins with the mask that came in."""
        outputs, mask, masks = [], build.mask, []
        for k, layer in enumerate(self.layers):
            build.mask = mask
            outputs.append(_grow_within(build, layer, value, weights, dotted(name, str(k))))
            masks.append(build.mask)
        # Branches that are joined have the same positions, so their masks agree.
        build.mask = masks[0]
        return outputs


@dataclass(frozen=True, init=False)
class Sum(_Branches):
    """f(x) + g(x) + …: `Sum(Identity(), Serial(…))` is a residual block."""

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        return add_fields(build, self._grown(build, value, weights, name))

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return Branch([layer.module(width) for layer in self.layers], _add)


@dataclass(frozen=True, init=False)
class Product(_Branches):
    """f(x) · g(x) · …, elementwise."""

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        return multiply_fields(build, self._grown(build, value, weights, name))

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return Branch([layer.module(width) for layer in self.layers], _multiply)


@dataclass(frozen=True, init=False)
class Concat(_Branches):
    """Channels side by side, weighted by their finite widths; with `axis`, positions along that axis of the grid."""

    axis: int | None = None

    def __init__(self, *layers: Composable, axis: int | None = None) -> None:
        super().__init__(*layers)
        object.__setattr__(self, "axis", axis)

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        outputs = self._grown(build, value, weights, name)
        if self.axis is None:
            return concat_channels(build, outputs)
        return concat_positions(build, as_fields(build, outputs), self.axis)

    def module(self, width: int) -> nn.Module:
        """As `Layer.module`."""
        return Branch([layer.module(width) for layer in self.layers], _concat)


@dataclass(frozen=True)
class Masked(Layer):
    """Layers on sequences of different lengths: inputs (x, mask), mask [n, *positions] True where a position is real.

    The others are zero after every layer; pooling, attention and norms leave them out. After a window of k positions,
    one is real if that at the window's place (k − 1)//2 was. In an nn.Module, multiply by the mask instead.
    """

    inner: Layer

    def __init__(self, *layers: Composable) -> None:
        object.__setattr__(self, "inner", Serial(*layers) if len(layers) > 1 else as_layer(layers[0]))

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Value:
        """As `Layer.grow`."""
        if not isinstance(value, (tuple, list)) or len(value) != 2 or value[1].dtype != torch.bool:
            raise InputError("Masked takes inputs (x, mask) with a mask of bools, True where a position is real.")
        x, mask = value
        if not bool(mask.flatten(1).any(1).all()):
            raise InputError("a sample has no real position: its mask is False everywhere.")
        build.mask = mask
        # Channels last, if the positions come first in x; else after the batch, as for Conv.
        wide = mask.unsqueeze(-1) if x.shape[1 : mask.dim()] == mask.shape[1:] else mask.unsqueeze(1)
        return _grow_within(build, self.inner, x * wide, weights, name)

    def module(self, width: int) -> nn.Module:
        """Refused: torch has no such module."""
        raise InputError("Masked has no finite module: multiply by the mask in forward().")


class Branch(nn.Module):
    """Modules side by side, their outputs joined."""

    def __init__(self, branches: list[nn.Module], join: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.branches, self.join = nn.ModuleList(branches), join

    def forward(self, x: Tensor) -> Tensor:
        """The branches' outputs, joined."""
        return self.join([branch(x) for branch in self.branches])


# Functions by name, not lambdas: modules are pickled.


def _add(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum(0)


def _multiply(values: list[Tensor]) -> Tensor:
    return torch.stack(values).prod(0)


def _concat(values: list[Tensor]) -> Tensor:
    # [batch, time, channels] has its channels last; vectors and pictures have them after the batch.
    return torch.cat(values, 1 if values[0].dim() != 3 else -1)


def as_layer(given: Composable) -> Layer:
    """A layer; an activation or an nn.Module becomes one."""
    if isinstance(given, Layer):
        return given
    if isinstance(given, Dual):
        return Elementwise(given)
    if isinstance(given, nn.Module):
        return read_source(given)
    raise InputError(
        f"{given!r} is no layer. Needed: a layer or activation of tangency.infinite, or an nn.Module (an instance, "
        "not the class)."
    )
