"""Pictures. Every `draw_…` returns a matplotlib `Figure`; save it with `figure.savefig(path)`.

This file imports no room, so that the `plot()` of any result may import it. matplotlib is imported where it is used
(`pip install 'tangency[plots]'`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._base.drawable import (
    DrawnAttribution,
    DrawnAudit,
    DrawnCleaning,
    DrawnConvergence,
    DrawnEvolution,
    DrawnExplanation,
    DrawnFaithfulness,
    DrawnFlow,
    DrawnPhases,
    DrawnProjection,
    DrawnRegime,
    DrawnRisk,
    DrawnTraining,
)
from ._base.extras import needed
from ._base.types import Float
from .errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_gram(
    kernel: Tensor, labels: Tensor, names: Sequence[str] | None = None, values: Float[Tensor, " r"] | None = None
) -> "Figure":
    """A figure: a Gram [n, n] sorted by class, beside its spectrum (`values`, where they are known)."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    if kernel.dim() != 2 or kernel.shape[0] != kernel.shape[1] or len(labels) != len(kernel):
        raise InputError(f"the Gram is {tuple(kernel.shape)} with {len(labels)} labels; needed: [n, n] and n labels.")
    k, order = kernel.detach().cpu().double(), torch.argsort(labels.cpu(), stable=True)
    counts = torch.bincount(labels.cpu())
    ends = counts.cumsum(0)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    ordered = k[order][:, order]
    sample = ordered.flatten()[:: max(1, ordered.numel() // 100_000)]  # quantile() refuses very long ones
    # So that single large entries, as those of the diagonal, do not leave all others one colour.
    low, high = (float(v) for v in torch.quantile(sample, torch.tensor([0.01, 0.99], dtype=sample.dtype)))
    image = left.imshow(ordered.numpy(), cmap="magma", vmin=low, vmax=high, interpolation="nearest")
    figure.colorbar(image, ax=left, shrink=0.85)
    for end in ends[:-1]:
        left.axhline(float(end) - 0.5, color="white", lw=0.4)
        left.axvline(float(end) - 0.5, color="white", lw=0.4)
    middle = (ends - counts / 2).tolist()
    left.set_xticks(middle, names or [str(c) for c in range(len(counts))])
    left.set_yticks(middle, names or [str(c) for c in range(len(counts))])
    left.set_title("Gram matrix, samples sorted by class")
    falling = torch.linalg.eigvalsh(k).flip(0) if values is None else values.detach().cpu().double()
    floor = float(falling[0]) * 1e-16  # a logarithm needs them positive; below this they are rounding
    right.loglog(range(1, len(falling) + 1), falling.clamp_min(floor).numpy(), color="#3b528b", lw=1.6)
    right.axvline(len(counts), color="gray", lw=0.8, ls=":")
    right.annotate(f" {len(counts)} classes", (len(counts), float(falling[0])), color="gray", va="top")
    right.set(xlabel="index", ylabel="eigenvalue", title="Spectrum")
    right.grid(alpha=0.25, which="both", lw=0.4)
    return figure


def draw_risk(study: DrawnRisk) -> "Figure":
    """A figure: predicted against measured error of ridge regression, over reg for each size, and all fits together."""
    with needed("matplotlib", "a picture"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    regs = study.regs.cpu().numpy()
    for k, size in enumerate(study.sizes):
        color = colormaps["viridis"](0.9 * k / max(1, len(study.sizes) - 1))
        measured, gcv, train = (v[k].mean(0).cpu().numpy() for v in (study.measured, study.gcv, study.train))
        left.loglog(regs, measured, "o", ms=4, color=color, label=f"N = {size}")
        left.loglog(regs, gcv, color=color, lw=1.4)
        left.loglog(regs, train, color=color, lw=0.7, ls=":")
        right.loglog(study.measured[k].flatten().cpu(), study.gcv[k].flatten().cpu(), "o", ms=3, color=color)
        right.loglog(study.measured[k].flatten().cpu(), study.loo[k].flatten().cpu(), "x", ms=4, color=color)
    # Training errors fall without end as reg does; what matters lies above.
    left.set_ylim(bottom=float(study.measured.min()) / 4)
    left.set(xlabel="reg", ylabel="mean square error", title="Test error (dots), GCV (lines), training error (dotted)")
    left.legend(frameon=False)
    ends = [float(study.measured.min()) * 0.9, float(study.measured.max()) * 1.1]
    right.plot(ends, ends, color="gray", lw=0.8)
    right.set(xlabel="measured on test data", ylabel="predicted", title="All fits: GCV (dots), leave-one-out (crosses)")
    for axis in (left, right):
        axis.grid(alpha=0.25, which="both", lw=0.4)
    return figure


def draw_regime(*runs: DrawnRegime, names: Sequence[str] | None = None) -> "Figure":
    """A figure: how far the kernel went from where it began, and how fast, over training; one line per run."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    for k, run in enumerate(runs):
        label = names[k] if names else None
        for axis, values in zip(axes, (run.change, run.cosine, run.velocity), strict=True):
            axis.plot(run.steps.cpu(), values.cpu(), lw=1.6, marker="o", ms=3, label=label)
    for axis, title in zip(
        axes, ("‖Θ_t − Θ_0‖ / ‖Θ_0‖", "cosine of Θ_t and Θ_0", "kernel velocity per step"), strict=True
    ):
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.25, lw=0.4)
    if names:
        axes[0].legend(frameon=False)
    return figure


def draw_evolution(*runs: DrawnEvolution, names: Sequence[str] | None = None) -> "Figure":
    """A figure: everything that monitors recorded, over the steps; one line per run, of eigenvalues one for each."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    titles = {key: title for run in runs for key, title in run.titles().items()}
    across = min(3, len(titles))
    down = -(-len(titles) // across)
    figure = Figure(figsize=(3.8 * across, 2.9 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for axis, (key, title) in zip(axes, titles.items(), strict=False):
        for k, run in enumerate(runs):
            if key in run.values:
                columns = run.values[key].cpu().reshape(len(run.steps), -1)
                style = {"color": f"C{k}", "lw": 1.6 if columns.shape[1] == 1 else 0.8, "marker": "o", "ms": 2.5}
                lines = axis.plot(run.steps.cpu(), columns, **style)
                lines[0].set_label(names[k] if names else "")
                axis.set_yscale("linear" if columns.shape[1] == 1 else "log")
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.25, lw=0.4)
    for axis in axes[len(titles) :]:
        axis.set_axis_off()
    axes[0].set_xlabel("step")
    if names:
        axes[0].legend(frameon=False, fontsize=8)
    return figure


def draw_spectral_bias(
    flow: DrawnFlow, times: Sequence[float], modes: Sequence[int] = (0, 1, 3, 10, 30, 100, 300)
) -> "Figure":
    """A figure: what is left to learn along some eigenvectors over time, and when each eigenvector is learned."""
    with needed("matplotlib", "a picture"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [m for m in modes if m < len(flow.values)]
    # A mode without energy has nothing to lose: 0, not 0/0.
    part = (flow.loss_by_mode(times) / flow.energy.clamp_min(torch.finfo(flow.energy.dtype).tiny)).cpu()
    for k, mode in enumerate(shown):
        color = colormaps["viridis"](0.9 * k / max(1, len(shown) - 1))
        left.semilogx(times, part[:, mode], color=color, lw=1.6, label=f"mode {mode + 1}")
    left.set(xlabel="time", ylabel="part of its loss that is left", title="Loss along eigenvectors of the kernel")
    left.legend(frameon=False)
    right.loglog(range(1, len(flow.values) + 1), flow.time_to_fit().cpu(), color="#3b528b", lw=1.6)
    right.set(xlabel="eigenvector", ylabel="time until 1% of the error is left", title="Time to fit")
    for axis in (left, right):
        axis.grid(alpha=0.25, which="both", lw=0.4)
    return figure


def draw_convergence(result: DrawnConvergence) -> "Figure":
    """A figure: distances to the infinite-width limit over the width with their slopes, and what training did.

    >>> import tangency as tg
    >>> net = lambda m: torch.nn.Sequential(torch.nn.Linear(2, m), torch.nn.ReLU(), torch.nn.Linear(m, 1))
    >>> study = tg.studies.convergence(net, [16, 64], torch.randn(3, 2), seeds=2)
    >>> len(draw_convergence(study).axes)
    1
    """
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    rows, slopes = result.measured(), result.slopes
    panels = [["ntk", "nngp"]] + ([["sup", "drift"], ["moved", "moved_part"]] if "sup" in rows else [])
    titles = ("At the start", "Over training: the kernel", "Over training: the parameters")
    figure = Figure(figsize=(4.8 * len(panels), 4.2), layout="constrained")
    for axis, names, title in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, titles, strict=False):
        for name in names:
            mean = _rms(rows[name]).cpu().numpy()
            spread = (rows[name].std(1).cpu() / len(result.seeds) ** 0.5).numpy() if len(result.seeds) > 1 else None
            label = f"{result.MEANING[name]}: slope {slopes[name]}"
            axis.errorbar(result.widths, mean, yerr=spread, marker="o", ms=4, lw=1.4, capsize=2, label=label)
        # What moves need not fall with the width (it does not in the NTK parametrisation): no guide for it.
        if "moved" not in names:
            guide = float(_rms(rows[names[0]])[0]) * (torch.tensor(result.widths) / result.widths[0]) ** -0.5
            axis.plot(result.widths, guide, color="gray", lw=0.8, ls="--", label="slope −1/2")
        axis.set(xscale="log", yscale="log", xlabel="width m", title=title)
        axis.grid(alpha=0.25, which="both", lw=0.4)
        axis.legend(frameon=False, fontsize=8)
    return figure


def _rms(values: Tensor) -> Tensor:
    """Root mean squares over seeds: [w, s] to [w]."""
    return values.square().mean(1).sqrt()


def draw_phase(result: DrawnPhases) -> "Figure":
    """A figure: order and chaos in the plane of variances, then κ(Θ) and the mean predictor over depth and σ_w².

    The dashed line is the boundary χ₁ = 1; the thin lines are depths of 6 ξ, beyond which κ or P is lost.

    >>> import tangency as tg
    >>> study = tg.studies.trainability(torch.randn(4, 5), [1, 4, 8], [0.5, 1.0, 2.0], activation="tanh")
    >>> len(draw_phase(study).axes)
    4
    """
    with needed("matplotlib", "a picture"):
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    plane, left, right = figure.subplots(1, 3)
    b, w = (v.cpu().numpy() for v in result.edge)
    high = max(*result.w_vars, 1.1 * float(torch.as_tensor(w).nan_to_num(0.0).max()))
    plane.plot(w, b, color="black", lw=1.6, ls="--", label="χ₁ = 1")
    plane.fill_betweenx(b, 0, w, color="#3b528b", alpha=0.18, lw=0, label="order")
    plane.fill_betweenx(b, w, high, color="#d1495b", alpha=0.18, lw=0, label="chaos")
    plane.plot(result.w_vars, [result.b_var] * len(result.w_vars), ".", color="black", ms=4, label="computed")
    plane.set(xlabel="σ_w²", ylabel="σ_b²", title=f"{result.activation}: order and chaos", xlim=(0, high))
    plane.legend(frameon=True, fontsize=8, loc="upper left")
    scales = [6 * p.depth for p in result.phases]
    grids = (
        (left, result.kappa, "κ(Θ): too large to train"),
        (right, result.predictor, "‖P(Θ)y‖: too small to generalise"),
    )
    for axis, grid, title in grids:
        shown = grid.cpu().masked_fill(~grid.cpu().isfinite(), float("nan"))
        known = shown[shown.isfinite() & (shown > 0)]
        if len(known):
            # Beyond these, differences are rounding: κ above 1e12 cannot be told from a singular kernel.
            norm = LogNorm(max(float(known.min()), 1e-6), min(float(known.max()), 1e12))
            image = axis.pcolormesh(result.w_vars, result.depths, shown.numpy(), norm=norm, cmap="viridis")
            figure.colorbar(image, ax=axis)
        axis.axvline(result.critical, color="black", lw=1.2, ls="--")
        axis.plot(result.w_vars, scales, color="white", lw=0.9)
        axis.set(xlabel="σ_w²", ylabel="depth", title=title, facecolor="#dddddd")
        axis.set_ylim(min(result.depths), max(result.depths))
    return figure


def draw_projection(errors: Sequence[DrawnProjection]) -> "Figure":
    """A figure: how residuals of projected kernels fall with the dimension, for each kind, and what was predicted.

    Errors of the same kind and dimension (several seeds) are pooled: root mean square, and 95 % (dotted).

    >>> import tangency as tg
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 500), torch.nn.Tanh(), torch.nn.Linear(500, 2))
    >>> k, x = tg.pseudo_ntk(model), torch.randn(9, 3)
    >>> errors = [tg.projection_error(k, tg.projected(k, dim=dim), x) for dim in (64, 256, 1024)]
    >>> len(draw_projection(errors).axes)
    1
    """
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axis = figure.subplots()
    for kind in dict.fromkeys(e.kind for e in errors):
        dims = sorted({e.dim for e in errors if e.kind == kind})
        pooled = [torch.cat([e.residuals for e in errors if (e.kind, e.dim) == (kind, dim)]).abs() for dim in dims]
        (line,) = axis.plot(dims, [float(v.square().mean().sqrt()) for v in pooled], "o-", ms=4, lw=1.4, label=kind)
        axis.plot(dims, [float(v.quantile(0.95)) for v in pooled], ":", lw=1, color=line.get_color())
    known = {e.dim: e.expected_rms for e in errors if e.expected_rms is not None}
    if known:
        axis.plot(
            sorted(known), [known[dim] for dim in sorted(known)], color="black", ls="--", lw=1.2, label="predicted"
        )
    axis.set(xscale="log", yscale="log", xlabel="dimensions", ylabel="|k̂ − k| / √(k(x, x) k(y, y))")
    axis.set(title="Error of projected kernels: root mean square, 95 % (dotted)")
    axis.grid(alpha=0.25, which="both", lw=0.4)
    axis.legend(frameon=False, fontsize=8)
    return figure


def draw_faithfulness(faithful: DrawnFaithfulness) -> "Figure":
    """A figure: τ_K, TAD and Pearson's r with their intervals, and the map from a surrogate's log-odds to a network's.

    >>> import tangency as tg
    >>> z = torch.randn(40, 3).double()
    >>> result = tg.surrogate.faithfulness(z, z**3, torch.randint(3, (40,)), outputs_are="logits", resamples=9)
    >>> len(draw_faithfulness(result).axes)
    2
    """
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    figures = {"τ_K": ("tau", faithful.tau), "TAD": ("tad", faithful.tad), "Pearson": ("pearson", faithful.pearson)}
    for k, (key, value) in enumerate(figures.values()):
        ends = faithful.intervals[key]
        left.plot([ends.low, ends.high], [k, k], color="#3b528b", lw=3, alpha=0.4, solid_capstyle="butt")
        left.plot([value], [k], "o", color="#3b528b")
    left.set_yticks(range(len(figures)), list(figures))
    left.invert_yaxis()
    left.axvline(0, color="gray", lw=0.8)
    left.set(xlim=(-1.02, 1.02), title=f"Faithfulness, {faithful.level:.0%} intervals")
    odds = torch.linspace(-10, 10, 400, dtype=torch.float64)  # log-odds beyond are probabilities of 0 and 1 to the eye
    right.plot(odds, faithful.map(odds).detach().cpu(), color="#3b528b", lw=1.6)
    right.plot(odds, odds, color="gray", lw=0.8, ls=":")
    right.set(
        xlabel="surrogate's log-odds", ylabel="network's log-odds", title=f"Best increasing map: R² {faithful.r2:.3f}"
    )
    for axis in (left, right):
        axis.grid(alpha=0.25, lw=0.4)
    return figure


def draw_decisions(explanations: Sequence[DrawnExplanation]) -> "Figure":
    """A figure: τ_K and TAD of each kernel with their intervals, and the spectra of all, each relative to its largest.

    >>> import tangency as tg
    >>> x = torch.randn(30, 3)
    >>> data = (x[:20], torch.arange(20) % 2), (x[20:], torch.arange(10) % 2)
    >>> options = {"outputs_are": "logits", "progress": False}
    >>> result = tg.explain(tg.models.mlp([3, 8, 2]), *data, kernels=["trNTK", "CK"], **options)
    >>> len(draw_decisions(result.explanations).axes)
    3
    """
    with needed("matplotlib", "a picture"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.8 + 0.5 * max(4, len(explanations))), layout="constrained")
    taus, tads, spectra = figure.subplots(1, 3, width_ratios=(1, 1, 1.2))
    for k, explanation in enumerate(explanations):
        color = colormaps["viridis"](0.9 * k / max(1, len(explanations) - 1))
        faithful = explanation.faithfulness
        for axis, key, value in ((taus, "tau", faithful.tau), (tads, "tad", faithful.tad)):
            ends = faithful.intervals[key]
            axis.plot([ends.low, ends.high], [k, k], color=color, lw=3, alpha=0.4, solid_capstyle="butt")
            axis.plot([value], [k], "o", color=color)
        falling = explanation.values.detach().cpu().double()
        scaled = (falling / falling[0]).clamp_min(1e-16)  # below rounding they say nothing
        spectra.loglog(range(1, len(scaled) + 1), scaled, color=color, lw=1.6, label=explanation.name)
    for axis, title in ((taus, "τ_K: order of the samples"), (tads, "TAD: accuracy less the network's")):
        axis.set_yticks(range(len(explanations)), [explanation.name for explanation in explanations])
        axis.invert_yaxis()
        axis.axvline(0, color="gray", lw=0.8)
        axis.set(title=title)
        axis.grid(alpha=0.25, lw=0.4)
    spectra.set(xlabel="index", ylabel="eigenvalue / largest", title="Spectra")
    spectra.grid(alpha=0.25, which="both", lw=0.4)
    spectra.legend(frameon=False, fontsize=8)
    return figure


def draw_attribution(attribution: DrawnAttribution, decision: int = 0, names: Sequence[str] | None = None) -> "Figure":
    """A figure: of one decision, how training samples of each class raise and lower each explained logit.

    >>> import tangency as tg
    >>> x, y = torch.randn(60, 3).double(), torch.randint(3, (60,))
    >>> result = tg.decisions.summarize(tg.surrogate.fit(x @ x.T, y), x[:5] @ x.T, labels=y)
    >>> len(draw_attribution(result, 4).axes)
    3
    """
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    m, q, t = attribution.boxes.shape[:3]
    if not 0 <= decision < m:
        raise InputError(f"decision={decision}; needed: one of the {m} that are explained, from 0 to {m - 1}.")
    named = list(names) if names is not None else []
    label = [named[c] if c < len(named) else str(c) for c in range(max(t, int(attribution.outputs.max()) + 1))]
    figure = Figure(figsize=(1 + 4 * q, 4), layout="constrained")
    for k, axis in enumerate(figure.subplots(1, q, squeeze=False)[0]):
        boxes = [
            {
                "whislo": box[0], "q1": box[1], "med": box[2], "q3": box[3], "whishi": box[4], "mean": box[5],
                "fliers": far[~far.isnan()].tolist(), "label": label[c],
            }
            for c, (box, far) in enumerate(
                zip(attribution.boxes[decision, k].tolist(), attribution.fliers[decision, k].cpu(), strict=True)
            )
        ]  # fmt: skip
        axis.bxp(boxes, showmeans=True, flierprops={"marker": ".", "markersize": 3})
        axis.axhline(0, color="gray", lw=0.8)
        output, total = int(attribution.outputs[decision, k]), float(attribution.totals[decision, k])
        axis.set(title=f"logit of {label[output]}: {total:.3g}", xlabel="class of the training sample")
        axis.grid(alpha=0.25, axis="y", lw=0.4)
        if k == 0:
            axis.set_ylabel("attribution")
    return figure


def draw_learning_curve(
    curves: Mapping[str, Sequence[tuple[int, float, float]]], published: Mapping[str, tuple[int, float]], title: str
) -> "Figure":
    """A figure: accuracy over training samples (number, accuracy, its standard error), and published points."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axis = figure.subplots()
    for name, points in curves.items():
        numbers, accuracies, errors = zip(*points, strict=True)
        (line, *_) = axis.errorbar(numbers, accuracies, errors, fmt="o-", ms=4, lw=1.4, label=name)
        if name in published:
            axis.plot(*published[name], "*", ms=12, color=line.get_color(), label=f"{name}, published")
    axis.set(xscale="log", xlabel="training samples", ylabel="accuracy %", title=title)
    axis.grid(alpha=0.25, which="both", lw=0.4)
    axis.legend(frameon=False, fontsize=8)
    return figure


def draw_training(training: DrawnTraining) -> "Figure":
    """A figure: the loss of each epoch, and beside it the accuracies, where there are classes."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    accuracies = {"training": training.accuracy, "test": training.test_accuracy}
    shown = {name: values for name, values in accuracies.items() if values is not None}
    figure = Figure(figsize=(11, 4.2) if shown else (6, 4.2), layout="constrained")
    axes = figure.subplots(1, 2 if shown else 1, squeeze=False)[0]
    epochs = range(1, len(training.loss) + 1)
    axes[0].plot(epochs, training.loss.cpu().numpy(), color="#3b528b", lw=1.6)
    axes[0].set(xlabel="epoch", ylabel="loss", title="Mean loss of the training batches")
    for name, values in shown.items():
        axes[1].plot(epochs, values.cpu().numpy(), lw=1.6, label=name)
    if shown:
        axes[1].set(xlabel="epoch", ylabel="accuracy", title="Accuracy")
        axes[1].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.25, lw=0.4)
    return figure


def draw_audit(audit: DrawnAudit) -> "Figure":
    """A figure: margins without each sample, which classes are mixed up, and what cleaning would do, where known."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    panels = 2 + (audit.cleaning is not None)
    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels)
    margin, wrong = audit.suspects.margin.cpu(), audit.suspects.wrong.cpu() > 0.5
    edges = torch.linspace(float(margin.min()), float(margin.max()) + 1e-12, 50).numpy()
    parts = [margin[~wrong].numpy(), margin[wrong].numpy()]
    axes[0].hist(parts, edges, stacked=True, color=["#3b528b", "#d1495b"], label=["right", "suspicious"])
    axes[0].set(yscale="log", xlabel="margin without the sample", ylabel="samples", title="Does the rest agree?")
    axes[0].legend(frameon=False)
    pairs = [] if audit.real else audit.noise.pairs(12)[::-1]
    if audit.real:
        given, suggested = (
            v.reshape(len(v), -1)[:, 0].cpu().numpy() for v in (audit.suspects.given, audit.suspects.suggested)
        )
        axes[1].scatter(given, suggested, s=6, c=["#d1495b" if w else "#3b528b" for w in wrong.tolist()])
        axes[1].set(xlabel="given", ylabel="predicted without it", title="Targets")
    elif pairs:
        counts = [float(audit.noise.counts[a, b]) for a, b, _, _ in pairs]
        reach = [[c - low for c, (_, _, low, _) in zip(counts, pairs, strict=True)],
                 [high - c for c, (_, _, _, high) in zip(counts, pairs, strict=True)]]  # fmt: skip
        names = [f"{audit.train.classes[a]} → {audit.train.classes[b]}" for a, b, _, _ in pairs]
        axes[1].barh(names, counts, xerr=torch.tensor(reach).clamp_min(0).numpy(), color="#d1495b", ecolor="#888888")
        axes[1].set(xlabel="wrong labels expected", title="Given → should be")
    else:
        axes[1].text(0.5, 0.5, "no classes are mixed up", ha="center", va="center")
        axes[1].set_axis_off()
    if audit.cleaning is not None:
        _cleaning_axis(axes[2], audit.cleaning)
    return figure


def draw_cleaning(cleaning: DrawnCleaning) -> "Figure":
    """A figure: the test score by how many of the most suspicious samples are dropped, or their labels mended."""
    with needed("matplotlib", "a picture"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.2), layout="constrained")
    _cleaning_axis(figure.subplots(), cleaning)
    return figure


def _cleaning_axis(axis: "Axes", cleaning: DrawnCleaning) -> None:
    for name, values in (("dropped", cleaning.dropped), ("mended", cleaning.mended)):
        axis.plot(cleaning.removed.tolist(), values.tolist(), "o-", ms=4, label=name)
    axis.axvline(cleaning.suspects, color="#888888", lw=0.8, ls="--")
    axis.set(xlabel="most suspicious samples", ylabel=f"test {cleaning.score}", title="What cleaning would do")
    axis.grid(alpha=0.25, lw=0.4)
    axis.legend(frameon=False)
