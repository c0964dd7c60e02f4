"""Gram matrices against plain indexing of the dense kernel: in memory, on disk, selected, and as cosines."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

import tangency as tg
from tangency.gram.gram import DenseGram, Gram, GramView
from tangency.gram.store import Store, StoredGram
from tangency.models import mlp

F64 = torch.float64
N, M, C, TILE = 13, 7, 2, 4  # a grid of 4 x 4 tiles, the last one ragged
P, Q = [12, 0, 5, 5, -1, 3, 8, 2, 12], [6, 0, 0, 3, -2]  # shuffled, doubled, negative


def near(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert float((got - want).norm()) <= tolerance * max(1.0, float(want.norm()))


def flat(k: Tensor) -> Tensor:
    half = k.dim() // 2
    return k.reshape(k.shape[:half].numel(), k.shape[half:].numel())


def part(k: Tensor, rows: Any, columns: Any) -> Tensor:
    return k[rows][:, columns] if k.dim() == 2 else k[rows][:, :, columns]


def own(k: Tensor) -> Tensor:
    """k(x, x) of a square kernel: [n], or [n, c]."""
    return flat(k).diagonal().reshape(k.shape[: k.dim() // 2])


@dataclass
class Data:
    """A kernel, its samples, and what it gives for them all at once."""

    kernel: tg.Kernel
    x: Tensor
    y: Tensor | None

    def __post_init__(self) -> None:
        self.want = self.kernel(self.x, self.y)
        self.left = own(self.kernel(self.x))
        self.right = self.left if self.y is None else own(self.kernel(self.y))
        self.other = P if self.y is None else Q

    @property
    def cosine(self) -> Tensor:
        left, right = self.left.sqrt(), self.right.sqrt()
        return self.want / left.reshape(*left.shape, *[1] * right.dim()) / right

    @property
    def diags(self) -> tuple[Tensor, ...]:
        return () if self.y is None else (self.left, self.right)


FORMS = ["square", "rectangular", "full", "full rectangular"]
# How a Gram of the data is made from that of a plain run, and the same by hand.
KINDS: dict[str, tuple[bool, Callable[[Gram, Data], Gram], Callable[[Data], Tensor]]] = {
    "dense": (False, lambda g, d: g, lambda d: d.want),
    "stored": (True, lambda g, d: g, lambda d: d.want),
    "part of dense": (False, lambda g, d: g.select(P, d.other), lambda d: part(d.want, P, d.other)),
    "part of stored": (True, lambda g, d: g.select(P, d.other), lambda d: part(d.want, P, d.other)),
    "rows of stored": (True, lambda g, d: g.select(P), lambda d: d.want[P]),
    "cosine of dense": (False, lambda g, d: g.cosine(*d.diags), lambda d: d.cosine),
    "cosine of stored": (True, lambda g, d: g.cosine(*d.diags), lambda d: d.cosine),
    "part of cosine": (True, lambda g, d: g.cosine(*d.diags).select(P, d.other), lambda d: part(d.cosine, P, d.other)),
    "cosine of part": (
        True,
        lambda g, d: g.select(P, d.other).cosine(*(v[i] for v, i in zip(d.diags, (P, Q), strict=False))),
        lambda d: part(d.cosine, P, d.other),
    ),
}


@pytest.fixture(scope="module")
def data() -> dict[str, Data]:
    torch.manual_seed(1)
    model = mlp([3, 5, 4, C], nn.Tanh).double()  # with one hidden layer, k(x, y) would be symmetric in the outputs
    x, y = torch.randn(N, 3, dtype=F64), torch.randn(M, 3, dtype=F64)
    trace, full = tg.trace_ntk(model), tg.full_ntk(model)
    return dict(zip(FORMS, [Data(k, x, v) for k in (trace, full) for v in (None, y)], strict=True))


@pytest.fixture(scope="module")
def stored(data: dict[str, Data], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Gram]:
    folder = tmp_path_factory.mktemp("grams")

    @cache
    def get(form: str, tile: int = TILE, disk: bool = True) -> Gram:
        d, store = data[form], str(folder / f"{form} {tile}") if disk else None
        return tg.compute(d.kernel, d.x, d.y, store=store, tile=tile, progress=False)

    return get


@pytest.fixture(params=[(k, f) for k in KINDS for f in FORMS], ids=lambda p: f"{p[0]}-{p[1]}")
def case(request: pytest.FixtureRequest, data: dict[str, Data], stored: Callable[..., Gram]) -> tuple[Gram, Tensor]:
    (kind, form), d = request.param, data[request.param[1]]
    disk, make, want = KINDS[kind]
    base = stored(form, disk=disk)
    assert isinstance(base, StoredGram if disk else DenseGram)
    return make(base, d), want(d)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tiles that are read from any store."""
    seen: list[tuple[int, int]] = []
    read = Store.read
    monkeypatch.setattr(Store, "read", lambda self, i, j: seen.append((i, j)) or read(self, i, j))
    return seen


