"""Ray: one node, and under `make test-all` three (processes of their own), one of which is killed during a run."""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tangency as tg
from tangency import cli
from tangency.gram import ray as executors
from tangency.models import mlp

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported; its nodes inherit both
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray would keep its own below HOME
pytest.importorskip("ray", reason="Ray is not installed: pip install 'tangency[ray]'")

import cloudpickle
import ray
import test_executors
from ray.cluster_utils import Cluster
from test_executors import Noting, alive, eventually, noted

F64 = torch.float64
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


def descendants() -> set[int]:
    """Ray's processes among those that this one has started, and theirs."""
    parents, names = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end while we look
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            # Its program, not its arguments: other processes are given a path of modules on which Ray lies as well,
            # Python's server of forked processes in what follows its -c.
            command = (entry / "cmdline").read_bytes().split(b"\0")[:3]
            names[pid] = b" ".join(command[: 1 + (b"-c" not in command) * 2]).decode(errors="replace")
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid for pid in found if "ray::" in names.get(pid, "") or "/ray/" in names.get(pid, "")}


@pytest.fixture(scope="module")
def seen() -> set[int]:
    """Processes of the cluster that tests have met."""
    return set()


@pytest.fixture(scope="module")
def cluster(seen: set[int]) -> Iterator[Any]:
    assert not ray.is_initialized()
    assert not descendants()
    cloudpickle.register_pickle_by_value(test_executors)  # the nodes need not find the tests
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(**NODE)
        made.wait_for_nodes()
        yield made
    finally:
        seen |= descendants()
        ray.shutdown()
        made.shutdown()
        cloudpickle.unregister_pickle_by_value(test_executors)
    assert len(seen) > 6  # for each node a raylet and a worker at least
    assert eventually(lambda: not any(alive(pid) for pid in seen)), "Ray's processes outlive the tests"


