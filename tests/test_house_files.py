"""What stands beside the code (workflows, hooks, citation, release) says the same as the code."""

import ast
import re
import shutil
import tomllib
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import tangency as tg

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
YAML = [*WORKFLOWS, *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ROOT / ".pre-commit-config.yaml"]


class Loose(yaml.SafeLoader):
    """Reads files with tags of somebody else's, such as mkdocs.yml, without following them."""


Loose.add_multi_constructor("", lambda loader, tag, node: tag)


def read(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), Loose)


def release_script() -> ModuleType:
    spec = spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RELEASE = release_script()


@pytest.mark.parametrize("path", [*YAML, ROOT / "CITATION.cff", ROOT / "mkdocs.yml"], ids=lambda p: p.name)
def test_yaml_parses_and_has_no_key_twice(path: Path) -> None:
    assert isinstance(read(path), dict)

    def keys(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value]
            assert len(names) == len(set(names)), names
            for _, value in node.value:
                keys(value)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                keys(value)

    keys(yaml.compose(path.read_text(encoding="utf-8"), Loose))


def test_the_pythons_that_are_tested_are_those_that_are_promised() -> None:
    tested = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = [c.rsplit(" ", 1)[1] for c in PROJECT["project"]["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    assert tested == named
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"
    # What the linters hold the code to is the oldest.
    assert PROJECT["tool"]["mypy"]["python_version"] == named[0]
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + named[0].replace(".", "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflows_may_only_read_and_end(path: Path) -> None:
    found = read(path)
    assert found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        assert job["timeout-minutes"] <= 60
        assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {})
        for step in job["steps"]:
            # Titles of issues and names of branches are written by strangers: as a variable they are no code.
            assert "${{" not in step.get("run", "")


def without_encoding(code: str) -> list[int]:
    """The lines on which a file of text is opened in whatever encoding the reader's machine has."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or {k.arg for k in node.keywords} & {"encoding", None}:
            continue
        modes = [k.value for k in node.keywords if k.arg == "mode"]
        match node.func:
            case ast.Attribute(attr="read_text" | "write_text"):
                found.append(node.lineno)
            case ast.Name(id="open") if is_text([*node.args[1:], *modes]):
                found.append(node.lineno)
            case ast.Attribute(attr="open") if is_text([*node.args, *modes]):
                found.append(node.lineno)
    return found


def is_text(modes: list[ast.expr]) -> bool:
    """Whether these arguments, from the mode on, open text; the `open` of an image or an archive takes others."""
    match modes:
        case []:
            return True
        case [ast.Constant(value=str(mode)), *_]:
            return re.fullmatch("[rwax+t]+", mode) is not None
    return False


def test_text_is_read_and_written_as_utf_8() -> None:
    """Under LC_ALL=C, in Latin-1, everywhere. ruff's own rule (PLW1514) sees only paths made on the spot."""
    assert without_encoding("p.read_text()\np.open()\nopen(p, mode='a')\nopen(p)") == [1, 2, 3, 4]
    assert not without_encoding("open(p, 'rb')\nos.open(p, 0)\np.read_text(encoding='ascii')\nfield.open(level, delay)")
    for folder in ("src", "tests", "scripts", "benchmarks", "docs", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            code = path.read_text(encoding="utf-8")
            if "open(" in code or "_text(" in code:
                assert not without_encoding(code), f'{path.relative_to(ROOT)}: say encoding="utf-8"'


def test_one_ruff_everywhere() -> None:
    hooks = {repo["repo"].rsplit("/", 1)[-1]: repo for repo in read(ROOT / ".pre-commit-config.yaml")["repos"]}
    pinned = dict(re.findall(r"^(\w+)==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert hooks["ruff-pre-commit"]["rev"] == f"v{pinned['ruff']}"
    pytest.importorskip("ruff", reason="what lints is not installed; under `make test` it is")
    assert version("ruff").rsplit(".", 1)[0] == pinned["ruff"].rsplit(".", 1)[0]


def test_hooks_leave_stores_to_the_byte() -> None:
    left_out = re.compile(read(ROOT / ".pre-commit-config.yaml")["exclude"])
    chunks = [p for p in (ROOT / "tests" / "fixtures").rglob("*") if p.is_file()]
    assert chunks
    assert all(left_out.search(p.relative_to(ROOT).as_posix()) for p in chunks)


def test_the_version_is_the_same_everywhere() -> None:
    RELEASE.check()
    assert RELEASE.current() == tg.__version__ == str(read(ROOT / "CITATION.cff")["version"])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that say the version, as they are between two releases."""
    for name in (RELEASE.VERSION, RELEASE.CITATION):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\nnew\n\n## 0.0.1 (2020-01-01)\n\nold\n", encoding="utf-8"
    )
    (tmp_path / RELEASE.VERSION).write_text('__version__ = "0.0.1"\n', encoding="utf-8")
    citation = re.sub(r"(?m)^version: .*$", "version: 0.0.1", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (tmp_path / "CITATION.cff").write_text(citation, encoding="utf-8")
    return tmp_path


def test_a_release(tree: Path) -> None:
    RELEASE.check(root=tree)
    RELEASE.bump("0.1.0", tree, "2030-01-02")
    RELEASE.check("v0.1.0", tree)
    assert RELEASE.headings(tree) == ["0.1.0", "0.0.1"]
    assert "## 0.1.0 (2030-01-02)\n\nnew" in (tree / "CHANGELOG.md").read_text(encoding="utf-8")
    cited = read(tree / "CITATION.cff")
    assert (cited["version"], str(cited["date-released"]), cited["cff-version"]) == ("0.1.0", "2030-01-02", "1.2.0")
    changes = (tree / "CHANGELOG.md").read_text(encoding="utf-8")
    (tree / "CHANGELOG.md").write_text(
        changes.replace("# Changelog\n", "# Changelog\n\n## Unreleased\n", 1), encoding="utf-8"
    )
    RELEASE.bump("0.10.0", tree, "2031-01-02")  # newer than 0.1.0, and the date is replaced
    RELEASE.check("v0.10.0", tree)
    assert (tree / "CITATION.cff").read_text(encoding="utf-8").count("date-released") == 1


def test_releases_that_do_not_fit_are_refused_and_nothing_is_written(tree: Path) -> None:
    def files() -> list[str]:
        return [p.read_text(encoding="utf-8") for p in sorted(tree.rglob("*")) if p.is_file()]

    before = files()
    for given, message in {
        "0.2": "'0.2' is not a version",
        "": "'' is not a version",
        "0.0.0": "0.0.0 is older than 0.0.1",
        "0.0.1": "already has 0.0.1",
    }.items():
        with pytest.raises(RELEASE.Disagreement, match=re.escape(message)):
            RELEASE.bump(given, tree)
    with pytest.raises(RELEASE.Disagreement, match="the tag is v0.1.0, the version 0.0.1"):
        RELEASE.check("v0.1.0", tree)
    with pytest.raises(RELEASE.Disagreement, match=r"begins with \['Unreleased'\], not with 0.0.1"):
        RELEASE.check("v0.0.1", tree)
    assert files() == before
    RELEASE.bump("0.1.0", tree)
    with pytest.raises(RELEASE.Disagreement, match="there is nothing to release"):
        RELEASE.bump("0.2.0", tree)
    (tree / RELEASE.VERSION).write_text('__version__ = "0.3.0"\n', encoding="utf-8")
    with pytest.raises(RELEASE.Disagreement, match=r"CITATION.cff says 0.1.0, src/tangency/_version.py 0.3.0"):
        RELEASE.check(root=tree)
    (tree / RELEASE.CITATION).write_text("version: 0.3.0\n", encoding="utf-8")
    with pytest.raises(RELEASE.Disagreement, match=r"begins with \['0.1.0'\]; it must be 'Unreleased' or '0.3.0'"):
        RELEASE.check(root=tree)
    (tree / RELEASE.CITATION).write_text("", encoding="utf-8")
    with pytest.raises(RELEASE.Disagreement, match=r"CITATION.cff has 0 lines like 'version: \(.\+\)'; one is needed"):
        RELEASE.check(root=tree)
    assert "bump 0.2.0" in RELEASE.main(["help"])
    assert RELEASE.main(["check", "v9.9.9"]).startswith("the tag is v9.9.9")
    assert RELEASE.main(["check"]) is None
