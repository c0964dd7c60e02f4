"""What README, docs and docstrings show runs, and where they lead exists; the names in them: test_names.py."""

import ast
import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tangency as tg
from tangency.cli import _parser

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MODULES = [m.name for m in pkgutil.walk_packages(tg.__path__, "tangency.") if "triton" not in m.name]
if importlib.util.find_spec("numba") is None:  # an extra: these two are imported where it is there
    MODULES = [name for name in MODULES if not name.endswith((".fused.compiled", ".fused.lanes"))]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(p.relative_to(ROOT)) for p in sorted(DOCS.rglob("*.md"))),
]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the comments that stand right above it."""

    language: str
    text: str
    setup: str
    not_run: str


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, also those inside tabs.

    `<!-- setup: code -->` above a block is run before it; `<!-- not run: reason -->` keeps it from being run.
    """
    text, found = (ROOT / page).read_text(encoding="utf-8"), []
    comments = r"((?:^ *<!--(?:(?!-->).)*-->\n+)*)"
    for above, _, language, body in re.findall(
        comments + r"^( *)```(\w*)[^\n]*\n(.*?)^\2```$", text, re.MULTILINE | re.DOTALL
    ):
        setup = "\n".join(re.findall(r"<!-- setup: (.*?) *-->", above, re.DOTALL))
        reason = re.search(r"<!-- not run: (.*?) *-->", above, re.DOTALL)
        found.append(Block(language, textwrap.dedent(body), textwrap.dedent(setup), reason[1] if reason else ""))
    return found


WITH_PYTHON = [page for page in PAGES if any(b.language == "python" for b in blocks(page))]
WITH_SHELL = [page for page in PAGES if any(b.language == "sh" for b in blocks(page))]


def test_every_module_can_be_imported() -> None:
    for name in MODULES:
        importlib.import_module(name)


def source_of(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in ["tangency", *MODULES] if ">>> " in source_of(name)])
@pytest.mark.every(4)
def test_docstring_examples(name: str) -> None:
    torch.manual_seed(0)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert result.failed == 0


# ---- code of pages --------------------------------------------------------------------------------------------------


def error_named(code: str, line: int) -> type[BaseException] | None:
    """The error that a comment at the end of a line promises: `k(x)  # ModelError: …`."""
    found = re.search(r"#\s*(\w+(?:Error|Mismatch))\b", code.splitlines()[line - 1])
    return None if found is None else getattr(tg, found[1])


def run(code: str, scope: dict[str, Any], page: str) -> None:
    """Statement by statement: those that promise an error must raise it."""
    for statement in ast.parse(code).body:
        one = compile(ast.Module([statement], []), f"<{page}>", "exec")
        error = error_named(code, statement.end_lineno or statement.lineno)
        with pytest.raises(error) if error else contextlib.nullcontext():
            exec(one, scope)


@pytest.mark.parametrize("page", WITH_PYTHON)
@pytest.mark.every(3)
def test_python_of_pages_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one scope; a block of `text` right after one that prints holds what it prints."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in blocks(page):
        if block.language == "text" and printed:
            assert block.text.split() == printed.split(), page
        printed = ""
        if block.language == "python" and not block.not_run:
            run(block.setup, scope, page)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                run(block.text, scope, page)
            printed = out.getvalue()


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    """Not run are those that need another library, and those that show code of a reader's own."""
    reasons = [block.not_run for page in PAGES for block in blocks(page) if block.not_run]
    assert len(reasons) <= 12
    assert all(len(reason.split()) >= 3 for reason in reasons)
    # One that says that a library is missing says so of what `make test` installs, wherever else it may be.
    wanted = {re.split(r"[\[<>=!~]", line)[0].lower() for line in required_by_tests()}
    for reason in reasons:
        for library in ("neural-tangents", "traker", "jax"):
            if library in reason.lower() and "not installed" in reason:
                assert library not in wanted, f"{library} is installed: run the block"


def required_by_tests() -> list[str]:
    """What the extra `test` asks for, its own extras followed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

    def lines(name: str) -> list[str]:
        """The requirements of an extra."""
        found = []
        for line in extras[name]:
            inner = re.fullmatch(r"tangency\[(.*)\]", line)
            found += [w for part in inner[1].split(",") for w in lines(part)] if inner else [line]
        return found

    return lines("test")


def test_a_promised_error_that_does_not_come_is_noticed() -> None:
    run("1 / 1\nraise tg.InputError('no')  # InputError: no", {"tg": tg}, "page")
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        run("1 / 1  # InputError: no", {"tg": tg}, "page")


def test_blocks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tab = '=== "tab"\n\n    <!-- not run: for a reason -->\n    ```python\n    b\n    ```\n'
    page = "<!-- setup: a = 1 -->\n```python\na\n```\n\n" + tab
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert blocks("page.md") == [Block("python", "a\n", "a = 1", ""), Block("python", "b\n", "", "for a reason")]


# ---- commands of pages ----------------------------------------------------------------------------------------------


def commands(page: str) -> Iterator[list[str]]:
    """The words of each line of a page's shell blocks, of those in one line too: a && b."""
    for block in blocks(page):
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                for part in line.split(" && "):
                    words = shlex.split(part, comments=True)
                    yield [w for k, w in enumerate(words) if k or "=" not in w]


