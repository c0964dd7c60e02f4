"""Tables of numbers and categories from text files."""

import warnings
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._base import checks
from .._base.files import path
from .._base.types import FilePath
from ..errors import InputError, TangencyWarning
from .cells import Form, is_missing, number, odd, oddity, shown
from .encoding import Column, Encoding, Missing
from .files import title
from .labelled import Labelled
from .lines import Lines, Which, read_lines

__all__ = ["csv", "fields", "is_missing", "number"]

# A category or class column with more different values is rather text, an identifier or a quantity (heuristic).
_MANY = 1000
# A difference lost to float32 counts in a column of measurements from this part of its range on (heuristic).
_COUNTS = 1e-4


def csv(
    file: FilePath,
    target: Which | None = None,
    *,
    like: Labelled | None = None,
    columns: Sequence[Which] | None = None,
    categorical: Sequence[Which] | Mapping[Which, Sequence[str]] = (),
    delimiter: str | None = None,
    header: bool | None = None,
    classes: Sequence[str] | None = None,
    decimal: str | None = None,
    thousands: str | None = None,
    missing: Missing | None = None,
) -> Labelled:
    """The lines of a CSV file (UTF-8, gzipped or not) as samples: x [n, d] in float32, the class from column `target`.

    A column of words is encoded as one 0/1 column for each of them, named "colour=red" in `columns` of the result, and
    so are the `categorical` ones, numbers too. `show` is the same in float64; where float32 cannot tell numbers apart
    that differ (times in seconds, identifiers), a warning names them. Nothing is scaled or filled in.
    `print(data.summary())` says what was understood. Read test sets with `like=train`: columns go by name, the
    categories, classes and rules are those of `train`; what it does not know is refused.

    `target`, `columns` (which to use; default: all others): by name, or by number from 0 or from the end.
    `header`: whether line 1 holds the names; known if `target` is a name. `delimiter`: found in line 1, if clear.
    `classes`: the values of the target in the order wanted; default: sorted. `decimal="."`, `thousands=""`: how
    numbers are written. `missing="refuse"`, or "leave out" lines that lack a value: a cell that is empty or holds one
    of `tg.datasets.MISSING` (?, NA, N/A, NaN, null, None, …), unless it is one of `classes`, or a category by name:
    categorical={"alley": ["NA"]}. Numbers in another dress (10%, $10, 0x10, dates) are refused, unless the column is
    `categorical`. Classes and categories are as written, but 1.0 is 1.

    >>> import tempfile
    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "fruit.csv").write_text("weight,colour,kind\\n120,red,apple\\n9.5,red,cherry\\n130,blue,apple\\n")
    >>> data = csv(folder / "fruit.csv", "kind")
    >>> data.columns, data.x.tolist()
    (('weight', 'colour=blue', 'colour=red'), [[120.0, 0.0, 1.0], [9.5, 0.0, 1.0], [130.0, 1.0, 0.0]])
    >>> data.classes, data.y.tolist()
    (('apple', 'cherry'), [0, 1, 0])
    >>> _ = (folder / "more.csv").write_text("colour;kind;weight\\nred;cherry;8\\n")
    >>> csv(folder / "more.csv", like=data).x.tolist()
    [[8.0, 0.0, 1.0]]
    """
    wish = wished(target, like, columns, categorical, classes, header, decimal, thousands, missing)
    place = path(file, "file")
    return wish.read(read_lines(place, delimiter, wish.names_on_top), title(place))


def fields(file: FilePath, *, delimiter: str | None = None, header: bool = True) -> tuple[list[str], list[list[str]]]:
    """(the names of the columns, the cells of every line) of a CSV file as text, nothing encoded.

    For tables that `csv` does not take as they are. Without a header the names are the columns' numbers. `delimiter`:
    found in line 1, if clear.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "fruit.csv"
    ...     _ = file.write_text("120,red,apple\\n?,red,cherry\\n")
    ...     fields(file, header=False)
    (['0', '1', '2'], [['120', 'red', 'apple'], ['?', 'red', 'cherry']])
    """
    lines = read_lines(path(file, "file"), delimiter, header)
    return lines.names, lines.rows


