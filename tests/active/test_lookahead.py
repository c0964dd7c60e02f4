"""The exact update against fits made anew, by NumPy and by scikit-learn, for shared and for full kernels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from torch import Tensor

import tangency as tg
from tangency.active import LookAhead, greedy_changes, look_ahead

F64 = torch.float64


def made(n: int = 40, c: int | None = None, seed: int = 0) -> Tensor:
    """A Gram [n, n], or one of c outputs that are not alike, [n, c, n, c]."""
    w = torch.randn(n * (c or 1), 70, generator=torch.Generator().manual_seed(seed), dtype=F64)
    k = w @ w.T / 70
    return k if c is None else k.reshape(n, c, n, c)


def fitted(k: Tensor, known: list[int], targets: Tensor, reg: float, f0: Tensor | None = None) -> np.ndarray:
    """f₀ + k(·, X)(K + reg)⁻¹(y − f₀) on all samples, by NumPy's solver."""
    b = k.shape[1] if k.dim() == 4 else 1
    n, flat = k.shape[0], k.reshape(k.shape[0] * b, -1).numpy()
    start = np.zeros((n, targets.shape[1])) if f0 is None else f0.numpy()
    rows = (np.array(known)[:, None] * b + np.arange(b)).ravel()
    missing = (targets.numpy() - start[known]).reshape(len(rows), -1)
    a = np.linalg.solve(flat[np.ix_(rows, rows)] + reg * np.eye(len(rows)), missing)
    return start + (flat[:, rows] @ a).reshape(start.shape)


def one_hot(labels: list[int], c: int = 3) -> Tensor:
    return torch.eye(c, dtype=F64)[labels]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_label_more_is_as_a_fit_anew(full: bool, started: bool) -> None:
    k = made(c=3 if full else None)
    f0 = torch.randn(40, 3, dtype=F64) if started else None
    known, labels = [3, 30, 7, 12], [0, 1, 2, 1]
    ahead = look_ahead(k, known, labels, reg=0.05, f0=f0)
    np.testing.assert_allclose(ahead.outputs, fitted(k, known, one_hot(labels), 0.05, f0), atol=1e-10)
    candidates, hypothetical = [0, 5, 39], [2, 0, 0]
    after = ahead.after(candidates, hypothetical)
    for j, label, got in zip(candidates, hypothetical, after, strict=True):
        want = fitted(k, [*known, j], one_hot([*labels, label]), 0.05, f0)
        np.testing.assert_allclose(got, want, atol=1e-10)
    # Products of other shapes are other sums: some 1e-16 of numbers of size 1, with any processor's.
    some = ahead.after(candidates, hypothetical, on=[1, 2])
    np.testing.assert_allclose(some, after[:, 1:3], rtol=0, atol=1e-13)
    # All of them together, then one more: sums of updates are one fit.
    more = ahead.add(candidates, hypothetical).add([8], one_hot([1]) * 2)
    targets = torch.cat([one_hot([*labels, *hypothetical]), 2 * one_hot([1])])
    np.testing.assert_allclose(more.outputs, fitted(k, [*known, *candidates, 8], targets, 0.05, f0), atol=1e-10)
    assert more.labelled.tolist() == [*known, *candidates, 8]
    assert ahead.labelled.tolist() == known  # as it was


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("measure", ["norm", "classes"])
def test_changes_are_those_of_fits(full: bool, measure: str) -> None:
    k, known, labels = made(20, c=3 if full else None), [3, 17, 7, 12], [0, 1, 2, 1]
    ahead = look_ahead(k, known, labels, reg=0.05)
    before, candidates = fitted(k, known, one_hot(labels), 0.05), ahead.candidates.tolist()
    assert sorted(candidates + known) == list(range(20))
    want = np.empty((16, 3))
    for row, j in enumerate(candidates):
        for c in range(3):
            after = fitted(k, [*known, j], one_hot([*labels, c]), 0.05)[candidates]
            moved = np.linalg.norm(after - before[candidates], axis=1)
            flipped = after.argmax(1) != before[candidates].argmax(1)
            want[row, c] = (moved if measure == "norm" else flipped).sum()
    got = ahead.changes(measure=measure)
    np.testing.assert_allclose(got, want, rtol=1e-8)
    likeliest = ahead.most_likely_change(measure=measure)
    np.testing.assert_allclose(likeliest, want[np.arange(16), before[candidates].argmax(1)], rtol=1e-8)
    p = torch.rand(20, 3, dtype=F64).softmax(1)
    expected = ahead.expected_change(p, measure=measure)
    np.testing.assert_allclose(expected, (want * p[candidates].numpy()).sum(1), rtol=1e-8)
    some = ahead.changes([candidates[4]], on=[0, 1], measure=measure)
    assert some.shape == (1, 3)
    assert bool((some <= got[4] + 1e-12).all())


