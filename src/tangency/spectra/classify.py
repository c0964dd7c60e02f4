"""Which kind of spectrum training left: the initial bulk, spikes beside it, or a heavy tail."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float
from ..errors import InputError
from .compare import Comparison, compare
from .edges import Edge, bulk_edge
from .tail import LEAST, PowerLaw, power_law
from .values import Values, given

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("invariant", "bulk + spikes", "heavy tail", "changed bulk")
# Heuristics, calibrated in tests/spectra/test_classify.py and tabulated on docs/tasks/learned.md.
FACTOR = 0.05  # a common factor beyond e^±this is said
STIFF = 6.0  # unless it is within e^±(this over n): eigenvalues are stiff, two draws of a matrix differ by no more
FEW = 10  # and explains a tail if it leaves so many times fewer values outside
GROWN = 1.5  # a spike that was there at the start is another one if it grew by this factor
MANY = 0.025  # a tail has at least this part of the values outside the bulk, and
MANY_LEAST = 8  # at least so many; fewer are spikes
APART = 0.5  # a tail begins where the bulk ends: its smallest value is nearer than this part of the mean (logarithms)
STEEPEST = 8.0  # a density λ^−α with a larger α is no heavy tail


@dataclass(frozen=True, eq=False, repr=False)
class Classified(Result):
    """What became of a spectrum, with the numbers that say why."""

    kind: str  # one of KINDS
    sentence: str
    edge: Edge  # of the initial bulk
    spikes: Float[Tensor, " s"]  # values outside that were not there before, largest first
    before: int  # initial values outside
    comparison: Comparison  # of the bulks: both without what lies outside
    tail: PowerLaw | None  # where so many lie outside that it may be a tail
    values: Float[Tensor, " n"]
    initial: Float[Tensor, " m"]

    def table(self) -> str:
        """One line of the numbers."""
        alpha = "-" if self.tail is None else f"{self.tail.alpha:.2f} ± {self.tail.error:.2f}"
        row = [self.kind, self.edge.threshold, float(self.values[0]), len(self.spikes), self.comparison.p, alpha]
        return text_table(["kind", "edge", "largest", "new outside", "p of the bulk", "alpha"], [row])

    def plot(self) -> "Figure":
        """Histograms of both spectra with the edge, and the Q–Q plot of the bulks."""
        from .pictures import draw_spectra

        c = self.comparison
        titles, bulks = (self.kind, f"{c.verdict}, KS {c.ks:.3f}"), (c.initial, c.trained)
        return draw_spectra(self.initial, self.values, self.edge.threshold, self.spikes, titles, bulks)


def classify(
    values: Values, initial: Values, *, edge: Edge | None = None, level: float = 0.01, draws: int = 100, seed: int = 0
) -> Classified:
    """λ > edge of the initial bulk: none ("invariant"), some ("bulk + spikes"), or a tail λ^−α of them ("heavy tail").

    `values`, `initial`: eigenvalues, a Gram, or a result that has some, after training and before. `edge`: where the
    initial bulk ends (default: `bulk_edge(initial)`; of weights also `initial.bulk.edge()`). Outliers that the initial
    spectrum had in the same place do not count. A tail needs 2.5 % of the values outside, at least 8, α ≤ 8, and a
    power law that is not worse than an exponential. A bulk that changed without outliers, grew as a whole, or lost its
    spikes is none of the three: "changed bulk". Error rates by simulation: the documentation's page "What was learned".
    Cost: sorting, and for a tail its fit. Wang et al. 2024, "Spectral evolution and invariance in linear-width neural
    networks".

    >>> import tangency as tg
    >>> w = torch.randn(400, 200, generator=torch.Generator().manual_seed(0)).double()
    >>> trained = w + torch.ones(400, 200) / 4
    >>> tg.spectra.classify(trained.T @ trained, w.T @ w).kind
    'bulk + spikes'
    """
    now, before = given(values, "values", LEAST), given(initial, "initial", LEAST)
    if edge is not None and not isinstance(edge, Edge):
        raise InputError(
            f"edge is a {type(edge).__name__}; needed: an Edge, as tg.spectra.bulk_edge(initial) gives it."
        )
    end = bulk_edge(before) if edge is None else edge
    outside = int((before > end.threshold).sum())
    # The sizes may differ: the value of rank i among n is held against that of the same part of m.
    limits = _limits(before, len(now), end, outside)
    new = now > limits
    spikes = now[new]
    rest, old = now[~new & (now <= end.threshold)], before[before <= end.threshold]
    comparison = compare(rest if len(rest) else now, old if len(old) else before, level=level)
    many = len(spikes) >= max(MANY_LEAST, MANY * len(now)) and _beyond(spikes, end)[1] <= APART
    fit = _tail(now, draws, seed) if many else None
    gone = _gone(now, before, end, outside)
    kind = _kind(len(spikes), fit, comparison, gone)
    factor = _grown(now, before)
    if factor is not None and compare(now / factor, before, level=level).invariant:
        found = classify(now / factor, before, edge=edge, level=level, draws=draws, seed=seed)
        # A tail is no growth of all values unless that explains nearly all that lies outside.
        if kind != "heavy tail" or FEW * len(found.spikes) <= len(spikes):
            return _scaled(found, factor, now)
    sentence = _sentence(kind, end, spikes, outside, comparison, fit, gone)
    return Classified(kind, sentence, end, spikes, outside, comparison, fit, now, before)


def _grown(now: Float[Tensor, " n"], before: Float[Tensor, " m"]) -> float | None:
    """By which factor the middle of the spectrum grew or shrank; None where it did not, or has no size."""
    # The mean of the middle half: it differs half as much from draw to draw as the median.
    middle, first = (float(v[len(v) // 4 : len(v) - len(v) // 4].mean()) for v in (now, before))
    if not (middle > 0 and first > 0):
        return None
    beyond = abs(math.log(middle / first)) > max(FACTOR, STIFF / min(len(now), len(before)))
    return middle / first if beyond else None


def _scaled(found: Classified, factor: float, now: Float[Tensor, " n"]) -> Classified:
    """What was said of a spectrum that had been divided by its common factor."""
    words = f"All values are {factor:.3g} times what they were"
    if found.kind == "invariant":
        return replace(found, kind="changed bulk", sentence=f"Changed bulk: {words[0].lower()}{words[1:]}.", values=now)
    return replace(found, sentence=f"{words}; beside that: {found.sentence}", spikes=found.spikes * factor, values=now)


def _gone(now: Float[Tensor, " n"], before: Float[Tensor, " m"], edge: Edge, outside: int) -> int:
    """How many of the initial spikes, which stand apart from the bulk, have no value of about their size any more."""
    k = min(outside, len(now))
    if not k or (_beyond(before[:outside], edge)[1] <= APART and outside > 1):
        return outside - k
    far = before[:k] > GROWN * edge.threshold
    return int((far & (now[:k] < before[:k] / GROWN)).sum()) + outside - k


def _limits(before: Float[Tensor, " m"], n: int, edge: Edge, outside: int) -> Float[Tensor, " n"]:
    """What a value of each rank must exceed to be new: the edge, or the initial value of its rank and some more."""
    limits = torch.full((n,), edge.threshold, dtype=torch.float64)
    k = min(outside, n)
    if not k:
        return limits
    grown = torch.full((k,), math.log(GROWN), dtype=torch.float64)
    logs, gap = _beyond(before[:outside], edge)
    if gap <= APART:
        # The initial spectrum has a tail itself. Its order statistics differ from draw to draw by √(2/i)/a in the
        # logarithm, 1/a their mean distance from the edge (Hill's estimate); three times that.
        spread = 3 * logs.mean() * (2 / torch.arange(1, n + 1, dtype=torch.float64)).sqrt()
        limits, grown = limits * spread.exp(), torch.maximum(grown, spread[:k])
    limits[:k] = torch.maximum(limits[:k], before[:k] * grown.exp())
    return limits


def _beyond(outside: Float[Tensor, " k"], edge: Edge) -> tuple[Float[Tensor, " k"], float]:
    """log λ/edge of values outside, and how far they stand apart: their smallest in units of the mean.

    Of a power law the spacings i·log(λ_i/λ_{i+1}) are independent and alike, so that the smallest is 1/k of the mean or
    so; of k equal spikes it is the mean itself.
    """
    if edge.threshold <= 0:
        return torch.full_like(outside, math.inf), 1.0
    logs = (outside / edge.threshold).log()
    return logs, float(logs[-1] / logs.mean()) if float(logs[0]) > 0 else 0.0


def _tail(values: Float[Tensor, " n"], draws: int, seed: int) -> PowerLaw | None:
    """The power law, where there are values enough of different size."""
    positive = values[values > 0]
    if len(positive) < LEAST or float(positive[0]) == float(positive[-1]):
        return None
    return power_law(positive, draws=draws, seed=seed)


def _kind(count: int, fit: PowerLaw | None, comparison: Comparison, gone: int) -> str:
    if not count:
        return "invariant" if comparison.invariant and not gone else "changed bulk"
    heavy = fit is not None and fit.alpha <= STEEPEST and fit.against["exponential"].ratio > 0
    return "heavy tail" if heavy else "bulk + spikes"


def _sentence(
    kind: str, edge: Edge, spikes: Float[Tensor, " s"], outside: int, c: Comparison, fit: PowerLaw | None, gone: int
) -> str:
    """The verdict and its numbers, for people."""
    end = f"the end of the initial bulk ({edge.threshold:.4g})"
    bulk = f"the bulks {'agree' if c.invariant else 'differ'} (KS {c.ks:.3f}, p {c.p:.2g})"
    had = f"; {outside} {'were' if outside > 1 else 'was'} there before" if outside else ""
    if kind == "invariant":
        return f"Invariant: no value is new above {end}{had}; {bulk}."
    if kind == "changed bulk" and c.invariant:
        return f"Changed bulk: {gone} of {outside} values above {end} {'is' if gone == 1 else 'are'} gone; {bulk}."
    if kind == "changed bulk":
        return f"Changed bulk: no value is new above {end}{had}, but {bulk}, moved by {c.shift:.2g} of the spread."
    found = f"{len(spikes)} value{'s' * (len(spikes) > 1)} above {end}{had}, the largest {float(spikes[0]):.4g}"
    if kind == "heavy tail" and fit is not None:
        odds = "plausible" if fit.plausible else "no exact fit"
        law = f"the tail falls as a power law with α = {fit.alpha:.2f} ± {fit.error:.2f} ({odds}, p {fit.p:.2g})"
        return f"Heavy tail: {found}; {law}."
    return f"Bulk and spikes: {found}; {bulk}."
