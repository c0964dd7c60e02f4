"""Kernel logistic regression, binary and multinomial, by Newton's method with a line search, in float64.

From a Gram the work is done in the coordinates of its eigenvectors, Φ = V Λ^½; by features in theirs. Either way the
logits are linear in the coefficients, the objective is convex, and the answer says how far it is from the optimum.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base import checks
from .._base.types import Float
from ..errors import DidNotConverge, InputError
from ..linalg.eigen import Spectrum, spectrum
from ..linalg.matrix import Matrix, square
from .model import Array, Decomposable, KernelModel, same_shape, sample_weights
from .newton import Answer, Dense, Task


@dataclass(frozen=True, eq=False)
class LogisticModel:
    """Logits z ↦ f₀(z) + k(z, X)·a + bias: [m] for two classes (the log-odds of class 1), else [m, c] under softmax.

    `gradient`: ‖∇‖ of the objective at the answer, in the kernel's Hilbert space, relative to that at a = 0.
    `distance`: how long the next Newton step would be, in that space and in the logits of the training samples,
    relative to where it starts; where a small gradient says little (separated classes, a small reg), it does not.
    """

    model: KernelModel
    bias: Float[Tensor, "..."]
    classes: int
    loss: float  # Σ_i w_i·loss_i, without the penalty
    distance: float | None = None

    @property
    def gradient(self) -> float:
        return self.model.residual

    def logits(self, cross: Matrix, f0: Array | None = None) -> Tensor:
        """From the Gram of the new samples with the training samples, or from their features."""
        return self.model.predict(cross, f0) + self.bias

    def probabilities(self, cross: Matrix, f0: Array | None = None) -> Tensor:
        """[m, classes]."""
        z = self.logits(cross, f0)
        if z.dim() == 1 or z.shape[1] == 1:
            return torch.stack([torch.sigmoid(-z), torch.sigmoid(z)], 1).reshape(-1, 2)
        return torch.softmax(z, 1)

    def predict(self, cross: Matrix, f0: Array | None = None) -> Tensor:
        """The likeliest class of each new sample."""
        return self.probabilities(cross, f0).argmax(1)


def logistic(
    K: Decomposable,
    y: Array,
    *,
    reg: float,
    f0: Array | None = None,
    weights: Any = None,
    bias: bool = False,
    classes: int | None = None,
    cutoff: float | None = None,
    tol: float = 1e-10,
    max_steps: int = 200,
) -> LogisticModel:
    """a = argmin Σ_i w_i loss(f(x_i), y_i) + (reg/2)·‖f − f₀‖², loss = log(1 + e^{∓f}) or −log softmax.

    `y`: classes [n] as integers from 0, or probabilities [n, c]. Two classes have one logit, more have c of them (K⊗I);
    a full kernel [n, c, n, c] couples its c logits. `bias`: an intercept per logit, not penalised; every class then
    needs a sample. `tol`: of the gradient's norm and, down to 1e-6, of the distance to the optimum. With reg = 0 the
    classes must overlap. Qadeer et al. 2023 (15), (16). Takes a `Spectrum`, too; eigenvalues up to `cutoff`·λ_1 (n·ε)
    are left out. Cost: an eigendecomposition, then n·rank·c a product.

    >>> import tangency as tg
    >>> x = torch.randn(40, 3).double()
    >>> fit = tg.regress.logistic(x @ x.T, (x[:, 0] > 0).long(), reg=0.1)
    >>> fit.gradient < 1e-10, fit.probabilities(x[:2] @ x.T).shape
    (True, torch.Size([2, 2]))
    """
    given = K if isinstance(K, Spectrum) else square(K)
    side = given.shape[: len(given.shape) // 2]
    labels = one_hot_labels(y, side, classes, given.device)
    reg = checks.nonnegative(reg, "reg")
    _biased(labels, weights, bias)
    whole = given if isinstance(given, Spectrum) else spectrum(given, dtype=torch.float64, device=labels.device)
    part = whole.kept(cutoff)
    values, vectors = part.values.double(), part.vectors.double()
    phi = (vectors * values.sqrt()).reshape(*side, -1)
    task = _task(phi, labels, f0, weights, reg, bias)
    answer = task.newton(tol, max_steps)
    a = vectors @ (answer.theta.reshape(len(values), -1) / values.sqrt()[:, None])
    return _model(task, answer, a, tol, f0 is not None, rank=len(part), cutoff=whole.cutoff(cutoff))


def logistic_features(
    features: Array,
    y: Array,
    *,
    reg: float,
    f0: Array | None = None,
    weights: Any = None,
    bias: bool = False,
    classes: int | None = None,
    tol: float = 1e-10,
    max_steps: int = 200,
) -> LogisticModel:
    """γ = argmin Σ_i w_i loss(φ(x_i)·γ, y_i) + (reg/2)·‖γ‖²: `logistic` through features [n, p], or [n, c, p] if full.

    >>> x = torch.randn(40, 3).double()
    >>> fit = logistic_features(x, (x[:, 0] > 0).long(), reg=0.1, bias=True)
    >>> fit.predict(x[:5]).shape
    torch.Size([5])
    """
    phi = torch.as_tensor(features).detach().double()
    if phi.dim() not in (2, 3) or 0 in phi.shape:
        raise InputError(f"features have shape {tuple(phi.shape)}; needed: [n, p] or [n, c, p].")
    checks.finite(phi, "features")
    labels = one_hot_labels(y, phi.shape[:-1], classes, phi.device)
    _biased(labels, weights, bias)
    task = _task(phi, labels, f0, weights, checks.nonnegative(reg, "reg"), bias)
    answer = task.newton(tol, max_steps)
    return _model(task, answer, answer.theta, tol, f0 is not None)


def one_hot_labels(y: Array, side: torch.Size, classes: int | None, device: torch.device | None) -> Tensor:
    """[n, 1] of class 1's probability for two classes in one logit, else [n, c] probabilities."""
    y = torch.as_tensor(y).detach()
    checks.beside(y, device, "y")
    if classes is not None and (not isinstance(classes, int) or classes < 2):
        raise InputError(f"classes={classes!r}; needed: how many there are, at least 2, or None to count those of y.")
    if y.is_complex():
        raise InputError(f"y is {y.dtype}; needed: classes as integers [n], or probabilities [n, c].")
    if y.is_floating_point():
        checks.finite(y, "y")
        sums = y.sum(1) if y.dim() == 2 else y.new_zeros(())
        if y.dim() != 2 or y.shape[1] < 2 or bool((y < 0).any()) or bool(((sums - 1).abs() > 1e-4).any()):
            raise InputError(
                f"y is {y.dtype} of shape {tuple(y.shape)}; needed: classes as integers [n], or probabilities [n, c] "
                "that are at least 0 and sum to 1."
            )
        if classes not in (None, y.shape[1]):
            raise InputError(f"y has probabilities of {y.shape[1]} classes and classes={classes}; needed: the same.")
        # What is left of the sum by rounding would be a force on the bias that nothing balances.
        one_hot = y.double() / y.double().sum(1, keepdim=True)
        if one_hot.shape[1] == 2 and len(side) == 1:
            one_hot = one_hot[:, 1:]
    else:
        if y.dim() != 1:
            raise InputError(f"y has shape {tuple(y.shape)}; needed: one class per sample, [n], as integers from 0.")
        y = y.long()
        coupled = len(side) == 2 and side[1] > 1
        count = classes or (side[1] if coupled else max(2, int(y.max()) + 1 if len(y) else 2))
        if len(y) and (int(y.min()) < 0 or int(y.max()) >= count):
            raise InputError(f"y has classes from {int(y.min())} to {int(y.max())}; needed: from 0 to {count - 1}.")
        if len(y) and int(y.min()) == int(y.max()):
            raise InputError(f"all samples are of class {int(y[0])}; needed: at least two classes.")
        one_hot = F.one_hot(y, count).double()
        if count == 2 and not coupled:
            one_hot = one_hot[:, 1:]
    if len(one_hot) != side[0] or (len(side) == 2 and one_hot.shape[1] != side[1]):
        raise InputError(
            f"y has shape {tuple(y.shape)}; needed: labels of the {list(side)} samples (and outputs) of K."
        )
    return one_hot


