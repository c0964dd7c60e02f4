"""The public conformance suite: what every kernel must satisfy, ours and a user's own.

>>> import torch, tangency as tg
>>> tg.testing.check_kernel(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(6, 3))
"""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._base import tree
from ._base.types import Inputs
from .engine.features import Jacobian
from .engine.network import Network
from .errors import InputError
from .gram.compute import compute
from .kernels.kernel import Empirical, Kernel


def check_kernel(kernel: Kernel, x: Inputs, *, tolerance: float | None = None) -> None:
    """Assert that `kernel` is a kernel on the samples x (at least three): raises AssertionError naming the property.

    Checked: shape, symmetry, positive semidefiniteness, agreement of k(x), k(x, y), diag and blockwise computation,
    equivariance under permutation, parts that sum to the whole, determinism, pickling, a JSON spec, and that empty
    batches are refused. Of a tangent kernel also: that its numbers are those of plain autograd, each sample in a batch
    of two, and that nothing of the model is changed. `tolerance` is relative to the largest entry (default by dtype).
    """
    n = tree.size(x)
    assert n >= 3, f"check_kernel needs at least three samples, got {n}"
    network = kernel.features.network if isinstance(kernel, Empirical) else None
    before = None if network is None else State.of(network.model)
    k = kernel(x)
    if network is not None and before is not None:
        before.check(network.model)
    close = _closeness(k, tolerance)
    _shape(k, n)
    _symmetric_psd(k, close)
    _consistent(kernel, x, k, close)
    _blockwise(kernel, x, k, close)
    _parts(kernel, x, k, close)
    _reproducible(kernel, x, k)
    if isinstance(kernel, Empirical) and isinstance(kernel.features, Jacobian):
        close(k, by_autograd(kernel.features.network, kernel.ready(x), kernel.trace), "k(x) is that of plain autograd")
    if network is not None and before is not None:
        before.check(network.model)
    try:
        kernel(tree.take(x, slice(0, 0)))
    except InputError:
        pass
    else:
        raise AssertionError("an empty batch must be refused with InputError")


def _closeness(k: Tensor, tolerance: float | None) -> Callable[[Tensor, Tensor, str], None]:
    bound = tolerance or (1e-10 if k.dtype == torch.float64 else 2e-5)
    scale = float(k.abs().max())

    def close(a: Tensor, b: Tensor, what: str) -> None:
        assert a.shape == b.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)}"
        gap = float((a - b).abs().max())
        assert gap <= bound * max(scale, 1e-30), f"{what}: differ by {gap:.2g}, largest entry {scale:.2g}"

    return close


def _shape(k: Tensor, n: int) -> None:
    half = k.dim() // 2
    assert k.dim() in (2, 4), f"a tile must be [n, m] or [n, c, m, d], got {tuple(k.shape)}"
    assert k.shape[:half] == k.shape[half:], f"k(x) must be square, got {tuple(k.shape)}"
    assert k.shape[0] == n, f"k(x) must have a row per sample, got {tuple(k.shape)} for {n} samples"


def _flat(k: Tensor) -> Tensor:
    half = k.dim() // 2
    return k.reshape(k.shape[:half].numel(), -1)


def _symmetric_psd(k: Tensor, close: Callable[[Tensor, Tensor, str], None]) -> None:
    flat = _flat(k)
    close(flat, flat.T, "symmetry")
    values = torch.linalg.eigvalsh(flat.double().cpu())
    lowest, trace = float(values[0]), float(values.sum())
    slack = len(flat) * (1e-13 if k.dtype == torch.float64 else 1e-6)
    assert lowest >= -slack * max(trace, 1e-30), (
        f"not positive semidefinite: eigenvalue {lowest:.2g}, trace {trace:.2g}"
    )


def _consistent(kernel: Kernel, x: Inputs, k: Tensor, close: Callable[[Tensor, Tensor, str], None]) -> None:
    n, half = k.shape[0], k.dim() // 2
    diagonal = torch.diagonal(_flat(k)).reshape(k.shape[:half])
    close(kernel.diag(x), diagonal, "diag(x) is the diagonal of k(x)")
    head, tail = tree.take(x, slice(0, n - 1)), tree.take(x, slice(n - 1, n))
    columns = k[:-1].narrow(half, n - 1, 1)
    close(kernel(head, tail), columns, "k(x, y) is a block of k([x, y])")
    order = torch.arange(n - 1, -1, -1)
    turned = k.flip(0).flip(half)
    close(kernel(tree.transform(lambda v: v[order.to(v.device)], x)), turned, "equivariance under permutation")


