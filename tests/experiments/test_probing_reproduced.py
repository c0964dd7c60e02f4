"""Probes of each layer, on bundled digits: rows, a record that is gone on with, a picture made of it."""

import json
from pathlib import Path

import pytest

from tangency.cli import main
from tangency.experiments import EXPERIMENTS
from tangency.experiments.probing import probing_of
from tangency.experiments.table import Options, Trainings


def test_layers_are_probed_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["--samples", "100", "--test", "50", "--epochs", "1", "--out", str(tmp_path), "--device", "cpu"]
    assert main(["reproduce", "probing", "--quick", "--quiet", "--json", *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in found["rows"]] == [
        *(f"convolution {k}" for k in (1, 2, 3)),
        "hidden 1",
        "hidden 2",
        "logits",
    ]
    again = EXPERIMENTS["probing"].run(
        Options(
            quick=True, progress=False, out=tmp_path, where="cpu", learned=Trainings(samples=100, test=50, epochs=1)
        )
    )
    assert list(again.rows) == found["rows"]
    assert again.facts["runs"]["logits"]["seconds"] == found["runs"]["logits"]["seconds"]  # not measured anew
    drawn = probing_of(found)
    assert drawn.table() == again.probing().table()  # type: ignore[attr-defined]
    assert len(again.plot().axes) == 3  # type: ignore[attr-defined]


def test_too_many_images_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "probing", "--quick", "--quiet", "--samples", "9000"]) == 2
    assert "--samples 9000; there are 800 images" in capsys.readouterr().err
