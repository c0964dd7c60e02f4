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

AT_ONCE = 64  # pairs of keys with one entry that are held at once (heuristic)


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


def table_shifts(
    tables: Sequence[Table], count: int, seed: int, at_once: int, signs: Sequence[int]
) -> Iterator[Tensor | None]:
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


def table_sum(table: Table, cov: Tensor, heads: Attended) -> Tensor:
    """Σ over heads of Σ_ss' δ(rel(t, s) = rel(t', s'))·(J V J'ᵀ)_ss' [p, T, T']; V [p, S, S'].

    D_tr D'_t'r with o_t taken apart: with x and y the ζ_ts and ζ'_t's' of entry r, x V y − Σx·(ζV)y − x(Vζ')·Σy +
    Σx Σy·ζVζ'.
    """
    index = table.index.to(cov.device)
    sums, others = (_by_entry(v, index, table.size) for v in (heads.left, heads.right))
    out = _meeting(table, cov, heads) + ((sums @ others.mT) * heads.value).sum(1)
    # Heads last: what is looked up then are rows of numbers that lie side by side.
    sums, others, left, right, vleft, vright = (
        v.permute(0, 2, 3, 1).contiguous()
        for v in (sums, others, heads.left, heads.right, heads.value_left, heads.value_right)
    )
    for t, row in enumerate(index):
        keys = (row >= 0).nonzero().squeeze(1)
        entries = row[keys]
        for by, values, other, into in ((sums, vleft, right, out[:, :, t]), (others, vright, left, out[:, t])):
            met = by.index_select(2, entries) * values.index_select(2, keys)
            into -= (met.flatten(2) @ other[:, t].index_select(1, keys).flatten(1).unsqueeze(2)).squeeze(2)
    return out


def _by_entry(attention: Tensor, index: Tensor, size: int) -> Tensor:
    """Σ_{s: rel(t, s) = r} ζ_ts [p, b, T, size]."""
    out = attention.new_zeros(*attention.shape[:-1], size + 1)
    where = torch.where(index < 0, size, index).expand(attention.shape)
    return out.scatter_add_(-1, where, attention)[..., :-1]


def _meeting(table: Table, cov: Tensor, heads: Attended) -> Tensor:
    """Σ over heads of Σ_ss' δ(rel(t, s) = rel(t', s'))·ζ_ts V_ss' ζ'_t's': heads are summed, then V multiplies."""
    keys, pairs = (v.to(cov.device) for v in _slots(table))
    places, there = keys.clamp_min(0), (keys >= 0).to(cov.dtype)
    rows = torch.arange(keys.shape[1], device=cov.device)
    # [p, slots, T, b]
    x, y = ((v[:, :, rows, places] * there).permute(0, 2, 3, 1) for v in (heads.left, heads.right))
    out = cov.new_zeros(len(cov), len(rows), len(rows))
    for k, m in pairs.split(AT_ONCE, 1):
        met = x[:, k] @ y[:, m].mT
        out += (met * cov[:, places[k].unsqueeze(2), places[m].unsqueeze(1)]).sum(1)
    return out


def _slots(table: Table) -> tuple[Tensor, Tensor]:
    """Keys [slots, T] that meet an entry, −1 for none: an entry has as many slots as a query has keys that meet it.

    Also the pairs [2, P] of slots of one entry.
    """
    met = table.index.cpu() == torch.arange(table.size).view(-1, 1, 1)  # [size, T, S]
    most = met.sum(-1).amax(-1)
    # The keys that meet an entry, in order, before those that do not.
    order = met.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    keys = torch.where(met.gather(-1, order), order, -1)
    slots = [(r, i) for r, count in enumerate(most.tolist()) for i in range(count)]
    entries = torch.tensor([r for r, _ in slots])
    pairs = (entries.unsqueeze(1) == entries).nonzero().T
    return torch.stack([keys[r, :, i] for r, i in slots]), pairs