def wished(
    target: Which | None, like: Labelled | None, columns: Sequence[Which] | None,
    categorical: Sequence[Which] | Mapping[Which, Sequence[str]], classes: Sequence[str] | None, header: bool | None,
    decimal: str | None, thousands: str | None, missing: Missing | None,
) -> "Wish":  # fmt: skip
    """The options of `csv`, checked."""
    known = None if like is None else _encoding(like)
    order = _several(classes, "classes")
    wish = Wish(
        target,
        _several(columns, "columns"),
        _named(categorical) or None,
        order,
        header,
        decimal,
        thousands,
        missing,
        known,
    )
    return wish if like is None else replace(wish, order=like.classes)


@dataclass(frozen=True)
class Wish:
    """What was asked for, and how the training set was read, if that decides."""

    target: Which | None
    columns: list[Which] | None
    categorical: dict[Which, frozenset[str]] | None  # with the words of each that are no missing values
    classes: list[Any] | None
    header: bool | None
    decimal: str | None
    thousands: str | None
    missing: Missing | None
    known: Encoding | None
    order: tuple[str, ...] | None = None  # the classes of the training set

    def __post_init__(self) -> None:
        if self.header not in (None, True, False):
            raise InputError(f"header={self.header!r}; needed: True, False or None.")
        if self.missing not in (None, "refuse", "leave out"):
            raise InputError(f"missing={self.missing!r}; needed: 'refuse' or 'leave out'.")
        decided = [option for option in ("columns", "categorical", "classes") if getattr(self, option) is not None]
        if self.known and decided:
            raise InputError(f"like= and {decided[0]}= were given; like= decides that. Leave one of them out.")
        if self.known is None and self.target is None:
            raise InputError("target is missing; needed: the column of the classes, by name or number, or like=.")
        if self.known is None and self.header is None and not isinstance(self.target, str):
            raise InputError(
                f"target={self.target!r} does not tell whether line 1 holds the names of the columns. Say so: "
                "header=True or header=False."
            )

    @property
    def base(self) -> Encoding:
        """The rules where nothing is said."""
        return self.known or Encoding(Column(""), ())

    @property
    def names_on_top(self) -> bool:
        """Whether line 1 holds the names of the columns."""
        return self.base.header if self.header is None else self.header

    @property
    def form(self) -> Form:
        """How numbers are written."""
        spelling = {k: v for k in ("decimal", "thousands") if (v := getattr(self, k)) is not None}
        return replace(self.base.form, **spelling)

    def read(self, lines: Lines, name: str) -> Labelled:
        """The set that these lines hold."""
        form, rule = self.form, self.missing or self.base.missing
        label, used = self.places(lines)
        coded = {lines.column(c, "categorical"): words for c, words in (self.categorical or {}).items()}
        if not coded.keys() <= set(used):
            raise InputError(f"categorical={list(self.categorical or ())}; needed: some of the columns that are used.")
        order = self.classes if self.order is None else self.order
        if self.known:
            words = {k: frozenset(c.words or ()) for k, c in zip(used, self.known.columns, strict=True)}
        else:
            words = coded
        lines, gaps = _complete(lines, [*used, label], {**words, label: frozenset(map(str, order or ()))}, rule)
        reader = _Found(lines, form, self.known is not None)
        columns = self.known.columns if self.known else tuple(reader.learned(k, k in coded) for k in used)
        values = np.concatenate(list(map(reader.values, used, columns)), 1)
        names, y = reader.classes(label, order)
        encoding = Encoding(
            Column(lines.names[label], missing=gaps[label]),
            tuple(replace(c, missing=gaps[k]) for k, c in zip(used, columns, strict=True)),
            tuple(name for k, name in enumerate(lines.names) if k not in (*used, label)),
            self.columns is None if self.known is None else self.known.every, lines.header, form, rule, lines.left_out,
        )  # fmt: skip
        _once(encoding.names, lines)
        x, show = torch.from_numpy(values.astype(np.float32)), torch.from_numpy(values)
        return Labelled(x, torch.tensor(y), names, show, encoding.names, name, encoding)

    def places(self, lines: Lines) -> tuple[int, list[int]]:
        """Where the target is, and the columns to use."""
        if self.known:
            return _matched(lines, self.known, self.target)
        assert self.target is not None
        label = lines.column(self.target, "target")
        if self.columns is None:
            used = [k for k in range(len(lines.names)) if k != label]
        else:
            used = [lines.column(c, "columns") for c in self.columns]
        if not used or label in used or len(set(used)) < len(used):
            raise InputError(
                f"columns={self.columns!r} with target={self.target!r}; needed: one or more columns, each once, "
                "without the target."
            )
        for k in used:
            if not lines.names[k]:
                raise InputError(
                    f"{lines.file}: column {k} has no name (an index?). Name it{lines.on_top}, or say which columns "
                    "to use: columns=."
                )
        _once([lines.names[k] for k in used], lines)
        return label, used


