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
from .core import Grid, Here, Moments, Need, Op, Taken, drawn_with
from .draws import joint_roots
from .sampled import normal_factors

# Numbers of one tensor [pairs, window, points] at a time, and of the covariances whose roots are taken at once
# (heuristics: a few of the first lie in the cache of a core).
NUMBERS, ROOTS = 1 << 17, 1 << 20
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

    g takes tensors [K, ...], one for each source. For each two positions of two samples, u and v are R(x ± y)/√2 with R
    the symmetric root of their joint covariance, its positive part where it is singular. An exchange of the samples
    turns the sign of y; all four signs of x and y are taken, and the points' second moments are exact.
    Cost: O(samples·K²) for each two positions of two samples, and a root of 2K by 2K.
    """

    fn: Callable[..., Tensor] = field(repr=False)
    label: str
    sources: tuple[Source, ...] = field(repr=False)
    samples: int
    seed: int
    limit: ClassVar[str] = (
        "channels → ∞, each a function of its own values over a window, which stays as large as it is"
    )
    own: ClassVar[Need] = Need.WHOLE

    def taken(self) -> Taken:
        """As `Op.taken`, with the functions' names."""
        return Taken(self.label.rpartition(", ")[2], self.limit, drawn_with(self.samples))

    def alone(self) -> bool:
        """Yes: among others, a root of a singular covariance rounds."""
        return True

    def reads(self, asked: Need) -> Need:
        """All pairs of positions, which a window correlates."""
        return Need.WHOLE if asked else asked

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        first, grid = inputs[0], self.sources[0].windows.grid
        whole, size = here.whole(grid), prod(grid)
        if torch.is_grad_enabled() and any(s.cov.requires_grad for s in inputs):
            raise InputError(
                f"{self.label}: means over windows are not differentiable in the inputs, which require gradients. Give "
                "x.detach()."
            )
        pairs = first.cov.shape[(2 if first.whole else 1) * len(first.grid) :]
        p = q = torch.arange(size, device=first.cov.device)
        if whole and here.pairs.same:  # a sample with itself: (q, p) is (p, q)
            p, q = torch.triu_indices(size, size, device=p.device)
        elif whole:
            p, q = p.repeat_interleave(size), p.repeat(size)
        values = _Draws(self, inputs, here).moments(p, q, pairs)

        def placed(v: Tensor) -> Tensor:
            """By positions of both sides, as the output is."""
            if not whole:
                return v.view(*grid, *pairs)
            out = v.new_empty(size, size, *pairs)
            out[q, p] = v
            out[p, q] = v
            return out.view(*grid, *grid, *pairs)

        cov, *ntk = (placed(v) for v in values)
        return Moments(cov, ntk[0] if ntk else None, grid, whole)


