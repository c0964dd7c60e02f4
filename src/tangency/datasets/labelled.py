"""Samples with their classes, and the ways to take a part of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .._base import checks, tree
from .._base.targets import by_name
from .._base.types import Array, Inputs
from ..errors import InputError
from . import accepted, from_torch
from .cells import shown
from .encoding import Encoding
from .summary import summary

Index = slice | Sequence[int] | Sequence[bool] | Tensor | np.ndarray


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Labelled:
    """Samples with their classes: what a model takes (`x`), its class (`y`), and what a person looks at (`show`).

    `x`: a tensor, or a tuple or dict of tensors, the sample in the leading dimension; floats must be finite. `show`:
    images [n, 1 or 3, h, w], uint8 or float in [0, 1]; n strings; or table rows [n, d], whose columns `columns` names.
    By default it is x where x is such images (8-bit and scaled to their range, if not in [0, 1]) or rows. `images=`
    and `texts=` are the same as `show=`, for whoever has one or the other. Arrays become tensors, labels
    int64 (strings by the names in `classes`). `encoding`: how a table was read, for `csv(file, like=…)`. `ids`: what
    each sample is called, n strings (the names of files, for instance); parts keep them.

    >>> data = Labelled(torch.rand(6, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2]), ("cat", "dog", "owl"))
    >>> data.only("owl", "cat").y.tolist()
    [1, 0, 1, 0]
    >>> train, test = data.split(3)
    >>> train.counts().tolist(), len(test)
    ([1, 1, 1], 3)
    >>> Labelled(torch.rand(2, 8), [0, 1], ("bad", "good"), texts=["a dull film", "a joy"]).show
    ('a dull film', 'a joy')
    """

    x: Inputs
    y: Tensor
    classes: tuple[str, ...]
    show: Tensor | tuple[str, ...] | None
    columns: tuple[str, ...]
    name: str
    encoding: Encoding | None
    ids: tuple[str, ...] | None

    def __init__(
        self,
        x: Inputs | np.ndarray,
        y: Array | Sequence[int],
        classes: Sequence[str],
        show: Array | Sequence[str] | None = None,
        columns: Sequence[str] = (),
        name: str = "",
        encoding: Encoding | None = None,
        *,
        images: Array | None = None,
        texts: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        accepted.check_text(name, "name")
        try:
            x = accepted.tensors(x)
            tree.check(x)
            classes = accepted.names(accepted.numbered(classes), "classes")
            y = accepted.labels(y, classes).values
            accepted.check_same_length(x, y)
            accepted.check_finite(x)
            if not classes:
                raise InputError("there are no classes; needed: at least one name.")
            accepted.check_range(y, len(classes))
            shown = accepted.one_show(show, images, texts)
            show = accepted.default_show(x) if shown is None else accepted.checked_show(*shown, len(y))
            columns = accepted.names(columns, "columns")
            accepted.check_columns(columns, show)
            if encoding is not None and encoding.names != columns:
                raise InputError("encoding is of a table with other columns; needed: that of these, or None.")
            ids = None if ids is None else accepted.checked_ids(ids, len(y))
        except InputError as e:
            raise InputError(f"{name}: {e}" if name else str(e)) from None
        values = {"x": x, "y": y, "classes": classes, "show": show, "columns": columns, "name": name}
        for field, value in {**values, "encoding": encoding, "ids": ids}.items():
            object.__setattr__(self, field, value)  # frozen for everybody else

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

    def take(self, n: int | None = None, *, per_class: int | None = None, seed: int | None = None) -> "Labelled":
        """`n` samples in all, the classes as in the whole (to within one sample), or `per_class` of every class.

        The first ones of each class, or with a seed random ones. Their order stays.

        >>> data = labelled((torch.rand(6, 4), [0, 1, 0, 0, 1, 0]))
        >>> data.take(3).y.tolist(), data.take(per_class=2).y.tolist()
        ([0, 1, 0], [0, 1, 0, 1])
        """
        if (n is None) == (per_class is None):
            raise InputError(
                f"take() was given n={n} and per_class={per_class}; needed: one of them, take(300) for 300 samples in "
                "all, or take(per_class=100)."
            )
        if per_class is not None:
            self._check_per_class(per_class)
            quota = [per_class] * len(self.classes)
        elif accepted.whole(n, 1, len(self)):
            quota = self._quota(int(n))  # type: ignore[arg-type]  # a whole number
        else:
            raise InputError(f"take({n!r}) of {len(self)} samples; needed: a whole number from 1 to {len(self)}.")
        parts = [of[:many] for of, many in zip(self._by_class(seed), quota, strict=True)]
        return self._part(torch.cat(parts).sort().values)

    def split(self, first: float, *, seed: int = 0) -> "TrainTest":
        """Two parts at random, in each the classes as in the whole (to within one sample). Their order stays.

        `first`: how much goes into the first part, a fraction (0.8) or a number of samples (100).

        >>> train, test = labelled((torch.rand(10, 4), [0, 1] * 5)).split(0.8)
        >>> train.counts().tolist(), test.counts().tolist()
        ([4, 4], [1, 1])
        """
        chosen = torch.zeros(len(self), dtype=torch.bool)
        for of, many in zip(self._by_class(seed), self._quota(self._count(first)), strict=True):
            chosen[of[:many]] = True
        return TrainTest(self._part(chosen.nonzero()[:, 0]), self._part((~chosen).nonzero()[:, 0]))

    def _part(self, index: slice | Tensor, **changes: Any) -> "Labelled":
        show = self.show[index] if isinstance(self.show, Tensor) else _strings(self.show, index)
        kept = {"x": tree.take(self.x, index), "y": self.y[index], "show": show, "ids": _strings(self.ids, index)}
        return replace(self, **kept | changes)

    def _by_class(self, seed: int | None) -> list[Tensor]:
        """The samples of each class, shuffled if there is a seed."""
        y = self.y.cpu()
        order = torch.arange(len(y)) if seed is None else shuffled(len(y), seed)
        return list(order[y[order].argsort(stable=True)].split(self.counts().tolist()))

    def _quota(self, count: int) -> list[int]:
        """How many of each class are among `count` samples that have the classes as the whole has them."""
        shares = self.counts().cpu() * count  # in n-ths of a sample: whole numbers, so that no rounding decides
        quota = shares // len(self)
        # What rounding down left over goes to the classes that lost most by it; among equals to the first.
        quota[(shares % len(self)).argsort(descending=True, stable=True)[: count - int(quota.sum())]] += 1
        return quota.tolist()

    def _check_per_class(self, per_class: object) -> None:
        if not accepted.whole(per_class, 1):
            raise InputError(f"per_class={per_class!r}; needed: a whole number, at least 1.")
        counts = self.counts()
        least = int(counts.argmin())
        if int(counts[least]) < per_class:  # type: ignore[operator]  # a whole number
            raise InputError(
                f"class {self.classes[least]!r} has {int(counts[least])} samples; needed: {per_class} of each class. "
                + (f"Take at most {int(counts[least])}." if counts[least] else "Leave it out first, with only(…).")
            )

    def _class(self, given: object) -> int:
        if isinstance(given, str):
            if given in self.classes:
                return self.classes.index(given)
            hint = checks.suggest(given, self.classes)
            raise InputError(f"there is no class {given!r}.{hint} There are {checks.some(list(self.classes), 10)}.")
        if accepted.whole(given, 0, len(self.classes) - 1):
            return int(given)  # type: ignore[call-overload]
        if accepted.whole(given):
            raise InputError(f"there is no class {given}; the classes are 0 to {len(self.classes) - 1}.")
        raise InputError(f"only() was given {given!r}; needed: names or numbers of classes, as in only('cat', 'dog').")

    def _count(self, first: object) -> int:
        n = len(self)
        if n < 2:
            raise InputError("there is one sample; needed: at least two for a split.")
        count: Any = round(first * n) if isinstance(first, float) and 0 < first < 1 else first
        if accepted.whole(count, 1, n - 1):
            return int(count)
        raise InputError(
            f"split({first!r}) of {n} samples; needed: a fraction between 0 and 1, or a number of samples, that leaves "
            "at least one in each part."
        )


# What is taken for samples with their classes.
Samples = Labelled | tuple[Inputs, Array | Sequence[int] | Sequence[str]] | Dataset[Any] | DataLoader[Any]


class TrainTest(NamedTuple):
    """Samples to train on and samples to be asked about: `train, test = digits()`."""

    train: Labelled
    test: Labelled


def labelled(data: Any, *, classes: Sequence[str] | None = None, name: str = "data", progress: bool = True) -> Labelled:
    """(x, y) or a torch data set of such pairs as `Labelled`; what is `Labelled` already stays as it is.

    x: what the model takes, y: the class of each sample: integers from 0, booleans, names (numbered as they sort) or
    pandas' categories; tensors, arrays, and for y lists and columns of pandas. A `torch.utils.data.Dataset` of (x, y),
    or a `DataLoader` of one, is read once, in the data set's own order: shuffling and `drop_last` do not matter, a
    `collate_fn` is used. A few items are read again: they must be the same, so augmentation is refused. `classes`:
    their names, by default a data set's own (`.classes`), or those that y has, else "0", "1", …; `name`: what the set
    is called, in messages too; `progress`: of long reading.

    >>> labelled((torch.rand(5, 3), [0, 1, 2, 1, 0]), name="toy")
    Labelled(toy: x [5, 3], 3 classes)
    >>> labelled(torch.utils.data.TensorDataset(torch.rand(5, 3), torch.tensor([0, 1, 2, 1, 0])))
    Labelled(data: x [5, 3], 3 classes)
    """
    if isinstance(data, Labelled):
        return data if classes is None else replace(data, classes=classes)  # type: ignore[arg-type]
    if from_torch.is_torch(data):
        x, y, own = from_torch.read(data, name, progress)
        data, classes = (x, y), own if classes is None else classes
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        what = f"{type(data).__name__} of {len(data)}" if isinstance(data, (tuple, list)) else type(data).__name__
        raise InputError(
            f"{name} is a {what}; needed: (x, y), the inputs and the class of each, tangency.datasets.Labelled, or a "
            f"torch Dataset or DataLoader of (x, y).{accepted.reader_of(data)}"
        )
    x, y = data
    if classes is None:
        try:
            y, _, classes = accepted.labels(y)
            accepted.check_range(y, None if classes is None else len(classes))
        except InputError as e:
            raise InputError(f"{name}: {e}") from None
        classes = classes or [str(k) for k in range(int(y.max()) + 1 if len(y) else 1)]
    return Labelled(x, y, classes, name=name)


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


def same_form(train: object, test: object) -> None:
    """Refuse names of classes on one side and numbers on the other: which is which would be a guess."""
    if not (isinstance(train, (tuple, list)) and isinstance(test, (tuple, list)) and len(train) == len(test) == 2):
        return
    sides = [by_name(side[1]) for side in (train, test)]
    if sides[0] != sides[1]:
        words = ["names" if named else "numbers" for named in sides]
        raise InputError(
            f"the classes of the training set are {words[0]}, those of the test set {words[1]}; needed: the same."
        )


def shuffled(n: int, seed: int) -> Tensor:
    """0 … n − 1 in random order, the same in every release: NumPy's legacy stream is frozen for good."""
    if not accepted.whole(seed, 0, 2**32 - 1):
        raise InputError(f"seed={seed!r}; needed: a whole number from 0 to 2³² − 1.")
    return torch.from_numpy(np.random.RandomState(seed).permutation(n))


def _strings(of: tuple[str, ...] | None, index: slice | Tensor) -> tuple[str, ...] | None:
    """Some of the strings, if there are any."""
    if of is None:
        return None
    return of[index] if isinstance(index, slice) else tuple(of[k] for k in index.tolist())


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
