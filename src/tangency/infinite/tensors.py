"""What forward() does to tensors between the layers: arithmetic, shapes, indexing, sums over positions."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fields import Builder, Field, Joint, Lazy, Normed
from .ops import Affine
from .positions import Aggregate, Pad, Permute, Total
from .quadrature import recognize
from .weights import Weights

RANDOM = (Field, Lazy, Joint, Normed)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the module, used as a value or as weights."""

    value: nn.Parameter
    name: str


@dataclass(frozen=True)
class Call:
    """One call in forward(): its arguments, and the plan being built."""

    build: Builder
    weights: Weights
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str

    def get(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def field(self, position: int = 0) -> Field:
        return self.build.settled(self.args[position])

    def dims(self, given: Any, f: Field) -> tuple[int, ...]:
        """Axes of a tensor with its batch, as axes of the field's shape."""
        every = len(f.shape) + 1
        found = tuple(d % every for d in ((given,) if isinstance(given, int) else tuple(given)))
        if 0 in found:
            raise self.build.unsupported("acts along the batch.", "Samples must not mix: leave axis 0 alone.")
        return tuple(d - 1 for d in found)


def elementwise(call: Call, target: Callable[..., Any], method: str | None = None) -> Any:
    value, rest, kwargs = call.args[0], call.args[1:], {k: v for k, v in call.kwargs.items() if k != "inplace"}
    dual = recognize(target, *rest, **kwargs)
    return call.build.elementwise(value, partial(_apply, target, rest, kwargs), dual, method or call.label)


def _apply(target: Callable[..., Any], rest: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Tensor:
    found: Tensor = target(x, *rest, **kwargs)
    return found


# Arithmetic


def _origin(value: Any) -> tuple[Field, Callable[[Tensor], Tensor]] | None:
    """The Gaussian field that a value is an elementwise function of."""
    if isinstance(value, Lazy):
        fn, scale = value.fn, value.scale
        return value.of, (lambda x: scale * fn(x)) if scale != 1 else fn
    if isinstance(value, Field) and value.gaussian:
        return value, lambda x: x
    return None


def _together(a: Any, b: Any, op: Callable[[Tensor, Tensor], Tensor], label: str) -> Lazy | None:
    """Two elementwise functions of one field, joined: a function of it."""
    left, right = _origin(a), _origin(b)
    if left is None or right is None or left[0].node != right[0].node:
        return None
    f, g = left[1], right[1]
    return Lazy(left[0], None, lambda x: op(f(x), g(x)), label=label)


def _number(value: Any) -> float | None:
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        return float(value)
    return None


def plus(call: Call, sign: float = 1.0) -> Any:
    a, b = call.args[0], call.get(1, "other")
    factor = float(call.kwargs.get("alpha", 1.0))
    if not isinstance(a, RANDOM):
        a, b, swapped = b, a, True
    else:
        swapped = False
    shift = _number(b)
    if shift is not None:
        if shift == 0:
            return a
        own = -1.0 if swapped and sign < 0 else 1.0
        by = shift if swapped else sign * factor * shift
        return call.build.elementwise(a, lambda x: own * x + by, None, call.label)
    if isinstance(b, RANDOM):
        joined = _together(a, b, lambda x, y: x + sign * factor * y, call.label)
        if joined is not None:
            return joined
        return call.build.sum([a, call.build.scaled(b, factor) if factor != 1 else b])
    return call.build.sum([a, _beside(call, b, a)])


def _beside(call: Call, value: Any, like: Any) -> Any:
    """A known tensor or a parameter, broadcast to the shape of a random value."""
    shape = like.shape
    if isinstance(value, Parameter):
        sizes = [1] * (len(shape) - value.value.dim()) + list(value.value.shape)
        sizes = sizes[-len(shape) :]
        if sizes[like.channel] != shape[like.channel]:
            raise call.build.unsupported(
                f"adds the parameter {value.name}, which is not one number per channel.",
                "Give it the channels' size on their axis.",
            )
        f = call.build.drawn(tuple(sizes), like.channel)
        f = call.build.affine(f, f.width, call.weights.value(value.name, value.value))
        for dim, (have, want) in enumerate(zip(sizes, shape, strict=True)):
            if have != want:
                f = call.build.take(f, dim, (0,) * want, drop=False)
        return f
    return value.expand(call.build.size, *shape) if value.dim() <= len(shape) + 1 else value


def times(call: Call, divide: bool = False) -> Any:
    a, b = call.args[0], call.get(1, "other")
    build = call.build
    if not isinstance(a, RANDOM) and not divide:
        a, b = b, a
    factor = _number(b)
    if not isinstance(a, RANDOM) or (divide and isinstance(b, RANDOM)):
        joined = _together(a, b, torch.div, call.label) if isinstance(a, RANDOM) else None
        if joined is None:
            raise build.unsupported("divides by a random value.", "Use a norm layer, or multiply.")
        return joined
    if factor is not None:
        return build.scaled(a, 1 / factor if divide else factor)
    if isinstance(b, RANDOM):
        return _together(a, b, torch.mul, call.label) or build.product([a, b])
    if isinstance(b, Parameter):
        return _gain(call, a, b)
    known = (b.reciprocal() if divide else b).double()
    shape = (build.size, *a.shape)
    aligned = known.reshape(*[1] * (len(shape) - known.dim()), *known.shape)
    if aligned.shape[1 + a.channel] != 1:
        raise build.unsupported(
            "multiplies each channel by a number of its own.", "Give the factor size 1 on the channels' axis."
        )
    return build.weighed(a, aligned.expand(build.size, *aligned.shape[1:]))


def _gain(call: Call, value: Any, by: Parameter) -> Field:
    """Each channel times a parameter of its own (LayerScale)."""
    f = call.build.settled(value)
    rate = call.weights.rate(by.name)
    if by.value.numel() == 1 and f.width != 1:
        if rate:
            raise call.build.unsupported(
                f"multiplies all channels by one trained number ({by.name}), whose gradient has no limit.",
                "Freeze it (train=), or give every channel its own.",
            )
        return call.build.settled(call.build.scaled(value, float(by.value)))
    square = by.value.detach().double().square()
    constant = float(square.max() - square.min()) == 0
    scaled = call.build.same(Affine(float(square.mean())), f, gaussian=f.gaussian and constant)
    factor = rate / float(square.mean()) if float(square.mean()) else 0.0
    if not factor and rate:
        return call.build.same(Affine(0.0, 0.0, rate), f, gaussian=False)
    return replace(scaled, gain=factor)


def weigh_mask(call: Call) -> Any:
    """masked_fill(mask, 0)."""
    value, mask, fill = call.args[0], call.get(1, "mask"), call.get(2, "value")
    if _number(fill) != 0:
        raise call.build.unsupported(f"fills random values with {fill}.", "Fill with 0, or use key_padding_mask.")
    return times(replace(call, args=(value, (~mask).double()), kwargs={}))


def matmul(call: Call) -> Any:
    """A known matrix over positions times values (graphs), or values times a parameter (a linear layer)."""
    a, b = call.args[0], call.get(1, "mat2", call.kwargs.get("other"))
    build = call.build
    if isinstance(b, Parameter) and isinstance(a, (*RANDOM, Tensor)):
        return _linear(call, a, b, None, b.value.shape[0], b.value.shape[1])
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
    rows = weight.value.shape[0] if weight.value.dim() == 2 else 1
    return _linear(call, value, weight, bias, weight.value.shape[-1], rows)


def _linear(call: Call, value: Any, weight: Parameter, bias: Parameter | None, fan_in: int, width: int) -> Field:
    f = call.build.field(value, -1)
    names = (weight.name, bias.name if bias is not None else weight.name + ".bias")
    tensors = (weight.value, None if bias is None else bias.value)
    op = call.weights.layer("", fan_in, bias=bias is not None, tensors=tensors, names=names)
    return call.build.affine(f, width, op)


# Shapes


def reshape(call: Call) -> Field:
    f = call.field()
    given = call.args[1] if len(call.args) == 2 and not isinstance(call.args[1], int) else call.args[1:]
    new = list(given) or list(call.kwargs.get("shape", call.kwargs.get("size", ())))
    total = call.build.size * prod(f.shape)
    if -1 in new:
        new[new.index(-1)] = total // max(1, prod(n for n in new if n != -1))
    if prod(new) != total or not new or new[0] != call.build.size:
        raise call.build.unsupported(
            f"gives values of shape {(call.build.size, *f.shape)} the shape {tuple(new)}.", "Keep the batch as axis 0."
        )
    return reshaped(call, f, tuple(new[1:]))


def reshaped(call: Call, f: Field, new: tuple[int, ...]) -> Field:
    """Merge and split axes; positions merged with the channels become channels."""
    for old_dims, new_dims in _groups(f.shape, new):
        if f.channel in old_dims:
            big = [k for k in new_dims if new[k] != 1]
            if len(big) > 1:
                raise call.build.unsupported(
                    "splits the channels over several axes.",
                    "For attention use nn.MultiheadAttention; else keep the channels on one axis.",
                )
            place = big[0] if big else new_dims[0]
            merged = tuple(f.axis(k) for k in old_dims if k != f.channel and f.shape[k] != 1)
            out = call.build.flatten(f, merged) if merged else f
            return call.build.regrid(out, new, place)
    raise AssertionError("no axis holds the channels")


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of axes with equal products, in order."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        left, right, a, b = [i], [j], old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                left, a, i = [*left, i], a * old[i], i + 1
            else:
                right, b, j = [*right, j], b * new[j], j + 1
        found.append((left, right))
    found[-1][0].extend(range(i, len(old)))  # axes of size 1 that are left
    found[-1][1].extend(range(j, len(new)))
    return found


def flatten(call: Call) -> Field:
    f = call.field()
    every = len(f.shape) + 1
    start, end = call.get(1, "start_dim", 0) % every, call.get(2, "end_dim", -1) % every
    full = (call.build.size, *f.shape)
    new = (*full[:start], prod(full[start : end + 1]), *full[end + 1 :])
    return reshape(replace(call, args=(f, tuple(new)), kwargs={}))


def permute(call: Call) -> Field:
    f = call.field()
    given = call.args[1] if len(call.args) == 2 and not isinstance(call.args[1], int) else call.args[1:]
    return _permuted(call, f, tuple(given) or tuple(call.kwargs["dims"]))


def transpose(call: Call) -> Field:
    f = call.field()
    order = list(range(len(f.shape) + 1))
    a, b = call.get(1, "dim0") % len(order), call.get(2, "dim1") % len(order)
    order[a], order[b] = order[b], order[a]
    return _permuted(call, f, tuple(order))


def _permuted(call: Call, f: Field, order: tuple[int, ...]) -> Field:
    if order[0] % (len(f.shape) + 1) != 0:
        raise call.build.unsupported("moves the batch from axis 0.", "Use batch_first layers, and leave axis 0 alone.")
    dims = call.dims(order[1:], f)
    shape = tuple(f.shape[d] for d in dims)
    grid = tuple(f.axis(d) for d in dims if d != f.channel)
    new = replace(f, shape=shape, channel=dims.index(f.channel))
    if grid == tuple(range(len(grid))):
        return new
    return call.build.same(Permute(grid), f, shape=shape, channel=new.channel)


def unsqueeze(call: Call) -> Field:
    f = call.field()
    dim = call.get(1, "dim") % (len(f.shape) + 2)
    if dim == 0:
        raise call.build.unsupported("puts an axis before the batch.", "Keep the batch as axis 0.")
    shape = (*f.shape[: dim - 1], 1, *f.shape[dim - 1 :])
    return call.build.regrid(f, shape, f.channel + (dim - 1 <= f.channel))


def squeeze(call: Call) -> Field:
    f = call.field()
    given = call.get(1, "dim")
    dims = call.dims(given, f) if given is not None else tuple(range(len(f.shape)))
    gone = [d for d in dims if f.shape[d] == 1 and d != f.channel]  # an only channel stays: it is the output
    shape = tuple(n for k, n in enumerate(f.shape) if k not in gone)
    return call.build.regrid(f, shape, f.channel - sum(d < f.channel for d in gone)) if gone else f


def reduce(call: Call, mean: bool) -> Field:
    f = call.field()
    given = call.get(1, "dim", call.kwargs.get("axis"))
    if given is None:
        raise call.build.unsupported("reduces everything to one number.", "Name the positions' axes: dim=…")
    dims = call.dims(given, f)
    if f.channel in dims:
        raise call.build.unsupported(
            f"takes the {'mean' if mean else 'sum'} over the channels (axis {f.channel + 1}).",
            "That is one fixed read-out; use a Linear layer.",
        )
    keep = call.get(2, "keepdim", False)
    axes = tuple(f.axis(d) for d in dims)
    shape = tuple(n for k, n in enumerate(f.shape) if k not in dims)
    channel = f.channel - sum(d < f.channel for d in dims)
    found = call.build.same(Total(axes, mean), f, shape=shape, channel=channel)
    if not keep:
        return found
    return call.build.regrid(found, tuple(1 if k in dims else n for k, n in enumerate(f.shape)), f.channel)


def getitem(call: Call) -> Any:
    value, index = call.args[0], call.args[1]
    if not isinstance(value, RANDOM):
        return value[index]
    f = call.field()
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(f.shape) + 2 - len(items))
    if not (isinstance(items[0], slice) and items[0] == slice(None)):
        raise call.build.unsupported("indexes the batch.", "Keep all samples: x[:, …].")
    dim = 0
    for item in items[1:]:
        if isinstance(item, slice):
            f = _sliced(call, f, dim, item)
            dim += 1
        elif isinstance(item, int):
            if dim == f.channel:
                raise call.build.unsupported("picks one channel.", "Use a Linear layer as read-out.")
            f = call.build.take(f, dim, (item % f.shape[dim],), drop=True)
        else:
            raise call.build.unsupported(f"indexes by {item!r}.", "Use numbers and slices.")
    return f


def _sliced(call: Call, f: Field, dim: int, item: slice) -> Field:
    index = tuple(range(*item.indices(f.shape[dim])))
    if len(index) == f.shape[dim] and item.step in (None, 1):
        return f
    if dim == f.channel:
        raise call.build.unsupported("takes some of the channels.", "Use two layers, one for each part.")
    return call.build.take(f, dim, index, drop=False)


def cat(call: Call) -> Field:
    values = list(call.args[0] if call.args else call.kwargs["tensors"])
    build = call.build
    like = next(v for v in values if isinstance(v, RANDOM))
    dim = call.get(1, "dim", 0) % (len(like.shape) + 1) - 1
    if dim < 0:
        raise build.unsupported("joins batches.", "Samples must not mix: use another axis.")
    if dim == like.channel:
        return build.concat_channels(values)
    fields = build.fields([_token(call, v, like) for v in values])
    return build.concat_positions(fields, fields[0].axis(dim))


def _token(call: Call, value: Any, like: Any) -> Any:
    """A parameter among the values of cat: a class token."""
    if not isinstance(value, Parameter):
        return value
    shape = tuple(value.value.shape[-len(like.shape) :])
    f = call.build.drawn(shape, like.channel)
    return call.build.affine(f, f.width, call.weights.value(value.name, value.value))


def pad(call: Call) -> Field:
    f = call.field()
    amounts = list(call.get(1, "pad"))
    mode, value = call.get(2, "mode", "constant"), call.get(3, "value", 0)
    if mode != "constant" or value not in (0, None):
        raise call.build.unsupported(f"pads by {mode} {value}.", "Pad with zeros, or use padding_mode='circular'.")
    every = [(0, 0)] * len(f.shape)
    for k in range(len(amounts) // 2):
        every[len(f.shape) - 1 - k] = (amounts[2 * k], amounts[2 * k + 1])
    if every[f.channel] != (0, 0):
        raise call.build.unsupported("pads the channels.", "Use a 1×1 convolution.")
    grid = tuple(p for k, p in enumerate(every) if k != f.channel)
    shape = tuple(n + sum(p) for n, p in zip(f.shape, every, strict=True))
    return call.build.same(Pad(grid), f, shape=shape)


def shape_of(call: Call) -> Any:
    value = call.args[0]
    sizes = torch.Size((call.build.size, *value.shape))
    dim = call.get(1, "dim")
    return sizes if dim is None else sizes[dim]


def attribute(call: Call) -> Any:
    value, name = call.args[0], call.args[1]
    if isinstance(value, Parameter):
        found = getattr(value.value, name)
        return found
    if name == "shape":
        return torch.Size((call.build.size, *value.shape))
    if name == "ndim":
        return len(value.shape) + 1
    if name == "dtype":
        return torch.float64
    if name == "device":
        return next(iter(call.build.known.values())).device
    raise call.build.unsupported(f"reads .{name} of random values.", "Use shape, size() or dim().")


def unchanged(call: Call) -> Any:
    value = call.args[0]
    if isinstance(value, Parameter) or len(call.args) == 1 or isinstance(value, RANDOM):
        return value
    return value


ELEMENTWISE: tuple[Any, ...] = (
    torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.cos, torch.exp, torch.abs, torch.sign,
    torch.square, torch.pow, torch.sqrt, torch.clamp, torch.expm1, torch.log1p, torch.atan, torch.sinh, torch.cosh,
    torch.asinh, torch.selu, torch.celu, torch.relu_, torch.tanh_, torch.sigmoid_, operator.pow, torch.special.erf,
    torch.special.expit, F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish,
    F.softplus, F.softsign, F.logsigmoid, F.tanhshrink, F.softshrink, F.hardshrink, F.hardtanh, F.hardswish,
    F.hardsigmoid, F.threshold, F.tanh, F.sigmoid,
)  # fmt: skip
ELEMENTWISE_METHODS = {
    name: getattr(torch, name)
    for name in ("relu", "tanh", "sigmoid", "erf", "sin", "cos", "exp", "abs", "sign", "square", "pow", "clamp", "sqrt")
}
METHODS: dict[str, Callable[[Call], Any]] = {
    "view": reshape, "reshape": reshape, "flatten": flatten, "permute": permute, "transpose": transpose,
    "swapaxes": transpose, "unsqueeze": unsqueeze, "squeeze": squeeze, "size": shape_of, "bmm": matmul,
    "matmul": matmul, "masked_fill": weigh_mask, "mul": times, "mul_": times, "add": plus, "add_": plus,
    "sub": partial(plus, sign=-1.0), "div": partial(times, divide=True),
    "neg": lambda c: c.build.scaled(c.args[0], -1.0),
    "mean": partial(reduce, mean=True), "sum": partial(reduce, mean=False), "dim": lambda c: len(c.args[0].shape) + 1,
    **dict.fromkeys(("contiguous", "float", "double", "to", "clone", "type_as", "expand", "expand_as"), unchanged),
}  # fmt: skip
METHODS |= {name: partial(elementwise, target=fn, method=name) for name, fn in ELEMENTWISE_METHODS.items()}

FUNCTIONS: dict[Any, Callable[[Call], Any]] = {
    operator.add: plus, operator.iadd: plus, torch.add: plus,
    operator.sub: partial(plus, sign=-1.0), torch.sub: partial(plus, sign=-1.0),
    operator.mul: times, operator.imul: times, torch.mul: times,
    operator.truediv: partial(times, divide=True), torch.div: partial(times, divide=True),
    operator.neg: lambda c: c.build.scaled(c.args[0], -1.0), torch.neg: lambda c: c.build.scaled(c.args[0], -1.0),
    operator.matmul: matmul, torch.matmul: matmul, torch.bmm: matmul, torch.sparse.mm: matmul, torch.mm: matmul,
    operator.getitem: getitem, getattr: attribute, F.linear: linear,
    torch.reshape: reshape, torch.flatten: flatten, torch.permute: permute, torch.transpose: transpose,
    torch.swapaxes: transpose, torch.unsqueeze: unsqueeze, torch.squeeze: squeeze, torch.cat: cat, torch.concat: cat,
    torch.mean: partial(reduce, mean=True), torch.sum: partial(reduce, mean=False), F.pad: pad,
}  # fmt: skip
FUNCTIONS |= {fn: partial(elementwise, target=fn) for fn in ELEMENTWISE}
