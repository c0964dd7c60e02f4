"""Heads of an attention layer, drawn: Gaussian scores of two samples that meet, and the attention that they give.

The scores of one head are G = L Z Rᵀ with L, R symmetric roots of the covariances of queries and keys over all
positions of both samples, and Z standard Gaussian. To save variance, draws are orthogonal to one another as far as
possible (Yu et al. 2016, "Orthogonal random features"), come with both signs, and with both samples exchanged.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...errors import InputError

Heads = Iterator[tuple[Tensor, Tensor]]  # attentions [p, b, T, T] and [p, b, T', T'] of some heads at a time
ENTRIES = 2**18  # of one of the dozen tensors that are held at once: a heuristic
ORTHOGONAL = 1024  # at most so many draws are made orthogonal to one another, which costs their number cubed


@dataclass(frozen=True)
class Sequences:
    """One batch: the covariances [n, T, T] of the layer's input over the positions of each sample, per channel.

    `mask` [n, T] is True at valid positions: the others get no attention as keys and values, and do ask as queries, as
    in torch.
    """

    cov: Tensor
    mask: Tensor | None = None

    def at(self, index: Tensor) -> "Sequences":
        """The samples with these numbers."""
        return Sequences(self.cov[index], None if self.mask is None else self.mask[index])

    def valid(self) -> Tensor:
        """The mask [n, T], true everywhere where there is none."""
        return self.cov.new_ones(self.cov.shape[:2], dtype=torch.bool) if self.mask is None else self.mask


def seen_keys(side: Sequences, causal: bool) -> Tensor:
    """[n, T, T]: which keys a query may see."""
    seen, mask = torch.ones_like(side.cov, dtype=torch.bool), side.mask
    if causal:
        seen = seen.tril()
    if mask is None:
        return seen
    seen = seen & mask[:, None]
    # A softmax over no keys is 0/0. Padded queries may have none: nobody reads them.
    keyless = ~seen.any(-1) & mask
    if bool(keyless.any()) or not bool(mask.any(-1).all()):
        raise InputError("a mask leaves a sample, or a valid query, without any key. Take such samples out first.")
    return seen


def attention_weights(scores: Tensor, seen: Tensor) -> Tensor:
    """softmax over the keys that are seen; zero for (invalid) queries that see none."""
    attention = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return attention.masked_fill(~seen.any(-1, keepdim=True), 0)


def sizes_at_once(base: int, cov: Tensor) -> tuple[int, int]:
    """How many draws and how many pairs are held at once."""
    # Each draw is four heads, of T² scores.
    entries = 4 * max(cov.shape[-2:]) ** 2
    room = ENTRIES if cov.device.type == "cpu" else 128 * ENTRIES
    draws = min(base, max(1, room // entries))
    return draws, max(1, room // (entries * draws))


def joint_roots(cov: Tensor, valid: Tensor | None, q_var: float, q_bias: float, k_var: float) -> tuple[Tensor, Tensor]:
    """Roots of the covariances of queries and keys [p, N, N]: symmetric, so that they follow an exchange of samples.

    Valid positions have a root of their own, whatever the others are; the others are drawn given the valid ones.
    """
    queries = q_var * cov + q_bias
    # Without biases of the queries both covariances are multiples of one matrix: a single root.
    if valid is None:
        root = symmetric_root(cov)
        return (math.sqrt(q_var) * root if q_bias == 0 else symmetric_root(queries)), math.sqrt(k_var) * root
    row, column = valid[:, :, None], valid[:, None]
    inside = row & column
    # Padded positions given the valid ones: Σ₂₁ Σ₁₁^{−½}, and below what is left of Σ₂₂.
    across = (queries * (column & ~row)) @ symmetric_root(queries * inside, power=-0.5)
    rest = (queries - across @ across.mT) * ~(row | column)
    scale = queries.diagonal(dim1=1, dim2=2).amax(1, keepdim=True)
    return symmetric_root(queries * inside) + across + symmetric_root(rest, scale), math.sqrt(k_var) * symmetric_root(
        cov * inside
    )


def symmetric_root(cov: Tensor, scale: Tensor | None = None, power: float = 0.5) -> Tensor:
    """The symmetric root of the positive part, or its pseudo-inverse; what rounding leaves of a zero is zero."""
    values, vectors = torch.linalg.eigh(cov)
    # Relative to the largest eigenvalue: what is below comes from rounding.
    least = 1e-12 * (values[..., -1:] if scale is None else scale)
    values = torch.where(values > least.clamp_min(0), values, torch.inf if power < 0 else 0) ** power
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


@lru_cache(maxsize=4)
def standard_draws(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Standard Gaussians [2, count, 2, size, size], on the CPU in float64: even and odd under an exchange of samples.

    With X = even, Y = odd, the draw over the 2·size positions of a pair is [[X₀+Y₀, X₁+Y₁], [X₁−Y₁, X₀−Y₀]]/√2.
    The columns are drawn in the order of max(t, u), so that a smaller size is the leading part of a larger one.
    """
    parts = -(-count // ORTHOGONAL)
    # A seed for each block of draws and each parity, so that blocks are independent.
    seeds = torch.randint(2**62, (parts, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [len(r) for r in torch.arange(count).chunk(parts)]
    t, u = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    # Entry (t, u) belongs to the size max(t, u) + 1: all entries of smaller sizes are drawn before it.
    order = (torch.maximum(t, u) * 2 * size + torch.where(t < u, t, 2 * size - 1 - u)).flatten().argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    parities = []
    for parity in range(2):
        drawn = [orthogonal(r, 2 * size**2, s[parity]) for r, s in zip(rows, seeds, strict=False)]
        parities.append(torch.cat(drawn).view(count, -1, 2)[:, place].movedim(2, 1).reshape(count, 2, size, size))
    return parities[0], parities[1]


def orthogonal(rows: int, columns: int, seed: int) -> Tensor:
    """Gaussian rows [rows, columns] whose directions are orthogonal within each `rows` columns (Yu et al. 2016).

    Each row alone is exactly Gaussian: a uniform direction, times a norm of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for start in range(0, columns, rows):
        directions, norms = torch.randn(2, rows, rows, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(directions[:, : columns - start])
        # QR leaves the signs to LAPACK; with those of R's diagonal the directions are uniform
        blocks.append(q * r.diagonal().sign() * norms.norm(dim=1, keepdim=True))
    return torch.cat(blocks, 1)


def draw_heads(
    roots: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor], base: int, seed: int, at_once: int, dtype: torch.dtype
) -> Heads:
    """Attentions [p, b, T, T] and [p, b, T', T'] of b heads at a time, the same heads for both samples.

    `seen`: which keys the queries of each sample see. All 4·`base` heads are 4·`at_once` at a time.
    """
    t, s = (keys.shape[-1] for keys in seen)
    left, right = (r.to(dtype) for r in roots)
    even, odd = standard_draws(base, max(t, s), seed)
    for x, y in zip(even.split(at_once), odd.split(at_once), strict=True):
        draws = over_pair(x.to(left), (t, t), (s, s), 1), over_pair(y.to(left), (t, t), (s, s), -1)
        attentions = []
        for rows, keys in ((slice(t), seen[0]), (slice(t, t + s), seen[1])):
            a, b = (scores_of(left[:, rows], z, right[:, rows]) for z in draws)
            # Z, Z with the samples exchanged, and both with the other sign.
            attentions.append(attention_weights(torch.cat([a + b, a - b, -a - b, b - a], 1), keys.unsqueeze(1)))
        yield attentions[0], attentions[1]


def draw_own_heads(
    roots: tuple[Tensor, Tensor], seen: Tensor, base: int, seed: int, at_once: int, dtype: torch.dtype
) -> Heads:
    """The same for samples with themselves: there the root is [[R, R], [R, R]]/√2, so a draw counts as (X₀ + X₁)/√2."""
    left, right = (r.to(dtype) for r in roots)
    for x in standard_draws(base, seen.shape[-1], seed)[0].split(at_once):
        a = scores_of(left, (x.sum(1) / math.sqrt(2)).to(left), right)
        attention = attention_weights(torch.cat([a, -a], 1), seen.unsqueeze(1))
        yield attention, attention


def over_pair(x: Tensor, here: tuple[int, int], there: tuple[int, int], sign: int) -> Tensor:
    """[[X₀, X₁], [±X₁, ±X₀]]/√2 over the positions of a pair: numbers of queries and of keys on either side."""
    (t, s), (u, v) = here, there
    above = torch.cat([x[:, 0, :t, :s], x[:, 1, :t, :v]], 2)
    below = torch.cat([x[:, 1, :u, :s], x[:, 0, :u, :v]], 2)
    return torch.cat([above, sign * below], 1) / math.sqrt(2)


def scores_of(left: Tensor, z: Tensor, right: Tensor) -> Tensor:
    """left z rightᵀ for p pairs and b draws [p, b, T, S]; left [p, T, N], right [p, S, M], z [b, N, M]."""
    p, t, n = left.shape
    half = left.reshape(p * t, n) @ z.movedim(0, 1).reshape(n, -1)  # [pT, bM]
    after = half.view(p, -1, right.shape[-1]) @ right.mT
    return after.view(p, t, len(z), right.shape[1]).transpose(1, 2)
