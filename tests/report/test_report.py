"""The page, in a real browser: it opens from a file, asks for nothing, and shows the numbers that it was given."""

import base64
import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_decisions import (
    ANIMALS,
    NASTY,
    check_numbers,
    decide,
    faithfulness,
    labels,
    listed,
    neighbours,
    opening,
    pictured,
    place,
    sample,
    smooth,
    tabled,
    values,
    written,
)
from torch import Tensor

import tangency as tg
from tangency import report
from tangency.datasets import Labelled
from tangency.decisions import Decisions, Explanation
from tangency.decisions.attribution import Attribution
from tangency.report import pack, pictures
from tangency.surrogate import MonotoneMap, Surrogate

SCREENSHOTS = Path(__file__).parents[2] / "runs" / "screenshots"
Opener = Callable[..., Any]


# ---- what is shown --------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_decisions(show: Opener, poisoned: Decisions, poisoned_page: Path) -> None:
    page, d = show(poisoned_page, hash=place(poisoned)), poisoned
    check_numbers(page, d, 0, 0, 0)
    page.keyboard.press("2")
    page.keyboard.press("ArrowRight")
    check_numbers(page, d, 1, 1, 0)
    page.click(".behind .choice button >> nth=1")
    check_numbers(page, d, 1, 1, 1)
    taus = values(page, ".kernels td.tau")
    torch.testing.assert_close(taus, torch.tensor([v.faithfulness.tau for v in d.explanations]))
    assert page.inner_text("#best .big") == "trNTK"
    wrong = int((d.logits.argmax(1) != d.test.y).sum())
    assert page.inner_text("#to-wrong .big") == str(wrong)
    cells = "nodes => nodes.map((n) => Number(n.innerText.replace('·', '0')))"
    for who, logits in (("Network", d.logits), ("Surrogate", d.explanations[1].logits)):
        page.click(f"#faithful .choice >> text={who}")
        counts = torch.tensor(page.eval_on_selector_all(".confusion td", cells)).view(10, 10)
        expected = torch.zeros(10, 10).index_put_((d.test.y, logits.argmax(1)), torch.ones(1), accumulate=True)
        torch.testing.assert_close(counts, expected.long())


def test_small_pictures_are_exact(show: Opener) -> None:
    d = pictured(1, 8, kernels=1)
    page = show(d, hash=place(d))
    read = """nodes => nodes.map((n) => [...n.getContext("2d").getImageData(0, 0, 8, 8).data])
        .map((bytes) => bytes.filter((_, k) => k % 4 == 0))"""
    seen = torch.tensor(page.eval_on_selector_all("[data-list=similar] canvas", read), dtype=torch.uint8)
    torch.testing.assert_close(seen, d.train.show[d.explanations[0].attribution.similar[0]].flatten(1))
    assert page.locator("#kernels button").count() == 0  # one kernel: nothing to switch
    large = torch.tensor(page.eval_on_selector_all(".subject canvas", read), dtype=torch.uint8)
    torch.testing.assert_close(large, d.test.show[d.shown[:1]].flatten(1))
    assert "every pixel as it is" in page.inner_text("#notes")


def test_wrong_class_and_poisoned_neighbours_are_marked(show: Opener, poisoned: Decisions, poisoned_page: Path) -> None:
    page, d = show(poisoned_page, hash=place(poisoned)), poisoned
    dirty, truth = d.poisoned_train, int(d.test.y[d.shown[0]])
    assert dirty is not None
    tiles = page.eval_on_selector_all(
        ".neighbours .tile",
        "nodes => nodes.map((n) => [Number(n.dataset.index), n.classList.contains('strange'), n.innerText])",
    )
    assert any(strange for _, strange, _ in tiles)
    for index, strange, words in tiles:
        assert strange == ("≠" in words) == (int(d.train.y[index]) != truth)
        assert ("poisoned" in words) == bool(dirty[index])
        assert ANIMALS[int(d.train.y[index])] in words


# ---- how it is used -------------------------------------------------------------------------------------------------


