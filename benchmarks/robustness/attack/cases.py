"""What all parts share: cases, the state of a folder, work in a process of its own, all that writes files."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

import tangency as tg
from tangency import watch
from tangency.active import Campaign
from tangency.commands.options import write_rows
from tangency.dynamics.runlog import RunLog
from tangency.experiments.table import Kept, Options

FAULTS = ("lost", "half", "left", "raw", "wrong", "shown", "hang")
# Seconds after which a process counts as hanging.
LIMIT = 120
# What a terminal obeys: control characters but for the end of a line and a tab, and marks of direction.
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Case:
    """One attack, and what came of it."""

    kind: str
    name: str
    outcome: str
    said: str = ""


def state(folder: Path) -> dict[str, object]:
    """All that is below a folder: contents and modes of files, what links name, kinds of all else."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        info = path.lstat()
        what: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "no file"
        found[str(path.relative_to(folder))] = (info.st_mode, what)
    return found


def forked(work: Callable[[], int], said: Path) -> int:
    """Do the work in a process of its own, which writes to a file what it says; its exit code, or less than 0: the
    signal it died of (SIGALRM: it hung)."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            torch.set_num_threads(1)  # a fork of a process whose OpenMP threads have run waits for them for ever
            signal.alarm(LIMIT)
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            code = work()
            os._exit(code)
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_after(seconds: float, works: Sequence[Callable[[], object]]) -> int:
    """Do these again and again in a process of its own, and kill it."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            torch.set_num_threads(1)
            for work in cycle(works):
                work()
        os._exit(99)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


Writer = tuple[Path, list[Callable[[], object]]]


def writers(folder: Path) -> dict[str, Writer]:
    """Everything that writes a file the user may have already: where, and two ways that write two contents."""
    monitor = tg.dynamics.Monitor(tg.trace_ntk(tg.models.mlp([3, 8, 1])), torch.eye(3))
    monitor(0)
    history = monitor.history()
    campaigns = [Campaign(torch.eye(99), ["cat", "dog"]) for _ in range(2)]
    campaigns[1].tell(range(40), torch.arange(40) % 2)
    log = RunLog(folder / "run.jsonl", {}, resume=False)
    kept = Kept(Options(out=folder), "table", {"a": 1})
    rows: list[list[dict[str, Any]]] = [[{"sample": k, "label": f"label {k + j}"} for k in range(2000)] for j in (0, 1)]
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data = tg.datasets.Labelled(x, torch.arange(60) % 3, ("a", "b", "c"))
    audits = [_audit(data, seed) for seed in (1, 2)]
    made: dict[str, tuple[str, list[Callable[[], object]]]] = {
        "page": ("report.html", [partial(tg.report.write, a, folder / "report.html") for a in audits]),
        "watched page": (
            "run.html",
            [partial(watch.write_page, history, folder / "run.html", refresh=r) for r in (None, 5.0)],
        ),
        "labels as CSV": ("l.csv", [partial(write_rows, r, folder / "l.csv") for r in rows]),
        "labels as JSON": ("l.json", [partial(write_rows, r, folder / "l.json") for r in rows]),
        "campaign": ("c.json", [partial(c.save, folder / "c.json") for c in campaigns]),
        "beside a log": ("run.jsonl.last.pt", [partial(log.save_last, k, torch.eye(90)) for k in (0, 1)]),
        "record": ("table.json", [partial(kept.__setitem__, "row", {"a": ["t" * 99] * 99, "b": k}) for k in (0, 1)]),
    }
    return {kind: (folder / name, works) for kind, (name, works) in made.items()}


def _audit(data: tg.datasets.Labelled, seed: int) -> Any:
    """An audit of a network that was not trained."""
    net = tg.models.initialized(lambda: tg.models.mlp([3, 8, 3]), seed=seed)
    return tg.audit(net, data, kernel="CK", progress=False)
