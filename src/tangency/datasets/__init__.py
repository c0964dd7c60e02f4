"""Samples with their classes, from memory, from folders of images, official files of standard sets, or tables.

Nothing is downloaded and nothing is unpickled; sizes, magic numbers and labels are checked before anything is returned.
"""

from .cells import MISSING
from .encoding import Encoding
from .folders import folder
from .frames import frame, parquet
from .hugging_face import from_hf
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
    "folder",
    "frame",
    "from_hf",
    "idx",
    "labelled",
    "mnist",
    "parquet",
    "same_columns",
]
