"""Exact neural tangent kernels of any PyTorch module.

>>> import torch, tangency as tg
>>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)), torch.randn(5, 3)
>>> tg.trace_ntk(model)(x).shape
torch.Size([5, 5])
"""

from . import (
    attribution,
    datasets,
    decisions,
    dynamics,
    forensics,
    infinite,
    models,
    projection,
    regress,
    report,
    solve,
    surrogate,
    testing,
)
from ._version import __version__
from .combine import add as sum
from .combine import cosine, scale
from .decisions import explain
from .errors import (
    DamagedTile,
    DidNotConverge,
    IncompleteGram,
    InputError,
    MemoryBudgetError,
    ModelError,
    NonFiniteError,
    NotPositiveDefinite,
    PerformanceWarning,
    PrecisionLoss,
    StoreError,
    StoreMismatch,
    StoreWarning,
    TangencyError,
    TangencyWarning,
    UnsupportedModule,
    WorkerLost,
)
from .gram import Gram
from .infinite import infinite_nngp, infinite_ntk
from .kernel import Kernel
from .linearize import Linearized, linearize
from .ntk import conjugate_kernel, embedding_kernel, full_ntk, head_ntk, pseudo_ntk, trace_ntk
from .projection import projected, projection_error
from .tiles.executors import Workers
from .tiles.ray import RayExecutor
from .tiles.run import compute
from .tiles.source import from_dataset
from .tiles.store import open_gram

__all__ = [
    "DamagedTile",
    "DidNotConverge",
    "Gram",
    "IncompleteGram",
    "InputError",
    "Kernel",
    "Linearized",
    "MemoryBudgetError",
    "ModelError",
    "NonFiniteError",
    "NotPositiveDefinite",
    "PerformanceWarning",
    "PrecisionLoss",
    "RayExecutor",
    "StoreError",
    "StoreMismatch",
    "StoreWarning",
    "TangencyError",
    "TangencyWarning",
    "UnsupportedModule",
    "WorkerLost",
    "Workers",
    "__version__",
    "attribution",
    "compute",
    "conjugate_kernel",
    "cosine",
    "datasets",
    "decisions",
    "dynamics",
    "embedding_kernel",
    "explain",
    "forensics",
    "from_dataset",
    "full_ntk",
    "head_ntk",
    "infinite",
    "infinite_nngp",
    "infinite_ntk",
    "linearize",
    "models",
    "open_gram",
    "projected",
    "projection",
    "projection_error",
    "pseudo_ntk",
    "regress",
    "report",
    "scale",
    "solve",
    "sum",
    "surrogate",
    "testing",
    "trace_ntk",
]
