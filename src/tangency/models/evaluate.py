"""What a model puts out, and how often it is right."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._base import tree
from .._base.misfit import in_words
from .._base.types import Inputs
from ..engine.heads import only
from ..engine.outputs import check_kind, ending
from ..errors import InputError, TangencyWarning

# Where a single output decides for the second class, by what it is or by the function that made it.
THRESHOLD = {
    "logits": 0.0, "probabilities": 0.5, "sigmoid": 0.5, "log-probabilities": math.log(0.5),
    "logsigmoid": math.log(0.5), "softmax": 0.0, "log_softmax": 0.0,
}  # fmt: skip


def outputs(model: nn.Module, x: Inputs, *, batch: int = 1024) -> Tensor:
    """f(x) in batches, in evaluation mode and without gradients, on the model's device.

    Each module's mode is afterwards what it was. x may also be arrays. Of a model in DataParallel the one inside runs.

    >>> from tangency.models import mlp
    >>> outputs(mlp([3, 8, 2]), torch.randn(5, 3)).shape
    torch.Size([5, 2])
    """
    x = tree.suited(tensors(x), model)
    if batch < 1:
        raise InputError(f"batch={batch}; needed: at least 1 sample.")
    model, device = inside_parallel(model), device_of(model)
    with evaluating(model), torch.no_grad():
        parts = [run_model(model, tree.transform(lambda v: v.to(device), part)) for part in tree.split(x, batch)]
    return torch.cat(parts)


def accuracy(
    model: nn.Module, x: object, y: object = None, *, batch: int = 1024, outputs_are: str | None = None
) -> float:
    """The share of samples whose class y the model finds: its largest output, or, where it has one, whether it is > 0.

    Tensors, arrays, for y lists; or `tg.datasets.Labelled` alone. `outputs_are`: what a single output is; default: a
    probability, which decides at ½, where the model is seen to end in a sigmoid (log-probability: logsigmoid), and
    else a logit, which decides at 0, with a warning where all of them lie in [0, 1]. Outputs that are NaN are refused.

    >>> from tangency.models import mlp
    >>> accuracy(mlp([3, 8, 2]), torch.randn(5, 3), torch.ones(5, dtype=torch.long)) in (0, 0.2, 0.4, 0.6, 0.8, 1)
    True
    """
    x, y = pair(x, y)
    tree.check(x)
    same_number(x, y)
    if outputs_are is not None:
        check_kind(outputs_are)
    out = outputs(model, x, batch=batch)
    check_classes(y, out)
    if bool(out.isnan().any()):
        some = int(out.reshape(len(out), -1).isnan().any(1).sum())
        raise InputError(
            f"the model's outputs are NaN for {some} of {len(out)} samples; needed: numbers. Look for NaN in the "
            "samples and in the weights (a training that diverged)."
        )
    seen = last(model, x) if outputs_are is None and count(out) == 1 else None
    at = THRESHOLD[seen or outputs_are or "logits"]
    right = [float((predictions(out, v) == y.to(out.device)).double().mean()) for v in (at, 0.5)]
    unclear = seen is None and outputs_are is None and count(out) == 1
    if unclear and right[0] != right[1] and bool(((out >= 0) & (out <= 1)).all()):
        warnings.warn(
            f"the model's one output lies between 0 and 1 on all {len(out)} samples and is taken for a logit, which "
            f"decides at 0: {right[0]:.1%} are right. As a probability, which decides at 0.5: {right[1]:.1%}. Say "
            "which: outputs_are='logits' or outputs_are='probabilities'.",
            TangencyWarning,
            stacklevel=2,
        )
    return right[0]


def last(model: nn.Module, x: Inputs) -> str | None:
    """The name of the sigmoid or softmax that the model is seen to end in, by its first two samples; None if none."""
    model, device = inside_parallel(model), device_of(model)
    with evaluating(model):
        return ending(model, tree.transform(lambda v: v.to(device), tree.take(x, slice(0, 2))))


def pair(x: Any, y: object, whose: str = "") -> tuple[Inputs, Tensor]:
    """Samples and what is said of them as tensors, from tensors, arrays and lists, or from data that hold both."""
    if y is None and hasattr(x, "x") and hasattr(x, "y"):  # tangency.datasets.Labelled
        x, y = x.x, x.y
    if y is None:
        raise InputError(
            f"{whose}y is missing; needed: the classes or targets of the samples, or a Labelled for both (of a torch "
            "data set: tg.datasets.labelled(dataset))."
        )
    labels = tensors(y, f"{whose}y", number=True)
    if not isinstance(labels, Tensor):
        kind = type(y).__name__
        raise InputError(f"{whose}y is a {kind}; needed: a tensor, array or list, one entry for each sample.")
    return tensors(x, f"{whose}x"), labels


def tensors(given: Any, name: str = "x", number: bool = False) -> Any:
    """`given` with tensors for arrays and for lists of numbers; a list of tensors is several inputs.

    >>> tensors({"x": np.zeros(2), "mask": None})
    {'x': tensor([0., 0.], dtype=torch.float64), 'mask': None}
    """
    if isinstance(given, (list, tuple)) and not number and _several(given):
        return tuple(tensors(v, f"{name}[{k}]") for k, v in enumerate(given))
    if isinstance(given, Mapping):
        return {k: tensors(v, f"{name}[{k!r}]") for k, v in given.items()}
    if not isinstance(given, (np.ndarray, list, tuple)):
        return given
    try:
        if not isinstance(given, np.ndarray):
            return torch.as_tensor(given)
        return tree.from_array(given, name)
    except (TypeError, ValueError, RuntimeError):
        what = f"an array of {given.dtype}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
        needed = "a class (a whole number from 0) or real targets for each sample" if number else "numbers"
        raise InputError(f"{name} is {what} that is no table of numbers; needed: {needed}.") from None


def _several(given: object) -> bool:
    """Whether these are several inputs, not numbers or rows of numbers."""
    if isinstance(given, (list, tuple)):
        return any(map(_several, given))
    return isinstance(given, (Tensor, np.ndarray, Mapping))


def inside_parallel(model: nn.Module) -> nn.Module:
    """The model in DataParallel, whose run_model() wants its parameters on the GPUs that it was made for."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    return model


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def run_model(model: nn.Module, x: Inputs) -> Tensor:
    """The model's outputs for one batch: a tensor, or the `logits` or the one tensor of what it returns."""
    args, kwargs = tree.arguments(x)
    with in_words(x, dtype=tree.dtype_of(model)):
        returned = model(*args, **kwargs)
    tensor = only(returned)
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"the model returns a {type(tensor).__name__}; needed: a tensor, or something with .logits, or a tuple or "
            "dict of one tensor. Put the model into one whose run_model() returns its logits."
        )
    return tensor


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it, the model is in evaluation mode; after it, each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def count(out: Tensor) -> int:
    """The number of outputs c of [n, c], or 1 of [n]."""
    if out.dim() > 2 or out.dim() == 0:
        raise InputError(f"the outputs' shape is {tuple(out.shape)}; needed: [n, c], or [n] for one. Flatten them.")
    return out.shape[1] if out.dim() == 2 else 1


