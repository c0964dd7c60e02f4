"""The classifier test against scikit-learn's ridge and logistic regression, refitted for permutations one by one."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import Tensor

import tangency as tg
from tangency.distributions import classified, machines, null

D = tg.distributions
F64 = torch.float64


def pair(m: int = 22, n: int = 17, shift: float = 0.0, d: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, d, generator=g, dtype=F64), torch.randn(n, d, generator=g, dtype=F64) + shift


def by_hand(both: Tensor, z: Tensor, parts: list[Tensor], reg: float) -> np.ndarray:
    """Out-of-fold scores of scikit-learn's ridge regression on the coded labels."""
    scores, n = np.empty(len(both)), len(both)
    coded = n / 2 * (z / z.sum() - (1 - z) / (1 - z).sum())
    for part in parts:
        others = np.setdiff1d(np.arange(n), part.numpy())
        fit = Ridge(alpha=reg).fit(both[others].numpy(), coded[others].numpy())
        # Without the intercept's own part, which is the labels' mean: the threshold makes up for uneven numbers.
        scores[part] = fit.predict(both[part].numpy()) - coded[others].numpy().mean()
    return scores


def test_scores_and_null_are_those_of_ridge_regression_refitted() -> None:
    x, y = pair(shift=0.6)
    both = torch.cat([x, y])
    found = D.classifier_test_features(x, y, draws=8, reg=2.5, seed=4)
    of_x = torch.arange(39) < 22
    g = torch.Generator().manual_seed(4)
    parts = classified._folds(of_x, 5, g)
    z = of_x.double()
    scores = by_hand(both, z, parts, 2.5)
    assert np.allclose(torch.cat([found.scores_x, found.scores_y]).numpy(), scores)
    assert found.value == found.auc.value == pytest.approx(roc_auc_score(z, scores))
    mixed = null.permuted_within(of_x, parts, 8, g)
    for draw in range(8):
        own = roc_auc_score(mixed[:, draw], by_hand(both, mixed[:, draw], parts, 2.5))
        assert float(found.null[draw]) == pytest.approx(own)
    assert found.folds == 5
    assert found.machine == "ridge"
    assert found.reg == 2.5


def test_permutations_keep_how_many_of_each_kind_a_fold_has() -> None:
    of_x = torch.arange(39) < 22
    g = torch.Generator().manual_seed(0)
    parts = classified._folds(of_x, 5, g)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(39))
    mixed = null.permuted_within(of_x, parts, 20, g)
    for part in parts:
        assert bool((mixed[part].sum(0) == of_x[part].sum()).all())
        assert abs(float(of_x[part].double().mean()) - 22 / 39) < 0.1


@pytest.mark.parametrize("statistic", ["auc", "accuracy", "scores"])
@pytest.mark.parametrize("machine", ["ridge", "logistic"])
def test_kernel_gram_and_features_agree(statistic: str, machine: str) -> None:
    x, y = pair(shift=0.5)
    both = torch.cat([x, y])
    options = {"statistic": statistic, "machine": machine, "draws": 40, "reg": 3.0, "progress": False}
    features = D.classifier_test_features(x, y, **options)  # type: ignore[arg-type]
    gram = D.classifier_test(both @ both.T, range(22), range(22, 39), **options)  # type: ignore[arg-type]
    assert features.p == gram.p
    assert features.value == pytest.approx(gram.value)
    assert torch.allclose(features.scores_x, gram.scores_x, equal_nan=True, atol=1e-6)
    wide = torch.cat([both, torch.zeros(39, 60, dtype=F64)], 1)  # more features than samples: by their Gram
    again = D.classifier_test_features(wide[:22], wide[22:], **options)  # type: ignore[arg-type]
    assert again.p == features.p
    assert torch.allclose(again.null, features.null, atol=1e-6)


def test_values_are_what_they_are_called() -> None:
    x, y = pair(40, 25, 0.8)
    found = {s: D.classifier_test_features(x, y, statistic=s, draws=20) for s in ("auc", "accuracy", "scores")}
    z = np.arange(65) < 40
    scores = torch.cat([found["auc"].scores_x, found["auc"].scores_y]).numpy()
    assert found["auc"].value == pytest.approx(roc_auc_score(z, scores))
    apart = scores[:40].mean() - scores[40:].mean()
    assert found["scores"].value == pytest.approx(apart)
    said = scores > (0.5 - 40 / 65) * apart
    assert found["accuracy"].value == found["auc"].accuracy == pytest.approx(balanced_accuracy_score(z, said))
    low, high = found["auc"].accuracy_interval
    assert low < found["auc"].accuracy < high


