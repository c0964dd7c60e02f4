"""Samples with their classes, from memory, from the official files of standard sets, or from a table.

Nothing is downloaded and nothing is unpickled; sizes, magic numbers and labels are checked before anything is returned.
"""

from .cells import MISSING
from .encoding import Encoding
from .images import cifar10, digits, fashion_mnist, idx, mnist
from .labelled import Labelled, TrainTest, labelled, same_columns
from .table import csv

__all__ = [
    "MISSING",
    "Encoding",
    "Labelled",
    "TrainTest",
    "cifar10",
    "csv",
    "digits",
    "fashion_mnist",
    "idx",
    "labelled",
    "mnist",
    "same_columns",
]
