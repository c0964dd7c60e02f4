"""A tile of the Gram matrix: blocks of pairs that fit the cache, each run through the recursion, put together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ..._base.memory import keep_memory
from ...errors import InputError
from .core import Moments, Pairs, Side
from .recursion import Recursion, portions, propagate

# Bytes of one node's moments of a block of pairs: a few of them lie in a core's cache, or keep a GPU busy (heuristic).
CACHE = {"cpu": 1 << 19, "cuda": 1 << 28}
# Moments alive at a time in the loop, at most (heuristic): inputs, outputs, temporaries, for cov and ntk.
ALIVE = 8
# Pairs within a block are taken one by one where a sample's inputs are at most so many times its moments (heuristic).
NARROW = 8
# Pairs of samples whose inputs' cosine is within this of ±1 are computed again from their difference (heuristic: the
# angle of the others is good to 1e-13).
NEAR = 1e-6


@dataclass
class PreparedBatch:
    """A batch of inputs: the recursion for its shape, and its side of the pairs."""

    recursion: Recursion
    side: Side


def gram_tile(a: PreparedBatch, b: PreparedBatch, want: Sequence[str], workspace: int | None) -> dict[str, Tensor]:
    """The moments asked for ("nngp", "ntk") of all pairs: [n, m], or [n, s, m, t] where outputs have positions.

    Block by block, each small enough for the cache; the upper half only where both sides are the same.
    """
    _check_alike(a, b)
    recursion, same, tangent, n, m = a.recursion, a is b, "ntk" in want, a.side.size, b.side.size
    if recursion.batchwise:
        return _whole_batch(a, b, want)
    device = a.side.energy.device
    tile, index = _Tile(recursion, n, m, want, a.side.energy), torch.arange(max(n, m), device=device)
    # Pairs one by one copy both samples' inputs for each pair, which is dear where inputs are wide.
    inputs = sum(v.numel() for v in a.side.known.values())
    small = same and not recursion.featured and inputs <= NARROW * n * recursion.cell
    for i, j in _blocks(recursion.cell, n, m, workspace, same, small, device.type):
        if small and i.start == j.start:  # each pair of the square once, one by one
            first, second = torch.triu_indices(i.stop - i.start, i.stop - i.start, device=device) + i.start
            pairs = Pairs(a.side.rows(first), a.side.rows(second), zipped=True)
            tile.put_pairs(first, second, _meet(recursion, pairs, tangent, first == second))
            j = slice(i.stop, j.stop)
        if j.start < j.stop:
            itself = index[i].unsqueeze(1) == index[j] if same and i.start == j.start else None
            met = _meet(recursion, Pairs(a.side.rows(i), b.side.rows(j)), tangent, itself)
            tile.put_block(i, j, met, mirror=same)
    # Each sample with itself, computed alone: among others its angle was rounded.
    if same and not recursion.exact_diagonal:
        tile.put_pairs(index[:n], index[:n], own_moments(a, tangent))
    return tile.values


def own_moments(a: PreparedBatch, tangent: bool) -> Moments:
    """The output's moments of each sample with itself."""
    parts = []
    for side in portions(a.side, a.recursion.cell):
        met = propagate(a.recursion, Pairs(side, side, zipped=True, same=True), a.recursion.cross, tangent)
        assert met is not None
        parts.append(met)
    ntks = [part.ntk for part in parts if part.ntk is not None]
    cov, ntk = torch.cat([part.cov for part in parts], -1), torch.cat(ntks, -1) if ntks else None
    return replace(parts[0], cov=cov, ntk=ntk, gap=None)


def output_moment(recursion: Recursion, moments: Moments, name: str) -> Tensor:
    """The output's "nngp" or "ntk"; a network and its twin cancel at the start."""
    asked = moments.ntk if name == "ntk" else None if recursion.twin else moments.cov
    return torch.zeros_like(moments.cov) if asked is None else asked


def _check_alike(a: PreparedBatch, b: PreparedBatch) -> None:
    if a is b:
        return
    shapes = [{slot: tuple(v.shape[:-1]) for slot, v in r.side.known.items()} for r in (a, b)]
    grids = [[node.grid for node in r.recursion.nodes] for r in (a, b)]
    if shapes[0] != shapes[1] or grids[0] != grids[1]:
        raise InputError(
            "the samples of x1 and of x2 have different shapes, so they are no inputs of one network. Give both alike."
        )


def _whole_batch(a: PreparedBatch, b: PreparedBatch, want: Sequence[str]) -> dict[str, Tensor]:
    """A network that mixes the samples of a batch: the batch with itself, whole."""
    if a is not b:
        raise InputError(
            "BatchNorm in training mode makes the kernel one of a whole batch: k(x), not k(x1, x2). Give all samples "
            "as one x, or put the model into evaluation mode."
        )
    # A new side: own moments depend on the batch, so they are recorded as the loop goes.
    side = Side(a.side.known, a.side.size, a.side.energy)
    met = propagate(a.recursion, Pairs(side, side), a.recursion.cross, "ntk" in want, record=True)
    assert met is not None
    return {name: output_moment(a.recursion, met, name) for name in want}


