"""Surrogates against autograd, scipy and scikit-learn; Kendall's τ against scipy and its definition; faithfulness."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import tangency as tg
from tangency import DidNotConverge, InputError, TangencyWarning
from tangency.models import mlp
from tangency.surrogate import (
    MonotoneMap,
    Surrogate,
    default_reg,
    faithfulness,
    fit,
    kendall,
    levelled,
    log_odds,
    monotone,
)
from tangency.surrogate import faithful as faithful_room
from tangency.surrogate import model as model_room

F32, F64 = torch.float32, torch.float64
ANY = float("inf")


def near(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    got, want = (np.asarray(v, dtype=np.float64) for v in (got, want))
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), 1e-300)


def normal(*shape: int, seed: int | None = None) -> Tensor:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=F64, generator=generator)


def rbf(a: Tensor, b: Tensor, width: float = 1.5) -> Tensor:
    """By hand, from differences: symmetric to the last bit."""
    return torch.exp(-(a[:, None] - b[None]).square().sum(-1) / (2 * width**2))


class Problem:
    """Clouds of points that overlap, one per class; K and the Gram of new samples with them."""

    def __init__(self, classes: int, n: int = 60, m: int = 13, seed: int = 0) -> None:
        centres = normal(classes, 3, seed=seed)
        # Classes of different sizes, each with samples.
        sizes = torch.arange(1, classes + 1).double()
        self.y = torch.multinomial(sizes, n, True, generator=torch.Generator().manual_seed(seed + 1))
        self.y[:classes] = torch.arange(classes)
        self.x = centres[self.y] + 0.8 * normal(n, 3, seed=seed + 2)
        self.z = normal(m, 3, seed=seed + 3)
        self.K, self.cross = rbf(self.x, self.x), rbf(self.z, self.x)
        self.classes = classes


def objective(K: Tensor, targets: Tensor, w: Tensor, reg: float, theta: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_i w_i loss_i, and the penalty, as they are written down: [n, q] logits, q = 1 for two classes."""
    z = K @ theta + b
    if z.shape[1] == 1:
        z = torch.cat([torch.zeros_like(z), z], 1)
    losses = -(targets * torch.log_softmax(z, 1)).sum(1)
    return (w * losses).sum(), reg / 2 * theta.square().sum()


def free(found: Surrogate) -> tuple[Tensor, Tensor]:
    """The coefficients that the problem is posed in: of two classes, those of the one logit z = logit_1 − logit_0."""
    if found.classes == 2:
        return found.coefficients[:, 1:] - found.coefficients[:, :1], found.bias[1:] - found.bias[:1]
    return found.coefficients, found.bias


def slope(K: Tensor, targets: Tensor, w: Tensor, reg: float, theta: Tensor, b: Tensor) -> float:
    """The norm of the objective's gradient, by autograd."""
    theta, b = theta.clone().requires_grad_(), b.clone().requires_grad_()
    parts = torch.autograd.grad(sum(objective(K, targets, w, reg, theta, b)), [theta, b])
    return float(torch.cat([p.flatten() for p in parts]).norm())


def one_hot(y: Tensor) -> Tensor:
    return nn.functional.one_hot(y).double()


def balanced(y: Tensor) -> Tensor:
    counts = np.bincount(y.numpy())
    return torch.from_numpy(len(y) / (len(counts) * counts[y.numpy()]))


WEIGHTS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda y: None,
    "balanced": lambda y: "balanced",
    "given": lambda y: torch.rand(len(y), dtype=F64, generator=torch.Generator().manual_seed(9)) + 0.1,
    "some zero": lambda y: (torch.arange(len(y)) % 5 > 0).double(),
}


def numbers(weights: Any, y: Tensor) -> Tensor:
    """Weights as numbers, worked out here."""
    if weights is None:
        return torch.ones(len(y), dtype=F64)
    return balanced(y) if isinstance(weights, str) else weights


# Kendall's τ.


def by_pairs(a: np.ndarray, b: np.ndarray) -> float:
    """τ_b by its definition: every pair looked at."""
    with np.errstate(invalid="ignore"):
        s, t = (np.where(v[:, None] > v[None], 1, 0) - np.where(v[:, None] < v[None], 1, 0) for v in (a, b))
    upper = np.triu_indices(len(a), 1)
    s, t = s[upper], t[upper]
    scale = np.sqrt(float((s != 0).sum()) * float((t != 0).sum()))
    return float((s * t).sum() / scale) if scale else float("nan")


def same_tau(a: np.ndarray, b: np.ndarray) -> None:
    got = kendall(torch.from_numpy(a), torch.from_numpy(b))
    assert got.dtype == F64
    assert got.shape == ()
    assert float(got) == pytest.approx(scipy.stats.kendalltau(a, b).statistic, abs=1e-12, nan_ok=True)


def drawn(n: int, levels: int, kind: str, rng: np.random.Generator) -> np.ndarray:
    """n numbers on so many levels."""
    whole = rng.integers(0, levels, n)
    if kind == "int":
        return whole
    if kind == "small int":
        return (whole % 120).astype(np.int8)
    value = whole / 7 - 3
    if kind == "inf":
        value[rng.random(n) < 0.2] = np.inf
        value[rng.random(n) < 0.2] = -np.inf
    return value.astype(np.float32 if kind == "single" else np.float64)


KINDS = ["int", "small int", "double", "single", "inf"]


@settings(max_examples=120)
@given(
    st.integers(2, 2000), st.sampled_from([1, 2, 3, 10, 200, 10**12]), st.sampled_from([1, 2, 3, 10, 200, 10**12]),
    st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(0, 10**6),
)  # fmt: skip
@example(2, 1, 1, "int", "int", 0)
@example(2, 10**12, 10**12, "double", "double", 0)
@example(1024, 10**12, 10**12, "double", "double", 0)
@example(1025, 3, 10**12, "double", "double", 0)
def test_kendall_is_scipys_with_and_without_ties(n: int, p: int, q: int, left: str, right: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    same_tau(drawn(n, p, left, rng), drawn(n, q, right, rng))


@given(hnp.arrays(np.float64, (2, 25), elements=st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 1e-300, 2.0, np.inf])))
def test_kendall_counts_every_pair_as_defined(v: np.ndarray) -> None:
    """Zero and minus zero are equal, and so are two infinities of one sign."""
    assert float(kendall(v[0], v[1])) == pytest.approx(by_pairs(v[0], v[1]), abs=1e-13, nan_ok=True)


@given(st.permutations(range(12)), st.permutations(range(12)))
def test_without_ties_kendall_is_concordant_less_discordant_over_both(a: list[int], b: list[int]) -> None:
    """The formula of Engel et al."""
    signs = [np.sign((a[i] - a[j]) * (b[i] - b[j])) for i in range(12) for j in range(i)]
    alike, opposite = signs.count(1), signs.count(-1)
    assert float(kendall(torch.tensor(a), torch.tensor(b))) == pytest.approx((alike - opposite) / (alike + opposite))


def test_kendall_orders_whole_numbers_that_floats_cannot_tell_apart() -> None:
    a = 2**60 + torch.tensor([3, 1, 2, 0, 5])
    assert float(kendall(a, torch.tensor([3, 1, 2, 0, 5]))) == 1.0


@pytest.mark.parametrize("n", [2, 3, 64, 100])
def test_kendall_is_exactly_one_for_the_same_and_minus_one_for_the_reverse(n: int) -> None:
    a = normal(n)
    assert float(kendall(a, a)) == 1.0
    assert float(kendall(a, -a)) == -1.0


def test_kendall_of_a_constant_is_nan() -> None:
    for n in (2, 3, 17):
        for a, b in ((torch.ones(n), torch.arange(n)), (torch.arange(n), torch.ones(n)), (torch.ones(n),) * 2):
            assert bool(kendall(a, b).isnan())
    assert bool(kendall(torch.full((5,), torch.inf), torch.arange(5)).isnan())


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (2, 1, 3), (0,)])
@pytest.mark.parametrize("n", [2, 7, 40])
def test_leading_dimensions_of_kendall_are_a_batch(shape: tuple[int, ...], n: int) -> None:
    a, b = torch.randint(6, (*shape, n)), normal(*shape, n).round()
    got = kendall(a, b)
    assert got.shape == shape
    want = [by_pairs(u, v) for u, v in zip(a.reshape(-1, n).numpy(), b.reshape(-1, n).numpy(), strict=True)]
    np.testing.assert_allclose(got.flatten(), want, atol=1e-13)


def test_kendall_takes_rows_that_do_not_lie_in_sequence() -> None:
    a, b = normal(9, 5), normal(9, 5)
    want = [by_pairs(a[:, j].numpy(), b[:, j].numpy()) for j in range(5)]
    near(kendall(a.T, b.T), want, 1e-13)
    near(kendall(a[:, 0].expand(3, 9), b[:, :3].T), [by_pairs(a[:, 0].numpy(), b[:, j].numpy()) for j in range(3)])


