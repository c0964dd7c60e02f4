"""Attributions by their formula, their sums against the logits, box plots against numpy and matplotlib."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.cbook import boxplot_stats
from torch import Tensor, nn

import tangency as tg
from tangency import InputError
from tangency.decisions.attribution import Attribution, attributions, summarize
from tangency.models import mlp
from tangency.regress import logistic, ridge, ridgeless
from tangency.surrogate import Surrogate, fit

F64 = torch.float64
N, M = 24, 5


def near(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    got, want = (np.asarray(v, dtype=np.float64) for v in (got, want))
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), 1e-300)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


# Sums of attributions are logits, for every kernel and every machine.


def network(name: str, classes: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, training inputs and new ones."""
    torch.manual_seed(1)
    if name == "mlp":
        return mlp([3, 10, 8, classes], nn.Tanh).double(), normal(N, 3), normal(M, 3)
    conv = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2), nn.Tanh()]
    model = nn.Sequential(*conv, nn.Flatten(), nn.Linear(12, classes))
    return model.double(), normal(N, 1, 6, 6), normal(M, 1, 6, 6)


KERNELS = ["trNTK", "trNTK⁰", "pNTK", "Em", "CK", "sum", "scale", "head", "difference", "rbf"]


def grams(kernel: str, model: nn.Module, x: Tensor, z: Tensor) -> tuple[Any, Any]:
    """K [n, n] and κ(z, x) [m, n]."""
    if kernel == "rbf":
        a, b = x.flatten(1), z.flatten(1)
        return tuple(torch.exp(-(v[:, None] - a[None]).square().sum(-1) / 8) for v in (a, b))  # type: ignore[return-value]
    made = {
        "sum": lambda: tg.sum(tg.cosine(tg.trace_ntk(model)), tg.conjugate_kernel(model)),
        "scale": lambda: tg.scale(tg.pseudo_ntk(model), 1e3),
        "head": lambda: tg.head_ntk(model, 1),
        "difference": lambda: tg.head_ntk(model, (0, 1)),
    }
    k = made[kernel]() if kernel in made else tg.decisions.kernels(model)[kernel]
    return tg.compute(k, x, progress=False), tg.compute(k, z, x, progress=False)


def machines(K: Any, y: Tensor, classes: int) -> dict[str, Any]:
    """Everything that is a sum over training samples."""
    scale = float(torch.as_tensor(K.diag()).mean())
    targets = normal(N, classes)
    return {
        "surrogate": fit(K, y, reg=0.01 * scale**2, progress=False),
        "surrogate by norm": fit(K, y, reg=0.1 * scale, penalty="norm", progress=False),
        "surrogate by sgd": fit(K, y, reg=0.1 * scale**2, solver="sgd", tol=float("inf"), max_steps=3, progress=False),
        "logistic": logistic(K, y, reg=0.1 * scale),
        "logistic with bias": logistic(K, y, reg=0.1 * scale, bias=True),
        "ridge": ridge(K, targets, reg=0.1 * scale),
        "ridge of one output": ridge(K, targets[:, 0], reg=0.1 * scale),
        "ridge of weighted samples": ridge(K, targets, reg=0.1 * scale, sample_weights=(torch.arange(N) % 4).double()),
        "ridgeless": ridgeless(K, targets, cutoff=1e-6),
    }


def said(model: Any, cross: Any) -> Tensor:
    """Logits, or the outputs of a regression, [m, q]."""
    out = model.predict(cross) if isinstance(model, tg.regress.KernelModel) else model.logits(cross)
    return out if out.dim() == 2 else out[:, None]


@pytest.mark.parametrize(
    ("name", "classes", "kernel"), [*(("mlp", 2, k) for k in KERNELS), ("cnn", 4, "trNTK"), ("cnn", 4, "CK")]
)
@pytest.mark.every(3)
def test_attributions_sum_to_the_logits(name: str, kernel: str, classes: int) -> None:
    model, x, z = network(name, classes)
    K, cross = grams(kernel, model, x, z)
    y = torch.arange(N) % classes
    for machine in machines(K, y, classes).values():
        each, want = attributions(machine, cross), said(machine, cross)
        assert each.shape == (M, want.shape[1], N)
        near(each.sum(-1), want)
        near(summarize(machine, cross, labels=y, neighbours=3, progress=False).totals, want)


