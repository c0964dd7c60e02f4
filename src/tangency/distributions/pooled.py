"""Two samples pooled: what a test needs of their kernel, from a Gram or by features, which need no n² numbers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Array, Float, Inputs, Int, Memory, Numbers
from ..errors import InputError
from ..gram.compute import compute
from ..gram.gram import Gram
from ..gram.source import Source, source
from ..kernels.kernel import Kernel
from ..linalg.matrix import Matrix, square
from ..projection.features import StoredFeatures, same_origin

# Bytes of features that are cast at a time (heuristic).
BLOCK_BYTES = 64 << 20


class Pooled(ABC):
    """The kernel of x and y together: its diagonal, products, quadratic forms, in float64."""

    of_x: Int[Tensor, " m"]  # where x lies in it
    of_y: Int[Tensor, " n"]

    @property
    @abstractmethod
    def size(self) -> int:
        """All rows, also those of neither."""

    @property
    def width(self) -> int:
        """Numbers that a column takes while it is worked on."""
        return self.size

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its numbers lie."""

    @abstractmethod
    def diag(self) -> Float[Tensor, " N"]:
        """k(z, z)."""

    @abstractmethod
    def product(self, v: Float[Tensor, "N q"]) -> Float[Tensor, "N q"]:
        """K v."""

    @abstractmethod
    def forms(self, v: Float[Tensor, "N q"]) -> Float[Tensor, " q"]:
        """vᵀ K v of each column."""

    def spread(self, v: Float[Tensor, "k q"]) -> Float[Tensor, "N q"]:
        """Numbers of x and then y, put where these lie, on this device."""
        out = torch.zeros(self.size, v.shape[1], dtype=torch.float64)
        out[torch.cat([self.of_x, self.of_y])] = v.double()
        return out.to(self.device)


@dataclass(frozen=True, eq=False)
class PooledGram(Pooled):
    """From a Gram, in memory or on disk, whose tiles are read once for each call."""

    gram: Gram
    of_x: Int[Tensor, " m"]
    of_y: Int[Tensor, " n"]

    @property
    def size(self) -> int:
        """Rows of the Gram."""
        return self.gram.shape[0]

    @property
    def device(self) -> torch.device:
        """That of the Gram; the CPU for one on disk."""
        return self.gram.device or torch.device("cpu")

    def diag(self) -> Tensor:
        """That of the Gram."""
        return self.gram.diag().detach().to(self.device, torch.float64)

    def product(self, v: Tensor) -> Tensor:
        """One pass over the tiles."""
        return self.gram @ v

    def forms(self, v: Tensor) -> Tensor:
        """One pass over the tiles."""
        return (self.gram @ v).mul_(v).sum(0)


