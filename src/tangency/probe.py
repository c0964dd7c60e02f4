"""Before the first use: two samples through the model, compared with plain autograd.

Found out here: whether the model is a deterministic function of one sample; in which dimension of every layer's
tensors the samples lie; which parameters no rule covers, or are covered wrongly; how much memory a sample takes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from . import _tree
from ._types import Inputs, Params
from .blocks import Block, Outer, saved_by_forming
from .capture import Layout, Recorder, Tap
from .errors import ModelError
from .jacobian import Plan, capture
from .network import Network
from .rules import NoRule

# How far two runs of the same arithmetic may be apart, relative to the largest entry: rounding, not error.
_CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}
# How far a rule's gradient may be from autograd's, relative to its norm, before it counts as not fitting.
_FITS = {torch.float64: 1e-8, torch.float32: 2e-3}


def probe(network: Network, x: Inputs) -> tuple[Plan, bool]:
    """The plan for inputs like x, and whether two different samples were there to be certain of it."""
    x = _tree.transform(lambda v: v.detach(), x)
    pair, certain = _two_samples(x)
    state = network.state()
    first, second = (_tree.take(pair, slice(k, k + 1)) for k in range(2))
    with network.modes(exact=True):
        alone = [_record(network, state, one) for one in (first, second)]
        both, again = _record(network, state, pair), _record(network, state, pair)
    _deterministic(both[0], again[0])
    if certain:
        _independent(both[0], torch.cat([alone[0][0], alone[1][0]]))
    fallback = {k: f"used by {why}" for k, why in both[1].unexplained.items()}
    layouts: dict[tuple[str, int], Layout] = {}
    singles = [{tap.key: tap for tap in run.taps} for _, run in alone]
    for tap in both[1].taps:
        layout = _layout(tap, singles[0].get(tap.key), singles[1].get(tap.key))
        if layout is None:
            fallback |= {k: "the samples are not found in its tensors" for k in tap.names if k not in fallback}
        else:
            layouts[tap.key] = layout
    rules = {k: tap.rule.name for tap in both[1].taps for k in tap.names}
    plan = Plan(layouts, fallback, frozenset(), rules, both[0].shape[1], 1, 1)
    return _verified(network, state, pair, plan), certain


def _two_samples(x: Inputs) -> tuple[Inputs, bool]:
    """The first sample and one that differs from it; the first one twice where there is none."""
    n = _tree.size(x)
    for other in range(1, min(n, 64)):
        if any(not torch.equal(v[0], v[other]) for _, v in _tree.leaves(x)):
            return _tree.transform(lambda v, k=other: v[[0, k]], x), True  # type: ignore[misc]
    return _tree.transform(lambda v: v[[0, 0]], x), False


def _record(network: Network, state: Params, x: Inputs) -> tuple[Tensor, Recorder]:
    names = {id(state[k]): k for k in network.train}
    recorder = Recorder(names, _tree.size(x), keep_outputs=True)
    with torch.enable_grad(), recorder:
        out = network(state, x)
    recorder.check_unchanged()
    return out.detach(), recorder


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = max(float(b.abs().max()), 1e-30) if b.numel() else 1.0
    return bool(((a - b).abs().nan_to_num(0.0) <= _CLOSE.get(a.dtype, 2e-4) * scale).all())


def _deterministic(one: Tensor, two: Tensor) -> None:
    if not _close(one, two):
        raise ModelError(
            "the model gives different outputs for the same inputs, so it has no kernel. Turn its randomness off "
            "(model.eval(), or a fixed generator inside forward)."
        )


def _independent(together: Tensor, alone: Tensor) -> None:
    if not _close(together, alone):
        gap = float((together - alone).abs().max())
        raise ModelError(
            f"a sample's output depends on the other samples of the batch (two samples together and alone differ by "
            f"{gap:.2g}), so no kernel of pairs exists. Remove what mixes them (batch statistics, softmax or sorting "
            "over the batch dimension), or call model.eval()."
        )


def _layout(tap: Tap, first: Tap | None, second: Tap | None) -> Layout | None:
    """The dimension in which the samples lie: it doubles with the batch, and its halves are the two samples'."""
    if first is None or second is None or first.output is None or second.output is None or tap.output is None:
        return None
    both, one, two = tap.output, first.output, second.output
    if both.dim() != one.dim():
        return None
    grown = [k for k in range(both.dim()) if both.shape[k] != one.shape[k]]
    if not grown:
        return Layout(None) if _close(both, one) else None
    if len(grown) > 1 or both.shape[grown[0]] != 2 * one.shape[grown[0]]:
        return None
    (dim,), size = grown, one.shape[grown[0]]
    if _close(both.narrow(dim, 0, size), one) and _close(both.narrow(dim, size, size), two):
        return Layout(dim, size)
    alternate = both.unflatten(dim, (size, 2))
    if _close(alternate.select(dim + 1, 0), one) and _close(alternate.select(dim + 1, 1), two):
        return Layout(dim, size, major=False)
    return None


