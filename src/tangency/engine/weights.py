"""Weights: parameters, and values that are computed from parameters alone.

Such a value (a view, a slice, 1 + w, exp(w), a weight norm, B @ A …) does not depend on the sample. A layer's rule
works on it as on a parameter, and what comes out is pulled back to the parameters once, at the end: by position where
the value is a view, else through its own small graph.
"""

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import blocks
from .blocks import DenseBlock, GradientBlock, OuterBlock, Slot

# Bytes that a batched pullback may take at a time (heuristic).
PULLBACK_BYTES = 1 << 27


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter (`name`), or a value made of the parameters `sources`, with its graph."""

    key: Hashable  # how it is made; the same in every run of the model
    value: Tensor
    sources: tuple[str, ...]
    name: str | None = None
    slot: Slot | None = None  # of a view, possibly scaled: where it lies in its one source
    scale: float = 1.0

    @staticmethod
    def made(
        key: Hashable, value: Tensor, of: Sequence["Weight"], factor: float | None, leaves: Mapping[str, Tensor]
    ) -> "Weight":
        """A value made of weights. `factor`: it is this many times the first of them, entry by entry.

        Without a graph (in torch.no_grad, or inside of an autograd function, which adds its own) nothing is known.
        """
        sources = tuple(dict.fromkeys(name for w in of for name in w.sources))
        # A scaled copy has other memory than its parameter, so it is known by its history; a view, by its memory.
        first = of[0]
        if not value.requires_grad:
            slot, scale = None, 1.0
        elif factor is not None and (first.slot is not None or first.name is not None):
            slot, scale = first.slot or _whole(first.value), first.scale * factor
        else:
            slot, scale = _view(value, leaves[sources[0]]) if len(sources) == 1 else None, 1.0
        return Weight(key, value, sources, None, slot, scale)

    @property
    def transposed(self) -> bool:
        """Whether it is W.t() of a whole matrix W, unscaled."""
        s = self.slot
        if s is None or self.scale != 1 or len(s.shape) != 2 or s.count != s.size:
            return False
        # A row or a column alone has both orders in one.
        return s.stride == (1, s.shape[0]) and s.shape[0] > 1 and s.shape[1] > 1


def _view(v: Tensor, leaf: Tensor) -> Slot | None:
    """Where v lies in the parameter `leaf`; None if it is not simply a view of it, each entry at most once."""
    if v.layout != torch.strided or not leaf.is_contiguous() or v.dtype != leaf.dtype or not v.numel():
        return None
    if v.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
        return None
    if any(step == 0 and size > 1 for size, step in zip(v.shape, v.stride(), strict=True)):
        return None  # an expanded dimension repeats its entries
    offset = int(v.storage_offset() - leaf.storage_offset())
    slot = Slot(leaf.numel(), tuple(v.shape), v.stride(), offset)
    return slot if v.numel() <= leaf.numel() else None


def _whole(v: Tensor) -> Slot | None:
    """The place of a parameter in itself."""
    return Slot(v.numel(), tuple(v.shape), v.stride(), 0) if v.is_contiguous() else None


def pull_back(
    weight: Weight, block: GradientBlock, leaves: Mapping[str, Tensor], differentiable: bool
) -> Iterator[tuple[str, GradientBlock]]:
    """(parameter, block) from the block of a weight that is not a parameter itself."""
    if weight.slot is not None:
        if weight.scale != 1:
            block = blocks.map_cotangents(block, lambda v: v * weight.scale)
        yield weight.sources[0], _placed(block, weight.slot, leaves[weight.sources[0]].shape)
        return
    parameters = {name: leaves[name] for name in weight.sources}
    for name, g in _vjp(weight.value, block.expand(), parameters, differentiable).items():
        yield name, DenseBlock(g)


def _placed(block: GradientBlock, slot: Slot, shape: tuple[int, ...]) -> GradientBlock:
    """The block of a view as one of its parameter. Factors of another shape than the parameter's keep their slot, even
    if it is the whole: they cannot be joined with those of other shapes."""
    if slot.whole and slot.shape == shape:
        return block
    if isinstance(block, OuterBlock):
        return replace(block, slot=slot)
    return DenseBlock(slot.put(block.expand()))


def _vjp(value: Tensor, g: Tensor, parameters: Mapping[str, Tensor], differentiable: bool) -> dict[str, Tensor]:
    """[n, c, entries of the value] → [n, c, entries] of every parameter that it is made of."""
    n, c = g.shape[:2]
    rows = g.reshape(n * c, *value.shape).to(value.dtype)
    # A row of the value and of all its parameters; batched, torch holds some four times as much (heuristic).
    size = rows.element_size() * (rows[0].numel() + sum(v.numel() for v in parameters.values()))
    step = n * c if differentiable else max(1, PULLBACK_BYTES // (4 * size))
    pieces = [_batched(value, list(parameters.values()), few, differentiable) for few in rows.split(step)]
    columns = zip(parameters, zip(*pieces, strict=True), strict=True)
    return {name: torch.cat(piece).reshape(n, c, -1) for name, piece in columns}


def _batched(value: Tensor, parameters: list[Tensor], rows: Tensor, differentiable: bool) -> list[Tensor]:
    """One pullback for each row, all at once where torch can."""

    def pulled_back(g: Tensor, batched: bool) -> list[Tensor]:
        """The gradients of the parameters that the value is made of."""
        gradients = torch.autograd.grad(
            value,
            parameters,
            g,
            retain_graph=True,
            create_graph=differentiable,
            allow_unused=True,
            is_grads_batched=batched,
        )
        lead = g.shape[:1] if batched else ()
        return [dense(v, p.new_zeros(*lead, *p.shape)) for v, p in zip(gradients, parameters, strict=True)]

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            return pulled_back(rows, True)
    except (RuntimeError, NotImplementedError):  # a function in the graph that vmap cannot do
        by_row = [pulled_back(row, False) for row in rows]
        return [torch.stack(column) for column in zip(*by_row, strict=True)]


def dense(g: Tensor | None, zero: Tensor) -> Tensor:
    """A gradient as a plain tensor: 0 where there is none, a sparse one (of an embedding, say) written out."""
    if g is None:
        return zero
    return g.to_dense() if g.layout != torch.strided else g
