"""What a feature map returns for one parameter: per-sample gradients, dense or as a sum of outer products.

`DenseBlock` holds g[n, c, p]. `OuterBlock` keeps a layer's Jacobian as (activation a, cotangent δ), so that the
gradient of the weight is G = Σ_t δ_t ⊗ a_t without ever being formed. A parameter used several times has one
`OuterBlock` with several uses: the positions t of all uses simply follow one another. `MixedBlock` adds gradients whose
factors cannot be joined so (a tied embedding, say, where one use looks rows up and the other multiplies). A weight may
be a view of its parameter, a slice say: `Slot` tells where it lies.

Letters: n samples, c outputs, p entries of the parameter; t positions, g groups, i inputs and o outputs of a weight.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base.types import Float
from .lattice import Places


class FactorForm(NamedTuple):
    """What is known of a use's factors before they are formed; the same for any number of samples and outputs."""

    kind: str  # factors of one kind lie alike in the weight, so that their positions can follow one another
    t: int
    g: int
    i: int
    o: int
    # Where a is made of patches whose products can be had from those of single pixels: how many pixels of the input
    # there are, and how many a patch has.
    pixels: int = 0
    taps: int = 1


class Lift(ABC):
    """How one use of a weight turns the tensors that were captured into the factors a and δ."""

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
    def form(self, x: Tensor, d: Tensor) -> FactorForm:
        """Kind and sizes of the factors of a captured input and cotangent."""

    def pixels(self, x: Tensor) -> Tensor:
        """Captured input [n, r, …] → what patches are made of [n, p, g, channels], where `form` has pixels."""
        raise NotImplementedError

    def places(self, x: Tensor) -> Places:
        """On which pixel each tap of each position lies."""
        raise NotImplementedError

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
    form: FactorForm  # asked of `lift` once, when the use was captured

    def rows(self, index: slice) -> "Use":
        """The use for some of the samples."""
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
        """How many entries the view has."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the entries lie one after the other."""
        # Dimensions of size 1 may have any stride.
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
        numbers = torch.arange(self.size, device=device)
        return numbers.as_strided(self.shape, self.stride, self.offset).flatten()

    def put(self, g: Tensor) -> Tensor:
        """[…, entries of the view] → […, entries of the parameter], 0 elsewhere."""
        if self.whole:
            return g
        return g.new_zeros(*g.shape[:-1], self.size).index_copy(-1, self.index(g.device), g)


@lru_cache(4096)
def apart(first: Slot, second: Slot) -> bool:
    """Whether two views of one parameter share no entry."""
    taken = torch.zeros(first.size, dtype=torch.bool)
    taken[first.index()] = True
    return not bool(taken[second.index()].any())


class GradientBlock(ABC):
    """Per-sample gradients of c outputs with respect to one parameter."""

    @property
    @abstractmethod
    def n(self) -> int:
        """How many samples."""

    @property
    @abstractmethod
    def c(self) -> int:
        """How many outputs."""

    @abstractmethod
    def rows(self, index: slice) -> "GradientBlock":
        """The block of some of the samples; views, where it can be."""

    @abstractmethod
    def expand(self) -> Float[Tensor, "n c p"]:
        """The gradients themselves, in the parameter's own order."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What the block keeps in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that the block keeps in memory."""
        return sum(v.numel() * v.element_size() for v in self.tensors())


@dataclass(frozen=True)
class DenseBlock(GradientBlock):
    """G itself. `scale` [n] is there when it was formed from factors that had been rescaled to fit 16 bits.

    `norms`: ‖g_c‖², where G itself has been rounded to 8 bits.
    """

    g: Float[Tensor, "n c p"]
    scale: Tensor | None = None
    norms: Float[Tensor, "n c"] | None = None

    @property
    def n(self) -> int:
        """How many samples."""
        return self.g.shape[0]

    @property
    def c(self) -> int:
        """How many outputs."""
        return self.g.shape[1]

    def rows(self, index: slice) -> "DenseBlock":
        """The gradients of some of the samples."""
        scale, norms = (None if v is None else v[index] for v in (self.scale, self.norms))
        return DenseBlock(self.g[index], scale, norms)

    def expand(self) -> Float[Tensor, "n c p"]:
        """The gradients; with their scale they are formed anew, in 32 bits."""
        return self.g if self.scale is None else self.g.float() * self.scale[:, None, None]

    def tensors(self) -> list[Tensor]:
        """G alone."""
        return [self.g]


