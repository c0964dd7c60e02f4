"""A network's Taylor polynomial in its parameters, as a module that any optimizer trains."""

import copy
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import factorial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .._base import checks
from .._base.types import Outputs
from ..engine import borrow
from ..engine.network import Network, pick
from ..errors import InputError, ModelError, PerformanceWarning

Point = dict[str, Tensor]  # name → parameter
ORDERS = (1, 2, 3)


def linearize(
    model: nn.Module, order: int = 1, trainable: checks.Train = None, outputs: Outputs = None
) -> "Linearized":
    """f_lin(x; θ) = f(x; θ0) + J(x; θ0)(θ − θ0), a module with parameters θ that starts at θ0, the model's own.

    `order` 2 and 3 add the Taylor terms (1/k!) dᵏ/dεᵏ f(x; θ0 + ε(θ − θ0)). `trainable`: which parameters θ has, as
    `train=` of the kernels (default: those with requires_grad); the others stay as they are. `outputs`: picks the
    tensor out of what the model returns. The model is copied and never touched.

    Batch norm keeps its statistics and dropout is off, whatever `.train()` says: f is the model in evaluation mode.
    J is that of the kernels, so for order 1 the tangent kernel of f_lin is `full_ntk(model)` at every θ. It is the
    derivative of the function: what an embedding's `scale_grad_by_freq` and `sparse` make of gradients is left out.
    Rows of its `padding_idx` do not move, and `max_norm` shortens rows by a constant factor, as in autograd.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), torch.randn(5, 3)
    >>> net = linearize(model)
    >>> torch.allclose(net(x), model(x), atol=1e-6)
    True
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> net(x).square().sum().backward()
    >>> optimizer.step()
    >>> bool(net.displacement() > 0)
    True
    """
    if order not in ORDERS:
        raise InputError(f"order={order!r}; needed: 1 (the linearised network), 2 or 3.")
    try:
        network = Network.of(model, train=trainable, outputs=outputs)
    except InputError as e:
        raise InputError(str(e).replace("train=", "trainable=")) from None  # as the option is called here
    return Linearized(network, order)


class Linearized(nn.Module):
    """f(θ0) + Σ_k (1/k!) dᵏ/dεᵏ f(θ0 + ε(θ − θ0)) at ε = 0, k = 1 … order; `linearize` makes it.

    `model` is a copy that holds θ (and the parameters that are not trained). θ0 lies in buffers, so that state dicts,
    `.to`, copies and pickles take it along.
    """

    def __init__(self, network: Network, order: int) -> None:
        super().__init__()
        self.model, self._old = _copied(network.model)
        self.names, self.outputs, self.order = network.train, network.outputs, order
        for name, p in self.model.named_parameters():
            p.requires_grad_(name in self.names)
            if name in self.names:
                self.register_buffer(_buffer(name), p.detach().clone())
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in self.model.modules())
        self._backwards = False  # forward mode was tried and failed
        self._checked = order == 1  # first derivatives are torch's own, and right
        self.train(network.model.training)

    @property
    def anchor(self) -> Point:
        """θ0 by the model's names of its parameters, without those that are not trained."""
        return {name: self.get_buffer(_buffer(name)) for name in self.names}

    def displacement(self) -> Tensor:
        """‖θ − θ0‖, differentiable in θ."""
        parts = [torch.linalg.vector_norm(self.model.get_parameter(k) - v) for k, v in self.anchor.items()]
        return torch.linalg.vector_norm(torch.stack(parts))

    @torch.no_grad()
    def reset(self) -> None:
        """θ ← θ0."""
        for name, v in self.anchor.items():
            self.model.get_parameter(name).copy_(v)

    def train(self, mode: bool = True) -> "Linearized":
        """Sets `training` of this module only: the expansion is that of the model in evaluation mode."""
        super().train(mode)
        self.model.eval()
        return self

    def extra_repr(self) -> str:
        return f"order={self.order}"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The polynomial's value for the model's own arguments, in the shape of its output."""
        graph = torch.is_grad_enabled()
        anchor, every = self.anchor, dict(self.model.named_parameters())
        step = {k: (every[k] if graph else every[k].detach()) - v for k, v in anchor.items()}
        fixed = {k: p.detach() for k, p in every.items() if k not in anchor}

        def f(point: Point) -> Tensor:
            buffers = {k: b.clone() for k, b in self.model.named_buffers()}  # a model may write to them
            fixed_ones = {id(p): k for k, p in every.items() if k in anchor} | dict.fromkeys(map(id, self._old), "")
            with _Tangents(_REPLACED if self.order == 1 else _REPLACED_TWICE, fixed_ones):
                values = {**fixed, **buffers, **point}
                types = {k: v.dtype for k, v in values.items()}
                with borrow.borrowed(self.model, values):
                    returned = self.model(*args, **kwargs)
                    cast = [k for k, v in values.items() if v.dtype != types[k]]
                if cast:  # a tensor that is given other values by its .data loses its tangent
                    raise ModelError(
                        f"forward() changes the type of the parameter {cast[0]} from {types[cast[0]]}, so it cannot be "
                        "linearised in that type. Convert the model first: model.to(…)."
                    )
                out = pick(returned, self.outputs)
            if not out.is_floating_point():
                raise ModelError(f"the model's output is {out.dtype}; needed: a real floating-point tensor.")
            return out

        # Without a graph too grad mode is on, so that only a no_grad inside the model stops tangents.
        with _native(self._recurrent), torch.enable_grad():
            out = self._value(f, anchor, step)
        return out if graph else out.detach()

    def _value(self, f: Callable[[Point], Tensor], anchor: Point, step: Point) -> Tensor:
        """The polynomial in forward mode or, for operations that torch cannot differentiate so, by two backwards."""
        if self._backwards:
            return _by_two_backwards(f, anchor, step)
        try:
            terms = _derivatives(self.order, f, step, anchor)
        except RuntimeError as e:
            f(anchor)  # arguments that do not fit are refused here, by the model itself
            reason = f"torch cannot differentiate {_place(self.model, e)} in forward mode ({_first_sentence(e)})"
            if self.order > 1:
                raise ModelError(
                    f"{reason}, which order={self.order} needs. Replace that operation, or use order=1, which can do "
                    "without."
                ) from e
            value = _by_two_backwards(f, anchor, step)
            self._backwards = True
            warnings.warn(
                f"{reason}, so the linearised network is evaluated by two backward passes: exact, but slower.",
                PerformanceWarning,
                stacklevel=5,
            )
            return value
        if not self._checked:
            with Network.of(self.model, train=self.names).modes():  # no tf32
                _check_derivatives(self.order, f, anchor)
            self._checked = True
        return sum((term / factorial(k) for k, term in enumerate(terms[1:], 1)), terms[0])


def _copied(model: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    """A deep copy, and in it the tensors with a history, which torch refuses to copy: they are constants there."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for v in _tensors(vars(module)):
            if v.grad_fn is not None:
                memo[id(v)] = v.detach().clone()
    old = list(memo.values())
    try:
        return copy.deepcopy(model, memo), old
    except Exception as e:
        raise ModelError(
            f"the model cannot be copied ({type(e).__name__}: {_first_sentence(e)}), and a linearised network is made "
            "on a copy. Take out of the model what cannot (open files, locks, generators), or give its classes a "
            "__deepcopy__."
        ) from e


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an attribute, and in lists, tuples and dicts of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


