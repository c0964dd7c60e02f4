"""What an experiment is and what it returns: a table, ours beside the published one, with how it was made."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    """What is finished, in --out: an experiment that was stopped goes on with the next row, and the same network.

    `spec` says what decides the rows; a folder that was begun with another is refused.
    """

    def __init__(self, options: Options, name: str, spec: Mapping[str, Any]) -> None:
        self.options, self.name = options, f"{name}-quick" if options.quick else name
        self.spec = {key: repr(value) for key, value in spec.items()}
        self.rows: dict[str, Row] = {}
        self.path = None if options.out is None else options.out / f"{self.name}.json"
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._read(self.path)
            else:
                self._write()

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            was, self.rows = found["spec"], found["rows"]
        except (ValueError, KeyError, TypeError) as e:
            raise InputError(f"{path} is no record of this experiment. Give another --out, or remove it.") from e
        differ = [k for k in {**was, **self.spec} if was.get(k) != self.spec.get(k)]
        other = [f"{k} is {was.get(k)} there, {self.spec.get(k)} now" for k in differ]
        if other:
            raise InputError(f"{path} was begun in another way; these differ: {'; '.join(other)}. Give another --out.")

    def network(self, model: nn.Module, train: Callable[[nn.Module], object]) -> nn.Module:
        """The model as it was trained when the folder was begun; trained now if there is none."""
        path = None if self.path is None else self.path.with_suffix(".pt")
        if path is not None and path.exists():
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            return model.to(self.options.device).eval()
        train(model.to(self.options.device))
        if path is not None:
            torch.save(model.state_dict(), path)
        return model

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def __getitem__(self, key: str) -> Row:
        return self.rows[key]

    def __setitem__(self, key: str, row: Row) -> None:
        self.rows[key] = row
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps({"spec": self.spec, "rows": self.rows}, indent=1) + "\n")
            new.replace(self.path)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
