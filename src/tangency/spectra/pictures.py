"""Pictures of this room's results; each returns a matplotlib `Figure`."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base.extras import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEFORE, AFTER, LINE = "#3b528b", "#d1495b", "#888888"


def _figure(panels: int) -> "tuple[Figure, list[Axes]]":
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.25, lw=0.4)
    return figure, axes


def _bins(*values: Tensor) -> list[float]:
    """Edges over the middle of all values: few spikes far away would leave the bulk one bin."""
    every = torch.cat(list(values))
    low, high = float(every.min()), float(every.max())
    far = 4 * float(torch.cat([v.sort().values[: max(1, int(0.97 * len(v)))] for v in values]).max())
    ends = low, max(min(high, far), low + 1e-9 * abs(low) + 1e-300)  # values that are all the same have a width, too
    return torch.linspace(*ends, 61, dtype=torch.float64).tolist()


def draw_quantiles(initial: Tensor, trained: Tensor, title: str) -> "Figure":
    """A figure: the Q–Q plot."""
    figure, (axis,) = _figure(1)
    _quantiles(axis, initial, trained, title)
    return figure


def _quantiles(axis: "Axes", initial: Tensor, trained: Tensor, title: str) -> None:
    ends = [float(initial.min()), float(initial.max())]
    axis.plot(ends, ends, color=LINE, lw=0.8)
    axis.plot(initial.numpy(), trained.numpy(), "o", ms=3, color=AFTER)
    axis.set(xlabel="initial quantiles", ylabel="trained quantiles", title=title)


def draw_spectra(
    initial: Tensor, trained: Tensor, edge: float, spikes: Tensor, titles: tuple[str, str], bulks: tuple[Tensor, Tensor]
) -> "Figure":
    """A figure: both histograms with the edge of the bulk and the spikes, and the Q–Q plot of the bulks."""
    figure, (left, right) = _figure(2)
    bins = _bins(initial, trained)
    left.hist(initial.numpy(), bins, density=True, color=BEFORE, alpha=0.55, label="initial")
    left.hist(trained.numpy(), bins, density=True, histtype="step", color=AFTER, lw=1.6, label="trained")
    left.axvline(edge, color=LINE, lw=0.8, ls="--")
    shown = spikes[spikes <= bins[-1]]
    left.plot(shown.numpy(), [0.0] * len(shown), "v", color=AFTER, clip_on=False)
    beyond = len(spikes) - len(shown)
    left.set(xlabel=f"eigenvalue{f' ({beyond} more to the right)' if beyond else ''}", ylabel="density")
    left.set_title(titles[0])
    left.legend(frameon=False)
    _quantiles(right, *bulks, titles[1])
    return figure


def draw_bulk(values: Tensor, law: tuple[Tensor, Tensor], edge: float, title: str) -> "Figure":
    """A figure: eigenvalues of WᵀW / n, with the Marchenko–Pastur law (x and density) and its edge."""
    figure, (axis,) = _figure(1)
    axis.hist(values.numpy(), _bins(values), density=True, color=BEFORE, alpha=0.55)
    axis.plot(law[0].numpy(), law[1].numpy(), color=AFTER, lw=1.6, label="Marchenko–Pastur")
    axis.axvline(edge, color=LINE, lw=0.8, ls="--")
    axis.set(xlabel="eigenvalue of WᵀW / n", ylabel="density", title=title)
    axis.legend(frameon=False)
    return figure


def draw_tail(values: Tensor, line: Tensor, title: str) -> "Figure":
    """A figure: the part of the values above each value, with the fitted part of the first ones."""
    figure, (axis,) = _figure(1)
    axis.loglog(values.numpy(), (torch.arange(1, len(values) + 1) / len(values)).numpy(), "o", ms=3, color=BEFORE)
    axis.loglog(values[: len(line)].numpy(), line.numpy(), color=AFTER, lw=1.6)
    axis.set(xlabel="eigenvalue", ylabel="part of the values above", title=title)
    return figure


def draw_density(nodes: Tensor, weights: Tensor, values: Tensor, exact: int) -> "Figure":
    """A figure: the part of the eigenvalues above each value, and the eigenvalues by rank."""
    figure, (left, right) = _figure(2)
    left.step(nodes.numpy(), weights.cumsum(0).numpy(), where="post", color=BEFORE, lw=1.6)
    left.set(xlabel="eigenvalue", ylabel="part of the eigenvalues above", yscale="log")
    left.set_xscale("log" if bool((nodes > 0).all()) else "linear")
    kept = values[values > 1e-16 * values[0].clamp_min(1e-300)]
    right.loglog(range(1, len(kept) + 1), kept.numpy(), color=BEFORE, lw=1.6)
    right.loglog(range(1, min(exact, len(kept)) + 1), kept[:exact].numpy(), "o", ms=3, color=AFTER)
    right.set(xlabel="rank", ylabel="eigenvalue", title=f"n = {len(values)}; dots: exact")
    return figure


def draw_energy(parts: Tensor) -> "Figure":
    """A figure: the part of the targets by the number of eigenvectors."""
    figure, (axis,) = _figure(1)
    axis.plot(range(1, len(parts) + 1), parts.cpu().numpy(), "o-", ms=3, color=BEFORE)
    axis.set(xlabel="eigenvectors", ylabel="‖Φ y‖ / ‖y‖", ylim=(0, 1.02), title="Energy of the targets")
    return figure


def draw_rotation(steps: Tensor, angles: Tensor, change: Tensor, velocity: Tensor) -> "Figure":
    """A figure: principal angles with the first eigenspace, change and velocity over the steps."""
    figure, (left, middle, right) = _figure(3)
    for angle in angles.T:
        left.plot(steps.numpy(), angle.rad2deg().numpy(), "o-", ms=3, lw=1.2)
    left.set(xlabel="step", ylabel="degrees", title="Angles with the first eigenspace")
    middle.plot(steps.numpy(), change.numpy(), "o-", ms=3, color=BEFORE)
    middle.set(xlabel="step", title="1 − CKA with the first")
    right.plot(steps[1:].numpy(), velocity[1:].numpy(), "o-", ms=3, color=BEFORE)
    right.set(xlabel="step", title="1 − CKA with the one before, per step")
    return figure
