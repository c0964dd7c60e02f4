"""Norms, gates, convolutions, shapes as people write them: the same kernel in every spelling, and finite networks."""

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
from tangency.errors import TangencyError
from tangency.infinite.finite import Scaled, scales

WIDTH, OUT = 8, 8
torch.manual_seed(3)
VECTORS, SERIES, IMAGES = torch.randn(3, 6).double(), torch.randn(3, 5, 6).double(), torch.randn(3, 3, 4, 4).double()
TOKENS = torch.tensor([[1, 2, 2, 0], [2, 3, 4, 5], [1, 1, 5, 0]])


def both(fn: Callable[[Any, Any], Tensor], x: Tensor, **parts: Any) -> tuple[Tensor, Tensor]:
    nngp, ntk = tg.infinite_ntk(Ask(fn, **parts).eval(), b_var=0.1).both(x)
    return nngp, ntk


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], rtol: float = 1e-11) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


def ones() -> nn.Parameter:
    return nn.Parameter(torch.ones(WIDTH))


def zeros() -> nn.Parameter:
    return nn.Parameter(torch.zeros(WIDTH))


# Norms


def annotated(s: Any, h: Tensor) -> Tensor:
    return s.w * (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 0.0) + s.c


def written_out(s: Any, h: Tensor) -> Tensor:
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    return s.w * ((h - mean) / torch.sqrt(variance)) + s.c


def by_variance(s: Any, h: Tensor) -> Tensor:
    variance, mean = torch.var_mean(h, dim=-1, keepdim=True, correction=0)
    return (h - mean) * torch.rsqrt(variance) * s.w + s.c


def fast(s: Any, h: Tensor) -> Tensor:
    mean = h.mean(-1, keepdim=True)
    return (h - mean) / ((h * h).mean(-1, keepdim=True) - mean.square()).sqrt() * s.w + s.c


LAYER_NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "F.layer_norm": lambda s, h: F.layer_norm(h, (WIDTH,), s.w, s.c, 0.0),
    "annotated transformer": annotated,
    "written out": written_out,
    "var_mean": by_variance,
    "timm's fast one": fast,
}
RMS_NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "F.rms_norm": lambda s, h: F.rms_norm(h, (WIDTH,), s.w, 1e-6),
    "Llama": lambda s, h: s.w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype),
    "Gemma": lambda s, h: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * (1 + (s.w * 1.0)),
    "without keepdim": lambda s, h: h / ((h**2).mean(-1)[..., None] + 1e-6).sqrt() * s.w,
    "by sums": lambda s, h: h / ((h * h).sum(-1).unsqueeze(-1) / WIDTH + 1e-6) ** 0.5 * s.w,
}


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_layer_norm_in_every_spelling(name: str) -> None:
    parts = {"a": nn.Linear(6, WIDTH), "b": nn.Linear(WIDTH, 1)}
    norm = LAYER_NORMS[name]
    found = both(lambda s, x: s.b(torch.relu(norm(s, s.a(x)))), VECTORS, w=ones(), c=zeros(), **parts)
    layer = nn.LayerNorm(WIDTH, eps=0.0)
    same(found, both(lambda s, x: s.b(torch.relu(s.n(s.a(x)))), VECTORS, n=layer, **parts))


@pytest.mark.parametrize("name", RMS_NORMS)
def test_rms_norm_in_every_spelling(name: str) -> None:
    parts = {"a": nn.Linear(6, WIDTH), "b": nn.Linear(WIDTH, 1)}
    norm, start = RMS_NORMS[name], zeros() if name == "Gemma" else ones()
    found = both(lambda s, x: s.b(torch.tanh(norm(s, s.a(x)))), SERIES, w=start, **parts)
    layer = nn.RMSNorm(WIDTH, eps=1e-6)
    same(found, both(lambda s, x: s.b(torch.tanh(s.n(s.a(x)))), SERIES, n=layer, **parts))


