"""A tile of the Gram matrix: blocks of pairs that fit the cache, each run through the recursion, put together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ..._base.memory import keep_memory
from ...errors import InputError
from .core import Moments, Need, Pairs, Side
from .fused.choose import Fused, find_fused
from .recursion import SINGLES, Recursion, portions, propagate, with_own_moments

# Bytes of one node's moments of a block of pairs: a few of them lie in a core's cache, or keep a GPU busy (heuristic).
CACHE = {"cpu": 1 << 19, "cuda": 1 << 28}
# Moments alive at a time in the loop, at most (heuristic): inputs, outputs, temporaries, for cov and ntk.
ALIVE = 8
# Pairs within a block are taken one by one where a sample's inputs are at most so many times its moments (heuristic).
NARROW = 8
# Pairs of samples whose inputs' cosine is within this of ±1 are computed again in float64, from their difference where
# the network allows. A rounding ε of the cosine is one of ε/θ in the angle θ, which is at least √(2·NEAR) for the
# others. In float64 that is 1e-13. In float32 it is 7e-7 with ε about 1e-7, and the slope of ReLU, 1 − θ/π, is off by
# 2e-7 in each layer: of a tangent kernel through 20 layers 5e-6 of the largest entry at worst were measured, over four
# draws of near copies on three processors (goal: 1e-5; 1.1e-5 with 5e-3 here, 2e-5 with 1e-3).
NEAR = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass
class PreparedBatch:
    """A batch of inputs: the recursion for its shape, and its side of the pairs."""

    recursion: Recursion
    side: Side


def prepared_side(recursion: Recursion, side: Side, fuse: bool = True) -> Side:
    """The side with its own moments where a layer reads them; `fuse`: by the fused recursion where that can."""
    fused = find_fused(recursion, side) if fuse and not recursion.batchwise else None
    if fused is None:
        return with_own_moments(recursion, side)
    plan, ready = fused.plan, replace(side, own={})
    fused.backend.learn_variances(plan, ready)
    if any(node.op.own for node in recursion.nodes[plan.end + 1 :]):
        start = fused.backend.fused_pairs(plan, ready, ready, False)
        pairs = Pairs(ready, ready, zipped=True, same=True)
        propagate(recursion, pairs, recursion.sides, tangent=False, record=True, start=(plan.end, start))
    return ready


def gram_tile(
    a: PreparedBatch, b: PreparedBatch, want: Sequence[str], workspace: int | None, fuse: bool = True
) -> dict[str, Tensor]:
    """The moments asked for ("nngp", "ntk") of all pairs: [n, m], or [n, s, m, t] where outputs have positions.

    Block by block, each small enough for the cache; the upper half only where both sides are the same. `fuse`: by the
    fused recursion where that takes the network.
    """
    _check_alike(a, b)
    recursion, same, tangent, n, m = a.recursion, a is b, "ntk" in want, a.side.size, b.side.size
    if recursion.batchwise:
        return _whole_batch(a, b, want)
    device = a.side.energy.device
    tile, index = _Tile(recursion, n, m, want, a.side.energy), torch.arange(max(n, m), device=device)
    alone = a.side.exact is not None or not recursion.exact_diagonal
    fused = find_fused(recursion, a.side, b.side) if fuse else None
    # Pairs one by one copy both samples' inputs for each pair, which is dear where inputs are wide.
    inputs = sum(v.numel() for v in a.side.known.values())
    small = fused is None and same and not recursion.featured and inputs <= NARROW * n * recursion.cell
    if fused is None:
        blocks = _blocks(recursion.cell, n, m, workspace, same, small, device.type)
    else:
        blocks = _squares(fused.backend.rows_at_a_time(fused.plan, workspace), n, m, same)
    for i, j in blocks:
        if small and i.start == j.start:  # each pair of the square once, one by one
            first, second = torch.triu_indices(i.stop - i.start, i.stop - i.start, device=device) + i.start
            pairs = Pairs(a.side.rows(first), a.side.rows(second), zipped=True)
            tile.put_pairs(first, second, _meet(recursion, pairs, tangent, first == second))
            j = slice(i.stop, j.stop)
        if j.start < j.stop:
            itself = index[i].unsqueeze(1) == index[j] if same and i.start == j.start else None
            met = _meet(recursion, Pairs(a.side.rows(i), b.side.rows(j)), tangent, itself, fused)
            tile.put_block(i, j, met, mirror=same)
    # Each sample with itself, computed alone: among others its angle was rounded.
    if same and (alone or (fused is not None and not fused.backend.exact)):
        tile.put_pairs(index[:n], index[:n], own_moments(a, tangent, fuse))
    return tile.values


def own_moments(a: PreparedBatch, tangent: bool, fuse: bool = True) -> Moments:
    """The output's moments of each sample with itself; `fuse` as above, where all pairs of positions count."""
    recursion, side = a.recursion, a.side.exact or a.side
    whole = any(need == Need.WHOLE and node.grid for need, node in zip(recursion.cross, recursion.nodes, strict=True))
    fused = find_fused(recursion, side) if fuse and whole else None
    # A GPU's sums are not the same for a sample with itself as for the variances, so the angle is not exactly 0.
    if fused is not None and not fused.backend.exact and a.side.exact is None:
        fused = None
    parts = [
        _one_by_one(recursion, Pairs(part, part, zipped=True, same=True), tangent, fused)
        for part in portions(side, _held(recursion, fused))
    ]
    return _joined(parts)


