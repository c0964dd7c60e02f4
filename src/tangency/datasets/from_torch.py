"""Samples and their classes out of torch's `Dataset` or `DataLoader`: read once, in the data set's own order."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from .._base import machine, tree
from .._base.progress import bar
from ..errors import InputError, MemoryBudgetError

Collate: TypeAlias = Callable[[list[Any]], Any]  # a DataLoader's collate_fn, of a list of items
# Seconds of reading before a bar is shown.
_PATIENCE = 2.0
# Items that are read twice.
_AGAIN = 3


class Read(NamedTuple):
    """What was read: inputs, labels, and the names of the classes where the set has them."""

    x: object
    y: object
    classes: tuple[str, ...] | None


def is_torch(data: object) -> TypeGuard["Dataset[object] | DataLoader[object]"]:
    """Whether this is something for `read`."""
    return isinstance(data, (Dataset, DataLoader))


def class_names(data: object) -> tuple[str, ...] | None:
    """The `classes` of a data set, of the one that a `DataLoader` reads, or of the one that a `Subset` is a part of."""
    if isinstance(data, (DataLoader, Subset)):
        return class_names(data.dataset)
    names = getattr(data, "classes", None) if isinstance(data, Dataset) else None
    if isinstance(names, (list, tuple)) and names and all(isinstance(v, str) for v in names):
        return tuple(names)
    return None


def read(data: "Dataset[object] | DataLoader[object]", name: str, progress: bool = True) -> Read:
    """All samples of a data set of (x, y), in its own order, as one batch.

    Of a `DataLoader` its data set, through its `collate_fn`. It does not matter whether it shuffles or drops the last
    samples: a sample is named by its place in the data set.
    """
    if isinstance(data, DataLoader):
        _check_loader(data, name)
    dataset = data.dataset if isinstance(data, DataLoader) else data
    collate = data.collate_fn if isinstance(data, DataLoader) else default_collate
    usual = collate is default_collate
    items = list(_items(dataset, name, usual, progress))
    if not items:
        raise InputError(f"{name}: the data set is empty; needed: at least one sample.")
    _check_fixed(dataset, items, name)
    try:
        batch = collate(items)
    except (TypeError, RuntimeError, ValueError, KeyError, AttributeError) as e:
        fix = "Pad or resize them in the data set, or give a DataLoader whose collate_fn does." if usual else ""
        raise InputError(
            f"{name}: its {len(items)} samples cannot be made one batch ({type(e).__name__}: {e}). {fix}".rstrip()
        ) from e
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise InputError(f"{name}: collate_fn makes {_form(batch)}; needed: (x, y), the inputs and the class of each.")
    if not usual:
        _check_places(items, batch, collate, name)
    x, y = batch
    return Read(tuple(x) if isinstance(x, list) else x, y, class_names(data))


def _check_loader(loader: "DataLoader[object]", name: str) -> None:
    """Refuse a loader that reads some samples only, or some of them twice, and one that makes no batches."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise InputError(
            f"{name} is a {type(loader).__name__}, a DataLoader that makes its batches in a way of its own; needed: "
            "one whose data set and collate_fn say all. Give (x, y), or a data set that does what the loader does."
        )
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise InputError(f"{name} is a DataLoader without batch_size; needed: one that makes batches of samples.")
        return
    batches = loader.batch_sampler
    if batches is None:
        raise InputError(
            f"{name} is a DataLoader without batch_size; needed: one that makes batches of samples, or its data set "
            "itself, loader.dataset."
        )
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    every = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    if isinstance(sampler, (SequentialSampler, RandomSampler)) and isinstance(loader.dataset, Sized):
        every = every and len(sampler.data_source) == len(loader.dataset)
    if not every:
        raise InputError(
            f"{name} is a DataLoader with a {type(sampler).__name__}, which may leave samples out or repeat them; "
            "needed: every sample once. Give the data set, loader.dataset, or the part of it that you mean: "
            "torch.utils.data.Subset(loader.dataset, indices)."
        )


def _items(dataset: "Dataset[object]", name: str, usual: bool, progress: bool) -> Iterator[object]:
    """The items in their order, checked where torch's own collate will join them."""
    total = None
    with contextlib.suppress(TypeError, NotImplementedError):  # a length may be there in name alone
        total = len(dataset) if hasattr(dataset, "__len__") else None
    stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if not isinstance(dataset, Iterable) if stream else total is None:
        raise InputError(
            f"{name} is a {type(dataset).__name__}; needed: a data set with a length and numbered items, or an "
            "iterable one."
        )
    numbered = iter(dataset) if stream else (dataset[k] for k in range(total or 0))
    room, held = machine.available_memory(), 0
    with bar(total, f"reading {name}", "sample", show=progress, delay=_PATIENCE) as step:
        for k in count():
            try:
                item = next(numbered)
            except StopIteration:
                return
            except Exception as e:
                e.add_note(f"(while item {k} of {name} was read)")
                raise
            if usual and k == 0:
                _check_item(item, name)
            if any(isinstance(v, np.ma.MaskedArray) for v in _values(item)):
                raise InputError(
                    f"item {k} of {name} has a masked array, whose mask would be lost. Fill it: x.filled(…)."
                )
            if k == 0 and total is not None:
                _check_room(total * _bytes(item), room, f"{total:,} samples of {_bytes(item) / 2**20:.3g} MiB", name)
            elif total is None:  # nobody knows how many will come
                held += _bytes(item)
                _check_room(held, room, f"{k + 1:,} samples and more", name)
            yield item
            step()