class _Draws:
    """One call: the moments at hand, the points, and means over them for any pairs of positions and samples."""

    def __init__(self, op: Windowed, inputs: Sequence[Moments], here: Here) -> None:
        self.fn, self.zipped, like = op.fn, here.pairs.zipped, inputs[0].cov
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
        self.slope = here.tangent and bool(trained or any(s.ntk is not None for s in inputs))
        even, odd = sum(s.even for s in op.sources), sum(s.odd for s in op.sources)
        self.points = tuple(v.to(like) for v in _signed_points(op.samples, even, odd, op.seed))
        self.size = max(s.windows.size for s in op.sources)

    def moments(self, p: Tensor, q: Tensor, pairs: torch.Size) -> list[Tensor]:
        """cov, and ntk if it is not zero, at windows p and q of all pairs of samples: [windows, *pairs]."""
        count, columns = prod(pairs), pairs[-1]
        roots, at_once = (
            max(1, n) for n in (ROOTS // self.size**2 // 4, NUMBERS // self.size // self.points[0].shape[1])
        )
        # One tensor for all results: small ones that live on between large ones that do not would tear up the memory.
        sums = self.points[0].new_empty(1 + self.slope, len(p) * count)
        for entries, out in zip(
            torch.arange(len(p) * count, device=p.device).split(roots), sums.split(roots, 1), strict=True
        ):
            at, pair = entries // count, entries % count
            i, j = (pair, pair) if self.zipped else (pair // columns, pair % columns)
            for view in self.views:
                view.look(p[at], q[at], pair, i, j)
            for k in range(0, len(entries), at_once):
                part = slice(k, k + at_once)
                for row, v in zip(out, self._means(part), strict=True):
                    row[part] = v
        return [row.view(len(p), *pairs) for row in sums]

    def _means(self, part: slice) -> list[Tensor]:
        """The means over all points, for some of the entries that are looked at."""
        values, even, odd = [], 0, 0
        x, y = self.points
        for view in self.views:
            s = view.source
            values.append(view.values(part, x[even : even + s.even], y[odd : odd + s.odd]))
            even, odd = even + s.even, odd + s.odd
        if not self.slope:
            left, right = self.fn(*values).chunk(2)
            return [(left * right).mean(-1)]
        known = [v.requires_grad_() for v in values]
        with torch.enable_grad():
            out = self.fn(*known)
            grads = torch.autograd.grad(out.sum(), known, allow_unused=True)
        left, right = out.detach().chunk(2)
        # g does not depend on a source that it ignores: autograd gives None there.
        parts = [
            view.tangent(part, v.detach(), d)
            for view, v, d in zip(self.views, values, grads, strict=True)
            if d is not None
        ]
        return [(left * right).mean(-1), torch.stack(parts).sum(0)]


class _View:
    """One source: its moments, and what was looked at of them. Values are [K, 2e, points]: e of u, then e of v."""

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
        k = self.source.windows.size
        if k == 1:
            pa, pb, qa, qb = normal_factors(cross, u, v)
            self.roots = torch.cat([pa, pb], 2), torch.cat([qa, -qb], 2)
            return
        # The root needs float64: a covariance is singular where samples or windows coincide.
        joint = torch.cat([torch.cat([u, cross], 2), torch.cat([cross.mT, v], 2)], 1).double()
        root = joint_roots(joint, None, 1.0, 0.0, 1.0)[1] / 2**0.5
        # Of (x + y, x − y)/√2: the columns of x, then those of y.
        turned = torch.cat([root[..., :k] + root[..., k:], root[..., :k] - root[..., k:]], 2).to(self.like)
        self.roots = turned[:, :k], turned[:, k:]

    def _cells(self, a: Tensor, b: Tensor) -> Tensor:
        return a.unsqueeze(2) * self.size + b.unsqueeze(1)

    def values(self, part: slice, x: Tensor, y: Tensor) -> Tensor:
        """The source at the points, of both samples."""
        own = self.source.own
        if own is None:
            return torch.cat([root[part] for root in self.roots]).movedim(1, 0) @ torch.cat([x, y])
        points = own.at(x)
        index = torch.cat([self.a[part], self.b[part]]).T
        # Parameters by number; 0 where there is none.
        return points[index.clamp(min=0)] * (index >= 0).to(points).unsqueeze(-1)

    def tangent(self, part: slice, values: Tensor, slopes: Tensor) -> Tensor:
        """What comes through this source [e]: its tangent kernel between both windows, by the slopes there."""
        left, right = slopes.movedim(1, 0).chunk(2)  # [e, K, points]
        theta = self._tangents(part)
        total = slopes.new_zeros(len(left))
        if theta is not None:
            total = ((left @ right.mT) * theta).sum((1, 2)) / slopes.shape[-1]
        if self.source.gain:  # ∂g/∂γ = Σ_k u_k ∂_k g: one scale for all positions
            u, v = (slopes * values).sum(0).chunk(2)
            total = total + self.source.gain * (u * v).mean(-1)
        return total

    def _tangents(self, part: slice) -> Tensor | None:
        """The tangent kernel between the entries of both windows [e, K, K]; None is zero."""
        a, b = self.a[part], self.b[part]
        if self.source.own is not None:
            same = (a.unsqueeze(2) == b.unsqueeze(1)) & (a.unsqueeze(2) >= 0)
            return self.source.own.rate * same.to(self.like) if self.source.own.rate else None
        return None if self.ntk is None else self.ntk[self._cells(a, b), self.pair[part]]


def _signed_points(samples: int, even: int, odd: int, seed: int) -> Iterator[Tensor]:
    """Standard normal points x [even, n] and y [odd, n], with all four signs, n about `samples`."""
    x, y = normal_points(max(1, -(-samples // 4)), even, odd, seed)
    yield torch.cat([x, x, -x, -x], 1)
    yield torch.cat([y, -y, y, -y], 1)


@lru_cache(maxsize=8)
def normal_points(count: int, even: int, odd: int, seed: int) -> tuple[Tensor, Tensor]:
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
