"""How a Gram matrix is cut into blocks that a memory budget can hold."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import MemoryBudgetError


@dataclass(frozen=True)
class TilePlan:
    """Blocks of `rows` samples a side; `capture` and `workspace` are the bytes their making may take besides."""

    n: int
    m: int
    symmetric: bool
    rows: int
    capture: int
    workspace: int

    def blocks(self, count: int) -> list[slice]:
        return [slice(i, min(i + self.rows, count)) for i in range(0, count, self.rows)]

    def tiles(self) -> Iterator[tuple[slice, list[slice]]]:
        """Each row block with the column blocks it must meet: the upper half only, where both sides are the same."""
        columns = self.blocks(self.m)
        for k, row in enumerate(self.blocks(self.n)):
            yield row, columns[k:] if self.symmetric else columns

    @property
    def count(self) -> int:
        return sum(len(columns) for _, columns in self.tiles())

    def halved(self) -> "TilePlan":
        """Half the block, for when a device ran out of memory all the same."""
        if self.rows == 1:
            raise MemoryBudgetError(
                "out of memory with blocks of a single sample. Use a larger device or a smaller dtype."
            )
        return TilePlan(self.n, self.m, self.symmetric, self.rows // 2, self.capture // 2, self.workspace // 2)


def plan(
    n: int, m: int, symmetric: bool, memory: int, result: int, kept: int, transient: int, cell: int, cuda: bool = False
) -> TilePlan:
    """Cut the budget: the result, the blocks, the making of a block, the contraction's temporaries.

    `kept` and `transient` are bytes per sample, `cell` bytes per pair of samples. A fifth of the budget stays free for
    what allocators and libraries take beside us (heuristic).
    """
    room = int(memory * 0.8) - result
    least = 3 * kept + 2 * (kept + transient) + 4 * cell
    if room < least:
        need = int((least + result) / 0.8) + 1
        raise MemoryBudgetError(
            f"memory={memory} bytes is too small: the result takes {result} and one pair of samples {least} more. "
            f"Give at least memory={need}."
        )
    # The contraction holds at most eight buffers of `workspace` bytes at its peak.
    workspace = max(cell, min(room // 32, 1 << (32 if cuda else 28)))
    capture = max(kept + transient, min(room // 4, 1 << 34))
    left = max(0, room - 8 * workspace - capture)
    if symmetric and n * kept + 2 * n * n * cell <= left:
        return TilePlan(n, m, symmetric, n, capture, workspace)  # one block, with itself
    # Three blocks at once: the rows, the columns, and the columns that will be the next rows.
    rows = max(1, min(max(n, m), left // max(1, 3 * kept)))
    while rows > 1 and 3 * rows * kept + 2 * rows * rows * cell > left:
        rows = max(1, rows * 3 // 4)
    return TilePlan(n, m, symmetric, rows, capture, workspace)
