"""Other processes compute the tiles: the same bits, whatever happens to them on the way."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import FORK
from torch import Tensor, nn

import tangency as tg
from tangency.gram import executors, work
from tangency.gram.executors import ATTEMPTS, results
from tangency.models import mlp

F64 = torch.float64


class Noting(nn.Module):
    """A model that leaves its process's number in a folder and then, outside of the process that made it, acts."""

    def __init__(self, folder: Path, act: str = "", delay: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3, dtype=F64)
        self.folder, self.act, self.delay, self.home = str(folder), act, delay, os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.home:
            Path(self.folder, str(os.getpid())).touch()
            time.sleep(self.delay)
            if self.act == "wait for a kill" and len(noted(Path(self.folder))) == 1:  # the first one only
                threading.Event().wait()
            if self.act == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.act == "raise":
                raise KeyError("the seventh seal")
            if self.act == "raise what cannot be sent":
                raise Unsendable(1, 2)
        return self.layer(x)


class Unsendable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def noted(folder: Path) -> set[int]:
    return {int(p.name) for p in folder.iterdir() if p.name.isdigit()}


def alive(pid: int) -> bool:
    """Whether there is such a process that is more than an entry in its parent's table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    """Waits until it is so: for ever, if the timeout of pytest did not end it (a busy machine may need long)."""
    while not condition():
        time.sleep(0.01)
    return True


class Later:
    """The least that a future may be: it has a result, and cannot say whether it is done."""

    def __init__(self, call: bytes) -> None:
        self.call = call

    def result(self) -> Any:
        f, args = pickle.loads(self.call)
        return f(*args)


class Minimal:
    def submit(self, f: Callable[..., Any], *args: Any) -> Later:
        return Later(pickle.dumps((f, args)))


def processes(count: int, start: str) -> ProcessPoolExecutor:
    """With one thread each: forks of a process whose OpenMP threads have run would wait for them for ever."""
    context = multiprocessing.get_context(start)
    return ProcessPoolExecutor(count, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))


EXECUTORS: dict[str, Callable[[], Any]] = {
    "a spawned process": lambda: processes(1, "spawn"),  # slow: no newer than the workers are
    "forked processes": lambda: processes(2, "fork"),
    "three threads": lambda: ThreadPoolExecutor(3),
    "minimal": lambda: contextlib.nullcontext(Minimal()),
}


@pytest.mark.parametrize(
    "name",
    ["workers", *(pytest.param(k, marks=pytest.mark.slow) if k == "a spawned process" else k for k in EXECUTORS)],
)
@pytest.mark.every(2)
def test_the_bits_are_those_of_a_single_process(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One executor for several runs: nothing of a run may be left for the next, though only the inputs differ."""
    model = mlp([5, 8, 3], nn.Tanh).double()
    x, y, z = (torch.randn(n, 5, dtype=F64) for n in (21, 11, 21))
    trace, full = tg.trace_ntk(model), tg.full_ntk(model)
    runs = [(trace, x, None), (trace, z, None), (tg.cosine(trace), x, y), (full, x, y)]
    shared = name == "workers"  # those that are there anyway
    with contextlib.nullcontext(request.getfixturevalue(name)) if shared else EXECUTORS[name]() as executor:
        submitted, submit = [], executor.submit
        monkeypatch.setattr(executor, "submit", lambda *call: submitted.append(call) or submit(*call))
        for k, (kernel, a, b) in enumerate(runs):
            want = tg.compute(kernel, a, b, tile=8, progress=False).dense()
            assert not submitted
            got = tg.compute(kernel, a, b, tile=8, executor=executor, progress=False).dense()
            assert torch.equal(got, want), f"run {k} in memory"
            assert submitted, "the executor was not used"
            submitted.clear()
            if k in (1, 3):
                folder = tmp_path / str(k)
                got = tg.compute(kernel, a, b, tile=8, executor=executor, store=folder, progress=False).dense()
                assert torch.equal(got, want), f"run {k} in a store"
                assert tg.open_gram(folder).progress == (6, 6)
                assert submitted
                submitted.clear()


