"""The memory that is there: what a plan holds, how often samples are captured, blocks on disk, memory that runs out."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency._base import memory
from tangency._base.types import Inputs
from tangency.gram import executors, spill
from tangency.gram.plan import Footprint, held_by, plan
from tangency.gram.prepared import size_of, tensors_in
from tangency.gram.spill import Spill
from tangency.models import mlp

CPU = torch.device("cpu")
F64 = torch.float64


class Counting(tg.Kernel):
    """⟨x, y⟩ by features that take `times` as much memory as the samples; which samples were prepared is noted."""

    def __init__(self, times: int = 50, says: int | None = None) -> None:
        self.times, self.says = times, says
        self.prepared: list[float] = []

    def prepare(self, x: Inputs, memory: int | None = None) -> dict[str, Tensor]:
        assert isinstance(x, Tensor)
        self.prepared += x[:, 0].tolist() if len(x) > 1 else []  # a store's witness are single samples
        return {"features": x.repeat(1, self.times) / self.times, "plain": x}

    def pair(self, a: dict[str, Tensor], b: dict[str, Tensor], workspace: int | None = None) -> Tensor:
        return a["features"] @ b["features"].T

    def spec(self) -> dict[str, Any]:
        return {"kernel": "counting"}

    def entry(self, x: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        return x.new_zeros(1, 1)

    def footprint(self, x: Inputs) -> tuple[int, int]:
        assert isinstance(x, Tensor)
        size = x[0].numel() * x.element_size()
        return (size * (self.times + 1) if self.says is None else self.says), size


def samples(n: int, first: int = 0) -> Tensor:
    x = torch.randn(n, 100, dtype=F64, generator=torch.Generator().manual_seed(first))
    x[:, 0] = torch.arange(first, first + n)
    return x


def often(kernel: Counting, x: Tensor, y: Tensor | None = None, **options: Any) -> tuple[Tensor, dict[float, int]]:
    """The Gram matrix, and how often each sample was prepared."""
    kernel.prepared = []
    gram = tg.compute(kernel, x, y, progress=False, **options).dense()
    return gram, {v: kernel.prepared.count(v) for v in kernel.prepared}


def test_every_sample_is_prepared_once_where_all_fit() -> None:
    kernel, x, y = Counting(), samples(40), samples(13, 100)
    for options in ({}, {"tile": 7}, {"memory": "8MB"}):
        assert set(often(kernel, x, **options)[1].values()) == {1}
        for left, right in ((x, y), (y, x)):
            gram, counts = often(kernel, left, right, **options)
            assert set(counts.values()) == {1}
            torch.testing.assert_close(gram, kernel(left, right))


def test_the_smaller_side_is_held_where_both_do_not_fit() -> None:
    """Room for about half of the samples: all of the other side, and some that pass by."""
    kernel, x, y = Counting(), samples(60), samples(6, 100)
    for left, right in ((x, y), (y, x)):
        assert set(often(kernel, left, right, tile=6, memory=int(1.6 * 30 * 40_800))[1].values()) == {1}
    few = often(kernel, x, samples(60, 100), tile=6, memory=int(1.6 * 30 * 40_800))[1]
    assert max(few.values()) > 1  # that this is a budget into which not all fits


def test_networks_capture_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forward and backward passes of a run after the probe's, and the same bits as when the kernel is called."""
    from tangency.engine import features

    seen: list[int] = []
    capture = features.capture

    def noted(network: Any, state: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(len(x))
        return capture(network, state, x, *args, **options)

    monkeypatch.setattr(features, "capture", noted)
    x = torch.randn(24, 5, dtype=F64)
    for make in (tg.trace_ntk, tg.full_ntk, lambda m: tg.cosine(tg.trace_ntk(m)), lambda m: 2 * tg.trace_ntk(m)):
        kernel = make(mlp([5, 8, 3], nn.Tanh).double())
        gram = tg.compute(kernel, x, progress=False).dense()
        assert sum(seen) == 24
        assert torch.equal(gram, kernel(x))  # micro-batches, workspace and tile are the same
        seen.clear()


def test_costs_say_what_a_plan_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures that were announced and those that were counted, within a third; bytes of a sample at most as said."""
    kernel, x, y = (
        tg.trace_ntk(mlp([50, 80, 3]).double()),
        torch.randn(200, 50, dtype=F64),
        torch.randn(90, 50, dtype=F64),
    )
    said, prepared, prepare = kernel.costs(x[:4]), list[int](), type(kernel).prepare
    # Less where weights and biases share their cotangents, as they do in a batch that is captured as a whole.
    assert 0.5 * said.kept <= size_of(kernel.prepare(x)) / 200 <= said.kept
    assert [(w.way, w.captures) for w in said.ways(200, memory="1GiB")] == [("all at once", 200)]
    assert [(w.way, w.captures) for w in said.ways(200, 90, memory="1GiB")] == [("all at once", 290)]
    assert "all fit into the budget" in str(said)

    def counted(self: Any, x: Tensor, memory: int | None = None) -> Any:
        prepared.append(len(x))
        return prepare(self, x, memory)

    monkeypatch.setattr(type(kernel), "prepare", counted)
    for other, n, m, budget in ((None, 200, None, "900kB"), (y, 200, 90, "700kB")):
        ways = {w.way: w for w in said.ways(n, m, memory=budget)}
        *names, half = ways
        assert names == ["all at once", "tiles", "tiles, on disk"]
        assert half.startswith("16 bits, ")
        assert not ways["all at once"].possible
        tg.compute(kernel, x, other, memory=budget, progress=False)
        assert sum(prepared) == pytest.approx(ways["tiles"].captures, rel=1 / 3)
        assert ways["tiles, on disk"].captures == (200 if m is None else 290)
        assert ways["tiles"].captures > ways[half].captures >= ways["tiles, on disk"].captures
        prepared.clear()
    both = (kernel + kernel).costs(x[:4])
    assert (both.kept, both.transient) == (2 * said.kept, said.transient)
    large = str(replace(said, n=10**9, m=10**9))
    assert "more than the budget has room for" in large
    assert "tiles, on disk" in large


def test_an_entry_is_like_those_of_tiles() -> None:
    model, x = mlp([5, 8, 3]), torch.randn(4, 5)
    for dtype in (None, "float64", "float32", "tf32", "float16"):
        for k in (tg.trace_ntk(model, dtype=dtype), tg.full_ntk(model, dtype=dtype), tg.conjugate_kernel(model)):
            for kernel in (k, 2 * k, k + k, tg.cosine(tg.trace_ntk(model, dtype=dtype))):
                tile, entry = kernel(x[:1]), kernel.entry(kernel.ready(x))
                assert (entry.shape, entry.dtype) == (tile.shape, tile.dtype) or len(entry) > 1


def test_blocks_are_held_by_what_the_first_one_takes() -> None:
    """A footprint that is ten times too large has more blocks held than planned, one too small fewer."""
    x, room = samples(64), 2 * 64 * 40_800
    true = often(Counting(), x, tile=2, memory=room)
    large = often(Counting(says=10 * 40_800), x, tile=2, memory=room)
    assert set(true[1].values()) == set(large[1].values()) == {1}
    torch.testing.assert_close(true[0], large[0])
    with pytest.warns(tg.PerformanceWarning, match="a sample takes 40800 bytes, where 408 were expected; going on"):
        small, counts = often(Counting(says=408), x, memory=room // 4)
    assert max(counts.values()) > 2
    torch.testing.assert_close(true[0], small)


def test_a_budget_decides_no_bits_of_a_tile(tmp_path: Path) -> None:
    """A store begun with little memory goes on with much, in other groups of blocks."""
    kernel, x = tg.trace_ntk(mlp([5, 40, 3]).double()), torch.randn(40, 5, dtype=F64)
    begun = tg.compute(kernel, x, store=tmp_path / "k", memory="150kB", tile=4, progress=False)
    whole = begun.dense()
    gone = sorted((tmp_path / "k" / "c").rglob("*"))
    for path in [p for p in gone if p.is_file()][::3]:
        path.unlink()
    again = tg.compute(kernel, x, store=tmp_path / "k", memory="1GiB", progress=False)
    assert torch.equal(whole, again.dense())


def test_plans_of_like_budgets_are_alike() -> None:
    """What is free changes from run to run; what decides the bits of a tile changes by powers of two only."""
    size = Footprint(400_000, 1 << 20, 1 << 20, 4)
    cuts = {(c.rows, c.capture, c.workspace) for c in (plan(300, 300, True, b << 20, size) for b in range(8800, 9400))}
    assert len(cuts) == 1
    assert plan(300, 300, True, 8800 << 20, size).once


def test_a_plan_that_holds_all_needs_no_room_for_columns() -> None:
    for n, m, symmetric in ((100, 100, True), (100, 40, False), (40, 100, False)):
        size = Footprint(0, 1 << 20, 1 << 10, 8, m=m)
        least = next(b for b in range(50 << 20, 400 << 20, 1 << 20) if plan(n, m, symmetric, b, size).once)
        cut = plan(n, m, symmetric, least, size)
        passing = 0 if symmetric else cut.rows
        need = (min(n, m) + passing << 20) + cut.capture + 8 * cut.workspace
        assert need <= 0.8 * least
        assert cut.columns == (m < n and not symmetric)
        assert not held_by(cut, size.room(least // 2), size).once


# The budget of a CPU where nobody gives one.


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], None]:
    """Files of a system that does not exist: 64 GiB free, no limits. Writes more of them."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "groups")

    def write(name: str, text: object) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")

    write("proc/meminfo", f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {64 << 20} kB")
    write("proc/self/limits", "Limit   Soft Limit\nMax address space         unlimited            unlimited   bytes")
    return write


def test_what_is_free_is_the_least_of_all_limits(system: Callable[[str, object], None]) -> None:
    assert memory.available_memory() == 64 << 30
    # Version 2, a job inside a service: each has a limit, and what files take can be had again.
    system("proc/self/cgroup", "0::/service/job")
    system("groups/service/job/memory.max", "max")
    system("groups/service/memory.max", 32 << 30)
    system("groups/service/memory.current", 10 << 30)
    assert memory.available_memory() == 22 << 30
    system("groups/service/memory.stat", f"anon 1\ninactive_file {4 << 30}\nactive_file 5")
    assert memory.available_memory() == 26 << 30
    system("groups/service/job/memory.max", 8 << 30)
    system("groups/service/job/memory.current", 1 << 30)
    assert memory.available_memory() == 7 << 30
    system("groups/service/job/memory.high", 5 << 30)
    assert memory.available_memory() == 4 << 30
    # Version 1 beside it; inside a container the group stands at the top, whatever it is called outside.
    system("proc/self/cgroup", "4:cpu,memory:/docker/abc\n3:cpu:/\n0::/")
    system("groups/service/memory.max", "max")
    assert memory.available_memory() == 64 << 30
    system("groups/memory/memory.limit_in_bytes", 3 << 30)
    system("groups/memory/memory.usage_in_bytes", 2 << 30)
    system("groups/memory/memory.stat", f"inactive_file 7\ntotal_inactive_file {1 << 30}")
    assert memory.available_memory() == 2 << 30
    system("groups/memory/docker/memory.limit_in_bytes", 1 << 30)
    system("groups/memory/docker/memory.usage_in_bytes", 2 << 30)
    assert memory.available_memory() == 0


def test_a_limit_on_addresses_counts(system: Callable[[str, object], None]) -> None:
    system("proc/self/limits", f"Max address space         {8 << 30}            unlimited   bytes")
    system("proc/self/status", f"VmPeak: 9 kB\nVmSize:  {3 << 20} kB")
    assert memory.available_memory() == 5 << 30


def test_the_default_budget_is_a_share_of_what_is_free(system: Callable[[str, object], None]) -> None:
    alone = memory.gram_budget(CPU)
    assert 0.6 * (64 << 30) <= alone <= 0.7 * (64 << 30)
    with tg.Workers(4) as four, ThreadPoolExecutor(2) as two:
        assert [executors.workers_here(e) for e in (None, "gpus", four, two, object())] == [1, 1, 4, 2, 0]
    assert 0.15 * (64 << 30) <= memory.gram_budget(CPU, 4) <= 0.175 * (64 << 30)
    assert memory.gram_budget(CPU, 0) == 4 << 30  # other machines, of which nothing is known
    system("proc/meminfo", "MemAvailable: 1024 kB")
    assert 0.6 * (1 << 20) <= memory.gram_budget(CPU, 0) == memory.gram_budget(CPU) <= 0.7 * (1 << 20)


# Blocks on disk.


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks on disk pay, whatever the clock says."""
    monkeypatch.setattr(spill, "pays", lambda *_: True)


@pytest.mark.usefixtures("pays")
def test_what_comes_back_from_disk_is_the_same(tmp_path: Path) -> None:
    """Bits, strides, places in a cache line, shared memory, structure; nothing is seen in the folder meanwhile."""
    model = tg.models.lenet5(3).eval()
    x, k = torch.randn(5, 3, 32, 32), tg.trace_ntk(model)
    for kernel in (k, tg.cosine(k), tg.sum(k, tg.pseudo_ntk(model)), tg.conjugate_kernel(model)):
        store = Spill([tmp_path], 1000, 1000)
        with pytest.warns(tg.PerformanceWarning, match=r"a temporary file in .* \(removed at the end\)"):
            made = store.get((0, 0), lambda: x, kernel.prepare)
        assert (0, 0) in store
        back = store.get((0, 0), lambda: pytest.fail("it is there"), kernel.prepare)
        assert not list(tmp_path.iterdir())
        for t, u in zip(tensors_in(made), tensors_in(back), strict=True):
            assert torch.equal(t, u)
            assert t.dtype == u.dtype
            assert t.stride() == u.stride()
            assert t.data_ptr() % spill.LINE == u.data_ptr() % spill.LINE
        assert size_of(back) <= size_of(made) + 2 * spill.LINE * len(tensors_in(made))
        assert torch.equal(kernel.pair(made, made), kernel.pair(back, back))
        store.close()


@pytest.mark.usefixtures("pays")
def test_tensors_that_share_memory_share_it_on_disk(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    made = {"all": base[100:900].view(20, 40), "part": base[110:120], "turned": base[100:900].view(40, 20).T}
    made |= {"none": base[100:100], "wide": torch.tensor(2.0).expand(3, 4), "flag": True}
    store = Spill([tmp_path], 1000, 1000)
    with pytest.warns(tg.PerformanceWarning):
        store.get((0, 0), lambda: base, lambda x: made)
    assert store._end <= 4 * 801 + 8
    back = store.get((0, 0), lambda: base, lambda x: pytest.fail("it is there"))
    for name, t in made.items():
        assert torch.equal(t, back[name]) if isinstance(t, Tensor) else t == back[name]
    assert back["all"].untyped_storage().data_ptr() == back["turned"].untyped_storage().data_ptr()


def test_a_block_with_more_than_tensors_is_made_again(tmp_path: Path) -> None:
    class Own:
        pass

    for made in ({"x": torch.ones(3), "own": Own()}, {"x": torch.ones(3).to_sparse()}, torch.ones(3, device="meta")):
        store = Spill([tmp_path], 1, 1)
        assert store.get((0, 0), lambda: torch.ones(1), lambda x, made=made: made) is made
        assert store.worth is False
        assert (0, 0) not in store


BUDGET = int(1.6 * 30 * 40_800)


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("other", [None, 60])
def test_with_a_disk_every_sample_is_prepared_once(other: int | None, store: bool, tmp_path: Path) -> None:
    """Symmetric: once each. Two sides: once each too. The same bits as from tiles alone, and nothing is left behind."""
    x, y = samples(60), None if other is None else samples(other, 100)
    where = {"store": tmp_path / "spilled"} if store else {}
    with pytest.warns(tg.PerformanceWarning, match="prepared samples do not fit"):
        spilled, counts = often(Counting(), x, y, tile=5, memory=BUDGET, **where)
    assert set(counts.values()) == {1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "pays", lambda *_: False)
        tiles, again = often(Counting(), x, y, tile=5, memory=BUDGET)
    assert max(again.values()) > 1
    assert torch.equal(spilled, tiles)
    assert torch.equal(spilled, often(Counting(), x, y, tile=5, memory="1GiB")[0])
    assert [p.name for p in tmp_path.iterdir()] == ["spilled"] * store


@pytest.mark.usefixtures("pays")
@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_a_disk_that_is_full_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room at all; room for some blocks; a disk that fills up, or fails to read, in the middle."""
    x = samples(60)
    want, plain = often(Counting(), x, tile=5, memory=BUDGET)
    disk, write, read = spill.shutil.disk_usage, os.pwrite, os.preadv
    usage = disk("/")

    def room(free: int) -> None:
        monkeypatch.setattr(spill.shutil, "disk_usage", lambda _: usage._replace(free=free))

    counts = []
    for free in (0, 2 * 5 * 40_800 * 3, 1 << 40):
        room(free)
        got, seen = often(Counting(), x, tile=5, memory=BUDGET)
        assert torch.equal(got, want)
        counts.append(sum(seen.values()))
    assert counts[0] > counts[1] > counts[2] == sum(plain.values()) == 60
    calls = [0]

    def failing(real: Callable[..., int], after: int) -> Callable[..., int]:
        def call(*args: Any) -> int:
            calls[0] += 1
            if calls[0] > after:
                raise OSError(28, "No space left on device")
            return real(*args)

        return call

    for name, real in (("pwrite", write), ("preadv", read)):
        for after in (0, 3):
            calls[0] = 0
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(spill.os, name, failing(real, after))
                assert torch.equal(often(Counting(), x, tile=5, memory=BUDGET)[0], want)


@pytest.mark.usefixtures("pays")
@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_file_is_closed_whatever_happens(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Spill] = []
    keep = Spill._keep

    def noted(self: Spill, *args: Any) -> None:
        keep(self, *args)
        made.append(self)
        if len(made) == 3:
            assert self._file is not None
            raise error("in the middle")

    monkeypatch.setattr(Spill, "_keep", noted)
    with pytest.raises(error):
        often(Counting(), samples(60), tile=5, memory=BUDGET)
    assert made[0]._file is None


def test_when_a_disk_pays() -> None:
    assert not spill.pays(1000, 0.5, 1.0, 1.0)  # as slow to read as to make
    assert not spill.pays(4, 1, 1.0, 0.0)  # too little to be gained
    assert spill.pays(10, 1, 1.0, 0.1)
    assert not spill.pays(10, 0.1, 1.0, 0.1)  # hardly any block is met again


def test_files_that_take_memory_are_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"{tmp_path}/a\\040b"
    lines = f"/dev/vda / ext4 rw 0 0\ntmpfs {here} tmpfs rw 0 0\n/dev/x {here}/disk xfs rw 0 0\n"
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda p, **k: lines if str(p) == "/proc/self/mounts" else real(p, **k))
    found = {name: spill.in_memory(tmp_path / name) for name in ("a b", "a b/c", "a b/disk/c", "c")}
    assert found == {"a b": True, "a b/c": True, "a b/disk/c": False, "c": False}


# Memory that runs out.


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't allocate memory: you "),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."),
    ],
)
def test_out_of_memory_halves_the_blocks_and_goes_on(error: Exception) -> None:
    class Small(Counting):
        most = 3

        def prepare(self, x: Inputs, memory: int | None = None) -> dict[str, Tensor]:
            assert isinstance(x, Tensor)
            if len(x) > self.most:
                raise error
            return super().prepare(x, memory)

    kernel, x = Small(), samples(12)
    with pytest.warns(tg.PerformanceWarning) as told:
        got = tg.compute(kernel, x, progress=False).dense()
    said = "the CPU ran out of memory; going on with blocks of"
    assert [str(w.message) for w in told] == [f"{said} 6 samples.", f"{said} 3 samples."]
    torch.testing.assert_close(got, x @ x.T / kernel.times)
    kernel.most = 0
    words = r"blocks of a single sample, which takes 40800 bytes and 800 more .* memory free, leave parameters out"
    with pytest.warns(tg.PerformanceWarning), pytest.raises(tg.MemoryBudgetError, match=words):
        tg.compute(kernel, x, progress=False)


