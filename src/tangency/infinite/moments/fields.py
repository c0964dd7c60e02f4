"""A network's values while its layers are read one after the other, and the recursion that grows with them.

A value is known (a tensor: the input and what is computed from it without weights), a `Field` (random, known by its
moments), or not applied yet: `Lazy` (an elementwise function of a field: functions compose before they are integrated),
`Joint` (one of several fields), `Patched` (one of fields over windows of positions) and `Normed` (BatchNorm, which
waits for the activation that follows). `Seen` is any of them along other axes, such as channels split into heads.

`Builder` makes fields: of known values, of weights, of what is not applied yet. What is done with fields is in
`functions.py` (elementwise functions and multiples), `joins.py` (sums, products, concatenation) and `shapes.py`
(positions).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedModule
from ..activations.dual import Dual, Relu
from ..activations.duals import Identity
from ..activations.quadrature import Quadrature
from .core import Activation, CentredActivation, Grid, Input, Op, RandomAffine, channel_products
from .nongaussian import Doubt, FewActivation, find_doubt, warn_once
from .ops import DRAWN, EXACT, BatchNormalize, Drawn, Rescale, SameRow
from .positions import Regrid
from .recursion import Node, Recursion
from .sampled import Sampled
from .windows import MOST, Parameters, Source, Windowed, Windows

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Field:
    """Infinitely many channels of one law, as a tensor [batch, *shape] with the channels on axis `channel` of shape."""

    node: int
    shape: tuple[int, ...]
    channel: int
    gaussian: bool
    centered: bool  # mean zero
    sources: frozenset[object]  # the weights (nodes) that it is linear in: fields with none in common are uncorrelated
    gain: float = 0.0  # the rate of a scale of each channel's own that was just applied; not yet in the moments
    few: bool = False  # its channels stay as many as they are: inputs, and parameters used as values
    doubt: Doubt | None = None  # in what it is not Gaussian, though it is taken for it

    @property
    def grid(self) -> Grid:
        """The sizes of the axes of positions."""
        return (*self.shape[: self.channel], *self.shape[self.channel + 1 :])

    @property
    def width(self) -> int:
        """How many channels a finite network has here."""
        return self.shape[self.channel]

    def axis(self, dim: int) -> int:
        """The grid's axis for an axis of shape that is not the channels'."""
        return dim - (dim > self.channel)

    def activated(self) -> "Field":
        """The same after an activation: not Gaussian, as many channels as the limit has, no scale that waits."""
        return replace(self, gaussian=False, centered=False, gain=0.0, few=False, doubt=None)


class FieldChanges(TypedDict, total=False):
    """What an operation may change of a field, beside its node."""

    shape: tuple[int, ...]
    channel: int
    gaussian: bool
    gain: float


# Values that are not applied yet are told apart by identity (eq=False): each is applied once, and equal ones are two.


class _OfField:
    """Something of the form of the field that it is of."""

    of: Field

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the field."""
        return self.of.shape

    @property
    def channel(self) -> int:
        """The axis of the channels."""
        return self.of.channel


@dataclass(frozen=True, eq=False)
class Lazy(_OfField):
    """scale·φ(field), elementwise."""

    of: Field
    dual: Dual | None  # φ, where it is one known by itself
    fn: Function
    scale: float = 1.0
    label: str = ""
    inner: Dual | None = None  # ∂φ/∂(a parameter of each channel's own), with its rate
    rate: float = 0.0


@dataclass(frozen=True, eq=False)
class Joint:
    """g(u₁, …, u_r), elementwise, of several independent Gaussian fields."""

    of: tuple[Field, ...]
    fn: Callable[..., Tensor]
    label: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of each of its fields."""
        return self.of[0].shape

    @property
    def channel(self) -> int:
        """The axis of the channels."""
        return self.of[0].channel


@dataclass(frozen=True, eq=False)
class Patched:
    """g(u₁ over its window, …, w): of independent Gaussian fields, and of parameters of each channel's own.

    g takes a tensor [K, ...] for each of them, K the entries of its windows.
    """

    of: tuple[Field | Parameters, ...]
    at: tuple[Windows, ...]
    fn: Callable[..., Tensor]
    shape: tuple[int, ...]
    channel: int
    label: str = ""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields among what it is of."""
        return tuple(f for f in self.of if isinstance(f, Field))

    @property
    def width(self) -> int:
        """How many positions of its fields it depends on."""
        return sum(windows.size for f, windows in zip(self.of, self.at, strict=True) if isinstance(f, Field))