def test_a_killed_worker_is_replaced_and_they_end_with_their_context(tmp_path: Path) -> None:
    """Left early by an error: what is queued is dropped, the processes are gone. They count threads as we do."""
    model, x = Noting(tmp_path, "wait for a kill"), torch.randn(12, 5, dtype=F64)
    kernel = tg.trace_ntk(model)
    killed: set[int] = set()

    def kill_one() -> None:
        assert eventually(lambda: bool(noted(tmp_path)))  # it has begun a task
        (pid,) = noted(tmp_path)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)

    assert not noted(tmp_path)
    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        want = tg.compute(kernel, x, tile=4, progress=False).dense()
        with pytest.raises(KeyError, match="early"), tg.Workers(1) as executor:
            got = tg.compute(kernel, x, tile=4, executor=executor, progress=False).dense()
            killer.join()
            assert torch.equal(got, want)
            assert len(killed) == 1
            pids = {f.result() for f in [executor.submit(_pid_after, 0.0) for _ in range(6)]}
            assert noted(tmp_path) - killed == pids, "nobody took its place"
            assert executor.submit(torch.get_num_threads).result() == 3
            assert len(pids) == executor.workers == 1
            assert os.getpid() not in pids
            assert all(alive(pid) for pid in pids)
            queued = [executor.submit(_pid_after, 1.0) for _ in range(1000)]
            raise KeyError("early")
    finally:
        torch.set_num_threads(threads)
    assert sum(f.cancelled() for f in queued) >= 900
    assert not any(alive(pid) for pid in pids | killed)


def _pid_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_a_task_that_is_always_lost_is_given_up() -> None:
    tries: list[int] = []

    def lost(k: int) -> None:
        tries.append(k)
        raise tg.WorkerLost("the worker is gone")

    with (
        ThreadPoolExecutor(2) as pool,
        pytest.raises(tg.WorkerLost, match=f"lost {ATTEMPTS} times .* given up.* is gone"),
    ):
        list(results(pool.submit, [(lost, 0)], lambda: 2))
    assert tries == [0] * ATTEMPTS


@pytest.mark.slow
def test_a_task_that_kills_its_workers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "ATTEMPTS", 2)
    kernel, x = tg.trace_ntk(Noting(tmp_path, "die")), torch.randn(4, 5, dtype=F64)
    with tg.Workers(1) as executor, pytest.raises(tg.WorkerLost, match=r"lost 2 times .* given up.* is gone"):
        tg.compute(kernel, x, tile=4, executor=executor, progress=False)
    assert len(noted(tmp_path)) == 2
    assert not any(alive(pid) for pid in noted(tmp_path))


def test_a_sample_that_is_not_finite_is_named_by_its_number(workers: tg.Workers) -> None:
    kernel = tg.trace_ntk(mlp([5, 8, 3], nn.Tanh).double())
    x, y = torch.randn(37, 5, dtype=F64), torch.randn(19, 5, dtype=F64)
    broken = {29: x.clone(), 13: y.clone()}
    for sample, samples in broken.items():
        samples[sample, 2] = float("nan")
    for sample, sides in ((29, (broken[29],)), (29, (broken[29], y)), (13, (x, broken[13]))):
        with pytest.raises(tg.NonFiniteError) as here:
            tg.compute(kernel, *sides, tile=8, progress=False)
        with pytest.raises(tg.NonFiniteError, match=rf"sample {sample} is not finite") as there:
            tg.compute(kernel, *sides, tile=8, executor=workers, progress=False)
        assert str(there.value) == str(here.value)
        assert (there.value.sample, there.value.layer) == (sample, here.value.layer)


