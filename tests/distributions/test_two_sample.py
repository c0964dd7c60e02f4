"""MMD against its definition, all permutations and SciPy's permutation test; the wild bootstrap against its formula."""

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tangency as tg
from tangency.distributions import null

D = tg.distributions
F64 = torch.float64


def pair(m: int = 12, n: int = 9, shift: float = 0.0, d: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(m, d, generator=g, dtype=F64), torch.randn(n, d, generator=g, dtype=F64) + shift)


def brute(k: Tensor, m: int, biased: bool) -> float:
    """The definition, term by term."""
    n = len(k) - m
    xx = [float(k[i, j]) for i in range(m) for j in range(m) if biased or i != j]
    yy = [float(k[m + i, m + j]) for i in range(n) for j in range(n) if biased or i != j]
    xy = [float(k[i, m + j]) for i in range(m) for j in range(n)]
    return sum(xx) / len(xx) + sum(yy) / len(yy) - 2 * sum(xy) / len(xy)


# ---- the value ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
def test_mmd_is_its_definition(biased: bool) -> None:
    x, y = pair()
    k = tg.gaussian(torch.cat([x, y]))
    found = D.mmd(k, x, y, biased=biased, draws=20)
    assert found.value == pytest.approx(brute(k(torch.cat([x, y])), 12, biased), rel=1e-10)
    assert float(found.witness_x.mean() - found.witness_y.mean()) == pytest.approx(found.value, rel=1e-9)
    assert found.witness_x.shape == (12,)
    assert found.witness_y.shape == (9,)
    assert found.null.shape == (20,)


@given(st.integers(2, 9), st.integers(2, 9), st.booleans(), st.integers(0, 10_000))
def test_features_kernel_and_gram_agree(m: int, n: int, biased: bool, seed: int) -> None:
    x, y = pair(m, n, 0.4, seed=seed)
    both = torch.cat([x, y])
    both = both - both.mean(0)
    a = D.mmd_features(x, y, biased=biased, draws=30, seed=seed)
    b = D.mmd(both @ both.T, range(m), range(m, m + n), biased=biased, draws=30, seed=seed)
    assert a.p == b.p
    assert a.value == pytest.approx(b.value, abs=1e-10)
    assert torch.allclose(a.null, b.null, atol=1e-10)
    assert torch.allclose(a.witness_x, b.witness_x, atol=1e-10)


def test_adding_a_constant_to_the_kernel_changes_nothing() -> None:
    x, y = pair(20, 15, 0.5)
    both = torch.cat([x, y])
    k = both @ both.T
    rows = range(20), range(20, 35)
    plain, raised = D.mmd(k, *rows, draws=100), D.mmd(k + 1000, *rows, draws=100)
    assert plain.p == raised.p
    assert plain.value == pytest.approx(raised.value, abs=1e-8)


def test_rows_of_a_gram_in_any_order_and_rows_of_neither() -> None:
    x, y = pair(10, 8, 0.7)
    spare = torch.randn(5, 3, dtype=F64)
    whole = torch.cat([spare, x, y])
    order = torch.randperm(23)
    k = tg.gaussian(bandwidth=1.0)(whole)[order][:, order]
    place = order.argsort()
    found = D.mmd(k, place[5:15], place[15:], draws=200)
    direct = D.mmd(tg.gaussian(bandwidth=1.0), x, y, draws=200)
    assert found.p == direct.p
    assert found.value == pytest.approx(direct.value, rel=1e-9)
    assert torch.allclose(found.witness_y, direct.witness_y)
    mask = torch.zeros(23, dtype=torch.bool)
    mask[place[5:15]] = True
    assert D.mmd(k, mask, place[15:], draws=200).value == pytest.approx(direct.value, rel=1e-9)


def test_a_kernel_of_a_network_a_store_and_stored_features(tmp_path: Path) -> None:
    net = tg.models.initialized(lambda: tg.models.mlp([3, 8, 2]), seed=0)
    x, y = (v.float() for v in pair(20, 14, 1.0))
    kernel = tg.trace_ntk(net)
    direct = D.mmd(kernel, x, y, draws=50, progress=False)
    stored = tg.compute(kernel, torch.cat([x, y]), store=tmp_path / "gram", tile=7, progress=False)
    assert D.mmd(stored, range(20), range(20, 34), draws=50).value == pytest.approx(direct.value, rel=1e-4)
    projected = tg.projected(kernel, dim=16)
    features = [projected.features(v, store=tmp_path / name, progress=False) for v, name in ((x, "x"), (y, "y"))]
    a = D.mmd_features(*features, draws=50)
    b = D.mmd(projected, x, y, draws=50, progress=False)
    assert a.value == pytest.approx(b.value, rel=1e-4)
    assert a.p == b.p
    assert D.mmd(tg.cosine(kernel) + kernel, x, y, draws=50, progress=False).p < 0.1
    other = tg.projected(kernel, dim=8).features(y, store=tmp_path / "other", progress=False)
    with pytest.raises(tg.InputError, match="another kernel"):
        D.mmd_features(features[0], other)


