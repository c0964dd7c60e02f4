"""Where samples come from: anything that can be cut into batches, in memory or not.

A tensor, a NumPy array or memmap, a zarr array, or whatever else has `shape` and takes slices; a tuple or dict of
these; a `torch.utils.data.Dataset`. Only the block that is being prepared is ever loaded.
"""

import hashlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .._base import tree
from .._base.types import FeatureBatch, Inputs
from ..errors import InputError
from ..kernels.kernel import Kernel
from .rows import RowMap

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

# What of an item goes to the model, and what makes a batch of a list of items.
Pick = int | str | tuple[int | str, ...] | Callable[..., object] | None
Collate = Callable[..., Inputs]
# Bytes that are read together when a source is hashed (heuristic).
_PIECE = 1 << 22


class Sliced(Protocol):
    """A tensor, a NumPy array or memmap, a zarr array: whatever has a shape and a type and takes slices."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The samples lie along its first dimension."""

    @property
    def dtype(self) -> object:
        """Of its numbers."""

    def __getitem__(self, block: slice) -> object: ...


class Source(ABC):
    """Samples that are loaded a block at a time."""

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def take(self, block: slice) -> Inputs:
        """These samples as tensors."""

    @abstractmethod
    def digest(self) -> str:
        """A hash of every sample, independent of how they are stored. Cost: reads everything once."""


class Fingerprinted(Source):
    """The user's own samples, of which each has a fingerprint."""

    # Whether they may be others each time they are loaded, without anybody changing them.
    fickle: ClassVar[bool] = False

    @abstractmethod
    def load(self, block: slice) -> tuple[Inputs, Callable[[], np.ndarray]]:
        """These samples as tensors, and what finds their fingerprints [n], which are comparable within a process."""

    @abstractmethod
    def form(self) -> tuple[str, int]:
        """What all samples have in common, hashed, and how many are best loaded at once to hash them."""

    @abstractmethod
    def feed(self, h: "Hash", taken: Inputs) -> None:
        """Hash a block."""

    def take(self, block: slice) -> Inputs:
        """These samples as tensors."""
        return self.load(block)[0]

    def digest(self) -> str:
        """A hash of every sample, independent of how they are stored. Cost: reads everything once."""
        return Watched(self, "x").digest()


