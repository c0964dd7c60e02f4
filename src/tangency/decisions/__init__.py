"""Why did the network say that: `explain`, the kernels that it compares, attributions, and poisoned samples found."""

from .attribution import Attribution, attributions, summarize
from .explained import Decisions, View, explain, logits_of
from .forensics import Forensics, Patch, Poisoned, detect, flag, poison
from .named import TITLES, Grams, kernels

__all__ = [
    "TITLES",
    "Attribution",
    "Decisions",
    "Forensics",
    "Grams",
    "Patch",
    "Poisoned",
    "View",
    "attributions",
    "detect",
    "explain",
    "flag",
    "kernels",
    "logits_of",
    "poison",
    "summarize",
]
