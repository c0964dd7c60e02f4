"""Samples that are there twice: within the training set, and in the test set too.

Exact copies are told by their bits. Near ones (crops, mirror images, other compressions) by their neighbours: where
samples lie evenly in d dimensions, the nearest of k neighbours, at a part r of the k-th's distance, has r^d distributed
as the smallest of k − 1 uniform numbers; one that is far too near for that, seen from both samples of the pair and for
several k, is a copy. d is found around each sample, from its farther neighbours (as in Levina & Bickel 2004).

Samples of a small cluster are as near to each other as copies are. Those of clusters of more than five are not taken
for copies, as among five all are alike; where most samples lie in smaller ones, near copies are not told at all.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._base import tree
from .._base.results import Result
from .._base.types import Float, Inputs, Int
from .machine import Nearest

# Neighbours that are looked at, and the part of the pairs found that may be found by chance.
NEIGHBOURS, DISCOVERIES = 20, 0.01
# Of these, how many are compared at a time: a copy is too near among all numbers of neighbours (heuristic).
SCALES = (5, 10, NEIGHBOURS)
# The part of the training samples that may have neighbours too near at some scale; with more, near ones are no sign of
# copies (heuristic: 4 % of CIFAR-10 have them, nearly all of samples in small clusters).
CROWDED = 1 / 3
# One over the largest dimension that is told from larger ones.
LEAST = 1e-3


@dataclass(frozen=True, eq=False, repr=False)
class Copies(Result):
    """Pairs of samples of which one is a copy of the other, the surest first.

    `pairs` [p, 2]: numbers of samples; of leaks the test sample, then the training sample. `similarity`: their cosine.
    `chance`: how likely so near a neighbour is without being a copy. `exact`: whether the inputs are equal. `mirrored`:
    whether the mirror image of one is nearer to the other than itself. `contradictory`: whether the labels differ
    (False where targets are real numbers). `by`: what similar means here. `crowded`: the part of the training samples
    that have neighbours far nearer than others; where it is large, the samples lie in small clusters (or are all there
    several times), near copies are not told from neighbours, and only equal ones are listed (`equal_only`).
    """

    pairs: Int[Tensor, "p 2"]
    similarity: Float[Tensor, " p"]
    chance: Float[Tensor, " p"]
    exact: Tensor
    contradictory: Tensor
    mirrored: Tensor
    dimension: float  # in which the samples lie, by these similarities: the median
    by: str = "the kernel"
    crowded: float = 0.0

    @property
    def equal_only(self) -> bool:
        """Whether near copies are not told from neighbours here."""
        return self.crowded > CROWDED

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes this less certain."""
        if not self.equal_only:
            return ()
        return (
            f"{self.crowded:.0%} of the training samples have neighbours far nearer than others are: they lie in small "
            "clusters, or all are there several times. Near copies are not told from neighbours there, and only equal "
            "samples are listed.",
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        return (
            f"Copies({len(self)} pairs, {int(self.exact.sum())} of them equal, {int(self.contradictory.sum())} with "
            "different labels)"
        )

    def groups(self) -> list[list[int]]:
        """Samples that are copies of one another, the first number of each group first (within one set)."""
        head: dict[int, int] = {}

        def find(i: int) -> int:
            while head.setdefault(i, i) != i:
                head[i] = head[head[i]]
                i = head[i]
            return i

        for a, b in self.pairs.tolist():
            low, high = sorted((find(a), find(b)))
            head[high] = low
        found: dict[int, list[int]] = {}
        for i in sorted(head):
            found.setdefault(find(i), []).append(i)
        return list(found.values())


class Around(NamedTuple):
    """Where samples lie, at each scale: how far the last neighbour of each is, and one over the dimension there."""

    radius: Tensor  # [n, s]
    inverse: Tensor  # [n, s]
    crowded: float = 0.0  # the part of them with neighbours too near at some scale


def find_copies(
    views: Sequence[Nearest],
    known: Around,
    digests: tuple[Sequence[str], Sequence[str]],
    labels: tuple[Tensor, Tensor] | None,
    by: str = "the kernel",
) -> Copies:
    """Pairs of a row's sample with one of its neighbours, among those of the columns.

    `views`: neighbours of the rows' samples, and of their mirror images if there are any. `known`: where the columns'
    samples lie. `digests`: of the inputs of rows and columns, one and the same object if these are the same samples.
    """
    same = digests[0] is digests[1]
    views = [distinct(near, digests[1]) for near in views]
    inverse = known.inverse if same else _mean_around(known.inverse, views[0])
    chance = [(len(views) * chances(near, inverse, known)).clamp_max(1) for near in views]
    # How many of the nearest neighbours may be taken for copies (Benjamini & Hochberg 1995), then all that are as sure.
    nearest = torch.stack([p[:, 0] for p in chance]).amin(0)
    limit = -1.0 if known.crowded > CROWDED else _false_discoveries(nearest)
    found: dict[tuple[int, int], _Found] = {}
    for mirrored, (near, p) in enumerate(zip(views, chance, strict=True)):
        first, which = (p <= limit).nonzero(as_tuple=True)
        others, similarity = near.places.cpu()[first, which], near.similarity.cpu()[first, which]
        for a, b, q, s in zip(*(v.tolist() for v in (first, others, p[first, which], similarity)), strict=True):
            pair = (min(a, b), max(a, b)) if same else (a, b)
            found[pair] = min(found.get(pair, _Found(2.0, 0.0, False)), _Found(q, -s, bool(mirrored)))
    for pair in _equal_pairs(*digests, same):  # a copy has a similarity of 1, also where it is not among the neighbours
        found[pair] = _Found(0.0, -1.0, False)
    order = sorted(found, key=lambda pair: (found[pair], pair))
    pairs = torch.tensor(order, dtype=torch.long).reshape(-1, 2)
    numbers = torch.tensor([found[pair] for pair in order], dtype=torch.float64).reshape(-1, 3)
    exact = torch.tensor([digests[0][a] == digests[1][b] for a, b in order], dtype=torch.bool)
    differ = torch.zeros(len(order), dtype=torch.bool)
    if labels is not None:
        differ = labels[0].cpu()[pairs[:, 0]] != labels[1].cpu()[pairs[:, 1]]
    d = 1 / max(float(inverse[:, -1].nanmedian().nan_to_num(1.0)), LEAST)
    return Copies(pairs, -numbers[:, 1], numbers[:, 0], exact, differ, numbers[:, 2] > 0, d, by, known.crowded)


class _Found(NamedTuple):
    """A pair, in the order of which pairs are listed."""

    chance: float
    dissimilarity: float
    mirrored: bool


def digests(x: Inputs) -> list[str]:
    """What each sample's inputs are, to the bit; 0 and −0 are one number."""
    leaves = [leaf.detach().cpu() for _, leaf in tree.leaves(x)]
    # A leading word for each leaf's type and shape: equal bytes of unlike samples are no copies.
    kinds = [f"{leaf.dtype}{tuple(leaf.shape[1:])}".encode() for leaf in leaves]
    return [
        hashlib.blake2b(b"".join(k + _bytes(r) for k, r in zip(kinds, row, strict=True))).hexdigest()
        for row in zip(*leaves, strict=True)
    ]


def _bytes(row: Tensor) -> bytes:
    numbers = (row + 0 if row.is_floating_point() else row).reshape(-1)
    return numbers.view(torch.uint8).numpy().tobytes()


def scales(k: int) -> list[int]:
    """How many neighbours are looked at at a time, of k."""
    return sorted({min(s, k) for s in SCALES})


def distinct(near: Nearest, digests: Sequence[str]) -> Nearest:
    """Without neighbours that equal an earlier sample: in their places, at the end, cosines that are not a number.

    Equal samples are all as far away, as none would be that lie evenly.
    """
    first = _first(digests)
    if bool(first.all()):
        return near
    places = near.places.cpu()
    again = ~first[places]
    order = again.int().argsort(dim=1, stable=True)
    similarity = near.similarity.cpu().masked_fill(again, torch.nan)
    return Nearest(similarity.gather(1, order), places.gather(1, order))


def _first(digests: Sequence[str]) -> Tensor:
    """Which samples equal none before them."""
    seen: dict[str, int] = {}
    return torch.tensor([seen.setdefault(digest, j) == j for j, digest in enumerate(digests)])


def around(near: Nearest, digests: Sequence[str]) -> Around:
    """Where samples lie, by the others that are nearest to each; equal ones, by their digests, count once."""
    near = distinct(near, digests)
    d = _distances(near)
    radius, inverse = d[:, [s - 1 for s in scales(d.shape[1])]], inverse_dimension(near)
    # At some scale: a small cluster is crowded where neighbours outside are counted too.
    least = torch.stack([p[:, 0] for p in _chances(near, inverse, Around(radius, inverse))]).amin(0)
    p = (radius.shape[1] * least[_first(digests) & ~least.isnan()]).clamp_max(1)
    return Around(radius, inverse, float((p <= _false_discoveries(p)).double().mean()) if len(p) else 0.0)


def inverse_dimension(near: Nearest) -> Float[Tensor, "n s"]:
    """1/d around each sample, at each scale, in which the samples lie there, by the farther half of its neighbours.

    The mean over a sample and its neighbours: one sample's are few. Copies, which are near, do not take part.
    """
    d = _distances(near).log()
    alone = torch.stack([_alone(d[:, :s]) for s in scales(d.shape[1])], 1)
    others, k = _mean_around(alone, near), (~d.isnan()).sum(1, keepdim=True)
    return torch.where(alone.isnan(), others, (alone + k * others.nan_to_num(0)) / (k + 1))


def _mean_around(values: Float[Tensor, "n s"], near: Nearest) -> Float[Tensor, "m s"]:
    """The mean of them over the neighbours of each sample, of those that are numbers."""
    none, places = near.similarity.cpu().isnan(), near.places.cpu()
    return torch.stack([v[places].masked_fill(none, torch.nan).nanmean(1) for v in values.T], 1)


def _alone(d: Tensor) -> Tensor:
    """1/d by one sample's logarithmic distances [n, k]."""
    k = d.shape[1]
    half = (k + 1) // 2
    # log(d_k / d_j) is a sum over i from j to k − 1 of exponential variables with mean 1/(i·d).
    expected = sum((i - half + 1) / i for i in range(half, k))
    return (d[:, -1:] - d[:, half - 1 : -1]).sum(1) / expected if expected else torch.ones_like(d[:, 0])


def chances(near: Nearest, inverse: Tensor, known: Around) -> Float[Tensor, "n k"]:
    """Of each neighbour: how likely the nearest one is so near, given how far the last is; 1 for the last.

    The largest over all scales, and of two at each: as the row's sample sees it, and as the neighbour does, among its
    own neighbours. Samples of a dense cluster look like copies to one that lies a little outside; they do not to each
    other. Those of a small cluster look like copies where neighbours outside are counted too; they do not among
    themselves.
    """
    largest = torch.zeros_like(near.similarity, dtype=torch.float64, device="cpu")
    for at, p in enumerate(_chances(near, inverse, known)):
        # With fewer distinct neighbours than the first scale has, nothing is told; later ones are left out then.
        largest = torch.maximum(largest, p.nan_to_num(0.0 if at else 1.0))
    return largest


def _chances(near: Nearest, inverse: Tensor, known: Around) -> Iterator[Float[Tensor, "n k"]]:
    """At one scale after the other; not a number where there are too few neighbours for it."""
    d, places = _distances(near), near.places.cpu()
    for at, k in enumerate(scales(d.shape[1])):
        seen = _nearest_within(d, d[:, k - 1 : k], inverse[:, at : at + 1], k)
        yield torch.maximum(seen, _nearest_within(d, known.radius[places, at], known.inverse[places, at], k))


def _nearest_within(d: Tensor, radius: Tensor, inverse: Tensor, k: int) -> Tensor:
    """P(the smallest of k − 1 uniform numbers is at most (d / radius)^dimension)."""
    inside = ((d / radius).log() / inverse.clamp_min(LEAST)).clamp_max(0).exp()
    return -torch.expm1((k - 1) * torch.log1p(-inside))


def _distances(near: Nearest) -> Tensor:
    """√(2 − 2·cosine), at least what rounding leaves of it."""
    similarity = near.similarity.cpu()
    return (2 - 2 * similarity.double()).clamp_min(4 * torch.finfo(torch.float32).eps).sqrt()


def _equal_pairs(rows: Sequence[str], columns: Sequence[str], same: bool) -> list[tuple[int, int]]:
    """Pairs with equal inputs: each copy with the first of its kind."""
    known: dict[str, int] = {}
    for j, digest in enumerate(columns):
        known.setdefault(digest, j)
    found = [(i, known[digest]) for i, digest in enumerate(rows) if digest in known]
    return [(j, i) for i, j in found if i != j] if same else found


def _false_discoveries(p: Tensor) -> float:
    """The largest p-value that may count, such that about `DISCOVERIES` of those that do are by chance."""
    ordered = p.sort().values
    allowed = DISCOVERIES * torch.arange(1, len(p) + 1, dtype=p.dtype) / len(p)
    passed = (ordered <= allowed).nonzero()
    return float(ordered[int(passed[-1])]) if len(passed) else -1.0
