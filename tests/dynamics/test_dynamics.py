"""Training in closed form, as an ODE and by steps, against the linearised network trained by torch itself."""

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tangency as tg

D, R = tg.dynamics, tg.regress
INF = float("inf")
DOUBLE = torch.float64
EYE = torch.eye(3)


class Case:
    """A small network with 30 parameters per output sample to spare, its Grams and a problem for it."""

    def __init__(self, outputs: int = 2, n: int = 7, width: int = 40) -> None:
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs)).to(DOUBLE)
        self.x, self.z = torch.randn(n, 4, dtype=DOUBLE), torch.randn(3, 4, dtype=DOUBLE)
        self.y, self.labels = torch.randn(n, outputs, dtype=DOUBLE), torch.randint(0, outputs, (n,))
        kernel = tg.full_ntk(self.net)
        self.K, self.cross = tg.compute(kernel, self.x), tg.compute(kernel, self.z, self.x)
        with torch.no_grad():
            self.f0, self.g0 = self.net(self.x), self.net(self.z)
        self.phi, self.psi = kernel.features(self.x), kernel.features(self.z)

    def trained(self, loss: Callable, optimizer: Callable, **plan: object) -> D.History:
        """The linearised network, trained by torch."""
        return D.train(
            tg.linearize(self.net), self.x, plan.pop("y", self.y), loss=loss, optimizer=optimizer, x_test=self.z,
            progress=False, **plan,
        )  # fmt: skip


@pytest.fixture
def case() -> Case:
    return Case()


def half_square(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().sum() / 2


def close(a: Tensor, b: Tensor, tol: float) -> None:
    assert a.shape == b.shape
    error = float((a - b).abs().max() / b.abs().max())
    assert error <= tol, error


# Identities ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reg", [1e-3, 0.1, 10.0])
@pytest.mark.every(2)
def test_ridge_on_the_ntk_is_ridge_of_the_linearised_network(case: Case, reg: float) -> None:
    """argmin over θ of ‖f_lin(x; θ) − y‖² + reg·‖θ − θ₀‖², by L-BFGS in parameter space."""
    fit = R.ridge(case.K, case.y, reg=reg, f0=case.f0)
    lin = tg.linearize(case.net)

    def objective(f: Tensor, y: Tensor) -> Tensor:
        return (f - y).square().sum() + reg * lin.displacement().square()

    # L-BFGS needs a start off θ₀, where ‖θ − θ₀‖ has no gradient.
    with torch.no_grad():
        for p in lin.parameters():
            p.add_(1e-3 * torch.randn_like(p))
    optimizer = lambda p: torch.optim.LBFGS(  # noqa: E731
        p, max_iter=3000, tolerance_grad=1e-12, tolerance_change=1e-16, history_size=50, line_search_fn="strong_wolfe"
    )
    past = D.train(lin, case.x, case.y, loss=objective, optimizer=optimizer, steps=2, x_test=case.z, progress=False)
    close(fit.fitted, past.train[-1], 1e-6)
    close(fit.predict(case.cross, case.g0), past.test[-1], 1e-6)
    assert fit.norm == pytest.approx(float(lin.displacement().detach()), rel=1e-5)
    # and by the normal equations in parameter space, to rounding
    phi = case.phi.flatten(0, 1)
    w = torch.linalg.solve(
        phi.T @ phi + reg * torch.eye(phi.shape[1], dtype=DOUBLE), phi.T @ (case.y - case.f0).flatten()
    )
    close(fit.predict(case.cross, case.g0), case.g0 + case.psi @ w, 1e-9)


def test_flow_ends_at_ridgeless_and_at_the_trained_linearised_network(case: Case) -> None:
    path = D.flow(case.K, case.y, f0=case.f0).at([INF])
    fit = R.ridgeless(case.K, case.y, f0=case.f0)
    close(path.train[0], fit.fitted, 1e-9)
    close(path.predict(case.cross, case.g0)[0], fit.predict(case.cross, case.g0), 1e-9)
    close(path.train[0], case.y, 1e-9)  # full rank: it interpolates
    optimizer = lambda p: torch.optim.LBFGS(  # noqa: E731
        p, max_iter=5000, tolerance_grad=1e-14, tolerance_change=1e-18, history_size=100, line_search_fn="strong_wolfe"
    )
    past = case.trained(half_square, optimizer, steps=3)
    close(past.train[-1], path.train[0], 1e-7)
    close(past.test[-1], path.predict(case.cross, case.g0)[0], 1e-6)


def test_flow_equals_small_steps_of_the_linearised_network(case: Case) -> None:
    """Richardson: halving the step halves the distance."""
    exact = D.flow(case.K, case.y, f0=case.f0).at([0.2])
    gaps = []
    for steps in (200, 400):
        past = case.trained(half_square, lambda p, lr=0.2 / steps: torch.optim.SGD(p, lr=lr), steps=steps, every=steps)
        gaps.append(float((past.test[-1] - exact.predict(case.cross, case.g0)[0]).abs().max()))
    assert gaps[1] < 2e-2
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.1)


