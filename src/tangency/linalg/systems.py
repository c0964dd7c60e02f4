"""Linear systems (K + reg·I) a = y: by factors, by eigenvectors, or by products with K, which may stream from disk.

A solver is a small object; `Auto` chooses one and can be asked which (`Auto().choose(K)`). Every answer is a `Solution`
with the residual as measured, never as promised; above the tolerance it is `DidNotConverge`. Nothing is added to K but
the `reg` that was asked for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._base import checks
from .._base import memory as memory_of
from .._base.progress import bar
from .._base.results import Result
from .._base.types import Device, FilePath, Float, Memory, Numbers
from ..errors import DidNotConverge, InputError, NotPositiveDefinite
from ..gram.gram import Gram
from .decompose import eigh, svd
from .eigen import spectrum
from .factor import DiskFactor, factor, substitute
from .matrix import Matrix, flat_rows, square, targets


@dataclass(frozen=True, eq=False, repr=False)
class Solution(Result):
    """a with (K + reg·I) a ≈ y. `residual` is the largest ‖(K + reg·I) a − y‖ / ‖y‖ over the columns of y."""

    value: Float[Tensor, "..."]
    solver: str
    steps: int
    residual: float


class Solver(ABC):
    """A way to solve (K + reg·I) a = y. `y` is a matrix [n·c, q] in the type and on the device of the work."""

    @abstractmethod
    def __call__(self, gram: Gram, y: Tensor, reg: float, tol: float) -> Solution:
        """a [n·c, q], and its residual as measured."""


def solve(
    K: Matrix, y: Numbers, *, reg: float = 0.0, solver: Solver | None = None, tol: float | None = None
) -> Solution:
    """a = (K + reg·I)⁻¹ y for y [n] or [n, q]; a full kernel [n, c, n, c] acts on [n·c] or [n·c, q].

    `reg` is absolute. The work is done in the wider type of K and y, on K's device; a Gram on disk is worked on where y
    lies. `solver`: `Auto()` (default), `Cholesky()`, `Eigh()`, `CG()`. `tol`: the largest residual that is returned
    instead of raised (default: 1e-6 in float64, 1e-3 in float32).

    >>> import tangency as tg
    >>> K = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> tg.linalg.solve(K, torch.tensor([3.0, 3.0])).value.round(decimals=4)
    tensor([1., 1.])
    """
    gram = square(K)
    n = flat_rows(gram.shape)
    reg = checks.nonnegative(reg, "reg")
    y = targets(y, torch.Size([n]), gram.dtype, gram.device)
    tol = (1e-6 if y.dtype == torch.float64 else 1e-3) if tol is None else tol
    solver = solver or Auto()
    if not isinstance(solver, Solver):
        raise InputError(f"solver={solver!r}; needed: a solver: Auto(), Cholesky(), Eigh() or CG() of tg.linalg.")
    solution = solver(gram, y.reshape(n, -1), reg, tol)
    solution = replace(solution, value=solution.value.reshape(y.shape))
    if not solution.residual <= tol:
        raise DidNotConverge(
            f"{solution.solver} reached the relative residual {solution.residual:.2e} in {solution.steps} step(s); "
            f"asked for: {tol:.1e}. Give a larger reg= (it was {reg:g}), y in float64, more steps, or a larger tol; "
            ".solution holds what was found.",
            solution,
        )
    return solution


@dataclass(frozen=True)
class Cholesky(Solver):
    """K + reg·I = L Lᵀ, then iterative refinement. Cost: n³/3 operations, n² numbers in memory, or in a file.

    `dtype`: of the factor, where it shall be narrower than that of K and y: refinement makes up for it. `refine`: the
    most steps of it; it ends when the residual is at rounding, or no longer halves. `scratch`: a folder for the factor
    where it does not fit in memory; it is made by panels of `panel` columns, of which two are in memory, and removed.
    """

    dtype: torch.dtype | None = None
    refine: int = 10
    scratch: FilePath | None = None
    panel: int = 2048

    def __call__(self, gram: Gram, y: Tensor, reg: float, tol: float) -> Solution:
        dtype = self.dtype or y.dtype
        x, steps, best = refined(gram, y, reg, self._inverse(gram, reg, y.to(dtype)), dtype, self.refine)
        name = "Cholesky" if self.scratch is None else "Cholesky on disk"
        if dtype != y.dtype:
            name += f" in {str(dtype).removeprefix('torch.')} with refinement"
        return Solution(x, name, steps, best)

    def _inverse(self, gram: Gram, reg: float, like: Tensor) -> Callable[[Tensor], Tensor]:
        """(L Lᵀ)⁻¹ as a function, with L in memory or on disk, in the type and on the device of `like`."""
        if self.scratch is not None:
            if not Path(self.scratch).is_dir() or self.panel < 1:
                raise InputError(f"scratch={str(self.scratch)!r}, panel={self.panel}; needed: a folder, at least 1.")
            return DiskFactor(gram, reg, like, self.scratch, self.panel, progress=True).solve
        lower = factor(gram, reg, like.dtype, like.device)
        return lambda r: substitute(lower, r)


class Refined(NamedTuple):
    """An answer, after how many steps, and its residual as measured."""

    value: Tensor
    steps: int
    residual: float


def refined(
    gram: Gram, y: Tensor, reg: float, inverse: Callable[[Tensor], Tensor], dtype: torch.dtype, most: int = 10
) -> Refined:
    """(K + reg·I)⁻¹ y by iterative refinement with about the inverse, in `dtype`; until the residual no longer halves.

    `most`: steps of refinement, at most.
    """
    x, r = torch.zeros_like(y), y
    steps, best = 0, _relative_residual(r, y)
    # x ← x + L⁻ᵀ L⁻¹ r, with r in the wider type: each step gains the digits that the factor has.
    while steps <= most:
        new = x + inverse(r.to(dtype)).to(y.dtype)
        r_new = y - gram @ new - reg * new
        now = _relative_residual(r_new, y)
        steps += 1
        # The first answer is taken even where it is worse than zero: the residual is then reported as it is.
        if now < best or steps == 1:
            x, r = new, r_new
        if now > best / 2 or now < 4 * torch.finfo(y.dtype).eps:
            best = min(now, best) if steps > 1 else now
            break
        best = now
    return Refined(x, steps, best)


@dataclass(frozen=True)
class Eigh(Solver):
    """Σ_i v_i v_iᵀ y / (λ_i + reg). With reg = 0 the pseudo-inverse: what lies below `cutoff`·λ_1 (n·ε) is left out.

    Its residual is then against the part of y that K can reach. Cost: about 9 n³ operations.
    """

    cutoff: float | None = None

    def __call__(self, gram: Gram, y: Tensor, reg: float, tol: float) -> Solution:
        whole = part = spectrum(gram, dtype=y.dtype, device=y.device)
        name = "eigh"
        if reg == 0:
            part = whole.kept(self.cutoff)
            name = f"eigh, rank {len(part)} of {len(whole)} (λ > {whole.cutoff(self.cutoff):.2g})"
            y = part.vectors @ (part.vectors.T @ y)  # what K can reach; the residual is against that
        elif float(whole.values[-1]) + reg <= 0:
            raise NotPositiveDefinite(
                f"K + {reg:g}·I is not positive definite: K has the eigenvalue {float(whole.values[-1]):.3g}. Give a "
                "larger reg, or compute the kernel in float64."
            )
        x = part.vectors @ ((part.vectors.T @ y) / (part.values + reg)[:, None])
        return Solution(x, name, 1, _relative_residual(y - gram @ x - reg * x, y))


class LowRankPairs(NamedTuple):
    """U [n, k] with orthonormal columns, and Λ [k], largest first."""

    vectors: Tensor
    values: Tensor


class LowRank(ABC):
    """A guess K ≈ U Λ Uᵀ of low rank, from which a preconditioner is made."""

    @abstractmethod
    def __call__(self, gram: Gram, dtype: torch.dtype, device: torch.device) -> LowRankPairs:
        """U and Λ, in this type and on this device."""


@dataclass(frozen=True)
class Nystrom(LowRank):
    """From products of K with a random block: `power` + 1 passes over an on-disk Gram.

    `rank`: default 4√n (heuristic). `power`: products before the last one, which sharpen the block: heavy tails blur
    one that has seen K only once. Frangella, Tropp & Udell 2023, "Randomized Nyström preconditioning".
    """

    rank: int | None = None
    power: int = 1
    seed: int = 0

    def __call__(self, gram: Gram, dtype: torch.dtype, device: torch.device) -> LowRankPairs:
        n = flat_rows(gram.shape)
        rank = min(n, self.rank or int(4 * n**0.5))
        # Drawn on the CPU: the same block on every device.
        omega = torch.randn(n, rank, generator=torch.Generator().manual_seed(self.seed), dtype=dtype).to(device)
        omega = torch.linalg.qr(omega).Q
        for _ in range(self.power):
            omega = torch.linalg.qr(gram @ omega).Q
        image = gram @ omega
        core = omega.T @ image
        values, q = eigh((core + core.T) / 2)
        sure = values > 10 * torch.finfo(gram.precision).eps * values[-1].clamp_min(0)  # the rest is rounding
        # K ≈ (K Ω)(Ωᵀ K Ω)⁻¹(K Ω)ᵀ = root·rootᵀ; its singular vectors are the eigenvectors.
        root = image @ (q[:, sure] / values[sure].sqrt())
        u, s, _ = svd(root)
        return LowRankPairs(u, s.square())


@dataclass(frozen=True)
class PartialCholesky(LowRank):
    """From `rank` columns of K, each the worst approximated so far: for Grams in memory (each costs a row of tiles)."""

    rank: int = 200

    def __call__(self, gram: Gram, dtype: torch.dtype, device: torch.device) -> LowRankPairs:
        # The diagonal of K − L Lᵀ, of which the largest entry is the next pivot; where it is rounding, K is exhausted.
        left = gram.diag().reshape(-1).to(device, dtype)
        c = gram.shape[1] if len(gram.shape) == 4 else 1
        rank, stop = min(self.rank, len(left)), len(left) * torch.finfo(dtype).eps * float(left.max())
        columns = left.new_zeros(len(left), rank)
        done = 0
        while done < rank and float(left.max()) > stop:
            pivot = int(left.argmax())
            row = gram[pivot // c]
            column = row.reshape(c, -1)[pivot % c].to(device, dtype)
            column = (column - columns[:, :done] @ columns[pivot, :done]) / left[pivot].sqrt()
            columns[:, done] = column
            left = left - column.square()
            left[pivot] = 0  # rounding leaves a little there, and a pivot must not come twice
            done += 1
        u, s, _ = svd(columns[:, :done])
        return LowRankPairs(u, s.square())


@dataclass(frozen=True)
class CG(Solver):
    """Preconditioned conjugate gradients: each step is one product with K, which may stream from disk.

    All columns of y go along in the same products. When the recursion says that it is done, the residual is measured;
    where rounding made it drift, the iteration goes on from the measured one.
    """

    preconditioner: LowRank | None = Nystrom()
    max_steps: int = 1000
    progress: bool = True

    def __call__(self, gram: Gram, y: Tensor, reg: float, tol: float) -> Solution:
        lead = self._preconditioner(gram, y, reg)
        length = y.norm(dim=0)
        length = torch.where(length > 0, length, torch.ones_like(length))
        y = y / length  # columns of one size, so that none of them underflows beside another
        x, steps, worst = torch.zeros_like(y), 0, float("inf")
        with bar(None, "conjugate gradients", "step", show=self.progress) as step:
            while True:
                r = y - gram @ x - reg * x if steps else y  # measured, not the recursion's
                now = float(r.norm(dim=0).max())
                # A restart that does not halve the residual has met the limit of rounding.
                if now <= tol or steps >= self.max_steps or now > worst / 2:
                    break
                worst = now
                for x_new, rel in conjugate(lambda p: gram @ p + reg * p, lead, x, r):
                    x, steps = x_new, steps + 1
                    step(note=f"residual {rel:.1e}")
                    if rel <= tol / 2 or steps >= self.max_steps:
                        break
                else:
                    raise NotPositiveDefinite(
                        f"K + {reg:g}·I is not positive definite: conjugate gradients met a direction along which it "
                        "is not positive. Give reg > 0 or a larger one, or use solver=tg.linalg.Eigh() if K fits in "
                        "memory."
                    )
        kind = "no preconditioner" if self.preconditioner is None else repr(self.preconditioner)
        return Solution(x * length, f"CG, {kind}", steps, now)

    def _preconditioner(self, gram: Gram, y: Tensor, reg: float) -> Callable[[Tensor], Tensor]:
        """About (K + reg·I)⁻¹, up to a factor, which conjugate gradients do not see."""
        if self.preconditioner is None:
            return lambda r: r
        u, values = self.preconditioner(gram, y.dtype, y.device)
        if not len(values):
            return lambda r: r
        # (K + reg)⁻¹ on the span of U, scaled so that it is the identity elsewhere, where K is at most λ_k.
        gain = ((values[-1] + reg) / (values + reg))[:, None] - 1
        return lambda r: r + u @ (gain * (u.T @ r))


def conjugate(
    apply: Callable[[Tensor], Tensor], lead: Callable[[Tensor], Tensor], x: Tensor, r: Tensor
) -> Iterator[tuple[Tensor, float]]:
    """Iterates of preconditioned conjugate gradients, from x with the residual r, for each column on its own.

    With each comes the largest residual that the recursion has. Ends where `apply` turns out not to be positive.
    """
    # Hestenes & Stiefel 1952, with columns side by side: p are the directions, rz = rᵀ M⁻¹ r.
    z = lead(r)
    p, rz = z, (r * z).sum(0)
    while True:
        q = apply(p)
        curvature = (p * q).sum(0)
        live = rz > 0  # a column that is solved exactly has nothing left to do
        if bool((live & (curvature <= 0)).any()):
            return
        alpha = torch.where(live, rz / curvature, torch.zeros_like(rz))
        x, r = x + alpha * p, r - alpha * q
        yield x, float(r.norm(dim=0).max())
        z = lead(r)
        new = (r * z).sum(0)
        p, rz = z + torch.where(live, new / rz, torch.zeros_like(rz)) * p, new


@dataclass(frozen=True)
class Auto(Solver):
    """`Cholesky()` where its factor fits into `memory`, else `CG()`; `choose` says which, and nothing is computed.

    `memory`: default half of this machine's, or what is free on the GPU.

    >>> Auto(memory="1MB").choose(torch.eye(1000))
    CG(preconditioner=Nystrom(rank=None, power=1, seed=0), max_steps=1000, progress=True)
    """

    memory: Memory = None

    def choose(self, K: Matrix, dtype: torch.dtype | None = None, device: Device = None) -> Solver:
        """The solver for K with targets of this type, worked on there (default: K's own type and device)."""
        if isinstance(K, np.ndarray):
            K = torch.from_numpy(K)
        where = torch.device(device) if device is not None else K.device or torch.device("cpu")
        need = K.shape.numel() * torch.empty(0, dtype=dtype or K.dtype).element_size()
        budget = checks.memory(self.memory)
        if budget is None:
            budget = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else memory_of.machine_memory() // 2
        return Cholesky() if need <= budget else CG()

    def __call__(self, gram: Gram, y: Tensor, reg: float, tol: float) -> Solution:
        return self.choose(gram, y.dtype, y.device)(gram, y, reg, tol)


def _relative_residual(r: Tensor, y: Tensor) -> float:
    """The largest ‖r_j‖ / ‖y_j‖; a column of zeros is solved by zeros."""
    length = y.norm(dim=0)
    return float(torch.where(length > 0, r.norm(dim=0) / length, r.norm(dim=0)).max())
