"""Exact neural tangent kernels of any PyTorch module.

>>> import torch, tangency as tg
>>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)), torch.randn(5, 3)
>>> tg.trace_ntk(model)(x).shape
torch.Size([5, 5])
"""

from typing import TYPE_CHECKING

from ._base.on_demand import import_on_demand
from ._version import __version__
from .errors import (
    DamagedTile,
    DidNotConverge,
    IncompleteGram,
    InputError,
    MemoryBudgetError,
    MissingLibrary,
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

# Read by editors and mypy, and by `import_on_demand`: a room is imported when one of its names is first asked for.
if TYPE_CHECKING:
    from . import (
        active,
        auditing,
        datasets,
        decisions,
        distributions,
        dynamics,
        infinite,
        linalg,
        models,
        plots,
        projection,
        regress,
        report,
        representations,
        spectra,
        studies,
        surrogate,
        testing,
        watch,
    )
    from . import estimators as estimators
    from .decisions import audit, explain
    from .doctor import doctor
    from .dynamics.linearized import Linearized, linearize
    from .gram.compute import compute
    from .gram.executors import Workers
    from .gram.gram import Gram
    from .gram.ray import RayExecutor
    from .gram.source import from_dataset
    from .gram.store import open_gram
    from .infinite import infinite_nngp, infinite_ntk
    from .kernels.combine import cosine, scale, sum
    from .kernels.estimate import probe_error
    from .kernels.gaussian import gaussian
    from .kernels.kernel import Kernel
    from .kernels.ntk import conjugate_kernel, embedding_kernel, full_ntk, head_ntk, pseudo_ntk, trace_ntk
    from .projection import projected, projection_error
    from .representations.last_layer import refit_last_layer
    from .representations.shift import shift  # not of the room: to mypy the name would be the module's, too

__all__ = [
    "DamagedTile",
    "DidNotConverge",
    "Gram",
    "IncompleteGram",
    "InputError",
    "Kernel",
    "Linearized",
    "MemoryBudgetError",
    "MissingLibrary",
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
    "active",
    "audit",
    "auditing",
    "compute",
    "conjugate_kernel",
    "cosine",
    "datasets",
    "decisions",
    "distributions",
    "doctor",
    "dynamics",
    "embedding_kernel",
    "explain",
    "from_dataset",
    "full_ntk",
    "gaussian",
    "head_ntk",
    "infinite",
    "infinite_nngp",
    "infinite_ntk",
    "linalg",
    "linearize",
    "models",
    "open_gram",
    "plots",
    "probe_error",
    "projected",
    "projection",
    "projection_error",
    "pseudo_ntk",
    "refit_last_layer",
    "regress",
    "report",
    "representations",
    "scale",
    "shift",
    "spectra",
    "studies",
    "sum",
    "surrogate",
    "testing",
    "trace_ntk",
    "watch",
]


def __dir__() -> list[str]:
    """What is public: rooms that are not (`engine`, `gram`, …) can be imported, and are not offered."""
    return sorted([*__all__, "estimators"])


import_on_demand(__name__)
