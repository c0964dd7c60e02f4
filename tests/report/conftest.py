"""A browser for the page."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_decisions import pictured

from tangency import report
from tangency.decisions import Decisions


def lacking(what: str) -> None:
    if os.environ.get("CI") or os.environ.get("TANGENCY_NEED_BROWSER") == "1":
        pytest.fail(f"{what}; CI and TANGENCY_NEED_BROWSER=1 need it")
    pytest.skip(f"{what}, so the page was not opened")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        lacking("playwright is not installed")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as play:
        try:
            chromium = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as e:
            lacking(f"Chromium does not start ({str(e).splitlines()[0]})")
        yield chromium
        chromium.close()


Opener = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    """Opens decisions, or a written page, in a fresh window; at the end nothing may have gone wrong in any."""
    wrong: list[str] = []
    pages = []

    def opened(
        what: Decisions | Path, *, width: int = 1280, scheme: str = "light", hash: str = "", touch: bool = False
    ) -> Any:
        path = what if isinstance(what, Path) else report.write(what, tmp_path / f"{len(pages)}.html")
        page = browser.new_page(
            viewport={"width": width, "height": 844}, color_scheme=scheme, has_touch=touch, is_mobile=touch
        )
        page.set_default_timeout(120_000)  # a busy machine
        page.on("console", lambda m: wrong.append(f"console: {m.text}"))
        page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
        page.on("dialog", lambda d: (wrong.append(f"dialog: {d.message}"), d.dismiss()))
        page.on(
            "request", lambda r: None if r.url.split("#")[0] == path.as_uri() else wrong.append(f"request: {r.url}")
        )
        page.goto(path.as_uri() + hash)
        page.wait_for_selector("html[data-ready]")
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert not wrong


@pytest.fixture(scope="session")
def poisoned() -> Decisions:
    return pictured(noise=1.4, poison=True)


@pytest.fixture(scope="session")
def poisoned_page(poisoned: Decisions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(poisoned, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="session")
def axe() -> str:
    """The code of axe-core: of the file that TANGENCY_AXE names, or of the one in axe-playwright-python."""
    if named := os.environ.get("TANGENCY_AXE"):
        return Path(named).read_text(encoding="utf-8")
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        lacking("axe-playwright-python is not installed, nor does TANGENCY_AXE name axe.min.js")
        raise AssertionError
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")
