"""Wang et al. 2022 (arXiv:2211.06506), the figures of section 4: where spikes begin, and what is learned when.

First (Fig. 20 of the report by Chiang et al. 2023): the largest eigenvalues, alignments and the test error of one
network on one teacher, over the learning rate of SGD. Then (Fig. 21): kernel target alignment, |βᵀu₁| and the angles
between the teacher's directions and the first hundred of W, while networks are trained by GD, SGD and Adam.
"""

import math
from dataclasses import dataclass, field

import torch

from ..studies import Learned, Optimizer, Taught, TwoLayer, draw_students, follow, teacher, train_two_layer, two_layer
from ..studies.aligned import gathered, rate_row
from .table import Kept, Options, Row, Table, picture


@dataclass(frozen=True)
class Sweep:
    """Sizes, learning rates, and the optimizers that are followed."""

    n: int = 1000
    h: int = 750
    d: int = 500
    lrs: tuple[float, ...] = (1, 2, 4, 8, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23, 24)
    until: float = 1e-5
    epochs: int = 3000
    batch: int = 16
    top: int = 100
    followed: dict[str, Optimizer] = field(
        default_factory=lambda: {
            "GD": Optimizer("gd", 25.0),
            "SGD": Optimizer("sgd", 22.0, 16),
            "Adam": Optimizer("adam", 0.092),
        }
    )

    def draw(self, directions: int = 1, seed: int = 0) -> tuple[TwoLayer, Taught]:
        """The network before training, and the teacher's samples."""
        tau = 0.2 if directions == 1 else 0.0
        data = teacher(self.n, self.d, directions=directions, tau=tau, noise=0.3, test=4000, seed=seed)
        return two_layer(self.d, self.h, seed=1000 + seed, dtype=torch.float32), data.to(torch.float32)


SWEEP = Sweep()
QUICK_SWEEP = Sweep(
    300, 225, 150, (4, 12, 16, 18, 20), until=1e-3, epochs=300, top=30,
    followed={"GD": Optimizer("gd", 5.0), "SGD": Optimizer("sgd", 20.0, 16), "Adam": Optimizer("adam", 0.092)},
)  # fmt: skip


def reproduce_transition(options: Options) -> Table:
    """A row for each learning rate, the threshold, the evolution, and both pictures in --out."""
    sweep = QUICK_SWEEP if options.quick else SWEEP
    kept = Kept(options, "spectra-transition", {"sweep": sweep})
    net, data = sweep.draw()
    how = {"batch": sweep.batch, "until": sweep.until, "epochs": sweep.epochs, "progress": options.progress}
    for lr in sweep.lrs:
        if f"lr {lr:g}" not in kept:
            kept[f"lr {lr:g}"] = {"values": rate_row(net, data, lr, **how)}  # type: ignore[arg-type]
    values = [kept[f"lr {lr:g}"]["values"] for lr in sweep.lrs]
    found = gathered(net, data, sweep.batch, sweep.lrs, values)
    evolution = {name: evolved(name, sweep, kept, options) for name in sweep.followed}
    if options.out is not None:
        picture(found.plot(), options.out / "transition.png")
        picture(draw_students(evolution), options.out / "evolution.png")
    columns = ("lr", "λ₁(W Wᵀ/d)", "λ₁(CK)", "|βᵀu₁|", "|yᵀv₁| CK", "|yᵀv₁| NTK", "R²", "test error")
    rows = [dict(zip(columns, [f"{lr:g}", *row], strict=True)) for lr, row in zip(sweep.lrs, values, strict=True)]
    begin = "begin nowhere, or are everywhere" if math.isnan(found.threshold) else f"begin at {found.threshold:.3g}"
    notes = (
        f"Outliers of W Wᵀ/d (above {found.edge:.2f}) {begin}.",
        *(f"{name}: {_end(run)}" for name, run in evolution.items()),
        f"n = {sweep.n}, h = {sweep.h}, d = {sweep.d}, batches of {sweep.batch}, label noise 0.3, one network,",
        f"  one data set, until L < {sweep.until:g} (published: n = 2000, h = 1500, d = 1000). nan: diverged.",
        "GD, SGD, Adam: on a teacher with 5 directions and no quadratic; angles at the end of training, in radian.",
    )
    facts = {"threshold": found.threshold, "edge": found.edge, "runs": {key: kept[key] for key in kept.rows}}
    return Table("What SGD learns over its learning rate", columns, tuple(rows), notes, facts)


def evolved(name: str, sweep: Sweep, kept: Kept, options: Options) -> Learned:
    """A training that is followed on a teacher with five directions: from the record where it is finished."""
    net, data = sweep.draw(directions=5)
    optimizer, key = sweep.followed[name], f"evolution, {name}"
    if key not in kept:
        run = train_two_layer(
            net, data, optimizer, until=sweep.until, epochs=sweep.epochs, watch=follow(data, top=sweep.top),
            progress=options.progress,
        )  # fmt: skip
        kept[key] = {"seen": list(run.seen), "r2": run.r2, "error": run.error, "reached": run.reached}
    row: Row = kept[key]
    loss = torch.zeros(0, dtype=torch.float64)
    return Learned(net, net, optimizer, loss, row["reached"], row["r2"], row["error"], tuple(row["seen"]))


def _end(run: Learned) -> str:
    last = run.seen[-1]
    angles = ", ".join(f"{v:.2f}" for key, v in last.items() if key.startswith("angle"))
    kta = f"KTA {run.seen[0]['kta']:.3f} → {last['kta']:.3f}"
    return f"{last['epoch']:.0f} epochs, R² {run.r2:.3f}, {kta}, angles {angles}"