OPTIMIZERS = {"gradient descent": {}, "momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True}}
LOSSES = {
    "mse": F.mse_loss,
    "cross-entropy": F.cross_entropy,
    "huber": lambda f, y: F.huber_loss(f, y, delta=0.3),
    "logistic": lambda f, y: F.binary_cross_entropy_with_logits(f, torch.sigmoid(y)),
}


@pytest.mark.parametrize("batched", [False, True], ids=["all", "batches"])
@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.every(9)
def test_discrete_steps_equal_the_linearised_network(case: Case, name: str, options: dict, batched: bool) -> None:
    y = case.labels if name == "cross-entropy" else case.y
    plan = {"batches": [torch.randperm(7)[: 2 + k % 3] for k in range(25)]} if batched else {"steps": 25}
    lr = 0.05 * D.max_learning_rate(case.K, curvature=1.0 / len(case.x))
    path = D.descend(case.K, y, loss=LOSSES[name], lr=lr, f0=case.f0, progress=False, **plan, **options)
    past = case.trained(LOSSES[name], lambda p: torch.optim.SGD(p, lr=lr, **options), y=y, **plan)
    close(path.train, past.train, 1e-8)
    close(path.predict(case.cross, case.g0), past.test, 1e-8)
    close(path.loss, past.loss, 1e-8)
    assert float(path.loss[-1]) < float(path.loss[0])


def test_scalar_kernels_stand_for_every_output(case: Case) -> None:
    """K⊗I as a full kernel gives the same as K alone: flow, ODE, steps."""
    k = case.K.dense()[:, 0, :, 0]
    full = torch.einsum("nm,cd->ncmd", k, torch.eye(2, dtype=DOUBLE))
    kw = {"f0": case.f0}
    close(D.flow(k, case.y, **kw).at([0.1, 3, INF]).train, D.flow(full, case.y, **kw).at([0.1, 3, INF]).train, 1e-10)
    a, b = (D.descend(m, case.y, loss=F.mse_loss, lr=0.01, steps=5, **kw) for m in (k, full))
    close(a.train, b.train, 1e-12)
    a, b = (D.integrate(m, case.labels, [0, 2], loss=F.cross_entropy, **kw) for m in (k, full))
    close(a.train, b.train, 1e-8)


def test_learning_rate_schedule_and_every(case: Case) -> None:
    rate = lambda k: 0.01 / (1 + k)  # noqa: E731
    path = D.descend(case.K, case.y, loss=F.mse_loss, lr=rate, steps=7, f0=case.f0, every=3)
    assert path.times.tolist() == [0, 3, 6, 7]
    f = case.f0.flatten()
    k = case.K.dense().reshape(14, 14)
    for step in range(7):
        f = f - rate(step) * k @ (f - case.y.flatten()) * 2 / 14
    close(path.train[-1].flatten(), f, 1e-12)


def test_a_gram_on_disk_descends_as_one_in_memory(case: Case, tmp_path: Path) -> None:
    stored = tg.compute(tg.full_ntk(case.net), case.x, store=tmp_path / "gram", tile=3)
    kw = {"loss": F.mse_loss, "lr": 0.01, "f0": case.f0, "batches": [[0, 1], [2, 6], [5]]}
    close(D.descend(stored, case.y, **kw).train, D.descend(case.K, case.y, **kw).train, 1e-12)
    close(D.flow(stored, case.y).at([1]).train, D.flow(case.K, case.y).at([1]).train, 1e-12)


def test_adam_by_linearised_parameters_equals_adam_on_the_features(case: Case) -> None:
    adam = lambda p: torch.optim.Adam(p, lr=1e-2)  # noqa: E731
    past = case.trained(F.cross_entropy, adam, y=case.labels, steps=40)
    w = torch.zeros(case.phi.shape[2], dtype=DOUBLE, requires_grad=True)
    optimizer = adam([w])
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(case.f0 + case.phi @ w, case.labels).backward()
        optimizer.step()
    close(past.test[-1], case.g0 + case.psi @ w.detach(), 1e-9)


def test_cross_entropy_ode_equals_small_steps(case: Case) -> None:
    path = D.integrate(case.K, case.labels, [0, 1.0], loss=F.cross_entropy, f0=case.f0)
    gaps = []
    for steps in (100, 200):
        small = D.descend(case.K, case.labels, loss=F.cross_entropy, lr=1 / steps, steps=steps, f0=case.f0, every=steps)
        gaps.append(float((small.train[-1] - path.train[-1]).abs().max()))
    assert gaps[1] < 5e-3
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.1)
    # extrapolated to steps of length 0, the difference is gone
    first, second = (
        D.descend(case.K, case.labels, loss=F.cross_entropy, lr=1 / s, steps=s, f0=case.f0, every=s).train[-1]
        for s in (1000, 2000)
    )
    close(2 * second - first, path.train[-1], 1e-6)


