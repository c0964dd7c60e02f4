"""CUDA source compiled and launched by torch's own NVRTC, when it is first needed; None of this is touched elsewhere."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .source import Kernel

Compiled = Any  # torch's own type for it is private


def why_not(device: torch.device) -> str | None:
    """Why CUDA source cannot be compiled here; None if it can."""
    if device.type != "cuda":
        return f"the inputs are on {device.type}"
    if torch.version.cuda is None or not hasattr(torch.cuda, "_compile_kernel"):
        return f"torch {torch.__version__} compiles no CUDA kernels at run time (2.9 and later do)"
    return None


@lru_cache(maxsize=256)
def _compiled(text: str, name: str, shared: int, device: int) -> Compiled:
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(text, name)  # type: ignore[attr-defined]
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
