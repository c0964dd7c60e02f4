"""Kernel machines that stand in for a network, and how faithful they are."""

from ..engine.outputs import Kind, LogitsOf, Outputs
from .faithful import (
    Faithfulness,
    Interval,
    MonotoneMap,
    balanced_accuracy,
    faithfulness,
    kendall,
    levelled,
    log_odds,
    monotone,
)
from .model import Surrogate, default_reg, fit

__all__ = [
    "Faithfulness",
    "Interval",
    "Kind",
    "LogitsOf",
    "MonotoneMap",
    "Outputs",
    "Surrogate",
    "balanced_accuracy",
    "default_reg",
    "faithfulness",
    "fit",
    "kendall",
    "levelled",
    "log_odds",
    "monotone",
]
