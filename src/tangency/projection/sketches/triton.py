"""Calls of the kernels in `triton_kernels.py`; what they compute is written in torch where they are called from."""

from types import ModuleType

import torch
from torch import Tensor

from ..._base.triton import load_kernels


def _module() -> ModuleType | None:
    return load_kernels("tangency.projection.sketches.triton_kernels")


def present() -> bool:
    """Whether there is Triton, for tensors on a GPU."""
    return _module() is not None


def launch_words(key: int, output: int, use: int, rows: int, first: int, blocks: int, device: torch.device) -> Tensor:
    """Four words of each of `blocks` counters from first + 1 on, for rows 0 … rows: int64 [rows, 4·blocks]."""
    module = _module()
    assert module is not None
    out = torch.empty(rows, 4 * blocks, dtype=torch.int64, device=device)
    whole = key.to_bytes(16, "little")
    low, high = (int.from_bytes(half, "little", signed=True) for half in (whole[:8], whole[8:]))
    block = 256
    grid = (-(-blocks // block), rows)
    module.words_kernel[grid](out, low, high, blocks, first, output, use, BLOCK=block)
    return out


def launch_entries(words: Tensor, table: Tensor | None, out: Tensor) -> Tensor:
    """±1, or normal numbers from a table, out of words [rows, q] into out [q, k]."""
    module = _module()
    assert module is not None
    q, k = out.shape
    grid = (-(-q // 32), -(-k // 128))
    module.entries_kernel[grid](
        words, table if table is not None else words, out, q, k, words.stride(0), NORMAL=table is not None, Q=32, K=128
    )
    return out


def launch_buckets(g: Tensor, scale: Tensor, out: Tensor, bits: Tensor, shifts: Tensor, start: int) -> None:
    """out[r, (p + shift of p's chunk) mod k] += scale[r]·sign(p)·g[r, p], chunks of k columns; see `Sparse`."""
    module = _module()
    assert module is not None
    g = g if g.stride(1) == 1 else g.contiguous()  # cotangents may be expanded ones
    (rows, q), k = g.shape, out.shape[1]
    high, wide = 4, 512  # measured
    grid = (-(-k // wide), -(-rows // high))
    first, last = start // k, (start + q - 1) // k + 1
    # Where that leaves a GPU half idle, the chunks are shared out, and the sums added up in their order.
    share = -(-(last - first) // max(1, min(last - first, 2048 // (grid[0] * grid[1]))))
    parts = -(-(last - first) // share)
    sums = out if parts == 1 else torch.zeros(parts, rows, k, device=g.device)
    # All places are counted from the first chunk, so that 32 bits hold them.
    module.buckets_kernel[(*grid, parts)](
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
        share,
        start % 64,
        g.stride(0),
        sums.stride(-2),
        HIGH=high,
        WIDE=wide,
    )
    if parts > 1:
        out += sums.sum(0)
