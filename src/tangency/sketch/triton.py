"""Calls of the Triton kernels in `_triton.py`; what they compute is written in torch where they are called from."""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .random import Stream


@cache
def _kernels() -> Any:
    """The module with the kernels, or None where there is no Triton."""
    try:
        from . import _triton

        return _triton
    except ImportError:
        return None


def available() -> bool:
    return _kernels() is not None


def words(stream: "Stream", use: int, rows: int, first: int, blocks: int, device: torch.device) -> Tensor:
    """Four words of every counter first + 1 … of rows 0 … rows: [rows, 4·blocks]."""
    out = torch.empty(rows, 4 * blocks, dtype=torch.int64, device=device)
    key = torch.frombuffer(bytearray(stream.key.to_bytes(16, "little")), dtype=torch.int64).to(device)
    block = 256
    grid = (-(-blocks // block), rows)
    _kernels().words[grid](out, key, blocks, first, stream.output, use, BLOCK=block)
    return out


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
    (rows, q), k = g.shape, out.shape[1]
    high, wide = (32, 256) if rows >= 512 else (4, 256)
    grid = (-(-k // wide), -(-rows // high))
    chunks = start // k, (start + q - 1) // k + 1
    # All places are counted from the first chunk, so that 32 bits hold them.
    _kernels().buckets[grid](
        g,
        scale,
        out,
        bits.contiguous().view(torch.int32),
        shifts.to(torch.int32),
        rows,
        q,
        k,
        start - chunks[0] * k,
        chunks[1] - chunks[0],
        start % 64,
        g.stride(0),
        out.stride(0),
        HIGH=high,
        WIDE=wide,
    )
