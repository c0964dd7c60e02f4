"""One small rule per function that uses a weight: how its Jacobian splits into activation and cotangent.

Rules are keyed by the *function* (`F.linear`, `F.conv2d`, …), not by the module type: a module, a functional call with
somebody else's weight and a tied weight are then the same thing. What has no rule goes through `torch.func`
(see `features.py`). All tensors that a rule sees have the sample first: inputs [n, r, …], cotangents [n, c, r, …],
where r counts whatever a model folded into the batch dimension.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fused
from .blocks import Block, Dense, Lift, Outer, Use


class NoRule(Exception):  # noqa: N818 - a signal between capture and rules, never shown to users
    """This particular call does not fit the rule. `names`: the parameters concerned, where they are known."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__()
        self.names = frozenset(names)


class Rule(ABC):
    """The Jacobian of one call y = f(x; weight, bias)."""

    name: ClassVar[str]
    small: ClassVar[bool] = False  # the gradients are sums no larger than the parameter's few entries: kept dense

    @abstractmethod
    def weight(self, x: Tensor, d: Tensor) -> Block: ...

    @abstractmethod
    def bias(self, d: Tensor) -> Block: ...

    def channel(self, rank: int) -> int:
        """Which dimension of the output is the one that the weight acts on."""
        return rank - 1

    def ready(self, x: Tensor) -> Tensor:
        """What `weight` takes, made once for all outputs from the captured input [n, r, …]."""
        return x


@dataclass(frozen=True)
class Linear(Rule, Lift):
    """y = x Wᵀ + b over any leading dimensions; `transposed` where W is stored [i, o] (Hugging Face Conv1D, x @ W).

    `vector` where the weight is [i] and y has no dimension for it.
    """

    transposed: bool = False
    vector: bool = False
    name = "linear"

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "columns" if self.transposed else "rows"

    def a(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, 1, x.shape[-1])

    def d(self, d: Tensor) -> Tensor:
        return d.reshape(*d.shape[:2], -1, 1, 1 if self.vector else d.shape[-1])

    def layout(self, g: Tensor) -> Tensor:
        return g[:, :, 0].transpose(-1, -2) if self.transposed else g[:, :, 0]

    def weight(self, x: Tensor, d: Tensor) -> Block:
        return Outer((Use(self, x, d),))

    def bias(self, d: Tensor) -> Block:
        return Dense(_sum(self.d(d), 2).flatten(2))

    def sizes(self, x: Tensor, d: Tensor) -> tuple[int, int, int, int]:
        return math.prod(x.shape[1:-1]), 1, x.shape[-1], 1 if self.vector else d.shape[-1]


