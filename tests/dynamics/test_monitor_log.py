"""A monitor's log outlives its process, and its records go to other people's trainers and dashboards."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tangency as tg
from tangency import dynamics as D
from tangency.dynamics import runlog
from tangency.dynamics.runlog import RunLog

DOUBLE = torch.float64


def parts(seed: int = 0) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(seed)
    return tg.models.mlp([3, 10, 1], nn.Tanh).double(), torch.randn(12, 3, dtype=DOUBLE), torch.randn(12, 1).double()


def watched(log: Path, steps: range, net: nn.Module, x: Tensor, y: Tensor, **options: Any) -> D.Monitor:
    """Some steps of a training that is the same each time."""
    monitor = D.Monitor(tg.trace_ntk(net), x, y=y, loss=F.mse_loss, log=log, **options)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps:
        monitor.step(step)
        sgd.zero_grad()
        F.mse_loss(net(x), y).backward()
        sgd.step()
    return monitor


def test_a_log_has_a_line_for_what_is_watched_one_for_each_record_and_an_end(tmp_path: Path) -> None:
    log = tmp_path / "runs" / "run.jsonl"
    monitor = watched(log, range(7), *parts(), every=3)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [line.get("step") for line in lines] == [None, 0, 3, 6]  # there before the end, each as it was made
    monitor.close()
    *lines, end = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["model"] == "Sequential"
    assert lines[0]["parameters"] == 51
    assert lines[0]["probe"]["samples"] == 12
    assert lines[0]["pace"] == "every 3 steps"
    assert lines[2]["skipped"] == 2
    assert end == {"end": True, "skipped": 0, "looks": 3, "share": end["share"]}
    read, kept = D.Evolution.load(log), monitor.history()
    assert (read.ended, read.skipped, kept.skipped) == (True, 4, 4)
    for name, column in kept.values.items():
        torch.testing.assert_close(read[name], column, rtol=0, atol=0)
    assert read.verdict() == kept.verdict()


def test_a_resumed_run_is_measured_from_its_true_start(tmp_path: Path) -> None:
    """As one that was never stopped: change, movement, rotation and velocity."""
    whole = watched(tmp_path / "whole.jsonl", range(9), *parts(), every=2)
    log = tmp_path / "run.jsonl"
    net, x, y = parts()
    watched(log, range(5), net, x, y, every=2)  # killed: not closed
    again = watched(log, range(5, 9), net, x, y, every=2, resume=True)
    assert again.history().steps.tolist() == [0, 2, 4, 6, 8]
    for name, column in whole.history().values.items():
        torch.testing.assert_close(again.history()[name], column, msg=name)
        torch.testing.assert_close(D.Evolution.load(log)[name], column, msg=name)
    again.close()
    third = watched(log, range(9, 11), net, x, y, every=2, resume=True)  # a run that ended can go on, too
    assert D.Evolution.load(log).steps.tolist() == [0, 2, 4, 6, 8, 10]
    assert not third.history().ended


def test_steps_that_the_log_has_are_not_recorded_again(tmp_path: Path) -> None:
    """A training that goes on from an older checkpoint repeats some."""
    log = tmp_path / "run.jsonl"
    watched(log, range(5), *parts(), every=1)
    with pytest.warns(tg.StoreWarning, match="the log has steps up to 4 already, which are not recorded again"):
        again = watched(log, range(2, 7), *parts(), every=1, resume=True)
    again(7)
    assert again.history().steps.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len(again.notes) == 1
    assert again.notes[0] in again.history().notes


def test_a_torn_last_line_is_dropped_with_a_sentence(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    net, x, y = parts()
    watched(log, range(4), net, x, y, every=1)
    whole = log.read_bytes()
    log.write_bytes(whole[:-30])
    read = D.Evolution.load(log)
    assert read.steps.tolist() == [0, 1, 2]
    assert "the last line was torn" in read.notes[0]
    with pytest.warns(tg.StoreWarning, match=r"run.jsonl: the last line was torn \(\d+ bytes"):
        again = watched(log, range(3, 5), net, x, y, every=1, resume=True)
    assert again.history().steps.tolist() == [0, 1, 2, 3, 4]
    assert [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]  # all of them whole
    # Begun, and killed before the first record.
    log.write_bytes(whole[: whole.index(b"\n") + 1])
    assert watched(log, range(2), net, x, y, every=1, resume=True).history().steps.tolist() == [0, 1]


def test_logs_that_cannot_be_gone_on_with(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    net, x, y = parts()
    watched(log, range(2), net, x, y, every=1)
    k = tg.trace_ntk(net)
    with pytest.raises(tg.InputError, match="holds the record of a run already. Go on with it: resume=True"):
        D.Monitor(k, x, y=y, loss=F.mse_loss, log=log)
    other = tg.models.mlp([3, 12, 1], nn.Tanh).double()
    options = {"y": -y, "loss": F.l1_loss, "record": ["change"], "top": 2, "functions": {"trace": torch.trace}}
    with pytest.raises(tg.InputError) as e:
        D.Monitor(tg.pseudo_ntk(other, dtype="float32"), x[:10], log=log, resume=True, **(options | {"y": -y[:10]}))
    for name in ("architecture", "kernel.kernel", "kernel.dtype", "probe.samples", "probe.digest", "targets", "loss"):
        assert f"  {name}: " in str(e.value)
    for name in ("record", "top", "functions.trace"):
        assert f"  {name}: " in str(e.value)
    assert "kernel.parameters" not in str(e.value)
    with pytest.raises(tg.InputError, match="targets: .* in the log, .* now\nGive what it was begun with"):
        D.Monitor(k, x, y=-y, loss=F.mse_loss, log=log, resume=True)
    (tmp_path / "another").mkdir()
    watched(tmp_path / "another" / "run.jsonl", range(1), *parts(), every=1)
    start = tmp_path / "run.jsonl.start.pt"
    start.write_bytes((tmp_path / "another" / start.name).read_bytes())
    with pytest.raises(tg.InputError, match="start.pt is missing, or of another run"):
        D.Monitor(k, x, y=y, loss=F.mse_loss, log=log, resume=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; needed: a log"),
        ('{"a": 1}\n', "does not begin with the line of a run"),
        ('{"tangency_run": 9}\n', "is of format 9; this version of tangency reads 1"),
        ('{"tangency_run": 1}\nno\n{"step": 1}\n', "line 2 of .* is no record"),
        ('{"tangency_run": 1}\n', "holds no record yet"),
        ('{"tangency_run": 1}\n{"step', "holds no record yet"),
    ],
)
def test_files_that_are_no_logs(tmp_path: Path, text: str, words: str) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text(text, encoding="utf-8")
    with pytest.raises(tg.InputError, match=words):
        D.Evolution.load(log)
    with pytest.raises(tg.InputError, match="missing.jsonl cannot be read: No such file"):
        D.Evolution.load(tmp_path / "missing.jsonl")


def test_logs_that_cannot_be_written(tmp_path: Path) -> None:
    net, x, _ = parts()
    (tmp_path / "file").write_text("", encoding="utf-8")
    for place, words in ((tmp_path, "it is a folder"), (tmp_path / "file" / "run.jsonl", "cannot be written")):
        with pytest.raises(tg.InputError, match=words):
            D.Monitor(tg.trace_ntk(net), x, log=place)
    log = tmp_path / "gone" / "run.jsonl"
    monitor = D.Monitor(tg.trace_ntk(net), x, record=["cosine"], log=log)
    assert not log.parent.exists()  # nothing is there before the first record
    log.mkdir(parents=True)
    with pytest.raises(tg.InputError, match="run.jsonl cannot be written: Is a directory"):
        monitor(0)


def until_killed(log: Path, at: int) -> None:
    """A training whose process dies in the middle of a line."""
    torch.set_num_threads(1)  # a fork of a process whose OpenMP threads have run waits for them for ever

    def write(self: RunLog, line: dict) -> None:
        if line.get("step") == at:
            with open(self.path, "ab", buffering=0) as file:
                file.write(json.dumps(line)[:40].encode())
                os.kill(os.getpid(), signal.SIGKILL)
        whole(self, line)

    whole, RunLog.write = RunLog.write, write  # type: ignore[method-assign]
    watched(log, range(20), *parts(), every=2)


def test_a_run_killed_in_the_middle_resumes_its_record(tmp_path: Path) -> None:
    """SIGKILL while the fourth record is written: three are there, and the others come out as if nothing happened."""
    log = tmp_path / "run.jsonl"
    process = multiprocessing.get_context("fork").Process(target=until_killed, args=(log, 6))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert D.Evolution.load(log).steps.tolist() == [0, 2, 4]
    assert not D.Evolution.load(log).ended
    # The training goes on from its beginning here; from a checkpoint it would be the same.
    with pytest.warns(tg.StoreWarning) as said:
        again = watched(log, range(20), *parts(), every=2, resume=True)
    assert ["torn" in str(w.message) for w in said] == [True, False]
    assert "steps up to 4 already" in str(said[1].message)
    whole = watched(tmp_path / "whole.jsonl", range(20), *parts(), every=2)
    assert again.history().steps.tolist() == whole.history().steps.tolist()
    for name, column in whole.history().values.items():
        torch.testing.assert_close(again.history()[name], column, msg=name)


# ---- writers and trainers -------------------------------------------------------------------------------------------


class Board:
    """As TensorBoard's SummaryWriter is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.seen.append((tag, value, step))


