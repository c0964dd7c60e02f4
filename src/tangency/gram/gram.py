"""Gram matrices as results: a thing that can be multiplied, sliced and looked at tile by tile.

A Gram need not fit in memory. All that a kind of Gram must bring is `shape`, `dtype` and `tiles()`; products, the
diagonal, slices, selections and cosines follow from these, and each reads only the tiles that it needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._base import checks
from .._base import memory as memory_of
from .._base.types import Float
from ..errors import InputError, MemoryBudgetError

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

# Where a tile lies: a slice, or the numbers of its rows for a selection in another order.
Index = slice | Tensor
Wanted = Callable[[Index, Index], bool]
# Bytes of a tile that are cast at a time (heuristic: most tiles whole, and less than anyone's memory).
CHUNK = 256 << 20
Choice = slice | Sequence[int] | np.ndarray | Tensor | None


class Gram(ABC):
    """A Gram matrix [n, m], or [n, c, m, d] for a kernel that is full over outputs."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    def precision(self) -> torch.dtype:
        """The type that its entries were computed in: beyond its digits they say nothing."""
        return self.dtype

    @property
    def device(self) -> torch.device | None:
        """Where it lies in memory; None for one on disk, which is worked on wherever it is multiplied."""
        return None

    @abstractmethod
    def tiles(self, wanted: Wanted | None = None) -> Iterator[tuple[Index, Index, Tensor]]:
        """(rows, columns, tile) of the whole matrix, or of those tiles for which `wanted(rows, columns)` holds.

        Rows and columns are slices; for a selection they may be tensors of positions.
        """

    def dense(self, max_bytes: int | str | None = None) -> Tensor:
        """The whole as one tensor; refuses above `max_bytes` (by default, half of the machine's memory)."""
        limit = checks.memory(max_bytes, "max_bytes")
        if limit is None and not self._in_memory:
            limit = memory_of.machine_memory() // 2
        size = self.shape.numel() * torch.empty(0, dtype=self.dtype).element_size()
        if limit is not None and size > limit:
            raise MemoryBudgetError(
                f"the Gram takes {size} bytes, more than max_bytes={limit}; go by tiles(), take a part (gram[rows, "
                "columns]), or allow more."
            )
        out: Tensor | None = None
        for rows, columns, tile in self.tiles():
            whole = isinstance(rows, slice) and isinstance(columns, slice) and tile.shape == self.shape
            if self._in_memory and whole:
                return tile
            out = tile.new_empty(self.shape) if out is None else out
            place(out, rows, columns, tile)
        return torch.empty(self.shape, dtype=self.dtype) if out is None else out

    def __matmul__(self, v: Tensor | np.ndarray) -> Tensor:
        """K v for v [m] or [m, q], streaming over tiles. Full kernels act on [m·d] or [m·d, q]."""
        return self._product(torch.as_tensor(v), transposed=False)

    def diag(self) -> Tensor:
        """The diagonal of a square Gram: [n], or [n, c]. Reads the tiles on the diagonal only."""
        half = len(self.shape) // 2
        if self.shape[:half] != self.shape[half:]:
            raise InputError(f"the Gram is {tuple(self.shape)}; only a square one has a diagonal.")
        c = self.shape[1:half].numel()
        out: Tensor | None = None
        for rows, columns, tile in self.tiles(_meet):
            at, where = _coincide(rows, columns, tile.device)
            if out is None:
                out = tile.new_zeros(self.shape[0], c)
            flat = tile.reshape(_count(rows), c, _count(columns), c)[at, :, where]
            out[_numbers(rows, tile.device)[at]] = flat.diagonal(dim1=1, dim2=2)
        if out is None:  # no samples
            out = torch.empty(0, c, dtype=self.dtype)
        return out[:, 0] if half == 1 else out

    def __getitem__(self, key: Any) -> Tensor:
        """A dense part: gram[i], gram[2:5], gram[rows, columns] with numbers, slices, index sets or masks."""
        keys = key if isinstance(key, tuple) else (key,)
        keys = tuple(slice(None) if k is Ellipsis else _number(k) for k in keys)
        if len(keys) == 1:
            keys = (*keys, slice(None))
        if len(keys) != 2:
            raise InputError(f"needed: gram[rows] or gram[rows, columns]; got {len(keys)} indices. Outputs come along.")
        single = [isinstance(k, int) for k in keys]
        part = self.select(*([int(k)] if one else k for k, one in zip(keys, single, strict=True))).dense()
        if single[1]:
            part = part.select(part.dim() // 2, 0)
        return part[0] if single[0] else part

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        """Row by row; `tiles` reads each tile once only."""
        return (self[k] for k in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.dense().cpu().numpy(), dtype)

    def select(self, rows: Choice = None, columns: Choice = None) -> "View":
        """The part of the matrix with these rows and columns, in this order, without copying or computing anything.

        >>> import tangency as tg
        >>> gram = tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(9, 3))
        >>> train, test = [8, 0, 3, 4], [1, 2]
        >>> gram.select(train, test).shape
        torch.Size([4, 2])
        """
        view, half = self._view(), len(self.shape) // 2
        i, j = _chosen(rows, self.shape[0], "rows"), _chosen(columns, self.shape[half], "columns")
        left = view.left if view.left is None or i is None else view.left[i]
        right = view.right if view.right is None or j is None else view.right[j]
        return View(view.base, _compose(view.rows, i), _compose(view.columns, j), left, right, view.square)

    def cosine(self, row_diag: Tensor | None = None, column_diag: Tensor | None = None) -> "View":
        """k(x, y) / √(k(x, x) k(y, y)) without recomputing; entries of a sample with itself are exactly 1.

        A Gram of x with another y does not hold k(x, x) and k(y, y): give both, from `kernel.diag`.
        """
        given = row_diag is not None and column_diag is not None
        if not given and (not self._same_samples or row_diag is not None or column_diag is not None):
            raise InputError(
                f"the Gram is {tuple(self.shape)}; its cosine needs k(x, x) and k(y, y): "
                "gram.cosine(kernel.diag(x), kernel.diag(y))."
            )
        left = self.diag() if row_diag is None else row_diag
        right = left if column_diag is None else column_diag
        half = len(self.shape) // 2
        for name, norms, size in (("row", left, self.shape[:half]), ("column", right, self.shape[half:])):
            if norms.shape != size:
                raise InputError(f"{name}_diag has shape {tuple(norms.shape)}; needed: {tuple(size)}.")
            if not bool((norms > 0).all()):
                sample = int((~(norms > 0)).nonzero()[0, 0])
                raise InputError(
                    f"k(x, x) is not positive for {name} {sample}, so its cosine is undefined. Leave that sample out, "
                    "or use the kernel without cosine."
                )
        view, left, right = self._view(), left.sqrt(), right.sqrt()
        if view.left is not None and view.right is not None:  # a cosine already
            left, right = view.left * left.to(view.left.device), view.right * right.to(view.right.device)
        return View(view.base, view.rows, view.columns, left, right, square=not given)

    def weighted(self, weights: Tensor) -> "View":
        """W^½ K W^½ for positive weights [n] of the samples, without copying; for a Gram of samples with themselves."""
        view, half = self._view(), len(self.shape) // 2
        if weights.shape != self.shape[:1] or not bool((weights > 0).all()):
            raise InputError(
                f"weights have shape {tuple(weights.shape)}, the smallest is {float(weights.min()):g}; needed: "
                f"[{self.shape[0]}] numbers above 0."
            )
        norms = weights.rsqrt().reshape(-1, *[1] * (half - 1)).expand(self.shape[:half])
        if view.left is not None:
            norms = norms * view.left.to(norms)
        return View(view.base, view.rows, view.columns, norms, norms)

    def to_scipy(self) -> "LinearOperator":
        """A scipy.sparse.linalg.LinearOperator that streams over tiles: for eigsh, cg, …"""
        from scipy.sparse.linalg import LinearOperator

        def apply(transposed: bool) -> Callable[[Any], Any]:
            return lambda v: self._product(torch.from_numpy(np.array(v)), transposed).cpu().numpy()

        return LinearOperator(
            shape=_flat(self.shape),
            matvec=apply(False),
            matmat=apply(False),
            rmatvec=apply(True),
            rmatmat=apply(True),
            dtype=torch.empty(0, dtype=self.dtype).numpy().dtype,
        )

    def _product(self, v: Tensor, transposed: bool) -> Tensor:
        """K v or Kᵀ v on v's device, in the wider of the two types."""
        (n, m), half = _flat(self.shape), len(self.shape) // 2
        per_row, per_column = self.shape[1:half].numel(), self.shape[half + 1 :].numel()
        if transposed:
            n, m, per_row, per_column = m, n, per_column, per_row
        if v.dim() not in (1, 2) or v.shape[0] != m:
            raise InputError(f"K is {n} x {m} and v has shape {tuple(v.shape)}; needed: [{m}] or [{m}, q].")
        columns_given, dtype = v.dim() == 2, torch.promote_types(v.dtype, self.dtype)
        v = v.to(dtype).reshape(m // per_column, per_column, v.shape[1] if columns_given else 1)
        out, cast = v.new_zeros(n // per_row, per_row, v.shape[2]), _Caster(v)
        for rows, columns, tile in self.tiles():
            if transposed:
                rows, columns, tile = columns, rows, mirror(tile)
            i, j = _on(rows, v.device), _on(columns, v.device)
            piece = v[j].flatten(0, 1)
            parts = [_times(cast(part, len(piece)), piece) for part in _parts(tile, v)]
            out[i] += torch.cat(parts).unflatten(0, (-1, per_row))
        return out.flatten(0, 1) if columns_given else out.flatten()

    def _view(self) -> "View":
        return View(self, None, None, None, None)

    @property
    def _in_memory(self) -> bool:
        return False

    @property
    @abstractmethod
    def _same_samples(self) -> bool:
        """Whether rows and columns are the same samples in the same order, so that the diagonal holds k(x, x)."""


@dataclass(frozen=True, eq=False)
class DenseGram(Gram):
    """A Gram matrix that lies in memory; `symmetric` if its rows and columns are the same samples."""

    value: Float[Tensor, "..."]
    symmetric: bool

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        return self.value.device

    def tiles(self, wanted: Wanted | None = None) -> Iterator[tuple[Index, Index, Tensor]]:
        rows, columns = slice(0, self.shape[0]), slice(0, self.shape[len(self.shape) // 2])
        if wanted is None or wanted(rows, columns):
            yield rows, columns, self.value

    @property
    def _in_memory(self) -> bool:
        return True

    @property
    def _same_samples(self) -> bool:
        return self.symmetric

    def __repr__(self) -> str:
        return f"DenseGram(shape={tuple(self.shape)}, dtype={self.value.dtype}, device={self.value.device})"


@dataclass(frozen=True, eq=False)
class View(Gram):
    """Some rows and columns of a Gram, divided by norms where it is a cosine; read only when asked for."""

    base: Gram
    rows: Tensor | None  # numbers in base; None for all
    columns: Tensor | None
    left: Tensor | None  # √k(x, x) of the rows chosen
    right: Tensor | None
    square: bool = False  # both sides of base are the same samples: a sample's cosine with itself is exactly 1

    @property
    def shape(self) -> torch.Size:
        size, half = list(self.base.shape), len(self.base.shape) // 2
        if self.rows is not None:
            size[0] = len(self.rows)
        if self.columns is not None:
            size[half] = len(self.columns)
        return torch.Size(size)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype if self.left is None else torch.promote_types(self.base.dtype, self.left.dtype)

    @property
    def precision(self) -> torch.dtype:
        return self.base.precision

    @property
    def device(self) -> torch.device | None:
        return self.base.device

    def tiles(self, wanted: Wanted | None = None) -> Iterator[tuple[Index, Index, Tensor]]:
        where = _Finder(self.rows), _Finder(self.columns)

        def touched(rows: Index, columns: Index) -> bool:
            i, j = where[0](rows)[0], where[1](columns)[0]
            return _count(i) > 0 and _count(j) > 0 and (wanted is None or wanted(i, j))

        for rows, columns, tile in self.base.tiles(touched):
            (i, p), (j, q) = where[0](rows), where[1](columns)
            if p is not None:
                tile = tile[p.to(tile.device)]
            if q is not None:
                tile = tile.index_select(tile.dim() // 2, q.to(tile.device))
            yield i, j, self._scaled(tile, i, j)

    def _scaled(self, tile: Tensor, i: Index, j: Index) -> Tensor:
        if self.left is None or self.right is None:
            return tile
        left, right = (
            norms[_on(index, norms.device)].to(tile.device, self.dtype)
            for norms, index in ((self.left, i), (self.right, j))
        )
        tile = tile / (left.reshape(*left.shape, *[1] * right.dim()) * right)  # symmetric to the last bit
        if self.square:
            at, where = _coincide(self._own(i, 0), self._own(j, 1), tile.device)
            c = left.shape[1:].numel()
            own = tile.view(_count(i), c, _count(j), c)  # division made a new tensor
            for k in range(c):
                own[at, k, where, k] = 1.0
        return tile

    def _own(self, index: Index, side: int) -> Index:
        """Numbers in base of positions here."""
        chosen = (self.rows, self.columns)[side]
        return index if chosen is None else chosen[index]

    def _view(self) -> "View":
        return self

    @property
    def _in_memory(self) -> bool:
        return self.base._in_memory

    @property
    def _same_samples(self) -> bool:
        if not self.base._same_samples:
            return False
        if self.left is not None and self.right is not None and not torch.equal(self.left, self.right):
            return False
        every = torch.arange(self.base.shape[0])
        return torch.equal(*(every if chosen is None else chosen for chosen in (self.rows, self.columns)))

    def __repr__(self) -> str:
        what = "part" if self.left is None else "cosine"
        return f"View(shape={tuple(self.shape)}, {what} of {self.base!r})"


class _Finder:
    """Which positions of a selection lie in a block of rows, and where in the block."""

    def __init__(self, chosen: Tensor | None) -> None:
        self.chosen = chosen
        if chosen is not None:
            self.sorted, self.order = torch.sort(chosen, stable=True)

    def __call__(self, block: Index) -> tuple[Index, Tensor | None]:
        if self.chosen is None:
            return block, None
        assert isinstance(block, slice)
        low, high = (int(torch.searchsorted(self.sorted, k)) for k in (block.start, block.stop))
        return self.order[low:high], self.sorted[low:high] - block.start


class _Caster:
    """Tiles as matrices in another type, in one buffer; the mirror image that follows a tile is not cast again."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.buffer = like, like.new_empty(0)
        self.source = self.last = like.new_empty(0, 0)

    def __call__(self, tile: Tensor, columns: int) -> Tensor:
        if tile.dtype == self.like.dtype and tile.device == self.like.device:
            return tile.reshape(-1, columns)
        turned = tile.dim() == 2 and tile.stride(0) == 1 and tile.stride(1) > 1
        straight = tile.T if turned else tile.reshape(-1, columns)
        # The source is held, so that no other tile can lie at its address meanwhile.
        if self.source.data_ptr() != straight.data_ptr() or self.source.shape != straight.shape:
            if self.buffer.numel() < straight.numel():
                self.buffer = self.like.new_empty(straight.numel())
            self.last = self.buffer[: straight.numel()].view(straight.shape).copy_(straight)
            self.source = straight
        return self.last.T if turned else self.last


def _parts(tile: Tensor, like: Tensor) -> Sequence[Tensor]:
    """The rows of a tile in parts, so that casting a large one takes little memory."""
    if tile.dtype == like.dtype or tile.numel() * like.element_size() <= CHUNK:
        return (tile,)
    return tile.split(max(1, CHUNK // (tile[0].numel() * like.element_size())))


def _times(k: Tensor, v: Tensor) -> Tensor:
    """k v; where k's columns lie in sequence as (vᵀ kᵀ)ᵀ, for few columns up to three times as fast."""
    return (v.T @ k.T).T if k.stride(0) == 1 and k.stride(1) > 1 else k @ v


def place(out: Tensor, rows: Index, columns: Index, tile: Tensor) -> None:
    """Write a tile where it belongs."""
    i, j = _on(rows, out.device), _on(columns, out.device)
    target = out[i] if isinstance(i, slice) else None
    if target is not None:  # a slice of rows is a view
        if out.dim() == 2:
            target[:, j] = tile.to(out)
        else:
            target[:, :, j] = tile.to(out)
        return
    j = _numbers(columns, out.device)
    if out.dim() == 2:
        out[_numbers(rows, out.device)[:, None], j] = tile.to(out)
    else:
        out.permute(0, 2, 1, 3)[_numbers(rows, out.device)[:, None], j] = tile.to(out).permute(0, 2, 1, 3)


def mirror(tile: Tensor) -> Tensor:
    """The tile on the other side of the diagonal."""
    return tile.T if tile.dim() == 2 else tile.permute(2, 3, 0, 1)


def _flat(shape: torch.Size) -> tuple[int, int]:
    half = len(shape) // 2
    return shape[:half].numel(), shape[half:].numel()


def _count(index: Index) -> int:
    return index.stop - index.start if isinstance(index, slice) else len(index)


def _numbers(index: Index, device: torch.device) -> Tensor:
    if isinstance(index, slice):
        return torch.arange(index.start, index.stop, device=device)
    return index.to(device)


def _on(index: Index, device: torch.device) -> Index:
    return index if isinstance(index, slice) else index.to(device)


def _meet(rows: Index, columns: Index) -> bool:
    """Whether a tile touches the diagonal."""
    if isinstance(rows, slice) and isinstance(columns, slice):
        return rows.start < columns.stop and columns.start < rows.stop
    cpu = torch.device("cpu")
    return bool(torch.isin(_numbers(rows, cpu), _numbers(columns, cpu)).any())


def _coincide(rows: Index, columns: Index, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where in a tile a row and a column have the same number."""
    if isinstance(rows, slice) and isinstance(columns, slice):
        start, stop = max(rows.start, columns.start), min(rows.stop, columns.stop)
        same = torch.arange(start, max(start, stop), device=device)
        return same - rows.start, same - columns.start
    i, j = _numbers(rows, device), _numbers(columns, device)
    ordered, order = torch.sort(j)
    first, last = torch.searchsorted(ordered, i), torch.searchsorted(ordered, i, right=True)
    times = last - first
    at = torch.repeat_interleave(torch.arange(len(i), device=device), times)
    within = torch.arange(len(at), device=device) - torch.repeat_interleave(times.cumsum(0) - times, times)
    return at, order[first[at] + within]


def _compose(outer: Tensor | None, inner: Tensor | None) -> Tensor | None:
    return inner if outer is None else outer if inner is None else outer[inner]


def _number(key: Any) -> Any:
    """One number as an int, in whatever form it comes; everything else as it is."""
    one = isinstance(key, (Tensor, np.ndarray)) and key.ndim == 0 and "int" in str(key.dtype)
    if isinstance(key, (bool, np.bool_, str)):
        raise InputError(f"{key!r} is no row or column; needed: numbers, slices, index sets or masks.")
    return int(key) if one or isinstance(key, (int, np.integer)) else key


def _chosen(choice: Choice, count: int, name: str) -> Tensor | None:
    """An index set as numbers; None for all."""
    if choice is None or (isinstance(choice, slice) and choice == slice(None)):
        return None
    if isinstance(choice, slice):
        return torch.tensor(range(count)[choice], dtype=torch.long)
    index = torch.as_tensor(choice.copy() if isinstance(choice, np.ndarray) else choice).cpu()
    if index.dtype == torch.bool:
        if index.shape != (count,):
            raise InputError(f"the mask for {name} has shape {tuple(index.shape)}; needed: [{count}].")
        return index.nonzero()[:, 0]
    if index.numel() == 0:
        index = index.long()
    if index.dim() != 1 or index.is_floating_point() or index.is_complex():
        raise InputError(
            f"{name} must be a list of numbers, a slice or a mask; got {index.dtype} {tuple(index.shape)}."
        )
    index = index.long()
    bad = (index < -count) | (index >= count)
    if bool(bad.any()):
        raise InputError(f"{name}: number {int(index[bad][0])} is not among the {count} of this Gram.")
    return torch.where(index < 0, index + count, index)
