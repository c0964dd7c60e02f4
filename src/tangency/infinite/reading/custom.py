"""torch.autograd.Function in forward(): what it computes, where its backward is the derivative of that.

Inside of it gradients are off, and what its backward does no graph shows: a straight-through estimator is another
function than it looks. So both are compared, and where they agree it is recorded as the functions that it calls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

# Inputs and cotangents that are tried beside the inputs at hand: backward may clip, or differ for large ones.
SIZES = (1e-3, 0.1, 1.0, 10.0, 1e2, 1e4)
TOLERANCE = 1e-4  # of gradients relative to the largest, as float32 and rounded constants leave them


class Context:
    """The ctx of a forward() that is run as an ordinary function: it takes what is noted for backward."""

    def save_for_backward(self, *tensors: object) -> None:
        """Nothing: autograd itself knows what it needs."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def forward_of(kind: type[Function], args: tuple[Any, ...]) -> Any:
    """What its forward() computes, by functions that autograd follows."""
    alone = kind.setup_context is not Function.setup_context  # forward(*args), and ctx is set up after it
    return kind.forward(*args) if alone else kind.forward(Context(), *args)


def is_derivative(kind: type[Function], args: tuple[Any, ...], apply: Callable[..., Any] | None = None) -> bool:
    """Whether its backward gives the gradients of what its forward computes, here and at other inputs of any size.

    `apply` is its own, where that of the class has another in its place.
    """
    apply = kind.apply if apply is None else apply
    generator = torch.Generator().manual_seed(0)
    at = [k for k, v in enumerate(args) if isinstance(v, Tensor) and v.is_floating_point()]
    for size in (None, *SIZES):
        tried = list(args)
        for k in at:
            v = args[k].detach()
            drawn = v if size is None else size * torch.randn(v.shape, generator=generator).to(v)
            tried[k] = drawn.clone().requires_grad_()
        for scale in SIZES:
            found = []
            for out in (apply(*tried), forward_of(kind, tuple(tried))):
                if not isinstance(out, Tensor):
                    return False
                cotangent = scale * torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
                grads = torch.autograd.grad(out, [tried[k] for k in at], cotangent, allow_unused=True)
                found.append([out, *grads])
            if not all(_same(a, b) for a, b in zip(*found, strict=True)):
                return False
    return True


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Up to rounding; a gradient that is not there is zero."""
    if a is None or b is None:
        other = b if a is None else a
        return other is None or not bool(other.any())
    return a.shape == b.shape and bool(((a - b).abs() <= TOLERANCE * b.abs().max()).all())


@contextmanager
def _in_place_of(original: Any, apply: Callable[..., Any]) -> Iterator[None]:
    """Another Function.apply, and the original again after it."""
    Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


@contextmanager
def functions_stop() -> Iterator[None]:
    """Within it, autograd Functions of what torch.fx traces raise: it would go through them, and show no backward."""
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        """Function.apply, but for proxies."""
        if any(isinstance(v, fx.Proxy) for v in args):
            raise TypeError(f"{cls.__name__} is an autograd.Function, whose backward torch.fx does not show.")
        return original.__func__(cls, *args, **kwargs)

    with _in_place_of(original, apply):
        yield


@contextmanager
def functions_followed(unseen: Callable[[Callable[[], bool]], bool]) -> Iterator[None]:
    """Within it, autograd Functions run as what their forward computes, if `is_derivative`.

    `unseen` asks something without its being recorded.
    """
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        """Function.apply, seen."""
        plain = partial(original.__func__, cls)

        def honest() -> bool:
            """Whether it may be taken for its forward."""
            try:
                # Whoever records keeps nothing for a backward pass; here there is one.
                with torch.enable_grad(), saved_tensors_hooks(lambda v: v, lambda v: v):
                    return is_derivative(cls, args, plain)
            except Exception:  # it wants another ctx, or cannot be differentiated: it stays what it is
                return False

        if not kwargs and torch.is_grad_enabled() and unseen(honest):
            return forward_of(cls, args)
        return plain(*args, **kwargs)

    with _in_place_of(original, apply):
        yield
