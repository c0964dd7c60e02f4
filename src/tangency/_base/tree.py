"""Inputs as trees: a tensor, a tuple (`model(*x)`) or a dict (`model(**x)`), the sample in each leading dimension."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .types import Inputs


def leaves(x: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The tensors of x with the names that error messages use; other values (flags, None) are passed through."""
    return _leaves("x", x)


def _leaves(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, Mapping):
        for k, v in x.items():
            yield from _leaves(f"{name}[{k!r}]", v)
    elif isinstance(x, (tuple, list)):
        for j, v in enumerate(x):
            yield from _leaves(f"{name}[{j}]", v)


def transform(f: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply f to every tensor of x, in tuples, lists and dicts within each other; a list becomes a tuple."""
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, Mapping):
        return {k: transform(f, v) for k, v in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):  # a named tuple
        return type(x)(*(transform(f, v) for v in x))
    if isinstance(x, (tuple, list)):
        return tuple(transform(f, v) for v in x)
    return x


def size(x: Inputs) -> int:
    return next(leaves(x))[1].shape[0]


def take(x: Inputs, index: slice | Tensor) -> Inputs:
    return transform(lambda v: v[index if isinstance(index, slice) else index.to(v.device)], x)


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
    """What decides how a model treats x: its structure, the types and shapes of a sample (not their number), and values
    that are no tensors."""

    def one(v: Any) -> Any:
        if isinstance(v, Tensor):
            return v.dtype, v.shape[1:], str(v.device)
        if isinstance(v, Mapping):
            return "dict", tuple((k, one(w)) for k, w in v.items())
        if isinstance(v, (tuple, list)):
            return "tuple", tuple(one(w) for w in v)
        return type(v), v if isinstance(v, (bool, int, float, str, type(None))) else id(v)

    return (one(x),)


def rebuild(x: Inputs, values: Iterable[Tensor]) -> Inputs:
    """x with its tensors replaced, in the order of `leaves`."""
    new = iter(values)
    return transform(lambda _: next(new), x)


def own_modules(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    return ((name or "model", m) for name, m in model.named_modules() if isinstance(m, kinds))
