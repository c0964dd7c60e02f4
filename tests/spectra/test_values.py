"""Bulks, comparisons, tails and ranks against SciPy, closed forms and simulations."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tangency as tg
from tangency.spectra.compare import kolmogorov, wasserstein

S = tg.spectra
F64 = torch.float64


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=F64)


def values_of(w: Tensor) -> Tensor:
    return torch.linalg.svdvals(w).square() / max(w.shape)


# ---- comparisons ----------------------------------------------------------------------------------------------------


@given(st.integers(2, 60), st.integers(2, 60), st.integers(0, 1000))
def test_distances_are_scipys(n: int, m: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, generator=g, dtype=F64).round(decimals=1), torch.randn(m, generator=g, dtype=F64)  # ties too
    found = S.compare(a, b)
    assert found.ks == pytest.approx(scipy.stats.ks_2samp(a, b).statistic, abs=1e-12)
    assert found.wasserstein == pytest.approx(scipy.stats.wasserstein_distance(a, b), abs=1e-12)
    wa, wb = torch.rand(n, generator=g, dtype=F64) + 0.01, torch.rand(m, generator=g, dtype=F64) + 0.01
    (a, i), (b, j) = a.sort(), b.sort()
    ours = wasserstein(a, b, wa[i] / wa.sum(), wb[j] / wb.sum())
    assert ours == pytest.approx(scipy.stats.wasserstein_distance(a, b, wa[i], wb[j]), abs=1e-12)


def test_kolmogorovs_law_is_scipys() -> None:
    for t in (0.1, 0.3, 0.8, 1.36, 2.0, 5.0):
        assert kolmogorov(t) == pytest.approx(scipy.stats.kstwobign.sf(t), abs=1e-10)


def test_quantiles_are_the_values_where_there_are_as_many() -> None:
    a, b = torch.randn(50, dtype=F64), torch.randn(50, dtype=F64)
    found = S.compare(a, b, points=50)
    torch.testing.assert_close(found.trained, a.sort().values)
    torch.testing.assert_close(found.initial, b.sort().values)
    assert "bulk" in found.table()
    np.testing.assert_allclose(found.plot().axes[0].lines[1].get_ydata(), a.sort().values)


@given(st.floats(-30, 30), st.floats(0.5, 3.0))
def test_verdicts_do_not_depend_on_the_scale(power: float, factor: float) -> None:
    a, b = values_of(gaussian(80, 40)), factor * values_of(gaussian(80, 40, 1))
    one, other = S.compare(a, b), S.compare(a * 10**power, b * 10**power)
    assert one.verdict == other.verdict
    assert one.ks == pytest.approx(other.ks, abs=1 / 40)  # a tie may fall either way
    assert one.shift == pytest.approx(other.shift, rel=1e-6)
    edge, scaled = S.bulk_edge(b), S.bulk_edge(b * 10**power)
    assert scaled.threshold == pytest.approx(edge.threshold * 10**power, rel=1e-6)


# ---- Marchenko and Pastur -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(400, 100), (300, 300), (1000, 10)])
def test_marchenko_pastur_has_its_moments(rows: int, columns: int) -> None:
    law = S.marchenko_pastur(columns, rows, variance=0.7)  # either order
    x = 0.7 * (1 + law.ratio + 2 * math.sqrt(law.ratio) * torch.linspace(math.pi, 0, 200_001, dtype=F64).cos())
    density, x = law.density(x[1:-1]), x[1:-1]
    assert torch.trapezoid(density, x) == pytest.approx(1, abs=2e-3)
    for k in (1, 2, 3):
        assert torch.trapezoid(density * x**k, x) == pytest.approx(law.moment(k), rel=2e-3)
    assert law.moment(1) == pytest.approx(0.7)
    assert law.moment(2) == pytest.approx(0.49 * (1 + law.ratio))
    cdf = torch.cumulative_trapezoid(density, x)
    for part in (0.1, 0.5, 0.9):
        at = float(law.quantiles(torch.tensor([part], dtype=F64)))
        assert float(cdf[torch.searchsorted(x, at).clamp_max(len(cdf) - 1)]) == pytest.approx(part, abs=3e-3)
    assert float(law.density(torch.tensor([law.upper * 1.01], dtype=F64))) == 0


def test_weights_of_a_random_layer_follow_the_law() -> None:
    torch.manual_seed(0)
    found = S.weights(nn.Linear(150, 400))["weight"]
    assert (found.rows, found.columns, len(found.values)) == (400, 150, 150)
    # torch draws uniformly from ±1/√150: variance 1/450.
    assert found.bulk.variance == pytest.approx(1 / 450, rel=0.05)
    assert len(found.spikes()) == 0
    assert found.values.max() == pytest.approx(found.bulk.edge().upper, rel=0.05)
    expected = found.bulk.quantiles((torch.arange(150) + 0.5).double() / 150).flip(0)
    assert S.compare(found, expected).invariant
    torch.testing.assert_close(found.singular, torch.linalg.svdvals(_weight(0)), atol=1e-6, rtol=1e-5)
    assert "400 x 150" in found.table()
    assert found.plot().axes


def _weight(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return nn.Linear(150, 400).weight.detach().double()


def test_the_largest_eigenvalue_lies_below_the_edge_in_99_of_100_draws() -> None:
    edge = S.marchenko_pastur(120, 60).edge()
    above = sum(float(values_of(gaussian(120, 60, seed))[0]) > edge.threshold for seed in range(300))
    assert above <= 9  # 3 expected


def test_a_planted_spike_is_where_theory_has_it() -> None:
    """Baik, Ben Arous & Péché: a rank-one part of strength θ√n gives (1 + θ²)(q + θ²)/θ²."""
    n, m, theta = 800, 400, 2.0
    u, v = gaussian(n, 1, 1), gaussian(m, 1, 2)
    w = gaussian(n, m) + theta * math.sqrt(n) * (u / u.norm()) @ (v / v.norm()).T
    model = nn.Linear(m, n, bias=False).double()
    model.weight.data.copy_(w)
    found = S.weights(model)["weight"]
    q = m / n
    assert len(found.spikes()) == 1
    assert float(found.spikes()[0]) == pytest.approx((1 + theta**2) * (q + theta**2) / theta**2, rel=0.05)


# ---- weights by name ------------------------------------------------------------------------------------------------


def test_convolutions_are_matrices_of_patches_by_groups() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3, groups=2), nn.ConvTranspose1d(6, 2, 5), nn.BatchNorm2d(6)
    )
    found = S.weights(net)
    assert list(found) == ["0.weight", "1.weight", "2.weight"]
    assert [(f.rows, f.columns, f.count) for f in found.values()] == [(6, 36, 1), (3, 27, 2), (6, 10, 1)]
    w = net[1].weight.detach().double().reshape(2, 3, 27)
    expected = torch.cat([torch.linalg.eigvalsh(p @ p.T) / 27 for p in w]).sort(descending=True).values
    torch.testing.assert_close(found["1.weight"].values, expected)


def test_weights_of_tied_parametrised_frozen_and_other_checkpoints() -> None:
    net = nn.Sequential(
        nn.Embedding(7, 5), nn.Linear(5, 7, bias=False), nn.utils.parametrizations.weight_norm(nn.Linear(7, 3))
    )
    net[1].weight = net[0].weight
    net[2].requires_grad_(False)
    found = S.weights(net)
    assert sorted(found) == ["0.weight", "2.weight"]  # tied once; the weight that weight norm makes
    torch.testing.assert_close(found["2.weight"].values, values_of(net[2].weight.detach().double()))
    doubled = {k: 2 * v for k, v in net.state_dict().items()}
    again = S.weights(net, params=doubled)
    torch.testing.assert_close(again["0.weight"].values, 4 * found["0.weight"].values)
    torch.testing.assert_close(S.weights(net)["0.weight"].values, found["0.weight"].values)  # left as it was
    assert list(S.weights(net, names="2")) == ["2.weight"]
    half = nn.Linear(4, 3).to(torch.bfloat16)
    torch.testing.assert_close(S.weights(half)["weight"].values, values_of(half.weight.detach().double()))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weights_that_old_hooks_make() -> None:
    """Weight norm, spectral norm and pruning before parametrisations: the weight, not what it is made of."""
    for made in (
        nn.utils.weight_norm(nn.Linear(7, 5)),
        nn.utils.spectral_norm(nn.Linear(7, 5)),
        nn.utils.prune.random_unstructured(nn.Linear(7, 5), "weight", 0.3),
    ):
        net = nn.Sequential(made, nn.Tanh(), nn.Linear(5, 2)).train()
        net(torch.randn(3, 7))
        buffers = {k: v.clone() for k, v in net.named_buffers()}
        found = S.weights(net)
        assert sorted(found) == ["0.weight", "2.weight"]
        assert all(torch.equal(v, buffers[k]) for k, v in net.named_buffers())
        net.eval()(torch.randn(3, 7))
        torch.testing.assert_close(found["0.weight"].values, values_of(net[0].weight.detach().double()))
    moved = {k: 2 * v if k == "0.weight_orig" else v for k, v in net.state_dict().items()}
    torch.testing.assert_close(S.weights(net, params=moved)["0.weight"].values, 4 * found["0.weight"].values)
    assert list(S.weights(net, names="0")) == ["0.weight"]


def test_weights_refuse_what_is_no_matrix() -> None:
    with pytest.raises(tg.InputError, match="needed: a torch.nn.Module"):
        S.weights(torch.eye(3))  # type: ignore[arg-type]
    with pytest.raises(tg.InputError, match="no weight matrix"):
        S.weights(nn.BatchNorm1d(3))
    with pytest.raises(tg.InputError, match="none of bias is a matrix"):
        S.weights(nn.Linear(3, 2), names="bias")
    broken = nn.Linear(3, 2)
    broken.weight.data[1, 2] = math.nan
    with pytest.raises(tg.InputError, match=r"weight\[1, 2\] is nan; needed: finite"):
        S.weights(broken)
    for unready in (nn.LazyLinear(3), nn.Linear(3, 2, device="meta")):
        with pytest.raises(tg.InputError, match="parameter weight has no values yet"):
            S.weights(unready)
    zero = nn.Linear(3, 2)
    zero.weight.data.zero_()
    with pytest.raises(tg.InputError, match="no bulk can be fitted"):
        _ = S.weights(zero)["weight"].bulk


# ---- ranks ----------------------------------------------------------------------------------------------------------


@given(st.floats(-300, 300), st.integers(1, 30))
def test_ranks_are_those_of_equal_values_at_any_scale(power: float, k: int) -> None:
    found = S.ranks([10**power] * k + [0.0] * 3)
    assert found.entropy == pytest.approx(k)
    assert found.stable == pytest.approx(k)
    assert found.participation == pytest.approx(k)
    assert (found.numerical, found.condition, found.n) == (k, math.inf, k + 3)


def test_ranks_of_matrices() -> None:
    w = gaussian(30, 20)
    found = S.ranks(w.T @ w)
    assert found.stable == pytest.approx(float(w.norm() ** 2 / torch.linalg.matrix_norm(w, 2) ** 2))
    assert found.condition == pytest.approx(float(torch.linalg.cond(w.T @ w)))
    assert 1 <= found.stable <= found.participation <= found.entropy <= 20
    assert S.ranks((w @ w.T).float()).numerical == 20  # rounding of float32 is no rank
    assert S.ranks(tg.linalg.spectrum(w.T @ w)).stable == pytest.approx(found.stable)
    assert "entropy" in found.table()
    with pytest.raises(tg.InputError, match="all 3 values are 0"):
        S.ranks(torch.zeros(3))
    with pytest.raises(tg.NotPositiveDefinite, match="which are not negative"):
        S.ranks([1.0, -0.5])


# ---- tails ----------------------------------------------------------------------------------------------------------


def pareto(alpha: float, n: int, seed: int = 0) -> Tensor:
    u = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return (1 - u) ** (-1 / (alpha - 1))


def test_a_tail_begins_where_it_is_said_to_and_not_at_the_next_value() -> None:
    """α = 1 + k/Σ log(λ_i/start), by hand; p by samples that begin there."""
    tail = torch.tensor([10.0, 11.0, 12.0, 30.0], dtype=F64)
    x = torch.cat([torch.linspace(1, 4, 20, dtype=F64), tail])
    for scale in (1.0, 1e-30):
        fit = S.power_law(scale * x, draws=20, start=5 * scale)
        assert fit.alpha == pytest.approx(1 + 4 / float((tail / 5).log().sum()))
        assert (fit.start, fit.tail, fit.n) == (5 * scale, 4, 24)
    mean = sum(S.power_law(pareto(2.5, 60, seed), draws=20, start=1.0, seed=seed).p for seed in range(20)) / 20
    assert 0.35 < mean < 0.65  # p is uniform where the law is right
    for start in (30.0, 0.0, -1.0, math.nan):
        with pytest.raises(tg.InputError, match="start="):
            S.power_law(x, start=start)


def test_exponents_come_back_within_their_errors() -> None:
    off = []
    for seed in range(30):
        fit = S.power_law(pareto(2.5, 500, seed), draws=0, start=1.0)
        off.append((fit.alpha - 2.5) / fit.error)
    off = torch.tensor(off)
    assert abs(float(off.mean())) < 0.5
    assert 0.6 < float(off.std()) < 1.4
    x = pareto(2.5, 500)
    fit = S.power_law(x, draws=0, start=1.0)
    tail = x[x >= fit.start]
    assert fit.alpha == pytest.approx(1 + len(tail) / float((tail / fit.start).log().sum()))
    reference = scipy.stats.kstest((tail / fit.start).numpy(), scipy.stats.pareto(fit.alpha - 1).cdf).statistic
    assert fit.distance == pytest.approx(reference, abs=1e-12)


def test_where_a_tail_begins_is_found() -> None:
    body = 1 + torch.rand(700, generator=torch.Generator().manual_seed(1), dtype=F64)
    fit = S.power_law(torch.cat([body, 2 * pareto(3.0, 300)]), draws=50)
    assert fit.start == pytest.approx(2, rel=0.15)
    assert fit.alpha == pytest.approx(3.0, abs=3 * fit.error)
    assert fit.plausible
    assert f"{fit.tail}/1000" in fit.table()
    assert len(fit.plot().axes[0].lines) == 2


@pytest.mark.slow
def test_p_is_uniform_for_power_laws_and_small_for_others() -> None:
    p = torch.tensor([S.power_law(pareto(2.5, 120, seed), draws=40, seed=seed).p for seed in range(30)])
    assert 0.3 < float(p.mean()) < 0.75
    assert float((p < 0.1).double().mean()) < 0.3
    uniform = 1 + torch.rand(600, dtype=F64, generator=torch.Generator().manual_seed(0))
    fit = S.power_law(uniform, draws=40, start=1.0)
    assert fit.p == 0
    assert fit.against["exponential"].ratio < -2
    assert fit.against["exponential"].p < 0.05


def test_other_laws_by_their_likelihoods() -> None:
    x = pareto(2.5, 1000)
    fit = S.power_law(x, draws=0, start=1.0)
    assert fit.against["exponential"].ratio > 3
    assert abs(fit.against["lognormal"].ratio) < 2  # one with a far mean is as good
    lognormal = torch.exp(0.4 * torch.randn(2000, dtype=F64, generator=torch.Generator().manual_seed(0)))
    assert S.power_law(lognormal, draws=0, start=0.5).against["lognormal"].ratio < -5


def test_the_fit_is_that_of_the_package_powerlaw() -> None:
    """By the package where it is installed, and by what it gave: version 2.0.0 on the same values."""
    x = pareto(2.2, 100, 3)
    fit = S.power_law(x, draws=0)  # every place is tried: at most 100
    known = {"alpha": EXPECTED[0], "start": EXPECTED[1]}
    for name, value in known.items():
        assert getattr(fit, name) == pytest.approx(value, rel=1e-6), name
    package = pytest.importorskip("powerlaw")
    theirs = package.Fit(x.numpy(), verbose=False)
    assert theirs.power_law.alpha == pytest.approx(fit.alpha, rel=1e-6)


EXPECTED = (2.38759284509634, 1.0035490775275346)


@pytest.mark.parametrize("power", [-30.0, -7.3, 11.1, 30.0])
def test_a_tail_does_not_depend_on_the_scale(power: float) -> None:
    x = pareto(2.5, 60)
    one, other = S.power_law(x, draws=0), S.power_law(x * 10**power, draws=0)
    assert one.alpha == pytest.approx(other.alpha, rel=1e-6)
    assert one.against["exponential"].ratio == pytest.approx(other.against["exponential"].ratio, rel=1e-6)


def test_tails_refuse_what_has_none() -> None:
    with pytest.raises(tg.InputError, match="has 5 eigenvalues above 0; needed: at least 20 for a tail fit"):
        S.power_law([1.0, 2.0, 3.0, 4.0, 5.0] + [0.0] * 40)
    with pytest.raises(tg.InputError, match="they have no tail"):
        S.power_law(torch.ones(50))
    with pytest.raises(tg.InputError, match="fewer than 2 of the values above"):
        S.power_law(torch.arange(1.0, 51.0), start=50.0)
    with pytest.raises(tg.InputError, match="draws=-1"):
        S.power_law(torch.arange(1.0, 51.0), draws=-1)


# ---- what is given --------------------------------------------------------------------------------------------------


def test_eigenvalues_of_any_gram(tmp_path: object) -> None:
    net, x = tg.models.mlp([4, 8, 2]).double(), gaussian(12, 4)
    stored = tg.compute(tg.full_ntk(net), x, store=f"{tmp_path}/gram", tile=5, progress=False)
    k = tg.full_ntk(net)(x).reshape(24, 24)
    torch.testing.assert_close(S.eigenvalues(stored), torch.linalg.eigvalsh(k).flip(0))
    assert S.compare(stored, k).ks <= 2 / 24
    assert S.compare(k.numpy(), list(torch.linalg.eigvalsh(k).numpy())).wasserstein < 1e-9


def test_zeros_of_singular_matrices_are_no_noise() -> None:
    """Rounding of either sign where the eigenvalues are 0 is no difference of two spectra, and no tail."""
    w = gaussian(60, 20)
    k = w @ w.T
    other = (lambda q: (lambda m: (m + m.T) / 2)(q @ k @ q.T))(torch.linalg.qr(gaussian(60, 60, 1)).Q)
    for a, b in ((k, other), (k.float(), other.float())):
        found = S.compare(a, b)
        assert found.invariant
        assert S.classify(a, b).kind == "invariant"
        assert S.ranks(a).numerical == 20
    assert S.power_law(k, draws=0).n == 20


def test_what_is_no_spectrum_is_refused() -> None:
    with pytest.raises(tg.InputError, match="not symmetric"):
        S.ranks(gaussian(4, 4))
    with pytest.raises(tg.InputError, match="needed: a square Gram"):
        S.ranks(gaussian(4, 3))
    with pytest.raises(tg.InputError, match=r"values\[1\] is nan; needed: finite"):
        S.ranks([1.0, math.nan])
    with pytest.raises(tg.InputError, match="needed: real eigenvalues"):
        S.ranks(torch.ones(2, 2, 2))
    with pytest.raises(tg.InputError, match="holds 2 of 5 eigenvalues; needed: all"):
        S.ranks(tg.linalg.top(torch.eye(5), 2, progress=False))
    with pytest.raises(tg.InputError, match="has 3 eigenvalues; needed: at least 10"):
        S.bulk_edge([1.0, 2.0, 3.0])
    with pytest.raises(tg.InputError, match="level=0; needed"):
        S.compare([1.0], [1.0], level=0)
    with pytest.raises(tg.InputError, match="rows=0"):
        S.marchenko_pastur(0, 3)
    with pytest.raises(tg.InputError, match="variance=0; needed: above 0"):
        S.marchenko_pastur(4, 3, variance=0)
