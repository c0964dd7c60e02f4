"""Blockwise computation: any N, the symmetric half once, and a memory budget that is kept."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import tangency as tg
from tangency.kernel import Empirical
from tangency.models import mlp
from tangency.tiles import run
from tangency.tiles.plan import TilePlan, plan

F64 = torch.float64


def test_equals_the_direct_call_for_ragged_sizes() -> None:
    model = mlp([5, 8, 3], nn.Tanh).double()
    x, y = torch.randn(37, 5, dtype=F64), torch.randn(11, 5, dtype=F64)
    for kernel in (tg.trace_ntk(model), tg.full_ntk(model), tg.cosine(tg.trace_ntk(model))):
        for other in (None, y):
            gram = tg.compute(kernel, x, other, memory="1GiB", progress=False)
            torch.testing.assert_close(gram.dense(), kernel(x, other), rtol=1e-11, atol=1e-13)


def test_the_symmetric_half_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp([5, 8, 3]).double()
    x = torch.randn(10, 5, dtype=F64)
    seen: list[tuple[int, int]] = []
    pair = Empirical.pair

    def counting(self: Empirical, a: object, b: object, workspace: int | None = None) -> torch.Tensor:
        tile = pair(self, a, b, workspace)  # type: ignore[arg-type]
        seen.append(tuple(tile.shape))  # type: ignore[arg-type]
        return tile

    monkeypatch.setattr(Empirical, "pair", counting)
    kernel = tg.trace_ntk(model)
    whole = run.run_tiles(kernel, x, None, TilePlan(10, 10, True, 4, 1 << 20, 1 << 20))
    assert sorted(seen) == sorted([(4, 4), (4, 4), (4, 2), (4, 4), (4, 2), (2, 2)])
    assert torch.equal(whole, whole.T)


def test_bits_do_not_depend_on_progress_and_run() -> None:
    model, x = mlp([5, 8, 3]), torch.randn(50, 5)
    kernel = tg.trace_ntk(model)
    a = tg.compute(kernel, x, memory="3MB", progress=True).dense()
    b = tg.compute(kernel, x, memory="3MB", progress=False).dense()
    assert torch.equal(a, b)
    assert torch.equal(a, a.T)


def test_gram() -> None:
    model = mlp([5, 8, 3], nn.Tanh).double()
    x, y = torch.randn(9, 5, dtype=F64), torch.randn(4, 5, dtype=F64)
    gram = tg.compute(tg.trace_ntk(model), x, progress=False)
    k = tg.trace_ntk(model)(x)
    v = torch.randn(9, 2, dtype=F64)
    torch.testing.assert_close(gram @ v, k @ v)
    torch.testing.assert_close(gram @ v[:, 0], k @ v[:, 0])
    torch.testing.assert_close(gram.diag(), k.diagonal())
    assert gram.shape == (9, 9)
    full = tg.compute(tg.full_ntk(model), x, y, progress=False)
    f = tg.full_ntk(model)(x, y)
    assert full.shape == f.shape == (9, 3, 4, 3)
    w = torch.randn(12, dtype=F64)
    torch.testing.assert_close(full @ w, f.reshape(27, 12) @ w)
    square = tg.compute(tg.full_ntk(model), x, progress=False)
    torch.testing.assert_close(square.diag(), tg.full_ntk(model).diag(x))
    with pytest.raises(tg.InputError, match=r"needed: \[9\]"):
        gram @ torch.ones(8)
    with pytest.raises(tg.InputError, match="only a square one"):
        full.diag()
    with pytest.raises(tg.MemoryBudgetError, match="more than max_bytes=100"):
        gram.dense(max_bytes=100)


def test_memory_is_parsed() -> None:
    from tangency._check import memory

    assert memory("4GiB") == 4 << 30
    assert memory("500 MB") == 500_000_000
    assert memory("1.5kib") == 1536
    assert memory(123) == memory("123") == memory("123B") == 123


def test_plans_fit_their_budget() -> None:
    for budget in (1 << 20, 1 << 24, 1 << 30):
        for kept, transient in ((100, 1000), (40_000, 10_000), (100_000, 1_000_000)):
            try:
                cut = plan(1000, 1000, True, budget, 4_000_00, kept, transient, 4)
            except tg.MemoryBudgetError as e:
                assert "Give at least" in str(e)  # noqa: PT017
                continue
            blocks = 1 if cut.rows == 1000 else 3
            used = 400_000 + blocks * cut.rows * kept + cut.capture + 8 * cut.workspace
            assert used <= budget or cut.rows == 1


PEAK = """
import resource, sys, torch, tangency as tg
torch.set_num_threads(1)
torch.manual_seed(0)
model = {model}
x = torch.randn({n}, *{shape})
kernel = tg.trace_ntk(model.eval())
kernel(x[:2])
tg.compute(kernel, x[:4], memory="1GiB", progress=False)  # libraries' own first allocations
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
tg.compute(kernel, x, memory={memory}, progress=False)
print(peak() - before)
"""

CONV = "torch.nn.Sequential(tg.models.lenet5(10))"
WIDE = "tg.models.resnet18(3, width=16)"


@pytest.mark.parametrize(
    ("model", "shape", "n", "memory"),
    [
        (CONV, (3, 32, 32), 300, 100 << 20),
        (CONV, (3, 32, 32), 300, 400 << 20),
        (WIDE, (3, 32, 32), 40, 150 << 20),
        ("tg.models.mlp([784, 100, 100, 10])", (784,), 3000, 120 << 20),
    ],
)
def test_the_memory_budget_is_kept(model: str, shape: tuple[int, ...], n: int, memory: int) -> None:
    """Peak resident memory of a subprocess, beyond what it had before the call, stays under the budget."""
    code = textwrap.dedent(PEAK).format(model=model, shape=shape, n=n, memory=memory)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= memory, f"{int(done.stdout) >> 20} MiB used of {memory >> 20}"


def test_out_of_cuda_memory_halves_the_blocks_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected, since CI has no GPU: the same exception that CUDA raises, for blocks above three samples."""
    model, x = mlp([5, 8, 3]).double(), torch.randn(10, 5, dtype=F64)
    kernel = tg.trace_ntk(model)
    want = kernel(x)
    real = Empirical.prepare

    def small(self: Empirical, x: torch.Tensor, memory: int | None = None) -> object:
        if len(x) > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(self, x, memory)

    monkeypatch.setattr(Empirical, "prepare", small)
    with pytest.warns(tg.PerformanceWarning, match="going on with blocks of"):
        got = tg.compute(kernel, x, progress=False).dense()
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    monkeypatch.setattr(Empirical, "prepare", lambda *a: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("no")))
    with pytest.raises((tg.MemoryBudgetError, torch.cuda.OutOfMemoryError)):
        tg.compute(kernel, x, progress=False)


def test_progress_bar_only_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tg.compute(tg.trace_ntk(mlp([5, 8, 3])), torch.randn(10, 5), progress=True)
    assert capsys.readouterr() == ("", "")