@given(st.integers(2, 60), st.integers(1, 20), st.integers(0, 999))
def test_kendall_sees_order_alone(n: int, levels: int, seed: int) -> None:
    """Increasing maps change nothing, a decreasing one the sign; neither do order of the pairs, or of a and b."""
    rng = np.random.default_rng(seed)
    a, b = (torch.from_numpy(rng.integers(-levels, levels + 1, n) / 4) for _ in range(2))
    want = float(kendall(a, b))
    order = torch.from_numpy(rng.permutation(n))
    # Maps without rounding: what rounds may part what is equal, as vectorised functions do.
    for u, v, sign in (
        (8 * a + 3, b, 1), (a, b * b * b, 1), (torch.where(a > 0, 16 * a, a), b, 1), (a, (4 * b).long(), 1),
        (a, b.float(), 1), (-a, b, -1), (a, -b, -1), (-a, -b, 1), (b, a, 1), (a[order], b[order], 1),
        (a.flip(0), b.flip(0), 1),
    ):  # fmt: skip
        assert float(kendall(u, v)) == pytest.approx(sign * want, abs=1e-14, nan_ok=True)


def test_kendall_of_a_hundred_thousand_points_is_scipys() -> None:
    """By pairs it would take 10¹⁰ of them."""
    rng = np.random.default_rng(0)
    for a, b in (
        (rng.normal(size=10**5), rng.normal(size=10**5)),
        (rng.integers(0, 9, 10**5), rng.integers(0, 1000, 10**5)),
    ):
        assert float(kendall(a, b)) == pytest.approx(scipy.stats.kendalltau(a, b).statistic, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(4), torch.zeros(5), r"a has shape \(4,\), b \(5,\); needed: two of the same shape"),
        (torch.zeros(2, 4), torch.zeros(4), r"a has shape \(2, 4\), b \(4,\)"),
        (torch.zeros(1), torch.zeros(1), "two numbers or more"),
        (torch.zeros(3, 1), torch.zeros(3, 1), "two numbers or more"),
        (torch.tensor(1.0), torch.tensor(1.0), "two numbers or more"),
        (torch.tensor([1.0, 2.0, np.nan]), torch.zeros(3), r"a\[2\] is NaN; needed: numbers that can be ordered"),
        (torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [np.nan, 0.0]]), r"b\[1, 0\] is NaN"),
    ],
)
def test_kendall_refuses_what_has_no_order(a: Tensor, b: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        kendall(a, b)


# Near ties.


def grouped(v: np.ndarray, ties: float) -> np.ndarray:
    """Which group each number is in, one after the other: the first begins one, and so does each that is too far."""
    finite = np.abs(v[np.isfinite(v)])
    width = ties * (finite.max() if len(finite) else 0.0)
    groups, at, begin = np.zeros(len(v), dtype=int), -1, None
    for i in np.argsort(v, kind="stable"):
        if begin is None or v[i] > begin + width:
            at, begin = at + 1, v[i]
        groups[i] = at
    return groups


NUMBERS = st.one_of(st.floats(-3, 3), st.sampled_from([-np.inf, np.inf, 0.0, 1.0, 1 + 1e-9, 1 + 2e-6]))


@settings(max_examples=150)
@given(hnp.arrays(np.float64, st.integers(1, 40), elements=NUMBERS), st.sampled_from([1e-12, 1e-6, 0.01, 0.2, 0.9]))
def test_numbers_that_are_nearly_equal_are_made_equal_group_by_group(v: np.ndarray, ties: float) -> None:
    got, groups = levelled(v, ties).numpy(), grouped(v, ties)
    for k in range(groups.max() + 1):
        inside = got[groups == k]
        assert (inside == inside[0]).all()
        assert inside[0] in v[groups == k]
    firsts = np.array([got[groups == k][0] for k in range(groups.max() + 1)])
    assert (firsts[1:] > firsts[:-1]).all()


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("levels", [2, 7, 60])
def test_kendall_with_near_ties_is_scipys_of_rounded_numbers(levels: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(levels)
    a, b = rng.integers(0, levels, 300), rng.integers(0, levels, 300)
    b = np.where(rng.random(300) < 0.5, a, b)
    noise = 20 * torch.finfo(dtype).eps
    u, v = (torch.from_numpy((w + 1.0) * (1 + noise * rng.uniform(-1, 1, 300))).to(dtype) for w in (a, b))
    want = scipy.stats.kendalltau(u.numpy().round(2), v.numpy().round(2)).statistic
    assert float(kendall(u, v, ties=1e-3)) == pytest.approx(want, abs=1e-12)
    assert abs(float(kendall(u, v)) - want) > 1e-3  # so it matters
    both = kendall(torch.stack([u, v.flip(0)]), torch.stack([v, u]), ties=1e-3)  # a batch, each row by its own scale
    assert float(both[0]) == pytest.approx(want, abs=1e-12)


def test_numbers_in_a_dense_row_do_not_all_become_one() -> None:
    """Each is near the next: groups are never wider than the tolerance."""
    v = torch.linspace(0, 1, 5000, dtype=F64)
    got = levelled(v[torch.randperm(5000)], 1e-2)
    assert 90 <= len(got.unique()) <= 100
    assert float(kendall(v, v, ties=1e-2)) == 1.0
    assert float((levelled(v, 1e-2) - v).abs().max()) <= 1e-2


@pytest.mark.parametrize("ties", [-1e-3, 1.0, np.nan, "few"])
def test_a_tolerance_for_ties_that_cannot_be_is_refused(ties: Any) -> None:
    with pytest.raises(InputError, match="ties=.*; needed: a part of the largest number"):
        kendall(torch.arange(4), torch.arange(4), ties=ties)


# The surrogate is the optimum.


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("reg", [None, 1e-3, 30.0])
@pytest.mark.every(5)
def test_the_gradient_vanishes_at_the_answer(classes: int, weights: str, reg: float | None) -> None:
    """By autograd, on the objective as written; and it is what the answer says of itself."""
    data = Problem(classes)
    given = WEIGHTS[weights](data.y)
    found = fit(data.K, data.y, reg=reg, sample_weights=given, tol=1e-8, progress=False)
    assert found.reg == (1e-4 * 60 if reg is None else reg)  # the diagonal is 1
    w, targets = numbers(given, data.y), one_hot(data.y)
    theta, b = free(found)
    zero = torch.zeros_like(theta), torch.zeros_like(b)
    begin = slope(data.K, targets, w, found.reg, *zero)
    relative = slope(data.K, targets, w, found.reg, theta, b) / begin
    assert relative <= min(1e-8, 1.001 * found.gradient + 1e-13)
    loss, penalty = objective(data.K, targets, w, found.reg, theta, b)
    assert found.loss == pytest.approx(float(loss), rel=1e-12)
    # The check can fail: what is a little off has a gradient, and costs more.
    for off_theta, off_b in ((1.01 * theta, b), (theta, b + 0.01 * torch.arange(len(b), 0, -1))):
        assert slope(data.K, targets, w, found.reg, off_theta, off_b) > 1e-5 * begin
        assert sum(objective(data.K, targets, w, found.reg, off_theta, off_b)) > loss + penalty


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("weights", ["none", "balanced", "given"])
@pytest.mark.parametrize("reg", [0.006, 1.0])
def test_probabilities_are_those_of_scikit_learns_logistic_regression_on_rows_of_k(
    classes: int, weights: str, reg: float
) -> None:
    data = Problem(classes)
    given = WEIGHTS[weights](data.y)
    peer = LogisticRegression(C=1 / reg, solver="newton-cholesky", tol=1e-11, max_iter=1000)
    peer.set_params(class_weight="balanced" if given == "balanced" else None) if weights != "given" else None
    peer.fit(data.K.numpy(), data.y.numpy(), sample_weight=given.numpy() if weights == "given" else None)
    found = fit(data.K, data.y, reg=reg, sample_weights=given, progress=False)
    got = found.probabilities(data.cross)
    assert np.abs(got.numpy() - peer.predict_proba(data.cross.numpy())).max() < 1e-5
    assert (found.predict(data.cross).numpy() == peer.predict(data.cross.numpy())).all()
    near(got, torch.softmax(found.logits(data.cross), 1), 1e-14)


@pytest.mark.parametrize("classes", [2, 4])
def test_probabilities_are_those_of_scipys_minimiser(classes: int) -> None:
    data, reg = Problem(classes, n=30), 0.05
    targets, w, q = one_hot(data.y), torch.ones(30, dtype=F64), 1 if classes == 2 else classes

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        both = torch.from_numpy(flat).reshape(31, q).requires_grad_()
        total = sum(objective(data.K, targets, w, reg, both[:30], both[30]))
        return float(total.detach()), torch.autograd.grad(total, both)[0].flatten().numpy()

    options = {"maxiter": 10_000, "gtol": 1e-9}
    peer = torch.from_numpy(scipy.optimize.minimize(value, np.zeros(31 * q), jac=True, options=options).x)
    z = data.cross @ peer.reshape(31, q)[:30] + peer.reshape(31, q)[30]
    want = torch.softmax(z if q > 1 else torch.cat([torch.zeros_like(z), z], 1), 1)
    got = fit(data.K, data.y, reg=reg, progress=False).probabilities(data.cross)
    assert float((got - want).abs().max()) < 1e-5


def test_logits_are_those_of_the_formula() -> None:
    """kGLM(x) = W κ(x, X) + b, entry by entry; two classes have opposite rows."""
    for classes in (2, 3):
        data = Problem(classes)
        found = fit(data.K, data.y, progress=False)
        assert found.classes == classes
        assert found.coefficients.shape == (60, classes)
        want = [
            [sum(float(found.coefficients[i, c] * data.cross[j, i]) for i in range(60)) + float(found.bias[c])
             for c in range(classes)] for j in range(len(data.z))
        ]  # fmt: skip
        near(found.logits(data.cross), want, 1e-12)
        assert float(found.coefficients.sum(1).abs().max()) < 1e-12 * float(found.coefficients.abs().max()) * 10
        assert abs(float(found.bias.sum())) < 1e-12
    assert f"Surrogate(60 samples, 3 classes, reg 0.006 on weights, newton: {found.steps} steps" in repr(found)


def test_classes_may_be_given_as_probabilities() -> None:
    """One-hot ones are the classes; others are the optimum of the cross-entropy."""
    for classes in (2, 3):
        data = Problem(classes)
        hard = fit(data.K, data.y, progress=False)
        near(fit(data.K, one_hot(data.y), progress=False).coefficients, hard.coefficients, 1e-12)
        soft = torch.softmax(normal(60, classes), 1)
        found = fit(data.K, soft, reg=0.1, tol=1e-9, progress=False)
        theta, b = free(found)
        ones, zero = torch.ones(60, dtype=F64), (torch.zeros_like(theta), torch.zeros_like(b))
        assert slope(data.K, soft, ones, 0.1, theta, b) < 1e-8 * slope(data.K, soft, ones, 0.1, *zero)


def test_arrays_lists_and_tensors_fit_alike() -> None:
    data = Problem(3)
    want = fit(data.K, data.y, progress=False).coefficients
    gram = tg.gram.gram.DenseGram(data.K, symmetric=True)
    for K, y in ((data.K.numpy(), data.y.numpy()), (gram, data.y.int()), (data.K, data.y.tolist()), (gram, data.y)):
        assert torch.equal(fit(K, y, progress=False).coefficients, want)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("weights", ["none", "given", "balanced"])
def test_the_kernels_norm_as_penalty_is_kernel_logistic_regression(classes: int, weights: str) -> None:
    data = Problem(classes)
    given = WEIGHTS[weights](data.y)
    w = numbers(given, data.y)
    found = fit(data.K, data.y, reg=0.2, penalty="norm", sample_weights=given, tol=1e-9, progress=False)
    peer = tg.regress.logistic(data.K, data.y, reg=0.2, bias=True, sample_weights=w)
    assert (found.penalty, found.solver, found.reg) == ("norm", "newton", 0.2)
    near(found.probabilities(data.cross), peer.probabilities(data.cross), 1e-8)
    assert found.loss == pytest.approx(peer.loss, rel=1e-8)
    z = found.logits(data.cross)
    near(z if classes > 2 else z[:, 1] - z[:, 0], peer.logits(data.cross), 1e-7)
    # And scikit-learn's on features whose products are K.
    values, vectors = np.linalg.eigh(data.K.numpy())
    keep = values > 1e-12
    root = np.sqrt(values[keep])
    phi, phi_z = vectors[:, keep] * root, data.cross.numpy() @ (vectors[:, keep] / root)
    other = LogisticRegression(C=1 / 0.2, tol=1e-11, max_iter=100_000).fit(phi, data.y.numpy(), sample_weight=w.numpy())
    assert np.abs(found.probabilities(data.cross).numpy() - other.predict_proba(phi_z)).max() < 1e-5


@pytest.mark.parametrize("penalty", ["weights", "norm"])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 7.0, 1e6])
def test_by_default_a_multiple_of_k_has_the_same_predictions(penalty: str, scale: float) -> None:
    for classes in (2, 3):
        data = Problem(classes)
        options = {"penalty": penalty, "tol": 1e-9, "progress": False}
        want, got = fit(data.K, data.y, **options), fit(scale * data.K, data.y, **options)
        near(got.probabilities(scale * data.cross), want.probabilities(data.cross), 1e-6)
        near(got.bias, want.bias, 1e-5)
        assert got.reg == pytest.approx(want.reg * (scale**2 if penalty == "weights" else scale), rel=1e-12)


