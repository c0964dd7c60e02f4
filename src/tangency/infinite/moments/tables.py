"""Trained tables of position biases: each head adds b[rel(t, s)] to its scores, the same for all samples.

Every head has a table of its own with independent entries b[r] of one law, so with infinitely many heads they are one
more thing to draw beside the scores. Training the table adds, with D_tr = Σ_{s: rel(t, s) = r} ζ_ts (v_s − o_t) the
derivative ∂o_t/∂b[r] of a head's output o_t = Σ_s ζ_ts v_s,
    rate·Σ_r E[D_tr D'_t'r] = rate·Σ_ss' δ(rel(t, s) = rel(t', s'))·E[J V J'ᵀ]_ss',
which is the formula of queries and keys (`attention.py`) with δ for the tangent kernel of the scores.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .core import Law
from .draws import ORTHOGONAL, orthogonal


@dataclass(frozen=True, eq=False)
class Table:
    """A table of each head's own: `index` [T, S] says which entry is added to a score, −1 that none is."""

    index: Tensor
    variance: float  # of an entry about its mean: what all keys of a query have in common no softmax sees
    rate: float = 0.0
    law: Law = "normal"

    @property
    def size(self) -> int:
        """How many of its entries are used."""
        return int(self.index.max()) + 1

    def drawn(self, count: int, seed: int) -> Tensor:
        """Entries [count, size + 1] of `count` heads; the last one is the 0 of scores without any."""
        z = _standard(count, self.size, seed)
        # A single entry counts, no sum of many, so its law is not Gaussian of itself.
        z = math.sqrt(3) * torch.erf(z / math.sqrt(2)) if self.law == "uniform" else z
        return torch.cat([math.sqrt(self.variance) * z, z.new_zeros(count, 1)], 1)


@lru_cache(maxsize=8)
def _standard(count: int, size: int, seed: int) -> Tensor:
    """Standard Gaussians [count, size], on the CPU in float64: rows of each block are orthogonal where they can be."""
    blocks = [len(r) for r in torch.arange(count).chunk(-(-count // ORTHOGONAL))]
    seeds = torch.randint(2**62, (len(blocks),), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.cat([orthogonal(rows, size, s) for rows, s in zip(blocks, seeds, strict=True)])


def table_shifts(tables: Sequence[Table], count: int, seed: int, at_once: int, signs: Sequence[int]) -> Iterator[Tensor | None]:
    """What tables add to scores [b·signs, T, S], for `at_once` draws at a time; None where nothing is drawn.

    `signs` are those of the scores that one draw is used for: entries change sign with them, so that equal pairs of
    heads stay equal when samples are exchanged.
    """
    starts = range(0, count, at_once)
    moving = [(k, table) for k, table in enumerate(tables) if table.variance]
    if not moving:
        yield from (None for _ in starts)
        return
    # Other numbers than those of the scores, and of the other tables.
    drawn = [(table.index, table.drawn(count, (seed + 1) * 0x9E3779B1 + k)) for k, table in moving]
    for start in starts:
        total = sum(entries[start : start + at_once][:, index.cpu()] for index, entries in drawn)
        assert isinstance(total, Tensor)
        yield torch.cat([s * total for s in signs])


@dataclass(frozen=True)
class Attended:
    """Attentions ζ, ζ' [p, b, T, S] of both samples, with ζV, Vζ' (as [p, b, T', S]) and ζVζ'ᵀ."""

    left: Tensor
    right: Tensor
    value_left: Tensor
    value_right: Tensor
    value: Tensor


def table_term(table: Table, cov: Tensor, heads: Attended) -> Tensor:
    """Σ_ss' δ(rel(t, s) = rel(t', s'))·(J V J'ᵀ)_ss' [p, b, T, T'] of each head; V [p, S, S']."""
    out = torch.zeros_like(heads.value)
    index = table.index.to(cov.device)
    for r in range(table.size):
        # An entry is met by few queries and keys: the rest of the rows and columns would be zeros.
        met = index == r
        rows, columns = met.any(1).nonzero().squeeze(1), met.any(0).nonzero().squeeze(1)
        here = met[rows][:, columns].to(cov.dtype)
        a, b, va, vb = (
            v[:, :, rows][..., columns] for v in (heads.left, heads.right, heads.value_left, heads.value_right)
        )
        a, b = a * here, b * here
        total, other = a.sum(-1, keepdim=True), b.sum(-1, keepdim=True).mT
        mat = cov[:, columns][..., columns]
        part = (a.flatten(1, 2) @ mat).unflatten(1, a.shape[1:3]) @ b.mT
        # D_tr D'_t'r with o_t taken apart: x V y − Σx·(ζV y) − (x Vζ')·Σy + Σx Σy·ζVζ'.
        part = part - total * (va @ b.mT) - (a @ vb.mT) * other
        value = heads.value[:, :, rows][..., rows]
        out[:, :, rows.unsqueeze(1), rows] += part + total * other * value
    return out
