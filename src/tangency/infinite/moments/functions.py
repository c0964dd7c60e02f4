"""Elementwise functions of values, and multiples: they compose, and are applied when something else follows."""

from dataclasses import replace

from ..activations.dual import Dual
from ..activations.duals import Identity
from .channels import each_part, find_parts
from .fields import Builder
from .ops import Rescale
from .origins import function_of
from .values import Field, Function, Joint, Lazy, Normed, Patched, Random, Seen, Squared, Statistic, Unsettled


def apply_function(build: Builder, value: Random, fn: Function, dual: Dual | None, label: str) -> Random:
    """φ of a value, `fn` itself and its dual where it is known; of an elementwise function, their composition."""
    if isinstance(dual, Identity):
        return value
    return build.of_this_layer(_function_of(build, value, fn, dual, label))


def _function_of(build: Builder, value: Random, fn: Function, dual: Dual | None, label: str) -> Random:
    if isinstance(value, Seen) and value.turn is None:  # each number by itself, whatever the axes
        return replace(value, of=apply_function(build, value.of, fn, dual, label))
    if isinstance(value, Unsettled):
        raise build.unsupported(*value.why())
    if isinstance(value, Normed):
        return build.batch_normed(value, dual, fn)
    if isinstance(value, Statistic):
        return value.then(fn)
    if isinstance(value, Squared):
        value = build.settled(value)
    if isinstance(value, Lazy):
        # The parameter's derivative passes through what follows, for which there is no rule.
        if value.rate:
            raise build.unsupported("follows an activation with trained parameters.", "Put a layer between them.")
        inner, scale = value.fn, value.scale
        return Lazy(value.of, None, lambda x: fn(scale * inner(x)), label=f"{label}∘{value.label}")
    if isinstance(value, Patched):
        return value.then(fn, f"{label}∘{value.label}")
    if isinstance(value, Joint):
        several = value.fn
        return replace(value, fn=lambda *x: fn(several(*x)), label=f"{label}∘{value.label}")
    joined = each_part(build, value, lambda part: apply_function(build, part, fn, dual, label))
    if joined is not None:
        return replace(joined, shape=value.shape, channel=value.channel)
    known = function_of(build, value)
    if known is not None:
        return apply_function(build, known, fn, dual, label)
    if not value.gaussian and find_parts(build, value):
        return apply_function(build, value, fn, dual, label)
    if not value.gaussian:
        raise build.unsupported(
            "is applied to values that are not Gaussian in the limit (a sum or product with an activation's "
            "output, a flattened or dropped-out layer).",
            "Put a Linear or Conv layer before it, or use the pre-activation form of the block.",
        )
    return Lazy(value, dual, fn, label=label)


def scale_by(build: Builder, value: Random, factor: float) -> Random:
    """A multiple. That of a Gaussian field stays a function of it, for what is joined with it later."""
    if isinstance(value, Seen):
        return replace(value, of=scale_by(build, value.of, factor))
    if isinstance(value, Statistic):
        return value.then(lambda v: factor * v)
    if isinstance(value, Patched):
        return value.then(lambda y: factor * y, value.label)
    if isinstance(value, Joint):
        fn = value.fn
        return replace(value, fn=lambda *x: factor * fn(*x))
    if isinstance(value, Lazy):
        return replace(value, scale=value.scale * factor)
    f = value if isinstance(value, Field) else build.settled(value)  # a scale that was just applied still waits
    multiple: Field = build.apply(Rescale(factor), f)
    if f.gaussian:
        # A multiple of a multiple is one of the first field.
        before, already = build.memory.multiples.get(f.node, (f, 1.0))
        build.memory.multiples[multiple.node] = (before, already * factor)
    law = f.doubt
    if law is not None and law.exact is not None and law.node == f.node:
        exact = replace(law.exact, factor=law.exact.factor * factor)
        multiple = replace(multiple, doubt=replace(law, exact=exact, node=multiple.node))
    return multiple
