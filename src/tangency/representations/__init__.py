"""What the layers of a network hold: outputs, probes, collapse, the last layer at its optimum, shifts of the data."""

from .collapse import Collapse, collapse
from .layers import Layers, layer_outputs
from .probing import ProbedLayer, Probing, probe

__all__ = ["Collapse", "Layers", "ProbedLayer", "Probing", "collapse", "layer_outputs", "probe"]
