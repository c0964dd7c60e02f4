"""Where no other library has the limit: the modules' own finite versions, drawn many times, against `infinite_ntk`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from tangency.infinite.finite import Scaled, scales

OUT = 8  # outputs, whose kernels are averaged


class Recurrent(nn.Module):
    def __init__(self, width: int, read: str, relu: bool = False, both: bool = False, layers: int = 1) -> None:
        super().__init__()
        kind = "relu" if relu else "tanh"
        self.rnn = nn.RNN(3, width, layers, nonlinearity=kind, bidirectional=both, batch_first=True)
        self.out, self.read = nn.Linear(width * (1 + both), OUT), read

    def forward(self, x: Tensor) -> Tensor:
        h, last = self.rnn(x)
        return self.out(h.mean(1) if self.read == "mean" else last[-1] if self.read == "last" else h[:, -1])


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(3, width), nn.Linear(width, OUT)
        self.attend = nn.MultiheadAttention(width, max(1, width // 8), batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        return self.out(F.relu(self.attend(x, x, x, need_weights=False)[0]).mean(1))


class Block(nn.Module):
    """A residual block, with the activation before or after."""

    def __init__(self, i: int, o: int, stride: int, post: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(i, o, 1, stride, bias=False) if stride > 1 else nn.Identity()
        self.post = post

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            return F.relu(self.b(F.relu(self.a(x))) + self.short(x))
        return self.b(F.relu(self.a(F.relu(x)))) + self.short(x)


class ResNet18(nn.Module):
    """ResNet18 without BatchNorm: four stages of two blocks, strides 1, 2, 2, 2."""

    def __init__(self, width: int, post: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        blocks = [(width, width, s) for stage in range(4) for s in ((2 if stage else 1), 1)]
        self.blocks = nn.Sequential(*(Block(*b, post) for b in blocks))
        self.fc, self.post = nn.Linear(width, OUT), post

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.blocks(F.relu(x) if self.post else x)
        return self.fc((x if self.post else F.relu(x)).mean((2, 3)))


class Graph(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, width), nn.Linear(width, OUT)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.b(torch.bmm(adjacency, F.relu(self.a(torch.bmm(adjacency, x))))).sum(1)


class Padded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.a, self.b = (
            nn.Embedding(9, width, padding_idx=0),
            nn.Linear(width, width),
            nn.Linear(width, OUT),
        )

    def forward(self, index: Tensor) -> Tensor:
        mask = (index != 0).unsqueeze(-1)
        return self.b((F.gelu(self.a(self.table(index))) * mask).sum(1) / mask.sum(1))


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, width), nn.Linear(3, width), nn.Linear(width, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.a(x)) * self.b(x))


def conv(width: int, **options: Any) -> nn.Sequential:
    first = nn.Conv2d(3, width, 3, padding=1)
    return nn.Sequential(
        first, nn.ReLU(), nn.Conv2d(width, width, 3, **options), nn.ReLU(), nn.Flatten(), nn.LazyLinear(OUT)
    )


def normed(width: int) -> nn.Sequential:
    inner = (nn.Linear(3, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width), nn.RMSNorm(width), nn.ReLU())
    return nn.Sequential(*inner, nn.Linear(width, OUT))


def batch(width: int) -> nn.Sequential:
    inner = (
        nn.Linear(3, width),
        nn.BatchNorm1d(width, track_running_stats=False),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width, track_running_stats=False),
    )
    return nn.Sequential(*inner, nn.Linear(width, OUT))


torch.manual_seed(5)
VECTORS, SERIES, IMAGES = torch.randn(3, 3), torch.randn(3, 4, 3), torch.randn(3, 3, 5, 5)
SMALL = IMAGES[:2, :, :3, :3]
TOKENS = torch.tensor([[1, 2, 3, 0], [2, 2, 0, 0], [4, 1, 3, 8]])
ADJACENCY = torch.rand(3, 4, 4)
Case = tuple[Callable[[int], nn.Module], Any, int, int, dict[str, Any]]
CASES: dict[str, Case] = {  # network, inputs, width, nets, options of the kernel
    "rnn, last": (lambda w: Recurrent(w, "last"), SERIES, 256, 24, {}),
    "rnn, mean, both directions": (lambda w: Recurrent(w, "mean", both=True), SERIES, 192, 24, {}),
    "rnn, relu, two layers": (lambda w: Recurrent(w, "all", relu=True, layers=2), SERIES, 256, 24, {"w_var": 1.0}),
    "softmax attention": (Attention, SERIES, 256, 16, {"samples": 4096, "w_var": 1.0}),
    "dilated conv": (lambda w: conv(w, dilation=2, padding=2), IMAGES, 192, 16, {}),
    "grouped conv": (lambda w: conv(w, groups=4, padding=1), IMAGES, 256, 16, {}),
    "circular, strided conv": (lambda w: conv(w, padding=1, stride=2, padding_mode="circular"), IMAGES, 192, 16, {}),
    "ResNet18, pre-activation": (lambda w: ResNet18(w, post=False), IMAGES[:2], 96, 10, {"w_var": 1.0}),
    "ResNet18, post-activation": (lambda w: ResNet18(w, True), SMALL, 128, 16, {"samples": 512, "w_var": 1.0}),
    "graph": (Graph, (SERIES, ADJACENCY), 512, 24, {}),
    "padded tokens": (Padded, TOKENS, 256, 24, {}),
    "gate": (Gate, VECTORS, 512, 24, {}),
    "norms with scale and shift": (normed, VECTORS, 384, 24, {}),
}  # fmt: skip

# What is in each of these is in another too (draws behind a shortcut: test_infinite_carried.py).
LONG = ("rnn, mean, both directions", "circular, strided conv", "ResNet18, post-activation")


def finite(factory: Callable[[int], nn.Module], width: int, x: Any, nets: int, options: dict[str, Any]) -> Tensor:
    """Tangent kernels of `nets` draws [nets, n, n]."""
    numbers = {"w_var": options.get("w_var", 2.0), "b_var": 0.1}
    module = factory(width).eval()
    module(*x) if isinstance(x, tuple) else module(x)  # lazy layers
    kernel = Scaled.of(module, x, scales(module, **numbers))  # follows the module: its way is found out once
    found = []
    for seed in range(nets):
        tg.infinite.draw(module, seed=seed, **numbers)
        now = kernel.prepare(x)
        found.append(kernel.between(now, now).double())
    torch.testing.assert_close(tg.infinite.empirical_ntk(module, x, **numbers).double(), found[-1])
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")  # recurrent gradients go through torch.func
@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow) if k in LONG else k for k in CASES])
@pytest.mark.filterwarnings("ignore:.*groups of .* channels")  # narrow ones
@pytest.mark.every(3)
def test_mean_over_networks(name: str) -> None:
    factory, x, width, nets, options = CASES[name]
    module = factory(8).eval()
    module(*x) if isinstance(x, tuple) else module(x)
    exact = tg.infinite_ntk(module, b_var=0.1, **options)(x)
    drawn = finite(factory, width, x, nets, options)
    error = drawn.std(0) / nets**0.5
    z = (drawn.mean(0) - exact) / error
    along = (drawn * exact).sum((1, 2)) / exact.square().sum()  # the factor between both, one number a network
    assert abs(float((along.mean() - 1) / (along.std() / nets**0.5))) < 3, (
        f"{name}: off by {float(along.mean() - 1):.3f}"
    )
    assert float(z.abs().max()) < 4.5, f"{name}: {z}"  # of up to 6 entries, several of them correlated
    assert float(error.abs().max() / exact.abs().max()) < 0.1  # enough networks to tell


@pytest.mark.slow
def test_batch_norm_over_a_batch() -> None:
    """The kernel of the whole batch: its statistics couple the samples, so the Jacobian is taken of all at once."""
    torch.manual_seed(2)
    x = torch.randn(6, 3).double()
    exact = tg.infinite_ntk(batch(8), b_var=0.0)(x)
    found = []
    module = batch(256).double()
    for seed in range(20):
        tg.infinite.draw(module, seed=seed, b_var=0.0)
        params = dict(module.named_parameters())
        jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(module, p, (x,)))(params)
        scale = tg.infinite.finite.scales(module, w_var=2.0, b_var=0.0)
        flat = {k: j.reshape(6, OUT, -1) for k, j in jacobian.items()}
        found.append(sum(scale[k] * torch.einsum("ncp,mcp->nm", j, j) / OUT for k, j in flat.items()))
    drawn = torch.stack(found)
    along = (drawn * exact).sum((1, 2)) / exact.square().sum()
    assert abs(float((along.mean() - 1) / (along.std() / 20**0.5))) < 3
    assert float(((drawn.mean(0) - exact) / (drawn.std(0) / 20**0.5)).abs().max()) < 4.5


@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")
@pytest.mark.parametrize(
    "name",
    [
        "rnn, last", "gate",
        *(pytest.param(k, marks=pytest.mark.slow)
          for k in ("softmax attention", "grouped conv", "ResNet18, pre-activation")),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*groups of .* channels")
@pytest.mark.every(2)
def test_slope_in_width(name: str) -> None:
    """‖Θ_m − Θ‖ ~ m^-½."""
    factory, x, _, _, options = CASES[name]
    module = factory(8).eval()
    module(*x) if isinstance(x, tuple) else module(x)
    exact = tg.infinite_ntk(module, b_var=0.1, **options)(x)
    widths, nets = ([8, 16, 32], 8) if "ResNet18" in name else ([16, 64, 128], 12)
    off = []
    for width in widths:
        drawn = finite(factory, width, x, nets, options)
        off.append(float((drawn - exact).square().sum((1, 2)).mean().sqrt()))
    logs = torch.tensor([widths, off]).log()
    centred = logs - logs.mean(1, keepdim=True)
    slope = float((centred[0] * centred[1]).sum() / centred[0].square().sum())
    assert -0.75 < slope < -0.35, f"{name}: slope {slope:.2f}, distances {off}"
