"""Before the first use: two samples through the model, compared with plain autograd.

Found out here: whether the model is a deterministic function of one sample, and changes nothing that is not its own; in
which dimension of every layer's tensors the samples lie; which parameters no rule covers, or are covered wrongly; how
much memory a sample takes. The reference is autograd on both samples together: for one sample alone torch's own batch
norm is wrong in some layouts.
"""

import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from .. import errors
from .._base import tree
from .._base.types import Inputs, Params
from ..errors import ModelError, NonFiniteError
from .blocks import Block, Dense, Outer, saved_by_forming
from .examine import check_kept, examine
from .jacobian import (
    FITS,
    Plainly,
    Plan,
    Unfamiliar,
    by_rules,
    check_independent,
    check_outputs,
    close,
    jacobian_loop,
    jacobian_vmap,
    private,
    record,
)
from .layout import Layout
from .network import Network
from .recorder import Key, Recorder, Tap
from .rules import NoRule
from .weights import dense

# So many roundings a number may differ by that others cancelled in (heuristic; sums of some million terms).
ROUNDINGS = 1000
# By so much at least a difference that is rounding shrinks from float32 to float64 (heuristic; ε shrinks by 2e-9).
SHRINKS = 1e-6


def probe(network: Network, x: Inputs) -> tuple[Plan, bool]:
    """The plan for inputs like x, and whether two different samples were there to be certain of it."""
    x = tree.transform(lambda v: v.detach(), x)
    pair, second_one = _two_samples(x)
    certain = second_one > 0
    first, second = (tree.take(pair, slice(k, k + 1)) for k in range(2))
    writes = examine(network, pair)
    state = network.state()
    plan = Plan({}, {}, {}, {}, 1, 0, torch.float64, private=writes)
    try:
        runs = _Runs.of(network, state, plan, pair, first, second)
    except (RuntimeError, NotImplementedError) as e:
        if isinstance(e, torch.OutOfMemoryError) or not _from_torch(e):
            raise
        # The model runs, as was just seen, but not while it is recorded: a torch.func or autograd of its own inside.
        return _unrecorded(network, state, plan, pair), certain
    if runs.alone[0].unknown or runs.both.unknown:  # tensors that the model keeps somewhere are known from now on
        runs = _Runs.of(network, state, plan, pair, first, second)
    if copies := runs.copies():
        runs = _Runs.of(network, state, replace(plan, copies=copies), pair, first, second)
    narrowest = runs.both.narrowest
    try:
        check_outputs(runs.out)
    except NonFiniteError as e:
        raise e.shifted(second_one - 1 if e.sample == 1 else 0) from None
    if not close(runs.out, runs.again, narrowest) and not _only_rounded(network, pair, runs.out, runs.again, _again):
        raise ModelError(
            "the model gives different outputs for the same inputs, so it has no kernel. Turn its randomness off "
            "(model.eval(), or a fixed generator inside forward)."
        )
    alone = torch.cat(runs.outs_alone)
    if certain and not close(runs.out, alone, narrowest) and not _only_rounded(network, pair, runs.out, alone, _alone):
        check_independent(runs.out, alone, narrowest)
    layouts, complete = runs.layouts()
    fallback = {k: f"used by {why}" for k, why in runs.both.unexplained.items()}
    plan = replace(
        plan,
        layouts=layouts,
        copies=copies,
        fallback=fallback,
        rules={k: tap.rule.name for tap in runs.both.taps for k in tap.names},
        c=runs.out.shape[1],
        calls=runs.both.calls,
        narrowest=narrowest,
        shield=runs.both.recomputes,
        measured=set() if complete else {runs.both.calls},
    )
    size = float(runs.out.norm())
    return _verified(network, state, pair, plan, runs.bytes_saved, size, runs.both.routes), certain


Rerun = Callable[[Callable[[Inputs], Tensor], Inputs], Tensor]


def _again(run: Callable[[Inputs], Tensor], pair: Inputs) -> Tensor:
    return run(pair)


