"""Linear algebra with Gram matrices, in memory or on disk: systems, factors, eigenpairs.

>>> import torch, tangency as tg
>>> tg.linalg.solve(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([3.0, 3.0])).value.round(decimals=4)
tensor([1., 1.])
"""

from .eigen import Spectrum, spectrum, top, top_of
from .systems import CG, Auto, Cholesky, Eigh, Nystrom, PartialCholesky, Solution, Solver, solve

__all__ = [
    "CG",
    "Auto",
    "Cholesky",
    "Eigh",
    "Nystrom",
    "PartialCholesky",
    "Solution",
    "Solver",
    "Spectrum",
    "solve",
    "spectrum",
    "top",
    "top_of",
]