def test_inputs_of_a_model_in_a_dict_and_from_a_data_set() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.inner(a) * b

    x, y = ({"a": v.float(), "b": v[:, :1].float()} for v in pair(11, 7, 0.5))
    k = tg.trace_ntk(Two())
    found = D.mmd(k, x, y, draws=20, progress=False)
    whole = k({name: torch.cat([x[name], y[name]]) for name in x})
    assert found.value == pytest.approx(brute(whole.double(), 11, False), rel=1e-4)
    sets = [tg.from_dataset(torch.utils.data.TensorDataset(v["a"]), pick=0) for v in (x, y)]
    plain = tg.trace_ntk(torch.nn.Linear(3, 1))
    loaded = D.mmd(plain, *sets, draws=20, progress=False)
    assert loaded.value == pytest.approx(D.mmd(plain, x["a"], y["a"], draws=20, progress=False).value, rel=1e-5)


# ---- p-values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
def test_all_permutations_are_gone_through_where_there_are_few(biased: bool) -> None:
    x, y = pair(5, 4, 1.0)
    k = tg.gaussian(bandwidth=1.0)(torch.cat([x, y]))
    found = D.mmd(k, range(5), range(5, 9), biased=biased)
    values = []
    for chosen in combinations(range(9), 5):
        order = [*chosen, *(j for j in range(9) if j not in chosen)]
        values.append(brute(k[order][:, order], 5, biased))
    assert found.every
    assert len(found.null) == math.comb(9, 5)
    assert torch.allclose(found.null, torch.tensor(values, dtype=F64))
    assert found.p == pytest.approx(sum(v >= values[0] - 1e-12 for v in values) / len(values))


