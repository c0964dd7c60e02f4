"""Where the tests of this folder run: on the GPU or, with TANGENCY_GPU_ON_CPU=1, on the CPU in its place."""

import json
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from zoo import ZOO, Case, Net

import tangency as tg
from tangency._base import tree as _tree
from tangency.models import mlp

# Whether a GPU is to be tested, and whether that can be: else tests that are marked for a GPU are skipped.
WANTED = not os.environ.get("TANGENCY_GPU_ON_CPU")
CUDA = WANTED and torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
F64 = torch.float64
CASES: dict[str, Case] = {case.name: case for case in ZOO}
KINDS = ("sparse", "rademacher", "gaussian", "hadamard", "kronecker", "random-mask")
# What an exact kernel says of layers without a rule, and torch of vmap: known, and said by other tests.
QUIET = ("ignore::tangency.PerformanceWarning", "ignore:.*batching rule.*:UserWarning")


def note(**line: Any) -> None:
    path = os.environ.get("TANGENCY_GPU_LOG")
    if path:
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")


class Errors:
    """The errors that a test measured: `below` notes one, and asserts that it is below its bound."""

    def __init__(self, test: str) -> None:
        self.test = test

    def below(self, group: str, value: float, bound: float, what: str = "") -> None:
        note(kind="error", test=self.test, group=group, error=value, bound=bound)
        assert value < bound, f"{group} {what}: error {value:.2e}, allowed {bound:.0e}"


def there(x: Any) -> Any:
    """Inputs on the device."""
    return _tree.transform(lambda v: v.to(DEVICE), x)


def error(got: Tensor, want: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    assert got.shape == want.shape
    a, b = got.detach().double().cpu(), want.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def cosine_error(got: Tensor, want: Tensor) -> float:
    """The largest error of an entry of k(x), in units of √(k(x, x) k(y, y))."""
    assert got.shape == want.shape
    scale = want.diagonal().sqrt()
    return float(((got.double().cpu() - want) / (scale[:, None] * scale)).abs().max())


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def other_stream() -> AbstractContextManager[Any]:
    """A stream of its own, busy for some 50 ms: what does not wait for it finds nothing there yet."""
    if not CUDA:
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
    return torch.cuda.stream(stream)


def flags() -> tuple[bool, ...]:
    """The switches of torch that kernels set for a while."""
    cudnn = torch.backends.cudnn
    return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.enabled, torch.is_grad_enabled()


def perceptron() -> tuple[nn.Module, Any]:
    return mlp([20, 64, 48, 10]), torch.randn(45, 20)


def convolutions() -> tuple[nn.Module, Any]:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 25, 10)), torch.randn(45, 3, 12, 12)


def transformer() -> tuple[nn.Module, Any]:
    """With an embedding that is tied to the output: on a GPU its sums are made in any order."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    embedding, out = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 50, bias=False)
    out.weight = embedding.weight
    model = Net(
        lambda net, x: net.out(net.body(net.embedding(x)).mean(1))[:, :4],
        embedding=embedding,
        body=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        out=out,
    )
    return model.eval(), torch.randint(50, (45, 7))


NETS = {"perceptron": perceptron, "convolutions": convolutions, "transformer": transformer}
# Those whose bits a GPU repeats (docs/limitations.md).
STEADY = ("perceptron", "convolutions")


def made(net: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """The network and its inputs, the same at each call, on the device."""
    torch.manual_seed(0)
    model, x = NETS[net]()
    return model.to(DEVICE, dtype), there(_tree.cast(x, dtype))


def trace(net: str, dtype: torch.dtype = torch.float32) -> tuple[tg.Kernel, Any]:
    model, x = made(net, dtype)
    return tg.trace_ntk(model), x
