"""Grams where other libraries want arrays: NumPy, torch, scikit-learn, matplotlib."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tangency as tg
from tangency.gram import gram as gram_module
from tangency.gram.gram import DenseGram, Gram


class OnDisk(Gram):
    """A Gram that is nowhere in memory, tile by tile out of a tensor; counts how many tiles were read."""

    def __init__(self, value):
        self.value, self.read = value, 0

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    _same_samples = True

    def tiles(self, wanted=None):
        half = len(self.shape) // 2
        for i in range(0, self.shape[0], 4):
            for j in range(0, self.shape[half], 4):
                rows, columns = (slice(k, min(k + 4, n)) for k, n in ((i, self.shape[0]), (j, self.shape[half])))
                if wanted is None or wanted(rows, columns):
                    self.read += 1
                    part = self.value[rows].index_select(half, torch.arange(self.shape[half])[columns])
                    yield rows, columns, part


X = torch.randn(11, 3, generator=torch.Generator().manual_seed(0))
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
KERNEL = tg.trace_ntk(MODEL)


def every_kind(folder):
    """Each kind of Gram with the tensor that it stands for."""
    k, full = KERNEL(X), tg.full_ntk(MODEL)(X)
    stored = tg.compute(KERNEL, X, store=folder / "k", tile=4)
    norms = k.diagonal().sqrt()
    return {
        "dense": (DenseGram(k, True), k),
        "full": (DenseGram(full, True), full),
        "rectangular": (tg.compute(KERNEL, X[:4], X), k[:4]),
        "stored": (stored, k),
        "stored rectangular": (tg.compute(KERNEL, X, X[:5], store=folder / "r", tile=4), k[:, :5]),
        "stored full": (tg.compute(tg.full_ntk(MODEL), X, store=folder / "f", tile=4), full),
        "cosine": (stored.cosine(), k / (norms[:, None] * norms)),
        "select": (stored.select([3, 1, 7], [0, 2]), k[[3, 1, 7]][:, [0, 2]]),
        "view of all": (DenseGram(k, True).select(), k),
        "weighted": (DenseGram(k, True).weighted(torch.full((11,), 4.0)), 4 * k),
    }


def test_every_kind_of_gram_is_an_array_and_a_tensor(tmp_path: Path) -> None:
    for name, (gram, value) in every_kind(tmp_path).items():
        expected = value.numpy()
        for made in (np.asarray(gram), gram.numpy(), np.array(gram), np.from_dlpack(gram)):
            assert made.dtype == np.float32, name
            np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5, err_msg=name)
        for made in (torch.as_tensor(gram), torch.asarray(gram), torch.tensor(gram), torch.from_dlpack(gram)):
            assert made.shape == gram.shape, name
            torch.testing.assert_close(made, gram.dense(), rtol=0, atol=0, msg=name)
        assert len(gram) == len(np.asarray(gram)) == len(value), name
        assert torch.as_tensor(gram, dtype=torch.float64).dtype == torch.float64


def test_types_and_copies_are_as_numpy_asks() -> None:
    gram = DenseGram(KERNEL(X), True)
    own = gram.value.numpy()
    assert np.shares_memory(np.asarray(gram), own)
    assert np.shares_memory(np.asarray(gram, copy=False), own)
    assert np.shares_memory(torch.as_tensor(gram).numpy(), own)
    assert not np.shares_memory(np.array(gram), own)
    assert not np.shares_memory(np.asarray(gram, copy=True), own)
    wide = np.asarray(gram, dtype=np.float64)
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, own.astype(np.float64))
    assert np.asarray(gram.cosine(), copy=True).dtype == np.float32
    for other, dtype in ((gram, np.float64), (gram.cosine(), None), (gram.select([1], [2]), None)):
        with pytest.raises(tg.InputError, match=r"is a copy \(copy=False was asked for\). Leave copy out"):
            np.asarray(other, dtype=dtype, copy=False)


def test_larger_than_free_memory_is_refused_before_a_tile_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gram = OnDisk(KERNEL(X))
    monkeypatch.setattr(gram_module, "available_memory", lambda: 11 * 11 * 4)
    assert np.asarray(gram).shape == (11, 11)
    gram.read = 0
    with pytest.raises(tg.MemoryBudgetError, match=r"takes 1452 bytes, and 484 are free; .*gram\[rows, columns\]"):
        np.asarray(gram, dtype=np.float64)
    monkeypatch.setattr(gram_module, "available_memory", lambda: 483)
    with pytest.raises(tg.MemoryBudgetError, match="as an array the Gram takes 484 bytes, and 483 are free"):
        gram.numpy()
    assert gram.read == 0
    # What lies in memory already takes nothing more.
    np.asarray(DenseGram(gram.value, True))
    with pytest.raises(tg.MemoryBudgetError):
        np.array(DenseGram(gram.value, True).cosine())
    monkeypatch.setattr(gram_module.memory_of, "machine_memory", lambda: 500)
    with pytest.raises(tg.MemoryBudgetError, match="more than max_bytes=250"):
        torch.as_tensor(gram)
    assert gram.read == 0


def test_incomplete_and_damaged_stores_say_so(tmp_path: Path) -> None:
    stored = tg.compute(KERNEL, X, store=tmp_path / "k", tile=4)
    for name, harm, error in (
        ("gone", lambda file: file.unlink(), tg.IncompleteGram),
        ("bitten", lambda file: file.write_bytes(file.read_bytes()[:-4] + b"\0\0\1\2"), tg.DamagedTile),
    ):
        copy = tmp_path / name
        shutil.copytree(tmp_path / "k", copy)
        harm(copy / "c" / "1" / "2")
        for take in (np.asarray, torch.as_tensor, lambda gram: gram.numpy()):
            with pytest.raises(error):
                take(tg.open_gram(copy))
    assert np.asarray(stored).shape == (11, 11)


def test_scikit_learn_and_matplotlib_take_grams(tmp_path: Path) -> None:
    svm = pytest.importorskip("sklearn.svm")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    y = (X[:, 0] > 0).numpy()
    gram, cross = tg.compute(KERNEL, X, store=tmp_path / "k", tile=4), tg.compute(KERNEL, X[:3], X)
    fitted = svm.SVC(kernel="precomputed").fit(gram, y)
    again = svm.SVC(kernel="precomputed").fit(gram.dense().numpy(), y)
    np.testing.assert_array_equal(fitted.predict(cross), again.predict(cross.dense().numpy()))
    figure, axes = pyplot.subplots()
    picture = axes.imshow(gram)
    np.testing.assert_array_equal(picture.get_array(), gram.dense().numpy())
    pyplot.close(figure)


def test_numbers_of_the_samples_in_any_form() -> None:
    square, cross = DenseGram(KERNEL(X), True), tg.compute(KERNEL, X, X[:4])
    weights = torch.linspace(0.5, 2.0, 11, dtype=torch.float64)
    norms = KERNEL.diag(X)
    v = torch.linspace(-1.0, 1.0, 11, dtype=torch.float64)
    for form in (
        lambda t: t.numpy(),
        lambda t: t.tolist(),
        lambda t: t.numpy().astype(t.numpy().dtype.newbyteorder(">")),
    ):
        torch.testing.assert_close(
            square.weighted(form(weights)).dense().double(), square.weighted(weights).dense(), rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(
            cross.cosine(form(norms), form(norms[:4])).dense().float(), cross.cosine(norms, norms[:4]).dense()
        )
        torch.testing.assert_close((square @ form(v)).double(), square @ v, rtol=1e-5, atol=1e-5)
    assert (square @ v.tolist()).dtype == torch.float32  # a list has no type
    for attempt, message in (
        (lambda: square.weighted([[1.0], [1.0, 2.0]]), "weights is a list and no table of numbers"),
        (lambda: square.weighted([]), r"weights have shape \(0,\); needed: \[11\] numbers above 0"),
        (lambda: square.weighted([1.0] * 10), r"weights have shape \(10,\), the smallest is 1; needed"),
        (lambda: cross.cosine(np.ones(11), np.ones(11)), r"column_diag has shape \(11,\); needed: \(4,\)"),
        (lambda: square @ np.array(["a"] * 11), "v is an array of <U1"),
    ):
        with pytest.raises(tg.InputError, match=message):
            attempt()


def test_gram_cut_by_meshes_as_scikit_learn_does(tmp_path: Path) -> None:
    selection, svm = pytest.importorskip("sklearn.model_selection"), pytest.importorskip("sklearn.svm")
    gram = tg.compute(KERNEL, X, store=tmp_path / "k", tile=4)
    whole = gram.numpy()
    np.testing.assert_array_equal(gram[np.ix_([3, 1], [0, 2, 5])], whole[np.ix_([3, 1], [0, 2, 5])])
    y, folds = (X[:, 0] > X[:, 0].median()).numpy(), selection.KFold(3)
    scores = [selection.cross_val_score(svm.SVC(kernel="precomputed"), k, y, cv=folds) for k in (gram, whole)]
    np.testing.assert_array_equal(*scores)
    for key in (None, (None, 2), (2, None)):
        with pytest.raises(tg.InputError, match="None is no row or column; needed: numbers, slices"):
            gram[key]


def test_a_number_too_large_is_named_by_its_place() -> None:
    given = X.double()
    given[9, 1] = 1e39
    with pytest.raises(tg.InputError, match=r"x1\[9:11\]\[0, 1\] is 1e\+39"):
        tg.compute(KERNEL, given, tile=4)
