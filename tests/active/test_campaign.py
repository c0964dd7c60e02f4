"""Asking and telling, kept in a file; strategies against what they are by definition; strategies compared."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.active import STRATEGIES, Campaign, Comparison, Round, Vectors, compare, look_ahead
from tangency.active.batches import farthest, spread_at_random
from tangency.active.compare import interval, student
from tangency.active.round import nearest_probabilities

F64 = torch.float64


def clusters(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three heaps in the plane."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    return torch.eye(3)[y][:, :2] * 4 + torch.randn(n, 2, generator=g), y


def begun(strategy: str = "lookahead", seed: int = 0) -> tuple[Campaign, Tensor]:
    x, y = clusters()
    campaign = Campaign(x, ["a", "b", "c"], strategy=strategy, seed=seed)
    campaign.tell(range(8), y[:8])
    return campaign, y


def net(c: int = 3) -> nn.Module:
    return tg.models.initialized(lambda: tg.models.mlp([2, 12, c]), seed=1)


# ---- ask and tell ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.every(2)
def test_every_strategy_asks_by_network_and_by_kernel(strategy: str) -> None:
    campaign, y = begun(strategy)
    model, kernel = net(), tg.infinite_ntk(net())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    for options in ({"model": model}, {"kernel": kernel}, {"kernel": tg.compute(kernel, campaign.x, progress=False)}):
        asked = campaign.ask(5, **options)
        assert asked.dtype == torch.long
        assert len(asked.unique()) == 5
        assert not bool(torch.isin(asked, campaign.labelled).any())
        assert torch.equal(asked, campaign.ask(5, **options))  # asking changes nothing
        fewer = campaign.ask(5, most=6, **options)
        assert len(fewer.unique()) == 5
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    campaign.tell(asked, y[asked])
    assert len(campaign.labelled) == 13
    assert torch.equal(campaign.data[1], y[campaign.labelled])
    assert "13 of 60 samples labelled in 2 rounds, 3 classes" in repr(campaign)


def test_the_network_starts_the_machine() -> None:
    """f₀ are its probabilities, or its scores; the kernel is the mean over outputs of its NTK."""
    campaign, _ = begun()
    model, seen = net(), list[Round]()
    for kind in ("logits", "scores"):
        campaign.ask(3, model, outputs_are=kind, strategy=lambda r, n: (seen.append(r), r.candidates[:n])[1], reg=0.1)
        known = seen[-1]
        index = torch.cat([campaign.labelled, campaign.unlabelled])
        f0 = model(campaign.x[index]).double().detach()
        f0 = f0.softmax(1) if kind == "logits" else f0
        k = tg.trace_ntk(model)(campaign.x[index]) / 3
        want = look_ahead(k, range(8), campaign.labels, reg=0.1, f0=f0, classes=3)
        torch.testing.assert_close(known.machine.outputs, want.outputs, rtol=1e-4, atol=1e-5)
        p = f0 if kind == "logits" else nearest_probabilities(f0)
        torch.testing.assert_close(known.probabilities, p, rtol=1e-5, atol=1e-6)
    z = torch.cat([model[:2](campaign.x[index]), torch.ones(60, 1)], 1).detach().double()
    torch.testing.assert_close(known.vectors.diagonal, z.square().sum(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(known.vectors.products(3), z @ z[3], rtol=1e-5, atol=1e-6)


def test_one_output_is_two_classes() -> None:
    x, y = clusters()
    campaign = Campaign(x, 2)
    campaign.tell(range(8), y[:8] % 2)
    p = torch.rand(60)
    seen = list[Round]()
    campaign.ask(1, outputs=p, outputs_are="probabilities", strategy=lambda r, n: (seen.append(r), r.candidates[:n])[1])
    torch.testing.assert_close(seen[0].probabilities[:8, 1], p[:8].double())
    assert len(campaign.ask(3, net(1))) == 3
    assert campaign.ask(3, outputs=p.logit(), strategy="margin").tolist() == (
        campaign.ask(3, outputs=p[:, None], outputs_are="probabilities", strategy="margin").tolist()
    )


def test_a_campaign_goes_on_from_its_file(tmp_path: Path) -> None:
    campaign, y = begun("badge", seed=7)
    campaign.tell([20, 10], np.array(["b", "c"]))
    campaign.save(tmp_path / "deep" / "labels.json")
    again = Campaign.load(tmp_path / "deep" / "labels.json", campaign.x)
    assert json.loads((tmp_path / "deep" / "labels.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(again.to_dict())
    )
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["labels.json"]
    assert repr(again) == repr(campaign)
    assert again.labels.tolist() == [*y[:8].tolist(), 1, 2]
    kernel = tg.infinite_ntk(net())
    assert torch.equal(again.ask(5, kernel=kernel), campaign.ask(5, kernel=kernel))
    again.forget([10, 3])
    assert again.labelled.tolist() == [0, 1, 2, 4, 5, 6, 7, 20]
    again.tell([10], [0])
    assert again.labels[-1] == 0


def test_inputs_of_several_parts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a + b)

    x, y = clusters()
    campaign = Campaign((x, x.numpy()), 3)
    campaign.tell(range(8), y[:8].tolist())
    assert len(campaign.ask(4, Two(), strategy="lookahead")) == 4


def test_dropout_and_batch_norm_are_left_in_their_modes() -> None:
    campaign, _ = begun("badge")
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)).train()
    running = model[1].running_mean.clone()
    for strategy in ("entropy", "margin"):
        first = campaign.ask(4, model, strategy=strategy)
        assert torch.equal(first, campaign.ask(4, model, strategy=strategy))
    with pytest.raises(tg.ModelError, match="eval"):
        campaign.ask(4, model, strategy="lookahead")
    assert model.training
    assert torch.equal(model[1].running_mean, running)
    assert len(campaign.ask(4, model.eval(), strategy="lookahead")) == 4


# ---- strategies -----------------------------------------------------------------------------------------------------


def test_unsure_ones_first() -> None:
    campaign, _ = begun()
    p = torch.rand(60, 3, dtype=F64).softmax(1)
    free = campaign.unlabelled
    ordered = p[free].sort(1).values
    wanted = {
        "entropy": -scipy.stats.entropy(p[free], axis=1),
        "margin": (ordered[:, 2] - ordered[:, 1]).numpy(),
        "confidence": ordered[:, 2].numpy(),
    }
    for strategy, score in wanted.items():
        got = campaign.ask(6, outputs=p, outputs_are="probabilities", strategy=strategy)
        assert got.tolist() == free[np.argsort(score)[:6]].tolist()


def test_look_ahead_strategies_are_the_machine_s() -> None:
    campaign, _ = begun()
    k = tg.infinite_ntk(net())(campaign.x).double()
    ahead = look_ahead(k, campaign.labelled, campaign.labels, classes=3)
    change = ahead.most_likely_change()
    got = campaign.ask(5, kernel=k, strategy="mlmoc")
    assert got.tolist() == ahead.candidates[change.argsort(descending=True)[:5]].tolist()
    got = campaign.ask(5, kernel=k, strategy="lookahead")
    assert got.tolist() == tg.active.greedy_changes(ahead, ahead.candidates, 5).tolist()
    p = nearest_probabilities(ahead.outputs)
    got = campaign.ask(1, kernel=k, strategy="expected")
    assert int(got) == int(ahead.candidates[ahead.expected_change(p).argmax()])
    got = campaign.ask(1, kernel=k, strategy="flips")
    assert int(got) == int(ahead.candidates[ahead.most_likely_change(measure="classes").argmax()])


def test_k_centre_is_the_farthest_from_all() -> None:
    x, _ = clusters(30)
    x = x.double()
    picked = farthest((x**2).sum(1), lambda i: x @ x[i], torch.arange(4), torch.arange(4, 30), 5)
    centres = list(range(4))
    for i in picked.tolist():
        far = torch.cdist(x, x[centres]).amin(1)
        assert far[i] == pytest.approx(float(far.max()))
        centres.append(i)
    same = torch.ones(6, 2, dtype=F64)  # all on one place
    assert sorted(farthest((same**2).sum(1), lambda i: same @ same[i], torch.arange(1), torch.arange(1, 6), 5)) == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_k_means_draws_by_squared_distance() -> None:
    """The second of two, over many draws, against its probabilities."""
    x = torch.tensor([[3.0], [0.0], [1.0], [2.5]], dtype=F64)
    squares, counts = (x[:, 0] - 3).square(), torch.zeros(4)
    draw = torch.Generator().manual_seed(0)
    for _ in range(500):
        first, second = spread_at_random((x**2).sum(1), lambda i: x @ x[i], torch.arange(4), 2, draw).tolist()
        assert first == 0  # the longest
        counts[second] += 1
    chance = scipy.stats.chisquare(counts[1:], (500 * squares / squares.sum())[1:]).pvalue
    assert chance > 1e-3
    same = torch.ones(5, 1, dtype=F64)
    assert len(spread_at_random(same[:, 0], lambda i: same[:, 0], torch.arange(5), 5, draw).unique()) == 5


def test_badge_has_the_products_of_last_layer_gradients() -> None:
    """⟨(p − e_ŷ) ⊗ h, (p′ − e_ŷ′) ⊗ h′⟩ by autograd: gradients of −log p_ŷ by the last layer's weight and bias."""
    campaign, _ = begun()
    model, seen = net(), list[Round]()
    campaign.ask(1, model, strategy=lambda r, n: (seen.append(r), r.candidates[:n])[1])
    known, gradients = seen[0], []
    for row in known.x:
        out = model(row[None])
        loss = torch.nn.functional.cross_entropy(out, out.argmax(1))
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model[2].parameters()))]))
    g = torch.stack(gradients).double()
    want = spread_at_random((g**2).sum(1), lambda i: g @ g[i], known.candidates, 6, torch.Generator().manual_seed(3))
    known.draw = torch.Generator().manual_seed(3)
    assert STRATEGIES["badge"](known, 6).tolist() == want.tolist()


