"""The kernel generalised linear model: logits W κ(x, X) + b, fitted to the labels that the network was trained on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .._base import checks
from .._base.memory import WIDENED_ON_CPU, batch_budget
from .._base.progress import bar
from .._base.results import Result
from .._base.types import Float, Numbers
from ..errors import DidNotConverge, InputError
from ..gram.gram import DenseGram, Gram
from ..linalg.eigen import Spectrum, spectrum, top
from ..linalg.matrix import Matrix, square
from ..regress.logistic_loss import LogisticModel, logistic
from ..regress.model import apply
from ..regress.newton import Answer, Chances, GramDesign, Objective, logistic_loss
from ..regress.samples import SampleWeights, both_columns, one_hot_labels, weigh_labels

Penalty = Literal["weights", "norm"]
SolverName = Literal["newton", "sgd"]
# Below this many samples all eigenvectors lead the search, above it the largest 512 (heuristic).
RANK = 512
LEAVE_OUT = "Leave the class out (number the others from 0 on: Labelled.only), or add samples of it."
# "sgd" stops after this many epochs in which the loss fell by less than this part of itself.
IDLE_EPOCHS, LEAST_FALL = 5, 1e-3


@dataclass(frozen=True, eq=False, repr=False)
class Surrogate(Result):
    """kGLM(x) = W κ(x, X) + b, class probabilities by softmax. Engel et al. 2024, (1).

    `coefficients`: Wᵀ [n, c]; two classes have W_1 = −W_0, so that their softmax is the sigmoid of 2·W_1 κ. `loss`:
    Σ_i w_i loss_i. `gradient`: the norm of the objective's gradient at the answer, relative to that at W = 0. Where the
    objective is flat (separated classes, a small reg) a small gradient may be far from the optimum, so the certificate
    is `distance`: how long the next Newton step would be, in the kernel's norm and in the logits of the training
    samples, relative to where it starts (logits below one count as one). None where no such step was made ("sgd").
    """

    coefficients: Float[Tensor, "n c"]
    bias: Float[Tensor, " c"]
    reg: float
    penalty: str
    solver: str
    steps: int
    gradient: float
    loss: float
    distance: float | None = None

    UNITS: ClassVar[Mapping[str, str]] = {"loss": "nat"}

    @property
    def classes(self) -> int:
        """How many there are."""
        return len(self.bias)

    def logits(self, cross: Matrix) -> Float[Tensor, "m c"]:
        """From the Gram of the new samples with the training samples [m, n], which may stream from disk."""
        return apply(cross, self.coefficients, full=False) + self.bias

    def probabilities(self, cross: Matrix) -> Float[Tensor, "m c"]:
        """Of each class, for each new sample."""
        return torch.softmax(self.logits(cross), 1)

    def predict(self, cross: Matrix) -> Tensor:
        """The likeliest class of each new sample, [m]."""
        return self.logits(cross).argmax(1)

    def __repr__(self) -> str:
        n, c = self.coefficients.shape
        return (
            f"Surrogate({n} samples, {c} classes, reg {self.reg:g} on {self.penalty}, {self.solver}: {self.steps} "
            f"steps, gradient {self.gradient:.1e})"
        )


def fit(
    K: Matrix,
    y: Numbers,
    *,
    reg: float | None = None,
    penalty: Penalty = "weights",
    sample_weights: SampleWeights | str = None,
    classes: int | None = None,
    solver: SolverName = "newton",
    tol: float | None = None,
    max_steps: int | None = None,
    rank: int = RANK,
    seed: int = 0,
    progress: bool = True,
) -> Surrogate:
    """W, b = argmin Σ_i w_i·(−log softmax(W κ(x_i, X) + b)_{y_i}) + (reg/2)·‖W‖², a convex problem.

    Two classes have one logit, v·κ, and (reg/2)·‖v‖²; then W = (−v/2, v/2).
    `K`: the Gram of the training samples, in memory or on disk, of any kernel. `reg`: default `default_reg(K)`.
    `penalty`: "weights" for ‖W‖², as published; "norm" for the kernel's own norm, tr(W K Wᵀ). `sample_weights`: of the
    samples, or "balanced" (each class counts alike). `solver`: "newton" reaches `tol` (1e-6) in `gradient` and, down to
    1e-6, in `distance`, or raises; preconditioned by the `rank` largest eigenvectors. "sgd" steps on random rows,
    holding few of them at a time, until the loss falls by less than 1e-3 of itself in five epochs, or for `max_steps`
    (100) of them. It stops before the optimum, as the published surrogates do; with a `gradient` above `tol` (0.1;
    float("inf") to take what comes) it raises. Engel et al. 2024, (1).

    >>> import tangency as tg
    >>> x, y = torch.randn(60, 3).double(), torch.randint(3, (60,))
    >>> fit = tg.surrogate.fit(x @ x.T, y)
    >>> fit.distance < 1e-6, fit.probabilities(x[:5] @ x.T).shape
    (True, torch.Size([5, 3]))
    """
    gram = _pairs(K)
    if penalty not in ("weights", "norm") or solver not in ("newton", "sgd") or (penalty, solver) == ("norm", "sgd"):
        raise InputError(
            f"penalty={penalty!r}, solver={solver!r}; needed: penalty 'weights' with solver 'newton' or 'sgd', or "
            "penalty 'norm' with solver 'newton'."
        )
    if (max_steps is not None and max_steps < 1) or (tol is not None and not tol > 0):
        raise InputError(f"max_steps={max_steps}, tol={tol}; needed: at least 1, above 0.")
    labels = one_hot_labels(y, torch.Size(gram.shape[:1]), classes, gram.device)
    if isinstance(sample_weights, str):
        w = _balanced(labels, sample_weights)
    else:
        w = weigh_labels(labels, sample_weights, LEAVE_OUT)
    reg = default_reg(gram, penalty) if reg is None else reg
    # NaN, too, is refused by the check; 0 is a number, but leaves no minimum.
    if not checks.nonnegative(reg, "reg") > 0:
        raise InputError(
            "reg=0; needed: a positive reg. Networks separate their training data, and then there is none."
        )
    if penalty == "norm":
        return _by_norm(gram, y, reg, w, classes, tol or 1e-6, max_steps or 200)
    gram = _widened(gram)
    if solver == "newton":
        return _newton(gram, labels, w, reg, tol or 1e-6, max_steps or 100, rank, progress)
    # No eigenvectors: nothing leads the steps on rows.
    design = GramDesign(gram, labels.new_zeros(len(labels), 0), labels.new_zeros(0))
    objective = Objective(design, labels, torch.zeros_like(labels), w, reg, True)
    return _descend(gram, objective, tol or 0.1, max_steps or 100, seed, progress)


def default_reg(K: Matrix, penalty: Penalty = "weights", alpha: float = 1e-4) -> float:
    """α·n·s² (α·n·s for the kernel's norm), s the mean of K's diagonal: `alpha` per sample, by default as published.

    So a multiple of K has the same predictions.

    >>> round(default_reg(2 * torch.eye(50)), 6)
    0.02
    """
    gram = _pairs(K)
    scale = float(gram.diag().double().mean())
    return alpha * gram.shape[0] * (scale**2 if penalty == "weights" else scale)


def _pairs(K: Matrix) -> Gram:
    """K as a Gram [n, n]; refuses full kernels."""
    gram = square(K)
    if len(gram.shape) != 2:
        raise InputError(
            f"K has shape {tuple(gram.shape)}; a surrogate has one similarity for each pair of samples, [n, n]: use "
            "tg.trace_ntk or tg.pseudo_ntk (or tg.regress.logistic, which takes full kernels)."
        )
    return gram


def _balanced(labels: Tensor, sample_weights: str) -> Tensor:
    """Weights [n, 1] with which each class counts alike, as scikit-learn has them: n / (classes · samples of it)."""
    if sample_weights != "balanced":
        raise InputError(f"sample_weights={sample_weights!r}; needed: a weight for each sample, or 'balanced'.")
    weigh_labels(labels, None, LEAVE_OUT)  # before the division by a class's count
    columns = both_columns(labels)
    return (columns @ (len(columns) / (columns.shape[1] * columns.sum(0))))[:, None]


def _widened(gram: Gram) -> Gram:
    """In float64 from the start where that is cheap, else in parts at every product; the numbers are the same."""
    limit = WIDENED_ON_CPU
    if gram.device is not None and gram.device.type == "cuda":
        limit = batch_budget(gram.device)
    if gram._in_memory and gram.dtype == torch.float32 and 8 * gram.shape.numel() <= limit:
        return DenseGram(gram.dense().double(), symmetric=True)
    return gram


def _newton(
    gram: Gram, labels: Tensor, w: Tensor, reg: float, tol: float, max_steps: int, rank: int, progress: bool
) -> Surrogate:
    """By Newton's method, led by the Gram's largest eigenvectors."""
    vectors, values = _basis(gram, rank, labels.device, progress)
    # Where λ² w/4, the most that the losses bend, is below reg, the Hessian is reg to a factor of two.
    count = int((values.clamp_min(0).square() * float(w.max()) / 4 > reg).sum())
    design = GramDesign(gram, vectors[:, :count].contiguous(), values[:count])
    objective = Objective(design, labels, torch.zeros_like(labels), w, reg, True)
    return _surrogate(objective.newton(tol, max_steps, progress), objective.reg, "newton")


def _basis(gram: Gram, rank: int, where: torch.device, progress: bool) -> tuple[Tensor, Tensor]:
    """The largest eigenpairs, vectors [n, r] and values [r], good enough to lead a search; `where` the labels lie."""
    n = gram.shape[0]
    if rank < 0:
        raise InputError(f"rank={rank}; needed: how many eigenvectors lead the search, at least 0.")
    if n <= max(2 * rank, 16):  # then all of them cost no more than some
        pairs = spectrum(gram, dtype=torch.float64, device=where)
        count = min(n, max(rank, 1)) if n > 2 * rank else n
        return pairs.vectors[:, :count], pairs.values[:count]
    if rank == 0:
        return torch.zeros(n, 0, dtype=torch.float64, device=where), torch.zeros(0, dtype=torch.float64, device=where)
    try:
        pairs = top(gram, rank, tol=1e-3, device=where, progress=progress)
    except DidNotConverge as e:  # what was found leads, too
        if not isinstance(e.solution, Spectrum):
            raise
        pairs = e.solution
    return pairs.vectors.double(), pairs.values.double()


def _surrogate(answer: Answer, reg: float, solver: SolverName) -> Surrogate:
    """The answer as a surrogate; raises if it is not as exact as was asked for."""
    theta, b = answer.theta, answer.b
    if theta.shape[1] == 1:  # one logit z of two classes: −z/2 and z/2
        theta, b = torch.cat([-theta, theta], 1) / 2, torch.cat([-b, b]) / 2
    surrogate = Surrogate(theta, b, reg, "weights", solver, answer.steps, answer.gradient, answer.loss, answer.distance)
    if answer.shortfall:
        raise DidNotConverge(
            f"{solver} reached {answer.shortfall}. Give a larger reg= (it was {reg:g}), more max_steps or a larger "
            "tol; .solution holds what was found.",
            surrogate,
        )
    return surrogate


def _by_norm(
    gram: Gram, y: Numbers, reg: float, w: Tensor, classes: int | None, tol: float, max_steps: int
) -> Surrogate:
    """Kernel logistic regression, whose penalty is the kernel's norm, in the form of a surrogate."""

    def surrogate(model: LogisticModel) -> Surrogate:
        """The same machine."""
        a, b, core = model.model.coefficients, model.bias, model.model
        if a.dim() == 1:  # one logit of two classes, as in `_surrogate`
            a, b = torch.stack([-a, a], 1) / 2, torch.stack([-b, b]) / 2
        return Surrogate(a, b, reg, "norm", "newton", core.steps, model.gradient, model.loss, model.distance)

    try:
        return surrogate(
            logistic(gram, y, reg=reg, bias=True, sample_weights=w[:, 0], classes=classes, tol=tol, max_steps=max_steps)
        )
    except DidNotConverge as e:
        if not isinstance(e.solution, LogisticModel):
            raise
        raise DidNotConverge(str(e), surrogate(e.solution)) from None


def _descend(gram: Gram, objective: Objective, tol: float, epochs: int, seed: int, progress: bool) -> Surrogate:
    """Stochastic gradient descent on rows of K; the answer is a mean over steps in which the later ones weigh more."""
    labels, w, reg = objective.labels, objective.w, objective.reg
    n, q = labels.shape
    theta, b = labels.new_zeros(n, q), labels.new_zeros(q)
    mean, mean_b, best, idle, steps = theta, b, float("inf"), 0, 0
    # Curvature is at most ½ w (‖k_i‖² for W and 1 for b): the steps are as long as is safe.
    rate_b = 1 / float(w.max())
    height = _band_height(gram)
    # A pass over all rows, only to measure them.
    rate = rate_b / max(float(k.square().sum(1).max()) for _, k in _batches(gram, height, seed))
    with bar(epochs, "surrogate", "epoch", show=progress) as step:
        for epoch in range(epochs):
            loss = 0.0
            for rows, band in _batches(gram, height, seed + epoch):
                k = band.to(theta)  # of one on disk: where the labels lie
                z = k @ theta + b
                loss += float(logistic_loss(z, labels[rows], w[rows]))
                g = w[rows] * Chances.of(z).less(labels[rows]) / len(rows)
                theta, b, steps = theta - rate * (k.T @ g + reg / n * theta), b - rate_b * g.sum(0), steps + 1
                part = 4 / (steps + 3)  # polynomial decay averaging (Shamir & Zhang 2013, η = 3)
                mean, mean_b = mean + part * (theta - mean), mean_b + part * (b - mean_b)
            step(note=f"loss {loss / n:.4f}")
            idle = idle + 1 if loss > (1 - LEAST_FALL) * best else 0
            best = min(best, loss)
            if idle >= IDLE_EPOCHS:
                break
    answer = objective.answer(mean, mean_b, steps, objective.certificate(mean, mean_b), None, tol)
    return _surrogate(answer, objective.reg, "sgd")


def _band_height(gram: Gram) -> int:
    """Rows of K to be held at a time: of one on disk, a row of tiles."""
    if gram._in_memory:
        return gram.shape[0]
    first = next(gram.tiles())[0]
    return first.stop - first.start if isinstance(first, slice) else len(first)


def _batches(gram: Gram, height: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random rows of K. Of one on disk, random rows of one row of tiles after the other, each of which is read once."""
    generator = torch.Generator().manual_seed(seed)
    n = gram.shape[0]
    size = max(1, min(256, n // 32))  # (heuristic: some 32 steps an epoch or more)
    if gram._in_memory:
        for rows in torch.randperm(n, generator=generator).split(size):
            yield rows, gram[rows].double()
        return
    bands = torch.arange(n).split(height)
    for number in torch.randperm(len(bands), generator=generator).tolist():
        band = bands[number]
        held = gram[int(band[0]) : int(band[-1]) + 1]
        for part in torch.randperm(len(band), generator=generator).split(size):
            yield band[part], held[part].double()
