"""Hand-written: layers and reparametrisations that are not a plain Linear or Conv."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.robustness.adversary.entry import CLASSES, Entry, entry, family, images, rows, tokens

Wrap = Callable[[nn.Module], nn.Module]


def mlp(wrap: Wrap = lambda layer: layer, width: int = 12) -> nn.Sequential:
    return nn.Sequential(wrap(nn.Linear(6, width)), nn.Tanh(), wrap(nn.Linear(width, CLASSES)))


def cnn(wrap: Wrap) -> nn.Module:
    body = [wrap(nn.Conv2d(3, 6, 3)), nn.GELU(), wrap(nn.Conv2d(6, 8, 3, stride=2)), nn.SiLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), wrap(nn.Linear(8, CLASSES)))


def settled(make: Callable[[], nn.Module], x: Tensor) -> nn.Module:
    """Spectral norms estimate their vectors in training steps."""
    model = make()
    for _ in range(5):
        model(x)
    return model.eval()


def pruned() -> nn.Module:
    model = mlp()
    prune.random_unstructured(model[0], "weight", amount=0.4)
    prune.ln_structured(model[2], "weight", amount=0.25, n=2, dim=1)
    return model


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class LowRank(nn.Module):
    """weight + a·b, with parameters of its own."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(rows, 2)), nn.Parameter(torch.randn(2, columns))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b / 4


def parametrized(chain: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    if chain:
        parametrize.register_parametrization(model[0], "weight", LowRank(6, 6))
    return model


class Bilinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(4, 3, 8), nn.Linear(8, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.pair(a, b)))


class Einsums(nn.Module):
    """Parameters only in einsum, bmm, baddbmm and matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, 6) / 3)
        self.v = nn.Parameter(torch.randn(2, 4, 8) / 3)
        self.b = nn.Parameter(torch.randn(2, 1, 8) / 3)
        self.u = nn.Parameter(torch.randn(16, CLASSES) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("nti,hdi->nhtd", x, self.w).tanh().mean(3)
        pairs = torch.stack([h[..., 0], h[..., 1]])  # [2, n, 4]
        return torch.baddbmm(self.b, pairs, self.v).transpose(0, 1).flatten(1) @ self.u


class Experts(nn.Module):
    """3-D expert weights, all used, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 8) / 3), nn.Parameter(torch.randn(4, 8, CLASSES) / 3)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.bmm(F.silu(torch.bmm(x.expand(4, -1, -1), self.up)), self.down)
        return torch.einsum("ne,enc->nc", self.gate(x).softmax(-1), each)


class Scalars(nn.Module):
    """A temperature, a learned power, per-channel scales and shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.log_temperature = nn.Parameter(torch.tensor(0.3))
        self.power = nn.Parameter(torch.tensor([1.5]))
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x).abs().add(0.1) ** self.power * self.scale + self.shift
        return self.head(h) / self.log_temperature.exp()


class FiLM(nn.Module):
    """One network scales and shifts the channels of another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)
        self.condition, self.head = nn.Linear(4, 12), nn.Linear(6, CLASSES)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        scale, shift = self.condition(context)[:, :, None, None].chunk(2, 1)
        return self.head((self.norm(self.conv(image)) * (1 + scale) + shift).relu().mean((2, 3)))


class Hyper(nn.Module):
    """Weights made for each sample by another network."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.bias = nn.Linear(4, 6 * CLASSES), nn.Parameter(torch.randn(CLASSES))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return torch.bmm(x[:, None], self.make(context).view(-1, 6, CLASSES))[:, 0] + self.bias


class SharedHyper(nn.Module):
    """Weights made by another network from a learned code, the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(3)), nn.Linear(3, 6 * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self.code).view(CLASSES, 6)).tanh()


class Fourier(nn.Module):
    """A Fourier layer; its weights are complex, or two real ones."""

    def __init__(self, complex_weights: bool) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(1, 4), nn.Linear(4, CLASSES)
        weight = torch.randn(4, 4, 3, dtype=torch.cfloat) if complex_weights else torch.randn(4, 4, 3, 2)
        self.weight = nn.Parameter(weight / 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x[..., None]).transpose(1, 2)
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        spectrum = torch.einsum("nik,iok->nok", torch.fft.rfft(h)[..., :3], weight.to(torch.fft.rfft(h).dtype))
        return self.head((torch.fft.irfft(spectrum, n=x.shape[1]) + h).tanh().mean(2))


class RMSNorm(nn.Module):
    """As in many language models: float32 inside, whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class StandardizedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class CosineHead(nn.Module):
    """Normalised features against normalised class vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = nn.Linear(6, 8), nn.Parameter(torch.randn(CLASSES, 8))
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.normalize(self.body(x).relu() + 0.1, dim=-1) @ F.normalize(self.classes, dim=-1).T


class Splines(nn.Module):
    """Learned activations, as in Kolmogorov–Arnold networks: radial bases times coefficients."""

    grid: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 5))
        self.first, self.second = nn.Parameter(torch.randn(6, 5, 7) / 5), nn.Parameter(torch.randn(7, 5, CLASSES) / 5)

    def forward(self, x: Tensor) -> Tensor:
        for coefficients in (self.first, self.second):
            x = torch.tensordot(torch.exp(-((x[..., None] - self.grid) ** 2)), coefficients, 2)
        return x