@pytest.mark.parametrize("classes", [2, 3])
def test_each_attribution_is_the_formula(classes: int) -> None:
    """A(x, x_i)^c = W_ci κ(x, x_i) + b_c / N, entry by entry, with W and b taken from where each model keeps them."""
    model, x, z = network("mlp", classes)
    K, cross = grams("trNTK", model, x, z)
    kappa = cross.dense().numpy()
    for name, machine in machines(K, torch.arange(N) % classes, classes).items():
        if name.startswith("surrogate"):
            W, b = machine.coefficients, machine.bias
        elif name.startswith("logistic"):
            W, b = machine.model.coefficients, machine.bias
        else:
            W, b = machine.coefficients, torch.zeros(())
        W = W.reshape(N, -1).numpy()
        b = np.broadcast_to(b.numpy(), W.shape[1:])
        want = [
            [[W[i, c] * kappa[j, i] + b[c] / N for i in range(N)] for c in range(W.shape[1])] for j in range(M)
        ]  # fmt: skip
        near(attributions(machine, cross), want, 1e-13)
        if name in ("surrogate", "logistic with bias"):
            assert np.abs(b).min() > 1e-9  # so that leaving the bias out would show


def test_what_starts_from_f0_is_attributed_beyond_f0() -> None:
    model, x, z = network("mlp", 3)
    K, cross = grams("trNTK", model, x, z)
    f0, f0_z = normal(N, 3), normal(M, 3)
    machine = ridge(K, normal(N, 3), reg=0.1, f0=f0)
    near(attributions(machine, cross).sum(-1), machine.predict(cross, f0_z) - f0_z)
    other = logistic(K, torch.arange(N) % 3, reg=0.1, f0=f0, bias=True)
    near(attributions(other, cross).sum(-1), other.logits(cross, f0_z) - f0_z)


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.every(2)
def test_grams_on_disk_are_attributed_as_those_in_memory(cosine: bool, tmp_path: Path) -> None:
    model, x, z = network("cnn", 3)
    k, y = tg.trace_ntk(model), torch.arange(N) % 3
    own = tg.compute(k, x, store=str(tmp_path / "own"), tile=10, progress=False)
    far = tg.compute(k, z, x, store=str(tmp_path / "far"), tile=7, progress=False)
    dense, cross = k(x).detach(), k(z, x).detach()
    if cosine:
        norms = k.diag(z), k.diag(x)
        own, far = own.cosine(), far.cosine(*norms)
        dense, cross = dense / (norms[1][:, None] * norms[1]).sqrt(), cross / (norms[0][:, None] * norms[1]).sqrt()
    assert not far._in_memory
    machine = fit(own, y, progress=False)
    near(attributions(machine, far).sum(-1), machine.logits(far))
    near(attributions(machine, far), attributions(machine, cross))
    near(machine.coefficients, fit(dense, y, progress=False).coefficients, 1e-5)
    on_disk, in_memory = (
        summarize(machine, g, labels=y, neighbours=4, fliers=3, memory="3KB", progress=False) for g in (far, cross)
    )
    for field in fields(Attribution):
        a, b = getattr(on_disk, field.name), getattr(in_memory, field.name)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


# What stands for A: a model whose attributions are given numbers.


def plain(n: int, outputs: int = 1) -> Surrogate:
    """W = 1 and b = 0: the attributions are κ itself."""
    w, b = torch.ones(n, outputs, dtype=F64), torch.zeros(outputs, dtype=F64)
    return Surrogate(w, b, 1.0, "weights", "newton", 1, 0.0, 0.0)


def random_surrogate(n: int, c: int) -> Surrogate:
    return Surrogate(normal(n, c), normal(c), 1.0, "weights", "newton", 1, 0.0, 0.0)


@pytest.mark.parametrize("memory", [1, 5_000, "9KB", "20KB", "1GB"])
@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.every(3)
def test_bands_of_any_size_have_the_same_summary(memory: Any, disk: bool, tmp_path: Path) -> None:
    """Bit by bit."""
    n, m, c = 50, 23, 3
    cross: Any = normal(m, n).round(decimals=1)  # with ties
    if disk:
        x, z = normal(n, 4), normal(m, 4)
        cross = tg.compute(tg.trace_ntk(mlp([4, 3]).double()), z, x, store=str(tmp_path), tile=16, progress=False)
    model, y = random_surrogate(n, c), torch.arange(n) % 4
    outputs = torch.randint(c, (m, 2))
    options = {"labels": y, "outputs": outputs, "neighbours": 6, "fliers": 4, "progress": False}
    want, got = summarize(model, cross, **options), summarize(model, cross, memory=memory, **options)
    for field in fields(Attribution):
        a, b = getattr(want, field.name), getattr(got, field.name)
        assert torch.equal(a.nan_to_num(nan=-1e9), b.nan_to_num(nan=-1e9)), field.name
    assert torch.equal(want.outputs, outputs)


