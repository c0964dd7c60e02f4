"""Outlier scores against scikit-learn, NumPy and each other; p-values by counting; thresholds that keep their rate."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.covariance import LedoitWolf
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from sklearn.svm import OneClassSVM
from torch import Tensor

import tangency as tg
from tangency.distributions import scores

D = tg.distributions
F64 = torch.float64


def data(n: int = 80, m: int = 25, d: int = 4, far: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Known samples, others of which the last are far away, and fresh ones."""
    g = torch.Generator().manual_seed(seed)
    known, asked, fresh = (torch.randn(k, d, generator=g, dtype=F64) for k in (n, m, 30))
    asked[m - far :] += 6
    return known, asked, fresh


# ---- by features ----------------------------------------------------------------------------------------------------


def test_mahalanobis_is_scikit_learns_with_ledoit_and_wolf() -> None:
    known, asked, fresh = data()
    theirs = LedoitWolf(assume_centered=True).fit((known - known.mean(0)).numpy())
    found = D.outliers_features(known, asked, fresh=fresh)
    assert f"shrinkage {theirs.shrinkage_:.3g}" in found.setting
    about = (asked - known.mean(0)).numpy()
    assert np.allclose(found.scores.numpy(), np.einsum("ij,jk,ik->i", about, theirs.precision_, about))
    few = torch.randn(6, 40, dtype=F64)
    theirs = LedoitWolf(assume_centered=True).fit(few.numpy())
    assert np.allclose(scores.shrunk(few, None)[0].numpy(), theirs.covariance_)


def test_classes_share_a_covariance_and_the_nearest_counts() -> None:
    known, asked, fresh = data(60)
    labels = torch.arange(60) % 3 * 7 - 4  # any whole numbers
    known = known + labels[:, None] * torch.tensor([1.0, 0, 0, 0], dtype=F64)
    found = D.outliers_features(known, asked, labels=labels, shrink=0.2, fresh=fresh)
    means = [known[labels == c].mean(0) for c in (-4, 3, 10)]
    residuals = torch.cat([known[labels == c] - mean for c, mean in zip((-4, 3, 10), means, strict=True)])
    s = residuals.T @ residuals / 60
    inverse = torch.linalg.inv(0.8 * s + 0.2 * s.diagonal().mean() * torch.eye(4, dtype=F64))
    near = torch.stack([((asked - mean) @ inverse * (asked - mean)).sum(1) for mean in means]).amin(0)
    assert torch.allclose(found.scores, near)
    whole = D.outliers_features(known, asked, shrink=0.2, fresh=fresh)
    relative = D.outliers_features(known, asked, score="relative mahalanobis", labels=labels, shrink=0.2, fresh=fresh)
    assert torch.allclose(relative.scores, near - whole.scores)
    assert "3 classes" in found.setting


def test_density_is_that_of_principal_components() -> None:
    known, asked, fresh = data(d=6)
    found = D.outliers_features(known, asked, score="density", components=2, fresh=fresh)
    about = known - known.mean(0)
    axes = torch.linalg.svd(about).Vh[:2].T
    expected = -D.density(about @ axes).log((asked - known.mean(0)) @ axes)
    assert torch.allclose(found.scores, expected, atol=1e-6)
    assert found.setting == "2 components"


def test_a_density_has_no_components_of_rounding() -> None:
    line = torch.randn(40, 1, dtype=F64, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 6)
    found = D.outliers_features(line, line[:5] + 0.01, score="density")
    assert found.setting == "1 components"
    for known, given in (line, 2), (torch.ones(40, 5), None):
        with pytest.raises(tg.InputError, match="as the known samples vary in no more"):
            D.outliers_features(known, line[:5], score="density", components=given)
    with pytest.raises(tg.InputError, match="3 of the fresh or asked samples have features that are all 0"):
        D.outliers_features(line, torch.zeros(3, 5), score="neighbours")
    with pytest.raises(tg.InputError, match="of the known samples have features that are all 0"):
        D.outliers_features(torch.zeros(40, 5), line[:5], score="neighbours")


def test_neighbours_are_scikit_learns() -> None:
    known, asked, fresh = data()
    found = D.outliers_features(known, asked, score="neighbours", neighbours=3, fresh=fresh)
    unit = [v / v.norm(dim=1, keepdim=True) for v in (known, asked)]
    theirs = NearestNeighbors(n_neighbors=3).fit(unit[0].numpy()).kneighbors(unit[1].numpy())[0][:, -1]
    assert np.allclose(found.scores.numpy(), theirs, atol=1e-6)


