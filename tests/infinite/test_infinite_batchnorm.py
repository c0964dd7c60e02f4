"""BatchNorm at infinite width: against quadrature in the plane, Monte Carlo with autograd, finite nets, identities."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tangency.errors import InputError
from tangency.infinite.moments import batchnorm
from tangency.infinite.moments.batchnorm import normalized, slopes

D = torch.float64
PHI = [pytest.param(True, id="relu"), pytest.param(False, id="identity")]


def affine(cov: Tensor, *, relu: bool, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """What a trained scale and shift add to the tangent kernel."""
    return normalized(cov, relu=relu, eps=eps)[0], slopes(cov, relu=relu)


def problem(n: int, d: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A covariance of rank min(n, d) with a common part, and a tangent kernel that is not a function of it."""
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(n, d, dtype=D, generator=g), torch.randn(n, n + 2, dtype=D, generator=g)
    return x @ x.T / d + 0.3, w @ w.T / n + 0.1


def layer(h: Tensor, relu: bool, eps: float) -> Tensor:
    """What torch does to one channel h [n] of a batch."""
    eps = eps or 1e-30  # torch refuses 0
    z = nn.functional.batch_norm(h[:, None], None, None, training=True, eps=eps)[:, 0]
    return torch.relu(z) if relu else z


def samples(h: Tensor, ntk: Tensor, relu: bool, eps: float) -> list[Tensor]:
    """y yᵀ, J Θ Jᵀ, and what γ and β add, for each row of h [q, n]; by autograd."""

    def one(v: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(v, relu, eps)
        return y, y

    jac, y = torch.func.vmap(torch.func.jacrev(one, has_aux=True))(h)
    slope = (y > 0).to(D) if relu else torch.ones_like(y)
    return [y[:, :, None] * y[:, None], jac @ ntk @ jac.mT, slope[:, :, None] * slope[:, None]]


def kernels(cov: Tensor, ntk: Tensor, relu: bool, eps: float) -> list[Tensor]:
    forward, tangent = normalized(cov, ntk, relu=relu, eps=eps)
    assert tangent is not None
    return [forward, tangent, slopes(cov, relu=relu)]


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("relu", PHI)
@pytest.mark.parametrize(("n", "eps"), [(8, 0.0), (8, 1e-5), (4, 0.1)])
@pytest.mark.every(5)
def test_monte_carlo(n: int, eps: float, relu: bool) -> None:
    cov, ntk = problem(n)
    draws = torch.randn(60_000, n, dtype=D, generator=torch.Generator().manual_seed(1))
    found = samples(draws @ torch.linalg.cholesky(cov).mT, ntk, relu, eps)
    for got, drawn in zip(kernels(cov, ntk, relu, eps), found, strict=True):
        error = drawn.std(0) / len(drawn) ** 0.5
        assert float(((got - drawn.mean(0)).abs() / (error + 1e-12)).max()) < 4
        assert float(error.max()) < 0.02 * float(got.abs().max())


@pytest.mark.parametrize("relu", PHI)
@pytest.mark.parametrize("eps", [0.05, 3.0])
@pytest.mark.parametrize("copies", [1, 2])
def test_quadrature_in_the_plane(copies: int, eps: float, relu: bool) -> None:
    """Three different samples: GΣG has rank 2, and E is an integral over angle (between sign changes) and radius."""
    cov, ntk = (k.repeat(copies, copies) for k in problem(3))
    if copies == 2:  # samples that agree in the forward pass, and not in the tangent kernel
        ntk = problem(6, seed=3)[1]
    n = len(cov)
    centre = torch.eye(n, dtype=D) - 1 / n
    values, vectors = torch.linalg.eigh(centre @ cov @ centre)
    root = vectors[:, -2:] * values[-2:].sqrt()
    cuts = (torch.atan2(-root[:, 0], root[:, 1])[:, None] + torch.tensor([0, math.pi], dtype=D)) % (2 * math.pi)
    cuts = torch.cat([cuts.flatten().sort().values, cuts.min()[None] + 2 * math.pi])
    nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(24))
    angle = (cuts[:-1, None] + cuts.diff()[:, None] * (nodes + 1) / 2).flatten()
    turn = (cuts.diff()[:, None] / 2 * weights).flatten() / (2 * math.pi)
    nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(80))
    radius, mass = 4.5 * (nodes + 1), 4.5 * weights  # up to 9: e^{−40}
    mass = mass * radius * torch.exp(-(radius**2) / 2)
    points = radius[:, None, None] * torch.stack([angle.cos(), angle.sin()], 1)
    every = samples((points @ root.T).reshape(-1, n), ntk, relu, eps)
    weight = (mass[:, None] * turn).flatten()
    for got, drawn in zip(kernels(cov, ntk, relu, eps), every, strict=True):
        close(got, torch.einsum("q,qij->ij", weight, drawn), 1e-10)


