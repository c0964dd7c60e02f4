"""Which call of which torch function has which rule.

Rules are keyed by the *function* (`F.linear`, `F.conv2d`, …), not by the module type: a module, a functional call with
somebody else's weight and a tied weight are then the same thing. What has no rule goes through `torch.func`
(see `fallback.py`). Each reader has the signature of its function, and says what is what in its arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .apart.bilinear import grouped_linear
from .rules import (
    BroadcastRule,
    ConvRule,
    ConvTransposeRule,
    EmbeddingRule,
    GroupedRule,
    LinearRule,
    NormRule,
    NoRule,
    Rule,
    Windows,
)
from .torch_functions import CASTS, ELEMENTWISE, SCALING, Function, signature


@dataclass(frozen=True)
class LayerCall:
    """A call read: its rule, the input that the rule needs, and which tensors are weight and bias."""

    rule: Rule
    input: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None


Reader = Callable[..., LayerCall]
READERS: dict[Function, Reader] = {}


def register(*functions: Function) -> Callable[[Reader], Reader]:
    """Give torch functions a rule: the decorated reader takes their arguments and returns a `LayerCall`."""

    def add(reader: Reader) -> Reader:
        """The reader itself, now in the table."""
        READERS.update((f, reader) for f in functions)
        return reader

    return add


def _tuple(v: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """As torch reads strides and the like: one number stands for all dimensions."""
    if isinstance(v, int):
        return (v,) * dims
    v = tuple(v)
    return v * dims if len(v) == 1 else v


@register(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> LayerCall:
    return LayerCall(LinearRule(vector=weight.dim() == 1), input, weight, bias)


@register(torch.matmul, torch.mm, torch.mv, Tensor.matmul, Tensor.mm, Tensor.mv, Tensor.__matmul__)
def _matmul(input: Tensor, other: Tensor) -> LayerCall:
    # Products over a batch of weights are taken apart (`apart/bilinear.py`).
    if other.dim() > 2 or input.dim() < 2:
        raise NoRule
    return LayerCall(LinearRule(transposed=other.dim() == 2, vector=other.dim() == 1), input, other)


@register(grouped_linear)
def _grouped(x: Tensor, weight: Tensor) -> LayerCall:
    return LayerCall(GroupedRule(), x, weight)


@register(torch.addmm, Tensor.addmm)
def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> LayerCall:
    if beta != 1 or alpha != 1 or input.dim() != 1:
        raise NoRule
    return LayerCall(LinearRule(transposed=True), mat1, mat2, input)


@register(torch.conv1d, torch.conv2d, torch.conv3d)
def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> LayerCall:
    dims = weight.dim() - 2
    if input.dim() != dims + 2:
        raise NoRule  # unbatched
    kernel, gaps = tuple(weight.shape[2:]), _tuple(dilation, dims)
    if isinstance(padding, str):
        # As torch does: of an odd number, the larger half comes after.
        total = [g * (k - 1) if padding == "same" else 0 for g, k in zip(gaps, kernel, strict=True)]
        sides = tuple((v // 2, v - v // 2) for v in total)
    else:
        sides = tuple((v, v) for v in _tuple(padding, dims))
    return LayerCall(ConvRule(Windows(kernel, _tuple(stride, dims), sides, gaps, groups)), input, weight, bias)


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
) -> LayerCall:
    dims = weight.dim() - 2
    if input.dim() != dims + 2:
        raise NoRule
    sides = tuple((v, v) for v in _tuple(padding, dims))
    windows = Windows(tuple(weight.shape[2:]), _tuple(stride, dims), sides, _tuple(dilation, dims), groups)
    return LayerCall(ConvTransposeRule(windows), input, weight, bias)


@register(F.embedding)
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> LayerCall:
    rows = weight.shape[0]
    padding = None if padding_idx is None else padding_idx % rows
    return LayerCall(EmbeddingRule(rows, padding), input, weight)


@register(F.embedding_bag)
def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, *args: object, mode: str = "mean", **options: object
) -> LayerCall:
    # nn.EmbeddingBag passes the rest by position: max_norm, norm_type, scale_grad_by_freq, mode, sparse, …
    names = ("max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "last", "padding")
    options = {"mode": mode, **dict(zip(names, args, strict=False)), **options}
    plain = all(options.get(k) is None for k in ("max_norm", "per_sample_weights", "padding_idx", "padding"))
    if input.dim() != 2 or offsets is not None or not plain or options["mode"] not in ("sum", "mean"):
        raise NoRule
    return LayerCall(EmbeddingRule(weight.shape[0], bag=str(options["mode"])), input, weight)


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
) -> LayerCall:
    # With the statistics of the batch, samples would depend on each other.
    if training or running_mean is None:
        raise NoRule
    rule = NormRule(lambda x: F.batch_norm(x, running_mean, running_var, eps=eps))
    return LayerCall(rule, input, weight, bias)


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
) -> LayerCall:
    def normalise(x: Tensor) -> Tensor:
        """The norm without its scale and shift."""
        mean, var = (None, None) if use_input_stats else (running_mean, running_var)
        return F.instance_norm(x, mean, var, use_input_stats=use_input_stats, eps=eps)

    return LayerCall(NormRule(normalise), input, weight, bias)


@register(F.group_norm)
def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> LayerCall:
    return LayerCall(NormRule(lambda x: F.group_norm(x, num_groups, eps=eps)), input, weight, bias)


@register(F.layer_norm)
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> LayerCall:
    shape = list(normalized_shape)
    return LayerCall(NormRule(lambda x: F.layer_norm(x, shape, eps=eps), trailing=len(shape)), input, weight, bias)


@register(F.rms_norm)
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> LayerCall:
    shape = list(normalized_shape)
    return LayerCall(NormRule(lambda x: F.rms_norm(x, shape, eps=eps), trailing=len(shape)), input, weight)


@register(torch.prelu, F.prelu, Tensor.prelu)
def _prelu(input: Tensor, weight: Tensor) -> LayerCall:
    return LayerCall(NormRule(lambda x: x.clamp(max=0), single=weight.numel() == 1), input, weight)


@register(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_)
def _mul(input: object, other: object) -> LayerCall:
    return LayerCall(BroadcastRule((), product=True), *_operands(input, other))


@register(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_)
def _add(input: object, other: object, *, alpha: float = 1) -> LayerCall:
    if alpha != 1:
        raise NoRule
    return LayerCall(BroadcastRule((), product=False), *_operands(input, other))


def _operands(input: object, other: object) -> tuple[Tensor, Tensor]:
    """Both as they are; the recorder finds out which one is the parameter."""
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        raise NoRule
    return input, other


@register(Tensor.__getitem__)
def _getitem(input: Tensor, index: object) -> LayerCall:
    """table[i] with row numbers i."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        raise NoRule
    return _rows(input, index)


