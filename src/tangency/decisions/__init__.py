"""Why did the network say that: `explain`, what it finds, and the kernels that it compares."""

from .explained import Decisions, View, explain, logits_of
from .named import TITLES, Grams, kernels

__all__ = ["TITLES", "Decisions", "Grams", "View", "explain", "kernels", "logits_of"]
