"""What `explain` finds: a network's decisions, each traced to the training data through one or more kernels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result, environment
from .._base.types import Float, Int, Json
from ..datasets import Labelled
from ..errors import InputError
from ..surrogate import Faithfulness, Interval, Kind, Surrogate, balanced_accuracy
from .attribution import Attribution
from .verdict import Verdict, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Result):
    """What one kernel says about the decisions of a network on m test samples, s of which are explained one by one."""

    name: str  # short: trNTK, CK, …
    title: str  # in words: cosine of the trace of the tangent kernel
    surrogate: Surrogate
    faithfulness: Faithfulness  # over all m test samples
    logits: Float[Tensor, "m c"]
    attribution: Attribution  # of the s samples in `Decisions.shown`
    picture: Float[Tensor, "g g"]  # the Gram of some training samples, an equal part of each class, sorted by class
    spans: Int[Tensor, " t"]  # rows of the picture that each class takes
    values: Float[Tensor, " r"]  # eigenvalues of the Gram, largest first
    seconds: float
    flagged: Tensor | None = None  # [m] bool: test samples whose neighbours are mostly poisoned
    chance: Interval | None = None  # τ_K of surrogates fitted to shuffled labels, from the smallest to the largest
    # κ(x, x_i)/√(κ(x, x) κ(x_i, x_i)) of the `similar` ones; NaN where a κ(x, x) is 0
    cosines: Float[Tensor, "s k"] | None = None

    UNITS: ClassVar[Mapping[str, str]] = {"seconds": "s"}

    def plot(self) -> "Figure":
        """A figure: the Gram of some training samples, sorted by class, beside the spectrum."""
        from ..plots import draw_gram

        classes = torch.arange(len(self.spans)).repeat_interleave(self.spans)
        return draw_gram(self.picture, classes, values=self.values)

    def __repr__(self) -> str:
        return f"Explanation({self.name}: {self.faithfulness!r}, {self.attribution!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Decisions(Result):
    """A network's decisions on test data, each traced to the training data through one or more kernels.

    `logits`: the network's, whose softmax are its probabilities, in whatever form it gives them; of two classes −f/2
    and f/2, f the log-odds. `outputs_are`: what its outputs are, and `outputs_said` how that is known, in a sentence.
    """

    train: Labelled
    test: Labelled
    logits: Float[Tensor, "m c"]
    explanations: tuple[Explanation, ...]
    shown: Int[Tensor, " s"]  # test samples that are explained one by one
    facts: dict[str, Json]  # model, parameters, seconds, version, …
    poisoned_train: Tensor | None = None  # [n] bool, where known
    poisoned_test: Tensor | None = None  # [m] bool
    outputs_are: Kind = "logits"
    outputs_said: str = ""
    second: Faithfulness | None = None  # how a second network follows this one, where one was given

    UNITS: ClassVar[Mapping[str, str]] = {
        "seconds": "s", "network_accuracy": "fraction", "network_balanced_accuracy": "fraction",
        "majority_accuracy": "fraction", "tad": "fraction",
    }  # fmt: skip

    def __repr__(self) -> str:
        taus = ", ".join(f"{e.name} τ_K {e.faithfulness.tau:.3f}" for e in self.explanations)
        return (
            f"Decisions({self.facts.get('model', 'network')}: {len(self.test)} test samples, "
            f"{len(self.train)} to train, {len(self.train.classes)} classes, accuracy {self.accuracy:.1%}; {taus})"
        )

    @property
    def accuracy(self) -> float:
        """The network's, on the test data."""
        return float((self.logits.argmax(1) == self.test.y.to(self.logits.device)).double().mean())

    @property
    def balanced_accuracy(self) -> float:
        """The network's, with each class counting alike."""
        return balanced_accuracy(self.logits, self.test.y.to(self.logits.device))

    @property
    def majority(self) -> tuple[str, float]:
        """The most frequent class of the training data, and the test accuracy of always saying that."""
        most = int(self.train.counts().argmax())
        return self.train.classes[most], float((self.test.y == most).double().mean())

    @property
    def _best(self) -> Explanation:
        """The most faithful one; last comes a τ_K that is NaN, of a surrogate that says the same of every sample."""
        return max(self.explanations, key=lambda e: -2 if math.isnan(e.faithfulness.tau) else e.faithfulness.tau)

    def table(self) -> str:
        """A line for each kernel; then the network's accuracies, the best τ_K in words, and what the outputs are."""
        lines = [
            f"{'kernel':10s}{'τ_K':>8s}{'95% interval':>18s}{'follows':>9s}{'TAD':>9s}{'balanced':>10s}{'Pearson':>9s}"
            f"{'R²':>7s}{'seconds':>9s}"
        ]
        for e in self.explanations:
            f, ends = e.faithfulness, e.faithfulness.intervals["tau"]
            between = f"[{ends.low:.3f}, {ends.high:.3f}]"
            lines.append(
                f"{e.name:10s}{f.tau:8.3f}{between:>18s}{self.verdict(e.name).word:>9s}{f.tad:+9.2%}"
                f"{f.balanced_accuracy:10.2%}{f.pearson:9.3f}{f.r2:7.3f}{e.seconds:9.1f}"
            )
        often, majority = self.majority
        accuracies = (
            f"The network's accuracy is {self.accuracy:.2%}, balanced over classes {self.balanced_accuracy:.2%}; "
            f"always saying {often} has {majority:.2%}."
        )
        best = self.verdict(self._best.name)
        lines += [accuracies, f"{self._best.name}: {best.sentence}", *best.against, best.rule]
        return "\n".join([*lines, *filter(None, (self.outputs_said, self.warning))])

    def verdict(self, kernel: str | None = None) -> Verdict:
        """What a kernel's τ_K means in words, beside chance and a second network; default: the most faithful one's."""
        e = self._named(kernel)
        return verdict(e.faithfulness, chance=e.chance, second=self.second)

    def _named(self, kernel: str | None) -> Explanation:
        """The explanation by this kernel, or the most faithful one."""
        names = {e.name: e for e in self.explanations}
        if kernel is not None and kernel not in names:
            raise InputError(f"kernel={kernel!r}; needed: one of those compared, {checks.some(list(names))}.")
        return names[kernel] if kernel else self._best

    @property
    def warning(self) -> str:
        """A sentence where not even the most faithful surrogate follows the network, else nothing."""
        best = self._best.faithfulness
        if "tau" not in best.intervals or best.intervals["tau"].low > 0:  # NaN is not
            return ""
        return (
            f"None of these surrogates follows the network (the best τ_K, {best.tau:.2f}, may as well be 0): what they "
            "say of its decisions explains them, not it."
        )

    def why(self, sample: int, *, kernel: str | None = None) -> str:
        """One decision in words: what the network says of a test sample, and the training samples behind it.

        `sample`: its number in the test data, one of those in `shown`. `kernel`: default: the most faithful one. The
        numbers are A(x, x_i), a training sample's part in the logit, and for those most like it (of the largest
        κ(x, x_i)) the cosine κ(x, x_i)/√(κ(x, x) κ(x_i, x_i)).
        """
        by = self._named(kernel)
        rows = (self.shown == sample).nonzero()[:, 0] if isinstance(sample, int) else self.shown[:0]
        if not len(rows):
            raise InputError(
                f"sample={sample!r} is none of the {len(self.shown)} test samples that were looked into (`shown`: "
                f"{checks.some([str(k) for k in self.shown.tolist()])}); explain(…, samples=…) says how many."
            )
        says, truth = int(self.logits[sample].argmax()), int(self.test.y[sample])
        sure = float(self.logits[sample].double().softmax(0)[says])
        right = "which is right" if says == truth else f"it is {self.test.classes[truth]}"
        return (
            f"test sample {sample}: {self.train.classes[says]}, with probability {sure:.2f}; {right}.\n"
            f"By {by.name} (τ_K {by.faithfulness.tau:.2f}), of the training samples\n"
            + by.attribution.words(int(rows[0]), says, self.train.y, self.train.classes, similarity=by.cosines)
        )

    def plot(self) -> "Figure":
        """A figure: how faithful each kernel is, with its interval, and its spectrum. Samples: `tg.report.write`."""
        from ..plots import draw_decisions

        return draw_decisions(self.explanations)

    def summary(self) -> dict[str, Json]:
        """The figures, for JSON."""
        return {
            **self.facts,
            "outputs_are": self.outputs_are,
            "outputs_said": self.outputs_said,
            "network_accuracy": self.accuracy,
            "network_balanced_accuracy": self.balanced_accuracy,
            "majority_class": self.majority[0],
            "majority_accuracy": self.majority[1],
            "second": None if self.second is None else _figures(self.second),
            "kernels": {
                e.name: {
                    **_figures(e.faithfulness),
                    "chance": None if e.chance is None else [e.chance.low, e.chance.high],
                    "verdict": self.verdict(e.name).word,
                    "reg": e.surrogate.reg,
                    "gradient": e.surrogate.gradient,
                    "seconds": e.seconds,
                }
                for e in self.explanations
            },
        }

    def to_dict(self) -> dict[str, Json]:
        """The figures, with units and the environment; neither data nor what is said of single samples."""
        # `Result.to_dict` would write out both data sets.
        return {"result": "Decisions", **self.summary(), "units": dict(self.UNITS), "environment": environment()}


def _figures(f: Faithfulness) -> dict[str, Json]:
    """Those of one surrogate, or of a second network, for JSON."""
    names = ("tau", "tad", "pearson", "r2", "accuracy", "balanced_accuracy", "ties")
    figures: dict[str, Json] = {name: getattr(f, name) for name in names}
    return {**figures, "intervals": {k: [i.low, i.high] for k, i in f.intervals.items()}}