def test_unit_length_has_the_finite_width() -> None:
    """x/‖x‖ = x/√(width · variance): times √width it is RMSNorm without eps."""
    parts = {"a": nn.Linear(6, WIDTH), "b": nn.Linear(WIDTH, 1), "n": nn.RMSNorm(WIDTH, 0.0, False)}
    rms = both(lambda s, x: s.b(torch.relu(s.n(s.a(x)))), VECTORS, **parts)
    for norm in (lambda h: F.normalize(h, dim=-1), lambda h: h / h.norm(dim=-1, keepdim=True)):
        same(both(lambda s, x, norm=norm: s.b(torch.relu(norm(s.a(x)) * WIDTH**0.5)), VECTORS, **parts), rms)  # type: ignore[misc]


def channels_first(s: Any, h: Tensor) -> Tensor:
    mean = h.mean(1, keepdim=True)
    h = (h - mean) / torch.sqrt((h - mean).pow(2).mean(1, keepdim=True) + 1e-6)
    return s.w[:, None, None] * h + s.c[:, None, None]


def test_layer_norm_of_pictures() -> None:
    """ConvNeXt's own, channels first; an activation after the permutation sees the scale's part too."""
    parts = {"a": nn.Conv2d(3, WIDTH, 3), "b": nn.Conv2d(WIDTH, 1, 1)}
    found = both(lambda s, x: s.b(F.gelu(channels_first(s, s.a(x)))), IMAGES, w=ones(), c=zeros(), **parts)
    layer = nn.LayerNorm(WIDTH, eps=1e-6)

    def permuted(s: Any, x: Tensor) -> Tensor:
        return s.b(F.gelu(s.n(s.a(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))

    same(found, both(permuted, IMAGES, n=layer, **parts))
    before = both(
        lambda s, x: s.b(F.gelu(s.n(s.a(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)), IMAGES, n=layer, **parts
    )
    same(found, before)


def test_a_scale_waits_for_the_activation_behind_masks_and_multiples() -> None:
    """tanh(m·γ·u): γ's derivative is u·m·tanh'(m u), whatever known factor m comes between."""
    parts = {"a": nn.Linear(6, WIDTH), "b": nn.Linear(WIDTH, 1), "n": nn.LayerNorm(WIDTH, eps=0.0)}
    twice = both(lambda s, x: s.b(torch.tanh(2 * s.n(s.a(x)))), SERIES, **parts)
    same(both(lambda s, x: s.b(torch.tanh(s.n(s.a(x)) * torch.full((1, 5, 1), 2.0))), SERIES, **parts), twice)
    by_activation = both(lambda s, x: s.b((lambda h: torch.tanh(h + h))(s.n(s.a(x)))), SERIES, **parts)
    same(twice, by_activation, rtol=1e-8)


@pytest.mark.filterwarnings("ignore:.*groups of . channels")
def test_groups_have_the_same_statistics() -> None:
    parts = {"a": nn.Conv2d(3, WIDTH, 3), "b": nn.Conv2d(WIDTH, 1, 1)}
    one = both(lambda s, x: s.b(torch.relu(s.n(s.a(x)))), IMAGES, n=nn.GroupNorm(1, WIDTH), **parts)
    same(both(lambda s, x: s.b(torch.relu(s.n(s.a(x)))), IMAGES, n=nn.GroupNorm(4, WIDTH), **parts), one)
    functional = both(
        lambda s, x: s.b(torch.relu(F.group_norm(s.a(x), 2, s.w, s.c))), IMAGES, w=ones(), c=zeros(), **parts
    )
    same(functional, one)


def test_layer_norm_of_an_activation_subtracts_its_mean() -> None:
    """By the arc-cosine formulas, written out: E[φφ'] less √p√q/2π, over the roots of the variances."""
    net = nn.Sequential(nn.Linear(6, WIDTH, bias=False), nn.ReLU(), nn.LayerNorm(WIDTH, eps=0.0), nn.Linear(WIDTH, 1))
    found = tg.infinite_nngp(net)(VECTORS)
    cov = 2.0 * VECTORS @ VECTORS.T / 6
    root = cov.diagonal().sqrt()
    scale = root[:, None] * root
    cosine = (cov / scale).clamp(-1, 1)
    angle = torch.acos(cosine)
    after = scale * (torch.sin(angle) + (math.pi - angle) * cosine) / (2 * math.pi) - scale / (2 * math.pi)
    variance = cov.diagonal() * (0.5 - 0.5 / math.pi)
    torch.testing.assert_close(found, 2 * after / (variance[:, None] * variance).sqrt(), rtol=1e-7, atol=1e-7)


def test_norm_of_an_activation_of_pictures() -> None:
    """A 1×1 convolution of pictures is a dense layer of each position: the same numbers, position by position."""
    net = nn.Sequential(
        nn.Conv2d(3, WIDTH, 1), nn.ReLU(), nn.LayerNorm([WIDTH, 1, 1]), nn.Flatten(), nn.Linear(WIDTH, 1)
    )
    dense = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))
    for kernel in (tg.infinite_ntk, tg.infinite_nngp):
        torch.testing.assert_close(kernel(net)(IMAGES[:, :, :1, :1]), kernel(dense)(IMAGES[:, :, 0, 0]))


# Gates and scales


@pytest.mark.parametrize("shape", [(WIDTH, 1, 1), (1, WIDTH, 1, 1)])
def test_layer_scale_of_pictures(shape: tuple[int, ...]) -> None:
    """γ·x of each channel's own is what a norm's scale is, whatever its shape; γ² multiplies what passes."""
    parts = {"a": nn.Conv2d(3, WIDTH, 3), "b": nn.Conv2d(WIDTH, 1, 1)}
    gamma = nn.Parameter(torch.full(shape, 0.5))
    found = both(lambda s, x: s.b(s.g * s.a(x)).mean((2, 3)), IMAGES, g=gamma, **parts)
    last = nn.Parameter(torch.full((WIDTH,), 0.5))
    moved = both(
        lambda s, x: s.b((s.a(x).permute(0, 2, 3, 1) * s.g).permute(0, 3, 1, 2)).mean((2, 3)), IMAGES, g=last, **parts
    )
    same(found, moved)
    plain = both(lambda s, x: s.b(0.5 * s.a(x)).mean((2, 3)), IMAGES, **parts)
    torch.testing.assert_close(found[0], plain[0])
    # The scales' own part: the covariance of a(x), pooled, through b's weights of variance 2.
    own = both(lambda s, x: s.a(x).mean((2, 3)), IMAGES, a=parts["a"])[0]
    torch.testing.assert_close(found[1], plain[1] + 2.0 * own)


WHERE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "by a method": (lambda x: x.where(x > 0, 0.0), torch.relu),
    "hardswish": (lambda x: x * F.relu6(x + 3) / 6, F.hardswish),
}


@pytest.mark.parametrize("name", WHERE)
@pytest.mark.every(2)
def test_choices_are_activations(name: str) -> None:
    mine, torchs = WHERE[name]
    parts = {"a": nn.Linear(6, WIDTH), "b": nn.Linear(WIDTH, 1)}
    found = both(lambda s, x: s.b(mine(s.a(x))), VECTORS, **parts)
    same(found, both(lambda s, x: s.b(torchs(s.a(x))), VECTORS, **parts), rtol=1e-8)


def test_known_masks_choose_positions() -> None:
    parts = {"a": nn.Linear(6, WIDTH), "b": nn.Linear(WIDTH, 1), "c": nn.Linear(6, WIDTH)}
    mask = torch.tensor([True, True, False, True, False]).view(1, 5, 1)
    found = both(lambda s, x: s.b(torch.where(mask, s.a(x), s.c(x))), SERIES, **parts)
    summed = both(lambda s, x: s.b(s.a(x) * mask.double() + s.c(x) * (~mask).double()), SERIES, **parts)
    same(found, summed)
    zero = both(lambda s, x: s.b(torch.where(mask, torch.relu(s.a(x)), 0.0)), SERIES, **parts)
    same(zero, both(lambda s, x: s.b(torch.relu(s.a(x)) * mask.double()), SERIES, **parts))


# Convolutions


@pytest.mark.filterwarnings("ignore:.*groups of . channels")
def test_depthwise_has_the_moments_of_a_full_convolution() -> None:
    """Until an activation: channels that do not mix have the same second moments, and so has their tangent kernel."""
    parts = {"a": nn.Conv2d(3, WIDTH, 1), "c": nn.Conv2d(WIDTH, WIDTH, 1), "d": nn.Conv2d(WIDTH, 1, 1)}

    def net(s: Any, x: Tensor) -> Tensor:
        return s.d(torch.relu(s.c(s.b(torch.relu(s.a(x))))))

    full = both(net, IMAGES, b=nn.Conv2d(WIDTH, WIDTH, 3, padding=1), **parts)
    same(both(net, IMAGES, b=nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), **parts), full)
    full = both(net, IMAGES, b=nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2), **parts)
    for groups in (2, WIDTH):
        same(both(net, IMAGES, b=nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2, groups=groups), **parts), full)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_borders_of_hidden_values_are_those_of_the_input(mode: Any) -> None:
    """A 1×1 convolution commutes with copies of positions: the same borders put around the picture beforehand."""
    padded = F.pad(IMAGES, (1, 1, 1, 1), mode)
    parts = {"a": nn.Conv2d(3, WIDTH, 1), "b": nn.Conv2d(WIDTH, 2, 3)}
    known = both(lambda s, x: s.b(torch.relu(s.a(x))), padded, **parts)
    layer = nn.Conv2d(WIDTH, 2, 3, padding=1, padding_mode=mode)
    same(both(lambda s, x: s.b(torch.relu(s.a(x))), IMAGES, a=parts["a"], b=layer), known)
    same(both(lambda s, x: s.b(F.pad(torch.relu(s.a(x)), (1, 1, 1, 1), mode=mode)), IMAGES, **parts), known)
    border = {"reflect": nn.ReflectionPad2d, "replicate": nn.ReplicationPad2d, "circular": nn.CircularPad2d}[mode](1)
    same(both(lambda s, x: s.b(s.p(torch.relu(s.a(x)))), IMAGES, p=border, **parts), known)
    first = nn.Conv2d(3, 2, 3, padding=1, padding_mode=mode)
    same(both(lambda s, x: s.a(x), IMAGES, a=first), both(lambda s, x: s.a(x), padded, a=nn.Conv2d(3, 2, 3)))


