"""Factors in 16 bits, scaled so that neither they nor their products leave the range (65504 at most), and formed
gradients in 8."""

from dataclasses import replace

import torch
from torch import Tensor

from . import narrow
from .blocks import DenseBlock, GradientBlock, MixedBlock, OuterBlock


def halved(block: GradientBlock, seed: float) -> tuple[GradientBlock, Tensor]:
    """A block with 16-bit factors and the largest cotangent in it.

    The activations are scaled per sample by a power of two such that no sum of t products can overflow; the cotangents
    were put into range by `seed` before the backward pass. Small sums stay in 32 bits.
    """
    if isinstance(block, DenseBlock):
        return DenseBlock(block.g.float() / seed), torch.linalg.vector_norm(block.g, torch.inf).float()
    if isinstance(block, MixedBlock):
        halves = [halved(b, seed) for b in block.blocks]
        return MixedBlock(tuple(b for b, _ in halves)), torch.stack([top for _, top in halves]).max()
    assert isinstance(block, OuterBlock)
    largest = _largest([u.d for u in block.uses])
    scale = torch.full_like(largest, 1 / seed)
    if block.indexed:  # row numbers are not scaled
        uses = tuple(replace(u, d=u.d.half()) for u in block.uses)
        return replace(block, uses=uses, scale=scale), largest.max()
    # Powers of two change no digit, so scaling costs no accuracy.
    on_a = _largest([u.x for u in block.uses])
    # Where the cotangents are tiny, what limits the factor is that the activations themselves must not overflow.
    factor = torch.minimum(_power(2.0**15 / block.sizes()[0], largest * on_a), _power(2.0**15, on_a))
    inputs = [(u.x * factor.view(-1, *[1] * (u.x.dim() - 1))).half() for u in block.uses]
    uses = tuple(replace(u, x=x, d=u.d.half()) for u, x in zip(block.uses, inputs, strict=True))
    return replace(block, uses=uses, scale=scale / factor), largest.max()


def kept_in_eight(c: int, entries: int) -> bool:
    """Whether formed gradients of a parameter are kept in 8 bits: those that are multiplied so, in multiples of 16."""
    return entries % 16 == 0 and c * entries >= narrow.LEAST


def quartered(block: GradientBlock) -> GradientBlock:
    """Gradients that were formed in 16 bits in 8, with their norms as they were; any other block as it is."""
    if not isinstance(block, DenseBlock) or block.scale is None or not kept_in_eight(block.c, block.g.shape[2]):
        return block
    rows = narrow.rounded(block.g.flatten(1))
    norms = torch.linalg.vector_norm(block.g, dim=2, dtype=torch.float32) * block.scale[:, None]
    return DenseBlock(rows.q.view(block.g.shape), block.scale * rows.scale, norms.square())


def _largest(factors: list[Tensor]) -> Tensor:
    """The largest absolute entry per sample: [n]."""
    tops = [torch.linalg.vector_norm(v, torch.inf, tuple(range(1, v.dim()))).float() for v in factors]
    return torch.stack(tops).amax(0)


def _power(room: float, largest: Tensor) -> Tensor:
    """The largest power of two that keeps `largest` below `room`."""
    # Of nothing, or of what has overflowed already, no power can be told; 1 does no harm.
    safe = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return torch.exp2(torch.floor(torch.log2(room / safe)).clamp(-100, 100))
