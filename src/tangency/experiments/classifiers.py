"""Six classifiers for small tables of numbers: the NTK's, Gaussian and polynomial support vector machines, a random
forest, and fully connected networks in two initialisations.

Each chooses among its grid by the accuracy on one half of the samples after training on the other (the first of the
best, so the simplest), then is trained on every fold with what it chose.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import cos, pi
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._base.extras import needed
from ..gram.compute import compute
from ..infinite import infinite_ntk
from ..models import initialized, mlp
from .table import Row

Array = np.ndarray
Gram = Callable[[Array, Array], Array]
Initialisation = Literal["he", "ntk"]
MOMENTUM = 0.9


@dataclass(frozen=True)
class Plan:
    """The grids; both networks have the same depths, width and number of steps."""

    # Arora et al. (2020): L = 1..5, the first L' = 0..L-1 layers as they were initialised, C = 10^-2..10^4.
    depths: tuple[int, ...] = (1, 2, 3, 4, 5)
    costs: tuple[float, ...] = tuple(10.0**k for k in range(-2, 5))
    gammas: tuple[float, ...] = tuple(2.0**k for k in range(-10, 5))  # exp(-γ ‖x - z‖²): as many as the NTK has
    # (1 + s x·z)^p: degrees and scales of caret's grid, its costs 1/4..1 widened. Beyond, libsvm takes hours: this
    # kernel has few dimensions, no machine separates the classes, and the dual variables wander up to C.
    degrees: tuple[int, ...] = (1, 2, 3)
    scales: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    few_costs: tuple[float, ...] = tuple(10.0**k for k in range(-2, 3))
    trees: int = 500
    layers: tuple[int, ...] = (1, 2, 3)  # hidden layers of the networks
    # Of each, the smaller stops early, as noisy labels want it; three times the larger diverges (tried on eight sets).
    he_rates: tuple[float, ...] = (0.003, 0.1)
    ntk_rates: tuple[float, ...] = (0.3, 10.0)
    width: int = 256
    steps: int = 500  # of gradient descent on all training samples, with momentum and a rate that falls to zero


@dataclass(frozen=True, eq=False)
class TableSplit:
    """Rows to train on and rows to be asked about, nothing missing, in units of the training rows."""

    x: Array  # [n, d]
    y: Array
    x_test: Array
    y_test: Array


@dataclass(frozen=True, eq=False)
class ClassifierJob:
    """What a classifier gets: one split to choose by, the folds to be measured on."""

    choose: TableSplit
    folds: Sequence[TableSplit]
    classes: int
    plan: Plan
    device: str = "cpu"


def _row(choice: Row, valid: float, accuracies: Sequence[float]) -> Row:
    return {"choice": choice, "validation": valid, "accuracies": list(accuracies)}


# Support vector machines


def ntk_gram(depth: int, frozen: int, x: Array, z: Array) -> Array:
    """Θ of `depth` hidden ReLU layers, the first `frozen` of its layers untrained: [n, m].

    In the published scale, on which the published costs are meant: Σ_0 = x·z, and no factor 2 for ReLU. That is
    d / 2^(depth+1) of the kernel with w_var=2 and 1/d in the first layer.
    """
    net = mlp([x.shape[1], *[1] * depth, 1], bias=False)
    names = [name for name, _ in net.named_parameters()]
    kernel = infinite_ntk(net, w_var=1.0, b_var=0.0, trainable=names[frozen:])
    rows, columns = (torch.from_numpy(v * x.shape[1] ** 0.5) for v in (x, z))
    return compute(kernel, rows, None if z is x else columns, progress=False).dense().numpy()


def gaussian_gram(gamma: float, x: Array, z: Array) -> Array:
    """exp(−γ ‖x − z‖²): [n, m]."""
    squares = (x**2).sum(1)[:, None] + (z**2).sum(1) - 2 * x @ z.T
    return np.exp(-gamma * np.maximum(squares, 0))


def polynomial_gram(degree: int, scale: float, x: Array, z: Array) -> Array:
    """(1 + s x·z)^p: [n, m]."""
    return (1 + scale * (x @ z.T)) ** degree


def ntk_svm(job: ClassifierJob) -> Row:
    """A support vector machine on the NTK; depth, frozen layers and cost are chosen."""

    def grid() -> Iterator[tuple[Row, Gram]]:
        """Each depth with each number of frozen layers, and its Gram."""
        for depth in job.plan.depths:
            for frozen in range(depth):
                yield {"depth": depth, "frozen": frozen}, partial(ntk_gram, depth, frozen)

    return _machine(job, grid(), job.plan.costs)


def gaussian_svm(job: ClassifierJob) -> Row:
    """A support vector machine on the Gaussian kernel; γ and cost are chosen."""
    return _machine(job, (({"gamma": g}, partial(gaussian_gram, g)) for g in job.plan.gammas), job.plan.costs)


def polynomial_svm(job: ClassifierJob) -> Row:
    """A support vector machine on the polynomial kernel; degree, scale and cost are chosen."""
    pairs = [(degree, scale) for degree in job.plan.degrees for scale in job.plan.scales]
    grid = (({"degree": p, "scale": s}, partial(polynomial_gram, p, s)) for p, s in pairs)
    return _machine(job, grid, job.plan.few_costs)


def _machine(job: ClassifierJob, grid: Iterable[tuple[Row, Gram]], costs: Sequence[float]) -> Row:
    """A C-SVM: one Gram for all costs while choosing, one for each fold afterwards."""
    best, chosen, kernel, cost = -1.0, {}, None, 0.0
    for options, gram in grid:
        train_gram, cross = gram(job.choose.x, job.choose.x), gram(job.choose.x_test, job.choose.x)
        for C in costs:
            accuracy, bounded = _svm(train_gram, cross, job.choose, C)
            if accuracy > best:
                best, chosen, kernel, cost = accuracy, {**options, "C": C}, gram, C
            if not bounded:  # no dual variable is at C: the same machine for every larger one
                break
    assert kernel is not None
    accuracies = [_svm(kernel(s.x, s.x), kernel(s.x_test, s.x), s, cost)[0] for s in job.folds]
    return _row(chosen, best, accuracies)


def _svm(train_gram: Array, cross: Array, split: TableSplit, C: float) -> tuple[float, bool]:
    """(the accuracy on the test rows, whether a larger C could change it)."""
    from ..estimators import KernelClassifier

    fit = KernelClassifier("precomputed", loss="svm", reg=1 / C).fit(train_gram, split.y)
    machine = fit.model_  # an SVC of scikit-learn, since loss="svm"
    bounded = bool(np.abs(machine.dual_coef_).max() >= C * (1 - 1e-9))  # type: ignore[union-attr]
    return float((fit.predict(cross) == split.y_test).mean()), bounded


# Random forest


def forest(job: ClassifierJob) -> Row:
    """500 trees; how many columns a node may choose from: √d / 2, √d, 2 √d, d / 2 and d."""
    d = job.choose.x.shape[1]
    counts = sorted({min(d, max(1, round(m))) for m in (d**0.5 / 2, d**0.5, 2 * d**0.5, d / 2, d)})
    tried = {m: _forest(job.plan.trees, m, job.choose) for m in counts}
    best = max(tried, key=lambda m: tried[m])
    return _row({"max_features": best}, tried[best], [_forest(job.plan.trees, best, s) for s in job.folds])


def _forest(trees: int, columns: int, split: TableSplit) -> float:
    with needed("sklearn", "the random forest"):
        from sklearn.ensemble import RandomForestClassifier

    fit = RandomForestClassifier(trees, max_features=columns, random_state=0, n_jobs=1).fit(split.x, split.y)
    return float((fit.predict(split.x_test) == split.y_test).mean())


# Networks


def fit_network(initialisation: Initialisation, job: ClassifierJob) -> Row:
    """All rates at once for each depth, then all folds at once: members of one stacked network."""
    plan = job.plan
    rates = plan.he_rates if initialisation == "he" else plan.ntk_rates
    best, chosen = -1.0, (plan.layers[0], rates[0])
    for depth in plan.layers:
        accuracies = train_networks(initialisation, depth, rates, [job.choose] * len(rates), job)
        for rate, accuracy in zip(rates, accuracies, strict=True):
            if accuracy > best:
                best, chosen = accuracy, (depth, rate)
    accuracies = train_networks(initialisation, chosen[0], [chosen[1]] * len(job.folds), job.folds, job)
    return _row({"depth": chosen[0], "rate": chosen[1]}, best, accuracies)


def initial(initialisation: Initialisation, sizes: Sequence[int]) -> nn.Sequential:
    """Biases at zero; weights N(0, 2/fan-in) (He), or N(0, 1) with 1/√width in the network (NTK)."""
    net = mlp(sizes, parametrization="ntk" if initialisation == "ntk" else "standard")
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif initialisation == "he":
            nn.init.kaiming_normal_(p, nonlinearity="relu")
    return net


def train_networks(
    initialisation: Initialisation, depth: int, rates: Sequence[float], splits: Sequence[TableSplit], job: ClassifierJob
) -> list[float]:
    """The test accuracies of networks trained side by side, the k-th with rate and split k, from seed k."""
    d, plan = splits[0].x.shape[1], job.plan
    unit = d**-0.5 if initialisation == "ntk" else 1.0  # the NTK parametrisation has it at every layer but the first
    sizes = [d, *[plan.width] * depth, job.classes]
    nets = [initialized(lambda: initial(initialisation, sizes), seed=k).to(job.device) for k in range(len(splits))]
    params, _ = torch.func.stack_module_state(nets)
    forward = torch.func.vmap(lambda p, x: torch.func.functional_call(nets[0], p, (x,)))
    x, weight = _stacked([s.x * unit for s in splits], job.device)
    y = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(s.y) for s in splits], batch_first=True).to(job.device)
    weight = weight / weight.sum(1, keepdim=True)
    rate = torch.tensor(rates, device=job.device)
    _descend(params, lambda: forward(params, x), y, weight, rate, plan.steps)
    asked, _ = _stacked([s.x_test * unit for s in splits], job.device)
    with torch.no_grad():
        guess = forward(params, asked).argmax(2).cpu().numpy()
    return [float((g[: len(s.y_test)] == s.y_test).mean()) for g, s in zip(guess, splits, strict=True)]


def _descend(
    params: dict[str, Tensor], logits: Callable[[], Tensor], y: Tensor, weight: Tensor, rate: Tensor, steps: int
) -> None:
    """v ← 0.9 v + ∇L, θ ← θ - rate · v: the sum of the members' losses has each one's own gradient."""
    leaves = list(params.values())
    speed = [torch.zeros_like(p) for p in leaves]
    for step in range(steps):
        z = logits()
        losses = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view_as(weight)
        slopes = torch.autograd.grad((weight * losses).sum(), leaves)
        now = rate * (1 + cos(pi * step / steps)) / 2
        with torch.no_grad():
            for p, v, g in zip(leaves, speed, slopes, strict=True):
                v.mul_(MOMENTUM).add_(g)
                p.sub_(now.view(-1, *[1] * (p.dim() - 1)) * v)


def _stacked(rows: Sequence[Array], device: str) -> tuple[Tensor, Tensor]:
    """(x [m, n, d] filled up with zeros, 1 for each row that is one)."""
    tensors = [torch.from_numpy(v).float() for v in rows]
    x = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(v)) for v in tensors], batch_first=True)
    return x.to(device), real.to(device)


Classifier = Callable[[ClassifierJob], Row]
CLASSIFIERS: dict[str, Classifier] = {
    "NTK": ntk_svm,
    "NN (He init)": partial(fit_network, "he"),
    "NN (NTK init)": partial(fit_network, "ntk"),
    "RF": forest,
    "Gaussian kernel": gaussian_svm,
    "Polynomial kernel": polynomial_svm,
}
