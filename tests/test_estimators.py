"""The scikit-learn estimators: scikit-learn's own checks, its estimators on the same Gram, and kernels of modules."""

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics.pairwise import linear_kernel, rbf_kernel
from sklearn.model_selection import GridSearchCV, KFold, LeaveOneOut, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor, nn

import tangency as tg
from tangency.estimators import KernelClassifier, KernelRegressor
from tangency.models import mlp

LOSSES = ["square", "logistic", "svm"]
N, M, P = 40, 9, 5


@dataclass(frozen=True)
class Linear:
    """`linear_kernel` under a name without an address: workers of pytest-xdist must agree on names."""

    def __call__(self, X: Any, Y: Any) -> np.ndarray:
        return linear_kernel(X, Y)


def cannot_apply(estimator: Any) -> dict[str, str]:
    loss, given = getattr(estimator, "loss", "square"), estimator.kernel == "precomputed"
    found = {}
    if given and loss != "svm":
        found["check_positive_only_tag_during_fit"] = "subtracts the mean from a Gram, which leaves it indefinite"
        found["check_estimators_dtypes"] = "rounds a Gram to integers, which leaves it indefinite"
    if given and loss == "logistic":
        found["check_decision_proba_consistency"] = "gives samples where a precomputed Gram is needed"
    if not given and loss == "svm":
        found["check_sample_weight_equivalence_on_dense_data"] = "libsvm stops at 1e-3 (see the test on repeated rows)"
    return found


