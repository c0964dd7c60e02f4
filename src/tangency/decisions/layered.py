"""Samples as all hidden layers of a network see them together, to tell copies from samples that are only alike."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .._base import tree
from .._base.types import Inputs, Memory
from ..auditing.views import Views
from ..engine.hidden import default_layers
from ..errors import InputError, ModelError
from ..kernels.ntk import embedding_kernel
from ..projection import Projected, projected

# Layers that are looked at, and dimensions to which they are projected together (heuristics: distances of few samples
# decide, and 512 dimensions tell them to some percent).
LAYERS, DIMENSIONS = 8, 512
# Channels of pictures.
CHANNELS = (1, 3, 4)


def views(model: nn.Module, x: Inputs, z: Inputs | None, memory: Memory, progress: bool) -> Views | None:
    """Features of training and test samples: what hidden layers put out, each of length 1, side by side.

    A late layer forgets what its task does not need, so samples of a class look like copies to it; an early one sees
    that they are not, but takes a picture moved by two pixels for another one. None where the model has no hidden
    layers that can be compared. Of pictures [n, c, h, w] also their mirror images.
    """
    names = _layers(model)
    try:
        if not names:
            return None
        kernel = projected(embedding_kernel(model, layers=names), budget=dict.fromkeys(names, DIMENSIONS // len(names)))
        kernel.features(tree.take(x, slice(0, 2)), progress=False)
    except (InputError, ModelError):
        return None

    def seen(v: Inputs | None) -> Tensor | None:
        return None if v is None else _features(kernel, len(names), v, memory, progress)

    train, test = seen(x), seen(z)
    assert train is not None
    by = f"{len(names)} hidden layers, each as much as another" if len(names) > 1 else "the hidden layer"
    return Views(train, test, seen(_mirrored(x)), None if z is None else seen(_mirrored(z)), by)


def _layers(model: nn.Module) -> list[str]:
    """What goes into each block with parameters but the first: at most `LAYERS`, over all the model, with the last."""
    names = default_layers(model)
    blocks = [model.get_submodule(name) for name in names]
    # The last is followed by the model's last block, which has parameters.
    ends = [
        name
        for i, name in enumerate(names)
        if i + 1 == len(names) or next(blocks[i + 1].parameters(), None) is not None
    ]
    chosen: Iterable[int] = range(len(ends))
    if len(ends) > LAYERS:
        chosen = torch.linspace(0, len(ends) - 1, LAYERS).round().long().tolist()
    return [ends[i] for i in chosen]


def _features(kernel: Projected, layers: int, x: Inputs, memory: Memory, progress: bool) -> Tensor:
    """[n, p], the part of each layer with length 1."""
    made = kernel.features(x, memory=memory, progress=progress).flatten(1).float()
    return torch.nn.functional.normalize(made.unflatten(1, (layers, -1)), dim=2).flatten(1)


def _mirrored(x: Inputs) -> Tensor | None:
    """Pictures, left and right exchanged; None of anything else."""
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] not in CHANNELS or min(x.shape[2:]) < 2:
        return None
    return x.flip(-1)
