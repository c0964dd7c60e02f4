"""Shifts: that they are found where they are and not where they are not, what carries them, and what is refused."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tangency as tg
from tangency.datasets import Labelled
from tangency.errors import InputError, ModelError, NonFiniteError
from tangency.representations import Shift, shift
from tangency.representations.carriers import compare_components, density_ratio, holm, log_ratio, two_sample_p
from tangency.representations.classes import ClassShift, balance
from tangency.representations.shift_picture import density_grid, density_line


def normal(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def found(a: Any, b: Any, **options: Any) -> Shift:
    return shift(None, a, b, **{"draws": 99, "progress": False} | options)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return tg.models.initialized(lambda: tg.models.mlp([6, 30, 20, 3]), seed=0).eval()


# ---- found where it is ----------------------------------------------------------------------------------------------


def test_a_moved_mean_is_found_with_its_component() -> None:
    wide = torch.tensor([5.0, 3.0, 1.0, 0.5]).double()
    a, b = normal(300, 4, 0) * wide, normal(200, 4, 1) * wide
    b[:, 2] += 1.0
    result = found(a, b)
    assert result.shifted
    assert result.p == pytest.approx(2 / 100)
    c = result.components
    assert int(c.order[0]) == 2  # components of such data are the features, by their variance
    apart = float(b[:, 2].mean() - a[:, 2].mean()) / float(torch.cat([a, b])[:, 2].std(correction=0))
    assert abs(float(c.difference[2])) == pytest.approx(apart, rel=0.05)
    assert [k for k in range(4) if c.p[k] < 0.05] == [2]
    assert "They differ along 1 of 4 components" in result.words()
    assert result.classifier.auc.value > 0.6


def test_a_wider_spread_alone_is_found() -> None:
    a, b = normal(300, 5, 0), normal(300, 5, 1)
    b[:, 3] *= 2.0
    result = found(a, b)
    assert result.shifted
    assert float(result.components.spread[result.components.order[0]]) > 1.5


def test_through_a_model_at_its_last_layer(net: nn.Module) -> None:
    x, z = normal(200, 6, 0).float(), normal(150, 6, 1).float() + 0.6
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    result = shift(net, x, z, draws=99, progress=False)
    assert result.shifted
    assert result.layer == tg.representations.Layers.of_model(net).names[-1]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    # By hand: the layer's outputs as features.
    with torch.no_grad():
        same = found(net[:-1](x), net[:-1](z))
    torch.testing.assert_close(result.z_source, same.z_source, rtol=1e-4, atol=1e-4)
    assert result.p == same.p


def test_every_kind_of_samples(net: nn.Module) -> None:
    x, z = normal(60, 6, 0).float(), normal(50, 6, 1).float()
    want = shift(net, x, z, draws=49, progress=False)
    y, t = torch.arange(60) % 3, torch.arange(50) % 3
    for pair in (
        (x.numpy(), z.numpy().astype(np.float64)),
        (tg.from_dataset(TensorDataset(x, y), 0), tg.from_dataset(TensorDataset(z, t), 0)),
        (Labelled(x, y, ("a", "b", "c")), Labelled(z, t, ("other", "names"*2, "too"))),
    ):  # fmt: skip
        result = shift(net, *pair, draws=49, batch=7, progress=False)
        torch.testing.assert_close(result.z_target, want.z_target, rtol=1e-4, atol=1e-5)
        assert result.classes is None


class Tokens(nn.Module):
    """As Hugging Face's encoders: a dict in, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.pooler = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(self.embed(input_ids)).tanh()
        return {"last_hidden_state": hidden, "pooler_output": self.pooler(hidden[:, 0])}


