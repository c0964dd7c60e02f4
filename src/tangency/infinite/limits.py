"""Which limit is taken at every layer: `k.limits(x)`. The words are those of the operations (`moments/core.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .._base.results import Result
from .moments.core import EXACT, Taken
from .moments.recursion import Recursion


@dataclass(frozen=True, repr=False)
class LimitRow(Result):
    """One layer: what it is, the limits that are taken there (none where it is exact), and how it is computed."""

    layer: str
    what: str
    limits: tuple[str, ...]
    how: str


@dataclass(frozen=True, repr=False)
class Limits(Result):
    """The limit of a network, layer by layer in the order of reading. Prints as a table with the sentences below it."""

    kernel: str
    rows: tuple[LimitRow, ...]

    def sentences(self) -> tuple[str, ...]:
        """Every limit that is taken, once, in the order of the layers."""
        return tuple(dict.fromkeys(limit for row in self.rows for limit in row.limits))

    def table(self) -> str:
        """A line per layer, with the numbers of its limits, which follow."""
        said = self.sentences()
        cells = [("layer", "what", "limit", "computed")]
        for row in self.rows:
            numbers = ", ".join(str(said.index(limit) + 1) for limit in row.limits)
            cells.append((row.layer, row.what, numbers or "–", row.how))
        widths = [max(len(cell[k]) for cell in cells) for k in range(4)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
        notes = [f"{k}: {sentence}." for k, sentence in enumerate(said, 1)]
        return "\n".join([self.kernel, *lines, *notes, "–: the same at every width."])

    def __str__(self) -> str:
        return self.table()


@dataclass
class _Layer:
    """What one layer's operations say, as they are read."""

    said: list[Taken] = field(default_factory=list)


def recursion_limits(kernel: str, recursion: Recursion) -> Limits:
    """What the operations of a network say, by layer."""
    layers: dict[str, _Layer] = {}
    for node in recursion.nodes:
        layers.setdefault(node.name or "output", _Layer()).said.append(node.op.taken())
    return Limits(kernel, tuple(_row(name, layer.said) for name, layer in layers.items()))


def _row(name: str, said: Sequence[Taken]) -> LimitRow:
    """One layer. What is the same at every width is named only where nothing else is there."""
    telling = [t for t in said if t.limit != EXACT] or said
    limits = dict.fromkeys(t.limit for t in telling if t.limit != EXACT)
    # What is drawn or integrated has an error, which is what one wants to know of the layer.
    how = dict.fromkeys(t.how for t in telling if t.how != "exact") or {"exact": None}
    return LimitRow(name, ", ".join(dict.fromkeys(t.what for t in telling)), tuple(limits), ", ".join(how))
