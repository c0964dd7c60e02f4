"""How far the logits of samples move with a force on them, at the optimum of a logistic loss: blocks of Φ H⁻¹ Φᵀ.

H is the Hessian of the objective. It is factored as it is where it is small (one logit, full kernels, few features);
with c logits and one kernel for all (K⊗I) it would have (c·r)² entries, and is taken apart: H = A − Uᵀ U, where A has a
block for each class and U a row for each sample (Rasmussen & Williams 2006, 3.5).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .._base import memory as memory_of
from ..errors import MemoryBudgetError, NotPositiveDefinite
from .newton import Chances, FeatureDesign, Objective

# Numbers of rows of features that are held at a time (heuristic): 128 MiB in float64.
HELD = 1 << 24


class Curvature(ABC):
    """Blocks of Φ H⁻¹ Φᵀ, Φ with a column of ones for the bias where there is one."""

    @abstractmethod
    def block(self, members: Tensor) -> Tensor:
        """[groups, m·q, m·q] for the samples [groups, m]."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Samples that may go at a time."""


def curvature(objective: Objective, z: Tensor) -> Curvature:
    """Of an objective at its optimum, with logits z [n, q] there."""
    assert isinstance(objective.design, FeatureDesign)
    phi, (n, q) = objective.design.phi, z.shape
    one_kernel = phi.dim() == 2 and q > 1
    # Below this the whole Hessian costs less than n x n matrices (heuristic).
    apart = one_kernel and q * phi.shape[-1] > n
    size = n if apart else phi.shape[-1] * (q if one_kernel else 1)
    need = 16 * size**2 + (8 * q * phi.shape[-1] ** 2 if apart else 0)
    if need > memory_of.free_memory(z.device) // 2:
        raise MemoryBudgetError(
            f"the Hessian of {n} samples and {q} logit(s) takes {need / 1e9:.3g} GB, more than half of what there is. "
            "Take fewer features (a larger cutoff=, tg.projected), or tg.regress.leave_out on one-hot targets."
        )
    return SoftmaxCurvature(objective, z) if apart else WholeCurvature(objective, z)


def _factored(h: Tensor, reg: float) -> Tensor:
    """The Cholesky factor; refused where rounding hides that H is positive."""
    lower, failed = torch.linalg.cholesky_ex(h)
    if bool(failed):
        raise NotPositiveDefinite(
            f"the Hessian is not positive definite beyond rounding with reg={reg:g}. Give a larger reg, or exact=True."
        )
    return lower


