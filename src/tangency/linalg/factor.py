"""Cholesky factors L Lᵀ = K + reg·I, in memory or, where n² numbers are too many for it, in a file."""

import shutil
import tempfile
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .._base.progress import bar
from .._base.types import FilePath
from ..errors import MemoryBudgetError, NotPositiveDefinite
from ..gram.gram import Gram
from .matrix import flat_rows, flattened

# Rounding K's entries leaves of an eigenvalue 0 at least −0.25·√n·ε of the largest diagonal entry: the worst of 200
# kernels of 6 to 300 samples in float32 on three processors.
OF_K = 0.3


def factor(gram: Gram, reg: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """L [n, n] with L Lᵀ = K + reg·I; `NotPositiveDefinite` names the pivot where there is none. Takes n² numbers."""
    a = flattened(gram, dtype, device).T  # columns lie in sequence: LAPACK then works in place
    a.diagonal().add_(reg)
    diagonal = a.diagonal().clone()  # what the pivots are compared with; the factor overwrites it
    info = _factor_in_place(a)
    _check_pivots(gram, reg, a, diagonal, info, 0)
    return a


def substitute(lower: Tensor, y: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ y."""
    half = torch.linalg.solve_triangular(lower, y, upper=False)
    return torch.linalg.solve_triangular(lower.T, half, upper=True)


class Factor(ABC):
    """L by panels of columns: what can be done with it wherever it lies."""

    n: int
    panels: list[slice]

    @abstractmethod
    def _read(self, k: int, start: int) -> Tensor:
        """The rows of panel k from `start` on."""

    def solve(self, y: Tensor) -> Tensor:
        """(L Lᵀ)⁻¹ y, two passes over the panels."""
        x = y.clone()
        # L z = y from the first panel on, then Lᵀ x = z from the last one back.
        self._forward(x, 0)
        for k, p in reversed(list(enumerate(self.panels))):
            column, width = self._read(k, p.start), p.stop - p.start
            r = x[p] - column[width:].T @ x[p.stop :]
            x[p] = torch.linalg.solve_triangular(column[:width].T, r, upper=True)
        return x

    def inverse_columns(self, index: Tensor) -> Tensor:
        """Columns `index` of L⁻¹ from row min(index) on, above which they are zero: (L Lᵀ)⁻¹ has their products.

        Cost: m² multiply–adds a column, for the m rows below.
        """
        start, like = int(index.min()), self._read(len(self.panels) - 1, self.n - 1)
        x = like.new_zeros(self.n - start, len(index))
        x[index - start, torch.arange(len(index), device=index.device)] = 1
        self._forward(x, start)
        return x

    def _forward(self, x: Tensor, start: int) -> None:
        """L[start:, start:]⁻¹ x, in place of x."""
        for k, p in enumerate(self.panels):
            if p.stop <= start:
                continue
            top = max(p.start, start)
            column, width = self._read(k, top)[:, top - p.start :], p.stop - top
            here, below = slice(top - start, p.stop - start), slice(p.stop - start, None)
            x[here] = torch.linalg.solve_triangular(column[:width], x[here], upper=False)
            x[below] -= column[width:] @ x[here]


class HeldFactor(Factor):
    """L in memory. Nothing of it is copied but the corners of its panels."""

    def __init__(self, lower: Tensor, panel: int = 1024) -> None:  # heuristic: wide enough for fast products
        self.lower, self.n = lower, len(lower)
        self.panels = [slice(start, min(self.n, start + panel)) for start in range(0, self.n, panel)]

    def _read(self, k: int, start: int) -> Tensor:
        return self.lower[start:, self.panels[k]]


class DiskFactor(Factor):
    """L in a file, made and used by panels of columns, on any device. The file goes with the object.

    Memory: two panels, 2·n·panel numbers. Disk: n²/2 numbers; making L reads n³/(6·panel).
    """

    def __init__(self, gram: Gram, reg: float, like: Tensor, folder: FilePath, panel: int, progress: bool) -> None:
        self.n, self.like = flat_rows(gram.shape), like
        c = self.n // gram.shape[0]  # a panel holds whole samples
        step = max(1, panel // c) * c
        self.panels = [slice(start, min(self.n, start + step)) for start in range(0, self.n, step)]
        # One panel after the other, each [n − start, width] by rows: its lower rows are one stretch of the file.
        sizes = [(self.n - p.start) * (p.stop - p.start) * like.element_size() for p in self.panels]
        self.places = [sum(sizes[:k]) for k in range(len(sizes))]
        free = shutil.disk_usage(folder).free
        if sum(sizes) > free:
            raise MemoryBudgetError(
                f"the factor takes {sum(sizes) / 1e9:.3g} GB and {folder} has {free / 1e9:.3g} GB free. Give a "
                "folder on another disk, or use solver=tg.linalg.CG()."
            )
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as this object
        with bar(len(self.panels), "Cholesky on disk", "panel", show=progress) as tick:
            for k in range(len(self.panels)):
                self._make(gram, reg, k)
                tick()

    def _make(self, gram: Gram, reg: float, k: int) -> None:
        """Panel k of L, into the file: that of K less what the panels before it explain, then divided by its corner."""
        start, stop, c = self.panels[k].start, self.panels[k].stop, self.n // gram.shape[0]
        part = gram.select(slice(start // c, None), slice(start // c, stop // c))
        p = flattened(part, self.like.dtype, self.like.device)
        p.diagonal().add_(reg)
        diagonal = p.diagonal().clone()
        for before in range(k):  # the panels to the left, each read from the file: n³/(6·panel) numbers in all
            left = self._read(before, start)
            p -= left @ left[: stop - start].T
        # The corner L_kk on the diagonal is factored; below it, P ← P L_kk⁻ᵀ.
        corner = p[: stop - start].T.contiguous().T  # columns in sequence, as LAPACK takes it
        _check_pivots(gram, reg, corner, diagonal, _factor_in_place(corner), start)
        p[: stop - start] = corner
        p[stop - start :] = torch.linalg.solve_triangular(corner, p[stop - start :].T, upper=False).T
        self.file.seek(self.places[k])
        self.file.write(p.cpu().numpy().data)

    def _read(self, k: int, start: int) -> Tensor:
        """The rows of a panel from `start` on."""
        width, first = self.panels[k].stop - self.panels[k].start, self.panels[k].start
        rows = torch.empty(self.n - start, width, dtype=self.like.dtype)
        self.file.seek(self.places[k] + (start - first) * width * rows.element_size())
        self.file.readinto(rows.numpy().data)
        return rows.to(self.like.device)


def _factor_in_place(a: Tensor) -> int:
    """Overwrites a with its Cholesky factor; the number of the pivot that failed, from 1 on, or 0."""
    info = torch.zeros((), dtype=torch.int32, device=a.device)
    torch.linalg.cholesky_ex(a, out=(a, info))
    return int(info)


def _check_pivots(gram: Gram, reg: float, lower: Tensor, diagonal: Tensor, info: int, first: int) -> None:
    """Refuse a pivot of rounding alone: no larger than the errors of n sums of K_ii's size (heuristic: 30·√n·ε).

    The rounding of K itself, in its own type, counts where reg does not cover it: its sign would else decide, on one
    processor so and on another not, whether there is a factor.
    """
    n, dtype = flat_rows(gram.shape), lower.dtype
    eps, own = (torch.finfo(t).eps for t in (dtype, gram.precision))
    least = 30 * n**0.5 * max(eps, 0.0 if reg > 0 else own) * diagonal
    of_k = OF_K * n**0.5 * own * (diagonal - reg)
    least = torch.where(of_k > reg, torch.maximum(least, of_k), least)
    small = (lower.diagonal().square() <= least)[: info - 1 if info else None]
    pivot = int(small.nonzero()[0]) if bool(small.any()) else info - 1
    if pivot < 0:
        return
    pivot += first
    c = n // gram.shape[0]
    start = max(1e-6 * float(diagonal.abs().max()), 2 * float(least.max()))
    sample = f"sample {pivot // c}" + (f", output {pivot % c}" if c > 1 else "")
    raise NotPositiveDefinite(
        f"K + {reg:g}·I is not positive definite in {str(dtype).removeprefix('torch.')}: pivot {pivot} ({sample}) is "
        "not positive beyond rounding, so this row depends on those before it (a duplicate, more rows than features) "
        f"or K is indefinite. Give a larger reg (a start: {start:.1g}), take the "
        "pseudo-inverse with tg.regress.ridgeless or solver=tg.linalg.Eigh(), or compute the kernel in float64.",
        pivot,
    )
