"""Gradient flow on the square loss in closed form, mode by mode."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result
from .._base.targets import Kind, columns_of
from .._base.types import Float, Numbers
from ..errors import InputError
from ..linalg.eigen import Spectrum, top
from ..linalg.matrix import Matrix, square
from ..regress.model import Decomposable, Problem, weigh
from ..regress.samples import SampleWeights
from .path import Path, Times, checked_times

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Flow(Result):
    """f_t − f₀ = k(·, X) a_t with a_t = W^½ V (1 − e^{−lr·Λ·t})/Λ Vᵀ W^½ (y − f₀): `at(times)` is the path.

    `values`: λ_i of W^½ K W^½, largest first, those above the cutoff (the others move nothing). `energy`:
    (v_i·W^½(y − f₀))² by mode, summed over outputs; `unreachable`: what of ‖W^½(y − f₀)‖² lies outside all of them.
    """

    values: Float[Tensor, " r"]
    energy: Float[Tensor, " r"]
    unreachable: float
    lr: float
    cutoff: float
    problem: Problem = field(repr=False)
    vectors: Float[Tensor, "n r"] = field(repr=False)
    inside: Float[Tensor, "r q"] = field(repr=False)  # Vᵀ W^½ (y − f₀)

    def at(self, times: Times) -> Path:
        """The outputs and the loss ½ Σ_i w_i ‖f(x_i) − y_i‖² at each time; t = ∞ is the ridgeless fit."""
        when = checked_times(times, self.values)
        duals, outputs = [], []
        for t in when.to(self.values.dtype):
            # expm1 keeps its digits for slow modes, of which little is learned.
            done = -torch.expm1(-self.lr * self.values * t)
            b = self.vectors @ ((done / self.values)[:, None] * self.inside)
            a = self.problem.dual(b)
            # On the training samples K a = V (1 − e^{−lr·Λ·t}) Vᵀ t, free of the division by λ; where samples of weight
            # zero were left out, their outputs need the product.
            if self.problem.kept is None:
                moved = self.vectors @ (done[:, None] * self.inside)
                moved = moved if self.problem.root is None else moved / self.problem.root
            else:
                moved = self.problem.image(a)
            duals.append(a.reshape(self.problem.shape))
            outputs.append((moved if self.problem.f0 is None else moved + self.problem.f0).reshape(self.problem.shape))
        # Modes decay on their own; what lies outside all of them stays.
        loss = (self.loss_by_mode(when).sum(1) + self.unreachable) / 2
        return Path(
            when, torch.stack(duals), torch.stack(outputs), loss, self.problem.f0 is not None, self.problem.full
        )

    def loss_by_mode(self, times: Times) -> Tensor:
        """e^{−2·lr·λ_i·t} (v_i·W^½(y − f₀))² [t, r]: what is left to learn of each mode.

        Cagnetta et al. 2023 (21) is its sum.
        """
        when = checked_times(times, self.values).to(self.values.dtype)
        return torch.exp(-2 * self.lr * self.values * when[:, None]) * self.energy

    def time_to_fit(self, left: float = 0.01) -> Tensor:
        """When the error along each eigenvector has fallen to `left` of its start: log(1/left)/(lr·λ_i), [r]."""
        if not 0 < left < 1:
            raise InputError(f"left={left}; needed: the fraction of the error that is left, between 0 and 1.")
        return -torch.log(torch.tensor(left, dtype=torch.float64)).to(self.values) / (self.lr * self.values)

    def plot(self, times: Sequence[float], modes: Sequence[int] = (0, 1, 3, 10, 30, 100, 300)) -> "Figure":
        """What is left to learn along some eigenvectors over time, and when each eigenvector is learned."""
        from ..plots import draw_spectral_bias

        return draw_spectral_bias(self, times, modes)


def flow(
    K: Decomposable,
    y: Numbers | Sequence[str],
    *,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
    targets: Kind | None = None,
    lr: float = 1.0,
    cutoff: float | None = None,
) -> Flow:
    """f_t = f₀ + k(·, X) K⁻¹ (1 − e^{−lr·K·t}) (y − f₀): gradient flow on ½ Σ_i w_i ‖f(x_i) − y_i‖², at any time.

    K [n, n] with y [n] or [n, q] (K⊗I), or full [n, c, n, c] with y [n, c]; a `Spectrum`, too (`tg.linalg.top` follows
    the fastest modes of a large Gram). Classes y [n] are one-hot columns, one for each that there is; `targets` says
    "classes" or "real" of floats that may be either. `sample_weights`: default 1, the sum of Cagnetta et al. 2023 (15);
    1/n is the mean of Sutherland 2023; per sample as you like. Eigenvalues up to `cutoff`·λ_1 (n·ε) count as zero.

    >>> import tangency as tg
    >>> x, y = torch.randn(6, 3).double(), torch.randn(6).double()
    >>> path = tg.dynamics.flow(x @ x.T, y, sample_weights=1 / 6).at([0, 1, float("inf")])
    >>> path.train.shape, path.predict(torch.randn(2, 3).double() @ x.T).shape
    (torch.Size([3, 6]), torch.Size([3, 2]))
    """
    lr = checks.nonnegative(lr, "lr")
    problem = Problem.of(K, _numbers(K, y, targets), f0, sample_weights)
    whole = problem.spectrum()
    part = whole.kept(cutoff)
    inside = part.vectors.T @ problem.target
    energy = inside.square().sum(1)
    outside = float((problem.target - part.vectors @ inside).square().sum())
    return Flow(part.values, energy, outside, lr, whole.cutoff(cutoff), problem, part.vectors, inside)


def _numbers(K: Decomposable, y: Numbers | Sequence[str], targets: Kind | None) -> Numbers:
    """Targets of the square loss; one-hot rows are what classes would be made, so nobody is asked about those."""
    if targets is None and isinstance(y, (Tensor, np.ndarray)) and len(y.shape) > 1:
        return y
    shape = K.shape if isinstance(K, Spectrum) else square(K).shape
    return columns_of(y, shape[1] if len(shape) == 4 else None, targets=targets, less_mean=False)


def max_learning_rate(
    K: Matrix | Spectrum,
    *,
    sample_weights: SampleWeights = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    curvature: float = 1.0,
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
    gram = K if isinstance(K, Spectrum) else square(K)
    matrix = weigh(gram, sample_weights, torch.zeros((), dtype=gram.dtype, device=gram.device)).matrix
    # Five digits of λ_1: nobody trains closer to the edge than that.
    pairs = matrix if isinstance(matrix, Spectrum) else top(matrix, 1, tol=1e-5, progress=False)
    largest = float(pairs.values[0])
    if largest <= 0:
        raise InputError("the largest eigenvalue is not positive, so every learning rate is stable: K moves nothing.")
    return 2 * (1 + momentum) / ((1 + 2 * momentum if nesterov else 1) * curvature * largest)
