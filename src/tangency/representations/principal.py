"""Principal components of features that come batch by batch: where they are many, they are never all there at once."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result
from .._base.types import Float
from ..errors import InputError, NonFiniteError
from ..gram.source import Source
from ..linalg.decompose import eigh
from ..linalg.eigen import signed
from .layers import Layers

# Components by default: at most so many, and at most one for so many samples (heuristics). Those of little variance
# count: a mild change of the samples is often seen there first.
MOST, SAMPLES_EACH = 50, 5
# What is rounding: deviations beside the mean; a component's variance beside the largest one's, of features in float64
# or whole numbers and of others (heuristics).
ROUNDING, NOISE, NOISE_32 = 1e-14, 1e-13, 1e-10
# Samples of plain arrays that are read together.
_BLOCK = 4096


@dataclass(frozen=True, eq=False, repr=False)
class Principal(Result):
    """z ↦ (z − mean)·vectors: leading eigenvectors of the features' covariance. `values`: the variance along each."""

    mean: Float[Tensor, " p"]
    vectors: Float[Tensor, "p r"]
    values: Float[Tensor, " r"]
    total: float  # the variance of all features

    @property
    def explained(self) -> Tensor:
        """The part of the variance that each component holds, [r]."""
        return self.values / self.total

    def __call__(self, z: Tensor) -> Float[Tensor, "n r"]:
        """Components of features [n, …], in float64 on a CPU."""
        flat = z.detach().flatten(1).to(self.mean)
        return ((flat - self.mean) @ self.vectors).cpu()


@dataclass(eq=False)
class Embedded:
    """The features of one set, as often as they are asked for; kept after the first time where `keep` says so."""

    samples: Source
    layers: Layers | None  # None: the samples are features
    name: str
    batch: int | None
    progress: bool
    kept: list[tuple[slice, Tensor]] = field(default_factory=list)
    keep: bool = False

    def __len__(self) -> int:
        return len(self.samples)

    def batches(self) -> Iterator[tuple[slice, Float[Tensor, "n p"]]]:
        """Rows and their features."""
        if self.kept:
            yield from self.kept
            return
        made = []
        for rows, z in self._made():
            wrong = (~z.isfinite().all(1)).nonzero()
            if len(wrong):
                number = rows.start + int(wrong[0])
                raise NonFiniteError(
                    f"features of {self.name}[{number}] are not finite; needed: finite numbers. Look for NaN in the "
                    "samples and in the model's weights.",
                    number,
                    "features" if self.layers is None else self.layers.names[-1],
                )
            yield rows, z
            if self.keep:
                made.append((rows, z))
        self.kept = made

    def _made(self) -> Iterator[tuple[slice, Tensor]]:
        if self.layers is None:
            for start in range(0, len(self), _BLOCK):
                rows = slice(start, min(start + _BLOCK, len(self)))
                yield rows, _features(self.samples.take(rows), self.name)
            return
        for rows, values in self.layers.batches(self.samples, batch=self.batch, progress=self.progress, name=self.name):
            yield rows, torch.cat([z.flatten(1) for z in values.values()], 1)


