"""The one place that imports Triton kernels: a GPU machine may have Triton or not, a CPU never needs it."""

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def load_kernels(module: str) -> ModuleType | None:
    """The module with the kernels (`tangency.engine.fused_triton`, …), or None where there is no Triton."""
    try:
        return import_module(module)
    except ImportError:
        return None
