"""Arora et al. 2020, Table 1: six classifiers on the small tables of UCI, by rank, accuracy, P90, P95 and PMA.

The protocol is that of Fernández-Delgado et al. (2014), which they follow: hyperparameters by one stratified split into
halves, then four stratified folds, here several times over, the same ones for every classifier.
"""

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from .._base import machine
from .._base.extras import needed
from .._base.progress import bar
from ..datasets.table import fields, is_missing, number
from ..errors import InputError
from .classifiers import CLASSIFIERS, Array, ClassifierJob, Plan, TableSplit
from .table import Kept, Options, Row, Table

MOST = 5000  # rows of a set, as published
SEED = 0
PLAN = Plan()
QUICK_PLAN = Plan(
    depths=(1, 2), costs=(0.1, 1.0, 10.0, 100.0), gammas=(2.0**-6, 2.0**-4, 2.0**-2), degrees=(1, 2),
    scales=(0.01, 0.1), few_costs=(0.1, 1.0, 10.0), trees=50, layers=(1, 2), width=32, steps=100,
)  # fmt: skip
# Friedman rank among 180 classifiers; average accuracy; P90; P95; PMA. All but the rank in percent, ± over 90 sets.
UCI_PUBLISHED = {
    "NTK": ("28.34", "81.95 ± 14.10", "88.89", "72.22", "95.72 ± 5.17"),
    "NN (He init)": ("40.97", "80.88 ± 14.96", "81.11", "65.56", "94.34 ± 7.22"),
    "NN (NTK init)": ("38.06", "81.02 ± 14.47", "85.56", "60.00", "94.55 ± 5.89"),
    "RF": ("33.51", "81.56 ± 13.90", "85.56", "67.78", "95.25 ± 5.30"),
    "Gaussian kernel": ("35.76", "81.03 ± 15.09", "85.56", "72.22", "94.56 ± 8.22"),
    "Polynomial kernel": ("38.44", "78.21 ± 20.30", "80.00", "62.22", "91.29 ± 18.05"),
}
UCI_NOTES = (
    "rank: Friedman's, the mean over sets of the place by accuracy, ties shared. Ours is among these six, the",
    "  published one among 180 classifiers: compare the order, not the value. ±: standard deviation over sets.",
    "P90, P95: share of sets on which a classifier has 90 % (95 %) of the best accuracy or more. PMA: mean percentage",
    "  of the best accuracy. The best is of these six here and of 180 there, so ours are larger.",
    "Sets: not the published 90 but those of the folder with at most 5000 rows. The facts (--json, --out) list them,",
    "  and those left out with the reason.",
    "Protocol: chosen on one stratified split into halves (of all rows, as published: later test rows take part),",
    "  then 4 stratified folds, --seeds times over. A class of fewer than 4 rows is missing in some training folds.",
    "Columns: words as numbers in sorted order, as in Fernández-Delgado et al. (2014). Missing: the median of the",
    "  training rows, of words the most frequent. Then mean 0 and variance 1 on the training rows (published: on all).",
    "NTK: 1..5 hidden ReLU layers, the first 0..depth-1 layers frozen, C = 10^-2..10^4, the kernel in the published",
    "  scale (Σ_0 = x·z). The authors' script counts layers of weights instead, 1..5, and so has the linear kernel.",
    "Gaussian: γ = 2^-10..2^4, C = 10^-2..10^4. Polynomial: (1 + s x·z)^p, p = 1..3, s = 10^-3..10^-1,",
    "  C = 10^-2..10^2. RF: 500 trees, max_features of √d/2, √d, 2√d, d/2, d.",
    "NN: width 256, 1..3 hidden layers, two rates, 500 steps of gradient descent with momentum on all training rows.",
)


@dataclass(frozen=True, eq=False)
class UciSet:
    """One set: a number for each column (NaN: missing), the class of each row."""

    name: str
    x: Array  # [n, d]
    y: Array  # [n]
    words: Array  # [d]: whether the column held words

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return int(self.y.max()) + 1

    def facts(self) -> Row:
        """Sizes of the set, for the record."""
        n, d = self.x.shape
        least, missing = int(np.bincount(self.y).min()), int(np.isnan(self.x).sum())
        return {"n": n, "d": d, "classes": self.classes, "rows of the rarest class": least, "missing": missing}


