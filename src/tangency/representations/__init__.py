"""What the layers of a network hold: outputs, probes, collapse, the last layer at its optimum, shifts of the data."""

from .carriers import Components
from .classes import ClassShift
from .filtering import Downstream, Filtered
from .layers import Layers, layer_outputs
from .shift import shift
from .shifted import Shift

__all__ = ["ClassShift", "Components", "Downstream", "Filtered", "Layers", "Shift", "layer_outputs", "shift"]
