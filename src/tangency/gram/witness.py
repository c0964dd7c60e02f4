"""Whether a kernel is still the one that a store was begun with, by its numbers.

No hash of a model sees all that decides what it computes: a constant in forward(), a helper's attribute, a global, a
hook. So a store keeps a few kernel entries and outputs as its kernel gave them, and they are computed again before the
store is gone on with or believed. What can be hashed is kept too; it tells why they differ.
"""

import math
import platform
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations_with_replacement, islice, product

import torch
from torch import Tensor, nn

from .._base.types import Inputs, Spec
from ..engine.network import Network
from ..errors import StoreMismatch, StoreWarning
from ..kernels.kernel import Kernel
from .code import CHANGES, describe_code, rewritten
from .manifest import Manifest, Witness, differences
from .rows import RowMap
from .source import Source, batch

# Samples of each side, and numbers of each pair of samples, of which there are many for several outputs (heuristics).
SAMPLES, NUMBERS = 3, 16
# How far numbers that are computed again, perhaps on another machine, may be from the first ones, relative to the
# largest of them (heuristic: rounding in other orders).
SAME_WITHIN = {"float64": 1e-9, "float32": 3e-5, "tf32": 5e-3, "float16": 5e-3, "float8": 1e-2}


@dataclass(frozen=True)
class Sample:
    """One sample as it was loaded: number `index` of x1 (side 0) or x2 (side 1)."""

    side: int
    index: int
    x: Inputs

    def __str__(self) -> str:
        return f"x{self.side + 1}[{self.index}]"


def some_samples(*sides: Source | None) -> list[Sample]:
    """Of each side that there is, the first sample, the last, and some between."""
    samples = []
    for side, given in enumerate(sides):
        if given is not None:
            numbers = sorted({round(k * (len(given) - 1) / (SAMPLES - 1)) for k in range(SAMPLES)})
            samples += [Sample(side, k, given.take(slice(k, k + 1))) for k in numbers]
    return samples


def witness(kernel: Kernel | RowMap, samples: list[Sample]) -> Witness:
    """Outputs and entries of the kernel at some samples, and what its code and its model's attributes look like."""
    before, whole = code_looks(kernel), kernel
    with torch.no_grad():
        ready = [(s, batch(kernel, s.x, f"x{s.side + 1}", 1)) for s in samples]
        if isinstance(kernel, RowMap):
            # Where there are no columns, earlier versions had one sample: the name keeps their stores comparable.
            entries = {f"k({s}, x2[0])": _numbers(kernel.values(x)) for s, x in ready}
        else:
            kernel = kernel.brief(ready[0][1])
            prepared = [(s, kernel.prepare(x)) for s, x in ready]
            left, right = ([(s, a) for s, a in prepared if s.side == side] for side in (0, 1))
            pairs = product(left, right) if right else combinations_with_replacement(left, 2)
            entries = {f"k({s}, {t})": _numbers(kernel.pair(a, b)) for (s, a), (t, b) in pairs}
        outputs = {f"f({s})": _numbers(out) for s, x in ready if (out := whole.outputs(x)) is not None}
    # What a run itself changes, counters and caches, says nothing of the model.
    after = code_looks(whole)
    lasting = {name: look if after.get(name) == look else CHANGES for name, look in before.items()}
    return {"entries": entries, "outputs": outputs, "code": lasting}


def code_looks(kernel: object) -> dict[str, str]:
    """What the models and functions in a kernel look like; comparable within one version of Python."""
    looks = {"python": platform.python_version()}
    for part in _parts(kernel):
        looks |= describe_code(part)
    return looks


def changed_numbers(was: Witness, now: Witness, spec: Spec) -> dict[str, tuple[object, object]]:
    """The numbers in which two witnesses differ by more than rounding: (then, now)."""
    changed: dict[str, tuple[object, object]] = {}
    for before, here in ((was.get("entries", {}), now["entries"]), (was.get("outputs", {}), now["outputs"])):
        largest = max((abs(v) for values in here.values() for v in values if v is not None), default=0.0)
        bound = tolerance(spec) * largest
        changed |= {k: (before.get(k), v) for k, v in here.items() if not _close(before.get(k), v, bound)}
    return changed


def require_witness(store: str, said: Manifest, now: Witness) -> None:
    """Refuse a store whose kernel gave other numbers, or whose functions were other ones: a few samples do not tell
    what these do to the rest. If only values look different, say so."""
    was = said["witness"]
    looks = recoded(was.get("code", {}), now["code"])
    lines: dict[str, tuple[object, object]] = {f"code of {name}": pair for name, pair in looks.items()}
    if numbers := changed_numbers(was, now, said["kernel"]):
        raise StoreMismatch(store, dict(islice(numbers.items(), 4)) | lines)  # more numbers say no more
    # Other instructions may matter at other samples; other values were seen to be read, and made no difference.
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


def recoded(was: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[object, object]]:
    """What differs in the code and attributes: (then, now)."""
    if was.get("python") != now.get("python"):  # another version compiles the same source to other instructions
        return {}
    return {k: pair for k, pair in differences(was, now).items() if CHANGES not in pair}


def tolerance(spec: Spec) -> float:
    """How far a kernel's numbers may lie apart when they are computed again, relative to the largest."""
    return SAME_WITHIN.get(_precision(spec), SAME_WITHIN["float32"])


def _precision(spec: Mapping[str, object]) -> str:
    """The dtype that a kernel, or the first one inside it, computes in."""
    dtype, of = spec.get("dtype"), spec.get("of")
    if isinstance(dtype, str):
        return dtype
    inner = of if isinstance(of, list) else [of]
    return next((p for k in inner if isinstance(k, Mapping) and (p := _precision(k))), "")


def _parts(thing: object, depth: int = 6) -> Iterator[Network | nn.Module]:
    """Networks and modules among the fields of a kernel."""
    if isinstance(thing, (Network, nn.Module)):
        yield thing
    elif isinstance(thing, (tuple, list)):  # a sum's kernels; no level of its own
        for inner in thing:
            yield from _parts(inner, depth)
    elif depth and is_dataclass(thing) and not isinstance(thing, type):
        for f in fields(thing):
            yield from _parts(getattr(thing, f.name, None), depth - 1)


def _numbers(t: Tensor) -> list[float | None]:
    """Some entries, and the norm of all; None for what is not finite."""
    flat = t.detach().cpu().double().flatten()
    kept = flat[:: max(1, -(-len(flat) // NUMBERS))]
    if len(kept) < len(flat):  # the norm sees the entries that were left out
        kept = torch.cat([kept, torch.linalg.vector_norm(flat)[None]])
    return [v if math.isfinite(v) else None for v in kept.tolist()]  # JSON has no infinity


def _close(was: object, now: list[float | None], bound: float) -> bool:
    """Whether two lists of numbers are the same; what a store says may be anything."""
    if not isinstance(was, list) or len(was) != len(now):
        return False
    if not all(v is None or isinstance(v, (int, float)) for v in was):
        return False
    pairs = zip(was, now, strict=True)
    return all(a is b if a is None or b is None else abs(a - b) <= bound for a, b in pairs)
