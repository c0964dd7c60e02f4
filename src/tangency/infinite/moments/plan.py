"""A network as a list of operations on moments, and the loop that runs it over pairs of samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from .ops import Input, Op
from .state import Here, Need, Pairs, Side, State

# Pairs of samples whose inputs' cosine is within this of ±1 are computed again from their difference (heuristic: the
# angle of the others is good to 1e-13).
NEAR = 1e-6
# Bytes of one state of samples one by one (heuristic).
SINGLES = 1 << 25


@dataclass(frozen=True)
class Node:
    """An operation, the nodes that it reads, the layer's name in the network, and the grid of its output."""

    op: Op
    inputs: tuple[int, ...]
    name: str
    grid: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Operations in order; the last one's output is the network's."""

    nodes: tuple[Node, ...]
    twin: bool = False  # the difference of two copies: zero at the start, the same tangent kernel

    def asked(self, output: Need, sides: bool) -> list[Need]:
        """How much of each node's covariance is asked for, from the output back; `sides`: for the own moments only."""
        needs = [Need.NOTHING] * len(self.nodes)
        needs[-1] = output
        for k in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[k]
            reads = node.op.reads(needs[k])
            if sides:
                reads = max(reads, node.op.own)
            for j in node.inputs:
                needs[j] = max(needs[j], reads)
        return needs

    @cached_property
    def output(self) -> Need:
        return Need.WHOLE if self.nodes[-1].grid else Need.DIAGONAL

    @cached_property
    def cross(self) -> list[Need]:
        return self.asked(self.output, sides=False)

    @cached_property
    def sides(self) -> list[Need]:
        return self.asked(Need.NOTHING, sides=True)

    @cached_property
    def batchwise(self) -> bool:
        """Whether the moments of one sample depend on the others of its batch (BatchNorm)."""
        return any(node.op.batchwise for node in self.nodes)

    @cached_property
    def featured(self) -> bool:
        return any(node.op.featured for node in self.nodes)

    @cached_property
    def exact_diagonal(self) -> bool:
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

    @cached_property
    def exact_near(self) -> bool:
        """Whether nearly equal inputs stay exact all the way: every operation carries their gap."""
        return all(node.op.carries_gap for node in self.nodes) and not any(
            need == Need.WHOLE and node.grid for need, node in zip(self.cross, self.nodes, strict=True)
        )

    def cell(self, needs: Sequence[Need] | None = None) -> int:
        """Numbers per pair of samples in the largest state (by default of all that the output needs)."""
        asked = zip(self.cross if needs is None else needs, self.nodes, strict=True)
        return max((prod(node.grid) ** (2 if need == Need.WHOLE else 1) for need, node in asked if need), default=1)

    def own(self) -> int:
        """Numbers per sample that a side keeps of its own moments."""
        total = 0
        for node in self.nodes:
            if node.op.own:
                total += sum(prod(self.nodes[j].grid) ** int(node.op.own) for j in node.inputs)
        return total

    @cached_property
    def last_use(self) -> list[int]:
        last = list(range(len(self.nodes)))
        for k, node in enumerate(self.nodes):
            for j in node.inputs:
                last[j] = k
        last[-1] = len(self.nodes)
        return last


def run(
    plan: Plan,
    pairs: Pairs,
    needs: Sequence[Need],
    tangent: bool,
    *,
    record: bool = False,
    inputs: list[Tensor] | None = None,
) -> State | None:
    """The output's moments for these pairs.

    `record`: keep each side's own moments where a layer reads them. `inputs` collects the inputs' own products.
    """
    states: dict[int, State] = {}
    last = plan.last_use
    for k, node in enumerate(plan.nodes):
        reads = node.op.reads(needs[k])
        if record:
            for j in node.inputs:
                if node.op.own and j in states:
                    _keep(pairs.a, j, states[j].at(node.op.own), pairs)
        if needs[k]:
            here = Here(pairs, node.inputs, needs[k], tangent)
            states[k] = node.op([states[j].at(reads) for j in node.inputs], here).at(needs[k])
            if inputs is not None and isinstance(node.op, Input):
                cov = states[k].cov
                inputs.append(cov.flatten(0, len(node.grid) - 1).mean(0) if node.grid else cov)
        for j in node.inputs:
            if last[j] == k:
                states.pop(j, None)
    return states.get(len(plan.nodes) - 1)


def _keep(side: Side, node: int, state: State, pairs: Pairs) -> None:
    """The own moments of a node, [*grid, n]; in a batchwise run they are its diagonal over samples."""
    own = state.cov if pairs.zipped else state.cov.diagonal(dim1=-2, dim2=-1)
    if node not in side.own or side.own[node].dim() < own.dim():
        side.own[node] = own


def prepared(plan: Plan, side: Side) -> Side:
    """The side with its own moments: what activations, norms and attention need to know of each sample alone."""
    if plan.batchwise:
        return side
    found = list(portions(plan, side, plan.sides))
    for part in found:
        run(plan, Pairs(part, part, zipped=True, same=True), plan.sides, tangent=False, record=True)
    if len(found) == 1:
        return found[0]
    own = {node: torch.cat([part.own[node] for part in found], -1) for node in found[0].own}
    return Side(side.known, side.size, side.energy, own)


def portions(plan: Plan, side: Side, needs: Sequence[Need]) -> Iterator[Side]:
    """The samples, so many at a time that their moments one by one take no more than SINGLES bytes."""
    step = max(1, SINGLES // (8 * plan.cell(needs)))
    return (side.rows(slice(k, k + step)) for k in range(0, side.size, step))


def near(cosines: Sequence[Tensor], pairs: Pairs, alone: Tensor | None) -> tuple[Tensor, ...] | None:
    """Which pairs have nearly parallel inputs (rows and columns, or places of pairs one by one); None if there is none.

    `alone`: where a sample meets itself, which is no such pair.
    """
    total = torch.stack(list(cosines)).sum(0) if len(cosines) > 1 else cosines[0]
    left, right = pairs.spread(pairs.a.energy, pairs.b.energy, 0, whole=False)
    close = total.square() >= (1 - NEAR) ** 2 * left * right
    if alone is not None:
        close &= ~alone
    return close.nonzero(as_tuple=True) if bool(close.any()) else None