def _named(given: object) -> dict[Which, frozenset[str]] | None:
    """Columns with words that are categories there, although elsewhere they stand for a missing value."""
    if not isinstance(given, Mapping):
        return {c: frozenset() for c in _several(given, "categorical") or ()}
    return {c: frozenset(map(str, _several(words, f"categorical[{c!r}]") or ())) for c, words in given.items()}


def _once(names: Sequence[str], lines: Lines) -> None:
    """Refuse two columns of one name."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(
            f"{lines.file} has two columns that would be called {twice[0]!r}; needed: different names. Rename one"
            f"{lines.on_top}, or leave it out with columns=."
        )


def _several(given: Any, option: str) -> list[Any] | None:
    """A list of columns or classes; one string is no list of its letters."""
    if isinstance(given, (str, bytes)):
        raise InputError(f"{option}={given!r} is one string; needed: a list, as in {option}=[{given!r}].")
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if given is not None and not isinstance(given, Sequence):
        raise InputError(f"{option} is a {type(given).__name__}; needed: a list.")
    return None if given is None else list(given)


def _encoding(like: object) -> Encoding:
    """How the training set was read."""
    if not isinstance(like, Labelled):
        raise InputError(
            f"like is a {type(like).__name__}; needed: the training set, as tangency.datasets.csv read it (or frame, "
            "or parquet)."
        )
    if like.encoding is None:
        raise InputError(
            f"like={like!r} was not read from a table; needed: what tangency.datasets.csv, frame or parquet returned."
        )
    x, rows = like.x, like.show
    both = isinstance(x, Tensor) and isinstance(rows, Tensor) and x.shape == rows.shape
    if not both or not torch.equal(x.detach().cpu(), rows.float()):  # type: ignore[union-attr]
        raise InputError(
            f"like={like!r} has another x than its file (with_x). Read this file like the set as it was read, then "
            "change both alike."
        )
    return like.encoding


def _matched(lines: Lines, known: Encoding, target: Which | None) -> tuple[int, list[int]]:
    """Where the training set's target and columns are in this file, by name."""
    needed = [known.target.name, *(c.name for c in known.columns)]
    lacking = [repr(name) for name in needed if name not in lines.names]
    more = [repr(name) for name in lines.names if name not in needed] if known.every else []
    if lacking or more:
        parts = [f"lacks {checks.some(lacking)}, which the training set has"] * bool(lacking)
        parts += [f"has {checks.some(more)}, which the training set lacks"] * bool(more)
        fix = "Name the columns alike" if lacking else "Take them out, or read the training set with columns="
        raise InputError(f"{lines.file} {' and '.join(parts)}; needed: the same columns, in any order. {fix}.")
    label = lines.column(known.target.name, "target")
    if target is not None and lines.column(target, "target") != label:
        raise InputError(f"target={target!r}, and the training set's is {known.target.name!r}; needed: the same.")
    return label, [lines.column(c.name, "like") for c in known.columns]