# Shapes


def test_shuffles() -> None:
    parts = {"a": nn.Conv2d(3, 4 * WIDTH, 3, padding=1), "b": nn.Conv2d(4 * WIDTH, 1, 1)}
    plain = both(lambda s, x: s.b(torch.relu(s.a(x))), IMAGES, **parts)
    there_and_back = {"there": nn.PixelShuffle(2), "back": nn.PixelUnshuffle(2)} | parts
    same(both(lambda s, x: s.b(s.back(torch.relu(s.there(s.a(x))))), IMAGES, **there_and_back), plain)
    same(both(lambda s, x: s.b(s.back(s.there(torch.relu(s.a(x))))), IMAGES, **there_and_back), plain)
    same(both(lambda s, x: s.b(s.q(torch.relu(s.a(x)))), IMAGES, q=nn.ChannelShuffle(4), **parts), plain)


def test_channels_become_positions_and_channels_again() -> None:
    parts = {"a": nn.Linear(6, 4 * WIDTH), "b": nn.Linear(4 * WIDTH, 1)}
    plain = both(lambda s, x: s.b(torch.relu(s.a(x))), VECTORS, **parts)
    apart = nn.Unflatten(1, (WIDTH, 2, 2))
    same(both(lambda s, x: s.b(torch.relu(s.u(s.a(x))).flatten(1)), VECTORS, u=apart, **parts), plain)
    # Independent positions: the mean over four has a quarter of the variance.
    quarter = both(lambda s, x: s.u(s.a(x)).mean((2, 3)), VECTORS, u=apart, **parts)
    same(quarter, tuple(v / 4 for v in both(lambda s, x: s.a(x), VECTORS, **parts)))  # type: ignore[arg-type]