def _alone(run: Callable[[Inputs], Tensor], pair: Inputs) -> Tensor:
    return torch.cat([run(tree.take(pair, slice(k, k + 1))) for k in range(2)])


def _only_rounded(network: Network, pair: Inputs, out: Tensor, other: Tensor, rerun: Rerun) -> bool:
    """Whether the outputs of two samples and those of another run differ by rounding and nothing else.

    A head may leave next to nothing of large outputs (logits that sum to 0), and then what is left is rounding. In
    float64 that shrinks with ε, and what a model really makes of the other samples does not. In float64 itself, it is
    what some roundings of the outputs before the head amount to.
    """
    if out.shape != other.shape:
        return False
    exact = replace(network, precision="float64")

    def run(x: Inputs) -> Tensor:
        with torch.enable_grad(), exact.modes(exact=True):  # hooks on activations want a graph
            return exact(exact.state(), private(x)).detach()

    try:
        wide = tree.cast(pair, torch.float64)
        apart = float((run(wide) - rerun(run, wide)).abs().max())
        if not _in_float64(network):
            return apart <= SHRINKS * float((out - other).abs().max())
        return network.head is not None and apart <= ROUNDINGS * torch.finfo(out.dtype).eps * _height(network, pair)
    except (RuntimeError, TypeError, NotImplementedError):  # a model that insists on its own type
        return False


def _height(network: Network, pair: Inputs) -> float:
    """The largest output before the head."""
    plain, inputs = network.without_head(pair)
    with torch.enable_grad(), network.modes(exact=True):
        return float(plain(plain.state(), private(inputs)).detach().abs().max())


def _in_float64(network: Network) -> bool:
    return next(iter(network.state().values())).dtype == torch.float64


def _from_torch(e: BaseException) -> bool:
    """Whether it was raised by torch or by us, not by the model's own code."""
    last = traceback.extract_tb(e.__traceback__)[-1].filename
    return any(last.startswith(str(Path(module.__file__ or "").parent)) for module in (torch, errors))


def _unrecorded(network: Network, state: Params, plan: Plan, pair: Inputs) -> Plan:
    """A plan without rules."""
    with torch.enable_grad(), network.modes(exact=True):  # it may take gradients itself
        out = network({**state, **network.leaves(state, network.train)}, private(pair)).detach()
    why = dict.fromkeys(network.train, "its model cannot be recorded")
    plan = replace(plan, fallback=why, c=out.shape[1], narrowest=out.dtype)
    check_outputs(out)
    return _verified(network, state, pair, plan, 1 << 20, float(out.norm()))


def _two_samples(x: Inputs) -> tuple[Inputs, int]:
    """The first sample and one that differs from it, and which; the first one twice (0) where there is none."""
    n = tree.size(x)
    for other in range(1, min(n, 64)):
        if any(not torch.equal(v[0], v[other]) for _, v in tree.leaves(x)):
            return tree.transform(lambda v, k=other: v[[0, k]], x), other  # type: ignore[misc]
    return tree.transform(lambda v: v[[0, 0]], x), 0


