"""What a fit is, and the problem that it solves: targets, where they start from, weights."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result
from .._base.types import Float, Numbers
from ..errors import InputError
from ..gram.gram import Gram
from ..linalg.eigen import Spectrum, spectrum
from ..linalg.matrix import Matrix, between, square, targets
from .samples import SampleWeights, checked_weights

Decomposable = Matrix | Spectrum


@dataclass(frozen=True, eq=False, repr=False)
class KernelModel(Result):
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
    solver: str
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
            f"{self.solver}, residual {self.residual:.1e})"
        )

    def predict(self, cross: Matrix, f0: Numbers | None = None) -> Tensor:
        """f on new samples, from their Gram with the training samples [m, n] ([m, d, n, c]), or their features [m, p].

        A model that was fitted with f0 needs f0 of the new samples.
        """
        out = apply(cross, self.coefficients, self.full)
        return out + new_f0(f0, out, self.shifted)


def new_f0(f0: Numbers | None, out: Tensor, shifted: bool) -> Tensor:
    """f₀ of new samples, for outputs of the shape of `out`; refused where the model has none, needed where it has."""
    if f0 is None:
        if shifted:
            raise InputError(
                "the model starts from f0, so predicting needs f0 of the new samples: predict(cross, f0=…)."
            )
        return out.new_zeros(())
    if not shifted:
        raise InputError("the model was fitted without f0, so it takes none for new samples. Give f0 when fitting.")
    return checked_f0(f0, out, "f0 of the new samples")


def apply(cross: Matrix, coefficients: Tensor, full: bool) -> Tensor:
    """k(z, x) a for a [n] or [n, q], for a [n, c] where the kernel is full: [m], [m, q], [m, d]. Features, too."""
    cross = between(cross)
    # A fit by features of a full kernel has one γ [p] for all outputs; a dual one has a [n, c].
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
    # K⊗I acts on columns as it is, and may stream from disk; a full kernel acts on samples and outputs as one axis.
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
    y: Tensor  # as given, in the type of the work
    full: bool

    @property
    def shape(self) -> torch.Size:
        """Of y."""
        return self.y.shape

    @property
    def rows(self) -> int:
        """n, or n·c for a full kernel."""
        return self.shape.numel() if self.full else self.shape[0]

    @staticmethod
    def of(K: Decomposable, y: Numbers, f0: Numbers | None = None, sample_weights: SampleWeights = None) -> "Problem":
        """The problem of these targets, after all that can be checked without computing."""
        source = K if isinstance(K, Spectrum) else square(K)
        side = source.shape[: len(source.shape) // 2]
        y = targets(y, side, source.dtype, source.device)
        rows = side.numel()
        flat, begin = y.reshape(rows, -1), None
        if f0 is not None:
            begin = checked_f0(f0, y, "f0").reshape(rows, -1)
            flat = flat - begin
        gram = None if isinstance(source, Spectrum) else source
        weighted = weigh(source, sample_weights, flat)
        matrix, index = weighted.matrix, weighted.chosen
        if weighted.weights is None:
            return Problem(gram, matrix, flat, begin, None, None, y, len(side) == 2)
        # A sample has c rows of a full kernel, which share its weight.
        c = rows // side[0]
        kept = None if index is None else (index[:, None] * c + torch.arange(c, device=index.device)).flatten()
        root = weighted.weights.sqrt().repeat_interleave(c)[:, None]
        target = (flat if kept is None else flat[kept]) * root
        return Problem(gram, matrix, target, begin, kept, root, y, len(side) == 2)

    def spectrum(self) -> Spectrum:
        """Of `matrix`, in the type of the targets."""
        if isinstance(self.matrix, Spectrum):
            return self.matrix.to(self.target.dtype)
        return spectrum(self.matrix, dtype=self.target.dtype, device=self.target.device)

    def dual(self, b: Tensor) -> Tensor:
        """a [n·c, q] from the solution b for the weighted matrix."""
        # W^½ K W^½ b = W^½ t has K (W^½ b) = t: the coefficients are a = W^½ b, zero where the weight is.
        if self.root is not None:
            b = b * self.root
        if self.kept is None:
            return b
        a = b.new_zeros(self.rows, b.shape[1])
        a[self.kept] = b
        return a

    def image(self, a: Tensor) -> Tensor:
        """K a [n·c, q], by the Gram itself or, where only eigenpairs were given, by those."""
        if self.gram is not None:
            return self.gram @ a
        s = self.spectrum()
        return s.vectors @ (s.values[:, None] * (s.vectors.T @ a))

    def model(
        self,
        b: Tensor,
        *,
        reg: float,
        solver: str,
        steps: int,
        residual: float,
        rank: int | None = None,
        cutoff: float | None = None,
    ) -> KernelModel:
        """The fit with the solution b [rows, q] for the weighted matrix, and how it was found."""
        a = self.dual(b)
        ka = self.image(a)
        norm = float((a * ka).sum().clamp_min(0).sqrt())
        fitted = ka if self.f0 is None else ka + self.f0
        return KernelModel(
            a.reshape(self.shape),
            fitted.reshape(self.shape),
            norm,
            reg,
            solver,
            steps,
            residual,
            shifted=self.f0 is not None,
            full=self.full,
            rank=rank,
            cutoff=cutoff,
        )


def checked_f0(f0: Numbers, y: Tensor, name: str) -> Tensor:
    """f₀ in the type and on the device of y, after a look at its shape and entries."""
    f0 = tree.numbers(f0, name)
    if f0.shape != y.shape:
        raise InputError(f"{name} has shape {tuple(f0.shape)}; needed: {tuple(y.shape)}.")
    checks.finite(f0, name)
    return f0.to(y)


class Weighted(NamedTuple):
    """W^½ K W^½ on the samples of positive weight; their numbers, where some have none; their weights, if given."""

    matrix: Gram | Spectrum
    chosen: Tensor | None
    weights: Tensor | None


def weigh(source: Gram | Spectrum, sample_weights: SampleWeights, like: Tensor) -> Weighted:
    """K with its samples weighted, in the type and on the device of `like`."""
    w = checked_weights(sample_weights, source.shape[0], like)
    if w is None:
        return Weighted(source, None, None)
    if isinstance(source, Spectrum):
        raise InputError("sample_weights= need the Gram itself; a spectrum is that of one weighting only.")
    if not bool((w == 0).any()):
        return Weighted(source.weighted(w), None, w)
    # A sample of weight zero would make W^½ K W^½ singular; it is left out, and has a = 0.
    index = (w > 0).nonzero()[:, 0]
    return Weighted(source.select(index, index).weighted(w[index]), index, w[index])