@dataclass(frozen=True, eq=False)
class Arrays(Fingerprinted):
    """A tensor or array, or a tuple or dict of them, or features; other values (flags, None) are passed through."""

    data: object

    def __len__(self) -> int:
        return int(next(_leaves(self.data))[1].shape[0])

    def load(self, block: slice) -> tuple[Inputs, Callable[[], np.ndarray]]:
        """A copy of these samples; a fingerprint is a checksum of a row's bytes."""
        taken = _mapped(lambda v: _cut(v, block), self.data)
        return taken, lambda: _fingerprints([torch.as_tensor(t) for _, t in _leaves(taken)])

    def form(self) -> tuple[str, int]:
        """Names, shapes and types of the arrays, and the values that are passed through."""
        first = _leaves(_mapped(lambda v: _cut(v, slice(0, 1)), self.data))
        h = hashlib.sha256("".join(f"{name} {tuple(t.shape[1:])} {t.dtype} " for name, t in first).encode())
        for name, v in _values(self.data):
            _hash(h, name, v)
        size = sum(int(np.prod(v.shape[1:])) * 8 for _, v in _leaves(self.data))
        return h.hexdigest(), max(1, _PIECE // max(1, size))

    def feed(self, h: "Hash", taken: Inputs) -> None:
        """The bytes of the samples."""
        for _, t in _leaves(taken):
            h.update(_bytes(torch.as_tensor(t)))


@dataclass(frozen=True, eq=False)
class Items(Fingerprinted):
    """A `Dataset`, item by item; `collate` makes a batch of a list of items."""

    dataset: "Dataset[object]"
    pick: Pick
    collate: Collate
    fickle = True

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # `from_dataset` has looked

    def load(self, block: slice) -> tuple[Inputs, Callable[[], np.ndarray]]:
        """The fingerprint is that of what `collate` makes of an item alone: an item need not show its content."""
        items = [self.item(k) for k in range(block.start, block.stop)]
        taken = self._collated(items, block)

        def fingerprints() -> np.ndarray:
            """A fingerprint of each item, taken by itself."""
            # An item may collate otherwise in company, but its row must be the same (`_same_row`).
            alone = [taken] if len(items) == 1 else [self._collated([item], block) for item in items]
            for k, x in enumerate(alone if len(items) > 1 else ()):
                _same_row(taken, x, k, block.start + k)
            return np.array([_fingerprint(x) for x in alone], np.int64)

        return taken, fingerprints

    def form(self) -> tuple[str, int]:
        """Items may differ in form, so each is hashed with its own, one by one."""
        return "items", 1

    def feed(self, h: "Hash", taken: Inputs) -> None:
        """Shapes, types and bytes of what `collate` made."""
        _hash(h, "", taken)

    def item(self, k: int) -> object:
        """What goes to the model of item k."""
        item = self.dataset[k]
        if callable(self.pick):
            return self.pick(item)
        try:
            if isinstance(self.pick, tuple):
                return tuple(item[p] for p in self.pick)  # type: ignore[index]  # if it is not, we say so below
            return item if self.pick is None else item[self.pick]  # type: ignore[index]
        except (KeyError, IndexError, TypeError) as e:
            raise InputError(
                f"pick={self.pick!r} is not in item {k} of the data set, a {type(item).__name__} "
                f"({type(e).__name__}: {e}). Say what of an item goes to the model: a position, a key, or a function."
            ) from e

    def _collated(self, items: list[object], block: slice) -> Inputs:
        try:
            return self.collate(items)
        except (TypeError, RuntimeError, ValueError, KeyError, AttributeError) as e:
            raise InputError(
                f"the items {block.start} to {block.stop - 1} of the data set, of type {type(items[0]).__name__}, "
                f"could not be made a batch ({type(e).__name__}: {e}). Give a function that makes one of a list of "
                "items: tg.from_dataset(…, pick, collate=…)."
            ) from e


class Watched(Source):
    """A source that gives the same samples each time, or is refused.

    Arrays are watched from when they were hashed: nobody but their owner changes them. Items of a data set may be
    others each time they are loaded (augmentation, a file that grows).
    """

    def __init__(self, source: Source, name: str) -> None:
        self.source, self.name = source, name
        self._on = isinstance(source, Fingerprinted) and source.fickle
        # Which samples have been loaded, and the fingerprint that each had then.
        self._seen, self._known = np.zeros(len(source), bool), np.zeros(len(source), np.int64)

    def __len__(self) -> int:
        return len(self.source)

    def take(self, block: slice) -> Inputs:
        """These samples, if they are what they were."""
        if not isinstance(self.source, Fingerprinted):
            return self.source.take(block)
        taken, fingerprints = self.source.load(block)
        if self._on:
            self._compare(block, fingerprints())
        return taken

    def _compare(self, block: slice, now: np.ndarray) -> None:
        seen, known = self._seen[block], self._known[block]
        other = np.flatnonzero(seen & (known != now))
        if len(other):
            raise InputError(
                f"sample {block.start + int(other[0])} of {self.name} is not what it was when it was loaded before"
                + (f", and {len(other) - 1} more of its block are not" if len(other) > 1 else "")
                + ". A kernel needs fixed samples: switch augmentation off, draw random numbers once and keep what "
                "they give, and leave arrays and files alone while it is computed."
            )
        self._seen[block], self._known[block] = True, now

    def digest(self) -> str:
        """A hash of every sample; from now on they are watched. Cost: reads everything once."""
        if not isinstance(self.source, Fingerprinted):
            return self.source.digest()
        self._on = True
        form, step = self.source.form()
        h = hashlib.sha256(f"{form} {len(self)} ".encode())
        for start in range(0, len(self), step):
            self.source.feed(h, self.take(slice(start, min(start + step, len(self)))))
        return h.hexdigest()[:16]


def from_dataset(dataset: "Dataset[object]", pick: Pick = None, *, collate: Collate | None = None) -> "Items":
    """The items of a `torch.utils.data.Dataset` as inputs of `tg.compute`, loaded a block at a time.

    `pick` says what of an item goes to the model: a position or key (`0` for the image of an (image, label) pair), a
    tuple of them, or a function. `collate` makes a batch of a list of items (default: torch's own); one that pads each
    batch to its own longest sample saves work where samples differ in length and are sorted by it.

    >>> import tangency as tg
    >>> pairs = torch.utils.data.TensorDataset(torch.randn(9, 3), torch.arange(9))
    >>> tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), tg.from_dataset(pairs, 0)).shape
    torch.Size([9, 9])
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"the data set is a {type(dataset).__name__}; needed: one with a length and numbered items (map-style)."
        )
    if len(dataset) == 0:
        raise InputError("the data set is empty; a kernel needs at least one sample.")
    return Items(dataset, pick, collate or default_collate)


def source(x: object, name: str) -> Source:
    """What the user gave, as a Source, checked."""
    if isinstance(x, Source):
        return x
    if isinstance(x, FeatureBatch):
        tree.check(x.value, name)
        return Arrays(x)
    if isinstance(x, Dataset):
        made = from_dataset(x)
        item = made.item(0)
        if isinstance(item, (tuple, list)) and len(item) > 1 and _label(item[-1]):
            raise InputError(
                f"the items of {name} are ({', '.join(type(v).__name__ for v in item)}), which looks like inputs and a "
                f"label. Say what goes to the model: tg.from_dataset({name}, pick=0); with a loss as head, (0, 1)."
            )
        return made
    if isinstance(x, list) and x and not any(_sliced(v) for v in x):
        raise InputError(
            f"{name} is a list of {type(x[0]).__name__}; needed: a tensor, array, tuple, dict or data set."
        )
    if not isinstance(x, (Mapping, tuple, list)) and not _sliced(x):
        raise InputError(
            f"{name} is a {type(x).__name__}; needed: a tensor, a NumPy or zarr array, a tuple or dict of them, or a "
            f"torch Dataset, with the sample in the leading dimension.{tree.advice(x, name)}"
        )
    for label, v in _leaves(x):
        _check_numbers(v, name + label)
    # What the checks look at are shapes.
    tree.check(_mapped(lambda v: torch.empty(tuple(v.shape), device="meta"), x), name)
    return Arrays(x)


def _check_numbers(v: Sliced, name: str) -> None:
    """Refuse what has a shape and can be cut, but into no tensors."""
    if isinstance(v, Tensor):
        tree.check_layout(v, name)
        return
    fix = tree.advice(v, name)
    if fix:
        raise InputError(f"{name} is a {type(v).__name__}; needed: a tensor, a NumPy or a zarr array.{fix}")
    if isinstance(v.dtype, np.dtype):
        _check_kind(v.dtype, name)
        # It says what is wrong, of masked arrays and of types that torch has not; nothing is read.
        tree.from_array(v if isinstance(v, np.ma.MaskedArray) else np.empty(0, v.dtype), name)


def _check_kind(dtype: np.dtype, name: str) -> None:
    """Refuse an array of anything but numbers."""
    if dtype.kind not in "biufc":
        raise InputError(
            f"{name} holds {dtype}, of which there are no tensors; needed: numbers. For texts or samples of several "
            "lengths: tg.from_dataset(…, collate=…)."
        )


def batch(kernel: Kernel | RowMap, x: Inputs, name: str, count: int) -> Inputs:
    """A block as the kernel takes it: on its device, checked, cast, and as many samples as were asked for."""
    device = kernel.device
    x = kernel.ready(x if device is None else tree.to(x, device), name)
    if tree.size(x) != count:
        raise InputError(
            f"{name}: {count} samples were asked for, and {tree.size(x)} came. A collate function must make one row "
            "of each item, in their order."
        )
    return x


def _sliced(v: object) -> TypeGuard[Sliced]:
    return hasattr(v, "shape") and hasattr(v, "dtype") and hasattr(v, "__getitem__") and not np.isscalar(v)


def _mapped(f: Callable[[Sliced], Tensor], form: object) -> Inputs:
    """`tree.transform` for whatever can be cut: f of every array, other values as they are."""
    if _sliced(form):
        return f(form)
    if isinstance(form, Mapping):
        return {k: _mapped(f, v) for k, v in form.items()}
    if isinstance(form, (tuple, list)):
        return tuple(_mapped(f, v) for v in form)
    if isinstance(form, FeatureBatch):
        return replace(form, value=f(form.value))
    return form  # type: ignore[return-value]  # a flag inside inputs, which is passed through


def _cut(v: Sliced, block: slice) -> Tensor:
    """A copy: what is changed after it was looked at must not be what is used."""
    if isinstance(v, Tensor):
        return v[block].detach().clone()
    taken = _tensor(np.array(v[block]))
    _release(v)
    return taken


def _items(form: object, name: str = "") -> Iterator[tuple[str, object]]:
    """What is not a container, with its name."""
    if isinstance(form, Mapping):
        for k in sorted(form, key=str):  # in which order they were given is no matter
            yield from _items(form[k], f"{name}[{k!r}]")
    elif isinstance(form, (tuple, list)):
        for j, v in enumerate(form):
            yield from _items(v, f"{name}[{j}]")
    elif isinstance(form, FeatureBatch):
        # The name decides the hash: with another one, stores of Grams of features could not be gone on with.
        yield f"{name}[{'features of ' + form.origin!r}]", form.value
    else:
        yield name, form


def _leaves(form: object) -> Iterator[tuple[str, Sliced]]:
    return ((name, v) for name, v in _items(form) if _sliced(v))


def _values(form: object) -> Iterator[tuple[str, object]]:
    return ((name, v) for name, v in _items(form) if not _sliced(v))


def _same_row(batch: Inputs, alone: Inputs, k: int, number: int) -> None:
    """Refuse a batch whose row k is not what item k gives alone, padded or not: collate may have sorted the items."""
    for (label, rows), (_, row) in zip(_leaves(batch), _leaves(alone), strict=False):
        if len(row.shape) < 1 or len(rows.shape) != len(row.shape) or rows.shape[0] <= k or row.shape[0] != 1:
            continue  # the kernel says what it thinks of that
        together, single = torch.as_tensor(rows[k : k + 1])[0], torch.as_tensor(row[0:1])[0]
        if any(a < b for a, b in zip(together.shape, single.shape, strict=True)):
            continue
        # Padding is at the end or, for some tokenizers, at the beginning.
        front = together[tuple(slice(0, s) for s in single.shape)]
        back = together[tuple(slice(size - s, size) for size, s in zip(together.shape, single.shape, strict=True))]
        if not any(torch.equal(part.nan_to_num(), single.nan_to_num()) for part in (front, back)):
            raise InputError(
                f"item {number} of the data set is not row {k} of the batch that collate makes of its block"
                f"{f' ({label})' if label else ''}: alone it gives other numbers. A collate function must make one row "
                "of each item, in their order, whatever else is in the batch."
            )


def _fingerprints(leaves: list[Tensor]) -> np.ndarray:
    """A checksum of each row of tensors that lie side by side."""
    first, *others = (np.frombuffer(_bytes(t), np.uint8).reshape(len(t), -1) for t in leaves)
    prints = [_checksum(row) for row in first]
    for rows in others:
        prints = [hash((seen, _checksum(row))) for seen, row in zip(prints, rows, strict=True)]
    return np.array(prints, np.int64)


def _fingerprint(x: object) -> int:
    h = hashlib.sha256()
    _hash(h, "", x)
    return int.from_bytes(h.digest()[:8], "little", signed=True)


def _python_checksum(row: np.ndarray) -> int:
    return hash(row.tobytes())


try:
    from google_crc32c import value as _checksum  # ten times as fast on long rows
except ImportError:
    _checksum = _python_checksum


def _hash(h: "Hash", name: str, v: object) -> None:
    """A value that is passed through: flags, None, or something with arrays inside."""
    if _sliced(v):
        t = v.detach() if isinstance(v, Tensor) else _tensor(v)
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(_bytes(t))
    elif isinstance(v, (Mapping, tuple, list)):
        for inner, w in _items(v):
            _hash(h, name + inner, w)
    else:
        h.update(f"{name}={v!r}".encode())


def _tensor(v: object) -> Tensor:
    """A block of whatever can be cut as a tensor, its rows one after the other."""
    array = np.ascontiguousarray(v)
    _check_kind(array.dtype, "the array")
    return tree.from_array(array, "the array")


def _bytes(t: Tensor) -> memoryview:
    return t.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _release(v: object) -> None:
    """Give back the pages of a mapped file that were read: they would count as this process's memory."""
    pages = getattr(v, "_mmap", None)
    # Not those of a private mapping ("c"): its changes would be lost.
    if isinstance(v, np.memmap) and v.mode in ("r", "r+") and pages is not None and hasattr(pages, "madvise"):
        pages.madvise(mmap.MADV_DONTNEED)


def _label(v: object) -> bool:
    return isinstance(v, (int, np.integer)) or (isinstance(v, (Tensor, np.ndarray)) and v.ndim == 0)
