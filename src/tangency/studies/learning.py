"""Networks and their linearisations, trained alike on one task after another: who learns what, how fast, how far away.

Ortiz-Jiménez, Moosavi-Dezfooli and Frossard 2021, "What can linearized neural networks actually say about
generalization?" (appendix A has the schedule).
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.progress import bar
from .._base.results import Result, text_table
from ..datasets import Labelled, TrainTest
from ..dynamics.linearized import linearize
from ..errors import InputError
from ..models import Recipe, accuracy, fit, outputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The published schedule: SGD with momentum, batches of 128, 100 epochs, a rate that falls linearly from 0.05 to 0.
SCHEDULE = Recipe(epochs=100, batch=128, lr=0.05, momentum=0.9, nesterov=False, schedule="onecycle", warmup=0.0)
UNTIL = 0.01  # the training loss that counts as learned


class Trial(NamedTuple):
    """One training: accuracies, when the training loss came down to `until` (nan: never), how far the weights went.

    `distance`: ‖θ − θ₀‖; `angle`: the cosine distance 1 − ⟨θ, θ₀⟩/(‖θ‖ ‖θ₀‖).
    """

    train_accuracy: float
    accuracy: float  # on the test samples
    loss: float  # of the last epoch's batches
    iterations: float
    distance: float
    angle: float


@dataclass(frozen=True, eq=False, repr=False)
class Learning(Result):
    """What a network and its linearisation learned, task by task.

    `linear` is empty where only the network was trained. `until`: the training loss whose iteration is given.
    """

    names: tuple[str, ...]  # of the tasks; numbers are their indices
    network: tuple[Trial, ...]
    linear: tuple[Trial, ...]
    until: float

    def table(self) -> str:
        """A line for each task: test and training accuracy, iterations and distances of both."""
        runs = {"network": self.network, "linear": self.linear} if self.linear else {"network": self.network}
        head = ["task", *(f"{run} {what}" for what in ("test %", "train %", "steps", "ℓ2", "cos") for run in runs)]
        rows = []
        for k, name in enumerate(self.names):
            trials = [trials[k] for trials in runs.values()]
            columns = [[100 * t.accuracy for t in trials], [100 * t.train_accuracy for t in trials]]
            columns += [[t.iterations for t in trials], [t.distance for t in trials], [t.angle for t in trials]]
            rows.append([name, *(v for column in columns for v in column)])
        return text_table(head, rows)

    def plot(self) -> "Figure":
        """Test accuracy, iterations to the loss, and distances in weights, over the tasks."""
        from .pictures import draw_learning

        return draw_learning(self.names, {"network": self.network, "linearised": self.linear}, self.until)


def learn(
    model: nn.Module,
    tasks: Mapping[object, TrainTest] | Iterable[tuple[object, TrainTest]],
    *,
    recipe: Recipe = SCHEDULE,
    linear: bool = True,
    until: float = UNTIL,
    seed: int = 0,
    progress: bool = True,
) -> Learning:
    """θ_T of f(x; θ), and of f(x; θ₀) + J(x; θ₀)(θ − θ₀), from the same θ₀ and batches, for each task of two classes.

    `tasks`: pairs (name, (train, test)), such as `Eigenfunctions.tasks` and `Anisotropy.tasks` make; they may be made
    one by one. `recipe`: by default the published schedule (SGD, momentum 0.9, batches of 128, 100 epochs, a rate that
    falls linearly from 0.05 to 0). The model needs one output; it is copied for every training and stays as it is.
    The linearisation keeps its batch norms as they are, as published. Cost: a training of the network and, at about
    three times its price, one of the linearisation for each task.

    >>> import tangency as tg
    >>> x = torch.randn(60, 2)
    >>> data = tg.datasets.labelled((x, (x[:, 0] > 0).long())).split(40)
    >>> found = tg.studies.learn(tg.models.mlp([2, 16, 1]), {"sign": data}, recipe=tg.models.Recipe(epochs=30, lr=0.1))
    >>> found.names, found.network[0].train_accuracy > 0.9, found.linear[0].distance > 0
    (('sign',), True, True)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module with one output.")
    if (isinstance(recipe.loss, str) and recipe.loss != "cross_entropy") or callable(recipe.loss):
        raise InputError(f"loss={recipe.loss!r}; needed: 'cross_entropy', the binary one, which `until` is a value of.")
    until = checks.nonnegative(until, "until")
    names, rows = list[str](), list[list[Trial]]()
    pairs = list(tasks.items()) if isinstance(tasks, Mapping) else tasks
    total = len(pairs) if isinstance(pairs, Sequence) else None
    with bar(total, "learning", "task", show=progress) as tick:
        for name, data in pairs:
            kinds = (False, True) if linear else (False,)
            rows.append([attempt(model, data, recipe, linear=kind, until=until, seed=seed) for kind in kinds])
            names.append(str(name))
            tick(note=f"{name}: {rows[-1][0].accuracy:.1%}")
    if not rows:
        raise InputError("tasks is empty; needed: pairs (name, (train, test)) such as Eigenfunctions.tasks makes.")
    return Learning(tuple(names), tuple(r[0] for r in rows), tuple(r[1] for r in rows) if linear else (), until)