def test_memory_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    k, known, labels = made(), [3, 30, 7], [0, 1, 2]
    asked: list[int] = []
    whole = LookAhead.covariance
    monkeypatch.setattr(LookAhead, "covariance", lambda s, i, j: (asked.append(len(i) * len(j)), whole(s, i, j))[1])
    for full in (None, 3):
        k = made(c=full)
        large, small = (look_ahead(k, known, labels, memory=m) for m in ("1GB", 20_000))
        for measure in ("norm", "classes"):
            asked.clear()
            want = large.changes(measure=measure)
            assert asked == [37 * 37]
            asked.clear()
            torch.testing.assert_close(small.changes(measure=measure), want)
            assert len(asked) > 1
            assert sum(asked) == 37 * 37
        picks = [greedy_changes(m, m.candidates, 6).tolist() for m in (large, small)]
        assert picks[0] == picks[1]


def test_each_pick_is_the_best_after_those_before_it() -> None:
    """Greedy picks by fits anew, labels as the machine then believes them."""
    k, known, labels = made(15), [3, 14, 7], [0, 1, 2]
    ahead = look_ahead(k, known, labels, reg=0.05)
    candidates, picked = ahead.candidates.tolist(), list[int]()
    now_known, now_labels = list(known), list(labels)
    for _ in range(4):
        before = fitted(k, now_known, one_hot(now_labels), 0.05)
        change = {}
        for j in set(candidates) - set(picked):
            after = fitted(k, [*now_known, j], one_hot([*now_labels, int(before[j].argmax())]), 0.05)
            change[j] = np.linalg.norm((after - before)[candidates], axis=1).sum()
        best = max(change, key=lambda j: change[j])
        picked.append(best)
        now_known.append(best)
        now_labels.append(int(before[best].argmax()))
    assert greedy_changes(ahead, ahead.candidates, 4).tolist() == picked
    p = ahead.outputs.softmax(1)
    first = ahead.candidates[ahead.expected_change(p).argmax()]
    assert greedy_changes(ahead, ahead.candidates, 1, probabilities=p) == first


def test_covariance_is_that_of_a_gaussian_process() -> None:
    x, z = np.random.default_rng(0).normal(size=(2, 12, 3))
    rbf = GaussianProcessRegressor(RBF(1.3), alpha=0.2, optimizer=None).fit(x, np.zeros(12))
    want = rbf.predict(z, return_cov=True)[1]
    k = RBF(1.3)(np.concatenate([x, z]))
    ahead = look_ahead((k + k.T) / 2, range(12), [0, 1] * 6, reg=0.2)
    np.testing.assert_allclose(ahead.covariance(range(12, 24), range(12, 24)), want, atol=1e-10)


