"""A stage's arithmetic for one row, as CUDA text: each layer's windows, weights, sums and activations.

All layers see the same rows, later by their delay. Each keeps its variances rolled by that delay, so that one pointer
serves all; factors go into units, so that weights cost nothing.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import pi

from ...activations.dual import Rectifier
from ...activations.duals import Erf
from ..core import Activation, RandomAffine
from ..ops import Add, Rescale
from ..positions import Window
from .layout import Layout, is_linear
from .stages import Stage, Step

# acos(1 − u)/√u on [0, 1] by interpolation at Chebyshev's points (relative error 1.3e-7 and 2e-17).
ACOS = {
    "float": (
        1.41421367606600853, 0.117840037153463432, 0.0266900076926900473, 0.00689672924591626327,
        0.00531428554875510473, -0.00236626583225355407, 0.00220765599555322155,
    ),
    "double": (
        1.41421356237309505, 0.117851130197757553, 0.0265165042945492709, 0.00789181675119833591,
        0.00268540996323981774, 0.000988717302087337019, 0.000383467776274873984, 0.000154096299936105578,
        0.0000650649425662176058, 0.0000209418835961835932, 0.0000337933851656776134, -0.0000584061912430536251,
        0.000143686983074757716, -0.000245453411114908581, 0.000334763276681735141, -0.00034946035315777286,
        0.000276875162184647977, -0.000160596487236748713, 0.0000646865746879669348, -0.000016206084657903017,
        1.93215621147499314e-6,
    ),
}  # fmt: skip
Names = tuple[str, ...]
TINY = "1e-30"  # beside variances, so that none is divided by
# Beside 1 − z², below its rounding: between a strided layer's positions z is anything, and 0 times infinity is not 0.
REST = {"float": 1e-9, "double": 1e-25}


@dataclass(frozen=True)
class Value:
    """Registers that hold a node's moments of this lane's columns; the true ones are `unit` times as much."""

    cov: tuple[str, ...]
    ntk: tuple[str, ...] | None
    unit: float = 1.0
    positive: bool = False  # cov is never negative
    empty: bool = False  # zero in empty rows
    merged: float | None = None  # so many times cov was added to ntk already


@dataclass
class Writer:
    """The text of a kernel as it grows."""

    layout: Layout
    lines: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)  # registers that outlive a step
    masks: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # by name: level, first and last column
    values: dict[int, Value] = field(default_factory=dict)
    units: dict[int, float] = field(default_factory=dict)  # of what activations read, by node
    count: int = 0
    opened: tuple[int, int] = (1, 0)  # the level and phase of the rows at which the text is run

    def name(self, stem: str) -> str:
        """A name of its own."""
        self.count += 1
        return f"{stem}{self.count}"

    def keep(self, stem: str) -> str:
        """A register that outlives a step, 0 at first."""
        name = self.name(stem)
        self.state.append(name)
        return name

    def add(self, line: str) -> None:
        """One line."""
        self.lines.append(line)

    def let(self, stem: str, text: str) -> str:
        """A new value."""
        if self.opened[0] > 1:  # other rows may read it
            name = self.keep(stem)
            self.add(f"{name} = {text};")
            return name
        name = self.name(stem)
        self.add(f"const real {name} = {text};")
        return name

    def let_zero(self, stem: str) -> str:
        """A value that is 0 unless it is set."""
        name = self.keep(stem) if self.opened[0] > 1 else self.name(stem)
        self.add(f"{name} = 0;" if self.opened[0] > 1 else f"real {name} = 0;")
        return name

    def open(self, level: int, delay: int) -> None:
        """What follows is run at every level-th row only, from this delay on."""
        new = (level, delay % level)
        if new == self.opened:
            return
        if self.opened[0] > 1:
            self.add("}")
        if level > 1:
            self.add(f"if (((tau - {delay % level}) & {level - 1}) == 0) {{")
        self.opened = new

    def positions(self, level: int) -> int:
        """Columns of a lane at this level."""
        return max(1, self.layout.columns // level)

    # Windows

    def mask(self, level: int, q: int, offset: int) -> str:
        """1 where the column beside column q of this lane belongs to the same image on both sides, else 0."""
        low, high = min(q, q + offset), max(q, q + offset)
        name = f"mask{level}_{low}_{high}".replace("-", "m")
        self.masks[name] = (level, low, high)
        return name

    def neighbour(self, regs: tuple[str, ...], level: int, k: int, seen: dict[int, str]) -> str:
        """The register of column k of this lane, which may be another lane's."""
        count = len(regs)
        if 0 <= k < count:
            return regs[k]
        if k not in seen:
            hop = (k // count) * max(1, level // self.layout.columns)
            seen[k] = self.let("n", f"{'down' if hop > 0 else 'up'}({regs[k % count]}, {abs(hop)})")
        return seen[k]

    def across(self, regs: tuple[str, ...], level: int, size: int, stride: int) -> list[str]:
        """Sums over windows along a row, at every `stride`-th column."""
        reach, seen, sums = size // 2, dict[int, str](), []
        for q in range(0, len(regs), min(stride, len(regs))):
            total = regs[q]
            for offset in [o for o in range(-reach, reach + 1) if o]:
                beside = self.neighbour(regs, level, q + offset, seen)
                total = self.let("h", f"fused({self.mask(level, q, offset)}, {beside}, {total})")
            sums.append(total)
        return sums

    def window(self, step: Step, op: Window, v: Value, level: int, delay: int) -> None:
        """The sums over windows, both streams."""
        if not v.empty:
            v = self.emptied(v, delay)
        outs: list[tuple[str, ...]] = []
        size, stride = op.size, op.stride[0]
        for regs in (v.cov, v.ntk) if v.ntk is not None else (v.cov,):
            assert regs is not None
            rows = self.across(regs, level, size[1], stride)
            held = [[self.keep("w") for _ in range(size[0] - 1)] for _ in rows]
            out = []
            for h, acc in zip(rows, held, strict=True):
                out.append(self.let("s", f"{acc[0]} + {h}") if acc else h)
                for a, b in pairwise(acc):
                    self.add(f"{a} = {b} + {h};")
                if acc:
                    self.add(f"{acc[-1]} = {h};")
            outs.append(tuple(out))
        self.values[step.node] = replace(v, cov=outs[0], ntk=outs[1] if v.ntk is not None else None, empty=False)

    def emptied(self, v: Value, delay: int) -> Value:
        """The value, zero in empty rows."""
        cov, ntk = (
            None if regs is None else tuple(self.let("e", f"hist >> {delay} & 1 ? (real)0 : {r}") for r in regs)
            for regs in (v.cov, v.ntk)
        )
        assert cov is not None
        return replace(v, cov=cov, ntk=ntk, empty=True)

    # Weights, sums

    def affine(self, step: Step, op: RandomAffine, v: Value) -> None:
        """Weights and biases: units take the factors, so that only biases cost."""
        unit = v.unit * op.w_var
        rate = op.w_rate / op.w_var
        cov = v.cov if not op.b_var else tuple(self.let("b", f"{c} + {num(op.b_var / unit)}") for c in v.cov)
        ntk: tuple[str, ...] | None = None
        if self.layout.tangent:
            if v.ntk is not None and v.merged == rate:
                ntk = v.ntk
            elif v.ntk is not None:
                assert v.merged is None
                ntk = tuple(self.let("t", f"fused({num(rate)}, {c}, {t})") for c, t in zip(v.cov, v.ntk, strict=True))
            elif rate:
                ntk = tuple(c if rate == 1 else self.let("t", f"{num(rate)} * {c}") for c in v.cov)
            if op.b_rate:
                zero = ntk or ("(real)0",) * len(v.cov)
                ntk = tuple(self.let("t", f"{t} + {num(op.b_rate / unit)}") for t in zero)
        empty = v.empty and not op.b_var and not op.b_rate
        self.values[step.node] = Value(cov, ntk, unit, v.positive, empty)

    def sum(self, step: Step, branches: list[tuple[Value, int]]) -> None:
        """The sum of branches; one that is earlier waits."""
        unit, waited = branches[0][0].unit, []
        for v, delay in branches:
            self.open(step.level, delay)
            waited.append(self.wait(v, (step.delay - delay) // step.level))
        self.open(step.level, step.delay)
        covs = [self.scaled(v.cov, v.unit / unit) for v in waited]
        ntks = [self.scaled(v.ntk, v.unit / unit) for v in waited if v.ntk is not None]
        self.values[step.node] = Value(
            self.added(covs),
            self.added(ntks) if ntks else None,
            unit,
            all(v.positive for v in waited),
            all(v.empty for v in waited),
        )

    def scaled(self, regs: tuple[str, ...], factor: float) -> tuple[str, ...]:
        """Times a number."""
        return regs if factor == 1 else tuple(self.let("m", f"{num(factor)} * {r}") for r in regs)

    def added(self, terms: list[tuple[str, ...]]) -> tuple[str, ...]:
        """Sums, column by column."""
        return terms[0] if len(terms) == 1 else tuple(self.let("a", " + ".join(c)) for c in zip(*terms, strict=True))

    def wait(self, v: Value, rows: int) -> Value:
        """The value of so many rows ago."""
        if not rows:
            return v

        def late(reg: str) -> str:
            """One register's line of waiting ones."""
            line, old = [self.keep("q") for _ in range(rows)], self.keep("o")
            self.add(f"{old} = {line[0]};")
            for a, b in zip(line, [*line[1:], reg], strict=True):
                self.add(f"{a} = {b};")
            return old

        return replace(v, cov=tuple(map(late, v.cov)), ntk=None if v.ntk is None else tuple(map(late, v.ntk)))

    # Activations

    def activation(self, step: Step, op: Activation, v: Value, merge: float | None) -> None:
        """φ of both streams, and 0 in empty rows, which are skipped."""
        slope = v.ntk is not None
        if merge is not None and not self.layout.tangent:
            merge = None
        cov = tuple(self.let_zero("v") for _ in v.cov)
        ntk = tuple(self.let_zero("k") for _ in v.cov) if slope else None
        self.add(f"if (!(hist >> {step.delay} & 1)) {{")
        unit = self.dual(step, op, v, cov, ntk, merge)
        self.add("}")
        positive = (v.positive and is_linear(op)) or _never_negative(op)
        self.values[step.node] = Value(cov, ntk, unit, positive, True, merge if slope else None)

    def loads(self, step: Step) -> list[tuple[str, str]]:
        """The numbers of both sides' variances, column by column."""
        layout, level = self.layout, step.level
        index = layout.channels + layout.norms.index(step)
        left, right = (places[index] for places in layout.places)
        return self.columns_at(level, left, right)

    def columns_at(self, level: int, left: int, right: int) -> list[tuple[str, str]]:
        """What stands at these places of both images' arrays, for each column of the lane."""
        count = self.positions(level)
        if count == 2:
            pair = self.name("p")
            self.add(f"const real2 {pair} = two_at(left1, {left});")
            return [(f"{pair}.x", f"right1_0[{right}]"), (f"{pair}.y", f"right1_1[{right}]")]
        return [(f"left{level}[{left}]", f"right{level}_0[{right}]")]

    def dual(self, step: Step, op: Activation, v: Value, cov: Names, ntk: Names | None, merge: float | None) -> float:
        """The activation's formulas for each column; the unit of what comes out."""
        kind = op.dual
        if is_linear(op):
            factor = kind.constants[0] if isinstance(kind, Rectifier) else 1.0
            for q, c in enumerate(cov):
                self.add(f"{c} = {v.cov[q]};")
            for q, t in enumerate(ntk or ()):
                assert v.ntk is not None
                self.add(f"{t} = {self.joined(v.ntk[q], v.cov[q], merge)};")
            return v.unit * factor
        unit = v.unit
        for q, ((p, r), c) in enumerate(zip(self.loads(step), cov, strict=True)):
            if isinstance(kind, Rectifier):
                unit = self.rectifier(kind, v, q, p, r, c)
            elif isinstance(kind, Erf):
                unit = self.erf(kind, v, q, p, r, c)
            else:
                unit = self.gelu(v, q, p, r, c)
            if ntk is not None and v.ntk is not None:
                t = v.ntk[q] if isinstance(kind, Rectifier) else f"({num(v.unit)} * {v.ntk[q]})"
                term = f"{t} * slope" if merge is None else f"fused({t}, slope, {_times(merge, c)})"
                self.add(f"{ntk[q]} = {term};")
            self.add("}")
        return unit

    def joined(self, t: str, c: str, merge: float | None) -> str:
        """t, and as much of c as is merged into it."""
        return t if merge is None else f"fused({num(merge)}, {c}, {t})"

    def series(self, u: str) -> str:
        """acos(1 − u)/√u, a polynomial."""
        first, *rest = reversed(ACOS[self.layout.real])
        text = num(first)
        for c in rest:
            text = f"fused({text}, {u}, {num(c)})"
        return f"({text})"

    def acos(self) -> str:
        """acos of 1 − u."""
        return f"root(u) * {self.series('u')}"

    def arc_sine(self) -> None:
        """`arc` = asin z: z P(2z²)/√2 for small z, whose digits count (acos(1 − 2z²) = 2 asin z); else π/2 − acos z.

        And `rest` = 1 − z², `turn` = 1/√rest.
        """
        self.add("const real size = size_of(z), twice = (real)2 * z * z;")
        self.add("const real near = below(size, 0.7, twice, sat((real)1 - size));")
        self.add(f"const real by = {self.series('near')};")
        self.add(f"const real small = {num(0.5**0.5)} * size * by, large = {num(pi / 2)} - root(near) * by;")
        self.add("const real arc = sign_of(below(size, 0.7, small, large), z);")
        rest = f"sat(fused(-z, z, (real)1)) + {num(REST[self.layout.real])}"
        self.add(f"const real rest = {rest}, turn = over_root(rest);")

    def rectifier(self, kind: Rectifier, v: Value, q: int, p: str, r: str, out: str) -> float:
        """f·(√(pq) sin θ + (a/f − θ)c), slope f·(a/f − θ): the factor f goes to the unit."""
        a, f = kind.constants
        self.add("{")
        self.add(f"const real scale = fused({p}, {r}, (real){TINY}), rho = {v.cov[q]} * over(scale);")
        if v.positive:
            self.add("const real u = apart((real)1 - rho);")
            self.add(f"const real slope = {num(a / f)} - {self.acos()};")
        else:
            self.add("const real u = apart((real)1 - size_of(rho));")
            self.add(f"const real slope = {num(a / f - pi / 2)} + sign_of({num(pi / 2)} - {self.acos()}, rho);")
        self.add(f"{out} = scale * fused(slope, rho, root(fused(-u, u, u + u)));")
        return v.unit * f

    def erf(self, kind: Erf, v: Value, q: int, p: str, r: str, out: str) -> float:
        """(2a²/π)·asin(z) + c², z = 2b²c/√((1 + 2b²p)(1 + 2b²q)); the stored numbers are 1/√(1 + 2b²p)."""
        a, b, level = kind.a, kind.b, kind.c
        self.add("{")
        self.add(f"const real both = {p} * {r}, z = {num(2 * b**2 * v.unit)} * {v.cov[q]} * both;")
        self.arc_sine()
        self.add(f"{out} = fused({num(2 * a**2 / pi)}, arc, {num(level**2)});")
        self.add(f"const real slope = {num(4 / pi * (a * b) ** 2)} * both * turn;")
        return 1.0

    def gelu(self, v: Value, q: int, p: str, r: str, out: str) -> float:
        """Tsuchida et al. 2020's closed form, as in `activations/duals.py`; the stored numbers are 1/√(1 + p)."""
        self.add("{")
        self.add(f"const real c = {num(v.unit)} * {v.cov[q]}, pp = {p}, rr = {r}, both = pp * rr, z = c * both;")
        self.arc_sine()
        self.add(f"const real quarter = fused({num(0.5 / pi)}, arc, (real)0.25);")
        self.add(f"const real one = pp * pp, two = rr * rr, tilt = {num(0.5 / pi)} * c * turn * both;")
        self.add("const real d = rest * turn * over(both);")
        self.add(f"{out} = fused(quarter, c, fused(tilt * c * one, two, {num(0.5 / pi)} * d * (1 - one) * (1 - two)));")
        self.add("const real slope = fused(fused(both * turn, both * turn, one + two), tilt, quarter);")
        return 1.0


def _never_negative(op: Activation) -> bool:
    """Whether φ is never negative, so that E[φφ] is not either."""
    if not isinstance(op.dual, Rectifier):
        return False
    negative, positive = op.dual.sides
    return negative <= 0 <= positive


def _times(factor: float, text: str) -> str:
    return text if factor == 1 else f"{num(factor)} * {text}"


def num(x: float) -> str:
    """A number in the source, in the kernel's own type."""
    return f"(real){x!r}"


def merged_rate(stage: Stage, node: int) -> float | None:
    """How much of an activation's cov the weights after it add to its ntk, where all that read it agree; else None."""
    rates: set[float | None] = set()
    for step in stage.steps:
        if node not in step.inputs:
            continue
        if isinstance(step.op, RandomAffine):
            rates.add(step.op.w_rate / step.op.w_var)
        elif isinstance(step.op, Window | Rescale):
            rates.add(merged_rate(stage, step.node))
        else:
            rates.add(None)
    return rates.pop() if len(rates) == 1 else None


def body(w: Writer) -> Value:
    """All steps of a stage for one row; the value of the last."""
    stage, layout = w.layout.stage, w.layout
    first = stage.steps[0]
    if layout.channels:
        total = [""] * layout.columns
        starts = layout.places
        for k in range(layout.channels):
            for q, (a, b) in enumerate(w.columns_at(1, starts[0][k], starts[1][k])):
                total[q] = w.let("x", f"{a} * {b}" if not k else f"fused({a}, {b}, {total[q]})")
        w.values[first.node] = Value(tuple(total), None, 1 / layout.channels, False, True)
    else:
        names = [tuple(f"{stem}{q}" for q in range(layout.columns)) for stem in ("in_cov", "in_ntk")]
        w.values[first.node] = Value(names[0], names[1] if layout.carried else None, 1.0, False, False)
    before = {step.node: step for step in stage.steps}
    for step in stage.steps[1:]:
        reads = [before[j] for j in step.inputs]
        # A window takes every row of what it reads; its own rows come at its stride.
        w.open(reads[0].level, reads[0].delay) if isinstance(step.op, Window) else w.open(step.level, step.delay)
        _emit(w, step, [(w.values[s.node], s) for s in reads])
    w.open(stage.sink.level, stage.sink.delay)
    return w.values[stage.sink.node]


def _emit(w: Writer, step: Step, reads: list[tuple[Value, Step]]) -> None:
    v, before = reads[0]
    if isinstance(step.op, Window):
        w.window(step, step.op, v, before.level, before.delay)
    elif isinstance(step.op, RandomAffine):
        w.affine(step, step.op, v)
    elif isinstance(step.op, Rescale):
        w.values[step.node] = replace(v, unit=v.unit * step.op.factor**2)
    elif isinstance(step.op, Add):
        w.sum(step, [(value, s.delay) for value, s in reads])
    else:
        assert isinstance(step.op, Activation)
        w.units[step.node] = v.unit
        w.activation(step, step.op, v, merged_rate(w.layout.stage, step.node))
