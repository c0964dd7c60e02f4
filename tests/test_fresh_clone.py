"""The script that runs `make test` as newcomers would: what it draws, what it gives a clone, what it reads."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.robustness import fresh_clone
from benchmarks.robustness.fresh_clone import CONDITIONS, Place


def test_two_cases_have_all_conditions_between_them() -> None:
    for commit in ("5a15837", "b3bfe03", "c38cbd8"):
        first, second = fresh_clone.drawn(commit, list(CONDITIONS))
        assert sorted([*first.split("+"), *second.split("+")]) == sorted(CONDITIONS)
        assert [first, second] == fresh_clone.drawn(commit, list(CONDITIONS))
    assert len({tuple(fresh_clone.drawn(str(k), list(CONDITIONS))) for k in range(20)}) > 15
    assert fresh_clone.drawn("5a15837", ["ci"]) == ["ci", "plain"]


def test_conditions_that_are_not_there_are_refused_by_name() -> None:
    assert fresh_clone.parsed("plain") == []
    assert fresh_clone.parsed("ci+space") == ["ci", "space"]
    with pytest.raises(SystemExit, match="no condition umlaut. There are: plain, browser, c-locale"):
        fresh_clone.parsed("ci+umlaut")
    assert {c for case in fresh_clone.CASES for c in fresh_clone.parsed(case)} == set(CONDITIONS)


def test_programs_are_this_machines_without_browsers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for name in ("chromium", "made-here", "python3.99"):
        (there / name).write_text("#!/bin/sh\n", encoding="utf-8")
    monkeypatch.setenv("PATH", str(there))
    fresh_clone.programs(tmp_path / "without", "/a b/python", browser=False)
    fresh_clone.programs(tmp_path / "with", "/a b/python", browser=True)
    assert (tmp_path / "without" / "made-here").exists()
    assert not (tmp_path / "without" / "chromium").is_symlink()
    assert (tmp_path / "with" / "chromium").exists()
    assert not (tmp_path / "with" / "python3.99").is_symlink()
    assert '"/a b/python" "$@"' in (tmp_path / "with" / "python3").read_text(encoding="utf-8")


def test_a_command_sees_its_own_environment_and_is_stopped(tmp_path: Path) -> None:
    place = Place(tmp_path, {"HOME": "/h", "PATH": os.environ["PATH"]}, fresh_clone.myself(), "")
    assert fresh_clone.run(["env"], place, tmp_path / "log", 60) == 0
    told = dict(line.split("=", 1) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines())
    assert {k: v for k, v in told.items() if k not in ("_", "PWD", "SHLVL")} == place.environment
    assert fresh_clone.run(["sh", "-c", "exit 3"], place, tmp_path / "log", 60) == 3
    assert fresh_clone.run(["sleep", "600"], place, tmp_path / "log", 0.1) == 124


def test_a_home_is_closed(tmp_path: Path) -> None:
    """For root too, whom permissions do not stop."""
    (tmp_path / "home").mkdir()
    home = fresh_clone.closed_home(fresh_clone.myself(), tmp_path)
    assert home.is_dir()
    assert subprocess.run(["mkdir", home / "tried"], capture_output=True, check=False).returncode != 0


def test_what_pytest_said_is_read() -> None:
    said = "4 left in 2.0s\nFAILED tests/test_docs.py::b - assert 1\nERROR tests/test_names.py\n"
    said += "=== 1 failed, 20 passed, 3 skipped, 1 error in 64.00s (0:01:04) ===\nmake: *** [test] Error 1"
    found = fresh_clone.outcome(said)
    assert found == {
        "passed": 20,
        "failed": 1,
        "error": 1,
        "skipped": 3,
        "names": ["tests/test_docs.py::b", "tests/test_names.py"],
    }
    assert not any(fresh_clone.outcome("make: *** [demo] Error 1").values())
    well = {"demo": 0, "test": 0, "passed": 3}
    assert fresh_clone.went_well(well)
    assert not any(map(fresh_clone.went_well, ({**well, "test": 1}, {**well, "passed": 0}, {"demo": 1, "passed": 0})))
