"""Exact neural tangent kernels of any PyTorch module.

>>> import torch, tangency as tg
>>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)), torch.randn(5, 3)
>>> tg.trace_ntk(model)(x).shape
torch.Size([5, 5])
"""

from . import models, testing
from ._version import __version__
from .combine import add as sum
from .combine import cosine, scale
from .errors import (
    DamagedTile,
    IncompleteGram,
    InputError,
    MemoryBudgetError,
    ModelError,
    NonFiniteError,
    PerformanceWarning,
    StoreError,
    StoreMismatch,
    StoreWarning,
    TangencyError,
    TangencyWarning,
    WorkerLost,
)
from .gram import Gram
from .kernel import Kernel
from .ntk import conjugate_kernel, embedding_kernel, full_ntk, head_ntk, pseudo_ntk, trace_ntk
from .tiles.executors import Workers
from .tiles.ray import RayExecutor
from .tiles.run import compute
from .tiles.source import from_dataset
from .tiles.store import open_gram

__all__ = [
    "DamagedTile",
    "Gram",
    "IncompleteGram",
    "InputError",
    "Kernel",
    "MemoryBudgetError",
    "ModelError",
    "NonFiniteError",
    "PerformanceWarning",
    "RayExecutor",
    "StoreError",
    "StoreMismatch",
    "StoreWarning",
    "TangencyError",
    "TangencyWarning",
    "WorkerLost",
    "Workers",
    "__version__",
    "compute",
    "conjugate_kernel",
    "cosine",
    "embedding_kernel",
    "from_dataset",
    "full_ntk",
    "head_ntk",
    "models",
    "open_gram",
    "pseudo_ntk",
    "scale",
    "sum",
    "testing",
    "trace_ntk",
]
