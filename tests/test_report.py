"""The page, in a real browser: it opens from a file, asks for nothing, and shows the numbers that it was given."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tangency as tg
from tangency import report
from tangency.attribution import Attribution
from tangency.datasets import Labelled
from tangency.decisions import Decisions, View
from tangency.report import pack, pictures
from tangency.surrogate import Faithfulness, Interval, MonotoneMap, Surrogate

ANIMALS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SCREENSHOTS = Path(__file__).parent.parent / "runs" / "screenshots"


# ---- decisions, made up but consistent ------------------------------------------------------------------------------


def attribution(
    kernel: Tensor, weights: Tensor, bias: Tensor, outputs: Tensor, y: Tensor, c: int, k: int
) -> Attribution:
    """The definition, slowly: A = W κ + b / N, its boxes and its extremes."""
    n = len(y)
    a = torch.stack([kernel * weights[:, o].T + bias[o, None] / n for o in outputs.T], 1)  # [s, q, n]
    boxes, outliers = torch.full((*a.shape[:2], c, 6), torch.nan), torch.zeros(*a.shape[:2], c, dtype=torch.long)
    fliers = torch.full((*a.shape[:2], c, 6), torch.nan)
    for t in range(c):
        part = a[..., y == t]
        if not part.shape[-1]:
            continue
        low, mid, high = torch.quantile(part, torch.tensor([0.25, 0.5, 0.75]), dim=-1)
        reach = 1.5 * (high - low)
        inside = (part >= (low - reach)[..., None]) & (part <= (high + reach)[..., None])
        ends = part.masked_fill(~inside, torch.inf).amin(-1), part.masked_fill(~inside, -torch.inf).amax(-1)
        boxes[:, :, t] = torch.stack([ends[0], low, mid, high, ends[1], part.mean(-1)], -1)
        outliers[:, :, t] = (~inside).sum(-1)
        far = (part - mid[..., None]).abs().masked_fill(inside, -1).topk(min(6, part.shape[-1]), -1)
        fliers[:, :, t, : far.indices.shape[-1]] = part.gather(-1, far.indices).masked_fill(far.values < 0, torch.nan)
    similar, best, worst = kernel.topk(k, 1), a.topk(k, -1), a.topk(k, -1, largest=False)
    return Attribution(
        outputs, a.sum(-1), boxes, outliers, fliers, similar.indices, similar.values, best.indices, best.values,
        worst.indices, worst.values,
    )  # fmt: skip


def faithfulness(logits: Tensor, network: Tensor, y: Tensor, tau: float) -> Faithfulness:
    accuracy, theirs = (float((v.argmax(1) == y).double().mean()) for v in (logits, network))
    ends = {key: Interval(v - 0.03, v + 0.03) for key, v in (("tau", tau), ("tad", accuracy - theirs), ("r2", 0.8))}
    line = MonotoneMap(torch.tensor([-6.0, -1.0, 2.0, 8.0]), torch.tensor([-9.0, -1.5, 3.0, 14.0]))
    return Faithfulness(tau, accuracy - theirs, 0.9, 0.8, line, accuracy, theirs, ends, 0.95, len(y))


def picture_of(kernel: Tensor, y: Tensor, c: int, g: int = 60) -> tuple[Tensor, Tensor]:
    order = y.argsort(stable=True)
    picture = F.interpolate(kernel[order][:, order][None, None], (g, g), mode="area")[0, 0]
    ends = (torch.bincount(y, minlength=c).cumsum(0) * g / len(y)).round().long()
    return picture, ends.diff(prepend=torch.zeros(1, dtype=torch.long))


def decide(
    train: Labelled,
    test: Labelled,
    *,
    kernels: int = 3,
    shown: int = 24,
    k: int = 6,
    noise: float = 1.0,
    poison: bool = False,
) -> Decisions:
    """Decisions of a made-up network, with kernels that follow it more or less."""
    c, n, m = len(train.classes), len(train), len(test)
    make = torch.Generator().manual_seed(7)
    random = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    centres = random(c, 24)
    both = torch.cat([train.y, test.y])
    base = centres[both] + noise * random(n + m, 24)
    network = (F.normalize(base[n:], dim=1) @ F.normalize(centres, dim=1).T) * 9
    rows = torch.arange(m)[:: max(1, m // shown)][:shown]
    names = ["trNTK", "CK", "pNTK", "Em", "embedding NTK", "a", "b", "d"]
    views = []
    for i in range(kernels):
        features = F.normalize(base + 0.35 * (i + 1) * random(n + m, 24), dim=1)
        gram, cross = features[:n] @ features[:n].T, features[n:] @ features[:n].T
        target = F.one_hot(train.y, c).float() - 1 / c
        weights, bias = 12 * torch.linalg.solve(gram + 2 * torch.eye(n), target), 0.1 * random(c)
        logits = cross @ weights + bias
        outputs = network[rows].topk(min(2, c), 1).indices
        picture, spans = picture_of(gram, train.y, c)
        flagged = (torch.arange(m) % (4 + i) == 0) if poison else None
        views.append(
            View(
                names[i],
                f"a made-up kernel, number {i + 1}",
                Surrogate(weights, bias, 1e-3, "l2", "newton", 7, 3e-9 * 7**i, 0.1),
                faithfulness(logits, network, test.y, 0.8 - 0.1 * i),
                logits,
                attribution(cross[rows], weights, bias, outputs, train.y, c, k),
                picture,
                spans,
                torch.linalg.eigvalsh(gram).flip(0),
                1.5 + 60 * i,
                flagged,
            )  # fmt: skip
        )
    facts = {
        "model": "made-up network",
        "parameters": 1234567,
        "seconds": 12.5,
        "device": "cpu",
        "kernels": names[:kernels],
    }
    dirty = (torch.arange(n) % 9 == 0, torch.arange(m) % 5 == 0) if poison else (None, None)
    return Decisions(train, test, network, tuple(views), rows, facts, *dirty)


def smooth(n: int, channels: int, side: int, seed: int = 0) -> Tensor:
    """Pictures without noise, roughly as photographs are."""
    coarse = torch.rand(n, channels, 5, 5, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1) * 255).byte()


def labels(n: int, c: int, seed: int = 0) -> Tensor:
    return torch.randint(c, (n,), generator=torch.Generator().manual_seed(seed))
