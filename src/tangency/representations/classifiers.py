"""Three plain classifiers on the first d features, for growing d: neighbours, class centres, a linear SVM.

Each returns the classes that it gives the test samples, [number of d's, m]. What one d costs more than the one before
is all that is computed: distances are sums over features, and a machine starts where the last one ended.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base.memory import WORKSPACE
from .._base.types import Float, Int

# Newton steps of a machine and halvings of each, at most, and when its gradient is small enough, relative to that of
# w = 0 (heuristics).
NEWTON, HALVINGS, SMALL = 60, 30, 1e-8


def nearest_neighbours(
    train: Float[Tensor, "n k"],
    y: Int[Tensor, " n"],
    test: Float[Tensor, "m k"],
    dims: Sequence[int],
    *,
    neighbours: int = 10,
    classes: int,
) -> Int[Tensor, "d m"]:
    """The class that most of the nearest training samples have; of equally many the first. Cost: O(n m k)."""
    step = max(1, WORKSPACE.get(train.device.type, WORKSPACE["cpu"]) // (8 * (len(train) + neighbours + classes)))
    found = torch.empty(len(dims), len(test), dtype=torch.long, device=train.device)
    for start in range(0, len(test), step):
        rows = slice(start, start + step)
        distance = train.new_zeros(len(test[rows]), len(train))
        for k, (first, last) in enumerate(pairwise([0, *dims])):
            a, b = test[rows, first:last], train[:, first:last]
            # ‖a‖² is the same for all training samples; a b goes first, the largest sum of products.
            distance.addmm_(a, b.T, alpha=-2).add_(b.square().sum(1))
            near = distance.topk(neighbours, dim=1, largest=False, sorted=False).indices
            votes = y.new_zeros(len(distance), classes).scatter_add_(1, y[near], torch.ones_like(near))
            found[k, rows] = votes.argmax(1)
    return found


def nearest_centres(
    train: Float[Tensor, "n k"], y: Int[Tensor, " n"], test: Float[Tensor, "m k"], dims: Sequence[int], *, classes: int
) -> Int[Tensor, "d m"]:
    """The class whose mean is nearest. Cost: O((n + c m) k)."""
    centres = train.new_zeros(classes, train.shape[1]).index_add_(0, y, train)
    centres /= torch.bincount(y, minlength=classes)[:, None]
    distance = train.new_zeros(len(test), classes)
    found = []
    for first, last in pairwise([0, *dims]):
        a, b = test[:, first:last], centres[:, first:last]
        distance = distance - 2 * a @ b.T + b.square().sum(1)
        found.append(distance.argmin(1))
    return torch.stack(found)


class Machines(NamedTuple):
    """Classes of the test samples for each d, and the largest gradient left, relative to that of w = 0."""

    found: Int[Tensor, "d m"]
    gradient: float


def linear_svm(
    train: Float[Tensor, "n k"],
    y: Int[Tensor, " n"],
    test: Float[Tensor, "m k"],
    dims: Sequence[int],
    *,
    classes: int,
    reg: float = 1.0,
) -> Machines:
    """min over w, b: reg/2 (‖w‖² + b²) + Σ max(0, 1 ∓ (w·x + b))², each class against all others.

    scikit-learn's LinearSVC with C = 1/reg. Newton's method, each step in the smaller of samples and features.
    """
    signs = 2.0 * F.one_hot(y, classes).to(train.dtype) - 1
    x = torch.cat([train.new_ones(len(train), 1), train], 1)
    weights, found, worst = train.new_zeros(1, classes), [], 0.0
    for d in dims:
        weights = torch.cat([weights, weights.new_zeros(d + 1 - len(weights), classes)])
        weights, gradient = _newton(_Task(x[:, : d + 1], signs, reg), weights)
        worst = max(worst, gradient)
        found.append((test[:, :d] @ weights[1:] + weights[0]).argmax(1))
    return Machines(torch.stack(found), worst)


class _Task(NamedTuple):
    """One machine for each class; unknowns are [d, c]."""

    x: Tensor  # [n, d], the first feature 1
    signs: Tensor  # [n, c]
    reg: float

    def short(self, logits: Tensor) -> Tensor:
        """How far samples are inside the margin, [n, c]."""
        return (1 - self.signs * logits).clamp_min(0)

    def value(self, logits: Tensor, weights: Tensor) -> Tensor:
        """The objectives, [c]."""
        return self.short(logits).square().sum(0) + self.reg / 2 * weights.square().sum(0)

    def gradient(self, logits: Tensor, weights: Tensor) -> Tensor:
        """With respect to the weights."""
        return self.reg * weights - 2 * self.x.T @ (self.signs * self.short(logits))

    def step(self, active: Tensor, g: Tensor) -> Tensor:
        """Newton's, −(reg + 2 AᵀA)⁻¹ g, A the samples inside the margin of one machine; in the smaller of A's sides."""
        a = self.x[active]
        if len(a) >= a.shape[1]:
            return -_solved(2 * a.T @ a, self.reg, g)
        return (a.T @ _solved(a @ a.T, self.reg / 2, a @ g) - g) / self.reg


def _solved(matrix: Tensor, ridge: float, b: Tensor) -> Tensor:
    matrix.diagonal().add_(ridge)
    return torch.cholesky_solve(b[:, None], torch.linalg.cholesky(matrix))[:, 0]


def _newton(task: _Task, weights: Tensor) -> tuple[Tensor, float]:
    """The machines' optimum from this start, and the largest relative gradient that is left."""
    scale = task.gradient(torch.zeros_like(task.signs), torch.zeros_like(weights)).norm(dim=0)
    logits = task.x @ weights
    left = float("inf")
    for _ in range(NEWTON):
        g = task.gradient(logits, weights)
        relative = g.norm(dim=0) / scale.clamp_min(torch.finfo(g.dtype).tiny)
        left = float(relative.max())
        going = (relative > SMALL).nonzero()[:, 0].tolist()
        if not going:
            break
        active, step = task.short(logits) > 0, torch.zeros_like(weights)
        for c in going:
            step[:, c] = task.step(active[:, c], g[:, c])
        moved = task.x @ step
        rate = _rate(task, (weights, logits), (step, moved), (g * step).sum(0))
        if not bool((rate[going] > 0).any()):  # rounding: no step makes it less
            break
        weights, logits = weights + rate * step, logits + rate * moved
    return weights, left


def _rate(task: _Task, now: tuple[Tensor, Tensor], step: tuple[Tensor, Tensor], slope: Tensor) -> Tensor:
    """The largest of 1, ½, ¼, … with which each objective falls enough (Armijo); 0 if none does."""
    (weights, logits), (v, moved) = now, step
    start, rate = task.value(logits, weights), torch.ones_like(slope)
    bad = slope > 0
    for _ in range(HALVINGS):
        bad = task.value(logits + rate * moved, weights + rate * v) > start + 1e-4 * rate * slope
        if not bool(bad.any()):
            return rate
        rate = torch.where(bad, rate / 2, rate)
    return torch.where(bad, 0.0, rate)