def test_unfold_is_what_a_convolution_does() -> None:
    parts = {"a": nn.Conv2d(3, WIDTH, 1)}
    conv = both(lambda s, x: s.b(torch.relu(s.a(x))).flatten(2), IMAGES, b=nn.Conv2d(WIDTH, 4, 3), **parts)
    unfolded = both(
        lambda s, x: s.b(s.u(torch.relu(s.a(x))).transpose(1, 2)).transpose(1, 2),
        IMAGES, b=nn.Linear(9 * WIDTH, 4), u=nn.Unfold(3), **parts,
    )  # fmt: skip
    same(unfolded, conv)


def test_positions_in_another_order() -> None:
    parts = {"a": nn.Linear(6, WIDTH), "b": nn.Linear(WIDTH, 1), "c": nn.Linear(6, WIDTH)}
    ends = both(lambda s, x: s.b(torch.relu(s.a(x))[:, -1]), SERIES, **parts)
    same(both(lambda s, x: s.b(torch.relu(s.a(x).flip(1)))[:, 0], SERIES, **parts), ends)
    same(both(lambda s, x: s.b(torch.relu(torch.roll(s.a(x), 2, 1)))[:, 1], SERIES, **parts), ends)
    same(both(lambda s, x: s.b(torch.relu(s.a(x).index_select(1, torch.tensor([4]))))[:, 0], SERIES, **parts), ends)
    joined = both(lambda s, x: s.b(torch.cat([s.a(x), s.c(x)], 1)).mean(1), SERIES, **parts)
    same(both(lambda s, x: s.b(torch.stack([s.a(x), s.c(x)], 1)).mean((1, 2)), SERIES, **parts), joined)


