"""What the tree says of itself is true: the names, commands and files in its messages, docstrings and pages are there.

Links, and what whole pages run, are in test_docs.py. The changelog may name what is gone.
"""

import contextlib
import functools
import importlib
import inspect
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import tangency as tg
from tangency.cli import _parser

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "tangency"
FOLDERS = ("src", "docs", "examples", "benchmarks", "scripts", "tests", ".github")
# These make up names, to test what tests them.
INVENTING = {"test_names.py", "test_docs.py", "test_packaging.py", "test_house_files.py", "test_architecture.py"}
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.iterdir(), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]
    if (path.suffix in (".py", ".md", ".yml", ".yaml", ".js", ".toml") or path.name == "Makefile")
    and path.name not in INVENTING | {"CHANGELOG.md"}
}
# A name that is said where it is wanted that there is none: what the first stores call `tangency.kernels.ntk`.
GONE = {"tangency.ntk"}


def refusals(found: Iterator[tuple[str, str]]) -> list[str]:
    """Sorted, each once: where, and what is wrong there."""
    return sorted({f"{where}: {what}" for where, what in found})


# ---- names ----------------------------------------------------------------------------------------------------------


def is_module(parts: tuple[str, ...]) -> bool:
    path = SRC.joinpath(*parts)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def reached(thing: object, parts: tuple[str, ...]) -> bool:
    """Whether attributes lead there; fields of a dataclass are none of the class, but are annotated."""
    for k, part in enumerate(parts):
        if not hasattr(thing, part):
            return inspect.isclass(thing) and part in inspect.get_annotations(thing) and k == len(parts) - 1
        thing = getattr(thing, part)
    return True


@functools.cache
def exists(name: str) -> bool:
    """Of `tg.a.b`, by attributes, or `tangency.a.b`, through files: a function may have its file's name."""
    parts = tuple(name.split(".")[1:])
    if is_module(parts) or reached(tg, parts):  # a module is not imported: some need what is not here
        return True
    inside = max(k for k in range(len(parts) + 1) if k == 0 or is_module(parts[:k]))
    if inside == 0:
        return False
    return reached(importlib.import_module(".".join(["tangency", *parts[:inside]])), parts[inside:])


def names(text: str) -> set[str]:
    """`tg.…` and `tangency.…`, but for files that are called so."""
    found = {m[0] for m in re.finditer(r"(?<![\w./-])(?:tg|tangency)(?:\.[A-Za-z_]\w*)+", text)}
    return {name for name in found - GONE if name.rsplit(".")[-1] not in ("md", "json", "jsonl", "py")}


def test_names_exist() -> None:
    where = {page: text for page, text in TEXTS.items() if not page.startswith("tests/")}  # those are run
    assert not refusals((page, name) for page, text in where.items() for name in names(text) if not exists(name))
    assert sum(len(names(text)) for text in where.values()) > 500


def test_names_that_do_not_exist_are_noticed() -> None:
    assert names("(tg.trace_ntk, not tg.ntk), tangency.errors.Input. See tangency.md, a/tg.b") == {
        "tg.trace_ntk",
        "tg.ntk",
        "tangency.errors.Input",
    }
    for name in ("tg.trace_ntk", "tg.report.write", "tg.Gram.shape", "tangency.report.build.build", "tangency.engine"):
        assert exists(name), name
    for name in ("tg.ntk", "tg.trace_ntk.no", "tangency.errors.Input", "tangency.engine.no.never", "tg.Gram.no"):
        assert not exists(name), name


# ---- commands -------------------------------------------------------------------------------------------------------


def lines(text: str) -> str:
    """With lines that a backslash continues in one, and what an f-string fills in as a word."""
    return re.sub(r" ?\{[^{}\n]*\}", " FILLED", re.sub(r" \\+\n\s*", " ", text))


def ours(text: str) -> set[str]:
    """What follows `tangency`, where that is a command: in backticks, on a line of its own, or at a sentence's end."""
    known = "|".join(re.findall(r"^    ([a-z]+)\b", answer("--help"), re.MULTILINE))
    quoted = re.findall(r"`(?:python3? -m )?tangency ([a-z][^`\n|]*)`", lines(text))
    alone = re.findall(rf"(?:^ *|: |python3? -m )tangency ((?:{known})\b[^`\"\n]*)", lines(text), re.MULTILINE)
    return {re.split(r"  | #|[.,;)]+(?: |$)", words)[0].strip() for words in [*quoted, *alone]}


