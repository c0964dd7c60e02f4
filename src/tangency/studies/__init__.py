"""What combines rooms: finite networks and their limit, which networks can be trained at all, and what they learn."""

from ..spectra.mixed_derivative import MixedDerivative
from .aligned import Alignments, Transition, alignments, follow, transition
from .anisotropy import Anisotropy, anisotropy, separable
from .conjugate import ConjugateStudy, Moment, conjugate_classification, conjugate_regression
from .conjugate_pictures import draw_courses, draw_runs
from .convergence import Convergence, GradientDescent, Trained, convergence
from .eigenfunctions import Eigenfunctions, eigenfunctions
from .grids import BOUNDARIES, FUNCTIONS, Grid, Grids
from .kernel_bounds import Bound, Bounds, ClassificationFit, RegressionFit, classification_bounds, regression_bounds
from .learning import SCHEDULE, Learning, Trial, learn
from .phases import Phase, boundary, phase
from .single_unit import SingleUnit, single_unit
from .student_pictures import draw_students
from .students import Lazy, Learned, Optimizer, lazy, train_two_layer
from .teachers import Normalised, Taught, normalised, teacher
from .trainability import Condition, Trainability, condition, trainability
from .two_layer import TwoLayer, two_layer

__all__ = [
    "BOUNDARIES",
    "FUNCTIONS",
    "SCHEDULE",
    "Alignments",
    "Anisotropy",
    "Bound",
    "Bounds",
    "ClassificationFit",
    "Condition",
    "ConjugateStudy",
    "Convergence",
    "Eigenfunctions",
    "GradientDescent",
    "Grid",
    "Grids",
    "Lazy",
    "Learned",
    "Learning",
    "MixedDerivative",
    "Moment",
    "Normalised",
    "Optimizer",
    "Phase",
    "RegressionFit",
    "SingleUnit",
    "Taught",
    "Trainability",
    "Trained",
    "Transition",
    "Trial",
    "TwoLayer",
    "alignments",
    "anisotropy",
    "boundary",
    "classification_bounds",
    "condition",
    "conjugate_classification",
    "conjugate_regression",
    "convergence",
    "draw_courses",
    "draw_runs",
    "draw_students",
    "eigenfunctions",
    "follow",
    "lazy",
    "learn",
    "normalised",
    "phase",
    "regression_bounds",
    "separable",
    "single_unit",
    "teacher",
    "train_two_layer",
    "trainability",
    "transition",
    "two_layer",
]