def _verified(network: Network, state: Params, pair: Inputs, plan: Plan) -> Plan:
    """The plan after a comparison of Jᵀv with autograd: what differs goes to the fallback."""
    v = torch.cos(torch.arange(1.0, plan.c + 1))
    expected, unused = _reference(network, state, pair, v)
    scale = float(sum(g.square().sum() for g in expected.values()) ** 0.5)
    if scale == 0 and len(unused) == len(network.train):
        raise ModelError(
            "the outputs do not depend on any of the parameters that count, so the kernel is zero. Check train=, "
            "torch.no_grad() and .detach() in the model."
        )
    try:
        found, transient = _measured(network, state, pair, plan)
    except NoRule as e:
        return _verified(network, state, pair, plan.without(e.names, "its rule does not fit"))
    except RuntimeError:
        # A layer that was called once for the whole batch could not be given a copy per sample.
        shared = {name for (name, _), layout in plan.layouts.items() if layout.dim is None} - set(plan.fallback)
        if not shared:
            raise
        return _verified(network, state, pair, plan.without(shared, "called once for the whole batch"))
    wrong = _disagree(found, expected, unused, v)
    if wrong and not _only_rounding(network, pair, plan, v):
        looped = plan.looped | {k for k in wrong if k in plan.fallback}  # torch.func's own batching can be wrong
        again = replace(plan, fallback=wrong | plan.fallback, looped=looped)
        if again == plan:
            raise ModelError(
                f"two ways to take the gradient of {', '.join(wrong)} by autograd disagree: the model is not a "
                "deterministic function of one sample."
            )
        return _verified(network, state, pair, again)
    kept = sum(b.nbytes for b in found.values()) // 2
    top = max((float(t.abs().max()) for b in found.values() for t in b.tensors()[1::2]), default=1.0)
    seed = 2.0 ** round(8 - float(torch.log2(torch.tensor(max(top, 1e-30)))))  # room for 256 times larger ones
    half = 2 if network.precision == "float16" else 1
    factored = {k: b for k, b in found.items() if isinstance(b, Outer) and not b.indexed}
    return replace(
        plan,
        kept=max(kept // half, 1),
        transient=max(transient, 1),  # both passes keep 32 bits
        saved={k: saved_by_forming(b) // half for k, b in factored.items() if saved_by_forming(b) > 0},
        seed=min(max(seed, 2.0**-14), 2.0**14),
    )


def _disagree(
    found: Mapping[str, Block], expected: Mapping[str, Tensor], unused: tuple[str, ...], v: Tensor
) -> dict[str, str]:
    """The parameters whose blocks are not what autograd says."""
    scale = float(sum(g.square().sum() for g in expected.values()) ** 0.5)
    tolerance = _FITS.get(next(iter(expected.values())).dtype, 2e-3)
    wrong = {}
    for name, want in expected.items():
        if name in unused:
            continue
        block = found.get(name)
        got = torch.zeros_like(want) if block is None else torch.einsum("ncp,c->np", block.expand(), v.to(want))
        if float((got - want).norm()) > tolerance * (float(want.norm()) + 1e-3 * scale):
            wrong[name] = "its rule disagrees with autograd"
    return wrong


def _only_rounding(network: Network, pair: Inputs, plan: Plan, v: Tensor) -> bool:
    """Whether the plan fits in float64. In fewer bits a ReLU whose input is almost 0 may open for a batch of two and
    stay shut for one sample, which no tolerance covers."""
    if next(iter(network.state().values())).dtype == torch.float64:
        return False
    exact = replace(network, precision="float64")
    try:
        state, wide = exact.state(), _tree.cast(pair, torch.float64)
        expected, unused = _reference(exact, state, wide, v)
        return not _disagree(capture(exact, state, wide, plan, exact=True), expected, unused, v)
    except (RuntimeError, TypeError, NoRule):  # a model that insists on its own type
        return False


def _reference(network: Network, state: Params, pair: Inputs, v: Tensor) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Jᵀv per sample by autograd [2, p], and the parameters that the outputs do not depend on."""
    own = {k: state[k].detach().requires_grad_() for k in network.train}
    rows: dict[str, list[Tensor]] = {k: [] for k in own}
    reached: set[str] = set()
    with torch.enable_grad(), network.modes(exact=True):
        for one in _tree.split(pair, 1):
            out = network({**state, **own}, one)[0]
            grads: Iterable[Any] = [None] * len(own)
            if out.requires_grad:
                grads = torch.autograd.grad(out @ v.to(out), list(own.values()), allow_unused=True)
            for (k, p), g in zip(own.items(), grads, strict=True):
                if g is not None:
                    reached.add(k)
                rows[k].append((torch.zeros_like(p) if g is None else g).flatten())
    return {k: torch.stack(r) for k, r in rows.items()}, tuple(k for k in own if k not in reached)


def _measured(network: Network, state: Params, pair: Inputs, plan: Plan) -> tuple[dict[str, Any], int]:
    """The blocks of the two samples, and the bytes per sample that autograd kept to make them."""
    saved: dict[int, int] = {}

    def pack(v: Tensor) -> Tensor:
        saved[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    own = {v.untyped_storage().data_ptr() for v in state.values()}
    with saved_tensors_hooks(pack, lambda v: v):
        found = capture(network, state, pair, plan, exact=True)
    total = sum(size for place, size in saved.items() if place not in own)
    # Besides what is saved: the outputs of the layer at work, and one set of cotangents on its way (heuristic).
    return found, total + sum(t.numel() * t.element_size() for b in found.values() for t in b.tensors()) // plan.c
