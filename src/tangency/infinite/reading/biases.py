"""Trained position biases on their way to attention's scores: tables of parameters, looked up, turned, masked.

Swin, BEiT and LeViT index a parameter, T5 and MPNet an Embedding of relative positions; masks are added to it, or
chosen by torch.where, before scores are. What comes of it is `moments.tables.Table`, one for each head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ..layers.weights import Weights
from ..moments.axes import aligned
from ..moments.fields import Builder
from ..moments.tables import Table
from ..moments.values import Atom, Axes, Unsettled
from .calls import RANDOM, Call, Parameter, Rule

# What changes the form of a tensor alone: parameters with a mask follow it as torch itself does.
FORMS = (
    "view", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "expand", "expand_as", "contiguous", "flatten",
    "to", "float", "double", "type_as", "clone", "movedim", "swapaxes",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class PositionBias(Unsettled):
    """Parameters plus known numbers, of shapes that broadcast to its own: a summand of scores, and of nothing else."""

    tables: tuple[Parameter, ...]
    known: Tensor | None = None

    @classmethod
    def of(cls, value: object) -> "PositionBias | None":
        """A parameter, or what was made of some; None of others."""
        if isinstance(value, Parameter):
            return cls((value,))
        return value if isinstance(value, cls) else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The tensor's shape."""
        known = [] if self.known is None else [self.known.shape]
        return tuple(torch.broadcast_shapes(*(p.value.shape for p in self.tables), *known))

    def formed(self, form: Callable[[Tensor], Tensor]) -> "PositionBias":
        """The same numbers under another form."""
        sizes = self.sizes

        def whole(v: Tensor) -> Tensor:
            """Of the shape that all have together."""
            return form(v.expand(sizes))

        return PositionBias(
            tuple(p.formed(whole) for p in self.tables), None if self.known is None else whole(self.known)
        )

    def times(self, factor: float) -> "PositionBias":
        """A multiple of it."""
        tables = tuple(replace(p, factor=p.factor * factor) for p in self.tables)
        return PositionBias(tables, None if self.known is None else self.known * factor)

    def plus(self, other: "Tensor | PositionBias") -> "PositionBias":
        """The sum with a mask, or with another one."""
        tables, known = (other.tables, other.known) if isinstance(other, PositionBias) else ((), other)
        parts = [v for v in (self.known, known) if v is not None]
        return PositionBias((*self.tables, *tables), sum(parts[1:], start=parts[0]) if parts else None)

    def why(self) -> tuple[str, str]:
        """As `Unsettled.why`."""
        return (
            "adds a parameter to an input.",
            "Put a layer with weights before it; a parameter plus a mask has a rule where it is added to attention's "
            "scores.",
        )


def or_bias(method: str, rule: Rule) -> Rule:
    """The rule of a method that only changes forms, where it is called on a parameter with its mask."""

    def read(call: Call) -> object:
        """By what it is called on."""
        value = call.args[0] if call.args else None
        if not isinstance(value, PositionBias):
            return rule(call)
        rest, options = call.args[1:], call.kwargs.every()
        if method == "expand_as":
            return value
        return value.formed(lambda v: getattr(v, method)(*rest, **options))

    return read


def mask_bias(build: Builder, bias: PositionBias, keep: Tensor, fill: float, masked: float) -> PositionBias:
    """A bias where `keep` is true, else a number below `masked`, which is as good as −∞."""
    if fill > masked:
        raise build.unsupported(f"fills a parameter with {fill}.", "Fill what is masked with float('-inf').")
    zeros = torch.zeros(keep.shape, dtype=torch.float64, device=keep.device)
    return bias.plus(zeros.masked_fill(~keep, -torch.inf))


def read_chosen(call: Call, masked: float) -> PositionBias | None:
    """torch.where(mask, bias, −∞), or with both exchanged; None where it chooses between others."""
    mask, a, b = call.get(0, "condition"), call.get(1, "input"), call.get(2, "other")
    bias = PositionBias.of(a)
    if bias is None:
        mask, bias, b = (~mask if isinstance(mask, Tensor) else mask), PositionBias.of(b), a
    number = isinstance(b, (int, float)) or (isinstance(b, Tensor) and b.numel() == 1)
    if bias is None or not isinstance(mask, Tensor) or not number:
        return None
    return mask_bias(call.build, bias, mask, float(b), masked)