@dataclass(frozen=True, eq=False)
class PooledFeatures(Pooled):
    """From features: K = ΦΦᵀ is never made; a quadratic form is ‖Φᵀv‖², one pass over the features.

    Φ is about the mean of both: it changes no MMD, and squares of a large mean would swallow the digits of one.
    """

    x: Tensor | StoredFeatures
    y: Tensor | StoredFeatures
    mean: Float[Tensor, " p"]

    @property
    def of_x(self) -> Tensor:  # type: ignore[override]
        """The first rows."""
        return torch.arange(len(self.x))

    @property
    def of_y(self) -> Tensor:  # type: ignore[override]
        """All after them."""
        return torch.arange(len(self.x), self.size)

    @property
    def size(self) -> int:
        """Both."""
        return len(self.x) + len(self.y)

    @property
    def device(self) -> torch.device:
        """That of the features; the CPU for stored ones."""
        return self.x.device if isinstance(self.x, Tensor) else torch.device("cpu")

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, Φ of these [k, p] in float64) of both, one after the other."""
        start = 0
        for side in (self.x, self.y):
            for block in _blocks(side):
                about = block.flatten(1).to(self.device, torch.float64) - self.mean
                yield slice(start, start + len(block)), about
                start += len(block)

    @property
    def width(self) -> int:
        """Φᵀv has p numbers."""
        return max(self.size, len(self.mean))

    def diag(self) -> Tensor:
        """‖φ(z)‖²."""
        return torch.cat([block.square().sum(1) for _, block in self.blocks()])

    def inner(self, v: Tensor) -> Tensor:
        """Φᵀ v [p, q]."""
        total: Tensor | None = None
        for rows, block in self.blocks():
            part = block.T @ v[rows]
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def product(self, v: Tensor) -> Tensor:
        """Φ (Φᵀ v): two passes."""
        inner = self.inner(v)
        return torch.cat([block @ inner for _, block in self.blocks()])

    def forms(self, v: Tensor) -> Tensor:
        """‖Φᵀ v‖² of each column."""
        return self.inner(v).square_().sum(0)


def pooled(
    kernel: Kernel | Matrix, x: object, y: object, memory: Memory, progress: bool, names: tuple[str, str] = ("x", "y")
) -> PooledGram:
    """The Gram of x and y together by a kernel; or a Gram at hand, of which x and y are the numbers of rows."""
    if isinstance(kernel, Kernel):
        joined = Joined(*(source(v, name) for v, name in zip((x, y), names, strict=True)))
        gram = compute(kernel, joined, memory=memory, progress=progress)
        m, total = len(joined.first), len(joined)
        return PooledGram(_of_samples(gram, "kernel"), torch.arange(m), torch.arange(m, total))
    gram = _of_samples(square(kernel, "kernel"), "kernel")
    of_x, of_y = (row_numbers(v, name, len(gram)) for v, name in zip((x, y), names, strict=True))
    both = torch.cat([of_x, of_y])
    if len(both.unique()) < len(both):
        raise InputError(
            f"{names[0]} and {names[1]} name a row of the Gram twice; needed: each sample once, in one of the two."
        )
    return PooledGram(gram, of_x, of_y)


def pooled_features(x: Array | StoredFeatures, y: Array | StoredFeatures) -> PooledFeatures:
    """Features of both, checked, and their mean."""
    left, right = given_features(x, "x"), given_features(y, "y")
    if isinstance(left, StoredFeatures) and isinstance(right, StoredFeatures):
        same_origin(left.origin, right.origin, "y")
    if left.shape[1:] != right.shape[1:]:
        raise InputError(
            f"x has features of shape {tuple(left.shape)}, y of {tuple(right.shape)}; needed: the same features of "
            "both, [m, p] and [n, p]."
        )
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        checks.beside(right, left.device, "y", "x")
    device = left.device if isinstance(left, Tensor) else torch.device("cpu")
    sums = [b.flatten(1).to(device, torch.float64).sum(0) for side in (left, right) for b in _blocks(side)]
    return PooledFeatures(left, right, torch.stack(sums).sum(0) / (len(left) + len(right)))


def of_samples(both: PooledFeatures) -> Pooled:
    """The Gram of features in memory that are more than the samples, which is less work then; else the features."""
    if both.width == both.size or not (isinstance(both.x, Tensor) and isinstance(both.y, Tensor)):
        return both
    phi = torch.cat([block for _, block in both.blocks()])
    gram = square(phi @ phi.T, "the features' products")
    return PooledGram(gram, both.of_x, both.of_y)


def given_features(v: object, name: str) -> Tensor | StoredFeatures:
    """Features [n, p] (or [n, c, p]) of real finite numbers, in memory or stored."""
    if isinstance(v, StoredFeatures):
        return v
    made = tree.numbers(v, name)  # type: ignore[arg-type]  # says what is wrong with it
    if made.dim() < 2 or 0 in made.shape or made.is_complex():
        raise InputError(f"{name} has shape {tuple(made.shape)}, {made.dtype}; needed: real features [n, p].")
    checks.finite(made, name)
    return made


def _blocks(side: Tensor | StoredFeatures) -> Iterator[Tensor]:
    if isinstance(side, StoredFeatures):
        for rows, block in side.blocks():
            if not bool(block.isfinite().all()):
                raise InputError(f"the features stored in {side.path} are not finite in rows {rows.start}:{rows.stop}.")
            yield block
    else:
        yield from side.split(max(1, BLOCK_BYTES // (8 * side[0].numel())))


@dataclass(frozen=True, eq=False)
class Joined(Source):
    """Two sources, one after the other."""

    first: Source
    second: Source

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def take(self, block: slice) -> Inputs:
        """These samples; a block that lies in both is joined."""
        m = len(self.first)
        if block.stop <= m:
            return self.first.take(block)
        if block.start >= m:
            return self.second.take(slice(block.start - m, block.stop - m))
        a, b = self.first.take(slice(block.start, m)), self.second.take(slice(0, block.stop - m))
        left, right = dict(tree.leaves(a)), dict(tree.leaves(b))
        shapes = {k: tuple(v.shape[1:]) for k, v in left.items()}, {k: tuple(v.shape[1:]) for k, v in right.items()}
        if shapes[0] != shapes[1]:
            raise InputError(
                f"samples of x have the shapes {shapes[0]}, those of y {shapes[1]}; needed: both alike (texts padded "
                "to one length)."
            )
        tree.check_alike(a, b)
        return tree.rebuild(a, [torch.cat([v, right[k]]) for k, v in left.items()])

    def digest(self) -> str:
        """Of both."""
        return f"{self.first.digest()}+{self.second.digest()}"


def _of_samples(gram: Gram, name: str) -> Gram:
    """A Gram with one row for each sample."""
    if len(gram.shape) == 4:
        raise InputError(
            f"{name} is full over {gram.shape[1]} outputs; needed: one row for each sample. Use the trace kernel, "
            "tg.trace_ntk(model)."
        )
    return gram


def row_numbers(v: object, name: str, rows: int) -> Tensor:
    """Numbers of rows of a Gram."""
    made = tree.numbers(v if not isinstance(v, range) else list(v), name)  # type: ignore[arg-type]
    made = made.nonzero()[:, 0] if made.dtype == torch.bool and made.shape == (rows,) else made
    if made.dim() != 1 or made.is_floating_point() or made.is_complex() or made.dtype == torch.bool:
        raise InputError(
            f"{name} is {made.dtype} of shape {tuple(made.shape)}; with a Gram in place of a kernel, x and y are the "
            "numbers of their rows: mmd(K, range(100), range(100, 250))."
        )
    made = made.long().cpu()
    if len(made) and not (int(made.min()) >= 0 and int(made.max()) < rows):
        raise InputError(f"{name} names rows from {int(made.min())} to {int(made.max())}; the Gram has {rows}.")
    return made


def sizes(count_x: int, count_y: int, least: int, why: str) -> None:
    """Refuse samples that are too small for a test."""
    if min(count_x, count_y) < least:
        raise InputError(f"x has {count_x} samples, y {count_y}; needed: at least {least} of each, {why}.")


def grouped(groups: tuple[Numbers, Numbers] | None, m: int, n: int) -> tuple[Tensor, int]:
    """The group of each sample of x and then y, numbered from 0 with those of x first; how many are x's."""
    if groups is None:
        return torch.arange(m + n), m
    if not isinstance(groups, (tuple, list)) or len(groups) != 2:
        raise InputError(f"groups is a {type(groups).__name__}; needed: a pair, (groups of x, groups of y).")
    parts = [tree.numbers(g, f"groups[{k}]").cpu() for k, g in enumerate(groups)]
    for part, size, name in zip(parts, (m, n), "xy", strict=True):
        if part.shape != (size,):
            raise InputError(f"the groups of {name} have shape {tuple(part.shape)}; needed: [{size}], one a sample.")
    names = [part.unique() for part in parts]
    both = names[0][torch.isin(names[0], names[1])]
    if len(both):
        raise InputError(
            f"group {both[0].item()} has samples in x and in y; needed: whole groups in one of them, since a group is "
            "permuted as one. Leave its samples out of one of the two."
        )
    left, right = (torch.searchsorted(of, part) for of, part in zip(names, parts, strict=True))
    return torch.cat([left, right + len(names[0])]), len(names[0])