def read_set(file: Path) -> UciSet:
    """A CSV file of at most 5000 rows without header, divided by commas, the class in its last column."""
    _, rows = fields(file, delimiter=",", header=False)
    if len(rows) > MOST:
        raise InputError(f"{len(rows)} rows, more than {MOST}")
    columns = list(zip(*rows, strict=True))
    if len(columns) < 2:
        raise InputError(f"{file} has one column; needed: the features and, in the last column, the class.")
    if any(map(is_missing, columns[-1])):
        raise InputError(f"{file}: a class is missing; needed: one in the last column of every line.")
    coded = [_coded(cells) for cells in columns[:-1]]
    x = np.stack([v for v, _ in coded], 1)
    if np.isinf(x).any():
        raise InputError(f"{file}: a value is infinite; needed: finite numbers, or ? where one is missing.")
    y = np.unique(columns[-1], return_inverse=True)[1]
    return UciSet(file.stem, x, y, np.array([w for _, w in coded]))


def _coded(cells: Sequence[str]) -> tuple[Array, bool]:
    """Numbers as they are; where one cell is a word, all are, numbered in sorted order."""
    known = [cell for cell in cells if not is_missing(cell)]
    words = any(number(cell) is None for cell in known)
    code = {word: k for k, word in enumerate(sorted(set(known)))}
    values = [np.nan if is_missing(cell) else code[cell] if words else number(cell) for cell in cells]
    return np.array(values, np.float64), words


def sets(options: Options) -> tuple[list[UciSet], dict[str, str]]:
    """(those to be measured, the largest first; why the others are not)."""
    folder = options.folder("a folder of UCI sets, one CSV file each (no header, the class in the last column)")
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; needed: the one with the UCI sets, one CSV file each.")
    files = sorted(folder.glob("*.csv"))
    if not files:
        raise InputError(
            f"there is no *.csv in {folder}; needed: UCI sets, one file each, no header, the class in the last column."
        )
    used, out = [], {}
    for file in files:
        try:
            samples = read_set(file)
        except InputError as e:
            out[file.stem] = str(e)
            continue
        if (np.bincount(samples.y) > 1).sum() < 2:
            out[file.stem] = "it has not two classes of two rows or more"
        else:
            used.append(samples)
    if not used:
        raise InputError(f"none of the {len(files)} sets in {folder} can be used: {'; '.join(out.values())}")
    return sorted(used, key=lambda s: -len(s.y)), out


