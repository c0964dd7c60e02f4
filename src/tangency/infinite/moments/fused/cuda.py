"""The fused recursion on a GPU: images and variances put as the kernels read them, pairs run in portions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...activations.dual import Rectifier
from ...activations.duals import Erf
from ..core import Activation, Input, Moments, Side
from ..positions import Total
from .layout import Layout, Real, lay_out
from .plan import Plan
from .source import Kernel, write_kernel, write_pool
from .stages import cut

# Windows of one stage at most, whose rows lie in registers (measured: more spill, fewer cost passes over memory).
WINDOWS: dict[Real, int] = {"float": 21, "double": 6}
FLAT = 6  # where equal positions alone count and little lies between stages
PAIRS = 1 << 16  # of images in one launch, so that work can be interrupted (heuristic)
ROOM = 4 << 30  # bytes between stages, where nobody says how much (heuristic)
DTYPES: dict[Real, torch.dtype] = {"float": torch.float32, "double": torch.float64}


class Device(Protocol):
    """Who runs CUDA source: a GPU, or (in tests) something that stands in for it."""

    def stage(self, kernel: Kernel, blocks: tuple[int, int], args: Sequence[Tensor | int]) -> None:
        """Queue a stage's kernel."""

    def pool(self, text: str, source: Tensor, to: Tensor) -> None:
        """Queue the pooling between two stages."""


@dataclass(frozen=True)
class Program:
    """The kernels of a plan, in order, and the poolings between them."""

    plan: Plan
    kernels: tuple[Kernel, ...]
    pools: tuple[str | None, ...]  # after each kernel

    @property
    def cells(self) -> int:
        """Bytes per pair of images that lie between stages, and that are summed in the end."""
        real = DTYPES[self.kernels[0].layout.real].itemsize
        between = [k.layout.cells for k in self.kernels[:-1]]
        return 2 * real * 2 * max(between, default=0) + 16 * self.kernels[-1].layout.classes


@lru_cache(maxsize=64)
def make_program(plan: Plan, real: Real, tangent: bool, windows: int | None = None) -> Program | str:
    """The program of a plan, or why it has none."""
    stages = cut(plan, windows or (FLAT if plan.flat else WINDOWS[real]))
    if isinstance(stages, str):
        return stages
    layouts = lay_out(stages, plan.flat, real, tangent)
    if any(layout.delay > 62 for layout in layouts):
        return "its layers are too many rows apart"
    pools = [
        write_pool(before, after) if before.stage.pool is not None else None for before, after in pairwise(layouts)
    ]
    kernels: list[Kernel] = []
    for layout in layouts:
        carried = bool(kernels) and kernels[-1].tangent
        kernels.append(write_kernel(replace(layout, carried=carried)))
    return Program(plan, tuple(kernels), (*pools, None))


