"""What the layers of a network hold: outputs, probes, collapse, the last layer at its optimum, shifts of the data."""

from .gain import Gain, Paired
from .head_choice import Choice
from .last_layer import Refit, refit_last_layer
from .layers import Layers, layer_outputs

__all__ = ["Choice", "Gain", "Layers", "Paired", "Refit", "layer_outputs", "refit_last_layer"]