def test_p_agrees_with_scipys_permutation_test() -> None:
    x, y = pair(15, 12, 0.45, d=2, seed=3)
    k = tg.gaussian(bandwidth=1.5)(torch.cat([x, y])).numpy()

    def statistic(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.astype(int), b.astype(int)
        inner = [(k[np.ix_(v, v)].sum() - np.trace(k[np.ix_(v, v)])) / (len(v) * (len(v) - 1)) for v in (a, b)]
        return float(sum(inner) - 2 * k[np.ix_(a, b)].mean())

    theirs = scipy.stats.permutation_test(
        (np.arange(15), np.arange(15, 27)), statistic, n_resamples=3000, alternative="greater", random_state=0
    )
    ours = D.mmd(torch.from_numpy(k), range(15), range(15, 27), draws=3000)
    assert ours.value == pytest.approx(theirs.statistic)
    assert abs(ours.p - theirs.pvalue) < 4 * math.sqrt(2 * theirs.pvalue / 3000)
    assert np.quantile(theirs.null_distribution, 0.9) == pytest.approx(float(ours.null.quantile(0.9)), rel=0.15)


def test_p_counts_the_value_itself_and_ties() -> None:
    assert null.p_value(1.0, torch.tensor([0.0, 1.0, 2.0], dtype=F64), 1.0, every=False) == 3 / 4
    assert null.p_value(1.0, torch.tensor([0.0, 1.0, 2.0], dtype=F64), 1.0, every=True) == 2 / 3
    x = torch.zeros(6, 2)
    assert D.mmd_features(x, x).p == 1.0  # all the same: no permutation is smaller


def test_p_depends_on_the_seed_alone_not_on_the_memory() -> None:
    x, y = pair(30, 25, 0.3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a = D.mmd_features(x, y, draws=100, seed=1)
    b = D.mmd_features(x, y, draws=100, seed=1, memory=4000)
    c = D.mmd_features(x, y, draws=100, seed=2)
    assert torch.allclose(a.null, b.null, atol=1e-12)
    assert a.p == b.p
    assert not torch.allclose(a.null, c.null)
    assert torch.equal(before, torch.get_rng_state())


def test_the_level_is_held_and_differences_are_found() -> None:
    p = [D.mmd_features(*pair(12, 15, seed=s), draws=39, seed=s).p for s in range(150)]
    assert 0.01 <= sum(v <= 0.05 for v in p) / 150 <= 0.1
    assert np.mean(p) == pytest.approx(0.5, abs=0.08)
    assert D.mmd_features(*pair(40, 30, 1.0), draws=99).p == 0.01


def test_random_choices_are_of_as_many_groups_and_as_many_at_a_time_as_fit() -> None:
    drawn = null.permuted(torch.arange(9), 4, 50, torch.Generator().manual_seed(0))
    assert bool((drawn.sum(0) == 4).all())
    assert bool((drawn.sum(1) > 0).all())
    columns = 3 * 8 * 100  # bytes for one draw: three columns of 100 numbers
    assert list(null.widths(10, 100, 4 * columns)) == [4, 4, 2]
    assert list(null.widths(10, 100, 5 * columns - 1)) == [4, 4, 2]
    assert list(null.widths(2, 100, 1)) == [1, 1]


def test_groups_are_permuted_as_one() -> None:
    """Samples that come in equal copies: permuted one by one they differ; by group they do not."""
    rejected = [0, 0]
    for seed in range(40):
        x, y = pair(6, 6, seed=seed)
        copies = [v.repeat_interleave(5, 0) for v in (x, y)]
        groups = torch.arange(6).repeat_interleave(5)
        alone = D.mmd_features(*copies, draws=99, seed=seed)
        together = D.mmd_features(*copies, draws=99, seed=seed, groups=(groups, groups + 6))
        rejected[0] += alone.p <= 0.05
        rejected[1] += together.p <= 0.05
    assert rejected[0] >= 12
    assert rejected[1] <= 6
    few = D.mmd_features(*copies, groups=(groups, groups + 6))
    assert few.every
    assert len(few.null) == math.comb(12, 6)
    names = torch.tensor([7, 7, 3, 3, 9]), torch.tensor([1, 1, 4, 4])
    uneven = D.mmd_features(*pair(5, 4), groups=names)
    assert uneven.every
    assert len(uneven.null) == math.comb(5, 3)
    assert (
        float(uneven.null[0]) == pytest.approx(uneven.value) or float((uneven.null - uneven.value).abs().min()) < 1e-9
    )


# ---- the wild bootstrap ---------------------------------------------------------------------------------------------


def test_the_wild_process_has_its_variance_and_memory() -> None:
    made = null.wild(40, 5.0, 20_000, torch.Generator().manual_seed(0))
    assert torch.allclose(made.mean(0), torch.zeros(20_000, dtype=F64), atol=1e-12)
    assert float(made.square().mean()) == pytest.approx(1.0, abs=0.02)
    plain = null.wild(2000, 5.0, 400, torch.Generator().manual_seed(0))
    assert float((plain[1:] * plain[:-1]).mean()) == pytest.approx(math.exp(-1 / 5), abs=0.02)


def test_the_wild_bootstrap_is_vkv() -> None:
    x, y = pair(14, 11, 0.3)
    k = tg.gaussian(bandwidth=1.0)(torch.cat([x, y]))
    found = D.mmd(k, range(14), range(14, 25), test="wild bootstrap", draws=7, length=2.0, seed=3)
    g = torch.Generator().manual_seed(3)
    wx = null.wild(14, 2.0, 7, g) / 14
    v = torch.cat([wx, -null.wild(11, 2.0, 7, g) / 11])
    assert torch.allclose(found.null, torch.stack([v[:, j] @ k @ v[:, j] for j in range(7)]))
    assert found.biased
    assert found.value == pytest.approx(brute(k, 14, True))
    assert "wild bootstrap" in found.sentence()


def test_series_that_remember_are_rejected_by_permutation_and_not_by_the_wild_bootstrap() -> None:
    rejected = {"permutation": 0, "wild bootstrap": 0}
    g = torch.Generator().manual_seed(0)
    for seed in range(40):
        series = torch.randn(2, 200, 1, generator=g, dtype=F64)
        for t in range(1, 200):
            series[:, t] = 0.7 * series[:, t - 1] + 0.714 * series[:, t]
        for test in rejected:
            rejected[test] += D.mmd_features(series[0], series[1], test=test, draws=49, seed=seed).p <= 0.05
    assert rejected["permutation"] >= 10
    assert rejected["wild bootstrap"] <= 7


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_carriers_are_the_samples_that_are_others() -> None:
    x, y = pair(60, 60)
    x[:20] += 6
    found = D.mmd(tg.gaussian(torch.cat([x, y])), x, y, draws=99)
    assert set(found.carriers(20)[0].tolist()) == set(range(20))
    assert len(found.carriers(500)[1]) == 60


def test_sentence_table_plot_and_dict() -> None:
    found = D.mmd_features(*pair(30, 20, 1.0), draws=99)
    assert found.sentence().startswith("The samples differ: MMD² = ")
    assert "0 of 99 permutations" in found.sentence()
    assert "No difference is found, which does not show" in D.mmd_features(*pair(30, 20), draws=99).sentence()
    assert "no p-value could be below 0.17" in D.mmd_features(*pair(2, 2)).sentence()
    assert "30, 20" in found.table()
    assert found.to_dict()["p"] == 0.01
    assert len(found.plot().axes) == 2
    assert repr(found).startswith("TwoSample(value=")


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": "bootstrap"}, "test='bootstrap'; needed: 'permutation', 'wild bootstrap'"),
        ({"draws": 0}, "draws=0; needed: a number of draws, at least 1"),
        ({"test": "wild bootstrap", "biased": False}, "the wild bootstrap is of the biased statistic"),
        ({"test": "wild bootstrap", "groups": ([0] * 6, [1] * 5)}, "leave one of the two out"),
        ({"length": 3.0}, "permutations have none"),
        ({"test": "wild bootstrap", "length": 0.0}, "length=0; needed: a number of samples above 0"),
        ({"test": "wild bootstrap", "length": 5.0}, "length=5 beside series of 6 and 5 samples"),
        ({"groups": torch.arange(11)}, "groups is a Tensor; needed: a pair"),
        ({"groups": ([0] * 5, [1] * 5)}, r"the groups of x have shape \(5,\); needed: \[6\]"),
        ({"groups": ([0] * 6, [0] * 5)}, "group 0 has samples in x and in y"),
        ({"groups": ([*list(range(5)), 4], [9] * 5)}, "may leave one sample on a side"),
        ({"memory": "lots"}, "memory='lots'; needed: a number of bytes"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    x, y = pair(6, 5)
    with pytest.raises(tg.InputError, match=message):
        D.mmd_features(x, y, **options)  # type: ignore[arg-type]


def test_a_large_mean_hides_nothing_and_what_overflows_is_refused() -> None:
    x, y = pair(30, 20, 1.5)
    for tall in (x, y), (x.repeat(1, 20), y.repeat(1, 20)):  # more samples than features, and fewer
        plain, moved = D.mmd_features(*tall, draws=99), D.mmd_features(*(v + 1e7 for v in tall), draws=99)
        assert plain.p == moved.p == 0.01
        assert moved.value == pytest.approx(plain.value, rel=1e-6)
    for test in ("permutation", "wild bootstrap"):
        with pytest.raises(tg.InputError, match="the statistic overflows float64"):
            D.mmd_features(x * 1e200, y, test=test, draws=20)


def test_samples_that_are_refused() -> None:
    x, y = pair(6, 5)
    k = tg.gaussian(bandwidth=1.0)
    bad = x.clone()
    bad[2, 1] = math.nan
    for call, message in [
        (lambda: D.mmd_features(x[:1], y), "x has 1 samples, y 5; needed: at least 2 of each"),
        (lambda: D.mmd_features(x, y[:, :2]), "needed: the same features of both"),
        (lambda: D.mmd_features(bad, y), r"x\[2, 1\] is nan; needed: finite numbers"),
        (lambda: D.mmd_features(x[:, 0], y[:, 0]), r"x has shape \(6,\), torch.float64; needed: real features"),
        (lambda: D.mmd(k, bad, y), "is nan"),
        (lambda: D.mmd(k, x, y[:, :2]), "needed: both alike|of one size"),
        (lambda: D.mmd("gaussian", x, y), "kernel is a str; needed: a Gram"),  # type: ignore[arg-type]
        (lambda: D.mmd(k(torch.cat([x, y])), x, y), "x and y are the numbers of their rows"),
        (lambda: D.mmd(k(torch.cat([x, y])), range(6), range(6, 12)), "y names rows from 6 to 11; the Gram has 11"),
        (lambda: D.mmd(k(torch.cat([x, y])), range(6), range(5, 11)), "x and y name a row of the Gram twice"),
        (lambda: D.mmd(k(x, y), range(3), range(3, 6)), "needed: a square Gram"),
        (lambda: D.mmd(tg.full_ntk(torch.nn.Linear(3, 2)), x.float(), y.float()), "Use the trace kernel"),
        (lambda: D.mmd_features(x, y).carriers(0), "count=0; needed: a number of samples"),
    ]:
        with pytest.raises(tg.InputError, match=message):
            call()


def test_a_model_in_training_mode_is_refused_and_none_is_changed() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    x, y = (v.float() for v in pair(8, 8))
    with pytest.raises(tg.ModelError):
        D.mmd(tg.trace_ntk(net), x, y, draws=10)
    net.eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    D.mmd(tg.trace_ntk(net), x, y, draws=10)
    assert not net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
