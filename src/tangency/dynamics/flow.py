"""Gradient flow on the square loss in closed form, mode by mode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base import checks
from .._base.types import Float
from ..errors import InputError
from ..linalg.eigen import Spectrum, top
from ..linalg.matrix import Matrix, square
from ..regress.model import Array, Decomposable, Problem, weigh
from .path import Path, moments

Times = Sequence[float] | Array | float


@dataclass(frozen=True, eq=False)
class Flow:
    """f_t − f₀ = k(·, X) a_t with a_t = W^½ V (1 − e^{−lr·Λ·t})/Λ Vᵀ W^½ (y − f₀): `at(times)` is the path.

    `values`: λ_i of W^½ K W^½, largest first, those above the cutoff (the others move nothing). `energy`:
    (v_i·W^½(y − f₀))² by mode, summed over outputs; `unreachable`: what of ‖W^½(y − f₀)‖² lies outside all of them.
    """

    values: Float[Tensor, " r"]
    energy: Float[Tensor, " r"]
    unreachable: float
    lr: float
    cutoff: float
    problem: Problem
    vectors: Float[Tensor, "n r"]
    inside: Float[Tensor, "r q"]

    def at(self, times: Times) -> Path:
        """The outputs and the loss ½ Σ_i w_i ‖f(x_i) − y_i‖² at each time; t = ∞ is the ridgeless fit."""
        when = moments(times, self.values)
        duals, outputs = [], []
        for t in when.to(self.values.dtype):
            done = -torch.expm1(-self.lr * self.values * t)
            b = self.vectors @ ((done / self.values)[:, None] * self.inside)
            a = self.problem.dual(b)
            if self.problem.kept is None:  # free of the division by λ
                moved = self.vectors @ (done[:, None] * self.inside)
                moved = moved if self.problem.root is None else moved / self.problem.root
            else:
                moved = self.problem.image(a)
            duals.append(a.reshape(self.problem.shape))
            outputs.append((moved if self.problem.f0 is None else moved + self.problem.f0).reshape(self.problem.shape))
        loss = (self.loss_by_mode(when).sum(1) + self.unreachable) / 2
        return Path(
            when, torch.stack(duals), torch.stack(outputs), loss, self.problem.f0 is not None, self.problem.full
        )

    def loss_by_mode(self, times: Times) -> Tensor:
        """e^{−2·lr·λ_i·t} (v_i·W^½(y − f₀))² [t, r]: what is left to learn of each mode.

        Cagnetta et al. 2023 (21) is its sum.
        """
        when = moments(times, self.values).to(self.values.dtype)
        return torch.exp(-2 * self.lr * self.values * when[:, None]) * self.energy

    def time_to_fit(self, left: float = 0.01) -> Tensor:
        """When the error along each eigenvector has fallen to `left` of its start: log(1/left)/(lr·λ_i), [r]."""
        if not 0 < left < 1:
            raise InputError(f"left={left}; needed: the fraction of the error that is left, between 0 and 1.")
        return -torch.log(torch.tensor(left, dtype=torch.float64)).to(self.values) / (self.lr * self.values)


def flow(
    K: Decomposable,
    y: Array,
    *,
    f0: Array | None = None,
    weights: Any = None,
    lr: float = 1.0,
    cutoff: float | None = None,
) -> Flow:
    """f_t = f₀ + k(·, X) K⁻¹ (1 − e^{−lr·K·t}) (y − f₀): gradient flow on ½ Σ_i w_i ‖f(x_i) − y_i‖², at any time.

    K [n, n] with y [n] or [n, q] (K⊗I), or full [n, c, n, c] with y [n, c]; a `Spectrum`, too (`tg.linalg.top` follows
    the fastest modes of a large Gram). `weights`: default 1, the sum of Cagnetta et al. 2023 (15); 1/n is the mean of
    Sutherland 2023; per sample as you like. Eigenvalues up to `cutoff`·λ_1 (n·ε) count as zero.

    >>> import tangency as tg
    >>> x, y = torch.randn(6, 3).double(), torch.randn(6).double()
    >>> path = tg.dynamics.flow(x @ x.T, y, weights=1 / 6).at([0, 1, float("inf")])
    >>> path.train.shape, path.predict(torch.randn(2, 3).double() @ x.T).shape
    (torch.Size([3, 6]), torch.Size([3, 2]))
    """
    lr = checks.nonnegative(lr, "lr")
    problem = Problem.of(K, y, f0, weights)
    whole = problem.spectrum()
    part = whole.kept(cutoff)
    inside = part.vectors.T @ problem.target
    energy = inside.square().sum(1)
    outside = float((problem.target - part.vectors @ inside).square().sum())
    return Flow(part.values, energy, outside, lr, whole.cutoff(cutoff), problem, part.vectors, inside)


def max_learning_rate(
    K: Matrix | Spectrum, *, weights: Any = None, momentum: float = 0.0, nesterov: bool = False, curvature: float = 1.0
) -> float:
    """The largest stable step, 2/(h·λ_1): 2(1 + μ)/(h·λ_1) with momentum μ, 2(1 + μ)/((1 + 2μ)·h·λ_1) with Nesterov's.

    λ_1 is that of W^½ K W^½; h = `curvature` is that of the loss in f: 1 for ½ Σ (f − y)², 2/(n·c) for mse_loss, at
    most 1/(2n) for cross_entropy. Streams over a Gram on disk.

    >>> import tangency as tg
    >>> round(tg.dynamics.max_learning_rate(torch.diag(torch.tensor([4.0, 1.0]))), 6)
    0.5
    """
    if not 0 <= momentum < 1:
        raise InputError(f"momentum={momentum}; needed: at least 0, below 1.")
    given = K if isinstance(K, Spectrum) else square(K)
    matrix, _, _ = weigh(given, weights, torch.zeros((), dtype=given.dtype, device=given.device))
    found = matrix if isinstance(matrix, Spectrum) else top(matrix, 1, tol=1e-5, progress=False)
    largest = float(found.values[0])
    if largest <= 0:
        raise InputError("the largest eigenvalue is not positive, so every learning rate is stable: K moves nothing.")
    return 2 * (1 + momentum) / ((1 + 2 * momentum if nesterov else 1) * curvature * largest)
