"""Infinite-width NTKs on a GPU: seconds, microseconds a pair, memory, and the largest difference to the CPU.

    PYTHONPATH=src python3 -m benchmarks.speed.infinite_gpu --out infinite.json

Needs torch and numpy alone. float64 throughout.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tangency as tg

FEW = 4  # samples whose kernel is compared with the CPU's


def timed(run: Callable[[], Tensor], repeats: int = 3) -> tuple[float, Tensor]:
    k, times = run(), []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        k = run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times), k


def one(name: str, net: nn.Module, x: Tensor) -> dict[str, Any]:
    kernel, n = tg.infinite_ntk(net), len(x)
    torch.cuda.reset_peak_memory_stats()
    seconds, k = timed(lambda: kernel(x))
    exact = kernel(x[:FEW].cpu())
    off = float((k[:FEW, :FEW].cpu() - exact).abs().max() / exact.abs().max())
    pairs = n * (n + 1) / 2
    return {
        "case": name, "n": n, "seconds": seconds, "microseconds a pair": 1e6 * seconds / pairs,
        "GiB": torch.cuda.max_memory_allocated() / 2**30, "largest difference to the CPU": off,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    dense = nn.Sequential(*(layer for i in (784, 8, 8) for layer in (nn.Linear(i, 8), nn.ReLU())), nn.Linear(8, 1))
    rows = [one("FC, 3 hidden ReLU layers, d = 784", dense, torch.randn(n, 784, device="cuda")) for n in (5000, 20000)]
    for size, n in ((8, 256), (16, 128), (32, 16)):
        convs = [layer for i in (3, 8, 8, 8, 8) for layer in (nn.Conv2d(i, 8, 3, padding=1), nn.ReLU())]
        flat = nn.Sequential(*convs, nn.Flatten(), nn.Linear(8 * size * size, 1))
        pool = nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
        x = torch.randn(n, 3, size, size, device="cuda")
        rows.append(one(f"CNN, 5 layers + Flatten, {size}×{size}×3", flat, x))
        rows.append(one(f"CNN, 5 layers + GlobalAvgPool, {size}×{size}×3", pool, x))
    for row in rows:
        print(json.dumps(row, ensure_ascii=False), flush=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    command = "PYTHONPATH=src python3 -m benchmarks.speed.infinite_gpu"
    args.out.write_text(
        json.dumps({"rows": rows, "command": command, "tangency": tg.__version__, **about}, indent=1) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
