"""Images through the compiled recursion over offsets, against the plain one; which networks go there."""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tangency as tg
from tangency.infinite.kernel import Infinite
from tangency.infinite.moments.assemble import PreparedBatch, gram_tile, own_moments, prepared_side
from tangency.infinite.moments.core import Side
from tangency.infinite.moments.fused import choose, plan
from tangency.infinite.moments.fused.choose import find_fused

pytest.importorskip("numba")
from tangency.infinite.moments.fused import lanes

BOTH = ("nngp", "ntk")


def prepared(kernel: Infinite, x: Tensor, fuse: bool, dtype: torch.dtype = torch.float64) -> PreparedBatch:
    build, recursion = kernel.read(kernel.ready(x))
    assert build.energy is not None
    known = {slot: v.to(dtype) for slot, v in build.known.items()}
    side = Side(known, build.size, build.energy.to(dtype))
    assert find_fused(recursion, side) is not None
    return PreparedBatch(recursion, prepared_side(recursion, side, fuse))


def tiles(net: nn.Module, x1: Tensor, x2: Tensor | None, fuse: bool, b_var: float = 0.1) -> dict[str, Tensor]:
    kernel = tg.infinite_ntk(net, w_var=1.7, b_var=b_var)
    a = prepared(kernel, x1, fuse)
    b = a if x2 is None else prepared(kernel, x2, fuse)
    return gram_tile(a, b, BOTH, None, fuse)


def conv(i: int, k: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(i, 8, k, stride=stride, padding=k // 2)


def stack(channels: int, *body: nn.Module, flat: int = 0) -> nn.Sequential:
    """A convolution, `body`, and a mean over positions, or (`flat` of them) Flatten."""
    head = [nn.Flatten(), nn.Linear(8 * flat, 4)] if flat else [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(conv(channels), *body, *head)


class Erf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


class Around(nn.Module):
    """x + half of a branch; with a stride, both go through convolutions."""

    def __init__(self, act: nn.Module, k: int, stride: int) -> None:
        super().__init__()
        self.act, self.branch, self.after = act, conv(8, k, stride), conv(8)
        self.short = conv(8, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.short(x) + 0.5 * self.after(self.act(self.branch(self.act(x))))


ACTS: list[Callable[[], nn.Module]] = [nn.ReLU, lambda: nn.LeakyReLU(0.2), nn.GELU, Erf, nn.Identity]


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, int, int]]:
    """A network and the shape of its images [channels, height, width]."""
    shape = draw(st.sampled_from([(3, 8, 8), (1, 7, 5), (9, 4, 6), (2, 6, 3)]))
    h, w = shape[1:]
    # One channel and one pixel are one number, and two of them parallel: each rounding turns into an angle of 1e-8.
    layers: list[nn.Module] = [conv(shape[0], draw(st.sampled_from([3, 5] if shape[0] == 1 else [1, 3, 5])))]
    for _ in range(draw(st.integers(1, 3))):
        act = draw(st.sampled_from(ACTS))()
        k, stride = draw(st.sampled_from([1, 3, 5])), draw(st.sampled_from([1, 1, 2]))
        kind = draw(st.sampled_from(["plain", "around", "pool"]))
        if kind == "pool" and (h % 2 == 0 or h % 3 == 0):
            size = (2 if h % 2 == 0 else 3, 2 if w % 2 == 0 else 1)
            layers += [act, nn.AvgPool2d(size), conv(8)]
            h, w = h // size[0], w // size[1]
            continue
        layers += [Around(act, k, stride)] if kind == "around" else [act, conv(8, k, stride)]
        h, w = (h - 1) // stride + 1, (w - 1) // stride + 1
    layers.append(draw(st.sampled_from(ACTS))())
    flat = (h > 1) == (w > 1) and draw(st.booleans())  # one axis alone is not an image
    layers += [nn.Flatten()] if flat else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    width = 8 * h * w if flat else 8
    for _ in range(draw(st.integers(0, 2))):
        layers += [nn.Linear(width, 5), draw(st.sampled_from(ACTS[:3]))()]
        width = 5
    return nn.Sequential(*layers, nn.Linear(width, 2)), shape


@settings(max_examples=40, deadline=None)
@given(networks(), st.booleans(), st.sampled_from([0.0, 0.1]), st.integers(0, 1000))
def test_random_images_agree_with_the_plain_recursion(drawn, cross, b_var, seed):
    net, shape = drawn
    draw = torch.Generator().manual_seed(seed)
    x1, x2 = torch.randn(3, *shape, generator=draw), torch.randn(7, *shape, generator=draw) if cross else None
    fused, plain = (tiles(net, x1, x2, fuse, b_var) for fuse in (True, False))
    for name in BOTH:
        # Where kinds of activations follow each other, an image's angle with itself is rounded in the plain recursion.
        found, wanted = (k[name] if cross else k[name] - k[name].diag().diag() for k in (fused, plain))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(fused[name], plain[name], rtol=1e-8, atol=0.0)


@settings(max_examples=25, deadline=None)
@given(networks(), st.sampled_from([0.0, 0.1]), st.integers(0, 1000))
def test_zeros_constants_and_copies(drawn, b_var, seed):
    net, shape = drawn
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(6, *shape, generator=draw)
    x[1] *= torch.rand(shape[1:], generator=draw) < 0.3  # dead pixels
    x[2], x[3], x[4] = 0.7, 0.0, x[1]
    fused, plain = (tiles(net, x, None, fuse, b_var) for fuse in (True, False))
    for name in BOTH:
        k = fused[name]
        assert torch.equal(k, k.T)
        # Equal patches may round otherwise in the plain recursion, and an angle of 0 to one of 1e-8.
        torch.testing.assert_close(k, plain[name], rtol=1e-7, atol=1e-13)
        # A copy is the image itself.
        torch.testing.assert_close(k[4], k[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU])
def test_near_copies_stay_exact_where_they_are_in_the_plain_recursion(act):
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    x[1], x[2] = x[0] + 1e-10 * x[3], -x[0]
    net = stack(3, act(), conv(8), act(), flat=36)
    fused, plain = (tiles(net, x, None, fuse)["ntk"] for fuse in (True, False))
    torch.testing.assert_close(fused, plain, rtol=1e-13, atol=0.0)


def test_copies_keep_the_diagonal_behind_poolings_and_other_activations():
    x = torch.randn(3, 3, 8, 8)
    x[2] = x[0]
    net = stack(
        3, nn.GELU(), conv(8), nn.ReLU(), nn.AvgPool2d(2), conv(8), nn.ReLU(), nn.AvgPool2d(2), conv(8), nn.ReLU()
    )
    k = tiles(net, x, None, True)["ntk"]
    torch.testing.assert_close(k[0, 2], k[0, 0], rtol=1e-15, atol=0.0)


def test_sums_over_windows_and_positions():
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = conv(3), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x)).sum((2, 3)))

    x = torch.randn(2, 3, 4, 5)
    fused, plain = (tiles(Summed(), x, None, fuse)["ntk"] for fuse in (True, False))
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=0.0)