def test_keys(show: Opener, poisoned: Decisions, poisoned_page: Path) -> None:
    page, shown = show(poisoned_page, hash=place(poisoned)), poisoned.shown.tolist()
    for key, at in (("ArrowRight", 1), ("j", 2), ("k", 1), ("ArrowLeft", 0), ("ArrowLeft", 0)):
        page.keyboard.press(key)
        assert sample(page) == shown[at]
    before = neighbours(page, "similar"), values(page, ".probabilities td.surrogate").tolist()
    page.keyboard.press("3")
    after = neighbours(page, "similar"), values(page, ".probabilities td.surrogate").tolist()
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert page.get_attribute("#kernels button >> nth=2", "aria-pressed") == "true"
    page.keyboard.press("9")  # there is no ninth kernel
    assert page.get_attribute("#kernels button >> nth=2", "aria-pressed") == "true"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("2")  # now a key is a letter
    assert page.get_attribute("#kernels button >> nth=2", "aria-pressed") == "true"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") != "search"
    assert page.input_value("#search") == ""
    assert len(listed(page)) == len(shown)


def test_filters_order_and_search(show: Opener, poisoned: Decisions, poisoned_page: Path) -> None:
    page, d = show(poisoned_page), poisoned
    rows, said = d.shown, d.logits.argmax(1)
    truth, stand = d.test.y, d.explanations[0].logits.argmax(1)
    flagged = d.explanations[0].flagged
    assert flagged is not None
    assert d.poisoned_test is not None
    for key, mask in (
        ("wrong", said != truth),
        ("split", said != stand),
        ("poisoned", d.poisoned_test),
        ("flagged", flagged),
        ("all", torch.ones_like(truth, dtype=torch.bool)),
    ):
        page.click(f".chips [data-key={key}]")
        expected = rows[mask[rows]].tolist()
        assert listed(page) == expected
        assert page.inner_text(f".chips [data-key={key}] .tally") == str(len(expected))
        if expected:
            assert sample(page) in expected
    page.click(".chips [data-key=far]")
    far = listed(page)
    off = [abs(float(x)) for x in (odds_off(d, 0)[r] for r in far)]
    assert off == sorted(off, reverse=True)
    assert min(off) >= max(abs(float(odds_off(d, 0)[r])) for r in rows.tolist() if r not in far)
    page.click(".chips [data-key=all]")
    page.fill("#search", f"#{int(rows[5])}")
    assert listed(page) == [int(rows[5])] == [sample(page)]
    page.fill("#search", "TRUCK")
    assert set(listed(page)) == {r for r in rows.tolist() if 9 in (int(truth[r]), int(said[r]))}
    page.fill("#search", "no such thing")
    assert "No explained sample fits" in page.inner_text("#strip")
    page.click("#strip >> text=Show all")
    assert len(listed(page)) == len(rows)
    page.select_option(".selects select >> nth=0", str(int(truth[rows[3]])))
    assert listed(page) == rows[truth[rows] == truth[rows[3]]].tolist()
    page.click("#to-wrong")  # the card on the first screen
    assert listed(page) == rows[said[rows] != truth[rows]].tolist()
    page.select_option(".selects select >> nth=3", "sure")
    sure = [float(d.logits[r].softmax(0).max()) for r in listed(page)]
    assert sure == sorted(sure, reverse=True)


def odds_off(d: Decisions, view: int) -> Tensor:
    odds = [
        tg.surrogate.log_odds(v.double(), d.test.y, outputs_are="logits")
        for v in (d.logits, d.explanations[view].logits)
    ]
    line = d.explanations[view].faithfulness.map
    return MonotoneMap(line.knots.double(), line.values.double())(odds[1]) - odds[0]


def test_scatter_confusion_and_training_samples_lead_to_decisions(
    show: Opener, poisoned: Decisions, poisoned_page: Path
) -> None:
    page, d = show(poisoned_page), poisoned
    point = page.locator("#scatter .point[data-sample]").nth(7)
    wanted = int(point.get_attribute("data-sample"))
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert f"#{wanted}" in page.inner_text("#scatter .tip")
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert sample(page) == wanted
    page.locator(".confusion td.hit button").first.click()
    assert {int(d.test.y[r]) for r in listed(page)} == {0} == {int(d.logits[r].argmax()) for r in listed(page)}
    page.locator("[data-list=helpful] .tile").first.click()
    index = int(d.explanations[0].attribution.helpful[d.shown.tolist().index(sample(page)), 0, 0])
    assert f"Training sample #{index}" in page.inner_text("dialog")
    page.locator("dialog .link").last.click()
    page.locator("dialog").wait_for(state="detached")  # by its event `close`, which a busy machine brings late
    where = d.shown.tolist().index(sample(page))
    a = d.explanations[0].attribution
    assert index in torch.cat([a.similar[where], a.helpful[where].flatten(), a.harmful[where].flatten()]).tolist()


