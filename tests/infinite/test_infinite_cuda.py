"""The CUDA kernels of the fused recursion, run on a CPU warp by warp (helpers/warp.h), against the plain recursion."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_infinite_peers import CASES, DATA, OTHERS, inputs, kernel
from torch import Tensor, nn
from warp import Warps, check_types, compiler

import tangency as tg
from tangency.gram.work import pack, unpack
from tangency.infinite import (
    Abs,
    AvgPool,
    Conv,
    Erf,
    Flatten,
    Gelu,
    GlobalAvgPool,
    GlobalSumPool,
    Identity,
    LeakyRelu,
    Linear,
    Relu,
    Serial,
    Sum,
    SumPool,
)
from tangency.infinite.layers.basic import Layer
from tangency.infinite.moments.assemble import PreparedBatch, gram_tile
from tangency.infinite.moments.core import Side
from tangency.infinite.moments.fused import choose, cuda, gpu
from tangency.infinite.moments.fused.gpu import GpuBackend
from tangency.infinite.moments.fused.layout import Real
from tangency.infinite.moments.fused.plan import Plan, find_plan
from tangency.infinite.moments.fused.stages import cut
from tangency.infinite.moments.recursion import with_own_moments

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, which stands in for a GPU")
Net = Layer | nn.Module


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that takes CUDA kernels."""
    monkeypatch.setattr(choose, "compiled_backend", lambda: GpuBackend(torch.device("cpu"), Warps()))
    cuda.make_program.cache_clear()
    yield
    cuda.make_program.cache_clear()


