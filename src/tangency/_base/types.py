"""Shapes in types. jaxtyping is used where it is installed (always under pytest); tangency runs without it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

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
# The key of a spec under which stand words for people, which decide no number: stores do not compare them.
WORDS = "says"
Array: TypeAlias = Tensor | np.ndarray
Device: TypeAlias = str | torch.device | None
Memory: TypeAlias = int | str | None  # bytes, or "4GiB"
FilePath: TypeAlias = str | PathLike[str]
# What `store=` takes: a folder, a URL that zarr knows, or a store of zarr's (a dict is one in memory).
if TYPE_CHECKING:
    from zarr.abc.store import Store as _ZarrStore
    from zarr.storage import StorePath as _ZarrPath

    StorePlace: TypeAlias = FilePath | dict[str, Any] | _ZarrStore | _ZarrPath
else:  # zarr need not be installed; `gram.shelf` says what is wrong with what is given
    StorePlace = object
StorePath: TypeAlias = FilePath  # a folder, or a URL that zarr knows
# Which parameters count: a name, a module, a predicate (name, parameter) -> bool, or several of these; None: those that
# require gradients.
Selection: TypeAlias = str | nn.Module | Callable[[str, Tensor], bool]
Trainable: TypeAlias = Selection | Iterable[Selection] | None
Params: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class FeatureBatch:
    """Features of n samples, which a kernel of features takes in place of the samples: [n, k] or [n, c, k]."""

    value: Tensor
    origin: str  # what made them, as JSON: features can be multiplied only with features of the same origin

    def __repr__(self) -> str:
        return f"FeatureBatch({list(self.value.shape)})"


T = TypeVar("T")
Answer = TypeVar("Answer", covariant=True)


@runtime_checkable
class Pending(Protocol[Answer]):
    """What an executor gives for a task: an answer to come, such as a `concurrent.futures.Future`."""

    def result(self) -> Answer:
        """The answer, waited for; raises what the task raised."""


@runtime_checkable
class Executor(Protocol):
    """Whoever computes tasks elsewhere: `tg.Workers`, `tg.RayExecutor`, a `concurrent.futures.ProcessPoolExecutor`."""

    def submit(self, f: Callable[..., T], /, *args: Any) -> Pending[T]:
        """Begin f(*args)."""


# What a model takes, as users give it; `tree.tensors` makes tensors of the arrays in it.
Inputs: TypeAlias = Tensor | np.ndarray | Mapping[str, Any] | tuple[Any, ...] | list[Any] | FeatureBatch
# Targets and labels as users give them; `tree.numbers` makes a tensor of them.
Numbers: TypeAlias = Array | Sequence[float] | Sequence[Sequence[float]]
PickedOutputs: TypeAlias = str | int | Callable[[Any], Tensor] | None

__all__ = [
    "WORDS",
    "Array",
    "Device",
    "Executor",
    "FeatureBatch",
    "FilePath",
    "Float",
    "Inputs",
    "Int",
    "Json",
    "Memory",
    "Numbers",
    "Params",
    "Pending",
    "PickedOutputs",
    "Spec",
    "StorePath",
    "StorePlace",
    "T",
    "Tensor",
    "Trainable",
]
