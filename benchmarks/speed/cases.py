"""The benchmark's cases: networks, sample counts, and how each peer is best run on them within 16 GB and 400 s."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tangency import models

SEED = 0


@dataclass(frozen=True)
class Variant:
    """One way to run a neural-tangents implementation."""

    vmap: bool
    batch: int = 0  # for nt.batch; 0 takes all samples at once
    n: int = 0  # samples; 0 takes the case's own number

    def __str__(self) -> str:
        return f"{'vmap_axes=0' if self.vmap else 'vmap_axes=None'}, {f'batch {self.batch}' if self.batch else 'whole'}"


@dataclass(frozen=True)
class Case:
    title: str
    n: int
    shape: tuple[int, ...]
    build: Callable[[], nn.Module]
    chunk: int  # samples in one vmap(jacrev)
    pairs_n: int  # samples for torch.func's NTK-vector products
    variants: Mapping[str, tuple[Variant, ...]]  # by neural-tangents implementation

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        model = self.build()
        randomise_statistics(model)
        return model.eval()

    def inputs(self) -> Tensor:
        return torch.randn(self.n, *self.shape, generator=torch.Generator().manual_seed(SEED + 1))


def randomise_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)


class Transformer(nn.Module):
    """Encoder over sequences of float vectors: linear embedding, post-norm layers, mean pooling, linear head."""

    def __init__(self, outputs: int = 2, features: int = 16, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Linear(features, width)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(dim=1))


def transformer() -> nn.Module:
    model = Transformer()
    for parameter in model.encoder.layers.parameters():  # the layers start as copies of one another
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return model


def plan(with_axes: int, without: int, pairs: int, *batches: int) -> dict[str, tuple[Variant, ...]]:
    """neural-tangents' variants; without vmap_axes it differentiates every output by every sample: small n only."""
    main = (Variant(True, 0, with_axes), *(Variant(True, batch, with_axes) for batch in batches))
    bare = Variant(False, 0, without)
    return {
        "JACOBIAN_CONTRACTION": (*main, bare),
        "NTK_VECTOR_PRODUCTS": (Variant(True, 0, pairs), bare),
        "STRUCTURED_DERIVATIVES": (*main, bare),
        "AUTO": (*main[:1], bare),
    }


CASES = {
    "mlp": Case(
        title="MLP 784-100-100-10, ReLU",
        n=2000,
        shape=(784,),
        build=lambda: models.mlp([784, 100, 100, 10]),
        chunk=100,
        pairs_n=32,
        variants=plan(2000, 100, 100, 500),
    ),
    "lenet5": Case(
        title="LeNet5, 3x32x32, ReLU, max pooling",
        n=500,
        shape=(3, 32, 32),
        build=lambda: models.lenet5(10, 3, 32),
        chunk=50,
        pairs_n=32,
        variants=plan(500, 20, 32, 100),
    ),
    "resnet18": Case(
        title="ResNet18, 3x32x32, evaluation-mode batch norm",
        n=64,
        shape=(3, 32, 32),
        build=lambda: models.resnet18(10, "batch"),
        chunk=8,
        pairs_n=4,
        variants=plan(64, 2, 4, 16),
    ),
    "transformer": Case(
        title="transformer encoder, 2 layers, d=128, length 32",
        n=200,
        shape=(32, 16),
        build=transformer,
        chunk=25,
        pairs_n=16,
        variants=plan(200, 16, 32, 50),
    ),
}
