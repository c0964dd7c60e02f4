"""Regions where a network is wrong more often than elsewhere, and what the kernel says about why."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._base.results import Result
from .._base.types import Int
from .machine import Nearest

# Samples to a region, regions at most, principal components that they are found in (heuristics).
SAMPLES, REGIONS, COMPONENTS = 40, 40, 16
# The part of the regions found that may be found by chance.
DISCOVERIES = 0.05
# A cause is named where it is at least so many times as frequent as elsewhere, and so large a part (heuristics).
TIMES, PART = 2.0, 0.2


@dataclass(frozen=True, eq=False, repr=False)
class Region(Result):
    """Samples that are alike to the kernel, of which more are wrong than elsewhere.

    `samples`: their numbers, nearest the region's middle first. `mistakes` of them are wrong, `elsewhere` is the part
    of all samples that is. `chance`: how likely so many are in a region of this size. `why`: a sentence.
    """

    samples: Int[Tensor, " s"]
    mistakes: int
    elsewhere: float
    chance: float
    why: str

    @property
    def rate(self) -> float:
        """The part that is wrong."""
        return self.mistakes / len(self.samples)

    def __repr__(self) -> str:
        return f"Region({self.mistakes} of {len(self.samples)} wrong, elsewhere {self.elsewhere:.1%}: {self.why})"


class Causes(NamedTuple):
    """What may make a network wrong on a sample: its nearest training samples have wrong labels; few are like it."""

    wrong_neighbours: Tensor  # [s], a part
    unsupported: Tensor  # [s] bool
    said: Tensor  # [s], the class that was said
    truth: Tensor  # [s]


def find_regions(points: Tensor, wrong: Tensor, causes: Causes, classes: tuple[str, ...]) -> tuple[Region, ...]:
    """Clusters of points [s, r] with significantly more mistakes, the most certain first."""
    s, total = len(points), float(wrong.double().mean())
    count = min(REGIONS, s // SAMPLES)
    if count < 2 or not 0 < total < 1:
        return ()
    centres, place = clusters(points.double().cpu(), count)
    rows = []
    for k in range(count):
        inside = (place == k).nonzero()[:, 0]
        if len(inside):
            far = (points.double().cpu()[inside] - centres[k]).square().sum(1)
            mistakes = int(wrong[inside].sum())
            rows.append((binomial_tail(mistakes, len(inside), total), inside[far.argsort(stable=True)], mistakes))
    rows.sort(key=lambda row: row[0])
    # Benjamini & Hochberg 1995
    passed = [i for i, row in enumerate(rows, 1) if row[0] <= DISCOVERIES * i / len(rows)]
    chosen = rows[: passed[-1]] if passed else []
    return tuple(
        Region(inside, mistakes, total, chance, _why(inside, wrong, causes, classes))
        for chance, inside, mistakes in chosen
        if mistakes / len(inside) > total
    )


def _why(inside: Tensor, wrong: Tensor, causes: Causes, classes: tuple[str, ...]) -> str:
    """What is more frequent here than elsewhere, and the classes that are taken for one another."""
    said: list[str] = []
    here, all_over = float(causes.wrong_neighbours[inside].mean()), float(causes.wrong_neighbours.mean())
    if here >= PART and here >= TIMES * all_over:
        said.append(f"{here:.0%} of the nearest training samples have suspicious labels (elsewhere {all_over:.0%})")
    here, all_over = (float(causes.unsupported[i].double().mean()) for i in (inside, slice(None)))
    if here >= PART and here >= TIMES * all_over:
        said.append(f"little in the training set is like {here:.0%} of them (elsewhere {all_over:.0%})")
    bad = inside[wrong[inside]]
    pairs = torch.stack([causes.truth[bad], causes.said[bad]], 1)
    kinds, counts = pairs.unique(dim=0, return_counts=True)
    a, b = kinds[counts.argmax()].tolist()
    most = int(counts.max())
    said.append(f"{most} of {len(bad)} mistakes take {classes[a]} for {classes[b]}")
    return "; ".join(said) + "."


def neighbours_wrong(near: Nearest, suspicious: Tensor, k: int) -> Tensor:
    """The part of each sample's k nearest training samples whose labels are suspicious."""
    return suspicious.cpu().double()[near.places[:, :k].cpu()].mean(1)


def clusters(points: Tensor, count: int, rounds: int = 50) -> tuple[Tensor, Tensor]:
    """Middles [count, r] and each point's cluster, by k-means from k-means++ (Arthur & Vassilvitskii 2007)."""
    order = torch.Generator().manual_seed(0)
    centres = points[torch.randint(len(points), (1,), generator=order)]
    for _ in range(count - 1):
        far = torch.cdist(points, centres).amin(1).square()
        weights = far if float(far.sum()) > 0 else torch.ones_like(far)
        centres = torch.cat([centres, points[torch.multinomial(weights, 1, generator=order)]])
    place = torch.full((len(points),), -1)
    for _ in range(rounds):
        now = torch.cdist(points, centres).argmin(1)
        if torch.equal(now, place):
            break
        place = now
        sums = torch.zeros_like(centres).index_add_(0, place, points)
        sizes = torch.bincount(place, minlength=count)
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp_min(1)[:, None], centres)
    return centres, place


def binomial_tail(k: int, n: int, p: float) -> float:
    """The probability of at least k of n, each with probability p."""
    j = torch.arange(k, n + 1, dtype=torch.float64)
    log_choose = math.lgamma(n + 1) - torch.lgamma(j + 1) - torch.lgamma(n - j + 1)
    return float((log_choose + j * math.log(p) + (n - j) * math.log1p(-p)).exp().sum().clamp_max(1))