@dataclass
class _Runs:
    """Both samples together, twice, and each alone."""

    out: Tensor
    again: Tensor
    outs_alone: list[Tensor]
    both: Recorder
    alone: list[Recorder]
    bytes_saved: int

    @staticmethod
    def of(network: Network, state: Params, plan: Plan, pair: Inputs, *singles: Inputs) -> "_Runs":
        def run(x: Inputs) -> tuple[Tensor, Recorder]:
            out, recorder = record(network, state, x, plan, differentiable=False, half=False, keep_outputs=True)
            recorder.check_unchanged()
            return out.detach(), recorder

        alone = [run(one) for one in singles]
        out, both = run(pair)
        saved: dict[int, int] = {}

        def pack(v: Tensor) -> Tensor:
            if v.layout == torch.strided:
                saved[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
            return v

        own = {v.untyped_storage().data_ptr() for v in state.values()}
        try:
            with saved_tensors_hooks(pack, lambda v: v):
                again = run(pair)[0]
        except RuntimeError:  # torch.func inside of the model does not go with such hooks
            again = run(pair)[0]
            saved = {
                id(tap): 4 * tap.output.numel() * tap.output.element_size()
                for tap in both.taps
                if tap.output is not None
            }
        size = sum(size for place, size in saved.items() if place not in own)
        return _Runs(out, again, [o for o, _ in alone], both, [r for _, r in alone], size)

    def copies(self) -> dict[Hashable, Layout]:
        """Weights that grow with the batch: they hold a copy for every sample."""
        found = {}
        for key, value in self.both.made.items():
            one = self.alone[0].made.get(key)
            if one is not None and one.shape != value.shape:
                layout = _layout(value, one, one, self.both.narrowest)
                if layout is not None:
                    found[key] = layout
        return found

    def layouts(self) -> tuple[dict[Key, Layout], bool]:
        """Where the samples lie in each use's tensors, and whether that was found for all of them."""
        found, complete = dict[Key, Layout](), True
        singles = [{tap.key: tap for tap in r.taps} for r in self.alone]
        for tap in self.both.taps:
            layout = self._found(tap, *(s.get(tap.key) for s in singles))
            if layout is not None:
                found[tap.key] = layout
            else:
                complete = False  # the rows are traced to their samples in every batch
        return found, complete

    def _found(self, tap: Tap, first: Tap | None, second: Tap | None) -> Layout | None:
        if first is None or second is None or first.output is None or second.output is None or tap.output is None:
            return None
        return _layout(tap.output, first.output, second.output, self.both.narrowest)


def _layout(both: Tensor, one: Tensor, two: Tensor, narrowest: torch.dtype) -> Layout | None:
    """The dimension in which the samples lie: it doubles with the batch, and its halves are the two samples'."""
    if not both.dim() == one.dim() == two.dim() or one.shape != two.shape:
        return None
    grown = [k for k in range(both.dim()) if both.shape[k] != one.shape[k]]
    if len(grown) != 1 or both.shape[grown[0]] != 2 * one.shape[grown[0]]:
        return None
    (dim,), size = grown, one.shape[grown[0]]
    halves = both.narrow(dim, 0, size), both.narrow(dim, size, size)
    if close(halves[0], one, narrowest) and close(halves[1], two, narrowest):
        return Layout(dim, size)
    turns = both.unflatten(dim, (size, 2))
    if close(turns.select(dim + 1, 0), one, narrowest) and close(turns.select(dim + 1, 1), two, narrowest):
        return Layout(dim, size, major=False)
    return None


def _verified(
    network: Network, state: Params, pair: Inputs, plan: Plan, saved: int, size: float, reaches: bool = False
) -> Plan:
    """The plan after a comparison of Jᵀv with autograd: what differs goes to the fallback, which is compared too.

    `size`: the norm of the outputs, whose rounding reaches every gradient. `reaches`: data decide the way, so that
    other samples may reach parameters that these two do not.
    """
    v = torch.cos(torch.arange(1.0, plan.c + 1))
    expected, unused = _reference(network, state, pair, v, plan.shield)
    scale = _Scale.of(network, state, expected, size)
    if scale.total == 0 and len(unused) == len(network.train) and not reaches:
        raise ModelError(
            "the outputs do not depend on any of the parameters that count, so the kernel is zero. Check train=, "
            "torch.no_grad() and .detach() in the model."
        )
    check_kept(network, unused)
    traced = bool(plan.measured)
    while True:
        if not _all_ruled(network, plan):
            found = {}
            break
        try:
            found = by_rules(network, state, pair, plan, exact=True)
        except NoRule as e:
            plan = plan.without(e.names - plan.fallback.keys() or _all_ruled(network, plan), "its rule does not fit")
            continue
        except CheckpointError:
            if plan.shield:
                raise
            plan = replace(plan, shield=True)
            continue
        except Unfamiliar as e:
            plan.measured.add(e.calls)
            continue
        ruled = {k: g for k, g in expected.items() if k not in plan.fallback}
        wrong = _disagree(found, ruled, unused, v, scale, plan.narrowest)
        if not wrong or _only_rounding(network, pair, plan, v):
            break
        if not traced:  # rows may belong to other samples than they seem to
            traced, plan = True, replace(plan, measured={plan.calls})
            continue
        plan = plan.without(wrong, "its rule disagrees with autograd")
    plan = _checked_fallback(network, state, pair, plan, expected, unused, v, scale)
    return _weighed(network, found, plan, saved)


def _all_ruled(network: Network, plan: Plan) -> set[str]:
    return set(network.train) - plan.fallback.keys()


def _checked_fallback(
    network: Network,
    state: Params,
    pair: Inputs,
    plan: Plan,
    expected: Mapping[str, Tensor],
    unused: tuple[str, ...],
    v: Tensor,
    scale: "_Scale",
) -> Plan:
    """torch.func where it agrees with autograd, then one sample at a time, then one in the company of another."""

    def wrong(found: Mapping[str, Tensor], names: Iterable[str], room: _Scale = scale) -> set[str]:
        blocks = {k: Dense(g) for k, g in found.items()}
        return set(_disagree(blocks, {k: expected[k] for k in names}, unused, v, room, plan.narrowest))

    names = list(plan.fallback)
    if not names:
        return plan
    try:
        looped = wrong(jacobian_vmap(network, state, pair, names, plan.transient), names)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, ModelError):
        looped = set(names)
    if not looped:
        return plan
    rest = [k for k in names if k in looped]
    for room in (scale, scale.cancelling(network, state, pair, plan.shield)):
        for company in (False, True):
            found = jacobian_loop(network, state, pair, rest, company=company, shield=plan.shield)
            if not wrong(found, rest, room):
                return replace(plan, looped=frozenset(rest), company=company)
    raise ModelError(
        f"two ways to take the gradient of {', '.join(rest)} by autograd disagree: the model is not a deterministic "
        "function of one sample."
    )


