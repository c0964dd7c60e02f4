"""Kernel logistic regression, binary and multinomial, by Newton's method with a line search, in float64.

From a Gram the work is done in the coordinates of its eigenvectors, Φ = V Λ^½; by features in theirs. Either way the
logits are linear in the coefficients, the objective is convex, and the answer says how far it is from the optimum.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result
from .._base.types import Float, Numbers
from ..errors import DidNotConverge, InputError
from ..gram.gram import Gram
from ..linalg.eigen import Spectrum, spectrum
from ..linalg.matrix import Matrix, square
from .model import Decomposable, KernelModel, checked_f0
from .newton import Answer, FeatureDesign, Objective
from .samples import SampleWeights, one_hot_labels, weigh_labels

ABSENT = (
    "Its bias would run off to minus infinity: leave the class out (number the others from 0 on; classes= is how many "
    "there are), add samples of it, or fit with bias=False."
)


@dataclass(frozen=True, eq=False, repr=False)
class LogisticModel(Result):
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
        """‖∇‖ at the answer, relative to that at a = 0."""
        return self.model.residual

    def logits(self, cross: Matrix, f0: Numbers | None = None) -> Tensor:
        """From the Gram of the new samples with the training samples, or from their features."""
        return self.model.predict(cross, f0) + self.bias

    def probabilities(self, cross: Matrix, f0: Numbers | None = None) -> Tensor:
        """Of each class, [m, classes]."""
        return class_probabilities(self.logits(cross, f0))

    def predict(self, cross: Matrix, f0: Numbers | None = None) -> Tensor:
        """The likeliest class of each new sample, [m]."""
        return self.probabilities(cross, f0).argmax(1)


def class_probabilities(z: Tensor) -> Tensor:
    """Of each class, [m, classes], from logits [m], [m, 1] (the log-odds of class 1) or [m, c]."""
    if z.dim() == 1 or z.shape[1] == 1:
        return torch.stack([torch.sigmoid(-z), torch.sigmoid(z)], 1).reshape(-1, 2)
    return torch.softmax(z, 1)


def logistic(
    K: Decomposable,
    y: Numbers,
    *,
    reg: float,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
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
    gram, labels, w = labelled_gram(K, y, sample_weights, bias, classes)
    return fit_gram(gram, labels, w, f0, checks.nonnegative(reg, "reg"), bias, cutoff, tol, max_steps).model


class Fitted(NamedTuple):
    """A fit, with the problem that it solves."""

    objective: Objective
    answer: Answer
    model: LogisticModel


def labelled_gram(
    K: Decomposable, y: Numbers, sample_weights: SampleWeights, bias: bool, classes: int | None
) -> tuple[Gram | Spectrum, Tensor, Tensor]:
    """K, labels [n, q] and weights [n, 1], after all that can be checked without computing."""
    gram = K if isinstance(K, Spectrum) else square(K)
    labels = one_hot_labels(y, gram.shape[: len(gram.shape) // 2], classes, gram.device)
    return gram, labels, weigh_labels(labels, sample_weights, ABSENT if bias else "")


def fit_gram(
    gram: Gram | Spectrum,
    labels: Tensor,
    w: Tensor,
    f0: Numbers | None,
    reg: float,
    bias: bool,
    cutoff: float | None,
    tol: float,
    max_steps: int,
) -> Fitted:
    """In the coordinates of the Gram's eigenvectors."""
    side = gram.shape[: len(gram.shape) // 2]
    whole = gram if isinstance(gram, Spectrum) else spectrum(gram, dtype=torch.float64, device=labels.device)
    part = whole.kept(cutoff)
    values, vectors = part.values.double(), part.vectors.double()
    # Features whose products are K: the penalty is then ‖θ‖², and the problem well scaled.
    phi = (vectors * values.sqrt()).reshape(*side, -1)
    objective = _objective(phi, labels, w, f0, reg, bias)
    answer = objective.newton(tol, max_steps)
    # θ = Λ^½ Vᵀ a, and a lies in the span of V.
    a = vectors @ (answer.theta.reshape(len(values), -1) / values.sqrt()[:, None])
    return Fitted(objective, answer, _model(objective, answer, a, f0 is not None, (len(part), whole.cutoff(cutoff))))


def logistic_features(
    features: Numbers,
    y: Numbers,
    *,
    reg: float,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
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
    phi, labels, w = labelled_features(features, y, sample_weights, bias, classes)
    return fit_features(phi, labels, w, f0, checks.nonnegative(reg, "reg"), bias, tol, max_steps).model


def labelled_features(
    features: Numbers, y: Numbers, sample_weights: SampleWeights, bias: bool, classes: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Features in float64, labels [n, q] and weights [n, 1], checked."""
    phi = tree.numbers(features, "features").double()
    if phi.dim() not in (2, 3) or 0 in phi.shape:
        raise InputError(f"features have shape {tuple(phi.shape)}; needed: [n, p] or [n, c, p].")
    checks.finite(phi, "features")
    labels = one_hot_labels(y, phi.shape[:-1], classes, phi.device)
    return phi, labels, weigh_labels(labels, sample_weights, ABSENT if bias else "")


def fit_features(
    phi: Tensor, labels: Tensor, w: Tensor, f0: Numbers | None, reg: float, bias: bool, tol: float, max_steps: int
) -> Fitted:
    """In the coordinates of the features themselves."""
    objective = _objective(phi, labels, w, f0, reg, bias)
    answer = objective.newton(tol, max_steps)
    return Fitted(objective, answer, _model(objective, answer, answer.theta, f0 is not None))


def _objective(phi: Tensor, labels: Tensor, w: Tensor, f0: Numbers | None, reg: float, bias: bool) -> Objective:
    """The objective of labels [n, q] and weights w [n, 1], with logits that start from f₀."""
    n, q = labels.shape
    begin = torch.zeros_like(labels)
    if f0 is not None:
        begin = checked_f0(f0, labels[:, 0] if q == 1 and phi.dim() == 2 else labels, "f0").reshape(n, q)
    return Objective(FeatureDesign(phi), labels, begin, w, reg, bias)


def _model(
    objective: Objective, answer: Answer, coefficients: Tensor, shifted: bool, kept: tuple[int, float] | None = None
) -> LogisticModel:
    """The answer as a model, or `DidNotConverge` that holds it. `kept`: rank and cutoff of a fit from a Gram."""
    q, full = objective.labels.shape[1], answer.theta.dim() == 1
    z = answer.logits
    alone = q == 1 and not full  # one logit, without an axis of its own
    shape = (-1,) if alone or (full and kept is None) else (-1, q)
    rank, cutoff = kept or (None, None)
    model = KernelModel(
        coefficients.reshape(shape), z[:, 0] if alone else z, float(answer.theta.norm()), objective.reg, "Newton",
        answer.steps, answer.gradient, shifted, full, rank, cutoff,
    )  # fmt: skip
    bias = answer.b[0] if alone else answer.b
    fit = LogisticModel(model, bias, max(2, q), answer.loss, answer.distance)
    if answer.shortfall:
        raise DidNotConverge(
            f"Newton's method reached {answer.shortfall}. Give a larger reg= (it was {objective.reg:g}), more "
            "max_steps or a larger tol; .solution holds what was found.",
            fit,
        )
    return fit
