"""Second moments of a wide network's hidden values: what an infinite-width kernel is computed from.

A hidden layer with infinitely many channels is known by its covariance over inputs and positions, the same for every
channel. A `State` holds it for the pairs of samples at hand, positions first and samples last: `cov[s, t, i, j]` is
that of sample i at position s with sample j at position t. So a shift of positions moves whole blocks of pairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod

import torch
from torch import Tensor


class Need(IntEnum):
    """How much of the covariance over positions is asked for."""

    NOTHING = 0
    DIAGONAL = 1  # cov[s, s]
    WHOLE = 2  # cov[s, t]


@dataclass(frozen=True)
class State:
    """Moments at one place in the network: [*grid, *pairs], or [*grid, *grid, *pairs] if whole.

    `pairs` is [n, m], or [n] where samples meet one by one. `ntk` None is zero: nothing trained lies below. `gap` is
    (p + q)/2 − cov, kept beside cov only where inputs nearly coincide and it is known without cancellation.
    """

    cov: Tensor
    ntk: Tensor | None
    grid: tuple[int, ...]
    whole: bool = False
    gap: Tensor | None = None

    def at(self, need: Need) -> "State":
        """As much as is needed of it."""
        return self.diagonal() if self.whole and need < Need.WHOLE else self

    def diagonal(self) -> "State":
        return replace(self.map(lambda v: diagonal(v, self.grid), self.grid), whole=False)

    def map(self, linear: Callable[[Tensor], Tensor], grid: tuple[int, ...] | None = None) -> "State":
        """What is linear in the covariance does the same to all three."""
        ntk = None if self.ntk is None else linear(self.ntk)
        gap = None if self.gap is None else linear(self.gap)
        return State(linear(self.cov), ntk, self.grid if grid is None else grid, self.whole, gap)


def diagonal(v: Tensor, grid: tuple[int, ...]) -> Tensor:
    """[*grid, *grid, ...] at equal positions: [*grid, ...]."""
    pairs = v.shape[2 * len(grid) :]
    size = prod(grid)
    return v.reshape(size, size, *pairs).diagonal(dim1=0, dim2=1).movedim(-1, 0).reshape(*grid, *pairs)


def embed(v: Tensor, grid: tuple[int, ...]) -> Tensor:
    """[*grid, ...] put at equal positions of zeros [*grid, *grid, ...]."""
    pairs, size = v.shape[len(grid) :], prod(grid)
    flat = v.reshape(size, *pairs)
    out = flat.new_zeros(size, size, *pairs)
    each = torch.arange(size, device=v.device)
    return out.index_put((each, each), flat).reshape(*grid, *grid, *pairs)


@dataclass
class Side:
    """One batch: its known tensors by slot, and its own moments where a layer reads them. Samples are the last axis."""

    known: Mapping[int, Tensor]
    size: int
    energy: Tensor  # [n]: the mean square of its inputs, summed over the slots
    own: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, index: slice | Tensor) -> "Side":
        known = {slot: _chosen(v, index) for slot, v in self.known.items()}
        own = {node: _chosen(v, index) for node, v in self.own.items()}
        energy = self.energy[index]
        return Side(known, len(energy), energy, own)

    def tensors(self) -> list[Tensor]:
        return [*self.known.values(), *self.own.values()]


def _chosen(v: Tensor, index: slice | Tensor) -> Tensor:
    """Some samples, which are the last axis (torch.gather takes a third of the time of indexing there)."""
    if isinstance(index, slice):
        return v[..., index]
    flat = v.reshape(-1, v.shape[-1])
    return flat.gather(1, index.expand(len(flat), -1)).view(*v.shape[:-1], len(index))


@dataclass(frozen=True)
class Pairs:
    """Two sides that meet: all with all, or one by one (`zipped`).

    `same`: one by one, each with itself. `gaps`: they nearly coincide, and what sets them apart is to be kept exact.
    """

    a: Side
    b: Side
    zipped: bool = False
    same: bool = False
    gaps: bool = False

    def spread(self, left: Tensor, right: Tensor, dims: int, whole: bool) -> tuple[Tensor, Tensor]:
        """[*grid, n] and [*grid, m], shaped to broadcast against a State's tensors. `dims` is the length of grid."""
        if whole:
            left = left.reshape(*left.shape[:dims], *[1] * dims, left.shape[-1])
            right = right.reshape(*[1] * dims, *right.shape)
        return (left, right) if self.zipped else (left.unsqueeze(-1), right.unsqueeze(-2))


@dataclass(frozen=True)
class Here:
    """What an operation may ask besides its inputs' states: where it stands, and what is wanted of it."""

    pairs: Pairs
    nodes: tuple[int, ...]  # its inputs
    asked: Need
    tangent: bool  # whether the ntk is wanted

    def own(self, k: int = 0) -> tuple[Tensor, Tensor]:
        """The moments of each side with itself at input k, as much as the operation's `own` says."""
        return self.pairs.a.own[self.nodes[k]], self.pairs.b.own[self.nodes[k]]

    def known(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.pairs.a.known[slot], self.pairs.b.known[slot]

    def whole(self, grid: tuple[int, ...]) -> bool:
        return self.asked == Need.WHOLE and len(grid) > 0
