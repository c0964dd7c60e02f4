"""Blocks of pairs put together to one tile of the Gram matrix."""

from collections.abc import Iterator
from functools import cache
from math import prod

import torch
from torch import Tensor

from .plan import Plan
from .state import State

# Bytes of one state of a block of pairs: a few of them lie in a core's cache, or keep a GPU busy (heuristic).
CACHE = {"cpu": 1 << 19, "cuda": 1 << 28}
# States alive at a time in the loop, at most (heuristic): inputs, outputs, temporaries, for cov and ntk.
ALIVE = 8


@cache
def keep_memory() -> None:
    """Let malloc keep what blocks free. Without this every block is paged in anew, at about the cost of its arithmetic.

    glibc returns blocks above a limit to the system at once, and raises the limit when one is freed (mallopt(3),
    M_MMAP_THRESHOLD); 31 MB is just below what it takes note of. Nothing is touched, so nothing is used.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def moment(plan: Plan, state: State, name: str) -> Tensor:
    """The output's "nngp" or "ntk"; a network and its twin cancel at the start."""
    asked = state.ntk if name == "ntk" else None if plan.twin else state.cov
    return torch.zeros_like(state.cov) if asked is None else asked


class Tile:
    """The moments asked for as they fill: [n, m], or [n, s, m, t] where the outputs have positions."""

    def __init__(self, plan: Plan, n: int, m: int, want: tuple[str, ...], like: Tensor) -> None:
        keep_memory()
        self.plan, self.positions = plan, prod(plan.nodes[-1].grid)
        self.wide = len(plan.nodes[-1].grid) > 0
        shape = (n, self.positions, m, self.positions) if self.wide else (n, m)
        self.found = {name: like.new_empty(shape) for name in want}

    def block(self, i: slice, j: slice, state: State, mirror: bool) -> None:
        """All pairs of two blocks; `mirror`: the other half too."""
        p = self.positions
        for name, out in self.found.items():
            v = moment(self.plan, state, name)
            tile = v.reshape(p, p, *v.shape[-2:]).permute(2, 0, 3, 1) if self.wide else v
            tile = self._symmetric(tile) if mirror and i.start == j.start else tile
            out[(i, slice(None), j) if self.wide else (i, j)] = tile
            if mirror:
                out[(j, slice(None), i) if self.wide else (j, i)] = tile.permute(2, 3, 0, 1) if self.wide else tile.T

    def pairs(self, i: Tensor, j: Tensor, state: State) -> None:
        """Pairs one by one, and their mirror images."""
        p = self.positions
        for name, out in self.found.items():
            v = moment(self.plan, state, name)
            if self.wide:
                each = v.reshape(p, p, -1).permute(2, 0, 1)
                out[i, :, j], out[j, :, i] = each, each.transpose(1, 2)
            else:
                out[i, j] = out[j, i] = v

    def _symmetric(self, tile: Tensor) -> Tensor:
        """A block that begins on the diagonal, its square symmetric to the last bit: the upper half counts."""
        rows, half = tile.shape[0], 2 if self.wide else 1
        square = tile.narrow(half, 0, rows)
        flat = square.reshape(square.shape[:half].numel(), -1)
        flat = flat.triu() + flat.triu(1).T
        rest = tile.narrow(half, rows, tile.shape[half] - rows)
        return torch.cat([flat.reshape(square.shape), rest], half)


def blocks(
    plan: Plan, n: int, m: int, workspace: int | None, same: bool, triangle: bool, device: str
) -> Iterator[tuple[slice, slice]]:
    """Blocks of pairs whose states lie in the cache; from the diagonal on where both sides are the same.

    `triangle`: pairs of a block on the diagonal are taken once each.
    """
    most = CACHE.get(device, CACHE["cuda"])
    room = most if workspace is None else max(8, min(most, workspace // ALIVE))
    pairs = max(1, room // (8 * plan.cell()))
    if triangle and n * (n + 1) // 2 <= 4 * pairs:  # all of it at once, one by one
        yield slice(0, n), slice(0, n)
        return
    columns = max(1, min(m, int(2 * pairs**0.5), pairs))
    rows = max(1, min(n, columns, pairs // columns))  # one block holds all of a row block's diagonal
    for i in range(0, n, rows):
        for j in range(i if same else 0, m, columns):
            yield slice(i, min(i + rows, n)), slice(j, min(j + columns, m))
