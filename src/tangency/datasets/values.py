"""Columns of values that have types (data frames, Parquet, Hugging Face) as the cells that a CSV file would have."""

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date, time
from decimal import Decimal

import numpy as np

from .._base import machine
from ..errors import InputError, MemoryBudgetError
from .cells import Form
from .lines import Lines
from .table import Wish

_MIDNIGHT = " 00:00:00"
# What a cell takes while it is read, in bytes: a Python string and its places in lists (heuristic).
_CELL = 100


def cell(value: object, form: Form) -> str | None:
    """A value as a CSV file has it, nothing where it is missing; None if there is no such cell.

    Numbers are written as shortly as their type can be read back, with the decimal sign that the form has.

    >>> [cell(v, Form()) for v in (0.5, np.float32(0.1), 3, True, " red ", None, float("nan"), [1])]
    ['0.5', '0.1', '3', 'True', 'red', '', '', None]
    """
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    if value is None or type(value).__name__ == "NAType":  # pandas' NA, which equals nothing, not even itself
        return ""
    if isinstance(value, (float, np.floating, Decimal, date, time, np.datetime64)):
        if value != value:  # not a number, or not a time
            return ""
        if isinstance(value, (float, np.floating, Decimal)):
            return str(value).replace(".", form.decimal)
        numpy = isinstance(value, np.datetime64)
        # NumPy writes a T, and as many digits of a second as its unit has.
        return re.sub(r"\.0+$|(\.\d*?)0+$", r"\1", str(value).replace("T", " ")) if numpy else str(value)
    return None


def cells(values: Iterable[object], form: Form, file: object, name: str) -> list[str]:
    """A column as cells; days without a time of day, if none has one."""
    found, dated = [], False
    for i, value in enumerate(values):
        text = cell(value, form)
        if text is None:
            raise InputError(
                f"{file}, row {i}, column {name!r} holds a {type(value).__name__}; needed: numbers, words, true or "
                "false, or dates. Make one or more columns of these of it, or leave it out with columns=."
            )
        found.append(text)
        dated = dated or isinstance(value, (date, np.datetime64))
    days = dated and all(text.endswith(_MIDNIGHT) for text in found if text)
    return [text.removesuffix(_MIDNIGHT) for text in found] if days else found


def check_room(rows: int, columns: int, file: object) -> None:
    """Refuse a table that does not fit into memory while it is read."""
    need, room = rows * columns * _CELL, machine.available_memory()
    if need > room:
        raise MemoryBudgetError(
            f"{file} has {rows:,} rows and {columns:,} columns: to read them takes about {need / 2**30:.3g} GiB, and "
            f"{room / 2**30:.3g} GiB are free. Give fewer rows or columns, or tensors: "
            "tg.datasets.Labelled(x, y, classes)."
        )


def as_lines(
    wish: Wish,
    file: object,
    names: Sequence[str],
    n: int,
    column: Callable[[int], Iterable[object]],
    header: bool = True,
) -> Lines:
    """The rows of a table; `column(k)` gives the values of column k and is asked for those alone that are used."""
    if not n:
        raise InputError(f"{file} has no rows; needed: at least one.")
    top = Lines(str(file), list(names), [], [], header, kind="row")
    label, used = wish.places(top)
    wanted, empty = {*used, label}, [""] * n
    check_room(n, len(wanted), file)
    columns = [cells(column(k), wish.form, file, name) if k in wanted else empty for k, name in enumerate(names)]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Lines(str(file), list(names), rows, list(range(n)), header, kind="row")
