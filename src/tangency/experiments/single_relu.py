"""Yehudai and Shamir 2019: one ReLU unit with ‖w*‖ = d³, learned by gradient descent and by kernel machines, over d."""

from ..studies.single_unit import single_unit
from .table import Experiment, Kept, Options, Row, Table

DIMS, QUICK_DIMS = (2, 4, 8, 16, 32, 64), (2, 8, 16)
SAMPLES, QUICK_SAMPLES = 1000, 200


def reproduce_unit(options: Options) -> Table:
    """A row for each d; the picture in --out."""
    asked = options.learned
    n = asked.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    m = asked.test or (QUICK_SAMPLES if options.quick else 2 * SAMPLES)
    dims = QUICK_DIMS if options.quick else DIMS
    kept = Kept(options, "single-relu", {"samples": n, "test": m, "dims": dims, "seeds": options.seeds})
    found = single_unit(dims, samples=n, test=m, seeds=1 if options.quick else options.seeds, progress=options.progress)
    rows: list[Row] = []
    for k, d in enumerate(dims):
        rows.append({"d": str(d)} | {name: f"{found.median(name)[k]:.1e}" for name in found.errors})
        kept[f"d = {d}"] = {name: list(table[k]) for name, table in found.errors.items()}
    if options.out is not None:
        found.plot().savefig(options.out / "single-relu.png", dpi=110)
    notes = (
        f"Errors: E(f − f*)²/Var f*, medians over seeds; {n} training samples, b* = −‖w*‖; the kernels' reg is the",
        "  best of seven on the test samples. Published: a theorem. Gradient descent learns the unit from polynomially",
        "  many samples; features that do not know it need exponentially many, or exponentially large coefficients.",
    )
    return Table(
        "One ReLU unit, ‖w*‖ = d³", tuple(rows[0]), tuple(rows), notes, {"samples": n, "runs": dict(kept.rows)}
    )


SINGLE_RELU = Experiment(
    "single-relu",
    "Yehudai & Shamir 2019: one large ReLU unit, by gradient descent and by tangent kernels, over the dimension",
    "no files (a minute on one core)",
    reproduce_unit,
    ("samples", "test"),
)