def test_logistic_is_fitted_to_one_half() -> None:
    x, y = pair(30, 20, 1.0)
    found = D.classifier_test_features(x, y, machine="logistic", reg=1.5, draws=10)
    scores, both = torch.cat([found.scores_x, found.scores_y]), torch.cat([x, y])
    train = scores.isnan()
    assert int(train[:30].sum()) == 15
    assert int(train[30:].sum()) == 10
    assert found.folds is None
    z = torch.arange(50) < 30
    weights = torch.where(z, 0.5 / 0.6, 0.5 / 0.4)[train].numpy()
    theirs = LogisticRegression(C=1 / 1.5, tol=1e-12, max_iter=10_000).fit(both[train], z[train], weights)
    assert np.allclose(theirs.decision_function(both[~train]), scores[~train].numpy(), atol=1e-5)
    assert found.value == pytest.approx(roc_auc_score(z[~train], scores[~train]))
    assert not found.carriers(50)[0].numel() > 15  # only those that were asked


def test_default_reg_knows_no_labels_and_is_the_same_either_way() -> None:
    x, y = pair(shift=2.0)
    both = torch.cat([x, y])
    centred = both - both.mean(0)
    expected = float(centred.square().sum(1).mean())
    assert machines.ByFeatures(both).default_reg() == pytest.approx(expected)
    assert machines.ByGram(both @ both.T).default_reg() == pytest.approx(expected)
    assert D.classifier_test_features(x, y, draws=1).reg == pytest.approx(expected)


@pytest.mark.parametrize("machine", ["ridge", "logistic"])
def test_level_and_power(machine: str) -> None:
    p = [D.classifier_test_features(*pair(seed=s), draws=39, machine=machine, seed=s).p for s in range(60)]
    assert sum(v <= 0.05 for v in p) <= 8
    assert np.mean(p) == pytest.approx(0.5, abs=0.15)
    found = D.classifier_test_features(*pair(60, 60, 1.0), draws=99, machine=machine)
    assert found.rejected()
    assert found.auc.value > 0.75


def test_p_depends_on_the_seed_alone() -> None:
    x, y = pair(shift=0.3)
    a, b = (D.classifier_test_features(x, y, draws=60, memory=m) for m in (None, 8000))
    assert a.p == b.p
    assert torch.allclose(a.null, b.null)
    assert not torch.allclose(a.null, D.classifier_test_features(x, y, draws=60, seed=1).null)


def test_samples_that_are_all_the_same_tell_nothing() -> None:
    x = torch.ones(10, 2)
    assert D.classifier_test_features(x, x, draws=20, reg=1.0).p == 1.0
    with pytest.raises(tg.InputError, match="give a larger reg="):
        D.classifier_test_features(x, x, draws=20)


def test_sentence_table_plot_carriers_and_dict() -> None:
    x, y = pair(40, 40, 1.5)
    found = D.classifier_test(tg.gaussian(torch.cat([x, y])), x, y, draws=99, progress=False)
    assert found.sentence().startswith("The samples differ: a ridge machine tells them apart (accuracy ")
    assert "No difference is found" in D.classifier_test_features(*pair(), draws=20).sentence()
    assert "AUROC" in found.table()
    assert len(found.plot().axes) == 2
    assert found.to_dict()["auc"]["positives"] == 40  # type: ignore[call-overload,index]
    assert float(found.scores_x[found.carriers(3)[0]].min()) >= float(found.scores_x.sort().values[-3])
    halved = D.classifier_test_features(x, y, draws=9, machine="logistic")
    assert len(halved.plot().axes) == 2
    assert "nan" not in halved.sentence()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": "forest"}, "machine='forest'; needed: 'ridge', 'logistic'"),
        ({"statistic": "f1"}, "statistic='f1'; needed: 'auc', 'accuracy', 'scores'"),
        ({"machine": "logistic", "folds": 3}, "it has no folds="),
        ({"folds": 1}, "folds=1; needed: a number of parts, at least 2"),
        ({"folds": 18}, "x has 22 samples, y 17; needed: at least 18 of each, one in each fold"),
        ({"reg": -1.0}, "reg=-1"),
        ({"draws": 0}, "draws=0; needed: a number of permutations"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        D.classifier_test_features(*pair(), **options)  # type: ignore[arg-type]


def test_samples_that_are_refused() -> None:
    x, y = pair()
    bad = x.clone()
    bad[3, 0] = math.inf
    with pytest.raises(tg.InputError, match=r"x\[3, 0\] is inf"):
        D.classifier_test_features(bad, y)
    with pytest.raises(tg.InputError, match="the kernel overflows float64"):
        D.classifier_test_features(x * 1e200, y)
    with pytest.raises(tg.InputError, match="needed: at least 4 of each, some in each half"):
        D.classifier_test_features(x[:3], y, machine="logistic")
    with pytest.raises(tg.InputError, match="needed: at least 2 of each"):
        D.classifier_test_features(x[:1], y)
