"""Command lines drawn at random, with hostile names, places and files: nothing lost, nothing left, nothing raw."""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from random import Random

import tangency as tg
from tangency.cli import main

from .cases import OBEYED, Case, forked, state
from .decisions import data, written

JOB = """
import os
import torch
import tangency as tg
from benchmarks.robustness.attack.decisions import data

def make():
    torch.manual_seed(0)
    test = data()
    return tg.models.mlp([3, 4, 3]).eval(), data(), tg.datasets.Labelled(test.x + 0.1, test.y, test.classes)

def kernel():
    return tg.trace_ntk(make()[0]), data().x

def nan():
    net, train, test = make()
    train.x[3, 1] = float("nan")
    return net, train, test

def escapes():
    raise ValueError("\\x1b[2J\\u202egnp.exe\\x07 is what it says")

class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def unsaid():
    raise Odd()

def named():
    net, train, test = make()
    test.x[:9] += 2
    names = ("\\x1b[31mred", "\\u202eturned", "=1+1")
    return net, tg.datasets.Labelled(train.x, train.y, names), tg.datasets.Labelled(test.x, test.y, names)

def moves():
    os.chdir("/")
    return make()

def ends():
    raise SystemExit(3)

def deep():
    return deep()

def nothing():
    return None
"""
FUNCTIONS = (
    "make", "kernel", "nan", "escapes", "unsaid", "named", "moves", "ends", "deep", "nothing", "gone", "a" * 5000, "",
    "\x1b[2J", "\u202e", "os.system", "a\x00b",
)  # fmt: skip
MODULES = ("job.py", "job.py", "job", "gone.py", "a" * 5000 + ".py", "a" * 300, "\x00.py", "fifo", ".",
           "folder", "\u202ejob.py", "decided.json", "binary.py")  # fmt: skip
# Places for what is written: new, there already, no files, too long, those that are read.
PLACES = (
    "new", "new/deep/page.html", "labels.csv", "labels.json", "page.html", "link.csv", "loose.csv", "fifo", "fifo.csv",
    "folder", "folder.csv", "job.py", "decided.csv", "decided.json", "hard.csv", "run.jsonl", "a" * 300 + ".csv",
    "device.csv", "/proc/no/a.csv", "new.html", "newer", "other/new",
    "loop.csv", "labels.csv/a.csv", "LABELS.csv", "\x1b[2J.csv", "\u202evsc.csv", "run.html", "", "~nobody/a.csv",
    "new.csv", "new.json",
)  # fmt: skip
EASY = ("new", "new.html", "new.csv", "labels.csv", "link.csv", "labels.json", "page.html", "other/new")
READ = (
    "decided.csv",
    "decided.json",
    "cut.json",
    "gone.json",
    "fifo.csv",
    "folder",
    "job.py",
    "binary.py",
    "\x1b[2J.json",
)
NUMBERS = ("1", "3", "0", "-1", "１", "9" * 5000, "nan", "x", "1e400")


# Command lines that are right.
RIGHT = (
    "audit apply job.py:make decided.csv --out labels.csv",
    "audit apply job.py:moves decided.json --out link.csv",
    "audit apply job.py:make decided.json --out loose.csv --json",
    "audit apply job.py:make hard.csv --out labels.json",
    "audit job.py:make --out page.html --csv labels.csv --kernels CK",
    "audit job.py:moves --out new --kernels CK --quiet",
    "audit job.py:named --out other/new --kernels CK --store new --json",
    "explain job.py:make --out page.html --kernels CK",
    "explain job.py:named --out new --kernels CK --store newer",
    "shift job.py:named --out page.html --kept labels.csv",
    "probe job.py:make --out new --quiet",
    "probe job.py:moves",
    "gram job.py:kernel --store new --tile 20",
)  # fmt: skip


def attack(folder: Path, count: int, draw: Random) -> list[Case]:
    """So many command lines, each in a folder of its own and in a process of its own."""
    found: list[Case] = []
    for name in ("explain", "audit", "shift", "representations", "report", "watch"):  # imported once, here
        getattr(tg, name)
    for k in range(count):
        here = folder / f"{k}"
        here.mkdir()
        _furnish(here, draw)
        found.append(_case(here, _drawn(draw), folder / "said"))
        shutil.rmtree(here)
    return found


def _furnish(here: Path, draw: Random) -> None:
    """What the user has, and what is in the way."""
    (here / "job.py").write_text(JOB, encoding="utf-8")
    one = data()
    decided, table = written(one, draw)
    (here / "decided.json").write_text(decided, encoding="utf-8")
    (here / "decided.csv").write_text(table, encoding="utf-8", newline="")
    (here / "cut.json").write_text(decided[:99], encoding="utf-8")
    (here / "binary.py").write_bytes(bytes(range(256)))
    for name in ("labels.csv", "labels.json", "page.html", "run.jsonl", "run.html"):
        (here / name).write_text("of the user's", encoding="utf-8")
    os.link(here / "decided.csv", here / "hard.csv")
    (here / "link.csv").symlink_to("labels.csv")
    (here / "loose.csv").symlink_to("elsewhere.csv")
    (here / "loop.csv").symlink_to("loop.csv")
    (here / "device.csv").symlink_to("/dev/full")
    for name in ("fifo", "fifo.csv"):
        os.mkfifo(here / name)
    for name in ("folder", "folder.csv"):
        (here / name).mkdir()


