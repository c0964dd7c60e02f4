"""A network beside the kernel machines made of it, over its training: NTK, conjugate kernel (CK), and CK by features.

S. Qadeer, A. Engel, A. Howard, A. Tsou, M. Vargas, P. Stinis and T. Chiang 2023, "Efficient kernel surrogates for
neural network-based regression" (arXiv:2310.18612), section 6: functions on an interval, class boundaries in the plane.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._base import checks
from .._base.misfit import in_words
from .._base.progress import Tick, bar
from .._base.results import Result, text_table
from ..errors import InputError
from ..kernels.kernel import Kernel
from ..kernels.ntk import conjugate_kernel, head_ntk, trace_ntk
from ..linalg import spectrum
from ..regress import KernelModel, least_squares, logistic, ridgeless
from .grids import INTERVAL, RECTANGLE, Function, Grids, need_axes, values_of
from .kernel_bounds import Bounds, ClassificationFit, RegressionFit, classification_bounds, regression_bounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNTIL = 0.85  # the training accuracy at which a classifier is stopped
# The span of the CK lies in that of the NTK if no direction of it leaves by more than this (heuristic: ten times √ε).
NESTED = 1.5e-7
# Classes that are separated have no optimum without a penalty; this one is far below what the data say (heuristic).
REG = 1e-4


@dataclass(frozen=True, eq=False, repr=False)
class Moment(Result):
    """A network after so many epochs, and the kernel machines made of it then: numbers by "NN", "NTK", "CK", "CKJ".

    Of functions, `train` and `test` are the weighted norms ‖f − f̂‖ on both grids; of classes the cross-entropies,
    summed over the nodes. `accuracy`: on the test grid, for classes. `rank`: how many directions a fit has kept.
    """

    epoch: int
    train: Mapping[str, float]
    test: Mapping[str, float]
    rank: Mapping[str, int]
    bounds: Bounds
    accuracy: Mapping[str, float] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ConjugateStudy(Result):
    """Moments of one training. `network`: as it was at the end, in float64."""

    moments: tuple[Moment, ...]
    network: nn.Module

    @property
    def last(self) -> Moment:
        """At the end of the training."""
        return self.moments[-1]

    @property
    def violations(self) -> int:
        """Bounds that are promised and false, over all moments."""
        return sum(m.bounds.violations for m in self.moments)

    def table(self) -> str:
        """A line for each moment: errors on the test grid, accuracies of classes."""
        names = list(self.last.test)
        right = [] if self.last.accuracy is None else [f"{name} %" for name in names]
        rows = []
        for m in self.moments:
            shares = [] if m.accuracy is None else [f"{100 * m.accuracy[name]:.1f}" for name in names]
            rows.append([m.epoch, *(f"{m.test[name]:.2e}" for name in names), *shares, m.bounds.violations])
        return text_table(["epoch", *names, *right, "violations"], rows)

    def plot(self) -> "Figure":
        """Errors on the test grid over the training, and accuracies of classes."""
        from .conjugate_pictures import draw_courses

        return draw_courses({"": [self.moments]})


def conjugate_regression(
    model: nn.Module,
    f: Function,
    *,
    grids: Grids = INTERVAL,
    epochs: int = 2400,
    lr: float = 1e-3,
    at: Iterable[int] = (),
    progress: bool = True,
) -> ConjugateStudy:
    """‖f − f̂‖ on a test grid for a network trained on f, and for the best in the spans of its NTK and CK.

    A copy of `model` (one output) is trained in float64 by Adam on Σ w_i (f(x_i) − f_NN(x_i))², all nodes at once.
    After the epochs in `at`, and at the end, its NTK and CK are fitted through their Grams, (14), and the CK through
    its features (CKJ); with epochs=0 the model is taken as it is. Every moment has the bounds (38), (45), (48), (49) of
    these fits. Cost: a moment is an eigendecomposition of two Grams of the training grid. Qadeer et al. 2023.

    >>> import tangency as tg
    >>> net = tg.models.initialized(lambda: tg.models.mlp([1, 16, 16, 1], torch.nn.Tanh), seed=0)
    >>> found = tg.studies.conjugate_regression(net, lambda x: x[:, 0] ** 3, epochs=20)
    >>> found.last.test["CKJ"] < found.last.test["CK"] < found.last.test["NN"], found.violations
    (True, 0)
    """
    need_axes(grids, 1, "one. For several, fit the kernels yourself.")
    net, device = _prepared(model, 1)
    x, z = grids.train.nodes(device), grids.test.nodes(device)
    want = values_of(f, z)
    y, w = grids.coarse(want), grids.train.weights(device)
    _outputs(net, x, (1,))

    def loss() -> Tensor:
        """(8) of the network as it is."""
        return (w * (net(x)[:, 0] - y).square()).sum()

    def moment(epoch: int) -> Moment:
        """All fits of the network as it is."""
        return regression_moment(net, want, grids, epoch)

    moments = _course(net, loss, moment, epochs, lr, at, progress, stop=lambda: False)
    return ConjugateStudy(moments, net)


def regression_moment(net: nn.Module, want: Tensor, grids: Grids, epoch: int) -> Moment:
    """A network [m, 1] in float64 as it is, beside the fits to `want` [m] on the test grid."""
    x, z = grids.train.nodes(want.device), grids.test.nodes(want.device)
    y, w, v = grids.coarse(want), grids.train.weights(want.device), grids.test.weights(want.device)
    ntk, ck = pair(net, 1)
    with torch.no_grad():
        found = {"NN": net(z)[:, 0]}
    fits = {"NTK": Fit.of(ntk, x, z, y, w), "CK": Fit.of(ck, x, z, y, w)}
    found |= {name: fit.values for name, fit in fits.items()}
    through = least_squares(ck.features(x), y, sample_weights=w)
    found["CKJ"] = through.predict(ck.features(z))
    rank = {name: fit.vectors.shape[1] for name, fit in fits.items()} | {"CKJ": through.rank or 0}
    inside, outside = fits["CK"].vectors, fits["NTK"].vectors
    leak = float(torch.linalg.matrix_norm(inside - outside @ (outside.T @ inside), 2))
    bounds = regression_bounds(
        grids, want, fits["CK"].projected(grids), fits["NTK"].projected(grids), nested=leak <= NESTED
    )
    train = {k: float((w * (grids.coarse(p) - y).square()).sum().sqrt()) for k, p in found.items()}
    test = {k: float((v * (p - want).square()).sum().sqrt()) for k, p in found.items()}
    return Moment(epoch, train, test, rank, bounds)


@dataclass(frozen=True, eq=False)
class Fit:
    """The pseudo-inverse (14) of one kernel: on the test nodes, and as the projection that it is on the others."""

    values: Tensor  # [m], on the test nodes
    vectors: Tensor  # [n, rank], of the weighted Gram, which span what can be reached
    model: KernelModel  # of √w y
    root: Tensor  # √w

    @staticmethod
    def of(kernel: Kernel, x: Tensor, z: Tensor, y: Tensor, w: Tensor) -> "Fit":
        """Eigenpairs of W^½ K W^½ above n·ε·λ_1, and what they make of √w y."""
        root = w.sqrt()
        whole = spectrum(root[:, None] * kernel(x) * root)
        model = ridgeless(whole, root * y)
        return Fit(kernel(z, x) @ (root * model.coefficients), whole.kept().vectors, model, root)

    def projected(self, grids: Grids) -> RegressionFit:
        """For the bounds. What was cut off is known up to the rounding of the Gram, about the cutoff again."""
        rounded = float((grids.coarse(self.values) * self.root - self.model.fitted).norm())
        return RegressionFit(self.values, self.model.norm, (2 * (self.model.cutoff or 0.0)) ** 0.5, rounded)


def conjugate_classification(
    model: nn.Module,
    boundary: Function,
    *,
    grids: Grids = RECTANGLE,
    epochs: int = 4000,
    lr: float = 1e-5,
    until: float | None = UNTIL,
    reg: float = REG,
    at: Iterable[int] = (),
    progress: bool = True,
) -> ConjugateStudy:
    """Cross-entropy and accuracy on a test grid of a classifier, and of logistic regression with its NTK and its CK.

    Class 1 is where `boundary` is above 0. A copy of `model` (two outputs, or one: the log-odds) is trained in float64
    by Adam until the training accuracy reaches `until` (None: never), for `epochs` at most. Kernels are those of
    f₁ − f₀, their optima found by Newton's method with the penalty (reg/2)·‖β‖²: where a kernel separates the classes,
    as on most such grids, there is none without. Every moment has the bounds (52), (65), (68). Qadeer et al. 2023.

    >>> import tangency as tg
    >>> net = tg.models.initialized(lambda: tg.models.mlp([2, 16, 2], torch.nn.Tanh), seed=0)
    >>> found = tg.studies.conjugate_classification(net, lambda x: x.sum(1), epochs=5, reg=1e-2)
    >>> found.last.test["CK"] < found.last.test["NN"], found.violations
    (True, 0)
    """
    need_axes(grids, 2, "two, such as Grid((11, 7)).")
    reg, enough = checks.nonnegative(reg, "reg"), float("inf") if until is None else checks.nonnegative(until, "until")
    net, device = _prepared(model, 2)
    x, z = grids.train.nodes(device), grids.test.nodes(device)
    labels = values_of(boundary, z, "boundary") > 0
    known = grids.coarse(labels)
    if known.all() or not known.any():
        raise InputError("all nodes of the training grid are of one class; needed: a boundary that crosses the grid.")
    _outputs(net, x, (1, 2))

    def loss() -> Tensor:
        """(11) of the network as it is."""
        return F.softplus(torch.where(known, -1, 1) * odds(net, x)).sum()

    def done() -> bool:
        """Whether enough of the training nodes are right."""
        with torch.no_grad():
            return float(((odds(net, x) > 0) == known).double().mean()) >= enough

    def moment(epoch: int) -> Moment:
        """Both fits of the network as it is."""
        return classification_moment(net, labels, grids, reg, epoch)

    return ConjugateStudy(_course(net, loss, moment, epochs, lr, at, progress, stop=done), net)


def classification_moment(net: nn.Module, labels: Tensor, grids: Grids, reg: float, epoch: int) -> Moment:
    """A classifier in float64 as it is, beside the fits to `labels` [m] on the test grid."""
    x, z = grids.train.nodes(labels.device), grids.test.nodes(labels.device)
    known = grids.coarse(labels)
    with torch.no_grad():
        found = {"NN": odds(net, z)}
        width = net(z[:1]).shape[1]
    fits = {}
    for name, kernel in zip(("NTK", "CK"), pair(net, width), strict=True):
        fit = logistic(kernel(x), known.long(), reg=reg)
        found[name] = fit.logits(kernel(z, x))
        fits[name] = fit.model
    ck, ntk = (ClassificationFit(found[name], fits[name].norm ** 2) for name in ("CK", "NTK"))
    losses = {k: F.softplus(torch.where(labels, -p, p)) for k, p in found.items()}
    return Moment(
        epoch,
        {k: float(grids.coarse(v).sum()) for k, v in losses.items()},
        {k: float(v.sum()) for k, v in losses.items()},
        {k: fit.rank or 0 for k, fit in fits.items()},
        classification_bounds(grids, labels, ck, ntk, reg=reg, optimal=reg == 0),
        {k: float(((p > 0) == labels).double().mean()) for k, p in found.items()},
    )


def odds(net: nn.Module, x: Tensor) -> Tensor:
    """The log-odds of class 1, [n]: f₁ − f₀ of two outputs, or the only one."""
    out = net(x)
    return out[:, 0] if out.shape[1] == 1 else out[:, 1] - out[:, 0]


def pair(net: nn.Module, outputs: int) -> tuple[Kernel, Kernel]:
    """(NTK, CK) of the one output, or of f₁ − f₀: the CK is the last layer's part of the NTK, (28)."""
    last = [m for m in net.modules() if isinstance(m, nn.Linear)]
    if not last:
        raise InputError(f"{type(net).__name__} has no nn.Linear; needed: a network whose last layer is one.")
    ck = conjugate_kernel(net, bias=last[-1].bias is not None)
    # ∂(f₁ − f₀)/∂W is z in one row of W, −z in the other: each has its part.
    return (trace_ntk(net), ck) if outputs == 1 else (head_ntk(net, (1, 0)), 2 * ck)


