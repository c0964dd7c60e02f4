"""Ortiz-Jiménez et al. 2021, section 3.2 and appendix E.1: networks that learn eigenfunctions of their own NTK.

Published with the 60,000 images of CIFAR-10 and the 70,000 of MNIST, on GPUs. Here with as many as one has time for.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..datasets import TrainTest
from ..gram.compute import compute
from ..kernels.ntk import trace_ntk
from ..models import Recipe
from ..studies.eigenfunctions import Eigenfunctions, eigenfunctions
from ..studies.learning import SCHEDULE, UNTIL, Trial, attempt
from .learned import TITLES, chosen, halves, learner, room, some_images
from .table import Kept, Options, Row, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES, TEST = 50_000, 10_000
QUICK_SAMPLES, QUICK_TEST = 300, 100
INDICES, QUICK_INDICES = (1, 3, 10, 30, 100, 300), (1, 30)
QUICK_EPOCHS = 20
OVERLAPS = 1_000  # eigenfunctions whose overlap with their signs is averaged, as published
# Relative to λ_0, where only some are computed: of 4,000 of these images λ_1000 is between 1e-4 and 1e-3, and its
# neighbours are a thousandth of that away.
TOL = 1e-9
LABELS = "labels"  # the task of the classes themselves, first half against last
KINDS = ("network", "linear")
EIGEN_NOTES = (
    "Task j: the sign of the eigenvector of index j (0: the largest eigenvalue) of the NTK at initialisation, whose",
    "  Gram has training and test images; `labels`: the first half of the classes against the last (CIFAR2).",
    "majority: the larger class's part of the training images; 100: the eigenvector has one sign, nothing is learned.",
    f"steps: until the mean loss of an epoch's batches is {UNTIL}; nan: not reached. ℓ2, cos: from θ₀ to θ.",
    "overlap: of eigenvectors with their signs, over the first 1,000 (or half of them); published: about 0.78.",
    "Published, with 60,000 images: accuracy falls with the index for network and linearisation alike; on CIFAR-10 the",
    "  linearisation is ahead of the network on eigenfunctions (linear advantage), behind it on labels; with LeNet on",
    "  MNIST the curves cross near index 500. Steps and distances grow with the index.",
)


@dataclass(frozen=True, repr=False)
class EigenCurves(Table):
    """Accuracies by index."""

    def plot(self) -> "Figure":
        """Test accuracy, steps and distance over the index, of the first network and set in the table."""
        from ..studies.pictures import draw_learning

        first = (self.rows[0]["set"], self.rows[0]["network"])
        rows = [row for row in self.rows if (row["set"], row["network"]) == first and row["task"] != LABELS]
        runs = {kind: [Trial(**row["figures"][kind]) for row in rows] for kind in KINDS}
        return draw_learning([row["task"] for row in rows], runs, UNTIL)


def published_schedule(options: Options, epochs: int) -> Recipe:
    """The published one, with other epochs where they were asked for."""
    return SCHEDULE.but(epochs=options.learned.epochs or (QUICK_EPOCHS if options.quick else epochs), captured=True)


def functions_of(model: nn.Module, x: Tensor, most: int, options: Options) -> Eigenfunctions:
    """Eigenfunctions on these images, in float64: all of them, or those up to `most` where that is far fewer."""
    n, few = len(x), max(most + 1, OVERLAPS)
    kernel = trace_ntk(model.to(options.device), dtype="float64")
    gram = compute(kernel, x.to(options.device), memory=room(8 * n * n, options), progress=options.progress)
    count = few if 8 * few <= n else None
    found = eigenfunctions(gram, count, tol=TOL, progress=options.progress)
    return replace(found, values=found.values.cpu(), vectors=found.vectors.cpu())


def reproduce_eigenfunctions(options: Options) -> EigenCurves:
    """Each network on each set: the Gram, the eigenfunctions, and a training for each index and kind."""
    asked = options.learned
    n = asked.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    m = asked.test or (QUICK_TEST if options.quick else TEST)
    sets = ("digits",) if options.quick else asked.sets or ("mnist", "cifar10")
    indices = asked.indices or (QUICK_INDICES if options.quick else INDICES)
    recipe = published_schedule(options, SCHEDULE.epochs)
    kept = Kept(options, "eigenfunctions", {"samples": n, "test": m, "recipe": recipe})
    rows: list[Row] = []
    for where in sets:
        data = some_images(where, options, n, m)
        for name in chosen(options, ("mlp",) if options.quick else ("mlp", "lenet")):
            measure_case(where, name, data, indices, recipe, kept, options)
            rows += [eigen_row(where, name, task, kept) for task in (*map(str, sorted(indices)), LABELS)]
    columns = ("set", "network", "task", "λ/λ_0", "majority %", "network %", "linear %", "train %", "linear train %",
               "steps", "linear steps", "ℓ2", "linear ℓ2", "cos", "overlap")  # fmt: skip
    title = f"Eigenfunctions of the NTK, learned: {n:,} training, {m:,} test images, {recipe.epochs} epochs"
    facts = {"samples": n, "test": m, "published samples": SAMPLES, "runs": dict(kept.rows)}
    return EigenCurves(title, columns, tuple(rows), EIGEN_NOTES, facts)


def measure_case(
    where: str, name: str, data: TrainTest, indices: tuple[int, ...], recipe: Recipe, kept: Kept, options: Options
) -> None:
    """One network on one set: what is not there yet."""
    case, tasks = f"{where}, {name}", [LABELS, *map(str, indices)]
    missing = [(t, k) for t in tasks for k in KINDS if f"{case}, {t}, {k}" not in kept]
    if not missing:
        return
    known, asked = data
    assert isinstance(known.x, Tensor)
    assert isinstance(asked.x, Tensor)
    x = torch.cat([known.x, asked.x])
    model = learner(name, tuple(x.shape[1:]), seed=0)
    functions = functions_of(model, x, max(indices), options)
    overlap = functions.overlap()[: min(OVERLAPS, max(1, len(x) // 2))]
    before = kept.rows.get(case, {}).get("values", {})
    parts = {str(j): float(functions.values[j] / functions.values[0]) for j in indices if j < len(functions)}
    kept[case] = {"values": {**before, **parts}, "overlap": float(overlap.mean()), "residual": functions.residual}
    for task, kind in missing:
        if task != LABELS and not two_signs(functions.real(int(task))[: len(known)]):
            row: Row = {**dict.fromkeys(Trial._fields, math.nan), "majority": 1.0}
        else:
            labels = TrainTest(halves(known), halves(asked))
            pair = labels if task == LABELS else functions.tasks(x, [int(task)], test=len(asked))[0][1]
            trial = attempt(model, pair, recipe, linear=kind == "linear", seed=0)
            row = {**trial._asdict(), "majority": float(pair.train.counts().max()) / len(pair.train)}
        kept[f"{case}, {task}, {kind}"] = row


def two_signs(values: Tensor) -> bool:
    """Whether there are numbers above 0 and others: else there is nothing to learn."""
    return bool((values > 0).any()) and not bool((values > 0).all())


def eigen_row(where: str, name: str, task: str, kept: Kept) -> Row:
    """One line of the table."""
    facts = kept[f"{where}, {name}"]
    both = {kind: kept[f"{where}, {name}, {task}, {kind}"] for kind in KINDS}
    net, linear = both["network"], both["linear"]
    figures = {kind: {key: row[key] for key in Trial._fields} for kind, row in both.items()}
    return {
        "set": where, "network": TITLES[name], "task": task, "figures": figures,
        "λ/λ_0": f"{facts['values'][task]:.1e}" if task in facts["values"] else "",
        "majority %": f"{100 * net['majority']:.1f}",
        "network %": f"{100 * net['accuracy']:.1f}", "linear %": f"{100 * linear['accuracy']:.1f}",
        "train %": f"{100 * net['train_accuracy']:.1f}", "linear train %": f"{100 * linear['train_accuracy']:.1f}",
        "steps": f"{net['iterations']:.0f}", "linear steps": f"{linear['iterations']:.0f}",
        "ℓ2": f"{net['distance']:.2f}", "linear ℓ2": f"{linear['distance']:.2f}", "cos": f"{net['angle']:.3f}",
        "overlap": f"{facts['overlap']:.3f}",
    }  # fmt: skip
