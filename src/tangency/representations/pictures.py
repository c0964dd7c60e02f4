"""Pictures of what the rooms of representations find."""

from typing import TYPE_CHECKING

import torch

from .._base.extras import needed
from .gain import Gain
from .head_choice import Choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_refit(found: Gain, which: str, choice: Choice | None, reg: float) -> "Figure":
    """A figure: how many samples have at most some loss, before and after, and left-out losses by reg, where known."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    panels = 1 if choice is None else 2
    figure = Figure(figsize=(6 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    share = torch.arange(1, found.samples + 1) / found.samples
    for losses, name, color in zip(found.losses.cpu(), ("before", "after"), ("#888888", "#3b528b"), strict=True):
        shown = losses.sort().values.clamp_min(1e-16)  # below rounding they say nothing
        axes[0].plot(shown.numpy(), share.numpy(), color=color, lw=1.8, label=name)
    axes[0].set(xscale="log", xlabel=f"loss of a {which} sample", ylabel="share of samples with less")
    axes[0].set_title(f"Mean {which} loss {found.loss.before:.3g} → {found.loss.after:.3g}")
    axes[0].legend(frameon=False)
    if choice is not None:
        axes[1].plot(choice.regs.cpu().numpy(), choice.risks.cpu().numpy(), "o-", ms=4, lw=1.4, color="#3b528b")
        axes[1].axvline(reg, color="#d1495b", lw=1, ls="--", label="chosen")
        axes[1].set(xscale="log", yscale="log", xlabel="reg", ylabel="mean loss", title=f"Choosing reg: {choice.by}")
        axes[1].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.25, which="both", lw=0.4)
    return figure
