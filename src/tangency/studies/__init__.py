"""What combines rooms: finite networks and their limit, which networks can be trained at all, and what they learn."""

from ..spectra.mixed_derivative import MixedDerivative
from .aligned import Alignments, Transition, alignments, follow, transition
from .anisotropy import Anisotropy, anisotropy, separable
from .convergence import Convergence, GradientDescent, Trained, convergence
from .eigenfunctions import Eigenfunctions, eigenfunctions
from .learning import SCHEDULE, Learning, Trial, learn
from .phases import Phase, boundary, phase
from .student_pictures import draw_students
from .students import Lazy, Learned, Optimizer, lazy, train_two_layer
from .teachers import Normalised, Taught, normalised, teacher
from .trainability import Condition, Trainability, condition, trainability
from .two_layer import TwoLayer, two_layer

__all__ = [
    "SCHEDULE",
    "Alignments",
    "Anisotropy",
    "Condition",
    "Convergence",
    "Eigenfunctions",
    "GradientDescent",
    "Lazy",
    "Learned",
    "Learning",
    "MixedDerivative",
    "Normalised",
    "Optimizer",
    "Phase",
    "Taught",
    "Trainability",
    "Trained",
    "Transition",
    "Trial",
    "TwoLayer",
    "alignments",
    "anisotropy",
    "boundary",
    "condition",
    "convergence",
    "draw_students",
    "eigenfunctions",
    "follow",
    "lazy",
    "learn",
    "normalised",
    "phase",
    "separable",
    "teacher",
    "train_two_layer",
    "trainability",
    "transition",
    "two_layer",
]