def _complete(
    lines: Lines, needed: Sequence[int], named: Mapping[int, Container[str]], rule: Missing
) -> tuple[Lines, dict[int, int]]:
    """The lines that lack no value of these columns, the target last, and how many values each column lacks.

    `named`: words of a column that are no missing values, such as a class that is called NA.
    """
    gaps: dict[int, int] = dict.fromkeys(needed, 0)
    lacking: dict[int, int] = {}
    for k in needed:
        for i, cell in enumerate(lines.cells(k)):
            if is_missing(cell) and cell not in named.get(k, ()):
                gaps[k] += 1
                lacking.setdefault(i, k)
    if lacking and rule == "refuse":
        i = min(lacking)
        k, cell = lacking[i], lines.rows[i][lacking[i]]
        many = f" Values are missing in {len(lacking)} {lines.kind}s." if len(lacking) > 1 else ""
        fix = "" if k == needed[-1] else ", or leave the column out with columns="
        if cell:
            way = "classes=" if k == needed[-1] else f"categorical={{{lines.names[k]!r}: [{cell!r}]}}"
            fix += f"; if {cell!r} is a {'class' if k == needed[-1] else 'category'}, name it: {way}"
        raise InputError(
            f"{lines.where(i, k)}: the value is missing ({cell!r}). Fill it in, or leave the {lines.kind} out "
            f"(missing='leave out' does it){fix}.{many}"
        )
    if len(lacking) == len(lines.rows):
        some = ", ".join(f"{lines.names[k]!r} {count}" for k, count in gaps.items() if count)
        raise InputError(
            f"{lines.file}: every {lines.kind} lacks a value ({some}); needed: at least one that is complete."
        )
    return lines.without(lacking), gaps


