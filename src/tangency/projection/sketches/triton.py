"""Calls of the Triton kernels in `_triton.py`; what they compute is written in torch where they are called from."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._base.triton import kernels

if TYPE_CHECKING:
    from .random import Stream


def _kernels() -> Any:
    return kernels("tangency.projection.sketches.triton_kernels")


def available() -> bool:
    return _kernels() is not None


def words(stream: "Stream", use: int, rows: int, first: int, blocks: int, device: torch.device) -> Tensor:
    """Four words of every counter first + 1 … of rows 0 … rows: [rows, 4·blocks]."""
    out = torch.empty(rows, 4 * blocks, dtype=torch.int64, device=device)
    low, high = (int.from_bytes(half, "little", signed=True) for half in _halves(stream.key))
    block = 256
    grid = (-(-blocks // block), rows)
    _kernels().words[grid](out, low, high, blocks, first, stream.output, use, BLOCK=block)
    return out


def _halves(key: int) -> tuple[bytes, bytes]:
    whole = key.to_bytes(16, "little")
    return whole[:8], whole[8:]


def entries(words: Tensor, table: Tensor | None, out: Tensor) -> Tensor:
    """±1, or normal numbers from a table, out of words [rows, q] into out [q, k]."""
    q, k = out.shape
    grid = (-(-q // 32), -(-k // 128))
    _kernels().entries[grid](
        words, table if table is not None else words, out, q, k, words.stride(0), NORMAL=table is not None, Q=32, K=128
    )
    return out


def buckets(g: Tensor, scale: Tensor, out: Tensor, bits: Tensor, shifts: Tensor, start: int) -> None:
    """out[r, (p + shift of p's chunk) mod k] += scale[r]·sign(p)·g[r, p], chunks of k columns; see `Sparse`."""
    g = g if g.stride(1) == 1 else g.contiguous()  # cotangents may be expanded ones
    (rows, q), k = g.shape, out.shape[1]
    high, wide = 4, 512  # measured
    grid = (-(-k // wide), -(-rows // high))
    first, last = start // k, (start + q - 1) // k + 1
    # Where that leaves a GPU half idle, the chunks are shared out, and the sums added up in their order.
    each = -(-(last - first) // max(1, min(last - first, 2048 // (grid[0] * grid[1]))))
    parts = -(-(last - first) // each)
    sums = out if parts == 1 else torch.zeros(parts, rows, k, device=g.device)
    # All places are counted from the first chunk, so that 32 bits hold them.
    _kernels().buckets[(*grid, parts)](
        g,
        scale,
        sums,
        bits.contiguous().view(torch.int32),
        shifts.to(torch.int32),
        rows,
        q,
        k,
        start - first * k,
        last - first,
        each,
        start % 64,
        g.stride(0),
        sums.stride(-2),
        HIGH=high,
        WIDE=wide,
    )
    if parts > 1:
        out += sums.sum(0)
