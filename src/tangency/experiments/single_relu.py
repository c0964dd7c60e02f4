"""Yehudai and Shamir 2019: one ReLU unit with ‖w*‖ = d³, learned by gradient descent and by kernel machines, over d."""

from statistics import median

from ..studies.conjugate_pictures import draw_unit
from ..studies.single_unit import single_unit
from .table import Kept, Options, Row, Table, picture

DIMS, QUICK_DIMS = (2, 4, 8, 16, 32, 64), (2, 8, 16)
SAMPLES, QUICK_SAMPLES = 1000, 200


def reproduce_unit(options: Options) -> Table:
    """A row for each d; the picture in --out."""
    asked = options.learned
    n = asked.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    m = asked.test or (QUICK_SAMPLES if options.quick else 2 * SAMPLES)
    seeds = 1 if options.quick else options.seeds
    kept = Kept(options, "single-relu", {"samples": n, "test": m, "seeds": seeds})
    rows: list[Row] = []
    for d in QUICK_DIMS if options.quick else DIMS:
        if f"{d}" not in kept:
            found = single_unit((d,), samples=n, test=m, seeds=seeds, progress=options.progress)
            kept[f"{d}"] = {name: list(table[0]) for name, table in found.errors.items()}
        rows.append({"d": str(d)} | {name: f"{median(errors):.1e}" for name, errors in kept[f"{d}"].items()})
    if options.out is not None:
        dims = [int(row["d"]) for row in rows]
        errors = {name: [kept[str(d)][name] for d in dims] for name in rows[0] if name != "d"}
        picture(draw_unit(dims, errors), options.out / "single-relu.png")
    notes = (
        f"Errors: E(f − f*)²/Var f*, medians over seeds; {n} training samples, b* = −‖w*‖; the kernels' reg is the",
        "  best of seven on the test samples. Published: a theorem. Gradient descent learns the unit from polynomially",
        "  many samples; features that do not know it need exponentially many, or exponentially large coefficients.",
    )
    facts = {"samples": n, "runs": dict(kept.rows)}
    return Table("One ReLU unit, ‖w*‖ = d³", tuple(rows[0]), tuple(rows), notes, facts)
