"""Solvers and eigenpairs against numpy, over every kind of Gram; what is reported is measured again here."""

import itertools
import json
import math
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tangency as tg
from tangency.gram.gram import DenseGram, Gram, GramView
from tangency.gram.indices import Index, Wanted
from tangency.gram.store import Store, StoredGram
from tangency.linalg import CG, Auto, Cholesky, Eigh, Nystrom, PartialCholesky, Solution, Solver, solve, spectrum, top
from tangency.models import mlp

F32, F64 = torch.float32, torch.float64
N, TILE = 16, 7
SOME = [13, 3, 4, 11, 0, 15, 8, 1, 9, 14]

SOLVERS: dict[str, Solver] = {
    "Cholesky": Cholesky(),
    "Cholesky in float32": Cholesky(dtype=F32, refine=60),
    "Eigh": Eigh(),
    "CG, Nystrom": CG(Nystrom()),
    "CG, Nystrom of low rank": CG(Nystrom(rank=3)),
    "CG, PartialCholesky": CG(PartialCholesky()),
    "CG, PartialCholesky of low rank": CG(PartialCholesky(rank=3)),
    "CG": CG(None),
    "Auto": Auto(),
    "Auto with little memory": Auto(memory=100),
}
EACH = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
KINDS: dict[str, tuple[bool, bool, Callable[[Gram], Any]]] = {  # full, on disk, and what is made of the Gram
    "tensor": (False, False, lambda g: g.dense()),
    "array": (False, False, lambda g: g.dense().numpy()),
    "dense": (False, False, lambda g: g),
    "stored": (False, True, lambda g: g),
    "part of stored": (False, True, lambda g: g.select(SOME, SOME)),
    "cosine of stored": (False, True, lambda g: g.cosine()),
    "cosine of part of dense": (False, False, lambda g: g.select(SOME, SOME).cosine()),
    "full tensor": (True, False, lambda g: g.dense()),
    "full": (True, False, lambda g: g),
    "full stored": (True, True, lambda g: g),
    "part of full stored": (True, True, lambda g: g.select(SOME, SOME)),
    "cosine of full": (True, False, lambda g: g.cosine()),
}


def flat(k: Any) -> np.ndarray:
    """A Gram of any kind as a matrix [n·c, n·c] of float64."""
    k = k.dense() if isinstance(k, Gram) else torch.as_tensor(k)
    return k.double().reshape(int(k.numel() ** 0.5), -1).numpy()


def measured(k: np.ndarray, a: Tensor, y: Tensor, reg: float) -> float:
    """The largest ‖(K + reg) a − y‖ / ‖y‖ over columns, in extended precision."""
    wide, b, t = (
        k.astype(np.longdouble),
        *(v.double().reshape(len(k), -1).numpy().astype(np.longdouble) for v in (a, y)),
    )
    return float((np.linalg.norm(wide @ b + np.longdouble(reg) * b - t, axis=0) / np.linalg.norm(t, axis=0)).max())


def relative(got: Any, want: Any) -> float:
    got, want = (np.asarray(v, dtype=np.float64) for v in (got, want))
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def rotated(values: Any, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    values = torch.as_tensor(values, dtype=F64)
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed)).double()).Q
    k = (q * values) @ q.T
    return ((k + k.T) / 2).to(dtype)


@pytest.fixture(scope="module")
def grams(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], Gram]:
    """By (full, on disk)."""
    torch.manual_seed(1)
    model, x, folder = mlp([5, 9, 8, 2], nn.Tanh).double(), torch.randn(N, 5, dtype=F64), tmp_path_factory.mktemp("k")
    made = {}
    for full in (False, True):
        kernel = tg.full_ntk(model) if full else tg.trace_ntk(model)
        made[full, False] = tg.compute(kernel, x, progress=False)
        made[full, True] = tg.compute(kernel, x, store=folder / str(full), tile=TILE, progress=False)
        assert isinstance(made[full, True], StoredGram)
    return made


@pytest.fixture(params=KINDS)
def gram(request: pytest.FixtureRequest, grams: dict[tuple[bool, bool], Gram]) -> Any:
    full, disk, make = KINDS[request.param]
    return make(grams[full, disk])


# Answers.


@EACH
@pytest.mark.every(7)
def test_answers_equal_numpys(gram: Any, solver: Solver) -> None:
    k = flat(gram)
    reg = 1e-2 * float(np.trace(k)) / len(k)
    a = k + reg * np.eye(len(k))
    for shape in [(len(k),), (len(k), 3)] if isinstance(gram, Tensor) else [(len(k), 3)]:
        y = torch.randn(shape, dtype=F64)
        found = solve(gram, y, reg=reg, solver=solver, tol=1e-11)
        assert found.value.shape == shape
        assert found.value.dtype == F64
        assert relative(found.value, np.linalg.solve(a, y.numpy())) < 1e-8
        assert found.residual <= 1e-11
        assert abs(found.residual - measured(k, found.value, y, reg)) <= 1e-3 * found.residual + 1e-12


@EACH
@pytest.mark.parametrize("kind", ["tensor", "stored", "cosine of full"])
def test_without_reg_the_system_is_k_itself(grams: dict[tuple[bool, bool], Gram], kind: str, solver: Solver) -> None:
    full, disk, make = KINDS[kind]
    gram = make(grams[full, disk])
    k = flat(gram)
    want = np.random.default_rng(0).standard_normal(len(k))
    y = torch.from_numpy(k @ want)
    found = solve(gram, y, solver=solver, tol=1e-9)
    assert measured(k, found.value, y, 0.0) < 2e-9
    assert relative(found.value, want) < 2e-9 * np.linalg.cond(k)


@pytest.mark.parametrize(
    "solver", [CG(None), CG(Nystrom(rank=4)), CG(PartialCholesky(4)), Cholesky(F32, refine=0), Cholesky(F32, refine=1)]
)
@pytest.mark.parametrize("kind", ["dense", "stored", "full stored", "cosine of stored"])
@pytest.mark.every(3)
def test_the_residual_is_that_of_the_answer(grams: dict[tuple[bool, bool], Gram], kind: str, solver: Solver) -> None:
    """With answers that are not exact, so that a residual by recursion or of another iterate would differ."""
    full, disk, make = KINDS[kind]
    gram = make(grams[full, disk])
    k, y = flat(gram), torch.randn(N * (2 if full else 1), 3, dtype=F64) * torch.tensor([1.0, 1e-3, 1e3])
    reg = 1e-4 * float(np.trace(k)) / len(k)
    found = solve(gram, y, reg=reg, solver=solver, tol=1e-2)
    want = measured(k, found.value, y, reg)
    assert want > 1e-13
    assert abs(found.residual - want) <= 1e-4 * want + 1e-14


