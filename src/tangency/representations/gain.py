"""What refitting a layer gained on given samples, loss and accuracy, with an interval of their paired differences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.results import Result
from .._base.types import Float

# Numbers drawn at a time in the bootstrap (heuristic): 32 MiB.
DRAWN = 1 << 22


@dataclass(frozen=True, eq=False, repr=False)
class Paired(Result):
    """A mean over the same samples before and after; `low`, `high`: an interval of after − before, where one is known.

    `level` is the part of the resamples (of the samples, with replacement) whose difference lies in the interval.
    """

    before: float
    after: float
    low: float | None = None
    high: float | None = None
    level: float = 0.95

    @property
    def change(self) -> float:
        """After − before."""
        return self.after - self.before

    def __repr__(self) -> str:
        between = "" if self.low is None else f" in [{self.low:.4g}, {self.high:.4g}]"
        return f"Paired({self.before:.4g} → {self.after:.4g}, change {self.change:.4g}{between})"


@dataclass(frozen=True, eq=False, repr=False)
class Gain(Result):
    """On `samples` samples: the mean loss and, of classes, the accuracy, before and after.

    `losses` [2, n]: of each sample, before and after.
    """

    samples: int
    loss: Paired
    accuracy: Paired | None
    losses: Float[Tensor, "2 n"]


def paired(before: Tensor, after: Tensor, w: Tensor, draws: int, seed: int, level: float = 0.95) -> Paired:
    """Weighted means of two numbers a sample, with percentiles of their difference over `draws` resamples (0: none)."""
    total = float(w.sum())
    means = [float((w * v).sum()) / total for v in (before, after)]
    if not draws or len(w) < 2:  # of one sample nothing is known of others
        return Paired(means[0], means[1], level=level)
    share = torch.stack([w * (after - before), w], 1).cpu()
    generator, n, found = torch.Generator().manual_seed(seed), len(w), []
    for count in torch.ones(draws).split(max(1, DRAWN // n)):
        index = torch.randint(n, (len(count), n), generator=generator)
        sums = share[index].sum(1)
        found.append(sums[:, 0] / sums[:, 1].clamp_min(torch.finfo(sums.dtype).tiny))
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.cat(found).double().quantile(tails).tolist()
    return Paired(means[0], means[1], low, high, level)


def gain(losses: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor] | None, w: Tensor, draws: int, seed: int) -> Gain:
    """Of losses and of which predictions are right, before and after, [n] each."""
    return Gain(
        len(w),
        paired(*losses, w, draws, seed),
        None if right is None else paired(right[0].double(), right[1].double(), w, draws, seed),
        torch.stack(losses),
    )
