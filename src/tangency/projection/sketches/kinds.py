"""The kinds of random projection that take a gradient as a vector: dense, sparse, Hadamard.

Each is a matrix S [k, p] for every parameter, with E⟨Sx, Sy⟩ = ⟨x, y⟩ and matrices of different parameters independent,
so that the projections of several parameters may be added up.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ..._base.memory import power_of_two
from ...engine.blocks import GradientBlock, MixedBlock
from ...engine.narrow import matmul_wide
from . import triton
from .pieces import Piece, gradient_pieces
from .random import COLUMN, NORMAL, SHIFT, SIGN, Stream, below, entries, signs

# Columns whose words are made together, and whose matrix entries are held, on a CPU (heuristic: the latter stay in its
# cache); on a GPU the bytes of entries.
WORDS, HELD, CUDA = 1 << 13, 1 << 8, 1 << 30
# Entries that are transformed together (heuristic: fewer would be many small transforms).
LONGEST_TRANSFORM = 1 << 14


@dataclass(frozen=True)
class Place:
    """A parameter: its words and those that all share, its shape, where its entries lie among all parameters'."""

    stream: Stream
    common: Stream
    shape: tuple[int, ...]
    first: int
    total: int


class Sketch(ABC):
    """A kind of random matrix. Frozen; says all that decides its entries but seed and name."""

    kind: ClassVar[str]
    shared: ClassVar[bool] = False  # making the matrix is what costs: worth doing for many samples at a time

    @abstractmethod
    def add(
        self, outs: Sequence[Tensor], blocks: Sequence[GradientBlock], place: Place, joint: bool, room: int
    ) -> None:
        """Add S g to rows (sample, output) of outs, one for each block; `joint`: Σ_c S_c g_c to rows (sample)."""

    def factor(self, k: int) -> float:
        """What everything is multiplied with at the end."""
        return 1.0


class Flat(Sketch):
    """Kinds for which a gradient is a vector."""

    compact: ClassVar[bool] = True  # takes any set of columns, not only ranges

    @abstractmethod
    def multiply(self, outs: Sequence[Tensor], gs: Sequence[Tensor], piece: Piece, place: Place) -> None:
        """outs [r, k] += g [r, q] Sᵀ for the columns of a piece; g in the piece's order."""

    def add(
        self, outs: Sequence[Tensor], blocks: Sequence[GradientBlock], place: Place, joint: bool, room: int
    ) -> None:
        """Piece by piece, so that gradients are never all formed at once."""
        if len(blocks) > 1 and not (self.shared and _alike(blocks)):
            for out, block in zip(outs, blocks, strict=True):
                self.add([out], [block], place, joint, room)
            return
        for pieces in zip(*(gradient_pieces(b, room, self.compact) for b in blocks), strict=True):
            first = pieces[0]  # the others have the same columns
            for c in range(first.g.shape[1]) if joint else (None,):
                words = place if c is None else replace(place, stream=replace(place.stream, output=c))
                self.multiply(outs, [_rows(p, c) for p in pieces], replace(first, scale=_scales(first, c)), words)


def _alike(blocks: Sequence[GradientBlock]) -> bool:
    """Whether their pieces hold the same columns, without scales."""
    if len({(type(b), b.n, b.c) for b in blocks}) > 1 or isinstance(blocks[0], MixedBlock):
        return False
    plain = (None, False)
    return all(any(getattr(b, k, None) is v for v in plain) for b in blocks for k in ("indexed", "scale", "slot"))


def _rows(piece: Piece, c: int | None) -> Tensor:
    """[n·c, q], or those of one output; 16-bit gradients stay as they are."""
    return piece.g.flatten(0, 1) if c is None else piece.g[:, c]


def _scales(piece: Piece, c: int | None) -> Tensor | None:
    """The scale of every row, as large as those of `_rows`."""
    return piece.scale if piece.scale is None or c is not None else piece.scale.repeat_interleave(piece.g.shape[1])


