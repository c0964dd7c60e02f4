"""What a comparison of two data sets found, as a result: in words, as tables, as a picture, and what to do about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result, environment, text_table
from .._base.strict_json import plain
from .._base.targets import shared_names
from .._base.types import Array, Float, Int, Json
from ..datasets import Labelled
from ..distributions import ClassifierTest, TwoSample, mmd
from ..errors import InputError
from ..kernels.gaussian import gaussian
from .carriers import Components, density_ratio
from .classes import ClassShift
from .filtering import Downstream, Filtered, Keep, chosen, probe_effect

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# How far sets lie apart, by the AUROC of a classifier that tells them apart, in words (heuristic).
SIZES = ((0.6, "slightly"), (0.75, "moderately"), (0.95, "strongly"), (1.01, "nearly completely"))
# Samples of each set from which a filter's MMD is computed, at most.
COMPARED = 2000


@dataclass(frozen=True, eq=False, repr=False)
class Shift(Result):
    """How a target set differs from a source set, as a layer of a model sees both.

    `p`: of equal distributions, twice the smaller of the p-values of `mmd` and `classifier`, the two tests that were
    fixed beforehand; `shifted` where it is at most `level`. `components`: the principal components, each compared by
    itself. `z_source` [n, r], `z_target` [m, r]: the samples in them. `ratio_source` [n], `ratio_target` [m]: log
    p_target/p_source at each sample, estimated without it: the target samples with the largest and the source samples
    with the smallest carry the shift. `classes`: where there are labels, whether their balance or the inputs of a class
    differ.
    """

    source: Labelled | None
    target: Labelled | None
    names: tuple[str, str]
    layer: str
    z_source: Float[Tensor, "n r"]
    z_target: Float[Tensor, "m r"]
    mmd: TwoSample
    classifier: ClassifierTest
    level: float
    components: Components
    ratio_source: Float[Tensor, " n"]
    ratio_target: Float[Tensor, " m"]
    classes: ClassShift | None
    labels: tuple[Tensor, Tensor] | None
    seed: int
    warnings: tuple[str, ...]
    facts: dict[str, Json]

    UNITS: ClassVar[Mapping[str, str]] = {"seconds": "s"}

    @property
    def p(self) -> float:
        """The smaller p-value of the two tests, corrected for their number."""
        return min(1.0, 2 * min(self.mmd.p, self.classifier.p))

    @property
    def shifted(self) -> bool:
        """Whether a difference is shown."""
        return self.p <= self.level

    def __repr__(self) -> str:
        found = "shifted" if self.shifted else "no shift found"
        sizes = " and ".join(f"{len(z):,}" for z in (self.z_source, self.z_target))
        return f"Shift({found}, p {self.p:.2g}; {sizes} samples, {len(self.components)} components of {self.layer})"

    def words(self) -> str:
        """What was found, a sentence each."""
        return "\n".join([*self.sentences(), *(f"Caution: {w}" for w in self.warnings)])

    def sentences(self) -> list[str]:
        """What was found, without the warnings."""
        (a, b), c = self.names, self.classifier
        how = f"p = {self.p:.2g} (MMD {self.mmd.p:.2g}, classifier {c.p:.2g}; twice the smaller)"
        if not self.shifted:
            lines = [
                f"No difference between {a} and {b} was found: {how}. That does not show that there is none.",
                f"A classifier tells them apart with an AUROC of {c.auc.value:.2f} "
                f"({c.auc.low:.2f} to {c.auc.high:.2f}); 0.5 is chance.",
            ]
        elif c.p > self.level:
            lines = [
                f"{a} and {b} differ: {how}.",
                "MMD alone shows it: a classifier was not found to tell them apart, with an AUROC of "
                f"{c.auc.value:.2f} ({c.auc.low:.2f} to {c.auc.high:.2f}); 0.5 is chance.",
            ]
        else:
            size = next(words for limit, words in SIZES if c.auc.value < limit)
            lines = [
                f"{a} and {b} differ: {how}.",
                f"They are {size} apart: a classifier tells them apart with an AUROC of {c.auc.value:.2f} "
                f"({c.auc.low:.2f} to {c.auc.high:.2f}); 0.5 is chance, 1 is always right.",
            ]
        lines.append(self._components_sentence())
        if self.classes is not None:
            lines.append(self.classes.sentence(self.level))
        return lines

    def _components_sentence(self) -> str:
        c = self.components
        shown = [k for k in c.order.tolist() if float(c.p[k]) <= self.level]
        if not shown:
            return f"Along none of {len(c)} principal components alone is a difference shown."
        held = float(c.explained[shown].sum())
        first = ", ".join(
            f"{k + 1} (distance {float(c.distance[k]):.2f}, mean {float(c.difference[k]):+.2f}, in standard deviations)"
            for k in shown[:3]
        )
        return f"They differ along {len(shown)} of {len(c)} components, with {held:.0%} of the variance, most: {first}."

    def table(self) -> str:
        """The tests, the components that lie farthest apart, and the classes."""
        c = self.classifier
        tests = [
            ["MMD²", f"{self.mmd.value:.4g}", f"{self.mmd.p:.3g}"],
            ["classifier, AUROC", f"{c.auc.value:.3f} ({c.auc.low:.3f} to {c.auc.high:.3f})", f"{c.p:.3g}"],
            ["both", "", f"{self.p:.3g}"],
        ]
        parts = [text_table(["test", "value", "p"], tests), self.components.table()]
        return "\n\n".join(parts + ([] if self.classes is None else [self.classes.table()]))

    def carriers(self, count: int = 10) -> tuple[Int[Tensor, " k"], Int[Tensor, " l"]]:
        """Numbers of the source samples least like the target, and of the target samples least like the source."""
        checks.positive(count, "count", "a number of samples")
        target = self.ratio_target.argsort(descending=True, stable=True)[:count]
        return self.ratio_source.argsort(stable=True)[:count], target

    def filter(self, keep: Keep = None, *, by: Literal["classifier", "density"] = "classifier") -> Filtered:
        """Source samples that are like the target: those with the largest p_target(x)/p_source(x).

        `keep`: a part of them (0.2), a number (100), or None: all that are likelier in the target. `by`: the cross-
        fitted ratio of all components, or that of two kernel density estimates in the first two (what Tsou et al.
        propose). Of the target only inputs are used, no labels.
        """
        checks.choice(by, "by", ("classifier", "density"))
        ratio = self._ratio(by)
        index, weights = chosen(ratio, keep)
        before, after = (self._distance(self.z_source[rows]) for rows in (torch.arange(len(ratio)), index))
        return Filtered(index, weights, len(ratio), before, after, by)

    def downstream(
        self,
        labels: tuple[Array | Sequence[int], Array | Sequence[int]] | None = None,
        *,
        keep: Keep = None,
        by: Literal["classifier", "density"] = "classifier",
        repeats: int = 20,
        seed: int = 0,
    ) -> Downstream:
        """What filtering does to a linear probe: its accuracy on the target, trained on all, filtered, random samples.

        The probe is logistic regression on the components. `labels`: the classes of source and target samples, where
        the comparison had none. `keep`, `by`: as for `filter`. `repeats`: random draws of as many source samples.
        """
        ys = self.labels if labels is None else checked_labels(labels, (len(self.z_source), len(self.z_target)))[:2]
        if ys is None:
            raise InputError(
                "there are no labels of both sets; needed: downstream((y_source, y_target)), the class of each sample."
            )
        if len(ys[0].unique()) < 2:
            raise InputError("all source samples are of one class, so there is nothing to train; needed: two or more.")
        kept, draw = self.filter(keep, by=by), torch.Generator().manual_seed(seed)
        return probe_effect((self.z_source, self.z_target), ys, kept, self._ratio(by), repeats, draw)

    def _ratio(self, by: str) -> Tensor:
        """log p_target/p_source at the source samples."""
        return self.ratio_source if by == "classifier" else density_ratio(self.z_source[:, :2], self.z_target[:, :2])

    def _distance(self, a: Tensor) -> float:
        """MMD² to the target, unbiased, with the bandwidth of the test."""
        draw = torch.Generator().manual_seed(self.seed)
        a, b = (at_most(z, COMPARED, draw) for z in (a, self.z_target))
        if min(len(a), len(b)) < 2:
            return float("nan")
        both = gaussian(torch.cat([self.z_source, self.z_target]), seed=self.seed)
        return mmd(both, a, b, draws=1, biased=False, progress=False).value

    def plot(self, components: tuple[int, int] | None = None) -> "Figure":
        """Both sets in two components: samples and densities; by default the two that lie farthest apart (from 1)."""
        from .shift_picture import draw_shift

        most = len(self.components)
        if most < 2:
            raise InputError("there is one component only, and the picture has two axes; needed: components=2 or more.")
        shown = tuple(sorted((self.components.order[:2] + 1).tolist())) if components is None else tuple(components)
        if len(shown) != 2 or not all(k in range(1, most + 1) for k in shown):
            raise InputError(f"components={components}; needed: two numbers from 1 to {most}.")
        index = [k - 1 for k in shown]
        pair = (shown[0], shown[1])
        return draw_shift(self.z_source[:, index], self.z_target[:, index], self.names, pair, self._title())

    def _title(self) -> str:
        return f"{self.layer}: p = {self.p:.2g}, AUROC {self.classifier.auc.value:.2f}"

    def summary(self) -> dict[str, Json]:
        """The figures, for JSON."""
        c, parts = self.classifier, self.components
        return {
            **self.facts,
            "names": list(self.names),
            "shifted": self.shifted,
            "p": self.p,
            "level": self.level,
            "mmd": {"value": self.mmd.value, "p": self.mmd.p},
            "classifier": {"auc": c.auc.value, "interval": [c.auc.low, c.auc.high], "p": c.p, "accuracy": c.accuracy},
            "components": [
                {"component": k + 1, "distance": float(parts.distance[k]), "difference": float(parts.difference[k]),
                 "spread": float(parts.spread[k]), "p": float(parts.p[k]), "explained": float(parts.explained[k])}
                for k in range(len(parts))
            ],
            "classes": None if self.classes is None else plain(
                {"of": self.classes.of, "kind": self.classes.kind(self.level), "balance_p": self.classes.balance_p,
                 "inputs_p": dict(zip(self.classes.names, self.classes.inputs_p.tolist(), strict=True))}
            ),
            "warnings": list(self.warnings),
        }  # fmt: skip

    def to_dict(self) -> dict[str, Json]:
        """The figures, with units and the environment; neither data nor what is said of single samples."""
        return {"result": "Shift", **self.summary(), "units": dict(self.UNITS), "environment": environment()}


def checked_labels(labels: object, sizes: tuple[int, int]) -> tuple[Tensor, Tensor, tuple[str, ...] | None]:
    """The classes of both sets, whole numbers from 0, and their names where they came by name."""
    from ..datasets import accepted

    if not isinstance(labels, (tuple, list)) or len(labels) != 2:
        raise InputError(
            f"labels is a {type(labels).__name__}; needed: (y_source, y_target), the class of each sample of both sets."
        )
    ys = []
    names = shared_names(*labels)
    for what, given, n in zip(("source", "target"), labels, sizes, strict=True):
        try:
            y = accepted.labels(given, names).values.cpu()
            accepted.check_range(y, None if names is None else len(names))
        except InputError as e:
            raise InputError(f"labels of the {what}: {e}") from None
        if len(y) != n:
            raise InputError(f"labels of the {what}: {len(y)} for {n} samples; needed: one for each.")
        ys.append(y)
    return ys[0], ys[1], names


def at_most(z: Tensor, most: int, draw: torch.Generator) -> Tensor:
    """At most so many rows, at random."""
    return z if len(z) <= most else z[torch.randperm(len(z), generator=draw)[:most]]
