"""Do two samples come from one distribution: can a kernel machine tell them apart, and which of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base import checks
from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Array, Float, Int, Memory
from ..errors import InputError
from ..kernels.kernel import Kernel
from ..linalg.matrix import Matrix
from ..projection.features import StoredFeatures
from . import null
from .intervals import AUROC, Interval, auroc, proportion
from .machines import ByFeatures, ByGram, Machine
from .pooled import pooled, pooled_features, sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MACHINES, STATISTICS = ("ridge", "logistic"), ("auc", "accuracy", "scores")
FOLDS = 5


@dataclass(frozen=True, eq=False, repr=False)
class ClassifierTest(Result):
    """How well a kernel machine tells x from y, and how likely so well by chance.

    `value` is the statistic that was tested, `null` what it is for permuted labels. `accuracy`: the mean of the parts
    of x and of y that are told right, 0.5 by chance. `auc`: how likely a sample of x scores higher than one of y. Their
    intervals take scores of different folds as independent, which they nearly are. `scores_x` [m], `scores_y` [n]: of
    each sample by a machine that was not fitted to it, above `thresholds` where it says x; nan where all that judge it
    were fitted to it (the training half of "logistic").
    """

    statistic: str
    value: float
    p: float
    null: Float[Tensor, " b"]
    accuracy: float
    accuracy_interval: Interval
    auc: AUROC
    scores_x: Float[Tensor, " m"]
    scores_y: Float[Tensor, " n"]
    machine: str
    folds: int | None
    reg: float

    def rejected(self, level: float = 0.05) -> bool:
        """Whether p is at most `level`."""
        return self.p <= level

    def carriers(self, count: int = 10) -> tuple[Tensor, Tensor]:
        """Numbers of the samples of x that look most like x, and of those of y that look most like y."""
        checks.positive(count, "count", "a number of samples")
        x = self.scores_x.nan_to_num(-torch.inf).argsort(descending=True, stable=True)[:count]
        y = self.scores_y.nan_to_num(torch.inf).argsort(stable=True)[:count]
        return x[~self.scores_x[x].isnan()], y[~self.scores_y[y].isnan()]

    def sentence(self, level: float = 0.05) -> str:
        """What was found, in words."""
        low, high = self.accuracy_interval
        how = (
            f"accuracy {self.accuracy:.1%} [{low:.1%}, {high:.1%}], AUROC {self.auc.value:.3f}, p = {self.p:.2g} by "
            f"{len(self.null)} permutations"
        )
        if self.rejected(level):
            return f"The samples differ: a {self.machine} machine tells them apart ({how})."
        return f"No difference is found, which does not show that there is none ({how})."

    def table(self) -> str:
        """Accuracy and AUROC with intervals, the tested value, p."""
        low, high = self.accuracy_interval
        rows = [
            ["accuracy", self.accuracy, low, high],
            ["AUROC", self.auc.value, self.auc.low, self.auc.high],
            [f"{self.statistic} tested, p", self.value, self.p, ""],
        ]
        return text_table(["", "value", "low", "high"], rows)

    def plot(self) -> "Figure":
        """The value in its null distribution, and the scores of both samples."""
        from .pictures import draw_two_sample

        kept = [v[~v.isnan()] for v in (self.scores_x, self.scores_y)]
        return draw_two_sample(self.null, self.value, self.p, (kept[0], kept[1]), self.statistic)


def classifier_test(
    kernel: Kernel | Matrix,
    x: object,
    y: object,
    *,
    machine: str = "ridge",
    statistic: str = "auc",
    folds: int | None = None,
    reg: float | None = None,
    draws: int = 1000,
    seed: int = 0,
    memory: Memory = None,
    progress: bool = True,
) -> ClassifierTest:
    """P(score of x > score of y) for a kernel machine that tells x from y, and its p-value: one distribution, or two?

    `kernel`, x and y as for `mmd`. `machine`: "ridge" (least squares on ±1) is fitted to all of `folds` parts (5) but
    one and asked about that; for every permutation of the labels it is fitted anew, so that p = (1 + #)/(1 + draws)
    is exact. "logistic" is fitted to one half of the samples and asked about the other, whose labels are permuted;
    exact, too. `statistic`: what is tested: "auc", "accuracy", or "scores", the difference of the mean scores.
    `reg`: absolute; by default the mean eigenvalue of the kernel about its mean, which knows no labels.

    Cost: the Gram and five factors of it; a draw is N² multiply–adds, as matrix products. Lopez-Paz & Oquab 2017,
    "Revisiting classifier two-sample tests"; scores: Cheng & Cloninger 2019; ridge's folds: Kim et al. 2021.

    >>> import tangency as tg
    >>> x, y = torch.randn(60, 3), torch.randn(60, 3) + 1
    >>> found = tg.distributions.classifier_test(tg.gaussian(torch.cat([x, y])), x, y, draws=200, progress=False)
    >>> found.rejected(), found.accuracy > 0.6
    (True, True)
    """
    options = _Options.of(machine, statistic, folds, reg, draws, seed, memory)
    both = pooled(kernel, x, y, memory, progress)
    options.suit(len(both.of_x), len(both.of_y))
    order = torch.cat([both.of_x, both.of_y])
    gram = both.gram.select(order, order).dense().detach().double()
    return _tested(ByGram(gram), len(both.of_x), gram.device, options, progress)


def classifier_test_features(
    x: Array | StoredFeatures,
    y: Array | StoredFeatures,
    *,
    machine: str = "ridge",
    statistic: str = "auc",
    folds: int | None = None,
    reg: float | None = None,
    draws: int = 1000,
    seed: int = 0,
    memory: Memory = None,
    progress: bool = True,
) -> ClassifierTest:
    """`classifier_test` by features [m, p], [n, p], without a Gram where there are fewer features than samples.

    Options as there. Cost: five factors of p × p, and N·p multiply–adds a draw; the features lie in memory.

    >>> x, y = torch.randn(90, 3), torch.randn(80, 3) + 1
    >>> classifier_test_features(x, y, draws=100, progress=False).rejected()
    True
    """
    options = _Options.of(machine, statistic, folds, reg, draws, seed, memory)
    both = pooled_features(x, y)
    options.suit(len(both.x), len(both.y))
    phi = torch.cat([block for _, block in both.blocks()])
    knows = ByFeatures(phi) if phi.shape[1] < len(phi) else ByGram(phi @ phi.T)
    return _tested(knows, len(both.x), phi.device, options, progress)


@dataclass(frozen=True)
class _Options:
    """How it is tested, checked."""

    machine: str
    statistic: str
    folds: int | None
    reg: float | None
    draws: int
    seed: int
    memory: int | None

    @staticmethod
    def of(
        machine: str, statistic: str, folds: int | None, reg: float | None, draws: int, seed: int, memory: Memory
    ) -> "_Options":
        """Refuse what does not go together, before anything is computed."""
        checks.choice(machine, "machine", MACHINES)
        checks.choice(statistic, "statistic", STATISTICS)
        checks.positive(draws, "draws", "a number of permutations")
        if machine == "logistic" and folds is not None:
            raise InputError("the logistic machine is fitted to one half and asked about the other: it has no folds=.")
        if folds is not None and (isinstance(folds, bool) or not isinstance(folds, int) or folds < 2):
            raise InputError(f"folds={folds!r}; needed: a number of parts, at least 2.")
        reg = None if reg is None else checks.nonnegative(reg, "reg")
        return _Options(machine, statistic, folds, reg, draws, seed, checks.memory(memory))

    def suit(self, m: int, n: int) -> None:
        """Enough samples for the folds."""
        least = 4 if self.machine == "logistic" else self.folds or 2
        sizes(m, n, least, "some in each half" if self.machine == "logistic" else "one in each fold")


Scored = Callable[[Tensor], Tensor]  # columns that are 1 for x's → scores of each sample, one or as many columns


def _tested(knows: Machine, m: int, device: torch.device, given: _Options, progress: bool) -> ClassifierTest:
    """The test, for either way to have the kernel; samples of x come first."""
    of_x = torch.arange(knows.size) < m
    generator = torch.Generator().manual_seed(given.seed)
    reg = knows.default_reg() if given.reg is None else given.reg
    if not math.isfinite(reg):
        raise InputError("the kernel overflows float64; scale it, or the features, down.")
    scored, parts = (_halved if given.machine == "logistic" else _crossed)(knows, of_x, given, reg, generator, device)
    statistic = _Statistic(given.statistic, torch.cat(parts).to(device), midway=given.machine == "ridge")
    z = of_x[:, None].to(device, torch.float64)
    own = scored(z)
    drawn = []
    with bar(given.draws, "permutations", "draw", show=progress, delay=1) as tick:
        for k in null.widths(given.draws, 2 * len(of_x), given.memory):
            mixed = null.permuted_within(of_x, parts, k, generator).to(device)
            drawn.append(statistic(scored(mixed), mixed))
            tick(k)
    every, value = torch.cat(drawn).cpu(), float(statistic(own, z))
    p = null.p_value(value, every, 1.0 if given.statistic != "scores" else abs(value), every=False)
    asked = torch.cat(parts).sort().values
    scores, is_x = own[:, 0].cpu(), of_x[asked]
    right = statistic.right(own, z)[:, 0].cpu()
    accuracy, between = _balanced(right[asked][is_x], right[asked][~is_x])
    auc = auroc(scores[asked], is_x)
    folds = None if given.machine == "logistic" else len(parts)
    return ClassifierTest(
        given.statistic, value, p, every, accuracy, between, auc, scores[:m], scores[m:], given.machine, folds, reg
    )


def _crossed(
    knows: Machine, of_x: Tensor, given: _Options, reg: float, generator: torch.Generator, device: torch.device
) -> tuple[Scored, list[Tensor]]:
    """Ridge regression of all folds but one, for each, fitted anew to any labels."""
    least = int(min(of_x.sum(), (~of_x).sum()))
    parts = _folds(of_x, given.folds or min(FOLDS, least), generator)
    fitted = knows.ridge([part.to(device) for part in parts], reg)
    return lambda z: fitted(_labels(z)), parts


def _halved(
    knows: Machine, of_x: Tensor, given: _Options, reg: float, generator: torch.Generator, device: torch.device
) -> tuple[Scored, list[Tensor]]:
    """Logistic regression of one half, asked about the other, whatever labels that has."""
    train, asked = _folds(of_x, 2, generator)
    scores = torch.full((len(of_x), 1), torch.nan, dtype=torch.float64, device=device)
    odds = knows.logistic(train.to(device), asked.to(device), of_x[train].to(device), reg)
    scores[asked.to(device), 0] = odds.double()
    return lambda z: scores, [asked]


@dataclass(frozen=True, eq=False)
class _Statistic:
    """How far scores of x are above those of y, for every column of labels; `rows` are the samples that count."""

    kind: str
    rows: Int[Tensor, " k"]
    midway: bool  # the threshold lies midway between the two means; else at 0

    def __call__(self, scores: Float[Tensor, "N a"], z: Float[Tensor, "N b"]) -> Float[Tensor, " b"]:
        """Of each column."""
        if self.kind == "accuracy":
            hit, own = self.right(scores, z)[self.rows], z[self.rows]
            return ((hit * own).sum(0) / own.sum(0) + (hit * (1 - own)).sum(0) / (1 - own).sum(0)) / 2
        own = z[self.rows]
        if self.kind == "scores":
            return _apart(scores[self.rows], own)
        ranks = _ranks(scores[self.rows])
        m = own.sum(0)
        return ((ranks * own).sum(0) - m * (m + 1) / 2) / (m * (len(own) - m))

    def right(self, scores: Tensor, z: Tensor) -> Tensor:
        """1 where a score says what the column says."""
        threshold = scores.new_zeros(())
        if self.midway:
            # The mean of all samples lies nearer to the mean of the larger one.
            threshold = (0.5 - z[self.rows].mean(0)) * _apart(scores[self.rows], z[self.rows])
        return ((scores > threshold) == (z > 0.5)).double()


def _apart(scores: Tensor, z: Tensor) -> Tensor:
    """Mean score of x less mean score of y."""
    m = z.sum(0)
    return (scores * z).sum(0) / m - (scores * (1 - z)).sum(0) / (len(z) - m)


def _ranks(scores: Tensor) -> Tensor:
    """Ranks from 1 within each column; equal scores share the mean of theirs."""
    rows = scores.T.contiguous()
    ordered = rows.sort(1).values
    low, high = (torch.searchsorted(ordered, rows, right=right) for right in (False, True))
    return ((low + high + 1).to(scores.dtype) / 2).T


def _folds(of_x: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """Parts with as many samples of each kind as can be, at random."""
    where = torch.empty(len(of_x), dtype=torch.long)
    for kind in (of_x, ~of_x):
        own = kind.nonzero()[:, 0]
        where[own[torch.randperm(len(own), generator=generator)]] = torch.arange(len(own)) % count
    return [(where == k).nonzero()[:, 0] for k in range(count)]


def _labels(z: Tensor) -> Tensor:
    """N/2m for x, −N/2n for y: their sum is 0, and they are ±1 where there are as many of both."""
    m = z.sum(0)
    return len(z) / 2 * (z / m - (1 - z) / (len(z) - m))


def _balanced(right_x: Tensor, right_y: Tensor) -> tuple[float, Interval]:
    """The mean of two proportions with an interval made of Wilson's of each (Zou & Donner 2008)."""
    parts = [float(v.mean()) for v in (right_x, right_y)]
    ends = [proportion(int(v.sum()), len(v)) for v in (right_x, right_y)]
    value = sum(parts) / 2
    below = sum((p - end.low) ** 2 for p, end in zip(parts, ends, strict=True)) ** 0.5 / 2
    above = sum((end.high - p) ** 2 for p, end in zip(parts, ends, strict=True)) ** 0.5 / 2
    return value, Interval(max(0.0, value - below), min(1.0, value + above))
