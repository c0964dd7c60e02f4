"""The last layer of a trained network at its convex optimum: what the network's own features are worth.

Qadeer, Engel, Howard, Tsou, Vargas, Stinis and Chiang 2023, arXiv:2310.18612, section 8: a kernel machine with the
conjugate kernel is the network with its last layer retrained.
"""

import copy
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.results import Result, text_table
from .._base.targets import by_name, read_targets, unsure
from .._base.types import Inputs
from ..datasets import Labelled, TrainTest
from ..datasets.accepted import reader_of
from ..datasets.from_torch import is_torch, read
from ..errors import InputError, ModelError, TangencyWarning
from ..models.evaluate import are_classes, inside_parallel, outputs, pair, predictions, same_number
from ..models.losses import LOSSES
from ..regress.samples import SampleWeights, checked_weights
from .gain import Gain, Paired, gain
from .head_choice import Choice, choose_reg
from .head_fit import HeadProblem, solve_head
from .linear_head import ENDINGS, PROBED, LinearHead, find_head, head_features

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LossName = Literal["cross_entropy", "mse"]
# Features of a float32 network carry so many roundings (heuristic); 16-bit ones are not trusted beyond the second.
ROUNDINGS, COARSE = 32, 1e-2


@dataclass(frozen=True, eq=False, repr=False)
class Refit(Result):
    """A copy of a model with its last layer at the optimum, and what that gained.

    `moved`: ‖ΔW‖ / ‖W‖. `kept`: the layer stayed as it was, since what was found is no better once it is rounded to the
    layer's type. `choice`: how reg was chosen, None where it was given.
    """

    model: nn.Module
    layer: str
    loss: LossName
    reg: float
    choice: Choice | None
    moved: float
    kept: bool
    train: Gain
    test: Gain | None

    def __repr__(self) -> str:
        shown = "test" if self.test else "training"
        loss = (self.test or self.train).loss
        return (
            f"Refit(layer {self.layer!r}, {shown} loss {loss.before:.4g} → {loss.after:.4g}, reg {self.reg:.3g}"
            f"{', kept as it was' * self.kept})"
        )

    def table(self) -> str:
        """Losses and accuracies before and after, with the intervals of their change."""
        rows: list[list[object]] = []
        for which, found in (("training", self.train), ("test", self.test)):
            if found is not None:
                rows.append([f"{which} loss", *_cells(found.loss)])
                if found.accuracy is not None:
                    rows.append([f"{which} accuracy", *_cells(found.accuracy)])
        return text_table(["", "before", "after", "change", "95 % interval"], rows)

    def plot(self) -> "Figure":
        """The losses of the samples before and after, and the loss of left-out samples by reg where it was chosen."""
        from .pictures import draw_refit

        return draw_refit(self.test or self.train, "test" if self.test else "training", self.choice, self.reg)


def _cells(found: Paired) -> list[object]:
    interval = "" if found.low is None else f"{found.low:.4g} to {found.high:.4g}"
    return [found.before, found.after, found.change, interval]


