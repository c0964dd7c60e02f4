"""The density of a Gram's eigenvalues by Lanczos quadrature beside all of them by decomposition.

    python -m benchmarks.speed.spectral_density [--rows 5000] [--steps 64] [--probes 4] [--dtype float32] [--out FILE]

The Gram is the trace NTK of an MLP at initialisation on Gaussian clouds, in memory (computed beforehand, not timed).
On one thread, the fastest of three: `tg.spectra.density`, `tg.spectra.eigenvalues` (values alone: the faster peer)
and, with `--pairs`, `tg.linalg.spectrum`. Wasserstein distances are to the full spectrum, relative to its mean;
the estimate is what the density says of itself. Three seeds.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tangency as tg
from benchmarks.record import RESULTS, save
from tangency.spectra.compare import wasserstein


def gram(rows: int, dtype: torch.dtype) -> tg.Gram:
    """The trace NTK of an MLP on samples of ten clouds."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 64, generator=generator)
    x = centres[torch.arange(rows) % 10] + 1.5 * torch.randn(rows, 64, generator=generator)
    torch.manual_seed(0)
    kernel = tg.trace_ntk(tg.models.mlp([64, 128, 10]).to(dtype))
    return tg.compute(kernel, x.to(dtype), progress=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "spectral_density.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    K = gram(args.rows, getattr(torch, args.dtype))
    result: dict[str, Any] = {k: v for k, v in vars(args).items() if k not in ("out", "pairs")}
    times, off, said = [], [], []
    found = []
    for seed in range(3):
        start = time.perf_counter()
        found.append(tg.spectra.density(K, steps=args.steps, probes=args.probes, seed=seed, progress=False))
        times.append(time.perf_counter() - start)
    full = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        values = tg.spectra.eigenvalues(K).double().flip(0)
        full.append(time.perf_counter() - start)
    result |= {"density_s": min(times), "eigenvalues_s": min(full)}
    if args.pairs:
        start = time.perf_counter()
        tg.linalg.spectrum(K)
        result["eigenpairs_s"] = time.perf_counter() - start
    mean = float(values.mean())
    for density in found:
        off.append(wasserstein(density.nodes.flip(0), values, density.weights.flip(0)) / mean)
        said.append(density.error / mean)
    result |= {
        "times_faster_than_eigenvalues": result["eigenvalues_s"] / result["density_s"],
        "exact_largest": min(density.exact for density in found),
        "wasserstein_over_mean": off,
        "estimated_over_mean": said,
        "largest_eigenvalue_over_mean": float(values[-1]) / mean,
    }
    if args.pairs:
        result["times_faster_than_eigenpairs"] = result["eigenpairs_s"] / result["density_s"]
    print(result)
    save(result, args.out, " ".join(["python -m benchmarks.speed.spectral_density", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
