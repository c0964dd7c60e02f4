"""What a kernel would do with given inputs, parameter by parameter, and what it would cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .._base import checks
from .._base.memory import TILE_CAPTURE, TILE_WORKSPACE, gram_budget
from .._base.results import Result, text_table
from .._base.types import Memory
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
class Way(Result):
    """One way in which `tg.compute` may make a Gram within a budget, with what it takes, about."""

    way: str
    captures: int  # samples that are captured (passed forward and back), each as often as it is
    held: int
    disk: int
    possible: bool = True

    UNITS: ClassVar[Mapping[str, str]] = {"held": "B", "disk": "B"}


@dataclass(frozen=True, repr=False)
class Costs(Result):
    """What one tile of n by m samples takes. Prints as a table."""

    kernel: str
    n: int
    m: int
    rows: tuple[CostRow, ...]
    passes: int = 0  # backward passes for every sample, of which `groups` are contracted one after the other
    groups: int = 1
    symmetric: bool = False
    kept: int = 0  # bytes of a sample, captured; 0 where that is not known
    transient: int = 0  # bytes that a sample takes besides while it is captured
    device: str = "cpu"
    half: bool = False  # whether these are of 16 bits already
    entry: int = 0  # bytes of what a pair of samples gives

    UNITS: ClassVar[Mapping[str, str]] = {
        "flops": "floating-point operations",
        "bytes": "B",
        "kept": "B",
        "transient": "B",
    }

    def ways(self, n: int | None = None, m: int | None = None, memory: Memory = None) -> tuple[Way, ...]:
        """What holding everything, tiles, a disk and 16 bits would take for n by m samples like these, about, with the
        result in memory.

        Left out, n and m are those of this tile, and the budget that of `tg.compute`. With n alone the matrix is
        symmetric, n by n. None, where that is not known: outputs that are captured in groups are so for every tile.
        """
        if not self.kept or self.groups > 1:
            return ()
        symmetric = m is None and (n is not None or self.symmetric)
        n = self.n if n is None else n
        m = n if symmetric else self.m if m is None else m
        budget = checks.memory(memory) or gram_budget(torch.device(self.device))
        usable = max(0, int(0.8 * budget) - n * m * self.entry)
        least = (n if symmetric else min(n, m) + 1) * self.kept
        once = n if symmetric else n + m
        # To hold all, temporaries may have a quarter of what they usually have.
        fits = least <= _room(usable, self.device, 4)
        held = max(1, _room(usable, self.device) // (2 * self.kept))
        sweeps = -(-n // held)
        again = n * (sweeps + 1) // 2 if symmetric else n + sweeps * m
        written = max(0, n - held) if symmetric else m
        found = [Way("all at once", once, least, 0, fits)]
        if not fits:
            found.append(Way("tiles", again, 2 * held * self.kept, 0))
            if self.device == "cpu":
                found.append(Way("tiles, on disk", once, 2 * held * self.kept, written * self.kept))
            if not self.half:
                in_half = replace(self, kept=-(-self.kept // 2), half=True).ways(n, None if symmetric else m, budget)
                found += [replace(way, way=f"16 bits, {way.way}") for way in in_half if way.possible][:1]
        return tuple(found)

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
        return "\n".join([title, *lines, *self._memory()])

    def _memory(self) -> list[str]:
        """What a sample takes, and the ways that there are within the default budget."""
        ways = self.ways()
        if not ways:
            return []
        says = f"a sample takes {self.kept / 1e6:.3g} MB, and {self.transient / 1e6:.3g} MB more while it is captured"
        if ways[0].possible:
            return ["", f"{says}: all fit into the budget"]
        cells = [
            (way.way, way.captures, f"{way.held / 1e9:.3g}", f"{way.disk / 1e9:.3g}") for way in ways if way.possible
        ]
        need = f"all at once would take {ways[0].held / 1e9:.3g} GB, more than the budget has room for; about:"
        return ["", f"{says}; {need}", *text_table(("way", "captures", "GB held", "GB on disk"), cells).splitlines()]

    def __str__(self) -> str:
        return self.table()


def side_by_side(kernel: str, parts: Sequence[Costs]) -> Costs:
    """The costs of several kernels on the same samples, as those of one: each parameter under its kernel's number."""
    rows = [replace(row, parameter=f"{j}.{row.parameter}") for j, part in enumerate(parts) for row in part.rows]
    kept, transient = sum(part.kept for part in parts), max(part.transient for part in parts)
    groups = max(part.groups for part in parts)
    return replace(parts[0], kernel=kernel, rows=tuple(rows), passes=0, groups=groups, kept=kept, transient=transient)


def _room(usable: int, device: str, part: int = 1) -> int:
    """What of a budget is left for captured samples, as `gram/plan.py` cuts it, about."""
    temporaries = 8 * min(usable // (32 * part), TILE_WORKSPACE[device])
    return usable - min(usable // (4 * part), TILE_CAPTURE[device]) - temporaries
