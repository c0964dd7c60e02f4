"""Whether two operations are one and the same, but for the known tensors that they read."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType

from torch import Tensor, equal

# Fields that hold the slot of a known tensor; and words for messages, and positions, which nodes have themselves.
SLOTS, OTHERS = {"slot", "mask", "bias"}, {"label", "grid"}


def same_but_slots(a: object, b: object) -> dict[int, int] | None:
    """The slots of b by those of a, where both are alike otherwise; None where they are not."""
    slots: dict[int, int] = {}
    return slots if _alike(a, b, slots) else None


def _alike(a: object, b: object, slots: dict[int, int]) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and equal(a, b)
    if is_dataclass(a):
        return all(_same_field(f.name, a, b, slots) for f in fields(a) if f.name not in OTHERS)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_alike(v, w, slots) for v, w in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_alike(a[k], b[k], slots) for k in a)
    if isinstance(a, partial) and isinstance(b, partial):
        return _alike((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), slots)
    if isinstance(a, MethodType) and isinstance(b, MethodType):
        return a.__func__ is b.__func__ and _alike(a.__self__, b.__self__, slots)
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return _same_function(a, b, slots)
    return bool(a == b)


def _same_field(name: str, a: object, b: object, slots: dict[int, int]) -> bool:
    v, w = getattr(a, name), getattr(b, name)
    if name in SLOTS and isinstance(v, int) and isinstance(w, int) and not isinstance(v, bool):
        return slots.setdefault(v, w) == w
    return _alike(v, w, slots)


def _same_function(a: FunctionType, b: FunctionType, slots: dict[int, int]) -> bool:
    """Functions made by the same code of the same things: each reading of a module makes its own."""
    code: CodeType = a.__code__
    if code is not b.__code__ or a.__defaults__ != b.__defaults__:
        return False
    first, second = a.__closure__ or (), b.__closure__ or ()
    return all(_alike(v.cell_contents, w.cell_contents, slots) for v, w in zip(first, second, strict=True))
