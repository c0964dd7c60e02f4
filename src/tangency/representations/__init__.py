"""What the layers of a network hold: outputs, probes, collapse, the last layer at its optimum, shifts of the data."""

from .layers import Layers, layer_outputs

__all__ = ["Layers", "layer_outputs"]
