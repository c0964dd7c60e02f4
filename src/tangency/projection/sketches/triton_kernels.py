"""The Triton kernels of this room. Their meaning is written in torch where `triton.py` is called from."""

import triton
import triton.language as tl

# Compiled once each: what Triton gains by knowing that a size is divisible by 16 is less than compiling again takes.


@triton.jit(do_not_specialize=["low", "high", "blocks", "first", "output", "use"])
def words_kernel(out, low, high, blocks, first, output, use, BLOCK: tl.constexpr):
    """Philox4x64-10: four words per counter (first + k + 1, row, output, use)."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    zero = tl.zeros((BLOCK,), tl.uint64)
    c0 = (first + k + 1).to(tl.uint64)
    c1 = zero + row.to(tl.uint64)
    c2 = zero + output
    c3 = zero + use
    m0 = zero + 0xD2E7470EE14C6C93
    m1 = zero + 0xCA5A826395121157
    w0 = zero + 0x9E3779B97F4A7C15
    w1 = zero + 0xBB67AE8584CAA73B
    k0 = zero + low.to(tl.uint64)
    k1 = zero + high.to(tl.uint64)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        low0 = m0 * c0
        high1 = tl.umulhi(m1, c2)
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + w0
        k1 = k1 + w1
    inside = k < blocks
    where = out + row.to(tl.int64) * 4 * blocks + 4 * k
    tl.store(where, c0.to(tl.int64, bitcast=True), mask=inside)
    tl.store(where + 1, c1.to(tl.int64, bitcast=True), mask=inside)
    tl.store(where + 2, c2.to(tl.int64, bitcast=True), mask=inside)
    tl.store(where + 3, c3.to(tl.int64, bitcast=True), mask=inside)


@triton.jit(do_not_specialize=["q", "k", "stride"])
def entries_kernel(words, table, out, q, k, stride, NORMAL: tl.constexpr, Q: tl.constexpr, K: tl.constexpr):
    """A block [Q, K] of the matrix: the sign, or the normal number, that belongs to each row in its column's words."""
    column = tl.program_id(0) * Q + tl.arange(0, Q)
    row = tl.program_id(1) * K + tl.arange(0, K)
    inside = (column[:, None] < q) & (row[None, :] < k)
    each: tl.constexpr = 4 if NORMAL else 64
    word = tl.load(words + (row[None, :] // each).to(tl.int64) * stride + column[:, None], mask=inside, other=0)
    if NORMAL:
        value = tl.load(table + ((word >> (16 * (row[None, :] % 4))) & 0xFFFF), mask=inside, other=0.0)
    else:
        value = (((word >> (row[None, :] % 64)) & 1) * 2 - 1).to(tl.float32)
    where = out + column[:, None].to(tl.int64) * k + row[None, :]
    tl.store(where, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "q", "k", "start", "chunks", "each", "first_bit", "stride_g", "stride_out"])
def buckets_kernel(
    g,
    scale,
    out,
    bits,
    shifts,
    rows,
    q,
    k,
    start,
    chunks,
    each,
    first_bit,
    stride_g,
    stride_out,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One sum over `each` chunks per program of the third dimension."""
    j = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    r = (tl.program_id(1) * HIGH + tl.arange(0, HIGH)).to(tl.int64)
    part = tl.program_id(2)
    row = g + r[:, None] * stride_g
    present = r[:, None] < rows
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for chunk in range(part * each, tl.minimum(chunks, (part + 1) * each)):
        place = j - tl.load(shifts + chunk)
        p = chunk * k + tl.where(place < 0, place + k, place) - start  # the column of g whose bucket is j
        good = (j < k) & (p >= 0) & (p < q)
        bit = tl.maximum(p + first_bit, 0)
        word = tl.load(bits + (bit >> 5), mask=good, other=0)
        sign = (((word >> (bit & 31)) & 1) * 2 - 1).to(tl.float32)
        v = tl.load(row + p[None, :], mask=good[None, :] & present, other=0.0)
        total += v.to(tl.float32) * sign[None, :]
    inside = present & (j[None, :] < k)
    where = out + part.to(tl.int64) * rows * stride_out + r[:, None] * stride_out + j[None, :]
    factor = tl.load(scale + r, mask=r < rows, other=0.0)
    tl.store(where, tl.load(where, mask=inside, other=0.0) + total * factor[:, None], mask=inside)
