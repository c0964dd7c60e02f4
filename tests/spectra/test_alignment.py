"""Alignments against NumPy, SciPy and scikit-learn; the bounds of Ortiz-Jiménez et al. 2021 on drawn targets."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import KernelCenterer
from torch import Tensor, nn

import tangency as tg

S = tg.spectra
F64 = torch.float64


def positive(n: int = 30, seed: int = 0, extra: int = 5) -> Tensor:
    w = torch.randn(n, n + extra, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return w @ w.T + 1


def targets(n: int = 30, q: int = 1, seed: int = 1) -> Tensor:
    y = torch.randn(n, q, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return y[:, 0] if q == 1 else y


# ---- vectors and spaces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [1, 3])
def test_energy_is_the_norm_of_the_projection(q: int, tmp_path: Path) -> None:
    k, y = positive(), targets(q=q)
    values, vectors = torch.linalg.eigh(k)
    for given_as in (k, tg.linalg.spectrum(k), k.numpy()):
        found = S.energy(given_as, y, 7, progress=False)
        for j in range(1, 8):
            phi = vectors.flip(1)[:, :j]
            assert float(found.parts[j - 1]) == pytest.approx(float((phi @ phi.T @ y).norm() / y.norm()))
        torch.testing.assert_close(found.values, values.flip(0)[:7])
    assert S.energy(k, y, 30, progress=False).concentration == pytest.approx(1)
    assert S.label_alignment(k, y, progress=False) == pytest.approx(float(found.parts[0]))
    assert "eigenvalue" in found.table()
    assert len(found.plot().axes[0].lines[0].get_ydata()) == 7
    torch.manual_seed(0)
    net, x = tg.models.mlp([4, 8, 2]).double(), torch.randn(9, 4, dtype=F64)
    full = tg.compute(tg.full_ntk(net), x, store=tmp_path / "gram", tile=4, progress=False)
    wide = targets(9, 2)
    v = torch.linalg.eigh(full.dense().reshape(18, 18))[1][:, -1]
    assert S.label_alignment(full, wide, progress=False) == pytest.approx(abs(float(v @ wide.flatten() / wide.norm())))


def test_weights_that_found_a_feature() -> None:
    g = torch.Generator().manual_seed(0)
    beta, w = torch.randn(20, generator=g, dtype=F64), torch.randn(50, 20, generator=g, dtype=F64)
    u = torch.linalg.svd(w)[2][0]
    assert S.weight_alignment(w, beta) == pytest.approx(abs(float(u @ beta / beta.norm())))
    out = torch.randn(50, generator=g, dtype=F64)
    assert S.weight_alignment(w + 100 * torch.outer(out, beta), beta) > 0.99
    assert S.weight_alignment(w + 100 * torch.outer(out, beta), out, side="outputs") > 0.99
    patch = torch.randn(3, 2, 2, generator=g, dtype=F64)
    kernels = torch.randn(8, 1, 1, 1, generator=g, dtype=F64) * patch
    assert S.weight_alignment(kernels, patch) == pytest.approx(1)
    several = torch.randn(20, 3, generator=g, dtype=F64)
    assert S.weight_alignment(w, several) == pytest.approx(float((u @ several).norm() / several.norm()))
    with pytest.raises(tg.InputError, match=r"W has 20 inputs and beta has shape \(7,\)"):
        S.weight_alignment(w, torch.ones(7))
    with pytest.raises(tg.InputError, match="side='rows'"):
        S.weight_alignment(w, beta, side="rows")
    with pytest.raises(tg.InputError, match="beta is 0 everywhere"):
        S.weight_alignment(w, torch.zeros(20))
    with pytest.raises(tg.InputError, match="needed: a real matrix"):
        S.weight_alignment(beta, beta)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000), st.floats(-20, 20))
def test_principal_angles_are_scipys(k: int, m: int, seed: int, power: float) -> None:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(12, k, generator=g, dtype=F64), torch.randn(12, m, generator=g, dtype=F64)
    expected = np.sort(scipy.linalg.subspace_angles(a.numpy(), b.numpy()))
    np.testing.assert_allclose(S.principal_angles(a * 10**power, b), expected, atol=1e-9)


def test_small_angles_keep_their_digits() -> None:
    a = torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    for angle in (1e-9, 1e-6, 0.1, math.pi / 2 - 1e-9):
        b = torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=F64)
        assert float(S.principal_angles(a, b)) == pytest.approx(angle, rel=1e-7)
    with pytest.raises(tg.InputError, match="the 2 columns of A span 1 dimensions"):
        S.principal_angles(torch.ones(3, 2), a)
    with pytest.raises(tg.InputError, match="A has 4 rows and B 3"):
        S.principal_angles(torch.ones(4), a)
    with pytest.raises(tg.InputError, match="k at most n"):
        S.principal_angles(torch.ones(2, 3), a)


# ---- kernels and targets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [1, 3])
def test_target_alignment_plain_and_centred(q: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = tg.models.mlp([4, 16, 2]).double(), torch.randn(20, 4, dtype=F64)
    stored = tg.compute(tg.trace_ntk(net), x, store=tmp_path / "gram", tile=7, progress=False)
    k, y = stored.dense(), targets(20, q)
    yy = y.reshape(20, -1) @ y.reshape(20, -1).T
    centred, target = (KernelCenterer().fit_transform(v.numpy().copy()) for v in (k, yy))
    for gram in (stored, k, k.numpy(), stored.select(list(range(20)), list(range(20)))):
        plain = float((k * yy).sum() / (k.norm() * yy.norm()))
        assert S.target_alignment(gram, y) == pytest.approx(plain)
        expected = (centred * target).sum() / np.linalg.norm(centred) / np.linalg.norm(target)
        assert S.target_alignment(gram, y, centred=True) == pytest.approx(expected)


def test_target_alignment_of_full_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x, y = tg.models.mlp([4, 16, 2]).double(), torch.randn(9, 4, dtype=F64), torch.randn(9, 2, dtype=F64)
    stored = tg.compute(tg.full_ntk(net), x, store=tmp_path / "gram", tile=4, progress=False)
    k, flat = stored.dense().reshape(18, 18), y.flatten()
    assert S.target_alignment(stored, y) == pytest.approx(float(flat @ k @ flat / (k.norm() * flat.norm() ** 2)))
    one = tg.full_ntk(tg.models.mlp([4, 8, 1]).double())(x)  # full over one output: as any other
    assert S.target_alignment(one, y[:, :1], centred=True) == pytest.approx(
        S.target_alignment(one[:, 0, :, 0], y[:, 0], centred=True)
    )


@pytest.mark.parametrize("n", [1, 2])
def test_the_smallest_grams(n: int) -> None:
    k, y = positive(n), targets(n)
    assert S.energy(k, y, n, progress=False).concentration == pytest.approx(1)
    assert 0 <= S.target_alignment(k, y) <= 1 + 1e-12
    assert S.cka(k, k, centred=False) == pytest.approx(1)
    if n == 1:
        with pytest.raises(tg.InputError, match="y is constant"):
            S.target_alignment(k, y, centred=True)


@given(st.floats(-25, 25), st.floats(-25, 25), st.floats(0, 1e6))
def test_alignments_do_not_depend_on_scales_nor_centred_ones_on_offsets(a: float, b: float, offset: float) -> None:
    k, y = positive(10) - 1, targets(10)
    scaled = k * 10**a
    assert S.target_alignment(scaled, y * 10**b) == pytest.approx(S.target_alignment(k, y), rel=1e-9)
    moved = S.target_alignment(k + offset, y + offset, centred=True)
    assert moved == pytest.approx(S.target_alignment(k, y, centred=True), rel=1e-6, abs=1e-9)
    assert S.energy(scaled, y * 10**b, 3, progress=False).concentration == pytest.approx(
        S.energy(k, y, 3, progress=False).concentration, rel=1e-6
    )
    assert S.cka(scaled, k) == pytest.approx(1)


def test_cka_is_the_cosine_of_centred_kernels() -> None:
    a, b = positive(seed=0), positive(seed=5)
    centred = [torch.from_numpy(KernelCenterer().fit_transform(k.numpy().copy())) for k in (a, b)]
    expected = float((centred[0] * centred[1]).sum() / (centred[0].norm() * centred[1].norm()))
    assert S.cka(a, b) == pytest.approx(expected)
    assert S.cka(a, b, centred=False) == pytest.approx(float((a * b).sum() / (a.norm() * b.norm())))


def test_targets_that_cannot_be_aligned() -> None:
    k = positive(6)
    with pytest.raises(tg.InputError, match="y is constant"):
        S.target_alignment(k, torch.full((6,), 3.0), centred=True)
    with pytest.raises(tg.InputError, match="y is 0 everywhere"):
        S.target_alignment(k, torch.zeros(6))
    with pytest.raises(tg.InputError, match="K is constant"):
        S.target_alignment(torch.ones(6, 6), targets(6), centred=True)
    with pytest.raises(tg.InputError, match="there are 6 rows and y has shape"):
        S.target_alignment(k, targets(5))
    with pytest.raises(tg.InputError, match="K has 6 rows. Needed: at most"):
        S.energy(k, targets(6), 7)
    with pytest.raises(tg.InputError, match="the spectrum holds 2 eigenpairs"):
        S.energy(tg.linalg.top(k, 2, progress=False), targets(6), 3)
    with pytest.raises(tg.InputError, match=r"y\[0\] is nan"):
        S.energy(k, [math.nan, 0, 0, 0, 0, 0], 1)
    with pytest.raises(tg.InputError, match="the Grams have 6 and 5 rows"):
        S.cka(k, positive(5))
    with pytest.raises(tg.InputError, match="other is constant or 0"):
        S.cka(k, torch.ones(6, 6))
    full = tg.full_ntk(tg.models.mlp([3, 4, 2]))(torch.randn(5, 3))
    with pytest.raises(tg.InputError, match="full over 2 outputs; centring needs"):
        S.target_alignment(full, torch.randn(5, 2), centred=True)
    with pytest.raises(tg.InputError, match="full over 2 outputs; centring needs"):
        S.cka(full, full)


# ---- the lemma and the theorem --------------------------------------------------------------------------------------


def test_lemma_1_holds_on_a_thousand_targets() -> None:
    """‖f‖_Θ² = fᵀ Θ⁻¹ f ≥ ‖f‖₂⁴ / α(f), with equality on eigenvectors."""
    torch.manual_seed(0)
    net, x = tg.models.mlp([5, 40, 1]).double(), torch.randn(40, 5, dtype=F64)
    k = tg.trace_ntk(net)(x)
    inverse = torch.linalg.inv(k)
    for f in torch.randn(1000, 40, dtype=F64):
        alpha = float(f @ k @ f) / 40**2
        assert S.norm_bound(alpha, f) <= float(f @ inverse @ f) * (1 + 1e-9)
    values, vectors = torch.linalg.eigh(k)
    f = 3 * vectors[:, -1]
    assert S.norm_bound(float(f @ k @ f) / 40**2, f) == pytest.approx(9 / float(values[-1]))
    assert S.norm_bound(0.0, f) == math.inf
    huge = S.norm_bound(1e300, 1e150 * torch.ones(4, dtype=F64))
    assert huge == pytest.approx(1e300)
    with pytest.raises(tg.InputError, match="alpha=-1"):
        S.norm_bound(-1, f)
    with pytest.raises(tg.InputError, match="f is 0 everywhere"):
        S.norm_bound(1.0, torch.zeros(3))


def test_theorem_1_agrees_with_monte_carlo() -> None:
    """E[uᵀx ∇f(x)] by 400,000 samples, and by second derivatives at 4,000: they agree to the samples' error."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    u = torch.tensor([0.6, 0.0, 0.8, 0.0], dtype=F64)
    found = S.linear_alignment(tg.full_ntk(net), u, samples=4000, batch=1000)
    x = torch.randn(400_000, 4, dtype=F64)
    for output in range(2):
        drawn = S.jacobian_alignment(tg.head_ntk(net, output), x, x @ u, batch=50_000)
        assert float(found[output]) == pytest.approx(drawn, rel=0.02)


