"""What both worker scripts share: sample selection, timing, memory, reporting. Needs numpy only."""

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REPEATS = 3
BUDGET = 60.0  # seconds of timed runs: three of 20 s or less, fewer of longer ones
SLOW = 90.0  # a warm-up longer than this, where nothing is compiled, is itself taken as the one measurement


@dataclass
class Timing:
    seconds: float
    repeats: int
    warmup_seconds: float
    result: np.ndarray


def sample_indices(total: int, n: int) -> np.ndarray:
    """n of total samples, in ascending order; a smaller choice is always a part of a larger one."""
    return np.sort(np.random.default_rng(0).permutation(total)[:n])


def positions(total: int, n: int, block: int) -> np.ndarray:
    """Where the samples of the smaller choice `block` stand within the choice of `n`."""
    return np.searchsorted(sample_indices(total, n), sample_indices(total, block))


def measure(run: Callable[[], np.ndarray], warm: Callable[[], Any] | None = None) -> Timing:
    """Warm up once (by `warm`, else by `run`, whose first run may then count if slow), then take the best of a few."""
    start = time.perf_counter()
    result = (warm or run)()
    first = time.perf_counter() - start
    if warm is None and first > SLOW:
        return Timing(first, 1, first, result)
    seconds: list[float] = []
    while len(seconds) < REPEATS and (not seconds or sum(seconds) + min(seconds) <= BUDGET):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return Timing(min(seconds), len(seconds), first, result)


def _status(field: str) -> int | None:
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    line = next((row for row in path.read_text(encoding="utf-8").splitlines() if row.startswith(field + ":")), None)
    return int(line.split()[1]) * 1024 if line else None


def peak_rss() -> int:
    """Bytes. Linux's VmHWM where there is one, as ru_maxrss may carry over what the parent held when it forked."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def current_rss() -> int:
    return _status("VmRSS") or peak_rss()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--n", type=int, required=True, help="samples to use")
    parser.add_argument("--data", type=Path, required=True, help=".npz with the weights, inputs and outputs")
    parser.add_argument("--out", type=Path, required=True, help="folder for kernel.npy and report.json")
    return parser


def report(out: Path, timing: Timing, n: int, rss_before: int, **extra: Any) -> None:
    peak = peak_rss()
    np.save(out / "kernel.npy", timing.result)
    content = {
        "n": n,
        "seconds": timing.seconds,
        "repeats": timing.repeats,
        "warmup_seconds": timing.warmup_seconds,
        "peak_rss": peak,
        "rss_before": rss_before,
        **extra,
    }
    (out / "report.json").write_text(json.dumps(content), encoding="utf-8")
