"""Samples as a kernel sees them, from Gram matrices or from features: what is needed to audit them, and no more.

A fit is the mean of its targets (of classes: their frequencies) and kernel ridge regression of what is left; the mean
is that of the samples which are in the fit, so that nothing of a sample is in what is said without it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .._base.progress import bar
from ..errors import InputError, NotPositiveDefinite
from ..gram.gram import Gram
from ..linalg.decompose import eigh
from ..linalg.eigen import Spectrum, spectrum, top
from ..regress import LeftOut, gaussian_process, leave_out, leave_out_features, ridge

# Up to this many samples one eigendecomposition serves all regs; of more, a Cholesky factor for each is quicker
# (heuristic: the first costs about as much as fourteen of the second).
DECOMPOSED = 6000
# Rows of a Gram that are looked at together take about so many numbers.
BAND = 2**25
NO_GRAM = (
    "is not positive semi-definite; needed: the Gram matrix of a kernel, such as Φ @ Φ.T of features. Of similarities "
    "of another kind, take K + c·I with c larger than the size of K's smallest eigenvalue."
)


class Nearest(NamedTuple):
    """Of each sample the most similar others: their cosines, largest first, and their numbers."""

    similarity: Tensor  # [n, k]
    places: Tensor  # [n, k]


class Seen(NamedTuple):
    """What a fit says of the test samples, and the part of k(z, z) that the training samples leave open."""

    predictions: Tensor  # [m, q]
    unexplained: Tensor  # [m], from 0 to 1


class Machine(ABC):
    """Training samples, and test samples if there are any, under one kernel."""

    n: int
    m: int  # test samples; 0 if there are none

    @property
    @abstractmethod
    def squares(self) -> Tensor:
        """k(x, x) of the training samples, [n]."""

    @property
    @abstractmethod
    def rounding(self) -> float:
        """About how far off an entry of the kernel is because it was computed in its type."""

    def left_out(
        self, targets: Tensor, reg: float, groups: Tensor | None = None, kept: Tensor | None = None
    ) -> LeftOut:
        """What the fit without each sample (or its group) says of it; samples not in the mask `kept` are in no fit.

        Least squares are linear in their targets: of y less the mean of the others they say what they say of y, less
        that mean times what they say of ones.
        """
        start = (targets if kept is None else targets[kept.to(targets.device)]).mean(0)
        near = targets - start  # small numbers, whose differences have all their digits
        left = self._left_out(torch.cat([near, torch.ones_like(near[:, :1])], 1), reg, groups, kept)
        errors, ones = left.errors[:, :-1], left.errors[:, -1:]
        errors = errors - _mean_of_others(near, groups, kept).to(errors) * ones
        return replace(left, predictions=targets.to(errors) - errors, errors=errors)

    def see(self, targets: Tensor, reg: float) -> Seen:
        """What the fit says of the test samples."""
        mean = targets.mean(0)
        seen = self._see(targets - mean, reg)
        return seen._replace(predictions=seen.predictions + mean.to(seen.predictions))

    def without(self, targets: Tensor, reg: float, kept: Tensor) -> Tensor:
        """Predictions [m, q] of the test samples by the fit to the samples in the mask `kept` alone."""
        mean = targets[kept.to(targets.device)].mean(0)
        said = self._without(targets - mean, reg, kept)
        return said + mean.to(said)

    @abstractmethod
    def _left_out(self, targets: Tensor, reg: float, groups: Tensor | None, kept: Tensor | None) -> LeftOut:
        """As `left_out`, by a fit that has no mean."""

    @abstractmethod
    def _see(self, targets: Tensor, reg: float) -> Seen:
        """As `see`, by a fit that has no mean."""

    @abstractmethod
    def _without(self, targets: Tensor, reg: float, kept: Tensor) -> Tensor:
        """As `without`, by a fit that has no mean."""

    @abstractmethod
    def nearest(self, k: int, progress: bool) -> Nearest:
        """Of each training sample the k most similar others."""

    @abstractmethod
    def nearest_to_test(self, k: int, progress: bool) -> Nearest:
        """Of each test sample the k most similar training samples."""

    @abstractmethod
    def coordinates(self, r: int, test: bool) -> Tensor:
        """At most r leading kernel principal components of the test (or the training) samples, [·, r]."""

    def unexplained(self, left: LeftOut) -> Tensor:
        """The part of k(x, x) that all other samples leave open, [n]: reg·h/(1 − h) of it, h the leverage."""
        rest = (1 - left.leverage).clamp_min(torch.finfo(left.leverage.dtype).eps)
        squares = self.squares.to(rest)
        # Of nothing, nothing is explained.
        return torch.where(squares > 0, left.reg * left.leverage / rest / squares, 1).clamp(0, 1)

    def uncertainty(self, left: LeftOut, kept: Tensor | None = None) -> float:
        """About how far the rounding of the kernel moves the mean square of the errors, at most, relative to it.

        As `tg.regress.Risks.uncertainty`, to first order, but from the leverages alone: M_ii = (1 − h_i)/reg, and
        (M²)_ii ≤ M_ii/reg for M = (K + reg)⁻¹. On Grams of trained networks two to four times as much. `kept`: of the
        samples in this mask.
        """
        errors, leverage = left.errors.double().reshape(self.n, -1), left.leverage.double()
        if kept is not None:
            errors, leverage = (v[kept.to(v.device)] for v in (errors, leverage))
        rest = (1 - leverage).clamp_min(torch.finfo(torch.float64).eps)
        each, m = errors.norm(dim=1), rest / left.reg
        # Row i of K moves by `rounding` times random numbers, beside the coefficients of the fit without i.
        moved = self.rounding * rest.rsqrt() * ((m[:, None] * errors).norm() + each * (m / left.reg).sqrt())
        total = float(each.square().sum())
        return float((2 * each * moved + moved.square()).sum()) / total if total > 0 else 0.0


@dataclass(frozen=True, eq=False)
class GramMachine(Machine):
    """By the Gram [n, n], and for test samples by theirs with the training samples [m, n] and k(z, z) [m].

    `device`: where Grams on disk are worked on (default: the CPU); eigenpairs, factors and targets all lie there.
    `several`: whether several regs will be asked for, which one eigendecomposition of few samples serves.
    """

    gram: Gram
    cross: Gram | None = None
    prior: Tensor | None = None
    device: torch.device | None = None
    several: bool = True

    @property
    def n(self) -> int:  # type: ignore[override]
        """Training samples."""
        return self.gram.shape[0]

    @property
    def m(self) -> int:  # type: ignore[override]
        """Test samples."""
        return 0 if self.cross is None else self.cross.shape[0]

    @cached_property
    def squares(self) -> Tensor:
        """The diagonal."""
        return _lengths(self.gram.diag().double())

    @cached_property
    def spectrum(self) -> Spectrum | None:
        """Of few samples, for several regs; else None. In float64: eigenvectors in float32 move what small regs say."""
        if not self.several or self.n > DECOMPOSED:
            return None
        return spectrum(self.gram, dtype=torch.float64, device=self._place)

    @property
    def rounding(self) -> float:
        """That of the Gram's own type, for entries as large as k(x, x)."""
        return torch.finfo(self.gram.precision).eps * float(self.squares.mean())

    def _left_out(self, targets: Tensor, reg: float, groups: Tensor | None, kept: Tensor | None) -> LeftOut:
        """By the spectrum, or by a factor."""
        targets = self._there(targets)
        try:
            if kept is None:
                return leave_out(self.spectrum or self.gram, targets, reg=reg, groups=groups, progress=False)
            weights = kept.to(targets)
            return leave_out(self.gram, targets, reg=reg, groups=groups, sample_weights=weights, progress=False)
        except NotPositiveDefinite as e:
            raise InputError(f"K {NO_GRAM}") from e

    def _see(self, targets: Tensor, reg: float) -> Seen:
        """The mean and the variance of the Gaussian process with this noise."""
        cross, prior = self._test()
        found = gaussian_process(self.gram, self._there(targets), noise=reg).predict(cross, self._there(prior))
        own = prior.to(found.covariance)
        return Seen(found.mean, torch.where(own > 0, found.covariance / own, 1).clamp(0, 1))

    def _without(self, targets: Tensor, reg: float, kept: Tensor) -> Tensor:
        """A fit in which the others weigh nothing."""
        targets = self._there(targets)
        return ridge(self.gram, targets, reg=reg, sample_weights=kept.to(targets)).predict(self._test()[0])

    def nearest(self, k: int, progress: bool) -> Nearest:
        """Bands of rows, one after the other."""
        return _nearest(self.gram, self.squares, self.squares, k, True, progress)

    def nearest_to_test(self, k: int, progress: bool) -> Nearest:
        """Bands of rows, one after the other."""
        cross, prior = self._test()
        return _nearest(cross, prior.double(), self.squares, k, False, progress)

    def coordinates(self, r: int, test: bool) -> Tensor:
        """V Λ^½ of the training samples, C V Λ^-½ of the test samples."""
        pairs = self.spectrum or top(self.gram, min(r, self.n - 1), tol=1e-2, device=self._place, progress=False)
        keep = int((pairs.values > 0).sum())
        values, vectors = pairs.values[: min(r, keep)], pairs.vectors[:, : min(r, keep)]
        return self._test()[0] @ (vectors / values.sqrt()) if test else vectors * values.sqrt()

    @property
    def _place(self) -> torch.device:
        """The one device of the work: the Gram's; of one on disk, which lies on none, what was said."""
        return self.gram.device or self.device or torch.device("cpu")

    def _there(self, values: Tensor) -> Tensor:
        return values.to(self._place)

    def _test(self) -> tuple[Gram, Tensor]:
        if self.cross is None or self.prior is None:
            raise InputError("there are no test samples; give their Gram with the training samples, and k(z, z).")
        return self.cross, self.prior