def images(n: int, height: int = 8, width: int = 8, channels: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(n, channels, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def errors(net: Net, x: Tensor, y: Tensor | None = None, dtype: str = "float64", **options: float) -> dict[str, float]:
    """The largest difference to the plain recursion, relative to the largest entry; that the kernels ran is checked."""
    kernel, exact = (tg.infinite_ntk(net, dtype=d, **options) for d in (dtype, "float64"))  # type: ignore[arg-type]
    a = kernel.prepare(kernel.ready(x))
    assert choose.find_fused(a.recursion, a.side) is not None
    b = a if y is None else kernel.prepare(kernel.ready(y))
    fused = gram_tile(a, b, ("nngp", "ntk"), None)
    c = plainly(exact, x)
    plain = gram_tile(c, c if y is None else plainly(exact, y), ("nngp", "ntk"), None, fuse=False)
    return {k: float((fused[k].double() - plain[k]).abs().max() / plain[k].abs().max()) for k in plain}


def plainly(kernel: tg.infinite.Infinite, x: Tensor) -> PreparedBatch:
    """A batch prepared without the fused recursion."""
    build, recursion = kernel.read(kernel.ready(x))
    assert build.energy is not None
    return PreparedBatch(recursion, with_own_moments(recursion, Side(build.known, build.size, build.energy)))


def plan_of(net: Net, x: Tensor) -> Plan:
    kernel = tg.infinite_ntk(net)
    plan = find_plan(kernel.read(kernel.ready(x))[1])
    assert isinstance(plan, Plan)
    return plan


def stack(depth: int, *end: Layer, kind: Layer | None = None, size: int = 3) -> Layer:
    layers = [layer for _ in range(depth) for layer in (Conv((size, size), padding=size // 2), kind or Relu())]
    return Serial(*layers, *(end or (GlobalAvgPool(),)), Linear())


def block(stride: int) -> Layer:
    """A pre-activation residual block."""
    branch = Serial(Relu(), Conv((3, 3), stride=stride, padding=1), Relu(), Conv((3, 3), padding=1))
    return Sum(branch, Conv((1, 1), stride=stride) if stride > 1 else Identity())


BRANCH = Serial(Relu(), Conv((3, 3), stride=2, padding=1), Erf(), Conv((5, 5), padding=2))
BRANCHED = Sum(BRANCH, Conv((1, 1), stride=2))
POOLED = Serial(Conv((3, 3), padding=1), Relu(), AvgPool((2, 2)), Conv((3, 3), padding=1), Relu(), SumPool((2, 2)))
NETS = {
    "relu": stack(3),
    "flat": stack(3, Flatten()),
    "leaky": stack(2, kind=LeakyRelu(0.2)),
    "abs": stack(2, kind=Abs()),
    "erf": stack(2, kind=Erf(1.0, 0.7, 0.1)),
    "gelu": stack(2, kind=Gelu()),
    "linear": stack(2, kind=Identity()),
    "sums": stack(2, GlobalSumPool()),
    "wide windows": stack(2, size=5),
    "single windows": stack(2, size=1),
    "pooled": Serial(POOLED, GlobalAvgPool(), Linear()),
    "pooled, flat": Serial(POOLED, Flatten(), Linear()),
    "pooled to one": Serial(Conv((3, 3), padding=1), Relu(), AvgPool((4, 4)), AvgPool((2, 2)), Flatten(), Linear()),
    "pooled images": Serial(AvgPool((2, 2)), Conv((3, 3), padding=1), Relu(), GlobalAvgPool(), Linear()),
    "strided": Serial(*(Conv((3, 3), stride=2, padding=1), Relu()) * 2, GlobalAvgPool(), Linear()),
    "strided erf": Serial(*(Conv((3, 3), stride=2, padding=1), Erf()) * 2, GlobalAvgPool(), Linear()),
    "strided gelu": Serial(Conv((3, 3), padding=1), BRANCHED, Gelu(), GlobalAvgPool(), Linear()),
    "residual": Serial(Conv((3, 3), padding=1), block(1), block(2), block(1), Relu(), GlobalAvgPool(), Linear()),
    "head": Serial(stack(2), Relu(), Linear(), Relu(), Linear()),
}  # fmt: skip
# A program is compiled for each net; under `make test` one has what "leaky" to "linear" and the windows have singly.
KINDS: tuple[tuple[Layer, int], ...] = (
    (LeakyRelu(0.2), 3), (Abs(), 5), (Identity(), 1), (Erf(1.0, 0.7, 0.1), 3), (Gelu(), 3),
)  # fmt: skip
EACH = [layer for kind, size in KINDS for layer in (Conv((size, size), padding=size // 2), kind)]
NETS["each kind"] = Serial(*EACH, GlobalSumPool(), Linear())
FEW = ("each kind", "flat", "pooled", "pooled, flat", "pooled images", "strided gelu", "residual", "head")
nets = pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in NETS]
)


@nets
@pytest.mark.every(7)
def test_float64_is_the_plain_recursion(name: str) -> None:
    x, y = images(3), images(2, seed=1)
    for found in (errors(NETS[name], x, b_var=0.1), errors(NETS[name], x, y, b_var=0.1)):
        assert max(found.values()) < 1e-13, found


@nets
@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.every(6)
def test_a_cuda_compiler_would_take_it(name: str, real: Real) -> None:
    """What runs on the CPU has vectors for lanes and a header of its own; this is the header that a card gets."""
    program = cuda.make_program(plan_of(NETS[name], images(3)), real, True)
    assert not isinstance(program, str)
    for text in (*(k.text for k in program.kernels), *filter(None, program.pools)):
        check_types(text)


@nets
@pytest.mark.every(4, 1)
def test_float32_is_near(name: str) -> None:
    x = images(3)
    x[1], x[2] = x[0], x[0] + 1e-4 * x[1]  # equal and nearly equal images are computed in float64
    found = errors(NETS[name], x, dtype="float32", b_var=0.1)
    assert max(found.values()) < 2e-6, found
    found = errors(NETS[name], x, images(2, seed=1), dtype="float32", b_var=0.1)
    assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize(("height", "width"), [(7, 5), (2, 2), (4, 40), (6, 28)])
@pytest.mark.every(2)
def test_any_size(height: int, width: int) -> None:
    """Odd widths, lanes that stay idle, images of more columns than a warp has lanes."""
    found = errors(stack(2), images(2, height, width), images(2, height, width, seed=1), dtype="float32")
    assert max(found.values()) < 2e-6


@pytest.mark.slow
def test_dead_pixels_and_flat_images() -> None:
    """Zero variance on either side, constant images, and images of one colour in several shades."""
    x = images(4)
    x[0, :, :4], x[1], x[2], x[3] = 0, 0, 1.0, 0.25
    for name in ("relu", "flat", "pooled"):
        assert max(errors(NETS[name], x, b_var=0.1).values()) < 1e-9
        assert max(errors(NETS[name], x, b_var=0.1, dtype="float32").values()) < 1e-5
    assert max(errors(NETS["relu"], x).values()) < 1e-9  # without biases black stays black


@pytest.mark.slow
def test_stages_share_a_stack() -> None:
    """A stack cut into several launches gives what one gives."""
    x, y = images(2), images(2, seed=1)
    side, other = (plainly(tg.infinite_ntk(stack(7)), v).side for v in (x, y))
    plan = plan_of(stack(7), x)
    index = torch.arange(2)
    found = []
    for windows in (2, 3, 21):
        program = cuda.make_program(plan, "double", True, windows)
        assert not isinstance(program, str)
        assert len(program.kernels) == -(-7 // windows)
        found.append(cuda.start(program, Warps(), side, other).moments(index, index))
    for met in found[1:]:
        assert torch.allclose(met.cov, found[0].cov, rtol=1e-13)
        assert torch.allclose(*(m.ntk for m in (met, found[0]) if m.ntk is not None), rtol=1e-13)


@pytest.mark.slow
def test_portions_of_pairs() -> None:
    """However little room there is, the same pairs come out in the same order."""
    net = Serial(POOLED, GlobalAvgPool(), Linear())
    x = images(3)
    plan, side = plan_of(net, x), plainly(tg.infinite_ntk(net), x).side
    program = cuda.make_program(plan, "double", True)
    assert not isinstance(program, str)
    run, index = cuda.start(program, Warps(), side, side), torch.cartesian_prod(torch.arange(3), torch.arange(3)).T
    whole, bits = run.moments(*index), run.moments(*index, room=1)
    assert torch.equal(whole.cov, bits.cov)
    assert torch.equal(*(m.ntk for m in (whole, bits) if m.ntk is not None))


def test_frozen_layers_and_rates() -> None:
    """Weights that are not trained, learning rates, the standard parametrisation: rates other than variances."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1),
    )  # fmt: skip
    x = images(2)
    options: list[dict[str, object]] = [
        {"trainable": ["4", "8"]},
        {"trainable": ["0"]},
        {"lr": {"": 1.0, "2": 3.0, "0.bias": 0.5}, "parametrization": "standard"},
        {"w_var": {"": 1.5, "2": 0.3}, "b_var": {"": 0.0, "4": 0.7}},
    ]
    for option in options:
        assert max(errors(net, x, **option).values()) < 1e-13, option  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_networks_at_random(data: st.DataObject) -> None:
    """Layers drawn one after the other, on images of a drawn size."""
    kinds = st.sampled_from([Relu(), LeakyRelu(0.3), Abs(), Erf(), Gelu(), Identity()])
    height, width = (data.draw(st.sampled_from([4, 8, 12]), label=side) for side in ("height", "width"))
    layers: list[Layer] = []
    grid = [height, width]
    for _ in range(data.draw(st.integers(1, 4), label="layers")):
        size = data.draw(st.sampled_from([1, 3, 5]))
        stride = data.draw(st.sampled_from([1, 1, 2])) if min(grid) % 2 == 0 and min(grid) > 2 else 1
        layers += [Conv((size, size), stride=stride, padding=size // 2), data.draw(kinds)]
        grid = [n // stride for n in grid]
        if all(n % 2 == 0 for n in grid) and data.draw(st.booleans()):
            layers.append(AvgPool((2, 2)))
            grid = [n // 2 for n in grid]
    end = data.draw(st.sampled_from([GlobalAvgPool(), Flatten()]))
    net = Serial(*layers, end, Linear())
    plan = plan_of(net, images(1, height, width))
    if isinstance(cut(plan, 21), str):
        return
    found = errors(net, images(2, height, width), images(2, height, width, seed=1), b_var=0.05)
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize(
    ("net", "size", "why"),
    [
        (Serial(Conv((3, 3), stride=2, padding=1), Relu(), GlobalAvgPool(), Linear()), (7, 7), "do not divide"),
        (Serial(Conv((3, 3), stride=3, padding=1), Relu(), GlobalAvgPool(), Linear()), (9, 9), "powers of 2"),
        (stack(1), (80, 8), "80×8"),
        (stack(1), (8, 33), "8×33"),
    ],
)
def test_what_a_gpu_leaves_to_the_plain_recursion(net: Layer, size: tuple[int, int], why: str) -> None:
    stages = cut(plan_of(net, images(1, *size)), 21)
    assert why in str(stages)


def test_many_channels_are_refused() -> None:
    stages = cut(plan_of(stack(1), images(1, channels=9)), 21)
    assert "9 channels" in str(stages)


def test_costs_say_what_computes_it() -> None:
    costs = tg.infinite_ntk(stack(3)).costs(images(4))
    assert {row.method for row in costs.rows[:-1]} == {"compiled loop"}  # what stands in for the GPU is a CPU
    assert costs.flops == pytest.approx(tg.infinite_ntk(stack(3)).costs(images(4), images(4)).flops * 10 / 16)
    other = tg.infinite_ntk(Serial(Conv((3, 3)), Relu(), GlobalAvgPool(), Linear())).costs(images(4))
    assert {row.method for row in other.rows} == {"plain recursion"}
    assert "not by half of it" in other.table()


def test_a_gpu_that_cannot_compile_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card without a compiler, or a network that does not fit: one sentence, and the plain recursion."""
    kernel, cuda_card, f64 = tg.infinite_ntk(stack(1)), torch.device("cuda"), torch.float64
    recursion = kernel.read(kernel.ready(images(1)))[1]
    refused = kernel.read(kernel.ready(images(1, 80, 8)))[1]

    def fails(*args: object) -> None:
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_compile_kernel", fails, raising=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    gpu._refused.cache_clear()
    for dtype in (f64, torch.float32):
        found = choose.choose(recursion, cuda_card, dtype)
        assert found == "CUDA kernels cannot be compiled here (no compiler here)"
    assert "80×8" in str(choose.choose(refused, cuda_card, f64))
    assert "mps" in str(choose.choose(recursion, torch.device("mps"), f64))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "compiles no CUDA kernels at run time" in str(choose.choose(recursion, cuda_card, f64))
    monkeypatch.undo()
    gpu._refused.cache_clear()
    choose.warn_once.cache_clear()
    with pytest.warns(tg.PerformanceWarning, match="no compiler here: these convolutions go through the plain"):
        choose.warn_once("no compiler here")
    choose.warn_once("no compiler here")  # a second warning would be an error here


def test_inputs_go_to_the_kernels_device() -> None:
    kernel = tg.infinite_ntk(stack(1), device="cpu")
    assert kernel.device == torch.device("cpu")
    assert torch.equal(kernel(images(2)), tg.infinite_ntk(stack(1))(images(2)))
    for device, why in (("cuda:99", "torch sees"), ("nowhere", "a device of torch"), (7.5, "a device of torch")):
        with pytest.raises(tg.InputError, match=why):
            tg.infinite_ntk(stack(1), device=device)  # type: ignore[arg-type]


def test_a_devices_number_stays_behind() -> None:
    """A worker process sees its own GPU alone, whatever number it has elsewhere."""
    kernel = replace(tg.infinite_ntk(stack(1)), device=torch.device("cuda:3"))
    assert unpack(pack(kernel)).device == torch.device("cuda")


def fitting_peers() -> list[str]:
    """The networks of the fixtures that a GPU's kernels take."""
    found = []
    for name, case in CASES.items():
        if case["inputs"] == "image" and name not in OTHERS:
            k = kernel(name)
            recursion = k.read(k.ready(inputs("image", "1")))[1]
            plan = find_plan(recursion)
            if isinstance(plan, Plan) and not isinstance(cut(plan, 21), str):
                found.append(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_agrees_with_neural_tangents(dtype: str) -> None:
    """Every network of the fixtures that fits gives neural-tangents' numbers."""
    names = fitting_peers()
    assert len(names) > 10
    x1, x2 = inputs("image", "1"), inputs("image", "2")
    for name in names:
        k = replace(kernel(name), dtype=getattr(torch, dtype))
        for which, pair in {"11": k.both(x1), "12": k.both(x1, x2)}.items():
            for what, got in zip(("nngp", "ntk"), pair, strict=True):
                theirs = torch.from_numpy(DATA[f"{name}/{what}_{which}"])
                off = (got.double() - theirs).abs() / theirs.abs().max()
                # Where an input meets itself, theirs is good to half the digits only.
                itself = torch.eye(*off.shape, dtype=torch.bool) if which == "11" else torch.zeros(off.shape).bool()
                itself[1, 0] |= which == "12"  # x2[0] is a copy of x1[1]
                bound = 1e-9 if dtype == "float64" else 3e-6
                assert float(off[~itself].max()) < bound, f"{name} {what}_{which}: {float(off[~itself].max()):.1e}"