def refit_last_layer(
    model: nn.Module,
    data: Any,
    test: Any = None,
    *,
    layer: str | None = None,
    loss: LossName | None = None,
    reg: float | None = None,
    start: Literal["network", "zero"] = "network",
    validation: Any = None,
    sample_weights: SampleWeights = None,
    batch: int = 256,
    resamples: int = 2000,
    seed: int = 0,
    progress: bool = True,
) -> Refit:
    """W, b = argmin Σ_i w_i loss(W φ(x_i) + b, y_i) + reg·‖W − W₀‖² of the last layer, in a copy of the model.

    Real targets have the square loss, classes the cross-entropy, with half the penalty as in `tg.regress.logistic`
    (`loss="mse"` fits classes as one-hot, ±1 for one output). `data`, `test`, `validation`: (x, y), a `Labelled`, a
    torch data set or loader of pairs; a `TrainTest` in place of data and test. `layer`: by default the linear layer
    (or 1 x 1 convolution) that is seen to make the outputs; softmax, sigmoid or a mean over positions may follow it.

    W₀ is the network's own W, so the training loss never rises whatever reg is; `start="zero"` takes W₀ = 0, for a
    last layer that was not trained: then the penalised objective never rises, and a loss that does is warned of. With
    `reg=0` the fit is the optimum itself (of least ‖W − W₀‖). `reg=None` chooses it on samples of `validation`; else
    by leave-one-out (square loss) or by 5 folds, which trust a network that has fitted its training labels too much:
    give samples that it has not seen. The bias is not penalised. Inside, features and fit are in float64 by singular
    values and Newton's method (CKJ of Qadeer et al. 2023, App. B); what is stored has the layer's type. `resamples`:
    of the test samples, for 95 % intervals. Cost: a forward pass over all samples and about 6 n d² for d features.

    >>> import tangency as tg
    >>> x = torch.randn(200, 2)
    >>> y = (x[:, 0] * x[:, 1] > 0).long()
    >>> net = tg.models.initialized(lambda: tg.models.mlp([2, 64, 2]), seed=0)
    >>> found = tg.refit_last_layer(net, (x[:150], y[:150]), (x[150:], y[150:]), progress=False)
    >>> found.train.loss.after < found.train.loss.before
    True
    """
    given, test = _two_sets(data, test)
    asked = _checked(reg, validation, start, batch, resamples)
    copied = _copied(model)
    (x, y), names = _suited(given, "data", copied, progress), _class_names(given)
    reader = _Reader(copied, find_head(copied, x, layer), start, batch, progress)
    known = reader.read(x, y, loss, "training samples", sample_weights)
    parts = [
        None if part is None else (*_suited(part, which, copied, progress, names), known.loss, f"{which} samples")
        for part, which in ((validation, "validation"), (test, "test"))
    ]
    held, new = (None if part is None else reader.read(*part) for part in parts)
    choice = None
    if asked is None:
        choice = choose_reg(known.problem, None if held is None else held.problem, seed, progress)
        asked = choice.best
    found = reader.refit(x, known, new, asked, resamples, seed)
    for own, given in zip(copied.buffers(), inside_parallel(model).buffers(), strict=True):
        own.copy_(given)  # forward() may write to them
    _warn_if_raised(found)
    return replace(found, choice=choice)


def _checked(reg: object, validation: object, start: str, batch: int, resamples: int) -> float | None:
    """The reg that was asked for, after all options have been looked at."""
    checks.choice(start, "start", ("network", "zero"))
    asked = None if reg is None else checks.nonnegative(reg, "reg")
    if asked is not None and validation is not None:
        raise InputError(f"reg={asked:g} and validation=, by which reg is chosen, are both given; needed: one of them.")
    for value, name in ((batch, "batch"), (resamples, "resamples")):
        checks.positive(value, name, "how many")
    return asked


def _warn_if_raised(found: Refit) -> None:
    """Say that the loss itself rose, which a penalty on the whole weights may do."""
    if found.train.loss.change > 0:
        warnings.warn(
            f"the training loss rose from {found.train.loss.before:.4g} to {found.train.loss.after:.4g}: with "
            f"start='zero' reg={found.reg:.3g} holds the weights near 0. Give a smaller reg, or start='network'.",
            TangencyWarning,
            stacklevel=3,
        )


@dataclass(frozen=True, eq=False)
class _Known:
    """Samples as the last layer sees them: their problem, features as they came, logits before, and their classes."""

    problem: HeadProblem
    phi: Tensor
    before: Tensor  # [n, c]
    loss: LossName
    classes: Tensor | None

    def gain(self, head: LinearHead, draws: int, seed: int) -> Gain:
        """By the weights that the head has now."""
        after = head.logits(self.phi)
        losses = self.problem.losses(self.before), self.problem.losses(after)
        right = None
        if self.classes is not None:
            right = predictions(self.before) == self.classes, predictions(after) == self.classes
        return gain(losses, right, self.problem.w, draws, seed)


