"""Ordinary user modules, unchanged, against a plain recursion over positions and the same net written otherwise."""

import json
import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import shape_checks
import torch
import torch.nn.functional as F
from ask import Ask
from torch import Tensor, nn

import tangency as tg
from tangency.errors import InputError, TangencyError, TangencyWarning, UnsupportedModule
from tangency.estimators import KernelRegressor
from tangency.infinite import Twin
from tangency.infinite.layers.initial import detect_init

# A plain recursion: K and Θ of all pairs of samples and positions, [n, s, n, s].


class Moments:
    """K and Θ over samples and positions; every layer in the obvious way."""

    def __init__(self, x: Tensor, channel: int) -> None:
        moved = x.double().movedim(channel, -1)  # [n, *grid, c]
        self.grid = tuple(moved.shape[1:-1])
        flat = moved.reshape(len(x), -1, moved.shape[-1])
        self.k = torch.einsum("isc,jtc->isjt", flat, flat) / flat.shape[-1]
        self.t = torch.zeros_like(self.k)

    def affine(self, w_var: float = 2.0, b_var: float = 0.0) -> "Moments":
        self.t = w_var * self.k + b_var + w_var * self.t
        self.k = w_var * self.k + b_var
        return self

    def conv(
        self, size: int, stride: int = 1, pad: int = 0, dilation: int = 1, circular: bool = False, **var: float
    ) -> "Moments":
        dims = len(self.grid)
        out = tuple((n + 2 * pad - dilation * (size - 1) - 1) // stride + 1 for n in self.grid)
        self.k, self.t = (
            _windows(v, self.grid, out, product(range(size), repeat=dims), stride, pad, dilation, circular) / size**dims
            for v in (self.k, self.t)
        )
        self.grid = out
        return self.affine(**var)

    def relu(self) -> "Moments":
        p = torch.einsum("isis->is", self.k)
        a, b = p[:, :, None, None], p[None, None]
        cos = (self.k / (a * b).sqrt().clamp(min=1e-300)).clamp(-1, 1)
        theta = cos.acos()
        self.t = self.t * (math.pi - theta) / (2 * math.pi)
        self.k = (a * b).sqrt() * (theta.sin() + (math.pi - theta) * cos) / (2 * math.pi)
        return self

    def act(self, fn: Callable[[Tensor], Tensor]) -> "Moments":
        """Any smooth function, by the trapezoidal rule in two dimensions."""
        z = torch.linspace(-10, 10, 101, dtype=torch.float64)
        w = torch.exp(-z * z / 2)
        w = w / w.sum()
        p = torch.einsum("isis->is", self.k)
        a, b = (v.expand_as(self.k) for v in (p[:, :, None, None], p[None, None]))
        rho = (self.k / (a * b).sqrt()).clamp(-1, 1)[..., None, None]
        u = (a.sqrt()[..., None, None] * z[:, None]).expand(*rho.shape[:-2], 101, 101)
        v = b.sqrt()[..., None, None] * (rho * z[:, None] + (1 - rho**2).clamp(min=0).sqrt() * z)
        weight = w[:, None] * w
        self.t = self.t * (_slope(fn, u) * _slope(fn, v) * weight).sum((-1, -2))
        self.k = (fn(u) * fn(v) * weight).sum((-1, -2))
        return self

    def positions(self, module: nn.Module) -> "Moments":
        """What acts on each channel alike (pooling), by its matrix."""
        size = math.prod(self.grid)
        out: Tensor = module(torch.eye(size, dtype=torch.float64).reshape(size, 1, *self.grid))
        self.grid = tuple(out.shape[2:])
        p = out.reshape(size, -1).T
        self.k, self.t = (torch.einsum("as,isjt,bt->iajb", p, v, p) for v in (self.k, self.t))
        return self

    def flat(self) -> "Moments":
        self.k, self.t = (torch.einsum("isjs->ij", v)[:, None, :, None] / v.shape[1] for v in (self.k, self.t))
        self.grid = ()
        return self

    def mean(self) -> "Moments":
        self.k, self.t = (v.mean((1, 3), keepdim=True) for v in (self.k, self.t))
        self.grid = ()
        return self

    def plus(self, other: "Moments") -> "Moments":
        self.k, self.t = self.k + other.k, self.t + other.t
        return self

    def copy(self) -> "Moments":
        new = object.__new__(Moments)
        new.k, new.t, new.grid = self.k, self.t, self.grid
        return new

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        return self.k[:, 0, :, 0], self.t[:, 0, :, 0]


def _slope(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(fn(x).sum(), x)[0]


def _windows(
    v: Tensor, grid: tuple[int, ...], out: tuple[int, ...], offsets: Any, stride: int, pad: int, dil: int, circ: bool
) -> Tensor:
    """Σ over offsets of v at both positions moved by it; explicit, with zero or periodic borders."""
    total = v.new_zeros(v.shape[0], math.prod(out), v.shape[2], math.prod(out))
    for offset in offsets:
        into, from_ = [], []
        for k, s in enumerate(product(*map(range, out))):
            place = [stride * a + dil * d - pad for a, d in zip(s, offset, strict=True)]
            if circ:
                place = [a % n for a, n in zip(place, grid, strict=True)]
            if all(0 <= a < n for a, n in zip(place, grid, strict=True)):
                into.append(k)
                from_.append(int(np.ravel_multi_index(place, grid)))
        if into:
            i, f = torch.tensor(into), torch.tensor(from_)
            total[:, i[:, None, None], torch.arange(v.shape[2])[None, :, None], i[None, None]] += v[
                :, f[:, None, None], torch.arange(v.shape[2])[None, :, None], f[None, None]
            ]
    return total


# The users' modules


class Functional(nn.Module):
    """Layers as attributes, activations as functions, in three spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        x = torch.relu(self.b(x))
        return self.d(self.c(x).relu())


class ResidualMLP(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(8, 8)) for _ in range(depth))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


class PreBlock(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(i, o, 1, stride, bias=False) if stride > 1 or i != o else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(x)
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv2(F.relu(self.conv1(out)))
        out += shortcut
        return out


class PreResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.layers = nn.Sequential(PreBlock(4, 4, 1), PreBlock(4, 8, 2))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.layers(self.stem(x)))
        return self.fc(out.mean((2, 3)))


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.grow = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)
        self.mix, self.head = nn.Conv2d(9, 4, 1), nn.Linear(4 * 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = torch.cat([h, self.grow(torch.relu(h))], dim=1)
        h = self.mix(torch.relu(h))
        return self.head(h.view(h.size(0), -1))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.three, self.five = (
            nn.Conv2d(2, 4, 1),
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Conv2d(2, 8, 5, padding=2),
        )
        self.act, self.pool, self.head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat((self.act(self.one(x)), self.act(self.three(x)), self.act(self.five(x))), 1)
        return self.head(self.pool(out).flatten(1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * torch.sigmoid(self.b(x)))


class Inline(nn.Module):
    """An activation written out."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.fn = nn.Linear(3, 8), nn.Linear(8, 1), fn

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.fn(h))


def inline_swish(h: Tensor) -> Tensor:
    return h * torch.sigmoid(h)


def inline_gelu(h: Tensor) -> Tensor:
    return 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))


def inline_sigmoid(h: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-h))


def scaled_swish(h: Tensor) -> Tensor:
    return h * torch.sigmoid(1.7 * h)


class ViT(nn.Module):
    def __init__(self, dim: int = 8, positions: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, dim, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.position = nn.Parameter(0.5 * torch.randn(1, positions + 1, dim))
        layer = nn.TransformerEncoderLayer(dim, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder, self.norm = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], 1) + self.position
        return self.head(self.norm(self.encoder(h))[:, 0])


