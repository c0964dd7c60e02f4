"""Kernel machines that stand in for a network, and how faithful they are."""

from tangency.engine.outputs import Kind, LogitsOf, Outputs
from tangency.surrogate.faithful import (
    Faithfulness,
    Interval,
    MonotoneMap,
    faithfulness,
    kendall,
    levelled,
    log_odds,
    monotone,
)
from tangency.surrogate.model import Surrogate, default_reg, fit

__all__ = [
    "Faithfulness",
    "Interval",
    "Kind",
    "LogitsOf",
    "MonotoneMap",
    "Outputs",
    "Surrogate",
    "default_reg",
    "faithfulness",
    "fit",
    "kendall",
    "levelled",
    "log_odds",
    "monotone",
]
