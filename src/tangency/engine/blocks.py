"""What a feature map returns for one parameter: per-sample gradients, dense or as a sum of outer products.

`Dense` holds g[n, c, p]. `Outer` keeps a layer's Jacobian as (activation a, cotangent δ), so that the gradient of the
weight is G = Σ_t δ_t ⊗ a_t without ever being formed. A parameter used several times has one `Outer` with several
uses: the positions t of all uses simply follow one another. `Mixed` adds gradients whose factors cannot be joined so
(a tied embedding, say, where one use looks rows up and the other multiplies). A weight may be a view of its
parameter, a slice say: `Slot` tells where it lies.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._base.types import Float


class Lift(ABC):
    """How one use of a weight turns the tensors that were captured into the factors a and δ."""

    kind: ClassVar[str]
    indexed: ClassVar[bool] = False  # a holds row numbers instead of vectors (embeddings)

    @abstractmethod
    def a(self, x: Tensor) -> Tensor:
        """Captured input [n, r, …] → [n, t, g, i], or row numbers [n, t] with −1 for none."""

    @abstractmethod
    def d(self, d: Tensor) -> Tensor:
        """Captured cotangent [n, c, r, …] → [n, c, t, g, o]."""

    @abstractmethod
    def layout(self, g: Tensor) -> Tensor:
        """Gradient [n, c, g, o, i] in the factors' order → [n, c, *shape of the weight]."""

    @abstractmethod
    def sizes(self, x: Tensor, d: Tensor) -> tuple[int, int, int, int]:
        """(t, g, i, o) without forming the factors."""

    @property
    def taps(self) -> int | None:
        """1 if the factors' order (g, o, i) is the weight's own; more if i is (taps, channels) where the weight has
        (channels, taps); None if `layout` does anything else."""
        return None


@dataclass(frozen=True)
class Use:
    """One call of a function with a weight: what went in and what comes back."""

    lift: Lift
    x: Tensor  # [n, r, …]
    d: Tensor  # [n, c, r, …]

    def rows(self, index: slice) -> "Use":
        return replace(self, x=self.x[index], d=self.d[index])


@dataclass(frozen=True)
class Slot:
    """Where the entries of a view lie among the `size` entries of the parameter it was taken of."""

    size: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the entries lie one after the other."""
        step, fits = 1, True
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            fits, step = fits and (size == 1 or stride == step), step * size
        return fits

    @property
    def whole(self) -> bool:
        """Whether the view has all entries in the parameter's own order."""
        return self.contiguous and self.count == self.size

    def index(self, device: torch.device | None = None) -> Tensor:
        """The number of each entry in the parameter."""
        every = torch.arange(self.size, device=device)
        return every.as_strided(self.shape, self.stride, self.offset).flatten()

    def put(self, g: Tensor) -> Tensor:
        """[…, entries of the view] → […, entries of the parameter], 0 elsewhere."""
        if self.whole:
            return g
        return g.new_zeros(*g.shape[:-1], self.size).index_copy(-1, self.index(g.device), g)


@lru_cache(4096)
def apart(one: Slot, two: Slot) -> bool:
    """Whether two views of one parameter share no entry."""
    taken = torch.zeros(one.size, dtype=torch.bool)
    taken[one.index()] = True
    return not bool(taken[two.index()].any())


class Block(ABC):
    """Per-sample gradients of c outputs with respect to one parameter."""

    @property
    @abstractmethod
    def n(self) -> int: ...

    @property
    @abstractmethod
    def c(self) -> int: ...

    @abstractmethod
    def rows(self, index: slice) -> "Block": ...

    @abstractmethod
    def expand(self) -> Float[Tensor, "n c p"]:
        """The gradients themselves, in the parameter's own order."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What the block keeps in memory."""

    @property
    def nbytes(self) -> int:
        return sum(v.numel() * v.element_size() for v in self.tensors())