def looked_up(node: fx.Node, index: Tensor, table: Parameter) -> Parameter | None:
    """The rows of a table for each query and key [T, S, heads], where forward() takes them for one; else None.

    Positions' rows come with an axis for the batch where they are added to tokens; a bias is turned as it stands, to
    [heads, T, S], before it meets any sample.
    """
    turned = [u for u in node.users if u.target in ("permute", torch.permute) and len(_numbers(u.args[1:])) == 3]
    if index.dim() != 2 or not node.users or len(turned) < len(node.users):
        return None
    return table.formed(lambda v: v[index.to(v.device)])


def _numbers(args: Sequence[Any]) -> list[Any]:
    """The numbers of permute's arguments, one by one or in a list."""
    return list(args[0]) if args and isinstance(args[0], (tuple, list)) else list(args)


def score_table(build: Builder, weights: Weights, axes: Axes, order: Sequence[list[Atom]], p: Parameter) -> Table:
    """A parameter that is added to scores along these axes, as one table for each head; `index` is [rest or 1, T, S].

    `order`: their atoms as batch, heads, positions that do not meet, queries, keys.
    """
    entries = p.entries()
    if entries.dim() > len(axes):
        raise build.unsupported(f"adds {p.name} of shape {tuple(entries.shape)} to scores.", "Give it their axes.")
    parts = aligned(entries, axes, [a for group in order for a in group])
    sizes, shape = list(parts.shape), []
    for group in order:
        have = [sizes.pop(0) for _ in group]
        shape.append([1] * len(group) if all(n == 1 for n in have) else [a.size for a in group])
    parts = parts.expand([n for group in shape for n in group]).reshape([prod(group) for group in shape])
    heads, queries, keys = (prod(a.size for a in order[k]) for k in (1, 3, 4))
    if bool((parts == parts[:1]).all()):  # expanded along the batch
        parts = parts[:1]
    if parts.shape[0] != 1 or parts.shape[1] != heads:
        raise build.unsupported(
            f"adds the same numbers of {p.name} to the scores of all heads, or others for each sample. What heads "
            "share does not average out over them: the kernels of two wide networks differ by it.",
            f"Give each head numbers of its own, [{heads}, {queries}, {keys}], or keep them known (a buffer).",
        )
    parts = parts[0].expand(heads, -1, queries, keys).flatten(1)
    first, index = torch.unique(parts[0], return_inverse=True)
    same = all(len(torch.unique(torch.stack([index, other]), dim=1)[0]) == len(first) for other in parts)
    if not same or len(torch.unique(parts)) != heads * len(first):
        raise build.unsupported(
            f"adds numbers of {p.name} that heads share, or that lie otherwise in each.",
            "Give each head a table of its own, looked up alike.",
        )
    variance, rate, law = weights.table(p.name, p.table if p.table is not None else p.value, p.factor, p.layer)
    return Table(index.view(-1, queries, keys), variance, rate, law)


def add_to_parameter(a: object, b: object, weights: tuple[float, float]) -> PositionBias | None:
    """The sum of a parameter and a mask, or of two parameters; None of others."""
    first, second = PositionBias.of(a), PositionBias.of(b)
    if first is None and second is None:
        return None
    parts = [
        v * w if isinstance(v, Tensor) else bias.times(w) if bias is not None else None
        for v, bias, w in ((_tensor(a), first, weights[0]), (_tensor(b), second, weights[1]))
    ]
    if any(v is None for v in parts):
        return None
    one, other = parts
    if isinstance(one, Tensor):
        one, other = other, one
    assert isinstance(one, PositionBias)
    assert other is not None
    return one.plus(other)


def _tensor(value: object) -> object:
    """A number as a tensor; others as they are."""
    return torch.tensor(float(value)) if isinstance(value, (int, float)) else value


def is_random(value: object) -> bool:
    """Whether it is random, and no parameter on its way to scores."""
    return isinstance(value, RANDOM) and not isinstance(value, PositionBias)