def test_theorem_1_of_a_bilinear_form_is_exact() -> None:
    """f(x) = aᵀ W x: ∂²f/∂x∂W u = a ⊗ u, and ∂²f/∂x∂a u = W u, at every x."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1, bias=False)).double()
    u = torch.randn(3, dtype=F64)
    a, w = net[1].weight.detach()[0], net[0].weight.detach()
    expected = float((a.norm() * u.norm()) ** 2 + (w @ u).norm() ** 2)
    for x in (None, torch.zeros(1, 3, dtype=F64)):
        assert float(S.linear_alignment(tg.trace_ntk(net), u, x=x, samples=7)) == pytest.approx(expected)
    bias = tg.trace_ntk(nn.Linear(3, 1).double(), trainable="bias")
    assert float(S.linear_alignment(bias, u, samples=5)) == 0  # its gradient does not depend on x
    with pytest.raises(tg.InputError, match=r"an input has shape \(3,\) and u \(2,\)"):
        S.linear_alignment(tg.trace_ntk(net), u[:2], x=torch.zeros(1, 3, dtype=F64))


@pytest.mark.parametrize(("bend", "word"), [(nn.ReLU(), "ReLU"), (nn.MaxPool1d(2), "max pooling")])
def test_theorem_1_of_networks_with_kinks(bend: nn.Module, word: str) -> None:
    """Refused; the definition that is named instead agrees with a Gram."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), bend, nn.LazyLinear(1)).double()
    net(torch.zeros(1, 4, dtype=F64))
    u, x = torch.tensor([0.6, 0.0, 0.8, 0.0], dtype=F64), torch.randn(200, 4, dtype=F64)
    with pytest.raises(tg.ModelError, match=rf"the network has {word}: .*jacobian_alignment\(kernel, x, x.flatten"):
        S.linear_alignment(tg.trace_ntk(net), u, samples=5)
    with pytest.raises(tg.ModelError, match=word):
        S.linear_alignment(tg.full_ntk(net), u, x=torch.zeros(1, 4, dtype=F64))
    k, f = tg.trace_ntk(net), x.flatten(1) @ u.flatten()
    assert S.jacobian_alignment(k, x, f) == pytest.approx(float(f @ k(x) @ f) / 200**2)


