"""The CUDA source of a stage: the kernel around its arithmetic, and the pooling between stages.

What is read: images and variances of both sides, in shared memory where they fit; or the rows that the stage before
left in memory. What is written: sums over all rows of a class, or the last layer's rows.
"""

from dataclasses import dataclass
from pathlib import Path

from .arithmetic import Value, Writer, body, num
from .layout import WARP, Layout

HEADER = Path(__file__).with_name("device.cu").read_text(encoding="utf-8")
SHARED = (
    220_000  # bytes of shared memory for a block, on cards from compute capability 9 on; less is asked for elsewhere
)


@dataclass(frozen=True)
class Kernel:
    """Source text of one stage, and what its launch must know."""

    text: str
    layout: Layout
    units: dict[int, float]  # of what each activation reads, by its node
    unit: float  # of what is summed in the end
    tangent: bool  # whether a tangent kernel comes out
    warps: int  # of a block
    shared: int  # bytes of shared memory


def write_kernel(layout: Layout, shared: int = SHARED) -> Kernel:
    """The kernel of a stage, with at most so many bytes of shared memory."""
    w = Writer(layout)
    value = body(w)
    sink = _sink(w, value)
    size = 4 if layout.real == "float" else 8
    # Rows that layers wait for lie in registers, of which a lane has 128 or, with half as many lanes, 255 (measured).
    few = len(w.state) * size // 4 > 92
    warps = (4 if few else 8) if layout.flat else (8 if few else 16)
    per_pair, numbers = layout.warps_per_pair, layout.places[0][-1] + layout.places[1][-1]
    if per_pair >= warps:
        warps = max(w for w in range(1, warps + 1) if per_pair % w == 0)
    elif not layout.flat:
        # Several pairs in a block, as far as their images fit
        warps = min(warps // per_pair, max(1, shared // max(1, size * numbers))) * per_pair
    held = 0 if layout.flat else max(1, warps // per_pair)
    held = 0 if held * numbers * size > shared else held
    text = "\n".join(
        [
            f"typedef {layout.real} real, cell;",
            f"typedef {layout.real}2 real2;",
            HEADER,
            f'extern "C" __global__ void __launch_bounds__({WARP * warps}) stage(',
            "const cell* lefts, const cell* rights, const int* left_of, const int* right_of,",
            "const cell* in_covs, const cell* in_ntks, cell* out_covs, cell* out_ntks, double* sums,",
            "int pairs, int parts) {",
            *_lane(layout, warps),
            *_images(layout, warps, held),
            *_masks(w),
            *(f"real {name} = 0;" for name in w.state),
            *_loop(layout, w.lines, sink),
            *_sums(layout),
            "}",
        ]
    )
    return Kernel(text, layout, w.units, value.unit, value.ntk is not None, warps, held * numbers * size)


def _lane(layout: Layout, warps: int) -> list[str]:
    """Where the lane stands: its pair of images, its class, its columns."""
    groups, lanes, per_pair = layout.groups, layout.lanes, layout.warps_per_pair
    lines = [
        "const lane_int lane = lane_number();",
        f"const int all = blockIdx.x * {warps} + warp_number();",
        f"const lane_int group = least(lane / {lanes}, {groups - 1}), i = lane % {lanes}, x = i * {layout.columns};",
    ]
    if layout.flat:
        lines += [
            f"const lane_int pair = least(group + all * {groups}, pairs - 1), kind = 0;",
            f"const lane_bool live = group + all * {groups} < pairs && lane < {groups * lanes};",
        ]
    else:
        lines += [
            f"const int pair = min(all / {per_pair}, pairs - 1);",
            f"const lane_int kind = group + all % {per_pair} * {groups};",
            f"const int classes = all / {per_pair} < pairs ? {layout.classes} : 0;",
            f"const lane_bool live = kind < classes && lane < {groups * lanes};",
        ]
    return [*lines, f"const lane_int dx = kind % {layout.classes} * {layout.stride};"]


def _images(layout: Layout, warps: int, held: int) -> list[str]:
    """Both sides' images and variances: pointers, into shared memory for `held` pairs of a block."""
    left, right = (places[-1] for places in layout.places)
    if not held:
        return [
            f"const lane_ptr left = place(lefts, take(left_of, pair), {left});",
            f"const lane_ptr right = place(rights, take(right_of, pair), {right});",
        ]
    per_pair = layout.warps_per_pair
    first = f"blockIdx.x * {held}" if warps >= per_pair else f"blockIdx.x / {per_pair // warps}"
    own = f"warp_number() / {per_pair}" if warps >= per_pair else "0"
    both = left + right
    return [
        "extern __shared__ __align__(16) unsigned char space[];",
        "cell* const images = (cell*)space;",
        f"for (int h = 0; h < {held}; ++h) {{",
        f"const int which = min((int)({first}) + h, pairs - 1);",
        f"copy(images + h * {both}, lefts + (long long)left_of[which] * {left}, {left}, {WARP * warps});",
        f"cell* const beside = images + (h * {both} + {left});",
        f"copy(beside, rights + (long long)right_of[which] * {right}, {right}, {WARP * warps});",
        "}",
        "__syncthreads();",
        f"const cell* const left = images + {own} * {both};",
        f"const cell* const right = left + {left};",
    ]


def _masks(w: Writer) -> list[str]:
    """1 where two neighbouring columns lie in the same image on both sides."""
    width = w.layout.width
    lines = []
    for name, (level, low, high) in w.masks.items():
        a, b = f"x + {low * level}", f"x + {high * level}"
        # Both inside on the left, and no seam between them on the right.
        inside = f"{a} >= 0 && {b} < {width}"
        seam = f"({a} + dx) / {width} == ({b} + dx) / {width}"
        lines.append(f"const real {name} = one_if({inside} && {seam});")
    return lines


def _loop(layout: Layout, lines: list[str], sink: list[str]) -> list[str]:
    """The run over rows; each step takes one row into the first layer, and an older one out of each later layer."""
    left, right = layout.periods
    reads = _reads(layout)
    text = [
        f"const int first = blockIdx.y * {layout.cycles} / parts, last = (blockIdx.y + 1) * {layout.cycles} / parts;",
        f"const int rows = (last - first) * {left};",
        f"int sy = 0, ty = ({right} - first * {layout.stride} % {right}) % {right};",
        "unsigned long long hist = ~0ull;",  # bit k: the row of k steps ago is empty, as all are before the first
        "lane_double total_cov = 0, total_ntk = 0;",
        "real part_cov = 0, part_ntk = 0;",
        *reads[0],
        f"for (int tau = 0; tau < rows + {layout.delay}; ++tau) {{",
        f"hist = hist << 1 | (unsigned long long)(sy >= {layout.height} || ty >= {layout.height});",
    ]
    for level in sorted({step.level for step in layout.stage.steps}):
        width = layout.width // level
        text += [f"const lane_ptr left{level} = left + (x / {level} + sy / {level} * {width});"]
        for q in range(max(1, layout.columns // level)):
            column = f"(x + {q * level} + dx) % {layout.width} / {level}"
            text += [f"const lane_ptr right{level}_{q} = right + ({column} + ty / {level} * {width});"]
    text += [*reads[1], *lines, *sink]
    if layout.stage.ends != "rows":
        # Few rows in a row's own precision, then in double.
        text += ["if ((tau & 31) == 31) {"]
        text += ["total_cov += part_cov; total_ntk += part_ntk; part_cov = 0; part_ntk = 0;", "}"]
    return [*text, f"if (++sy == {left}) sy = 0;", f"if (++ty == {right}) ty = 0;", "}"]


def _reads(layout: Layout) -> tuple[list[str], list[str]]:
    """Rows from memory, each asked for a step before it is used: what stands before the loop, and in it."""
    if layout.channels:
        return [], []
    turn, width = layout.periods[0], layout.width
    streams = ("cov", "ntk") if layout.carried else ("cov",)
    names = [(stem, q) for stem in streams for q in range(layout.columns)]
    place = f"(far(kind % {layout.classes} + pair * {layout.classes}) * {layout.rows} + first * {turn}) * {width} + x"
    before = [f"const lane_long at = {place};"]
    before += [f"real next_{stem}{q} = take(in_{stem}s, at + {q});" for stem, q in names]
    inside = [f"const real in_{stem}{q} = next_{stem}{q};" for stem, q in names]
    inside += [f"if (first * {turn} + tau + 1 < {layout.rows}) {{"]
    inside += [f"next_{stem}{q} = take(in_{stem}s, at + ((long long)(tau + 1) * {width} + {q}));" for stem, q in names]
    return before, [*inside, "} else {", *(f"next_{stem}{q} = 0;" for stem, q in names), "}"]


def _sink(w: Writer, v: Value) -> list[str]:
    """What becomes of the last value of a row: added up, or written."""
    layout, sink, start = w.layout, w.layout.stage.sink, len(w.lines)
    if layout.stage.ends != "rows":
        v = v if v.empty else w.emptied(v, sink.delay)
        w.add(f"part_cov += {' + '.join(v.cov)};")
        if v.ntk is not None:
            w.add(f"part_ntk += {' + '.join(v.ntk)};")
    else:
        level = sink.level
        width, rows, turn = (n // level for n in (layout.width, layout.rows, layout.periods[0]))
        w.add(f"if (tau >= {sink.delay}) {{")
        w.add(f"const lane_bool mine = live && x % {level} == 0;")
        w.add(f"const int row = first * {turn} + (tau - {sink.delay}) / {level};")
        w.add(f"const lane_long to = (far(kind + pair * {layout.classes}) * {rows} + row) * {width} + x / {level};")
        for stem, regs in (("cov", v.cov), ("ntk", v.ntk)):
            for q, r in enumerate(regs or ()):
                w.add(f"put(out_{stem}s, to + {q}, {num(v.unit)} * {r}, mine);")
        w.add("}")
    w.open(1, 0)
    lines, w.lines = w.lines[start:], w.lines[:start]
    return lines


def _sums(layout: Layout) -> list[str]:
    """The lanes' sums put together, one for each class."""
    if layout.stage.ends == "rows":
        return []
    mine = f"one_if(live && x % {layout.stage.sink.level} == 0)"
    return [
        "total_cov += part_cov; total_ntk += part_ntk;",
        f"total_cov *= {mine}; total_ntk *= {mine};",
        "lane_double all_cov = total_cov, all_ntk = total_ntk;",
        f"for (int k = 1; k < {layout.lanes}; ++k) {{",
        "all_cov += down(total_cov, k); all_ntk += down(total_ntk, k);",
        "}",
        f"const lane_long to = (far(kind + pair * {layout.classes}) * parts + (int)blockIdx.y) * 2;",
        "put(sums, to, all_cov, live && i == 0); put(sums, to + 1, all_ntk, live && i == 0);",
    ]


def write_pool(before: Layout, after: Layout) -> str:
    """The kernel between two stages: sums (or means) over windows of both sides, put as the next stage reads them."""
    level, pool = before.stage.sink.level, before.stage.pool
    assert pool is not None
    (ky, kx), width = pool.size, before.width // level
    cycles, turn, rows = before.cycles, before.periods[0] // level, before.rows // level
    return f"""typedef {before.real} cell;
extern "C" __global__ void pool(const cell* from, cell* to, int count)
{{
    const long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    const int x = k % {after.width}, row = k / {after.width} % {after.rows};
    const int kind = k / {after.width * after.rows} % {after.classes};
    const long long pair = k / {after.width * after.rows * after.classes};
    const int sy = row % {after.periods[0]}, turn = row / {after.periods[0]};
    const int ty = (sy + {after.periods[1]} - turn * {after.stride} % {after.periods[1]}) % {after.periods[1]};
    const int tx = (x + kind * {after.stride}) % {after.width};
    cell sum = 0;
    if (sy < {after.height} && ty < {after.height})
        for (int a = 0; a < {ky}; ++a)
            for (int b = 0; b < {ky}; ++b) {{
                const int s = sy * {ky} + a, t = ty * {ky} + b, r = (s - t + {cycles}) % {cycles} * {turn} + s;
                for (int c = 0; c < {kx}; ++c)
                    for (int d = 0; d < {kx}; ++d) {{
                        const int left = x * {kx} + c, right = tx * {kx} + d;
                        const int old = (right - left + {width}) % {width};
                        sum += from[((pair * {before.classes} + old) * {rows} + r) * {width} + left];
                    }}
            }}
    to[k] = sum * (cell){1 / (ky * kx) ** 2 if pool.mean else 1.0!r};
}}
"""