def test_memory_bounds_the_rows_that_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A band takes about `memory`: of its attributions, copies and all."""
    rows: list[int] = []
    real = tg.decisions.attribution._summary
    monkeypatch.setattr(tg.decisions.attribution, "_summary", lambda *a: (rows.append(len(a[1])), real(*a))[1])
    model, cross = random_surrogate(100, 3), normal(64, 100)
    summarize(model, cross, memory=1, progress=False)
    assert rows == [1] * 64
    rows.clear()
    summarize(model, cross, memory=100_000, progress=False)
    assert sum(rows) == 64
    assert 8 * 100 * 3 * max(rows) <= 100_000
    assert len(rows) > 1
    rows.clear()
    summarize(model, cross, progress=False)
    assert rows == [64]


def test_outputs_choose_logits_sample_by_sample() -> None:
    model, cross = random_surrogate(30, 4), normal(6, 30)
    every = attributions(model, cross)
    chosen = torch.tensor([[0, 3], [2, 2], [1, 0], [3, 3], [0, 1], [2, 1]])
    want = torch.stack([every[j, chosen[j]] for j in range(6)])
    for asked in (chosen, chosen.numpy(), chosen.int()):
        assert torch.equal(attributions(model, cross, asked), want)
    summary = summarize(model, cross, outputs=chosen, progress=False)
    near(summary.totals, model.logits(cross).gather(1, chosen), 1e-13)
    assert torch.equal(summary.outputs, chosen)
    assert torch.equal(summarize(model, cross, progress=False).outputs, torch.arange(4).expand(6, 4))
    assert repr(summary) == "Attribution(6 decisions, 2 logits each, 1 classes, 8 nearest)"


@pytest.mark.parametrize(
    ("outputs", "given"),
    [
        (torch.zeros(6).long(), r"shape \(6,\), torch.int64"),
        (torch.zeros(5, 2).long(), r"shape \(5, 2\), torch.int64"),
        (torch.zeros(6, 0).long(), r"shape \(6, 0\), torch.int64"),
        (torch.zeros(6, 2), r"shape \(6, 2\), torch.float32"),
    ],
)
def test_outputs_of_another_shape_or_kind_are_refused(outputs: torch.Tensor, given: str) -> None:
    model, cross = random_surrogate(30, 4), normal(6, 30)
    with pytest.raises(InputError, match=rf"outputs has {given}; needed: whole numbers \[6, q\]"):
        attributions(model, cross, outputs)


def test_a_gram_in_single_precision_is_attributed_in_double() -> None:
    model, cross = random_surrogate(30, 2), normal(4, 30).float()
    got = attributions(model, cross)
    assert got.dtype == F64
    near(got.sum(-1), model.logits(cross), 1e-13)


def test_a_model_in_single_precision_loses_no_digit_of_the_gram() -> None:
    """Sums are the predictions, which are in the wider of both types."""
    K = normal(30, 60).float()
    machine = ridge(K @ K.T, torch.randn(30), reg=1.0)
    cross = normal(4, 30)
    assert machine.predict(cross).dtype == F64
    near(attributions(machine, cross).sum(-1)[:, 0], machine.predict(cross), 1e-10)


# Box plots.


def box(values: np.ndarray, fliers: int = 8) -> tuple[np.ndarray, int, np.ndarray]:
    """Of n numbers as the attributions of one decision: the six, how many lie beyond, the farthest."""
    found = summarize(plain(len(values)), torch.from_numpy(values)[None], neighbours=1, fliers=fliers, progress=False)
    return found.boxes[0, 0, 0].numpy(), int(found.outliers[0, 0, 0]), found.fliers[0, 0, 0].numpy()


def drawn(n: int, kind: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return {
        "normal": lambda: rng.normal(size=n),
        "heavy": lambda: rng.standard_cauchy(n),
        "skewed": lambda: rng.lognormal(0, 2, n),
        "whole": lambda: rng.integers(-3, 4, n).astype(float),
        "few levels": lambda: rng.choice([0.0, 0.0, 0.0, 0.1, 7.0], n),
        "constant": lambda: np.full(n, rng.normal()),
        "tiny": lambda: 1e-12 * rng.standard_t(2, n),
        "far from zero": lambda: 1e6 + rng.standard_t(2, n),
    }[kind]()


KINDS = ["normal", "heavy", "skewed", "whole", "few levels", "constant", "tiny", "far from zero"]
SIZES = st.one_of(st.integers(1, 12), st.integers(13, 300))


@settings(max_examples=150)
@given(SIZES, st.sampled_from(KINDS), st.integers(0, 999), st.integers(1, 12))
@example(1, "normal", 0, 3)
@example(2, "normal", 0, 3)
@example(3, "heavy", 0, 1)
@example(5, "heavy", 1, 5)
@example(4, "few levels", 1, 2)
def test_quartiles_mean_and_outliers_are_those_of_numpy_and_matplotlib(n: int, kind: str, seed: int, f: int) -> None:
    values = drawn(n, kind, seed)
    got, outliers, fliers = box(values, f)
    scale = np.abs(values).max()
    np.testing.assert_allclose(got[1:4], np.percentile(values, [25, 50, 75]), rtol=1e-12, atol=1e-13 * scale)
    assert got[5] == pytest.approx(values.mean(), rel=1e-9, abs=1e-12 * scale)
    peer = boxplot_stats(values)[0]
    assert outliers == len(peer["fliers"])
    # The farthest from the box come first; as many as there are and as were asked for; the rest is NaN.
    beyond = np.sort(np.maximum(peer["whislo"] - peer["fliers"], peer["fliers"] - peer["whishi"]))[::-1]
    shown = fliers[~np.isnan(fliers)]
    assert len(fliers) == f
    assert len(shown) == min(f, outliers)
    assert not np.isnan(fliers[: len(shown)]).any()
    pool = list(peer["fliers"])
    for value in shown:  # each is one of them, and none is shown twice
        pool.remove(value)
    distance = np.maximum(got[0] - shown, shown - got[4])
    assert (distance > 0).all()
    assert (np.diff(distance) <= 0).all()
    whisker_inside = got[0] > got[1] or got[4] < got[3]
    if not whisker_inside:
        np.testing.assert_allclose(distance, beyond[: len(shown)], rtol=1e-12, atol=1e-12 * scale)


@settings(max_examples=150)
@given(SIZES, st.sampled_from(KINDS), st.integers(0, 999))
@example(4, "few levels", 1)
def test_whiskers_are_those_of_matplotlib(n: int, kind: str, seed: int) -> None:
    """To the last sample within 1.5 quartile ranges; never inside the box, where few samples lie far apart."""
    values = drawn(n, kind, seed)
    got, peer = box(values)[0], boxplot_stats(values)[0]
    np.testing.assert_allclose(got[[0, 4]], [peer["whislo"], peer["whishi"]], rtol=1e-12, atol=1e-12)
    assert (np.diff(got[:5]) >= 0).all()


@settings(max_examples=60)
@given(SIZES, st.sampled_from(KINDS), st.integers(0, 999))
def test_whiskers_reach_the_last_sample_within_one_and_a_half_quartile_ranges(n: int, kind: str, seed: int) -> None:
    """Of the numbers themselves, by masks; where such a sample lies beyond the quartile."""
    values = drawn(n, kind, seed)
    got = box(values)[0]
    low, high = np.percentile(values, [25, 75])
    slack = 1e-12 * np.abs(values).max()
    inside = values[(values >= low - 1.5 * (high - low) - slack) & (values <= high + 1.5 * (high - low) + slack)]
    if inside.min() <= low:
        assert got[0] == pytest.approx(inside.min(), abs=2 * slack)
    if inside.max() >= high:
        assert got[4] == pytest.approx(inside.max(), abs=2 * slack)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 40])
def test_boxes_of_equal_numbers_are_that_number_and_nothing_lies_beyond(n: int) -> None:
    for value in (0.0, 0.1, -1 / 3, 1e20):
        six, outliers, fliers = box(np.full(n, value))
        np.testing.assert_allclose(six, np.full(6, value), rtol=1e-15)
        assert outliers == 0
        assert np.isnan(fliers).all()


def test_where_the_two_tails_overlap_no_flier_is_shown_twice() -> None:
    """2·fliers > n: the lowest and the highest of the numbers are the same ones."""
    values = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 5.0, -7.0])
    for f in (1, 2, 3, 4, 6, 7, 8, 20):
        _, outliers, fliers = box(values, f)
        assert outliers == 2
        assert fliers[~np.isnan(fliers)].tolist() == [-7.0, 5.0][:f]
        assert len(fliers) == f
    # More beyond than within a tail: all seven of them, once each.
    values = np.concatenate([np.zeros(30), np.arange(1.0, 8.0)])
    for f in (5, 7, 19, 36, 37, 50):
        _, outliers, fliers = box(values, f)
        assert outliers == 7
        assert fliers[~np.isnan(fliers)].tolist() == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0][:f]


def test_boxes_are_by_class_of_decision_and_logit() -> None:
    """Classes of 1, 2, 3, 5 and 60 samples, among each other; each box against that class's numbers alone."""
    sizes = [1, 2, 3, 5, 60]
    y = torch.cat([torch.full((k,), c) for c, k in enumerate(sizes)])[torch.randperm(71)]
    model, cross = random_surrogate(71, 3), torch.from_numpy(np.random.default_rng(0).standard_t(2, (4, 71)))
    found, every = (
        summarize(model, cross, labels=y, neighbours=5, fliers=4, progress=False),
        attributions(model, cross).numpy(),
    )
    assert found.boxes.shape == (4, 3, 5, 6)
    assert found.fliers.shape == (4, 3, 5, 4)
    for j in range(4):
        for c in range(3):
            for t in range(5):
                values = every[j, c][y.numpy() == t]
                assert len(values) == sizes[t]
                six, outliers, fliers = box(values, 4)
                np.testing.assert_allclose(found.boxes[j, c, t], six, rtol=1e-12)
                assert int(found.outliers[j, c, t]) == outliers
                np.testing.assert_allclose(found.fliers[j, c, t], fliers, rtol=1e-12)
    parts = found.boxes[..., 5] * torch.tensor(sizes)
    near(parts.sum(-1), found.totals, 1e-12)  # means times sizes: the logit again


