"""What combines rooms: how finite networks come to their limit, and which networks can be trained at all."""

from .convergence import Convergence, GradientDescent, Trained, convergence
from .phases import Phase, boundary, phase
from .trainability import Condition, Trainability, condition, trainability

__all__ = [
    "Condition",
    "Convergence",
    "GradientDescent",
    "Phase",
    "Trainability",
    "Trained",
    "boundary",
    "condition",
    "convergence",
    "phase",
    "trainability",
]
