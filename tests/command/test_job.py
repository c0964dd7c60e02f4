"""MODULE:FUNCTION: the user's mistakes are shown in the user's file, ours and Python's machinery left out."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tangency as tg
from tangency._base import machine, memory
from tangency.cli import main

JOB = """
import torch, tangency as tg

def inner():
    return torch.ones(2) @ torch.ones(3)

def deep():
    return inner()

def ours():
    return tg.datasets.cifar10("/no/such/folder")

def through():
    class Broken(torch.utils.data.Dataset):
        def __len__(self): return 3
        def __getitem__(self, k): return {}["image"]
    return tg.datasets.labelled(Broken(), name="train")

def leaves():
    raise SystemExit(3)

class Forward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
    def forward(self, x):
        raise LookupError("in forward")

def later():
    x = torch.randn(4, 3)
    return Forward().eval(), (x, [0, 1, 0, 1]), (x, [0, 1, 0, 1])

def later_in_a_list():
    return list(later())

def kernel_in_a_list():
    return [tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(4, 3)]
"""


@pytest.fixture
def job(job_module: Callable[[str], str]) -> str:
    return job_module(JOB)


def failure(name: str, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["explain", name, "--out", "p"]) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "tangency/cli.py" not in said
    assert "tangency/job.py" not in said
    assert "importlib" not in said
    return said


def test_the_way_through_the_users_file(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = failure(f"{job}:deep", 2, capsys)
    assert said.startswith(f"error: {job}:deep: RuntimeError: ")
    assert said.index("in deep\n    return inner()") < said.index("in inner\n    return torch.ones(2) @ torch.ones(3)")


def test_our_errors_keep_their_words_and_get_a_place(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = failure(f"{job}.py:ours", 2, capsys)
    assert said.startswith("error: the folder /no/such/folder does not exist")
    assert 'in ours\n    return tg.datasets.cifar10("/no/such/folder")' in said
    assert "datasets/images.py" not in said


def test_the_users_code_within_ours(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = failure(f"{job}:through", 2, capsys)
    assert said.startswith(f"error: {job}:through: KeyError: 'image' (while item 0 of train was read)")
    assert "in through" in said
    assert "in __getitem__" in said
    assert "from_torch.py" not in said


def test_a_function_that_ends_the_program(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ended the program (sys.exit(3)); needed: (model, train, test)" in failure(f"{job}:leaves", 2, capsys)


def test_a_model_that_fails_in_our_hands(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The work failed, code 1; where in the user's model is shown all the same."""
    said = failure(f"{job}:later", 1, capsys)
    assert "LookupError: in forward" in said
    assert "in forward\n    raise LookupError" in said
    assert "--debug" in said


def test_a_list_is_as_good_as_a_tuple(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "LookupError: in forward" in failure(f"{job}:later_in_a_list", 1, capsys)  # it got as far as the model
    assert main(["gram", f"{job}:kernel_in_a_list", "--store", "k", "--quiet"]) == 0
    assert tg.open_gram("k").shape == (4, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def make(:\n    pass\n", 'SyntaxError: invalid syntax\n  File "{file}", line 1\n    def make(:'),
        ("x = 1\nundefined\n", "NameError: name 'undefined' is not defined\n  File \"{file}\", line 2, in <module>"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".py"])
def test_files_that_cannot_be_read(
    text: str, said: str, ending: str, job_module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = job_module(text)
    want = said.replace("{file}", str(Path(f"{name}.py").resolve()))
    assert failure(f"{name}{ending}:make", 2, capsys).startswith(f"error: {name}{ending}: {want}")


def test_a_busy_machine_is_told_of_once(
    job: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "load", lambda: 7.25)
    assert main(["explain", f"{job}:deep", "--out", "p"]) == 2
    note, *others = capsys.readouterr().err.splitlines()
    assert note.startswith("note: this machine is busy (load 7.2 on 2 cores), where 2 threads of torch wait")
    assert "OMP_NUM_THREADS=1 before the command" in note
    assert not any("is busy" in line for line in others)
    main(["status", "nowhere"])  # short work
    assert "is busy" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("threads", "load", "variable", "told"),
    [(2, 2.5, None, True), (1, 9.0, None, False), (2, 2.0, None, False), (2, None, None, False), (2, 9.0, "2", False)],
)
def test_who_is_told(
    threads: int, load: float | None, variable: str | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "load", lambda: load)
    assert bool(machine.busy(threads)) == told


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the cores by affinity, then one and a half by a limit, of either version of control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    assert machine.cores() == 4
    free = machine.available_memory()
    assert free > 0
    (tmp_path / "cpu.max").write_text("max 100000\n", encoding="utf-8")
    assert machine.cores() == 4
    (tmp_path / "cpu.max").write_text("150000 100000\n", encoding="utf-8")
    assert machine.cores() == 2
    (tmp_path / "memory.max").write_text("max\n", encoding="utf-8")
    (tmp_path / "memory.current").write_text("1000\n", encoding="utf-8")
    assert machine.available_memory() > 10_000
    (tmp_path / "memory.max").write_text("11000\n", encoding="utf-8")
    assert machine.available_memory() == 10_000
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "memory").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1", encoding="utf-8")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000", encoding="utf-8")
    assert machine.cores() == 4
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000", encoding="utf-8")
    assert machine.cores() == 1
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("500", encoding="utf-8")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("600", encoding="utf-8")
    assert machine.available_memory() == 0
