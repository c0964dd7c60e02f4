"""Gaussian duals against integrals done another way, at their ends (ρ = ±1, zero variance) and through autograd."""

import functools
import itertools
import json
import math
import pickle
from collections.abc import Callable
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr
from torch import Tensor, nn

from tangency.errors import InputError
from tangency.infinite.activations.duals import (
    ABRelu,
    Abs,
    Cos,
    Dual,
    Erf,
    Exp,
    Gabor,
    Gaussian,
    Gelu,
    Hermite,
    Identity,
    LeakyRelu,
    Monomial,
    Polynomial,
    Rbf,
    RectifiedMonomial,
    Relu,
    SigmoidLike,
    Sign,
    Sin,
    Step,
)
from tangency.infinite.activations.kink_table import polar
from tangency.infinite.activations.piecewise import PiecewiseLinear
from tangency.infinite.activations.quadrature import HermiteExpansion, Quadrature, find_kinks
from tangency.infinite.activations.recognize import recognize
from tangency.infinite.activations.rules import derivative

ARCS: list[Dual] = [Relu(), ABRelu(-0.3, 1.7), LeakyRelu(0.2), Abs(), Sign(), Step()]
CLOSED: list[Dual] = [
    *ARCS,
    Identity(),
    Erf(1.3, 0.7, 0.2),
    SigmoidLike(),
    Gelu(),
    Sin(1.2, 0.8, 0.3),
    Cos(1.2, 0.8, 0.3),
    Rbf(0.7),
    Exp(1.1, 0.5),
    Gaussian(1.2, -0.6),
    Gabor(),
    Polynomial((1.0, -0.5, 0.3, 0.2)),
    Monomial(4),
    Hermite(3),
    *(RectifiedMonomial(k) for k in range(4)),
    PiecewiseLinear((0.0,), (-0.5, 1.0), 0.3),
]
HARD = PiecewiseLinear((-1.0, 0.5), (0.2, 1.0, 0.0), -1.0)
SMOOTH = Quadrature(torch.tanh)
EVERY: list[Dual] = [*CLOSED, HARD, SMOOTH, Quadrature(F.softplus, kinks=())]
JUMPS: list[Dual] = [Sign(), Step(), RectifiedMonomial(0)]
RHOS = [-1.0, -0.9, 0.0, 0.5, 0.999999, 1.0]
VARIANCES = [(1.0, 1.0), (0.3, 2.5), (2.0, 0.7)]


def tensor(x: object) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def integral(fn: Callable[[Tensor], Tensor], rho: float, p: float, q: float) -> float:
    """E[fn(u)fn(v)] for fn smooth but at 0: sectors between the lines u = 0 and v = 0, times radii."""
    x, w = np.polynomial.legendre.leggauss(40)
    theta = math.acos(rho)
    breaks = sorted([-math.pi, -math.pi / 2, math.pi / 2, math.pi, theta - math.pi / 2])
    breaks = sorted([*breaks, (theta + math.pi / 2 + math.pi) % (2 * math.pi) - math.pi])
    pairs = list(itertools.pairwise(breaks))
    t = np.concatenate([(b - a) / 2 * x + (a + b) / 2 for a, b in pairs])[:, None]
    wt = np.concatenate([(b - a) / 2 * w for a, b in pairs])[:, None]
    ends = [(0.0, 1.0), (1.0, 3.0), (3.0, 11.0)]
    r = np.concatenate([(b - a) / 2 * x + (a + b) / 2 for a, b in ends])
    wr = np.concatenate([(b - a) / 2 * w for a, b in ends]) * r * np.exp(-r * r / 2)
    u, v = tensor(math.sqrt(p) * np.cos(t) * r), tensor(math.sqrt(q) * np.cos(t - theta) * r)
    return float((fn(u) * fn(v) * tensor(wt * wr)).sum()) / (2 * math.pi)