def test_nearest_probabilities_are_the_projection() -> None:
    v = 2 * torch.randn(50, 4, dtype=F64)
    p = nearest_probabilities(v)
    torch.testing.assert_close(p.sum(1), torch.ones(50, dtype=F64))
    assert bool((p >= 0).all())
    # Optimal: (v − p)·(q − p) ≤ 0 for every q of the simplex, so for its corners.
    gap = ((v - p)[:, None] * (torch.eye(4, dtype=F64) - p[:, None])).sum(2)
    assert float(gap.max()) < 1e-12


# ---- comparison -----------------------------------------------------------------------------------------------------


def test_comparing_strategies() -> None:
    pool, test = (part.with_x(part.x.flatten(1)) for part in tg.datasets.digits())
    pool, test = pool.take(120, seed=0), test.take(100)
    kernel = tg.infinite_ntk(tg.models.mlp([64, 16, 10]))
    own = {"ours": "lookahead", "first": lambda r, n: r.candidates[:n], "random": "random"}
    found = compare(own, pool, test, kernel, start=15, batch=5, rounds=2, seeds=[4, 1], progress=False)
    assert found.labels.tolist() == [15, 20, 25]
    assert torch.equal(found.accuracy[0, :, 0], found.accuracy[2, :, 0])  # the same start
    # The first number again, by scikit-learn's solver and the start that a campaign draws.
    from sklearn.kernel_ridge import KernelRidge

    start = Campaign(pool.x, 10, seed=4).ask(15, strategy="random")
    k = kernel(pool.x)
    reg = 0.01 * float(k.diag().mean())
    fit = KernelRidge(alpha=reg, kernel="precomputed").fit(k[start][:, start].double(), torch.eye(10)[pool.y[start]])
    right = fit.predict(kernel(test.x, pool.x[start]).double()).argmax(1) == test.y.numpy()
    assert float(found.accuracy[0, 0, 0]) == pytest.approx(right.mean())
    area = np.trapezoid(found.accuracy.numpy(), found.labels.numpy(), axis=2) / 10
    np.testing.assert_allclose(found.area(), area)
    gain = found.gain("ours")
    want = scipy.stats.t.interval(0.95, 1, *_mean_and_error(area[0] - area[2]))
    assert (gain.low, gain.high) == pytest.approx(want, rel=1e-4)
    assert found.gain("ours", final=True).mean == pytest.approx(
        float((found.accuracy[0, :, -1] - found.accuracy[2, :, -1]).mean())
    )
    assert "area − random" in found.table()
    assert [line.get_label() for line in found.plot().axes[0].lines] == ["ours", "first", "random"]
    assert found.to_dict()["units"] == {"seconds": "s"}


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(scipy.stats.sem(values))