@dataclass(frozen=True)
class _Dense(Flat):
    """Every entry random: S = R / √k. Cost: k multiplications per entry of the gradient, k random numbers per column.

    The matrix is made a few columns at a time and never stored. On a GPU these are written out and multiplied by
    cuBLAS: a Triton kernel that makes them in its registers was slower at every number of rows (docs/projection.md).
    """

    shared = True
    compact = False  # which rows of an embedding occur would decide the order of the sums, and random access is slow
    use: ClassVar[int]
    per_word: ClassVar[int]  # entries in a word of 64 bits

    def factor(self, k: int) -> float:
        """1/√k: the variance of an entry is 1/k."""
        return k**-0.5

    def multiply(self, outs: Sequence[Tensor], gs: Sequence[Tensor], piece: Piece, place: Place) -> None:
        """Some columns of R at a time, each used for all of gs while it is in the cache."""
        k, device = outs[0].shape[1], outs[0].device
        q, rows = gs[0].shape[1], -(-k // self.per_word)
        dtype = gs[0].dtype if device.type == "cuda" else outs[0].dtype
        held = HELD if device.type == "cpu" else max(64, CUDA // (k * dtype.itemsize) // 1024 * 1024)
        step = WORDS if device.type == "cpu" else held
        buffer = torch.empty(min(held, q), k, dtype=dtype, device=device)
        for start in range(0, q, step):
            count = min(step, q - start)
            words = place.stream.words(self.use, rows, piece.start + start, count, device)
            for at in range(0, count, held):
                columns = min(held, count - at)
                matrix = entries(words[:, at : at + columns], self.use == NORMAL, buffer[:columns])
                for out, g in zip(outs, gs, strict=True):
                    _product(out, g[:, start + at : start + at + columns], matrix, piece.scale)


@dataclass(frozen=True)
class Rademacher(_Dense):
    """R has entries ±1."""

    kind = "rademacher"
    use, per_word = SIGN, 64


@dataclass(frozen=True)
class GaussianEntries(_Dense):
    """R has normal entries (65,536 values: `normal_table`)."""

    kind = "gaussian"
    use, per_word = NORMAL, 4


@dataclass(frozen=True)
class Sparse(Flat):
    """`nonzeros` entries ±1/√s in each column, one in each of s equal groups of rows. Cost: s additions per entry.

    The p columns are cut into chunks as long as a group has rows; entry p goes to row (p + shift of its chunk) modulo
    that length, with a sign of its own. Two entries meet with probability 1/k or never, so the variance of ⟨Sx, Sy⟩ is
    at most that of a dense matrix of signs; and where an entry goes need not be looked up.
    """

    nonzeros: int = 1
    kind = "sparse"

    def factor(self, k: int) -> float:
        """1/√s, with s entries in a column."""
        return self.nonzeros**-0.5

    def multiply(self, outs: Sequence[Tensor], gs: Sequence[Tensor], piece: Piece, place: Place) -> None:
        """Each of the s groups of rows takes every entry once."""
        k = outs[0].shape[1]
        for out, g in zip(outs, gs, strict=True):
            for group in range(self.nonzeros):
                rows = slice(group * k // self.nonzeros, (group + 1) * k // self.nonzeros)
                if rows.stop > rows.start:
                    self._group(out[:, rows], g, piece, place.stream, group)

    def _group(self, out: Tensor, g: Tensor, piece: Piece, stream: Stream, group: int) -> None:
        k = out.shape[1]
        if piece.index is not None:
            return self._scattered(out, g, piece, stream, group)
        q = g.shape[1]
        first, last = piece.start // k, (piece.start + q - 1) // k + 1
        # The kernel sums in 32 bits, and 64-bit gradients want more.
        compiled = g.is_cuda and g.dtype != torch.float64 and triton.present()
        if not compiled:
            g = _wide(g, piece.scale)
        shifts = below(stream.words(SHIFT, 1, first, last - first, g.device, group)[0], k)
        if compiled:
            near = piece.start // 64
            bits = stream.words(COLUMN, 1, near, -(-(piece.start + q) // 64) - near, g.device, group)[0]
            scale = torch.ones(len(g), device=g.device) if piece.scale is None else piece.scale
            triton.launch_buckets(g, scale, out, bits, shifts, piece.start)
            return None
        sign = signs(stream, COLUMN, group, piece.start, q, out)
        at = 0
        for chunk, shift in enumerate(shifts.tolist(), first):
            stop = min(q, (chunk + 1) * k - piece.start)
            to = (piece.start + at - chunk * k + shift) % k
            before = min(stop - at, k - to)  # what lies before the end of the rows; the rest begins anew
            out[:, to : to + before].addcmul_(g[:, at : at + before], sign[at : at + before])
            if at + before < stop:
                out[:, : stop - at - before].addcmul_(g[:, at + before : stop], sign[at + before : stop])
            at = stop
        return None

    def _scattered(self, out: Tensor, g: Tensor, piece: Piece, stream: Stream, group: int) -> None:
        """For rows of an embedding."""
        k, columns = out.shape[1], piece.columns()
        shifts = below(stream.at(SHIFT, 1, columns // k, group)[0], k)
        words = stream.at(COLUMN, 1, columns // 64, group)[0]
        sign = (((words >> columns % 64) & 1) * 2 - 1).to(out.dtype)
        out.index_add_(1, (columns + shifts) % k, _wide(g, piece.scale) * sign)


@dataclass(frozen=True)
class Hadamard(Flat):
    """Random signs, a Hadamard transform of chunks, k of its rows, signs again: S = [E₁ R₁ H D₁, E₂ R₂ H D₂, …] / √k.

    The block SRHT of Balabanov et al. 2022; without E the first columns of all chunks, all ones, would be parallel.
    Entry p of D has bit p of the column signs, row r of E bit (first entry of its chunk + r) of another row of them.
    Chunks are as long as the power of two from k on, or longer, up to 16,384, where the parameter has so many entries.
    Cost: log₂ of that additions per entry, by two matrix products.
    """

    kind = "hadamard"
    compact = False

    def factor(self, k: int) -> float:
        """1/√k: the entries of H are ±1."""
        return k**-0.5

    def multiply(self, outs: Sequence[Tensor], gs: Sequence[Tensor], piece: Piece, place: Place) -> None:
        """Chunks of the columns, transformed one after another."""
        for out, g in zip(outs, gs, strict=True):
            self._transform(out, _wide(g, piece.scale).to(out.dtype), piece.start, place)

    def _transform(self, out: Tensor, g: Tensor, start: int, place: Place) -> None:
        k, (rows, q), stream = out.shape[1], g.shape, place.stream
        length = max(power_of_two(k), min(LONGEST_TRANSFORM, power_of_two(math.prod(place.shape))))
        left, right = _factors(length, out)
        # Numbers that are transformed at a time (heuristic).
        step = max(1, (1 << (29 if g.is_cuda else 26)) // (rows * length))
        first, last = start // length, (start + q - 1) // length + 1
        for chunk in range(first, last, step):
            low, high = max(start, chunk * length), min(start + q, (chunk + step) * length, last * length)
            # A piece may begin and end within a chunk: what other pieces hold is 0 here, and adds up with theirs.
            padded = g.new_zeros(rows, min(step, last - chunk) * length)
            sign = signs(stream, COLUMN, 0, low, high - low, g)
            padded[:, low - chunk * length : high - chunk * length] = g[:, low - start : high - start] * sign
            # (left ⊗ right) v, with v as a matrix: two small products in place of a large one.
            mixed = left @ padded.view(rows, -1, *left.shape[:1], *right.shape[:1]) @ right
            for j, part in enumerate(mixed.flatten(2).unbind(1)):
                after = signs(stream, COLUMN, 1, (chunk + j) * length, k, g)
                out += part[:, _sample(stream, chunk + j, length, k, g.device)] * after


@cache
def _hadamard(size: int) -> Tensor:
    """Sylvester's matrix of ±1, for a power of two."""
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def _factors(length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """H = left ⊗ right of the length."""
    bits = length.bit_length() - 1
    return tuple(_hadamard(1 << b).to(like) for b in (bits // 2, bits - bits // 2))  # type: ignore[return-value]


def _sample(stream: Stream, chunk: int, length: int, k: int, device: torch.device) -> Tensor:
    """k different rows of `length`, a power of two: the first images of a permutation of its numbers.

    Three rounds of j ← (j · odd + add) mod length, j ← j xor (j >> half its bits), with odd and add from words
    8·chunk + 2·round and the next.
    """
    words = stream.words(SHIFT, 1, 8 * chunk, 6, torch.device("cpu"))[0].tolist()
    j, half = torch.arange(k, device=device), max(1, length.bit_length() // 2)
    for step in range(3):
        odd, add = (words[2 * step] % length) | 1, words[2 * step + 1] % length
        j = (j * odd + add) % length
        j = j ^ (j >> half)
    return j


def _wide(g: Tensor, scale: Tensor | None) -> Tensor:
    """Gradients in 32 bits at least, with their scales."""
    g = g.float() if g.dtype == torch.float16 else g
    return g if scale is None else g * scale[:, None]


def _product(out: Tensor, g: Tensor, matrix: Tensor, scale: Tensor | None) -> None:
    """out += scale · g @ matrix; of 16-bit factors the sums have 32 bits."""
    if g.dtype == torch.float16:
        _accumulate(out, matmul_wide(g, matrix), scale)
    elif scale is None:
        out.addmm_(g, matrix)
    else:
        _accumulate(out, g @ matrix, scale)


def _accumulate(out: Tensor, part: Tensor, scale: Tensor | None) -> None:
    out += part if scale is None else part * scale[:, None]
