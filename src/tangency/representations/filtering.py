"""Source samples that are like the target, and what training on them alone does to a probe.

As Tsou et al. (2023, section 7) filter a training set towards the test set by densities of its principal components.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result, text_table
from .._base.types import Float, Int
from ..errors import InputError
from ..regress import logistic_features
from .carriers import LEAST

# The penalty of a probe on standardised components, and resamples of the target set for its intervals (heuristics).
PROBE_REG, RESAMPLES = 1.0, 2000
Keep = float | int | None


@dataclass(frozen=True, eq=False, repr=False)
class Filtered(Result):
    """Source samples that are kept: `index`, the one most like the target first, with `weights` (mean 1).

    A weight is the ratio of the densities, target to source, so that weighted sums over the kept samples estimate those
    over the target. `effective`: as many unweighted samples would be worth as much, (Σw)²/Σw². `before`, `after`: MMD²
    of all source samples, and of those kept, to the target, as the test measured it; `after` is a little too small, as
    the same target samples chose.
    """

    index: Int[Tensor, " k"]
    weights: Float[Tensor, " k"]
    of: int  # source samples in all
    before: float
    after: float
    by: str

    UNITS: ClassVar[Mapping[str, str]] = {"before": "MMD²", "after": "MMD²"}

    def __len__(self) -> int:
        return len(self.index)

    @property
    def effective(self) -> float:
        """(Σw)²/Σw²."""
        return float(self.weights.sum() ** 2 / self.weights.square().sum())

    def sentence(self) -> str:
        """How many are kept, and how much nearer they are."""
        return (
            f"{len(self):,} of {self.of:,} source samples are kept; MMD² to the target goes from {self.before:.3g} to "
            f"{self.after:.3g}."
        )


def chosen(ratio: Float[Tensor, " n"], keep: Keep) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
    """The samples with the largest log ratio, and their ratios with mean 1.

    `keep`: a part of them, a number, or None: all that are likelier in the target.
    """
    order = ratio.argsort(descending=True, stable=True)
    n = len(ratio)
    if keep is None:
        count = int((ratio > 0).sum())
        if count == 0:
            raise InputError(
                "no source sample is likelier in the target than in the source, so none would be kept. Say how many: "
                "keep=0.2 (a part) or keep=100 (a number)."
            )
    elif isinstance(keep, bool) or not isinstance(keep, (int, float)):
        raise InputError(f"keep={keep!r}; needed: a part (0.2), a number of samples (100), or None.")
    else:
        # 1.0 is neither: all of them, or one?
        part = isinstance(keep, float) and 0 < keep < 1
        count = round(keep * n) if part else keep if isinstance(keep, int) else 0
        if not 1 <= count <= n:
            raise InputError(
                f"keep={keep}; needed: a part between 0 and 1 that holds a sample, or a whole number from 1 to {n}."
            )
    index = order[:count]
    return index, torch.softmax(ratio[index], 0) * len(index)


@dataclass(frozen=True, eq=False, repr=False)
class Downstream(Result):
    """Accuracy on the target of a probe trained on source samples: all, the filtered ones, as many random ones.

    `accuracy` by training set: "all", "weighted" (all, by the ratio of the densities), "filtered", "random" (mean of
    several draws); `low`, `high`: 95 % intervals over the target samples. `gain`: filtered less random, with its
    interval `gain_low`, `gain_high`; `draws`: the accuracies of the random draws.
    """

    accuracy: Mapping[str, float]
    low: Mapping[str, float]
    high: Mapping[str, float]
    kept: int
    of: int
    gain: float
    gain_low: float
    gain_high: float
    draws: Float[Tensor, " s"]

    def table(self) -> str:
        """A line for each training set."""
        sizes = {"all": self.of, "weighted": self.of, "filtered": self.kept, "random": self.kept}
        rows = [
            [how, sizes[how], f"{value:.1%}", f"{self.low[how]:.1%} to {self.high[how]:.1%}"]
            for how, value in self.accuracy.items()
        ]
        return text_table(["trained on", "samples", "accuracy", "95 % interval"], rows)

    def sentence(self) -> str:
        """Whether the filter helped."""
        sure = self.gain_low > 0 or self.gain_high < 0
        said = "" if sure else ", which may be chance"
        return (
            f"A probe trained on the {self.kept:,} filtered source samples is right on {self.accuracy['filtered']:.1%} "
            f"of the target, on as many random ones on {self.accuracy['random']:.1%} (difference {self.gain:+.1%}, "
            f"95 % interval {self.gain_low:+.1%} to {self.gain_high:+.1%}{said}), on all {self.of:,} on "
            f"{self.accuracy['all']:.1%}."
        )


def probe_effect(
    sets: tuple[Tensor, Tensor],
    ys: tuple[Tensor, Tensor],
    kept: Filtered,
    ratio: Tensor,
    repeats: int,
    draw: torch.Generator,
) -> Downstream:
    """`sets`: components of both sets, `ys`: their classes; `ratio`: log p_target/p_source of the source samples."""
    checks.positive(repeats, "repeats", "the number of random draws")
    a, b = sets
    deviations, whole = a.std(0, correction=0), torch.cat([a, b]).std(0, correction=0)
    # A source that is constant along a component has no scale of its own there.
    scale = torch.where(deviations > LEAST * whole, deviations, whole).clamp_min(torch.finfo(a.dtype).tiny)
    known, asked = (a - a.mean(0)) / scale, (b - a.mean(0)) / scale
    y, truth = (v.cpu() for v in ys)
    classes = int(max(y.max(), truth.max())) + 1

    def right(rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Of every target sample, whether the probe trained on these source samples is right."""
        return (_predicted(known[rows], y[rows], asked, classes, weights) == truth).double()

    every, weights = torch.arange(len(y)), torch.softmax(ratio, 0) * len(y)
    found = {"all": right(every), "weighted": right(every, weights), "filtered": right(kept.index)}
    drawn = [right(torch.randperm(len(y), generator=draw)[: len(kept)]) for _ in range(repeats)]
    found["random"] = torch.stack(drawn).mean(0)
    found["gain"] = found["filtered"] - found["random"]
    table = torch.stack(list(found.values()), 1)
    again = [table[torch.randint(len(table), (len(table),), generator=draw)].mean(0) for _ in range(RESAMPLES)]
    ends = torch.stack(again).quantile(torch.tensor([0.025, 0.975], dtype=table.dtype), 0)
    value, low, high = (dict(zip(found, v.tolist(), strict=True)) for v in (table.mean(0), *ends))
    gain, gain_low, gain_high = (v.pop("gain") for v in (value, low, high))
    draws = torch.stack(drawn).mean(1)
    return Downstream(value, low, high, len(kept), len(y), gain, gain_low, gain_high, draws)


def _predicted(x: Tensor, y: Tensor, asked: Tensor, classes: int, weights: Tensor | None) -> Tensor:
    """Classes that a logistic probe predicts; the one there is, where the training samples have no other."""
    names, places = y.unique(return_inverse=True)
    if len(names) == 1:
        return names.expand(len(asked))
    fit = logistic_features(x, places, reg=PROBE_REG, sample_weights=weights, classes=len(names), bias=True, tol=1e-6)
    return names[fit.predict(asked)]
