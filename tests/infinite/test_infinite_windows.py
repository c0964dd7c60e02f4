"""Functions of windows: max pooling, activations after depthwise convolutions, BatchNorm over positions."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ask import Ask
from torch import Tensor, nn

import tangency as tg
from tangency.errors import InputError, UnsupportedModule
from tangency.infinite.finite import Scaled, scales
from tangency.infinite.moments.batchdraws import drawn_normalized
from tangency.infinite.moments.batchnorm import normalized, slopes
from tangency.infinite.moments.depthwise import _entries
from tangency.infinite.moments.positions import Window
from tangency.infinite.moments.windows import Windows
from tangency.infinite.reading.windows import _sliding

OUT = 4


def series(n: int = 3, c: int = 4, size: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, c, size, generator=torch.Generator().manual_seed(seed)).double()


def images(n: int = 2, size: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed)).double()


def pooled(*pool: nn.Module, c: int = 4) -> nn.Sequential:
    """Gaussian values at each position, independent of one another given orthogonal inputs; then pooling."""
    return nn.Sequential(nn.Conv1d(c, 8, 1, bias=False), *pool, nn.Flatten(), nn.LazyLinear(1, bias=False))


def kernels(model: nn.Module, x: Tensor, y: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    model(x[:1].float())
    return tg.infinite_ntk(model, w_var=1.0, **options).both(x, y)


def max_of_two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments after max pooling over pairs of positions, by max(a, b) = (a + b + |a − b|)/2 (Clark 1961)."""

    def cov(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("ncp,mcp->pnm", a, b) / x.shape[1]

    def own(a: Tensor) -> Tensor:
        return a.square().mean(1).T

    s, t = x[..., ::2] + x[..., 1::2], y[..., ::2] + y[..., 1::2]
    d, e = x[..., ::2] - x[..., 1::2], y[..., ::2] - y[..., 1::2]
    scale = (own(d)[:, :, None] * own(e)[:, None]).sqrt()
    rho = (cov(d, e) / scale).clamp(-1, 1)
    absolute = 2 / math.pi * scale * ((1 - rho**2).sqrt() + rho * rho.asin())
    nngp = (cov(s, t) + absolute) / 4
    # Slopes are (1 ± sgn d)/2, the tangent kernel of the linear layer before is its covariance.
    ntk = (cov(s, t) + 2 / math.pi * rho.asin() * cov(d, e)) / 4
    return nngp.mean(0), (nngp + ntk).mean(0)


def test_max_of_two_is_clark() -> None:
    x, y = series(), series(2, seed=1)
    for other in (None, y):
        found = kernels(pooled(nn.MaxPool1d(2)), x, other)
        wanted = max_of_two(x, x if other is None else other)
        for a, b in zip(found, wanted, strict=True):
            assert float((a - b).abs().max() / b.abs().max()) < 5e-3
    # With more points the distance falls; the mean over seeds, for a single one may be lucky.
    near, far = (
        sum(
            float((kernels(pooled(nn.MaxPool1d(2)), x, samples=n, seed=s)[1] - max_of_two(x, x)[1]).abs().max())
            for s in range(3)
        )
        for n in (1 << 15, 1 << 9)
    )
    assert near < far / 4


def test_maxima_of_independent_values_are_order_statistics() -> None:
    # Positions have channels of their own, so values are independent; the second sample has others still.
    x = math.sqrt(6) * torch.eye(6).double().view(1, 6, 6)
    x = torch.cat([x[..., :3], x[..., 3:]])
    nngp, _ = kernels(pooled(nn.MaxPool1d(3), c=6), x, samples=1 << 14)
    second, first = 1 + math.sqrt(3) / (2 * math.pi), 3 / (2 * math.sqrt(math.pi))
    wanted = torch.tensor([[second, first**2], [first**2, second]]).double()
    torch.testing.assert_close(nngp, wanted, rtol=5e-3, atol=0)


@pytest.mark.parametrize("pool", [nn.MaxPool1d(1), nn.MaxPool1d(3, 1, 1), nn.MaxPool1d(2, 2, dilation=2)])
def test_maxima_of_equal_values_are_the_values(pool: nn.Module) -> None:
    x = series()
    if pool.kernel_size > 1:
        x = x[..., :1].expand(-1, -1, 6).contiguous()
    for a, b in zip(kernels(pooled(pool), x), kernels(pooled(), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_activations_and_maxima_exchange() -> None:
    x = series()
    first = kernels(pooled(nn.Tanh(), nn.MaxPool1d(3, 2, 1)), x)
    second = kernels(pooled(nn.MaxPool1d(3, 2, 1), nn.Tanh()), x)
    relu = [kernels(pooled(*order), x) for order in ((nn.ReLU(), nn.MaxPool1d(2)), (nn.MaxPool1d(2), nn.ReLU()))]
    for one, other in ((first, second), relu):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Gated(nn.Module):
    """Maxima times an activation of the same field, which is a function of windows of one position."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product
        self.first, self.out = nn.Conv1d(4, 8, 1, bias=False), nn.Linear(8 * 6, 1, bias=False)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.out(self.product(F.max_pool1d(h, 3, 1, 1), F.relu(h)).flatten(1))


def test_maxima_are_multiplied_by_activations_of_their_field() -> None:
    wanted = kernels(Gated(lambda m, e: m * F.max_pool1d(e, 1, 1)), series())
    for product in (lambda m, e: m * e, lambda m, e: e * m):
        for a, b in zip(kernels(Gated(product), series()), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_maxima_of_maxima() -> None:
    x = series(size=8)
    twice = kernels(pooled(nn.ReLU(), nn.MaxPool1d(3, 1, 1), nn.MaxPool1d(3, 1, 1)), x)
    for a, b in zip(twice, kernels(pooled(nn.ReLU(), nn.MaxPool1d(5, 1, 2)), x), strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0)  # the same windows, in another order of the points


def test_adaptive_means_of_unequal_windows() -> None:
    x = series(size=5)
    for a, b in zip(
        kernels(pooled(nn.AdaptiveAvgPool1d(3)), x), kernels(pooled(), F.adaptive_avg_pool1d(x, 3)), strict=True
    ):
        torch.testing.assert_close(a, b)  # a convolution over single positions and a mean exchange


@pytest.mark.parametrize("options", [(3, 2, 1, 1), (2, 2, 0, 1), (2, 1, 1, 2), (3, 3, 1, 1)])
@pytest.mark.parametrize("up", [False, True])
def test_windows_are_torch_s(options: tuple[int, int, int, int], up: bool) -> None:
    x = images(1, 7)[0, :1]
    seen = Windows.along((7, 7), [_sliding(7, *options, up)] * 2)
    got = x.flatten()[torch.tensor(seen.index)].amax(1).view(seen.grid)
    torch.testing.assert_close(got, F.max_pool2d(x, *options, ceil_mode=up)[0])


@pytest.mark.parametrize("circular", [False, True])
def test_filters_are_torch_s(circular: bool) -> None:
    x, w = images(1, 5)[:, :1], images(1, 3, seed=1)[0, :1]
    seen, numbers = _entries((5, 5), Window((3, 3), (2, 2), ((1, 1),) * 2, (1, 1), circular))
    index = torch.tensor(numbers.index)
    weights = w.flatten()[index.clamp(min=0)] * (index >= 0)
    got = (x.flatten()[torch.tensor(seen.index)] * weights).sum(1).view(seen.grid)
    padded = F.pad(x, (1,) * 4, mode="circular" if circular else "constant")
    torch.testing.assert_close(got, F.conv2d(padded, w[None], stride=2)[0, 0])


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda h: F.max_pool1d(h, 3),
    "amax": lambda h: h.amax(2, keepdim=True),
    "max": lambda h: h.max(dim=2, keepdim=True)[0],
    "values": lambda h: torch.max(h, 2, keepdim=True).values,
    "adaptive": lambda h: F.adaptive_max_pool1d(h, 1),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    x, pool = series(size=3), SPELLINGS[name]
    a, b = nn.Conv1d(4, 8, 1, bias=False), nn.Linear(8, 1, bias=False)
    model = Ask(lambda s, x: s.b(pool(s.a(x)).flatten(1)), a=a, b=b)
    for got, wanted in zip(kernels(model, x), kernels(pooled(nn.MaxPool1d(3)), x), strict=True):
        torch.testing.assert_close(got, wanted)


def test_depthwise_of_one_position() -> None:
    """ReLU(w u) is |w| ReLU(±u): its moments are those of ReLU times E[w²], and the filter's derivative is as large."""
    x = series()
    deep = nn.Sequential(
        nn.Conv1d(4, 8, 1, bias=False), nn.Conv1d(8, 8, 1, groups=8, bias=False), nn.ReLU(), nn.Flatten(),
        nn.Linear(48, 1, bias=False),
    )  # fmt: skip
    plain = nn.Sequential(nn.Conv1d(4, 8, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(48, 1, bias=False))
    nngp, ntk = kernels(plain, x)
    found = kernels(deep, x, samples=1 << 15)
    for a, b in zip(found, (nngp, ntk + nngp), strict=True):
        assert float((a - b).abs().max() / b.max()) < 0.02


def residual(width: int) -> nn.Module:
    """The stem of torchvision's ResNet with two blocks: ReLU(ReLU(max + z) + z')."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.pool(s.relu(s.bn(s.stem(x))))
        h = s.relu(h + s.a(h))
        h = torch.relu_(h + s.b(h))
        return s.out(h.mean((2, 3)))

    def conv(i: int) -> nn.Conv2d:
        return nn.Conv2d(i, width, 3, padding=1, bias=False)

    modules = {
        "stem": conv(3),
        "bn": nn.BatchNorm2d(width),
        "pool": nn.MaxPool2d(3, 2, 1),
        "relu": nn.ReLU(inplace=True),
    }
    return Ask(forward, **modules, a=conv(width), b=conv(width), out=nn.Linear(width, OUT))


def inverted(width: int) -> nn.Module:
    """A block of MobileNetV2."""
    return nn.Sequential(
        nn.Conv2d(3, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6(),
        nn.Conv2d(width, width, 3, 2, 1, groups=width, bias=False), nn.BatchNorm2d(width), nn.ReLU6(),
        nn.Conv2d(width, width, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(4 * width, OUT),
    )  # fmt: skip


def branches(width: int) -> nn.Module:
    """A node that an activation and max pooling read, and channels side by side that are pooled again."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        h = torch.cat([s.a(F.relu(h)), s.b(F.max_pool2d(h, 2, 1))[:, :, :, :]], 1)
        return s.out(F.max_pool2d(F.relu(h), 2, 1).flatten(1))

    a, b = nn.Conv2d(width, width, 2), nn.Conv2d(width, width, 1)
    return Ask(forward, stem=nn.Conv2d(3, width, 1), a=a, b=b, out=nn.Linear(2 * 4 * width, OUT))


CASES: dict[str, tuple[Callable[[int], nn.Module], int, int, int]] = {  # network, width, nets, samples
    "max pool in a post-activation ResNet": (residual, 96, 20, 1024),
    "depthwise, then ReLU6": (inverted, 128, 12, 1024),
    "branches": (branches, 128, 16, 1024),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_mean_over_networks(name: str) -> None:
    factory, width, nets, samples = CASES[name]
    x = images()
    k = tg.infinite_ntk(factory(8).eval(), b_var=0.1, samples=samples)
    exact, doubt = k(x), k.error(x, repeats=2)
    module = factory(width).eval().double()
    kernel, found = Scaled.of(module, x, scales(module, w_var=2.0, b_var=0.1)), []
    for seed in range(nets):
        tg.infinite.draw(module, seed=seed, w_var=2.0, b_var=0.1)
        now = kernel.prepare(x)
        found.append(kernel.between(now, now))
    drawn = torch.stack(found)
    error = (drawn.var(0) / nets + doubt**2).sqrt()
    assert float(((drawn.mean(0) - exact) / error).abs().max()) < 4
    assert float(error.max() / exact.max()) < 0.12  # enough networks to tell


def test_pairs_do_not_depend_on_what_is_beside_them() -> None:
    x, y = images(3), images(2, seed=1)
    model = residual(8).eval()
    k = tg.infinite_ntk(model, samples=64)
    gram, cross = k(x), k(x, y)
    torch.testing.assert_close(cross, k(y, x).T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(cross[1:2, 1:], k(x[1:2], y[1:]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gram.diagonal(), k.diag(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gram[0, 0], k(x[:1])[0, 0])
    # A sample with itself and with an equal one beside it.
    torch.testing.assert_close(k(x, x.clone()), gram, rtol=1e-5, atol=1e-5)
    narrow = tg.infinite_ntk(model, samples=64, dtype="float32")(x)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), gram, rtol=1e-4, atol=1e-4)
    assert bool((torch.linalg.eigvalsh(tg.infinite_ntk(model, samples=1024)(x)) > 0).all())


def test_kernels_go_to_other_processes() -> None:
    k = tg.infinite_ntk(inverted(8).eval(), samples=16)
    torch.testing.assert_close(pickle.loads(pickle.dumps(k))(images()), k(images()))


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.LazyLinear(1))


def of(fn: Callable[[Tensor], Any]) -> nn.Module:
    return Ask(lambda s, x: s.b(fn(s.a(x)).flatten(1)), a=nn.Conv2d(3, 8, 3, padding=1), b=nn.LazyLinear(1))


REFUSED: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "wide window": (lambda: flat(nn.MaxPool2d(9)), 9, r"1 \(MaxPool2d\).*81 positions.*nn\.AvgPool2d\(k\)"),
    "many windows": (lambda: flat(nn.MaxPool2d(2)), 70, r"1 \(MaxPool2d\).*1225 windows.*AvgPool2d"),
    "places": (lambda: of(lambda h: F.max_pool2d(h, 2, return_indices=True)[0]), 4, r"places|return_indices"),
    "over channels": (lambda: of(lambda h: h.amax(1)), 4, r"amax at .*\.py:\d+.*channels"),
    "of everything": (lambda: of(lambda h: h.amax()[None, None]), 4, r"amax at .*\.py:\d+.*dim="),
    "of everything, by max": (lambda: of(lambda h: torch.max(h)[None, None]), 4, r"max at .*\.py:\d+.*amax"),
    "after flatten": (lambda: flat(nn.Flatten(2), nn.MaxPool2d(2)), 4, r"2 \(MaxPool2d\).*pools 2 axes"),
    "of a mean": (
        lambda: flat(nn.ReLU(), nn.AvgPool2d(2), nn.MaxPool2d(2)),
        4,
        r"3 \(MaxPool2d\).*no function of Gaussian",
    ),
    "batch norm of many": (lambda: flat(nn.BatchNorm2d(8)), 48, r"BatchNorm2d.*4608 numbers|4608 numbers"),
    "batch norm after ReLU": (lambda: flat(nn.ReLU(), nn.BatchNorm2d(8)), 4, r"2 \(BatchNorm2d\).*eval"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    model, size, message = REFUSED[name]
    with pytest.raises(UnsupportedModule, match=message):
        built, x = model(), images(2, size)
        built(x.float())
        tg.infinite_ntk(built)(x)


def test_gradients_of_inputs_are_refused() -> None:
    model = pooled(nn.MaxPool1d(2))
    model(series().float())
    with pytest.raises(InputError, match="detach"):
        tg.infinite_ntk(model)(series().requires_grad_())


def test_batch_norm_of_few_directions_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    with pytest.raises(InputError, match="rank 2"):
        tg.infinite_ntk(model)(series(5, 2, 1)[..., 0])
    assert bool(tg.infinite_nngp(model)(series(5, 2, 1)[..., 0]).isfinite().all())


def test_drawn_batch_norm_is_the_exact_one() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 6, 8, generator=generator).double()
    cov, theta = a @ a.T, b @ b.T
    drawn = drawn_normalized(cov, theta, torch.relu, 0.1, 1 << 15, 0)
    exact = normalized(cov, theta, relu=True, eps=0.1)
    wanted = (exact.cov, exact.ntk, exact.cov, slopes(cov, relu=True))
    for got, want in zip(drawn, wanted, strict=True):
        assert float((got - want).abs().max() / want.abs().max()) < 5e-3


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_batch_norm_over_positions(activation: Callable[[], nn.Module]) -> None:
    """The finite network's Jacobian is taken of the whole batch at once, for its statistics couple the samples."""
    x, nets, width = images(2, 3), 16, 256

    def net(width: int) -> nn.Module:
        norm = nn.BatchNorm2d(width, track_running_stats=False)
        return nn.Sequential(
            nn.Conv2d(3, width, 2), norm, activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, OUT)
        )

    exact = tg.infinite_ntk(net(8), samples=8192)(x)
    module, found = net(width).double(), []
    scale = scales(module, w_var=2.0, b_var=0.0)
    for seed in range(nets):
        tg.infinite.draw(module, seed=seed, b_var=0.0)
        params = {k: v.detach() for k, v in module.named_parameters()}
        jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(module, p, (x,)))(params)
        rows = {k: j.reshape(2, OUT, -1) for k, j in jacobian.items()}
        found.append(sum(scale[k] * torch.einsum("ncp,mcp->nm", j, j) / OUT for k, j in rows.items()))
    drawn = torch.stack(found)
    error = drawn.std(0) / nets**0.5
    assert float(((drawn.mean(0) - exact) / error).abs().max()) < 4
    assert float(error.max() / exact.max()) < 0.1
