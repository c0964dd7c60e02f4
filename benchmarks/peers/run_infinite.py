"""One case of benchmarks/infinite.py by tangency."""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import tangency as tg


def network(case: str) -> nn.Module:
    if case == "fc":
        hidden = [layer for i in (784, 8, 8) for layer in (nn.Linear(i, 8), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(8, 1))
    size = int(case[4:])
    convs = [layer for i in (3, 8, 8, 8, 8) for layer in (nn.Conv2d(i, 8, 3, padding=1), nn.ReLU())]
    if case.startswith("flat"):
        return nn.Sequential(*convs, nn.Flatten(), nn.Linear(8 * size * size, 1))
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))


def inputs(case: str) -> np.ndarray:
    shape = (5000, 784) if case == "fc" else (32, 3, int(case[4:]), int(case[4:]))
    return np.random.default_rng(0).standard_normal(shape)


def resident(field: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(row for row in lines if row.startswith(field + ":")).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    x, kernel = torch.from_numpy(inputs(args.case)), tg.infinite_ntk(network(args.case), w_var=2.0, b_var=0.0)
    kernel(x[:2])  # what is loaded at the first call
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, times, k = resident("VmRSS"), [], None
    for _ in range(args.repeats):
        k = None
        start = time.perf_counter()
        k = kernel(x)
        times.append(time.perf_counter() - start)
    report = {
        "seconds": min(times),
        "all": times,
        "bytes": resident("VmHWM") - before,
        "threads": torch.get_num_threads(),
    }
    (args.out / "report.json").write_text(json.dumps(report))
    np.save(args.out / "kernel.npy", k.numpy())


if __name__ == "__main__":
    main()
