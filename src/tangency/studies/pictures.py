"""Pictures of what is learned: accuracies by index, eigenvalues, directions in space and in frequency."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .._base.extras import needed
from .._base.types import Float

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


class DrawnTrial(Protocol):
    """One training."""

    @property
    def accuracy(self) -> float:
        """On test samples."""

    @property
    def iterations(self) -> float:
        """Until the loss was low; nan if never."""

    @property
    def distance(self) -> float:
        """In the weights."""


def draw_learning(names: Sequence[str], runs: Mapping[str, Sequence[DrawnTrial]], until: float) -> "Figure":
    """A figure: test accuracy, steps to a training loss of `until`, and ‖θ − θ₀‖, over the tasks, one line per run.

    Tasks whose names are whole numbers lie where they belong, on a logarithmic axis (index 0 at 1); others one by one.
    """
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    numbers = all(name.isdigit() for name in names)
    places = [int(name) + 1 for name in names] if numbers else list(range(len(names)))
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    titles = ("test accuracy", f"steps to a training loss of {until:g}", "distance from the start, ‖θ − θ₀‖")
    for colour, (label, trials) in zip(COLOURS, runs.items(), strict=False):
        columns = zip(*((t.accuracy, t.iterations, t.distance) for t in trials), strict=True)
        for axis, values in zip(axes, columns, strict=False):
            axis.plot(places, values, "o-", ms=4, lw=1.4, color=colour, label=label)
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="index + 1" if numbers else "task", xscale="log" if numbers else "linear")
        if not numbers:
            axis.set_xticks(places, names)
        axis.grid(alpha=0.25, lw=0.4)
    axes[0].axhline(0.5, color="gray", lw=0.8, ls=":")
    axes[0].legend(frameon=False)
    return figure


def draw_eigenfunctions(values: Float[Tensor, " k"], overlap: Float[Tensor, " k"]) -> "Figure":
    """A figure: eigenvalues, and the cosine of each eigenvector with its sign beside √(2/π), a Gaussian vector's."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    index = range(1, len(values) + 1)
    left.loglog(index, values.cpu(), color=COLOURS[0], lw=1.6)
    left.set(xlabel="index + 1", ylabel="eigenvalue", title="Spectrum")
    right.semilogx(index, overlap.cpu(), color=COLOURS[0], lw=1.0)
    right.axhline((2 / torch.pi) ** 0.5, color="gray", ls="--", lw=0.8, label="√(2/π), Gaussian")
    right.set(xlabel="index + 1", ylabel="⟨φ, sign φ⟩", title="Eigenfunctions and their signs", ylim=(0, 1.02))
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.25, which="both", lw=0.4)
    return figure


def draw_anisotropy(directions: Float[Tensor, "k ..."], values: Float[Tensor, " k"]) -> "Figure":
    """A figure: directions [k, h, w] or [k, c, h, w] as pictures, with the magnitude of their Fourier transforms."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    k = len(directions)
    figure = Figure(figsize=(max(3, 1.15 * k), 2.9), layout="constrained")
    axes = figure.subplots(2, k, squeeze=False)
    images = directions.detach().cpu().double()
    images = images[:, None] if images.dim() == 3 else images
    for i, image in enumerate(images):
        # Channels add up in power; zero frequency in the middle.
        magnitude = torch.fft.fftshift(torch.fft.fft2(image).abs().square().sum(0).sqrt())
        most = float(image.abs().max())
        shown = (image / (2 * most) + 0.5).permute(1, 2, 0) if len(image) == 3 else image[0]
        limits = {} if len(image) == 3 else {"cmap": "RdBu", "vmin": -most, "vmax": most}
        axes[0, i].imshow(shown, interpolation="nearest", **limits)
        axes[1, i].imshow(magnitude, interpolation="nearest", cmap="magma")
        axes[0, i].set_title(f"{i}: σ = {float(values[i]):.2g}", fontsize=8)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0, 0].set_ylabel("space", fontsize=8)
    axes[1, 0].set_ylabel("frequency", fontsize=8)
    return figure
