"""The public conformance suite: what every kernel must satisfy, ours and a user's own.

>>> import torch, tangency as tg
>>> tg.testing.check_kernel(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(6, 3))
"""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._base import tree
from ._base.types import Inputs
from .engine.features import Jacobian
from .engine.network import Network
from .errors import InputError, NonFiniteError
from .gram.compute import compute
from .kernels.empirical import Empirical
from .kernels.kernel import Combined, Kernel

__all__ = ["ModelState", "by_autograd", "check_kernel"]


def check_kernel(kernel: Kernel, x: Inputs, *, tolerance: float | None = None) -> None:
    """Assert that `kernel` keeps the contract of `tg.Kernel` on the samples x (at least three).

    Raises AssertionError naming what is broken. Checked: shape, symmetry, positive semidefiniteness, agreement of k(x),
    k(x1, x2), diag, prepared_diag and blockwise computation, equivariance under permutation, parts that sum to the
    whole, determinism, pickling, a JSON spec, that what is ready stays ready and inputs are left alone, the footprint,
    the device, the outputs, that tiles which are not finite are refused, and batches that are empty or do not go
    together. Of a tangent kernel also: that its numbers are those of plain autograd, each sample in a batch of two, and
    that nothing of the model is changed. `tolerance` is relative to the largest entry (default by the type that is
    computed in, of a combination the coarsest one of its parts).
    """
    if not isinstance(kernel, Kernel):
        raise InputError(
            f"kernel is a {type(kernel).__name__}; needed: a tangency kernel, such as tg.trace_ntk(model), or one of "
            "your own that inherits tg.Kernel."
        )
    x = tree.given(x)
    n = tree.size(x)
    assert n >= 3, f"check_kernel needs at least three samples, got {n}"
    network = kernel.feature_map.network if isinstance(kernel, Empirical) else None
    before = None if network is None else ModelState.of(network.model)
    given = tree.transform(lambda v: v.detach().clone(), x)
    k = kernel(x)
    if network is not None and before is not None:
        before.check(network.model)
    agree = _Agreement.of(k, _coarsest(kernel, x), tolerance)
    _shape(k, n)
    _symmetric_psd(k, agree)
    _says_of_itself(kernel, x, n)
    _consistent(kernel, x, k, agree)
    _prepared(kernel, x, k, agree)
    _blockwise(kernel, x, k, agree)
    _parts(kernel, x, k, agree)
    _reproducible(kernel, x, k)
    if isinstance(kernel, Empirical) and isinstance(kernel.feature_map, Jacobian):
        reference = by_autograd(kernel.feature_map.network, kernel.ready(x), kernel.trace)
        agree(k, reference, "k(x) is that of plain autograd")
    if network is not None and before is not None:
        before.check(network.model)
    _refuses(kernel, x, k)
    unchanged = all(torch.equal(v, w) for (_, v), (_, w) in zip(tree.leaves(x), tree.leaves(given), strict=True))
    assert unchanged, "the inputs were changed"


@dataclass(frozen=True)
class _Agreement:
    """Whether numbers agree, relative to the largest entry of a tile."""

    bound: float
    scale: float
    dtype: torch.dtype

    @staticmethod
    def of(k: Tensor, dtype: torch.dtype, tolerance: float | None) -> "_Agreement":
        """The default bounds are some thousand roundings of the type that is computed in (heuristic)."""
        return _Agreement(tolerance or (1e-10 if dtype == torch.float64 else 2e-5), float(k.abs().max()), dtype)

    def __call__(self, a: Tensor, b: Tensor, what: str) -> None:
        assert a.shape == b.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)}"
        gap = float((a - b).abs().max())
        assert gap <= self.bound * max(self.scale, 1e-30), (
            f"{what}: differ by {gap:.2g}, largest entry {self.scale:.2g}"
        )


def _coarsest(kernel: Kernel, x: Inputs) -> torch.dtype:
    """The type with the fewest digits that is computed in."""
    if isinstance(kernel, Combined):
        return max((_coarsest(k, x) for k in kernel.inner), key=lambda dtype: torch.finfo(dtype).eps)
    return kernel(x).dtype


def _shape(k: Tensor, n: int) -> None:
    half = k.dim() // 2
    assert k.dim() in (2, 4), f"a tile must be [n, m] or [n, c, m, d], got {tuple(k.shape)}"
    assert k.shape[:half] == k.shape[half:], f"k(x) must be square, got {tuple(k.shape)}"
    assert k.shape[0] == n, f"k(x) must have a row per sample, got {tuple(k.shape)} for {n} samples"


def _flat(k: Tensor) -> Tensor:
    half = k.dim() // 2
    return k.reshape(k.shape[:half].numel(), -1)


