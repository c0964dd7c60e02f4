"""What a `Monitor` recorded of a training: by step, in tables, pictures and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .._base.results import Result, brief, text_table
from .._base.types import FilePath, Float, Json
from ..errors import InputError
from . import runlog
from .lazy_or_rich import LazyOrRich, lazy_or_rich
from .quantities import QUANTITIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REGIME = ("change", "cosine", "velocity", "moved")


@dataclass(frozen=True, eq=False, repr=False)
class Regime(Result):
    """How far the kernel went from where it began, by step."""

    steps: Float[Tensor, " t"]
    change: Float[Tensor, " t"]  # ‖Θ_t − Θ_0‖ / ‖Θ_0‖, Frobenius
    cosine: Float[Tensor, " t"]  # ⟨Θ_t, Θ_0⟩ / (‖Θ_t‖ ‖Θ_0‖)
    velocity: Float[Tensor, " t"]  # (1 − cosine of Θ_t with the one before) per step; 0 at the start
    moved: Float[Tensor, " t"]  # ‖θ_t − θ_0‖ of the parameters that count

    def table(self) -> str:
        """A line for each step."""
        columns = (self.steps, self.change, self.cosine, self.velocity, self.moved)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return text_table(["step", "change", "cosine", "velocity", "moved"], rows)

    def plot(self) -> "Figure":
        """Change, cosine and velocity over the steps; `plots.draw_regime` draws several runs together."""
        from ..plots import draw_regime

        return draw_regime(self)


@dataclass(frozen=True, eq=False, repr=False)
class Evolution(Result):
    """What was recorded of a training, by step: `monitor.history()`, or of a file, `Evolution.load("run.jsonl")`.

    `values` has a tensor for each quantity, [t] or, of eigenvalues, [t, k]; `found["change"]` is one of them. What was
    not finite is NaN.

    >>> import tangency as tg
    >>> net, x = tg.models.mlp([3, 8, 1]), torch.randn(20, 3)
    >>> monitor = tg.dynamics.Monitor(tg.trace_ntk(net), x, record=["change", "rank"])
    >>> monitor(0), monitor(10)
    (None, None)
    >>> found = monitor.history()
    >>> found["change"].tolist(), found.verdict().kind
    ([0.0, 0.0], 'lazy')
    """

    steps: Float[Tensor, " t"]
    values: Mapping[str, Tensor]
    seconds: Float[Tensor, " t"]  # what each record took
    skipped: int  # calls at which nothing was recorded, to hold the share or the steps that were asked for
    ended: bool  # whether the run said so: else it goes on, or was killed
    about: Mapping[str, Json] = field(repr=False)  # the log's first line
    notes: tuple[str, ...] = ()

    UNITS: ClassVar[Mapping[str, str]] = {"seconds": "s", "rotation": "degrees", "angle": "degrees"}

    @staticmethod
    def of(lines: runlog.Recorded, notes: Sequence[str] = (), skipped: int = 0) -> "Evolution":
        """From the lines of a log, of which at least one is a record; `skipped`: calls that no line counts yet."""
        if not lines.records:
            raise InputError("nothing was watched yet; call the monitor at the start and as training goes on.")
        names = dict.fromkeys(name for line in lines.records for name in _values(line))
        return Evolution(
            _column([line["step"] for line in lines.records]),
            {name: _column([_values(line).get(name) for line in lines.records]) for name in names},
            _column([line.get("seconds") for line in lines.records]),
            sum(n for line in _counted(lines) if isinstance(n := line.get("skipped", 0), int))
            + (skipped if lines.ended is None else 0),
            lines.ended is not None,
            lines.head,
            (*notes, *_notes(lines)),
        )

    @staticmethod
    def load(path: FilePath) -> "Evolution":
        """What the log of a monitor holds so far, of a run that goes on, too."""
        lines = runlog.read(Path(path).expanduser())
        if not lines.records:
            raise InputError(f"{path} holds no record yet; a Monitor writes the first when it is first called.")
        return Evolution.of(lines, [lines.note] if lines.note else ())

    def __getitem__(self, name: str) -> Tensor:
        """One quantity, over the steps."""
        if name not in self.values:
            raise InputError(f"{name!r} was not recorded; there are {', '.join(self.values)}. Choose it with record=.")
        return self.values[name]

    def __len__(self) -> int:
        """How many steps were recorded."""
        return len(self.steps)

    def regime(self) -> Regime:
        """Change, cosine, velocity and movement alone."""
        missing = [name for name in REGIME if name not in self.values]
        if missing:
            raise InputError(f"regime() needs {', '.join(REGIME)}; not recorded: {', '.join(missing)}. Add to record=.")
        return Regime(self.steps, *(self.values[name] for name in REGIME))

    def verdict(self) -> LazyOrRich | None:
        """Lazy, rich or in between, with the numbers that say why (a heuristic); None where `change` is not known."""
        numbers = {name: column for name, column in self.values.items() if column.dim() == 1}
        last, first = ({name: float(column[k]) for name, column in numbers.items()} for k in (-1, 0))
        return lazy_or_rich(last, first)

    def table(self, most: int | None = None) -> str:
        """A line for each step, or for the last `most`; of several eigenvalues the largest alone."""
        first = 0 if most is None else max(0, len(self) - most)
        shown = {name: column if column.dim() == 1 else column[:, 0] for name, column in self.values.items()}
        rows = [
            [brief(int(step)), *(_cell(float(column[k])) for column in shown.values())]
            for k, step in enumerate(self.steps.tolist())
            if k >= first
        ]
        return text_table(["step", *shown], rows)

    def words(self) -> str:
        """The verdict, what recording took, and what else is to be said."""
        found = self.verdict()
        took = float(self.seconds.nansum())
        parts = [
            f"{found}" if found else "change was not recorded, so there is no verdict.",
            f"{len(self)} records up to step {int(self.steps[-1])} took {took:.3g} s; {self.skipped} calls were "
            "skipped.",
            *(f"{note[0].upper()}{note[1:]}." for note in self.notes),
        ]
        return "\n".join(parts)

    def titles(self) -> dict[str, str]:
        """What each quantity is, in words."""
        return {name: QUANTITIES[name].title if name in QUANTITIES else name for name in self.values}

    def plot(self) -> "Figure":
        """All quantities over the steps; `plots.draw_evolution` draws several runs together."""
        from ..plots import draw_evolution

        return draw_evolution(self)


def _values(line: Mapping[str, Json]) -> Mapping[str, Json]:
    values = line.get("values")
    return values if isinstance(values, Mapping) else {}


def _counted(lines: runlog.Recorded) -> list[runlog.Line]:
    return [*lines.records, *([lines.ended] if lines.ended is not None else [])]


def _notes(lines: runlog.Recorded) -> list[str]:
    return [str(note) for line in lines.records if isinstance(notes := line.get("notes"), list) for note in notes]


def _column(cells: Sequence[Json]) -> Tensor:
    """Numbers, or rows of them, which are filled up where some are shorter; what is missing is NaN."""
    nan = float("nan")
    if any(isinstance(cell, list) for cell in cells):
        rows = [cell if isinstance(cell, list) else [] for cell in cells]
        longest = max(map(len, rows))
        cells = [[nan if v is None else v for v in row] + [nan] * (longest - len(row)) for row in rows]
        return torch.tensor(cells, dtype=torch.float64)
    return torch.tensor([nan if cell is None else cell for cell in cells], dtype=torch.float64)


def _cell(value: float) -> str:
    return f"{value:.4g}"
