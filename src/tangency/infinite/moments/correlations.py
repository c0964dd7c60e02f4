"""Which operations give the moments of two nodes that meet, one on each side, where they share weights.

Values are linear in their last weights. Weights W that two nodes share give g = W a and g' = W a': jointly Gaussian
with covariance w_var·E[a a'], so that the nodes below meet in turn (Yang 2019, 2020: tensor programs without transposed
weights, whose gradients take weights for independent of the values). Different weights are independent.

What one node does linearly (sums, norms, positions) is done to its side alone, the later node first. Two operations
that are left, one on each side, must be the same: they act as on two samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from .attention import Attention
from .core import Activation, CentredActivation, Input, Op, RandomAffine
from .crossed import CorrelatedAdd, CorrelatedMultiply, Factored, JoinedSide, Means, Nothing, Placed, SameParameter
from .equal_ops import same_but_slots
from .gated import Gates
from .nongaussian import FewActivation
from .ops import Add, ByStatistic, Drawn, DropChannels, Mix, Multiply, Normalize, Rescale, SameRow, Weigh
from .positions import Aggregate, Join, Pad, Permute, Pool, PositionOp, Regrid, Resample, Spread, Take, Total
from .recursion import Meeting, Node
from .sampled import Sampled
from .sequences import Attend, Recur
from .values import Field, Rows
from .windowed import Windowed

# What acts on each side's positions by itself; windows and Trace sum over equal places of both.
SEPARATE = (Pool, Total, Permute, Regrid, Take, Spread, Resample, Pad, Aggregate)
FACTORS = (Weigh, Normalize, ByStatistic)
# Alike for every pair of positions, so that both sides may have other ones.
ELEMENTWISE = (Input, SameRow, RandomAffine, Activation)
# With weights of their own within.
LAYERS = (Attend, Recur, Gates)

NO_OWN = Meeting((), (), ())  # no own moments are read
Root = tuple[object, tuple[int, ...] | None]  # weights, and which rows of them, in order (None: all)
Roots = frozenset[Root]  # what a node is linear in


class NotKnown(Exception):
    """Two nodes are correlated, and their moments are not known; it says why, as a clause."""


class Item(NamedTuple):
    """A node; or (`own`) a trained scale or shift there by itself, which at the start changes no value."""

    node: int
    own: bool = False


class Remembered(Protocol):
    """As `fields.Memory`."""

    cuts: dict[int, tuple[Field, tuple[int, ...]]]
    shuffled: set[int]
    met: dict[tuple[Item, Item], int | None]
    roots: dict[int, Roots]
    means: dict[int, bool]


class Growing(Protocol):
    """A network that grows, as `fields.Builder`."""

    nodes: list[Node]
    name: str
    random: dict[int, object]
    passing: dict[int, object]
    trained: dict[int, object]

    @property
    def memory(self) -> Remembered:
        """What is remembered of its nodes."""


class Correlations:
    """What nodes of a network have in common; `meet` adds the operations that give it."""

    def __init__(self, build: Growing) -> None:
        self.build = build
        self._met, self._roots = build.memory.met, build.memory.roots

    def meet(self, j: int, k: int) -> int | None:
        """The node of the moments of node j on the first side with node k on the second; None: they are zero."""
        return self._meet(Item(j), Item(k))

    def related(self, j: int, k: int) -> bool:
        """Whether two nodes share weights, or a norm's trained scale or shift."""
        return _overlap(self.roots(Item(j)), self.roots(Item(k)))

    def with_itself(self, k: int) -> list[int]:
        """What a trained scale or shift at node k has in common with the values that pass it, which may hold it too."""
        if not self._moves(k):
            return []
        node, own = self._node(k), Item(k, own=True)
        before, (below,) = node.op, node.inputs
        assert isinstance(before, RandomAffine)
        found: list[int] = []
        for first in (True, False):
            part = self._meet(Item(below), own) if first else self._meet(own, Item(below))
            if part is not None and before.w_var != 1:
                by = Factored(Rescale(before.w_var**0.5), first, (node.grid, node.grid))
                part = self._add(by, [part], (node.grid, node.grid), NO_OWN)
            found += [] if part is None else [part]
        return found

    def holds(self, k: int, key: object) -> bool:
        """Whether values are linear in this trained scale or shift, or functions of what is."""
        return _overlap(self.roots(Item(k)), frozenset([_moved_by(key)]))

    # What is known of a node by its operations

    def roots(self, item: Item) -> Roots:
        """The weights that it is linear in, also those of activations below it."""
        if item.own:
            return frozenset([_moved_by(self.build.passing[item.node])])
        if item.node not in self._roots:
            self._roots[item.node] = self._find_roots(item.node)
        return self._roots[item.node]

    def _find_roots(self, k: int) -> Roots:
        node = self.build.nodes[k]
        if k in self.build.random:
            return frozenset([(self.build.random[k], None)])
        if isinstance(node.op, (Input, SameRow, Drawn)):
            return frozenset([(type(node.op), None)])
        # Attention is linear in its values, whatever its scores are.
        last = _branches(node)[2:] if isinstance(node.op, Attention) else _branches(node)
        below: Roots = frozenset().union(*(self.roots(Item(j)) for j in last))
        if k in self.build.memory.cuts:
            rows = self.build.memory.cuts[k][1]
            return frozenset((key, _rows(have, rows)) for key, have in below)
        if k in self.build.trained:
            return below | {_moved_by(self.build.trained[k])}
        return below | {_moved_by(self.build.passing[k])} if self._moves(k) else below

    def _moves(self, k: int) -> bool:
        """Whether it is a scale or shift that values pass, and that is trained."""
        op = self.build.nodes[k].op
        return k in self.build.passing and isinstance(op, RandomAffine) and bool(op.w_rate or op.b_rate)

    def centred(self, k: int) -> bool:
        """Whether the mean is zero for certain."""
        known = self.build.memory.means
        if k not in known:
            known[k] = not self._find_centred(k)
        return not known[k]

    def _find_centred(self, k: int) -> bool:
        node = self.build.nodes[k]
        op = node.op
        if k in self.build.random or isinstance(op, (SameRow, Drawn)):
            return not isinstance(op, (Recur, Gates)) or (isinstance(op, Recur) and op.dual.centered())
        if isinstance(op, (Input, FewActivation, Sampled, Windowed, CorrelatedMultiply)):
            return False
        if isinstance(op, CentredActivation):
            return not op.axes
        if isinstance(op, Activation):
            return op.dual.centered()
        each = [self.centred(j) for j in _branches(node)]
        if isinstance(op, Attention):
            return each[2]
        return any(each) if isinstance(op, Multiply) else all(each)

    # Meeting

    def _meet(self, a: Item, b: Item) -> int | None:
        if (a, b) not in self._met:
            self._met[a, b] = self._find(a, b)
        return self._met[a, b]

    def _find(self, a: Item, b: Item) -> int | None:
        if a == b and not a.own:
            return a.node
        shared = _overlap(self.roots(a), self.roots(b))
        if not shared and (a.own or b.own or self.centred(a.node) or self.centred(b.node)):
            return None
        direct = self._same_positions(a, b)
        if direct is not None:
            return self._both(a.node, b.node, [self.meet(*direct)], {})
        for item in sorted({a, b}, key=lambda i: -i.node):
            if self._linear(item):
                return self._one_sided(a, b, first=item == a)
        if a.own or b.own:
            return self._own_parts(a, b)
        return self._pair(a.node, b.node)

    def _node(self, k: int) -> Node:
        return self.build.nodes[k]

    def _same_positions(self, a: Item, b: Item) -> tuple[int, int] | None:
        """The inputs of two nodes that do the same to the same positions: both sides at once."""
        if a.own or b.own:
            return None
        j, k = self._node(a.node), self._node(b.node)
        if not isinstance(j.op, PositionOp) or j.op != k.op:
            return None
        (left,), (right,) = j.inputs, k.inputs
        return (left, right) if self._node(left).grid == self._node(right).grid else None

    def _linear(self, item: Item) -> bool:
        """Whether it is a linear function of others that one side does alone."""
        # Some channels, or all in another order, are not one by one those that they are made of.
        memory = self.build.memory
        if item.own or item.node in memory.shuffled or item.node in memory.cuts:
            return False
        op = self._node(item.node).op
        kinds = (*SEPARATE, *FACTORS, Rescale, DropChannels, Add, Join)
        return item.node in self.build.passing or isinstance(op, kinds)

    def _add(self, op: Op, inputs: Iterable[int], grids: tuple[tuple[int, ...], tuple[int, ...]], like: Meeting) -> int:
        """One node more, where sides with these positions meet."""
        name = self.build.name
        self.build.nodes.append(Node(op, tuple(inputs), name, grids[0], replace(like, grid=grids[1])))
        return len(self.build.nodes) - 1

    def _grids(self, a: Item, b: Item) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._node(a.node).grid, self._node(b.node).grid

    def _total(self, parts: Iterable[int | None], a: Item, b: Item) -> int | None:
        """The sum of what is not zero."""
        found = [p for p in parts if p is not None]
        if len(found) < 2:
            return found[0] if found else None
        return self._add(CorrelatedAdd(len(found)), found, self._grids(a, b), NO_OWN)

    def _one_sided(self, a: Item, b: Item, first: bool) -> int | None:
        """What one side's node does to the moments of what it is made of."""
        item, rest = (a, b) if first else (b, a)

        def meet(part: Item) -> int | None:
            """A part of this side with the other."""
            return self._meet(part, rest) if first else self._meet(rest, part)

        node, op = self._node(item.node), self._node(item.node).op
        if isinstance(op, Add):
            return self._total([meet(Item(j)) for j in _branches(node)], a, b)
        if isinstance(op, Join):
            return self._joined(a, b, first, [meet(Item(j)) for j in _branches(node)])
        below = meet(Item(node.inputs[0]))
        before = (self._node(node.inputs[0]).grid, self._node(rest.node).grid)
        before = before if first else before[::-1]
        by = op
        if item.node in self.build.passing:
            assert isinstance(op, RandomAffine)
            by = Rescale(op.w_var**0.5)
        if below is not None and not (isinstance(by, DropChannels) or by == Rescale(1.0)):
            like = Meeting(node.inputs if first else (), () if first else node.inputs, ())
            if isinstance(by, (PositionOp, Aggregate)):
                below = self._add(Placed(by, first, before), [below], self._grids(a, b), like)
            else:
                assert isinstance(by, (*FACTORS, Rescale))
                below = self._add(Factored(by, first, before), [below], self._grids(a, b), like)
        # A trained scale or shift is one more summand: zero, but it moves.
        own = meet(Item(item.node, own=True)) if self._moves(item.node) else None
        return self._total([below, own], a, b)

    def _joined(self, a: Item, b: Item, first: bool, parts: Sequence[int | None]) -> int | None:
        node = self._node((a if first else b).node)
        found = {k: p for k, p in enumerate(parts) if p is not None}
        if not found:
            return None
        assert isinstance(node.op, Join)
        axis = node.op.axis
        sizes = tuple(self._node(j).grid[axis] for j in _branches(node))
        grids = self._grids(a, b)
        return self._add(JoinedSide(axis, first, sizes, tuple(found), *grids), found.values(), grids, NO_OWN)

    def _own_parts(self, a: Item, b: Item) -> int | None:
        """A trained scale or shift by itself, with another or with a value that it is part of."""
        if a.own and b.own:
            # Their roots overlap, so they are the same parameter, or rows of it.
            self._check_rows(self.build.passing[a.node], self.build.passing[b.node])
            j, k = self._node(a.node), self._node(b.node)
            assert isinstance(j.op, RandomAffine)
            below = self._meet(Item(j.inputs[0]), Item(k.inputs[0])) if j.op.w_rate else None
            below = self._zeros(a.node, b.node) if below is None else below
            return self._add(SameParameter(j.op.w_rate, j.op.b_rate), [below], self._grids(a, b), NO_OWN)
        raise NotKnown("a trained scale or shift is in one, and within an activation in the other")

    def _zeros(self, j: int, k: int) -> int:
        grids = self._node(j).grid, self._node(k).grid
        return self._add(Nothing(*grids), [], grids, NO_OWN)

    def _pair(self, j: int, k: int) -> int | None:
        """Two nodes that no side does alone: both must be the same operation, or independent."""
        first, second = self._node(j), self._node(k)
        cuts, shuffled = self.build.memory.cuts, self.build.memory.shuffled
        if j in cuts and k in cuts:
            # The same rows of both, for disjoint ones have no roots in common.
            if cuts[j][1] != cuts[k][1]:
                raise NotKnown("one has other channels of a layer than the other")
            return self.meet(first.inputs[0], second.inputs[0])
        if {j, k} & (shuffled | cuts.keys()):
            raise NotKnown("one has the channels of the other in another order, or some of them")
        left, right, like = first.op, second.op, Meeting(first.inputs, second.inputs, ())
        slots = same_but_slots(left, right)
        if isinstance(left, Activation) and isinstance(right, Activation):
            both, same = self.meet(first.inputs[0], second.inputs[0]), self._same_scale(j, k)
            if both is None and not same:
                return self._add(Means(left.dual, right.dual), [], (first.grid, second.grid), like)
            if same_but_slots(left.dual, right.dual) is not None:
                return self._both(j, k, [both], {})
        if slots is None:
            raise NotKnown(f"one is {_words(left)}, the other {_words(right)}")
        if self.build.random.get(j) != self.build.random.get(k):
            raise NotKnown("both have means that are not zero")
        return self._both(
            j, k, [self.meet(m, n) for m, n in zip(_branches(first), _branches(second), strict=True)], slots
        )

    def _both(self, j: int, k: int, both: Sequence[int | None], slots: dict[int, int]) -> int | None:
        """The operation of both nodes, on what their inputs have in common."""
        first, second, op = self._node(j), self._node(k), self._node(j).op
        self._check_kind(j, k)
        like, grids = Meeting(first.inputs, second.inputs, (), tuple(slots.items())), (first.grid, second.grid)
        if isinstance(op, Mix):
            found = {n: p for n, p in enumerate(both) if p is not None}
            mixed = Mix(tuple(op.weights[n] for n in found))
            return self._add(mixed, found.values(), grids, like) if found else None
        if isinstance(op, (Multiply, Attention, Sampled, Windowed)):
            self._check_apart(first, second)
        nothing = all(p is None for p in both)
        if isinstance(op, FewActivation) and nothing:
            raise NotKnown("both have means that are not zero")
        needed = both if isinstance(op, Multiply) else both[2:] if isinstance(op, Attention) else ()
        linear = op.linear or (isinstance(op, RandomAffine) and not op.b_var and not op.b_rate)
        if any(p is None for p in needed) or (linear and nothing):
            return None
        if isinstance(op, Activation) and op.rate and not self._same_scale(j, k):
            op = replace(op, rate=0.0)  # scales of two norms: each moves its own side alone
        branches = zip(_branches(first), _branches(second), strict=True)
        inputs = [self._zeros(m, n) if p is None else p for p, (m, n) in zip(both, branches, strict=True)]
        return self._add(op, inputs, grids, like)

    def _same_scale(self, j: int, k: int) -> bool:
        """Whether two activations have one trained scale before them."""
        trained, left, right = self.build.trained, self._node(j), self._node(k)
        if j not in trained or k not in trained:
            return False
        scale = frozenset([_moved_by(trained[j])])
        if not _overlap(scale, frozenset([_moved_by(trained[k])])):
            return False
        self._check_rows(trained[j], trained[k])
        within = self.roots(Item(left.inputs[0])) | self.roots(Item(right.inputs[0]))
        if same_but_slots(left.op, right.op) is None or _overlap(scale, within):
            raise NotKnown("a trained scale is before an activation in both, and elsewhere in one")
        return True

    def _check_rows(self, a: object, b: object) -> None:
        if a != b:
            raise NotKnown("a trained scale or shift has other channels in one than in the other")

    def _check_kind(self, j: int, k: int) -> None:
        """Refuse what has no rule here, or other positions on both sides."""
        first, second, op = self._node(j), self._node(k), self._node(j).op
        kinds = (
            *ELEMENTWISE, *LAYERS, CentredActivation, FewActivation, Drawn, Mix, Multiply, Attention, Sampled, Windowed,
        )  # fmt: skip
        if not isinstance(op, kinds) and not op.linear:
            raise NotKnown(f"both are {_words(op)}")
        if self._scaled(j) or self._scaled(k):
            raise NotKnown(f"both are {_words(op)} with a parameter of each channel's own")
        elementwise = isinstance(op, ELEMENTWISE) and len(first.grid) == len(second.grid)
        grids = [tuple(self._node(j).grid for j in _branches(node)) for node in (first, second)]
        if not elementwise and (first.grid != second.grid or grids[0] != grids[1]):
            raise NotKnown(f"{_words(op)} has positions {first.grid} in one, {second.grid} in the other")

    def _scaled(self, k: int) -> bool:
        """Whether parameters of each channel's own are in it, of which it is not known whose they are."""
        op = self._node(k).op
        if isinstance(op, CentredActivation):
            return op.activation.rate > 0
        if isinstance(op, (Activation, FewActivation)):
            return op.rate > 0 and k not in self.build.trained
        if isinstance(op, Windowed):
            return any(s.own is not None or s.gain for s in op.sources)
        return (isinstance(op, Sampled) and any(op.gains)) or (
            isinstance(op, RandomAffine) and k not in self.build.random
        )

    def _check_apart(self, first: Node, second: Node) -> None:
        """The inputs of an operation on several are independent, and those of both nodes are but one by one."""
        left, right = _branches(first), _branches(second)
        for m, j in enumerate(left):
            for n, k in enumerate(right):
                if m != n and self.meet(j, k) is not None:
                    raise NotKnown(f"{_words(first.op)} takes in one what it takes in another place in the other")


