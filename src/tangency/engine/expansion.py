"""Weight gradients formed from their factors, in slices that fit a workspace, and their norms.

The other way to contract, position by position, needs no gradient formed: `contraction.py`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._base.memory import WORKSPACE
from . import fused, narrow
from .blocks import DenseBlock, GradientBlock, MixedBlock, OuterBlock, gradient, matched
from .narrow import Rounded

# On a CPU, gradients are formed in slices that stay in the cache until they are multiplied (heuristic: bytes), of no
# fewer channels than are formed efficiently (heuristic: most of the work is multiplying, or else it is forming).
CACHE, CHANNELS, CHANNELS_FORMED = 1 << 23, 64, 256


def expanded(
    xs: Sequence[OuterBlock], y: OuterBlock, *, trace: bool, differentiable: bool, workspace: int, eight: bool = False
) -> Iterator[tuple[int, Tensor | Rounded, Tensor | Rounded]]:
    """(k, left, right): weight gradients of block number k and of y, in slices of the output channels that fit the
    workspace. A row per sample for a trace, else per (sample, output); rounded to 8 bits if `eight`.

    A slice of y is formed once for all blocks. For a trace slices may be cut between outputs, too. What is
    differentiated is not cut at all. Of row numbers there is one block. On a CPU each slice takes the place of the one
    before, so that memory is not paged in anew for every one: use it before asking for the next.
    """
    room, x = None if differentiable else workspace, xs[0]
    _, g, i, o = x.sizes()
    # A gradient of an embedding has few rows that are not zero: only those that occur on either side are formed.
    if x.indexed:
        a, b, rows = _compact(x.a(), y.a() if x is not y else None)
        sides = [_Side(x, room, index=a, rows=rows)]
        right = sides[0] if b is None else _Side(y, room, index=b, rows=rows)
        size = x.n * x.c * rows
    else:
        # One place for all blocks, of which one is in use at a time, and one for y.
        places = (None, None) if differentiable or x.uses[0].d.device.type != "cpu" else (_Place(), _Place())
        sides = [_Side(one, room, places[0]) for one in xs]
        right = sides[0] if x is y else _Side(y, room, places[1])
        size = max(y.n, *(one.n for one in xs)) * x.c * g * i
    for cut in [(slice(None),)] if room is None else _slices(x, o, size, trace, room):
        column = right.formed(cut, trace, eight)
        for k, side in enumerate(sides):
            yield k, column if side is right else side.formed(cut, trace, eight), column


def rows_of(g: Tensor, trace: bool) -> Tensor:
    """[n, c, p] → one row per sample for a trace, one per (sample, output) for the full kernel."""
    return g.flatten(1) if trace else g.flatten(0, 1)


class _Side:
    """One side of an expansion. Activations are formed once if they fit the workspace, else a few samples at a time.

    `place`: where slices are formed, one after the other. `index`: row numbers in place of activations, of a weight
    with `rows` rows.
    """

    def __init__(
        self,
        x: OuterBlock,
        workspace: int | None,
        place: "_Place | None" = None,
        *,
        index: Tensor | None = None,
        rows: int | None = None,
    ) -> None:
        self.x, self.place, self.a, self.rows, self.d = x, place, index, rows, x.d()
        self.largest: Tensor | None = None  # what no gradient exceeds, once it was asked for
        self.step = x.n
        if index is None:
            t, g, i, _ = x.sizes()
            size = t * g * i * x.uses[0].x.element_size()
            self.step = x.n if workspace is None else max(1, min(x.n, workspace // size))
            if self.step == x.n:
                self.a = _by_group(x)

    def formed(self, cut: tuple[slice, ...], trace: bool, eight: bool) -> Tensor | Rounded:
        """The rows for a slice of the cotangents."""
        if eight and trace and self.a is not None and fused.forms(self.a, self.d[cut]):
            if self.largest is None:
                self.largest = narrow.bound(self.a, self.d)
            return narrow.formed(self.a, self.d[cut], self.largest)
        g = rows_of(self.gradient(cut), trace)
        return narrow.rounded(g) if eight else g

    def gradient(self, cut: tuple[slice, ...]) -> Tensor:
        """[n, c, g·o·i] for a slice of the cotangents."""
        d = self.d[cut]
        if self.rows is not None:
            assert self.a is not None
            return _scattered(self.a, d, self.rows)
        out = None if self.place is None else self.place.room(d, self.x.sizes()[2])
        if self.a is not None:
            return gradient(self.a, d, out)
        made = [
            gradient(_by_group(self.x.rows(few)), d[few], None if out is None else out[few])
            for few in (slice(start, start + self.step) for start in range(0, self.x.n, self.step))
        ]
        # Written side by side, unless `gradient` had to copy them.
        if out is not None and made[0].data_ptr() == out.data_ptr():
            return out.view(self.x.n, d.shape[1], -1)
        return torch.cat(made)


class _Place:
    """Memory for one slice of gradients after the other."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def room(self, d: Tensor, i: int) -> Tensor:
        """Room for the gradients of these cotangents and i activations: [n, c·g·o·i]."""
        n, c, _, g, o = d.shape
        size = n * c * g * o * i
        if self.memory is None or self.memory.numel() < size:
            self.memory = d.new_empty(size)
        return self.memory[:size].view(n, -1)