@parametrize_with_checks(
    [
        *(KernelRegressor(k) for k in (Linear(), "precomputed")),
        *(KernelClassifier(k, loss=loss) for k in (Linear(), "precomputed") for loss in LOSSES),
    ],
    expected_failed_checks=cannot_apply,
    xfail_strict=True,
)
@pytest.mark.every(3, 2)  # each of the 65 checks is among them
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@dataclass
class Data:
    """Samples, targets, and the Gram matrices of a linear kernel."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x, self.z = rng.normal(size=(N, P)), rng.normal(size=(M, P))
        self.y = np.stack([self.x[:, 0] ** 2, self.x @ rng.normal(size=P)], 1) + 0.1 * rng.normal(size=(N, 2))
        self.score = self.x @ rng.normal(size=P) + 0.5 * rng.normal(size=N)
        self.w = rng.uniform(0.5, 2, size=N)
        self.times = rng.integers(0, 3, size=N)
        self.K, self.cross = self.x @ self.x.T, self.z @ self.x.T

    def labels(self, classes: int) -> np.ndarray:
        return np.array(["ant", "bee", "cow"])[np.digitize(self.score, [0] if classes == 2 else [-0.5, 0.8])]

    def repeated(self) -> np.ndarray:
        return np.repeat(np.arange(N), self.times)


@pytest.fixture
def data() -> Data:
    return Data()


def kernel(width: int = 16, outputs: int = 1, **options: Any) -> tg.Kernel:
    torch.manual_seed(0)
    return tg.trace_ntk(mlp([P, width, outputs]).double(), **options)


# --- the same as scikit-learn's own ---


@pytest.mark.parametrize("columns", [0, slice(None)])
@pytest.mark.parametrize("weighted", [False, True])
def test_ridge_is_kernel_ridge(data: Data, columns: Any, weighted: bool) -> None:
    y, w = data.y[:, columns], data.w if weighted else None
    for reg in (1e-3, 0.7, 30):
        got = KernelRegressor(reg=reg).fit(data.K, y, w)
        want = KernelRidge(alpha=reg, kernel="precomputed").fit(data.K, y, w).predict(data.cross)
        np.testing.assert_allclose(got.predict(data.cross), want, rtol=1e-8, atol=1e-8)
        called = KernelRegressor(linear_kernel, reg=reg).fit(data.x, y, w)
        np.testing.assert_allclose(called.predict(data.z), want, rtol=1e-8, atol=1e-8)
        assert got.reg_ == reg
        assert got.predict(data.cross).dtype == np.float64


def test_a_solver_is_used(data: Data) -> None:
    fit = KernelRegressor(reg=0.5, solver=tg.linalg.Eigh()).fit(data.K, data.y)
    assert fit.model_.solver == "eigh"
    assert KernelRegressor(reg=0.5).fit(data.K, data.y).model_.solver == "Cholesky"


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_without_reg_it_is_the_pseudo_inverse(data: Data, dtype: Any) -> None:
    """Of rank P: in float32 a third of the eigenvalues lie below zero, and none of them counts."""
    K = data.K.astype(dtype)
    assert np.linalg.eigvalsh(K.astype(np.float64)).min() < 0
    fit = KernelRegressor(reg=0).fit(K, data.y)
    want = data.z @ np.linalg.lstsq(data.x, data.y, rcond=None)[0]
    got = fit.predict(data.cross.astype(dtype))
    assert got.dtype == dtype
    assert fit.model_.rank == P
    np.testing.assert_allclose(got, want, atol=1e-9 if dtype == np.float64 else 1e-4)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_svm_is_svc(data: Data, classes: int, weighted: bool) -> None:
    y, w = data.labels(classes), data.w if weighted else None
    for reg in (0.1, 2):
        got = KernelClassifier(loss="svm", reg=reg).fit(data.K, y, w)
        want = SVC(kernel="precomputed", C=1 / reg, break_ties=True).fit(data.K, y, w)
        np.testing.assert_allclose(got.decision_function(data.cross), want.decision_function(data.cross), rtol=1e-12)
        assert got.predict(data.K).tolist() == want.predict(data.K).tolist()


def test_svm_with_weights_of_zero(data: Data) -> None:
    """SVC itself goes wrong with these and a precomputed kernel, but not with its own linear one."""
    y, w = data.labels(3), data.times.astype(float)
    got = KernelClassifier(loss="svm").fit(data.K, y, w).decision_function(data.cross)
    np.testing.assert_allclose(got, SVC(kernel="linear").fit(data.x, y, w).decision_function(data.z), rtol=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_logistic_is_logistic_regression(data: Data, classes: int, bias: bool, weighted: bool) -> None:
    y, w, reg = data.labels(classes), data.w if weighted else None, 0.3
    got = KernelClassifier(reg=reg, bias=bias).fit(data.K, y, w)
    want = LogisticRegression(C=1 / reg, fit_intercept=bias, tol=1e-10, max_iter=10000).fit(data.x, y, w)
    np.testing.assert_allclose(got.predict_proba(data.cross), want.predict_proba(data.z), atol=1e-5)
    np.testing.assert_allclose(got.decision_function(data.cross), want.decision_function(data.z), atol=1e-5)
    assert got.predict(data.cross).tolist() == want.predict(data.z).tolist()


def test_square_loss_is_ridge_on_coded_labels(data: Data) -> None:
    for classes in (2, 3):
        y = data.labels(classes)
        code = np.where(y == "bee", 1.0, -1.0) if classes == 2 else (y[:, None] == np.unique(y)) * 1.0
        fit = KernelClassifier(loss="square", reg=0.3).fit(data.K, y)
        want = data.cross @ np.linalg.solve(data.K + 0.3 * np.eye(N), code)
        np.testing.assert_allclose(fit.decision_function(data.cross), want, atol=1e-9)
        best = (want > 0).astype(int) if classes == 2 else want.argmax(1)
        assert fit.predict(data.cross).tolist() == np.unique(y)[best].tolist()
        assert fit.classes_.tolist() == ["ant", "bee", "cow"][:classes]


# --- choosing reg ---

REGS = [10.0**k for k in range(-4, 4)]


@pytest.mark.parametrize("columns", [0, slice(None)])
@pytest.mark.every(2)
def test_leave_one_out_is_ridge_cv(data: Data, columns: Any) -> None:
    y = data.y[:, columns]
    want = RidgeCV(REGS, fit_intercept=False).fit(data.x, y)
    got = KernelRegressor(reg="loo", regs=REGS).fit(data.K, y)
    assert got.reg_ == want.alpha_
    assert min(REGS) < got.reg_ < max(REGS)
    np.testing.assert_allclose(got.predict(data.cross), want.predict(data.z), rtol=1e-8, atol=1e-8)
    search = GridSearchCV(KernelRegressor(), {"reg": REGS}, cv=LeaveOneOut(), scoring="neg_mean_squared_error")
    assert search.fit(data.K, y).best_params_ == {"reg": got.reg_}


def test_leave_one_out_with_weights(data: Data) -> None:
    """Σ_i w_i (y_i − f₋ᵢ(x_i))², each f₋ᵢ fitted."""
    w = data.w * (np.arange(N) % 7 > 0)
    y = data.y[:, 0]

    def risk(reg: float) -> float:
        total = 0.0
        for i in range(N):
            rest = np.arange(N) != i
            fit = KernelRidge(alpha=reg, kernel="linear").fit(data.x[rest], y[rest], w[rest])
            total += w[i] * float((fit.predict(data.x[i : i + 1])[0] - y[i]) ** 2)
        return total

    regs = [10.0**k for k in range(-2, 4)]
    assert KernelRegressor(reg="loo", regs=regs).fit(data.K, y, w).reg_ == min(regs, key=risk)


def test_generalised_cross_validation(data: Data) -> None:
    def gcv(reg: float) -> float:
        hat = data.K @ np.linalg.inv(data.K + reg * np.eye(N))
        return float(((data.y - hat @ data.y) ** 2).mean() / (1 - np.trace(hat) / N) ** 2)

    assert KernelRegressor(reg="gcv", regs=REGS).fit(data.K, data.y).reg_ == min(REGS, key=gcv)


def test_the_grid_follows_the_kernel(data: Data) -> None:
    first = KernelRegressor(reg="loo").fit(data.K, data.y)
    second = KernelRegressor(reg="loo").fit(1e6 * data.K, data.y)
    ratio = first.reg_ / (np.trace(data.K) / N)
    assert np.isclose(np.log10(ratio), round(np.log10(ratio)))
    assert -8 <= round(np.log10(ratio)) <= 4
    np.testing.assert_allclose(second.reg_, 1e6 * first.reg_)
    np.testing.assert_allclose(second.predict(1e6 * data.cross), first.predict(data.cross), rtol=1e-6, atol=1e-8)


def test_the_grid_stays_above_rounding(data: Data) -> None:
    """Exact data want no reg at all, but in float32 K has eigenvalues of −1e-7·λ_1."""
    K, y = data.K.astype(np.float32), data.x @ np.arange(1.0, 1 + P)
    assert KernelRegressor(reg="loo").fit(data.K, y).reg_ < 1e-7 * np.trace(data.K) / N
    fit = KernelRegressor(reg="loo").fit(K, y)
    assert fit.reg_ > -np.linalg.eigvalsh(K.astype(np.float64)).min()
    want = data.cross @ np.linalg.pinv(data.K) @ y
    np.testing.assert_allclose(fit.predict(data.cross.astype(np.float32)), want, rtol=1e-4)


def test_classifiers_choose_for_the_square_loss(data: Data) -> None:
    y = data.labels(2)
    fit = KernelClassifier(loss="square", reg="loo", regs=REGS).fit(data.K, y)
    assert fit.reg_ == KernelRegressor(reg="loo", regs=REGS).fit(data.K, np.where(y == "bee", 1, -1)).reg_


# --- kernels of modules ---


def test_module_kernels_are_computed(data: Data) -> None:
    k = kernel()
    fit = KernelRegressor(k, reg=0.1, memory="64MB").fit(data.x, data.y)
    x, z = torch.from_numpy(data.x), torch.from_numpy(data.z)
    want = tg.regress.ridge(k(x), data.y, reg=0.1).predict(k(z, x)).numpy()
    got = fit.predict(data.z)
    assert isinstance(got, np.ndarray)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-10)


def test_memory_is_passed_on(data: Data) -> None:
    with pytest.raises(tg.MemoryBudgetError):
        KernelRegressor(kernel(), memory="1kB").fit(data.x, data.y)


def test_search_over_reg_by_hand(data: Data) -> None:
    k, y, regs, folds = kernel(), data.y[:, 0], [1e-3, 1e-1, 10.0], KFold(4)
    x = torch.from_numpy(data.x)
    K = k(x).numpy()
    scores = np.zeros((len(regs), 4))
    for i, reg in enumerate(regs):
        for j, (train, test) in enumerate(folds.split(K)):
            a = np.linalg.solve(K[np.ix_(train, train)] + reg * np.eye(len(train)), y[train])
            off = ((K[np.ix_(test, train)] @ a - y[test]) ** 2).sum()
            scores[i, j] = 1 - off / ((y[test] - y[test].mean()) ** 2).sum()
    for estimator, given in ((KernelRegressor(k), data.x), (KernelRegressor(k), x), (KernelRegressor(), K)):
        search = GridSearchCV(estimator, {"reg": regs}, cv=folds).fit(given, y)
        got = np.stack([search.cv_results_[f"split{j}_test_score"] for j in range(4)], 1)
        np.testing.assert_allclose(got, scores, rtol=1e-8)
        assert search.best_params_ == {"reg": regs[scores.mean(1).argmax()]}
        assert search.best_estimator_.kernel is estimator.kernel


def test_classifiers_are_searched(data: Data) -> None:
    k, y = kernel(outputs=2), data.labels(3)
    K = k(torch.from_numpy(data.x)).numpy()
    grid = {"loss": LOSSES, "reg": [0.01, 1.0]}
    first = GridSearchCV(KernelClassifier(k), grid, cv=3).fit(data.x, y)
    second = GridSearchCV(KernelClassifier(), grid, cv=3).fit(K, y)
    assert first.best_params_ == second.best_params_
    np.testing.assert_allclose(first.cv_results_["mean_test_score"], second.cv_results_["mean_test_score"])
    assert first.best_score_ > 0.6


def test_in_a_pipeline(data: Data) -> None:
    k, x = kernel(), 100 * data.x + 7
    line: Pipeline = make_pipeline(StandardScaler(), KernelRegressor(k, reg=0.1))
    scaled = StandardScaler().fit(x)
    want = KernelRegressor(k, reg=0.1).fit(scaled.transform(x), data.y).predict(scaled.transform(data.z))
    np.testing.assert_allclose(line.fit(x, data.y).predict(data.z), want)
    weighted = line.fit(x, data.y, kernelregressor__sample_weight=data.w).predict(data.z)
    assert np.abs(weighted - want).max() > 1e-3


def test_images() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3, 8, 8)), np.arange(40) % 2  # float64, and the parameters are float32
    x[y == 1] += 1.0
    k, t = tg.trace_ntk(model), torch.from_numpy(x).float()
    fit = KernelClassifier(k, reg=0.1).fit(x[:30], y[:30])
    got = fit.predict_proba(x[30:])
    want = tg.regress.logistic(k(t[:30]), y[:30], reg=0.1, bias=True).probabilities(k(t[30:], t[:30]))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4)
    assert got.dtype == fit.decision_function(x).dtype == np.float32
    assert cross_val_score(fit, x, y, cv=3).mean() > 0.9


def test_tensors_go_in(data: Data) -> None:
    k, y = kernel(), data.labels(2)
    index = torch.from_numpy((y == "bee").astype(int))
    x = torch.tensor(data.x, requires_grad=True)
    want = KernelClassifier(k).fit(data.x, y).predict_proba(data.z)
    fit = KernelClassifier(k).fit(x, index, torch.ones(N))
    np.testing.assert_allclose(fit.predict_proba(torch.from_numpy(data.z)), want, rtol=1e-9)
    assert fit.score(x, index) > 0.8
    assert cross_val_score(fit, x.detach(), index, cv=2).min() > 0.5
    given = KernelRegressor().fit(torch.from_numpy(data.K), torch.from_numpy(data.y))
    want = KernelRegressor().fit(data.K, data.y).predict(data.cross)
    np.testing.assert_allclose(given.predict(torch.from_numpy(data.cross)), want)


def test_lists_are_arrays(data: Data) -> None:
    fit = KernelRegressor(kernel()).fit(data.x, data.y)
    assert fit.predict(data.z.tolist()).tolist() == fit.predict(data.z).tolist()


def test_types_of_inputs(data: Data) -> None:
    """As the parameters are, unless the kernel says that it computes in another type."""
    torch.manual_seed(0)
    model = mlp([P, 8, 1])  # float32
    k = tg.trace_ntk(model)
    single = [k, tg.sum(k, tg.scale(k, 2.0)), tg.cosine(k)]
    for each in single:
        assert KernelRegressor(each).fit(data.x, data.y).predict(data.z).dtype == np.float32
    double = tg.trace_ntk(model, dtype="float64")
    near = 0.01 + 1e-12 * data.x
    gram = KernelRegressor(double).fit(near, data.y).X_fit_
    assert gram.dtype == torch.float64
    assert torch.equal(gram, torch.from_numpy(near))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 6), nn.Linear(6, 1)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        mean = self.words(ids).mean(1)
        return self.out(mean if scale is None else mean * scale[:, None])


def test_integers_stay_integers() -> None:
    ids = np.random.default_rng(0).integers(0, 11, size=(30, 4))
    k, y = tg.trace_ntk(Tokens()), ids.mean(1)
    fit = KernelRegressor(k, reg=0.01).fit(ids, y)
    assert fit.X_fit_.dtype == torch.int64
    shorter = fit.predict(ids[:, :3])  # other texts may have other lengths
    assert shorter.shape == (30,)
    assert fit.score(ids, y) > 0.9


def test_several_inputs() -> None:
    rng = np.random.default_rng(0)
    ids, scale, y = rng.integers(0, 11, size=(12, 4)), rng.uniform(1, 2, size=12), rng.normal(size=12)
    k = tg.trace_ntk(Tokens())
    want = tg.regress.ridge(k((torch.from_numpy(ids), torch.from_numpy(scale).float())), y, reg=1.0).fitted.numpy()
    for x in ({"ids": ids, "scale": scale}, (ids, torch.from_numpy(scale))):
        np.testing.assert_allclose(KernelRegressor(k).fit(x, y).predict(x), want, rtol=1e-4, atol=1e-5)
    items = tg.from_dataset(torch.utils.data.TensorDataset(torch.from_numpy(ids), torch.from_numpy(scale).float()))
    np.testing.assert_allclose(KernelRegressor(k).fit(items, y).predict(items), want, rtol=1e-4, atol=1e-5)


# --- full kernels and Grams ---


def test_full_kernels(data: Data) -> None:
    torch.manual_seed(0)
    k, x, z = tg.full_ntk(mlp([P, 8, 2]).double()), torch.from_numpy(data.x), torch.from_numpy(data.z)
    want = tg.regress.ridge(k(x), data.y, reg=0.1).predict(k(z, x)).numpy()
    np.testing.assert_allclose(KernelRegressor(k, reg=0.1).fit(data.x, data.y).predict(data.z), want, rtol=1e-9)
    chosen = KernelRegressor(k, reg="loo", regs=REGS).fit(data.x, data.y, np.full(N, 2.0))
    assert chosen.reg_ == 2 * tg.regress.cross_validate(k(x), data.y, np.array(REGS) / 2).best()
    y = data.labels(2)
    coded = np.stack([y == "ant", y == "bee"], 1) * 1.0
    fit = KernelClassifier(k, loss="square", reg=0.1).fit(data.x, y)
    both = tg.regress.ridge(k(x), coded, reg=0.1).predict(k(z, x)).numpy()
    np.testing.assert_allclose(fit.decision_function(data.z), both[:, 1] - both[:, 0], rtol=1e-8)
    soft = KernelClassifier(k, reg=0.1).fit(data.x, y)
    assert (soft.predict(data.z) == soft.classes_[soft.predict_proba(data.z).argmax(1)]).all()
    for loss, labels in (("logistic", data.labels(3)), ("svm", y)):
        with pytest.raises(tg.InputError, match=f"full over 2 outputs, y has . classes and the loss is '{loss}'"):
            KernelClassifier(k, loss=loss).fit(data.x, labels)


def test_the_full_kernel_of_one_output_is_like_any_other(data: Data) -> None:
    torch.manual_seed(0)
    model = mlp([P, 8, 1]).double()
    for estimator in (KernelRegressor(reg=0.1), KernelClassifier(loss="svm")):
        y = data.y if isinstance(estimator, KernelRegressor) else data.labels(3)
        first, second = (clone(estimator).set_params(kernel=f(model)) for f in (tg.full_ntk, tg.trace_ntk))
        got, want = first.fit(data.x, y).predict(data.z), second.fit(data.x, y).predict(data.z)
        assert got.shape == want.shape
        assert (got == want).all() if got.dtype.kind == "U" else np.allclose(got, want)


@pytest.mark.parametrize("stored", [False, True])
def test_a_gram_is_a_precomputed_kernel(data: Data, stored: bool, tmp_path: Path) -> None:
    k, x, z = kernel(), torch.from_numpy(data.x), torch.from_numpy(data.z)
    K, cross = (
        tg.compute(k, *sides, store=tmp_path / name if stored else None, progress=False)
        for name, sides in (("K", (x,)), ("cross", (z, x)))
    )
    for estimator, y in (
        (KernelRegressor(reg="loo"), data.y),
        *((KernelClassifier(loss=loss), data.labels(3)) for loss in LOSSES),
    ):
        want = clone(estimator).fit(K.dense().numpy(), y).predict(cross.dense().numpy())
        got = estimator.fit(data.K[1:, 1:], y[1:]).fit(K, y).predict(cross)
        assert (got == want).all() if got.dtype.kind == "U" else np.allclose(got, want)
        assert (estimator.predict(cross.dense().numpy()) == got).all()


# --- conventions ---


def test_cloning_keeps_the_kernel(data: Data) -> None:
    for k in (kernel(), tg.cosine(kernel())):
        assert clone(KernelRegressor(k)).kernel is k
        assert clone(GridSearchCV(KernelClassifier(k), {"reg": [1.0]})).estimator.kernel is k


@pytest.mark.parametrize("loss", [None, *LOSSES])
def test_pickling(data: Data, loss: str | None) -> None:
    estimator = KernelRegressor() if loss is None else KernelClassifier(loss=loss)
    y = data.y if loss is None else data.labels(3)
    fit = estimator.fit(data.K, y)
    again = pickle.loads(pickle.dumps(fit))
    assert again.predict(data.cross).tolist() == fit.predict(data.cross).tolist()
    fit = estimator.set_params(kernel=kernel()).fit(data.x, y)
    again = pickle.loads(pickle.dumps(fit))
    assert again.predict(data.z).tolist() == fit.predict(data.z).tolist()


@pytest.mark.parametrize("loss", [None, *LOSSES])
def test_weights_are_repeated_rows(data: Data, loss: str | None) -> None:
    rows, y = data.repeated(), data.y if loss is None else data.labels(3)
    assert 0 in data.times
    estimator = KernelRegressor() if loss is None else KernelClassifier(loss=loss)
    method = "predict" if loss is None else "decision_function"
    weighted = getattr(clone(estimator).fit(data.K, y, data.times), method)(data.cross)
    repeated = clone(estimator).fit(data.K[np.ix_(rows, rows)], y[rows])
    got = getattr(repeated, method)(data.cross[:, rows])
    np.testing.assert_allclose(got, weighted, atol=1e-2 if loss == "svm" else 1e-7)
    plain = getattr(clone(estimator).fit(data.K, y), method)(data.cross)
    assert np.abs(plain - weighted).max() > 0.05


def test_one_weight_for_all(data: Data) -> None:
    """Twice the loss is half the penalty."""
    got = KernelRegressor(reg=2.0).fit(data.K, data.y, 2.0).predict(data.cross)
    np.testing.assert_allclose(got, KernelRegressor(reg=1.0).fit(data.K, data.y).predict(data.cross))


def test_labels_come_back_as_they_were(data: Data) -> None:
    for y in (data.labels(3), np.where(data.score > 0, 7, -2), data.score > 0, data.labels(2).astype(object)):
        fit = KernelClassifier(reg=1e-3).fit(data.K, y)
        assert fit.classes_.tolist() == sorted(set(y.tolist()))
        assert fit.predict(data.K).dtype == y.dtype
        assert fit.score(data.K, y) > 0.8


def test_logistic_in_float32(data: Data) -> None:
    """Of rank P, so that half of the other eigenvalues lie below zero; also after a cast that hides the rounding."""
    y = data.labels(3)
    want = KernelClassifier(reg=0.1).fit(data.K, y).predict_proba(data.cross)
    K, cross = data.K.astype(np.float32), data.cross.astype(np.float32)
    for kind in (np.float32, np.float64):
        got = KernelClassifier(reg=0.1).fit(K.astype(kind), y).predict_proba(cross.astype(kind))
        assert got.dtype == kind
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_probabilities_are_for_the_logistic_loss(data: Data) -> None:
    assert hasattr(KernelClassifier(), "predict_proba")
    for loss in ("square", "svm"):
        assert not hasattr(KernelClassifier(loss=loss).fit(data.K, data.labels(2)), "predict_proba")


def test_other_kernels(data: Data) -> None:
    """Any function of two sets of samples, tensors from it included."""
    y = data.y[:, 0]
    want = KernelRidge(alpha=0.1, kernel="rbf").fit(data.x, y).predict(data.z)
    np.testing.assert_allclose(KernelRegressor(rbf_kernel, reg=0.1).fit(data.x, y).predict(data.z), want, atol=1e-8)

    def integers(X: Any, Y: Any) -> Tensor:
        return torch.from_numpy((X > 0).astype(int) @ (Y > 0).astype(int).T)

    fit = KernelRegressor(integers, reg=0.1).fit(data.x, y)
    assert fit.predict(data.z).dtype == np.float64


# --- errors ---


def message(expected: str) -> str:
    return re.escape(expected).replace("…", ".*")


REGRESSOR = [
    ({"reg": -1.0}, "reg=-1; needed: a finite number, at least 0."),
    ({"reg": "cv"}, "reg='cv'; needed: a number, at least 0, or 'loo' or 'gcv'."),
    ({"reg": None}, "reg=None; needed: a number, at least 0."),
    ({"kernel": "rbf"}, "kernel='rbf'; needed: a tangency kernel (tg.trace_ntk(model)), 'precomputed', or a function"),
    ({"reg": "loo", "regs": [0.0, 1.0]}, "regs=[0.0, 1.0]; needed: one or more positive numbers."),
    ({"solver": "cg"}, "solver='cg'; needed: a solver"),
]
CLASSIFIER = [
    ({"loss": "hinge"}, "loss='hinge'; needed: one of 'square', 'logistic', 'svm'."),
    ({"reg": "loo"}, "reg='loo' with loss='logistic'; …Give a number"),
    ({"reg": "gcv", "loss": "svm"}, "reg='gcv' with loss='svm'; …Give a number"),
    ({"reg": 0, "loss": "svm"}, "reg=0 with loss='svm'; needed: a positive number"),
    ({"reg": -0.5}, "reg=-0.5; needed: a finite number, at least 0."),
]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [(KernelRegressor, *case) for case in REGRESSOR] + [(KernelClassifier, *case) for case in CLASSIFIER],
)
def test_options_are_checked(data: Data, kind: Any, options: dict[str, Any], expected: str) -> None:
    estimator = kind(**options)
    with pytest.raises(tg.InputError, match=message(expected)):
        estimator.fit(data.K, data.labels(2) if kind is KernelClassifier else data.y)


def test_inputs_are_checked_before_the_kernel_is_computed(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr("tangency.estimators.compute", never)
    fit, bad = KernelRegressor(kernel()), data.x.copy()
    bad[3, 1] = np.nan
    for x in (bad, torch.from_numpy(bad)):
        with pytest.raises(tg.InputError, match=message("X[3, 1] is nan; needed: finite numbers.")):
            fit.fit(x, data.y)
    with pytest.raises(tg.InputError, match=message("X['x'][3, 1] is nan; needed: finite numbers.")):
        fit.fit({"x": bad}, data.y)
    with pytest.raises(tg.InputError, match="X has 40 samples and y has 39; needed: one target for each sample."):
        fit.fit(data.x, data.y[:-1])
    with pytest.raises(tg.InputError, match="disagree on the number of samples"):
        fit.fit((data.x, data.x[:-1]), data.y)
    with pytest.raises(tg.InputError, match="requires y to be passed, but the target y is None"):
        fit.fit(data.x, None)
    with pytest.raises(ValueError, match="Input y contains NaN"):
        fit.fit(data.x, np.full(N, np.nan))
    for weights, expected in (
        (np.zeros(N), "all sample weights are zero; needed: a positive one for at least one sample."),
        (-np.ones(N), "weights from -1 to -1; needed: at least 0, and not all 0."),
        (np.ones(3), "weights have shape (3,); needed: one number per sample, [40]."),
        (np.full(N, np.inf), "weights[0] is inf; needed: finite numbers."),
    ):
        with pytest.raises(tg.InputError, match=message(expected)):
            fit.fit(data.x, data.y, weights)
    first = (data.labels(2) == "ant") * 1.0
    for y, weights in ((np.full(N, "ant"), None), (data.labels(2), first)):
        with pytest.raises(tg.InputError, match="are of one class, ant; needed: at least two."):
            KernelClassifier(kernel()).fit(data.x, y, weights)
    with pytest.raises(ValueError, match="continuous"):
        KernelClassifier(kernel()).fit(data.x, data.score)


def test_grams_are_checked(data: Data) -> None:
    with pytest.raises(tg.InputError, match=r"the Gram has shape \(40, 39\); needed: a square Gram"):
        KernelRegressor().fit(data.K[:, :-1], data.y)
    with pytest.raises(tg.InputError, match="the Gram is not symmetric"):
        KernelRegressor().fit(data.K + np.arange(N), data.y)
    with pytest.raises(tg.InputError, match=r"the Gram has shape \(40, 5\)"):
        KernelRegressor(lambda X, Y: X).fit(data.x, data.y)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        KernelRegressor().fit(data.K * np.nan, data.y)
    fit = KernelRegressor().fit(data.K, data.y)
    with pytest.raises(ValueError, match="X has 39 features, but KernelRegressor is expecting 40 features"):
        fit.predict(data.cross[:, :-1])
    with pytest.raises(tg.NotPositiveDefinite, match="eigenvalues from 0 to 0: it is no Gram matrix of a kernel, or"):
        KernelRegressor(reg="loo").fit(0 * data.K, data.y)
    with pytest.raises(tg.NotPositiveDefinite, match="K is indefinite"):
        KernelClassifier().fit(data.K - np.eye(N), data.labels(2))


def test_not_fitted_yet(data: Data) -> None:
    for estimator in (KernelRegressor(kernel()), KernelClassifier(), KernelClassifier(kernel(), loss="svm")):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            estimator.predict(data.x)


# --- a fit is fixed ---


class Gained(nn.Module):
    """A network with a factor that no parameter, no buffer and no printed form shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp([P, 16, 1]).double()
        self.register_buffer("unit", torch.ones(1, dtype=torch.float64))
        self.gain = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.gain[0] * self.unit


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def train(model: Gained) -> None:
    """One step, by hand."""
    model.net[0].weight.grad = torch.ones_like(model.net[0].weight)
    torch.optim.SGD([model.net[0].weight], lr=1e-6).step()


