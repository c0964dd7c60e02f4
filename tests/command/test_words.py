"""What a stranger's words can do on a terminal and on a page: nothing but be read."""

import ast
import re
from pathlib import Path

import pytest

from tangency._base.words import lines, plain, said, short
from tangency.cli import main

COMMANDS = Path(__file__).parents[2] / "src" / "tangency" / "commands"
# What a terminal obeys, but for line ends and tabs; and marks that turn the direction of writing.
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
EVERY = "".join(map(chr, [*range(32), *range(127, 160), 0x61C, *range(0x200E, 0x2010), *range(0x202A, 0x202F), 0xD800]))

JOB = """
import torch
import tangency as tg

NASTY = "\\x1b[2J\\x9b1m\\u202ecod.exe\\x07\\r"

class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def escapes():
    raise ValueError(NASTY)

def unsaid():
    raise Odd()

def long():
    raise ValueError("a" * 10**6)

def ours():
    raise tg.InputError(NASTY)

def named():
    x = torch.randn(40, 3)
    return tg.models.mlp([3, 4, 2]), tg.datasets.Labelled(x, torch.arange(40) % 2, (NASTY, "b"), name=NASTY)
"""


def test_characters_that_a_terminal_obeys_are_shown() -> None:
    assert not OBEYED.search(plain(EVERY))
    assert not OBEYED.search(lines(EVERY))
    assert "\n" not in plain(EVERY)
    assert lines("a\tb\nc\u00e9 \u05d0") == "a\tb\nc\u00e9 \u05d0"
    assert plain("\u202e") == r"\u202e"
    assert (short("a" * 9), short("a" * 900)) == ("a" * 9, f"{'a' * 200}… (900 characters)")
    assert len(said(ValueError("a" * 10**6))) < 2100


def test_commands_print_by_one_function() -> None:
    """`say`, which shows what a terminal would obey."""
    for path in [*COMMANDS.glob("*.py"), COMMANDS.parent / "cli.py"]:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"]
        assert len(calls) == (path.name == "options.py"), path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("audit JOB:escapes --out page", r"ValueError: \x1b[2J\x9b1m\u202ecod.exe\x07\r"),
        ("audit JOB:unsaid --out page", "Odd: (its text cannot be made: RuntimeError)"),
        ("audit JOB:long --out page", "… (1,000,000 characters)"),
        ("audit JOB:ours --out page", r"\x1b[2J\x9b1m\u202ecod.exe"),
        ("audit JOB:\x1b[2J --out page", r"has no function '\x1b[2J'"),
        ("audit a\x00b:make --out page", r"'a\x00b:make' is not MODULE:FUNCTION"),
        ("audit \x00.py:make --out page", "is not MODULE:FUNCTION"),
        (f"audit {'a' * 5000}:make --out page", "… (5,005 characters)' is not MODULE:FUNCTION"),
        (f"audit {'a' * 5000}.py:make --out page", "(5,008 characters)' is not MODULE:FUNCTION"),
        (f"audit JOB:make --out {'a' * 5000}", "cannot be written: File name too long"),
        ("audit \u202ejob.py:make --out page", r"\u202ejob.py"),
        ("status \x1b[2J", r"no Gram store at \x1b[2J"),
        ("watch \x1b[2J.jsonl --out page.html", r"\x1b[2J.jsonl cannot be read"),
        ("\x1b[2J", "invalid choice"),
        ("doctor \x1b[2J\u202e", r"unrecognized arguments: \x1b[2J\u202e"),
    ],
)
def test_messages_are_shown(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    try:
        code = main(words.replace("JOB", "job.py").split(" "))
    except SystemExit as e:
        code = int(str(e.code))
    told = capsys.readouterr()
    assert code == 2
    assert message in told.out + told.err
    assert not OBEYED.search(told.out + told.err)
    assert len(told.err) < 9000
    assert "Traceback" not in told.err
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["job.py"]


def test_names_of_classes_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    assert main(["audit", "job.py:named", "--out", "page", "--kernels", "CK", "--quiet"]) == 0
    told = capsys.readouterr()
    assert not OBEYED.search(told.out + told.err)
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", page)