def test_comparing_with_a_training_of_ones_own() -> None:
    data = tg.datasets.labelled(clusters(80))
    asked: list[tuple[int, int]] = []

    def train(known: tg.datasets.Labelled, seed: int) -> nn.Module:
        asked.append((len(known), seed))
        model = tg.models.initialized(lambda: tg.models.mlp([2, 8, 3]), seed=seed)
        tg.models.fit(model, known, epochs=5, lr=0.1, batch=8, seed=seed, progress=False)
        return model

    found = compare(["lookahead", "random"], data, data, train, start=8, batch=4, rounds=1, seeds=1, progress=False)
    assert asked == [(8, 0), (12, 0)] * 2
    assert found.gain("lookahead").high == math.inf  # one seed tells nothing of others
    assert bool((found.seconds > 0).all())


def test_student_s_quantiles() -> None:
    for degrees in (1, 2, 4, 30):
        for level in (0.5, 0.95, 0.99):
            assert student(level, degrees) == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, degrees), rel=2e-3)
    assert interval(torch.ones(3), 0.9) == (1, 1, 1)


def test_look_ahead_beats_random_on_digits() -> None:
    """Small, and by a wide margin: a regression guard for the whole loop."""
    pool, test = (part.with_x(part.x.flatten(1)) for part in tg.datasets.digits())
    kernel = tg.infinite_ntk(tg.models.mlp([64, 16, 10]))
    found = compare(
        ["lookahead", "random"], pool.take(300, seed=0), test, kernel, start=10, batch=10, rounds=4, seeds=3,
        progress=False,
    )  # fmt: skip
    assert found.gain("lookahead").mean > 0.02