def test_texts_by_the_mean_over_their_tokens() -> None:
    torch.manual_seed(0)
    model = Tokens().eval()

    def texts(low: int, high: int, n: int) -> Labelled:
        ids = torch.randint(low, high, (n, 7))
        lengths = torch.randint(2, 8, (n, 1))
        x = {"input_ids": ids, "attention_mask": (torch.arange(7) < lengths).long()}
        return Labelled(x, torch.arange(n) % 2, ("no", "yes"), texts=[f"text {k}" for k in range(n)])

    result = shift(model, texts(0, 20, 80), texts(12, 20, 70), names=("old", "new"), draws=99, progress=False)
    assert result.shifted
    assert result.layer == "encoder"
    assert result.names == ("old", "new")
    assert result.classes is not None
    assert not shift(model, texts(0, 20, 80), texts(0, 20, 70), draws=99, progress=False).shifted


# ---- not found where it is not --------------------------------------------------------------------------------------


def rejections(n: int, repeats: int, **options: Any) -> Tensor:
    """How often p, and the least p of any component, is at most 5 % on samples of one law with heavy tails."""
    rejected = []
    for seed in range(repeats):
        draw = np.random.default_rng(seed)
        x = torch.from_numpy(draw.standard_t(4, (n, 6)) * [4, 3, 2, 1, 1, 1])
        result = found(x[: n // 3], x[n // 3 :], seed=seed, **options)
        rejected.append([result.shifted, float(result.components.p.min()) <= 0.05])
    return torch.tensor(rejected).double().mean(0)


@pytest.mark.slow
def test_the_level_holds_roughly() -> None:
    rate = rejections(45, 20, draws=39)
    # Of 20 samples at 5 %, more than 4 rejections have a probability of 0.003.
    assert bool((rate <= 4 / 20).all())


@pytest.mark.slow
def test_the_level_holds() -> None:
    rate = rejections(150, 500, draws=199)
    assert 0.02 <= float(rate[0]) <= 0.08
    assert float(rate[1]) <= 0.08


def test_no_shift_is_said_without_claiming_that_there_is_none() -> None:
    words = found(normal(50, 3, 0), normal(60, 3, 1)).words()
    assert "No difference between source and target was found" in words
    assert "does not show that there is none" in words
    assert "Along none of 3 principal components" in words


@settings(max_examples=6)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_rotating_and_scaling_features_changes_nothing(seed: int, scale: float) -> None:
    a, b = normal(30, 3, seed) * torch.tensor([4.0, 2.0, 1.0]), normal(40, 3, seed + 1) * torch.tensor([4.0, 2.0, 1.0])
    turn = torch.linalg.qr(normal(3, 3, seed + 2))[0]
    one, other = (found(u, v, draws=39) for u, v in ((a, b), (scale * a @ turn, scale * b @ turn)))
    assert one.mmd.p == pytest.approx(other.mmd.p)
    torch.testing.assert_close(one.components.distance, other.components.distance, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(one.components.p, other.components.p)


# ---- its parts against others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(300, 200), (40, 25)])
def test_components_against_scipy(n: int, m: int) -> None:
    a, b = normal(n, 3, 0), 1.3 * normal(m, 3, 1) + 0.2
    c = compare_components(a, b, torch.ones(3))
    both = torch.cat([a, b]).std(0, correction=0)
    raw = [stats.ks_2samp(a[:, k], b[:, k]) for k in range(3)]
    torch.testing.assert_close(c.ks, torch.tensor([r.statistic for r in raw]))
    for k in range(3):
        assert float(c.distance[k] * both[k]) == pytest.approx(stats.wasserstein_distance(a[:, k], b[:, k]))
        limit = stats.kstwobign.sf(float(c.ks[k]) * (n * m / (n + m)) ** 0.5)
        assert two_sample_p(float(c.ks[k]), n, m) == pytest.approx(limit)
        assert limit == pytest.approx(raw[k].pvalue, rel=0.2, abs=1e-3)
    torch.testing.assert_close(c.p, holm(torch.tensor([two_sample_p(float(d), n, m) for d in c.ks]).double()))


def test_ties_count_once() -> None:
    a, b = torch.tensor([[0.0], [0.0], [1.0], [1.0]]).double(), torch.tensor([[0.0], [1.0], [1.0], [1.0]]).double()
    assert float(compare_components(a, b, torch.ones(1)).ks[0]) == pytest.approx(0.25)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_by_its_definition(p: list[float]) -> None:
    got, order = holm(torch.tensor(p, dtype=torch.float64)), sorted(range(len(p)), key=lambda k: p[k])
    largest = 0.0
    for rank, k in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[k]))
        assert float(got[k]) == pytest.approx(largest)


def test_balance_against_the_chi_square_law() -> None:
    source, target = torch.tensor([300.0, 200.0, 100.0]), torch.tensor([240.0, 190.0, 110.0])
    exact = stats.chi2_contingency(torch.stack([source, target]).numpy(), correction=False).pvalue
    assert balance(source, target, 20_000, 0) == pytest.approx(exact, rel=0.1)
    assert balance(torch.tensor([5.0, 0.0]), torch.tensor([7.0, 0.0]), 99, 0) == 1.0


def test_the_ratio_of_two_gaussian_densities() -> None:
    a, b = normal(3000, 2, 0), normal(2000, 2, 1) * torch.tensor([1.0, 0.7]) + torch.tensor([0.8, 0.0])
    draw = torch.Generator().manual_seed(0)
    laws = [
        torch.distributions.Independent(torch.distributions.Normal(torch.tensor(mean), torch.tensor(width)), 1)
        for mean, width in (([0.0, 0.0], [1.0, 1.0]), ([0.8, 0.0], [1.0, 0.7]))
    ]
    truth = laws[1].log_prob(a) - laws[0].log_prob(a)
    by_classifier, _ = log_ratio(a, b, 10_000, draw)
    by_density = density_ratio(a, b)
    near = truth.abs() < 2  # farther out a kernel density estimate has next to no samples
    for estimate, off in ((by_classifier, 0.12), (by_density, 0.25)):
        assert float((estimate - truth)[near].abs().mean()) < off


def test_density_ratio_against_scipy() -> None:
    a, b = normal(30, 1, 0), normal(40, 1, 1) + 1
    got = density_ratio(a, b)

    def kde(of: np.ndarray, width: float, at: float) -> float:
        return float(stats.norm.pdf(at, of, width).mean())

    widths = [float(v.std(correction=0)) * len(v) ** -0.2 for v in (a, b)]
    for i in range(30):
        others = np.delete(a[:, 0].numpy(), i)
        want = math.log(kde(b[:, 0].numpy(), widths[1], float(a[i, 0]))) - math.log(
            kde(others, widths[0], float(a[i, 0]))
        )
        assert float(got[i]) == pytest.approx(want)


# ---- large sets -----------------------------------------------------------------------------------------------------


def test_two_passes_give_what_one_gives(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x, z = normal(90, 6, 0).float(), normal(80, 6, 1).float() + 0.3
    held = shift(net, x, z, draws=49, progress=False)
    calls: list[int] = []
    real = tg.representations.Layers.__call__
    monkeypatch.setattr(
        tg.representations.Layers, "__call__", lambda self, part: (calls.append(len(part)), real(self, part))[1]
    )
    streamed = shift(
        net, x, z, draws=49, batch=16, memory="13KB", progress=False
    )  # 20 features of 170 samples: 13.6 KB
    assert sum(calls) >= 2 * 170
    torch.testing.assert_close(streamed.z_source, held.z_source, rtol=1e-4, atol=1e-5)
    assert streamed.p == held.p


def test_more_features_than_samples_by_the_samples_own_products() -> None:
    a, b = normal(20, 100, 0), normal(25, 100, 1) + 0.4
    result = found(a, b, components=9)
    x = torch.cat([a, b])
    centred = x - x.mean(0)
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    z = torch.cat([result.z_source, result.z_target])
    torch.testing.assert_close(z.abs(), (left * values)[:, :9].abs())
    torch.testing.assert_close(result.components.explained, (values.square() / values.square().sum())[:9])


def test_against_scikit_learns_components() -> None:
    from sklearn.decomposition import PCA

    a, b = normal(80, 12, 0) @ normal(12, 12, 5), normal(60, 12, 1) @ normal(12, 12, 5)
    result = found(a, b, components=4)
    z = PCA(4, svd_solver="full").fit_transform(torch.cat([a, b]).numpy())
    torch.testing.assert_close(torch.cat([result.z_source, result.z_target]).abs(), torch.from_numpy(z).abs())


def test_tests_see_some_samples_and_all_are_placed() -> None:
    a, b = normal(500, 3, 0), normal(400, 3, 1)
    result = found(a, b, samples=50)
    assert result.facts["tested"] == [50, 50]
    assert (len(result.mmd.witness_x), len(result.ratio_source), len(result.z_target)) == (50, 500, 400)


# ---- classes --------------------------------------------------------------------------------------------------------


def classes(part: float, n: int, seed: int, moved: float = 0.0) -> Labelled:
    draw = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=draw) < part).long()
    x = torch.randn(n, 4, generator=draw) + 3 * torch.nn.functional.one_hot(y, 4)
    x[y == 1, 3] += moved
    return Labelled(x, y, ("cat", "dog"), name=f"set {seed}")