@pytest.mark.parametrize("n", [4, 9, 64])
def test_independent_samples_have_closed_forms(n: int) -> None:
    """Σ = Θ = I: u is uniform on a sphere of dimension R = n − 1, independent of ‖g‖², and E[1/‖g‖²] = 1/(R − 2)."""
    eye, r = torch.eye(n, dtype=D), n - 1
    centre = eye - 1 / n
    forward, tangent, beta = kernels(eye, eye, False, 0.0)
    close(forward, centre * n / r)
    close(tangent, centre * n / (r - 2) * (1 - 1 / r))
    assert bool((beta == 1).all())
    forward, tangent, beta = kernels(eye, eye, True, 0.0)
    angle = torch.acos((centre / centre[0, 0]).clamp(-1, 1))
    both = (math.pi - angle) / (2 * math.pi)
    arccos = centre[0, 0] * (angle.sin() / (2 * math.pi) + both * angle.cos())
    close(beta, both)
    close(forward, arccos * n / r)
    close(tangent, (centre * both - arccos / r) * n / (r - 2))


@pytest.mark.slow
def test_large_batches_tend_to_the_arccosine_kernel() -> None:
    """‖Gh‖²/n concentrates: BatchNorm becomes a division by the standard deviation, with error O(1/n)."""
    gaps = []
    for n in (16, 64, 256):
        pair = torch.tensor([[1, 0.4], [0.4, 1]], dtype=D)
        cov = torch.kron(torch.eye(n // 2, dtype=D), pair)
        angle = torch.acos(cov)
        want = (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)
        slopes = (math.pi - angle) / (2 * math.pi)
        forward, tangent, beta = kernels(cov, cov, True, 0.0)
        gaps.append([float((a - b).abs().max()) for a, b in ((forward, want), (beta, slopes), (tangent, cov * slopes))])
    for before, after in pairwise(gaps):
        assert all(b < a / 3 for a, b in zip(before, after, strict=True)), gaps


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-2, 10.0])
def test_traces(eps: float) -> None:
    """tr E[zzᵀ] = n at ε = 0 and less with ε; z sums to 0; h and −h are alike, so each diagonal of ReLU's is a half."""
    cov, ntk = problem(7)
    forward, tangent, _ = kernels(cov, ntk, False, eps)
    total = float(forward.trace())
    assert total == pytest.approx(7, rel=1e-13) if eps == 0 else total < 7
    halves, parts, beta = kernels(cov, ntk, True, eps)
    close(halves.diagonal(), forward.diagonal() / 2)
    close(parts.diagonal(), tangent.diagonal() / 2)
    close(beta.diagonal(), torch.full((7,), 0.5, dtype=D))
    assert float(forward.sum(0).abs().max()) < 1e-12
    assert float(tangent.sum(0).abs().max()) < 1e-12 * float(tangent.abs().max())
    for k in (forward, tangent, halves, parts):
        assert torch.equal(k, k.T)
        assert float(torch.linalg.eigvalsh(k)[0]) > -1e-12 * float(k.abs().max())


