"""Jacobians without rules, by torch.func and by plain autograd: for the parameters that no rule covers, and to compare
the rules with."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vjp, vmap
from torch.overrides import TorchFunctionMode

from .._base import tree
from .._base.memory import BATCH_ON_CPU
from .._base.types import Inputs, Params
from ..errors import ModelError
from .capture_plan import CapturePlan
from .network import Network
from .torch_functions import Function
from .weights import dense


class Plainly(TorchFunctionMode):
    """Derivatives of the function itself: those of embeddings are not sparse, nor scaled by how often rows occur.

    `shield` saves tensors for the backward pass even where the model would compute them again (checkpoints): by then
    its own parameters are back in their place.
    """

    def __init__(self, shield: bool = False) -> None:
        super().__init__()
        self.shield = shield

    def __torch_function__(
        self, func: Function, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag):
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments |= {"scale_grad_by_freq": False, "sparse": False}
            args, kwargs = bound.args, bound.kwargs
        if not self.shield:
            return func(*args, **kwargs)
        with saved_tensors_hooks(lambda v: v, lambda v: v):
            return func(*args, **kwargs)


def private(x: Inputs) -> Inputs:
    """A copy that a model may write to."""
    return tree.transform(lambda v: v.clone(), x)


class Reference(NamedTuple):
    """Jᵀv by plain autograd."""

    v: Tensor  # [c]
    gradients: dict[str, Tensor]  # [n, p] per parameter, or [1, p] for a sum over the samples
    unused: tuple[str, ...]  # parameters that the outputs do not depend on


def autograd_reference(
    network: Network, state: Params, x: Inputs, shield: bool, over: Tensor | None = None
) -> Reference:
    """Jᵀv of every sample, by one forward pass and plain autograd. `over` [n]: the samples' sum with these weights."""
    leaves = network.leaves(state, network.trainable)
    with torch.enable_grad(), network.modes(exact=True), Plainly(shield):
        out = network({**state, **leaves}, private(x))
        v = torch.cos(torch.arange(1.0, out.shape[1] + 1))  # no two outputs alike, none left out
        u = v.to(out)
        values = [row @ u for row in out] if over is None else [(out * over.to(out)[:, None] * u).sum()]
        rows = [_gradients(value, list(leaves.values())) for value in values]
    columns = dict(zip(leaves, zip(*rows, strict=True), strict=True))
    unused = tuple(k for k, column in columns.items() if all(g is None for g in column))
    gradients = {
        k: torch.stack([dense(g, torch.zeros_like(leaves[k])).flatten() for g in column])
        for k, column in columns.items()
    }
    return Reference(v, gradients, unused)


def _gradients(value: Tensor, of: list[Tensor]) -> Sequence[Tensor | None]:
    """By autograd; None where the value does not depend on a tensor."""
    if not value.requires_grad:
        return [None] * len(of)
    try:
        return torch.autograd.grad(value, of, retain_graph=True, allow_unused=True)
    except RuntimeError as e:
        why = str(e).splitlines()[0]
        if isinstance(e, torch.OutOfMemoryError) or not any(
            word in why for word in ("inplace", "in-place", "heckpoint", "second time")
        ):
            raise
        raise ModelError(
            f"autograd cannot differentiate the model in evaluation mode, so it has no tangent kernel: {why} Replace "
            "x += … by x = x + …, and checkpoint(…, use_reentrant=True) by use_reentrant=False."
        ) from e


def fallback(network: Network, state: Params, x: Inputs, plan: CapturePlan) -> dict[str, Tensor]:
    """[n, c, p] for the parameters without a rule, by torch.func; those that it cannot do, sample by sample."""
    mapped = [k for k in plan.fallback if k not in plan.looped]
    looped, company = [k for k in plan.fallback if k in plan.looped], plan.company
    jacobians: dict[str, Tensor] = {}
    try:
        size = plan.transient + plan.c * plan.unruled
        jacobians = jacobian_vmap(network, state, x, mapped, size) if mapped else {}
    except (RuntimeError, NotImplementedError) as e:
        if isinstance(e, torch.OutOfMemoryError):
            raise
        looped, company = list(plan.fallback), True  # what torch.func could do for two samples it cannot do here
    if looped:
        jacobians |= jacobian_loop(network, state, x, looped, company=company, shield=plan.shield)
    return jacobians


def jacobian_vmap(network: Network, state: Params, x: Inputs, names: Sequence[str], sample: int) -> dict[str, Tensor]:
    """[n, c, p] by torch.func: vmap over samples (in chunks) of one pullback per output.

    Not vmap(jacrev): two nested vmaps run into wrong batching rules (torch 2.13: PReLU's weight, silently, at n = c).
    `sample`: bytes that one sample takes.
    """
    chosen = {k: state[k] for k in names}
    rest = {k: v for k, v in state.items() if k not in chosen}

    def of_one_sample(*values: Tensor) -> dict[str, Tensor]:
        """The Jacobian of one sample, [c, …] for each parameter."""
        # Cloned: a model may write to its inputs.
        batch = tree.rebuild(x, (v[None].clone() for v in values))
        out, pullback, *_ = vjp(lambda p: network({**rest, **p}, batch)[0], chosen)
        rows = [pullback(e)[0] for e in torch.eye(len(out), dtype=out.dtype, device=out.device)]
        return {k: torch.stack([row[k] for row in rows]) for k in chosen}

    # What a sample takes under vmap: several times its own passes, and its gradients twice in float64 (heuristic).
    size = 4 * sample + 16 * sum(v.numel() for v in chosen.values())
    chunk = max(1, min(tree.size(x), BATCH_ON_CPU // size))
    with network.modes(differentiable=True, exact=True), Plainly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # said by our own warning
        jacobians = vmap(of_one_sample, chunk_size=chunk)(*(v for _, v in tree.leaves(x)))
    return {k: g.reshape(*g.shape[:2], -1) for k, g in jacobians.items()}


def jacobian_loop(
    network: Network, state: Params, x: Inputs, names: Sequence[str], *, company: bool, shield: bool = False
) -> dict[str, Tensor]:
    """[n, c, p] by plain autograd, one sample and one output at a time. The obvious reference, and the last resort.

    `company`: each sample in a batch of two, with the next one.
    """
    create = tree.needs_grad(x)
    n = tree.size(x)
    rows: dict[str, list[Tensor]] = {k: [] for k in names}
    modes = network.modes(differentiable=create, exact=True)
    with torch.enable_grad(), modes, Plainly(shield), ExitStack() as within:
        leaves = network.leaves(state, names)
        f = within.enter_context(network.at({**state, **leaves}))
        for i in range(n):
            batch = tree.take(x, torch.tensor([i, (i + 1) % n]) if company else slice(i, i + 1))
            out = f(private(batch))[0]
            by_output: dict[str, list[Tensor]] = {k: [] for k in names}
            for j in range(len(out)):
                gradients: Sequence[Tensor | None] = [None] * len(leaves)
                if out.requires_grad:
                    gradients = torch.autograd.grad(
                        out[j], list(leaves.values()), retain_graph=True, create_graph=create, allow_unused=True
                    )
                for (k, p), g in zip(leaves.items(), gradients, strict=True):
                    by_output[k].append(dense(g, torch.zeros_like(p)).flatten())
            for k, gradient in by_output.items():
                rows[k].append(torch.stack(gradient))
    return {k: torch.stack(v) for k, v in rows.items()}