def bundled() -> list[UciSet]:
    """Three sets that come with scikit-learn, for --quick."""
    with needed("sklearn", "--quick"):
        from sklearn.datasets import load_breast_cancer, load_iris, load_wine

    loaded = []
    for name, load in (("breast cancer", load_breast_cancer), ("wine", load_wine), ("iris", load_iris)):
        x, y = load(return_X_y=True)
        thinned = slice(None, None, -(-len(y) // 200))
        loaded.append(UciSet(name, x[thinned], y[thinned].astype(np.int64), np.zeros(x.shape[1], bool)))
    return loaded


# Splits


def folds(y: Array, k: int, seed: int) -> Array:
    """The fold of each row, [n] in 0..k-1, at random: of each class, as many rows in each fold, give or take one."""
    mixed = np.random.default_rng(seed).permutation(len(y))
    order = mixed[np.argsort(y[mixed], kind="stable")]
    fold = np.empty(len(y), np.int64)
    fold[order] = np.arange(len(y)) % k
    return fold


def standardised(samples: UciSet, train: Array, test: Array) -> TableSplit:
    """Rows by number: filled in and standardised with what the training rows say alone."""
    x, asked = samples.x[train], samples.x[test]
    fill = np.array([_usual(v[~np.isnan(v)], w) for v, w in zip(x.T, samples.words, strict=True)])
    x, asked = (np.where(np.isnan(v), fill, v) for v in (x, asked))
    mean, spread = x.mean(0), x.std(0)
    spread[spread <= 1e-12 * np.abs(mean)] = np.inf  # what is constant in training says nothing, and becomes zero
    return TableSplit((x - mean) / spread, samples.y[train], (asked - mean) / spread, samples.y[test])


def _usual(values: Array, words: bool) -> float:
    """What stands for a missing value: the most frequent word, the median of numbers."""
    if not len(values):
        return 0.0
    if not words:
        return float(np.median(values))
    kinds, counts = np.unique(values, return_counts=True)
    return float(kinds[counts.argmax()])


def splits(samples: UciSet, repeats: int) -> tuple[TableSplit, list[TableSplit]]:
    """(the halves to choose by, four folds as often as asked): the same for every classifier."""

    def split(fold: Array, k: int) -> TableSplit:
        """Fold k asked about, the others to train on."""
        return standardised(samples, np.flatnonzero(fold != k), np.flatnonzero(fold == k))

    several = [folds(samples.y, 4, SEED + 1 + r) for r in range(repeats)]
    return split(folds(samples.y, 2, SEED), 1), [split(fold, k) for fold in several for k in range(4)]


# Measuring


def measure(samples: UciSet, classifier: str, plan: Plan, repeats: int, device: str) -> Row:
    """One classifier on one set: what it chose and its accuracy on every fold."""
    begin = perf_counter()
    choose, several = splits(samples, repeats)
    row = CLASSIFIERS[classifier](ClassifierJob(choose, several, samples.classes, plan, device))
    return {**row, "accuracy": float(np.mean(row["accuracies"])), "seconds": round(perf_counter() - begin, 2)}


_Task = tuple[UciSet, str, Plan, int, str]


def measure_all(tasks: Sequence[_Task], workers: int) -> Iterator[tuple[_Task, Row]]:
    """Each task with its row, as they are done: in so many processes of one thread each."""
    if min(workers, len(tasks)) < 2:
        for task in tasks:
            yield task, measure(*task)
        return
    # Not forked: torch's threads and CUDA do not live on in a child.
    pool = ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), _alone)
    try:
        waiting = {pool.submit(measure, *task): task for task in tasks}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _alone() -> None:
    """One thread for this process, whatever computes: the other cores have their own."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    torch.set_num_threads(1)
    threadpool_limits(1)


def reproduce_uci(options: Options) -> Table:
    """Six classifiers on every set of the folder, in parallel processes; what is finished is kept."""
    with needed("sklearn", "this study"):
        import sklearn  # noqa: F401
    used, out = (bundled(), {}) if options.quick else sets(options)
    plan, repeats = QUICK_PLAN if options.quick else PLAN, options.seeds
    content = zlib.crc32(repr([(s.name, s.x.tobytes(), s.y.tobytes()) for s in used]).encode())
    spec = {"plan": plan, "repeats": repeats, "seed": SEED, "sets": f"{len(used)}, checksum {content:08x}"}
    kept = Kept(options, "uci", spec)
    every = [(s, name, plan, repeats, options.device) for s in used for name in CLASSIFIERS]
    tasks = [task for task in every if _key(task) not in kept]
    with bar(len(every), "uci", "task", done=len(every) - len(tasks), show=options.progress) as step:
        for task, row in measure_all(tasks, 1 if options.quick else machine.cores()):
            kept[_key(task)] = row
            step(note=_key(task))
    rows = {s.name: {name: kept[_key((s, name, plan, repeats, ""))] for name in CLASSIFIERS} for s in used}
    facts = {
        "sets": {s.name: {**s.facts(), "classifiers": rows[s.name]} for s in used},
        "left out": out,
        "folds": {"folds": 4, "repeats": repeats, "seed of the halves": SEED, "seed of repeat r": f"{SEED + 1} + r"},
    }
    title = f"Table 1: six classifiers on {len(used)} small sets, 4 folds x {repeats}"
    columns = tuple(c for name in MEASURES for c in (name, f"{name} paper"))
    accuracies = np.array([[rows[s.name][name]["accuracy"] for name in CLASSIFIERS] for s in used])
    return Table(title, ("classifier", *columns), comparison(accuracies, not options.quick), UCI_NOTES, facts)


def _key(task: _Task) -> str:
    return f"{task[0].name}: {task[1]}"


# The table

MEASURES = ("rank", "accuracy %", "P90 %", "P95 %", "PMA %")


def ranks(accuracies: Array) -> Array:
    """Friedman's: the mean over sets (rows) of each classifier's place (1 is the best), ties shared."""
    a = accuracies.round(9)
    above = (a[:, None, :] > a[:, :, None]).sum(2)
    equal = (a[:, None, :] == a[:, :, None]).sum(2)
    return (above + (equal + 1) / 2).mean(0)


def of_best(accuracies: Array) -> Array:
    """Each accuracy as a part of the set's best one."""
    return accuracies / accuracies.max(1, keepdims=True)


def share(accuracies: Array, part: float) -> Array:
    """P90 for part = 0.9: the share of sets on which a classifier reaches that part of the best accuracy."""
    return (of_best(accuracies) >= part - 1e-9).mean(0)


def comparison(accuracies: Array, published: bool) -> tuple[Row, ...]:
    """A row for each classifier: ours [sets, classifiers] beside what was published."""
    parts = of_best(accuracies)
    ours = (ranks(accuracies), accuracies, share(accuracies, 0.9), share(accuracies, 0.95), parts)
    rows = []
    for k, name in enumerate(CLASSIFIERS):
        row: Row = {"classifier": name}
        for measure, values, paper in zip(MEASURES, ours, UCI_PUBLISHED[name], strict=True):
            v = values[..., k]
            if measure == "rank":
                row[measure] = f"{v:.2f}"
            else:
                row[measure] = f"{100 * v:.2f}" if v.ndim == 0 else f"{100 * v.mean():.2f} ± {100 * v.std():.2f}"
            row[f"{measure} paper"] = paper if published else None
        rows.append(row)
    return tuple(rows)
