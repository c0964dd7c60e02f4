"""What a fit is, and the problem that it solves: targets, where they start from, weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._base import checks
from .._base.types import Float
from ..errors import InputError
from ..gram.gram import Gram
from ..linalg.eigen import Spectrum, spectrum
from ..linalg.matrix import Matrix, between, square, targets

Array = Tensor | np.ndarray
Decomposable = Matrix | Spectrum


@dataclass(frozen=True, eq=False)
class KernelModel:
    """f(z) = f₀(z) + Σ_i k(z, x_i) a_i, or f₀(z) + φ(z)·γ for a fit by features.

    `coefficients`: a [n], [n, q] for K⊗I, [n, c] for a full kernel; γ [p] or [p, q] by features. `fitted`: f on the
    training samples. `norm`: ‖f − f₀‖ in the kernel's Hilbert space, √(aᵀ K a) = ‖γ‖, over all outputs. `rank` and
    `cutoff` are there for a pseudo-inverse: how many eigenvalues (singular values, by features) were kept, those above
    which.
    """

    coefficients: Float[Tensor, "..."]
    fitted: Float[Tensor, "..."]
    norm: float
    reg: float
    method: str
    steps: int
    residual: float
    shifted: bool  # fitted to y − f₀
    full: bool  # the kernel couples the outputs
    rank: int | None = None
    cutoff: float | None = None

    def __repr__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return (
            f"KernelModel({tuple(self.coefficients.shape)} coefficients, reg {self.reg:g}, norm {self.norm:.4g}{rank}, "
            f"{self.method}, residual {self.residual:.1e})"
        )

    def predict(self, cross: Matrix, f0: Array | None = None) -> Tensor:
        """f on new samples, from their Gram with the training samples [m, n] ([m, d, n, c]), or their features [m, p].

        A model that was fitted with f0 needs f0 of the new samples.
        """
        out = apply(cross, self.coefficients, self.full)
        return out + start(f0, out, self.shifted)


def start(f0: Array | None, out: Tensor, shifted: bool) -> Tensor:
    """f₀ of new samples, checked."""
    if f0 is None:
        if shifted:
            raise InputError(
                "the model starts from f0, so predicting needs f0 of the new samples: predict(cross, f0=…)."
            )
        return out.new_zeros(())
    if not shifted:
        raise InputError("the model was fitted without f0, so it takes none for new samples. Give f0 when fitting.")
    return same_shape(f0, out, "f0 of the new samples")


def apply(cross: Matrix, coefficients: Tensor, full: bool) -> Tensor:
    """k(z, x) a for a [n] or [n, q], for a [n, c] where the kernel is full: [m], [m, q], [m, d]. Features, too."""
    cross = between(cross)
    features = full and coefficients.dim() == 1
    dims, inner = (3, cross.shape[2:]) if features else (4, cross.shape[2:]) if full else (2, cross.shape[1:])
    if len(cross.shape) != dims or inner != coefficients.shape[: len(inner)]:
        of_training = [*coefficients.shape] if full else [coefficients.shape[0]]
        raise InputError(
            f"cross has shape {tuple(cross.shape)}; needed: new samples by training samples (or features), "
            f"[{'m, d' if full else 'm'}, {', '.join(map(str, of_training))}]: tg.compute(kernel, x_new, x_train)."
        )
    if cross.device is not None:
        checks.beside(coefficients, cross.device, "the model", "cross")
    if features:
        return cross.dense().to(coefficients) @ coefficients
    return (cross @ coefficients.flatten()).reshape(cross.shape[:2]) if full else cross @ coefficients


@dataclass(frozen=True, eq=False)
class Problem:
    """Targets √w·(y − f₀) [n·c, q] for the matrix W^½ K W^½, and the way back to a model."""

    gram: Gram | None  # K itself; None where only its spectrum was given
    matrix: Gram | Spectrum  # W^½ K W^½ on the samples of positive weight
    target: Tensor
    f0: Tensor | None  # flat, [n·c, q]
    kept: Tensor | None  # rows of positive weight, where some are zero
    root: Tensor | None  # √w of these rows
    shape: torch.Size  # of y
    full: bool

    @property
    def rows(self) -> int:
        return self.shape.numel() if self.full else self.shape[0]

    @staticmethod
    def of(K: Decomposable, y: Array, f0: Array | None = None, weights: Any = None) -> "Problem":
        given = K if isinstance(K, Spectrum) else square(K)
        side = given.shape[: len(given.shape) // 2]
        y = targets(y, side, given.dtype, given.device)
        rows = side.numel()
        flat, begin = y.reshape(rows, -1), None
        if f0 is not None:
            begin = same_shape(f0, y, "f0").reshape(rows, -1)
            flat = flat - begin
        gram = None if isinstance(given, Spectrum) else given
        matrix, index, w = weigh(given, weights, flat)
        if w is None:
            return Problem(gram, matrix, flat, begin, None, None, y.shape, len(side) == 2)
        c = rows // side[0]
        kept = None if index is None else (index[:, None] * c + torch.arange(c, device=index.device)).flatten()
        root = w.sqrt().repeat_interleave(c)[:, None]
        target = (flat if kept is None else flat[kept]) * root
        return Problem(gram, matrix, target, begin, kept, root, y.shape, len(side) == 2)

    def spectrum(self) -> Spectrum:
        if isinstance(self.matrix, Spectrum):
            return self.matrix.to(self.target.dtype)
        return spectrum(self.matrix, dtype=self.target.dtype, device=self.target.device)

    def dual(self, b: Tensor) -> Tensor:
        """a [n·c, q] from the solution b for the weighted matrix."""
        if self.root is not None:
            b = b * self.root
        if self.kept is None:
            return b
        a = b.new_zeros(self.rows, b.shape[1])
        a[self.kept] = b
        return a

    def image(self, a: Tensor) -> Tensor:
        """K a."""
        if self.gram is not None:
            return self.gram @ a
        s = self.spectrum()
        return s.vectors @ (s.values[:, None] * (s.vectors.T @ a))

    def model(self, b: Tensor, **facts: Any) -> KernelModel:
        a = self.dual(b)
        ka = self.image(a)
        norm = float((a * ka).sum().clamp_min(0).sqrt())
        fitted = ka if self.f0 is None else ka + self.f0
        return KernelModel(
            a.reshape(self.shape),
            fitted.reshape(self.shape),
            norm,
            shifted=self.f0 is not None,
            full=self.full,
            **facts,
        )


def same_shape(f0: Array, y: Tensor, name: str) -> Tensor:
    """f₀ where y is, checked."""
    f0 = torch.as_tensor(f0).detach()
    if f0.shape != y.shape:
        raise InputError(f"{name} has shape {tuple(f0.shape)}; needed: {tuple(y.shape)}.")
    checks.finite(f0, name)
    return f0.to(y)


def weigh(given: Gram | Spectrum, weights: Any, like: Tensor) -> tuple[Gram | Spectrum, Tensor | None, Tensor | None]:
    """W^½ K W^½ on the samples of positive weight; their numbers, where some have none; and their weights, if given."""
    w = sample_weights(weights, given.shape[0], like)
    if w is None:
        return given, None, None
    if isinstance(given, Spectrum):
        raise InputError("weights= need the Gram itself; a spectrum is that of one weighting only.")
    if not bool((w == 0).any()):
        return given.weighted(w), None, w
    index = (w > 0).nonzero()[:, 0]
    return given.select(index, index).weighted(w[index]), index, w[index]


def sample_weights(weights: Any, n: int, like: Tensor) -> Tensor | None:
    """[n], at least 0 and not all 0; a number stands for n of them."""
    if weights is None:
        return None
    w = torch.as_tensor(weights, dtype=like.dtype, device=like.device).detach()
    if w.dim() == 0:
        w = w.expand(n)
    if w.shape != (n,):
        raise InputError(f"weights have shape {tuple(w.shape)}; needed: one number per sample, [{n}].")
    checks.finite(w, "weights")
    if bool((w < 0).any()) or not bool((w > 0).any()):
        raise InputError(f"weights from {float(w.min()):g} to {float(w.max()):g}; needed: at least 0, and not all 0.")
    return w
