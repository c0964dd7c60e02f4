"""Building a plan: what a network's values are while its layers are read one after the other.

A value is known (a tensor: the input and what is computed from it without weights), a `Field` (random, known by its
moments), or `Lazy` (an elementwise function of a Field, not yet applied: functions compose before they are integrated).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedModule
from ..activations.duals import Dual, Identity, Relu
from ..activations.facts import centered, turned
from ..activations.quadrature import Quadrature
from .few import Doubt, FewActivation, doubt, either, warn
from .joint import Sampled
from .ops import Activation, Add, Affine, BatchNormalize, Drawn, Input, Mix, Multiply, Op, Same, Scale, Weigh, products
from .plan import Node, Plan
from .positions import Join, Regrid, Take, Trace


@dataclass(frozen=True)
class Field:
    """Infinitely many channels of one law, as a tensor [batch, *shape] with the channels on axis `channel` of shape."""

    node: int
    shape: tuple[int, ...]
    channel: int
    gaussian: bool
    centered: bool  # mean zero
    sources: frozenset[Any]  # the weights that it is linear in: two fields without a common one are uncorrelated
    gain: float = 0.0  # the rate of a scale of each channel's own that was just applied; not yet in the moments
    few: bool = False  # its channels stay as many as they are: inputs, and parameters used as values
    doubt: Doubt | None = None  # in what it is not Gaussian, though it is taken for it

    @property
    def grid(self) -> tuple[int, ...]:
        return (*self.shape[: self.channel], *self.shape[self.channel + 1 :])

    @property
    def width(self) -> int:
        return self.shape[self.channel]

    def axis(self, dim: int) -> int:
        """The grid's axis for an axis of shape that is not the channels'."""
        return dim - (dim > self.channel)


class _OfField:
    """Something of the form of the field that it is of."""

    of: Field

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def channel(self) -> int:
        return self.of.channel


@dataclass(frozen=True)
class Lazy(_OfField):
    """scale·φ(field), elementwise."""

    of: Field
    dual: Dual | None  # φ, where it is one known by itself
    fn: Callable[[Tensor], Tensor]
    scale: float = 1.0
    label: str = ""
    inner: Dual | None = None  # ∂φ/∂(a parameter of each channel's own), with its rate
    rate: float = 0.0


@dataclass(frozen=True)
class Joint:
    """g(u₁, …, u_r), elementwise, of several independent Gaussian fields."""

    of: tuple[Field, ...]
    fn: Callable[..., Tensor]
    label: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of[0].shape

    @property
    def channel(self) -> int:
        return self.of[0].channel


@dataclass(frozen=True)
class Normed(_OfField):
    """BatchNorm of a Gaussian field, waiting for what follows: ReLU, or something linear."""

    of: Field
    eps: float
    rates: tuple[float, float]  # of gamma and beta
    name: str


Random = Field | Lazy | Joint | Normed


@dataclass
class Builder:
    """The plan so far. `where` names the layer (and its line of code) that is being read, for messages."""

    size: int
    samples: int = 4096  # draws where an expectation has no closed form and no quadrature
    seed: int = 0
    nodes: list[Node] = field(default_factory=list)
    known: dict[int, Tensor] = field(default_factory=dict)
    energy: Tensor | None = None
    where: str = "the network"
    name: str = ""
    made: dict[Any, Any] = field(default_factory=dict)
    called: dict[Any, Any] = field(default_factory=dict)  # where parameters lie that were read, and in which layer
    numbers: list[float] = field(default_factory=list)  # factors and summands in forward(), in order
    warned: set[Any] = field(default_factory=set)  # what was said already, for this kernel
    mask: Tensor | None = None  # [n, *grid], True where a position of the values at hand is real

    def unsupported(self, what: str, instead: str) -> UnsupportedModule:
        return UnsupportedModule(f"{self.where}: {what} {instead}")

    def add(self, op: Op, inputs: Iterable[Field], grid: tuple[int, ...]) -> int:
        self.nodes.append(Node(op, tuple(f.node for f in inputs), self.name, grid))
        return len(self.nodes) - 1

    def same(self, op: Op, f: Field, **changes: Any) -> Field:
        """An operation that keeps the form: the field after it."""
        new = replace(f, **changes)
        return replace(new, node=self.add(op, (f,), new.grid))

    # Known values become fields

    def slot(self, value: Tensor) -> int:
        """Keep a known tensor, its sample axis last; its number."""
        self.known[len(self.known)] = value
        return len(self.known) - 1

    def field(self, value: Any, channel: int) -> Field:
        """The value as a field whose channels lie on axis `channel` of its shape (batch not counted)."""
        if not isinstance(value, Tensor):
            f = self.settled(value)
            if f.channel != channel % len(f.shape):
                raise self.unsupported(
                    f"takes its inputs along axis {channel % len(f.shape) + 1}, but the channels of what it is given "
                    f"lie on axis {f.channel + 1}; weights over positions have no infinite-width limit.",
                    "Move the channels there with transpose, or mix positions by pooling or attention.",
                )
            return f
        if value.dim() < 2:
            raise InputError(
                f"{self.where}: takes [samples, features]; it was given values of shape {tuple(value.shape)}."
            )
        channel %= value.dim() - 1
        key = ("input", id(value), channel)
        if key not in self.made:
            self.made[key] = (self._input(value, channel), value)  # the value too: its id stays its own
        found: Field = self.made[key][0]
        return found

    def _input(self, value: Tensor, channel: int) -> Field:
        if not value.is_floating_point():
            raise self.unsupported(
                f"reads {value.dtype} values as features.", "Cast them (x.double()), or use an Embedding."
            )
        shape = tuple(value.shape[1:])
        moved = value.double().movedim(0, -1).movedim(channel, -2)  # [*grid, channels, n]
        slot = self.slot(moved)
        energy = products(moved, moved, moved.dim() - 2, whole=False, zipped=True) / shape[channel]
        energy = energy.flatten(0, -2).mean(0) if energy.dim() > 1 else energy
        self.energy = energy if self.energy is None else self.energy + energy
        grid = (*shape[:channel], *shape[channel + 1 :])
        node = self.add(Input(slot, grid, shape[channel]), (), grid)
        return Field(node, shape, channel, gaussian=False, centered=False, sources=frozenset([node]), few=True)

    def table(self, index: Tensor, width: int, padding: int | None) -> Field:
        """An Embedding's rows for known indices, of unit variance."""
        grid = tuple(index.shape[1:])
        node = self.add(Same(self.slot(index.movedim(0, -1)), grid, padding), (), grid)
        return Field(node, (*grid, width), len(grid), True, True, sources=frozenset([node]), few=True)

    def drawn(self, shape: tuple[int, ...], channel: int) -> Field:
        """A parameter used as a value, of unit variance."""
        grid = (*shape[:channel], *shape[channel + 1 :])
        node = self.add(Drawn(grid), (), grid)
        return Field(node, shape, channel, True, True, sources=frozenset([node]), few=True)

    # Layers

    def affine(self, f: Field, width: int, op: Affine) -> Field:
        shape = (*f.shape[: f.channel], width, *f.shape[f.channel + 1 :])
        law = doubt(self.nodes, self.known, f.node, f.few, op, self.where)
        node = self.add(op, (f,), f.grid)
        return Field(node, shape, f.channel, True, True, sources=frozenset([node]), doubt=law)

    def doubted(self, f: Field) -> None:
        """Warn, once for each layer of a kernel, that these values are taken for Gaussian."""
        warn(f.doubt, self.warned)

    def elementwise(self, value: Random, fn: Callable[[Tensor], Tensor], dual: Dual | None, label: str) -> Random:
        """φ of a value; of an elementwise function, their composition."""
        if isinstance(dual, Identity):
            return value
        if isinstance(value, Normed):
            return self.batch_normed(value, dual)
        if isinstance(value, Lazy):
            if value.rate:
                raise self.unsupported("follows an activation with trained parameters.", "Put a layer between them.")
            inner, scale = value.fn, value.scale
            return Lazy(value.of, None, lambda x: fn(scale * inner(x)), label=f"{label}∘{value.label}")
        if isinstance(value, Joint):
            several = value.fn
            return Joint(value.of, lambda *x: fn(several(*x)), f"{label}∘{value.label}")
        parts = self.made.get(("parts", value.node))
        if parts is not None:  # channels side by side: each part by itself
            found = self.concat_channels([self.elementwise(p, fn, dual, label) for p in parts])
            return replace(found, shape=value.shape, channel=value.channel)
        joint = self.made.get(("joint", value.node))
        if joint is not None:
            return self.elementwise(joint, fn, dual, label)
        if not value.gaussian:
            raise self.unsupported(
                "is applied to values that are not Gaussian in the limit (a sum or product with an activation's "
                "output, a flattened or dropped-out layer).",
                "Put a Linear or Conv layer before it, or use the pre-activation form of the block.",
            )
        return Lazy(value, dual, fn, label=label)

    def settled(self, value: Any) -> Field:
        """The value as a field: what is lazy is applied now."""
        if isinstance(value, Field):
            return self._gained(value) if value.gain else value
        if isinstance(value, Normed):
            return self.settled(self.batch_normed(value, None))
        if isinstance(value, Joint):
            return self._sampled(value)
        assert isinstance(value, Lazy), f"{self.where}: {type(value).__name__} is no random value"
        key = ("lazy", id(value))
        if key not in self.made:
            dual = value.dual or Quadrature(value.fn, name=value.label)
            zero = centered(dual)
            inner = turned(dual) if value.of.gain else value.inner
            f = self.same(self._activation(value, dual, inner), value.of, centered=zero, **_AFTER)
            f = self.same(Scale(value.scale), f) if value.scale != 1 else f
            self.made[key] = (f, value)
        found: Field = self.made[key][0]
        return found

    def _activation(self, value: Lazy, dual: Dual, inner: Dual | None) -> Op:
        law, rate = value.of.doubt, value.of.gain or value.rate
        if law is not None and law.exact is not None and law.node == value.of.node and not value.of.gain:
            return FewActivation(law.exact, value.fn, value.inner, rate, self.samples, self.seed)
        self.doubted(value.of)
        return Activation(dual, inner, rate)

    def _gained(self, f: Field) -> Field:
        """A scale of each channel's own that nothing elementwise follows: its derivative is the value itself."""
        key = ("gained", f.node)
        if key not in self.made:
            self.made[key] = self.same(Affine(1.0, 0.0, f.gain), f, gain=0.0)
        found: Field = self.made[key]
        return found

    def _sampled(self, value: Joint) -> Field:
        """Its moments by quasi-random points; what follows elementwise is a function of the same fields."""
        key = ("joint", id(value))
        if key not in self.made:
            gains = tuple(f.gain for f in value.of)
            for f in value.of:
                self.doubted(f)
            node = self.add(Sampled(value.fn, value.label, gains, self.samples, self.seed), value.of, value.of[0].grid)
            f = replace(value.of[0], node=node, centered=False, sources=_sources(value.of), **_AFTER)
            self.made["joint", node] = value
            self.made[key] = (f, value)
        found: Field = self.made[key][0]
        return found

    def joined(self, values: list[Any], op: Callable[[Tensor, Tensor], Tensor]) -> Joint | None:
        """Values that are elementwise functions of independent Gaussian fields, as one function of all of them."""
        parts = [self.origin(v) for v in values]
        fields: list[Field] = []
        for part in parts:
            if part is None:
                return None
            fields += [f for f in part[0] if all(f.node != g.node for g in fields)]
        if any(a.sources & b.sources for k, a in enumerate(fields) for b in fields[:k]):
            return None
        places = [tuple(next(k for k, g in enumerate(fields) if g.node == f.node) for f in p[0]) for p in parts if p]
        fns = [p[1] for p in parts if p]

        def together(*x: Tensor) -> Tensor:
            found = [fn(*(x[k] for k in place)) for fn, place in zip(fns, places, strict=True)]
            total = found[0]
            for v in found[1:]:
                total = op(total, v)
            return total

        return Joint(tuple(fields), together, "joint")

    def origin(self, value: Any) -> tuple[tuple[Field, ...], Callable[..., Tensor]] | None:
        """The Gaussian fields that a value is an elementwise function of."""
        if isinstance(value, Field):
            value = value if value.gaussian else self.made.get(("joint", value.node))
        if isinstance(value, Field):
            before, factor = self.made.get(("multiple", value.node), (value, 1.0))
            return (before,), _itself if factor == 1 else lambda x: factor * x
        if isinstance(value, Lazy):
            fn, scale = value.fn, value.scale
            before, factor = self.made.get(("multiple", value.of.node), (value.of, 1.0))
            return (before,), lambda x: scale * fn(factor * x)
        return (value.of, value.fn) if isinstance(value, Joint) else None

    def batch_normed(self, value: Normed, dual: Dual | None) -> Field:
        if not (dual is None or isinstance(dual, Identity) or dual == Relu()):
            raise self.unsupported(
                f"follows BatchNorm ({value.name}); its limit is known for ReLU and for none only.",
                "Use ReLU there, or LayerNorm instead of BatchNorm.",
            )
        relu = dual == Relu()
        if relu:
            self.doubted(value.of)
        key = ("normed", id(value), relu)
        if key not in self.made:
            op = BatchNormalize(relu, value.eps, *value.rates)
            self.made[key] = (self.same(op, value.of, centered=not relu, **_AFTER), value)
        found: Field = self.made[key][0]
        return found

    def scaled(self, value: Random, factor: float) -> Random:
        """A multiple. That of a Gaussian field stays a function of it, for what is joined with it later."""
        if isinstance(value, Joint):
            fn = value.fn
            return replace(value, fn=lambda *x: factor * fn(*x))
        if isinstance(value, Lazy):
            return replace(value, scale=value.scale * factor)
        f = self.settled(value)
        found = self.same(Scale(factor), f)
        if f.gaussian:
            before, already = self.made.get(("multiple", f.node), (f, 1.0))
            self.made["multiple", found.node] = (before, already * factor)
        if f.doubt is not None and f.doubt.exact is not None and f.doubt.node == f.node:
            exact = replace(f.doubt.exact, factor=f.doubt.exact.factor * factor)
            found = replace(found, doubt=replace(f.doubt, exact=exact, node=found.node))
        return found

    def weighed(self, value: Random, weights: Tensor) -> Field:
        """Times a known tensor [n, *shape] that is the same for all channels."""
        f = self.settled(value)
        moved = weights.double().movedim(0, -1).select(f.channel, 0)
        return self.same(Weigh(self.slot(moved.expand(*f.grid, moved.shape[-1]))), f)

    def masked(self, value: Any) -> Any:
        """The value with zeros where no position is real."""
        if self.mask is None or isinstance(value, Tensor) or tuple(self.mask.shape[1:]) != self.settled(value).grid:
            return value
        return self.same(Weigh(self.slot(self.mask.double().movedim(0, -1))), self.settled(value))

    def uncorrelated(self, fields: list[Field], what: str) -> None:
        for k, a in enumerate(fields):
            for b in fields[:k]:
                if a.sources & b.sources:
                    raise self.unsupported(
                        f"{what} two values that share their last weights, so that they are correlated.",
                        "Put a Linear or Conv layer into one of the branches.",
                    )

    def fields(self, values: list[Any]) -> list[Field]:
        """Values as fields, known ones with the channels where the others have theirs."""
        channel = next((v.channel for v in values if not isinstance(v, Tensor)), None)
        if channel is None:
            raise self.unsupported("joins inputs.", "Put a layer with weights into one of the branches.")
        return [self.field(v, channel) if isinstance(v, Tensor) else self.settled(v) for v in values]

    def sum(self, values: list[Any]) -> Field:
        fields = self.fields(values)
        self.alike(fields, "adds")
        self.uncorrelated(fields, "adds")
        joint = None if all(f.gaussian for f in fields) else self.joined(values, torch.add)
        if sum(not f.centered for f in fields) > 1:
            if joint is not None:
                return self.settled(joint)
            raise self.unsupported(
                "adds two values whose means are not zero.", "Put a Linear or Conv layer after one of the activations."
            )
        node = self.add(Add(), fields, fields[0].grid)
        if joint is not None:
            self.made["joint", node] = joint
        sources = _sources(fields)
        every, zero = all(f.gaussian for f in fields), all(f.centered for f in fields)
        law = either([f.doubt for f in fields])
        return replace(fields[0], node=node, gaussian=every, centered=zero, sources=sources, few=False, doubt=law)

    def product(self, values: list[Any]) -> Field:
        fields = self.fields(values)
        self.alike(fields, "multiplies")
        self.uncorrelated(fields, "multiplies")
        node = self.add(Multiply(), fields, fields[0].grid)
        joint = self.joined(values, torch.mul)
        if joint is not None:
            self.made["joint", node] = joint
        sources = _sources(fields)
        zero = any(f.centered for f in fields)
        return replace(fields[0], node=node, centered=zero, sources=sources, **_AFTER)

    def concat_channels(self, values: Sequence[Any]) -> Field:
        """Channels side by side. An activation that follows is applied to each part by itself."""
        fields = self.fields(list(values))
        first, total = fields[0], sum(f.width for f in fields)
        node = self.add(Mix(tuple(f.width / total for f in fields)), fields, first.grid)
        self.made["parts", node] = [f if isinstance(v, Tensor) else v for f, v in zip(fields, values, strict=True)]
        shape = (*first.shape[: first.channel], total, *first.shape[first.channel + 1 :])
        return Field(node, shape, first.channel, False, all(f.centered for f in fields), _sources(fields))

    def concat_positions(self, fields: list[Field], axis: int) -> Field:
        """Positions side by side along an axis of the grid."""
        self.uncorrelated(fields, "joins")
        if sum(not f.centered for f in fields) > 1:
            raise self.unsupported("joins two values whose means are not zero.", "Put a layer after one of them.")
        first = fields[0]
        dim = axis + (axis >= first.channel)
        shape = (*first.shape[:dim], sum(f.shape[dim] for f in fields), *first.shape[dim + 1 :])
        grid = (*shape[: first.channel], *shape[first.channel + 1 :])
        node = self.add(Join(axis), fields, grid)
        every, zero = all(f.gaussian for f in fields), all(f.centered for f in fields)
        law = either([f.doubt for f in fields])
        return Field(node, shape, first.channel, every, zero, _sources(fields), doubt=law)

    def alike(self, fields: list[Field], what: str) -> None:
        if len({(f.shape, f.channel) for f in fields}) > 1:
            raise self.unsupported(
                f"{what} values of shapes {[f.shape for f in fields]}, channels on {[f.channel + 1 for f in fields]}.",
                "Give both the same shape: broadcasting of random values is not read.",
            )

    # Positions

    def flatten(self, f: Field, axes: tuple[int, ...]) -> Field:
        """Positions on `axes` of the grid become channels, at the place of the first axis that goes."""
        dims = [k for k in range(len(f.shape)) if k != f.channel]
        gone = sorted([f.channel, *(dims[a] for a in axes)])
        width = prod(f.shape[k] for k in gone)
        rest = [k for k in range(len(f.shape)) if k not in gone]
        channel = sum(k < gone[0] for k in rest)
        shape = [f.shape[k] for k in rest]
        shape.insert(channel, width)
        return self.same(Trace(axes), f, shape=tuple(shape), channel=channel, gaussian=f.gaussian and not axes)

    def regrid(self, f: Field, shape: tuple[int, ...], channel: int) -> Field:
        grid = (*shape[:channel], *shape[channel + 1 :])
        if grid == f.grid:
            return replace(f, shape=shape, channel=channel)
        return self.same(Regrid(grid), f, shape=shape, channel=channel)

    def take(self, f: Field, dim: int, index: tuple[int, ...], drop: bool) -> Field:
        """Positions along axis `dim` of shape."""
        shape = (*f.shape[:dim], *(() if drop else (len(index),)), *f.shape[dim + 1 :])
        channel = f.channel - (drop and dim < f.channel)
        return self.same(Take(f.axis(dim), index, drop), f, shape=shape, channel=channel)

    def _one_output(self, f: Field) -> Field:
        """Outputs with a single position have none."""
        return self.same(Regrid(()), f, shape=(f.width,), channel=0) if f.grid and prod(f.grid) == 1 else f

    def plan(self, value: Any, twin: bool = False) -> Plan:
        if isinstance(value, Tensor):
            raise InputError("the network's output does not depend on any weights, so it has no kernel.")
        self.settled(value)
        last = self._one_output(self.settled(value)).node
        if last != len(self.nodes) - 1:
            self.nodes.append(Node(Scale(1.0), (last,), "", self.nodes[last].grid))
        return Plan(tuple(self.nodes), twin)


# What follows an activation is not Gaussian, has all channels' number, and no scale that waits.
_AFTER: dict[str, Any] = {"gaussian": False, "gain": 0.0, "few": False, "doubt": None}


def _itself(x: Tensor) -> Tensor:
    return x


def _sources(fields: Iterable[Field]) -> frozenset[Any]:
    return frozenset().union(*(f.sources for f in fields))
