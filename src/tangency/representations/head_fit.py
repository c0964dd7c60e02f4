"""The convex problem of a last layer, and its solution.

A fit moves W and b from where they start: f = W₀ φ + b₀ + φ·Δ + β, penalised by ‖Δ‖²; β is free, and takes up the mean
of the features. Nothing is multiplied out to φᵀφ, which would square how badly the features are conditioned.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DidNotConverge
from ..linalg.decompose import svd
from ..regress.newton import FeatureDesign, Objective
from ..regress.samples import every_class

EXACT, STEPS = 1e-10, 500  # of Newton's method
ABSENT = (
    "Its bias would run off to minus infinity: add samples of it, or give the model a last layer of as many outputs as "
    "there are classes."
)


@dataclass(frozen=True, eq=False)
class HeadProblem:
    """Features φ [n, d], targets and the logits where the fit begins [n, c], weights [n], all in float64.

    `square`: the loss is (f − t)², else the cross-entropy of one logit's sigmoid or of the softmax. `rounding`: of
    each feature, what part of its size is noise.
    """

    phi: Tensor
    targets: Tensor
    begin: Tensor
    w: Tensor
    bias: bool
    square: bool
    rounding: float

    def select(self, index: Tensor) -> "HeadProblem":
        """Some of the samples."""
        phi, targets, begin, w = (v[index] for v in (self.phi, self.targets, self.begin, self.w))
        return HeadProblem(phi, targets, begin, w, self.bias, self.square, self.rounding)

    @property
    def mean(self) -> Tensor:
        """What the bias takes up of the features, [d]; nothing where there is none."""
        return self.middle(self.phi)

    def middle(self, v: Tensor) -> Tensor:
        """The weighted mean of v [n, k] where there is a bias, else zeros."""
        return (self.w[:, None] * v).sum(0) / self.w.sum() if self.bias else torch.zeros_like(v[0])

    @cached_property
    def axes(self) -> tuple[Tensor, Tensor, Tensor]:
        """U [n, r], s [r], Vᵀ [r, d] of the centred features times √w, without what is rounding."""
        a = (self.phi - self.mean) * self.w.sqrt()[:, None]
        sizes = a.square().sum(0)
        if a.shape[0] > a.shape[1]:  # by its QR factors: as exact, and not slow on a GPU
            q, a = torch.linalg.qr(a)
            u, s, vt = svd(a)
            u = q @ u
        else:
            u, s, vt = svd(a)
        # Rounding is relative to each feature: what it makes of a direction depends on which features are in it.
        noise = self.rounding * (vt.square() @ sizes).sqrt()
        keep = (s > noise) & (s > max(a.shape) * torch.finfo(s.dtype).eps * s[0])
        return u[:, keep], s[keep], vt[keep]

    @cached_property
    def centred_off(self) -> tuple[Tensor, Tensor]:
        """The mean of what the targets are off by, [c], and what is left of it times √w, [n, c]."""
        off = self.targets - self.begin
        middle = self.middle(off)
        return middle, (off - middle) * self.w.sqrt()[:, None]

    @property
    def scale(self) -> float:
        """The largest singular value squared, to which a reg is large or small; 1 if all features are the same."""
        s = self.axes[1]
        return float(s[0]) ** 2 if len(s) else 1.0

    def losses(self, z: Tensor) -> Tensor:
        """Of each sample, [n], from logits [n, c]: the mean of (z − t)² over the outputs, or the cross-entropy."""
        if self.square:
            return (z - self.targets).square().mean(1)
        if z.shape[1] == 1:
            return F.binary_cross_entropy_with_logits(z, self.targets, reduction="none")[:, 0]
        return -(self.targets * z.log_softmax(1)).sum(1)

    def risk(self, z: Tensor) -> float:
        """The weighted mean of `losses`."""
        return float((self.w * self.losses(z)).sum() / self.w.sum())

    def objective(self, z: Tensor, delta: Tensor, reg: float) -> float:
        """Σ_i w_i ‖z_i − t_i‖² + reg·‖Δ‖², or Σ_i w_i loss_i + (reg/2)·‖Δ‖², Δ the change of the weights."""
        sums = float((self.w * self.losses(z)).sum())
        penalty = reg * float(delta.square().sum())
        return sums * z.shape[1] + penalty if self.square else sums + penalty / 2

    def moved(self, delta: Tensor, beta: Tensor) -> Tensor:
        """Logits after a change of weights [d, c] and bias [c]."""
        return self.begin + self.phi @ delta + beta

    def check_classes(self) -> None:
        """Refuse a class without samples, which the bias would leave for ever."""
        if self.bias and not self.square:
            every_class(self.targets, self.w[:, None], ABSENT)


def solve_head(problem: HeadProblem, reg: float) -> tuple[Tensor, Tensor]:
    """Δ [d, c] and β [c] at the optimum: by singular values of the features, or by Newton's method."""
    mean = problem.mean
    if problem.square:
        (u, s, vt), (middle, t) = problem.axes, problem.centred_off
        delta = vt.T @ ((s / (s.square() + reg))[:, None] * (u.T @ t))
        return delta, middle - mean @ delta
    problem.check_classes()
    vt = problem.axes[2]
    (theta, b), shortfall = newton_steps(problem, (problem.phi - mean) @ vt.T, reg, EXACT)
    if shortfall:
        raise DidNotConverge(f"Newton's method reached {shortfall}. Give a larger reg= (it was {reg:g}).")
    delta = vt.T @ theta
    return delta, b - mean @ delta


def newton_steps(
    problem: HeadProblem, inside: Tensor, reg: float, tol: float, start: tuple[Tensor, Tensor] | None = None
) -> tuple[tuple[Tensor, Tensor], str]:
    """Coefficients [r, c] and bias of the logistic fit on `inside` [n, r], and what it lacks, in words.

    On principal axes, where its steps are easily solved. The softmax of two logits is the sigmoid of their difference
    δ: at the optimum they are −δ/2 and δ/2, which have half of δ's penalty.
    """
    two = problem.targets.shape[1] == 2
    targets, begin = problem.targets, problem.begin
    if two:
        targets, begin, reg = targets[:, 1:], begin[:, 1:] - begin[:, :1], reg / 2
        start = None if start is None else (2 * start[0][:, 1:], 2 * start[1][1:])
    objective = Objective(FeatureDesign(inside), targets, begin, problem.w[:, None], reg, problem.bias)
    answer = objective.newton(tol, STEPS, start=start)
    if two:
        halves = answer.theta.new_tensor([-0.5, 0.5])
        return (answer.theta * halves, answer.b * halves), answer.shortfall
    return (answer.theta, answer.b), answer.shortfall