@pytest.mark.every(5)
def test_shape_type_and_values(case: tuple[Gram, Tensor]) -> None:
    gram, want = case
    assert (gram.shape, gram.dtype) == (want.shape, want.dtype)
    near(gram.dense(), want)


def test_tiles_cover_every_entry_once(case: tuple[Gram, Tensor]) -> None:
    gram, want = case
    times = torch.zeros_like(want)
    half = want.dim() // 2
    for rows, columns, tile in gram.tiles():
        i, j = torch.arange(want.shape[0])[rows], torch.arange(want.shape[half])[columns]
        near(tile, part(want, i, j))
        ones = torch.zeros_like(want).index_add(0, i, torch.ones(len(i), *want.shape[1:], dtype=F64))
        times += ones * torch.zeros_like(want).index_fill(half, j, 1.0)
    assert bool((times == 1).all())


def test_products(case: tuple[Gram, Tensor]) -> None:
    gram, want = case
    k = flat(want)
    for shape in [(k.shape[1],), (k.shape[1], 1), (k.shape[1], 3), (k.shape[1], 0)]:
        v = torch.randn(shape, dtype=F64)
        near(gram @ v, k @ v)
    for n in (k.shape[1] + 1, 1):
        with pytest.raises(tg.InputError, match=rf"K is {k.shape[0]} x {k.shape[1]} and v has shape \({n},\); needed:"):
            gram @ torch.ones(n, dtype=F64)
    with pytest.raises(tg.InputError, match=rf"needed: \[{k.shape[1]}\] or \[{k.shape[1]}, q\]"):
        gram @ torch.ones(k.shape[1], 1, 1, dtype=F64)


def test_diagonal(case: tuple[Gram, Tensor]) -> None:
    gram, want = case
    half = want.dim() // 2
    if want.shape[:half] == want.shape[half:]:
        near(gram.diag(), own(want))
    else:
        with pytest.raises(tg.InputError, match=r"the Gram is \(.*\); only a square one has a diagonal"):
            gram.diag()


KEYS = [
    2, -1, np.int64(3), slice(2, 5), slice(-3, None), slice(None, None, 3), slice(None, None, -1), slice(4, 2),
    [4, 0, 4], [-1, -4], [], range(3), torch.tensor([3, 1]), torch.tensor([-1, 0], dtype=torch.int8),
    np.array([2, 0]), np.array([0, 1, 4])[::-1],
]  # fmt: skip


def numbers(key: Any, n: int) -> Tensor:
    """What a key picks of n, as numpy has it."""
    key = key.tolist() if isinstance(key, Tensor) else key
    kind = bool if isinstance(key, list) and key and isinstance(key[0], bool) else int
    return torch.tensor(np.arange(n)[key if isinstance(key, slice) else np.array(key, kind)].tolist(), dtype=torch.long)


@pytest.mark.every(5)
def test_parts(case: tuple[Gram, Tensor]) -> None:
    gram, want = case
    half = want.dim() // 2
    n, m = want.shape[0], want.shape[half]
    masks = [(torch.rand(k) < 0.5).tolist() for k in (n, m)]
    whole = not isinstance(gram, GramView)
    for rows in [*KEYS, masks[0]] if whole else KEYS[2:4]:
        near(gram[rows], want[numbers(rows, n)])
    assert torch.equal(gram[torch.tensor(masks[0])], gram[masks[0]])
    some, other = [2, slice(2, 5), [4, 0, 4], [], masks[0]], [slice(None, None, -2), 1, [3, 3, -2], 0, masks[1]]
    pairs = [*zip(some, other, strict=True), *zip(some[1:] + some[:1], other, strict=True)]
    for rows, columns in pairs if whole else pairs[:5]:
        i, j = numbers(rows, n), numbers(columns, m)
        wide = want.index_select(0, i.reshape(-1)).index_select(half, j.reshape(-1))
        wide = wide if j.dim() else wide.squeeze(half)
        near(gram[rows, columns], wide if i.dim() else wide.squeeze(0))


