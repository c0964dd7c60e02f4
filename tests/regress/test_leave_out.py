"""Leave-one-out against the fits that it stands for: every one of them made, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tangency as tg
from tangency.linalg import spectrum, top
from tangency.linalg.factor import HeldFactor
from tangency.linalg.systems import Refined
from tangency.regress import (
    cross_validate,
    curvature,
    gaussian_process,
    inverse,
    leave_out,
    leave_out_features,
    leave_out_logistic,
    leave_out_logistic_features,
    logistic,
    logistic_features,
    newton,
    ridge,
)

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def product(phi: Tensor) -> Tensor:
    return torch.tensordot(phi, phi, dims=([-1], [-1]))


def part(K: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return K[i][:, :, j] if K.dim() == 4 else K[i][:, j]


def near(got: Tensor, want: Tensor, tolerance: float = 1e-8) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))


class Case:
    """A kernel with its features, targets, f₀, weights (some of them zero) and groups of several sizes."""

    def __init__(self, n: int = 14, p: int = 6, c: int | None = None, q: int | None = None, seed: int = 0) -> None:
        self.n, self.phi = n, normal(*([n, p] if c is None else [n, c, p]), seed=seed)
        self.K = product(self.phi)
        columns = [c] if c is not None else [] if q is None else [q]
        self.y, self.f0 = (normal(n, *columns, seed=seed + k) for k in (1, 2))
        self.w = normal(n, seed=seed + 3).abs() + 0.1
        self.w[[1, 4, 5]] = 0
        self.groups = torch.tensor([3, 3, 7, 0, 7, 0, 3, 9, 9, 0, 7, 11, 0, 7] * n)[:n]

    def options(self, shifted: bool, weighted: bool, grouped: bool) -> dict[str, Any]:
        return {
            "f0": self.f0 if shifted else None,
            "sample_weights": self.w if weighted else None,
            "groups": self.groups if grouped else None,
        }


def refits(K: Tensor, y: Tensor, reg: float, f0: Any = None, sample_weights: Any = None, groups: Any = None) -> Tensor:
    """Predictions of `ridge` without each group, each fit made."""
    labels = torch.arange(len(y)) if groups is None else groups
    w = torch.ones(len(y), dtype=F64) if sample_weights is None else sample_weights
    out = torch.empty_like(y)
    for g in labels.unique():
        o, i = (labels == g).nonzero()[:, 0], (labels != g).nonzero()[:, 0]
        begin = None if f0 is None else f0[i]
        fit = ridge(part(K, i, i), y[i], reg=reg, f0=begin, sample_weights=w[i])
        out[o] = fit.predict(part(K, o, i), None if f0 is None else f0[o])
    return out


KINDS: list[dict[str, Any]] = [{}, {"q": 2}, {"c": 3, "p": 50}, {"p": 30}]
BOTH = [False, True]


@pytest.mark.parametrize("grouped", BOTH)
@pytest.mark.parametrize("weighted", BOTH)
@pytest.mark.parametrize("shifted", BOTH)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.every(3)
def test_ridge_without_each_sample_is_that_fit(
    kind: dict[str, Any], shifted: bool, weighted: bool, grouped: bool, tmp_path: Path
) -> None:
    """By a factor in memory and on disk, by eigenpairs, and through the features."""
    case = Case(**kind)
    options = case.options(shifted, weighted, grouped)
    want = refits(case.K, case.y, 0.3, **options)
    left = leave_out(case.K, case.y, reg=0.3, **options)
    near(left.predictions, want)
    near(left.errors, case.y - want)
    assert left.residual < 1e-12
    assert left.solver == "Cholesky"
    rows = case.K.shape[: case.K.dim() // 2].numel()
    disk = leave_out(case.K, case.y, reg=0.3, memory=6 * 8 * rows * 4, scratch=tmp_path, **options)
    assert disk.solver == "Cholesky on disk"
    others = [disk, leave_out_features(case.phi, case.y, reg=0.3, **options)]
    if not weighted:
        others.append(leave_out(spectrum(case.K), case.y, reg=0.3, **options))
    for other in others:
        near(other.predictions, want)
        near(other.leverage, left.leverage)
        near(other.errors, case.y - other.predictions)
    # The leverage is how much a fit moves with its own target.
    if case.K.dim() != 4:
        moved = case.y.clone()
        moved[3] += 1
        fits = [ridge(case.K, y, reg=0.3, sample_weights=options["sample_weights"]).fitted for y in (moved, case.y)]
        near((fits[0] - fits[1])[3].reshape(-1)[:1], left.leverage[3:4])
    assert not weighted or float(left.leverage[1]) == 0


@settings(deadline=None, max_examples=25)
@given(
    st.integers(2, 12), st.integers(1, 15), st.sampled_from([None, 1, 3]), st.sampled_from([0.01, 1.0, 50.0]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_any_shape(n: int, p: int, c: int | None, reg: float, seed: int) -> None:
    phi = normal(*([n, p] if c is None else [n, c, p]), seed=seed)
    y, labels = normal(*phi.shape[:-1], seed=seed + 1), torch.arange(n) % max(2, n // 2)
    for groups in (None, labels):
        want = refits(product(phi), y, reg, groups=groups)
        near(leave_out(product(phi), y, reg=reg, groups=groups).predictions, want)
        near(leave_out_features(phi, y, reg=reg, groups=groups).predictions, want)


def test_many_columns_go_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of the inverse, panels of the factor and blocks of features that end anywhere change nothing."""
    case = Case(c=3, p=20)
    options = case.options(True, True, True)
    want = leave_out(case.K, case.y, reg=0.3, **options).predictions
    monkeypatch.setattr(inverse, "COLUMNS", 4)
    monkeypatch.setattr(leave_out_features.__globals__["_Rows"], "step", 5)
    near(leave_out(case.K, case.y, reg=0.3, **options).predictions, want)
    near(leave_out_features(case.phi, case.y, reg=0.3, **options).predictions, want)
    lower = torch.linalg.cholesky(product(normal(9, 9)))
    index = torch.tensor([7, 2, 3])
    got = HeldFactor(lower, panel=4).inverse_columns(index)
    near(got, torch.linalg.inv(lower)[2:, index])


