"""Equispaced grids, one within another, and the functions and class boundaries that Qadeer et al. 2023 learn on them.

S. Qadeer et al., "Efficient kernel surrogates for neural network-based regression" (arXiv:2310.18612): (31), (71),
(72).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Device, Float, Numbers
from ..errors import InputError

Function = Callable[[Tensor], Tensor]  # points [n, d] to values [n]


@dataclass(frozen=True)
class Grid:
    """The nodes of a box cut into `cells` along each axis: Π(cells + 1) of them, the last axis running fastest.

    >>> Grid((2,)).nodes().flatten().tolist()
    [-1.0, 0.0, 1.0]
    >>> Grid((4, 2)).weights().sum()  # those of the trapezoid rule: the area
    tensor(4., dtype=torch.float64)
    """

    cells: tuple[int, ...]
    low: float = -1.0  # of every axis
    high: float = 1.0

    def __post_init__(self) -> None:
        good = isinstance(self.cells, tuple) and self.cells and all(isinstance(n, int) and n > 0 for n in self.cells)
        if not good:
            raise InputError(f"cells={self.cells!r}; needed: a tuple of whole numbers from 1, one per axis: (200,).")
        numbers = all(isinstance(v, int | float) and math.isfinite(v) for v in (self.low, self.high))
        if not numbers or not self.low < self.high:
            raise InputError(f"low={self.low}, high={self.high}; needed: finite numbers, low below high.")

    def __len__(self) -> int:
        return math.prod(n + 1 for n in self.cells)

    @property
    def shape(self) -> tuple[int, ...]:
        """Nodes along each axis."""
        return tuple(n + 1 for n in self.cells)

    @property
    def steps(self) -> tuple[float, ...]:
        """Δx of each axis."""
        return tuple((self.high - self.low) / n for n in self.cells)

    def nodes(self, device: Device = None) -> Float[Tensor, "n d"]:
        """All nodes, in float64."""
        axes = [torch.linspace(self.low, self.high, n + 1, dtype=torch.float64, device=device) for n in self.cells]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))

    def weights(self, device: Device = None) -> Float[Tensor, " n"]:
        """Of the trapezoid rule, (31): the volume of a cell, halved at every side on which a node lies."""
        parts = []
        for n, step in zip(self.cells, self.steps, strict=True):
            part = torch.full((n + 1,), step, dtype=torch.float64, device=device)
            part[0] = part[-1] = step / 2
            parts.append(part)
        return reduce(lambda a, b: (a[:, None] * b).flatten(), parts)


@dataclass(frozen=True)
class Grids:
    """A grid to train on and one to test on that contains it: every cell is cut into `ratio` parts along each axis.

    >>> grids = Grids(Grid((11, 7)), (2, 3))
    >>> len(grids.train), len(grids.test)
    (96, 506)
    """

    train: Grid
    ratio: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.train, Grid):
            raise InputError(f"train is a {type(self.train).__name__}; needed: a Grid, Grid((200,)).")
        good = isinstance(self.ratio, tuple) and len(self.ratio) == len(self.train.cells)
        if not good or not all(isinstance(t, int) and t > 1 for t in self.ratio):
            raise InputError(
                f"ratio={self.ratio!r}; needed: a tuple of whole numbers above 1, one for each of the "
                f"{len(self.train.cells)} axes: into how many parts a cell of the training grid is cut to test."
            )

    @property
    def test(self) -> Grid:
        """The finer one."""
        cells = tuple(n * t for n, t in zip(self.train.cells, self.ratio, strict=True))
        return Grid(cells, self.train.low, self.train.high)

    def coarse(self, values: Tensor) -> Tensor:
        """Of values [m, …] on the test grid those on the training grid, [n, …]."""
        out = values.reshape(*self.test.shape, *values.shape[1:])
        for axis, t in enumerate(self.ratio):
            out = out[(slice(None),) * axis + (slice(None, None, t),)]
        return out.reshape(len(self.train), *values.shape[1:])


INTERVAL = Grids(Grid((200,)), (3,))  # N = 200 and M = 600 on [−1, 1]
RECTANGLE = Grids(Grid((11, 7)), (2, 3))  # 11 × 7 and 22 × 21 on [−1, 1]²

FUNCTIONS: dict[str, Function] = {
    "f1": lambda x: torch.exp(torch.sin(2 * math.pi * x[:, 0])),
    "f2": lambda x: torch.exp(3 * x[:, 0]),
    "f3": lambda x: torch.cos(torch.exp(3 * x[:, 0])),
}
BOUNDARIES: dict[str, Function] = {
    "F1": lambda x: 4 * x[:, 0] ** 2 - 3 * x[:, 0] + 5 * x[:, 1] - 1,
    "F2": lambda x: 2 * x[:, 0] ** 3 - 0.6 * x[:, 0] ** 2 - 1.94 * x[:, 0] + x[:, 1] + 0.2,
}


def need_axes(grids: object, count: int, hint: str) -> None:
    """Refuse what are no grids, or are of another dimension."""
    if not isinstance(grids, Grids):
        raise InputError(
            f"grids is a {type(grids).__name__}; needed: Grids(Grid((200,)), (3,)), to train on and to test."
        )
    if len(grids.ratio) != count:
        raise InputError(f"the grid has {len(grids.ratio)} axes; needed: {hint}")


def on_test(grids: Grids, values: Numbers, name: str) -> Float[Tensor, " m"]:
    """Values on the nodes of the test grid, given as numbers: one that is finite for each, in float64."""
    v = tree.numbers(values, name)
    if v.shape != (len(grids.test),) or v.is_complex():
        raise InputError(
            f"{name} is {v.dtype} of shape {tuple(v.shape)}; needed: a real number for each node of the test grid, "
            f"[{len(grids.test)}]."
        )
    checks.finite(v, name)
    return v.double()


def values_of(f: Function, nodes: Tensor, name: str = "f") -> Float[Tensor, " n"]:
    """f on the nodes, checked: one finite number for each."""
    if not callable(f):
        raise InputError(f"{name} is a {type(f).__name__}; needed: a function from points [n, d] to values [n].")
    out = f(nodes)
    if not isinstance(out, Tensor) or out.shape != (len(nodes),) or out.is_complex():
        found = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise InputError(f"{name} of points {tuple(nodes.shape)} gave {found}; needed: a real tensor [{len(nodes)}].")
    bad = ~out.isfinite()
    if bool(bad.any()):
        where: Sequence[float] = nodes[bad][0].tolist()
        raise InputError(
            f"{name} at {where} is {float(out[bad][0])}; needed: finite values on all nodes of both grids."
        )
    return out.detach().double()
