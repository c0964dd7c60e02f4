"""One small rule per kind of layer: how its Jacobian splits into activation and cotangent.

All tensors that a rule sees have the sample first: inputs [n, r, …], cotangents [n, c, r, …], where r counts whatever a
model folded into the batch dimension. Which call has which rule is said in `readers.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fused
from .blocks import DenseBlock, FactorForm, GradientBlock, Lift, OuterBlock, Use
from .lattice import Lattice, Places


class NoRule(Exception):  # a signal between capture and rules, never shown to users
    """This particular call does not fit the rule. `names`: the parameters concerned, where they are known."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__()
        self.names = frozenset(names)


class Rule(ABC):
    """The Jacobian of one call y = f(x; weight, bias)."""

    name: ClassVar[str]
    summed: ClassVar[bool] = False  # the bias's gradient is Σ_t δ_t of the very factors δ of the weight
    by_group: ClassVar[bool] = False  # the dimension behind the positions counts groups, which have rows of their own
    movable: ClassVar[bool] = True  # a sample's rows may be any; else which one is which matters
    small: ClassVar[bool] = False  # the gradients are sums no larger than the parameter's few entries: kept dense
    channel: ClassVar[int] = -1  # the dimension of the output that the weight acts on, counted from the end

    @abstractmethod
    def weight(self, x: Tensor, d: Tensor) -> GradientBlock:
        """The weight's gradients, from the captured input and cotangents."""

    @abstractmethod
    def bias(self, d: Tensor) -> GradientBlock:
        """The bias's gradients, from the cotangents."""

    def ready(self, x: Tensor) -> Tensor:
        """What `weight` takes, made once for all outputs from the captured input [n, r, …]."""
        return x

    def positions(self, d: Tensor) -> int:
        """How many leading dimensions of a cotangent are positions, each of which may belong to another sample."""
        return 1


class FactoredRule(Rule, Lift):
    """A rule whose weight gradients are kept as factors."""

    def weight(self, x: Tensor, d: Tensor) -> GradientBlock:
        """Both as they are; the factors are formed when they are needed."""
        return OuterBlock((Use(self, x, d, self.form(x, d)),))


@dataclass(frozen=True)
class LinearRule(FactoredRule):
    """y = x Wᵀ + b over any leading dimensions; `transposed` where W is stored [i, o] (Hugging Face Conv1D, x @ W).

    `vector` where the weight is [i] and y has no dimension for it.
    """

    transposed: bool = False
    vector: bool = False
    name = "linear"
    summed = True

    def a(self, x: Tensor) -> Tensor:
        """[n, t, 1, i]."""
        return x.reshape(x.shape[0], -1, 1, x.shape[-1])

    def d(self, d: Tensor) -> Tensor:
        """[n, c, t, 1, o]."""
        return d.reshape(*d.shape[:2], -1, 1, 1 if self.vector else d.shape[-1])

    def layout(self, g: Tensor) -> Tensor:
        """[n, c, 1, o, i] → [n, c, o, i], or [n, c, i, o] if transposed."""
        return g[:, :, 0].transpose(-1, -2) if self.transposed else g[:, :, 0]

    @property
    def taps(self) -> int | None:
        """1, but for a transposed weight."""
        return None if self.transposed else 1

    def bias(self, d: Tensor) -> GradientBlock:
        """Σ_t δ_t."""
        d = self.d(d)
        single = d.shape[2] == 1 and d.dtype != torch.float16  # nothing to sum: no copy either
        return DenseBlock((d[:, :, 0] if single else _sum(d, 2)).flatten(2))

    def form(self, x: Tensor, d: Tensor) -> FactorForm:
        """t: all dimensions between the sample and the features."""
        kind, o = "columns" if self.transposed else "rows", 1 if self.vector else d.shape[-1]
        return FactorForm(kind, math.prod(x.shape[1:-1]), 1, x.shape[-1], o)

    def positions(self, d: Tensor) -> int:
        """All but the features."""
        return d.dim() if self.vector else d.dim() - 1