class Recurrent(nn.Module):
    def __init__(self, how: str, **options: Any) -> None:
        super().__init__()
        self.rnn, self.how = nn.RNN(3, 8, batch_first=True, **options), how
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, h = self.rnn(x)
        if self.how == "last":
            return self.head(out[:, -1])
        if self.how == "mean":
            return self.head(out.mean(dim=1))
        if self.how == "both":
            return self.head(torch.cat([h[-2], h[-1]], dim=1))
        return self.head(h[-1])


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        h = torch.relu(adj @ self.a(x))
        return self.b(torch.bmm(adj, h).mean(1))


class Bag(nn.Module):
    """The mean over tokens that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(6, 8, padding_idx=0), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).float().unsqueeze(-1)
        h = torch.relu(self.hidden(self.embed(ids))) * mask
        return self.out(h.sum(1) / mask.sum(1).clamp(min=1))


class Switch(nn.Module):
    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.extra = extra
        self.layers = nn.ModuleList([nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            if k == 2 and not self.extra:
                continue
            x = F.relu(layer(x))
        return self.out(x)


class Normalized(nn.Module):
    """The input's mean and spread as buffers."""

    def __init__(self, mean: float, std: float, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([mean, 0.0, mean]), persistent=persistent)
        self.register_buffer("std", torch.tensor(std), persistent=persistent)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - self.mean) / self.std)


class Direct(nn.Module):
    """Parameters used directly, in the NTK parametrisation written out."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(50, 3))
        self.V = nn.Parameter(torch.randn(50, 1))
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.W.T if self.transposed else F.linear(x, self.W)
        return (torch.relu(h / 3**0.5) @ self.V) / 50**0.5


class Positions(nn.Module):
    """A learned table of positions, as a parameter, its slice, or an Embedding of constant indices."""

    def __init__(self, how: str, std: float = 1.0) -> None:
        super().__init__()
        self.a, self.o, self.how = nn.Linear(3, 8), nn.Linear(8, 1), how
        if how == "table":
            self.p = nn.Embedding(4, 800)
            self.a, self.o = nn.Linear(3, 800), nn.Linear(800, 1)
        else:
            # 9 positions are learned, 4 are used
            self.p = nn.Parameter(std * torch.randn(1, 9 if how == "slice" else 4, 800))
            self.a, self.o = nn.Linear(3, 800), nn.Linear(800, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "table":
            h = self.a(x) + self.p(torch.arange(4))
        elif self.how == "slice":
            h = self.a(x) + self.p[:, : x.size(1)]
        else:
            h = self.a(x) + self.p
        return self.o(torch.relu(h).mean(1))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(2, 4, 3, 2, 1), nn.ConvTranspose1d(4, 4, 4, 2, 1)
        self.out = nn.Conv1d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.up(F.relu(self.down(x)))))


class TextNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.out = nn.Embedding(7, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids).permute(0, 2, 1)
        return self.out(F.relu(self.conv(h)).mean(-1))


class PoolByFunction(nn.Module):
    """Pooling and dropout by torch.nn.functional, as many users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.avg_pool2d(F.relu(self.conv(x)), 2)
        h = F.adaptive_avg_pool2d(h, 1).view(h.size(0), -1)
        return self.fc(F.dropout(h, 0.5, self.training))


DENSE = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def points(n: int = 5, d: int = 3) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64)


def images(n: int = 3, c: int = 2, size: int = 4) -> Tensor:
    return torch.randn(n, c, size, size, dtype=torch.float64)


def close(a: Any, b: Any, rtol: float = 1e-9) -> None:
    a, b = (v if isinstance(v, tuple) else (v,) for v in (a, b))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol * float(y.detach().abs().max()) + 1e-14)


# Against the recursion


@pytest.mark.parametrize("b_var", [0.0, 0.3])
def test_dense_nets_follow_the_recursion(b_var: float) -> None:
    x = points()
    want = Moments(x, 1).affine(1.5, b_var).relu().affine(1.5, b_var).relu().affine(1.5, b_var).both
    nets = [DENSE, nn.Sequential(nn.Sequential(DENSE[0], DENSE[1]), nn.Sequential(nn.Sequential(*DENSE[2:])))]
    for net in nets:
        close(tg.infinite_ntk(net, w_var=1.5, b_var=b_var).both(x), want)
    more = (
        Moments(x, 1).affine(1.5, b_var).relu().affine(1.5, b_var).relu().affine(1.5, b_var).relu().affine(1.5, b_var)
    )
    close(tg.infinite_ntk(Functional(), w_var=1.5, b_var=b_var).both(x), more.both)
    close(tg.infinite_ntk(Switch(True), w_var=1.5, b_var=b_var).both(x), more.both)
    close(tg.infinite_ntk(Switch(False), w_var=1.5, b_var=b_var).both(x), want)


