"""Do two samples come from one distribution, and which samples are outliers: tests and scores with any kernel."""

from .classified import ClassifierTest, classifier_test, classifier_test_features
from .density import Density, density
from .intervals import AUROC, Interval, auroc
from .outlying import Outliers, outliers, outliers_features
from .power import Power, level, power
from .two_sample import TwoSample, mmd, mmd_features

__all__ = [
    "AUROC",
    "ClassifierTest",
    "Density",
    "Interval",
    "Outliers",
    "Power",
    "TwoSample",
    "auroc",
    "classifier_test",
    "classifier_test_features",
    "density",
    "level",
    "mmd",
    "mmd_features",
    "outliers",
    "outliers_features",
    "power",
]
