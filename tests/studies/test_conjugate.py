"""Networks beside their NTK, CK and CKJ: against NumPy and scikit-learn, and what is refused."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import tangency as tg
from tangency.errors import DidNotConverge, InputError, ModelError
from tangency.studies import BOUNDARIES, FUNCTIONS, Grid, Grids, conjugate_classification, conjugate_regression
from tangency.studies.conjugate import pair
from tangency.studies.single_unit import Sampled, descended

LINE, FINE, PLANE = Grids(Grid((30,)), (3,)), Grids(Grid((60,)), (3,)), Grids(Grid((6, 5)), (2, 3))


def network(sizes: list[int], activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return tg.models.initialized(lambda: tg.models.mlp(sizes, activation), seed=0)


def jacobian(net: nn.Module, x: Tensor, head: object = None) -> np.ndarray:
    rows = []
    for sample in x:
        out = net(sample[None])[0]
        value = out[0] if len(out) == 1 else out[1] - out[0]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(net.parameters()))]))
    return torch.stack(rows).numpy()


def test_fits_are_those_of_numpy() -> None:
    net = network([1, 10, 10, 1], nn.ReLU)  # with tanh, chance decides which eigenvalues lie above rounding
    f = FUNCTIONS["f2"]
    found = conjugate_regression(net, f, grids=LINE, epochs=0).last
    x, z = LINE.train.nodes(), LINE.test.nodes()
    root, v = np.sqrt(LINE.train.weights().numpy()), LINE.test.weights().numpy()
    y, want = f(x).numpy(), f(z).numpy()
    net = net.double()
    a, b = jacobian(net, x), jacobian(net, z)
    for name, part in (("NTK", slice(None)), ("CK", slice(-11, None))):  # the last layer: ten weights, one bias
        h = root[:, None] * (a[:, part] @ a[:, part].T) * root
        inverse = np.linalg.pinv(h, rcond=len(x) * np.finfo(float).eps, hermitian=True)
        fit = (b[:, part] @ a[:, part].T) @ (root * (inverse @ (root * y)))
        error = np.sqrt((v * (fit - want) ** 2).sum())
        assert found.test[name] == pytest.approx(error, rel=1e-3)
        assert found.rank[name] == np.linalg.matrix_rank(
            h, hermitian=True, tol=31 * np.finfo(float).eps * np.linalg.norm(h, 2)
        )
    gamma = np.linalg.lstsq(a[:, -11:] * root[:, None], y * root, rcond=None)[0]
    assert found.test["CKJ"] == pytest.approx(np.sqrt((v * (b[:, -11:] @ gamma - want) ** 2).sum()), rel=1e-3)
    assert found.bounds.violations == 0


def test_training_is_a_plain_loop_of_adam_on_a_copy() -> None:
    net = network([1, 8, 1])
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    found = conjugate_regression(net, FUNCTIONS["f1"], grids=LINE, epochs=7, lr=1e-2, at=[0, 3])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert [m.epoch for m in found.moments] == [0, 3, 7]
    own, w = copy.deepcopy(net).double(), LINE.train.weights()
    optimizer = torch.optim.Adam(own.parameters(), lr=1e-2)
    for _ in range(7):
        optimizer.zero_grad()
        (w * (own(LINE.train.nodes())[:, 0] - FUNCTIONS["f1"](LINE.train.nodes())).square()).sum().backward()
        optimizer.step()
    for p, q in zip(own.parameters(), found.network.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    assert found.last.train["NN"] < found.moments[0].train["NN"]
    assert len(found.table().splitlines()) == 4
    assert len(found.plot().axes) == 1


def test_tanh_has_the_gap_and_relu_has_not() -> None:
    tanh, relu = (
        conjugate_regression(network([1, 32, 32, 32, 1], kind), FUNCTIONS["f2"], grids=FINE, epochs=60).last.test
        for kind in (nn.Tanh, nn.ReLU)
    )
    assert tanh["CKJ"] < 1e-2 * tanh["NTK"]
    assert tanh["CK"] < 1e-1 * tanh["NN"]
    assert relu["CKJ"] > 0.1 * relu["CK"]


def test_logistic_fits_are_those_of_scikit_learn() -> None:
    net = network([2, 9, 2])
    boundary = BOUNDARIES["F1"]
    found = conjugate_classification(net, boundary, grids=PLANE, epochs=0, reg=1e-2)
    x, z = PLANE.train.nodes(), PLANE.test.nodes()
    known, labels = boundary(x) > 0, boundary(z) > 0
    net = net.double()
    with torch.no_grad():
        out = net(z)
        features = [2**0.5 * F.pad(net[:-1](part), (0, 1), value=1.0).numpy() for part in (x, z)]
    for name, (a, b) in {"CK": features, "NTK": [jacobian(net, x), jacobian(net, z)]}.items():
        fit = LogisticRegression(C=100, fit_intercept=False, tol=1e-10, max_iter=100_000).fit(a, known.numpy())
        odds = torch.from_numpy(fit.decision_function(b))
        loss = float(F.softplus(torch.where(labels, -odds, odds)).sum())
        assert found.last.test[name] == pytest.approx(loss, rel=1e-3)
        assert found.last.accuracy is not None
        assert found.last.accuracy[name] == pytest.approx(float(((odds > 0) == labels).double().mean()))
    assert found.last.test["NN"] == pytest.approx(float(F.cross_entropy(out, labels.long(), reduction="sum")))
    ntk, ck = pair(net, 2)
    j = jacobian(net, x)
    np.testing.assert_allclose(ntk(x).numpy(), j @ j.T, rtol=1e-10)
    with torch.no_grad():
        hidden = net[:-1](x)
    torch.testing.assert_close(ck(x), 2 * (1 + hidden @ hidden.T))
    assert found.violations == 0
    assert len(found.plot().axes) == 2
    assert "CK %" in found.table()


def test_training_of_classes_stops_at_an_accuracy() -> None:
    net = network([2, 16, 1])
    how = {"grids": PLANE, "epochs": 300, "lr": 1e-2, "reg": 1e-2}
    found = conjugate_classification(net, lambda x: x[:, 0], until=0.9, **how)
    assert 0 < found.last.epoch < 300
    x = PLANE.train.nodes()
    with torch.no_grad():
        right = ((found.network(x)[:, 0] > 0) == (x[:, 0] > 0)).double().mean()
    assert right >= 0.9
    assert conjugate_classification(net, lambda x: x[:, 0], until=None, **(how | {"epochs": 5})).last.epoch == 5


def test_a_last_layer_without_bias_has_a_smaller_kernel() -> None:
    net = nn.Sequential(nn.Linear(1, 7), nn.Tanh(), nn.Linear(7, 1, bias=False))
    found = conjugate_regression(net, FUNCTIONS["f2"], grids=LINE, epochs=0)
    assert found.last.rank["CK"] <= 7
    assert found.violations == 0


FROZEN = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
FROZEN[2].requires_grad_(False)


def nan_at_zero(x: Tensor) -> Tensor:
    return 1 / x[:, 0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"grids": PLANE}, "the grid has 2 axes; needed: one"),
        ({"model": "net"}, "model is a str; needed: a torch.nn.Module"),
        ({"model": nn.Tanh()}, "the model has no parameters"),
        ({"model": nn.Linear(1, 3)}, r"the model gave \(2, 3\) for \(2, 1\); needed: \[n, 1\]"),
        ({"model": nn.Conv1d(1, 1, 1)}, "the Conv1d layer takes 3 dimensions"),
        ({"model": FROZEN}, "the conjugate kernel is no part of the NTK. Needed: a model that ends in an nn.Linear"),
        ({"model": nn.Linear(2, 1)}, "Linear layer takes"),
        ({"f": 3.0}, "f is a float; needed: a function"),
        ({"f": lambda x: x}, r"f of points \(91, 1\) gave torch.float64 \(91, 1\); needed: a real tensor \[91\]"),
        ({"f": nan_at_zero, "grids": Grids(Grid((4,)), (2,))}, "f at .* is inf; needed: finite values"),
        ({"epochs": -1}, "epochs=-1, lr=0.001; needed"),
        ({"lr": 0.0}, "lr=0.0; needed"),
        ({"f": lambda x: torch.exp(1j * x[:, 0])}, r"gave torch.complex128 \(91,\); needed: a real tensor"),
        ({"grids": Grid((30,))}, r"grids is a Grid; needed: Grids\(Grid\(\(200,\)\), \(3,\)\)"),
        ({"model": nn.Sequential(network([1, 8, 1]), nn.Tanh())}, "the conjugate kernel is no part of the NTK"),
        ({"at": [9]}, r"at=\[9\]; needed: epochs from 0 \(before the training\) to 5"),
    ],
)
def test_what_is_refused(given: dict, says: str) -> None:
    options = {"model": network([1, 4, 1]), "f": FUNCTIONS["f1"], "grids": LINE, "epochs": 5} | given
    with pytest.raises(InputError, match=says):
        conjugate_regression(options.pop("model"), options.pop("f"), **options)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"grids": LINE}, "the grid has 1 axes; needed: two"),
        ({"boundary": lambda x: x[:, 0] + 9}, "all nodes of the training grid are of one class"),
        ({"model": nn.Linear(2, 3)}, r"the model gave \(2, 3\) for \(2, 2\); needed: \[n, 1 or 2\]"),
        ({"reg": -1.0}, "reg=-1; needed: a finite number"),
        ({"until": "x"}, "until='x'; needed: a number"),
    ],
)
def test_what_is_refused_of_classes(given: dict, says: str) -> None:
    options = {"model": network([2, 4, 2]), "boundary": BOUNDARIES["F1"], "grids": PLANE, "epochs": 5} | given
    with pytest.raises(InputError, match=says):
        conjugate_classification(options.pop("model"), options.pop("boundary"), **options)


def test_a_constant_function_is_fitted() -> None:
    found = conjugate_regression(network([1, 8, 1]), lambda x: torch.zeros(len(x)), grids=LINE, epochs=2)
    assert found.last.test["CK"] == found.last.test["NTK"] == 0
    assert found.violations == 0
    ones = conjugate_regression(network([1, 8, 1]), lambda x: torch.ones(len(x)), grids=LINE, epochs=2)
    assert ones.last.test["CKJ"] < 1e-12
    assert ones.violations == 0


def test_random_models_are_refused_before_the_training() -> None:
    net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    with pytest.raises(ModelError, match=r"random|[Dd]ropout"):
        conjugate_regression(net, FUNCTIONS["f1"], grids=LINE, epochs=10**9)


def test_batch_norms_and_separated_classes_are_refused() -> None:
    mixing = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with pytest.raises(ModelError, match=r"Call model\.eval\(\) first"):
        conjugate_regression(mixing, FUNCTIONS["f1"], grids=LINE, epochs=10**9)
    with pytest.raises(DidNotConverge, match="the classes are separated: with reg=0"):
        conjugate_classification(network([2, 32, 2]), BOUNDARIES["F1"], grids=PLANE, epochs=0, reg=0)


def test_training_goes_on_where_gradients_are_off() -> None:
    with torch.no_grad():
        found = conjugate_regression(network([1, 8, 1]), FUNCTIONS["f1"], grids=LINE, epochs=3, at=[0])
    assert found.last.train["NN"] < found.moments[0].train["NN"]


@pytest.mark.slow
def test_one_unit_is_learned_and_kernels_do_not() -> None:
    found = tg.studies.single_unit([2, 16], samples=300, test=500, width=32, seeds=1, steps=2000, progress=False)
    for k in (0, 1):
        assert found.median("unit")[k] < 1e-3
    wide = found.median("NTK of a wide network")
    assert wide[1] > 0.2 > wide[0]
    assert len(found.table().splitlines()) == 3
    assert len(found.plot().axes) == 1


def test_descent_is_that_of_autograd() -> None:
    data = Sampled.draw(3, 50, 10, -0.5, seed=0)
    unit = nn.Sequential(nn.Linear(3, 1), nn.ReLU()).double()
    found = descended(unit, data, 20)
    optimizer = torch.optim.SGD(unit.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        (unit(data.x)[:, 0] - data.y).square().mean().div(2).backward()
        optimizer.step()
    torch.testing.assert_close(unit(data.x_test)[:, 0].detach(), found.found)
    assert found.loss == pytest.approx(float((unit(data.x)[:, 0] - data.y).detach().square().mean()))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dims": []}, r"dims=\(\); needed: whole numbers from 1"),
        ({"dims": [0]}, r"dims=\(0,\); needed"),
        ({"samples": 0}, "samples=0; needed"),
        ({"bias": -13.0}, "bias=-13.0; needed: at most 6 d in size, which is 12 for d = 2"),
        ({"dims": 2.5}, r"dims=\(2.5,\); needed"),
        ({"test": 1}, "the unit says the same of all 1 test samples; give more"),
        ({"bias": -6.0}, "the unit is off on all 20 samples; give a larger bias="),
    ],
)
def test_what_a_unit_refuses(given: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        tg.studies.single_unit(**({"dims": [2], "samples": 20, "test": 20} | given))