def _buffer(name: str) -> str:
    return "anchor/" + name.replace(".", "/")


def _derivatives(k: int, f: Callable[[Point], Tensor], step: Point, point: Point) -> tuple[Tensor, ...]:
    """(f, Df[δ], …, Dᵏf[δ, …, δ]) at a point. Only the step δ carries a graph, so the primal pass keeps nothing."""
    if k == 0:
        return (f(point),)
    lower, tangents = jvp(partial(_derivatives, k - 1, f, step), (point,), (step,))[:2]
    return (*lower, tangents[-1])


def _by_two_backwards(f: Callable[[Point], Tensor], point: Point, step: Point) -> Tensor:
    """f + J δ, with J δ = ∂(uᵀ J δ)/∂u: the derivative of a backward pass with respect to what it began with."""
    leaves = {name: v.detach().requires_grad_() for name, v in point.items()}
    out = f(leaves)
    u = torch.zeros_like(out, requires_grad=True)
    try:
        rows = torch.autograd.grad(out, list(leaves.values()), u, create_graph=True, materialize_grads=True)
        pairs = [(row, step[name]) for name, row in zip(leaves, rows, strict=True) if row.requires_grad]
        (tangent,) = torch.autograd.grad([r for r, _ in pairs], u, [v for _, v in pairs], create_graph=True)
    except RuntimeError as e:
        raise ModelError(
            "torch can differentiate the model neither in forward mode nor twice backwards, so it cannot be linearised "
            f"({_first_sentence(e)}). Replace that operation."
        ) from e
    return f(point) + tangent


def _check_derivatives(order: int, f: Callable[[Point], Tensor], point: Point) -> None:
    """Hold uᵀ Dᵏf[v, …, v], k ≥ 2, against nested backward passes, for one random direction v and cotangent u.

    Forward mode of forward mode is wrong in torch, without a word, for functions that keep by-products of their result
    (https://github.com/pytorch/pytorch/issues/196700). The norms are replaced below; others are found here.
    """
    seeds = torch.Generator().manual_seed(0)  # leaves the caller's random numbers alone
    v = {k: torch.randn(p.shape, generator=seeds, dtype=p.dtype).to(p.device) for k, p in point.items()}
    forwards = _derivatives(order, f, v, point)
    t = torch.zeros((), dtype=forwards[0].dtype, device=forwards[0].device, requires_grad=True)
    u = torch.randn(forwards[0].shape, generator=seeds, dtype=t.dtype).to(t.device)
    slope = (f({k: p + t * v[k] for k, p in point.items()}) * u).sum()
    for k, forward in enumerate(forwards[1:], 1):
        if not slope.requires_grad:  # a polynomial of lower degree
            slope = torch.zeros_like(slope)
        else:
            try:
                (slope,) = torch.autograd.grad(slope, t, create_graph=True, materialize_grads=True)
            except RuntimeError:  # backwards it has no such derivative: nothing to compare with
                return
        along = (forward * u).sum()
        if abs(along - slope) > torch.finfo(t.dtype).eps ** 0.5 * (forward.norm() + abs(slope)):
            raise ModelError(
                f"torch's forward mode gives wrong derivatives of order {k} of this model: {float(along):.6g} along a "
                f"random direction, backward passes {float(slope):.6g}. That is known of torch.linalg.solve and det. "
                "Use order=1, or build the operation from simpler ones."
            )


