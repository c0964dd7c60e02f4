"""Pictures of labels bought round by round."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .._base.extras import needed
from .._base.types import Float, Int

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#44AA99", "#999933", "#332288")
BASE = "#777777"


class DrawnGain(Protocol):
    """A difference with an interval."""

    @property
    def mean(self) -> float:
        """Over the seeds."""

    @property
    def low(self) -> float:
        """The lower end."""

    @property
    def high(self) -> float:
        """The upper end."""


def draw_comparison(
    names: Sequence[str],
    labels: Int[Tensor, " r"],
    accuracy: Float[Tensor, "s r"],
    gains: Sequence[Sequence[DrawnGain]],
    base: str,
) -> "Figure":
    """A figure: mean accuracy by labels, and beside it the difference from the strategy `base`, with intervals."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    x, colours = labels.tolist(), iter(COLOURS * len(names))
    for name, curve, gain in zip(names, accuracy.tolist(), gains, strict=True):
        colour = BASE if name == base else next(colours)
        left.plot(x, [100 * v for v in curve], "o-", ms=3.5, lw=1.5, color=colour, label=name)
        if name == base:
            continue
        means, low, high = ([100 * getattr(g, end) for g in gain] for end in ("mean", "low", "high"))
        right.plot(x, means, "o-", ms=3.5, lw=1.5, color=colour, label=name)
        right.fill_between(x, low, high, color=colour, alpha=0.12, lw=0)
    right.axhline(0, color=BASE, lw=1.2)
    left.set(xlabel="labels", ylabel="test accuracy %", title="Accuracy by labels")
    right.set(xlabel="labels", ylabel="points of accuracy", title=f"Gained over {base}")
    left.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.25, lw=0.4)
    return figure