def both_columns(labels: Tensor) -> Tensor:
    """Labels with a column for each class."""
    return torch.cat([1 - labels, labels], 1) if labels.shape[1] == 1 else labels


def every_class(labels: Tensor, w: Tensor, fix: str) -> None:
    """Refuse a class without a sample, or without weight [n, 1]: with nothing to hold it, its bias would run off."""
    counts = (w * both_columns(labels)).sum(0)
    empty = (counts == 0).nonzero()[:, 0].tolist()
    if empty:
        names = checks.some([str(c) for c in empty])
        raise InputError(f"y has no sample (of positive weight) of class {names} (of {len(counts)}). {fix}")


def _biased(labels: Tensor, weights: Any, bias: bool) -> None:
    if bias:
        w = sample_weights(weights, len(labels), labels)
        every_class(
            labels, torch.ones_like(labels[:, :1]) if w is None else w[:, None],
            "Its bias would run off to minus infinity: leave the class out (number the others from 0 on; classes= is "
            "how many there are), add samples of it, or fit with bias=False.",
        )  # fmt: skip


def _task(phi: Tensor, labels: Tensor, f0: Array | None, weights: Any, reg: float, bias: bool) -> Task:
    n, q = labels.shape
    begin = torch.zeros_like(labels)
    if f0 is not None:
        begin = same_shape(f0, labels[:, 0] if q == 1 and phi.dim() == 2 else labels, "f0").reshape(n, q)
    w = sample_weights(weights, n, labels)
    return Task(Dense(phi), labels, begin, torch.ones_like(labels[:, :1]) if w is None else w[:, None], reg, bias)


def _model(task: Task, answer: Answer, coefficients: Tensor, tol: float, shifted: bool, **facts: Any) -> LogisticModel:
    q, full = task.labels.shape[1], answer.theta.dim() == 1
    z = task.logits(answer.theta, answer.b)
    alone = q == 1 and not full  # one logit, without an axis of its own
    shape = (-1,) if alone or (full and not facts) else (-1, q)
    model = KernelModel(
        coefficients.reshape(shape), z[:, 0] if alone else z, float(answer.theta.norm()), task.reg, "Newton",
        answer.steps, answer.gradient, shifted, full, **facts,
    )  # fmt: skip
    bias = answer.b[0] if alone else answer.b
    found = LogisticModel(model, bias, max(2, q), float(task.losses(z)), answer.distance)
    if short := answer.shortfall(tol):
        raise DidNotConverge(
            f"Newton's method reached {short}. Give a larger reg= (it was {task.reg:g}), more max_steps or a larger "
            "tol; .solution holds what was found.",
            found,
        )
    return found
