"""Large Gram matrices, tile by tile: in memory or in a store, made here or by workers.

`compute` makes one, `open_gram` opens one that lies in a store; both give a `Gram`, which is multiplied, sliced and
solved with whether or not it fits in memory. Who does what in this room:

- `compute`: a run, from the kernel and its inputs to the finished matrix
- `source`: inputs of any kind, by blocks (`from_dataset`)
- `plan`, `sweep`: how a memory budget cuts the matrix into tiles, and how they are made
- `rows`: values of each sample by itself, which are made and stored as a matrix is
- `target`: where finished tiles go
- `store`, `shelf`, `manifest`: matrices on disk; the files; what a store says of itself
- `witness`, `code`: whether a kernel is still the one that a store was begun with
- `executors`, `ray`, `work`: other processes and machines (`Workers`, `RayExecutor`), and the tasks that they are given
- `gram`, `indices`: what a matrix can do, and where its tiles lie
"""

from .compute import compute
from .executors import Workers
from .gram import DenseGram, Gram, GramView
from .ray import RayExecutor
from .source import from_dataset
from .store import StoredGram, open_gram

__all__ = [
    "DenseGram",
    "Gram",
    "GramView",
    "RayExecutor",
    "StoredGram",
    "Workers",
    "compute",
    "from_dataset",
    "open_gram",
]
