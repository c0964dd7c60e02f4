"""Why did the network say that: `explain`, the kernels that it compares, attributions, and poisoned samples found."""

from .attribution import Attribution, attributions, summarize
from .compared import TITLES, GramPair, Grams, kernels
from .explained import Decisions, Explanation, explain, logits_of
from .forensics import Flags, Forensics, Patch, Poisoned, detect, flag, poison

__all__ = [
    "TITLES",
    "Attribution",
    "Decisions",
    "Explanation",
    "Flags",
    "Forensics",
    "GramPair",
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
