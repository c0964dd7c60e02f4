"""What is audited: samples, what was said of them, and what there is to be careful about."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import checks
from .._base.types import Json
from ..datasets import Labelled
from ..regress import LeftOut
from .labels import NoiseRate, Suspects
from .machine import Seen

# A network that fits so many of its labels has learned the wrong ones too (heuristic).
MEMORISED = 0.99
# A copy that has learned no label contradicting so many times as many is worth a word, from this part of all on; so is
# a part of suspects that the machine's own mistakes may explain (heuristics).
BLIND_TIMES, BLIND_LEAST, SHARE = 2.0, 0.05, 0.02


@dataclass(frozen=True, eq=False)
class Data:
    """What is audited: samples with classes, or with real targets; test samples if there are any.

    `said`, `test_said`: the network's predictions (classes, or numbers), where there is a network.
    """

    train: Labelled
    test: Labelled | None = None
    targets: Tensor | None = None  # [n, q]; None: classes
    test_targets: Tensor | None = None
    said: Tensor | None = None
    test_said: Tensor | None = None

    @property
    def real(self) -> bool:
        """Whether the targets are real numbers."""
        return self.targets is not None

    @property
    def given(self) -> Tensor:
        """The labels or targets of the training samples."""
        return self.train.y if self.targets is None else self.targets

    def numbers(self, labels: Tensor) -> Tensor:
        """Labels or targets as least squares take them, [n, q]: a column for each class."""
        if self.real:
            return labels.double()
        return torch.nn.functional.one_hot(labels.cpu(), len(self.train.classes)).double()

    @property
    def score(self) -> str:
        """What `scores` is the mean (of targets: the square) of."""
        return "root mean square error" if self.real else "accuracy"

    def scores(self, predictions: Tensor) -> Tensor:
        """Of each test sample, from predictions [m, q] of what `numbers` gives: right or wrong, or the square error."""
        found = predictions.cpu()
        if self.test_targets is not None:
            return (found - self.test_targets).square().mean(1)
        assert self.test is not None
        return (found.argmax(1) == self.test.y.cpu()).double()


def facts_of(
    data: Data, left: LeftOut, seen: Seen | None, suspects: Suspects, noise: NoiseRate, unknown: tuple[int, ...]
) -> tuple[dict[str, Json], tuple[str, ...]]:
    """Figures of network and machine, and what makes the answers less certain."""
    facts: dict[str, Json] = {"train": len(data.train), "test": None if data.test is None else len(data.test)}
    if data.real:
        facts["leave_one_out_error"] = float(left.errors.square().mean().sqrt())
        return facts, ()
    facts["classes"] = len(data.train.classes)
    facts["leave_one_out_accuracy"] = float((suspects.margin > 0).double().mean())
    facts["majority"] = float(data.train.counts().max()) / len(data.train)
    if seen is not None and data.test is not None:
        facts["machine_test_accuracy"] = float(data.scores(seen.predictions).mean())
    if data.test_said is not None and data.test is not None:
        facts["network_test_accuracy"] = float((data.test_said.cpu() == data.test.y.cpu()).double().mean())
    if data.said is not None:
        facts["network_train_accuracy"] = float((data.said.cpu() == data.train.y.cpu()).double().mean())
    return facts, tuple(_cautions(data, facts, noise, unknown))


def _cautions(data: Data, facts: dict[str, Json], noise: NoiseRate, unknown: tuple[int, ...]) -> Iterator[str]:
    """Sentences, each a reason not to take the probabilities as they are."""
    fitted, agree, majority = (
        facts.get(name) for name in ("network_train_accuracy", "leave_one_out_accuracy", "majority")
    )
    if isinstance(fitted, float) and fitted >= MEMORISED:
        yield (
            f"the network fits {fitted:.1%} of its labels, wrong ones among them if there are any, and what it has "
            "learned of those is in its kernel: suspects may be missing, and more may be wrong than is said. "
            "A network stopped earlier, or trained with weight decay or augmentation, tells more."
        )
    elif noise.blind is not None and noise.blind >= BLIND_TIMES * max(noise.contradicted, BLIND_LEAST):
        yield (
            f"the network's kernel contradicts {noise.contradicted:.1%} of the labels, that of a copy with shuffled "
            f"weights, which has learned none of them, {noise.blind:.1%}: either the copy knows little, or the network "
            "has learned wrong labels, and suspects are missing."
        )
    counts = data.train.counts()
    if len(unknown) == int((counts > 0).sum()):
        yield (
            f"leave-one-out predicts {agree:.1%} of the labels, hardly more than the largest class has "
            f"({majority:.1%}): the kernel does not know these classes, and calls no label wrong."
        )
    elif unknown:
        names = [data.train.classes[k] for k in unknown]
        yield (
            f"the kernel contradicts more than half of the labels of class {checks.some(names)}: it does not know "
            "what these look like (a class that is rare, or like another), and calls none of them wrong."
        )
    own = facts.get("machine_test_accuracy")
    if isinstance(own, float) and noise.low <= 0 and noise.rate > SHARE:
        yield (
            f"the kernel contradicts {noise.contradicted:.1%} of the training labels and {1 - own:.1%} of the test "
            "labels: by these its contradictions may all be its own mistakes, and suspects samples that are hard."
        )
    rare = [name for name, count in zip(data.train.classes, counts.tolist(), strict=True) if 0 < count < 5]
    if rare:
        yield (
            f"of class {checks.some(rare)} there are fewer than 5 samples: without one, little is left to compare with."
        )
