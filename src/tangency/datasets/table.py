"""Tables of numbers and categories from text files."""

import io
from collections.abc import Sequence
from csv import Error, reader
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np
import torch

from .. import _check
from ..errors import InputError
from .files import Named, path, read
from .labelled import Labelled

Column = str | int
_DELIMITERS = {",": "','", ";": "';'", "\t": "'\\t'", "|": "'|'"}
_MISSING = {"", "?", "nan", "na", "n/a", "null"}
# A category or class column with more different values is rather text, an identifier or a quantity (heuristic).
_MANY = 1000


def csv(
    file: Named,
    target: Column,
    *,
    columns: Sequence[Column] | None = None,
    categorical: Sequence[Column] = (),
    delimiter: str | None = None,
    header: bool | None = None,
    classes: Sequence[str] | None = None,
) -> Labelled:
    """The lines of a CSV file (UTF-8, gzipped or not) as samples: x [n, d] in float32, the class from column `target`.

    A column of words is encoded as one 0/1 column for each of them, named "colour=red" in `columns` of the result, and
    so are the `categorical` ones, whatever they hold. `show` is the same in float64. Nothing is scaled or filled in.
    `target`, `columns` (which to use; default: all others): by name, or by number from 0 or from the end.
    `header`: whether line 1 holds the names; known if `target` is a name. `delimiter`: found in line 1, if clear.
    `classes`: the values of the target in the order wanted (to share it between files); default: sorted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "fruit.csv"
    ...     _ = file.write_text("weight,colour,kind\\n120,red,apple\\n9.5,red,cherry\\n130,green,apple\\n")
    ...     data = csv(file, "kind")
    >>> data.columns, data.x.tolist()
    (('weight', 'colour=green', 'colour=red'), [[120.0, 0.0, 1.0], [9.5, 0.0, 1.0], [130.0, 1.0, 0.0]])
    >>> data.classes, data.y.tolist()
    (('apple', 'cherry'), [0, 1, 0])
    """
    table = _table(path(file, "file"), delimiter, _header(header, target))
    label = table.column(target, "target")
    if columns is None:
        used = [k for k in range(len(table.names)) if k != label]
    else:
        used = [table.column(c, "columns") for c in columns]
    if not used or label in used or len(set(used)) < len(used):
        raise InputError(
            f"columns={columns!r} with target={target!r}; needed: one or more columns, each once, without the target."
        )
    words = {table.column(c, "categorical") for c in categorical}
    if not words <= set(used):
        raise InputError(f"categorical={categorical!r}; needed: some of the columns that are used.")
    found = [_encoded(table, k) if k in words else _feature(table, k) for k in used]
    values = np.concatenate([v for _, v in found], 1)
    names = tuple(name for several, _ in found for name in several)
    order, y = _classes(table, label, classes)
    x, show = torch.from_numpy(values.astype(np.float32)), torch.from_numpy(values)
    return Labelled(x, torch.tensor(y), order, show=show, columns=names, name=table.file.stem)


def fields(file: Named, *, delimiter: str | None = None, header: bool = True) -> tuple[list[str], list[list[str]]]:
    """(the names of the columns, the cells of every line) of a CSV file as text, nothing encoded.

    For tables that `csv` does not take as they are, such as those with missing values. Without a header the names are
    the columns' numbers. `delimiter`: found in line 1, if clear.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "fruit.csv"
    ...     _ = file.write_text("120,red,apple\\n?,red,cherry\\n")
    ...     fields(file, header=False)
    (['0', '1', '2'], [['120', 'red', 'apple'], ['?', 'red', 'cherry']])
    """
    table = _table(path(file, "file"), delimiter, header)
    return table.names, table.rows


def is_missing(cell: str) -> bool:
    """Whether a cell stands for no value: empty, ?, nan, na, n/a or null.

    >>> is_missing("?"), is_missing("NA"), is_missing("0")
    (True, True, False)
    """
    return cell.lower() in _MISSING


def number(cell: str) -> float | None:
    """The number in a cell; None if it holds a word (as which 1_000 counts).

    >>> number(".5"), number("1_000"), number("red")
    (0.5, None, None)
    """
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


@dataclass(frozen=True)
class _Table:
    file: Path
    names: list[str]
    rows: list[list[str]]
    lines: list[int]  # where in the file each row ends

    def column(self, given: Column, option: str) -> int:
        """The number of a column that was given by name or number."""
        if isinstance(given, str):
            if self.names.count(given) == 1:
                return self.names.index(given)
            if given in self.names:
                raise InputError(f"{self.file} has several columns {given!r}; needed: different names in line 1.")
            raise InputError(
                f"{option}: {self.file} has no column {given!r}.{_check.suggest(given, self.names)} Its columns are "
                f"{_check.some(self.names, 10)}. If line 1 holds data, give the target by number, with header=False."
            )
        if isinstance(given, bool) or not isinstance(given, int):
            raise InputError(f"{option}: {given!r} is no column; needed: a name, or a number from 0 or from the end.")
        if not -len(self.names) <= given < len(self.names):
            raise InputError(f"{option}: there is no column {given}; {self.file} has {len(self.names)} columns.")
        return given % len(self.names)

    def cells(self, k: int) -> list[str]:
        """A column that is used: it has a name, and nothing is missing."""
        if not self.names[k]:
            raise InputError(
                f"{self.file}: column {k} has no name (an index?). Name it in line 1, or say which columns to use: "
                "columns=."
            )
        cells = [row[k] for row in self.rows]
        for i, cell in enumerate(cells):
            if is_missing(cell):
                raise InputError(
                    f"{self.where(i, k)}: the value is missing ({cell!r}). Fill it in, leave the line out, or leave "
                    "the column out with columns=."
                )
        return cells

    def where(self, i: int, k: int) -> str:
        return f"{self.file}, line {self.lines[i]}, column {self.names[k]!r}"