@pytest.mark.parametrize("relu", PHI)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1e-1, 1e3])
@pytest.mark.parametrize(("n", "d"), [(4, 50), (6, 3), (9, 50), (64, 200)])
@pytest.mark.every(9)
def test_quadrature_has_converged(n: int, d: int, eps: float, relu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cov, ntk = problem(n, d)
    wide = torch.logspace(0, -4, n, dtype=D)  # eigenvalues over many orders of magnitude
    for k in (cov, cov * wide[:, None] * wide):
        monkeypatch.setattr(batchnorm, "_STEP", 0.22)
        got = kernels(k, ntk, relu, eps)
        monkeypatch.setattr(batchnorm, "_STEP", 0.1)
        for a, b in zip(got, kernels(k, ntk, relu, eps), strict=True):
            close(a, b, 1e-13)


@pytest.mark.parametrize("relu", PHI)
def test_duplicates(relu: bool) -> None:
    """Equal samples have equal rows, to rounding, though GΣG is singular; n copies of a batch have its moments."""
    cov, ntk = problem(5)
    order = torch.tensor([0, 1, 2, 3, 4, 0, 3, 3])
    for eps in (0.0, 1e-5):
        got = kernels(cov[order][:, order], ntk[order][:, order], relu, eps)
        twice = kernels(cov.repeat(2, 2), ntk.repeat(2, 2), relu, eps)
        for k, double, single in zip(got, twice, kernels(cov, ntk, relu, eps), strict=True):
            close(k[0], k[5])
            close(k[:, 3], k[:, 7])
            close(double, single.repeat(2, 2))
    gamma, beta = affine(cov[order][:, order], relu=relu)
    assert torch.equal(gamma, got[0])
    assert float(beta[3, 6]) == pytest.approx(0.5 if relu else 1, abs=1e-14)


@pytest.mark.parametrize("relu", PHI)
def test_invariances(relu: bool) -> None:
    """Scale (with ε scaled too), a random number added to all of h, the order of the samples; linear in Θ."""
    cov, ntk = problem(7)
    forward, tangent, beta = kernels(cov, ntk, relu, 1e-3)
    scaled = kernels(1e6 * cov, 1e6 * ntk, relu, 1e3)
    shifted = kernels(cov + 5, ntk + 2, relu, 1e-3)
    mixed = kernels(cov + torch.arange(7.0)[:, None] + torch.arange(7.0), ntk, relu, 1e-3)  # all that G removes
    for got in (scaled, shifted, mixed):
        for a, b in zip(got, (forward, tangent, beta), strict=True):
            close(a, b)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    for a, b in zip(
        kernels(cov[order][:, order], ntk[order][:, order], relu, 1e-3), (forward, tangent, beta), strict=True
    ):
        close(a, b[order][:, order])
    close(kernels(cov, 3 * ntk + cov, relu, 1e-3)[1], 3 * tangent + kernels(cov, cov, relu, 1e-3)[1])
    assert normalized(cov, relu=relu)[1] is None


def test_two_and_three_samples() -> None:
    """Two samples are ±1, whatever they are; then the tangent kernel is decided by ε, and infinite without."""
    cov, ntk = problem(2)
    sign = torch.tensor([[1.0, -1], [-1, 1]], dtype=D)
    close(normalized(cov, relu=False, eps=0.0)[0], sign)
    close(normalized(cov, relu=True, eps=0.0)[0], torch.eye(2, dtype=D) / 2)
    close(slopes(cov, relu=True), torch.eye(2, dtype=D) / 2)
    for relu in (True, False):
        for k, slope in ((2, 0.5), (3, 0.0)):  # grows as ε^{−½}, and as log 1/ε
            cov, ntk = problem(k)
            with pytest.raises(InputError, match=f"infinite: .* {k} samples have rank {k - 1}.*at least 4 different"):
                normalized(cov, ntk, relu=relu, eps=0.0)
            a, b, c = (float(kernels(cov, ntk, relu, eps)[1][0, 0]) for eps in (1e-8, 1e-10, 1e-12))
            if slope:
                assert c / b == pytest.approx(10, rel=1e-3)
            else:
                assert c - b == pytest.approx(b - a, rel=1e-3)
                assert c > b


def test_a_sample_at_the_mean() -> None:
    """z = 0 there: no output, and slope 0 after ReLU as in torch; nothing is NaN."""
    x = torch.tensor([[1.0, 2], [0, 0], [-1, -2], [3, 1], [-3, -1]], dtype=D)
    for cov in (x @ x.T, x @ x.T + 1):
        for k in kernels(cov, x @ x.T + 2, True, 1e-3):
            assert bool(k.isfinite().all())
            assert float(k[1].abs().max()) == 0
        forward, tangent, _ = kernels(cov, x @ x.T + 2, False, 1e-3)
        assert float(forward[1].abs().max()) < 1e-14
        assert bool(tangent.isfinite().all())


@pytest.mark.parametrize("relu", PHI)
@pytest.mark.every(2)
def test_derivatives(relu: bool) -> None:
    cov, ntk = (k.requires_grad_() for k in problem(5))
    assert torch.autograd.gradcheck(lambda a, b: normalized(a + a.T, b + b.T, relu=relu, eps=1e-2), (cov, ntk))
    x = torch.randn(4, 6, dtype=D)
    x = torch.cat([x, x[:1]]).requires_grad_()
    (grad,) = torch.autograd.grad(normalized(x @ x.T, x @ x.T, relu=relu)[1].norm(), x)
    assert bool(grad.isfinite().all())


def test_types() -> None:
    cov, ntk = problem(6)
    for a, b in zip(kernels(cov.float(), ntk.float(), True, 1e-5), kernels(cov, ntk, True, 1e-5), strict=True):
        assert a.dtype == torch.float32
        close(a.double(), b, 1e-5)


def test_refusals() -> None:
    cov, ntk = problem(5)
    for bad, message in [
        (cov[:3], r"shape \[3, 5\]; needed: the real covariance"),
        (cov[:1, :1], "a batch of 1 sample"),
        (cov * torch.nan, "NaN or infinite"),
        (torch.ones(5, 5, dtype=D), "5 samples have the same pre-activations"),
        (-cov, "cov is indefinite"),
    ]:
        with pytest.raises(InputError, match=message):
            normalized(bad, relu=True)
        with pytest.raises(InputError, match=message):
            slopes(bad, relu=False)
    for eps in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="eps=.*finite number ≥ 0"):
            normalized(cov, relu=True, eps=eps)
    with pytest.raises(InputError, match=r"ntk is .* shape \[4, 4\]; needed: .* \[5, 5\]"):
        normalized(cov, ntk[:4, :4], relu=True)
    doubled = cov[:3, :3].repeat(2, 2)
    with pytest.raises(InputError, match="rank 2"):
        normalized(doubled, doubled, relu=True, eps=0.0)


