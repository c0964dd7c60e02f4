"""What is given to `explain` and `audit`: a model, and samples with their classes, checked against each other."""

import itertools
from dataclasses import replace

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.types import Inputs
from ..datasets import Labelled, labelled, same_columns
from ..datasets.from_torch import class_names
from ..datasets.labelled import Samples, same_form
from ..errors import InputError
from ..models import outputs


def checked_train(model: nn.Module, train: Samples, progress: bool, absent: bool = False) -> Labelled:
    """The training set; refuses what is no classifier's.

    `absent`: classes may be there without samples; where they have no names, as many as the model has outputs.
    """
    known = labelled(train, name="train", progress=progress)
    count = _check_labels(model, known)
    if absent and count > len(known.classes) and not _named(train):
        known = replace(known, classes=tuple(map(str, range(count))))
    if len(known.classes) < 2:
        raise InputError(f"there is one class only ({known.classes[0]!r}); a classifier needs two or more.")
    counts = known.counts()
    if not absent and not bool(counts.all()):
        empty = [known.classes[c] for c in (counts == 0).nonzero()[:, 0].tolist()]
        raise InputError(
            f"the training set has no sample of {checks.some(empty)}. Leave the class out of both sets "
            "(Labelled.only), or add samples of it."
        )
    return known


def checked_pair(
    model: nn.Module, train: Samples, test: Samples, progress: bool, absent: bool = False
) -> tuple[Labelled, Labelled]:
    """Both sets, checked against each other; `absent`: as above."""
    known = checked_train(model, train, progress, absent)
    same_form(train, test)
    # A test set without names takes the training set's: it need not have samples of every class.
    asked = labelled(test, classes=None if _named(test) else known.classes, name="test", progress=progress)
    if asked.classes != known.classes:
        raise InputError(
            f"the test set's classes are {checks.some(list(asked.classes))}, the training set's "
            f"{checks.some(list(known.classes))}. Give both the same classes, in the same order."
        )
    same_columns(known, asked)
    left, right = ({k: v.shape[1:] for k, v in tree.leaves(data.x)} for data in (known, asked))
    if left != right:
        shapes = [", ".join(f"{k} {list(s)}" for k, s in side.items()) for side in (left, right)]
        raise InputError(f"a training sample has the shape {shapes[0]}, a test sample {shapes[1]}; needed: the same.")
    return known, asked


def _named(data: Samples) -> bool:
    """Whether the classes have names."""
    return isinstance(data, Labelled) or class_names(data) is not None


def _check_labels(model: nn.Module, train: Labelled) -> int:
    """Refuse labels for which the model has no output, by its first two samples; how many classes it tells apart."""
    out = outputs(model, placed(model, tree.take(train.x, slice(0, 2))))
    count = 1 if out.dim() == 1 else out.shape[1]
    most = int(train.y.max())
    if out.dim() <= 2 and most >= max(2, count):
        raise InputError(
            f"the labels of the training set go to {most} and the model has {count} output{'s' * (count > 1)}; needed: "
            f"labels from 0 to {max(2, count) - 1}. Number the classes from 0, or mend the labels that are too large."
        )
    return max(2, count) if out.dim() <= 2 else 0


def placed(model: nn.Module, x: Inputs) -> Inputs:
    """The inputs where the model is, without their graph, in the type of its parameters, if that is one."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    device = parameters[0].device if parameters else torch.device("cpu")
    dtypes = list(dict.fromkeys(p.dtype for p in parameters))
    placed = tree.to(tree.transform(Tensor.detach, x), device)
    placed = tree.suited(placed, model)
    if dtypes:
        tree.check_place(placed, device, dtypes)
    return placed


def common_name(train: str, test: str) -> str:
    """What both sets are of: "digits" of "digits train" and "digits test"; nothing if they say no more than that."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(train.split(), test.split(), strict=False))
    return " ".join(a for a, _ in same) or ("" if test == "test" else test)
