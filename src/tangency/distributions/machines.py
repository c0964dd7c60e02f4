"""Kernel machines that tell two samples apart: scores of samples that they have not seen, for any labels at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.types import Float, Int
from ..errors import InputError
from ..regress import logistic, logistic_features


class Machine(ABC):
    """What is known of N samples before their labels are: a Gram, or features."""

    @property
    @abstractmethod
    def size(self) -> int:
        """N."""

    @abstractmethod
    def default_reg(self) -> float:
        """The mean of k(z, z) about the mean sample: the eigenvalues' mean (heuristic; it knows no labels)."""

    @abstractmethod
    def ridge(self, folds: Sequence[Int[Tensor, " k"]], reg: float) -> "CrossFitted":
        """Ridge regression, fitted to all folds but one, for each of them."""

    @abstractmethod
    def logistic(self, train: Int[Tensor, " k"], asked: Int[Tensor, " j"], of_x: Tensor, reg: float) -> Tensor:
        """Log-odds of being x's for the samples asked, by logistic regression on others, both kinds weighing alike."""


class CrossFitted(ABC):
    """Out-of-fold scores, linear in the labels."""

    @abstractmethod
    def __call__(self, labels: Float[Tensor, "N b"]) -> Float[Tensor, "N b"]:
        """Of each sample, by the fit that has not seen it, for every column of labels."""


@dataclass(frozen=True, eq=False)
class ByGram(Machine):
    """From a Gram [N, N] in float64."""

    gram: Float[Tensor, "N N"]

    @property
    def size(self) -> int:
        """Its rows."""
        return len(self.gram)

    def default_reg(self) -> float:
        """tr(HKH)/N."""
        return float((self.gram.diagonal().mean() - self.gram.mean()).clamp_min(0))

    def ridge(self, folds: Sequence[Tensor], reg: float) -> CrossFitted:
        """One matrix S with scores S·labels: zero where a sample was fitted to."""
        hat = torch.zeros_like(self.gram)
        for fold in folds:
            train = _others(folds, fold)
            inside, cross = self.gram[train][:, train], self.gram[fold][:, train]
            # About the mean training sample, which stands for an intercept: labels come with mean 0.
            rows = inside.mean(0)
            cross = cross - rows - cross.mean(1, keepdim=True) + rows.mean()
            inside = inside - rows - rows[:, None] + rows.mean()
            inside.diagonal().add_(reg)
            hat[fold[:, None], train] = torch.cholesky_solve(cross.T, _factor(inside, reg)).T
        return _Hat(hat)

    def logistic(self, train: Tensor, asked: Tensor, of_x: Tensor, reg: float) -> Tensor:
        """From the Gram of the training samples."""
        inside, cross = self.gram[train][:, train], self.gram[asked][:, train]
        fit = logistic(inside, of_x.long(), reg=reg, sample_weights=_alike(of_x), bias=True)
        return fit.logits(cross)


@dataclass(frozen=True, eq=False)
class ByFeatures(Machine):
    """From features [N, p] in float64: p² numbers in place of N²."""

    features: Float[Tensor, "N p"]

    @property
    def size(self) -> int:
        """Their rows."""
        return len(self.features)

    def default_reg(self) -> float:
        """The mean of ‖φ − mean φ‖²."""
        return float((self.features - self.features.mean(0)).square().sum(1).mean())

    def ridge(self, folds: Sequence[Tensor], reg: float) -> CrossFitted:
        """For each fold (Φᵀ Φ + reg)⁻¹ of the others, about their mean."""
        fits = []
        for fold in folds:
            train = _others(folds, fold)
            mean = self.features[train].mean(0)
            about = self.features[train] - mean
            inside = about.T @ about
            inside.diagonal().add_(reg)
            fits.append((fold, train, mean, _factor(inside, reg)))
        return _Primal(self.features, fits)

    def logistic(self, train: Tensor, asked: Tensor, of_x: Tensor, reg: float) -> Tensor:
        """Through the features."""
        fit = logistic_features(self.features[train], of_x.long(), reg=reg, sample_weights=_alike(of_x), bias=True)
        return fit.logits(self.features[asked])


@dataclass(frozen=True, eq=False)
class _Hat(CrossFitted):
    hat: Tensor

    def __call__(self, labels: Tensor) -> Tensor:
        return self.hat @ labels


@dataclass(frozen=True, eq=False)
class _Primal(CrossFitted):
    features: Tensor
    fits: list[tuple[Tensor, Tensor, Tensor, Tensor]]  # fold, the others, their mean, the factor

    def __call__(self, labels: Tensor) -> Tensor:
        out = torch.empty_like(labels)
        for fold, train, mean, factor in self.fits:
            seen = labels[train]
            aim = self.features[train].T @ seen - mean[:, None] * seen.sum(0)
            out[fold] = (self.features[fold] - mean) @ torch.cholesky_solve(aim, factor)
        return out


def _others(folds: Sequence[Tensor], fold: Tensor) -> Tensor:
    return torch.cat([other for other in folds if other is not fold])


def _factor(matrix: Tensor, reg: float) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise InputError(
            f"with reg={reg:g} the samples' kernel is singular, so there is no fit; give a larger reg= (samples that "
            "are all equal have none)."
        )
    return factor


def _alike(of_x: Tensor) -> Tensor:
    """Weights of the samples with which both kinds weigh the same."""
    part = of_x.double().mean()
    return torch.where(of_x, 0.5 / part, 0.5 / (1 - part))
