"""The quick form of `python -m benchmarks.robustness.attack`: each part finds nothing, and finds what is put in."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.robustness.attack import decisions, disks, kills
from benchmarks.robustness.attack.__main__ import PARTS, run
from tangency._base import files
from tangency.auditing import applied


@pytest.mark.parametrize("part", list(PARTS))
def test_nothing_is_lost_or_misread(part: str) -> None:
    result, bad = run([part], True, 1)
    assert bad == []
    assert result[part]["cases"] >= 10


def test_what_was_wrong_before_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written in place, and decisions that go to any data."""
    monkeypatch.setattr(applied, "_same", lambda data, _: data)
    assert "wrong" in {case.outcome for case in decisions.attack(tmp_path, 60, Random(0))}

    def in_place(real: Path, data: Any, was: object) -> None:
        with open(real, "wb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                data(file)

    monkeypatch.setattr(files, "_put", in_place)
    for name in ("disks", "kills"):
        (tmp_path / name).mkdir()
    assert {case.outcome for case in disks.attack(tmp_path / "disks", 1, Random(0))} & {"half", "left", "raw"}
    assert "half" in {case.outcome for case in kills.attack(tmp_path / "kills", 4, Random(0))}
