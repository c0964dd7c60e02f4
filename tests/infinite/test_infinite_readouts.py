"""Sums over channels (DeepONet, two towers), maxima of two branches, ensembles, interpolation by torch's own rule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ask import Ask
from torch import Tensor, nn

import tangency as tg
from tangency.errors import UnsupportedModule
from tangency.infinite.finite import Scaled, scales

torch.manual_seed(0)
X = torch.randn(3, 4, dtype=torch.float64)


def branch(width: int, end: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width)]
    return nn.Sequential(*layers, *([nn.ReLU()] if end else []))


def operator(width: int, end: bool = True, einsum: bool = False) -> Ask:
    """DeepONet: an inner product of two networks, of which one may end in an activation."""

    def forward(m: Any, x: Tensor) -> Tensor:
        b, t = m.b(x[:, :2]), m.t(x[:, 2:])
        return torch.einsum("bc,bc->b", b, t) if einsum else (b * t).sum(-1, keepdim=True)

    return Ask(forward, b=branch(width, end=False), t=branch(width, end=end))


def summed(width: int) -> Ask:
    return Ask(lambda m, x: m.b(x).sum(1), b=nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width)))


def maximum(width: int) -> Ask:
    layers = {"a": nn.Linear(4, width), "b": nn.Linear(4, width), "o": nn.Linear(width, 8)}
    return Ask(lambda m, x: m.o(torch.maximum(m.a(x), torch.tanh(m.b(x)))), **layers)


def ensemble(width: int) -> Ask:
    members = nn.ModuleList(nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 8)) for _ in range(3))
    return Ask(lambda m, x: torch.stack([e(x) for e in m.e]).mean(0), e=members)


def highway(width: int) -> Ask:
    """Both terms are functions of the same gate; the second is one of the input of both layers too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.i(x)
        t = torch.sigmoid(m.t(h))
        return m.o(torch.tanh(t * torch.relu(m.h(h)) + (1 - t) * h))

    layers = {"i": nn.Linear(4, width), "t": nn.Linear(width, width), "h": nn.Linear(width, width)}
    return Ask(forward, o=nn.Linear(width, 8), **layers)


def added_twice(width: int) -> Ask:
    """One value by itself, through an activation, and through a layer."""
    layers = {"a": nn.Linear(4, width), "b": nn.Linear(width, width), "o": nn.Linear(width, 8)}
    return Ask(lambda m, x: (lambda h: m.o(h + (torch.relu(h) + m.b(h))))(m.a(x)), **layers)


CASES: dict[str, Callable[[int], nn.Module]] = {
    "inner product": operator,
    "of Gaussians": lambda w: operator(w, end=False),
    "sum": summed,
    "maximum": maximum,
    "ensemble": ensemble,
    "highway": highway,
    "added twice": added_twice,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_mean_over_networks(name: str) -> None:
    """NNGP and NTK of 100 finite networks, whose one output is drawn anew with each."""
    module, nets, numbers = CASES[name](192).double(), 100, {"w_var": 1.5, "b_var": 0.1}
    exact = tg.infinite_ntk(module, **numbers).both(X)
    kernel, found = Scaled.of(module, X, scales(module, **numbers)), []
    for seed in range(nets):
        tg.infinite.draw(module, seed=seed, **numbers)
        now = kernel.prepare(X)
        found.append(torch.stack([tg.infinite.empirical_nngp(module, X), kernel.between(now, now)]))
    drawn = torch.stack(found)
    z = (drawn.mean(0) - torch.stack(exact)) / (drawn.std(0) / nets**0.5)
    assert float(z.abs().max()) < 4, f"{name}: {z}"
    assert float((drawn.std(0)[1] / nets**0.5).max() / exact.ntk.max()) < 0.05  # enough networks to tell


def test_spellings_and_widths_of_inner_products() -> None:
    """A plain sum grows with the width; einsum and sum are the same."""
    k = tg.infinite_ntk(operator(32))
    assert torch.equal(k(X), tg.infinite_ntk(operator(32, einsum=True))(X))
    torch.testing.assert_close(2 * k(X), tg.infinite_ntk(operator(64))(X))


def test_maxima_of_one_field_are_an_activation() -> None:
    layers = {"a": nn.Linear(4, 32), "o": nn.Linear(32, 1)}
    both = Ask(lambda m, x: m.o(torch.maximum(*(lambda h: (h, 0.1 * h))(m.a(x)))), **layers)
    leaky = Ask(lambda m, x: m.o(F.leaky_relu(m.a(x), 0.1)), **layers)
    torch.testing.assert_close(tg.infinite_ntk(both)(X), tg.infinite_ntk(leaky)(X), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 1.5, "mode": "linear"}, {"size": 7, "mode": "linear", "align_corners": True},
        {"scale_factor": 1.7, "mode": "nearest"},
        {"scale_factor": 1.5, "mode": "linear", "recompute_scale_factor": True},
    ],
)  # fmt: skip
def test_interpolation_is_torch_s(options: dict[str, Any]) -> None:
    """Of a linear network, whose positions mix by known numbers: those that torch has for the inputs themselves."""
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    net = Ask(lambda m, v: F.interpolate(m.c(v), **options).mean(-1), c=nn.Conv1d(3, 16, 1, bias=False))
    after = F.interpolate(x, **options).mean(-1)
    torch.testing.assert_close(tg.infinite_nngp(net, w_var=1.0)(x), after @ after.T / 3)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolation_of_images(mode: str) -> None:
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    options: dict[str, Any] = {"size": (4, 7), "mode": mode, "antialias": True}
    weights = torch.randn(4, 7, dtype=torch.float64)
    net = Ask(lambda m, v: (F.interpolate(m.c(v), **options) * weights).mean((2, 3)), c=nn.Conv2d(3, 16, 1, bias=False))
    after = (F.interpolate(x, **options) * weights).mean((2, 3))
    torch.testing.assert_close(tg.infinite_nngp(net, w_var=1.0)(x), after @ after.T / 3)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "sum of activations": (lambda m, x: F.relu(m.a(x)).sum(1), "takes the sum over the channels.*use a Linear layer"),
    "inner product of activations": (
        lambda m, x: torch.einsum("bc,bc->b", F.relu(m.a(x)), F.relu(m.b(x))), "neither of which follows weights",
    ),
    "inner product with itself": (lambda m, x: torch.einsum("bc,bc->b", h := m.a(x), h), "share their last weights"),
    "maximum with a known value": (lambda m, x: m.o(torch.maximum(m.a(x), x[:, :1])), "torch.clamp"),
    "maximum of a norm": (
        lambda m, x: m.o(torch.maximum(m.b(x), F.layer_norm(F.relu(m.a(x)), (16,)))), "joint law is not known",
    ),
    "interpolation by areas": (lambda m, x: F.interpolate(m.a(x)[:, :, None], size=2, mode="area")[:, :, 0], "'area'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    forward, message = REFUSED[name]
    net = Ask(forward, a=nn.Linear(4, 16), b=nn.Linear(4, 16), o=nn.Linear(16, 1))
    with pytest.raises(UnsupportedModule, match=message):
        tg.infinite_ntk(net)(X)
