"""Forward-mode derivatives where torch's own lack or miss them: operations replaced while a model is linearised."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..errors import ModelError


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in an attribute, and in lists, tuples and dicts of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)


@contextmanager
def composed(recurrent: bool) -> Iterator[None]:
    """Attention and recurrent layers as compositions of operations, since their fused kernels have no forward mode."""
    cudnn = torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()
    # oneDNN's recurrent layers have no forward mode either.
    mkldnn = torch._C._get_mkldnn_enabled()  # its own context manager would also set precisions
    try:
        torch._C._set_mkldnn_enabled(mkldnn and not recurrent)
        with sdpa_kernel(SDPBackend.MATH), cudnn:
            yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)


class Tangents(TorchFunctionMode):
    """Makes forward mode agree with autograd, and replaces functions that have no forward mode.

    `fixed`: names of tensors, by id, that must not be reached, since stand-ins with tangents took their places. That it
    is a mode also keeps nn.MultiheadAttention and nn.TransformerEncoder off their fused inference path.
    """

    def __init__(self, order: int, fixed: Mapping[int, str]) -> None:
        super().__init__()
        self.replaced, self.fixed = _REPLACED if order == 1 else _REPLACED_TWICE, fixed

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """The function itself, or its replacement; refuses parameters that came by another road."""
        for v in tensors_in((args, kwargs or {})):
            if id(v) in self.fixed or (isinstance(v, nn.Parameter) and v.requires_grad):  # the rest are stand-ins
                name = self.fixed.get(id(v), "of the original model")
                raise ModelError(
                    f"forward() reaches {f'the parameter {name}' if name else 'a tensor made of parameters earlier'} "
                    "on another road than its module's attribute (a list, a closure, a cache), where it has no "
                    "tangent, so the model cannot be linearised. Let forward() use the attribute."
                )
        if func is torch._C._set_grad_enabled:  # no_grad inside the model stops gradients, hence tangents too
            torch._C._set_fwd_grad_enabled(bool(args[0]))
        return self.replaced.get(func, func)(*args, **(kwargs or {}))


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding whose padding has no tangent, as it has no gradient, and whose gradient is that of the function."""
    rows = F.embedding(input, _shortened(weight, max_norm, norm_type))
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight))[..., None], rows.detach(), rows)


def _looked_up(weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: object, **kwargs: object) -> Tensor:
    """torch.embedding, likewise."""
    return _embedding(indices, weight, padding_idx if padding_idx >= 0 else None)


def _shortened(weight: Tensor, max_norm: float | None, norm_type: float) -> Tensor:
    """Rows of at most this norm. As in autograd the factor is a constant; torch writes it to the weight, we do not."""
    if max_norm is None:
        return weight
    # weight + (factor − 1)·weight₀ has the values of the shortened rows and, as in autograd, the identity as slope.
    fixed = weight.detach()
    norms = torch.linalg.vector_norm(fixed, norm_type, dim=1, keepdim=True)
    # As torch computes it: max_norm / (norm + 1e-7).
    shorter = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0)
    return weight + (shorter - 1) * fixed


def _embedding_bag(*args: object, **kwargs: object) -> Tensor:
    """F.embedding_bag of ids [n, t] as a weighted sum of rows; in its other forms as it is."""
    bound = inspect.signature(F.embedding_bag).bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    options |= {"scale_grad_by_freq": False, "sparse": False, "max_norm": None,
                "weight": _shortened(options["weight"], options["max_norm"], options["norm_type"])}  # fmt: skip
    ids, padding = options["input"], options["padding_idx"]
    # Ids with offsets, and maxima, are left to torch; where it has no forward mode, two backward passes do.
    if ids.dim() != 2 or options["mode"] == "max":
        return F.embedding_bag(*bound.args, **bound.kwargs)
    rows = F.embedding(ids, options["weight"])
    counts = torch.ones_like(ids) if padding is None else ids != padding % len(options["weight"])
    shares = counts.to(rows.dtype)
    if options["mode"] == "mean":
        shares = shares / counts.sum(1, keepdim=True).clamp(min=1)
    if options["per_sample_weights"] is not None:
        shares = shares * options["per_sample_weights"]
    return torch.einsum("nt,ntd->nd", shares, rows)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """torch._weight_norm in terms of operations that have derivatives of every order."""
    others = [k for k in range(v.dim()) if k != dim % v.dim()]
    return v * (g / v.square().sum(others, keepdim=True).sqrt())


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm, likewise."""
    return _normed(input, range(-len(normalized_shape), 0), weight, bias, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.instance_norm, likewise; with the running statistics it is linear in the input, and right in torch."""
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    weight, bias = (v if v is None else v.view(-1, *[1] * (input.dim() - 2)) for v in (weight, bias))
    return _normed(input, range(2, input.dim()), weight, bias, eps)


def _normed(x: Tensor, dims: Iterable[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean)/√(variance + eps) over these dimensions, then scaled and shifted."""
    centred = x - x.mean(tuple(dims), keepdim=True)
    y = centred * (centred.square().mean(tuple(dims), keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


# For first derivatives: what has no forward mode, or one that disagrees with autograd.
_REPLACED: dict[Callable[..., object], Callable[..., Tensor]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    torch.embedding: _looked_up,
    torch._weight_norm: _weight_norm,
}
# For higher ones also the norms, whose forward mode of forward mode is wrong in torch, without a word
# (https://github.com/pytorch/pytorch/issues/196700).
_REPLACED_TWICE: dict[Callable[..., object], Callable[..., Tensor]] = {
    **_REPLACED,
    F.layer_norm: _layer_norm,
    F.instance_norm: _instance_norm,
}