def _header(header: bool | None, target: Column) -> bool:
    if header not in (None, True, False):
        raise InputError(f"header={header!r}; needed: True, False or None.")
    if header is None and not isinstance(target, str):
        raise InputError(
            f"target={target!r} does not tell whether line 1 holds the names of the columns. Say so: header=True or "
            "header=False."
        )
    return header is not False


def _table(file: Path, delimiter: str | None, header: bool) -> _Table:
    """The fields of every line, as many in each as in the first."""
    try:
        text = read(file, "a CSV file").decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(
            f"{file} is not UTF-8 (byte {e.start}: {e.reason}); needed: text in UTF-8. Convert it."
        ) from None
    by = _delimiter(file, text, delimiter)
    rows, lines = [], []
    parsed = reader(io.StringIO(text, newline=""), delimiter=by, strict=True, skipinitialspace=True)
    try:
        for row in parsed:
            fields = [field.strip() for field in row]
            if fields not in ([], [""]):  # not a blank line
                rows.append(fields)
                lines.append(parsed.line_num)
    except Error as e:
        raise InputError(f"{file}, line {parsed.line_num}: {e}; needed: CSV.") from None
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(rows[0]):
            raise InputError(
                f"{file}, line {line} has {len(row)} fields; line {lines[0]} has {len(rows[0])}. Needed: as many."
            )
    if len(rows) <= header:
        raise InputError(f"{file} has no line of data; needed: at least one.")
    names = rows[0] if header else [str(k) for k in range(len(rows[0]))]
    return _Table(file, names, rows[header:], lines[header:])


def _delimiter(file: Path, text: str, given: str | None) -> str:
    if given is not None:
        if not isinstance(given, str) or len(given) != 1 or given in '"\r\n':
            raise InputError(f"delimiter={given!r}; needed: one character, such as ',', ';' or '\\t'.")
        return given
    first = text.strip().partition("\n")[0]
    if not first:
        raise InputError(f"{file} is empty; needed: a CSV file.")
    found = [d for d in _DELIMITERS if any(len(row) > 1 for row in reader([first], delimiter=d))]
    if len(found) != 1:
        by = " or ".join(_DELIMITERS[d] for d in found)
        problem = f"could be divided by {by}" if found else f"is divided by none of {' '.join(_DELIMITERS.values())}"
        raise InputError(f"line 1 of {file} {problem}. Say which: delimiter=.")
    return found[0]


def _feature(table: _Table, k: int) -> tuple[list[str], np.ndarray]:
    """A column of numbers as it is, one of words encoded."""
    cells = table.cells(k)
    numbers = [number(cell) for cell in cells]
    if all(v is None for v in numbers):
        if len(set(cells)) > _MANY:
            raise InputError(
                f"{table.file}: column {table.names[k]!r} has {len(set(cells))} different words, as text or "
                "identifiers have. Leave it out with columns=, or name it in categorical=."
            )
        if all(number(cell.replace(",", ".")) is not None for cell in cells):
            raise InputError(f"{table.where(0, k)}: {cells[0]!r}; needed: a point in numbers, not a comma.")
        return _encoded(table, k)
    if None in numbers:
        i = numbers.index(None)
        raise InputError(
            f"{table.where(i, k)}: {cells[i]!r} is no number, others of the column are. Correct it, or name the column "
            "in categorical=."
        )
    values = np.array(numbers, np.float64)
    with np.errstate(over="ignore"):
        wrong = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
    if len(wrong):
        raise InputError(
            f"{table.where(int(wrong[0]), k)}: {cells[wrong[0]]!r}; needed: finite numbers within float32."
        )
    return [table.names[k]], values[:, None]


def _encoded(table: _Table, k: int) -> tuple[list[str], np.ndarray]:
    cells = table.cells(k)
    words = sorted(set(cells))
    place = {word: j for j, word in enumerate(words)}
    values = np.zeros((len(cells), len(words)))
    values[range(len(cells)), [place[cell] for cell in cells]] = 1
    return [f"{table.names[k]}={word}" for word in words], values


def _classes(table: _Table, k: int, given: Sequence[str] | None) -> tuple[tuple[str, ...], list[int]]:
    """The names of the classes and the class of each row."""
    cells = table.cells(k)
    numbers = [number(cell) for cell in cells]
    if None in numbers:
        order = sorted(set(cells))
    else:
        for i, v in enumerate(numbers):
            if v is None or not v.is_integer():
                raise InputError(
                    f"{table.where(i, k)}: the target is {cells[i]}; needed: classes, which are words or whole numbers."
                )
        cells = [str(int(Decimal(cell))) for cell in cells]  # 1.0 and 1 are one class, and long numbers stay apart
        order = sorted(set(cells), key=int)
    if given is not None:
        order = [str(c) for c in given]
        for i, cell in enumerate(cells):
            if cell not in order:
                raise InputError(
                    f"{table.where(i, k)}: {cell!r} is none of classes={order}.{_check.suggest(cell, order)}"
                )
    elif len(order) > _MANY:
        raise InputError(
            f"{table.file}: the target {table.names[k]!r} has {len(order)} different values, as a quantity has; "
            "needed: classes. If they are: classes=."
        )
    place = {c: i for i, c in enumerate(order)}
    return tuple(order), [place[cell] for cell in cells]
