"""Which real targets are wrong: errors of leave-one-out predictions that are far too large."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..regress import LeftOut
from .choice import COUNTED, TARGET_FACTORS, Choice, choose
from .labels import QUANTILE, NoiseRate, Suspects
from .machine import Machine

# Targets are wrong if their errors come from a distribution at least so many times as wide (heuristic).
WIDER = 3.0
# A normal distribution's standard deviation in units of its median absolute deviation.
PER_MAD = 1.4826
STEPS = 200
# Of Student's t, from a long tail to hardly any.
FREEDOMS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
# How often the worst are set aside, at most; each time costs a factorisation.
ROUNDS = 10


def leave_out_targets(
    machines: Mapping[str, Machine], targets: Tensor, groups: Tensor | None, step: Callable[[], None]
) -> tuple[Choice, LeftOut]:
    """The best kernel and reg, and what it says of each sample without it, and without targets wrong beyond doubt.

    A target that is far off also moves what is said of its neighbours, which are then taken for wrong ones. So the
    worst are set aside, the others are asked again, and so on while there are new ones; and again by the kernel and reg
    that is best without those.
    """
    everything = torch.ones(len(targets), dtype=torch.bool)
    choice, left = choose(machines, targets, TARGET_FACTORS, groups, step, COUNTED)
    left, kept = _set_aside(machines[choice.kernel], targets, groups, left, everything)
    if not bool(kept.all()):
        choice, left = choose(machines, targets, TARGET_FACTORS, groups, step, COUNTED, kept)
        left, _ = _set_aside(machines[choice.kernel], targets, groups, left, kept)
    return choice, left


def _set_aside(
    machine: Machine, targets: Tensor, groups: Tensor | None, left: LeftOut, kept: Tensor
) -> tuple[LeftOut, Tensor]:
    """What fits say without the worst, and which samples take part in them; `left` is what those of `kept` say."""
    # A sample that takes no part has a leverage all the same: what it would have.
    leverage = left.leverage if bool(kept.all()) else machine.left_out(targets, left.reg, groups).leverage
    for _ in range(ROUNDS):
        surprise = _surprise(left, leverage)
        found = (_two_widths(surprise, targets[0].numel())[0] > 0.5) & kept
        if not bool(found.any()) or int(kept.sum()) <= machine.n // 2:
            break
        kept = kept & ~(found & (surprise >= surprise[found].max() / 2))
        left = machine.left_out(targets, left.reg, groups, kept)
    return replace(left, leverage=leverage), kept


def suspect_targets(left: LeftOut, y: Tensor) -> tuple[Suspects, float]:
    """From leave-one-out errors; with it the log of how much likelier two widths of errors are than one.

    An error is measured in its own standard deviation, √(1/M_ii) up to a factor, M = (K + reg)⁻¹, and that factor is
    found by the median: few wrong targets do not move it.
    """
    surprise = _surprise(left, left.leverage)
    wrong, evidence = _two_widths(surprise, y[0].numel())
    wrong = wrong * torch.sigmoid(torch.tensor(evidence, dtype=wrong.dtype))
    order = surprise.argsort(descending=True, stable=True)
    return Suspects(y.cpu(), left.predictions.cpu().reshape(y.shape), wrong, -surprise, order), evidence


def _surprise(left: LeftOut, leverage: Tensor) -> Tensor:
    """The root mean square error of each sample [n], in standard deviations."""
    h = leverage.double().cpu()
    errors = left.errors.reshape(len(h), -1).double().cpu()
    scaled = errors * (1 - h).clamp_min(torch.finfo(h.dtype).eps).sqrt()[:, None]
    scale = scaled.abs().median(0).values * PER_MAD
    scale = torch.where(scale > 0, scale, scaled.abs().amax(0).clamp_min(torch.finfo(h.dtype).tiny))
    return (scaled / scale).square().mean(1).sqrt()


def estimate_wrong_targets(suspects: Suspects) -> NoiseRate:
    """The part of the targets that is wrong. At least none: errors may as well be noise that is larger for some."""
    n, rate = len(suspects.wrong), float(suspects.wrong.mean())
    against = float((suspects.margin < -WIDER).double().mean())
    high = max(rate, against) + QUANTILE * math.sqrt(max(rate * (1 - rate), 1 / n) / n)
    return NoiseRate(rate, 0.0, min(1.0, high), against, False, torch.zeros(0, 0))


def _two_widths(t: Tensor, q: int) -> tuple[Tensor, float]:
    """The probability of the wider of two normal distributions around zero, for root mean squares t of q errors.

    With it the log of how much likelier two widths are than one long tail (`_long_tail`), which needs no wrong targets.
    """
    n, squares = len(t), q * t.square()

    def log_density(width: float) -> Tensor:
        return -squares / (2 * width**2) - q * math.log(width) - q * math.log(2 * math.pi) / 2

    one = max(float((squares.mean() / q).sqrt()), 1e-12)
    narrow, wide, part = max(float(t.median()), 1e-12), 3 * WIDER * one, 0.05
    for _ in range(STEPS):
        inside, outside = log_density(narrow) + math.log1p(-part), log_density(wide) + math.log(part)
        p = torch.sigmoid(outside - inside)
        part = min(max(float(p.mean()), 1 / (2 * n)), 0.5)
        narrow = max(math.sqrt(float(((1 - p) * squares).sum() / (q * (1 - p).sum().clamp_min(1e-12)))), 1e-12)
        # The wider one stays wider: else two widths would share the errors of right targets.
        wide = max(math.sqrt(float((p * squares).sum() / (q * p.sum().clamp_min(1e-12)))), WIDER * narrow)
    both = torch.logaddexp(log_density(narrow) + math.log1p(-part), log_density(wide) + math.log(part)).sum()
    # One more parameter than the tail has, at the price of the Bayesian information criterion.
    evidence = float(both) - max(float(log_density(one).sum()), _long_tail(squares, q)) - math.log(n) / 2
    p = torch.sigmoid(log_density(wide) + math.log(part) - log_density(narrow) - math.log1p(-part))
    return p, evidence


def _long_tail(squares: Tensor, q: int) -> float:
    """The log likelihood of Student's t in q dimensions, by the best of some degrees of freedom.

    Errors of right targets are often of many sizes, as where the noise is larger for some samples than for others.
    """
    best = -math.inf
    for freedom in FREEDOMS:
        scale = max(float(squares.median()) / q, 1e-24)
        for _ in range(STEPS):  # the weights of the usual iteration for its scale (Lange, Little & Taylor 1989)
            weights = (freedom + q) / (freedom + squares / scale)
            scale = max(float((weights * squares).mean()) / q, 1e-24)
        start = math.lgamma((freedom + q) / 2) - math.lgamma(freedom / 2) - q * math.log(freedom * math.pi * scale) / 2
        found = len(squares) * start - (freedom + q) / 2 * float(torch.log1p(squares / (freedom * scale)).sum())
        best = max(best, found)
    return best