def _by_group(x: OuterBlock) -> Tensor:
    """Activations [n, g, t, i]."""
    return x.a().transpose(1, 2)


def _slices(x: OuterBlock, o: int, size: int, trace: bool, workspace: int) -> Iterator[tuple[slice, ...]]:
    """Cuts of the cotangents [n, c, t, g, o], each `size` bytes per output channel, that fit the workspace.

    A trace is cut by outputs first, which keeps (c, o) one dimension in memory, and by channels only if it must be.
    """
    every = slice(None)
    d = x.uses[0].d
    item = 4 if d.dtype == torch.float16 and not d.is_cuda else d.element_size()  # a CPU multiplies in 32 bits
    fit = workspace // max(1, size * item)  # channels of all outputs
    if not d.is_cuda:
        least = CHANNELS_FORMED if not x.indexed and x.sizes()[0] > x.n else CHANNELS
        fit = min(fit, max(CACHE // max(1, size * item), -(-least // (x.c if trace else 1))))
    if fit >= o:
        yield (every,)
        return
    if trace and x.c > 1:
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


def _scattered(index: Tensor, d: Tensor, rows: int) -> Tensor:
    """Σ_t δ_t in row index_t for a slice of output channels: [n, c, rows·o]."""
    n, c, t, _, o = d.shape
    out = d.new_zeros(n, c, rows + 1, o)
    return out.scatter_add(2, index[:, None, :, None].expand(n, c, t, o), d[:, :, :, 0])[:, :, :rows].flatten(2)


def _compact(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """Row numbers of both sides renumbered to those that occur; −1 becomes a row of its own, which is dropped."""
    numbers = a.flatten() if b is None else torch.cat([a.flatten(), b.flatten()])
    present = torch.unique(numbers[numbers >= 0])

    def renumber(v: Tensor) -> Tensor:
        """Numbers of rows among those that are used; the last one for padding."""
        return torch.where(v < 0, len(present), torch.searchsorted(present, v.clamp_min(0)))

    return renumber(a), None if b is None else renumber(b), len(present)


def squared_norms(x: GradientBlock) -> Tensor:
    """‖g_c‖² per sample and output: [n, c]."""
    workspace = WORKSPACE[x.tensors()[-1].device.type]
    if isinstance(x, DenseBlock):
        return x.expand().square().sum(2) if x.norms is None else x.norms
    if isinstance(x, OuterBlock) and not x.indexed:
        return _factored_norms(x, workspace)
    if isinstance(x, MixedBlock) and (pairs := matched(x, x)) is not None and len(pairs) == len(x.blocks):
        return torch.stack([squared_norms(a) for a, _ in pairs]).sum(0)
    size = x.rows(slice(0, 1)).expand().numel() * 8  # bytes of one sample in float64, the widest type
    step = max(1, workspace // size)
    return torch.cat([x.rows(slice(i, i + step)).expand().square().sum(2) for i in range(0, x.n, step)])


def _factored_norms(x: OuterBlock, workspace: int) -> Tensor:
    t, g, i, o = x.sizes()
    positions = t * t * (i + x.c * o) < t * i * x.c * o  # cheaper per sample than forming G
    # Bytes of one sample in float64, the widest type: its factors, and what either way makes of them.
    size = 8 * g * (t * (i + x.c * o) + (t * t * (1 + x.c) if positions else x.c * i * o))
    step = max(1, workspace // size)
    pieces = []
    for start in range(0, x.n, step):
        b = x.rows(slice(start, start + step))
        a, d = b.a(), b.d()
        if d.dtype == torch.float16:
            a, d = a.float(), d.float()
        if positions:
            alike = torch.einsum("ntgi,nsgi->ngts", a, a)
            norms = (torch.einsum("nctgo,ncsgo->ncgts", d, d) * alike[:, None]).sum((2, 3, 4))
        else:
            norms = gradient(a.transpose(1, 2), d).square().sum(2)
        pieces.append(norms if b.scale is None else norms * b.scale[:, None] ** 2)
    return torch.cat(pieces)
