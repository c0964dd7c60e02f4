"""Which samples are unlike known ones: scores, and thresholds with a stated rate of false alarms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result, text_table
from .._base.types import Array, Float, Memory, Numbers
from ..errors import InputError
from ..gram.source import source
from ..kernels.kernel import Kernel
from ..linalg.matrix import Matrix, square
from ..projection.features import StoredFeatures
from . import scores
from .intervals import AUROC, auroc
from .pooled import Joined, given_features, pooled, row_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BY_KERNEL = ("mahalanobis", "one class", "density")
BY_FEATURES = ("mahalanobis", "relative mahalanobis", "density", "neighbours")
HELD_OUT = 0.3  # the part of the known samples that thresholds are made of
COMPONENTS, NEIGHBOURS = 10, 10  # heuristics: densities need few dimensions, distances more than one neighbour
RATES = (0.01, 0.05, 0.1)


@dataclass(frozen=True, eq=False, repr=False)
class Outliers(Result):
    """How strange each sample is beside the known ones: larger is stranger.

    `p` [m]: the part of known samples, held out of the fit, that are as strange, (1 + #)/(1 + how many). A known
    sample's p is at most α with a probability of at most α (conformal; Bates et al. 2023), if it is drawn as those held
    out are. `held_out`: their scores.
    """

    score: str
    scores: Float[Tensor, " m"]
    p: Float[Tensor, " m"]
    held_out: Float[Tensor, " k"]
    fitted: int  # known samples that the score was fitted to
    setting: str  # reg, shrinkage, components, neighbours: what it was made with

    def threshold(self, rate: float = 0.05) -> float:
        """The score above which at most this part of known samples lies; infinite where too few were held out."""
        allowed = int(_rate(rate) * (1 + len(self.held_out)) + 1e-9)
        return float(self.held_out.sort(descending=True).values[allowed - 1]) if allowed else float("inf")

    def flagged(self, rate: float = 0.05) -> Tensor:
        """Numbers of the samples above that threshold, the strangest first."""
        order = self.scores.argsort(descending=True, stable=True)
        return order[self.scores[order] > self.threshold(rate)]

    def auroc(self, outlier: Numbers, *, confidence: float = 0.95) -> AUROC:
        """How well the scores tell those samples that are outliers from the others, with DeLong's interval."""
        return auroc(self.scores, outlier, confidence=confidence)

    def sentence(self, rate: float = 0.05) -> str:
        """What was found, in words."""
        if (needed := int(1 / _rate(rate) + 0.999999) - 1) > len(self.held_out):
            return f"{len(self.held_out)} samples were held out, {needed} are needed for a rate of {rate:g}."
        found = len(self.flagged(rate))
        return (
            f"{found} of {len(self.scores)} samples ({found / len(self.scores):.1%}) are stranger than all but "
            f"{rate:.0%} of known ones, by {self.score} ({self.setting})."
        )

    def table(self) -> str:
        """Thresholds and how many samples lie above, by the rate of false alarms."""
        rows = [[f"{rate:.0%}", self.threshold(rate), len(self.flagged(rate))] for rate in RATES]
        return text_table(["false alarms", "threshold", f"flagged of {len(self.scores)}"], rows)

    def plot(self) -> "Figure":
        """Scores of the known samples held out, and of those asked, with thresholds."""
        from .pictures import draw_outliers

        found = {rate: self.threshold(rate) for rate in RATES[:2]}
        finite = {rate: v for rate, v in found.items() if v < float("inf")}
        return draw_outliers(self.held_out, self.scores, finite, self.score)


def outliers(
    kernel: Kernel | Matrix,
    known: object,
    asked: object,
    *,
    score: str = "mahalanobis",
    reg: float | None = None,
    fresh: object = None,
    held_out: float = HELD_OUT,
    seed: int = 0,
    memory: Memory = None,
    progress: bool = True,
) -> Outliers:
    """How strange the samples `asked` are beside `known` ones, by a kernel, each with a p-value.

    `score`: "mahalanobis", (φ(z) − μ)ᵀ(Σ + reg/n)⁻¹(φ(z) − μ) in the kernel's own space, which up to a factor is what
    a Gaussian process says it does not know; "one class", |1 − f(z)| for the ridge regression f of the number 1;
    "density", −mean k(z, x). `reg`: absolute (default: the mean of k(x, x), of mahalanobis about the mean sample).
    `kernel`, `known` and `asked` as x and y of `mmd`.

    p-values come from `held_out` known samples that the score is not fitted to; or from `fresh` ones. Give those where
    the network was trained on `known`: what it has seen is less strange to it than anything new. Cost: the Gram of all
    samples and a factor of the known ones'. Haasdonk & Pękalska 2010; Leng et al. 2015; Parzen 1962.

    >>> import tangency as tg
    >>> known, asked = torch.randn(200, 3), torch.cat([torch.randn(20, 3), torch.randn(5, 3) + 5])
    >>> found = tg.distributions.outliers(tg.gaussian(known), known, asked, progress=False)
    >>> sorted(found.flagged(0.02)[:5].tolist())
    [20, 21, 22, 23, 24]
    """
    checks.choice(score, "score", BY_KERNEL, more="; features of a network have others: outliers_features")
    if reg is not None and not checks.nonnegative(reg, "reg") > 0:
        raise InputError("reg=0; needed: a number above 0.")
    if reg is not None and score == "density":
        raise InputError("the density has no reg=; leave it out.")
    second, spare = (asked, 0) if fresh is None else _with_fresh(kernel, fresh, asked)
    both = pooled(kernel, known, second, memory, progress, ("known", "asked"))
    fit, spared = _split(len(both.of_x), held_out, fresh is not None, seed)
    rows, ask = both.of_x[fit], torch.cat([both.of_x[spared], both.of_y])
    inside, cross = (both.gram.select(part, rows).dense().detach().double() for part in (rows, ask))
    found, taken = scores.gram_scores(score, inside, cross, both.diag()[ask.to(both.device)], reg)
    setting = "no setting" if taken is None else f"reg {taken:.3g}"
    return _result(score, found, spare or len(spared), len(fit), setting)


def outliers_features(
    known: Array | StoredFeatures,
    asked: Array | StoredFeatures,
    *,
    score: str = "mahalanobis",
    labels: Numbers | None = None,
    shrink: float | None = None,
    components: int | None = None,
    neighbours: int | None = None,
    fresh: Array | StoredFeatures | None = None,
    held_out: float = HELD_OUT,
    seed: int = 0,
) -> Outliers:
    """How strange the samples `asked` are beside `known` ones, by features [n, p] of a network, each with a p-value.

    `score`: "mahalanobis", (z − μ_c)ᵀΣ⁻¹(z − μ_c) for the nearest class of `labels` (all samples are one without), Σ
    shared and shrunk towards a multiple of 1, by Ledoit & Wolf 2004 or as much as `shrink` says (0 to 1); "relative
    mahalanobis", that less the same without classes; "density", −log of a kernel density of `components` (10)
    principal components; "neighbours", the distance to neighbour number `neighbours` (10), features at length 1.
    `fresh` and `held_out` as for `outliers`. Lee et al. 2018; Ren et al. 2021; Sun et al. 2022.

    >>> known, asked = torch.randn(200, 3), torch.cat([torch.randn(20, 3), torch.randn(5, 3) + 5])
    >>> sorted(outliers_features(known, asked).flagged(0.02)[:5].tolist())
    [20, 21, 22, 23, 24]
    """
    checks.choice(score, "score", BY_FEATURES, more="; a kernel has others: outliers")
    _settings(score, labels, shrink, components, neighbours)
    first, last = (_whole(v, name) for v, name in ((known, "known"), (asked, "asked")))
    spare = None if fresh is None else _whole(fresh, "fresh")
    for part, name in ((last, "asked"), (spare, "fresh")):
        if part is not None and part.shape[1] != first.shape[1]:
            raise InputError(f"known has {first.shape[1]} features, {name} {part.shape[1]}; needed: the same ones.")
        if part is not None:
            checks.beside(part, first.device, name, "known")
    fit, spared = _split(len(first), held_out, spare is not None, seed)
    inside = first[fit.to(first.device)]
    classes = _classes(labels, len(first))[fit].unique(return_inverse=True)[1].to(first.device)
    judge, setting = _judge(score, inside, classes, shrink, components, neighbours)
    spare = first[spared.to(first.device)] if spare is None else spare
    return _result(score, judge(torch.cat([spare, last])), len(spare), len(inside), setting)


def _judge(
    score: str, known: Tensor, classes: Tensor, shrink: float | None, components: int | None, neighbours: int | None
) -> tuple[scores.Score, str]:
    """The score fitted to known samples, and what it was made with."""
    n, p = known.shape
    if score == "density":
        many = _within(min(COMPONENTS, p) if components is None else components, "components", p)
        judge, many = scores.component_density(known, many, fewer=components is None)
        return judge, f"{many} components"
    if score == "neighbours":
        many = _within(min(NEIGHBOURS, n) if neighbours is None else neighbours, "neighbours", n)
        return scores.neighbour_distance(known, many), f"{many} neighbours"
    make = scores.mahalanobis if score == "mahalanobis" else scores.relative_mahalanobis
    judge, amount = make(known, classes, shrink)
    return judge, f"shrinkage {amount:.3g}, {int(classes.max()) + 1} classes"


def _with_fresh(kernel: Kernel | Matrix, fresh: object, asked: object) -> tuple[object, int]:
    """Fresh samples and then those asked, and how many the fresh ones are; of a Gram the numbers of their rows."""
    if isinstance(kernel, Kernel):
        both = Joined(source(fresh, "fresh"), source(asked, "asked"))
        return both, len(both.first)
    count = len(square(kernel, "kernel"))
    rows = row_numbers(fresh, "fresh", count)
    return torch.cat([rows, row_numbers(asked, "asked", count)]), len(rows)


def _result(score: str, found: Tensor, spare: int, fitted: int, setting: str) -> Outliers:
    """The scores of the samples held out come first."""
    found = found.cpu().double()
    if not bool(found.isfinite().all()):
        raise InputError("the scores overflow float64; scale the kernel, or the features, down.")
    held, asked = found[:spare], found[spare:]
    above = len(held) - torch.searchsorted(held.sort().values, asked)
    return Outliers(score, asked, (1 + above).double() / (1 + len(held)), held, fitted, setting)


def _split(n: int, held_out: float, fresh: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the known samples that are fitted to, and of those that are held out."""
    if fresh:
        return torch.arange(n), torch.arange(0)
    if not 0 < held_out < 1:
        raise InputError(f"held_out={held_out}; needed: a part of the known samples, between 0 and 1.")
    count = round(held_out * n)
    if min(count, n - count) < 2:
        raise InputError(f"of {n} known samples {count} would be held out; needed: at least 2, and 2 to fit to.")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[count:].sort().values, order[:count].sort().values


def _whole(v: object, name: str) -> Tensor:
    """Features as rows in float64, in memory."""
    made = given_features(v, name)
    made = made.tensor() if isinstance(made, StoredFeatures) else made
    return made.flatten(1).double()


def _classes(labels: Numbers | None, n: int) -> Tensor:
    """Whole numbers that tell the classes apart."""
    if labels is None:
        return torch.zeros(n, dtype=torch.long)
    made = tree.numbers(labels, "labels").cpu()
    if made.shape != (n,) or made.is_floating_point() or made.is_complex():
        raise InputError(f"labels are {made.dtype} of shape {tuple(made.shape)}; needed: [{n}] classes as integers.")
    return made.long()


def _settings(
    score: str, labels: Numbers | None, shrink: float | None, components: int | None, neighbours: int | None
) -> None:
    """Refuse settings of another score."""
    if score == "relative mahalanobis" and labels is None:
        raise InputError("relative mahalanobis compares classes with all samples together; give their labels=.")
    of: Sequence[tuple[str, object, bool]] = (
        ("labels", labels, "mahalanobis" in score),
        ("shrink", shrink, "mahalanobis" in score),
        ("components", components, score == "density"),
        ("neighbours", neighbours, score == "neighbours"),
    )
    for name, value, fits in of:
        if value is not None and not fits:
            raise InputError(f"the score {score!r} has no {name}=; leave it out.")
    if shrink is not None and not 0 <= shrink <= 1:
        raise InputError(f"shrink={shrink}; needed: a number from 0 to 1.")


def _within(value: int, name: str, most: int) -> int:
    checks.positive(value, name, "a number")
    if value > most:
        raise InputError(f"{name}={value}; needed: at most {most}.")
    return value


def _rate(rate: float) -> float:
    if not 0 < rate < 1:
        raise InputError(f"rate={rate}; needed: a part of the known samples, between 0 and 1.")
    return rate
