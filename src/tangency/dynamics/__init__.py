"""Training in function space, where the kernel is all that counts: df/dt = −lr·K ∂L/∂f.

In closed form for the square loss (`flow`), as an ODE for any loss (`integrate`), step by step as torch.optim.SGD does
it (`descend`), by any optimizer on a module (`train`). Then what it shows of a real network: what one step does
(`one_step`, `learning_path`), whether the kernel stays where it was (`Monitor`), and the bounds on that
(`linearization_quality`).
"""

from .bounds import Bound, LazyRun, linearization_quality
from .ensembles import ensemble
from .evolution import Evolution, Regime
from .gradient_flow import Flow, flow, max_learning_rate
from .hooks import lightning_callback, trainer_callback
from .lazy_or_rich import LazyOrRich
from .monitor import Monitor
from .path import Path, descend, integrate
from .quantities import QUANTITIES, Quantity
from .step import Decomposition, learning_path, one_step
from .training import History, train

__all__ = [
    "QUANTITIES",
    "Bound",
    "Decomposition",
    "Evolution",
    "Flow",
    "History",
    "LazyOrRich",
    "LazyRun",
    "Monitor",
    "Path",
    "Quantity",
    "Regime",
    "descend",
    "ensemble",
    "flow",
    "integrate",
    "learning_path",
    "lightning_callback",
    "linearization_quality",
    "max_learning_rate",
    "one_step",
    "train",
    "trainer_callback",
]
