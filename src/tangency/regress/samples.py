"""What is given of the samples, checked and in one form: their classes, and how much each of them counts."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base import checks, tree
from .._base.types import Array, Numbers
from ..errors import InputError

# How much samples count: a number for all, or one for each; None: 1 each.
SampleWeights = float | Sequence[float] | Array | None


def one_hot_labels(y: Numbers, side: torch.Size, classes: int | None, device: torch.device | None) -> Tensor:
    """[n, 1] of class 1's probability for two classes in one logit, else [n, c] probabilities."""
    y = tree.numbers(y)
    checks.beside(y, device, "y")
    if classes is not None and (not isinstance(classes, int) or classes < 2):
        raise InputError(f"classes={classes!r}; needed: how many there are, at least 2, or None to count those of y.")
    if y.is_complex():
        raise InputError(f"y is {y.dtype}; needed: classes as integers [n], or probabilities [n, c].")
    # Real numbers are probabilities, integers are classes; there is no third reading.
    if y.is_floating_point():
        checks.finite(y, "y")
        sums = y.sum(1) if y.dim() == 2 else y.new_zeros(())
        if y.dim() != 2 or y.shape[1] < 2 or bool((y < 0).any()) or bool(((sums - 1).abs() > 1e-4).any()):
            raise InputError(
                f"y is {y.dtype} of shape {tuple(y.shape)}; needed: classes as integers [n], or probabilities [n, c] "
                "that are at least 0 and sum to 1."
            )
        if classes not in (None, y.shape[1]):
            raise InputError(f"y has probabilities of {y.shape[1]} classes and classes={classes}; needed: the same.")
        # What is left of the sum by rounding would be a force on the bias that nothing balances.
        one_hot = y.double() / y.double().sum(1, keepdim=True)
        if one_hot.shape[1] == 2 and len(side) == 1:
            one_hot = one_hot[:, 1:]
    else:
        if y.dim() != 1:
            raise InputError(f"y has shape {tuple(y.shape)}; needed: one class per sample, [n], as integers from 0.")
        y = y.long()
        # A full kernel has a logit for each class, even of two; else two classes share one.
        coupled = len(side) == 2 and side[1] > 1
        count = classes or (side[1] if coupled else max(2, int(y.max()) + 1 if len(y) else 2))
        if len(y) and (int(y.min()) < 0 or int(y.max()) >= count):
            why = f", as classes={classes}" if classes else f", as the model has {count} outputs" if coupled else ""
            raise InputError(
                f"y has classes from {int(y.min())} to {int(y.max())}; needed: from 0 to {count - 1}{why}. Number the "
                "classes from 0."
            )
        if len(y) and int(y.min()) == int(y.max()):
            raise InputError(f"all samples are of class {int(y[0])}; needed: at least two classes.")
        one_hot = F.one_hot(y, count).double()
        if count == 2 and not coupled:
            one_hot = one_hot[:, 1:]
    if len(one_hot) != side[0] or (len(side) == 2 and one_hot.shape[1] != side[1]):
        raise InputError(
            f"y has shape {tuple(y.shape)}; needed: labels of the {list(side)} samples (and outputs) of K."
        )
    return one_hot


def both_columns(labels: Tensor) -> Tensor:
    """Labels with a column for each class."""
    return torch.cat([1 - labels, labels], 1) if labels.shape[1] == 1 else labels


def every_class(labels: Tensor, w: Tensor, fix: str) -> None:
    """Refuse a class without a sample, or without weight [n, 1]: with nothing to hold it, its bias would run off."""
    counts = (w * both_columns(labels)).sum(0)
    empty = (counts == 0).nonzero()[:, 0].tolist()
    if empty:
        names = checks.some([str(c) for c in empty])
        raise InputError(
            f"y has no sample (of positive weight) of class {names} (of {len(counts)}). {fix} The "
            f"largest label is {int((counts > 0).nonzero().max())}."
        )


def weigh_labels(labels: Tensor, sample_weights: SampleWeights, absent: str = "") -> Tensor:
    """Weights [n, 1] of labelled samples; with `absent`, which says what to do then, every class must have some."""
    w = checked_weights(sample_weights, len(labels), labels)
    column = torch.ones_like(labels[:, :1]) if w is None else w[:, None]
    if absent:
        every_class(labels, column, absent)
    return column


def checked_weights(sample_weights: SampleWeights, n: int, like: Tensor) -> Tensor | None:
    """[n], at least 0 and not all 0; a number stands for n of them."""
    if sample_weights is None:
        return None
    if isinstance(sample_weights, str):
        raise InputError(
            f"sample_weights={sample_weights!r}; needed: a number for each sample. 'balanced' is for tg.surrogate.fit, "
            "which has classes; else give w = n / (classes · samples of its class)."
        )
    w = tree.numbers(sample_weights, "sample_weights").to(like.device, like.dtype)
    if w.dim() == 0:
        w = w.expand(n)
    if w.shape != (n,):
        raise InputError(f"sample_weights have shape {tuple(w.shape)}; needed: one number per sample, [{n}].")
    checks.finite(w, "sample_weights")
    if bool((w < 0).any()) or not bool((w > 0).any()):
        raise InputError(
            f"sample_weights from {float(w.min()):g} to {float(w.max()):g}; needed: at least 0, and not all 0."
        )
    return w