def test_targets_of_other_shapes_are_refused() -> None:
    net, x = tg.models.mlp([3, 4, 2]).double(), torch.randn(6, 3, dtype=F64)
    with pytest.raises(tg.InputError, match=r"f has shape \(6,\) for 6 samples; needed: \[6, 2\]"):
        S.jacobian_alignment(tg.full_ntk(net), x, torch.ones(6))
    with pytest.raises(tg.InputError, match=r"needed: \[6\], one number for each sample"):
        S.jacobian_alignment(tg.trace_ntk(net), x, torch.ones(6, 2))
    with pytest.raises(tg.InputError, match=r"f\[2\] is inf"):
        S.jacobian_alignment(tg.trace_ntk(net), x, [0, 0, math.inf, 0, 0, 0])
    assert S.jacobian_alignment(tg.trace_ntk(net), x, torch.zeros(6)) == 0


# ---- rotation -------------------------------------------------------------------------------------------------------


def test_rotation_between_checkpoints() -> None:
    k = positive(12)
    _, vectors = torch.linalg.eigh(k)
    turned, angle = k.clone(), 0.3
    plane = vectors[:, [-1, 0]]
    turn = (
        torch.eye(12, dtype=F64)
        + plane
        @ torch.tensor([[math.cos(angle) - 1, -math.sin(angle)], [math.sin(angle), math.cos(angle) - 1]], dtype=F64)
        @ plane.T
    )
    turned = turn @ k @ turn.T
    found = S.rotation([k, 5 * k, (turned + turned.T) / 2], count=1, steps=[0, 10, 30], progress=False)
    assert found.angles[:, 0].tolist() == pytest.approx([0, 0, angle], abs=1e-6)
    assert found.change.tolist() == pytest.approx([0, 0, 1 - S.cka(k, turned)], abs=1e-12)
    assert found.velocity.tolist() == pytest.approx([0, 0, (1 - S.cka(k, turned)) / 20], abs=1e-12)
    assert len(found.table().splitlines()) == 4
    assert len(found.plot().axes) == 3
    grams = [positive(12) for _ in range(4)]  # each is held against the first and the one before
    found = S.rotation(grams, count=1, progress=False)
    assert found.change.tolist() == pytest.approx([1 - S.cka(grams[0], gram) for gram in grams], abs=1e-12)
    before = [1 - S.cka(a, b) for a, b in pairwise(grams)]
    assert found.velocity.tolist() == pytest.approx([0, *before], abs=1e-12)
    with pytest.raises(tg.InputError, match="at least two Grams"):
        S.rotation([k])
    with pytest.raises(tg.InputError, match=r"the Grams have \[11, 12\] rows"):
        S.rotation([k, k[1:, 1:]])
    with pytest.raises(tg.InputError, match="one for each, growing"):
        S.rotation([k, k], steps=[3, 3])
    with pytest.raises(tg.InputError, match="the Grams have 12 rows. Needed"):
        S.rotation([k, k], count=13)
