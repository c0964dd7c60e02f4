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
def _row(
    row, base, m, col, place, inside, constant,
    PX0: tl.constexpr, PX1: tl.constexpr, TX1: tl.constexpr, PY0: tl.constexpr, PY1: tl.constexpr, TY1: tl.constexpr,
    KERNEL0: tl.constexpr, KERNEL1: tl.constexpr, STRIDE0: tl.constexpr, STRIDE1: tl.constexpr,
    BEFORE0: tl.constexpr, BEFORE1: tl.constexpr, GAP0: tl.constexpr, GAP1: tl.constexpr,
):  # fmt: skip
    """Products of the patch of position `row` with those of all columns: sums of products of pixels."""
    alike = tl.zeros((col.shape[0], place.shape[0]), tl.float32) + constant
    for tap in tl.static_range(KERNEL0 * KERNEL1):
        down = tap // KERNEL1 * GAP0 - BEFORE0
        right = tap % KERNEL1 * GAP1 - BEFORE1
        y = row // TX1 * STRIDE0 + down
        x = row % TX1 * STRIDE1 + right
        if (y >= 0) & (y < PX0) & (x >= 0) & (x < PX1):
            b = place // TY1 * STRIDE0 + down
            a = place % TY1 * STRIDE1 + right
            here = inside & ((b >= 0) & (b < PY0) & (a >= 0) & (a < PY1))[None, :]
            line = base + (y * PX1 + x) * m * (PY0 * PY1)
            alike += tl.load(line + col[:, None] * (PY0 * PY1) + (b * PY1 + a)[None, :], mask=here, other=0.0)
    return alike


@triton.jit(do_not_specialize=["skew"])
def sum_shifts(
    pixels, d, out, constant, m, skew, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
    PX0: tl.constexpr, PX1: tl.constexpr, TX0: tl.constexpr, TX1: tl.constexpr,
    PY0: tl.constexpr, PY1: tl.constexpr, TY0: tl.constexpr, TY1: tl.constexpr,
    KERNEL0: tl.constexpr, KERNEL1: tl.constexpr, STRIDE0: tl.constexpr, STRIDE1: tl.constexpr,
    BEFORE0: tl.constexpr, BEFORE1: tl.constexpr, GAP0: tl.constexpr, GAP1: tl.constexpr,
):  # fmt: skip
    """`fused.sum_shifted`: one program per row sample and COLUMNS column samples; WIDE is a power of two.

    P: pixels, T: positions, X: of the row sample, Y: of the columns. `skew` is 0, which the compiler must not know:
    else each thread would fetch four neighbours at a time, and neighbouring threads not neighbouring numbers, which
    suits d but not the many shifted fetches of pixels.
    """
    n = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, WIDE)
    s: tl.constexpr = TY0 * TY1
    inside = (col[:, None] < m) & (place[None, :] < s)
    base = pixels + n * (PX0 * PX1) * m * (PY0 * PY1)
    deltas = d + skew + n * (TX0 * TX1) * m * s
    total = tl.zeros((COLUMNS, WIDE), tl.float32)
    if TX0 * TX1 <= 16:  # written out: which taps lie outside is known then
        for row in tl.static_range(TX0 * TX1):
            alike = _row(row, base, m, col, place, inside, constant, PX0, PX1, TX1, PY0, PY1, TY1,
                         KERNEL0, KERNEL1, STRIDE0, STRIDE1, BEFORE0, BEFORE1, GAP0, GAP1)  # fmt: skip
            total += alike * tl.load(deltas + row * m * s + col[:, None] * s + place[None, :], mask=inside, other=0.0)
    else:
        for row in range(TX0 * TX1):
            alike = _row(row, base, m, col, place, inside, constant, PX0, PX1, TX1, PY0, PY1, TY1,
                         KERNEL0, KERNEL1, STRIDE0, STRIDE1, BEFORE0, BEFORE1, GAP0, GAP1)  # fmt: skip
            total += alike * tl.load(deltas + row * m * s + col[:, None] * s + place[None, :], mask=inside, other=0.0)
    tl.store(out + n * m + col, tl.sum(total, 1), mask=col < m)


@triton.jit
def round_row(g, q, scale, sums, tops, k, padded, stride, BLOCK: tl.constexpr):
    """`fused.round_rows`: a program per row; the second time it is read, it comes from the cache."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, k, BLOCK):
        v = tl.load(g + n * stride + start + place, mask=start + place < k, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(v))
    most = tl.max(largest, 0)
    top = tl.load(tops + n)
    factor = tl.where(most == 0.0, 1.0, top / most)
    own = tl.zeros((BLOCK,), tl.float32)
    common = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, padded, BLOCK):
        v = tl.load(g + n * stride + start + place, mask=start + place < k, other=0.0).to(tl.float32) * factor
        w = v.to(q.dtype.element_ty)
        tl.store(q + n * padded + start + place, w, mask=start + place < padded)
        own += v * v
        common += v * w.to(tl.float32)
    tl.store(sums + 2 * n, tl.sum(own, 0))
    tl.store(sums + 2 * n + 1, tl.sum(common, 0))
    tl.store(scale + n, tl.where(most == 0.0, 1.0, most / top))


@triton.jit
def form(
    d, a, factor, out, sums, t, o, i, dn, dt, an, at,
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
    total *= tl.load(factor + n)  # 0 outside, where factors were filled up with zeros
    rounded = total.to(out.dtype.element_ty)
    where = out + n * o * i + row[:, None].to(tl.int64) * i + col[None, :]
    tl.store(where, rounded, mask=(row[:, None] < o) & (col[None, :] < i))
    piece = sums + 2 * (n * tl.num_programs(0) + tl.program_id(0))
    tl.store(piece, tl.sum(tl.sum(total * total, 1), 0))
    tl.store(piece + 1, tl.sum(tl.sum(total * rounded.to(tl.float32), 1), 0))


@triton.jit
def scale_last(d, scale, out, size, o, BLOCK: tl.constexpr):
    """`fused.scale_channels` where channels lie last in memory: entry k has channel k mod o."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < size
    v = tl.load(d + k, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(scale + k % o, mask=inside, other=0.0)
    tl.store(out + k, (v * s).to(out.dtype.element_ty), mask=inside)
