"""Pictures of a probing: accuracy by components, components by layer, collapse by layer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .._base.extras import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"neighbours": "#0072B2", "centres": "#D55E00", "svm": "#009E73"}
TITLES = {"neighbours": "nearest neighbours", "centres": "nearest class centre", "svm": "linear SVM"}


class DrawnCollapse(Protocol):
    """NC1, NC2 and NC4 of a layer."""

    @property
    def nc1(self) -> float:
        """Variance within classes over that between."""

    @property
    def nc2_norms(self) -> float:
        """Of the class means."""

    @property
    def nc2_simplex(self) -> float:
        """Of the class means."""

    @property
    def nc4(self) -> float | None:
        """The share of decisions that are not the nearest mean's."""


class DrawnLayer(Protocol):
    """One probed layer."""

    @property
    def name(self) -> str:
        """The module's."""

    @property
    def dims(self) -> Tensor:
        """Numbers of components."""

    @property
    def accuracy(self) -> Mapping[str, Tensor]:
        """Of each classifier."""

    @property
    def collapse(self) -> DrawnCollapse:
        """Of the training samples."""

    def needed(self, classifier: str) -> int:
        """Components for 90 % of the best accuracy."""

    def variance(self, classifier: str) -> float:
        """That these explain."""


class DrawnProbing(Protocol):
    """What `probe` found."""

    @property
    def layers(self) -> Sequence[DrawnLayer]:
        """In the model's order."""

    @property
    def network(self) -> float | None:
        """Its own test accuracy."""

    @property
    def collapsed(self) -> str | None:
        """The first layer from which on the classifiers agree."""


def draw_accuracy(found: DrawnProbing) -> "Figure":
    """A figure: test accuracy by the number of components, a panel for each classifier, a line for each layer."""
    with needed("matplotlib", "a picture"):
        from matplotlib import colormaps

    figure, axes = _figure(3, sharey=True)
    shades = colormaps["viridis"]
    for axis, (kind, title) in zip(axes, TITLES.items(), strict=True):
        for k, layer in enumerate(found.layers):
            shade = shades(0.92 * k / max(1, len(found.layers) - 1))
            axis.plot(layer.dims, 100 * layer.accuracy[kind], "o-", ms=2.2, lw=1.3, color=shade, label=layer.name)
        if found.network is not None:
            axis.axhline(100 * found.network, color="gray", lw=0.8, ls="--", label="the network")
        axis.set(title=title, xlabel="principal components", xscale="log")
    axes[0].set_ylabel("test accuracy, %")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure


def draw_components(found: DrawnProbing) -> "Figure":
    """A figure: components that 90 % of a layer's best accuracy needs, and how much variance they explain."""
    figure, (left, right) = _figure(2)
    for kind, colour in COLOURS.items():
        counts, shares = zip(*((layer.needed(kind), 100 * layer.variance(kind)) for layer in found.layers), strict=True)
        left.plot(counts, "o-", ms=4, lw=1.4, color=colour, label=TITLES[kind])
        right.plot(shares, "o-", ms=4, lw=1.4, color=colour)
    left.set(yscale="log", ylabel="principal components", title="Components for 90 % of the best accuracy")
    right.set(ylim=(0, 102), ylabel="% of the variance", title="Variance that they explain")
    left.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        _layers(axis, found)
    return figure


def draw_collapse(found: DrawnProbing) -> "Figure":
    """A figure: NC1 by layer, and NC2 and NC4."""
    figure, (left, right) = _figure(2)
    seen = [layer.collapse for layer in found.layers]
    left.plot([c.nc1 for c in seen], "o-", ms=4, lw=1.4, color="#0072B2")
    left.set(yscale="log", title="NC1: variance within classes / between")
    right.plot([c.nc2_norms for c in seen], "o-", ms=4, lw=1.4, color="#D55E00", label="NC2: lengths of class means")
    right.plot([c.nc2_simplex for c in seen], "s-", ms=4, lw=1.4, color="#CC79A7", label="NC2: angles to a simplex")
    decided = [c.nc4 for c in seen if c.nc4 is not None]
    if decided:  # of all layers, or of none
        right.plot(decided, "^-", ms=4, lw=1.4, color="#009E73", label="NC4: other than nearest mean")
    right.set(ylim=(0, None), title="0 where collapsed")
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        _layers(axis, found)
    return figure


def _figure(panels: int, sharey: bool = False) -> "tuple[Figure, list[Axes]]":
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(12 if panels == 3 else 10, 3.8), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False, sharey=sharey)[0])
    for axis in axes:
        axis.grid(alpha=0.25, lw=0.4)
    return figure, axes


def _layers(axis: "Axes", found: DrawnProbing) -> None:
    """Names below, and a line where the classifiers begin to agree."""
    names = [layer.name for layer in found.layers]
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    if found.collapsed is not None:
        axis.axvline(names.index(found.collapsed), color="gray", lw=0.8, ls=":")
