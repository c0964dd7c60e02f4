"""Trained position biases of attention's scores: finite networks, identities, spellings, refusals; masks, one head."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from tangency.infinite.finite import Scaled, scales

T = 4
VARIANCE = 6.0  # of the tables: far from that of any named initialisation, so it is measured
torch.manual_seed(5)
X, Y = torch.randn(3, T, 5, dtype=torch.float64), torch.randn(2, T, 5, dtype=torch.float64)
LONG = torch.randn(3, 2 * T, 5, dtype=torch.float64)  # of two windows
STEPS = torch.arange(T)[:, None] - torch.arange(T)
NUMBERS = {"w_var": 1.0, "b_var": 0.1}


class Biased(nn.Module):
    """Attention whose heads each have a table, in some spelling; within windows if there are several."""

    def __init__(self, width: int, size: int, kind: str, out: int = 16) -> None:
        super().__init__()
        self.size, self.kind, self.windows = size, kind, 2 if kind == "windows" else 1
        self.heads = heads = width // size
        self.x, self.qkv = nn.Linear(5, width), nn.Linear(width, 3 * width)
        self.o, self.out = nn.Linear(width, width), nn.Linear(width, out)
        rows = 3 if kind == "buckets" else 2 * T - 1
        if kind == "embedding":
            self.table: Any = nn.Embedding(rows, heads)
        elif kind != "none":
            drawn = torch.randn(rows, heads)
            drawn = (drawn - drawn.mean()) * (VARIANCE / drawn.var(correction=0)) ** 0.5
            self.table = nn.Parameter(torch.zeros_like(drawn) if kind == "zeros" else drawn)
            self.table = nn.Parameter(torch.ones_like(drawn)) if kind == "constant" else self.table
            self.table = nn.Parameter(drawn.T.contiguous()) if kind == "turned" else self.table
        self.register_buffer("index", STEPS.clamp(-1, 1) + 1 if kind == "buckets" else STEPS + T - 1)
        mask = torch.zeros(self.windows, T, T)
        mask[0, 0, 2:] = -torch.inf
        self.register_buffer("mask", mask)

    def bias(self) -> Tensor:
        if self.kind == "embedding":
            return self.table(self.index).permute([2, 0, 1]).unsqueeze(0)
        if self.kind == "turned":  # LeViT
            return self.table[:, self.index]
        return self.table[self.index.view(-1)].view(T, T, -1).permute(2, 0, 1).contiguous().unsqueeze(0)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind == "given":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias())
        scores = q @ k.transpose(-2, -1) * self.size**-0.5
        if self.kind == "windows":  # Swin, shifted
            scores = (scores + self.bias()).view(-1, self.windows, self.heads, T, T) + self.mask.unsqueeze(1)
            scores = scores.view(-1, self.heads, T, T)
        elif self.kind == "expanded":  # MPNet
            scores += self.bias().expand((q.shape[0], -1, T, T)).contiguous()
        elif self.kind == "halved":
            scores = (2 * scores + 2 * self.bias()) / 2
        elif self.kind != "none":
            scores = scores + self.bias()
        return scores.softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        parts = self.qkv(self.x(x)).view(n * self.windows, T, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        mixed = self.attended(*parts.unbind(0)).transpose(1, 2).reshape(n, -1, self.heads * self.size)
        return self.out(F.relu(self.o(mixed)).mean(1))


def options(net: Biased, **more: Any) -> dict[str, Any]:
    by_layer = {"w_var": {"": 1.0, "table": VARIANCE}} if net.kind == "embedding" else {}
    return {"samples": 64, **NUMBERS, **by_layer, **more}


def both(kind: str, *x: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    net = Biased(32, 8, kind).eval()
    return tg.infinite_ntk(net, **options(net, **more)).both(*x)


# Finite networks


@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")
@pytest.mark.parametrize(
    "kind", ["windows", *(pytest.param(k, marks=pytest.mark.slow) for k in ("table", "zeros", "buckets", "embedding"))]
)
def test_mean_over_finite_networks(kind: str) -> None:
    """NNGP, tangent kernel, and the part of it that the table's training makes; zeros in the standard form."""
    x, nets, outputs = (LONG if kind == "windows" else X)[:2].float(), 16, 32
    small, standard = Biased(64, 16, kind).eval(), kind == "zeros"
    name = "table.weight" if kind == "embedding" else "table"
    more = {"samples": 1024, "parametrization": "standard" if standard else "ntk"}
    nngp, ntk = tg.infinite_ntk(small, **options(small, **more)).both(x)
    part = tg.infinite_ntk(small, **options(small, **more), trainable=name)(x)
    module = Biased(320, 20, kind, outputs).eval()
    variances = {
        n: (0.0 if standard else VARIANCE) if n == name else 0.1 if n.endswith("bias") else 1 / p.shape[1]
        for n, p in module.named_parameters()
    }
    own = {name: 1.0 if standard else VARIANCE}
    # The sum over all parameters is compared where widths drop out of it.
    kernels = [Scaled.of(module, x, own)] + ([] if standard else [Scaled.of(module, x, variances | own)])
    found: list[list[Tensor]] = [[] for _ in range(3)]
    for seed in range(nets):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for n, p in module.named_parameters():
                p.copy_(variances[n] ** 0.5 * torch.randn(p.shape, generator=generator))
            f = module(x).double()
        found[0].append(f @ f.T / outputs)
        for k, kernel in enumerate(kernels):
            now = kernel.prepare(x)
            found[k + 1].append(kernel.between(now, now).double())
    for drawn, want in zip([torch.stack(v) for v in found if v], (nngp, part, ntk), strict=False):
        along = (drawn * want).sum((1, 2)) / want.square().sum()
        assert abs(float((along.mean() - 1) / (along.std() / nets**0.5))) < 3, f"{kind}: {along.mean()}"
        assert float(along.std()) < 0.5