@pytest.mark.parametrize(
    ("module", "fn"),
    [
        (nn.Tanh(), torch.tanh),
        (nn.GELU(), F.gelu),
        (nn.SiLU(), F.silu),
        (nn.Sigmoid(), torch.sigmoid),
        (nn.Softplus(), F.softplus),
        (nn.Mish(), F.mish),
        (nn.GELU("tanh"), lambda v: F.gelu(v, approximate="tanh")),
    ],
)
def test_smooth_activations(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    x = points(3)
    net = nn.Sequential(nn.Linear(3, 8), module, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    want = Moments(x, 1).affine(1.2, 0.1).act(fn).affine(1.2, 0.1).relu().affine(1.2, 0.1).both
    close(tg.infinite_ntk(net, w_var=1.2, b_var=0.1).both(x), want, 1e-7)


def test_residual_mlp() -> None:
    x = points()
    m = Moments(x, 1).affine()
    for _ in range(2):
        m = m.copy().relu().affine().plus(m)
    close(tg.infinite_ntk(ResidualMLP()).both(x), m.affine().both)


def test_residual_around_the_input() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(x + self.b(torch.relu(self.a(x))))

    x = points()
    close(tg.infinite_ntk(Skip()).both(x), Moments(x, 1).affine().relu().affine().plus(Moments(x, 1)).affine().both)


def test_pre_activation_resnet() -> None:
    x = images()
    m = Moments(x, 1).conv(3, pad=1)
    m = m.copy().relu().conv(3, pad=1).relu().conv(3, pad=1).plus(m)
    short = m.copy().relu().conv(1, stride=2)
    m = m.relu().conv(3, stride=2, pad=1).relu().conv(3, pad=1).plus(short)
    close(tg.infinite_ntk(PreResNet()).both(x), m.relu().mean().affine().both)


def test_dense_block_and_inception_weigh_channels_by_their_number() -> None:
    x = images()
    a = Moments(x, 1).conv(3, pad=1)
    b = a.copy().relu().conv(3, pad=1)
    a, b = a.relu(), b.relu()
    a.k, a.t = (6 * a.k + 3 * b.k) / 9, (6 * a.t + 3 * b.t) / 9
    close(tg.infinite_ntk(DenseBlock()).both(x), a.conv(1).flat().affine().both)
    one, three, five = (Moments(x, 1).conv(k, pad=k // 2).relu() for k in (1, 3, 5))
    one.k, one.t = (one.k + three.k + 2 * five.k) / 4, (one.t + three.t + 2 * five.t) / 4
    close(tg.infinite_ntk(Inception()).both(x), one.mean().affine().both)


class Catted(nn.Module):
    """Channels joined, then moved to the last axis, then ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(2, 4, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.a(x), self.b(x)], 1).transpose(1, 2)
        return self.o(torch.relu(h).mean(1))


def test_joined_channels_may_be_moved() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    a, b = Moments(x, 1).conv(3, pad=1).relu(), Moments(x, 1).conv(1).relu()
    a.k, a.t = (a.k + b.k) / 2, (a.t + b.t) / 2
    close(tg.infinite_ntk(Catted()).both(x), a.mean().affine().both)


@pytest.mark.parametrize(
    ("stride", "pad", "dilation", "circular"), [(1, 0, 1, False), (2, 1, 1, False), (1, 2, 2, False), (1, 1, 1, True)]
)
def test_convolutions(stride: int, pad: int, dilation: int, circular: bool) -> None:
    x = images(2, 2, 5)
    conv = nn.Conv2d(2, 4, 3, stride, pad, dilation, padding_mode="circular" if circular else "zeros")
    options = {"stride": stride, "pad": pad, "dilation": dilation, "circular": circular, "b_var": 0.2}
    m = Moments(x, 1).conv(3, **options).relu()  # type: ignore[arg-type]
    for last, out in (
        (nn.Flatten(), m.copy().flat()),
        (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), m.mean()),
    ):
        net = nn.Sequential(conv, nn.ReLU(), last, nn.LazyLinear(1))
        net(x.float())
        close(tg.infinite_ntk(net, b_var=0.2).both(x), out.affine(2.0, 0.2).both)


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(2),
        nn.AvgPool2d(3, 2, 1),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d((1, 5)),
        nn.AdaptiveAvgPool2d((1, 5)),
        nn.AdaptiveAvgPool2d(1),
        nn.Upsample(scale_factor=2),
        nn.Upsample(size=(7, 10)),
    ],
)
@pytest.mark.every(3)
def test_pooling_between_convolutions(pool: nn.Module) -> None:
    x = images(2, 2, 5)
    m = Moments(x, 1).conv(3, pad=1).relu().positions(pool).conv(1).relu()
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), pool, nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten())
    net.append(nn.Linear(net(x.float()).shape[1], 1))
    close(tg.infinite_ntk(net).both(x), m.flat().affine().both)


def test_conv1d_conv3d_and_text() -> None:
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))
    close(tg.infinite_ntk(net).both(x), Moments(x, 1).conv(3).relu().conv(2).relu().flat().affine().both)
    x = torch.randn(2, 2, 3, 3, 3, dtype=torch.float64)
    net = nn.Sequential(nn.Conv3d(2, 4, 2, padding=1), nn.ReLU(), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(32, 1))
    want = Moments(x, 1).conv(2, pad=1).relu().positions(nn.AvgPool3d(2)).flat().affine().both
    close(tg.infinite_ntk(net).both(x), want)
    ids = torch.randint(7, (3, 5))
    one_hot = F.one_hot(ids, 7).double() * 7**0.5  # an Embedding is a linear layer without a factor 1/7
    want = Moments(one_hot, 2).affine().conv(3, pad=1).relu().mean().affine().both
    close(tg.infinite_ntk(TextNet()).both(ids), want)


def test_transposed_convolution_with_positions() -> None:
    """Against its matrix: the covariance at each position from the finite module's Jacobian's pattern."""
    x = torch.randn(2, 2, 5, dtype=torch.float64)
    m = Moments(x, 1).conv(3, stride=2, pad=1).relu()
    up = nn.ConvTranspose1d(1, 1, 4, 2, 1, bias=False).double()
    taps = []
    for k in range(4):  # the matrix of each tap alone
        with torch.no_grad():
            up.weight.zero_()[0, 0, k] = 1
            taps.append(up(torch.eye(3, dtype=torch.float64)[:, None])[:, 0].T)
    m.k, m.t = (sum(torch.einsum("as,isjt,bt->iajb", p, v, p) for p in taps) / 4 for v in (m.k, m.t))  # type: ignore[assignment]
    m.grid = (6,)
    want = m.affine().relu().affine()
    found = tg.infinite_ntk(Decoder())
    assert found(x).shape == (2, 6, 2, 6)
    close(found.both(x), (want.k, want.t))
    close(found.diag(x), torch.einsum("isis->is", want.t))


def test_segmentation_keeps_positions() -> None:
    x = images(3, 2, 3)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    want = Moments(x, 1).conv(3, pad=1).relu().conv(1)
    k = tg.infinite_ntk(net)
    close(k.both(x), (want.k, want.t))
    close(k(x[:1], x[1:]), want.t[:1, :, 1:])
    tg.testing.check_kernel(k, x)


def test_functional_pooling_and_dropout() -> None:
    x = images()
    want = Moments(x, 1).conv(3, pad=1).relu().mean().affine().both
    close(tg.infinite_ntk(PoolByFunction().eval()).both(x), want)


def test_recurrent_net_is_the_unrolled_recursion() -> None:
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    start = Moments(x, 2).k
    k, t = torch.zeros_like(start), torch.zeros_like(start)
    k_pre, t_pre = torch.zeros_like(start), torch.zeros_like(start)
    for s, u in product(range(4), repeat=2):  # h_s with h_u from h_{s-1} with h_{u-1}
        before = (k[:, s - 1, :, u - 1], t[:, s - 1, :, u - 1]) if s and u else (0.0, 0.0)
        base = 2.0 * start[:, s, :, u] + 2.0 * before[0] + 0.2
        k_pre[:, s, :, u], t_pre[:, s, :, u] = base, base + 2.0 * before[1]
        own = [torch.stack([k_pre[i, v, i, v] for i in range(3)]) for v in (s, u)]
        if s != u:
            own = [_rnn_variance(start, v) for v in (s, u)]
        cos = (base / (own[0][:, None] * own[1]).sqrt()).clamp(-1, 1)
        theta = cos.acos()
        k[:, s, :, u] = (own[0][:, None] * own[1]).sqrt() * (theta.sin() + (math.pi - theta) * cos) / (2 * math.pi)
        t[:, s, :, u] = t_pre[:, s, :, u] * (math.pi - theta) / (2 * math.pi)
    last = k[:, 3, :, 3]
    want = (2 * last + 0.1, 2 * last + 0.1 + 2 * t[:, 3, :, 3])
    for how in ("last", "h"):
        close(tg.infinite_ntk(Recurrent(how, nonlinearity="relu"), b_var=0.1).both(x), want)
    mean = k.mean((1, 3)), t.mean((1, 3))
    want = (2 * mean[0] + 0.1, 2 * mean[0] + 0.1 + 2 * mean[1])
    close(tg.infinite_ntk(Recurrent("mean", nonlinearity="relu"), b_var=0.1).both(x), want)


def _rnn_variance(start: Tensor, at: int) -> Tensor:
    p = torch.zeros(len(start), dtype=torch.float64)
    for s in range(at + 1):
        p = 2.0 * torch.einsum("ii->i", start[:, s, :, s]) + 0.2 + 2.0 * p / 2
        # ReLU halves the second moment, W doubles it again
    return p


def test_recurrent_nets_in_other_forms() -> None:
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    forward = tg.infinite_ntk(Recurrent("last")).both(x)
    back = tg.infinite_ntk(Recurrent("last")).both(x.flip(1))
    two = tg.infinite_ntk(Recurrent("both", bidirectional=True)).both(x)
    close(two, tuple((a + b) / 2 for a, b in zip(forward, back, strict=True)))
    close(
        tg.infinite_ntk(Recurrent("mean", bidirectional=True))(x),
        tg.infinite_ntk(Recurrent("mean", bidirectional=True))(x.flip(1)),
    )
    deep = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    close(tg.infinite_ntk(Recurrent("h", num_layers=2)).both(x[:, :1]), tg.infinite_ntk(deep).both(x[:, 0]), 1e-8)
    close(tg.infinite_ntk(Recurrent("h", num_layers=2))(x), tg.infinite_ntk(Recurrent("last", num_layers=2))(x))


def test_graph_net_with_two_inputs() -> None:
    x, adj = torch.randn(3, 4, 3, dtype=torch.float64), torch.rand(3, 4, 4, dtype=torch.float64)
    m = Moments(x, 2).affine()
    m.k, m.t = (torch.einsum("ias,isjt,jbt->iajb", adj, v, adj) for v in (m.k, m.t))
    m = m.relu()
    m.k, m.t = (torch.einsum("ias,isjt,jbt->iajb", adj, v, adj) for v in (m.k, m.t))
    k = tg.infinite_ntk(GCN())
    close(k.both((x, adj)), m.mean().affine().both)
    close(k({"adj": adj, "x": x}), k((x, adj)))
    tg.testing.check_kernel(k, (x, adj))
    alike = (x, torch.eye(4, dtype=torch.float64).expand(3, 4, 4))
    linear = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
    close(k(alike), Moments(x, 2).affine().relu().mean().affine().both[1])
    assert tg.infinite_ntk(linear)(x).shape == (3, 4, 3, 4)


def test_masked_mean_counts_each_samples_own_tokens() -> None:
    ids = torch.tensor([[1, 2, 0, 0], [3, 1, 2, 0], [2, 2, 1, 4], [5, 0, 0, 0]])
    full = F.one_hot(ids, 6).double() * 6**0.5
    mask = (ids != 0).double()
    m = Moments(full * mask[..., None], 2).affine().affine().relu()
    weight = mask / mask.sum(1, keepdim=True)
    m.k, m.t = (torch.einsum("is,isjt,jt->ij", weight, v, weight)[:, None, :, None] for v in (m.k, m.t))
    want = m.affine().both
    k = tg.infinite_ntk(Bag())
    close(k.both(ids), want)
    close(k(ids[:1], ids), want[1][:1])  # a batch of one
    close(k(ids[3:], ids[:1]), want[1][3:, :1])
    tg.testing.check_kernel(k, ids)


# Against the same net written otherwise


@pytest.mark.parametrize(
    ("inline", "module"), [(inline_swish, nn.SiLU()), (inline_gelu, nn.GELU()), (inline_sigmoid, nn.Sigmoid())]
)
def test_written_out_activations(inline: Callable[[Tensor], Tensor], module: nn.Module) -> None:
    x = points()
    whole = nn.Sequential(nn.Linear(3, 8), module, nn.Linear(8, 1))
    close(tg.infinite_ntk(Inline(inline), b_var=0.1).both(x), tg.infinite_ntk(whole, b_var=0.1).both(x), 1e-8)


def test_written_out_activations_with_a_factor_inside() -> None:
    x = points(3)
    want = Moments(x, 1).affine().act(scaled_swish).affine().both
    close(tg.infinite_ntk(Inline(scaled_swish)).both(x), want, 1e-7)
    leaky = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.5), nn.Linear(8, 1))  # relu(h) + h = 2·leaky(h)
    twice = tuple(4 * v for v in tg.infinite_ntk(leaky).both(x))
    close(tg.infinite_ntk(Inline(lambda h: torch.relu(h) + h)).both(x), twice, 1e-8)
    linear = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
    close(tg.infinite_ntk(Inline(lambda h: h + h)).both(x), tuple(4 * v for v in tg.infinite_ntk(linear).both(x)))
    close(tg.infinite_ntk(Inline(lambda h: h - h / 2)).both(x), tuple(v / 4 for v in tg.infinite_ntk(linear).both(x)))
    relu = tg.infinite_ntk(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))).both(x)
    close(tg.infinite_ntk(Inline(lambda h: torch.relu(2 * h) / 2)).both(x), relu)


def test_gated_unit_is_a_product() -> None:
    x = points(3)
    a, b = Moments(x, 1).affine(), Moments(x, 1).affine().act(torch.sigmoid)
    a.k, a.t = a.k * b.k, a.k * b.t + a.t * b.k
    close(tg.infinite_ntk(Gated()).both(x), a.affine().both, 1e-8)


def test_pointwise_convolution_is_a_linear_layer_at_each_position() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    conv = nn.Sequential(nn.Conv1d(4, 8, 1), nn.ReLU(), nn.Conv1d(8, 2, 1))
    dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    close(tg.infinite_ntk(conv).both(x), tg.infinite_ntk(dense).both(x.transpose(1, 2)))


def test_full_window_is_a_dense_net() -> None:
    x = images()
    conv = nn.Sequential(nn.Conv2d(2, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    dense = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1))
    close(tg.infinite_ntk(conv, b_var=0.1).both(x), tg.infinite_ntk(dense, b_var=0.1).both(x))


def test_flatten_and_pooling_in_several_spellings() -> None:
    class Last(nn.Module):
        def __init__(self, fn: Callable[[Tensor], Tensor], width: int) -> None:
            super().__init__()
            self.conv, self.head, self.fn = nn.Conv2d(2, 4, 3), nn.Linear(width, 1), fn

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.fn(torch.tanh(self.conv(x))))

    x = images()
    flats: list[Callable[[Tensor], Tensor]] = [
        lambda h: h.view(h.size(0), -1),
        lambda h: h.view(-1, 16),
        lambda h: h.flatten(1),
        lambda h: torch.flatten(h, start_dim=1),
        lambda h: h.reshape(h.shape[0], h.shape[1] * h.shape[2] * h.shape[3]),
        lambda h: h.flatten(2).transpose(1, 2).flatten(1),
        lambda h: h.permute(0, 2, 3, 1).contiguous().view(h.shape[0], -1),
    ]
    want = tg.infinite_ntk(Last(flats[0], 16)).both(x)
    for fn in flats[1:]:
        close(tg.infinite_ntk(Last(fn, 16)).both(x), want)
    means: list[Callable[[Tensor], Tensor]] = [
        lambda h: h.mean((2, 3)),
        lambda h: h.mean([-1, -2]),
        lambda h: h.mean(3).mean(2),
        lambda h: h.flatten(2).mean(-1),
        lambda h: torch.mean(h, dim=(2, 3), keepdim=True).flatten(1),
        lambda h: h.sum(dim=(2, 3)) / 4,
        lambda h: h.mean((2, 3), keepdim=True).squeeze(-1).squeeze(-1),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Sequential(nn.AvgPool2d(2), nn.Flatten()),
    ]
    want = tg.infinite_ntk(Last(means[0], 4)).both(x)
    for fn in means[1:]:
        close(tg.infinite_ntk(Last(fn, 4)).both(x), want)


def test_attention_of_one_position_is_two_linear_layers() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attn = nn.Linear(3, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            out, _ = self.attn(h, h, h, need_weights=False)
            return out.mean(1)

    x = torch.randn(4, 1, 3, dtype=torch.float64)
    linear = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    close(tg.infinite_ntk(Attend(), b_var=0.1, samples=8).both(x), tg.infinite_ntk(linear, b_var=0.1).both(x[:, 0]))
    same = x.expand(4, 3, 3)  # three equal positions: any attention gives the same
    close(tg.infinite_ntk(Attend(), b_var=0.1, samples=8).both(same), tg.infinite_ntk(linear, b_var=0.1).both(x[:, 0]))


@pytest.mark.slow
def test_vision_transformer() -> None:
    x = images(4, 2, 4)
    k = tg.infinite_ntk(ViT().eval(), samples=64)
    tg.testing.check_kernel(k, x, tolerance=1e-7)  # the token is the same in all samples: roots of singular matrices
    one = k.both(x)
    close(one, (tg.infinite_nngp(k.layer.source, samples=64)(x), k(x)))  # type: ignore[attr-defined]


def test_class_token_alone_does_not_see_the_input() -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c, self.o = nn.Linear(3, 800), nn.Parameter(torch.randn(1, 1, 800)), nn.Linear(800, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.cat([self.c.repeat(x.shape[0], 1, 1), self.a(x)], dim=1)
            return self.o(torch.relu(h[:, 0]))

    k = tg.infinite_ntk(Token())(torch.randn(3, 4, 3))
    close(k, torch.full((3, 3), float(k[0, 0]), dtype=torch.float64))


@pytest.mark.parametrize("how", ["whole", "slice", "table"])
def test_position_tables(how: str) -> None:
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    m = Moments(x, 2).affine()
    # the table's variance: 1 as drawn, or w_var for an Embedding
    var = 2.0 if how == "table" else 1.0
    eye = torch.eye(4, dtype=torch.float64)[None, :, None, :]
    m.k, m.t = m.k + var * eye, m.t + var * eye
    close(tg.infinite_ntk(Positions(how)).both(x), m.relu().mean().affine().both, 1e-8)


def test_norms() -> None:
    """A trained scale γ before ReLU adds E[relu(u) relu(v)], as ∂relu(γz)/∂γ = z·relu'(z) = relu(z); a shift adds 1."""
    x = points()
    m = Moments(x, 1).affine()
    p = torch.einsum("isis->is", m.k)[:, 0] + 1e-5
    scale = (p[:, None] * p).rsqrt()[:, None, :, None]
    m.k, m.t = m.k * scale, m.t * scale
    for norm, gamma, beta in (
        (nn.LayerNorm(8), 1, 1),
        (nn.LayerNorm(8, bias=False), 1, 0),
        (nn.LayerNorm(8, elementwise_affine=False), 0, 0),
        (nn.GroupNorm(1, 8, affine=False), 0, 0),
        (nn.GroupNorm(1, 8), 1, 1),
        (nn.RMSNorm(8, eps=1e-5), 1, 0),
        (nn.RMSNorm(8, eps=1e-5, elementwise_affine=False), 0, 0),
    ):
        want = m.copy()
        want.t = want.t + beta
        want = want.relu()
        want.t = want.t + gamma * want.k
        net = nn.Sequential(nn.Linear(3, 8), norm, nn.ReLU(), nn.Linear(8, 1))
        close(tg.infinite_ntk(net).both(x), want.affine().both)
        want = m.copy()
        want.t = want.t + beta + gamma * want.k  # followed by weights: the scale's derivative is the value itself
        close(tg.infinite_ntk(nn.Sequential(nn.Linear(3, 8), norm, nn.Linear(8, 1))).both(x), want.affine().both)


def test_group_norm_over_positions() -> None:
    x = images(3, 2, 3)
    m = Moments(x, 1).conv(3, pad=1)
    p = torch.einsum("isis->i", m.k) / 9 + 1e-5
    scale = (p[:, None] * p).rsqrt()[:, None, :, None]
    m.k, m.t = m.k * scale, m.t * scale
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(1, 4, affine=False), nn.ReLU(), nn.Flatten())
    close(tg.infinite_ntk(net.append(nn.Linear(36, 1))).both(x), m.relu().flat().affine().both)


def test_norm_of_the_input_is_computed_or_refused_by_name() -> None:
    x = points()
    plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    for norm in (nn.LayerNorm(3, elementwise_affine=False), nn.RMSNorm(3, elementwise_affine=False)):
        close(tg.infinite_ntk(nn.Sequential(norm, *plain)).both(x), tg.infinite_ntk(plain).both(norm(x)))
    for trained in (nn.LayerNorm(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.PReLU(), nn.GroupNorm(1, 3)):
        net = nn.Sequential(trained, *plain)
        with pytest.raises(UnsupportedModule, match=type(trained).__name__):
            tg.infinite_ntk(net)(x)


def test_dropout_in_both_modes() -> None:
    x = points()
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    plain = nn.Sequential(*(m for m in net if not isinstance(m, nn.Dropout)))
    close(tg.infinite_ntk(net.eval()).both(x), tg.infinite_ntk(plain).both(x))
    m = Moments(x, 1).affine().relu()
    for i in range(5):
        m.k[i, 0, i, 0] /= 0.75
        m.t[i, 0, i, 0] /= 0.75
    close(tg.infinite_ntk(net.train()).both(x), m.affine().relu().affine().both)


def test_buffers_normalise_the_input() -> None:
    x = points()
    net = Normalized(0.5, 2.0)
    shifted = (x - torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)) / 2
    close(tg.infinite_ntk(net).both(x), tg.infinite_ntk(net.net).both(shifted))


@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_used_directly(transposed: bool) -> None:
    """Standard normal weights with the factors 1/√d in forward: the NTK of the NTK parametrisation."""
    x = points()
    model = Direct(transposed).double()
    want = Moments(x, 1).affine(1.0).relu().affine(1.0).both
    for k in (
        tg.infinite_ntk(model, w_var="init"),
        tg.infinite_ntk(model, w_var={"W": 3.0, "V": 50.0}, parametrization="standard"),
    ):
        close(k.both(x), want)


def test_own_models_by_their_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_checks, "enabled", False)  # they would look at torch.fx's proxies
    x = points()
    close(
        tg.infinite_ntk(tg.models.mlp([3, 64, 64, 1], bias=False, parametrization="ntk"), w_var="init").both(x),
        Moments(x * 3**0.5, 1).affine(1.0).relu().affine(1.0).relu().affine(1.0).both,
    )
    two = tg.infinite_ntk(tg.models.two_layer(3, 64, torch.relu), w_var="init")
    assert two(x).shape == (5, 5)
    close(two.both(x), Moments(x, 1).affine(1.0).relu().affine(1.0).both)
    wide = points(5, 40)  # of fewer inputs, sums of uniform weights are not taken for Gaussian
    standard = tg.models.mlp([40, 64, 64, 1], bias=False)
    m = Moments(wide, 1)
    for width, act in ((40, True), (64, True), (64, False)):
        k = m.k.clone()
        m = m.affine(1 / 3)
        m.t = m.t - m.k + width * k  # the weights themselves move
        m = m.relu() if act else m
    with pytest.warns(TangencyWarning, match="excess kurtosis"):
        close(tg.infinite_ntk(standard, w_var="init").both(wide), m.both)
    images_ = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    small = tg.infinite_ntk(tg.models.small_cnn(size=8, width=4), w_var="init")
    with pytest.warns(TangencyWarning, match="excess kurtosis"):
        tg.testing.check_kernel(small, torch.cat([images_, images_[:1] * 2]))


# A kernel like all others


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (lambda: DENSE, points),
    "functional": (Functional, points),
    "tanh": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), points),
    "residual": (ResidualMLP, points),
    "resnet": (PreResNet, images),
    "dense block": (DenseBlock, images),
    "inception": (Inception, images),
    "gated": (Gated, points),
    "rnn": (lambda: Recurrent("mean", bidirectional=True), lambda: torch.randn(3, 2, 3)),
    "text": (TextNet, lambda: torch.randint(7, (4, 5))),
    "decoder": (Decoder, lambda: torch.randn(3, 2, 5)),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)), points),
    "direct": (Direct, points),
    "positions": (lambda: Positions("whole"), lambda: torch.randn(3, 4, 3)),
    "linear": (lambda: nn.Linear(3, 1), points),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(5)