def _drawn(draw: Random) -> list[str]:
    """A command line: a right one, one of these with a word exchanged, or one that is hostile throughout."""
    if draw.random() < 0.35:
        words = draw.choice(RIGHT).split()
        at = draw.randrange(1, len(words))
        return words if draw.random() < 0.5 else [*words[:at], draw.choice([*PLACES, *READ]), *words[at + 1 :]]
    job = (
        f"{draw.choice(MODULES)}:{draw.choice(FUNCTIONS)}"
        if draw.random() < 0.6
        else f"job.py:{draw.choice(FUNCTIONS)}"
    )
    if draw.random() < 0.05:
        job = draw.choice(FUNCTIONS)
    place = lambda: draw.choice(PLACES)  # noqa: E731
    some = lambda words, part: words if draw.random() < part else []  # noqa: E731
    number = lambda: draw.choice(NUMBERS)  # noqa: E731
    ways = {
        "apply": lambda: ["audit", "apply", job, draw.choice(READ), "--out", place(), *some(["--json"], 0.2)],
        "audit": lambda: [
            "audit", job, "--out", place(), *some(["--csv", place()], 0.3), *some(["--store", place()], 0.2),
            *some(["--kernels", draw.choice(["CK", "no", "\x1b[2J"])], 0.6), *some(["--samples", number()], 0.2),
        ],
        "explain": lambda: [
            "explain", job, "--out", place(), "--kernels", draw.choice(["CK", "CK", "no"]),
            *some(["--store", place()], 0.3), *some(["--neighbours", number()], 0.2),
            *some(["--memory", draw.choice(["1GB", "x", "-1"])], 0.2),
        ],
        "shift": lambda: [
            "shift", job, "--out", place(), *some(["--kept", place()], 0.6), *some(["--keep", number()], 0.3)
        ],
        "probe": lambda: ["probe", job, *some(["--out", place()], 0.8), *some(["--dims", number()], 0.3)],
        "watch": lambda: [
            "watch", draw.choice([*READ, "run.jsonl", "run.html"]), "--once", *some(["--out", place()], 0.7)
        ],
        "gram": lambda: ["gram", job, "--store", place(), *some(["--tile", number()], 0.4)],
        "status": lambda: ["status", place()],
        "verify": lambda: ["verify", place(), *some([job], 0.5)],
        "reproduce": lambda: ["reproduce", draw.choice(["uci", "no"]), "--data", place(), "--out", place()],
        "none": lambda: [draw.choice(FUNCTIONS), place()],
    }  # fmt: skip
    words = ways[draw.choice([*ways, "apply", "apply", "audit"])]()
    return [
        *words,
        *some(["--quiet"], 0.5 * (words[0] in ("audit", "explain", "shift", "probe") and "apply" not in words)),
    ]


def _case(here: Path, words: list[str], said: Path) -> Case:
    was = state(here)

    def work() -> int:
        os.chdir(here)
        try:
            return main(words)
        except SystemExit as e:  # argparse
            return e.code if isinstance(e.code, int) else 2

    code = forked(work, said)
    text = said.read_bytes().decode("utf-8", "backslashreplace")
    now = state(here)
    kind = (
        "audit apply"
        if words[:2] == ["audit", "apply"]
        else words[0]
        if words[0].isalpha() and len(words[0]) < 12
        else "none"
    )
    case = lambda outcome: Case(kind, repr(words)[:400], outcome, f"exit {code}: {text[-400:]}")  # noqa: E731
    if code == -14:
        return case("hang")
    if code not in (0, 1, 2) or "Traceback" in text or "Where it happened" in text:
        return case("raw")
    if OBEYED.search(text):
        return case("shown")
    changed = {name for name in was if now.get(name) != was[name]}
    made = set(now) - set(was)
    if code and changed:
        return case("lost")
    if code and made:
        return case("left")
    return case("refused" if code else _as_said(here, words, changed, made))


def _as_said(here: Path, words: list[str], changed: set[str], made: set[str]) -> str:
    """Of a command that said it was done: it wrote where it was told, whole files, and nowhere else."""
    told = [words[k + 1] for k, word in enumerate(words[:-1]) if word in ("--out", "--csv", "--store", "--kept")]
    roots = {os.path.relpath(os.path.realpath(here / place), here) for place in told}
    roots |= {"run.html"} if words[0] == "watch" and "--out" not in words else set()
    # What this command was to read, by all its names; other files may be written over, if that was said.
    read = {"job.py", *(words[3:4] if words[:2] == ["audit", "apply"] else words[1:2])}
    read |= {"hard.csv", "decided.csv"} if read & {"hard.csv", "decided.csv"} else set()
    for name in changed | made:
        real = os.path.relpath(os.path.realpath(here / name), here)
        inside = any(
            real == root or real.startswith(f"{root}/") or root.startswith(f"{real}/") or root == "." for root in roots
        )
        if not inside or name in read:
            return "lost" if name in changed else "left"
        path = here / name
        table = "--csv" in words and name == words[words.index("--csv") + 1]  # a CSV may be called anything
        if path.suffix in (".json", ".html") and path.is_file() and not table and not _whole(path):
            return "half"
    return "done"


def _whole(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        return text.rstrip().endswith("</html>")
    with contextlib.suppress(ValueError):
        json.load(io.StringIO(text))
        return True
    return False
