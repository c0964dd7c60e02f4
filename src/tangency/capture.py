"""One forward and c backward passes: what went into every use of a parameter, and what came back to it.

`Recorder` watches all torch functions while the model runs. A call that takes a tracked parameter and has a rule
becomes a `Tap`: its input is kept, and the place in the autograd graph of its output is remembered, so that gradients
are taken with respect to layer outputs only. A call without a rule marks its parameters for the fallback. Nothing is
attached to the model, so nothing can be left behind.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from . import attention, fused
from .blocks import Block, Dense
from .errors import ModelError
from .rules import Broadcast, Linear, NoRule, Rule
from .structured import Call, read


@dataclass(frozen=True)
class Layout:
    """Where the samples lie in a layer's tensors: which dimension, how many rows each has there, and whether they come
    first in it.

    `dim` is None where the layer was called once for the whole batch (position embeddings).
    """

    dim: int | None
    rows: int = 1
    major: bool = True

    def repeat(self, v: Tensor, n: int) -> Tensor:
        """A tensor that the whole batch shares, once for every sample."""
        return v.expand(n, *(v.shape[1:] if v.dim() and v.shape[0] == 1 else v.shape))

    def samples_first(self, v: Tensor, n: int) -> Tensor:
        """[…, n·r, …] → [n, r, …]. Another number of rows than the probe saw (routing) does not fit."""
        v = v.movedim(self.dim or 0, 0)
        if v.shape[0] != n * self.rows:
            raise NoRule
        return v.unflatten(0, (n, -1)) if self.major else v.unflatten(0, (-1, n)).transpose(0, 1)


@dataclass
class Tap:
    """One use of a parameter by a function with a rule."""

    key: tuple[str, int]  # first parameter of the call, and how often it was used before
    rule: Rule
    weight: str | None
    bias: str | None
    input: Tensor | None
    version: int
    shape: torch.Size
    edge: GradientEdge | None = None
    output: Tensor | None = None  # kept only while probing

    @property
    def names(self) -> list[str]:
        return [name for name in (self.weight, self.bias) if name is not None]


@dataclass(eq=False)
class Recorder(TorchFunctionMode):
    """Records the taps of one forward pass over n samples."""

    names: dict[int, str]  # id of a parameter tensor → its name
    n: int
    layouts: Mapping[tuple[str, int], Layout] = field(default_factory=dict)
    keep_outputs: bool = False
    half: bool = False  # cotangents are kept in 16 bits, and are of first order only
    taps: list[Tap] = field(default_factory=list)
    unexplained: dict[str, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _transposed: dict[int, tuple[Tensor, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracked = [v for v in _tensors(args, kwargs) if id(v) in self.names or id(v) in self._transposed]
        if not tracked:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            if attention.covers(bound.arguments):
                with self:
                    return attention.forward(**bound.arguments)
        if func in _TRANSPOSE and _is_transpose(func, args, kwargs) and id(args[0]) in self.names:
            out = func(*args, **kwargs)
            self._transposed[id(out)] = (out, self.names[id(args[0])])
            return out
        call = read(func, args, kwargs)
        tap = None if call is None else self._tap(call, tracked)
        if self.half and func is F.batch_norm and tap is not None:
            func = fused.batch_norm
        out = func(*args, **kwargs)
        if tap is None:
            differentiable = torch.is_grad_enabled() and func not in _DETACHED
            made = any(not any(v is w for w in tracked) for v in _tensors((out,), {}))  # not only asked for its shape
            if differentiable and made:
                for v in tracked:
                    self.unexplained.setdefault(self._name(v), getattr(func, "__name__", str(func)))
            return out
        return self._watch(tap, out)

    def _name(self, v: Tensor | None) -> str:
        return self.names[id(v)] if id(v) in self.names else self._transposed[id(v)][1]

    def _tap(self, call: Call, tracked: list[Tensor]) -> Tap | None:
        """The call as a tap, if the rule accounts for every tracked tensor in it."""
        weight, bias, x = call.weight, call.bias, call.input
        if isinstance(call.rule, Broadcast) and x is not None and any(x is v for v in tracked):
            weight, x = x, weight  # the parameter is the first operand
        mine = [v for v in (weight, bias) if v is not None and any(v is w for w in tracked)]
        if len(mine) != len({id(v) for v in tracked}) or any(x is v for v in tracked):
            return None
        rule = call.rule
        if id(weight) in self._transposed:
            if not isinstance(rule, Linear):
                return None
            rule = Linear(transposed=not rule.transposed)
        if isinstance(rule, Broadcast):
            assert weight is not None
            rule = Broadcast(tuple(weight.shape), rule.product)
        first = self._name(mine[0])
        occurrence = self._counts.get(first, 0)
        self._counts[first] = occurrence + 1
        of_weight = self._name(weight) if any(weight is v for v in mine) else None
        of_bias = self._name(bias) if any(bias is v for v in mine) else None
        version = 0 if x is None or x.is_inference() else x._version
        return Tap((first, occurrence), rule, of_weight, of_bias, x, version, torch.Size())

    def _watch(self, tap: Tap, out: Tensor) -> Tensor:
        layout = self._layout(tap.key)
        if layout is not None and layout.dim is None:  # called once for the batch
            out = layout.repeat(out, self.n)
        tap.shape = out.shape
        if torch.is_grad_enabled():
            if not out.requires_grad:  # the graph begins here; cloned, since the model may work in place on it
                out = out.detach().requires_grad_().clone()
            tap.edge = get_gradient_edge(out)
        if self.keep_outputs:
            tap.output = out.detach().clone()
        self.taps.append(tap)
        return out

    def _layout(self, key: tuple[str, int]) -> Layout | None:
        """The layout found by the probe; a loop that runs longer than it did then goes on with the last one."""
        name, occurrence = key
        while occurrence >= 0:
            if (name, occurrence) in self.layouts:
                return self.layouts[name, occurrence]
            occurrence -= 1
        return None

    def check_known(self, fallback: Mapping[str, str]) -> None:
        """Every use of a parameter must be one that the probe saw; NoRule names those that are not."""
        new = set(self.unexplained) - set(fallback)
        for tap in self.taps:
            if tap.edge is not None and self._layout(tap.key) is None:
                new |= set(tap.names) - set(fallback)
        if new:
            raise NoRule(new)

    def check_unchanged(self) -> None:
        """Refuse a model that changed a layer's input in place after the layer had used it."""
        for tap in self.taps:
            if tap.input is not None and not tap.input.is_inference() and tap.input._version != tap.version:
                raise ModelError(
                    f"the input of the layer with {tap.names[0]} was changed in place after the layer had used it; "
                    "such a model cannot be trained by autograd either. Replace x += … by x = x + …"
                )

    def layout(self, tap: Tap) -> Layout:
        found = self._layout(tap.key)
        if found is None:
            raise NoRule(tap.names)
        return found


