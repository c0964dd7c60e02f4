"""What a statistic would be if there were no difference: permutations of the samples, the wild bootstrap."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from .._base.types import Float, Int

# Numbers that are this near to each other, relative to the kernel's, are the same up to rounding (heuristic).
ROUNDING = 1e-11
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
    total = int(groups.max()) + 1
    made = torch.zeros(total, count, dtype=torch.float64)
    for k in range(count):
        made[torch.randperm(total, generator=generator)[:of_x], k] = 1.0
    return made[groups]


def permuted_within(
    of_x: Tensor, parts: Sequence[Int[Tensor, " k"]], count: int, generator: torch.Generator
) -> Float[Tensor, "N b"]:
    """1 where a sample is x's, permuted within each part; samples of none keep what they are."""
    made = of_x.double()[:, None].repeat(1, count)
    for part in parts:
        own = of_x[part].double()
        for k in range(count):
            made[part, k] = own[torch.randperm(len(part), generator=generator)]
    return made


def wild(n: int, length: float, count: int, generator: torch.Generator) -> Float[Tensor, "n b"]:
    """W_t = e^{−1/l} W_{t−1} + √(1 − e^{−2/l}) ε_t less its mean over t, for each of b draws; ε and W_0 are N(0, 1).

    Leucht & Neumann 2013; Chwialkowski, Sejdinovic & Gretton 2014, (6) and V_b2.
    """
    noise = torch.randn(count, n, generator=generator, dtype=torch.float64).T
    keep = math.exp(-1 / length)
    made = noise * math.sqrt(1 - keep**2)
    made[0] = noise[0]
    for t in range(1, n):
        made[t] += keep * made[t - 1]
    return made - made.mean(0)


def p_value(value: float, null: Float[Tensor, " b"], scale: float, *, every: bool) -> float:
    """The part of the draws at least as large as the value, which counts as one of them: (1 + #)/(1 + b).

    Where the draws are all there are, the value is among them: #/b. What is equal up to rounding counts as large.
    """
    large = int((null >= value - ROUNDING * scale).sum())
    return large / len(null) if every else (1 + large) / (1 + len(null))
