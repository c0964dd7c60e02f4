"""Attention as people write it: every spelling is the same kernel; masks, two sequences, groups, decoders; refusals."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from tangency.infinite.finite import Scaled, scales
from tangency.infinite.moments.attention import Attention

C, H, D, T = 8, 2, 4, 3  # channels, heads, of each, positions
torch.manual_seed(3)
X, Y = torch.randn(3, T, 5, dtype=torch.float64), torch.randn(2, T, 5, dtype=torch.float64)
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


class Spelled(nn.Module):
    """A token layer, attention in some spelling of q, k, v from one matrix, and a read-out."""

    def __init__(self, attend: Callable[[Any, Tensor], Tensor], one: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.inputs, self.attend = nn.Linear(5, C), attend
        if one:
            self.qkv = nn.Linear(C, 3 * C, bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(C, C, bias=bias) for _ in range(3))
        self.o, self.out = nn.Linear(C, C), nn.Linear(C, 1)
        self.softmax, self.drop = nn.Softmax(-1), nn.Dropout(0.1)
        self.register_buffer("mask", CAUSAL.view(1, 1, T, T))
        self.register_buffer("minus", torch.zeros(T, T).masked_fill(~CAUSAL, -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        return self.out(F.relu(self.o(self.attend(self, x))).mean(1))


class Reference(nn.Module):
    """The same with nn.MultiheadAttention."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.inputs, self.a, self.out = nn.Linear(5, C), nn.MultiheadAttention(C, H, batch_first=True), nn.Linear(C, 1)
        self.register_buffer("mask", ~CAUSAL if causal else None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        return self.out(F.relu(self.a(x, x, x, attn_mask=self.mask, need_weights=False)[0]).mean(1))


def heads(x: Tensor) -> Tensor:
    return x.view(x.size(0), x.size(1), H, D).transpose(1, 2)


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).contiguous().view(y.size(0), -1, C)


def by_split(m: Any, x: Tensor) -> Tensor:
    """nanoGPT, the fast branch."""
    q, k, v = m.qkv(x).split(C, dim=2)
    return joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v)))


def by_hand(m: Any, x: Tensor) -> Tensor:
    """nanoGPT, the slow branch, without its mask."""
    q, k, v = m.qkv(x).split(C, dim=2)
    att = (heads(q) @ heads(k).transpose(-2, -1)) * (1.0 / D**0.5)
    return joined(m.drop(F.softmax(att, dim=-1)) @ heads(v))


def by_chunk(m: Any, x: Tensor) -> Tensor:
    """Heads as part of the batch, torch.bmm and baddbmm."""
    q, k, v = m.qkv(x).chunk(3, -1)
    q, k, v = (p.unflatten(-1, (H, D)).permute(0, 2, 1, 3).reshape(-1, T, D) for p in (q, k, v))
    att = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / D**0.5, -1), v)
    return att.view(-1, H, T, D).permute(0, 2, 1, 3).flatten(2)


def by_unbind(m: Any, x: Tensor) -> Tensor:
    """timm's ViT."""
    q, k, v = m.qkv(x).reshape(x.shape[0], x.shape[1], 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    att = m.softmax((q * D**-0.5) @ k.transpose(-2, -1))
    return (att @ v).transpose(1, 2).reshape(x.shape[0], x.shape[1], C)


def by_slices(m: Any, x: Tensor) -> Tensor:
    """Slices of the channels, einsum."""
    y = m.qkv(x)
    q, k, v = (p.view(-1, T, H, D) for p in (y[..., :C], y[..., C : 2 * C], y[..., 2 * C :]))
    att = torch.einsum("bqhd,bkhd->bhqk", q, k).div(D**0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", att, v).reshape(-1, T, C)


def by_layers(m: Any, x: Tensor) -> Tensor:
    """Three layers, times first, heads merged with the batch."""
    x = x.transpose(0, 1)
    q, k, v = (p.contiguous().view(T, -1, D).transpose(0, 1) for p in (m.q(x), m.k(x), m.v(x)))
    scores = torch.baddbmm(m.minus, q, k.transpose(1, 2), beta=0, alpha=D**-0.5)
    y = torch.matmul(torch.softmax(scores, dim=2), v)
    return y.transpose(0, 1).contiguous().view(T, -1, C).transpose(0, 1)


def by_interleaving(m: Any, x: Tensor) -> Tensor:
    """GPT-NeoX: each head's q, k and v side by side."""
    q, k, v = m.qkv(x).view(-1, T, H, 3 * D).transpose(1, 2).chunk(3, dim=-1)
    return F.scaled_dot_product_attention(q, k, v, scale=D**-0.5).transpose(1, 2).flatten(2)


def by_flat_tokens(m: Any, x: Tensor) -> Tensor:
    """Hugging Face's Conv1D: tokens of all samples as rows of one matrix."""
    y = torch.addmm(m.qkv.bias, x.reshape(-1, C), m.qkv.weight.t()).view(-1, T, 3 * C)
    q, k, v = y.split(C, 2)
    return joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v)))


