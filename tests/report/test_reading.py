"""What a reader needs to judge the page: what τ means, where to begin, and that it can be read by everyone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_decisions import opening, pictured, place, sample, tabled, written

from tangency.decisions import Decisions
from tangency.surrogate import Interval

Opener = Callable[..., Any]

# ---- what τ means, and where to begin -------------------------------------------------------------------------------


def test_the_verdict_stands_beside_tau_with_what_to_hold_it_against(show: Opener, poisoned: Decisions) -> None:
    views = [replace(v, chance=Interval(-0.11 - 0.01 * k, 0.13)) for k, v in enumerate(poisoned.explanations)]
    other = replace(poisoned.explanations[0].faithfulness, tau=0.87)
    page = show(replace(poisoned, explanations=tuple(views), second=other))
    for key, (tau, word) in enumerate([(0.8, "closely"), (0.7, "closely"), (0.6, "closely")], 1):
        page.keyboard.press(str(key))
        words = page.inner_text("#verdict")
        assert f"The surrogate follows the network {word}." in words
        assert f"in about {round(50 + 50 * tau)} of 100 pairs (τ_K {tau:.2f}); a coin has 50." in words
        assert f"shuffled labels have a τ_K from {-0.1 - 0.01 * key:.2f} to 0.13, which it clears." in words
        assert "A second network has 0.87" in words
        assert "a τ_K from 0.6 on; in part: from 0.3; hardly: below that" in words
        assert page.locator("#verdict .chance").count() == page.locator("#verdict .second").count() == 2
    assert page.locator(".kernels .word").all_inner_texts() == ["closely"] * 3
    words = show(poisoned).inner_text("#verdict")  # without either
    assert "shuffled labels have" not in words
    assert "second network" not in words


def test_balanced_accuracy_and_majority_stand_beside_accuracy(show: Opener, poisoned: Decisions) -> None:
    own = [replace(v.faithfulness, balanced_accuracy=0.123) for v in poisoned.explanations]
    views = tuple(replace(v, faithfulness=f) for v, f in zip(poisoned.explanations, own, strict=True))
    page = show(replace(poisoned, explanations=views))
    said = page.inner_text("#accuracy")
    often, majority = poisoned.majority
    for part in (poisoned.accuracy, poisoned.balanced_accuracy, majority):
        assert f"{100 * part:.1f}%" in said
    assert f"always saying “{often}”" in said
    assert page.inner_text(".kernels tbody").count("balanced 12.3%") == 3


def test_similarity_is_said_as_a_cosine_where_it_is_known(show: Opener) -> None:
    made = pictured(kernels=2)
    cosines = torch.linspace(0.9, 0.4, 24 * 6).view(24, 6)
    cosines[0, 1] = torch.nan  # of a sample with κ(x, x) = 0
    first = replace(made.explanations[0], cosines=cosines)
    page = show(replace(made, explanations=(first, made.explanations[1])), hash=place(made))
    shown = page.locator("[data-list=similar] .amount").all_inner_texts()
    kappa = first.attribution.similarity[0]
    assert float(shown[0]) == pytest.approx(float(cosines[0, 0]), abs=1e-3)
    assert shown[1].startswith("κ ")
    assert float(shown[1][2:].replace("−", "-")) == pytest.approx(float(kappa[1]), abs=1e-3)
    assert "said as a cosine" in page.inner_text("[data-list=similar] h4")
    page.keyboard.press("2")
    assert all(v.startswith("κ ") for v in page.locator("[data-list=similar] .amount").all_inner_texts())
    assert "cosine" not in page.inner_text("[data-list=similar] h4")


@pytest.mark.slow
def test_the_page_opens_on_a_misclassified_sample(show: Opener, poisoned: Decisions, poisoned_page: Path) -> None:
    assert opening(poisoned) != int(poisoned.shown[0])
    page = show(poisoned_page)
    assert sample(page) == opening(poisoned)
    assert "misclassified" in page.inner_text(".tags")
    assert page.get_attribute("#strip [aria-current]", "data-sample") == str(opening(poisoned))
    right = replace(poisoned, test=replace(poisoned.test, y=poisoned.logits.argmax(1)))
    assert sample(show(right)) == int(poisoned.shown[0])


# ---- phones ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fifty_classes_on_a_phone(show: Opener) -> None:
    """The matrix has all of them, scrolls inside its card, and keeps its names in sight."""
    d = pictured(c=50, noise=1.4, shown=10)
    page = show(d, width=390, touch=True)
    assert page.locator(".confusion tbody tr").count() == 50
    assert page.locator(".confusion thead th").count() == 51
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    # What is wider than the window lies in something that scrolls.
    wider = page.evaluate(
        """() => [...document.body.querySelectorAll("*")].filter((n) => {
            const box = n.getBoundingClientRect();
            return box.width && (box.right > innerWidth + 1 || box.left < -1)
                && !n.closest(".wide *, .choice *, .strip *, .skip, .hidden, svg *");
        }).map((n) => `${n.tagName} ${n.className}`)"""
    )
    assert wider == []
    where = """() => [".confusion thead th:last-child", ".confusion tbody tr:last-child th", ".confusion .corner"]
        .map((s) => document.querySelector(s).getBoundingClientRect()).map((b) => [b.left, b.top])"""
    page.evaluate("document.querySelector('.wide.both').scrollIntoView()")
    before = page.evaluate(where)
    page.evaluate("document.querySelector('.wide.both').scrollTo(9999, 9999)")
    after = page.evaluate(where)
    room = page.evaluate(
        "(() => { const b = document.querySelector('.wide.both').getBoundingClientRect(); "
        "return [b.left, b.top, b.right, b.bottom]; })()"
    )
    # Cells lie a pixel apart, which what stays in sight gives up at the edge.
    near = partial(pytest.approx, abs=2)
    assert after[2] == near(before[2])  # the corner stays
    assert after[0][1] == near(before[0][1])  # the heads stay above,
    assert after[1][0] == near(before[1][0])  # the names at the left,
    assert room[0] <= after[0][0] < room[2]  # and the last ones came into sight
    assert room[1] <= after[1][1] < room[3]


def test_hints_are_for_what_is_at_hand(show: Opener, poisoned: Decisions, poisoned_page: Path) -> None:
    page = show(poisoned_page)
    assert page.locator("#hints kbd").count() > 4
    assert "swipe" not in page.inner_text("body").lower()
    assert "on a click" in page.inner_text("#faithful")
    page = show(poisoned_page, width=390, touch=True, hash=place(poisoned))
    assert page.locator("kbd").count() == 0
    assert "Swipe a decision" in page.inner_text("#hints")
    assert "tap a training sample" in page.inner_text("#hints")
    words = page.inner_text("body")
    assert "on a tap" in words
    assert "Tap the picture" in words
    assert "click" not in words
    swipe = """([from, to, down]) => {
        const node = document.querySelector("#sample-title");
        const touch = (x, y) => new Touch({identifier: 1, target: node, clientX: x, clientY: y});
        node.dispatchEvent(new TouchEvent("touchstart", {touches: [touch(from, 300)], bubbles: true}));
        node.dispatchEvent(new TouchEvent("touchend", {changedTouches: [touch(to, 300 + down)], bubbles: true}));
    }"""
    for move, at in (
        ([300, 100, 10], 1),
        ([300, 200, 200], 1),
        ([300, 280, 0], 1),
        ([300, 90, 0], 2),
        ([90, 300, 0], 1),
    ):
        page.evaluate(swipe, move)
        assert sample(page) == int(poisoned.shown[at])
    for node in page.locator(".confusion thead th[title]").all()[:2]:  # a finger cannot hover
        node.dispatch_event("pointerdown")
        assert page.inner_text(".readout") == node.get_attribute("title")


# ---- axe ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["pictures", "texts", "rows"])
@pytest.mark.every(4)
def test_axe_finds_nothing_serious(show: Opener, axe: str, poisoned: Decisions, kind: str, scheme: str) -> None:
    made = {"pictures": lambda: poisoned, "texts": written, "rows": tabled}[kind]()
    views = tuple(replace(v, chance=Interval(-0.1, 0.75)) for v in made.explanations)  # one that it does not clear
    page = show(replace(made, explanations=views), scheme=scheme, width=390 if kind == "texts" else 1280)
    page.evaluate("document.querySelectorAll('details').forEach((n) => (n.open = true))")
    page.evaluate(axe)
    found, passed = page.evaluate("axe.run(document).then((r) => [r.violations, r.passes.length])")
    assert passed > 20  # it did look
    serious = [
        (v["id"], v["help"], [n["html"][:160] for n in v["nodes"][:3]])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert serious == []
