"""A batch whose gradients are not held for all outputs at once: they are captured a group of outputs at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.types import Inputs
from ..engine.blocks import GradientBlock
from ..engine.directions import Outputs, some_outputs

Blocks = dict[str, GradientBlock]  # by parameter, or by layer


@dataclass(frozen=True, eq=False)
class Grouped:
    """Samples, the groups in which their outputs are captured, and the bytes that this may take at a time.

    `nbytes`: what the blocks of a group take while they are there, which is what the batch counts for in a plan.
    """

    x: Inputs
    groups: tuple[Outputs, ...]
    memory: int | None
    nbytes: int


Side = Blocks | Grouped
Capture = Callable[[Inputs, int | None, Outputs], Blocks]
Tiles = Mapping[str, Tensor]


def some(side: Side, outputs: Outputs, capture: Capture) -> Blocks:
    """The blocks of a group of outputs: captured now, or taken out of those of all."""
    if isinstance(side, Grouped):
        return capture(side.x, side.memory, outputs)
    return {name: some_outputs(block, slice(outputs.start, outputs.stop)) for name, block in side.items()}


def finest(*sides: Side) -> tuple[Outputs, ...]:
    """The groups of the side that has most: other samples may be longer, and have more."""
    return max((side.groups for side in sides if isinstance(side, Grouped)), key=len)


def traced(
    rows: Sequence[Side], b: Side, capture: Capture, tile: Callable[[Blocks, Blocks], Tiles]
) -> list[dict[str, Tensor]]:
    """Σ over groups of the tiles that `tile` makes of each of the rows and b; b is captured once for all rows."""
    sums: list[dict[str, Tensor]] = [{} for _ in rows]
    for outputs in finest(*rows, b):
        right = some(b, outputs, capture)
        for total, a in zip(sums, rows, strict=True):
            for name, part in tile(right if a is b else some(a, outputs, capture), right).items():
                total[name] = part if name not in total else _added(total[name], part)
    return sums


def placed(a: Side, b: Side, capture: Capture, tile: Callable[[Blocks, Blocks], Tiles]) -> dict[str, Tensor]:
    """Tiles [n, c, m, d] from those of every two groups of outputs; of b with itself the lower half is mirrored."""
    groups = finest(a, b)
    c, made = groups[-1].stop, dict[str, Tensor]()
    for i, p in enumerate(groups):
        left = some(a, p, capture)
        for q in groups[i:] if a is b else groups:
            right = left if a is b and p == q else some(b, q, capture)
            for name, part in tile(left, right).items():
                if name not in made:
                    made[name] = part.new_zeros(part.shape[0], c, part.shape[2], c)
                made[name][:, p.start : p.stop, :, q.start : q.stop] = part
                if a is b and p != q:
                    made[name][:, q.start : q.stop, :, p.start : p.stop] = part.permute(2, 3, 0, 1)
    return made


def each(side: Grouped, capture: Capture) -> Iterator[Blocks]:
    """The blocks of one group of outputs after the other."""
    return (some(side, outputs, capture) for outputs in side.groups)


def _added(total: Tensor, part: Tensor) -> Tensor:
    """Their sum, in the place of the first where no gradient is to go through it."""
    return total + part if torch.is_grad_enabled() and (total.requires_grad or part.requires_grad) else total.add_(part)
