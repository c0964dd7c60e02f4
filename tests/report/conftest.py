"""A browser for the page."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import axe, browser, window  # noqa: F401 - fixtures
from made_decisions import pictured

from tangency import report
from tangency.decisions import Decisions

Opener = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Opener]:  # noqa: F811
    """Opens decisions, or a written page, in a fresh window; at the end nothing may have gone wrong in any."""
    wrong: list[str] = []
    pages = []

    def opened(
        what: Decisions | Path, *, width: int = 1280, scheme: str = "light", hash: str = "", touch: bool = False
    ) -> Any:
        path = what if isinstance(what, Path) else report.write(what, tmp_path / f"{len(pages)}.html")
        page = window(browser, path, wrong, width=width, scheme=scheme, hash=hash, touch=touch)
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