def test_is_a_kernel(name: str) -> None:
    model, x = (make() for make in CASES[name])
    tg.testing.check_kernel(tg.infinite_ntk(model, b_var=0.1), x)
    tg.testing.check_kernel(tg.infinite_nngp(model), x)


def test_computed_in_tiles_and_workers(tmp_path: Path) -> None:
    x = images(7)
    k = tg.infinite_ntk(PreResNet())
    want = k(x)
    close(tg.compute(k, x, tile=3, progress=False).dense(), want)
    close(tg.compute(k, x, tile=3, store=tmp_path / "K", progress=False).dense(), want)
    with ThreadPoolExecutor(2) as pool:
        close(tg.compute(k, x, tile=3, executor=pool, progress=False).dense(), want)
    close(tg.compute(k, x, x[:4], tile=2, progress=False).dense(), want[:, :4])


def test_traces_of_several_threads_leave_modules_as_they_are() -> None:
    """fx replaces nn.Module.__call__ while it traces; two traces at once left one of theirs behind."""
    before, x = (nn.Module.__call__, nn.Module.__getattr__), points()
    nets = [nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(4)]
    halfway, go = Event(), Event()

    class Slow(nn.Module):
        def forward(self, x: Any) -> Any:
            halfway.set()
            assert go.wait(60)
            return x

    with ThreadPoolExecutor(6) as pool:
        slow = pool.submit(lambda: tg.infinite_ntk(nn.Sequential(nn.Linear(3, 8), Slow(), nn.Linear(8, 1)))(x))
        assert halfway.wait(60)
        others = [pool.submit(lambda n=n: tg.infinite_ntk(n)(x)) for n in nets]
        own = nets[0](x.float())  # a model of another thread, while fx traces
        assert isinstance(own, Tensor)
        go.set()
        assert slow.result(60).shape == (5, 5)
        for done in others:
            close(done.result(60), tg.infinite_ntk(nets[0])(x))
    assert before == (nn.Module.__call__, nn.Module.__getattr__)


