"""Finite networks against their limit, and order and chaos: identities, closed forms, and rates that theory gives."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from tangency.infinite import Erf, Gelu, Linear, Quadrature, Relu, Serial, Twin
from tangency.infinite.finite import roles, scales
from tangency.studies import GradientDescent, boundary, condition, phase
from tangency.studies.convergence import fit_slope


class Tokens(nn.Module):
    """One of each kind of layer: what `draw` and `scales` must know."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.rnn = nn.RNN(6, 4, batch_first=True)
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 8, 3, groups=2)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.table(x))
        h = self.norm(self.heads(h, h, h, need_weights=False)[0])
        return self.out(self.conv(h.mT).mean(2))


def test_weights_are_drawn_with_their_fan_in() -> None:
    net = Tokens()
    assert {name: role.fan_in for name, role in roles(net).items() if role.kind == "weight"} == {
        "table.weight": 1, "rnn.weight_ih_l0": 6, "rnn.weight_hh_l0": 4, "heads.in_proj_weight": 4,
        "heads.out_proj.weight": 4, "conv.weight": 6, "out.weight": 8,
    }  # fmt: skip
    with torch.no_grad():
        net.norm.weight.fill_(3.0)
    tg.infinite.draw(net, w_var=2.0, b_var=0.1)
    assert bool((net.norm.weight == 1).all())
    assert bool((net.table.weight[0] == 0).all())
    assert bool((net.table.weight[1:] != 0).all())

    big = nn.Sequential(nn.Conv2d(8, 64, 5, groups=4), nn.Flatten(), nn.Linear(500, 400), nn.RNN(300, 200))
    tg.infinite.draw(big, w_var={"": 1.5, "2": 3.0}, b_var={"": 0.0, "2": 0.2})
    for weight, want in (
        (big[0].weight, 1.5 / 50), (big[2].weight, 3.0 / 500), (big[2].bias, 0.2), (big[3].weight_ih_l0, 1.5 / 300),
        (big[3].weight_hh_l0, 1.5 / 200),
    ):  # fmt: skip
        assert abs(float(weight.detach().var()) / want - 1) < 5 * (2 / weight.numel()) ** 0.5
    assert not bool(big[0].bias.any())

    twin = Twin(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    tg.infinite.draw(twin, w_var={"0": 1.0, "2": 2.0}, seed=3)  # by the names of the network itself
    assert not bool(twin(torch.randn(5, 3)).any())
    once = twin.first[0].weight.clone()
    assert torch.equal(once, tg.infinite.draw(twin, w_var={"0": 1.0, "2": 2.0}, seed=3).first[0].weight)
    assert not torch.equal(once, tg.infinite.draw(twin, w_var={"0": 1.0, "2": 2.0}, seed=4).first[0].weight)


@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")  # no rule for nn.RNN
def test_empirical_ntk_is_the_jacobian_in_the_other_parameters() -> None:
    """f(√s·θ): the Gram of its Jacobian in θ, by autograd."""
    net = tg.infinite.draw(Tokens(), w_var=1.7, b_var=0.3).double()
    x, y = torch.randint(1, 11, (4, 7)), torch.randint(1, 11, (3, 7))
    scale = scales(net, 1.7, 0.3)
    assert scale["rnn.bias_hh_l0"] == 0.3
    assert scale["norm.weight"] == 1.0
    theta = {name: p.detach() / scale[name] ** 0.5 for name, p in net.named_parameters()}

    def outputs(theta: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, {name: p * scale[name] ** 0.5 for name, p in theta.items()}, (x,))

    with torch.backends.mkldnn.flags(enabled=False), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        a, b = (torch.func.jacrev(outputs)(theta, v) for v in (x, y))
    want = sum(torch.einsum("ncp,mcp->nm", a[k].flatten(2), b[k].flatten(2)) for k in theta) / 2
    torch.testing.assert_close(tg.infinite.empirical_ntk(net, x, y, w_var=1.7, b_var=0.3), want)
    standard = tg.infinite.empirical_ntk(net, x, parametrization="standard")
    torch.testing.assert_close(standard, tg.trace_ntk(net)(x) / 2)
    without = tg.infinite.empirical_ntk(net, x, w_var=1.7)  # biases of variance 0 do not count
    weights = [name for name in scale if "bias" not in name or name.startswith("norm")]
    parts = tg.trace_ntk(net, trainable=weights).parts(x)
    torch.testing.assert_close(without, sum(scale[name] * parts[name] for name in weights) / 2)
    for p in net.rnn.parameters():
        p.requires_grad_(False)
    frozen = tg.infinite.empirical_ntk(net, x, w_var=1.7, b_var=0.3)
    parts = tg.trace_ntk(net).parts(x)
    torch.testing.assert_close(frozen, sum(scale[name] * part for name, part in parts.items()) / 2)


class Last(nn.Module):
    """A recurrent network's last hidden values, read out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(3, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Attention(nn.Module):
    """Heads of four channels, the more the wider."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(3, width), nn.Linear(width, 1)
        self.heads = nn.MultiheadAttention(width, width // 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.out(self.heads(h, h, h, need_weights=False)[0].mean(1))


WIDE = {
    "rnn": (Last, lambda: torch.randn(3, 4, 3)),
    "attention": (Attention, lambda: torch.randn(3, 4, 3)),
    "conv": (
        lambda m: nn.Sequential(
            nn.Conv1d(3, m, 3, padding=1), nn.ReLU(), nn.Conv1d(m, m, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * m, 1)
        ),
        lambda: torch.randn(3, 3, 5),
    ),
    "embedding": (
        lambda m: nn.Sequential(nn.Embedding(9, m), nn.Tanh(), nn.Flatten(), nn.Linear(4 * m, 1)),
        lambda: torch.randint(0, 9, (3, 4)),
    ),
    "norm": (
        lambda m: nn.Sequential(nn.Linear(4, m), nn.LayerNorm(m), nn.ReLU(), nn.Linear(m, 1)),
        lambda: torch.randn(3, 4),
    ),
}


@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")
@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("parametrization", ["ntk", "standard"])
@pytest.mark.every(3)
def test_wide_networks_come_near_their_limit(kind: str, parametrization: str) -> None:
    """With biases, in both parametrisations; averaged over seeds, so the tolerance is a few standard errors."""
    factory, inputs = WIDE[kind]
    x = inputs()
    found = tg.studies.convergence(
        factory, [32, 384], x, w_var=1.5, b_var=0.2, seeds=3, parametrization=parametrization
    )
    most = 0.2 if kind == "attention" else 0.12  # few channels to a head
    assert float(found.ntk[1].mean()) < most
    assert float(found.nngp[1].mean()) < most
    assert float(found.ntk[0].mean()) > 1.5 * float(found.ntk[1].mean())


def test_covariances_of_outputs() -> None:
    net = tg.infinite.draw(nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 20_000)), w_var=2.0, b_var=0.1)
    x, y = torch.randn(4, 3), torch.randn(2, 3)
    h, g = torch.relu(net[0](x)).detach(), torch.relu(net[0](y)).detach()
    one = nn.Sequential(net[0], net[1], nn.Linear(64, 1))
    given = tg.infinite.readout_nngp(one, x, y, w_var=2.0, b_var=0.1)
    torch.testing.assert_close(given, 2 / 64 * h @ g.T + 0.1)
    drawn = tg.infinite.empirical_nngp(net, x, y)
    variances = [torch.diagonal(tg.infinite.readout_nngp(one, v, w_var=2.0, b_var=0.1)) for v in (x, y)]
    error = ((torch.outer(*variances) + given**2) / 20_000).sqrt()  # Isserlis
    assert bool(((drawn - given).abs() < 4 * error).all())
    with pytest.raises(tg.InputError, match=r"not linear in the weights of the layer called last \(0\)"):
        tg.infinite.readout_nngp(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), x)


