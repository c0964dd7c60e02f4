"""Do two samples come from one distribution, and which samples are outliers: tests and scores with any kernel."""

from .classified import ClassifierTest, classifier_test, classifier_test_features
from .intervals import AUROC, Interval, auroc
from .two_sample import TwoSample, mmd, mmd_features

__all__ = [
    "AUROC",
    "ClassifierTest",
    "Interval",
    "TwoSample",
    "auroc",
    "classifier_test",
    "classifier_test_features",
    "mmd",
    "mmd_features",
]