def test_the_ode_for_the_square_loss_equals_the_closed_form(case: Case) -> None:
    times = [0, 0.1, 1, 4]
    path = D.integrate(case.K, case.y, times, loss=half_square, f0=case.f0, lr=0.5)
    exact = D.flow(case.K, case.y, f0=case.f0, lr=0.5).at(times)
    close(path.train, exact.train, 1e-7)
    close(path.dual[1:], exact.dual[1:], 1e-6)
    close(path.loss, exact.loss, 1e-7)
    close(path.predict(case.cross, case.g0), exact.predict(case.cross, case.g0), 1e-7)


def test_momentum_ode_is_the_limit_of_heavy_ball_steps(case: Case) -> None:
    """Steps with momentum 1 − (1 − μ)·h and rate lr·h² follow f″ + (1 − μ) f′ = −lr·K ∂L/∂f with an error O(h)."""
    path = D.integrate(case.K, case.y, [0, 5], loss=half_square, f0=case.f0, lr=0.05, momentum=0.9)
    gaps = []
    for h in (0.02, 0.01):
        kw = {"momentum": 1 - 0.1 * h, "steps": round(5 / h), "every": 10_000}
        small = D.descend(case.K, case.y, loss=half_square, lr=0.05 * h * h, f0=case.f0, **kw)
        gaps.append(float((small.train[-1] - path.train[-1]).abs().max()))
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.25)
    assert gaps[1] < 0.1


# Spectral bias ------------------------------------------------------------------------------------------------------


def test_loss_by_mode_is_21_and_equals_the_closed_form(case: Case) -> None:
    y, k = torch.randn(7, dtype=DOUBLE), case.K.dense()[:, 0, :, 0]
    flow, times = D.flow(k, y, lr=0.3), torch.tensor([0.0, 0.5, 2.0, 30.0], dtype=DOUBLE)
    direct = torch.stack([(torch.linalg.matrix_exp(-0.3 * t * k) @ y).square().sum() for t in times])
    close(flow.loss_by_mode(times).sum(1), direct, 1e-10)
    path = flow.at(times)
    close(path.loss * 2, direct, 1e-10)
    close(2 * path.loss, (path.train - y).square().sum(1), 1e-9)
    when = flow.time_to_fit(0.01)
    left = torch.stack([flow.loss_by_mode([float(t)])[0, i] for i, t in enumerate(when)])
    close(left, 1e-4 * flow.energy, 1e-9)
    assert bool((when.diff() > 0).all())  # the largest eigenvalue is learned first


