"""A plan as tables of numbers, which a compiled loop can follow: steps, stages between poolings, classes of offsets.

A step is `activation(affine(window(field)))`, or a sum of two fields in place of the window, over the field of one
class of offsets. A stage is what lies between two poolings: within it classes of offsets never meet. At positions
(s, t = s + d), `s` counts from max(0, −d) on, so that the field of a class begins at 0 on each axis and has
n − |d| places; a window of stride σ then reads the places σy + δ of the class σd before it, and zero beyond the ends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...activations.dual import Rectifier, at_rest
from ...activations.duals import Erf, Gelu
from ..core import Activation, Input, RandomAffine
from ..ops import Add, Rescale
from ..positions import Pool, Total, Window
from .plan import Plan

# The columns of the table of steps.
FIRST, SECOND, OUT, KY, KX, SY, SX, CODE, OWN, FROM_H, FROM_W, HEIGHT, WIDTH, RY, RX = range(15)
# Those of the table of stages.
STEPS, STOP, ENTRY_H, ENTRY_W, GRID_H, GRID_W, STRIDE_Y, STRIDE_X, LAST, CLASSES_Y, CLASSES_X = range(11)
POOL_Y, POOL_X, STORE, AT = range(11, 15)
# What a step ends with.
LINEAR, ARC, ERF, GELU = range(4)
# The columns of their constants: those of `RandomAffine`, then those of the activation.
W_VAR, B_VAR, W_RATE, B_RATE, ACT = range(5)


class Stage(NamedTuple):
    """What lies between two poolings: its row of the table (up to POOL_X), its lists, the scale of what it leaves.

    The lists, one after the other: the classes of offsets at its end along y and along x; where each begins among the
    rows and among the columns of what the pooling before it left; for each class and place, the row and the column of
    what the pooling after it makes (−1: nobody asks for it).
    """

    row: list[int]
    lists: tuple[np.ndarray, ...]
    scale: float


@dataclass(frozen=True)
class Program:
    """The tables, and what they take."""

    steps: np.ndarray
    constants: np.ndarray
    stages: np.ndarray
    lists: np.ndarray
    scales: np.ndarray  # of the sums that each stage leaves: over a pooling's windows, or over all positions
    slot: int
    channels: int
    own: tuple[int, ...]  # the nodes whose variances activations read, in the order in which they stand
    buffers: int  # fields that are held at a time
    stored: int  # numbers that poolings leave for a pair of samples
    work: int  # steps over places for a pair of samples


@dataclass
class _Step:
    """A step as it grows."""

    inputs: list[int]  # nodes
    node: int  # the node whose moments it leaves
    window: Window | None = None
    affine: RandomAffine | Rescale | None = None
    activation: Activation | None = None


@lru_cache(maxsize=64)
def make_program(plan: Plan, equal: bool) -> Program:
    """The tables of a plan; `equal`: for equal positions alone in the end."""
    nodes = plan.nodes
    pools = [k for k, node in enumerate(nodes) if isinstance(node.op, Pool)]
    bounds = [0, *pools, plan.last]
    parts = [_merged(plan, start, stop) for start, stop in pairwise(bounds)]
    own = list(dict.fromkeys(nodes[s.node].inputs[0] for steps in parts for s in steps if s.activation is not None))
    sizes = [math.prod(nodes[k].grid) for k in own]
    begins = dict(zip(own, np.cumsum([0, *sizes]).tolist(), strict=False))
    rows: list[list[int]] = []
    constants: list[list[float]] = []
    lasts: list[int] = []
    strides: list[tuple[int, int]] = []
    buffers = 1
    for (start, stop), steps in zip(pairwise(bounds), parts, strict=True):
        ends = nodes[stop].inputs[0]
        places = _buffers(steps, start, ends)
        far = _strides(steps, start, ends)
        for s in steps:
            rows.append(_row(plan, s, places, far[s.node], begins))
            constants.append(_constants(s))
        lasts.append(places[ends])
        strides.append(far[start])
        buffers = max(buffers, 1 + max(places.values()))
    counts = np.cumsum([0, *(len(steps) for steps in parts)]).tolist()
    source, stages = nodes[0].op, _stages(plan, equal, bounds, counts, lasts, strides)
    assert isinstance(source, Input)
    table = np.array(rows, dtype=np.int64).reshape(len(rows), RX + 1)
    stored = np.cumsum([0, *(s.row[POOL_Y] * s.row[POOL_X] for s in stages)])
    at = np.cumsum([0, *(sum(v.size for v in s.lists) for s in stages)])
    return Program(
        steps=table,
        constants=np.array(constants).reshape(len(rows), ACT + 4),
        stages=np.array([[*s.row, stored[g], at[g]] for g, s in enumerate(stages)], dtype=np.int64),
        lists=np.concatenate([v.ravel() for s in stages for v in s.lists]).astype(np.int64),
        scales=np.array([s.scale for s in stages]),
        slot=source.slot,
        channels=source.channels,
        own=tuple(own),
        buffers=buffers,
        stored=int(stored[-1]),
        work=_work(table, stages),
    )


def _merged(plan: Plan, start: int, stop: int) -> list[_Step]:
    """The nodes after `start` and before `stop`, those joined that go in one step over a field."""
    readers = [0] * len(plan.nodes)
    for node in plan.nodes[start + 1 : stop + 1]:
        for j in node.inputs:
            readers[j] += 1
    steps: dict[int, _Step] = {}  # by the node that they leave
    done: list[_Step] = []
    for k in range(start + 1, stop):
        node = plan.nodes[k]
        before = steps.get(node.inputs[0]) if len(node.inputs) == 1 and readers[node.inputs[0]] == 1 else None
        if isinstance(node.op, Add):
            left = node.inputs[0]
            for right in node.inputs[1:]:  # sums of several, two at a time, from the left as the recursion has them
                step = _Step([left, right], k)
                done.append(step)
                left = k
            steps[k] = step
            continue
        if before is None or not _fits(before, plan, k):
            before = _Step([node.inputs[0]], k)
            done.append(before)
        else:
            del steps[before.node]
            before.node = k
        if isinstance(node.op, Window):
            before.window = node.op
        elif isinstance(node.op, RandomAffine | Rescale):
            before.affine = node.op
        else:
            assert isinstance(node.op, Activation)
            before.activation = node.op
        steps[k] = before
    return done


def _fits(step: _Step, plan: Plan, k: int) -> bool:
    """Whether a step can do this node as well, after what it does."""
    op = plan.nodes[k].op
    if isinstance(op, Window):
        return False  # it reads its neighbours, which must be finished
    if isinstance(op, RandomAffine | Rescale):
        return step.affine is None and step.activation is None
    return step.activation is None


def _buffers(steps: Sequence[_Step], start: int, end: int) -> dict[int, int]:
    """Which buffer holds each node's field: one is free again when its last reader is done."""
    last = {j: k for k, s in enumerate(steps) for j in s.inputs}
    last[end] = len(steps)
    places = {start: 0}
    held = {start: 0}
    for k, s in enumerate(steps):
        free = held.get(s.node, next(b for b in range(len(held) + 1) if b not in held.values()))
        places[s.node] = held[s.node] = free
        held = {j: b for j, b in held.items() if last.get(j, -1) > k}
    return places