def _check_fixed(dataset: "Dataset[object]", items: list[object], name: str) -> None:
    """Refuse a data set of which some items are others when they are read again, by a few of them."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return  # a stream may be there once
    last = len(items) - 1
    for k in sorted({last * j // (_AGAIN - 1) for j in range(_AGAIN)}):
        if any(not _equal(a, b) for a, b in zip(_values(items[k]), _values(dataset[k]), strict=False)):
            raise InputError(
                f"item {k} of {name} is another each time it is read. Needed: fixed samples. Switch augmentation off "
                "(give the data set the transform of evaluation), or draw random numbers once and keep what they give."
            )


def _equal(a: object, b: object) -> bool:
    """Whether numbers are the same; of other things nothing is known."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, (np.ndarray, np.generic, int, float)) and isinstance(b, (np.ndarray, np.generic, int, float)):
        left, right = np.asarray(a), np.asarray(b)
        if left.shape != right.shape:
            return False
        return bool(np.all((left == right) | ((left != left) & (right != right))))
    return True


def _check_places(items: list[object], batch: Sequence[object], collate: Collate, name: str) -> None:
    """Refuse a collate_fn that leaves samples out or changes their order: they are named by their places."""
    made = [len(v) for _, v in tree.leaves(tuple(batch))] or [len(v) for v in batch if isinstance(v, Sized)]
    if set(made) != {len(items)}:
        raise InputError(
            f"{name}: collate_fn makes {made[0] if made else 'no'} samples of {len(items)}; needed: one of each item, "
            "since a sample is named by its place in the data set. Leave the others out beforehand: "
            "torch.utils.data.Subset(dataset, indices)."
        )
    for k, item in enumerate(items):
        try:
            alone = [v for _, v in tree.leaves(tuple(collate([item])))]
        except Exception:  # it may want several; then there is nothing to compare with
            return
        together = [v[k] for _, v in tree.leaves(tuple(batch))]
        pairs = [(a[0], b) for a, b in zip(alone, together, strict=False) if a.shape[1:] == b.shape]
        if not all(torch.equal(a, b) for a, b in pairs):
            raise InputError(
                f"{name}: collate_fn changes the samples or their order (item {k} is not the batch's sample {k}); "
                "needed: the order of the data set, since a sample is named by its place in it. Give a loader whose "
                "collate_fn keeps it."
            )


def _check_room(size: int, room: int, what: str, name: str) -> None:
    need = 2 * size  # as items, and in the batch that is made of them
    if need > room:
        raise MemoryBudgetError(
            f"{name} has {what}: to read them takes {need / 2**30:.3g} GiB, and {room / 2**30:.3g} GiB are free. Give "
            "a part of it (torch.utils.data.Subset), or compute a Gram that loads samples block by block: "
            "tg.compute(kernel, tg.from_dataset(dataset, pick=0), store=…)."
        )


def _check_item(item: object, name: str) -> None:
    """Refuse an item that is not (x, y), by the first one."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        more = " Several inputs go as ((x1, x2), y)." if isinstance(item, (tuple, list)) and len(item) > 2 else ""
        raise InputError(
            f"an item of {name} is {_form(item)}; needed: (x, y), the input and its class.{more} A DataLoader's "
            "collate_fn may make (x, y) of a list of other items."
        )
    if isinstance(item[0], (tuple, list)) and item[0] and all(isinstance(v, (int, float)) for v in item[0]):
        raise InputError(
            f"x in an item of {name} is a list of {len(item[0])} numbers, of which torch makes {len(item[0])} inputs; "
            "needed: a tensor or array. Give torch.tensor(x) in the data set."
        )
    for v in _values(item[0]):
        if isinstance(v, (Tensor, np.ndarray, np.generic, int, float)):
            continue
        picture = type(v).__module__.startswith("PIL.")
        what = "a PIL image" if picture else f"a {type(v).__name__}"
        fix = "Give the data set a transform that makes a tensor: transform=torchvision.transforms.ToTensor()."
        raise InputError(
            f"x in an item of {name} is {what}; needed: a tensor or array, or a tuple or dict of them. "
            + (fix if picture else "Make numbers of it in the data set, or in a DataLoader's collate_fn.")
        )


def _values(item: object) -> Iterator[object]:
    """All that is in an item, in its tuples, lists and dicts."""
    if isinstance(item, (Mapping, tuple, list)):
        for v in item.values() if isinstance(item, Mapping) else item:
            yield from _values(v)
    else:
        yield item


def _bytes(item: object) -> int:
    """What an item's tensors and arrays take."""
    return sum(v.nbytes for v in _values(item) if isinstance(v, (Tensor, np.ndarray)))


def _form(item: object) -> str:
    if isinstance(item, (tuple, list)):
        return f"({', '.join(type(v).__name__ for v in item)})"
    if isinstance(item, Mapping):
        return f"a dict of {', '.join(repr(k) for k in item)}"
    return f"a {type(item).__name__}"