@given(st.integers(0, 10_000), st.sampled_from([None, 2]), st.floats(1e-6, 10))
def test_the_order_of_labels_does_not_matter(seed: int, c: int | None, reg: float) -> None:
    k = made(12, c, seed)
    labels = torch.randint(2, (8,), generator=torch.Generator().manual_seed(seed))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed + 1))
    once = look_ahead(k, torch.arange(8), labels, classes=2, reg=reg)
    again = look_ahead(k, order[:3], labels[order[:3]], classes=2, reg=reg)
    for part in (order[3:4], order[4:]):
        again = again.add(part, labels[part])
    torch.testing.assert_close(again.outputs, once.outputs, rtol=1e-8, atol=1e-8)


def test_grams_of_all_kinds(tmp_path: Path) -> None:
    """In memory, on disk, float32, a part of one: the same numbers."""
    x = torch.randn(25, 4)
    kernel = tg.trace_ntk(tg.models.mlp([4, 8, 2]))
    held = tg.compute(kernel, x, progress=False)
    stored = tg.compute(kernel, x, store=tmp_path / "gram", tile=7, progress=False)
    want = look_ahead(held.dense().double(), [0, 1, 2], [0, 1, 1], reg=1.0).changes()
    for k in (held, stored, held.dense(), held.numpy(), held.select(range(25), range(25))):
        ahead = look_ahead(k, [0, 1, 2], [0, 1, 1], reg=1.0)
        assert ahead.outputs.dtype == F64
        torch.testing.assert_close(ahead.changes(), want, rtol=1e-5, atol=1e-6)
    assert "LookAhead(labelled=int64[3]" in repr(ahead)
    assert ahead.to_dict()["labelled"] == [0, 1, 2]


def test_a_multiple_of_the_kernel_says_the_same() -> None:
    k = made()
    one, ten = (look_ahead(a * k, [0, 1, 2], [0, 1, 2]) for a in (1, 10))
    torch.testing.assert_close(one.changes(), ten.changes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labelled": []}, "no sample has a label"),
        ({"labelled": [0, 0, 1]}, "names sample 0 twice"),
        ({"labelled": [0, 1, 40]}, "names sample 40; needed: numbers from 0 to 39"),
        ({"labelled": [0.5, 1, 2]}, "needed: numbers of samples"),
        ({"targets": [0, 1]}, "needed: 3 classes"),
        ({"targets": [0, 1, 3], "classes": 3}, "a label of class 3; needed: classes from 0 to 2"),
        ({"targets": [0, -1, 2]}, "a label of class -1"),
        ({"targets": torch.zeros(3, 2, dtype=torch.long)}, "needed: one class for each sample"),
        ({"targets": torch.full((3, 2), torch.nan)}, "needed: finite numbers"),
        ({"targets": torch.zeros(3, 2), "classes": 3}, "targets have 2 columns; needed: 3"),
        ({"K": torch.full((40, 40), torch.nan)}, "needed: finite numbers"),
        ({"K": torch.zeros(40, 39)}, "needed: a square Gram"),
        ({"f0": torch.zeros(39, 3)}, "needed: outputs of all samples of K"),
        ({"f0": torch.full((40, 3), torch.inf)}, "needed: finite numbers"),
        ({"f0": torch.zeros(40, 2), "targets": torch.zeros(3, 3)}, "targets have 3 columns; needed: 2"),
        ({"f0": torch.zeros(40, 3), "classes": 5}, "classes=5, and f0 has 3 outputs; needed: equal"),
        ({"K": made(c=3), "classes": 4}, "classes=4, and the kernel has 3 outputs; needed: equal"),
        ({"classes": "3"}, "classes='3'; needed: how many there are, a whole number from 2"),
        ({"reg": -1}, "reg=-1"),
        ({"memory": "much"}, "memory='much'"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, object], message: str) -> None:
    given_ = {"K": made(), "labelled": [0, 1, 2], "targets": [0, 1, 2]} | change
    with pytest.raises(tg.InputError, match=message.replace("[", r"\[")):
        look_ahead(given_.pop("K"), given_.pop("labelled"), given_.pop("targets"), **given_)