def _strides(steps: Sequence[_Step], start: int, end: int) -> dict[int, tuple[int, int]]:
    """How many places of each node lie between two neighbours at the end of the stage."""
    far = {end: (1, 1)}
    for s in reversed(steps):
        y, x = far.setdefault(s.node, (1, 1))
        sy, sx = s.window.stride if s.window is not None else (1, 1)
        for j in s.inputs:
            far[j] = (y * sy, x * sx)
    return {start: (1, 1)} | far


def _row(plan: Plan, s: _Step, places: dict[int, int], far: tuple[int, int], begins: dict[int, int]) -> list[int]:
    size, stride = ((1, 1), (1, 1)) if s.window is None else (s.window.size, s.window.stride)
    own = begins[plan.nodes[s.node].inputs[0]] if s.activation is not None else -1
    second = places[s.inputs[1]] if len(s.inputs) > 1 else -1
    first, grids = places[s.inputs[0]], (*plan.nodes[s.inputs[0]].grid, *plan.nodes[s.node].grid)
    return [first, second, places[s.node], *size, *stride, _code(s.activation), own, *grids, *far]


def _code(op: Activation | None) -> int:
    if op is None:
        return LINEAR
    kinds = ((Rectifier, ARC), (Erf, ERF), (Gelu, GELU))
    return next((code for kind, code in kinds if isinstance(op.dual, kind)), LINEAR)


