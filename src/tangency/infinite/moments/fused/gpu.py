"""The fused recursion on a GPU: its kernels compiled by torch's own NVRTC when they are first needed, and launched."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core import Input, Moments, Side
from ..recursion import Recursion, with_own_moments
from .cuda import ROOM, Device, Run, make_program, start
from .layout import Real
from .plan import Met, Plan
from .source import Kernel

Compiled = Any  # torch's own type for it is private
ROWS = 4096  # samples of a side at a time (heuristic)


def why_not(plan: Plan, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a plan's kernels cannot be written, or not compiled there; None if they can. Cost: compiles them, once."""
    if torch.version.cuda is None or not hasattr(torch.cuda, "_compile_kernel"):
        return f"torch {torch.__version__} compiles no CUDA kernels at run time (2.9 and later do)"
    return _refused(plan, _real(plan, dtype == torch.float64), device.index or 0)


def _real(plan: Plan, wide: bool) -> Real:
    return "double" if wide or plan.flat else "float"


@lru_cache(maxsize=256)
def _refused(plan: Plan, real: Real, device: int) -> str | None:
    program = make_program(plan, real, True)
    if isinstance(program, str):
        return program
    try:
        for kernel in program.kernels:
            _compiled(kernel.text, "stage", kernel.shared, device)
    except (RuntimeError, OSError) as e:  # no libraries, or a compiler that does not take them
        return f"CUDA kernels cannot be compiled here ({str(e).strip().splitlines()[0]})"
    return None


@lru_cache(maxsize=256)
def _compiled(text: str, name: str, shared: int, device: int) -> Compiled:
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(text, name)
        if shared >= 48 << 10:
            kernel.set_shared_memory_config(shared)
    return kernel


class Gpu:
    """Launches on one GPU, in torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index

    def stage(self, kernel: Kernel, blocks: tuple[int, int], args: Sequence[Tensor | int]) -> None:
        """Queue a stage's kernel."""
        run = _compiled(kernel.text, "stage", kernel.shared, self.index)
        with torch.cuda.device(self.index):
            run(grid=(*blocks, 1), block=(32 * kernel.warps, 1, 1), args=list(args), shared_mem=kernel.shared)

    def pool(self, text: str, source: Tensor, to: Tensor) -> None:
        """Queue the pooling between two stages."""
        run = _compiled(text, "pool", 0, self.index)
        with torch.cuda.device(self.index):
            run(grid=(-(-to.numel() // 256), 1, 1), block=(256, 1, 1), args=[source, to, to.numel()])


class GpuBackend:
    """A plan on a GPU. Pairs in float32 are computed from sides in float64.

    Where all positions but a pair's own are left out (Flatten), in float64 too: it takes three times as long, which is
    a quarter of a microsecond, and in float32 flat areas of real images would be off by 1.6e-5 (measured).
    """

    exact = False

    def __init__(self, device: torch.device, runner: Device | None = None) -> None:
        self.device = device
        self.runner = Gpu(device) if runner is None else runner

    def _run(self, plan: Plan, a: Side, b: Side, tangent: bool) -> Run:
        program = make_program(plan, _real(plan, a.exact is None), tangent)
        assert not isinstance(program, str)
        return start(program, self.runner, *(_in_full(side) for side in (a, b)))

    def _room(self) -> int:
        return min(ROOM, torch.cuda.mem_get_info(self.device)[0] // 4) if self.device.type == "cuda" else ROOM

    def fused_moments(self, plan: Plan, a: Side, b: Side, tangent: bool, half: bool) -> Met:
        """The moments of all pairs [n, m] where the plan ends; `half`: both sides are one, and (j, i) is (i, j)."""
        if half:
            left, right = torch.triu_indices(a.size, a.size, device=self.device)
        else:
            index = torch.arange(a.size * b.size, device=self.device)
            left, right = index // b.size, index % b.size
        met = self._run(plan, a, b, tangent).moments(left, right, self._room())

        def matrix(v: Tensor) -> Tensor:
            """The pairs, each at its place."""
            out = a.energy.new_empty(a.size, b.size)
            out[left, right] = v.to(out)
            if half:
                out[right, left] = v.to(out)
            return out

        moments = Moments(matrix(met.cov), None if met.ntk is None else matrix(met.ntk), ())
        source = plan.nodes[0].op
        assert isinstance(source, Input)
        x, y = (side.known[source.slot].flatten(0, -2) for side in (a, b))
        return Met(moments, x.T @ y / len(x))

    def fused_pairs(self, plan: Plan, a: Side, b: Side, tangent: bool) -> Moments:
        """The moments where the plan ends of samples that meet one by one [n]."""
        index = torch.arange(a.size, device=self.device)
        met = self._run(plan, a, b, tangent).moments(index, index, self._room())
        return Moments(met.cov.to(a.energy), None if met.ntk is None else met.ntk.to(a.energy), ())

    def learn_variances(self, plan: Plan, side: Side) -> None:
        """Put the variances that the plan's activations read into `side.own`, in float64 by the plain recursion."""
        if side.exact is None:
            side.own.update(with_own_moments(Recursion(plan.nodes), side).own)
        else:  # pairs go by the float64 side; what follows the plan goes by this one
            side.own.update({k: v.to(side.energy) for k, v in side.exact.own.items() if k >= plan.end})

    def rows_at_a_time(self, plan: Plan, workspace: int | None) -> int:
        """Whole tiles: pairs are cut into portions where they are launched."""
        return ROWS


def _in_full(side: Side) -> Side:
    """The samples in float64, with their variances."""
    return side if side.exact is None else side.exact_rows(torch.arange(side.size, device=side.energy.device))
