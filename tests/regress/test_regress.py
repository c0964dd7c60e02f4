"""Fits against feature space, numpy and scikit-learn: each by another road than the one that the code takes."""

import itertools
import json
import math
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import reference
import scipy.special
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from zoo import ZOO, build

import tangency as tg
from tangency.linalg import CG, Cholesky, Eigh, spectrum, top
from tangency.models import mlp
from tangency.regress import (
    cross_validate,
    gaussian_process,
    least_squares,
    logistic,
    logistic_features,
    ridge,
    ridgeless,
    risk_study,
)

F32, F64 = torch.float32, torch.float64
KERNELS = {"trace": tg.trace_ntk, "pseudo": tg.pseudo_ntk, "full": tg.full_ntk, "conjugate": tg.conjugate_kernel}


def near(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    got, want = (np.asarray(v, dtype=np.float64) for v in (got, want))
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), 1e-300)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


@dataclass
class Data:
    """Samples x and z of a kernel with its features, and targets; `full` kernels have the outputs on both sides."""

    phi: Tensor  # [n, p] or [n, c, p]
    phi_z: Tensor

    @property
    def full(self) -> bool:
        return self.phi.dim() == 3

    @property
    def k(self) -> Tensor:
        return self._product(self.phi, self.phi)

    @property
    def cross(self) -> Tensor:
        return self._product(self.phi_z, self.phi)

    @property
    def own(self) -> Tensor:
        return self._product(self.phi_z, self.phi_z)

    @staticmethod
    def _product(a: Tensor, b: Tensor) -> Tensor:
        return torch.tensordot(a, b, dims=([-1], [-1]))

    def targets(self, q: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """y, f0 and f0 of the new samples; q columns."""
        columns = [] if self.full or q is None else [q]
        n, m = self.phi.shape[:-1], self.phi_z.shape[:-1]
        return normal(*n, *columns), normal(*n, *columns), normal(*m, *columns)

    def fit(self, t: Tensor, reg: float, weights: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
        """γ of weighted ridge regression on the features by its normal equations, and φ(z)·γ."""
        phi, p = self.phi.reshape(-1, self.phi.shape[-1]).numpy(), self.phi.shape[-1]
        c = self.phi.shape[1] if self.full else 1
        w = np.ones(len(self.phi)) if weights is None else weights.numpy()
        weighted = phi.T * np.repeat(w, c)
        right = t.reshape(len(phi), -1).numpy()
        gamma = np.linalg.solve(weighted @ phi + reg * np.eye(p), weighted @ right)
        ahead = self.phi_z.reshape(-1, p).numpy() @ gamma
        shape = self.phi_z.shape[:-1] if self.full else (len(self.phi_z), *t.shape[1:])
        return gamma, ahead.reshape(shape)


def features(kernel: str) -> Data:
    torch.manual_seed(2)
    model = mlp([3, 6, 5, 2], nn.Tanh).double()
    k = KERNELS[kernel](model)
    x, z = normal(13, 3), normal(4, 3)
    return Data(k.features(x).detach(), k.features(z).detach())


def some(n: int = 12, p: int = 30, m: int = 5, c: int | None = None) -> Data:
    return Data(*(normal(k, *([] if c is None else [c]), p) / p**0.5 for k in (n, m)))


def expanded(k: Tensor, c: int) -> Tensor:
    """K⊗I as a full kernel [n, c, m, c]."""
    return torch.einsum("nm,cd->ncmd", k, torch.eye(c, dtype=k.dtype))


# Φ with Φ Φᵀ = K.

CASES = [
    "mlp_relu", "one_output", "shaped_outputs", "two_layer_ntk", "flat_positions_major", "conv_grouped", "layer_norm",
    "tied_transpose", "embedding_bag", "lstm", "attention_cross",
]  # fmt: skip
WITHOUT_LAST_LAYER = ("flat_positions_major", "attention_cross")  # whose input has other things in its first dimension


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning", "ignore:.*batching rule.*:UserWarning")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_kernels_are_products_of_their_feature_matrices(name: str) -> None:
    """Also between two batches: the columns mean the same in each."""
    model, every = build(next(case for case in ZOO if case.name == name), 5)
    x, z = tg._base.tree.take(every, slice(0, 3)), tg._base.tree.take(every, slice(2, 5))
    for kind, make in KERNELS.items():
        if kind == "conjugate" and name in WITHOUT_LAST_LAYER:
            continue
        k = make(model)
        data = Data(k.features(x).detach(), k.features(z).detach())
        assert data.full == (kind == "full")
        near(data.k, k(x).detach(), 1e-11)
        near(data.cross, k(z, x).detach(), 1e-11)
    j = reference.jacobians(model, every)
    phi = torch.cat([v.flatten(2) for v in j.values()], 2)
    got = tg.full_ntk(model).features(every)
    assert got.shape[:2] == phi.shape[:2]
    near(got.detach().norm(dim=(1, 2)), phi.norm(dim=(1, 2)), 1e-11)


# Ridge.


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("q", [None, 1, 3])
@pytest.mark.parametrize("options", ["", "f0", "weights", "f0 weights", "f0 weights zero"])
@pytest.mark.every(7)
def test_ridge_is_ridge_on_the_features(kernel: str, q: int | None, options: str) -> None:
    data = features(kernel)
    y, f0, f0_z = data.targets(q)
    weights = torch.rand(13, dtype=F64) + 0.1 if "weights" in options else None
    if "zero" in options:
        weights[[2, 7]] = 0.0
    shifted = "f0" in options
    gamma, ahead = data.fit(y - f0 if shifted else y, 0.3, weights)
    given = {"sample_weights": weights, **({"f0": f0} if shifted else {})}
    for fit, cross in (
        (ridge(data.k, y, reg=0.3, **given), data.cross),
        (ridge(data.k, y, reg=0.3, **given, solver=CG(), tol=1e-12), data.cross),
        (ridge(data.k, y, reg=0.3, **given, solver=Eigh()), data.cross),
        (least_squares(data.phi, y, reg=0.3, **given), data.phi_z),
    ):
        near(fit.predict(cross, f0_z if shifted else None), ahead + (f0_z.numpy() if shifted else 0))
        assert fit.norm == pytest.approx(np.linalg.norm(gamma), rel=1e-9)
        inside = data.phi.reshape(-1, data.phi.shape[-1]).numpy() @ gamma
        near(fit.fitted, inside.reshape(y.shape) + (f0.numpy() if shifted else 0))
        assert fit.fitted.shape == y.shape
        assert fit.shifted == shifted
        assert fit.reg == 0.3
    near(least_squares(data.phi, y, reg=0.3, **given).coefficients.reshape(gamma.shape), gamma)


@pytest.mark.parametrize(("c", "q"), [(None, None), (None, 2), (2, None)])
def test_fitting_with_f0_is_fitting_the_residual(c: int | None, q: int | None) -> None:
    data = some(c=c)
    y, f0, f0_z = data.targets(q)
    w = torch.rand(12, dtype=F64) + 0.1
    for f in (
        lambda y, **o: ridge(data.k, y, reg=0.1, **o),
        lambda y, **o: ridge(data.k, y, reg=0.1, sample_weights=w, **o),
        lambda y, **o: ridgeless(data.k, y, **o),
        lambda y, **o: gaussian_process(data.k, y, noise=0.1, **o).model,
    ):
        shifted, rest = f(y, f0=f0), f(y - f0)
        near(shifted.predict(data.cross, f0_z), f0_z + rest.predict(data.cross), 1e-12)
        assert shifted.norm == pytest.approx(rest.norm)
        zero = f(y, f0=torch.zeros_like(y))
        near(zero.predict(data.cross, torch.zeros_like(f0_z)), f(y).predict(data.cross), 1e-12)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=9).filter(any), st.integers(0, 99), st.sampled_from([None, 2]))
def test_integer_weights_repeat_rows_and_zeros_remove_them(times: list[int], seed: int, c: int | None) -> None:
    torch.manual_seed(seed)
    data = some(len(times), c=c)
    y, f0, f0_z = data.targets()
    w = torch.tensor(times)
    rows = torch.arange(len(times)).repeat_interleave(w)
    repeated = Data(data.phi[rows], data.phi_z)
    for f, by_features in (
        (lambda d, y, f0, w: ridge(d.k, y, reg=0.2, f0=f0, sample_weights=w), False),
        (lambda d, y, f0, w: ridgeless(d.k, y, f0=f0, sample_weights=w, cutoff=1e-10), False),
        (lambda d, y, f0, w: least_squares(d.phi, y, f0=f0, sample_weights=w), True),
    ):
        one, other = f(data, y, f0, w), f(repeated, y[rows], f0[rows], None)
        crosses = (data.phi_z, data.phi_z) if by_features else (data.cross, repeated.cross)
        near(one.predict(crosses[0], f0_z), other.predict(crosses[1], f0_z), 1e-7)
        assert one.norm == pytest.approx(other.norm, rel=1e-7)
    a = ridge(data.k, y, reg=0.2, sample_weights=w).coefficients
    assert bool((a[w == 0] == 0).all())


@pytest.mark.parametrize("k", [F32, F64])
@pytest.mark.parametrize("constant", [4.0, 0.3])
def test_constant_weights_scale_reg(k: torch.dtype, constant: float) -> None:
    data = some()
    y = data.targets()[0]
    K = data.k.to(k)
    want = ridge(K, y, reg=0.1 / constant).coefficients
    for weights in (constant, torch.full((12,), constant), np.full(12, constant), [constant] * 12):
        near(
            ridge(K, y, reg=0.1, sample_weights=weights).coefficients,
            want,
            1e-11 if isinstance(weights, float) else 1e-6,
        )
    near(ridge(K, y, reg=0.1, sample_weights=torch.full((12,), constant, dtype=F64)).coefficients, want, 1e-11)


def test_weights_are_exact_in_the_wider_type() -> None:
    """A float32 Gram with float64 targets: the work is in float64, and so are the weights."""
    data = some()
    K, y, w = data.k.float(), data.targets()[0], torch.rand(12, dtype=F64) + 0.1
    want = np.linalg.solve(K.double().numpy() + np.diag(0.01 / w.numpy()), y.numpy())
    near(ridge(K, y, reg=0.01, sample_weights=w).coefficients, want, 1e-11)