@register(torch.index_select, Tensor.index_select)
def _index_select(input: Tensor, dim: int, index: Tensor) -> LayerCall:
    if dim % input.dim() != 0 or index.dim() != 1:
        raise NoRule
    return _rows(input, index)


def _rows(table: Tensor, index: Tensor) -> LayerCall:
    """A lookup in a weight of any rank."""
    return LayerCall(EmbeddingRule(table.shape[0], wrapped=True, trailing=table.dim() - 1), index, table)


def read_call(function: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> LayerCall | None:
    """The call's rule, or None where the function has none or this call does not fit it."""
    reader = READERS.get(function)
    if reader is None:
        return None
    try:
        signature(reader).bind(*args, **kwargs)
        return reader(*args, **kwargs)
    except (NoRule, TypeError):
        return None


def spread_shape(
    function: Function, args: Sequence[object], kwargs: Mapping[str, object], is_weight: Callable[[object], bool]
) -> torch.Size | None:
    """The common shape to which an elementwise function's arguments are broadcast; None for other functions."""
    if function is F.scaled_dot_product_attention:
        # A mask that is a weight (relative position biases) is added to the scores of every sample.
        query, key, value = [*args, *(kwargs[k] for k in ("query", "key", "value") if k in kwargs)][:3]
        if any(map(is_weight, (query, key, value))) or not (isinstance(query, Tensor) and isinstance(key, Tensor)):
            return None
        return torch.Size((*query.shape[:-1], key.shape[-2]))
    if function not in ELEMENTWISE:
        return None
    return torch.broadcast_shapes(*(v.shape for v in (*args, *kwargs.values()) if isinstance(v, Tensor)))


def scaling_factor(function: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> float | None:
    """k where the function's result is k times its first argument, entry by entry; None where that is not known."""
    if not args or not isinstance(args[0], Tensor):
        return None
    if function in CASTS:
        return 1.0
    if function in SCALING and len(args) == 2 and isinstance(args[1], (int, float)) and not kwargs:
        return float(args[1]) ** SCALING[function] if args[1] else None
    return None
