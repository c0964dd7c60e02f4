"""What holds for every infinite-width kernel: positivity, invariances, sums and products, copies, gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tangency as tg
from tangency.infinite import Infinite, Product, Serial, Sum

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU, nn.Identity]  # fmt: skip
activations = st.sampled_from(ACTIVATIONS)
seeds = st.integers(0, 10**6)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@st.composite
def dense(draw: st.DrawFn, inputs: int = 3) -> nn.Module:
    """Linear layers, activations, norms and residual blocks in any order that has a limit."""
    layers: list[nn.Module] = [nn.Linear(inputs, 6)]
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["plain", "residual", "norm"]))
        act = draw(activations)()
        if kind == "plain":
            layers += [act, nn.Linear(6, 6)]
        elif kind == "norm":
            layers += [nn.LayerNorm(6), act, nn.Linear(6, 6)]
        else:
            layers.append(Residual(nn.Sequential(act, nn.Linear(6, 6))))
    return nn.Sequential(*layers, draw(activations)(), nn.Linear(6, 1))


@st.composite
def convolutional(draw: st.DrawFn, circular: bool = False, pooled: bool | None = None) -> nn.Module:
    """Convolutions over 5 positions, pooled or flattened in the end."""
    layers: list[nn.Module] = []
    width = 2
    mode = "circular" if circular else draw(st.sampled_from(["zeros", "circular"]))
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([1, 3]))
        layers += [nn.Conv1d(width, 6, size, padding=size // 2, padding_mode=mode), draw(activations)()]
        width = 6
        if draw(st.booleans()):
            layers.append(Residual(nn.Sequential(nn.Conv1d(6, 6, 3, padding=1, padding_mode=mode))))
    if draw(st.booleans()) if pooled is None else pooled:
        return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 1))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(30, 1))


def kernel(model: Any, **options: Any) -> Infinite:
    return tg.infinite_ntk(model, **{"w_var": 1.7, "b_var": 0.1, **options})


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def psd(k: Tensor, slack: float = 1e-10) -> None:
    values = torch.linalg.eigvalsh(k)
    assert float(values[0]) >= -slack * float(values.sum()), (float(values[0]), float(values.sum()))


def close(a: Tensor, b: Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(1e-30, float(b.detach().abs().max())))


@settings(max_examples=12)
@given(model=st.one_of(dense(), convolutional()), seed=seeds, split=st.integers(1, 4))
def test_any_network_gives_a_kernel(model: nn.Module, seed: int, split: int) -> None:
    """Symmetric, positive semidefinite, equivariant under permutation, the same by blocks and for single pairs."""
    x = sample(seed, 5, 3) if isinstance(model[0], nn.Linear) else sample(seed, 5, 2, 5)  # type: ignore[index]
    k = kernel(model)
    nngp, ntk = k.both(x)
    for found in (nngp, ntk, ntk - nngp):  # layers below the last one give a kernel too
        psd((found + found.T) / 2)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    close(k(x[order]), ntk[order][:, order])
    close(k(x, x[:split]), ntk[:, :split])
    close(k(x[:split], x), ntk[:split])
    close(k.diag(x), ntk.diagonal())
    close(tg.compute(k, x, tile=split, progress=False).dense(), ntk)
    assert torch.equal(k(x.float()), k(x.float().double()))


@settings(max_examples=5)
@given(one=dense(), two=dense(), seed=seeds)
def test_sums_and_products_of_networks(one: nn.Module, two: nn.Module, seed: int) -> None:
    x = sample(seed, 4, 3)
    (k1, t1), (k2, t2) = (kernel(m).both(x) for m in (one, two))
    k, t = kernel(Serial(Sum(Serial(one), Serial(two)))).both(x)
    close(k, k1 + k2)
    close(t, t1 + t2)
    k, t = kernel(Serial(Product(Serial(one), Serial(two)))).both(x)
    close(k, k1 * k2)
    close(t, k1 * t2 + t1 * k2)


class Two(nn.Module):
    def __init__(self, one: nn.Module, two: nn.Module, how: str) -> None:
        super().__init__()
        self.one, self.two, self.how = one, two, how

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.two(x)
        if self.how == "sum":
            return a + b
        if self.how == "difference":
            return a - b
        return a * b if self.how == "product" else torch.cat([a, b], -1)


@settings(max_examples=4)
@given(one=dense(), two=dense(), seed=seeds)
def test_sums_and_products_inside_a_module(one: nn.Module, two: nn.Module, seed: int) -> None:
    x = sample(seed, 4, 3)
    (k1, t1), (k2, t2) = (kernel(m).both(x) for m in (one, two))
    wants = {
        "sum": (k1 + k2, t1 + t2),
        "difference": (k1 + k2, t1 + t2),
        "product": (k1 * k2, k1 * t2 + t1 * k2),
        "cat": ((k1 + k2) / 2, (t1 + t2) / 2),
    }
    for how, want in wants.items():
        for found, expected in zip(kernel(Two(one, two, how)).both(x), want, strict=True):
            close(found, expected)


@settings(max_examples=10)
@given(model=dense(), seed=seeds)
def test_dense_networks_see_angles_and_lengths_only(model: nn.Module, seed: int) -> None:
    x = sample(seed, 4, 3)
    q, _ = torch.linalg.qr(sample(seed + 1, 3, 3))
    close(kernel(model)(x @ q), kernel(model)(x), 1e-9)


@settings(max_examples=10)
@given(model=convolutional(circular=True, pooled=True), seed=seeds, i=st.integers(0, 4), j=st.integers(0, 4))
def test_circular_networks_with_pooling_do_not_see_shifts(model: nn.Module, seed: int, i: int, j: int) -> None:
    x = sample(seed, 3, 2, 5)
    close(kernel(model)(x.roll(i, -1), x.roll(j, -1)), kernel(model)(x, x + 0), 1e-9)


@settings(max_examples=10)
@given(seed=seeds, a=st.floats(0.01, 100), b=st.floats(0.01, 100), conv=st.booleans())
def test_relu_networks_are_homogeneous(seed: int, a: float, b: float, conv: bool) -> None:
    if conv:
        layers = [nn.Conv1d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 6, 3), nn.LeakyReLU(0.2), nn.Flatten()]
        model, x = nn.Sequential(*layers, nn.Linear(18, 1)), sample(seed, 4, 2, 5)
    else:
        model, x = (
            nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1)),
            sample(seed, 4, 3),
        )
    k = kernel(model, b_var=0.0)
    close(k(a * x, b * x.flip(0)), a * b * k(x, x.flip(0)), 1e-7)  # 1e-8 where ax and by are parallel, of two lengths


def dense_net(act: Callable[[], nn.Module] = nn.ReLU, depth: int = 3) -> nn.Module:
    hidden = [layer for _ in range(depth - 1) for layer in (act(), nn.Linear(6, 6))]
    return nn.Sequential(nn.Linear(6, 6), *hidden, act(), nn.Linear(6, 1))


def flat_net(act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    layers = [nn.Conv1d(2, 6, 3, padding=1), act(), nn.Conv1d(6, 6, 2), act(), nn.Flatten(), nn.Linear(12, 1)]
    return nn.Sequential(nn.Unflatten(1, (2, 3)), *layers)


def pooled_net(act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    layers = [nn.Conv1d(2, 6, 3, padding=1), act(), nn.Conv1d(6, 6, 3, padding=1), act(), nn.AdaptiveAvgPool1d(1)]
    return nn.Sequential(nn.Unflatten(1, (2, 3)), *layers, nn.Flatten(), nn.Linear(6, 1))


NETS = {"dense": dense_net, "flat": flat_net, "pooled": pooled_net}


@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU, nn.GELU, nn.Tanh, nn.ELU])
@pytest.mark.parametrize("b_var", [0.0, 0.1])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.every(7)
def test_copies_and_near_copies_stay_positive(net: str, b_var: float, act: Callable[[], nn.Module]) -> None:
    """x, x, x + 1e-8, x + 1e-12, −x, and clusters of five."""
    x = sample(1, 4, 6)
    x[1] *= 30
    x[2] *= 1e-3
    direction = sample(2, 6)
    near = [x[:1] + e * direction for e in (1e-6, 1e-8, 1e-10, 1e-12, 1e-15)]
    cluster = x[3:].repeat(5, 1)
    every = torch.cat(
        [x, x, *near, -x, -x[:1] - 1e-9 * direction, 1.0000001 * x, cluster, cluster + 1e-9 * sample(3, 5, 6)]
    )
    model = NETS[net](act)
    k = kernel(model, b_var=b_var)
    nngp, ntk = k.both(every)
    for found, name in ((nngp, "nngp"), (ntk, "ntk")):
        values = torch.linalg.eigvalsh((found + found.T) / 2)
        close(found, found.T, 1e-15)
        assert float(values[0]) >= -1e-10 * float(values.sum()), (name, float(values[0] / values.sum()))
    own = k.diag(every)
    close(ntk.diagonal(), own, 1e-14)
    close(own[:4], own[4:8], 1e-15)
    close(ntk[:4, 4:8].diagonal(), own[:4], 1e-7 if act is nn.ReLU or act is nn.LeakyReLU else 1e-9)


@pytest.mark.parametrize("net", NETS)
def test_multiples_stay_positive(net: str) -> None:
    """x, 2x, 3x, … and −x: parallel, of other lengths; their angle is good to 1e-8 (docs/limitations.md)."""
    x = sample(0, 6, 6)
    every = torch.cat([a * x for a in (1, 2, 3, 5, 7, 0.1, -1, -4.0)])
    for b_var in (0.0, 0.1):
        k = kernel(NETS[net](), b_var=b_var)
        for found in k.both(every):
            psd(found, 1e-9)
        if b_var == 0:
            close(k(every)[:6, 6:12].diagonal(), 2 * k.diag(x), 1e-7)


@pytest.mark.parametrize("act", [nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Softplus])
@pytest.mark.every(3)
def test_large_inputs_are_exact_or_refused(act: Callable[[], nn.Module]) -> None:
    """Pixels that nobody normalised: variances of hundreds, for activations without a closed form."""
    fn = act()
    t = torch.linspace(-10, 10, 200001, dtype=torch.float64)
    w = torch.exp(-t * t / 2) / torch.exp(-t * t / 2).sum()
    k = kernel(nn.Sequential(nn.Linear(6, 6), act(), nn.Linear(6, 1)))
    for size in (1.0, 4.0, 16.0, 64.0):
        x = torch.full((1, 6), size, dtype=torch.float64)
        p = 1.7 * size**2 + 0.1
        u = (math.sqrt(p) * t).requires_grad_()
        value = fn(u)
        (slope,) = torch.autograd.grad(value.sum(), u)
        want = (1.7 * (w * value.detach() ** 2).sum() + 0.1 + 1.7 * (w * slope**2).sum() * p).reshape(1)
        close(k.diag(x), want, 1e-8)
        close(k(x).diagonal(), want, 1e-8)
        close(k(x, x.clone()).diagonal(), want, 1e-6)


def test_diagonals_are_exact() -> None:
    """ReLU with w_var 2 keeps the second moment: K(x, x) = 2|x|²/d at any depth, Θ(x, x) = (depth + 1) K."""
    x = torch.cat([sample(0, 5, 6), 1e6 * sample(1, 1, 6), 1e-6 * sample(2, 1, 6)])
    for depth in (1, 5, 20):
        k = tg.infinite_ntk(dense_net(depth=depth), w_var=2.0)
        want = 2 * x.square().mean(1)
        nngp, ntk = k.both(x)
        close(nngp.diagonal(), want, 1e-14)
        close(ntk.diagonal(), (depth + 1) * want, 1e-13)
        assert torch.allclose(nngp.diagonal() / want, torch.ones(7, dtype=torch.float64), rtol=1e-13)


def test_a_copy_far_from_the_diagonal_is_exact() -> None:
    """k(x, x copied) is the diagonal, whichever way it is asked."""
    x = sample(0, 40, 6)
    k = tg.infinite_ntk(dense_net(depth=6))
    for found in (k(x, x.clone()), k(torch.cat([x, x]))[:40, 40:]):
        close(found.diagonal(), k.diag(x), 1e-12)
    assert torch.equal(k(x), k(x).T)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.ELU])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.every(4, 1)
def test_zeros_are_finite(net: str, act: Callable[[], nn.Module]) -> None:
    x = sample(0, 5, 6)
    x[0] = 0
    x[1, :3] = 0
    x[2, [0, 3]] = 0
    x[4] = 0
    for b_var in (0.0, 0.1):
        k = kernel(NETS[net](act), b_var=b_var)
        for found in k.both(x):
            assert bool(found.isfinite().all())
            psd((found + found.T) / 2)
        close(k.diag(x), k(x).diagonal(), 1e-12)
        if b_var == 0 and act is nn.ReLU:
            assert float(k(x)[0].abs().max()) == 0


GRADIENTS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: dense_net(depth=2),
    "tanh": lambda: dense_net(nn.Tanh, 2),
    "gelu": lambda: dense_net(nn.GELU, 2),
    "elu": lambda: dense_net(nn.ELU, 1),
    "flat": flat_net,
    "pooled": pooled_net,
    "norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 1)),
    "residual": lambda: nn.Sequential(
        nn.Linear(6, 6), Residual(nn.Sequential(nn.ReLU(), nn.Linear(6, 6))), nn.Linear(6, 1)
    ),
}


def slopes_agree(fn: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Autograd against central differences, both along random directions: no entry can be wrong alone."""
    for seed in range(3):
        along = [sample(10 + seed, *v.shape) for v in inputs]
        found = fn(*inputs)
        weight = sample(20 + seed, *found.shape)
        grads = torch.autograd.grad((found * weight).sum(), inputs)
        ahead, behind = (fn(*(v.detach() + h * u for v, u in zip(inputs, along, strict=True))) for h in (1e-4, -1e-4))
        want = ((ahead - behind) * weight).sum() / 2e-4
        got = sum((g * u).sum() for g, u in zip(grads, along, strict=True))
        size = sum(float((g * u).norm()) for g, u in zip(grads, along, strict=True))
        assert abs(float(got) - float(want)) < 1e-5 * size, (float(got), float(want))


