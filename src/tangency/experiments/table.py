"""What an experiment is and what it returns: a table, ours beside the published one, with how it was made."""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..errors import InputError

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What `tangency reproduce` was given."""

    data: Path | None = None  # the folder with the official files
    out: Path | None = None  # what is finished is kept there, and not computed again
    quick: bool = False  # small, on bundled data: shows that it runs, not what it finds
    seeds: int = 3
    kernels: tuple[str, ...] = ()
    progress: bool = True

    def folder(self, what: str) -> Path:
        if self.data is None:
            raise InputError(
                f"{what} is needed: give the folder that holds it with --data, or try it on bundled data with --quick."
            )
        return self.data

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Table:
    """Rows of ours beside what was published (None where it was not)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    facts: Row = field(default_factory=dict)

    def text(self) -> str:
        cells = [list(self.columns), *([_cell(row.get(c)) for c in self.columns] for row in self.rows)]
        widths = [max(len(line[k]) for line in cells) for k in range(len(self.columns))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([self.title, "", lines[0], "-" * len(lines[0]), *lines[1:], "", *self.notes])

    def record(self) -> Row:
        """For JSON: rows, notes and the environment."""
        return {"title": self.title, "rows": list(self.rows), "notes": list(self.notes), **self.facts, **environment()}


@dataclass(frozen=True)
class Experiment:
    """`run(options)` gives the table; `needs` says which files it reads."""

    name: str
    title: str
    needs: str
    run: Callable[[Options], Table]


def environment() -> Row:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": where,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tangency": __version__,
        "threads": torch.get_num_threads(),
    }


def mean(values: Sequence[float]) -> str:
    """0.708(3): the mean with the standard error of its last digit, as published tables have it."""
    v = torch.tensor(list(values), dtype=torch.float64)
    if len(v) < 2:
        return f"{float(v.mean()):.3f}"
    error = float(v.std() / len(v) ** 0.5)
    if error != error:
        return "nan"
    digits = 3
    while digits > 0 and round(error * 10**digits) > 9:
        digits -= 1
    return f"{float(v.mean()):.{digits}f}({round(error * 10**digits)})"


class Kept:
    """Rows that are finished, in a file: an experiment that was stopped goes on with the next."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self.path = None if folder is None else folder / f"{name}.json"
        self.rows: dict[str, Row] = {}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.rows = json.loads(self.path.read_text())

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def __getitem__(self, key: str) -> Row:
        return self.rows[key]

    def __setitem__(self, key: str, row: Row) -> None:
        self.rows[key] = row
        if self.path is not None:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.rows, indent=1) + "\n")
            new.replace(self.path)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
