"""AUROC against scikit-learn, its variance against the definition, intervals against simulation; densities, SciPy's."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

import tangency as tg
from tangency.distributions.intervals import placements, proportion

D = tg.distributions


@given(st.integers(2, 30), st.integers(0, 1000), st.integers(1, 6))
def test_auroc_is_scikit_learns_with_ties(n: int, seed: int, levels: int) -> None:
    g = np.random.default_rng(seed)
    scores, kind = g.integers(0, levels, n).astype(float), g.permutation(np.arange(n) % 2)
    found = D.auroc(scores, kind)
    assert found.value == pytest.approx(roc_auc_score(kind, scores))
    assert 0 <= found.low <= found.value <= found.high <= 1
    turned = D.auroc(-scores, kind)
    assert turned.low == pytest.approx(1 - found.high)
    assert turned.high == pytest.approx(1 - found.low)


def test_the_variance_is_delongs() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(13, generator=g).double() + 1, torch.randn(9, generator=g).double()
    wins = (a[:, None] > b).double() + 0.5 * (a[:, None] == b).double()
    beaten, beating = placements(a, b)
    assert torch.allclose(beaten, wins.mean(1))
    assert torch.allclose(beating, wins.mean(0))
    value = float(wins.mean())
    deviation = math.sqrt(float(wins.mean(1).var()) / 13 + float(wins.mean(0).var()) / 9)
    found = D.auroc(torch.cat([a, b]), [1] * 13 + [0] * 9)
    half = 1.959964 * deviation / (value * (1 - value))
    centre = math.log(value / (1 - value))
    assert found.low == pytest.approx(1 / (1 + math.exp(half - centre)), rel=1e-6)
    assert found.high == pytest.approx(1 / (1 + math.exp(-half - centre)), rel=1e-6)


def test_the_intervals_cover() -> None:
    g, inside, shift = np.random.default_rng(0), 0, 1.0
    truth = float(scipy.stats.norm.cdf(shift / math.sqrt(2)))
    for _ in range(300):
        found = D.auroc(np.concatenate([g.normal(shift, 1, 25), g.normal(0, 1, 25)]), [1] * 25 + [0] * 25)
        inside += found.low <= truth <= found.high
    assert 0.91 <= inside / 300 <= 0.985
    apart = D.auroc([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 1])
    assert apart.value == apart.high == 1.0
    assert apart.low == pytest.approx(math.sqrt(0.025))
    assert "AUROC(1.0000, 95% in [" in repr(apart)
    low, high = proportion(7, 40)
    theirs = scipy.stats.binomtest(7, 40).proportion_ci(method="wilson")
    assert low == pytest.approx(theirs.low)
    assert high == pytest.approx(theirs.high)


def test_what_auroc_refuses() -> None:
    for scores, kind, message in [
        ([1.0, 2.0], [1, 1], "2 samples are positive and 0 negative"),
        ([1.0, 2.0], [0, 2], "other values than 0 and 1"),
        ([1.0, 2.0], [0, 1, 1], "needed: both"),
        ([1.0, math.nan], [0, 1], r"scores\[1\] is nan"),
    ]:
        with pytest.raises(tg.InputError, match=message):
            D.auroc(scores, kind)
    with pytest.raises(tg.InputError, match="confidence=95; needed: a probability"):
        D.auroc([1.0, 2.0], [0, 1], confidence=95)


@pytest.mark.parametrize("d", [1, 3])
def test_the_density_is_scipys(d: int) -> None:
    g = np.random.default_rng(0)
    x, z, w = g.normal(size=(50, d)) @ np.diag([1.0, 5.0, 0.1][:d]), g.normal(size=(7, d)), g.uniform(size=50)
    assert np.allclose(D.density(x).log(z).numpy(), scipy.stats.gaussian_kde(x.T).logpdf(z.T))
    theirs = scipy.stats.gaussian_kde(x.T, weights=w)
    found = D.density(x, weights=w)
    assert np.allclose(found.log(z).numpy(), theirs.logpdf(z.T))
    assert found.bandwidth == pytest.approx(theirs.factor)
    wide = scipy.stats.gaussian_kde(x.T, bw_method=0.9)
    assert np.allclose(D.density(x, bandwidth=0.9).log(z).numpy(), wide.logpdf(z.T))
    far = D.density(x).log(z + 1e4)
    assert bool(far.isfinite().all())
    assert float(far.max()) < -1e5


def test_what_densities_refuse() -> None:
    x = torch.randn(20, 2)
    for call, message in [
        (lambda: D.density(x[:2]), r"points have shape \(2, 2\); needed: \[n, d\] with more points"),
        (lambda: D.density(torch.cat([x, x[:, :1]], 1)), "the points lie in fewer dimensions"),
        (lambda: D.density(torch.ones(9, 1)), "the points lie in fewer dimensions"),
        (lambda: D.density(x, bandwidth=0.0), "bandwidth=0"),
        (lambda: D.density(x, weights=torch.zeros(20)), "not all 0"),
        (lambda: D.density(x, weights=torch.ones(19)), r"weights have shape \(19,\)"),
        (lambda: D.density(x).log(torch.zeros(3, 3)), r"z has shape \(3, 3\); needed: points \[m, 2\]"),
        (lambda: D.density(x * math.nan), "is nan"),
    ]:
        with pytest.raises(tg.InputError, match=message):
            call()