@dataclass(frozen=True)
class _Found:
    """What lines hold."""

    lines: Lines
    form: Form
    asked: bool  # whether this is a test set

    def learned(self, k: int, coded: bool) -> Column:
        """What a column holds: numbers if one of its cells is one, else words."""
        cells, name = self.lines.cells(k), self.lines.names[k]
        if not coded:
            if any(self.form.plain(cell) is not None for cell in cells):
                return Column(name)
            strange = oddity(cells, self.form)
            if strange:
                i, what, fix, many = strange
                raise InputError(
                    f"{self.lines.where(i, k)}: {cells[i]!r} looks like {what}, as {many} of the {len(cells)} cells of "
                    f"the column do. {fix}. If these are words, name the column in categorical=."
                )
            if len(set(cells)) > _MANY:
                raise InputError(
                    f"{self.lines.file}: column {name!r} has {len(set(cells))} different words, as text or identifiers "
                    "have. Leave it out with columns=, or name it in categorical=."
                )
        return Column(name, self._apart(k))

    def values(self, k: int, column: Column) -> np.ndarray:
        """The numbers of one column, [n, 1 or one for each word]."""
        cells, where = self.lines.cells(k), self.lines.where
        if column.words is not None:
            labels = [self.form.label(cell) for cell in cells]
            new = set(labels).difference(column.words)
            if new:
                i = next(i for i, label in enumerate(labels) if label in new)
                raise InputError(
                    f"{where(i, k)}: {cells[i]!r} is not in this column of the training set, which has "
                    f"{checks.some(shown(column.words), 10)}.{checks.suggest(cells[i], column.words)} Correct it, or "
                    f"leave the {self.lines.kind} out, or leave the column out of both sets."
                )
            return column.encoded(labels)
        numbers = [self.form.number(cell) for cell in cells]
        if None in numbers:
            i = numbers.index(None)
            others, strange = "those of the training set" if self.asked else "others of the column", odd(cells[i])
            advice = "Correct it, or empty it if it is missing"
            if strange:
                advice = f"It looks like {strange[0]}. {strange[1]}"
            words = "" if self.asked else ", or name the column in categorical="
            raise InputError(f"{where(i, k)}: {cells[i]!r} is no number, {others} are. {advice}{words}.")
        values = np.array(numbers, np.float64)
        with np.errstate(over="ignore"):
            wrong = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
        if len(wrong):
            raise InputError(f"{where(int(wrong[0]), k)}: {cells[wrong[0]]!r}; needed: finite numbers within float32.")
        self._told_apart(k, values)
        return values[:, None]

    def _told_apart(self, k: int, values: np.ndarray) -> None:
        """Warn where numbers become one in float32: whole ones, or ones whose distance counts in the column."""
        exact = np.unique(values)
        rounded = exact.astype(np.float32)
        gaps = np.where(rounded[1:] == rounded[:-1], np.diff(exact), 0)
        whole = bool((values == np.round(values)).all())
        if not gaps.any() or (not whole and gaps.max() <= _COUNTS * (exact[-1] - exact[0])):
            return
        i = int(gaps.argmax())
        cells = self.lines.cells(k)
        first, second = (cells[int(np.flatnonzero(values == v)[0])] for v in exact[i : i + 2])
        warnings.warn(
            f"{self.lines.file}: column {self.lines.names[k]!r} has different numbers that become one in x, which is "
            f"float32: {first} and {second} are both {float(rounded[i])!r} ({len(exact)} different numbers become "
            f"{len(set(rounded.tolist()))}). If it is a time, count from a later start; if these are names, put the "
            "column into categorical=; or leave it out with columns=.",
            TangencyWarning,
            stacklevel=5,
        )

    def classes(self, k: int, order: Sequence[Any] | None) -> tuple[tuple[str, ...], list[int]]:
        """The names of the classes and the class of each line."""
        if order is None:
            self._no_quantity(k)
            order = self._apart(k)
            if len(order) > _MANY:
                raise InputError(
                    f"{self.lines.file}: the target {self.lines.names[k]!r} has {len(order)} different values, as a "
                    "quantity has; needed: classes. If they are: classes=."
                )
        names = [str(c) for c in order]
        place, y = {name: i for i, name in enumerate(names)}, []
        for i, cell in enumerate(self.lines.cells(k)):
            number = place.get(cell, place.get(self.form.label(cell)))
            if number is None:
                which = "the training set's classes" if self.asked else "the classes"
                leave = f" Leave the {self.lines.kind} out, or read it like a set that has this class."
                fix = leave if self.asked else ""
                raise InputError(
                    f"{self.lines.where(i, k)}: {cell!r} is none of {which} {checks.some(shown(names), 10)}."
                    f"{checks.suggest(cell, names)}{fix}"
                )
            y.append(number)
        return tuple(names), y

    def _no_quantity(self, k: int) -> None:
        """Classes are words or whole numbers: others are refused, also those in another dress."""
        cells = self.lines.cells(k)
        numbers = [self.form.number(cell) for cell in cells]
        words = None in numbers  # once: a search in every round would make the work quadratic
        strange = oddity(cells, self.form) if words else None
        if strange:
            raise InputError(
                f"{self.lines.where(strange[0], k)}: the target {cells[strange[0]]!r} looks like {strange[1]}; needed: "
                "classes, which are words or whole numbers. If these are classes, name them: classes=."
            )
        for i, v in enumerate(numbers):
            if not words and (v is None or not v.is_integer()):
                raise InputError(
                    f"{self.lines.where(i, k)}: the target is {cells[i]}; needed: classes, which are words or whole "
                    "numbers."
                )

    def _apart(self, k: int) -> tuple[str, ...]:
        """The different words of a column, sorted, by value if all are numbers; refuses a number in two spellings."""
        seen: dict[Decimal | str, tuple[str, int]] = {}
        for i, cell in enumerate(self.lines.cells(k)):
            label, value = self.form.label(cell), self.form.value(cell)
            first, at = seen.setdefault(label if value is None else value, (label, i))
            if first != label:
                raise InputError(
                    f"{self.lines.where(i, k)}: {cell!r}, and {self.lines.rows[at][k]!r} in {self.lines.kind} "
                    f"{self.lines.lines[at]}, are one number. Write them alike if they mean the same; if not, give "
                    "them names that are words."
                )
        labels = [label for label, _ in seen.values()]
        numbers = {label: value for value, (label, _) in seen.items() if isinstance(value, Decimal)}
        return tuple(sorted(labels, key=numbers.__getitem__) if len(numbers) == len(labels) else sorted(labels))
