"""The Jacobian of one micro-batch: a block per parameter, by its rule, or by torch.func where no rule fits.

One forward pass is recorded; c backward passes, one per output, bring the cotangents back to the layers' outputs; rules
make blocks of them, first of weights, and then of the parameters that these are made of.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .._base import tree
from .._base.types import Inputs, Params
from . import blocks
from .agreement import FITS, check_independent, check_outputs
from .blocks import DenseBlock, GradientBlock, OuterBlock
from .capture_plan import CapturePlan, Unfamiliar
from .directions import contracted
from .fallback import autograd_reference, fallback, private
from .halving import halved
from .layout import Arrangement, Layout, MeasuredRows, as_rows, measure_layouts
from .network import Network
from .recorder import Key, Recorder, Tap
from .rules import BroadcastRule, LinearRule, NoRule, Rule
from .weights import Weight, pull_back


def capture(
    network: Network,
    state: Params,
    x: Inputs,
    plan: CapturePlan,
    *,
    differentiable: bool = False,
    exact: bool = False,
    largest: list[Tensor] | None = None,
) -> dict[str, GradientBlock]:
    """The blocks of one micro-batch. `exact` keeps 32 bits where the precision asks for 16.

    Cotangents that leave the range of 16 bits are taken again, smaller. With `largest`, to which the largest one is
    added, they are not, and a GPU need not be waited for: whoever gives it looks, and calls again without.

    One sample goes twice: torch's batch norm in evaluation mode has a wrong derivative for a batch of one whose
    gradient is transposed, and plans are made for two.
    """
    if tree.size(x) == 1:
        twice = tree.transform(lambda v: torch.cat([v, v]), x)
        doubled = capture(network, state, twice, plan, differentiable=differentiable, exact=exact, largest=largest)
        return {k: b.rows(slice(0, 1)) for k, b in doubled.items()}
    half = network.half and not exact and not differentiable
    captured: dict[str, GradientBlock] = {}
    ruled, seed = set(network.trainable) - plan.fallback.keys(), plan.seed if half else 1.0
    while ruled:
        captured = by_rules(network, state, x, plan, differentiable=differentiable, half=half, seed=seed, exact=exact)
        if not half:
            break
        halves = {k: halved(b, seed) for k, b in captured.items()}
        captured = {k: b for k, (b, _) in halves.items()}
        top = torch.stack([top for _, top in halves.values()]).max() if halves else torch.zeros(())
        if largest is not None:
            largest.append(top)
            break
        if float(top) < float("inf") or seed < 2.0**-24:
            break
        seed /= 64  # a cotangent left the range of 16 bits: start lower
    if plan.fallback:
        for name, g in fallback(network, state, x, plan).items():
            captured[name] = DenseBlock(g if differentiable else g.detach())
    # One type for all blocks, the widest of the parameters': tiles are sums over all of them.
    wide = state[network.trainable[0]].dtype
    for k in network.trainable[1:]:
        wide = torch.promote_types(wide, state[k].dtype)
    return {
        k: captured[k] if half else blocks.with_dtype(captured[k], wide) for k in network.trainable if k in captured
    }


def by_rules(
    network: Network,
    state: Params,
    x: Inputs,
    plan: CapturePlan,
    *,
    differentiable: bool = False,
    half: bool = False,
    seed: float = 1.0,
    exact: bool = False,
) -> dict[str, GradientBlock]:
    """The blocks of the parameters that are not in the fallback. `seed` is a factor on the cotangents."""
    out, recorder = record(network, state, x, plan, differentiable=differentiable, half=half)
    check_outputs(out)
    if lost := recorder.unexplained.keys() - plan.fallback.keys():
        raise NoRule(lost)
    # Where data decide the way, the probe's layouts hold for its two samples only.
    measure = recorder.routes or recorder.calls in plan.measured
    if not measure and recorder.calls != plan.calls:
        raise Unfamiliar(recorder.calls)
    if measure:
        _check_alone(network, state, x, out, plan)
    companions = _companions(recorder.taps)
    # By identity: a weight that is made anew in every step of a loop is another one each time.
    uses: dict[int, tuple[Weight, list[GradientBlock]]] = {}
    with network.modes(differentiable=differentiable, exact=exact), torch.set_grad_enabled(differentiable):
        gathered = collect(out, recorder, plan.layouts, differentiable=differentiable, measure=measure, seed=seed)
        for weight, block in gathered:
            uses.setdefault(id(weight), (weight, []))[1].append(block)
        gradients = _to_parameters(uses, recorder, differentiable)
    if new := gradients.keys() - plan.rules.keys():
        _check_new(network, state, x, {k: gradients[k] for k in new}, plan)
        plan.rules.update({k: tap.rule.name for tap in recorder.taps for k in tap.names if k in new})
    for name, bias in companions.items():
        factored = gradients.get(name)
        if isinstance(factored, OuterBlock) and bias in gradients:
            gradients[name] = replace(factored, bias=bias)
    return gradients


def record(
    network: Network,
    state: Params,
    x: Inputs,
    plan: CapturePlan,
    *,
    differentiable: bool,
    half: bool,
    keep_outputs: bool = False,
) -> tuple[Tensor, Recorder]:
    """One forward pass: its outputs [n, c], and what was recorded of it."""
    tracked = network.leaves(state, [k for k in network.trainable if k not in plan.fallback])
    recorder = Recorder(tracked, tree.size(x), plan.copies, keep_outputs, half, plan.shield, seen=network.seen)
    # The forward pass keeps its 32 bits in every precision. Rounded to 16, a few ReLUs in a thousand open that should
    # stay shut: cosines are then wrong by 1e-3, a hundred times what rounding the factors costs (docs/design.md).
    with network.modes(differentiable=differentiable, exact=True), torch.enable_grad():
        out = network({**state, **tracked}, private(x) if plan.private else x, recorder)
    recorder.check_unchanged()
    return out, recorder


def collect(
    out: Tensor, recorder: Recorder, layouts: Mapping[Key, Layout], *, differentiable: bool, measure: bool, seed: float
) -> Iterator[tuple[Weight, GradientBlock]]:
    """(weight, block) for every use of a weight that the outputs [n, c] depend on.

    Cost: c backward passes that stop at layer outputs; no weight gradient of a layer with factors is formed. Rules
    whose gradients are small sums are applied output by output, so that their cotangents need not be kept.
    """
    n, c = out.shape
    live = [tap for tap in recorder.taps if tap.edge is not None]
    edges = [tap.edge for tap in live if tap.edge is not None]
    places = _arrangements(out, live, layouts, measure, recorder.narrowest)
    half = recorder.half
    # A loop over n samples would make n blocks with room for n samples each; taken together it is one.
    groups = _together(live, places) if measure else [[k] for k in range(len(live))]
    kept = []
    for group in groups:
        tap, place = (live[group[0]], places[group[0]]) if len(group) == 1 else _joined(live, places, group, n)
        kept.append(_Cotangents.of(tap, place, n, c, differentiable, half))
    for j in range(c if live and out.requires_grad else 0):
        # Samples do not meet, so one backward pass takes output j of all of them.
        unit = torch.zeros_like(out)
        unit[:, j] = seed
        grads = torch.autograd.grad(
            out, edges, unit, retain_graph=j < c - 1 or differentiable, create_graph=differentiable, allow_unused=True
        )
        with torch.set_grad_enabled(differentiable):
            for cotangents, group in zip(kept, groups, strict=True):
                grad = grads[group[0]] if len(group) == 1 else _rows_of(live, grads, group)
                if grad is not None:
                    cotangents.add(j, grad, n)
    while kept:  # popped, so that what a tap kept is freed when its blocks are done with
        yield from kept.pop(0).blocks()


def _arrangements(
    out: Tensor, taps: Sequence[Tap], layouts: Mapping[Key, Layout], measure: bool, narrowest: torch.dtype
) -> list[Arrangement]:
    """Where the samples lie in the tensors of each tap; NoRule names those of which it is not known."""
    known = [_known_layout(layouts, tap.key) for tap in taps]
    places: list[Arrangement | None] = list(known)
    if measure and taps and out.requires_grad:
        edges, rules = [tap.edge for tap in taps if tap.edge is not None], [tap.rule for tap in taps]
        places = measure_layouts(out, edges, rules, known, narrowest)
    lost = {name for tap, place in zip(taps, places, strict=True) if place is None for name in tap.names}
    if lost:
        raise NoRule(lost)
    return [place for place in places if place is not None]


def _known_layout(layouts: Mapping[Key, Layout], key: Key) -> Layout | None:
    """The layout found by the probe; a loop that runs longer than it did then goes on with the last one."""
    name, occurrence = key
    while occurrence >= 0:
        if (name, occurrence) in layouts:
            return layouts[name, occurrence]
        occurrence -= 1
    return None


def _together(taps: Sequence[Tap], places: Sequence[Arrangement]) -> list[list[int]]:
    """Uses of one weight in a loop over samples, whose rows can be taken together; all others by themselves."""
    groups: dict[Hashable, list[int]] = {}
    for k, (tap, place) in enumerate(zip(taps, places, strict=True)):
        alike = isinstance(place, MeasuredRows) and isinstance(tap.rule, LinearRule)
        key = (id(tap.weight), id(tap.bias), tap.rule, tap.shape[-1:]) if alike else k
        groups.setdefault(key, []).append(k)
    return list(groups.values())


def _joined(taps: Sequence[Tap], places: Sequence[Arrangement], group: list[int], n: int) -> tuple[Tap, MeasuredRows]:
    """Several uses as one, their rows after each other."""
    dims = [taps[k].rule.positions(torch.empty(taps[k].shape, device="meta")) for k in group]
    lengths = [math.prod(taps[k].shape[:d]) for k, d in zip(group, dims, strict=True)]
    inputs = [x for k in group if (x := taps[k].input) is not None]
    x = torch.cat([as_rows(v, d) for v, d in zip(inputs, dims, strict=True)]) if inputs else None
    first = taps[group[0]]
    shape = torch.Size((sum(lengths), *first.shape[dims[0] :]))
    rows = [place for k in group if isinstance(place := places[k], MeasuredRows)]
    return replace(first, input=x, shape=shape), MeasuredRows.joined(rows, lengths, n)


def _rows_of(taps: Sequence[Tap], grads: Sequence[Tensor | None], group: list[int]) -> Tensor | None:
    """What came back to several uses, their rows after each other."""
    like = next((g for k in group if (g := grads[k]) is not None), None)
    if like is None:
        return None
    full = [like.new_zeros(taps[k].shape) if (g := grads[k]) is None else g for k in group]
    return torch.cat([as_rows(g, taps[k].rule.positions(g)) for g, k in zip(full, group, strict=True)])


@dataclass
class _Cotangents:
    """What came back to one tap, gathered over the c outputs."""

    tap: Tap
    layout: Arrangement
    x: Tensor | None
    c: int
    differentiable: bool
    half: bool
    # By output. Of each of these three only one is used: what came back, or else is written into the buffer, or the
    # sums that a rule with small gradients makes of it at once.
    grads: dict[int, Tensor] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    sums: dict[int, list[tuple[Weight, Tensor]]] = field(default_factory=dict)
    buffer: Tensor | None = None

    @staticmethod
    def of(tap: Tap, layout: Arrangement, n: int, c: int, differentiable: bool, half: bool) -> "_Cotangents":
        """Nothing yet, but the tap's input with the samples first; for a broadcast product, in the output's shape."""
        x = tap.input
        if x is not None:
            try:
                x = layout.samples_first(x.expand(tap.shape) if isinstance(tap.rule, BroadcastRule) else x, n)
            except (NoRule, RuntimeError, IndexError) as e:
                raise NoRule(tap.names) from e
            x = x if differentiable else x.detach()
        return _Cotangents(tap, layout, x, c, differentiable, half)

    def add(self, j: int, grad: Tensor, n: int) -> None:
        """Keep what came back of output j."""
        try:
            grad = self.layout.samples_first(grad, n)
        except (NoRule, IndexError) as e:
            raise NoRule(self.tap.names) from e
        if self.tap.rule.small:
            if self.x is not None and not self.sums and self.tap.weight is not None:
                self.x = self.tap.rule.ready(self.x)
            self.sums[j] = [(weight, block.expand()) for weight, block in self._blocks(grad[:, None])]
            return
        # Rounded at once: all c cotangents in 32 bits would take twice the memory.
        grad = grad.half() if self.half else grad
        if self.differentiable or grad.device.type == "cuda":  # on a GPU, one stack is faster than c strided copies
            self.grads[j] = grad
            return
        if self.buffer is None:
            self.buffer = _buffer(grad, self.c, self.tap.rule.channel)
            self.buffer[:, :j] = 0  # not initialised; outputs before did not reach this layer
        self.buffer[:, j] = grad
        self.written.add(j)

    def blocks(self) -> Iterator[tuple[Weight, GradientBlock]]:
        """The blocks of the tap's weight and bias; of outputs from which nothing came back they are zero."""
        if self.sums:
            for k, (weight, like) in enumerate(next(iter(self.sums.values()))):
                rows = [self.sums[j][k][1] if j in self.sums else torch.zeros_like(like) for j in range(self.c)]
                yield weight, DenseBlock(torch.cat(rows, 1))
        elif self.grads:
            like = next(iter(self.grads.values()))
            grads = [self.grads.get(j, torch.zeros_like(like)) for j in range(self.c)]
            d = grads[0][:, None] if self.c == 1 else _stack(grads, self.tap.rule.channel)
            self.grads.clear()
            yield from self._blocks(d)
        elif self.buffer is not None:
            for j in range(self.c):
                if j not in self.written:
                    self.buffer[:, j] = 0
            yield from self._blocks(self.buffer)

    def _blocks(self, d: Tensor) -> Iterator[tuple[Weight, GradientBlock]]:
        rule: Rule = self.tap.rule
        x = d if self.x is None else self.x
        if not self.half and x.is_floating_point():  # a model that works in several precisions
            common = torch.promote_types(torch.float32, torch.promote_types(x.dtype, d.dtype))
            x, d = x.to(common), d.to(common)
        try:
            if isinstance(rule, BroadcastRule):
                rule = rule.aligned(len(self.tap.shape), self.layout.folded)
            if self.tap.weight is not None:
                yield self.tap.weight, rule.weight(x, d)
            if self.tap.bias is not None:
                yield self.tap.bias, rule.bias(d)
        except (NoRule, IndexError, ValueError) as e:
            raise NoRule(self.tap.names) from e