def parts(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Each parameter's part of the tangent kernel in NTK parametrisation, for the batch as one function."""
    params = {k: v.detach() for k, v in net.named_parameters()}
    jac = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,))[:, 0])(params)
    found = {}
    for name, j in jac.items():
        fan = j.shape[-1] if j.dim() == 3 else 1
        found[name] = j.flatten(1) @ j.flatten(1).T / fan
    return found


def block(i: int, o: int) -> list[nn.Module]:
    return [nn.Linear(i, o, bias=False), nn.BatchNorm1d(o, track_running_stats=False), nn.ReLU()]


@pytest.mark.parametrize(("depth", "width", "nets"), [(1, 512, 300), (2, 512, 60)])
@pytest.mark.every(2)
def test_finite_nets(depth: int, width: int, nets: int) -> None:
    """Linear–BatchNorm1d–ReLU, once and twice, then Linear: every parameter's part of the empirical tangent kernel."""
    torch.manual_seed(0)
    x = torch.randn(8, 10, dtype=D)
    found: list[dict[str, Tensor]] = []
    for _ in range(nets):
        sizes = [10] + [width] * depth
        layers = [m for i, o in pairwise(sizes) for m in block(i, o)]
        net = nn.Sequential(*layers, nn.Linear(width, 1, bias=False)).double().train()
        for m in net:
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=m.in_features**-0.5)
        net[-1].weight.data.copy_(net[-1].weight.sign() / width**0.5)  # less noise, and the same limit
        found.append(parts(net, x))
    cov, flowing = x @ x.T / 10, {"0.weight": x @ x.T / 10}
    for at in range(0, 3 * depth, 3):
        gamma, beta = affine(cov, relu=True)
        flowing = {name: kernels(cov, k, True, 1e-5)[1] for name, k in flowing.items()}
        flowing |= {f"{at + 1}.weight": gamma, f"{at + 1}.bias": beta, f"{at + 3}.weight": gamma}
        cov = gamma
    assert found[0].keys() == flowing.keys()
    for name, want in flowing.items():
        each = torch.stack([k[name] for k in found])
        gap, error = each.mean(0) - want, each.std(0) / nets**0.5
        assert float((gap.abs() / error).max()) < 4, name  # beyond one layer there are corrections in 1/width, too
        assert float(gap.norm() / want.norm()) < (0.01 if depth == 1 else 0.04), name
