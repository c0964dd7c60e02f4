"""From what a model returns to outputs [n, c]: which tensor counts, and what a head makes of it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import tree
from .._base.types import Float, Inputs, PickedOutputs
from ..errors import InputError, ModelError

Head = int | tuple[int, int] | Callable[..., Tensor] | None


@dataclass(frozen=True)
class Readout:
    """Picks the outputs out of what a model returns (`outputs`) and applies the head to them.

    `extra` of the inputs' last elements are not the model's, but the head's (a loss takes labels).
    """

    outputs: PickedOutputs
    head: Head
    extra: int = 0

    def split(self, x: Inputs) -> tuple[Inputs, tuple[object, ...]]:
        """The model's inputs and, for a head of several arguments, the trailing ones that go to the head."""
        if self.extra <= 0:
            return x, ()
        if not isinstance(x, (tuple, list)) or len(x) <= self.extra:
            raise InputError(
                f"the head takes {self.extra} more argument(s) than the outputs; needed: inputs as a tuple whose last "
                f"{self.extra} element(s) are for the head, e.g. k((x, y))."
            )
        return tuple(x[: -self.extra]), tuple(x[-self.extra :])

    def __call__(self, returned: object, x: Inputs) -> Float[Tensor, "n c"]:
        """The outputs that count, of what the model returned for the samples x."""
        out, n = pick(returned, self.outputs), tree.size(x)
        # A model may squeeze the batch away where it has one sample.
        if out.dim() == 0 and n == 1:
            out = out[None]
        if out.dim() == 0 or out.shape[0] != n:
            raise ModelError(
                f"for {n} samples the model returned a tensor of shape {tuple(out.shape)}; needed: the sample in the "
                "leading dimension. Pass outputs=… to pick or reshape."
            )
        if not out.is_floating_point():
            raise ModelError(f"the model's output is {out.dtype}; needed: a real floating-point tensor.")
        if self.head is not None:
            out = _headed(self.head, out, n, self.split(x)[1])
        if out.numel() == 0:
            raise ModelError("the model has no outputs: for each sample it returned an empty tensor.")
        return out.reshape(n, -1)


def _headed(head: Head, out: Tensor, n: int, extra: tuple[object, ...]) -> Tensor:
    flat = out.reshape(n, -1)
    if isinstance(head, int):
        return flat[:, _output(head, flat)]
    if isinstance(head, tuple):
        first, second = head
        return flat[:, _output(first, flat)] - flat[:, _output(second, flat)]
    assert head is not None
    try:
        out = head(out, *extra)
    except (IndexError, RuntimeError) as e:
        _check_labels(head, out, extra, e)
        raise
    if not isinstance(out, Tensor) or out.dim() == 0 or out.shape[0] != n:
        given = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise InputError(
            f"the head returned {given} for {n} samples; needed: [n] or [n, c]. A loss needs reduction='none'."
        )
    return out


def _check_labels(head: Callable[..., Tensor], out: Tensor, extra: tuple[object, ...], e: Exception) -> None:
    """Say so where a loss failed on labels of another type than it takes, or for which there are no outputs."""
    whole = [y.long() if isinstance(y, Tensor) and not y.is_complex() and _whole(y) else y for y in extra]
    kinds = [y.dtype for y in extra if isinstance(y, Tensor) and y.dtype != torch.int64]
    if kinds and _works(head, out, whole):
        raise InputError(
            f"the labels that the head is given are {kinds[-1]}; needed: torch.int64, as torch's losses want them: "
            "k((x, y.long())), of an array y.astype('int64')."
        ) from e
    for y in extra:
        if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
            continue
        if out.dim() == 2 and int(y.max()) >= out.shape[1]:
            raise InputError(
                f"the labels that the head is given go to {int(y.max())} and the model has {out.shape[1]} outputs; "
                f"needed: labels from 0 to {out.shape[1] - 1}."
            ) from e


def _whole(y: Tensor) -> bool:
    """Whether all numbers are whole."""
    return not y.is_floating_point() or bool((y == y.round()).all())


def _works(head: Callable[..., Tensor], out: Tensor, extra: list[object]) -> bool:
    try:
        head(out, *extra)
    except Exception:  # of any kind: what the head said first is what counts
        return False
    return True


def _output(j: int, out: Tensor) -> int:
    if not -out.shape[1] <= j < out.shape[1]:
        raise InputError(f"head={j}: the model has {out.shape[1]} outputs, numbered from 0.")
    return j


def head_arity(head: Head) -> int:
    """How many positional arguments a head requires."""
    if head is None or isinstance(head, (int, tuple)):
        return 1
    if not callable(head):
        raise InputError(
            f"head={head!r}; needed: an output's number, a pair of them (their difference), or a function of the "
            "outputs."
        )
    try:
        params = inspect.signature(head).parameters.values()
    except (TypeError, ValueError):  # a builtin says nothing about itself: outputs alone
        return 1
    # Those with a default are options of the function, not inputs of the head.
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in params)


def pick(returned: object, outputs: PickedOutputs) -> Tensor:
    """The tensor out of what a model returns."""
    if callable(outputs):
        returned = outputs(returned)
    elif outputs is not None:
        try:
            returned = returned[outputs]  # type: ignore[index]  # whatever it is: an error says that it cannot
        except (KeyError, IndexError, TypeError) as e:
            raise InputError(
                f"outputs={outputs!r} does not pick from what the model returns ({_form(returned)})."
            ) from e
    else:
        returned = only(returned)
    if not isinstance(returned, Tensor):
        raise InputError(
            f"the model returned {_form(returned)}; needed: one tensor. Pick it: outputs='key', outputs=0 or "
            "outputs=lambda r: …"
        )
    return returned


def only(returned: object) -> object:
    """The logits of what a model returns, or what it holds if that is one thing alone; else what it returns."""
    # Hugging Face models return a mapping or an object with `logits`, beside losses and caches.
    if isinstance(returned, Mapping) and isinstance(returned.get("logits"), Tensor):
        return returned["logits"]
    if isinstance(logits := getattr(returned, "logits", None), Tensor):
        return logits
    if isinstance(returned, (Mapping, tuple, list)) and len(returned) == 1:  # (logits,), {"scores": logits}
        return next(iter(returned.values() if isinstance(returned, Mapping) else returned))
    return returned


def _form(returned: object) -> str:
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} with keys {list(returned)}"
    if isinstance(returned, (tuple, list)):
        return f"a {type(returned).__name__} of {len(returned)}"
    return f"a {type(returned).__name__}"
