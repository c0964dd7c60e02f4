"""Samples with their classes, from memory, from the official files of standard sets, or from a table.

Nothing is downloaded and nothing is unpickled; sizes, magic numbers and labels are checked before anything is returned.
"""

from .images import cifar10, digits, fashion_mnist, idx, mnist
from .labelled import Labelled, labelled
from .table import csv

__all__ = ["Labelled", "cifar10", "csv", "digits", "fashion_mnist", "idx", "labelled", "mnist"]
