"""What a model does besides computing its outputs: random numbers, things kept for the next call, tensors changed.

All of it is found out on copies; nothing reaches the user's model.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Inputs, Params
from ..errors import InputError, ModelError
from . import borrow
from .network import Network

# How often a model that draws random numbers in evaluation mode is run, to see whether they matter (heuristic).
DRAWS = 8
# How often one is run that seems to draw: the generators belong to the process, and another thread may have drawn.
LOOKS = 3


def examine(network: Network, x: Inputs) -> bool:
    """Refuse a model that is random, or whose forward() changes what is not its own; whether it writes to its inputs.

    Dicts in which it keeps tensors for later calls are found and noted in `network.caches`.
    """
    network.caches[:] = _caches(network, x)
    state = {k: v.clone() for k, v in network.state().items()}
    for _ in range(LOOKS):
        given = tree.transform(lambda v: v.clone(), x)
        before = _random_state(network)
        with torch.enable_grad(), network.modes(exact=True), _copied_attributes(network) as attributes:
            out = _watched(network, state, given).detach()
        drew = not _same_state(before, _random_state(network))
        if not drew:
            break
    _check_parameters(network, state)
    for name, kept, now in attributes:
        if not _equal(kept, now):
            raise ModelError(
                f"forward() changes the tensor {name} in place, which is neither a parameter nor a buffer, so what the "
                f"model returns depends on earlier calls. Register it (register_buffer), or do not write to it."
            )
    if drew:
        _check_draws(network, state, x, out)
    return any(not _equal(v, w) for (_, v), (_, w) in zip(tree.leaves(x), tree.leaves(given), strict=True))


def _watched(network: Network, state: Params, x: Inputs) -> Tensor:
    """The outputs; `network.tidy` says afterwards whether forward() left anything behind."""
    args, kwargs = network.arguments(x)
    own = {k: v.clone() for k, v in state.items()}
    names = {k for k, _ in network.model.named_buffers()}
    # Stand-ins that require gradients, as the model's own parameters do, sharing the memory of `state`.
    given = {k: borrow.stand_in(p, state[k], p.requires_grad) for k, p in network.model.named_parameters()}
    types = {k: v.dtype for k, v in given.items()}
    with borrow.borrowed(network.model, {**given, **{k: own[k] for k in names}}, tuple(network.caches)):
        inside = borrow.Snapshot.of(network.model)
        before = {k for k, _ in network.model.named_parameters()}
        returned = network.model(*args, **kwargs)
        new = [k for k, _ in network.model.named_parameters() if k not in before]
        same = all(v.dtype == types[k] for k, v in given.items()) and all(_equal(own[k], state[k]) for k in names)
        network.tidy[:] = [inside.unchanged() and not network.caches and same]
    if new:
        raise InputError(f"forward() makes the parameter {new[0]} when it is first called. Run the model once first.")
    return network.outputs_of(returned, x)


@contextmanager
def _copied_attributes(network: Network) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """Within it, tensors that are plain attributes are copies: (name, the model's own, the copy)."""
    found = []
    with borrow.borrowed(network.model, {}):
        for name, table, key, v in list(borrow.plain_tensors(network.model)):
            if v.layout == torch.strided and not v.requires_grad:
                table[key] = v.clone()
                found.append((name, v, table[key]))
        yield found


def _check_parameters(network: Network, state: Params) -> None:
    for name, v in network.state().items():
        if name in dict(network.model.named_parameters()) and not _equal(v, state[name]):
            if name in borrow.renewed(network.model):
                continue
            raise ModelError(
                f"forward() changes the parameter {name} in place (clipping or normalising it, say), so the model is "
                "not a function of its parameters. Do that outside of forward(), or compute a new tensor there."
            )


def _check_draws(network: Network, state: Params, x: Inputs, out: Tensor) -> None:
    """Random numbers were drawn: refused in training mode; in evaluation mode only if they change the outputs."""
    training = [name or "model" for name, m in network.model.named_modules() if m.training]
    if training:
        raise ModelError(
            f"the model draws random numbers in training mode ({checks.some(training)}), so it has no kernel. Call "
            "model.eval() first."
        )
    for _ in range(DRAWS):
        with torch.no_grad(), network.modes(exact=True):
            again = network(dict(state), tree.transform(lambda v: v.clone(), x))
        if not torch.allclose(out, again, rtol=1e-4, atol=1e-4 * float(out.abs().max())):
            raise ModelError(
                "the model draws random numbers although it is in evaluation mode, and its outputs depend on them, so "
                "it has no kernel. Turn its randomness off (F.dropout needs training=self.training)."
            )


def _caches(network: Network, x: Inputs) -> list[dict[Any, Any]]:
    """Dicts of the model that forward() fills again when they are empty."""
    held = borrow.caches(network.model)
    if not held:
        return []
    network.caches.clear()
    args, kwargs = network.arguments(tree.transform(lambda v: v.clone(), x))
    found = []
    for name, cache in held:
        keys = set(cache)
        with torch.no_grad(), network.modes(exact=True):
            try:
                with borrow.borrowed(network.model, _own(network), (cache,)):
                    network.model(*args, **kwargs)
                    if not keys & set(cache):
                        continue
                    fresh = {k: v for k, v in cache.items() if isinstance(v, Tensor)}
            except Exception:  # not a cache: forward() needs what it holds
                continue
        found.append(cache)
        stale = [k for k, v in fresh.items() if k in keys and not _close(v, cache[k])]
        if stale and network.params is None:
            raise ModelError(
                f"{name} keeps values that were computed with other parameters than the model has now, and the model "
                "uses them. Empty it: model.train(); model.eval()."
            )
    return found


def check_kept(network: Network, unused: tuple[str, ...]) -> None:
    """Refuse parameters that do not count only because a value made of them earlier is used in their place."""
    modules = dict(network.model.named_modules())
    for name in unused:
        path, _, _ = name.rpartition(".")
        own = [
            key
            for key, v in modules[path].__dict__.items()
            if isinstance(v, Tensor) and v.is_floating_point() and not v.requires_grad
        ]
        if own:
            where = f"{path}.{own[0]}" if path else own[0]
            raise ModelError(
                f"the outputs do not depend on the parameter {name}, but its module keeps a tensor {where} that may "
                "have been computed from it (in eval(), say). Let forward() compute it, or leave the parameter out: "
                "train=…"
            )


def _own(network: Network) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in network.state().items()}


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, as far as comparisons tell: NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _close(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-4, 1e-6)


def _random_state(network: Network) -> list[Any]:
    found: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    device = next(network.model.parameters()).device
    if device.type == "cuda":
        found.append(torch.cuda.get_rng_state(device))
    return found


def _same_state(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(v, w) if isinstance(v, Tensor) else str(v) == str(w) for v, w in zip(a, b, strict=True))
