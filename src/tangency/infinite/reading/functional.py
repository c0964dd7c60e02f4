"""Which rule reads which function of torch; torch.nn.functional's layers become the modules that they belong to."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.basic import Conv
from ..moments.fields import Field
from ..moments.ops import Scale
from .arithmetic import elementwise, linear, matmul, plus, power, times, weigh_mask
from .calls import Call, Parameter
from .modules import convert
from .tensors import (
    attribute,
    cat,
    expand,
    flatten,
    getitem,
    pad,
    permute,
    reduce,
    repeat,
    reshape,
    shape_of,
    squeeze,
    transpose,
    unchanged,
    unsqueeze,
)


def as_module(kind: Callable[..., nn.Module], *names: str) -> Callable[[Call], Any]:
    """A functional form whose options, in this order, are those of a module."""

    def read(call: Call) -> Any:
        given = dict(zip(("input", *names), call.args, strict=False)) | call.kwargs
        value = given.pop("input")
        module = kind(**{k: v for k, v in given.items() if k != "training"})
        module.train(bool(given.get("training", True)))
        return convert(module, call.build, call.weights, "", (value,), {})

    return read


def dropout(call: Call) -> Any:
    training = bool(call.get(2, "training", True))
    module = nn.Dropout(float(call.get(1, "p", 0.5))).train(training)
    return convert(module, call.build, call.weights, "", (call.get(0, "input"),), {})


def conv(call: Call) -> Any:
    """F.conv with parameters."""
    order = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = dict(zip(order, call.args, strict=False)) | call.kwargs
    weight, bias = given["weight"], given.get("bias")
    if not isinstance(weight, Parameter):
        raise call.build.unsupported("has weights that are no parameter.", "Use nn.Conv.")
    if bias is not None and not isinstance(bias, Parameter):
        raise call.build.unsupported("has a bias that is no parameter.", "Use nn.Conv.")
    if weight.factor != 1 or (bias is not None and bias.factor != 1):
        raise call.build.unsupported("has a multiple of a parameter for weights or bias.", "Multiply its output.")
    source: Any = SimpleNamespace(weight=weight.value, bias=None if bias is None else bias.value)
    layer = Conv(
        tuple(weight.value.shape[2:]), given.get("stride", 1), given.get("padding", 0), given.get("dilation", 1),
        given.get("groups", 1), bias=bias is not None, width=weight.value.shape[0], of=source,
    )  # fmt: skip
    names = (weight.name, bias.name if bias is not None else weight.name + ".bias")
    return layer.grow(call.build, given["input"], call.weights, "", names)


def layer_norm(call: Call) -> Any:
    order = ("input", "normalized_shape", "weight", "bias", "eps")
    given = dict(zip(order, call.args, strict=False)) | call.kwargs
    if given.get("weight") is not None or given.get("bias") is not None:
        raise call.build.unsupported("has parameters of its own.", "Use nn.LayerNorm.")
    module = nn.LayerNorm(given["normalized_shape"], given.get("eps", 1e-5), elementwise_affine=False)
    return convert(module, call.build, call.weights, "", (given["input"],), {})


def chunk(call: Call) -> Any:
    """Parts of the channels: independent fields of one law."""
    f, count, dim = call.field(), call.get(1, "chunks"), call.get(2, "dim", 0)
    (axis,) = call.dims(dim, f)
    if axis != f.channel:
        size = -(-f.shape[axis] // count)
        starts = range(0, f.shape[axis], size)
        return tuple(
            call.build.take(f, axis, tuple(range(s, min(s + size, f.shape[axis]))), drop=False) for s in starts
        )
    return parts(call, f, count)


def parts(call: Call, f: Field, count: int) -> tuple[Field, ...]:
    if not f.gaussian or f.width % count:
        raise call.build.unsupported(
            f"takes {f.width} channels apart into {count}.", "Do so right after a Linear or Conv, into equal parts."
        )
    shape = (*f.shape[: f.channel], f.width // count, *f.shape[f.channel + 1 :])
    made = [call.build.same(Scale(1.0), f, shape=shape) for _ in range(count)]
    return tuple(_apart(g, k) for k, g in enumerate(made))


def _apart(f: Field, part: int) -> Field:
    return replace(f, sources=frozenset((source, part) for source in f.sources))


def glu(call: Call) -> Any:
    f = call.field()
    (axis,) = call.dims(call.get(1, "dim", -1), f)
    if axis != f.channel:
        raise call.build.unsupported("gates positions by positions.", "Gate along the channels.")
    a, b = parts(call, f, 2)
    return call.build.product([a, call.build.elementwise(b, torch.sigmoid, None, "sigmoid")])


def refused(what: str, instead: str) -> Callable[[Call], Any]:
    def read(call: Call) -> Any:
        raise call.build.unsupported(what, instead)

    return read


ELEMENTWISE: tuple[Any, ...] = (
    torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.cos, torch.exp, torch.abs, torch.sign,
    torch.square, torch.sqrt, torch.clamp, torch.expm1, torch.log1p, torch.atan, torch.sinh, torch.cosh,
    torch.asinh, torch.selu, torch.celu, torch.relu_, torch.tanh_, torch.sigmoid_, torch.special.erf,
    torch.special.expit, F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish,
    F.softplus, F.softsign, F.logsigmoid, F.tanhshrink, F.softshrink, F.hardshrink, F.hardtanh, F.hardswish,
    F.hardsigmoid, F.threshold, F.tanh, F.sigmoid,
)  # fmt: skip
ELEMENTWISE_METHODS = {
    name: getattr(torch, name)
    for name in ("relu", "tanh", "sigmoid", "erf", "sin", "cos", "exp", "abs", "sign", "square", "clamp", "sqrt")
}
METHODS: dict[str, Callable[[Call], Any]] = {
    "view": reshape, "reshape": reshape, "flatten": flatten, "permute": permute, "transpose": transpose,
    "swapaxes": transpose, "t": transpose, "pow": power, "repeat": repeat, "unsqueeze": unsqueeze,
    "squeeze": squeeze, "size": shape_of, "bmm": matmul, "matmul": matmul, "masked_fill": weigh_mask,
    "mul": times, "mul_": times, "add": plus, "add_": plus,
    "sub": partial(plus, sign=-1.0), "div": partial(times, divide=True),
    "neg": lambda c: c.build.scaled(c.args[0], -1.0),
    "mean": partial(reduce, mean=True), "sum": partial(reduce, mean=False), "dim": lambda c: len(c.args[0].shape) + 1,
    **dict.fromkeys(("contiguous", "float", "double", "to", "clone", "type_as"), unchanged),
    **dict.fromkeys(("expand", "expand_as"), expand),
}  # fmt: skip
METHODS |= {name: partial(elementwise, target=fn, method=name) for name, fn in ELEMENTWISE_METHODS.items()}
METHODS |= {f"{name}_": METHODS[name] for name in (*ELEMENTWISE_METHODS, "sub", "div", "neg", "pow", "masked_fill")}

FUNCTIONS: dict[Any, Callable[[Call], Any]] = {
    operator.add: plus, operator.iadd: plus, torch.add: plus,
    operator.sub: partial(plus, sign=-1.0), torch.sub: partial(plus, sign=-1.0),
    operator.isub: partial(plus, sign=-1.0), operator.itruediv: partial(times, divide=True), operator.ipow: power,
    operator.mul: times, operator.imul: times, torch.mul: times,
    operator.truediv: partial(times, divide=True), torch.div: partial(times, divide=True),
    operator.neg: lambda c: c.build.scaled(c.args[0], -1.0), torch.neg: lambda c: c.build.scaled(c.args[0], -1.0),
    operator.matmul: matmul, torch.matmul: matmul, torch.bmm: matmul, torch.sparse.mm: matmul, torch.mm: matmul,
    operator.getitem: getitem, getattr: attribute, F.linear: linear,
    torch.reshape: reshape, torch.flatten: flatten, torch.permute: permute, torch.transpose: transpose,
    torch.swapaxes: transpose, torch.t: transpose, operator.pow: power, torch.pow: power,
    torch.unsqueeze: unsqueeze, torch.squeeze: squeeze, torch.cat: cat, torch.concat: cat,
    torch.mean: partial(reduce, mean=True), torch.sum: partial(reduce, mean=False), F.pad: pad,
}  # fmt: skip
FUNCTIONS |= {fn: partial(elementwise, target=fn) for fn in ELEMENTWISE}

POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
NO_TABLE = refused("reads a table by a function.", "Use nn.Embedding.")
NO_MAX = refused("has no known infinite-width limit.", "Use average pooling or strides.")
NO_SOFTMAX = refused(
    "is a softmax of random values.", "Leave the last one to the loss; for attention use nn.MultiheadAttention."
)
FUNCTIONS |= {
    F.avg_pool1d: as_module(nn.AvgPool1d, *POOL), F.avg_pool2d: as_module(nn.AvgPool2d, *POOL),
    F.avg_pool3d: as_module(nn.AvgPool3d, *POOL),
    F.adaptive_avg_pool1d: as_module(nn.AdaptiveAvgPool1d, "output_size"),
    F.adaptive_avg_pool2d: as_module(nn.AdaptiveAvgPool2d, "output_size"),
    F.adaptive_avg_pool3d: as_module(nn.AdaptiveAvgPool3d, "output_size"),
    F.interpolate: as_module(nn.Upsample, "size", "scale_factor", "mode", "align_corners"),
    F.dropout: dropout, F.layer_norm: layer_norm, F.conv1d: conv, F.conv2d: conv, F.conv3d: conv,
    torch.conv1d: conv, torch.conv2d: conv, torch.conv3d: conv, torch.chunk: chunk, F.glu: glu, F.embedding: NO_TABLE,
    F.max_pool1d: NO_MAX, F.max_pool2d: NO_MAX, F.max_pool3d: NO_MAX, torch.max_pool2d: NO_MAX, torch.amax: NO_MAX,
    torch.max: NO_MAX, F.softmax: NO_SOFTMAX, torch.softmax: NO_SOFTMAX, F.log_softmax: NO_SOFTMAX,
    torch.log_softmax: NO_SOFTMAX,
}  # fmt: skip
METHODS |= {"chunk": chunk, "softmax": NO_SOFTMAX, "log_softmax": NO_SOFTMAX, "max": NO_MAX, "amax": NO_MAX}
