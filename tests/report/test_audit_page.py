"""The page of an audit, in a real browser: suspects are looked at, decided about, and taken to the labels."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_audits import NAMES, audited, of_targets, with_regions
from made_decisions import decide, tabled

import tangency as tg
from tangency import report
from tangency.auditing import Audit
from tangency.auditing.applied import digest, stamp
from tangency.datasets import Labelled

Opener = Callable[..., Any]


@pytest.fixture(scope="module")
def found() -> Audit:
    return with_regions(audited())


@pytest.fixture(scope="module")
def nasty() -> Audit:
    return audited("texts", n=240, c=12, wrong=20, names=NAMES, samples=26)


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Audit], Path]:
    """Each audit's page is written once."""
    made: dict[int, Path] = {}

    def write(audit: Audit) -> Path:
        if id(audit) not in made:
            made[id(audit)] = report.write(audit, tmp_path_factory.mktemp("audit"))
        return made[id(audit)]

    return write


def shown(page: Any) -> int:
    return int(page.inner_text("#suspect-title").split("#")[1])


def listed(page: Any) -> list[int]:
    return page.eval_on_selector_all("#suspect-strip .entry", "nodes => nodes.map((n) => Number(n.dataset.sample))")


def likely(a: Audit) -> list[int]:
    return [i for i in a.listed.tolist() if float(a.suspects.wrong[i]) > 0.5]


def written(page: Any, button: str, to: Path) -> Path:
    with page.expect_download() as found:
        page.click(f"#export-{button}")
    path = to / found.value.suggested_filename
    found.value.save_as(path)
    return path


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


# ---- what is shown --------------------------------------------------------------------------------------------------


def test_a_suspect_is_shown_with_what_speaks_against_it(
    show: Opener, found: Audit, page_of: Callable[[Audit], Path]
) -> None:
    page, s = show(page_of(found)), found.suspects
    order = likely(found)
    assert listed(page) == order == s.first().tolist()
    assert len(order) >= 9
    for at in range(3):
        i = order[at]
        assert shown(page) == i
        verdict = page.inner_text("#suspect .verdict")
        assert f"Given label\n✕ {found.train.classes[int(s.given[i])]}".replace("✕ ", "") in verdict.replace("✕ ", "")
        assert f"Suggested\n{found.train.classes[int(s.suggested[i])]}" in verdict
        for name, value in (("wrong", s.wrong[i]), ("margin", s.margin[i])):
            assert float(page.get_attribute(f"#{name}", "data-value")) == pytest.approx(float(value), rel=1e-5)
        tiles = page.eval_on_selector_all(
            "#suspect .tile", "nodes => nodes.map((n) => [Number(n.dataset.sample), n.innerText, n.className])"
        )
        assert [t[0] for t in tiles] == found.neighbours[at].tolist()
        for (j, words, kind), cosine in zip(tiles, found.similarity[at].tolist(), strict=True):
            assert found.train.classes[int(s.given[j])] in words
            assert f"{cosine:.3f}" in words
            assert ("strange" in kind) == ("≠" in words) == bool(s.given[j] != s.given[i])
        assert found.train.ids is not None
        assert found.train.ids[i] in page.inner_text("#suspect")
        page.keyboard.press("j")
    against = sum(bool(s.given[j] != s.given[order[0]]) for j in found.neighbours[0].tolist())
    page.keyboard.press("k")
    page.click("#suspect-strip .entry >> nth=0")
    assert f"{against} of 6 have another label" in page.inner_text("#suspect")