@pytest.mark.every(5)
def test_scipy(case: tuple[Gram, Tensor]) -> None:
    gram, want = case
    op, k = gram.to_scipy(), flat(want).numpy()
    assert (op.shape, op.dtype) == (k.shape, k.dtype)
    v, w = np.random.default_rng(0).normal(size=(k.shape[1], 3)), np.random.default_rng(1).normal(size=(len(k), 2))
    fixed = v[:, 0].copy()
    fixed.setflags(write=False)
    for got, expected in [
        (op.matvec(v[:, 0]), k @ v[:, 0]),
        (op.matvec(v[::-1, 1]), k @ v[::-1, 1]),  # negative strides
        (op.matvec(fixed), k @ fixed),
        (op.matmat(v), k @ v),
        (op.rmatvec(w[:, 0]), k.T @ w[:, 0]),
        (op.rmatmat(w), k.T @ w),
    ]:
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", ["square", "full"])
def test_top_eigenvalue(form: str, data: dict[str, Data], stored: Callable[..., Gram]) -> None:
    for gram, want in [(stored(form), data[form].want), (stored(form).cosine(), data[form].cosine)]:
        top = eigsh(gram.to_scipy(), k=1, return_eigenvectors=False, v0=np.ones(len(flat(want))))[0]
        assert top == pytest.approx(float(torch.linalg.eigvalsh(flat(want))[-1]), rel=1e-9)


