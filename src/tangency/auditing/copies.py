"""Samples that are there twice: within the training set, and in the test set too.

Exact copies are told by their bits. Near ones by their neighbours: where samples lie evenly in d dimensions, the j-th
of k neighbours at a distance r of the k-th has r^d distributed as the j-th smallest of k − 1 uniform numbers, so a
neighbour that is far too near for that is a copy (crops, mirror images, other compressions). d is found around each
sample, from its farther neighbours (as in Levina & Bickel 2004).
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import tree
from .._base.results import Result
from .._base.types import Float, Inputs, Int
from .machine import Nearest

# Neighbours that are looked at, and the part of the pairs found that may be found by chance.
NEIGHBOURS, DISCOVERIES = 20, 0.01


@dataclass(frozen=True, eq=False, repr=False)
class Copies(Result):
    """Pairs of samples of which one is a copy of the other, the surest first.

    `pairs` [p, 2]: numbers of samples; of leaks the test sample, then the training sample. `similarity`: the kernel's
    cosine. `chance`: how likely so near a neighbour is without being a copy. `exact`: whether the inputs are equal.
    `contradictory`: whether the labels differ (False where targets are real numbers).
    """

    pairs: Int[Tensor, "p 2"]
    similarity: Float[Tensor, " p"]
    chance: Float[Tensor, " p"]
    exact: Tensor
    contradictory: Tensor
    dimension: float  # in which the samples lie, as the kernel sees them: the median

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


def find_copies(
    near: Nearest, inverse: Tensor, rows: Sequence[str], columns: Sequence[str], labels: tuple[Tensor, Tensor] | None
) -> Copies:
    """Pairs of a row's sample with one of its neighbours; `rows`, `columns`: digests of the inputs of both sets."""
    same = rows is columns
    chance = chances(near, inverse)
    n, k = near.places.shape
    first = torch.arange(n)[:, None].expand(n, k)
    equal = _equal_pairs(rows, columns, same)
    # How many of the nearest neighbours may be taken for copies (Benjamini & Hochberg 1995), then all that are as sure.
    limit = _false_discoveries(chance[:, 0])
    chosen = chance <= limit
    triples = {
        (int(a), int(b)): (float(s), float(p))
        for a, b, s, p in zip(first[chosen], near.places[chosen], near.similarity[chosen], chance[chosen], strict=True)
    }
    for pair in equal:  # a copy has a similarity of 1, also where it is not among the neighbours
        triples[pair] = (1.0, 0.0)
    if same:
        triples = {(a, b): v for (a, b), v in triples.items() if a < b} | {
            (b, a): v for (a, b), v in triples.items() if a > b and (b, a) not in triples
        }
    order = sorted(triples, key=lambda pair: (triples[pair][1], -triples[pair][0], pair))
    pairs = torch.tensor(order, dtype=torch.long).reshape(-1, 2)
    numbers = torch.tensor([triples[pair] for pair in order], dtype=torch.float64).reshape(-1, 2)
    exact = torch.tensor([rows[a] == columns[b] for a, b in order], dtype=torch.bool)
    differ = torch.zeros(len(order), dtype=torch.bool)
    if labels is not None:
        differ = labels[0].cpu()[pairs[:, 0]] != labels[1].cpu()[pairs[:, 1]]
    return Copies(pairs, numbers[:, 0], numbers[:, 1], exact, differ, 1 / max(float(inverse.median()), 1e-3))


def digests(x: Inputs) -> list[str]:
    """What each sample's inputs are, to the bit."""
    leaves = [leaf.detach().cpu().contiguous() for _, leaf in tree.leaves(x)]
    # A leading word for each leaf's type and shape: equal bytes of unlike samples are no copies.
    kinds = [f"{leaf.dtype}{tuple(leaf.shape[1:])}".encode() for leaf in leaves]
    rows = zip(*(leaf.reshape(len(leaf), -1).view(torch.uint8).numpy() for leaf in leaves), strict=True)
    return [
        hashlib.blake2b(b"".join(k + r.tobytes() for k, r in zip(kinds, row, strict=True))).hexdigest() for row in rows
    ]


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


def chances(near: Nearest, inverse: Tensor) -> Float[Tensor, "n k"]:
    """Of each neighbour but the last: how likely it is so near, given how far the last is; 1 for the last.

    `inverse`: one over the dimension around each sample.
    """
    d = _distances(near)
    k = d.shape[1]
    inside = ((d / d[:, -1:]).log() / inverse[:, None].clamp_min(1e-3)).exp()
    # The j-th smallest of k − 1 uniform numbers is below u if at least j of them are.
    counts = torch.arange(k, dtype=torch.float64)
    log_choose = math.lgamma(k) - torch.lgamma(counts + 1) - torch.lgamma(k - counts)
    u = inside.clamp(1e-300, 1 - 1e-16)[..., None]
    terms = (log_choose + counts * u.log() + (k - 1 - counts) * torch.log1p(-u)).exp()
    below = terms.flip(-1).cumsum(-1).flip(-1)  # P(at least j)
    out = below.gather(-1, torch.arange(1, k + 1).clamp_max(k - 1).expand(len(d), k)[..., None])[..., 0]
    out[:, -1] = 1
    return out


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
