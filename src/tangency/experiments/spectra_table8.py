"""Wang et al. 2022 (arXiv:2211.06506), the table of section 3: how the optimizer decides what a network learns.

"Spectral evolution and invariance in linear-width neural networks": one two-layer network on one teacher, trained by
gradient descent, SGD at a small and a large rate and Adam, beside the lazy network; R², test error and the kind of
spectrum that weights, conjugate kernel and tangent kernel end with. (Table 8 of the report by Chiang et al. 2023.)
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .._base.files import write
from ..errors import DidNotConverge, InputError
from ..spectra import classify
from ..studies import Learned, Optimizer, Taught, TwoLayer, alignments, lazy, teacher, train_two_layer, two_layer
from .table import Kept, Options, Row, Table, mean

MATRICES = ("weights", "ck", "ntk")
NOTES = (
    "Stated: n = 2000, h = 1500, d = 1000, normalised tanh, NTK parametrisation, both layers trained, W ~ N(0, 1),",
    "  L = ‖y − f‖²/(2n), label noise 0.3, normalised softplus teacher, τ = 0.2; stop at L < 1e-5 (as for Fig. 20).",
    "Not stated, ours: v ~ N(0, 1); all samples for Adam; batches of 16 for SGD, chosen because 22 then gives a spike;",
    "  4000 test samples without label noise",
    "  (published error/(1 − R²) is 0.94 to 1.00, the variance of f* alone). R² = 1 − error/Var(y_test).",
    "spectra: tangency.spectra.classify of the eigenvalues after training beside those before, how many seeds of each.",
    "Numbers in parentheses: standard error of the mean over seeds, in the last digit.",
    "Cases -fast take ten times the learning rate: the same flow, a tenth of the steps. -low: label noise 0.09 = 0.3².",
    "  -batches: Adam on batches of 64, its rate falling by 3 % an epoch (without, it does not come to 1e-5).",
)


@dataclass(frozen=True)
class Setting:
    """Sizes, the teacher and the end of training."""

    n: int = 2000
    h: int = 1500
    d: int = 1000
    tau: float = 0.2
    noise: float = 0.3
    test: int = 4000
    until: float = 1e-5
    epochs: int = 20_000

    def draw(self, seed: int, dtype: torch.dtype = torch.float32) -> tuple[TwoLayer, Taught]:
        """The network before training, and the teacher's samples."""
        data = teacher(self.n, self.d, tau=self.tau, noise=self.noise, test=self.test, seed=seed)
        return two_layer(self.d, self.h, activation="tanh", seed=1000 + seed, dtype=dtype), data.to(dtype)


SETTING = Setting()
QUICK_SETTING = Setting(n=300, h=225, d=150, test=2000, until=1e-3)


@dataclass(frozen=True)
class Case:
    """One row: how the network is trained (None: it is not, the lazy one), and what was published for it."""

    optimizer: Optimizer | None
    published: tuple[float | None, float | None, str] = (None, None, "")
    noise: float | None = None  # where it is not the setting's


# Cheap ones first: what is interrupted has most rows.
CASES = {
    "lazy": Case(None, (0.681, 0.319, "")),
    "4": Case(Optimizer("adam", 0.092), (0.788, 0.211, "heavy tail")),
    "3": Case(Optimizer("sgd", 22.0, 16), (0.761, 0.238, "bulk + spike")),
    "2": Case(Optimizer("sgd", 0.1, 16), (0.606, 0.369, "invariant")),
    "1": Case(Optimizer("gd", 5.0), (0.636, 0.364, "invariant")),
}
# At small sizes a rate of 22 may diverge.
QUICK_CASES = {"3": Case(Optimizer("sgd", 20.0, 16))}
LOW = 0.09
EXTRA = {
    "1-fast": Case(Optimizer("gd", 50.0)),
    "2-fast": Case(Optimizer("sgd", 1.0, 16)),
    "lazy-low": Case(None, noise=LOW),
    "4-low": Case(Optimizer("adam", 0.092), noise=LOW),
    "3-low": Case(Optimizer("sgd", 22.0, 16), noise=LOW),
    "1-low": Case(Optimizer("gd", 50.0), noise=LOW),
    "4-batches": Case(Optimizer("adam", 0.092, 64, decay=0.97)),
    "4-batches-low": Case(Optimizer("adam", 0.092, 64, decay=0.97), noise=LOW),
    "adagrad": Case(Optimizer("adagrad", 0.092)),
}