@given(
    n=st.integers(1, 20),
    decay=st.floats(0, 6),
    scale=st.floats(-12, 12),
    q=st.integers(1, 3),
    seed=st.integers(0, 99),
    solver=st.sampled_from(list(SOLVERS.values())),
)
def test_any_positive_definite_matrix(n: int, decay: float, scale: float, q: int, seed: int, solver: Solver) -> None:
    """From one row on, in units from 10⁻¹² to 10¹², with conditions up to 10⁶."""
    k = 10**scale * rotated(10 ** torch.linspace(0, -decay, n, dtype=F64), seed)
    y = torch.randn(n, q, generator=torch.Generator().manual_seed(seed)).double()
    found = solve(k, y, solver=solver, tol=1e-8)
    assert measured(k.numpy(), found.value, y, 0.0) <= 2e-8
    assert relative(found.value, np.linalg.solve(k.numpy(), y.numpy())) <= 1e-7 * 10**decay


@EACH
def test_columns_do_not_see_each_other(solver: Solver) -> None:
    """A column of zeros, one that is done at once, and one in other units go along without harm."""
    k = 1e-6 * rotated([1.0, 0.9, 0.5, 0.3, 0.2, 0.1], dtype=F32)
    v = torch.linalg.eigh(k)[1][:, -1]
    y = torch.randn(6)
    columns = torch.stack([torch.zeros_like(v), v, y, 1e-20 * y], 1)
    found = solve(k, columns, solver=solver, tol=1e-5)
    want = np.linalg.solve(k.double().numpy(), y.double().numpy())
    assert torch.equal(found.value[:, 0], torch.zeros_like(v))
    assert relative(found.value[:, 1], v.numpy() / float(v @ k @ v)) < 1e-4
    assert relative(found.value[:, 2], want) < 1e-4
    assert relative(1e20 * found.value[:, 3].double(), want) < 1e-4


@EACH
def test_a_right_hand_side_of_zeros(solver: Solver) -> None:
    found = solve(rotated([3.0, 2.0, 1.0]), torch.zeros(3, 2, dtype=F64), solver=solver)
    assert torch.equal(found.value, torch.zeros(3, 2, dtype=F64))
    assert found.residual == 0


@EACH
def test_a_kernel_of_zeros_with_reg(solver: Solver) -> None:
    y = torch.randn(5, dtype=F64)
    assert relative(solve(torch.zeros(5, 5, dtype=F64), y, reg=0.5, solver=solver).value, 2 * y) < 1e-14


def test_no_columns_at_all() -> None:
    try:
        found = solve(torch.eye(3), torch.zeros(3, 0))
    except tg.InputError:
        return
    assert found.value.shape == (3, 0)


@EACH
@pytest.mark.parametrize("kind", ["tensor", "array", "dense", "full"])
def test_nothing_given_is_changed(grams: dict[tuple[bool, bool], Gram], kind: str, solver: Solver) -> None:
    full, disk, make = KINDS[kind]
    k = make(grams[full, disk])
    before = flat(k).copy()
    y = torch.randn(len(before), 2, dtype=F64)
    kept = y.clone()
    reg = 1e-3 * float(np.trace(before)) / len(before)
    found = solve(k, y, reg=reg, solver=solver, tol=1e-8)
    found.value.mul_(0)  # nor does the answer share memory with what was given
    spectrum(k).vectors.mul_(0)
    assert np.array_equal(flat(k), before)
    assert torch.equal(y, kept)


# Types.


@EACH
@pytest.mark.parametrize(
    ("k", "y", "want"),
    [
        (F32, F32, F32),
        (F32, F64, F64),
        (F64, F32, F64),
        (F64, F64, F64),
        (F32, torch.int64, F32),
        (F64, torch.bool, F64),
    ],
)
def test_the_work_is_done_in_the_wider_type(k: torch.dtype, y: torch.dtype, want: torch.dtype, solver: Solver) -> None:
    matrix = rotated(torch.linspace(1, 2, 12), dtype=k)
    right = (3 * torch.randn(12, 2)).to(y)
    found = solve(matrix, right, solver=solver, tol=1e-10 if want == F64 else 1e-5)
    assert found.value.dtype == want
    exact = np.linalg.solve(matrix.double().numpy(), right.double().numpy())
    assert relative(found.value, exact) < (1e-9 if want == F64 else 1e-5)


@EACH
def test_float32_kernels_with_float64_targets(solver: Solver) -> None:
    """What rounding leaves below zero in a float32 Gram of low rank is no reason to refuse K + reg, far above it."""
    x, y = torch.randn(60, 3), torch.randn(60, dtype=F64)
    k = x @ x.T
    k = (k + k.T) / 2
    assert float(torch.linalg.eigvalsh(k.double())[0]) < 0
    want = np.linalg.solve(k.double().numpy() + 0.1 * np.eye(60), y.numpy())
    assert relative(solve(k, y, reg=0.1, solver=solver, tol=1e-9).value, want) < 1e-5


def test_eigh_takes_rounding_of_kernels_own_type_for_zero() -> None:
    """A float32 Gram of rank 3, worked on in float64: the pseudo-inverse has rank 3."""
    x, y = torch.randn(60, 3), torch.randn(60, dtype=F64)
    found = solve(x @ x.T, y, solver=Eigh())
    assert "rank 3 of 60" in found.solver
    exact = x.double().numpy() @ x.double().numpy().T
    assert relative(found.value, np.linalg.pinv(exact, rcond=1e-6, hermitian=True) @ y.numpy()) < 1e-5


def test_gradients_do_not_come_along() -> None:
    k, y = rotated([1.0, 2.0]).requires_grad_(), torch.ones(2, dtype=F64, requires_grad=True)
    for solver in SOLVERS.values():
        assert not solve(k, y, solver=solver).value.requires_grad
    assert not spectrum(k).values.requires_grad
    assert not top(k, 1).values.requires_grad


# Which solver.


def test_auto_chooses_by_memory() -> None:
    k = torch.eye(1000, dtype=F64)
    assert Auto(memory="1MB").choose(k) == CG()
    assert Auto(memory="1GB").choose(k) == Cholesky()
    assert Auto(memory=8_000_000).choose(k) == Cholesky()
    assert Auto(memory=7_999_999).choose(k) == CG()
    assert Auto(memory=4_000_000).choose(k.float()) == Cholesky()
    assert Auto(memory=4_000_000).choose(k.float(), dtype=F64) == CG()
    assert Auto(memory=8_000_000).choose(k.numpy()) == Cholesky()
    assert Auto(memory=7_999_999).choose(k.numpy()) == CG()
    assert Auto(memory=8_000_000).choose(k.reshape(500, 2, 500, 2)) == Cholesky()
    assert Auto().choose(torch.eye(3)) == Cholesky()
    with pytest.raises(tg.InputError, match="memory='much'; needed"):
        Auto(memory="much").choose(k)


