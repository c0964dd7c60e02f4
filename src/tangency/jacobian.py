"""The Jacobian of one micro-batch: a block per parameter, by its rule, or by torch.func where no rule fits."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from . import _tree, blocks
from ._types import Inputs, Params
from .blocks import Block, Dense, Mixed, Outer, Use
from .capture import Layout, Recorder, Tap, collect
from .errors import NonFiniteError
from .network import Network

# Bytes that one micro-batch may take on a CPU when nobody says otherwise (heuristic).
CAPTURE = 1 << 28


@dataclass(frozen=True)
class Plan:
    """What the probe found out about a model on one kind of input."""

    layouts: dict[tuple[str, int], Layout]
    fallback: dict[str, str]  # parameter → why no rule covers it
    looped: frozenset[str]  # of these, the ones that torch.func gets wrong: plain autograd, sample by sample
    rules: dict[str, str]  # parameter → the rule that covers it
    c: int
    kept: int  # bytes per sample that the blocks take
    transient: int  # bytes per sample that a forward and a backward pass take besides
    saved: dict[str, int] = field(default_factory=dict)  # parameter → bytes per sample less if its gradients are formed
    seed: float = 1.0  # factor on the cotangents of a float16 pass

    def without(self, names: Iterable[str], why: str) -> "Plan":
        """The plan with these parameters in the fallback."""
        layouts = {key: layout for key, layout in self.layouts.items() if key[0] not in names}
        return replace(self, layouts=layouts, fallback=self.fallback | dict.fromkeys(names, why))


def capture(
    network: Network, state: Params, x: Inputs, plan: Plan, *, differentiable: bool = False, exact: bool = False
) -> dict[str, Block]:
    """The blocks of one micro-batch. `exact` keeps 32 bits where the precision asks for 16."""
    half = network.precision == "float16" and not exact and not differentiable
    seed = plan.seed if half else 1.0
    while True:
        found = _by_rules(network, state, x, plan, differentiable, half, seed, exact)
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
    return {k: found[k] for k in network.train if k in found}


def _by_rules(
    network: Network, state: Params, x: Inputs, plan: Plan, differentiable: bool, half: bool, seed: float, exact: bool
) -> dict[str, Block]:
    tracked = {id(state[k]): k for k in network.train if k not in plan.fallback}
    recorder = Recorder(tracked, _tree.size(x), plan.layouts, half=half)
    found: dict[str, list[Block]] = {}
    # The forward pass keeps its 32 bits in every precision. Rounded to 16, a few ReLUs in a thousand open that should
    # stay shut: cosines are then wrong by 1e-3, a hundred times what rounding the factors costs (docs/design.md).
    with network.modes(differentiable=differentiable, exact=True), torch.enable_grad(), recorder:
        out = network(state, x)
    _check_outputs(out)
    recorder.check_unchanged()
    recorder.check_known(plan.fallback)
    taps = [tap for tap in recorder.taps if all(k not in plan.fallback for k in tap.names)]
    with network.modes(differentiable=differentiable, exact=exact), torch.set_grad_enabled(differentiable):
        for name, block in collect(out, recorder, taps, differentiable=differentiable, seed=seed):
            found.setdefault(name, []).append(block)
    joined = {k: blocks.add(bs) for k, bs in found.items()}
    for weight, bias in _companions(recorder.taps).items():
        factored = joined.get(weight)
        if isinstance(factored, Outer) and bias in joined:
            joined[weight] = replace(factored, bias=bias)
    return joined


def _companions(taps: list[Tap]) -> dict[str, str]:
    """Weights and biases that are only ever used together."""
    pairs = {(tap.weight, tap.bias) for tap in taps}
    weights, biases = [w for w, _ in pairs], [b for _, b in pairs]
    good = {w: b for w, b in pairs if w and b and weights.count(w) == biases.count(b) == 1}
    return {w: b for w, b in good.items() if all(tap.rule.summed for tap in taps if tap.weight == w)}


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


def fallback(network: Network, state: Params, x: Inputs, plan: Plan) -> dict[str, Tensor]:
    """[n, c, p] for the parameters without a rule, by torch.func; where that cannot run, sample by sample."""
    found: dict[str, Tensor] = {}
    looped = set(plan.looped)
    mapped = [k for k in plan.fallback if k not in looped]
    if mapped:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # said by our own warning
                found = jacobian_vmap(network, state, x, mapped, plan.transient)
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            looped |= set(mapped)
    if looped:
        found |= jacobian_loop(network, state, x, [k for k in plan.fallback if k in looped])
    return found


def jacobian_vmap(network: Network, state: Params, x: Inputs, names: Sequence[str], sample: int) -> dict[str, Tensor]:
    """[n, c, p] by torch.func: vmap over samples (in chunks) of one pullback per output.

    Not vmap(jacrev): two nested vmaps run into wrong batching rules (torch 2.13: PReLU's weight, silently, at n = c).
    `sample`: bytes that one sample takes.
    """
    chosen = {k: state[k] for k in names}
    rest = {k: v for k, v in state.items() if k not in chosen}
    args, kwargs = _tree.arguments(x)

    def one_sample(args: Any, kwargs: Any) -> Any:
        one: Inputs = kwargs if kwargs else (args[0] if isinstance(x, Tensor) else args)
        batch = _tree.transform(lambda v: v[None], one)
        out, pullback, *_ = vjp(lambda p: network({**rest, **p}, batch)[0], chosen)
        rows = [pullback(e)[0] for e in torch.eye(len(out), dtype=out.dtype, device=out.device)]
        return {k: torch.stack([row[k] for row in rows]) for k in chosen}

    size = 4 * sample + 16 * sum(v.numel() for v in chosen.values())
    chunk = max(1, min(_tree.size(x), CAPTURE // size))
    with network.modes(differentiable=True, exact=True):
        found = vmap(one_sample, chunk_size=chunk)(args, kwargs)
    return {k: g.reshape(*g.shape[:2], -1) for k, g in found.items()}


def jacobian_loop(network: Network, state: Params, x: Inputs, names: Sequence[str]) -> dict[str, Tensor]:
    """[n, c, p] by plain autograd, one sample and one output at a time. The obvious reference, and the last resort."""
    create = _tree.needs_grad(x)
    rows: dict[str, list[Tensor]] = {k: [] for k in names}
    with torch.enable_grad(), network.modes(differentiable=create, exact=True):
        own = {k: state[k].detach().requires_grad_() for k in names}
        for one in _tree.split(x, 1):
            out = network({**state, **own}, one)[0]
            each: dict[str, list[Tensor]] = {k: [] for k in names}
            for j in range(len(out)):
                grads: Sequence[Tensor | None] = (
                    torch.autograd.grad(
                        out[j], list(own.values()), retain_graph=True, create_graph=create, allow_unused=True
                    )
                    if out.requires_grad
                    else [None] * len(own)
                )
                for (k, p), g in zip(own.items(), grads, strict=True):
                    each[k].append((torch.zeros_like(p) if g is None else g).flatten())
            for k, gs in each.items():
                rows[k].append(torch.stack(gs))
    return {k: torch.stack(v) for k, v in rows.items()}


def _check_outputs(out: Tensor) -> None:
    good = out.detach().isfinite().all(1)
    if not bool(good.all()):
        sample = int((~good).nonzero()[0])
        raise NonFiniteError(
            f"the model's output for sample {sample} is not finite. Check that input and the parameters "
            "(torch.isfinite), or use a wider dtype.",
            sample,
            "output",
        )