# ---- by a kernel ----------------------------------------------------------------------------------------------------


def test_mahalanobis_by_a_kernel_is_that_by_its_features() -> None:
    known, asked, fresh = data()
    reg = 5.0
    kernel = tg.conjugate_kernel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double(), bias=False)
    found = D.outliers(kernel, known, asked, reg=reg, fresh=fresh, progress=False)
    phi, z = kernel.features(known), kernel.features(asked)
    about = phi - phi.mean(0)
    inverse = torch.linalg.inv(about.T @ about / 80 + reg / 80 * torch.eye(4, dtype=F64))
    away = z - phi.mean(0)
    assert torch.allclose(found.scores, (away @ inverse * away).sum(1), rtol=1e-6)
    assert found.setting == "reg 5"
    assert torch.allclose(
        found.held_out, ((fresh_away := kernel.features(fresh) - phi.mean(0)) @ inverse * fresh_away).sum(1)
    )


def test_one_class_is_kernel_ridge_of_the_number_one_and_density_the_mean() -> None:
    known, asked, fresh = data()
    kernel = tg.gaussian(known)
    theirs = KernelRidge(alpha=2.0, kernel="rbf", gamma=1 / (2 * kernel.bandwidth**2)).fit(known, np.ones(80))
    found = D.outliers(kernel, known, asked, score="one class", reg=2.0, fresh=fresh, progress=False)
    assert np.allclose(found.scores.numpy(), np.abs(1 - theirs.predict(asked)))
    mean = D.outliers(kernel, known, asked, score="density", fresh=fresh, progress=False)
    assert torch.allclose(mean.scores, -kernel(asked, known).mean(1))
    assert mean.setting == "no setting"
    # Beside scikit-learn's machine of another kind, which orders samples much alike.
    machine = OneClassSVM(gamma=1 / (2 * kernel.bandwidth**2), nu=0.5).fit(known.numpy())
    both = np.stack([-machine.score_samples(asked.numpy()), mean.scores.numpy()])
    assert scipy.stats.spearmanr(*both).statistic > 0.9


@pytest.mark.parametrize("score", ["mahalanobis", "one class", "density"])
def test_a_gram_at_hand_gives_the_same(score: str) -> None:
    known, asked, fresh = data()
    kernel = tg.gaussian(known)
    whole = kernel(torch.cat([asked, fresh, known]))
    for spare in (fresh, None):
        direct = D.outliers(kernel, known, asked, score=score, fresh=spare, progress=False)
        rows = None if spare is None else range(25, 55)
        ready = D.outliers(whole, range(55, 135), range(25), score=score, fresh=rows)
        assert torch.allclose(direct.scores, ready.scores)
        assert torch.allclose(direct.p, ready.p)


# ---- p-values and thresholds ----------------------------------------------------------------------------------------


def test_p_is_counted_and_thresholds_agree_with_it() -> None:
    known, asked, fresh = data()
    found = D.outliers_features(known, asked, fresh=fresh)
    for score, p in zip(found.scores.tolist(), found.p.tolist(), strict=True):
        assert p == pytest.approx((1 + sum(v >= score for v in found.held_out.tolist())) / 31)
    for rate in (0.04, 0.05, 0.1, 0.33, 0.5):
        assert set(found.flagged(rate).tolist()) == set((found.p <= rate + 1e-12).nonzero()[:, 0].tolist())
    assert set(found.flagged(0.05)[:5].tolist()) == {20, 21, 22, 23, 24}
    assert found.threshold(0.01) == math.inf
    assert len(found.flagged(0.01)) == 0
    assert "30 samples were held out, 99 are needed for a rate of 0.01" in found.sentence(0.01)


def test_the_rate_of_false_alarms_is_kept() -> None:
    rates = []
    for seed in range(100):
        known, asked, _ = data(60, 20, far=0, seed=seed)
        found = D.outliers_features(known, asked, held_out=1 / 3, seed=seed)
        assert found.fitted == 40
        assert len(found.held_out) == 20
        rates.append(len(found.flagged(0.1)) / 20)
    assert np.mean(rates) == pytest.approx(2 / 21, abs=0.02)