def test_auto_decides_for_the_type_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 K with a float64 y takes a float64 factor."""
    k, y = torch.eye(100), torch.ones(100, dtype=F64)
    assert solve(k, y, solver=Auto(memory=80_000)).solver == "Cholesky"
    assert solve(k, y, solver=Auto(memory=79_999)).solver.startswith("CG")
    assert solve(k, y.float(), solver=Auto(memory=40_000)).solver == "Cholesky"
    monkeypatch.setattr("tangency._base.memory.machine_memory", lambda: 2 * 80_000)
    assert solve(k, y).solver == "Cholesky"
    monkeypatch.setattr("tangency._base.memory.machine_memory", lambda: 2 * 79_999)
    assert solve(k, y).solver.startswith("CG")


def test_auto_reads_nothing_to_choose(grams: dict[tuple[bool, bool], Gram], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Store, i: int, j: int) -> Any:
        raise AssertionError("a tile was read")

    monkeypatch.setattr(Store, "read", refuse)
    assert Auto(memory=10).choose(grams[False, True]) == CG()
    assert Auto(memory="1GB").choose(grams[False, True]) == Cholesky()


# Conjugate gradients.


class Counted(Gram):
    """Counts the products that are asked for, and refuses to be laid out."""

    def __init__(self, base: Gram) -> None:
        self.base, self.products = base, 0

    shape = property(lambda self: self.base.shape)
    dtype = property(lambda self: self.base.dtype)
    _same_samples = True

    def tiles(self, wanted: Wanted | None = None) -> Iterator[tuple[Index, Index, Tensor]]:
        assert wanted is None, "only whole passes are allowed here"
        self.products += 1
        yield from self.base.tiles()


def test_a_step_is_a_pass() -> None:
    k = DenseGram(rotated(torch.arange(1, 201.0).pow(-2)), symmetric=True)
    for preconditioner, extra in ((None, 0), (Nystrom(), 1)):
        counted = Counted(k)
        found = solve(counted, torch.randn(200, dtype=F64), reg=1e-5, solver=CG(preconditioner))
        assert found.steps > 3
        assert counted.products <= found.steps + extra + 2
    counted = Counted(k)
    assert top(counted, 5).steps == counted.products


@pytest.mark.parametrize("preconditioner", [Nystrom(), PartialCholesky(80)])
def test_preconditioning_saves_steps(preconditioner: Any) -> None:
    k = rotated(torch.arange(1, 401.0).pow(-3))
    y = torch.randn(400, dtype=F64)
    plain = solve(k, y, reg=1e-7, solver=CG(None, max_steps=20_000), tol=1e-8)
    led = solve(k, y, reg=1e-7, solver=CG(preconditioner), tol=1e-8)
    want = np.linalg.solve(k.numpy() + 1e-7 * np.eye(400), y.numpy())
    assert relative(led.value, want) < 1e-6
    assert 10 * led.steps <= plain.steps, (led.steps, plain.steps)


def test_more_rank_fewer_steps() -> None:
    k, y = rotated(torch.arange(1, 301.0).pow(-3)), torch.randn(300, dtype=F64)
    steps = [solve(k, y, reg=1e-7, solver=CG(Nystrom(rank)), tol=1e-8).steps for rank in (10, 40, 160)]
    assert steps[0] > 2 * steps[1] > 4 * steps[2], steps


@pytest.mark.parametrize("preconditioner", [Nystrom(rank=25), PartialCholesky(25)])
@pytest.mark.parametrize("full", [False, True])
def test_preconditioners_approximate_from_below(preconditioner: Any, full: bool) -> None:
    """U orthonormal, Λ falling, and 0 ≤ U Λ Uᵀ ≤ K, close where K has nothing beyond the rank."""
    for values, close in ((torch.arange(1, 61.0).pow(-2), 0.2), ([3.0] * 9 + [1.0] * 9 + [0.0] * 42, 1e-12)):
        k = rotated(values)
        shape = (20, 3, 20, 3) if full else (60, 60)
        u, low = preconditioner(DenseGram(k.reshape(shape), symmetric=True), F64, torch.device("cpu"))
        assert float((u.T @ u - torch.eye(u.shape[1], dtype=F64)).abs().max()) < 1e-8
        assert bool((low[:-1] >= low[1:]).all())
        assert bool((low >= 0).all())
        gap = torch.linalg.eigvalsh(k - (u * low) @ u.T)
        assert float(gap[0]) > -1e-10
        assert float(gap[-1]) <= close * float(k.norm())


def test_nystrom_is_the_same_for_the_same_seed() -> None:
    k = DenseGram(rotated(torch.arange(1, 61.0).pow(-2)), symmetric=True)
    parts = [Nystrom(9, seed)(k, F64, torch.device("cpu"))[0] for seed in (0, 0, 1)]
    assert torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[0], parts[2])


# Refusals: what did not converge.


@pytest.mark.parametrize("solver", [CG(None, max_steps=2), CG(Nystrom(3), max_steps=2), CG(None, max_steps=0)])
@pytest.mark.parametrize("disk", [False, True])
def test_what_did_not_converge_says_so_and_carries_the_answer(
    grams: dict[tuple[bool, bool], Gram], solver: CG, disk: bool
) -> None:
    y = torch.randn(N, 2, dtype=F64)
    with pytest.raises(tg.DidNotConverge, match=rf"in {solver.max_steps} step\(s\); asked for: 1.0e-08") as e:
        solve(grams[False, disk], y, reg=1e-6, solver=solver, tol=1e-8)
    found = e.value.solution
    assert isinstance(found, Solution)
    assert found.value.shape == y.shape
    assert found.steps == solver.max_steps
    assert found.residual > 1e-8
    want = measured(flat(grams[False, disk]), found.value, y, 1e-6)
    assert abs(found.residual - want) < 1e-6 * want
    again = pickle.loads(pickle.dumps(e.value))
    assert type(again) is tg.DidNotConverge
    assert str(again) == str(e.value)
    assert torch.equal(again.solution.value, found.value)
    assert replace(again.solution, value=found.value).__dict__ == found.__dict__


def test_a_tolerance_beyond_rounding_is_not_claimed() -> None:
    """Every solver, asked for more than float64 has, stops and says what it reached."""
    k, y = rotated(torch.logspace(0, -10, 40)), torch.randn(40, dtype=F64)
    for solver in SOLVERS.values():
        with pytest.raises((tg.DidNotConverge, tg.NotPositiveDefinite)) as e:
            solve(k, y, solver=solver, tol=1e-18)
        if isinstance(e.value, tg.DidNotConverge):
            want = measured(k.numpy(), e.value.solution.value, y, 0.0)
            assert want / 30 <= e.value.solution.residual <= 30 * want


def test_a_factor_in_float32_that_cannot_be_refined() -> None:
    """Condition 10¹⁰: float32 has no factor, or refinement stalls; no answer is given either way."""
    k, y = rotated(torch.logspace(0, -10, 40)), torch.randn(40, dtype=F64)
    with pytest.raises((tg.DidNotConverge, tg.NotPositiveDefinite)):
        solve(k, y, solver=Cholesky(dtype=F32), tol=1e-10)
    assert solve(k, y, solver=Cholesky(), tol=1e-5).residual <= 1e-5


@given(digits=st.floats(3, 9), n=st.integers(2, 30), seed=st.integers(0, 99))
def test_refinement_never_makes_it_worse(digits: float, n: int, seed: int) -> None:
    """From conditions that a float32 factor serves well to those where its corrections lead away."""
    k = rotated(torch.logspace(0, -digits, n, dtype=F64), seed)
    y = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)).double()
    reached = []
    for refine in (0, 1, 2, 10):
        try:
            found = solve(k, y, solver=Cholesky(dtype=F32, refine=refine), tol=1e9)
        except tg.NotPositiveDefinite:
            return
        want = measured(k.numpy(), found.value, y, 0.0)
        assert abs(found.residual - want) <= 1e-4 * want + 1e-13 * 10**digits
        reached.append(want)
    assert all(after <= before * 1.0001 + 1e-13 * 10**digits for before, after in itertools.pairwise(reached)), reached


def test_refinement_reaches_float64_from_a_float32_factor() -> None:
    k, y = rotated(torch.logspace(0, -4, 40)), torch.randn(40, dtype=F64)
    rough = solve(k, y, solver=Cholesky(dtype=F32, refine=0), tol=1.0)
    fine = solve(k, y, solver=Cholesky(dtype=F32))
    assert rough.residual > 1e-8
    assert fine.residual < 1e-11
    assert fine.steps > 1
    assert "float32" in fine.solver
    assert relative(fine.value, np.linalg.solve(k.numpy(), y.numpy())) < 1e-8


# Refusals: what is not positive definite.


@given(
    n=st.integers(2, 14),
    data=st.data(),
    c=st.sampled_from([None, 1, 2]),
    dtype=st.sampled_from([F32, F64]),
    seed=st.integers(0, 99),
)
def test_the_second_of_two_equal_samples_is_named(
    n: int, data: st.DataObject, c: int | None, dtype: torch.dtype, seed: int
) -> None:
    second = data.draw(st.integers(1, n - 1))
    first = data.draw(st.integers(0, second - 1))
    g = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, c or 1, 200, generator=g, dtype=dtype)
    phi[second] = phi[first]
    wide = phi.reshape(-1, 200)
    k = wide @ wide.T
    k = k if c is None else k.reshape(n, c, n, c)
    pivot = second * (c or 1)
    where = f"sample {second}" + (", output 0" if c == 2 else "")
    with pytest.raises(tg.NotPositiveDefinite, match=rf"pivot {pivot} \({where}\)") as e:
        solve(k, torch.ones(len(wide), dtype=dtype), solver=Cholesky())
    assert e.value.pivot == pivot
    again = pickle.loads(pickle.dumps(e.value))
    assert (type(again), again.pivot, str(again)) == (tg.NotPositiveDefinite, pivot, str(e.value))
    assert solve(k, torch.ones(len(wide), dtype=dtype), reg=1.0).residual < 1e-3  # with reg there is an answer


@given(n=st.integers(2, 60), data=st.data(), dtype=st.sampled_from([F32, F64]), seed=st.integers(0, 99))
def test_the_first_row_beyond_the_rank_is_named(n: int, data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    """Whatever the sign that rounding gave the pivots that should be zero."""
    rank = data.draw(st.integers(1, n - 1))
    g = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, rank, generator=g, dtype=F64) / rank**0.5
    phi[:rank] = torch.linalg.qr(phi[:rank]).Q
    phi = phi.to(dtype)
    k = phi @ phi.T
    with pytest.raises(tg.NotPositiveDefinite) as e:
        solve((k + k.T) / 2, torch.randn(n, generator=g).to(dtype), solver=Cholesky())
    assert e.value.pivot == rank


@given(n=st.integers(2, 40), data=st.data(), seed=st.integers(0, 99), solver=st.sampled_from(list(SOLVERS.values())))
def test_a_singular_system_without_answer_gets_none(n: int, data: st.DataObject, seed: int, solver: Solver) -> None:
    """Any Gram of lower rank with a y outside of its range: no solver but Eigh, which projects y, gives an answer."""
    rank = data.draw(st.integers(1, n - 1))
    g = torch.Generator().manual_seed(seed)
    phi, y = torch.randn(n, rank, generator=g, dtype=F64), torch.randn(n, generator=g, dtype=F64)
    if isinstance(solver, Eigh):
        # A square Gaussian matrix may have a singular value of any size; the cutoff says what counts as zero.
        want = np.linalg.pinv((phi @ phi.T).numpy(), rcond=1e-12, hermitian=True) @ y.numpy()
        try:
            assert relative(solve(phi @ phi.T, y, solver=Eigh(cutoff=1e-12)).value, want) < 1e-3
        except tg.DidNotConverge as e:
            assert e.solution.residual > 1e-6  # noqa: PT017
        return
    with pytest.raises((tg.NotPositiveDefinite, tg.DidNotConverge)):
        solve(phi @ phi.T, y, solver=solver)


def test_a_float32_gram_of_low_rank_is_singular_in_float64_too() -> None:
    """Its rounding is that of float32; read in float64 it is still no information."""
    phi = torch.linalg.qr(torch.randn(30, 30)).Q[:, :20]
    phi = torch.cat([torch.linalg.qr(phi[:20]).Q, phi[20:]])
    with pytest.raises(tg.NotPositiveDefinite) as e:
        solve(phi @ phi.T, torch.randn(30, dtype=F64), solver=Cholesky())
    assert e.value.pivot == 20


INDEFINITE = {
    "last": (torch.diag(torch.tensor([1.0, 2.0, 3.0, -1.0])), 3),
    "first": (torch.diag(torch.tensor([-1.0, 2.0, 3.0, 1.0])), 0),
    "off the diagonal": (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), 1),
    "zeros": (torch.zeros(4, 4), 0),
    "one zero": (torch.zeros(1, 1), 0),
    "negative": (-torch.eye(3), 0),
}


@pytest.mark.parametrize("name", INDEFINITE)
@EACH
def test_indefinite_matrices_are_refused(name: str, solver: Solver) -> None:
    k, pivot = INDEFINITE[name]
    y = torch.arange(1.0, len(k) + 1)
    with pytest.raises(tg.NotPositiveDefinite) as e:
        solve(k.double(), y.double(), solver=solver)
    if isinstance(solver, Cholesky):
        assert e.value.pivot == pivot


@EACH
def test_reg_can_make_an_indefinite_matrix_definite(solver: Solver) -> None:
    """What counts is K + reg: definite here, by far."""
    k, y = rotated([4.0, 3.0, 2.0, 1.0, -0.1]), torch.randn(5, dtype=F64)
    want = np.linalg.solve(k.numpy() + np.eye(5), y.numpy())
    assert relative(solve(k, y, reg=1.0, solver=solver, tol=1e-10).value, want) < 1e-8


@EACH
def test_reg_that_is_too_small_for_an_indefinite_matrix(solver: Solver) -> None:
    """The same rule for all: K + reg·I has a negative eigenvalue, −0.9·10⁻⁵ of the largest, and is refused."""
    k, y = torch.diag(torch.tensor([1.0, 0.5, 0.25, -1e-5])), torch.ones(4)
    with pytest.raises(tg.NotPositiveDefinite):
        solve(k, y, reg=1e-6, solver=solver)


def test_nothing_is_added_to_an_ill_conditioned_matrix() -> None:
    """The Hilbert matrix of 8 rows, condition 10¹⁰: 10⁻¹² on its diagonal would already change the answer by 1 %."""
    i = torch.arange(8, dtype=F64)
    k = 1 / (i[:, None] + i + 1)
    want = torch.linalg.eigh(k)[1][:, 0]
    y = k @ want
    jittered = relative(np.linalg.solve(k.numpy() + 1e-12 * np.eye(8), y.numpy()), want)
    assert jittered > 1e-3
    for solver in (Cholesky(), Eigh(cutoff=1e-14), Auto(), CG(PartialCholesky(8))):
        found = solve(k, y, solver=solver, tol=1e-5)
        assert relative(found.value, want) < jittered / 20


def test_units_of_the_samples_do_not_decide_what_is_definite() -> None:
    """D A D with A well conditioned: Cholesky is as exact as for A, whatever the diagonal D."""
    a = rotated(torch.linspace(1, 3, 10))
    d = torch.logspace(0, -10, 10, dtype=F64)
    k = d[:, None] * a * d
    want = torch.randn(10, dtype=F64) / d
    found = solve(k, k @ want, solver=Cholesky())
    assert relative(found.value * d, want * d) < 1e-12


# Bad input.


def spoiled(k: Tensor, i: int, j: int, value: float) -> Tensor:
    k = k.clone()
    k[i, j] = value
    return k


EYE, ONES = torch.eye(4), torch.ones(4)
BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "too few rows": (EYE, torch.ones(3), {}, r"there are 4 rows and y has shape \(3,\); needed: \[4\] or \[4, q\]"),
    "a scalar": (EYE, torch.tensor(1.0), {}, r"y has shape \(\); needed: \[4\]"),
    "three dimensions": (EYE, torch.ones(4, 1, 1), {}, r"y has shape \(4, 1, 1\); needed"),
    "y of a full kernel by samples": (EYE.reshape(2, 2, 2, 2), torch.ones(2), {}, r"4 rows and y has shape \(2,"),
    "NaN in y": (EYE, torch.tensor([0, 0, float("nan"), 0]), {}, r"y\[2\] is nan; needed: finite"),
    "inf in y": (EYE, spoiled(torch.ones(4, 2), 3, 1, float("-inf")), {}, r"y\[3, 1\] is -inf; needed: finite"),
    "complex y": (EYE, ONES + 1j, {}, r"y is torch.complex64; needed: real"),
    "y elsewhere": (EYE, torch.ones(4, device="meta"), {}, r"K is on cpu, y on meta. Move one: .to\('cpu'\)"),
    "NaN in K": (spoiled(EYE, 1, 3, float("nan")), ONES, {}, r"K\[1, 3\] is nan; needed: finite"),
    "inf in K": (spoiled(EYE, 2, 2, float("inf")), ONES, {}, r"K\[2, 2\] is inf; needed: finite"),
    "not square": (torch.ones(4, 3), ONES, {}, r"K has shape \(4, 3\); needed: a square Gram.*Leave x2 out"),
    "not square, full": (torch.ones(4, 2, 4, 1), ONES, {}, r"K has shape \(4, 2, 4, 1\); needed: a square Gram"),
    "three dimensional K": (torch.ones(4, 4, 4), ONES, {}, r"K has shape \(4, 4, 4\); needed: a square Gram"),
    "empty K": (torch.ones(0, 0), torch.ones(0), {}, r"K has shape \(0, 0\); needed: a square Gram"),
    "not symmetric": (
        spoiled(EYE, 3, 1, 0.5), ONES, {},
        r"not symmetric: K\[(3, 1\] = 0.5 and K\[1, 3\] = 0|1, 3\] = 0 and K\[3, 1\] = 0.5)",
    ),
    "not symmetric, full": (
        spoiled(EYE, 3, 1, 0.5).reshape(2, 2, 2, 2), ONES, {}, r"not symmetric: K\[(3, 1|1, 3)\] = ",
    ),
    "integers": (EYE.long(), ONES, {}, "K is torch.int64; needed: float32 or float64"),
    "half": (EYE.half(), ONES, {}, "K is torch.float16; needed: float32 or float64"),
    "complex K": (EYE + 0j, ONES, {}, "K is torch.complex64; needed: float32 or float64"),
    "negative reg": (EYE, ONES, {"reg": -1e-9}, "reg=-1e-09; needed: a finite number, at least 0"),
    "NaN reg": (EYE, ONES, {"reg": float("nan")}, "reg=nan; needed: a finite number, at least 0"),
    "infinite reg": (EYE, ONES, {"reg": float("inf")}, "reg=inf; needed: a finite number, at least 0"),
    "reg a string": (EYE, ONES, {"reg": "a"}, "reg='a'; needed: a number"),
    "reg a matrix": (EYE, ONES, {"reg": EYE}, "(?s)reg=.*; needed: a number"),
    "no solver": (EYE, ONES, {"solver": "cholesky"}, "solver='cholesky'; needed: a solver"),
    "a solver's class": (EYE, ONES, {"solver": Cholesky}, "solver=<class.*needed: a solver"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    k, y, options, message = BAD[name]
    with pytest.raises(tg.InputError, match=message):
        solve(k, y, **options)


@pytest.mark.parametrize("name", ["NaN in K", "inf in K", "not square", "not symmetric", "integers", "empty K"])
def test_bad_matrices_have_no_spectrum(name: str) -> None:
    k, _, _, message = BAD[name]
    with pytest.raises(tg.InputError, match=message):
        spectrum(k)
    with pytest.raises(tg.InputError, match=message):
        top(k, 1)


@pytest.mark.parametrize("bad", [(float("nan"), "is nan"), (7.0, "not symmetric")])
def test_large_matrices_are_looked_at_to_the_end(monkeypatch: pytest.MonkeyPatch, bad: tuple[float, str]) -> None:
    """In parts: whichever entry is wrong, its place in the whole is named."""
    monkeypatch.setattr("tangency.linalg.matrix.COMPARED_BYTES", 3 * 11 * 8)
    for i, j in [(0, 1), (2, 10), (3, 0), (10, 9)]:
        with pytest.raises(tg.InputError, match=bad[1]) as e:
            solve(spoiled(torch.eye(11, dtype=F64), i, j, bad[0]), torch.ones(11))
        assert f"K[{i}, {j}]" in str(e.value)


def test_rounding_is_no_asymmetry() -> None:
    k = rotated(torch.linspace(1, 2, 9))
    solve(spoiled(k, 2, 5, float(k[2, 5]) + 1e-14), torch.ones(9))


def test_a_stored_gram_of_other_samples_is_refused(tmp_path: Path) -> None:
    model, x = mlp([3, 4, 1]), torch.randn(9, 3)
    kernel = tg.trace_ntk(model)
    wide = tg.compute(kernel, x, torch.randn(5, 3), store=tmp_path / "wide", tile=4, progress=False)
    alike = tg.compute(kernel, x, torch.randn(9, 3), store=tmp_path / "alike", tile=4, progress=False)
    own = tg.compute(kernel, x, store=tmp_path / "own", tile=4, progress=False)
    for f in (lambda k: solve(k, torch.ones(9), reg=1.0), spectrum, lambda k: top(k, 2)):
        with pytest.raises(tg.InputError, match=r"K has shape \(9, 5\); needed: a square Gram.*Leave x2 out"):
            f(wide)
        with pytest.raises(tg.InputError, match="K lies on disk and has other rows than columns; leave x2 out"):
            f(alike)
        with pytest.raises(tg.InputError, match="K lies on disk and has other rows than columns"):
            f(own.select([1, 2, 3], [3, 2, 1]))
        with pytest.raises(tg.InputError, match="not symmetric"):
            f(tg.compute(kernel, x, torch.randn(9, 3), progress=False))


def test_norms_of_two_kinds_make_a_gram_that_is_not_symmetric(grams: dict[tuple[bool, bool], Gram]) -> None:
    gram = grams[False, False]
    uneven = gram.cosine(gram.diag(), torch.linspace(1, 2, N, dtype=F64))
    with pytest.raises(tg.InputError):
        solve(uneven, torch.ones(N, dtype=F64), reg=1.0)
    with pytest.raises(tg.InputError):
        tg.regress.ridge(uneven, torch.ones(N, dtype=F64), reg=1.0, sample_weights=2.0)


def test_solutions_show_what_they_are() -> None:
    found = solve(EYE, ONES, solver=CG(None))
    assert "CG" in repr(found)
    assert "residual" in repr(found)


# Eigenpairs.


def pairs(k: np.ndarray, found: tg.linalg.Spectrum, tol: float, digits: float = 1e-10) -> None:
    """Eigenvalues as numpy's, orthonormal vectors, and the residual as it is defined."""
    want = np.linalg.eigvalsh(k)[::-1][: len(found)]
    scale = max(abs(want[0]), 1e-300)
    values, vectors = found.values.double().numpy(), found.vectors.double().numpy()
    assert abs(values - want).max() <= digits * scale
    assert abs(vectors.T @ vectors - np.eye(len(found))).max() <= digits
    wide = k.astype(np.longdouble)
    off = np.linalg.norm((wide @ vectors - vectors * values).astype(np.float64), axis=0).max() / scale
    assert found.residual <= tol
    assert off <= tol
    assert abs(off - found.residual) <= max(0.1 * off, digits)


