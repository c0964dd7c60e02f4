"""A plan cut into stages: what one launch on a GPU takes through its layers, between images, pooling and the end.

Within a stage images stream row by row. A node has a level (how many rows of the stage's input one of its rows is apart: a
product of strides) and a delay: its row r is computed at step level·r + delay. So a window of three rows waits one row.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from ..core import Activation, Grid, Input, RandomAffine
from ..ops import Add, Rescale
from ..positions import Pool, Total, Trace, Window
from ..recursion import Node
from .plan import Plan

# Windows of one stage, two streams each: their rows lie in registers (measured: more spill or leave too few threads).
WINDOWS = 10


@dataclass(frozen=True)
class Step:
    """One node of a stage, by number in the plan."""

    node: int
    op: object
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
    pool: tuple[int, int] = (1, 1)  # windows by which the kept rows are pooled before the next stage

    @property
    def sink(self) -> Step:
        """The step whose values leave the stage."""
        return self.steps[-1]

    @property
    def stride(self) -> int:
        """Only offsets divisible by it reach the end."""
        return max(step.level for step in self.steps)

    @property
    def activations(self) -> list[Step]:
        """The steps that read variances of both sides."""
        return [step for step in self.steps if isinstance(step.op, Activation)]


def cut(plan: Plan, windows: int = WINDOWS) -> list[Stage] | str:
    """The stages of a plan, or why it has none: a branch around a pooling, strides that do not divide."""
    nodes = plan.nodes
    stages: list[Stage] = []
    start, count = 0, 0
    for k in range(1, plan.end + 1):
        op = nodes[k].op
        alone = all(j >= k for node in nodes[k + 1 : plan.end + 1] for j in node.inputs)
        count += isinstance(op, Window)
        if isinstance(op, Pool):
            if not alone or nodes[k].inputs != (k - 1,):
                return f"{nodes[k].name or 'a layer'}: a branch around a pooling"
            stages.append(_stage(plan, start, k - 1, "rows", op.size))
            stages[-1] = replace(stages[-1], pool=op.size)
            start, count = k, 0
        elif count >= windows and alone and isinstance(op, RandomAffine) and k < plan.end - 2:
            stages.append(_stage(plan, start, k, "rows"))
            start, count = k, 0
    ends: Literal["mean", "trace"] = "trace" if plan.flat else "mean"
    stages.append(_stage(plan, start, plan.end - 1, ends))
    for stage in stages:
        odd = [n for n in stage.grid if n % stage.stride]
        if odd or stage.stride & (stage.stride - 1):
            return f"strides of {stage.stride} in all do not divide {stage.grid} positions"
    return stages


def _stage(plan: Plan, start: int, last: int, ends: Literal["mean", "trace", "rows"], pool: Grid = (1, 1)) -> Stage:
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
    return Stage(source.grid, start, tuple(steps.values()), ends)