def _buffer(grad: Tensor, c: int, channel: int) -> Tensor:
    """Room for [n, c, r, …], laid out so that outputs and channels are neighbours: [n, …, c, o] or [n, c, o, …].

    Either way (c, o) is one dimension of stride, so that all outputs go through one product with the activations.
    """
    channel %= grad.dim()
    if grad.stride(channel) == 1 or channel == grad.dim() - 1:
        rest = [s for k, s in enumerate(grad.shape) if k != channel]
        buffer = grad.new_empty(*rest, c, grad.shape[channel])
        return buffer.movedim((-2, -1), (1, channel + 1))
    return grad.new_empty(grad.shape[0], c, *grad.shape[1:])


def _stack(grads: list[Tensor], channel: int) -> Tensor:
    """c times [n, r, …] → [n, c, r, …] in the memory order of `_buffer`."""
    channel %= grads[0].dim()
    if grads[0].stride(channel) != 1 and channel != grads[0].dim() - 1:
        return torch.stack(grads, 1)
    stacked = torch.stack([g.movedim(channel, -1) for g in grads], -2)
    return stacked.movedim((-2, -1), (1, channel + 1))


def _to_parameters(
    uses: dict[int, tuple[Weight, list[GradientBlock]]], recorder: Recorder, differentiable: bool
) -> dict[str, GradientBlock]:
    """One block per parameter, of all uses of the weights that are made of it."""
    by_name: dict[str, list[GradientBlock]] = {}
    for key in list(uses):
        weight, of_uses = uses.pop(key)
        if weight.name is not None:
            by_name.setdefault(weight.name, []).append(blocks.add_blocks(of_uses))
        elif weight.slot is not None or weight.value.requires_grad:  # else made without a graph: torch.no_grad
            for name, block in pull_back(weight, blocks.add_blocks(of_uses), recorder.parameters, differentiable):
                by_name.setdefault(name, []).append(block)
    gradients: dict[str, GradientBlock] = {}
    for name, of_weights in by_name.items():
        gradients[name] = blocks.add_blocks(of_weights)
    return gradients


