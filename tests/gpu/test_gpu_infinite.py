"""Infinite kernels of inputs on the GPU against the CPU, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_device import CUDA, DEVICE, F64, Errors, error, there
from torch import Tensor, nn
from zoo import Net

import tangency as tg
from tangency import infinite as inf
from tangency.infinite.moments.fused import choose

# Networks that a GPU leaves to the plain recursion say so; that they do is tested below.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")]
BOUND = 1e-8
Made = tuple[Any, dict[str, Any], tuple[int, ...]]  # network, options, shape of a sample
NETWORKS: dict[str, Callable[[], Made]] = {}


def network(*shape: int, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add the decorated function's network to those that are tested, for inputs of this shape."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        NETWORKS[make.__name__] = lambda: (make(), options, shape)
        return make

    return register


class One(Net):
    """A network of one input, which torch.fx can trace."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def dense(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 1))


@network(3, b_var=0.1)
def relu() -> Any:
    return dense(nn.ReLU())


@network(3, w_var=1.5, b_var=0.05)
def tanh() -> Any:
    return dense(nn.Tanh())


@network(3)
def gelu() -> Any:
    return dense(nn.GELU())


@network(3)
def leaky_and_silu() -> Any:
    return nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))


@network(3, w_var="init")
def as_initialised() -> Any:
    return dense(nn.ReLU())


@network(3, parametrization="standard")
def standard() -> Any:
    return dense(nn.ReLU())


@network(3)
def layer_norm() -> Any:
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))


@network(3)
def residual() -> Any:
    return One(
        lambda net, x: net.out(torch.relu((h := net.first(x)) + net.second(torch.relu(h)))),
        first=nn.Linear(3, 8),
        second=nn.Linear(8, 8),
        out=nn.Linear(8, 1),
    )


@network(3)
def gated() -> Any:
    return One(
        lambda net, x: net.out(net.a(x) * torch.sigmoid(net.b(x))),
        a=nn.Linear(3, 8),
        b=nn.Linear(3, 8),
        out=nn.Linear(8, 1),
    )


@network(2, 6, 6, b_var=0.1)
def cnn_flatten() -> Any:
    layers = [nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 1))


@network(2, 6, 6)
def cnn_pooled() -> Any:
    layers = [nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))


@network(2, 7)
def cnn_circular_1d() -> Any:
    conv = nn.Conv1d(2, 8, 3, padding=1, padding_mode="circular")
    return nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 1))


@network(3, 6, 6)
def resnet_by_hand() -> Any:
    block = inf.Sum(inf.Identity(), inf.Serial(inf.Relu(), inf.Conv((3, 3), padding=1)))
    return inf.Serial(inf.Conv((3, 3), padding=1), block, inf.Relu(), inf.GlobalAvgPool(), inf.Linear())


@network(4, 6)
def attention_linear() -> Any:
    attention = inf.SelfAttention("linear", "identity", 1.0, 1.0)
    return inf.Serial(inf.Linear(w_var=1.0), attention, inf.GlobalAvgPool(-1), inf.Linear(w_var=1.0))


@network(4, 6, samples=256)
def attention_softmax() -> Any:
    attention = inf.SelfAttention(qk_var=4.0)
    return inf.Serial(inf.Linear(w_var=1.0), attention, inf.GlobalAvgPool(-1), inf.Linear(w_var=1.0))


@network(4, 3)
def recurrent() -> Any:
    body = nn.RNN(3, 8, batch_first=True)
    return One(lambda net, x: net.out(net.body(x)[0][:, -1]), body=body, out=nn.Linear(8, 1))


@network(3)
def with_buffers() -> Any:
    return nn.Sequential(nn.BatchNorm1d(3, affine=False).eval(), *dense(nn.ReLU()))


@network(3)
def batch_norm() -> Any:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).train()


