"""The blocks of micro-batches, written into those of all samples."""

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace

from torch import Tensor

from .._base.memory import own_pages
from .blocks import DenseBlock, GradientBlock, MixedBlock, OuterBlock, can_be_formed, formed, summands


def put_formed(target: GradientBlock | None, block: GradientBlock, start: int, n: int) -> GradientBlock:
    """`put` of the gradients that `formed` makes of a block: in their place at once, which takes no second memory."""
    if not can_be_formed(block):
        return put(target, block, start, n)
    if target is None:
        _, g, i, o = block.sizes()
        scale = None if block.scale is None else block.scale.new_zeros(n)
        target = DenseBlock(_zeros(block.uses[0].d, (n, block.c, g * o * i)), scale)
    alike = isinstance(target, DenseBlock) and _likeness(target) == (block.dtype, block.scale is None)
    place = target.tensors()[0][start : start + block.n] if alike else None
    return put(target, formed(block, place), start, n)


def put(target: GradientBlock | None, block: GradientBlock, start: int, n: int) -> GradientBlock:
    """Write the block of a micro-batch into rows start… of a block of n samples, which is made if there is none yet.

    What a micro-batch lacks stays zero: a parameter that some samples do not reach (a data-dependent branch), or a loop
    that uses a weight more often for some samples.
    """
    if isinstance(block, MixedBlock) or (target is not None and _likeness(target) != _likeness(block)):
        # Each part by itself: the model took another way for these samples, or used another part of the weight.
        kept = dict(_numbered(target)) if target is not None else {}
        for likeness, b in _numbered(block):
            kept[likeness] = put(kept.get(likeness), b, start, n)
        return next(iter(kept.values())) if len(kept) == 1 else MixedBlock(tuple(kept.values()))
    rows = slice(start, start + block.n)
    if isinstance(block, DenseBlock):
        whole = _zeros_like_rows(block.g, n) if target is None else target.tensors()[0]
        if block.g.data_ptr() != whole[rows].data_ptr():  # they were formed in their place
            whole[rows] = block.g
        before = (target.scale, target.norms) if isinstance(target, DenseBlock) else (None, None)
        return DenseBlock(whole, _filled(before[0], block.scale, rows, n), _filled(before[1], block.norms, rows, n))
    assert isinstance(block, OuterBlock)
    # Use by use: a loop that runs longer for these samples adds uses, in which the samples before have zeros.
    uses = list(target.uses) if isinstance(target, OuterBlock) else []
    for k, use in enumerate(block.uses):
        if k == len(uses):
            uses.append(replace(use, x=_zeros_like_rows(use.x, n), d=_zeros_like_rows(use.d, n)))
        uses[k].x[rows] = use.x
        uses[k].d[rows] = use.d
    scale = target.scale if isinstance(target, OuterBlock) else block.scale
    if block.scale is not None:
        scale = block.scale.new_zeros(n) if target is None else scale
        assert scale is not None
        scale[rows] = block.scale
    return replace(block, uses=tuple(uses), scale=scale)


def _filled(whole: Tensor | None, part: Tensor | None, rows: slice, n: int) -> Tensor | None:
    """Numbers of n samples with those of some of them written in, where there are such numbers."""
    if part is not None:
        whole = part.new_zeros(n, *part.shape[1:]) if whole is None else whole
        whole[rows] = part
    return whole


def _likeness(block: GradientBlock) -> Hashable:
    """What two blocks must have in common to be rows of one."""
    if isinstance(block, MixedBlock):
        return tuple(_likeness(b) for b in block.blocks)
    if isinstance(block, OuterBlock):
        return block.kind, block.dtype, block.scale is None, block.slot
    return block.tensors()[0].dtype, isinstance(block, DenseBlock) and block.scale is None


def _numbered(block: GradientBlock) -> Iterator[tuple[Hashable, GradientBlock]]:
    """The summands of a block by what they are like, the second of a kind apart from the first."""
    seen: dict[Hashable, int] = {}
    for b in summands(block):
        likeness = _likeness(b)
        seen[likeness] = seen.get(likeness, 0) + 1
        yield (likeness, seen[likeness]), b


def _zeros_like_rows(v: Tensor, n: int) -> Tensor:
    """Zeros for n rows like those of v, with the other dimensions in the order in which they lie in v's memory."""
    # Contractions want channels and outputs to be neighbours in memory, as `capture` has laid them out.
    strides = v.stride()
    order = [0, *sorted(range(1, v.dim()), key=lambda k: -strides[k])]
    zeros = _zeros(v, (n, *(v.shape[k] for k in order[1:])))
    return zeros.permute([order.index(k) for k in range(v.dim())])


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of this shape."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return own_pages(math.prod(shape) * like.element_size()).view(like.dtype).view(shape)
