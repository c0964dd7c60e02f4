"""Block Lanczos: a Krylov space of several starts together, kept orthogonal, by products with a matrix alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .._base.types import Float
from ..gram.gram import DenseGram


@runtime_checkable
class Operator(Protocol):
    """A symmetric matrix that is known by its products: a `Gram`, or a `JacobianGram` that is never formed."""

    @property
    def shape(self) -> torch.Size:
        """[n, n] or [n, c, n, c]."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its entries."""

    @property
    def device(self) -> torch.device | None:
        """Where products are computed; None for one on disk."""

    def __matmul__(self, v: Tensor) -> Tensor:
        """K v for v [n·c, q]."""


@dataclass(frozen=True, eq=False)
class Krylov:
    """What the starts saw: a banded T with K Q ≈ Q T, Q's first columns the starts'.

    A start z = Q[:, :q] a sees the measure Σ_i (aᵀ s_i)² δ(λ − λ_i), s_i the first q entries of T's i-th eigenvector: a
    Gauss quadrature that knows, beside its own products, those of the others.
    """

    nodes: Float[Tensor, " m"]  # eigenvalues of T, largest first
    weights: Float[Tensor, "q m"]  # of each start, of sum 1
    residuals: Float[Tensor, " m"]  # ‖K v − λ v‖ of the Ritz pairs
    matrix: Float[Tensor, "m m"]  # T
    basis: Float[Tensor, "m n"]  # Qᵀ
    widths: tuple[int, ...]  # columns of Q that each step brought
    within: Float[Tensor, "p q"]  # the starts in the first columns of Q

    def shorter(self, steps: int) -> "Krylov":
        """What fewer steps would have given."""
        m = sum(self.widths[:steps])
        inner, beyond = self.matrix[:m, :m], self.matrix[m : m + sum(self.widths[steps : steps + 1]), :m]
        return solved(inner, beyond, self.basis[:m], self.widths[:steps], self.within)


def solved(
    matrix: Float[Tensor, "m m"],
    beyond: Float[Tensor, "r m"],
    basis: Float[Tensor, "m n"],
    widths: tuple[int, ...],
    within: Float[Tensor, "p q"],
) -> Krylov:
    """Nodes and weights from T (Golub & Underwood 1977), and residuals from what the last step led to."""
    nodes, vectors = torch.linalg.eigh(matrix)
    nodes, vectors = nodes.flip(0), vectors.flip(1)
    weights = (within.T @ vectors[: len(within)]).square()
    return Krylov(nodes, weights, (beyond @ vectors).norm(dim=0), matrix, basis, widths, within)


def lanczos(K: Operator, starts: Float[Tensor, "n q"], steps: int, tick: Callable[[], None] | None = None) -> Krylov:
    """K Q ≈ Q T from all columns together, one product a step; Q stays orthogonal to rounding.

    Directions in which the Krylov space is exhausted are left out. The product is in K's own type, all else in float64.
    Cost: `steps` products with q columns; n·q·steps numbers in float64; 4·n·q²·steps² operations to stay orthogonal
    (twice is enough: Giraud et al. 2005).
    """
    n = len(starts)
    block, within = torch.linalg.qr(starts / starts.norm(dim=0))
    first = block.shape[1]
    room = min(n, first * steps)
    basis, matrix = starts.new_zeros(room, n), starts.new_zeros(room + first, room, device="cpu")
    basis[:first], widths, used, scale, size = block.T, [first], 0, 0.0, 0.0
    # Products are as exact as K's type: what they leave of a space that is exhausted is that, not zero.
    eps = torch.finfo(K.dtype).eps * n**0.5
    while True:
        here, known = basis[used : used + widths[-1]], basis[: used + widths[-1]]
        w = _product(K, here.to(K.dtype)).to(basis)
        # In units of the first product: of 1e200 there is no square.
        scale = scale or float(w.abs().max()) or 1.0
        w /= scale
        inner = (here @ w.T).cpu()
        end = used + widths[-1]
        matrix[used:end, used:end] = (inner + inner.T) / 2
        size = max(size, float(inner.abs().max()))
        block, beside = _orthonormal(w - (w @ known.T) @ known, known, eps, size)
        size = max(size, float(beside.abs().max()) if len(beside) else 0.0)
        if tick is not None:
            tick()
        matrix[end : end + len(beside), used:end] = beside
        if not len(beside) or len(widths) == steps or end == n:
            break
        block, beside = block[: n - end], beside[: n - end]
        matrix[used:end, end : end + len(beside)] = beside.T
        basis[end : end + len(block)] = block
        used, widths = end, [*widths, len(block)]
    beyond = matrix[end : end + first, :end] if end < n else matrix[:0, :end]
    return solved(matrix[:end, :end] * scale, beyond * scale, basis[:end], tuple(widths), within.cpu())


def _product(K: Operator, v: Float[Tensor, "q n"]) -> Float[Tensor, "q n"]:
    """(K vᵀ)ᵀ; of a matrix in memory as v K, which BLAS does three to six times faster for few columns."""
    if isinstance(K, DenseGram):
        return v @ K.value.reshape(v.shape[1], -1)
    return (K @ v.T).T


def _orthonormal(
    w: Float[Tensor, "q n"], known: Float[Tensor, "m n"], eps: float, size: float
) -> tuple[Float[Tensor, "r n"], Float[Tensor, "r q"]]:
    """(Q, B) with wᵀ ≈ Qᵀ B, Q orthonormal and orthogonal to `known`; directions below eps·size are none."""
    q, upper = torch.linalg.qr(w.T)
    turn, values, right = torch.linalg.svd(upper)
    real = values > eps * max(size, float(values[0]))
    rows = (q @ turn[:, real]).T
    # What was small is, of unit length now, no longer orthogonal: the second pass.
    rows = rows - (rows @ known.T) @ known
    q, again = torch.linalg.qr(rows.T)
    return q.T, (again @ (values[real, None] * right[real])).cpu()
