"""The recursion of a network, which grows while its layers are read one after the other.

`Builder` makes fields (`values.py`): of known values, of weights, of what is not applied yet. What is done with fields
is in `functions.py` (elementwise functions and multiples), `joins.py` (sums, products, concatenation) and `shapes.py`
(positions).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedModule
from ..activations.dual import Dual, Relu
from ..activations.duals import Identity
from ..activations.quadrature import Quadrature
from .core import ROWS, SCALES, Activation, CentredActivation, Grid, Input, Op, RandomAffine, channel_products
from .correlations import Correlations, Item, NotKnown, Roots
from .crossed import CorrelatedAdd
from .equal_ops import same_but_slots
from .nongaussian import FewActivation, find_doubt, warn_once
from .ops import DRAWN, EXACT, BatchNormalize, Drawn, Rescale, SameRow
from .positions import Regrid
from .recursion import Node, Recursion
from .sampled import Sampled
from .values import (
    Field,
    Function,
    Joint,
    Lazy,
    Normed,
    Patched,
    Random,
    Seen,
    Squared,
    Statistic,
    Unsettled,
    Value,
    all_sources,
)
from .windowed import Windowed
from .windows import MOST, Parameters, Source, Windows


class FieldChanges(TypedDict, total=False):
    """What an operation may change of a field, beside its node."""

    shape: tuple[int, ...]
    channel: int
    gaussian: bool
    gain: float
    gained: object


@dataclass
class Memory:
    """What was made of which value, so that it is made once; and what is known of nodes beside their moments.

    A tensor goes by its id, and is kept so that no other one gets the same.
    """

    inputs: dict[tuple[int, int], tuple[Field, Tensor]] = field(default_factory=dict)  # by id and axis of the channels
    applied: dict[Lazy | Joint | Patched, Field] = field(default_factory=dict)
    normed: dict[tuple[Normed, object], Field] = field(default_factory=dict)  # by the function that follows
    gained: dict[int, Field] = field(default_factory=dict)  # by node
    scaled: set[int] = field(default_factory=set)  # of those nodes, multiples of Gaussian fields
    # A node as a function of Gaussian fields, or as one itself whose scale still waits.
    functions: dict[int, Joint | Patched | Field] = field(default_factory=dict)
    parts: dict[int, list[Random]] = field(default_factory=dict)  # what lies side by side in a node's channels
    maxima: dict["Random", tuple["Random", Windows]] = field(default_factory=dict)  # of which value, over which windows
    multiples: dict[int, tuple[Field, float]] = field(default_factory=dict)  # the Gaussian field that a node multiplies
    rows: dict[tuple[int, tuple[int, ...]], Field] = field(default_factory=dict)  # some channels of a node
    before: dict[int, Field] = field(default_factory=dict)  # of which field, not Gaussian, an operation made a node
    lazies: dict[int, Lazy] = field(default_factory=dict)  # a node as a function of one Gaussian field
    sums: dict[int, list[Random]] = field(default_factory=dict)  # what was added to a node of several laws
    orders: dict[int, tuple[int, ...]] = field(default_factory=dict)  # which of its parts' channels lie where in a node
    # Of which function which channels a function is: moments are those of the whole.
    wholes: dict[Lazy | Joint | Patched, tuple[Lazy | Joint | Patched, tuple[int, ...]]] = field(default_factory=dict)
    # Parameters of some channels by those, and of which ones and channels they are.
    parameters: dict[tuple[Parameters, tuple[int, ...]], Parameters] = field(default_factory=dict)
    shares: dict[Parameters, tuple[Parameters, tuple[int, ...]]] = field(default_factory=dict)
    squares: dict[Lazy, Random] = field(default_factory=dict)  # the value that a function is the square of
    # An activation less its mean over the channels, and over positions on these axes.
    centred: dict[tuple[Lazy, tuple[int, ...]], Field] = field(default_factory=dict)
    normed_nodes: set[int] = field(default_factory=set)  # nodes after a norm: parameters there are its scale and shift
    turned: dict[int, Seen] = field(default_factory=dict)  # a node as parts of one field's channels, turned
    copied: dict[int, Seen] = field(default_factory=dict)  # a node as copies of another, where it was expanded
    cuts: dict[int, tuple[Field, tuple[int, ...]]] = field(default_factory=dict)  # of which field a node is which rows
    dotted: set[int] = field(default_factory=set)  # products of which one factor is Gaussian with mean zero
    shuffled: set[int] = field(default_factory=set)  # nodes whose channels are those of their input in another order
    # For `correlations.py`: what two nodes have in common; the weights that a node is linear in; whether it has a mean.
    met: dict[tuple[Item, Item], int | None] = field(default_factory=dict)
    roots: dict[int, Roots] = field(default_factory=dict)
    means: dict[int, bool] = field(default_factory=dict)


class Claim(NamedTuple):
    """A parameter in use: by which layer, how, and the parameter itself, so that its place stays its own.

    `entries` says which of its numbers are used; None: all.
    """

    name: str
    use: object
    parameter: Tensor
    entries: Callable[[], Tensor] | None = None


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
    called: dict[object, list[Claim]] = field(default_factory=dict)  # by where parameters lie: who uses them, and how
    using: object = None  # the parameters of the layer that is being read; equal for one that is called again
    numbered: int = 0  # weights of that layer so far
    given: dict[object, tuple[Op, bool]] = field(default_factory=dict)  # by weights: their numbers, and whether few
    # Whose weights a node has: random ones, a trained scale or shift that values pass, or one within an activation.
    random: dict[int, object] = field(default_factory=dict)
    passing: dict[int, object] = field(default_factory=dict)
    trained: dict[int, object] = field(default_factory=dict)
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
        after = replace(new, node=self.add(op, (f,), new.grid))
        if not f.gaussian:
            self.memory.before[after.node] = f
        return after

    def of_this_layer(self, value: Random) -> Random:
        """A new function, with the name of the layer that makes it: it is applied when another one reads it."""
        return replace(value, layer=self.name) if isinstance(value, (Lazy, Joint, Patched)) else value

    def slot(self, value: Tensor) -> int:
        """Keep a known tensor, its sample axis last; its number."""
        self.known[len(self.known)] = value
        return len(self.known) - 1

    # Whose weights they are

    def identity(self, op: Op, few: bool = False) -> object:
        """The next weights of the layer at hand: the same where it is read again, with the same numbers."""
        if self.using is None:
            return object()
        key = (self.using, self.numbered)
        self.numbered += 1
        before, little = self.given.setdefault(key, (op, few))
        if little != few:
            raise self.unsupported(
                "shares its weights between the network's input and hidden values: the input keeps its number of "
                "features, hidden values have infinitely many.",
                "Put a layer with its own weights before the first use.",
            )
        if same_but_slots(before, op) is None:
            raise self.unsupported(
                f"shares its weights with another use, where they have other numbers or another form ({before}, {op}).",
                "Use them in one way, or give each use its own weights.",
            )
        return key

    def with_weights(self, op: Op, f: Field) -> tuple[int, frozenset[object]]:
        """One operation more that has weights, and what it is linear in."""
        key = self.identity(op, f.few)
        node = self.add(op, (f,), f.grid)
        self.random[node] = key
        return node, frozenset([key])

    def trained_pass(self, op: RandomAffine, f: Field, key: object) -> Field:
        """Values after a trained scale or shift, whose `key` says whose it is (None: not known)."""
        after = self.apply(op, f)
        if key is None:
            return after
        self.passing[after.node] = key
        # A norm that is called again, on values that hold its scale and shift already.
        try:
            common = Correlations(self).with_itself(after.node)
        except NotKnown as e:
            raise self.unsupported(
                f"is a norm whose trained scale or shift the values hold already: {e}.",
                "Freeze them (trainable=), or give each use a norm of its own.",
            ) from e
        if common:
            self.nodes.append(Node(CorrelatedAdd(1), (after.node, *common), self.name, f.grid))
            after = replace(after, node=len(self.nodes) - 1)
        return after

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
        return Field(
            node, shape, channel, gaussian=False, centered=False, sources=frozenset([node]), few=True, alike=False
        )

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
        if isinstance(self.nodes[f.node].op, SameRow):
            op = replace(op, means=ROWS)
        normal = op.laws == ("normal", "normal")
        law = None if normal else find_doubt(self.nodes, self.known, f.node, f.few, op, self.where)
        node, sources = self.with_weights(op, f)
        return Field(node, shape, f.channel, True, True, sources, doubt=law)

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
                op = RandomAffine(1.0, 0.0, value.gain, means=SCALES)
                reader, self.name = self.name, self.nodes[value.node].name  # it is the norm's, not the reader's
                free = replace(value, gain=0.0, gained=None, gaussian=False)
                memory.gained[value.node] = self.trained_pass(op, free, value.gained)
                self.name = reader
                if value.gaussian:
                    memory.scaled.add(memory.gained[value.node].node)
            return memory.gained[value.node]
        if isinstance(value, Normed):
            return self.batch_normed(value, None)
        if isinstance(value, (Squared, Statistic)):
            raise self._no_values(value)
        if value not in memory.applied:
            # Under the name of the layer that made it, not of the one that reads it.
            reader, self.name = self.name, value.layer or self.name
            memory.applied[value] = self._applied(value)
            self.name = reader
            if isinstance(value, Lazy) and not value.rate:
                memory.lazies[memory.applied[value].node] = value
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
        if value in self.memory.wholes:  # some of the channels: the moments are those of all
            whole, rows = self.memory.wholes[value]
            every = self.settled(whole)
            part = self.apply(Rescale(1.0), every, shape=value.shape, channel=value.channel)
            self.memory.cuts[part.node] = every, rows
            if not isinstance(value, Lazy):
                self.memory.functions[part.node] = value
            of = (value.of,) if isinstance(value, Lazy) else value.of
            return replace(part, sources=all_sources(f for f in of if isinstance(f, Field)))
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
        whose = f.gained or value.whose
        if whose is not None:
            if Correlations(self).holds(f.node, whose):
                raise self.unsupported(
                    "follows a norm whose trained scale the values hold already.",
                    "Freeze the scale (trainable=), or give each use a norm of its own.",
                )
            self.trained[after.node] = whose
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
        op = Windowed(value.fn, f"{self.where}, {value.label}", sources, self.samples, self.seed, value.core)
        known = () if value.known is None else (value.known,)
        node = self.add(op, (*value.fields, *known), value.at[0].grid)
        self.memory.functions[node] = value
        alike = all(f.alike for f in value.fields)
        return Field(node, value.shape, value.channel, False, False, all_sources(value.fields), alike=alike)

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


@lru_cache(maxsize=64)  # finding its kinks takes a second, and a network has many of one kind
def _scale_derivative(dual: Dual) -> Dual:
    """x φ'(x): what a scale before φ changes."""
    if dual.homogeneous:
        return dual  # x φ'(x) = φ(x)

    @torch.inference_mode(False)  # in which forward mode gives zero, without a word, before torch 2.12
    def scaled(x: Tensor) -> Tensor:
        """x φ'(x)."""
        x = x.clone() if x.is_inference() else x
        return torch.func.jvp(dual, (x,), (x,))[1]

    return Quadrature(scaled, name=f"x·{type(dual).__name__}'")
