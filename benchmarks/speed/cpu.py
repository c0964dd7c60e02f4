"""Exact trace NTKs on the CPU: tangency beside torch.func and neural-tangents, each in a process of its own.

Results go to benchmarks/results/cpu.json, where a run of some cases or methods replaces only those, and are printed as
a Markdown table. The first run makes the environment of neural-tangents, .venv-peers, from peers/requirements.txt.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers import common
from benchmarks.peers.workers import Row, peers_python, peers_versions, work
from benchmarks.record import RESULTS, ROOT
from benchmarks.speed.cases import CASES, Case, Variant

OUT = RESULTS / "cpu.json"
BLOCK = 16  # samples whose kernel is compared with the reference
PAIRS = "torch.func NTK-vector products"
TORCH = ["tangency", "torch.func jacobian contraction", PAIRS]
NT = {
    "neural-tangents Jacobian contraction": "JACOBIAN_CONTRACTION",
    "neural-tangents NTK-vector products": "NTK_VECTOR_PRODUCTS",
    "neural-tangents structured derivatives": "STRUCTURED_DERIVATIVES",
    "neural-tangents auto": "AUTO",
}
METHODS = [*TORCH, *NT]


def main() -> None:
    args = parse()
    methods = [m for m in METHODS if not args.methods or any(word.lower() in m.lower() for word in args.methods)]
    if any(method in NT for method in methods):
        peers_python()
    results = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() and not args.quick else {"cases": {}}
    results["environment"] = environment()
    for key in args.cases:
        results["cases"][key] = run_case(key, methods, args.quick, results["cases"].get(key, {}).get("methods", {}))
        if not args.quick:
            OUT.parent.mkdir(exist_ok=True)
            OUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results["cases"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="some of %(default)s")
    parser.add_argument("--methods", default="", help="words, comma separated: those methods whose names have one")
    parser.add_argument("--quick", action="store_true", help="16 samples, one variant each; results are not kept")
    args = parser.parse_args()
    args.cases = args.cases.split(",")
    args.methods = [word for word in args.methods.split(",") if word]
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    return args


def environment() -> Row:
    cpu = [line.split(":")[1].strip() for line in cpuinfo() if line.startswith("model name")]
    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy")} | peers_versions(),
    } | stamp()


def cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def stamp() -> Row:
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip() or None,
        "command": " ".join(["python", *sys.argv]),
        "load": os.getloadavg()[0],  # of the minute before; above the number of cores, something else was running
    }


def run_case(key: str, methods: list[str], quick: bool, earlier: dict[str, Row]) -> Row:
    case, rows = CASES[key], dict(earlier)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        write_data(case, data)
        reference = run_torch(key, "reference", BLOCK, data)
        if "error" in reference:
            raise RuntimeError(f"no reference kernel for {key}: {reference['error']}")
        own = run_torch(key, "tangency float64", BLOCK, data)
        for method in methods:
            attempts = []
            for attempt in run_method(key, method, data, quick):
                attempts.append(finish(attempt, case, reference["kernel"], scale=not quick))
                print(f"{key}, {method}: {brief(attempts[-1])}", file=sys.stderr, flush=True)
            rows[method] = best(attempts) | stamp()
    return {
        "title": case.title,
        "n": case.n,
        "reference": f"torch.func vmap(jacrev) in float64, on {BLOCK} random samples",
        "tangency_float64": finish(own, case, reference["kernel"], scale=False),
        "methods": {method: rows[method] for method in METHODS if method in rows},
    }


def write_data(case: Case, path: Path) -> None:
    model, x = case.model(), case.inputs()
    with torch.no_grad():
        y = model(x[:BLOCK])
    state = {f"state/{name}": value.numpy() for name, value in model.state_dict().items()}
    np.savez(path, x=x.numpy(), y=y.numpy(), **state)


def run_torch(key: str, method: str, n: int, data: Path) -> Row:
    return work(sys.executable, "run_torch", "--case", key, "--method", method, "--n", str(n), "--data", data)


def run_nt(key: str, method: str, variant: Variant, n: int, data: Path) -> Row:
    options = ["--case", key, "--method", NT[method], "--n", str(n), "--batch", str(variant.batch), "--data", str(data)]
    flags = ["--vmap"] if variant.vmap else []
    return work(peers_python(), "run_nt", *options, *flags) | {"variant": str(variant)}


def run_method(key: str, method: str, data: Path, quick: bool) -> Iterator[Row]:
    """The method's kernel, in each of the variants to try."""
    case = CASES[key]
    if method not in NT:
        n = case.pairs_n if method == PAIRS else case.n
        yield run_torch(key, method, min(n, BLOCK) if quick else n, data)
        return
    for variant in [Variant(vmap=True)] if quick else case.variants[NT[method]]:
        yield run_nt(key, method, variant, BLOCK if quick else variant.n or case.n, data)


def finish(row: Row, case: Case, reference: np.ndarray, scale: bool) -> Row:
    """The row with its kernel replaced by its errors, and its time brought to the case's number of samples."""
    if "error" in row:
        return row
    kernel, n = row.pop("kernel"), row["n"]
    size = min(n, BLOCK)
    here, there = common.positions(case.n, n, size), common.positions(case.n, BLOCK, size)
    expected = reference[np.ix_(there, there)]
    difference = kernel[np.ix_(here, here)].astype(np.float64) - expected
    return row | {
        "extrapolated": scale and n < case.n,
        "seconds_at_n": row["seconds"] * ((case.n / n) ** 2 if scale else 1),
        "error_frobenius": float(np.linalg.norm(difference) / np.linalg.norm(expected)),
        "error_max": float(np.abs(difference).max() / np.abs(expected).max()),
    }


def best(attempts: list[Row]) -> Row:
    """The fastest attempt, with the others noted; where all failed, the first."""
    chosen = min(attempts, key=lambda row: row.get("seconds_at_n", np.inf))
    others = [{k: row[k] for k in ("variant", "n", "seconds", "error") if k in row} for row in attempts]
    return chosen | ({"tried": others} if len(attempts) > 1 else {})


def brief(row: Row) -> str:
    outcome = row.get("error") or f"{row['seconds']:.3g} s at N={row['n']}, {row['peak_rss'] / 2**30:.1f} GiB"
    return f"{row['variant']}: {outcome}" if "variant" in row else outcome


def table(cases: dict[str, Row]) -> str:
    lines = ["| case | method | N | seconds | ratio | peak RSS | error |", "|---|---|---:|---:|---:|---:|---:|"]
    for case in (cases[key] for key in CASES if key in cases):
        own = case["methods"].get("tangency", {}).get("seconds_at_n")
        for method, row in case["methods"].items():
            lines.append(f"| {case['title']} | {method} | {' | '.join(cells(row, case['n'], own))} |")
    return "\n".join([*lines, "", "Ratio: time over tangency's. ~: measured at the N shown, scaled by its square."])


def cells(row: Row, n: int, own: float | None) -> list[str]:
    if "error" in row:
        return [str(n), row["error"].replace("|", "/"), "", "", ""]
    ratio = f"{row['seconds_at_n'] / own:.3g}" if own else ""
    seconds = f"{row['seconds']:.3g}" + (f" (~{row['seconds_at_n']:.3g} at {n})" if row["extrapolated"] else "")
    return [str(row["n"]), seconds, ratio, f"{row['peak_rss'] / 2**30:.2f} GiB", f"{row['error_frobenius']:.1e}"]


if __name__ == "__main__":
    main()
