"""How many eigenvalues count: effective ranks, and the condition number."""

import math
from dataclasses import dataclass

import torch  # noqa: F401 - for the examples

from .._base.results import Result, text_table
from ..errors import InputError
from .values import Values, nonnegative, unit


@dataclass(frozen=True, repr=False)
class Ranks(Result):
    """Ranks of a matrix with eigenvalues λ: from 1, one direction, to n, all alike."""

    n: int
    entropy: float  # exp(−Σ p log p), p = λ / Σ λ
    stable: float  # Σ λ / λ_1; of a weight matrix with λ of WᵀW: ‖W‖_F² / ‖W‖²
    participation: float  # (Σ λ)² / Σ λ²
    numerical: int  # values above 10 ε λ_1, ε of the type that they came in
    condition: float  # λ_1 / λ_n; infinite for a matrix without full numerical rank
    largest: float
    trace: float

    def table(self) -> str:
        """One line."""
        names = ["n", "entropy", "stable", "participation", "numerical", "condition"]
        return text_table(names, [[getattr(self, name) for name in names]])


def ranks(values: Values) -> Ranks:
    """exp(−Σ p log p) with p = λ/Σλ, Σλ/λ_1, (Σλ)²/Σλ² and λ_1/λ_n: how many eigenvalues count, four ways.

    None of them depends on the scale of the values. Cost: n. Roy & Vetterli 2007, "The effective rank", for the first;
    Rudelson & Vershynin 2007 for the stable rank.

    >>> import tangency as tg
    >>> round(tg.spectra.ranks([2.0, 2.0, 2.0, 0.0]).entropy, 6)
    3.0
    >>> tg.spectra.ranks(torch.eye(5)).condition
    1.0
    """
    found = nonnegative(values)
    if not float(found[0]) > 0:
        raise InputError(
            f"all {len(found)} values are 0; needed: at least one above 0, or there is no rank to speak of."
        )
    part, scale = unit(found)
    total = float(part.sum())
    p = part[part > 0] / total
    numerical = int((part > 0).sum())  # what is rounding is 0 by now
    return Ranks(
        n=len(found),
        entropy=math.exp(float(-(p * p.log()).sum())),
        stable=total,
        participation=total**2 / float(part.square().sum()),
        numerical=numerical,
        condition=1 / float(part[-1]) if numerical == len(part) else math.inf,
        largest=scale,
        trace=scale * total,
    )
