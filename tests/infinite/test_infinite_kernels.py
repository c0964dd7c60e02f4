"""Infinite kernels as kernels: cosines, errors of draws, parameters beside the weights, gating, sampled sums."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from tangency import infinite as inf
from tangency.errors import InputError, ModelError, UnsupportedModule


def points(n: int = 4, d: int = 3) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def mlp(*inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), *inner, nn.Linear(8, 1))


class Inline(nn.Module):
    """A hidden layer, anything, a read-out."""

    def __init__(self, fn: object, width: int = 8, out: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.fn = nn.Linear(3, width), nn.Linear(out, 1), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.fn(self.a(x)))  # type: ignore[operator]


def test_cosine_and_sum() -> None:
    x, k = points(), tg.infinite_ntk(mlp(nn.ReLU()))
    full = k(x)
    want = full / (full.diagonal()[:, None] * full.diagonal()).sqrt()
    torch.testing.assert_close(tg.cosine(k)(x), want)
    torch.testing.assert_close(tg.cosine(k)(x, x[:2]), want[:, :2])
    torch.testing.assert_close(tg.sum(k, tg.scale(k, 2.0))(x), 3 * full)
    torch.testing.assert_close(tg.cosine(tg.sum(k, tg.scale(k, 2.0)))(x), want)


@pytest.mark.slow
def test_errors_of_draws() -> None:
    """None for closed forms; for softmax attention as large as other seeds scatter, and smaller with more samples."""
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    dense = tg.infinite_ntk(mlp(nn.Tanh()))
    assert float(dense.error(points()).max()) == 0
    net = inf.Serial(inf.Linear(w_var=1.0), inf.SelfAttention(qk_var=4.0), inf.GlobalAvgPool(-1), inf.Linear(w_var=1.0))
    few, many = (tg.infinite_ntk(net, samples=s) for s in (64, 4096))
    assert float(few.error(x).max()) > 3 * float(many.error(x).max()) > 0
    gap = (few(x) - many(x)).abs() / few.error(x)
    assert 0.05 < float(gap.square().mean().sqrt()) < 3
    with pytest.raises(InputError, match="repeats=1"):
        few.error(x, repeats=1)


def test_trained_slopes() -> None:
    """PReLU with a slope for each channel: ∂/∂slope is min(x, 0)."""
    x = points()
    net = mlp(nn.PReLU(8))
    weights = tg.infinite_ntk(net, trainable=["0", "2"])(x)
    torch.testing.assert_close(weights, tg.infinite_ntk(mlp(nn.LeakyReLU(0.25)))(x))
    cov = tg.infinite_nngp(nn.Linear(3, 8))(x)
    p = cov.diagonal()
    below = 2.0 * inf.ABRelu(1.0, 0.0).both(cov, p[:, None], p[None])[0]
    torch.testing.assert_close(tg.infinite_ntk(net)(x) - weights, below, rtol=1e-7, atol=1e-7)
    with pytest.raises(UnsupportedModule, match="one slope for all channels"):
        tg.infinite_ntk(mlp(nn.PReLU()))(x)
    frozen = mlp(nn.PReLU())
    torch.testing.assert_close(tg.infinite_ntk(frozen, trainable=["0", "2"])(x), weights)


def test_scale_of_each_channel() -> None:
    """LayerScale: γ ⊙ h with γ = 0.5; its derivative is h."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.gamma = nn.Linear(3, 8), nn.Linear(8, 1), nn.Parameter(torch.full((8,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.gamma * self.a(x))

    x = points()
    cov = tg.infinite_nngp(nn.Linear(3, 8))(x)
    nngp, ntk = tg.infinite_ntk(Scaled()).both(x)
    torch.testing.assert_close(nngp, 2 * cov / 4)
    torch.testing.assert_close(ntk, 2 * cov / 4 + 2 * (cov / 4 + cov))  # read-out; below it weights and γ


def test_parts_of_the_channels_gate_one_another() -> None:
    x = points()

    def gate(h: Tensor) -> Tensor:
        a, b = h.chunk(2, dim=1)
        return a * torch.sigmoid(b)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x) * torch.sigmoid(self.b(x)))

    want = tg.infinite_ntk(Two()).both(x)
    for fn in (gate, lambda h: F.glu(h, 1)):
        for got, right in zip(tg.infinite_ntk(Inline(fn, 16)).both(x), want, strict=True):
            torch.testing.assert_close(got, right)


def test_sampled_sums_tend_to_closed_forms() -> None:
    """relu(a) + relu(b) of independent a, b: E over both, with the product of the means; good to 1e-3."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.relu(self.a(x)) + torch.relu(self.b(x)))

    x = points()
    cov = tg.infinite_nngp(nn.Linear(3, 8))(x)
    p = cov.diagonal()
    value, slope = inf.Relu().both(cov, p[:, None], p[None])
    mean = inf.Relu().mean(p)
    k = tg.infinite_ntk(Both(), samples=16384)
    nngp, ntk = k.both(x)
    torch.testing.assert_close(nngp, 2 * (2 * value + 2 * mean[:, None] * mean), rtol=2e-3, atol=2e-3)
    assert slope is not None
    torch.testing.assert_close(ntk - nngp, 2 * 2 * slope * cov, rtol=3e-3, atol=3e-3)
    # symmetric in the two samples to the last digits, as every point comes with its mirror image
    torch.testing.assert_close(k(x[:2], x[2:]), k(x[2:], x[:2]).T, rtol=1e-12, atol=1e-12)


def test_samples_must_not_mix() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x - x.mean(0))

    with pytest.raises(ModelError, match="depends on the others of its batch"):
        tg.infinite_ntk(Centred())(points())


def test_the_users_module_stays_as_it_is() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3, affine=False).eval(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    before = {k: (v.dtype, v.clone()) for k, v in net.state_dict().items()}
    names = set(vars(net))
    tg.infinite_ntk(net)(points())
    assert set(vars(net)) == names
    for k, v in net.state_dict().items():
        assert v.dtype == before[k][0]
        assert torch.equal(v, before[k][1])


def test_samples_one_by_one_go_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooled net's diagonal needs all pairs of positions of a sample, so only some samples are held at a time."""
    from tangency.infinite.moments import recursion

    x = torch.randn(7, 2, 4, 4, dtype=torch.float64)
    pooled = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 2), nn.ReLU())
    k = tg.infinite_ntk(nn.Sequential(*pooled, nn.Flatten(), nn.Linear(8, 1)))
    whole = k.diag(x), k(x)
    sizes: list[int] = []
    run = recursion.propagate

    def watched(p: object, pairs: recursion.Pairs, *args: object, **options: object) -> object:
        sizes.append(pairs.a.size)
        return run(p, pairs, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(recursion, "SINGLES", 3 * 8 * 16 * 16)
    monkeypatch.setattr(recursion, "propagate", watched)
    parts = k.diag(x), k(x)
    assert max(sizes) == 3
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
