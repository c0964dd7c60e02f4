"""What torch functions do with values: which ones only look at a shape, let data decide, or write to their argument."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def _named(*names: str) -> frozenset[Any]:
    """The functions of torch and the methods of tensors with these names."""
    return frozenset(f for name in names for space in (torch, Tensor) if (f := getattr(space, name, None)) is not None)


@cache
def valueless() -> frozenset[Any]:
    """Functions whose result has nothing of their argument but its shape and type."""
    return _named(
        "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
        "new_full", "new_empty", "new_empty_strided", "new_tensor",
    )  # fmt: skip


@cache
def shape_only() -> frozenset[Any]:
    """Functions that take nothing of their second argument but its shape and type."""
    return _named("expand_as", "view_as", "reshape_as", "type_as")


@cache
def escapes() -> frozenset[Any]:
    """Functions that make Python values of tensors, by which a model may choose its way."""
    return _named(
        "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__",
        "__contains__", "equal", "allclose", "is_nonzero",
    )  # fmt: skip


# Functions that move rows by an index, and functions that put rows into an order of their values.
_INDEXING = _named(
    "__getitem__", "__setitem__", "index_select", "gather", "masked_select", "take", "take_along_dim", "index_put",
    "index_put_", "index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_", "scatter",
    "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "masked_scatter",
    "masked_scatter_", "repeat_interleave",
)  # fmt: skip
_ORDERING = _named(
    "sort", "argsort", "msort", "topk", "kthvalue", "nonzero", "argwhere", "unique", "unique_consecutive", "roll",
)  # fmt: skip


def routes(func: Any, data_in_index: bool) -> bool:
    """Whether data decide where the rows of this function's result come from, or whether it is used at all."""
    return func in _ORDERING or (func in _INDEXING and data_in_index)


@cache
def in_place(func: Any) -> bool:
    """Whether the function writes to its first argument."""
    name = getattr(func, "__name__", "")
    if name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"):
        return True
    return name.endswith("_") and not name.startswith("_") and name not in ("requires_grad_", "retain_grad_")