def inputs(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(5, *shape, generator=torch.Generator().manual_seed(3), dtype=F64)


@network(3, 8, 8, b_var=0.1)
def stack_pooled() -> Any:
    return tg.models.conv_stack(4, 1)


@network(3, 16, 16)
def stack_flattened() -> Any:
    return tg.models.conv_stack(9, 1, size=16)


@network(3, 32, 32)
def myrtle() -> Any:
    return tg.models.myrtle(5, 1)


@network(2, 8, 12, b_var=0.2)
def residual_strided() -> Any:
    branch = inf.Serial(inf.Relu(), inf.Conv((3, 3), stride=2, padding=1), inf.Erf(), inf.Conv((5, 5), padding=2))
    block = inf.Sum(branch, inf.Conv((1, 1), stride=2))
    return inf.Serial(inf.Conv((3, 3), padding=1), block, inf.Gelu(), inf.GlobalAvgPool(), inf.Linear())


@network(1, 28, 28)
def odd_lanes() -> Any:
    return inf.Serial(inf.Conv((3, 3), padding=1), inf.LeakyRelu(0.2), inf.GlobalAvgPool(), inf.Linear())


@pytest.mark.parametrize("name", NETWORKS)
def test_both_kernels_are_those_of_the_cpu(name: str, errors: Errors) -> None:
    net, options, shape = NETWORKS[name]()
    x = inputs(shape)
    want = tg.infinite_ntk(net, **options).both(x)
    found = {}
    if name != "with_buffers":  # its buffers meet the inputs
        found["module on the CPU"] = tg.infinite_ntk(net, **options).both(there(x))
    net = net.to(DEVICE) if isinstance(net, nn.Module) else net
    found["module on the device"] = tg.infinite_ntk(net, **options).both(there(x))
    for where, pair in found.items():
        for got, right in zip(pair, want, strict=True):
            assert got.device.type == DEVICE.type
            assert got.dtype == F64
            errors.below("infinite kernels", error(got, right), BOUND, where)


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "batch_norm"])
def test_two_sides_diagonals_and_tiles(name: str, errors: Errors) -> None:
    net, options, shape = NETWORKS[name]()
    far = there(inputs(shape))
    want = tg.infinite_ntk(net, **options)(inputs(shape))
    kernel = tg.infinite_ntk(net.to(DEVICE) if isinstance(net, nn.Module) else net, **options)
    errors.below("infinite, two sides", error(kernel(far[:3], far[3:]), want[:3, 3:]), BOUND)
    errors.below("infinite, diagonal", error(kernel.diag(far), want.diagonal()), BOUND)
    errors.below("infinite, tiles", error(tg.compute(kernel, far, tile=2, progress=False).dense(), want), BOUND)


def test_parallel_and_equal_inputs(errors: Errors) -> None:
    """x, x, 2x, −x and nearly x: where the angle's rounding shows, which is 1e-8 (docs/limitations.md)."""
    x = inputs((3,))[:1]
    x = torch.cat([x, x, 2 * x, -x, x + 1e-9])
    kernel = tg.infinite_ntk(dense(nn.ReLU()))
    errors.below("infinite, parallel inputs", error(kernel(there(x)), kernel(x)), 1e-7)


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "batch_norm"])
def test_float32_on_the_device(name: str, errors: Errors) -> None:
    """Against float64 on the CPU; with tf32 allowed, which must not be used."""
    net, options, shape = NETWORKS[name]()
    x = inputs(shape)
    x = torch.cat([x, x[:1] + 1e-4])
    want = tg.infinite_ntk(net, **options)(x)
    kernel = tg.infinite_ntk(net.to(DEVICE) if isinstance(net, nn.Module) else net, dtype="float32", **options)
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        got = kernel(there(x))
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert got.dtype == torch.float32
    errors.below("infinite kernels in float32", error(got.double(), want), 1e-5)
    errors.below(
        "infinite, float32, tiles", error(tg.compute(kernel, there(x), tile=2, progress=False).dense(), want), 1e-5
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.skipif(not CUDA, reason="a CPU has no CUDA kernels")
def test_images_go_through_cuda_kernels_or_it_is_said() -> None:
    kernel = tg.infinite_ntk(tg.models.conv_stack(2, 1))
    x = there(inputs((3, 8, 8)))
    assert {row.method for row in kernel.costs(x).rows[:3]} == {"fused kernels"}  # all of images; the head is not
    kernel(x)
    choose.warn_once.cache_clear()
    valid = tg.infinite_ntk(inf.Serial(inf.Conv((3, 3)), inf.Relu(), inf.GlobalAvgPool(), inf.Linear()))
    with pytest.warns(tg.PerformanceWarning, match="not by half of it.*plain recursion"):
        valid(x)


@pytest.mark.skipif(not CUDA, reason="a CPU has no CUDA kernels")
def test_samples_come_from_the_cpu() -> None:
    x = inputs((3, 8, 8))
    kernel = tg.infinite_ntk(tg.models.conv_stack(2, 1), device="cuda")
    assert kernel(x).is_cuda
    assert tg.compute(kernel, x.numpy(), progress=False).dense().shape == (len(x), len(x))