@pytest.mark.slow
def test_address_restores_and_follows(show: Opener, poisoned: Decisions, poisoned_page: Path) -> None:
    shown = poisoned.shown.tolist()
    page = show(poisoned_page, hash=f"#sample={shown[4]}&kernel=CK&output=1")
    check_numbers(page, poisoned, 4, 1, 1)
    page.keyboard.press("j")
    page.keyboard.press("3")
    page.wait_for_url(lambda url: url.endswith(f"#sample={shown[5]}&kernel=pNTK&output=1"))
    page.evaluate(f"location.hash = '#sample={shown[2]}&kernel=trNTK'")
    page.locator("#sample-title", has_text=re.compile(f"#{shown[2]}$")).wait_for()
    check_numbers(page, poisoned, 2, 0, 0)
    page = show(poisoned_page, hash="#sample=99999&kernel=none")  # says nothing that exists
    assert sample(page) == opening(poisoned)


@pytest.mark.slow
def test_a_step_draws_little(show: Opener, poisoned_page: Path) -> None:
    """A step to the next sample makes few new elements: the lists of samples, the pictures and the header stay."""
    page = show(poisoned_page)
    steps = page.evaluate(
        """() => Array.from({length: 5}, () => {
            const watch = new MutationObserver(() => {});
            watch.observe(document.body, {childList: true, subtree: true});
            document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "j", bubbles: true}));
            const added = watch.takeRecords().flatMap((record) => [...record.addedNodes]);
            const drawn = added.reduce((sum, n) => sum + 1 + (n.querySelectorAll?.("*").length ?? 0), 0);
            return [drawn, document.body.querySelectorAll("*").length];
        })"""
    )
    for drawn, there in steps:
        assert 0 < drawn < 0.5 * there, steps


# ---- how it looks ---------------------------------------------------------------------------------------------------

CONTRAST = """() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const pen = canvas.getContext("2d", {willReadFrequently: true});
  const rgba = (colour, under) => {
    pen.fillStyle = `rgb(${under})`; pen.fillRect(0, 0, 1, 1);
    pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const ground = (node) => {
    const over = [];
    for (let n = node; n; n = n.parentElement) over.unshift(getComputedStyle(n).backgroundColor);
    return over.reduce((under, colour) => rgba(colour, under), [255, 255, 255]);
  };
  const low = [];
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest(":disabled, script, .skip")) continue;
    const under = ground(node);
    const style = getComputedStyle(node);
    const [a, b] = [light(rgba(node instanceof SVGElement ? style.fill : style.color, under)), light(under)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const what = `${node.tagName} ${node.getAttribute("class")}: ${node.textContent.slice(0, 30)}`;
    if (ratio < 4.5) low.push(`${what} ${ratio}`);
  }
  return low;
}"""


@pytest.mark.parametrize("kind", ["pictures", "texts", "rows"])
@pytest.mark.every(3)
def test_both_widths_and_both_themes(show: Opener, poisoned: Decisions, tmp_path: Path, kind: str) -> None:
    path = report.write(
        {"pictures": lambda: poisoned, "texts": written, "rows": tabled}[kind](), tmp_path / "page.html"
    )
    grounds = set()
    across = [(1280, "light"), (390, "dark")]
    for width, scheme in [*across, (1280, "dark"), (390, "light")] if kind == "pictures" else across:
        page = show(path, width=width, scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.click("summary")  # the legend in words
        assert "rank correlation" in page.inner_text(".legend dl")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.click("summary")
        grounds.add((scheme, page.evaluate("getComputedStyle(document.body).backgroundColor")))
        assert page.evaluate(CONTRAST) == []
        if os.environ.get("TANGENCY_SCREENSHOTS") == "1":  # to look at
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=SCREENSHOTS / f"report-{kind}-{width}-{scheme}.png", full_page=True)
    assert len(grounds) == len({colour for _, colour in grounds}) == 2


