"""What one model of the adversary is, and what the lists of models share. Nothing here or there knows tangency."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

# here, because every list of models imports this module before its library
from benchmarks.robustness.adversary import vision_ops  # noqa: F401

Maker = Callable[[], nn.Module]
Sampler = Callable[[int], Any]

CLASSES = 5  # outputs of nearly every model
VOCABULARY = 50
_TINY = 0.5  # a weight whose entries are smaller than this over √fan-in is made larger


@dataclass(frozen=True)
class Entry:
    """A model by name: how it is made, what it is given, and which tensor of its answer counts.

    `cast`: its floating-point tensors may be made float64; without, it is compared as it is. `shaken`: noise may be
    added to its constant parameters. `expected`: the verdict that is right ("exact" or "refused").
    """

    name: str
    library: str
    make: Maker
    sample: Sampler
    outputs: Any = None
    cast: bool = True
    shaken: bool = True
    expected: str = "exact"

    def build(self, double: bool = False) -> nn.Module:
        """A new model, the same at every call, in evaluation mode and without constant parameters."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        model = self.make().eval()
        if self.shaken:
            shake(model)
        return model.double() if double and self.cast else model

    def inputs(self, n: int, double: bool = False) -> Any:
        """n samples; the first ones are the same whatever n is not promised."""
        torch.manual_seed(zlib.crc32(self.name.encode()) + n)
        x = self.sample(n)
        return convert(x) if double and self.cast else x


def family(library: str, entries: list[Entry]) -> list[Entry]:
    """The entries as a library's."""
    return [replace(entry, library=library) for entry in entries]


def entry(name: str, make: Maker, sample: Sampler, outputs: Any = None, **options: Any) -> Entry:
    return Entry(name, "", make, sample, outputs, **options)


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Noise on parameters that are constant or so small that their part in the kernel would not show."""
    for p in model.parameters():
        if not p.is_floating_point() or p.numel() == 0:
            continue
        size = 0.1 if p.dim() < 2 else _TINY / math.sqrt(p.numel() / p.shape[0])
        if p.numel() == 1 or float(p.std()) < size:
            p.add_(size * torch.randn_like(p))
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.running_mean is not None and module.running_var is not None:
            module.running_mean.add_(0.1 * torch.randn_like(module.running_mean))
            module.running_var.mul_(torch.exp(0.2 * torch.randn_like(module.running_var)))


def convert(x: Any) -> Any:
    """Floating-point tensors in float64, anything else as it is."""
    return leaves(x, lambda v: v.double() if v.is_floating_point() else v)


def leaves(x: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """f of every tensor in nested tuples, lists and dicts."""
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, Mapping):
        return {key: leaves(value, f) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(leaves(value, f) for value in x)
    return x


def rows(*shape: int) -> Sampler:
    """Normal entries [n, *shape]."""
    return lambda n: torch.randn(n, *shape)


def images(size: int, channels: int = 3) -> Sampler:
    return rows(channels, size, size)


def tokens(length: int = 7, vocabulary: int = VOCABULARY) -> Sampler:
    """Token numbers [n, length], without the first three, which models keep for padding and the like."""
    return lambda n: torch.randint(3, vocabulary, (n, length))


def text(length: int = 7, padded: bool = True, **more: Sampler) -> Sampler:
    """input_ids and an attention mask whose rows differ in length, as a dict."""

    def sample(n: int) -> dict[str, Tensor]:
        x = {"input_ids": tokens(length)(n), "attention_mask": torch.ones(n, length, dtype=torch.long)}
        if padded:
            kept = torch.arange(n) % 3 + length - 2
            x["attention_mask"] = (torch.arange(length) < kept[:, None]).long()
        return x | {key: make(n) for key, make in more.items()}

    return sample


def mean_over(*dims: int) -> Callable[[Any], Tensor]:
    """Outputs: the mean over positions of the (first) tensor that the model returns."""

    def pick(out: Any) -> Tensor:
        tensor = out if isinstance(out, Tensor) else out[0]
        return tensor.mean(dims)

    return pick
