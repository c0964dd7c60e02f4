"""The kernel generalised linear model: logits W κ(x, X) + b, fitted to the labels that the network was trained on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._base import checks
from .._base.memory import batch_budget
from .._base.progress import bar
from .._base.types import Float
from ..errors import DidNotConverge, InputError
from ..gram.gram import DenseGram, Gram
from ..linalg.eigen import spectrum, top
from ..linalg.matrix import Matrix, square
from ..regress.logistic import LogisticModel, both_columns, every_class, logistic, one_hot_labels
from ..regress.model import Array, apply, sample_weights
from ..regress.newton import Answer, Chances, Design, Lead, Task, losses

Penalty = Literal["weights", "norm"]
Method = Literal["newton", "sgd"]
# A Gram in float32 is widened once if that takes no more than this, on a GPU no more than a third of what is free
# (heuristics); else in parts at every product.
WIDEN = 4 << 30
# Below this many samples all eigenvectors lead the search, above it the largest 512 (heuristic).
RANK = 512
ABSENT = "Leave the class out (number the others from 0 on: Labelled.only), or add samples of it."


@dataclass(frozen=True, eq=False)
class Surrogate:
    """kGLM(x) = W κ(x, X) + b, class probabilities by softmax. Engel et al. 2024, (1).

    `weights`: Wᵀ [n, c]; two classes have W_1 = −W_0, so that their softmax is the sigmoid of 2·W_1 κ. `loss`:
    Σ_i w_i loss_i. `gradient`: the norm of the objective's gradient at the answer, relative to that at W = 0. Where the
    objective is flat (separated classes, a small reg) a small gradient may be far from the optimum, so the certificate
    is `distance`: how long the next Newton step would be, in the kernel's norm and in the logits of the training
    samples, relative to where it starts (logits below one count as one). None where no such step was made ("sgd").
    """

    weights: Float[Tensor, "n c"]
    bias: Float[Tensor, " c"]
    reg: float
    penalty: str
    method: str
    steps: int
    gradient: float
    loss: float
    distance: float | None = None

    @property
    def classes(self) -> int:
        return len(self.bias)

    def logits(self, cross: Matrix) -> Float[Tensor, "m c"]:
        """From the Gram of the new samples with the training samples [m, n], which may stream from disk."""
        return apply(cross, self.weights, full=False) + self.bias

    def probabilities(self, cross: Matrix) -> Float[Tensor, "m c"]:
        return torch.softmax(self.logits(cross), 1)

    def predict(self, cross: Matrix) -> Tensor:
        """The likeliest class of each new sample, [m]."""
        return self.logits(cross).argmax(1)

    def __repr__(self) -> str:
        n, c = self.weights.shape
        return (
            f"Surrogate({n} samples, {c} classes, reg {self.reg:g} on {self.penalty}, {self.method}: {self.steps} "
            f"steps, gradient {self.gradient:.1e})"
        )


def fit(
    K: Matrix,
    y: Array,
    *,
    reg: float | None = None,
    penalty: Penalty = "weights",
    weights: Any = None,
    classes: int | None = None,
    method: Method = "newton",
    tol: float | None = None,
    max_steps: int | None = None,
    rank: int = RANK,
    seed: int = 0,
    progress: bool = True,
) -> Surrogate:
    """W, b = argmin Σ_i w_i·(−log softmax(W κ(x_i, X) + b)_{y_i}) + (reg/2)·‖W‖², a convex problem.

    Two classes have one logit, v·κ, and (reg/2)·‖v‖²; then W = (−v/2, v/2).

    `K`: the Gram of the training samples, in memory or on disk, of any kernel. `reg`: default `default_reg(K)`.
    `penalty`: "weights" for ‖W‖², as published; "norm" for the kernel's own norm, tr(W K Wᵀ). `weights`: of the
    samples, or "balanced" (each class counts alike). `method`: "newton" reaches `tol` (1e-6) in `gradient` and, down to
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
    if penalty not in ("weights", "norm") or method not in ("newton", "sgd") or (penalty, method) == ("norm", "sgd"):
        raise InputError(
            f"penalty={penalty!r}, method={method!r}; needed: penalty 'weights' with method 'newton' or 'sgd', or "
            "penalty 'norm' with method 'newton'."
        )
    if (max_steps is not None and max_steps < 1) or (tol is not None and not tol > 0):
        raise InputError(f"max_steps={max_steps}, tol={tol}; needed: at least 1, above 0.")
    labels = one_hot_labels(y, torch.Size(gram.shape[:1]), classes, gram.device)
    w = _sample_weights(weights, labels)
    every_class(labels, w, ABSENT)
    if reg is None:
        reg = default_reg(gram, penalty)
    if not checks.nonnegative(reg, "reg") > 0:
        raise InputError(
            "reg=0; needed: a positive reg. Networks separate their training data, and then there is none."
        )
    if penalty == "norm":
        return _by_norm(gram, y, reg, w, classes, tol or 1e-6, max_steps or 200)
    gram = _widened(gram)
    if method == "sgd":
        return _descend(gram, labels, w, reg, tol or 0.1, max_steps or 100, seed, progress)
    return _newton(gram, labels, w, reg, tol or 1e-6, max_steps or 100, rank, progress)


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
    gram = square(K)
    if len(gram.shape) != 2:
        raise InputError(
            f"K has shape {tuple(gram.shape)}; a surrogate has one similarity for each pair of samples, [n, n]: use "
            "tg.trace_ntk or tg.pseudo_ntk (or tg.regress.logistic, which takes full kernels)."
        )
    return gram


