"""Lazy or rich: whether a network kept the kernel it began with, or learned another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .._base.results import Result

Kind = Literal["lazy", "rich", "in between"]

# Heuristics, chosen by eye on MLPs of 16 to 4096 units and held against other seeds of these
# (benchmarks/studies/lazy_or_rich.py). A change δ moves no eigenvalue by more than δ‖Θ_0‖ (Weyl), so the rates of the
# linearised network are right to a tenth of that. MLPs in the NTK parametrisation stay below it from a width of 64.
LAZY_CHANGE = 0.1
# Half of the kernel is another one, and of the top eigenspace sin² 10° = 3 % lie outside of where it was: a kernel that
# grew by a factor, as under cross-entropy, has only the first.
RICH_CHANGE = 0.5
RICH_ROTATION = 10.0
# Where the loss is above this part of what it was, little was learned, and a kernel at rest says little.
LITTLE = 0.5


@dataclass(frozen=True, repr=False)
class LazyOrRich(Result):
    """Lazy, rich or in between, with the numbers that say so. Heuristic: the thresholds are `lazy` and `rich`.

    >>> found = lazy_or_rich({"change": 0.03, "rotation": 2.0, "loss": 0.1}, {"loss": 2.0})
    >>> print(found.kind, "-", found.why)
    lazy - the kernel changed by 3 % (at most 10 %: it stayed where it was); its top eigenspace turned by 2°
    """

    kind: Kind
    why: str
    numbers: Mapping[str, float]
    lazy: Mapping[str, float]
    rich: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}."


def lazy_or_rich(now: Mapping[str, float], start: Mapping[str, float]) -> LazyOrRich | None:
    """From the last record and the first; None where the kernel's change is not known (not recorded, not finite)."""
    change, rotation, cosine = (_known(now, name) for name in ("change", "rotation", "cosine"))
    if change is None:
        return None
    turned = rotation is None or rotation >= RICH_ROTATION
    kind: Kind = "lazy" if change <= LAZY_CHANGE else "rich" if change >= RICH_CHANGE and turned else "in between"
    digits = ".2g" if change < 0.1 else ".0f"
    size = f"the kernel changed by {100 * change:{digits}} %"
    bounds = {
        "lazy": f"at most {LAZY_CHANGE:.0%}: it stayed where it was",
        "rich": f"at least {RICH_CHANGE:.0%}: it is another one",
        "in between": f"lazy is at most {LAZY_CHANGE:.0%}, rich at least {RICH_CHANGE:.0%}",
    }
    if change >= RICH_CHANGE and not turned:
        bounds[kind] = f"it grew or shrank, but turned by less than {RICH_ROTATION:.0f}°"
    why = [f"{size} ({bounds[kind].replace('%', ' %')})"]
    if rotation is not None:
        why.append(f"its top eigenspace turned by {rotation:.2g}°")
    elif cosine is not None:
        why.append(f"its cosine with the first is {cosine:.3g}; rotation was not recorded")
    before, after = _known(start, "loss"), _known(now, "loss")
    if kind != "rich" and before is not None and after is not None and after > LITTLE * before:
        why.append(f"little was learned yet: the loss went from {before:.3g} to {after:.3g}")
    numbers = {name: now[name] for name in ("change", "rotation", "cosine", "loss") if _known(now, name) is not None}
    lazy, rich = {"change": LAZY_CHANGE}, {"change": RICH_CHANGE, "rotation": RICH_ROTATION}
    return LazyOrRich(kind, "; ".join(why), numbers, lazy, rich)


def _known(values: Mapping[str, float], name: str) -> float | None:
    """A number that was recorded and is one."""
    value = values.get(name)
    return value if value is not None and value == value else None
