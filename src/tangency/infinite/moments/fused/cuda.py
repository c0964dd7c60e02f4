"""The fused recursion on a GPU: images and variances put as the kernels read them, kernels compiled, pairs run in portions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...activations.dual import Rectifier
from ...activations.duals import Erf
from ..core import Activation, Input, Moments, Side
from .kernel_text import Kernel, write
from .plan import Plan
from .source import Layout
from .stages import Stage, cut


class Launch(Protocol):
    """Runs a kernel's text over a grid of blocks with these arguments."""

    def __call__(self, kernel: Kernel, grid: tuple[int, int], args: Sequence[Tensor | int]) -> None:
        """Returns when the work is queued."""


def arrange(layout: Layout, units: dict[int, float], side: Side, which: int, plan: Plan) -> Tensor:
    """One side's images and variances as a kernel reads them: [n, numbers], each array rolled by its delay."""
    parts = []
    if layout.channels:
        op = layout.stage.steps[0].op
        assert isinstance(op, Input)
        parts += [_rows(layout, x, 1, 0, which) for x in side.known[op.slot].movedim(-2, 0)]  # [h, w, n] by channel
    for step in layout.norms:
        assert isinstance(step.op, Activation)
        p = side.own[step.inputs[0]]
        parts.append(_rows(layout, _stored(step.op, p, units[step.node]), step.level, step.delay, which))
    dtype = torch.float32 if layout.real == "float" else torch.float64
    return torch.cat(parts, 1).to(dtype).contiguous() if parts else torch.zeros(side.size, 1, dtype=dtype)


def _stored(op: Activation, p: Tensor, unit: float) -> Tensor:
    """The number of each variance that an activation's formulas take."""
    if isinstance(op.dual, Rectifier):
        return (p.clamp(min=0.0) / unit).sqrt()
    return (1 + 2 * op.dual.b**2 * p if isinstance(op.dual, Erf) else 1 + p).rsqrt()


def _rows(layout: Layout, v: Tensor, level: int, delay: int, which: int) -> Tensor:
    """[h, w, n] with empty rows after it, rolled: [n, rows·w]."""
    empty = layout.period[which] // level - v.shape[0]
    rows = torch.nn.functional.pad(v.movedim(-1, 0), (0, 0, 0, empty))
    return rows.roll(delay // level, 1).flatten(1)


@dataclass
class Program:
    """The kernels of a plan, in order, and how they are launched."""

    plan: Plan
    stages: list[Stage]
    kernels: list[Kernel]

    @property
    def cells(self) -> int:
        """Numbers in memory per pair of images, between stages."""
        return max((2 * k.layout.classes * k.layout.rows * k.layout.width for k in self.kernels[1:]), default=0)


def program(plan: Plan, real: str, tangent: bool, windows: int, **options: object) -> Program | str:
    """The program of a plan, or why it has none."""
    stages = cut(plan, windows)
    if isinstance(stages, str):
        return stages
    kernels: list[Kernel] = []
    later = 1
    flat = plan.flat
    for k in range(len(stages) - 1, -1, -1):  # from the end, which decides what offsets matter
        stage = stages[k]
        if prod(stage.pool) > 1:
            later, flat = 1, False
        layout = Layout(stage, later, 2, flat, real, tangent)
        kernels.insert(0, write(layout, **options))
        later = later * stage.stride if prod(stages[k].pool) == 1 else later
    return Program(plan, stages, kernels)


def run(p: Program, launch: Launch, a: Side, b: Side, left: Tensor, right: Tensor) -> Moments:
    """The moments at the end of the plan for pairs (left[k], right[k]) of samples."""
    device, count = left.device, len(left)
    real = torch.float32 if p.kernels[0].layout.real == "float" else torch.float64
    none = torch.zeros(1, device=device, dtype=real)
    cov, ntk = none, none
    sums = none.double()
    for k, kernel in enumerate(p.kernels):
        layout, stage = kernel.layout, kernel.layout.stage
        lefts, rights = (arrange(layout, kernel.units, side, w, p.plan) for w, side in enumerate((a, b)))
        if k:
            cov, ntk = (regroup(v, p.kernels[k - 1].layout, layout, count) for v in (cov, ntk))
        parts = 1
        outs = [none, none]
        if stage.ends == "rows":
            size = layout.classes * (layout.rows // stage.sink.level) * (layout.width // stage.sink.level)
            outs = [torch.zeros(count * size, device=device, dtype=real) for _ in range(2 if layout.tangent else 1)]
            outs = [*outs, none][:2]
        else:
            parts = segments(kernel, count)
            sums = torch.zeros(count, layout.classes, parts, 2, dtype=torch.float64, device=device)
        warps = -(-count // layout.groups) if layout.flat else count * kernel.warps_per_pair
        grid = (-(-warps // kernel.warps), parts)
        launch(kernel, grid, (lefts, rights, left.int(), right.int(), cov, ntk, *outs, sums, count, parts))
        cov, ntk = outs
    last = p.kernels[-1]
    h, w = (n // last.layout.stage.stride for n in last.layout.stage.grid)
    total = sums.sum((1, 2)) * (last.unit / (h * w) ** (1 if p.plan.flat else 2))
    mean = 1.0 if p.plan.flat or p.plan.nodes[-1].op.mean else float((h * w) ** 2)
    return Moments(total[:, 0] * mean, total[:, 1] * mean if last.tangent else None, ())


def segments(kernel: Kernel, count: int) -> int:
    """Into how many parts the rows of a pair are cut."""
    return 1


def regroup(v: Tensor, before: Layout, after: Layout, count: int) -> Tensor:
    """What one stage wrote, as the next one reads it: the same, or pooled."""
    if v.numel() == 1:
        return v
    if prod(before.stage.pool) == 1:
        return v
    return pooled(v, before, after, count)


def pooled(v: Tensor, before: Layout, after: Layout, count: int) -> Tensor:
    """Means over windows of both sides: [pairs, classes, rows, width] of one layout to that of another (reference)."""
    level = before.stage.sink.level
    width, height = before.width // level, before.height // level
    stride = before.stride // level
    rows = before.rows // level
    v = v.view(count, before.classes, rows, width)
    device = v.device
    ys, yt = torch.arange(height, device=device), torch.arange(height, device=device)
    # Row of the stream at which left row s meets right row t
    period = before.period[0] // level
    cycles = before.cycles
    cycle = ((ys[:, None] - yt) // stride) % cycles
    row = cycle * period + ys[:, None]
    xs = torch.arange(width, device=device)
    kind = ((xs - xs[:, None]) % width) // stride  # [sx, tx]
    full = v[:, kind[None, None], row[:, :, None, None], xs[:, None].expand(width, width)[None, None]]
    # [pairs, sy, ty, sx, tx]
    ky, kx = before.stage.pool
    full = full.view(count, height // ky, ky, height // ky, ky, width // kx, kx, width // kx, kx).mean((2, 4, 6, 8))
    h, w = height // ky, width // kx
    out = v.new_zeros(count, after.classes, after.rows, after.width)
    for c in range(after.cycles):
        for r in range(h):
            t = (r - c * after.stride) % after.period[1]
            if t < h:
                for kind_ in range(after.classes):
                    x = torch.arange(w, device=device)
                    out[:, kind_, c * after.period[0] + r] = full[:, r, t, x, (x + kind_ * after.stride) % w]
    return out.flatten()