def _blocks(
    cell: int, n: int, m: int, workspace: int | None, same: bool, triangle: bool, device: str
) -> Iterator[tuple[slice, slice]]:
    """Blocks of pairs whose moments lie in the cache; from the diagonal on where both sides are the same.

    `cell`: numbers per pair. `triangle`: pairs of a block on the diagonal are taken once each.
    """
    most = CACHE.get(device, CACHE["cuda"])
    room = most if workspace is None else max(8, min(most, workspace // ALIVE))
    pairs = max(1, room // (8 * cell))
    if triangle and n * (n + 1) // 2 <= 4 * pairs:  # all of it at once, one by one
        yield slice(0, n), slice(0, n)
        return
    # Twice as wide as high: rows of pairs are contiguous.
    columns = max(1, min(m, int(2 * pairs**0.5), pairs))
    rows = max(1, min(n, columns, pairs // columns))  # one block holds all of a row block's diagonal
    for i in range(0, n, rows):
        for j in range(i if same else 0, m, columns):
            yield slice(i, min(i + rows, n)), slice(j, min(j + columns, m))


def _meet(recursion: Recursion, pairs: Pairs, tangent: bool, itself: Tensor | None) -> Moments:
    """The output's moments; of pairs whose inputs nearly coincide again, from their differences.

    `itself`: where samples meet themselves, which is exact or for the caller to see to.
    """
    inputs: list[Tensor] | None = [] if recursion.exact_near else None
    met = propagate(recursion, pairs, recursion.cross, tangent, inputs=inputs)
    assert met is not None
    close = _find_near(inputs, pairs, itself) if inputs else None
    if close is None:
        return met
    # Few pairs are that near, so they go one by one, and operations keep their gap.
    few = Pairs(pairs.a.rows(close[0]), pairs.b.rows(close[-1]), zipped=True, gaps=True)
    again = propagate(recursion, few, recursion.cross, tangent)
    assert again is not None
    ntk = None if met.ntk is None or again.ntk is None else met.ntk.index_put(close, again.ntk)
    return Moments(met.cov.index_put(close, again.cov), ntk, met.grid)


def _find_near(products: Sequence[Tensor], pairs: Pairs, itself: Tensor | None) -> tuple[Tensor, ...] | None:
    """Which pairs have nearly parallel inputs (rows and columns, or places of pairs one by one); None if there is none.

    `products`: of the inputs of each pair, by slot.
    """
    # Cosine of the inputs, squared to spare the root: several inputs count as one long vector.
    total = torch.stack(list(products)).sum(0) if len(products) > 1 else products[0]
    left, right = pairs.spread(pairs.a.energy, pairs.b.energy, 0, whole=False)
    close = total.square() >= (1 - NEAR) ** 2 * left * right
    if itself is not None:
        close &= ~itself
    return close.nonzero(as_tuple=True) if bool(close.any()) else None


class _Tile:
    """The moments asked for as they fill: [n, m], or [n, s, m, t] where the outputs have positions."""

    def __init__(self, recursion: Recursion, n: int, m: int, want: Sequence[str], like: Tensor) -> None:
        keep_memory()
        self.recursion, self.positions = recursion, prod(recursion.nodes[-1].grid)
        self.wide = len(recursion.nodes[-1].grid) > 0
        shape = (n, self.positions, m, self.positions) if self.wide else (n, m)
        self.values = {name: like.new_empty(shape) for name in want}

    def put_block(self, i: slice, j: slice, moments: Moments, mirror: bool) -> None:
        """All pairs of two blocks; `mirror`: the other half too."""
        p = self.positions
        for name, out in self.values.items():
            v = output_moment(self.recursion, moments, name)
            block = v.reshape(p, p, *v.shape[-2:]).permute(2, 0, 3, 1) if self.wide else v
            block = self._symmetric(block) if mirror and i.start == j.start else block
            out[(i, slice(None), j) if self.wide else (i, j)] = block
            if mirror:
                out[(j, slice(None), i) if self.wide else (j, i)] = block.permute(2, 3, 0, 1) if self.wide else block.T

    def put_pairs(self, i: Tensor, j: Tensor, moments: Moments) -> None:
        """Pairs one by one, and their mirror images."""
        p = self.positions
        for name, out in self.values.items():
            v = output_moment(self.recursion, moments, name)
            if self.wide:
                square = v.reshape(p, p, -1).permute(2, 0, 1)
                out[i, :, j], out[j, :, i] = square, square.transpose(1, 2)
            else:
                out[i, j] = out[j, i] = v

    def _symmetric(self, block: Tensor) -> Tensor:
        """A block that begins on the diagonal, its square symmetric to the last bit: the upper half counts."""
        rows, half = block.shape[0], 2 if self.wide else 1
        square = block.narrow(half, 0, rows)
        flat = square.reshape(square.shape[:half].numel(), -1)
        # Rounding of a matrix product may differ between (i, j) and (j, i).
        flat = flat.triu() + flat.triu(1).T
        rest = block.narrow(half, rows, block.shape[half] - rows)
        return torch.cat([flat.reshape(square.shape), rest], half)
