"""c backward passes through a recorded forward pass: from taps to blocks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .blocks import Block, Dense
from .layout import Arrangement, Layout, Rows, as_rows, measured
from .recorder import Key, Recorder, Tap
from .rules import Broadcast, Linear, NoRule, Rule
from .weights import Weight


def known_layout(layouts: Mapping[Key, Layout], key: Key) -> Layout | None:
    """The layout found by the probe; a loop that runs longer than it did then goes on with the last one."""
    name, occurrence = key
    while occurrence >= 0:
        if (name, occurrence) in layouts:
            return layouts[name, occurrence]
        occurrence -= 1
    return None


def arrangements(
    out: Tensor, taps: Sequence[Tap], layouts: Mapping[Key, Layout], measure: bool, narrowest: torch.dtype
) -> list[Arrangement]:
    """Where the samples lie in the tensors of each tap; NoRule names those of which it is not known."""
    known = [known_layout(layouts, tap.key) for tap in taps]
    if measure and taps and out.requires_grad:
        edges, rules = [tap.edge for tap in taps if tap.edge is not None], [tap.rule for tap in taps]
        found = measured(out, edges, rules, known, narrowest)
    else:
        found = list(known)
    lost = {name for tap, layout in zip(taps, found, strict=True) if layout is None for name in tap.names}
    if lost:
        raise NoRule(lost)
    return [layout for layout in found if layout is not None]


def collect(
    out: Tensor, recorder: Recorder, layouts: Mapping[Key, Layout], *, differentiable: bool, measure: bool, seed: float
) -> Iterator[tuple[Weight, Block]]:
    """(weight, block) for every use of a weight that the outputs [n, c] depend on.

    Cost: c backward passes that stop at layer outputs; no weight gradient of a layer with factors is formed. Rules
    whose gradients are small sums are applied output by output, so that their cotangents need not be kept.
    """
    n, c = out.shape
    live = [tap for tap in recorder.taps if tap.edge is not None]
    edges = [tap.edge for tap in live if tap.edge is not None]
    places = arrangements(out, live, layouts, measure, recorder.narrowest)
    half = recorder.half
    groups = _together(live, places) if measure else [[k] for k in range(len(live))]
    kept = []
    for some in groups:
        tap, place = (live[some[0]], places[some[0]]) if len(some) == 1 else _one(live, places, some, n)
        kept.append(_Cotangents.of(tap, place, n, c, differentiable, half))
    for j in range(c if live and out.requires_grad else 0):
        one = torch.zeros_like(out)
        one[:, j] = seed
        grads = torch.autograd.grad(
            out, edges, one, retain_graph=j < c - 1 or differentiable, create_graph=differentiable, allow_unused=True
        )
        with torch.set_grad_enabled(differentiable):
            for k, some in zip(kept, groups, strict=True):
                grad = grads[some[0]] if len(some) == 1 else _rows_of(live, grads, some)
                if grad is not None:
                    k.add(j, grad, n)
    while kept:
        yield from kept.pop(0).blocks()


def _together(taps: Sequence[Tap], places: Sequence[Arrangement]) -> list[list[int]]:
    """Uses of one weight in a loop over samples, whose rows can be taken together; all others by themselves."""
    found: dict[Any, list[int]] = {}
    for k, (tap, place) in enumerate(zip(taps, places, strict=True)):
        alike = isinstance(place, Rows) and isinstance(tap.rule, Linear)
        key = (id(tap.weight), id(tap.bias), tap.rule, tap.shape[-1:]) if alike else k
        found.setdefault(key, []).append(k)
    return list(found.values())


def _one(taps: Sequence[Tap], places: Sequence[Arrangement], some: list[int], n: int) -> tuple[Tap, Rows]:
    """Several uses as one, their rows after each other."""
    dims = [taps[k].rule.positions(torch.empty(taps[k].shape, device="meta")) for k in some]
    lengths = [math.prod(taps[k].shape[:d]) for k, d in zip(some, dims, strict=True)]
    inputs = [x for k in some if (x := taps[k].input) is not None]
    x = torch.cat([as_rows(v, d) for v, d in zip(inputs, dims, strict=True)]) if inputs else None
    first = taps[some[0]]
    shape = torch.Size((sum(lengths), *first.shape[dims[0] :]))
    return replace(first, input=x, shape=shape), Rows.joined(
        [p for k in some if isinstance(p := places[k], Rows)], lengths, n
    )


def _rows_of(taps: Sequence[Tap], grads: Sequence[Tensor | None], some: list[int]) -> Tensor | None:
    """What came back to several uses, their rows after each other."""
    like = next((g for k in some if (g := grads[k]) is not None), None)
    if like is None:
        return None
    each = [like.new_zeros(taps[k].shape) if (g := grads[k]) is None else g for k in some]
    return torch.cat([as_rows(g, taps[k].rule.positions(g)) for g, k in zip(each, some, strict=True)])


@dataclass
class _Cotangents:
    """What came back to one tap, gathered over the c outputs."""

    tap: Tap
    layout: Arrangement
    x: Tensor | None
    c: int
    differentiable: bool
    half: bool
    parts: dict[int, Any] = field(default_factory=dict)  # of outputs, where nothing is written into a buffer
    buffer: Tensor | None = None

    @staticmethod
    def of(tap: Tap, layout: Arrangement, n: int, c: int, differentiable: bool, half: bool) -> "_Cotangents":
        try:
            x = None if tap.input is None else _input(tap, layout, n)
        except (NoRule, RuntimeError, IndexError) as e:
            raise NoRule(tap.names) from e
        return _Cotangents(tap, layout, x if x is None or differentiable else x.detach(), c, differentiable, half)

    def add(self, j: int, grad: Tensor, n: int) -> None:
        try:
            grad = self.layout.samples_first(grad, n)
        except (NoRule, IndexError) as e:
            raise NoRule(self.tap.names) from e
        if self.tap.rule.small:
            if self.x is not None and not self.parts and self.tap.weight is not None:
                self.x = self.tap.rule.ready(self.x)
            self.parts[j] = self._apply(grad[:, None])
            return
        grad = grad.half() if self.half else grad
        if self.differentiable or grad.device.type == "cuda":  # on a GPU, one stack is faster than c strided copies
            self.parts[j] = grad
        else:
            if self.buffer is None:
                self.buffer = _buffer(grad, self.c, self.tap.rule.channel(grad.dim()))
                self.buffer[:, :j] = 0
            self.buffer[:, j] = grad
            self.parts[j] = None

    def blocks(self) -> Iterator[tuple[Weight, Block]]:
        if not self.parts:
            return
        if self.tap.rule.small:
            some: list[tuple[Weight, Tensor]] = next(iter(self.parts.values()))
            for k, (weight, g) in enumerate(some):
                each = [self.parts[j][k][1] if j in self.parts else torch.zeros_like(g) for j in range(self.c)]
                yield weight, Dense(torch.cat(each, 1))
            return
        if self.buffer is None:
            some_grad = next(iter(self.parts.values()))
            each = [self.parts.get(j, torch.zeros_like(some_grad)) for j in range(self.c)]
            d = each[0][:, None] if self.c == 1 else _stack(each, self.tap.rule.channel(some_grad.dim()))
            self.parts.clear()
        else:
            d = self.buffer
            for j in range(self.c):
                if j not in self.parts:
                    d[:, j] = 0
        yield from self._blocks(d)

    def _blocks(self, d: Tensor) -> Iterator[tuple[Weight, Block]]:
        rule: Rule = self.tap.rule
        x = d if self.x is None else self.x
        if not self.half and x.is_floating_point():  # a model that works in several precisions
            common = torch.promote_types(torch.float32, torch.promote_types(x.dtype, d.dtype))
            x, d = x.to(common), d.to(common)
        try:
            if isinstance(rule, Broadcast):
                rule = rule.aligned(len(self.tap.shape), self.layout.folded)
            if self.tap.weight is not None:
                yield self.tap.weight, rule.weight(x, d)
            if self.tap.bias is not None:
                yield self.tap.bias, rule.bias(d)
        except (NoRule, IndexError, ValueError) as e:
            raise NoRule(self.tap.names) from e

    def _apply(self, d: Tensor) -> list[tuple[Weight, Tensor]]:
        return [(weight, block.expand()) for weight, block in self._blocks(d)]


def _input(tap: Tap, layout: Arrangement, n: int) -> Tensor:
    """The tap's input with the samples first; for a product with a broadcast operand, in the shape of the output."""
    x = tap.input
    assert x is not None
    if isinstance(tap.rule, Broadcast):
        x = x.expand(tap.shape)
    return layout.samples_first(x, n)


def _buffer(grad: Tensor, c: int, channel: int) -> Tensor:
    """Room for [n, c, r, …], laid out so that outputs and channels are neighbours: [n, …, c, o] or [n, c, o, …].

    Either way (c, o) is one dimension of stride, so that all outputs go through one product with the activations.
    """
    if grad.stride(channel) == 1 or channel == grad.dim() - 1:
        rest = [s for k, s in enumerate(grad.shape) if k != channel]
        buffer = grad.new_empty(*rest, c, grad.shape[channel])
        return buffer.movedim((-2, -1), (1, channel + 1))
    return grad.new_empty(grad.shape[0], c, *grad.shape[1:])


def _stack(grads: list[Tensor], channel: int) -> Tensor:
    """c times [n, r, …] → [n, c, r, …] in the memory order of `_buffer`."""
    if grads[0].stride(channel) != 1 and channel != grads[0].dim() - 1:
        return torch.stack(grads, 1)
    stacked = torch.stack([g.movedim(channel, -1) for g in grads], -2)
    return stacked.movedim((-2, -1), (1, channel + 1))
