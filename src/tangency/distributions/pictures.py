"""Pictures of this room's results; each returns a matplotlib `Figure`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base.extras import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

X, Y, LINE = "#3b528b", "#d1495b", "#888888"
COLOURS = ("#3b528b", "#d1495b", "#2a9d8f", "#e9a03b", "#7b4fa3", "#555555")


def draw_two_sample(null: Tensor, value: float, p: float, witness: tuple[Tensor, Tensor], name: str) -> "Figure":
    """A figure: the value in its null distribution; what each sample says, for both samples."""
    figure, (left, right) = _figure(2)
    left.hist(null.numpy(), 40, color=LINE, alpha=0.6, label="no difference")
    left.axvline(value, color=Y, lw=2, label=f"{name} of these samples")
    left.set(xlabel=name, ylabel="draws", title=f"p = {p:.2g}")
    left.legend(frameon=False)
    _two_histograms(right, witness, ("x", "y"))
    right.set(xlabel="more like x →", ylabel="density", title="Samples")
    return figure


def draw_power(
    sizes: Sequence[int], rates: Mapping[str, Sequence[tuple[float, float, float]]], level: float, what: str
) -> "Figure":
    """A figure: rejection rates (rate, low, high) by sample size, one line for each test."""
    figure, (axis,) = _figure(1)
    for colour, (name, points) in zip(_cycle(len(rates)), rates.items(), strict=True):
        middle, low, high = (list(v) for v in zip(*points, strict=True))
        axis.plot(sizes, middle, "o-", color=colour, ms=4, label=name)
        axis.fill_between(sizes, low, high, color=colour, alpha=0.15, lw=0)
    axis.axhline(level, color=LINE, lw=0.8, ls="--", label=f"level {level:g}")
    axis.set_xscale("log")
    axis.set_xticks(list(sizes), [str(n) for n in sizes])
    axis.minorticks_off()
    axis.set(xlabel="samples of each", ylabel="rejected", title=what)
    axis.legend(frameon=False)
    return figure


def draw_outliers(known: Tensor, asked: Tensor, thresholds: Mapping[float, float], name: str) -> "Figure":
    """A figure: scores of known samples that were held out, and of those asked, with the thresholds."""
    figure, (axis,) = _figure(1)
    _two_histograms(axis, (known, asked), ("known, held out", "asked"))
    for rate, threshold in thresholds.items():
        axis.axvline(threshold, color=LINE, lw=0.9, ls="--")
        axis.annotate(f" {rate:.0%}", (threshold, 0.97), xycoords=("data", "axes fraction"), color=LINE, va="top")
    axis.set(xlabel=f"{name}, larger is stranger", ylabel="density", title="Outlier scores")
    return figure


def _figure(panels: int) -> "tuple[Figure, list[Axes]]":
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.25, lw=0.4)
    return figure, axes


def _two_histograms(axis: "Axes", parts: tuple[Tensor, Tensor], names: tuple[str, str]) -> None:
    """Both over the middle of all values: a few far away would leave the rest one bar."""
    every = torch.cat([v[v.isfinite()] for v in parts]).double().cpu()
    ends = torch.quantile(every[:: 1 + len(every) // 1_000_000], every.new_tensor([0.005, 0.995]))
    low, high = (float(v) for v in ends)
    bins = torch.linspace(low, max(high, low + 1e-12 + 1e-9 * abs(low)), 41, dtype=torch.float64).tolist()
    for part, name, colour in zip(parts, names, (X, Y), strict=True):
        inside = part.double().cpu().clamp(bins[0], bins[-1])
        axis.hist(inside.numpy(), bins, density=True, color=colour, alpha=0.5, label=f"{name} ({len(part)})")
    axis.legend(frameon=False)


def _cycle(count: int) -> list[str]:
    return [COLOURS[k % len(COLOURS)] for k in range(count)]
