"""The public conformance suite: what every kernel must satisfy, ours and a user's own.

>>> import torch, tangency as tg
>>> tg.testing.check_kernel(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(6, 3))
"""

import json
import pickle
from collections.abc import Callable

import torch
from torch import Tensor

from . import _tree
from ._types import Inputs
from .errors import InputError
from .kernel import Kernel
from .tiles.run import compute


def check_kernel(kernel: Kernel, x: Inputs, *, tolerance: float | None = None) -> None:
    """Assert that `kernel` is a kernel on the samples x (at least three): raises AssertionError naming the property.

    Checked: shape, symmetry, positive semidefiniteness, agreement of k(x), k(x, y), diag and blockwise computation,
    equivariance under permutation, parts that sum to the whole, determinism, pickling, a JSON spec, and that empty
    batches are refused. `tolerance` is relative to the largest entry (default by dtype).
    """
    n = _tree.size(x)
    assert n >= 3, f"check_kernel needs at least three samples, got {n}"
    k = kernel(x)
    close = _closeness(k, tolerance)
    _shape(k, n)
    _symmetric_psd(k, close)
    _consistent(kernel, x, k, close)
    _blockwise(kernel, x, k, close)
    _parts(kernel, x, k, close)
    _reproducible(kernel, x, k)
    try:
        kernel(_tree.take(x, slice(0, 0)))
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
    head, tail = _tree.take(x, slice(0, n - 1)), _tree.take(x, slice(n - 1, n))
    columns = k[:-1].narrow(half, n - 1, 1)
    close(kernel(head, tail), columns, "k(x, y) is a block of k([x, y])")
    order = torch.arange(n - 1, -1, -1)
    turned = k.flip(0).flip(half)
    close(kernel(_tree.transform(lambda v: v[order.to(v.device)], x)), turned, "equivariance under permutation")


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
    except (pickle.PicklingError, AttributeError):  # a lambda in the model, the head or outputs=
        return
    assert torch.equal(again(x), k), "a pickled copy gives different numbers"
