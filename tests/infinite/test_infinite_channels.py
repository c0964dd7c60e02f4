"""Which channels and positions a value has: slices, shuffles, joined values, other axes; groups; slices of weights."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ask import Ask
from torch import Tensor, nn

import tangency as tg
from tangency.errors import TangencyError, TangencyWarning
from tangency.infinite.moments.channels import take_channels
from tangency.infinite.moments.core import RandomAffine
from tangency.infinite.moments.fields import Builder
from tangency.infinite.moments.values import Field

WIDTH = 16
torch.manual_seed(5)
VECTORS, IMAGES = torch.randn(3, 6).double(), torch.randn(2, 3, 4, 4).double()
Forward = Callable[[Any, Tensor], Tensor]


def kernels(fn: Forward, x: Tensor, w_var: Any = 2.0, **parts: Any) -> tuple[Tensor, Tensor]:
    nngp, ntk = tg.infinite_ntk(Ask(fn, **parts).eval(), w_var=w_var, b_var=0.1, samples=512).both(x)
    return nngp, ntk


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def shuffled(h: Tensor, groups: int = 2) -> Tensor:
    """As torchvision's ShuffleNet writes it."""
    batch, channels, *rest = h.shape
    return h.view(batch, groups, channels // groups, *rest).transpose(1, 2).reshape(batch, channels, *rest)


# Finite networks


def _halves(w: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        a, b = torch.relu(s.a(x)).chunk(2, 1)
        return s.out(a + b)  # means of both count: they are not zero

    return Ask(forward, a=nn.Linear(6, 2 * w), out=nn.Linear(w, 1))


def _shuffle_unit(w: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = shuffled(torch.cat([torch.relu(s.a(x)), 3 * torch.tanh(s.b(x))], 1))
        u, v = h.chunk(2, 1)
        return s.out(torch.cat([u, torch.relu(s.c(v))], 1)[:, w // 2 :])

    return Ask(forward, a=nn.Linear(6, w), b=nn.Linear(6, w), c=nn.Linear(w, w), out=nn.Linear(w + w // 2, 1))


def _joined_and_added(w: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.relu(s.a(x))
        y = s.b(h)
        y = torch.cat([y[:, : w // 2] + h, y[:, w // 2 :]], 1)  # rexnet's shortcut
        u, v = torch.relu(y + s.c(torch.tanh(y))).split([w // 4, 3 * w // 4], 1)
        return s.out(u * torch.sigmoid(s.d(v)))

    parts = {"b": nn.Linear(w // 2, w), "c": nn.Linear(w, w), "d": nn.Linear(3 * w // 4, w // 4)}
    return Ask(forward, a=nn.Linear(6, w // 2), out=nn.Linear(w // 4, 1), **parts)


def _columns(w: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        left, right = s.b.weight.chunk(2, 1)
        u = F.linear(torch.relu(s.a(x))[:, : w // 2], left) + torch.tanh(s.c(x)) @ right[:, : w // 4].T
        return s.out(torch.relu(u))

    return Ask(forward, a=nn.Linear(6, w), b=nn.Linear(w, w, bias=False), c=nn.Linear(6, w // 4), out=nn.Linear(w, 1))


def _normed_heads(w: int) -> nn.Module:
    """LeViT's: queries, keys and values normalised over the batch merged with positions, whose scales are trained."""
    size = 16

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.b(torch.relu(s.a(x.view(-1, 3, 2))))
        y = s.n(y.flatten(0, 1)).reshape_as(y)
        q, k, v = y.view(-1, 3, 3, w // size, size).permute(2, 0, 3, 1, 4).unbind(0)
        attended = ((q @ k.mT) / size**0.5).softmax(-1) @ v
        return s.out(attended.transpose(1, 2).reshape(-1, 3, w).mean(1))

    parts = {"b": nn.Linear(w, 3 * w), "n": nn.BatchNorm1d(3 * w)}
    return Ask(forward, a=nn.Linear(2, w), out=nn.Linear(w, 1), **parts)


@pytest.mark.parametrize(
    "make",
    [
        _shuffle_unit,
        _columns,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (_halves, _joined_and_added, _normed_heads)),
    ],
)
@pytest.mark.every(2)
def test_finite_networks_tend_to_it(make: Callable[[int], nn.Module]) -> None:
    net, draws = make(192).double().eval(), 16
    limits = tg.infinite_ntk(net, b_var=0.1).both(VECTORS)
    found: list[list[Tensor]] = [[], []]
    for seed in range(draws):
        tg.infinite.draw(net, b_var=0.1, seed=seed)
        found[0].append(tg.infinite.readout_nngp(net, VECTORS, b_var=0.1))
        found[1].append(tg.infinite.empirical_ntk(net, VECTORS, b_var=0.1))
    for limit, each in zip(limits, found, strict=True):
        values = torch.stack(each)
        error = values.std(0) / draws**0.5 + 0.01 * limit.abs().max()  # and the width's own, of order 1/width
        assert ((values.mean(0) - limit).abs() < 3 * error).all()
        assert (values.std(0) / draws**0.5 < 0.15 * limit.abs().max()).all()  # so that the first line says something


# Channels


def test_a_slice_of_joined_channels_is_that_of_its_parts() -> None:
    parts = {"a": nn.Conv2d(3, WIDTH, 3, padding=1), "b": nn.Conv2d(3, WIDTH, 1), "c": nn.Linear(WIDTH, 1)}
    branch = kernels(lambda s, x: s.c(torch.sin(s.b(x)).mean((2, 3))), IMAGES, **parts)

    def joined(s: Any, x: Tensor) -> Tensor:
        return torch.cat([torch.relu(s.a(x)), torch.sin(s.b(x))], 1)

    same(kernels(lambda s, x: s.c(joined(s, x).mean((2, 3))[:, WIDTH:]), IMAGES, **parts), branch)
    pooled = kernels(lambda s, x: s.c(F.avg_pool2d(joined(s, x), 2)[:, WIDTH:].mean((2, 3))), IMAGES, **parts)
    same(pooled, branch)
    back = kernels(lambda s, x: s.c(shuffled(shuffled(joined(s, x)), WIDTH)[:, WIDTH:].mean((2, 3))), IMAGES, **parts)
    same(back, branch)
    # Half of each after a shuffle: the mean of both branches' kernels but for the last layer's bias.
    mixed = kernels(lambda s, x: s.c(shuffled(joined(s, x))[:, :WIDTH].mean((2, 3))), IMAGES, **parts)
    other = kernels(lambda s, x: s.c(torch.relu(s.a(x)).mean((2, 3))), IMAGES, **parts)
    same(mixed, ((branch[0] + other[0]) / 2, (branch[1] + other[1]) / 2))


def test_a_shuffle_and_its_inverse_are_nothing() -> None:
    """One by one they are the channels themselves; another order is another value, of the same law."""
    build = Builder(size=2)
    f = build.affine(build.drawn((WIDTH,), 0), WIDTH, RandomAffine(1.0))
    order = torch.arange(WIDTH).view(4, -1).T.flatten()
    there = take_channels(build, f, order.tolist())
    back = take_channels(build, there, order.argsort().tolist())
    assert isinstance(there, Field)
    assert there.node != f.node
    assert back == f
    parts = {"a": nn.Linear(6, WIDTH), "c": nn.Linear(WIDTH, 1)}
    plain = kernels(lambda s, x: s.c(torch.relu(s.a(x))), VECTORS, **parts)
    module = kernels(lambda s, x: s.c(s.n(torch.relu(s.a(x)))), VECTORS, n=nn.ChannelShuffle(4), **parts)
    same(module, plain)
    same(kernels(lambda s, x: s.c(torch.relu(s.a(x)).roll(3, 1).flip(1)), VECTORS, **parts), plain)


def test_parts_of_a_depthwise_layer_have_filters_of_their_own() -> None:
    """Two halves, added before an activation, are two layers of one law each."""
    parts = {"a": nn.Conv2d(3, WIDTH, 1), "e": nn.Conv2d(3, WIDTH, 1), "c": nn.Linear(WIDTH, 1)}
    full = {"a": nn.Conv2d(3, 2 * WIDTH, 1), "c": nn.Linear(WIDTH, 1)}
    deep = [nn.Conv2d(k * WIDTH, k * WIDTH, (1, 2), groups=k * WIDTH) for k in (1, 1, 2)]

    def two(s: Any, x: Tensor) -> Tensor:
        return s.c(torch.relu(s.d(torch.relu(s.a(x))) + s.f(torch.relu(s.e(x)))).mean((2, 3)))

    def halves(s: Any, x: Tensor) -> Tensor:
        u, v = s.d(torch.relu(s.a(x))).chunk(2, 1)
        return s.c(torch.relu(u + v).mean((2, 3)))

    same(kernels(halves, IMAGES, d=deep[2], **full), kernels(two, IMAGES, d=deep[0], f=deep[1], **parts))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "parts that share channels": (
        lambda: Ask(lambda s, x: (lambda h: h[:, :8] + h[:, 4:12])(torch.relu(s.a(x))), a=nn.Linear(6, WIDTH)), VECTORS,
        "share their last weights",
    ),
    "a channel twice": (
        lambda: Ask(lambda s, x: s.a(x)[:, [0, 1, 1]], a=nn.Linear(6, WIDTH)), VECTORS, "a channel twice.*Linear",
    ),
    "some of what was flattened": (
        lambda: Ask(lambda s, x: s.a(x).flatten(1)[:, :8], a=nn.Conv2d(3, WIDTH, 1)), IMAGES, "not of one law",
    ),
    "a gate that is a depthwise layer of the same": (
        lambda: Ask(
            lambda s, x: (lambda h: h * s.d(h))(torch.relu(s.a(x))), a=nn.Conv2d(3, WIDTH, 1),
            d=nn.Conv2d(WIDTH, WIDTH, 9, padding=4, groups=WIDTH),
        ), IMAGES, "not independent",
    ),
    "BatchNorm over positions": (
        lambda: Ask(lambda s, x: s.n(s.a(x).flatten(2).mT), a=nn.Conv2d(3, WIDTH, 1), n=nn.BatchNorm1d(16)), IMAGES,
        r"n \(BatchNorm1d\).*on axis 2.*transpose",
    ),
    "a slice of weights in another form": (
        lambda: Ask(
            lambda s, x: F.linear(s.a(x), s.b.weight[:, :4].reshape(8, 16)), a=nn.Linear(6, 16), b=nn.Linear(8, 32)
        ), VECTORS, "fan-in it was drawn by.*parameter of its own",
    ),
    "picks that differ by sample": (
        lambda: Ask(
            lambda s, x: torch.take_along_dim(s.a(x), (x[:, :1] > 0).long(), 2), a=nn.Conv2d(3, WIDTH, 1)
        ), IMAGES, "other positions for other samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_fix(name: str) -> None:
    make, x, words = REFUSED[name]
    with pytest.raises(TangencyError, match=words):
        tg.infinite_ntk(make().eval())(x)


# Axes


def windows(h: Tensor) -> Tensor:
    """Swin's partition of [batch, height, width, channels] into windows of 2 × 2."""
    b, height, width, c = h.shape
    return h.view(b, height // 2, 2, width // 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, c)


def merged(v: Tensor) -> Tensor:
    """Swin's way back, of pictures of 4 × 4."""
    return v.view(-1, 2, 2, 2, 2, v.shape[-1]).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4, v.shape[-1])


def corners(h: Tensor) -> Tensor:
    """Swin's patch merging."""
    return torch.cat([h[:, 0::2, 0::2], h[:, 1::2, 0::2], h[:, 0::2, 1::2], h[:, 1::2, 1::2]], -1)


def last(s: Any, x: Tensor) -> Tensor:
    return torch.relu(s.a(x)).permute(0, 2, 3, 1)


def hidden(s: Any, x: Tensor) -> Tensor:
    return torch.relu(s.a(x))


def folded(s: Any, h: Tensor) -> Tensor:
    """MobileViT: a layer over patches, the positions within them beside the batch."""
    b = h.shape[0]
    p = h.reshape(b * WIDTH * 2, 2, 2, 2).transpose(1, 2).reshape(b, WIDTH, 4, 4).transpose(1, 3).reshape(b * 4, 4, -1)
    p = p + s.b(torch.relu(p))
    p = p.view(b, 4, 4, WIDTH).transpose(1, 3).reshape(b * WIDTH * 2, 2, 2, 2)
    return p.transpose(1, 2).reshape(b, WIDTH, 4, 4).permute(0, 2, 3, 1)


WHERE = torch.tensor([2, 0, 1])
LINEAR = {"b": lambda: nn.Linear(WIDTH, WIDTH)}
CONV = {"b": lambda: nn.Conv2d(WIDTH, WIDTH, (3, 2), padding=1)}
# Two spellings of one network up to its read-out, channels last and first.
LAST: dict[str, tuple[Forward, Forward, dict[str, Any]]] = {
    "windows": (
        lambda s, x: merged(torch.relu(s.b(windows(last(s, x))))), lambda s, x: torch.relu(s.b(last(s, x))), LINEAR,
    ),
    "windows with a shortcut": (
        lambda s, x: (lambda h: merged(h + torch.relu(s.b(h))))(windows(last(s, x))),
        lambda s, x: (lambda h: h + torch.relu(s.b(h)))(last(s, x)), LINEAR,
    ),
    "gates in windows": (
        lambda s, x: (lambda u, v: merged(u * torch.sigmoid(v)))(*s.b(windows(last(s, x))).chunk(2, -1)),
        lambda s, x: (lambda u, v: u * torch.sigmoid(v))(*s.b(last(s, x)).chunk(2, -1)), LINEAR,
    ),
    "norms in windows": (
        lambda s, x: merged(s.n(windows(last(s, x)))), lambda s, x: s.n(last(s, x)), {"n": lambda: nn.LayerNorm(WIDTH)},
    ),
    "MobileViT's patches": (
        lambda s, x: folded(s, s.a(x)),
        lambda s, x: (lambda h: h + s.b(torch.relu(h)))(s.a(x).permute(0, 2, 3, 1)), LINEAR,
    ),
    "BatchNorm of merged samples": (
        lambda s, x: (lambda h: torch.relu(s.n(h.flatten(0, 2)).reshape_as(h)))(s.b(last(s, x))),
        lambda s, x: torch.relu(s.m(s.b(last(s, x)).permute(0, 3, 1, 2))).permute(0, 2, 3, 1),
        {**LINEAR, "n": lambda: nn.BatchNorm1d(WIDTH), "m": lambda: nn.BatchNorm2d(WIDTH)},
    ),
    "patch merging": (
        lambda s, x: torch.relu(s.b(corners(last(s, x)))),
        lambda s, x: torch.relu(s.c(hidden(s, x))).permute(0, 2, 3, 1),
        {"b": lambda: nn.Linear(4 * WIDTH, WIDTH), "c": lambda: nn.Conv2d(WIDTH, WIDTH, 2, 2)},
    ),
    "unfold": (
        lambda s, x: torch.relu(s.b(F.unfold(hidden(s, x), 2, stride=2).mT)).unflatten(1, (2, 2)),
        lambda s, x: torch.relu(s.b(corners(last(s, x)))), {"b": lambda: nn.Linear(4 * WIDTH, WIDTH)},
    ),
    "unfold of an axis": (
        lambda s, x: torch.relu(s.b(hidden(s, x).unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3))),
        lambda s, x: torch.relu(s.b(corners(last(s, x)))), {"b": lambda: nn.Linear(4 * WIDTH, WIDTH)},
    ),
    "einsum that permutes": (
        lambda s, x: s.b(torch.einsum("nchw->nhwc", hidden(s, x))), lambda s, x: s.b(last(s, x)), LINEAR,
    ),
    "view_as": (
        lambda s, x: (lambda h: s.b(h.flatten(1, 2)).view_as(h))(last(s, x)), lambda s, x: s.b(last(s, x)), LINEAR,
    ),
}  # fmt: skip
FIRST: dict[str, tuple[Forward, Forward, dict[str, Any]]] = {
    "frames beside the batch": (
        lambda s, x: s.b(hidden(s, x).transpose(1, 2).reshape(-1, WIDTH, 4)).view(-1, 4, WIDTH, 4).transpose(1, 2),
        lambda s, x: s.c(hidden(s, x)),
        {
            "b": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            "c": lambda: nn.Conv2d(WIDTH, WIDTH, (1, 3), padding=(0, 1)),
        },
    ),
    "pooled frames": (
        lambda s, x: F.avg_pool1d(hidden(s, x).transpose(1, 2).reshape(-1, WIDTH, 4), 2)
        .view(-1, 4, WIDTH, 2).transpose(1, 2),
        lambda s, x: F.avg_pool2d(hidden(s, x), (1, 2)), {},
    ),
    "pooled frames, adaptive": (
        lambda s, x: s.b(hidden(s, x).transpose(1, 2).reshape(-1, WIDTH, 4)).view(-1, 4, WIDTH, 1).transpose(1, 2),
        lambda s, x: hidden(s, x).mean(3, keepdim=True), {"b": lambda: nn.AdaptiveAvgPool1d(1)},
    ),
    "means of windows": (
        lambda s, x: windows(last(s, x)).mean(1, keepdim=True).view(-1, 2, 2, WIDTH).permute(0, 3, 1, 2),
        lambda s, x: F.avg_pool2d(hidden(s, x), 2), {},
    ),
    "tile": (
        lambda s, x: s.b(hidden(s, x)[:, :, :1].tile(1, 1, 3, 1)),
        lambda s, x: s.b(hidden(s, x)[:, :, :1].expand(-1, -1, 3, -1)), CONV,
    ),
    "repeat": (
        lambda s, x: s.b(hidden(s, x).repeat(1, 1, 1, 2)), lambda s, x: s.b(hidden(s, x)[..., [0, 1, 2, 3] * 2]), CONV,
    ),
    "take_along_dim": (
        lambda s, x: s.b(torch.take_along_dim(hidden(s, x), WHERE.view(1, 1, 3, 1), 2)),
        lambda s, x: s.b(hidden(s, x)[:, :, WHERE]), CONV,
    ),
    "gather": (
        lambda s, x: s.b(torch.gather(hidden(s, x), 2, WHERE.view(1, 1, 3, 1).expand(len(x), WIDTH, 3, 4))),
        lambda s, x: s.b(hidden(s, x).index_select(2, WHERE)), CONV,
    ),
    "rot90": (
        lambda s, x: s.b(torch.rot90(hidden(s, x), 1, (2, 3))),
        lambda s, x: s.b(hidden(s, x).transpose(2, 3).flip(2)), CONV,
    ),
    "tensor_split": (
        lambda s, x: s.b(torch.tensor_split(hidden(s, x), 3, 2)[0]),
        lambda s, x: s.b(hidden(s, x).narrow(2, 0, 2)), CONV,
    ),
    "hstack": (
        lambda s, x: s.b(torch.hstack([hidden(s, x), s.c(x)])[:, : WIDTH]), lambda s, x: s.b(hidden(s, x)),
        {**CONV, "c": lambda: nn.Conv2d(3, WIDTH, 3, padding=1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*LAST, *FIRST])
@pytest.mark.every(3)
def test_spellings_of_one_network(name: str) -> None:
    torch.manual_seed(0)
    first, second, more = (LAST | FIRST)[name]
    dims = (1, 2) if name in LAST else (2, 3)
    parts = {"a": nn.Conv2d(3, WIDTH, 3, padding=1), **{key: make() for key, make in more.items()}}
    if name == "gates in windows":
        parts["b"] = nn.Linear(WIDTH, 2 * WIDTH)
    parts["out"] = nn.Linear(WIDTH, 1)
    parts["top"] = nn.Linear(WIDTH, WIDTH)

    def net(body: Forward) -> Forward:
        return lambda s, x: s.out(torch.relu(s.top(body(s, x).mean(dims))))

    a, b = (kernels(net(body), IMAGES, **parts) for body in (first, second))
    same(a, b)


# Groups and slices of weights


def test_groups_of_few_channels_are_said_once() -> None:
    def net(width: int, groups: int) -> nn.Module:
        norm = nn.GroupNorm(groups, width)
        return nn.Sequential(nn.Conv2d(3, width, 1), norm, nn.Conv2d(width, width, 1, groups=groups), nn.Flatten())

    k = tg.infinite_ntk(net(16, 4))
    with pytest.warns(TangencyWarning, match="4 groups of 4 channels.*Keep the number of groups") as said:
        first = k(IMAGES)
    torch.testing.assert_close(k(IMAGES), first)  # and says nothing: warnings are errors here
    assert [str(w.message).split(" (")[0] for w in said] == ["layer 1", "layer 2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide = tg.infinite_ntk(net(64, 4))(IMAGES)
        torch.testing.assert_close(wide, tg.infinite_ntk(net(64, 1))(IMAGES))


def test_a_slice_of_columns_has_the_variance_of_its_parameter() -> None:
    """4 of 16 columns: a layer of 4 inputs and a quarter of the variance."""
    torch.manual_seed(1)
    whole, part = nn.Linear(16, 400, bias=False), nn.Linear(4, 400, bias=False)
    parts = {"a": nn.Linear(6, 64, bias=False), "c": nn.Linear(400, 1, bias=False)}
    nn.init.kaiming_normal_(parts["a"].weight)
    forms: list[Forward] = [
        lambda s, x: s.c(torch.relu(F.linear(torch.relu(s.a(x))[:, :4], s.b.weight[:, :4]))),
        lambda s, x: s.c(torch.relu(torch.relu(s.a(x))[:, :4] @ s.b.weight.T[:4])),
        lambda s, x: s.c(torch.relu(torch.einsum("bi,oi->bo", torch.relu(s.a(x))[:, :4], s.b.weight.narrow(1, 0, 4)))),
    ]

    def alone(s: Any, x: Tensor) -> Tensor:
        return s.c(torch.relu(s.b(torch.relu(s.a(x))[:, :4])))

    expected = kernels(alone, VECTORS, {"": 2.0, "b": 0.5}, b=part, **parts)
    for form in forms:
        same(kernels(form, VECTORS, b=whole, **parts), expected)
    # As initialised: torch's default is 1/(3·fan-in), of the whole parameter.
    given = {"a": 2.0, "b": 4 / (3 * 16), "c": 1 / 3}
    numbers = tg.infinite_ntk(Ask(alone, b=part, **parts).eval(), w_var=given, parametrization="standard")
    same(tg.infinite_ntk(Ask(forms[0], b=whole, **parts).eval(), w_var="init").both(VECTORS), numbers.both(VECTORS))


FRAMES = torch.randn(3, 2, 3, 4, 4, generator=torch.Generator().manual_seed(2)).double()


def pictures(s: Any, x: Tensor) -> Tensor:
    return torch.relu(s.d(torch.relu(s.c(x)))).mean((2, 3))


@pytest.mark.parametrize("rows", [lambda x: x.flatten(0, 1), lambda x: x.reshape(-1, 3, 4, 4)])
def test_frames_merged_with_the_batch(rows: Callable[[Tensor], Tensor]) -> None:
    """One network for all frames, as rows of one batch, is the network called for each frame."""
    parts = {
        "c": nn.Conv2d(3, WIDTH, 3, padding=1),
        "d": nn.Conv2d(WIDTH, WIDTH, 3, stride=2),
        "o": nn.Linear(WIDTH, 1),
    }
    merged = kernels(lambda s, x: s.o(pictures(s, rows(x)).view(len(x), 2, WIDTH).mean(1)), FRAMES, **parts)
    each = kernels(lambda s, x: s.o(torch.stack([pictures(s, x[:, t]) for t in range(2)], 1).mean(1)), FRAMES, **parts)
    same(merged, each)


def _frames_first(x: Tensor) -> Tensor:
    return x.view(-1, 3, 2).transpose(0, 1).reshape(-1, 2)


def test_rows_of_other_than_samples_are_refused() -> None:
    """A table of fixed rows; frames first, taken for samples first."""
    parts = {"a": nn.Linear(6, WIDTH), "b": nn.Linear(2, WIDTH), "o": nn.Linear(WIDTH, 1)}
    grid = torch.randn(9, 2)
    with pytest.raises(TangencyError, match=r"b \(Linear\).*9 rows, which are not its samples \(3\).*expand"):
        kernels(lambda s, x: s.o(s.a(x)[:, None] * s.b(grid)), VECTORS, **parts)
    with pytest.raises(TangencyError, match="alone than for the same one among others"):
        kernels(lambda s, x: s.o(s.b(_frames_first(x)).view(len(x), 3, WIDTH).mean(1)), VECTORS, **parts)