def test_one_kernel_alone_own_moments_and_variances():
    net = stack(3, nn.ReLU(), nn.AvgPool2d(2), conv(8), nn.ReLU())
    kernel, x = tg.infinite_ntk(net), torch.randn(5, 3, 6, 6)
    fused, plain = (prepared(kernel, x, fuse) for fuse in (True, False))
    assert fused.side.own.keys() == plain.side.own.keys()
    for node, v in plain.side.own.items():
        torch.testing.assert_close(fused.side.own[node], v, rtol=1e-13, atol=0.0)
    both = gram_tile(fused, fused, BOTH, None)
    assert torch.equal(gram_tile(fused, fused, ("nngp",), None)["nngp"], both["nngp"])
    alone, wanted = own_moments(fused, True), own_moments(plain, True, fuse=False)
    torch.testing.assert_close(alone.ntk, wanted.ntk, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(alone.cov, both["nngp"].diagonal(), rtol=1e-15, atol=0.0)


def test_the_same_bits_however_the_work_is_cut(monkeypatch):
    net = stack(3, nn.ReLU(), conv(8, stride=2), nn.ReLU())
    kernel, x = tg.infinite_ntk(net), torch.randn(20, 3, 7, 6)
    wanted = kernel(x)
    monkeypatch.setattr(lanes, "SMALL", 0)
    monkeypatch.setattr(lanes, "CALL", 300)  # rows of classes one by one
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(kernel(x), wanted)
        monkeypatch.setattr(lanes, "ROOM", 1)  # not even one thread's fields
        assert torch.equal(kernel(x), wanted)
    finally:
        torch.set_num_threads(threads)
    a = prepared(kernel, x, True)
    assert torch.equal(gram_tile(a, a, ("ntk",), workspace=1)["ntk"], wanted)


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_with_the_call_that_runs(monkeypatch, threads):
    kernel, x, calls = tg.infinite_ntk(stack(3, nn.ReLU())), torch.randn(40, 3, 6, 6), []
    a = kernel.prepare(kernel.ready(x))

    def interrupted(*given: object) -> None:
        calls.append(given[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(lanes, "SMALL", 0)
    monkeypatch.setattr(lanes, "CALL", 1)
    monkeypatch.setattr(lanes, "run_blocks", interrupted)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with pytest.raises(KeyboardInterrupt):
            kernel.pair(a, a)
    finally:
        torch.set_num_threads(before)
    assert 1 <= len(calls) <= threads


def test_float32_inputs_stay_in_float32():
    net = stack(3, nn.ReLU(), conv(8), nn.GELU(), nn.AvgPool2d(2), conv(8), Erf())
    kernel, x = tg.infinite_ntk(net, b_var=0.1), torch.randn(6, 3, 8, 8)
    single, plain = prepared(kernel, x, True, torch.float32), prepared(kernel, x, False)
    found, wanted = (
        gram_tile(single, single, ("ntk",), None)["ntk"],
        gram_tile(plain, plain, ("ntk",), None, False)["ntk"],
    )
    assert found.dtype == torch.float32
    assert float(((found - wanted) / wanted).abs().max()) < 2e-6


def test_gradients_take_the_plain_recursion():
    net = stack(3, nn.ReLU(), conv(8), nn.ReLU())
    kernel, x = tg.infinite_ntk(net), torch.randn(3, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    k = kernel(x)
    (grad,) = torch.autograd.grad(k.sum(), x)
    assert float(grad.abs().max()) > 0
    torch.testing.assert_close(k.detach(), kernel(x.detach()), rtol=1e-12, atol=0.0)


def test_without_numba_the_plain_recursion_gives_the_same(monkeypatch):
    net, x = stack(3, nn.ReLU(), conv(8), nn.ReLU()), torch.randn(3, 3, 4, 4)
    wanted = tg.infinite_ntk(net)(x)
    package = "tangency.infinite.moments.fused"
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("lanes", "compiled"):
        monkeypatch.delitem(sys.modules, f"{package}.{name}")
        monkeypatch.delattr(sys.modules[package], name)
    choose.compiled_backend.cache_clear()
    try:
        kernel = tg.infinite_ntk(net)
        a = kernel.prepare(kernel.ready(x))
        assert find_fused(a.recursion, a.side) is None
        torch.testing.assert_close(kernel(x), wanted, rtol=1e-12, atol=0.0)
    finally:
        choose.compiled_backend.cache_clear()


class AroundPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.short, self.long, self.last = conv(3), conv(8, stride=2), conv(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        pooled = self.long(nn.functional.avg_pool2d(x, 2))
        return self.last(torch.relu(self.short(x) + pooled).mean((2, 3)))


class OneAxis(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv(3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)).mean(2).mean(2))


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (stack(3, nn.Tanh()), "no closed form"),
        (AroundPool(), "a branch around a pooling"),
        (OneAxis(), "joins one axis of positions"),
        (nn.Sequential(nn.Conv2d(3, 8, 2), *stack(8, nn.ReLU())), "not by half of it"),
        (nn.Sequential(conv(3, 9), *stack(8, nn.ReLU())), "larger than 7"),
        (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), *stack(8, nn.ReLU())), "circular"),
        (nn.Sequential(conv(3), nn.AvgPool2d(5), nn.Flatten(), nn.Linear(8, 1)), "do not divide"),
        (nn.Sequential(conv(3), nn.AvgPool2d(1, 8), nn.Flatten(), nn.Linear(8, 1)), "do not divide"),
        (stack(3, nn.ReLU(), nn.AvgPool2d(3, 1)), "do not divide"),
        (nn.Sequential(conv(3), nn.ReLU()), "neither averaged nor flattened"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 1)), "no images"),
    ],
)
def test_who_has_no_plan_and_why(net, why):
    kernel = tg.infinite_ntk(net)
    _, recursion = kernel.read(kernel.ready(torch.randn(2, 3, 8, 8)))
    found = plan.find_plan(recursion)
    assert isinstance(found, str)
    assert why in found


def test_unusual_kernels_go_the_same_way():
    """Frozen weights, another parametrisation, a twin."""
    net, x = stack(3, nn.ReLU(), conv(8), nn.ReLU()), torch.randn(4, 3, 5, 5)
    net[0].requires_grad_(False)
    for kernel in (tg.infinite_ntk(net, parametrization="standard"), replace(tg.infinite_ntk(net), twin=True)):
        fused, plain = (prepared(kernel, x, fuse) for fuse in (True, False))
        found, wanted = gram_tile(fused, fused, BOTH, None), gram_tile(plain, plain, BOTH, None, False)
        for name in BOTH:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=0.0)


def test_positions_that_pooling_leaves_out_do_not_count():
    """A window of 4 on 5 rows leaves the last row out: the kernel is that of the cropped image."""
    net = nn.Sequential(nn.Conv2d(1, 8, 1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8, 1))
    x = torch.randn(3, 1, 5, 4, dtype=torch.float64)
    kernel = tg.infinite_ntk(net)
    torch.testing.assert_close(kernel(x), kernel(x[:, :, :4]), rtol=1e-12, atol=0)
    torch.testing.assert_close(kernel.diag(x), kernel.diag(x[:, :, :4]), rtol=1e-12, atol=0)
