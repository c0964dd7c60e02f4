"""Eigenpairs of a Gram matrix: all of them in memory, or the largest by products with it, which may stream from disk.

What a `Spectrum` says is measured: its residual is max_i ‖K v_i − λ_i v_i‖ / max_i |λ_i|.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .._base import checks
from .._base import memory as memory_of
from .._base.progress import bar
from .._base.results import Result
from .._base.types import Device, Float
from ..errors import DidNotConverge, InputError, MemoryBudgetError, NotPositiveDefinite
from .decompose import eigh
from .matrix import Matrix, flat_rows, flattened, square

# By how much aᵀ K b and bᵀ K a may differ, of the largest such number (heuristic: far above the rounding of float32,
# TensorFloat-32 too).
ASYMMETRY = 1e-2


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum(Result):
    """K ≈ Σ_i λ_i v_i v_iᵀ, largest λ first; `complete` if these are all. Goes wherever a Gram is decomposed."""

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "n k"]  # n·c rows for a full kernel
    shape: torch.Size  # of the Gram
    solver: str
    steps: int  # products with a block of vectors; 1 for eigh
    residual: float  # max_i ‖K v_i − λ_i v_i‖ / max_i |λ_i|, measured
    eps: float  # rounding of the type that K came in, below which its eigenvalues say nothing

    @property
    def dtype(self) -> torch.dtype:
        """Of the eigenpairs; K's own may be narrower (`eps`)."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the eigenpairs lie."""
        return self.values.device

    @property
    def complete(self) -> bool:
        """Whether these are all eigenpairs of K."""
        return self.vectors.shape[0] == len(self.values)

    def cutoff(self, relative: float | None = None) -> float:
        """The eigenvalue up to which numbers are rounding: `relative`·λ_1, by default n·ε·λ_1, ε of K's own type."""
        if relative is None:
            relative = self.vectors.shape[0] * self.eps
        return checks.fraction(relative, "cutoff") * float(self.values[0].clamp_min(0))

    def kept(self, relative: float | None = None) -> "Spectrum":
        """Only what lies above the cutoff; refuses a matrix with eigenvalues as far below zero (indefinite)."""
        limit = self.cutoff(relative)
        # What computing K leaves below zero is rounding, too; and a Gram in float64 may have been computed in float32.
        slack = max(limit, (1e-6 if self.eps < 1e-10 else 1e-3) * float(self.values[0]))
        if float(self.values[-1]) < -slack:
            raise NotPositiveDefinite(
                f"K is indefinite: its smallest eigenvalue is {float(self.values[-1]):.3g}, its largest "
                f"{float(self.values[0]):.3g}, so it is no Gram matrix of a kernel. Check how it was made; in float32, "
                "compute the kernel with dtype='float64'."
            )
        count = int((self.values > limit).sum())
        if not count:
            raise NotPositiveDefinite("K has no positive eigenvalue. Check the inputs, and which parameters count.")
        return replace(self, values=self.values[:count], vectors=self.vectors[:, :count])

    def to(self, dtype: torch.dtype) -> "Spectrum":
        """The same eigenpairs in another type."""
        return replace(self, values=self.values.to(dtype), vectors=self.vectors.to(dtype))

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return (
            f"Spectrum({len(self)} of {self.vectors.shape[0]} eigenpairs, λ from {float(self.values[0]):.4g} to "
            f"{float(self.values[-1]):.4g}, {self.solver}, residual {self.residual:.1e})"
        )


def spectrum(K: Matrix, *, dtype: torch.dtype | None = None, device: Device = None) -> Spectrum:
    """All eigenpairs K = Σ_i λ_i v_i v_iᵀ, by torch.linalg.eigh, on K's device (or `device`, for one on disk).

    `dtype`: float64 for more digits than K's own type carries. Cost: about 9 n³ operations, 4 n² numbers.

    >>> import tangency as tg
    >>> K = torch.diag(torch.tensor([1.0, 4.0, 9.0]))
    >>> tg.linalg.spectrum(K).values
    tensor([9., 4., 1.])
    """
    gram = square(K)
    where = torch.device(device) if device is not None else gram.device or torch.device("cpu")
    kind = dtype or gram.dtype
    # K itself, its eigenvectors and LAPACK's workspace, of about two more matrices.
    need = 4 * gram.shape.numel() * torch.empty(0, dtype=kind).element_size()
    if where.type == "cpu" and need > memory_of.machine_memory():
        n = flat_rows(gram.shape)
        raise MemoryBudgetError(
            f"all eigenpairs of a {n} x {n} matrix take about {need / 1e9:.3g} GB, more than this machine has "
            f"({memory_of.machine_memory() / 1e9:.3g}). Ask for the largest: tg.linalg.top(K, count)."
        )
    k = flattened(gram, kind, where)
    # A product x xᵀ in float32 is symmetric up to its rounding only, on some processors: far from so in float64.
    k = (k + k.mT).div_(2)
    values, vectors = eigh(k)
    values, vectors = values.flip(0), vectors.flip(1)  # eigh has the smallest first
    scale = values.abs().max().clamp_min(torch.finfo(kind).tiny)
    worst = 0.0
    for start in range(0, len(k), 1024):  # by columns, so that no fourth matrix of K's size is needed
        part = slice(start, start + 1024)
        off = k @ vectors[:, part] - vectors[:, part] * values[part]
        worst = max(worst, float(off.norm(dim=0).max() / scale))
    pairs = Spectrum(values, vectors, gram.shape, "eigh", 1, worst, torch.finfo(gram.precision).eps)
    if not worst <= (tol := 1e3 * torch.finfo(kind).eps * len(k) ** 0.5):
        raise _short_of(pairs, tol)
    return pairs


