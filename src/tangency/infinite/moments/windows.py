"""Functions of Gaussian fields over a window of positions: max pooling, an activation after a depthwise convolution.

y(p) = g(u(p + k₁), …, u(p + k_K); z(p); w): of fields at several positions, and of parameters w of each channel's own.
For two positions of two samples that is a function of a Gaussian in 2K dimensions. Its moments have no closed form:
they are means over quasi-random points, always the same ones, whose error `k.error` says.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import InputError
from .core import Grid, Here, Moments, Need, Op
from .draws import joint_roots
from .sampled import normal_factors

# Numbers of one tensor [pairs, window, points] at a time, and of the covariances whose roots are taken at once
# (heuristics: a few of the first lie in the cache of a core).
NUMBERS, ROOTS = 1 << 18, 1 << 20
WIDEST = 32  # positions of all windows of one function together: the error of quasi-random points grows with them


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
        index = tuple(tuple(_places(grid, at) for at in product(*window)) for window in product(*full))
        return cls(tuple(len(windows) for windows in axes), index)

    @classmethod
    def same(cls, grid: Grid) -> "Windows":
        """Each position by itself."""
        return cls(grid, tuple((k,) for k in range(prod(grid))))

    def within(self, outer: "Windows") -> "Windows":
        """Windows of windows: those of each position that an outer window sees, one after the other."""
        return Windows(outer.grid, tuple(tuple(k for p in window for k in self.index[p]) for window in outer.index))

    def beside(self, other: "Windows") -> "Windows":
        """Both windows of each position, one after the other."""
        return Windows(self.grid, tuple(a + b for a, b in zip(self.index, other.index, strict=True)))


def _places(grid: Grid, at: Sequence[int]) -> int:
    """The number of a position in the grid's order."""
    number = 0
    for n, k in zip(grid, at, strict=True):
        number = number * n + k
    return number


@dataclass(frozen=True, eq=False)
class Parameters:
    """`count` parameters of each channel's own, the same for all samples: mean + std·ω, standard normal ω.

    `rate` is what the training of each adds for (∂f/∂w)². Told apart by identity.
    """

    count: int
    mean: float
    std: float
    rate: float


@dataclass(frozen=True)
class Source:
    """What a function reads: at which windows, and of a field the rate of a scale that was just applied to it.

    `own`: parameters of each channel's own; None: a field, the next of the operation's inputs.
    """

    windows: Windows
    own: Parameters | None = None
    gain: float = 0.0

    @property
    def even(self) -> int:
        """Coordinates that an exchange of both samples leaves as they are."""
        return self.windows.size if self.own is None else self.own.count if self.own.std else 0

    @property
    def odd(self) -> int:
        """Coordinates that it turns the sign of."""
        return self.windows.size if self.own is None else 0