def test_k_times_identity_is_a_full_kernel() -> None:
    data, c = some(9), 3
    y, f0, f0_z = data.targets(c)
    full, cross, w = expanded(data.k, c), expanded(data.cross, c), torch.rand(9, dtype=F64) + 0.1
    for f in (
        lambda K: ridge(K, y, reg=0.2, f0=f0, sample_weights=w),
        lambda K: ridgeless(K, y, f0=f0, sample_weights=w),
        lambda K: gaussian_process(K, y, noise=0.2, f0=f0).model,
    ):
        near(f(full).predict(cross, f0_z), f(data.k).predict(data.cross, f0_z))
        assert f(full).norm == pytest.approx(f(data.k).norm)
    gps = gaussian_process(full, y, noise=0.2), gaussian_process(data.k, y, noise=0.2)
    assert gps[0].log_likelihood == pytest.approx(gps[1].log_likelihood)
    risks = [cross_validate(K, y, [0.01, 0.1], f0=f0) for K in (full, data.k)]
    for name in ("train", "gcv", "loo"):
        near(getattr(risks[0], name), getattr(risks[1], name))
    near(risks[0].degrees, c * risks[1].degrees)


def test_grams_on_disk_and_in_memory_fit_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, z = mlp([3, 8, 2], nn.Tanh).double(), normal(11, 3), normal(4, 3)
    w = torch.rand(11, dtype=F64)
    w[3] = 0.0
    for kernel, y in ((tg.trace_ntk(model), normal(11)), (tg.full_ntk(model), normal(11, 2))):
        store = str(tmp_path / kernel.name)
        disk = tg.compute(kernel, x, store=store, tile=4, progress=False)
        ahead = tg.compute(kernel, z, x, store=store + "-z", tile=4, progress=False)
        for f in (
            lambda K, y=y: ridge(K, y, reg=0.1, sample_weights=w),
            lambda K, y=y: ridge(K, y, reg=0.1, sample_weights=w, solver=CG(), tol=1e-11),
            lambda K, y=y: ridgeless(K, y, sample_weights=w),
            lambda K, y=y: gaussian_process(K, y, noise=0.1).model,
        ):
            near(f(disk).predict(ahead), f(kernel(x)).predict(kernel(z, x)), 1e-8)
        norms = kernel.diag(x).sqrt()
        cosine = kernel(x) / norms.reshape(*y.shape, *[1] * y.dim()) / norms
        near(
            ridge(disk.cosine(), y, reg=0.1, sample_weights=w).coefficients,
            ridge(cosine, y, reg=0.1, sample_weights=w).coefficients,
        )
        numbers = torch.arange(11) % 2
        near(logistic(disk, numbers, reg=0.1).logits(ahead), logistic(kernel(x), numbers, reg=0.1).logits(kernel(z, x)))


# Without reg.


@given(n=st.integers(2, 12), p=st.integers(1, 16), seed=st.integers(0, 99), c=st.sampled_from([None, 2]))
def test_ridgeless_is_the_pseudo_inverse(n: int, p: int, seed: int, c: int | None) -> None:
    """(13), (14) of Qadeer et al.: f(z) = yᵀ W^½ (W^½ K W^½)⁺ W^½ k(z), also for K of any rank."""
    torch.manual_seed(seed)
    data = some(n, p, c=c)
    y, f0, f0_z = data.targets()
    w = torch.rand(n, dtype=F64) + 0.1
    root = np.diag(np.repeat(w.numpy() ** 0.5, c or 1))
    k = data.k.reshape(len(root), -1).numpy()
    middle = np.linalg.pinv(root @ k @ root, rcond=1e-8, hermitian=True)
    cross = data.cross.reshape(-1, len(root)).numpy()
    want = cross @ (root @ (middle @ (root @ (y - f0).numpy().flatten())))
    fit = ridgeless(data.k, y, f0=f0, sample_weights=w, cutoff=1e-8)
    near(fit.predict(data.cross, f0_z) - f0_z, want.reshape(f0_z.shape), 1e-6)
    assert fit.rank == np.linalg.matrix_rank(root @ k @ root, tol=1e-8 * np.linalg.norm(root @ k @ root, 2))
    gamma, *_ = np.linalg.lstsq(
        root @ data.phi.reshape(len(root), -1).numpy(), root @ (y - f0).numpy().flatten(), rcond=1e-4
    )
    assert fit.norm == pytest.approx(np.linalg.norm(gamma), rel=1e-5)  # of all answers, that of least norm
    if p >= n * (c or 1) and fit.rank == n * (c or 1):
        near(fit.fitted, y, 1e-5)  # interpolates


def test_ridgeless_is_the_limit_of_ridge() -> None:
    """Also where K cannot be inverted; the error falls as reg does."""
    for data in (some(8, 20), some(12, 5)):
        y, w = data.targets()[0], torch.rand(len(data.phi), dtype=F64) + 0.1
        limit = ridgeless(data.k, y, sample_weights=w).predict(data.cross)
        off = [
            float((ridge(data.k, y, sample_weights=w, reg=reg).predict(data.cross) - limit).norm())
            for reg in (1e-3, 1e-4, 1e-5, 1e-6)
        ]
        assert off[-1] < 1e-4 * float(limit.norm())
        for before, after in itertools.pairwise(off):
            assert 5 < before / after < 20


def test_ridgeless_interpolates_what_has_full_rank() -> None:
    data = some(10, 40)
    y = data.targets(2)[0]
    fit = ridgeless(data.k, y)
    near(fit.fitted, y, 1e-10)
    assert fit.rank == 10
    near(fit.coefficients, ridge(data.k, y, reg=0.0).coefficients, 1e-9)
    with pytest.raises(tg.NotPositiveDefinite):
        ridge(some(12, 5).k, y=normal(12), reg=0.0)


@pytest.mark.parametrize("cutoff", [None, 1e-4, 1e-2])
def test_the_cutoff_is_relative_to_the_largest_eigenvalue(cutoff: float | None) -> None:
    q = torch.linalg.qr(normal(8, 8)).Q
    values = torch.tensor([1e3, 1e2, 1.0, 0.5, 1e-3, 1e-6, 0.0, 0.0], dtype=F64)
    K, y = (q * values) @ q.T, normal(8)
    fit = ridgeless(K, y, cutoff=cutoff)
    limit = 8 * np.finfo(float).eps if cutoff is None else cutoff
    near(fit.coefficients, np.linalg.pinv(K.numpy(), rcond=limit, hermitian=True) @ y.numpy(), 1e-6)
    assert fit.cutoff == pytest.approx(1e3 * limit)
    assert fit.rank == int((values > 1e3 * limit).sum())


def test_ridgeless_says_how_exact_it_is() -> None:
    """Its residual is ‖K a − P y‖ / ‖P y‖, P onto the eigenvectors that were kept: not the error of these vectors."""
    t = np.linspace(0, 1, 40)
    K, y = torch.from_numpy(np.exp(-5 * (t[:, None] - t) ** 2)), torch.from_numpy(np.sin(5 * t))
    fit = ridgeless(K, y)
    v = spectrum(K).vectors[:, : fit.rank].numpy()
    reached = v @ (v.T @ y.numpy())
    off = K.numpy().astype(np.longdouble) @ fit.coefficients.numpy() - reached
    want = float(np.linalg.norm(off.astype(float)) / np.linalg.norm(reached))
    assert want / 10 <= fit.residual <= 10 * want


def test_a_spectrum_will_do() -> None:
    data = some(12, 7)
    y, f0, f0_z = data.targets(2)
    whole, most = spectrum(data.k), top(data.k, 4)
    near(ridgeless(whole, y, f0=f0).predict(data.cross, f0_z), ridgeless(data.k, y, f0=f0).predict(data.cross, f0_z))
    near(ridgeless(whole, y).fitted, ridgeless(data.k, y).fitted)
    four = ridgeless(most, y)
    values, vectors = np.linalg.eigh(data.k.numpy())
    u = vectors[:, -4:]
    near(four.coefficients, u @ ((u.T @ y.numpy()) / values[-4:, None]), 1e-6)
    near(four.fitted, u @ (u.T @ y.numpy()), 1e-6)
    assert four.rank == 4
    for a, b in zip(*(cross_validate(k, y, [0.1, 1.0]).__dict__.values() for k in (whole, data.k)), strict=True):
        near(a, b)
    labels = torch.arange(12) % 3
    near(logistic(whole, labels, reg=0.1).logits(data.cross), logistic(data.k, labels, reg=0.1).logits(data.cross))


def test_a_float32_spectrum_with_float64_targets() -> None:
    data = some(12, 30)
    y, whole = normal(12), spectrum(data.k.float())
    near(ridgeless(whole, y).coefficients, ridgeless(data.k, y).coefficients, 1e-3)
    near(cross_validate(whole, y, [0.1]).loo, cross_validate(data.k, y, [0.1]).loo, 1e-3)


def test_float32_kernels_of_low_rank() -> None:
    """Rounding of a float32 Gram is that of float32, also if targets are float64 (as numpy's are) or classes."""
    x = torch.randn(60, 3)
    K, y, labels = x @ x.T, normal(60), (x[:, 0] + 0.5 * torch.randn(60) > 0).long()
    exact = x.double() @ x.double().T
    assert ridgeless(K, y.float()).rank == 3
    fit = logistic(K, labels, reg=0.5)
    near(fit.logits(exact), logistic(exact, labels, reg=0.5).logits(exact), 1e-4)
    fit = ridgeless(K, y)
    assert fit.rank == 3
    near(fit.fitted, ridgeless(exact, y).fitted, 1e-4)


# Through the features.


