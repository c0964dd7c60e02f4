"""The samples that a monitor looks at, and what it sees of a model on them, which is left as it was."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.fingerprint import architecture, describe, digest
from .._base.targets import Kind, by_name, column, read_targets
from .._base.types import Float, Inputs, Json, Numbers, Params
from ..engine.network import unwrapped
from ..errors import InputError
from ..gram.compute import compute
from ..gram.source import source
from ..kernels.empirical import Empirical
from .path import Loss
from .quantities import encoded

# Samples in one forward pass when the loss is computed (heuristic).
BATCH = 256
# How many eigenvectors are the top ones: these, and at most a quarter, so that they have somewhere to turn to.
TOP = 10


Checkpoint = nn.Module | Params | None  # the live model (None), another of its kind, or a checkpoint


def _copied(x: Any) -> Any:
    """Tensors and arrays copied, in dicts and tuples too; data sets as they are."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, np.ndarray):
        return x.copy()
    if isinstance(x, Mapping):
        return {name: _copied(v) for name, v in x.items()}
    return type(x)(map(_copied, x)) if type(x) in (tuple, list) else x


def _told(y: Numbers | Sequence[str]) -> Tensor:
    """Targets as a tensor; classes by name as their numbers."""
    return read_targets(y).values if by_name(y) else tree.numbers(column(y))


class Probe:
    """A kernel that reads its model live, samples for it, and targets and a loss where they are given."""

    def __init__(
        self,
        kernel: Empirical,
        x: Inputs,
        y: Numbers | Sequence[str] | None,
        loss: Loss | None,
        top: int | None,
        kind: Kind | None = None,
    ) -> None:
        if not isinstance(kernel, Empirical):
            raise InputError(f"kernel is a {type(kernel).__name__}; needed: one of a network: tg.trace_ntk(model).")
        if kernel.feature_map.network.params is not None:
            raise InputError("the kernel was made with params=, so it never changes; make it without them.")
        # Copies: what is done to the samples later is no change of the kernel.
        self.kernel, self.loss, self.x = kernel, loss, source(_copied(x), "x")
        if len(self.x) == 0:
            raise InputError("the probe x has no samples; needed: a few, e.g. 200 of the training set.")
        self.y = None if y is None else _told(y).clone()
        outputs = None if kernel.trace else self._outputs()
        self.targets = None if self.y is None else encoded(self.y, len(self.x), outputs, kind)
        self.rows = len(self.x) * (outputs or 1)  # of the Gram
        self.top = _top(top, self.rows)

    @property
    def model(self) -> nn.Module:
        """What is watched."""
        return self.kernel.feature_map.network.model

    def form(self) -> dict[str, Json]:
        """All that decides the numbers but for the parameters, and a few words for people."""
        network, form = self.kernel.feature_map.network, self.kernel.form()
        return {
            "model": type(self.model).__name__,
            "parameters": sum(network.model.get_parameter(name).numel() for name in network.trainable),
            "architecture": architecture(self.model),
            "kernel": {name: value for name, value in form.items() if name != "model"},
            "probe": {"samples": len(self.x), "digest": self.x.digest()},
            "targets": None if self.y is None else digest({"y": self.y}),
            "loss": describe(self.loss),
            "top": self.top,
        }

    def most(self) -> int:
        """Bytes that a record with its Gram and its parameters takes, at most."""
        theta = self.theta(self.kernel)
        held = sum(p.numel() * p.element_size() + 4096 + 8 * len(name) for name, p in theta.items())  # and their names
        return 8 * self.rows**2 + held + 2**20

    def kernel_of(self, given: Checkpoint, step: int) -> Empirical:
        """The kernel of what was given: the live one, or one at the parameters of a checkpoint."""
        if given is None or (isinstance(given, nn.Module) and unwrapped(given)[0] is self.model):
            return self.kernel
        if isinstance(given, nn.Module):
            inner, _ = unwrapped(given)
            if type(inner) is not type(self.model):
                raise InputError(
                    f"step {step} was given a {type(inner).__name__}, but a {type(self.model).__name__} is watched. "
                    "Give the model that the kernel was made of, a checkpoint of it, or nothing."
                )
            given = inner.state_dict()
        checks.state_dict(given)
        try:
            checks.params(given, self.model)
        except InputError as e:
            raise InputError(
                f"what was given at step {step} is no checkpoint of the {type(self.model).__name__} that is watched: "
                f"{e}"
            ) from None
        features = self.kernel.feature_map
        params = {name: value.detach().clone() for name, value in given.items()}
        there = replace(features, network=replace(features.network, params=params))  # type: ignore[type-var]
        return replace(self.kernel, feature_map=there)

    def gram(self, kernel: Empirical) -> Float[Tensor, "n n"]:
        """The Gram matrix as it is now, [n·c, n·c] of a full kernel."""
        # In float64: 1 − cosine of kernels that hardly differ would be rounding in float32.
        made = compute(kernel, self.x, progress=False).dense().double()
        return made if made.dim() == 2 else made.reshape(made.shape[0] * made.shape[1], -1)

    def theta(self, kernel: Empirical) -> dict[str, Tensor]:
        """The parameters that count, as they are now."""
        network = kernel.feature_map.network
        held = network.params or dict(network.model.named_parameters())
        return {name: held[name].detach() for name in network.trainable}

    def probe_loss(self, kernel: Empirical) -> float:
        """The user's loss of the outputs on the samples, without the kernel's head."""
        assert self.loss is not None
        assert self.y is not None
        whole, outs = kernel.feature_map.network, []
        with torch.no_grad(), whole.modes():
            for k in range(0, len(self.x), BATCH):
                block = self.x.take(slice(k, min(k + BATCH, len(self.x))))
                network, inputs = whole.without_head(whole.ready(tree.to(block, kernel.device)))
                outs.append(network(network.state(), inputs))
            out = torch.cat(outs)
            y = self.y.to(out.device)
            y = y.to(out.dtype) if y.is_floating_point() else y
            # One output and plain targets are one column each.
            y = y[:, None] if y.dim() == 1 and y.is_floating_point() and out.shape[1] == 1 else y
            found = self.loss(out, y)
            if not isinstance(found, (Tensor, float, int)) or (isinstance(found, Tensor) and found.numel() != 1):
                given = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
                raise InputError(
                    f"loss(outputs, y) of the {len(out)} samples of the probe is {given}; needed: one number, such as "
                    "their mean (reduction='mean')."
                )
            return float(found)

    def _outputs(self) -> int:
        """Of a sample, to the kernel."""
        with as_found(self.model), torch.no_grad():
            one = tree.to(self.x.take(slice(0, 1)), self.kernel.device)
            return self.kernel.outputs(self.kernel.ready(one)).shape[1]


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards each module in its own mode, with random numbers as they were."""
    # Not by model.eval(): a module may do more in its train() than set a flag.
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    own, theirs = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        random.setstate(own)
        np.random.set_state(theirs)


def _top(given: int | None, rows: int) -> int:
    if given is None:
        return max(1, min(TOP, rows // 4))
    checks.positive(given, "top", "a number of eigenvectors")
    if given > rows:
        raise InputError(f"top={given}; needed: at most {rows}, the rows of the Gram matrix of the probe.")
    return given
