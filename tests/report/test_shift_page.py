"""The page of a shift, in a real browser: what it says, the picture, the samples, and the files that it writes."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_decisions import NASTY, smooth

import tangency as tg
from tangency import report
from tangency.datasets import Labelled
from tangency.errors import InputError
from tangency.representations import Shift

Opener = Callable[..., Any]


def data(kind: str, n: int, seed: int, moved: float, ids: bool = True) -> Labelled:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=draw) + moved * torch.tensor([1.0, 0, 0, 0, 0, 0])
    y = (x[:, 1] > 0).long()
    shown: dict[str, Any] = {}
    if kind == "pictures":
        shown = {"show": smooth(n, 3, 24, seed)}
    if kind == "texts":
        shown = {"show": [f"text {i} {NASTY} and so on" for i in range(n)]}
    named = [f"=file {i}, “{seed}”" for i in range(n)]
    inputs = x if kind == "rows" else {"x": x}
    name = f"<b>set</b> {seed}"
    return Labelled(inputs, y, ("ant", f"bee {NASTY}"), name=name, ids=named if ids else None, **shown)


class Passing(torch.nn.Module):
    """Takes dicts, which no picture can be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)
        torch.nn.init.eye_(self.one.weight)
        torch.nn.init.zeros_(self.one.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def shifted(kind: str = "pictures", n: int = 90, m: int = 70, moved: float = 1.2, **options: Any) -> Shift:
    sets = data(kind, n, 1, 0.0, **options), data(kind, m, 2, moved, **options)
    return tg.shift(Passing().eval(), *sets, draws=99, progress=False)


@pytest.fixture(scope="module")
def found() -> Shift:
    return shifted()


@pytest.fixture(scope="module")
def page_file(found: Shift, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(found, tmp_path_factory.mktemp("shift"))


def wide(page: Any) -> list[str]:
    """What is wider than the window and does not lie in something that scrolls."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return page.evaluate(
        """() => [...document.body.querySelectorAll("*")].filter((n) => {
            const box = n.getBoundingClientRect();
            return box.width && (box.right > innerWidth + 1 || box.left < -1)
                && !n.closest(".wide *, .choice *, .strip *, nav *, .skip, .hidden, svg *");
        }).map((n) => `${n.tagName} ${n.className}`)"""
    )


def test_what_was_found_is_said(show: Opener, found: Shift, page_file: Path) -> None:
    page = show(page_file)
    assert found.shifted
    assert page.inner_text("#shift-title") == "<b>set</b> 1 against <b>set</b> 2"
    assert f"{found.classifier.auc.value:.2f}" in page.inner_text("#auroc")
    assert "0.02" in page.inner_text("#p-value")
    said = page.inner_text("#shift-words")
    assert "differ: p = 0.02" in said
    assert page.locator("#shift-words li").count() == 4
    assert page.locator("#components-chart .component").count() == len(found.components)
    assert page.locator("#classes tbody tr").count() == 2
    assert "no difference found" in page.inner_text("#balance")


def test_components_are_chosen_in_the_picture(show: Opener, found: Shift, page_file: Path) -> None:
    page = show(page_file)
    first, second = sorted((found.components.order[:2] + 1).tolist())
    labels = page.locator("#plane .axis")
    assert labels.all_text_contents() == [f"component {first}", f"component {second}"]
    assert page.locator("#plane .contour").count() == 2
    other = next(k for k in range(1, 5) if k not in (first, second))
    page.select_option("#axis-x", str(other - 1))
    assert labels.first.text_content() == f"component {other}"
    page.locator("#components-chart .component").first.click()  # the farthest apart
    assert labels.first.text_content() == f"component {int(found.components.order[0]) + 1}"
    page.locator("#plane svg").hover()  # waits until the page has scrolled there
    box = page.locator("#plane svg").bounding_box()
    seen = False
    for k in range(12):  # along a line through the middle there are samples
        page.mouse.move(box["x"] + box["width"] * (0.2 + 0.05 * k), box["y"] + box["height"] * 0.6)
        seen = seen or page.locator("#plane .tip").is_visible()
    assert seen


def test_samples_that_carry_it(show: Opener, found: Shift, page_file: Path) -> None:
    page = show(page_file)
    for side, numbers in zip(("source", "target"), found.carriers(12), strict=True):
        shown = page.eval_on_selector_all(f"#carriers-{side} .tile", "all => all.map((n) => Number(n.dataset.sample))")
        assert shown[:12] == numbers.tolist()
    page.locator("#carriers-target .tile").first.click()
    dialog = page.locator("dialog[open]")
    number = int(found.carriers(1)[1])
    assert f"<b>set</b> 2, sample #{number}" in dialog.inner_text()
    assert f"=file {number}, “2”" in dialog.inner_text()
    assert "times likelier in <b>set</b> 2" in dialog.inner_text()
    assert dialog.locator("canvas").count() == 1
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")  # by its event `close`, which a busy machine brings late


def test_files_of_what_is_kept(show: Opener, found: Shift, page_file: Path, tmp_path: Path) -> None:
    page = show(page_file)
    want = found.filter(17)
    page.evaluate(
        "(n) => { const s = document.getElementById('keep'); s.value = n; s.dispatchEvent(new Event('input')); }", 17
    )
    assert page.inner_text("#kept-words").startswith("17 of 90 ")
    files = {}
    for kind in ("json", "csv"):
        with page.expect_download() as got:
            page.click(f"#export-{kind}")
        files[kind] = tmp_path / got.value.suggested_filename
        got.value.save_as(files[kind])
    kept = json.loads(files["json"].read_text(encoding="utf-8"))["kept"]
    assert [row["sample"] for row in kept] == want.index.tolist()
    assert [row["weight"] for row in kept] == pytest.approx(want.weights.tolist(), rel=1e-4)
    assert kept[0]["id"] == f"=file {kept[0]['sample']}, “1”"
    rows = list(csv.DictReader(files["csv"].open(newline="", encoding="utf-8")))
    assert [int(row["sample"]) for row in rows] == want.index.tolist()
    assert rows[0]["id"] == f"'=file {rows[0]['sample']}, “1”"  # not a formula of a spreadsheet
    page.click("text=Likelier in the target")
    assert page.inner_text("#kept-words").startswith(f"{len(found.filter())} of 90 ")


@pytest.mark.parametrize("kind", ["texts", "rows", "nothing"])
@pytest.mark.every(2)
def test_other_looks_on_a_phone(show: Opener, kind: str, tmp_path: Path) -> None:
    made = shifted(kind, moved=0.0, ids=kind == "rows")
    page = show(report.write(made, tmp_path), width=390, scheme="dark", touch=True)
    assert wide(page) == []
    assert "No difference was found between the two sets" in page.inner_text("#overview")
    page.locator("#carriers-source .tile").first.click()
    assert page.locator("dialog[open]").count() == 1
    assert not page.evaluate("window.hacked")


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
@pytest.mark.every(2)
def test_nothing_serious_and_nothing_cut_off(show: Opener, page_file: Path, axe: str, width: int, scheme: str) -> None:
    page = show(page_file, width=width, scheme=scheme)
    assert wide(page) == []
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert [(v["id"], v["nodes"][0]["html"][:160]) for v in serious] == []


def test_arrays_alone_have_a_page_too(show: Opener, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 2, generator=draw), torch.randn(30, 2, generator=draw) + 9
    page = show(report.write(tg.shift(None, a, b, draws=99, progress=False), tmp_path))
    assert page.inner_text("#shift-title") == "source against target"
    assert page.inner_text("#kept-words").startswith("4 of 40 ")  # none is likelier: a tenth to begin with
    assert "neither pictures nor rows" in page.inner_text("#notes")


def test_a_limit_shows_fewer_samples_and_too_small_a_one_is_refused(found: Shift) -> None:
    whole = report.build(found, limit=None)
    less = report.build(found, limit=len(whole.encode()) - 20_000)
    assert len(less) < len(whole)
    with pytest.raises(InputError, match="the page needs .* bytes even with the smallest pictures and few samples"):
        report.build(found, limit=5000)
    with pytest.raises(InputError, match="audit= goes with decisions"):
        report.build(found, audit=found)  # type: ignore[arg-type]