SPELLINGS = (by_split, by_hand, by_chunk, by_unbind, by_slices, by_layers, by_interleaving, by_flat_tokens)


def both(net: nn.Module, *x: Any, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"samples": 64, "b_var": 0.1} | options
    return tg.infinite_ntk(net.eval(), **options).both(*x)


@pytest.mark.parametrize("attend", SPELLINGS, ids=lambda f: f.__name__)
@pytest.mark.every(3)
def test_every_spelling_is_one_kernel(attend: Callable[[Any, Tensor], Tensor]) -> None:
    net = Spelled(attend, one=attend is not by_layers)
    for x in ((X,), (X, Y), (X[:1],)):
        for got, want in zip(both(net, *x), both(Reference(), *x), strict=True):
            assert torch.allclose(got, want, rtol=1e-9)


def masked(m: Any, x: Tensor) -> Tensor:
    """nanoGPT's slow branch."""
    q, k, v = m.qkv(x).split(C, dim=2)
    att = (heads(q) @ heads(k).transpose(-2, -1)) * (1.0 / D**0.5)
    att = att.masked_fill(m.mask == 0, float("-inf"))
    return joined(F.softmax(att, dim=-1) @ heads(v))


def added(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).split(C, dim=2)
    att = torch.matmul(heads(q), heads(k).transpose(2, 3)) / D**0.5 + m.minus
    return joined(F.softmax(att, dim=-1, dtype=torch.float32).to(x.dtype) @ heads(v))


def chosen(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).split(C, dim=2)
    att = torch.where(m.mask, heads(q) @ heads(k).mT, torch.finfo(torch.float32).min) / D**0.5
    return joined(F.softmax(att, dim=-1) @ heads(v))


def flagged(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).split(C, dim=2)
    return joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True))


def given(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).split(C, dim=2)
    return joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=m.mask))


@pytest.mark.parametrize("attend", [masked, added, chosen, flagged, given], ids=lambda f: f.__name__)
@pytest.mark.every(3)
def test_every_causal_mask_is_one_kernel(attend: Callable[[Any, Tensor], Tensor]) -> None:
    net = Spelled(attend)
    for x in ((X,), (X[:1], Y)):
        for got, want in zip(both(net, *x), both(Reference(causal=True), *x), strict=True):
            assert torch.allclose(got, want, rtol=1e-9)
    k = tg.infinite_ntk(net.eval(), samples=64)
    assert torch.allclose(k.diag(X), k(X).diagonal(), rtol=1e-9)
    small = tg.infinite_ntk(net, samples=64, dtype="float32")
    assert torch.allclose(small(X).double(), k(X), rtol=1e-4)