def test_weights_and_unreachable_targets() -> None:
    """A singular K: what its modes cannot reach stays; a sample of weight zero is not fitted, but predicted."""
    phi = torch.randn(6, 3, dtype=DOUBLE)
    k, y, f0 = phi @ phi.T, torch.randn(6, 2, dtype=DOUBLE), torch.randn(6, 2, dtype=DOUBLE)
    w = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 3.0], dtype=DOUBLE)
    flow = D.flow(k, y, f0=f0, sample_weights=w)
    assert len(flow.values) == 3
    for t in (0.0, 0.7, INF):
        path = flow.at(t)
        theta = torch.zeros(3, 2, dtype=DOUBLE)
        a = phi.T @ (w[:, None] * phi)
        grow = torch.linalg.inv(a) @ (torch.eye(3, dtype=DOUBLE) - torch.linalg.matrix_exp(-a * min(t, 1e4)))
        theta = grow @ (phi.T @ (w[:, None] * (y - f0)))
        close(path.train[0], f0 + phi @ theta, 1e-9)
        expected = 0.5 * (w[:, None] * (f0 + phi @ theta - y).square()).sum()
        assert float(path.loss[0]) == pytest.approx(float(expected), rel=1e-9)


@given(st.integers(1, 6), st.integers(1, 3), st.floats(0.01, 5), st.booleans())
def test_flow_solves_its_equation(n: int, q: int, t: float, weighted: bool) -> None:
    """df/dt = −lr·K W (f − y), by central differences of the closed form, for any size, rank and weights."""
    torch.manual_seed(n * 10 + q)
    phi = torch.randn(n, 4, dtype=DOUBLE)
    k, y, f0 = phi @ phi.T, torch.randn(n, q, dtype=DOUBLE), torch.randn(n, q, dtype=DOUBLE)
    w = torch.rand(n, dtype=DOUBLE) + 0.1 if weighted else torch.ones(n, dtype=DOUBLE)
    h = 1e-4
    before, now, after = D.flow(k, y, f0=f0, sample_weights=w, lr=0.2).at([t - h if t > h else 0, t, t + h]).train
    step = h + min(t, h)
    slope = -0.2 * k @ (w[:, None] * (now - y))
    assert float(((after - before) / step - slope).abs().max()) < 1e-5 * (1 + float(k.abs().max()) ** 3)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.5, True)])
@pytest.mark.every(3)
def test_largest_learning_rate_is_where_descent_turns(case: Case, momentum: float, nesterov: bool) -> None:
    lr = D.max_learning_rate(case.K, momentum=momentum, nesterov=nesterov)
    run = lambda rate: D.descend(  # noqa: E731
        case.K, case.y, loss=half_square, lr=rate, steps=1500, f0=case.f0, momentum=momentum, nesterov=nesterov,
        every=1500, progress=False,
    )  # fmt: skip
    start, end = run(0.995 * lr).loss
    assert float(end) < float(start)
    try:
        end = run(1.005 * lr).loss[-1]
    except tg.DidNotConverge:
        end = torch.tensor(INF)
    assert float(end) > 1e3 * float(start)


def test_diverging_descent_says_so(case: Case) -> None:
    with pytest.raises(tg.DidNotConverge, match="max_learning_rate") as e:
        D.descend(case.K, case.y, loss=half_square, lr=1e3, steps=500)
    assert e.value.solution.train.shape[0] == 501


# neural-tangents' predict -------------------------------------------------------------------------------------------

ORACLE = np.load(Path(__file__).parents[1] / "fixtures" / "predict.npz")
KINDS = {"scalar": "ntk", "full": "full"}


