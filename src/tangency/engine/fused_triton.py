"""The Triton kernels of `fused.py`, where their meaning is written in torch."""

import triton
import triton.language as tl


@triton.jit
def dot(d, x, out, t, o, dn, dt, do, xn, xt, xo, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr):
    """`fused.dot_positions`: one program per sample and BLOCK_O channels, BLOCK_T positions at a time."""
    n = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    total = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for start in range(0, t, BLOCK_T):
        row = start + tl.arange(0, BLOCK_T)
        inside = (row[:, None] < t) & (col[None, :] < o)
        a = tl.load(d + n * dn + row[:, None] * dt + col[None, :] * do, mask=inside, other=0.0)
        b = tl.load(x + n * xn + row[:, None] * xt + col[None, :] * xo, mask=inside, other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)
    tl.store(out + n * o + col, tl.sum(total, 0), mask=col < o)


@triton.jit
def sum_pairs(a, d, out, t, m, s, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """`fused.sum_products`: one program per row sample and COLUMNS column samples; WIDE >= s is a power of two."""
    n = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, WIDE)
    inside = (col[:, None] < m) & (place[None, :] < s)
    offset = col[:, None] * s + place[None, :]
    total = tl.zeros((COLUMNS, WIDE), tl.float32)
    for row in range(t):
        base = (n * t + row) * m * s
        x = tl.load(a + base + offset, mask=inside, other=0.0)
        y = tl.load(d + base + offset, mask=inside, other=0.0)
        total += x.to(tl.float32) * y.to(tl.float32)
    tl.store(out + n * m + col, tl.sum(total, 1), mask=col < m)


@triton.jit
def sum_shifts(pixels, d, rows, places, out, constant, t, m, s, p, q, taps, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """`fused.sum_shifted`: programs as in `sum_pairs`; rows [t, taps] and places [taps, s] are numbers of pixels."""
    n = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, WIDE)
    inside = (col[:, None] < m) & (place[None, :] < s)
    offset = col[:, None] * s + place[None, :]
    total = tl.zeros((COLUMNS, WIDE), tl.float32)
    for row in range(t):
        alike = tl.zeros((COLUMNS, WIDE), tl.float32) + constant
        for u in range(taps):
            line = tl.load(rows + row * taps + u)
            if line >= 0:
                spot = tl.load(places + u * s + place, mask=place < s, other=-1)
                here = inside & (spot[None, :] >= 0)
                alike += tl.load(
                    pixels + (n * p + line) * m * q + col[:, None] * q + spot[None, :], mask=here, other=0.0
                )
        y = tl.load(d + (n * t + row) * m * s + offset, mask=inside, other=0.0)
        total += alike * y
    tl.store(out + n * m + col, tl.sum(total, 1), mask=col < m)


@triton.jit
def round_row(g, q, scale, k, padded, stride, top, BLOCK: tl.constexpr):
    """`fused.round_rows`: a program per row; the second time it is read, it comes from the cache."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, k, BLOCK):
        v = tl.load(g + n * stride + start + place, mask=start + place < k, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(v))
    most = tl.max(largest, 0)
    tl.store(scale + n, tl.where(most == 0.0, 1.0, most / top))
    factor = tl.where(most == 0.0, 1.0, top / most)
    for start in range(0, padded, BLOCK):
        v = tl.load(g + n * stride + start + place, mask=start + place < k, other=0.0).to(tl.float32)
        tl.store(q + n * padded + start + place, (v * factor).to(q.dtype.element_ty), mask=start + place < padded)


@triton.jit
def form(
    d, a, factor, out, t, o, i, dn, dt, an, at,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """`fused.form_rows`: a program per sample and BLOCK_O x BLOCK_I entries of its gradient, o counting all outputs."""
    n = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(i, BLOCK_I)
    row = (tl.program_id(0) // across) * BLOCK_O + tl.arange(0, BLOCK_O)
    col = (tl.program_id(0) % across) * BLOCK_I + tl.arange(0, BLOCK_I)
    place = tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for start in range(0, t, BLOCK_T):
        at_once = start + place[:, None]
        x = tl.load(d + n * dn + at_once * dt + row[None, :], mask=(at_once < t) & (row[None, :] < o), other=0.0)
        y = tl.load(a + n * an + at_once * at + col[None, :], mask=(at_once < t) & (col[None, :] < i), other=0.0)
        total = tl.dot(tl.trans(x), y, total)
    total *= tl.load(factor + n)
    where = out + n * o * i + row[:, None].to(tl.int64) * i + col[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(row[:, None] < o) & (col[None, :] < i))


@triton.jit
def scale_last(d, scale, out, size, o, BLOCK: tl.constexpr):
    """`fused.scale_channels` where channels lie last in memory: entry k has channel k mod o."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < size
    v = tl.load(d + k, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(scale + k % o, mask=inside, other=0.0)
    tl.store(out + k, (v * s).to(out.dtype.element_ty), mask=inside)
