"""Why did the network say that: `explain`, the kernels that it compares, attributions, and poisoned samples found."""

from ..kernels.names import TITLES
from .attribution import Attribution, attributions, summarize
from .audited import audit
from .compared import GramPair, Grams, kernels
from .explained import explain, logits_of
from .forensics import Flags, Forensics, Patch, Poisoned, detect, flag, poison
from .result import Decisions, Explanation
from .verdict import Verdict, verdict

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
    "Verdict",
    "attributions",
    "audit",
    "detect",
    "explain",
    "flag",
    "kernels",
    "logits_of",
    "poison",
    "summarize",
    "verdict",
]