@given(
    n=st.integers(1, 12),
    p=st.integers(1, 12),
    rank=st.integers(1, 12),
    seed=st.integers(0, 99),
    c=st.sampled_from([None, 2]),
    reg=st.sampled_from([0.0, 0.1]),
)
def test_least_squares_is_numpys(n: int, p: int, rank: int, seed: int, c: int | None, reg: float) -> None:
    torch.manual_seed(seed)
    sides = [n] if c is None else [n, c]
    phi = normal(*sides, rank) @ normal(rank, p)
    y, f0, w = normal(*sides), normal(*sides), torch.rand(n, dtype=F64) + 0.1
    root = np.repeat(w.numpy() ** 0.5, c or 1)[:, None]
    a, t = root * phi.reshape(-1, p).numpy(), root[:, 0] * (y - f0).numpy().flatten()
    # Ridge is least squares with √reg·I below.
    a, t = (a, t) if reg == 0 else (np.vstack([a, reg**0.5 * np.eye(p)]), np.concatenate([t, np.zeros(p)]))
    want, _, found, _ = np.linalg.lstsq(a, t, rcond=1e-10)
    fit = least_squares(phi, y, reg=reg, f0=f0, sample_weights=w, cutoff=1e-10)
    near(fit.coefficients, want, 1e-6)
    assert fit.norm == pytest.approx(np.linalg.norm(want), rel=1e-6)
    near(fit.predict(phi, f0), fit.fitted, 1e-12)
    assert fit.rank == (found if reg == 0 else None)
    assert fit.residual < 1e-6


def test_least_squares_measures_its_normal_equations() -> None:
    phi, y = normal(20, 6), normal(20)
    rough = least_squares(phi, y, cutoff=0.9)
    assert 0 < rough.rank < 6
    gamma = rough.coefficients
    want = float((phi.T @ (phi @ gamma - y)).norm() / (phi.T @ y).norm())
    assert rough.residual == pytest.approx(want, rel=1e-6)


def test_features_are_better_conditioned_than_their_gram() -> None:
    """Qadeer et al., App. B and Fig. 3: f₁ on [−1, 1], weights (31), N = 200, M = 600, three layers of 128."""

    def grid(n: int) -> tuple[Tensor, Tensor]:
        weights = torch.full((n + 1,), 2 / n, dtype=F64)
        weights[[0, -1]] /= 2
        return torch.linspace(-1, 1, n + 1, dtype=F64)[:, None], weights

    def f(x: Tensor) -> Tensor:
        return torch.exp(torch.sin(2 * torch.pi * x[:, 0]))

    torch.manual_seed(0)
    model = mlp([1, 128, 128, 128, 1], nn.Tanh).double()
    (x, w), (z, v) = grid(200), grid(600)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(300):  # a network at its start has features that are all but straight lines
        optimizer.zero_grad()
        (w * (model(x)[:, 0] - f(x)) ** 2).sum().backward()
        optimizer.step()
    ck = tg.conjugate_kernel(model)
    phi, phi_z = ck.features(x).detach(), ck.features(z).detach()
    assert phi.shape == (201, 129)
    through = least_squares(phi, f(x), sample_weights=w).predict(phi_z)
    gram = ridgeless(ck(x).detach(), f(x), sample_weights=w).predict(ck(z, x).detach())
    errors = [float((v * (got - f(z)) ** 2).sum().sqrt()) for got in (through, gram)]
    assert errors[0] * 10 <= errors[1], errors
    assert errors[1] < 1e-2, errors


# Gaussian processes.


@pytest.mark.parametrize("kernel", [RBF(0.8), DotProduct(1.0)])
@pytest.mark.parametrize("q", [None, 2])
def test_gaussian_processes_are_scikit_learns(kernel: Any, q: int | None) -> None:
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((15, 3)), rng.standard_normal((6, 3))
    y = rng.standard_normal((15,) if q is None else (15, q))
    theirs = GaussianProcessRegressor(kernel, alpha=0.2, optimizer=None).fit(x, y)
    ours = gaussian_process(kernel(x), y, noise=0.2)
    assert ours.log_likelihood == pytest.approx(theirs.log_marginal_likelihood_value_, rel=1e-10)
    mean, std = theirs.predict(z, return_std=True)
    _, covariance = theirs.predict(z, return_cov=True)
    by_diag = ours.predict(kernel(z, x), kernel.diag(z))
    whole = ours.predict(kernel(z, x), kernel(z))
    each = (lambda v: v) if q is None else (lambda v: v[..., 0])
    for got in (by_diag, whole):
        near(got.mean, mean, 1e-10)
    near(by_diag.covariance, each(std) ** 2, 1e-10)
    near(whole.covariance, each(covariance), 1e-10)
    near(ours.model.coefficients, ridge(kernel(x), y, reg=0.2).coefficients, 1e-11)
    near(ours.factor @ ours.factor.T, kernel(x) + 0.2 * np.eye(15), 1e-12)
    assert ours.model.residual < 1e-12
    assert gaussian_process(kernel(x), 1e6 * y, noise=0.2).model.residual < 1e-12  # relative to the targets
    assert ours.noise == 0.2


@given(n=st.integers(1, 10), noise=st.floats(1e-8, 10), seed=st.integers(0, 99), c=st.sampled_from([None, 2]))
def test_variance_lies_between_zero_and_the_prior(n: int, noise: float, seed: int, c: int | None) -> None:
    torch.manual_seed(seed)
    data = some(n, 4, c=c)
    both = Data(data.phi, torch.cat([data.phi_z, data.phi]))  # on the training samples, too
    side = both.phi_z.shape[:-1]
    prior = both.own.reshape(side.numel(), -1).diagonal().reshape(side)
    gp = gaussian_process(both.k, normal(*both.phi.shape[:-1]), noise=noise)
    variance = gp.predict(both.cross, prior).covariance
    assert variance.shape == side
    assert bool((variance >= 0).all())
    assert bool((variance <= prior + 1e-12).all())
    covariance = gp.predict(both.cross, both.own).covariance
    flat = covariance.reshape(side.numel(), -1)
    near(flat.diagonal().reshape(side), variance, 1e-6)
    assert float(torch.linalg.eigvalsh((flat + flat.T) / 2)[0]) > -1e-8


def test_variance_without_noise_is_zero_on_the_training_samples() -> None:
    """Never below, whatever the rounding."""
    x = torch.linspace(0, 20, 40, dtype=F64)
    k = torch.exp(-((x[:, None] - x) ** 2))
    gp = gaussian_process(k, normal(40), noise=0.0)
    variance = gp.predict(k, k.diagonal()).covariance
    assert float(variance.min()) >= 0
    assert float(variance.max()) < 1e-10


def test_a_gaussian_process_of_a_full_kernel_is_bayesian_linear_regression() -> None:
    """In weight space: γ ~ N(0, I), A = ΦᵀΦ/noise + I, mean φ A⁻¹Φᵀy/noise, covariance φ A⁻¹ φᵀ."""
    data = some(6, 9, c=2)
    y, f0, f0_z = data.targets()
    phi, ahead = data.phi.reshape(12, 9).numpy(), data.phi_z.reshape(10, 9).numpy()
    inverse = np.linalg.inv(phi.T @ phi / 0.3 + np.eye(9))
    gp = gaussian_process(data.k, y, noise=0.3, f0=f0)
    got = gp.predict(data.cross, data.own, f0_z)
    t = (y - f0).numpy().flatten()
    near(got.mean - f0_z, (ahead @ inverse @ phi.T @ t / 0.3).reshape(5, 2), 1e-10)
    near(got.covariance, (ahead @ inverse @ ahead.T).reshape(5, 2, 5, 2), 1e-10)
    both = phi @ phi.T + 0.3 * np.eye(12)
    want = -0.5 * (t @ np.linalg.solve(both, t) + np.linalg.slogdet(both)[1] + 12 * math.log(2 * math.pi))
    assert gp.log_likelihood == pytest.approx(want, rel=1e-11)


def test_kernels_diagonal_is_the_prior() -> None:
    torch.manual_seed(0)
    model, x, z = mlp([3, 8, 2], nn.Tanh).double(), normal(7, 3), normal(4, 3)
    for kernel, y in ((tg.trace_ntk(model), normal(7)), (tg.full_ntk(model), normal(7, 2))):
        gp = gaussian_process(kernel(x), y, noise=0.1)
        by_diag, whole = (gp.predict(kernel(z, x), prior) for prior in (kernel.diag(z), tg.compute(kernel, z)))
        flat = whole.covariance.reshape(by_diag.covariance.numel(), -1)
        near(flat.diagonal().reshape(by_diag.covariance.shape), by_diag.covariance, 1e-9)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("scale", [0.01, 0.0])
def test_the_prior_of_another_kernel_is_refused(whole: bool, scale: float) -> None:
    """What cross explains of it is more than there is: a variance below zero."""
    data = some(8, 20)
    gp = gaussian_process(data.k, normal(8), noise=0.01)
    with pytest.raises(tg.InputError, match=r"needed: k\(z, z\) of the same kernel"):
        gp.predict(data.cross, scale * (data.own if whole else data.own.diagonal()))


def test_priors_that_do_not_fit_are_refused() -> None:
    data = some(8, 20)
    gp = gaussian_process(data.k, normal(8), noise=0.01)
    for shape in [(4,), (5, 4), (8,), (5, 1), (5, 5, 5), ()]:
        with pytest.raises(tg.InputError, match="the prior has shape .*; needed: .*5.* or .*5, 5"):
            gp.predict(data.cross, torch.ones(shape, dtype=F64))
    with pytest.raises(tg.InputError, match="needed: new samples by training samples"):
        gp.predict(data.cross[:, 1:], data.own)
    with pytest.raises(tg.InputError, match="the Gram itself, not its spectrum"):
        gaussian_process(spectrum(data.k), normal(8), noise=0.1)
    with pytest.raises(tg.InputError, match="noise=-1; needed"):
        gaussian_process(data.k, normal(8), noise=-1.0)
    twice = torch.cat([data.phi, data.phi[2:3]])
    with pytest.raises(tg.NotPositiveDefinite) as e:
        gaussian_process(twice @ twice.T, normal(9), noise=0.0)
    assert e.value.pivot == 8


# Predicted risk.