def test_what_is_asked_wrongly_is_said() -> None:
    ahead = look_ahead(made(), [0, 1, 2], [0, 1, 2])
    with pytest.raises(tg.InputError, match="sample 1 has a label already"):
        ahead.add([5, 1], [0, 0])
    with pytest.raises(tg.InputError, match="names sample 5 twice"):
        ahead.add([5, 5], [0, 0])
    with pytest.raises(tg.InputError, match="Did you mean 'norm'"):
        ahead.changes(measure="norms")
    with pytest.raises(tg.InputError, match="a row for each sample of K"):
        ahead.expected_change(torch.ones(3, 3))
    for probabilities, message in (
        (np.full((40, 3), np.nan), "nan; needed: finite"),
        (np.eye(40)[:, :3] - 1, "below 0"),
    ):
        with pytest.raises(tg.InputError, match=message):
            ahead.expected_change(probabilities)
    for count in (0, 38):
        with pytest.raises(tg.InputError, match=f"count={count}; needed: a whole number from 1 to 37, the candidates"):
            greedy_changes(ahead, ahead.candidates, count)
    with pytest.raises(tg.InputError, match="candidates names sample 9 twice"):
        greedy_changes(ahead, [9, 9], 1)


def test_numbers_with_a_point_are_no_classes() -> None:
    """Labels [0., 1., 2.] make one real output, of which no class is likeliest."""
    ahead = look_ahead(made(), [0, 1, 2], [0.0, 1.0, 2.0])
    for ask in (ahead.changes, ahead.most_likely_change, lambda: greedy_changes(ahead, [5, 6], 1)):
        with pytest.raises(
            tg.InputError, match="one output, so there is no other class.*Give classes as whole numbers"
        ):
            ask()
    assert ahead.after([5], [1.5]).shape == (1, 40, 1)


@pytest.mark.parametrize("c", [None, 3])
def test_of_none_there_is_nothing(c: int | None) -> None:
    ahead = look_ahead(made(c=c), [0, 1, 2], [0, 1, 2])
    assert ahead.changes([]).shape == (0, 3)
    assert torch.equal(ahead.changes([5], []), torch.zeros(1, 3, dtype=F64))
    assert ahead.after([], []).shape == (0, 40, 3)
    assert ahead.after([5], [1], on=[]).shape == (1, 0, 3)
    assert torch.equal(ahead.add([], []).outputs, ahead.outputs)


def test_lists_and_arrays_do_as_tensors_do() -> None:
    ahead, p = look_ahead(made(), [0, 1, 2], [0, 1, 2]), torch.rand(40, 3, dtype=F64)
    assert torch.equal(ahead.expected_change(p.numpy()), ahead.expected_change(p.tolist()))
    picked = greedy_changes(ahead, ahead.candidates, 4, probabilities=p)
    assert torch.equal(picked, greedy_changes(ahead, ahead.candidates.tolist(), 4, probabilities=p.numpy()))


def test_copies_need_a_reg() -> None:
    """A copy of a labelled sample tells nothing new; without reg that is a division by nothing."""
    x = torch.randn(10, 20, dtype=F64)
    x[9] = x[0]
    k = x @ x.T
    bare = look_ahead(k, [0, 1], [0, 1], reg=0.0)
    for ask in (lambda: bare.changes(), lambda: bare.add([9], [0]), lambda: bare.after([9], [1])):
        with pytest.raises(tg.NotPositiveDefinite, match="repeat what the samples with labels say.*Give a larger reg"):
            ask()
    assert bool(bare.changes([4]).isfinite().all())
    assert bool(look_ahead(k, [0, 1], [0, 1], reg=1e-3).changes().isfinite().all())
    with pytest.raises(tg.NotPositiveDefinite):
        look_ahead(k, [0, 9], [0, 1], reg=0.0)
