"""The kinds of random projection that need no gradient formed: of the factors (Kronecker), of single entries (mask)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine.blocks import DenseBlock, GradientBlock, OuterBlock
from .kinds import Place, Sketch, Sparse
from .pieces import ordered, output
from .random import FIRST, PICK, REST, SHIFT, Stream, below, entries, signs


def _by_output(block: GradientBlock, stream: Stream, joint: bool) -> list[tuple[GradientBlock, Stream]]:
    """The block with its words; where outputs are projected together, each output with its own."""
    if not joint:
        return [(block, stream)]
    return [(output(block, c), replace(stream, output=c)) for c in range(block.c)]


@dataclass(frozen=True)
class Kronecker(Sketch):
    """Signs on either side of the weight's gradient: B G Aᵀ with B [k₁, o] and A [k₂, i], k₁ k₂ ≤ k.

    From G = Σ_t δ_t ⊗ a_t it is Σ_t (B δ_t) ⊗ (A a_t), so G is never formed. Its variance falls with k₁ and k₂, the
    sides, not with k. A side that is no longer than its number of rows is kept, but for signs. Vectors (biases) are
    projected as by `Sparse`. What is shorter than k rows begins at a random row and goes round.
    """

    kind = "kronecker"

    def add(
        self, outs: Sequence[Tensor], blocks: Sequence[GradientBlock], place: Place, joint: bool, room: int
    ) -> None:
        """Add B G Aᵀ, flat, to rows (sample, output) of outs; `joint`: of each output with its own B and A."""
        if len(place.shape) < 2:
            return Sparse().add(outs, blocks, place, joint, room)
        k, sizes = outs[0].shape[1], (place.shape[0], math.prod(place.shape[1:]))
        sides = side_lengths(k, *sizes)
        for out, block in zip(outs, blocks, strict=True):
            for part, stream in _by_output(block, place.stream, joint):
                projected = _both_sides(part, stream, sizes, sides).flatten(2).flatten(0, 1).to(out.dtype)
                # Without the shift all parameters' first rows would meet in the same ones, and the last stay empty.
                to = int(below(stream.words(SHIFT, 1, 0, 1, torch.device("cpu")), k))
                before = min(projected.shape[1], k - to)
                out[:, to : to + before] += projected[:, :before]
                out[:, : projected.shape[1] - before] += projected[:, before:]
        return None


def side_lengths(k: int, o: int, i: int) -> tuple[int, int]:
    """(k₁, k₂) with k₁ k₂ ≤ k, as equal as o and i allow."""
    first = min(o, max(1, math.isqrt(k)))
    rest = min(i, k // first)
    return min(o, k // rest), rest


def _both_sides(block: GradientBlock, stream: Stream, sizes: tuple[int, int], sides: tuple[int, int]) -> Tensor:
    """B G Aᵀ [n, c, k₁, k₂], from the factors of G where it has some."""
    block = _in_order(block)
    like = block.tensors()[-1]
    like = like.float() if like.dtype == torch.float16 else like
    rest = _side(stream, REST, sizes[1], sides[1], like)
    lift = block.uses[0].lift if isinstance(block, OuterBlock) else None
    if isinstance(block, OuterBlock) and block.indexed and sides[0] < sizes[0]:
        projected = _looked_up(block, stream, sides[0], rest)
    elif isinstance(block, OuterBlock) and lift is not None and lift.taps is not None:
        first = _side(stream, FIRST, sizes[0], sides[0], like)
        a, d = block.a().to(like.dtype), block.d().to(like.dtype)  # [n, t, g, i], [n, c, t, g, o]
        if rest.dim() == 1:  # kept: in the weight's own order
            a = _aligned(ordered(a, lift.taps) * rest)
        else:
            # Patches are unfolded [taps, channels], a weight is [channels, taps]: the side gets the patches' order.
            a = _aligned(_apply(a, rest.unflatten(0, (-1, lift.taps)).transpose(0, 1).flatten(0, 1)))
        by_group = first.unflatten(0, (a.shape[2], -1))
        deltas = [_apply(d[:, :, :, g], by_group[g]) for g in range(a.shape[2])]  # B δ of each group
        if first.dim() == 1 and len(deltas) > 1:  # groups keep their own channels
            projected = torch.cat([torch.einsum("ncto,nti->ncoi", v, a[:, :, g]) for g, v in enumerate(deltas)], 2)
        else:
            projected = torch.einsum("nctgo,ntgi->ncoi", torch.stack(deltas, 3), a)
        projected = projected[..., : sides[1]]
    else:
        first = _side(stream, FIRST, sizes[0], sides[0], like)
        g = block.expand().unflatten(2, sizes)
        return _apply(_apply(g, rest).transpose(-1, -2), first).transpose(-1, -2)
    return projected if block.scale is None else projected * block.scale[:, None, None, None]


def _in_order(block: GradientBlock) -> GradientBlock:
    """The block with entries in the parameter's own order: factors of a part of it are multiplied out."""
    return DenseBlock(block.expand()) if isinstance(block, OuterBlock) and block.slot is not None else block