def test_the_default_reg_is_a_ten_thousandth_per_sample_at_unit_diagonal() -> None:
    K = Problem(3).K
    gram = tg.gram.gram.DenseGram(5 * K, symmetric=True)
    assert default_reg(gram) == pytest.approx(1e-4 * 60 * 25)
    assert default_reg(gram, "norm") == pytest.approx(1e-4 * 60 * 5)
    assert default_reg(5 * K) == pytest.approx(1e-4 * 60 * 25)  # type: ignore[arg-type]


@settings(max_examples=12)
@given(st.permutations(range(20)), st.sampled_from([2, 3]), st.sampled_from(["weights", "norm"]))
def test_samples_in_another_order_have_their_weights_in_that_order(order: list[int], c: int, penalty: str) -> None:
    data = Problem(c, n=20)
    w = torch.linspace(0.5, 2, 20, dtype=F64)
    p = torch.tensor(order)
    options = {"penalty": penalty, "reg": 0.1, "tol": 1e-10, "progress": False}
    want = fit(data.K, data.y, sample_weights=w, **options)
    got = fit(data.K[p][:, p], data.y[p], sample_weights=w[p], **options)
    near(got.coefficients, want.coefficients[p], 1e-7)
    near(got.bias, want.bias, 1e-7)


@settings(max_examples=8)
@given(st.permutations(range(4)))
def test_classes_in_another_order_have_their_weights_in_that_order(order: list[int]) -> None:
    data = Problem(4, n=30)
    p = torch.tensor(order)
    options = {"reg": 0.1, "tol": 1e-10, "progress": False}
    want, got = fit(data.K, data.y, **options), fit(data.K, p[data.y], **options)
    near(got.coefficients[:, p], want.coefficients, 1e-7)
    near(got.bias[p], want.bias, 1e-7)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("reg", [1e-2, 1.0])
