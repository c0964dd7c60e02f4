"""What combines rooms: finite networks and their limit, which networks can be trained, what they learn of a teacher."""

from .aligned import Alignments, Transition, alignments, follow, transition
from .convergence import Convergence, GradientDescent, Trained, convergence
from .phases import Phase, boundary, phase
from .pictures import draw_evolution
from .students import Lazy, Learned, Optimizer, lazy, learn
from .teachers import Normalised, Taught, normalised, teacher
from .trainability import Condition, Trainability, condition, trainability
from .two_layer import TwoLayer, two_layer

__all__ = [
    "Alignments",
    "Condition",
    "Convergence",
    "GradientDescent",
    "Lazy",
    "Learned",
    "Normalised",
    "Optimizer",
    "Phase",
    "Taught",
    "Trainability",
    "Trained",
    "Transition",
    "TwoLayer",
    "alignments",
    "boundary",
    "condition",
    "convergence",
    "draw_evolution",
    "follow",
    "lazy",
    "learn",
    "normalised",
    "phase",
    "teacher",
    "trainability",
    "transition",
    "two_layer",
]
