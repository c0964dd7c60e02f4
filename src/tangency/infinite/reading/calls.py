"""One call in a traced forward(): its arguments, and the plan being built."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layers.weights import Weights
from ..moments.fields import Builder, Field, Joint, Lazy, Normed

RANDOM = (Field, Lazy, Joint, Normed)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the module (or a part or multiple of it), used as a value or as weights."""

    value: Tensor
    name: str
    factor: float = 1.0


# Options that do not change values, or only their rounding.
_HARMLESS = {"inplace", "memory_format", "non_blocking", "copy", "device", "dtype"}


class Options(dict[str, Any]):
    """Arguments by name; those that no rule asked for are known."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def items(self) -> Any:
        self.asked |= set(self)
        return super().items()

    def __ror__(self, other: Any) -> Any:
        self.asked |= set(self)
        return {**other, **self}

    def values(self) -> Any:
        self.asked |= set(self)
        return super().values()

    def missed(self) -> str:
        """The first one that was not asked for, as code."""
        for name in sorted(set(self) - self.asked - _HARMLESS):
            if super().__getitem__(name) is not None:
                return f"{name}={super().__getitem__(name)!r}"
        kind = super().get("dtype")
        integer = isinstance(kind, torch.dtype) and not (kind.is_floating_point or kind.is_complex)
        return f"dtype={kind}" if integer else ""


@dataclass(frozen=True)
class Call:
    """One call in forward(): its arguments, and the plan being built."""

    build: Builder
    weights: Weights
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str

    def get(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def field(self, position: int = 0) -> Field:
        return self.build.settled(self.args[position])

    def dims(self, given: Any, f: Field) -> tuple[int, ...]:
        """Axes of a tensor with its batch, as axes of the field's shape."""
        every = len(f.shape) + 1
        found = tuple(d % every for d in ((given,) if isinstance(given, int) else tuple(given)))
        if 0 in found:
            raise self.build.unsupported("acts along the batch.", "Samples must not mix: leave axis 0 alone.")
        return tuple(d - 1 for d in found)