def test_labels_may_be_of_fewer_samples_than_outputs_or_more() -> None:
    """Boxes are by the training samples' labels, logits by the model's outputs: two different things."""
    model, cross = random_surrogate(12, 2), normal(3, 12)
    assert summarize(model, cross, labels=torch.arange(12) % 5, progress=False).boxes.shape == (3, 2, 5, 6)
    assert summarize(model, cross, labels=np.zeros(12, dtype=np.int64), progress=False).boxes.shape == (3, 2, 1, 6)
    assert summarize(model, cross, labels=torch.arange(12) % 5, classes=5, progress=False).boxes.shape[2] == 5


# Nearest, helpful and harmful.


@given(st.integers(1, 40), st.integers(0, 999), st.data())
def test_nearest_helpful_and_harmful_are_those_of_sorting(n: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    torch.manual_seed(seed)
    model, cross = random_surrogate(n, 3), normal(4, n)
    found, every = summarize(model, cross, neighbours=k, progress=False), attributions(model, cross)
    for got, keys in ((found.similar, cross), (found.helpful, every), (found.harmful, -every)):
        order = np.argsort(-keys.numpy(), axis=-1, kind="stable")[..., :k]
        assert torch.equal(got, torch.from_numpy(order))
    near(found.harm, every.gather(-1, found.harmful), 1e-13)
    near(found.help, every.gather(-1, found.helpful), 1e-13)
    near(found.similarity, cross.gather(-1, found.similar), 1e-13)


def test_among_equals_any_are_taken_but_none_twice() -> None:
    cross = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 1.0]], dtype=F64)
    found = summarize(plain(6), cross, neighbours=4, progress=False)
    assert sorted(found.similar[0].tolist())[-1] in (3, 5)
    assert len(set(found.similar[0].tolist())) == 4
    assert found.similarity[0].tolist() == [2.0, 2.0, 2.0, 1.0]
    assert found.help[0, 0].tolist() == [2.0, 2.0, 2.0, 1.0]
    assert found.harm[0, 0].tolist() == [0.0, 1.0, 1.0, 2.0]