def test_the_other_sections(show: Opener, found: Audit, page_of: Callable[[Audit], Path]) -> None:
    page = show(page_of(found))
    for line in found.words().splitlines():
        assert line.removeprefix("Caution: ") in page.inner_text("#overview").replace("Caution: ", "")
    assert page.locator(".caution").count() == 1
    rate = float(page.inner_text("#noise-rate .big").removesuffix("%"))
    assert rate == pytest.approx(100 * found.noise.rate, abs=0.051)
    assert page.locator("#margins .bar-wrong").count() > 0
    assert page.locator("#margins .cut").count() == 1
    numbers = page.eval_on_selector_all("#margins .confusion td.hit", "nodes => nodes.map((n) => n.innerText)")
    assert [float(v) for v in numbers] == pytest.approx(found.noise.counts.diagonal().round(decimals=0).tolist(), abs=1)
    pairs = page.eval_on_selector_all(
        "#copies-within .pair",
        "nodes => nodes.map((n) => [...n.querySelectorAll('.tile')].map((t) => Number(t.dataset.sample))"
        ".concat(n.innerText))",
    )
    assert [30, 40] in [p[:2] for p in pairs]
    assert [10, 20] in [p[:2] for p in pairs]
    assert ["different labels" in p[2] for p in pairs] == sorted(
        ("different labels" in p[2] for p in pairs), reverse=True
    )
    assert next("different labels" in p[2] and "equal" in p[2] for p in pairs if p[:2] == [30, 40])
    leak = page.locator("#leaks .pair").first.locator(".tile")
    assert [leak.nth(k).get_attribute("data-sample") for k in (0, 1)] == ["7", "50"]
    assert [leak.nth(k).get_attribute("data-set") for k in (0, 1)] == ["test", "train"]
    assert found.test is not None
    assert found.test.classes[int(found.test.y[7])] in leak.nth(0).inner_text()
    assert "9 of 20 test samples wrong" in page.inner_text("#regions")
    assert "take kind 0 for kind 1" in page.inner_text("#regions")
    assert page.locator("#regions .tile").count() == 12
    assert found.cleaning is not None
    assert page.locator("#cleaning-chart .spot").count() == 2 * len(found.cleaning.removed)
    assert "93.0%" in page.inner_text("#retrained")
    page.click("#leaks .tile >> nth=0")
    assert "Test sample #7" in page.inner_text("dialog")
    page.keyboard.press("Escape")
    page.click("#margins .mixed .link >> nth=0")
    a, b, _, _ = found.noise.pairs()[0]
    expected = [
        i for i in found.listed.tolist() if (int(found.suspects.given[i]), int(found.suspects.suggested[i])) == (a, b)
    ]
    assert listed(page) == expected


# ---- decisions ------------------------------------------------------------------------------------------------------


def test_decisions_by_mouse_and_by_key_are_remembered(
    show: Opener, found: Audit, page_of: Callable[[Audit], Path]
) -> None:
    page, order = show(page_of(found)), likely(found)
    page.locator("#suspect").scroll_into_view_if_needed()
    assert page.inner_text("#progress") == f"0 of {len(order)} decided"
    page.click("#keep")
    assert page.evaluate("document.activeElement.id") == "keep"  # drawn again, and still there
    page.keyboard.press("f")
    page.keyboard.press("d")
    assert shown(page) == order[3]
    page.select_option("#fix-to", label="kind 3" if int(found.suspects.given[order[3]]) != 3 else "kind 2")
    page.click("#fix")
    assert page.inner_text("#progress") == f"4 of {len(order)} decided"
    page.keyboard.press("d")
    page.keyboard.press("u")  # taken back
    assert shown(page) == order[4]
    assert page.inner_text("#progress") == f"4 of {len(order)} decided"
    page.keyboard.press("ArrowLeft")
    assert "Decided: fix to kind" in page.inner_text("#now")
    page.keyboard.press("n")
    assert shown(page) == order[4]
    marks = lambda: page.eval_on_selector_all("#suspect-strip .entry", "nodes => nodes.map((n) => n.dataset.action)")  # noqa: E731
    assert marks()[:5] == ["keep", "fix", "drop", "fix", ""]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert marks()[:5] == ["keep", "fix", "drop", "fix", ""]
    assert page.inner_text("#progress") == f"4 of {len(order)} decided"
    assert "remembers" in page.inner_text("#memory")
    page.evaluate("scrollTo(0, 0)")  # nobody decides about what cannot be seen
    page.keyboard.press("d")
    assert page.inner_text("#progress") == f"4 of {len(order)} decided"
    assert page.evaluate("document.querySelector('#suspect').getBoundingClientRect().top < innerHeight")


