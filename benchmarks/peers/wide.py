"""What both workers of benchmarks/speed/infinite.py share: inputs, options, time, memory. Needs numpy only."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SPENT = 2.0  # seconds: cases of milliseconds are repeated until so many have gone


def form(case: str) -> tuple[int, int, int]:
    """Images' size, convolutions and images of a case: "pool16" (5 convolutions, 32 images), "pool32d10" (6 images)."""
    size, _, depth = case[4:].partition("d")
    return int(size), int(depth or 5), 6 if depth else 32


def inputs(case: str) -> np.ndarray:
    """Vectors, or images [n, channels, height, width]."""
    if case == "fc":
        return np.random.default_rng(0).standard_normal((5000, 784))
    size, _, count = form(case)
    return np.random.default_rng(0).standard_normal((count, 3, size, size))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def resident(field: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the most since it was reset."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(row for row in lines if row.startswith(field + ":")).split()[1]) * 1024


def measured(run: Callable[[], Any], args: argparse.Namespace, **more: Any) -> None:
    """Time `run`, warm, and its peak memory; write report and kernel."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    times: list[float] = []
    before, k = resident("VmRSS"), None
    while len(times) < args.repeats or sum(times) < SPENT:
        k = None
        start = time.perf_counter()
        k = run()
        times.append(time.perf_counter() - start)
    report = {"seconds": min(times), "all": times, "bytes": resident("VmHWM") - before, **more}
    (args.out / "report.json").write_text(json.dumps(report), encoding="utf-8")
    np.save(args.out / "kernel.npy", np.asarray(k))
