"""Windows of positions, and what a function of them reads: fields, and parameters of each channel's own.

y(p) = g(u(p + k₁), …, u(p + k_K); z(p); w), as max pooling and an activation after a depthwise convolution are. The
moments of such functions have no closed form: `windowed.py` draws them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from torch import Tensor

from .core import Grid

WIDEST = 64  # positions of all windows of one function together: the error of quasi-random points grows with them
# Windows of one layer: its moments are over all pairs of them (a heuristic: minutes for a pair of samples).
MOST = 1024


@dataclass(frozen=True)
class Windows:
    """For each position of a new grid, the positions of an old one that it sees, counted in the old grid's order.

    Every window has as many entries; −1 is nothing (the value 0), for parameters only: a field's window that is cut off
    repeats one of its positions, which changes no maximum.
    """

    grid: Grid
    index: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Entries of one window."""
        return len(self.index[0])

    @classmethod
    def along(cls, grid: Grid, axes: Sequence[Sequence[Sequence[int]]]) -> "Windows":
        """Boxes: for each axis of the old grid, the positions that each window has on it."""
        # Cut off windows are filled up with a position that they have.
        sizes = [max(len(w) for w in windows) for windows in axes]
        full = [[[*w, *[w[0]] * (k - len(w))] for w in windows] for windows, k in zip(axes, sizes, strict=True)]
        index = tuple(tuple(place_of(grid, at) for at in product(*window)) for window in product(*full))
        return cls(tuple(len(windows) for windows in axes), index)

    @classmethod
    def same(cls, grid: Grid) -> "Windows":
        """Each position by itself."""
        return cls(grid, tuple((k,) for k in range(prod(grid))))

    def within(self, outer: "Windows") -> "Windows":
        """Windows of windows: those of each position that an outer window sees, one after the other."""
        return Windows(outer.grid, tuple(tuple(k for p in window for k in self.index[p]) for window in outer.index))

    def without_copies(self) -> "Windows":
        """Each position of a window once, as far as all windows have as many: what is left repeats one."""
        once = [tuple(dict.fromkeys(window)) for window in self.index]
        size = max(len(window) for window in once)
        return Windows(self.grid, tuple(window + window[:1] * (size - len(window)) for window in once))

    def beside(self, other: "Windows") -> "Windows":
        """Both windows of each position, one after the other."""
        return Windows(self.grid, tuple(a + b for a, b in zip(self.index, other.index, strict=True)))


def place_of(grid: Grid, at: Sequence[int]) -> int:
    """The number of a position in the grid's order."""
    number = 0
    for n, k in zip(grid, at, strict=True):
        number = number * n + k
    return number


@dataclass(frozen=True, eq=False)
class Parameters:
    """`count` parameters of each channel's own, the same for all samples: mean + std·ω, standard normal ω.

    `rate` is what the training of each adds for (∂f/∂w)²; `uniform`: they are not normal. Told apart by identity.
    """

    count: int
    mean: float
    std: float
    rate: float
    uniform: bool = False

    def at(self, x: Tensor) -> Tensor:
        """The parameters at standard normal points [count, points], of which those without variance have none."""
        if not self.std:
            return x.new_full((self.count, x.shape[1]), self.mean)
        # erf(x/√2) is uniform on [−1, 1], √3 makes its variance one.
        return self.mean + self.std * ((x / 2**0.5).erf() * 3**0.5 if self.uniform else x)


@dataclass(frozen=True)
class Source:
    """What a function reads: at which windows, and of a field the rate of a scale that was just applied to it.

    `own`: parameters of each channel's own; None: a field, the next of the operation's inputs.
    """

    windows: Windows
    own: Parameters | None = None
    gain: float = 0.0


@dataclass(frozen=True)
class Core:
    """g(x) = outer(z, *x) of windows x, with z = inner(*x), whose moments are known."""

    inner: Callable[..., Tensor] = field(repr=False)
    outer: Callable[..., Tensor] = field(repr=False)