# Weights in other spellings


def test_weights_by_einsum_and_tensordot() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, 6))
    parts = {"b": nn.Linear(WIDTH, 1)}
    plain = both(lambda s, x: s.b(torch.relu(F.linear(x, s.w))), SERIES, w=weight, **parts)
    for fn in (
        lambda s, x: torch.einsum("btc,dc->btd", x, s.w),
        lambda s, x: torch.einsum("dc, ...c -> ...d", s.w, x),
        lambda s, x: torch.einsum("btc,dc->bdt", x, s.w).transpose(1, 2),
        lambda s, x: torch.tensordot(x, s.w, dims=([2], [1])),
        lambda s, x: torch.bmm(x, s.w.T.unsqueeze(0).expand(x.shape[0], -1, -1)),
    ):
        same(both(lambda s, x, fn=fn: s.b(torch.relu(fn(s, x))), SERIES, w=weight, **parts), plain)  # type: ignore[misc]
    matrix = torch.rand(2, 5).double()
    mixed = both(lambda s, x: s.b(torch.einsum("st,btc->bsc", matrix, s.a(x))), SERIES, a=nn.Linear(6, WIDTH), **parts)
    known = both(
        lambda s, x: s.b(s.a(torch.einsum("st,btc->bsc", matrix, x))), SERIES, a=nn.Linear(6, WIDTH, False), **parts
    )
    assert not torch.allclose(mixed[0], known[0]), "the biases of five positions do not add up to one"


def test_bilinear_is_a_product_of_covariances() -> None:
    net = Ask(lambda s, x: s.b(x[:, :2], x[:, 2:]), b=nn.Bilinear(2, 4, 1))
    nngp, ntk = tg.infinite_ntk(net, w_var=1.5, b_var=0.1).both(VECTORS)
    a, b = VECTORS[:, :2], VECTORS[:, 2:]
    torch.testing.assert_close(nngp, 1.5 * (a @ a.T / 2) * (b @ b.T / 4) + 0.1)
    torch.testing.assert_close(ntk, nngp)


