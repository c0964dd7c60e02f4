"""What is audited: samples, what was said of them, and what there is to be careful about."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import checks
from .._base.types import Json
from ..datasets import Labelled
from ..regress import LeftOut
from .labels import Suspects
from .machine import Seen

# A network that fits so many of its labels has learned the wrong ones too (heuristic).
MEMORISED = 0.99


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

    def centred(self, labels: Tensor) -> Tensor:
        """Targets for least squares [n, q], less their mean over the labels that are given."""
        return self._wide(labels) - self.middle

    @property
    def middle(self) -> Tensor:
        """The mean of the targets, [q]."""
        return self._wide(self.given).mean(0)

    @property
    def score(self) -> str:
        """What `scores` is the mean (of targets: the square) of."""
        return "root mean square error" if self.real else "accuracy"

    def scores(self, predictions: Tensor) -> Tensor:
        """Of each test sample, from predictions [m, q] of what `centred` gives: right or wrong, or the square error."""
        found = predictions.cpu() + self.middle
        if self.test_targets is not None:
            return (found - self.test_targets).square().mean(1)
        assert self.test is not None
        return (found.argmax(1) == self.test.y.cpu()).double()

    def _wide(self, labels: Tensor) -> Tensor:
        if self.real:
            return labels.double()
        return torch.nn.functional.one_hot(labels.cpu(), len(self.train.classes)).double()


def facts_of(
    data: Data, left: LeftOut, seen: Seen | None, suspects: Suspects, evidence: float
) -> tuple[dict[str, Json], tuple[str, ...]]:
    """Figures of network and machine, and what makes the answers less certain."""
    facts: dict[str, Json] = {
        "train": len(data.train), "test": None if data.test is None else len(data.test), "evidence": evidence,
    }  # fmt: skip
    warnings: list[str] = []
    if data.real:
        facts["leave_one_out_error"] = float(left.errors.square().mean().sqrt())
        return facts, ()
    facts["classes"] = len(data.train.classes)
    facts["leave_one_out_accuracy"] = agree = float((suspects.margin > 0).double().mean())
    majority = float(data.train.counts().max()) / len(data.train)
    facts["majority"] = majority
    if seen is not None and data.test is not None:
        facts["machine_test_accuracy"] = float(data.scores(seen.predictions).mean())
    if data.test_said is not None and data.test is not None:
        facts["network_test_accuracy"] = float((data.test_said.cpu() == data.test.y.cpu()).double().mean())
    if data.said is not None:
        facts["network_train_accuracy"] = fitted = float((data.said.cpu() == data.train.y.cpu()).double().mean())
        if fitted >= MEMORISED:
            warnings.append(
                f"the network fits {fitted:.1%} of its labels, wrong ones among them if there are any, and what it has "
                "learned of those is in its kernel: suspects may be missing, and more may be wrong than is said. "
                "A network stopped earlier, or trained with weight decay or augmentation, tells more."
            )
    if agree <= majority + 2 * (majority * (1 - majority) / len(data.train)) ** 0.5:
        warnings.append(
            f"leave-one-out predicts {agree:.1%} of the labels, no more than the largest class has ({majority:.1%}): "
            "the kernel does not know these classes, and its suspicions mean little."
        )
    rare = [name for name, count in zip(data.train.classes, data.train.counts().tolist(), strict=True) if 0 < count < 5]
    if rare:
        warnings.append(
            f"class {checks.some(rare)} has fewer than 5 samples: without one, little is left to compare with."
        )
    return facts, tuple(warnings)