def test_what_helps_most_is_not_what_is_nearest() -> None:
    """Helpful are those of large W κ, whatever κ is."""
    weights = torch.tensor([[0.1], [-3.0], [2.0]], dtype=F64)
    model = Surrogate(weights, torch.tensor([0.6], dtype=F64), 1.0, "weights", "newton", 1, 0.0, 0.0)
    found = summarize(model, torch.tensor([[0.9, 0.5, 0.4]], dtype=F64), neighbours=3, progress=False)
    assert found.similar[0].tolist() == [0, 1, 2]
    assert found.helpful[0, 0].tolist() == [2, 0, 1]
    near(found.help[0, 0], [1.0, 0.29, -1.3], 1e-12)
    assert found.harmful[0, 0].tolist() == [1, 0, 2]


# Asked in a wrong way.

SURROGATE, CROSS, FULL = random_surrogate(12, 3), normal(4, 12), torch.eye(12, dtype=F64).reshape(6, 2, 6, 2)
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (SURROGATE, CROSS.T, {}, r"cross has shape \(12, 4\); needed: .*the 12 training samples, \[m, 12\]: tg.compute"),
    (SURROGATE, CROSS[0], {}, r"cross has shape \(12,\)"),
    (SURROGATE, CROSS[:0], {}, r"cross has shape \(0, 12\)"),
    (SURROGATE, CROSS[:, None], {}, r"cross has shape \(4, 1, 12\)"),
    (SURROGATE, None, {}, "cross is a NoneType; needed: a Gram"),
    (nn.Linear(12, 3), CROSS, {}, "model is a Linear; needed: what tg.surrogate.fit, tg.regress.logistic or"),
    (ridge(FULL, torch.ones(6, 2).double(), reg=1.0), normal(4, 2, 6, 2), {},
     "the model has a full kernel, .*: fit with tg.trace_ntk, tg.pseudo_ntk"),
    (SURROGATE, CROSS, {"outputs": torch.zeros(4, 1)}, r"outputs has shape \(4, 1\), torch.float32; needed: whole .*4"),
    (SURROGATE, CROSS, {"outputs": torch.zeros(4).long()}, r"outputs has shape \(4,\)"),
    (SURROGATE, CROSS, {"outputs": torch.zeros(3, 2).long()}, r"outputs has shape \(3, 2\)"),
    (SURROGATE, CROSS, {"outputs": torch.full((4, 1), 3)}, "outputs goes from 3 to 3; needed: from 0 to 2"),
    (SURROGATE, CROSS, {"outputs": torch.full((4, 1), -1)}, "outputs goes from -1 to -1; needed: from 0"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "cross", "options", "message"), REFUSED, ids=[r[3][:40] for r in REFUSED])
