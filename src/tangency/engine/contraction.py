"""From two blocks to their part of a Gram matrix, a tile at a time and within a workspace.

Every method ends in one of two forms: products L Rᵀ of matrices whose rows are samples (`TileSum.product`), or
Σ_{t,s} (a·a')(δ·δ') over positions (`TileSum.in_place`). `TileSum` adds them up and, when both sides are the same
samples, computes the lower half only.

Which form is taken for a layer is decided by its cost (`choose_method`): multiply–add flops and bytes moved, with the
estimated time flops/rate + bytes/bandwidth. The two rates per kind of device are heuristics (what a plain product and
a plain copy reach), good enough to tell methods apart: near the break-even point the choice hardly matters.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.memory import WORKSPACE
from ..errors import InputError
from . import fused
from .blocks import DenseBlock, GradientBlock, MixedBlock, OuterBlock, matched
from .expansion import expanded

Method = str | Mapping[str, str] | None  # for all parameters, or by name

# torch.mm(…, out_dtype=…) came with torch 2.8.
_WIDE_RESULTS = tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 8)
# Position-by-position products on a CPU are cut to this many bytes, so that they stay in its cache (heuristic).
_CACHED_TILE = 1 << 23
# A symmetric tile is computed in strips from its diagonal down. On a CPU each is a multiple of so many columns wide,
# which products are fastest at, and there are at most so many (heuristic: narrower ones save more, but run slower).
_COLUMNS, _STRIPS = 48, 8
# (flop/s, byte/s), heuristic: two cores; one H200.
_RATES = {
    ("cpu", torch.float64): (6e10, 1e10),
    ("cpu", torch.float32): (1.2e11, 1e10),
    ("cuda", torch.float64): (4e13, 3e12),
    ("cuda", torch.float32): (4e13, 3e12),
    ("cuda", torch.float16): (5e14, 3e12),
}


@dataclass(frozen=True)
class Cost:
    """An estimate for one layer of one tile."""

    method: str
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class PairSizes:
    """A pair of blocks in numbers: n, m samples; c outputs; t, s positions; g groups of i × o weights."""

    n: int
    m: int
    c: int
    t: int
    s: int
    g: int
    i: int
    o: int
    itemsize: int
    trace: bool
    symmetric: bool
    indexed: bool

    @staticmethod
    def of(x: OuterBlock, y: OuterBlock, trace: bool) -> "PairSizes":
        """The numbers of two blocks of one kind."""
        t, g, i, o = x.sizes()
        s = y.sizes()[0]
        item = x.uses[0].d.element_size()
        if x.indexed:  # rows that occur at all
            i = min(i, x.n * t + y.n * s)
        return PairSizes(x.n, y.n, x.c, t, s, g, i, o, item, trace, x is y, x.indexed)

    @property
    def pairs(self) -> float:
        """How many pairs of samples; of a symmetric tile a bit more than half, since strips are not triangles."""
        return self.n * self.m * (0.6 if self.symmetric else 1.0)

    @property
    def outputs(self) -> int:
        """How many products of cotangents a pair of samples needs: c for a trace, c·d for the full kernel."""
        return self.c if self.trace else self.c * self.c


def _cost_of_expanding(z: PairSizes) -> tuple[float, float]:
    """(flops, bytes) to form G for both sides, then one product of [n, c·o·i] with [m, c·o·i]."""
    rows = z.n if z.symmetric else z.n + z.m
    form = 0.0 if z.indexed else 2.0 * rows * z.t * z.c * z.g * z.o * z.i
    product = 2.0 * z.pairs * z.outputs * z.g * z.o * z.i
    moved = rows * (2 * z.c * z.g * z.o * z.i + z.t * z.g * (z.i if not z.indexed else 1)) * z.itemsize
    return form + product, float(moved)


def _cost_in_place(z: PairSizes) -> tuple[float, float]:
    """(flops, bytes) of Σ_{t,s} (a_it·a_js)(δ_it·δ_js): the first factor once for all outputs of a trace."""
    width = (1 if z.indexed else z.i) + z.outputs * z.o
    passes = 4 if z.trace else 2 + 2 * z.outputs
    ts = z.t * z.s * z.g
    # Products of 16-bit factors come in 32 bits.
    return 2.0 * z.pairs * ts * width, z.pairs * ts * passes * max(z.itemsize, 4)


def _estimate(method: str, z: PairSizes, device: str, dtype: torch.dtype) -> Cost:
    flops, moved = _cost_of_expanding(z) if method == "expand" else _cost_in_place(z)
    rate, bandwidth = _RATES.get((device, dtype), _RATES["cpu", torch.float32])
    return Cost(method, flops, moved, flops / rate + moved / bandwidth)


def choose_method(x: GradientBlock, y: GradientBlock, trace: bool, forced: str | None = None) -> Cost:
    """The cheapest method for a pair of blocks, or the forced one where it applies."""
    if not (isinstance(x, OuterBlock) and isinstance(y, OuterBlock) and x.kind == y.kind and x.slot == y.slot):
        return _cost_of_product(x, y, trace)
    d, z = x.uses[0].d, PairSizes.of(x, y, trace)
    if forced in ("expand", "in place"):
        return _estimate(forced, z, d.device.type, d.dtype)
    options = [_estimate(m, z, d.device.type, d.dtype) for m in ("expand", "in place")]
    best = min(options, key=lambda c: c.seconds)
    if best.method == "in place" and z.t == z.s == 1:  # two matrices, multiplied entry by entry: said as such
        return Cost("outer", best.flops, best.bytes, best.seconds)
    return best


def _cost_of_product(x: GradientBlock, y: GradientBlock, trace: bool) -> Cost:
    """One product of gradients that are there already, or of blocks of different kinds, which are expanded."""
    p = x.g.shape[2] if isinstance(x, DenseBlock) else sum(v[0, 0].numel() for v in x.tensors())
    pairs = x.n * y.n * (0.6 if x is y else 1.0) * (x.c if trace else x.c**2)
    tensor = x.tensors()[0]
    rate = _RATES.get((tensor.device.type, tensor.dtype), _RATES["cpu", torch.float32])[0]
    moved = float(x.nbytes + (0 if x is y else y.nbytes))
    return Cost("expand" if isinstance(x, MixedBlock) else "dense", 2.0 * pairs * p, moved, 2.0 * pairs * p / rate)


def check_method(method: object, parameters: Collection[str]) -> None:
    """Refuse a method, or one for a parameter, that there is not."""
    choices = method if isinstance(method, Mapping) else {None: method}
    for name, choice in choices.items():
        if choice not in (None, "expand", "in place"):
            raise InputError(
                f"method={choice!r} is unknown; use None (the cost model chooses), 'expand' or 'in place'."
            )
        if name is not None and name not in parameters:
            raise InputError(f"method= names {name!r}, which is none of the parameters that count.")


def method_for(method: Method, name: str) -> str | None:
    """The method that was asked for, for one parameter."""
    return method.get(name) if isinstance(method, Mapping) else method


class TileSum:
    """A tile under construction: [n, m] for a trace, [n, c, m, d] for the full kernel."""

    def __init__(
        self, x: GradientBlock, y: GradientBlock, *, trace: bool, differentiable: bool, workspace: int | None = None
    ) -> None:
        like = x.tensors()[-1]
        dtype = torch.float32 if like.dtype == torch.float16 else like.dtype
        self.n, self.m, self.c, self.d = x.n, y.n, (1 if trace else x.c), (1 if trace else y.c)
        self.trace, self.symmetric = trace, x is y
        self.workspace = workspace or WORKSPACE[like.device.type]
        self.differentiable = differentiable
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
            if x.scale is None or y.scale is None:
                self.product(self._wide(x.expand()), self._wide(y.expand()))
            else:
                self.product(self._wide(x.g), self._wide(y.g), (x.scale, y.scale))
        elif isinstance(x, OuterBlock) and isinstance(y, OuterBlock) and x.kind == y.kind and x.slot == y.slot:
            scale = None if x.scale is None or y.scale is None else (x.scale, y.scale)
            if choose_method(x, y, self.trace, method).method == "expand":
                for left, right in expanded(
                    x, y, trace=self.trace, differentiable=self.differentiable, workspace=self.workspace
                ):
                    self.product(self._wide(left), self._wide(right), scale)
            else:
                # Σ (a·a' + 1)(δ·δ') is both at once. Not with scaled factors: the 1 would have to be scaled as well.
                along = x.bias if x.bias == y.bias and x.bias in present and scale is None else None
                self.in_place(x, y, scale, constant=float(along is not None))
                return set() if along is None else {along}
        elif (pairs := matched(x, y)) is not None:
            for a, b in pairs:
                self.add(a, b, method)
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

    def product(self, left: Tensor, right: Tensor, scale: tuple[Tensor, Tensor] | None = None) -> None:
        """K += L Rᵀ with rows (sample, output)."""
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

    def in_place(
        self, x: OuterBlock, y: OuterBlock, scale: tuple[Tensor, Tensor] | None = None, constant: float = 0.0
    ) -> None:
        """K += Σ_{t,s} (a_it·a_js + constant)(δ_it·δ_js), no gradient formed. Cost: t·s·(i + c·o) per pair."""
        size = max(_lifted_bytes(x), _lifted_bytes(y))
        step = max(1, self.workspace // max(1, size))
        if self.differentiable or step >= max(self.n, self.m):
            left = self._factors(x)
            tiles = self._tiles(x.sizes()[0])
            self._in_place(left, left if x is y else self._factors(y), tiles, scale, constant)
            return
        # Factors of a few samples at a time; those of the rows are formed again for every strip of columns.
        for j in range(0, self.m, step):
            columns = slice(j, min(j + step, self.m))
            right = self._factors(y.rows(columns))
            for i in range(j if self.symmetric else 0, self.n, step):
                rows = slice(i, min(i + step, self.n))
                square = self.symmetric and i == j
                left = right if square else self._factors(x.rows(rows))
                tiles = self._strips(rows, x.sizes()[0]) if square else [(rows, columns)]
                self._in_place(left, right, tiles, scale, constant, rows.start, columns.start)

    def _factors(self, x: OuterBlock) -> list[tuple[Tensor, Tensor]]:
        """(a, δ) of each group: a [n, t, i] or row numbers [n, t]; δ [n, t, c·o] for a trace, else [n, c, t, o]."""
        a, d = x.a(), x.d()
        return [(a if x.indexed else a[:, :, g].contiguous(), self._stacked(d[:, :, :, g])) for g in range(d.shape[3])]

    def _in_place(
        self,
        left: list[tuple[Tensor, Tensor]],
        right: list[tuple[Tensor, Tensor]],
        tiles: Iterable[tuple[slice, slice]],
        scale: tuple[Tensor, Tensor] | None,
        constant: float,
        first: int = 0,
        second: int = 0,
    ) -> None:
        """`left` and `right` begin with samples number `first` and `second`."""
        tiles = list(tiles)
        for (a, d), (b, e) in zip(left, right, strict=True):
            for rows, columns in self._small_tiles(tiles, a.shape[1] * b.shape[1]):
                r = slice(rows.start - first, rows.stop - first)
                q = slice(columns.start - second, columns.stop - second)
                part = self._hadamard(a[r], b[q], d[r], e[q], constant)
                if scale is not None:
                    part = part * self._scales(scale, rows, columns)
                if self.differentiable:
                    self.value = self.value + part
                else:
                    self.value[self._spans(rows, columns)] += part

    def _stacked(self, d: Tensor) -> Tensor:
        """[n, c, t, o] → [n, t, c·o] for a trace (outputs are summed by the product itself), else [n, c, t, o]."""
        return d.transpose(1, 2).flatten(2).contiguous() if self.trace else d.contiguous()

    def _hadamard(self, a: Tensor, b: Tensor, d: Tensor, e: Tensor, constant: float) -> Tensor:
        """Σ_{t,s} (a·b + constant)(d·e): [n, m], or [n·c, m·d] for the full kernel."""
        n, m, t, s = len(a), len(b), a.shape[1], b.shape[1]
        if a.dtype == torch.long:  # row numbers: vectors with a single 1, so their products are 1 or 0
            same = (a.reshape(-1, 1) == b.reshape(1, -1)) & (a.reshape(-1, 1) >= 0)
            alike = same.to(self.value.dtype)
        else:
            alike = matmul_wide(a.flatten(0, 1), b.flatten(0, 1).T)
            if constant:
                alike = alike + constant
        if self.trace:
            deltas = matmul_wide(d.flatten(0, 1), e.flatten(0, 1).T)
            if t == s == 1 or self.differentiable:
                products = deltas * alike if self.differentiable else deltas.mul_(alike)
                return products if t == s == 1 else products.view(n, t, m, s).sum((1, 3))
            return fused.sum_products(deltas, alike, n, t, m, s)
        c, q = d.shape[1], e.shape[1]
        deltas = matmul_wide(d.flatten(0, 2), e.flatten(0, 2).T).view(n, c, t, m, q, s)
        return (deltas * alike.view(n, 1, t, m, 1, s)).sum((2, 5)).view(n * c, m * q)

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
        """[n, c, p] → rows: one per sample for a trace, one per (sample, output) for the full kernel."""
        return g.flatten(1) if self.trace else g.flatten(0, 1)

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


def matmul_wide(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with 32-bit accumulation and result for 16-bit factors."""
    if a.dtype != torch.float16:
        return a @ b
    # Products of 16-bit factors are exact in 32 bits; a 16-bit result would lose what was gained.
    if a.device.type == "cuda" and _WIDE_RESULTS:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _lifted_bytes(x: OuterBlock) -> int:
    """What the factors of one sample take when they must be formed."""
    t, g, i, o = x.sizes()
    return t * g * ((1 if x.indexed else i) + x.c * o) * x.uses[0].d.element_size()
