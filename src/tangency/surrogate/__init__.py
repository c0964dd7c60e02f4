"""Kernel machines that stand in for a network, and how faithful they are."""

from tangency.surrogate.faithful import Faithfulness, Interval, MonotoneMap, faithfulness, kendall, log_odds, monotone
from tangency.surrogate.model import Surrogate, default_reg, fit

__all__ = [
    "Faithfulness",
    "Interval",
    "MonotoneMap",
    "Surrogate",
    "default_reg",
    "faithfulness",
    "fit",
    "kendall",
    "log_odds",
    "monotone",
]