class Run:
    """As a run of Weights & Biases is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict, int]] = []

    def log(self, values: dict, *, step: int) -> None:
        self.seen.append((values, step))


def test_records_go_to_writers() -> None:
    net, x, _ = parts()
    board, run = Board(), Run()
    options = {"record": ["change", "eigenvalues"], "top": 2, "functions": {"none": lambda K: float("nan")}}
    monitor = D.Monitor(tg.trace_ntk(net), x, writers=[board, run], **options)
    monitor(7)
    top = monitor.history()["eigenvalues"][0].tolist()
    assert run.seen[0][1] == 7
    kept = run.seen[0][0]
    assert {k: v for k, v in kept.items() if "none" not in k} == {
        "ntk/change": 0.0, "ntk/eigenvalues/1": top[0], "ntk/eigenvalues/2": top[1],
    }  # fmt: skip
    assert [(tag, step) for tag, _, step in board.seen] == [(tag, 7) for tag in kept]
    D.Monitor(tg.trace_ntk(net), x, writers=run)(0)  # one alone


class Whole(nn.Module):
    """A network inside of what is trained, as a LightningModule has it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's base class, and nothing else of it."""
    module = types.ModuleType("lightning.pytorch")
    module.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    package = types.ModuleType("lightning")
    package.pytorch = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)


