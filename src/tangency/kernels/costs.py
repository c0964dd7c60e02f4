"""What a kernel would do with given inputs, parameter by parameter, and what it would cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from .._base.results import Result
from ..engine.methods import Cost


@dataclass(frozen=True, repr=False)
class CostRow(Result):
    """One parameter: rule, method, its sizes (t, g, i, o) where it is factored, and the estimated cost."""

    parameter: str
    rule: str
    method: str
    sizes: tuple[int, ...]
    cost: Cost | None


@dataclass(frozen=True, repr=False)
class Costs(Result):
    """What one tile of n by m samples takes. Prints as a table."""

    kernel: str
    n: int
    m: int
    rows: tuple[CostRow, ...]
    passes: int = 0  # backward passes for every sample, of which `groups` are contracted one after the other
    groups: int = 1

    UNITS: ClassVar[Mapping[str, str]] = {"flops": "floating-point operations", "bytes": "B"}

    @property
    def flops(self) -> float:
        """Floating-point operations of the contraction, all parameters together."""
        return sum(r.cost.flops for r in self.rows if r.cost)

    def times(self, tiles: int, outputs: int, groups: int) -> "Costs":
        """The costs of so many such tiles, of `groups` groups of outputs that are captured one after the other."""

        def several(cost: Cost) -> Cost:
            """The cost of a parameter in all of them."""
            return replace(cost, flops=cost.flops * tiles, bytes=cost.bytes * tiles, seconds=cost.seconds * tiles)

        rows = tuple(row if row.cost is None else replace(row, cost=several(row.cost)) for row in self.rows)
        return replace(self, rows=rows, passes=outputs, groups=groups)

    def table(self) -> str:
        """A line per parameter: bits of its factors, t positions, factors i x o, operations, bytes moved."""
        header = ("parameter", "rule", "method", "factors", "t", "i x o", "Gflop", "MB moved")
        cells = [header]
        for r in self.rows:
            t, shape = "", ""
            if r.sizes:
                count, g, i, o = r.sizes
                t, shape = str(count), f"{i} x {o}" + (f" ({g} groups)" if g > 1 else "")
            cost = (f"{r.cost.flops / 1e9:.3g}", f"{r.cost.bytes / 1e6:.3g}") if r.cost else ("0", "0")
            bits = r.cost.precision if r.cost else ""
            cells.append((r.parameter, r.rule, r.method, bits, t, shape, *cost))
        widths = [max(len(row[k]) for row in cells) for k in range(len(header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        lines.insert(1, "  ".join("-" * w for w in widths))
        title = f"{self.kernel}, {self.n} x {self.m} samples, {self.flops / 1e9:.3g} Gflop to contract"
        if self.groups > 1:
            title += f"\n{self.passes:,} backward passes for every sample, in {self.groups} groups of outputs"
        return "\n".join([title, *lines])

    def __str__(self) -> str:
        return self.table()


def side_by_side(kernel: str, parts: Sequence[Costs]) -> Costs:
    """The costs of several kernels on the same samples, as those of one: each parameter under its kernel's number."""
    rows = [replace(row, parameter=f"{j}.{row.parameter}") for j, part in enumerate(parts) for row in part.rows]
    return Costs(kernel, parts[0].n, parts[0].m, tuple(rows))