def _symmetric_psd(k: Tensor, agree: _Agreement) -> None:
    flat = _flat(k)
    agree(flat, flat.T, "symmetry")
    values = torch.linalg.eigvalsh(flat.double().cpu())
    lowest, trace = float(values[0]), float(values.sum())
    slack = len(flat) * (
        1e-13 if agree.dtype == torch.float64 else 1e-6
    )  # rounding moves eigenvalues by n·ε of the trace
    assert lowest >= -slack * max(trace, 1e-30), (
        f"not positive semidefinite: eigenvalue {lowest:.2g}, trace {trace:.2g}"
    )


def _consistent(kernel: Kernel, x: Inputs, k: Tensor, agree: _Agreement) -> None:
    n, half = k.shape[0], k.dim() // 2
    agree(kernel.diag(x), _diagonal(k), "diag(x) is the diagonal of k(x)")
    # A batch of many with a batch of one, where batch norms and squeezes go wrong.
    head, tail = tree.take(x, slice(0, n - 1)), tree.take(x, slice(n - 1, n))
    columns = k[:-1].narrow(half, n - 1, 1)
    agree(kernel(head, tail), columns, "k(x1, x2) is a block of k([x1, x2])")
    order = torch.arange(n - 1, -1, -1)
    turned = k.flip(0).flip(half)
    agree(kernel(tree.transform(lambda v: v[order.to(v.device)], x)), turned, "equivariance under permutation")


