"""Activations of values that are not Gaussian: gates with shortcuts, upsampled branches, depthwise layers of tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ask import Ask
from torch import Tensor, nn

import tangency as tg
from tangency.infinite.finite import Scaled, scales

OUT = 4


def images(n: int = 2, size: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed)).double()


def conv(i: int, width: int, size: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(i, width, size, padding=size // 2, bias=False, **options), nn.BatchNorm2d(width)
    )  # fmt: skip


def excited(width: int) -> nn.Module:
    """A block of SE-ResNet after a max-pooled stem: ReLU(u·gate + shortcut), the gate the same at all positions."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(s.stem(x)), 3, 2, 1)
        u = s.a(h)
        gate = s.up(F.relu(s.down(u.mean((2, 3), keepdim=True))))
        h = F.relu(u * torch.sigmoid(gate) + h)
        return s.out(h.mean((2, 3)))

    gates = {"down": nn.Conv2d(width, width, 1), "up": nn.Conv2d(width, width, 1)}
    return Ask(forward, stem=conv(3, width), a=conv(width, width), **gates, out=nn.Linear(width, OUT))


def fused(width: int) -> nn.Module:
    """A fusion of HRNet: ReLU(ReLU(u) + upsampled z), norms right before both."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.relu(s.stem(x))
        low = F.interpolate(s.low(h), scale_factor=2, mode="nearest")
        return s.out(F.relu(F.relu(s.high(h)) + low).mean((2, 3)))

    low = conv(width, width, 3, stride=2)
    return Ask(forward, stem=conv(3, width), high=conv(width, width), low=low, out=nn.Linear(width, OUT))


def tokens(width: int) -> nn.Module:
    """The feed-forward part of SegFormer: tokens as an image, a depthwise convolution, tokens again, GELU."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x.flatten(2).transpose(1, 2))
        h = s.deep(h.transpose(1, 2).view(len(x), width, 3, 3)).flatten(2).transpose(1, 2)
        return s.out(s.b(F.gelu(h)).mean(1))

    deep = nn.Conv2d(width, width, 3, padding=1, groups=width)
    return Ask(forward, a=nn.Linear(3, width), deep=deep, b=nn.Linear(width, width), out=nn.Linear(width, OUT))


def padded(width: int) -> nn.Module:
    """A depthwise layer with TensorFlow's padding: zeros on one side, by F.pad."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.relu6(s.stem(x))
        h = F.relu6(s.deep(F.pad(h, (0, 1, 0, 1))))
        return s.out(s.b(h).mean((2, 3)))

    deep = nn.Sequential(nn.Conv2d(width, width, 3, 2, groups=width, bias=False), nn.BatchNorm2d(width))
    return Ask(forward, stem=conv(3, width, 1), deep=deep, b=nn.Conv2d(width, width, 1), out=nn.Linear(width, OUT))


CASES: dict[str, tuple[Callable[[int], nn.Module], int, int, int]] = {  # network, size of images, width, nets
    "gate and shortcut": (excited, 4, 96, 12),
    "upsampled branch": (fused, 4, 96, 12),
    "depthwise over tokens": (tokens, 3, 96, 12),
    "TensorFlow's padding": (padded, 4, 96, 12),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_mean_over_networks(name: str) -> None:
    """NTK, and NNGP as the tangent kernel of the last layer alone, which finite networks have with less noise."""
    factory, size, width, nets = CASES[name]
    x = images(3, size)
    k = tg.infinite_ntk(factory(width).eval(), b_var=0.1, samples=1024)
    other = tg.infinite_ntk(factory(width).eval(), b_var=0.1, samples=1024, seed=1)
    wanted, again = k.both(x), other.both(x)
    torch.testing.assert_close(k(x[:1], x[1:]), wanted.ntk[:1, 1:], rtol=1e-9, atol=1e-9)
    module = factory(width).eval().double()
    full = scales(module, w_var=2.0, b_var=0.1)
    last = {name: v if name.startswith("out.") else 0.0 * v for name, v in full.items()}
    found: dict[str, list[Tensor]] = {"nngp": [], "ntk": []}
    for which, scale in (("ntk", full), ("nngp", last)):
        kernel = Scaled.of(module, x, scale)
        for seed in range(nets):
            tg.infinite.draw(module, seed=seed, w_var=2.0, b_var=0.1)
            now = kernel.prepare(x)
            found[which].append(kernel.between(now, now))
    for which in ("nngp", "ntk"):
        drawn, exact = torch.stack(found[which]), getattr(wanted, which)
        doubt = (exact - getattr(again, which)).abs()
        error = (drawn.var(0) / nets + doubt**2).sqrt()
        assert float(((drawn.mean(0) - exact) / error).abs().max()) < 4
        assert float(error.max() / exact.max()) < 0.12  # enough networks to tell


def deep(*layers: nn.Module) -> nn.Module:
    filters = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.LeakyReLU(0.2), filters, *layers, nn.Flatten(), nn.Linear(128, 1))


def test_known_moments_correct_the_draws() -> None:
    """What is linear after a depthwise layer has its exact moments, however few the draws."""
    x, y = images(), images(3, seed=1)
    options: dict[str, Any] = {"b_var": 0.3, "samples": 8}
    plain = tg.infinite_ntk(deep(), **options)
    wide = tg.infinite_ntk(deep(nn.LeakyReLU(1.0)), **options)
    for other in (None, y):
        for a, b in zip(wide.both(x, other), plain.both(x, other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    # ReLU of a symmetric value has half its second moment.
    after = tg.infinite_nngp(deep(nn.ReLU()), b_var=0.0, samples=8)
    before = tg.infinite_nngp(deep(), b_var=0.0)
    torch.testing.assert_close(2 * after.diag(x), before.diag(x), rtol=1e-9, atol=1e-9)


def test_one_sample_is_positive_semidefinite() -> None:
    """Moments of all windows of one sample are means of outer products, however few the draws."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.MaxPool2d(2, 1), nn.Conv2d(8, 1, 1))
    for v in tg.infinite_ntk(model, samples=8).both(images(1)):
        square = v.reshape(9, 9)
        assert torch.equal(square, square.T)
        assert float(torch.linalg.eigvalsh(square).min()) > -1e-9


def test_an_activation_after_upsampling_a_norm() -> None:
    """A scale of each channel's own passes through what mixes positions alone: exact, not drawn."""
    layers = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Upsample(scale_factor=2), nn.ReLU(), nn.Flatten()]
    up = nn.Sequential(*layers, nn.Linear(8 * 64, 1)).eval()
    plain = nn.Sequential(*layers[:2], nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 1)).eval()
    for a, b in zip(tg.infinite_ntk(up).both(images()), tg.infinite_ntk(plain).both(images()), strict=True):
        torch.testing.assert_close(a, b)