@pytest.mark.every(3)
def test_how_many_eigenvectors_lead_does_not_change_the_answer(classes: int, reg: float) -> None:
    """None, few, half, all, more than there are; of small matrices, too."""
    for n in (12, 40):
        data = Problem(classes, n=n)
        want = fit(data.K, data.y, reg=reg, tol=1e-10, progress=False)
        for rank in (0, 3, n // 2, 10 * n):
            got = fit(data.K, data.y, reg=reg, rank=rank, tol=1e-10, progress=False)
            near(got.coefficients, want.coefficients, 1e-6)
            near(got.probabilities(data.cross), want.probabilities(data.cross), 1e-8)


def test_a_gram_of_low_rank_and_an_indefinite_one_have_an_optimum_too() -> None:
    """The penalty on W makes the problem strictly convex in it, whatever K is."""
    data = Problem(3)
    ones, targets = torch.ones(60, dtype=F64), one_hot(data.y)
    sign = normal(60, 60)
    for K in (data.x @ data.x.T, (sign + sign.T) / 8, torch.ones(60, 60, dtype=F64), torch.eye(60, dtype=F64)):
        for rank in (0, 5, 60):
            found = fit(K, data.y, reg=0.1, rank=rank, progress=False)
            zero = torch.zeros_like(found.coefficients), torch.zeros_like(found.bias)
            begin = slope(K, targets, ones, 0.1, *zero)
            assert slope(K, targets, ones, 0.1, found.coefficients, found.bias) <= 1e-6 * begin


def grams(tmp_path: Path, tile: int) -> dict[str, tuple[Any, Any, Any, Any]]:
    """A kernel's K and cross, in memory and on disk, and the same of its cosine; 37 and 5 samples."""
    model, x, z = mlp([3, 8, 3], nn.Tanh).double(), normal(37, 3), normal(5, 3)
    k = tg.trace_ntk(model)
    own = tg.compute(k, x, store=str(tmp_path / "own"), tile=tile, progress=False)
    cross = tg.compute(k, z, x, store=str(tmp_path / "cross"), tile=tile, progress=False)
    norms = k.diag(z), k.diag(x)
    dense, far = k(x).detach(), k(z, x).detach()
    cosine = dense / (norms[1][:, None] * norms[1]).sqrt()
    return {
        "kernel": (dense, far, own, cross),
        "cosine": (cosine, far / (norms[0][:, None] * norms[1]).sqrt(), own.cosine(), cross.cosine(*norms)),
    }


@pytest.mark.parametrize("which", ["kernel", "cosine"])
@pytest.mark.parametrize("rank", [0, 512])
@pytest.mark.every(3)
def test_grams_on_disk_and_in_memory_fit_alike(which: str, rank: int, tmp_path: Path) -> None:
    dense, far, own, cross = grams(tmp_path, 20)[which]
    assert not own._in_memory
    y = torch.arange(37) % 3
    options = {"rank": rank, "reg": 100 * default_reg(own), "tol": 1e-9, "progress": False}
    want, got = fit(dense, y, **options), fit(own, y, **options)
    near(got.coefficients, want.coefficients, 1e-6)
    near(got.logits(cross), want.logits(far), 1e-8)
    assert default_reg(own) == pytest.approx(default_reg(dense), rel=1e-12)  # type: ignore[arg-type]
    norm = {"penalty": "norm", "reg": 0.5, "tol": 1e-9, "progress": False}
    near(fit(own, y, **norm).probabilities(cross), fit(dense, y, **norm).probabilities(far), 1e-7)


def test_a_gram_in_single_precision_is_fitted_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as from the widened Gram, whether or not it is widened beforehand."""
    data = Problem(3)
    K, cross = data.K.float(), data.cross.float()
    want = fit(K.double(), data.y, tol=1e-9, progress=False)
    for limit in (model_room.WIDENED_ON_CPU, 0):
        monkeypatch.setattr(model_room, "WIDENED_ON_CPU", limit)
        got = fit(K, data.y, tol=1e-9, progress=False)
        assert got.coefficients.dtype == F64
        near(got.coefficients, want.coefficients, 1e-7)
        near(got.logits(cross), want.logits(cross.double()), 1e-9)


# Stochastic descent.


def excess(K: Tensor, y: Tensor, w: Tensor, found: Surrogate, best: Surrogate) -> float:
    """How much of the way from W = 0 to the optimum is left, in the objective."""
    start = torch.zeros_like(free(best)[0]), torch.zeros_like(free(best)[1])
    low, got, high = (float(sum(objective(K, one_hot(y), w, best.reg, *at))) for at in (free(best), free(found), start))
    assert low <= got * (1 + 1e-9)
    return (got - low) / (high - low)


@pytest.mark.parametrize(("classes", "scale"), [(2, 1.0), (4, 1e-2), (2, 1e3)])
@pytest.mark.every(3)
def test_stochastic_descent_comes_near_the_optimum(classes: int, scale: float) -> None:
    """Whatever the scale of the kernel, since its default reg goes with that."""
    data = Problem(classes, n=200)
    K = scale * data.K
    options = {"reg": 10 * default_reg(K), "progress": False}  # type: ignore[arg-type]
    best, found = fit(K, data.y, **options), fit(K, data.y, solver="sgd", **options)
    assert found.solver == "sgd"
    assert found.steps > 0
    assert excess(K, data.y, torch.ones(200, dtype=F64), found, best) < 0.1
    near(found.probabilities(data.K[::5] * scale), best.probabilities(data.K[::5] * scale), 0.2)


def test_stochastic_descent_that_runs_out_of_epochs_while_the_loss_still_falls_says_so() -> None:
    """Digits by the cosine of their pixels, with all defaults: near the optimum, or DidNotConverge."""
    train = tg.datasets.digits()[0].select(slice(0, 300))
    x = nn.functional.normalize(train.x.flatten(1).double())
    K = x @ x.T
    best = fit(K, train.y, progress=False)
    try:
        found = fit(K, train.y, solver="sgd", progress=False)
    except DidNotConverge:
        return
    assert excess(K, train.y, torch.ones(300, dtype=F64), found, best) < 0.1


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_stochastic_descent_finds_the_bias_where_there_is_nothing_else_to_find(scale: float) -> None:
    """Rows of K that sum to zero and say nothing of the class: all that is left are the frequencies of the classes."""
    data = Problem(3, n=96)
    data.y = torch.tensor([0] * 60 + [1] * 24 + [2] * 12)
    centred = torch.eye(96, dtype=F64) - 1 / 96
    K = scale * centred @ data.K @ centred
    K = (K + K.T) / 2
    options = {"reg": 1e4 * default_reg(K), "progress": False}  # type: ignore[arg-type]
    want = torch.tensor([60.0, 24.0, 12.0], dtype=F64).log()
    near(fit(K, data.y, **options).bias, want - want.mean(), 0.01)
    found = fit(K, data.y, solver="sgd", **options)
    near(found.bias - found.bias.mean(), want - want.mean(), 0.1)


@pytest.mark.parametrize("factor", [1e-2, 1.0, 100.0])
def test_stochastic_descent_does_not_mind_the_scale_of_the_weights(factor: float) -> None:
    """Weights and reg both times a constant: the same optimum."""
    data, reg = Problem(3, n=64), 1.0
    w = torch.full((64,), factor, dtype=F64)
    best = fit(data.K, data.y, reg=factor * reg, sample_weights=w, progress=False)
    found = fit(data.K, data.y, reg=factor * reg, sample_weights=w, solver="sgd", max_steps=40, progress=False)
    assert excess(data.K, data.y, w, found, best) < 0.1


@dataclass(frozen=True, eq=False)
class Counted(tg.Gram):
    """As if it lay on disk, in square tiles; counts how often one is read."""

    value: Tensor
    tile: int
    reads: list[int]

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def _same_samples(self) -> bool:
        return True

    def tiles(self, wanted: Any = None) -> Iterator[tuple[slice, slice, Tensor]]:
        cuts = [slice(k, min(k + self.tile, len(self.value))) for k in range(0, len(self.value), self.tile)]
        for rows in cuts:
            for columns in cuts:
                if wanted is None or wanted(rows, columns):
                    self.reads.append(1)
                    yield rows, columns, self.value[rows, columns]


@pytest.mark.parametrize("ordered", [False, True])
def test_stochastic_descent_comes_near_the_optimum_from_disk_and_reads_each_tile_once_an_epoch(ordered: bool) -> None:
    """Also where the samples lie sorted by class, as files often have them."""
    data = Problem(3, n=128)
    order = data.y.argsort(stable=True) if ordered else torch.arange(128)
    K, y, reads = data.K[order][:, order], data.y[order], []
    own = Counted(K, 50, reads)
    reg = 10 * default_reg(own)
    best = fit(K, y, reg=reg, progress=False)
    found = fit(own, y, reg=reg, solver="sgd", progress=False)
    assert excess(K, y, torch.ones(128, dtype=F64), found, best) < 0.15
    reads.clear()
    fit(own, y, reg=reg, solver="sgd", max_steps=10, tol=ANY, progress=False)
    assert len(reads) <= 1 + 9 * (10 + 5)  # nine tiles; some passes to prepare and to finish


def test_stochastic_descent_from_a_store_is_that_from_its_numbers(tmp_path: Path) -> None:
    data = Problem(3, n=40)
    kernel = tg.trace_ntk(mlp([3, 16, 3], nn.Tanh).double())
    own = tg.compute(kernel, data.x, store=str(tmp_path), tile=20, progress=False).cosine()
    assert not own._in_memory
    options = {"reg": 10 * default_reg(own), "solver": "sgd", "max_steps": 3, "tol": ANY, "progress": False}
    near(
        fit(own, data.y, **options).coefficients,
        fit(Counted(own.dense(), 20, []), data.y, **options).coefficients,
        1e-9,
    )


@pytest.mark.parametrize("classes", [2, 3])
def test_stochastic_descent_says_how_far_it_came(classes: int) -> None:
    """Its gradient and loss are those of what it returns, by autograd."""
    data, ones = Problem(classes), torch.ones(60, dtype=F64)
    found = fit(data.K, data.y, reg=0.5, solver="sgd", max_steps=4, tol=ANY, progress=False)
    (theta, b), targets = free(found), one_hot(data.y)
    begin = slope(data.K, targets, ones, 0.5, torch.zeros_like(theta), torch.zeros_like(b))
    assert found.gradient == pytest.approx(slope(data.K, targets, ones, 0.5, theta, b) / begin, rel=1e-6)
    assert found.loss == pytest.approx(float(objective(data.K, targets, ones, 0.5, theta, b)[0]), rel=1e-12)
    with pytest.raises(DidNotConverge, match="sgd reached the relative gradient") as caught:
        fit(data.K, data.y, reg=0.5, solver="sgd", tol=1e-12, max_steps=2, progress=False)
    assert isinstance(caught.value.solution, Surrogate)


def test_stochastic_descent_depends_on_its_seed_alone() -> None:
    data = Problem(3, n=600)
    state = torch.get_rng_state()
    first, again, other = (
        fit(data.K, data.y, reg=5.0, solver="sgd", max_steps=4, tol=ANY, seed=seed, progress=False).coefficients
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


# Where the objective is flat: separated classes and a small reg.


def newton(phi: np.ndarray, aims: np.ndarray, reg: float) -> np.ndarray:
    """Logits [n, q] of argmin Σ loss(φθ + b) + reg/2·‖θ‖², with the whole Hessian and no difference from one taken."""
    n, q = aims.shape
    phi, ridge = np.hstack([phi, np.ones((n, 1))]), np.full(phi.shape[1] + 1, reg)
    ridge[-1] = 0
    theta, before = np.zeros((phi.shape[1], q)), np.inf

    def cost(t: np.ndarray) -> float:
        z = phi @ t
        others = -2 * aims * z + z if q == 1 else z - (aims * z).sum(1, keepdims=True)
        inside = np.exp(others) if q == 1 else (np.exp(others) * (1 - aims)).sum(1)
        return float(np.log1p(np.minimum(inside, 1e300)).sum() + (ridge[:, None] * t**2).sum() / 2)

    for _ in range(200):
        z = phi @ theta
        p = scipy.special.expit(z) if q == 1 else scipy.special.softmax(z, 1)
        rest = scipy.special.expit(-z) if q == 1 else np.stack([np.delete(p, c, 1).sum(1) for c in range(q)], 1)
        slope = phi.T @ (p * (1 - aims) - aims * rest) + ridge[:, None] * theta
        bend = -p[:, :, None] * p[:, None]
        bend[:, np.arange(q), np.arange(q)] = p * rest
        hessian = np.einsum("ni,ncd,nj->icjd", phi, bend, phi, optimize=True).reshape(slope.size, -1) + np.diag(
            ridge.repeat(q)
        )
        scale = 1 / np.sqrt(np.maximum(hessian.diagonal(), 1e-280))
        step = np.linalg.lstsq(hessian * scale * scale[:, None], scale * slope.ravel(), rcond=1e-17)[0]
        step = -(scale * step).reshape(theta.shape)
        step = step if q == 1 else step - step.mean(1, keepdims=True)
        rate, value = 1.0, cost(theta)
        while cost(theta + rate * step) > value * (1 + 1e-15) + 1e-4 * rate * (slope * step).sum() and rate > 1e-12:
            rate /= 2
        length = np.linalg.norm(phi @ step) / np.linalg.norm(phi @ (theta + step))
        if length < 1e-7 and length > before / 2:
            return phi @ theta
        theta, before = theta + rate * step, min(length, before)
    raise AssertionError("the reference did not converge")


def separated(classes: int, kernel: str) -> tuple[Tensor, Tensor]:
    y = torch.arange(21) % classes
    x = 4 * normal(classes, 3, seed=classes)[y] + 0.5 * normal(21, 3, seed=7)
    return rbf(x, x) if kernel == "rbf" else x @ x.T, y


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e-6, 1e-8])
@pytest.mark.every(3)
def test_separated_classes_are_fitted_to_the_optimum_however_small_reg_is(
    classes: int, kernel: str, factor: float
) -> None:
    """A gradient of 1e-6 of that at zero left the logits at 0.5 of their size, without a word."""
    K, y = separated(classes, kernel)
    reg = factor * default_reg(K)
    aims = one_hot(y).numpy()
    want = newton(K.numpy(), aims[:, 1:] if classes == 2 else aims, reg)
    found = fit(K, y, reg=reg, progress=False)
    got = found.logits(K)
    near(got[:, 1:] - got[:, :1] if classes == 2 else got, want, 1.05e-6)
    assert found.distance <= 1e-6


@pytest.mark.parametrize("penalty", ["weights", "norm"])
def test_what_stops_short_on_a_flat_objective_says_how_far_it_is(penalty: str) -> None:
    K, y = separated(3, "rbf")
    with pytest.raises(DidNotConverge, match=r"the optimum is still about \d.*of the answer away .*small") as e:
        fit(K, y, reg=1e-12, penalty=penalty, tol=1e-4, max_steps=13, progress=False)
    best = fit(K, y, reg=1e-12, penalty=penalty, progress=False)
    off = (e.value.solution.logits(K) - best.logits(K)).norm() / best.logits(K).norm()
    assert float(off) > 0.1 and e.value.solution.gradient <= 1e-4 < e.value.solution.distance  # noqa: PT018


def test_the_distance_is_that_to_the_optimum() -> None:
    """What is said of an answer that is not exact, against the exact one."""
    data = Problem(3)
    best = fit(data.K, data.y, tol=1e-10, progress=False)
    for tol in (1e-1, 1e-2, 1e-3):
        found = fit(data.K, data.y, tol=tol, progress=False)
        off = float((found.logits(data.K) - best.logits(data.K)).norm() / best.logits(data.K).norm())
        assert off <= 2 * found.distance <= 2 * tol
    assert fit(data.K, data.y, solver="sgd", tol=ANY, max_steps=3, progress=False).distance is None


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_a_kernel_that_tells_nothing_leaves_the_bias(constant: float) -> None:
    y = torch.arange(30) % 4 % 3
    found = fit(torch.full((30, 30), constant, dtype=F64), y, reg=0.5, progress=False)
    near(found.probabilities(torch.full((1, 30), constant, dtype=F64))[0], torch.bincount(y) / 30, 1e-6)


@pytest.mark.parametrize(
    ("u", "v", "message"),
    [
        ([0.0, np.nan, 2.0], [1.0, 2.0, 3.0], r"u\[1\] is nan"), ([0.0, 1.0], [1.0, np.inf], r"v\[1\] is inf"),
        ([0.0, 1.0, 2.0], [1.0, 2.0], r"u has shape \(3,\), v \(2,\)"),
    ],
)  # fmt: skip
def test_a_map_of_what_is_no_number_is_refused(u: list[float], v: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        monotone(torch.tensor(u), torch.tensor(v))


# Not converged, and asked in a wrong way.


@pytest.mark.parametrize("penalty", ["weights", "norm"])
def test_what_was_not_reached_in_time_is_raised_with_what_was_found(penalty: str) -> None:
    data = Problem(3)
    with pytest.raises(DidNotConverge, match=r"in 1 steps; asked for: 1.0e-06.*reg=.*max_steps.*tol") as caught:
        fit(data.K, data.y, penalty=penalty, max_steps=1, progress=False)
    found = caught.value.solution
    assert isinstance(found, Surrogate)
    assert found.steps == 1
    assert 1e-6 < found.gradient < 1
    assert found.penalty == penalty
    near(found.probabilities(data.cross).sum(1), np.ones(len(data.z)), 1e-12)
    if penalty == "weights":  # whose gradient is that of the objective in W and b
        ones, targets = torch.ones(60, dtype=F64), one_hot(data.y)
        begin = slope(data.K, targets, ones, found.reg, torch.zeros(60, 3).double(), torch.zeros(3).double())
        here = slope(data.K, targets, ones, found.reg, found.coefficients, found.bias)
        assert found.gradient == pytest.approx(here / begin, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps=0"), ({"max_steps": -1}, "max_steps=-1"), ({"tol": 0.0}, "tol=0"),
        ({"tol": -1.0, "max_steps": 2}, "tol=-1"), ({"tol": np.nan, "max_steps": 2}, "tol=nan"),
    ],
)  # fmt: skip
def test_a_tolerance_or_number_of_steps_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    """And not replaced by another: tol=0 is not 1e-6."""
    data = Problem(3)
    with pytest.raises(InputError, match=message):
        fit(data.K, data.y, progress=False, **options)


def test_a_class_whose_samples_all_have_weight_zero_is_refused_as_empty() -> None:
    """Its bias would go to minus infinity: there is no optimum."""
    data = Problem(3)
    with pytest.raises(InputError, match="class 1"):
        fit(data.K, data.y, sample_weights=(data.y != 1).double(), progress=False)


def test_without_progress_nothing_is_printed_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Problem(3)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for solver in ("newton", "sgd"):
        fit(data.K, data.y, rank=5, solver=solver, reg=1.0, max_steps=20, progress=False)
    assert capsys.readouterr().err == ""
    fit(data.K, data.y, rank=5, progress=True)
    assert "surrogate" in capsys.readouterr().err  # so this would have been seen


K3, Y3 = Problem(3, n=20).K, Problem(3, n=20).y


def changed(i: int, j: int, value: float) -> Tensor:
    K = K3.clone()
    K[i, j] = value
    return K


REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (K3[:, :7], Y3, {}, r"K has shape \(20, 7\); needed: a square Gram.*Leave x2 out"),
    (K3[0], Y3, {}, r"K has shape \(20,\); needed: a square Gram"),
    (changed(3, 5, 9.0), Y3, {}, r"K is not symmetric: K\[3, 5\] = 9 and K\[5, 3\].*\(K \+ K.T\) / 2"),
    (changed(2, 4, np.nan), Y3, {}, r"K\[2, 4\] is nan; needed: finite"),
    (changed(2, 2, np.inf), Y3, {}, r"K\[2, 2\] is inf; needed: finite"),
    (K3.long(), Y3, {}, r"K is torch.int64; needed: float32 or float64"),
    (None, Y3, {}, "K is a NoneType; needed: a Gram"),
    (torch.einsum("nm,cd->ncmd", K3, torch.eye(3).double()), Y3, {},
     r"K has shape \(20, 3, 20, 3\); a surrogate has one similarity for each pair.*tg.trace_ntk or tg.pseudo_ntk"),
    (K3, Y3[:19], {}, r"y has shape \(19,\); needed: labels of the \[20\] samples"),
    (K3, Y3 - 1, {}, r"y has classes from -1 to 1; needed: from 0 to"),
    (K3, Y3, {"classes": 2}, "y has classes from 0 to 2; needed: from 0 to 1"),
    (K3, Y3, {"classes": 5}, r"y has no sample .* of class 3, 4 \(of 5\).*Leave the class out.*Labelled.only"),
    (K3, 2 * (Y3 > 0), {}, r"y has no sample .of positive weight. of class 1 \(of 3\)"),
    (K3, 0 * Y3, {}, "all samples are of class 0; needed: at least two classes"),
    (K3, Y3.double(), {}, r"y is torch.float64 of shape \(20,\); needed: classes as integers"),
    (K3, one_hot(Y3) * 0.7, {}, "sum to 1"),
    (K3, Y3[:, None], {}, r"y has shape \(20, 1\); needed: one class per sample"),
    (K3, Y3, {"reg": 0}, "reg=0; needed: a positive reg"),
    (K3, Y3, {"reg": -1.0}, "reg=-1; needed:"),
    (K3, Y3, {"reg": np.nan}, "reg=nan; needed:"),
    (K3, Y3, {"reg": "large"}, "reg='large'; needed: a number"),
    (K3, Y3, {"penalty": "l1"}, "penalty='l1', solver='newton'; needed: penalty 'weights'"),
    (K3, Y3, {"solver": "adam"}, "penalty='weights', solver='adam'; needed: .*'newton' or 'sgd'"),
    (K3, Y3, {"penalty": "norm", "solver": "sgd"}, "penalty='norm', solver='sgd'; needed:.*'norm' with solver 'new"),
    (K3, Y3, {"sample_weights": "balance"},
     "sample_weights='balance'; needed: a weight for each sample, or 'balanced'"),
    (K3, Y3, {"sample_weights": torch.ones(7)},
     r"sample_weights have shape \(7,\); needed: one number per sample, \[20\]"),
    (K3, Y3, {"sample_weights": -torch.ones(20)}, "sample_weights from -1 to -1; needed: at least 0"),
    (K3, Y3, {"sample_weights": torch.zeros(20)}, "not all 0"),
    (K3, Y3, {"sample_weights": torch.full((20,), np.nan)}, r"sample_weights\[0\] is nan"),
    (K3, Y3, {"rank": -1}, "rank=-1; needed: how many eigenvectors lead the search, at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("K", "y", "options", "message"), REFUSED, ids=[r[3][:40] for r in REFUSED])
def test_what_cannot_be_fitted_is_refused(K: Any, y: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(K, y, progress=False, **options)


def test_a_gram_of_two_sets_is_refused(tmp_path: Path) -> None:
    kernel, x, z = tg.trace_ntk(mlp([3, 4, 2]).double()), normal(6, 3), normal(6, 3)
    with pytest.raises(InputError, match="K is not symmetric"):
        fit(tg.compute(kernel, x, z, progress=False), torch.arange(6) % 2, progress=False)
    far = tg.compute(kernel, x, z, store=str(tmp_path), progress=False)
    with pytest.raises(InputError, match="K lies on disk and has other rows than columns; leave x2 out"):
        fit(far, torch.arange(6) % 2, progress=False)


def test_a_cross_gram_of_the_wrong_shape_is_refused() -> None:
    data = Problem(3)
    found = fit(data.K, data.y, progress=False)
    for cross in (data.cross.T, data.cross[:, 1:], data.cross[0], data.cross[:, None]):
        for f in (found.logits, found.probabilities, found.predict):
            with pytest.raises(InputError, match=r"cross has shape .*; needed: .*\[m, 60\]: tg.compute\(kernel, x_new"):
                f(cross)


# Faithfulness.


def classifier(m: int, c: int, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits and classes that mostly agree."""
    z = spread * normal(m, c, seed=seed)
    y = torch.where(torch.rand(m, generator=torch.Generator().manual_seed(seed)) < 0.8, z.argmax(1), 0)
    return z, y


@pytest.mark.parametrize("c", [2, 3, 10])
@pytest.mark.parametrize("m", [2, 3, 29, 30, 31, 200])
def test_a_surrogate_that_is_the_network_is_perfectly_faithful(c: int, m: int) -> None:
    z, y = classifier(m, c)
    p = torch.softmax(z, 1)
    found = faithfulness(p, p, y)
    assert found.tau == 1.0
    assert found.tad == 0.0
    assert found.pearson == pytest.approx(1.0, abs=1e-12)
    assert found.r2 == pytest.approx(1.0, abs=1e-9)
    assert found.accuracy == found.network_accuracy == float((z.argmax(1) == y).double().mean())
    assert (found.samples, found.level) == (m, 0.95)
    assert (found.intervals["tau"].low, found.intervals["tau"].high) == (1.0, 1.0)
    assert (found.intervals["tad"].low, found.intervals["tad"].high) == (0.0, 0.0)
    odds = log_odds(p, y)
    near(found.map(odds), odds, 1e-8)


@pytest.mark.parametrize("c", [2, 3, 10])
def test_the_figures_are_those_of_scipy_and_of_counting(c: int) -> None:
    (z, y), other = classifier(150, c), normal(150, c, seed=5)
    p, q = torch.softmax(z, 1), torch.softmax(z + 1.5 * other, 1)
    found = faithfulness(p.numpy(), q, y.numpy())
    own = [v.gather(1, y[:, None])[:, 0].numpy() for v in (p, q)]
    assert found.tau == pytest.approx(scipy.stats.kendalltau(*own).statistic, abs=1e-12)
    assert found.pearson == pytest.approx(scipy.stats.pearsonr(*own).statistic, abs=1e-12)
    right = [sum(int(v[i].argmax()) == int(y[i]) for i in range(150)) / 150 for v in (p, q)]
    assert found.network_accuracy == pytest.approx(right[0])
    assert found.accuracy == pytest.approx(right[1])
    assert found.tad == pytest.approx(right[1] - right[0])
    assert found.tad != 0
    assert 0 < found.tau < 1
    assert 0 < found.r2 < 1
    u, v = (np.log(a) - np.log1p(-a) for a in own[::-1])
    near(log_odds(q, y), u, 1e-9)
    fitted = found.map(torch.from_numpy(u)).numpy()
    assert found.r2 == pytest.approx(1 - ((v - fitted) ** 2).sum() / ((v - v.mean()) ** 2).sum(), abs=1e-9)
    swapped = faithfulness(q, p, y)
    assert swapped.tau == pytest.approx(found.tau)
    assert swapped.tad == pytest.approx(-found.tad)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 3.0, 20.0])
