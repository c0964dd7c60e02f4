"""Samples with their classes, and the ways to take a part of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Inputs
from ..errors import InputError
from .cells import shown
from .encoding import Encoding
from .summary import summary

Index = slice | Sequence[int] | Sequence[bool] | Tensor | np.ndarray
# Classes that may go without a name: more are rather identifiers or quantities (heuristic).
_UNNAMED = 1000


@dataclass(frozen=True, eq=False, repr=False)
class Labelled:
    """Samples with their classes: what a model takes (`x`), its class (`y`), and what a person looks at (`show`).

    `x`: a tensor, or a tuple or dict of tensors, the sample in the leading dimension; floats must be finite. `show`:
    images [n, 1 or 3, h, w], uint8 or float in [0, 1]; n strings; or table rows [n, d], whose columns `columns` names.
    By default it is x where x is such images (8-bit and scaled to their range, if not in [0, 1]) or rows. Arrays
    become tensors, integer labels int64. `encoding`: how a table was read, for `csv(file, like=…)`.

    >>> data = Labelled(torch.rand(6, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2]), ("cat", "dog", "owl"))
    >>> data.only("owl", "cat").y.tolist()
    [1, 0, 1, 0]
    >>> train, test = data.split(3)
    >>> train.counts().tolist(), len(test)
    ([1, 1, 1], 3)
    """

    x: Inputs
    y: Tensor
    classes: tuple[str, ...]
    show: Tensor | tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    name: str = ""
    encoding: Encoding | None = None

    def __post_init__(self) -> None:
        _text(self.name, "name")
        try:
            x = _tensors(self.x)
            tree.check(x)
            y = _labels(self.y)
            _same_length(x, y)
            _finite(x)
            classes = _names(_numbered(self.classes), "classes")
            if not classes:
                raise InputError("there are no classes; needed: at least one name.")
            _in_range(y, len(classes))
            show = _default(x) if self.show is None else _shown(self.show, len(y))
            columns = _names(self.columns, "columns")
            _fit(columns, show)
            if self.encoding is not None and self.encoding.names != columns:
                raise InputError("encoding is of a table with other columns; needed: that of these, or None.")
        except InputError as e:
            raise InputError(f"{self.name}: {e}" if self.name else str(e)) from None
        for field, value in (("x", x), ("y", y), ("classes", classes), ("show", show), ("columns", columns)):
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(v.shape)}" for name, v in tree.leaves(self.x))
        return f"Labelled({self.name or 'data'}: {shapes}, {len(self.classes)} classes)"

    def summary(self) -> str:
        """What is in it: the classes, and the inputs or, for a table, what was understood of every column.

        >>> print(Labelled(torch.eye(2), [0, 1], ("no", "yes"), columns=("a", "b"), name="toy").summary())
        toy: 2 samples, 2 classes: no 1, yes 1
          a  number  0 to 1
          b  number  0 to 1
        """
        counts = dict(zip(self.classes, self.counts().tolist(), strict=True))
        rows = self.show if self.columns and isinstance(self.show, Tensor) else None
        return summary(self.name or "data", counts, self.x, rows, self.columns, self.encoding)

    def counts(self) -> Tensor:
        """The number of samples of each class, [c]."""
        return torch.bincount(self.y, minlength=len(self.classes))

    def with_x(self, x: Inputs) -> "Labelled":
        """The same samples in another form for the model (standardised, embedded…); `show` stays.

        >>> data = labelled((torch.rand(6, 1, 4, 4), [0, 1, 2, 0, 1, 2]))
        >>> data.with_x((data.x - 0.5).flatten(1)).show.shape
        torch.Size([6, 1, 4, 4])
        """
        return replace(self, x=x)

    def select(self, index: Index) -> "Labelled":
        """These samples, in this order: by numbers (which may repeat), a mask, or a slice (which copies nothing).

        >>> labelled((torch.rand(6, 4), [0, 1, 2, 0, 1, 2])).select([5, 0]).y.tolist()
        [2, 0]
        """
        return self._part(_index(index, len(self)))

    def only(self, *classes: str | int) -> "Labelled":
        """The samples of these classes, by name or number, relabelled from 0 in the order given.

        >>> data = labelled((torch.rand(6, 4), [0, 1, 2, 0, 1, 2])).only(2, 1)
        >>> data.classes, data.y.tolist()
        (('2', '1'), [1, 0, 1, 0])
        """
        if not classes:
            raise InputError(f"only() was given no class; needed: some of {checks.some(list(self.classes))}.")
        chosen = [self._class(c) for c in classes]
        twice = [self.classes[k] for k in chosen if chosen.count(k) > 1]
        if twice:
            raise InputError(f"class {twice[0]!r} was given twice; needed: each class once.")
        names = tuple(self.classes[k] for k in chosen)
        new = torch.full((len(self.classes),), -1)
        new[chosen] = torch.arange(len(chosen))
        y = new.to(self.y.device)[self.y]
        inside = (y >= 0).nonzero()[:, 0].cpu()
        if not len(inside):
            raise InputError(f"none of the {len(self)} samples is of class {' or '.join(map(repr, names))}.")
        return self._part(inside, y=y[inside], classes=names)

    def take(self, n_per_class: int, *, seed: int | None = None) -> "Labelled":
        """`n_per_class` samples of every class: the first ones, or with a seed random ones. Their order stays.

        >>> labelled((torch.rand(6, 4), [0, 1, 0, 0, 1, 1])).take(2).y.tolist()
        [0, 1, 0, 1]
        """
        if not whole(n_per_class, 1):
            raise InputError(f"n_per_class={n_per_class!r}; needed: a whole number, at least 1.")
        counts = self.counts()
        least = int(counts.argmin())
        if int(counts[least]) < n_per_class:
            raise InputError(
                f"class {self.classes[least]!r} has {int(counts[least])} samples; needed: {n_per_class} of each class. "
                + (f"Take at most {int(counts[least])}." if counts[least] else "Leave it out first, with only(…).")
            )
        return self._part(torch.cat([of[:n_per_class] for of in self._by_class(seed)]).sort().values)

    def split(self, first: float, *, seed: int = 0) -> "TrainTest":
        """Two parts at random, in each the classes as in the whole (to within one sample). Their order stays.

        `first`: how much goes into the first part, a fraction (0.8) or a number of samples (100).

        >>> train, test = labelled((torch.rand(10, 4), [0, 1] * 5)).split(0.8)
        >>> train.counts().tolist(), test.counts().tolist()
        ([4, 4], [1, 1])
        """
        count, n = self._count(first), len(self)
        shares = self.counts().cpu() * count  # in n-ths of a sample: whole numbers, so that no rounding decides
        quota = shares // n
        # What rounding down left over goes to the classes that lost most by it; among equals to the first.
        quota[(shares % n).argsort(descending=True, stable=True)[: count - int(quota.sum())]] += 1
        chosen = torch.zeros(n, dtype=torch.bool)
        for of, many in zip(self._by_class(seed), quota.tolist(), strict=True):
            chosen[of[:many]] = True
        return TrainTest(self._part(chosen.nonzero()[:, 0]), self._part((~chosen).nonzero()[:, 0]))

    def _part(self, index: slice | Tensor, **changes: Any) -> "Labelled":
        show = self.show
        if isinstance(show, tuple):
            show = show[index] if isinstance(index, slice) else tuple(show[k] for k in index.tolist())
        elif show is not None:
            show = show[index]
        return replace(self, **{"x": tree.take(self.x, index), "y": self.y[index], "show": show} | changes)

    def _by_class(self, seed: int | None) -> list[Tensor]:
        """The samples of each class, shuffled if there is a seed."""
        y = self.y.cpu()
        order = torch.arange(len(y)) if seed is None else shuffled(len(y), seed)
        return list(order[y[order].argsort(stable=True)].split(self.counts().tolist()))

    def _class(self, given: object) -> int:
        if isinstance(given, str):
            if given in self.classes:
                return self.classes.index(given)
            hint = checks.suggest(given, self.classes)
            raise InputError(f"there is no class {given!r}.{hint} There are {checks.some(list(self.classes), 10)}.")
        if whole(given, 0, len(self.classes) - 1):
            return int(given)  # type: ignore[call-overload]
        if whole(given):
            raise InputError(f"there is no class {given}; the classes are 0 to {len(self.classes) - 1}.")
        raise InputError(f"only() was given {given!r}; needed: names or numbers of classes, as in only('cat', 'dog').")

    def _count(self, first: object) -> int:
        n = len(self)
        if n < 2:
            raise InputError("there is one sample; needed: at least two for a split.")
        count: Any = round(first * n) if isinstance(first, float) and 0 < first < 1 else first
        if whole(count, 1, n - 1):
            return int(count)
        raise InputError(
            f"split({first!r}) of {n} samples; needed: a fraction between 0 and 1, or a number of samples, that leaves "
            "at least one in each part."
        )


class TrainTest(NamedTuple):
    """Samples to train on and samples to be asked about: `train, test = digits()`."""

    train: Labelled
    test: Labelled


def labelled(data: Any, *, classes: Sequence[str] | None = None, name: str = "data") -> Labelled:
    """(x, y) as `Labelled`; what is `Labelled` already stays as it is.

    x: what the model takes, y: the class of each sample, from 0; tensors, arrays, and for y lists. `classes`: their
    names, by default "0", "1", …; `name`: what the set is called, in messages too.

    >>> labelled((torch.rand(5, 3), [0, 1, 2, 1, 0]), name="toy")
    Labelled(toy: x [5, 3], 3 classes)
    """
    if isinstance(data, Labelled):
        return data if classes is None else replace(data, classes=classes)  # type: ignore[arg-type]
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        what = f"{type(data).__name__} of {len(data)}" if isinstance(data, (tuple, list)) else type(data).__name__
        raise InputError(
            f"{name} is a {what}; needed: (x, y), the inputs and the class of each, or tangency.datasets.Labelled. Of "
            "a torch Dataset make tensors first: x, y = next(iter(DataLoader(dataset, batch_size=len(dataset))))."
        )
    x, y = data
    if classes is None:
        try:
            y = _labels(y)
            _in_range(y, None)
        except InputError as e:
            raise InputError(f"{name}: {e}") from None
        classes = [str(k) for k in range(int(y.max()) + 1 if len(y) else 1)]
    return Labelled(x, y, classes, name=name)  # type: ignore[arg-type]


def same_columns(train: Labelled, test: Labelled) -> None:
    """Refuse a test set whose columns are not those of the training set, in their order; where both have names.

    >>> ab, ba = (Labelled(torch.eye(2), [0, 1], ("u", "v"), columns=names) for names in (("a", "b"), ("b", "a")))
    >>> same_columns(ab, ba)
    Traceback (most recent call last):
    ...
    tangency.errors.InputError: the test set's columns are the training set's in another order (b, a for a, b). ...
    """
    a, b = train.columns, test.columns
    if a == b or not a or not b:
        return
    lacking, more = [c for c in a if c not in b], [c for c in b if c not in a]
    if not lacking and not more:
        what = f"are the training set's in another order ({checks.some(shown(b))} for {checks.some(shown(a))})"
    else:
        parts = [f"lack {checks.some(shown(lacking))}"] * bool(lacking) + [
            f"have {checks.some(shown(more))} in addition"
        ] * bool(more)
        what = f"are not the training set's: they {' and '.join(parts)}"
    raise InputError(
        f"the test set's columns {what}. Read it like the training set, tangency.datasets.csv(file, like=train), or "
        "give both sets the same columns in the same order."
    )


def shuffled(n: int, seed: int) -> Tensor:
    """0 … n − 1 in random order, the same in every release: NumPy's legacy stream is frozen for good."""
    if not whole(seed, 0, 2**32 - 1):
        raise InputError(f"seed={seed!r}; needed: a whole number from 0 to 2³² − 1.")
    return torch.from_numpy(np.random.RandomState(seed).permutation(n))