def test_lightning_calls_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks in the order of Lightning's loop, with gradients of two batches in one step."""
    fakes(monkeypatch)
    net, x, _ = parts()
    monitor = D.Monitor(tg.trace_ntk(net), x, record=["change"], every=2)
    hooks: Any = D.lightning_callback(monitor)
    assert isinstance(hooks, sys.modules["lightning.pytorch"].Callback)
    trainer, whole = types.SimpleNamespace(global_step=0, is_global_zero=True), Whole(net)
    hooks.on_train_start(trainer, whole)
    for batch in range(10):
        trainer.global_step = (batch + 1) // 2
        hooks.on_train_batch_end(trainer, whole, None, None, batch)
    hooks.on_train_end(trainer, whole)
    assert monitor.history().steps.tolist() == [0, 2, 4, 5]
    assert monitor.history().ended
    other: Any = D.lightning_callback(D.Monitor(tg.trace_ntk(net), x))
    with pytest.raises(tg.InputError, match="a Linear is trained, and the monitor watches a Sequential"):
        other.on_train_start(trainer, nn.Linear(3, 1))
    far = types.SimpleNamespace(global_step=0, is_global_zero=False)  # other processes do nothing
    other.on_train_start(far, nn.Linear(3, 1))
    other.on_train_batch_end(far, whole, None, None, 0)
    other.on_train_end(far, whole)


