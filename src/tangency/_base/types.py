"""Shapes in types. jaxtyping is used where it is installed (always under pytest); tangency runs without it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float, Int
else:
    try:
        from jaxtyping import Float, Int
    except ImportError:  # annotations only: any tensor will do

        class _AnyShape:
            def __class_getitem__(cls, item: tuple[type, str]) -> type:
                return item[0]

        Float = Int = _AnyShape

# What JSON holds; `Spec` is what a kernel says of itself in a manifest.
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Spec: TypeAlias = dict[str, "Json"]
Array: TypeAlias = "Tensor | np.ndarray"
Device: TypeAlias = str | torch.device | None
Memory: TypeAlias = int | str | None  # bytes, or "4GiB"
StorePath: TypeAlias = "str | PathLike[str]"
Trainable: TypeAlias = str | nn.Module | Callable[[str, Tensor], bool] | Iterable[str | nn.Module | nn.Parameter] | None
Params: TypeAlias = Mapping[str, Tensor]
Inputs: TypeAlias = Tensor | Mapping[str, Any] | tuple[Any, ...] | list[Any]
Outputs: TypeAlias = str | int | Callable[[Any], Tensor] | None

__all__ = [
    "Array",
    "Device",
    "Float",
    "Inputs",
    "Int",
    "Json",
    "Memory",
    "Outputs",
    "Params",
    "Spec",
    "StorePath",
    "Tensor",
    "Trainable",
]