def _looked_up(block: OuterBlock, stream: Stream, k: int, rest: Tensor) -> Tensor:
    """An embedding: B δ is the column of B that belongs to the row that was looked up."""
    a, d = block.a(), block.d()[:, :, :, 0].to(rest.dtype)  # [n, t], [n, c, t, o]
    # Only columns of B that are needed are made; −1 is a position without a row (padding).
    present = torch.unique(a[a >= 0])
    if not len(present):
        return d.new_zeros(len(d), d.shape[1], k, rest.shape[-1] if rest.dim() == 2 else len(rest))
    words = stream.at(FIRST, -(-k // 64), present)
    table = entries(words, False, rest.new_empty(len(present), k)) / math.sqrt(k)
    first = table[torch.searchsorted(present, a.clamp_min(0))] * (a >= 0)[..., None]
    return torch.einsum("nto,ncti->ncoi", first, _apply(d, rest))


def _side(stream: Stream, use: int, size: int, k: int, like: Tensor) -> Tensor:
    """[size, k], or signs [size] where nothing is left out."""
    if k >= size:
        return signs(stream, use, 0, 0, size, like)
    words = stream.words(use, -(-k // 64), 0, size, like.device)
    return entries(words, False, like.new_empty(size, k)) / math.sqrt(k)


def _apply(v: Tensor, side: Tensor) -> Tensor:
    """v times a side, sample by sample: what one product of all rounds to depends on a sample's place in the batch."""
    if side.dim() == 1:
        return v * side
    wide = _aligned(side)
    product = torch.bmm(v.reshape(len(v), -1, v.shape[-1]), wide.expand(len(v), *wide.shape))
    return product[..., : side.shape[1]].reshape(*v.shape[:-1], -1)


def _aligned(v: Tensor) -> Tensor:
    """Rows of whole cache lines: rounding depends on how they lie in memory, too."""
    return F.pad(v, (0, -v.shape[-1] % 16))


@dataclass(frozen=True)
class RandomMask(Sketch):
    """k entries of the gradient: the entries are cut into k equal runs, and one is picked of each. Cost: k·t.

    Row r is ±√(length of run r) at the entry picked. Cheapest, and unbiased, but its error depends on how unequal the
    entries are.
    """

    kind = "random-mask"

    def add(
        self, outs: Sequence[Tensor], blocks: Sequence[GradientBlock], place: Place, joint: bool, room: int
    ) -> None:
        """Add those picked entries that lie in this parameter, each to its row of outs."""
        size = math.prod(place.shape)
        for out, block in zip(outs, blocks, strict=True):
            # The common words: which entries are picked is decided for all parameters of a group together.
            for part, stream in _by_output(block, place.common, joint):
                picks, weights = _picks(stream, out.shape[1], place.total, out)
                rows = ((picks >= place.first) & (picks < place.first + size) & (weights != 0)).nonzero()[:, 0]
                if len(rows):
                    values = _values(part, picks[rows] - place.first)
                    out[:, rows] += (values.flatten(0, 1) * weights[rows]).to(out.dtype)


def _picks(stream: Stream, k: int, total: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Which entry each row is, and with what factor: its word's upper half picks, its lowest bit is the sign."""
    # Run r is the entries r·total/k … (r + 1)·total/k, in whole numbers: their lengths differ by one at most.
    r = torch.arange(k, device=like.device)
    low = r * total // k
    length = (r + 1) * total // k - low
    words = stream.words(PICK, 1, 0, k, like.device)[0]
    picks = low + ((((words >> 32) & 0xFFFFFFFF) * length) >> 32)
    return picks, ((words & 1) * 2 - 1) * length.to(like.dtype).sqrt()


def _values(block: GradientBlock, columns: Tensor) -> Tensor:
    """Single entries of the gradients: [n, c, len(columns)]."""
    block = _in_order(block)
    if isinstance(block, DenseBlock):
        g = block.g[:, :, columns].float() if block.g.dtype == torch.float16 else block.g[:, :, columns]
        return g if block.scale is None else g * block.scale[:, None, None]
    lift = block.uses[0].lift if isinstance(block, OuterBlock) else None
    if isinstance(block, OuterBlock) and block.indexed:
        d = block.d()[:, :, :, 0].float() if block.dtype == torch.float16 else block.d()[:, :, :, 0]
        hit = (block.a()[:, :, None] == columns // d.shape[-1]).to(d.dtype)  # [n, t, k]: is it the row of the entry?
        entry = torch.einsum("ntk,nctk->nck", hit, d[..., columns % d.shape[-1]])
        return entry if block.scale is None else entry * block.scale[:, None, None]
    if not isinstance(block, OuterBlock) or lift is None or lift.taps is None:
        return block.expand()[:, :, columns]
    _, _, i, o = block.sizes()
    channel, inner = columns // i, columns % i
    # From the weight's order (channels, taps) to that of the unfolded patches (taps, channels).
    inner = (inner % lift.taps) * (i // lift.taps) + inner // lift.taps
    group = channel // o
    a, d = block.a(), block.d()
    if d.dtype == torch.float16:
        a, d = a.float(), d.float()
    entry = torch.einsum("ntk,nctk->nck", a[:, :, group, inner], d[:, :, :, group, channel % o])
    return entry if block.scale is None else entry * block.scale[:, None, None]
