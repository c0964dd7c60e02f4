"""Ortiz-Jiménez et al. 2021, Table 1 of the appendix: how much of the labels lies in the NTK's first 50 eigenvectors.

CIFAR2 (the first five classes of CIFAR-10 against the last five), before and after training.
"""

import copy

import torch
from torch import Tensor, nn

from ..gram.compute import compute
from ..kernels.ntk import trace_ntk
from ..linalg import top
from ..models import accuracy, fit
from ..spectra import energy
from .eigenfunctions import published_schedule
from .learned import TITLES, affordable, chosen, halves, learner, room, some_images
from .table import Kept, Options, Row, Table, mean

SAMPLES, TEST, MEASURED = 50_000, 10_000, 12_000
QUICK_SAMPLES, QUICK_TEST = 300, 100
EPOCHS = 200  # twice those of the eigenfunctions, for CIFAR2
K = 50
ENERGY_PUBLISHED = {
    "mlp": ("26.0", "63.6", "67.6"), "lenet": ("25.8", "83.0", "75.0"), "resnet18": ("22.7", "96.7", "81.4"),
}  # fmt: skip
ENERGY_NOTES = (
    "init, end: ‖Φ_K y‖/‖y‖, Φ_K the first K = 50 eigenvectors of the NTK's Gram, y = ±1, on training images; a random",
    "  y would have √(K/n). Published: n = 12,000 of 50,000 training images; fewer make the same K a larger part.",
    "On a GPU ResNet18 is trained by autocast in bfloat16, and its kernel has 16-bit factors.",
    "Numbers in parentheses: standard error of the mean over seeds, in the last digit.",
)


def label_energy(model: nn.Module, x: Tensor, y: Tensor, options: Options, dtype: str | None = None) -> float:
    """‖Φ_Kᵀ y‖ / ‖y‖ with the first K eigenvectors of the model's NTK on x, y as ±1."""
    gram = compute(trace_ntk(model, dtype=dtype), x, memory=room(4 * len(x) ** 2, options), progress=options.progress)
    # In float32 the last of 50 pairs did not come to rest on a GPU.
    pairs = top(gram, K, dtype=torch.float64, progress=options.progress)
    return energy(pairs, 2.0 * y - 1, K, progress=options.progress).concentration


def measure_energy(name: str, seed: int, n: int, m: int, options: Options) -> Row:
    """One network: energies before and after its training, and its test accuracy."""
    known, asked = (halves(part) for part in some_images("cifar10", options, n, m))
    assert isinstance(known.x, Tensor)
    x, y = known.x[:MEASURED].to(options.device), known.y[:MEASURED].to(options.device)
    model = learner(name, tuple(x.shape[1:]), seed=seed).to(options.device)
    # 16-bit factors, where 32 bits would take minutes: entries are off by less than 1e-3 (docs/design.md).
    dtype = "float16" if name == "resnet18" and options.device != "cpu" else None
    start = label_energy(copy.deepcopy(model), x, y, options, dtype)
    recipe = affordable(published_schedule(options, EPOCHS), name, options)
    past = fit(model, known, None, recipe, seed=seed, progress=options.progress)
    return {
        "init": start,
        "end": label_energy(model, x, y, options, dtype),
        "accuracy": accuracy(model, asked, outputs_are="logits"),
        "loss": float(past.loss[-1]),
        "measured": len(x),
    }


def reproduce_energy(options: Options) -> Table:
    """Every network with every seed, as rows of the table."""
    asked = options.learned
    n = asked.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    m = asked.test or (QUICK_TEST if options.quick else TEST)
    recipe = published_schedule(options, EPOCHS)
    kept = Kept(options, "energy-table1", {"samples": n, "test": m, "recipe": recipe})
    rows = []
    for name in chosen(options, ("mlp",) if options.quick else ("mlp", "lenet", "resnet18")):
        runs = []
        for seed in range(1 if options.quick else options.seeds):
            key = f"{name}, seed {seed}"
            if key not in kept:
                kept[key] = measure_energy(name, seed, n, m, options)
            runs.append(kept[key])
        rows.append(energy_row(name, runs, options))
    columns = ("network", "seeds", "n", "init %", "init % paper", "end %", "end % paper", "random %", "test %",
               "test % paper")  # fmt: skip
    title = f"Energy concentration on CIFAR2: {n:,} training images, {recipe.epochs} epochs"
    return Table(title, columns, tuple(rows), ENERGY_NOTES, {"samples": n, "runs": dict(kept.rows)})


def energy_row(name: str, runs: list[Row], options: Options) -> Row:
    """Means over the seeds beside what was published."""
    published = ("", "", "") if options.quick else ENERGY_PUBLISHED.get(name, ("", "", ""))
    n = runs[0]["measured"]
    percents = {key: [100 * run[key] for run in runs] for key in ("init", "end", "accuracy")}
    found = {key: mean(v) if len(v) > 1 else f"{v[0]:.1f}" for key, v in percents.items()}
    return {
        "network": TITLES[name], "seeds": len(runs), "n": n,
        "init %": found["init"], "init % paper": published[0],
        "end %": found["end"], "end % paper": published[1],
        "random %": f"{100 * (K / n) ** 0.5:.1f}",
        "test %": found["accuracy"], "test % paper": published[2],
    }  # fmt: skip
