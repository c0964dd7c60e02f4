"""Prepared blocks in a temporary file, where memory cannot hold them and they are quicker read than made again.

The file has no name, so that it is gone with the process whatever ends it. A block comes back bit for bit, with its
tensors' strides and their places within a cache line, so that products of it are the same to the last bit as well.
"""

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from .._base.memory import give_back, own_pages
from .._base.types import Inputs
from ..errors import PerformanceWarning
from ..kernels.kernel import Prepared
from .prepared import leaves, moved, size_of, tensors_in

# Of what a disk has free, the part that may be taken; seconds that must be saved for it; seconds that captures may be
# repeated for without a word (all heuristics).
SHARE, LEAST, SILENT = 0.5, 5.0, 60.0
# Where a tensor begins may matter to a product: addresses are kept modulo this (cache lines, the widest registers).
LINE = 128
# What may stand in a prepared block beside tensors: anything else might hold memory that we do not see.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice, Enum, type)

Key = tuple[int, int]  # side, number of the block


@dataclass(frozen=True)
class _Region:
    """A part of the file: the bytes of one storage that a block's tensors use, and where they lay modulo `LINE`."""

    at: int
    size: int
    phase: int


@dataclass(frozen=True)
class _Kept:
    """A block without its numbers, and where these are: (region, byte offset in it) of every tensor."""

    skeleton: Prepared
    regions: tuple[_Region, ...]
    places: tuple[tuple[int, int], ...]


def pays(blocks: int, uses: float, seconds: float, moving: float) -> bool:
    """Whether to write `blocks` blocks and read each of them `uses` times saves time: of one block, `seconds` to make
    it, `moving` to write it or to read it."""
    return blocks * (uses * (seconds - moving) - moving) > LEAST


