"""What dropping or mending the suspects would do: the kernel machine without them, in closed form."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float, Int
from .labels import Suspects
from .machine import Machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# How many of the suspects are taken away, in steps of the curve.
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True, eq=False, repr=False)
class Cleaning(Result):
    """Test scores of the kernel machine with its `removed` most suspicious samples dropped, or their labels mended.

    Scores are accuracies, for targets root mean square errors. `gain`, `gain_error`: of dropping all suspects (those
    more likely wrong than right), and its standard error over the test samples. `retrained`: scores of networks trained
    on the data as they are, without the suspects, and with mended labels, where that was asked for.
    """

    removed: Int[Tensor, " r"]
    dropped: Float[Tensor, " r"]
    mended: Float[Tensor, " r"]
    suspects: int
    gain: float
    gain_error: float
    score: str
    retrained: dict[str, float] | None = None

    def __repr__(self) -> str:
        return f"Cleaning({self.suspects} suspects dropped: {self.score} {self.gain:+.4f} ± {self.gain_error:.4f})"

    def table(self) -> str:
        """A line for each number of samples."""
        rows = zip(self.removed.tolist(), self.dropped.tolist(), self.mended.tolist(), strict=True)
        return text_table(["samples", f"{self.score}, dropped", "mended"], rows)

    def plot(self) -> "Figure":
        """A figure: the score by how many suspects are dropped or mended."""
        from ..plots import draw_cleaning

        return draw_cleaning(self)


def measure_cleaning(
    machine: Machine,
    suspects: Suspects,
    reg: float,
    targets_of: Callable[[Tensor], Tensor],
    scores_of: Callable[[Tensor], Tensor],
    score: str,
) -> Cleaning:
    """`targets_of`: targets of labels; `scores_of`: each test sample's score, of predictions [m, q]."""
    n, count = machine.n, suspects.count
    sizes = sorted({min(n // 2, round(part * count)) for part in PARTS})
    given, everything = targets_of(suspects.given), torch.ones(n, dtype=torch.bool)
    dropped_scores, mended_targets = [], []
    for size in sizes:
        first = suspects.order[:size]
        kept, mended = everything.clone(), suspects.given.clone()
        kept[first] = False
        mended[first] = suspects.suggested[first]
        dropped_scores.append(scores_of(machine.without(given, reg, kept)))
        mended_targets.append(targets_of(mended))
    # Mended labels are other targets for one and the same system: one fit for all.
    together = machine.without(torch.cat(mended_targets, 1), reg, everything)
    mended_scores = [scores_of(part) for part in together.split(given.shape[1], 1)]
    at = sizes.index(min(n // 2, count))
    change = (dropped_scores[at] - dropped_scores[0]).double()
    summarise = _mean if score == "accuracy" else _root
    gain = float(summarise(dropped_scores[at]) - summarise(dropped_scores[0]))
    error = float(change.std() / len(change) ** 0.5) if len(change) > 1 else 0.0
    if score != "accuracy":  # of a root, by its slope
        error /= 2 * max(float(summarise(dropped_scores[0])), 1e-300)
    return Cleaning(
        torch.tensor(sizes), torch.stack([summarise(s) for s in dropped_scores]),
        torch.stack([summarise(s) for s in mended_scores]), count, gain, error, score,
    )  # fmt: skip


def _mean(scores: Tensor) -> Tensor:
    return scores.double().mean()


def _root(scores: Tensor) -> Tensor:
    return scores.double().mean().sqrt()
