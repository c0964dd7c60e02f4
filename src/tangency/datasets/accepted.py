"""What `Labelled` accepts for each of its fields: checked, and brought into one form."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._base import tree
from .._base.targets import Targets, by_name, column, read_targets
from .._base.types import Inputs
from ..errors import InputError

# Classes that may go without a name: more are rather identifiers or quantities (heuristic).
UNNAMED = 1000


def whole(value: object, low: int | None = None, high: int | None = None) -> bool:
    """Whether this is a whole number from low to high."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return (low is None or int(value) >= low) and (high is None or int(value) <= high)


def tensors(x: Any) -> Any:
    """x with tensors for arrays."""
    if isinstance(x, np.ndarray):
        return _tensor(x, "x")
    if isinstance(x, Mapping):
        return {k: _tensor(v, f"x[{k!r}]") if isinstance(v, np.ndarray) else v for k, v in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(_tensor(v, f"x[{k}]") if isinstance(v, np.ndarray) else v for k, v in enumerate(x))
    return x


def _tensor(array: np.ndarray, name: str) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise InputError(f"{name} holds {array.dtype}, of which there are no tensors; needed: numbers.")
    # In C order: of a column of a structured array torch cannot make a tensor otherwise.
    return tree.from_array(np.asanyarray(array, order="C"), name)


def labels(y: object, names: Sequence[str] | None = None) -> Targets:
    """One class a sample, as int64, with the names of the classes if that is how they are given."""
    given = column(y)
    if not isinstance(given, (Tensor, np.ndarray, list, tuple)) and not by_name(y):
        raise InputError(f"y is a {type(y).__name__}; needed: the class of each sample, in a tensor, array or list.")
    if isinstance(given, (list, tuple)) and not len(given):
        given = np.empty(0, dtype=np.int64)
    if not by_name(y):
        _check_numbers(given)
        given = given if isinstance(given, Tensor) else _tensor(np.asanyarray(given), "y")
        _check_classes(given)
        return read_targets(given, targets="classes")
    return read_targets(y, names=names)


def _check_numbers(given: Any) -> None:
    """Refuse what is no table of numbers."""
    try:
        array = given if isinstance(given, Tensor) else np.asanyarray(given)
    except ValueError:
        raise InputError("y is a list of lists of several lengths; needed: one integer for each sample.") from None
    if isinstance(array, np.ndarray) and array.dtype.kind in "SO":
        raise InputError(
            "y holds objects that are no names and no numbers; needed: integers from 0, or strings, one for each "
            "sample. Leave out samples that have no class."
        )


def _check_classes(y: Tensor) -> None:
    """Refuse numbers that are no classes [n], or of which nobody can say it."""
    if y.dim() != 1:
        fix = ""
        if y.dim() == 2:
            real = " Real targets are for tg.regress, not for classes."
            fix = (
                (real if y.is_floating_point() else " Use y[:, 0].")
                if y.shape[1] == 1
                else " If it is one-hot: y.argmax(1)."
            )
        raise InputError(f"y has shape {list(y.shape)}; needed: [n], one integer for each sample.{fix}")
    if y.is_floating_point() or y.is_complex():
        raise InputError(f"y is {y.dtype}; needed: integers from 0. If these are classes: y.long().")


def check_range(y: Tensor, c: int | None) -> None:
    """Labels from 0 to c − 1; without names, as many as may go without."""
    wrong = (y < 0) | (y >= (max(UNNAMED, len(y)) if c is None else c))
    if bool(wrong.any()):
        k = int(wrong.nonzero()[0, 0])
        if c is not None:  # numbering these alone would give their numbers another meaning
            raise InputError(
                f"y[{k}] is {int(y[k])}; needed: labels from 0 to {c - 1}, as there are {c} classes. Leave such "
                "samples out, or number the labels of all sets together."
            )
        raise InputError(
            f"y[{k}] is {int(y[k])}; needed: classes numbered from 0. Number them: "
            "y = torch.unique(y, return_inverse=True)[1]."
        )


def check_same_length(x: Inputs, y: Tensor) -> None:
    n = tree.size(x)
    if n != len(y):
        stack = isinstance(x, tuple) and len(x) == len(y)
        fix = " If x is a list of samples: torch.stack(x)." if stack else ""
        raise InputError(f"x has {n} samples, y has {len(y)}; needed: one label for each sample.{fix}")


def check_finite(x: Inputs) -> None:
    for label, leaf in tree.leaves(x):
        v = leaf.detach()
        # The extremes are NaN if one number is; isfinite() of a large set would take twice its memory.
        if v.is_floating_point() and v.numel() and not bool(torch.stack(v.aminmax()).isfinite().all()):
            where = [int(k) for k in (~v.isfinite()).nonzero()[0]]
            raise InputError(
                f"sample {where[0]} is not finite: {label}[{', '.join(map(str, where))}] is {float(v[tuple(where)])}; "
                "needed: finite numbers. Leave such samples out, or correct them."
            )


def numbered(given: object) -> object:
    """Names of classes, whole numbers among them as text, as a table's classes are."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    return [str(v) if whole(v) else v for v in given] if isinstance(given, (list, tuple)) else given


def names(given: object, what: str) -> tuple[str, ...]:
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(v, str) for v in given):
        raise InputError(f"{what}={given!r}; needed: a tuple of names (strings).")
    seen: set[str] = set()
    for k, v in enumerate(given):
        check_text(v, f"{what}[{k}]")
        if v in seen:
            raise InputError(f"{what} has {v!r} twice; needed: different names.")
        seen.add(v)
    return tuple(given)


def check_text(given: object, what: str) -> None:
    """Text that can be written to a file: halves of surrogate pairs cannot."""
    if not isinstance(given, str):
        raise InputError(f"{what} is a {type(given).__name__}; needed: a string.")
    try:
        given.encode()
    except UnicodeEncodeError as e:
        raise InputError(
            f"{what} has a lone surrogate ({given[e.start]!r}, character {e.start}), which no file can hold; needed: "
            "text. Repair it: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
        ) from None


def default_show(x: Inputs) -> Tensor | None:
    """x where a person can look at it: images or table rows."""
    if not isinstance(x, Tensor):
        return None
    v = x.detach()
    if v.dim() != 4 or v.shape[1] not in (1, 3) or not v.numel():
        return v if v.dim() == 2 else None
    if v.dtype == torch.uint8:
        return v
    low, high = (float(k) for k in v.float().aminmax())
    if v.is_floating_point() and low >= 0 and high <= 1:
        return v
    return (v.float() - low).mul_(255 / (high - low) if high > low else 0).round_().byte()


def one_show(show: object, images: object, texts: object) -> tuple[object, str] | None:
    """What a person is to look at, by whichever name it was given, with that name; None where there is nothing."""
    given = [(v, name) for v, name in ((show, "show"), (images, "images"), (texts, "texts")) if v is not None]
    if len(given) > 1:
        names = " and ".join(f"{name}=" for _, name in given)
        raise InputError(f"{names} were given; needed: one of them, as a sample is shown in one way.")
    if texts is not None and isinstance(texts, (Tensor, str)):
        raise InputError(f"texts is a {type(texts).__name__}; needed: n strings, a list or tuple of them.")
    if isinstance(images, (list, tuple)):
        raise InputError(
            f"images is a {type(images).__name__}; needed: a tensor [n, 1 or 3, h, w]: torch.stack(images)."
        )
    return given[0] if given else None


def checked_show(show: Any, what: str, n: int) -> Tensor | tuple[str, ...]:
    """`show` as it was given, checked: images or rows as a tensor, strings as a tuple. `what`: its name."""
    if isinstance(show, np.ndarray) and show.dtype.kind in "US":
        show = show.tolist()
    if isinstance(show, np.ndarray):
        show = _tensor(show, what)
    texts = isinstance(show, (list, tuple)) and all(isinstance(v, str) for v in show)
    if not texts and not isinstance(show, Tensor):
        raise InputError(
            f"{what} is a {type(show).__name__}; needed: images [n, 1 or 3, h, w], n strings, or table rows [n, d]."
        )
    rows = isinstance(show, Tensor) and show.dim() == 2 and what != "images"
    if isinstance(show, Tensor) and not rows and (show.dim() != 4 or show.shape[1] not in (1, 3)):
        raise InputError(
            f"{what} has shape {list(show.shape)}; needed: images [n, 1 or 3, h, w] ({what}[:, None] adds the channel, "
            f"{what}.permute(0, 3, 1, 2) moves it forward), or table rows [n, d]."
        )
    if len(show) != n:
        raise InputError(f"{what} has {len(show)} entries, y has {n}; needed: one for each sample.")
    if not isinstance(show, Tensor):
        for k, text in enumerate(show):
            check_text(text, f"{what}[{k}]")
        return tuple(show)
    show = show.detach()
    if show.dim() == 4 and show.dtype != torch.uint8 and show.numel():
        low, high = show.aminmax()
        if not show.is_floating_point() or not bool((low >= 0) & (high <= 1)):
            raise InputError(
                f"{what} is {show.dtype} from {float(low):g} to {float(high):g}; needed: images in uint8, or floats in "
                f"[0, 1]. Scale them, or leave {what} away: then x is scaled for it."
            )
    return show


def checked_ids(given: object, n: int) -> tuple[str, ...]:
    """What n samples are called; a name may stand twice, as a sample may be selected twice."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(f"ids is a {type(given).__name__}; needed: n strings, a list or tuple of them.")
    if len(given) != n:
        raise InputError(f"ids has {len(given)} entries, y has {n}; needed: one for each sample.")
    for k, v in enumerate(given):
        check_text(v, f"ids[{k}]")
    return tuple(given)


def is_hf(data: object) -> bool:
    """Whether this is a data set of Hugging Face's, or of that interface: columns with features, and rows."""
    return all(hasattr(data, name) for name in ("features", "column_names", "__getitem__")) and not callable(data)


def reader_of(data: object) -> str:
    """Which function reads data of this kind; nothing where none does."""
    splits = isinstance(data, Mapping) and data and all(map(is_hf, data.values()))
    if splits or is_hf(data):
        part = f"[{next(iter(data))!r}]" if isinstance(data, Mapping) else ""
        return f" Read it: tg.datasets.from_hf(dataset{part}, image=…, text=… or columns=…, label=…)."
    if type(data).__name__ == "DataFrame":
        return " Read it: tg.datasets.frame(df, target=…)."
    return ""


def check_columns(columns: tuple[str, ...], show: Tensor | tuple[str, ...] | None) -> None:
    if columns and not (isinstance(show, Tensor) and show.dim() == 2 and show.shape[1] == len(columns)):
        have = f"shape {list(show.shape)}" if isinstance(show, Tensor) else "no columns"
        raise InputError(f"columns has {len(columns)} names, show has {have}; needed: table rows [n, {len(columns)}].")