@dataclass(frozen=True)
class GroupedRule(FactoredRule):
    """y_g = x_g W_gᵀ: a weight [g, o, i] for each of g groups, over any leading dimensions (experts, heads)."""

    name = "grouped"
    by_group = True

    def a(self, x: Tensor) -> Tensor:
        """[n, t, g, i]."""
        return x.reshape(x.shape[0], -1, *x.shape[-2:])

    def d(self, d: Tensor) -> Tensor:
        """[n, c, t, g, o]."""
        return d.reshape(*d.shape[:2], -1, *d.shape[-2:])

    def layout(self, g: Tensor) -> Tensor:
        """The weight's own order."""
        return g

    @property
    def taps(self) -> int | None:
        """1."""
        return 1

    def bias(self, d: Tensor) -> GradientBlock:
        """There is none: a bias is added by a call of its own."""
        raise NoRule

    def form(self, x: Tensor, d: Tensor) -> FactorForm:
        """t: all dimensions between the sample and the groups."""
        return FactorForm("groups", math.prod(x.shape[1:-2]), x.shape[-2], x.shape[-1], d.shape[-1])

    def positions(self, d: Tensor) -> int:
        """All but groups and features."""
        return d.dim() - 2


@dataclass(frozen=True)
class Windows:
    """The geometry of a convolution in any number of dimensions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (before, after) per dimension
    dilation: tuple[int, ...]
    groups: int

    def of(self, x: Tensor) -> Tensor:
        """[N, C, *S] → view [N, C, *windows, *kernel]."""
        if any(p != (0, 0) for p in self.padding):
            x = F.pad(x, [v for p in reversed(self.padding) for v in p])
        for k, (size, step, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            # A window with its gaps, then every gap-th entry of it.
            x = x.unfold(2 + k, gap * (size - 1) + 1, step)[..., ::gap]
        return x

    def patches(self, x: Tensor) -> Tensor:
        """[N, C, *S] → [N, t, g, i] with i = (*kernel, C/g), laid out in memory as x is."""
        if (packed := _packed(x, self.groups)) is not None:
            return self.patches(packed).view(x.dtype)
        dims = len(self.kernel)
        windows = self.of(x)
        count = windows.shape[2 : 2 + dims]
        # The copy that reshape makes runs along memory: permuted first so that its innermost dimension is x's own.
        w = windows.unflatten(1, (self.groups, -1))  # [N, g, C/g, *windows, *kernel]
        space, kernel = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
        if x.stride(1) == 1 and x.shape[1] > 1:  # channels last
            out = w.permute(0, *space, 1, *kernel, 2)
            return out.reshape(x.shape[0], math.prod(count), self.groups, -1)
        out = w.permute(0, 1, *kernel, 2, *space)
        return out.reshape(x.shape[0], self.groups, -1, math.prod(count)).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class ConvRule(FactoredRule):
    """y = W ∗ x: a are the patches of x (formed only while they are needed), δ the cotangents per position."""

    windows: Windows
    name = "conv"
    summed = True

    @property
    def channel(self) -> int:  # type: ignore[override]
        """The one before the spatial dimensions."""
        return -len(self.windows.kernel) - 1

    def a(self, x: Tensor) -> Tensor:
        """Patches [n, t, g, i] with i = (taps, channels)."""
        n = x.shape[0]
        patches = self.windows.patches(x.flatten(0, 1))
        return patches if x.shape[1] == 1 else patches.reshape(n, -1, *patches.shape[2:])

    def d(self, d: Tensor) -> Tensor:
        """[n, c, t, g, o]."""
        return _positions(d, len(self.windows.kernel), self.windows.groups)

    def layout(self, g: Tensor) -> Tensor:
        """(taps, channels) → (channels, *kernel), groups and their channels as one dimension."""
        g = g.unflatten(-1, (*self.windows.kernel, -1))  # [n, c, g, o, *kernel, C/g]
        return g.movedim(-1, 4).flatten(2, 3)

    def pixels(self, x: Tensor) -> Tensor:
        """[n, 1, C, *S] → [n, p, g, C/g]."""
        return x[:, 0].unflatten(1, (self.windows.groups, -1)).flatten(3).permute(0, 3, 1, 2)

    def places(self, x: Tensor) -> Places:
        """Pixels numbered from 1, in patches of their own: 0 is what lies outside."""
        w, space = self.windows, x.shape[3:]
        numbers = torch.arange(1, math.prod(space) + 1, device=x.device, dtype=torch.float64).view(1, 1, *space)
        table = replace(w, groups=1).patches(numbers)[0, :, 0].long() - 1
        if len(space) != 2:
            return Places(table, None)
        reach = [g * (k - 1) + 1 for g, k in zip(w.dilation, w.kernel, strict=True)]
        rest = zip(space, w.padding, reach, w.stride, strict=True)
        positions = [(size + sum(pad) - r) // step + 1 for size, pad, r, step in rest]
        before = [pad[0] for pad in w.padding]
        return Places(table, Lattice(*(_two(v) for v in (space, positions, w.kernel, w.stride, before, w.dilation))))

    @property
    def taps(self) -> int | None:
        """Entries of the kernel."""
        return math.prod(self.windows.kernel)

    def bias(self, d: Tensor) -> GradientBlock:
        """Sums over space, and over what was folded into the batch."""
        return DenseBlock(_sum(d, 2, *range(4, d.dim())))

    def form(self, x: Tensor, d: Tensor) -> FactorForm:
        """t: positions of the output; i: a patch of one group."""
        w = self.windows
        t, taps = x.shape[1] * math.prod(d.shape[4:]), math.prod(w.kernel)
        channels, o = x.shape[2] // w.groups, d.shape[3] // w.groups
        # Several images of a sample, one after the other, would need places in all of them.
        pixels = math.prod(x.shape[3:]) if x.shape[1] == 1 and taps > 1 else 0
        return FactorForm(f"patches, {w.groups} groups", t, w.groups, taps * channels, o, pixels, taps)


@dataclass(frozen=True)
class ConvTransposeRule(FactoredRule):
    """y = Wᵀ ∗ x: the adjoint of a convolution, so the positions are those of x and the patches are taken of δ."""

    windows: Windows
    name = "conv transpose"

    @property
    def channel(self) -> int:  # type: ignore[override]
        """The one before the spatial dimensions."""
        return -len(self.windows.kernel) - 1

    def a(self, x: Tensor) -> Tensor:
        """[n, t, g, i]."""
        return _positions(x[:, None], len(self.windows.kernel), self.windows.groups)[:, 0]

    def d(self, d: Tensor) -> Tensor:
        """Patches of δ: [n, c, t, g, o] with o = (taps, channels)."""
        n, c, r = d.shape[:3]
        w = self.windows
        patches = w.patches(d.flatten(0, 2))
        return patches.reshape(n, c, -1, *patches.shape[2:]) if r > 1 else patches.unflatten(0, (n, c))

    def layout(self, g: Tensor) -> Tensor:
        """[n, c, g, taps·O/g, I/g] → [n, c, I, O/g, *kernel]."""
        g = g.unflatten(3, (*self.windows.kernel, -1))  # [n, c, g, *kernel, O/g, I/g]
        return g.movedim((-1, -2), (3, 4)).flatten(2, 3)

    def weight(self, x: Tensor, d: Tensor) -> GradientBlock:
        """Factors whose δ is padded, or cropped of what output_padding added: its windows are the positions of x."""
        w, sides = self.windows, []
        for k, size in enumerate(x.shape[3:]):
            reach = (size - 1) * w.stride[k] + w.dilation[k] * (w.kernel[k] - 1) + 1
            before = w.padding[k][0]
            sides.append((before, reach - before - d.shape[4 + k]))
        d = F.pad(d, [v for side in reversed(sides) for v in side])
        unpadded = ConvTransposeRule(replace(w, padding=((0, 0),) * len(sides)))
        return OuterBlock((Use(unpadded, x, d, unpadded.form(x, d)),))

    def bias(self, d: Tensor) -> GradientBlock:
        """Sums over space, and over what was folded into the batch."""
        return DenseBlock(_sum(d, 2, *range(4, d.dim())))

    def form(self, x: Tensor, d: Tensor) -> FactorForm:
        """t: positions of the input; o: a patch of one group."""
        w = self.windows
        t, o = x.shape[1] * math.prod(x.shape[3:]), math.prod(w.kernel) * d.shape[3] // w.groups
        return FactorForm(f"patches of δ, {w.groups} groups", t, w.groups, x.shape[2] // w.groups, o)


@dataclass(frozen=True)
class EmbeddingRule(FactoredRule):
    """y_t = W[x_t]: a is the row number. `bag` sums (or averages) the positions of the last dimension."""

    vocabulary: int
    padding: int | None = None
    bag: str | None = None
    wrapped: bool = False  # negative numbers count from the end
    trailing: int = 1  # dimensions of what a row holds
    name = "embedding"
    indexed = True

    def a(self, x: Tensor) -> Tensor:
        """Row numbers [n, t], −1 at the padding."""
        # The padding row's gradient is zero by definition, so positions that look it up add nowhere.
        index = x.reshape(x.shape[0], -1).long()
        index = index % self.vocabulary if self.wrapped else index
        return index if self.padding is None else torch.where(index == self.padding, -1, index)

    def d(self, d: Tensor) -> Tensor:
        """[n, c, t, 1, o]."""
        return d.reshape(*d.shape[:2], -1, 1, self._width(d))

    def _width(self, d: Tensor) -> int:
        return math.prod(d.shape[d.dim() - self.trailing :])

    def layout(self, g: Tensor) -> Tensor:
        """[n, c, 1, o, rows] → [n, c, rows, o]."""
        return g[:, :, 0].transpose(-1, -2)

    def weight(self, x: Tensor, d: Tensor) -> GradientBlock:
        """Row numbers and cotangents; every position of a bag receives the bag's."""
        if self.bag:
            size = x.shape[-1]
            d = (d / size if self.bag == "mean" else d)[..., None, :].expand(*d.shape[:-1], size, d.shape[-1])
        return OuterBlock((Use(self, x, d, self.form(x, d)),), self.vocabulary)

    def bias(self, d: Tensor) -> GradientBlock:
        """There is none."""
        raise NoRule

    def form(self, x: Tensor, d: Tensor) -> FactorForm:
        """i: rows of the whole weight, of which few occur."""
        return FactorForm("lookup", math.prod(x.shape[1:]), 1, self.vocabulary, self._width(d))

    def positions(self, d: Tensor) -> int:
        """All but what a row holds."""
        return d.dim() - self.trailing