def _held(recursion: Recursion, fused: Fused | None) -> int:
    """Numbers that a pair one by one takes: its moments, or what is read of each sample."""
    return recursion.cell if fused is None else max(1, recursion.kept)


def _one_by_one(recursion: Recursion, pairs: Pairs, tangent: bool, fused: Fused | None) -> Moments:
    """The output's moments of pairs one by one, by the fused recursion if there is one."""
    start = None
    if fused is not None:
        start = (fused.plan.end, fused.backend.fused_pairs(fused.plan, pairs.a, pairs.b, tangent))
    met = propagate(recursion, pairs, recursion.cross, tangent, start=start)
    assert met is not None
    return met


def _joined(parts: Sequence[Moments]) -> Moments:
    """Moments of several portions of pairs one by one, as one."""
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


def _squares(step: int, n: int, m: int, same: bool) -> Iterator[tuple[slice, slice]]:
    """Blocks of so many rows and columns; from the diagonal on where both sides are the same."""
    for i in range(0, n, step):
        for j in range(i if same else 0, m, step):
            yield slice(i, min(i + step, n)), slice(j, min(j + step, m))


def _meet(
    recursion: Recursion, pairs: Pairs, tangent: bool, itself: Tensor | None, fused: Fused | None = None
) -> Moments:
    """The output's moments; of pairs whose inputs nearly coincide again, from their differences.

    `itself`: where samples meet themselves, which is exact or for the caller to see to; then both sides are one.
    """
    inputs: list[Tensor] | None = [] if recursion.exact_near or pairs.a.exact is not None else None
    if fused is None:
        met = propagate(recursion, pairs, recursion.cross, tangent, inputs=inputs)
    else:
        plan, half = fused.plan, itself is not None
        start, products = fused.backend.fused_moments(plan, pairs.a, pairs.b, tangent, half)
        met = propagate(recursion, pairs, recursion.cross, tangent, start=(plan.end, start))
        inputs = None if inputs is None else [products]
    assert met is not None
    close = _find_near(inputs, pairs, itself) if inputs else None
    if close is None:
        return met
    again = _met_again(recursion, pairs, close, tangent, fused)
    ntk = None if met.ntk is None or again.ntk is None else _put(met.ntk, close, again.ntk)
    return Moments(_put(met.cov, close, again.cov), ntk, met.grid, met.whole)


def _met_again(
    recursion: Recursion, pairs: Pairs, close: tuple[Tensor, ...], tangent: bool, fused: Fused | None
) -> Moments:
    """The output's moments of pairs that nearly coincide: one by one in float64, and operations keep their gap."""
    anew = fused is not None and recursion.exact_near
    fused, parts = None if recursion.exact_near else fused, []
    step = max(1, SINGLES // (8 * _held(recursion, fused)))
    for k in range(0, len(close[0]), step):
        a, b = pairs.a.exact_rows(close[0][k : k + step]), pairs.b.exact_rows(close[-1][k : k + step])
        if anew:  # variances of the plain recursion's own: equal patches agree with them to the last bit
            a, b = (with_own_moments(recursion, replace(side, own={})) for side in (a, b))
        parts.append(_one_by_one(recursion, Pairs(a, b, zipped=True, gaps=recursion.exact_near), tangent, fused))
    return _joined(parts)


def _put(v: Tensor, close: tuple[Tensor, ...], again: Tensor) -> Tensor:
    """v [..., *pairs] with these pairs computed again [..., count]."""
    last = tuple(range(-len(close), 0))
    front = v.movedim(last, tuple(range(len(close))))
    return front.index_put(close, again.movedim(-1, 0).to(v)).movedim(tuple(range(len(close))), last)


def _find_near(products: Sequence[Tensor], pairs: Pairs, itself: Tensor | None) -> tuple[Tensor, ...] | None:
    """Which pairs have nearly parallel inputs (rows and columns, or places of pairs one by one); None if there is none.

    `products`: of the inputs of each pair, by slot.
    """
    # Cosine of the inputs, squared to spare the root: several inputs count as one long vector.
    total = torch.stack(list(products)).sum(0) if len(products) > 1 else products[0]
    left, right = pairs.spread(pairs.a.energy, pairs.b.energy, 0, whole=False)
    close = total.square() >= (1 - NEAR[total.dtype]) ** 2 * left * right
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
            v = output_moment(self.recursion, moments, name).to(out)
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
        # (torch.where and not triu, which wakes all threads for any size)
        index = torch.arange(len(flat), device=flat.device)
        flat = torch.where(index.unsqueeze(1) <= index, flat, flat.T)
        rest = block.narrow(half, rows, block.shape[half] - rows)
        return torch.cat([flat.reshape(square.shape), rest], half)
