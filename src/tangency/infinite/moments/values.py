"""What a network's values are while its layers are read: known tensors, random fields, and what is not applied yet.

A value is known (a tensor: the input and what is computed from it without weights), a `Field` (random, known by its
moments), or not applied yet: `Lazy` (an elementwise function of a field: functions compose before they are integrated),
`Joint` (one of several fields), `Patched` (one of fields over windows of positions) and `Normed` (BatchNorm, which
waits for the activation that follows). `Seen` is any of them along other axes, such as channels split into heads;
`Squared` and `Statistic` are on their way to a mean over the channels, as norms written by hand take it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from torch import Tensor

from ..activations.dual import Dual
from .core import Grid
from .nongaussian import Doubt
from .windows import Core, Parameters, Windows

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
    gained: object = None  # whose scale it is
    few: bool = False  # its channels stay as many as they are: inputs, and parameters used as values
    doubt: Doubt | None = None  # in what it is not Gaussian, though it is taken for it
    through: frozenset[object] = frozenset()  # weights that it depends on channel by channel, though not correlated
    alike: bool = True  # whether its channels are of one law, so that some of them have the moments of all

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
        return replace(self, gaussian=False, centered=False, gain=0.0, gained=None, few=False, doubt=None)


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
    layer: str = ""  # the name of the layer that made it
    whose: object = None  # whose parameter it is


@dataclass(frozen=True, eq=False)
class Joint:
    """g(u₁, …, u_r), elementwise, of several independent Gaussian fields."""

    of: tuple[Field, ...]
    fn: Callable[..., Tensor]
    label: str = ""
    layer: str = ""

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

    g takes a tensor [K, ...] for each of them, K the entries of its windows. `core`: g is a function of a value z in
    between, whose moments are those of the field `known`.
    """

    of: tuple[Field | Parameters, ...]
    at: tuple[Windows, ...]
    fn: Callable[..., Tensor]
    shape: tuple[int, ...]
    channel: int
    label: str = ""
    core: Core | None = None
    known: Field | None = None
    layer: str = ""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields among what it is of."""
        return tuple(f for f in self.of if isinstance(f, Field))

    @property
    def width(self) -> int:
        """How many positions of its fields it depends on."""
        return sum(windows.size for f, windows in zip(self.of, self.at, strict=True) if isinstance(f, Field))

    def then(self, fn: Function, label: str) -> "Patched":
        """An elementwise function of it."""
        before, core = self.fn, self.core
        if core is not None:
            outer = core.outer
            core = replace(core, outer=lambda z, *x: fn(outer(z, *x)))
        return replace(self, fn=lambda *x: fn(before(*x)), core=core, label=label)


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


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight matrix by their numbers, in order, as the source of some of the channels that it gives."""

    source: object
    numbers: tuple[int, ...]


def correlated(a: Field, b: Field) -> bool:
    """Whether two fields share weights that they are linear in: different rows of one matrix are independent."""
    if a.sources & b.sources:
        return True
    return any(overlapping(s, t) for s in a.sources for t in b.sources)


def dependent(a: Field, b: Field) -> bool:
    """Whether a channel of one tells of the same channel of the other, correlated with it or not."""
    return any(overlapping(s, t) for s in a.sources | a.through for t in b.sources | b.through)


def overlapping(s: object, t: object) -> bool:
    """Whether two sources are of the same weights and have a row in common; a source that is no `Rows` has all."""
    if not isinstance(s, Rows) or not isinstance(t, Rows):
        return (s.source if isinstance(s, Rows) else s) == (t.source if isinstance(t, Rows) else t)
    return s.source == t.source and not set(s.numbers).isdisjoint(t.numbers)


def all_sources(fields: Iterable[Field]) -> frozenset[object]:
    """The weights that any of these is linear in."""
    return frozenset().union(*(f.sources for f in fields))


def laid(value: Random, shape: tuple[int, ...], channel: int) -> Random:
    """The value with its channels on this axis of this shape: no axis of the moments moves."""
    if isinstance(value, (Field, Patched)):
        return replace(value, shape=shape, channel=channel)
    if isinstance(value, Joint):
        return replace(value, of=tuple(replace(f, shape=shape, channel=channel) for f in value.of))
    assert isinstance(value, (Lazy, Normed))
    return replace(value, of=replace(value.of, shape=shape, channel=channel))
