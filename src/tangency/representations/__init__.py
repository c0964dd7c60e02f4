"""What the layers of a network hold: outputs, probes, collapse, the last layer at its optimum, shifts of the data."""

from .carriers import Components
from .classes import ClassShift
from .collapse import Collapse, collapse
from .filtering import Downstream, Filtered
from .gain import Gain, Paired
from .head_choice import Choice
from .last_layer import Refit, refit_last_layer
from .layers import Layers, layer_outputs
from .probing import ProbedLayer, Probing, probe
from .shift import shift
from .shifted import Shift

__all__ = [
    "Choice",
    "ClassShift",
    "Collapse",
    "Components",
    "Downstream",
    "Filtered",
    "Gain",
    "Layers",
    "Paired",
    "ProbedLayer",
    "Probing",
    "Refit",
    "Shift",
    "collapse",
    "layer_outputs",
    "probe",
    "refit_last_layer",
    "shift",
]
