"""Gaussian processes with a kernel as prior covariance."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result
from .._base.types import Float, Numbers
from ..errors import DidNotConverge, InputError
from ..gram.gram import Gram
from ..linalg.eigen import Spectrum
from ..linalg.factor import HeldFactor, factor, substitute
from ..linalg.matrix import Matrix, between, flattened
from .groups import GroupLabels, by_size, checked_groups, with_outputs
from .inverse import column_blocks
from .model import KernelModel, Problem


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(Result):
    """Mean [m], [m, q] or [m, c]; variance [m] or [m, c], or the whole covariance, as the prior was given."""

    mean: Float[Tensor, "..."]
    covariance: Float[Tensor, "..."]


@dataclass(frozen=True, eq=False, repr=False)
class LeftOutProcess(Result):
    """What the others (the other groups) say of each y: N(mean, covariance), noise included, and its log density at y.

    `mean` has the shape of y. `covariance`: [n], one variance for all columns of y (K⊗I), or [n, c, c] for a full
    kernel. `log_density` [n]: over all outputs of a sample. Their sum is the pseudo-likelihood, by which kernels and
    noise can be chosen.
    """

    mean: Float[Tensor, "..."]
    covariance: Float[Tensor, "..."]
    log_density: Float[Tensor, " n"]


@dataclass(frozen=True, eq=False, repr=False)
class GaussianProcess(Result):
    """f ~ GP(f₀, k) seen through noise of variance `noise`. `log_likelihood` is log p(y), summed over outputs."""

    model: KernelModel
    noise: float
    log_likelihood: float
    factor: Float[Tensor, "n n"] = field(repr=False)  # of K + noise·I

    def predict(self, cross: Matrix, prior: Matrix, f0: Numbers | None = None) -> Posterior:
        """Mean and covariance of f (without the noise) on new samples.

        `cross`: their Gram with the training samples. `prior`: k(z, z) as `kernel.diag(z)` gives it, for the variances,
        or the Gram of the new samples with themselves, for the covariance.
        """
        mean = self.model.predict(cross, f0)
        k = flattened(between(cross), self.factor.dtype, self.factor.device)
        prior = prior.dense() if isinstance(prior, Gram) else tree.numbers(prior, "prior")
        prior = prior.to(self.factor)
        half = torch.linalg.solve_triangular(self.factor, k.T, upper=False)  # [n, m]
        side = torch.Size(cross.shape[: len(cross.shape) // 2])
        if prior.shape not in (side, (*side, *side)):
            raise InputError(f"the prior has shape {tuple(prior.shape)}; needed: {[*side]} or {[*side, *side]}.")
        variances = prior.shape == side
        before = prior.flatten() if variances else prior.reshape(side.numel(), -1).diagonal()
        after = before - half.square().sum(0)
        # Rounding leaves a little below zero; much below, prior and cross are of two kernels (heuristic: 0.1 %).
        if bool((after < -1e-3 * before.abs().max()).any()):
            raise InputError("the prior is less than what cross explains of it; needed: k(z, z) of the same kernel.")
        if variances:
            return Posterior(mean, after.clamp_min(0).reshape(side))  # rounding alone can lead below
        return Posterior(mean, prior - (half.T @ half).reshape(prior.shape))

    def leave_out(self, *, groups: GroupLabels = None, progress: bool = True) -> LeftOutProcess:
        """p(y_i | all other y) = N(y_i − M_ii⁻¹ a_i, M_ii⁻¹) with M = (K + noise·I)⁻¹, for every sample i.

        The samples of a full kernel are left out with all their outputs. `groups`: a label for each sample, an integer
        or a string: y_i given the other groups alone, each sample by itself: its rows of M_gg⁻¹ a_g, its block of
        M_gg⁻¹. Rasmussen & Williams 2006, (5.10)–(5.12). Cost: n³/3, from the factor that is there.

        >>> import tangency as tg
        >>> x, y = torch.randn(30, 4).double(), torch.randn(30).double()
        >>> left = tg.regress.gaussian_process(x @ x.T, y, noise=0.1).leave_out()
        >>> left.mean.shape, left.covariance.shape
        (torch.Size([30]), torch.Size([30]))
        """
        a, n = self.model.coefficients, len(self.model.coefficients)
        labels = checked_groups(groups, n, self.factor.device)
        c = len(self.factor) // n
        flat = a.reshape(n * c, -1)
        off, covariance = torch.empty_like(flat), flat.new_empty(n, c, c)
        members = [with_outputs(m, c) for m in by_size(labels)]
        for rows, block in column_blocks(HeldFactor(self.factor), members, progress):
            together = torch.linalg.inv(block)  # [groups, m·c, m·c]
            off[rows] = together @ flat[rows]
            split = together.reshape(len(rows), rows.shape[1] // c, c, -1, c)
            covariance[rows[:, ::c] // c] = split.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        # log N(off; 0, covariance) of each sample, summed over the columns of y.
        each = off.reshape(n, c, -1)
        halves = 0.5 * (each * torch.linalg.solve(covariance, each)).sum((1, 2))
        halves += 0.5 * each.shape[2] * torch.linalg.slogdet(covariance).logabsdet
        density = -halves - 0.5 * each.shape[1:].numel() * math.log(2 * math.pi)
        # K a + noise·a = y − f₀.
        mean = self.model.fitted + self.noise * a - off.reshape(a.shape)
        return LeftOutProcess(mean, covariance if self.model.full else covariance[:, 0, 0], density)


def gaussian_process(K: Matrix, y: Numbers, *, noise: float, f0: Numbers | None = None) -> GaussianProcess:
    """p(f | y), f ~ GP(f₀, k): mean f₀ + k (K + noise·I)⁻¹ (y − f₀), variance k(z, z) − k (K + noise·I)⁻¹ kᵀ.

    The mean is that of `ridge` with reg = noise. Rasmussen & Williams 2006, Alg. 2.1. Cost: n³/3, and n² numbers.

    >>> import tangency as tg
    >>> k, x = tg.trace_ntk(torch.nn.Linear(2, 1).double()), torch.randn(5, 2).double()
    >>> gp = tg.regress.gaussian_process(k(x), x[:, 0], noise=0.1)
    >>> z = torch.randn(3, 2).double()
    >>> gp.predict(k(z, x), k.diag(z)).covariance.shape
    torch.Size([3])
    """
    problem = Problem.of(K, y, f0)
    noise = checks.nonnegative(noise, "noise")
    if isinstance(problem.matrix, Spectrum):
        raise InputError("a Gaussian process takes the Gram itself, not its spectrum.")
    t = problem.target
    # By the factor itself and not by `solve`: it is kept, for the variances of new samples.
    lower = factor(problem.matrix, noise, t.dtype, t.device)
    a = substitute(lower, t)
    residual = float((problem.image(a) + noise * a - t).norm() / t.norm().clamp_min(torch.finfo(t.dtype).tiny))
    model = problem.model(a, reg=noise, solver="Cholesky", steps=1, residual=residual)
    n, q = t.shape
    # log N(t; 0, L Lᵀ), for each of the q columns
    likelihood = (
        -0.5 * float((t * a).sum()) - q * float(lower.diagonal().log().sum()) - 0.5 * n * q * math.log(2 * math.pi)
    )
    process = GaussianProcess(model, noise, likelihood, lower)
    if not residual <= (limit := 1e-6 if t.dtype == torch.float64 else 1e-3):  # as of tg.linalg.solve
        raise DidNotConverge(
            f"Cholesky left the relative residual {residual:.2e}; needed: {limit:.0e}. K is ill-conditioned beside the "
            f"noise: give a larger noise= (it was {noise:g}), or y in float64; .solution holds what was found.",
            process,
        )
    return process
