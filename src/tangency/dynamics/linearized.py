"""A network's Taylor polynomial in its parameters, as a module that any optimizer trains."""

import copy
import re
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from math import factorial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.func import jvp

from .._base import tree
from .._base.misfit import in_words
from .._base.types import Inputs, PickedOutputs, Trainable
from ..engine.heads import pick
from ..engine.network import Network, borrowed
from ..errors import InputError, ModelError, PerformanceWarning
from .forward_mode import Tangents, composed, tensors_in

Point = dict[str, Tensor]  # name → parameter
Call: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
ORDERS = (1, 2, 3)


def linearize(
    model: nn.Module, order: int = 1, trainable: Trainable = None, outputs: PickedOutputs = None
) -> "Linearized":
    """f_lin(x; θ) = f(x; θ0) + J(x; θ0)(θ − θ0), a module with parameters θ that starts at θ0, the model's own.

    `order` 2 and 3 add the Taylor terms (1/k!) dᵏ/dεᵏ f(x; θ0 + ε(θ − θ0)). `trainable`: which parameters θ has, as
    `trainable=` of the kernels (default: those with requires_grad); the others stay as they are. `outputs`: picks the
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
    return Linearized(Network.of(model, trainable=trainable, outputs=outputs), order)


class Linearized(nn.Module):
    """f(θ0) + Σ_k (1/k!) dᵏ/dεᵏ f(θ0 + ε(θ − θ0)) at ε = 0, k = 1 … order; `linearize` makes it.

    `model` is a copy that holds θ (and the parameters that are not trained). θ0 lies in buffers, so that state dicts,
    `.to`, copies and pickles take it along.
    """

    @torch.inference_mode(False)  # tensors made in that mode can have no gradients, ever
    def __init__(self, network: Network, order: int) -> None:
        super().__init__()
        self.model, self._old = _copied(network.model)  # _old: tensors with a history, which are constants now
        self.names, self.outputs, self.order = network.trainable, network.outputs, order
        for name, p in self.model.named_parameters():
            p.requires_grad_(name in self.names)
            if name in self.names:
                self.register_buffer(_buffer(name), p.detach().clone())
        # cuDNN's recurrent layers have no forward mode, and are switched off where there are some.
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in self.model.modules())
        self._backwards = False  # forward mode was tried and failed
        self._narrowed = False  # wider inputs were compared with rounded ones
        self._checked = order == 1  # first derivatives are torch's own, and right
        self.train(network.model.training)

    @property
    def anchor(self) -> Point:
        """θ0 by the model's names of its parameters, without those that are not trained."""
        return {name: self.get_buffer(_buffer(name)) for name in self.names}

    def displacement(self) -> Tensor:
        """‖θ − θ0‖, differentiable in θ."""
        # Of each tensor, then of their norms: no flat copy of all parameters.
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
        """The order, in what printing the module shows."""
        return f"order={self.order}"

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """The polynomial's value for the model's own arguments, in the shape of its output."""
        if torch.is_inference_mode_enabled():  # where forward mode gives zero, without a word, before torch 2.12
            with torch.inference_mode(False), torch.no_grad():
                args, kwargs = cast(Call, tree.normal(cast(Inputs, (args, kwargs))))
                return self.forward(*args, **kwargs)
        graph = torch.is_grad_enabled()
        args, kwargs = self._suited(args, kwargs)
        anchor, parameters = self.anchor, dict(self.model.named_parameters())
        step = {k: (parameters[k] if graph else parameters[k].detach()) - v for k, v in anchor.items()}
        untrained = {k: p.detach() for k, p in parameters.items() if k not in anchor}

        def f(point: Point) -> Tensor:
            """The model's output with these parameters in place of θ."""
            buffers = {k: b.clone() for k, b in self.model.named_buffers()}  # a model may write to them
            # θ itself is not where f is evaluated: the model must see the stand-ins of `point` alone.
            fixed = {id(p): k for k, p in parameters.items() if k in anchor} | dict.fromkeys(map(id, self._old), "")
            with Tangents(self.order, fixed):
                values = {**untrained, **buffers, **point}
                types = {k: v.dtype for k, v in values.items()}
                with borrowed(self.model, values):
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
        with composed(self._recurrent), torch.enable_grad():
            out = self._value(f, anchor, step, _inputs(args, kwargs))
        return out if graph else out.detach()

    def _suited(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Call:
        """Arguments as the model takes them: tensors for arrays, in the type of the parameters, if that is one."""
        single = len(args) == 1 and not kwargs  # so that errors call it x
        given = tree.tensors(cast(Inputs, args[0] if single else (args, kwargs)))
        dtype = tree.dtype_of(self.model)

        def call(x: Inputs) -> Call:
            """As the model is called."""
            return ((x,), {}) if single else cast(Call, x)

        if self._narrowed:  # looked at once: training calls this at every step
            given = tree.cast(given, dtype)
        elif dtype is not None:
            given = tree.narrowed(given, dtype, lambda part: tree.copy_outputs(self.model, *call(part)))
            self._narrowed = True
        return call(given)

    def _value(self, f: Callable[[Point], Tensor], anchor: Point, step: Point, given: Inputs) -> Tensor:
        """The polynomial in forward mode or, for operations that torch cannot differentiate so, by two backwards."""
        if self._backwards:
            with in_words(given):
                return _by_two_backwards(f, anchor, step)
        try:
            terms = _derivatives(self.order, f, step, anchor)
        except TypeError:
            with in_words(given):  # other arguments than forward() has
                raise
        except (RuntimeError, IndexError) as e:
            with in_words(given):  # arguments that do not fit are refused here, by the model itself
                f(anchor)
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
            # Once, at the first call: what torch gets wrong it gets wrong for an operation, whatever its inputs.
            with Network.of(self.model, trainable=self.names).modes():  # no tf32
                _check_derivatives(self.order, f, anchor)
            self._checked = True
        return sum((term / factorial(k) for k, term in enumerate(terms[1:], 1)), terms[0])


def _copied(model: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    """A deep copy, and in it the tensors with a history, which torch refuses to copy: they are constants there."""
    memo: dict[int, Tensor] = {}
    for module in model.modules():
        for v in tensors_in(vars(module)):
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


def _inputs(args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
    """Arguments under the names that errors give them: x, if there is one."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return args[0]
    return (*args, *kwargs.values()) if args else kwargs


def _buffer(name: str) -> str:
    """The buffer that holds θ0 of a parameter; names of buffers cannot have dots."""
    return "anchor/" + name.replace(".", "/")


def _derivatives(k: int, f: Callable[[Point], Tensor], step: Point, point: Point) -> tuple[Tensor, ...]:
    """(f, Df[δ], …, Dᵏf[δ, …, δ]) at a point. Only the step δ carries a graph, so the primal pass keeps nothing."""
    if k == 0:
        return (f(point),)
    lower, tangents = jvp(partial(_derivatives, k - 1, f, step), (point,), (step,))[:2]
    return (*lower, tangents[-1])


def _by_two_backwards(f: Callable[[Point], Tensor], point: Point, step: Point) -> Tensor:
    """f + J δ, with J δ = ∂(uᵀ J δ)/∂u: the derivative of a backward pass with respect to what it began with."""
    # u is zero, and so are the rows uᵀJ; but they are linear in u, which is all that the second pass needs.
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
    (https://github.com/pytorch/pytorch/issues/196700). The norms are replaced (`forward_mode`); others are found here.
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
    """Of an error's message, without its full stop: torch's go on about how to report bugs."""
    return re.split(r"\.\s|\.?$", str(e), maxsplit=1)[0]


def _place(model: nn.Module, e: Exception) -> str:
    """The innermost module that was running when e was raised."""
    names = {id(m): f"module {name} ({type(m).__name__})" for name, m in model.named_modules() if name}
    running = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(e.__traceback__)]
    return next((names[k] for k in reversed(running) if k in names), "the model")