@pytest.mark.parametrize(
    ("part", "moved", "kind", "said"),
    [
        (0.5, 0.0, "neither", "was not found to differ"),
        (0.85, 0.0, "balance", "of none of 2 classes were the inputs found to differ"),
        (0.5, 1.5, "inputs", "the inputs differ in 1 of 2: dog"),
        (0.85, 1.5, "both", "The balance of the labels differs"),
    ],
)
def test_balance_and_inputs_of_a_class_are_told_apart(part: float, moved: float, kind: str, said: str) -> None:
    result = found(classes(0.5, 200, 0), classes(part, 180, 2, moved))
    assert result.classes is not None
    assert result.classes.kind(0.05) == kind
    assert said in result.words()
    assert "cat" in result.table()
    assert result.names == ("set 0", "set 2")


def test_given_and_predicted_labels(net: nn.Module) -> None:
    x, z = normal(80, 6, 0).float(), normal(70, 6, 1).float()
    with torch.no_grad():
        ys = net(x).argmax(1), net(z).argmax(1)
    said, seen = (
        shift(net, x, z, labels=labels, draws=49, progress=False).classes
        for labels in ((list(ys[0]), ys[1].numpy()), "predicted")
    )
    assert said is not None
    assert seen is not None
    torch.testing.assert_close(said.source, seen.source)
    assert (said.of, seen.of) == ("labels", "predictions")
    rare = (torch.zeros(80, dtype=torch.long), torch.ones(70, dtype=torch.long))
    one = shift(net, x, z, labels=rare, draws=49, progress=False)
    assert "no class has samples enough in both sets" in one.words()
    assert "too few" in one.table()