def _two_sets(data: Any, test: Any) -> tuple[Any, Any]:
    """Training and test samples out of what may be both."""
    both = isinstance(data, TrainTest) or (
        isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Labelled) for part in data)
    )
    if not both:
        return data, test
    if test is not None:
        raise InputError("data is a training and a test set, and test= is given too; needed: one test set.")
    return data[0], data[1]


def _class_names(data: Any) -> tuple[str, ...] | None:
    """How the classes of (x, y) are numbered that are given by name."""
    named = isinstance(data, (tuple, list)) and len(data) == 2 and by_name(data[1])
    return read_targets(data[1], "the y of data").names if named else None


def _samples(data: Any, name: str, progress: bool, names: tuple[str, ...] | None) -> tuple[Inputs, Tensor]:
    """Inputs and what is said of them, checked against each other; classes by name as in `names`."""
    if isinstance(data, Labelled):
        x, y = pair(data, None, f"{name}: ")
    elif is_torch(data):
        x, y = pair(*read(data, name, progress)[:2], f"{name}: ")
    elif isinstance(data, (tuple, list)) and len(data) == 2:
        called = by_name(data[1])
        if called != (names is not None):
            raise InputError(
                f"the classes of data are {'names' if names else 'numbers'}, those of {name} "
                f"{'names' if called else 'numbers'}; needed: the same."
            )
        y = read_targets(data[1], f"the y of {name}", names=names).values if called else data[1]
        x, y = pair(data[0], y, f"{name}: ")
    else:
        what = f"{type(data).__name__} of {len(data)}" if isinstance(data, (tuple, list)) else type(data).__name__
        raise InputError(
            f"{name} is a {what}; needed: (x, y), tangency.datasets.Labelled, or a torch Dataset or DataLoader of such "
            f"pairs.{reader_of(data)}"
        )
    tree.check(x, f"the x of {name}")
    same_number(x, y, f"the y of {name}")
    return x, y


def _suited(
    data: Any, name: str, model: nn.Module, progress: bool, names: tuple[str, ...] | None = None
) -> tuple[Inputs, Tensor]:
    x, y = _samples(data, name, progress, _class_names(data) if name == "data" else names)
    return tree.suited(x, model), y


