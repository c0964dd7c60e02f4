"""Predicted against measured risk of ridge regression with a trained CNN's NTK, on Fashion-MNIST (Wei et al. 2022).

    python -m benchmarks.studies.risk --data DIR        # Fashion-MNIST's IDX files in DIR

A LeNet-5 is trained on images 0–19,999; the kernel is its trace NTK in float64. Random subsets of N images from 20,000
on are fitted by ridge regression to one-hot labels; GCV and leave-one-out predict the mean square error from these N
images alone, and 3,000 images of the official test set measure it. reg runs over six decades around the mean of the
kernel's diagonal. Writes results/risk.json and results/risk.png.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import tangency as tg
from benchmarks.record import RESULTS, fashion, save
from tangency import plots

SIZES, REPEATS = (250, 500, 1000, 2000, 4000), 3
FACTORS = [10.0**e for e in np.arange(-4, 2.01, 0.5)]


def trained(x: Tensor, labels: Tensor, epochs: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    model = tg.models.lenet5(10, channels=1, size=28)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for some in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(x[some]), labels[some]).backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    (x, labels), (z, test_labels) = fashion(args.data), fashion(args.data, "t10k")
    x, z, test_labels = (x - 0.286) / 0.353, (z[:3000] - 0.286) / 0.353, test_labels[:3000]
    start = time.perf_counter()
    model = trained(x[:20000], labels[:20000])
    with torch.no_grad():
        accuracy = float((model(z).argmax(1) == test_labels).float().mean())
    print(f"trained in {time.perf_counter() - start:.0f} s, accuracy {accuracy:.3f}", flush=True)
    x, labels = x[20000 : 20000 + max(SIZES)].double(), labels[20000 : 20000 + max(SIZES)]
    kernel = tg.trace_ntk(model, dtype="float64")
    start = time.perf_counter()
    K, cross = tg.compute(kernel, x), tg.compute(kernel, z.double(), x)
    print(f"kernels in {time.perf_counter() - start:.0f} s", flush=True)
    y, y_test = (F.one_hot(v, 10).double() - 0.1 for v in (labels, test_labels))
    regs = [f * float(K.diag().mean()) for f in FACTORS]
    start = time.perf_counter()
    study = tg.regress.risk_study(K, y, cross, y_test, sizes=SIZES, regs=regs, repeats=REPEATS)
    print(f"study in {time.perf_counter() - start:.0f} s", flush=True)
    result = {
        "network_accuracy": accuracy,
        "sizes": SIZES,
        "repeats": REPEATS,
        "reg_over_mean_diagonal": FACTORS,
        "best_ridge_error": float(study.measured.min()),
    }
    for by in ("gcv", "loo"):
        error = study.error(by)
        result[by] = {
            "median_relative_error": float(error.median()),
            "largest": float(error.max()),
            "median_by_size": dict(zip(map(str, SIZES), error.flatten(1).median(1).values.tolist(), strict=True)),
        }
        print(by, result[by], flush=True)
    result["measured"] = study.measured.mean(1).tolist()
    result["predicted_gcv"] = study.gcv.mean(1).tolist()
    result["predicted_loo"] = study.loo.mean(1).tolist()
    save(result, RESULTS / "risk.json", "python -m benchmarks.studies.risk --data DIR")
    plots.draw_risk(study).savefig(RESULTS / "risk.png", dpi=110)


if __name__ == "__main__":
    main()