def _weighed(network: Network, found: Mapping[str, Block], plan: Plan, saved: int) -> Plan:
    """The plan with what a sample takes."""
    entries = sum(p.numel() * p.element_size() for k, p in network.model.named_parameters() if k in plan.fallback)
    kept = sum(b.nbytes for b in found.values()) // 2 + plan.c * entries
    top = max((float(t.abs().max()) for b in found.values() for t in b.tensors()[1::2]), default=1.0)
    seed = 2.0 ** round(8 - float(torch.log2(torch.tensor(max(top, 1e-30)))))  # room for 256 times larger ones
    half = 2 if network.precision == "float16" else 1
    factored = {k: b for k, b in found.items() if isinstance(b, Outer) and not b.indexed and b.slot is None}
    # Besides what is saved: the outputs of the layer at work, and one set of cotangents on its way (heuristic).
    moving = sum(t.numel() * t.element_size() for b in found.values() for t in b.tensors()) // plan.c
    return replace(
        plan,
        kept=max(kept // half, 1),
        transient=max(saved + moving, 1),  # both passes keep 32 bits
        saved={k: saved_by_forming(b) // half for k, b in factored.items() if saved_by_forming(b) > 0},
        seed=min(max(seed, 2.0**-14), 2.0**14),
    )


def _disagree(
    found: Mapping[str, Block],
    expected: Mapping[str, Tensor],
    unused: tuple[str, ...],
    v: Tensor,
    scale: "_Scale",
    narrowest: torch.dtype,
) -> list[str]:
    """The parameters whose blocks are not what autograd says."""
    wrong = []
    for name, want in expected.items():
        if name in unused:
            continue
        tolerance = max(FITS.get(want.dtype, 2e-3), FITS.get(narrowest, 2e-3))
        block = found.get(name)
        try:
            g = None if block is None else block.expand()
        except RuntimeError as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            wrong.append(name)  # factors that do not fit each other
            continue
        got = torch.zeros_like(want) if g is None else torch.einsum("ncp,c->np", g.to(want), v.to(want))
        room = tolerance * (float(want.norm()) + 1e-3 * scale.total) + scale.rounding[name]
        if not float((got - want).norm()) <= room:
            wrong.append(name)
    return wrong


@dataclass(frozen=True)
class _Scale:
    """How large gradients are: all of them together, and what rounding of the outputs makes of one that is zero."""

    total: float
    rounding: dict[str, float]

    @staticmethod
    def of(network: Network, state: Params, expected: Mapping[str, Tensor], size: float) -> "_Scale":
        total = float(sum(g.double().square().sum() for g in expected.values()) ** 0.5)
        sizes = {k: float(state[k].detach().double().norm()) for k in expected}
        rounding = {k: 1e3 * torch.finfo(g.dtype).eps * size / max(sizes[k], 1e-30) for k, g in expected.items()}
        return _Scale(total, {k: v if sizes[k] > 0 else 0.0 for k, v in rounding.items()})

    def cancelling(self, network: Network, state: Params, pair: Inputs, shield: bool) -> "_Scale":
        """The same with room for the rounding of gradients before the head, which may cancel in it."""
        if network.head is None:
            return self
        plain, inputs = network.without_head(pair)
        grads, _ = _reference(plain, state, inputs, None, shield)
        room = {k: ROUNDINGS * torch.finfo(g.dtype).eps * float(g.norm()) for k, g in grads.items()}
        return _Scale(self.total, {k: max(v, room[k]) for k, v in self.rounding.items()})


def _only_rounding(network: Network, pair: Inputs, plan: Plan, v: Tensor) -> bool:
    """Whether the plan fits in float64. In fewer bits a ReLU whose input is almost 0 may open for one run and stay shut
    for another, which no tolerance covers. Gradients that cancel in the head differ by roundings of those before it."""
    if _in_float64(network) and network.head is None:
        return False
    exact = replace(network, precision="float64")
    try:
        state, wide = exact.state(), tree.cast(pair, torch.float64)
        expected, unused = _reference(exact, state, wide, v, plan.shield)
        scale = _Scale.of(exact, state, expected, 0.0).cancelling(exact, state, wide, plan.shield)
        ruled = {k: g for k, g in expected.items() if k not in plan.fallback}
        narrowest = record(exact, state, wide, plan, differentiable=False, half=False)[1].narrowest
        return not _disagree(by_rules(exact, state, wide, plan, exact=True), ruled, unused, v, scale, narrowest)
    except (RuntimeError, TypeError, NoRule, Unfamiliar):  # a model that insists on its own type
        return False


def _reference(
    network: Network, state: Params, pair: Inputs, v: Tensor | None, shield: bool
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Jᵀv per sample by autograd [2, p] (v as in `_verified`), and the parameters that the outputs do not depend on."""
    own = network.leaves(state, network.train)
    rows: dict[str, list[Tensor]] = {k: [] for k in own}
    reached: set[str] = set()
    with torch.enable_grad(), network.modes(exact=True), Plainly(shield):
        out = network({**state, **own}, private(pair))
        v = torch.cos(torch.arange(1.0, out.shape[1] + 1)) if v is None else v
        for row in out:
            grads: Iterable[Any] = [None] * len(own)
            if out.requires_grad:
                grads = _gradient(row @ v.to(out), list(own.values()))
            for (k, p), g in zip(own.items(), grads, strict=True):
                if g is not None:
                    reached.add(k)
                rows[k].append(dense(g, torch.zeros_like(p)).flatten())
    return {k: torch.stack(r) for k, r in rows.items()}, tuple(k for k in own if k not in reached)


def _gradient(value: Tensor, of: list[Tensor]) -> Iterable[Any]:
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