def test_dense_within_a_limit(
    data: dict[str, Data], stored: Callable[..., Gram], reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    d, size = data["square"], 8 * N * N
    memory = tg.compute(d.kernel, d.x, progress=False)
    for gram in (memory, stored("square"), stored("square").cosine()):
        reads.clear()
        for limit in ("1KB", 1000, size - 1):
            number = 1000 if limit == "1KB" else limit
            with pytest.raises(tg.MemoryBudgetError, match=rf"takes {size} bytes, more than max_bytes={number}; go by"):
                gram.dense(limit)
        assert reads == []
        assert gram.dense(size).shape == gram.dense("2KB").shape == (N, N)
        with pytest.raises(tg.InputError, match="max_bytes='much'; needed"):
            gram.dense("much")
    monkeypatch.setattr("tangency._base.memory.machine_memory", lambda: 2 * size - 2)
    assert memory.dense() is memory.dense()  # it is there already
    with pytest.raises(tg.MemoryBudgetError, match=f"max_bytes={size - 1}"):
        stored("square").dense()


def test_only_the_tiles_needed_are_read(stored: Callable[..., Gram], reads: list[tuple[int, int]]) -> None:
    square, wide = stored("square"), stored("full rectangular")

    def tiles(f: Callable[[], Any]) -> list[tuple[int, int]]:
        reads.clear()
        f()
        return sorted(reads)

    diagonal = [(i, i) for i in range(4)]
    assert tiles(square.diag) == tiles(stored("full").diag) == diagonal
    assert tiles(square.cosine) == diagonal
    assert tiles(square.select(P, P).diag) == diagonal
    assert tiles(square.select([12, 1], [12, 1]).diag) == [(0, 0), (3, 3)]
    assert tiles(lambda: square[0, 12]) == tiles(lambda: square[12, 0]) == [(0, 3)]  # the upper half is stored
    assert tiles(lambda: square[[0, 3, 1], 8:12]) == [(0, 2)]
    assert tiles(lambda: square[[0, 12], [12, 0]]) == [(0, 0), (0, 3), (3, 3)]
    assert tiles(lambda: square[5]) == [(0, 1), (1, 1), (1, 2), (1, 3)]
    assert tiles(lambda: square[[], 3]) == tiles(lambda: square.select(P, []) @ torch.ones(0, dtype=F64)) == []
    assert tiles(lambda: square.select(range(8)).select([0], [1]).cosine(torch.ones(1), torch.ones(1))) == []
    assert tiles(lambda: wide[12, 6]) == [(3, 1)]
    assert tiles(lambda: wide[[0, 12]]) == [(0, 0), (0, 1), (3, 0), (3, 1)]
    below = [(rows, columns) for rows, columns, _ in square.tiles(lambda rows, columns: rows.start > columns.start)]
    assert sorted((r.start, c.start) for r, c in below) == [(4, 0), (8, 0), (8, 4), (12, 0), (12, 4), (12, 8)]
    assert tiles(square.dense) == [(i, j) for i in range(4) for j in range(i, 4)]


def test_sums_in_the_wider_type(tmp_path: Any) -> None:
    model, x = mlp([3, 5, C], nn.Tanh), 100 * torch.randn(N, 3)
    gram = tg.compute(tg.trace_ntk(model), x, store=str(tmp_path / "k"), tile=TILE, progress=False)
    v, k = torch.randn(N, 2, dtype=F64), gram.dense()
    assert k.dtype == gram.dtype == torch.float32
    near(gram @ v, k.double() @ v)
    near(gram.select(P, P) @ v[:9], k[P][:, P].double() @ v[:9])
    assert (gram @ v.float()).dtype == torch.float32
    assert (gram @ torch.arange(N)).dtype == torch.float32


indices = st.lists(st.integers(-N, N - 1), max_size=20)


@settings(max_examples=20)
@given(tile=st.sampled_from([1, 2, 5, 13, 20]), form=st.sampled_from(["square", "full"]), rows=indices,
       columns=indices, again=st.data())  # fmt: skip
def test_any_selection(
    data: dict[str, Data], stored: Callable[..., Gram], tile: int, form: str, rows: list[int], columns: list[int],
    again: st.DataObject,
) -> None:  # fmt: skip
    gram, want, cosine = stored(form, tile), data[form].want, data[form].cosine
    chosen = gram.select(rows, columns)
    near(chosen.dense(), part(want, rows, columns))
    v = torch.randn(flat(want).shape[1] // N * len(columns), 2, dtype=F64)
    near(chosen @ v, flat(part(want, rows, columns)) @ v)
    near(gram.select(rows, rows).diag(), own(want)[rows])
    twice = again.draw(st.lists(st.integers(0, max(0, len(rows) - 1)), max_size=5 if rows else 0))
    near(chosen.select(twice).dense(), part(want, rows, columns)[twice])
    cosines = gram.cosine().select(rows, columns)
    values = cosines.dense()
    near(values, part(cosine, rows, columns))
    near(gram.select(rows, rows).cosine().dense(), part(cosine, rows, rows))
    near(cosines.select(twice).dense(), part(cosine, rows, columns)[twice])
    i, j = torch.nonzero(torch.tensor(rows)[:, None] % N == torch.tensor(columns) % N).T
    c = flat(want).shape[0] // N
    itself = values.reshape(len(rows), c, len(columns), c)[i, :, j].diagonal(dim1=1, dim2=2)
    assert bool((itself == 1.0).all())


@pytest.mark.parametrize("form", FORMS)
def test_cosines(form: str, data: dict[str, Data], stored: Callable[..., Gram]) -> None:
    d, gram = data[form], stored(form)
    cosine = gram.cosine(*d.diags)
    if d.y is None:
        assert bool((cosine.diag() == 1.0).all())
        assert bool((gram.select(P, P).cosine().diag() == 1.0).all())
        doubled = cosine[[5, 5], [5, 5]]
        assert bool((flat(doubled) == 1.0).sum() == 4 * own(doubled)[0].numel())
        near(cosine.cosine().dense(), d.cosine)
        near(cosine.select(P, P).cosine().dense(), part(d.cosine, P, P))
        near(gram.cosine(d.left, d.right).dense(), d.cosine)
    half = tg.compute(tg.scale(d.kernel, 4.0), d.x, d.y, progress=False).cosine(*(4 * v for v in d.diags))
    near(half.dense(), d.cosine)
    ones = [torch.ones_like(v) for v in (d.left, d.right)]
    near(gram.cosine(4 * ones[0], ones[1]).cosine(ones[0], 9 * ones[1]).dense(), d.want / 6)


def test_refused_cosines(data: dict[str, Data], stored: Callable[..., Gram]) -> None:
    square, wide, d = stored("square"), stored("rectangular"), data["rectangular"]
    hint = r"needs k\(x, x\) and k\(y, y\): gram.cosine\(kernel.diag\(x\), kernel.diag\(y\)\)"
    for gram, given_ in [(wide, ()), (wide, (d.left,)), (wide, (None, d.right)), (square, (d.left,))]:
        with pytest.raises(tg.InputError, match=hint):
            gram.cosine(*given_)
    # As many rows as columns, but of other samples: their diagonal holds no norms.
    for gram in (square.select([0, 1], [1, 0]), square.select([3], [4]), square.select(slice(0, 2), slice(4, 6))):
        with pytest.raises(tg.InputError, match=hint):
            gram.cosine()
    with pytest.raises(tg.InputError, match=r"column_diag has shape \(13,\); needed: \(7,\)"):
        wide.cosine(d.left, d.left)
    with pytest.raises(tg.InputError, match=r"row_diag has shape \(13,\); needed: \(13, 2\)"):
        stored("full").cosine(d.left, d.left)
    for bad in (0.0, -1.0, float("nan")):
        k = torch.eye(4, dtype=F64)
        k[2, 2] = bad
        with pytest.raises(tg.InputError, match=r"k\(x, x\) is not positive for row 2, so its cosine is undefined"):
            DenseGram(k, True).cosine()
        with pytest.raises(tg.InputError, match=r"not positive for column 2"):
            DenseGram(k, True).cosine(torch.ones(4, dtype=F64), k.diagonal())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (N, rf"rows: number {N} is not among the {N} of this Gram"),
        (-N - 1, rf"rows: number -{N + 1} is not among"),
        ((0, [1, M]), rf"columns: number {M} is not among the {M}"),
        ([True] * (N - 1), rf"the mask for rows has shape \({N - 1},\); needed: \[{N}\]"),
        ((0, torch.ones(N, dtype=torch.bool)), rf"the mask for columns has shape \({N},\); needed: \[{M}\]"),
        (torch.tensor([0.5]), r"rows must be a list of numbers, a slice or a mask; got torch.float32 \(1,\)"),
        ((0, torch.tensor([[1, 2]])), r"columns must be a list of numbers.*got torch.int64 \(1, 2\)"),
        ((0, 0, 0, 0), r"\[rows, columns\].*got 4"),
    ],
)
def test_refused_parts(key: Any, message: str, stored: Callable[..., Gram], reads: list[Any]) -> None:
    with pytest.raises(tg.InputError, match=message):
        stored("full rectangular")[key]
    assert reads == []


