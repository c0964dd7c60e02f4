"""Which entries of a layer's tensors belong to which sample.

Where the model treats all batches alike, two samples alone and together show it once and for all (`Layout`, found by the
probe). Where data decide the way (experts, boolean masks, loops over samples), it is measured for every batch: with
weights s_i on the samples, what comes back to a row of sample i is s_i times what comes back without (`Rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .rules import NoRule, Rule


@dataclass(frozen=True)
class Layout:
    """The dimension in which the samples lie, how many rows each has there, and whether they come first in it."""

    dim: int
    rows: int = 1
    major: bool = True

    @property
    def folded(self) -> tuple[int, ...]:
        """The dimensions of a tensor that `samples_first` makes into [n, r]."""
        return (self.dim,)

    def samples_first(self, v: Tensor, n: int) -> Tensor:
        """[…, n·r, …] → [n, r, …]."""
        v = v.movedim(self.dim, 0)
        if v.shape[0] != n * self.rows:
            raise NoRule
        return v.unflatten(0, (n, -1)) if self.major else v.unflatten(0, (-1, n)).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows that were measured: row `source[k]` of the `dims` first dimensions goes to place `target[k]` of [n, r]."""

    dims: int
    source: Tensor
    target: Tensor
    rows: int

    @property
    def folded(self) -> tuple[int, ...]:
        return tuple(range(self.dims))

    def samples_first(self, v: Tensor, n: int) -> Tensor:
        """[*rows, …] → [n, r, …]; a sample with fewer rows than the others has zeros at its end."""
        v = _as_rows(v, self.dims)
        made = v.new_zeros(n * self.rows, *v.shape[1:]).index_copy(0, self.target, v[self.source])
        return made.unflatten(0, (n, -1))


Arrangement = Layout | Rows
# How far a row may be from a multiple of itself before it counts as belonging to several samples.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}


def _as_rows(v: Tensor, dims: int) -> Tensor:
    """[*dims, …] → [rows, …]; a layer that was called for one sample without a batch has one row."""
    return v.flatten(0, dims - 1) if dims > 0 else v[None]


def measured(
    out: Tensor, edges: Sequence[GradientEdge], rules: Sequence[Rule], layouts: Sequence[Layout | None]
) -> list[Arrangement | None]:
    """For each place in the graph, the probe's layout where this batch confirms it, else its rows by owner.

    None where a row belongs to several samples. Cost: two backward passes.
    """
    n, c = out.shape
    v = torch.cos(torch.arange(1.0, c + 1)).to(out)
    s = torch.arange(1, n + 1).to(out)

    def backward(seed: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(out, list(edges), seed, retain_graph=True, allow_unused=True)

    plain, weighted = backward(v.expand(n, c)), backward(s[:, None] * v)
    found: list[Arrangement | None] = []
    for one, two, rule, layout in zip(plain, weighted, rules, layouts, strict=True):
        if one is None or two is None:
            found.append(layout or Layout(0))  # nothing comes back
        elif layout is not None and _confirmed(layout, one, two, s):
            found.append(layout)
        else:
            found.append(_by_owner(rule.positions(one), one, two, n) if rule.movable else None)
    return found


def _confirmed(layout: Layout, one: Tensor, two: Tensor, s: Tensor) -> bool:
    try:
        a, b = (layout.samples_first(v, len(s)).flatten(2) for v in (one, two))
    except (NoRule, RuntimeError, IndexError):
        return False
    gap = torch.linalg.vector_norm(b - s[:, None, None] * a, dim=2)
    room = _TOLERANCE.get(a.dtype, 1e-2) * s[:, None] * torch.linalg.vector_norm(a, dim=2)
    return bool((gap <= room).all())


def _by_owner(dims: int, one: Tensor, two: Tensor, n: int) -> Rows | None:
    a, b = (_as_rows(v, dims).unsqueeze(-1).flatten(1) for v in (one, two))
    size = a.square().sum(1)
    live = (size > 0) | (b.square().sum(1) > 0)
    ratio = (a * b).sum(1)[live] / size[live]
    owner = ratio.round()
    gap = torch.linalg.vector_norm(b[live] - owner[:, None] * a[live], dim=1)
    good = gap <= _TOLERANCE.get(a.dtype, 1e-2) * owner.abs() * size[live].sqrt()
    if not bool((good & (owner >= 1) & (owner <= n)).all()):
        return None
    source, owner = live.nonzero()[:, 0], owner.long() - 1
    order = torch.argsort(owner, stable=True)
    source, owner = source[order], owner[order]
    counts = torch.bincount(owner, minlength=n)
    most = max(1, int(counts.max()))
    within = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    return Rows(dims, source, owner * most + within, most)
