"""What moves, sums and joins positions: convolution windows, pooling, flattening, indexing, graph aggregation.

All are linear in the covariance: each acts on its left positions s and its right positions t.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .core import EXACT, Grid, Here, Moments, Need, Op, embed


@dataclass(frozen=True)
class PositionOp(Op):
    """Linear in the covariance, and the same for every pair of samples."""

    what: ClassVar[str] = "positions"
    limit: ClassVar[str] = EXACT
    linear: ClassVar[bool] = True

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """What becomes of a covariance [*grid, ...], or [*grid, *grid, ...] if whole."""
        raise NotImplementedError

    def grid(self, grid: Grid) -> Grid:
        """The grid of its output."""
        return grid

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        grid = self.grid(s.grid)
        cov, ntk = (None if v is None else self.apply(v, s.grid, s.whole) for v in (s.cov, s.ntk))
        gap = self.apply(s.gap, s.grid, s.whole) if s.gap is not None and self.carries_gap else None
        assert cov is not None
        return Moments(cov, ntk, grid, s.whole and len(grid) > 0, gap).at(here.asked)


def sides(axis: int, dims: int, whole: bool) -> tuple[int, ...]:
    """The tensor's axes for one axis of the grid: left and right."""
    return (axis, dims + axis) if whole else (axis,)


@dataclass(frozen=True)
class Window(PositionOp):
    """The sum over a convolution's window: cov'[s, t] = Σ_δ cov[σs + δ, σt + δ], on all axes of the grid."""

    what: ClassVar[str] = "window"
    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    circular: bool = False
    carries_gap: ClassVar[bool] = True  # at equal positions; a whole covariance has none

    def grid(self, grid: Grid) -> Grid:
        """How many windows fit on each axis."""
        return tuple(
            windows(n, k, s, p, d)
            for n, k, s, p, d in zip(grid, self.size, self.stride, self.padding, self.dilation, strict=True)
        )

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """The windows' sums, one axis after the other."""
        # Axis by axis: a sum over a box is a sum over its sides one after the other, k₁ + k₂ instead of k₁k₂ shifts.
        for axis, k in enumerate(self.size):
            if k == 1 and self.stride[axis] == 1 and self.padding[axis] == (0, 0):
                continue
            axes = sides(axis, len(grid), whole)
            if self.circular:
                v = wrapped(v, axes, self.padding[axis])
            pad = (0, 0) if self.circular else self.padding[axis]
            v = shifted_sum(v, axes, k, self.stride[axis], pad, self.dilation[axis])
        return v


@dataclass(frozen=True)
class Apart(Op):
    """Different positions are independent: weights of each position's own (locally connected layers)."""

    what: ClassVar[str] = "weights of each position"
    limit: ClassVar[str] = "positions have weights of their own: they are independent"
    carries_gap: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def reads(self, asked: Need) -> Need:
        """Equal positions only: different ones are uncorrelated after it, whatever they were."""
        return min(asked, Need.DIAGONAL)

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        return replace(s.map(lambda v: embed(v, s.grid)), whole=True) if here.whole(s.grid) else s


