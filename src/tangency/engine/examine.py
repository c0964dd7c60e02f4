"""What a model does besides computing its outputs: random numbers, things kept for the next call, tensors changed.

All of it is found out on copies; nothing reaches the user's model.
"""

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Inputs, Params
from ..errors import ModelError
from .network import Cache, Network, attributes, borrowed, written_by_forward

# How often a model that draws random numbers in evaluation mode is run, to see whether they matter (heuristic).
DRAWS = 8
# How often one is run that seems to draw: the generators belong to the process, and another thread may have drawn.
LOOKS = 3


def examine(network: Network, state: Params, x: Inputs) -> bool:
    """Refuse a model that is random, or whose forward() changes what is not its own; whether it writes to its inputs.

    `state`: the network's, of which forward() gets copies. Dicts in which the model keeps tensors for later calls are
    found and noted in `network.caches`.
    """
    copies = {k: v.clone() for k, v in state.items()}
    # Before the first run: with values of other parameters in its caches the model is another function.
    held = [(name, v) for name, _, _, v in attributes(network.model) if isinstance(v, dict)]
    network.caches[:] = _caches(network, held, x) if held else []
    for _ in range(LOOKS):
        seen = network.observed(copies, x)
        drew = not all(map(_same_state, *seen.generators))
        if not drew:
            break
    # Buffers may change (running statistics, counters), but then the model must be borrowed for every call.
    same_buffers = all(_equal(v, copies[k]) for k, v in seen.buffers.items())
    network.tidy[:] = [seen.unchanged and same_buffers and not network.caches]
    _check_parameters(network, state, copies)
    for name, original, copy in seen.attributes:
        if not _equal(original, copy):
            raise ModelError(
                f"forward() changes the tensor {name} in place, which is neither a parameter nor a buffer, so what the "
                f"model returns depends on earlier calls. Register it (register_buffer), or do not write to it."
            )
    if drew:
        _check_draws(network, copies, x, seen.out)
    return any(not _equal(v, w) for (_, v), (_, w) in zip(tree.leaves(x), tree.leaves(seen.inputs), strict=True))


def _same_state(before: object, after: object) -> bool:
    both_tensors = isinstance(before, Tensor) and isinstance(after, Tensor)
    return torch.equal(before, after) if both_tensors else str(before) == str(after)  # type: ignore[arg-type]


def _check_parameters(network: Network, state: Params, after: Params) -> None:
    """Refuse a model that wrote to its parameters, but for embeddings that renormalise themselves."""
    renewed = written_by_forward(network.model)
    for name, _ in network.model.named_parameters():
        if name not in renewed and not _equal(state[name], after[name]):
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


def _caches(network: Network, held: list[tuple[str, Cache]], x: Inputs) -> list[Cache]:
    """Of the dicts that a model holds, by name, those in which it keeps tensors that forward() computes again."""
    network.caches.clear()
    args, kwargs = network.arguments(tree.transform(lambda v: v.clone(), x))
    caches = []
    for name, cache in held:
        if not any(isinstance(v, Tensor) for v in cache.values()):
            continue
        # A cache is what forward() fills again, with the same keys, when it finds it empty.
        keys = set(cache)
        copies = {k: v.clone() for k, v in network.state().items()}
        with torch.no_grad(), network.modes(exact=True):
            try:
                with borrowed(network.model, copies, (cache,)):
                    network.model(*args, **kwargs)
                    if not keys & set(cache):
                        continue
                    fresh = {k: v for k, v in cache.items() if isinstance(v, Tensor)}
            except Exception:  # not a cache: forward() needs what it holds
                continue
        caches.append(cache)
        stale = [k for k, v in fresh.items() if k in keys and not _close(v, cache[k])]
        if stale and network.params is None:
            raise ModelError(
                f"the model's dict {name!r} keeps values that were computed with other parameters than the model has "
                "now, and the model uses them. Empty it: model.train(); model.eval()."
            )
    return caches


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, as far as comparisons tell: NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _close(a: Tensor, b: object) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-4, 1e-6)