@pytest.mark.parametrize("dual", [*CLOSED, SMOOTH], ids=repr)
@pytest.mark.every(3)
def test_moments_are_the_integrals(dual: Dual) -> None:
    slope = functools.partial(derivative, dual)
    for p, q in VARIANCES:
        got = dual.both(tensor(RHOS)[:, None] * math.sqrt(p * q), tensor([[p]]), tensor([[q]]))
        for fn, found, tolerance in ((dual, got[0], 3e-8 if dual in JUMPS else 1e-9), (slope, got[1], 3e-8)):
            assert found is not None
            wanted = tensor([integral(fn, rho, p, q) for rho in RHOS])[:, None]
            # c = ρ√(pq) is rounded, so at ρ = ±1 the angle is right to 1e-8 only, and with it what jumps
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(dual.own(tensor(p))[0], tensor(integral(dual, 1.0, p, p)), rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(dual.own(tensor(p))[1], tensor(integral(slope, 1.0, p, p)), rtol=1e-10, atol=1e-11)
        x, w = np.polynomial.legendre.leggauss(200)
        half = [(tensor(11 * s * (x + 1) / 2), tensor(11 * w / 2 * np.exp(-(121 * (x + 1) ** 2) / 8))) for s in (-1, 1)]
        mean = sum((dual(math.sqrt(p) * z) * weight).sum() for z, weight in half) / math.sqrt(2 * math.pi)
        torch.testing.assert_close(dual.mean(tensor(p)), torch.as_tensor(mean), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("rho", [-0.99, -0.4, 0.3, 0.9, 0.9999])
@pytest.mark.every(2)
def test_piecewise_linear_by_conditioning(rho: float) -> None:
    """E[φ(u)g(u)], g(u) = E[φ(v)|u] in closed form, by adaptive integration over u; the same for φ'."""
    kinks, slopes = HARD.kinks, HARD.slopes
    changes = np.diff(slopes)
    for p, q in [(1.0, 1.0), (0.3, 2.5), (0.8, 0.81)]:
        sd = math.sqrt(q * (1 - rho**2))

        def inner(z: float, sd: float = sd, q: float = q) -> tuple[float, float]:
            m = math.sqrt(q) * rho * z
            h = [(m - t) / sd for t in kinks]
            value, pairs = HARD.start + slopes[0] * (m - kinks[0]), list(zip(changes, h, strict=True))
            value += sum(k * sd * (math.exp(-x * x / 2) / math.sqrt(2 * math.pi) + x * ndtr(x)) for k, x in pairs)
            return value, slopes[0] + sum(k * ndtr(x) for k, x in pairs)

        near = [t / (math.sqrt(q) * rho) for t in kinks]
        points = sorted([t / math.sqrt(p) for t in kinks] + [x + d * sd for x in near for d in (-6, -2, 0, 2, 6)])
        points = [x for x in points if abs(x) < 9]
        found = HARD.both(tensor([rho * math.sqrt(p * q)]), tensor([p]), tensor([q]))
        for order, fn in enumerate((HARD, functools.partial(derivative, HARD))):

            def outer(z: float, order: int = order, fn: Callable[[Tensor], Tensor] = fn, p: float = p) -> float:
                left = float(fn(tensor([math.sqrt(p) * z])))
                return left * inner(z)[order] * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

            parts = zip([-9.0, *points], [*points, 9.0], strict=True)
            x, w = np.polynomial.legendre.leggauss(16)
            wanted = sum((b - a) / 2 * outer((b - a) / 2 * y + (a + b) / 2) * v for a, b in parts for y, v in zip(x, w))  # noqa: B905
            assert float(found[order]) == pytest.approx(wanted, abs=2e-8), (p, q, order)  # type: ignore[arg-type]


@pytest.mark.parametrize("dual", ARCS, ids=repr)
def test_duplicates_are_exactly_their_own(dual: Dual) -> None:
    torch.manual_seed(0)
    p = torch.rand(2000, dtype=torch.float64) * 10.0 ** torch.randint(-8, 8, (2000,))
    p[0] = 0.0
    for got, own in zip(dual.both(p, p, p), dual.own(p), strict=True):
        assert got is not None
        assert own is not None
        assert torch.equal(got, own)


@pytest.mark.parametrize("dual", EVERY, ids=repr)
def test_zero_variance_and_rounding(dual: Dual) -> None:
    p = tensor([[0.0], [1.0], [0.5]]).requires_grad_()
    q = tensor([[0.0, 1.0, 2.0, 0.5]]).requires_grad_()
    c = (tensor([[-1.0], [1.0 + 1e-15], [1.0]]) * (p * q).detach().sqrt()).requires_grad_()
    value, slope = dual.both(c, p, q)
    assert slope is not None
    still = dual(tensor([0.0]))[0]
    torch.testing.assert_close(value[0], still * dual.mean(q[0]), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(value[:, 0], still * dual.mean(p[:, 0]), rtol=1e-9, atol=1e-10)
    assert slope.isfinite().all()
    grads = torch.autograd.grad((value + slope).sum(), (c, p, q), allow_unused=True)
    assert all(each is None or each.isfinite().all() for each in grads)
    for each in dual.own(p):
        assert each is not None
        assert not each.requires_grad or torch.autograd.grad(each.sum(), p, retain_graph=True)[0].isfinite().all()


@pytest.mark.parametrize("dual", EVERY, ids=repr)
@pytest.mark.every(4)
def test_gradients(dual: Dual) -> None:
    inputs = (tensor([[0.3, -0.4]]), tensor([[1.1]]), tensor([[0.9, 0.6]]))
    inputs = tuple(each.requires_grad_() for each in inputs)
    assert torch.autograd.gradcheck(lambda *x: tuple(y for y in dual.both(*x) if y.requires_grad), inputs)
    value, slope = dual.both(*inputs)
    assert slope is not None
    if dual not in JUMPS:  # their derivative is a density, not φ'φ'
        by_c = torch.autograd.grad(value.sum(), inputs[0])[0]
        torch.testing.assert_close(by_c, slope, rtol=1e-8, atol=1e-9)
    c = tensor([0.7]).requires_grad_()  # at ρ = 1 too
    if isinstance(dual, Relu | Abs | Gelu | Erf | PiecewiseLinear):
        by_c = torch.autograd.grad(dual.both(c, tensor([0.7]), tensor([0.7]))[0].sum(), c)[0]
        torch.testing.assert_close(by_c, dual.own(tensor([0.7]))[1])


def test_second_derivatives_of_the_arc() -> None:
    inputs = tuple(tensor(x).requires_grad_() for x in ([[0.3, -0.4]], [[1.1]], [[0.9, 0.6]]))
    assert torch.autograd.gradgradcheck(lambda *x: Relu().both(*x), inputs)


def test_gradient_of_the_arc_near_one() -> None:
    """By formula: through sqrt and atan2 the terms of 1e8 would cancel to nothing."""
    c = tensor([1 - 1e-13]).requires_grad_()
    p = tensor([1.0]).requires_grad_()
    value, slope = Relu().both(c, p, tensor([1.0]))
    by_c, by_p = torch.autograd.grad(value.sum(), (c, p))
    assert slope is not None
    torch.testing.assert_close(by_c, slope.detach(), rtol=1e-15, atol=0.0)
    torch.testing.assert_close(by_p, (1 - c * c).sqrt().detach() / (4 * math.pi), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("dual", EVERY, ids=repr)
def test_monte_carlo_with_the_module(dual: Dual) -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(2, 100_000, dtype=torch.float64, generator=generator)
    p, q, rho = 0.8, 1.3, 0.6
    u, v = math.sqrt(p) * z[0], math.sqrt(q) * (rho * z[0] + math.sqrt(1 - rho**2) * z[1])
    module = dual.module()
    x = torch.stack([u, v]).requires_grad_()
    y = module(x)
    samples = [y[0] * y[1]]
    if y.requires_grad:
        slopes = torch.autograd.grad(y.sum(), x)[0]
        samples.append(slopes[0] * slopes[1])
    samples = [each.detach() for each in samples]
    for sample, wanted in zip(samples, dual.both(tensor(rho * math.sqrt(p * q)), tensor(p), tensor(q)), strict=False):
        error = float(sample.std()) / math.sqrt(sample.numel())
        assert abs(float(sample.mean()) - float(wanted)) <= 4 * error + 1e-12  # type: ignore[arg-type]  # 4: 52 draws
    assert (
        abs(float(y[0].detach().mean()) - float(dual.mean(tensor(p)))) <= 4 * float(y[0].detach().std()) / 300 + 1e-12
    )
    assert recognize(module) is None or repr(recognize(module)) == repr(dual) or isinstance(dual, Quadrature)


@pytest.mark.parametrize("dual", EVERY, ids=repr)
def test_normalizer_spec_and_pickle(dual: Dual) -> None:
    assert float(dual.own(tensor(1.0))[0]) * dual.normalizer() == pytest.approx(1.0, rel=1e-14)
    assert json.loads(json.dumps(dual.spec()))["name"]
    again = pickle.loads(pickle.dumps(dual))
    assert again == dual
    assert hash(again) == hash(dual)
    value, slope = dual.both(torch.eye(2), torch.ones(2, 1), torch.ones(1, 2))
    assert value.dtype == torch.float32
    assert slope is not None
    assert slope.dtype == torch.float32
    if dual != RectifiedMonomial(1):  # it is, but its class is not
        assert dual.homogeneous == bool(torch.equal(dual(tensor([4.0, -4.0])), 4 * dual(tensor([1.0, -1.0]))))


def exact_gap(g: Decimal, p: Decimal, q: Decimal, a: Decimal, f: Decimal) -> tuple[Decimal, Decimal, Decimal]:
    """In 60 digits: θ from its versine by the series of asin, and the sine from the square root."""
    scale = (p * q).sqrt()
    versine = (g - (p.sqrt() - q.sqrt()) ** 2 / 2) / scale
    x = (versine / 2).sqrt()
    theta, term = Decimal(0), x
    for k in range(200):
        theta += term / (2 * k + 1)
        term *= x * x * (2 * k + 1) / (2 * k + 2)
    theta *= 2
    sine = (1 - (1 - versine) ** 2).sqrt()
    value = scale * (f * sine + (a - f * theta) * (1 - versine))
    return a * (p + q) / 2 - value, value, a - f * theta


@pytest.mark.parametrize("dual", [Relu(), LeakyRelu(0.2), Abs()], ids=repr)
@pytest.mark.parametrize("size", ["1e-24", "1e-16", "1e-9", "1e-4", "0.1", "0.7"])
def test_gap_without_cancellation(dual: Relu | LeakyRelu | Abs, size: str) -> None:
    getcontext().prec = 60
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
    negative, positive = (Decimal(each) for each in dual.sides)
    a, f = (negative**2 + positive**2) / 2, (positive - negative) ** 2 / (2 * pi)
    for p, q in [(Decimal("1.25"), Decimal("1.25")), (Decimal("0.75"), Decimal("0.75") * (1 + Decimal(2) ** -30))]:
        g = Decimal(float(Decimal(size) * p + (p.sqrt() - q.sqrt()) ** 2 / 2))
        wanted = exact_gap(g, p, q, a, f)
        got = dual.gap(*(tensor([float(x)]) for x in (g, p, q)))
        relative = [1e-13 if p == q else 1e-6, 1e-14, 1e-8 if p != q else 1e-14]
        if p != q and size in ("1e-24", "1e-16"):
            relative[0] = relative[2] = 1.0 if size == "1e-24" else 0.1  # g itself holds fewer digits than √p − √q has
        for x, y, close in zip(got, wanted, relative, strict=True):
            assert float(x) == pytest.approx(float(y), rel=close)


def test_gap_of_others() -> None:
    g, p, q = tensor([1e-25]), tensor([1.0]), tensor([1.0])
    assert [float(x) for x in Identity().gap(g, p, q)] == [1e-25, 1.0, 1.0]
    assert float(Rbf(0.5).gap(g, p, q)[0]) == pytest.approx(1e-25)
    assert Gelu().gap(g, p, q) is None
    new, value, slope = Relu().gap(tensor([0.5]), tensor([0.0]), tensor([1.0]))
    assert [float(new), float(value)] == [0.25, 0.0]
    assert float(slope) == pytest.approx(0.25)
    inputs = tuple(tensor([x]).requires_grad_() for x in (0.0, 1.0, 1.0))
    assert all(x.isfinite().all() for x in torch.autograd.grad(sum(Relu().gap(*inputs)).sum(), inputs))  # type: ignore[arg-type, union-attr]


@given(st.integers(0, 10**6), st.sampled_from(EVERY))
def test_positive_semidefinite(seed: int, dual: Dual) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator) * torch.rand(6, 1, generator=generator)
    x[1], x[2] = x[0] * 2, 0.0
    k = x @ x.T
    p = k.diagonal()
    for got, own in zip(dual.both(k, p[:, None], p[None, :]), dual.own(p), strict=True):
        assert got is not None
        assert own is not None
        torch.testing.assert_close(got, got.T)
        torch.testing.assert_close(got.diagonal(), own, rtol=1e-7, atol=1e-8)
        values = torch.linalg.eigvalsh(got)
        assert values[0] >= -1e-7 * max(float(values[-1]), 1.0)


# Quadrature.


def measured(dual: Quadrature, fine: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]) -> float:
    """The largest error over pairs that the statement did not see, relative as it is stated."""
    p, q = tensor([0.013, 0.4, 1.7, 3.9])[:, None], tensor([0.05, 1.1, 2.9])[None, :]
    c = tensor([-0.95, -0.2, 0.55, 0.97, 0.9995])[:, None, None] * (p * q).sqrt()
    worst = 0.0
    for got, wanted, a, b in zip(dual.both(c, p, q), fine(c, p, q), dual.own(p), dual.own(q), strict=True):
        assert got is not None
        assert wanted is not None
        assert a is not None
        assert b is not None
        worst = max(worst, float(((got - wanted).abs() / (a * b).sqrt()).max()))
    return worst


@pytest.mark.parametrize("closed", [Gelu(), Sin(), Erf(), Gabor(), Monomial(3), RectifiedMonomial(4)], ids=repr)
@pytest.mark.every(2)
def test_stated_error_of_an_expansion(closed: Dual) -> None:
    dual = Quadrature(closed)
    assert dual.method == "expansion"
    assert measured(dual, closed.both) <= 3 * dual.error()
    if not isinstance(closed, RectifiedMonomial):  # a jump in its fourth derivative, which find_kinks does not look for
        assert dual.error() < 1e-9
    rough = Quadrature(closed, degree=8)
    assert measured(rough, closed.both) <= 3 * rough.error()


@pytest.mark.slow
def test_stated_error_with_kinks() -> None:
    table = Quadrature(torch.relu)
    assert (table.method, table.kinks) == ("table", (0.0,))
    assert measured(table, Relu().both) <= 3 * table.error()
    assert table.error() < 1e-10
    hard = Quadrature(HARD)
    assert hard.method == "quadrature"
    assert hard.kinks == pytest.approx(HARD.kinks, abs=1e-9)
    assert measured(hard, HARD.both) <= 3 * hard.error()
    assert hard.error() < 1e-3
    slow = HermiteExpansion(torch.relu, degree=64)
    assert slow.error() > 1e-3  # and says so
    assert measured(slow, Relu().both) <= 3 * slow.error()


def test_table_of_elu() -> None:
    """Against integrals over sectors; and through autograd."""
    dual = recognize(nn.ELU(0.7))
    assert isinstance(dual, Quadrature)
    assert dual.method == "table"
    for p, q, rho in [(0.3, 0.9, 0.5), (0.9, 0.9, 1.0), (1.0, 0.02, -0.8)]:
        value, slope = dual.both(tensor([[rho * math.sqrt(p * q)]]), tensor([[p]]), tensor([[q]]))
        assert slope is not None
        assert float(value) == pytest.approx(integral(dual, rho, p, q), rel=1e-9, abs=1e-11)
        assert float(slope) == pytest.approx(integral(functools.partial(derivative, dual), rho, p, q), rel=1e-8)
    inputs = tuple(tensor(x).requires_grad_() for x in ([[0.3, -0.4]], [[0.9]], [[0.9, 0.6]]))
    assert torch.autograd.gradcheck(lambda *x: dual.both(*x), inputs)
    flat = [x.detach().reshape(-1)[:1] for x in inputs]
    torch.testing.assert_close(dual.both(*flat)[0], dual.both(*inputs)[0].detach().reshape(-1)[:1])
    c = tensor([[0.7]]).requires_grad_()
    by_c = torch.autograd.grad(dual.both(c, tensor([[0.7]]), tensor([[0.7]]))[0].sum(), c)[0]
    torch.testing.assert_close(by_c.reshape(()), dual.own(tensor(0.7))[1], rtol=1e-8, atol=1e-9)


def test_shapes_and_tiles() -> None:
    """Leading dimensions, expanded variances, and a tile cut into rows: the same numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 70, 5, dtype=torch.float64, generator=generator)
    k = x @ x.mT / 5
    p = k.diagonal(dim1=-2, dim2=-1)
    for dual in (Relu(), SMOOTH, HARD, Gelu()):
        whole = dual.both(k, p.unsqueeze(-1), p.unsqueeze(-2))
        wide = dual.both(k, p.unsqueeze(-1).expand_as(k), p.unsqueeze(-2).expand_as(k))
        one = dual.both(k[1, 60:, :9], p[1, 60:, None], p[1, None, :9])
        for a, b, c in zip(whole, wide, one, strict=True):
            assert a is not None
            torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)
            torch.testing.assert_close(a[1, 60:, :9], c, rtol=1e-9, atol=1e-10)
        assert dual.both(k, p.unsqueeze(-1), p.unsqueeze(-2), slope=False)[1] is None
        assert dual.own(p, slope=False)[1] is None


def test_kinks_are_found() -> None:
    assert find_kinks(torch.tanh) == ()
    assert find_kinks(F.silu) == ()
    assert find_kinks(F.elu) == (0.0,)  # a jump in the second derivative
    assert find_kinks(F.relu6) == pytest.approx((0.0, 6.0), abs=1e-8)
    assert find_kinks(lambda x: (x > 0.3).double()) == pytest.approx((0.3,), abs=1e-8)
    assert find_kinks(lambda x: x.abs() + (x - 1).abs()) == pytest.approx((0.0, 1.0), abs=1e-8)


MODULES: list[nn.Module] = [
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.3), nn.PReLU(init=0.1), nn.RReLU().eval(), nn.ReLU6()),
    *(nn.GELU(), nn.GELU("tanh"), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.Softplus(), nn.Softplus(2.0), nn.ELU()),
    *(nn.ELU(0.7), nn.CELU(2.0), nn.SELU(), nn.Mish(), nn.Hardtanh(), nn.Hardtanh(-2.0, 0.5), nn.Hardswish()),
    *(nn.Hardsigmoid(), nn.Softsign(), nn.LogSigmoid(), nn.Tanhshrink(), nn.Softshrink(0.4), nn.Hardshrink(0.4)),
    *(nn.Threshold(0.5, 0.1), nn.Threshold(0.5, 0.5), nn.Identity()),
]


@pytest.mark.parametrize("module", MODULES, ids=repr)
@pytest.mark.every(3)
def test_every_activation_of_torch(module: nn.Module) -> None:
    dual = recognize(module)
    assert dual is not None
    module = module.double()
    x = torch.linspace(-7, 7, 1001, dtype=torch.float64)
    torch.testing.assert_close(dual(x), module(x.clone()).detach())
    kinks = find_kinks(lambda x: module(x.clone()))
    c, p, q = tensor([0.5, -0.2]), tensor([0.9, 0.6]), tensor([1.0, 0.3])
    wanted = polar(lambda x: module(x.clone()), kinks, 20, c, p, q, True)
    owned = polar(lambda x: module(x.clone()), kinks, 20, p, p, p, True)
    found = [dual.own(p)]
    if not isinstance(dual, Quadrature) or dual.method == "expansion":  # the others have tests, and cost seconds each
        found.append(dual.both(c, p, q))
    for pair, right in zip(found, (owned, wanted), strict=False):
        for got, want in zip(pair, right, strict=True):
            assert got is not None
            assert want is not None
            torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
    if isinstance(dual, Quadrature):
        assert tuple(dual.kinks or ()) == pytest.approx(kinks, abs=1e-8)


def test_functions_and_names() -> None:
    for fn in (torch.relu, F.relu, torch.relu_, F.relu_, Tensor.relu, "relu", "relu_"):
        assert recognize(fn) == Relu()
    assert recognize(F.relu, inplace=True) == Relu()
    assert recognize(torch.erf) == recognize(torch.special.erf) == Erf()
    pairs = [(torch.sin, Sin()), (torch.cos, Cos()), (torch.exp, Exp()), (torch.abs, Abs()), (torch.sign, Sign())]
    pairs += [(torch.square, Monomial(2)), (F.gelu, Gelu()), (F.leaky_relu, LeakyRelu(0.01))]
    for fn, dual in pairs:
        assert recognize(fn) == dual
    assert recognize(torch.pow, 3) == recognize("pow", exponent=3) == Monomial(3)
    assert recognize(torch.clamp, min=0.0) == recognize(torch.clamp, 0) == Relu()
    assert recognize(torch.clamp, max=2.0) == PiecewiseLinear((2.0,), (1.0, 0.0), 2.0)
    assert recognize(F.elu, 2.0) is recognize(functools.partial(F.elu, alpha=2.0)) is recognize(nn.ELU(2.0))
    assert recognize(torch.tanh) is recognize("tanh") is recognize(nn.Tanh())
    for fn in (F.silu, F.softplus, F.logsigmoid, F.mish, torch.sigmoid, F.hardswish, F.softsign, F.threshold):
        arguments = (0.5, 0.0) if fn is F.threshold else ()
        assert isinstance(recognize(fn, *arguments), Quadrature)
    for other in (nn.Linear(2, 2), nn.Softmax(-1), F.softmax, torch.add, torch.pow, nn.RReLU(), lambda x: x, "softmax"):
        assert recognize(other) is None
    assert recognize(nn.PReLU(2)) == LeakyRelu(0.25)
    several = nn.PReLU(2)
    several.weight.data[0] = 1.0
    assert recognize(several) is None
    assert recognize(Gabor().module()) == Gabor()
    assert recognize(Relu()) == Relu()


def test_refusals_say_what_is_needed() -> None:
    with pytest.raises(ValueError, match="b must be ≤ 0, not 0.5"):
        Gaussian(1.0, 0.5)
    with pytest.raises(ValueError, match="whole number ≥ 0, not -1"):
        Hermite(-1)
    with pytest.raises(ValueError, match="one slope more than kinks"):
        PiecewiseLinear((0.0,), (1.0,))


# Large variances.


def conditional(fn: Callable[[Tensor], Tensor], kinks: tuple[float, ...], rho: float, p: float, q: float) -> float:
    """E[fn(u)E[fn(v)|u]], p ≥ q, by panels that crowd to 0, to the kinks, and to where E[fn(v)|u] has them."""
    x, w = np.polynomial.legendre.leggauss(12)
    grid, sd, lean = np.sinh(np.linspace(-8.0, 8.0, 49)), math.sqrt(q * (1 - rho) * (1 + rho)), rho * math.sqrt(q / p)
    layer = np.array([-8.0, -5.0, -3.0, -1.5, 0.0, 1.5, 3.0, 5.0, 8.0])

    def panels(breaks: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        breaks = np.sort(np.clip(breaks, low, high), -1)
        width = np.diff(breaks, axis=-1)[..., None]
        points, weights = breaks[..., :-1, None] + width * (x + 1) / 2, width * w / 2
        return points.reshape(*breaks.shape[:-1], -1), weights.reshape(*breaks.shape[:-1], -1)

    near = np.concatenate([[t, *((t + layer * sd) / lean)] for t in (0.0, *kinks)])
    breaks, end = np.concatenate([grid, near, np.linspace(-9.5, 9.5, 13) * math.sqrt(p)]), np.array(9.5 * math.sqrt(p))
    u, wu = panels(breaks, -end, end)
    wu = wu * np.exp(-u * u / (2 * p)) / math.sqrt(2 * math.pi * p)
    u, wu = u[wu > 1e-20], wu[wu > 1e-20]
    mean = lean * u[:, None]
    v, wv = panels(
        np.concatenate([np.tile([*grid, *kinks], (len(u), 1)), mean + sd * layer], 1), mean - 8 * sd, mean + 8 * sd
    )
    wv = wv * np.exp(-(((v - mean) / sd) ** 2) / 2) / (sd * math.sqrt(2 * math.pi))
    at = [(fn(tensor(each)).numpy(), each)[0] for each in (u, v)]
    return float((wu * at[0] * (wv * at[1]).sum(1)).sum())


WIDE = [(64.0, 64.0), (1e4, 1024.0), (256.0, 0.5)]
STRAIGHT: list[tuple[nn.Module, tuple[float, ...]]] = [
    *((each, ()) for each in (nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.Softplus(), nn.Mish(), nn.GELU("tanh"))),
    *((nn.ELU(), (0.0,)), (nn.Hardswish(), (-3.0, 3.0)), (nn.Hardtanh(), (-1.0, 1.0)), (nn.Softsign(), (0.0,))),
]


# The others go the same ways: by expansion (Tanh, SiLU), from the table (ELU, not Softsign), by quadrature (Hardtanh).
EVERY_WAY = (nn.Tanh, nn.SiLU, nn.ELU, nn.Softsign, nn.Hardtanh)


@pytest.mark.parametrize(
    ("module", "kinks"),
    [pytest.param(*case, marks=[] if isinstance(case[0], EVERY_WAY) else pytest.mark.slow) for case in STRAIGHT],
    ids=repr,
)
@pytest.mark.every(2)
def test_large_variances(module: nn.Module, kinks: tuple[float, ...]) -> None:
    """An expansion of tanh to 512 terms was off by 0.5 at the variance 1024."""
    dual = recognize(module)
    assert dual is not None
    for (p, q), rho in zip([*WIDE, *WIDE], [0.4, 0.97, 1 - 1e-5, 1 - 1e-5, -(1 - 1e-8), -0.9], strict=True):
        found = dual.both(tensor([[rho * math.sqrt(p * q)]]), tensor([[p]]), tensor([[q]]))
        parts = (dual, functools.partial(derivative, dual))
        for fn, got, a, b in zip(parts, found, dual.own(tensor(p)), dual.own(tensor(q)), strict=True):
            assert got is not None
            assert a is not None
            assert b is not None
            wanted = conditional(fn, kinks, rho, p, q)
            assert abs(float(got) - wanted) <= 1e-8 * max(abs(wanted), math.sqrt(float(a * b))), (p, q, rho)


@pytest.mark.parametrize("module", [each for each, _ in STRAIGHT[:-1]], ids=repr)
@pytest.mark.every(3, 2)
def test_copies_have_their_own_moments(module: nn.Module) -> None:
    dual = recognize(module)
    assert dual is not None
    for size in (1e-6, 1.0, 4.0, 64.0, 1e4):
        p = tensor([[size]])
        for got, own in zip(dual.both(p, p, p), dual.own(p), strict=True):
            torch.testing.assert_close(got, own, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("module", [nn.Tanh(), nn.Softplus(), nn.ELU()], ids=repr)
@pytest.mark.parametrize("scale", [1.0, 3.0, 30.0])
@pytest.mark.every(3)
def test_near_copies_stay_positive_semidefinite(module: nn.Module, scale: float) -> None:
    dual = recognize(module)
    assert dual is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 1, 20, dtype=torch.float64, generator=generator)
    x = (x + 1e-8 * torch.randn(5, 6, 20, dtype=torch.float64, generator=generator)).reshape(30, 20)
    k = x @ x.T * scale**2 / 20 + 0.1
    p = k.diagonal()
    for got, own in zip(dual.both(k, p[:, None], p[None, :]), dual.own(p), strict=True):
        assert got is not None
        assert own is not None
        values = torch.linalg.eigvalsh(got - got.diagonal().diag() + own.diag())
        assert values[0] >= -1e-12 * values.sum()


@pytest.mark.parametrize("module", [nn.Tanh(), nn.ELU(), nn.Hardswish()], ids=repr)
@pytest.mark.every(3)
def test_gradients_at_large_variances(module: nn.Module) -> None:
    dual = recognize(module)
    assert dual is not None
    inputs = (tensor([[30.0, -40.0, 66.9, 0.5]]), tensor([[64.0]]), tensor([[70.0, 50.0, 70.0, 0.3]]))
    inputs = tuple(each.requires_grad_() for each in inputs)
    assert torch.autograd.gradcheck(lambda *x: dual.both(*x), inputs, rtol=1e-4, atol=1e-8)
    ends = [tensor([[64.0, 0.0, -64.0]]), tensor([[64.0]]), tensor([[64.0, 0.0, 64.0]])]
    ends = [each.requires_grad_() for each in ends]
    value, slope = dual.both(*ends)
    assert slope is not None
    grads = torch.autograd.grad(value.sum() + slope.sum(), ends, retain_graph=True)
    assert all(each.isfinite().all() for each in grads)
    by_c = torch.autograd.grad(value.sum(), ends[0])[0]
    torch.testing.assert_close(by_c[0, 0], dual.own(tensor(64.0))[1], rtol=1e-9, atol=0.0)


def test_a_tile_of_small_and_large_variances() -> None:
    """Every pair by itself gives the same: what is chosen for the tile does not show."""
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(7, 4, dtype=torch.float64, generator=generator)
        * tensor([0.0, 1e-3, 0.3, 1.0, 4.0, 20.0, 90.0])[:, None]
    )
    x[5] = 20 * x[3]
    k = x @ x.T
    p = k.diagonal()
    for module in (nn.Tanh(), nn.ELU(), nn.Hardswish()):
        dual = recognize(module)
        assert dual is not None
        whole = dual.both(k, p[:, None], p[None, :])
        assert dual.both(k, p[:, None], p[None, :], slope=False)[1] is None
        for got in whole:
            torch.testing.assert_close(got, got.T, rtol=1e-9, atol=1e-15)
        for i, j in itertools.combinations_with_replacement(range(7), 2):
            one = dual.both(k[i, j], p[i], p[j])
            for got, alone, own in zip(whole, one, dual.own(p), strict=True):
                assert got is not None
                assert alone is not None
                assert own is not None
                assert float((got[i, j] - alone).abs()) <= 1e-8 * float((own[i] * own[j]).sqrt()) + 1e-15
        single = dual.both(k.float(), p[:, None].float(), p[None, :].float())[0]
        assert single.dtype == torch.float32
        assert single.isfinite().all()


def test_what_cannot_be_integrated_is_refused() -> None:
    fast = Quadrature(lambda x: x * torch.sin(x), name="swing")
    assert fast.error(1.0) < 1e-10
    with pytest.raises(InputError, match=r"swing at a variance of 1e\+03 .* normalise the inputs.* lower w_var"):
        fast.both(tensor([[900.0]]), tensor([[1000.0]]), tensor([[1000.0]]))
    p = tensor([[64.0]])
    slope, own = HermiteExpansion(torch.tanh).both(p, p, p)[1], SMOOTH.own(p)[1]  # by request: no refinement
    assert slope is not None
    assert own is not None
    assert float(slope) < 0.999 * float(own)