def oracle(name: str) -> Tensor:
    return torch.from_numpy(ORACLE[name])


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_descent_mse_of_neural_tangents(kind: str) -> None:
    k, cross = oracle(f"{KINDS[kind]}/k_dd"), oracle(f"{KINDS[kind]}/k_td")
    y, f0, lr = oracle("y_train"), oracle("f0_train"), float(ORACLE["learning_rate"])
    path = D.flow(k, y, f0=f0, sample_weights=1 / y.numel(), lr=lr).at(oracle("mse/times"))
    close(path.train, oracle(f"mse/{kind}/train"), 1e-6)
    close(path.predict(cross, oracle("f0_test")), oracle(f"mse/{kind}/test"), 1e-6)


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    return -(y * f.log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "momentum"), [("flow/cross_entropy", None), ("heavy/cross_entropy", 0.9), ("heavy/square", 0.9)]
)
@pytest.mark.every(3)
def test_gradient_descent_of_neural_tangents(kind: str, name: str, momentum: float | None) -> None:
    k, cross = oracle(f"{KINDS[kind]}/k_dd"), oracle(f"{KINDS[kind]}/k_td")
    square = name.endswith("square")
    loss = (lambda f, y: (f - y).square().mean() / 2) if square else cross_entropy
    y = oracle("y_train" if square else "y_onehot")
    lr, f0 = float(ORACLE["learning_rate"]), oracle("f0_train")
    path = D.integrate(k, y, oracle("ode/times"), loss=loss, lr=lr, f0=f0, momentum=momentum)
    close(path.train, oracle(f"{name}/{kind}/train"), 1e-6)
    close(path.predict(cross, oracle("f0_test")), oracle(f"{name}/{kind}/test"), 1e-6)


def test_gp_inference_of_neural_tangents() -> None:
    y, noise = oracle("y_train"), float(ORACLE["gp/diag_reg"])
    for name, key in (("nngp", "nngp"), ("full", "full")):
        k, cross, prior = (oracle(f"{name}/{part}") for part in ("k_dd", "k_td", "k_tt"))
        posterior = R.gaussian_process(k, y, noise=noise).predict(cross, prior)
        close(posterior.mean, oracle(f"gp/{key}/mean"), 1e-6)
        close(posterior.covariance, oracle(f"gp/{key}/cov"), 1e-6)
    ntk, nngp = [oracle(f"ntk/{k}") for k in ("k_dd", "k_td")], [oracle(f"nngp/{k}") for k in ("k_dd", "k_td", "k_tt")]
    posterior = D.ensemble(tuple(ntk), tuple(nngp), y, reg=noise)
    close(posterior.mean, oracle("gp/ntk/mean"), 1e-6)
    close(posterior.covariance, oracle("gp/ntk/cov"), 1e-6)


@pytest.mark.parametrize(("kind", "reg"), [("plain", 0.0), ("reg", 1e-3)])
def test_ensembles_of_neural_tangents(kind: str, reg: float) -> None:
    ntk, nngp = [oracle(f"ntk/{k}") for k in ("k_dd", "k_td")], [oracle(f"nngp/{k}") for k in ("k_dd", "k_td", "k_tt")]
    y = oracle("y_train")
    kw = {"lr": float(ORACLE["learning_rate"]), "weight": 1 / y.numel(), "reg": reg}
    for i, t in enumerate(ORACLE["ens/times"]):
        posterior = D.ensemble(tuple(ntk), tuple(nngp), y, t=float(t), **kw)
        close(posterior.mean, oracle(f"ens/{kind}/ntk/mean")[i], 1e-6)
        close(posterior.covariance, oracle(f"ens/{kind}/ntk/cov")[i], 1e-6)


def test_max_learning_rate_of_neural_tangents() -> None:
    for momentum, key in ((0.0, "rate/plain"), (0.9, "rate/momentum")):
        mine = D.max_learning_rate(oracle("ntk/k_dd"), sample_weights=1 / oracle("y_train").numel(), momentum=momentum)
        assert mine == pytest.approx(float(ORACLE[key]), rel=1e-6)


# What a step does to a real network ---------------------------------------------------------------------------------