def test_a_home_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: Any) -> None:
        raise PermissionError(13, "Permission denied", "/home/a/.ray")

    monkeypatch.setattr(ray, "init", start)
    with pytest.raises(tg.InputError, match=r"does not start: /home/a/.ray: Permission denied.*: RAY_AUTH_TOKEN="):
        tg.RayExecutor()

    def deaf(**_: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", deaf)
    with pytest.raises(ConnectionError, match="nobody answers"):
        tg.RayExecutor("10.0.0.1:6379")


def test_one_node(tmp_path: Path) -> None:
    """What the tests below say of three nodes, on one with one worker: bits, errors, room; Ray goes on without us."""
    model, x = mlp([5, 8, 3], nn.Tanh).double(), torch.randn(20, 5, dtype=F64)
    kernel, store = tg.trace_ntk(model), tmp_path / "gram"
    want = tg.compute(kernel, x, tile=8, progress=False).dense()
    cloudpickle.register_pickle_by_value(test_executors)
    ray.init(**NODE, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(
            tg.InputError, match=r"no room for a worker with 0 GPUs and 2 CPUs on one machine; it has {.*'CPU': "
        ):
            tg.RayExecutor(cpus=2)
        with pytest.raises(tg.InputError, match="needed: more than nothing"):
            tg.RayExecutor(cpus=0)
        with tg.RayExecutor() as executor:
            assert executor.workers == 1
            for where in (None, store):
                got = tg.compute(kernel, x, tile=8, executor=executor, store=where, progress=False).dense()
                assert torch.equal(got, want)
            assert tg.open_gram(store).progress == (6, 6)
            # Arrays of Ray's own store are read-only, which torch warns of.
            assert executor.submit(np.zeros, (200, 200)).result().flags.writeable
            with pytest.raises(KeyError, match="the seventh seal") as failed:
                tg.compute(tg.trace_ntk(Noting(tmp_path, "raise")), x, tile=8, executor=executor, progress=False)
            assert failed.type is KeyError
            x[13, 2] = float("nan")
            with pytest.raises(tg.NonFiniteError, match="sample 13 is not finite"):
                tg.compute(kernel, x, tile=8, executor=executor, progress=False)
            assert executor.workers == 1, "an error is no reason to lose a worker"
            assert len(noted(tmp_path)) == 1, "the worker was not at work"
            met = noted(tmp_path) | descendants()
        assert ray.is_initialized(), "somebody else's Ray was ended"
    finally:
        ray.shutdown()
        cloudpickle.unregister_pickle_by_value(test_executors)
    assert len(met) > 2
    assert eventually(lambda: not any(alive(pid) for pid in met)), "Ray's processes outlive the test"


@pytest.mark.slow
def test_the_bits_are_those_of_a_single_process(cluster: Any, seen: set[int], tmp_path: Path) -> None:
    """One executor for all: tiles large and small, runs that differ in their inputs alone, a store, errors."""
    model = mlp([5, 8, 3], nn.Tanh).double()
    x, y, z = (torch.randn(n, 5, dtype=F64) for n in (300, 37, 300))
    trace, full = tg.trace_ntk(model), tg.full_ntk(model)
    kernel = tg.trace_ntk(Noting(tmp_path))
    with tg.RayExecutor(cluster.address) as executor:
        # A busy machine starts them slowly; whoever is up takes tasks from the next one on.
        assert eventually(lambda: executor.submit(int).result() == 0 and executor.workers == 3)
        for k, a, b, tile in ((trace, x, None, 128), (trace, z, None, 128), (full, y, x, 16), (kernel, x, None, 16)):
            want = tg.compute(k, a, b, tile=tile, progress=False).dense()
            assert torch.equal(tg.compute(k, a, b, tile=tile, executor=executor, progress=False).dense(), want)
        assert len(noted(tmp_path)) == 3, "not every node was at work"
        seen |= noted(tmp_path) | descendants()
        store = tmp_path / "gram"
        got = tg.compute(kernel, x, tile=16, executor=executor, store=store, progress=False).dense()
        assert torch.equal(got, want)
        assert tg.open_gram(store).progress == (190, 190)
        # Arrays of Ray's own store are read-only, which torch warns of.
        assert executor.submit(np.zeros, (200, 200)).result().flags.writeable

        x[205, 2] = float("nan")
        with pytest.raises(tg.NonFiniteError, match="sample 205 is not finite") as there:
            tg.compute(trace, x, tile=16, executor=executor, progress=False)
        assert (type(there.value), there.value.sample) == (tg.NonFiniteError, 205)
        with pytest.raises(KeyError, match="the seventh seal") as failed:
            tg.compute(tg.trace_ntk(Noting(tmp_path, "raise")), z, tile=16, executor=executor, progress=False)
        assert failed.type is KeyError
        assert executor.workers == 3, "an error is no reason to lose a worker"
    assert not ray.is_initialized(), "who starts Ray ends it"


@pytest.mark.slow
def test_what_no_machine_has_room_for(cluster: Any) -> None:
    """Three machines with one CPU each have three CPUs, but no room for a worker with two."""
    for cpus in (100, 2):
        with pytest.raises(
            tg.InputError, match=rf"no room for a worker with 0 GPUs and {cpus} CPUs on one machine; it has {{.*'CPU': "
        ):
            tg.RayExecutor(cluster.address, cpus=cpus)
        assert not ray.is_initialized()
    with pytest.raises(tg.InputError, match="needed: more than nothing"):
        tg.RayExecutor(cluster.address, cpus=0)
    ray.init(cluster.address, log_to_driver=False)
    try:  # the room that an executor leaves is not free at once
        for _ in range(2):
            with tg.RayExecutor() as executor:
                assert executor.workers >= 1
        assert ray.is_initialized(), "somebody else's Ray was ended"
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_node_is_killed_and_another_one_joins(
    cluster: Any, seen: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, x = tg.trace_ntk(Noting(tmp_path, delay=0.3)), torch.randn(60, 5, dtype=F64)
    want = tg.compute(kernel, x, tile=4, progress=False).dense()
    store = tmp_path / "gram"
    lost = next(node for node in cluster.list_all_nodes() if not node.is_head())
    at_the_kill: dict[str, Any] = {}

    def kill() -> None:
        def begun() -> bool:
            with contextlib.suppress(tg.StoreError):  # it is not there yet
                return tg.open_gram(store).progress[0] >= 3 and len(noted(tmp_path)) == 3
            return False

        assert eventually(begun)
        seen.update(noted(tmp_path) | descendants())
        cluster.remove_node(lost, allow_graceful=False)
        at_the_kill["done"], at_the_kill["all"] = tg.open_gram(store).progress

    ray.init(cluster.address, log_to_driver=False)
    assert eventually(lambda: ray.available_resources().get("CPU") == 3)
    with tg.RayExecutor() as executor:
        # A busy machine starts them slowly; whoever is up takes tasks from the next one on.
        assert eventually(lambda: executor.submit(int).result() == 0 and executor.workers == 3)
        killer = threading.Thread(target=kill)
        killer.start()
        got = tg.compute(kernel, x, tile=4, executor=executor, store=store, progress=False).dense()
        killer.join()
        assert at_the_kill["all"] == 120
        assert 3 <= at_the_kill["done"] < 110, "the kill was not in the middle of the run"
        assert executor.workers == 2
        assert sum(alive(pid) for pid in noted(tmp_path)) == 2, "nothing was killed"
        assert torch.equal(got, want)

        before = noted(tmp_path)
        monkeypatch.setattr(executors, "LOOK", 0.2)
        cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        for _ in range(5):  # it takes a while to come up
            got = tg.compute(kernel, x, tile=4, executor=executor, progress=False).dense()
            assert torch.equal(got, want)
            if executor.workers == 3:
                break
        assert len(noted(tmp_path) - before) == 1, "nobody has joined"
    ray.shutdown()


JOB = """
import torch, tangency as tg
def make():
    torch.manual_seed(0)
    return tg.trace_ntk(tg.models.mlp([5, 8, 3]).double()), torch.randn(60, 5, dtype=torch.float64)
"""


def test_the_command_line_asks_for_the_cluster(
    job_module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Here:
        """Stands in for workers on a cluster."""

        workers = 1

        def __init__(self, address: str) -> None:
            done.append(f"connect to {address}")

        def submit(self, f: Callable[..., Any], *args: Any) -> Future[Any]:
            done.append("work")
            answer: Future[Any] = Future()
            answer.set_result(f(*args))
            return answer

        def close(self) -> None:
            done.append("close")

    monkeypatch.setattr("tangency.gram.ray.RayExecutor", Here)
    job = f"{job_module(JOB)}:make"
    assert cli.main(["gram", job, "--store", "k", "--tile", "16", "--ray", "ray://head:10001"]) == 0
    assert list(dict.fromkeys(done)) == ["connect to ray://head:10001", "work", "close"]
    assert cli.main(["verify", "k", job, "--sample", "5"]) == 0


@pytest.mark.slow
def test_the_command_line(cluster: Any, job_module: Callable[[str], str]) -> None:
    job = f"{job_module(JOB)}:make"
    assert cli.main(["gram", job, "--store", "k", "--tile", "16", "--ray", cluster.address]) == 0
    assert cli.main(["verify", "k", job, "--sample", "5"]) == 0
    assert not ray.is_initialized()
