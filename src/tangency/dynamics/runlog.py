"""A training's record on disk: a file of JSON lines, and beside it what later records are compared to.

The first line says what is watched and how. Then a line for each record, written whole and at once, so that a kill
leaves at most a torn last line, and a line at the end. `RUN.jsonl.start.pt` holds the first Gram matrix and the first
parameters, `RUN.jsonl.last.pt` the Gram of the last record: with them a resumed run measures from the true start. Both
end with a seal, their length and a digest, without which nothing of them is read.
"""

import errno
import hashlib
import json
import os
import stat
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO

import torch
from torch import Tensor

from .._base import files, strict_json
from .._base.types import FilePath, Json
from ..errors import InputError
from .quantities import Start

FORMAT = 1
# What ends a file beside a log: 8 bytes of length, 32 of digest, and this mark.
MARK = b"tangency"
SEAL = 8 + 32 + len(MARK)
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

    def load_start(self, most: int) -> Start:
        """What the first record was made of; refused where it is not there, or of another run."""
        found = self._load("start", most)
        if found is None:
            raise InputError(
                f"{self._beside('start')} is missing, or of another run: it holds the first kernel of {self.path}, "
                "without which changes since the start cannot be measured. Put it back, or give another log=."
            )
        return Start(int(found["step"]), found["gram"], found["theta"])

    def load_last(self, most: int) -> tuple[int, Tensor] | None:
        """The step and the Gram of the last record, where they were kept."""
        found = self._load("last", most)
        return None if found is None else (int(found["step"]), found["gram"])

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{what}.pt")

    def _save(self, what: str, value: object) -> None:
        """In whole or not at all."""
        files.write(self._beside(what), partial(_sealed, value, what))

    def _load(self, what: str, most: int) -> dict | None:
        """What was saved by this run, on the CPU; a file of more than `most` bytes is not read."""
        try:
            found = torch.load(_unsealed(self._beside(what), what, most), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return None
        except (_Damaged, EOFError, OSError, RuntimeError, UnpicklingError, ValueError, KeyError) as e:
            why = str(e) if isinstance(e, _Damaged) else getattr(e, "strerror", None) or type(e).__name__
            raise InputError(
                f"{self._beside(what)} is damaged ({why}). Put it back whole, or give another log=."
            ) from None
        return found if isinstance(found, dict) and found.get("run") == self.run else None


class _Damaged(Exception):
    """What a file beside a log has that was not written there."""


class _Hashed:
    """A file that is written from its beginning to its end, its bytes counted and hashed on the way."""

    def __init__(self, file: BinaryIO, what: str) -> None:
        self.file, self.size, self.digest = file, 0, _digest(what)

    def write(self, data: bytes | memoryview) -> int:
        """Add some bytes."""
        part = memoryview(data).cast("B")
        self.size += len(part)
        self.digest.update(part)
        self.file.write(part)
        return len(part)

    def flush(self) -> None:
        """To the disk."""
        self.file.flush()


def _digest(what: str) -> hashlib.blake2b:
    """Keyed by what the file holds: one in the place of the other is told."""
    return hashlib.blake2b(key=f"tangency run {what}".encode(), digest_size=32)


def _sealed(value: object, what: str, file: BinaryIO) -> None:
    """Write a value and its seal: how many bytes it takes, their digest, and a mark."""
    hashed = _Hashed(file, what)
    torch.save(value, hashed)  # type: ignore[arg-type]  # it needs these two methods alone
    file.write(hashed.size.to_bytes(8, "little") + hashed.digest.digest() + MARK)


def _unsealed(file: Path, what: str, most: int) -> BytesIO:
    """The value's bytes, if they are those that were written; told by kind and size before anything is read."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as f:  # a FIFO would wait for a writer
        there = os.fstat(f.fileno())
        if not stat.S_ISREG(there.st_mode):
            raise _Damaged("it is no file")
        if there.st_size > most:
            raise _Damaged(f"it has {there.st_size:,} bytes, and a record of this run takes at most {most:,}")
        data = memoryview(f.read())
    body, seal = data[:-SEAL], bytes(data[-SEAL:])
    if len(seal) < SEAL or not seal.endswith(MARK):
        raise _Damaged("it does not end with a seal: it was cut off, or an earlier version wrote it")
    if int.from_bytes(seal[:8], "little") != len(body):
        raise _Damaged(f"it has {len(body):,} bytes of {int.from_bytes(seal[:8], 'little'):,}")
    digest = _digest(what)
    digest.update(body)
    if digest.digest() != seal[8:40]:
        raise _Damaged("its bytes are not those that were written")
    return BytesIO(body)


def _short(value: object, most: int = 60) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 1] + "…"
