"""The kernel around a stage's arithmetic: which lane has which columns, the loop over rows, what is read and written."""

from dataclasses import dataclass
from pathlib import Path

from .source import Layout, Value, Writer, body, num

HEADER = Path(__file__).with_name("device.cu").read_text(encoding="utf-8")


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

    @property
    def warps_per_pair(self) -> int:
        """How many warps hold the classes of one pair."""
        return -(-self.layout.classes // self.layout.groups)


def write(layout: Layout, warps: int = 16, shared: bool = True, blocks: int = 1) -> Kernel:
    """The kernel of a stage. `shared`: images and variances lie in shared memory (not if flat: each is read once)."""
    w = Writer(layout)
    value = body(w)
    sink = _sink(w, value)
    w.open(1, 0)
    per_pair = -(-layout.classes // layout.groups)
    shared = shared and not layout.flat
    if per_pair >= warps:
        while per_pair % warps:
            warps -= 1
    elif not layout.flat:
        warps = warps // per_pair * per_pair
    sizes = [layout.offsets(side)[1] for side in (0, 1)]
    held = max(1, warps // per_pair) if shared else 0
    bytes_ = held * sum(sizes) * (4 if layout.real == "float" else 8)
    while shared and bytes_ > 220_000 and held > 1:
        held -= 1
        warps, bytes_ = held * per_pair, held * sum(sizes) * (4 if layout.real == "float" else 8)
    if bytes_ > 220_000:
        return write(layout, warps, False, blocks)
    text = "\n".join(
        [
            f"typedef {layout.real} real, cell;",
            f"typedef {layout.real}2 real2;",
            HEADER,
            *_signature(layout, warps, blocks),
            *_places(layout, warps, per_pair, held, sizes),
            *_masks(w),
            *(f"real {name} = 0;" for name in w.state),
            *_loop(layout, w.lines, sink),
            *_ending(layout, value),
            "}",
        ]
    )
    return Kernel(text, layout, w.units, value.unit, value.ntk is not None, warps, bytes_)


def _signature(layout: Layout, warps: int, blocks: int) -> list[str]:
    return [
        f'extern "C" __global__ void __launch_bounds__({32 * warps}, {blocks}) stage(',
        "const cell* lefts, const cell* rights, const int* left_of, const int* right_of,",
        "const cell* in_covs, const cell* in_ntks, cell* out_covs, cell* out_ntks, double* sums, int pairs, int parts)",
        "{",
    ]


def _places(layout: Layout, warps: int, per_pair: int, held: int, sizes: list[int]) -> list[str]:
    """Where the lane stands: its pair, its class, its columns; its images in shared memory."""
    l = layout
    lines = [
        "const lane_int lane = lane_number();",
        "const int warp = warp_number();",
        f"const int all = blockIdx.x * {warps} + warp;",
        f"const lane_int group = least(lane / {l.lanes}, {l.groups - 1}), i = lane % {l.lanes}, x = {l.columns} * i;",
    ]
    if l.flat:
        lines += [f"const lane_int pair = least(group + all * {l.groups}, pairs - 1), kind = 0;"]
        lines += [f"const lane_bool live = group + all * {l.groups} < pairs && lane < {l.groups * l.lanes};"]
    else:
        lines += [f"const int pair = min(all / {per_pair}, pairs - 1);"]
        lines += [f"const lane_int kind = group + all % {per_pair} * {l.groups};"]
        lines += [f"const lane_bool live = kind < {l.classes} * (all / {per_pair} < pairs) && lane < {l.groups * l.lanes};"]
    lines += [f"const lane_int dx = kind % {l.classes} * {l.stride};"]
    if held:
        first = f"blockIdx.x * {held}" if warps >= per_pair else f"blockIdx.x / {per_pair // warps}"
        own = f"(warp / {per_pair})" if warps >= per_pair else "0"
        lines += [
            "extern __shared__ __align__(16) unsigned char space[];",
            "cell* const images = (cell*)space;",
            f"for (int h = 0; h < {held}; ++h) {{",
            f"const int which = min({first} + h, pairs - 1);",
            f"const cell* const a = lefts + (long long)left_of[which] * {sizes[0]};",
            f"const cell* const b = rights + (long long)right_of[which] * {sizes[1]};",
            f"copy(images + h * {sum(sizes)}, a, {sizes[0]}, {32 * warps});",
            f"copy(images + (h * {sum(sizes)} + {sizes[0]}), b, {sizes[1]}, {32 * warps});",
            "}",
            "__syncthreads();",
            f"const cell* const left = images + {own} * {sum(sizes)};",
            f"const cell* const right = left + {sizes[0]};",
        ]
    else:
        lines += [
            f"const lane_ptr left = place(lefts, take(left_of, pair), {sizes[0]});",
            f"const lane_ptr right = place(rights, take(right_of, pair), {sizes[1]});",
        ]
    return lines


def _masks(w: Writer) -> list[str]:
    """1 where two neighbouring columns lie in the same image on both sides."""
    width = w.layout.width
    lines = []
    for name, (level, low, high) in w.masks.items():
        a, b = f"x + {low * level}", f"x + {high * level}"
        # Both columns inside on the left, and as far apart on the right as on the left: no seam between.
        inside = f"{a} >= 0 && {b} < {width}"
        seam = f"({a} + dx) / {width} == ({b} + dx) / {width}"
        lines.append(f"const real {name} = one_if({inside} && {seam});")
    return lines


def _loop(layout: Layout, lines: list[str], sink: list[str]) -> list[str]:
    l = layout
    levels = sorted({step.level for step in l.stage.steps})
    text = [
        f"const int first = blockIdx.y * {l.cycles} / parts, last = (blockIdx.y + 1) * {l.cycles} / parts;",
        f"const int rows = (last - first) * {l.period[0]};",
        f"int sy = 0, ty = ({l.period[1]} - first * {l.stride} % {l.period[1]}) % {l.period[1]};",
        "unsigned long long hist = ~0ull;",
        "lane_double total_cov = 0, total_ntk = 0;",
        "real part_cov = 0, part_ntk = 0;",
    ]
    if not l.channels:
        base = f"(far(kind % {l.classes} + pair * {l.classes}) * {l.rows} + first * {l.period[0]}) * {l.width} + x"
        text += [f"const lane_long at = {base};"]
        names = [f"{stem}{q}" for stem in ("cov", "ntk") for q in range(l.columns)]
        if not l.tangent:
            names = names[: l.columns]
        for name in names:
            text += [f"real next_{name} = take(in_{name[:3]}s, at + {name[3:]});"]
    text += [f"for (int tau = 0; tau < rows + {l.delay}; ++tau) {{"]
    text += [f"hist = hist << 1 | (unsigned long long)(sy >= {l.height} || ty >= {l.height});"]
    for level in levels:
        text += [f"const lane_ptr left{level} = left + (x / {level} + sy / {level} * {l.width // level});"]
        for q in range(max(1, l.columns // level)):
            column = f"(x + {q * level} + dx) % {l.width} / {level}"
            text += [f"const lane_ptr right{level}_{q} = right + ({column} + ty / {level} * {l.width // level});"]
    if not l.channels:
        text += [f"const real in_{name} = next_{name};" for name in names]
        ahead = f"at + (long long)(tau + 1) * {l.width}"
        inside = f"first * {l.period[0]} + tau + 1 < {l.rows}"
        text += [f"if ({inside}) {{"]
        text += [f"next_{name} = take(in_{name[:3]}s, {ahead} + {name[3:]});" for name in names]
        text += ["} else {", *(f"next_{name} = 0;" for name in names), "}"]
    text += [*lines, *sink]
    if l.stage.ends != "rows":
        text += ["if ((tau & 31) == 31) {"]
        text += ["total_cov += part_cov; total_ntk += part_ntk; part_cov = 0; part_ntk = 0;", "}"]
    text += [f"if (++sy == {l.period[0]}) sy = 0;", f"if (++ty == {l.period[1]}) ty = 0;", "}"]
    return text


def _sink(w: Writer, v: Value) -> list[str]:
    """What becomes of the last value of a row: added up, or written."""
    l, sink = w.layout, w.layout.stage.sink
    start = len(w.lines)
    v = v if v.empty or l.stage.ends == "rows" else w.emptied(v, sink.delay)
    if l.stage.ends != "rows":
        w.add(f"part_cov += {' + '.join(v.cov)};")
        if v.ntk is not None:
            w.add(f"part_ntk += {' + '.join(v.ntk)};")
    else:
        width, rows, period = l.width // sink.level, l.rows // sink.level, l.period[0] // sink.level
        w.add(f"if (tau >= {sink.delay}) {{")
        w.add(f"const lane_bool mine = live && x % {sink.level} == 0;")
        w.add(f"const int row = (tau - {sink.delay}) / {sink.level};")
        w.add(f"const lane_long to = (far(kind + pair * {l.classes}) * {rows} + (first * {period} + row)) * {width}")
        w.add(f"+ x / {sink.level};")
        for q in range(len(v.cov)):
            w.add(f"put(out_covs, to + {q}, {num(v.unit)} * {v.cov[q]}, mine);")
            if v.ntk is not None:
                w.add(f"put(out_ntks, to + {q}, {num(v.unit)} * {v.ntk[q]}, mine);")
        w.add("}")
    w.open(1, 0)
    lines, w.lines = w.lines[start:], w.lines[:start]
    return lines


def _ending(layout: Layout, value: Value) -> list[str]:
    l, level = layout, layout.stage.sink.level
    if l.stage.ends == "rows":
        return []
    return [
        "total_cov += part_cov; total_ntk += part_ntk;",
        f"total_cov *= one_if(live && x % {level} == 0); total_ntk *= one_if(live && x % {level} == 0);",
        "lane_double all_cov = total_cov, all_ntk = total_ntk;",
        f"for (int k = 1; k < {l.lanes}; ++k) {{",
        "all_cov += down(total_cov, k); all_ntk += down(total_ntk, k);",
        "}",
        f"const lane_long to = (far(kind + pair * {l.classes}) * parts + blockIdx.y) * 2;",
        "put(sums, to, all_cov, live && i == 0); put(sums, to + 1, all_ntk, live && i == 0);",
    ]
