"""Values of each sample by itself, beside a kernel's values of pairs: the other thing that a run of tiles makes."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from .._base.types import Float, Inputs, Spec

# What the manifest of a store of rows says of the other side, on which there are no samples. (Earlier versions had a
# batch there, of one zero; this is its hash, so that their stores are gone on with.)
NO_COLUMNS = "9d1e98ff5034fa33"


class RowMap(ABC):
    """x → values [n, c, k], sample by sample. Frozen and picklable; `spec()` says everything that decides its numbers.

    They are kept as an array [n, c, 1, k] of tiles with one column, so a budget, a store, resuming and workers are the
    same for them as for a Gram matrix.
    """

    # Samples that are made together: blocks are multiples of it, and one block is held at a time.
    together: ClassVar[int]

    @abstractmethod
    def values(self, x: Inputs, memory: int | None = None) -> Float[Tensor, "n c k"]:
        """The values of a batch that is ready. `memory` bounds the bytes that making them may take besides."""

    @abstractmethod
    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """x checked and cast, before any expensive work."""

    @abstractmethod
    def footprint(self, x: Inputs) -> tuple[int, int]:
        """Bytes per sample of x: (of its values, transient while they are made)."""

    @abstractmethod
    def diagnose(self, values: Float[Tensor, "n c k"]) -> None:
        """Raise NonFiniteError naming the first sample whose values are not finite, if there is one."""

    @abstractmethod
    def outputs(self, x: Inputs) -> Tensor | None:
        """What the network in it says of x (ready), [n, …]; None where there is none."""

    @abstractmethod
    def spec(self) -> Spec:
        """Everything that decides the numbers, as JSON values."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where inputs must lie."""
