"""Pictures. matplotlib is imported where it is used (`pip install tangency[demo]`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._base.types import Float, Int
from .dynamics import Flow, Regime
from .errors import InputError
from .projection import ProjectionError
from .regress import RiskStudy
from .studies.convergence import MEANING, Convergence, typical
from .studies.trainability import Trainability


def gram(kernel: Float[Tensor, "n n"], labels: Int[Tensor, " n"], names: Sequence[str] | None = None) -> Any:
    """A figure: the Gram matrix sorted by class beside its spectrum. Save it with `figure.savefig(path)`."""
    from matplotlib.figure import Figure

    if kernel.dim() != 2 or kernel.shape[0] != kernel.shape[1] or len(labels) != len(kernel):
        raise InputError(f"the Gram is {tuple(kernel.shape)} with {len(labels)} labels; needed: [n, n] and n labels.")
    k, order = kernel.detach().cpu().double(), torch.argsort(labels.cpu(), stable=True)
    counts = torch.bincount(labels.cpu())
    ends = counts.cumsum(0)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    ordered = k[order][:, order]
    some = ordered.flatten()[:: max(1, ordered.numel() // 100_000)]
    low, high = (float(v) for v in torch.quantile(some, torch.tensor([0.01, 0.99], dtype=some.dtype)))
    image = left.imshow(ordered.numpy(), cmap="magma", vmin=low, vmax=high, interpolation="nearest")
    figure.colorbar(image, ax=left, shrink=0.85)
    for end in ends[:-1]:
        left.axhline(float(end) - 0.5, color="white", lw=0.4)
        left.axvline(float(end) - 0.5, color="white", lw=0.4)
    middle = (ends - counts / 2).tolist()
    left.set_xticks(middle, names or [str(c) for c in range(len(counts))])
    left.set_yticks(middle, names or [str(c) for c in range(len(counts))])
    left.set_title("Gram matrix, samples sorted by class")
    values = torch.linalg.eigvalsh(k).flip(0)
    floor = float(values[0]) * 1e-16
    right.loglog(range(1, len(values) + 1), values.clamp_min(floor).numpy(), color="#3b528b", lw=1.6)
    right.axvline(len(counts), color="gray", lw=0.8, ls=":")
    right.annotate(f" {len(counts)} classes", (len(counts), float(values[0])), color="gray", va="top")
    right.set(xlabel="index", ylabel="eigenvalue", title="Spectrum")
    right.grid(alpha=0.25, which="both", lw=0.4)
    return figure


def risk(study: RiskStudy) -> Any:
    """A figure: predicted against measured error of ridge regression, over reg for each size, and all fits together."""
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
    left.set_ylim(bottom=float(study.measured.min()) / 4)  # training errors fall without end
    left.set(xlabel="reg", ylabel="mean square error", title="Test error (dots), GCV (lines), training error (dotted)")
    left.legend(frameon=False)
    ends = [float(study.measured.min()) * 0.9, float(study.measured.max()) * 1.1]
    right.plot(ends, ends, color="gray", lw=0.8)
    right.set(xlabel="measured on test data", ylabel="predicted", title="All fits: GCV (dots), leave-one-out (crosses)")
    for axis in (left, right):
        axis.grid(alpha=0.25, which="both", lw=0.4)
    return figure


def regime(*runs: Regime, names: Sequence[str] | None = None) -> Any:
    """A figure: how far the kernel went from where it began, and how fast, over training; one line per run."""
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


def spectral_bias(flow: Flow, times: Sequence[float], modes: Sequence[int] = (0, 1, 3, 10, 30, 100, 300)) -> Any:
    """A figure: what is left to learn along some eigenvectors over time, and when each eigenvector is learned."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [m for m in modes if m < len(flow.values)]
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


def convergence(result: Convergence) -> Any:
    """A figure: distances to the infinite-width limit over the width with their slopes, and what training did.

    >>> import tangency as tg
    >>> net = lambda m: torch.nn.Sequential(torch.nn.Linear(2, m), torch.nn.ReLU(), torch.nn.Linear(m, 1))
    >>> found = tg.studies.convergence(net, [16, 64], torch.randn(3, 2), seeds=2)
    >>> len(convergence(found).axes)
    1
    """
    from matplotlib.figure import Figure

    rows, slopes = result.measured(), result.slopes
    panels = [["ntk", "nngp"]] + ([] if result.training is None else [["sup", "drift"], ["moved", "moved_part"]])
    titles = ("At the start", "Over training: the kernel", "Over training: the parameters")
    figure = Figure(figsize=(4.8 * len(panels), 4.2), layout="constrained")
    for axis, names, title in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, titles, strict=False):
        for name in names:
            mean = typical(rows[name]).cpu().numpy()
            spread = (rows[name].std(1).cpu() / len(result.seeds) ** 0.5).numpy() if len(result.seeds) > 1 else None
            label = f"{MEANING[name]}: slope {slopes[name]}"
            axis.errorbar(result.widths, mean, yerr=spread, marker="o", ms=4, lw=1.4, capsize=2, label=label)
        if "moved" not in names:
            guide = float(typical(rows[names[0]])[0]) * (torch.tensor(result.widths) / result.widths[0]) ** -0.5
            axis.plot(result.widths, guide, color="gray", lw=0.8, ls="--", label="slope −1/2")
        axis.set(xscale="log", yscale="log", xlabel="width m", title=title)
        axis.grid(alpha=0.25, which="both", lw=0.4)
        axis.legend(frameon=False, fontsize=8)
    return figure


def phase(result: Trainability) -> Any:
    """A figure: order and chaos in the plane of variances, then κ(Θ) and the mean predictor over depth and σ_w².

    The dashed line is the boundary χ₁ = 1; the thin lines are depths of 6 ξ, beyond which κ or P is lost.

    >>> import tangency as tg
    >>> found = tg.studies.trainability(torch.randn(4, 5), [1, 4, 8], [0.5, 1.0, 2.0], activation="tanh")
    >>> len(phase(found).axes)
    4
    """
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
            norm = LogNorm(max(float(known.min()), 1e-6), min(float(known.max()), 1e12))
            image = axis.pcolormesh(result.w_vars, result.depths, shown.numpy(), norm=norm, cmap="viridis")
            figure.colorbar(image, ax=axis)
        axis.axvline(result.critical, color="black", lw=1.2, ls="--")
        axis.plot(result.w_vars, scales, color="white", lw=0.9)
        axis.set(xlabel="σ_w²", ylabel="depth", title=title, facecolor="#dddddd")
        axis.set_ylim(min(result.depths), max(result.depths))
    return figure


def projection(errors: Sequence[ProjectionError]) -> Any:
    """A figure: how residuals of projected kernels fall with the dimension, for each kind, and what was predicted.

    Errors of the same kind and dimension (several seeds) are pooled: root mean square, and 95 % (dotted).

    >>> import tangency as tg
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 500), torch.nn.Tanh(), torch.nn.Linear(500, 2))
    >>> k, x = tg.pseudo_ntk(model), torch.randn(9, 3)
    >>> found = [tg.projection_error(k, tg.projected(k, dim=dim), x) for dim in (64, 256, 1024)]
    >>> len(projection(found).axes)
    1
    """
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