def test_temperature_keeps_the_order_of_two_classes(temperature: float) -> None:
    z, y = classifier(200, 2)
    found = faithfulness(torch.softmax(z, 1), torch.softmax(z / temperature, 1), y)
    assert found.tau == 1.0
    assert found.tad == 0.0
    assert found.r2 == pytest.approx(1, abs=1e-8)  # log-odds are proportional, and lines stay lines
    u = torch.linspace(-5, 5, 7, dtype=F64)
    near(found.map(u), temperature * u, 1e-6)
    near(found.map.inverse(temperature * u), u, 1e-6)


@pytest.mark.parametrize("bend", [torch.sinh, torch.tanh, lambda u: u + u**3, lambda u: u.exp()])
def test_any_increasing_map_of_log_odds_keeps_tau_at_one(bend: Callable[[Tensor], Tensor]) -> None:
    u = torch.linspace(-2, 2, 400, dtype=F64)[torch.randperm(400)]
    y = torch.ones(400, dtype=torch.long)
    network, surrogate = (torch.stack([torch.sigmoid(-v), torch.sigmoid(v)], 1) for v in (bend(u), u))
    found = faithfulness(network, surrogate, y)
    assert found.tau == 1.0
    assert found.r2 > 0.98
    assert faithfulness(network, surrogate.flip(1), y).tau == -1.0


