"""From two blocks to their part of a Gram matrix, a tile at a time and within a workspace.

Every method ends in one of two forms: products L Rᵀ of matrices whose rows are samples (`Sum.product`), or
Σ_{t,s} (a·a')(δ·δ') over positions (`Sum.in_place`). `Sum` adds them up and, when both sides are the same samples,
computes the upper half only.
"""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from . import fused
from .blocks import Block, Dense, Mixed, Outer, gradient, matched
from .cost import choose

# Bytes that each large temporary of a contraction may take when nobody says otherwise (heuristic).
WORKSPACE = {"cpu": 1 << 28, "cuda": 1 << 32}
# On a CPU, gradients are formed in slices that stay in the cache until they are multiplied (heuristic: bytes, and the
# least number of channels for which forming them is still efficient).
CACHE, CHANNELS = 1 << 24, 64
# torch.mm(…, out_dtype=…) came with torch 2.8.
_WIDE_RESULTS = tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 8)


class Sum:
    """A tile under construction: [n, m] for a trace, [n, c, m, d] for the full kernel."""

    def __init__(self, x: Block, y: Block, *, trace: bool, differentiable: bool, workspace: int | None = None) -> None:
        like = x.tensors()[-1]
        dtype = torch.float32 if like.dtype == torch.float16 else like.dtype
        self.n, self.m, self.c, self.d = x.n, y.n, (1 if trace else x.c), (1 if trace else y.c)
        self.trace, self.symmetric = trace, x is y
        self.workspace = workspace or WORKSPACE[like.device.type]
        self.differentiable = differentiable
        self.value = torch.zeros(self.n * self.c, self.m * self.d, dtype=dtype, device=like.device)
        self._cuda = like.device.type == "cuda"

    def add(self, x: Block, y: Block, method: str | None = None, present: Collection[str] = ()) -> set[str]:
        """Add the part of one parameter.

        Its bias comes along for nothing where the cotangents' products are formed anyway; the names of the parameters
        that are thereby done with, of those `present`, are returned.
        """
        if isinstance(x, Dense) and isinstance(y, Dense):
            if x.scale is None or y.scale is None:
                self.product(self._wide(x.expand()), self._wide(y.expand()))
            else:
                self.product(self._wide(x.g), self._wide(y.g), (x.scale, y.scale))
        elif isinstance(x, Outer) and isinstance(y, Outer) and x.kind == y.kind and x.slot == y.slot:
            scale = None if x.scale is None or y.scale is None else (x.scale, y.scale)
            if choose(x, y, self.trace, method).method == "expand":
                for left, right in _expanded(x, y, self):
                    self.product(self._wide(left), self._wide(right), scale)
            else:
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
        """The tile; of a symmetric one the lower half is the mirrored upper half, exactly."""
        k = self.value
        if self.symmetric and not self.differentiable:
            for rows, _ in self._tiles():
                r = slice(rows.start * self.c, rows.stop * self.c)
                k[r.stop :, r] = k[r, r.stop :].T
                k[r, r] = torch.triu(k[r, r]) + torch.triu(k[r, r], 1).T
        elif self.symmetric:
            k = (k + k.T) / 2
        return k if self.trace else k.view(self.n, self.c, self.m, self.d)

    def product(self, left: Tensor, right: Tensor, scale: tuple[Tensor, Tensor] | None = None) -> None:
        """K += L Rᵀ with rows (sample, output)."""
        if self.differentiable:
            self.value = self.value + left @ right.T
            return
        for rows, columns in self._tiles():
            r, q = self._spans(rows, columns)
            if left.dtype == torch.float16:
                part = matmul(left[r], right[q].T)
                self.value[r, q] += part if scale is None else part * self._scales(scale, rows, columns)
            else:
                self.value[r, q].addmm_(left[r], right[q].T)

    def in_place(self, x: Outer, y: Outer, scale: tuple[Tensor, Tensor] | None = None, constant: float = 0.0) -> None:
        """K += Σ_{t,s} (a_it·a_js + constant)(δ_it·δ_js), no gradient formed. Cost: t·s·(i + c·o) per pair."""
        size = max(_lifted_bytes(x), _lifted_bytes(y))
        step = max(1, self.workspace // max(1, size))
        if self.differentiable or step >= max(self.n, self.m):
            left = self._factors(x)
            self._in_place(left, left if x is y else self._factors(y), self._tiles(), scale, constant)
            return
        for i in range(0, self.n, step):  # factors of a few samples at a time
            rows = slice(i, min(i + step, self.n))
            left = self._factors(x.rows(rows))
            for j in range(i if self.symmetric else 0, self.m, step):
                columns = slice(j, min(j + step, self.m))
                right = left if self.symmetric and i == j else self._factors(y.rows(columns))
                self._in_place(left, right, [(rows, columns)], scale, constant, rows.start, columns.start)

    def _factors(self, x: Outer) -> list[tuple[Tensor, Tensor]]:
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
        n, m, t, s = len(a), len(b), a.shape[1], b.shape[1]
        if a.dtype == torch.long:
            same = (a.reshape(-1, 1) == b.reshape(1, -1)) & (a.reshape(-1, 1) >= 0)
            alike = same.to(self.value.dtype)
        else:
            alike = matmul(a.flatten(0, 1), b.flatten(0, 1).T)
            if constant:
                alike = alike + constant
        if self.trace:
            both = matmul(d.flatten(0, 1), e.flatten(0, 1).T)
            if t == s == 1 or self.differentiable:
                both = both * alike if self.differentiable else both.mul_(alike)
                return both if t == s == 1 else both.view(n, t, m, s).sum((1, 3))
            return fused.sum_products(both, alike, n, t, m, s)
        c, q = d.shape[1], e.shape[1]
        both = matmul(d.flatten(0, 2), e.flatten(0, 2).T).view(n, c, t, m, q, s)
        return (both * alike.view(n, 1, t, m, 1, s)).sum((2, 5)).view(n * c, m * q)

    def _by_samples(self, x: Block, y: Block) -> None:
        """Blocks of different kinds: expand a few samples at a time in the parameter's own order."""
        size = x.rows(slice(0, 1)).expand().numel() * self.value.element_size()
        step = max(1, min(self.n, self.m, self.workspace // max(1, 2 * size)))
        if self.differentiable:
            step = max(self.n, self.m)
        for i in range(0, self.n, step):
            left = self._wide(x.rows(slice(i, i + step)).expand())
            for j in range(i if self.symmetric else 0, self.m, step):
                same = self.symmetric and i == j
                right = left if same else self._wide(y.rows(slice(j, j + step)).expand())
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
        left, right = scale[0][rows].repeat_interleave(self.c), scale[1][columns].repeat_interleave(self.d)
        return left[:, None] * right

    def _spans(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        return slice(rows.start * self.c, rows.stop * self.c), slice(columns.start * self.d, columns.stop * self.d)

    def _tiles(self) -> Iterator[tuple[slice, slice]]:
        """Row strips from the diagonal to the right where the tile is symmetric, else the whole."""
        if not self.symmetric or self.differentiable:
            yield slice(0, self.n), slice(0, self.m)
            return
        # Narrower strips save more of the lower half, but products of few rows run slower (heuristic).
        count = max(1, min(8, self.n // (1024 if self._cuda else 64)))
        strip = -(-self.n // count)
        for start in range(0, self.n, strip):
            yield slice(start, min(start + strip, self.n)), slice(start, self.n)

    def _small_tiles(self, tiles: list[tuple[slice, slice]], positions: int) -> Iterator[tuple[slice, slice]]:
        """The tiles cut until their position-by-position products fit the workspace; on a CPU, rather its cache."""
        if self.differentiable:
            yield from tiles
            return
        each = positions * self.c * self.d * 2 * self.value.element_size()
        room = self.workspace if self._cuda or positions == 1 else min(self.workspace, 1 << 23)
        width = max(1, room // each)
        for rows, columns in tiles:
            high, wide = rows.stop - rows.start, columns.stop - columns.start
            if width < high * wide:
                high = min(high, max(1, int(width**0.5)))
                wide = max(1, width // high)
            for i in range(rows.start, rows.stop, high):
                for j in range(columns.start, columns.stop, wide):
                    yield slice(i, min(i + high, rows.stop)), slice(j, min(j + wide, columns.stop))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with 32-bit accumulation and result for 16-bit factors."""
    if a.dtype != torch.float16:
        return a @ b
    if a.device.type == "cuda" and _WIDE_RESULTS:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _expanded(x: Outer, y: Outer, total: Sum) -> Iterator[tuple[Tensor, Tensor]]:
    """Weight gradients [n, c, …] of both sides, in slices of the output channels that fit the workspace."""
    _, g, i, o = x.sizes()
    if x.indexed:
        a, b, rows = _compact(x.a(), y.a() if x is not y else None)
        left = _Side(x, a, rows, total)
        right = left if b is None else _Side(y, b, rows, total)
        size = x.n * x.c * rows
    else:
        left = _Side(x, None, None, total)
        right = left if x is y else _Side(y, None, None, total)
        size = max(x.n, y.n) * x.c * g * i
    for part in _slices(x, o, size, total):
        formed = left.gradient(part)
        yield formed, formed if right is left else right.gradient(part)


class _Side:
    """One side of an expansion. Activations are formed once if they fit the workspace, else a few samples at a time."""

    def __init__(self, x: Outer, index: Tensor | None, rows: int | None, total: Sum) -> None:
        self.x, self.a, self.rows, self.d = x, index, rows, x.d()
        self.step = x.n
        if index is None:
            t, g, i, _ = x.sizes()
            size = t * g * i * x.uses[0].x.element_size()
            self.step = x.n if total.differentiable else max(1, min(x.n, total.workspace // size))
            if self.step == x.n:
                self.a = _by_group(x)

    def gradient(self, part: tuple[slice, ...]) -> Tensor:
        """[n, c, g·o·i] for a slice of the cotangents."""
        if self.a is not None:
            return _gradient(self.a, self.d[part], self.rows)
        pieces = []
        for start in range(0, self.x.n, self.step):
            some = slice(start, start + self.step)
            pieces.append(_gradient(_by_group(self.x.rows(some)), self.d[some][part]))
        return torch.cat(pieces)


def _by_group(x: Outer) -> Tensor:
    """Activations [n, g, t, i]."""
    return x.a().transpose(1, 2)


def _lifted_bytes(x: Outer) -> int:
    """What the factors of one sample take when they must be formed."""
    t, g, i, o = x.sizes()
    return t * g * ((1 if x.indexed else i) + x.c * o) * x.uses[0].d.element_size()


def _slices(x: Outer, o: int, size: int, total: Sum) -> Iterator[tuple[slice, ...]]:
    """Cuts of the cotangents [n, c, t, g, o], each `size` bytes per output channel, that fit the workspace.

    A trace is cut by outputs first, which keeps (c, o) one dimension in memory, and by channels only if it must be.
    """
    every = slice(None)
    item = 4 if x.dtype == torch.float16 and not total._cuda else x.uses[0].d.element_size()
    fit = total.workspace // max(1, size * item)  # channels of all outputs
    if not total._cuda:
        fit = min(fit, max(CACHE // max(1, size * item), -(-CHANNELS // (x.c if total.trace else 1))))
    if total.differentiable or fit >= o:
        yield (every,)
        return
    if total.trace and x.c > 1:
        outputs = max(1, fit * x.c // o)
        fit = _even(o, max(1, fit * x.c // outputs))
        for j in range(0, x.c, outputs):
            for start in range(0, o, fit):
                channels = every if fit == o else slice(start, start + fit)
                yield every, slice(j, j + outputs), every, every, channels
        return
    fit = _even(o, max(1, fit))
    for start in range(0, o, fit):
        yield every, every, every, every, slice(start, start + fit)


def _even(o: int, fit: int) -> int:
    """Channels per cut: at most `fit`, about equal, and aligned (matrix units want multiples of 8)."""
    step = -(-o // -(-o // min(o, fit)))
    return o if step >= o else min(fit, -(-step // 64) * 64) if fit >= 64 else step


def _gradient(a: Tensor, d: Tensor, rows: int | None = None) -> Tensor:
    """Σ_t δ_t ⊗ a_t for a slice of output channels: [n, c, g·o·i]."""
    n, c, t, _, o = d.shape
    if rows is not None:  # row numbers
        out = d.new_zeros(n, c, rows + 1, o)
        return out.scatter_add(2, a[:, None, :, None].expand(n, c, t, o), d[:, :, :, 0])[:, :, :rows].flatten(2)
    return gradient(a, d)


def _compact(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """Row numbers of both sides renumbered to those that occur; −1 becomes a row of its own, which is dropped."""
    both = a.flatten() if b is None else torch.cat([a.flatten(), b.flatten()])
    present = torch.unique(both[both >= 0])

    def renumber(v: Tensor) -> Tensor:
        return torch.where(v < 0, len(present), torch.searchsorted(present, v.clamp_min(0)))

    return renumber(a), None if b is None else renumber(b), len(present)


def diagonal(x: Block) -> Tensor:
    """‖g_c‖² per sample and output: [n, c]."""
    workspace = WORKSPACE[x.tensors()[-1].device.type]
    if isinstance(x, Dense):
        return x.expand().square().sum(2)
    if isinstance(x, Outer) and not x.indexed:
        return _outer_diagonal(x, workspace)
    if isinstance(x, Mixed) and (pairs := matched(x, x)) is not None and len(pairs) == len(x.blocks):
        return torch.stack([diagonal(a) for a, _ in pairs]).sum(0)
    size = x.rows(slice(0, 1)).expand().numel() * 8
    step = max(1, workspace // size)
    return torch.cat([x.rows(slice(i, i + step)).expand().square().sum(2) for i in range(0, x.n, step)])


def _outer_diagonal(x: Outer, workspace: int) -> Tensor:
    t, g, i, o = x.sizes()
    positions = t * t * (i + x.c * o) < t * i * x.c * o  # cheaper per sample than forming G
    size = 8 * g * (t * (i + x.c * o) + (t * t * (1 + x.c) if positions else x.c * i * o))
    step = max(1, workspace // size)
    parts = []
    for start in range(0, x.n, step):
        b = x.rows(slice(start, start + step))
        a, d = b.a(), b.d()
        if d.dtype == torch.float16:
            a, d = a.float(), d.float()
        if positions:
            alike = torch.einsum("ntgi,nsgi->ngts", a, a)
            part = (torch.einsum("nctgo,ncsgo->ncgts", d, d) * alike[:, None]).sum((2, 3, 4))
        else:
            part = _gradient(a.transpose(1, 2), d).square().sum(2)
        parts.append(part if b.scale is None else part * b.scale[:, None] ** 2)
    return torch.cat(parts)
