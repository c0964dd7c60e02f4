"""Weights that are used in several places, and sums of values that share them.

The references are finite networks (means over draws), nn.RNN, and the same network with the inputs of a shared layer as
positions of one call, which meet by no rule of `moments/correlations.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ask import Ask
from torch import Tensor, nn

import tangency as tg
from tangency.errors import UnsupportedModule
from tangency.infinite.finite import roles

Linear = nn.Linear
N = 96


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(6, shape, generator=torch.Generator().manual_seed(seed))


def finite(model: nn.Module, x: Tensor, y: Tensor, draws: int, w_var: float, b_var: float) -> list[Tensor]:
    """NNGP and NTK of finite networks in the NTK parametrisation: [2, n, m] means, and their standard errors."""
    model, generator, chunk = model.double(), torch.Generator().manual_seed(0), 25
    known, parameters = roles(model), dict(model.named_parameters())
    factor = {"weight": w_var, "bias": b_var, "scale": 1.0, "shift": 1.0}

    def outputs(theta: dict[str, Tensor], v: Tensor) -> Tensor:
        scaled = {n: t * (factor[known[n].kind] / known[n].fan_in) ** 0.5 for n, t in theta.items()}
        return torch.func.functional_call(model, scaled, (v,))

    def first(theta: dict[str, Tensor], v: Tensor) -> Tensor:
        return outputs(theta, v)[:, 0]

    def start(name: str, p: Tensor) -> Tensor:
        shape = (chunk, *p.shape)
        if known[name].kind in ("scale", "shift"):
            return torch.full(shape, float(known[name].kind == "scale"), dtype=torch.float64)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found = []
    for _ in range(draws // chunk):
        theta = {name: start(name, p) for name, p in parameters.items()}
        f, g = (torch.func.vmap(outputs, (0, None))(theta, v) for v in (x, y))
        a, b = (torch.func.vmap(torch.func.jacrev(first), (0, None))(theta, v) for v in (x, y))
        ntk = sum(torch.einsum("dip,djp->dij", a[n].flatten(2), b[n].flatten(2)) for n in parameters)
        found.append(torch.stack([torch.einsum("dio,djo->dij", f, g) / f.shape[-1], ntk], 1))
    every = torch.cat(found)
    return [every.mean(0), every.std(0) / len(every) ** 0.5]


# Forward passes


def two(join: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """One encoder for both inputs x[:, 0] and x[:, 1], and a read-out of what both give."""
    return lambda s, x: s.out(join(s.enc(x[:, 0]), s.enc(x[:, 1])))


def encoder() -> nn.Sequential:
    return nn.Sequential(Linear(3, N), nn.ReLU(), Linear(N, N))


def again(step: Callable[[Any, Any], Any], times: int, last: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def forward(s: Any, x: Any) -> Any:
        h = s.i(x)
        for _ in range(times):
            h = step(s, h)
        return s.o(last(h))

    return forward


def sum_of_times(s: Any, x: Any) -> Any:
    h = total = torch.tanh(s.i(x[:, 0]))
    for t in range(1, x.shape[1]):
        h = torch.tanh(s.i(x[:, t]) + s.h(h))
        total = total + h
    return s.o(total)


def gated(s: Any, h: Any) -> Any:
    a, b = s.g(h).chunk(2, -1)
    return h + s.w(a * torch.sigmoid(b))


def attended(s: Any, h: Any) -> Any:
    q, k, v = s.q(h), s.k(h), s.v(h)
    return h + s.w(torch.softmax(q @ k.transpose(1, 2) / k.shape[-1] ** 0.5, -1) @ v)


def pooled_less(s: Any, x: Any) -> Any:
    """PoolFormer's mixer: what pooling changes."""
    h = s.i(x)
    return s.o(torch.relu(s.p(h) - h).mean((2, 3)))


def normed_twice(s: Any, x: Any) -> Any:
    h = s.n(s.a(s.i(x)))
    return s.o(h - 2 * s.n(s.b(h)))