def test_pickle_and_both() -> None:
    x = images()
    k = tg.infinite_ntk(PreResNet(), b_var=0.1, trainable="fc")
    again = pickle.loads(pickle.dumps(k))
    assert torch.equal(again(x), k(x))
    assert again.spec() == k.spec()
    nngp = tg.infinite_nngp(PreResNet(), b_var=0.1)
    close(k.both(x, x[:2]), (nngp(x, x[:2]), k(x, x[:2])))
    close(nngp.both(x)[0], nngp(x))


def variants() -> dict[str, Callable[[], Any]]:
    def net(slope: float = 0.0, modes: tuple[bool, bool] = (False, False)) -> nn.Module:
        act = nn.PReLU(init=slope) if slope else nn.ReLU()
        model = nn.Sequential(nn.Linear(3, 8), act, nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2))
        model.append(nn.Linear(8, 1))
        model[2].train(modes[0])
        model[5].train(modes[1])
        return model

    def positions(std: float) -> nn.Module:
        torch.manual_seed(0)
        return Positions("whole", std)

    n = tg.infinite_ntk
    return {
        "plain": lambda: n(net()),
        "nngp": lambda: tg.infinite_nngp(net()),
        "w_var": lambda: n(net(), w_var=1.0),
        "w_var by layer": lambda: n(net(), w_var={"": 2.0, "0": 1.0}),
        "b_var": lambda: n(net(), b_var=0.1),
        "lr": lambda: n(net(), lr=2.0),
        "lr by layer": lambda: n(net(), lr={"": 1.0, "6": 2.0}),
        "train": lambda: n(net(), trainable="0"),
        "parametrization": lambda: n(net(), parametrization="standard"),
        "slope": lambda: n(net(0.1)),
        "other slope": lambda: n(net(0.3)),
        "first dropout": lambda: n(net(modes=(True, False))),
        "second dropout": lambda: n(net(modes=(False, True))),
        "buffers": lambda: n(Normalized(0.5, 2.0)),
        "other buffers": lambda: n(Normalized(0.5, 3.0)),
        "hidden buffers": lambda: n(Normalized(0.5, 2.0, persistent=False)),
        "other hidden buffers": lambda: n(Normalized(0.5, 3.0, persistent=False)),
        "flag": lambda: n(Switch(True)),
        "other flag": lambda: n(Switch(False)),
        "code": lambda: n(Inline(torch.tanh)),
        "other code": lambda: n(Inline(torch.sin)),
        "positions": lambda: n(positions(1.0)),
        "other positions": lambda: n(positions(3.0)),
        "twin": lambda: n(Twin(net())),
    }


