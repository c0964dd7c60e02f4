"""(K + reg·I)⁻¹ by its blocks on the diagonal, which say what a fit without some of its samples does.

From eigenpairs, where one decomposition serves every reg, or from a Cholesky factor in memory or on disk.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .._base import checks
from .._base import memory as memory_of
from .._base.progress import bar
from .._base.types import FilePath, Memory
from ..errors import InputError, MemoryBudgetError, NotPositiveDefinite
from ..gram.gram import Gram
from ..linalg.eigen import Spectrum
from ..linalg.factor import DiskFactor, Factor, HeldFactor, factor
from ..linalg.matrix import flat_rows
from ..linalg.systems import Refined, refined

# Eigenvalues up to this many times what rounding K, and decomposing it, leave of λ_1 count as zero (heuristic).
ZERO_MARGIN = 4.0
# Columns of the inverse that are made at a time (heuristic): wide enough for fast products, few beside n.
COLUMNS = 1024
# Panels of a factor on disk are no wider than this (heuristic).
WIDEST_PANEL = 2048


class Inverse(ABC):
    """M = (K + reg·I)⁻¹ as leave-one-out needs it."""

    @property
    @abstractmethod
    def solver(self) -> str:
        """How it was found."""

    @property
    def columns(self) -> int:
        """How many of the inverse are made at a time."""
        return COLUMNS

    @abstractmethod
    def solve(self, target: Tensor) -> Refined:
        """M·target [n, q], and its residual as measured."""

    @abstractmethod
    def block(self, rows: Tensor) -> Tensor:
        """M on the diagonal, [groups, s, s], for the rows [groups, s] of some groups."""

    def blocks(self, groups: Sequence[Tensor], progress: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows [g, s], M there [g, s, s]) until all groups have come; `groups` has them by size."""
        return _by_parts(self.block, groups, self.columns, progress)


def _by_parts(
    block: Callable[[Tensor], Tensor], groups: Sequence[Tensor], columns: int, progress: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows [g, s], block of them), about as many columns at a time."""
    with bar(sum(len(rows) for rows in groups), "leave out", "group", show=progress) as tick:
        for rows in groups:
            for part in rows.split(max(1, columns // rows.shape[1])):
                yield part, block(part)
                tick(len(part))


@dataclass(frozen=True, eq=False)
class SpectralInverse(Inverse):
    """Σ_i v_i v_iᵀ / (λ_i + reg). `values` are those of `settled`."""

    whole: Spectrum
    values: Tensor
    reg: float

    @property
    def solver(self) -> str:
        """How the eigenpairs were found."""
        return self.whole.solver

    def solve(self, target: Tensor) -> Refined:
        """The residual is that of the eigenpairs, and what rounding leaves of them."""
        v, shifted = self.whole.vectors, (self.values + self.reg)[:, None]
        x = v @ ((v.T @ target) / shifted)
        off = (v @ (shifted * (v.T @ x)) - target).norm() + self.whole.residual * float(self.values[0]) * x.norm()
        return Refined(x, 1, float(off / target.norm().clamp_min(torch.finfo(target.dtype).tiny)))

    def block(self, rows: Tensor) -> Tensor:
        """V_g diag(1 / (λ + reg)) V_gᵀ."""
        return diagonal_blocks(self.whole.vectors[rows.flatten()], 1 / (self.values + self.reg), len(rows))


@dataclass(frozen=True, eq=False)
class FactorInverse(Inverse):
    """L⁻ᵀ L⁻¹ of K + reg·I = L Lᵀ."""

    gram: Gram
    lower: Factor
    reg: float

    @property
    def solver(self) -> str:
        """Where the factor lies."""
        return "Cholesky on disk" if isinstance(self.lower, DiskFactor) else "Cholesky"

    @property
    def columns(self) -> int:
        """As many as a panel of a factor on disk has, which memory was counted for."""
        first = self.lower.panels[0]
        return first.stop - first.start if isinstance(self.lower, DiskFactor) else COLUMNS

    def solve(self, target: Tensor) -> Refined:
        """With iterative refinement, as `tg.linalg.Cholesky`."""
        return refined(self.gram, target, self.reg, self.lower.solve, target.dtype)

    def block(self, rows: Tensor) -> Tensor:
        """Products of the columns of L⁻¹."""
        return column_products(self.lower, rows)


def column_products(lower: Factor, rows: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ on the diagonal, [groups, s, s], for rows [groups, s]."""
    x = lower.inverse_columns(rows.flatten())
    if rows.shape[1] == 1:
        return x.square().sum(0)[:, None, None]
    x = x.T.reshape(*rows.shape, -1)
    return x @ x.mT


