"""Figures 3 to 11 of Qadeer et al. 2023 in one file, and what the penalty of the logistic fits does.

    python -m benchmarks.studies.conjugate --out FOLDER

Runs what `tangency reproduce conjugate-fig3` to `-fig11` and `single-relu` would, with --out FOLDER, where what is
finished is not done again; then both class boundaries with penalties from 1e-2 to 1e-8, three networks of each kind.
The single unit at d = 16 is done with 250, 1000 and 4000 samples. Writes results/conjugate.json.
"""

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

import tangency as tg
from benchmarks.record import RESULTS, save
from tangency.experiments import EXPERIMENTS
from tangency.experiments.table import Options
from tangency.studies import BOUNDARIES
from tangency.studies.conjugate import classification_moment
from tangency.studies.grids import RECTANGLE

SEEDS = {**{f"conjugate-fig{k}": 10 for k in range(3, 12)}, "conjugate-fig5": 3, "conjugate-fig11": 5, "single-relu": 3}
REGS = (1e-2, 1e-4, 1e-6, 1e-8)


def penalties(activation: type[nn.Module], name: str) -> list[dict[str, Any]]:
    """Medians over three networks of cross-entropy and accuracy, for each penalty."""
    moments: dict[float, list[Any]] = {reg: [] for reg in REGS}
    for seed in range(3):
        net = tg.models.initialized(lambda: tg.models.mlp([2, 128, 128, 2], activation), seed)
        trained = tg.studies.conjugate_classification(net, BOUNDARIES[name], progress=False).network
        labels = BOUNDARIES[name](RECTANGLE.test.nodes()) > 0
        for reg in REGS:
            moments[reg].append(classification_moment(trained, labels, RECTANGLE, reg, 0))
    return [
        {"activation": activation.__name__, "task": name, "reg": reg}
        | {k: median(m.test[k] for m in found) for k in found[0].test}
        | {f"{k} %": 100 * median(m.accuracy[k] for m in found) for k in found[0].test}
        | {"violations": sum(m.bounds.violations for m in found)}
        for reg, found in moments.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    figures = {}
    for name, seeds in SEEDS.items():
        table = EXPERIMENTS[name].run(Options(out=out, seeds=seeds, where="cpu", progress=False))
        print(table.table(), flush=True)
        more = {"bounds": table.facts["bounds"]} if "bounds" in table.facts else {}
        figures[name] = {"title": table.title, "seeds": seeds, "rows": table.rows, "notes": table.notes} | more
    regs = [row for kind in (nn.Tanh, nn.ReLU) for name in BOUNDARIES for row in penalties(kind, name)]
    for row in regs:
        print(row, flush=True)
    units = {}
    for n in (250, 1000, 4000):
        found = tg.studies.single_unit([16], samples=n, seeds=1, progress=False)
        units[n] = {name: found.median(name)[0] for name in found.errors}
        print(n, units[n], flush=True)
    command = "python -m benchmarks.studies.conjugate --out FOLDER"
    save(
        {"figures": figures, "penalties": regs, "unit of 16 dimensions, by samples": units},
        RESULTS / "conjugate.json",
        command,
    )


if __name__ == "__main__":
    main()
