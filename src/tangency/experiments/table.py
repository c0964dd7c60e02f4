"""What an experiment is and what it returns: a table, ours beside the published one, with how it was made."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .._base import strict_json
from .._base.files import writable, write
from .._base.fingerprint import digest
from .._base.results import Result, environment, text_table
from ..errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]  # numbers, text, and rows within rows, as they come from a record


@dataclass(frozen=True)
class Regression:
    """What `tangency reproduce cntk` was given beside: which kernel, and of how many images."""

    network: str = "cntk"
    samples: int | None = None  # training images
    test: int | None = None
    flips: bool = False  # every training image mirrored, too
    whiten: bool = False
    dtype: Literal["float32", "float64"] = "float32"
    store: Path | None = None  # where the Grams are kept


@dataclass(frozen=True)
class Trainings:
    """What `tangency reproduce eigenfunctions`, `energy-table1` and `anisotropy` were given beside."""

    networks: tuple[str, ...] = ()  # some of mlp, lenet, resnet18, narrow
    sets: tuple[str, ...] = ()  # some of mnist, cifar10
    indices: tuple[int, ...] = ()  # which eigenfunctions or directions are learned
    epochs: int | None = None
    samples: int | None = None  # to train on
    test: int | None = None


@dataclass(frozen=True)
class Options:
    """What `tangency reproduce` was given."""

    data: Path | None = None  # the folder with the official files
    out: Path | None = None  # what is finished is kept there, and not computed again
    quick: bool = False  # small, on bundled data: shows that it runs, not what it finds
    seeds: int = 3
    kernels: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()  # some of the rows
    progress: bool = True
    where: str | None = None  # the device that was asked for
    regression: Regression = field(default_factory=Regression)
    learned: Trainings = field(default_factory=Trainings)

    def folder(self, what: str) -> Path:
        """The folder with the official files; `what` names them where it is missing."""
        if self.data is None:
            raise InputError(
                f"{what} is needed: give the folder that holds it with --data, or try it on bundled data with --quick."
            )
        return self.data

    @property
    def device(self) -> str:
        """What was asked for; else a GPU where there is one."""
        if self.where is not None:
            return self.where
        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, repr=False)
class Table(Result):
    """Rows of ours beside what was published (None where it was not)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    facts: Row = field(default_factory=dict)

    def table(self) -> str:
        """The table as it is printed: title, columns, rows, notes."""
        head, *lines = text_table(self.columns, [[_cell(row.get(c)) for c in self.columns] for row in self.rows]).split(
            "\n"
        )
        return "\n".join([self.title, "", head, "-" * len(head), *lines, "", *self.notes])

    def to_dict(self) -> Row:
        """For JSON: rows, notes and the environment."""
        return {
            "title": self.title,
            "rows": list(self.rows),
            "notes": list(self.notes),
            **self.facts,
            **run_environment(),
        }


def run_environment() -> Row:
    """The versions and the machine that the rows were made with."""
    known = environment()
    return {
        "device": known["gpu"] or platform.processor() or known["machine"],
        **{library: known[library] for library in ("torch", "python", "tangency")},
        "threads": torch.get_num_threads(),
    }


def picture(figure: "Figure", to: Path) -> None:
    """Keep a picture as a file."""
    write(to, partial(figure.savefig, format="png", dpi=110))


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

    `spec` says what decides the rows; a folder that was begun with another is refused, and so is one whose network is
    gone, damaged or another than the one that the rows were measured on. Rows hold text and numbers; the file has null
    for what is no number.
    """

    def __init__(self, options: Options, name: str, spec: Mapping[str, object]) -> None:
        self.options, self.name = options, f"{name}-quick" if options.quick else name
        self.spec = {key: repr(value) for key, value in spec.items()}
        self.rows: dict[str, Row] = {}
        self.made: str | None = None  # a hash of the network's weights
        self.path = None if options.out is None else options.out / f"{self.name}.json"
        if self.path is not None:
            writable(self.path, "--out")
            if self.path.exists():
                self._read(self.path)

    def _read(self, path: Path) -> None:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            was, self.rows = dict(record["spec"]), {key: _numbers(row) for key, row in dict(record["rows"]).items()}
            self.made = record.get("network")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise InputError(f"{path} is no record of this experiment. Give another --out, or remove it.") from e
        differ = [k for k in {**was, **self.spec} if was.get(k) != self.spec.get(k)]
        other = [f"{k} is {was.get(k)} there, {self.spec.get(k)} now" for k in differ]
        if other:
            raise InputError(f"{path} was begun in another way; these differ: {'; '.join(other)}. Give another --out.")

    def network(self, model: nn.Module, train: Callable[[nn.Module], object]) -> nn.Module:
        """The model as it was trained when the folder was begun; trained now if there is none."""
        path = None if self.path is None else self.path.with_suffix(".pt")
        if path is not None and path.exists():
            self._load(model, path)
            return model.to(self.options.device).eval()
        if path is not None and self.rows:
            raise InputError(
                f"{path}, the network on which the rows in {self.path} were measured, is gone. Give another --out, or "
                f"remove {self.path} too: then all is done anew."
            )
        train(model.to(self.options.device))
        if path is not None:
            # The record first: by it a network is known to be this folder's, whenever this process is killed.
            self.made = digest(model.state_dict())
            self._write()
            write(path, partial(torch.save, model.state_dict()))
        return model

    def _load(self, model: nn.Module, path: Path) -> None:
        """The network that was trained before. A file that was cut short, or is none, can be anything."""
        again = f"Give another --out, or remove it and {self.path}: then all is done anew."
        try:
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except OSError:
            raise
        except Exception as e:
            why = str(e).partition("\n")[0]
            raise InputError(
                f"{path} cannot be read as the trained network ({type(e).__name__}: {why}); was it cut short? {again}"
            ) from e
        if self.made is not None and digest(model.state_dict()) != self.made:
            raise InputError(f"{path} is another network than the one that the rows were measured on. {again}")

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def __getitem__(self, key: str) -> Row:
        return self.rows[key]

    def __setitem__(self, key: str, row: Row) -> None:
        self.rows[key] = row
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            record = {"spec": self.spec, "network": self.made, "rows": self.rows}
            write(self.path, strict_json.text(record, 1) + "\n")


def _numbers(row: Any) -> Any:
    """A row as it was before it was written: what is null there was no number."""
    if isinstance(row, dict):
        return {key: _numbers(v) for key, v in row.items()}
    if isinstance(row, list):
        return [_numbers(v) for v in row]
    return float("nan") if row is None else row


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