@dataclass(frozen=True)
class Dense(Block):
    """G itself. `scale` [n] is there when it was formed from factors that had been rescaled to fit 16 bits."""

    g: Float[Tensor, "n c p"]
    scale: Tensor | None = None

    @property
    def n(self) -> int:
        return self.g.shape[0]

    @property
    def c(self) -> int:
        return self.g.shape[1]

    def rows(self, index: slice) -> "Dense":
        return Dense(self.g[index], None if self.scale is None else self.scale[index])

    def expand(self) -> Float[Tensor, "n c p"]:
        return self.g if self.scale is None else self.g.float() * self.scale[:, None, None]

    def tensors(self) -> list[Tensor]:
        return [self.g]


@dataclass(frozen=True)
class Outer(Block):
    """G = scale · Σ_t δ_t ⊗ a_t. `scale` [n] is there when the factors were rescaled to fit 16 bits."""

    uses: tuple[Use, ...]
    vocabulary: int = 0  # rows of the weight where a holds row numbers
    scale: Tensor | None = None
    bias: str | None = None  # the parameter whose gradient is Σ_t δ_t of just these uses: as if a had one more entry, 1
    slot: Slot | None = None  # where the weight lies in its parameter, if it is not all of it

    @property
    def n(self) -> int:
        return self.uses[0].d.shape[0]

    @property
    def c(self) -> int:
        return self.uses[0].d.shape[1]

    @property
    def kind(self) -> str:
        return self.uses[0].lift.kind

    @property
    def indexed(self) -> bool:
        return self.uses[0].lift.indexed

    @property
    def dtype(self) -> torch.dtype:
        return self.uses[0].d.dtype

    def sizes(self) -> tuple[int, int, int, int]:
        """(t, g, i, o) with the positions of all uses added up."""
        each = [u.lift.sizes(u.x, u.d) for u in self.uses]
        return sum(s[0] for s in each), *each[0][1:]

    def rows(self, index: slice) -> "Outer":
        scale = None if self.scale is None else self.scale[index]
        return replace(self, uses=tuple(u.rows(index) for u in self.uses), scale=scale)

    def a(self) -> Tensor:
        """[n, t, g, i], or row numbers [n, t]."""
        return _join([u.lift.a(u.x) for u in self.uses], dim=1)

    def d(self) -> Tensor:
        """[n, c, t, g, o]."""
        return _join([u.lift.d(u.d) for u in self.uses], dim=2)

    def expand(self) -> Float[Tensor, "n c p"]:
        total: Any = 0
        for u in self.uses:
            a, d = u.lift.a(u.x), u.lift.d(u.d)
            if d.dtype == torch.float16:
                a, d = a if self.indexed else a.float(), d.float()
            g = scatter(a, d, self.vocabulary) if self.indexed else torch.einsum("nctgo,ntgi->ncgoi", d, a)
            total = total + u.lift.layout(g)
        total = total.flatten(2)
        total = total if self.scale is None else total * self.scale[:, None, None]
        return total if self.slot is None else self.slot.put(total)

    def tensors(self) -> list[Tensor]:
        return [v for u in self.uses for v in (u.x, u.d)]


@dataclass(frozen=True)
class Mixed(Block):
    """A sum of blocks of one parameter whose factors lie differently in the weight, or of different parts of it."""

    blocks: tuple[Block, ...]

    @property
    def n(self) -> int:
        return self.blocks[0].n

    @property
    def c(self) -> int:
        return self.blocks[0].c

    def rows(self, index: slice) -> "Mixed":
        return Mixed(tuple(b.rows(index) for b in self.blocks))

    def expand(self) -> Float[Tensor, "n c p"]:
        total: Any = 0
        for b in self.blocks:
            total = total + b.expand()
        return total

    def tensors(self) -> list[Tensor]:
        return [v for b in self.blocks for v in b.tensors()]