def _check_alone(network: Network, state: Params, x: Inputs, out: Tensor, plan: CapturePlan) -> None:
    """Where data decide the way, a sample's way must not depend on the others (experts with a capacity, say)."""
    last = len(out) - 1
    if last == 0:
        return
    with torch.enable_grad(), network.modes(exact=True):  # hooks on activations want a graph
        single = private(tree.take(x, slice(last, last + 1)))
        alone = network({**state, **network.leaves(state, network.trainable)}, single)[0].detach()
    check_independent(out[last].detach(), alone, plan.narrowest)


def _check_new(network: Network, state: Params, x: Inputs, new: Mapping[str, GradientBlock], plan: CapturePlan) -> None:
    """Parameters that the probe's samples did not reach: Σ_i s_i vᵀJ_i of this batch, by autograd and by the blocks."""
    s = torch.sin(torch.arange(1.0, tree.size(x) + 1))
    v, gradients, _ = autograd_reference(network, state, x, plan.shield, over=s)
    wanted = {k: g[0] for k, g in gradients.items()}
    scale = sum(float(g.double().square().sum()) for g in wanted.values()) ** 0.5
    wrong = []
    for name, block in new.items():
        want = wanted[name]
        got = torch.einsum("np,n->p", contracted(block, v).to(want), s.to(want))
        bound = max(FITS.get(want.dtype, 2e-3), FITS.get(plan.narrowest, 2e-3))
        # Ten times the probe's bound, since terms of many samples cancel in the sum (heuristic). "Not ≤" refuses NaN.
        if not float((got - want).norm()) <= 10 * bound * (float(want.norm()) + 1e-3 * scale):
            wrong.append(name)
    if wrong:
        raise NoRule(wrong)


def _companions(taps: list[Tap]) -> dict[str, str]:
    """Weights and biases that are only ever used together, by rules that sum the very same factors for the bias."""
    pairs = {(_name(tap.weight), _name(tap.bias)) for tap in taps}
    weights, biases = [w for w, _ in pairs], [b for _, b in pairs]
    made_of = {k for tap in taps for w in (tap.weight, tap.bias) if w is not None and w.name is None for k in w.sources}
    # To add the bias along with its weight is right only where nothing else adds to either of them.
    unlike = {_name(tap.weight) for tap in taps if not tap.rule.summed} | made_of
    return {
        w: b
        for w, b in pairs
        if w and b and weights.count(w) == biases.count(b) == 1 and b not in weights and w not in biases
        if w not in unlike and b not in made_of
    }


def _name(weight: Weight | None) -> str | None:
    return None if weight is None else weight.name
