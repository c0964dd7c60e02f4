"""Principal components of what a layer puts out, standardised, without ever holding it whole in double precision.

Which way is cheapest decides the shape: the covariance of p features, the Gram matrix of n samples, or, where both are
too large to decompose, subspace iteration (Halko, Martinsson & Tropp 2011).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._base.memory import WORKSPACE
from .._base.types import Float, Int
from ..linalg.decompose import eigh

# The smaller of samples and features up to which all components are computed (heuristic: a minute on either).
EXACT = {"cpu": 3072, "cuda": 12288}
MOST = 2000  # components where not all are computed and nobody says how many
# Subspace iteration: directions in excess of those asked for, when the variance that they hold has come to rest, and
# passes at most (heuristics).
SPARE, REST, PASSES = 64, 1e-4, 8
# A feature whose spread is so many times the rounding of its mean is a constant (heuristic).
ROUNDING = 10


@dataclass(frozen=True, eq=False)
class Rows:
    """Features of n samples, [b, p] at a time, in order: each call of `blocks` is one pass over all of them."""

    n: int
    blocks: Callable[[], Iterator[tuple[slice, Tensor]]]


def held(features: Tensor) -> Rows:
    """Features [n, …] that lie in memory, flattened, in blocks that may be copied to double precision."""
    flat = features.flatten(1)
    step = max(1, WORKSPACE.get(flat.device.type, WORKSPACE["cpu"]) // (8 * max(1, flat.shape[1])))
    places = [slice(k, min(k + step, len(flat))) for k in range(0, len(flat), step)]
    return Rows(len(flat), lambda: ((at, flat[at]) for at in places))


class Moments(NamedTuple):
    """Of training features: what standardises them, and the means of the classes as they are."""

    mean: Float[Tensor, " p"]
    scale: Float[Tensor, " p"]  # standard deviations (1 of a constant) times √varying: ‖z‖² is 1 on average
    varying: int  # features that are not
    means: Float[Tensor, "c p"]


def moments(rows: Rows, y: Int[Tensor, " n"], classes: int) -> Moments:
    """One pass: sums about the first block's mean, so that no digits are lost."""
    shift = sums = squares = torch.empty(0)
    eps = 0.0
    for at, block in rows.blocks():
        z = block.double()
        if not len(shift):
            shift, eps = z.mean(0), torch.finfo(block.dtype).eps
            sums, squares = z.new_zeros(classes, z.shape[1]), z.new_zeros(z.shape[1])
        z = z - shift  # not in place: double() copies no doubles
        sums.index_add_(0, y[at].to(z.device), z)
        squares += z.square().sum(0)
    offset = sums.sum(0) / rows.n
    mean, spread = shift + offset, (squares / rows.n - offset.square()).clamp_min(0).sqrt()
    constant = spread <= ROUNDING * eps * mean.abs()
    counts = torch.bincount(y, minlength=classes).to(sums.device)
    means = shift + sums / counts[:, None]
    varying = int((~constant).sum())
    return Moments(mean, spread.masked_fill(constant, 1.0) * max(1, varying) ** 0.5, varying, means)


class Scores(NamedTuple):
    """Samples in the principal components of the training samples."""

    train: Float[Tensor, "n k"]
    test: Float[Tensor, "m k"]
    variances: Float[Tensor, " k"]  # of the training samples, falling
    total: float  # variance, in all components
    exact: bool  # False: by subspace iteration


