"""Eigenfunctions of a kernel as functions to be learned: on the samples of a Gram, on new ones, as two classes.

Ortiz-Jiménez, Moosavi-Dezfooli and Frossard 2021, "What can linearized neural networks actually say about
generalization?", section 3.2 and appendices B, E.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result, text_table
from .._base.types import Float, Inputs, Int
from ..datasets import Labelled, TrainTest
from ..errors import InputError
from ..linalg.eigen import Spectrum, signed, spectrum, top
from ..linalg.matrix import Matrix, between

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cut = Literal["sign", "median"]
CLASSES = ("−1", "+1")
# Entries of an eigenvector that are this many √n·ε of the largest one apart are equal (heuristic).
ROUNDING = 30


@dataclass(frozen=True, eq=False, repr=False)
class Eigenfunctions(Result):
    """φ_j on the samples of a Gram: K v_j = λ_j v_j, largest λ first, index 0; ‖v_j‖ = 1.

    Only what lies above rounding is kept (`Spectrum.kept`): there are as many as the Gram's rank, at most.
    """

    values: Float[Tensor, " k"]  # λ_j of the Gram; λ_j / n approximates the operator's
    vectors: Float[Tensor, "n k"]
    residual: float  # of the eigenpairs, relative to λ_0

    def __len__(self) -> int:
        return len(self.values)

    def real(self, index: int) -> Float[Tensor, " n"]:
        """√n v_j: the eigenfunction with mean square 1 over the samples."""
        return self._vector(index) * len(self.vectors) ** 0.5

    def binary(self, index: int, *, cut: Cut = "sign") -> Int[Tensor, " n"]:
        """The class of each sample: 1 where φ_j is above 0 (or, with "median", above its median), else 0.

        "sign" is what is published, sign(φ_j). "median" makes the classes equally large. Above is more than rounding
        above, 30·√n·ε of the largest entry: which side rounding falls on is up to the processor.
        """
        checks.choice(cut, "cut", get_args(Cut))
        v = self._vector(index)
        rounding = ROUNDING * len(v) ** 0.5 * torch.finfo(v.dtype).eps * v.abs().max()
        halves = v > v.median() + rounding
        classes = (halves if cut == "median" else v > rounding).long()
        counts = torch.bincount(classes, minlength=2).tolist()
        if 0 in counts:
            # A kernel with positive entries has an eigenvector of one sign, its first (Perron).
            fix = "Begin with index 1" if index == 0 else "Leave it out"
            fix += ", or cut='median' for equal halves" if cut == "sign" and bool(halves.any()) else ""
            raise InputError(
                f"eigenfunction {index} is on one side of its {'sign' if cut == 'sign' else 'median'} on all {len(v)} "
                f"samples, so it makes one class; needed: two. {fix}."
            )
        return classes

    def overlap(self) -> Float[Tensor, " k"]:
        """⟨v_j, sign(v_j)⟩/√n: the cosine of each eigenvector with its signs; √(2/π) = 0.798 for a Gaussian one."""
        return self.vectors.abs().sum(0) / len(self.vectors) ** 0.5

    def extend(self, cross: Matrix) -> Float[Tensor, "m k"]:
        """φ_j(z) = k(z, X) v_j / λ_j: all functions at new points (Nyström), from `tg.compute(kernel, z, x)` [m, n].

        >>> K = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> functions = eigenfunctions(K)
        >>> torch.allclose(functions.extend(K), functions.vectors)  # at the points themselves
        True
        """
        gram = between(cross)
        n = len(self.vectors)
        if tuple(gram.shape[1:]) != (n,):
            raise InputError(
                f"cross has shape {tuple(gram.shape)}; needed: [m, {n}], new points with the {n} samples of the "
                "eigenfunctions: tg.compute(kernel, z, x)."
            )
        return (gram @ (self.vectors / self.values)).to(self.vectors.dtype)

    def tasks(self, x: Inputs, indices: Sequence[int], *, test: int, cut: Cut = "sign") -> list[tuple[int, TrainTest]]:
        """(j, (train, test)) for each index: the samples with the two classes of φ_j; the last `test` are held out.

        As published, the Gram is one of all samples, so that the classes of the test samples come from it, too.
        """
        x = tree.given(x)
        n = len(self.vectors)
        if tree.size(x) != n:
            raise InputError(f"x has {tree.size(x)} samples; needed: the {n} that the Gram was computed of.")
        if isinstance(test, bool) or not isinstance(test, int) or not 1 <= test < n:
            raise InputError(f"test={test!r}; needed: how many samples are held out, from 1 to {n - 1}.")
        found = []
        for j in indices:
            y = self.binary(j, cut=cut)
            parts = (slice(n - test), slice(n - test, n))
            found.append((j, TrainTest(*(Labelled(tree.take(x, p), y[p], CLASSES, name=f"φ_{j}") for p in parts))))
        return found

    def table(self) -> str:
        """A line for each of the first ten: eigenvalue, its part of the trace of those kept, overlap with the sign."""
        parts, overlap = (self.values / self.values.sum()).tolist(), self.overlap().tolist()
        rows = [[j, float(self.values[j]), parts[j], overlap[j]] for j in range(min(10, len(self)))]
        return text_table(["index", "λ", "part", "⟨φ, sign φ⟩"], rows)

    def plot(self) -> "Figure":
        """Eigenvalues, and the overlap of each function with its binarised version."""
        from .pictures import draw_eigenfunctions

        return draw_eigenfunctions(self.values, self.overlap())

    def _vector(self, index: int) -> Tensor:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self):
            raise InputError(
                f"index={index!r}; needed: 0 to {len(self) - 1}. There are {len(self)} eigenfunctions of "
                f"{len(self.vectors)} samples: those asked for, with eigenvalues above rounding."
            )
        return self.vectors[:, index]


def eigenfunctions(
    K: Matrix | Spectrum, count: int | None = None, *, tol: float | None = None, progress: bool = True
) -> Eigenfunctions:
    """φ_j with K φ_j = λ_j φ_j: eigenvectors of a Gram, which approximate the eigenfunctions of its kernel.

    `K`: a Gram [n, n] (`tg.compute(tg.trace_ntk(model), x)`), or its `Spectrum`. `count`: how many (default: all that
    lie above rounding). `tol`: ‖K v − λ v‖ / λ_0 up to which a few are sought (`tg.linalg.top`); neighbours closer than
    that are mixed. Signs are fixed: the first of the largest entries is positive. Cost: of all, about 9 n³ operations;
    of some, n²·count for each of a few passes over K, which may lie on disk.

    >>> import tangency as tg
    >>> x = torch.randn(50, 3)
    >>> functions = tg.studies.eigenfunctions(tg.trace_ntk(tg.models.mlp([3, 32, 1]))(x), 5)
    >>> functions.binary(1).bincount().sum(), len(functions)
    (tensor(50), 5)
    """
    if isinstance(K, Spectrum):
        pairs = K
        _check_count(count, len(K), "pairs in the spectrum")
    else:
        n = K.shape[0] if hasattr(K, "shape") and len(K.shape) else 0
        _check_count(count, n, "samples in the Gram")
        # Fewer than an eighth: a Krylov iteration is cheaper than all pairs (heuristic).
        pairs = top(K, count, tol=tol, progress=progress) if count is not None and 8 * count <= n else spectrum(K)
    if len(pairs.shape) != 2:
        raise InputError(
            f"the Gram has shape {tuple(pairs.shape)}, of several outputs; needed: [n, n], one function's. Use "
            "tg.trace_ntk, or tg.head_ntk(model, 0) for one output."
        )
    kept = pairs.kept()
    values, vectors = kept.values[:count], kept.vectors[:, :count]
    return Eigenfunctions(values, signed(vectors), pairs.residual)


def _check_count(count: int | None, most: int, what: str) -> None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most):
        raise InputError(f"count={count!r}; needed: from 1 to {most}, the number of {what}, or None for all.")