def _diagonal(k: Tensor) -> Tensor:
    return torch.diagonal(_flat(k)).reshape(k.shape[: k.dim() // 2])


def _prepared(kernel: Kernel, x: Inputs, k: Tensor, agree: _Agreement) -> None:
    """`ready`, `prepare`, `pair` and `prepared_diag`, as everything downstream calls them."""
    ready = kernel.ready(x)
    again = kernel.ready(ready)
    same = all(torch.equal(v, w) for (_, v), (_, w) in zip(tree.leaves(ready), tree.leaves(again), strict=True))
    assert same, "ready(x) must leave what is ready as it is"
    a, b = kernel.prepare(ready), kernel.prepare(ready, 1 << 30)
    agree(kernel.pair(a, b, 1 << 30), k, "two prepared batches of the same samples, with bounds on memory, give k(x)")
    agree(kernel.prepared_diag(a), _diagonal(k), "prepared_diag is the diagonal of k(x)")
    agree(kernel.pair(a, a), k, "a prepared batch serves twice")


def _blockwise(kernel: Kernel, x: Inputs, k: Tensor, agree: _Agreement) -> None:
    n = k.shape[0]
    agree(compute(kernel, x, progress=False).dense(), k, "compute(k, x) is k(x)")
    # Blocks of one, blocks that fit, and a last block that is smaller than the others.
    for rows in {1, n // 2, n - 1}:
        for x2 in (None, x):
            agree(compute(kernel, x, x2, tile=rows, progress=False).dense(), k, f"blocks of {rows}")


def _parts(kernel: Kernel, x: Inputs, k: Tensor, agree: _Agreement) -> None:
    try:
        parts = kernel.parts(x)
    except InputError:  # a kernel that is no sum over parameters says so
        return
    agree(torch.stack(list(parts.values())).sum(0), k, "parts sum to the whole")


def _reproducible(kernel: Kernel, x: Inputs, k: Tensor) -> None:
    assert torch.equal(kernel(x), k), "two calls give different numbers"
    try:
        again = pickle.loads(pickle.dumps(kernel))
    except (pickle.PicklingError, AttributeError, RuntimeError):  # a lambda in the model, a parametrized module
        return
    assert torch.equal(again(x), k), "a pickled copy gives different numbers"


def _says_of_itself(kernel: Kernel, x: Inputs, n: int) -> None:
    """`spec`, `footprint`, `device` and `outputs`: what plans and stores go by."""
    spec = kernel.spec()
    assert json.loads(json.dumps(spec)) == spec == kernel.spec(), "spec() must be JSON and always the same"
    assert isinstance(spec.get("kernel"), str), 'spec() must have the kernel\'s name under "kernel"'
    ready = kernel.ready(x)
    sizes = kernel.footprint(ready)
    whole = len(sizes) == 2 and all(isinstance(size, int) and size >= 0 for size in sizes)
    assert whole, f"footprint(x) must be two numbers of bytes, at least 0, got {sizes!r}"
    device = kernel.device
    assert device is None or isinstance(device, torch.device), f"device must be a torch.device or None, got {device!r}"
    places = {v.device for _, v in tree.leaves(ready)}
    assert device is None or places == {device}, f"device is {device}, but what is ready lies on {places}"
    outputs = kernel.outputs(ready)
    assert outputs is None or (outputs.dim() > 1 and len(outputs) == n), "outputs(x) must be None or [n, …]"


def _refuses(kernel: Kernel, x: Inputs, k: Tensor) -> None:
    """Empty batches, batches that do not go together, tiles that are not finite."""
    a = kernel.prepare(kernel.ready(x))
    try:
        kernel.diagnose(a)
    except NonFiniteError as e:
        raise AssertionError(f"diagnose() complains of a batch that is finite: {e}") from e
    attempts: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "an empty batch must be refused with InputError": (InputError, lambda: kernel(tree.take(x, slice(0, 0)))),
        "batches of different kinds must be refused with InputError": (
            InputError,
            lambda: kernel(x, tree.transform(lambda v: v.unsqueeze(-1), x)),
        ),
        "a tile that is not finite must be refused with NonFiniteError": (
            NonFiniteError,
            lambda: kernel.finite(torch.full_like(k, torch.nan), a, a),
        ),
    }
    for what, (expected, attempt) in attempts.items():
        try:
            attempt()
        except expected:
            continue
        raise AssertionError(what)


def by_autograd(network: Network, x: Inputs, trace: bool) -> Tensor:
    """J Jᵀ by plain autograd on a copy of the model, each sample in a batch with another one.

    It shares nothing with the engine. Cost: a forward pass of two samples per sample, a backward pass per output.
    """
    model = _copied(network)
    parameters = [p for name, p in model.named_parameters() if name in network.trainable]
    n, rows = tree.size(x), []
    for p in parameters:
        p.requires_grad_(True)
    for i in range(n):
        # In company: for a batch of one, torch's batch norm is wrong in some layouts.
        two = tree.transform(lambda v, i=i: v[[i, (i + 1) % n]].clone(), x)  # type: ignore[misc]
        args, kwargs = network.arguments(two)
        with torch.enable_grad(), network.modes(exact=True):
            out = network.directed(network.readout(model(*args, **kwargs), two))[0]
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
    # Tensors that are no leaves (kept from an earlier call) cannot be copied by deepcopy.
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


@dataclass(frozen=True, repr=False)
class ModelState:
    """Everything of a model that must stay as it is.

    >>> model = torch.nn.Linear(3, 2)
    >>> before = ModelState.of(model)
    >>> before.check(model)
    """

    modules: list[tuple[str, nn.Module, bool, dict[str, object]]]  # name, module, training, attributes
    tensors: list[tuple[str, Tensor, bool, Tensor | None, Tensor]]  # name, tensor, requires_grad, gradient, values
    copies: bool  # whether it can be copied
    pickles: bool

    @staticmethod
    def of(model: nn.Module) -> "ModelState":
        """The model as it is now."""
        modules = [(name, m, m.training, _attributes(m)) for name, m in model.named_modules(remove_duplicate=False)]
        every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        tensors = [(name, v, v.requires_grad, v.grad, v.detach().clone()) for name, v in every]
        return ModelState(modules, tensors, _works(copy.deepcopy, model), _works(pickle.dumps, model))

    def check(self, model: nn.Module) -> None:
        """Raise AssertionError naming what has changed."""
        now = ModelState.of(model)
        assert [m[0] for m in now.modules] == [m[0] for m in self.modules], "the model has other modules than before"
        for (name, m, training, held), (_, m2, training2, held2) in zip(self.modules, now.modules, strict=True):
            where = f"module {name or 'model'}"
            assert m is m2, f"{where} is another object"
            assert training == training2, f"{where} is in another mode"
            assert held.keys() == held2.keys(), f"{where} has other attributes: {set(held) ^ set(held2)}"
            for key, v in held.items():
                assert _same(v, held2[key]), f"{where}: attribute {key} has changed"
        assert [t[0] for t in now.tensors] == [t[0] for t in self.tensors], "the model has other parameters or buffers"
        for (name, v, needs, grad, value), (_, v2, needs2, grad2, value2) in zip(
            self.tensors, now.tensors, strict=True
        ):
            assert v is v2, f"{name} is another tensor"
            assert needs == needs2, f"{name} has another requires_grad"
            assert grad is grad2, f"{name} has another gradient"
            assert torch.equal(value.nan_to_num(), value2.nan_to_num()), f"{name} has other values"
        assert now.copies or not self.copies, "the model cannot be copied any more"
        assert now.pickles or not self.pickles, "the model cannot be pickled any more"


def _attributes(module: nn.Module) -> dict[str, object]:
    return {k: _frozen(v) for k, v in module.__dict__.items()}


def _frozen(v: object) -> object:
    if isinstance(v, dict):
        return {k: _frozen(w) for k, w in v.items()}
    return [_frozen(w) for w in v] if isinstance(v, list) else v


def _same(a: object, b: object) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    # By identity: an equal tensor in its place would be another one. Numbers by value, NaN being itself.
    simple = isinstance(a, (bool, int, float, str)) and type(a) is type(b)
    return a is b or (simple and (a == b or a != a))


def _works(f: Callable[[nn.Module], object], model: nn.Module) -> bool:
    try:
        f(model)
    except Exception:
        return False
    return True