@pytest.mark.parametrize("net", GRADIENTS)
@pytest.mark.every(2)
def test_gradients(net: str) -> None:
    k = kernel(GRADIENTS[net]())
    x, y = sample(0, 2, 6).requires_grad_(), sample(1, 2, 6).requires_grad_()
    slopes_agree(k, x, y)
    slopes_agree(k, x)
    slopes_agree(k.diag, x)
    slopes_agree(lambda v: k.both(v, y)[0], x)


@pytest.mark.parametrize("net", GRADIENTS)
@pytest.mark.every(3, 1)
def test_gradients_at_copies_and_zeros(net: str) -> None:
    """No NaN; at a copy the NNGP's gradient is half of its diagonal's."""
    k = kernel(GRADIENTS[net]())
    x = sample(0, 3, 6)
    for inputs in (torch.cat([x, x]), torch.cat([x, -x]), torch.cat([x, x + 1e-9]), torch.cat([x, 0 * x])):
        v = inputs.clone().requires_grad_()
        for found in (*k.both(v), k.diag(v)):
            (g,) = torch.autograd.grad(found.sum(), v, retain_graph=True)
            assert bool(g.isfinite().all())
    v, w = x.clone().requires_grad_(), x.clone().requires_grad_()
    (half,) = torch.autograd.grad(k.both(v, x)[0].diagonal().sum(), v)
    (whole,) = torch.autograd.grad(tg.infinite_nngp(k.layer, w_var=1.7, b_var=0.1).diag(w).sum(), w)
    close(half, whole / 2, 1e-5)