@dataclass(frozen=True)
class _Windows:
    """The geometry of a convolution in any number of dimensions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (before, after) per dimension
    dilation: tuple[int, ...]
    groups: int

    def of(self, x: Tensor) -> Tensor:
        """[N, C, *S] → view [N, C, *windows, *kernel]."""
        if any(p != (0, 0) for p in self.padding):
            x = F.pad(x, [v for p in reversed(self.padding) for v in p])
        for k, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + k, gap * (size - 1) + 1, step)[..., ::gap]
        return x

    def patches(self, x: Tensor) -> Tensor:
        """[N, C, *S] → [N, t, g, i] with i = (*kernel, C/g), laid out in memory as x is."""
        dims = len(self.kernel)
        windows = self.of(x)
        count = windows.shape[2 : 2 + dims]
        w = windows.unflatten(1, (self.groups, -1))  # [N, g, C/g, *windows, *kernel]
        space, kernel = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
        if x.stride(1) == 1 and x.shape[1] > 1:  # channels last
            out = w.permute(0, *space, 1, *kernel, 2)
            return out.reshape(x.shape[0], math.prod(count), self.groups, -1)
        out = w.permute(0, 1, *kernel, 2, *space)
        return out.reshape(x.shape[0], self.groups, -1, math.prod(count)).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Conv(Rule, Lift):
    """y = W ∗ x: a are the patches of x (formed only while they are needed), δ the cotangents per position."""

    windows: _Windows
    name = "conv"
    kind = "rows"

    def channel(self, rank: int) -> int:
        return rank - len(self.windows.kernel) - 1

    def a(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        patches = self.windows.patches(x.flatten(0, 1))
        return patches if x.shape[1] == 1 else patches.reshape(n, -1, *patches.shape[2:])

    def d(self, d: Tensor) -> Tensor:
        return _positions(d, len(self.windows.kernel), self.windows.groups)

    def layout(self, g: Tensor) -> Tensor:
        g = g.unflatten(-1, (*self.windows.kernel, -1))  # [n, c, g, o, *kernel, C/g]
        return g.movedim(-1, 4).flatten(2, 3)

    def weight(self, x: Tensor, d: Tensor) -> Block:
        return Outer((Use(self, x, d),))

    def bias(self, d: Tensor) -> Block:
        return Dense(_sum(d, 2, *range(4, d.dim())))

    def sizes(self, x: Tensor, d: Tensor) -> tuple[int, int, int, int]:
        w = self.windows
        return (
            x.shape[1] * math.prod(d.shape[4:]),
            w.groups,
            math.prod(w.kernel) * x.shape[2] // w.groups,
            d.shape[3] // w.groups,
        )


@dataclass(frozen=True)
class ConvTranspose(Rule, Lift):
    """y = Wᵀ ∗ x: the adjoint of a convolution, so the positions are those of x and the patches are taken of δ."""

    windows: _Windows
    name = "conv transpose"
    kind = "columns"

    def channel(self, rank: int) -> int:
        return rank - len(self.windows.kernel) - 1

    def a(self, x: Tensor) -> Tensor:
        return _positions(x[:, None], len(self.windows.kernel), self.windows.groups)[:, 0]

    def d(self, d: Tensor) -> Tensor:
        n, c, r = d.shape[:3]
        w = self.windows
        patches = w.patches(d.flatten(0, 2))
        return patches.reshape(n, c, -1, *patches.shape[2:]) if r > 1 else patches.unflatten(0, (n, c))

    def layout(self, g: Tensor) -> Tensor:
        g = g.unflatten(3, (*self.windows.kernel, -1))  # [n, c, g, *kernel, O/g, I/g]
        return g.movedim((-1, -2), (3, 4)).flatten(2, 3)

    def weight(self, x: Tensor, d: Tensor) -> Block:
        # Pad δ (or crop what output_padding added) so that its windows are exactly the positions of x.
        w, sides = self.windows, []
        for k, size in enumerate(x.shape[3:]):
            reach = (size - 1) * w.stride[k] + w.dilation[k] * (w.kernel[k] - 1) + 1
            before = w.padding[k][0]
            sides.append((before, reach - before - d.shape[4 + k]))
        d = F.pad(d, [v for side in reversed(sides) for v in side])
        unpadded = replace(w, padding=((0, 0),) * len(sides))
        return Outer((Use(ConvTranspose(unpadded), x, d),))

    def bias(self, d: Tensor) -> Block:
        return Dense(_sum(d, 2, *range(4, d.dim())))

    def sizes(self, x: Tensor, d: Tensor) -> tuple[int, int, int, int]:
        w = self.windows
        t = x.shape[1] * math.prod(x.shape[3:])
        return t, w.groups, x.shape[2] // w.groups, math.prod(w.kernel) * d.shape[3] // w.groups


@dataclass(frozen=True)
class Embedding(Rule, Lift):
    """y_t = W[x_t]: a is the row number. `bag` sums (or averages) the positions of the last dimension."""

    vocabulary: int
    padding: int | None = None
    bag: str | None = None
    name = "embedding"
    kind = "lookup"
    indexed = True

    def a(self, x: Tensor) -> Tensor:
        index = x.reshape(x.shape[0], -1).long()
        return index if self.padding is None else torch.where(index == self.padding, -1, index)

    def d(self, d: Tensor) -> Tensor:
        return d.reshape(*d.shape[:2], -1, 1, d.shape[-1])

    def layout(self, g: Tensor) -> Tensor:
        return g[:, :, 0].transpose(-1, -2)

    def weight(self, x: Tensor, d: Tensor) -> Block:
        if self.bag:  # every position of a bag receives the bag's cotangent
            size = x.shape[-1]
            d = (d / size if self.bag == "mean" else d)[..., None, :].expand(*d.shape[:-1], size, d.shape[-1])
        return Outer((Use(self, x, d),), self.vocabulary)

    def bias(self, d: Tensor) -> Block:
        raise NoRule

    def sizes(self, x: Tensor, d: Tensor) -> tuple[int, int, int, int]:
        return math.prod(x.shape[1:]), 1, self.vocabulary, d.shape[-1]


@dataclass(frozen=True)
class Affine(Rule):
    """y = x̂ ⊙ w + b with x̂ the normalised input: the gradients are small sums, kept dense.

    The weight has the `trailing` last dimensions of the input, or lies along the channel (dimension 1).
    """

    name = "norm"
    small = True
    normalise: Callable[[Tensor], Tensor]
    trailing: int = 0
    rank: int = 0  # of the input, for channel-wise weights
    single: bool = False  # one weight for all channels

    def channel(self, rank: int) -> int:
        return rank - 1 if self.trailing else rank - self.rank + 1

    def ready(self, x: Tensor) -> Tensor:
        return self.normalise(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def weight(self, x: Tensor, d: Tensor) -> Block:
        if d.dtype == torch.float16 and d.shape[1] == 1 and not self.single:
            first, second = self._by_position(d[:, 0]), self._by_position(x)
            return Dense(fused.dot_positions(first, second)[:, None])
        return self.bias(_wide(d) * x[:, None])

    def _by_position(self, v: Tensor) -> Tensor:
        """[n, r, …] → [n, t, p]."""
        if self.trailing:
            return v.flatten(-self.trailing).flatten(1, -2)
        v = v[:, :, :, None] if v.dim() == 3 else v.flatten(3)
        return v.transpose(2, 3).flatten(1, 2)

    def bias(self, d: Tensor) -> Block:
        if self.trailing:
            return Dense(_sum(d.flatten(-self.trailing).flatten(2, -2), 2))
        if self.single:
            return Dense(_sum(d.flatten(2), 2)[..., None])
        return Dense(_sum(d, 2, *range(4, d.dim())))


@dataclass(frozen=True)
class Broadcast(Rule):
    """y = x + w, y = x · w or y = w.expand(…): a bare parameter that is broadcast over samples and positions."""

    shape: tuple[int, ...]
    product: bool
    name = "broadcast"
    small = True

    def aligned(self, rank: int, sample: int) -> "Broadcast":
        """The parameter's shape against an output of this rank whose samples lie in dimension `sample`."""
        shape = [1] * (rank - len(self.shape)) + list(self.shape)
        if len(shape) != rank or shape.pop(sample) != 1:
            raise NoRule
        return Broadcast(tuple(shape), self.product)

    def weight(self, x: Tensor, d: Tensor) -> Block:
        return self.bias(_wide(d) * x[:, None] if self.product else d)

    def bias(self, d: Tensor) -> Block:
        d = _sum(d, 2)  # what was folded into the batch
        over = [2 + k for k, size in enumerate(self.shape) if size == 1 and d.shape[2 + k] != 1]
        if any(size not in (1, d.shape[2 + k]) for k, size in enumerate(self.shape)):
            raise NoRule
        return Dense((d.sum(over, keepdim=True) if over else d).flatten(2))