def principal(
    train: Rows, test: Rows, standard: Moments, most: int | None = None, memory: int = 1 << 29, seed: int = 0
) -> Scores:
    """z = (h − mean) / scale in the eigenvectors of ZᵀZ / n, the first `most` of them (None: all, or 2,000).

    Each varying feature has the variance 1/p, so that ‖z‖² is 1 on average: kernels and penalties mean the same in
    wide and in narrow layers.

    Exact where the smaller of n and p is at most `EXACT`; else by subspace iteration.
    """
    p, device = len(standard.mean), standard.mean.device
    if min(train.n, p) > EXACT.get(device.type, EXACT["cpu"]):
        return _iterated(train, test, standard, min(most or MOST, train.n - 1, p), seed)
    if p <= train.n:
        return _by_covariance(train, test, standard, most)
    return _by_gram(train, test, standard, most, max(1, memory // (8 * p)))


def _standardised(rows: Rows, standard: Moments) -> Iterator[tuple[slice, Tensor]]:
    for at, block in rows.blocks():
        yield at, (block.double() - standard.mean).div_(standard.scale)


def _ranked(values: Tensor, most: int | None, size: int, top: int) -> int:
    """How many of the falling eigenvalues are not rounding, at most `most`; `top`: the rank that there can be."""
    noise = float(values[0]) * torch.finfo(values.dtype).eps * size
    return max(1, min(int((values > noise).sum()), top, most or top))


def _projected(rows: Rows, standard: Moments, directions: Tensor) -> Tensor:
    """[n, k], in one pass."""
    out = directions.new_empty(rows.n, directions.shape[1])
    for at, z in _standardised(rows, standard):
        out[at] = z @ directions
    return out


def _by_covariance(train: Rows, test: Rows, standard: Moments, most: int | None) -> Scores:
    p = len(standard.mean)
    moment = standard.mean.new_zeros(p, p)
    for _, z in _standardised(train, standard):
        moment.addmm_(z.T, z)
    values, vectors = eigh(moment / train.n)
    values = values.flip(0)
    k = _ranked(values, most, max(train.n, p), min(train.n - 1, p))
    directions = vectors.flip(1)[:, :k]
    scores = [_projected(rows, standard, directions) for rows in (train, test)]
    return Scores(scores[0], scores[1], values[:k], float(values.clamp_min(0).sum()), True)


def _by_gram(train: Rows, test: Rows, standard: Moments, most: int | None, height: int) -> Scores:
    """ZZᵀ in bands of so many columns, each held while all rows pass by."""
    n = train.n
    products = standard.mean.new_empty(n + test.n, n)
    for start in range(0, n, height):
        stop = min(start + height, n)
        inside = ((max(at.start, start) - at.start, stop - at.start, z) for at, z in _standardised(train, standard)
                  if at.start < stop and at.stop > start)  # fmt: skip
        band = torch.cat([z[first:last] for first, last, z in inside]).T
        for at, z in _standardised(train, standard):
            if at.stop > start:  # eigh reads the lower triangle alone
                products[at, start:stop] = z @ band
        for at, z in _standardised(test, standard):
            products[n + at.start : n + at.stop, start:stop] = z @ band
    values, vectors = eigh(products[:n] / n)
    values = values.flip(0)
    k = _ranked(values, most, max(n, len(standard.mean)), n - 1)
    directions, length = vectors.flip(1)[:, :k], (n * values[:k]).sqrt()
    total = float(values.clamp_min(0).sum())
    return Scores(directions * length, products[n:] @ directions / length, values[:k], total, True)


def _iterated(train: Rows, test: Rows, standard: Moments, k: int, seed: int) -> Scores:
    """Q ← orthonormal basis of ZᵀZQ until ‖ZQ‖² rests, then the eigenvectors within it; a pass for each step."""
    p = len(standard.mean)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(p, min(k + SPARE, train.n - 1, p), generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(basis.to(standard.mean.device)).Q
    before = 0.0
    for _ in range(PASSES):
        image, held_variance = torch.zeros_like(basis), 0.0
        for _, z in _standardised(train, standard):
            seen = z @ basis
            held_variance += float(seen.square().sum())
            image.addmm_(z.T, seen)
        basis = torch.linalg.qr(image).Q
        if held_variance - before <= REST * held_variance:
            break
        before = held_variance
    scores = _projected(train, standard, basis)
    values, turn = eigh(scores.T @ scores / train.n)
    k = _ranked(values.flip(0), k, max(train.n, p), min(train.n - 1, p))
    turn, values = turn.flip(1)[:, :k], values.flip(0)[:k]
    return Scores(scores @ turn, _projected(test, standard, basis @ turn), values, 1.0, False)
