"""Large systems: a Gram on disk within a memory budget on a CPU, and 60,000 rows on one GPU.

    python -m benchmarks.speed.solve cpu --data DIR [--rows 20000]       # Fashion-MNIST's IDX files in DIR
    python -m benchmarks.speed.solve steps --data DIR                    # conjugate gradients by preconditioner
    PYTHONPATH=src python3 -m benchmarks.speed.solve gpu --store STORE --data DIR   # STORE: what scale.py made

cpu: the trace NTK of an MLP over ROWS images of Fashion-MNIST goes to disk (float32); then (K + reg·I) a = y for ten
one-hot columns is solved in a process of its own for each method, and its peak resident memory is that of the process.
gpu: the Gram of `benchmarks/speed/scale.py` (ResNet18, CIFAR-10) is read onto the GPU; Cholesky, the 1000 largest
eigenpairs and all eigenpairs, each with its residual. reg is a fraction of the mean of the diagonal: the smallest of
0.01, 0.1, 1 for which K + reg·I is positive definite (K has errors of 16-bit factors).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tangency as tg
from benchmarks.record import RESULTS, fashion, save
from tangency.gram.gram import DenseGram
from tangency.gram.store import StoredGram


def images(args: argparse.Namespace, most: int = 60000) -> tuple[Tensor, Tensor]:
    x, labels = fashion(args.data)
    n = min(args.rows, most)
    return x[:n].flatten(1), labels[:n]


def one_hot(labels: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(labels, 10).double() - 0.1


METHODS = {
    "Cholesky on disk": lambda: tg.linalg.Cholesky(scratch=tempfile.gettempdir(), panel=1024),
    "Cholesky, memory 4GiB": lambda: tg.linalg.Auto(memory="4GiB"),
    "CG, memory 1GiB": lambda: tg.linalg.Auto(memory="1GiB"),
}


def peak() -> float:
    """GiB, of this process alone."""
    return int(next(v for v in open("/proc/self/status", encoding="utf-8") if v.startswith("VmHWM")).split()[1]) / 2**20


def one(name: str, store: str, labels: Path, fraction: float) -> dict[str, Any]:
    """One method, in a process of its own."""
    gram, y = tg.open_gram(store), one_hot(torch.from_numpy(np.load(labels)))
    before = peak()
    reg = fraction * float(gram.diag().mean())
    start = time.perf_counter()
    found = tg.linalg.solve(gram, y, reg=reg, solver=METHODS[name](), tol=1e-6)
    seconds = time.perf_counter() - start
    r = gram @ found.value + reg * found.value - y
    return {
        "method": found.solver,
        "steps": found.steps,
        "residual": found.residual,
        "residual_recomputed": float((r.norm(dim=0) / y.norm(dim=0)).max()),
        "reg": f"{fraction:g} of the mean diagonal",
        "seconds": seconds,
        "peak_GiB": peak(),
        "peak_before_GiB": before,
    }


def cpu(args: argparse.Namespace) -> None:
    x, labels = images(args)
    torch.manual_seed(0)
    model = tg.models.mlp([784, 256, 256, 10])
    result: dict[str, Any] = {"rows": args.rows, "kernel": "trace NTK, mlp 784-256-256-10, Fashion-MNIST, float32"}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        start = time.perf_counter()
        gram = tg.compute(tg.trace_ntk(model), x, store=folder + "/gram", memory="2GiB")
        assert isinstance(gram, StoredGram)
        result["gram_s"] = time.perf_counter() - start
        result["disk_GB"] = sum(p.stat().st_size for p in Path(gram.path).rglob("*") if p.is_file()) / 1e9
        np.save(folder + "/labels.npy", labels.numpy())
        for name in METHODS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.speed.solve",
                "one",
                "--store",
                gram.path,
                "--data",
                folder + "/labels.npy",
            ]
            command += ["--method", name, "--fraction", str(args.fraction)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            result[name] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-600:]
            print(name, result[name], flush=True)
    save(result, RESULTS / "solve.json", f"python -m benchmarks.speed.solve cpu --data DIR --fraction {args.fraction}")


def steps(args: argparse.Namespace) -> None:
    """Steps of conjugate gradients by preconditioner, on fewer rows in memory."""
    x, labels = images(args, 4000)
    torch.manual_seed(0)
    gram = tg.compute(tg.trace_ntk(tg.models.mlp([784, 256, 256, 10])), x)
    reg, found = args.fraction * float(gram.diag().mean()), {}
    s = tg.linalg
    for guess in (s.Nystrom(power=0), s.Nystrom(power=1), s.Nystrom(power=2), s.PartialCholesky(252), None):
        start = time.perf_counter()
        done = s.solve(gram, one_hot(labels), reg=reg, solver=s.CG(guess, max_steps=5000), tol=1e-6)
        found[str(guess)] = {"steps": done.steps, "residual": done.residual, "seconds": time.perf_counter() - start}
        print(guess, found[str(guess)], flush=True)
    command = f"python -m benchmarks.speed.solve steps --data DIR --fraction {args.fraction}"
    save({"rows": len(x), "reg": f"{args.fraction:g} of the mean diagonal", "CG": found}, RESULTS / "cg.json", command)


def gpu(args: argparse.Namespace) -> None:
    stored = tg.open_gram(args.store)
    start = time.perf_counter()
    K = torch.empty(stored.shape, device="cuda")
    for rows, columns, tile in stored.tiles():
        K[rows, columns] = tile.cuda()
    torch.cuda.synchronize()
    labels = np.concatenate([np.load(args.data / f"cifar{k}.npy")[:, 0] for k in range(4)])[: len(K)]
    y = one_hot(torch.from_numpy(labels.astype(np.int64))).cuda()
    mean = float(K.diagonal().mean())
    result: dict[str, Any] = {"rows": len(K), "read_s": time.perf_counter() - start, "mean_diagonal": mean}
    print(result, flush=True)
    gram = DenseGram(K, symmetric=True)

    def stage(name: str, f: Any) -> Any:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        try:
            found = f()
            torch.cuda.synchronize()
        except Exception as e:
            print(name, type(e).__name__, str(e)[:500], flush=True)
            result[name] = {"failed": f"{type(e).__name__}: {str(e)[:200]}"}
            return None
        seconds, peak = time.perf_counter() - begin, torch.cuda.max_memory_allocated() / 2**30
        result[name] = {"seconds": seconds, "residual": found.residual, "steps": found.steps, "method": found.solver}
        result[name]["peak_GiB"] = peak
        print(name, result[name], flush=True)
        return found

    for fraction in (0.01, 0.1, 1.0):
        for name, solver in (
            ("Cholesky", tg.linalg.Cholesky()),
            ("Cholesky32", tg.linalg.Cholesky(dtype=torch.float32)),
        ):
            reg = fraction * mean
            label = f"{name}, reg {fraction:g} of the mean diagonal"
            stage(label, lambda reg=reg, solver=solver: tg.linalg.solve(gram, y, reg=reg, solver=solver, tol=1e-5))
        if "failed" not in result[label]:
            break
    stage("CG", lambda: tg.linalg.solve(gram, y, reg=fraction * mean, solver=tg.linalg.CG(), tol=1e-6))
    for k in (1000,):
        found = stage(f"top {k}", lambda k=k: tg.linalg.top(gram, k, tol=1e-6, dtype=torch.float64))
    if found is not None:
        result["largest"], result["thousandth"] = float(found.values[0]), float(found.values[-1])
    del found
    found = stage("all eigenpairs", lambda: tg.linalg.spectrum(gram))
    if found is not None:
        result["trace_error"] = abs(float(found.values.double().sum() / K.diagonal().double().sum()) - 1)
        result["smallest"] = float(found.values[-1])
    result["device"] = torch.cuda.get_device_name()
    save(result, args.out, "PYTHONPATH=src python3 -m benchmarks.speed.solve gpu --store STORE --data DIR")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("where", choices=["cpu", "gpu", "one", "steps"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--fraction", type=float, default=1e-3, help="reg as a fraction of the mean diagonal")
    parser.add_argument("--folder", type=Path, help="where the Gram is written")
    parser.add_argument("--store")
    parser.add_argument("--method")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "solve.json")
    args = parser.parse_args()
    if args.where == "one":
        print(json.dumps(one(args.method, args.store, args.data, args.fraction)))
    else:
        {"cpu": cpu, "gpu": gpu, "steps": steps}[args.where](args)


if __name__ == "__main__":
    main()