def test_what_is_listed(show: Opener, found: Audit, page_of: Callable[[Audit], Path]) -> None:
    page, order, s = show(page_of(found)), likely(found), found.suspects
    page.locator("#suspect").scroll_into_view_if_needed()
    page.keyboard.press("a")
    page.keyboard.press("d")
    page.click("[data-key=undecided]")
    assert listed(page) == order[2:]
    page.keyboard.press("a")
    assert listed(page) == order[3:]
    assert shown(page) == order[3]
    page.click("[data-key=keep]")
    assert listed(page) == [order[0], order[2]]
    page.click("[data-key=all]")
    page.click("[data-key=any]")
    assert listed(page) == found.listed.tolist()
    page.select_option("#by-given", label="kind 1")
    mine = [i for i in found.listed.tolist() if int(s.given[i]) == 1]
    assert listed(page) == mine
    page.select_option("#by-suggested", label="kind 0")
    assert listed(page) == [i for i in mine if int(s.suggested[i]) == 0]
    page.fill("#seek", f"#{order[0]}")
    page.select_option("#by-given", value="")
    page.select_option("#by-suggested", value="")
    assert listed(page) == [order[0]]
    page.fill("#seek", "no such thing")
    page.click("#suspect-strip >> text=Show all")
    assert listed(page) == found.listed.tolist()


@pytest.fixture(scope="module")
def decided(nasty: Audit) -> dict[int, tuple[str, int | None]]:
    """Of every given class one sample, dropped, kept, or fixed to the next class."""
    out: dict[int, tuple[str, int | None]] = {}
    for k, i in enumerate(nasty.listed.tolist()):
        out[i] = (("drop", None), ("keep", None), ("fix", (int(nasty.suspects.given[i]) + 1) % 12))[k % 3]
    return out


def decide_all(page: Any, decided: dict[int, tuple[str, int | None]]) -> None:
    page.click("[data-key=all]")
    page.locator("#suspect").scroll_into_view_if_needed()
    for i, (action, label) in decided.items():
        assert shown(page) == i
        if label is not None:
            page.select_option("#fix-to", value=str(label))
        page.click(f"#{action}")


@pytest.mark.every(2)
def test_what_was_decided_is_applied(
    show: Opener, nasty: Audit, page_of: Callable[[Audit], Path], decided: dict[int, Any], tmp_path: Path
) -> None:
    """Every name comes through, whatever is in it: by JSON, by CSV, and back into a page."""
    page = show(page_of(nasty))
    decide_all(page, decided)
    labels = nasty.train.y.clone()
    keep = torch.ones(len(labels), dtype=torch.bool)
    for i, (action, label) in decided.items():
        keep[i] = action != "drop"
        labels[i] = labels[i] if label is None else label
    assert len({int(label) for _, label in decided.values() if label is not None}) > 6
    for kind in ("json", "csv"):
        clean = tg.auditing.apply(nasty.train, written(page, kind, tmp_path))
        assert clean.y.tolist() == labels[keep].tolist()
    exported = json.loads((tmp_path / "decisions.json").read_text(encoding="utf-8"))
    assert {k: v for k, v in exported.items() if k != "decisions"} == {
        "tangency_audit": 1, "samples": 240, "data": digest(nasty.train),
    }  # fmt: skip
    assert nasty.train.ids is not None
    with written(page, "labels", tmp_path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["sample"]) for r in rows] == keep.nonzero()[:, 0].tolist()
    assert [r["label"] for r in rows] == [NAMES[int(k)] for k in labels[keep]]
    assert [r["id"] for r in rows] == [nasty.train.ids[int(r["sample"])] for r in rows]
    cells = [
        c for line in csv.reader((tmp_path / "decisions.csv").open(encoding="utf-8-sig", newline="")) for c in line
    ]
    assert not [c for c in cells if c[:1] in "=+@\t\r" and c]  # nothing that a spreadsheet would run
    assert "-1" in cells  # which is a number
    for kind in ("json", "csv"):
        other = show(page_of(nasty))
        other.set_input_files("#import", tmp_path / f"decisions.{kind}")
        other.wait_for_selector("#file-said:not(:empty)")
        assert f"{len(decided)} decisions read" in other.inner_text("#file-said")
        (tmp_path / "again").mkdir(exist_ok=True)
        again = written(other, "json", tmp_path / "again")
        assert json.loads(again.read_text(encoding="utf-8")) == exported
        other.click("#undo")
        assert other.inner_text("#progress").startswith("0 of")
    assert page.evaluate("window.hacked") is None