# Identities


@pytest.mark.parametrize("kind", ["turned", "given", "expanded", "halved", "embedding"])
@pytest.mark.every(3)
def test_every_spelling_is_one_kernel(kind: str) -> None:
    for x in ((X,), (X, Y)):
        for got, want in zip(both(kind, *x), both("table", *x), strict=True):
            assert torch.allclose(got, want, rtol=1e-9)


def test_tables_of_zeros_and_constants_are_not_seen() -> None:
    """A softmax sees no constant; one that is trained is seen in the standard parametrisation alone."""
    none, zeros, constant = (both(kind, X) for kind in ("none", "zeros", "constant"))
    assert torch.equal(zeros[0], none[0])
    assert torch.equal(zeros[1], none[1])
    assert torch.equal(constant[0], none[0])
    standard = [both(kind, X, parametrization="standard")[1] for kind in ("none", "zeros", "constant")]
    assert torch.equal(standard[1], standard[2])
    assert bool((standard[1] - standard[0]).diagonal().gt(0).all())
    init = [both(kind, X, w_var="init", b_var=0.0)[0] for kind in ("none", "zeros")]
    assert init[0].shape == init[1].shape


def test_what_is_trained_and_how_fast() -> None:
    net = Biased(32, 8, "table").eval()
    whole = tg.infinite_ntk(net, **options(net))(X, Y)
    others = [n for n, _ in net.named_parameters() if n != "table"]
    part = tg.infinite_ntk(net, **options(net), trainable="table")(X, Y)
    rest = tg.infinite_ntk(net, **options(net), trainable=others)(X, Y)
    assert torch.allclose(part + rest, whole, rtol=1e-9)
    fast = tg.infinite_ntk(net, **options(net), lr={"": 1.0, "table": 3.0})(X, Y)
    assert torch.allclose(fast, whole + 2 * part, rtol=1e-9)


def test_kernels_travel_round_and_are_symmetric() -> None:
    net = Biased(32, 8, "buckets").eval()
    k = tg.infinite_ntk(net, **options(net))
    assert torch.equal(pickle.loads(pickle.dumps(k))(X, Y), k(X, Y))
    assert torch.allclose(k(X, Y), k(Y, X).T, rtol=1e-9)
    assert torch.allclose(k.diag(X), k(X).diagonal(), rtol=1e-9)
    assert torch.allclose(tg.infinite_ntk(net, **options(net), dtype="float32")(X).double(), k(X), rtol=1e-4)
    assert float(k.error(X, repeats=2).max()) > 0
    assert k.spec()["layers"] is not None


@pytest.mark.slow
def test_uniform_tables_are_drawn_uniform() -> None:
    """One of two keys: E σ(b₁ − b₂)² with uniform b, by the plain average over a grid."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(5, 512) for _ in range(4))
            self.out = nn.Linear(512, 1)
            self.table = nn.Parameter(8 * torch.rand(256, 2) - 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p.view(-1, 2, 256, 2).transpose(1, 2) for p in (self.q(x), self.k(x), self.v(x)))
            scores = q @ k.mT * 0.0 + self.table[:, None]
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 2, 512)[:, 0])

    x = torch.zeros(1, 2, 5, dtype=torch.float64)
    x[0, 0, 0] = 5**0.5  # the second key's value is zero
    got = float(tg.infinite_nngp(Pair(), w_var=1.0, samples=1 << 14)(x))
    b = torch.linspace(-4, 4, 801, dtype=torch.float64)
    assert abs(got / float(torch.sigmoid(b[:, None] - b).square().mean()) - 1) < 0.02


# Masks that leave nothing, single heads, joined biases, norms of queries, autograd functions


class Freely(nn.Module):
    """forward() as given, with layers of the names that it uses."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 1)
        self.one, self.two, self.mix, self.keys = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(2, 2), nn.Linear(T, T)
        self.table, self.tables, self.way = nn.Parameter(torch.randn(T, T)), nn.Parameter(torch.randn(2, T, T)), forward
        self.first, self.last = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        self.weight, self.bias = nn.Parameter(torch.randn(24, 5)), nn.Parameter(torch.zeros(24))
        self.register_buffer("none", torch.zeros(8))
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.way(self, x))