def test_a_surrogate_that_says_the_opposite_has_a_map_without_inverse() -> None:
    z, y = classifier(100, 2)
    p = torch.softmax(z, 1)
    found = faithfulness(p, p.flip(1), y)
    assert found.tau == -1.0
    assert found.pearson == pytest.approx(-1)
    assert found.r2 == pytest.approx(0, abs=1e-12)  # the best increasing map is the mean
    with pytest.raises(InputError, match="the map is constant .* so it has no inverse"):
        found.map.inverse(torch.zeros(3, dtype=F64))
    assert bool((found.map(normal(5)) == found.map(normal(1))).all())


def test_probabilities_that_round_to_one_are_still_ordered() -> None:
    """p = 1 to the last bit from log-odds of 37 on, but the other classes' probabilities still tell."""
    gap = torch.linspace(30, 300, 60, dtype=F64)[torch.randperm(60)]
    noise = gap + 40 * normal(60)
    y = torch.zeros(60, dtype=torch.long)
    p, q = (torch.softmax(torch.stack([v, 0 * v, 0 * v - 1], 1), 1) for v in (gap, noise))
    assert float((p[:, 0] == 1).double().mean()) > 0.9
    found = faithfulness(p, q, y)
    assert found.tau == pytest.approx(scipy.stats.kendalltau(gap, noise).statistic, abs=1e-12)
    assert np.isfinite(found.r2)
    assert found.intervals["tau"].low < found.tau < found.intervals["tau"].high


def by_scipy(z: Tensor, y: Tensor) -> np.ndarray:
    """Log-odds of the correct class, from logits."""
    rest = z.numpy().copy()
    rest[np.arange(len(y)), y.numpy()] = -np.inf
    return z.numpy()[np.arange(len(y)), y.numpy()] - scipy.special.logsumexp(rest, 1)


