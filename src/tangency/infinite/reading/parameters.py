"""Parameters as values: position embeddings, class tokens, biases that are added by themselves."""

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ..moments.fields import Builder
from ..moments.values import Field
from .calls import Call, Parameter

# How many standard errors the mean of a parameter's numbers may be off zero, and which share of their mean square it
# may have, as it does in trained networks (heuristics: one in 10⁵ goes beyond the first, kernels are off by the other).
SIGMAS, SHARE = 4.5, 0.01


def as_value(call: Call, p: Parameter, shape: tuple[int, ...], channel: int) -> Field:
    """The parameter as a field of this shape, the same for every sample: independent entries of its variance.

    Rows that were taken several times are the same ones. One called bias, with a number for each channel, is a bias of
    variance b_var; others have the variance that they were initialised with.
    """
    rows = _repeated_rows(call.build, p, shape, channel) if p.forms else None
    if rows is None:
        f = call.build.drawn(shape, channel)
    else:
        same = call.build.table(rows.expand(call.build.size, *rows.shape), shape[channel], None)
        f = replace(same, shape=shape, channel=channel)
    bias = p.name.rpartition(".")[2] == "bias" and prod(shape) == shape[channel]
    if not bias or call.weights.w_var == "init":
        _check_mean(call.build, p)
    value = call.weights.bias if bias else call.weights.value
    return call.build.affine(f, f.width, value(p.name, p.value, p.factor))


def _check_mean(build: Builder, p: Parameter) -> None:
    """Refuse numbers whose mean is not zero: the limit takes them for random ones of mean zero."""
    numbers = p.whole_table().detach().double().flatten()
    mean, square = float(numbers.mean()), float(numbers.square().mean())
    if mean**2 > max(SHARE * square, SIGMAS**2 * (square - mean**2) / len(numbers)) and len(numbers) > 1:
        raise build.unsupported(
            f"takes the parameter {p.name} as a value, whose numbers have the mean {mean:.3g}; in the limit it is a "
            "random value of mean zero.",
            "Start it at zeros or at random numbers and add its mean by itself (h + 0.5 + p), or make it a buffer.",
        )


def _repeated_rows(build: Builder, p: Parameter, shape: tuple[int, ...], channel: int) -> Tensor | None:
    """Which positions have the same row of the parameter, by numbers [*grid]; None where all entries are different."""
    entries = p.entries()
    while entries.dim() > len(shape):  # expanded along the batch
        entries = entries[0]
    rows = entries.reshape(shape).movedim(channel, -1).flatten(0, -2)
    if len(rows.unique()) == rows.numel():
        return None
    different, number = rows.unique(dim=0, return_inverse=True)
    if len(different.unique()) < different.numel():
        raise build.unsupported(
            f"takes entries of the parameter {p.name} several times, in another order or beside others.",
            "Take whole rows of it, all channels in their order: p[index].",
        )
    return torch.as_tensor(number).view(*shape[:channel], *shape[channel + 1 :])
