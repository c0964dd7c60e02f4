"""What labels are, classes or real numbers: decided here, once, for all that takes labels.

Integers, booleans, strings and pandas' categories are classes. Floats are real numbers, unless they may as well be
classes (whole numbers of few values, rows that are one-hot): then who gave them is asked, and nothing is guessed.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from . import checks, tree
from .types import Numbers

Kind = Literal["classes", "real"]
KINDS = ("classes", "real")
# Whole numbers of so many values may be classes (heuristic); of more they are quantities.
FEW = 200


class Targets(NamedTuple):
    """Class numbers, int64 [n], with the names of the classes where they came by name; or real numbers."""

    values: Tensor
    kind: Kind
    names: tuple[str, ...] | None = None


def read_targets(
    y: object, name: str = "y", *, targets: Kind | None = None, names: Sequence[str] | None = None, ask: str = ""
) -> Targets:
    """What labels are: classes or real numbers; `targets` says it where it is known.

    `names`: of classes that are known (those of the training set); strings are then numbered as they are. `ask`: what
    to say in place of `targets=`, where there is no such option.

    >>> read_targets(["dog", "cat", "dog"])
    Targets(values=tensor([1, 0, 1]), kind='classes', names=('cat', 'dog'))
    >>> read_targets([0.5, 1.0]).kind
    'real'
    >>> read_targets([0.0, 1.0, 1.0])
    Traceback (most recent call last):
    ...
    tangency.errors.InputError: y is torch.float64 and holds nothing but the whole numbers 0, 1: classes, or real ...
    """
    if targets is not None:
        checks.choice(targets, "targets", KINDS)
    called = _named(y, name, names)
    if called is not None:
        if targets == "real":
            raise InputError(f"{name} holds names of classes, and targets='real'; needed: numbers.")
        return called
    values = tree.numbers(column(y), name)
    if values.is_complex():
        raise InputError(f"{name} is {values.dtype}; needed: classes, or real numbers.")
    if targets == "real":
        return Targets(values if values.is_floating_point() else values.double(), "real")
    why = unsure(values)
    if targets is None and why and (values.is_floating_point() or values.dim() == 2):
        fix = ask or f"If these are classes: y{_as_classes(values)}, or targets='classes'; if not, targets='real'."
        raise InputError(f"{name} is {values.dtype} and {why}: classes, or real numbers? {fix}")
    if targets is None and values.is_floating_point():
        return Targets(values, "real")
    return Targets(_numbers(values, name, why), "classes", ("False", "True") if values.dtype == torch.bool else None)


def shared_names(first: object, second: object, name: str = "labels") -> tuple[str, ...] | None:
    """The names of the classes of two sets, where both have names; None where both have numbers.

    >>> shared_names(["b", "a"], ["c", "a"])
    ('a', 'b', 'c')
    """
    sides = [_named(y, name, None) for y in (first, second)]
    if sides[0] is None and sides[1] is None:
        return None
    if sides[0] is None or sides[1] is None:
        raise InputError(f"{name} are names in one set and numbers in the other; needed: the same in both.")
    return tuple(dict.fromkeys((*(sides[0].names or ()), *(sides[1].names or ()))))


def unsure(values: Tensor) -> str:
    """Why numbers may be classes although they are not given as such; "" where they are not.

    >>> unsure(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    'each of its rows is one-hot'
    """
    if values.dim() == 2 and values.shape[1] > 1:
        hot = bool(((values == 0) | (values == 1)).all()) and bool((values.sum(1) == 1).all())
        return "each of its rows is one-hot" if hot and len(values) else ""
    if values.dim() not in (1, 2) or (values.is_floating_point() and not bool((values == values.round()).all())):
        return ""
    found = values.unique()
    if not bool(found.isfinite().all()) or not 2 <= len(found) < min(values.numel(), FEW + 1):
        return ""
    shown = ", ".join(f"{int(v)}" for v in found[:5]) + ", …" * (len(found) > 5)
    return f"holds nothing but the whole numbers {shown}"


def signs(values: Tensor) -> bool:
    """Whether these are a and −a alone: two classes coded as numbers already, whichever is called what.

    >>> signs(torch.tensor([1.0, -1.0, 1.0])), signs(torch.tensor([0.0, 1.0]))
    (True, False)
    """
    if values.numel() != len(values) or values.dtype == torch.bool:
        return False
    found = values.unique()
    return len(found) == 2 and bool(found[0] == -found[1])


def columns_of(
    y: Numbers | Sequence[str],
    outputs: int | None,
    name: str = "y",
    *,
    targets: Kind | None = None,
    ask: str = "",
    less_mean: bool = True,
) -> Numbers:
    """Numbers that do not depend on how classes are numbered or called; real ones, and a and −a for two, as they are.

    Of classes a column for each that there is (of a full kernel for each of its `outputs`): 1 where a sample is of it,
    less 1/c, for two classes ±½; without `less_mean` 1 and 0. For one output two classes are ±½.

    >>> columns_of(["b", "a", "b"], None).tolist()
    [[-0.5, 0.5], [0.5, -0.5], [-0.5, 0.5]]
    """
    if targets is None and not by_name(y):
        values = tree.numbers(column(y), name)
        if values.dim() and not values.is_complex() and signs(values):
            return values if values.is_floating_point() else values.double()
    found = read_targets(y, name, targets=targets, ask=ask)
    if found.kind == "real":
        return y if found.values.is_floating_point() and targets is None else found.values  # type: ignore[return-value]
    at, count = found.values, outputs or 1
    if len(at) and int(at.min()) < 0 and not signs(at):
        raise InputError(f"{name} has the class {int(at.min())}; needed: classes from 0, or real targets as floats.")
    if count == 1:
        at = at.unique(return_inverse=True)[1]
        count = int(at.max()) + 1 if len(at) else 0
        if count < 2 or (outputs == 1 and count > 2):
            raise InputError(
                f"{name} has {count} class{'es' * (count != 1)}; needed: two{'' if outputs == 1 else ' or more'}, or "
                "real numbers."
            )
    elif len(at) and not 0 <= int(at.min()) <= int(at.max()) < count:
        raise InputError(
            f"{name} has classes from {int(at.min())} to {int(at.max())} and the kernel has {count} outputs; needed: "
            f"from 0 to {count - 1}."
        )
    made = F.one_hot(at, count).double()
    if outputs == 1:
        return made[:, 1:] - 0.5
    return made - 1 / count if less_mean else made


def floats(y: object) -> bool:
    """Whether these are given as floating-point numbers.

    >>> floats([0, 1.0]), floats(torch.tensor([0, 1]))
    (True, False)
    """
    if isinstance(y, (list, tuple)):
        return any(isinstance(v, (float, np.floating)) or (isinstance(v, (list, tuple)) and floats(v)) for v in y)
    kind = getattr(column(y), "dtype", None)
    return kind is not None and (kind.is_floating_point if isinstance(kind, torch.dtype) else kind.kind == "f")


def column(y: Any) -> Any:
    """A column of pandas as an array, of whole numbers or booleans where it holds nothing else; others as they are.

    >>> column(np.array([0, 1], dtype=object))
    array([0, 1])
    """
    from_pandas = type(y).__module__.split(".")[0] == "pandas" and getattr(y, "ndim", 0) == 1
    array = np.asarray(y) if from_pandas else y
    if isinstance(array, np.ndarray) and array.dtype.kind == "O" and array.size:
        if all(isinstance(v, (bool, np.bool_)) for v in array.flat):
            return array.astype(bool)
        if all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in array.flat):
            return array.astype(np.int64)
    return array


def by_name(y: Any) -> bool:
    """Whether these are categories or names."""
    return getattr(getattr(y, "dtype", None), "categories", None) is not None or _strings(column(y))


def _strings(given: object) -> bool:
    """Whether there are names among these."""
    if isinstance(given, np.ndarray) and given.dtype.kind in "UT":
        return True
    values = given.tolist() if isinstance(given, np.ndarray) and given.dtype.kind == "O" else given
    return isinstance(values, (list, tuple)) and any(isinstance(v, str) for v in values)


def _named(y: Any, name: str, names: Sequence[str] | None) -> Targets | None:
    """Classes that are given by name: pandas' categories, strings; None of numbers."""
    categories = getattr(getattr(y, "dtype", None), "categories", None)
    if categories is not None:
        codes, own = np.asarray(getattr(y, "cat", y).codes), tuple(str(v) for v in categories)
        if (codes < 0).any():
            raise InputError(f"{name} has no category at {int((codes < 0).argmax())}; needed: one for each sample.")
        if names is None:
            return Targets(torch.from_numpy(codes.astype(np.int64)), "classes", own)
        given: list[object] = [own[k] for k in codes]
    else:
        array = column(y)
        if not _strings(array):
            return None
        given = array.tolist() if isinstance(array, np.ndarray) else list(array)
    wrong = [k for k, v in enumerate(given) if not isinstance(v, str)]
    if wrong:
        k = wrong[0]
        raise InputError(f"{name} holds names, and at {k} {given[k]!r}; needed: a name for each sample, or numbers.")
    called = [str(v) for v in given]
    known = tuple(sorted(set(called))) if names is None else tuple(names)
    number = {v: k for k, v in enumerate(known)}
    unknown = [v for v in called if v not in number]
    if unknown:
        hint = checks.suggest(unknown[0], known)
        raise InputError(f"{name} has {unknown[0]!r}; the classes are {checks.some(list(known))}.{hint}")
    return Targets(torch.tensor([number[v] for v in called], dtype=torch.long), "classes", known)


def _as_classes(values: Tensor) -> str:
    if values.dim() == 2 and values.shape[1] > 1:
        return ".argmax(1)"
    return ".long()" if values.dim() < 2 else "[:, 0].long()"


def _numbers(values: Tensor, name: str, why: str) -> Tensor:
    """Class numbers [n], of numbers that are to be classes."""
    if values.dim() == 2 and why:
        return values.argmax(1) if values.shape[1] > 1 else values[:, 0].long()
    if values.dim() != 1:
        raise InputError(f"{name} has shape {list(values.shape)}; needed: one class for each sample, [n].")
    if values.is_floating_point() and not bool((values == values.round()).all()):
        k = int((values != values.round()).nonzero()[0, 0])
        raise InputError(f"{name}[{k}] is {float(values[k]):g}; needed: classes, as whole numbers, or targets='real'.")
    return values.detach().long()