@pytest.mark.parametrize("c", [2, 5])
@pytest.mark.parametrize("spread", [1.0, 50.0, 3000.0])
def test_logits_and_log_probabilities_have_the_figures_of_the_logits(c: int, spread: float) -> None:
    """Also where every probability is 0 or 1 to the last bit, and τ of probabilities another number."""
    (z, y), other = classifier(150, c, spread=spread), normal(150, c, seed=5)
    s = z + 0.7 * spread * other
    found = faithfulness(z, s, y, outputs_are="logits")
    odds = by_scipy(z, y), by_scipy(s, y)
    near(log_odds(z, y, outputs_are="logits"), odds[0], 1e-13)
    assert found.tau == pytest.approx(scipy.stats.kendalltau(*odds).statistic, abs=1e-12)
    logs = faithfulness(z.log_softmax(1), s.log_softmax(1), y, outputs_are="log-probabilities")
    for name in ("tau", "tad", "pearson", "r2", "accuracy", "network_accuracy"):
        assert getattr(logs, name) == pytest.approx(getattr(found, name), abs=1e-9), name
    if spread > 1000:
        with pytest.warns(TangencyWarning, match="it has rounded, and these samples tie. Give logits"):
            lost = faithfulness(torch.softmax(z, 1), torch.softmax(s, 1), y)
        assert abs(lost.tau - found.tau) > 0.01
        assert lost.network_accuracy == found.network_accuracy
    else:
        plain = faithfulness(torch.softmax(z, 1), torch.softmax(s, 1), y)
        assert plain.tau == pytest.approx(found.tau, abs=1e-12)
        assert plain.r2 == pytest.approx(found.r2, abs=1e-9)


def test_equal_log_odds_tie_whatever_shift_their_logits_have() -> None:
    """Softmax does not see a shift of all logits; rounding does, and made τ another number in each precision."""
    rng = np.random.default_rng(0)
    y, levels = torch.from_numpy(rng.integers(0, 3, 200)), torch.from_numpy(rng.integers(-2, 3, (2, 200)))
    levels[1] = torch.where(torch.from_numpy(rng.random(200) < 0.5), levels[0], levels[1])
    want = scipy.stats.kendalltau(*levels.numpy()).statistic
    shift = torch.from_numpy(rng.uniform(-30, 30, (2, 200, 1)))
    z = torch.zeros(2, 200, 3, dtype=F64).scatter(2, y.expand(2, 200)[..., None], levels.double()[..., None]) + shift
    for dtype in (F32, F64):
        network, surrogate = z.to(dtype)
        found = faithfulness(network, surrogate, y, outputs_are="logits")
        assert found.tau == pytest.approx(want, abs=1e-12)
        assert found.ties == torch.finfo(dtype).eps ** 0.5
        exact = faithfulness(network, surrogate, y, outputs_are="logits", ties=0.0)
        assert abs(exact.tau - want) > 0.01  # so it matters
        near(found.r2, faithfulness(z[0] - shift[0], z[1] - shift[1], y, outputs_are="logits").r2, 1e-4)


def test_probabilities_of_exactly_zero_and_one_do_not_break() -> None:
    """They tie: all that are certain are equal; the map leaves them out."""
    gap = torch.tensor([900.0, 800.0, -900.0, 3.0, 1.0, -2.0, 0.5, 5.0, -0.1, 2.0], dtype=F64)
    other = torch.tensor([4.0, 800.0, -900.0, 2.0, 1.5, -1.0, 0.7, 900.0, -0.2, 1.0], dtype=F64)
    y = torch.zeros(10, dtype=torch.long)
    p, q = (torch.softmax(torch.stack([v, 0 * v], 1), 1) for v in (gap, other))
    assert float(p[0, 1]) == 0.0
    with pytest.warns(
        TangencyWarning, match="exactly 0 or 1 in 4 of 10 samples: it has rounded, and these samples tie"
    ):
        found = faithfulness(p, q, y)
    assert found.tau == pytest.approx(by_pairs(gap.clamp(-746, 746).numpy(), other.clamp(-746, 746).numpy()), abs=1e-12)
    assert np.isfinite([found.r2, found.pearson, found.tad]).all()
    assert "Faithfulness(τ_K" in repr(found)


def test_a_network_that_is_certain_of_everything_has_no_tau() -> None:
    """NaN, and no error: a constant has no correlation."""
    certain = torch.tensor([[1.0, 0.0]], dtype=F64).expand(12, 2)
    with pytest.warns(TangencyWarning, match="12 of 12 samples.*Give logits, with outputs_are='logits'"):
        found = faithfulness(certain, torch.softmax(normal(12, 2), 1), torch.zeros(12, dtype=torch.long))
    assert np.isnan([found.tau, found.pearson, found.r2]).all()
    assert np.isnan([found.intervals["tau"].low, found.intervals["pearson"].high]).all()
    assert found.network_accuracy == 1.0
    assert np.isfinite([found.intervals["tad"].low, found.intervals["tad"].high]).all()
    repr(found)


@pytest.mark.parametrize("p", [0.3, 0.6, 0.9])
def test_a_network_that_says_the_same_of_all_has_no_correlation_whatever_rounding_says(p: float) -> None:
    network, y = torch.tensor([[p, 1 - p]], dtype=F64).expand(37, 2), torch.zeros(37, dtype=torch.long)
    found = faithfulness(network, torch.softmax(normal(37, 2), 1), y, resamples=2)
    assert np.isnan(found.tau)
    assert np.isnan(found.r2) or found.r2 == pytest.approx(0, abs=1e-9)
    assert np.isnan(found.pearson) or found.pearson == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("row", [(0.0, 0.0, 0.0), (0.3, -1.7, 0.9)])
def test_the_correlation_with_a_constant_is_none(row: tuple[float, ...]) -> None:
    """Also of classes in any order, whose probabilities then differ in the last bit."""
    orders = torch.stack([torch.arange(3).roll(k % 3) for k in range(200)])
    z, y = torch.tensor(row, dtype=F64)[orders], orders.argsort(1)[:, 0]
    for network, surrogate in ((z, normal(200, 3)), (normal(200, 3), z)):
        found = faithfulness(network, surrogate, y, outputs_are="logits")
        assert np.isnan([found.tau, found.pearson, found.intervals["pearson"].low]).all()


@pytest.mark.parametrize("c", [3, 10])
def test_probabilities_rounded_to_three_decimals_are_probabilities(c: int) -> None:
    z, y = classifier(200, c)
    p = (torch.softmax(z, 1) * 999).round().clamp_min(1) / 1000
    assert float((p.sum(1) - 1).abs().max()) > 1e-3
    got = faithfulness(p, p.flip(0), y)
    whole = faithfulness(*(v / v.sum(1, keepdim=True) for v in (p, p.flip(0))), y)
    assert (got.tau, got.network_accuracy) == (pytest.approx(whole.tau, abs=1e-3), whole.network_accuracy)
    with pytest.raises(InputError, match=r"a row sums to 0.9.*were rounded or clamped, make rows sum to 1: p / p.sum"):
        faithfulness(0.95 * p, p, y)


def test_figures_do_not_depend_on_the_order_of_the_samples() -> None:
    """Also where log-odds tie, as those of probabilities in few digits do."""
    z, y = classifier(120, 3)
    p, q = torch.softmax(z, 1), torch.softmax((z + normal(120, 3)).round(), 1)
    assert len(log_odds(q, y).unique()) < 100
    want = faithfulness(p, q, y)
    for seed in range(5):
        order = torch.randperm(120, generator=torch.Generator().manual_seed(seed))
        got = faithfulness(p[order], q[order], y[order])
        assert got.tau == pytest.approx(want.tau, abs=1e-12)
        assert got.pearson == pytest.approx(want.pearson, abs=1e-12)
        assert got.r2 == pytest.approx(want.r2, abs=1e-9)


# Bootstrap.


