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

# Newton steps of a machine, steps of conjugate gradients in each, at most; how far each is solved; and when the
# gradient is small enough, relative to that of w = 0 (heuristics: with the last, accuracies no longer change).
NEWTON, INNER, FORCING, SMALL = 60, 250, 0.03, 1e-5
HALVINGS = 30


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
    votes = F.one_hot(y, classes).to(torch.int32)
    step = max(1, WORKSPACE.get(train.device.type, WORKSPACE["cpu"]) // (8 * len(train)))
    found = torch.empty(len(dims), len(test), dtype=torch.long, device=train.device)
    for start in range(0, len(test), step):
        rows = slice(start, start + step)
        distance = train.new_zeros(len(test[rows]), len(train))
        for k, (first, last) in enumerate(pairwise([0, *dims])):
            a, b = test[rows, first:last], train[:, first:last]
            # ‖a‖² is the same for all training samples; a b goes first, the largest sum of products.
            distance.addmm_(a, b.T, alpha=-2).add_(b.square().sum(1))
            near = distance.topk(neighbours, dim=1, largest=False, sorted=False).indices
            found[k, rows] = votes[near].sum(1).argmax(1)
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

    scikit-learn's LinearSVC with C = 1/reg, by Newton's method and conjugate gradients in all classes at once.
    """
    signs = 2.0 * F.one_hot(y, classes).to(train.dtype) - 1
    squares, found, worst = train.square().sum(0), [], 0.0
    weights = train.new_zeros(0, classes)
    bias = train.new_zeros(classes)
    for first, last in pairwise([0, *dims]):
        weights = torch.cat([weights, weights.new_zeros(last - first, classes)])
        task = _Task(train[:, :last], signs, squares[:last], reg)
        weights, bias, gradient = _newton(task, weights, bias)
        worst = max(worst, gradient)
        found.append((test[:, :last] @ weights + bias).argmax(1))
    return Machines(torch.stack(found), worst)


class _Task(NamedTuple):
    """One machine for each class; unknowns are [d, c] and [c]."""

    x: Tensor
    signs: Tensor  # [n, c]
    squares: Tensor  # Σ_i x_ij²
    reg: float

    def value(self, logits: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        """The objectives, [c]."""
        short = (1 - self.signs * logits).clamp_min(0)
        return short.square().sum(0) + self.reg / 2 * (weights.square().sum(0) + bias.square())

    def gradient(self, logits: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With respect to weights and biases; which samples are inside the margin."""
        short = (1 - self.signs * logits).clamp_min(0)
        pull = -2 * self.signs * short
        return self.x.T @ pull + self.reg * weights, pull.sum(0) + self.reg * bias, (short > 0).to(short.dtype)

    def curvature(self, active: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The Hessian's product with (v, u)."""
        moved = 2 * active * (self.x @ v + u)
        return self.x.T @ moved + self.reg * v, moved.sum(0) + self.reg * u


def _newton(task: _Task, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, float]:
    """The machines' optimum from this start, and the relative gradient that is left."""
    first, b0, _ = task.gradient(torch.zeros_like(task.signs), torch.zeros_like(weights), torch.zeros_like(bias))
    small = SMALL * _length(first, b0).clamp_min(torch.finfo(bias.dtype).tiny)
    logits = task.x @ weights + bias
    left = float("inf")
    for _ in range(NEWTON):
        g, gb, active = task.gradient(logits, weights, bias)
        left = float((_length(g, gb) / small).max()) * SMALL
        if left <= SMALL:
            break
        v, u = _solved(task, active, -g, -gb)
        moved = task.x @ v + u
        slope = (g * v).sum(0) + gb * u
        rate = _rate(task, (weights, bias, logits), (v, u, moved), slope)
        if not bool((rate > 0).any()):  # rounding: no step makes it less
            break
        weights, bias, logits = weights + rate * v, bias + rate * u, logits + rate * moved
    return weights, bias, left


def _rate(
    task: _Task, now: tuple[Tensor, Tensor, Tensor], step: tuple[Tensor, Tensor, Tensor], slope: Tensor
) -> Tensor:
    """The largest of 1, ½, ¼, … with which each objective falls enough (Armijo); 0 if none does."""
    weights, bias, logits = now
    v, u, moved = step
    start, rate = task.value(logits, weights, bias), torch.ones_like(bias)
    for _ in range(HALVINGS):
        value = task.value(logits + rate * moved, weights + rate * v, bias + rate * u)
        bad = value > start + 1e-4 * rate * slope
        if not bool(bad.any()):
            return rate
        rate = torch.where(bad, rate / 2, rate)
    return torch.where(bad, 0.0, rate)


def _solved(task: _Task, active: Tensor, g: Tensor, gb: Tensor) -> tuple[Tensor, Tensor]:
    """The Newton step by conjugate gradients, in units in which principal components have a Hessian near 1."""
    share = active.mean(0)
    scale, scale_b = task.reg + 2 * share * task.squares[:, None], task.reg + 2 * active.sum(0)
    v, u = torch.zeros_like(g), torch.zeros_like(gb)
    r, rb = g, gb
    z, zb = r / scale, rb / scale_b
    p, pb = z, zb
    inner = (r * z).sum(0) + rb * zb
    enough = FORCING**2 * inner
    for _ in range(INNER):
        if not bool((inner > enough).any()):
            break
        h, hb = task.curvature(active, p, pb)
        rate = torch.where(inner > enough, inner / ((p * h).sum(0) + pb * hb).clamp_min(1e-300), 0.0)
        v, u, r, rb = v + rate * p, u + rate * pb, r - rate * h, rb - rate * hb
        z, zb = r / scale, rb / scale_b
        after = torch.where(inner > enough, (r * z).sum(0) + rb * zb, inner)
        p, pb = z + after / inner.clamp_min(1e-300) * p, zb + after / inner.clamp_min(1e-300) * pb
        inner = after
    return v, u


def _length(g: Tensor, gb: Tensor) -> Tensor:
    return (g.square().sum(0) + gb.square()).sqrt()