def test_spectrum_equals_numpys(gram: Any) -> None:
    k, found = flat(gram), spectrum(gram)
    pairs(k, found, 1e-12)
    assert found.complete
    assert (len(found), found.shape, found.dtype) == (len(k), gram.shape, F64)
    assert found.solver == "eigh"


def test_top_equals_numpys(gram: Any) -> None:
    k = flat(gram)
    for count in (1, 5, len(k)):
        found = top(gram, count)
        pairs(k, found, 1e-8)
        assert found.complete == (count == len(k))
        assert found.vectors.shape == (len(k), count)


@given(
    n=st.integers(1, 40),
    data=st.data(),
    decay=st.floats(0, 8),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([F32, F64]),
)
def test_top_of_any_matrix(n: int, data: st.DataObject, decay: float, seed: int, dtype: torch.dtype) -> None:
    """Also with more pairs asked for than the rank, and with negative eigenvalues."""
    k = data.draw(st.integers(1, n), label="k")
    rank = data.draw(st.integers(1, n), label="rank")
    negative = data.draw(st.integers(0, n - rank), label="negative")
    block = data.draw(st.sampled_from([None, k, k + 3]), label="block")
    values = torch.zeros(n, dtype=F64)
    values[:rank] = 10 ** -torch.linspace(0, decay, rank, dtype=F64)
    values[rank : rank + negative] = -torch.linspace(0.1, 2, negative, dtype=F64)
    matrix = rotated(values, seed, dtype)
    tol = 1e-8 if dtype == F64 else 1e-5
    pairs(matrix.double().numpy(), top(matrix, k, block=block, seed=seed), tol, digits=tol)
    pairs(matrix.double().numpy(), spectrum(matrix), tol, digits=tol)