def _sample_weights(weights: Any, labels: Tensor) -> Tensor:
    if isinstance(weights, str):
        if weights != "balanced":
            raise InputError(f"weights={weights!r}; needed: a weight for each sample, or 'balanced'.")
        both = both_columns(labels)
        every_class(labels, torch.ones_like(labels[:, :1]), ABSENT)
        return (both @ (len(both) / (both.shape[1] * both.sum(0))))[:, None]
    given = sample_weights(weights, len(labels), labels)
    return torch.ones_like(labels[:, :1]) if given is None else given[:, None]


def _widened(gram: Gram) -> Gram:
    """In float64 from the start where that is cheap; the numbers are the same."""
    limit = WIDEN
    if gram.device is not None and gram.device.type == "cuda":
        limit = batch_budget(gram.device)
    if gram._in_memory and gram.dtype == torch.float32 and 8 * gram.shape.numel() <= limit:
        return DenseGram(gram.dense().double(), symmetric=True)
    return gram


def _basis(gram: Gram, rank: int, progress: bool) -> tuple[Tensor, Tensor]:
    """The largest eigenpairs, good enough to lead a search."""
    n = gram.shape[0]
    if rank < 0:
        raise InputError(f"rank={rank}; needed: how many eigenvectors lead the search, at least 0.")
    if n <= max(2 * rank, 16):
        found = spectrum(gram, dtype=torch.float64)
        count = min(n, max(rank, 1)) if n > 2 * rank else n
        return found.vectors[:, :count], found.values[:count]
    where = gram.device or torch.device("cpu")
    if rank == 0:
        return torch.zeros(n, 0, dtype=torch.float64, device=where), torch.zeros(0, dtype=torch.float64, device=where)
    try:
        found = top(gram, rank, tol=1e-3, progress=progress)
    except DidNotConverge as e:  # what was found leads, too
        found = e.solution  # type: ignore[assignment]
    return found.vectors.double(), found.values.double()