def _blockwise(kernel: Kernel, x: Inputs, k: Tensor, close: Callable[[Tensor, Tensor, str], None]) -> None:
    n = k.shape[0]
    close(compute(kernel, x, progress=False).dense(), k, "compute(k, x) is k(x)")
    for rows in {1, n // 2, n - 1}:
        for y in (None, x):
            close(compute(kernel, x, y, tile=rows, progress=False).dense(), k, f"blocks of {rows}")


def _parts(kernel: Kernel, x: Inputs, k: Tensor, close: Callable[[Tensor, Tensor, str], None]) -> None:
    try:
        parts = kernel.parts(x)
    except InputError:  # a kernel that is no sum over parameters says so
        return
    close(torch.stack(list(parts.values())).sum(0), k, "parts sum to the whole")


def _reproducible(kernel: Kernel, x: Inputs, k: Tensor) -> None:
    assert torch.equal(kernel(x), k), "two calls give different numbers"
    spec = kernel.spec()
    assert json.loads(json.dumps(spec)) == spec == kernel.spec(), "spec() must be JSON and always the same"
    try:
        again = pickle.loads(pickle.dumps(kernel))
    except (pickle.PicklingError, AttributeError, RuntimeError):  # a lambda in the model, a parametrized module
        return
    assert torch.equal(again(x), k), "a pickled copy gives different numbers"


def by_autograd(network: Network, x: Inputs, trace: bool) -> Tensor:
    """J Jᵀ by plain autograd on a copy of the model, each sample in a batch with another one.

    It shares nothing with the engine. Cost: a forward pass of two samples per sample, a backward pass per output.
    """
    model = _copied(network)
    parameters = [p for name, p in model.named_parameters() if name in network.train]
    n, rows = tree.size(x), []
    for p in parameters:
        p.requires_grad_(True)
    for i in range(n):
        two = tree.transform(lambda v, i=i: v[[i, (i + 1) % n]].clone(), x)  # type: ignore[misc]
        args, kwargs = network.arguments(two)
        with torch.enable_grad(), network.modes(exact=True):
            out = network.outputs_of(model(*args, **kwargs), two)[0]
            for value in out:
                grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
                rows.append(torch.cat([_flat_gradient(g, p) for g, p in zip(grads, parameters, strict=True)]))
    j = torch.stack(rows)
    k = (j @ j.T).unflatten(0, (n, -1)).unflatten(2, (n, -1))
    return torch.einsum("ncmc->nm", k) if trace else k


def _flat_gradient(g: Tensor | None, p: Tensor) -> Tensor:
    return (torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g).flatten()


def _copied(network: Network) -> nn.Module:
    """A copy of the model at the network's parameters, in its precision."""
    memo = {
        id(v): v.detach().clone()
        for m in network.model.modules()
        for v in m.__dict__.values()
        if isinstance(v, Tensor) and not v.is_leaf
    }
    model = copy.deepcopy(network.model, memo)
    state = {k: v.clone() for k, v in network.state().items()}
    for name, v in (*model.named_parameters(), *model.named_buffers()):
        v.data = state[name]
    return model


@dataclass(frozen=True)
class State:
    """Everything of a model that must stay as it is.

    >>> model = torch.nn.Linear(3, 2)
    >>> before = State.of(model)
    >>> before.check(model)
    """

    modules: list[tuple[Any, ...]]
    tensors: list[tuple[Any, ...]]
    copies: bool
    pickles: bool

    @staticmethod
    def of(model: nn.Module) -> "State":
        modules = [(name, m, m.training, _attributes(m)) for name, m in model.named_modules(remove_duplicate=False)]
        every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        tensors = [(name, v, v.requires_grad, v.grad, v._version, v.detach().clone()) for name, v in every]
        return State(modules, tensors, _works(copy.deepcopy, model), _works(pickle.dumps, model))

    def check(self, model: nn.Module) -> None:
        """Raise AssertionError naming what has changed."""
        now = State.of(model)
        assert [m[0] for m in now.modules] == [m[0] for m in self.modules], "the model has other modules than before"
        for (name, m, training, own), (_, m2, training2, own2) in zip(self.modules, now.modules, strict=True):
            where = f"module {name or 'model'}"
            assert m is m2, f"{where} is another object"
            assert training == training2, f"{where} is in another mode"
            assert own.keys() == own2.keys(), f"{where} has other attributes: {set(own) ^ set(own2)}"
            for key, v in own.items():
                assert _same(v, own2[key]), f"{where}: attribute {key} has changed"
        assert [t[0] for t in now.tensors] == [t[0] for t in self.tensors], "the model has other parameters or buffers"
        for (name, v, needs, grad, _, value), (_, v2, needs2, grad2, _, value2) in zip(
            self.tensors, now.tensors, strict=True
        ):
            assert v is v2, f"{name} is another tensor"
            assert needs == needs2, f"{name} has another requires_grad"
            assert grad is grad2, f"{name} has another gradient"
            assert torch.equal(value.nan_to_num(), value2.nan_to_num()), f"{name} has other values"
        assert now.copies or not self.copies, "the model cannot be copied any more"
        assert now.pickles or not self.pickles, "the model cannot be pickled any more"


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: _frozen(v) for k, v in module.__dict__.items()}


def _frozen(v: Any) -> Any:
    if isinstance(v, dict):
        return {k: _frozen(w) for k, w in v.items()}
    return [_frozen(w) for w in v] if isinstance(v, list) else v


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    simple = isinstance(a, (bool, int, float, str)) and type(a) is type(b)
    return a is b or (simple and (a == b or a != a))


def _works(f: Callable[[Any], Any], model: nn.Module) -> bool:
    try:
        f(model)
    except Exception:
        return False
    return True
