"""What a kernel would do with given inputs, layer by layer, and what it would cost."""

from dataclasses import dataclass

from ..engine.cost import Cost


@dataclass(frozen=True)
class Row:
    """One parameter: rule, method, its sizes (t, g, i, o) where it is factored, and the estimated cost."""

    parameter: str
    rule: str
    method: str
    sizes: tuple[int, ...]
    cost: Cost | None


@dataclass(frozen=True)
class Explanation:
    """The plan of one tile. Prints as a table."""

    kernel: str
    n: int
    m: int
    rows: tuple[Row, ...]

    @property
    def flops(self) -> float:
        return sum(r.cost.flops for r in self.rows if r.cost)

    def __str__(self) -> str:
        header = ("parameter", "rule", "method", "t", "i x o", "Gflop", "MB moved")
        table = [header]
        for r in self.rows:
            t, shape = "", ""
            if r.sizes:
                count, g, i, o = r.sizes
                t, shape = str(count), f"{i} x {o}" + (f" ({g} groups)" if g > 1 else "")
            cost = (f"{r.cost.flops / 1e9:.3g}", f"{r.cost.bytes / 1e6:.3g}") if r.cost else ("0", "0")
            table.append((r.parameter, r.rule, r.method, t, shape, *cost))
        widths = [max(len(row[k]) for row in table) for k in range(len(header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines.insert(1, "  ".join("-" * w for w in widths))
        title = f"{self.kernel}, {self.n} x {self.m} samples, {self.flops / 1e9:.3g} Gflop to contract"
        return "\n".join([title, *lines])
