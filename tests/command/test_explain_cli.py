"""`tangency demo`, `explain` and `reproduce`, as a user runs them: what they write and print, and how they refuse."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tangency import InputError, demo
from tangency.cli import main
from tangency.datasets import TrainTest, digits
from tangency.experiments import EXPERIMENTS, shift, surrogate_table1, surrogate_table2, surrogate_table3, uci
from tangency.experiments.bundled import images
from tangency.experiments.table import Kept, Options, Table, mean

pytestmark = pytest.mark.usefixtures("few_shuffles")
JOB = """
import torch, tangency as tg
from torch import nn

def data(n, seed):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()

def net():
    return tg.models.initialized(lambda: tg.models.mlp([4, 16, 3]), seed=0).eval()

def make():
    model, train = net(), data(80, 0)
    tg.models.fit(model, *train, epochs=5, progress=False)
    return model, train, data(40, 1)

def options():
    print("what the user's function prints")
    model, train, test = make()
    return {"model": model, "train": train, "test": test, "samples": 7, "name": "My net"}

def misspelt():
    return {**options(), "sample": 3}

def labels():
    model, (x, y), test = make()
    return model, (x, y + 1), test

def shape():
    model, train, (x, y) = make()
    return model, train, (x[:, :3], y)

def training():
    model, train, test = make()
    return nn.Sequential(nn.Dropout(0.5), model).train(), train, test

def empty():
    model, (x, y), test = make()
    train = tg.datasets.Labelled(x[y < 2], y[y < 2], ("a", "b", "c"))
    return model, train, (test[0][test[1] < 2], test[1][test[1] < 2])

def one():
    model, (x, y), (z, t) = make()
    return model, (x, torch.zeros_like(y)), (z, torch.zeros_like(t))

def nan():
    model, (x, y), test = make()
    x[3, 2] = float("nan")
    return model, (x, y), test

def path():
    return net(), *tg.datasets.cifar10("/no/such/folder")

def nothing():
    return None

def broken():
    raise ZeroDivisionError("my own mistake")
"""


@pytest.fixture
def job(job_module: Callable[[str], str]) -> str:
    return job_module(JOB)


def test_explain_writes_a_report_and_says_where(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{job}:make", "--out", "page", "--kernels", "trNTK,CK"]) == 0
    printed = capsys.readouterr().out
    page = Path("page/report.html")
    assert str(page.resolve()) in printed
    assert "<!doctype html>" in page.read_text(encoding="utf-8")[:200].lower()
    assert all(word in printed for word in ("trNTK", "CK", "τ_K"))
    assert "pNTK" not in printed


def test_explain_json_holds_the_figures_alone(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{job}.py:options", "--out", "some.html", "--json"]) == 0
    said = capsys.readouterr()
    assert "what the user's function prints" in said.err
    found = json.loads(said.out)
    assert found["model"] == "My net"
    assert found["explained"] == 7
    assert set(found["kernels"]) == {"trNTK", "trNTK⁰", "pNTK", "Em", "CK"}
    assert all(-1 <= k["tau"] <= 1 and k["gradient"] <= 1e-6 for k in found["kernels"].values())
    assert Path(found["report"]).name == "some.html"


BAD = {
    "labels": "labels from 0 to 2",
    "shape": "a training sample has the shape x \\[4\\], a test sample x \\[3\\]",
    "training": "in training mode",
    "empty": "no sample of c",
    "one": "one class only",
    "nan": "nan",
    "path": "/no/such/folder",
    "nothing": "needed: \\(model, train, test\\)",
    "misspelt": "sample, which tangency.explain does not take",
}


@pytest.mark.parametrize("function", BAD)
def test_bad_input_ends_with_code_2_and_one_clear_line(
    job: str, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{job}:{function}", "--out", "page", "--kernels", "CK"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    assert re.search(BAD[function], said.err, re.IGNORECASE), said.err
    assert not Path("page/report.html").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["explain", "nothing_here:make", "--out", "p"], "cannot be imported"),
        (["explain", "{job}:absent", "--out", "p"], "has no function 'absent'"),
        # Before the function runs, which may train for hours:
        (["explain", "{job}:broken", "--out", "p", "--kernels", "trNKT"], "Did you mean 'trNTK'"),
        (["explain", "{job}:broken", "--out", "p", "--memory", "much"], "needed: a number of bytes"),
        (["explain", "{job}:make", "--out", "/proc/nothing/page"], "/proc/nothing/page/report.html cannot be written"),
        (["reproduce", "surrogate-table1"], "give the folder that holds it with --data"),
        (["reproduce", "surrogate-table2", "--data", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_bad_arguments_end_with_code_2(
    job: str, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.replace("{job}", job) for a in argv]) == 2
    assert said in capsys.readouterr().err


def test_debug_shows_the_traceback_before_or_after_the_command(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--debug", "explain"], ["explain", "--debug"]):
        assert main([*argv, f"{job}:broken", "--out", "p"]) == 2
        said = capsys.readouterr().err
        assert "Traceback" in said
        assert "my own mistake" in said


def test_a_mistake_in_the_users_function_is_shown_in_the_users_file(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{job}:broken", "--out", "p"]) == 2
    said = capsys.readouterr().err.splitlines()
    line = JOB.splitlines().index('    raise ZeroDivisionError("my own mistake")') + 1
    assert said == [
        f"error: {job}:broken: ZeroDivisionError: my own mistake",
        f'  File "{Path.cwd()}/{job}.py", line {line}, in broken',
        '    raise ZeroDivisionError("my own mistake")',
    ]


def test_help_names_every_command_and_the_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    assert e.value.code == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("demo", "explain", "reproduce", "gram", "status", "verify", "First steps"))


def few_images(factor: int, channels: int = 3, **_: int) -> TrainTest:
    return images(factor, channels, 6, 5)


# All others are run small, kept and gone on with by tests of their own in tests/experiments.
HERE = {"surrogate-table1", "surrogate-table2", "surrogate-table3", "energy-table1", "shift"}


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name in HERE else pytest.param(name, marks=pytest.mark.slow) for name in EXPERIMENTS]
)
def test_each_experiment_runs_in_its_quick_form_and_is_not_repeated(
    name: str, few: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few samples, kernels and options; under `make test-all` also with those that the command has."""
    if few:
        for module in (surrogate_table1, surrogate_table2, surrogate_table3):
            monkeypatch.setattr(module, "images", few_images)
        small = replace(uci.QUICK_PLAN, depths=(1,), costs=(1.0,), gammas=(0.1,), trees=5, layers=(1,), steps=20)
        monkeypatch.setattr(uci, "QUICK_PLAN", small)
        monkeypatch.setattr(shift, "CORRUPTIONS", dict(list(shift.CORRUPTIONS.items())[:2]))
        monkeypatch.setattr(shift, "QUICK_HALVINGS", 3)
    seeds = "1" if few and name != "surrogate-table1" else "2"  # one experiment shows that means of two are taken
    argv = ["reproduce", name, "--quick", "--seeds", seeds, "--out", str(tmp_path), "--json"]
    if few and name in ("surrogate-table2", "surrogate-table3"):
        argv += ["--kernels", "trNTK,CK"]
    if few and name == "cntk":
        argv += ["--network", "myrtle5", "--test", "5"]
    assert main(argv) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["rows"]
    assert {"device", "torch", "command"} <= set(first)
    measured: list[str] = []
    monkeypatch.setattr(Kept, "__setitem__", lambda self, key, row: measured.append(key))
    assert main(argv) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rows"] == first["rows"]
    assert not measured