def test_pickle(data: dict[str, Data], stored: Callable[..., Gram]) -> None:
    """By its path: the copy holds no numbers, and needs neither kernel nor samples."""
    gram = stored("square")
    packed = pickle.dumps(gram)
    assert len(packed) < 8 * N * N
    copy = pickle.loads(packed)
    assert torch.equal(copy.dense(), gram.dense())
    assert copy.manifest == gram.manifest
    part_ = gram.cosine().select(P, Q)
    assert torch.equal(pickle.loads(pickle.dumps(part_)).dense(), part_.dense())


def test_other_samples_of_the_same_number_have_no_cosine_of_their_own(tmp_path: Path) -> None:
    """The diagonal of k(x, y) is not k(x, x), however square the matrix."""
    kernel = tg.trace_ntk(mlp([3, 5, 2]).double())
    x, y = torch.randn(6, 3, dtype=F64), torch.randn(6, 3, dtype=F64)
    for store in (None, str(tmp_path / "k")):
        gram = tg.compute(kernel, x, y, store=store, progress=False)
        with pytest.raises(tg.InputError, match="needs k\\(x, x\\) and k\\(y, y\\)"):
            gram.cosine()
        want = tg.cosine(kernel)(x, y)
        torch.testing.assert_close(gram.cosine(kernel.diag(x), kernel.diag(y)).dense(), want)
    assert torch.equal(gram @ torch.ones(6, dtype=F64), gram @ torch.ones(6, dtype=F64).numpy())
    assert torch.equal(gram[...], gram.dense())