def kernels(way: Callable[[Any, Tensor], Tensor], x: Tensor = X, **more: Any) -> tuple[Tensor, Tensor]:
    return tg.infinite_ntk(Freely(way).eval(), **({"samples": 64, "b_var": 0.1} | more)).both(x)


def test_a_query_whose_scores_are_all_one_number_takes_the_mean() -> None:
    """masked_fill with a finite number leaves a uniform softmax without gradients, as DeBERTa has it for padding."""
    rows = torch.zeros(T, T, dtype=torch.bool)
    rows[1] = True

    def filled(s: Any, x: Tensor) -> Tensor:
        scores = (s.a(x) @ s.b(x).mT).masked_fill(rows, torch.finfo(torch.float32).min) / 8**0.5
        return (scores.softmax(-1) @ s.c(x))[:, 1]

    for got, want in zip(kernels(filled), kernels(lambda s, x: s.c(x).mean(1)), strict=True):
        assert torch.allclose(got, want, rtol=1e-12)


def split(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], T, heads, 4).transpose(1, 2)


def turned(x: Tensor) -> Tensor:
    angle = torch.arange(T, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3, 1.0, 0.3], dtype=x.dtype)
    return x * angle.cos() + torch.cat((-x[..., 2:], x[..., :2]), -1) * angle.sin()


def shared(s: Any, x: Tensor, keys: nn.Module, values: nn.Module, heads: int) -> Tensor:
    """Llama's attention with as many heads of keys and values, repeated by expand."""
    k, v = (split(p(x), heads) for p in (keys, values))
    k = turned(k)
    k, v = (p[:, :, None].expand(-1, heads, 2 // heads, T, 4).reshape(-1, 2, T, 4) for p in (k, v))
    return F.scaled_dot_product_attention(turned(split(s.a(x), 2)), k, v).transpose(1, 2).reshape(-1, T, 8)


def test_a_single_head_that_is_expanded_is_one_of_each() -> None:
    """Gemma's: keys turned by position and values of one head have the moments of two heads' own."""
    one = kernels(lambda s, x: shared(s, x, s.one, s.two, 1))
    two = kernels(lambda s, x: shared(s, x, s.b, s.c, 2))
    for got, want in zip(one, two, strict=True):
        assert torch.allclose(got, want, rtol=1e-9)


def test_a_bias_joined_of_parts_is_that_of_each() -> None:
    """BEiT's biases of queries and values, none of the keys, which no softmax would see."""

    def joined(s: Any, x: Tensor) -> Tensor:
        return _attend(F.linear(x, s.weight, torch.cat((s.first, s.none, s.last))))

    for got, want in zip(kernels(joined), kernels(lambda s, x: _attend(F.linear(x, s.weight, s.bias))), strict=True):
        assert torch.allclose(got, want, rtol=1e-9)


def _attend(y: Tensor) -> Tensor:
    q, k, v = y.view(-1, T, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, T, 8).mean(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")
def test_a_trained_scale_of_queries_over_finite_networks() -> None:
    class Normed(nn.Module):
        def __init__(self, width: int, size: int) -> None:
            super().__init__()
            self.heads, self.size, self.x, self.norm = width // size, size, nn.Linear(5, width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
            self.o = nn.Linear(width, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.x(x)
            q, k, v = (
                p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.norm(self.q(h)), self.k(h), self.v(h))
            )
            return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))

    x, nets, name = X.float(), 60, "norm.weight"
    want = tg.infinite_ntk(Normed(64, 16).eval(), samples=4096, trainable=name, **NUMBERS)(x)
    module = Normed(1024, 64).eval()
    kernel = Scaled.of(module, x, {name: 1.0})
    found = []
    for seed in range(nets):
        tg.infinite.draw(module, seed=seed, **NUMBERS)
        now = kernel.prepare(x)
        found.append(kernel.between(now, now).double())
    along = (torch.stack(found) * want).sum((1, 2)) / want.square().sum()
    assert abs(float((along.mean() - 1) / (along.std() / nets**0.5))) < 3


class Honest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s + x * s * (1 - s))


class Through(Honest):
    """A straight-through estimator."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Clipped(Honest):
    """The derivative, of small cotangents alone."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Honest.backward(ctx, g).clamp(-1, 1)