def test_the_trainer_of_hugging_face_calls_the_monitor() -> None:
    pytest.importorskip("transformers")
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    net, x, _ = parts()
    monitor = D.Monitor(tg.trace_ntk(net), x, record=["change"], every=2)
    hooks = D.trainer_callback(monitor)
    handler = CallbackHandler([hooks], net, None, torch.optim.SGD(net.parameters(), lr=0.1), None)
    state, control, args = TrainerState(), TrainerControl(), object.__new__(TrainingArguments)
    handler.on_train_begin(args, state, control)
    for step in range(1, 6):
        state.global_step = step
        handler.on_step_end(args, state, control)
    handler.on_train_end(args, state, control)
    assert monitor.history().steps.tolist() == [0, 2, 4, 5]
    assert monitor.history().ended


def test_lightning_itself(tmp_path: Path) -> None:
    L = pytest.importorskip("lightning.pytorch")
    net, x, y = parts()

    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = D.Monitor(tg.trace_ntk(net), x, every=2)
    trainer = L.Trainer(
        max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[D.lightning_callback(monitor)],
    )  # fmt: skip
    trainer.fit(Lit(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4))
    assert monitor.history().steps.tolist() == [0, 2, 4, 5]


def test_trainers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, _ = parts()
    monitor = D.Monitor(tg.trace_ntk(net), x)
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(tg.MissingLibrary, match=r"lightning_callback\(\) needs lightning: pip install"):
        D.lightning_callback(monitor)
    with pytest.raises(tg.MissingLibrary, match=r"trainer_callback\(\) needs transformers: pip install"):
        D.trainer_callback(monitor)