def scatter(index: Tensor, d: Tensor, rows: int) -> Float[Tensor, "n c 1 o v"]:
    """Add δ_t into row index_t of a weight with `rows` rows; −1 adds nowhere."""
    n, c, t, _, o = d.shape
    out = d.new_zeros(n, c, rows + 1, o)
    where = torch.where(index < 0, rows, index)[:, None, :, None].expand(n, c, t, o)
    out = out.scatter_add(2, where, d[:, :, :, 0])[:, :, :rows]
    return out.transpose(2, 3)[:, :, None]


def parts(block: Block) -> tuple[Block, ...]:
    """The blocks that a block is the sum of."""
    return block.blocks if isinstance(block, Mixed) else (block,)


def matched(x: Block, y: Block) -> list[tuple[Block, Block]] | None:
    """The pairs of parts whose products make up ⟨x, y⟩, if all others vanish: parts of one parameter that lie apart."""
    found: list[tuple[Block, Block]] = []
    for a in parts(x):
        for b in parts(y):
            if not (isinstance(a, Outer) and isinstance(b, Outer)):
                return None
            if a.slot == b.slot and a.kind == b.kind:
                found.append((a, b))
            elif a.slot is None or b.slot is None or not apart(a.slot, b.slot):
                return None
    return found


def add(blocks: Sequence[Block]) -> Block:
    """One block for a parameter from the blocks of its several uses."""
    every = [p for b in blocks for p in parts(b)]
    dense = [b for b in every if isinstance(b, Dense)]
    kinds: dict[tuple[str, Slot | None], list[Outer]] = {}
    for b in every:
        if isinstance(b, Outer):
            kinds.setdefault((b.kind, b.slot), []).append(b)
    joined: list[Block] = [replace(bs[0], uses=tuple(u for b in bs for u in b.uses)) for bs in kinds.values()]
    if dense:
        joined.append(Dense(torch.stack([b.g for b in dense]).sum(0) if len(dense) > 1 else dense[0].g))
    return joined[0] if len(joined) == 1 else Mixed(tuple(joined))


def changed(block: Block, g: Callable[[Tensor], Tensor]) -> Block:
    """The block with g, a linear map that acts on entries alone (a cast, a factor), applied to what it holds of δ."""
    if isinstance(block, Dense):
        return replace(block, g=g(block.g))
    if isinstance(block, Mixed):
        return Mixed(tuple(changed(b, g) for b in block.blocks))
    assert isinstance(block, Outer)
    return replace(block, uses=tuple(replace(u, d=g(u.d)) for u in block.uses))


def cast(block: Block, dtype: torch.dtype) -> Block:
    """The block with all factors in one type."""
    if all(v.dtype == dtype for v in block.tensors() if v.is_floating_point()):
        return block
    if isinstance(block, Outer):
        uses = tuple(Use(u.lift, u.x.to(dtype) if u.x.is_floating_point() else u.x, u.d.to(dtype)) for u in block.uses)
        return replace(block, uses=uses)
    if isinstance(block, Mixed):
        return Mixed(tuple(cast(b, dtype) for b in block.blocks))
    return changed(block, lambda v: v.to(dtype))


def formed(block: Block) -> Block:
    """The gradients themselves, for where they take less memory than their factors; they are then not formed again.

    There it is never the wrong choice: with c·o·i < t·(i + c·o), multiplying gradients is also cheaper than going by
    positions.
    """
    if not isinstance(block, Outer) or block.indexed or block.slot is not None:
        return block
    t, g, i, o = block.sizes()
    # A few samples at a time, so that unfolded activations stay small (heuristic: bytes).
    step = max(1, (1 << (30 if block.uses[0].d.is_cuda else 26)) // (t * g * i * block.uses[0].d.element_size()))
    pieces = []
    for start in range(0, block.n, step):
        some = block.rows(slice(start, start + step))
        made = gradient(some.a().transpose(1, 2), some.d()).view(some.n, some.c, g, o, i)
        pieces.append(block.uses[0].lift.layout(made).flatten(2))
    return Dense(pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces), block.scale)


