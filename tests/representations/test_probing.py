"""Probes of layers against scikit-learn: standardised, principal components, neighbours, centres, a linear SVM."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from torch import Tensor, nn

import tangency as tg
from tangency.datasets import Labelled, TrainTest
from tangency.demo import network
from tangency.errors import InputError, ModelError, TangencyWarning
from tangency.representations import classifiers, components, layer_outputs, probe
from tangency.representations.classifiers import linear_svm, nearest_centres, nearest_neighbours
from tangency.representations.components import Rows, held, moments, principal

DIMS = (1, 2, 5, 10, 20, 40)


@pytest.fixture(scope="module")
def data() -> TrainTest:
    train, test = tg.datasets.digits()
    return TrainTest(train.take(300), test.take(200))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    train, _ = tg.datasets.digits()
    net = tg.models.initialized(network, seed=0)
    tg.models.fit(net, train, epochs=5, lr=3e-3, batch=50, optimizer="adam", progress=False)
    return net


def features(n: int, p: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.relu(torch.randn(n, p, generator=g, dtype=torch.float64) + torch.randn(p, generator=g).double())


def scored(train: Tensor, test: Tensor, y: Tensor, **options: object) -> components.Scores:
    rows = held(train), held(test)
    return principal(*rows, moments(rows[0], y, int(y.max()) + 1), **options)  # type: ignore[arg-type]


def scikit(train: Tensor, test: Tensor) -> tuple[PCA, Tensor, Tensor]:
    """Scores of features that have length 1 on average."""
    scale = StandardScaler().fit(train)
    pca = PCA().fit(scale.transform(train))
    a, b = (torch.from_numpy(pca.transform(scale.transform(v))) for v in (train, test))
    length = float((train.amax(0) > train.amin(0)).sum()) ** 0.5
    return pca, a / length, b / length


@pytest.mark.parametrize("p", [20, 90], ids=["covariance", "gram"])
def test_scores_are_those_of_scikit_learn(p: int) -> None:
    train, test, y = features(60, p), features(25, p, 1), torch.arange(60) % 3
    found = scored(train, test, y, memory=8 * p * 7)  # bands of seven columns
    pca, a, b = scikit(train, test)
    k = min(59, p)
    assert found.exact
    assert found.train.shape[1] == k
    torch.testing.assert_close(found.variances / found.total, torch.from_numpy(pca.explained_variance_ratio_[:k]))
    signs = (found.train * a[:, :k]).sum(0).sign()
    torch.testing.assert_close(found.train, a[:, :k] * signs, atol=1e-9, rtol=0)
    torch.testing.assert_close(found.test, b[:, :k] * signs, atol=1e-9, rtol=0)
    assert float(found.train.square().sum(1).mean()) == pytest.approx(1)


def test_subspace_iteration_finds_the_same_components(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = 0.8 ** torch.arange(120, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(120, 120, generator=g, dtype=torch.float64)).Q
    train, test = features(150, 120) * spread @ turn, features(30, 120, 1) * spread @ turn
    y = torch.arange(150) % 3
    exact = scored(train, test, y, most=6)
    monkeypatch.setitem(components.EXACT, "cpu", 100)
    monkeypatch.setattr(components, "SPARE", 10)
    found = scored(train, test, y, most=6)
    assert not found.exact
    torch.testing.assert_close(found.variances, exact.variances, rtol=1e-3, atol=0)
    signs = (found.test * exact.test).sum(0).sign()
    assert float((found.test * signs - exact.test).norm() / exact.test.norm()) < 0.02
    again = scored(train, test, y, most=6)
    assert torch.equal(again.train, found.train)  # from the seed alone


def test_features_in_blocks_are_as_those_in_one() -> None:
    train, y = features(50, 30), torch.arange(50) % 4
    places = [slice(0, 7), slice(7, 31), slice(31, 50)]
    parts = Rows(50, lambda: ((at, train[at]) for at in places))
    for a, b in zip(moments(parts, y, 4), moments(held(train), y, 4), strict=True):
        torch.testing.assert_close(a, b)
    a, b = (principal(rows, rows, moments(rows, y, 4)) for rows in (parts, held(train)))
    torch.testing.assert_close(a.train.abs(), b.train.abs())


def test_constant_features_count_for_nothing() -> None:
    train, test, y = features(40, 6), features(10, 6, 1), torch.arange(40) % 2
    more = (
        torch.cat([train, torch.full((40, 3), 0.1)], 1).float(),
        torch.cat([test, torch.full((10, 3), 0.7)], 1).float(),
    )
    a, b = scored(train.float(), test.float(), y), scored(*more, y)
    torch.testing.assert_close(b.variances, a.variances)


def test_features_of_the_caller_stay_as_they_are() -> None:
    train, y = features(30, 5), torch.arange(30) % 2
    before = train.clone()
    scored(train, train, y)
    assert torch.equal(train, before)


@pytest.mark.parametrize("p", [30, 400], ids=["narrow", "wide"])
def test_classifiers_are_those_of_scikit_learn(p: int) -> None:
    digits, test = tg.datasets.digits()
    g = torch.Generator().manual_seed(0)
    turn = torch.randn(64, p, generator=g, dtype=torch.float64)
    x, z = (torch.relu(v.x.flatten(1).double() @ turn) for v in (digits.take(250), test.take(150)))
    y = digits.take(250).y
    found = scored(x, z, y)
    dims = [d for d in (*DIMS, 100, 249) if d <= found.train.shape[1]]
    near = nearest_neighbours(found.train, y, found.test, dims, neighbours=5, classes=10)
    centres = nearest_centres(found.train, y, found.test, dims, classes=10)
    machines = linear_svm(found.train, y, found.test, dims, classes=10, reg=0.5)
    assert machines.gradient < 1e-7
    for k, d in enumerate(dims):
        a, b = found.train[:, :d].numpy(), found.test[:, :d].numpy()
        svm = LinearSVC(C=2.0, dual=False, tol=1e-9, max_iter=10_000).fit(a, y)
        assert (KNeighborsClassifier(5).fit(a, y).predict(b) == near[k].numpy()).all()
        assert (NearestCentroid().fit(a, y).predict(b) == centres[k].numpy()).all()
        assert (svm.predict(b) == machines.found[k].numpy()).all()


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(6, 40), d=st.integers(1, 50), c=st.integers(2, 4), reg=st.floats(0.01, 10), seed=st.integers(0, 99)
)
def test_the_svm_is_at_its_optimum(n: int, d: int, c: int, reg: float, seed: int) -> None:
    """By autograd, from its definition; duplicates and separable samples too."""
    x = features(n, d, seed)
    x[1] = x[0]
    y = torch.arange(n) % c
    signs = 2.0 * nn.functional.one_hot(y, c) - 1
    task = classifiers._Task(torch.cat([torch.ones(n, 1), x], 1).double(), signs.double(), reg)
    weights, left = classifiers._newton(task, torch.zeros(d + 1, c, dtype=torch.float64))
    w = weights.requires_grad_()
    short = (1 - signs * (x @ w[1:] + w[0])).clamp_min(0)
    (slope,) = torch.autograd.grad((short**2).sum() + reg / 2 * (w**2).sum(), w)
    assert left < 1e-7
    assert float(slope.norm(dim=0).max()) < 1e-5 * n * (1 + float(x.norm()))


def test_a_probe_is_what_its_parts_are(model: nn.Module, data: TrainTest) -> None:
    found = probe(model, *data, layers=["3", "6"], dims=DIMS, progress=False)
    z = [layer_outputs(model, v, "6", progress=False)["6"] for v in data]
    pca, a, b = scikit(*(v.double() for v in z))
    layer = found["6"]
    assert [v.name for v in found.layers] == ["3", "6"]
    assert layer.dims.tolist() == list(DIMS)
    near = [KNeighborsClassifier(10).fit(a[:, :d], data.train.y).score(b[:, :d], data.test.y) for d in DIMS]
    assert layer.accuracy["neighbours"].tolist() == pytest.approx(near)
    assert layer.explained.tolist() == pytest.approx([pca.explained_variance_ratio_[:d].sum() for d in DIMS], abs=1e-6)
    assert found.network == pytest.approx(tg.models.accuracy(model, data.test))
    best = layer.best("svm")
    assert layer.needed("svm") == min(d for d, v in zip(DIMS, layer.accuracy["svm"], strict=True) if v >= 0.9 * best)
    assert layer.variance("svm") == float(layer.explained[DIMS.index(layer.needed("svm"))])


def test_what_does_not_fit_is_computed_anew_in_every_pass(model: nn.Module, data: TrainTest) -> None:
    options = {"layers": "1", "dims": (2, 10), "progress": False}
    whole = probe(model, *data, **options)["1"]
    passing = probe(model, *data, **options, memory="200kB", batch=64)["1"]
    for kind, curve in whole.accuracy.items():
        torch.testing.assert_close(passing.accuracy[kind], curve, atol=0.006, rtol=0)
    assert passing.collapse.nc1 == pytest.approx(whole.collapse.nc1, rel=1e-4)


def test_layers_by_pattern_and_pooled(model: nn.Module, data: TrainTest) -> None:
    found = probe(model, *data, layers=["[0-3]"], pool="mean", dims=[1, 3], progress=False)
    assert [layer.features for layer in found.layers] == [16, 16, 32, 32]


def test_depth_separates_the_classes(model: nn.Module, data: TrainTest) -> None:
    """From the pixels to the last hidden layer: fewer components, centres that know more, less within classes."""
    first = probe(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), *data, layers="0", dims=DIMS, progress=False)["0"]
    last = probe(model, *data, layers="6", dims=DIMS, progress=False)["6"]
    assert last.needed("centres") <= first.needed("centres")
    assert last.best("centres") > first.best("centres") + 0.03
    assert last.collapse.nc1 < first.collapse.nc1


def test_where_the_classifiers_agree() -> None:
    """The first layer mixes two classes into rings, the second says which: from there on all agree."""
    g = torch.Generator().manual_seed(0)
    angle, y = 6.28 * torch.rand(200, generator=g), torch.arange(200) % 2
    x = torch.stack([angle.cos(), angle.sin()], 1) * (1 + 2 * y[:, None])

    class Radius(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same, self.radius, self.out = nn.Identity(), nn.Threshold(0.0, 0.0), nn.Linear(1, 2)

        def forward(self, v: Tensor) -> Tensor:
            return self.out(self.radius(self.same(v).square().sum(1, keepdim=True)))

    parts = tg.datasets.labelled((x, y)).split(120)
    found = probe(Radius().eval(), *parts, layers=["same", "radius"], progress=False)
    assert found["same"].best("neighbours") > 0.95
    assert found["same"].best("centres") < 0.75
    assert found.collapsed == "radius"


def test_table_plots_and_json(model: nn.Module, data: TrainTest) -> None:
    pytest.importorskip("matplotlib")
    found = probe(model, *data, layers=["4", "6"], dims=(1, 5, 20), progress=False)
    lines = found.table().splitlines()
    assert len(lines) == 3
    for line, layer in zip(lines[1:], found.layers, strict=True):
        best = [f"{100 * layer.best(kind):.1f}" for kind in layer.accuracy]
        assert [v for v in line.split() if v in best][: len(best)] == best
        assert f" {100 * layer.apart(found.classes):.1f} " in line
    assert [len(found.plot(view).axes) for view in ("accuracy", "components", "collapse")] == [3, 2, 2]
    assert found.to_dict()["layers"][0]["accuracy"]["svm"] == pytest.approx(found["4"].accuracy["svm"].tolist())
    assert repr(found).startswith("Probing(layers=(")
    with pytest.raises(InputError, match="view='svd'; needed: 'accuracy', 'components', 'collapse'"):
        found.plot("svd")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="layer='5'; needed: '4', '6'"):
        found["5"]


def test_one_output_two_classes_and_no_outputs_at_all(data: TrainTest) -> None:
    two = TrainTest(*(part.only(3, 8) for part in data))
    net = tg.models.initialized(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1)), seed=0
    )
    tg.models.fit(net, two.train, epochs=15, lr=0.1, progress=False)
    found = probe(net, *two, layers="2", progress=False)
    assert found.network == pytest.approx(tg.models.accuracy(net, two.test))
    assert found["2"].collapse.nc4 is not None
    body = net[:3].eval()
    assert probe(body, *two, layers="2", progress=False).network is None


def test_bad_input_is_refused_with_its_fix(model: nn.Module, data: TrainTest) -> None:
    def refused(words: str, *given: object, error: type[Exception] = InputError, **options: object) -> None:
        with pytest.raises(error, match=words):
            probe(*(given or (model, *data)), **{"layers": "6", "progress": False} | options)  # type: ignore[arg-type]

    train, test = data
    refused("no layer 'conv9'.* It has 0, 1, 2", layers="conv9")
    refused("neighbours=301, and there are 300 training samples", neighbours=301)
    refused("neighbours=0; needed: how many training samples decide, at least 1", neighbours=0)
    refused("reg=0; needed: a positive number", reg=0)
    refused("dims=3; needed: numbers of components", dims=3)
    refused("dims=0; needed: whole numbers of components, at least 1", dims=[0])
    refused("pool='max'; needed: 'mean', 'first'", pool="max")
    refused("memory='much'", memory="much")
    one = replace(train.only(3), classes=("3",))
    refused("one class only", model, one, one)
    refused("classes are 3, 8, the training set's", model, train, test.only(3, 8))
    lacking = Labelled(train.x[train.y < 9], train.y[train.y < 9], train.classes)
    refused("the training set has no sample of 9", model, lacking, test)
    random = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Dropout(), nn.Linear(4, 10))
    refused("layer '2' is in training mode, so the model is random", random, train, test, layers="1", error=ModelError)
    broken = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 10)).eval()
    with torch.no_grad():
        broken[1].weight.fill_(float("nan"))
    refused("layer 1 puts out NaN or infinity", broken, train, test, layers="1", error=ModelError)
    with torch.no_grad():
        broken[1].weight.zero_()
    refused("layer 1 puts out the same for all samples", broken, train, test, layers="1", error=ModelError)


def test_the_model_and_the_callers_random_numbers_stay(model: nn.Module, data: TrainTest) -> None:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    probe(model, *data, layers="6", dims=[3], progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_what_follows_in_place_does_not_reach_a_layers_output() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)).eval()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer_outputs(net, x, "0", progress=False)["0"], net[0](x).detach())


def test_a_machine_that_stops_early_is_said(model: nn.Module, data: TrainTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifiers, "NEWTON", 1)
    with pytest.warns(TangencyWarning, match="layer 6: a linear SVM stopped with a gradient of"):
        probe(model, *data, layers="6", dims=[5], progress=False)