@pytest.mark.parametrize("form", ["one", "columns", "full"])
@pytest.mark.parametrize("shifted", [False, True])
def test_leave_one_out_is_leaving_one_out(form: str, shifted: bool) -> None:
    """By n fits without one sample each (with all its outputs); GCV and degrees by the hat matrix itself."""
    data = some(9, 14, c=2 if form == "full" else None)
    y, f0, _ = data.targets(3 if form == "columns" else None)
    begin = f0 if shifted else torch.zeros_like(y)
    regs = [0.01, 0.3, 2.0]
    risks = cross_validate(data.k, y, regs, f0=f0 if shifted else None)
    near(risks.regs, regs)
    for number, reg in enumerate(regs):
        off = []
        for i in range(9):
            rest = [j for j in range(9) if j != i]
            without = Data(data.phi[rest], data.phi[i : i + 1])
            off.append(without.fit((y - begin)[rest], reg)[1] - (y - begin)[i : i + 1].numpy())
        assert float(risks.loo[number]) == pytest.approx(float(np.mean(np.square(off))), rel=1e-9)
        k = data.k.reshape(-1, y.numel() if form == "full" else 9).numpy()
        hat = k @ np.linalg.inv(k + reg * np.eye(len(k)))
        t = (y - begin).reshape(len(k), -1).numpy()
        train = np.mean(np.square(t - hat @ t))
        assert float(risks.train[number]) == pytest.approx(train, rel=1e-9)
        assert float(risks.degrees[number]) == pytest.approx(np.trace(hat), rel=1e-9)
        assert float(risks.gcv[number]) == pytest.approx(train / (1 - np.trace(hat) / len(k)) ** 2, rel=1e-9)


def left_out(K: Tensor, y: Tensor, reg: float) -> float:
    """The leave-one-out error by n fits with 40 digits, on the numbers that K has."""
    n, off = len(y), mpmath.mpf(0)
    with mpmath.workdps(40):
        k, t = (mpmath.matrix(v.double().tolist()) for v in (K, y))
        for i in range(n):
            rest = [j for j in range(n) if j != i]
            part = mpmath.matrix([[k[a, b] + (reg if a == b else 0) for b in rest] for a in rest])
            a = mpmath.lu_solve(part, mpmath.matrix([t[j] for j in rest]))
            off += (sum(k[i, j] * a[number] for number, j in enumerate(rest)) - t[i]) ** 2
        return float(off / n)


SINGULAR: dict[str, Any] = {
    "whole numbers": lambda x: (x * 2).round() @ (x * 2).round().T,  # K has no rounding
    "few features": lambda x: x @ x.T,
    "copies": lambda x: (x @ x.T + (x @ x.T).T + 6 * torch.eye(5)).repeat(2, 2)[:9, :9],  # symmetric to the last bit
    "float32": lambda x: (x @ x.T).float(),
}


@pytest.mark.filterwarnings("ignore:reg up to:tangency.errors.TangencyWarning")
@pytest.mark.parametrize("name", SINGULAR)
def test_leave_one_out_of_a_singular_kernel_is_right_or_says_how_unsure_it_is(name: str) -> None:
    x, y = torch.randn(9, 3, dtype=F64), normal(9)
    K = SINGULAR[name](x if name != "copies" else x[:5])
    regs = [1e-2, 1e-4] if name == "float32" else [1e-2, 1e-8, 1e-12]
    risks = cross_validate(K, y, regs)
    for reg, loo, unsure in zip(regs, risks.loo.tolist(), risks.uncertainty.tolist(), strict=True):
        want = left_out(K, y, reg)
        assert abs(loo - want) <= (unsure + 1e-12) * want
        if name == "whole numbers":  # K has no rounding, and every sample a part in its null space: nothing is lost
            assert loo == pytest.approx(want, rel=1e-10)
    assert float(risks.uncertainty[0]) < 1e-3 < float(risks.uncertainty[-1]) * 100


def test_leave_one_out_that_rounding_decides_is_warned_of() -> None:
    x, y = normal(12, 3), normal(12)
    with pytest.warns(tg.TangencyWarning, match=r"reg up to 1e-14 .*move the leave-one-out error by more than 0.1%"):
        risks = cross_validate(x @ x.T, y, [1.0, 1e-3, 1e-14])
    assert (risks.uncertainty > 1e-3).tolist() == [False, False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cross_validate(x @ x.T, y, [1.0, 1e-3])
        cross_validate((x @ x.T).float(), y, [1.0])
        assert float(cross_validate(spectrum(x @ x.T), y, [1e-14]).uncertainty) > 1e-3  # said, but not loudly


@pytest.mark.parametrize("c", [None, 2])
def test_the_uncertainty_of_leave_one_out_covers_kernels_that_round_alike(c: int | None) -> None:
    """K in float32 and K itself differ by rounding alone; so do their errors."""
    data = some(10, 14, c=c)
    y = data.targets(None)[0]
    rounded, exact = (cross_validate(k, y, [1.0, 1e-2]) for k in (data.k.float(), data.k))
    off = (rounded.loo - exact.loo).abs() / exact.loo
    assert bool((off <= rounded.uncertainty).all())
    assert bool((off > 1e-4 * rounded.uncertainty).all())  # and it is not a bound that says nothing


def test_the_best_reg_is_that_of_least_predicted_error() -> None:
    data, y = some(20, 40), normal(20)
    risks = cross_validate(data.k, y, torch.logspace(-4, 2, 25, dtype=F64))
    assert risks.best() == float(risks.regs[np.argmin(risks.loo.numpy())])
    assert risks.best("gcv") == float(risks.regs[np.argmin(risks.gcv.numpy())])
    assert risks.best() != float(risks.regs[0])  # pure noise wants a large one
    with pytest.raises(tg.InputError, match="by='train'; needed: 'loo' or 'gcv'"):
        risks.best("train")


def test_a_single_reg_of_any_kind() -> None:
    data, y = some(), normal(12)
    want = cross_validate(data.k, y, [0.5]).loo
    for regs in (0.5, np.array([0.5]), torch.tensor([0.5]), (0.5,)):
        near(cross_validate(data.k, y, regs).loo, want)


def test_regs_that_will_not_do() -> None:
    data, y = some(), normal(12)
    for regs in ([], [0.0], [0.1, -1.0], [float("nan")], [float("inf")]):
        with pytest.raises(tg.InputError, match="regs=.*; needed: one or more positive numbers"):
            cross_validate(data.k, y, regs)
    with pytest.raises(tg.InputError, match="only 3 eigenpairs were given; needed: all"):
        cross_validate(top(data.k, 3), y, [0.1])
    indefinite = torch.diag(torch.tensor([3.0, 2.0, -0.5], dtype=F64))
    with pytest.raises(tg.NotPositiveDefinite, match="K has the eigenvalue -0.5, so K \\+ 0.4·I is not positive"):
        cross_validate(indefinite, normal(3), [0.4, 1.0])
    above = cross_validate(indefinite, y := normal(3), [0.6, 1.0])
    near(above.train[1], np.mean(np.square(np.linalg.solve(indefinite.numpy() + np.eye(3), y.numpy()))))


@pytest.mark.parametrize("q", [None, 2])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_risk_study_of_all_samples_is_one_fit(q: int | None, shifted: bool) -> None:
    data = some(10, 20)
    y, f0, f0_z = data.targets(q)
    y_test = data.targets(q)[2]
    regs = [0.05, 0.5]
    given = {"f0": f0, "f0_test": f0_z} if shifted else {}
    study = risk_study(data.k, y, data.cross, y_test, sizes=[10, 4], regs=regs, repeats=3, progress=False, **given)
    assert study.sizes == (10, 4)
    for name in ("train", "gcv", "loo", "measured"):
        assert getattr(study, name).shape == (2, 3, 2)
    risks = cross_validate(data.k, y, regs, f0=f0 if shifted else None)
    for i, reg in enumerate(regs):
        fit = ridge(data.k, y, reg=reg, f0=f0 if shifted else None)
        want = (fit.predict(data.cross, f0_z if shifted else None) - y_test).square().mean()
        near(study.measured[0, :, i], want.expand(3), 1e-10)
    for name in ("train", "gcv", "loo"):
        near(getattr(study, name)[0], getattr(risks, name).expand(3, 2), 1e-9)
    near(study.error("loo"), (study.loo - study.measured).abs() / study.measured)


def test_a_risk_study_draws_without_replacement_and_takes_each_draw_whole() -> None:
    data, y, y_test, regs = some(4, 9), normal(4), normal(5), [0.1, 1.0]
    study = risk_study(data.k, y, data.cross, y_test, sizes=[2], regs=regs, repeats=40, progress=False)
    known = {}
    for pair in itertools.combinations(range(4), 2):
        rows = list(pair)
        risks = cross_validate(data.k[rows][:, rows], y[rows], regs)
        fits = [ridge(data.k[rows][:, rows], y[rows], reg=reg).predict(data.cross[:, rows]) for reg in regs]
        measured = torch.stack([(fit - y_test).square().mean() for fit in fits])
        known[pair] = torch.stack([risks.train, risks.gcv, risks.loo, measured])
    drawn = torch.stack([study.train, study.gcv, study.loo, study.measured])[:, 0].transpose(0, 1)
    seen = set()
    for one in drawn:
        matches = [pair for pair, want in known.items() if float((one - want).abs().max()) < 1e-9]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) == 6  # 40 draws of 6 sets
    again = risk_study(data.k, y, data.cross, y_test, sizes=[2], regs=regs, repeats=40, progress=False)
    assert torch.equal(again.measured, study.measured)
    other = risk_study(data.k, y, data.cross, y_test, sizes=[2], regs=regs, repeats=40, seed=1, progress=False)
    assert not torch.equal(other.measured, study.measured)


