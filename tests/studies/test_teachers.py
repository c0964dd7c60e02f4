"""Teachers, two-layer networks and what they learn, against autograd, Monte Carlo, torch and tangency's kernels."""

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.studies import (
    Optimizer,
    alignments,
    follow,
    lazy,
    normalised,
    teacher,
    train_two_layer,
    transition,
    two_layer,
)
from tangency.studies.aligned import outlier_edge


@pytest.mark.parametrize("name", ["tanh", "softplus", "relu", "erf", "sigmoid", "gelu", "identity"])
def test_normalised_activations(name: str) -> None:
    sigma = normalised(name)
    # The midpoint rule over the normal distribution: for smooth functions and kinks at 0 alike.
    z = torch.linspace(-9, 9, 180_001, dtype=torch.float64)
    z[90_000] = 0.0  # the kink itself, which linspace meets or misses by 1e-16
    weight = (-z.square() / 2).exp()
    weight /= weight.sum()
    value, slope = sigma.both(z)
    assert float(weight @ value) == pytest.approx(0, abs=1e-7)
    assert float(weight @ value.square()) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(value, sigma(z))
    at = z[::1000].clone().requires_grad_()
    torch.testing.assert_close(slope[::1000], torch.autograd.grad(sigma(at).sum(), at)[0])
    assert normalised(sigma) is sigma


@pytest.mark.parametrize(
    "activation",
    [
        nn.Softplus(beta=3),
        tg.infinite.Erf(a=2.0, b=0.5),
        tg.infinite.Quadrature(lambda z: torch.tanh(2 * z), name="Tanh"),
    ],
)
def test_slopes_are_their_own_where_options_hide_behind_a_name(activation: object) -> None:
    sigma = normalised(activation)
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)
    numeric = (sigma(z + 1e-6) - sigma(z - 1e-6)) / 2e-6
    torch.testing.assert_close(sigma.both(z)[1], numeric, rtol=1e-6, atol=1e-8)
    with torch.inference_mode():
        torch.testing.assert_close(normalised(activation).both(z)[1], numeric, rtol=1e-6, atol=1e-8)


def test_normalised_refuses_what_it_cannot_scale() -> None:
    with pytest.raises(tg.InputError, match=r"activation='rely'; needed"):
        normalised("rely")
    with pytest.raises(tg.InputError, match="is constant; needed: a function that changes"):
        normalised(tg.infinite.Quadrature(torch.zeros_like))


@pytest.mark.parametrize(("k", "tau"), [(1, 0.0), (4, 0.0), (1, 0.8)])
def test_teachers_have_their_moments(k: int, tau: float) -> None:
    data = teacher(40_000, 12, directions=k, link="tanh", tau=tau, noise=0.5, test=20_000, seed=3)
    torch.testing.assert_close(data.beta @ data.beta.T, torch.eye(k, dtype=torch.float64))
    clean = data.target(data.x)
    se = float(clean.std()) / 200
    assert float(clean.mean()) == pytest.approx(tau, abs=4 * se)  # E σ* = 0, E‖x‖² = d
    # tanh is odd, so that link and norm have nothing in common.
    assert float(clean.var()) == pytest.approx(1 / k + 2 * tau**2 / 12, rel=0.05)
    assert float((data.y - clean).std()) == pytest.approx(0.5, rel=0.02)
    torch.testing.assert_close(data.y_test, data.target(data.x_test))
    assert data.r2(data.y_test) == 1
    assert data.r2(data.y_test.mean().expand(20_000)) == pytest.approx(0, abs=1e-12)
    assert data.error(data.y_test + 0.5) == pytest.approx(0.25)


def test_a_teacher_is_its_formula() -> None:
    data = teacher(6, 5, directions=2, link="softplus", tau=0.2, seed=1)
    again = teacher(6, 5, directions=2, link="softplus", tau=0.2, seed=1)
    sigma = normalised("softplus")
    by_hand = [sum(float(sigma(b @ x)) for b in data.beta) / 2 + 0.2 * float(x.square().sum()) / 5 for x in data.x]
    assert data.y.tolist() == pytest.approx(by_hand)
    assert torch.equal(data.y, again.y)
    assert not torch.equal(data.x, teacher(6, 5, directions=2, seed=2).x)
    assert "softplus" in data.table().lower()


