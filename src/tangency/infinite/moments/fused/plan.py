"""Which networks go through the fused recursion, up to where: images, convolutions, activations, sums, mean pooling."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

from ...activations.dual import Rectifier
from ...activations.duals import Erf, Gelu, Identity
from ..core import Activation, Grid, Input, Moments, RandomAffine
from ..ops import Add, Rescale
from ..positions import Pool, Regrid, Total, Trace, Window
from ..recursion import Node, Recursion

DUALS = (Rectifier, Erf, Gelu, Identity)


@dataclass(frozen=True, eq=False)  # equal networks have one plan: `find_plan` keeps it
class Plan:
    """The nodes from the images to where positions end: a mean over all of them, or Flatten.

    `end` is the node of the recursion after which there is no grid; poolings down to one position are one mean here.
    """

    nodes: tuple[Node, ...]
    end: int

    @property
    def last(self) -> int:
        """The number of its last node."""
        return len(self.nodes) - 1

    @property
    def grid(self) -> Grid:
        """The height and width of the images."""
        return self.nodes[0].grid

    @property
    def flat(self) -> bool:
        """Whether equal positions alone count (Flatten), not all pairs of them."""
        return not isinstance(self.nodes[-1].op, Total)


class Met(NamedTuple):
    """Two sides: the moments where a plan ends, and the mean over positions and channels of the inputs' products."""

    moments: Moments
    products: Tensor


@lru_cache(maxsize=64)
def find_plan(recursion: Recursion) -> Plan | str:
    """The plan of a network, or the reason why it has none, as a clause: "max pooling is not among them"."""
    nodes = recursion.nodes
    end = next((k for k, node in enumerate(nodes) if not node.grid), None)
    if end is None:
        return "its positions are neither averaged nor flattened in the end"
    if not isinstance(nodes[0].op, Input) or len(nodes[0].grid) != 2:
        return f"its inputs are no images (positions: {nodes[0].grid})"
    if any(node.meeting is not None for node in nodes):
        return "it shares weights, or adds values that are correlated"
    if any(j < end for node in nodes[end + 1 :] for j in node.inputs) or any(
        isinstance(node.op, Input) for node in nodes[1:]
    ):
        return "it has several inputs, or a branch around the pooling"
    kept, pool = _ended(nodes[: end + 1]), 0
    for k, node in enumerate(kept[1:], 1):
        if min(node.inputs, default=-1) < pool:
            return f"{node.name or 'a layer'}: a branch around a pooling"
        pool = k if isinstance(node.op, Pool) else pool
        grids = [nodes[j].grid for j in node.inputs]
        why = _misfit(node, grids)
        if why is not None:
            return f"{node.name or 'a layer'}: {why}"
    return Plan(kept, end)


def _ended(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes, where poolings down to one position, one after the other, are a mean over all (or a sum)."""
    last = len(nodes) - 1
    first = last  # the first of them
    while first > 1 and nodes[first].inputs == (first - 1,) and isinstance(nodes[first - 1].op, Pool):
        first -= 1
    pools = [node.op.mean for node in nodes[first:last] if isinstance(node.op, Pool)]
    if not isinstance(nodes[last].op, Regrid) or len(set(pools)) != 1 or prod(nodes[last - 1].grid) > 1:
        return nodes
    # Windows that leave positions out are no mean over all; they are refused one by one.
    if any(_misfit(node, [nodes[j].grid for j in node.inputs]) for node in nodes[first:last]):
        return nodes
    return (*nodes[:first], replace(nodes[first], op=Total((0, 1), pools[0]), grid=()))


def _misfit(node: Node, grids: Iterable[Grid]) -> str | None:
    """Why an operation does not fit; None if it does."""
    op, before = node.op, next(iter(grids))
    if isinstance(op, RandomAffine | Rescale | Add):
        return None
    if isinstance(op, Total | Trace) or (isinstance(op, Regrid) and not node.grid):
        return "it joins one axis of positions and leaves the other" if node.grid else None
    if isinstance(op, Activation):
        if not isinstance(op.dual, DUALS):
            return f"{type(op.dual).__name__} has no closed form there"
        return "a scale of each channel's own is trained" if op.inner is not None and op.rate else None
    if isinstance(op, Window):
        return _misfit_window(op)
    if isinstance(op, Pool):
        plain = op.size == op.stride and not op.circular and not any(map(sum, op.padding))
        even = plain and all(n % k == 0 for n, k in zip(before, op.size, strict=True))
        return None if even else f"windows of {op.size} do not divide {before} positions without rest"
    return f"{type(op).__name__} is not among convolutions, activations, sums and mean pooling"


def _misfit_window(op: Window) -> str | None:
    if op.circular or prod(op.dilation) > 1:
        return "circular borders or dilation"
    same = all(k % 2 and pad == ((k - 1) // 2,) * 2 for k, pad in zip(op.size, op.padding, strict=True))
    if not same:
        return f"a window of {op.size} padded by {op.padding}, not by half of it"
    return None if max(op.size) <= 7 else f"a window of {op.size}, larger than 7"
