"""On one GPU: an audit of 50,000 images by projected features, and spectral densities over the Jacobian.

    python -m benchmarks.speed.audit_features [--samples 50000] [--dim 4096] [--out FILE]

ResNet18 (10 outputs, one epoch) on noisy pictures of ten classes, a tenth of whose labels are wrong: `dim` features of
each output, side by side. Densities of the Gram of 1,000 samples, by products with the Jacobian and by the Gram itself.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tangency as tg
from benchmarks.record import RESULTS, save

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seconds(start: float) -> float:
    """Since then, all work done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return round(time.perf_counter() - start, 2)


def pictures(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten fixed patterns in noise, and which it is."""
    means = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n) % 10
    return 0.35 * means[y] + torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed)), y


def audit(samples: int, dim: int) -> dict[str, Any]:
    """Seconds, bytes, and how many of the labels that are ranked first are wrong."""
    (x, y), test = pictures(samples, 1), pictures(1_000, 2)
    g = torch.Generator().manual_seed(3)
    wrong = torch.randperm(samples, generator=g)[: samples // 10]
    y[wrong] = (y[wrong] + 1 + torch.randint(9, (len(wrong),), generator=g)) % 10
    net = tg.models.resnet18(10).to(DEVICE)
    tg.models.fit(net, x.to(DEVICE), y.to(DEVICE), epochs=1, lr=1e-3, optimizer="adam", progress=False)
    kernel = tg.projected(tg.trace_ntk(net.eval(), dtype="float16"), dim=dim)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = tg.audit(net, (x, y), test, kernel=kernel, progress=False)
    row: dict[str, Any] = {"samples": samples, "features": 10 * dim, "seconds": seconds(start)}
    row["peak_bytes"] = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
    is_wrong = torch.zeros(samples, dtype=torch.bool).index_fill_(0, wrong, True)
    first = found.suspects.order[: len(wrong)].cpu()
    return row | {"called_wrong": found.suspects.count, "wrong_among_the_first": float(is_wrong[first].float().mean())}


def densities() -> list[dict[str, Any]]:
    """Seconds by products with the Jacobian, and by the Gram."""
    rows = []
    for name, net, shape, steps in (
        ("mlp 64-128-10", tg.models.mlp([64, 128, 10]), (64,), 16),
        ("lenet5", tg.models.lenet5(10, 3, 32), (3, 32, 32), 4),
    ):
        kernel, x = tg.trace_ntk(net.to(DEVICE).eval()), torch.randn(1000, *shape, device=DEVICE)
        products = tg.spectra.jacobian_gram(kernel, x)
        start = time.perf_counter()
        tg.spectra.density(products, steps=steps)
        row = {"network": name, "steps": steps, "by_products": seconds(start)}
        start = time.perf_counter()
        tg.spectra.density(tg.compute(kernel, x, progress=False), steps=steps)
        rows.append(row | {"by_the_gram": seconds(start)})
    return rows


def main() -> None:
    """Both, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "audit_features.json")
    args = parser.parse_args()
    result = {"densities": densities(), "audit": audit(args.samples, args.dim)}
    print(result)
    save(result, args.out, f"python -m benchmarks.speed.audit_features --samples {args.samples} --dim {args.dim}")


if __name__ == "__main__":
    main()