def test_what_cannot_be_attributed_is_refused(model: Any, cross: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attributions(model, cross, **options)
    with pytest.raises(InputError, match=message):
        summarize(model, cross, progress=False, neighbours=1, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": torch.zeros(11).long()}, r"labels has shape \(11,\), .*; needed: a class for each of the 12"),
        ({"labels": torch.zeros(12)}, "torch.float32; needed: a class for each"),
        ({"labels": torch.arange(12) - 1}, "labels has classes from -1 to 10; needed: from 0"),
        ({"labels": torch.arange(12), "classes": 4}, "labels has classes from 0 to 11; needed: from 0 to 3"),
        ({"labels": 2 * (torch.arange(12) % 2)}, r"labels has no sample of class 1 \(of 3\), so there is no box"),
        ({"labels": torch.arange(12) % 2, "classes": 4}, r"labels has no sample of class 2, 3 \(of 4\)"),
        ({"neighbours": 0}, "neighbours=0; needed: a whole number from 1 to 12"),
        ({"neighbours": 13}, "neighbours=13; needed: a whole number from 1 to 12"),
        ({"neighbours": 2.5}, "neighbours=2.5; needed"),
        ({"neighbours": True}, "neighbours=True; needed"),
        ({"fliers": 0}, "fliers=0; needed: a whole number from 1"),
        ({"fliers": "all"}, "fliers='all'; needed"),
        ({"memory": 0}, "memory=0; needed: a positive number of bytes"),
        ({"memory": "much"}, "memory='much'; needed: a number of bytes"),
    ],
)
def test_a_summary_asked_for_in_a_wrong_way_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        summarize(SURROGATE, CROSS, progress=False, **options)


def test_a_gram_with_a_number_that_is_none_is_refused() -> None:
    """NaN is nobody's neighbour, and would be at the top of every list."""
    cross = CROSS.clone()
    cross[2, 5] = np.nan
    with pytest.raises(InputError, match=r"cross\[2, 5\] is nan"):
        summarize(SURROGATE, cross, progress=False)