def test_tables_and_bags() -> None:
    table = nn.Embedding(6, WIDTH)
    parts = {"b": nn.Linear(WIDTH, 1)}
    rows = both(lambda s, x: s.b(torch.relu(s.e(x))), TOKENS, e=table, **parts)
    same(
        both(lambda s, x: s.b(torch.relu(F.embedding(x, s.w))), TOKENS, w=nn.Parameter(torch.randn(6, WIDTH)), **parts),
        rows,
    )
    for mode in ("sum", "mean"):
        bag = both(lambda s, x: s.b(torch.relu(s.e(x))), TOKENS, e=nn.EmbeddingBag(6, WIDTH, mode=mode), **parts)
        reduce = torch.sum if mode == "sum" else torch.mean
        same(bag, both(lambda s, x, r=reduce: s.b(torch.relu(r(s.e(x), 1))), TOKENS, e=table, **parts))  # type: ignore[misc]
    bag = both(lambda s, x: s.e(x), TOKENS, e=nn.EmbeddingBag(6, 4, padding_idx=0))
    # Shares of each row in a bag, the padding left out: rows 1 and 2 of the first are a third and two thirds.
    share = torch.tensor([[1, 2, 0, 0, 0], [0, 1, 1, 1, 1], [2, 0, 0, 0, 1]]).double()
    share = share / share.sum(1, keepdim=True)
    torch.testing.assert_close(bag[0], 2 * share @ share.T)


# Recurrent layers with their batch on axis 1