def slope(x: list[float], y: list[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def stepped(net: nn.Module, x: Tensor, y: Tensor, loss: Callable, lr: float) -> nn.Module:
    """A copy after a real SGD step."""
    net = copy.deepcopy(net)
    with torch.enable_grad():
        loss(net(x), y).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= lr * p.grad
    return net


NETS = {
    "lenet": lambda: (tg.models.lenet5(4, 1, 16), torch.randn(9, 1, 16, 16, dtype=DOUBLE)),
    "mlp": lambda: (tg.models.mlp([5, 30, 4], nn.Tanh), torch.randn(9, 5, dtype=DOUBLE)),
}


@pytest.mark.parametrize("many", [1, 4])
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.every(3)
def test_a_real_step_equals_the_learning_path_decomposition(make: Callable, many: int) -> None:
    net, x = make()
    net = net.to(DOUBLE)
    seen, update, labels = x[many:], x[:many], torch.randint(0, 4, (many,))
    rates, gaps = [1e-4 / 2**k for k in range(6)], []
    for lr in rates:
        path = D.learning_path(net, seen, update, labels, lr=lr)
        with torch.no_grad():
            after = stepped(net, update, labels, F.cross_entropy, lr)(seen).softmax(1)
            gaps.append(float((after - net(seen).softmax(1) - path.change).norm()))
        assert float((path.A @ path.A.new_ones(4)).abs().max()) < 1e-12  # probabilities stay normalised
        close(path.shares.sum(1), path.change, 1e-12)
    assert slope(rates, gaps) == pytest.approx(2, abs=0.05)
    assert gaps[-1] < 1e-2 * float(path.change.norm())


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_a_real_step_moves_the_outputs_as_one_step_says(make: Callable) -> None:
    net, x = make()
    net = net.to(DOUBLE)
    y = torch.randn(5, 4, dtype=DOUBLE)
    rates, gaps = [1e-5 / 2**k for k in range(6)], []  # too short to cross a kink
    for lr in rates:
        shares = D.one_step(net, x, x[:5], y, loss=F.mse_loss, lr=lr)
        with torch.no_grad():
            change = stepped(net, x[:5], y, F.mse_loss, lr)(x) - net(x)
        gaps.append(float((change - shares.sum(1)).norm()))
    assert shares.shape == (9, 5, 4)
    assert slope(rates, gaps) == pytest.approx(2, abs=0.05)


def test_monitor_sees_the_kernel_move() -> None:
    net, x = tg.models.mlp([3, 50, 1], nn.Tanh).double(), torch.randn(12, 3, dtype=DOUBLE)
    monitor = D.Monitor(tg.trace_ntk(net), x)
    grams, start = [], [p.detach().clone() for p in net.parameters()]

    def watch(step: int) -> None:
        monitor(step)
        grams.append(tg.trace_ntk(net)(x))

    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    D.train(net, x, x[:, :1].sin(), loss=F.mse_loss, optimizer=sgd, steps=30, every=10, watch=watch, progress=False)
    regime = monitor.regime()
    assert regime.steps.tolist() == [0, 10, 20, 30]
    for k, gram in enumerate(grams):
        assert float(regime.change[k]) == pytest.approx(float((gram - grams[0]).norm() / grams[0].norm()), abs=1e-12)
        cosine = F.cosine_similarity(gram.flatten(), grams[0].flatten(), 0)
        assert float(regime.cosine[k]) == pytest.approx(float(cosine), rel=1e-12)
    last = 1 - F.cosine_similarity(grams[3].flatten(), grams[2].flatten(), 0)
    assert float(regime.velocity[3]) == pytest.approx(float(last) / 10, rel=1e-6)
    moved = math.sqrt(sum(float((p.detach() - q).square().sum()) for p, q in zip(net.parameters(), start, strict=True)))
    assert float(regime.moved[3]) == pytest.approx(moved, rel=1e-12)
    assert float(regime.change[3]) > 1e-3
    with pytest.raises(tg.InputError, match="growing"):
        monitor(5)


def test_monitor_refuses_what_cannot_move() -> None:
    net = tg.models.mlp([3, 4, 1])
    with pytest.raises(tg.InputError, match="params="):
        D.Monitor(tg.trace_ntk(net, params=net.state_dict()), torch.randn(3, 3))
    with pytest.raises(tg.InputError, match="nothing was watched"):
        D.Monitor(tg.trace_ntk(net), torch.randn(3, 3)).regime()


# Bounds -------------------------------------------------------------------------------------------------------------

WIDTHS = [64, 256, 1024, 4096]


def lazy(width: int, activation: Callable, beta: float, signs: bool, seed: int) -> D.LazyRun:
    """One hidden layer, its weights alone trained; f = Σ_j a_j σ(w_j·x)/√m, ‖x‖ = 1, residuals of order 1."""
    torch.manual_seed(seed)
    n, d = 12, 6
    x = F.normalize(torch.randn(n + 6, d, dtype=DOUBLE)) * d**0.5  # the network divides by √d
    net = tg.models.two_layer(d, width, activation).double()
    net.v.data = net.v.data.sign() if signs else torch.ones_like(net.v)
    with torch.no_grad():
        y = net(x[:n])[:, 0] + torch.randn(n, dtype=DOUBLE).sign()
    lr = D.max_learning_rate(tg.trace_ntk(net, trainable="W")(x[:n])) / 2
    return D.linearization_quality(
        net, x[:n], y, width=width, beta=beta, lr=lr, steps=100, every=25, x_test=x[n:], trainable="W"
    )


@pytest.mark.parametrize(
    ("activation", "beta", "signs"),
    [(F.softplus, 0.25, False), (torch.tanh, 4 / 27**0.5, True)],
    ids=["softplus", "tanh"],
)
@pytest.mark.every(2)
def test_bounds_hold_at_every_width(activation: Callable, beta: float, signs: bool) -> None:
    runs = [lazy(m, activation, beta, signs, seed=m) for m in WIDTHS]
    for run in runs:
        for name, (measured, bound) in run.bounds().items():
            assert bool((measured <= bound * (1 + 1e-9) + 1e-12).all()), (run.width, name)
        assert float(run.gap[-1]) > 0
        assert float(run.error[-1]) < float(run.error[0])
    # With a_j = 1 the hidden weights all pull the kernel one way: the bound's own rate. Random signs cancel to m^-1.
    fitted = slope(WIDTHS, [float(run.drift.max()) for run in runs])
    assert (-0.6 <= fitted <= -0.4) if not signs else (-1.2 <= fitted <= -0.8), fitted


def test_a_violated_bound_would_show() -> None:
    """With a smoothness that is claimed too small, the first bound fails: it is not vacuous."""
    run = lazy(64, F.softplus, 0.25 / 100, signs=False, seed=0)
    measured, bound = run.bounds()["linearization"]
    assert bool((measured[1:] > bound[1:]).all())


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda c: D.flow(c.K, c.y[:3]), "full over 2 outputs of 7 samples"),
        (lambda c: D.flow(c.K, c.y * float("nan")), "y\\[0, 0\\] is nan"),
        (lambda c: D.flow(c.K, c.y, f0=c.f0[:2]), "f0 has shape"),
        (lambda c: D.flow(c.K, c.y, sample_weights=-torch.ones(7)), "sample_weights from -1"),
        (lambda c: D.flow(c.K, c.y, sample_weights=torch.ones(3)), "one number per sample"),
        (lambda c: D.flow(c.K, c.y, lr=-1), "lr=-1"),
        (lambda c: D.flow(c.K, c.y).at([-1.0]), "at least 0"),
        (lambda c: D.flow(c.K, c.y).at([float("nan")]), "at least 0"),
        (lambda c: D.flow(c.cross, c.y), "square Gram"),
        (lambda c: D.flow(c.K, c.y).time_to_fit(2), "between 0 and 1"),
        (lambda c: D.flow(c.K, c.y, f0=c.f0).at([1]).predict(c.cross), "needs f0 of the new samples"),
        (lambda c: D.flow(c.K, c.y).at([1]).predict(c.K.dense()[:, :, :2]), "new samples by training samples"),
        (lambda c: D.integrate(c.K, c.labels, [1, 0], loss=F.cross_entropy), "in order"),
        (lambda c: D.integrate(c.K, c.labels, [INF], loss=F.cross_entropy), "ridgeless"),
        (lambda c: D.integrate(c.K, c.y, [1], loss=F.mse_loss, momentum=1.0), "momentum=1.0"),
        (lambda c: D.integrate(c.K, c.y.T, [1], loss=F.mse_loss), "7 samples and y has shape"),
        (lambda c: D.integrate(torch.eye(7), c.labels, [1], loss=F.cross_entropy), "f0=torch.zeros"),
        (lambda c: D.integrate(c.K, c.labels + 9, [1], loss=F.cross_entropy), "loss\\(f, y\\) failed"),
        (lambda c: D.descend(c.K, c.y, loss=lambda f, y: f - y, lr=1, steps=1), "one number for all samples"),
        (lambda c: D.descend(c.K, c.y, loss=F.mse_loss, lr=1), "either steps= "),
        (lambda c: D.descend(c.K, c.y, loss=F.mse_loss, lr=1, steps=1, nesterov=True), "Nesterov"),
        (lambda c: D.descend(c.K, c.y, loss=F.mse_loss, lr=1, batches=[[7]]), "from 7 to 7"),
        (lambda c: D.descend(c.K, c.y, loss=F.mse_loss, lr=1, batches=[[0.5]]), "numbers of samples"),
        (lambda c: D.descend(c.K, c.y.to("meta"), loss=F.mse_loss, lr=1, steps=1), "on meta"),
        (lambda c: D.max_learning_rate(torch.zeros(3, 3)), "moves nothing"),
        (lambda c: D.learning_path(c.net, c.z, c.x[:1], torch.tensor([5]), lr=1), "from 0 to 1"),
        (lambda c: D.learning_path(c.net, c.z, c.x[:1], torch.ones(3, 2), lr=1), "target has shape"),
        (lambda c: D.one_step(c.net, c.z, c.x, c.y, loss=lambda f, y: f - y, lr=1), "one number for the batch"),
        (lambda c: D.ensemble((EYE, EYE), (EYE, EYE, EYE), torch.ones(3), t=-1), "t at least 0"),
        (lambda c: D.ensemble((0 * EYE, EYE), (EYE, EYE, EYE), torch.ones(3)), "Give reg > 0"),
        (lambda c: D.ensemble((EYE, "k"), (EYE, EYE, EYE), torch.ones(3)), "cross is a str"),
        (lambda c: D.linearization_quality(c.net, c.x, c.y, width=1, beta=1, lr=1, steps=1), "one output per sample"),
        (lambda c: D.train(c.net, c.x, c.y[:2], loss=F.mse_loss, optimizer=torch.optim.SGD, steps=1), "y has 2"),
    ],
)
def test_bad_input_is_refused(case: Case, act: Callable, message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        act(case)


def test_an_indefinite_gram_is_refused(case: Case) -> None:
    k = torch.diag(torch.tensor([1.0, 2.0, -0.5], dtype=DOUBLE))
    with pytest.raises(tg.NotPositiveDefinite, match="indefinite"):
        D.flow(k, torch.ones(3, dtype=DOUBLE))


def test_without_scipy_the_ode_says_what_to_install(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.integrate", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(tg.InputError, match="pip install 'tangency\\[dynamics\\]'"):
        D.integrate(case.K, case.y, [1], loss=F.mse_loss)


def results(case: Case) -> dict[str, object]:
    """One of each."""
    monitor = D.Monitor(tg.trace_ntk(case.net), case.x)
    options = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    history = D.train(copy.deepcopy(case.net), case.x, case.y, steps=2, **options)
    monitor(0), monitor(3)
    small = tg.models.two_layer(4, 16).double()
    flow = D.flow(case.K, case.y)
    return {
        "Flow": flow,
        "Path": flow.at([0, 1, INF]),
        "History": history,
        "Regime": monitor.regime(),
        "Decomposition": D.learning_path(case.net, case.z, case.x[:1], torch.tensor([1]), lr=0.1),
        "LazyRun": D.linearization_quality(small, case.x, case.y[:, 0], width=16, beta=1.0, lr=0.1, steps=2),
    }


def test_results_are_short_in_print_and_whole_in_json(case: Case) -> None:
    for name, result in results(case).items():
        shown = repr(result)
        assert shown.startswith(f"{name}(")
        assert len(shown) < 600
        assert "tensor(" not in shown
        kept = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert kept["result"] == name
        assert kept["environment"]["torch"] == torch.__version__


def test_results_have_tables_and_pictures(case: Case) -> None:
    made = results(case)
    assert [line.split()[0] for line in made["Regime"].table().splitlines()] == ["step", "0", "3"]
    lines = made["LazyRun"].table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(made["LazyRun"].bounds())
    bound = made["LazyRun"].bounds()["movement"]
    assert bound.measured is made["LazyRun"].moved
    assert bound == tuple(bound)
    assert f"{float(bound.limit[-1]):.6g}" in lines[2]
    pytest.importorskip("matplotlib")
    assert len(made["Regime"].plot().axes) == 3
    assert len(made["Flow"].plot([0.1, 1, 10], modes=(0, 1)).axes) == 2
