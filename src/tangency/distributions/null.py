"""What a statistic would be if there were no difference: permutations of the samples, the wild bootstrap."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from .._base.types import Float, Int
from ..errors import InputError

# What sums of a kernel's numbers in float64 are off by, relative to its size (heuristic: a thousand roundings).
ROUNDING = 1e-13
# Bytes of weights at a time where no memory is given (heuristic).
DRAWN_BYTES = 128 << 20


def widths(draws: int, rows: int, memory: int | None) -> Iterator[int]:
    """How many draws are made at a time, so that three columns of `rows` numbers for each fit into the memory."""
    step = max(1, (DRAWN_BYTES if memory is None else memory) // (3 * 8 * rows))
    for start in range(0, draws, step):
        yield min(step, draws - start)


def partitions(groups: int, of_x: int, draws: int) -> bool:
    """Whether there are so few ways to choose `of_x` of the groups that all are gone through."""
    return math.comb(groups, of_x) <= draws


def every_partition(groups: Int[Tensor, " N"], of_x: int) -> Float[Tensor, "N b"]:
    """1 where a sample is x's, for each way to choose `of_x` of the groups; the first is the one that is there."""
    count = int(groups.max()) + 1
    chosen = torch.tensor(list(combinations(range(count), of_x)))
    made = torch.zeros(count, len(chosen), dtype=torch.float64)
    made.scatter_(0, chosen.T, 1.0)
    return made[groups]


def permuted(groups: Int[Tensor, " N"], of_x: int, count: int, generator: torch.Generator) -> Float[Tensor, "N b"]:
    """1 where a sample is x's, for random choices of `of_x` of the groups."""
    # A row of numbers for each draw, so that it does not matter how many are drawn at a time.
    order = torch.rand(count, int(groups.max()) + 1, generator=generator, dtype=torch.float64).argsort(1)
    made = torch.zeros_like(order, dtype=torch.float64).scatter_(1, order[:, :of_x], 1.0)
    return made.T[groups]


def permuted_within(
    of_x: Tensor, parts: Sequence[Int[Tensor, " k"]], count: int, generator: torch.Generator
) -> Float[Tensor, "N b"]:
    """1 where a sample is x's, permuted within each part; samples of none keep what they are."""
    made = of_x.double().repeat(count, 1)
    numbers = torch.rand(count, len(of_x), generator=generator, dtype=torch.float64)
    for part in parts:
        made[:, part] = of_x[part].double()[numbers[:, part].argsort(1)]
    return made.T


def wild(n: int, length: float, count: int, generator: torch.Generator) -> Float[Tensor, "n b"]:
    """W_t = e^{−1/l} W_{t−1} + √(1 − e^{−2/l}) ε_t less its mean over t, for each of b draws; ε and W_0 are N(0, 1).

    Leucht & Neumann 2013; Chwialkowski, Sejdinovic & Gretton 2014, (6) and V_b2. Taking the mean away leaves less than
    the variance 1, of short series far less, and too many rejections; unlike there it is brought back to 1.
    """
    noise = torch.randn(count, n, generator=generator, dtype=torch.float64).T
    keep = math.exp(-1 / length)
    made = noise * math.sqrt(1 - keep**2)
    made[0] = noise[0]
    for t in range(1, n):
        made[t] += keep * made[t - 1]
    steps = torch.arange(n, dtype=torch.float64)
    of_mean = float(((2 * (n - steps) - n * (steps == 0)) * keep**steps).sum()) / n**2
    return (made - made.mean(0)) / math.sqrt(1 - of_mean)


def p_value(value: float, null: Float[Tensor, " b"], scale: float, *, every: bool) -> float:
    """The part of the draws at least as large as the value, which counts as one of them: (1 + #)/(1 + b).

    Where the draws are all there are, the value is among them: #/b. What is equal up to rounding counts as large.
    """
    # Nothing is larger than nan: it would be a rejection.
    if not math.isfinite(value) or not bool(null.isfinite().all()):
        raise InputError("the statistic overflows float64; scale the kernel, or the features, down.")
    large = int((null >= value - ROUNDING * scale).sum())
    return large / len(null) if every else (1 + large) / (1 + len(null))
