"""What the layers of a network hold: outputs, probes, collapse, the last layer at its optimum, shifts of the data."""

from .collapse import Collapse, collapse
from .gain import Gain, Paired
from .head_choice import Choice
from .last_layer import Refit, refit_last_layer
from .layers import Layers, layer_outputs
from .probing import ProbedLayer, Probing, probe

__all__ = [
    "Choice",
    "Collapse",
    "Gain",
    "Layers",
    "Paired",
    "ProbedLayer",
    "Probing",
    "Refit",
    "collapse",
    "layer_outputs",
    "probe",
    "refit_last_layer",
]