@functools.cache
def answer(*words: str) -> str:
    """What the command line prints to these words where it only parses them; nothing, if it would go on."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        _parser().parse_args(words)
    return out.getvalue()


def misunderstood(said: str) -> str:
    """Why the command line would not take this; a command is also named by its first words alone."""
    words = [w for w in shlex.split(re.sub(r"[\[\]]|…", "", said), comments=True) if w]
    refusal = answer(*words).rpartition("error: ")[2].strip() if "error: " in answer(*words) else ""
    if "are required" in refusal or "expected" in refusal or re.search(r"invalid choice: '[A-Z_]+'", refusal):
        path = words[: 2 if words[:2] == ["audit", "apply"] else 1]
        options = [w.partition("=")[0] for w in words if w.startswith("--")]
        unknown = [o for o in options if not re.search(rf"{o}\b", answer(*path, "--help"))]
        return f"no option {', '.join(unknown)}" if unknown else ""
    return refusal


def test_our_commands_are_understood() -> None:
    said = {(page, words) for page, text in TEXTS.items() for words in ours(text)}
    assert len(said) > 60
    assert not refusals((page, f"tangency {words}: {why}") for page, words in said if (why := misunderstood(words)))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("demo", ""),
        ("audit apply", ""),
        ("gram JOB.py:FUNCTION", ""),
        ("reproduce NAME --data DIR", ""),
        ("verify STORE MODULE:FUNCTION --sample 3", ""),
        ("explode", "invalid choice"),
        ("reproduce surrogate-table9", "invalid choice"),
        ("doctor --fast", "unrecognized arguments"),
        ("gram --folder x", "no option --folder"),
    ],
)
def test_commands_that_are_not_understood_are_noticed(said: str, why: str) -> None:
    assert why in misunderstood(said) if why else not misunderstood(said)


def test_commands_are_found() -> None:
    text = (
        "`tangency gram`, run: tangency verify {a(b)} x.\n    tangency demo --out page   # a page\nthe tangency kernel"
    )
    assert ours(text) == {"gram", "verify FILLED x", "demo --out page"}


def benchmarks(text: str) -> set[tuple[str, str]]:
    """Modules after `-m`, and the words behind them."""
    found = re.findall(r"-m (benchmarks(?:\.\w+)+)([^`\"#\n]*)", lines(text))
    return {(module, words) for module, words in found if not re.search(r"\.[A-Z]+\b", module)}


def unknown_to(module: str, words: str) -> str:
    """Why a benchmark would not take this: it, or what it imports, has no such option."""
    path = ROOT / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return f"no {file.relative_to(ROOT)}"
    code = "".join(
        p.read_text(encoding="utf-8") for p in [file, *file.parent.glob("*.py")] if p == file or p.stem in module
    )
    options = re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", words)
    if 'add_argument(f"--{' in code:  # in a loop over names
        options = [o for o in options if f'"{o[2:]}"' not in code]
    unknown = [o for o in options if f'"{o}"' not in code]
    return f"no option {', '.join(unknown)}" if unknown else ""


def test_benchmarks_are_there_with_their_options() -> None:
    said = {(page, *found) for page, text in TEXTS.items() for found in benchmarks(text)}
    assert len(said) > 60
    assert not refusals((page, f"{m}{w}: {why}") for page, m, w in said if (why := unknown_to(m, w)))
    assert unknown_to("benchmarks.speed.solve", " cpu --data DIR [--no 3]") == "no option --no"
    assert unknown_to("benchmarks.speed.no", "") == "no benchmarks/speed/no.py"


def made(text: str) -> set[str]:
    return set(re.findall(r"(?:`|^ *|: |&& )make (\.?[a-z][\w/-]*)(?=`| &&| +#|$| [A-Z]+=)", text, re.MULTILINE))


def test_make_has_the_targets() -> None:
    targets = set(re.findall(r"^(\.?[a-z][\w/-]*):", TEXTS["Makefile"], re.MULTILINE))
    said = {(page, target) for page, text in TEXTS.items() for target in made(text)}
    assert {target for _, target in said} >= {"test", "demo", "test-all", "dist", "docs", "bump", ".venv/tools"}
    assert not refusals((page, f"make {target}") for page, target in said if target not in targets)
    phony = re.search(r"^\.PHONY: (.*)$", TEXTS["Makefile"], re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == {target for target in targets if not target.startswith(".")}


# ---- files ----------------------------------------------------------------------------------------------------------


def files(text: str) -> set[str]:
    """Paths from the root, and files in backticks by the end of their path; patterns and capitals are placeholders."""
    starts = "|".join(map(re.escape, FOLDERS))
    whole = re.findall(rf"(?<![\w./{{}}*~-])((?:{starts})/[\w./-]*\w)(?![\w*{{/]*[*{{])", text)
    ends = re.findall(r"`(?:\.\./)*([\w./-]+\.(?:py|md|json|yml|toml|png))`", text)
    return {path for path in [*whole, *ends] if not re.search(r"[A-Z]{4}(?<!READ)", path.rpartition("/")[2])}


@functools.cache
def there() -> set[str]:
    """The end of each path in the tree, and its beginnings: all that a page may call a file or folder."""
    found = [p.relative_to(ROOT).parts for folder in FOLDERS for p in (ROOT / folder).rglob("*")]
    ends = {"/".join(parts[k:]) for parts in found for k in range(len(parts))}
    return ends | {p.name for p in ROOT.iterdir()} | set(FOLDERS)


def test_files_are_there() -> None:
    said = {(page, path) for page, text in TEXTS.items() for path in files(text)}
    assert len(said) > 500
    assert not refusals((page, path) for page, path in said if path not in there() and path != "utils.py")


def test_files_are_found() -> None:
    text = "`engine/rules.py`, `../a.py`; docs/no.md, docs/assets/a*.png, benchmarks/results/a_PART.json: tests/x/y."
    assert files(text) == {"engine/rules.py", "a.py", "docs/no.md", "tests/x/y"}
    assert "engine/rules.py" in there()
    assert "docs/no.md" not in there()
