"""Is the balance of the classes another, or are the inputs of a class? Label shift and shift given the class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .._base.checks import some
from .._base.results import Result, text_table
from .._base.types import Float
from .carriers import holm

# Samples of a class that both sets need for a test within it (heuristic).
LEAST = 8
Kind = Literal["balance", "inputs", "both", "neither"]


@dataclass(frozen=True, eq=False, repr=False)
class ClassShift(Result):
    """The balance of the classes in both sets, and a test of the inputs of each class.

    `source`, `target`: the part of each class. `balance_p`: of equal balance (χ², by permutation). `inputs_p`: of equal
    inputs given each class, corrected for all classes (Holm 1979); NaN where a set has too few samples of a class.
    `of`: whether these are labels or the model's predictions.
    """

    names: tuple[str, ...]
    source: Float[Tensor, " c"]
    target: Float[Tensor, " c"]
    balance_p: float
    inputs_p: Float[Tensor, " c"]
    of: str = "labels"

    def kind(self, level: float) -> Kind:
        """What is shown to differ at this level."""
        balance = self.balance_p <= level
        inputs = bool((self.inputs_p <= level).any())
        return "both" if balance and inputs else "balance" if balance else "inputs" if inputs else "neither"

    def sentence(self, level: float) -> str:
        """What differs, in words."""
        balance = f"the balance of the {self.of}"
        differs = self.balance_p <= level
        said = f"{balance[:1].upper()}{balance[1:]} {'differs' if differs else 'was not found to differ'} "
        said += f"(p = {self.balance_p:.2g}); "
        tested = ~self.inputs_p.isnan()
        shown = [name for name, p in zip(self.names, self.inputs_p.tolist(), strict=True) if p <= level]
        if not bool(tested.any()):
            return f"{said}no class has samples enough in both sets for a test of its inputs."
        if not shown:
            return f"{said}of none of {int(tested.sum())} classes were the inputs found to differ."
        said += f"given the class, the inputs differ in {len(shown)} of {int(tested.sum())}: {some(shown)}."
        if self.of == "predictions" and differs:
            # Among samples of one predicted class the parts of the true ones change with their balance.
            said += " With predictions in place of labels, a changed balance alone can do that."
        return said

    def table(self, most: int = 20) -> str:
        """A line for each class."""
        rows = [
            [name, f"{float(s):.1%}", f"{float(t):.1%}", "too few" if p != p else f"{p:.3g}"]
            for name, s, t, p in zip(self.names, self.source, self.target, self.inputs_p.tolist(), strict=True)
        ]
        return text_table(["class", "source", "target", "p of its inputs"], rows[:most])


def compare_classes(
    names: Sequence[str],
    ys: tuple[Tensor, Tensor],
    sets: tuple[Tensor, Tensor],
    test: Callable[[Tensor, Tensor], float],
    draws: int,
    seed: int,
    of: str,
) -> ClassShift:
    """`ys`: the class of every sample; `sets`: their components, of which `test` gives the p-value of two samples."""
    counts = [torch.bincount(y.cpu(), minlength=len(names)).double() for y in ys]
    p = torch.full((len(names),), torch.nan, dtype=torch.float64)
    for c in range(len(names)):
        a, b = (z[y.cpu() == c] for z, y in zip(sets, ys, strict=True))
        if min(len(a), len(b)) >= LEAST:
            p[c] = test(a, b)
    tested = ~p.isnan()
    p[tested] = holm(p[tested])
    parts = [v / v.sum() for v in counts]
    return ClassShift(tuple(names), parts[0], parts[1], balance(counts[0], counts[1], draws, seed), p, of)


def balance(source: Float[Tensor, " c"], target: Float[Tensor, " c"], draws: int, seed: int) -> float:
    """P(χ² at least as large) when the labels of both sets are dealt out anew.

    >>> balance(torch.tensor([50.0, 50.0]), torch.tensor([10.0, 90.0]), 999, 0)
    0.001
    """
    pooled = (source + target).numpy().round().astype(np.int64)
    m = round(float(target.sum()))
    expected = pooled / pooled.sum() * m
    there = expected > 0

    def statistic(counts: np.ndarray) -> np.ndarray:
        """χ² up to a factor, which the margins fix."""
        return ((counts[..., there] - expected[there]) ** 2 / expected[there]).sum(-1)

    dealt = np.random.Generator(np.random.PCG64(seed)).multivariate_hypergeometric(pooled, m, size=draws)
    observed = statistic(target.numpy())
    # What is equal but for rounding counts as equal.
    return float((1 + (statistic(dealt) >= observed * (1 - 1e-12)).sum()) / (draws + 1))
