"""More spellings of the same moves: repeat and tile, picking by known tensors, windows by unfold, another form."""

from dataclasses import replace

import torch
from torch import Tensor

from ..moments.values import Random
from .calls import RANDOM, Call, Keywords, Parameter, Rule, TorchFunction
from .joining import read_cat
from .tensors import entries_along, full_shape, read_parts, read_permute, read_reshape, read_transpose


def _as(call: Call, rule: Rule, *args: object) -> object:
    """What another rule gives for these arguments."""
    return rule(replace(call, args=args, kwargs=Keywords()))


def read_like(call: Call) -> object:
    """reshape_as, view_as."""
    other = call.get(1, "other")
    sizes = tuple(other.shape) if isinstance(other, Tensor) else full_shape(call.build, other)
    return _as(call, read_reshape, call.args[0], sizes)


def read_repeat(call: Call) -> object:
    """repeat and tile: a parameter for each sample of the batch; positions several times, one run after the other."""
    given = call.args[1:] or (call.kwargs.get("repeats") or call.kwargs.get("dims") or call.kwargs.get("sizes"),)
    times = tuple(given[0]) if isinstance(given[0], (tuple, list, torch.Size)) else tuple(given)
    value, build = call.args[0], call.build
    if isinstance(value, Parameter):
        alone = value.value.dim() < len(times) or len(value.value) == 1
        if alone and times[0] == build.size and all(n == 1 for n in times[1:]):
            return value
        raise build.unsupported(f"repeats the parameter {value.name}.", "Expand it along the batch alone.")
    sizes = full_shape(build, value)
    times = (1,) * (len(sizes) - len(times)) + times
    if len(times) > len(sizes):
        raise build.unsupported("repeats values along a new axis.", "Make the axis by unsqueeze, then expand it.")
    for dim, count in enumerate(times):
        if count != 1:
            value = entries_along(call, value, dim, list(range(sizes[dim])) * count)
    return value


def read_gather(call: Call) -> Random:
    """gather and take_along_dim by known numbers that are the same for all samples, channels and other positions."""
    value, build = call.args[0], call.build
    by_gather = call.label == "gather"
    dim = call.get(1, "dim") if by_gather else call.get(2, "dim")
    index = call.get(2, "index") if by_gather else call.get(1, "indices")
    rank = len(full_shape(build, value))
    if not isinstance(index, Tensor) or dim is None or index.dim() != rank:
        raise build.unsupported("picks by numbers that are not known, or without an axis.", "Give them, and dim=….")
    row = index.movedim(dim, -1).flatten(0, -2)
    others = [n for k, n in enumerate(full_shape(build, value)) if k != dim % rank]
    have = [n for k, n in enumerate(index.shape) if k != dim % rank]
    if not bool((row == row[0]).all()) or any(n not in (m, 1) for n, m in zip(have, others, strict=True)):
        raise build.unsupported(
            "picks other positions for other samples or channels.", "Pick the same for all: index_select, x[:, [2, 0]]."
        )
    return entries_along(call, value, dim, [int(k) for k in row[0]])


def read_windows(call: Call) -> object:
    """x.unfold(dim, size, step): windows along an axis of positions, their entries on a new last axis."""
    value, build = call.args[0], call.build
    sizes = list(full_shape(build, value))
    dim, size, step = (int(call.get(k + 1, name)) for k, name in enumerate(("dimension", "size", "step")))
    dim %= len(sizes)
    count = (sizes[dim] - size) // step + 1
    entries = entries_along(call, value, dim, [w * step + k for w in range(count) for k in range(size)])
    split = _as(call, read_reshape, entries, (*sizes[:dim], count, size, *sizes[dim + 1 :]))
    rest = [k for k in range(len(sizes) + 1) if k != dim + 1]
    return _as(call, read_permute, split, (*rest, dim + 1))


def read_rot90(call: Call) -> object:
    """Quarter turns of two axes of positions."""
    value: object = call.args[0]
    a, b = call.get(2, "dims", (0, 1))
    for _ in range(int(call.get(1, "k", 1)) % 4):
        value = _as(call, read_transpose, value, a, b)
        assert isinstance(value, RANDOM)
        value = entries_along(call, value, a, range(full_shape(call.build, value)[a])[::-1])
    return value


def read_tensor_split(call: Call) -> tuple[Random | Parameter, ...]:
    """Parts by their number, the first ones longer, or by where they end."""
    value, by, dim = call.args[0], call.args[1], call.get(2, "dim", 0)
    total = full_shape(call.build, value)[dim]
    sizes = [len(part) for part in torch.tensor_split(torch.arange(total), by)]
    return read_parts(call, sizes, dim)


def read_hstack(call: Call) -> object:
    """torch.hstack: along the axis after the batch."""
    return _as(call, read_cat, call.get(0, "tensors"), 1)


METHODS: dict[str, Rule] = {
    "reshape_as": read_like, "view_as": read_like, "repeat": read_repeat, "tile": read_repeat, "gather": read_gather,
    "take_along_dim": read_gather, "unfold": read_windows, "rot90": read_rot90, "tensor_split": read_tensor_split,
}  # fmt: skip
FUNCTIONS: dict[TorchFunction, Rule] = {
    torch.tile: read_repeat, torch.gather: read_gather, torch.take_along_dim: read_gather, torch.rot90: read_rot90,
    torch.tensor_split: read_tensor_split, torch.hstack: read_hstack,
}  # fmt: skip
