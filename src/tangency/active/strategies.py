"""Which candidates to ask for: by what their labels would change, and the usual baselines.

A strategy is a function (round, count) -> numbers of candidates; those named here are in `STRATEGIES`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .._base import checks
from .._base.types import Int
from .batches import farthest, greedy_changes, spread_at_random
from .round import Round

Strategy = Callable[[Round, int], Tensor]


def at_random(known: Round, count: int) -> Int[Tensor, " k"]:
    """Any."""
    order = torch.randperm(len(known.candidates), generator=known.draw)[:count]  # on the CPU: the same everywhere
    return known.candidates[order.to(known.device)]


def by_entropy(known: Round, count: int) -> Int[Tensor, " k"]:
    """Those whose class is least known: the largest −Σ p log p."""
    p = known.probabilities[known.candidates]
    return _largest(known, torch.special.entr(p).sum(1), count)


def by_margin(known: Round, count: int) -> Int[Tensor, " k"]:
    """Those of the smallest difference between the two likeliest classes. Scheffer, Decomain & Wrobel 2001."""
    two = known.probabilities[known.candidates].topk(2, dim=1).values
    return _largest(known, two[:, 1] - two[:, 0], count)


def by_confidence(known: Round, count: int) -> Int[Tensor, " k"]:
    """Those whose likeliest class is least likely. Lewis & Gale 1994."""
    return _largest(known, -known.probabilities[known.candidates].amax(1), count)


def by_badge(known: Round, count: int) -> Int[Tensor, " k"]:
    """k-means++ on gradients (p − e_ŷ) ⊗ h of the last layer: unsure ones, far from each other. Ash et al. 2020.

    Of a kernel machine: on the same with the kernel's own features for h.
    """
    p, v = known.probabilities, known.vectors
    error = p.clone()
    error[torch.arange(len(p), device=p.device), p.argmax(1)] -= 1
    diagonal = v.diagonal * error.square().sum(1)
    return spread_at_random(diagonal, lambda i: v.products(i) * (error @ error[i]), known.candidates, count, known.draw)


def by_coreset(known: Round, count: int) -> Int[Tensor, " k"]:
    """Each the farthest from all that have labels or were chosen before (k-centre greedy). Sener & Savarese 2018."""
    v = known.vectors
    return farthest(v.diagonal, v.products, known.labelled, known.candidates, count)


def by_look_ahead(known: Round, count: int) -> Int[Tensor, " k"]:
    """Each whose likeliest label would change the machine's outputs most, once it has learned those before it."""
    return greedy_changes(known.machine, known.candidates, count)


def by_expected_change(known: Round, count: int) -> Int[Tensor, " k"]:
    """As "lookahead", by the change to be expected under the probabilities of the classes."""
    return greedy_changes(known.machine, known.candidates, count, probabilities=known.probabilities)


def by_flips(known: Round, count: int) -> Int[Tensor, " k"]:
    """As "lookahead", by how many candidates would change their class."""
    return greedy_changes(known.machine, known.candidates, count, measure="classes")


def by_look_ahead_at_once(known: Round, count: int) -> Int[Tensor, " k"]:
    """The largest changes by the likeliest label, none after another (the paper's MLMOC)."""
    return _largest(known, known.machine.most_likely_change(known.candidates), count)


def _largest(known: Round, score: Tensor, count: int) -> Int[Tensor, " k"]:
    return known.candidates[score.topk(count).indices]


STRATEGIES: dict[str, Strategy] = {
    "lookahead": by_look_ahead,
    "expected": by_expected_change,
    "flips": by_flips,
    "mlmoc": by_look_ahead_at_once,
    "badge": by_badge,
    "coreset": by_coreset,
    "margin": by_margin,
    "entropy": by_entropy,
    "confidence": by_confidence,
    "random": at_random,
}
# They choose without knowing anything.
BLIND: tuple[Strategy, ...] = (at_random,)


def named(strategy: object) -> Strategy:
    """The strategy of this name, or the user's own."""
    if callable(strategy):
        return strategy
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        checks.choice(strategy, "strategy", STRATEGIES, ", or a function (round, count) -> numbers of candidates")
    return STRATEGIES[str(strategy)]
