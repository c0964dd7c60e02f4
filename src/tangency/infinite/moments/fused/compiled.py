"""The fused recursion on a CPU, compiled by numba: lanes of pairs through all steps, one class of offsets at a time.

LANES pairs of samples go together: they are the last axis of every field, so each loop is over a multiple of a
register's width, whatever the images' size. A class's field of some pairs stays in the cache through all steps.

Products and sums that decide whether two equal patches stay equal to the last bit (affine maps, windows, pq − c²) are
made in one order and never fused; only the polynomial of the arc tangent is. Rows are not sliced in the innermost
functions (numba would count references), and places are unsigned there (signed ones might count from the end, and such
loops go one number at a time).

numba keeps the machine code on disk, and compiles again when this file changes: touch it after changing `program.py`.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit

from .program import (
    ACT,
    ARC,
    AT,
    B_RATE,
    B_VAR,
    CLASSES_X,
    CLASSES_Y,
    CODE,
    ENTRY_H,
    ENTRY_W,
    ERF,
    FIRST,
    FROM_H,
    FROM_W,
    GELU,
    GRID_H,
    GRID_W,
    HEIGHT,
    KX,
    KY,
    LAST,
    OUT,
    OWN,
    POOL_X,
    POOL_Y,
    RX,
    RY,
    SECOND,
    STEPS,
    STOP,
    STORE,
    STRIDE_X,
    STRIDE_Y,
    SX,
    SY,
    W_RATE,
    W_VAR,
    WIDTH,
)

LANES = 16  # pairs that go together: two 512-bit registers of doubles, one of floats
HALO = 3  # zeros before and behind a row: half of the widest window

F = TypeVar("F", bound=Callable[..., Any])


def _inner(fastmath: bool | set[str] = False) -> Callable[[F], F]:
    """numba's compiler for what only compiled code calls."""
    return njit(error_model="numpy", fastmath=fastmath, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _outer(function: F) -> F:
    """The same for what Python calls: without the GIL, and kept on disk where there is a place for it."""
    try:
        return njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no folder can be written to
        return njit(nogil=True, error_model="numpy")(function)


@_inner(fastmath={"contract"})
def _over(z, poly):
    """The polynomial, by Horner's rule with fused products."""
    r = poly[len(poly) - 1]
    for k in range(len(poly) - 2, -1, -1):
        r = r * z + poly[k]
    return r


@_inner()
def _angle(x, y, tiny, half_pi, poly):
    """atan(x/y) for x, y ≥ 0; 0 where both are."""
    t = min(x, y) / max(max(x, y), tiny)
    angle = t * _over(t * t, poly)
    return half_pi - angle if x > y else angle


@_inner()
def _arc(c, k, left, right, p, q, out_c, out_k, out, y, n, own, numbers, poly, tangent):
    """The arc-cosine pair of order 1 and 0, as `activations/dual.py` has it; `own`: a, f, the slope at
    rest."""
    zero, half_pi, full, tiny = numbers[0], numbers[1], numbers[2], numbers[3]
    a, f, rest = own[0], own[1], own[2]
    for i in range(np.uint64(n)):
        ci, pi, qi = c[i], left[p + i], right[q + i]
        square = pi * qi - ci * ci
        s = math.sqrt(zero if square < zero else square)
        theta = _angle(s, abs(ci), tiny, half_pi, poly)
        theta = full - theta if ci < zero else theta
        slope = a - f * theta
        value = f * s + slope * ci
        dead = (pi <= zero) | (qi <= zero)
        out_c[out, y, i] = zero if dead else value
        if tangent:
            out_k[out, y, i] = k[i] * (rest if dead else slope)


@_inner()
def _erf(c, k, left, right, p, q, out_c, out_k, out, y, n, own, numbers, poly, tangent):
    """By the arc sine of the scaled correlation; `own`: 2b², 2a²/π, the constant's square, 4(ab)²/π."""
    zero, half_pi, one, tiny = numbers[0], numbers[1], numbers[4], numbers[3]
    scale, factor, shift, steep = own[0], own[1], own[2], own[3]
    for i in range(np.uint64(n)):
        ci, pi, qi = scale * c[i], scale * left[p + i], scale * right[q + i]
        square = pi * qi - ci * ci
        s = math.sqrt(one + (pi + qi) + (zero if square < zero else square))
        angle = _angle(abs(ci), s, tiny, half_pi, poly)
        out_c[out, y, i] = factor * (-angle if ci < zero else angle) + shift
        if tangent:
            out_k[out, y, i] = k[i] * (steep / s)


@_inner()
def _gelu(c, k, left, right, p, q, out_c, out_k, out, y, n, own, numbers, poly, tangent):
    """In closed form, as `activations/duals.py` has it."""
    zero, half_pi, tiny, one, turn, quarter = numbers[0], numbers[1], numbers[3], numbers[4], numbers[5], numbers[6]
    for i in range(np.uint64(n)):
        ci, pi, qi = c[i], left[p + i], right[q + i]
        a, b = one / (one + pi), one / (one + qi)
        square = pi * qi - ci * ci
        square = ((zero if square < zero else square) + (one + pi)) + qi
        d = math.sqrt(square)
        angle = _angle(abs(ci), d, tiny, half_pi, poly)
        share = (-angle if ci < zero else angle) * turn + quarter  # turn: 1/2π
        over = ci * turn / d
        out_c[out, y, i] = share * ci + (over * ci * a * b + d * (pi * a * turn) * (qi * b))
        if tangent:
            out_k[out, y, i] = k[i] * ((one / square + a + b) * over + share)


@_inner()
def _down(v, b, y, h, w, spec, zero, mid):
    """The sum over a window's rows, at one row of its outputs: the middle first, then from the first on."""
    ky, n, centre = spec[KY], w * LANES, y * spec[SY]
    above, below = centre - 1, centre + 1
    if ky == 3 and above >= 0 and below < h:
        for i in range(n):
            mid[i] = v[b, centre, i] + v[b, above, i] + v[b, below, i]
    else:
        for i in range(n):
            mid[i] = v[b, centre, i]
        for other in range(max(0, centre - ky // 2), min(h, centre + ky // 2 + 1)):
            if other != centre:
                for i in range(n):
                    mid[i] += v[b, other, i]
    for i in range(HALO * LANES):  # zeros behind; those before it were never touched
        mid[n + i] = zero


@_inner()
def _across(padded, wide, spec, row):
    """The sum over a window's columns, in the same order."""
    half, stride = spec[KX] // 2, spec[SX] * LANES
    for delta in range(-half - 1, half + 1):
        first = delta < -half
        if delta == 0 and not first:
            continue
        shifted = padded[(HALO + (0 if first else delta)) * LANES :]
        for x in range(wide):
            for lane in range(LANES):
                value = shifted[x * stride + lane]
                row[x * LANES + lane] = value if first else row[x * LANES + lane] + value


@_inner()
def _across_affine(padded_c, padded_k, n, own, row_c, row_k, tangent):
    """`_across` three columns and `_affine` in one go: most layers."""
    w_var, b_var, w_rate, b_rate = own[W_VAR], own[B_VAR], own[W_RATE], own[B_RATE]
    mid, left, right = np.uint64(HALO * LANES), np.uint64((HALO - 1) * LANES), np.uint64((HALO + 1) * LANES)
    for i in range(np.uint64(n)):
        total = padded_c[mid + i] + padded_c[left + i] + padded_c[right + i]
        row_c[i] = total * w_var + b_var
        if tangent:
            around = padded_k[mid + i] + padded_k[left + i] + padded_k[right + i]
            row_k[i] = (total * w_rate + b_rate) + around * w_var


@_inner()
def _affine(c, k, n, own, tangent):
    """The weights and biases of a layer, in place."""
    w_var, b_var, w_rate, b_rate = own[W_VAR], own[B_VAR], own[W_RATE], own[B_RATE]
    for i in range(n):
        before = c[i]
        c[i] = before * w_var + b_var
        if tangent:
            k[i] = (before * w_rate + b_rate) + k[i] * w_var


@_inner()
def _step(spec, own, d_y, d_x, c, k, left, right, rows, numbers, poly, tangent, learn):
    """One step over the field of a class. `learn`: samples meet themselves, and what an activation reads is kept."""
    dy, dx, zero = spec[RY] * d_y, spec[RX] * d_x, numbers[0]
    height, wide = spec[HEIGHT] - abs(dy), spec[WIDTH] - abs(dx)
    h, w = spec[FROM_H] - abs(dy * spec[SY]), spec[FROM_W] - abs(dx * spec[SX])
    n, first, second, out, code = wide * LANES, spec[FIRST], spec[SECOND], spec[OUT], spec[CODE]
    padded_c, padded_k, row_c, row_k, act = rows[0], rows[1], rows[2], rows[3], own[ACT:]
    mid_c, mid_k = padded_c[HALO * LANES :], padded_k[HALO * LANES :]
    for y in range(height):
        if second >= 0:
            for i in range(n):
                row_c[i] = c[first, y, i] + c[second, y, i]
            if tangent:
                for i in range(n):
                    row_k[i] = k[first, y, i] + k[second, y, i]
        else:
            _down(c, first, y, h, w, spec, zero, mid_c)
            if tangent:
                _down(k, first, y, h, w, spec, zero, mid_k)
        if second < 0 and spec[KX] == 3 and spec[SX] == 1:
            _across_affine(padded_c, padded_k, n, own, row_c, row_k, tangent)
        else:
            if second < 0:
                _across(padded_c, wide, spec, row_c)
                if tangent:
                    _across(padded_k, wide, spec, row_k)
            _affine(row_c, row_k, n, own, tangent)
        place = spec[OWN] + (y + max(0, -dy)) * spec[WIDTH] + max(0, -dx)
        p, q = np.uint64(place * LANES), np.uint64((place + dy * spec[WIDTH] + dx) * LANES)
        if learn and spec[OWN] >= 0:
            for i in range(np.uint64(n)):
                left[p + i] = row_c[i]
                right[q + i] = row_c[i]
        if code == 0:
            for i in range(n):
                c[out, y, i] = row_c[i]
            if tangent:
                for i in range(n):
                    k[out, y, i] = row_k[i]
        elif code == ARC:
            _arc(row_c, row_k, left, right, p, q, c, k, out, y, n, act, numbers, poly, tangent)
        elif code == ERF:
            _erf(row_c, row_k, left, right, p, q, c, k, out, y, n, act, numbers, poly, tangent)
        elif code == GELU:
            _gelu(row_c, row_k, left, right, p, q, c, k, out, y, n, act, numbers, poly, tangent)


@_inner()
def _products(x1, x2, d_y, d_x, info, channels, c, k, tangent, numbers):
    """The inputs' mean product over channels, one after the other; nothing is trained yet."""
    height, wide, pixels = info[ENTRY_H], info[ENTRY_W], info[ENTRY_H] * info[ENTRY_W]
    zero, n = numbers[0], (wide - abs(d_x)) * LANES
    for y in range(height - abs(d_y)):
        place = (y + max(0, -d_y)) * wide + max(0, -d_x)
        other = place + d_y * wide + d_x
        for channel in range(channels):
            u, v = x1[(channel * pixels + place) * LANES :], x2[(channel * pixels + other) * LANES :]
            if channel == 0:
                for i in range(n):
                    c[0, y, i] = u[i] * v[i]
            else:
                for i in range(n):
                    c[0, y, i] += u[i] * v[i]
        for i in range(n):
            c[0, y, i] /= numbers[7]
        if tangent:
            for i in range(n):
                k[0, y, i] = zero


@_inner()
def _load(store, pitch, top, first, height, n, scale, v):
    """The field of a class out of what a pooling left."""
    for y in range(height):
        row = store[((top + y) * pitch + first) * LANES :]
        for i in range(n):
            v[0, y, i] = row[i] * scale


@_inner()
def _pool(v, b, height, wide, rows, columns, store, pitch):
    """Add the field of a class to the windows of a pooling."""
    for y in range(height):
        if rows[y] < 0:
            continue
        for x in range(wide):
            if columns[x] < 0:
                continue
            into = store[(rows[y] * pitch + columns[x]) * LANES :]
            for lane in range(LANES):
                into[lane] += v[b, y, x * LANES + lane]


@_inner()
def _total(v, b, height, wide, row, out):
    """Add the sum over the field of a class, lane by lane: over rows, then in float64 over columns."""
    n = wide * LANES
    for i in range(n):
        row[i] = v[b, 0, i]
    for y in range(1, height):
        for i in range(n):
            row[i] += v[b, y, i]
    for x in range(wide):
        for lane in range(LANES):
            out[lane] += row[x * LANES + lane]


@_inner()
def _pack(source, index, into):
    """The rows of LANES samples side by side."""
    first = index[0]
    same = True
    for lane in range(LANES):
        same = same and index[lane] == first
    if same:
        for i in range(source.shape[1]):
            value = source[first, i]
            for lane in range(LANES):
                into[i * LANES + lane] = value
    else:
        for i in range(source.shape[1]):
            for lane in range(LANES):
                into[i * LANES + lane] = source[index[lane], i]


@_inner()
def _stage(g, span, tables, room, lanes, numbers, poly, tangent, learn, out_c, out_k, out_x):
    """The classes of one stage for LANES pairs; `span`: which, by rows and columns, each from and to."""
    table, constants, stages, lists, scales = tables
    c, k, rows, store_c, store_k = room
    x1, x2, left, right = lanes
    info = stages[g]
    offsets, pitch = lists[info[AT] :], stages[g - 1][POOL_X]
    ny, nx = info[CLASSES_Y], info[CLASSES_X]
    dys, dxs = offsets[:ny], offsets[ny : ny + nx]
    tops, firsts = offsets[ny + nx :], offsets[2 * ny + nx :]
    pool_rows = offsets[2 * (ny + nx) :]
    pool_columns = pool_rows[ny * info[GRID_H] :]
    for a in range(span[0], span[1]):
        for b in range(span[2], span[3]):
            dy, dx = dys[a], dxs[b]
            in_y, in_x = dy * info[STRIDE_Y], dx * info[STRIDE_X]
            if g == 0:
                channels = len(x1) // (info[ENTRY_H] * info[ENTRY_W] * LANES)
                _products(x1, x2, in_y, in_x, info, channels, c, k, tangent, numbers)
                if in_y == 0 and in_x == 0 and not learn:
                    _total(c, 0, info[ENTRY_H], info[ENTRY_W], rows[2], out_x)
            else:
                height, n = info[ENTRY_H] - abs(in_y), (info[ENTRY_W] - abs(in_x)) * LANES
                scale = scales[g - 1]
                _load(store_c[stages[g - 1][STORE] * LANES :], pitch, tops[a], firsts[b], height, n, scale, c)
                if tangent:
                    _load(store_k[stages[g - 1][STORE] * LANES :], pitch, tops[a], firsts[b], height, n, scale, k)
            for step in range(info[STEPS], info[STOP]):
                _step(table[step], constants[step], dy, dx, c, k, left, right, rows, numbers, poly, tangent, learn)
            height, wide, last = info[GRID_H] - abs(dy), info[GRID_W] - abs(dx), info[LAST]
            if learn:
                continue
            if info[POOL_Y] > 0:
                by_row, by_column = pool_rows[a * info[GRID_H] :], pool_columns[b * info[GRID_W] :]
                _pool(c, last, height, wide, by_row, by_column, store_c[info[STORE] * LANES :], info[POOL_X])
                if tangent:
                    _pool(k, last, height, wide, by_row, by_column, store_k[info[STORE] * LANES :], info[POOL_X])
            else:
                _total(c, last, height, wide, rows[2], out_c[a])
                if tangent:
                    _total(k, last, height, wide, rows[2], out_k[a])


@_outer
def run_blocks(span, tables, room, lanes, sides, pairs, numbers, poly, tangent, learn, out_c, out_k, out_x):
    """Blocks of LANES pairs through the program; `span`: blocks, and rows of the last stage's classes, from and to.

    `sides`: inputs and variances of both sides, a sample a row. `pairs`: which samples meet. The sums over each row of
    classes go to `out_c` and `out_k` [blocks, rows, LANES], those of the inputs' products to `out_x`.
    `learn`: both sides are one, each sample meets itself, and the variances that activations read are found and written
    to the left side.
    """
    begin, end, lo, hi = span
    first, second = pairs
    inputs1, inputs2, own1, own2 = sides
    x1, x2, left, right = lanes
    stages, last = tables[2], len(tables[2]) - 1
    for block in range(begin, end):
        i, j = first[block], second[block]
        if block == begin or (i != first[block - 1]).any():
            _pack(inputs1, i, x1)
            _pack(own1, i, left)
        if block == begin or (j != second[block - 1]).any():
            _pack(inputs2, j, x2)
            _pack(own2, j, right)
        room[3][:] = numbers[0]
        room[4][:] = numbers[0]
        # Where variances are learnt, equal positions go first: all others read them. Each stage twice, in one loop: two
        # calls would be two copies of all code.
        for turn in range(2 * last + 2):
            g, alone = turn // 2, learn and turn % 2 == 0
            y, x = stages[g][CLASSES_Y] // 2, stages[g][CLASSES_X] // 2
            if alone:
                part = (y, y + 1, x, x + 1)
            elif turn % 2 == 1 and not (learn and g == last):
                part = (lo if g == last else 0, hi if g == last else stages[g][CLASSES_Y], 0, stages[g][CLASSES_X])
            else:
                continue
            _stage(
                g, part, tables, room, lanes, numbers, poly, tangent, alone, out_c[block], out_k[block], out_x[block]
            )
        if learn:
            for lane in range(LANES):
                for n in range(own1.shape[1]):
                    own1[i[lane], n] = left[n * LANES + lane]