def test_gradients_are_those_of_autograd() -> None:
    data = teacher(17, 9, noise=0.3, seed=0)
    for activation in ("tanh", "softplus", "gelu"):
        net = two_layer(9, 13, activation=activation, seed=1)
        w, v = net.w.clone().requires_grad_(), net.v.clone().requires_grad_()
        out = net.activation(data.x @ w.T / 3) @ v / 13**0.5
        loss = (data.y - out).square().sum() / (2 * 17)
        found = net.gradients(data.x, data.y)
        torch.testing.assert_close(found.loss, loss.detach())
        for ours, theirs in zip((found.w, found.v), torch.autograd.grad(loss, (w, v)), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("second", ["normal", "sign"])
def test_kernels_are_those_of_its_module(second: str) -> None:
    net = two_layer(9, 13, second=second, seed=1)  # type: ignore[arg-type]
    x, z = torch.randn(5, 9).double(), torch.randn(4, 9).double()
    module = net.module()
    torch.testing.assert_close(module(x)[:, 0], net(x))
    ntk = tg.trace_ntk(module)
    torch.testing.assert_close(ntk(x), net.ntk(x))
    torch.testing.assert_close(ntk(x, z), net.ntk(x, z))
    a = net.hidden(x)
    torch.testing.assert_close(net.ck(x), a @ a.T)
    spectra = net.spectra(x)
    torch.testing.assert_close(spectra["ntk"].flip(0), torch.linalg.eigvalsh(net.ntk(x)))
    torch.testing.assert_close(spectra["weights"].flip(0), torch.linalg.eigvalsh(net.w.T @ net.w / 9))


def test_the_module_has_the_infinite_kernel() -> None:
    """E σ = 0 and E σ² = 1: the covariance of outputs at equal unit inputs is 1, as the wide network's own."""
    x = torch.nn.functional.normalize(torch.randn(6, 30).double()) * 30**0.5
    wide = two_layer(30, 40_000, seed=0)
    torch.testing.assert_close(wide.ck(x).diagonal(), torch.ones(6, dtype=torch.float64), rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Optimizer("gd", 2.0), lambda p: torch.optim.SGD(p, 2.0)),
        (Optimizer("adam", 0.05), lambda p: torch.optim.Adam(p, 0.05)),
        (Optimizer("adagrad", 0.05), lambda p: torch.optim.Adagrad(p, 0.05)),
    ],
)
def test_steps_are_those_of_torch(ours: Optimizer, theirs: object) -> None:
    data, net = teacher(20, 8, seed=0), two_layer(8, 12, seed=1)
    module = net.module()
    rule = theirs(module.parameters())  # type: ignore[operator]
    for _ in range(7):
        rule.zero_grad()
        ((module(data.x)[:, 0] - data.y).square().mean() / 2).backward()
        rule.step()
    run = train_two_layer(net, data, ours, epochs=7, until=0.0, progress=False)
    torch.testing.assert_close(run.network(data.x), module(data.x)[:, 0].detach())
    assert torch.equal(run.initial.w, two_layer(8, 12, seed=1).w)  # what was given is as it was


def test_batches_take_each_sample_once_an_epoch() -> None:
    """In batches of n SGD is gradient descent; small ones come to the same flow; lr decays after each epoch."""
    data, net = teacher(20, 8, seed=0), two_layer(8, 12, seed=1)
    whole = train_two_layer(net, data, Optimizer("gd", 2.0), epochs=3, progress=False)
    batch = train_two_layer(net, data, Optimizer("sgd", 2.0, batch=20), epochs=3, progress=False)
    torch.testing.assert_close(whole.network.w, batch.network.w)
    small = train_two_layer(
        net, data, Optimizer("sgd", 2e-3, batch=5), epochs=1, progress=False
    )  # four steps of a quarter
    one = net.gradients(data.x, data.y)
    torch.testing.assert_close((net.w - small.network.w) / 8e-3, one.w, rtol=0.05, atol=1e-4)
    slower = train_two_layer(net, data, Optimizer("gd", 2.0, decay=0.5), epochs=2, progress=False)
    first = train_two_layer(net, data, Optimizer("gd", 2.0), epochs=1, progress=False).network
    second = first.gradients(data.x, data.y)
    torch.testing.assert_close(slower.network.w, first.w - 1.0 * second.w)


