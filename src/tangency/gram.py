"""Gram matrices as results: a thing that can be multiplied, sliced and looked at tile by tile."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._types import Float
from .errors import InputError, MemoryBudgetError


class Gram(ABC):
    """A Gram matrix [n, m], or [n, c, m, d] for a kernel that is full over outputs."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @abstractmethod
    def tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """(rows, columns, tile) of the whole matrix."""

    def dense(self, max_bytes: int | None = None) -> Tensor:
        """The whole as one tensor; refuses above `max_bytes`."""
        tiles = self.tiles()
        rows, columns, tile = next(tiles)
        self._refuse(tile.element_size(), max_bytes)
        out = tile.new_empty(self.shape)
        _place(out, rows, columns, tile)
        for rows, columns, tile in tiles:
            _place(out, rows, columns, tile)
        return out

    def _refuse(self, item: int, max_bytes: int | None) -> None:
        size = self.shape.numel() * item
        if max_bytes is not None and size > max_bytes:
            raise MemoryBudgetError(f"the Gram takes {size} bytes, more than max_bytes={max_bytes}; go by tiles().")

    def __matmul__(self, v: Tensor) -> Tensor:
        """K v for v [m] or [m, q], streaming over tiles. Full kernels act on [m·d] or [m·d, q]."""
        n, m = _flat(self.shape)
        if v.dim() not in (1, 2) or v.shape[0] != m:
            raise InputError(f"K is {n} x {m} and v has shape {tuple(v.shape)}; needed: [{m}] or [{m}, q].")
        per_row, per_column = n // self.shape[0], m // self.shape[len(self.shape) // 2]
        out = v.new_zeros(n, *v.shape[1:])
        for rows, columns, tile in self.tiles():
            flat = tile.reshape((rows.stop - rows.start) * per_row, -1)
            piece = v[columns.start * per_column : columns.stop * per_column]
            out[rows.start * per_row : rows.stop * per_row] += flat @ piece.to(flat)
        return out

    def diag(self) -> Tensor:
        """The diagonal of a square Gram: [n], or [n, c]."""
        n, m = _flat(self.shape)
        if n != m:
            raise InputError(f"the Gram is {tuple(self.shape)}; only a square one has a diagonal.")
        c = n // self.shape[0]
        out: Tensor | None = None
        for rows, columns, tile in self.tiles():
            start, stop = max(rows.start, columns.start), min(rows.stop, columns.stop)
            if out is None:
                out = tile.new_zeros(self.shape[0], c)
            if start < stop:
                piece = tile[start - rows.start : stop - rows.start]
                flat = piece.reshape(stop - start, c, -1, c)[:, :, start - columns.start : stop - columns.start]
                out[start:stop] = torch.einsum("iaia->ia", flat)
        assert out is not None
        return out[:, 0] if len(self.shape) == 2 else out


@dataclass(frozen=True, eq=False)
class DenseGram(Gram):
    """A Gram matrix that lies in memory."""

    value: Float[Tensor, "..."]

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        yield slice(0, self.shape[0]), slice(0, self.shape[len(self.shape) // 2]), self.value

    def dense(self, max_bytes: int | None = None) -> Tensor:
        self._refuse(self.value.element_size(), max_bytes)
        return self.value

    def __repr__(self) -> str:
        return f"DenseGram(shape={tuple(self.shape)}, dtype={self.value.dtype}, device={self.value.device})"


def _flat(shape: torch.Size) -> tuple[int, int]:
    half = len(shape) // 2
    return shape[:half].numel(), shape[half:].numel()


def _place(out: Tensor, rows: slice, columns: slice, tile: Tensor) -> None:
    if out.dim() == 2:
        out[rows, columns] = tile
    else:
        out[rows, :, columns] = tile