def test_an_interrupt_leaves_whole_lines_and_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of writing, after which the training goes on, as in a notebook."""
    log, (net, x, y) = tmp_path / "run.jsonl", parts()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monitor = watched(log, range(0), net, x, y, every=1)
    with monkeypatch.context() as m:
        m.setattr(torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            monitor.step(0)
    monitor.step(1)  # the start, since nothing was recorded before

    class Torn:
        """A file that is interrupted after ten bytes."""

        def __init__(self, path: Path, *_: object, **options: object) -> None:
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115

        def __enter__(self) -> "Torn":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[:10])
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    with monkeypatch.context() as m:
        m.setattr(runlog, "open", Torn, raising=False)
        with pytest.raises(KeyboardInterrupt):
            monitor.step(2)
    monitor.step(3)
    resumed = watched(log, range(0), net, x, y, every=1, resume=True)
    assert resumed.history().steps.tolist() == [1, 3]


def test_two_processes_with_one_log_are_found(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    first = watched(log, range(2), *parts(), every=1)
    watched(log, range(2, 3), *parts(), every=1, resume=True)
    with pytest.raises(tg.InputError, match="changed since this run wrote it: by another process"):
        first.step(2)
    assert D.Evolution.load(log).steps.tolist() == [0, 1, 2]


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "run.jsonl"
    kept = RunLog(log, {}, resume=False)
    kept.write({"step": 0})
    before = log.read_bytes()
    file = open(log, "ab", buffering=0)  # noqa: SIM115
    short = types.SimpleNamespace(tell=file.tell, truncate=file.truncate, write=lambda data: file.write(data[:5]))
    monkeypatch.setattr(runlog, "open", lambda *_, **__: contextlib.nullcontext(short), raising=False)
    with pytest.raises(tg.InputError, match="cannot be written: No space left"):
        kept.write({"step": 1})
    file.close()
    assert log.read_bytes() == before


@pytest.mark.parametrize("size", [0, 10, 900])
@pytest.mark.parametrize("what", ["start", "last"])
def test_damaged_files_beside_a_log(tmp_path: Path, what: str, size: int) -> None:
    log = tmp_path / "run.jsonl"
    watched(log, range(2), *parts(), every=1)
    beside = tmp_path / f"run.jsonl.{what}.pt"
    beside.write_bytes(beside.read_bytes()[:size])
    with pytest.raises(tg.InputError, match=rf"{what}.pt is damaged .*Put it back whole, or give another log="):
        watched(log, range(0), *parts(), every=1, resume=True)


def test_a_run_that_had_no_finite_kernel_yet_is_resumed(tmp_path: Path) -> None:
    log, (net, x, y) = tmp_path / "run.jsonl", parts()
    good = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    watched(log, range(1), net, x, y, every=1)
    resumed = watched(log, range(0), net, x, y, every=1, resume=True)
    net.load_state_dict(good)
    resumed.step(1)
    assert resumed.history()["change"].tolist()[1] == 0  # the start


def test_a_log_that_was_killed_in_its_first_line(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text('{"tangency_run": 1, "be', encoding="utf-8")
    with pytest.raises(tg.InputError, match="holds no whole line.*Delete it"):
        watched(log, range(0), *parts(), resume=True)


def begun(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """A log of three records, and the files beside it."""
    log = folder / "run.jsonl"
    watched(log, range(3), *parts(), every=1)
    return log, {what: (folder / f"run.jsonl.{what}.pt").read_bytes() for what in ("start", "last")}


def resume(log: Path) -> D.Monitor:
    return D.Monitor(tg.trace_ntk(parts()[0]), parts()[1], y=parts()[2], loss=F.mse_loss, log=log, resume=True, every=1)


@pytest.mark.parametrize("what", ["start", "last"])
def test_no_flipped_byte_is_taken(tmp_path: Path, what: str) -> None:
    """24 of 24 were, and two of them changed numbers: everywhere in the file, the seal included."""
    log, files = begun(tmp_path)
    whole, beside = files[what], tmp_path / f"run.jsonl.{what}.pt"
    for at in [*range(0, len(whole), 211), *range(len(whole) - 48, len(whole))]:
        for bit in (1, 128):
            beside.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            with pytest.raises(tg.InputError, match=rf"{what}.pt is damaged \(.*\)\. Put it back whole"):
                resume(log)
    beside.write_bytes(whole)
    assert resume(log).history().steps.tolist() == [0, 1, 2]


def test_files_beside_a_log_that_are_others_are_refused(tmp_path: Path) -> None:
    """Cut off, longer, in each other's place, of another run, without a seal, of a forged size, no files at all."""
    log, files = begun(tmp_path)
    start, last = (tmp_path / f"run.jsonl.{what}.pt" for what in ("start", "last"))
    (tmp_path / "other").mkdir()
    _, others = begun(tmp_path / "other")
    body, seal = files["start"][: -runlog.SEAL], files["start"][-runlog.SEAL :]
    for harm, words in (
        (files["start"][:-1], "cut off"),
        (files["start"][1:], r"it has [\d,]+ bytes of"),
        (files["start"] + b"\0", "cut off"),
        (files["start"] + seal, r"it has [\d,]+ bytes of"),
        (body + (2**62).to_bytes(8, "little") + seal[8:], r"it has [\d,]+ bytes of 4,611,686"),
        (body, "an earlier version wrote it"),
        (files["last"], "not those that were written"),
        (b"", "cut off"),
    ):
        start.write_bytes(harm)
        with pytest.raises(tg.InputError, match=rf"start.pt is damaged \(.*{words}"):
            resume(log)
    start.write_bytes(others["start"])
    with pytest.raises(tg.InputError, match="start.pt is missing, or of another run"):
        resume(log)
    start.write_bytes(files["start"])
    last.write_bytes(others["last"])  # of another run: the velocity after it is not known
    assert resume(log)._last is None
    for path, what in ((start, "start"), (last, "last")):
        path.unlink()
        path.touch()
        os.truncate(path, 2**40)  # sparse
        with pytest.raises(tg.InputError, match=rf"{what}.pt is damaged \(it has 1,099,511,627,776 bytes, and"):
            resume(log)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(tg.InputError, match=rf"{what}.pt is damaged \(it is no file"):
            resume(log)
        path.unlink()
        path.write_bytes(files[what])
    assert resume(log).history().steps.tolist() == [0, 1, 2]
