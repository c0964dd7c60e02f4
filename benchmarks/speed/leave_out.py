"""From a Gram on disk to a ranking of its samples by their margins without them, beside n fits and scikit-learn.

    python -m benchmarks.speed.leave_out [--rows 10000] [--classes 10] [--device cpu] [--dtype float64] [--out FILE]
    PYTHONPATH=src python3 -m benchmarks.speed.leave_out --rows 50000 --device cuda --peer-rows 0 --out FILE

Samples are drawn at random: classes are Gaussian clouds, one label in twenty is wrong. The Gram is the trace NTK of an
MLP, computed into a store beforehand (not timed; its files are in the system's cache). Timed: read the store, factor,
leave every sample out, rank by margins.

- n fits: three fits without one sample each are made by `ridge` with the Gram in memory; n take n/3 times as long.
- scikit-learn: `RidgeCV` with cv=None has the same leave-one-out errors, from features. It gets the rows of K's
  Cholesky factor, whose products are K (made beforehand, not timed), one alpha, and `--peer-rows` samples (0: none).
- Logistic regression on the first `--logistic-rows` samples: one Newton step each; its error beside `--logistic-fits`
  fits without one sample, drawn at random, and beside the 8 that it checks by itself. The n fits that are extrapolated
  each decompose K and start from zero; those of exact=True do neither.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tangency as tg
from benchmarks.record import RESULTS, save

REFITS = 3


def clouds(rows: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples, labels of which one in twenty is wrong, and which these are."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(0, classes, (rows,), generator=generator)
    centres = torch.randn(classes, 64, generator=generator)
    x = centres[truth] + 1.5 * torch.randn(rows, 64, generator=generator)
    wrong = torch.rand(rows, generator=generator) < 0.05
    shift = torch.randint(1, classes, (rows,), generator=generator)
    return x, torch.where(wrong, (truth + shift) % classes, truth), wrong


def settle(device: torch.device) -> float:
    """Now, once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def refits(gram: tg.Gram, y: Tensor, reg: float, predictions: Tensor) -> dict[str, float]:
    """A few fits without one sample each, from the Gram in memory: seconds of one, and how far they are off."""
    K = gram.dense().to(y)
    start, off = settle(y.device), 0.0
    for i in range(REFITS):
        rest = torch.cat([torch.arange(i), torch.arange(i + 1, len(y))]).to(y.device)
        fit = tg.regress.ridge(K[rest][:, rest], y[rest], reg=reg, solver=tg.linalg.Cholesky())
        off = max(off, float((fit.predict(K[i : i + 1, rest]) - predictions[i]).abs().max()))
    one = (settle(y.device) - start) / REFITS
    return {"one_refit_s": one, "n_refits_s_extrapolated": one * len(y), "largest_difference": off}


def peer(K: Tensor, y: Tensor, reg: float) -> dict[str, Any]:
    """scikit-learn's leave-one-out beside ours on the same samples, both from memory and in float64."""
    import sklearn
    from sklearn.linear_model import RidgeCV

    root = torch.linalg.cholesky(K).numpy()
    start = time.perf_counter()
    found = RidgeCV(alphas=[reg], fit_intercept=False, store_cv_results=True).fit(root, y.numpy())
    theirs = time.perf_counter() - start
    del root
    start = time.perf_counter()
    left = tg.regress.leave_out(K, y, reg=reg, progress=False)
    ours = time.perf_counter() - start
    squares = torch.from_numpy(found.cv_results_[..., 0])
    return {
        "rows": len(y),
        "sklearn": sklearn.__version__,
        "sklearn_s": theirs,
        "ours_s": ours,
        "times_faster": theirs / ours,
        "largest_difference_of_squares": float((squares - left.errors.square()).abs().max()),
    }


def logistic(K: Tensor, labels: Tensor, fits: int) -> dict[str, Any]:
    """One Newton step for each sample, and how far probabilities are from those of fits."""
    n, reg = len(labels), 0.01 * float(K.diagonal().mean())
    start = settle(K.device)
    fit = tg.regress.logistic(K, labels, reg=reg)
    once = settle(K.device) - start
    start = settle(K.device)
    left = tg.regress.leave_out_logistic(K, labels, reg=reg, exact=False, progress=False)
    took, off, moved = settle(K.device) - start, [], []
    before = fit.probabilities(K)
    for i in torch.randperm(n, generator=torch.Generator().manual_seed(1))[:fits].tolist():
        w = torch.ones(n, dtype=K.dtype, device=K.device)
        w[i] = 0
        again = tg.regress.logistic(K, labels, reg=reg, sample_weights=w).probabilities(K[i : i + 1])[0]
        off.append(float((again - left.probabilities[i]).abs().max()))
        moved.append(float((again - before[i]).abs().max()))
    return {
        "rows": n,
        "reg": reg,
        "one_fit_s": once,
        "fit_and_steps_s": took,
        "n_fits_s_extrapolated": once * n,
        "largest_error_of_a_probability_where_checked": left.checked,
        "fits_at_random": fits,
        "largest_error_at_random": max(off),
        "median_error_at_random": sorted(off)[fits // 2],
        "largest_change_by_leaving_out_at_random": max(moved),
        "median_change_by_leaving_out_at_random": sorted(moved)[fits // 2],
    }


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--peer-rows", type=int, default=10000)
    parser.add_argument("--logistic-rows", type=int, default=2000)
    parser.add_argument("--logistic-fits", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "leave_out.json")
    return parser.parse_args()


def main() -> None:
    args = options()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    x, labels, wrong = clouds(args.rows, args.classes)
    torch.manual_seed(0)
    kernel = tg.trace_ntk(tg.models.mlp([64, 256, args.classes]).to(device, dtype))
    result: dict[str, Any] = {"rows": args.rows, "classes": args.classes, "device": args.device, "dtype": args.dtype}
    with tempfile.TemporaryDirectory() as folder:
        gram = tg.compute(kernel, x.to(device, dtype), store=folder + "/gram")
        reg = 0.1 * float(gram.diag().mean())
        y = torch.nn.functional.one_hot(labels, args.classes).to(device, dtype)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start = settle(device)
        left = tg.regress.leave_out(gram, y, reg=reg, progress=False)
        order = left.margins(labels.to(device)).argsort().cpu()
        result["from_disk_to_ranking_s"] = settle(device) - start
        if device.type == "cuda":
            result["peak_GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
        flagged = wrong[order[: int(wrong.sum())]]
        result |= {"residual": left.residual, "wrong_labels_ranked_first": float(flagged.double().mean())}
        result |= refits(gram, y, reg, left.predictions)
        result["times_faster"] = result["n_refits_s_extrapolated"] / result["from_disk_to_ranking_s"]
        some = slice(0, args.logistic_rows)
        result["logistic"] = logistic(
            gram[some, some].to(device, torch.float64), labels[some].to(device), args.logistic_fits
        )
        if args.peer_rows:
            some = slice(0, args.peer_rows)
            result["sklearn"] = peer(gram[some, some].cpu().double(), y[some].cpu().double(), reg)
    print(result)
    save(result, args.out, " ".join(["python -m benchmarks.speed.leave_out", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
