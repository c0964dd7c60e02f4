"""The lines of a CSV file, or the rows of another table, as cells, as many in each, and where they stand."""

import io
import re
from collections.abc import Container
from csv import Error, reader
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from .._base import checks
from ..errors import InputError
from .cells import shown
from .files import read_bytes

Which = str | int
_DELIMITERS = {",": "','", ";": "';'", "\t": "'\\t'", "|": "'|'"}


@dataclass(frozen=True)
class Lines:
    """The lines of a CSV file, cut into cells, and where each of them stands in the file; or rows of another table."""

    file: Path | str
    names: list[str]
    rows: list[list[str]]
    lines: list[int]  # where in the file each row ends
    header: bool
    left_out: int = 0
    kind: Literal["line", "row"] = "line"

    @property
    def on_top(self) -> str:
        """Where the names of columns stand, for messages; a table that is no text has them nowhere."""
        return " in line 1" if self.kind == "line" else ""

    def column(self, given: Which, option: str) -> int:
        """The number of a column that was given by name or number."""
        if isinstance(given, str):
            if self.names.count(given) == 1:
                return self.names.index(given)
            if given in self.names:
                raise InputError(f"{self.file} has several columns {given!r}; needed: different names{self.on_top}.")
            raise InputError(
                f"{option}: {self.file} has no column {given!r}.{checks.suggest(given, self.names)} Its columns are "
                f"{checks.some(shown(self.names), 10)}."
                + " If line 1 holds data, give the target by number, with header=False."
                * (self.kind == "line")
            )
        if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
            raise InputError(f"{option}: {given!r} is no column; needed: a name, or a number from 0 or from the end.")
        if not -len(self.names) <= given < len(self.names):
            raise InputError(f"{option}: there is no column {given}; {self.file} has {len(self.names)} columns.")
        return int(given) % len(self.names)

    def cells(self, k: int) -> list[str]:
        """Column k, from top to bottom."""
        return [row[k] for row in self.rows]

    def without(self, numbers: Container[int]) -> "Lines":
        """Without the lines of these numbers."""
        kept = [i for i in range(len(self.rows)) if i not in numbers]
        rows, lines = [self.rows[i] for i in kept], [self.lines[i] for i in kept]
        return replace(self, rows=rows, lines=lines, left_out=len(self.rows) - len(kept))

    def where(self, i: int, k: int) -> str:
        """The place of a cell, for messages: file, line (from 1; rows from 0) and column."""
        return f"{self.file}, {self.kind} {self.lines[i]}, column {self.names[k]!r}"


def read_lines(file: Path, delimiter: str | None, header: bool) -> Lines:
    """The cells of every line that is not blank, as many in each as in the first."""
    try:
        text = read_bytes(file, "a CSV file").decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(
            f"{file} is not UTF-8 (byte {e.start}: {e.reason}); needed: text in UTF-8. Convert it."
        ) from None
    if said := re.match(r"sep=([^\r\n\"])(?=[\r\n])", text):  # so Excel is told the delimiter, in a line of its own
        if delimiter not in (None, said[1]):
            raise InputError(f"line 1 of {file} says {said[0]}, and delimiter={delimiter!r}; needed: the same.")
        text, delimiter = text[said.end() :], said[1]  # a blank line stays, so lines keep their numbers
    by = _delimiter(file, text, delimiter)
    rows, lines = _parsed(file, text, by)
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(rows[0]):
            raise InputError(
                f"{file}, line {line} has {len(row)} fields; line {lines[0]} has {len(rows[0])}. Needed: as many. A "
                f"value with {_DELIMITERS.get(by, repr(by))} in it needs quotes."
            )
    if len(rows) <= header:
        only = (
            " Its one line is taken for the names of the columns: if it holds data, write the names above it."
            if rows
            else ""
        )
        raise InputError(f"{file} has no line of data; needed: at least one.{only}")
    names = rows[0] if header else [str(k) for k in range(len(rows[0]))]
    return Lines(file, names, rows[header:], lines[header:], header)


def _parsed(file: Path, text: str, delimiter: str, strict: bool = True) -> tuple[list[list[str]], list[int]]:
    """(cells, where it ends) of every line that is not blank; lines end with LF, CR LF or CR."""
    rows, lines = [], []
    parsed = reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=strict, skipinitialspace=True)
    try:
        for row in parsed:
            cells = [cell.strip() for cell in row]
            if cells not in ([], [""]):
                rows.append(cells)
                lines.append(parsed.line_num)
    except Error as e:
        raise InputError(f"{file}, line {parsed.line_num}: {e}; needed: CSV.") from None
    return rows, lines


def _delimiter(file: Path, text: str, given: str | None) -> str:
    if given is not None:
        if not isinstance(given, str) or len(given) != 1 or given in '"\r\n':
            raise InputError(f"delimiter={given!r}; needed: one character, such as ',', ';' or '\\t'.")
        return given
    first = next(io.StringIO(text.strip(), newline=""), "")
    if not first:
        raise InputError(f"{file} is empty; needed: a CSV file.")
    possible = [d for d in _DELIMITERS if any(len(row) > 1 for row in _parsed(file, first, d, strict=False)[0])]
    if len(possible) != 1:
        by = " or ".join(_DELIMITERS[d] for d in possible)
        problem = f"could be divided by {by}" if possible else f"is divided by none of {' '.join(_DELIMITERS.values())}"
        raise InputError(f"line 1 of {file} {problem}. Say which: delimiter=.")
    return possible[0]