@pytest.mark.parametrize("page", WITH_SHELL)
def test_commands_of_pages_exist(page: str) -> None:
    """`tangency …` is understood by the real parser, make has the targets, pip's extras are there, files are too."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for words in commands(page):
        if words[:1] == ["tangency"]:
            _parser().parse_args(words[1:])
        if words[:1] == ["make"]:
            assert {w for w in words[1:] if "=" not in w} <= set(targets), words
        if words[:2] == ["pip", "install"]:
            for named in re.findall(r"\[([\w,]+)\]", " ".join(words)):
                assert set(named.split(",")) <= set(extras), words
        for word in words:
            path = word.split(":")[0]
            if re.match(r"(examples|docs|src|tests|benchmarks)/", path):
                assert (ROOT / path).exists(), word


# ---- links ----------------------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """A heading's anchor, as Python-Markdown's table of contents makes it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
    plain = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(page: Path) -> set[str]:
    """All headings' anchors; `{ #name }` gives one by hand."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        own = re.search(r"\{ *#([\w.-]+) *\}", heading)
        found.add(own[1] if own else slug(heading))
    return found


def links(page: str) -> list[str]:
    """Where a page's links and pictures lead, but those to other sites."""
    text = re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    gallery = {f"docs/gallery/{p.stem}.md" for p in (ROOT / "examples" / "gallery").glob("*.py")}
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        inside = os.path.relpath(target, ROOT)
        if inside in gallery | {"docs/gallery/index.md"}:  # made when the site is built
            continue
        assert target.exists(), f"{page}: {link}"
        if anchor and target.suffix == ".md" and "reference" not in target.parts:
            assert anchor in anchors(target), f"{page}: {link}"


# ---- the site -------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = set(re.findall(r"([\w/]+\.md)$", navigation, re.MULTILINE))
    there = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    assert named == there | {"gallery/index.md", "contributing.md", "changelog.md"}


def test_every_public_name_has_a_place_in_the_reference() -> None:
    """Rooms have a page each; what is on top stands on the page of `tg`, errors on their own."""
    top = (DOCS / "reference" / "tangency.md").read_text(encoding="utf-8")
    for name in tg.__all__:
        thing = getattr(tg, name)
        if isinstance(thing, ModuleType):
            assert f"::: tangency.{name}" in (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
        elif inspect.isclass(thing) and issubclass(thing, BaseException):
            assert hasattr(tg.errors, name)
        elif callable(thing):
            assert thing.__doc__, name
            assert f"::: tangency.{name}\n" in top, name


def test_the_most_used_names_are_shown() -> None:
    shown = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    for name in ("full_ntk", "trace_ntk", "pseudo_ntk", "head_ntk", "conjugate_kernel", "embedding_kernel", "compute"):
        assert f"tg.{name}" in shown, name


def test_the_site_asks_for_nothing_from_elsewhere() -> None:
    for path in [ROOT / "mkdocs.yml", *(p for p in (DOCS / "assets").iterdir() if p.suffix in (".css", ".js", ".svg"))]:
        asked = re.findall(r"https?://[^\s\"')]+", path.read_text(encoding="utf-8"))
        assert set(asked) <= {"http://www.w3.org/2000/svg"}, path


def gallery() -> Any:
    """docs/_build/gallery.py as a module."""
    spec = importlib.util.spec_from_file_location("gallery", DOCS / "_build" / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gallery"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


GALLERY = gallery()
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples" / "gallery").glob("*.py"))}


@pytest.mark.parametrize("name", EXAMPLES)
def test_gallery_files_are_short_and_say_what_they_show(name: str) -> None:
    example = GALLERY.read(EXAMPLES[name])
    assert len(EXAMPLES[name].read_text(encoding="utf-8").splitlines()) < 60
    assert 10 < len(example.title) < 80
    assert 40 < len(example.caption) < 200
    assert not example.cells[-1].words  # code, with the figure
    assert "plt." in example.cells[-1].text
    notebook = json.loads(GALLERY.notebook(example))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code == [cell.text for cell in example.cells if not cell.words]
    assert "`" not in example.title


def test_the_gallery_is_large_enough() -> None:
    assert len(EXAMPLES) >= 12


def test_gallery_files_without_a_title_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("# %%\nprint(1)\n", encoding="utf-8")
    with pytest.raises(ValueError, match="must begin with"):
        GALLERY.read(tmp_path / "bare.py")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """All examples run, all references resolve; nothing is asked from elsewhere."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:[^\"]+)", page.read_text(encoding="utf-8")
        )
        assert not loaded, page
    assert (tmp_path / "site" / "gallery" / "explain_a_digit.png").stat().st_size > 5000


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_plan_is_covered() -> None:
    text = (DOCS / "coverage.md").read_text(encoding="utf-8")
    for row in ("K1", "K2", "K3", "K5", "K6"):
        assert f"| {row} |" in text
