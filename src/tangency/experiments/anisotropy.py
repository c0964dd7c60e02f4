"""Ortiz-Jiménez et al. 2021, appendix C: anisotropy directions of networks with GELU, and what they learn along them.

The authors' sizes: images of 32 x 32 with one channel for LeNet, 10,000 samples of D(u) to train on and to test with.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from .._base.files import write
from ..errors import InputError
from ..studies.anisotropy import Anisotropy, anisotropy
from ..studies.learning import SCHEDULE, Trial, attempt
from .eigenfunctions import published_schedule
from .learned import TITLES, Shape, affordable, chosen, learner
from .table import Kept, Options, Row, Table

SHAPES: dict[str, Shape] = {"mlp": (1, 32, 32), "lenet": (1, 32, 32), "resnet18": (3, 32, 32), "narrow": (3, 32, 32)}
QUICK_SHAPE = (1, 8, 8)
SAMPLES, TEST, QUICK_SAMPLES = 10_000, 10_000, 400
INDICES, QUICK_INDICES = (0, 3, 10, 30, 100, 300, 1000), (0, 20, 60)
PICTURED = 10  # directions that are kept beside the record in --out, as published in a picture
# With indices up to here a Krylov iteration finds the directions; else all of them are computed (heuristic).
FEW = 32
TOL = 1e-3  # of the directions of large networks, relative to σ_0², in float32: what can be seen in a picture
ANISOTROPY_NOTES = (
    "u_i: the right singular vectors of ∂²f/∂θ∂x at the origin, index 0 the largest; D(u_i): x = y u_i + w, w normal",
    "  and orthogonal to u_i, y = ±1. σ/σ_0: singular values. Published (figures): accuracy falls with the index.",
    "The authors' code places the classes at ±u/2, the paper at ±u, which is done here.",
)


def directions(name: str, shape: Shape, model: nn.Module, count: int, options: Options) -> Anisotropy:
    """The first `count`; all of them where there are many, for small networks in float64."""
    size = torch.Size(shape).numel()
    large = name == "resnet18"
    wanted = count if count <= FEW else size
    if large and wanted > FEW and options.device == "cpu":
        raise InputError(
            f"--indices up to {count - 1} of resnet18; needed: below {FEW}, as one product takes a second on a CPU."
        )
    return anisotropy(
        model, shape, wanted, dtype=None if large else "float64", tol=TOL if large else None, progress=options.progress
    )


def reproduce_anisotropy(options: Options) -> Table:
    """Each network: its directions, and a training on D(u_i) for each index."""
    asked = options.learned
    n = asked.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    m = asked.test or (QUICK_SAMPLES if options.quick else TEST)
    recipe = published_schedule(options, SCHEDULE.epochs)
    kept = Kept(options, "anisotropy", {"samples": n, "test": m, "recipe": recipe})
    indices = asked.indices or (QUICK_INDICES if options.quick else INDICES)
    rows: list[Row] = []
    for name in chosen(options, ("lenet",)):
        shape = QUICK_SHAPE if options.quick and SHAPES[name][0] == 1 else SHAPES[name]
        if not all(f"{name}, {i}" in kept for i in indices):
            model = learner(name, shape, seed=0, activation=nn.GELU).to(options.device)
            found = directions(name, shape, model, max(indices) + 1, options)
            before = kept.rows.get(f"{name}, values", {})
            parts = {str(i): float(found.values[i] / found.values[0]) for i in indices}
            kept[f"{name}, values"] = {**before, **parts}
            found = replace(found, directions=found.directions.float().cpu())
            keep(found, name, options)
            for i, pair in found.tasks([i for i in indices if f"{name}, {i}" not in kept], train=n, test=m):
                trial = attempt(model, pair, affordable(recipe, name, options), linear=False)
                kept[f"{name}, {i}"] = trial._asdict()
        rows += [direction_row(name, i, kept) for i in sorted(indices)]
    columns = ("network", "index", "σ/σ_0", "test %", "train %", "steps", "ℓ2")
    title = f"Anisotropy directions, learned: {n:,} training samples of D(u), {recipe.epochs} epochs"
    facts = {"samples": n, "test": m, "published samples": SAMPLES, "runs": dict(kept.rows)}
    return Table(title, columns, tuple(rows), ANISOTROPY_NOTES, facts)


def keep(found: Anisotropy, name: str, options: Options) -> None:
    """The first directions and all values as a file in --out."""
    if options.out is not None:
        first = {"values": found.values.cpu(), "directions": found.directions[:PICTURED].clone()}
        write(options.out / f"anisotropy-{name}.pt", partial(torch.save, first))


def direction_row(name: str, index: int, kept: Kept) -> Row:
    """One line of the table."""
    trial, value = Trial(**kept[f"{name}, {index}"]), kept[f"{name}, values"][str(index)]
    return {
        "network": TITLES[name], "index": str(index), "σ/σ_0": f"{value:.2e}", "test %": f"{100 * trial.accuracy:.1f}",
        "train %": f"{100 * trial.train_accuracy:.1f}", "steps": f"{trial.iterations:.0f}",
        "ℓ2": f"{trial.distance:.2f}",
    }  # fmt: skip