@dataclass(frozen=True, eq=False)
class Normed(_OfField):
    """BatchNorm of a Gaussian field, waiting for what follows: an activation, or something linear."""

    of: Field
    eps: float
    rates: tuple[float, float]  # of gamma and beta
    name: str


Kind = Literal["batch", "position", "channel", "copy", "query", "key"]


@dataclass(frozen=True)
class Atom:
    """A piece of a tensor's axis: the batch, an axis of positions or a factor of the channels, or a part of it.

    `place` is its place among those of its kind, in the order of the field: a part of (1,) is (1, 0) or (1, 1). A copy
    repeats what is there; queries and keys are those of attention's scores.
    """

    kind: Kind
    place: tuple[int, ...]
    size: int


Axes = tuple[tuple[Atom, ...], ...]  # of each axis of a tensor, in order; none where the size is 1


class Unsettled:
    """A value that is no field as it stands: a field along other axes, or attention's scores."""

    axes: Axes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The tensor's shape, the batch wherever it lies."""
        return tuple(prod(a.size for a in axis) for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the first axis, which is the batch's in most tensors."""
        return self.sizes[1:]

    @property
    def channel(self) -> int:
        """The last axis that has channels, the first of the tensor not counted."""
        last = len(self.axes) - 1
        return max((k for k, axis in enumerate(self.axes) if any(a.kind == "channel" for a in axis)), default=last) - 1

    def why(self) -> tuple[str, str]:
        """Why a layer cannot take it as it is, and what to do."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Turn:
    """A known matrix over the channels of each head, for each position: rotary embeddings are one.

    `matrix` is [*positions, after, before], positions in the field's order, each of its size or 1. `atoms` are the
    channels after it; they stay together on one axis.
    """

    matrix: Tensor
    atoms: tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class Seen(Unsettled):
    """A random value along other axes than its own: its channels split over several, its batch elsewhere than first.

    Nothing is computed for it; where its axes are again batch, positions and all channels, it is the field (`axes.py`).
    """

    of: "Random"
    axes: Axes
    turn: Turn | None = None

    def why(self) -> tuple[str, str]:
        """As `Unsettled.why`."""
        if self.turn is not None:
            return (
                "takes values whose channels were each multiplied by a known number, or turned with others.",
                "Rotary embeddings and the like have a rule for queries and keys alone.",
            )
        words = " × ".join("·".join(f"{a.kind} {a.size}" for a in axis) or "1" for axis in self.axes)
        return (
            f"takes values with the batch first and all channels on one axis; it was given the axes {words}.",
            "Bring them back with transpose and reshape before it, as attention does when it joins its heads.",
        )


@dataclass(frozen=True, eq=False)
class Squared(_OfField):
    """h² of values that are not Gaussian: its mean over the channels is known, what follows elementwise is not."""

    of: Field


@dataclass(frozen=True, eq=False)
class Statistic:
    """A function of E[h²], the mean over infinitely many channels (and over positions on `axes`): a known number.

    `mean_of` is set where it is a mean over the channels itself, of that value. `kept`: the channels' axis is there,
    of size 1.
    """

    of: Field
    axes: tuple[int, ...]  # of the field's grid
    fn: Function
    kept: bool = True
    mean_of: "Random | None" = None
    where: str = ""  # the line that made it, for messages

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the field, with size 1 where means were taken."""
        f = self.of
        sizes = [1 if k == f.channel or f.axis(k) in self.axes else n for k, n in enumerate(f.shape)]
        return tuple(n for k, n in enumerate(sizes) if self.kept or k != f.channel)

    @property
    def channel(self) -> int:
        """The axis of the field's channels."""
        return self.of.channel

    def then(self, fn: Function) -> "Statistic":
        """A function of it."""
        before = self.fn
        return replace(self, fn=lambda v: fn(before(v)), mean_of=None)


Random = Field | Lazy | Joint | Patched | Normed | Unsettled | Squared | Statistic
Value = Tensor | Random


@dataclass
class Memory:
    """What was made of which value, so that it is made once; and what is known of nodes beside their moments.

    A tensor goes by its id, and is kept so that no other one gets the same.
    """

    inputs: dict[tuple[int, int], tuple[Field, Tensor]] = field(default_factory=dict)  # by id and axis of the channels
    applied: dict[Lazy | Joint | Patched, Field] = field(default_factory=dict)
    normed: dict[tuple[Normed, object], Field] = field(default_factory=dict)  # by the function that follows
    gained: dict[int, Field] = field(default_factory=dict)  # by node
    functions: dict[int, Joint | Patched] = field(default_factory=dict)  # a node as a function of Gaussian fields
    parts: dict[int, list[Random]] = field(default_factory=dict)  # what lies side by side in a node's channels
    maxima: dict["Random", tuple["Random", Windows]] = field(default_factory=dict)  # of which value, over which windows
    multiples: dict[int, tuple[Field, float]] = field(default_factory=dict)  # the Gaussian field that a node multiplies
    rows: dict[tuple[int, int], Field] = field(default_factory=dict)  # some channels of a node, by their bits
    squares: dict[Lazy, Random] = field(default_factory=dict)  # the value that a function is the square of
    # An activation less its mean over the channels, and over positions on these axes.
    centred: dict[tuple[Lazy, tuple[int, ...]], Field] = field(default_factory=dict)
    normed_nodes: set[int] = field(default_factory=set)  # nodes after a norm: parameters there are its scale and shift
    cuts: dict[int, tuple[Field, tuple[int, ...]]] = field(default_factory=dict)  # of which field a node is which rows


@dataclass
class Builder:
    """The recursion so far. `where` names the layer (and its line of code) that is being read, for messages."""

    size: int  # samples in the batch at hand
    samples: int = 4096  # draws where an expectation has no closed form and no quadrature
    seed: int = 0
    nodes: list[Node] = field(default_factory=list)
    known: dict[int, Tensor] = field(default_factory=dict)  # by slot, samples last
    energy: Tensor | None = None  # [n]: the mean square of each sample's inputs, summed over those that are read
    where: str = "the network"
    name: str = ""
    memory: Memory = field(default_factory=Memory)
    called: dict[object, tuple[str, Tensor]] = field(default_factory=dict)  # where read parameters lie; by which layer
    numbers: list[float] = field(default_factory=list)  # factors and summands in forward(), in order
    warned: set[object] = field(default_factory=set)  # what was said already, for this kernel
    mask: Tensor | None = None  # [n, *grid], True where a position of the values at hand is real

    def unsupported(self, what: str, instead: str) -> UnsupportedModule:
        """The error to raise for something that has no rule, and what to do instead."""
        return UnsupportedModule(f"{self.where}: {what} {instead}")

    def add(self, op: Op, inputs: Iterable[Field], grid: Grid) -> int:
        """One operation more; its node."""
        self.nodes.append(Node(op, tuple(f.node for f in inputs), self.name, grid))
        return len(self.nodes) - 1

    def apply(self, op: Op, f: Field, **changes: Unpack[FieldChanges]) -> Field:
        """The field after an operation, which keeps its form but for `changes`."""
        new = replace(f, **changes)
        return replace(new, node=self.add(op, (f,), new.grid))

    def slot(self, value: Tensor) -> int:
        """Keep a known tensor, its sample axis last; its number."""
        self.known[len(self.known)] = value
        return len(self.known) - 1

    # Known values and weights become fields

    def field(self, value: Value, channel: int) -> Field:
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
        # −1 is the last axis, and the same field as its number.
        channel %= value.dim() - 1
        key = (id(value), channel)
        if key not in self.memory.inputs:
            self.memory.inputs[key] = (self._input(value, channel), value)
        return self.memory.inputs[key][0]

    def _input(self, value: Tensor, channel: int) -> Field:
        if not value.is_floating_point():
            fix = "Cast them (x.double()), or use an Embedding."
            if value.is_complex():
                fix = "Give real numbers: x.abs(), or both parts as features, torch.view_as_real(x)."
            raise self.unsupported(f"reads {value.dtype} values as features.", fix)
        shape = tuple(value.shape[1:])
        moved = value.double().movedim(0, -1).movedim(channel, -2)  # [*grid, channels, n]
        energy = channel_products(moved, moved, moved.dim() - 2, whole=False, zipped=True) / shape[channel]
        # The mean over positions, as `propagate` collects the products of inputs: together they give the cosine.
        energy = energy.flatten(0, -2).mean(0) if energy.dim() > 1 else energy
        self.energy = energy if self.energy is None else self.energy + energy
        grid = (*shape[:channel], *shape[channel + 1 :])
        node = self.add(Input(self.slot(moved), grid, shape[channel]), (), grid)
        return Field(node, shape, channel, gaussian=False, centered=False, sources=frozenset([node]), few=True)

    def table(self, index: Tensor, width: int, padding: int | None) -> Field:
        """An Embedding's rows for known indices, of unit variance."""
        grid = tuple(index.shape[1:])
        node = self.add(SameRow(self.slot(index.movedim(0, -1)), grid, padding), (), grid)
        return Field(node, (*grid, width), len(grid), True, True, sources=frozenset([node]), few=True)

    def drawn(self, shape: tuple[int, ...], channel: int) -> Field:
        """A parameter used as a value, of unit variance."""
        grid = (*shape[:channel], *shape[channel + 1 :])
        node = self.add(Drawn(grid), (), grid)
        return Field(node, shape, channel, True, True, sources=frozenset([node]), few=True)

    def affine(self, f: Field, width: int, op: RandomAffine) -> Field:
        """The field after weights and biases: Gaussian, for a sum over infinitely many channels."""
        shape = (*f.shape[: f.channel], width, *f.shape[f.channel + 1 :])
        normal = op.laws == ("normal", "normal")
        law = None if normal else find_doubt(self.nodes, self.known, f.node, f.few, op, self.where)
        node = self.add(op, (f,), f.grid)
        return Field(node, shape, f.channel, True, True, sources=frozenset([node]), doubt=law)

    # What is not applied yet becomes a field

    def settled(self, value: Random) -> Field:
        """The value as a field: what is lazy is applied now."""
        memory = self.memory
        if isinstance(value, Unsettled):
            raise self.unsupported(*value.why())
        if isinstance(value, Field):
            if not value.gain:
                return value
            if value.node not in memory.gained:
                # Nothing elementwise follows: the scale's derivative is the value. If something did, it would be of
                # the same channel's value, not independent of it, so this is no Gaussian field to be activated.
                op = RandomAffine(1.0, 0.0, value.gain)
                memory.gained[value.node] = self.apply(op, value, gain=0.0, gaussian=False)
            return memory.gained[value.node]
        if isinstance(value, Normed):
            return self.batch_normed(value, None)
        if isinstance(value, (Squared, Statistic)):
            raise self._no_values(value)
        if value not in memory.applied:
            memory.applied[value] = self._applied(value)
        return memory.applied[value]

    def _no_values(self, value: Squared | Statistic) -> UnsupportedModule:
        """The refusal of a mean over the channels that is used otherwise than by a norm."""
        if isinstance(value, Squared):
            return self.unsupported(
                "squares values that are not Gaussian in the limit.",
                "Put a Linear or Conv layer before it; only the mean of squares over the channels is known.",
            )
        return UnsupportedModule(
            f"{value.where or self.where}: takes a mean over the channels, which is one fixed read-out: a constant in "
            "the limit. Use a Linear layer; for a norm, multiply values of the same shape by it (keepdim=True)."
        )

    def centred(self, value: Lazy, axes: tuple[int, ...] = ()) -> Field:
        """An activation less its mean over the channels, and over positions on `axes`, as norms subtract it."""
        dual = value.dual or Quadrature(value.fn, name=value.label)
        if dual.centered():
            return self.settled(value)
        if (value, axes) not in self.memory.centred:
            f = value.of
            self.warn(f)
            inner = _scale_derivative(dual) if f.gain else value.inner
            op = CentredActivation(Activation(dual, inner, f.gain or value.rate), axes)
            after = self.apply(op, f.activated())
            after = self.apply(Rescale(value.scale), after) if value.scale != 1 else after
            # With positions, the mean of each may differ from that of all, which is subtracted.
            self.memory.centred[value, axes] = replace(after, centered=not axes)
        return self.memory.centred[value, axes]

    def _applied(self, value: Lazy | Joint | Patched) -> Field:
        if isinstance(value, Patched):
            return self._patched(value)
        return self._sampled(value) if isinstance(value, Joint) else self._activated(value)

    def _activated(self, value: Lazy) -> Field:
        f, dual = value.of, value.dual or Quadrature(value.fn, name=value.label)
        rate, law = f.gain or value.rate, f.doubt
        # The law of few weights is known exactly only for the values that they gave, untouched since.
        if law is not None and law.exact is not None and law.node == f.node and not f.gain:
            op: Op = FewActivation(law.exact, value.fn, value.inner, rate, self.samples, self.seed)
        else:
            self.warn(f)
            op = Activation(dual, _scale_derivative(dual) if f.gain else value.inner, rate)
        after = self.apply(op, f.activated())
        after = self.apply(Rescale(value.scale), after) if value.scale != 1 else after
        return replace(after, centered=dual.centered())

    def _sampled(self, value: Joint) -> Field:
        """Its moments by quasi-random points; what follows elementwise is a function of the same fields."""
        for f in value.of:
            self.warn(f)
        # Scales that were just applied to the fields are parameters too: their rates go along.
        op = Sampled(value.fn, value.label, tuple(f.gain for f in value.of), self.samples, self.seed)
        node = self.add(op, value.of, value.of[0].grid)
        self.memory.functions[node] = value
        return replace(value.of[0].activated(), node=node, sources=all_sources(value.of))

    def _patched(self, value: Patched) -> Field:
        """Its moments by quasi-random points, over all pairs of windows; what follows is a function of the same."""
        if prod(value.at[0].grid) > MOST:
            raise self.unsupported(
                f"follows a function of windows of positions ({value.label}) at {prod(value.at[0].grid)} places; the "
                f"moments of all their pairs are drawn for up to {MOST}.",
                "Give smaller images, or average pooling in place of max pooling.",
            )
        for f in value.fields:
            self.warn(f)
        sources = tuple(
            Source(windows, gain=f.gain) if isinstance(f, Field) else Source(windows, f)
            for f, windows in zip(value.of, value.at, strict=True)
        )
        op = Windowed(value.fn, f"{self.where}, {value.label}", sources, self.samples, self.seed)
        node = self.add(op, value.fields, value.at[0].grid)
        self.memory.functions[node] = value
        return Field(node, value.shape, value.channel, False, False, all_sources(value.fields))

    def batch_normed(self, value: Normed, dual: Dual | None, fn: Function | None = None) -> Field:
        """BatchNorm and the activation that follows it: exactly for ReLU and for none, other functions by points."""
        f, linear, relu = value.of, (dual is None and fn is None) or isinstance(dual, Identity), dual == Relu()
        rows = self.size * prod(f.grid)
        if f.grid and rows > DRAWN:
            raise self.unsupported(
                f"normalises {self.size} samples with {prod(f.grid)} positions each, {rows} numbers of a channel; the "
                f"limit is computed for up to {DRAWN}.",
                "Give fewer samples or smaller images, use GroupNorm(1, …), or model.eval() for running statistics.",
            )
        if not linear:
            self.warn(f)
        key = (value, None if linear else "relu" if relu else fn)
        if key not in self.memory.normed:
            drawn = None if linear or (relu and (rows <= EXACT or not f.grid)) else fn
            op = BatchNormalize(relu, value.eps, *value.rates, len(f.grid) > 0, drawn, self.samples, self.seed)
            self.memory.normed[key] = replace(self.apply(op, f.activated()), centered=linear)
        return self.memory.normed[key]

    def warn(self, f: Field) -> None:
        """Warn, once for each layer of a kernel, that these values are taken for Gaussian."""
        if f.doubt is not None:
            warn_once(f.doubt, self.warned)

    def recursion(self, value: Value, twin: bool = False) -> Recursion:
        """All operations up to the network's output."""
        if isinstance(value, Tensor):
            raise InputError("the network's output does not depend on any weights, so it has no kernel.")
        if isinstance(value, Unsettled):
            self.where = "the network's output"
        f = self.settled(value)
        if f.grid and prod(f.grid) == 1:  # outputs with a single position have none
            f = self.apply(Regrid(()), f, shape=(f.width,), channel=0)
        if f.node != len(self.nodes) - 1:  # the output must be the last node
            self.nodes.append(Node(Rescale(1.0), (f.node,), "", self.nodes[f.node].grid))
        return Recursion(tuple(self.nodes), twin)


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight matrix (as bits of a number), as the source of some of the channels that it gives."""

    source: object
    bits: int


def correlated(a: Field, b: Field) -> bool:
    """Whether two fields share weights that they are linear in: different rows of one matrix are independent."""
    if a.sources & b.sources:
        return True
    # −1 has all bits: all rows.
    left, right = ([(s.source, s.bits) if isinstance(s, Rows) else (s, -1) for s in f.sources] for f in (a, b))
    return any(s == t and m & n for s, m in left for t, n in right)


def all_sources(fields: Iterable[Field]) -> frozenset[object]:
    """The weights that any of these is linear in."""
    return frozenset().union(*(f.sources for f in fields))


@lru_cache(maxsize=64)  # finding its kinks takes a second, and a network has many of one kind
def _scale_derivative(dual: Dual) -> Dual:
    """x φ'(x): what a scale before φ changes."""
    if dual.homogeneous:
        return dual  # x φ'(x) = φ(x)
    return Quadrature(lambda x: torch.func.jvp(dual, (x,), (x,))[1], name=f"x·{type(dual).__name__}'")