def reproduce_table8(options: Options) -> Table:
    """Each case with so many seeds: R², test error, alignment and the kinds of spectra, beside the published ones."""
    known = {**CASES, **EXTRA}
    if options.quick:  # nothing was published for its sizes
        known = {name: replace(case, published=Case(None).published) for name, case in {**known, **QUICK_CASES}.items()}
    wrong = [name for name in options.cases if name not in known]
    if wrong:
        raise InputError(f"--cases {','.join(wrong)}; needed: some of {', '.join(known)}, with commas.")
    setting = QUICK_SETTING if options.quick else SETTING
    kept = Kept(options, "spectra-table8", {"setting": setting})
    rows = []
    for name in options.cases or CASES:
        runs = [measured(name, known[name], seed, setting, kept, options) for seed in range(options.seeds)]
        rows.append(table8_row(name, known[name], runs))
    columns = ("case", "optimizer", "η", "batch", "seeds", "epochs", "R²", "R² paper", "test error",
               "test error paper", "|βᵀu₁|", "W", "CK", "NTK", "spectra paper")  # fmt: skip
    return Table(
        "Two-layer networks of linear width on one teacher: what the optimizer decides",
        columns,
        tuple(sorted(rows, key=lambda row: str(row["case"]))),
        NOTES,
        {"setting": setting.__dict__, "runs": {key: kept[key] for key in kept.rows}},
    )


def measured(name: str, case: Case, seed: int, setting: Setting, kept: Kept, options: Options) -> Row:
    """One run: from the record where it is finished, else computed, its spectra beside the record."""
    key = f"{name}, seed {seed}"
    file = None if kept.path is None else kept.path.with_name(f"{kept.name}-{name}-{seed}.pt")
    if key in kept:
        spectra = {} if file is None or not file.exists() else torch.load(file, weights_only=True)
    else:
        row, spectra = run_case(case, seed, setting, options)
        if file is not None and spectra:
            write(file, partial(torch.save, spectra))
        kept[key] = row
    return {**kept[key], "kinds": kinds(spectra)}


def run_case(case: Case, seed: int, setting: Setting, options: Options) -> tuple[Row, dict[str, dict[str, Tensor]]]:
    """Numbers for the record, and the eigenvalues before and after training."""
    setting = setting if case.noise is None else replace(setting, noise=case.noise)
    net, data = setting.draw(seed, torch.float64 if case.optimizer is None else torch.float32)
    if case.optimizer is None:
        found = lazy(net, data)
        return {"r2": found.r2, "error": found.error}, {}
    optimizer = replace(case.optimizer, seed=seed)
    try:
        run = train_two_layer(
            net, data, optimizer, until=setting.until, epochs=setting.epochs, progress=options.progress
        )
    except DidNotConverge as e:
        if not isinstance(e.solution, Learned):
            raise
        return _numbers(e.solution), {}
    aligned = alignments(run.network, data)
    row = {**_numbers(run), "feature": aligned.feature, "labels": dict(aligned.labels)}
    row |= {"kta": dict(aligned.kta), "largest": dict(aligned.largest)}
    before, after = net.spectra(data.x), run.network.spectra(data.x)
    return row, {m: {"initial": before[m].float(), "trained": after[m].float()} for m in MATRICES}


def _numbers(run: Learned) -> Row:
    """What there is to say of every training; of one that diverged R² is no number."""
    loss = float(run.loss[-1])
    known = loss < 1e12
    r2, error = (run.r2, run.error) if known else (math.nan, math.nan)
    return {
        "r2": r2,
        "error": error,
        "epochs": len(run.loss),
        "loss": loss,
        "reached": run.reached,
        "feature": math.nan,
    }


def kinds(spectra: dict[str, dict[str, Tensor]]) -> dict[str, str]:
    """The classifier's word for each matrix."""
    return {m: classify(pair["trained"].double(), pair["initial"].double()).kind for m, pair in spectra.items()}


def table8_row(name: str, case: Case, runs: Sequence[Row]) -> Row:
    """One row: means over seeds beside what was published."""
    o = case.optimizer
    row: Row = {
        "case": name,
        "optimizer": "" if o is None else {"gd": "GD", "sgd": "SGD", "adam": "Adam", "adagrad": "AdaGrad"}[o.method],
        "η": "" if o is None else f"{o.lr:g}",
        "batch": "" if o is None else str(o.batch or "all"),
        "seeds": len(runs),
        "R²": mean([run["r2"] for run in runs]),
        "R² paper": case.published[0],
        "test error": mean([run["error"] for run in runs]),
        "test error paper": case.published[1],
        "spectra paper": case.published[2],
    }
    if o is None:
        return row
    for matrix, title in zip(MATRICES, ("W", "CK", "NTK"), strict=True):
        found = Counter(run["kinds"].get(matrix, "diverged" if run["r2"] != run["r2"] else "not kept") for run in runs)
        row[title] = ", ".join(f"{kind} ×{count}" for kind, count in found.most_common())
    epochs = [run["epochs"] for run in runs]
    low, high = min(epochs), max(epochs)
    short = "" if all(run["reached"] for run in runs) else " (not reached)"
    row["epochs"] = (str(low) if low == high else f"{low}–{high}") + short
    row["|βᵀu₁|"] = mean([run["feature"] for run in runs])
    return row
