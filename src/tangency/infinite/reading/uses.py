"""Who uses which parameters, and how: weights that are used again must be used in the same way."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..moments.fields import Builder, Claim


def use_of(module: nn.Module) -> object:
    """What two calls have in common that use the same weights in the same way: the kind of layer, and all it holds."""
    held = tuple(id(p) for p in module.parameters())
    return (type(module), held) if held else None


def claim(
    build: Builder, parameters: Iterable[Tensor], use: object, name: str, entries: Callable[[], Tensor] | None = None
) -> None:
    """Note the use of parameters; in two different ways, what they give has nothing known in common."""
    for p in parameters:
        claims = build.called.setdefault(_place(p), [])
        new = Claim(name, use, p, entries)
        for before in claims:
            if before.use != use and not _disjoint(before, new):
                raise build.unsupported(
                    f"shares its weights with {before.name}, which uses them otherwise: with another bias, along other "
                    "axes, or as a table (tied input and output embeddings, one the other transposed), of which the "
                    "limit is not known here.",
                    "Use them in the same way (call one module twice), or give each use its own weights.",
                )
        if all(before.use != use for before in claims):
            claims.append(new)


def _disjoint(a: Claim, b: Claim) -> bool:
    """Whether two uses of a parameter are of different numbers of it: slices of one matrix."""
    if a.entries is None or b.entries is None:
        return False
    return not bool(torch.isin(a.entries().flatten(), b.entries().flatten()).any())


@contextmanager
def using(build: Builder, use: object) -> Iterator[None]:
    """Weights that are made meanwhile are those of this use, by their order."""
    was = build.using, build.numbered
    build.using, build.numbered = use, 0
    try:
        yield
    finally:
        build.using, build.numbered = was


def _place(p: Tensor) -> object:
    """Where a parameter's numbers lie: two in one place are one."""
    if isinstance(p, nn.UninitializedParameter) or not p.numel() or p.is_meta:
        return id(p)
    try:
        return p.device, p.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return id(p)
