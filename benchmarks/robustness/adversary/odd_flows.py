"""Hand-written: what forward passes do besides computing: in-place changes, caches, buffers, types, control flow."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.robustness.adversary.entry import CLASSES, Entry, entry, family, images, rows


class InPlaceAfterSum(nn.Module):
    """h is changed after a parameter was added to it, which autograd allows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p, self.head = nn.Linear(6, 8), nn.Parameter(torch.randn(8)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = h + self.p
        h *= 2
        return self.head(y.tanh() + h)


class InPlaceSlices(nn.Module):
    """Results are written into slices of a buffer that the forward pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 8)
        h[:, :4] = self.left(x)
        h[:, 4:] = self.right(x)
        h[:, :4].mul_(self.scale).add_(1)
        return self.head(F.relu(h, inplace=True))


class InPlaceOutput(nn.Module):
    """A layer's output is changed in place right away, and a residual is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).sigmoid_()
        g = self.b(h)
        g += h
        return self.head(g.clamp_(min=-1))


class InPlaceInput(nn.Module):
    """The caller's own tensor is changed: a habit of some preprocessing layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.sub_(0.5).div_(2.0)
        return self.net(x)


class Cached(nn.Module):
    """A derived weight, kept while no gradient is asked for and the weight is the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 6))
        self.kept: Any = None
        self.key: tuple[int, int] | None = None

    def derived(self) -> Tensor:
        if torch.is_grad_enabled():
            return F.normalize(self.weight, dim=1)
        key = (id(self.weight), self.weight._version)
        if self.key != key:
            self.kept, self.key = F.normalize(self.weight, dim=1), key
        return self.kept

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.derived()).tanh()


class Merged(nn.Module):
    """A second weight is merged into the first by .eval(), as adapters and reparametrised blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.side = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES, bias=False)
        self.merged = False

    def train(self, mode: bool = True) -> Self:
        if not mode and not self.merged:
            with torch.no_grad():
                self.base.weight += self.side.weight
            self.merged = True
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x).tanh() if self.merged else (self.base(x) + self.side(x)).tanh()


class Counting(nn.Module):
    """Counts its calls and keeps a running mean of what it saw, in evaluation mode too; the output needs neither."""

    calls: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(6))
        self.last = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        self.last = len(x)
        return self.net(x)


class Keeping(nn.Module):
    """Keeps its activations as an attribute, as many models do for pictures of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        self.kept["hidden"] = h.detach()
        return self.b(h)


class Hooked(nn.Module):
    """Hooks that change what passes: a scale from a parameter, and a forward pre-hook."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(6, 8), nn.Linear(8, CLASSES), nn.Parameter(torch.ones(8))
        self.a.register_forward_hook(self._scaled)
        self.b.register_forward_pre_hook(_squashed)

    def _scaled(self, _module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        return out * self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def _squashed(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].tanh(),)


class Mixed(nn.Module):
    """A float64 head on a float32 body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh().double())


class Branching(nn.Module):
    """Control flow on the whole batch's values would mix samples; this one asks for a size only."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.head = nn.Linear(4, 8), nn.Linear(9, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.small if x.shape[-1] == 4 else self.large)(x).tanh())


class Reordered(nn.Module):
    """Samples are sorted by a score, processed, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.a, self.head = nn.Linear(6, 1), nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)[:, 0]
        order = score.detach().argsort()
        h = self.a(x[order]).tanh() * score[order, None]
        return self.head(h[order.argsort()])


class Folded(nn.Module):
    """Time is folded into the batch with the sample last, layers run, and it is folded out again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        h = self.norm(self.a(x.transpose(0, 1).reshape(t * n, -1))).relu()
        return self.b(h).view(t, n, CLASSES).mean(0)


class Masked(nn.Module):
    """Only valid positions go through the layer, as flat rows; each sample has another number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = x.new_zeros(*mask.shape, 8).masked_scatter(mask[..., None].expand(-1, -1, 8), self.a(x[mask]).tanh())
        return self.b(h.sum(1))


class Custom(torch.autograd.Function):
    """x·w with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class WithCustom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.b = nn.Linear(6, 8), nn.Parameter(torch.randn(8)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Custom.apply(self.a(x), self.w).tanh())


class StraightThrough(nn.Module):
    """Quantised weights and activations with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.a.weight + ((self.a.weight * 4).round() / 4 - self.a.weight).detach()
        h = F.linear(x, weight, self.a.bias).tanh()
        return self.b(h + (h.round() - h).detach())


class Inner(nn.Module):
    """The forward pass takes a gradient with respect to its input, as energy models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(CLASSES, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.b(self.a(x).tanh()).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class Detached(nn.Module):
    """A target branch with the same weights under no_grad, and a part of the output without any gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head, self.unused = nn.Linear(6, 8), nn.Linear(8, CLASSES), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.net(x.flip(1)).relu()
        return self.head(self.net(x).relu() + target)


class ListOfTensors(nn.Module):
    """Parameters in a ParameterList and a ParameterDict; the graph is cut and joined by stack, unbind and where."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(3)])
        self.heads = nn.ParameterDict({"a": torch.randn(6, CLASSES), "b": torch.randn(6, CLASSES)})

    def forward(self, x: Tensor) -> Tensor:
        h = torch.stack([(x * step).sin() for step in self.steps]).prod(0)
        return torch.where(x.sum(1, keepdim=True) > 0, h @ self.heads["a"], h @ self.heads["b"])


def masked(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, 6), torch.arange(5) < (torch.arange(n)[:, None] % 4 + 2)


def quiet_batchnorm() -> nn.Module:
    """A batch norm without statistics uses the batch: there is no kernel."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, CLASSES))


def upside_down() -> nn.Module:
    """Channels last, pixel shuffles, interpolation, padding."""
    body = [
        nn.ReflectionPad2d(1),
        nn.Conv2d(3, 8, 3),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=0.5, mode="bilinear"),
    ]
    net = nn.Sequential(*body, nn.Conv2d(2, 4, 3), nn.Hardswish(), nn.Flatten(), nn.LazyLinear(CLASSES))
    net(torch.zeros(1, 3, 8, 8))
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


ENTRIES: list[Entry] = family(
    "odd",
    [
        entry("in_place_after_sum", InPlaceAfterSum, rows(6)),
        entry("in_place_slices", InPlaceSlices, rows(6)),
        entry("in_place_output", InPlaceOutput, rows(6)),
        entry("in_place_input", InPlaceInput, rows(6)),
        entry("cached_weight", Cached, rows(6)),
        entry("merged_in_eval", Merged, rows(6)),
        entry("counting_buffers", Counting, rows(6)),
        entry("keeps_activations", Keeping, rows(6)),
        entry("hooked", Hooked, rows(6)),
        entry("mixed_types", Mixed, rows(6), cast=False),
        entry("branching_by_size", Branching, rows(4)),
        entry("reordered", Reordered, rows(6)),
        entry("folded_sample_last", Folded, rows(3, 6)),
        entry("masked_rows", Masked, masked),
        entry("custom_function", WithCustom, rows(6)),
        entry("straight_through", StraightThrough, rows(6)),
        entry("inner_gradient", Inner, rows(CLASSES)),
        entry("detached_branch", Detached, rows(6)),
        entry("lists_of_parameters", ListOfTensors, rows(6)),
        entry("batchnorm_of_batch", quiet_batchnorm, rows(6), expected="refused"),
        entry("channels_last", upside_down, images(8)),
    ],
)
