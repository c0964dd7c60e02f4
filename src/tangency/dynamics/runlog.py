"""A training's record on disk: a file of JSON lines, and beside it what later records are compared to.

The first line says what is watched and how. Then a line for each record, written whole and at once, so that a kill
leaves at most a torn last line, and a line at the end. `RUN.jsonl.start.pt` holds the first Gram matrix and the first
parameters, `RUN.jsonl.last.pt` the Gram of the last record: with them a resumed run measures from the true start.
"""

import errno
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from .._base import files, strict_json
from .._base.types import FilePath, Json
from ..errors import InputError
from .quantities import Start

FORMAT = 1
# Fields of the first line that decide the numbers: a log goes on only where these are the same.
DECIDE = ("architecture", "kernel", "probe", "targets", "loss", "record", "top", "functions")

Line = dict[str, Json]


@dataclass
class Recorded:
    """What a log holds: its first line, a line for each record, and whether the run said that it ended."""

    head: Line
    records: list[Line] = field(default_factory=list)
    ended: Line | None = None
    torn: int = 0  # bytes of a last line that was not finished

    @property
    def note(self) -> str:
        """What to say of a torn line; nothing where there is none."""
        return f"the last line was torn ({self.torn} bytes, as a kill leaves it) and is left out" if self.torn else ""


def read(path: Path) -> Recorded:
    """The lines of a log, without a torn last one."""
    try:
        data = files.read(path)
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror or e}. Give the log= of a Monitor.") from None
    whole = data[: data.rfind(b"\n") + 1]
    if data and not whole:
        raise InputError(f"{path} holds no whole line, as a kill at the start leaves it. Delete it: nothing is lost.")
    found: list[Line] = []
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise InputError(f"line {number} of {path} is no record; needed: the JSON lines that a Monitor writes.")
        found.append(line)
    if not found or found[0].get("tangency_run") is None:
        given = "is empty" if not data else "does not begin with the line of a run"
        raise InputError(f"{path} {given}; needed: a log that tg.dynamics.Monitor(log=…) has begun.")
    if found[0]["tangency_run"] != FORMAT:
        raise InputError(f"{path} is of format {found[0]['tangency_run']}; this version of tangency reads {FORMAT}.")
    records = [line for line in found[1:] if "step" in line]
    # A run that was resumed after its end has gone on.
    ended = found[-1] if "end" in found[-1] else None
    return Recorded(found[0], records, ended, len(data) - len(whole))


def differing(was: Mapping[str, Json], now: Mapping[str, Json]) -> dict[str, tuple[Json, Json]]:
    """Fields that decide the numbers and are not the same, those of the kernel by their own names."""
    found: dict[str, tuple[Json, Json]] = {}
    for name in DECIDE:
        a, b = was.get(name), now.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            keys = dict.fromkeys([*a, *b])
            found |= {f"{name}.{k}": (a.get(k), b.get(k)) for k in keys if a.get(k) != b.get(k)}
        elif a != b:
            found[name] = (a, b)
    return found


class RunLog:
    """A log that is written, begun or gone on with."""

    def __init__(self, path: FilePath, head: Mapping[str, Json], resume: bool) -> None:
        path = files.writable(path, "log")
        self.path, self.was = path, None
        self._first: Line | None = None  # the first line, until there is something to write after it
        there = path.exists() and path.stat().st_size > 0
        if there and not resume:
            raise InputError(
                f"{path} holds the record of a run already. Go on with it: resume=True; or give another log=."
            )
        if there:
            self.was = read(path)
            if fields := differing(self.was.head, strict_json.plain_dict(head)):
                lines = [f"  {name}: {_short(a)} in the log, {_short(b)} now" for name, (a, b) in fields.items()]
                raise InputError(
                    f"{path} is the log of another run; these differ:\n" + "\n".join(lines) + "\nGive what it was "
                    "begun with, or another log=."
                )
            self.run = str(self.was.head["run"])
            self.size = path.stat().st_size - self.was.torn
            if self.was.torn:
                os.truncate(path, self.size)
            return
        self.run, self.size = uuid.uuid4().hex, 0
        self._first = {"tangency_run": FORMAT, "run": self.run, **head}

    def write(self, line: Mapping[str, object]) -> None:
        """Add a line, by one call of the system, so that a kill cannot leave more than this one torn.

        Where the process lives on (an interrupt, a disk that is full), the line is there in whole or not at all.
        """
        self._begin()
        self._add(line)

    def _begin(self) -> None:
        """The first line, if it is not there: a run that recorded nothing leaves no file."""
        if self._first is not None:
            self._add(self._first)
            self._first = None

    def _add(self, line: Mapping[str, object]) -> None:
        data = f"{strict_json.text(line)}\n".encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0) as file:
                if file.tell() != self.size:
                    raise InputError(
                        f"{self.path} was changed since this run wrote it: by another process with the same log=? Stop "
                        "one of the two, and go on with resume=True, or give each its own log=."
                    )
                try:
                    if file.write(data) < len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except BaseException:
                    file.truncate(self.size)
                    if not self.size:
                        self.path.unlink()
                    raise
                self.size += len(data)
        except OSError as e:
            raise InputError(
                f"{self.path} cannot be written: {e.strerror or e}. Give a file where you may write."
            ) from None

    def save_start(self, start: Start) -> None:
        """Keep what later records are compared to."""
        self._begin()  # before: another run may have this log, with a start of its own
        self._save("start", {"run": self.run, "step": start.step, "gram": start.gram.cpu(), "theta": start.theta})

    def save_last(self, step: int, gram: Tensor) -> None:
        """Keep the Gram of the last record, from which the next velocity is measured."""
        self._save("last", {"run": self.run, "step": step, "gram": gram.cpu()})

    def load_start(self) -> Start:
        """What the first record was made of; refused where it is not there, or of another run."""
        found = self._load("start")
        if found is None:
            raise InputError(
                f"{self._beside('start')} is missing, or of another run: it holds the first kernel of {self.path}, "
                "without which changes since the start cannot be measured. Put it back, or give another log=."
            )
        return Start(int(found["step"]), found["gram"], found["theta"])

    def load_last(self) -> tuple[int, Tensor] | None:
        """The step and the Gram of the last record, where they were kept."""
        found = self._load("last")
        return None if found is None else (int(found["step"]), found["gram"])

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{what}.pt")

    def _save(self, what: str, value: object) -> None:
        """In whole or not at all."""
        files.write(self._beside(what), partial(torch.save, value))

    def _load(self, what: str) -> dict | None:
        """What was saved by this run, on the CPU."""
        try:
            found = torch.load(self._beside(what), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return None
        except (EOFError, OSError, RuntimeError, UnpicklingError) as e:
            raise InputError(
                f"{self._beside(what)} is damaged ({type(e).__name__}). Put it back whole, or give another log=."
            ) from None
        return found if isinstance(found, dict) and found.get("run") == self.run else None


def _short(value: object, most: int = 60) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 1] + "…"