def saved_by_forming(block: Outer) -> int:
    """Bytes per sample that the gradients take less than their factors."""
    _, g, i, o = block.sizes()
    return block.nbytes // block.n - block.c * g * o * i * block.uses[0].d.element_size()


def gradient(a: Tensor, d: Tensor) -> Tensor:
    """Σ_t δ_t ⊗ a_t from a [n, g, t, i] and δ [n, c, t, g, o]: [n, c, g·o·i]."""
    n, c, t, g, _ = d.shape
    if a.dtype == torch.float16 and a.device.type == "cpu":
        return gradient(a.float(), d.float()).half()
    # One product per sample (and group) that reads the activations once for all outputs.
    deltas = d.permute(0, 3, 1, 4, 2).reshape(n * g, -1, t)
    return torch.bmm(deltas, a.reshape(n * g, t, -1)).view(n, g, c, -1).transpose(1, 2).flatten(2)


def put(target: Block | None, block: Block, start: int, n: int) -> Block:
    """Write the block of a micro-batch into rows start… of a block of n samples, which is made if there is none yet.

    What a micro-batch lacks stays zero: a parameter that some samples do not reach (a data-dependent branch), or a loop
    that uses a weight more often for some samples.
    """
    if isinstance(block, Mixed) or (target is not None and _form(target) != _form(block)):
        # Each part by itself: the model took another way for these samples, or used another part of the weight.
        kept = dict(_numbered(target)) if target is not None else {}
        for form, b in _numbered(block):
            kept[form] = put(kept.get(form), b, start, n)
        return next(iter(kept.values())) if len(kept) == 1 else Mixed(tuple(kept.values()))
    rows = slice(start, start + block.n)
    if isinstance(block, Dense):
        whole = _room(block.g, n) if target is None else target.tensors()[0]
        whole[rows] = block.g
        scales = target.scale if isinstance(target, Dense) else None
        if block.scale is not None:
            scales = block.scale.new_zeros(n) if scales is None else scales
            scales[rows] = block.scale
        return Dense(whole, scales)
    assert isinstance(block, Outer)
    uses = list(target.uses) if isinstance(target, Outer) else []
    for k, use in enumerate(block.uses):
        if k == len(uses):
            uses.append(Use(use.lift, _room(use.x, n), _room(use.d, n)))
        uses[k].x[rows] = use.x
        uses[k].d[rows] = use.d
    scale = target.scale if isinstance(target, Outer) else block.scale
    if block.scale is not None:
        scale = block.scale.new_zeros(n) if target is None else scale
        assert scale is not None
        scale[rows] = block.scale
    return replace(block, uses=tuple(uses), scale=scale)


def _form(block: Block) -> tuple[Any, ...]:
    """What two blocks must have in common to be rows of one."""
    if isinstance(block, Mixed):
        return tuple(_form(b) for b in block.blocks)
    if isinstance(block, Outer):
        return block.kind, block.dtype, block.scale is None, block.slot
    return block.tensors()[0].dtype, isinstance(block, Dense) and block.scale is None


def _numbered(block: Block) -> Iterator[tuple[Any, Block]]:
    """The parts of a block with their forms, the second of a form apart from the first."""
    seen: dict[Any, int] = {}
    for b in parts(block):
        form = _form(b)
        seen[form] = seen.get(form, 0) + 1
        yield (form, seen[form]), b


def _room(v: Tensor, n: int) -> Tensor:
    """Zeros for n rows like those of v, with the other dimensions in the order in which they lie in v's memory."""
    strides = v.stride()
    order = [0, *sorted(range(1, v.dim()), key=lambda k: -strides[k])]
    made = v.new_zeros(n, *(v.shape[k] for k in order[1:]))
    return made.permute([order.index(k) for k in range(v.dim())])


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
