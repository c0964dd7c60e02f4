"""The mixed derivative of a network in its parameters and its inputs, by products alone.

Ortiz-Jiménez, Moosavi-Dezfooli and Frossard 2021, "What can linearized neural networks actually say about
generalization?", theorem 1.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.types import Array, Float, Trainable
from ..engine.fallback import Plainly
from ..engine.heads import Head
from ..engine.network import Network, stand_in
from ..errors import InputError, ModelError

# What autograd calls functions that have a kink: there, a second derivative is missing; elsewhere, ReLU's is 0.
KINKS = {
    "Relu": "ReLU", "LeakyRelu": "LeakyReLU", "PreluKernel": "PReLU", "Hardtanh": "Hardtanh", "Threshold": "Threshold",
    "Abs": "abs", "MaxPool": "max pooling", "AdaptiveMaxPool": "max pooling", "Max": "max", "Amax": "max",
    "Maximum": "maximum", "Hardswish": "Hardswish", "Hardsigmoid": "Hardsigmoid", "Rrelu": "RReLU", "Clamp": "clamp",
}  # fmt: skip


class MixedDerivative:
    """M = E_x[∂²f/∂θ∂x], [p, d]: products with it, by two backward passes; no matrix of p·d numbers is made.

    `at`: samples [n, …] that are averaged over, or the shape of one, for M at the origin. With f̄(θ, s) the mean of
    f(x + s; θ) over the samples, M = ∂²f̄/∂θ∂s at s = 0. `head`: which function of several outputs, as for
    `tg.head_ntk`. Options as for `tg.full_ntk`; the model must be in evaluation mode, and stays as it is.

    >>> import tangency as tg
    >>> net = torch.nn.Linear(3, 1)  # f = wᵀx + b: ∂²f/∂w∂x = 1, ∂²f/∂b∂x = 0
    >>> M = MixedDerivative(net, (3,))
    >>> M.times(torch.tensor([1.0, 2.0, 0.0])).tolist()
    [1.0, 2.0, 0.0, 0.0]
    >>> M.transposed_times(torch.tensor([1.0, 2.0, 0.0, 5.0])).tolist()
    [1.0, 2.0, 0.0]
    """

    def __init__(
        self,
        model: nn.Module,
        at: Array | Sequence[int],
        *,
        head: Head = None,
        trainable: Trainable = None,
        dtype: object = None,
        batch: int = 64,
    ) -> None:
        checks.positive(batch, "batch", "samples in a pass")
        network = Network.of(model, trainable=trainable, head=head, dtype=dtype)
        found = network.ready(_samples(at, network))
        if not isinstance(found, Tensor) or not found.is_floating_point():
            raise InputError("at= holds several inputs or whole numbers; needed: one tensor of real numbers.")
        self._begin(network, found, None, batch)

    @classmethod
    def of(cls, network: Network, x: Tensor, output: int, batch: int) -> Self:
        """Of one output of a network that is held already, at its ready samples."""
        made = cls.__new__(cls)
        made._begin(network, x, output, batch)
        return made

    @torch.inference_mode(False)  # also where the caller wants no gradients at all
    def _begin(self, network: Network, x: Tensor, output: int | None, batch: int) -> None:
        self.network, self.output, self.batch, self.shape = network, output, batch, x.shape[1:]
        self.x = x.clone() if x.is_inference() else x.detach()
        state, parameters = network.state(), dict(network.model.named_parameters())
        self._leaves = {k: stand_in(parameters[k], state[k], True) for k in network.trainable}
        self._state = {**state, **self._leaves}
        with self._twice():
            self.kinks = _kinks(self._mean(self.x[:1], torch.zeros_like(self.x[0]))[0])

    @property
    def size(self) -> tuple[int, int]:
        """(p, d): parameters that count, numbers in an input."""
        return sum(v.numel() for v in self._leaves.values()), math.prod(self.shape)

    def times(self, v: Tensor) -> Float[Tensor, " p"]:
        """M v = ∇_θ (∇_s f̄ · v), v [d]: how the slope along v changes with each parameter."""
        v = self._vector(v, self.size[1], "v")
        return torch.cat([g.flatten() for g in self._through(v[:, None])[0]])

    def transposed_times(self, u: Tensor) -> Float[Tensor, " d"]:
        """Mᵀ u = ∇_s (∇_θ f̄ · u), u [p]: the parameters one after the other, each flattened."""
        parts = self._vector(u, self.size[0], "u").split([p.numel() for p in self._leaves.values()])
        flat = [part.view_as(p) for part, p in zip(parts, self._leaves.values(), strict=True)]
        return self._back([flat])[:, 0]

    def gram_times(self, v: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
        """Mᵀ M V, column by column: one vector of p numbers at a time is held where samples fit one batch."""
        if len(self.x) <= self.batch:
            return self._both(v.to(self.x))
        return self._back(self._through(v.to(self.x)))

    def _vector(self, given: Tensor, size: int, name: str) -> Tensor:
        """In the type and on the device of the samples."""
        if tuple(given.shape) != (size,):
            raise InputError(f"{name} has shape {tuple(given.shape)}; needed: [{size}]. M is {list(self.size)}.")
        return (given.clone() if given.is_inference() else given).to(self.x)

    @contextmanager
    def _twice(self) -> Iterator[None]:
        """Graphs that can be differentiated twice: no fused operations that have one derivative only."""
        modes = self.network.modes(differentiable=True, exact=True)
        with torch.inference_mode(False), torch.enable_grad(), modes, Plainly():
            yield

    def _mean(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """This batch's part of f̄(θ, s), and s."""
        s = shift.clone().requires_grad_()
        out = self.network(self._state, x + s)
        out = out if self.output is None else out[:, self.output]
        if out.numel() != len(x):
            raise InputError(
                f"the model has {out.shape[1]} outputs; needed: one function. Say which: head=0 for the first output, "
                "(a, b) for f_a − f_b, or a function of the outputs."
            )
        return out.sum() / len(self.x), s

    def _graphs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """f̄ and s for each batch."""
        for start in range(0, len(self.x), self.batch):
            yield self._mean(self.x[start : start + self.batch], torch.zeros_like(self.x[0]))

    def _through(self, v: Tensor) -> list[list[Tensor]]:
        """M v for every column, as lists of gradients."""
        totals: list[list[Tensor]] = []
        with self._twice():
            for mean, s in self._graphs():
                slope = _gradient(mean, [s])[0]
                for k, column in enumerate(v.T):
                    part = _along(slope, column.reshape(s.shape), list(self._leaves.values()))
                    if k < len(totals):
                        totals[k] = [a + b for a, b in zip(totals[k], part, strict=True)]
                    else:
                        totals.append(part)
        return totals

    def _back(self, u: list[list[Tensor]]) -> Tensor:
        """Mᵀ u for every list of gradients u, as columns."""
        total = torch.zeros(math.prod(self.shape), len(u), dtype=self.x.dtype, device=self.x.device)
        with self._twice():
            for mean, s in self._graphs():
                slopes = _gradient(mean, list(self._leaves.values()))
                for k, vector in enumerate(u):
                    total[:, k] += _along(slopes, vector, [s])[0].flatten()
        return total

    def _both(self, v: Tensor) -> Tensor:
        """Mᵀ M V where one batch has all samples: both graphs are made once for all columns."""
        leaves = list(self._leaves.values())
        columns = []
        with self._twice():
            (mean, s), (again, t) = next(self._graphs()), next(self._graphs())
            slope, slopes = _gradient(mean, [s])[0], _gradient(again, leaves)
            for column in v.T:
                u = _along(slope, column.reshape(s.shape), leaves)
                columns.append(_along(slopes, u, [t])[0].flatten())
        return torch.stack(columns, 1)