@dataclass(frozen=True)
class OuterBlock(GradientBlock):
    """G = scale · Σ_t δ_t ⊗ a_t. `scale` [n] is there when the factors were rescaled to fit 16 bits."""

    uses: tuple[Use, ...]
    vocabulary: int = 0  # rows of the weight where a holds row numbers
    scale: Tensor | None = None
    bias: str | None = None  # the parameter whose gradient is Σ_t δ_t of just these uses: as if a had one more entry, 1
    slot: Slot | None = None  # where the weight lies in its parameter, if it is not all of it

    @property
    def n(self) -> int:
        """How many samples."""
        return self.uses[0].d.shape[0]

    @property
    def c(self) -> int:
        """How many outputs."""
        return self.uses[0].d.shape[1]

    @property
    def kind(self) -> str:
        """How the factors lie in the weight: only blocks of one kind (and one slot) go position by position."""
        return self.uses[0].form.kind

    @property
    def indexed(self) -> bool:
        """Whether a holds row numbers."""
        return self.uses[0].lift.indexed

    @property
    def dtype(self) -> torch.dtype:
        """The type of the cotangents."""
        return self.uses[0].d.dtype

    def sizes(self) -> tuple[int, int, int, int]:
        """(t, g, i, o) with the positions of all uses added up."""
        _, t, g, i, o = self.uses[0].form[:5]
        return t + sum(u.form.t for u in self.uses[1:]), g, i, o

    def rows(self, index: slice) -> "OuterBlock":
        """The factors of some of the samples."""
        scale = None if self.scale is None else self.scale[index]
        return replace(self, uses=tuple(u.rows(index) for u in self.uses), scale=scale)

    def a(self) -> Tensor:
        """[n, t, g, i], or row numbers [n, t]."""
        return _join([u.lift.a(u.x) for u in self.uses], dim=1)

    def d(self) -> Tensor:
        """[n, c, t, g, o]."""
        return _join([u.lift.d(u.d) for u in self.uses], dim=2)

    def expand(self) -> Float[Tensor, "n c p"]:
        """G, formed and put in order: for references, and where factors of different kinds meet."""
        total: Tensor | None = None
        for u in self.uses:
            indexed, a, d = u.lift.indexed, u.lift.a(u.x), u.lift.d(u.d)
            if d.dtype == torch.float16:  # sums over positions in 32 bits
                a, d = a if indexed else a.float(), d.float()
            g = scatter(a, d, self.vocabulary) if indexed else torch.einsum("nctgo,ntgi->ncgoi", d, a)
            g = u.lift.layout(g)
            total = g if total is None else total + g
        assert total is not None
        total = total.flatten(2)
        total = total if self.scale is None else total * self.scale[:, None, None]
        return total if self.slot is None else self.slot.put(total)

    def tensors(self) -> list[Tensor]:
        """What was captured: x and δ of every use in turn."""
        return [v for u in self.uses for v in (u.x, u.d)]


@dataclass(frozen=True)
class MixedBlock(GradientBlock):
    """A sum of blocks of one parameter whose factors lie differently in the weight, or of different parts of it."""

    blocks: tuple[GradientBlock, ...]

    @property
    def n(self) -> int:
        """How many samples."""
        return self.blocks[0].n

    @property
    def c(self) -> int:
        """How many outputs."""
        return self.blocks[0].c

    def rows(self, index: slice) -> "MixedBlock":
        """The blocks of some of the samples."""
        return MixedBlock(tuple(b.rows(index) for b in self.blocks))

    def expand(self) -> Float[Tensor, "n c p"]:
        """The sum of what the blocks expand to."""
        total = self.blocks[0].expand()
        for b in self.blocks[1:]:
            total = total + b.expand()
        return total

    def tensors(self) -> list[Tensor]:
        """What the blocks keep, one after the other."""
        return [v for b in self.blocks for v in b.tensors()]


def scatter(index: Tensor, d: Tensor, rows: int) -> Float[Tensor, "n c 1 o v"]:
    """Add δ_t into row index_t of a weight with `rows` rows; −1 adds nowhere."""
    n, c, t, _, o = d.shape
    # One row more, into which −1 goes, and which is cut off: with a mask, entries would decide a shape, for which a
    # GPU would have to be waited for.
    out = d.new_zeros(n, c, rows + 1, o)
    where = torch.where(index < 0, rows, index)[:, None, :, None].expand(n, c, t, o)
    out = out.scatter_add(2, where, d[:, :, :, 0])[:, :, :rows]
    return out.transpose(2, 3)[:, :, None]


def summands(block: GradientBlock) -> tuple[GradientBlock, ...]:
    """The blocks that a block is the sum of."""
    return block.blocks if isinstance(block, MixedBlock) else (block,)


def matched(x: GradientBlock, y: GradientBlock) -> list[tuple[GradientBlock, GradientBlock]] | None:
    """The pairs of parts whose products make up ⟨x, y⟩, if all others vanish: parts of one parameter that lie apart."""
    pairs: list[tuple[GradientBlock, GradientBlock]] = []
    for a in summands(x):
        for b in summands(y):
            if not (isinstance(a, OuterBlock) and isinstance(b, OuterBlock)):
                return None
            if a.slot == b.slot and a.kind == b.kind:
                pairs.append((a, b))
            elif a.slot is None or b.slot is None or not apart(a.slot, b.slot):
                return None  # they may overlap, in another order of their entries
    return pairs


