"""Where tiles lie: rows and columns as slices or as numbers, tiles put in their place, selections of rows as numbers.

A block of rows is a slice; of a selection, which may name rows in any order and more than once, it is a tensor of
positions. Everything here takes either.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

# Where a tile lies: a slice, or the numbers of its rows for a selection in another order.
Index: TypeAlias = slice | Tensor
Wanted: TypeAlias = Callable[[Index, Index], bool]
Choice: TypeAlias = slice | Sequence[int] | np.ndarray | Tensor | None


class Finder:
    """Which positions of a selection lie in a block of rows, and where in the block."""

    def __init__(self, chosen: Tensor | None) -> None:
        self.chosen = chosen
        if chosen is not None:
            # Sorted once; a block is then found by two bisections. Stable: rows chosen twice keep their order.
            self.sorted, self.order = torch.sort(chosen, stable=True)

    def __call__(self, block: Index) -> tuple[Index, Tensor | None]:
        """(positions in the selection, rows of the block); of no selection, the block itself and None."""
        if self.chosen is None:
            return block, None
        assert isinstance(block, slice)  # a view's base is no view: its tiles lie in slices
        low, high = (int(torch.searchsorted(self.sorted, k)) for k in (block.start, block.stop))
        return self.order[low:high], self.sorted[low:high] - block.start


def place_tile(out: Tensor, rows: Index, columns: Index, tile: Tensor) -> None:
    """Write a tile [a, b] or [a, c, b, d] where it belongs in the whole matrix `out`."""
    if isinstance(rows, slice):  # a slice of rows is a view: no numbers are needed
        j = on_device(columns, out.device)
        if out.dim() == 2:
            out[rows][:, j] = tile.to(out)
        else:
            out[rows][:, :, j] = tile.to(out)
        return
    # Numbers on both sides: as a column and a row they stand for their product, once the samples' axes come first.
    i, j = numbers(rows, out.device)[:, None], numbers(columns, out.device)
    if out.dim() == 2:
        out[i, j] = tile.to(out)
    else:
        out.permute(0, 2, 1, 3)[i, j] = tile.to(out).permute(0, 2, 1, 3)


def mirror_tile(tile: Tensor) -> Tensor:
    """The tile on the other side of the diagonal."""
    return tile.T if tile.dim() == 2 else tile.permute(2, 3, 0, 1)


def length(index: Index) -> int:
    """How many rows an index has."""
    return index.stop - index.start if isinstance(index, slice) else len(index)


def numbers(index: Index, device: torch.device) -> Tensor:
    """The rows of an index as numbers, on a device."""
    if isinstance(index, slice):
        return torch.arange(index.start, index.stop, device=device)
    return index.to(device)


def on_device(index: Index, device: torch.device) -> Index:
    """The index as a tensor on that device can be indexed with it."""
    return index if isinstance(index, slice) else index.to(device)


def meet(rows: Index, columns: Index) -> bool:
    """Whether a tile touches the diagonal."""
    if isinstance(rows, slice) and isinstance(columns, slice):
        return rows.start < columns.stop and columns.start < rows.stop
    # A selection's positions lie on the CPU.
    cpu = torch.device("cpu")
    return bool(torch.isin(numbers(rows, cpu), numbers(columns, cpu)).any())


def coincide(rows: Index, columns: Index, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where in a tile a row and a column have the same number: their positions in the tile, pair by pair."""
    if isinstance(rows, slice) and isinstance(columns, slice):
        start, stop = max(rows.start, columns.start), min(rows.stop, columns.stop)
        same = torch.arange(start, max(start, stop), device=device)
        return same - rows.start, same - columns.start
    i, j = numbers(rows, device), numbers(columns, device)
    ordered, order = torch.sort(j)
    # A row may be chosen more than once: row number i meets `times` columns, which are ordered[first:last].
    first, last = torch.searchsorted(ordered, i), torch.searchsorted(ordered, i, right=True)
    times = last - first
    at = torch.repeat_interleave(torch.arange(len(i), device=device), times)
    within = torch.arange(len(at), device=device) - torch.repeat_interleave(times.cumsum(0) - times, times)
    return at, order[first[at] + within]


def compose(outer: Tensor | None, inner: Tensor | None) -> Tensor | None:
    """The numbers of a selection of a selection; None for all."""
    return inner if outer is None else outer if inner is None else outer[inner]


def chosen(choice: Choice, count: int, name: str) -> Tensor | None:
    """An index set as numbers; None for all."""
    if choice is None or (isinstance(choice, slice) and choice == slice(None)):
        return None
    if isinstance(choice, slice):
        return torch.tensor(range(count)[choice], dtype=torch.long)
    # A copy of an array: torch cannot share one that is read-only or runs backwards.
    index = torch.as_tensor(choice.copy() if isinstance(choice, np.ndarray) else choice).cpu()
    if index.dtype == torch.bool:
        if index.shape != (count,):
            raise InputError(f"the mask for {name} has shape {tuple(index.shape)}; needed: [{count}].")
        return index.nonzero()[:, 0]
    if index.numel() == 0:
        index = index.long()  # torch makes [] a tensor of floats
    if index.dim() != 1 or index.is_floating_point() or index.is_complex():
        raise InputError(
            f"{name} must be a list of numbers, a slice or a mask; got {index.dtype} {tuple(index.shape)}."
        )
    index = index.long()
    bad = (index < -count) | (index >= count)
    if bool(bad.any()):
        raise InputError(f"{name}: number {int(index[bad][0])} is not among the {count} of this Gram.")
    return torch.where(index < 0, index + count, index)


def number_or_choice(key: object) -> int | Choice:
    """One number as an int, in whatever form it comes; everything else as it is, `...` as all."""
    if key is Ellipsis:
        return slice(None)
    if key is None or isinstance(key, (bool, np.bool_, str)):  # None would be a new axis in NumPy
        raise InputError(f"{key!r} is no row or column; needed: numbers, slices, index sets or masks.")
    if isinstance(key, (int, np.integer)):
        return int(key)
    if isinstance(key, (Tensor, np.ndarray)) and key.ndim == 0 and "int" in str(key.dtype):
        return int(key)
    return key  # type: ignore[return-value]  # what cannot be read as numbers is refused in `chosen`


def unmeshed(keys: tuple[object, ...]) -> tuple[object, ...]:
    """A column of rows and a row of columns, as np.ix_ makes them (scikit-learn cuts Grams so), as two index sets."""
    arrays = [k for k in keys if isinstance(k, (Tensor, np.ndarray)) and k.ndim == 2]
    if len(arrays) == len(keys) == 2 and arrays[0].shape[1] == arrays[1].shape[0] == 1:
        return arrays[0][:, 0], arrays[1][0]
    return keys
