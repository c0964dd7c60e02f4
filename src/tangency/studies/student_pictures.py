"""Pictures of what two-layer networks learned; each function returns a matplotlib `Figure`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .._base.drawable import DrawnGrids, DrawnRun, DrawnTransition
from .._base.extras import needed
from ..errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
LINES = ("-", "--", "-.", ":")


def draw_transition(found: DrawnTransition) -> "Figure":
    """A figure: λ₁ of W and of the CK, alignments and test error, each over the learning rate of SGD."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    axes = figure.subplots(1, 4)
    lrs = found.lrs
    axes[0].plot(lrs, found.weights, "o-", color=BLUE)
    axes[0].axhline(found.edge, color="black", lw=1, label="end of the bulk")
    axes[1].plot(lrs, found.ck, "o-", color=BLUE)
    axes[1].axhline(found.initial.largest["ck"], color="black", lw=1, label="before training")
    axes[2].plot(lrs, found.feature, "o-", color=ORANGE, label="|βᵀu₁|, W")
    axes[2].plot(lrs, found.labels_ck, "s-", color=BLUE, ms=4, label="|yᵀv₁|/‖y‖, CK")
    axes[2].plot(lrs, found.labels_ntk, "^-", color=GREEN, ms=4, label="|yᵀv₁|/‖y‖, NTK")
    axes[3].plot(lrs, found.error, "o-", color=ORANGE)
    for axis, title in zip(axes, ("λ₁(W Wᵀ/d)", "λ₁(CK)", "alignments", "test error"), strict=True):
        if found.threshold == found.threshold:
            axis.axvline(found.threshold, color=GREY, lw=1, ls=":")
        axis.set(xlabel="learning rate of SGD", title=title)
        axis.grid(alpha=0.25, lw=0.4)
    for axis in axes[:3]:
        axis.legend(frameon=False, fontsize=8)
    return figure


def draw_students(runs: Mapping[str, DrawnRun]) -> "Figure":
    """A figure: KTA of the CK, ‖β u₁‖ and the principal angles while networks are trained (`watch=follow(data)`).

    >>> from tangency.studies import Optimizer, draw_students, follow, train_two_layer, teacher, two_layer
    >>> data = teacher(60, 30)
    >>> gd, seen = Optimizer("gd", 5.0), follow(data)
    >>> run = train_two_layer(two_layer(30, 90), data, gd, epochs=3, watch=seen, progress=False)
    >>> len(draw_students({"GD": run}).axes)
    3
    """
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    blind = [name for name, run in runs.items() if not run.seen or "kta" not in run.seen[0]]
    if blind or not runs:
        raise InputError(
            f"{', '.join(blind) or 'nothing'} was not followed; needed: train_two_layer(…, watch=follow(data))."
        )
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    kta, feature, angles = figure.subplots(1, 3)
    for k, (name, run) in enumerate(runs.items()):
        color = (BLUE, ORANGE, GREEN, GREY)[k % 4]
        last = run.seen[-1]["epoch"] or 1.0
        at = [(s["epoch"] / last) for s in run.seen]
        kta.plot(at, [s["kta"] for s in run.seen], color=color, lw=1.8, label=name)
        feature.plot(at, [s["feature"] for s in run.seen], color=color, lw=1.8, label=name)
        for key in (key for key in run.seen[0] if key.startswith("angle")):
            label = name if key == "angle 1" else None
            angles.plot(at, [s[key] for s in run.seen], color=color, lw=1.2, ls=LINES[k % 4], label=label)
    for axis, title in zip(
        (kta, feature, angles), ("KTA of the CK", "‖β u₁‖", "principal angles (radian)"), strict=True
    ):
        axis.set(xlabel="part of all epochs", title=title)
        axis.grid(alpha=0.25, lw=0.4)
    kta.legend(frameon=False)
    return figure


def draw_trainability(result: DrawnGrids) -> "Figure":
    """A figure: κ(Θ) and the mean predictor over depth and σ_w², of networks whose phases are not known."""
    with needed("matplotlib", "a picture"):
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axis, grid, title in zip(
        figure.subplots(1, 2),
        (result.kappa, result.predictor),
        ("κ(Θ): too large to train", "‖P(Θ)y‖: too small to generalise"),
        strict=True,
    ):
        shown = grid.cpu().masked_fill(~grid.cpu().isfinite(), float("nan"))
        known = shown[shown.isfinite() & (shown > 0)]
        if len(known):
            # As in `plots.draw_phase`: beyond these, differences are rounding.
            norm = LogNorm(max(float(known.min()), 1e-6), min(float(known.max()), 1e12))
            image = axis.pcolormesh(result.w_vars, result.depths, shown.numpy(), norm=norm, cmap="viridis")
            figure.colorbar(image, ax=axis)
        axis.set(xlabel="σ_w²", ylabel="depth", title=title, facecolor="#dddddd")
    return figure