def _copied(model: nn.Module) -> nn.Module:
    """A copy with memory of its own."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module.")
    try:
        return copy.deepcopy(inside_parallel(model))
    except Exception as e:  # whatever a module of the user's holds: a lock, a file, a tensor with a graph
        raise ModelError(
            f"the model cannot be copied ({type(e).__name__}: {e}), and refitting leaves the original as it is. "
            "Needed: a model that copy.deepcopy takes; detach tensors that it keeps."
        ) from e


@dataclass(frozen=True, eq=False)
class _Reader:
    """Brings samples before the last layer."""

    model: nn.Module
    head: LinearHead
    start: Literal["network", "zero"]
    batch: int
    progress: bool

    def read(self, x: Inputs, y: Tensor, loss: LossName | None, what: str, weights: SampleWeights = None) -> _Known:
        """The problem of these samples: their features, targets and first logits. `what` they are, in messages."""
        head = self.head
        if loss is None:
            _check_meant(y, what)
        name: LossName = ("cross_entropy" if are_classes(y) else "mse") if loss is None else loss
        checks.choice(name, "loss", get_args(LossName))
        _check_ending(head, name)
        wide = head.weight.double()[:0].new_zeros(len(y), len(head.weight))
        if name == "mse" and y.is_floating_point() and y.dim() == 1 and wide.shape[1] == 1:
            y = y[:, None]
        targets = LOSSES[name].targets(y.to(wide.device), wide, 0.0).double()
        phi = head_features(self.model, head, x, self.batch, self.progress, what)
        before = head.logits(phi)
        w = checked_weights(weights, len(phi), before)
        eps = torch.finfo(phi.dtype).eps
        rounding = max(max(phi.shape) * torch.finfo(torch.float64).eps, min(ROUNDINGS * eps, COARSE))
        problem = HeadProblem(
            phi.double(), targets, before if self.start == "network" else torch.zeros_like(before),
            torch.ones_like(before[:, 0]) if w is None else w, head.bias is not None, name == "mse", rounding,
        )  # fmt: skip
        return _Known(problem, phi, before, name, y.to(before.device) if are_classes(y) else None)

    def refit(self, x: Inputs, known: _Known, new: _Known | None, reg: float, resamples: int, seed: int) -> Refit:
        """Solve, put the weights into the layer, and measure."""
        head, old = self.head, self.head.weight.clone()
        kept = _put(head, known, reg, self.start)
        _check_put(self.model, head, x, known)
        moved = float((head.weight - old).double().norm() / old.double().norm().clamp_min(1e-300))
        gains = known.gain(head, 0, seed), None if new is None else new.gain(head, resamples, seed)
        return Refit(self.model, head.name, known.loss, reg, None, moved, kept, *gains)


def _check_meant(y: Tensor, what: str) -> None:
    """Refuse real numbers of which nobody can say whether they are classes."""
    why = unsure(y) if y.is_floating_point() else ""
    if not why and (not y.is_floating_point() or not bool(((y == 0) | (y == 1)).all())):
        return
    classes = "y.long()" if y.dim() < 2 else "y[:, 0].long()" if y.shape[1] == 1 else "y.argmax(1)"
    raise InputError(
        f"the y of the {what} is {y.dtype} and {why or 'all of it is 0 or 1'}. If these are classes, give {classes}; "
        "if they are real targets, loss='mse'."
    )


def _check_ending(head: LinearHead, loss: LossName) -> None:
    """Refuse a softmax over one output and a sigmoid over several, and one of these under the square loss."""
    if loss == "mse" and head.ending:
        raise InputError(
            f"the model ends in a {head.ending}, and the square loss is of its outputs; needed: classes and "
            "loss='cross_entropy', or the model without it."
        )
    one, single = len(head.weight) == 1, head.ending in ("sigmoid", "logsigmoid")
    if head.ending and one != single:
        raise ModelError(
            f"the model has {len(head.weight)} output{'s' * (not one)} and ends in a {head.ending}; needed: a softmax "
            "over several classes, or a sigmoid over one output. Give the model without it for loss='mse'."
        )


def _put(head: LinearHead, known: _Known, reg: float, start: str) -> bool:
    """Solve and put the weights into the head; whether they were left as they are, since rounding spoils the others."""
    problem = known.problem
    old, bias = head.weight.clone(), None if head.bias is None else head.bias.clone()
    first = old.double() if start == "network" else torch.zeros_like(old).double()
    at = torch.zeros_like(first[:, 0]) if bias is None or start == "zero" else bias.double()
    delta, beta = solve_head(problem, reg)
    head.put(first + delta.T, None if bias is None else at + beta)
    reached = problem.objective(head.logits(known.phi), (head.weight.double() - first).T, reg)
    if reached <= problem.objective(known.before, (old.double() - first).T, reg):
        return False
    head.put(old, bias)
    return True


def _check_put(model: nn.Module, head: LinearHead, x: Inputs, known: _Known) -> None:
    """Refuse a model whose outputs are not what its last layer should give by now."""
    z = head.logits(known.phi)
    far = z.abs().amax(1).topk(min(PROBED, len(z))).indices  # where a clamp would be seen
    out = outputs(model, tree.take(x, far.cpu()), batch=PROBED).double()
    z, phi = z[far], known.phi[far].double()
    scale = float(z.abs().max()) + float(phi.norm(dim=1).max() * head.weight.double().norm())
    z = ENDINGS[head.ending](z) if head.ending else z
    tolerance = 100 * torch.finfo(known.phi.dtype).eps
    if float((out.reshape(z.shape) - z).abs().max()) > min(tolerance, 0.05) * scale:
        raise ModelError(
            f"with other weights in layer {head.name!r} the model does not give W φ + b: something depends on that "
            "layer besides its outputs. Name another layer, or give a model whose last layer stands alone."
        )
