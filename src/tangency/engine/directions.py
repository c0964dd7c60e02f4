"""Fewer outputs than a network has: some of them, or sums of all with given weights.

Gradients are linear in the outputs, so those of V f are V times those of f: a backward pass for each row of V in place
of one for each output.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .._base.types import Float
from ..errors import InputError
from .blocks import DenseBlock, GradientBlock, map_cotangents

# Outputs up to which all of them are compared with autograd; of more, so many directions (half of them single ones).
FEW = 6


class Directions(ABC):
    """A linear map of outputs [n, c] → [n, k], the same for all samples."""

    @abstractmethod
    def __call__(self, out: Float[Tensor, "n c"]) -> Float[Tensor, "n k"]:
        """The directions of these outputs."""


@dataclass(frozen=True)
class Outputs(Directions):
    """The outputs from number `start` up to `stop`."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many they are."""
        return self.stop - self.start

    def __call__(self, out: Float[Tensor, "n c"]) -> Float[Tensor, "n k"]:
        """As `Directions`: a view."""
        return out[:, self.start : self.stop]


@dataclass(frozen=True)
class Probes(Directions):
    """`count` random sums of all outputs: signs by chance, divided by √count, so that E[VᵀV] is the identity."""

    count: int
    seed: int

    def __call__(self, out: Float[Tensor, "n c"]) -> Float[Tensor, "n k"]:
        """As `Directions`; refused where the outputs themselves are no more."""
        c = out.shape[1]
        if self.count >= c:
            raise InputError(
                f"probes={self.count} for a network of {c} outputs: the exact kernel costs "
                f"{'less' if self.count > c else 'the same'}, {c} backward passes. Leave probes= out."
            )
        return out @ (signs(self.count, c, self.seed).to(out) / self.count**0.5).T


@dataclass(frozen=True)
class Spread(Directions):
    """What gradients of many outputs are compared in: the first output, the last, one between, and random sums."""

    def __call__(self, out: Float[Tensor, "n c"]) -> Float[Tensor, "n k"]:
        """As `Directions`; of no more than `FEW` outputs, all."""
        c = out.shape[1]
        if c <= FEW:
            return out
        between = 1 + int(np.random.Philox(key=c).random_raw()) % (c - 2)
        # Of length 1, so that what comes back to a layer is as large as of a single output.
        sums = out @ (signs(FEW - 3, c, c).to(out) / c**0.5).T
        return torch.cat([out[:, [0, between, c - 1]], sums], 1)


@lru_cache(16)
def signs(k: int, c: int, seed: int) -> Tensor:
    """[k, c] of ±1, independent; the first rows are the same for every k."""
    # Raw bits: the one thing of a generator that no version of NumPy changes.
    bits = np.random.Philox(key=seed).random_raw(k * c).reshape(k, c) >> np.uint64(63)
    with torch.inference_mode(False):
        return torch.from_numpy(bits.astype(np.float64) * 2 - 1)


def some_outputs(block: GradientBlock, outputs: slice) -> GradientBlock:
    """The block of some of the outputs; views."""
    some = map_cotangents(block, lambda d: d[:, outputs])
    if isinstance(some, DenseBlock) and some.norms is not None:
        return replace(some, norms=some.norms[:, outputs])
    return some


def contracted(block: GradientBlock, v: Tensor) -> Tensor:
    """Σ_c v_c g_c of the gradients, [n, p]; those of single outputs are not formed."""
    return map_cotangents(block, lambda d: torch.einsum("nc...,c->n...", d, v.to(d))[:, None]).expand()[:, 0]
