"""What is inside a prepared batch: a tree of tensors, whatever the kernel."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace

from torch import Tensor

from ..kernels.grouped import Grouped
from ..kernels.kernel import Prepared


def moved(prepared: Prepared, f: Callable[[Tensor], Tensor]) -> Prepared:
    """A prepared batch with every tensor in it replaced."""
    if isinstance(prepared, Tensor):
        return f(prepared)
    if isinstance(prepared, dict):
        return {k: moved(v, f) for k, v in prepared.items()}
    if isinstance(prepared, tuple) and hasattr(prepared, "_fields"):  # a named tuple
        return type(prepared)(*(moved(v, f) for v in prepared))
    if isinstance(prepared, (tuple, list)):
        return type(prepared)(moved(v, f) for v in prepared)
    if is_dataclass(prepared) and not isinstance(prepared, type):
        return replace(prepared, **{k.name: moved(getattr(prepared, k.name), f) for k in fields(prepared) if k.init})
    return prepared


def leaves(prepared: Prepared) -> Iterator[object]:
    """Everything in a prepared batch that holds nothing else, in a fixed order; batches that are yet to be captured."""
    if isinstance(prepared, dict):
        for v in prepared.values():
            yield from leaves(v)
    elif isinstance(prepared, (tuple, list)):
        for v in prepared:
            yield from leaves(v)
    elif is_dataclass(prepared) and not isinstance(prepared, (type, Grouped)):
        for f in fields(prepared):
            yield from leaves(getattr(prepared, f.name, None))
    else:
        yield prepared


def tensors_in(prepared: Prepared) -> list[Tensor]:
    """Every tensor in a prepared batch, in the order in which `moved` meets them."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        """t itself, noted."""
        found.append(t)
        return t

    moved(prepared, note)
    return found


def size_of(prepared: Prepared) -> int:
    """Bytes that a prepared batch holds, or will when its outputs are captured; shared memory is counted once."""
    most: dict[int, int] = {}
    used: dict[int, int] = {}
    later = 0
    for t in leaves(prepared):
        if isinstance(t, Grouped):
            later += t.nbytes
        if not isinstance(t, Tensor):
            continue
        size = t.numel() * t.element_size()
        try:
            place, most_here = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
        except (NotImplementedError, RuntimeError):  # sparse ones have several
            place, most_here = -id(t), size
        most[place] = most_here
        # A view of the caller's own samples holds no more than itself.
        used[place] = used.get(place, 0) + size
    return later + sum(min(most[place], size) for place, size in used.items())