BAD_STUDIES: dict[str, tuple[dict[str, Any], str]] = {
    "a full kernel": (
        {"K": torch.eye(12).reshape(6, 2, 6, 2), "y": torch.ones(6, 2)}, r"K has shape \(6, 2, 6, 2\); needed",
    ),
    "one sample": ({"sizes": [1]}, r"sizes=\[1\]; needed: .* from 2 to 6"),
    "too many": ({"sizes": [3, 7]}, r"sizes=\[3, 7\]; needed: .* from 2 to 6"),
    "no sizes": ({"sizes": []}, r"sizes=\[\]; needed: one or more"),
    "regs": ({"regs": [0.0]}, "regs=.*; needed: one or more positive"),
    "no repeats": ({"repeats": 0}, "repeats=0; needed"),
    "half of f0": ({"f0": torch.ones(6)}, "give f0 and f0_test both, or neither"),
    "cross": ({"cross": torch.ones(5, 4)}, r"cross has shape \(5, 4\).*; needed: \[m, 6\]"),
    "few y_test": ({"y_test": torch.ones(4)}, r"cross has shape \(5, 6\).*y_test \(4, 1\)"),
    "columns of y_test": ({"y_test": torch.ones(5, 2)}, r"y_test \(5, 2\); needed: \[m, 6\] and \[m, 1\]"),
    "few y": ({"y": torch.ones(5)}, r"there are 6 rows and y has shape \(5,\)"),
    "NaN in y": ({"y": torch.full((6,), float("nan"))}, r"y\[0\] is nan; needed: finite"),
    "NaN in y_test": ({"y_test": torch.full((5,), float("nan"))}, r"y_test\[0.*\] is nan; needed: finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STUDIES)
def test_risk_studies_that_will_not_do(name: str) -> None:
    options, message = BAD_STUDIES[name]
    data = some(6)
    ok = {"K": data.k, "y": normal(6), "cross": data.cross, "y_test": normal(5), "sizes": [3], "regs": [0.1]}
    with pytest.raises(tg.InputError, match=message):
        risk_study(**{**ok, "progress": False, **options})


# Logistic regression.


@dataclass
class Task:
    """Classes that overlap, of a kernel of either form, with all that can be given."""

    data: Data
    labels: Tensor  # integers [n], or probabilities [n, c]
    c: int  # logits
    given: dict[str, Any]

    def probabilities(self) -> Tensor:
        """What is aimed at: [n, c], of class 1 alone for one logit."""
        if self.labels.is_floating_point():
            return self.labels[:, 1:] if self.c == 1 else self.labels
        one = F.one_hot(self.labels, max(2, self.c)).double()
        return one[:, 1:] if self.c == 1 else one

    def gradient(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Of the objective (15), with reg, in a and b: by automatic differentiation of what is written down here."""
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        n, k = len(self.labels), self.data.k
        inside = k @ a if not self.data.full else torch.einsum("ncmd,md->nc", k, a)
        logits = inside + b + self.given.get("f0", 0)
        aim, w = self.probabilities(), self.given.get("sample_weights", torch.ones(n, dtype=F64))
        if self.c == 1:
            each = F.binary_cross_entropy_with_logits(logits, aim[:, 0], reduction="none")
        else:
            each = F.cross_entropy(logits, aim, reduction="none")
        total = (w * each).sum() + self.given["reg"] / 2 * (a * inside).sum()
        return torch.autograd.grad(total, (a, b))


def task(classes: int, form: str, options: str, n: int = 24) -> Task:
    full = form == "full"
    data = some(n, 40 if full else 30, c=classes if full else None)
    c = 1 if classes == 2 and not full else classes
    labels = torch.arange(n) % classes
    if "soft" in options:
        labels = torch.softmax(2 * normal(n, classes), 1)
    given: dict[str, Any] = {"reg": 0.2}
    if "f0" in options:
        given["f0"] = normal(n) if c == 1 else normal(n, c)
    if "weights" in options:
        given["sample_weights"] = torch.rand(n, dtype=F64) * (torch.arange(n) != 5)
    if "bias" in options:
        given["bias"] = True
    return Task(data, labels, c, given)


OPTIONS = ["", "bias", "weights", "f0", "bias weights f0"]


@pytest.mark.parametrize(("classes", "form"), [(2, "one"), (3, "one"), (2, "full"), (4, "full")])
@pytest.mark.parametrize("options", [*OPTIONS, "soft", "soft bias weights f0"])
def test_the_gradient_is_zero_at_the_answer(classes: int, form: str, options: str) -> None:
    t = task(classes, form, options)
    fit = logistic(t.data.k, t.labels, **t.given)
    at_start = t.gradient(torch.zeros_like(fit.model.coefficients), torch.zeros_like(fit.bias))
    at_end = t.gradient(fit.model.coefficients, fit.bias)
    assert float(at_end[0].norm() / at_start[0].norm()) < 1e-10
    if "bias" in options:
        # Softmax does not see a constant added to all logits, so their sum of gradients is zero in any case.
        assert float(at_end[1].norm()) < 1e-10 * float(at_start[0].norm())
    else:
        assert float(fit.bias.norm()) == 0
    assert fit.gradient <= 1e-10
    k = t.data.k.reshape(int(t.data.k.numel() ** 0.5), -1)
    a = fit.model.coefficients.reshape(len(k), -1)
    assert fit.model.norm == pytest.approx(float((a * (k @ a)).sum().sqrt()), rel=1e-8)
    near(fit.logits(t.data.k, t.given.get("f0")), fit.model.fitted, 1e-9)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_gradient_that_is_reported_is_measured(options: str) -> None:
    """‖∇‖ in the Hilbert space: √(uᵀ K u) with u = w(p − y) + reg·a, and the bias's; against that at the start."""
    t = task(2, "one", options)
    fit = logistic(t.data.k, t.labels, **t.given, tol=0.05)
    aim, w = t.probabilities()[:, 0], t.given.get("sample_weights", torch.ones(24, dtype=F64))

    def norm(logits: Tensor, a: Tensor) -> float:
        off = w * (torch.sigmoid(logits) - aim)
        u = off + 0.2 * a
        return math.sqrt(float(u @ t.data.k @ u) + (float(off.sum()) ** 2 if "bias" in options else 0.0))

    f0 = t.given.get("f0")
    first = norm(torch.zeros(24, dtype=F64) if f0 is None else f0, torch.zeros(24, dtype=F64))
    last = norm(fit.logits(t.data.k, f0), fit.model.coefficients)
    assert 1e-8 < fit.gradient <= 0.05
    assert fit.gradient == pytest.approx(last / first, rel=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reg", [0.01, 1.0])
def test_logistic_regression_is_scikit_learns(classes: int, bias: bool, weighted: bool, reg: float) -> None:
    x, z = normal(80, 4), normal(10, 4)
    labels = (x[:, 0] + normal(80)).argsort().argsort() * classes // 80
    w = torch.rand(80, dtype=F64) + 0.1 if weighted else None
    theirs = LogisticRegression(C=1 / reg, fit_intercept=bias, tol=1e-12, max_iter=100_000, solver="newton-cholesky")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its line search warns at this tolerance
        theirs.fit(x.numpy(), labels.numpy(), sample_weight=None if w is None else w.numpy())
    want = theirs.predict_proba(z.numpy())
    by_gram = logistic(x @ x.T, labels, reg=reg, bias=bias, sample_weights=w)
    by_features = logistic_features(x, labels, reg=reg, bias=bias, sample_weights=w)
    for fit, cross in ((by_gram, z @ x.T), (by_features, z)):
        near(fit.probabilities(cross), want, 1e-6)
        assert np.array_equal(fit.predict(cross).numpy(), theirs.predict(z.numpy()))
        assert fit.classes == classes
    near(by_features.model.coefficients.reshape(4, -1).T, theirs.coef_, 1e-5)
    if bias and classes == 2:
        near(by_features.bias, theirs.intercept_[0], 1e-5)


@pytest.mark.parametrize(("classes", "form"), [(2, "one"), (3, "one"), (3, "full")])
@pytest.mark.parametrize("options", OPTIONS)
def test_grams_and_features_give_one_answer(classes: int, form: str, options: str) -> None:
    t = task(classes, form, options)
    by_gram = logistic(t.data.k, t.labels, **t.given)
    by_features = logistic_features(t.data.phi, t.labels, **t.given)
    f0_z = None
    if "f0" in options:
        f0_z = normal(5) if t.c == 1 else normal(5, t.c)
    near(by_gram.probabilities(t.data.cross, f0_z), by_features.probabilities(t.data.phi_z, f0_z), 1e-7)
    assert by_gram.model.norm == pytest.approx(by_features.model.norm, rel=1e-7)
    assert by_gram.loss == pytest.approx(by_features.loss, rel=1e-8)
    aim, w = t.probabilities(), t.given.get("sample_weights", torch.ones(24, dtype=F64))
    p = by_gram.probabilities(t.data.k, t.given.get("f0"))
    aim = torch.cat([1 - aim, aim], 1) if t.c == 1 else aim
    assert by_gram.loss == pytest.approx(-float((w[:, None] * torch.xlogy(aim, p)).sum()), rel=1e-8)
    near(p.sum(1), np.ones(24), 1e-12)


def test_k_times_identity_in_logistic_regression() -> None:
    t = task(3, "one", "bias weights f0")
    one, full = (logistic(k, t.labels, **t.given) for k in (t.data.k, expanded(t.data.k, 3)))
    f0_z = normal(5, 3)
    near(full.probabilities(expanded(t.data.cross, 3), f0_z), one.probabilities(t.data.cross, f0_z), 1e-8)
    assert full.model.norm == pytest.approx(one.model.norm, rel=1e-8)
    assert full.model.coefficients.shape == one.model.coefficients.shape == (24, 3)


@pytest.mark.parametrize("form", ["one", "full"])
@pytest.mark.parametrize("classes", [2, 3])
def test_classes_and_probabilities_of_one_say_the_same(classes: int, form: str) -> None:
    """Two classes have one logit, however they are given."""
    t = task(classes, form, "bias")
    want = logistic(t.data.k, t.labels, **t.given)
    one_hot = F.one_hot(t.labels, classes)
    for got in (
        logistic(t.data.k, one_hot.double(), **t.given),
        logistic(t.data.k, t.labels, classes=classes, **t.given),
        logistic(t.data.k, t.labels.to(torch.int8), **t.given),
        logistic(t.data.k, t.labels.numpy(), **t.given),
    ):
        near(got.probabilities(t.data.cross), want.probabilities(t.data.cross), 1e-8)


def test_soft_labels_are_weighted_hard_ones() -> None:
    """A sample of probabilities (p, 1 − p) is one of class 0 with weight p and one of class 1 with weight 1 − p."""
    for classes in (2, 3):
        data = some(10)
        soft = torch.softmax(normal(10, classes), 1)
        rows = torch.arange(10).repeat_interleave(classes)
        hard = logistic(
            data.k[rows][:, rows], torch.arange(classes).repeat(10), reg=0.2, sample_weights=soft.flatten(), bias=True
        )
        got = logistic(data.k, soft, reg=0.2, bias=True)
        near(got.probabilities(data.cross), hard.probabilities(data.cross[:, rows]), 1e-8)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(0, 99), st.sampled_from([2, 3]))
def test_integer_weights_repeat_samples(times: list[int], seed: int, classes: int) -> None:
    torch.manual_seed(seed)
    data, labels, w = some(8), torch.arange(8) % classes, torch.tensor(times)
    rows = torch.arange(8).repeat_interleave(w)
    if len(set(labels[rows].tolist())) < classes:
        return
    for bias in (False, True):
        one = logistic(data.k, labels, reg=0.3, sample_weights=w, bias=bias)
        many = logistic(data.k[rows][:, rows], labels[rows], reg=0.3, bias=bias)
        near(one.probabilities(data.cross), many.probabilities(data.cross[:, rows]), 1e-7)
        assert one.loss == pytest.approx(many.loss, rel=1e-8)


@settings(max_examples=12)
@given(seed=st.integers(0, 99), form=st.sampled_from(["one", "full"]), classes=st.sampled_from([3, 4]))
def test_the_constant_that_softmax_does_not_see_stays_where_it_was(seed: int, form: str, classes: int) -> None:
    """Every step is orthogonal to it, so the mean of the biases is zero: it does not drift on rounding."""
    torch.manual_seed(seed)
    t = task(classes, form, "bias weights", n=9)
    for fit in (logistic(t.data.k, t.labels, **t.given), logistic_features(t.data.phi, t.labels, **t.given)):
        assert abs(float(fit.bias.mean())) < 1e-6 * (1 + float(fit.bias.norm())), fit.bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
def test_without_reg_the_classes_must_overlap(classes: int, bias: bool) -> None:
    x = normal(60, 2)
    labels = (x @ normal(2, classes)).argmax(1)
    assert len(labels.unique()) == classes
    for f in (
        lambda y: logistic(x @ x.T, y, reg=0.0, bias=bias),
        lambda y: logistic_features(x, y, reg=0.0, bias=bias),
    ):
        with pytest.raises(tg.DidNotConverge, match="the classes are separated.*Give reg > 0"):
            f(labels)
        mixed = labels.clone()
        mixed[::3] = torch.arange(20) % classes
        fit = f(mixed)
        assert fit.gradient <= 1e-10
    theirs = LogisticRegression(C=np.inf, fit_intercept=bias, tol=1e-12, max_iter=10_000, solver="newton-cholesky")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.fit(x.numpy(), mixed.numpy())
    near(fit.probabilities(x), theirs.predict_proba(x.numpy()), 1e-6)


def test_classes_that_touch_are_separated_too() -> None:
    """Samples at 0 are of both classes, all others separated: the loss falls for ever, to 2 log 2, without minimum."""
    x = torch.tensor([-1.0, 0.0, 0.0, 1.0], dtype=F64)[:, None]
    with pytest.raises(tg.DidNotConverge):
        logistic_features(x, torch.tensor([0, 0, 1, 1]), reg=0.0)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("by", ["gram", "features"])
def test_what_did_not_converge_carries_the_answer(classes: int, by: str) -> None:
    t = task(classes, "one", "bias")
    f, given = (logistic, t.data.k) if by == "gram" else (logistic_features, t.data.phi)
    with pytest.raises(tg.DidNotConverge, match="in 1 steps; asked for: 1.0e-10.*reg= \\(it was 0.2\\)") as e:
        f(given, t.labels, **t.given, max_steps=1)
    found = pickle.loads(pickle.dumps(e.value)).solution
    assert found.gradient > 1e-10
    assert found.model.steps == 1
    assert found.probabilities(t.data.cross if by == "gram" else t.data.phi_z).shape == (5, classes)
    start = logistic(t.data.k, t.labels, reg=1e9).loss
    assert f(given, t.labels, **t.given).loss < found.loss < start


@given(seed=st.integers(0, 999), reg=st.floats(-6, 4), scale=st.floats(-3, 3), classes=st.sampled_from([2, 3]))
def test_newton_converges_from_easy_to_nearly_separated(seed: int, reg: float, scale: float, classes: int) -> None:
    torch.manual_seed(seed)
    phi = 10**scale * normal(15, 6)
    labels = torch.arange(15) % classes
    size = float(phi.square().sum(1).mean())
    fit = logistic_features(phi, labels, reg=10**reg * size, bias=True)
    t = Task(Data(phi, phi), labels, 1 if classes == 2 else 3, {"reg": 10**reg * size})
    # φᵀ w(p − y) + reg γ = 0, written out
    p = fit.probabilities(phi)
    aim = F.one_hot(labels, classes).double()
    off = (p - aim)[:, 1:] if t.c == 1 else p - aim
    gamma = fit.model.coefficients.reshape(6, -1)
    start = phi.T @ ((1 / classes - aim)[:, 1:] if t.c == 1 else 1 / classes - aim)
    assert float((phi.T @ off + t.given["reg"] * gamma).norm()) <= 1e-9 * float(start.norm()) + 1e-9 * float(size**0.5)


@settings(max_examples=12)
@given(seed=st.integers(0, 99), far=st.floats(1, 30), classes=st.sampled_from([2, 3]))
def test_newton_comes_back_from_a_far_start(seed: int, far: float, classes: int) -> None:
    """f₀ is sure of the wrong class: the curvature there is next to nothing, and a whole Newton step far too long."""
    torch.manual_seed(seed)
    phi, labels = normal(12, 20), torch.arange(12) % classes
    wrong = far * (1 - 2 * F.one_hot(labels, classes).double())
    f0 = wrong[:, 1] if classes == 2 else wrong
    fit = logistic_features(phi, labels, reg=1e-2, f0=f0)
    off = (fit.probabilities(phi, f0) - F.one_hot(labels, classes))[:, 1 if classes == 2 else 0 :]
    gamma = fit.model.coefficients.reshape(20, -1)
    start = phi.T @ F.one_hot(labels, classes).double()
    assert float((phi.T @ off + 1e-2 * gamma).norm()) <= 1e-8 * float(start.norm())


ABSENT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "more classes than y has": (torch.arange(12) % 2, {"classes": 3}, r"class 2 \(of 3\)"),
    "a gap": (2 * (torch.arange(12) % 2), {}, r"class 1 \(of 3\)"),
    "no weight": (torch.arange(12) % 3, {"sample_weights": (torch.arange(12) % 3 != 0).double()}, r"class 0 \(of 3\)"),
    "no weight of two": (torch.arange(12) % 2, {"sample_weights": torch.arange(12) % 2}, r"class 0 \(of 2\)"),
    "no probability": (F.one_hot(torch.arange(12) % 2, 4).double(), {}, r"class 2, 3 \(of 4\)"),
    "one of two": (torch.tensor([[1.0, 0.0]] * 12), {}, r"class 1 \(of 2\)"),
}


@pytest.mark.parametrize("name", ABSENT)
def test_a_class_without_samples_has_no_bias(name: str) -> None:
    """It went to −15 and on with every step, and was returned. Without a bias there is an optimum."""
    y, options, message = ABSENT[name]
    x = normal(12, 3)
    for f, k in ((logistic, x @ x.T), (logistic, expanded(x @ x.T, 4)), (logistic_features, x)):
        if len(k.shape) == 4 and name != "no probability":
            continue
        with pytest.raises(tg.InputError, match=f"no sample .of positive weight. of {message}.*bias=False"):
            f(k, y, reg=0.1, bias=True, **options)
        assert f(k, y, reg=0.1, **options).gradient <= 1e-10


def test_a_class_whose_samples_have_no_weight_is_refused_by_the_estimator() -> None:
    estimators = pytest.importorskip("tangency.estimators")
    x, y = normal(12, 3).numpy(), np.arange(12) % 3
    classifier = estimators.KernelClassifier("precomputed", loss="logistic", bias=True)
    with pytest.raises(tg.InputError, match=r"of class 1 \(of 3\)"):
        classifier.fit(x @ x.T, y, sample_weight=(y != 1).astype(float))


def test_probabilities_in_single_precision_sum_to_one_before_they_are_fitted() -> None:
    """What is left of their sums pushed the biases for ever."""
    phi, soft = normal(30, 3), torch.softmax(normal(30, 3), 1)
    want = logistic_features(phi, soft, reg=0.1, bias=True).probabilities(phi)
    for rough in (soft.float(), soft * (1 + 5e-5 * torch.rand(30, 1, dtype=F64))):
        near(logistic_features(phi, rough, reg=0.1, bias=True).probabilities(phi), want, 1e-6)
    with pytest.raises(tg.InputError, match="y has probabilities of 3 classes and classes=4"):
        logistic_features(phi, soft, reg=0.1, classes=4)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("reg", [1e-2, 1e-6, 1e-10])
def test_separated_classes_have_the_margins_of_the_optimum(classes: int, reg: float) -> None:
    """By scipy, on log-losses that do not cancel: reg·γ = Σ_i w_i (y − p) φ_i, as exactly as e⁻ᶻ follows from z."""
    labels = torch.arange(24) % classes
    phi = torch.eye(3, dtype=F64)[labels] * 3 + 0.3 * normal(24, 3)
    fit = logistic_features(phi, labels, reg=reg)
    z = fit.logits(phi).reshape(24, -1).numpy()
    z = z if classes > 2 else np.hstack([0 * z, z])
    rest = np.where(np.eye(classes)[labels], -np.inf, z)
    own = z[np.arange(24), labels]
    # y − p: of the own class what the others have
    share = np.exp(z - scipy.special.logsumexp(z, 1, keepdims=True))
    pull = -share
    pull[np.arange(24), labels] = scipy.special.expit(scipy.special.logsumexp(rest, 1) - own)
    pull = pull if classes > 2 else pull[:, 1:]
    near(reg * fit.model.coefficients.reshape(3, -1), phi.numpy().T @ pull, 1e-4)
    assert fit.distance <= 1e-6


def test_an_optimum_at_zero_is_found() -> None:
    """Every sample is there with each label: the gradient at zero is nothing but rounding."""
    phi = normal(20, 3)
    both, labels = torch.cat([phi, phi]), torch.cat([torch.zeros(20), torch.ones(20)]).long()
    fit = logistic_features(both, labels, reg=1.0, bias=True)
    near(fit.probabilities(phi), np.full((20, 2), 0.5), 1e-12)
    zero = logistic_features(0 * phi, torch.arange(20) % 3, reg=1.0, bias=True)
    near(zero.probabilities(0 * phi)[0], [0.35, 0.35, 0.3], 1e-6)


@pytest.mark.parametrize("options", [{"max_steps": 0}, {"max_steps": -3}, {"tol": 0.0}, {"tol": float("nan")}])
def test_steps_and_tolerances_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(tg.InputError, match=r"max_steps=.*, tol=.*; needed: at least 1, above 0"):
        logistic_features(normal(6, 2), torch.arange(6) % 2, reg=0.1, **options)


@pytest.mark.parametrize("reg", [1e-40, 1e-30, 1e-20, 1e-12])
def test_least_squares_with_next_to_no_reg_is_of_least_norm(reg: float) -> None:
    """Singular values that are rounding made the coefficients 1e15 times as large, and the fit wrong."""
    x = normal(20, 4)
    phi, y = torch.cat([x, x[:, :2] @ normal(2, 3)], 1), normal(20)
    near(least_squares(phi, y, reg=reg).coefficients, np.linalg.lstsq(phi.numpy(), y.numpy(), rcond=1e-12)[0], 1e-8)


def test_a_gaussian_process_that_is_not_solved_is_not_returned() -> None:
    x = torch.linspace(0, 1, 40)
    K = torch.exp(-(x[:, None] - x[None]).square() / 0.5)
    with pytest.raises((tg.DidNotConverge, tg.NotPositiveDefinite)):
        gaussian_process(K, torch.randn(40), noise=2e-6)
    assert gaussian_process(K, torch.randn(40).double(), noise=2e-6).model.residual < 1e-6


# What is refused.

SOME, Y = torch.eye(4, dtype=F64), torch.arange(4.0, dtype=F64)
FULL = expanded(SOME, 2)
NAN = torch.tensor([0, 1, float("nan"), 1], dtype=F64)
LABELS = torch.tensor([0, 1, 0, 1])
SPECTRUM = spectrum(SOME)
BAD_FITS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "y too short": (SOME, Y[1:], {}, r"there are 4 rows and y has shape \(3,\); needed: \[4\] or \[4, q\]"),
    "y with three dimensions": (SOME, Y[:, None, None], {}, r"y has shape \(4, 1, 1\); needed"),
    "y flat for a full kernel": (
        FULL, torch.ones(8), {}, r"full over 2 outputs of 4 samples and y has shape \(8,\); needed: \[4, 2\]",
    ),
    "y without outputs for a full kernel": (FULL, Y, {}, r"full over 2 outputs of 4 samples and y has shape \(4,\)"),
    "NaN in y": (SOME, NAN, {}, r"y\[2\] is nan; needed: finite"),
    "complex y": (SOME, Y + 1j, {}, r"y is torch.complex128; needed: real"),
    "y elsewhere": (SOME, Y.to("meta"), {}, r"K is on cpu, y on meta. Move one"),
    "f0 of another shape": (SOME, Y, {"f0": Y[:, None]}, r"f0 has shape \(4, 1\); needed: \(4,\)"),
    "NaN in f0": (SOME, Y, {"f0": NAN}, r"f0\[2\] is nan; needed: finite"),
    "too few weights": (SOME, Y, {"sample_weights": [1.0, 2.0]}, r"sample_weights have shape \(2,\); needed: .*\[4\]"),
    "weights by output": (FULL, Y[:, None].expand(4, 2), {"sample_weights": torch.ones(4, 2)},
                          r"sample_weights have shape \(4, 2\)"),
    "negative weights": (SOME, Y, {"sample_weights": [1, 1, 1, -1]}, "sample_weights from -1 to 1; needed: at least 0"),
    "no weights": (SOME, Y, {"sample_weights": torch.zeros(4)},
                   "sample_weights from 0 to 0; needed: at least 0, and not all 0"),
    "NaN in weights": (SOME, Y, {"sample_weights": NAN}, r"sample_weights\[2\] is nan; needed: finite"),
    "K not square": (SOME[:, 1:], Y, {}, r"K has shape \(4, 3\); needed: a square Gram"),
    "K not symmetric": (SOME + torch.eye(4, dtype=F64).roll(1, 0), Y, {}, "K is not symmetric"),
    "NaN in K": (SOME * NAN, Y, {}, "K.* is nan; needed: finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FITS)
def test_bad_input_is_refused_by_every_fit(name: str) -> None:
    K, y, options, message = BAD_FITS[name]
    fits = [lambda: ridge(K, y, reg=0.1, **options), lambda: ridgeless(K, y, **options)]
    if "sample_weights" not in options:
        fits += [lambda: gaussian_process(K, y, noise=0.1, **options), lambda: cross_validate(K, y, [0.1], **options)]
    for fit in fits:
        with pytest.raises(tg.InputError, match=message):
            fit()


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda: ridge(SOME, Y, reg=-1), "reg=-1; needed"),
        (lambda: ridge(SOME, Y, reg=float("nan")), "reg=nan; needed"),
        (lambda: ridge(SOME, Y, reg=None), "reg=None; needed"),
        (lambda: ridge(SOME, Y, reg=0.1, solver="eigh"), "solver='eigh'; needed: a solver"),
        (lambda: ridge(SPECTRUM, Y, reg=0.1), "ridge takes the Gram itself.*ridgeless or cross_validate"),
        (lambda: ridgeless(SPECTRUM, Y, sample_weights=2.0), "sample_weights= need the Gram itself"),
        (lambda: ridgeless(SOME, Y, cutoff=-1.0), "cutoff=-1.0; needed: a fraction"),
        (lambda: ridgeless(SOME, Y, cutoff=1.0), "cutoff=1.0; needed: a fraction"),
        (lambda: least_squares(SOME, Y, cutoff=-1.0), "cutoff=-1.0; needed: a fraction"),
        (lambda: least_squares(SOME, Y, cutoff=1.5), "cutoff=1.5; needed: a fraction"),
        (lambda: least_squares(SOME, Y, cutoff=float("nan")), "cutoff=nan; needed: a fraction"),
        (lambda: least_squares(SOME, Y, reg=-1.0), "reg=-1; needed"),
        (lambda: least_squares(SOME.long(), Y), "features have shape .*torch.int64; needed: real"),
        (lambda: least_squares(Y, Y), r"features have shape \(4,\).*needed"),
        (lambda: least_squares(SOME[:, :0], Y), r"features have shape \(4, 0\).*needed"),
        (lambda: least_squares(SOME * NAN, Y), r"features\[0, 2\] is nan; needed: finite"),
        (lambda: least_squares(SOME, Y[1:]), r"there are 4 rows and y has shape \(3,\)"),
        (lambda: least_squares(SOME.reshape(2, 2, 4), Y), r"full over 2 outputs of 2 samples and y has shape \(4,\)"),
        (lambda: least_squares(SOME, Y, f0=Y[1:]), r"f0 has shape \(3,\); needed: \(4,\)"),
        (lambda: least_squares(SOME, Y, sample_weights=-1.0), "sample_weights from -1 to -1; needed"),
        (lambda: least_squares(SOME, NAN), r"y\[2\] is nan; needed: finite"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(f: Any, message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        f()


BAD_LABELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "two dimensions": (LABELS[:, None], {}, r"y has shape \(4, 1\); needed: one class per sample, \[n\]"),
    "too few": (LABELS[1:], {}, r"y has shape \(3,\); needed: labels of the \[4\] samples"),
    "negative": (LABELS - 1, {}, "y has classes from -1 to 0; needed: from 0"),
    "beyond classes": (torch.tensor([0, 1, 2, 1]), {"classes": 2}, "y has classes from 0 to 2; needed: from 0 to 1"),
    "one class": (torch.ones(4, dtype=torch.long), {}, "all samples are of class 1; needed: at least two classes"),
    "floats": (Y, {}, r"y is torch.float64 of shape \(4,\); needed: classes as integers \[n\], or probabilities"),
    "sums that are not 1": (torch.full((4, 2), 0.4), {}, r"needed: classes as integers \[n\], or probabilities"),
    "below 0": (torch.tensor([[1.5, -0.5]] * 4), {}, r"needed: classes as integers \[n\], or probabilities"),
    "one column": (torch.ones(4, 1), {}, r"y is torch.float32 of shape \(4, 1\); needed"),
    "too few probabilities": (torch.full((3, 2), 0.5), {}, r"y has shape \(3, 2\); needed: labels of the \[4\]"),
    "NaN": (torch.full((4, 2), float("nan")), {}, r"y\[0, 0\] is nan; needed: finite"),
    "complex": (LABELS + 0j, {}, "y is torch.complex64.*; needed"),
    "elsewhere": (LABELS.to("meta"), {}, "K is on cpu, y on meta. Move one"),
    "reg": (LABELS, {"reg": -1.0}, "reg=-1; needed"),
    "NaN reg": (LABELS, {"reg": float("nan")}, "reg=nan; needed"),
    "f0": (LABELS, {"f0": torch.zeros(4, 2)}, r"f0 has shape \(4, 2\); needed: \(4,\)"),
    "f0 of three classes": (torch.tensor([0, 1, 2, 1]), {"f0": Y}, r"f0 has shape \(4,\); needed: \(4, 3\)"),
    "weights": (LABELS, {"sample_weights": [-1, 1, 1, 1]}, "sample_weights from -1 to 1; needed"),
    "number of weights": (LABELS, {"sample_weights": [1.0] * 3}, r"sample_weights have shape \(3,\); needed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LABELS)
@pytest.mark.parametrize("f", [logistic, logistic_features])
def test_bad_labels_are_refused(name: str, f: Any) -> None:
    y, options, message = BAD_LABELS[name]
    with pytest.raises(tg.InputError, match=message):
        f(SOME, y, **{"reg": 0.1, **options})


def test_labels_of_a_full_kernel() -> None:
    with pytest.raises(tg.InputError, match="y has classes from 0 to 2; needed: from 0 to 1"):
        logistic(FULL, torch.tensor([0, 1, 2, 1]), reg=0.1)
    with pytest.raises(tg.InputError, match=r"y has shape \(4, 3\); needed: labels of the \[4, 2\] samples"):
        logistic(FULL, torch.full((4, 3), 1 / 3), reg=0.1)


def test_a_full_kernel_of_one_output_has_one_logit() -> None:
    """As `full_ntk` of a network with one output is."""
    one = torch.rand(9, 3, dtype=F64)
    labels = torch.arange(9) % 2
    want = logistic(one @ one.T, labels, reg=0.1).probabilities(one @ one.T)
    single = (one @ one.T)[:, None, :, None]
    near(logistic(single, labels, reg=0.1).probabilities(single), want)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (Y, r"features have shape \(4,\); needed"),
        (SOME[:, :0], r"features have shape \(4, 0\); needed"),
        (SOME * NAN, r"features\[0, 2\] is nan; needed: finite"),
    ],
)
def test_bad_features_are_refused(features: Tensor, message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        logistic_features(features, LABELS, reg=0.1)


def test_indefinite_kernels_are_refused() -> None:
    K = torch.diag(torch.tensor([1.0, 2.0, 3.0, -1.0], dtype=F64))
    for f in (lambda: ridgeless(K, Y), lambda: logistic(K, LABELS, reg=0.1), lambda: ridge(K, Y, reg=0.5)):
        with pytest.raises(tg.NotPositiveDefinite):
            f()
    with pytest.raises(tg.NotPositiveDefinite):
        ridgeless(torch.zeros(4, 4, dtype=F64), Y)


# Predictions.


def test_predictions_refuse_what_does_not_fit() -> None:
    data = some(8)
    y, f0, f0_z = data.targets()
    fit, begun = ridge(data.k, y, reg=0.1), ridge(data.k, y, reg=0.1, f0=f0)
    for cross in (data.cross[:, 1:], data.cross.T, data.cross[0], torch.ones(5, 1, 8, 1, 1)):
        with pytest.raises(tg.InputError, match="cross has shape .*needed: new samples by training samples"):
            fit.predict(cross)
    with pytest.raises(tg.InputError, match=r"cross has shape \(5, 2, 3\)"):
        fit.predict(torch.ones(5, 2, 3))
    full = some(8, c=2)
    by_features = least_squares(full.phi, full.targets()[0], reg=0.1)
    for phi in (full.phi_z[..., 1:], full.phi_z[:, 0], full.phi_z.mT):
        with pytest.raises(tg.InputError, match="cross has shape .*needed: new samples by training samples"):
            by_features.predict(phi)
    with pytest.raises(tg.InputError, match="cross is a list; needed: a Gram"):
        fit.predict([[1.0] * 8])
    with pytest.raises(tg.InputError, match="cross is on meta, the model on cpu"):
        fit.predict(data.cross.to("meta"))
    with pytest.raises(
        tg.InputError, match=r"the model starts from f0, so predicting needs f0.*predict\(cross, f0=…\)"
    ):
        begun.predict(data.cross)
    with pytest.raises(tg.InputError, match=r"f0 of the new samples has shape \(5, 1\); needed: \(5,\)"):
        begun.predict(data.cross, f0_z[:, None])
    with pytest.raises(tg.InputError, match=r"f0 of the new samples\[0\] is nan"):
        begun.predict(data.cross, f0_z * float("nan"))
    labels = torch.arange(8) % 2
    classifier = logistic(data.k, labels, reg=0.1, f0=f0)
    for predict in (classifier.logits, classifier.probabilities, classifier.predict):
        with pytest.raises(tg.InputError, match="the model starts from f0"):
            predict(data.cross)
        with pytest.raises(tg.InputError, match="needed: new samples by training samples"):
            predict(data.cross[:, 1:], f0_z)
    gp = gaussian_process(data.k, y, noise=0.1, f0=f0)
    with pytest.raises(tg.InputError, match="the model starts from f0"):
        gp.predict(data.cross, data.own)


def test_predictions_know_a_full_kernel_from_one_for_all_outputs() -> None:
    """[n, c] coefficients of a full kernel, and [n, q] of K⊗I, mean different things."""
    data, y = some(6), normal(6, 2)
    full, cross = expanded(data.k, 2), expanded(data.cross, 2)
    with pytest.raises(tg.InputError):
        ridge(full, y, reg=0.1).predict(data.cross)
    with pytest.raises(tg.InputError):
        ridge(data.k, y, reg=0.1).predict(cross)
    with pytest.raises(tg.InputError):
        logistic(full, torch.arange(6) % 2, reg=0.1).logits(data.cross)


def test_predictions_take_grams_tensors_and_arrays() -> None:
    torch.manual_seed(0)
    model, x, z = mlp([3, 8, 2], nn.Tanh).double(), normal(7, 3), normal(4, 3)
    k = tg.trace_ntk(model)
    fit = ridge(tg.compute(k, x), normal(7, 2), reg=0.1)
    want = k(z, x).detach() @ fit.coefficients
    for cross in (tg.compute(k, z, x), k(z, x), k(z, x).detach().numpy(), k(z, x).detach().float()):
        got = fit.predict(cross)
        near(got, want, 1e-5)
        assert got.dtype == F64
        assert not got.requires_grad
    near(fit.predict(tg.compute(k, x).select([2, 5], None)), fit.fitted[[2, 5]], 1e-10)


def test_nothing_given_is_changed() -> None:
    data = some(8, 5)
    y, f0, _ = data.targets()
    given = [data.k, data.phi, y, f0, torch.rand(8, dtype=F64), torch.arange(8) % 2]
    K, phi, y, f0, w, labels = given
    before = [v.clone() for v in given]
    for f in (
        lambda: ridge(K, y, reg=0.1, f0=f0, sample_weights=w, solver=Cholesky()),
        lambda: ridgeless(K, y, f0=f0, sample_weights=w),
        lambda: least_squares(phi, y, f0=f0, sample_weights=w),
        lambda: gaussian_process(K, y, noise=0.1, f0=f0),
        lambda: cross_validate(K, y, [0.1], f0=f0),
        lambda: logistic(K, labels, reg=0.1, f0=f0, sample_weights=w, bias=True),
        lambda: logistic_features(phi, labels, reg=0.1, f0=f0, sample_weights=w, bias=True),
        lambda: risk_study(K, y, K, y, sizes=[4], regs=[0.1], progress=False),
    ):
        f()
        for now, then in zip(given, before, strict=True):
            assert torch.equal(now, then)


def test_what_is_not_exact_enough_is_not_returned() -> None:
    t = torch.linspace(0, 1, 60, dtype=F64)
    K, y = torch.exp(-((t[:, None] - t) ** 2)), torch.sign(t - 0.5)
    with pytest.raises(tg.DidNotConverge) as e:
        ridge(K, y, reg=1e-14, solver=CG(None, max_steps=3))
    assert e.value.solution.residual > 1e-6
    with pytest.raises(tg.DidNotConverge):
        ridge(K, y, reg=1e-6, tol=1e-20)


def test_models_show_what_they_are() -> None:
    shown = repr(ridgeless(torch.ones(2, 2), torch.tensor([1.0, 3.0])))
    assert "rank 1" in shown
    assert "residual" in shown


def test_results_are_short_in_print_and_whole_in_json() -> None:
    data, y = some(12, 20), normal(12)
    gp = gaussian_process(data.k, y, noise=0.1)
    study = risk_study(data.k, y, data.cross, normal(len(data.cross)), sizes=[6, 12], regs=[0.1, 1.0], progress=False)
    made = {
        "KernelModel": ridge(data.k, y, reg=0.1),
        "GaussianProcess": gp,
        "Posterior": gp.predict(data.cross, torch.full((len(data.cross),), 1e3, dtype=F64)),
        "LogisticModel": logistic(data.k, torch.arange(12) % 3, reg=0.1),
        "Risks": cross_validate(data.k, y, [0.1, 1.0]),
        "RiskStudy": study,
    }
    for name, result in made.items():
        shown = repr(result)
        assert shown.startswith(f"{name}(")
        assert len(shown) < 500
        assert "tensor(" not in shown
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["result"] == name
    assert "factor" not in gp.to_dict()  # n² numbers, which follow from K
    assert [line.split()[0] for line in made["Risks"].table().splitlines()] == ["reg", "0.1", "1"]
    rows = [line.split() for line in study.table().splitlines()]
    assert [row[:2] for row in rows] == [["samples", "reg"], ["6", "0.1"], ["6", "1"], ["12", "0.1"], ["12", "1"]]
    assert float(rows[3][5]) == pytest.approx(float(study.measured[1, :, 0].mean()), rel=1e-5)
    pytest.importorskip("matplotlib")
    assert len(study.plot().axes) == 2


@pytest.mark.slow
def test_pseudo_ntk_regression_tends_to_the_full_one_with_width() -> None:
    """Mohamadi et al. 2023: the outputs of kernel regression with pNTK⊗I and with the full NTK meet as 1/√width."""
    x, z, y = normal(12, 4), normal(5, 4), normal(12, 3)
    gaps = []
    for width in (64, 256, 1024, 4096):
        each = []
        for seed in range(4):
            torch.manual_seed(seed)
            net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 3)).double()
            for layer, fan in ((net[0], 1.0), (net[2], width**0.5)):
                torch.nn.init.normal_(layer.weight, std=1 / fan)
            full, pseudo = tg.full_ntk(net), tg.pseudo_ntk(net)
            want = ridge(full(x), y, reg=1.0).predict(full(z, x))
            got = ridge(pseudo(x), y, reg=1.0).predict(pseudo(z, x))
            each.append(float((got - want).norm() / want.norm()))
        gaps.append(sum(each) / len(each))
    assert all(b < a for a, b in itertools.pairwise(gaps))
    assert float(np.polyfit(np.log([64, 256, 1024, 4096]), np.log(gaps), 1)[0]) < -0.35