# ---- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.ask(0), "count=0; needed: a whole number, at least 1"),
        (lambda c: c.ask(2.5), "count=2.5"),
        (lambda c: c.ask(53), "count=53, and 52 of 60 samples have no label; needed: at most 52"),
        (lambda c: c.ask(5), "needed: the network, ask(count, model), or kernel="),
        (lambda c: c.ask(5, "net"), "model is a str; needed: a torch.nn.Module"),
        (lambda c: c.ask(5, kernel=torch.eye(59)), "Gram of 59 samples; needed: of all 60"),
        (lambda c: c.ask(5, kernel=torch.full((60, 60), torch.nan)), "needed: finite numbers"),
        (lambda c: c.ask(5, net(), outputs_are="logit"), "Did you mean 'logits'"),
        (lambda c: c.ask(5, net(4)), "outputs have shape (60, 4); needed: (60, 3)"),
        (lambda c: c.ask(5, outputs=torch.full((60, 3), torch.nan), strategy="margin"), "needed: finite numbers"),
        (lambda c: c.ask(5, outputs=torch.zeros(59, 3), strategy="margin"), "a row for each of 60 samples"),
        (
            lambda c: c.ask(5, outputs=2 * torch.ones(60, 3), outputs_are="probabilities", strategy="margin"),
            "are no probabilities",
        ),
        (lambda c: c.ask(5, net(), most=4), "most=4 candidates, of which 5 were asked for"),
        (lambda c: c.ask(5, net(), strategy="lookahed"), "Did you mean 'lookahead'"),
        (lambda c: c.ask(5, net(), strategy=lambda r, n: [0, 1, 2, 3, 4]), "needed: 5 of round.candidates"),
        (lambda c: c.ask(2, net(), strategy=lambda r, n: [9, 9]), "each once"),
        (lambda c: c.ask(5, kernel=torch.eye(180).reshape(60, 3, 60, 3), strategy="badge"), "needed for distances"),
        (lambda c: c.tell([3], [0]), "sample 3 was told before, as"),
        (lambda c: c.tell([30, 30], [0, 0]), "sample 30 is told twice in one call"),
        (lambda c: c.tell([60], [0]), "names sample 60; needed: numbers from 0 to 59"),
        (lambda c: c.tell([], []), "index is empty"),
        (lambda c: c.tell([30], [3]), "a label of class 3; needed: classes from 0 to 2"),
        (lambda c: c.tell([30], ["d"]), "labels has 'd'; the classes are a, b, c"),
        (lambda c: c.tell([30], "a"), "needed: a list, one label for each sample"),
        (lambda c: c.tell([30], [0, 1]), "needed: a class for each of the 1 samples"),
        (lambda c: c.tell([30], [0.5]), "needed: a class for each"),
        (lambda c: c.forget([30]), "sample 30 has no label"),
    ],
)
def test_what_is_wrong_is_said(call: object, message: str) -> None:
    campaign, _ = begun()
    with pytest.raises(tg.InputError) as raised:
        call(campaign)  # type: ignore[operator]
    assert message in str(raised.value)
    assert len(campaign.labelled) == 8


