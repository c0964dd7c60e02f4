"""Which entries of a layer's tensors belong to which sample.

Where the model treats all batches alike, two samples alone and together show it once and for all (`Layout`, found by
the probe). Where data decide the way (experts, boolean masks, loops over samples), it is measured for every batch: with
weights s_i on the samples, what comes back to a row of sample i is s_i times what comes back without
(`MeasuredRows`).
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
class MeasuredRows:
    """Rows traced to their samples: row `source[k]` of the first `dims` dimensions goes to place `target[k]` of
    [n, r, groups].

    Where a layer has groups (experts), they are the next dimension, and each has rows of its own.
    """

    dims: int
    source: Tensor
    target: Tensor
    rows: int
    owner: Tensor  # of each of these rows
    groups: int | None = None

    @staticmethod
    def of(dims: int, source: Tensor, owner: Tensor, n: int, groups: int | None = None) -> "MeasuredRows":
        """Each sample's rows one after the other, in the order in which they lie."""
        # Stable: rows of one sample and group keep their order, as those of the input do, which they are paired with.
        group = source % groups if groups else torch.zeros_like(source)
        key = owner * (groups or 1) + group
        order = torch.argsort(key, stable=True)
        counts = torch.bincount(key, minlength=n * (groups or 1))
        most = max(1, int(counts.max()))
        source, key, owner, group = (v[order] for v in (source, key, owner, group))
        within = torch.arange(len(key), device=key.device) - (counts.cumsum(0) - counts)[key]
        return MeasuredRows(dims, source, (owner * most + within) * (groups or 1) + group, most, owner, groups)

    @staticmethod
    def joined(tensors: "Sequence[MeasuredRows]", lengths: Sequence[int], n: int) -> "MeasuredRows":
        """Of tensors that follow one another, as one: `lengths` are their numbers of rows."""
        starts = [sum(lengths[:k]) for k in range(len(lengths))]
        source = torch.cat([rows.source + start for rows, start in zip(tensors, starts, strict=True)])
        return MeasuredRows.of(1, source, torch.cat([rows.owner for rows in tensors]), n)

    @property
    def folded(self) -> tuple[int, ...]:
        """The dimensions of a tensor that `samples_first` makes into [n, r]."""
        return tuple(range(self.dims))

    def samples_first(self, v: Tensor, n: int) -> Tensor:
        """[*rows, …] → [n, r, …]; a sample with fewer rows than the others has zeros at its end."""
        v = as_rows(v, self.dims + (self.groups is not None))
        zeros = v.new_zeros(n * self.rows * (self.groups or 1), *v.shape[1:])
        sorted_rows = zeros.index_copy(0, self.target, v[self.source])
        return sorted_rows.unflatten(0, (n, -1) if self.groups is None else (n, -1, self.groups))


Arrangement = Layout | MeasuredRows
# How far a row may be from a multiple of itself before it counts as belonging to several samples.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}


def as_rows(v: Tensor, dims: int) -> Tensor:
    """[*dims, …] → [rows, …]; a layer that was called for one sample without a batch has one row."""
    return v.flatten(0, dims - 1) if dims > 0 else v[None]


def _real(v: Tensor | None) -> Tensor | None:
    """Complex numbers as pairs, in a dimension of their own at the end."""
    return torch.view_as_real(v) if v is not None and v.is_complex() else v


def measure_layouts(
    out: Tensor,
    edges: Sequence[GradientEdge],
    rules: Sequence[Rule],
    layouts: Sequence[Layout | None],
    narrowest: torch.dtype,
) -> list[Arrangement | None]:
    """For each place in the graph, the probe's layout where this batch confirms it, else its rows by owner.

    None where a row belongs to several samples. Cost: two backward passes.
    """
    n, c = out.shape
    v = torch.cos(torch.arange(1.0, c + 1)).to(out)  # no two outputs alike, none left out
    s = torch.arange(1, n + 1).to(out)  # whole numbers: what a row is multiplied by is its owner's, after rounding
    bound = max(_TOLERANCE.get(out.dtype, 1e-2), _TOLERANCE.get(narrowest, 1e-2))

    def backward(seed: Tensor) -> tuple[Tensor | None, ...]:
        """What comes back to every layer from these weights of the outputs."""
        return torch.autograd.grad(out, list(edges), seed, retain_graph=True, allow_unused=True)

    plain, weighted = backward(v.expand(n, c)), backward(s[:, None] * v)
    places: list[Arrangement | None] = []
    for raw, times_s, rule, layout in zip(plain, map(_real, weighted), rules, layouts, strict=True):
        once = _real(raw)
        if raw is None or once is None or times_s is None:
            places.append(layout or Layout(0))  # nothing comes back
        elif layout is not None and _confirmed(layout, once, times_s, s, bound):
            places.append(layout)
        else:
            places.append(_by_owner(rule, raw, once, times_s, n, bound) if rule.movable else None)
    return places


def _confirmed(layout: Layout, once: Tensor, times_s: Tensor, s: Tensor, bound: float) -> bool:
    """Whether what came back to the samples' rows, as the layout has them, grew with the samples' weights."""
    try:
        a, b = (layout.samples_first(v, len(s)).flatten(2) for v in (once, times_s))
    except (NoRule, RuntimeError, IndexError):
        return False
    # Row by row: in a norm of all, a small one that grew by another sample's factor would vanish.
    gap = torch.linalg.vector_norm(b - s[:, None, None] * a, dim=2)
    size = torch.linalg.vector_norm(a, dim=2)
    room = bound * s[:, None] * (size + 1e-3 * size.amax())  # what is lost in the rounding of the rest is nobody's
    return bool((gap <= room).all())


def _by_owner(rule: Rule, plain: Tensor, once: Tensor, times_s: Tensor, n: int, bound: float) -> MeasuredRows | None:
    """The rows by the factor that each grew by: s_i = i + 1. None where that is no whole number of a sample."""
    dims = rule.positions(plain)
    groups = once.shape[dims] if rule.by_group else None
    a, b = (as_rows(v, dims + rule.by_group).unsqueeze(-1).flatten(1) for v in (once, times_s))
    size = a.square().sum(1)
    largest = size.amax() if len(size) else size.sum()
    rounding = (1e-3 * bound) ** 2 * largest
    # Rows to which nothing comes back have no owner, and no part in any gradient.
    live = (size > rounding) | (b.square().sum(1) > rounding * n * n)
    # The least-squares factor between a row with and without the weights, which are 1, 2, …, n.
    owner = ((a * b).sum(1)[live] / size[live]).round()
    gap = torch.linalg.vector_norm(b[live] - owner[:, None] * a[live], dim=1)
    good = gap <= bound * owner.abs() * (size[live].sqrt() + 1e-3 * largest.sqrt())
    if not bool((good & (owner >= 1) & (owner <= n)).all()):
        return None
    return MeasuredRows.of(dims, live.nonzero()[:, 0], owner.long() - 1, n, groups)
