"""Gram matrices as results: a thing that can be multiplied, sliced and looked at tile by tile.

A Gram need not fit in memory. All that a kind of Gram must bring is `shape`, `dtype` and `tiles()`; products, the
diagonal, slices, selections and cosines follow from these, and each reads only the tiles that it needs.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from .._base import checks, tree
from .._base import memory as memory_of
from .._base.extras import needed
from .._base.machine import available_memory
from .._base.types import Float, Memory, Numbers
from ..errors import InputError, MemoryBudgetError
from .indices import (
    Choice,
    Finder,
    Index,
    Wanted,
    chosen,
    coincide,
    compose,
    length,
    meet,
    mirror_tile,
    number_or_choice,
    numbers,
    on_device,
    place_tile,
    unmeshed,
)

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

# Bytes of a tile that are cast at a time (heuristic: most tiles whole, and less than anyone's memory).
CAST_BYTES = 256 << 20


class Gram(ABC):
    """A Gram matrix [n, m], or [n, c, m, d] for a kernel that is full over outputs."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """[n, m] or [n, c, m, d]: samples, and outputs of each where the kernel is full over them."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of its entries."""

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

    def dense(self, max_bytes: Memory = None) -> Tensor:
        """The whole as one tensor; refuses above `max_bytes` (by default, half of the machine's memory)."""
        limit = checks.memory(max_bytes, "max_bytes")
        # One that lies in memory is there already, or is at most as large as what is.
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
            if self._in_memory and whole:  # it is there already: a copy would take as much again
                return tile
            out = tile.new_empty(self.shape) if out is None else out
            place_tile(out, rows, columns, tile)
        return torch.empty(self.shape, dtype=self.dtype) if out is None else out

    def __matmul__(self, v: Numbers) -> Tensor:
        """K v for v [m] or [m, q], streaming over tiles. Full kernels act on [m·d] or [m·d, q]."""
        return self._product(_tensor(v, "v"), transposed=False)

    def diag(self) -> Tensor:
        """The diagonal of a square Gram: [n], or [n, c]. Reads the tiles on the diagonal only."""
        half = len(self.shape) // 2
        if self.shape[:half] != self.shape[half:]:
            raise InputError(f"the Gram is {tuple(self.shape)}; only a square one has a diagonal.")
        c = self.shape[1:half].numel()  # 1 for [n, n]: then everything below has an axis of length 1
        out: Tensor | None = None
        for rows, columns, tile in self.tiles(meet):
            i, j = coincide(rows, columns, tile.device)
            if out is None:
                out = tile.new_zeros(self.shape[0], c)
            meeting = tile.reshape(length(rows), c, length(columns), c)[i, :, j]  # [k, c, c]
            out[numbers(rows, tile.device)[i]] = meeting.diagonal(dim1=1, dim2=2)
        if out is None:  # no samples
            out = torch.empty(0, c, dtype=self.dtype)
        return out[:, 0] if half == 1 else out

    def __getitem__(self, key: object) -> Tensor:
        """A dense part: gram[i], gram[2:5], gram[rows, columns] with numbers, slices, index sets or masks."""
        keys = [number_or_choice(k) for k in unmeshed(key if isinstance(key, tuple) else (key,))]
        if len(keys) == 1:
            keys.append(slice(None))
        if len(keys) != 2:
            raise InputError(f"needed: gram[rows] or gram[rows, columns]; got {len(keys)} indices. Outputs come along.")
        rows, columns = keys
        part = self.select(*([k] if isinstance(k, int) else k for k in keys)).dense()
        if isinstance(columns, int):  # one number takes its axis away, as in an array
            part = part.select(part.dim() // 2, 0)
        return part[0] if isinstance(rows, int) else part

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        """Row by row; `tiles` reads each tile once only."""
        return (self[k] for k in range(len(self)))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """What NumPy, scikit-learn and matplotlib make of it: the whole, in the machine's memory.

        One that lies there already is shared unless `copy` is True; where a copy is needed, `copy=False` is refused.
        """
        held = self._held
        own = np.dtype(str(self.dtype).removeprefix("torch."))
        wanted = own if dtype is None else np.dtype(dtype)
        shared = held is not None and held.device.type == "cpu"
        if copy is False and not (shared and wanted == own):
            raise InputError("an array of this Gram is a copy (copy=False was asked for). Leave copy out.")
        # In another type there is it twice for a moment.
        size = self.shape.numel() * ((0 if shared else own.itemsize) + (0 if wanted == own else wanted.itemsize))
        if size > (free := available_memory()):
            raise MemoryBudgetError(
                f"as an array the Gram takes {size} bytes, and {free} are free; go by tiles(), or take a part: "
                "gram[rows, columns]."
            )
        whole = self.dense(max_bytes=None if shared else max(size, 1)).detach().cpu()
        return whole.numpy().astype(wanted, copy=bool(copy and shared))

    def numpy(self) -> np.ndarray:
        """The whole as an array, [n, m] or [n, c, m, d]; `np.asarray(gram)` gives the same.

        >>> import tangency as tg
        >>> tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(9, 3)).numpy().shape
        (9, 9)
        """
        return self.__array__()

    def __dlpack__(self, **options: object) -> object:
        """How torch takes it, in `torch.as_tensor(gram)` and `torch.asarray(gram)`: the whole, as `dense` gives it."""
        return self.dense().detach().__dlpack__(**options)  # type: ignore[arg-type]  # the protocol's, whatever they are

    def __dlpack_device__(self) -> tuple[enum.IntEnum, int]:
        """Where that lies: beside the Gram, in the machine's memory for one on disk."""
        return torch.empty(0, device=self.device).__dlpack_device__()

    def select(self, rows: Choice = None, columns: Choice = None) -> "GramView":
        """The part of the matrix with these rows and columns, in this order, without copying or computing anything.

        >>> import tangency as tg
        >>> gram = tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(9, 3))
        >>> train, test = [8, 0, 3, 4], [1, 2]
        >>> gram.select(train, test).shape
        torch.Size([4, 2])
        """
        view, half = self._view(), len(self.shape) // 2
        i, j = chosen(rows, self.shape[0], "rows"), chosen(columns, self.shape[half], "columns")
        left = view.left if view.left is None or i is None else view.left[i]
        right = view.right if view.right is None or j is None else view.right[j]
        return GramView(view.base, compose(view.rows, i), compose(view.columns, j), left, right, view.square)

    def cosine(self, row_diag: Numbers | None = None, column_diag: Numbers | None = None) -> "GramView":
        """k(x, y) / √(k(x, x) k(y, y)) without recomputing; entries of a sample with itself are exactly 1.

        A Gram of x with another y does not hold k(x, x) and k(y, y): give both, from `kernel.diag`.
        """
        both_given = row_diag is not None and column_diag is not None
        if not both_given and (not self._same_samples or row_diag is not None or column_diag is not None):
            raise InputError(
                f"the Gram is {tuple(self.shape)}; its cosine needs k(x, x) and k(y, y): "
                "gram.cosine(kernel.diag(x), kernel.diag(y))."
            )
        left = self.diag() if row_diag is None else _tensor(row_diag, "row_diag")
        right = left if column_diag is None else _tensor(column_diag, "column_diag")
        half = len(self.shape) // 2
        for name, norms, size in (("row", left, self.shape[:half]), ("column", right, self.shape[half:])):
            if norms.shape != size:
                raise InputError(f"{name}_diag has shape {tuple(norms.shape)}; needed: {tuple(size)}.")
            if not bool((norms > 0).all()):  # NaN is not above 0 either
                sample = int((~(norms > 0)).nonzero()[0, 0])
                raise InputError(
                    f"k(x, x) is not positive for {name} {sample}, so its cosine is undefined. Leave that sample out, "
                    "or use the kernel without cosine."
                )
        # Roots before products: k(x, x) k(y, y) may overflow where its root does not.
        view, left, right = self._view(), left.sqrt(), right.sqrt()
        if view.left is not None and view.right is not None:  # a cosine already
            left, right = view.left * left.to(view.left.device), view.right * right.to(view.right.device)
        return GramView(view.base, view.rows, view.columns, left, right, square=not both_given)

    def weighted(self, weights: Numbers) -> "GramView":
        """W^½ K W^½ for positive weights [n] of the samples, without copying; for a Gram of samples with themselves."""
        view, half, weights = self._view(), len(self.shape) // 2, _tensor(weights, "weights")
        if weights.shape != self.shape[:1] or not bool((weights > 0).all()):
            smallest = f", the smallest is {float(weights.min()):g}" if weights.numel() else ""
            raise InputError(
                f"weights have shape {tuple(weights.shape)}{smallest}; needed: [{self.shape[0]}] numbers above 0."
            )
        # A view divides its entries by norms, here by w^-½ on both sides; all outputs of a sample have its weight.
        norms = weights.rsqrt().reshape(-1, *[1] * (half - 1)).expand(self.shape[:half])
        if view.left is not None:
            norms = norms * view.left.to(norms)
        return GramView(view.base, view.rows, view.columns, norms, norms)

    def to_scipy(self) -> "LinearOperator":
        """A scipy.sparse.linalg.LinearOperator that streams over tiles: for eigsh, cg, …"""
        with needed("scipy", "to_scipy()"):
            from scipy.sparse.linalg import LinearOperator

        def apply(transposed: bool) -> Callable[[np.ndarray], np.ndarray]:
            """The product with the matrix or with its transpose, as SciPy calls it."""
            # A copy: scipy's arrays may be read-only, which torch cannot share.
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
        # Samples and their outputs on two axes: tiles are cut by samples.
        several, dtype = v.dim() == 2, torch.promote_types(v.dtype, self.dtype)
        v = v.to(dtype).reshape(m // per_column, per_column, v.shape[1] if several else 1)
        out, cast = v.new_zeros(n // per_row, per_row, v.shape[2]), _Caster(v)
        for rows, columns, tile in self.tiles():
            if transposed:
                rows, columns, tile = columns, rows, mirror_tile(tile)
            i, j = on_device(rows, v.device), on_device(columns, v.device)
            piece = v[j].flatten(0, 1)
            parts = [_times(cast(part, len(piece)), piece) for part in _parts(tile, v)]
            out[i] += torch.cat(parts).unflatten(0, (-1, per_row))
        return out.flatten(0, 1) if several else out.flatten()

    def _view(self) -> "GramView":
        """All of it as a view. A view is its own: views of views do not pile up."""
        return GramView(self, None, None, None, None)

    @property
    def _in_memory(self) -> bool:
        return False

    @property
    def _held(self) -> Tensor | None:
        """The tensor that it is, where it is one."""
        return None

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
        """That of its tensor."""
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of its tensor."""
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        """Where its tensor lies."""
        return self.value.device

    def tiles(self, wanted: Wanted | None = None) -> Iterator[tuple[Index, Index, Tensor]]:
        """The whole as one tile."""
        rows, columns = slice(0, self.shape[0]), slice(0, self.shape[len(self.shape) // 2])
        if wanted is None or wanted(rows, columns):
            yield rows, columns, self.value

    @property
    def _in_memory(self) -> bool:
        return True

    @property
    def _held(self) -> Tensor:
        return self.value

    @property
    def _same_samples(self) -> bool:
        return self.symmetric

    def __repr__(self) -> str:
        return f"DenseGram(shape={tuple(self.shape)}, dtype={self.value.dtype}, device={self.value.device})"


@dataclass(frozen=True, eq=False)
class GramView(Gram):
    """Some rows and columns of a Gram, divided by norms where it is a cosine; read only when asked for."""

    base: Gram
    rows: Tensor | None  # numbers in base; None for all
    columns: Tensor | None
    left: Tensor | None  # √k(x, x) of the rows chosen
    right: Tensor | None
    square: bool = False  # both sides of base are the same samples: a sample's cosine with itself is exactly 1

    @property
    def shape(self) -> torch.Size:
        """That of base, with as many rows and columns as were chosen."""
        size, half = list(self.base.shape), len(self.base.shape) // 2
        if self.rows is not None:
            size[0] = len(self.rows)
        if self.columns is not None:
            size[half] = len(self.columns)
        return torch.Size(size)

    @property
    def dtype(self) -> torch.dtype:
        """That of base, or of the norms that it is divided by if that is wider."""
        return self.base.dtype if self.left is None else torch.promote_types(self.base.dtype, self.left.dtype)

    @property
    def precision(self) -> torch.dtype:
        """That of base: selecting and dividing make nothing more precise."""
        return self.base.precision

    @property
    def device(self) -> torch.device | None:
        """Where base lies."""
        return self.base.device

    def tiles(self, wanted: Wanted | None = None) -> Iterator[tuple[Index, Index, Tensor]]:
        """The parts of base's tiles that were chosen; tiles of base without any are not read."""
        find_rows, find_columns = Finder(self.rows), Finder(self.columns)

        def touched(rows: Index, columns: Index) -> bool:
            """Whether a tile of the Gram below holds any entry that is wanted."""
            i, j = find_rows(rows)[0], find_columns(columns)[0]
            return length(i) > 0 and length(j) > 0 and (wanted is None or wanted(i, j))

        for rows, columns, tile in self.base.tiles(touched):
            # i, j: positions here; p, q: where these lie in base's tile.
            (i, p), (j, q) = find_rows(rows), find_columns(columns)
            if p is not None:
                tile = tile[p.to(tile.device)]
            if q is not None:
                tile = tile.index_select(tile.dim() // 2, q.to(tile.device))
            yield i, j, self._scaled(tile, i, j)

    def _scaled(self, tile: Tensor, i: Index, j: Index) -> Tensor:
        """A tile of the chosen rows and columns, divided by their norms if this is a cosine."""
        if self.left is None or self.right is None:
            return tile
        left, right = (
            norms[on_device(index, norms.device)].to(tile.device, self.dtype)
            for norms, index in ((self.left, i), (self.right, j))
        )
        tile = tile / (left.reshape(*left.shape, *[1] * right.dim()) * right)  # symmetric to the last bit
        if self.square:
            rows, columns = (
                index if chosen is None else chosen[index] for index, chosen in ((i, self.rows), (j, self.columns))
            )  # as base numbers them
            at, where = coincide(rows, columns, tile.device)
            c = left.shape[1:].numel()
            entries = tile.view(length(i), c, length(j), c)  # of the tile itself: the division made a new tensor
            for k in range(c):
                entries[at, k, where, k] = 1.0  # and not 1 − ε
        return tile

    def _view(self) -> "GramView":
        return self

    @property
    def _in_memory(self) -> bool:
        return self.base._in_memory

    @property
    def _held(self) -> Tensor | None:
        whole = all(part is None for part in (self.rows, self.columns, self.left))
        return self.base._held if whole else None

    @property
    def _same_samples(self) -> bool:
        if not self.base._same_samples:
            return False
        if self.left is not None and self.right is not None and not torch.equal(self.left, self.right):
            return False
        everything = torch.arange(self.base.shape[0])
        return torch.equal(*(everything if side is None else side for side in (self.rows, self.columns)))

    def __repr__(self) -> str:
        what = "part" if self.left is None else "cosine"
        return f"GramView(shape={tuple(self.shape)}, {what} of {self.base!r})"


class _Caster:
    """Tiles as matrices in another type, in one buffer; the mirror image that follows a tile is not cast again."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.buffer = like, like.new_empty(0)
        self.source = self.last = like.new_empty(0, 0)

    def __call__(self, tile: Tensor, columns: int) -> Tensor:
        if tile.dtype == self.like.dtype and tile.device == self.like.device:
            return tile.reshape(-1, columns)
        # A mirror image lies column by column, in the memory of the tile that it mirrors.
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
    if tile.dtype == like.dtype or tile.numel() * like.element_size() <= CAST_BYTES:
        return (tile,)
    return tile.split(max(1, CAST_BYTES // (tile[0].numel() * like.element_size())))


def _times(k: Tensor, v: Tensor) -> Tensor:
    """k v; where k's columns lie in sequence as (vᵀ kᵀ)ᵀ, for few columns up to three times as fast."""
    return (v.T @ k.T).T if k.stride(0) == 1 and k.stride(1) > 1 else k @ v


def _flat(shape: torch.Size) -> tuple[int, int]:
    """[n·c, m·d]: the shape as that of a matrix."""
    half = len(shape) // 2
    return shape[:half].numel(), shape[half:].numel()


def _tensor(v: Numbers, name: str) -> Tensor:
    """Numbers that a user gave for the samples, in any form."""
    if isinstance(v, np.ndarray):
        return tree.from_array(v, name)
    try:
        return torch.as_tensor(v)
    except (TypeError, ValueError, RuntimeError):
        return tree.numbers(v, name)  # says what is wrong
