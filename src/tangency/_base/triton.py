"""The one place that imports Triton kernels: a GPU machine may have Triton or not, a CPU never needs it."""

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

from ..errors import PerformanceWarning


@cache
def load_kernels(module: str) -> ModuleType | None:
    """The module with the kernels (`tangency.engine.fused_triton`, …), or None where there is no Triton."""
    try:
        return import_module(module)
    except ImportError as e:
        if e.name != "triton":
            why = f"Triton is installed and cannot be used ({e}); its kernels are gone without. Install it again."
            warnings.warn(why, PerformanceWarning, stacklevel=2)
        return None
