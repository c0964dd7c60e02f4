"""Which call of which torch function has which rule.

Rules are keyed by the *function* (`F.linear`, `F.conv2d`, …), not by the module type: a module, a functional call with
somebody else's weight and a tied weight are then the same thing. What has no rule goes through `torch.func`
(see `jacobian.py`). Each reader has the signature of its function, and says what is what in its arguments.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .apart.bilinear import grouped_linear
from .rules import Affine, Broadcast, Conv, ConvTranspose, Embedding, Grouped, Linear, NoRule, Rule, Windows


@dataclass(frozen=True)
class Call:
    """A call read: its rule, the input that the rule needs, and which tensors are weight and bias."""

    rule: Rule
    input: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None


Reader = Callable[..., Call]
READERS: dict[Any, Reader] = {}


def register(*functions: Any) -> Callable[[Reader], Reader]:
    """Give torch functions a rule: the decorated reader takes their arguments and returns a `Call`."""

    def add(reader: Reader) -> Reader:
        READERS.update((f, reader) for f in functions)
        return reader

    return add


def _tuple(v: int | Sequence[int], dims: int) -> tuple[int, ...]:
    if isinstance(v, int):
        return (v,) * dims
    v = tuple(v)
    return v * dims if len(v) == 1 else v


@register(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    return Call(Linear(vector=weight.dim() == 1), input, weight, bias)


@register(torch.matmul, torch.mm, torch.mv, Tensor.matmul, Tensor.mm, Tensor.mv, Tensor.__matmul__)
def _matmul(input: Tensor, other: Tensor) -> Call:
    if other.dim() > 2 or input.dim() < 2:
        raise NoRule
    return Call(Linear(transposed=other.dim() == 2, vector=other.dim() == 1), input, other)


@register(grouped_linear)
def _grouped(x: Tensor, weight: Tensor) -> Call:
    return Call(Grouped(), x, weight)


@register(torch.addmm, Tensor.addmm)
def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Call:
    if beta != 1 or alpha != 1 or input.dim() != 1:
        raise NoRule
    return Call(Linear(transposed=True), mat1, mat2, input)


@register(torch.conv1d, torch.conv2d, torch.conv3d)
def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Call:
    dims = weight.dim() - 2
    if input.dim() != dims + 2:
        raise NoRule  # unbatched
    kernel, gaps = tuple(weight.shape[2:]), _tuple(dilation, dims)
    if isinstance(padding, str):
        total = [g * (k - 1) if padding == "same" else 0 for g, k in zip(gaps, kernel, strict=True)]
        sides = tuple((v // 2, v - v // 2) for v in total)
    else:
        sides = tuple((v, v) for v in _tuple(padding, dims))
    return Call(Conv(Windows(kernel, _tuple(stride, dims), sides, gaps, groups)), input, weight, bias)


@register(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def _conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Call:
    dims = weight.dim() - 2
    if input.dim() != dims + 2:
        raise NoRule
    sides = tuple((v, v) for v in _tuple(padding, dims))
    windows = Windows(tuple(weight.shape[2:]), _tuple(stride, dims), sides, _tuple(dilation, dims), groups)
    return Call(ConvTranspose(windows), input, weight, bias)


@register(F.embedding)
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call:
    rows = weight.shape[0]
    padding = None if padding_idx is None else padding_idx % rows
    return Call(Embedding(rows, padding), input, weight)


@register(F.embedding_bag)
def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, *args: Any, mode: str = "mean", **options: Any
) -> Call:
    # nn.EmbeddingBag passes the rest by position: max_norm, norm_type, scale_grad_by_freq, mode, sparse, …
    names = ("max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "last", "padding")
    given = {"mode": mode, **dict(zip(names, args, strict=False)), **options}
    plain = all(given.get(k) is None for k in ("max_norm", "per_sample_weights", "padding_idx"))
    if input.dim() != 2 or offsets is not None or not plain or given["mode"] not in ("sum", "mean"):
        raise NoRule
    if given.get("padding") is not None:
        raise NoRule
    return Call(Embedding(weight.shape[0], bag=str(given["mode"])), input, weight)


@register(F.batch_norm)
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call:
    if training or running_mean is None:
        raise NoRule
    rule = Affine(lambda x: F.batch_norm(x, running_mean, running_var, eps=eps), rank=input.dim())
    return Call(rule, input, weight, bias)


@register(F.instance_norm)
def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call:
    def normalise(x: Tensor) -> Tensor:
        mean, var = (None, None) if use_input_stats else (running_mean, running_var)
        return F.instance_norm(x, mean, var, use_input_stats=use_input_stats, eps=eps)

    return Call(Affine(normalise, rank=input.dim()), input, weight, bias)


@register(F.group_norm)
def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Call:
    return Call(Affine(lambda x: F.group_norm(x, num_groups, eps=eps), rank=input.dim()), input, weight, bias)


@register(F.layer_norm)
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Call:
    shape = list(normalized_shape)
    return Call(Affine(lambda x: F.layer_norm(x, shape, eps=eps), trailing=len(shape)), input, weight, bias)


@register(F.rms_norm)
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Call:
    shape = list(normalized_shape)
    return Call(Affine(lambda x: F.rms_norm(x, shape, eps=eps), trailing=len(shape)), input, weight)


@register(torch.prelu, F.prelu, Tensor.prelu)
def _prelu(input: Tensor, weight: Tensor) -> Call:
    return Call(Affine(lambda x: x.clamp(max=0), rank=input.dim(), single=weight.numel() == 1), input, weight)


@register(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_)
def _mul(input: Any, other: Any) -> Call:
    return Call(Broadcast((), product=True), *_operands(input, other))


@register(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_)
def _add(input: Any, other: Any, *, alpha: float = 1) -> Call:
    if alpha != 1:
        raise NoRule
    return Call(Broadcast((), product=False), *_operands(input, other))


def _operands(input: Any, other: Any) -> tuple[Any, Any]:
    """Both as they are; capture finds out which one is the parameter."""
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        raise NoRule
    return input, other


@register(Tensor.__getitem__)
def _getitem(input: Tensor, index: Any) -> Call:
    """table[i] with row numbers i."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        raise NoRule
    return _rows(input, index)


