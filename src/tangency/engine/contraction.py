"""From two blocks to their part of a Gram matrix, a tile at a time and within a workspace.

Every method ends in one of two forms: products L Rᵀ of matrices whose rows are samples (`TileSum.product`), or
Σ_{t,s} (a·a')(δ·δ') over positions (`TileSum.in_place`). `TileSum` adds them up and, when both sides are the same
samples, computes the lower half only.

Which form is taken for a layer is decided by its cost (`methods.py`). In 'float8' long rows of gradients, and wide
cotangents in place, are rounded once more, to 8 bits (`narrow.py`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._base.memory import WORKSPACE
from . import fused, narrow
from .blocks import DenseBlock, GradientBlock, OuterBlock, matched
from .expansion import expanded, rows_of
from .lattice import Places
from .methods import PairSizes, choose_method, dense_in_eight
from .narrow import Rounded, matmul_eight, matmul_wide
from .tied import crossed, tied

# Position-by-position products on a CPU are cut to this many bytes, so that they stay in its cache (heuristic).
_CACHED_TILE = 1 << 23
# A symmetric tile is computed in strips from its diagonal down. On a CPU each is a multiple of so many columns wide,
# which products are fastest at, and there are at most so many (heuristic: narrower ones save more, but run slower).
_COLUMNS, _STRIPS = 48, 8


class TileSum:
    """A tile under construction: [n, m] for a trace, [n, c, m, d] for the full kernel."""

    def __init__(
        self,
        x: GradientBlock,
        y: GradientBlock,
        *,
        trace: bool,
        differentiable: bool,
        workspace: int | None = None,
        eight: bool = False,
    ) -> None:
        like = x.tensors()[-1]
        dtype = torch.float32 if like.dtype in (torch.float16, narrow.EIGHT) else like.dtype
        self.n, self.m, self.c, self.d = x.n, y.n, (1 if trace else x.c), (1 if trace else y.c)
        self.trace, self.symmetric = trace, x is y
        self.workspace = workspace or WORKSPACE[like.device.type]
        self.differentiable, self.eight = differentiable, eight and not differentiable
        self.value = torch.zeros(self.n * self.c, self.m * self.d, dtype=dtype, device=like.device)
        self._cuda = like.device.type == "cuda"

    def add(
        self, x: GradientBlock, y: GradientBlock, method: str | None = None, present: Collection[str] = ()
    ) -> set[str]:
        """Add the part of one parameter.

        Its bias comes along for nothing where the cotangents' products are formed anyway; the names of the parameters
        that are thereby done with, of those `present`, are returned.
        """
        if isinstance(x, DenseBlock) and isinstance(y, DenseBlock):
            if x.scale is None or y.scale is None or x.g.dtype != y.g.dtype:
                self.product(self._wide(x.expand()), self._wide(y.expand()))
            else:
                eight = self.eight and dense_in_eight(x, y)
                left = self._rows(x.g, eight)
                self.product(left, left if x is y else self._rows(y.g, eight), (x.scale, y.scale))
        elif isinstance(x, OuterBlock) and isinstance(y, OuterBlock) and x.kind == y.kind and x.slot == y.slot:
            scale = _scales_of(x, y)
            if choose_method(x, y, self.trace, method, eight=self.eight).method == "expand":
                expand([self], [x], y)
            else:
                # Σ (a·a' + 1)(δ·δ') is both at once. Not with scaled factors: the 1 would have to be scaled as well.
                along = x.bias if x.bias == y.bias and x.bias in present and scale is None else None
                self.in_place(x, y, scale, constant=float(along is not None))
                return set() if along is None else {along}
        elif (pairs := matched(x, y)) is not None:
            for a, b in pairs:
                self.add(a, b, method)
        elif (first := tied(x)) is not None and (second := first if x is y else tied(y)) is not None:
            for a, b in zip(first, second, strict=True):
                self.add(a, b, method)
            part = crossed(first.looked_up, second.multiplied, self.trace, self.workspace)
            # Of a batch with itself the other half is the same, mirrored.
            other = part if x is y else crossed(second.looked_up, first.multiplied, self.trace, self.workspace)
            self.value = self.value + part + other.T if self.differentiable else self.value.add_(part).add_(other.T)
        else:
            self._by_samples(x, y)
        return set()

    def result(self) -> Tensor:
        """The tile; of a symmetric one the upper half is the mirrored lower half, exactly."""
        k = self.value
        if self.symmetric and not self.differentiable:
            # Above the strips nothing was computed; of the squares on the diagonal, both halves, alike up to rounding.
            for _, columns in self._tiles():
                q = slice(columns.start * self.c, columns.stop * self.c)
                k[q, q.stop :] = k[q.stop :, q].T
                k[q, q] = torch.tril(k[q, q]) + torch.tril(k[q, q], -1).T
        elif self.symmetric:
            k = (k + k.T) / 2
        return k if self.trace else k.view(self.n, self.c, self.m, self.d)

    def product(
        self, left: Tensor | Rounded, right: Tensor | Rounded, scale: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """K += L Rᵀ with rows (sample, output)."""
        if isinstance(left, Rounded) or isinstance(right, Rounded):
            assert isinstance(left, Rounded)
            assert isinstance(right, Rounded)
            self._product_in_eight(left, right, scale)
            return
        if self.differentiable:
            self.value = self.value + left @ right.T  # not in place: autograd wants each step's values
            return
        for rows, columns in self._tiles():
            r, q = self._spans(rows, columns)
            if left.dtype == torch.float16:
                part = matmul_wide(left[r], right[q].T)
                self.value[r, q] += part if scale is None else part * self._scales(scale, rows, columns)
            else:
                self.value[r, q].addmm_(left[r], right[q].T)

    def _product_in_eight(self, left: Rounded, right: Rounded, scale: tuple[Tensor, Tensor] | None) -> None:
        """As `product`; the rows' scales are put back with those of their factors."""
        on_left, on_right = left.scale, right.scale
        if scale is not None:
            on_left = on_left * scale[0].repeat_interleave(self.c)
            on_right = on_right * scale[1].repeat_interleave(self.d)
        for rows, columns in self._tiles():
            r, q = self._spans(rows, columns)
            part = matmul_eight(left.q[r], right.q[q])
            self.value[r, q].addcmul_(part.mul_(on_left[r, None]), on_right[q])

    def in_place(
        self, x: OuterBlock, y: OuterBlock, scale: tuple[Tensor, Tensor] | None = None, constant: float = 0.0
    ) -> None:
        """K += Σ_{t,s} (a_it·a_js + constant)(δ_it·δ_js), no gradient formed. Cost: t·s·(i + c·o) per pair."""
        z = PairSizes.of(x, y, self.trace, self.eight)
        shift, eight = z.shifted and not self.differentiable, z.eight_in_place
        size = max(_lifted_bytes(x), _lifted_bytes(y))
        step = max(1, self.workspace // max(1, size))
        if self.differentiable or step >= max(self.n, self.m):
            left = self._factors(x, shift, eight)
            right = left if x is y else self._factors(y, shift, eight)
            self._in_place(left, right, self._tiles(x.sizes()[0]), scale, constant)
            return
        # Factors of a few samples at a time; those of the rows are formed again for every strip of columns.
        for j in range(0, self.m, step):
            columns = slice(j, min(j + step, self.m))
            right = self._factors(y.rows(columns), shift, eight)
            for i in range(j if self.symmetric else 0, self.n, step):
                rows = slice(i, min(i + step, self.n))
                square = self.symmetric and i == j
                left = right if square else self._factors(x.rows(rows), shift, eight)
                tiles = self._strips(rows, x.sizes()[0]) if square else [(rows, columns)]
                self._in_place(left, right, tiles, scale, constant, rows.start, columns.start)

    def _factors(self, x: OuterBlock, shift: bool, eight: bool) -> list["_Factors"]:
        """The factors of each group, patches as pixels if `shift`, cotangents rounded if `eight`."""
        use, d = x.uses[0], x.d()
        a = use.lift.pixels(use.x) if shift else x.a()
        places = use.lift.places(use.x) if shift else None
        factors = []
        for g in range(d.shape[3]):
            deltas = self._stacked(d[:, :, :, g])
            own = a if x.indexed else a[:, :, g].contiguous()
            rows = narrow.rounded(deltas.flatten(1), _phase(own)) if eight else None
            factors.append(_Factors(own, deltas if rows is None else rows, d.shape[2], places))
        return factors

    def _in_place(
        self,
        left: list["_Factors"],
        right: list["_Factors"],
        tiles: Iterable[tuple[slice, slice]],
        scale: tuple[Tensor, Tensor] | None,
        constant: float,
        first: int = 0,
        second: int = 0,
    ) -> None:
        """`left` and `right` begin with samples number `first` and `second`."""
        tiles = list(tiles)
        for x, y in zip(left, right, strict=True):
            positions = max(x.t * y.t, x.a.shape[1] * y.a.shape[1])
            for rows, columns in self._small_tiles(tiles, positions):
                r = slice(rows.start - first, rows.stop - first)
                q = slice(columns.start - second, columns.stop - second)
                part = self._hadamard(x.rows(r), y.rows(q), constant)
                if scale is not None:
                    part = part * self._scales(scale, rows, columns)
                if self.differentiable:
                    self.value = self.value + part
                else:
                    self.value[self._spans(rows, columns)] += part

    def _stacked(self, d: Tensor) -> Tensor:
        """[n, c, t, o] → [n, t, c·o] for a trace (outputs are summed by the product itself), else [n, c, t, o]."""
        return d.transpose(1, 2).flatten(2).contiguous() if self.trace else d.contiguous()

    def _hadamard(self, x: "_Factors", y: "_Factors", constant: float) -> Tensor:
        """Σ_{t,s} (a·b + constant)(d·e): [n, m], or [n·c, m·d] for the full kernel."""
        n, m, t, s = len(x.a), len(y.a), x.t, y.t
        alike = self._alike(x.a, y.a)
        if self.trace and x.places is not None and y.places is not None:
            pixels, deltas = alike.view(n, -1, m, y.a.shape[1]), _deltas(x, y).view(n, t, m, s)
            return _put_back(fused.sum_shifted(pixels, deltas, x.places, y.places, constant), x, y)
        if x.places is not None and y.places is not None:
            alike = fused.shifted(alike.view(n, -1, m, y.a.shape[1]), x.places.table, y.places.table).view(n * t, m * s)
        if constant:
            alike = alike + constant
        if self.trace:
            deltas = _deltas(x, y)
            if t == s == 1 or self.differentiable:
                products = deltas * alike if self.differentiable else deltas.mul_(alike)
                return _put_back(products if t == s == 1 else products.view(n, t, m, s).sum((1, 3)), x, y)
            return _put_back(fused.sum_products(deltas, alike, n, t, m, s), x, y)
        assert isinstance(x.d, Tensor)  # 8 bits are for traces
        assert isinstance(y.d, Tensor)
        c, q = x.d.shape[1], y.d.shape[1]
        deltas = matmul_wide(x.d.flatten(0, 2), y.d.flatten(0, 2).T).view(n, c, t, m, q, s)
        return (deltas * alike.view(n, 1, t, m, 1, s)).sum((2, 5)).view(n * c, m * q)

    def _alike(self, a: Tensor, b: Tensor) -> Tensor:
        """a·b for every two positions, or pixels: [n·t, m·s]."""
        if a.dtype == torch.long:  # row numbers: vectors with a single 1, so their products are 1 or 0
            same = (a.reshape(-1, 1) == b.reshape(1, -1)) & (a.reshape(-1, 1) >= 0)
            return same.to(self.value.dtype)
        return matmul_wide(a.flatten(0, 1), b.flatten(0, 1).T)

    def _by_samples(self, x: GradientBlock, y: GradientBlock) -> None:
        """Blocks of different kinds: expand a few samples at a time in the parameter's own order."""
        size = x.rows(slice(0, 1)).expand().numel() * self.value.element_size()
        step = max(1, min(self.n, self.m, self.workspace // max(1, 2 * size)))
        if self.differentiable:
            step = max(self.n, self.m)
        for j in range(0, self.m, step):
            right = self._wide(y.rows(slice(j, j + step)).expand())
            for i in range(j if self.symmetric else 0, self.n, step):
                same = self.symmetric and i == j
                left = right if same else self._wide(x.rows(slice(i, i + step)).expand())
                part = left @ right.T
                if self.differentiable:
                    self.value = self.value + part
                else:
                    r, q = self._spans(slice(i, min(i + step, self.n)), slice(j, min(j + step, self.m)))
                    self.value[r, q] += part

    def _wide(self, g: Tensor) -> Tensor:
        """[n, c, p] → the rows of a product."""
        return rows_of(g, self.trace)

    def _rows(self, g: Tensor, eight: bool) -> Tensor | Rounded:
        """`_wide`, rounded to 8 bits where these are asked for, unless they are already."""
        rows = self._wide(g)
        if rows.dtype == narrow.EIGHT:
            return Rounded(rows, torch.ones(len(rows), device=rows.device))
        return narrow.rounded(rows) if eight else rows

    def _scales(self, scale: tuple[Tensor, Tensor], rows: slice, columns: slice) -> Tensor:
        """What undoes the scaling of 16-bit factors, for a tile."""
        left, right = scale[0][rows].repeat_interleave(self.c), scale[1][columns].repeat_interleave(self.d)
        return left[:, None] * right

    def _spans(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        """Samples → rows and columns of the tile, which has c and d of them for each."""
        return slice(rows.start * self.c, rows.stop * self.c), slice(columns.start * self.d, columns.stop * self.d)

    def _tiles(self, positions: int = 1) -> Iterable[tuple[slice, slice]]:
        """Column strips from the diagonal down where the tile is symmetric, else the whole."""
        rows = slice(0, self.n)
        halved = self.symmetric and not self.differentiable
        return self._strips(rows, positions) if halved else [(rows, slice(0, self.m))]

    def _strips(self, samples: slice, positions: int) -> Iterator[tuple[slice, slice]]:
        """The lower half of the square of these samples, each of which is a number of positions in the products."""
        n, each = samples.stop - samples.start, positions * self.c
        if self._cuda:
            strip = -(-n // max(1, min(_STRIPS, n // 1024)))
        else:
            columns = _COLUMNS * -(-n * each // (_COLUMNS * _STRIPS))
            strip = -(-columns // each)
        for start in range(samples.start, samples.stop, strip):
            yield slice(start, samples.stop), slice(start, min(start + strip, samples.stop))

    def _small_tiles(self, tiles: list[tuple[slice, slice]], positions: int) -> Iterator[tuple[slice, slice]]:
        """The tiles cut until their position-by-position products fit the workspace; on a CPU, rather its cache."""
        if self.differentiable:
            yield from tiles
            return
        size = positions * self.c * self.d * 2 * self.value.element_size()  # of a pair: both products
        room = self.workspace if self._cuda or positions == 1 else min(self.workspace, _CACHED_TILE)
        width = max(1, room // size)  # pairs
        for rows, columns in tiles:
            high, wide = rows.stop - rows.start, columns.stop - columns.start
            # About square, so that each factor read is used for as many products as can be.
            if width < high * wide:
                high = min(high, max(1, width // min(wide, max(1, int(width**0.5)))))
                wide = max(1, width // high)
            for i in range(rows.start, rows.stop, high):
                for j in range(columns.start, columns.stop, wide):
                    yield slice(i, min(i + high, rows.stop)), slice(j, min(j + wide, columns.stop))


def add_to_each(
    sums: Sequence[TileSum],
    xs: Sequence[GradientBlock],
    y: GradientBlock,
    method: str | None = None,
    present: Collection[str] = (),
) -> list[set[str]]:
    """`TileSum.add` for several tiles of one column: what is formed of y serves them all."""
    first = sums[0]
    alike = [
        isinstance(x, OuterBlock) and isinstance(y, OuterBlock) and not y.indexed and x.kind == y.kind
        and x is not y and x.slot == y.slot and not one.differentiable
        and choose_method(x, y, first.trace, method, eight=first.eight).method == "expand"
        for one, x in zip(sums, xs, strict=True)
    ]  # fmt: skip
    factored = [x for x in xs if isinstance(x, OuterBlock)]
    if all(alike) and isinstance(y, OuterBlock):
        expand(sums, factored, y)
        return [set() for _ in sums]
    return [one.add(x, y, method, present) for one, x in zip(sums, xs, strict=True)]


def expand(sums: Sequence[TileSum], xs: Sequence[OuterBlock], y: OuterBlock) -> None:
    """K += ⟨G, G'⟩ for each tile, the gradients formed slice by slice."""
    one = sums[0]
    eight = PairSizes.of(xs[0], y, one.trace, one.eight).eight_expanded
    scales = [_scales_of(x, y) for x in xs]
    options = {"trace": one.trace, "differentiable": one.differentiable, "eight": eight}
    for k, left, right in expanded(xs, y, workspace=one.workspace, **options):
        sums[k].product(left, right, scales[k])


def _scales_of(x: OuterBlock, y: OuterBlock) -> tuple[Tensor, Tensor] | None:
    """What undoes the scaling of both sides' factors, where they were scaled."""
    return None if x.scale is None or y.scale is None else (x.scale, y.scale)


@dataclass(frozen=True)
class _Factors:
    """The factors of one group of a block, for products position by position."""

    a: Tensor  # [n, t, i], row numbers [n, t], or pixels [n, p, channels]
    d: Tensor | Rounded  # [n, t, c·o] for a trace, else [n, c, t, o]; rounded, a row per sample
    t: int
    places: Places | None  # where a holds pixels

    def rows(self, index: slice) -> "_Factors":
        """The factors of some of the samples."""
        return replace(self, a=self.a[index], d=self.d[index])


def _phase(a: Tensor) -> Tensor:
    """A number from 0 to 1 for each sample, by its activations.

    Cotangents behind a last pooling are the same weights for all samples, but for those that a ReLU shuts off.
    """
    # Seven turns per factor of two: samples differ, and rounding of the activations does not show.
    norm = torch.linalg.vector_norm(a, dim=(1, 2), dtype=torch.float32)
    return torch.frac(7 * torch.log2(norm.clamp(1e-30, 1e30))).abs()


def _deltas(x: _Factors, y: _Factors) -> Tensor:
    """δ·δ' for every two positions, all outputs added up: [n·t, m·s]; without the scales of what was rounded."""
    if isinstance(x.d, Rounded) and isinstance(y.d, Rounded):
        return matmul_eight(x.d.q.view(len(x.a) * x.t, -1), y.d.q.view(len(y.a) * y.t, -1))
    assert isinstance(x.d, Tensor)
    assert isinstance(y.d, Tensor)
    return matmul_wide(x.d.flatten(0, 1), y.d.flatten(0, 1).T)


def _put_back(part: Tensor, x: _Factors, y: _Factors) -> Tensor:
    """[n, m] with the scales of cotangents that were rounded."""
    if isinstance(x.d, Rounded) and isinstance(y.d, Rounded):
        return part.mul_(x.d.scale[:, None]).mul_(y.d.scale)
    return part


def _lifted_bytes(x: OuterBlock) -> int:
    """What the factors of one sample take when they must be formed."""
    t, g, i, o = x.sizes()
    return t * g * ((1 if x.indexed else i) + x.c * o) * x.uses[0].d.element_size()
