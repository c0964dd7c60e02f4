"""Shapes in types. jaxtyping is used where it is installed (always under pytest); tangency runs without it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

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

Params: TypeAlias = Mapping[str, Tensor]
Inputs: TypeAlias = Tensor | Mapping[str, Any] | tuple[Any, ...] | list[Any]
Outputs: TypeAlias = str | int | Callable[[Any], Tensor] | None

__all__ = ["Float", "Inputs", "Int", "Outputs", "Params", "Tensor"]
