"""The Jacobian of a model by plain autograd, one output of one sample at a time, and the kernels made of it.

Independent of tangency: every sample goes through the model beside another one, as a batch of two, and
`torch.autograd.grad` is asked for each of its outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.robustness.adversary.entry import leaves


@dataclass(frozen=True)
class Reference:
    """Outputs [n, c] and ∂f/∂θ as [n, c, size] by the parameter's name."""

    outputs: Tensor
    jacobian: dict[str, Tensor]

    def whole(self) -> Tensor:
        return torch.cat(list(self.jacobian.values()), 2)

    def full(self) -> Tensor:
        """[n, c, n, c]"""
        j = self.whole()
        n, c, _ = j.shape
        return (j.flatten(0, 1) @ j.flatten(0, 1).T).reshape(n, c, n, c)

    def trace(self) -> Tensor:
        return sum(self.parts().values(), torch.zeros(()))

    def pseudo(self) -> Tensor:
        j = self.whole().sum(1) / self.outputs.shape[1] ** 0.5
        return j @ j.T

    def parts(self) -> dict[str, Tensor]:
        """The trace kernel's part of each parameter."""
        return {name: j.flatten(1) @ j.flatten(1).T for name, j in self.jacobian.items()}

    def moved(self, step: Mapping[str, Tensor]) -> Tensor:
        """J·δ [n, c]"""
        return sum((j @ step[name].flatten().to(j) for name, j in self.jacobian.items()), torch.zeros(()))

    def to(self, dtype: torch.dtype) -> "Reference":
        return Reference(self.outputs.to(dtype), {name: j.to(dtype) for name, j in self.jacobian.items()})


def take(x: Any, indices: list[int]) -> Any:
    """Some samples of a batch."""
    return leaves(x, lambda v: v[indices])


def count(x: Any) -> int:
    """Samples in a batch."""
    found: list[int] = []

    def note(v: Tensor) -> Tensor:
        found.append(v.shape[0])
        return v

    leaves(x, note)
    return found[0]


def call(model: nn.Module, x: Any, outputs: Any) -> Tensor:
    """The model's outputs [batch, c]: tuples are arguments, dicts are keywords; `outputs` is a key or a function."""
    out = model(**x) if isinstance(x, Mapping) else model(*x) if isinstance(x, tuple | list) else model(x)
    if callable(outputs):
        out = outputs(out)
    elif outputs is not None:
        out = out[outputs]
    elif not isinstance(out, Tensor):
        out = out.logits
    return out.reshape(out.shape[0], -1)


def by_autograd(model: nn.Module, x: Any, outputs: Any = None, pairs: bool = True) -> Reference:
    """One sample at a time: beside its neighbour (`pairs`), or alone as a loop would do it."""
    n = count(x)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    values: list[Tensor] = []
    gradients: dict[str, list[Tensor]] = {name: [] for name in trained}
    for i in range(n):
        out = call(model, take(x, [i, (i + 1) % n] if pairs else [i]), outputs)[0]
        values.append(out.detach())
        for name, j in _rows(out, trained).items():
            gradients[name].append(j)
    return Reference(torch.stack(values), {name: torch.stack(rows) for name, rows in gradients.items()})


def _rows(out: Tensor, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """∂out_j/∂θ [c, size] of one sample, by parameter."""
    found: dict[str, list[Tensor]] = {name: [] for name in trained}
    for value in out:
        grads = torch.autograd.grad(value, list(trained.values()), retain_graph=True, allow_unused=True)
        for (name, p), g in zip(trained.items(), grads, strict=True):
            dense = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            found[name].append(dense.detach().flatten())
    return {name: torch.stack(rows) for name, rows in found.items()}


def mixing(model: nn.Module, x: Any, outputs: Any = None) -> float:
    """How much a sample's outputs depend on its neighbour and on the call: zero, if the entry is a fair one."""
    with torch.no_grad():
        first = call(model, take(x, [0, 1]), outputs)[0]
        others = [call(model, take(x, [0, i]), outputs)[0] for i in (1, 2, 3)]
        rest = [call(model, take(x, [2, 1, 0]), outputs)[2]]
    return max(float((first - other).norm() / first.norm().clamp(min=1e-300)) for other in others + rest)


class _Singles(TorchFunctionMode):
    """Notes whether a result that depends on parameters has fewer than 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.requires_grad and out.is_floating_point():
            self.found |= out.dtype != torch.float64
        return out


def in_single(model: nn.Module, x: Any, outputs: Any = None) -> bool:
    """Whether the model computes in float32 somewhere, so that the order of its sums shows."""
    with _Singles() as mode:
        call(model, take(x, [0, 1]), outputs)
    return mode.found
