"""The losses that have a name: each turns y into targets, once, and compares outputs with targets."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base.checks import finite
from ..errors import InputError
from .evaluate import check_classes, count


@dataclass(frozen=True)
class Loss:
    """`targets(y, outputs, smoothing)`, of which only the outputs' shape and type count, and `value(outputs, targets)`.

    `value` is a mean over the batch.
    """

    targets: Callable[[Tensor, Tensor, float], Tensor]
    value: Callable[[Tensor, Tensor], Tensor]


def one_hot(y: Tensor, out: Tensor) -> Tensor:
    """Classes as 0 and 1 in the outputs' shape [n, c]; of one output, the class itself."""
    check_classes(y, out)
    first = 1 if count(out) == 1 else 0
    classes = torch.arange(first, first + count(out), device=y.device)
    return (y[:, None] == classes).to(out.dtype)


def entropy_targets(y: Tensor, out: Tensor, smoothing: float) -> Tensor:
    """Probabilities of the classes, moved by `smoothing` towards equal ones."""
    c = max(count(out), 2)
    return one_hot(y, out) * (1 - smoothing) + smoothing / c


def entropy(out: Tensor, targets: Tensor) -> Tensor:
    """-Σ_c p_c log softmax(f)_c; of one output, the binary cross-entropy of its sigmoid."""
    if targets.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(out.reshape(targets.shape), targets)
    return F.cross_entropy(out, targets)


def real_targets(y: Tensor, out: Tensor) -> Tensor:
    """Targets given as real numbers, one for each output."""
    shape = (len(y), *out.shape[1:])
    if tuple(y.shape) != shape:
        whole = bool((y == y.round()).all())
        fix = ", or classes [n] as whole numbers: y.long()" if whole and y.dim() == 1 else ""
        fix = ": y[:, None]" + fix if shape == (*y.shape, 1) else fix
        raise InputError(
            f"y is {y.dtype} of shape {tuple(y.shape)}, the outputs' shape is {shape}; needed: targets of that shape"
            f"{fix}."
        )
    finite(y, "y")
    return y.to(out.dtype).reshape(len(y), -1)


def squared_targets(y: Tensor, out: Tensor, smoothing: float) -> Tensor:
    """One-hot, and ±1 for one output, whose sign is the class; or real targets as given."""
    if y.is_floating_point():
        return real_targets(y, out)
    return one_hot(y, out) if count(out) > 1 else 2 * one_hot(y, out) - 1


def sigmoid_targets(y: Tensor, out: Tensor, smoothing: float) -> Tensor:
    """0 and 1; or real targets as given."""
    return real_targets(y, out) if y.is_floating_point() else one_hot(y, out)


def squared(out: Tensor, targets: Tensor) -> Tensor:
    """The mean of (f - t)² over samples and outputs."""
    return F.mse_loss(out.reshape(targets.shape), targets)


def sigmoid_squared(out: Tensor, targets: Tensor) -> Tensor:
    """The mean of (sigmoid(f) - t)² over samples and outputs."""
    return F.mse_loss(out.reshape(targets.shape).sigmoid(), targets)


LOSSES = {
    "cross_entropy": Loss(entropy_targets, entropy),
    "mse": Loss(squared_targets, squared),
    "sigmoid_mse": Loss(sigmoid_targets, sigmoid_squared),
}