def column_blocks(lower: Factor, groups: Sequence[Tensor], progress: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows [g, s], (L Lᵀ)⁻¹ there [g, s, s]) of all groups, for who has the factor already."""
    return _by_parts(lambda rows: column_products(lower, rows), groups, COLUMNS, progress)


def diagonal_blocks(vectors: Tensor, weights: Tensor, n: int) -> Tensor:
    """The blocks [n, c, c] on the diagonal of V diag(weights) Vᵀ, one for each of n groups of c rows."""
    if len(vectors) == n:
        return torch.einsum("ir,ir,r->i", vectors, vectors, weights)[:, None, None]
    v = vectors.reshape(n, -1, vectors.shape[1])
    return torch.einsum("icr,r,idr->icd", v, weights, v)


def rounding_of(whole: Spectrum) -> tuple[float, float]:
    """What rounding K to its own type, and decomposing it, leave: of an eigenvalue (at most), of an entry (about)."""
    largest, n = float(whole.values.abs().max()), len(whole)
    entry = whole.eps * float(whole.values.norm()) / n + whole.residual * largest / n**0.5
    return ZERO_MARGIN * (whole.eps + whole.residual) * largest, entry


def settled(whole: Spectrum) -> Tensor:
    """The eigenvalues, all of them, with zero in place of rounding: above or below zero, chance would decide."""
    if not whole.complete:
        raise InputError(f"only {len(whole)} eigenpairs were given; needed: all of them (tg.linalg.spectrum).")
    return torch.where(whole.values.abs() <= rounding_of(whole)[0], 0, whole.values)


def spectral_inverse(whole: Spectrum, reg: float) -> SpectralInverse:
    """Refuses a reg for which K + reg·I is not positive definite."""
    values = settled(whole)
    if float(values.min()) + reg <= 0:
        raise NotPositiveDefinite(
            f"K + {reg:g}·I is not positive definite: K has the eigenvalue {float(whole.values[-1]):.3g}, beside its "
            f"largest {float(whole.values[0]):.3g}. Give a larger reg, or compute the kernel in float64."
        )
    return SpectralInverse(whole, values, reg)


def factor_inverse(
    gram: Gram, reg: float, like: Tensor, memory: Memory, scratch: FilePath | None, progress: bool
) -> FactorInverse:
    """With the factor in memory where it fits there, else in the folder `scratch`; in the type and place of `like`."""
    if scratch is not None and not Path(scratch).is_dir():
        raise InputError(f"scratch={str(scratch)!r}; needed: a folder, for a factor that does not fit into memory.")
    budget = checks.memory(memory)
    if budget is None:
        free = memory_of.free_memory(like.device)
        budget = free if like.device.type == "cuda" else free // 2
    n = flat_rows(gram.shape)
    line = n * like.element_size()
    need = line * (n + 3 * min(n, COLUMNS))  # the factor; columns of its inverse, what is taken from them, a tile
    if need <= budget:
        return FactorInverse(gram, HeldFactor(factor(gram, reg, like.dtype, like.device)), reg)
    panel = min(budget // (6 * line), WIDEST_PANEL)  # as many panels, or blocks of columns, are held at a time
    if scratch is None or panel < n // gram.shape[0]:
        raise MemoryBudgetError(
            f"the Cholesky factor of a {n} x {n} matrix takes {need / 1e9:.3g} GB, and there are {budget / 1e9:.3g}. "
            "Give a folder with n²/2 numbers of room, scratch=, more memory=, y in float32, or leave_out_features."
        )
    return FactorInverse(gram, DiskFactor(gram, reg, like, scratch, panel, progress), reg)