class WholeCurvature(Curvature):
    """H = Σ_i x_iᵀ D_i x_i + reg as one matrix, x_i [q, size] the rows of sample i."""

    def __init__(self, objective: Objective, z: Tensor) -> None:
        assert isinstance(objective.design, FeatureDesign)
        self.phi, self.q, self.bias = objective.design.phi, z.shape[1], objective.bias
        inner = self.phi.shape[-1] * (self.q if self.phi.dim() == 2 else 1)
        size = inner + (self.q if self.bias else 0)
        self.width = size
        h, chances = z.new_zeros(size, size), Chances.of(z)
        for index in torch.arange(len(z), device=z.device).split(self.step):
            x = self._rows(index)
            part = Chances(chances.p[index, :, None], chances.rest[index, :, None])
            h += x.flatten(0, 1).T @ (objective.w[index, :, None] * _curved(part, x)).flatten(0, 1)
        h.diagonal()[:inner] += objective.reg
        if self.bias and self.q > 1:
            # Softmax does not see a shift of all biases. It is held where it is, which moves nothing else.
            h[inner:, inner:] += h.diagonal()[inner:].mean() / self.q
        self.lower = _factored(h, objective.reg)

    @property
    def step(self) -> int:
        """Samples whose rows are held together."""
        return max(1, HELD // (self.q * self.width))

    def _rows(self, index: Tensor) -> Tensor:
        """[m, q, size]: how the logits of samples depend on coefficients and bias."""
        x, eye = self.phi[index], torch.eye(self.q, dtype=self.phi.dtype, device=self.phi.device)
        if x.dim() == 2:  # coefficients [r, q], logit after logit
            x = torch.einsum("cd,mr->mcdr", eye, x).flatten(2)
        return torch.cat([x, eye.expand(len(x), -1, -1)], 2) if self.bias else x

    def block(self, members: Tensor) -> Tensor:
        """Products of L⁻¹ xᵀ."""
        x = self._rows(members.flatten()).reshape(-1, self.width)
        half = torch.linalg.solve_triangular(self.lower, x.T, upper=False).T.reshape(len(members), -1, self.width)
        return half @ half.mT


def _curved(chances: Chances, x: Tensor) -> Tensor:
    """D_i x_i for x [m, q, size], with chances [m, q, 1]."""
    if x.shape[1] == 1:
        return chances.p * chances.rest * x
    return chances.p * (x - (chances.p * x).sum(1, keepdim=True))


class SoftmaxCurvature(Curvature):
    """H = A − Uᵀ U for K⊗I: A_c = Φᵀ diag(w p_c) Φ + reg by class, and U_i = √w_i p_i ⊗ φ_i."""

    def __init__(self, objective: Objective, z: Tensor) -> None:
        assert isinstance(objective.design, FeatureDesign)
        phi, self.q, reg = objective.design.phi, z.shape[1], objective.reg
        self.p, self.root = Chances.of(z).p, objective.w.sqrt()
        penalty = torch.full_like(phi[0], reg)
        self.held = phi.new_zeros(0, self.q)
        if objective.bias:
            # The biases are held, all of them, and let go again but for a shift of all, which softmax does not see.
            force = (objective.w * self.p).sum() / self.q
            phi, penalty = torch.cat([phi, torch.ones_like(phi[:, :1])], 1), torch.cat([penalty, force[None]])
            centred = torch.eye(self.q, dtype=phi.dtype, device=phi.device) - 1 / self.q
            self.held = force.sqrt() * torch.linalg.svd(centred).U[:, :-1].T  # [q − 1, q]
        self.phi = phi
        self.inner: list[Tensor] = []
        t = torch.eye(len(phi) + len(self.held), dtype=phi.dtype, device=phi.device)
        for c in range(self.q):
            weighted = (objective.w * self.p)[:, c, None] * phi
            self.inner.append(_factored(phi.T @ weighted + torch.diag(penalty), reg))
            v = torch.linalg.solve_triangular(self.inner[c], self._rows(c).T, upper=False)
            t -= v.T @ v
        self.lower = _factored(t, reg)

    @property
    def step(self) -> int:
        """Samples whose columns of all classes are held together."""
        return max(1, HELD // (self.q * len(self.phi)))

    def _rows(self, c: int) -> Tensor:
        """U of one class, [n, r], and below it what lets the biases go."""
        rows = self.root * self.p[:, c, None] * self.phi
        if not len(self.held):
            return rows
        last = torch.zeros_like(self.phi[0])
        last[-1] = 1
        return torch.cat([rows, self.held[:, c, None] * last])

    def block(self, members: Tensor) -> Tensor:
        """By Woodbury: φ A_c⁻¹ φᵀ within a class, and what T = I − U A⁻¹ Uᵀ adds between all of them."""
        groups, m = members.shape
        x = self.phi[members.flatten()]
        out = x.new_zeros(groups, m, self.q, m, self.q)
        through = x.new_empty(self.q, len(self.lower), len(x))
        for c in range(self.q):
            half = torch.linalg.solve_triangular(self.inner[c], x.T, upper=False)
            h = half.T.reshape(groups, m, -1)
            out[:, :, c, :, c] = h @ h.mT
            solved = torch.linalg.solve_triangular(self.inner[c].T, half, upper=True)
            through[c] = torch.linalg.solve_triangular(self.lower, self._rows(c) @ solved, upper=False)
        b = through.permute(2, 0, 1).reshape(groups, m * self.q, -1)  # a row for each sample and logit
        return out.reshape(groups, m * self.q, -1) + b @ b.mT