@dataclass(frozen=True)
class Windowed(Op):
    """y = g(u₁ over its window, …): cov' = E[g(u)g(v)], ntk' = Σ_j Σ_kl E[∂_jk g(u) ∂_jl g(v)]·ntk_j[p + k, p' + l].

    g takes tensors [..., K], one for each source. For each two positions of two samples, u and v are R(x ± y)/√2 with R
    the symmetric root of their joint covariance, its positive part where it is singular. An exchange of the samples
    turns the sign of y; all four signs of x and y are taken, and the points' second moments are exact.
    Cost: O(samples·K²) for each two positions of two samples, and a root of 2K by 2K.
    """

    fn: Callable[..., Tensor] = field(repr=False)
    label: str
    sources: tuple[Source, ...] = field(repr=False)
    samples: int
    seed: int
    own: ClassVar[Need] = Need.WHOLE

    def alone(self) -> bool:
        """Yes: among others, a root of a singular covariance rounds."""
        return True

    def reads(self, asked: Need) -> Need:
        """All pairs of positions, which a window correlates."""
        return Need.WHOLE if asked else asked

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        grid = self.sources[0].windows.grid
        whole, like = here.whole(grid), inputs[0].cov
        if torch.is_grad_enabled() and any(s.cov.requires_grad for s in inputs):
            raise InputError(
                f"{self.label}: means over windows are not differentiable in the inputs, which require gradients. Give "
                "x.detach()."
            )
        dims = 2 if inputs[0].whole else 1
        pairs = like.shape[dims * len(inputs[0].grid) :]
        part = _Part(self, inputs, here, whole, pairs)
        entries = torch.arange(prod(grid) ** (2 if whole else 1) * prod(pairs), device=like.device)
        found = [part.moments(e) for e in entries.split(max(1, ROOTS // part.square))]
        shape = (*grid * (2 if whole else 1), *pairs)
        cov = torch.cat([v for v, _ in found]).view(shape)
        ntks = [v for _, v in found if v is not None]
        return Moments(cov, torch.cat(ntks).view(shape) if ntks else None, grid, whole)


class _Part:
    """One call: the moments at hand, and those of any pairs of positions and samples by their number."""

    def __init__(self, op: Windowed, inputs: Sequence[Moments], here: Here, whole: bool, pairs: torch.Size) -> None:
        self.op, self.pairs, self.whole, self.zipped = op, prod(pairs), whole, here.pairs.zipped
        self.columns, like = pairs[-1], inputs[0].cov
        # Parameters are no inputs: the others are, in order.
        fields = iter(enumerate(inputs))
        self.views = []
        for source in op.sources:
            view = _View(source, like)
            if source.own is None:
                k, moments = next(fields)
                view.read(moments, here.own(k))
            self.views.append(view)
        trained = any(s.own.rate if s.own else s.gain for s in op.sources)
        self.slope = here.tangent and (trained or any(s.ntk is not None for s in inputs))
        even, odd = (sum(getattr(s, kind) for s in op.sources) for kind in ("even", "odd"))
        self.points = tuple(v.to(like) for v in _signed_points(op.samples, even, odd, op.seed))
        self.square = max((2 * s.windows.size) ** 2 for s in op.sources)
        self.positions = len(op.sources[0].windows.index)

    def moments(self, entries: Tensor) -> tuple[Tensor, Tensor | None]:
        """cov and ntk [e] of these entries, counted as the output [p, p', samples] is (or [p, samples])."""
        at, pair = entries // self.pairs, entries % self.pairs
        p, q = (at // self.positions, at % self.positions) if self.whole else (at, at)
        i, j = (pair, pair) if self.zipped else (pair // self.columns, pair % self.columns)
        for view in self.views:
            view.look(p, q, pair, i, j)
        step = max(1, NUMBERS // (self.points[0].shape[1] * max(s.windows.size for s in self.op.sources)))
        found = [self._means(slice(k, k + step)) for k in range(0, len(entries), step)]
        ntks = [v for _, v in found if v is not None]
        return torch.cat([v for v, _ in found]), torch.cat(ntks) if ntks else None

    def _means(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """The means over all points, for some of the entries that are looked at."""
        left, right, even, odd = [], [], 0, 0
        x, y = self.points
        for view in self.views:
            s = view.source
            u, v = view.values(part, x[even : even + s.even], y[odd : odd + s.odd])
            left.append(u)
            right.append(v)
            even, odd = even + s.even, odd + s.odd
        count = x.shape[1]
        if not self.slope:
            return (self._value(left) * self._value(right)).mean(-1), None
        g, dg = self._slopes(left)
        h, dh = self._slopes(right)
        ntk = torch.zeros_like(g[:, 0])
        for k, view in enumerate(self.views):
            a, b = dg[k], dh[k]
            if a is None or b is None:  # g does not depend on a source that it ignores
                continue
            theta = view.tangents(part)
            if theta is not None:
                ntk = ntk + ((a @ b.mT) * theta).sum((1, 2)) / count
            if view.source.gain:  # ∂g/∂γ = Σ_k u_k ∂_k g: one scale for all positions
                both = (a * left[k]).sum(1) * (b * right[k]).sum(1)
                ntk = ntk + view.source.gain * both.mean(-1)
        return (g * h).mean(-1), ntk

    def _value(self, values: list[Tensor]) -> Tensor:
        """g at all points [e, points]; windows are its last axis."""
        # What depends on parameters of variance zero alone has no axis of points of its own.
        return self.op.fn(*(v.movedim(1, -1) for v in values))

    def _slopes(self, values: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        """g [e, points] and its derivatives [e, K, points] by each source."""
        known = [v.detach().requires_grad_() for v in values]
        with torch.enable_grad():
            out = self._value(known)
            grads = torch.autograd.grad(out.sum(), known, allow_unused=True)
        return out.detach(), list(grads)


class _View:
    """One source: its moments, and what was looked at of them."""

    def __init__(self, source: Source, like: Tensor) -> None:
        self.source, self.like = source, like
        self.index = torch.tensor(source.windows.index, device=like.device)

    def read(self, moments: Moments, own: tuple[Tensor, Tensor]) -> None:
        """The moments of a field: of pairs, and of each side with itself."""
        self.size = size = prod(moments.grid)
        self.cov = moments.cov.reshape(size * size, -1)
        self.ntk = None if moments.ntk is None else moments.ntk.reshape(size * size, -1)
        self.own = [v.reshape(size * size, -1) for v in own]

    def look(self, p: Tensor, q: Tensor, pair: Tensor, i: Tensor, j: Tensor) -> None:
        """Take the blocks of windows p and q for pairs of samples (i, j), and their roots."""
        self.a, self.b = self.index[p], self.index[q]  # [e, K]
        if self.source.own is not None:
            return
        self.pair = pair.view(-1, 1, 1)
        cross = self.cov[self._cells(self.a, self.b), self.pair]
        u = self.own[0][self._cells(self.a, self.a), i.view(-1, 1, 1)]
        v = self.own[1][self._cells(self.b, self.b), j.view(-1, 1, 1)]
        if self.source.windows.size == 1:
            pa, pb, qa, qb = normal_factors(cross, u, v)
            self.roots = torch.cat([pa, pb], 2), torch.cat([qa, -qb], 2)
            return
        # The root needs float64: a covariance is singular where samples or windows coincide.
        joint = torch.cat([torch.cat([u, cross], 2), torch.cat([cross.mT, v], 2)], 1).double()
        root = joint_roots(joint, None, 1.0, 0.0, 1.0)[1] / 2**0.5
        k = self.source.windows.size
        # Of (x + y, x − y)/√2: the columns of x, then those of y.
        turned = torch.cat([root[..., :k] + root[..., k:], root[..., :k] - root[..., k:]], 2).to(self.like)
        self.roots = turned[:, :k], turned[:, k:]

    def _cells(self, a: Tensor, b: Tensor) -> Tensor:
        return a.unsqueeze(2) * self.size + b.unsqueeze(1)

    def values(self, part: slice, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The source at the points, for both samples [e, K, points]."""
        own = self.source.own
        if own is None:
            z = torch.cat([x, y])
            left, right = (root[part] for root in self.roots)
            return left @ z, right @ z
        points = own.mean + own.std * x if own.std else x.new_full((own.count, x.shape[1]), own.mean)
        return self._picked(points, self.a[part]), self._picked(points, self.b[part])

    def _picked(self, points: Tensor, index: Tensor) -> Tensor:
        """Parameters [count, points] by number; 0 where there is none."""
        return points[index.clamp(min=0)] * (index >= 0).to(points).unsqueeze(-1)

    def tangents(self, part: slice) -> Tensor | None:
        """The tangent kernel between the entries of both windows [e, K, K]; None is zero."""
        a, b = self.a[part], self.b[part]
        if self.source.own is not None:
            same = (a.unsqueeze(2) == b.unsqueeze(1)) & (a.unsqueeze(2) >= 0)
            return self.source.own.rate * same.to(self.like) if self.source.own.rate else None
        return None if self.ntk is None else self.ntk[self._cells(a, b), self.pair[part]]


def _signed_points(samples: int, even: int, odd: int, seed: int) -> Iterator[Tensor]:
    """Standard normal points x [even, n] and y [odd, n], with all four signs, n about `samples`."""
    x, y = _points(max(1, -(-samples // 4)), even, odd, seed)
    yield torch.cat([x, x, -x, -x], 1)
    yield torch.cat([y, -y, y, -y], 1)


@lru_cache(maxsize=8)
def _points(count: int, even: int, odd: int, seed: int) -> tuple[Tensor, Tensor]:
    """Quasi-random standard normal points [even, count] and [odd, count], turned so that they have unit covariance.

    With all signs, what is linear or quadratic in them then has its exact mean.
    """
    engine = torch.quasirandom.SobolEngine(even + odd, scramble=True, seed=seed)
    u = engine.draw(count, dtype=torch.float64).clamp(1e-15, 1 - 1e-15)  # 0 would become −∞
    drawn = torch.special.ndtri(u)
    return _whitened(drawn[:, :even]).T.contiguous(), _whitened(drawn[:, even:]).T.contiguous()


def _whitened(drawn: Tensor) -> Tensor:
    # Too few points: their covariance may be singular, and turning them would blow up their noise.
    if len(drawn) < 4 * drawn.shape[1] or not drawn.shape[1]:
        return drawn
    values, vectors = torch.linalg.eigh(drawn.T @ drawn / len(drawn))
    return drawn @ (vectors * values.rsqrt()) @ vectors.T