CHANGES: dict[str, tuple[Callable[[Gained], Any], str]] = {
    "a step of training": (train, "weights"),
    "weights by .data": (lambda m: m.net[2].bias.data.add_(0.1), "weights"),
    "a buffer": (lambda m: m.unit.mul_(2), "buffers"),
    "another type": (lambda m: m.float(), "weights"),
    "a hook": (lambda m: m.net.register_forward_hook(doubled), ""),
    "an attribute": (lambda m: m.gain.__setitem__(0, 3.0), ""),
    "an activation": (lambda m: m.net.__setitem__(1, nn.Tanh()), "model"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_that_changes_after_the_fit_is_refused(data: Data, change: str) -> None:
    """Also when a hook, an attribute or a layer without parameters makes it another function."""
    torch.manual_seed(0)
    model = Gained()
    fit = KernelRegressor(tg.trace_ntk(model)).fit(data.x, data.y)
    before = fit.predict(data.z)
    assert np.array_equal(fit.predict(data.z), before)
    apply, part = CHANGES[change]
    apply(model)
    expected = f"the kernel has changed since fit.*{part}.*Fit again.*deepcopy"
    for method in (fit.predict, pickle.loads(pickle.dumps(fit)).predict):
        with pytest.raises(tg.ModelError, match=expected):
            method(data.z)
    after = fit.fit(data.x, data.y).predict(data.z)
    assert after.shape == before.shape


def test_weights_that_come_back_are_the_same_network(data: Data) -> None:
    model = mlp([P, 16, 2]).double()
    kept = copy.deepcopy(model.state_dict())
    fit = KernelClassifier(tg.trace_ntk(model)).fit(data.x, data.labels(2))
    said = fit.predict(data.z)
    nn.init.ones_(model[0].weight)
    for method in (fit.predict, fit.predict_proba, fit.decision_function):
        with pytest.raises(tg.ModelError, match="has changed since fit"):
            method(data.z)
    model.load_state_dict(kept)
    assert fit.predict(data.z).tolist() == said.tolist()


def test_a_copy_of_the_network_goes_on(data: Data) -> None:
    """What the message says works; so do weights that were given to the kernel."""
    model = mlp([P, 16, 1]).double()
    kernels = [tg.trace_ntk(copy.deepcopy(model)), tg.trace_ntk(model, params=model.state_dict())]
    fits = [KernelRegressor(k).fit(data.x, data.y) for k in kernels]
    before = [fit.predict(data.z) for fit in fits]
    nn.init.ones_(model[0].weight)
    for fit, want in zip(fits, before, strict=True):
        assert np.array_equal(fit.predict(data.z), want)


def test_predicting_costs_one_pass_over_the_new_samples(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """One training sample goes along with them, instead of a Gram of its own; the predictions are those without it."""
    fit = KernelRegressor(k := kernel()).fit(data.x, data.y)
    want = tg.compute(k, torch.from_numpy(data.z), torch.from_numpy(data.x)).dense() @ fit.model_.coefficients
    prepared = []
    prepare = type(k).prepare

    def counted(self: Any, x: Any, memory: int | None = None) -> Any:
        prepared.append(len(x)) if len(x) > 1 else None  # one tells what a sample takes
        return prepare(self, x, memory)

    monkeypatch.setattr(type(k), "prepare", counted)
    found = fit.predict(data.z)
    assert sorted(prepared) == [M + 1, N]
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-9, atol=1e-9)
    prepared.clear()
    monkeypatch.setattr("tangency.estimators.ALONG", M - 1)
    np.testing.assert_allclose(fit.predict(data.z), found, rtol=1e-9, atol=1e-9)
    assert sum(prepared) == M + N + 4  # a few of their own, where the new samples are many


@pytest.mark.parametrize("along", [0, 1024])
@pytest.mark.parametrize("full", [False, True])
def test_a_change_that_no_description_shows_is_seen(
    data: Data, along: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a training sample goes along or has a pass of its own; also where the first samples say nothing."""
    monkeypatch.setattr("tangency.estimators.ALONG", along)
    model = Gained()
    nn.init.zeros_(model.net[0].bias)
    x = data.x.copy()
    x[0] = 0
    fit = KernelRegressor((tg.full_ntk if full else tg.trace_ntk)(model, trainable="net.0.weight")).fit(
        x, data.y[:, :1]
    )
    assert fit.predict(data.z).shape == (M, 1)
    model.gain[0] = 1.01
    with pytest.raises(tg.ModelError, match="k of the first training samples, by 0.02"):
        fit.predict(data.z)


def test_samples_of_another_width_are_refused(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tg.InputError, match=r"takes 5 features, x has 3: x is torch.float64 of shape \(\d+, 3\)"):
        KernelRegressor(kernel()).fit(data.x[:, :3], data.y)
    fit = KernelRegressor(kernel()).fit(data.x, data.y)
    assert fit.n_features_in_ == P
    monkeypatch.setattr("tangency.estimators.compute", None)  # before any work
    with pytest.raises(tg.InputError, match=r"X has 3 features, but KernelRegressor is expecting 5 features as input"):
        fit.predict(data.z[:, :3])


def test_several_inputs_have_no_number_of_features(data: Data) -> None:
    fit = KernelRegressor(kernel()).fit(data.x, data.y)
    assert not hasattr(fit.fit({"input": data.x}, data.y), "n_features_in_")
    assert fit.predict({"input": data.z}).shape == (M, 2)


def test_a_function_that_changes_is_refused(data: Data) -> None:
    model = mlp([P, 8]).double()

    def features(X: Any, Y: Any) -> Tensor:
        return (model(torch.as_tensor(X)) @ model(torch.as_tensor(Y)).T).detach()

    fit = KernelRegressor(features).fit(data.x, data.y)
    assert np.isfinite(fit.predict(data.z)).all()
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with pytest.raises(tg.ModelError, match="k of the first training samples"):
        fit.predict(data.z)


@pytest.mark.parametrize("given", [rbf_kernel, "module"])
@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_samples_may_be_changed_after_the_fit(data: Data, given: Any, kind: Any) -> None:
    """A fit keeps a copy."""
    x = kind(data.x.copy())
    fit = KernelRegressor(kernel() if given == "module" else given).fit(x, data.y)
    before = fit.predict(data.z)
    x *= 3
    assert np.array_equal(fit.predict(data.z), before)


def test_a_data_set_that_changes_is_refused(data: Data) -> None:
    x = torch.from_numpy(data.x.copy())
    items = tg.from_dataset(torch.utils.data.TensorDataset(x), 0)
    fit = KernelRegressor(kernel()).fit(items, data.y)
    np.testing.assert_allclose(fit.predict(data.z), KernelRegressor(kernel()).fit(data.x, data.y).predict(data.z))
    x[-1] += 1
    with pytest.raises(tg.ModelError, match="the training samples"):
        fit.predict(data.z)


def test_another_kernel_is_for_the_next_fit(data: Data) -> None:
    fit = KernelRegressor(kernel(16)).fit(data.x, data.y)
    before = fit.predict(data.z)
    fit.set_params(kernel=kernel(32))
    assert np.array_equal(fit.predict(data.z), before)
    want = KernelRegressor(kernel(32)).fit(data.x, data.y).predict(data.z)
    assert np.array_equal(fit.fit(data.x, data.y).predict(data.z), want)
