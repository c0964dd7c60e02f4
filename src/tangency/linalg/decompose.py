"""Decompositions of matrices in memory: torch's own, with what they lack on a GPU, and tall ones by blocks of rows."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import DidNotConverge

# CUDA's solver of float32 eigenproblems up to 512 (Jacobi) stops at residuals of 1e-5 of the largest eigenvalue, a
# hundred times what LAPACK leaves; in float64 they cost no more than a launch. With some room for other versions.
JACOBI = 1024
# Numbers of a tall matrix that are factored at a time, and at least so many times as many rows as columns (heuristics:
# a half of the arithmetic more than all at once, at most, and 256 MiB in float64).
HELD, TIMES = 1 << 25, 4
# Columns and rows beyond which no library is asked for singular values: cuSOLVER refuses 40,960, LAPACK has no number
# for the size of its work array, and smaller ones take minutes (heuristic).
LARGE = 8192

Found = TypeVar("Found")


def eigh(k: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, smallest first, and eigenvectors of a symmetric matrix; small float32 ones on a GPU by float64."""
    wide = k.double() if k.is_cuda and k.dtype == torch.float32 and len(k) <= JACOBI else k
    values, vectors = _decomposed(torch.linalg.eigh, wide, "eigenvectors")
    return values.to(k.dtype), vectors.to(k.dtype)


def svd(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U [n, k], σ [k], largest first, and Vᵀ [k, p], k the smaller of n and p."""
    return _decomposed(lambda m: tuple(torch.linalg.svd(m, full_matrices=False)), a, "singular vectors")


class Singular(NamedTuple):
    """Of a = U diag(σ) Vᵀ without U, which may be tall: σ [k], V [p, k], and Uᵀ t [k, q] of some columns t.

    σ up to `rounding`·σ_1 are not known, nor their vectors.
    """

    values: Tensor
    right: Tensor
    inside: Tensor
    rounding: float


def singular(a: Tensor, t: Tensor, held: int | None = None) -> Singular:
    """σ, V and Uᵀ t of a [n, p] and t [n, q], by Householder's QR and the singular values of its small factor.

    With [a t] = Q [[R, S], [0, ·]] and R = U' diag(σ) Vᵀ there is U = Q U' and Uᵀ t = U'ᵀ S: as exact as the singular
    values of `a` itself, and no Q is formed. Rows are taken in blocks of about `held` numbers (default: HELD), each
    below the R of those before it (Demmel, Grigori, Hoemmen & Langou 2012, "Communication-optimal parallel and
    sequential QR and LU factorizations"). Cost: about 2np² + 20p³ operations for n > p, and p² numbers beside a block.
    """
    n, p = a.shape
    if min(n, p) > LARGE:
        return _by_eigenvectors(a, t, held)
    rounding = torch.finfo(a.dtype).eps
    if n <= p:  # aᵀ = Q R, so a = Rᵀ Qᵀ
        q, r = torch.linalg.qr(a.T)
        left, values, right = svd(r.T)
        return Singular(values, q @ right.T, left.T @ t, rounding)
    step = max((held or HELD) // (p + t.shape[1]), TIMES * p)
    r = a.new_empty(0, p + t.shape[1])
    for start in range(0, n, step):
        rows = torch.cat([a[start : start + step], t[start : start + step]], 1)
        r = torch.linalg.qr(torch.cat([r, rows]), mode="r").R
    left, values, right = svd(r[:p, :p])
    return Singular(values, right.T, left.T @ r[:p, p:], rounding)


def _by_eigenvectors(a: Tensor, t: Tensor, held: int | None) -> Singular:
    """`singular` of many rows and columns by the eigenvectors of aᵀa, or of aaᵀ, in float64.

    Squares lose what is below √ε·σ_1 = 1.5e-8 σ_1: far below the rounding of entries in float32.
    """
    n, p = a.shape
    step = max(1, (held or HELD) // p)
    parts = list(zip(a.split(step), t.split(step), strict=True))
    gram = torch.zeros(min(n, p), min(n, p), dtype=torch.float64, device=a.device)
    if n > p:
        for rows, _ in parts:
            gram.addmm_(rows.double().T, rows.double())
    else:
        for columns in a.split(max(1, (held or HELD) // n), 1):
            gram.addmm_(columns.double(), columns.double().T)
    squares, vectors = eigh(gram)
    values, vectors = squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)
    over = torch.where(values > 0, 1 / values, 0)  # of a zero nothing is inside, and its vector any
    if n > p:
        right = vectors
        inside = over[:, None] * (vectors.T @ sum(rows.double().T @ y.double() for rows, y in parts))
    else:
        right = torch.cat([c.double().T @ vectors for c in a.split(max(1, (held or HELD) // n), 1)]) * over
        inside = vectors.T @ t.double()
    return Singular(values.to(a), right.to(a), inside.to(t), 4 * torch.finfo(torch.float64).eps ** 0.5)


def _decomposed(function: Callable[[Tensor], Found], a: Tensor, what: str) -> Found:
    """The decomposition; where torch's routine gives up, by LAPACK in float64 on the CPU; else `DidNotConverge`."""
    try:
        return function(a)
    except RuntimeError as first:  # LinAlgError is one; cuSOLVER's own errors are of no kind of their own
        if isinstance(first, torch.OutOfMemoryError):
            raise
        try:
            found = function(a.detach().cpu().double())
        except RuntimeError as e:
            raise DidNotConverge(
                f"the {what} of a matrix {tuple(a.shape)} on {a.device} were not found: "
                f"{str(first).strip().splitlines()[0]} Its entries are from {float(a.min()):.3g} to "
                f"{float(a.max()):.3g}. Give it in float64, or with rows and columns of about one size."
            ) from e
        return tuple(part.to(a) for part in found)  # type: ignore[return-value,attr-defined]
