"""Gram matrices as linear algebra takes them: known to be square, finite and symmetric; flat where they are full."""

import numpy as np
import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Array, Numbers
from ..errors import InputError
from ..gram.gram import DenseGram, Gram
from ..gram.indices import place_tile

Matrix = Gram | Array
# Bytes that are compared at a time (heuristic: more than a core's cache, less than anyone's memory).
COMPARED_BYTES = 64 << 20


def square(k: Matrix, name: str = "K") -> Gram:
    """k as a Gram of samples with themselves, [n, n] or [n, c, n, c].

    What is not square, finite and symmetric is refused. What `compute` made is known to be; anything else is looked at.
    """
    if not isinstance(k, (Gram, Tensor, np.ndarray)):
        raise InputError(f"{name} is a {type(k).__name__}; needed: a Gram (tg.compute), a tensor or an array.")
    if isinstance(k, np.ndarray):
        k = tree.from_array(k, name)
    half = len(k.shape) // 2
    if len(k.shape) not in (2, 4) or k.shape[:half] != k.shape[half:] or 0 in k.shape:
        raise InputError(
            f"{name} has shape {tuple(k.shape)}; needed: a square Gram, [n, n] or [n, c, n, c], of samples with "
            "themselves. Leave x2 out: tg.compute(kernel, x)."
        )
    if k.dtype not in (torch.float32, torch.float64):
        raise InputError(f"{name} is {k.dtype}; needed: float32 or float64.")
    # What our own kernels computed of samples with themselves is symmetric and finite by the way it is made.
    if isinstance(k, Gram) and k._same_samples:
        return k
    if isinstance(k, Gram) and not k._in_memory:
        raise InputError(f"{name} lies on disk and has other rows than columns; leave x2 out: tg.compute(kernel, x).")
    value = k.dense() if isinstance(k, Gram) else k.detach()
    _check_entries(value.reshape(flat_rows(value.shape), -1), name)
    return DenseGram(value, symmetric=True)


def between(k: Matrix, name: str = "cross") -> Gram:
    """k as a Gram of two sets of samples, [m, n] or [m, d, n, c]."""
    if isinstance(k, Gram):
        return k
    if not isinstance(k, (Tensor, np.ndarray)):
        raise InputError(f"{name} is a {type(k).__name__}; needed: a Gram (tg.compute(kernel, z, x)) or a tensor.")
    return DenseGram(tree.numbers(k, name), symmetric=False)


def _check_entries(k: Tensor, name: str) -> None:
    """Refuse NaN, infinities and asymmetry beyond rounding, going by rows so that no copy of k is made."""
    largest = difference = torch.zeros((), dtype=k.dtype, device=k.device)
    where = (0, 0)  # of the largest difference
    for start in range(0, len(k), step := max(1, COMPARED_BYTES // (len(k) * k.element_size()))):
        rows = k[start : start + step]
        if not bool(rows.isfinite().all()):
            i, j = (int(v) for v in (~rows.isfinite()).nonzero()[0])
            raise InputError(f"{name}[{start + i}, {j}] is {float(rows[i, j])}; needed: finite numbers.")
        off = (rows - k[:, start : start + step].T).abs()
        if off.max() > difference:
            difference = off.max()
            i, j = divmod(int(off.argmax()), len(k))
            where = (start + i, j)
        largest = torch.maximum(largest, rows.abs().max())
    # Two ways to sum p products differ by √p·ε or so: p = 10⁸ parameters leave 10⁴·ε.
    if difference > 1e4 * torch.finfo(k.dtype).eps * largest:
        i, j = where
        raise InputError(
            f"{name} is not symmetric: {name}[{i}, {j}] = {float(k[i, j]):.6g} and {name}[{j}, {i}] = "
            f"{float(k[j, i]):.6g}. Give the Gram of samples with themselves; (K + K.T) / 2 if the difference is noise."
        )


def flattened(gram: Gram, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new matrix with the Gram's entries, [n·c, n·c] or [m·d, n·c], filled tile by tile."""
    # Tile by tile, so that a Gram on disk is in memory once, in the type of the work.
    out = torch.empty(gram.shape, dtype=dtype, device=device)
    for rows, columns, tile in gram.tiles():
        place_tile(out, rows, columns, tile)
    half = len(gram.shape) // 2
    return out.reshape(gram.shape[:half].numel(), gram.shape[half:].numel())


def flat_rows(shape: torch.Size) -> int:
    """Rows of a Gram as a matrix: n, or n·c."""
    return shape[: len(shape) // 2].numel()


def targets(
    given: Numbers, side: torch.Size, dtype: torch.dtype, device: torch.device | None, name: str = "y"
) -> Tensor:
    """y as numbers in the wider type: [n] or [n, q] for a kernel with side [n], [n, c] for a full one."""
    y = tree.numbers(given, name)
    # Numbers in a list have no type of their own: they are not to make the work wider.
    if not isinstance(given, (Tensor, np.ndarray)) and y.is_floating_point():
        y = tree.cast_tensor(y, dtype, name)
    if len(side) == 1 and (y.dim() not in (1, 2) or len(y) != side[0] or 0 in y.shape):
        n = side[0]
        raise InputError(f"there are {n} rows and {name} has shape {tuple(y.shape)}; needed: [{n}] or [{n}, q].")
    if len(side) == 2 and y.shape != side:
        raise InputError(
            f"the kernel is full over {side[1]} outputs of {side[0]} samples and {name} has shape {tuple(y.shape)}; "
            f"needed: {list(side)}."
        )
    if y.is_complex():
        raise InputError(f"{name} is {y.dtype}; needed: real numbers.")
    checks.beside(y, device, name)
    checks.finite(y, name)
    return y.to(torch.promote_types(y.dtype, dtype))