def test_nothing_to_ask_or_to_know() -> None:
    x, y = clusters(10)
    with pytest.raises(tg.InputError, match="pool is empty"):
        Campaign(x[:0], 3)
    for classes in (1, "ab", ["a"], 2.0):
        with pytest.raises(tg.InputError, match="needed: how many there are, or their names"):
            Campaign(x, classes)
    with pytest.raises(tg.InputError, match="seed=-1"):
        Campaign(x, 3, seed=-1)
    campaign = Campaign(x, 3)
    with pytest.raises(tg.InputError, match="none is there. Ask at random until there are"):
        campaign.ask(2, net())
    assert campaign.ask(2, strategy=lambda r, n: r.candidates[:n]).tolist() == [0, 1]  # one's own may do without
    campaign.tell([0, 1], [2, 2])
    with pytest.raises(tg.InputError, match="needs labels of at least two; all 2 labels are '2'"):
        campaign.ask(2, net())
    assert len(campaign.ask(8, strategy="random")) == 8
    campaign.tell(range(2, 10), y[2:])
    with pytest.raises(tg.InputError, match="every sample has a label"):
        campaign.ask(1, net())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "holds no campaign"),
        ('{"size": 3}', "holds no campaign"),
        (None, "cannot be read"),
        ({"tangency_campaign": 9}, "is of format 9"),
        ({"tangency_campaign": True}, "is of format True"),
        ({"size": 61}, "about 61 samples, and x has 60"),
        ({"pool": None}, "does not say which samples"),
        ({"pool": {"form": {}, "blocks": []}}, "is about None samples, and there are 60"),
        ({"seed": True}, "seed=True"),
        ({"classes": "abc"}, "classes='abc'"),
        ({"rounds": [[[True], [0]]]}, r"no list of \[samples, labels\]"),
        ({"rounds": [[[1], [0.0]]]}, r"no list of \[samples, labels\]"),
        ({"rounds": [[[1], [2**70]]]}, r"no list of \[samples, labels\]"),
        ({"rounds": [[[1], [0]], [[1], [0]]]}, "told before"),
        ({"rounds": [[[-1], [0]]]}, "names sample -1"),
        ('{"size": 3, "size": 4}', '"size" is there twice'),
        ("[" * 100_000, "nested too deeply|holds no campaign"),
        (f'{{"size": {"1" * 5000}}}', "too many digits"),
        ({"strategy": None}, "needed: strategy=, the function"),
        ({"rounds": None}, r"no list of \[samples, labels\]"),
        ({"rounds": [[[1], [0], [0]]]}, r"no list of \[samples, labels\]"),
    ],
)
def test_files_that_are_none(text: object, message: str, tmp_path: Path) -> None:
    campaign, _ = begun()
    file = tmp_path / "labels.json"
    if isinstance(text, dict):
        text = json.dumps(campaign.to_dict() | text)
    if isinstance(text, str):
        file.write_text(text, encoding="utf-8")
    with pytest.raises(tg.InputError, match=message):
        Campaign.load(file, campaign.x)


