"""What combines rooms: how finite networks come to their limit, and which networks can be trained at all."""

from .convergence import Convergence, Trained, Training, convergence
from .trainability import Condition, Phase, Trainability, boundary, condition, phase, trainability

__all__ = [
    "Condition",
    "Convergence",
    "Phase",
    "Trainability",
    "Trained",
    "Training",
    "boundary",
    "condition",
    "convergence",
    "phase",
    "trainability",
]
