"""One call in a traced forward(), of a module or a function: its arguments, and the plan being built."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..layers.weights import Weights
from ..moments.fields import Builder
from ..moments.values import Field, Joint, Lazy, Normed, Patched, Squared, Statistic, Unsettled

RANDOM = (Field, Lazy, Joint, Patched, Normed, Unsettled, Squared, Statistic)
# forward() may give anything to anything: what a call is given is known only by looking at it.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
TorchFunction: TypeAlias = Callable[..., Any]

# Questions about numbers, whose answers are Python values: rules for random ones refuse them.
QUESTIONS = (
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__", "__format__",
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose",
)  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """A parameter of the module (or a part or multiple of it), used as a value or as weights."""

    value: Tensor
    name: str
    factor: float = 1.0
    table: Tensor | None = None  # the whole parameter, where `value` is some of its entries in another form
    forms: tuple[Callable[[Tensor], Tensor], ...] = ()  # what made `value` of it
    layer: str = ""  # the Embedding that holds it, if one does
    whole: Tensor | None = None  # where it is a slice: all entries along the axes that were sliced, as it was drawn
    reshaped: bool = False  # whether a slice has got another form since, so that its fan-in cannot be told

    def formed(self, form: Callable[[Tensor], Tensor]) -> "Parameter":
        """Some of its entries, or all, in another form: a view, rows by their numbers."""
        changed = replace(self, value=form(self.value), table=self.whole_table(), forms=(*self.forms, form))
        return replace(changed, whole=None, reshaped=self.reshaped or self.whole is not None)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Parameter":
        """With its axes in another order, or new ones of size 1."""
        whole = None if self.whole is None else move(self.whole)
        return replace(self.formed(move), whole=whole, reshaped=self.reshaped)

    def part(self, items: tuple[object, ...]) -> "Parameter":
        """Some of its entries, by x[items]: slices leave the whole as it was, numbers pick a parameter of their own."""
        if any(isinstance(item, (Tensor, list)) for item in items):  # by numbers, not a slice
            return self.formed(lambda v: v[items])  # type: ignore[index]
        kept = tuple(
            item if item is None or item is Ellipsis or isinstance(item, int) else slice(None) for item in items
        )
        before = self.value if self.whole is None else self.whole
        some, whole = self.formed(lambda v: v[items]), before[kept]  # type: ignore[index]
        return replace(some, whole=None if whole.shape == some.value.shape else whole, reshaped=self.reshaped)

    def whole_table(self) -> Tensor:
        """The parameter, of which `value` is all or some."""
        return self.value if self.table is None else self.table

    def form(self) -> object:
        """What tells its entries and their order from others: as a view where it is one, else one by one."""
        table, value = self.whole_table(), self.value
        if value.untyped_storage().data_ptr() == table.untyped_storage().data_ptr():
            return tuple(value.shape), value.stride(), value.storage_offset()
        return tuple(value.shape), tuple(self.entries().flatten().tolist())

    def entries(self) -> Tensor:
        """The number of each entry of `value` among those of the parameter."""
        table = self.whole_table()
        numbers = torch.arange(table.numel(), device=table.device).view(table.shape)
        for form in self.forms:
            numbers = form(numbers)
        return numbers

    def drawn(self, build: Builder) -> Tensor:
        """The tensor whose sizes say the fan-in that it was drawn by: a slice's is that of the whole parameter."""
        if self.reshaped:
            raise build.unsupported(
                f"multiplies by a slice of the parameter {self.name} that was reshaped since, so that the fan-in it "
                "was drawn by cannot be told.",
                "Slice it after it is reshaped, or give the slice a parameter of its own.",
            )
        return self.value if self.whole is None else self.whole


@dataclass(frozen=True)
class JoinedBias:
    """Parameters and known zeros side by side, as the bias of one layer: each is that of some of its rows."""

    parts: tuple[Parameter | Tensor, ...]

    @property
    def sizes(self) -> list[int]:
        """How many rows each part is for."""
        return [len(p.value if isinstance(p, Parameter) else p) for p in self.parts]


# Options that do not change values, or only their rounding.
_HARMLESS = {"inplace", "memory_format", "non_blocking", "copy", "device", "dtype"}


class Keywords:
    """Arguments by name. Those that no rule asked for are known: an option that nobody read must not be passed over."""

    def __init__(self, given: Kwargs | None = None) -> None:
        self.given = dict(given or {})
        self._asked: set[str] = set()

    def get(self, name: str, default: object = None) -> Any:
        """The argument of this name."""
        self._asked.add(name)
        return self.given.get(name, default)

    def first(self) -> Any:
        """The one that was written first: a module's input, where it is given by name."""
        return self.get(next(iter(self.given)))

    def every(self) -> Kwargs:
        """All of them, for a rule that looks at them itself."""
        self._asked |= set(self.given)
        return dict(self.given)

    def missed(self) -> str:
        """The first one that was not asked for, as code; "" if there is none."""
        for name in sorted(set(self.given) - self._asked - _HARMLESS):
            if self.given[name] is not None:
                return f"{name}={self.given[name]!r}"
        kind = self.given.get("dtype")
        integer = isinstance(kind, torch.dtype) and not (kind.is_floating_point or kind.is_complex)
        return f"dtype={kind}" if integer else ""


@dataclass(frozen=True)
class Call:
    """One call in forward(): its arguments, and the plan being built.

    `label` is what messages call it; `name` the module's, by which variances and rates are given ("" has none).
    """

    build: Builder
    weights: Weights
    args: Args
    kwargs: Keywords
    label: str
    name: str = ""

    def get(self, position: int, name: str, default: object = None) -> Any:
        """An argument, by its position or its name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def named(self, *order: str) -> Kwargs:
        """All arguments by name; `order` names those given by position."""
        return dict(zip(order, self.args, strict=False)) | self.kwargs.every()

    def field(self, position: int = 0) -> Field:
        """An argument as a random field, applied if it was lazy."""
        return self.build.settled(self.args[position])

    def form(self, position: int = 0) -> Field:
        """As `field`, but a scale that was just applied still waits: reshaping does not come between it and an
        activation that follows."""
        value = self.args[position]
        return value if isinstance(value, Field) else self.build.settled(value)

    def axes(self, dims: int | tuple[int, ...] | list[int], f: Field) -> tuple[int, ...]:
        """Axes of a tensor with its batch (-1 is the last), as axes of the field's shape."""
        rank = len(f.shape) + 1
        places = tuple(d % rank for d in ((dims,) if isinstance(dims, int) else tuple(dims)))
        if 0 in places:
            raise self.build.unsupported("acts along the batch.", "Samples must not mix: leave axis 0 alone.")
        return tuple(d - 1 for d in places)


Rule = Callable[[Call], object]  # what reads a function of torch
