"""`tangency reproduce spectra-table8` and `spectra-transition` run small, go on where they stopped, and refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tangency as tg
from tangency.cli import main
from tangency.experiments import spectra_table8 as table8
from tangency.experiments import spectra_transition
from tangency.experiments.table import Options
from tangency.studies import Optimizer, train_two_layer

SMALL = table8.Setting(n=120, h=90, d=80, test=200, until=3e-2, epochs=300)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table8, "QUICK_SETTING", SMALL)


def options(out: Path | None, *cases: str, seeds: int = 1) -> Options:
    return Options(out=out, quick=True, seeds=seeds, cases=cases, progress=False)


@pytest.mark.usefixtures("small")
def test_table8_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Optimizer] = []

    def some(net: object, data: object, optimizer: Optimizer, **how: object) -> object:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(optimizer)
        return train_two_layer(net, data, optimizer, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(table8, "train_two_layer", some)
    with pytest.raises(KeyboardInterrupt):
        table8.reproduce_table8(options(tmp_path, "lazy", "4", "1", seeds=2))
    assert [(o.method, o.seed) for o in done] == [("adam", 0), ("adam", 1)]
    monkeypatch.setattr(table8, "train_two_layer", lambda *a, **k: done.append(a[2]) or train_two_layer(*a, **k))
    first = table8.reproduce_table8(options(tmp_path, "lazy", "4", "1", seeds=2))
    assert [(o.method, o.seed) for o in done[2:]] == [("gd", 0), ("gd", 1)]
    again = table8.reproduce_table8(options(tmp_path, "lazy", "4", "1", seeds=2))
    assert len(done) == 4
    assert again.table() == first.table()
    rows = {row["case"]: row for row in first.rows}
    assert list(rows) == ["1", "4", "lazy"]
    assert rows["1"]["optimizer"] == "GD"
    assert rows["lazy"]["seeds"] == 2
    # The classes are those of tg.spectra, of the eigenvalues that were kept.
    kept = torch.load(tmp_path / "spectra-table8-quick-1-0.pt", weights_only=True)
    for matrix, title in (("weights", "W"), ("ck", "CK"), ("ntk", "NTK")):
        pair = kept[matrix]
        assert tg.spectra.classify(pair["trained"].double(), pair["initial"].double()).kind in rows["1"][title]
    with pytest.raises(tg.InputError, match="was begun in another way; these differ: setting is"):
        monkeypatch.setattr(table8, "QUICK_SETTING", replace(SMALL, noise=0.1))
        table8.reproduce_table8(options(tmp_path, "lazy"))


@pytest.mark.usefixtures("small")
def test_a_case_is_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    row, spectra = table8.run_case(table8.CASES["1"], 0, SMALL, options(None))
    net, data = SMALL.draw(0)
    run = train_two_layer(net, data, Optimizer("gd", 5.0), until=3e-2, epochs=300, progress=False)
    assert row["r2"] == run.r2
    assert row["epochs"] == len(run.loss)
    torch.testing.assert_close(spectra["ck"]["trained"], run.network.spectra(data.x)["ck"].float())
    lazy, none = table8.run_case(table8.CASES["lazy"], 0, SMALL, options(None))
    net, data = SMALL.draw(0, torch.float64)
    assert lazy["error"] == pytest.approx(tg.studies.lazy(net, data).error)
    assert none == {}
    # What diverges is a row without numbers, not an end of everything.
    monkeypatch.setitem(table8.QUICK_CASES, "3", table8.Case(Optimizer("sgd", 300.0, 16)))
    (diverged,) = table8.reproduce_table8(options(None, "3")).rows
    assert diverged["R²"] == "nan"
    assert diverged["W"] == "diverged ×1"


def test_transition_runs_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = spectra_transition.Sweep(
        80, 60, 40, (2, 4), until=5e-2, epochs=40, top=5, followed={"GD": Optimizer("gd", 5.0)}
    )
    monkeypatch.setattr(spectra_transition, "QUICK_SWEEP", sweep)
    asked = Options(out=tmp_path, quick=True, progress=False)
    table = spectra_transition.reproduce_transition(asked)
    assert [row["lr"] for row in table.rows] == ["2", "4"]
    assert any(note.startswith("GD: ") for note in table.notes)
    assert (tmp_path / "transition.png").stat().st_size > 10_000
    assert (tmp_path / "evolution.png").exists()
    monkeypatch.setattr(spectra_transition, "rate_row", None)
    monkeypatch.setattr(spectra_transition, "train_two_layer", None)
    assert spectra_transition.reproduce_transition(asked).table() == table.table()


@pytest.mark.usefixtures("small")
def test_table8_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["reproduce", "spectra-table8", "--quick", "--seeds", "1", "--cases", "lazy,1", "--quiet"]
    assert main([*command, "--out", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in record["rows"]] == ["1", "lazy"]
    assert record["setting"]["n"] == 120
    assert (tmp_path / "spectra-table8-quick-table.json").exists()
    assert main(["reproduce", "spectra-table8", "--quick", "--cases", "5,lazy"]) != 0
    assert "--cases 5; needed: some of lazy, 4, 3, 2, 1" in capsys.readouterr().err
    assert main(["reproduce", "uci", "--quick", "--cases", "1"]) != 0
    said = capsys.readouterr().err
    assert "--cases is for spectra-table8, " in said
    assert "; uci does not take it" in said