class Cross(nn.Module):
    """Attention from one sequence to another; by torch's module or by hand, the batch first or second."""

    def __init__(self, hand: bool, first: bool = True, width: int = C, keys: int = 6, out: int = 1) -> None:
        super().__init__()
        self.x, self.y, self.hand, self.first = nn.Linear(5, width), nn.Linear(4, keys), hand, first
        self.heads = max(1, width // 4)
        if hand:
            self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(keys, width), nn.Linear(keys, width)
            self.o = nn.Linear(width, width)
        else:
            self.a = nn.MultiheadAttention(width, self.heads, kdim=keys, vdim=keys, batch_first=first)
        self.out = nn.Linear(width, out)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.x(x), self.y(y)
        if not self.hand:
            x, y = (x, y) if self.first else (x.transpose(0, 1), y.transpose(0, 1))
            z = self.a(x, y, y, need_weights=False)[0]
            z = z if self.first else z.transpose(0, 1)
        else:
            q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q(x), self.k(y), self.v(y)))
            att = (q @ k.transpose(-1, -2) / q.size(-1) ** 0.5).softmax(-1)
            z = self.o((att @ v).transpose(1, 2).flatten(2))
        return self.out(F.relu(z).mean(1))


MEMORY = torch.randn(3, 4, 4, dtype=torch.float64)


def test_cross_attention_in_every_form() -> None:
    want = both(Cross(hand=True), (X, MEMORY))
    for net in (Cross(hand=False), Cross(hand=False, first=False)):
        for got, ref in zip(both(net, (X, MEMORY)), want, strict=True):
            assert torch.allclose(got, ref, rtol=1e-9)