@pytest.mark.slow
def test_theme_is_switched_and_remembered(show: Opener, poisoned_page: Path) -> None:
    page = show(poisoned_page)
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) != before
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate(ground) != before


@pytest.mark.slow
def test_everything_has_a_name(show: Opener, poisoned_page: Path) -> None:
    """Buttons, links, fields and pictures say what they are to a screen reader."""
    page = show(poisoned_page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, a, select, input, svg, canvas")].filter((n) => {
            if (n.closest("[aria-hidden=true]")) return false;
            const label = n.closest("label");
            return !(n.getAttribute("aria-label") || n.textContent.trim() || (label && label.textContent.trim()));
        }).map((n) => n.outerHTML.slice(0, 100))"""
    )
    assert nameless == []
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


# ---- all kinds of data ----------------------------------------------------------------------------------------------


def test_texts_stay_texts(show: Opener) -> None:
    d = written()
    page = show(d, hash=place(d))
    assert page.evaluate("window.hacked") is None
    check_numbers(page, d, 0, 0, 0)
    assert page.inner_text(".subject .text") == d.test.show[int(d.shown[0])]
    first = int(d.explanations[0].attribution.similar[0, 0])
    assert page.text_content("[data-list=similar] .tile .text") == d.train.show[first]
    assert page.title().startswith(f"</script>{NASTY} on reviews {NASTY}")
    assert page.inner_text("h1") == f"</script>{NASTY} on reviews {NASTY}"
    page.fill("#search", f"text 10{int(d.shown[3]):02d}")
    assert listed(page) == [int(d.shown[3])]
    page.locator("[data-list=similar] .tile").first.click()
    assert NASTY in page.inner_text("dialog .text")
    assert page.locator("main script, main img").count() == 0


def hostile() -> Decisions:
    """Names and texts with marks that turn the writing around, control characters, and halves of surrogate pairs."""
    classes = ("cat\u202egod", "\x1b[31mdog\x00", "שלום", "\ud83d", "plain\u2066")
    texts = tuple(f"text {i} \udcff\u200f\r\n\tend\x85" for i in range(80))
    train = Labelled(torch.zeros(80, 1), labels(80, 5), ANIMALS[:5], show=["text"] * 80, name="reviews\u202e")
    test = Labelled(torch.zeros(40, 1), labels(40, 5, 1), ANIMALS[:5], show=["text"] * 40, name="reviews\u202e")
    for data in (train, test):  # past its own checks
        object.__setattr__(data, "classes", classes)
        object.__setattr__(data, "show", texts[: len(data)])
    made = decide(train, test, kernels=1)
    views = tuple(replace(v, title=f"{v.title}\u202e") for v in made.explanations)
    return replace(made, explanations=views, facts={**made.facts, "model": "net\udc80\u2067", "note\u202e": "\u202e"})


def data_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_marks_and_control_characters_are_shown_and_do_nothing() -> None:
    """Also halves of surrogate pairs, which no file can hold: the page is written all the same."""
    page = report.build(hostile())
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066\u2067\ud800-\udfff]", page)
    assert page.count("\u2068") == page.count("\u2069") > 0
    data = data_in(page)
    assert data["numbers"]["classes"] == [
        "cat⟨U+202E⟩god", "⟨U+001B⟩[31mdog⟨U+0000⟩", "\u2068שלום\u2069", "⟨U+D83D⟩", "plain⟨U+2066⟩"
    ]  # fmt: skip
    assert data["look"]["test"][0] == "text 0 ⟨U+DCFF⟩⟨U+200F⟩\n\tend⟨U+0085⟩"
    assert data["about"]["facts"]["note⟨U+202E⟩"] == "⟨U+202E⟩"
    assert data["numbers"]["views"][0]["title"].endswith("⟨U+202E⟩")
    assert "net⟨U+DC80⟩⟨U+2067⟩ on" in page
    assert any("shown as ⟨U+…⟩" in note for note in data["about"]["notes"])
    ordinary = data_in(report.build(written()))
    assert not any("⟨U+…⟩" in note for note in ordinary["about"]["notes"])
    assert ordinary["numbers"]["classes"][1] == "good & fine"


@pytest.mark.slow
def test_hostile_names_are_read_in_their_order(show: Opener) -> None:
    d = hostile()
    page = show(d, hash=place(d))
    check_numbers(page, d, 0, 0, 0)
    assert page.inner_text("h1").startswith("net⟨U+DC80⟩⟨U+2067⟩ on reviews⟨U+202E⟩")


def test_rows_of_a_table(show: Opener) -> None:
    d = tabled(kernels=2)
    page = show(d, hash=place(d))
    check_numbers(page, d, 0, 0, 0)
    row = d.test.show[d.shown[0]]
    cells = page.eval_on_selector_all(".subject td", "nodes => nodes.map((n) => Number(n.innerText.replace('−', '-')))")
    assert len(cells) == 24
    torch.testing.assert_close(torch.tensor(cells), row[:24], atol=1e-3, rtol=1e-3)
    assert "Of the 30 columns the first 24 are shown." in page.inner_text("#notes")
    page.keyboard.press("2")
    check_numbers(page, d, 0, 1, 0)


@pytest.mark.slow
def test_many_classes(show: Opener) -> None:
    d = pictured(c=200, noise=0.6, shown=10)
    page = show(d, width=390, hash=place(d))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "20 of 200 classes" in page.inner_text("#faithful")
    assert page.locator(".probabilities tbody tr").count() == 13  # twelve, and the rest
    assert abs(float(values(page, ".probabilities td.network").sum()) - 1) < 1e-5
    a = d.explanations[0].attribution
    sums = (a.boxes[0, 0, :, 5].double() * d.train.counts()).nan_to_num(0)
    assert float(sums.sum()) == pytest.approx(float(a.totals[0, 0]), rel=1e-4)
    assert f"Test sample #{int(d.shown[0])}" in page.inner_text("#detail")
    assert "188 other classes together" in page.inner_text(".total")
    assert "more than 24 classes" in page.inner_text("#notes")


def test_surrogates_that_follow_nothing_are_not_called_faithful(show: Opener) -> None:
    data = Labelled(torch.zeros(30, 4), labels(30, 2), ("no", "yes"))
    made = decide(data, data.select(slice(0, 8)), kernels=2, shown=2, k=3)
    f = made.explanations[0].faithfulness
    low = replace(f.intervals["tau"], low=-0.2, high=0.1)
    vain = replace(f, tau=-0.05, intervals={**f.intervals, "tau": low})
    nothing = replace(made, explanations=tuple(replace(e, faithfulness=vain) for e in made.explanations))
    assert "None of these surrogates follows the network (the best τ_K, -0.05" in nothing.table()
    page = show(nothing)
    assert "None of these surrogates follows the network" in page.inner_text("#warning")
    assert "Most faithful" not in page.inner_text("body")
    assert page.locator(".tag.best").count() == 0
    fine = replace(f, tau=0.6, intervals={**f.intervals, "tau": replace(low, low=0.5, high=0.7)})
    good = replace(made, explanations=tuple(replace(e, faithfulness=fine) for e in made.explanations))
    assert not good.warning
    assert show(good).locator("#warning").count() == 0


def test_what_is_missing_is_left_out(show: Opener) -> None:
    """Two classes, one kernel, no pictures, no intervals, numbers that are NaN, one sample: a page without a hole."""
    data = Labelled({"ids": torch.zeros(30, 4).long()}, labels(30, 2), ("no", "yes"))
    made = decide(data, data.select(slice(0, 8)), kernels=1, shown=1, k=3)
    view = made.explanations[0]
    poor = replace(view.faithfulness, intervals={}, tau=float("nan"), pearson=float("nan"))
    bare = replace(view, faithfulness=poor, values=torch.zeros(0), seconds=float("nan"))
    page = show(replace(made, explanations=(bare,), facts={}))
    assert sample(page) == int(made.shown[0])
    assert page.inner_text("h1") == "the network on the test data"
    assert "No eigenvalues" in page.inner_text("#kernel")
    assert page.locator(".chips [data-key=poisoned], .chips [data-key=flagged]").count() == 0
    assert "by number and class alone" in page.inner_text("#notes")
    assert "NaN" not in page.inner_text("body")
    assert "undefined" not in page.inner_text("body")
    assert page.is_disabled("#next")


# ---- bytes ----------------------------------------------------------------------------------------------------------


def large(s: int = 500, n: int = 50_000, kernels: int = 5, k: int = 8) -> Decisions:
    """As large as a page gets: CIFAR-10 with 500 explained samples. Which neighbours does not matter for the size."""
    c, m, make = 10, 10_000, torch.Generator().manual_seed(0)
    train = Labelled(
        torch.zeros(n, 1), labels(n, c), ANIMALS, show=smooth(n // 10, 3, 32).repeat(10, 1, 1, 1), name="large"
    )
    test = Labelled(torch.zeros(m, 1), labels(m, c, 1), ANIMALS, show=smooth(m, 3, 32, 1), name="large")
    random = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    index = lambda *shape: (n * torch.rand(*shape, generator=make) ** 4).long()  # some neighbours are popular # noqa: E731
    network = 3 * random(m, c)
    views = []
    for i in range(kernels):
        logits = network + random(m, c)
        boxes = random(s, 2, c, 6).sort(-1).values
        found = Attribution(
            network[:s].topk(2, 1).indices, random(s, 2), boxes, index(s, 2, c) // 100, random(s, 2, c, 10),
            index(s, k), random(s, k), index(s, 2, k), random(s, 2, k), index(s, 2, k), random(s, 2, k),
        )  # fmt: skip
        machine = Surrogate(torch.zeros(1, c), torch.zeros(c), 1e-3, "l2", "newton", 7, 1e-9, 0.1)
        faith, spectrum = faithfulness(logits, network, test.y, 0.7), torch.logspace(4, -4, n)
        spans, picture = torch.full((c,), 50), random(500, 500)
        views.append(Explanation(f"k{i}", "made up", machine, faith, logits, found, picture, spans, spectrum, 1.0))
    return Decisions(train, test, network, tuple(views), torch.arange(s), {"model": "large"})


@pytest.mark.slow
def test_a_large_page_stays_below_its_limit(show: Opener, tmp_path: Path) -> None:
    d = large()
    path = report.write(d, tmp_path / "large")
    assert path == tmp_path / "large" / "report.html"
    assert path.stat().st_size <= 8_000_000
    page = show(path, hash=place(d))
    assert "2,000 of 10,000 test samples" in page.inner_text("#faithful")
    similar = d.explanations[0].attribution.similar[0].tolist()
    seen = [i for i, _ in neighbours(page, "similar")]
    assert seen == similar[: len(seen)]
    if len(seen) < len(similar):
        assert f"Each list shows {len(seen)} training samples instead of 8" in page.inner_text("#notes")


def test_a_small_limit_lowers_quality_first_then_the_lists() -> None:
    d = pictured(kernels=1, shown=24, k=6)
    limit = len(report.build(d).encode())
    seen: list[tuple[int, int]] = []  # quality and neighbours, as the limit falls
    with pytest.raises(tg.InputError, match=r"limit=\d+; the page needs .* Raise limit=, or explain fewer"):
        while True:
            page = report.build(d, limit=limit)
            assert len(page.encode()) <= limit
            notes = json.loads(re.search(r'"notes":(\[.*?\])', page)[1])  # type: ignore[index]
            quality = re.search(r"training samples: WebP at quality (\d+)", notes[0])
            fewer = re.search(r"Each list shows (\d) training samples instead of 6", " ".join(notes))
            seen.append((int(quality[1]) if quality else 100, int(fewer[1]) if fewer else 6))
            limit = int(0.95 * len(page.encode()))
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == (100, 6)
    assert len({quality for quality, many in seen if many == 6}) > 2
    assert all(quality == seen[-1][0] for quality, many in seen if many < 6)
    assert seen[-1][1] < 3
    with pytest.raises(tg.InputError, match="limit='many'"):
        report.build(d, limit="many")


def test_without_pillow_pictures_are_png(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "PIL.features", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    d = pictured(kernels=1, shown=30)
    page = report.build(d)
    assert "image/png" in page
    assert "image/webp" not in page
    less = report.build(d, limit=int(0.8 * len(page)))
    assert len(less) < 0.8 * len(page)
    assert "shades a colour" in less
    assert "pip install 'tangency[report]'" in less


def test_png_is_read_by_others() -> None:
    from PIL import Image

    for image in (smooth(1, 3, 21)[0].permute(1, 2, 0).numpy(), smooth(1, 1, 13)[0, 0].numpy()):
        data = pictures.png(np.ascontiguousarray(image))
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), image)


@pytest.mark.slow
def test_large_pictures_are_made_smaller_and_this_is_said() -> None:
    page = report.build(pictured(side=224, kernels=1, shown=6, k=2))
    assert "made smaller from 224 × 224 to 96 × 96 pixels" in page
    assert "made smaller from 224 × 224 to 160 × 160 pixels" in page


def test_scaled_pictures_are_called_so() -> None:
    x = torch.randn(40, 3, 6, 6)
    data = Labelled(x, labels(40, 2), ("a", "b"))
    assert "scaled to their range" in report.build(decide(data, data, kernels=1, shown=4, k=2))
    honest = Labelled(x, labels(40, 2), ("a", "b"), show=torch.rand(40, 3, 6, 6))
    assert "scaled to their range" not in report.build(decide(honest, honest, kernels=1, shown=4, k=2))


def test_quantised_numbers_are_near() -> None:
    value = torch.randn(3, 2, 40) * torch.tensor([1.0, 1e-6, 1e6])[:, None, None] + 5
    value[0, 0, 3] = torch.nan
    packed = pack.quantised(value, 2)
    whole = np.frombuffer(base64.b64decode(packed["data"]), "<i2").reshape(3, 2, 40)
    low, step = (
        np.frombuffer(base64.b64decode(packed[key]["data"]), "<f4").reshape(3, 2, 1).astype(float)
        for key in ("low", "step")
    )
    back = np.where(whole == -32768, np.nan, low + step * whole)
    reach = value.double().nan_to_num(5).amax(2) - value.double().nan_to_num(5).amin(2)
    assert np.nanmax(np.abs(back - value.double().numpy()) / reach[..., None].numpy()) < 1 / 60_000
    assert np.isnan(back[0, 0, 3])


# ---- what cannot be used --------------------------------------------------------------------------------------------


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    d = pictured(kernels=2, shown=4, k=2)
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    (tmp_path / "folder.html").mkdir()
    for path in (file / "inside", tmp_path / "folder.html", "/proc/nowhere/report"):
        with pytest.raises(tg.InputError, match=r"cannot be written: .* Give a folder, or a .html file"):
            report.write(d, path)
    with pytest.raises(tg.InputError, match="path is a int"):
        report.write(d, 3)  # type: ignore[arg-type]
    assert report.write(d, tmp_path / "a" / "b" / "page.HTML").name == "page.HTML"
    for broken, words in (
        (replace(d, explanations=()), "at least one kernel"),
        (replace(d, shown=torch.tensor([5, 900])), "shown goes from 5 to 900; there are 90"),
        (replace(d, shown=torch.tensor([5, 5, 1, 2])), "twice"),
        (replace(d, shown=torch.tensor([], dtype=torch.long)), "no sample"),
        (replace(d, shown=torch.tensor([5, 6])), "trNTK explains 4 samples; shown names 2"),
        (replace(d, explanations=(d.explanations[0], d.explanations[0])), "two explanations have one name"),
        (replace(d, logits=d.logits[:, :1]), "at least two classes"),
        (replace(d, logits=d.logits * float("nan")), "logits of the network"),
        (replace(d, logits=d.logits[:5]), "logits of 5 samples"),
        (replace(d, test=replace(d.test, show=["a text"] * 90)), "show texts, the training data pictures"),
        ("nothing", "result is a str"),
    ):
        with pytest.raises(tg.InputError, match=words):
            report.build(broken)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["a\0.html", "a\ud800.html", "a\0", "~/\ud800/x.html"])
def test_paths_that_no_file_can_have_are_refused(path: str) -> None:
    with pytest.raises(tg.InputError, match="^path is .*, which no file can be called; needed: a path"):
        report.write(pictured(kernels=1, shown=2, k=2), path)