def _gradient(of: Tensor, by: list[Tensor]) -> list[Tensor]:
    """With a graph, so that it can be differentiated once more."""
    return list(torch.autograd.grad(of, by, create_graph=True, materialize_grads=True))


def _along(slopes: Tensor | list[Tensor], direction: Tensor | list[Tensor], by: list[Tensor]) -> list[Tensor]:
    """∇_by ⟨slopes, direction⟩; zero where the slopes do not depend on it."""
    a, b = ([v] if isinstance(v, Tensor) else v for v in (slopes, direction))
    known = [(s, d) for s, d in zip(a, b, strict=True) if s.requires_grad]
    if not known:
        return [torch.zeros_like(v) for v in by]
    try:
        found = torch.autograd.grad(
            [s for s, _ in known], by, [d for _, d in known], retain_graph=True, allow_unused=True
        )
    except RuntimeError as e:
        raise ModelError(
            f"torch cannot differentiate this model twice ({str(e).splitlines()[0]}). Replace that operation by "
            "simpler ones, which have second derivatives."
        ) from e
    return [torch.zeros_like(v) if g is None else g for v, g in zip(by, found, strict=True)]


def _samples(at: Array | Sequence[int], network: Network) -> Tensor:
    """Samples as a tensor, where the network is; zeros for the shape of one."""
    first = next(network.model.parameters())
    if isinstance(at, np.ndarray):
        at = tree.from_array(at, "at")
    if isinstance(at, Tensor):
        return at.to(first.device)
    if not isinstance(at, (tuple, list)) or not at or not all(isinstance(k, int) and k > 0 for k in at):
        raise InputError(f"at={at!r}; needed: samples [n, …], or the shape of one for the origin, such as (1, 28, 28).")
    return torch.zeros(1, *at, dtype=network.computes or first.dtype, device=first.device)


def _kinks(out: Tensor) -> tuple[str, ...]:
    """Functions with a kink in the graph that leads to `out`, by name."""
    found: dict[str, None] = {}
    seen, todo = set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stem = node.name().partition("Backward")[0]
        hit = next((KINKS[k] for k in KINKS if stem == k or (k.endswith("Pool") and stem.startswith(k))), None)
        if hit:
            found[hit] = None
        todo += [parent for parent, _ in node.next_functions]
    return tuple(sorted(found))
