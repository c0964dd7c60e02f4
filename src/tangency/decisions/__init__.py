"""Why did the network say that: `explain`, the kernels that it compares, attributions, and poisoned samples found."""

from .attribution import Attribution, attributions, summarize
from .compared import TITLES, Grams, kernels
from .explained import Decisions, Explanation, explain, logits_of
from .forensics import Forensics, Patch, Poisoned, detect, flag, poison

__all__ = [
    "TITLES",
    "Attribution",
    "Decisions",
    "Explanation",
    "Forensics",
    "Grams",
    "Patch",
    "Poisoned",
    "attributions",
    "detect",
    "explain",
    "flag",
    "kernels",
    "logits_of",
    "poison",
    "summarize",
]