def windows(n: int, size: int, stride: int, padding: tuple[int, int], dilation: int = 1, up: bool = False) -> int:
    """How many windows fit."""
    room = n + sum(padding) - dilation * (size - 1) - 1
    return (-(-room // stride) if up else room // stride) + 1


def wrapped(v: Tensor, axes: tuple[int, ...], pad: tuple[int, int]) -> Tensor:
    """Periodic borders."""
    for axis in axes:
        n = v.shape[axis]
        index = torch.arange(-pad[0], n + pad[1], device=v.device) % n
        v = v.index_select(axis, index)
    return v


def shifted_sum(
    v: Tensor, axes: tuple[int, ...], size: int, stride: int, pad: tuple[int, int], dilation: int = 1
) -> Tensor:
    """Σ over the window's offsets of v, moved by the same offset on all `axes`; zero outside."""
    n = v.shape[axes[0]]
    m = windows(n, size, stride, pad, dilation)
    moves = [_move(n, m, k * dilation - pad[0], stride) for k in range(size)]
    # The first shift is a copy instead of an addition to zeros.
    first = next((k for k, (into, _) in enumerate(moves) if into == slice(0, m)), None)  # an offset that covers all
    if first is not None:
        out = _take(v, axes, moves.pop(first)[1]).clone(memory_format=torch.contiguous_format)
    else:
        shape = [m if k in axes else size for k, size in enumerate(v.shape)]
        out = v.new_zeros(shape)
    for into, from_ in moves:
        if into.start < into.stop:
            _take(out, axes, into).add_(_take(v, axes, from_))
    return out


def _move(n: int, m: int, offset: int, stride: int) -> tuple[slice, slice]:
    """Outputs [into] whose input σ·s + offset lies inside, and those inputs."""
    # The smallest s with σ·s + offset ≥ 0, and one more than the largest with it ≤ n − 1.
    low = (stride - 1 - offset) // stride if offset < 0 else 0
    high = max(low, min(m, (n - 1 - offset) // stride + 1))
    start = low * stride + offset
    return slice(low, high), slice(start, max(start, start + (high - low - 1) * stride + 1), stride)


def _take(v: Tensor, axes: tuple[int, ...], part: slice) -> Tensor:
    index: list[slice] = [slice(None)] * v.dim()
    for axis in axes:
        index[axis] = part
    return v[tuple(index)]


@dataclass(frozen=True)
class Pool(PositionOp):
    """Sum or mean over windows. `edges`: a mean counts only what lies inside the picture."""

    what: ClassVar[str] = "pooling"
    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    mean: bool = True
    edges: bool = False
    circular: bool = False
    ceil: bool = False

    def reads(self, asked: Need) -> Need:
        """All pairs of positions: a window's sum correlates them."""
        alone = all(k == 1 for k in self.size)
        return asked if alone else Need.WHOLE if asked else asked

    def grid(self, grid: Grid) -> Grid:
        """How many windows fit on each axis."""
        return tuple(self.count(axis, n) for axis, n in enumerate(grid))

    def count(self, axis: int, n: int) -> int:
        """How many windows fit into n positions of an axis."""
        k, s, p = self.size[axis], self.stride[axis], self.padding[axis]
        m = windows(n, k, s, p, up=self.ceil)
        return m - 1 if self.ceil and (m - 1) * s >= n + p[0] else m  # torch: a window must begin inside

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """The windows' sums or means, over each axis on each side."""
        for axis in range(len(grid)):
            for side in sides(axis, len(grid), whole):
                v = self._along(v, axis, side)
        return v

    def _along(self, v: Tensor, axis: int, side: int) -> Tensor:
        k, s, pad, n = self.size[axis], self.stride[axis], self.padding[axis], v.shape[side]
        if self.circular:
            v, pad = wrapped(v, (side,), pad), (0, 0)
        # ceil_mode lets the last window reach beyond the padding.
        more = max(0, (self.count(axis, n) - 1) * s + k - n - sum(pad)) if not self.circular else 0
        out = shifted_sum(v, (side,), k, s, (pad[0], pad[1] + more))
        if not self.mean:
            return out
        ones = v.new_ones(v.shape[side])
        if self.edges:
            counts = shifted_sum(ones, (0,), k, s, (pad[0], pad[1] + more))
        else:  # torch counts the padding, but not what ceil_mode adds beyond it
            counts = shifted_sum(v.new_ones(v.shape[side] + sum(pad)), (0,), k, s, (0, more))
        return out / counts.view(-1, *[1] * (out.dim() - side - 1))


@dataclass(frozen=True)
class Total(PositionOp):
    """Sum or mean over whole axes of the grid."""

    what: ClassVar[str] = "mean or sum over positions"
    axes: tuple[int, ...]
    mean: bool = True

    def reads(self, asked: Need) -> Need:
        """All pairs of positions, which are summed."""
        return Need.WHOLE if asked else asked

    def grid(self, grid: Grid) -> Grid:
        """The axes that are left."""
        return tuple(n for axis, n in enumerate(grid) if axis not in self.axes)

    def rounds(self) -> bool:
        """Yes: torch chooses the order of the sum."""
        return True

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """The sum or mean over the axes, on each side."""
        axes = [a for axis in self.axes for a in sides(axis, len(grid), whole)]
        return v.mean(axes) if self.mean else v.sum(axes)


@dataclass(frozen=True)
class Trace(PositionOp):
    """Positions on `axes` become channels (Flatten): the mean over equal positions."""

    what: ClassVar[str] = "flatten"
    limit: ClassVar[str] = "channels → ∞ at every position: the mean over positions"
    axes: tuple[int, ...]
    carries_gap: ClassVar[bool] = True

    def rounds(self) -> bool:
        """Yes: torch chooses the order of the mean."""
        return True

    def grid(self, grid: Grid) -> Grid:
        """The axes that are left."""
        return tuple(n for axis, n in enumerate(grid) if axis not in self.axes)

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """The mean over equal positions of the axes that go."""
        if not whole:
            return v.mean(self.axes)
        d = len(grid)
        # From the last axis on: each diagonal takes one axis off both sides, so earlier numbers stay right.
        for count, axis in enumerate(sorted(self.axes, reverse=True)):
            v = v.diagonal(dim1=axis, dim2=d - count + axis).mean(-1)
        return v


@dataclass(frozen=True)
class Permute(PositionOp):
    """The grid's axes in another order."""

    order: tuple[int, ...]
    carries_gap: ClassVar[bool] = True

    def grid(self, grid: Grid) -> Grid:
        """The sizes in the new order."""
        return tuple(grid[k] for k in self.order)

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """The axes in the new order, on each side."""
        d = len(grid)
        axes = [*self.order, *(d + k for k in self.order)] if whole else list(self.order)
        return v.permute(*axes, *range(len(axes), v.dim()))


@dataclass(frozen=True)
class Regrid(PositionOp):
    """The grid's sizes merged or split, in order."""

    sizes: tuple[int, ...]
    carries_gap: ClassVar[bool] = True

    def grid(self, grid: Grid) -> Grid:
        """The new sizes."""
        return self.sizes

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        after = super().__call__(inputs, here)
        if inputs[0].grid or not here.whole(self.sizes):
            return after
        # No position becomes one: its covariance with itself is all of it, and what repeats it asks for the whole.
        return replace(after.map(lambda v: embed(v, self.sizes)), whole=True)

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """The same numbers by the new sizes, on each side."""
        times = 2 if whole else 1
        return v.reshape(*self.sizes * times, *v.shape[times * len(grid) :])


@dataclass(frozen=True)
class Take(PositionOp):
    """Some positions along one axis of the grid; the axis goes if `drop`."""

    axis: int
    index: tuple[int, ...]
    drop: bool = False
    carries_gap: ClassVar[bool] = True

    def grid(self, grid: Grid) -> Grid:
        """The sizes, of the positions that are taken on its axis."""
        rest = () if self.drop else (len(self.index),)
        return (*grid[: self.axis], *rest, *grid[self.axis + 1 :])

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """The positions that are taken, on each side."""
        # From the right: an axis that goes would renumber those after it.
        for axis in reversed(sides(self.axis, len(grid), whole)):
            if self.drop:
                v = v.select(axis, self.index[0])
            else:
                v = v.index_select(axis, torch.tensor(self.index, device=v.device))
        return v


@dataclass(frozen=True)
class Spread(PositionOp):
    """Zeros put between positions: each comes to a multiple of the stride (transposed convolutions)."""

    stride: tuple[int, ...]
    carries_gap: ClassVar[bool] = True

    def grid(self, grid: Grid) -> Grid:
        """The sizes with the zeros between."""
        return tuple((n - 1) * s + 1 for n, s in zip(grid, self.stride, strict=True))

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """The covariance with zeros between positions, on each side."""
        times = 2 if whole else 1
        out = v.new_zeros(*self.grid(grid) * times, *v.shape[times * len(grid) :])
        out[tuple(slice(None, None, s) for s in self.stride * times)] = v
        return out


@dataclass(frozen=True)
class Resample(PositionOp):
    """Known matrices (rows of numbers) over axes of the grid, the same for every sample."""

    what: ClassVar[str] = "known matrix over positions"
    matrices: tuple[tuple[int, tuple[tuple[float, ...], ...]], ...]

    def reads(self, asked: Need) -> Need:
        """All pairs of positions, which the matrices mix."""
        return Need.WHOLE if asked else asked

    def grid(self, grid: Grid) -> Grid:
        """As many positions as the matrices have rows."""
        sizes = list(grid)
        for axis, rows in self.matrices:
            sizes[axis] = len(rows)
        return tuple(sizes)

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """M v Mᵀ on each axis."""
        for axis, rows in self.matrices:
            matrix = torch.tensor(rows, dtype=v.dtype, device=v.device)
            for side in sides(axis, len(grid), whole):
                v = torch.tensordot(matrix, v, dims=([1], [side])).movedim(0, side)
        return v


@dataclass(frozen=True)
class Pad(PositionOp):
    """Zeros before and after each axis of the grid."""

    padding: tuple[tuple[int, int], ...]
    carries_gap: ClassVar[bool] = True

    def grid(self, grid: Grid) -> Grid:
        """The sizes with the zeros around."""
        return tuple(n + sum(p) for n, p in zip(grid, self.padding, strict=True))

    def apply(self, v: Tensor, grid: Grid, whole: bool) -> Tensor:
        """The covariance with zeros around, on each side."""
        times = 2 if whole else 1
        amounts = [p for pair in reversed(self.padding * times) for p in pair]
        dims = times * len(grid)
        # torch pads the last axes, so the pairs go to the front.
        flat = v.reshape(*v.shape[:dims], -1).movedim(-1, 0)
        return torch.nn.functional.pad(flat, amounts).movedim(0, -1).reshape(*self.grid(grid) * times, *v.shape[dims:])


@dataclass(frozen=True)
class Join(Op):
    """Positions side by side along one axis: uncorrelated branches, so zero between them."""

    what: ClassVar[str] = "positions side by side"
    limit: ClassVar[str] = "the branches have weights of their own: they are uncorrelated"
    axis: int

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        first, d = inputs[0], len(inputs[0].grid)
        sizes = [s.grid[self.axis] for s in inputs]
        grid = (*first.grid[: self.axis], sum(sizes), *first.grid[self.axis + 1 :])

        def join(values: list[Tensor | None]) -> Tensor | None:
            """One of the moments of all branches, joined along the axis."""
            if all(v is None for v in values):
                return None
            # A branch without trained weights has a tangent kernel of zeros.
            full = [torch.zeros_like(s.cov) if v is None else v for v, s in zip(values, inputs, strict=True)]
            if not first.whole:
                return torch.cat(full, self.axis)
            rows, start = [], 0
            for v, size in zip(full, sizes, strict=True):
                shape = list(v.shape)
                shape[d + self.axis] = sum(sizes)
                # Uncorrelated branches: zeros off the block diagonal.
                row = v.new_zeros(shape)
                row.narrow(d + self.axis, start, size).add_(v)
                rows.append(row)
                start += size
            return torch.cat(rows, self.axis)

        cov = join([s.cov for s in inputs])
        assert cov is not None
        return Moments(cov, join([s.ntk for s in inputs]), grid, first.whole)


@dataclass(frozen=True)
class Aggregate(Op):
    """A known matrix of each sample [t, s, n] over the positions: h'[t] = Σ_s A[t, s] h[s]. Graphs, resizing, masks."""

    what: ClassVar[str] = "known matrix over positions"
    limit: ClassVar[str] = EXACT
    slot: int

    def rounds(self) -> bool:
        """Yes: torch chooses the order of the sums."""
        return True

    def reads(self, asked: Need) -> Need:
        """All pairs of positions, which the matrices mix."""
        return Need.WHOLE if asked else asked

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        left, right = here.known(self.slot)
        zipped = here.pairs.zipped
        rule = "asn,stn,btn->abn" if zipped else "asi,stij,btj->abij"

        def through(v: Tensor) -> Tensor:
            """A covariance through the aggregation of both sides."""
            return torch.einsum(rule, left, v, right)

        ntk = None if s.ntk is None else through(s.ntk)
        return Moments(through(s.cov), ntk, (left.shape[0],), True).at(here.asked)