def mlp(**more: nn.Module) -> dict[str, nn.Module]:
    return {"i": Linear(3, N), "w": Linear(N, N), "o": Linear(N, 4), **more}


def conv(i: int, o: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(i, o, size, padding=size // 2)


Case = tuple[Callable[[], nn.Module], Callable[[int], Tensor]]  # the network, and inputs by number and seed


def flat(n: int) -> Tensor:
    return points(n, 3, seed=n)


def pair(n: int) -> Tensor:
    return points(n, 2, 3, seed=n)


def picture(n: int) -> Tensor:
    return points(n, 2, 4, 4, seed=n)


def words(n: int) -> Tensor:
    return tokens(n, 5, seed=n)


def sequence(n: int) -> Tensor:
    return points(n, 3, 3, seed=n)


CASES: dict[str, Case] = {
    "siamese, joined": (
        lambda: Ask(two(lambda a, b: torch.relu(torch.cat([a, b], -1))), enc=encoder(), out=Linear(2 * N, 4)),
        pair,
    ),
    "siamese, |a − b|": (lambda: Ask(two(lambda a, b: (a - b).abs()), enc=encoder(), out=Linear(N, 4)), pair),
    "siamese, a · b": (lambda: Ask(two(lambda a, b: a * b), enc=encoder(), out=Linear(N, 4)), pair),
    "siamese, after ReLU": (
        lambda: Ask(two(lambda a, b: torch.relu(a) - torch.relu(b)), enc=encoder(), out=Linear(N, 4)),
        pair,
    ),
    "tied layers": (lambda: Ask(again(lambda s, h: s.w(torch.relu(h)), 3, torch.relu), **mlp()), flat),
    "tied residual blocks": (
        lambda: Ask(again(lambda s, h: h + 0.5 * s.w(torch.relu(h)), 3, torch.relu), **mlp()),
        flat,
    ),
    "tied blocks, norm first": (
        lambda: Ask(
            again(lambda s, h: h + 0.5 * s.w(torch.relu(s.n(h))), 2, torch.relu), **mlp(n=nn.LayerNorm(N))
        ),
        flat,
    ),
    "tied blocks, norm last": (
        lambda: Ask(
            again(lambda s, h: s.n(h + 0.5 * s.w(torch.relu(s.v(h)))), 3, lambda h: h),
            **mlp(n=nn.LayerNorm(N), v=Linear(N, N)),
        ),
        flat,
    ),
    "tied read-out": (
        lambda: Ask(lambda s, x: s.w(torch.relu(s.w(torch.relu(s.i(x))))), i=Linear(3, N), w=Linear(N, N)),
        flat,
    ),
    "times of a recurrence": (lambda: Ask(sum_of_times, i=Linear(3, N), h=Linear(N, N), o=Linear(N, 4)), sequence),
    "one norm, linear": (
        lambda: Ask(normed_twice, i=Linear(3, N), a=Linear(N, N), b=Linear(N, N), n=nn.LayerNorm(N), o=Linear(N, 4)),
        flat,
    ),
    "one norm before two activations": (
        lambda: Ask(
            lambda s, x: s.o(torch.relu(s.n(s.a(x))) + torch.relu(s.n(s.b(x)))),
            a=Linear(3, N), b=Linear(3, N), n=nn.LayerNorm(N), o=Linear(N, 4),
        ),
        flat,
    ),
    "one table": (
        lambda: Ask(
            lambda s, x: s.o(torch.relu(s.e(x[:, :2]).mean(1) - s.e(x[:, 2:]).mean(1))),
            e=nn.Embedding(6, N), o=Linear(N, 4),
        ),
        words,
    ),
    "one table at joined positions": (
        lambda: Ask(
            lambda s, x: s.o(torch.relu(s.l(torch.relu(torch.cat([s.e(x[:, :2]), s.e(x[:, 2:])], 1)))).mean(1)),
            e=nn.Embedding(6, N), l=Linear(N, N), o=Linear(N, 4),
        ),
        words,
    ),
    "gates": (lambda: Ask(again(gated, 2, lambda h: h), **mlp(g=Linear(N, 2 * N))), flat),
    "a convolution twice": (
        lambda: Ask(
            again(lambda s, h: s.w(torch.relu(h)), 2, lambda h: torch.relu(h).mean((2, 3))),
            i=conv(2, 24), w=conv(24, 24), o=Linear(24, 4),
        ),
        picture,
    ),
    "less its pooled values": (
        lambda: Ask(
            pooled_less, i=conv(2, 64), p=nn.AvgPool2d(3, 1, 1, count_include_pad=False), o=Linear(64, 4)
        ),
        picture,
    ),
    "BatchNorm in evaluation mode": (
        lambda: Ask(
            again(lambda s, h: torch.relu(s.n(s.w(h))) + h, 2, lambda h: h), **mlp(n=nn.BatchNorm1d(N))
        ).eval(),
        flat,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(5)
def test_finite_networks(name: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model, x, y = make(), inputs(3), inputs(2)
    mean, error = finite(model, x, y, 100, 1.5, 0.3)
    limit = torch.stack(list(tg.infinite_ntk(model, w_var=1.5, b_var=0.3).both(x, y)))
    assert float(((limit - mean) / error).abs().max()) < 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "norm last", "norm first"])
def test_finite_transformers(name: str) -> None:
    n = 128
    if name == "attention":
        parts = {k: Linear(n, n) for k in "qkvw"}
        model: nn.Module = Ask(again(attended, 2, lambda h: h.mean(1)), i=Linear(3, n), o=Linear(n, 4), **parts)
    else:
        layer = nn.TransformerEncoderLayer(n, 16, n, dropout=0.0, batch_first=True, norm_first=name == "norm first")
        model = Ask(again(lambda s, h: s.t(h), 3, lambda h: h.mean(1)), i=Linear(3, n), t=layer, o=Linear(n, 4))
    x, y = sequence(3), sequence(2)
    mean, error = finite(model, x, y, 100, 1.0, 0.3)
    limit = torch.stack(list(tg.infinite_ntk(model, w_var=1.0, b_var=0.3).both(x, y)))
    assert float(((limit - mean) / error).abs().max()) < 3


# The same by other roads


def apart_and_stacked(activation: Callable[[Tensor], Tensor]) -> tuple[nn.Module, nn.Module]:
    """relu(enc(a) − enc(b)): called twice, and once with both inputs as positions."""

    def together(s: Any, x: Any) -> Any:
        h = torch.einsum("st,btc->bsc", torch.tensor([[1.0, -1.0]], dtype=torch.float64), s.enc(x))
        return s.out(activation(h)).squeeze(1)

    enc, out = encoder(), Linear(N, 1)
    twice = Ask(two(lambda a, b: activation(a - b)), enc=enc, out=out)
    return twice, Ask(together, enc=enc, out=out)


@pytest.mark.parametrize(
    "options",
    [
        {"w_var": 2.0, "b_var": 0.1},
        {"w_var": {"": 1.5, "enc.2": 3.0}, "b_var": 0.2, "lr": {"": 1.0, "enc": 0.3}},
        {"w_var": 2.0, "parametrization": "standard", "trainable": "enc.0"},
        {"w_var": "init"},
    ],
    ids=["numbers", "by name", "standard, frozen", "init"],
)
def test_positions_of_one_call_are_the_same(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    twice, stacked = apart_and_stacked(torch.relu)
    for p in twice.parameters():
        nn.init.normal_(p, 0, 0.2)
    x, y = points(4, 2, 3), points(3, 2, 3, seed=1)
    for a, b in ((x, None), (x, y)):
        for left, right in zip(
            tg.infinite_ntk(twice, **options).both(a, b), tg.infinite_ntk(stacked, **options).both(a, b), strict=True
        ):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_few_uniform_weights() -> None:
    """w_var="init" draws activations after few inputs by the weights' own law: in both calls by the same weights."""
    torch.manual_seed(0)
    twice, stacked = apart_and_stacked(torch.tanh)
    x = points(3, 2, 3)
    for left, right in zip(
        tg.infinite_ntk(twice, w_var="init").both(x), tg.infinite_ntk(stacked, w_var="init").both(x), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


M = 8


def relu_block(s: Any, x: Any) -> Any:
    """A post-activation residual block, whose second ReLU is of a function of two fields."""
    h = torch.relu(s.a(x))
    return torch.relu(h + s.b(h)).mean((2, 3))


def squeezed(s: Any, x: Any) -> Any:
    h = s.b(torch.relu(s.a(x)))
    return (h * torch.sigmoid(s.f(h.mean((2, 3))))[:, :, None, None]).mean((2, 3))


def with_class_token(s: Any, x: Any) -> Any:
    h = torch.cat([s.c.expand(x.shape[0], -1, -1), s.i(x)], 1) + s.p
    return s.t(h)[:, 0]


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(M, 4, M, dropout=0.0, batch_first=True)


# What each network does before its read-out, and its parts.
ENCODERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[], dict[str, Any]], Callable[[int], Tensor]]] = {
    "LSTM": (lambda s, x: s.r(x)[0][:, -1], lambda: {"r": nn.LSTM(3, M, batch_first=True)}, sequence),
    "GRU": (lambda s, x: s.r(x)[1][0], lambda: {"r": nn.GRU(3, M, batch_first=True)}, sequence),
    "transformer": (
        with_class_token,
        lambda: {
            "i": Linear(3, M), "t": transformer(),
            "c": nn.Parameter(points(1, 1, M)), "p": nn.Parameter(points(1, 4, M)),
        },
        sequence,
    ),
    "attention by hand": (
        lambda s, x: attended(s, s.i(x)).mean(1),
        lambda: {"i": Linear(3, M), **{k: Linear(M, M) for k in "qkvw"}},
        sequence,
    ),
    "max pooling": (
        lambda s, x: torch.relu(s.b(s.p(torch.relu(s.a(x))))).flatten(1),
        lambda: {"a": conv(2, M), "b": conv(M, M // 4), "p": nn.MaxPool2d(2)},
        picture,
    ),
    "post-activation block": (relu_block, lambda: {"a": conv(2, M), "b": conv(M, M)}, picture),
    "squeeze-excite": (squeezed, lambda: {"a": conv(2, M), "b": conv(M, M), "f": Linear(M, M)}, picture),
    "PReLU": (lambda s, x: s.p(s.a(x)).mean((2, 3)), lambda: {"a": conv(2, M), "p": nn.PReLU(M)}, picture),
    "pixels moved": (
        lambda s, x: s.u(torch.relu(s.n(s.p(s.a(x))))).mean((2, 3)),
        lambda: {
            "a": conv(2, 16 * M), "p": nn.PixelShuffle(2), "n": nn.GroupNorm(2, 4 * M),
            "u": nn.ConvTranspose2d(4 * M, M, 3, stride=2),
        },
        picture,
    ),
    "depthwise": (
        lambda s, x: s.c(s.d(torch.relu(s.a(x)))).mean((2, 3)),
        lambda: {"a": conv(2, M), "d": nn.Conv2d(M, M, 3, padding=1, groups=M), "c": conv(M, M, 1)},
        picture,
    ),
    "bilinear": (
        lambda s, x: s.b(s.i(x), torch.relu(s.j(x))),
        lambda: {"i": Linear(3, M), "j": Linear(3, M), "b": nn.Bilinear(M, M, M)},
        flat,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.every(3)
def test_a_difference_is_four_kernels(name: str) -> None:
    """f(x) = g(x) − g(x') of one linear read-out: its kernels are those of g, by both of their arguments."""
    g, parts, inputs = ENCODERS[name]
    torch.manual_seed(0)
    held = {"o": Linear(M, 1, bias=False), **parts()}
    one = tg.infinite_ntk(Ask(lambda s, x: s.o(g(s, x)), **held), w_var=1.5, b_var=0.3, samples=256)
    both = Ask(lambda s, x: s.o(g(s, x) - g(s, x.flip(1))), **held)
    x, y = inputs(3), inputs(2)
    kernels = [torch.stack(list(one.both(a, b))) for a in (x, x.flip(1)) for b in (y, y.flip(1))]
    expected = kernels[0] - kernels[1] - kernels[2] + kernels[3]
    found = torch.stack(list(tg.infinite_ntk(both, w_var=1.5, b_var=0.3, samples=256).both(x, y)))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("all_times", [False, True])
@pytest.mark.every(3)
def test_a_cell_in_a_loop_is_an_rnn(activation: str, all_times: bool) -> None:
    act = getattr(torch, activation)

    def loop(s: Any, x: Any) -> Any:
        times = [act(s.i(x[:, 0]))]
        for t in range(1, 5):
            times.append(act(s.i(x[:, t]) + s.h(times[-1])))
        return s.o(torch.stack(times, 1).mean(1) if all_times else times[-1])

    def rnn(s: Any, x: Any) -> Any:
        h = s.r(x)[0]
        return s.o(h.mean(1) if all_times else h[:, -1])

    by_hand = Ask(loop, i=Linear(3, 8), h=Linear(8, 8), o=Linear(8, 1))
    by_torch = Ask(rnn, r=nn.RNN(3, 8, nonlinearity=activation, batch_first=True), o=Linear(8, 1))
    x, y = points(4, 5, 3), points(2, 5, 3, seed=1)
    for a, b in zip(
        tg.infinite_ntk(by_hand, w_var=1.3).both(x, y), tg.infinite_ntk(by_torch, w_var=1.3).both(x, y), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def tied(**options: Any) -> Any:
    torch.manual_seed(0)
    return tg.infinite_ntk(CASES["tied blocks, norm last"][0](), w_var=1.5, b_var=0.3, **options)


def test_parts_of_the_matrix() -> None:
    x = points(7, 3)
    k = tied()
    whole = k(x)
    assert torch.equal(whole, whole.T)
    assert float(torch.linalg.eigvalsh(whole).min()) > 0
    torch.testing.assert_close(k.diag(x), whole.diagonal(), rtol=1e-12, atol=0)
    torch.testing.assert_close(k(x[:3], x), whole[:3], rtol=1e-11, atol=1e-11)
    tiled = tg.compute(k, x, tile=3)
    torch.testing.assert_close(torch.as_tensor(tiled[:]), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(tied(dtype="float32")(x).double(), whole, rtol=1e-5, atol=1e-5)


def test_parts_of_the_parameters_add_up() -> None:
    x = points(4, 3)
    parts = [tied(trainable=name)(x) for name in ("i", "w", "v", "n.weight", "n.bias", "o")]
    torch.testing.assert_close(torch.stack(parts).sum(0), tied()(x), rtol=1e-11, atol=1e-11)


def test_one_parameter_of_two_modules() -> None:
    """A weight goes by its first name, whichever module is called first."""
    a, b = Linear(N, N), Linear(N, N)
    b.weight, b.bias = a.weight, a.bias
    parts = {"i": Linear(3, N), "o": Linear(N, 1)}
    tied_modules = Ask(lambda s, x: s.o(torch.relu(s.a(torch.relu(s.b(s.i(x)))))), a=a, b=b, **parts)
    one = Ask(lambda s, x: s.o(torch.relu(s.a(torch.relu(s.a(s.i(x)))))), a=a, **parts)
    x = points(3, 3)
    for options in ({}, {"trainable": "a"}, {"w_var": {"": 2.0, "a": 3.0}}):
        assert torch.equal(tg.infinite_ntk(tied_modules, **options)(x), tg.infinite_ntk(one, **options)(x))


def test_one_parameter_added_twice() -> None:
    """As the output of a layer on the number 1."""
    p = nn.Parameter(points(400))
    parts = {"a": Linear(3, 400), "b": Linear(3, 400), "o": Linear(400, 1)}
    added = Ask(lambda s, x: s.o(torch.relu(s.a(x) + s.p) - torch.relu(s.b(x) + s.p)), p=p, **parts)

    def layered(s: Any, x: Any) -> Any:
        one = torch.ones_like(x[:, :1])
        return s.o(torch.relu(s.a(x) + s.p(one)) - torch.relu(s.b(x) + s.p(one)))

    given = Ask(layered, p=Linear(1, 400, bias=False), **parts)
    x = points(3, 3)
    expected = tg.infinite_ntk(given, w_var={"": 2.0, "p": 1.0})(x)
    torch.testing.assert_close(tg.infinite_ntk(added, w_var=2.0)(x), expected, rtol=1e-12, atol=1e-12)


def test_a_loop_over_a_shape() -> None:
    x = points(4, 3)
    model = Ask(lambda s, x: sum(s.a(x) for _ in range(x.shape[1])), a=Linear(3, 1))
    torch.testing.assert_close(tg.infinite_ntk(model)(x), 9 * 2 * x @ x.T / 3)


def test_one_table_for_both_sides_of_a_translator() -> None:
    """Encoder and decoder meet by attention alone, whose weights are their own: both uses of the table are apart."""

    def translate(s: Any, x: Any) -> Any:
        return s.o(s.dec(s.target(x[:, 3:]), s.enc(s.source(x[:, :3]))).mean(1))

    torch.manual_seed(0)
    table = nn.Embedding(6, 16)
    parts = {
        "enc": nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True),
        "dec": nn.TransformerDecoderLayer(16, 4, 16, dropout=0.0, batch_first=True),
        "o": Linear(16, 1),
    }
    one = Ask(translate, source=table, target=table, **parts)
    own = Ask(translate, source=table, target=nn.Embedding(6, 16), **parts)
    x = words(3)
    assert torch.equal(tg.infinite_ntk(one, samples=256)(x), tg.infinite_ntk(own, samples=256)(x))


# Refused


def tied_embeddings() -> nn.Module:
    e, head = nn.Embedding(6, 8), Linear(8, 6, bias=False)
    head.weight = e.weight
    return Ask(lambda s, x: s.head(torch.relu(s.e(x)).mean(1)), e=e, head=head)


def other_bias() -> nn.Module:
    a, b = Linear(8, 8), Linear(8, 8)
    b.weight = a.weight
    return Ask(lambda s, x: s.b(torch.relu(s.a(s.i(x)))), i=Linear(3, 8), a=a, b=b)


@pytest.mark.parametrize("make", [tied_embeddings, other_bias])
def test_weights_used_in_two_ways_are_refused_when_the_kernel_is_made(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedModule, match=r"\(Linear\): shares its weights.*Use them in the same way"):
        tg.infinite_ntk(make())


def shuffled(s: Any, x: Any) -> Any:
    h = s.i(x)
    return s.o(h + h.view(-1, 12, 8).transpose(1, 2).reshape(-1, N))


def other_windows(s: Any, x: Any) -> Any:
    h = s.i(x)
    return s.o((F.conv2d(h, s.w, padding=1) + F.conv2d(h, s.w, padding=2, dilation=2)).mean((2, 3)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], str]] = {
    "transposed": (
        lambda: Ask(
            lambda s, x: F.linear(torch.relu(F.linear(s.i(x), s.w)), s.w.T),
            i=Linear(3, 8), w=nn.Parameter(torch.randn(8, 8)),
        ),
        flat,
        "linear at .*shares its weights with w, which uses them otherwise",
    ),
    "input and hidden": (
        lambda: Ask(lambda s, x: s.a(torch.relu(s.a(x))), a=Linear(3, 3)),
        flat,
        "shares its weights between the network's input and hidden values.*Put a layer",
    ),
    "other windows": (
        lambda: Ask(other_windows, i=conv(2, 8), w=nn.Parameter(torch.randn(8, 8, 3, 3)), o=Linear(8, 1)),
        picture,
        "correlated.*Window.*Put a Linear",
    ),
    "product": (
        lambda: Ask(two(lambda a, b: torch.relu(a) * torch.relu(b)), enc=encoder(), out=Linear(N, 1)),
        pair,
        "mul at .*share their last weights.*known right after a Linear",
    ),
    "two functions": (
        lambda: Ask(two(lambda a, b: torch.relu(a) + torch.tanh(b)), enc=encoder(), out=Linear(N, 1)),
        pair,
        "add at .*correlated: one is Relu of a layer, the other .*Put a Linear",
    ),
    "an activation of both": (
        lambda: Ask(two(lambda a, b: torch.relu(torch.relu(a) - torch.relu(b))), enc=encoder(), out=Linear(N, 1)),
        pair,
        "relu at .*not Gaussian",
    ),
    "channels in another order": (
        lambda: Ask(shuffled, i=Linear(3, N), o=Linear(N, 1)),
        flat,
        "add at .*correlated: one has the channels of the other in another order",
    ),
    "BatchNorm in training mode": (
        lambda: Ask(
            two(lambda a, b: a - b),
            enc=nn.Sequential(Linear(3, N), nn.BatchNorm1d(N), nn.ReLU()), out=Linear(N, 1),
        ).train(),
        pair,
        "sub at .*correlated: both are BatchNormalize",
    ),
    "one norm in a value and in an activation": (
        lambda: Ask(
            lambda s, x: s.o(s.n(s.a(x)) + torch.relu(s.n(s.b(x)))),
            a=Linear(3, N), b=Linear(3, N), n=nn.LayerNorm(N), o=Linear(N, 1),
        ),
        flat,
        "add at .*a trained scale or shift is in one, and within an activation in the other",
    ),
    "one norm in a gate": (
        lambda: Ask(
            lambda s, x: s.o(torch.sigmoid(s.n(s.a(x))) * torch.relu(s.n(s.b(x)))),
            a=Linear(3, N), b=Linear(3, N), n=nn.LayerNorm(N), o=Linear(N, 1),
        ),
        flat,
        "mul at .*one norm's trained scale or shift is in both",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, inputs, message = REFUSED[name]
    with pytest.raises(UnsupportedModule, match=message):
        tg.infinite_ntk(make())(inputs(3))


def test_a_parameter_is_joined_and_added() -> None:
    """CaiT's class token goes into attention and is added to what comes out: one value in both, as a table's row is."""

    def forward(s: Any, token: Tensor, x: Tensor) -> Tensor:
        u = torch.cat((token, s.e(x)), 1)
        return s.o(torch.relu(token + s.a(u[:, :1], u, u, need_weights=False)[0])[:, 0])

    torch.manual_seed(0)
    x = torch.randn(3, 4, 3)
    parts = {"e": Linear(3, 16), "a": nn.MultiheadAttention(16, 2, batch_first=True), "o": Linear(16, 1)}
    loose = Ask(lambda s, x: forward(s, s.c.expand(len(x), -1, -1), x), c=nn.Parameter(torch.randn(1, 1, 16)), **parts)
    with torch.no_grad():  # the variance of so few entries is measured
        loose.c.sub_(loose.c.mean()).div_(loose.c.square().mean().sqrt())
    row = Ask(lambda s, x: forward(s, s.c((0 * x[:, :1, 0]).long()), x), c=nn.Embedding(1, 16), **parts)
    for a, b in zip(tg.infinite_ntk(loose, w_var=1.0).both(x), tg.infinite_ntk(row, w_var=1.0).both(x), strict=True):
        torch.testing.assert_close(a, b)
