"""`tangency audit` and `tangency audit apply`: a job of the user's, a page, decisions, labels."""

import csv
import json
from pathlib import Path

import pytest
import torch

import tangency as tg
from tangency.auditing.applied import digest
from tangency.cli import main

JOB = """
import torch
import tangency as tg

def data(n=60):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = torch.randn(n, 3, generator=g) + 3 * torch.eye(3)[y]
    y[:4] = (y[:4] + 1) % 3
    return tg.datasets.Labelled(x, y, ("ant", "bee", "=1+1"), name="insects", ids=[f"i{k}" for k in range(n)])

def make():
    train = data()
    net = tg.models.mlp([3, 16, 3])
    tg.models.fit(net, train.x, train.y, epochs=10, lr=1e-2, optimizer="adam", progress=False)
    print("trained")
    return net.eval(), train

def with_test():
    net, train = make()
    return net, train, data(30)

def named():
    net, train = make()
    return {"model": net, "train": train, "labels": [train.classes[k] for k in train.y.tolist()]}

def real():
    train = data()
    return torch.nn.Linear(3, 1), (train.x, train.x[:, 0])

def real_labels():
    train = data()
    return {"model": torch.nn.Linear(3, 1), "train": train, "labels": train.x[:, 0]}

def nothing():
    return {"model": None}

def extra():
    net, train = make()
    return {"model": net, "train": train, "colour": 3}
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    file = tmp_path / "job.py"
    file.write_text(JOB, encoding="utf-8")
    return str(file)


def training_set() -> tg.datasets.Labelled:
    scope: dict[str, object] = {}
    exec(JOB, scope)
    return scope["data"]()  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("function", ["make", "with_test", "named"])
@pytest.mark.every(2)
def test_a_page_and_figures(job: str, function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["audit", f"{job}:{function}", "--out", str(tmp_path / "page"), "--quiet", "--json"]
    assert main([*command, "--csv", str(tmp_path / "all" / "samples.csv")]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["train"] == 60
    assert Path(found["report"]).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "trained" in said.err
    rows = list(csv.DictReader((tmp_path / "all" / "samples.csv").open(encoding="utf-8")))
    assert len(rows) == 60
    assert [r["sample"] for r in rows] == [str(i) for i in range(60)]
    assert [r["id"] for r in rows] == [f"i{i}" for i in range(60)]
    assert {"is_label_issue", "given_label", "predicted_label", "leaked"} <= set(rows[0])


def test_words_for_people(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{job}:make", "--out", str(tmp_path), "--quiet", "--kernels", "CK"]) == 0
    said = capsys.readouterr().out
    assert "labels are more likely wrong than right" in said
    assert "report: " in said
    assert "kernel CK" in said


@pytest.mark.parametrize("function", ["make", "data", "named"])
@pytest.mark.parametrize("ending", ["csv", "json"])
def test_decisions_become_labels(
    job: str, function: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = training_set()
    rows = [{"sample": 0, "action": "fix", "label": "=1+1"}, {"sample": 5, "action": "drop"}]
    decisions = {"tangency_audit": 1, "samples": 60, "data": digest(data), "decisions": rows}
    (tmp_path / "decided.json").write_text(json.dumps(decisions), encoding="utf-8")
    out = tmp_path / f"labels.{ending}"
    assert main(["audit", "apply", f"{job}:{function}", str(tmp_path / "decided.json"), "--out", str(out)]) == 0
    assert "59 of 60 samples stay, 1 of them with another label; 1 do not." in capsys.readouterr().out
    found = (
        list(csv.DictReader(out.open(encoding="utf-8")))
        if ending == "csv"
        else json.loads(out.read_text(encoding="utf-8"))
    )
    assert [int(r["sample"]) for r in found] == [i for i in range(60) if i != 5]
    assert found[0]["label"] == "=1+1"
    assert all(r["label"] == data.classes[int(data.y[int(r["sample"])])] for r in found[1:])
    assert [r["id"] for r in found[:2]] == ["i0", "i1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit", "JOB:nothing", "--out", "page"], "(model, train) or (model, train, test)"),
        (["audit", "JOB:extra", "--out", "page"], "tangency.audit does not take"),
        (["audit", "JOB:make", "--out", "page", "--kernels", "NTK9"], "NTK9"),
        (["audit", "JOB:make", "--out", "page", "--csv", "."], "is a folder"),
        (["audit", "apply", "JOB:data", "gone.json", "--out", "a.csv"], "does not exist"),
        (["audit", "apply", "JOB:data", "gone.json", "--out", "a.txt"], ".csv or .json"),
        (["audit", "apply", "JOB:nothing", "gone.json", "--out", "a.csv"], "'train'"),
        (["audit", "apply", "JOB:data", "other.json", "--out", "a.csv"], "the labels are not what was audited"),
        (["audit", "apply", "JOB:real", "other.json", "--out", "a.csv"], "real numbers, which cannot be applied"),
        (["audit", "apply", "JOB:real_labels", "other.json", "--out", "a.csv"], "which cannot be applied"),
        (["audit", "apply", "JOB:data", "bytes.json", "--out", "a.csv"], "no text"),
    ],
)
def test_what_cannot_be_used_is_said(
    words: list[str], message: str, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    data = training_set()
    other = {"tangency_audit": 1, "samples": 60, "data": digest(data, torch.zeros_like(data.y)), "decisions": []}
    Path("other.json").write_text(json.dumps(other), encoding="utf-8")
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")
    assert main([w.replace("JOB", job) for w in words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("a.csv").exists()
