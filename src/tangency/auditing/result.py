"""What an audit found, as a result: in words, as a table, as a frame, and the labels with what was decided."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .._base.extras import needed
from .._base.results import Result, environment, text_table
from .._base.strict_json import plain
from .._base.types import Float, Int, Json
from ..datasets import Labelled
from ..errors import InputError
from .choice import Choice
from .cleaning import Cleaning
from .copies import Copies
from .labels import NoiseRate, Suspects
from .regions import Region
from .support import Support

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, eq=False, repr=False)
class Audit(Result):
    """What one trained network says about its data: wrong labels, copies, leaks, and what it does not know.

    `listed` [s]: the training samples shown one by one, the most suspicious first, each with its most similar training
    samples in `neighbours` [s, k] (cosines in `similarity`). `leaks` (test sample, training sample), `test_support` and
    `cleaning` are there with a test set. `warnings`: what makes the answers less certain; `sure` if there is nothing
    of the kind.
    """

    train: Labelled
    test: Labelled | None
    suspects: Suspects
    noise: NoiseRate
    listed: Int[Tensor, " s"]
    neighbours: Int[Tensor, "s k"]
    similarity: Float[Tensor, "s k"]
    copies: Copies
    leaks: Copies | None
    support: Support
    test_support: Support | None
    regions: tuple[Region, ...]
    cleaning: Cleaning | None
    choice: Choice
    warnings: tuple[str, ...]
    facts: dict[str, Json]
    real: bool = False  # targets are real numbers, not classes

    UNITS: ClassVar[Mapping[str, str]] = {"seconds": "s", "rate": "fraction"}

    @property
    def sure(self) -> bool:
        """Whether nothing speaks against taking the probabilities as they are."""
        return not self.warnings

    def __repr__(self) -> str:
        what = "targets" if self.real else "labels"
        leaks = "" if self.leaks is None else f", {len(self.leaks)} leaks"
        return (
            f"Audit({len(self.train)} samples: {self.suspects.count} suspicious {what}, {len(self.copies)} copies"
            f"{leaks}, {len(self.support.outliers)} outliers; {self.choice.kernel})"
        )

    def words(self) -> str:
        """What was found, a sentence each."""
        n, noise, s = len(self.train), self.noise, self.suspects
        what = "target" if self.real else "label"
        lines = [
            f"{s.count:,} of {n:,} {what}s {'is' if s.count == 1 else 'are'} more likely wrong than right; in all "
            f"about {noise.rate:.1%} are "
            f"({noise.level:.0%} interval {noise.low:.1%} to {noise.high:.1%}).",
            _copies_in_words(self.copies, "training samples", what),
        ]
        if self.leaks is not None:
            assert self.test is not None
            lines.append(_leaks_in_words(self.leaks, len(self.test), what))
        lines.append(f"{_many(len(self.support.outliers), 'training')} like nothing else in the training set.")
        if self.test_support is not None:
            lines.append(f"{_many(len(self.test_support.outliers), 'test')} like nothing in the training set.")
        lines += [f"{r.mistakes} mistakes among {len(r.samples)} samples that are alike: {r.why}" for r in self.regions]
        if self.cleaning is not None and s.count:
            c = self.cleaning
            lines.append(
                f"Without the suspects the kernel machine's {c.score} on the test samples changes by {c.gain:+.4f} "
                f"(± {c.gain_error:.4f})."
            )
        lines.append(
            f"By the kernel {self.choice.kernel} with reg {self.choice.reg:.3g}, of least leave-one-out loss among "
            f"{sum(map(len, self.choice.regs.values()))} tried."
        )
        return "\n".join([*lines, *(f"Caution: {w}" for w in self.warnings)])

    def table(self, most: int = 20) -> str:
        """The most suspicious labels, a line each."""
        rows = [
            (str(i), *self._id(i), self._name(self.suspects.given, i), self._name(self.suspects.suggested, i),
             f"{float(self.suspects.wrong[i]):.2f}", f"{float(self.suspects.margin[i]):.3f}")
            for i in self.suspects.order[:most].tolist()
        ]  # fmt: skip
        header = ["sample", *(["id"] if self._ids else []), "given", "suggested", "P(wrong)", "margin"]
        return text_table(header, rows)

    def summary(self) -> dict[str, Json]:
        """The figures, for JSON."""
        c, s = self.cleaning, self.suspects
        return {
            **self.facts,
            "suspects": s.count,
            "noise": {
                "rate": self.noise.rate,
                "interval": [self.noise.low, self.noise.high],
                "level": self.noise.level,
            },
            "mixed_up": [
                [self.train.classes[a], self.train.classes[b], low, high] for a, b, low, high in self.noise.pairs()
            ],
            "copies": _counts(self.copies),
            "leaks": None if self.leaks is None else _counts(self.leaks),
            "outliers": len(self.support.outliers),
            "test_outliers": None if self.test_support is None else len(self.test_support.outliers),
            "regions": [{"samples": len(r.samples), "mistakes": r.mistakes, "why": r.why} for r in self.regions],
            "cleaning": None if c is None else {"gain": c.gain, "error": c.gain_error, "retrained": plain(c.retrained)},
            "kernel": self.choice.kernel,
            "reg": self.choice.reg,
            "warnings": list(self.warnings),
        }

    def to_dict(self) -> dict[str, Json]:
        """The figures, with units and the environment; neither data nor what is said of single samples."""
        return {"result": "Audit", **self.summary(), "units": dict(self.UNITS), "environment": environment()}

    def issues(self) -> "DataFrame":
        """A pandas frame, a row for each training sample, with the columns that cleanlab's Datalab has.

        `is_label_issue`, `label_score` (low: likely wrong), `given_label`, `predicted_label`; `is_outlier_issue`,
        `outlier_score`; `is_near_duplicate_issue`, `near_duplicate_score`, `near_duplicate_sets`; and `wrong`, our
        probability, `margin`, `leaked` (a copy is in the test set), `contradictory`.
        """
        with needed("pandas", "Audit.issues()"):
            import pandas as pd
        n, s = len(self.train), self.suspects
        near = torch.zeros(n).double()
        twins: list[list[int]] = [[] for _ in range(n)]
        for (a, b), similarity in zip(self.copies.pairs.tolist(), self.copies.similarity.tolist(), strict=True):
            for one, other in ((a, b), (b, a)):
                near[one] = max(float(near[one]), similarity)
                twins[one].append(other)
        contradictory = torch.zeros(n, dtype=torch.bool)
        contradictory[self.copies.pairs[self.copies.contradictory].flatten()] = True
        leaked = torch.zeros(n, dtype=torch.bool)
        if self.leaks is not None:
            leaked[self.leaks.pairs[:, 1]] = True
        outlier = torch.zeros(n, dtype=torch.bool)
        outlier[self.support.outliers] = True
        columns: dict[str, object] = {
            "is_label_issue": (s.wrong > 0.5).numpy(),
            "label_score": (1 - s.wrong).numpy(),
            "given_label": [self._value(s.given, i) for i in range(n)],
            "predicted_label": [self._value(s.suggested, i) for i in range(n)],
            "wrong": s.wrong.numpy(),
            "margin": s.margin.numpy(),
            "is_outlier_issue": outlier.numpy(),
            "outlier_score": (1 - self.support.unexplained).numpy(),
            "is_near_duplicate_issue": [bool(t) for t in twins],
            "near_duplicate_score": (1 - near).numpy(),
            "near_duplicate_sets": twins,
            "contradictory": contradictory.numpy(),
            "leaked": leaked.numpy(),
        }
        return pd.DataFrame(columns, index=pd.Index(self._ids, name="id") if self._ids else None)

    def cleaned(self, how: str = "drop") -> Labelled:
        """The training data with what is more likely wrong than right dropped ("drop") or given its new label ("fix").

        What a person decided one by one: `tg.auditing.apply`.
        """
        if how not in ("drop", "fix"):
            raise InputError(f"how={how!r}; needed: 'drop' or 'fix'.")
        if self.real:
            raise InputError("the targets are real numbers, which Labelled has no place for; use .suspects.")
        wrong = self.suspects.wrong > 0.5
        if how == "drop" and bool(wrong.all()):
            raise InputError("every sample is more likely wrong than right, so none would be left; look at .warnings.")
        if how == "drop":
            return self.train.select(~wrong)
        return relabelled(self.train, torch.where(wrong, self.suspects.suggested, self.suspects.given))

    def plot(self) -> "Figure":
        """A figure: margins of all samples, the estimated confusion of labels, and what cleaning would do."""
        from ..plots import draw_audit

        return draw_audit(self)

    @property
    def _ids(self) -> tuple[str, ...]:
        return tuple(getattr(self.train, "ids", None) or ())

    def _id(self, i: int) -> tuple[str, ...]:
        return (self._ids[i],) if self._ids else ()

    def _value(self, values: Tensor, i: int) -> object:
        if not self.real:
            return self.train.classes[int(values[i])]
        return float(values[i]) if values.dim() == 1 or values.shape[1] == 1 else values[i].tolist()

    def _name(self, values: Tensor, i: int) -> str:
        value = self._value(values, i)
        return value if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)


def relabelled(data: Labelled, y: Tensor) -> Labelled:
    """The same samples with other labels."""
    from dataclasses import replace

    return replace(data, y=y)


def _copies_in_words(copies: Copies, where: str, what: str) -> str:
    groups = copies.groups()
    if not groups:
        return f"No {where} are {'equal' if copies.equal_only else 'copies of one another'}."
    equal, differ = int(copies.exact.sum()), int(copies.contradictory.sum())
    return (
        f"{sum(map(len, groups)):,} {where} are copies of one another, in "
        f"{'one group' if len(groups) == 1 else f'{len(groups):,} groups'} "
        f"({equal:,} equal pair{'s' * (equal != 1)}, {differ:,} with different {what}s)."
    )


def _leaks_in_words(leaks: Copies, tested: int, what: str) -> str:
    """Counts test samples: one may be in the training set several times."""
    samples = len(leaks.pairs[:, 0].unique())
    differ = len(leaks.pairs[leaks.contradictory, 0].unique())
    verb, like = "is" if samples == 1 else "are", " as equal samples" * leaks.equal_only
    label = f", {differ:,} with another {what}" if samples else ""
    return f"{samples:,} of {tested:,} test samples {verb} in the training set too{like}{label}."


def _many(count: int, which: str) -> str:
    return f"{count:,} {which} samples are" if count != 1 else f"One {which} sample is"


def _counts(copies: Copies) -> Json:
    return {
        "pairs": len(copies), "equal": int(copies.exact.sum()), "contradictory": int(copies.contradictory.sum()),
        "crowded": copies.crowded,
    }  # fmt: skip
