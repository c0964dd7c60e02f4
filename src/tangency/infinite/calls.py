"""One call in a traced forward(): its arguments, and the plan being built."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .fields import Builder, Field, Joint, Lazy, Normed
from .weights import Weights

RANDOM = (Field, Lazy, Joint, Normed)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the module (or a part or multiple of it), used as a value or as weights."""

    value: Tensor
    name: str
    factor: float = 1.0


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
