"""A browser for the pages that we write: fixtures `browser` and `axe`, and a window in which nothing may go wrong."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def lacking(what: str) -> None:
    """Skip, unless this machine must have it. CI=true alone says nothing: every hosted runner sets it."""
    if os.environ.get("TANGENCY_NEED_BROWSER") == "1":
        pytest.fail(f"{what}; TANGENCY_NEED_BROWSER=1 needs it")
    pytest.skip(f"{what}, so the page was not opened")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, of the system or playwright's own."""
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


def window(
    browser: Any,
    path: Path,
    wrong: list[str],
    *,
    width: int,
    scheme: str,
    hash: str = "",
    touch: bool = False,
    prelude: str = "",
) -> Any:
    """A page opened in a fresh window; all that goes wrong in it, and all that it asks for, is added to `wrong`.

    `prelude`: a script that runs before the page's own.
    """

    def refused(dialog: Any) -> None:
        wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page = browser.new_page(
        viewport={"width": width, "height": 844}, color_scheme=scheme, has_touch=touch, is_mobile=touch
    )
    page.set_default_timeout(120_000)  # a busy machine
    page.on("console", lambda m: wrong.append(f"console: {m.text}"))
    page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
    page.on("dialog", refused)
    page.on("request", lambda r: None if r.url.split("#")[0] == path.as_uri() else wrong.append(f"request: {r.url}"))
    if prelude:
        page.add_init_script(prelude)
    page.goto(path.as_uri() + hash)
    page.wait_for_selector("html[data-ready]")
    return page


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
