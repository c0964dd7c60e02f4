"""Samples that nothing in the training set is like."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.results import Result
from .._base.types import Float, Int

# Beyond so many standard deviations (by the median, of the logarithm's) a sample is unusual (Iglewicz & Hoaglin 1993).
BEYOND = 3.5
PER_MAD = 1.4826
TINY = 1e-12


@dataclass(frozen=True, eq=False, repr=False)
class Support(Result):
    """How much of each sample's k(x, x) the other training samples leave open, and which have far more than usual.

    `unexplained`: from 0 (the others tell all) to 1 (nothing is like it), [n]: for test samples the variance of a
    Gaussian process, for training samples that without the sample itself. `outliers`: numbers of those beyond `limit`,
    the least supported first.
    """

    unexplained: Float[Tensor, " n"]
    outliers: Int[Tensor, " o"]
    limit: float

    def __repr__(self) -> str:
        return f"Support({len(self.outliers)} of {len(self.unexplained)} samples beyond {self.limit:.3g})"


def support(unexplained: Tensor, usual: Tensor | None = None) -> Support:
    """Which of these are unusual beside `usual` (default: beside one another)."""
    values = unexplained.detach().cpu().double()
    logs = (values if usual is None else usual.detach().cpu().double()).clamp_min(TINY).log()
    middle = logs.median()
    spread = PER_MAD * (logs - middle).abs().median()
    limit = min(1.0, float((middle + BEYOND * spread).exp()))
    # Where all are alike but for rounding, none is unusual.
    beyond = (values > limit * (1 + 1e-6)).nonzero()[:, 0] if float(spread) > 0 else torch.zeros(0, dtype=torch.long)
    return Support(values, beyond[values[beyond].argsort(descending=True, stable=True)], limit)
