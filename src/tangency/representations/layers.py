"""What the layers of a network put out, batch by batch, the network left as it was."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.memory import batch_budget
from .._base.misfit import in_words
from .._base.progress import bar
from .._base.types import Inputs
from ..datasets import Labelled
from ..engine.examine import examine
from ..engine.hidden import default_layers, layer_names, layer_values
from ..engine.network import Network
from ..errors import InputError, ModelError
from ..gram.source import Source, source

Pool = Literal["mean", "first"] | Callable[[Tensor], Tensor] | None
LayersOf = str | Sequence[str] | None  # names or patterns; None: the blocks that a model is made of
# Bytes of a batch on its way through the network, over those of its inputs and outputs (heuristic).
_PASSING = 8


@dataclass(frozen=True, eq=False)
class Layers:
    """Chosen layers of a model: their outputs for one batch (`of(x)`), or for many samples one batch at a time.

    `pool`: what is made of an output with positions, [n, c, h, w] or [n, t, d]: "mean" over positions (of texts over
    those that `attention_mask` in the inputs keeps), "first" (the first token), a function of the output, or None.
    """

    network: Network
    names: tuple[str, ...]
    pool: Pool = None

    @staticmethod
    def of_model(model: nn.Module, layers: LayersOf = None, pool: Pool = None) -> "Layers":
        """The layers of these names or patterns (`"layer3.*"`), in the model's order."""
        if pool is not None and not callable(pool) and pool not in ("mean", "first"):
            raise InputError(f"pool={pool!r}; needed: 'mean', 'first', a function of a layer's output, or None.")
        if isinstance(model, nn.Module) and tree.dtype_of(model) in (torch.float16, torch.bfloat16):
            raise InputError(
                f"the parameters are {tree.dtype_of(model)}; needed: float32 or float64. Give a copy of the model: "
                "copy.deepcopy(model).float()."
            )
        network = Network.of(model, outputs=_flat, trainable=lambda name, p: True)
        return Layers(network, matching(network.model, layers), pool)

    def __call__(self, x: Inputs) -> dict[str, Tensor]:
        """Each layer's output of one batch, pooled, the sample in the leading dimension; no gradients."""
        n, (network, state) = tree.size(x), (self.network, self.network.state())
        with torch.no_grad(), network.modes(), in_words(x, dtype=network.computes):
            values = layer_values(network, state, x, self.names)
        for name, z in values.items():
            if z.dim() < 2 or z.shape[0] != n or not z.is_floating_point():
                raise ModelError(
                    f"layer {name} gives {z.dtype} of shape {tuple(z.shape)} for {n} samples; needed: floating-point "
                    "values with the sample in the leading dimension. Choose another layer."
                )
        return {name: pooled(z, x, self.pool, name).clone() for name, z in values.items()}

    def ready(self, x: object, name: str = "x") -> Source:
        """Samples in whatever form, checked; the model is tried on the first two."""
        samples = source(x.x if isinstance(x, Labelled) else x, name)
        first = self._taken(samples, slice(0, min(2, len(samples))), name)
        with in_words(first, dtype=self.network.computes):
            examine(self.network, self.network.state(), first)
        self(first)
        return samples

    def batches(
        self, x: object, *, batch: int | None = None, progress: bool = True, name: str = "x"
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Rows and each layer's output for them, on the model's device; `batch` follows from memory if not given."""
        if batch is not None:
            checks.positive(batch, "batch", "the number of samples that go together")
        samples = self.ready(x, name)
        step = batch or self._fitting(samples, name)
        shapes: dict[str, torch.Size] = {}
        with bar(len(samples), "layers", "sample", show=progress) as tick:
            for start in range(0, len(samples), step):
                rows = slice(start, min(start + step, len(samples)))
                values = self(self._taken(samples, rows, name))
                for layer, z in values.items():
                    if z.shape[1:] != shapes.setdefault(layer, z.shape[1:]):
                        raise ModelError(
                            f"layer {layer} gives {tuple(z.shape[1:])} for samples {rows.start} to {rows.stop - 1} and "
                            f"{tuple(shapes[layer])} before; needed: one shape. Pool over positions: pool='mean'."
                        )
                yield rows, values
                tick(rows.stop - rows.start)

    def _taken(self, samples: Source, rows: slice, name: str) -> Inputs:
        device = next(self.network.model.parameters()).device
        return self.network.ready(tree.to(samples.take(rows), device), name)

    def _fitting(self, samples: Source, name: str) -> int:
        """How many samples go together."""
        some = self._taken(samples, slice(0, 2), name)  # there are models that refuse one alone
        held = [v for _, v in tree.leaves(some)] + list(self(some).values())
        size = sum(v[0].numel() * v.element_size() for v in held)
        return max(1, min(len(samples), 1024, batch_budget(held[0].device) // (_PASSING * max(1, size))))


def layer_outputs(
    model: nn.Module,
    x: object,
    layers: LayersOf = None,
    *,
    pool: Pool = None,
    batch: int | None = None,
    progress: bool = True,
) -> dict[str, Tensor]:
    """z_l(x) of each chosen layer l, [n, …]: what the modules of these names put out.

    `layers`: names or patterns (`"layer3.*"`, matched as file names are); by default the model's children but the last.
    `x`: samples in any form that `tg.compute` takes, or `Labelled`. The model is left as it was, and refused in
    training mode; of a module that is called several times, the last output counts. Cost: one forward pass. All outputs
    are kept: for wide layers of many samples go batch by batch, with `Layers.of_model(model, layers).batches(x)`.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    >>> outputs = layer_outputs(net, torch.rand(5, 3, 8, 8), ["0", "3"], pool="mean", progress=False)
    >>> {name: tuple(z.shape) for name, z in outputs.items()}
    {'0': (5, 4), '3': (5, 2)}
    """
    chosen = Layers.of_model(model, layers, pool)
    whole: dict[str, Tensor] = {}
    samples = chosen.ready(x)
    for rows, values in chosen.batches(samples, batch=batch, progress=progress):
        for name, z in values.items():
            if name not in whole:
                whole[name] = z.new_empty((len(samples), *z.shape[1:]))
            whole[name][rows] = z
    return whole


def matching(model: nn.Module, layers: LayersOf) -> tuple[str, ...]:
    """The names of the model's modules that were asked for, in the model's order."""
    if layers is None:
        return layer_names(model, default_layers(model))
    asked = (layers,) if isinstance(layers, str) or not isinstance(layers, Sequence) else tuple(layers)
    known = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for pattern in asked:
        found = {name for name in known if fnmatchcase(name, pattern)} if isinstance(pattern, str) else set()
        chosen |= found or set(layer_names(model, [pattern]))
    return layer_names(model, [name for name in known if name in chosen])


def pooled(z: Tensor, x: Inputs, pool: Pool, name: str = "") -> Tensor:
    """A layer's output [n, …] with its positions pooled; as it is where it has none."""
    if callable(pool):
        out = pool(z)
        if not isinstance(out, Tensor) or out.dim() < 2 or out.shape[0] != z.shape[0]:
            given = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise InputError(f"pool made {given} of layer {name}'s {tuple(z.shape)}; needed: [n, …] of the same n.")
        return out
    if pool is None or z.dim() == 2:
        return z
    if pool == "first":
        return z[:, 0] if z.dim() == 3 else z.flatten(2)[:, :, 0]
    if z.dim() > 3:  # images: channels come first
        return z.flatten(2).mean(2)
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    if not isinstance(mask, Tensor):
        return z.mean(1)
    if mask.shape != z.shape[:2]:
        raise InputError(
            f"layer {name} gives {tuple(z.shape)} and attention_mask has the shape {tuple(mask.shape)}, so it is not "
            "known which positions count. Give a function of the layer's output: pool=…."
        )
    kept = mask.to(z.dtype)[:, :, None]
    return (z * kept).sum(1) / kept.sum(1).clamp_min(1)


def _flat(returned: object) -> Tensor:
    """Something of the model's outputs: only its layers count here."""
    if isinstance(returned, Mapping):
        returned = tuple(returned.values())
    while isinstance(returned, (tuple, list)) and returned:
        returned = returned[0]
    if not isinstance(returned, Tensor):
        raise ModelError(f"the model returned a {type(returned).__name__}; needed: tensors.")
    return returned
