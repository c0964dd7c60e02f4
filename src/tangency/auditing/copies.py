"""Samples that are there twice: within the training set, and in the test set too.

Exact copies are told by their bits. Near ones (crops, mirror images, other compressions) by their neighbours: where
samples lie evenly in d dimensions, the nearest of k neighbours, at a part r of the k-th's distance, has r^d distributed
as the smallest of k − 1 uniform numbers; one that is far too near for that, seen from both samples of the pair, is a
copy. d is found around each sample, from its farther neighbours (as in Levina & Bickel 2004).
"""

import hashlib
from collections.abc import Sequence
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
# One over the largest dimension that is told from larger ones.
LEAST = 1e-3


@dataclass(frozen=True, eq=False, repr=False)
class Copies(Result):
    """Pairs of samples of which one is a copy of the other, the surest first.

    `pairs` [p, 2]: numbers of samples; of leaks the test sample, then the training sample. `similarity`: their cosine.
    `chance`: how likely so near a neighbour is without being a copy. `exact`: whether the inputs are equal. `mirrored`:
    whether the mirror image of one is nearer to the other than itself. `contradictory`: whether the labels differ
    (False where targets are real numbers). `by`: what similar means here.
    """

    pairs: Int[Tensor, "p 2"]
    similarity: Float[Tensor, " p"]
    chance: Float[Tensor, " p"]
    exact: Tensor
    contradictory: Tensor
    mirrored: Tensor
    dimension: float  # in which the samples lie, by these similarities: the median
    by: str = "the kernel"

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
    """Where samples lie: how far the last neighbour of each is, and one over the dimension there."""

    radius: Tensor  # [n]
    inverse: Tensor  # [n]


def find_copies(
    views: Sequence[Nearest],
    inverse: Tensor,
    known: Around,
    digests: tuple[Sequence[str], Sequence[str]],
    labels: tuple[Tensor, Tensor] | None,
    by: str = "the kernel",
) -> Copies:
    """Pairs of a row's sample with one of its neighbours, among those of the columns.

    `views`: neighbours of the rows' samples, and of their mirror images if there are any. `inverse`: one over the
    dimension around the rows' samples; `known`: where the columns' lie. `digests`: of the inputs of rows and columns,
    one and the same object if these are the same samples.
    """
    same = digests[0] is digests[1]
    chance = [(len(views) * chances(near, inverse, known)).clamp_max(1) for near in views]
    # How many of the nearest neighbours may be taken for copies (Benjamini & Hochberg 1995), then all that are as sure.
    limit = _false_discoveries(torch.stack([p[:, 0] for p in chance]).amin(0))
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
    d = 1 / max(float(inverse.median()), LEAST)
    return Copies(pairs, -numbers[:, 1], numbers[:, 0], exact, differ, numbers[:, 2] > 0, d, by)


class _Found(NamedTuple):
    """A pair, in the order of which pairs are listed."""

    chance: float
    dissimilarity: float
    mirrored: bool


def digests(x: Inputs) -> list[str]:
    """What each sample's inputs are, to the bit."""
    leaves = [leaf.detach().cpu().contiguous() for _, leaf in tree.leaves(x)]
    # A leading word for each leaf's type and shape: equal bytes of unlike samples are no copies.
    kinds = [f"{leaf.dtype}{tuple(leaf.shape[1:])}".encode() for leaf in leaves]
    rows = zip(*(leaf.reshape(len(leaf), -1).view(torch.uint8).numpy() for leaf in leaves), strict=True)
    return [
        hashlib.blake2b(b"".join(k + r.tobytes() for k, r in zip(kinds, row, strict=True))).hexdigest() for row in rows
    ]


def around(near: Nearest) -> Around:
    """Where samples lie, by the others that are nearest to each."""
    return Around(_distances(near)[:, -1], inverse_dimension(near))


def inverse_dimension(near: Nearest) -> Tensor:
    """1/d around each sample [n], in which the samples lie there, by the farther half of its neighbours.

    The mean over a sample and its neighbours: one sample's are few. Copies, which are near, do not take part.
    """
    d = _distances(near).log()
    k = d.shape[1]
    half = max(1, k // 2)
    # log(d_k / d_j) is a sum over i from j to k − 1 of exponential variables with mean 1/(i·d).
    expected = sum((i - half + 1) / i for i in range(half, k))
    alone = (d[:, -1:] - d[:, half - 1 : -1]).sum(1) / expected if expected else torch.ones_like(d[:, 0])
    return (alone + alone[near.places.cpu()].sum(1)) / (k + 1)


def chances(near: Nearest, inverse: Tensor, known: Around) -> Float[Tensor, "n k"]:
    """Of each neighbour: how likely the nearest one is so near, given how far the last is; 1 for the last.

    The larger of two: as the row's sample sees it, and as the neighbour does, among its own neighbours. Samples of a
    dense cluster look like copies to one that lies a little outside; they do not to each other.
    """
    d, places = _distances(near), near.places.cpu()
    k = d.shape[1]
    seen = _nearest_within(d, d[:, -1:], inverse[:, None], k)
    return torch.maximum(seen, _nearest_within(d, known.radius[places], known.inverse[places], k))


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