def whole(value: object, low: int | None = None, high: int | None = None) -> bool:
    """Whether this is a whole number from low to high."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return (low is None or int(value) >= low) and (high is None or int(value) <= high)


def _tensors(x: Any) -> Any:
    """x with tensors for arrays."""
    if isinstance(x, np.ndarray):
        return _tensor(x, "x")
    if isinstance(x, Mapping):
        return {k: _tensor(v, f"x[{k!r}]") if isinstance(v, np.ndarray) else v for k, v in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(_tensor(v, f"x[{k}]") if isinstance(v, np.ndarray) else v for k, v in enumerate(x))
    return x


def _index(given: object, n: int) -> slice | Tensor:
    """Numbers of samples, on the CPU: they index tensors on any device."""
    if isinstance(given, slice):
        chosen = range(n)[given]
        if chosen and given.step in (None, 1):
            return slice(chosen.start, chosen.stop)
        given = chosen
    if not isinstance(given, (Tensor, np.ndarray, Sequence)) or isinstance(given, str):
        raise InputError(f"select({given!r}); needed: numbers of samples, a mask or a slice, as in select([0, 2]).")
    try:
        index = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"select() was given {type(given).__name__} of something; needed: numbers or a mask."
        ) from None
    if index.dim() != 1 or (index.is_floating_point() and len(index)):
        what = f"{index.dtype} {list(index.shape)}"
        raise InputError(f"select() was given {what}; needed: whole numbers [k], or a mask of {n} booleans.")
    if index.dtype == torch.bool:
        if len(index) != n:
            raise InputError(f"the mask has {len(index)} entries; needed: {n}, one for each sample.")
        index = index.nonzero()[:, 0]
    if not len(index):
        raise InputError(f"select() was given none of the {n} samples; needed: at least one.")
    index = index.long()
    wrong = index[(index < -n) | (index >= n)]
    if len(wrong):
        raise InputError(f"there is no sample {int(wrong[0])}; there are {n}, numbered from 0.")
    return index % n


def _tensor(array: np.ndarray, name: str) -> Tensor:
    try:  # in the machine's byte order, and writable: a tensor would write through to a mapped file
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except TypeError:
        raise InputError(f"{name} holds {array.dtype}, of which there are no tensors; needed: numbers.") from None


def _labels(y: object) -> Tensor:
    """One integer a sample, as int64."""
    if not isinstance(y, Tensor):
        if not isinstance(y, (np.ndarray, list, tuple)):
            raise InputError(
                f"y is a {type(y).__name__}; needed: the class of each sample, in a tensor, array or list."
            )
        try:
            array = np.asarray(y, np.int64 if isinstance(y, (list, tuple)) and not len(y) else None)
        except ValueError:
            raise InputError("y is a list of lists of several lengths; needed: one integer for each sample.") from None
        if array.dtype.kind in "USO":
            raise InputError(
                "y holds strings or objects; needed: integers from 0. Number the classes: classes = sorted(set(y)); "
                "y = [classes.index(v) for v in y]."
            )
        y = _tensor(array, "y")
    if y.dim() != 1:
        fix = ""
        if y.dim() == 2:
            fix = " Use y[:, 0]." if y.shape[1] == 1 else " If it is one-hot: y.argmax(1)."
        raise InputError(f"y has shape {list(y.shape)}; needed: [n], one integer for each sample.{fix}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"y is {y.dtype}; needed: integers from 0. If these are classes: y.long().")
    return y.detach().long()


def _in_range(y: Tensor, c: int | None) -> None:
    """Labels from 0 to c − 1; without names, as many as may go without."""
    wrong = (y < 0) | (y >= (max(_UNNAMED, len(y)) if c is None else c))
    if bool(wrong.any()):
        k = int(wrong.nonzero()[0, 0])
        need = f"labels from 0 to {c - 1}, as there are {c} names of classes" if c else "classes numbered from 0"
        raise InputError(
            f"y[{k}] is {int(y[k])}; needed: {need}. Number them: y = torch.unique(y, return_inverse=True)[1]."
        )


def _same_length(x: Inputs, y: Tensor) -> None:
    n = tree.size(x)
    if n != len(y):
        stack = isinstance(x, tuple) and len(x) == len(y)
        fix = " If x is a list of samples: torch.stack(x)." if stack else ""
        raise InputError(f"x has {n} samples, y has {len(y)}; needed: one label for each sample.{fix}")


def _finite(x: Inputs) -> None:
    for label, leaf in tree.leaves(x):
        v = leaf.detach()
        # The extremes are NaN if one number is; isfinite() of a large set would take twice its memory.
        if v.is_floating_point() and v.numel() and not bool(torch.stack(v.aminmax()).isfinite().all()):
            where = [int(k) for k in (~v.isfinite()).nonzero()[0]]
            raise InputError(
                f"sample {where[0]} is not finite: {label}[{', '.join(map(str, where))}] is {float(v[tuple(where)])}; "
                "needed: finite numbers. Leave such samples out, or correct them."
            )


def _numbered(given: object) -> object:
    """Names of classes, whole numbers among them as text, as a table's classes are."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    return [str(v) if whole(v) else v for v in given] if isinstance(given, (list, tuple)) else given


