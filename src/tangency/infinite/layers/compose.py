"""Layers one after the other and side by side."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..activations.duals import Dual
from ..moments.fields import Builder
from .basic import Layer
from .weights import Weights, dotted


@dataclass(frozen=True)
class Serial(Layer):
    """One layer after the other: layers, activations (`Relu()`) and nn.Modules.

    >>> import torch, tangency as tg
    >>> from tangency.infinite import Linear, Relu, Serial
    >>> k = tg.infinite_ntk(Serial(Linear(w_var=2.0), Relu(), Linear(w_var=1.0)))
    >>> k(torch.eye(2)).shape
    torch.Size([2, 2])
    """

    layers: tuple[Any, ...]

    def __init__(self, *layers: Any) -> None:
        object.__setattr__(self, "layers", tuple(as_layer(layer) for layer in layers))

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        for k, layer in enumerate(self.layers):
            value = inside(build, layer, value, weights, dotted(name, str(k)))
        return value

    def module(self, width: int) -> nn.Module:
        return nn.Sequential(*(layer.module(width) for layer in self.layers))


def inside(build: Builder, layer: Layer, value: Any, weights: Weights, name: str) -> Any:
    """A layer within another one: messages name it."""
    was = build.where, build.name
    build.name, build.where = name, f"{type(layer).__name__} {name}"
    try:
        return build.masked(layer.grow(build, value, weights, name))
    finally:
        build.where, build.name = was


@dataclass(frozen=True)
class Elementwise(Layer):
    """An activation."""

    dual: Dual

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        if isinstance(value, Tensor):
            return self.dual(value)
        return build.elementwise(value, self.dual, self.dual, type(self.dual).__name__)

    def module(self, width: int) -> nn.Module:
        return self.dual.module()


@dataclass(frozen=True)
class _Branches(Layer):
    layers: tuple[Any, ...]

    def __init__(self, *layers: Any) -> None:
        if len(layers) < 2:
            raise InputError(f"{type(self).__name__} takes two or more branches; it was given {len(layers)}.")
        object.__setattr__(self, "layers", tuple(as_layer(layer) for layer in layers))

    def _grown(self, build: Builder, value: Any, weights: Weights, name: str) -> list[Any]:
        found, mask, masks = [], build.mask, []
        for k, layer in enumerate(self.layers):
            build.mask = mask
            found.append(inside(build, layer, value, weights, dotted(name, str(k))))
            masks.append(build.mask)
        build.mask = masks[0]
        return found


@dataclass(frozen=True, init=False)
class Sum(_Branches):
    """f(x) + g(x) + …: `Sum(Identity(), Serial(…))` is a residual block."""

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        return build.sum(self._grown(build, value, weights, name))

    def module(self, width: int) -> nn.Module:
        return Branch([layer.module(width) for layer in self.layers], _add)


@dataclass(frozen=True, init=False)
class Product(_Branches):
    """f(x) · g(x) · …, elementwise."""

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        return build.product(self._grown(build, value, weights, name))

    def module(self, width: int) -> nn.Module:
        return Branch([layer.module(width) for layer in self.layers], _multiply)


@dataclass(frozen=True, init=False)
class Concat(_Branches):
    """Channels side by side, weighted by their finite widths; with `axis`, positions along that axis of the grid."""

    axis: int | None = None

    def __init__(self, *layers: Any, axis: int | None = None) -> None:
        super().__init__(*layers)
        object.__setattr__(self, "axis", axis)

    def grow(self, build: Builder, value: Any, weights: Weights, name: str) -> Any:
        found = self._grown(build, value, weights, name)
        if self.axis is None:
            return build.concat_channels(found)
        return build.concat_positions(build.fields(found), self.axis)

    def module(self, width: int) -> nn.Module:
        return Branch([layer.module(width) for layer in self.layers], _concat)


class Branch(nn.Module):
    """Modules side by side, their outputs joined."""

    def __init__(self, branches: list[nn.Module], join: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.branches, self.join = nn.ModuleList(branches), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join([branch(x) for branch in self.branches])


def _add(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum(0)


def _multiply(values: list[Tensor]) -> Tensor:
    return torch.stack(values).prod(0)


def _concat(values: list[Tensor]) -> Tensor:
    return torch.cat(values, 1 if values[0].dim() != 3 else -1)


def as_layer(given: Any) -> Layer:
    """A layer; an activation or an nn.Module becomes one."""
    if isinstance(given, Layer):
        return given
    if isinstance(given, Dual):
        return Elementwise(given)
    if isinstance(given, nn.Module):
        from ..reading.convert import Traced

        return Traced(given)
    raise InputError(
        f"{given!r} is no layer. Needed: a layer or activation of tangency.infinite, or an nn.Module (an instance, "
        "not the class)."
    )
