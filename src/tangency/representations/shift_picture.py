"""Two sets of samples in two principal components, as in Fig. 13 and 15 of Tsou et al. (2023)."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base.extras import needed
from .._base.types import Float

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00")
# Points of a grid along each axis, and samples that are drawn one by one, at most.
GRID, DRAWN = 96, 3000
# The parts of the samples that lie within each contour.
INSIDE = (0.9, 0.6, 0.3)


def draw_shift(
    source: Float[Tensor, "n 2"],
    target: Float[Tensor, "m 2"],
    names: tuple[str, str],
    components: tuple[int, int],
    title: str = "",
) -> "Figure":
    """Samples and contours of their densities, in the middle; the densities of each component beside.

    >>> a, b = torch.randn(80, 2).double(), torch.randn(60, 2).double() + 1
    >>> len(draw_shift(a, b, ("before", "after"), (1, 2)).axes)
    3
    """
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(4, 1), height_ratios=(1, 4))
    middle = figure.add_subplot(grid[1, 0])
    top, side = figure.add_subplot(grid[0, 0], sharex=middle), figure.add_subplot(grid[1, 1], sharey=middle)
    axes = [_grid(torch.cat([source[:, k], target[:, k]])) for k in (0, 1)]
    for z, name, color in zip((source, target), names, COLORS, strict=True):
        shown = z[torch.linspace(0, len(z) - 1, min(len(z), DRAWN)).long()]
        size = 14 if len(shown) < 500 else 5
        middle.scatter(
            shown[:, 0].numpy(),
            shown[:, 1].numpy(),
            s=size,
            color=color,
            alpha=0.35,
            lw=0,
            label=f"{name} ({len(z):,})",
        )
        heights = density_grid(z, axes[0], axes[1])
        levels = contour_levels(heights)
        middle.contour(axes[0].numpy(), axes[1].numpy(), heights.T.numpy(), levels, colors=[color], linewidths=1.3)
        for axis, k in ((top, 0), (side, 1)):
            curve = density_line(z[:, k], axes[k])
            along = (axes[k].numpy(), curve.numpy())
            if k == 0:
                axis.fill_between(*along, color=color, alpha=0.25, lw=0)
                axis.plot(*along, color=color, lw=1.5)
            else:
                axis.fill_betweenx(along[0], along[1], color=color, alpha=0.25, lw=0)
                axis.plot(along[1], along[0], color=color, lw=1.5)
    for axis in (top, side):
        axis.set_axis_off()
    middle.set(xlabel=f"component {components[0]}", ylabel=f"component {components[1]}")
    middle.grid(alpha=0.25, lw=0.4)
    middle.legend(frameon=False, fontsize=9, markerscale=3)
    top.set_title(title, fontsize=10)
    return figure


def density_line(z: Float[Tensor, " n"], at: Float[Tensor, " g"]) -> Float[Tensor, " g"]:
    """A Gaussian kernel density estimate at some places, with Scott's bandwidth."""
    return _kernels(z, at, 5).mean(1)


def density_grid(z: Float[Tensor, "n 2"], x: Float[Tensor, " g"], y: Float[Tensor, " h"]) -> Float[Tensor, "g h"]:
    """The same in two dimensions, with a bandwidth along each: a matrix product."""
    return _kernels(z[:, 0], x, 6) @ _kernels(z[:, 1], y, 6).T / len(z)


def contour_levels(heights: Float[Tensor, "g h"]) -> list[float]:
    """Heights above which the given parts of the samples lie, rising."""
    falling = heights.flatten().sort(descending=True).values
    held = falling.cumsum(0) / falling.sum()
    levels = [float(falling[min(int((held < part).sum()), len(falling) - 1)]) for part in INSIDE]
    return sorted(set(levels))


def _kernels(z: Tensor, at: Tensor, power: int) -> Tensor:
    """A Gaussian of each sample, at each place, [g, n]; Scott's bandwidth is σ·n^(−1/(4 + dimensions))."""
    width = float(z.std(correction=0)) * len(z) ** (-1 / power)
    # Where all samples have one value, a narrow peak there.
    width = max(width, float(at[1] - at[0]))
    return (-((at[:, None] - z) / width).square() / 2).exp() / (width * math.sqrt(2 * math.pi))


def _grid(z: Tensor) -> Tensor:
    low, high = (float(v) for v in z.aminmax())
    room = 0.08 * (high - low) or 1.0
    return torch.linspace(low - room, high + room, GRID, dtype=z.dtype)
