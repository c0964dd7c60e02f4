"""How well scores tell two kinds of samples apart, and how sure that is: AUROC, proportions."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result
from .._base.types import Float, Numbers
from ..errors import InputError


class Interval(NamedTuple):
    """Where a number lies, with the confidence that was asked for."""

    low: float
    high: float


@dataclass(frozen=True, repr=False)
class AUROC(Result):
    """How likely a positive sample has a higher score than a negative one, with an interval."""

    value: float
    low: float
    high: float
    confidence: float
    positives: int
    negatives: int

    def __repr__(self) -> str:
        return f"AUROC({self.value:.4f}, {self.confidence:.0%} in [{self.low:.4f}, {self.high:.4f}])"


def auroc(scores: Numbers, positive: Numbers, *, confidence: float = 0.95) -> AUROC:
    """P(score of a positive > score of a negative) + ½ P(equal), with DeLong's interval, taken on the logit's scale.

    `positive`: 0 or 1 (False or True) for each score. Where all are told apart DeLong's variance is 0; the interval is
    then that of as many successes as there are samples of the rarer kind, without a failure. Cost: a sort. DeLong,
    DeLong & Clarke-Pearson 1988; Sun & Xu 2014; the logit in Pepe 2003, 5.2.

    >>> auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]).value
    0.75
    """
    checked = tree.numbers(scores, "scores").detach().cpu().double()
    which = tree.numbers(positive, "positive").detach().cpu()
    if checked.dim() != 1 or which.shape != checked.shape:
        raise InputError(
            f"scores have shape {tuple(checked.shape)}, positive {tuple(which.shape)}; needed: both [n], a number and "
            "a kind for each sample."
        )
    checks.finite(checked, "scores")
    if not bool(((which == 0) | (which == 1)).all()):
        raise InputError("positive holds other values than 0 and 1; needed: whether each sample is positive.")
    positives, negatives = checked[which == 1], checked[which == 0]
    if not len(positives) or not len(negatives):
        raise InputError(f"{len(positives)} samples are positive and {len(negatives)} negative; needed: some of both.")
    beaten, beating = placements(positives, negatives)
    value = float(beaten.mean())
    low, high = _delong(value, beaten, beating, confidence)
    return AUROC(value, low, high, confidence, len(positives), len(negatives))


def placements(positives: Float[Tensor, " m"], negatives: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """The part of the negatives below each positive, and of the positives above each negative; equal ones count half.

    >>> placements(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0]))
    (tensor([0.5000, 1.0000]), tensor([1.0000, 0.5000]))
    """
    down, up = negatives.sort().values, positives.sort().values
    below = torch.searchsorted(down, positives) + torch.searchsorted(down, positives, right=True)
    above = 2 * len(up) - torch.searchsorted(up, negatives) - torch.searchsorted(up, negatives, right=True)
    return below.to(positives.dtype) / (2 * len(down)), above.to(positives.dtype) / (2 * len(up))


def proportion(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's interval of a probability, from so many successes in so many trials.

    >>> low, high = proportion(5, 100)
    >>> round(low, 3), round(high, 3)
    (0.022, 0.112)
    """
    z = _normal(confidence)
    part = successes / trials
    middle = (part + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(part * (1 - part) / trials + z**2 / (4 * trials**2))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def _delong(value: float, beaten: Tensor, beating: Tensor, confidence: float) -> Interval:
    z = _normal(confidence)
    variance = sum(float(v.var()) / len(v) for v in (beaten, beating) if len(v) > 1)
    if min(value, 1 - value) < 1e-12 or variance == 0:
        # (1 − confidence)/2 = low^k: k successes of k are that likely at `low`.
        edge = ((1 - confidence) / 2) ** (1 / min(len(beaten), len(beating)))
        return Interval(edge, 1.0) if value > 0.5 else Interval(0.0, 1 - edge) if value < 0.5 else Interval(0.0, 1.0)
    logit = math.log(value / (1 - value))
    half = z * math.sqrt(variance) / (value * (1 - value))
    return Interval(1 / (1 + math.exp(half - logit)), 1 / (1 + math.exp(-half - logit)))


def _normal(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise InputError(f"confidence={confidence}; needed: a probability between 0 and 1, such as 0.95.")
    return NormalDist().inv_cdf((1 + confidence) / 2)