def _moved_by(key: object) -> Root:
    """A trained scale or shift as a root; the channels that were taken have some rows of it."""
    return (("trained", key.source), key.numbers) if isinstance(key, Rows) else (("trained", key), None)


def _branches(node: Node) -> tuple[int, ...]:
    """The nodes that it is made of: not what is only measured (a norm's statistic), nor what those have in common."""
    if isinstance(node.op, CorrelatedMultiply):
        return node.inputs[:2]
    if isinstance(node.op, ByStatistic):
        return node.inputs[:1]
    if isinstance(node.op, CorrelatedAdd):
        return node.inputs[: node.op.count]
    if isinstance(node.op, Join):
        return node.inputs[: len(node.inputs) - len(getattr(node.op, "blocks", ()))]
    return node.inputs


def _words(op: Op) -> str:
    """An operation in a message."""
    if isinstance(op, FewActivation):
        return "an activation right after a few uniform weights (w_var as a number takes them for normal)"
    return f"{type(op.dual).__name__} of a layer" if isinstance(op, Activation) else type(op).__name__


def _rows(have: tuple[int, ...] | None, rows: Sequence[int]) -> tuple[int, ...]:
    """These of the rows that it has."""
    return tuple(rows) if have is None else tuple(have[r] for r in rows if r < len(have))


def _overlap(a: Roots, b: Roots) -> bool:
    if a & b:
        return True
    keys = {key for key, _ in a} & {key for key, _ in b}
    return bool(keys) and any(
        key == other and (rows is None or more is None or not set(rows).isdisjoint(more))
        for key, rows in a
        for other, more in b
    )