def test_a_quoted_formula_and_the_formula_are_two_classes(show: Opener, tmp_path: Path) -> None:
    a = audited("texts", c=4, names=("=x", "'=x", "''=x", "-1"), m=0)
    page = show(report.write(a, tmp_path))
    order = a.listed.tolist()[:8]
    wanted = {i: (int(a.suspects.given[i]) + 1 + k % 3) % 4 for k, i in enumerate(order)}
    decide_all(page, {i: ("fix", label) for i, label in wanted.items()})
    clean = tg.auditing.apply(a.train, written(page, "csv", tmp_path))
    assert {i: int(clean.y[i]) for i in order} == wanted


def test_files_of_other_data_are_refused(
    show: Opener, found: Audit, page_of: Callable[[Audit], Path], tmp_path: Path
) -> None:
    page = show(page_of(found))
    good = {"tangency_audit": 1, "samples": 160, "data": digest(found.train), "decisions": []}
    one = {"sample": 3, "action": "drop"}
    head = "sample,id,given,action,label,audited\n"
    about = stamp(160, digest(found.train))
    wide = "sample,given,action,label,audited\n"
    own = found.train.classes[int(found.train.y[3])]
    other = "kind 0" if own != "kind 0" else "kind 1"
    for name, text, words in (
        (
            "a.json",
            json.dumps(good | {"data": digest(found.train) | {"inputs": "0"}, "decisions": [one]}),
            "about other data: the inputs are not those of this page",
        ),
        ("aa.json", json.dumps(good | {"data": None, "decisions": [one]}), "the labels and the classes and the inputs"),
        ("b.json", json.dumps(good | {"samples": 7}), "this page is about 160"),
        ("c.json", "{", "neither JSON nor CSV"),
        ("d.json", json.dumps({"decisions": [one]}), "no decisions of an audit"),
        (
            "e.json",
            json.dumps(good | {"decisions": [one, {"sample": 160, "action": "drop"}]}),
            "does not fit: sample 160",
        ),
        ("f.json", json.dumps(good | {"decisions": [{"sample": 1, "action": "fix", "label": "x"}]}), "does not fit"),
        ("g.csv", f"{head}3,,{other},drop,,{about}\n", "sample 3 was"),
        ("gg.csv", f"{head}3,another.png,{own},drop,,{about}\n", "sample 3 was called “another.png” there and is"),
        ("h.csv", "sample,action\n3,drop\n", "no column given, label, audited"),
        ("hh.csv", f"sample,given,action,label\n3,{own},drop,\n", "no column audited"),
        ("i.csv", f"{head}3,,{own},burn,,{about}\n", "does not fit: sample 3, burn"),
        ("k.csv", f"{wide}3,{own},drop,,{stamp(45, digest(found.train))}\n", "45 samples; this page is about 160"),
        ("l.csv", f"{wide}3,{own},drop,,{stamp(160, {**digest(found.train), 'inputs': '0'})}\n", "the inputs are not"),
        ("m.csv", f"{wide}3,{own},drop,,{about}\n4,{own},drop,,audit 1; samples 9\n", "9 samples; this page"),
        ("n.csv", f"{wide}3,{own},drop,,\n", "which is no data"),
        ("o.csv", "", "it is empty"),
        ("p.csv", f"{wide}3,{own},drop\n", "row 2 has 3 cells and the first one 5"),
        ("q.csv", f"{wide[:-1]},sample\n3,{own},drop,,{about},4\n", "two of its columns are called sample"),
        ("r.csv", f'{wide}3,"{own},drop,,{about}\n', "is not closed"),
        ("s.csv", f'{wide}3,"{own}"x,drop,,{about}\n', "goes on after a closing"),
        ("t.csv", f"{wide}3,{'a' * 140_000},drop,,{about}\n", "a cell of 140,000 characters"),
        ("u.csv", f"{wide}３,{own},drop,,{about}\n", "does not fit: sample NaN"),
        ("v.csv", f"{wide}3,{own},drop,,{about}\n" + f"3,{own},keep,,{about}\n", "sample 3 is in it twice"),
        ("w.json", json.dumps(good | {"tangency_audit": True}), "no decisions of an audit"),
        ("x.json", "[" * 200_000 + "]" * 200_000, "it holds no decisions"),
        ("y.json", json.dumps(good)[:-3] + "[" + '{"sample":' + "[" * 5000 + "]" * 5000 + "}]}", "does not fit"),
        ("z.json", json.dumps(good | {"decisions": ["\u202e\u001b[31m"]}), "does not fit: sample nothing"),
        ("\u202etxt.csv", "", "it is empty"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        page.set_input_files("#import", tmp_path / name)
        called = name.replace("\u202e", "⟨U+202E⟩")
        page.locator("#file-said", has_text=f"{called} was refused").wait_for()
        assert words in page.inner_text("#file-said")
        assert page.is_disabled("#undo")  # nothing was decided
    (tmp_path / "j.csv").write_text(f"{head}3,,{own},drop,,{about}\n", encoding="utf-8")
    page.set_input_files("#import", tmp_path / "j.csv")
    page.wait_for_selector("#undo:enabled")


@pytest.mark.slow
def test_without_storage_the_page_says_so_and_still_writes(
    show: Opener, found: Audit, page_of: Callable[[Audit], Path], tmp_path: Path
) -> None:
    page = show(page_of(found))
    page.add_init_script("Object.defineProperty(window, 'localStorage', {get() { throw new Error('blocked'); }})")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert "does not let the page remember" in page.inner_text("#memory")
    page.locator("#suspect").scroll_into_view_if_needed()
    page.keyboard.press("d")
    assert "1 of" in page.inner_text("#progress")
    clean = tg.auditing.apply(found.train, written(page, "json", tmp_path))
    assert len(clean) == 159


@pytest.mark.slow
def test_decisions_about_other_labels_are_not_mixed_up(show: Opener, found: Audit, tmp_path: Path) -> None:
    path = report.write(found, tmp_path / "page.html")
    page = show(path, hash=f"#suspect={likely(found)[2]}")  # the address says which is shown
    assert shown(page) == likely(found)[2]
    page.locator("#suspect").scroll_into_view_if_needed()
    page.keyboard.press("d")
    for audit, many in ((audited(wrong=8), 0), (found, 1)):  # the same browser, other labels; and these again
        report.write(audit, path)
        page.reload()
        page.wait_for_selector("html[data-ready]")
        assert page.inner_text("#progress").startswith(f"{many} of")


# ---- how it looks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.every(3)
def test_nothing_serious_and_nothing_cut_off(
    show: Opener, axe: str, found: Audit, nasty: Audit, page_of: Callable[[Audit], Path], width: int, scheme: str
) -> None:
    page = show(page_of(found if width > 400 else nasty), width=width, scheme=scheme, touch=width < 400)
    page.evaluate("document.querySelectorAll('details').forEach((n) => (n.open = true))")
    page.locator("#suspect").scroll_into_view_if_needed()
    page.click("#keep")
    page.click("#drop")
    page.keyboard.press("ArrowLeft")
    assert wide(page) == []
    page.evaluate(axe)
    violations, passed = page.evaluate("axe.run(document).then((r) => [r.violations, r.passes.length])")
    assert passed > 20
    assert [
        (v["id"], v["help"], [n["html"][:160] for n in v["nodes"][:3]])
        for v in violations
        if v["impact"] in ("serious", "critical")
    ] == []
    if width < 400:
        assert page.locator("kbd").count() == 0
        assert "Swipe left or right" in page.inner_text("#suspect-hints")
        assert page.evaluate("window.hacked") is None
        assert NAMES[-1] in page.inner_text("#by-given")


@pytest.mark.slow
def test_two_hundred_classes_with_long_names_on_a_phone(show: Opener) -> None:
    names = tuple(f"a kind of thing with a very long name, which goes on and on, number {k}" for k in range(200))
    a = audited("rows", n=400, c=200, m=0, wrong=12, names=names, ids=False)
    page = show(a, width=390, touch=True)
    assert wide(page) == []
    assert "The 20 of 200 classes" in page.inner_text("#margins")
    assert page.locator("#fix-to option").count() == 199
    assert "There was no test set" in page.inner_text("#leaks")
    assert "no test set to measure it on" in page.inner_text("#cleaning")
    assert page.locator("#suspect .across tbody tr").count() == 7


@pytest.mark.slow
def test_a_step_draws_little_also_with_many_suspects(show: Opener) -> None:
    a = audited("pictures", n=1600, m=0, wrong=300, samples=1500, twice=False, ids=False)
    page = show(a)
    page.click("[data-key=all]")
    page.click("[data-key=undecided]")
    assert len(listed(page)) == 150  # of 1500, more as the strip is scrolled
    page.locator("#suspect").scroll_into_view_if_needed()
    for key in ("j", "a", "d", "u"):
        drawn, there = page.evaluate(
            """(key) => {
                const watch = new MutationObserver(() => {});
                watch.observe(document.body, {childList: true, subtree: true});
                document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
                const added = watch.takeRecords().flatMap((record) => [...record.addedNodes]);
                return [added.reduce((sum, n) => sum + 1 + (n.querySelectorAll?.("*").length ?? 0), 0),
                    document.body.querySelectorAll("*").length];
            }""",
            key,
        )
        assert 0 < drawn < 0.25 * there, (key, drawn, there)
    page.evaluate("document.querySelector('#suspect-strip').scrollTo(0, 99999)")
    page.locator("#suspect-strip .entry").nth(150).wait_for(state="attached")


def test_numbers_only_and_nothing_wrong(show: Opener) -> None:
    """No pictures, no test set, two classes, no suspects, no copies: a page without a hole."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)) + 9 * torch.eye(3)[torch.arange(60) % 2]
    a = tg.auditing.audit_gram(x @ x.T, torch.arange(60) % 2, samples=5, progress=False)
    a = replace(a, suspects=replace(a.suspects, wrong=torch.zeros(60)), copies=replace(a.copies, **{
        k: getattr(a.copies, k)[:0] for k in ("pairs", "similarity", "chance", "exact", "contradictory")
    }))  # fmt: skip
    page = show(a, width=390)
    words = page.inner_text("body")
    assert "No label is more likely wrong than right" in words
    assert "No training samples are copies of one another." in words
    assert "No region stands out" in words
    assert "The training data" in page.inner_text("h1")
    assert listed(page) == a.listed.tolist()
    assert page.locator("#suspect .subject *").count() == 0
    assert "NaN" not in words
    assert "undefined" not in words
    assert wide(page) == []


def test_real_targets_are_kept_or_dropped(show: Opener, tmp_path: Path) -> None:
    a = of_targets()
    page = show(a)
    assert set(likely(a)) >= set(range(4))
    given = [float(v) for v in (a.suspects.given[a.listed[0], 0], a.suspects.suggested[a.listed[0], 0])]
    seen = page.eval_on_selector_all("#suspect .verdict dd strong", "n => n.map((v) => v.innerText.replace('−', '-'))")
    assert [float(v) for v in seen] == pytest.approx(given, rel=1e-3)
    assert page.locator("#fix, #fix-to, #export-labels, #by-given").count() == 0
    page.locator("#suspect").scroll_into_view_if_needed()
    for key in ("f", "d", "a"):
        page.keyboard.press(key)
    said = json.loads(written(page, "json", tmp_path).read_text(encoding="utf-8"))
    assert said["samples"] == 120
    assert sorted((d["sample"], d["action"]) for d in said["decisions"]) == sorted(
        [(int(a.listed[0]), "drop"), (int(a.listed[1]), "keep")]
    )
    assert written(page, "csv", tmp_path).read_text(encoding="utf-8").count("\n") == 3


# ---- with decisions; bytes; errors ----------------------------------------------------------------------------------


def test_decisions_and_an_audit_on_one_page(show: Opener, found: Audit, tmp_path: Path) -> None:
    assert found.test is not None
    decisions = decide(found.train, found.test, kernels=2, shown=12, k=4)
    page = show(report.write(decisions, tmp_path / "both.html", audit=found))
    assert page.locator("h1").count() == 1
    assert page.locator("main > section").count() == 11
    sample = lambda: page.inner_text("#sample-title")  # noqa: E731
    first, suspect = sample(), shown(page)
    page.keyboard.press("j")  # for what can be seen: nothing yet, so the first
    assert sample() != first
    assert shown(page) == suspect
    second = sample()
    page.evaluate("document.querySelector('#suspects').scrollIntoView()")
    page.keyboard.press("j")
    assert sample() == second
    assert shown(page) == likely(found)[1]
    page.keyboard.press("d")
    assert page.inner_text("#progress").startswith("1 of")
    page.keyboard.press("2")  # the other kernel of the decisions
    assert page.get_attribute("#kernels button >> nth=1", "aria-pressed") == "true"
    page.wait_for_url(lambda url: f"suspect={likely(found)[2]}" in url and "kernel=CK" in url)
    clean = tg.auditing.apply(found.train, written(page, "json", tmp_path))
    assert len(clean) == 159


@pytest.mark.slow
def test_a_small_limit_lowers_quality_then_neighbours_then_suspects() -> None:
    a = audited("pictures", n=200, m=0, samples=120, wrong=30)
    limit = len(report.build(a).encode())
    seen: list[tuple[int, int, int]] = []
    with pytest.raises(tg.InputError, match=r"limit=\d+; the page needs .* and one suspect. Raise limit="):
        while True:
            page = report.build(a, limit=limit)
            assert len(page.encode()) <= limit
            notes = " ".join(json.loads(page.split('"notes":', 1)[1].split("]", 1)[0] + "]"))
            number = lambda before, other, text=notes: (  # noqa: E731
                int(text.split(before, 1)[1].split()[0].rstrip(".,")) if before in text else other
            )
            suspects = (
                int(notes.split(" suspects are listed instead")[0].split()[-1])
                if "are listed instead" in notes
                else 120
            )
            seen.append((number("quality ", 100), number("Each suspect has ", 6), suspects))
            limit = int(0.84 * len(page.encode()))
    assert seen[0] == (100, 6, 120)
    assert len({q for q, _, _ in seen}) > 2
    assert seen[-1][1] == 1
    assert seen[-1][2] < 60
    assert seen == sorted(seen, reverse=True)
    assert '"ids":{"' in page  # of the samples on the page alone
    assert "Names are there of the samples on the page alone" in page


def test_errors_say_what_to_do(found: Audit, tmp_path: Path) -> None:
    assert found.test is not None
    decisions = decide(found.train, found.test, kernels=1, shown=4, k=2)
    for given, audit, words in (
        (
            3,
            None,
            "result is a int; needed: tangency.decisions.Decisions, as tg.explain makes them, or tangency.auditing",
        ),
        (decisions, 3, "audit is a int; needed: tangency.auditing.Audit, as tg.audit makes it"),
        (
            found,
            found,
            r"two audits were given; needed: write\(audit, path\), or write\(decisions, path, audit=audit\)",
        ),
        (tabled(kernels=1), found, "about 160 and 60 training and test samples, the decisions about 90 and 40"),
        (decisions, of_targets(), "audit is about real targets"),
        (
            decisions,
            replace(found, train=replace(found.train, classes=("a", "b", "c", "d"))),
            "audit has the classes a, b, c, d, the decisions kind 0",
        ),
        (replace(found, listed=found.listed + 200), None, "its training set has 160"),
        (replace(found, train=found.train.select(slice(0, 9))), None, "labels of 160 samples; its training set has 9"),
        (
            replace(found, test=Labelled(torch.zeros(60, 2), found.test.y, found.test.classes)),
            None,
            "the test data show rows, the training data pictures",
        ),
    ):
        with pytest.raises(tg.InputError, match=words):
            report.write(given, tmp_path, audit=audit)  # type: ignore[arg-type]
