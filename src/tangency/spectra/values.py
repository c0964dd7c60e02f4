"""Eigenvalues as the room takes them: numbers, a Gram, or whatever has eigenvalues; float64, the largest first."""

from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .._base import checks, tree
from .._base import memory as memory_of
from .._base.types import Device, Float, Numbers
from ..errors import InputError, MemoryBudgetError, NotPositiveDefinite
from ..gram.gram import Gram
from ..linalg.eigen import Spectrum
from ..linalg.matrix import Matrix, flat_rows, flattened, square


@runtime_checkable
class HasEigenvalues(Protocol):
    """A result that stands for a spectrum: `WeightSpectrum`, `Density`."""

    def eigenvalues(self) -> Float[Tensor, " n"]:
        """All of them, largest first."""


# Eigenvalues below so many ε of the largest, ε of the type that they came in, are rounding (heuristic: LAPACK's are
# right to a few, and a Gram's entries too).
ROUNDING = 10
FINEST = torch.finfo(torch.float64).eps
# A list, array or tensor [n] of eigenvalues; a Gram or symmetric matrix, which is decomposed; a result that has some.
Values: TypeAlias = Numbers | Matrix | Spectrum | HasEigenvalues


def eigenvalues(K: Matrix, *, dtype: torch.dtype | None = None, device: Device = None) -> Float[Tensor, " n"]:
    """λ_1 ≥ … ≥ λ_n of a Gram, without eigenvectors, in its own type (or `dtype`); n·c of a full kernel.

    Cost: about 4/3 n³ operations and two matrices, a third or less of `tg.linalg.spectrum`; `density` is for Grams
    that are too large for this.

    >>> import tangency as tg
    >>> tg.spectra.eigenvalues(torch.diag(torch.tensor([1.0, 4.0, 9.0])))
    tensor([9., 4., 1.])
    """
    gram = square(K)
    where = placed(device, gram.device)
    kind = dtype or gram.dtype
    need = 2 * gram.shape.numel() * torch.empty(0, dtype=kind).element_size()
    if where.type == "cpu" and need > memory_of.machine_memory():
        n = flat_rows(gram.shape)
        raise MemoryBudgetError(
            f"all eigenvalues of a {n} x {n} matrix take about {need / 1e9:.3g} GB, more than this machine has "
            f"({memory_of.machine_memory() / 1e9:.3g}). Estimate their density: tg.spectra.density(K)."
        )
    return torch.linalg.eigvalsh(flattened(gram, kind, where)).flip(0)


def placed(device: Device, own: torch.device | None) -> torch.device:
    """Where to work: what was asked for, if there is such a device; else where the matrix lies, or the CPU."""
    if device is None:
        return own or torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:
        raise InputError(f"device={device!r} cannot be used here ({str(e).splitlines()[0]}). Leave it out.") from e


def given(values: Values, name: str = "values", least: int = 1) -> Float[Tensor, " n"]:
    """Eigenvalues as a user gave them: float64 in the machine's memory, largest first; at least `least` of them."""
    kind = getattr(values, "precision", getattr(values, "dtype", None))
    eps = torch.finfo(kind).eps if isinstance(kind, torch.dtype) and kind.is_floating_point else FINEST
    if isinstance(values, Spectrum):
        eps = values.eps
        if not values.complete:
            raise InputError(
                f"{name} holds {len(values)} of {values.vectors.shape[0]} eigenvalues; needed: all of them. Use "
                "tg.linalg.spectrum(K), or tg.spectra.density(K) for a large K."
            )
        found = values.values
    elif isinstance(values, HasEigenvalues):
        found = values.eigenvalues()
    elif isinstance(values, Gram) or (isinstance(values, (Tensor, np.ndarray)) and values.ndim in (2, 4)):
        found = eigenvalues(values)
    else:
        found = tree.numbers(values, name)
        if found.dim() != 1 or found.is_complex():
            raise InputError(
                f"{name} has shape {tuple(found.shape)} and type {found.dtype}; needed: real eigenvalues [n], or a "
                "symmetric matrix [n, n]."
            )
        checks.finite(found, name)
    if not len(found) or len(found) < least:
        raise InputError(f"{name} has {len(found)} eigenvalues; needed: at least {least}. Take more samples or rows.")
    found = found.detach().cpu().double().sort(descending=True).values
    return snapped(found, eps)


def snapped(values: Float[Tensor, " n"], eps: float) -> Float[Tensor, " n"]:
    """Values with zeros for those that are rounding of the largest: of a singular matrix they would be noise."""
    return torch.where(values.abs() <= ROUNDING * eps * values.abs().max(), torch.zeros_like(values), values)


def nonnegative(values: Values, name: str = "values", least: int = 1) -> Float[Tensor, " n"]:
    """As `given`, of a matrix without negative eigenvalues: those that are rounding become 0, others are refused."""
    found = given(values, name, least)
    # As in `Spectrum.kept`: a Gram in float64 may have been computed in float32.
    if float(found[-1]) < -1e-3 * max(float(found[0]), 0.0):
        raise NotPositiveDefinite(
            f"{name} go down to {float(found[-1]):.3g}, with {float(found[0]):.3g} the largest; needed: eigenvalues of "
            "a Gram matrix, which are not negative. Check how they were made."
        )
    return found.clamp_min(0)


def unit(values: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], float]:
    """Values divided by the largest magnitude, and that: so that no square, product or sum leaves the range."""
    scale = float(values.abs().max())
    return (values / scale, scale) if scale > 0 else (values, 1.0)