def test_intervals_hold_the_value_and_depend_on_the_seed_alone() -> None:
    z, y = classifier(120, 3)
    p, q = torch.softmax(z, 1), torch.softmax(z + normal(120, 3), 1)
    state = torch.get_rng_state()
    found, again, other = (faithfulness(p, q, y, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("tau", "tad", "pearson"):
        interval = found.intervals[name]
        assert interval.low <= getattr(found, name) <= interval.high
        assert interval == again.intervals[name]
    assert found.intervals["tau"] != other.intervals["tau"]
    assert (found.tau, found.r2) == (other.tau, other.r2)


def test_intervals_are_quantiles_of_resampled_figures() -> None:
    """Against an own bootstrap, of other random numbers; and more certainty takes a wider interval."""
    z, y = classifier(80, 3)
    p, q = torch.softmax(z, 1), torch.softmax(z + 2 * normal(80, 3), 1)
    a, b = (v.gather(1, y[:, None])[:, 0].numpy() for v in (p, q))
    right = (q.argmax(1) == y).double().numpy() - (p.argmax(1) == y).double().numpy()
    rng = np.random.default_rng(0)
    picks = rng.integers(0, 80, (600, 80))
    own = {
        "tau": [scipy.stats.kendalltau(a[k], b[k]).statistic for k in picks],
        "tad": [right[k].mean() for k in picks],
        "pearson": [np.corrcoef(a[k], b[k])[0, 1] for k in picks],
    }
    for level in (0.5, 0.9):
        found = faithfulness(p, q, y, resamples=1000, level=level)
        assert found.level == level
        for name, values in own.items():
            low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
            slack = 0.25 * np.std(values) + (1 / 80 if name == "tad" else 0)  # tad goes by 80ths
            assert found.intervals[name].low == pytest.approx(low, abs=slack)
            assert found.intervals[name].high == pytest.approx(high, abs=slack)


def test_many_resamples_of_many_samples_are_drawn_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = classifier(50, 2)
    p, q = torch.softmax(z, 1), torch.softmax(z + normal(50, 2), 1)
    whole = faithfulness(p, q, y, resamples=2001)
    sizes = []
    real = faithful_room.kendall
    monkeypatch.setattr(faithful_room, "BATCH", 5000)
    monkeypatch.setattr(faithful_room, "kendall", lambda a, b: (sizes.append(a.numel()), real(a, b))[1])
    parts = faithfulness(p, q, y, resamples=2001)
    assert max(sizes) <= 5000
    assert sum(sizes) == 2001 * 50 + 50
    assert parts.intervals["tau"].low == pytest.approx(whole.intervals["tau"].low, abs=0.03)


@pytest.mark.slow
def test_intervals_have_about_their_nominal_coverage() -> None:
    """Samples of a population whose τ, accuracies and correlation are known: log-odds are normal with correlation ρ."""
    rho, shift, m, trials = 0.7, (0.6, 0.3), 80, 200
    rng = np.random.default_rng(0)

    def population(n: int) -> tuple[Tensor, Tensor]:
        a, e = rng.normal(size=(2, n))
        b = rho * a + np.sqrt(1 - rho**2) * e
        return torch.from_numpy(a + shift[0]), torch.from_numpy(b + shift[1])

    big = [torch.sigmoid(v).numpy() for v in population(10**6)]
    truth = {
        "tau": 2 / np.pi * np.arcsin(rho),
        "tad": scipy.stats.norm.cdf(shift[1]) - scipy.stats.norm.cdf(shift[0]),
        "pearson": np.corrcoef(*big)[0, 1],
    }
    hits = dict.fromkeys(truth, 0)
    y = torch.ones(m, dtype=torch.long)
    for trial in range(trials):
        p, q = (torch.stack([torch.sigmoid(-v), torch.sigmoid(v)], 1) for v in population(m))
        found = faithfulness(p, q, y, level=0.9, seed=trial)
        for name, value in truth.items():
            hits[name] += found.intervals[name].low <= value <= found.intervals[name].high
    for name in truth:  # standard error 0.021; percentile intervals of 80 samples fall a little short
        assert 0.82 < hits[name] / trials < 0.96, (name, hits[name])


# The increasing map.

SLOPES = st.sampled_from([-2.0, -0.1, 0.0, 0.1, 2.0])


@settings(max_examples=60)
@given(st.integers(2, 200), st.integers(1, 60), st.integers(0, 999), SLOPES, st.sampled_from([0.0, 0.3, 3.0]))
def test_the_map_is_isotonic_regression_of_the_means_of_groups(
    n: int, bins: int, seed: int, slope: float, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    u = rng.normal(size=n)
    v = slope * u + noise * rng.normal(size=n)
    m = monotone(torch.from_numpy(u), torch.from_numpy(v), bins)
    group = np.arange(n) * bins // n  # of the sorted samples
    parts = [np.argsort(u)[group == k] for k in np.unique(group)]
    means = np.array([[u[k].mean(), v[k].mean(), len(k)] for k in parts])
    level = IsotonicRegression().fit(means[:, 0], means[:, 1], sample_weight=means[:, 2]).predict(means[:, 0])
    pools = np.split(np.arange(len(level)), np.flatnonzero(np.diff(level) > 1e-11) + 1)
    near(m.values, [level[k[0]] for k in pools], 1e-9)
    near(m.knots, [np.average(means[k, 0], weights=means[k, 2]) for k in pools], 1e-9)
    assert bool((m.knots.diff() > 0).all())
    assert bool((m.values.diff() > 0).all())


@given(st.integers(2, 30), st.integers(0, 999))
def test_inverse_undoes_the_map_inside_and_beyond_the_knots(k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    knots, values = (torch.from_numpy(rng.uniform(0.05, 1, k).cumsum() - 5) for _ in range(2))
    m = MonotoneMap(knots, values)
    u = torch.cat([torch.from_numpy(rng.uniform(-30, 30, 40)), knots])
    near(m.inverse(m(u)), u, 1e-9)
    near(m(m.inverse(u)), u, 1e-9)
    near(m(knots), values, 1e-12)
    assert bool((m(u.sort().values).diff() >= 0).all())
    inside = u.clamp(float(knots[0]), float(knots[-1]))
    near(m(inside), np.interp(inside.numpy(), knots.numpy(), values.numpy()), 1e-12)
    # Straight on beyond the last knot, with the slope that leads there.
    ahead = float(values[-1] + 7 * (values[-1] - values[-2]) / (knots[-1] - knots[-2]))
    assert float(m(knots[-1:] + 7)) == pytest.approx(ahead)


@pytest.mark.parametrize("n", [1, 2, 5, 29, 31])
def test_few_samples_and_equal_ones_have_a_map_too(n: int) -> None:
    u, v = normal(n), normal(n)
    assert 1 <= len(monotone(u, v).knots) <= n
    same = monotone(torch.ones(n, dtype=F64), v)
    assert len(same.knots) == 1
    assert float(same(torch.ones(1, dtype=F64))) == pytest.approx(float(v.mean()))


@pytest.mark.parametrize(
    ("network", "surrogate", "y", "options", "message"),
    [
        (normal(5, 3), torch.full((5, 3), 1 / 3), torch.zeros(5).long(), {},
         "network holds no probabilities .*: apply softmax first"),
        (torch.full((5, 3), 1 / 3), torch.full((5, 3), 0.5), torch.zeros(5).long(), {},
         "surrogate holds no probabilities .a row sums to 1.5"),
        (torch.full((5, 2), 0.25), torch.full((5, 2), 0.5), torch.zeros(5).long(), {},
         "network holds no probabilities .a row sums to 0.5"),
        (torch.tensor([[1.5, -0.5]] * 3), torch.full((3, 2), 0.5), torch.zeros(3).long(), {}, "smallest entry is -0.5"),
        (torch.full((5, 3), np.nan), torch.full((5, 3), 1 / 3), torch.zeros(5).long(), {}, r"network\[0, 0\] is nan"),
        (torch.full((5,), 0.5), torch.full((5, 2), 0.5), torch.zeros(5).long(), {},
         r"network has shape \(5,\); needed: probabilities \[m, c\].*torch.sigmoid\(-z\)"),
        (torch.ones(5, 1), torch.ones(5, 1), torch.zeros(5).long(), {}, r"network has shape \(5, 1\).*one logit z"),
        (torch.full((1, 2), 0.5), torch.full((1, 2), 0.5), torch.zeros(1).long(), {}, "two samples"),
        (torch.full((5, 2), 0.5), torch.full((4, 2), 0.5), torch.zeros(5).long(), {},
         r"network has shape \(5, 2\), surrogate \(4, 2\)"),
        (torch.full((5, 2), 0.5), torch.full((5, 2), 0.5), torch.zeros(4).long(), {}, r"y \(4,\).*needed: .*m classes"),
        (torch.full((5, 2), 0.5), torch.full((5, 2), 0.5), torch.zeros(5), {}, "torch.float32; needed: .*as integers"),
        (torch.full((5, 2), 0.5), torch.full((5, 2), 0.5), torch.tensor([0, 1, 2, 0, 0]), {},
         "y has classes from 0 to 2; needed: 0 to 1"),
        (torch.full((5, 2), 0.5), torch.full((5, 2), 0.5), torch.tensor([0, -1, 1, 0, 0]), {}, "classes from -1 to 1"),
        (torch.full((5, 2), 0.5), torch.full((5, 2), 0.5), torch.zeros(5).long(), {"level": 95}, "level=95.*0 < level"),
        (torch.full((5, 2), 0.5), torch.full((5, 2), 0.5), torch.zeros(5).long(), {"resamples": 1}, "two resamples"),
        (torch.full((5, 2), 0.5), torch.full((5, 2), 0.5), torch.zeros(5).long(), {"ties": 2.0}, "ties=2.0; needed: a"),
        (torch.zeros(5, 2), torch.zeros(5, 2), torch.zeros(5).long(), {"outputs_are": "log-probabilities"},
         "network holds no log-probabilities .a row of exponentials sums to 2.*apply log_softmax first, or say"),
        (torch.zeros(5, 2), torch.full((5, 2), np.inf), torch.zeros(5).long(), {"outputs_are": "logits"},
         r"surrogate\[0, 0\] is inf"),
        (torch.zeros(5, 2), torch.zeros(5, 2), torch.zeros(5).long(), {"outputs_are": "odds"},
         "outputs_are='odds'; needed: 'logits', 'probabilities' or 'log-probabilities'"),
    ],
)  # fmt: skip
def test_what_holds_no_probabilities_is_refused(
    network: Tensor, surrogate: Tensor, y: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        faithfulness(network, surrogate, y, **options)