# ---- what to do about it --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed() -> Shift:
    """A third of the source is like the target, where another rule gives the label."""
    a, b = normal(600, 3, 0), normal(250, 3, 1)
    a[200:, 0] -= 4
    y, t = (a[:, 1] > 0).long(), (b[:, 1] > 0).long()
    y[200:] = 1 - y[200:]
    return found(a, b, labels=(y, t))


def test_what_is_like_the_target_is_kept(mixed: Shift) -> None:
    kept = mixed.filter(150)
    assert bool((kept.index < 200).all())
    assert kept.after < 0.2 * kept.before
    assert float(kept.weights.mean()) == pytest.approx(1)
    assert bool((kept.weights.diff() <= 0).all())
    assert 1 < kept.effective <= 150
    assert "150 of 600 source samples are kept" in kept.sentence()
    assert len(mixed.filter(0.25)) == 150
    assert abs(len(mixed.filter()) - 200) < 30
    assert float((mixed.filter(150, by="density").index < 200).double().mean()) > 0.95


def test_who_carries_it(mixed: Shift) -> None:
    source, target = mixed.carriers(30)
    assert bool((source >= 200).all())
    assert len(target) == 30
    assert float(mixed.ratio_target[target[0]]) == float(mixed.ratio_target.max())


def test_what_a_filter_does_to_a_probe(mixed: Shift) -> None:
    effect = mixed.downstream(keep=150, repeats=5)
    assert effect.accuracy["filtered"] > 0.9
    assert effect.accuracy["all"] < 0.6
    assert effect.accuracy["weighted"] > effect.accuracy["all"]
    assert effect.gain_low > 0.2
    assert effect.low["filtered"] <= effect.accuracy["filtered"] <= effect.high["filtered"]
    assert "trained on the 150 filtered source samples" in effect.sentence()
    assert effect.table().count("%") == 13
    assert mixed.downstream(keep=150, repeats=5).to_dict() == effect.to_dict()
    nothing = found(normal(80, 3, 5), normal(70, 3, 6), labels=(torch.arange(80) % 2, torch.arange(70) % 2))
    assert "which may be chance" in nothing.downstream(keep=40, repeats=3).sentence()