def _prepared(model: nn.Module, inputs: int) -> tuple[nn.Module, torch.device]:
    """A copy to be trained, in float64."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module of {inputs} input(s).")
    net = copy.deepcopy(model).double()
    parameter = next(net.parameters(), None)
    if parameter is None:
        raise InputError("the model has no parameters; needed: a network that can be trained.")
    return net, parameter.device


def _outputs(net: nn.Module, x: Tensor, allowed: tuple[int, ...]) -> None:
    """Refuse other outputs than these, and kernels that cannot be had, before the training."""
    few = x[:2]
    with torch.no_grad(), in_words(few):
        out = net(few)
    if not isinstance(out, Tensor) or out.dim() != 2 or out.shape[1] not in allowed:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        needed = " or ".join(map(str, allowed))
        raise InputError(f"the model gave {found} for {tuple(few.shape)}; needed: [n, {needed}].")
    whole, part = (kernel(x) for kernel in pair(net, out.shape[1]))
    rest = torch.linalg.eigvalsh(whole - part)  # E of NTK = CK + E, a kernel too: (30)
    if float(rest[0]) < -1e-9 * float(whole.diagonal().max()):
        raise InputError(
            "the conjugate kernel is no part of the NTK. Needed: a model that ends in an nn.Linear whose weights and "
            "bias can be trained (requires_grad), used once."
        )


def _course(
    net: nn.Module,
    loss: Callable[[], Tensor],
    moment: Callable[[int], Moment],
    epochs: int,
    lr: float,
    at: Iterable[int],
    progress: bool,
    stop: Callable[[], bool],
) -> tuple[Moment, ...]:
    """Adam on all samples at once, with moments after the epochs of `at` and the last."""
    if not isinstance(epochs, int) or epochs < 0 or not checks.nonnegative(lr, "lr"):
        raise InputError(f"epochs={epochs!r}, lr={lr!r}; needed: a whole number from 0, a rate above 0.")
    wanted = set(at) if isinstance(at, Iterable) else {at}
    if any(not isinstance(e, int) or not 0 <= e <= epochs for e in wanted):
        raise InputError(f"at={sorted(wanted, key=str)}; needed: epochs from 0 (before the training) to {epochs}.")
    weights = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=lr)
    moments = []
    with bar(epochs, "training", "epoch", show=progress) as tick:
        for epoch in range(epochs + 1):
            over = epoch == epochs or stop()
            if over or epoch in wanted:
                moments.append(moment(epoch))
            if over:
                break
            _step(loss, weights, optimizer, tick)
    return tuple(moments)


def _step(loss: Callable[[], Tensor], weights: list[nn.Parameter], optimizer: torch.optim.Adam, tick: Tick) -> None:
    """One step of Adam."""
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(), weights)
    for p, g in zip(weights, gradients, strict=True):
        p.grad = g
    optimizer.step()
    tick()