def _names(given: object, what: str) -> tuple[str, ...]:
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(v, str) for v in given):
        raise InputError(f"{what}={given!r}; needed: a tuple of names (strings).")
    seen: set[str] = set()
    for k, v in enumerate(given):
        _text(v, f"{what}[{k}]")
        if v in seen:
            raise InputError(f"{what} has {v!r} twice; needed: different names.")
        seen.add(v)
    return tuple(given)


def _text(given: object, what: str) -> None:
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


def _default(x: Inputs) -> Tensor | None:
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


def _shown(show: Any, n: int) -> Tensor | tuple[str, ...]:
    """`show` as it was given, checked: images or rows as a tensor, strings as a tuple."""
    if isinstance(show, np.ndarray) and show.dtype.kind in "US":
        show = show.tolist()
    if isinstance(show, np.ndarray):
        show = _tensor(show, "show")
    texts = isinstance(show, (list, tuple)) and all(isinstance(v, str) for v in show)
    if not texts and not isinstance(show, Tensor):
        raise InputError(
            f"show is a {type(show).__name__}; needed: images [n, 1 or 3, h, w], n strings, or table rows [n, d]."
        )
    if isinstance(show, Tensor) and show.dim() != 2 and (show.dim() != 4 or show.shape[1] not in (1, 3)):
        raise InputError(
            f"show has shape {list(show.shape)}; needed: images [n, 1 or 3, h, w] (show[:, None] adds the channel, "
            "show.permute(0, 3, 1, 2) moves it forward), or table rows [n, d]."
        )
    if len(show) != n:
        raise InputError(f"show has {len(show)} entries, y has {n}; needed: one for each sample.")
    if not isinstance(show, Tensor):
        for k, text in enumerate(show):
            _text(text, f"show[{k}]")
        return tuple(show)
    show = show.detach()
    if show.dim() == 4 and show.dtype != torch.uint8 and show.numel():
        low, high = show.aminmax()
        if not show.is_floating_point() or not bool((low >= 0) & (high <= 1)):
            raise InputError(
                f"show is {show.dtype} from {float(low):g} to {float(high):g}; needed: images in uint8, or floats in "
                "[0, 1]. Scale them, or leave show away: then x is scaled for it."
            )
    return show


def _fit(columns: tuple[str, ...], show: Tensor | tuple[str, ...] | None) -> None:
    if columns and not (isinstance(show, Tensor) and show.dim() == 2 and show.shape[1] == len(columns)):
        have = f"shape {list(show.shape)}" if isinstance(show, Tensor) else "no columns"
        raise InputError(f"columns has {len(columns)} names, show has {have}; needed: table rows [n, {len(columns)}].")