@dataclass(frozen=True, eq=False)
class FeatureMachine(Machine):
    """By features [n, p], and [m, p] of the test samples: the cost grows with n·p², not with n²·p."""

    features: Tensor
    test: Tensor | None = None

    @property
    def n(self) -> int:  # type: ignore[override]
        """Training samples."""
        return len(self.features)

    @property
    def m(self) -> int:  # type: ignore[override]
        """Test samples."""
        return 0 if self.test is None else len(self.test)

    @cached_property
    def squares(self) -> Tensor:
        """‖φ‖²."""
        return _lengths(self.features.double().square().sum(1))

    @property
    def rounding(self) -> float:
        """Of inner products of so many numbers, each rounded by itself."""
        return torch.finfo(self.features.dtype).eps * float(self.squares.mean()) / self.features.shape[1] ** 0.5

    @cached_property
    def moments(self) -> Tensor:
        """ΦᵀΦ [p, p], in double precision."""
        return _product(self.features, self.features)

    def _left_out(self, targets: Tensor, reg: float, groups: Tensor | None, kept: Tensor | None) -> LeftOut:
        """Exactly, in the space of the features."""
        targets = targets.to(self.features.device)
        weights = None if kept is None else kept.to(targets)
        return leave_out_features(self.features, targets, reg=reg, groups=groups, sample_weights=weights)

    def _see(self, targets: Tensor, reg: float) -> Seen:
        """reg·φᵀ(ΦᵀΦ + reg)⁻¹φ of ‖φ‖² is open."""
        z, own = self._test().double(), self._test().double().square().sum(1)
        lower = _cholesky(self.moments, reg)
        open_ = reg * torch.linalg.solve_triangular(lower, z.T, upper=False).square().sum(0)
        gamma = torch.cholesky_solve(_product(self.features, targets.to(z.device)), lower)
        return Seen((z @ gamma).to(targets.dtype), torch.where(own > 0, open_ / own, 1).clamp(0, 1))

    def _without(self, targets: Tensor, reg: float, kept: Tensor) -> Tensor:
        """A fit to the features of these."""
        phi = self.features[kept.to(self.features.device)]
        right = _product(phi, targets[kept].to(phi.device))
        gamma = torch.cholesky_solve(right, _cholesky(_product(phi, phi), reg))
        return (self._test().double() @ gamma).to(targets.dtype)

    def nearest(self, k: int, progress: bool) -> Nearest:
        """Bands of rows, one after the other."""
        return self._nearest_of(self.features, k, True, progress)

    def nearest_to_test(self, k: int, progress: bool) -> Nearest:
        """Bands of rows, one after the other."""
        return self._nearest_of(self._test(), k, False, progress)

    def coordinates(self, r: int, test: bool) -> Tensor:
        """On the leading right singular vectors."""
        _, vectors = eigh(self.moments)
        x = self._test() if test else self.features
        return x @ vectors.flip(1)[:, :r].to(x)

    def _nearest_of(self, rows: Tensor, k: int, same: bool, progress: bool) -> Nearest:
        unit, others = (torch.nn.functional.normalize(v, dim=1) for v in (rows, self.features))
        parts: list[Nearest] = []
        height = max(1, BAND // len(others))
        with bar(len(unit), "neighbours", "sample", show=progress) as step:
            for start in range(0, len(unit), height):
                parts.append(_largest(unit[start : start + height] @ others.T, start, k, same))
                step(len(parts[-1].places))
        return Nearest(*(torch.cat(p) for p in zip(*parts, strict=True)))

    def _test(self) -> Tensor:
        if self.test is None:
            raise InputError("there are no test samples; give their features.")
        return self.test


def _mean_of_others(targets: Tensor, groups: Tensor | None, kept: Tensor | None) -> Tensor:
    """Of each sample the mean [n, q] of the targets of those in the fit without it (or without its group)."""
    weights = torch.ones_like(targets[:, :1]) if kept is None else kept.to(targets)[:, None]
    rows = torch.cat([weights * targets, weights], 1)
    own = rows
    if groups is not None:
        of = groups.to(rows.device)
        own = rows.new_zeros(int(of.max()) + 1, rows.shape[1]).index_add_(0, of, rows)[of]
    others = rows.sum(0) - own
    count = others[:, -1:]
    mean = others[:, :-1] / count.clamp_min(1)
    if kept is None or bool((count > 0).all()):
        return mean
    # All that are in the fit are of one group: without it, the others are what there is.
    return torch.where(count > 0, mean, _mean_of_others(targets, groups, None))


def _lengths(squares: Tensor) -> Tensor:
    """k(x, x) as it is; refuses what no kernel has."""
    wrong = (~(squares >= 0)).nonzero()[:, 0].tolist()
    if wrong:
        raise InputError(f"k(x, x) of sample {wrong[0]} is {float(squares[wrong[0]]):.4g}: K {NO_GRAM}")
    if not bool((squares > 0).any()):
        raise InputError(
            "k(x, x) is 0 for all samples: to this kernel nothing is like anything. Needed: a kernel that is not 0, of "
            "a network with trainable parameters."
        )
    return squares


def _nearest(gram: Gram, rows: Tensor, columns: Tensor, k: int, same: bool, progress: bool) -> Nearest:
    """By the cosines of a Gram, whose samples have these k(x, x)."""
    parts: list[Nearest] = []
    height = max(1, BAND // gram.shape[1])
    with bar(gram.shape[0], "neighbours", "sample", show=progress) as step:
        for start in range(0, gram.shape[0], height):
            band = gram[start : start + height].double()
            band = band / (rows[start : start + height, None].to(band) * columns.to(band)).sqrt()
            band = band.nan_to_num(nan=0.0)  # a sample with k(x, x) = 0 is like none
            parts.append(_largest(band, start, k, same))
            step(len(band))
    return Nearest(*(torch.cat(p) for p in zip(*parts, strict=True)))


def _largest(band: Tensor, start: int, k: int, same: bool) -> Nearest:
    """Of each row its k largest entries; where rows and columns are the same samples, not the sample itself."""
    if same:
        here = torch.arange(len(band), device=band.device)
        band[here, start + here] = -torch.inf
    return Nearest(*band.topk(k, 1))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """aᵀb in double precision, by bands of rows."""
    height, total = max(1, BAND // a.shape[1]), a.new_zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    for left, right in zip(a.split(height), b.split(height), strict=True):
        total.addmm_(left.double().T, right.double())
    return total


def _cholesky(moments: Tensor, reg: float) -> Tensor:
    """The factor of ΦᵀΦ + reg·I."""
    shifted = moments.clone()
    shifted.diagonal().add_(reg)
    return torch.linalg.cholesky(shifted)
