"""The pictures of the docs on infinite convolutional kernels, from what runs on the H200 left: speed, learning curves.

    python -m benchmarks.studies.cntk_curve

Reads results/h200/cntk.json (benchmarks/speed/cntk_gpu.py) and results/h200/cntk_curve*.json (what `tangency reproduce
cntk --samples 5000 --test 2000 --device cuda --out DIR` left in DIR); writes docs/assets/cntk.png.
"""

import json
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.record import RESULTS, ROOT

Row = dict[str, Any]
BARS = {"10 convolutions, pooling": "10 convolutions", "21 convolutions, pooling": "21 convolutions"}


def draw_speed(ax: Axes, result: dict[str, list[Row]]) -> None:
    """Microseconds a pair beside neural-tangents'."""
    ours = {row["network"]: row["µs a pair"] for row in result["speed"] if row["dtype"] == "float32"}
    theirs = {row["depth"]: row["us_per_pair"] for row in result["neural-tangents"] if row["end"] == "pool"}
    bars = [(f"neural-tangents, {depth} convolutions", each, "#999999") for depth, each in theirs.items()]
    bars += [(f"tangency, {short}", ours[name], "#0072B2") for name, short in BARS.items()]
    bars += [(f"tangency, {name}", ours[name], "#0072B2") for name in ("Myrtle-10", "Myrtle-5")]
    for k, (_, each, color) in enumerate(bars):
        ax.barh(-k, each, color=color)
        ax.text(each * 1.1, -k, f"{each:.3g} µs", va="center", fontsize=9)
    ax.set_yticks([-k for k in range(len(bars))], [name for name, _, _ in bars])
    ax.set(xscale="log", xlim=(3, 4000), xlabel="a pair of 32×32 images, one H200", title="Exact NTK, global pooling")


def draw_curves(ax: Axes) -> None:
    """Accuracy on CIFAR-10 by the number of training images."""
    for path, color in zip(sorted((RESULTS / "h200").glob("cntk_curve*.json")), ("#0072B2", "#D55E00"), strict=False):
        table = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in table["rows"] if "accuracy %" in row]
        sizes, right = [row["training images"] for row in rows], [float(row["accuracy %"]) for row in rows]
        ax.errorbar(sizes, right, [float(row["± %"]) for row in rows], fmt="o-", color=color, label=table["network"])
        for row in table["rows"]:
            if row.get("published %"):
                ax.plot(row["training images"], float(row["published %"]), "*", ms=12, color=color)
    ax.plot([], [], "*", ms=12, color="#999999", label="published, all 50,000")
    ax.set(xscale="log", xlabel="training images", ylabel="test images right, %", title="Kernel regression on CIFAR-10")
    ax.legend()


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), layout="constrained")
    draw_speed(left, json.loads((RESULTS / "h200" / "cntk.json").read_text(encoding="utf-8")))
    draw_curves(right)
    figure.savefig(ROOT / "docs" / "assets" / "cntk.png", dpi=110)


if __name__ == "__main__":
    main()
