"""The gradients of one parameter, a piece at a time, so that all of them never lie in memory at once."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...engine.blocks import DenseBlock, GradientBlock, MixedBlock, OuterBlock, formed, gradient, scatter
from ...engine.rules import LinearRule


@dataclass(frozen=True)
class Piece:
    """Columns start … of a parameter's gradients; with `index`, those of the weight's rows that it numbers."""

    g: Tensor  # [n, c, q]
    start: int = 0
    index: Tensor | None = None
    scale: Tensor | None = None

    def columns(self) -> Tensor:
        """The number of each column in the parameter, where `index` says which rows they belong to."""
        assert self.index is not None
        wide = self.g.shape[2] // len(self.index)
        return (self.index[:, None] * wide + torch.arange(wide, device=self.g.device)).flatten()


def gradient_pieces(block: GradientBlock, room: int, compact: bool = True) -> Iterator[Piece]:
    """All of a block. `room`: bytes that a piece may take. `compact`: of an embedding, only rows that occur."""
    if isinstance(block, MixedBlock):
        for b in block.blocks:
            yield from gradient_pieces(b, room, compact)
    elif isinstance(block, DenseBlock):
        yield Piece(block.g, scale=block.scale)
    elif isinstance(block, OuterBlock) and block.slot is not None:
        if block.slot.contiguous:
            for piece in gradient_pieces(replace(block, slot=None), room, compact=False):
                yield replace(piece, start=piece.start + block.slot.offset)
        else:
            yield Piece(block.expand())
    elif isinstance(block, OuterBlock) and block.indexed:
        yield from _rows(block, room) if compact else _vocabulary(block, room)
    elif isinstance(block, OuterBlock) and block.uses[0].lift.taps is not None:
        yield from _channels(block, room)
    elif isinstance(block, OuterBlock) and all(isinstance(u.lift, LinearRule) for u in block.uses):
        yield from _columns(block, room)
    else:
        dense = formed(block)
        gradients = dense.g if isinstance(dense, DenseBlock) else dense.expand()
        yield Piece(gradients, scale=getattr(dense, "scale", None))


def output(block: GradientBlock, c: int) -> GradientBlock:
    """The gradients of one output alone."""
    alone = slice(c, c + 1)
    if isinstance(block, MixedBlock):
        return MixedBlock(tuple(output(b, c) for b in block.blocks))
    if isinstance(block, OuterBlock):
        return replace(block, uses=tuple(replace(u, d=u.d[:, alone]) for u in block.uses))
    assert isinstance(block, DenseBlock)
    return replace(block, g=block.g[:, alone])


def _channels(block: OuterBlock, room: int) -> Iterator[Piece]:
    """By the weight's leading dimension: some groups, or some channels of one."""
    t, g, i, o = block.sizes()
    a, d = block.a().transpose(1, 2), block.d()
    taps = block.uses[0].lift.taps
    assert taps is not None
    # Patches are unfolded [taps, channels], a weight is [channels, taps]. Whichever is smaller is put in order: the
    # activations before the product, or the gradients after it.
    before = taps > 1 and t < block.c * o
    if before:
        a = ordered(a, taps)
    fit = max(1, room // max(1, block.n * block.c * i * d.element_size()))  # output channels that a piece may hold
    together, step = max(1, min(g, fit // o)), min(o, fit)
    for group in range(0, g, together):
        for start in range(0, o, step):
            groups = slice(group, group + together)
            gradients = gradient(a[:, groups], d[:, :, :, groups, start : start + step])
            if taps > 1 and not before:
                gradients = ordered(gradients.unflatten(2, (-1, i)), taps).flatten(2)
            yield Piece(gradients, (group * o + start) * i, scale=block.scale)


def _columns(block: OuterBlock, room: int) -> Iterator[Piece]:
    """A weight that is stored [i, o], by its rows."""
    a, d = block.a().transpose(1, 2), block.d()
    (i, o), rows = (a.shape[3], d.shape[4]), block.n * block.c
    step = max(1, min(i, room // max(1, rows * o * d.element_size())))
    for start in range(0, i, step):
        gradients = gradient(a[..., start : start + step], d).unflatten(2, (o, -1)).transpose(-1, -2)
        yield Piece(gradients.flatten(2), start * o, scale=block.scale)


def ordered(v: Tensor, taps: int) -> Tensor:
    """(…, taps·channels) → (…, channels·taps)."""
    return v.unflatten(-1, (taps, -1)).transpose(-1, -2).flatten(-2)


def _rows(block: OuterBlock, room: int) -> Iterator[Piece]:
    """Of an embedding, the rows that some sample looks up."""
    a, d = block.a(), block.d()
    step = max(1, room // max(1, block.n * block.c * d.shape[-1] * 4))
    every = torch.unique(a[a >= 0])
    for present in every.split(step) if len(every) else ():
        # Rows are numbered within the piece; −1 is one that is not in it.
        local = torch.searchsorted(present, a).clamp_max(len(present) - 1)
        local = torch.where(present[local] == a, local, -1)
        yield Piece(_scattered(local, d, len(present)), index=present, scale=block.scale)


def _vocabulary(block: OuterBlock, room: int) -> Iterator[Piece]:
    """Of an embedding, every row, a few at a time."""
    a, d = block.a(), block.d()
    wide = d.shape[-1]
    step = max(1, min(block.vocabulary, room // max(1, block.n * block.c * wide * 4)))
    for start in range(0, block.vocabulary, step):
        count = min(step, block.vocabulary - start)
        local = torch.where((a >= start) & (a < start + count), a - start, -1)
        yield Piece(_scattered(local, d, count), start * wide, scale=block.scale)


def _scattered(index: Tensor, d: Tensor, rows: int) -> Tensor:
    """The gradients [n, c, rows·o] of an embedding's rows, added up in 32 bits at least."""
    wide = d.float() if d.dtype == torch.float16 else d
    return scatter(index, wide, rows)[:, :, 0].transpose(-1, -2).flatten(2)
