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
from .blocks import Block, Dense, Outer, Slot

# Bytes that a batched pullback may take at a time (heuristic).
ROOM = 1 << 27


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter (`name`), or a value made of the parameters `sources`, with its graph."""

    key: Hashable  # how it is made; the same in every run of the model
    value: Tensor
    sources: tuple[str, ...]
    name: str | None = None
    slot: Slot | None = None  # of a view, possibly scaled: where it lies in its one source
    scale: float = 1.0

    @property
    def plain(self) -> Tensor:
        """The value without its graph, for the layer."""
        return self.value.detach() if self.value.requires_grad else self.value


class Weights:
    """The weights of one forward pass, known by the identity of their tensors."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.leaves = dict(parameters)
        self._found = {id(v): Weight(k, v, (k,), name=k) for k, v in parameters.items()}

    def get(self, v: Tensor) -> Weight | None:
        return self._found.get(id(v))

    def add(self, key: Hashable, v: Tensor, made_of: Sequence[Weight], factor: float | None) -> Weight:
        """Remember a value made of weights. `factor`: it is this many times the first of them, entry by entry.

        Without a graph (in torch.no_grad, or inside of an autograd function, which adds its own) nothing is known.
        """
        sources = tuple(dict.fromkeys(name for w in made_of for name in w.sources))
        first = made_of[0]
        if not v.requires_grad:
            slot, scale = None, 1.0
        elif factor is not None and (first.slot is not None or first.name is not None):
            slot, scale = first.slot or _all_of(first.value), first.scale * factor
        else:
            slot, scale = self._view(v, sources), 1.0
        self._found[id(v)] = Weight(key, v, sources, None, slot, scale)
        return self._found[id(v)]

    def drop(self, v: Tensor) -> None:
        """v is no longer made of weights alone."""
        self._found.pop(id(v), None)

    def written(self, v: Tensor) -> None:
        """v was changed in place, and with it whatever shares its memory: none of it is a plain view any more."""
        if v.layout != torch.strided:
            return
        place = v.untyped_storage().data_ptr()
        for key, w in self._found.items():
            if w.name is None and w.slot is not None and w.value.untyped_storage().data_ptr() == place:
                self._found[key] = replace(w, slot=None, scale=1.0)

    def _view(self, v: Tensor, sources: tuple[str, ...]) -> Slot | None:
        leaf = self.leaves[sources[0]] if len(sources) == 1 else None
        if (
            leaf is None
            or v.layout != torch.strided
            or not leaf.is_contiguous()
            or v.dtype != leaf.dtype
            or not v.numel()
        ):
            return None
        if v.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
            return None
        if any(step == 0 and size > 1 for size, step in zip(v.shape, v.stride(), strict=True)):
            return None
        offset = int(v.storage_offset() - leaf.storage_offset())
        slot = Slot(leaf.numel(), tuple(v.shape), v.stride(), offset)
        return slot if v.numel() <= leaf.numel() else None


def _all_of(v: Tensor) -> Slot | None:
    return Slot(v.numel(), tuple(v.shape), v.stride(), 0) if v.is_contiguous() else None


def pull_back(
    weight: Weight, block: Block, leaves: Mapping[str, Tensor], differentiable: bool
) -> Iterator[tuple[str, Block]]:
    """(parameter, block) from the block of a weight."""
    if weight.name is not None:
        yield weight.name, block
        return
    if weight.slot is not None:
        if weight.scale != 1:
            block = blocks.changed(block, lambda v: v * weight.scale)
        yield weight.sources[0], _placed(block, weight.slot, leaves[weight.sources[0]].shape)
        return
    g = block.expand()
    for name, p in _vjp(weight, g, leaves, differentiable).items():
        yield name, Dense(p)


def _placed(block: Block, slot: Slot, shape: tuple[int, ...]) -> Block:
    """The block of a view as one of its parameter. Factors of another shape than the parameter's keep their slot, even
    if it is the whole: they cannot be joined with those of other shapes."""
    if slot.whole and slot.shape == shape:
        return block
    if isinstance(block, Outer):
        return replace(block, slot=slot)
    return Dense(slot.put(block.expand()))


def _vjp(weight: Weight, g: Tensor, leaves: Mapping[str, Tensor], differentiable: bool) -> dict[str, Tensor]:
    """[n, c, entries of the weight] → [n, c, entries] of every parameter that it is made of."""
    n, c = g.shape[:2]
    own = {name: leaves[name] for name in weight.sources}
    rows = g.reshape(n * c, *weight.value.shape).to(weight.value.dtype)
    each = rows.element_size() * (rows[0].numel() + sum(v.numel() for v in own.values()))
    step = n * c if differentiable else max(1, ROOM // (4 * each))
    parts: list[list[Tensor]] = []
    for some in rows.split(step):
        parts.append(_batched(weight.value, list(own.values()), some, differentiable))
    return {name: torch.cat(got).reshape(n, c, -1) for name, got in zip(own, zip(*parts, strict=True), strict=True)}


def _batched(value: Tensor, own: list[Tensor], rows: Tensor, differentiable: bool) -> list[Tensor]:
    """One pullback for each row, all at once where torch can."""

    def grads(g: Tensor, batched: bool) -> list[Tensor]:
        found = torch.autograd.grad(
            value, own, g, retain_graph=True, create_graph=differentiable, allow_unused=True, is_grads_batched=batched
        )
        lead = g.shape[:1] if batched else ()
        return [dense(v, p.new_zeros(*lead, *p.shape)) for v, p in zip(found, own, strict=True)]

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            return grads(rows, True)
    except (RuntimeError, NotImplementedError):
        each = [grads(row, False) for row in rows]
        return [torch.stack(column) for column in zip(*each, strict=True)]


def dense(g: Tensor | None, zero: Tensor) -> Tensor:
    """A gradient as a plain tensor: 0 where there is none, a sparse one (of an embedding, say) written out."""
    if g is None:
        return zero
    return g.to_dense() if g.layout != torch.strided else g