@dataclass(frozen=True)
class Run:
    """A program on two sides: what is of each sample alone lies ready."""

    program: Program
    device: Device
    sides: tuple[tuple[Tensor, Tensor], ...]  # of each kernel, left and right

    def moments(self, left: Tensor, right: Tensor, room: int | None = None) -> Moments:
        """The moments at the end of the plan of pairs (left[k], right[k]) of samples, within so many bytes."""
        fits = (ROOM if room is None else room) // max(1, self.program.cells)
        step = min(PAIRS, max(1, fits))
        step = step // 264 * 264 if step > 264 else step  # whole waves of blocks on cards with 132 processors
        parts = [self._some(left[k : k + step], right[k : k + step]) for k in range(0, len(left), step)]
        cov = torch.cat([part.cov for part in parts])
        ntks = [part.ntk for part in parts if part.ntk is not None]
        return Moments(cov, torch.cat(ntks) if ntks else None, ())

    def _some(self, left: Tensor, right: Tensor) -> Moments:
        count, real = len(left), DTYPES[self.program.kernels[0].layout.real]
        none = left.new_zeros(1, dtype=real)
        cov, ntk, sums = none, none, none.double()
        left, right = left.int(), right.int()
        for kernel, pool, (lefts, rights) in zip(self.program.kernels, self.program.pools, self.sides, strict=True):
            layout = kernel.layout
            outs, parts = [none, none], 1
            if layout.stage.ends == "rows":
                outs[0] = none.new_empty(count * layout.cells)
                outs[1] = none.new_empty(count * layout.cells) if kernel.tangent else none
            else:
                parts = _parts(kernel, count)
                sums = left.new_empty(count, layout.classes, parts, 2, dtype=torch.float64)
            warps = -(-count // layout.groups) if layout.flat else count * layout.warps_per_pair
            args: list[Tensor | int] = [lefts, rights, left, right, cov, ntk, *outs, sums, count, parts]
            self.device.stage(kernel, (-(-warps // kernel.warps), parts), args)
            cov, ntk = (self._pooled(kernel, pool, v, count) for v in outs)
        return self._ended(sums)

    def _pooled(self, kernel: Kernel, pool: str | None, v: Tensor, count: int) -> Tensor:
        if pool is None or v.numel() == 1:
            return v
        after = self.program.kernels[self.program.kernels.index(kernel) + 1].layout
        out = v.new_empty(count * after.classes * after.rows * after.width)
        self.device.pool(pool, v, out)
        return out

    def _ended(self, sums: Tensor) -> Moments:
        """The sums over classes as moments: means over pairs of positions, or over equal positions."""
        last, op = self.program.kernels[-1], self.program.plan.nodes[-1].op
        stage = last.layout.stage
        positions = prod(n // stage.stride for n in stage.grid)
        count = 1 if isinstance(op, Total) and not op.mean else positions if self.program.plan.flat else positions**2
        total = sums.sum((1, 2)) * (last.unit / count)
        return Moments(total[:, 0], total[:, 1] if last.tangent else None, ())


def _parts(kernel: Kernel, count: int) -> int:
    """Into how many parts the rows of a pair of images are cut: more where pairs are few, to keep the card busy."""
    blocks = count * kernel.layout.warps_per_pair / kernel.warps
    return max(1, min(kernel.layout.cycles // 2, int(528 // max(1, blocks))))


def start(program: Program, device: Device, a: Side, b: Side) -> Run:
    """The program, with both sides put as its kernels read them."""
    sides = [(arrange(k, a, 0), arrange(k, b, 1)) for k in program.kernels]
    return Run(program, device, tuple(sides))


def arrange(kernel: Kernel, side: Side, which: int) -> Tensor:
    """One side's images and variances as a kernel reads them: [n, numbers], each array rolled by its delay."""
    layout, parts = kernel.layout, []
    op = layout.stage.steps[0].op
    if isinstance(op, Input):
        parts += [_rows(layout, x, 1, 0, which) for x in side.known[op.slot].movedim(-2, 0)]  # [h, w, n] by channel
    for step in layout.norms:
        assert isinstance(step.op, Activation)
        stored = _stored(step.op, side.own[step.inputs[0]], kernel.units[step.node])
        parts.append(_rows(layout, stored, step.level, step.delay, which))
    none = side.energy.new_zeros(side.size, 1)
    return torch.cat(parts or [none], 1).to(DTYPES[layout.real]).contiguous()


def _stored(op: Activation, p: Tensor, unit: float) -> Tensor:
    """The number of each variance that an activation's formulas take."""
    if isinstance(op.dual, Rectifier):
        return (p.clamp(min=0.0) / unit).sqrt()
    return (1 + 2 * op.dual.b**2 * p if isinstance(op.dual, Erf) else 1 + p).rsqrt()


def _rows(layout: Layout, v: Tensor, level: int, delay: int, which: int) -> Tensor:
    """[h, w, n] with empty rows after it, rolled: [n, rows·w]."""
    empty = layout.periods[which] // level - v.shape[0]
    rows = torch.nn.functional.pad(v.movedim(-1, 0), (0, 0, 0, empty))
    return rows.roll(delay // level, 1).flatten(1)