@pytest.mark.parametrize("block", [None, 1, 2, 3, 8])
@pytest.mark.parametrize("values", [[5, 5, 5, 4, 4, 3] + [1] * 44, [2] * 30 + [1] * 20, [1] * 50])
def test_top_finds_every_copy_of_a_multiple_eigenvalue(values: list[int], block: int | None) -> None:
    k = rotated([float(v) for v in values])
    for count in (2, 4, 6):
        found = top(k, count, block=block)
        assert np.allclose(found.values.numpy(), values[:count], atol=1e-7), found.values


def test_top_of_the_kronecker_product_that_a_full_kernel_can_be() -> None:
    k = rotated(torch.linspace(1, 2, 12))
    full = torch.kron(k, torch.eye(5, dtype=F64)).reshape(12, 5, 12, 5)
    found = top(full, 12)
    want = np.repeat(np.linalg.eigvalsh(k.numpy())[::-1], 5)[:12]
    assert np.allclose(found.values.numpy(), want, rtol=1e-9)
    assert found.vectors.shape == (60, 12)


def test_top_goes_on_past_an_invariant_space() -> None:
    """Rank 3, and 10 pairs asked for: the rest are zeros with vectors outside."""
    k = rotated([3.0, 2.0, 1.0] + [0.0] * 77)
    found = top(k, 10, block=4)
    pairs(k.numpy(), found, 1e-8, digits=1e-8)


