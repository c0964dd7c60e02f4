"""Lanczos recurrences from several starts at once, kept orthogonal, by products with a matrix alone."""

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
class Recurrence:
    """What one start saw: T tridiagonal with K Q ≈ Q T, Q's first column the start."""

    nodes: Float[Tensor, " m"]  # eigenvalues of T, largest first
    weights: Float[Tensor, " m"]  # squared first entries of its eigenvectors: a quadrature of the start's measure
    residuals: Float[Tensor, " m"]  # ‖K v − λ v‖ of the Ritz pairs
    diagonal: Float[Tensor, " m"]
    beside: Float[Tensor, " s"]  # the m − 1 entries beside the diagonal
    basis: Float[Tensor, "m n"]
    vectors: Float[Tensor, "m m"]  # eigenvectors of T

    def ritz(self, j: int) -> Float[Tensor, " n"]:
        """The j-th Ritz vector."""
        return self.vectors[:, j] @ self.basis

    def shorter(self, steps: int) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """Nodes and weights that fewer steps would have given."""
        return quadrature(self.diagonal[:steps], self.beside[: max(0, steps - 1)])[:2]


def quadrature(
    diagonal: Float[Tensor, " m"], beside: Float[Tensor, " s"]
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"], Float[Tensor, "m m"]]:
    """Gauss nodes, weights and eigenvectors of a tridiagonal matrix, largest first (Golub & Welsch 1969)."""
    t = torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1)
    nodes, vectors = torch.linalg.eigh(t)
    return nodes.flip(0), vectors[0].square().flip(0), vectors.flip(1)


def lanczos(
    K: Operator, starts: Float[Tensor, "n q"], steps: int, tick: Callable[[], None] | None = None
) -> list[Recurrence]:
    """K Q ≈ Q T from each column, `steps` products with all columns together; bases stay orthogonal to rounding.

    A column whose Krylov space is exhausted is done earlier. The product is in K's own type, all else in float64.
    Cost: `steps` products with q columns; n·q·steps numbers in float64; 4·n·q·steps² operations to stay orthogonal
    (twice is enough: Giraud et al. 2005).
    """
    n, q = starts.shape
    v = starts / starts.norm(dim=0)
    basis = v.new_zeros(q, steps, n)
    alpha, beta = v.new_zeros(steps, q), v.new_zeros(steps, q)
    lengths, scale = torch.full((q,), steps), 0.0
    # Products are as exact as K's type: what they leave of a space that is exhausted is that, not zero.
    eps = torch.finfo(K.dtype).eps * n**0.5
    for k in range(steps):
        basis[:, k] = v.T
        w = _product(K, v.to(K.dtype)).to(v)
        # In units of the first product: of 1e200 there is no square.
        scale = scale or float(w.abs().max()) or 1.0
        w = w / scale
        alpha[k] = (w * v).sum(0)
        # Start by start: products with a vector are 15 times faster than a batched one of the same size (CPU).
        w = torch.stack([_orthogonal(column, known[: k + 1]) for column, known in zip(w.T, basis, strict=True)], 1)
        beta[k] = w.norm(dim=0)
        size = torch.maximum(alpha[: k + 1].abs().amax(0), beta[: k + 1].amax(0))
        done = (beta[k] <= eps * size) & (lengths == steps)
        lengths[done.cpu()] = k + 1
        if bool((lengths <= k + 1).all()):
            break
        # What is done goes on as zeros: no number of it is used.
        going = (lengths > k + 1).to(v.device)
        v = torch.where(going, w / beta[k].clamp_min(torch.finfo(v.dtype).tiny), torch.zeros_like(v))
        if tick is not None:
            tick()
    alpha, beta = alpha * scale, beta * scale
    return [_recurrence(alpha[:m, j], beta[:m, j], basis[j, :m]) for j, m in enumerate(lengths.tolist())]


def _product(K: Operator, v: Float[Tensor, "n q"]) -> Float[Tensor, "n q"]:
    """K v; of a matrix in memory as (vᵀ K)ᵀ, which BLAS does three to six times faster for few columns."""
    if isinstance(K, DenseGram):
        return (v.T.contiguous() @ K.value.reshape(len(v), -1)).T
    return K @ v


def _orthogonal(w: Float[Tensor, " n"], known: Float[Tensor, "k n"]) -> Float[Tensor, " n"]:
    for _ in range(2):
        w = w - known.T @ (known @ w)
    return w


def _recurrence(alpha: Tensor, beta: Tensor, basis: Tensor) -> Recurrence:
    nodes, weights, vectors = quadrature(alpha.cpu(), beta[:-1].cpu())
    residuals = float(beta[-1]) * vectors[-1].abs()
    # The basis stays where the products were made.
    return Recurrence(nodes, weights, residuals, alpha.cpu(), beta[:-1].cpu(), basis, vectors.to(basis.device))
