"""What combines rooms: how finite networks come to their limit, which can be trained at all, and what they learn."""

from .anisotropy import Anisotropy, anisotropy, separable
from .convergence import Convergence, GradientDescent, Trained, convergence
from .eigenfunctions import Eigenfunctions, eigenfunctions
from .learning import SCHEDULE, Learning, Trial, learn
from .mixed_derivative import MixedDerivative
from .phases import Phase, boundary, phase
from .trainability import Condition, Trainability, condition, trainability

__all__ = [
    "SCHEDULE",
    "Anisotropy",
    "Condition",
    "Convergence",
    "Eigenfunctions",
    "GradientDescent",
    "Learning",
    "MixedDerivative",
    "Phase",
    "Trainability",
    "Trained",
    "Trial",
    "anisotropy",
    "boundary",
    "condition",
    "convergence",
    "eigenfunctions",
    "learn",
    "phase",
    "separable",
    "trainability",
]
