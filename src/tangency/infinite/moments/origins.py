"""What a value is as a function of Gaussian fields, where it is one: what follows elementwise is applied to that."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from .fields import Builder
from .positions import Permute, Regrid, Take
from .values import Field, Joint, Lazy, Patched, Value, laid
from .windows import Windows

Origin = tuple[tuple[Field, ...], Callable[..., Tensor]]
Function = Lazy | Joint | Patched | Field  # a field: Gaussian, with a scale that still waits


def gaussian_origin(build: Builder, value: Value) -> Origin | None:
    """The Gaussian fields that a value is an elementwise function of, and that function; None if it is none."""
    memory = build.memory
    if isinstance(value, Field) and not value.gaussian:
        known = function_of(build, value)
        return None if known is None else gaussian_origin(build, known)
    if isinstance(value, Field):
        before, factor = memory.multiples.get(value.node, (value, 1.0))
        return (before,), _itself if factor == 1 else lambda x: factor * x
    if isinstance(value, Lazy):
        fn, scale = value.fn, value.scale
        before, factor = memory.multiples.get(value.of.node, (value.of, 1.0))
        return (before,), lambda x: scale * fn(factor * x)
    return (value.of, value.fn) if isinstance(value, Joint) else None


def function_of(build: Builder, f: Field) -> Function | None:
    """What a field is as a function of Gaussian ones, along its own axes, be it from before its positions moved."""
    memory = build.memory
    known = memory.functions.get(f.node) or memory.lazies.get(f.node) or _moved(build, f)
    if known is None or (known.shape, known.channel) == (f.shape, f.channel):
        return known
    # The channels alone have moved since: positions are in the same order, or it would be another node.
    found = laid(known, f.shape, f.channel)
    assert isinstance(found, Function)
    return found


def _moved(build: Builder, f: Field) -> Function | None:
    """The function that its positions had before the last operation, if that only moved them."""
    memory, op, before = build.memory, build.nodes[f.node].op, build.memory.before.get(f.node)
    if before is None or not isinstance(op, (Permute, Regrid, Take)):
        return None
    inner = function_of(build, before)
    if inner is None:
        return None
    if isinstance(inner, Patched):
        order = op.apply(torch.arange(prod(before.grid)).view(before.grid), before.grid, False).flatten().tolist()
        at = tuple(Windows(f.grid, tuple(windows.index[k] for k in order)) for windows in inner.at)
        memory.functions[f.node] = patches = replace(
            inner,
            at=at,
            shape=f.shape,
            channel=f.channel,
            core=None,
            known=None,  # whose moments are in the old order
        )
        return patches
    of = inner.of if isinstance(inner, Joint) else (inner if isinstance(inner, Field) else inner.of,)
    moved = tuple(build.apply(op, g, shape=f.shape, channel=f.channel) for g in of)
    if isinstance(inner, Lazy):
        memory.lazies[f.node] = lazy = replace(inner, of=moved[0])
        return lazy
    memory.functions[f.node] = same = replace(inner, of=moved) if isinstance(inner, Joint) else moved[0]
    return same


def _itself(x: Tensor) -> Tensor:
    return x
