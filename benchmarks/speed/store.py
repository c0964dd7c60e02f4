"""What the store costs, and how fast a Gram on disk is multiplied: on this machine's CPU and disk.

    python -m benchmarks.speed.store [--out benchmarks/results/store.json] [--rows 60000] [--folder DIR]

Overhead: the same job (kernel, samples, tile, budget) in memory and into a store, in turn, best of 15, ratio.
Product: a store of ROWS x ROWS float32 made of random tiles, `gram @ v` against reading the same files in order without
looking at them; before each pass the page cache is dropped (needs root; otherwise both are warm, and the result says
so).
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import tangency as tg
from benchmarks.record import RESULTS, save
from tangency.gram.manifest import Witness, manifest
from tangency.gram.plan import TilePlan
from tangency.gram.store import Store


def clock(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def overhead(folder: Path) -> dict[str, Any]:
    """Seconds in memory and into a store, for a quick kernel (the worst case for a store) and a slow one."""
    torch.manual_seed(0)
    jobs = {
        "mlp 784-100-100-10, n=6000": (tg.models.mlp([784, 100, 100, 10]), torch.randn(6000, 784)),
        "lenet5, n=1500": (tg.models.lenet5(10).eval(), torch.randn(1500, 3, 32, 32)),
    }
    found: dict[str, Any] = {}
    for name, (model, x) in jobs.items():
        kernel = tg.trace_ntk(model)
        times: list[list[float]] = [[], []]
        for _ in range(15):
            times[0].append(clock(partial(tg.compute, kernel, x, progress=False)))
            shutil.rmtree(folder / "job", ignore_errors=True)
            into = str(folder / "job")
            times[1].append(clock(partial(tg.compute, kernel, x, store=into, progress=False)))
        best, middle = [min(t) for t in times], [median(t) for t in times]
        found[name] = {
            "memory_s": best[0],
            "store_s": best[1],
            "overhead": best[1] / best[0] - 1,
            "overhead_of_medians": middle[1] / middle[0] - 1,
        }
        print(name, found[name], flush=True)
    shutil.rmtree(folder / "job", ignore_errors=True)
    return found


def drop_caches() -> bool:
    done = subprocess.run("sync; echo 3 > /proc/sys/vm/drop_caches", shell=True, check=False, capture_output=True)
    return done.returncode == 0


def product(folder: Path, rows: int, tile: int = 2048) -> dict[str, Any]:
    path = folder / "gram"
    shutil.rmtree(path, ignore_errors=True)
    cut = TilePlan(rows, rows, True, tile, 1, 1)
    nothing: Witness = {"entries": {}, "outputs": {}, "code": {}}
    said = manifest({"kernel": "random numbers"}, {}, torch.Size([rows, rows]), torch.float32, cut, nothing)
    store = Store.planned(str(path), said)
    store.begin()
    some = np.random.default_rng(0).standard_normal((tile, tile), dtype=np.float32)
    for i, j in cut.tiles():
        high, wide = (b.stop - b.start for b in (cut.block(i), cut.block(j, 1)))
        store.write(i, j, some[:high, :wide])
    files = sorted(path.glob("c/*/*"), key=lambda p: (int(p.parent.name), int(p.name)))
    size = sum(p.stat().st_size for p in files)
    gram, v = tg.open_gram(str(path)), torch.randn(rows)
    buffer = bytearray(max(p.stat().st_size for p in files))

    def read() -> None:
        for p in files:
            with open(p, "rb", buffering=0) as f:
                f.readinto(buffer)

    times: dict[str, list[float]] = {"read": [], "product": []}
    cold = True
    for _ in range(2):
        for name, f in (("read", read), ("product", lambda: gram @ v)):
            cold = drop_caches() and cold
            times[name].append(clock(f))
            print(name, f"{size / 1e9 / times[name][-1]:.2f} GB/s", flush=True)
    shutil.rmtree(path)
    best = {k: size / 1e9 / min(t) for k, t in times.items()}
    return {
        "rows": rows,
        "tile": tile,
        "GB": size / 1e9,
        "cold_cache": cold,
        "disk_GB_per_s": best["read"],
        "product_GB_per_s": best["product"],
        "ratio": best["product"] / best["read"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / "store.json")
    parser.add_argument("--rows", type=int, default=60000)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = {"overhead": overhead(Path(folder)), "product": product(Path(folder), args.rows)}
    print(json.dumps(result, indent=2))
    save(result, args.out, "python -m benchmarks.speed.store")


if __name__ == "__main__":
    main()
