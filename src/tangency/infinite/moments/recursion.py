"""A network as a list of operations on moments, and the loop that runs them over pairs of samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from .core import Grid, Here, Input, Moments, Need, OneSide, Op, Pairs, Side

# Bytes of one node's moments of samples one by one (heuristic).
SINGLES = 1 << 25


@dataclass(frozen=True)
class Meeting:
    """Two nodes, one on each side: whose own moments each of them reads, and the second one's slots and grid."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    grid: Grid
    slots: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Node:
    """An operation, the nodes that it reads, the layer's name in the network, and the grid of its output.

    `meeting`: its moments are those of two nodes, one on each side (`crossed.py`).
    """

    op: Op
    inputs: tuple[int, ...]
    name: str
    grid: Grid
    meeting: Meeting | None = None


@dataclass(frozen=True)
class Recursion:
    """Operations in order; the last one's output is the network's. What follows from them is found once, here."""

    nodes: tuple[Node, ...]
    twin: bool = False  # the difference of two copies: zero at the start, the same tangent kernel
    cross: list[Need] = field(init=False, compare=False)  # how much of each node's covariance pairs of samples need
    sides: list[Need] = field(init=False, compare=False)  # and how much each sample alone, for activations and norms
    cell: int = field(init=False, compare=False)  # numbers per pair of samples in the largest node
    side_cell: int = field(init=False, compare=False)  # numbers per sample in the largest node, for each alone
    kept: int = field(init=False, compare=False)  # numbers per sample that a side keeps of its own moments
    last_use: list[int] = field(init=False, compare=False)  # the node that reads each one last
    batchwise: bool = field(init=False, compare=False)  # whether samples depend on others of their batch (BatchNorm)
    featured: bool = field(init=False, compare=False)  # whether pairs one by one are dear
    exact_near: bool = field(init=False, compare=False)  # whether nearly equal inputs stay exact all the way
    exact_diagonal: bool = field(init=False, compare=False)  # whether a sample meets itself as it does alone

    def __post_init__(self) -> None:
        nodes, output = self.nodes, Need.WHOLE if self.nodes[-1].grid else Need.DIAGONAL
        # What pairs of samples need does not depend on what each needs of itself: that was computed before.
        cross, sides = self._needs(output, False), self._needs(Need.NOTHING, True)
        facts = {
            "cross": cross,
            "sides": sides,
            "cell": self._largest(cross),
            "side_cell": self._largest(sides),
            "kept": sum(prod(nodes[j].grid) ** int(n.op.own) for n in nodes if _recorded(n) for j in n.inputs),
            "last_use": self._last_use(),
            "batchwise": any(n.op.batchwise for n in nodes),
            "featured": any(n.op.featured for n in nodes),
            "exact_near": all(n.op.carries_gap for n in nodes)
            and not any(need == Need.WHOLE and n.grid for need, n in zip(cross, nodes, strict=True)),
            "exact_diagonal": self._exact_diagonal(),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def _needs(self, output: Need, own: bool) -> list[Need]:
        """How much of each node's covariance is asked for, from the output back; `own`: for the own moments only."""
        needs = [Need.NOTHING] * len(self.nodes)
        needs[-1] = output
        for k in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[k]
            reads = node.op.reads(needs[k])
            if own and _recorded(node):
                reads = max(reads, node.op.own)
            for j in node.inputs:
                needs[j] = max(needs[j], reads)
        return needs

    def _largest(self, needs: Sequence[Need]) -> int:
        asked = zip(needs, self.nodes, strict=True)
        return max((_entries(node, need) for need, node in asked if need), default=1)

    def _last_use(self) -> list[int]:
        last = list(range(len(self.nodes)))
        for k, node in enumerate(self.nodes):
            for j in node.inputs:
                last[j] = k
        last[-1] = len(self.nodes)  # the output outlives the loop
        return last

    def _exact_diagonal(self) -> bool:
        """Whether a sample meets itself among others exactly as it does alone.

        The angle of two equal inputs turns rounding of 1e-16 into 1e-8, so no activation may follow what rounds.
        """
        rounded: set[int] = set()
        for k, node in enumerate(self.nodes):
            touched = any(j in rounded for j in node.inputs)
            if node.op.alone() or (node.op.own and touched):
                return False
            if touched or node.op.rounds():
                rounded.add(k)
        return True


def _entries(node: Node, need: Need) -> int:
    """Numbers per pair of samples, as much as is needed."""
    other = node.grid if node.meeting is None else node.meeting.grid
    return prod(node.grid) * (prod(other) if need == Need.WHOLE else 1)


def _recorded(node: Node) -> bool:
    """Whether a side keeps own moments for it. Where two nodes meet, those of each are kept for itself."""
    return node.op.own > Need.NOTHING and node.meeting is None


def propagate(
    recursion: Recursion,
    pairs: Pairs,
    needs: Sequence[Need],
    tangent: bool,
    *,
    record: bool = False,
    inputs: list[Tensor] | None = None,
    start: tuple[int, Moments] | None = None,
) -> Moments | None:
    """The output's moments for these pairs; None where `needs` does not ask for any.

    `record`: keep each side's own moments where a layer reads them. `inputs` collects the inputs' own products.
    `start`: a node, and its moments: only what follows is run.
    """
    moments: dict[int, Moments] = {} if start is None else {start[0]: start[1]}
    first = 0 if start is None else start[0] + 1
    for k, node in enumerate(recursion.nodes[first:], first):
        # Before the operation runs: its inputs are freed as soon as their last reader is done.
        if record and _recorded(node):
            for j in node.inputs:
                if j in moments:
                    pairs.keep_own(j, moments[j].at(node.op.own).cov)
        if needs[k]:
            reads = node.op.reads(needs[k])
            here = _here(recursion.nodes, node, pairs, needs[k], tangent)
            met = node.op([moments[j].at(reads) for j in node.inputs], here)
            if node.meeting is not None and node.meeting.grid != node.grid:
                met = replace(met, grid=node.grid, other=node.meeting.grid)
            moments[k] = met.at(needs[k])
            if inputs is not None and isinstance(node.op, Input) and node.meeting is None:
                cov = moments[k].at(Need.DIAGONAL).cov
                inputs.append(cov.flatten(0, len(node.grid) - 1).mean(0) if node.grid else cov)
        for j in node.inputs:
            if recursion.last_use[j] == k:  # memory: a node's moments go when the last of its readers is done
                moments.pop(j, None)
    return moments.get(len(recursion.nodes) - 1)


def _here(nodes: Sequence[Node], node: Node, pairs: Pairs, asked: Need, tangent: bool) -> Here:
    """What an operation may ask; where two nodes meet, a sample is never one with itself."""

    def side(inputs: tuple[int, ...]) -> OneSide:
        """The inputs with their grids."""
        return OneSide(inputs, tuple(nodes[j].grid for j in inputs))

    meeting = node.meeting
    if meeting is None:
        return Here(pairs, side(node.inputs), asked, tangent, node.op.own)
    pairs = replace(pairs, same=False, gaps=False)
    return Here(
        pairs, side(meeting.left), asked, tangent, node.op.own, side(meeting.right), dict(meeting.slots)
    )  # fmt: skip


def with_own_moments(recursion: Recursion, side: Side) -> Side:
    """The side with its own moments: what activations, norms and attention need to know of each sample alone."""
    if recursion.batchwise:
        return side
    parts = list(portions(side, recursion.side_cell))
    for part in parts:
        propagate(recursion, Pairs(part, part, zipped=True, same=True), recursion.sides, tangent=False, record=True)
    # One portion is the whole side: no copy.
    if len(parts) == 1:
        return parts[0]
    own = {node: torch.cat([part.own[node] for part in parts], -1) for node in parts[0].own}
    return replace(side, own=own)


def portions(side: Side, cell: int) -> Iterator[Side]:
    """The samples, so many at a time that moments of `cell` numbers for each take no more than SINGLES bytes."""
    step = max(1, SINGLES // (8 * cell))
    return (side.rows(slice(k, k + step)) for k in range(0, side.size, step))
