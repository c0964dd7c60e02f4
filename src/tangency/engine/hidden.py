"""Activations of hidden layers as features."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.memory import batch_budget
from .._base.misfit import in_words
from .._base.types import Inputs, Params
from ..errors import InputError, ModelError
from .blocks import DenseBlock, GradientBlock
from .directions import Outputs
from .features import Features, Form, every_parameter
from .micro_batches import put
from .network import Network
from .recorder import Recorder


@dataclass(frozen=True, eq=False)
class Hidden(Features):
    """Activations of layers, flattened per sample: blocks [n, 1, p], one per layer.

    With `layers=None` it is the input of the last linear or convolutional layer. `bias` adds the constant feature 1.
    """

    network: Network
    layers: tuple[str, ...] | None
    bias: bool

    def footprint(self, x: Inputs, form: Form = every_parameter) -> tuple[int, int]:
        """As `Features.footprint`, from the first sample."""
        with in_words(x, dtype=self.network.computes):
            kept = sum(block.nbytes for block in self._blocks(tree.take(x, slice(0, 1))).values())
        # What a forward pass takes besides is not known: a few times what is kept, more of the inputs (heuristic).
        return kept, 8 * kept + 64 * sum(v[0].numel() * v.element_size() for _, v in tree.leaves(x))

    def __call__(
        self, x: Inputs, memory: int | None = None, form: Form = every_parameter, outputs: Outputs | None = None
    ) -> dict[str, GradientBlock]:
        """As `Features.__call__`: the activations, in batches that fit into `memory` bytes."""
        first = next(self.network.model.parameters())
        with in_words(x, dtype=self.network.computes):
            if tree.needs_grad(x):
                return self._blocks(x)
            kept, transient = self.footprint(x)
            step = max(1, (memory or batch_budget(first.device)) // max(1, kept + transient))
            whole: dict[str, GradientBlock] = {}
            for k, part in enumerate(tree.split(x, step)):
                for name, block in self._blocks(part).items():
                    whole[name] = put(whole.get(name), block, k * step, tree.size(x))
            return whole

    def _blocks(self, x: Inputs) -> dict[str, GradientBlock]:
        n, state = tree.size(x), self.network.state()
        with torch.set_grad_enabled(tree.needs_grad(x)), self.network.modes(differentiable=tree.needs_grad(x)):
            values = self._last(state, x) if self.layers is None else layer_values(self.network, state, x, self.layers)
        features: dict[str, GradientBlock] = {}
        for name, z in values.items():
            if z.dim() == 0 or z.shape[0] != n:
                raise ModelError(
                    f"layer {name} gives a tensor of shape {tuple(z.shape)} for {n} samples; needed: the sample in the "
                    "leading dimension. Choose another layer."
                )
            features[name] = DenseBlock(z.reshape(n, 1, -1))
        if self.bias:
            activations = next(iter(values.values()))
            features["1"] = DenseBlock(activations.new_ones(n, 1, 1))
        return features

    def _last(self, state: Params, x: Inputs) -> dict[str, Tensor]:
        """What goes into the last linear or convolutional layer that forward() calls."""
        own = {k for k, _ in self.network.model.named_parameters()}
        recorder = Recorder({k: v for k, v in state.items() if k in own}, tree.size(x))
        self.network(state, x, recorder)
        for tap in reversed(recorder.taps):
            if tap.rule.name in ("linear", "conv") and tap.weight is not None and tap.input is not None:
                return {f"input of {tap.weight.sources[0].removesuffix('.weight')}": tap.input}
        raise InputError(
            "no linear or convolutional layer was found, so there is no last hidden layer to take. Name one: layer='…'."
        )


def layer_values(network: Network, state: Params, x: Inputs, layers: Sequence[str]) -> dict[str, Tensor]:
    """What comes out of the named modules, of each its last call."""
    values: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        """A hook that keeps what the module of this name puts out."""

        def hook(module: nn.Module, args: object, out: object) -> None:
            """Keep a copy of the first tensor: what follows may write into it, as nn.ReLU(inplace=True) does."""
            values[name] = _first_tensor(out, name).clone()

        return hook

    handles = [network.model.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
    try:
        network(state, x)
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for name in layers if name not in values]
    if silent:
        raise InputError(f"layer(s) {checks.some(silent)} were not called by the model. Choose others.")
    return {name: values[name] for name in layers}


def _first_tensor(out: object, name: str) -> Tensor:
    if isinstance(out, Tensor):
        return out
    if isinstance(out, (tuple, list)) and out and isinstance(out[0], Tensor):
        return out[0]
    first = getattr(out, "last_hidden_state", None)
    if isinstance(first, Tensor):
        return first
    raise InputError(f"layer {name} returns a {type(out).__name__}; needed: a tensor. Choose another layer.")


def layer_names(model: nn.Module, layers: str | Sequence[str]) -> tuple[str, ...]:
    """The chosen layers, checked against the model's modules."""
    names = (layers,) if isinstance(layers, str) else tuple(layers)
    known = [n for n, _ in model.named_modules() if n]
    for name in names:
        if name not in known:
            raise InputError(
                f"the model has no layer {name!r}.{checks.suggest(str(name), known)} It has "
                f"{checks.some(known, most=24)}."
            )
    if not names:
        raise InputError("no layer was named; needed: at least one of the model's modules.")
    return names


def default_layers(model: nn.Module) -> tuple[str, ...]:
    """The blocks that a model is made of, without its last: its children, or those of an only child.

    What follows the last parameters (a softmax, a reshape) belongs to the last block, if there is another one.
    """
    prefix, level = "", model
    while True:
        children = list(level.named_children())
        blocks = list(children)
        while blocks and next(blocks[-1][1].parameters(), None) is None:
            blocks.pop()
        if len(blocks) != 1 or next(blocks[0][1].children(), None) is None:
            chosen = blocks if len(blocks) > 1 else children
            return tuple(prefix + name for name, _ in chosen[:-1])
        prefix, level = f"{prefix}{blocks[0][0]}.", blocks[0][1]
