"""w_var="init" where few weights add up: torch's default is uniform, so a first layer's values are not Gaussian.

The references are finite networks with the module's own initialisation, and plain means over draws of its weights.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.errors import TangencyWarning
from tangency.infinite.layers.initial import detect_init

Fn = Callable[[Tensor], Tensor]


def inputs(d: int) -> Tensor:
    """Three samples, one of them with one coordinate alone."""
    torch.manual_seed(3)
    x = torch.randn(3, d) * 2
    x[0] = 0.0
    x[0, d // 2] = 2.5
    return x


def default(d: int, width: int, act: type[nn.Module], depth: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(d, width), act()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), act()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def jacobian_kernel(net: nn.Module, x: Tensor) -> Tensor:
    rows = []
    for sample in x:
        grads = torch.autograd.grad(net(sample[None])[0, 0], list(net.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]).double())
    j = torch.stack(rows)
    return j @ j.T


def uniform_moments(x: Tensor, act: Fn, w_bound: float, b_bound: float, draws: int = 4_000_000) -> tuple[Tensor, ...]:
    """E[φφ'] and E[φ'φ'] of uniform weights and biases, with their standard errors: a plain mean over draws."""
    torch.manual_seed(11)
    parts: list[list[Tensor]] = [[], []]
    for _ in range(20):
        w = (2 * torch.rand(draws // 20, x.shape[1], dtype=torch.float64) - 1) * w_bound
        b = (2 * torch.rand(draws // 20, 1, dtype=torch.float64) - 1) * b_bound
        u = (w @ x.double().T + b).requires_grad_()
        h = act(u)
        (g,) = torch.autograd.grad(h.sum(), u)
        parts[0].append((h.detach().T @ h.detach()) / len(w))
        parts[1].append(g.T @ g / len(w))
    found = [torch.stack(p) for p in parts]
    return found[0].mean(0), found[1].mean(0), found[0].std(0) / 20**0.5, found[1].std(0) / 20**0.5


@pytest.mark.parametrize("d", [1, 6])
@pytest.mark.parametrize("act", [nn.Tanh, nn.ReLU])
@pytest.mark.every(3)
def test_first_layer_of_few_inputs_has_its_own_law(d: int, act: type[nn.Module]) -> None:
    """Θ = m·E[φφ'] + 1 + (x·y + 1)·E[φ'φ']/3 of two layers of width m; better than half a per cent."""
    x, m = inputs(d), 512
    net = default(d, m, act)
    kernel = tg.infinite_ntk(net, w_var="init")
    value, slope, value_error, slope_error = uniform_moments(x, act(), d**-0.5, d**-0.5)
    gram = x.double() @ x.double().T + 1
    want, spread = m * value + 1 + gram * slope / 3, m * value_error + (gram * slope_error).abs() / 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, error = kernel(x), kernel.error(x)
    scale = want.diagonal().sqrt()
    assert float(((found - want) / scale / scale[:, None]).abs().max()) < 5e-3
    assert float(((found - want) / (spread.square() + error.square()).sqrt()).abs().max()) < 4
    assert float((error / scale / scale[:, None]).max()) < 3e-3
    torch.testing.assert_close(kernel.diag(x), found.diagonal(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kernel(x, x[:2]), found[:, :2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("d", [1, 6])
@pytest.mark.parametrize("act", [nn.Tanh, nn.ReLU])
@pytest.mark.every(3)
def test_finite_networks_tend_to_it(d: int, act: type[nn.Module]) -> None:
    """Three layers as torch initialises them: within three standard errors, where the Gaussian limit is not."""
    x, width, nets = inputs(d), 384, 48
    torch.manual_seed(0)
    exact = tg.infinite_ntk(default(d, width, act, 2), w_var="init")(x)
    drawn = torch.stack([jacobian_kernel(default(d, width, act, 2), x) for _ in range(nets)])
    along = (drawn * exact).sum((1, 2)) / exact.square().sum()
    assert abs(float(along.mean() - 1)) < 3 * float(along.std()) / nets**0.5
    error = drawn.std(0) / nets**0.5
    assert float(((drawn.mean(0) - exact) / error).abs().max()) < 4
    if act is nn.Tanh:  # what it was taken for
        gauss = tg.infinite_ntk(
            default(d, width, act, 2), w_var=1 / 3, b_var={"0": 1 / (3 * d), "": 1 / (3 * width)},
            parametrization="standard",
        )(x)  # fmt: skip
        assert float(((drawn.mean(0) - gauss) / error).abs().max()) > 5


def test_other_activations_positions_and_multiples() -> None:
    """A slope of each channel's own, a factor before the activation, several positions: as written out by hand."""
    x = inputs(2)
    cases: list[tuple[nn.Module, float, Fn]] = [
        (nn.PReLU(64), 1.0, lambda u: torch.where(u > 0, u, 0.25 * u)),
        (nn.Sigmoid(), 3.0, lambda u: torch.sigmoid(3 * u)),
    ]
    for act, before, fn in cases:
        net = nn.Sequential(nn.Linear(2, 64), tg.infinite.Scale(before).module(64), act, nn.Linear(64, 1))
        value, *_ = uniform_moments(x, fn, 2**-0.5, 2**-0.5, 400_000)
        torch.testing.assert_close(tg.infinite_nngp(net, w_var="init")(x), value / 3 + 1 / 192, rtol=5e-3, atol=1e-3)
    pooled = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    sequence = torch.stack([inputs(2), inputs(2).flip(0)])  # [2, 3, 2]
    flat = tg.infinite_ntk(pooled, w_var="init")(sequence.flatten(0, 1))
    torch.testing.assert_close(
        tg.infinite_ntk(pooled, w_var="init")(sequence).reshape(6, 6), flat, rtol=1e-9, atol=1e-9
    )


def test_it_is_semidefinite_and_always_the_same() -> None:
    x = torch.randn(12, 3, dtype=torch.float64)
    kernel = tg.infinite_ntk(default(3, 64, nn.ReLU), w_var="init", samples=256)
    assert float(torch.linalg.eigvalsh(kernel(x)).min()) > -1e-9
    assert torch.equal(kernel(x), tg.infinite_ntk(default(3, 64, nn.ReLU), w_var="init", samples=256)(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(2, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Added(nn.Module):
    """ReLU of the sum of two first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 64), nn.Linear(3, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(x) + self.b(x)))


def constant_bias() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    nn.init.normal_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    nn.init.constant_(net[2].bias, 0.3)
    return net


WARNED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "many inputs, one alone": (lambda: default(40, 64, nn.Tanh), lambda: torch.eye(40)[:3], r"0 \(Linear\).*-0\.6"),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1)),
        lambda: torch.randn(2, 1, 3, 3),
        r"0 \(Conv2d\).*excess kurtosis",
    ),
    "norm between": (
        lambda: nn.Sequential(nn.Linear(3, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1)),
        lambda: torch.randn(2, 3),
        r"0 \(Linear\).*excess kurtosis",
    ),
    "rnn": (Recurrent, lambda: torch.randn(2, 3, 2), r"rnn \(RNN\)"),
    "sum": (Added, lambda: torch.randn(2, 3), "excess kurtosis"),
    "a constant bias": (constant_bias, lambda: torch.randn(2, 3), r"2 \(Linear\).*not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_elsewhere_it_is_said(name: str) -> None:
    make, x, message = WARNED[name]
    torch.manual_seed(1)
    kernel = tg.infinite_ntk(make(), w_var="init", samples=64)
    with pytest.warns(TangencyWarning, match=message):
        kernel(x())
    with warnings.catch_warnings():  # once for each layer of a kernel
        warnings.simplefilter("error")
        kernel(x())


def test_nothing_is_said_where_nothing_is_off() -> None:
    """Normal weights, many inputs of like size, no activation after the first layer, and numbers given."""
    normal = default(3, 64, nn.Tanh)
    nn.init.normal_(normal[0].weight)
    nn.init.zeros_(normal[0].bias)
    cases: list[tuple[nn.Module, Tensor, dict[str, Any]]] = [
        (normal, torch.randn(2, 3), {"w_var": "init"}),
        (default(400, 64, nn.Tanh), torch.randn(2, 400), {"w_var": "init"}),
        (nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 1)), torch.randn(2, 3), {"w_var": "init"}),
        (default(3, 64, nn.Tanh), torch.randn(2, 3), {"w_var": 2.0}),
    ]
    for net, x, options in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel = tg.infinite_ntk(net, **options)
            assert float(kernel.error(x, repeats=2).max()) == 0


def test_the_law_is_told_by_the_weights() -> None:
    torch.manual_seed(0)
    draws: dict[str, tuple[Tensor, str]] = {
        "default": (nn.Linear(7, 300).weight, "uniform"),
        "siren": (torch.empty(300, 7).uniform_(-1 / 7, 1 / 7), "uniform"),
        "normal": (torch.randn(300, 7) * 0.3, "normal"),
        "named normal": (nn.init.kaiming_normal_(torch.empty(300, 7)), "normal"),
        "cauchy": (torch.empty(300, 7).cauchy_(), "other"),
        "signs": (torch.randn(300, 7).sign() * 0.3, "other"),
    }
    for name, (weight, law) in draws.items():
        assert detect_init(weight).law == law, name
