"""Moments of functions of windows, drawn: Gaussian fields over all positions of two samples, the same for all windows.

y(p) = g(u₁ over p's window, …; w). The fields of two samples are drawn whole, as R Z with R the symmetric root of their
joint covariance, and g is taken at every window: the moments of all pairs of windows are matrix products over draws.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import InputError
from .core import Here, Moments, Need, Op, Taken, drawn_with
from .draws import symmetric_root
from .points import normal_points
from .windows import Core, Source

# Numbers of the largest tensors that are held at once (heuristics): of all windows at some draws, of roots and fields,
# and of products between the entries of two windows.
NUMBERS, ROOTS, PRODUCTS = 1 << 22, 1 << 22, 1 << 21
# Windows cost little beside their pairs, so there are more draws than `samples` where there are many windows, up to so
# many windows times draws; after depthwise layers 4 times as many, or 16 times up to FEW in all (heuristics).
EVALUATED, FEW = 1024, 1 << 12


@dataclass(frozen=True)
class Windowed(Op):
    """y = g(u₁ over its window, …): cov' = E[g(u)g(v)], ntk' = Σ_j Σ_kl E[∂_jk g(u) ∂_jl g(v)]·ntk_j[p + k, p' + l].

    g takes tensors [K, ...], one for each source. u and v over all positions are R(x ± y)/√2 with R the symmetric root
    of their joint covariance, its positive part where it is singular. An exchange of the samples turns the sign of y;
    all signs of x, of y and of the parameters w are taken, and the points' second moments are exact where there are
    enough of them. With a `core` z, the means of z z' over the draws are known too, and how far they are off is
    subtracted: cov' + E[g_z g_z']·(E[z z'] − mean of z z'), and so for ntk'.
    Cost of two samples with P positions and W windows: O(P³ + draws·(P² + W·K + W²)), and draws·W²·K² for ntk'.
    """

    fn: Callable[..., Tensor] = field(repr=False)
    label: str
    sources: tuple[Source, ...] = field(repr=False)
    samples: int
    seed: int
    core: Core | None = field(default=None, repr=False)
    limit: ClassVar[str] = (
        "channels → ∞, each a function of its own values over a window, which stays as large as it is"
    )
    own: ClassVar[Need] = Need.WHOLE

    def taken(self) -> Taken:
        """As `Op.taken`, with the functions' names."""
        return Taken(self.label.rpartition(", ")[2], self.limit, drawn_with(self.draws))

    def alone(self) -> bool:
        """Yes: among others, a root of a singular covariance rounds."""
        return True

    def reads(self, asked: Need) -> Need:
        """All pairs of positions, which a window correlates."""
        return Need.WHOLE if asked else asked

    @property
    def draws(self) -> int:
        """As many as make the work of all windows about that of drawing each pair of windows by itself, or less."""
        windows = len(self.sources[0].windows.index)
        # Parameters of a channel's own are the same in all windows: what they scatter does not average out.
        scatter = windows <= EVALUATED // 16 and any(s.own is not None and s.own.std for s in self.sources)
        least = max(4 * self.samples, min(16 * self.samples, FEW)) if scatter else 1
        return max(self.samples * max(1, min(windows // 4, EVALUATED // windows)), least)

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        first, grid = inputs[0], self.sources[0].windows.grid
        if torch.is_grad_enabled() and any(s.cov.requires_grad for s in inputs):
            raise InputError(
                f"{self.label}: means over windows are not differentiable in the inputs, which require gradients. Give "
                "x.detach()."
            )
        whole, pairs = here.whole(grid), first.cov.shape[2 * len(first.grid) :]
        cov, *ntk = _Draws(self, inputs, here, whole).moments(pairs)
        shape = (*grid, *grid, *pairs) if whole else (*grid, *pairs)
        return Moments(cov.view(shape), ntk[0].view(shape) if ntk else None, grid, whole)


class _Draws:
    """One call: the moments at hand, the points, and means over them for some pairs of samples at a time."""

    def __init__(self, op: Windowed, inputs: Sequence[Moments], here: Here, whole: bool) -> None:
        self.op, self.whole, like = op, whole, inputs[0].cov
        self.zipped, self.same = here.pairs.zipped, here.pairs.same
        self.sides = 1 if self.same else 2
        # Parameters are no inputs: the others are, in order; the core comes last.
        fields = iter(enumerate(inputs))
        self.views: list[_View] = []
        for source in op.sources:
            if source.own is None:
                k, moments = next(fields)
                self.views.append(_FieldView(source, like, moments, here.own(k)))
            else:
                self.views.append(_ParameterView(source, like))
        self.core = None if op.core is None else _Known(inputs[-1])
        trained = any(s.own.rate if s.own else s.gain for s in op.sources)
        self.slope = here.tangent and bool(trained or any(s.ntk is not None for s in inputs))
        drawn = sum(s.own.count for s in op.sources if s.own is not None and s.own.std)
        over = sum(view.size for view in self.views if isinstance(view, _FieldView))
        self.points = tuple(v.to(like) for v in signed_points(op.draws, drawn, over, op.seed))

    def moments(self, pairs: torch.Size) -> list[Tensor]:
        """cov, and ntk if it is not zero, of all windows and pairs of samples: [windows, windows, pairs]."""
        count, columns, windows = prod(pairs), pairs[-1], len(self.op.sources[0].windows.index)
        entries = self.sides * windows * sum(s.windows.size for s in self.op.sources)
        draws, over = (
            self.points[0].shape[1],
            self.sides * sum(view.size for view in self.views if isinstance(view, _FieldView)),
        )
        at_once = max(1, min(NUMBERS // (entries * draws), ROOTS // (over * (over + draws))))
        shape = (windows, windows, count) if self.whole else (windows, count)
        results = [self.points[0].new_empty(shape) for _ in range(1 + self.slope)]
        for pair in torch.arange(count, device=results[0].device).split(at_once):
            i, j = (pair, pair) if self.zipped else (pair // columns, pair % columns)
            even = own = 0
            for view in self.views:
                if isinstance(view, _FieldView):
                    part = slice(even, even + view.size)
                    view.draw(pair, i, j, self.points[1][part], None if self.same else self.points[2][part])
                    even += view.size
                elif isinstance(view, _ParameterView):
                    own += view.draw(self.points[0][own:])
            step = max(1, NUMBERS // (entries * len(pair)))
            sums = _Sums(self, pair)
            for start in range(0, draws, step):
                sums.add(slice(start, start + step))
            for out, v in zip(results, sums.means(draws), strict=True):
                out[..., pair] = v.movedim(0, -1)
        return results

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ over draws of features of both samples [b, W, draws] at all pairs of windows, or at equal ones."""
        return left @ right.mT if self.whole else (left * right).sum(-1)


class _Known:
    """The moments of the core z, of all pairs of windows."""

    def __init__(self, moments: Moments) -> None:
        size = prod(moments.grid)
        self.cov = moments.cov.reshape(size, size, -1)
        self.ntk = None if moments.ntk is None else moments.ntk.reshape(size, size, -1)

    def at(self, v: Tensor, pair: Tensor, whole: bool) -> Tensor:
        """[b, W, W], or [b, W] of equal windows."""
        v = v[..., pair].movedim(-1, 0)
        return v if whole else v.diagonal(dim1=1, dim2=2)


class _Sums:
    """Sums over draws, for some pairs of samples: of g g' and, where asked, of what passes through its slopes."""

    def __init__(self, draws: _Draws, pair: Tensor) -> None:
        self.draws, self.pair = draws, pair
        self.totals: dict[str, Tensor] = {}

    def _count(self, name: str, v: Tensor) -> None:
        self.totals[name] = self.totals[name] + v if name in self.totals else v

    def add(self, part: slice) -> None:
        """The sums over some of the draws."""
        d = self.draws
        shape = (len(self.pair), d.sides)
        values = [view.values(part, shape) for view in d.views]
        if d.slope:
            values = [v.requires_grad_() for v in values]
        with torch.set_grad_enabled(d.slope):
            inner = d.op.core.inner(*values) if d.op.core is not None else None
        if d.op.core is None or inner is None:
            self._add_plain(values)
        else:
            self._add_core(values, inner, d.op.core)

    def _add_plain(self, values: list[Tensor]) -> None:
        d = self.draws
        if not d.slope:
            self._count("cov", d.product(*_both(d.op.fn(*values))))
            return
        with torch.enable_grad():
            out = d.op.fn(*values)
            slopes = torch.autograd.grad(out.sum(), values, allow_unused=True)
        self._count("cov", d.product(*_both(out.detach())))
        self._count("ntk", self._through(values, slopes))

    def _add_core(self, values: list[Tensor], inner: Tensor, core: Core) -> None:
        """As above, and the same sums for z alone."""
        d, z = self.draws, inner.detach().requires_grad_()
        with torch.enable_grad():
            out = core.outer(z, *values)
            by_z, *direct = torch.autograd.grad(
                out.sum(), (z, *values) if d.slope else (z,), allow_unused=True, retain_graph=False
            )
        if by_z is None:
            by_z = torch.zeros_like(z)
        z, out = z.detach(), out.detach()
        self._count("cov", d.product(*_both(out)))
        self._count("slope", d.product(*_both(by_z)))
        self._count("core cov", d.product(*_both(z)))
        if not d.slope:
            return
        below = torch.autograd.grad(inner.sum(), values, allow_unused=True)
        slopes = [_sum_of(None if b is None else by_z * b, c) for b, c in zip(below, direct, strict=True)]
        self._count("ntk", self._through(values, slopes))
        self._count("core ntk", self._through(values, below))

    def _through(self, values: Sequence[Tensor], slopes: Sequence[Tensor | None]) -> Tensor:
        """What comes through all sources; a function does not depend on one that it ignores."""
        parts = [
            view.tangent(self.pair, v.detach(), slope, self.draws)
            for view, v, slope in zip(self.draws.views, values, slopes, strict=True)
            if slope is not None
        ]
        return torch.stack(parts).sum(0)

    def means(self, draws: int) -> Iterator[Tensor]:
        """cov, and ntk where it is asked for: [b, W, W] or [b, W]."""
        d, mean = self.draws, {name: v / draws for name, v in self.totals.items()}
        known = d.core
        for name in ("cov", "ntk")[: 1 + d.slope]:
            v = mean[name]
            if known is not None:
                # A source without a tangent kernel adds nothing to either.
                exact = known.cov if name == "cov" else known.ntk
                off = (
                    -mean[f"core {name}"]
                    if exact is None
                    else known.at(exact, self.pair, d.whole) - mean[f"core {name}"]
                )
                v = v + mean["slope"] * off
            # A sample with itself: (q, p) is (p, q) to the last bit.
            yield (v + v.mT) / 2 if d.whole and d.same else v


def _both(v: Tensor) -> tuple[Tensor, Tensor]:
    """[b, sides, W, draws]: of u and of v."""
    return v[:, 0], v[:, -1]


def _sum_of(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _View:
    """One source: its values are [K, b, sides, W, draws], for b pairs of samples and all W windows."""

    def __init__(self, source: Source, like: Tensor) -> None:
        self.source, self.like = source, like
        self.index = torch.tensor(source.windows.index, device=like.device)  # [W, K]

    def values(self, part: slice, shape: tuple[int, int]) -> Tensor:
        """The source at some of the draws; `shape` is b and the sides."""
        raise NotImplementedError

    def tangent(self, pair: Tensor, values: Tensor, slopes: Tensor, draws: _Draws) -> Tensor:
        """What comes through this source, summed over draws: its tangent kernel between windows, by the slopes."""
        raise NotImplementedError


class _FieldView(_View):
    """A Gaussian field, drawn over all its positions."""

    def __init__(self, source: Source, like: Tensor, moments: Moments, own: tuple[Tensor, Tensor]) -> None:
        super().__init__(source, like)
        self.size = size = prod(moments.grid)
        self.cov = moments.cov.reshape(size, size, -1)
        self.ntk = None if moments.ntk is None else moments.ntk.reshape(size, size, -1)
        self.own = [v.reshape(size, size, -1) for v in own]

    def draw(self, pair: Tensor, i: Tensor, j: Tensor, x: Tensor, y: Tensor | None) -> None:
        """The field of these pairs of samples (i, j) at all points: [b, sides, P, draws]; y None: i is j."""
        # The root needs float64: a covariance is singular where samples or positions coincide.
        u = self.own[0][..., i].movedim(-1, 0).double()
        if y is None:
            drawn = (symmetric_root(u).to(self.like) @ x).unsqueeze(1)
            exact = u.diagonal(dim1=1, dim2=2).unsqueeze(1)
        else:
            v, cross = self.own[1][..., j].movedim(-1, 0).double(), self.cov[..., pair].movedim(-1, 0).double()
            root = symmetric_root(torch.cat([torch.cat([u, cross], 2), torch.cat([cross.mT, v], 2)], 1)) / 2**0.5
            # Of (x + y, x − y)/√2: the columns of x, then those of y.
            a, b = root[..., : self.size], root[..., self.size :]
            drawn = (a + b).to(self.like) @ x + (a - b).to(self.like) @ y
            drawn = drawn.unflatten(1, (2, self.size))
            exact = torch.stack([m.diagonal(dim1=1, dim2=2) for m in (u, v)], 1)
        # Few points have variances of their own; the exact ones are known.
        found = drawn.square().mean(-1)
        scale = torch.where(found > 0, exact.to(found).clamp(min=0) / found.where(found > 0, 1.0), 1.0).sqrt()
        self.drawn = drawn * scale.unsqueeze(-1)

    def values(self, part: slice, shape: tuple[int, int]) -> Tensor:
        return self.drawn[..., part][:, :, self.index.T].movedim(2, 0)

    def tangent(self, pair: Tensor, values: Tensor, slopes: Tensor, draws: _Draws) -> Tensor:
        windows = len(self.index)
        shape = (len(pair), windows, windows) if draws.whole else (len(pair), windows)
        total = slopes.new_zeros(shape)
        if self.ntk is not None:
            total = total + self._kernel_part(self.ntk[..., pair].movedim(-1, 0), slopes, draws.whole)
        if self.source.gain:  # ∂g/∂γ = Σ_k u_k ∂_k g: one scale for all positions
            total = total + self.source.gain * draws.product(*_both((slopes * values).sum(0)))
        return total

    def _kernel_part(self, theta: Tensor, slopes: Tensor, whole: bool) -> Tensor:
        """Σ_kl (Σ over draws of ∂_k g ∂_l g')·Θ[p + k, p' + l], theta [b, P, P]."""
        left, right = (v.permute(1, 2, 0, 3) for v in (slopes[:, :, 0], slopes[:, :, -1]))  # [b, W, K, draws]
        if not whole:
            return ((left @ right.mT) * theta[:, self.index.unsqueeze(2), self.index.unsqueeze(1)]).sum((2, 3))
        size, windows = self.index.shape[1], len(self.index)
        flat, right = self.index.flatten(), right.flatten(1, 2)
        parts = []
        step = max(1, PRODUCTS // (len(theta) * size * size * windows))
        for start in range(0, windows, step):
            rows = left[:, start : start + step].flatten(1, 2)
            cells = theta[:, self.index[start : start + step].flatten()][:, :, flat]
            parts.append(((rows @ right.mT) * cells).unflatten(2, (windows, size)).unflatten(1, (-1, size)).sum((2, 4)))
        return torch.cat(parts, 1)


class _ParameterView(_View):
    """Parameters of each channel's own, the same for all samples."""

    def draw(self, x: Tensor) -> int:
        """The parameters at the points, [count, draws]; how many coordinates they take."""
        own = self.source.own
        assert own is not None
        self.drawn = own.at(x[: own.count] if own.std else x.new_empty(0, x.shape[1]))
        return own.count if own.std else 0

    def values(self, part: slice, shape: tuple[int, int]) -> Tensor:
        # By number; 0 where there is none.
        index = self.index.T
        found = self.drawn[:, part][index.clamp(min=0)] * (index >= 0).to(self.like).unsqueeze(-1)
        return found[:, None, None].expand(-1, *shape, -1, -1)

    def tangent(self, pair: Tensor, values: Tensor, slopes: Tensor, draws: _Draws) -> Tensor:
        own, windows = self.source.own, len(self.index)
        assert own is not None
        if not own.rate:
            shape = (len(pair), windows, windows) if draws.whole else (len(pair), windows)
            return slopes.new_zeros(shape)
        # By parameter in place of entry; those without a number go nowhere.
        places = torch.arange(own.count, device=self.index.device)
        which = (self.index.unsqueeze(2) == places).to(slopes)  # [W, K, count]
        by_parameter = torch.einsum("wkc,kbswd->bswcd", which, slopes).flatten(3)
        return own.rate * draws.product(*_both(by_parameter))


def signed_points(draws: int, own: int, over: int, seed: int) -> Iterator[Tensor]:
    """Standard normal points [own, n], [over, n] and [over, n] with all signs of each, n about `draws`."""
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64)] * (3 if own else 2)).T
    signs = signs if own else torch.cat([torch.ones_like(signs[:1]), signs])
    base = normal_points(max(1, -(-draws // signs.shape[1])), (own, over, over), seed)
    for v, sign in zip(base, signs, strict=True):
        yield (sign.view(1, -1, 1) * v.unsqueeze(1)).flatten(1)