def test_errors_of_the_model_arrive(workers: tg.Workers, tmp_path: Path) -> None:
    x = torch.randn(9, 5, dtype=F64)
    with pytest.raises(KeyError, match="the seventh seal"):
        tg.compute(tg.trace_ntk(Noting(tmp_path, "raise")), x, tile=4, executor=workers, progress=False)
    with pytest.raises(RuntimeError, match="Unsendable: 1 and 2"):
        kernel = tg.trace_ntk(Noting(tmp_path, "raise what cannot be sent"))
        tg.compute(kernel, x, tile=4, executor=workers, progress=False)
    good = tg.trace_ntk(Noting(tmp_path))  # and the workers are as good as before
    got = tg.compute(good, x, tile=4, executor=workers, progress=False).dense()
    assert torch.equal(got, tg.compute(good, x, tile=4, progress=False).dense())
    assert 1 <= len(noted(tmp_path)) <= 2, "an error is no reason to lose a worker"


def test_functions_that_have_no_name(workers: tg.Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp([5, 8, 3], nn.Tanh).double(), torch.randn(20, 5, dtype=F64)
    kernel = tg.head_ntk(model, lambda out: out[:, 0] * out[:, 1])
    got = tg.compute(kernel, x, tile=8, executor=workers, progress=False).dense()
    assert torch.equal(got, tg.compute(kernel, x, tile=8, progress=False).dense())
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(tg.InputError, match="cannot be sent .*lambda.* or pip install 'tangency.workers.'"):
        tg.compute(kernel, x, tile=8, executor=workers, progress=False)
    named = tg.trace_ntk(model)  # needs no cloudpickle
    got = tg.compute(named, x, tile=8, executor=workers, progress=False).dense()
    assert torch.equal(got, tg.compute(named, x, tile=8, progress=False).dense())


def test_executors_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = tg.trace_ntk(mlp([5, 8, 3])), torch.randn(9, 5)
    for executor, message in (
        ("nope", r"executor='nope'; needed: 'gpus', tg.Workers"),
        (object(), r"executor is a object; .* an object with submit\(f, \*args\).result\(\)"),
        (2, r"executor is a int; needed"),
        ("gpus", r"executor='gpus' needs the model on a GPU: model.cuda\(\)"),
    ):
        with pytest.raises(tg.InputError, match=message):
            tg.compute(kernel, x, executor=executor, progress=False)
    for devices in ([], 0, -1):
        with pytest.raises(
            tg.InputError, match=rf"Workers\({devices!r}\): needed: at least one device".replace("[", r"\[")
        ):
            tg.Workers(devices)
    for odd in ("cuda:0", ["gpu:0"], ["cuda:first"]):
        with pytest.raises(tg.InputError, match=r"a list of devices such as \['cuda:0', 'cuda:1'\]"):
            tg.Workers(odd)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with tg.Workers(["cuda:3"]) as one, pytest.raises(tg.InputError, match="no cuda:3: CUDA_VISIBLE_DEVICES=5 has 1"):
        tg.compute(kernel, x, executor=one, progress=False)


SCRIPT = """
import os, pathlib
import torch, tangency as tg

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.home = torch.nn.Linear(5, 3), os.getpid()

    def forward(self, x):
        if os.getpid() != self.home:
            pathlib.Path({folder!r}, str(os.getpid())).touch()
        return self.layer(x).tanh()

torch.set_num_threads(1)
kernel, x = tg.trace_ntk(Model()), torch.randn(20, 5)
want = tg.compute(kernel, x, tile=4, progress=False).dense()
got = tg.compute(kernel, x, tile=4, executor=tg.Workers(1), progress=False).dense()
print("equal", torch.equal(got, want))
"""


def script(folder: Path) -> subprocess.Popen[str]:
    """A script that guards nothing and closes nothing, in a folder with a file that it does not mean to import."""
    (folder / "cwd").mkdir()
    (folder / "cwd" / "zarr.py").write_text("raise SystemExit('imported from the working directory')", encoding="utf-8")
    (folder / "cwd" / "torch.py").write_text(
        "raise SystemExit('imported from the working directory')", encoding="utf-8"
    )
    code = textwrap.dedent(SCRIPT).format(folder=str(folder))
    (folder / "script.py").write_text(code, encoding="utf-8")
    command = [sys.executable, str(folder / "script.py")]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder / "cwd", stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    out, errors = (process := script(tmp_path)).communicate()
    assert (process.returncode, out, errors) == (0, "equal True\n", "")
    assert len(noted(tmp_path)) == 1
    assert eventually(lambda: not any(alive(pid) for pid in noted(tmp_path))), "workers outlive the script"


def test_a_script_without_cloudpickle_is_told_what_to_do(workers: tg.Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script defines is sent by its name in `__main__`, which is another in a worker."""

    class OfTheScript(nn.Linear):
        pass

    OfTheScript.__module__, OfTheScript.__qualname__ = "__main__", "OfTheScript"
    monkeypatch.setattr(sys.modules["__main__"], "OfTheScript", OfTheScript, raising=False)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    message = (
        "a worker cannot unpack the kernel: .*OfTheScript.* in a module that the workers can import too, or pip "
        r"install 'tangency\[workers\]'"
    )
    with pytest.raises(tg.InputError, match=message):
        tg.compute(tg.trace_ntk(OfTheScript(5, 3)), torch.randn(9, 5), tile=4, executor=workers, progress=False)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    process = FORK.Process(target=_compute_slowly, args=(tmp_path,))
    process.start()
    assert eventually(lambda: len(noted(tmp_path)) == 1)
    process.kill()
    process.join()
    assert eventually(lambda: not any(alive(pid) for pid in noted(tmp_path))), "orphans"


def _compute_slowly(folder: Path) -> None:
    kernel, x = tg.trace_ntk(Noting(folder, delay=0.05)), torch.randn(200, 5, dtype=F64)
    tg.compute(kernel, x, tile=4, executor=tg.Workers(1), progress=False)


def test_only_so_many_calls_are_under_way() -> None:
    """Inputs are loaded when their call is made, so this bounds the memory; what is lost goes again, nothing twice."""
    with ThreadPoolExecutor(4) as pool:
        under_way, most, tries = 0, 0, [0] * 40
        lock = threading.Lock()

        def work(k: int) -> int:
            with lock:
                tries[k] += 1
                if k % 7 == 0 and tries[k] < ATTEMPTS:
                    raise tg.WorkerLost("gone")
            time.sleep(0.002 * (k % 3))
            return k

        def calls() -> Iterator[tuple[Any, ...]]:
            nonlocal under_way, most
            for k in range(40):
                under_way += 1
                most = max(most, under_way)
                yield work, k

        found = []
        for k in results(pool.submit, calls(), lambda: 3):
            found.append(k)
            under_way -= 1
    assert sorted(found) == list(range(40))
    assert most == 5
    assert tries == [ATTEMPTS if k % 7 == 0 else 1 for k in range(40)]


def arrived(t: torch.Tensor) -> torch.Tensor:
    return 2 * t.double()


def test_tensors_of_a_gpu_are_put_where_the_worker_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that GPU tensors take, here float64 for far and float32 for near: parameters, buffers, tied weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval().double()
    model[2].weight = model[0].weight
    monkeypatch.setattr(work, "_far", lambda t: t.dtype == torch.float64)
    monkeypatch.setattr(work, "_leave", lambda t: t.detach().float())
    monkeypatch.setattr(work, "_arrive", arrived)
    packed = work.pack(tg.trace_ntk(model, params=model.state_dict()))
    monkeypatch.undo()
    got = work.unpack(packed).feature_map.network
    for name, p in model.named_parameters():
        assert torch.equal(dict(got.model.named_parameters())[name], 2 * p), name
        assert isinstance(dict(got.model.named_parameters())[name], nn.Parameter)
        assert torch.equal(got.params[name], 2 * p.detach())
    assert torch.equal(got.model[1].running_var, 2 * model[1].running_var)
    assert got.model[2].weight is got.model[0].weight