def test_small_steps_are_the_flow() -> None:
    """dθ/dt = −∇L by Runge and Kutta, against GD to the same time: the distance is of the order of the step."""
    data, net = teacher(15, 6, noise=0.1, seed=0), two_layer(6, 10, seed=1)
    flow, h = net.copy(), 0.5

    def slope(w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        step = tg.studies.TwoLayer(w, v, net.activation).gradients(data.x, data.y)
        return -step.w, -step.v

    for _ in range(20):
        k1 = slope(flow.w, flow.v)
        k2 = slope(flow.w + h / 2 * k1[0], flow.v + h / 2 * k1[1])
        k3 = slope(flow.w + h / 2 * k2[0], flow.v + h / 2 * k2[1])
        k4 = slope(flow.w + h * k3[0], flow.v + h * k3[1])
        for p, *ks in zip((flow.w, flow.v), k1, k2, k3, k4, strict=True):
            p += h / 6 * (ks[0] + 2 * ks[1] + 2 * ks[2] + ks[3])
    off = []
    for lr, steps in ((0.1, 100), (0.01, 1000)):
        run = train_two_layer(net, data, Optimizer("gd", lr), epochs=steps, until=0.0, progress=False)
        off.append(float((run.network(data.x) - flow(data.x)).norm()))
    assert off[1] < 2e-3
    assert off[0] / off[1] == pytest.approx(10, rel=0.2)


def test_the_lazy_network_is_ridge_regression_without_ridge() -> None:
    data, net = teacher(30, 10, noise=0.2, test=40, seed=0), two_layer(10, 80, seed=1)
    found = lazy(net, data)
    K, cross = net.ntk(data.x), net.ntk(data.x_test, data.x)
    by_hand = net(data.x_test) + cross @ torch.linalg.solve(K, data.y - net(data.x))
    torch.testing.assert_close(found.predicted, by_hand)
    ridge = tg.regress.ridge(K, data.y, reg=1e-10, f0=net(data.x)).predict(cross, f0=net(data.x_test))
    torch.testing.assert_close(found.predicted, ridge, rtol=1e-5, atol=1e-6)
    assert found.r2 == pytest.approx(data.r2(by_hand))


def test_small_steps_come_to_the_lazy_network_as_width_grows() -> None:
    data, off = teacher(20, 10, noise=0.2, test=200, seed=0), []
    for h in (250, 4000):
        net = two_layer(10, h, seed=2)
        run = train_two_layer(net, data, Optimizer("gd", 2.0), until=1e-6, epochs=4000, progress=False)
        assert run.reached
        off.append(float((run.network(data.x_test) - lazy(net, data).predicted).square().mean().sqrt()))
    assert off[0] / off[1] > 2.5  # 4, if it falls as the root of the width


def test_alignments_by_their_definitions() -> None:
    data, net = teacher(25, 10, directions=2, noise=0.1, seed=0), two_layer(10, 15, seed=1)
    found = alignments(net, data, top=3)
    u, y = torch.linalg.svd(net.w).Vh, data.y
    assert found.feature == pytest.approx(float((data.beta @ u[0]).norm()))
    for name, K in (("ck", net.ck(data.x)), ("ntk", net.ntk(data.x))):
        v = torch.linalg.eigh(K).eigenvectors[:, -1]
        assert found.labels[name] == pytest.approx(abs(float(y @ v)) / float(y.norm()))
        yy = torch.outer(y, y)
        assert found.kta[name] == pytest.approx(float((K * yy).sum() / (K.norm() * y.norm() ** 2)))
        assert found.largest[name] == pytest.approx(float(torch.linalg.eigvalsh(K)[-1]))
    assert found.largest["weights"] == pytest.approx(float(torch.linalg.svdvals(net.w)[0]) ** 2 / 10)
    cosines = torch.linalg.svdvals(data.beta @ u[:3].T)
    torch.testing.assert_close(found.angles.cos(), cosines)
    assert found.table().splitlines()[1].split()[0] == "W"
    single = alignments(net, teacher(25, 10, seed=0), top=1)
    assert single.feature == pytest.approx(abs(float(teacher(25, 10, seed=0).beta[0] @ u[0])))


def test_what_is_followed_is_what_alignments_say() -> None:
    data, net = teacher(25, 10, directions=2, seed=0), two_layer(10, 15, seed=1)
    run = train_two_layer(net, data, Optimizer("gd", 3.0), epochs=9, watch=follow(data, top=3), progress=False)
    assert [s["epoch"] for s in run.seen] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    for seen, at in ((run.seen[0], net), (run.seen[-1], run.network)):
        found = alignments(at, data, top=3)
        assert seen["feature"] == pytest.approx(found.feature)
        assert seen["kta"] == pytest.approx(found.kta["ck"])
        assert [seen["angle 1"], seen["angle 2"]] == pytest.approx(found.angles.tolist())
    figure = tg.studies.draw_students({"GD": run})
    assert [axis.get_title() for axis in figure.axes] == ["KTA of the CK", "‖β u₁‖", "principal angles (radian)"]
    with pytest.raises(tg.InputError, match="blind was not followed; needed"):
        tg.studies.draw_students({"blind": train_two_layer(net, data, Optimizer("gd", 3.0), epochs=1, progress=False)})


def test_a_large_learning_rate_finds_the_direction() -> None:
    """Wang et al., section 4.2: beyond a threshold W has an outlier, and it points along β."""
    data = teacher(240, 120, tau=0.2, noise=0.3, seed=0).to(torch.float32)
    net = two_layer(120, 180, seed=1, dtype=torch.float32)
    found = transition(net, data, [20.0, 2.0, 200.0], batch=16, until=1e-3, epochs=300, progress=False)
    assert found.lrs == (2.0, 20.0, 200.0)
    assert float(found.feature[0]) < 0.3 < 0.6 < float(found.feature[1])
    assert float(found.r2[1]) > float(found.r2[0]) + 0.03
    assert bool(found.r2[2].isnan())  # diverged
    assert float(found.weights[0]) < found.edge < float(found.weights[1])
    assert found.threshold == pytest.approx((2.0 * 20.0) ** 0.5)
    assert len(found.table().splitlines()) == 4
    assert len(found.plot().axes) == 4


def test_random_weights_have_no_outlier() -> None:
    largest = [float(torch.linalg.matrix_norm(two_layer(60, 90, seed=s).w, 2)) ** 2 / 60 for s in range(200)]
    assert max(largest) < outlier_edge(90, 60)
    assert max(largest) > (60**0.5 + 90**0.5) ** 2 / 60


def test_students_refuse_what_they_cannot_use() -> None:
    with pytest.raises(tg.InputError, match="tau=nan"):
        teacher(5, 3, tau=float("nan"))
    assert teacher(5, 3, test=1).r2(torch.zeros(1)) == -float("inf")  # of one number there is no variance
    data, net = teacher(20, 8), two_layer(8, 12)
    with pytest.raises(tg.InputError, match=r"n=0; needed: a number of training samples, at least 1"):
        teacher(0, 8)
    with pytest.raises(tg.InputError, match=r"directions=9, d=8; needed: no more orthogonal directions than inputs"):
        teacher(20, 8, directions=9)
    with pytest.raises(tg.InputError, match=r"noise=-1; needed"):
        teacher(20, 8, noise=-1)
    with pytest.raises(tg.InputError, match=r"h=0; needed: a whole number"):
        two_layer(8, 0)
    with pytest.raises(tg.InputError, match=r"second='ones'; needed: 'normal'"):
        two_layer(8, 12, second="ones")  # type: ignore[arg-type]
    with pytest.raises(tg.InputError, match=r"method='sdg'; needed: 'gd', 'sgd'.*Did you mean 'sgd'"):
        Optimizer("sdg", 1.0)  # type: ignore[arg-type]
    with pytest.raises(tg.InputError, match=r"lr=0; needed: a learning rate above 0"):
        Optimizer("gd", 0.0)
    with pytest.raises(tg.InputError, match=r"decay=2; needed: a factor"):
        Optimizer("gd", 1.0, decay=2)
    with pytest.raises(tg.InputError, match=r"method='gd' takes all samples at once, batch=4. Use method='sgd'"):
        Optimizer("gd", 1.0, batch=4)
    with pytest.raises(tg.InputError, match=r"the network takes 8 inputs, the samples have 5. Give one d"):
        lazy(net, teacher(20, 5))
    with pytest.raises(tg.InputError, match=r"the network is torch.float64, the samples are torch.float32"):
        train_two_layer(net, data.to(torch.float32), Optimizer("gd", 1.0))
    with pytest.raises(tg.InputError, match=r"x is torch.float32, the network torch.float64"):
        net(torch.randn(2, 8))
    with pytest.raises(tg.InputError, match=r"lrs=\[\]; needed: learning rates above 0"):
        transition(net, data, [])
    with pytest.raises(tg.DidNotConverge, match=r"training diverged: the loss of epoch .* Lower lr=1000") as caught:
        train_two_layer(net, data, Optimizer("gd", 1000.0), progress=False)
    assert isinstance(caught.value.solution, tg.studies.Learned)
    assert not caught.value.solution.reached
    assert "gd" in caught.value.solution.table()
