"""Tables of torch functions by what they do with values, as the recorder and the readers need to know it."""

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Function = Callable[..., object]


@cache
def signature(function: Function) -> inspect.Signature:
    """What arguments a function takes; asked once, since asking takes longer than many a layer."""
    return inspect.signature(function)


def _named(*names: str) -> frozenset[Function]:
    """The functions of torch and the methods of tensors with these names, as far as this torch has them."""
    return frozenset(f for name in names for space in (torch, Tensor) if (f := getattr(space, name, None)) is not None)


# The result has nothing of the argument but its shape and type.
VALUELESS = _named(
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "new_empty_strided", "new_tensor",
)  # fmt: skip
# Nothing is taken of the second argument but its shape and type.
SHAPE_ONLY = _named("expand_as", "view_as", "reshape_as", "type_as")
# Python values are made of tensors, by which a model may choose its way.
ESCAPES = _named(
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__",
    "__contains__", "equal", "allclose", "is_nonzero",
)  # fmt: skip
# Rows are moved by an index, which may depend on data.
INDEXING = _named(
    "__getitem__", "__setitem__", "index_select", "gather", "masked_select", "take", "take_along_dim", "index_put",
    "index_put_", "index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_", "scatter",
    "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "masked_scatter",
    "masked_scatter_", "repeat_interleave",
)  # fmt: skip
# Rows are put into an order of their values, or counted by them.
ORDERING = _named(
    "sort", "argsort", "msort", "topk", "kthvalue", "nonzero", "argwhere", "unique", "unique_consecutive", "roll",
)  # fmt: skip
# Entry by entry, after the arguments were broadcast against each other: beyond sums and products.
ELEMENTWISE = _named(
    "add", "add_", "__add__", "__radd__", "mul", "mul_", "sub", "sub_", "subtract", "rsub", "__sub__", "__rsub__",
    "div", "div_", "divide", "true_divide", "__truediv__", "__rtruediv__", "__div__", "pow", "pow_", "__pow__",
    "__rpow__", "float_power", "where", "maximum", "minimum", "fmax", "fmin", "lerp", "lerp_", "addcmul", "addcdiv",
    "atan2", "hypot", "clamp", "clamp_min", "clamp_max", "clip", "copysign", "xlogy", "logaddexp", "ldexp",
)  # fmt: skip
# k·x for a number k, or x/k: the power of k.
SCALING = {
    f: power
    for power, names in ((1, ("mul", "__mul__", "__rmul__", "multiply")), (-1, ("div", "__truediv__", "true_divide")))
    for f in _named(*names)
}
# The same values, perhaps in another type or place.
CASTS = _named("to", "float", "double", "half", "type", "type_as", "contiguous", "clone")
