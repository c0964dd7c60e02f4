"""Which labels are wrong, how many, and which class is taken for which: from leave-one-out predictions."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float, Int
from ..regress import LeftOut
from ..regress.leave_out import margins
from .mixture import Kinds, tell_apart

# Two-sided, of every interval of an audit.
LEVEL = 0.9
# That level's quantile of the normal distribution.
QUANTILE = 1.6448536269514722


@dataclass(frozen=True, eq=False, repr=False)
class Suspects(Result):
    """Of each training sample: whether its label (or target) is wrong, and what it should be.

    `wrong`: the probability. `margin`: the leave-one-out prediction of the given class less the largest other (of
    targets: less the size of the error, in its standard deviations). `suggested`: the likeliest class (or the target
    predicted). `order`: the samples, the most suspicious first.
    """

    given: Tensor  # [n], or real targets [n, q]
    suggested: Tensor
    wrong: Float[Tensor, " n"]
    margin: Float[Tensor, " n"]
    order: Int[Tensor, " n"]

    def __repr__(self) -> str:
        return f"Suspects({len(self.wrong)} samples, {self.count} more likely wrong than right)"

    @property
    def count(self) -> int:
        """How many labels are more likely wrong than right."""
        return int((self.wrong > 0.5).sum())

    def first(self, count: int | None = None) -> Tensor:
        """The numbers of the most suspicious samples; default: those more likely wrong than right."""
        return self.order[: self.count if count is None else count]


@dataclass(frozen=True, eq=False, repr=False)
class NoiseRate(Result):
    """The part of the labels that is wrong: `rate`, and `low` to `high` with a confidence of `level`.

    At most as many labels are wrong as the kernel machine contradicts (`contradicted`), or that of a network which has
    seen no label, where there is one (`blind`); at least, those it contradicts beyond the mistakes that it makes
    itself. Those are measured on the test samples where there are any (`by_test`); without them all contradictions may
    be such mistakes, and `low` is 0. `counts` [c, c]: how many samples with the label of the row are expected to be of
    the column's class.
    """

    rate: float
    low: float
    high: float
    contradicted: float
    by_test: bool
    counts: Float[Tensor, "c c"]
    level: float = LEVEL
    blind: float | None = None

    def __repr__(self) -> str:
        return f"NoiseRate({self.rate:.1%}, {self.level:.0%} interval {self.low:.1%} to {self.high:.1%})"

    def mixed_up(self, classes: tuple[str, ...], most: int = 10) -> str:
        """The pairs of classes that are mixed up most, with the number of wrong labels expected of each."""
        rows = [
            (classes[a], classes[b], round(float(self.counts[a, b]), 1), f"{low:.1f} to {high:.1f}")
            for a, b, low, high in self.pairs(most)
        ]
        return text_table(["given", "should be", "samples", f"{self.level:.0%} interval"], rows)

    def pairs(self, most: int = 10) -> list[tuple[int, int, float, float]]:
        """Given class, suggested class, and the interval of how many there are; the most frequent first."""
        away = self.counts.clone().fill_diagonal_(0).flatten()
        found = []
        for place in away.argsort(descending=True, stable=True)[:most].tolist():
            if not float(away[place]) >= 0.5:
                break
            # A count has about the variance of its mean; how exact the rate is scales all of them alike.
            half = QUANTILE * math.sqrt(float(away[place]))
            scale = (self.low / self.rate, self.high / self.rate) if self.rate > 0 else (0.0, 1.0)
            low, high = max(0.0, (float(away[place]) - half) * scale[0]), (float(away[place]) + half) * scale[1]
            found.append((place // len(self.counts), place % len(self.counts), low, high))
        return found


class Found(NamedTuple):
    """Suspicious labels, by what they were told apart, and each sample's likeliest class other than its label.

    `unknown`: classes that the machine does not know, whose labels it cannot call wrong.
    """

    suspects: Suspects
    kinds: Kinds
    others: Tensor
    unknown: tuple[int, ...] = ()


def suspect_labels(left: LeftOut, y: Tensor) -> Found:
    """From the predictions [n, c] of all classes without each sample, and the labels given."""
    scores, y = left.predictions.cpu(), y.cpu()
    margin = margins(scores, y)
    kinds = tell_apart(margin)
    others = scores.scatter(1, y[:, None], -torch.inf).argmax(1)
    suggested = torch.where(margin < 0, others, y)
    order = margin.argsort(stable=True)
    unknown = unknown_classes(margin, y, scores.shape[1])
    wrong = torch.where(torch.isin(y, torch.tensor(unknown, dtype=y.dtype)), kinds.wrong.clamp_max(0.5), kinds.wrong)
    return Found(Suspects(y, suggested, wrong, margin, order), kinds, others, unknown)


def unknown_classes(margin: Tensor, y: Tensor, classes: int) -> tuple[int, ...]:
    """Classes of which more than half of the labels are contradicted: more than wrong labels, the machine's mistakes.

    All classes, if no more labels are predicted than by always saying the most frequent one, within two standard
    errors.
    """
    counts = torch.bincount(y, minlength=classes)
    against = torch.bincount(y[~(margin > 0)], minlength=classes)
    majority = float(counts.max()) / len(y)
    agree = 1 - float(against.sum()) / len(y)
    known = agree > majority + 2 * math.sqrt(majority * (1 - majority) / len(y))
    return tuple(k for k in range(classes) if counts[k] > 0 and (not known or 2 * int(against[k]) > int(counts[k])))


def estimate_noise(
    found: Found, classes: int, mistakes: tuple[int, int] | None, blind: float | None = None
) -> NoiseRate:
    """How many labels are wrong. `mistakes`: of the machine on test samples, and how many those are.

    `blind`: the part of the labels that a machine contradicts whose kernel has seen none of them.
    """
    suspects, _, others, unknown = found
    n = len(suspects.wrong)
    rate, against = float(suspects.wrong.mean()), float((suspects.margin < 0).double().mean())
    # A kernel that has learned wrong labels contradicts too few.
    most = max(against, rate, blind or 0.0)
    high, low = most + QUANTILE * _error(most, n), 0.0
    if len(unknown) == len(suspects.given.unique()):  # nothing is known
        high = 1.0
    elif mistakes is not None:
        own, m = mistakes[0] / mistakes[1], mistakes[1]
        # A wrong label is contradicted, a right one where the machine errs: against = rate + (1 − rate)·own.
        low = (against - own) / max(1 - own, 1 / m)
        low -= QUANTILE * math.hypot(_error(against, n), _error(own, m))
    given, counts = suspects.given, torch.zeros(classes, classes, dtype=torch.float64)
    counts.index_put_((given, others), suspects.wrong.double(), accumulate=True)
    counts.index_put_((given, given), 1 - suspects.wrong.double(), accumulate=True)
    low = min(max(0.0, low), rate)
    return NoiseRate(rate, low, min(1.0, high), against, mistakes is not None, counts, blind=blind)


def _error(part: float, n: int) -> float:
    """The standard error of a part of n samples, at least that of one of them."""
    return math.sqrt(max(part * (1 - part), 1 / n) / n)
