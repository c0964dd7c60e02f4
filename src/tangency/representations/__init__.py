"""What the layers of a network hold: probes of each, the last one at its optimum, and shifts of the data they see."""

from .gain import Gain, Paired
from .head_choice import Choice
from .last_layer import Refit, refit_last_layer

__all__ = ["Choice", "Gain", "Paired", "Refit", "refit_last_layer"]