class TimeFirst(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.rnn = nn.RNN(6, WIDTH, bidirectional=True, batch_first=not first)
        self.next, self.out = nn.RNN(2 * WIDTH, WIDTH, batch_first=not first), nn.Linear(WIDTH, 1)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if not self.first:
            return self.out(self.next(self.rnn(x)[0])[0][:, -1])
        return self.out(self.next(self.rnn(x.transpose(0, 1))[0])[0][-1])


def test_recurrences_with_the_batch_on_axis_1() -> None:
    kernels = [tg.infinite_ntk(TimeFirst(first), w_var=1.0, b_var=0.1).both(SERIES) for first in (False, True)]
    same(kernels[1], kernels[0])


# Finite networks


class Squeeze(nn.Module):
    """A residual block with squeeze-excite, as its authors' code has it."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, w, 1), nn.BatchNorm2d(w)
        self.fc = nn.Sequential(nn.Linear(w, w // 2), nn.ReLU(), nn.Linear(w // 2, w), nn.Sigmoid())
        self.pool, self.out = nn.AdaptiveAvgPool2d(1), nn.Linear(w, OUT)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.relu(self.a(x))
        x = self.n(self.b(before))
        b, c, _, _ = x.size()
        gate = self.fc(self.pool(x).view(b, c)).view(b, c, 1, 1)
        return self.out(torch.relu(x * gate.expand_as(x) + before).mean((2, 3)))


class Next(nn.Module):
    """A ConvNeXt block between a stem and a head."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.stem, self.dw = nn.Conv2d(3, w, 2, stride=2), nn.Conv2d(w, w, 3, padding=1, groups=w)
        self.norm, self.one, self.two = nn.LayerNorm(w, eps=1e-6), nn.Linear(w, 2 * w), nn.Linear(2 * w, w)
        self.out = nn.Linear(w, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.two(F.gelu(self.one(self.norm(self.dw(x).permute(0, 2, 3, 1)))))
        return self.out((x + h.permute(0, 3, 1, 2)).mean((-2, -1)))


def dense(fn: Callable[[Any, Tensor], Tensor], **parts: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda w: Ask(fn, **{name: make(w) for name, make in parts.items()}, out=nn.Linear(w, OUT))


def first(w: int) -> nn.Module:
    return nn.Linear(6, w)


def same_width(w: int) -> nn.Module:
    return nn.Linear(w, w)


FINITE: dict[str, tuple[Callable[[int], nn.Module], Tensor, int, int]] = {  # network, inputs, width, nets
    "squeeze-excite": (Squeeze, IMAGES[:2, :, :2, :2], 96, 16),
    "ConvNeXt block": (Next, IMAGES, 48, 16),
    "norm of an activation": (
        dense(lambda s, x: s.out(torch.tanh(s.b(s.n(torch.relu(s.a(x)))))), a=first, b=same_width, n=nn.LayerNorm),
        VECTORS, 128, 24,
    ),
    "a norm in a sum": (
        dense(lambda s, x: s.out(torch.relu(s.n(s.a(x)) + s.b(x))), a=first, b=first, n=nn.LayerNorm), VECTORS, 192, 32,
    ),
    "norm of joined channels": (
        dense(
            lambda s, x: s.out(s.c(torch.relu(s.n(torch.cat([s.a(x), s.b(torch.tanh(s.d(x)))], 1))))),
            a=first, d=first, b=same_width, n=lambda w: nn.LayerNorm(2 * w), c=lambda w: nn.Linear(2 * w, w),
        ),
        VECTORS, 128, 24,
    ),
    "GLU": (dense(lambda s, x: s.out(F.glu(s.a(x))), a=lambda w: nn.Linear(6, 2 * w)), VECTORS, 192, 24),
    "PixelShuffle": (
        dense(
            lambda s, x: s.out(torch.relu(s.b(s.p(torch.relu(s.a(x))))).mean((2, 3))),
            a=lambda w: nn.Conv2d(3, 4 * w, 3), p=lambda w: nn.PixelShuffle(2), b=lambda w: nn.Conv2d(w, w, 3),
        ),
        IMAGES[:2], 64, 24,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.every(3)
def test_mean_over_networks(name: str) -> None:
    """NNGP and NTK of finite draws, their mean within their standard errors of the limit."""
    factory, x, width, nets = FINITE[name]
    exact = tg.infinite_ntk(factory(8).eval(), b_var=0.1, samples=1024).both(x)
    module = factory(width).double().eval()
    kernel = Scaled.of(module, x, scales(module, b_var=0.1))
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for seed in range(nets):
        tg.infinite.draw(module, b_var=0.1, seed=seed)
        now = kernel.prepare(x)
        with torch.no_grad():
            y = module(x)
        found[0].append(y @ y.T / OUT)
        found[1].append(kernel.between(now, now).double())
    for which, want, drawn in zip(("nngp", "ntk"), exact, map(torch.stack, found), strict=True):
        z = (drawn.mean(0) - want) / (drawn.std(0) / nets**0.5)
        along = (drawn * want).sum((1, 2)) / want.square().sum()
        off = float((along.mean() - 1) / (along.std() / nets**0.5))
        assert abs(off) < 3, f"{name}, {which}: off by {float(along.mean() - 1):.3f}"
        assert float(z.abs().max()) < 4.5, f"{name}, {which}: {z}"
    assert float((drawn.std(0) / nets**0.5).max() / exact[1].abs().max()) < 0.1  # enough networks to tell


@pytest.mark.parametrize("name", ["squeeze-excite", "ConvNeXt block", "norm of an activation", "PixelShuffle"])
def test_is_a_kernel_like_others(name: str) -> None:
    """Parts of a Gram matrix, its diagonal, one sample, float32, and a copy by pickle agree."""
    factory, x, _, _ = FINITE[name]
    k = tg.infinite_ntk(factory(8).eval(), b_var=0.1, samples=256)
    whole = k(x)
    torch.testing.assert_close(k(x[:1], x), whole[:1])
    torch.testing.assert_close(k.diag(x), whole.diagonal(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(whole, whole.T)
    single = tg.infinite_ntk(factory(8).eval(), b_var=0.1, samples=256, dtype="float32")(x)
    torch.testing.assert_close(single.double(), whole, rtol=1e-4, atol=1e-4)
    if name != "PixelShuffle" and name != "norm of an activation":  # lambdas are not pickled
        torch.testing.assert_close(pickle.loads(pickle.dumps(k))(x), whole)


# Refusals


def conv(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 1), *more)


def two(fn: Callable[[Any, Tensor], Tensor], **parts: Any) -> nn.Module:
    return Ask(fn, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(3, 8, 1), **parts)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "one trained number": (
        lambda: Ask(lambda s, x: s.c(s.g * s.a(x)), g=nn.Parameter(torch.ones(1)), a=nn.Linear(6, 8), c=nn.Identity()),
        VECTORS, r"mul at .*one trained number \(g\).*no limit.*Freeze",
    ),
    "scales of another axis": (
        lambda: two(lambda s, x: s.a(x) * s.g, g=nn.Parameter(torch.ones(4))), IMAGES, r"mul at .*not one number per",
    ),
    "groups of joined channels": (
        lambda: two(lambda s, x: s.n(torch.cat([s.a(x), s.b(x)], 1)), n=nn.GroupNorm(2, 16)), IMAGES,
        r"n \(GroupNorm\).*joined",
    ),
    "grouped convolution of joined channels": (
        lambda: two(lambda s, x: s.n(torch.cat([s.a(x), s.b(x)], 1)), n=nn.Conv2d(16, 16, 1, groups=2)), IMAGES,
        r"n \(Conv2d\).*joined",
    ),
    "one channel in each group": (lambda: conv(nn.GroupNorm(8, 8)), IMAGES, r"1 \(GroupNorm\).*GroupNorm\(1"),
    "variance over positions": (
        lambda: two(lambda s, x: (lambda h: h / h.std((2, 3), keepdim=True))(s.a(x))), IMAGES, "std at .*positions",
    ),
    "a mean of another value": (
        lambda: two(lambda s, x: (lambda h: s.b(x) - torch.relu(h).mean(1, keepdim=True))(s.a(x))), IMAGES,
        r"sub at .*own mean",
    ),
    "a mean over channels as output": (lambda: two(lambda s, x: s.a(x).pow(2).mean(1)), IMAGES, r"mean at .*read-out"),
    "several axes": (
        lambda: Ask(lambda s, x: torch.einsum("btc,htc->bth", x, s.w), w=nn.Parameter(torch.randn(4, 5, 6))), SERIES,
        r"einsum at .*contracts",
    ),
    "choice by another value": (
        lambda: two(lambda s, x: (lambda h: torch.where(h > 0, s.b(x), h))(s.a(x))), IMAGES, r"where at .*other values",
    ),
    "a function of a parameter": (
        lambda: two(lambda s, x: s.a(x) * torch.sigmoid(s.g), g=nn.Parameter(torch.zeros(8, 1, 1))), IMAGES,
        r"sigmoid at .*parameter g.*freeze",
    ),
    "a cell in a loop": (
        lambda: Ask(lambda s, x: s.a(x[:, 1], s.a(x[:, 0])), a=nn.RNNCell(6, 8)), SERIES, r"a \(RNNCell\).*nn\.RNN",
    ),
    "instance norm": (lambda: two(lambda s, x: F.instance_norm(s.a(x))), IMAGES, r"instance_norm at .*layer_norm"),
    "bags by offsets": (lambda: nn.EmbeddingBag(6, 8), TOKENS[:, 0], r"\(EmbeddingBag\).*offsets"),
    "channels rolled onto themselves": (
        lambda: two(lambda s, x: (lambda h: h + torch.roll(h, 1, 1))(s.a(x))), IMAGES, r"add at .*correlated",
    ),
    "samples first for an RNN that has them second": (lambda: nn.RNN(6, 8), SERIES, r"\(RNN\).*batch_first=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_the_fix(name: str) -> None:
    model, x, message = REFUSED[name]
    with pytest.raises(TangencyError, match=message):
        tg.infinite_ntk(model())(x)