def _features(x: object, name: str) -> Tensor:
    """Samples that are features themselves."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.is_complex():
        what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise InputError(f"{name} has {what}; needed, without a model: features [n, p], real numbers.")
    return x.detach().flatten(1)


def principal(sets: Sequence[Embedded], count: int | None, memory: int) -> tuple[Principal, list[Tensor]]:
    """The leading components of all sets together, and each set in them, [n, r].

    Cost: one pass over the samples where their features fit into `memory`, else two, and p² numbers.
    """
    moments = _Moments()
    for embedded in sets:
        for rows, z in embedded.batches():
            if moments.mean is None:
                _plan(sets, z, memory)
            elif z.shape[1] != len(moments.mean):
                raise InputError(
                    f"{embedded.name}[{rows.start}:{rows.stop}] has {z.shape[1]} features, others have "
                    f"{len(moments.mean)}; needed: as many for all. Pool over positions: pool='mean'."
                )
            # A wide set that is kept needs no covariance of its features: see `_from_rows`.
            moments.add(z, second=not (embedded.keep and z.shape[1] > sum(map(len, sets))))
    if not math.isfinite(moments.total):
        raise InputError("the features' squares overflow float64; scale the samples down.")
    found = _from_rows(sets, moments) if moments.second is None else _from_covariance(moments)
    found = _leading(found, count, moments.count, moments.noise)
    return found, [_projected(found, embedded) for embedded in sets]


def _plan(sets: Sequence[Embedded], z: Tensor, memory: int) -> None:
    """Whether features are kept; refuses those of which neither they nor their covariance fit."""
    n, p = sum(map(len, sets)), z.shape[1]
    keep = n * p * z.element_size() <= memory
    for embedded in sets:
        embedded.keep = keep
    # The covariance, its eigenvectors, and what their computation takes.
    if not keep and 4 * 8 * p * p > memory:
        raise InputError(
            f"{p:,} features of {n:,} samples fit into memory={memory:,} bytes neither themselves nor by their "
            "covariance. Pool over positions (pool='mean'), choose a narrower layer, or raise memory=."
        )


@dataclass(eq=False)
class _Moments:
    """Mean and centred second moments of rows that come in batches (Chan, Golub & LeVeque 1983)."""

    count: int = 0
    mean: Tensor | None = None
    second: Tensor | None = None
    total: float = 0.0
    noise: float = NOISE

    def add(self, z: Tensor, second: bool) -> None:
        """More rows; `second`: the whole matrix of second moments, not only its trace."""
        if z.is_floating_point() and z.dtype != torch.float64:
            self.noise = NOISE_32
        z = z.detach().double()
        mean, n = z.mean(0), len(z)
        centred = z - mean
        old = z.new_zeros(z.shape[1]) if self.mean is None else self.mean
        step = mean - old
        part = self.count * n / (self.count + n)
        self.total += float(centred.square().sum() + part * step.square().sum())
        if second:
            self.second = z.new_zeros(len(step), len(step)) if self.second is None else self.second
            self.second.addmm_(centred.T, centred).addr_(step, step, alpha=part)
        self.count += n
        self.mean = old + step * (n / self.count)


def _from_covariance(moments: _Moments) -> Principal:
    assert moments.mean is not None
    assert moments.second is not None
    values, vectors = eigh(moments.second / moments.count)
    return Principal(moments.mean, vectors.flip(1), values.flip(0).clamp_min(0), moments.total / moments.count)


def _from_rows(sets: Sequence[Embedded], moments: _Moments) -> Principal:
    """Of fewer samples than features, which are kept: by the Gram matrix of the samples."""
    mean = moments.mean
    assert mean is not None
    rows = torch.cat([z.double() for embedded in sets for _, z in embedded.batches()]) - mean
    values, left = eigh(rows @ rows.T / moments.count)
    values, left = values.flip(0).clamp_min(0), left.flip(1)
    there = values > values[0] * len(values) * torch.finfo(values.dtype).eps
    values, left = values[there], left[:, there]
    return Principal(mean, rows.T @ left / (values * moments.count).sqrt(), values, moments.total / moments.count)


def _leading(found: Principal, count: int | None, n: int, noise: float) -> Principal:
    """The first components, each with its largest weight positive."""
    if not found.total > ROUNDING**2 * float(found.mean.square().sum()):
        raise InputError("all samples have the same features, so there is nothing to compare. Choose another layer.")
    # Below this a component is rounding.
    rank = int((found.values > found.values[0] * noise).sum())
    if count is None:
        count = min(MOST, max(2, n // SAMPLES_EACH), rank)
    checks.positive(count, "components", "the number of components")
    if count > rank:
        raise InputError(f"components={count}; needed: at most {rank}, as the features vary in no more directions.")
    return Principal(found.mean, signed(found.vectors[:, :count]), found.values[:count], found.total)


def _projected(found: Principal, embedded: Embedded) -> Tensor:
    out = torch.empty(len(embedded), found.vectors.shape[1], dtype=torch.float64)
    for rows, z in embedded.batches():
        out[rows] = found(z)
    embedded.kept = []
    return out