def test_spec_says_everything_that_decides_the_numbers() -> None:
    seen: dict[str, str] = {}
    for name, make in variants().items():
        spec = make().spec()
        text = json.dumps(spec, sort_keys=True)
        assert json.loads(text) == spec
        assert text not in seen, f"{name} has the spec of {seen[text]}"
        seen[text] = name


def test_spec_of_constants_in_forward() -> None:
    model = Positions("table")
    before = set(vars(model))
    first, second = tg.infinite_ntk(model), tg.infinite_ntk(model)
    assert first.spec() == second.spec()
    assert set(vars(model)) == before, "tracing left something in the user's module"


def test_regression_on_it() -> None:
    x = points(12)
    y = x[:, :1].sin()
    k = tg.infinite_ntk(DENSE, b_var=0.1)
    gp = tg.regress.gaussian_process(k(x), y, noise=1e-3)
    assert gp is not None
    model = KernelRegressor(kernel=k, reg=1e-6).fit(x.numpy(), y[:, 0].numpy())
    assert np.abs(model.predict(x.numpy()) - y[:, 0].numpy()).max() < 0.1


# Parametrisations


def test_standard_parametrisation_multiplies_each_layers_part() -> None:
    x = points()
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    standard = tg.infinite_ntk(net, w_var=2.0, b_var=0.5, parametrization="standard")
    rates = {"0.weight": 3 / 2, "2.weight": 8 / 2, "4.weight": 16 / 2, "": 1 / 0.5}
    close(standard.both(x), tg.infinite_ntk(net, w_var=2.0, b_var=0.5, lr=rates).both(x))


def test_layers_trained_alone_sum_to_the_whole() -> None:
    x = images()
    model = PreResNet()
    for options in ({"b_var": 0.3}, {"parametrization": "standard", "lr": {"": 1.0, "stem": 0.5}}):
        whole = tg.infinite_ntk(model, **options)(x)  # type: ignore[arg-type]
        names = [name for name, _ in model.named_parameters()]
        parts = [tg.infinite_ntk(model, trainable=[name], **options)(x) for name in names]  # type: ignore[arg-type]
        close(torch.stack(parts).sum(0), whole)
        by_module = tg.infinite_ntk(model, trainable=model.fc, **options)(x)  # type: ignore[arg-type]
        by_rule = tg.infinite_ntk(model, trainable=lambda name, p: name.startswith("fc"), **options)(x)  # type: ignore[arg-type]
        close(by_module, parts[-1] + parts[-2])
        close(by_rule, by_module)


def test_last_layer_alone_is_the_conjugate_kernel() -> None:
    x = points()
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    close(tg.infinite_ntk(net, b_var=0.1, trainable="2")(x), tg.infinite_nngp(net, b_var=0.1)(x))
    frozen = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    frozen[0].requires_grad_(False)
    close(tg.infinite_ntk(frozen, b_var=0.1)(x), tg.infinite_nngp(net, b_var=0.1)(x))


def test_learning_rates_and_variances_by_layer() -> None:
    x = points()
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    close(tg.infinite_ntk(net, b_var=0.1, lr=3.0)(x), 3 * tg.infinite_ntk(net, b_var=0.1)(x))
    first, last = (tg.infinite_ntk(net, b_var=0.1, trainable=name)(x) for name in ("0", "2"))
    close(tg.infinite_ntk(net, b_var=0.1, lr={"0": 0.5, "2": 4.0})(x), 0.5 * first + 4 * last)
    want = Moments(x, 1).affine(1.0, 0.3).relu().affine(3.0, 0.7).both
    close(tg.infinite_ntk(net, w_var={"0": 1.0, "": 3.0}, b_var={"0": 0.3, "2": 0.7}).both(x), want)
    close(tg.infinite_ntk(net, w_var={"0.weight": 1.0, "2": 3.0}, b_var={"0.bias": 0.3, "2.bias": 0.7}).both(x), want)