def collect(
    out: Tensor, recorder: Recorder, taps: list[Tap], *, differentiable: bool, seed: float = 1.0
) -> Iterator[tuple[str, Block]]:
    """(parameter, block) for every use of a parameter that the outputs [n, c] depend on.

    Cost: c backward passes that stop at layer outputs; no weight gradient of a layer with factors is formed. Rules
    whose gradients are small sums are applied output by output, so that their cotangents need not be kept.
    """
    n, c = out.shape
    live = [tap for tap in taps if tap.edge is not None]
    edges = [tap.edge for tap in live if tap.edge is not None]
    kept = [_Cotangents.of(tap, recorder.layout(tap), n, c, differentiable, recorder.half) for tap in live]
    for j in range(c if live and out.requires_grad else 0):
        one = torch.zeros_like(out)
        one[:, j] = seed
        grads = torch.autograd.grad(
            out, edges, one, retain_graph=j < c - 1 or differentiable, create_graph=differentiable, allow_unused=True
        )
        with torch.set_grad_enabled(differentiable):
            for k, grad in zip(kept, grads, strict=True):
                if grad is not None:
                    k.add(j, grad, n)
    while kept:
        yield from kept.pop(0).blocks()


@dataclass
class _Cotangents:
    """What came back to one tap, gathered over the c outputs."""

    tap: Tap
    layout: Layout
    x: Tensor | None
    c: int
    differentiable: bool
    half: bool
    parts: dict[int, Any] = field(default_factory=dict)  # of outputs, where nothing is written into a buffer
    buffer: Tensor | None = None

    @staticmethod
    def of(tap: Tap, layout: Layout, n: int, c: int, differentiable: bool, half: bool) -> "_Cotangents":
        try:
            x = None if tap.input is None else _input(tap, layout, n)
        except (NoRule, RuntimeError) as e:
            raise NoRule(tap.names) from e
        return _Cotangents(tap, layout, x if x is None or differentiable else x.detach(), c, differentiable, half)

    def add(self, j: int, grad: Tensor, n: int) -> None:
        try:
            grad = self.layout.samples_first(grad, n)
        except NoRule as e:
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

    def blocks(self) -> Iterator[tuple[str, Block]]:
        if not self.parts:
            return
        if self.tap.rule.small:
            some: dict[str, Tensor] = next(iter(self.parts.values()))
            for name, g in some.items():
                each = [self.parts[j][name] if j in self.parts else torch.zeros_like(g) for j in range(self.c)]
                yield name, Dense(torch.cat(each, 1))
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

    def _blocks(self, d: Tensor) -> Iterator[tuple[str, Block]]:
        rule: Rule = self.tap.rule
        try:
            if isinstance(rule, Broadcast):
                rule = rule.aligned(len(self.tap.shape), self.layout.dim or 0)
            if self.tap.weight is not None:
                yield self.tap.weight, rule.weight(d if self.x is None else self.x, d)
            if self.tap.bias is not None:
                yield self.tap.bias, rule.bias(d)
        except (NoRule, IndexError, ValueError) as e:
            raise NoRule(self.tap.names) from e

    def _apply(self, d: Tensor) -> dict[str, Tensor]:
        return {name: block.expand() for name, block in self._blocks(d)}


def _input(tap: Tap, layout: Layout, n: int) -> Tensor:
    """The tap's input with the samples first; for a product with a broadcast operand, in the shape of the output."""
    x = tap.input
    assert x is not None
    if layout.dim is None:
        x = layout.repeat(x, n)
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


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for v in (*args, *kwargs.values()):
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from (w for w in v if isinstance(w, Tensor))


_DETACHED = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
_TRANSPOSE = {Tensor.t, Tensor.T.__get__, Tensor.mT.__get__, Tensor.transpose, torch.t, torch.transpose}  # type: ignore[attr-defined]


def _is_transpose(func: Any, args: Any, kwargs: Any) -> bool:
    if not isinstance(args[0], Tensor) or args[0].dim() != 2:
        return False
    dims = (*args[1:], *kwargs.values())
    return func not in (Tensor.transpose, torch.transpose) or {d % 2 for d in dims} == {0, 1}