def test_a_probe_that_sees_one_class_says_it() -> None:
    a, b = normal(40, 2, 0), normal(30, 2, 1)
    y = torch.zeros(40, dtype=torch.long)
    y[:20] = 3
    a[:20, 0] += 8
    effect = found(a, b).downstream((y, torch.zeros(30, dtype=torch.long)), keep=12, repeats=2)
    assert effect.accuracy["filtered"] == 1


def test_result_as_dict_and_picture(mixed: Shift) -> None:
    text = json.dumps(mixed.to_dict())
    assert json.loads(text)["p"] == mixed.p
    assert "Shift(shifted" in repr(mixed)
    figure = mixed.plot()
    assert figure.axes[0].get_xlabel().startswith("component")
    assert len(mixed.plot((1, 3)).axes) == 3
    assert "component  distance" in mixed.table()


def test_samples_in_both_sets_are_warned_of() -> None:
    a, b = normal(60, 3, 0), normal(50, 3, 1)
    b[:7] = a[:7]
    result = found(a, b)
    assert "7 of 50 target samples have the features of a source sample" in result.words()
    assert "Caution" not in found(a, normal(50, 3, 1)).words()


# ---- data that mislead ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [10, 20, 40])
def test_a_component_of_few_samples_is_never_surer_than_the_exact_test(n: int) -> None:
    for k in range(1, n + 1, n // 10):
        a = np.arange(n)
        exact = stats.ks_2samp(a, a + k - 0.5, method="exact")
        assert exact.statistic == pytest.approx(k / n)
        assert two_sample_p(k / n, n, n) >= min(0.1, exact.pvalue)


def test_one_far_sample_is_named_and_makes_no_others_alike() -> None:
    a, b = normal(200, 5, 0), normal(200, 5, 1) + 0.7
    a[3, 0] = 1e8
    result = found(a, b)
    assert "4 of 400 samples, source[3] the farthest, hold 100% of the variance" in result.words()
    assert "have the features" not in result.words()
    assert "MMD alone shows it: a classifier was not found to tell them apart" in result.words()
    b[5, 0] = 1e8  # the same number for "missing" in both sets does not make them one set
    assert "hold 100% of the variance" in found(a, b).words()


def test_features_of_very_different_scales_are_all_compared() -> None:
    scale = torch.tensor([1e6, 1.0])
    result = found(normal(200, 2, 0) * scale, normal(200, 2, 1) * scale + torch.tensor([0.0, 2.0]))
    assert len(result.components) == 2
    assert result.shifted
    tiny = 1e-30
    assert found(tiny * normal(60, 2, 0), tiny * (normal(60, 2, 1) + 2)).shifted


def test_many_samples_of_one_feature_are_not_taken_for_copies() -> None:
    assert not found(normal(300, 1, 0), normal(300, 1, 1), components=1).warnings


def test_features_that_are_mostly_equal_and_classes_that_are_one_point() -> None:
    a, b = ((torch.rand(n, 3, generator=torch.Generator().manual_seed(n)) < 0.08).float() for n in (150, 140))
    assert not found(a, b).shifted
    a, b = normal(40, 3, 0), normal(40, 3, 1)
    a[:20] = b[:20] = 0
    classes = found(a, b, labels=([0] * 20 + [1] * 20,) * 2).classes
    assert classes is not None
    assert float(classes.inputs_p[0]) == 1.0


def test_a_source_that_is_one_point() -> None:
    result = found(torch.ones(30, 3), normal(40, 3, 0).float())
    assert bool(result.filter(10, by="density").weights.isfinite().all())
    assert bool((result.components.spread < 1e7).all())
    said = result.downstream(([0, 1] * 15, [0, 1] * 20), keep=10, repeats=2)
    assert said.accuracy["all"] == pytest.approx(0.5, abs=0.2)


def test_labels_that_are_left_out_or_predicted_are_said_to_be() -> None:
    a, b = (Labelled(normal(40, 3, k), torch.arange(40) % 2, names) for k, names in enumerate((("u", "v"), ("v", "u"))))
    result = found(a, b)
    assert result.classes is None
    assert "labels were not compared, as the classes are called u, v in one set and v, u" in result.words()
    half, p = torch.tensor([0.5, 0.5]), torch.tensor([0.01, 0.5])
    for of, said in ("predictions", True), ("labels", False):
        sentence = ClassShift(("u", "v"), half, half, 0.01, p, of).sentence(0.05)
        assert ("a changed balance alone can do that" in sentence) == said


# ---- refused --------------------------------------------------------------------------------------------------------

X, Z = normal(30, 6, 0).float(), normal(30, 6, 1).float()
WITH_NAN = X.clone()
WITH_NAN[4, 2] = torch.nan


@pytest.mark.parametrize(
    ("source", "target", "options", "said"),
    [
        (X[:9], Z, {}, "source has 9 samples; needed: at least 10 in each set"),
        (X, X, {}, "they are one set. Give two sets"),
        (X, X[torch.randperm(30)], {}, "they are one set. Give two sets"),
        (torch.ones(20, 6), torch.ones(30, 6), {}, "all samples have the same features"),
        (X, Z[:, :5], {}, "has 5 features, others have 6"),
        (X[:, 0], Z, {}, r"source has shape \(30,\); needed, without a model: features \[n, p\]"),
        (X, Z, {"components": 7}, "components=7; needed: at most 6"),
        (X, Z, {"components": 0}, "components=0; needed: the number of components"),
        (X.double() * 1e160, Z, {}, "squares overflow float64"),
        (X, Z, {"samples": 5}, "samples=5; needed: at least 10"),
        (X, Z, {"draws": 20}, "draws=20; needed: at least 39"),
        (X, Z, {"level": 5}, "level=5; needed: a probability"),
        (X, Z, {"names": "ab"}, "names='ab'; needed: what source and target are called"),
        (X, Z, {"memory": 100}, "fit into memory=100 bytes neither themselves nor by their covariance"),
        (X, Z, {"labels": "guessed"}, "labels='guessed'; needed: 'predicted' or"),
        (X, Z, {"labels": "predicted"}, "labels='predicted' without a model"),
        (X, Z, {"labels": [0] * 30}, "labels is a list; needed: \\(y_source, y_target\\)"),
        (X, Z, {"labels": (range(30), [0] * 29)}, "labels of the source"),
        (X, Z, {"labels": ([0] * 30, [0] * 29)}, "labels of the target: 29 for 30 samples"),
        (X, Z, {"labels": ([0.5] * 30, [0] * 30)}, "labels of the source: y is torch.float64"),
    ],
)
def test_what_is_refused(source: Tensor, target: Tensor, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        found(source, target, **options)


def test_densities_are_those_of_scipy() -> None:
    """Which takes a covariance with n − 1, and in two dimensions one that turns: here the components have none."""
    z, at = normal(70, 2, 3) * torch.tensor([1.0, 30.0]), torch.linspace(-4, 4, 50).double()
    z -= z.mean(0)
    z[:, 1] -= z[:, 0] * (z[:, 0] @ z[:, 1]) / z[:, 0].square().sum()
    smaller = math.sqrt(69 / 70)
    line = stats.gaussian_kde(z[:, 0].numpy(), lambda kde: kde.scotts_factor() * smaller)
    torch.testing.assert_close(density_line(z[:, 0], at), torch.from_numpy(line(at.numpy())))
    both = stats.gaussian_kde(z.T.numpy(), lambda kde: kde.scotts_factor() * smaller)
    places = torch.cartesian_prod(at, 30 * at).T.numpy()
    torch.testing.assert_close(density_grid(z, at, 30 * at).flatten(), torch.from_numpy(both(places)))


def test_of_several_layers_all_are_compared(net: nn.Module) -> None:
    names = ["0", "2"]
    result = shift(net, X, Z, layers=names, draws=39, progress=False)
    assert result.facts["layers"] == "0, 2"
    assert result.facts["features"] == 50
    a, b = (torch.cat([*tg.representations.layer_outputs(net, v, names, progress=False).values()], 1) for v in (X, Z))
    assert found(a, b, draws=39).facts["explained"] == pytest.approx(result.facts["explained"], rel=1e-6)
    assert shift(net, X, Z, draws=39, progress=False).facts["layers"] != "0, 2"


def test_what_is_refused_of_models(net: nn.Module) -> None:
    with pytest.raises(InputError, match="model is a str; needed: a torch.nn.Module, or None"):
        shift("net", X, Z)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no layer 'layer9'.* It has"):
        shift(net, X, Z, layers="layer9")
    with pytest.raises((InputError, ModelError), match="training mode"):
        shift(nn.Sequential(nn.Linear(6, 4), nn.Dropout(), nn.Linear(4, 2)).train(), X, Z)
    with pytest.raises(InputError, match="the model is a single Linear without layers of its own"):
        shift(nn.Linear(6, 2), X, Z, progress=False)
    with pytest.raises(NonFiniteError, match=r"features of source\[4\] are not finite"):
        shift(net, WITH_NAN, Z, progress=False)
    with pytest.raises(NonFiniteError, match=r"features of target\[4\] are not finite"):
        found(X, WITH_NAN)
    with pytest.raises(ModelError, match="needed for labels='predicted'"):
        shift(tg.models.mlp([6, 5, 1]), X, Z, labels="predicted", progress=False)


def test_what_is_refused_of_results(mixed: Shift) -> None:
    for keep in (0, 1.0, 1.5, 601, -3, math.inf, math.nan, True, "all"):
        with pytest.raises(InputError, match="keep="):
            mixed.filter(keep)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="by='pca'; needed: 'classifier', 'density'"):
        mixed.filter(10, by="pca")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="two numbers from 1 to 3"):
        mixed.plot((0, 1))
    plain = found(X, Z)
    with pytest.raises(InputError, match="there are no labels of both sets"):
        plain.downstream()
    with pytest.raises(InputError, match="all source samples are of one class"):
        plain.downstream(([0] * 30, [0] * 30))
    with pytest.raises(InputError, match="there is one component only"):
        found(X, Z, components=1).plot()
    far = found(normal(50, 2, 0), normal(40, 2, 1) + 50)
    with pytest.raises(InputError, match="no source sample is likelier in the target"):
        far.filter()
