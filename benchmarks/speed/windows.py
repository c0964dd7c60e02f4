"""Functions of windows: seconds and standard error of kernels whose moments are drawn over windows of positions.

    PYTHONPATH=TREE/src:. python -m benchmarks.speed.windows --label NAME [--cases inverted,…]

Times the tangency that PYTHONPATH gives, on one core, and adds a row for each case under this label to
results/windows.json. To compare two trees, run both in turn: on a shared machine only ratios tell.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, save

PATH = RESULTS / "windows.json"
WIDTH, DRAWS = 8, 256


class Inverted(nn.Module):
    """A block of MobileNetV2: 1×1, depthwise 3×3, 1×1, added to its input where the grid stays."""

    def __init__(self, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stay = stride == 1
        self.layers = nn.Sequential(
            *normed(nn.Conv2d(WIDTH, WIDTH, 1, bias=False)), activation(),
            *normed(nn.Conv2d(WIDTH, WIDTH, 3, stride, 1, groups=WIDTH, bias=False)), activation(),
            *normed(nn.Conv2d(WIDTH, WIDTH, 1, bias=False)),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        after: Tensor = self.layers(x)
        return x + after if self.stay else after


def normed(conv: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A convolution and its norm."""
    return conv, nn.BatchNorm2d(WIDTH)


def mobile(activation: Callable[[], nn.Module]) -> nn.Module:
    """A stem and six blocks, from 16×16 positions to 2×2."""
    stem = nn.Conv2d(3, WIDTH, 3, 2, 1, bias=False)
    blocks = [Inverted(stride, activation) for stride in (1, 2, 1, 2, 1, 2)]
    return nn.Sequential(
        *normed(stem), activation(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)
    )


def pooled() -> nn.Module:
    """ResNet's stem: max pooling of 16×16 positions."""
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10),
    )  # fmt: skip


def series() -> nn.Module:
    """Small windows of many samples."""
    return nn.Sequential(nn.Conv1d(3, WIDTH, 3), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(3 * WIDTH, 1))


def samples(*shape: int) -> Tensor:
    """Noise."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


CASES: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "inverted": (
        "six blocks of MobileNetV2, ReLU6, 2 × 32×32",
        lambda: mobile(nn.ReLU6),
        lambda: samples(2, 3, 32, 32),
    ),
    "inverted relu": ("the same with ReLU", lambda: mobile(nn.ReLU), lambda: samples(2, 3, 32, 32)),
    "max": ("ResNet's stem, 2 × 32×32", pooled, lambda: samples(2, 3, 32, 32)),
    "series": ("max pooling of 8 positions, 40 samples", series, lambda: samples(40, 3, 8)),
}


def measured(make: Callable[[], nn.Module], x: Tensor) -> dict[str, Any]:
    """Seconds of the processor for a second call, and the standard error relative to the largest entry."""
    torch.manual_seed(0)
    kernel = tg.infinite_ntk(make().eval(), samples=DRAWS)
    kernel(x[:1])
    started = time.process_time()
    value = kernel(x)
    seconds = time.process_time() - started
    error = kernel.error(x, repeats=2)
    return {"seconds": round(seconds, 3), "relative error": float(error.max() / value.abs().max())}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))["rows"] if PATH.exists() else []
    for case in options.cases.split(","):
        what, make, x = CASES[case]
        rows.append({"label": options.label, "case": case, "what": what, "draws": DRAWS, **measured(make, x())})
        print(json.dumps(rows[-1]), flush=True)
    save({"rows": rows}, PATH, " ".join(sys.argv))


if __name__ == "__main__":
    main()