def top(
    K: Matrix,
    count: int,
    *,
    tol: float | None = None,
    block: int | None = None,
    max_steps: int = 200,
    dtype: torch.dtype | None = None,
    device: Device = None,
    seed: int = 0,
    progress: bool = True,
) -> Spectrum:
    """The largest `count` eigenpairs, by block Krylov iteration with restarts: a step is a product of K with a block.

    A step reads an on-disk Gram once. Stops when ‖K v − λ v‖ ≤ `tol`·λ_1 for each pair (default: 1e-8 in float64, 1e-5
    in float32). `block`: columns of a product (default: `count`, between 16 and 512). Musco & Musco 2015, "Randomized
    block Krylov methods…"; restarts as in Davidson's method. Cost: n²·block a step, and n·(5·count + 10·block) numbers.

    >>> import tangency as tg
    >>> K = torch.diag(torch.arange(1.0, 101.0))
    >>> [round(float(v)) for v in tg.linalg.top(K, 3).values]
    [100, 99, 98]
    """
    gram = square(K)
    where = torch.device(device) if device is not None else gram.device or torch.device("cpu")  # on disk: no device
    asked = _Search(count, tol, block, max_steps, dtype or gram.dtype, where, seed, progress)
    return asked.run(lambda block: gram @ block, gram.shape, torch.finfo(gram.precision).eps)


def top_of(
    product: Callable[[Tensor], Tensor],
    size: int,
    count: int,
    *,
    tol: float | None = None,
    block: int | None = None,
    max_steps: int = 200,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
    seed: int = 0,
    progress: bool = True,
) -> Spectrum:
    """The largest `count` eigenpairs of a symmetric matrix [size, size] that is known by products K @ [size, b] alone.

    Options, method and cost as for `top`. With K = MᵀM these are the right singular vectors of M, with the squares of
    its singular values.

    >>> import tangency as tg
    >>> M = torch.randn(40, 6).double()
    >>> pairs = tg.linalg.top_of(lambda v: M.T @ (M @ v), 6, 2)
    >>> torch.allclose(pairs.values.sqrt(), torch.linalg.svdvals(M)[:2])
    True
    """
    if not callable(product):
        raise InputError(
            f"product is a {type(product).__name__}; needed: a function of v [size, b] that returns K @ v. Of a matrix "
            "in memory: tg.linalg.top(K, count)."
        )
    checks.positive(size, "size", "the number of rows of the matrix")
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype={dtype!r}; needed: torch.float32 or torch.float64.")
    asked = _Search(count, tol, block, max_steps, dtype, torch.device(device or "cpu"), seed, progress)
    return asked.run(_Checked(product), torch.Size((size, size)), torch.finfo(dtype).eps)