def test_autograd_functions_by_their_forward_if_backward_is_its_derivative() -> None:
    def by(kind: Any) -> Callable[[Any, Tensor], Tensor]:
        return lambda s, x: kind.apply(s.a(x) if x.shape[1:] else x).mean(1)  # a question of shapes: it is run

    for got, want in zip(kernels(by(Honest)), kernels(lambda s, x: F.silu(s.a(x)).mean(1)), strict=True):
        assert torch.allclose(got, want, rtol=1e-9)
    for kind in (Through, Clipped):
        with pytest.raises(tg.errors.UnsupportedModule, match=r"without gradients .*autograd\.Function"):
            kernels(by(kind))


class Talking(nn.Module):
    """Weights mix the heads before and after the softmax, as CaiT has it."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.heads, self.size = width // size, size
        self.x, self.qkv = nn.Linear(5, width), nn.Linear(width, 3 * width)
        self.o, self.out = nn.Linear(width, width), nn.Linear(width, 32)
        self.before, self.after = (nn.Linear(self.heads, self.heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.x(x)).view(-1, T, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.mT * self.size**-0.5).permute(0, 2, 3, 1)
        weights = self.before(scores).permute(0, 3, 1, 2).softmax(-1)
        weights = self.after(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out(F.relu(self.o((weights @ v).transpose(1, 2).flatten(2))).mean(1))


@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")
@pytest.mark.slow
def test_talking_heads_over_finite_networks() -> None:
    """All parameters, and each of those that mix heads by itself."""
    x, nets, numbers = X[:2].float(), 16, {"w_var": {"": 1.0, "before": 2.0, "after": 1.5}, "b_var": 0.1}
    module, small = Talking(512, 16).eval(), Talking(64, 16).eval()
    whole = scales(module, **numbers)
    parts = [None, "before.weight", "after.weight", "after.bias"]
    kernels = [Scaled.of(module, x, whole if name is None else {name: whole[name]}) for name in parts]
    found: list[list[Tensor]] = [[] for _ in range(5)]
    for seed in range(nets):
        tg.infinite.draw(module, seed=seed, **numbers)
        with torch.no_grad():
            f = module(x).double()
        found[4].append(f @ f.T / 32)
        for kernel, drawn in zip(kernels, found, strict=False):
            now = kernel.prepare(x)
            drawn.append(kernel.between(now, now).double())
    exact = [
        tg.infinite_ntk(small, samples=1024, **numbers, **({} if name is None else {"trainable": name}))(x)
        for name in parts
    ]
    exact.append(tg.infinite_nngp(small, samples=1024, **numbers)(x))
    for drawn, want in zip(map(torch.stack, found), exact, strict=True):
        along = (drawn * want).sum((1, 2)) / want.square().sum()
        assert abs(float((along.mean() - 1) / (along.std() / nets**0.5))) < 3
    assert float(tg.infinite_ntk(small, samples=64, **numbers, trainable="before.bias")(x).abs().max()) < 1e-12


# Refusals


def scored(bias: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Attention of two heads with a summand."""

    def way(s: Any, x: Tensor) -> Tensor:
        scores = split(s.a(x), 2) @ split(s.b(x), 2).mT + bias(s, x)
        return (scores.softmax(-1) @ split(s.c(x), 2)).transpose(1, 2).reshape(-1, T, 8).mean(1)

    return way


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "one table for all heads": (scored(lambda s, x: s.table), "same numbers of table to the scores of all heads"),
    "heads that share entries": (scored(lambda s, x: s.tables[[0, 0]]), "numbers of tables that heads share"),
    "a bias made by weights": (scored(lambda s, x: (s.one(x) @ s.two(x).mT)[:, None]), "what weights made"),
    "a parameter and a mask, elsewhere": (lambda s, x: s.a(x + s.table[:, :1] * 2), "adds a parameter to an input"),
    "a weak mask": (scored(lambda s, x: s.tables.masked_fill(STEPS > 0, -1.0)), "fills a parameter with -1.0"),
    "heads mixed after a bias": (
        lambda s, x: s.mix((split(s.a(x), 2) @ split(s.b(x), 2).mT + s.tables).permute(0, 2, 3, 1)),
        "mixes the heads of scores after a mask or bias",
    ),
    "weights over the keys": (lambda s, x: s.keys(split(s.a(x), 2) @ split(s.b(x), 2).mT), "where they mix heads"),
    "axes that are not there": (lambda s, x: s.a(x).permute(0, 2), "gives 2 axes to values that have 3"),
    "parameters side by side": (lambda s, x: s.a(x) + torch.cat((s.table, s.table)), "uses of table|joins parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_way_out(name: str) -> None:
    way, message = REFUSED[name]
    with pytest.raises(tg.errors.TangencyError, match=message):
        kernels(way)