def test_auroc_sentence_table_plot_and_dict() -> None:
    known, asked, _ = data(200)
    found = D.outliers_features(known, asked)
    kind = torch.arange(25) >= 20
    assert found.auroc(kind).value == pytest.approx(roc_auc_score(kind, found.scores)) == 1.0
    assert "of 25 samples" in found.sentence()
    assert "by mahalanobis (shrinkage" in found.sentence()
    assert "flagged of 25" in found.table()
    assert len(found.plot().axes) == 1
    assert found.to_dict()["fitted"] == 140
    few = D.outliers_features(known[:10], asked)
    assert few.threshold() == math.inf
    assert few.plot()


def test_the_same_on_every_call_and_by_the_seed() -> None:
    known, asked, _ = data()
    state = torch.get_rng_state()
    a, b, c = (D.outliers_features(known, asked, seed=s) for s in (0, 0, 1))
    assert torch.equal(a.scores, b.scores)
    assert not torch.equal(a.scores, c.scores)
    assert torch.equal(state, torch.get_rng_state())


def test_float32_is_worked_on_in_float64() -> None:
    known, asked, fresh = data()
    a = D.outliers_features(known.float(), asked.float().numpy(), fresh=fresh.float())
    assert torch.allclose(a.scores, D.outliers_features(known, asked, fresh=fresh).scores, rtol=1e-4)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "one class"}, "score='one class'; needed: 'mahalanobis', .*a kernel has others: outliers"),
        ({"score": "relative mahalanobis"}, "give their labels="),
        ({"score": "density", "labels": torch.zeros(80).long()}, "the score 'density' has no labels="),
        ({"score": "neighbours", "components": 3}, "the score 'neighbours' has no components="),
        ({"neighbours": 3}, "the score 'mahalanobis' has no neighbours="),
        ({"score": "density", "shrink": 0.1}, "has no shrink="),
        ({"shrink": 1.5}, "shrink=1.5; needed: a number from 0 to 1"),
        ({"labels": torch.zeros(79).long()}, r"labels are torch.int64 of shape \(79,\); needed: \[80\]"),
        ({"labels": torch.zeros(80)}, "needed: .80. classes as integers"),
        ({"score": "density", "components": 5}, "components=5; needed: at most 4"),
        ({"score": "neighbours", "neighbours": 57}, "neighbours=57; needed: at most 56"),
        ({"score": "neighbours", "neighbours": 0}, "neighbours=0; needed: a number"),
        ({"held_out": 1.0}, "held_out=1.0; needed: a part of the known samples"),
        ({"held_out": 0.01}, "of 80 known samples 1 would be held out"),
        ({"fresh": torch.zeros(3, 5)}, "known has 4 features, fresh 5"),
    ],
)
def test_options_by_features(options: dict[str, object], message: str) -> None:
    known, asked, _ = data()
    with pytest.raises(tg.InputError, match=message):
        D.outliers_features(known, asked, **options)  # type: ignore[arg-type]


def test_what_is_refused() -> None:
    known, asked, _ = data()
    kernel, bad = tg.gaussian(known), asked.clone()
    bad[0, 0] = math.nan
    constant = torch.ones(20, 3, dtype=F64)
    found = D.outliers_features(known, asked)
    for call, message in [
        (lambda: D.outliers_features(known, bad), r"asked\[0, 0\] is nan"),
        (lambda: D.outliers_features(constant, asked[:, :3]), "the covariance of the known samples is singular"),
        (lambda: D.outliers_features(known, asked[:, :3]), "known has 4 features, asked 3"),
        (lambda: D.outliers(kernel, known, asked, score="neighbours"), "features of a network have others"),
        (lambda: D.outliers(kernel, known, asked, reg=0.0), "reg=0; needed: a number above 0"),
        (lambda: D.outliers(kernel, known, asked, score="density", reg=1.0), "the density has no reg="),
        (lambda: D.outliers(kernel, constant, constant), "known samples that are all equal have none"),
        (lambda: D.outliers(kernel(known), range(70), range(60, 80)), "known and asked name a row of the Gram twice"),
        (lambda: D.outliers_features(known, asked * 1e200, score="density"), "the scores overflow float64"),
        (lambda: found.threshold(0.0), "rate=0.0; needed: a part of the known samples"),
        (lambda: found.auroc([1] * 25), "25 samples are positive and 0 negative"),
    ]:
        with pytest.raises(tg.InputError, match=message):
            call()
