"""The density of a Gram's eigenvalues by Lanczos quadrature beside all of them by decomposition.

    python -m benchmarks.speed.spectral_density [--rows 5000] [--steps 16] [--probes 16] [--trials] [--out FILE]

The Gram is the trace NTK of an MLP at initialisation on Gaussian clouds, in memory (computed beforehand, not timed).
On one thread, the fastest of three in processor time (a machine may be shared), one after the other in turns:
`tg.spectra.density`, `tg.spectra.eigenvalues` (values alone: the faster peer) and, with `--pairs`,
`tg.linalg.spectrum`, once. Wasserstein distances are to the full spectrum, relative to its mean; the estimate is what
the density says of itself. Three seeds.

--trials: how far off the estimate is, over four kinds of matrices of 600 rows, 12 draws, three seeds of the probes.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


def matrices(seed: int, n: int = 600) -> Iterator[tuple[str, Tensor]]:
    """A Wishart matrix, the kernel of a network, and two rotated spectra with heavy tails."""
    generator = torch.Generator().manual_seed(100 + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rotated(values: Tensor) -> Tensor:
        q = torch.linalg.qr(normal(n, n)).Q
        return (lambda k: (k + k.T) / 2)((q * values) @ q.T)

    w = normal(2 * n, n)
    yield "Wishart", w.T @ w / (2 * n)
    torch.manual_seed(seed)
    kernel = tg.trace_ntk(tg.models.mlp([20, 64, 3]).double())
    yield "network", tg.compute(kernel, normal(n, 20), progress=False).dense()
    yield "Pareto", rotated((1 - torch.rand(n, generator=generator, dtype=torch.float64)) ** -1.0)
    yield "power of the rank", rotated(torch.arange(1, n + 1, dtype=torch.float64) ** -1.5)


def trials() -> list[dict[str, Any]]:
    """Distance over estimate: median, nine tenths, largest; and the means of both, over the mean eigenvalue."""
    found: dict[tuple[str, int, int], list[tuple[float, float, float]]] = {}
    for draw in range(12):
        for name, k in matrices(draw):
            values = torch.linalg.eigvalsh(k)
            mean = float(values.mean())
            for steps, probes in ((16, 16), (8, 4), (24, 2)):
                for seed in range(3):
                    one = tg.spectra.density(k, steps=steps, probes=probes, seed=seed, progress=False)
                    distance = wasserstein(one.nodes.flip(0), values, one.weights.flip(0))
                    row = (distance / one.error, distance / mean, one.error / mean)
                    found.setdefault((name, steps, probes), []).append(row)
    rows = []
    for (name, steps, probes), each in found.items():
        table = torch.tensor(each)
        parts = table[:, 0].quantile(torch.tensor([0.5, 0.9, 1.0])).tolist()
        about = {"matrix": name, "steps": steps, "probes": probes, "distance_over_estimate": parts}
        rows.append(about | {"distance": float(table[:, 1].mean()), "estimate": float(table[:, 2].mean())})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--trials", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "spectral_density.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    K = gram(args.rows, getattr(torch, args.dtype))
    result: dict[str, Any] = {k: v for k, v in vars(args).items() if k not in ("out", "pairs", "trials")}
    times, full, off, said = [], [], [], []
    for _ in range(args.repeats):
        found = []
        for seed in range(3):
            start = time.process_time()
            found.append(tg.spectra.density(K, steps=args.steps, probes=args.probes, seed=seed, progress=False))
            times.append(time.process_time() - start)
        start = time.process_time()
        values = tg.spectra.eigenvalues(K).double().flip(0)
        full.append(time.process_time() - start)
    result |= {"density_s": min(times), "eigenvalues_s": min(full), "all_density_s": times, "all_eigenvalues_s": full}
    if args.pairs:
        start = time.process_time()
        tg.linalg.spectrum(K)
        result["eigenpairs_s"] = time.process_time() - start
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
    if args.trials:
        result["trials"] = trials()
    print(result)
    save(result, args.out, " ".join(["python -m benchmarks.speed.spectral_density", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