def deep(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


@pytest.mark.slow
def test_distance_falls_with_the_root_of_the_width() -> None:
    found = tg.studies.convergence(deep, [32, 64, 128, 256], torch.randn(8, 5), w_var=1.5, b_var=0.1, seeds=6)
    for name in ("ntk", "nngp"):
        slope = found.slopes[name]
        assert slope.error < 0.06
        assert abs(slope.value + 0.5) < 3 * slope.error, name
    again = tg.studies.convergence(deep, [32, 64], torch.ones(2, 5), seeds=[4])
    assert again.ntk.shape == (2, 1)
    assert "slope" in str(found)
    assert str(found).splitlines()[1].split()[0] == "32"


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.every(2)
def test_training_stays_near_the_limit_and_within_the_bounds(twin: bool) -> None:
    x, y = torch.randn(6, 5), torch.tensor([1.0, -1, 1, 1, -1, -1])
    spec = GradientDescent(y, steps=30, every=15, twin=twin)
    found = tg.studies.convergence(deep, [64, 128, 256], x, w_var=1.5, b_var=0.1, seeds=3, train=spec)
    slopes, run = found.slopes, found.training
    assert run is not None
    assert abs(slopes["sup"].value + 0.5) < 3 * slopes["sup"].error
    assert slopes["drift"].value < -0.7  # (18) allows −½; the signs of the last layer cancel
    assert abs(slopes["moved"].value) < 0.15
    assert set(run.bounds) == {"loss", "parameters", "kernel", "limit"}
    assert all(float(ratio.max()) < 1 for ratio in run.bounds.values())
    if not twin:
        return
    # From f₀ = 0, steps of size lr leave (1 − lr Θ)^T y, and move the parameters by Jᵀ Σ_t lr (1 − lr Θ)^t y.
    values, vectors = torch.linalg.eigh(found.limit)
    inside = vectors.T @ y.double()
    left = 1 - run.lr * values
    want = float((left**30 * inside).norm() / inside.norm())
    moved = float(((1 - left**30) / values.sqrt() * inside).norm())
    assert abs(float(run.left[-1].mean()) / want - 1) < 0.1
    assert abs(float(run.moved[-1].mean()) / moved - 1) < 0.05
    assert float(run.smallest) == pytest.approx(float(values[0]))


def test_slopes_of_known_numbers() -> None:
    widths = torch.tensor([10, 100, 1000, 10_000])
    noise = torch.randn(4, 400, dtype=torch.float64)
    found = fit_slope(widths.tolist(), widths[:, None] ** -0.5 * torch.exp(0.1 * noise))
    spread = (widths.log() - widths.log().mean()).square().sum() * 400
    assert found.error == pytest.approx(0.1 / float(spread) ** 0.5, rel=0.1)  # of a log-normal spread of 0.1
    assert abs(found.value + 0.5) < 4 * found.error
    assert math.isnan(fit_slope([1, 2], torch.zeros(2, 1)).value)


def test_studies_of_width_refuse_what_they_cannot_use() -> None:
    x, study = torch.randn(4, 5), tg.studies.convergence
    for widths in ([64], [64, 64], [128, 64], [0, 1], [1.5, 2.5], 64):
        with pytest.raises(tg.InputError, match=r"widths=.*two or more whole numbers, each larger"):
            study(deep, widths, x)
    for seeds in (0, [], 1.5, True):
        with pytest.raises(tg.InputError, match=r"seeds=.*at least 1, or a list"):
            study(deep, [8, 16], x, seeds=seeds)
    with pytest.raises(tg.InputError, match=r"module_factory\(8\) returned int; needed: an nn.Module"):
        study(lambda m: m, [8, 16], x)
    with pytest.raises(tg.InputError, match=r"module_factory is a Linear; needed: a function of the width"):
        study(nn.Linear(5, 1), [8, 16], x)
    with pytest.raises(tg.InputError, match=r"module_factory\(16\) has 6 parameters, .* before it 6"):
        study(lambda m: nn.Linear(5, 1), [8, 16], x)
    with pytest.raises(tg.InputError, match=r"w_var=-1; needed: a finite number, at least 0"):
        study(deep, [8, 16], x, w_var=-1)
    with pytest.raises(tg.InputError, match=r"w_var='init'; needed: a number, or a mapping"):
        study(deep, [8, 16], x, w_var="init")
    with pytest.raises(tg.InputError, match=r"no number for 2.weight"):
        study(deep, [8, 16], x, w_var={"0": 1.0})
    for spec, message in (
        (GradientDescent(torch.ones(3)), r"train.y has shape \(3,\); needed: one number per sample, \[4\]"),
        (GradientDescent(torch.ones(4), steps=0), r"train.steps=0; needed: a whole number"),
        (GradientDescent(torch.ones(4), lr=0.0), r"train.lr=0; needed: more than 0"),
        (GradientDescent(torch.ones(4), lr=100.0), r"train.lr=100; needed: below 2/λ_max"),
    ):
        with pytest.raises(tg.InputError, match=message):
            study(deep, [8, 16], x, train=spec)
    with pytest.raises(tg.InputError, match=r"2 outputs; needed for training: one"):
        study(
            lambda m: nn.Sequential(nn.Linear(5, m), nn.Linear(m, 2)), [8, 16], x, train=GradientDescent(torch.ones(4))
        )
    with pytest.raises(tg.InputError, match=r"parameter W is held by a TwoLayer|parameter \w+ is held by"):
        tg.infinite.draw(tg.models.two_layer(3, 4))
    with pytest.raises(tg.InputError, match=r"has no parameters; needed: a network with weights"):
        tg.infinite.draw(nn.ReLU())
    with pytest.raises(tg.InputError, match=r"all variances are 0"):
        tg.infinite.empirical_ntk(nn.Linear(5, 1), x, w_var=0.0)


def test_fixed_points_in_closed_form() -> None:
    for w, b in ((0.5, 0.1), (2.0, 0.3)):  # erf: q = σ_w² 2/π asin(2q/(1 + 2q)) + σ_b², χ₁ = σ_w² 4/(π√(1 + 4q))
        found = phase(Erf(), w_var=w, b_var=b)
        assert found.q == pytest.approx(w * 2 / math.pi * math.asin(2 * found.q / (1 + 2 * found.q)) + b, rel=1e-12)
        assert found.chi == pytest.approx(w * 4 / math.pi / math.sqrt(1 + 4 * found.q), rel=1e-12)
    found = phase(Relu(), w_var=1.5, b_var=0.2)
    assert (found.phase, found.c) == ("ordered", 1.0)
    assert found.q == pytest.approx(0.2 / (1 - 0.75))
    assert found.chi == pytest.approx(0.75)
    assert found.depth == pytest.approx(-1 / math.log(0.75))
    assert phase("relu", w_var=2.0).phase == "critical"
    assert phase("relu", w_var=1.0).chi == 0.5  # where signals die, too
    lost = phase(Relu(), w_var=2.5)
    assert (lost.phase, lost.q, lost.c) == ("chaotic", math.inf, 1.0)
    odd = phase(Erf(), w_var=2.0)
    assert (odd.phase, odd.c) == ("chaotic", 0.0)
    assert phase(Erf(), w_var=0.5).q == 0
    assert odd.gradient_depth == pytest.approx(1 / math.log(odd.chi))


@pytest.mark.parametrize(("w", "b"), [(1.2, 0.1), (3.0, 0.2)])
def test_fixed_points_are_where_deep_kernels_go(w: float, b: float) -> None:
    """200 layers of the infinite network: their variance, correlation and gradients."""
    net = Serial(Linear(), *[layer for _ in range(200) for layer in (Erf(), Linear())])
    nngp = tg.infinite_nngp(net, w_var=w, b_var=b)(F.normalize(torch.randn(2, 6)) * 2)
    found = phase(Erf(), w_var=w, b_var=b)
    assert float(nngp[0, 0]) == pytest.approx(found.q, rel=1e-9)
    assert float(nngp[0, 1] / nngp[0, 0]) == pytest.approx(found.c, rel=1e-6)
    assert (found.c < 1) == (found.phase == "chaotic")
    # correlations come nearer by χ_c* in a layer
    c, q = found.c - 1e-4, found.q
    value, _ = Erf().both(*(torch.tensor([v], dtype=torch.float64) for v in (c * q, q, q)))
    nearer = (found.c - (w * float(value) + b) / q) / 1e-4
    assert nearer == pytest.approx(found.chi_c, rel=1e-3)


@pytest.mark.slow
def test_boundary_of_order_and_chaos() -> None:
    assert boundary(Relu(), [0.0, 0.5]).tolist() == [2.0, 2.0]
    assert float(boundary(Erf(), [0.0])[0]) == pytest.approx(math.pi / 4)
    assert float(boundary(Quadrature(torch.tanh), [0.0])[0]) == pytest.approx(1.0)
    for dual, b_vars in ((Erf(), [0.01, 0.2, 1.5]), (Quadrature(torch.tanh), [0.01, 1.5]), ("sigmoid", [0.2])):
        for b, w in zip(b_vars, boundary(dual, b_vars).tolist(), strict=True):
            assert phase(dual, w_var=w, b_var=b).chi == pytest.approx(1, abs=1e-6)
            assert phase(dual, w_var=0.95 * w, b_var=b).phase == "ordered"
            assert phase(dual, w_var=1.05 * w, b_var=b).phase == "chaotic"
    # GELU without biases has no stable critical point: signals die out or grow without end.
    assert math.isnan(float(boundary(Gelu(), [0.0])[0]))
    assert phase(Gelu(), w_var=1.9, b_var=0.0).q == 0
    assert phase(Gelu(), w_var=2.1, b_var=2.0).q == math.inf


@pytest.mark.parametrize("activation", [Erf(), Relu(), Quadrature(torch.tanh)])
@pytest.mark.every(2)
def test_condition_is_that_of_the_infinite_kernel(activation: object) -> None:
    x, z, y = torch.randn(7, 5).double(), torch.randn(4, 5).double(), torch.randn(7, 2).double()
    depths = [6, 0, 1, 6]
    found = condition(x, depths, w_var=1.6, b_var=0.1, activation=activation, x_test=z, y=y)
    worst = condition(x, depths, w_var=1.6, b_var=0.1, activation=activation, x_test=z)
    centred = y - y.mean(0)
    for k, depth in enumerate(depths):
        net = Serial(Linear(), *[layer for _ in range(depth) for layer in (activation, Linear())])
        ntk = tg.infinite_ntk(net, w_var=1.6, b_var=0.1)
        theta, cross = ntk(x), ntk(z, x)
        values = torch.linalg.eigvalsh(theta)
        torch.testing.assert_close(found.largest[k], values[-1])
        if depth == 0:  # of rank 6, but for 5 inputs and a bias: lost
            assert float(found.kappa[k]) == math.inf
            continue
        torch.testing.assert_close(found.kappa[k], values[-1] / values[0], rtol=1e-6, atol=0)
        p = cross @ torch.linalg.inv(theta)
        rms = (p @ centred).square().mean().sqrt() / centred.square().mean().sqrt()
        torch.testing.assert_close(found.predictor[k], rms, rtol=1e-6, atol=0)
        assert float(rms) <= float(worst.predictor[k]) * (1 + 1e-9)
    grid = tg.studies.trainability(x, depths, [0.7, 1.6], b_var=0.1, activation=activation, x_test=z, y=y)
    torch.testing.assert_close(grid.kappa[:, 1], found.kappa)
    torch.testing.assert_close(grid.predictor[1:, 1], found.predictor[1:], equal_nan=True)
    assert bool(found.predictor[1].isnan())


def test_rates_in_the_three_phases() -> None:
    """Xiao et al. 2020, table 1, for n samples of equal norm."""
    n, b = 6, 0.1
    x, z = (F.normalize(torch.randn(k, 30).double()) * 30**0.5 for k in (n, 4))
    edge, y = float(boundary(Erf(), [b])[0]), torch.tensor([1.0, -1, 1, -1, 1, -1])

    def at(w: float, depths: list[int]) -> tuple[tg.studies.Condition, tg.studies.Phase]:
        found = condition(x, depths, w_var=w, b_var=b, activation=Erf(), x_test=z, y=y)
        return found, phase(Erf(), w_var=w, b_var=b)

    ordered, p = at(0.8 * edge, [60, 61, 1000])
    assert float(ordered.kappa[1] / ordered.kappa[0]) == pytest.approx(60 / 61 / p.chi, rel=0.01)  # κ ~ 1/(l χ₁^l)
    assert float(ordered.predictor[0]) > 0.05
    assert float(ordered.predictor[1] / ordered.predictor[0]) == pytest.approx(1, abs=0.01)
    assert float(ordered.kappa[2]) == math.inf

    critical, p = at(edge, [1000, 4000])
    assert p.phase == "critical"
    assert float(critical.kappa[1]) == pytest.approx((n + 2) / 2, rel=0.02)
    assert float(critical.predictor[0] / critical.predictor[1]) == pytest.approx(4, rel=0.1)  # P ~ 1/l

    chaotic, p = at(1.5 * edge, [60, 61])
    assert float(chaotic.kappa[1]) == pytest.approx(1, abs=1e-3)
    fall = float(chaotic.predictor[1] / chaotic.predictor[0])
    assert fall == pytest.approx(61 / 60 * p.chi_c / p.chi, rel=0.01)  # P ~ l (χ_c*/χ₁)^l
    assert float(chaotic.largest[1] / chaotic.largest[0]) == pytest.approx(p.chi, rel=0.01)


def test_studies_of_depth_refuse_what_they_cannot_use() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(tg.InputError, match=r"activation='rely'; needed: one of tangency.infinite, such as Erf\(\)"):
        phase("rely", w_var=1.0)
    with pytest.raises(tg.InputError, match=r"activation=3; needed"):
        boundary(3, [0.0])  # type: ignore[arg-type]
    with pytest.raises(tg.InputError, match=r"w_var=-1; needed: a finite number, at least 0"):
        phase(Erf(), w_var=-1)
    with pytest.raises(tg.InputError, match=r"b_var=-1"):
        condition(x, [1], w_var=1.0, b_var=-1, activation=Erf())
    with pytest.raises(tg.InputError, match=r"b_vars=-1"):
        boundary(Erf(), [-1])
    for depths in ([], [-1], [1.5], 3):
        with pytest.raises(tg.InputError, match=r"depths=.*needed: a list of numbers of activations"):
            condition(x, depths, w_var=1.0, activation=Erf())
    with pytest.raises(tg.InputError, match=r"x is of shape \(2, 3, 4\); needed: a tensor \[n, i\]"):
        condition(torch.randn(2, 3, 4), [1], w_var=1.0, activation=Erf())
    with pytest.raises(tg.InputError, match=r"x_test is of shape \(2, 4\); needed: a tensor \[m, 3\]"):
        condition(x, [1], w_var=1.0, activation=Erf(), x_test=torch.randn(2, 4))
    with pytest.raises(tg.InputError, match=r"y is of shape \(3,\); needed: \[4\]"):
        condition(x, [1], w_var=1.0, activation=Erf(), y=torch.ones(3))
    with pytest.raises(tg.InputError, match=r"y is constant"):
        condition(x, [1], w_var=1.0, activation=Erf(), y=torch.ones(4))
    with pytest.raises(tg.InputError, match=r"w_vars is empty"):
        tg.studies.trainability(x, [1], [], activation=Erf())


def test_results_say_what_they_hold() -> None:
    """Tables for people, dicts for JSON, pictures, and a repr that never dumps a tensor."""
    x = torch.randn(5, 4)
    deep_ones = condition(x, [1, 20], w_var=1.6, b_var=0.1, activation=Erf(), x_test=x[:2] + 1)
    grid = tg.studies.trainability(x, [1, 20], [0.5, 2.0], b_var=0.1, activation=Erf())
    b_vars, w_vars = grid.edge  # the boundary as a curve, from no biases to more than there are
    assert (float(b_vars[0]), float(b_vars[-1])) == (0.0, 1.0)
    assert bool((b_vars.diff() > 0).all())
    torch.testing.assert_close(w_vars, boundary(Erf(), b_vars))
    descent = GradientDescent(torch.ones(5), steps=2, every=1)
    widths = tg.studies.convergence(lambda m: deep_of(4, m), [8, 16], x, seeds=2, train=descent, progress=False)
    assert deep_ones.table().split()[:5] == ["depth", "λ_max", "λ_min", "κ", "predictor"]
    assert len(deep_ones.table().splitlines()) == 3
    assert grid.table().splitlines()[-1].split() == ["phase", "ordered", "chaotic"]
    for result in (deep_ones, grid, widths, grid.phases[0], widths.slopes["ntk"]):
        assert len(repr(result)) < 1200
        assert "tensor(" not in repr(result)
        again = json.loads(json.dumps(result.to_dict()))
        assert again["result"] == type(result).__name__
    assert deep_ones.to_dict()["units"] == {"depths": "activations"}
    assert len(grid.plot().axes) >= 3
    assert len(widths.plot().axes) == 3


def deep_of(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 1))
