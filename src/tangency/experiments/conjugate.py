"""Qadeer et al. 2023 (arXiv:2310.18612), Figures 3 to 11 (their numbers in the report by Chiang et al. 2023).

Test errors of networks, and of the NTK, the CK and the CK by features (CKJ) taken from them: at the end of the
training, and over it. Figures of the same networks share their record in --out. Published are pictures, without
numbers; what the text says of them stands beside ours.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from .._base.progress import bar
from ..errors import InputError
from ..models import initialized, mlp
from ..studies.conjugate import UNTIL, ConjugateStudy, Moment, conjugate_classification, conjugate_regression
from ..studies.conjugate_pictures import draw_courses, draw_runs
from ..studies.grids import BOUNDARIES, FUNCTIONS, INTERVAL, Function, Grid, Grids
from .table import Kept, Options, Row, Table, picture

AT = (0, 50, 100, 200, 300, 400, 600, 800, 1000, 1300, 1600, 2000)
QUICK_WIDTH, QUICK_EPOCHS, QUICK_GRIDS = 24, 60, Grids(Grid((40,)), (3,))


@dataclass(frozen=True)
class Networks:
    """Networks that are trained alike, with what is recorded of them."""

    name: str
    activation: Callable[[], nn.Module] = nn.Tanh
    width: int = 128
    classes: bool = False
    epochs: int = 2400
    at: tuple[int, ...] = AT
    until: float | None = None  # of classes: the training accuracy that ends it

    def tasks(self) -> Mapping[str, Function]:
        """What they learn."""
        return BOUNDARIES if self.classes else FUNCTIONS

    def study(self, f: Function, seed: int, epochs: int, options: Options) -> ConjugateStudy:
        """One of them, trained."""
        width = QUICK_WIDTH if options.quick else self.width
        sizes = [2, width, width, 2] if self.classes else [1, width, width, width, 1]
        net = initialized(lambda: mlp(sizes, self.activation), seed).to(options.device)
        at = [e for e in self.at if e < epochs]
        if self.classes:
            return conjugate_classification(net, f, epochs=epochs, until=self.until, at=at, progress=False)
        grids = QUICK_GRIDS if options.quick else INTERVAL
        return conjugate_regression(net, f, grids=grids, epochs=epochs, at=at, progress=False)


@dataclass(frozen=True)
class Figure:
    """One published figure: of which networks, whether over their training, what the text says of it."""

    number: int
    title: str
    networks: Networks
    course: bool
    published: str


@dataclass(frozen=True)
class Seen:
    """A moment of a training as it is recorded: what `Moment` has, and of every bound what came of it, in words."""

    epoch: int
    test: dict[str, float]
    accuracy: dict[str, float] | None
    says: dict[str, str]


Runs = dict[str, list[list[Seen]]]  # by task; of each run its moments


def reproduce_figure(number: int, options: Options) -> Table:
    """Every network of every task, as rows; the picture in --out."""
    figure = next(f for f in FIGURES if f.number == number)
    kept = measured(figure, options)
    runs = {task: [[seen(row) for row in run["moments"]] for run in rows] for task, rows in kept.items()}
    if options.out is not None:
        draw = draw_courses if figure.course else draw_runs
        picture(draw(runs), options.out / f"conjugate-fig{figure.number}.png")
    columns, rows = over_epochs(runs) if figure.course else at_the_end(runs)
    bounds = judged(runs)
    count = len(next(iter(runs.values())))
    errors = "cross-entropies, sums over the test grid" if figure.networks.classes else "‖f − f̂‖ on the test grid"
    notes = (
        f"Published (a picture, no numbers): {figure.published}",
        bounds.words(),
        f"{'Means' if figure.course else 'Medians'} over the networks; errors are {errors}.",
    )
    facts = {"figure": figure.number, "bounds": vars(bounds), "runs": kept}
    what = f"{figure.title}, width {QUICK_WIDTH if options.quick else figure.networks.width}"
    return Table(f"Figure {figure.number}: {what}; {count} network(s) for each task", columns, rows, notes, facts)


def measured(figure: Figure, options: Options) -> dict[str, list[Row]]:
    """The records of all runs, by task; made where they are missing."""
    nets, tasks = figure.networks, figure.networks.tasks()
    unknown = [case for case in options.cases if case not in tasks]
    if unknown:
        raise InputError(f"--cases {','.join(unknown)}; needed: some of {', '.join(tasks)}.")
    epochs = options.learned.epochs or (QUICK_EPOCHS if options.quick else nets.epochs)
    kept = Kept(options, f"conjugate-{nets.name}", {"networks": nets.name, "epochs": epochs, "at": nets.at})
    seeds = 2 if options.quick else options.seeds
    found: dict[str, list[Row]] = {task: [] for task in tasks if not options.cases or task in options.cases}
    with bar(len(found) * seeds, f"figure {figure.number}", "network", show=options.progress) as tick:
        for task in found:
            for seed in range(seeds):
                key = f"{task}, seed {seed}"
                if key not in kept:
                    kept[key] = {"moments": [record(m) for m in nets.study(tasks[task], seed, epochs, options).moments]}
                found[task].append(kept[key])
                tick(note=key)
    return found


def record(m: Moment) -> Row:
    """A moment as JSON has it."""
    bounds = {b.name: {"left": b.left, "right": b.right, "says": b.says} for b in m.bounds.rows}
    return {"epoch": m.epoch, "train": dict(m.train), "test": dict(m.test), "rank": dict(m.rank), "bounds": bounds,
            **({} if m.accuracy is None else {"accuracy": dict(m.accuracy)})}  # fmt: skip


def seen(row: Row) -> Seen:
    """The way back."""
    says = {name: bound["says"] for name, bound in row["bounds"].items()}
    return Seen(row["epoch"], row["test"], row.get("accuracy"), says)


@dataclass(frozen=True)
class Judged:
    """Over all moments: how often a bound was promised, was violated, and was false where nothing promises it."""

    moments: int
    promised: int
    violated: int
    loose: dict[str, int]

    def words(self) -> str:
        """A line."""
        loose = "; ".join(f"{name} {times}" for name, times in self.loose.items())
        more = f"; false where nothing promises them, times: {loose}" if loose else ""
        return f"Bounds at {self.moments} moments: {self.promised} promised, {self.violated} violated{more}."


def judged(runs: Runs) -> Judged:
    """Of all bounds of all runs."""
    says = [pair for studies in runs.values() for run in studies for m in run for pair in m.says.items()]
    promised = sum(word in ("holds", "VIOLATED") for _, word in says)
    loose = Counter(name for name, word in says if word == "fails, not promised")
    moments = sum(len(run) for studies in runs.values() for run in studies)
    return Judged(moments, promised, sum(word == "VIOLATED" for _, word in says), dict(loose))


def at_the_end(runs: Runs) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    """A row for each task: medians of the last moments, and how many orders of magnitude lie between them."""
    rows, columns = [], ["task"]
    for task, studies in runs.items():
        last = [run[-1] for run in studies]
        names = list(last[0].test)
        middle = {name: statistics.median(m.test[name] for m in last) for name in names}
        row: Row = {"task": task} | {name: f"{middle[name]:.1e}" for name in names}
        steps = [("NN", "CK"), ("CK", "NTK"), ("CK", "CKJ")] if "CKJ" in names else [("NN", "CK"), ("CK", "NTK")]
        for a, b in steps:
            row[f"log₁₀ {a}/{b}"] = f"{math.log10(middle[a] / middle[b]):+.1f}" if middle[b] > 0 else "∞"
        for name in names if last[0].accuracy is not None else []:
            row[f"{name} %"] = f"{100 * statistics.median((m.accuracy or {})[name] for m in last):.1f}"
        rows.append(row)
        columns = list(row)
    return tuple(columns), tuple(rows)


def over_epochs(runs: Runs) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    """A row for each task and epoch: means over the runs."""
    rows, columns = [], ["task"]
    for task, studies in runs.items():
        for epoch in sorted(set.intersection(*({m.epoch for m in run} for run in studies))):
            now = [m for run in studies for m in run if m.epoch == epoch]
            row: Row = {"task": task, "epoch": str(epoch)}
            row |= {name: f"{statistics.fmean(m.test[name] for m in now):.1e}" for name in now[0].test}
            for name in now[0].test if now[0].accuracy is not None else []:
                row[f"{name} %"] = f"{100 * statistics.fmean((m.accuracy or {})[name] for m in now):.1f}"
            rows.append(row)
            columns = list(row)
    return tuple(columns), tuple(rows)


TANH = Networks("tanh-128")
RELU = Networks("relu-128", nn.ReLU)
WIDE = Networks("tanh-256", width=256, at=())
LATE = tuple(range(0, 4000, 400))
CLASSES = Networks("classes-tanh-128", classes=True, epochs=4000, at=(), until=UNTIL)
NARROW = Networks("classes-tanh-64", width=64, classes=True, epochs=4000, at=(), until=UNTIL)
CLASSES_RELU = Networks("classes-relu-128", nn.ReLU, classes=True, epochs=4000, at=(), until=UNTIL)
ON = Networks("classes-tanh-128-on", classes=True, epochs=4000, at=LATE)

FIGURES = (
    Figure(3, "functions, tanh", TANH, False, "CK and NTK alike, far below NN; CKJ several orders lower."),
    Figure(4, "functions over the training, tanh", TANH, True,
           "kernels fall faster than NN, CK as NTK; CKJ fastest, levels off several orders lower."),
    Figure(5, "functions, tanh", WIDE, False, "as Figure 3."),
    Figure(6, "functions, ReLU", RELU, False, "the gaps are gone; NTK worst, CK slightly better than NN."),
    Figure(7, "functions over the training, ReLU", RELU, True, "as Figure 6 throughout."),
    Figure(8, "classes, tanh", CLASSES, False, "NTK a little better than CK, both far better than NN."),
    Figure(9, "classes, tanh", NARROW, False, "as Figure 8."),
    Figure(10, "classes, ReLU", CLASSES_RELU, False, "no clear gap between NN and the kernels."),
    Figure(11, "classes over the training, tanh", ON, True,
           "kernels far better than NN throughout, and at the start better than NN at its end; CK close to NTK."),
)  # fmt: skip