def test_a_stored_gram_and_stored_features(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(6, 2).double(), normal(20, 6)
    k = tg.projected(tg.pseudo_ntk(model), dim=4)
    y, groups = normal(20, 2), [f"subject {i % 6}" for i in range(20)]
    stored = k.features(x, store=str(tmp_path / "features"))
    kernel = tg.trace_ntk(model)
    gram = tg.compute(kernel, x, store=str(tmp_path / "gram"))
    held = stored.tensor()
    for labels in (None, groups):
        near(
            leave_out(gram, y, reg=0.1, groups=labels).predictions,
            leave_out(gram.dense(), y, reg=0.1, groups=labels).predictions,
            1e-12,
        )
        near(
            leave_out_features(stored, y, reg=0.1, groups=labels).predictions,
            leave_out(held.double() @ held.double().T, y, reg=0.1, groups=labels).predictions,
        )


def test_it_agrees_with_cross_validate() -> None:
    case = Case(q=2)
    whole = spectrum(case.K)
    for reg in (0.1, 3.0):
        assert float(cross_validate(whole, case.y, reg).loo) == pytest.approx(
            float(leave_out(whole, case.y, reg=reg).errors.square().mean()), rel=1e-12
        )


def test_without_reg_where_k_can_be_inverted() -> None:
    case = Case(p=30)
    left = leave_out(case.K, case.y, reg=0)
    near(left.predictions, refits(case.K, case.y, 0))
    near(left.leverage, torch.ones(case.n, dtype=F64))
    near(leave_out(spectrum(case.K), case.y, reg=0).predictions, left.predictions)
    tall = Case(n=14, p=4)
    gone = torch.arange(1, 14)
    gamma = torch.linalg.lstsq(tall.phi[gone], tall.y[gone, None]).solution
    near(leave_out_features(tall.phi, tall.y, reg=0).predictions[:1], (tall.phi[:1] @ gamma)[:, 0])


def test_float32_and_lists() -> None:
    case = Case(q=2)
    left = leave_out(case.K.float(), case.y.float(), reg=1.0)
    assert left.predictions.dtype == torch.float32
    near(left.predictions.double(), leave_out(case.K, case.y, reg=1.0).predictions, 1e-4)
    near(
        leave_out(case.K.numpy(), case.y.tolist(), reg=1.0, groups=["a", "b"] * 7).predictions,
        leave_out(case.K, case.y, reg=1.0, groups=torch.arange(14) % 2).predictions,
    )


def test_margins() -> None:
    labels = torch.arange(15) % 3
    phi = normal(15, 5)
    left = leave_out(product(phi), F.one_hot(labels).double(), reg=0.1)
    for i in range(15):
        others = [float(left.predictions[i, c]) for c in range(3) if c != int(labels[i])]
        assert float(left.margins(labels)[i]) == pytest.approx(float(left.predictions[i, labels[i]]) - max(others))
    near(left.margins(labels.tolist()), left.margins(labels.numpy()))
    assert repr(left).startswith("LeftOut((15, 3) predictions, reg 0.1, mean square error ")


# Logistic regression.

LOGISTIC = [("two", 2, 3), ("few", 3, 3), ("many", 3, 12), ("full", 3, 6)]


def labelled(kind: str, q: int, p: int, n: int = 18) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, classes, f₀, weights."""
    phi = normal(*([n, q, p] if kind == "full" else [n, p]))
    w = normal(n, seed=3).abs() + 0.1
    w[4] = 0
    f0 = 0.3 * normal(n, *([] if kind == "two" else [q]), seed=2)
    return phi, torch.arange(n) % q, f0, w


@pytest.mark.parametrize("grouped", BOTH)
@pytest.mark.parametrize("bias", BOTH)
@pytest.mark.parametrize(("kind", "q", "p"), LOGISTIC)
@pytest.mark.every(5)
def test_logistic_without_each_sample(kind: str, q: int, p: int, bias: bool, grouped: bool) -> None:
    """All fits, made again; and one Newton step, by the Hessian that autograd gives."""
    phi, y, f0, w = labelled(kind, q, p)
    K, groups = product(phi), torch.arange(18) // 3 if grouped else torch.arange(18)
    options: dict[str, Any] = {"reg": 0.5, "f0": f0, "sample_weights": w, "bias": bias}
    exact = leave_out_logistic(K, y, groups=groups, exact=True, **options)
    steps = [
        leave_out_logistic(K, y, groups=groups, exact=False, **options),
        leave_out_logistic_features(phi, y, groups=groups, exact=False, **options),
    ]
    near(exact.fit.logits(K, f0), logistic(K, y, **options).logits(K, f0), 1e-12)
    for g in (0, 1, 4):
        o, i = (groups == g).nonzero()[:, 0], (groups != g).nonzero()[:, 0]
        some = {**options, "f0": f0[i], "sample_weights": w[i], "classes": q}
        fit = logistic(part(K, i, i), y[i], **some)
        near(exact.logits[o], fit.logits(part(K, o, i), f0[o]))
        near(exact.probabilities[o], fit.probabilities(part(K, o, i), f0[o]))
        want = newton_step(phi, y, f0, w, bias, o)
        for step in steps:
            near(step.probabilities[o], want)
    for step in steps:
        assert step.checked is not None
        off = (step.probabilities - exact.probabilities).abs().max()
        assert float(off) < 0.2  # of a step that leaves out a sixth of eighteen samples
        assert step.checked <= float(off) + 1e-9
    assert exact.exact
    assert exact.checked is None


def newton_step(phi: Tensor, y: Tensor, f0: Tensor, w: Tensor, bias: bool, out: Tensor) -> Tensor:
    """Probabilities after one Newton step from the fit to all, without some samples."""
    weights = w.clone()
    weights[out] = 0
    fit = logistic_features(phi, y, reg=0.5, f0=f0, sample_weights=w, bias=bias)
    theta = fit.model.coefficients.reshape(phi.shape[-1], *([] if phi.dim() == 3 else [-1]))
    at = torch.cat([theta.flatten(), fit.bias.reshape(-1)])

    def scores(v: Tensor) -> Tensor:
        z = f0.reshape(len(y), -1) + phi @ v[: theta.numel()].reshape(theta.shape)
        z = z + v[theta.numel() :] if bias else z
        return torch.cat([torch.zeros_like(z), z], 1) if z.shape[1] == 1 else z

    def loss(v: Tensor) -> Tensor:
        each = F.cross_entropy(scores(v), y, reduction="none")
        return (weights * each).sum() + 0.25 * v[: theta.numel()].square().sum()

    h, g = torch.func.hessian(loss)(at), torch.func.grad(loss)(at)
    moved = at - torch.linalg.pinv(h, hermitian=True, rtol=1e-12) @ g  # softmax does not see a shift of the biases
    return torch.softmax(scores(moved)[out], 1)


def test_logistic_margins_and_what_is_chosen() -> None:
    phi, y, _, _ = labelled("two", 2, 3, 30)
    left = leave_out_logistic(spectrum(product(phi)), y, reg=0.5)
    assert left.exact
    near(left.margins, left.logits * (2 * y - 1))
    near(left.probabilities[:, 1], torch.sigmoid(left.logits))
    assert "exact" in repr(left)
    three = leave_out_logistic(product(phi), F.one_hot(torch.arange(30) % 3).double(), reg=0.5)
    best = three.logits.gather(1, (torch.arange(30) % 3)[:, None])[:, 0]
    others = three.logits.scatter(1, (torch.arange(30) % 3)[:, None], -torch.inf).amax(1)
    near(three.margins, best - others)
    many = leave_out_logistic_features(normal(300, 2), torch.arange(300) % 2, reg=0.5)
    every = leave_out_logistic_features(normal(300, 2), torch.arange(300) % 2, reg=0.5, exact=True)
    assert not many.exact
    assert many.checked is not None
    near(many.probabilities, every.probabilities, 1e-3)  # two coefficients from 300 samples: a step is nearly all
    some = (many.probabilities - every.probabilities).abs().max()
    assert many.checked <= float(some) + 1e-9
    assert "one Newton step" in repr(many)


# Gaussian processes.


@pytest.mark.parametrize("grouped", BOTH)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_gaussian_process_without_each_sample(kind: dict[str, Any], grouped: bool) -> None:
    """Mean, variance and density of y by the process that is fitted to the others, or to the other groups."""
    case = Case(**kind)
    process = gaussian_process(case.K, case.y, noise=0.2, f0=case.f0)
    labels = case.groups if grouped else torch.arange(case.n)
    left = process.leave_out(groups=labels if grouped else None)
    full = case.K.dim() == 4
    for i in (0, 5, 13):
        o, r = torch.tensor([i]), (labels != labels[i]).nonzero()[:, 0]
        fit = gaussian_process(part(case.K, r, r), case.y[r], noise=0.2, f0=case.f0[r])
        posterior = fit.predict(part(case.K, o, r), part(case.K, o, o), case.f0[o])
        c = case.K.shape[1] if full else 1
        covariance = posterior.covariance.reshape(c, c) + 0.2 * torch.eye(c, dtype=F64)
        near(left.mean[o], posterior.mean)
        near(left.covariance[i].reshape(c, c), covariance)
        mean, y = (v.reshape(c, -1).T for v in (posterior.mean[0], case.y[i]))  # a column of y is a draw of its own
        density = torch.distributions.MultivariateNormal(mean, covariance).log_prob(y).sum()
        near(left.log_density[i], density)


# Refusals.

K = product(normal(8, 8))
Y = normal(8)
SINGULAR = product(normal(8, 3))
PHI = normal(8, 3)
TWO = torch.arange(8) % 2

REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: leave_out(K, Y, reg=-1), tg.InputError, "reg=-1; needed: a finite number, at least 0"),
    (lambda: leave_out(SINGULAR, Y, reg=0), tg.NotPositiveDefinite, "pivot 3 .sample 3.*larger reg"),
    (lambda: leave_out(spectrum(SINGULAR), Y, reg=0), tg.NotPositiveDefinite, "K has the eigenvalue.*larger reg"),
    (lambda: leave_out(top(K, 3), Y, reg=1), tg.InputError, "only 3 eigenpairs were given; needed: all"),
    (lambda: leave_out(spectrum(K), Y, reg=1, sample_weights=2.0), tg.InputError, "sample_weights= need the Gram"),
    (lambda: leave_out(K, Y[:5], reg=1), tg.InputError, r"8 rows and y has shape \(5,\)"),
    (lambda: leave_out(K, Y.log(), reg=1), tg.InputError, "is nan; needed: finite numbers"),
    (lambda: leave_out(K.log(), Y, reg=1), tg.InputError, "is nan; needed: finite numbers"),
    (lambda: leave_out(K, Y, reg=1, f0=Y[:2]), tg.InputError, r"f0 has shape \(2,\); needed: \(8,\)"),
    (lambda: leave_out(K, Y, reg=1, groups=[1, 2]), tg.InputError, r"groups have shape \(2,\).*each of the 8 samples"),
    (lambda: leave_out(K, Y, reg=1, groups=["a"] * 8), tg.InputError, "all 8 samples are of group a; .*two groups"),
    (lambda: leave_out(K, Y, reg=1, groups=[1.5, "a"] * 4), tg.InputError, "groups hold 1.5; needed: .*or strings"),
    (lambda: leave_out(K, Y, reg=1, groups=[[1], [1, 2]] * 4), tg.InputError, r"groups hold \[1\]; needed"),
    (lambda: leave_out(K, Y, reg=1, groups=Y), tg.InputError, "groups are float64; needed: .*integers or strings"),
    (lambda: leave_out(K, Y, reg=1, memory=900), tg.MemoryBudgetError, "factor of a 8 x 8 matrix.*scratch="),
    (lambda: leave_out(K, Y, reg=1, scratch="/nowhere"), tg.InputError, "scratch='/nowhere'; needed: a folder"),
    (lambda: leave_out(K, Y, reg=1).margins(TWO), tg.InputError, r"shape \(8,\); margins need a column for each class"),
    (
        lambda: leave_out(K, normal(8, 2), reg=1).margins(Y),
        tg.InputError,
        r"labels are torch.float64 of shape \(8,\); needed: a class for each sample, \[8\], as integers",
    ),
    (
        lambda: leave_out(K, normal(8, 2), reg=1).margins(TWO + 1),
        tg.InputError,
        "labels are from 1 to 2; needed: from 0 to 1",
    ),
    (lambda: leave_out_features(Y, Y, reg=1), tg.InputError, r"features have shape \(8,\).*needed: real \[n, p\]"),
    (lambda: leave_out_features(PHI.log(), Y, reg=1), tg.InputError, r"features\[0:8\].*is nan; needed: finite"),
    (lambda: leave_out_features(PHI, Y, reg=-1), tg.InputError, "reg=-1; needed"),
    (lambda: leave_out_features(PHI, Y, reg=1, groups=[0]), tg.InputError, "groups have shape"),
    (
        lambda: leave_out_features(PHI[:, [0, 1, 1]], Y, reg=0),
        tg.NotPositiveDefinite,
        "the 3 features depend on each other beyond rounding.*larger reg",
    ),
    (
        lambda: leave_out_features(torch.eye(8, dtype=F64)[:, :3], Y, reg=0),
        tg.NotPositiveDefinite,
        "once one of the groups .or samples. is left out",
    ),
    (lambda: gaussian_process(K, Y, noise=1).leave_out(groups=[0]), tg.InputError, "groups have shape"),
    (lambda: leave_out_logistic(K, TWO, reg=0), tg.InputError, "reg=0; needed: above 0"),
    (lambda: leave_out_logistic(K, TWO, reg=-1), tg.InputError, "reg=-1; needed"),
    (lambda: leave_out_logistic(K, TWO, reg=1, groups=[0]), tg.InputError, "groups have shape"),
    (
        lambda: leave_out_logistic(K, TWO, reg=1, groups=TWO, bias=True),
        tg.InputError,
        "class 0, 1 .of 2. has samples in one group only.*bias=False",
    ),
    (lambda: leave_out_logistic_features(PHI, TWO, reg=0), tg.InputError, "reg=0; needed: above 0"),
    (
        lambda: leave_out_logistic(K, TWO, reg=1e-3, exact=True, max_steps=1, tol=1e-1),
        tg.DidNotConverge,
        "Newton's method reached",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refusals(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_answers_that_are_not_exact_enough_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = newton.Objective.newton

    def hurried(self: newton.Objective, tol: float, steps: int, **options: Any) -> newton.Answer:
        return original(self, 1e-30, 1, **options) if "start" in options else original(self, tol, steps)

    monkeypatch.setattr(newton.Objective, "newton", hurried)
    with pytest.raises(tg.DidNotConverge, match="without sample 0, Newton's method reached .* larger reg="):
        leave_out_logistic(K, TWO, reg=1, exact=True)
    monkeypatch.setattr(inverse, "refined", lambda gram, y, *_: Refined(y, 1, 0.5))
    with pytest.raises(
        tg.DidNotConverge, match="Cholesky left the relative residual 5.00e-01; needed: 1e-06"
    ) as caught:
        leave_out(K, Y, reg=1)
    assert caught.value.solution.residual == 0.5


def test_a_hessian_too_large_or_not_positive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tg.NotPositiveDefinite, match="Hessian is not positive definite beyond rounding with reg=1e-20"):
        curvature._factored(-torch.eye(2), 1e-20)
    monkeypatch.setattr(curvature.memory_of, "free_memory", lambda device: 100)
    with pytest.raises(tg.MemoryBudgetError, match="the Hessian of 8 samples and 1 logit.s. takes .* larger cutoff="):
        leave_out_logistic(K, TWO, reg=1, exact=False)
