"""Projected kernels: explicit features of a size that you choose, and what they cost in accuracy."""

from .error import ProjectionError, projection_error
from .features import Neighbours, StoredFeatures, nearest, open_features
from .kernel import KINDS, Projected, projected

__all__ = [
    "KINDS",
    "Neighbours",
    "Projected",
    "ProjectionError",
    "StoredFeatures",
    "nearest",
    "open_features",
    "projected",
    "projection_error",
]
