"""What a τ_K means in plain words: which word it gets, how many pairs it is, and what it is to be held against."""

import math
from dataclasses import dataclass
from typing import Literal

from .._base.results import Result
from ..surrogate import Faithfulness, Interval

Word = Literal["closely", "in part", "hardly"]
# τ_K from which on a surrogate follows its network closely, and in part (heuristics: 80 and 65 of 100 pairs of samples
# in the same order; the published surrogates of a ResNet18 have 0.45 to 0.74, Engel et al. 2024, Table 2).
CLOSELY, IN_PART = 0.6, 0.3
RULE = (
    f"Closely: a τ_K from {CLOSELY:g} on; in part: from {IN_PART:g}; hardly: below that, or where its interval reaches "
    "down to 0 or to what shuffled labels give."
)


@dataclass(frozen=True)
class Verdict(Result):
    """How a surrogate follows its network: closely, in part, or hardly.

    `sentence`: what its τ_K means; `against`: what it is to be held against, a sentence each; `rule`: when which word.
    """

    word: Word
    sentence: str
    against: tuple[str, ...]
    rule: str = RULE


def verdict(f: Faithfulness, *, chance: Interval | None = None, second: Faithfulness | None = None) -> Verdict:
    """τ_K in words: (1 + τ_K)/2 is the part of the pairs of samples that both put in the same order, ties aside.

    `chance`: τ_K of surrogates fitted to shuffled labels, the smallest and the largest. `second`: how another network
    follows this one.

    >>> import torch, tangency as tg
    >>> z = torch.randn(50, 3).double()
    >>> verdict(tg.surrogate.faithfulness(z, z, torch.arange(50) % 3, outputs_are="logits")).word
    'closely'
    """
    word = _word(f, chance)
    if math.isnan(f.tau):
        meaning = "It, or the network, says the same of every test sample, so there is no order to compare."
    else:
        pairs = round(50 * (1 + f.tau))
        meaning = (
            f"Of two test samples, both give the correct class of the same one the higher probability in about {pairs} "
            f"of 100 pairs (τ_K {f.tau:.2f}); a coin has 50."
        )
    against = []
    if chance is not None:
        beyond = "which it clears" if _low(f) > chance.high else "which it does not clear"  # NaN does not
        against.append(
            f"Surrogates fitted to shuffled labels have a τ_K from {chance.low:.2f} to {chance.high:.2f}, {beyond}."
        )
    if second is not None:
        against.append(
            f"A second network has {second.tau:.2f}: the most that one may expect of something that is not the network "
            "itself."
        )
    return Verdict(word, f"The surrogate follows the network {word}. {meaning}", tuple(against))


def _word(f: Faithfulness, chance: Interval | None) -> Word:
    """Which word fits; of NaN, the last."""
    least = max(0.0, chance.high) if chance is not None else 0.0
    if not (f.tau >= IN_PART and _low(f) > least):
        return "hardly"
    return "closely" if f.tau >= CLOSELY else "in part"


def _low(f: Faithfulness) -> float:
    """The lower end of the interval of τ_K, or τ_K where there is none."""
    return f.intervals["tau"].low if "tau" in f.intervals else f.tau
