"""Densities from samples, by Gaussian kernels of their covariance."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result
from .._base.types import Array, Float, Numbers
from ..errors import InputError

# Bytes of distances at a time (heuristic).
BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, eq=False, repr=False)
class Density(Result):
    """p(z) = Σ_i w_i N(z; x_i, h² C): C the samples' covariance, h the `bandwidth`."""

    bandwidth: float
    points: Float[Tensor, "n d"]  # x_i in coordinates where h² C is 1
    weights: Float[Tensor, " n"]  # they sum to 1
    factor: Float[Tensor, "d d"]  # of h² C, lower triangular

    def log(self, z: Array) -> Float[Tensor, " m"]:
        """log p at new points [m, d], in float64; far from all samples it goes on falling."""
        new = tree.numbers(z, "z").to(self.points)
        if new.dim() != 2 or new.shape[1] != self.points.shape[1]:
            raise InputError(f"z has shape {tuple(new.shape)}; needed: points [m, {self.points.shape[1]}].")
        checks.finite(new, "z")
        new = torch.linalg.solve_triangular(self.factor, new.T, upper=False).T
        parts = []
        for some in new.split(max(1, BLOCK_BYTES // (8 * len(self.points)))):
            squares = torch.cdist(some, self.points, compute_mode="donot_use_mm_for_euclid_dist").square()
            parts.append(torch.logsumexp(self.weights.log() - squares / 2, 1))
        d = self.points.shape[1]
        constant = float(self.factor.diagonal().log().sum()) + d / 2 * math.log(2 * math.pi)
        return torch.cat(parts) - constant if parts else new.new_empty(0)


def density(points: Array, *, bandwidth: float | None = None, weights: Numbers | None = None) -> Density:
    """p(z) = Σ_i w_i N(z; x_i, h² C) of points [n, d], C their covariance: a kernel density estimate.

    `bandwidth`: h; by default Scott's rule n^(−1/(d + 4)), with weights (Σ w)²/Σ w² in place of n. The same as
    `scipy.stats.gaussian_kde`, on any device. Cost: n·d operations a point. Scott 1992, "Multivariate density
    estimation".

    >>> float(density(torch.randn(2000, 1)).log(torch.zeros(1, 1)).exp().round(decimals=1))
    0.4
    """
    x = tree.numbers(points, "points").double()
    x = x[:, None] if x.dim() == 1 else x
    if x.dim() != 2 or x.shape[1] < 1 or len(x) <= x.shape[1]:
        raise InputError(f"points have shape {tuple(x.shape)}; needed: [n, d] with more points than dimensions.")
    checks.finite(x, "points")
    w = torch.full((len(x),), 1.0, dtype=x.dtype, device=x.device)
    if weights is not None:
        w = tree.numbers(weights, "weights").to(x)
        if w.shape != (len(x),) or not bool((w >= 0).all()) or not float(w.sum()) > 0:
            raise InputError(
                f"weights have shape {tuple(w.shape)}; needed: [{len(x)}] numbers of at least 0, not all 0."
            )
    w = w / w.sum()
    count = 1 / float(w.square().sum())
    h = count ** (-1 / (x.shape[1] + 4)) if bandwidth is None else checks.nonnegative(bandwidth, "bandwidth")
    if h == 0:
        raise InputError("bandwidth=0; needed: a number above 0.")
    about = x - w @ x
    covariance = (about * w[:, None]).T @ about / (1 - float(w.square().sum()))
    factor, info = torch.linalg.cholesky_ex(covariance)
    # Below this a dimension is a sum of others, or the same for all, up to rounding.
    least = torch.maximum(covariance.diagonal().sqrt() * 1e-6, x.abs().amax(0) * 1e-12)
    if int(info) or not bool((factor.diagonal() > least).all()):
        raise InputError(
            "the points lie in fewer dimensions than they have coordinates, so they have no density there. Take their "
            "principal components first, fewer of them."
        )
    factor = factor * h
    return Density(h, torch.linalg.solve_triangular(factor, x.T, upper=False).T, w, factor)
