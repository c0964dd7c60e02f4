"""Arithmetic in forward(): sums, products, powers, matrices."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ..activations.quadrature import recognize
from ..moments.fields import Field, Lazy
from ..moments.ops import Affine
from ..moments.positions import Aggregate
from .calls import RANDOM, Call, Parameter


def elementwise(call: Call, target: Callable[..., Any], method: str | None = None) -> Any:
    value, rest, kwargs = call.args[0], call.args[1:], {k: v for k, v in call.kwargs.items() if k != "inplace"}
    for v in (*rest, *kwargs.values()):
        if isinstance(v, (Parameter, *RANDOM)) or (isinstance(v, Tensor) and v.numel() != 1):
            raise call.build.unsupported("is given a tensor beside its input.", "Give numbers, or use arithmetic.")
    dual = recognize(target, *rest, **kwargs)
    return call.build.elementwise(value, partial(_apply, target, rest, kwargs), dual, method or call.label)


def _apply(target: Callable[..., Any], rest: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Tensor:
    found: Tensor = target(x, *rest, **kwargs)
    return found


def _together(call: Call, a: Any, b: Any, op: Callable[[Tensor, Tensor], Tensor]) -> Lazy | None:
    """Two elementwise functions of one field, joined: a function of it."""
    left, right = call.build.origin(a), call.build.origin(b)
    if left is None or right is None or len(left[0]) != 1 or [f.node for f in left[0]] != [f.node for f in right[0]]:
        return None
    f, g = left[1], right[1]
    return Lazy(left[0][0], None, lambda x: op(f(x), g(x)), label=call.label)


def _number(call: Call, value: Any) -> float | None:
    """A number that no sample may have changed: it is noted, to compare."""
    if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad:
        value = float(value)
    if not isinstance(value, (bool, int, float)):
        return None
    call.build.numbers.append(float(value))
    return float(value)


def plus(call: Call, sign: float = 1.0) -> Any:
    a, b = call.get(0, "input"), call.get(1, "other")
    weights = (1.0, sign * float(call.kwargs.get("alpha", 1.0)))
    if not isinstance(a, RANDOM):
        a, b, weights = b, a, weights[::-1]
    if not isinstance(a, RANDOM):
        raise call.build.unsupported("adds a parameter to an input.", "Put a layer with weights before it.")
    own, other = weights
    shift = _number(call, b)
    if shift is not None:
        if shift == 0 and own == 1:
            return a
        return call.build.elementwise(a, lambda x: own * x + other * shift, None, call.label)
    if isinstance(b, RANDOM):
        joined = _together(call, a, b, lambda x, y: own * x + other * y)
        if joined is not None:
            return joined
    else:
        b = _beside(call, b, a)
    first, second = (v if w == 1 else _multiple(call, v, w) for v, w in ((a, own), (b, other)))
    return call.build.sum([first, second])


def _multiple(call: Call, value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, Tensor) else call.build.scaled(value, factor)


def _beside(call: Call, value: Any, like: Any) -> Any:
    """A known tensor or a parameter, broadcast to the shape of a random value."""
    shape = like.shape
    if isinstance(value, Parameter):
        sizes = [1] * (len(shape) - value.value.dim()) + list(value.value.shape)
        if value.value.dim() > len(shape) + 1 or (value.value.dim() == len(shape) + 1 and value.value.shape[0] != 1):
            raise call.build.unsupported(f"adds {value.name}, whose first axis is the batch.", "Give it size 1 there.")
        sizes = sizes[-len(shape) :]
        if sizes[like.channel] != shape[like.channel]:
            raise call.build.unsupported(
                f"adds the parameter {value.name}, which is not one number per channel.",
                "Give it the channels' size on their axis.",
            )
        f = call.build.drawn(tuple(sizes), like.channel)
        f = call.build.affine(f, f.width, call.weights.value(value.name, value.value, value.factor))
        for dim, (have, want) in enumerate(zip(sizes, shape, strict=True)):
            if have != want:
                f = call.build.take(f, dim, (0,) * want, drop=False)
        return f
    if value.dim() > len(shape) + 1:
        raise InputError(f"{call.build.where}: values of shapes {tuple(value.shape)} and {(call.build.size, *shape)}.")
    return value.expand(call.build.size, *shape)


def times(call: Call, divide: bool = False) -> Any:
    a, b = call.get(0, "input"), call.get(1, "other")
    build = call.build
    if not divide and not isinstance(a, RANDOM) and (isinstance(b, RANDOM) or not isinstance(a, Parameter)):
        a, b = b, a
    factor = _number(call, b)
    if isinstance(a, Parameter) and factor is not None:
        return replace(a, factor=a.factor * (1 / factor if divide else factor))
    if divide and isinstance(b, RANDOM):
        return _quotient(call, a, b)
    if not isinstance(a, RANDOM):
        raise build.unsupported("multiplies an input by a parameter.", "Put a layer with weights before it.")
    if factor is not None:
        return build.scaled(a, 1 / factor if divide else factor)
    if isinstance(b, RANDOM):
        return _together(call, a, b, torch.mul) or build.product([a, b])
    if isinstance(b, Parameter):
        if divide:
            raise build.unsupported(f"divides by the parameter {b.name}.", "Multiply by one.")
        return _gain(call, a, b)
    known = b.double().reciprocal() if divide else b.double()
    shape = (build.size, *a.shape)
    aligned = known.reshape(*[1] * (len(shape) - known.dim()), *known.shape)
    if aligned.shape[1 + a.channel] != 1:
        raise build.unsupported(
            "multiplies each channel by a number of its own.", "Give the factor size 1 on the channels' axis."
        )
    return build.weighed(a, aligned.expand(build.size, *aligned.shape[1:]))


def _quotient(call: Call, a: Any, b: Any) -> Any:
    number = _number(call, a)
    if number is not None:
        return call.build.elementwise(b, lambda x: number / x, None, call.label)
    joined = _together(call, a, b, torch.div) if isinstance(a, RANDOM) else None
    if joined is None:
        raise call.build.unsupported("divides by a random value.", "Use a norm layer, or multiply.")
    return joined


def power(call: Call) -> Any:
    base, exponent = call.get(0, "input"), call.get(1, "exponent")
    if isinstance(base, RANDOM):
        return elementwise(call, torch.pow)
    number = _number(call, base)
    if number is None:
        raise call.build.unsupported("raises a known value to a random one.", "Use a number as base.")
    return call.build.elementwise(exponent, lambda x: number**x, None, call.label)


def _gain(call: Call, value: Any, by: Parameter) -> Field:
    """Each channel times a parameter of its own (LayerScale)."""
    f = call.build.settled(value)
    rate = call.weights.rate(by.name) * by.factor**2
    if by.value.numel() == 1 and f.width != 1:
        if rate:
            raise call.build.unsupported(
                f"multiplies all channels by one trained number ({by.name}), whose gradient has no limit.",
                "Freeze it (train=), or give every channel its own.",
            )
        return call.build.settled(call.build.scaled(value, float(by.value) * by.factor))
    square = (by.value.detach().double() * by.factor).square()
    constant = float(square.max() - square.min()) == 0
    scaled = call.build.same(Affine(float(square.mean())), f, gaussian=f.gaussian and constant)
    factor = rate / float(square.mean()) if float(square.mean()) else 0.0
    if not factor and rate:
        return call.build.same(Affine(0.0, 0.0, rate), f, gaussian=False)
    return replace(scaled, gain=factor)


def weigh_mask(call: Call) -> Any:
    """masked_fill(mask, 0)."""
    value, mask, fill = call.args[0], call.get(1, "mask"), call.get(2, "value")
    if _number(call, fill) != 0:
        raise call.build.unsupported(f"fills random values with {fill}.", "Fill with 0, or use key_padding_mask.")
    return times(replace(call, args=(value, (~mask).double()), kwargs={}))


def matmul(call: Call) -> Any:
    """A known matrix over positions times values (graphs), or values times a parameter (a linear layer)."""
    a, b = call.args[0], call.get(1, "mat2", call.kwargs.get("other"))
    build = call.build
    if isinstance(b, Parameter) and isinstance(a, (*RANDOM, Tensor)):
        width = b.value.shape[1] if b.value.dim() == 2 else 1
        return _linear(call, a, b, None, b.value.shape[0], width)
    if not isinstance(a, Tensor) or not isinstance(b, RANDOM):
        raise build.unsupported(
            "multiplies two random values as matrices.",
            "Use nn.MultiheadAttention, or SelfAttention of tangency.infinite.",
        )
    f = build.settled(b)
    if len(f.shape) != 2 or f.channel != 1:
        raise build.unsupported(f"aggregates values of shape {f.shape}.", "Needed: [batch, nodes, channels].")
    matrix = a.to_dense() if a.layout != torch.strided else a  # moments over positions are dense in any case
    matrix = (matrix if matrix.dim() == 3 else matrix.expand(build.size, *matrix.shape)).double()
    slot = build.slot(matrix.movedim(0, -1))
    return build.same(Aggregate(slot), f, shape=(matrix.shape[1], f.width))


def linear(call: Call) -> Any:
    """F.linear with parameters."""
    value, weight, bias = call.args[0], call.get(1, "weight"), call.get(2, "bias")
    if not isinstance(weight, Parameter):
        raise call.build.unsupported("has weights that are no parameter.", "Use nn.Linear.")
    if bias is not None and not isinstance(bias, Parameter):
        raise call.build.unsupported("has a bias that is no parameter.", "Use nn.Linear.")
    rows = weight.value.shape[0] if weight.value.dim() == 2 else 1
    return _linear(call, value, weight, bias, weight.value.shape[-1], rows)


def _linear(call: Call, value: Any, weight: Parameter, bias: Parameter | None, fan_in: int, width: int) -> Field:
    f = call.build.field(value, -1)
    if f.width != fan_in:
        raise InputError(f"{call.build.where}: the weights {weight.name} take {fan_in} features; given were {f.width}.")
    names = (weight.name, bias.name if bias is not None else weight.name + ".bias")
    tensors = (weight.value, None if bias is None else bias.value)
    op = call.weights.layer("", fan_in, bias=bias is not None, tensors=tensors, names=names)
    w, b = weight.factor**2, 1.0 if bias is None else bias.factor**2
    if (w, b) != (1.0, 1.0):
        op = replace(op, w_var=op.w_var * w, w_rate=op.w_rate * w, b_var=op.b_var * b, b_rate=op.b_rate * b)
    return call.build.affine(f, width, op)
