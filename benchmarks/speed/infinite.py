"""Infinite-width NTKs on the CPU: tangency beside neural-tangents (jitted, compilation not counted), both in float64.

    .venv/bin/python -m benchmarks.speed.infinite [--cases fc,flat8,…] [--repeats 5]

Each runs in a process of its own on the same inputs; time is the least over repeats, memory the process's peak while
the kernel is computed less what it held before (inputs, compiled code). With the extra "compiled" (numba) images take
the compiled recursion; the record says whether it was there. Writes results/infinite.json and prints a table. The first
run makes .venv-peers.
"""

import argparse
import json
import sys

import numpy as np

from benchmarks.peers.workers import Row, peers_python, peers_versions, work
from benchmarks.record import RESULTS, save

CASES = {
    "fc": "FC, 3 hidden ReLU layers, N = 5000, d = 784",
    "flat8": "CNN, 5 conv layers + Flatten, 8×8×3, N = 32",
    "pool8": "CNN, 5 conv layers + GlobalAvgPool, 8×8×3, N = 32",
    "flat16": "CNN, 5 conv layers + Flatten, 16×16×3, N = 32",
    "pool16": "CNN, 5 conv layers + GlobalAvgPool, 16×16×3, N = 32",
    "pool16d10": "CNN, 10 conv layers + GlobalAvgPool, 16×16×3, N = 6",
    "pool32d5": "CNN, 5 conv layers + GlobalAvgPool, 32×32×3, N = 6",
    "pool32d10": "CNN, 10 conv layers + GlobalAvgPool, 32×32×3, N = 6",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows: list[Row] = []
    for case in args.cases.split(","):
        options = ("--case", case, "--repeats", str(args.repeats))
        ours = work(sys.executable, "run_infinite", *options)
        theirs = work(peers_python(), "run_infinite_nt", *options)
        rows.append(row(case, ours, theirs))
        print(line(rows[-1]), flush=True)
    save({"rows": rows, "peers": peers_versions(), "dtype": "float64"}, RESULTS / "infinite.json", " ".join(sys.argv))


def row(case: str, ours: Row, theirs: Row) -> Row:
    found: Row = {"case": case, "what": CASES[case]}
    for name, one in (("tangency", ours), ("neural-tangents", theirs)):
        found[name] = {k: v for k, v in one.items() if k != "kernel"}
    if "error" in ours or "error" in theirs:
        return found
    gap = np.abs(ours["kernel"] - theirs["kernel"])
    off = gap[~np.eye(len(gap), dtype=bool)].max() / np.abs(theirs["kernel"]).max()
    return found | {
        "times faster": theirs["seconds"] / ours["seconds"],
        "memory ratio": theirs["bytes"] / max(1, ours["bytes"]),
        "largest difference": float(off),
    }


def line(found: Row) -> str:
    return json.dumps(found, ensure_ascii=False)


if __name__ == "__main__":
    main()