@dataclass(frozen=True)
class NormRule(Rule):
    """y = x̂ ⊙ w + b with x̂ the normalised input: the gradients are small sums, kept dense.

    The weight has the `trailing` last dimensions of the input, or lies along the channel (dimension 1).
    """

    name = "norm"
    small = True
    normalise: Callable[[Tensor], Tensor]
    trailing: int = 0
    single: bool = False  # one weight for all channels

    def positions(self, d: Tensor) -> int:
        """All but the weight's dimensions, where these are the last; else the samples alone."""
        return d.dim() - self.trailing if self.trailing else 1

    def ready(self, x: Tensor) -> Tensor:
        """x̂ [n, r, …]."""
        return self.normalise(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def weight(self, x: Tensor, d: Tensor) -> GradientBlock:
        """Σ_t δ_t ⊙ x̂_t, for 16-bit cotangents in one pass over both."""
        if d.dtype == torch.float16 and d.shape[1] == 1 and not self.single:
            deltas, inputs = self._by_position(d[:, 0]), self._by_position(x)
            return DenseBlock(fused.dot_positions(deltas, inputs)[:, None])
        return self.bias(_wide(d) * x[:, None])

    def _by_position(self, v: Tensor) -> Tensor:
        """[n, r, …] → [n, t, p]."""
        if self.trailing:
            return v.flatten(-self.trailing).flatten(1, -2)
        v = v[:, :, :, None] if v.dim() == 3 else v.flatten(3)
        return v.transpose(2, 3).flatten(1, 2)

    def bias(self, d: Tensor) -> GradientBlock:
        """Σ_t δ_t over all dimensions that the weight does not have."""
        if self.trailing:
            return DenseBlock(_sum(d.flatten(-self.trailing).flatten(2, -2), 2))
        if self.single:
            return DenseBlock(_sum(d.flatten(2), 2)[..., None])
        return DenseBlock(_sum(d, 2, *range(4, d.dim())))


@dataclass(frozen=True)
class BroadcastRule(Rule):
    """y = x + w, y = x · w or y = w.expand(…): a bare parameter that is broadcast over samples and positions."""

    shape: tuple[int, ...]
    product: bool
    name = "broadcast"
    small = True

    def aligned(self, rank: int, folded: tuple[int, ...]) -> "BroadcastRule":
        """The parameter's shape against an output of this rank whose dimensions `folded` are now samples and rows."""
        shape = [1] * (rank - len(self.shape)) + list(self.shape)
        if len(shape) != rank or any(shape[k] != 1 for k in folded):
            raise NoRule
        return BroadcastRule(tuple(size for k, size in enumerate(shape) if k not in folded), self.product)

    def positions(self, d: Tensor) -> int:
        """All before the first dimension that the parameter has."""
        shape = [1] * (d.dim() - len(self.shape)) + list(self.shape)
        dims = [k for k, size in enumerate(shape) if size != 1]
        return max(1, dims[0] if dims else d.dim())

    def weight(self, x: Tensor, d: Tensor) -> GradientBlock:
        """Sums of δ ⊙ x, or of δ alone where x was added."""
        return self.bias(_wide(d) * x[:, None] if self.product else d)

    def bias(self, d: Tensor) -> GradientBlock:
        """Sums of δ over the dimensions that were broadcast."""
        d = _sum(d, 2)  # what was folded into the batch
        # Both shapes are aligned, so a dimension is the parameter's own or one that it was broadcast over.
        over = [2 + k for k, size in enumerate(self.shape) if size == 1 and d.shape[2 + k] != 1]
        if any(size not in (1, d.shape[2 + k]) for k, size in enumerate(self.shape)):
            raise NoRule
        return DenseBlock((d.sum(over, keepdim=True) if over else d).flatten(2))


@dataclass(frozen=True)
class RepeatedRule(Rule):
    """A value that every sample was given a copy of (a class token): each copy has a cotangent of its own."""

    name = "repeated"
    small = True
    movable = False

    def weight(self, x: Tensor, d: Tensor) -> GradientBlock:
        """The cotangents themselves."""
        return DenseBlock(_wide(d).flatten(2))

    def bias(self, d: Tensor) -> GradientBlock:
        """There is none."""
        raise NoRule


def _wide(d: Tensor) -> Tensor:
    """16-bit cotangents in 32 bits: products of them would leave the range."""
    return d.float() if d.dtype == torch.float16 else d


def _sum(d: Tensor, *dims: int) -> Tensor:
    """Sums of 16-bit cotangents are taken and kept in 32 bits."""
    return d.sum(dims, dtype=torch.float32 if d.dtype == torch.float16 else None)


def _packed(x: Tensor, groups: int) -> Tensor | None:
    """[N, C, *S] with several channels as one number of 64 bits, where they lie side by side: what is only copied is
    copied as fast as memory allows that way, which for single numbers of 16 bits it is not."""
    several = 8 // x.element_size()
    rest = [x.storage_offset(), *(step for k, step in enumerate(x.stride()) if k != 1)]
    fits = several > 1 and x.shape[1] % (several * groups) == 0 and x.stride(1) == 1 and not x.requires_grad
    if not fits or x.shape[1] == several or any(step % several for step in rest):
        return None
    return x.movedim(1, -1).view(torch.int64).movedim(-1, 1)


def _two(sizes: Sequence[int]) -> tuple[int, int]:
    first, second = sizes
    return first, second


def _positions(d: Tensor, dims: int, groups: int) -> Tensor:
    """[n, c, r, C, *S] → [n, c, t, g, C/g], a view where r = 1."""
    d = d.flatten(4) if dims > 1 else d
    d = d.unflatten(3, (groups, -1)).movedim(-1, 3)  # [n, c, r, T, g, o]
    return d[:, :, 0] if d.shape[2] == 1 else d.flatten(2, 3)
