"""Whether a kernel is still the one that a store was begun with, by its numbers.

No hash of a model sees all that decides what it computes: a constant in forward(), a helper's attribute, a global, a
hook. So a store keeps a few kernel entries and outputs as its kernel gave them, and they are computed again before the
store is gone on with or believed. What can be hashed is kept too; it tells why they differ.
"""

import platform
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations_with_replacement, islice, product
from typing import Any

import torch
from torch import Tensor, nn

from .._base.types import Inputs
from ..engine.network import Network
from ..errors import StoreMismatch, StoreWarning
from ..kernels.kernel import Kernel
from .code import CHANGES, described, lasting, rewritten
from .manifest import differences
from .source import batch

# Samples of each side, and numbers of each pair of samples, of which there are many for several outputs (heuristics).
SAMPLES, NUMBERS = 3, 16
# How far numbers that are computed again, perhaps on another machine, may be from the first ones, relative to the
# largest of them (heuristic: rounding in other orders).
CLOSE = {"float64": 1e-9, "float32": 3e-5, "tf32": 5e-3, "float16": 5e-3}


@dataclass(frozen=True)
class Sample:
    """One sample as it was loaded: number `index` of x1 (side 0) or x2 (side 1)."""

    side: int
    index: int
    x: Inputs

    def __str__(self) -> str:
        return f"x{self.side + 1}[{self.index}]"


def positions(n: int) -> list[int]:
    """The first, the last, and some between."""
    return sorted({round(k * (n - 1) / (SAMPLES - 1)) for k in range(SAMPLES)})


def witness(kernel: Kernel, samples: list[Sample]) -> dict[str, Any]:
    """Outputs and entries of the kernel at some samples, and what its code and its model's attributes look like."""
    looks = code(kernel)
    with torch.no_grad():
        ready = [(s, batch(kernel, s.x, f"x{s.side + 1}", 1)) for s in samples]
        made = [(s, kernel.prepare(x)) for s, x in ready]
        left, right = ([(s, a) for s, a in made if s.side == side] for side in (0, 1))
        pairs = product(left, right) if right else combinations_with_replacement(left, 2)
        entries = {f"k({s}, {t})": _numbers(kernel.pair(a, b)) for (s, a), (t, b) in pairs}
        outputs = {f"f({s})": _numbers(out) for s, x in ready if (out := kernel.outputs(x)) is not None}
    return {"entries": entries, "outputs": outputs, "code": lasting(looks, code(kernel))}


def code(kernel: Kernel) -> dict[str, str]:
    """What the models and functions in a kernel look like; comparable within one version of Python."""
    found = {k: v for thing in _parts(kernel) for k, v in described(thing).items()}
    return {"python": platform.python_version(), **found}


def changed(was: Mapping[str, Any], now: Mapping[str, Any], precision: str) -> dict[str, tuple[Any, Any]]:
    """The numbers in which two witnesses differ by more than rounding: (then, now)."""
    found: dict[str, tuple[Any, Any]] = {}
    for part in ("entries", "outputs"):
        before, here = was.get(part, {}), now[part]
        largest = max((abs(v) for values in here.values() for v in values if v is not None), default=0.0)
        for name in here:
            if not _close(before.get(name), here[name], CLOSE.get(precision, CLOSE["float32"]) * largest):
                found[name] = (before.get(name), here[name])
    return found


def require_witness(store: str, said: Mapping[str, Any], now: Mapping[str, Any], precision: str) -> None:
    """Refuse a store whose kernel gave other numbers, or whose functions were other ones: a few samples do not tell
    what these do to the rest. If only values look different, say so."""
    was = said["witness"]
    looks = recoded(was.get("code", {}), now["code"])
    lines = {f"code of {name}": pair for name, pair in looks.items()}
    if numbers := changed(was, now, precision):
        raise StoreMismatch(store, dict(islice(numbers.items(), 4)) | lines)  # more numbers say no more
    if any(rewritten(str(then), str(here)) for then, here in looks.values()):
        raise StoreMismatch(store, lines | {"numbers at the samples looked at": ("the same", "the same")})
    if looks:
        first = "; ".join(f"{name}: {then} → {here}" for name, (then, here) in list(looks.items())[:3])
        warnings.warn(
            f"{store} was begun with a model whose attributes or globals look different ({first}"
            f"{'; …' if len(looks) > 3 else ''}); at the samples that were looked at, its outputs and kernel are the "
            "same. If others may differ, give another store=.",
            StoreWarning,
            stacklevel=6,
        )


def recoded(was: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What differs in the code and attributes: (then, now)."""
    if was.get("python") != now.get("python"):
        return {}
    return {k: pair for k, pair in differences(was, now).items() if CHANGES not in pair}


def precision(spec: Mapping[str, Any]) -> str:
    """The dtype that a kernel, or the first one inside it, computes in."""
    found = spec.get("dtype")
    if isinstance(found, str):
        return found
    of = spec.get("of")
    inner = of if isinstance(of, list) else [of]
    return next((p for k in inner if isinstance(k, Mapping) and (p := precision(k))), "")


def _parts(thing: Any, depth: int = 6) -> Iterator[Any]:
    """Networks and modules among the fields of a kernel."""
    if isinstance(thing, (Network, nn.Module)):
        yield thing
    elif isinstance(thing, (tuple, list)):
        for inner in thing:
            yield from _parts(inner, depth)
    elif depth and is_dataclass(thing) and not isinstance(thing, type):
        for f in fields(thing):
            yield from _parts(getattr(thing, f.name, None), depth - 1)


def _numbers(t: Tensor) -> list[float | None]:
    """Some entries, and the norm of all; None for what is not finite."""
    flat = t.detach().cpu().double().flatten()
    some = flat[:: max(1, -(-len(flat) // NUMBERS))]
    both = torch.cat([some, torch.linalg.vector_norm(flat)[None]]) if len(some) < len(flat) else some
    return [v if v == v and abs(v) != float("inf") else None for v in both.tolist()]


def _close(was: Any, now: list[float | None], bound: float) -> bool:
    if not isinstance(was, list) or len(was) != len(now):
        return False
    if not all(v is None or isinstance(v, (int, float)) for v in was):
        return False
    pairs = zip(was, now, strict=True)
    return all(a is b if a is None or b is None else abs(a - b) <= bound for a, b in pairs)