def test_twin_is_zero_at_the_start() -> None:
    x = points()
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    twin = Twin(net)
    assert float(twin(x.float()).detach().abs().max()) == 0
    nngp, ntk = tg.infinite_ntk(twin, b_var=0.1).both(x)
    assert float(nngp.abs().max()) == 0
    close(ntk, tg.infinite_ntk(net, b_var=0.1)(x))
    close(tg.infinite_nngp(twin)(x), torch.zeros(5, 5, dtype=torch.float64))
    finite = tg.trace_ntk(Twin(net))(x.float()), tg.trace_ntk(net)(x.float())
    torch.testing.assert_close(*finite, rtol=1e-4, atol=1e-4)
    inner = nn.Sequential(Twin(net))  # inside another module
    try:
        close(tg.infinite_nngp(inner)(x), torch.zeros(5, 5, dtype=torch.float64))
    except UnsupportedModule as e:
        assert "Twin" in str(e)  # noqa: PT017


INITS: dict[str, tuple[Callable[[Tensor], Any], float, str]] = {
    "kaiming_normal": (lambda w: nn.init.kaiming_normal_(w), 2 / 60, "kaiming_normal_"),
    "kaiming_uniform": (lambda w: nn.init.kaiming_uniform_(w), 2 / 60, "kaiming_uniform_"),
    "kaiming fan_out": (lambda w: nn.init.kaiming_normal_(w, mode="fan_out"), 2 / 80, "kaiming_normal_, fan_out"),
    "xavier_normal": (lambda w: nn.init.xavier_normal_(w), 2 / 140, "xavier_normal_"),
    "xavier_uniform": (lambda w: nn.init.xavier_uniform_(w), 2 / 140, "xavier_uniform_"),
    "constant": (lambda w: nn.init.constant_(w, 0.1), 0.01, "constant 0.1"),
    "zeros": (lambda w: nn.init.zeros_(w), 0.0, "zeros"),
    "normal": (lambda w: nn.init.normal_(w), 1.0, "normal_(0, 1)"),
    "orthogonal": (lambda w: nn.init.orthogonal_(w), 1 / 80, "measured"),
}


@pytest.mark.parametrize("name", INITS)
def test_initialisation_is_recognised_and_said(name: str) -> None:
    draw, variance, label = INITS[name]
    for seed in range(5):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(60, 80), nn.ReLU(), nn.Linear(80, 1))
        draw(net[0].weight)
        said = tg.infinite_ntk(net, w_var="init").spec()["layers"]["0"]
        assert said["init"].startswith(label), said
        assert said["w_var"] == pytest.approx(60 * variance, rel=1e-6)
        assert said["bias init"] == "torch's default"
        assert said["b_var"] == pytest.approx(1 / 180)
        x = points(3, 60)
        want = said["w_var"] * x @ x.T / 60 + said["b_var"]
        close(tg.infinite_nngp(net[0], w_var="init")(x), want)


@pytest.mark.parametrize(
    ("module", "fan_in"),
    [(nn.Linear(60, 80), 60), (nn.Conv2d(8, 16, 3), 72), (nn.Conv1d(8, 16, 3, groups=2), 12), (nn.Linear(5, 3), 5)],
)
def test_torchs_default_is_recognised(module: Any, fan_in: int) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        module.reset_parameters()
        found = detect_init(module.weight)
        assert found.label == "torch's default"
        assert found.variance == pytest.approx(1 / (3 * fan_in))


def test_initialisation_of_transposed_convolutions_and_recurrences() -> None:
    """Their fan-in by nn.init is not that of the sum: the variance of an entry counts."""
    up = nn.ConvTranspose1d(48, 6, 3, bias=False)  # torch: uniform with variance 1/(3·6·3)
    x = torch.randn(2, 48, 4, dtype=torch.float64)
    k = tg.infinite_nngp(up, w_var="init")(x)
    m = Moments(x, 1)
    padded = F.pad(m.k.permute(0, 2, 1, 3), (2, 2, 2, 2)).permute(0, 2, 1, 3)
    taps = sum(padded[:, d : d + 6, :, d : d + 6] for d in range(3))
    close(k, taps * 48 / 54)
    said = tg.infinite_ntk(nn.RNN(3, 90, batch_first=True), w_var="init").spec()["layers"]
    assert any("hh" in name for name in said), "the recurrent weights are not said"
    said = tg.infinite_ntk(nn.MultiheadAttention(32, 2, batch_first=True), w_var="init").spec()["layers"]
    assert any("in_proj" in name for name in said), "the projections are not said"


# What is refused


