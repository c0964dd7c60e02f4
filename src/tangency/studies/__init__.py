"""What combines rooms: how finite networks come to their limit, and which networks can be trained at all."""

from .convergence import Convergence, GradientDescent, Trained, convergence
from .trainability import Condition, Phase, Trainability, boundary, condition, phase, trainability

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