def _constants(s: _Step) -> list[float]:
    """Those of the affine map, then: a, f and the slope at rest (arc); 2b², 2a²/π, c² and 4(ab)²/π (erf)."""
    a = s.affine
    if isinstance(a, RandomAffine):
        affine = [a.w_var, a.b_var, a.w_rate, a.b_rate]
    else:
        affine = [1.0 if a is None else a.factor**2, 0.0, 0.0, 0.0]
    dual = None if s.activation is None else s.activation.dual
    if isinstance(dual, Rectifier):
        same, angle = dual.constants
        return [*affine, same, angle, at_rest(same, angle), 0.0]
    if isinstance(dual, Erf):
        return [*affine, 2 * dual.b**2, dual.a**2 * 2 / math.pi, dual.c**2, 4 / math.pi * (dual.a * dual.b) ** 2]
    return [*affine, 0.0, 0.0, 0.0, 0.0]


def _stages(
    plan: Plan,
    equal: bool,
    bounds: Sequence[int],
    counts: Sequence[int],
    lasts: Sequence[int],
    strides: Sequence[tuple[int, int]],
) -> list[Stage]:
    """The stages, and from the last one back the classes of offsets that each has to go through."""
    nodes, stages = plan.nodes, []
    asked: list[list[int]] = []  # by axis, the offsets that the stage after reads of the pooled field
    for g in range(len(bounds) - 2, -1, -1):
        start, stop = bounds[g], bounds[g + 1]
        entry, grid, op = nodes[start].grid, nodes[nodes[stop].inputs[0]].grid, nodes[stop].op
        if isinstance(op, Pool):
            classes = [_before_pool(n, k, want) for n, k, want in zip(grid, op.size, asked, strict=True)]
            maps = [_pool_map(n, k, ds, want) for n, k, ds, want in zip(grid, op.size, classes, asked, strict=True)]
            scale = 1.0 / math.prod(op.size) ** 2 if op.mean else 1.0
        else:
            classes = [[0] if equal else list(range(1 - n, n)) for n in grid]
            maps = [(np.zeros((0, 0), dtype=np.int64), 0)] * 2
            scale = 1.0 if isinstance(op, Total) and not op.mean else 1.0 / math.prod(grid) ** (1 if plan.flat else 2)
        asked = [[r * d for d in ds] for r, ds in zip(strides[g], classes, strict=True)]
        begins = [np.cumsum([0, *(n - abs(d) for d in ds)])[:-1] for n, ds in zip(entry, asked, strict=True)]
        (rows, height), (columns, width) = maps
        lists = (np.array(classes[0]), np.array(classes[1]), *begins, rows, columns)
        row = [counts[g], counts[g + 1], *entry, *grid, *strides[g], lasts[g], *map(len, classes), height, width]
        stages.append(Stage(row, lists, scale))
    return stages[::-1]


def _before_pool(n: int, k: int, asked: Sequence[int]) -> list[int]:
    """The offsets before a pooling by k that those asked for after it are made of."""
    wanted = set(asked)
    return [d for d in range(1 - n, n) if any((r + d) // k in wanted for r in range(k))]


def _pool_map(n: int, k: int, classes: Sequence[int], asked: Sequence[int]) -> tuple[np.ndarray, int]:
    """Where each place of each class goes, and how many places there are."""
    begins, total = {}, 0
    for d in asked:
        begins[d] = total
        total += n // k - abs(d)
    out = np.full((len(classes), n), -1, dtype=np.int64)
    for index, d in enumerate(classes):
        for y in range(n - abs(d)):
            s = y + max(0, -d)
            left, right = s // k, (s + d) // k
            if right - left in begins:
                out[index, y] = begins[right - left] + min(left, right)
    return out, total


def _work(table: np.ndarray, stages: Sequence[Stage]) -> int:
    total = 0
    for stage in stages:
        dy, dx, *_ = stage.lists
        for step in table[stage.row[STEPS] : stage.row[STOP]]:
            heights = (step[HEIGHT] - abs(step[RY] * dy)).sum()
            total += int(heights * (step[WIDTH] - abs(step[RX] * dx)).sum())
    return total