def predictions(out: Tensor, at: float = 0.0) -> Tensor:
    """The class of each sample: the largest output, or, where there is one, whether it is above `at`."""
    return out.argmax(-1) if count(out) > 1 else (out.reshape(-1) > at).long()


def same_number(x: Inputs, y: Tensor, name: str = "y") -> None:
    """As many labels as samples."""
    n = tree.size(x)
    if y.dim() == 0 or len(y) != n:
        raise InputError(f"x has {n} samples and {name} has {y.numel() if y.dim() == 0 else len(y)}; needed: as many.")


def are_classes(y: Tensor) -> bool:
    """Whether y holds one class per sample: whole numbers [n]."""
    return y.dim() == 1 and not y.is_floating_point() and not y.is_complex()


def _as_classes(y: Tensor, name: str) -> str:
    """How to make one class per sample of y, where that can be."""
    whole = not y.is_floating_point() or bool((y == y.round()).all())
    if y.dim() == 2 and y.shape[1] > 1:
        one = whole and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())
        return f" It is one-hot: {name}.argmax(1)." if one else " If these are real targets: loss='mse'."
    if not whole:
        return " These are no whole numbers: real targets need loss='mse'."
    flat = f"{name}[:, 0]" if y.dim() == 2 else name
    return f" Use {flat}.long()." if y.dim() in (1, 2) else " Give one class for each sample."


def check_classes(y: Tensor, out: Tensor, name: str = "y") -> None:
    """Whole numbers 0, …, c - 1, or 0 and 1 for one output."""
    c = max(count(out), 2)
    needed = f"whole numbers 0…{c - 1} of shape [n], for a model of {count(out)} output{'s' * (count(out) > 1)}"
    if not are_classes(y):
        raise InputError(f"{name} is {y.dtype} of shape {tuple(y.shape)}; needed: {needed}.{_as_classes(y, name)}")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= c:
        wrong = low if low < 0 else high
        raise InputError(f"{name} has the class {wrong}; needed: {needed}. Number the classes from 0, or add outputs.")