def test_an_experiment_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tangency.experiments.surrogate_table1 import Case

    monkeypatch.setattr(surrogate_table1, "images", few_images)
    done: list[str] = []
    real = surrogate_table1.measure_seed

    def measure_seed(case: object, seed: int, options: Options) -> object:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(f"{case.name}, seed {seed}")  # type: ignore[attr-defined]
        return real(case, seed, options)  # type: ignore[arg-type]

    monkeypatch.setattr(surrogate_table1, "measure_seed", measure_seed)
    options = Options(out=tmp_path, quick=True, seeds=1, progress=False)
    with pytest.raises(KeyboardInterrupt):
        surrogate_table1.reproduce_table1(options)
    kept = json.loads((tmp_path / "surrogate-table1-quick.json").read_text(encoding="utf-8"))
    assert list(kept["rows"]) == done
    calls: list[str] = []

    def counted(case: Case, seed: int, options: Options) -> object:
        calls.append(case.name)
        return real(case, seed, options)

    monkeypatch.setattr(surrogate_table1, "measure_seed", counted)
    table = surrogate_table1.reproduce_table1(options)
    assert calls == ["CNN (digits 3, 8)"]
    assert table.rows[0]["model"] == "MLP (digits 3, 8)"


def test_a_folder_that_was_begun_in_another_way_is_refused(tmp_path: Path) -> None:
    options = Options(out=tmp_path)
    Kept(options, "some", {"alpha": 1e-4, "epochs": 3})["row"] = {"tau": 0.5}
    assert Kept(options, "some", {"alpha": 1e-4, "epochs": 3})["row"] == {"tau": 0.5}
    with pytest.raises(InputError, match="epochs is 3 there, 4 now.*another --out"):
        Kept(options, "some", {"alpha": 1e-4, "epochs": 4})
    (tmp_path / "some.json").write_text("[1, 2", encoding="utf-8")
    with pytest.raises(InputError, match="no record of this experiment"):
        Kept(options, "some", {})


def test_a_network_is_trained_once_in_a_folder(tmp_path: Path) -> None:
    def train(model: torch.nn.Module) -> None:
        torch.nn.init.normal_(model.weight)

    first = Kept(Options(out=tmp_path), "some", {}).network(torch.nn.Linear(3, 2), train)
    again = Kept(Options(out=tmp_path), "some", {}).network(torch.nn.Linear(3, 2), train)
    assert torch.equal(first.weight, again.weight)
    assert not again.training


def test_a_mean_has_the_error_of_its_last_digit() -> None:
    assert mean([0.7, 0.71, 0.72]) == "0.710(6)"
    assert mean([97.0, 98.0, 99.0]) == "98.0(6)"
    assert mean([0.5]) == "0.500"
    assert mean([float("nan"), 1.0]) == "nan"


def test_a_table_prints_its_rows_in_columns() -> None:
    text = Table("Title", ("a", "b"), ({"a": "x", "b": 0.12345}, {"a": "long", "b": None}), ("note",)).table()
    assert text.splitlines()[0] == "Title"
    assert "0.123" in text
    assert text.endswith("note")


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_demo_writes_a_report(
    few: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sixth of its samples; under `make test-all` also with all of them."""
    if few:
        train, test = digits()
        monkeypatch.setattr(demo, "digits", lambda: TrainTest(train.take(per_class=20), test.take(per_class=10)))
    assert main(["demo", "--out", str(tmp_path / "demo"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["network_accuracy"] > (0.85 if few else 0.94)
    assert max(k["tau"] for k in found["kernels"].values()) > 0.6
    size = Path(found["report"]).stat().st_size
    assert 100_000 < size < 8_000_000
    assert torch.initial_seed() == 0  # the caller's generator is untouched
