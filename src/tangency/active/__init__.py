"""Which samples to label next: what each candidate's label would change, in closed form, and the usual baselines."""

from .batches import greedy_changes
from .campaign import Campaign
from .compare import Comparison, Gain, compare
from .lookahead import LookAhead, look_ahead
from .round import Round, Vectors
from .strategies import STRATEGIES

__all__ = [
    "STRATEGIES",
    "Campaign",
    "Comparison",
    "Gain",
    "LookAhead",
    "Round",
    "Vectors",
    "compare",
    "greedy_changes",
    "look_ahead",
]