def test_labels_go_only_to_the_samples_they_were_told_of(tmp_path: Path) -> None:
    """A pool that was shuffled, cut, changed by a bit or cast is refused, and it is said which way it differs."""
    campaign, _ = begun()
    assert isinstance(campaign.x, torch.Tensor)
    x = campaign.x.clone()
    file = tmp_path / "labels.json"
    campaign.save(file)
    assert torch.equal(Campaign.load(file, x).labels, campaign.labels)
    swapped, changed, long = x.clone(), x.clone(), torch.cat([x] * 20)
    swapped[[17, 30]] = x[[30, 17]]
    changed[41, 1] = changed[41, 1].nextafter(torch.tensor(9.0))
    for other, message in (
        (swapped, "the same samples in another order, from sample 17 on; needed: the samples"),
        (changed, "other samples, the first is sample 41; needed: the samples"),
        (x[:59], "about 60 samples, and x has 59"),
        (x.double(), r"samples of another form: x float32 \[2\], and these are x float64 \[2\]"),
        ({"a": x}, r"another form: x float32 \[2\], and these are x\['a'\] float32 \[2\]"),
    ):
        with pytest.raises(tg.InputError, match=message):
            Campaign.load(file, other)
    campaign = Campaign(long, 3)
    campaign.save(file)
    long[777] += 1
    with pytest.raises(tg.InputError, match="the first is one of samples 773 to 777"):
        Campaign.load(file, long)


def test_campaigns_of_before_are_read_with_a_warning(tmp_path: Path) -> None:
    campaign, _ = begun()
    was = {k: v for k, v in campaign.to_dict().items() if k != "pool"} | {"tangency_campaign": 1}
    (tmp_path / "labels.json").write_text(json.dumps(was), encoding="utf-8")
    with pytest.warns(tg.errors.TangencyWarning, match="did not keep which samples it is about"):
        again = Campaign.load(tmp_path / "labels.json", campaign.x)
    assert torch.equal(again.labels, campaign.labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategies": []}, "strategies is empty"),
        ({"strategies": ["luck"]}, "strategy='luck'"),
        ({"rounds": 0}, "rounds=0"),
        ({"seeds": []}, "at least one, each once"),
        ({"seeds": 0}, "seeds=0"),
        ({"batch": 30}, "take 32 samples, and the pool has 30"),
        ({"level": 1.0}, "level=1.0"),
        ({"level": "most"}, "level='most'"),
        ({"seeds": 2.5}, "seeds=2.5; needed: how many, or a list of them"),
        ({"strategies": "margin"}, r"needed: a list of names, \['margin', 'random'\]"),
        ({"strategies": [lambda known, count: known.candidates[:count]]}, "a dict of names and functions"),
        ({"learner": net()}, "learner is a Sequential; needed: a kernel, or a function"),
        ({"learner": 3}, "learner is a int; needed: a kernel, or a function"),
        ({"learner": lambda known, seed: 3}, "learner returned a int"),
        ({"test": (torch.zeros(4, 2), [0, 1, 2, 3])}, "needed: the same, in order"),
    ],
)
def test_comparisons_that_cannot_be(change: dict[str, object], message: str) -> None:
    data = clusters(30)
    given: dict[str, object] = {"strategies": ["random"], "pool": data, "test": data, "learner": tg.infinite_ntk(net())}
    with pytest.raises(tg.InputError, match=message):
        compare(**(given | {"start": 2, "batch": 2, "rounds": 1, "seeds": 1, "progress": False} | change))
    assert isinstance(given["strategies"], Sequence)


def test_a_network_that_has_lost_its_numbers_is_refused() -> None:
    campaign, _ = begun()
    model = net()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    for strategy in ("coreset", "badge", "margin", "lookahead"):
        with pytest.raises(tg.TangencyError, match="nan|not finite"):
            campaign.ask(2, model, strategy=strategy)


def test_any_whole_number_is_a_seed() -> None:
    x, _ = clusters()
    asked = [Campaign(x, 3, seed=seed).ask(20, strategy="random").tolist() for seed in (0, 10**12, 2**70)]
    assert asked[0] != asked[1] != asked[2]


def test_names_that_are_compared() -> None:
    accuracy = torch.rand(1, 2, 2, dtype=F64)
    found = Comparison(("margin",), torch.tensor([5, 9]), accuracy, torch.zeros(1, dtype=F64), 0.95)
    with pytest.raises(tg.InputError, match="strategy='random'; needed: 'margin'"):
        found.gain("margin")
    assert "area − margin" in found.table()
    assert Vectors(torch.ones(2), lambda i: torch.ones(2)).products(0).shape == (2,)