class Prototypes(nn.Module):
    """Distances to learned points by cdist."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.widths = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.rand(8) + 0.5)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.exp(-torch.cdist(x, self.points) * self.widths))


class LocallyConnected(nn.Module):
    """Unfold and a weight of its own at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(16, 12, 4) / 4), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 2, stride=2).transpose(1, 2)  # [n, 16, 12]
        return self.head(torch.einsum("npi,pio->npo", patches, self.weight).relu().flatten(1))


class Convolutions(nn.Module):
    """Transposed, dilated, grouped, circular and one-dimensional convolutions in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 6, 3, stride=2, output_padding=1, groups=3)
        self.wide = nn.Conv2d(6, 6, 3, dilation=2, groups=2, padding=2, padding_mode="circular")
        self.line, self.head = nn.Conv1d(6, 8, 5, padding="same"), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(self.up(x).relu()).relu().flatten(2)
        return self.head(self.line(h).tanh().mean(2))


class Norms(nn.Module):
    """Group, instance and local norms, PReLU, and a batch norm before a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.instance, self.act = nn.InstanceNorm2d(8, affine=True), nn.PReLU(8)
        self.batch, self.head = nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.instance(F.local_response_norm(self.group(self.conv(x)), 3)))
        return self.head(self.batch(h.flatten(2)).transpose(1, 2)).tanh().mean(1)


class Bags(nn.Module):
    """Sums of embeddings with a weight per word, which is an input."""

    def __init__(self, mode: str, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, mode=mode, sparse=sparse)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.head(self.bag(words, per_sample_weights=weights).tanh())


class Embedded(nn.Module):
    """An embedding, sparse or with a largest norm or padding, whose transpose is the output layer too."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8, **options), nn.Linear(8, CLASSES)
        self.tied = tied

    def forward(self, words: Tensor) -> Tensor:
        h = self.embedding(words).mean(1).tanh()
        return F.linear(h, self.embedding.weight)[:, :CLASSES] if self.tied else self.head(h)


def word_weights(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20, (n, 5)), torch.rand(n, 5)


WORDS = tokens(5, 20)
SPECTRAL = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
ENTRIES: list[Entry] = family(
    "odd",
    [
        entry("weight_norm_old", lambda: mlp(torch.nn.utils.weight_norm), rows(6)),
        entry("weight_norm_new", lambda: mlp(parametrizations.weight_norm), rows(6)),
        entry("weight_norm_conv", lambda: cnn(parametrizations.weight_norm), images(8)),
        entry("spectral_norm_old", lambda: settled(lambda: mlp(torch.nn.utils.spectral_norm), SPECTRAL), rows(6)),
        entry("spectral_norm_new", lambda: settled(lambda: mlp(parametrizations.spectral_norm), SPECTRAL), rows(6)),
        entry("spectral_norm_conv", lambda: cnn(parametrizations.spectral_norm), images(8)),
        entry("orthogonal", lambda: mlp(parametrizations.orthogonal), rows(6)),
        entry("pruned", pruned, rows(6)),
        entry("parametrized_symmetric", lambda: parametrized(False), rows(6)),
        entry("parametrized_chain", lambda: parametrized(True), rows(6)),
        entry("bilinear", Bilinears, lambda n: (torch.randn(n, 4), torch.randn(n, 3))),
        entry("einsums", Einsums, rows(3, 6)),
        entry("experts_3d", Experts, rows(6)),
        entry("scalars", Scalars, rows(6)),
        entry("film", FiLM, lambda n: (torch.randn(n, 3, 8, 8), torch.randn(n, 4))),
        entry("hypernetwork", Hyper, lambda n: (torch.randn(n, 6), torch.randn(n, 4))),
        entry("hypernetwork_shared", SharedHyper, rows(6)),
        entry("fourier_complex", lambda: Fourier(True), rows(8), cast=False, shaken=False, expected="refused"),
        entry("fourier_real", lambda: Fourier(False), rows(8)),
        entry("rmsnorm_float32", lambda: nn.Sequential(nn.Linear(6, 8), RMSNorm(8), nn.Linear(8, CLASSES)), rows(6)),
        entry(
            "standardized_conv",
            lambda: nn.Sequential(StandardizedConv(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, CLASSES)),
            images(8),
        ),
        entry("cosine_head", CosineHead, rows(6)),
        entry("splines", Splines, rows(6)),
        entry("prototypes_cdist", Prototypes, rows(6)),
        entry("locally_connected", LocallyConnected, images(8)),
        entry("convolutions", Convolutions, images(6)),
        entry("norms", Norms, images(8)),
        entry("embedding_bag_weighted", lambda: Bags("sum", False), word_weights),
        entry("embedding_bag_sparse", lambda: Bags("mean", True), WORDS),
        entry("embedding_bag_max", lambda: Bags("max", False), WORDS),
        entry("embedding_sparse", lambda: Embedded(sparse=True), WORDS),
        entry("embedding_tied", lambda: Embedded(tied=True, padding_idx=4), WORDS),
        entry("embedding_max_norm", lambda: Embedded(max_norm=math.sqrt(3)), WORDS),
    ],
)
