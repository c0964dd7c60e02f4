"""Figures 3 to 11 of Qadeer et al. and the single unit, small."""

import json
from pathlib import Path

import pytest
import torch

from tangency.cli import main
from tangency.errors import InputError
from tangency.experiments import EXPERIMENTS
from tangency.experiments.conjugate import FIGURES, Seen, judged
from tangency.experiments.table import Options, Trainings


def quick(name: str, out: Path | None = None, **more: object) -> dict:
    options = Options(quick=True, progress=False, where="cpu", out=out, **more)  # type: ignore[arg-type]
    return EXPERIMENTS[name].run(options).to_dict()


def test_every_figure_is_a_command() -> None:
    assert [f.number for f in FIGURES] == list(range(3, 12))
    assert {f"conjugate-fig{n}" for n in range(3, 12)} | {"single-relu"} <= set(EXPERIMENTS)


def test_figures_of_the_same_networks_share_them(tmp_path: Path) -> None:
    how = {"cases": ("f2",), "learned": Trainings(epochs=52)}
    over = quick("conjugate-fig4", tmp_path, **how)
    assert [row["epoch"] for row in over["rows"]] == ["0", "50", "52"]
    record = tmp_path / "conjugate-tanh-128-quick.json"
    made = record.stat().st_mtime_ns
    ends = quick("conjugate-fig3", tmp_path, **how)
    assert record.stat().st_mtime_ns == made
    assert float(ends["rows"][0]["CKJ"]) < float(ends["rows"][0]["CK"])
    assert ends["bounds"]["violated"] == 0
    assert ends["bounds"]["promised"] > 0
    assert "CKJ several orders lower" in ends["notes"][0]
    assert (tmp_path / "conjugate-fig3.png").exists()
    assert (tmp_path / "conjugate-fig4.png").exists()


@pytest.mark.slow
def test_classes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = [
        "--quick",
        "--quiet",
        "--json",
        "--device",
        "cpu",
        "--cases",
        "F1",
        "--epochs",
        "3",
        "--out",
        str(tmp_path),
    ]
    assert main(["reproduce", "conjugate-fig8", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert float(found["rows"][0]["CK %"]) > float(found["rows"][0]["NN %"])
    assert found["bounds"]["violated"] == 0
    assert (tmp_path / "conjugate-fig8.png").exists()


def test_other_cases_are_refused() -> None:
    with pytest.raises(InputError, match="--cases g; needed: some of f1, f2, f3"):
        quick("conjugate-fig3", cases=("g",))


def test_what_came_of_the_bounds_is_counted() -> None:
    says = {"(38)": "fails, not promised", "(38*)": "holds", "(48)": "VIOLATED"}
    found = judged({"f1": [[Seen(0, {}, None, says)]] * 2})
    assert (found.moments, found.promised, found.violated, found.loose) == (2, 4, 2, {"(38)": 2})
    assert (
        found.words()
        == "Bounds at 2 moments: 4 promised, 2 violated; false where nothing promises them, times: (38) 2."
    )


@pytest.mark.slow
def test_single_unit(tmp_path: Path) -> None:
    found = quick("single-relu", tmp_path, learned=Trainings(test=150))
    assert [row["d"] for row in found["rows"]] == ["2", "8", "16"]
    assert all(float(row["unit"]) < 0.1 * float(row["NTK of a wide network"]) for row in found["rows"])
    assert (tmp_path / "single-relu.png").exists()


def test_relu_networks_are_relu_networks() -> None:
    kinds = {f.number: f.networks.activation for f in FIGURES}
    assert [n for n, kind in kinds.items() if kind is torch.nn.ReLU] == [6, 7, 10]
    assert {f.number: f.networks.width for f in FIGURES if f.networks.width != 128} == {5: 256, 9: 64}