def test_no_other_error_is_taken_for_a_lack_of_memory() -> None:
    class Broken(Counting):
        def pair(self, a: dict[str, Tensor], b: dict[str, Tensor], workspace: int | None = None) -> Tensor:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        tg.compute(Broken(), samples(4), progress=False)


def test_memory_that_runs_out_before_a_block_is_ours_to_tell() -> None:
    class Large(Counting):
        def footprint(self, x: Inputs) -> tuple[int, int]:
            raise MemoryError

    with pytest.raises(tg.MemoryBudgetError, match="memory ran out while two samples were looked at"):
        tg.compute(Large(), samples(4), progress=False)


LIMITED = """
import resource, sys, warnings
from pathlib import Path
import torch, tangency as tg
warnings.simplefilter("always")
torch.set_num_threads(1)
kernel, x = tg.trace_ntk(tg.models.mlp([784, 500, 500, 10])), torch.randn(2000, 784)
kernel(x[:2])
lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
size = 1024 * int(next(line for line in lines if line.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]), resource.RLIM_INFINITY))
try:
    tg.compute(kernel, x, memory="64GiB", progress=False)
    print("done")
except tg.MemoryBudgetError as e:
    print("refused", e)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited on Linux alone")
def test_a_process_without_memory_hears_of_it_in_our_words() -> None:
    """A limit on addresses that the budget knows nothing of: torch's own allocator fails. Blocks are halved until they
    fit, or it is refused; no other exception, and no exit."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(1 << 20)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the CPU ran out of memory" in done.stderr or done.stdout.startswith("refused"), done.stdout