def control(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def seq() -> Tensor:
    return torch.randn(3, 4, 6)


def conv2(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *more)


def ask(fn: Callable[[Any, Tensor], Tensor], **modules: Any) -> Callable[[], nn.Module]:
    return lambda: Ask(fn, **modules)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "max pool": (lambda: conv2(nn.MaxPool2d(9)), lambda: images(size=11), r"1 \(MaxPool2d\).*average pooling"),
    "functional max pool": (
        ask(lambda s, x: F.max_pool2d(s.a(x), 9), a=nn.Conv2d(2, 4, 3)),
        lambda: images(size=11),
        r"max_pool2d at .*\.py:\d+",
    ),
    "lstm cell": (ask(lambda s, x: s.a(x)[0], a=nn.LSTMCell(3, 8)), points, r"a \(LSTMCell\).*nn\.LSTM"),
    "projected lstm": (lambda: nn.LSTM(6, 8, proj_size=4, batch_first=True), seq, r"\(LSTM\).*proj_size=0"),
    "gru, batch second": (lambda: nn.GRU(6, 8), seq, r"\(GRU\).*batch_first=True"),
    "first state": (
        ask(lambda s, x: s.a(x, torch.ones(1, 4, 8))[0], a=nn.GRU(6, 8, batch_first=True)),
        seq,
        r"a \(GRU\).*first hidden value",
    ),
    "instance norm": (lambda: conv2(nn.InstanceNorm2d(4)), images, r"1 \(InstanceNorm2d\).*GroupNorm\(1"),
    "group norm": (lambda: conv2(nn.GroupNorm(4, 4)), images, r"1 \(GroupNorm\).*GroupNorm\(1"),
    "batch norm on images": (lambda: conv2(nn.ReLU(), nn.BatchNorm2d(4)), images, r"2 \(BatchNorm2d\).*eval"),
    "softmax": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Softmax(-1)), points, r"1 \(Softmax\)"),
    "log softmax": (lambda: nn.Sequential(nn.Linear(3, 8), nn.LogSoftmax(-1)), points, r"1 \(LogSoftmax\)"),
    "softmin": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Softmin(-1)), points, r"1 \(Softmin\)"),
    "softmax2d": (lambda: conv2(nn.Softmax2d()), images, r"1 \(Softmax2d\)"),
    "glu": (lambda: conv2(nn.GLU(-1)), images, r"1 \(GLU\).*along the channels"),
    "functional softmax": (
        ask(lambda s, x: torch.softmax(s.a(x), -1), a=nn.Linear(3, 8)),
        points,
        r"softmax at .*:\d+",
    ),
    "relu of a flattened layer": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.ReLU()),
        images,
        r"2 \(ReLU\).*not Gaussian.*Put a Linear",
    ),
    "correlated sum": (
        ask(lambda s, x: torch.relu(s.a(x)) + torch.tanh(s.a(x.flip(1))), a=nn.Linear(3, 8)),
        points,
        r"add at .*:\d+.*correlated.*Put a Linear",
    ),
    "shared module": (ask(lambda s, x: s.a(torch.relu(s.a(x))), a=nn.Linear(3, 3)), points, r"a \(Linear\).*shares"),
    "shared parameter": (
        ask(lambda s, x: F.linear(torch.relu(F.linear(x, s.w)), s.w), w=nn.Parameter(torch.randn(3, 3))),
        points,
        r"linear at .*:\d+.*shares",
    ),
    "tied embedding": (
        ask(lambda s, x: F.linear(torch.relu(s.e(x)).mean(1), s.e.weight), e=nn.Embedding(6, 8)),
        lambda: torch.randint(6, (3, 4)),
        r"linear at .*:\d+.*shares",
    ),
    "a parameter added twice": (
        ask(
            lambda s, x: s.b(torch.relu(s.a(x) + s.p) + s.p),
            a=nn.Linear(3, 8),
            b=nn.Linear(8, 1),
            p=nn.Parameter(torch.randn(8)),
        ),
        points,
        r"add at .*:\d+",
    ),
    "depthwise, wide and activated": (
        lambda: conv2(nn.Conv2d(4, 4, 9, padding=4, groups=4), nn.ReLU()),
        images,
        r"2 \(ReLU\).*Gaussian",
    ),
    "groups of the input": (lambda: nn.Conv2d(2, 4, 3, groups=2), images, r"\(Conv2d\).*groups"),
    "mean over channels": (ask(lambda s, x: s.a(x).mean(-1), a=nn.Linear(3, 8)), points, r"mean at .*:\d+.*channels"),
    "split channels": (
        ask(lambda s, x: s.a(x).view(x.size(0), 4, 2, 3).transpose(1, 2), a=nn.Linear(6, 6)),
        seq,
        r"output.*channel 2 × position 4 × channel 3.*transpose and reshape",
    ),
    "batch second": (lambda: nn.Sequential(nn.Linear(6, 6), nn.RNN(6, 8)), seq, r"1 \(RNN\).*batch_first=True"),
    "attention, batch second": (
        ask(lambda s, x: s.a(x, x, x)[0], a=nn.MultiheadAttention(6, 2)),
        seq,
        r"batch_first=True",
    ),
    "integers": (lambda: nn.Linear(3, 1), lambda: torch.ones(2, 3).long(), r"\(Linear\).*int64.*Embedding"),
    "borders of a number": (lambda: conv2(nn.ConstantPad2d(1, 2.0)), images, r"1 \(ConstantPad2d\).*zeros"),
    "batch moved": (ask(lambda s, x: s.a(x).transpose(0, 1), a=nn.Linear(6, 8)), seq, r"output.*position 4 × batch"),
    "batch summed": (ask(lambda s, x: s.a(x).sum(0), a=nn.Linear(6, 8)), seq, r"sum at .*:\d+.*batch"),
    "no rule": (ask(lambda s, x: torch.cumsum(s.a(x), 1), a=nn.Linear(6, 8)), seq, r"cumsum at .*:\d+"),
    "no such position": (ask(lambda s, x: s.a(x)[:, 7], a=nn.Linear(6, 8)), seq, r"7"),
    "two sides": (
        ask(lambda s, x: s.a(x) @ s.b(x).transpose(1, 2), a=nn.Linear(6, 8), b=nn.Linear(6, 8)),
        seq,
        "output: takes attention's scores.*softmax",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_the_fix(name: str) -> None:
    model, x, message = REFUSED[name]
    with pytest.raises(TangencyError, match=message):
        tg.infinite_ntk(model())(x())


def test_control_flow_on_values_names_its_line() -> None:
    with pytest.raises(UnsupportedModule, match=r"test_infinite_modules\.py:\d+ \(if x\.sum\(\) > 0:\)"):
        tg.infinite_ntk(Ask(lambda s, x: s.a(control(x)), a=nn.Linear(3, 1)))(torch.tensor([[1.0, 1, 1], [-1, -1, -1]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tg.infinite_ntk(nn.Linear), "Linear is a class"),
        (lambda: tg.infinite_ntk(nn.Linear(3, 1), w_var=-1.0), r"w_var=-1"),
        (lambda: tg.infinite_ntk(nn.Linear(3, 1), b_var={"": -0.5}), r"b_var\[''\]=-0.5"),
        (lambda: tg.infinite_ntk(nn.Linear(3, 1), lr=float("nan")), "lr=nan"),
        (lambda: tg.infinite_ntk(nn.Linear(3, 1), w_var="kaiming"), "w_var='kaiming'.*init"),
        (lambda: tg.infinite_ntk(nn.Linear(3, 1), parametrization="mup"), "parametrization='mup'"),  # type: ignore[arg-type]
        (lambda: tg.infinite_ntk(DENSE, w_var={"0": 1.0, "7": 2.0, "": 1.0}), "'7'"),
        (lambda: tg.infinite_ntk(DENSE, b_var={"first": 1.0, "": 1.0}), "'first'"),
        (lambda: tg.infinite_ntk(DENSE, lr={"6": 1.0, "": 1.0}), "'6'"),
        (lambda: tg.infinite_ntk(DENSE, trainable="9"), "9"),
        (lambda: tg.infinite_ntk(DENSE, w_var={"0": 1.0})(points()), "no number for 2.weight"),
        (lambda: tg.infinite_ntk(nn.Sequential(nn.Linear(3, 8), "relu")), None),  # type: ignore[arg-type]
        (lambda: tg.infinite_ntk("relu"), "is no layer"),
        (lambda: tg.infinite_ntk(nn.Linear(3, 1), samples=0), "samples=0"),
        (lambda: tg.infinite_ntk(nn.ReLU())(points()), "any weights"),
        (lambda: tg.infinite_ntk(DENSE)(points()[:0]), "zero samples"),
        (lambda: tg.infinite_ntk(DENSE)(points().fill_(math.nan)), "nan"),
        (lambda: tg.infinite_ntk(DENSE)((points(), points())), "2 inputs"),
        (lambda: tg.infinite_ntk(GCN())(torch.randn(2, 4, 3)), "adj"),
        (lambda: tg.infinite_ntk(GCN())({"x": torch.randn(2, 4, 3), "edges": torch.randn(2, 4, 4)}), "adj"),
        (lambda: tg.infinite_ntk(PreResNet())(images(), images(size=11)), "different shapes"),
        (lambda: tg.infinite_ntk(nn.Linear(3, 1))(points(), points(2, 4)), "3.*4|4.*3"),
        (lambda: tg.infinite_ntk(nn.Linear(3, 1))(points()[0]), "shape|dimension|axis"),
        (lambda: tg.infinite_ntk(nn.Linear(3, 1))(points(2, 4)), "3.*4|4.*3"),
        (lambda: tg.infinite_ntk(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(9, 1)))(points()), r"8.*9|9.*8"),
        (lambda: tg.infinite_ntk(nn.Conv2d(3, 4, 3))(images()), r"\(Conv2d\)"),
        (lambda: tg.infinite_ntk(nn.Conv2d(2, 4, 3))(images()[0]), r"\(Conv2d\)"),
        (lambda: tg.infinite_ntk(nn.Conv2d(2, 4, 7))(images()), "do not fit"),
        (lambda: tg.infinite_ntk(nn.Embedding(4, 8))(torch.tensor([[1, 9]])), "9"),
        (lambda: tg.infinite_ntk(nn.Embedding(4, 8))(torch.randn(2, 3)), "integer"),
        (lambda: tg.infinite_ntk(nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(9)))(points()), "LayerNorm"),
    ],
)
def test_what_is_asked_wrongly(make: Callable[[], Any], message: str | None) -> None:
    with pytest.raises((InputError, UnsupportedModule) if message else TypeError, match=message):
        make()


def test_a_batch_mixed_in_forward_is_noticed_or_consistent() -> None:
    """x − x.mean(0) makes one sample's value depend on the others, so k(x)[:2, :2] is not k(x[:2])."""
    net = Ask(lambda s, x: s.a(x - x.mean(0)), a=nn.Linear(3, 1))
    x = points()
    with pytest.raises(TangencyError, match="batch|sample"):
        k = tg.infinite_ntk(net)
        close(k(x)[:2, :2], k(x[:2]))