class Spill:
    """Blocks on disk. Whether that pays is decided when the first one has been made and written; first come, first
    kept, since sweeps pass the same blocks in the same order."""

    def __init__(self, folders: Iterable[Path], blocks: int, uses: float) -> None:
        self.blocks, self.uses = blocks, uses
        self.worth: bool | None = None  # not known yet
        self._folders = tuple(folders)
        self._file: IO[bytes] | None = None
        self._room = self._end = 0
        self._kept: dict[Key, _Kept] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def get(self, key: Key, load: Callable[[], Inputs], prepare: Callable[[Inputs], Prepared]) -> Prepared:
        """The block, read or made; what is made is written, if that pays and there is room."""
        if key in self._kept:
            try:
                return self._read(self._kept[key])
            except OSError:
                del self._kept[key]
        inputs = load()
        start = time.perf_counter()
        made = prepare(inputs)
        self._keep(key, made, time.perf_counter() - start)
        return made

    def forget_below(self, block: int) -> None:
        """Nothing: room in the file is not given back before its end."""
        return None

    def close(self) -> None:
        """Give the disk back what was taken."""
        if self._file is not None:
            self._file.close()
        self._file, self._kept, self.worth = None, {}, False

    def _keep(self, key: Key, made: Prepared, seconds: float) -> None:
        if self.worth is False:
            return
        size, start = size_of(made), time.perf_counter()
        try:
            if self._file is None and not self._open(made):
                self._decide(False, size, seconds)
                return
            assert self._file is not None
            if self._end + size + LINE <= self._room:
                self._kept[key] = self._written(made, self._file.fileno())
                give_back()  # what stays of each block leaves holes between the blocks, about a tenth of their size
            if self.worth is None:
                os.fsync(self._file.fileno())  # a cache in memory would look quick
                moving = time.perf_counter() - start
                self._decide(pays(self.blocks, self.uses, seconds, moving), size, seconds)
        except OSError:  # the disk is full, or gone: what was written is read, the rest is made again
            self._room = 0
            if self.worth is None:
                self._decide(False, size, seconds)

    def _open(self, made: Prepared) -> bool:
        """Begin a file where there is room for this block at least; whether that was possible."""
        if not _known(made) or not hasattr(os, "preadv"):
            return False
        for folder in self._folders:
            try:
                room = int(SHARE * shutil.disk_usage(folder).free)
                if room < size_of(made) + LINE or in_memory(folder):
                    continue
                self._file = tempfile.TemporaryFile(dir=folder, prefix="tangency-", buffering=0)  # noqa: SIM115
            except OSError:
                continue
            self._room, self._where = room, folder
            return True
        return False

    def _decide(self, worth: bool, size: int, seconds: float) -> None:
        self.worth, again = worth, self.blocks * self.uses * seconds
        if worth:
            warnings.warn(
                f"prepared samples do not fit into the budget: {self.blocks} blocks of {size / 1e9:.2g} GB each go to "
                f"a temporary file in {self._where} (removed at the end), where to make them again would take about "
                f"{again:.0f} s. A larger memory= would hold them.",
                PerformanceWarning,
                stacklevel=2,
            )
            return
        self.close()
        if again > SILENT:
            warnings.warn(
                f"prepared samples do not fit into the budget: {self.blocks} blocks of {size / 1e9:.2g} GB each are "
                f"made {1 + self.uses:.1f} times, about {again:.0f} s more. A larger memory= would hold them, "
                "dtype='float16' halves them, or set TMPDIR to a quick disk with room for them.",
                PerformanceWarning,
                stacklevel=2,
            )

    def _written(self, made: Prepared, file: int) -> _Kept:
        """The block in the file, storage by storage: tensors that share memory go on sharing it."""
        tensors = tensors_in(made)
        spans: dict[int, tuple[int, int, Tensor]] = {}  # by storage: the bytes in use
        for t in tensors:
            first, last = _span(t)
            place = t.untyped_storage().data_ptr()
            low, high, _ = spans.get(place, (first, last, t))
            spans[place] = (min(low, first), max(high, last), t)
        regions, numbers = list[_Region](), dict[int, int]()
        for place, (low, high, t) in spans.items():
            whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage(), low, (high - low,), (1,))
            _all(lambda part, at: os.pwrite(file, part, at), _bytes(whole), self._end)
            numbers[place] = len(regions)
            regions.append(_Region(self._end, high - low, (place + low) % LINE))
            self._end += high - low
        places = []
        for t in tensors:
            place = t.untyped_storage().data_ptr()
            places.append((numbers[place], _span(t)[0] - spans[place][0]))
        # Shapes and types stay with the skeleton, on a device without memory.
        bare = moved(made, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))
        return _Kept(bare, tuple(regions), tuple(places))

    def _read(self, kept: _Kept) -> Prepared:
        assert self._file is not None
        file, storages = self._file.fileno(), list[Tensor]()
        for region in kept.regions:
            room = own_pages(region.size + LINE)
            begin = (region.phase - room.data_ptr()) % LINE
            part = room[begin : begin + region.size]
            _all(lambda view, at: os.preadv(file, [view], at), _bytes(part), region.at)
            storages.append(part)
        places = iter(kept.places)

        def filled(t: Tensor) -> Tensor:
            """The tensor with its numbers."""
            number, offset = next(places)
            part = storages[number]
            at = part.storage_offset() + offset
            flat = torch.empty(0, dtype=t.dtype)
            if at % t.element_size():  # its phase puts it where it lay, which is where its type may lie
                raise OSError(f"{at} is no place for {t.dtype}")
            return flat.set_(part.untyped_storage(), at // t.element_size(), t.shape, t.stride())

        return moved(kept.skeleton, filled)


def _all(act: Callable[[memoryview, int], int], part: memoryview, at: int) -> None:
    """Read or write a part as a whole: the system may take it in pieces (2 GB at most)."""
    while len(part):
        done = act(part[: 1 << 30], at)
        if done <= 0:
            raise OSError("the temporary file ended early")
        part, at = part[done:], at + done


def _bytes(part: Tensor) -> memoryview:
    return memoryview(part.numpy().data)


def _span(t: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the one behind the last."""
    first, item = int(t.storage_offset()), t.element_size()
    if t.numel() == 0:
        return first * item, first * item
    last = first + 1 + sum((int(size) - 1) * int(step) for size, step in zip(t.shape, t.stride(), strict=True))
    return first * item, last * item


def _known(prepared: Prepared) -> bool:
    """Whether nothing in a block could hold memory beside plain tensors of a CPU."""
    return all(
        type(leaf) is Tensor and leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_conj()
        if isinstance(leaf, Tensor)
        else isinstance(leaf, _PLAIN)
        for leaf in leaves(prepared)
    )


def disks(near: Path | None) -> tuple[Path, ...]:
    """Where temporary files may go: beside a store, where the system has them, where they outlive a restart."""
    places = [tempfile.gettempdir(), "/var/tmp"]
    return tuple(path for path in ([near] if near else []) + [Path(p) for p in places] if path.is_dir())


def in_memory(folder: Path) -> bool:
    """Whether a folder's files take memory: /tmp often is no disk."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return False
    real = folder.resolve()
    holding = [(len(at), kind) for at, kind in mounts if real.is_relative_to(at.replace("\\040", " "))]
    return max(holding, default=(0, ""))[1] in ("tmpfs", "ramfs")