@pytest.mark.parametrize("f", [spectrum, lambda k: top(k, len(k)), lambda k: top(k, 1)])
def test_small_matrices(f: Callable[[Tensor], tg.linalg.Spectrum]) -> None:
    one = f(torch.tensor([[3.0]], dtype=F64))
    assert float(one.values[0]) == 3
    assert float(one.vectors.abs()[0, 0]) == 1
    two = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=F64)
    pairs(two.numpy(), f(two), 1e-12)
    for size in (1, 2):
        assert float(f(torch.zeros(size, size)).values.abs().max()) == 0


def test_top_streams_to_the_same_answer(grams: dict[tuple[bool, bool], Gram]) -> None:
    for full in (False, True):
        memory, disk = (top(grams[full, on_disk], 6) for on_disk in (False, True))
        assert relative(disk.values, memory.values) < 1e-10
        assert relative((disk.vectors.T @ memory.vectors).abs(), np.eye(6)) < 1e-5
        whole = spectrum(grams[full, True])
        assert relative(whole.values, spectrum(grams[full, False]).values) < 1e-12


def test_top_is_the_same_for_the_same_seed() -> None:
    k = rotated(torch.arange(1, 61.0).pow(-1))
    a, b, c = (top(k, 5, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.values, b.values)
    assert torch.equal(a.vectors, b.vectors)
    assert not torch.equal(a.vectors, c.vectors)
    state = torch.get_rng_state()
    top(k, 5)
    solve(k, torch.ones(60, dtype=F64), solver=CG())
    assert torch.equal(torch.get_rng_state(), state)  # nor is the random state of others touched


def test_largest_means_largest_not_farthest_from_zero() -> None:
    values = [3.0, 2.0, 1.0, 0.5] + [0.0] * 20 + [-4.0, -50.0]
    found = top(rotated(values), 3)
    assert np.allclose(found.values.numpy(), [3, 2, 1], atol=1e-6)
    negative = top(rotated([-1.0, -2.0, -3.0]), 2)
    assert np.allclose(negative.values.numpy(), [-1, -2])


@pytest.mark.parametrize("k", [0, 5, -1, 1.5, "3", None])
def test_a_number_of_pairs_that_there_is_not(k: Any) -> None:
    with pytest.raises(tg.InputError, match=rf"count={k!r}; needed: a number of eigenpairs from 1 to 4"):
        top(EYE, k)


def test_top_says_when_it_did_not_converge() -> None:
    k = rotated(torch.linspace(1, 2, 200))
    with pytest.raises(tg.DidNotConverge, match=r"in 2 step\(s\); asked for: 1.0e-08") as e:
        top(k, 3, max_steps=2)
    found = pickle.loads(pickle.dumps(e.value)).solution
    assert found.residual > 1e-8
    vectors, values = found.vectors, found.values
    want = float((k @ vectors - vectors * values).norm(dim=0).max() / values[0])
    assert abs(found.residual - want) < 1e-6 * want
    with pytest.raises((tg.DidNotConverge, tg.InputError)):
        top(k, 3, max_steps=0)


@pytest.mark.parametrize("f", [lambda k, dtype: spectrum(k, dtype=dtype), lambda k, dtype: top(k, 5, dtype=dtype)])
@pytest.mark.parametrize("own", [F32, F64])
@pytest.mark.parametrize("asked", [F32, F64, None])
def test_eigenpairs_in_the_type_that_is_asked_for(f: Any, own: torch.dtype, asked: torch.dtype | None) -> None:
    k = rotated(torch.arange(1, 31.0).pow(-1), dtype=own)
    found = f(k, asked)
    kind = asked or own
    assert found.values.dtype == found.vectors.dtype == found.dtype == kind
    digits = 1e-10 if kind == F64 else 1e-5
    assert np.allclose(found.values.double(), np.linalg.eigvalsh(k.double())[::-1][: len(found)], atol=digits)


def test_kept_leaves_out_rounding_and_refuses_indefinite_matrices() -> None:
    found = spectrum(rotated([4.0, 2.0, 1e-3, 1e-9, 0.0]))
    assert len(found.kept()) == 4
    assert len(found.kept(1e-8)) == 3
    assert len(found.kept(0.25)) == 2
    assert len(found.kept(0.6)) == 1
    assert found.cutoff(1e-8) == 1e-8 * float(found.values[0])
    assert found.cutoff() == pytest.approx(5 * np.finfo(float).eps * 4)
    assert found.complete
    assert not found.kept().complete
    assert torch.equal(found.kept(1e-8).vectors, found.vectors[:, :3])
    for bad in (-0.1, 1.0, float("nan")):
        with pytest.raises(tg.InputError, match=f"cutoff={bad}; needed: a fraction"):
            found.kept(bad)
    assert len(spectrum(rotated([4.0, 1.0, -1e-9])).kept()) == 2  # a Gram of float32 entries
    for values in ([4.0, 1.0, -1e-4], [1.0, -1.0], [-1.0, -2.0]):
        with pytest.raises(tg.NotPositiveDefinite, match="K is indefinite: its smallest eigenvalue is -"):
            spectrum(rotated(values)).kept()
    with pytest.raises(tg.NotPositiveDefinite, match="no positive eigenvalue"):
        spectrum(torch.zeros(3, 3)).kept()


def test_a_gram_that_is_symmetric_up_to_its_rounding() -> None:
    """A float32 product x xᵀ, as some processors round it, in float64: eigenpairs of the nearest symmetric matrix."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 24, generator=g)
    k = x @ x.T
    k = k * (1 + 1e-7 * torch.rand(40, 40, generator=g))
    found = tg.linalg.spectrum(k, dtype=torch.float64)
    assert found.residual < 1e-14
    values = torch.linalg.eigvalsh((k.double() + k.double().T) / 2).flip(0)
    torch.testing.assert_close(found.values, values, rtol=0, atol=1e-13 * float(values[0]))


def test_a_spectrum_shows_what_it_is() -> None:
    shown = repr(top(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])), 2))
    assert "2 of 4 eigenpairs, λ from 4 to 3" in shown


def test_results_are_short_in_print_and_whole_in_json() -> None:
    k, y = rotated([3.0, 2.0, 1.0]), torch.ones(3, dtype=F64)
    for name, result in {"Solution": solve(k, y), "Spectrum": spectrum(k)}.items():
        assert repr(result).startswith(f"{name}(")
        assert len(repr(result)) < 200
        kept = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert (kept["result"], kept["solver"], kept["residual"]) == (name, result.solver, result.residual)
    assert solve(k, y).to_dict()["value"] == solve(k, y).value.tolist()


def test_a_matrix_too_large_for_all_its_eigenpairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangency._base.memory.machine_memory", lambda: 4 * 10 * 10 * 8)
    assert spectrum(torch.eye(10, dtype=F64)).complete
    with pytest.raises(tg.MemoryBudgetError, match=r"all eigenpairs of a 11 x 11 matrix.*tg.linalg.top\(K, count\)"):
        spectrum(torch.eye(11, dtype=F64))


@pytest.mark.parametrize(("cutoff", "rank"), [(None, 4), (1e-5, 3), (0.3, 2)])
def test_the_pseudo_inverse_is_numpys(cutoff: float | None, rank: int) -> None:
    k, y = rotated([4.0, 2.0, 1e-3, 1e-6, 0.0, 0.0]), torch.randn(6, 2, dtype=F64)
    found = solve(k, y, solver=Eigh(cutoff))
    want = np.linalg.pinv(k.numpy(), rcond=6 * np.finfo(float).eps if cutoff is None else cutoff, hermitian=True)
    assert relative(found.value, want @ y.numpy()) < 1e-8
    assert f"rank {rank} of 6" in found.solver


# Memory: by VmHWM, since ru_maxrss of a child begins at that of its parent.

MEMORY = """
import os, torch, tangency as tg
torch.set_num_threads(1)
gram, small = tg.open_gram({store!r}), tg.open_gram({small!r})
reg = 1.0 * float(gram.diag().mean())
y = torch.randn(3000, generator=torch.Generator().manual_seed(0)).double()
solvers = [tg.linalg.CG(), tg.linalg.CG(tg.linalg.Nystrom(60)), None]
def work(gram, y, solver):
    return tg.linalg.solve(gram, y, reg=reg, solver=solver) if solver else tg.linalg.top(gram, 20, dtype=torch.float64)
def peak(): return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if "VmHWM" in line)
for solver in solvers:
    if child := os.fork():  # each in a process of its own: the mark never falls
        assert os.waitpid(child, 0)[1] == 0
        continue
    work(small, y[: len(small.diag())], solver)  # libraries' own first allocations
    before = peak()
    found = work(gram, y, solver)
    after = peak()
    if solver:
        assert found.value.dtype == torch.float64
        assert float((gram @ found.value + reg * found.value - y).norm() / y.norm()) < 2e-6
    print(after - before, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    torch.manual_seed(0)
    kernel, x = tg.trace_ntk(mlp([6, 16, 1], nn.Tanh)), torch.randn(3000, 6)
    paths = [str(tmp_path_factory.mktemp("large") / name) for name in ("all", "some")]
    for path, n in zip(paths, (3000, 40), strict=True):
        assert tg.compute(kernel, x[:n], store=path, tile=250, progress=False).dtype == F32
    return paths[0], paths[1]


def test_a_gram_on_disk_is_never_laid_out(large: tuple[str, str]) -> None:
    """3,000 rows: 36 MB as they are stored, 72 MB in float64. CG, and `top` (the last), take what their blocks do."""
    code = MEMORY.format(store=large[0], small=large[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for found, most in zip(map(int, done.stdout.split()), (45e6, 20e6, 45e6), strict=True):
        assert 0 < found < most, done.stdout


def test_views_are_what_the_kinds_say(gram: Any, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["gram"]
    assert isinstance(gram, GramView) == ("part" in kind or "cosine" in kind)


# A factor in a file ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 50), st.booleans())
def test_a_factor_on_disk_solves_as_one_in_memory(n: int, c: int, panel: int, full: bool) -> None:
    torch.manual_seed(n)
    phi = torch.randn(n * c, n * c + 3, dtype=torch.float64)
    K, y = phi @ phi.T, torch.randn(n * c, 2, dtype=torch.float64)
    before = K.clone()
    matrix = K.reshape(n, c, n, c) if full else K
    with tempfile.TemporaryDirectory() as folder:
        found = tg.linalg.solve(matrix, y, reg=0.3, solver=Cholesky(scratch=folder, panel=panel))
        assert not list(Path(folder).iterdir())  # nothing is left behind
    want = np.linalg.solve(K.numpy() + 0.3 * np.eye(n * c), y.numpy())
    np.testing.assert_allclose(found.value.numpy(), want, rtol=1e-9, atol=1e-10)
    assert found.solver == "Cholesky on disk"
    assert torch.equal(K, before)


def test_a_factor_on_disk_of_a_stored_gram_names_the_pivot(tmp_path: Path) -> None:
    x = torch.randn(50, 60, dtype=torch.float64)
    x[33] = x[4]
    kernel = tg.trace_ntk(torch.nn.Linear(60, 1, bias=False).double())
    gram = tg.compute(kernel, x, store=tmp_path / "gram", tile=16, progress=False)
    solver = Cholesky(scratch=tmp_path, panel=9)
    with pytest.raises(tg.NotPositiveDefinite, match="pivot 33 \\(sample 33\\)") as e:
        tg.linalg.solve(gram, x[:, 0], solver=solver)
    assert e.value.pivot == 33
    found = tg.linalg.solve(gram, x[:, 0], reg=0.5, solver=Cholesky(scratch=tmp_path, panel=9, dtype=torch.float32))
    want = np.linalg.solve((x @ x.T).numpy() + 0.5 * np.eye(50), x[:, 0].numpy())
    np.testing.assert_allclose(found.value.numpy(), want, rtol=1e-8, atol=1e-10)
    with pytest.raises(tg.InputError, match="needed: a folder"):
        tg.linalg.solve(gram, x[:, 0], reg=0.5, solver=Cholesky(scratch=tmp_path / "absent"))


def test_a_disk_too_small_for_the_factor_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type("usage", (), {"free": 10})
    monkeypatch.setattr("tangency.linalg.factor.shutil.disk_usage", lambda folder: full)
    with pytest.raises(tg.MemoryBudgetError, match="has 1e-08 GB free. Give a folder on another disk"):
        tg.linalg.solve(torch.eye(4), torch.ones(4), solver=Cholesky(scratch=tmp_path))


def test_eigenpairs_of_products_alone() -> None:
    """Right singular vectors of a matrix that is never multiplied out."""
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(300, 60, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, 60)
    _, s, vt = torch.linalg.svd(M, full_matrices=False)
    found = tg.linalg.top_of(lambda v: M.T @ (M @ v), 60, 4, progress=False)
    torch.testing.assert_close(found.values.sqrt(), s[:4], rtol=1e-8, atol=0)
    torch.testing.assert_close(found.vectors @ found.vectors.T, vt[:4].T @ vt[:4], atol=1e-6, rtol=0)
    assert found.shape == (60, 60)
    assert found.residual <= 1e-8
    with pytest.raises(tg.InputError, match="count=61; needed: a number of eigenpairs from 1 to 60"):
        tg.linalg.top_of(lambda v: v, 60, 61)
    with pytest.raises(tg.DidNotConverge, match="asked for"):
        tg.linalg.top_of(lambda v: M.T @ (M @ v), 60, 4, max_steps=1, progress=False)


def test_products_that_are_none_of_a_symmetric_matrix() -> None:
    """What `top_of` is given is looked at in its first product, before any iteration."""
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(30, 30, generator=generator, dtype=torch.float64)
    for product, words in (
        (lambda v: M @ v, r"the matrix is not symmetric: .* differ by .* take K = MᵀM"),
        (lambda v: v * math.nan, "has NaN or infinite numbers in it"),
        (lambda v: (M @ v)[:5], r"product\(v\) of v \(30, 16\) is torch.float64 \(5, 16\); needed: real numbers K @ v"),
        (lambda v: v * 1j, "is torch.complex128"),
        (lambda v: (M @ v).numpy(), "is ndarray"),
        (M, "product is a Tensor; needed: a function of v"),
    ):
        with pytest.raises(tg.InputError, match=words):
            tg.linalg.top_of(product, 30, 2, progress=False)  # type: ignore[arg-type]
    for size, count, options, words in (
        (30, 31, {}, "count=31; needed: a number of eigenpairs from 1 to 30"),
        (30, True, {}, "count=True"),
        (0, 1, {}, "size=0; needed: the number of rows"),
        (3.0, 1, {}, "size=3.0"),
        (30, 2, {"dtype": torch.float16}, "dtype=torch.float16; needed: torch.float32 or torch.float64"),
        (30, 2, {"tol": -1.0}, "tol=-1.0; needed: a residual above 0"),
        (30, 2, {"tol": math.nan}, "tol=nan"),
    ):
        with pytest.raises(tg.InputError, match=words):
            tg.linalg.top_of(lambda v: v, size, count, **{"progress": False, **options})
    single = (M + M.T).float()  # products in float32 for pairs in float64: their rounding is no asymmetry
    found = tg.linalg.top_of(lambda v: single @ v.float(), 30, 2, tol=1e-5, progress=False)
    torch.testing.assert_close(found.values, torch.linalg.eigvalsh(single.double()).flip(0)[:2], rtol=1e-5, atol=0)


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_the_sign_of_rounding_decides_nothing(ulps: int) -> None:
    """Two samples that are copies but for K's last digit, up to the processor: refused below it, solved above."""
    K = torch.ones(2, 2)
    K[1, 1] += ulps * torch.finfo(torch.float32).eps / 2
    y = torch.tensor([1.0, 2.0], dtype=torch.float64)
    with pytest.raises(tg.NotPositiveDefinite, match="pivot 1 .*a start: 1e-06"):
        tg.linalg.solve(K, y, reg=1e-9, solver=tg.linalg.Cholesky())
    tg.linalg.solve(K, y, reg=1e-6, solver=tg.linalg.Cholesky())