def attempt(
    model: nn.Module, data: TrainTest, recipe: Recipe, *, linear: bool, until: float = UNTIL, seed: int = 0
) -> Trial:
    """One training of a copy of the model, or of its linearisation, on one task."""
    known, asked = data
    _check_classes(known)
    net = linearize(_evaluated(model)) if linear else copy.deepcopy(model)
    start = [p.detach().clone() for p in net.parameters() if p.requires_grad]
    out = outputs(net, tree.take(known.x, slice(0, 2)))
    if out.numel() != len(out):
        raise InputError(
            f"the outputs' shape is {tuple(out.shape)}; needed: one output for each sample, the logit of the class 1. "
            "Give the model one output."
        )
    past = fit(net, known.x, known.y, recipe, seed=seed, progress=False)
    end = [p.detach() for p in net.parameters() if p.requires_grad]
    distance, angle = travelled(start, end)
    right = [accuracy(net, part.x, part.y, outputs_are="logits") for part in (known, asked)]
    steps = reached(past.batch_loss, until, math.ceil(len(known) / recipe.batch))
    return Trial(right[0], right[1], float(past.loss[-1]), steps, distance, angle)


def reached(losses: Tensor, until: float, epoch: int) -> float:
    """The first step at which the mean over the last `epoch` batches, all samples once, is at most `until`.

    >>> reached(torch.tensor([4.0, 2.0, 0.0, 0.0]), 1.0, 2), reached(torch.tensor([4.0, 2.0]), 1.0, 2)
    (3.0, nan)
    """
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), losses.double().cumsum(0)])
    means = (sums[epoch:] - sums[:-epoch]) / epoch
    below = (means <= until).nonzero()
    return float(below[0, 0] + epoch) if len(below) else math.nan


def travelled(start: Sequence[Tensor], end: Sequence[Tensor]) -> tuple[float, float]:
    """(‖θ − θ₀‖, 1 − ⟨θ, θ₀⟩/(‖θ‖ ‖θ₀‖)) of two lists of parameters.

    >>> travelled([torch.tensor([3.0, 0.0])], [torch.tensor([3.0, 3.0])])
    (3.0, 0.292...)
    """
    a, b = (torch.cat([p.flatten().double() for p in part]) for part in (start, end))
    return float((b - a).norm()), float(1 - a @ b / (a.norm() * b.norm()))


def _evaluated(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode: batch norms keep the statistics that they have."""
    return copy.deepcopy(model).eval()


def _check_classes(data: Labelled) -> None:
    """Two classes, both of them there: of one there is nothing to learn."""
    counts = data.counts().tolist()
    if len(counts) != 2 or 0 in counts:
        raise InputError(
            f"the training samples of the task have {counts} of the classes {list(data.classes)}; needed: two classes, "
            "and samples of both."
        )
