"""What is built and installed: extras, addresses, the README as PyPI shows it, and what the archives hold."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import tangency as tg
from tangency._base.extras import EXTRAS

ROOT = Path(__file__).parents[1]
TOOLS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = TOOLS["project"]
HATCH = TOOLS["tool"]["hatch"]
README = HATCH["metadata"]["hooks"]["fancy-pypi-readme"]
BASE = PROJECT["urls"]["Homepage"]


def needs(extra: str) -> set[str]:
    """The distributions of an extra, those of the extras that it names included."""
    found = set()
    for line in PROJECT["optional-dependencies"][extra]:
        inner = re.match(r"tangency\[(.*)\]$", line)
        if inner:
            found |= {name for other in inner[1].split(",") for name in needs(other)}
        else:
            found.add(re.split(r"[\[<>=!~ ]", line)[0])
    return found


def test_all_is_everything_for_users() -> None:
    """But for Hugging Face's data sets and adapters, and others' trainers: whoever has one has their library."""
    for extra in PROJECT["optional-dependencies"]:
        if extra not in ("test", "docs", "hf", "lightning", "lora", "transformers"):
            assert needs(extra) <= needs("all"), extra
    assert not needs("all") & {"pytest", "mypy", "ruff", "mkdocs"}
    assert needs("all") <= needs("test")


def test_each_extra_has_the_libraries_that_errors_name() -> None:
    for name, extra in EXTRAS.items():
        assert {title.lower() for title in extra.libraries.values()} <= needs(name), name
    assert set(EXTRAS) | {"demo", "all", "docs", "test"} == set(PROJECT["optional-dependencies"])


def test_advice_in_the_pages_and_the_code_names_extras_that_exist() -> None:
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        e
        for f in files
        for found in re.findall(r"tangency\[([\w,]+)\]", f.read_text(encoding="utf-8"))
        for e in found.split(",")
    }
    assert named <= set(PROJECT["optional-dependencies"])


def test_the_address_stands_in_one_file() -> None:
    """All addresses begin with the home page's, and the code holds none."""
    addresses = [*PROJECT["urls"].values(), *(s["replacement"].removeprefix(r"\1") for s in README["substitutions"])]
    assert all(a == BASE or a.startswith(BASE + "/") for a in addresses)
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= set(PROJECT["urls"])
    assert not [p for p in (ROOT / "src").rglob("*.py") if BASE in p.read_text(encoding="utf-8")]


def absolute(text: str) -> str:
    """As hatch-fancy-pypi-readme does it."""
    for rule in README["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("![a](docs/a.png)", f"![a]({BASE}/raw/main/docs/a.png)"),
        ("[b](docs/b.md#c)", f"[b]({BASE}/blob/main/docs/b.md#c)"),
        ("[b](#c) [d](https://e.org/f)", "[b](#c) [d](https://e.org/f)"),
        ("[![a](docs/a.png)](docs/b.md)", f"[![a]({BASE}/raw/main/docs/a.png)]({BASE}/blob/main/docs/b.md)"),
        ("[![a](https://e.org/a.png)](b.md)", f"[![a](https://e.org/a.png)]({BASE}/blob/main/b.md)"),
        ('<img width="3" src="docs/a.png">', f'<img width="3" src="{BASE}/raw/main/docs/a.png">'),
        ('<a href="docs/b.md">', f'<a href="{BASE}/blob/main/docs/b.md">'),
        ("gram[0](x)", f"gram[0]({BASE}/blob/main/x)"),  # so the README must not write that outside of code
    ],
)
def test_links_become_absolute(given: str, want: str) -> None:
    assert absolute(given) == want


def test_the_readme_has_no_relative_link_left() -> None:
    """And code in it stays as it is; what links name exists."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = absolute(text)
    code = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
    assert code.findall(shown) == code.findall(text)
    links = re.findall(r"\]\(([^)\s]+)\)", code.sub("", shown))
    assert links
    assert all(link.startswith(("https://", "#")) for link in links)
    for link in links:
        inside = re.match(rf"{BASE}/(?:raw|blob)/main/([^#]+)", link)
        assert inside is None or (ROOT / inside[1]).exists(), link


def test_what_the_archives_hold() -> None:
    wheel, sdist = HATCH["build"]["targets"]["wheel"], HATCH["build"]["targets"]["sdist"]
    for path in [*wheel["only-include"], HATCH["version"]["path"], *(p.lstrip("/") for p in sdist["include"])]:
        assert (ROOT / path).exists(), path
    assert f'"{tg.__version__}"' in (ROOT / HATCH["version"]["path"]).read_text(encoding="utf-8")
    assert (ROOT / "src" / "tangency" / "py.typed").exists()  # all files of the package go into the wheel
    assert PROJECT["scripts"] == {"tangency": "tangency_command:main"}
