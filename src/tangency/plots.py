"""Pictures. matplotlib is imported where it is used (`pip install tangency[demo]`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._types import Float, Int
from .errors import InputError


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
