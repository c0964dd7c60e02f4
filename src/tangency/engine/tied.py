"""Products of gradients of a matrix that both looks rows up and multiplies (tied embeddings), none of them formed.

G = E + L with E = Σ_t e_{row(t)} ⊗ δ_t where rows were looked up, and L = Σ_s δ'_s ⊗ a_s where it multiplied: ⟨E, L⟩ is
Σ_{t,s} δ'_s[row(t)] (δ_t·a_s), of numbers that are there already. To form a gradient of a large vocabulary takes longer
than the whole backward pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import GradientBlock, OuterBlock, summands
from .narrow import matmul_wide


class Tied(NamedTuple):
    """The two parts of a gradient."""

    looked_up: OuterBlock
    multiplied: OuterBlock


def tied(block: GradientBlock) -> Tied | None:
    """The parts of a block, if it is of such a matrix."""
    parts = summands(block)
    if len(parts) != 2 or not all(isinstance(b, OuterBlock) and b.slot is None for b in parts):
        return None
    by_kind = {b.kind: b for b in parts if isinstance(b, OuterBlock)}
    if by_kind.keys() != {"lookup", "rows"}:
        return None
    looked_up, multiplied = by_kind["lookup"], by_kind["rows"]
    (_, groups, i, o), (_, _, rows, width) = multiplied.sizes(), looked_up.sizes()
    return Tied(looked_up, multiplied) if (groups, o, i) == (1, rows, width) else None


def crossed(e: OuterBlock, f: OuterBlock, trace: bool, workspace: int) -> Tensor:
    """⟨E, L⟩ of every sample of e, which looked up, with every one of f, which multiplied: [n, m], full [n·c, m·d]."""
    rows, d, a, deltas = e.a(), e.d()[:, :, :, 0], f.a()[:, :, 0], f.d()[:, :, :, 0]
    (n, c, t, _), (m, q, s, _) = d.shape, deltas.shape
    # Both products of a few samples with one of the others, side by side.
    step = max(1, workspace // max(1, 8 * t * s * (c + q)))
    parts = []
    for i in range(0, n, step):
        few = rows[i : i + step]
        there, flat, left = few >= 0, few.clamp(min=0).flatten(), d[i : i + step].flatten(0, 2)
        columns = []
        for j in range(m):
            alike = matmul_wide(left, a[j].T).view(len(few), c, t, s)
            found = deltas[j].index_select(2, flat).view(q, s, len(few), t).to(alike.dtype) * there
            columns.append(torch.einsum("ncts,csnt->n" if trace else "ncts,qsnt->ncq", alike, found))
        parts.append(torch.stack(columns, 1) if trace else torch.stack(columns, 2).flatten(2).flatten(0, 1))
    made = torch.cat(parts)
    if e.scale is None or f.scale is None:
        return made
    each, other = (1, 1) if trace else (c, q)
    return made * e.scale.repeat_interleave(each)[:, None] * f.scale.repeat_interleave(other)
