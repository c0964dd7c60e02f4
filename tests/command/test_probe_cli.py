"""`tangency probe`: a table, figures for machines, pictures in a folder."""

import json
from pathlib import Path

import pytest

from tangency.cli import main

JOB = """
import torch
import tangency as tg

def make():
    g = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = torch.randn(90, 4, generator=g) + 3 * torch.eye(4)[y]
    net = tg.models.initialized(lambda: tg.models.mlp([4, 16, 16, 3]), seed=0)
    tg.models.fit(net, x[:60], y[:60], epochs=10, lr=1e-2, optimizer="adam", progress=False)
    return net, (x[:60], y[:60]), (x[60:], y[60:])
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    file = tmp_path / "job.py"
    file.write_text(JOB, encoding="utf-8")
    return f"{file}:make"


def test_a_table_and_a_folder(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found"
    assert main(["probe", job, "--layers", "[13]", "--dims", "1,2,8", "--out", str(out), "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "nearest neighbours" in said
    assert "The three agree to 2 points" in said
    kept = json.loads((out / "probing.json").read_text(encoding="utf-8"))
    assert [layer["name"] for layer in kept["layers"]] == ["1", "3"]
    assert {p.name for p in out.iterdir()} == {"probing.json", "accuracy.png", "components.png", "collapse.png"}


def test_figures_for_machines(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", job, "--layers", "3", "--neighbours", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["neighbours"] == 5
    assert found["network"] > 0.8


def test_what_cannot_be_used(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", job, "--layers", "nine", "--quiet"]) == 2
    assert "no layer 'nine'" in capsys.readouterr().err
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["probe", job, "--out", str(tmp_path / "file"), "--quiet"]) == 2
