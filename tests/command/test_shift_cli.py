"""`tangency shift`: a job of the user's, a page, figures, and a file of what is kept."""

import csv
import json
from pathlib import Path

import pytest

from tangency.cli import main

JOB = """
import torch
import tangency as tg

def data(n, seed, moved=0.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    x[:, 0] += moved
    ids = [f"i{k}" for k in range(n)]
    return tg.datasets.Labelled(x, (x[:, 1] > 0).long(), ("ant", "bee"), name=f"day {seed}", ids=ids)

def make():
    print("made")
    return tg.models.mlp([4, 12, 2]).eval(), data(60, 1), data(50, 2, 2.0)

def arrays():
    return None, torch.randn(30, 3), torch.randn(30, 3)

def named():
    model, source, target = make()
    return {"model": model, "source": source, "target": target, "names": ("before", "after"), "draws": 99}

def two():
    return make()[:2]

def extra():
    return {**named(), "colour": 3}

def small():
    return None, torch.randn(5, 3), torch.randn(30, 3)
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    file = tmp_path / "job.py"
    file.write_text(JOB, encoding="utf-8")
    return str(file)


def test_a_page_figures_and_what_is_kept(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, kept = tmp_path / "out" / "page.html", tmp_path / "kept.csv"
    command = ["shift", f"{job}:named", "--out", str(page), "--quiet", "--json", "--kept", str(kept), "--keep", "0.2"]
    assert main([*command, "--components", "4", "--labels", "predicted", "--layers", "0"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "made" in said.err
    assert found["shifted"]
    assert found["names"] == ["before", "after"]
    assert found["layers"] == "0"
    assert found["classes"]["of"] == "predictions"
    assert len(found["components"]) == 4
    assert found["kept"] == 12
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    rows = list(csv.DictReader(kept.open(encoding="utf-8")))
    assert len(rows) == 12
    assert rows[0]["id"] == f"i{rows[0]['sample']}"
    assert sum(float(row["weight"]) for row in rows) == pytest.approx(12, abs=1e-3)


def test_in_words(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.json"
    assert main(["shift", f"{job}:make", "--out", str(tmp_path), "--quiet", "--kept", str(kept), "--keep", "7"]) == 0
    said = capsys.readouterr().out
    assert "day 1 and day 2 differ" in said
    assert "7 of 60 source samples are kept" in said
    assert str(tmp_path / "report.html") in said
    assert len(json.loads(kept.read_text(encoding="utf-8"))) == 7
    assert main(["shift", f"{job}:arrays", "--out", str(tmp_path), "--quiet"]) == 0
    assert "source and target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("two", [], "needed: (model, source, target), or a dict with these"),
        ("extra", [], "returned colour, which tangency.shift does not take"),
        ("small", [], "source has 5 samples; needed: at least 10 in each set"),
        ("make", ["--keep", "3"], "--keep 3 says how many samples are kept; give the file for them, too"),
        ("make", ["--kept", "kept.txt"], "--kept kept.txt; needed: a file that ends with .csv or .json"),
        ("make", ["--memory", "much"], "memory='much'; needed: a number of bytes"),
        ("make", ["--layers", "9"], "the model has no layer '9'"),
    ],
)
def test_errors_are_one_line(
    job: str, function: str, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["shift", f"{job}:{function}", "--out", str(tmp_path / "page"), "--quiet", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize("keep", ["0", "1.0", "1.5", "-2", "inf", "nan"])
def test_a_part_or_a_number_is_kept(keep: str, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["shift", f"{job}:make", "--out", "page", f"--keep={keep}"])
    assert "needed: a part between 0 and 1, or a whole number of samples" in capsys.readouterr().err
