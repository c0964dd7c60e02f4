"""A plan cut into stages: what one launch on a GPU takes through its layers, between images, pooling and the end.

Within a stage images stream row by row. A node has a level (how many rows of the stage's input one of its rows is
apart: a product of strides) and a delay: its row r is computed at step level·r + delay. A window of 3 rows waits one.
"""

from dataclasses import dataclass
from typing import Literal

from ..core import Grid, Input, Op, RandomAffine
from ..positions import Pool, Window
from .plan import Plan

# Channels of images that are read by each lane for its columns at every row (heuristic).
CHANNELS = 8


@dataclass(frozen=True)
class Step:
    """One node of a stage, by number in the plan."""

    node: int
    op: Op | None  # None: what is read from memory
    inputs: tuple[int, ...]
    level: int
    delay: int


@dataclass(frozen=True)
class Stage:
    """Steps between two places in memory. `source`: the node that is read; `sink`: the last node, summed or kept."""

    grid: Grid  # of what it reads
    source: int
    steps: tuple[Step, ...]
    ends: Literal["mean", "trace", "rows"]
    pool: Pool | None = None  # what happens to the kept rows before the next stage

    @property
    def sink(self) -> Step:
        """The step whose values leave the stage."""
        return self.steps[-1]

    @property
    def stride(self) -> int:
        """Only offsets divisible by it reach the end."""
        return max(step.level for step in self.steps)


def cut(plan: Plan, windows: int) -> list[Stage] | str:
    """The stages of a plan, of about so many windows at most; or why it has none."""
    nodes, stages, start = plan.nodes, list[Stage](), 0
    why = _misfit(plan)
    if why is not None:
        return why
    for k in range(1, plan.last):
        op = nodes[k].op
        alone = all(j >= k for node in nodes[k + 1 : plan.last + 1] for j in node.inputs)
        if isinstance(op, Pool):
            stages.append(_stage(plan, start, k - 1, "rows", op))
            start = k
        elif alone and isinstance(op, RandomAffine) and _full(plan, start, k, windows):
            stages.append(_stage(plan, start, k, "rows"))
            start = k
    stages.append(_stage(plan, start, plan.last - 1, "trace" if plan.flat else "mean"))
    for stage in stages:
        if any(n % stage.stride for n in stage.grid) or stage.stride & (stage.stride - 1):
            return f"strides of {stage.stride} in all do not divide {stage.grid} positions by powers of 2"
    return stages


def _full(plan: Plan, start: int, k: int, windows: int) -> bool:
    """Whether a stage from `start` ends with node k: windows up to the next pooling are shared out evenly."""
    last = next((j for j in range(start + 1, plan.last) if isinstance(plan.nodes[j].op, Pool)), plan.last)
    before, after = (
        sum(isinstance(node.op, Window) for node in part)
        for part in (plan.nodes[start + 1 : k + 1], plan.nodes[k + 1 : last])
    )
    total = before + after
    return after > 0 and before >= -(-total // -(-total // windows))


def _misfit(plan: Plan) -> str | None:
    """Why a plan does not go on a GPU, by what the GPU's kernels cannot do."""
    height, width = plan.grid
    if width > 64 or height > 64 or (width % 2 and width > 32) or min(height, width) < 2:
        return f"images of {height}×{width}; it takes 2 to 64 rows and columns, odd widths up to 31"
    for node in plan.nodes:
        op = node.op
        if isinstance(op, Window) and op.stride[0] != op.stride[1]:
            return f"{node.name or 'a layer'}: strides of {op.stride}, not the same along both axes"
        if isinstance(op, RandomAffine) and op.w_var <= 0:
            return f"{node.name or 'a layer'}: weights of variance 0"
        if isinstance(op, Input) and op.channels > CHANNELS:
            return f"images of {op.channels} channels, more than {CHANNELS}"
    return None if plan.nodes[-1].inputs == (plan.last - 1,) else "the pooling at the end is not of the last layer"


def _stage(
    plan: Plan, start: int, last: int, ends: Literal["mean", "trace", "rows"], pool: Pool | None = None
) -> Stage:
    """The nodes after `start` up to `last`, each with its level and delay."""
    steps: dict[int, Step] = {}
    source = plan.nodes[start]
    first = source.op if isinstance(source.op, Input) else None
    steps[start] = Step(start, first, (), 1, 0)
    for k in range(start + 1, last + 1):
        node = plan.nodes[k]
        if not all(j in steps for j in node.inputs):
            continue
        before = [steps[j] for j in node.inputs]
        level, delay = before[0].level, max(step.delay for step in before)
        if isinstance(node.op, Window):
            delay += level * (node.op.size[0] // 2)
            level *= node.op.stride[0]
        steps[k] = Step(k, node.op, node.inputs, level, delay)
    return Stage(source.grid, start, tuple(steps.values()), ends, pool)
