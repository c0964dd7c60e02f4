"""What `learned_gpu` brought back, as benchmarks/results/h200/*.json and the pictures of docs/tasks/learned.md.

python -m benchmarks.studies.learned_results FOLDER   # the unpacked learned_gpu.tar.gz
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image

import tangency as tg
from benchmarks.record import RESULTS, ROOT
from benchmarks.studies.directions import drawn
from tangency.experiments.learned import TITLES

H200 = RESULTS / "h200"
SETS = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
COLOURS = {"network": "C0", "linear": "C1"}


def collected(folder: Path, begins: str, record: str) -> dict[str, Any]:
    """The rows of all parts that ran one experiment, and how each was made."""
    summary = json.loads((folder / "summary.json").read_text())
    found: dict[str, Any] = {"parts": {}, "runs": {}}
    for path in sorted(folder.glob(f"{begins}*/{record}.json")):
        part, kept = path.parent.name, json.loads(path.read_text())
        found["runs"] |= kept["rows"]
        epochs = path.parent / "epochs.json"
        more = json.loads(epochs.read_text()) if epochs.exists() else {}
        found["parts"][part] = {"spec": kept["spec"], **summary["parts"].get(part, {}), **more}
    steps = json.loads((folder / "steps.json").read_text())
    beside = {key: steps[key] for key in ("gpu", "torch", "python", "tangency")}
    return {**found, **beside, "multi-process service": summary["multi-process service"]}


def curves(runs: dict[str, Any]) -> Figure:
    """Test accuracy over the index: a panel for each set and network, dashed lines for the labels."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for i, where in enumerate(SETS):
        for j, name in enumerate(("mlp", "lenet")):
            axis = axes[i, j]
            for kind, colour in COLOURS.items():
                points = {}
                for key, row in runs.items():
                    words = key.split(", ")
                    if words[:2] == [where, name] and words[-1] == kind and row["accuracy"] is not None:
                        points[words[2]] = 100 * row["accuracy"]
                if "labels" in points:
                    axis.axhline(
                        points.pop("labels"), color=colour, linestyle="--", linewidth=1, label=f"{kind}, labels"
                    )
                indices = sorted(map(int, points))
                axis.plot(indices, [points[str(k)] for k in indices], "o-", color=colour, label=kind)
            axis.set(title=f"{SETS[where]}, {TITLES[name]}", xscale="log")
    for axis in axes[1]:
        axis.set_xlabel("index of the eigenfunction")
    for axis in axes[:, 0]:
        axis.set_ylabel("test accuracy, %")
    axes[0, 0].legend(fontsize=8)
    return figure


def saved(figure: Figure, name: str) -> None:
    """As a PNG of few colours in the documentation's assets."""
    path = ROOT / "docs" / "assets" / name
    figure.savefig(path, dpi=110)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128)
    small.save(path, optimize=True)


def directions(folder: Path) -> dict[str, tg.studies.Anisotropy]:
    """The first directions of each network, as they were kept."""
    found = {}
    for name in ("lenet", "resnet18"):
        kept = torch.load(folder / f"anisotropy-{name}" / f"anisotropy-{name}.pt", weights_only=True)
        found[name] = tg.studies.Anisotropy(kept["values"][:10], kept["directions"], 0.0, ())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    records = {"eigenfunctions": "eigenfunctions", "energy": "energy-table1", "anisotropy": "anisotropy"}
    files = {"eigenfunctions": "eigenfunctions", "energy": "energy_table1", "anisotropy": "anisotropy"}
    found = {begins: collected(folder, begins, record) for begins, record in records.items()}
    for begins, rows in found.items():
        (H200 / f"{files[begins]}.json").write_text(json.dumps(rows, indent=1) + "\n")
    for name, to in (("monitor", "monitor"), ("steps", "recorded_steps")):
        if (folder / f"{name}.json").exists():
            (H200 / f"{to}.json").write_text((folder / f"{name}.json").read_text())
    saved(curves(found["eigenfunctions"]["runs"]), "eigenfunctions.png")
    saved(drawn(directions(folder)), "anisotropy.png")


if __name__ == "__main__":
    main()
