"""What README and docstrings show runs, and what they name exists."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import tangency as tg

ROOT = Path(__file__).parent.parent
MODULES = [m.name for m in pkgutil.walk_packages(tg.__path__, "tangency.") if "triton" not in m.name]


@pytest.mark.parametrize("name", ["tangency", *MODULES])
def test_docstring_examples(name: str) -> None:
    torch.manual_seed(0)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_readme_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)


def test_every_public_name_is_documented() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in tg.__all__:
        thing = getattr(tg, name)
        if callable(thing):
            assert thing.__doc__, name
    for name in ("full_ntk", "trace_ntk", "pseudo_ntk", "head_ntk", "conjugate_kernel", "embedding_kernel", "compute"):
        assert f"tg.{name}" in readme, name


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_that_exist(page: str) -> None:
    """By their whole path, or by its end."""
    there = [
        "/" + str(p.relative_to(ROOT))
        for d in ("src", "tests", "benchmarks", "examples")
        for p in (ROOT / d).rglob("*")
    ]
    for path in re.findall(r"`([\w/]+\.py|(?:src|tests|benchmarks|examples)/[\w/.]+)`", (ROOT / page).read_text()):
        assert path == "utils.py" or any(p.endswith("/" + path.rstrip("/")) for p in there), path


def test_the_plan_is_covered() -> None:
    text = (ROOT / "docs" / "coverage.md").read_text()
    for row in ("K1", "K2", "K3", "K5", "K6"):
        assert f"| {row} |" in text
