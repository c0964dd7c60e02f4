"""Scores of how strange a sample is beside known ones: functions of a Gram, functions of features."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._base.types import Float, Int
from ..errors import InputError
from ..linalg import top_of
from ..projection import nearest
from .density import density

# Variance of a component beside the first one's that is rounding (heuristic).
ROUNDING = 1e-13

Score = Callable[[Float[Tensor, "m p"]], Float[Tensor, " m"]]


# ---- by a Gram ------------------------------------------------------------------------------------------------------


def gram_scores(
    kind: str, inside: Float[Tensor, "n n"], cross: Float[Tensor, "m n"], own: Float[Tensor, " m"], reg: float | None
) -> tuple[Tensor, float | None]:
    """Scores of m samples from their Gram with the n known ones, k(z, z) and the known ones' own; the reg taken."""
    if kind == "density":
        return -cross.mean(1), None
    if kind == "one class":
        reg = float(inside.diagonal().mean()) if reg is None else reg
        aim = torch.cholesky_solve(inside.new_ones(len(inside), 1), _factor(inside, reg))
        return (1 - (cross @ aim)[:, 0]).abs(), reg
    rows, total = inside.mean(0), inside.mean()
    mean = cross.mean(1)
    own = own - 2 * mean + total
    cross = cross - mean[:, None] - rows + total
    inside = inside - rows - rows[:, None] + total
    reg = float(inside.diagonal().mean()) if reg is None else reg
    explained = (cross * torch.cholesky_solve(cross.T, _factor(inside, reg)).T).sum(1)
    return (own - explained) * len(inside) / reg, reg


def _factor(k: Tensor, reg: float) -> Tensor:
    if not reg > 0:
        raise InputError(f"reg={reg:g}; needed: a number above 0 (known samples that are all equal have none).")
    k = k.clone()
    k.diagonal().add_(reg)
    factor, info = torch.linalg.cholesky_ex(k)
    if int(info):
        raise InputError(f"with reg={reg:g} the known samples' kernel is singular up to rounding; give a larger reg=.")
    return factor


# ---- by features ----------------------------------------------------------------------------------------------------


def mahalanobis(known: Float[Tensor, "n p"], classes: Int[Tensor, " n"], shrink: float | None) -> tuple[Score, float]:
    """min_c (z − μ_c)ᵀ Σ⁻¹ (z − μ_c), Σ the covariance within classes, shrunk; and by how much."""
    count = int(classes.max()) + 1
    sums = known.new_zeros(count, known.shape[1]).index_add_(0, classes, known)
    means = sums / classes.bincount(minlength=count)[:, None]
    covariance, amount = shrunk(known - means[classes], shrink)
    factor, info = torch.linalg.cholesky_ex(covariance)
    if int(info):
        raise InputError(
            f"the covariance of the known samples is singular with shrinkage {amount:.2g}; give more samples, or a "
            "larger shrink= (features that are all constant have none)."
        )
    centres = torch.linalg.solve_triangular(factor, means.T, upper=False).T

    def score(z: Tensor) -> Tensor:
        """The squared distance to the nearest mean."""
        white = torch.linalg.solve_triangular(factor, z.T, upper=False).T
        return torch.cdist(white, centres, compute_mode="donot_use_mm_for_euclid_dist").square().amin(1)

    return score, amount


def relative_mahalanobis(known: Tensor, classes: Int[Tensor, " n"], shrink: float | None) -> tuple[Score, float]:
    """That of the classes less that of all samples together, which takes out what is strange in no class's way."""
    near, amount = mahalanobis(known, classes, shrink)
    whole, _ = mahalanobis(known, torch.zeros_like(classes), shrink)
    return (lambda z: near(z) - whole(z)), amount


def shrunk(residuals: Float[Tensor, "n p"], shrink: float | None) -> tuple[Float[Tensor, "p p"], float]:
    """(1 − s) S + s·tr(S)/p, S = RᵀR/n; s by Ledoit & Wolf 2004 unless it is given."""
    n, p = residuals.shape
    covariance = residuals.T @ residuals / n
    mean = covariance.diagonal().mean()
    if shrink is None:
        size = covariance.square().sum()
        off = size - p * mean**2
        noise = (residuals.square().sum(1).square().mean() - size) / n
        shrink = float((noise / off).clamp(0, 1)) if float(off) > 0 else 1.0
    made = (1 - shrink) * covariance
    made.diagonal().add_(shrink * mean)
    return made, shrink


def component_density(known: Float[Tensor, "n p"], components: int, *, fewer: bool) -> tuple[Score, int]:
    """−log density of the first principal components, and how many; `fewer`: of known samples with fewer, those."""
    mean = known.mean(0)
    about = known - mean
    # Of the features' covariance: the eigenvectors, without forming it where there are many features.
    pairs = top_of(lambda v: about.T @ (about @ v), known.shape[1], components, device=known.device, progress=False)
    # Below this a component is rounding: a density along it would be a density of noise.
    rank = int((pairs.values > ROUNDING * pairs.values[0]).sum())
    if rank < (1 if fewer else components):
        raise InputError(f"components={components}; needed: at most {rank}, as the known samples vary in no more.")
    axes = pairs.vectors.to(known)[:, :rank]
    found = density(about @ axes)
    return lambda z: -found.log((z - mean) @ axes), rank


def neighbour_distance(known: Float[Tensor, "n p"], neighbours: int) -> Score:
    """The distance to the k-th neighbour, features at length 1."""
    _some_length(known, "known")

    def score(z: Tensor) -> Tensor:
        """Of each row."""
        _some_length(z, "fresh or asked")
        return (2 - 2 * nearest(z, known, neighbours).similarity[:, -1]).clamp_min(0).sqrt()

    return score


def _some_length(z: Tensor, name: str) -> None:
    zero = int((~z.any(1)).sum())
    if zero:
        raise InputError(
            f"{zero} of the {name} samples have features that are all 0, which cannot be brought to length 1; "
            "leave them out, or take another score."
        )