def _first_sentence(e: Exception) -> str:
    return re.split(r"\.\s|\.?$", str(e), maxsplit=1)[0]


def _place(model: nn.Module, e: Exception) -> str:
    """The innermost module that was running when e was raised."""
    names = {id(m): f"module {name} ({type(m).__name__})" for name, m in model.named_modules() if name}
    running = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(e.__traceback__)]
    return next((names[k] for k in reversed(running) if k in names), "the model")


@contextmanager
def _native(recurrent: bool) -> Iterator[None]:
    """Attention and recurrent layers as compositions of operations, since their fused kernels have no forward mode."""
    cudnn = torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()
    mkldnn = torch._C._get_mkldnn_enabled()  # its own context manager would also set precisions
    try:
        torch._C._set_mkldnn_enabled(mkldnn and not recurrent)
        with sdpa_kernel(SDPBackend.MATH), cudnn:
            yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)


class _Tangents(TorchFunctionMode):
    """Makes forward mode agree with autograd, and replaces functions that have no forward mode.

    That it is a mode also keeps nn.MultiheadAttention and nn.TransformerEncoder off their fused inference path.
    """

    def __init__(self, replaced: Mapping[Any, Callable[..., Tensor]], fixed: Mapping[int, str]) -> None:
        super().__init__()
        self.replaced, self.fixed = replaced, fixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for v in _tensors((args, kwargs or {})):
            if id(v) in self.fixed or (isinstance(v, nn.Parameter) and v.requires_grad):  # the rest are stand-ins
                name = self.fixed.get(id(v), "of the original model")
                raise ModelError(
                    f"forward() reaches {f'the parameter {name}' if name else 'a tensor made of parameters earlier'} "
                    "on another road than its module's attribute (a list, a closure, a cache), where it has no "
                    "tangent, so the model cannot be linearised. Let forward() use the attribute."
                )
        if func is torch._C._set_grad_enabled:  # no_grad inside the model stops gradients, hence tangents too
            torch._C._set_fwd_grad_enabled(args[0])
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


def _rows(weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any) -> Tensor:
    """torch.embedding, likewise."""
    return _embedding(indices, weight, padding_idx if padding_idx >= 0 else None)


def _shortened(weight: Tensor, max_norm: float | None, norm_type: float) -> Tensor:
    """Rows of at most this norm. As in autograd the factor is a constant; torch writes it to the weight, we do not."""
    if max_norm is None:
        return weight
    fixed = weight.detach()
    norms = torch.linalg.vector_norm(fixed, norm_type, dim=1, keepdim=True)
    # As torch computes it: max_norm / (norm + 1e-7).
    shorter = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0)
    return weight + (shorter - 1) * fixed


def _embedding_bag(*args: Any, **kwargs: Any) -> Tensor:
    """F.embedding_bag of ids [n, t] as a weighted sum of rows; in its other forms as it is."""
    bound = inspect.signature(F.embedding_bag).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    given |= {"scale_grad_by_freq": False, "sparse": False, "max_norm": None,
              "weight": _shortened(given["weight"], given["max_norm"], given["norm_type"])}  # fmt: skip
    ids, padding = given["input"], given["padding_idx"]
    if ids.dim() != 2 or given["mode"] == "max":
        return F.embedding_bag(*bound.args, **bound.kwargs)
    rows = F.embedding(ids, given["weight"])
    counts = torch.ones_like(ids) if padding is None else ids != padding % len(given["weight"])
    shares = counts.to(rows.dtype)
    if given["mode"] == "mean":
        shares = shares / counts.sum(1, keepdim=True).clamp(min=1)
    if given["per_sample_weights"] is not None:
        shares = shares * given["per_sample_weights"]
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
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    weight, bias = (v if v is None else v.view(-1, *[1] * (input.dim() - 2)) for v in (weight, bias))
    return _normed(input, range(2, input.dim()), weight, bias, eps)


def _normed(x: Tensor, dims: Iterable[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(tuple(dims), keepdim=True)
    y = centred * (centred.square().mean(tuple(dims), keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    torch.embedding: _rows,
    torch._weight_norm: _weight_norm,
}
_REPLACED_TWICE: dict[Any, Callable[..., Tensor]] = {
    **_REPLACED,
    F.layer_norm: _layer_norm,
    F.instance_norm: _instance_norm,
}