@register(torch.index_select, Tensor.index_select)
def _index_select(input: Tensor, dim: int, index: Tensor) -> Call:
    if dim % input.dim() != 0 or index.dim() != 1:
        raise NoRule
    return _rows(input, index)


def _rows(table: Tensor, index: Tensor) -> Call:
    return Call(Embedding(table.shape[0], wrapped=True, trailing=table.dim() - 1), index, table)


def read(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call's rule, or None where the function has none or this call does not fit it."""
    reader = READERS.get(function)
    if reader is None:
        return None
    try:
        inspect.signature(reader).bind(*args, **kwargs)
        return reader(*args, **kwargs)
    except (NoRule, TypeError):
        return None


def _both(*names: str) -> frozenset[Any]:
    return frozenset(f for name in names for space in (torch, Tensor) if (f := getattr(space, name, None)) is not None)


# Elementwise functions of tensors that are broadcast against each other, beyond sums and products.
_ELEMENTWISE = _both(
    "add", "add_", "__add__", "__radd__", "mul", "mul_", "sub", "sub_", "subtract", "rsub", "__sub__", "__rsub__",
    "div",
    "div_", "divide", "true_divide", "__truediv__", "__rtruediv__", "__div__", "pow", "pow_", "__pow__", "__rpow__",
    "float_power", "where", "maximum", "minimum", "fmax", "fmin", "lerp", "lerp_", "addcmul", "addcdiv", "atan2",
    "hypot", "clamp", "clamp_min", "clamp_max", "clip", "copysign", "xlogy", "logaddexp", "ldexp",
)  # fmt: skip


def spread(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: Callable[[Tensor], bool]
) -> torch.Size | None:
    """The common shape to which an elementwise function's arguments are broadcast; None for other functions."""
    if function is F.scaled_dot_product_attention:
        # A mask that is a weight (relative position biases) is added to the scores of every sample.
        query, key, value = [*args, *(kwargs[k] for k in ("query", "key", "value") if k in kwargs)][:3]
        scores = torch.Size((*query.shape[:-1], key.shape[-2]))
        return None if any(map(is_weight, (query, key, value))) else scores
    if function not in _ELEMENTWISE:
        return None
    return torch.broadcast_shapes(*(v.shape for v in (*args, *kwargs.values()) if isinstance(v, Tensor)))


_SCALING = {
    f: power
    for power, names in ((1, ("mul", "__mul__", "__rmul__", "multiply")), (-1, ("div", "__truediv__", "true_divide")))
    for f in _both(*names)
}
_CASTS = _both("to", "float", "double", "half", "type", "type_as", "contiguous", "clone")


def factor(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """k where the function's result is k times its first argument, entry by entry; None where that is not known."""
    if not args or not isinstance(args[0], Tensor):
        return None
    if function in _CASTS:
        return 1.0
    if function in _SCALING and len(args) == 2 and isinstance(args[1], (int, float)) and not kwargs:
        return float(args[1]) ** _SCALING[function] if args[1] else None
    return None