def signed(vectors: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """The same eigenvectors, each with the first of its largest entries positive.

    Which sign `eigh` gives is up to the processor. Entries within √ε of the largest count as equal to it: of a tie, as
    in (1, −1)/√2, rounding would else choose the entry.

    >>> signed(torch.tensor([[-0.5, 0.1], [0.5, -0.9]]))
    tensor([[ 0.5000, -0.1000],
            [-0.5000,  0.9000]])
    """
    size = vectors.abs()
    largest = size >= size.amax(0) * (1 - torch.finfo(vectors.dtype).eps ** 0.5)
    return vectors * vectors.gather(0, largest.int().argmax(0, keepdim=True)).sign()


class _Checked:
    """A user's product: numbers of the shape that they were asked in, and those of a symmetric matrix."""

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        self.product, self.first = product, True

    def __call__(self, v: Tensor) -> Tensor:
        """K v."""
        image = self.product(v)
        if not isinstance(image, Tensor) or image.shape != v.shape or image.is_complex():
            given = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise InputError(f"product(v) of v {tuple(v.shape)} is {given}; needed: real numbers K @ v of v's shape.")
        if not bool(image.isfinite().all()):
            raise InputError("product(v) has NaN or infinite numbers in it; needed: finite ones. Check the matrix.")
        image = image.detach().to(v)
        if self.first:
            self.first = False
            between = v.T @ image
            off, largest = float((between - between.T).abs().max()), float(between.abs().max())
            if off > ASYMMETRY * largest:
                raise InputError(
                    f"the matrix is not symmetric: aᵀ K b and bᵀ K a differ by {off / largest:.2g} of the largest such "
                    "number. Of a matrix M with other rows than columns take K = MᵀM: lambda v: M.T @ (M @ v)."
                )
        return image


@dataclass(frozen=True)
class _Search:
    """What was asked of `top` and `top_of`."""

    count: int
    tol: float | None
    block: int | None
    max_steps: int
    kind: torch.dtype
    where: torch.device
    seed: int
    progress: bool

    def run(self, product: Callable[[Tensor], Tensor], shape: torch.Size, eps: float) -> Spectrum:
        """The eigenpairs of the matrix with these products, of a Gram of this shape and precision."""
        n, count, kind, where, max_steps = flat_rows(shape), self.count, self.kind, self.where, self.max_steps
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= n:
            raise InputError(f"count={count!r}; needed: a number of eigenpairs from 1 to {n}, the size of the matrix.")
        tol = (1e-8 if kind == torch.float64 else 1e-5) if self.tol is None else self.tol
        if not tol > 0:
            raise InputError(f"tol={tol}; needed: a residual above 0, as a part of the largest eigenvalue.")
        if max_steps < 1 or (self.block is not None and self.block < 1):
            raise InputError(f"max_steps={max_steps}, block={self.block}; needed: at least 1.")
        b = min(n, self.block or min(max(count, 16), 512))
        generator = torch.Generator().manual_seed(self.seed)
        # At least `count` columns to begin with: fewer would see but as many copies of an eigenvalue.
        fresh = torch.randn(n, max(b, count), generator=generator, dtype=kind).to(where)
        basis, image = fresh[:, :0], fresh[:, :0]  # Q and K Q
        with bar(None, f"top {count} eigenpairs", "pass", show=self.progress) as step:
            for steps in range(1, max_steps + 1):
                fresh = _orthonormal(fresh, basis)
                basis, image = torch.cat([basis, fresh], 1), torch.cat([image, product(fresh).to(kind)], 1)
                ritz = _ritz(basis, image, count + b)
                worst = float(ritz.residuals[:count].max())
                step(note=f"residual {worst:.1e}")
                done = basis.shape[1] >= count and bool((ritz.residuals[:count] <= tol).all())
                if done or basis.shape[1] == n or steps == max_steps:
                    break
                # Restart from the best vectors, so that memory stays bounded.
                if basis.shape[1] + b > 2 * count + 4 * b:
                    basis, image = ritz.vectors, ritz.images
                room = min(b, n - basis.shape[1])
                # Residuals of pairs that are not there yet are the directions that the basis lacks.
                fresh = ritz.off[:, (ritz.residuals > tol).nonzero()[:room, 0]]
                if not fresh.shape[1]:  # an invariant space, smaller than asked for: the rest of K is elsewhere
                    fresh = torch.randn(n, room, generator=generator, dtype=kind).to(where)
        values, vectors = ritz.values[:count], ritz.vectors[:, :count]
        pairs = Spectrum(values, vectors, shape, f"block Krylov, {b} columns", steps, worst, eps)
        # A basis of the whole space has nothing to add: what is left is rounding, whatever was asked for.
        if not worst <= (tol := max(tol, n * torch.finfo(kind).eps) if basis.shape[1] == n else tol):
            raise _short_of(pairs, tol)
        return pairs


class _Ritz(NamedTuple):
    """Eigenpairs of K on a subspace, largest first: the best that it has to offer."""

    values: Tensor  # [all of the subspace]
    vectors: Tensor  # [n, k]
    images: Tensor  # K times the vectors
    off: Tensor  # K v − λ v
    residuals: Tensor  # ‖K v − λ v‖ / max |λ|


def _ritz(basis: Tensor, image: Tensor, most: int) -> _Ritz:
    """From Q and K Q; of vectors the `most` largest at most."""
    # Qᵀ K Q is symmetric but for rounding, which eigh would take from one triangle alone.
    h = (basis.T @ image).double()
    # In float64: it is small, and CUDA's float32 solver of matrices up to 512 (Jacobi) stops at residuals of 1e-5.
    values, s = (v.to(basis.dtype) for v in torch.linalg.eigh((h + h.T) / 2))
    values, s = values.flip(0), s.flip(1)[:, :most]
    vectors, images = basis @ s, image @ s
    off = images - vectors * values[: s.shape[1]]
    scale = values.abs().max().clamp_min(torch.finfo(values.dtype).tiny)
    return _Ritz(values, vectors, images, off, off.norm(dim=0) / scale)


def _orthonormal(block: Tensor, basis: Tensor) -> Tensor:
    """An orthonormal basis of what the block adds; projecting twice is enough (Giraud et al. 2005)."""
    for _ in range(2):
        block = block - basis @ (basis.T @ block)
        block = torch.linalg.qr(block).Q
    return block


def _short_of(pairs: Spectrum, tol: float) -> DidNotConverge:
    """That the residual is above `tol` (or is no number)."""
    return DidNotConverge(
        f"{pairs.solver} reached the residual {pairs.residual:.2e} in {pairs.steps} step(s); asked for: {tol:.1e}. "
        "Allow more max_steps, a larger block or a larger tol, or use float64; .solution holds what was found.",
        pairs,
    )
