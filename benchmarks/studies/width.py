"""How linear training is as networks grow wider, measured beside the bounds.

Of Sutherland 2023 and of Cagnetta et al. 2023 (18).

    python -m benchmarks.studies.width

One hidden layer of m = 64 … 8192 units, its weights alone trained by gradient descent, f = Σ_j a_j σ(w_j·x)/√m with
‖x‖ = 1 and residuals of order 1; three seeds. Two kinds: softplus with a_j = 1, where all units pull the kernel one way
and it moves as m^-1/2, the rate of the bound; tanh with random signs a_j = ±1, where they cancel and it moves as m^-1.
Writes results/width.json and results/width.png.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import tangency as tg
from benchmarks.record import RESULTS, save

WIDTHS, SEEDS = [64, 128, 256, 512, 1024, 2048, 4096, 8192], 3
KINDS: dict[str, tuple[Callable, float, bool]] = {
    "softplus, a = 1": (F.softplus, 0.25, False),
    "tanh, a = ±1": (torch.tanh, 4 / 27**0.5, True),
}


def run(width: int, activation: Callable, beta: float, signs: bool, seed: int) -> tg.dynamics.LazyRun:
    torch.manual_seed(seed)
    n, d = 20, 10
    x = F.normalize(torch.randn(n + 10, d, dtype=torch.float64)) * d**0.5  # the network divides by √d
    net = tg.models.two_layer(d, width, activation).double()
    net.v.data = net.v.data.sign() if signs else torch.ones_like(net.v)
    with torch.no_grad():
        y = net(x[:n])[:, 0] + torch.randn(n, dtype=torch.float64).sign()
    lr = tg.dynamics.max_learning_rate(tg.trace_ntk(net, trainable="W")(x[:n])) / 2
    return tg.dynamics.linearization_quality(
        net, x[:n], y, width=width, beta=beta, lr=lr, steps=400, every=20, x_test=x[n:], trainable="W"
    )


def main() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.subplots(1, 2)
    result: dict[str, Any] = {"widths": WIDTHS, "seeds": SEEDS}
    for name, (activation, beta, signs) in KINDS.items():
        runs = {m: [run(m, activation, beta, signs, seed) for seed in range(SEEDS)] for m in WIDTHS}
        worst = {
            bound: [max(float((a[1:] / b[1:]).max()) for a, b in (r.bounds()[bound] for r in runs[m])) for m in WIDTHS]
            for bound in runs[64][0].bounds()
        }
        drift = np.array([[float(r.drift.max()) for r in runs[m]] for m in WIDTHS])
        slope = float(np.polyfit(np.log(WIDTHS), np.log(drift).mean(1), 1)[0])
        result[name] = {
            "drift_slope": slope,
            "drift": drift.tolist(),
            "largest_measured_over_bound": worst,
            "all_hold": max(max(v) for v in worst.values()) <= 1,
        }
        print(name, f"slope {slope:.3f}", {k: round(max(v), 3) for k, v in worst.items()}, flush=True)
        axes[0].loglog(WIDTHS, drift.mean(1), "o-", ms=4, label=f"{name}: slope {slope:.2f}")
        last = [[[float(v[-1]) for v in r.bounds()["linearization"]] for r in runs[m]] for m in WIDTHS]
        gaps = np.array(last).mean(1)  # (measured, bound) by width
        line = axes[1].loglog(WIDTHS, gaps[:, 0], "o-", ms=4, label=f"|f − f_lin|, {name}")[0]
        axes[1].loglog(WIDTHS, gaps[:, 1], ls="--", color=line.get_color(), label="its bound β‖w − w₀‖²/(2√m)")
    axes[0].set(xlabel="width m", title="How far the kernel moves: ‖Θ_t − Θ_0‖, largest over training")
    axes[1].set(xlabel="width m", title="Network against its linearisation, after training")
    for axis in axes:
        axis.grid(alpha=0.25, which="both", lw=0.4)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "width.png", dpi=110)
    save(result, RESULTS / "width.json", "python -m benchmarks.studies.width")


if __name__ == "__main__":
    main()
