"""Pictures of networks beside the kernel machines made of them: run by run, over training, and one single unit."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from .._base.extras import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"NN": "#7f7f7f", "NTK": "#D55E00", "CK": "#0072B2", "CKJ": "#009E73"}
MARKS = {"NN": "s", "NTK": "^", "CK": "o", "CKJ": "D"}


class DrawnMoment(Protocol):
    """A network at one epoch, and what was made of it."""

    @property
    def epoch(self) -> int:
        """When."""

    @property
    def test(self) -> Mapping[str, float]:
        """Errors or cross-entropies, by name."""

    @property
    def accuracy(self) -> Mapping[str, float] | None:
        """Of classes."""


# By task; of each run its moments.
Courses = Mapping[str, Sequence[Sequence[DrawnMoment]]]


def draw_runs(courses: Courses) -> "Figure":
    """A figure: errors at the end of each run (and accuracies of classes), a panel for each task."""
    panels, axes, figure = _panels(courses)
    for axis, (task, runs, share) in zip(axes, panels, strict=True):
        ends = [run[-1] for run in runs]
        for name in ends[0].test:
            values = [_value(m, name, share) for m in ends]
            place = range(1, len(values) + 1)
            axis.plot(place, values, MARKS[name], ms=4, color=COLOURS[name], label=name, ls="none")
        _named(axis, task, share, "run")
    return figure


def draw_courses(courses: Courses) -> "Figure":
    """A figure: errors over the epochs, means over the runs (and accuracies of classes), a panel for each task."""
    panels, axes, figure = _panels(courses)
    for axis, (task, runs, share) in zip(axes, panels, strict=True):
        # Runs that were stopped at an accuracy have ends of their own; the mean is over the epochs that all have.
        epochs = sorted(set.intersection(*({m.epoch for m in run} for run in runs)))
        for name in runs[0][0].test:
            at = [{m.epoch: _value(m, name, share) for m in run} for run in runs]
            mean = [float(torch.tensor([run[e] for run in at]).mean()) for e in epochs]
            axis.plot(epochs, mean, MARKS[name] + "-", ms=3, lw=1.3, color=COLOURS[name], label=name)
        _named(axis, task, share, "epoch")
    return figure


def draw_unit(dims: Sequence[int], errors: Mapping[str, Sequence[Sequence[float]]]) -> "Figure":
    """A figure: test errors over the dimension d; of each machine a line of medians, and all runs as dots."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    for colour, mark, (name, rows) in zip(COLOURS.values(), MARKS.values(), errors.items(), strict=False):
        middle = [float(torch.tensor(row).median()) for row in rows]
        axis.plot(dims, middle, mark + "-", ms=4, lw=1.4, color=colour, label=name)
        for d, row in zip(dims, rows, strict=True):
            axis.plot([d] * len(row), row, ".", ms=3, color=colour, alpha=0.5)
    axis.axhline(1, color="gray", lw=0.8, ls=":", label="the best constant")
    axis.set(yscale="log", xlabel="dimension d", ylabel="test error, part of the variance")
    axis.set_title("One ReLU unit: network and kernel machines")
    axis.grid(alpha=0.25, which="both", lw=0.4)
    axis.legend(frameon=False, fontsize=8)
    return figure


def _panels(courses: Courses) -> tuple[list[tuple[str, Sequence[Sequence[DrawnMoment]], bool]], list["Axes"], "Figure"]:
    """(task, runs, whether accuracies) of each panel, its axes, the figure."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    classes = any(runs[0][0].accuracy is not None for runs in courses.values())
    down = 2 if classes else 1
    figure = Figure(figsize=(4.2 * len(courses), 0.4 + 3.2 * down), layout="constrained")
    axes = figure.subplots(down, len(courses), squeeze=False)
    panels = [(task, runs, share) for share in (False, True)[:down] for task, runs in courses.items()]
    return panels, list(axes.flat), figure


def _value(moment: DrawnMoment, name: str, share: bool) -> float:
    return 100 * moment.accuracy[name] if share and moment.accuracy is not None else moment.test[name]


def _named(axis: "Axes", task: str, share: bool, along: str) -> None:
    """Title, labels, legend."""
    what = "test accuracy, %" if share else "test error"
    axis.set(yscale="linear" if share else "log", xlabel=along, ylabel=what, title=task)
    axis.grid(alpha=0.25, which="both", lw=0.4)
    axis.legend(frameon=False, fontsize=8)