def test_masks_of_any_form_agree_with_torch_s_module() -> None:
    """Padding, and the same as a mask of every sample's and head's own scores."""
    padding = torch.tensor([[False] * 3, [False, False, True], [False, True, True]])

    class Padded(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.inputs, self.a, self.out = (
                nn.Linear(5, C),
                nn.MultiheadAttention(C, H, batch_first=True),
                nn.Linear(C, 1),
            )
            self.how = how

        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            x = self.inputs(x)
            if self.how == "padding":
                z = self.a(x, x, x, key_padding_mask=pad)[0]
            else:
                z = self.a(x, x, x, attn_mask=pad[:, None].expand(-1, T, T).repeat_interleave(H, 0))[0]
            return self.out(F.relu(z)[:, 0])

    a, b = (both(Padded(how), (X, padding), samples=1 << 12, w_var=0.7) for how in ("padding", "scores"))
    for got, want in zip(a, b, strict=True):
        assert torch.allclose(got, want, rtol=1e-2)  # by other draws


class Freely(nn.Module):
    """forward() as given, with layers of the names that it uses."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(5, C), nn.Linear(5, C), nn.Linear(5, 3 * C), nn.Linear(C, 1)
        self.table, self.way = nn.Parameter(torch.randn(T, T)), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.way(self, x))


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "softmax over the queries": (
        lambda s, x: (s.a(x) @ s.b(x).transpose(1, 2)).softmax(1) @ s.c(x)[..., :C],
        r"softmax at .*not that of the keys",
    ),
    "no softmax": (lambda s, x: (s.a(x) @ s.b(x).mT) @ s.c(x)[..., :C], "without a softmax"),
    "one matrix for queries and keys": (
        lambda s, x: (lambda q: (q @ q.mT).softmax(-1) @ s.c(x)[..., :C])(s.a(x)),
        r"matmul at .*share weights",
    ),
    "overlapping slices": (
        lambda s, x: (lambda y: (y[..., :C] @ y[..., C // 2 : C // 2 + C].mT).softmax(-1) @ s.b(x))(s.c(x)),
        "share weights",
    ),
    "values that are keys": (
        lambda s, x: (lambda k: (s.a(x) @ k.mT).softmax(-1) @ k)(s.b(x)),
        "values that share weights with its queries or keys",
    ),
    "channels that attend to channels": (
        lambda s, x: ((s.a(x).mT @ s.b(x)).softmax(-1) @ s.c(x)[..., :C].mT).mT,
        "attention sums over channels",
    ),
    "a weak mask": (
        lambda s, x: (s.a(x) @ s.b(x).mT).masked_fill(torch.ones(T, T).tril() == 0, -1.0).softmax(-1) @ s.c(x)[..., :C],
        "fills scores with -1.0",
    ),
    "a query without keys": (
        lambda s, x: (s.a(x) @ s.b(x).mT).masked_fill(torch.ones(T, T) == 1, -torch.inf).softmax(-1) @ s.c(x)[..., :C],
        "without any key",
    ),
    "heads that are not joined": (lambda s, x: s.a(x).view(-1, T, H, D) + s.b(x).view(-1, T, H, D), "channel 2 × chan"),
    "samples that are split": (lambda s, x: s.a(x).view(-1, C * T * x.size(0)), "batch"),
    "overlapping sum": (lambda s, x: (lambda y: y[..., :C] + y[..., 1 : C + 1])(s.c(x)), "correlated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_way_out(name: str) -> None:
    way, message = REFUSED[name]
    with pytest.raises(tg.errors.TangencyError, match=message):
        tg.infinite_ntk(Freely(way), samples=64)(X)


def test_parts_of_the_channels_are_independent_and_come_back_as_they_were() -> None:
    """A gate of two halves is a gate of two layers; view there and back adds no operation; a shuffle no other law."""
    two = Freely(lambda s, x: torch.tanh(s.a(x)) * s.b(x))
    one = Freely(lambda s, x: (lambda y: torch.tanh(y[..., C : 2 * C]) * y[..., 2 * C :])(s.c(x)))
    assert torch.allclose(tg.infinite_ntk(one)(X), tg.infinite_ntk(two)(X), rtol=1e-12)
    plain = Freely(lambda s, x: torch.relu(s.a(x)))
    for way in (
        lambda s, x: torch.relu(s.a(x).view(-1, T, H, D).transpose(1, 2)).transpose(1, 2).reshape(-1, T, C),
        lambda s, x: torch.relu(s.a(x).transpose(0, 1)).transpose(0, 1),
        lambda s, x: torch.relu(s.a(x).reshape(-1, C)).view(-1, T, C),
        lambda s, x: torch.relu(s.a(x).view(-1, T, H, D).transpose(2, 3).flatten(2)),
        lambda s, x: torch.relu(torch.cat([s.a(x), s.b(x)], -1)[..., :C]),
    ):
        assert torch.equal(tg.infinite_ntk(Freely(way))(X), tg.infinite_ntk(plain)(X))


# Rotary embeddings


ANGLES = 1.0 / 10.0 ** (torch.arange(D // 2, dtype=torch.float64) * 2 / D)


class Rotary(nn.Module):
    """Queries and keys turned by position: halves of the channels (Llama), or neighbours (GPT-J)."""

    def __init__(self, neighbours: bool, start: int = 0, still: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.neighbours = nn.Linear(5, 3 * C), nn.Linear(C, 1), neighbours
        turns = (0 if still else 1) * (torch.arange(T) + start)[:, None] * ANGLES
        turns = turns.repeat_interleave(2, -1) if neighbours else torch.cat([turns, turns], -1)
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def turned(self, x: Tensor) -> Tensor:
        if self.neighbours:
            other = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        else:
            other = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)
        return (x * self.cos) + (other * self.sin)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = heads(q), heads(k), heads(v)
        return self.out(joined(F.scaled_dot_product_attention(self.turned(q), self.turned(k), v))[:, -1])


def test_rotary_embeddings_by_halves_and_by_neighbours() -> None:
    """Both are one kernel, whatever position is the first; without angles it is plain attention."""
    halves, others = both(Rotary(False), X), both(Rotary(True), X)
    shifted, still = both(Rotary(False, start=7), X), both(Rotary(False, still=True), X)
    plain = both(Freely(lambda s, x: attended(s.a(x), s.b(x), s.c(x)[..., :C])[:, -1]), X)
    for a, b, c, d, e in zip(halves, others, shifted, still, plain, strict=True):
        assert torch.allclose(a, b, rtol=0.05)  # by other draws: the waves may come with other signs
        assert torch.allclose(a, c, rtol=0.05)
        assert not torch.allclose(a, d, rtol=0.05)
        assert torch.allclose(d, e, rtol=0.05)


def test_rotary_embeddings_of_some_of_the_channels() -> None:
    """GPT-NeoX and GPT-J turn a part of each head; turned by nothing, it is as if all stood still."""

    class Partly(Rotary):
        def turned(self, x: Tensor) -> Tensor:
            return torch.cat((self.part(x[..., :2]), x[..., 2:]), dim=-1)

        def part(self, x: Tensor) -> Tensor:
            return x * self.cos[:, ::2] + torch.cat((-x[..., 1:], x[..., :1]), dim=-1) * self.sin[:, ::2]

    k = tg.infinite_ntk(Partly(False), samples=64)
    (waves,) = (n.op.waves for n in k.read(X)[1].nodes if isinstance(n.op, Attention))
    steps = torch.arange(T)[:, None] - torch.arange(T)
    # One pair of each head turns by the first angle, the other not at all: a mean of a cosine and 1.
    want = ((steps[:, :, None, None] - steps).double().cos() + 1) / 2
    assert torch.allclose(torch.einsum("rst,ruv->stuv", waves, waves), want, atol=1e-12)
    still, whole = both(Partly(False, still=True), X), both(Rotary(False, still=True), X)
    assert torch.allclose(still[1], whole[1], rtol=1e-6)


def attended(*qkv: Tensor) -> Tensor:
    return joined(F.scaled_dot_product_attention(*(heads(v) for v in qkv)))


def test_the_waves_of_rotary_embeddings_have_the_covariance_of_their_angles() -> None:
    """Σ_r w_r[s, t] w_r[s', t'] is the mean over angles of cos(angle·((s − t) − (s' − t')))."""
    k = tg.infinite_ntk(Rotary(False), samples=64)
    _, recursion = k.read(X)
    (waves,) = (n.op.waves for n in recursion.nodes if isinstance(n.op, Attention))
    steps = torch.arange(T)[:, None] - torch.arange(T)
    apart = steps[:, :, None, None] - steps
    want = (apart.unsqueeze(-1) * ANGLES).cos().mean(-1)
    assert torch.allclose(torch.einsum("rst,ruv->stuv", waves, waves), want, atol=1e-12)


# Finite networks


class Wide(nn.Module):
    """Heads of 16 channels: to a memory, with shared keys and values, or with a slope of each head's own (ALiBi)."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, count = kind, width // 16
        inner = width // 2 if kind == "grouped" else width
        self.x, self.y = nn.Linear(5, width), nn.Linear(4, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, w) for w in (width, inner, inner, width))
        self.out = nn.Linear(width, 16)
        slopes = torch.tensor([0.3, 1.5]).repeat(count // 2).view(-1, 1, 1)
        self.register_buffer("bias", -slopes * (torch.arange(T)[:, None] - torch.arange(T)).abs())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.x(x), self.y(y)
        y = y if self.kind == "cross" else x
        q, k, v = (p.unflatten(-1, (-1, 16)).transpose(1, 2) for p in (self.q(x), self.k(y), self.v(y)))
        if self.kind == "grouped":
            k, v = (p[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for p in (k, v))
        mask = self.bias if self.kind == "alibi" else None
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5 if self.kind == "grouped" else None)
        return self.out(F.relu(self.o(z.transpose(1, 2).flatten(2))).mean(1))


def decoder(width: int) -> nn.Module:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.y, self.out = nn.Linear(5, width), nn.Linear(4, width), nn.Linear(width, 16)
            self.layer = nn.TransformerDecoderLayer(width, width // 16, width, 0.0, batch_first=True)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(T))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.out(self.layer(self.x(x), self.y(y), tgt_mask=self.mask).mean(1))

    return Decoder()


@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")
@pytest.mark.parametrize("kind", ["cross", "grouped", "alibi", "decoder"])
@pytest.mark.every(4)
def test_mean_over_finite_networks(kind: str) -> None:
    x, nets, numbers = (X.float(), MEMORY.float()), 16, {"w_var": 1.0, "b_var": 0.1}
    make = decoder if kind == "decoder" else lambda width: Wide(width, kind)
    exact = tg.infinite_ntk(make(64).eval(), samples=2048, **numbers).both(x)
    module = make(128).eval()
    kernel = Scaled.of(module, x, scales(module, **numbers))
    found: list[list[Tensor]] = [[], []]
    for seed in range(100, 100 + nets):
        tg.infinite.draw(module, seed=seed, **numbers)
        now = kernel.prepare(x)
        found[1].append(kernel.between(now, now).double())
        with torch.no_grad():
            f = module(*x).double()
        found[0].append(f @ f.T / 16)
    for drawn, want in zip(map(torch.stack, found), exact, strict=True):
        along = (drawn * want).sum((1, 2)) / want.square().sum()
        assert abs(float((along.mean() - 1) / (along.std() / nets**0.5))) < 3, f"{kind}: {along}"
        assert float(along.std()) < 0.5


def test_kernels_of_attention_travel_and_tile() -> None:
    """Pickled, in tiles, and with another seed: the same numbers as at once, and an error that is not zero."""
    k = tg.infinite_ntk(Spelled(added_globally).eval(), samples=64)
    want = k(X, Y)
    assert torch.equal(pickle.loads(pickle.dumps(k))(X, Y), want)
    assert torch.allclose(torch.cat([k(X[:1], Y), k(X[1:], Y)]), want, rtol=1e-12)
    assert float(k.error(X, Y, repeats=2).max()) > 0


def added_globally(m: Any, x: Tensor) -> Tensor:
    return added(m, x)


def test_tied_embeddings_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.head = nn.Embedding(7, C), nn.Linear(C, 7, bias=False)
            self.wte.weight = self.head.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.wte(x)))

    with pytest.raises(tg.errors.UnsupportedModule, match="shares its weights with wte.*its own weights"):
        tg.infinite_ntk(Tied())(torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch's own, for the batch is second
def test_transformers_with_the_batch_second() -> None:
    class Pair(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.x, self.y, self.out, self.first = nn.Linear(5, C), nn.Linear(4, C), nn.Linear(C, 1), first
            self.t = nn.Transformer(C, H, 1, 1, C, 0.0, batch_first=first)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x, y = self.x(x), self.y(y)
            z = self.t(x, y) if self.first else self.t(x.transpose(0, 1), y.transpose(0, 1)).transpose(0, 1)
            return self.out(z.mean(1))

    for got, want in zip(both(Pair(False), (X, MEMORY)), both(Pair(True), (X, MEMORY)), strict=True):
        assert torch.equal(got, want)


def test_attention_within_windows_is_that_of_each_window() -> None:
    """Swin's windows as part of the batch: the first window's output knows of its own positions alone."""

    def windows(s: Any, x: Tensor) -> Tensor:
        q, k, v = (p.view(-1, 2, 2, H, D).transpose(2, 3).flatten(0, 1) for p in (s.a(x), s.b(x), s.c(x)[..., :C]))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 4, C)[:, 1]

    x = torch.randn(3, 4, 5, dtype=torch.float64)
    whole = Freely(lambda s, x: attended(s.a(x), s.b(x), s.c(x)[..., :C])[:, 1])
    options = {"samples": 1 << 12, "w_var": 0.7}
    for got, want in zip(both(Freely(windows), x, **options), both(whole, x[:, :2], **options), strict=True):
        assert torch.allclose(got, want, rtol=1e-2)


def test_one_position_is_two_linear_layers() -> None:
    """A softmax over one key is 1, whatever the spelling."""
    plain = Freely(lambda s, x: s.a(x)[:, 0])
    for way in (
        lambda s, x: attended(s.b(x), s.c(x)[..., :C], s.a(x))[:, 0],
        lambda s, x: (F.softmax(s.b(x) @ s.c(x)[..., :C].mT, -1) @ s.a(x))[:, 0],
    ):
        one = X[:, :1]
        for got, want in zip(both(Freely(way), one), both(plain, one), strict=True):
            assert torch.allclose(got, want, rtol=1e-12)
