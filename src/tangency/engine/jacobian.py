"""The Jacobian of one micro-batch: a block per parameter, by its rule, or by torch.func where no rule fits."""

import inspect
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vjp, vmap
from torch.overrides import TorchFunctionMode

from .._base import tree
from .._base.memory import BATCH_ON_CPU
from .._base.types import Inputs, Params
from ..errors import ModelError, NonFiniteError
from . import blocks
from .blocks import Block, Dense, Mixed, Outer, Use
from .capture import collect
from .layout import Layout
from .network import Network
from .recorder import Key, Recorder, Tap
from .rules import NoRule
from .weights import Weight, dense, pull_back

# How far two runs of the same arithmetic may be apart, relative to the largest entry: rounding, not error.
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# How far a rule's gradient may be from autograd's, relative to its norm, before it counts as not fitting.
FITS = {torch.float64: 1e-8, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


class Unfamiliar(Exception):  # a signal to features.py, never shown to users
    """The model called other functions than it did while it was probed."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls


@dataclass(frozen=True)
class Plan:
    """What the probe found out about a model on one kind of input."""

    layouts: dict[Key, Layout]
    copies: dict[Hashable, Layout]  # weights that hold a copy for every sample
    fallback: dict[str, str]  # parameter → why no rule covers it
    rules: dict[str, str]  # parameter → the rule that covers it
    c: int
    calls: int  # a fingerprint of the model's calls
    narrowest: torch.dtype  # the fewest bits that the model computes in
    looped: frozenset[str] = frozenset()  # of the fallback, what torch.func gets wrong: plain autograd, by samples
    company: bool = False  # one sample needs another one beside it there: autograd itself is wrong for it alone
    kept: int = 1  # bytes per sample that the blocks take
    transient: int = 1  # bytes per sample that a forward and a backward pass take besides
    saved: dict[str, int] = field(default_factory=dict)  # parameter → bytes per sample less if its gradients are formed
    seed: float = 1.0  # factor on the cotangents of a float16 pass
    private: bool = False  # forward() writes to its inputs: it gets copies
    shield: bool = False  # forward() recomputes parts in the backward pass, which is prevented
    measured: set[int] = field(default_factory=set)  # other fingerprints, for which rows are traced to their samples

    def without(self, names: Iterable[str], why: str) -> "Plan":
        """The plan with these parameters in the fallback."""
        return replace(self, fallback=self.fallback | dict.fromkeys(names, why))


def capture(
    network: Network, state: Params, x: Inputs, plan: Plan, *, differentiable: bool = False, exact: bool = False
) -> dict[str, Block]:
    """The blocks of one micro-batch. `exact` keeps 32 bits where the precision asks for 16.

    One sample goes twice: torch's batch norm in evaluation mode has a wrong derivative for a batch of one whose
    gradient is transposed, and plans are made for two.
    """
    if tree.size(x) == 1:
        twice = tree.transform(lambda v: torch.cat([v, v]), x)
        found = capture(network, state, twice, plan, differentiable=differentiable, exact=exact)
        return {k: b.rows(slice(0, 1)) for k, b in found.items()}
    half = network.precision == "float16" and not exact and not differentiable
    if plan.fallback.keys() >= set(network.train):
        every = fallback(network, state, x, plan)
        return {k: Dense(every[k] if differentiable else every[k].detach()) for k in network.train}
    seed = plan.seed if half else 1.0
    while True:
        found = by_rules(network, state, x, plan, differentiable=differentiable, half=half, seed=seed, exact=exact)
        if not half:
            break
        halved = {k: _halved(b, seed) for k, b in found.items()}
        found = {k: b for k, (b, _) in halved.items()}
        largest = float(torch.stack([top for _, top in halved.values()]).max()) if halved else 0.0
        if largest < float("inf") or seed < 2.0**-24:
            break
        seed /= 64  # a cotangent left the range of 16 bits: start lower
    for name, g in fallback(network, state, x, plan).items():
        found[name] = Dense(g if differentiable else g.detach())
    wide = state[network.train[0]].dtype
    for k in network.train[1:]:
        wide = torch.promote_types(wide, state[k].dtype)
    return {k: found[k] if half else blocks.cast(found[k], wide) for k in network.train if k in found}


def by_rules(
    network: Network,
    state: Params,
    x: Inputs,
    plan: Plan,
    *,
    differentiable: bool = False,
    half: bool = False,
    seed: float = 1.0,
    exact: bool = False,
) -> dict[str, Block]:
    """The blocks of the parameters that are not in the fallback."""
    out, recorder = record(network, state, x, plan, differentiable=differentiable, half=half)
    check_outputs(out)
    recorder.check_unchanged()
    if set(recorder.unexplained) - plan.fallback.keys():
        raise NoRule(set(recorder.unexplained) - plan.fallback.keys())
    measure = recorder.routes or recorder.calls in plan.measured
    if not measure and recorder.calls != plan.calls:
        raise Unfamiliar(recorder.calls)
    if measure:
        _check_alone(network, state, x, out, plan)
    uses: dict[int, tuple[Weight, list[Block]]] = {}
    with network.modes(differentiable=differentiable, exact=exact), torch.set_grad_enabled(differentiable):
        gathered = collect(out, recorder, plan.layouts, differentiable=differentiable, measure=measure, seed=seed)
        for weight, block in gathered:
            uses.setdefault(id(weight), (weight, []))[1].append(block)
        found = _to_parameters(uses, recorder, differentiable)
    joined = {k: blocks.add(bs) for k, bs in found.items()}
    new = {k: b for k, b in joined.items() if k not in plan.rules}
    if new:
        _check_new(network, state, x, new, plan)
        plan.rules.update({k: tap.rule.name for tap in recorder.taps for k in tap.names if k in new})
    for weight_name, bias in _companions(recorder.taps).items():
        factored = joined.get(weight_name)
        if isinstance(factored, Outer) and bias in joined:
            joined[weight_name] = replace(factored, bias=bias)
    return joined


def record(
    network: Network,
    state: Params,
    x: Inputs,
    plan: Plan,
    *,
    differentiable: bool,
    half: bool,
    keep_outputs: bool = False,
) -> tuple[Tensor, Recorder]:
    """One forward pass, and what was recorded of it."""
    tracked = network.leaves(state, [k for k in network.train if k not in plan.fallback])
    recorder = Recorder(tracked, tree.size(x), plan.copies, keep_outputs, half, plan.shield, seen=network.seen)
    # The forward pass keeps its 32 bits in every precision. Rounded to 16, a few ReLUs in a thousand open that should
    # stay shut: cosines are then wrong by 1e-3, a hundred times what rounding the factors costs (docs/design.md).
    with network.modes(differentiable=differentiable, exact=True), torch.enable_grad():
        out = network({**state, **tracked}, private(x) if plan.private else x, recorder)
    return out, recorder


def private(x: Inputs) -> Inputs:
    """A copy that a model may write to."""
    return tree.transform(lambda v: v.clone(), x)


def _to_parameters(
    uses: dict[int, tuple[Weight, list[Block]]], recorder: Recorder, differentiable: bool
) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for key in list(uses):
        weight, parts = uses.pop(key)
        if weight.name is None and weight.slot is None and not weight.value.requires_grad:
            continue  # made without a graph (torch.no_grad in the model)
        for name, block in pull_back(weight, blocks.add(parts), recorder.weights.leaves, differentiable):
            found.setdefault(name, []).append(block)
    return found


def _check_alone(network: Network, state: Params, x: Inputs, out: Tensor, plan: Plan) -> None:
    """Where data decide the way, a sample's way must not depend on the others (experts with a capacity, say)."""
    last = len(out) - 1
    if last == 0:
        return
    with torch.enable_grad(), network.modes(exact=True):  # hooks on activations want a graph
        one = tree.take(x, slice(last, last + 1))
        alone = network({**state, **network.leaves(state, network.train)}, private(one))[0].detach()
    check_independent(out[last].detach(), alone, plan.narrowest)


def check_independent(together: Tensor, alone: Tensor, dtype: torch.dtype) -> None:
    if not close(together, alone, dtype):
        gap = float((together - alone).abs().max())
        raise ModelError(
            f"a sample's output depends on the other samples of the batch (it differs by {gap:.2g} together and "
            "alone), so no kernel of pairs exists. Remove what mixes them (batch statistics, softmax or sorting over "
            "the batch dimension, experts with a capacity), or call model.eval()."
        )


def close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors agree up to rounding, in a computation whose fewest bits are those of `dtype`."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = max(float(b.abs().max()), 1e-30) if b.numel() else 1.0
    bound = max(CLOSE.get(a.dtype, 2e-4), CLOSE.get(dtype, 2e-4))
    return bool(((a - b).abs().nan_to_num(0.0) <= bound * scale).all())


def _check_new(network: Network, state: Params, x: Inputs, found: Mapping[str, Block], plan: Plan) -> None:
    """Parameters that the probe's samples did not reach: Σ_i s_i vᵀJ_i of this batch, by autograd and by the blocks."""
    own = network.leaves(state, network.train)
    n, c = tree.size(x), plan.c
    v, s = torch.cos(torch.arange(1.0, c + 1)), torch.sin(torch.arange(1.0, n + 1))
    with torch.enable_grad(), network.modes(exact=True), Plainly(plan.shield):
        out = network({**state, **own}, private(x))
        total = (out * s.to(out)[:, None] * v.to(out)).sum()
        grads = torch.autograd.grad(total, list(own.values()), allow_unused=True)
    wanted = {k: dense(g, torch.zeros_like(p)).flatten() for (k, p), g in zip(own.items(), grads, strict=True)}
    scale = sum(float(g.double().square().sum()) for g in wanted.values()) ** 0.5
    wrong = []
    for name, block in found.items():
        want = wanted[name]
        got = torch.einsum("ncp,n,c->p", block.expand().to(want), s.to(want), v.to(want))
        bound = max(FITS.get(want.dtype, 2e-3), FITS.get(plan.narrowest, 2e-3))
        if not float((got - want).norm()) <= 10 * bound * (float(want.norm()) + 1e-3 * scale):
            wrong.append(name)
    if wrong:
        raise NoRule(wrong)


def _companions(taps: list[Tap]) -> dict[str, str]:
    """Weights and biases that are only ever used together, by rules that sum the very same factors for the bias."""
    pairs = {(_name(tap.weight), _name(tap.bias)) for tap in taps}
    weights, biases = [w for w, _ in pairs], [b for _, b in pairs]
    made_of = {k for tap in taps for w in (tap.weight, tap.bias) if w is not None and w.name is None for k in w.sources}
    unlike = {_name(tap.weight) for tap in taps if not tap.rule.summed} | made_of
    return {
        w: b
        for w, b in pairs
        if w and b and weights.count(w) == biases.count(b) == 1 and b not in weights and w not in biases
        if w not in unlike and b not in made_of
    }


def _name(weight: Weight | None) -> str | None:
    return None if weight is None else weight.name


def _halved(block: Block, seed: float) -> tuple[Block, Tensor]:
    """A block with 16-bit factors and the largest cotangent in it.

    The activations are scaled per sample by a power of two such that no sum of t products can overflow; the cotangents
    were put into range by `seed` before the backward pass. Small sums stay in 32 bits.
    """
    if isinstance(block, Dense):
        return Dense(block.g.float() / seed), torch.linalg.vector_norm(block.g, torch.inf).float()
    if isinstance(block, Mixed):
        each = [_halved(b, seed) for b in block.blocks]
        return Mixed(tuple(b for b, _ in each)), torch.stack([top for _, top in each]).max()
    assert isinstance(block, Outer)
    largest = _largest([u.d for u in block.uses])
    scale = torch.full_like(largest, 1 / seed)
    if block.indexed:
        uses = tuple(Use(u.lift, u.x, u.d.half()) for u in block.uses)
        return replace(block, uses=uses, scale=scale), largest.max()
    on_a = _largest([u.x for u in block.uses])
    # Where the cotangents are tiny, what limits the factor is that the activations themselves must not overflow.
    factor = torch.minimum(_power(2.0**15 / block.sizes()[0], largest * on_a), _power(2.0**15, on_a))
    uses = tuple(Use(u.lift, (u.x * factor.view(-1, *[1] * (u.x.dim() - 1))).half(), u.d.half()) for u in block.uses)
    return replace(block, uses=uses, scale=scale / factor), largest.max()


def _largest(parts: list[Tensor]) -> Tensor:
    """The largest absolute entry per sample: [n]."""
    each = [torch.linalg.vector_norm(v, torch.inf, tuple(range(1, v.dim()))).float() for v in parts]
    return torch.stack(each).amax(0)


def _power(room: float, largest: Tensor) -> Tensor:
    """The largest power of two that keeps `largest` below `room`."""
    safe = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return torch.exp2(torch.floor(torch.log2(room / safe)).clamp(-100, 100))


class Plainly(TorchFunctionMode):
    """Derivatives of the function itself: those of embeddings are not sparse, nor scaled by how often rows occur.

    `shield` saves tensors for the backward pass even where the model would compute them again (checkpoints): by then
    its own parameters are back in their place.
    """

    def __init__(self, shield: bool = False) -> None:
        super().__init__()
        self.shield = shield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.shield:
            with saved_tensors_hooks(lambda v: v, lambda v: v):
                return self._plainly(func, args, kwargs)
        return self._plainly(func, args, kwargs)

    def _plainly(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in (F.embedding, F.embedding_bag):
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.arguments |= {"scale_grad_by_freq": False, "sparse": False}
            return func(*bound.args, **bound.kwargs)
        return func(*args, **(kwargs or {}))


def fallback(network: Network, state: Params, x: Inputs, plan: Plan) -> dict[str, Tensor]:
    """[n, c, p] for the parameters without a rule, by torch.func; those that it cannot do, sample by sample."""
    mapped = [k for k in plan.fallback if k not in plan.looped]
    looped, company = [k for k in plan.fallback if k in plan.looped], plan.company
    found: dict[str, Tensor] = {}
    try:
        found = jacobian_vmap(network, state, x, mapped, plan.transient) if mapped else {}
    except (RuntimeError, NotImplementedError) as e:
        if isinstance(e, torch.OutOfMemoryError):
            raise
        looped, company = list(plan.fallback), True  # what torch.func could do for two samples it cannot do here
    if looped:
        found |= jacobian_loop(network, state, x, looped, company=company, shield=plan.shield)
    return found


def jacobian_vmap(network: Network, state: Params, x: Inputs, names: Sequence[str], sample: int) -> dict[str, Tensor]:
    """[n, c, p] by torch.func: vmap over samples (in chunks) of one pullback per output.

    Not vmap(jacrev): two nested vmaps run into wrong batching rules (torch 2.13: PReLU's weight, silently, at n = c).
    `sample`: bytes that one sample takes.
    """
    chosen = {k: state[k] for k in names}
    rest = {k: v for k, v in state.items() if k not in chosen}

    def one_sample(*values: Tensor) -> Any:
        batch = tree.rebuild(x, (v[None].clone() for v in values))
        out, pullback, *_ = vjp(lambda p: network({**rest, **p}, batch)[0], chosen)
        rows = [pullback(e)[0] for e in torch.eye(len(out), dtype=out.dtype, device=out.device)]
        return {k: torch.stack([row[k] for row in rows]) for k in chosen}

    size = 4 * sample + 16 * sum(v.numel() for v in chosen.values())
    chunk = max(1, min(tree.size(x), BATCH_ON_CPU // size))
    with network.modes(differentiable=True, exact=True), Plainly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # said by our own warning
        found = vmap(one_sample, chunk_size=chunk)(*(v for _, v in tree.leaves(x)))
    return {k: g.reshape(*g.shape[:2], -1) for k, g in found.items()}


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
        own = network.leaves(state, names)
        f = within.enter_context(network.at({**state, **own}))
        for i in range(n):
            batch = tree.take(x, torch.tensor([i, (i + 1) % n]) if company else slice(i, i + 1))
            out = f(private(batch))[0]
            each: dict[str, list[Tensor]] = {k: [] for k in names}
            for j in range(len(out)):
                grads: Sequence[Tensor | None] = [None] * len(own)
                if out.requires_grad:
                    grads = torch.autograd.grad(
                        out[j], list(own.values()), retain_graph=True, create_graph=create, allow_unused=True
                    )
                for (k, p), g in zip(own.items(), grads, strict=True):
                    each[k].append(dense(g, torch.zeros_like(p)).flatten())
            for k, gs in each.items():
                rows[k].append(torch.stack(gs))
    return {k: torch.stack(v) for k, v in rows.items()}


def check_outputs(out: Tensor) -> None:
    good = out.detach().isfinite().all(1)
    if not bool(good.all()):
        sample = int((~good).nonzero()[0])
        raise NonFiniteError(
            f"the model's output for sample {sample} is not finite. Check that input and the parameters "
            "(torch.isfinite), or use a wider dtype.",
            sample,
            "output",
        )