@settings(max_examples=8)
@given(model=convolutional(), seed=seeds, room=st.sampled_from([1, 64, 2000, 10**6]))
def test_blocks_do_not_change_results(model: nn.Module, seed: int, room: int) -> None:
    k = kernel(model)
    x, y = sample(seed, 7, 2, 5), sample(seed + 1, 3, 2, 5)
    a, b = k.prepare(k.ready(x)), k.prepare(k.ready(y))
    close(k.pair(a, b, workspace=room), k(x, y), 1e-12)
    close(k.pair(a, a, workspace=room), k(x), 1e-12)


@settings(max_examples=8)
@given(seed=seeds, w_var=st.floats(0.1, 4), b_var=st.floats(0, 2), depth=st.integers(1, 30))
def test_deep_relu_networks_stay_finite_and_ordered(seed: int, w_var: float, b_var: float, depth: int) -> None:
    x = sample(seed, 4, 6)
    nngp, ntk = tg.infinite_ntk(dense_net(depth=depth), w_var=w_var, b_var=b_var).both(x)
    assert bool(ntk.isfinite().all())
    assert bool((ntk.diagonal() >= nngp.diagonal()).all())
    bound = (nngp.diagonal()[:, None] * nngp.diagonal()).sqrt()
    assert bool((nngp.abs() <= bound * (1 + 1e-12)).all())


def test_angles_contract_as_known() -> None:
    """One ReLU layer: K = (sin θ + (π − θ)cos θ)/π and Θ = K + (π − θ)/π·cos θ on the unit sphere."""
    theta = torch.linspace(0, math.pi, 9, dtype=torch.float64)
    x = torch.stack([theta.cos(), theta.sin()], 1) * 2**0.5
    net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))
    nngp, ntk = tg.infinite_ntk(net, w_var={"0": 1.0, "2": 2.0}).both(x[:1], x)
    want = (theta.sin() + (math.pi - theta) * theta.cos()) / math.pi
    torch.testing.assert_close(nngp[0], want, rtol=0, atol=3e-15)
    torch.testing.assert_close(ntk[0], want + (math.pi - theta) / math.pi * theta.cos(), rtol=0, atol=3e-15)