def _wide(d: Tensor) -> Tensor:
    return d.float() if d.dtype == torch.float16 else d


def _sum(d: Tensor, *dims: int) -> Tensor:
    """Sums of 16-bit cotangents are taken and kept in 32 bits."""
    return d.sum(dims, dtype=torch.float32 if d.dtype == torch.float16 else None)


def _positions(d: Tensor, dims: int, groups: int) -> Tensor:
    """[n, c, r, C, *S] → [n, c, t, g, C/g], a view where r = 1."""
    d = d.flatten(4) if dims > 1 else d
    d = d.unflatten(3, (groups, -1)).movedim(-1, 3)  # [n, c, r, T, g, o]
    return d[:, :, 0] if d.shape[2] == 1 else d.flatten(2, 3)


# --- Which call has which rule. Each reader has the signature of its function. ---------------------------------------


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
    return Call(Conv(_Windows(kernel, _tuple(stride, dims), sides, gaps, groups)), input, weight, bias)


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
    windows = _Windows(tuple(weight.shape[2:]), _tuple(stride, dims), sides, _tuple(dilation, dims), groups)
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
    if max_norm is not None or scale_grad_by_freq:
        raise NoRule
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
    plain = all(
        given.get(k) in (None, False) for k in ("max_norm", "scale_grad_by_freq", "per_sample_weights", "padding_idx")
    )
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


@register(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
def _mul(input: Any, other: Any) -> Call:
    return Call(Broadcast((), product=True), *_operands(input, other))


@register(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def _add(input: Any, other: Any, *, alpha: float = 1) -> Call:
    if alpha != 1:
        raise NoRule
    return Call(Broadcast((), product=False), *_operands(input, other))


def _operands(input: Any, other: Any) -> tuple[Any, Any]:
    """Both as they are; capture finds out which one is the parameter."""
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        raise NoRule
    return input, other


@register(Tensor.expand)
def _expand(input: Tensor, *sizes: Any) -> Call:
    return Call(Broadcast((), product=False), None, input)


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