@dataclass(frozen=True, eq=False)
class _KernelDesign(Design):
    """Logits K θ. The Hessian K D K + reg is inverted exactly on the span of `vectors`, and taken for reg elsewhere."""

    gram: Gram
    vectors: Tensor  # [n, r]
    values: Tensor  # [r]

    def zeros(self, q: int) -> Tensor:
        return self.vectors.new_zeros(self.gram.shape[0], q)

    def forward(self, theta: Tensor) -> Tensor:
        return self.gram @ theta

    def adjoint(self, g: Tensor) -> Tensor:
        return self.gram @ g

    def bound(self) -> float:
        return float(self.gram.diag().double().abs().sum())

    def norm(self, theta: Tensor, image: Tensor) -> float:
        return float((theta * image).sum().abs().sqrt())

    def preconditioner(self, bends: Tensor, reg: float) -> Lead:
        r = len(self.values)
        image = torch.cat([self.vectors * self.values, torch.ones_like(bends[:, :1])], 1)  # the bias sees ones
        ridge = torch.full_like(image[0], reg)
        factors = image.new_empty(bends.shape[1], r + 1, r + 1)
        for c in range(bends.shape[1]):  # the coupling between classes is left to the iteration
            small = image.T @ (image * bends[:, c, None])
            ridge[-1] = 1e-10 * small.diagonal()[-1] + torch.finfo(small.dtype).tiny
            factors[c] = _factor(small, ridge)

        def lead(theta: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            inside = self.vectors.T @ theta
            both = torch.cat([inside, b[None]])
            solved = torch.cholesky_solve(both.T[..., None], factors)[..., 0].T
            return self.vectors @ (solved[:r] - inside / reg) + theta / reg, solved[r]

        return lead


def _factor(small: Tensor, ridge: Tensor) -> Tensor:
    """The Cholesky factor of a matrix with a diagonal added; a larger one where rounding asks for it."""
    for more in (0.0, 1e-15, 1e-14, 1e-13, 1e-12, 1e-10):
        lower, failed = torch.linalg.cholesky_ex(small + torch.diag(ridge + more * small.diagonal().max()))
        if not failed:
            return lower
    return torch.diag((small.diagonal() + ridge).sqrt())


def _surrogate(task: Task, answer: Answer, method: str, tol: float) -> Surrogate:
    theta, b = answer.theta, answer.b
    loss = float(task.losses(task.logits(theta, b)))
    if theta.shape[1] == 1:  # one logit z of two classes: −z/2 and z/2
        theta, b = torch.cat([-theta, theta], 1) / 2, torch.cat([-b, b]) / 2
    found = Surrogate(theta, b, task.reg, "weights", method, answer.steps, answer.gradient, loss, answer.distance)
    if short := answer.shortfall(tol):
        raise DidNotConverge(
            f"{method} reached {short}. Give a larger reg= (it was {task.reg:g}), more max_steps or a larger tol; "
            ".solution holds what was found.",
            found,
        )
    return found


def _newton(
    gram: Gram, labels: Tensor, w: Tensor, reg: float, tol: float, max_steps: int, rank: int, progress: bool
) -> Surrogate:
    vectors, values = _basis(gram, rank, progress)
    # Where λ² w/4, the most that the losses bend, is below reg, the Hessian is reg to a factor of two.
    count = int((values.clamp_min(0).square() * float(w.max()) / 4 > reg).sum())
    design = _KernelDesign(gram, vectors[:, :count].contiguous(), values[:count])
    task = Task(design, labels, torch.zeros_like(labels), w, reg, True)
    return _surrogate(task, task.newton(tol, max_steps, progress), "newton", tol)


def _by_norm(gram: Gram, y: Array, reg: float, w: Tensor, classes: int | None, tol: float, max_steps: int) -> Surrogate:
    def surrogate(found: LogisticModel) -> Surrogate:
        a, b = found.model.coefficients, found.bias
        if a.dim() == 1:
            a, b = torch.stack([-a, a], 1) / 2, torch.stack([-b, b]) / 2
        return Surrogate(a, b, reg, "norm", "newton", found.model.steps, found.gradient, found.loss, found.distance)

    try:
        return surrogate(
            logistic(gram, y, reg=reg, bias=True, weights=w[:, 0], classes=classes, tol=tol, max_steps=max_steps)
        )
    except DidNotConverge as e:
        raise DidNotConverge(str(e), surrogate(e.solution)) from None  # type: ignore[arg-type]


def _descend(
    gram: Gram, labels: Tensor, w: Tensor, reg: float, tol: float, epochs: int, seed: int, progress: bool
) -> Surrogate:
    """Stochastic gradient descent on rows of K; the answer is a mean over steps in which the later ones weigh more."""
    n, q = labels.shape
    design = _KernelDesign(gram, labels.new_zeros(n, 0), labels.new_zeros(0))
    task = Task(design, labels, torch.zeros_like(labels), w, reg, True)
    theta, b = labels.new_zeros(n, q), labels.new_zeros(q)
    mean, mean_b, best, idle, steps = theta, b, float("inf"), 0, 0
    # Curvature is at most ½ w (‖k_i‖² for W and 1 for b): the steps are as long as is safe.
    rate_b = 1 / float(w.max())
    height = _height(gram)
    rate = rate_b / max(float(k.square().sum(1).max()) for _, k in _batches(gram, height, seed))
    with bar(epochs, "surrogate", "epoch", show=progress) as step:
        for epoch in range(epochs):
            loss = 0.0
            for rows, k in _batches(gram, height, seed + epoch):
                z = k @ theta + b
                loss += float(losses(z, labels[rows], w[rows]))
                g = w[rows] * Chances.of(z).less(labels[rows]) / len(rows)
                theta, b, steps = theta - rate * (k.T @ g + reg / n * theta), b - rate_b * g.sum(0), steps + 1
                part = 4 / (steps + 3)  # polynomial decay averaging (Shamir & Zhang 2013, η = 3)
                mean, mean_b = mean + part * (theta - mean), mean_b + part * (b - mean_b)
            step(note=f"loss {loss / n:.4f}")
            idle = idle + 1 if loss > (1 - 1e-3) * best else 0
            best = min(best, loss)
            if idle >= 5:
                break
    return _surrogate(task, Answer(mean, mean_b, steps, task.certificate(mean, mean_b), None), "sgd", tol)


def _height(gram: Gram) -> int:
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
