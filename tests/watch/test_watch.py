"""The page of a training that goes on, in a browser, and the command that writes it."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import window
from torch.nn import functional as F

import tangency as tg
from tangency import watch
from tangency.cli import main
from tangency.dynamics import Evolution, Monitor


def training(log: Path, *, steps: int = 6, close: bool = True, name: str = "trace") -> Monitor:
    """A short one, recorded at each step."""
    torch.manual_seed(0)
    net, x, y = tg.models.mlp([3, 30, 2]), torch.randn(40, 3), torch.arange(40) % 2
    record = ["loss", "change", "cosine", "rotation", "centred_alignment", "eigenvalues"]
    options = {"record": record, "functions": {name: torch.trace}, "every": 1}
    monitor = Monitor(tg.trace_ntk(net), x, y=y, loss=F.cross_entropy, log=log, **options)
    adam = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(steps):
        monitor.step(step)
        adam.zero_grad()
        F.cross_entropy(net(x), y).backward()
        adam.step()
    if close:
        monitor.close()
    return monitor


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    training(path, name="<b>trace</b></script>")
    return path


@pytest.fixture
def wrong() -> Iterator[list[str]]:
    found: list[str] = []
    yield found
    assert not found


# ---- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.every(2)
def test_the_page_shows_the_verdict_and_a_curve_for_each(
    browser: Any, axe: str, log: Path, tmp_path: Path, wrong: list[str], width: int, scheme: str
) -> None:
    """Without a request, a word on the console, a bar at the bottom, or a complaint of axe, in both schemes."""
    found = Evolution.load(log)
    page = window(browser, watch.write_page(found, tmp_path / "run.html"), wrong, width=width, scheme=scheme)
    kind = found.verdict().kind
    assert page.inner_text(".word").lower() == kind
    assert page.locator(".curve").count() == len(found.values)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.inner_text(".state") == "the run has ended"
    # Names of the user's are words, never code.
    assert page.inner_text(".curve >> nth=-1 >> h2") == "<b>trace</b></script>"
    # The slider, and with it the keyboard, moves all curves to a step.
    page.focus("#scrub")
    page.keyboard.press("Home")
    said = page.locator(".curve[data-name=change] .now")
    assert said.inner_text() == "step 0: 0"
    page.keyboard.press("ArrowRight")
    assert said.inner_text().startswith("step 1: ")
    page.locator(".curve[data-name=loss] svg").scroll_into_view_if_needed()
    box = page.locator(".curve[data-name=loss] svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 50)
    assert said.inner_text().startswith("step 5: ")
    page.click("summary")
    assert page.locator("tbody tr").count() == len(found)
    page.evaluate(axe)
    report = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']})")
    assert [(v["id"], [n["html"] for n in v["nodes"]][:2]) for v in report["violations"]] == []
    page.close()


def test_a_page_of_a_run_that_goes_on_loads_again_unless_it_is_held(
    browser: Any, tmp_path: Path, wrong: list[str]
) -> None:
    """By its timer, which is called by hand here."""
    monitor = training(tmp_path / "run.jsonl", steps=1, close=False)
    path = watch.write_page(monitor.history(), tmp_path / "run.html", refresh=5)
    timer = "window.setInterval = (f, time) => { window.tick = f; window.time = time; }"
    page = window(browser, path, wrong, width=600, scheme="light", prelude=timer)
    assert page.evaluate("window.time") == 5000
    assert page.inner_text(".state").startswith("loads again every 5 s")
    monitor(8)
    watch.write_page(monitor.history(), path, refresh=5)
    page.click("#hold")
    page.evaluate("window.tick()")
    assert page.inner_text("h1").startswith("Sequential at step 0")
    page.reload()  # a page that is held stays so
    page.wait_for_selector("#hold[aria-pressed=true]")
    page.click("#hold")
    monitor(9)
    watch.write_page(monitor.history(), path, refresh=5)
    with page.expect_navigation():
        page.evaluate("window.tick()")
    page.wait_for_selector("html[data-ready]")
    assert page.inner_text("h1").startswith("Sequential at step 9")
    page.close()


def test_what_the_page_holds(tmp_path: Path) -> None:
    monitor = training(tmp_path / "run.jsonl", steps=3)
    text = watch.page_text(monitor.history())
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "default-src 'none'" in text
    assert "<!--" not in text.replace("<!-- The page asks", "")
    with pytest.raises(tg.InputError, match="refresh=0; needed: seconds, above 0"):
        watch.page_text(monitor.history(), refresh=0)
    with pytest.raises(tg.InputError, match="cannot be written"):
        watch.write_page(monitor.history(), tmp_path / "run.jsonl" / "run.html")


def test_long_records_are_thinned_and_gaps_are_gaps() -> None:
    steps = torch.arange(5000).double()
    change = steps / 5000
    change[7] = math.nan
    wide = torch.ones(5000, 40).double()
    found = Evolution(steps, {"change": change, "spectrum": wide}, steps * 0, 3, False, {"model": "Net"}, ("so",))
    shown = watch.page.content(found, None)
    assert len(shown["steps"]) == watch.page.MOST
    assert (shown["steps"][0], shown["steps"][-1]) == (0, 4999)
    assert len(shown["curves"][1]["values"][0]) == watch.page.MODES
    assert shown["notes"] == ["So.", "1,000 of 5,000 records are drawn.", "Of spectrum the largest 12 are drawn."]
    assert "NaN" not in watch.page_text(found)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_watch_once(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(log), "--once", "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split()[:3] == ["step", "loss", "change"]
    assert Evolution.load(log).verdict().why in said
    assert said.rstrip().endswith("page.html")
    assert '"refresh":null' in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main(["watch", str(log)]) == 0  # a run that has ended is not waited for
    assert log.with_suffix(".html").exists()
    capsys.readouterr()
    assert main(["watch", str(log), "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["result"] == "Evolution"
    assert len(found["values"]["change"]) == 6


def test_watch_follows_a_log_until_its_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "run.jsonl"
    monitor = training(log, steps=2, close=False)
    page = tmp_path / "run.html"
    turns = iter([lambda: None, lambda: monitor(5), lambda: None, monitor.close])
    slept = []

    def sleep(seconds: float) -> None:
        assert '"refresh":2.0' in page.read_text(encoding="utf-8")
        slept.append(seconds)
        next(turns)()

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["watch", str(log), "--every", "2"]) == 0
    assert slept == [2.0] * 4
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:5]] == ["step", "0", "1", "page:", "5"]
    assert '"ended":true' in page.read_text(encoding="utf-8")

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    assert main(["watch", str(log), "--follow"]) == 130  # goes on after the end, too
    assert '"refresh":5.0' in page.read_text(encoding="utf-8")


def test_watch_says_what_it_needs(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([str(tmp_path / "none.jsonl"), "--once"], "none.jsonl cannot be read"),
        ([str(log), "--json"], "--json without --once"),
        ([str(log), "--once", "--out", str(tmp_path / "page.txt")], "ends with .html"),
        ([str(log), "--once", "--out", str(tmp_path)], "it is a folder"),
    ):
        assert main(["watch", *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["watch", str(log), "--every", "0"])
    assert "above 0" in capsys.readouterr().err
