"""Inputs as trees: a tensor, a tuple (`model(*x)`) or a dict (`model(**x)`), the sample in each leading dimension."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._types import Inputs


def leaves(x: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The tensors of x with the names that error messages use; other values (flags, None) are passed through."""
    items: Any
    if isinstance(x, Tensor):
        items = [("x", x)]
    elif isinstance(x, Mapping):
        items = [(f"x[{k!r}]", v) for k, v in x.items()]
    else:
        items = [(f"x[{k}]", v) for k, v in enumerate(x)]
    return ((name, v) for name, v in items if isinstance(v, Tensor))


def transform(f: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply f to every tensor of x."""

    def one(v: Any) -> Any:
        return f(v) if isinstance(v, Tensor) else v

    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, Mapping):
        return {k: one(v) for k, v in x.items()}
    return tuple(one(v) for v in x)


def size(x: Inputs) -> int:
    return next(leaves(x))[1].shape[0]


def take(x: Inputs, index: slice | Tensor) -> Inputs:
    return transform(lambda v: v[index], x)


def split(x: Inputs, step: int) -> Iterator[Inputs]:
    n = size(x)
    return (take(x, slice(start, min(start + step, n))) for start in range(0, n, step))


def cast(x: Inputs, dtype: torch.dtype | None) -> Inputs:
    if dtype is None:
        return x
    return transform(lambda v: v.to(dtype) if v.is_floating_point() else v, x)


def needs_grad(x: Inputs) -> bool:
    return torch.is_grad_enabled() and any(v.requires_grad for _, v in leaves(x))


def arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """x as (args, kwargs) of a call."""
    if isinstance(x, Tensor):
        return (x,), {}
    if isinstance(x, Mapping):
        return (), dict(x)
    return tuple(x), {}


def signature(x: Inputs) -> tuple[Any, ...]:
    """What decides how a model treats x: names, types and shapes of a sample, not their number."""
    return tuple((name, v.dtype, v.shape[1:], str(v.device)) for name, v in leaves(x))


def own_modules(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    return ((name or "model", m) for name, m in model.named_modules() if isinstance(m, kinds))
