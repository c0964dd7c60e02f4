"""Function regression through the Gram and through the features: Qadeer et al. 2023, Fig. 3 (CKJ).

    python -m benchmarks.studies.ckj [--seeds 3]

f₁ = e^{sin 2πx}, f₂ = e^{3x}, f₃ = cos e^{3x} on [−1, 1]; tanh networks of three hidden layers of 128, float64, trained
by Adam (1e-3) for 2400 epochs on N = 200 intervals with trapezoid weights; test error in the weighted norm on M = 600.
The trained network's NTK and CK give fits by the Gram's pseudo-inverse (14); CKJ is the same space as CK, fitted
through the feature matrix. Writes results/ckj.json.
"""

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, save

FUNCTIONS = {
    "f1": lambda x: torch.exp(torch.sin(2 * math.pi * x)),
    "f2": lambda x: torch.exp(3 * x),
    "f3": lambda x: torch.cos(torch.exp(3 * x)),
}


def grid(n: int) -> tuple[Tensor, Tensor]:
    """Nodes [n + 1, 1] and trapezoid weights."""
    w = torch.full((n + 1,), 2 / n, dtype=torch.float64)
    w[[0, -1]] /= 2
    return torch.linspace(-1, 1, n + 1, dtype=torch.float64)[:, None], w


def errors(name: str, seed: int, epochs: int = 2400) -> dict[str, float]:
    torch.manual_seed(seed)
    net = tg.models.mlp([1, 128, 128, 128, 1], nn.Tanh).double()
    (x, w), (z, v) = grid(200), grid(600)
    y, want = FUNCTIONS[name](x)[:, 0], FUNCTIONS[name](z)[:, 0]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        optimizer.zero_grad()
        (w * (net(x)[:, 0] - y).square()).sum().backward()
        optimizer.step()

    def error(f: Tensor) -> float:
        return float((v * (f - want).square()).sum().sqrt())

    with torch.no_grad():
        found = {"NN": error(net(z)[:, 0])}
    kernels = {"NTK": tg.trace_ntk(net), "CK": tg.conjugate_kernel(net)}
    for label, kernel in kernels.items():
        fit = tg.regress.ridgeless(kernel(x), y, sample_weights=w)
        found[label] = error(fit.predict(kernel(z, x)))
    ck = kernels["CK"]
    found["CKJ"] = error(tg.regress.least_squares(ck.features(x), y, sample_weights=w).predict(ck.features(z)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    result: dict[str, Any] = {"seeds": args.seeds, "errors": {}}
    for name in FUNCTIONS:
        runs = [errors(name, seed) for seed in range(args.seeds)]
        result["errors"][name] = {k: [r[k] for r in runs] for k in runs[0]}
        middle = {k: f"{sorted(v)[len(v) // 2]:.1e}" for k, v in result["errors"][name].items()}
        print(name, middle, flush=True)
    save(result, RESULTS / "ckj.json", f"python -m benchmarks.studies.ckj --seeds {args.seeds}")


if __name__ == "__main__":
    main()
