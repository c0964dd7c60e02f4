"""Numbers of a stage that its kernel and its launch share: which lane has which columns, how rows run, what lies where.

A lane owns `columns` neighbouring columns x of the left image and, for the class dx, the columns x + dx (mod width)
of the right one; so dx and dx − width fill a row exactly. Down the images, the left row runs modulo H + e and the right
one modulo H + e + σ (σ: the stage's stride, e a multiple of it), where rows ≥ H are empty: their gcd is σ, so that one
run meets every pair of rows whose offset is a multiple of σ, and empty rows stand wherever an image ends. Each turn of
the left image (a cycle) has one offset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from ...activations.dual import Rectifier
from ...activations.duals import Identity
from ..core import Activation, Input
from ..positions import Window
from .stages import Stage, Step

WARP = 32
Real = Literal["float", "double"]


@dataclass(frozen=True)
class Layout:
    """How a stage lies on a GPU."""

    stage: Stage
    later: int = 1  # the strides of the stages that follow without pooling in between
    empty: int = 1  # rows, at least as many as the widest window reaches over: none may see two images
    flat: bool = False  # equal positions alone
    real: Real = "float"
    tangent: bool = True
    carried: bool = False  # whether what it reads from memory has a tangent kernel

    @property
    def height(self) -> int:
        """Rows of an image."""
        return self.stage.grid[0]

    @property
    def width(self) -> int:
        """Columns of an image."""
        return self.stage.grid[1]

    @property
    def stride(self) -> int:
        """Only offsets divisible by it matter in the end."""
        return self.stage.stride * self.later

    @property
    def columns(self) -> int:
        """Columns of a lane: two halve the exchange between lanes, but take twice the registers."""
        narrow = self.width % 2 or self.real == "double"
        return 1 if narrow and self.width <= WARP else 2

    @property
    def lanes(self) -> int:
        """Lanes of one class."""
        return self.width // self.columns

    @property
    def classes(self) -> int:
        """Offsets dx, those that differ by the width counted once."""
        return 1 if self.flat else self.width // self.stride

    @property
    def groups(self) -> int:
        """Classes in a warp (pairs of images, if flat)."""
        return WARP // self.lanes

    @property
    def warps_per_pair(self) -> int:
        """Warps that hold the classes of one pair of images."""
        return -(-self.classes // self.groups)

    @property
    def periods(self) -> tuple[int, int]:
        """Rows of a turn of the left and of the right image, empty ones among them."""
        return self.height + self.empty, self.height + self.empty + self.stride

    @property
    def cycles(self) -> int:
        """Turns of the left image, each with one offset between the rows."""
        return 1 if self.flat else self.periods[1] // self.stride

    @property
    def rows(self) -> int:
        """Of the whole run."""
        return self.cycles * self.periods[0]

    @property
    def cells(self) -> int:
        """Numbers of one pair of images that leave the stage, for each of cov and ntk."""
        level = self.stage.sink.level
        return self.classes * (self.rows // level) * (self.width // level)

    @property
    def delay(self) -> int:
        """Steps until the last layer has its first row."""
        return max(step.delay for step in self.stage.steps)

    @property
    def channels(self) -> int:
        """Of the images, 0 where the stage reads rows from memory."""
        op = self.stage.steps[0].op
        return op.channels if isinstance(op, Input) else 0

    @cached_property
    def norms(self) -> list[Step]:
        """The activations that read variances."""
        return [step for step in self.stage.steps if isinstance(step.op, Activation) and not is_linear(step.op)]

    @cached_property
    def places(self) -> tuple[list[int], list[int]]:
        """Where the images' channels and each activation's variances begin, left and right; the last: how many."""
        levels = [1] * self.channels + [step.level for step in self.norms]
        starts: tuple[list[int], list[int]] = ([0], [0])
        for side in (0, 1):
            for level in levels:
                starts[side].append(starts[side][-1] + self.periods[side] // level * (self.width // level))
        return starts


def lay_out(stages: Sequence[Stage], flat: bool, real: Real, tangent: bool) -> list[Layout]:
    """The layouts of all stages. Those between two poolings share offsets and empty rows."""
    layouts: list[Layout] = []
    runs: list[list[Stage]] = [[]]
    for stage in stages:
        runs[-1].append(stage)
        if stage.pool is not None:
            runs.append([])
    for k, run in enumerate(runs):
        levels = [prod(stage.stride for stage in run[:j]) for j in range(len(run) + 1)]  # before each, and in all
        reach = max((level * _reach(stage) for level, stage in zip(levels, run, strict=False)), default=1)
        empty = max(1, -(-reach // levels[-1])) * levels[-1]
        equal = flat and k == len(runs) - 1
        for level, stage in zip(levels, run, strict=False):
            later = levels[-1] // (level * stage.stride)
            layouts.append(Layout(stage, later, empty // level, equal, real, tangent))
    return layouts


def _reach(stage: Stage) -> int:
    """Rows of the stage's input that a window reaches to either side, at most."""
    found = [
        step.level // step.op.stride[0] * (step.op.size[0] // 2) for step in stage.steps if isinstance(step.op, Window)
    ]
    return max(found, default=1)


def is_linear(op: Activation) -> bool:
    """Whether an activation is linear, so that it needs no variances."""
    return isinstance(op.dual, Identity) or (isinstance(op.dual, Rectifier) and op.dual.constants[1] == 0)