def add_blocks(blocks: Sequence[GradientBlock]) -> GradientBlock:
    """One block for a parameter from the blocks of its several uses."""
    terms = [term for block in blocks for term in summands(block)]
    dense = [b for b in terms if isinstance(b, DenseBlock)]
    kinds: dict[tuple[str, Slot | None], list[OuterBlock]] = {}
    for b in terms:
        if isinstance(b, OuterBlock):
            kinds.setdefault((b.kind, b.slot), []).append(b)
    joined: list[GradientBlock] = [replace(bs[0], uses=tuple(u for b in bs for u in b.uses)) for bs in kinds.values()]
    if dense:
        joined.append(DenseBlock(torch.stack([b.g for b in dense]).sum(0) if len(dense) > 1 else dense[0].g))
    return joined[0] if len(joined) == 1 else MixedBlock(tuple(joined))


def map_cotangents(block: GradientBlock, g: Callable[[Tensor], Tensor]) -> GradientBlock:
    """The block with g, a linear map that acts on entries alone (a cast, a factor), applied to what it holds of δ."""
    if isinstance(block, DenseBlock):
        return replace(block, g=g(block.g))
    if isinstance(block, MixedBlock):
        return MixedBlock(tuple(map_cotangents(b, g) for b in block.blocks))
    assert isinstance(block, OuterBlock)
    return replace(block, uses=tuple(replace(u, d=g(u.d)) for u in block.uses))


def with_dtype(block: GradientBlock, dtype: torch.dtype) -> GradientBlock:
    """The block with all factors in one type."""
    if all(v.dtype == dtype for v in block.tensors() if v.is_floating_point()):
        return block
    if isinstance(block, OuterBlock):
        # Row numbers stay whole.
        inputs = [u.x.to(dtype) if u.x.is_floating_point() else u.x for u in block.uses]
        uses = (replace(u, x=x, d=u.d.to(dtype)) for u, x in zip(block.uses, inputs, strict=True))
        return replace(block, uses=tuple(uses))
    if isinstance(block, MixedBlock):
        return MixedBlock(tuple(with_dtype(b, dtype) for b in block.blocks))
    return map_cotangents(block, lambda v: v.to(dtype))


def formed(block: GradientBlock, place: Tensor | None = None) -> GradientBlock:
    """The gradients themselves, for where they take less memory than their factors; they are then not formed again.

    There it is never the wrong choice: with c·o·i < t·(i + c·o), multiplying gradients is also cheaper than going by
    positions. `place`: memory for them [n, c, p], in one piece.
    """
    if not can_be_formed(block):
        return block
    (t, g, i, o), lift, size = block.sizes(), block.uses[0].lift, block.uses[0].d.element_size()
    place = block.uses[0].d.new_empty(block.n, block.c, g * o * i) if place is None else place
    # A few samples at a time, so that unfolded activations stay small (heuristic: bytes).
    step = max(1, (1 << (30 if place.is_cuda else 26)) // (t * g * i * size))
    for start in range(0, block.n, step):
        few, here = block.rows(slice(start, start + step)), place[start : start + step]
        made = gradient(few.a().transpose(1, 2), few.d(), here if lift.taps == 1 else None)
        if made.data_ptr() != here.data_ptr():
            ordered = lift.layout(made.view(few.n, few.c, g, o, i))
            here.view(ordered.shape).copy_(ordered)
    return DenseBlock(place, block.scale)


def can_be_formed(block: GradientBlock) -> TypeGuard["OuterBlock"]:
    """Whether `formed` makes gradients of a block."""
    return isinstance(block, OuterBlock) and not block.indexed and block.slot is None


def gradient(a: Tensor, d: Tensor, out: Tensor | None = None) -> Tensor:
    """Σ_t δ_t ⊗ a_t from a [n, g, t, i] and δ [n, c, t, g, o]: [n, c, g·o·i], in the memory of `out` if it is given.

    `out` holds n·c·g·o·i numbers; where there are groups, or 16-bit factors on a CPU, they are copied once more.
    """
    n, c, t, g, o = d.shape
    if a.dtype == torch.float16 and a.device.type == "cpu":  # faster in 32 bits, and rounded once
        return gradient(a.float(), d.float()).half()
    if a.dtype == torch.float16 and (odd := -a.shape[3] % 8):  # matrix units want rows of 8: three channels, 27 entries
        filled = gradient(F.pad(a, (0, odd)), d)
        return filled.unflatten(2, (-1, a.shape[3] + odd))[..., : a.shape[3]].flatten(2)
    # One product per sample (and group) that reads the activations once for all outputs.
    deltas = d.permute(0, 3, 1, 4, 2).reshape(n * g, -1, t)
    room = None if out is None else out.view(n * g, c * o, -1)
    return torch.bmm(deltas, a.reshape(n * g, t, -1), out=room).view(n, g, c, -1).transpose(1, 2).flatten(2)


def _join(factors: list[Tensor], dim: int) -> Tensor:
    """The positions of several uses after each other; of one use nothing is copied."""
    return factors[0] if len(factors) == 1 else torch.cat(factors, dim)
