"""How fast networks come to their infinite-width limit, and at which depths and variances they can be trained.

    python -m benchmarks.studies.infinite_width

Width: one and two hidden layers of m = 64 … 4096 tanh or ReLU units and a CNN of 16 … 256 channels, 32 seeds at the
start (CNN: 128), 8 in training (two hidden layers, f₀ as drawn and f₀ = 0), against Cagnetta et al. 2023 (18).
Depth: κ(Θ) and the mean predictor of tanh-like (erf) and ReLU networks up to 100 layers over σ_w²; inputs of one norm.
Writes results/infinite_width.json, results/infinite_width.png and results/infinite_phase.png.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tangency as tg
from benchmarks.record import RESULTS, save
from tangency import plots
from tangency.infinite import Erf, Relu
from tangency.studies import Convergence, GradientDescent, convergence
from tangency.studies.convergence import typical

WIDTHS = [64, 128, 256, 512, 1024, 2048, 4096]


def dense(depth: int, activation: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def net(m: int) -> nn.Module:
        hidden = [part for _ in range(depth - 1) for part in (nn.Linear(m, m), activation())]
        return nn.Sequential(nn.Linear(10, m), activation(), *hidden, nn.Linear(m, 1))

    return net


def cnn(m: int) -> nn.Module:
    first, second = nn.Conv2d(3, m, 3, padding=1), nn.Conv2d(m, m, 3, stride=2)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(9 * m, 1))


def told(name: str, found: Convergence, seconds: float) -> dict[str, Any]:
    print(f"{name} ({seconds:.0f} s)\n{found}\n", flush=True)
    result: dict[str, Any] = {
        "widths": list(found.widths),
        "seeds": len(found.seeds),
        "seconds": round(seconds, 1),
        "root_mean_squares": {
            key: [float(f"{float(v):.5g}") for v in typical(values)] for key, values in found.measured().items()
        },
        "slopes": {key: [round(s.value, 4), round(s.error, 4)] for key, s in found.slopes.items()},
    }
    if found.training is not None:
        run = found.training
        result["lr"], result["smallest_eigenvalue"] = run.lr, run.smallest
        result["largest_measured_over_bound"] = {key: float(v.max()) for key, v in run.bounds.items()}
    return result


def widths() -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = F.normalize(torch.randn(20, 10)) * 10**0.5, torch.randn(20).sign()
    images = torch.randn(8, 3, 8, 8)
    studies: dict[str, tuple[Callable, list[int], torch.Tensor, dict[str, Any]]] = {
        "one hidden layer, tanh": (dense(1, nn.Tanh), WIDTHS, x, {"w_var": 1.5, "b_var": 0.1}),
        "one hidden layer, relu": (dense(1, nn.ReLU), WIDTHS, x, {"w_var": 2.0}),
        "two hidden layers, tanh": (dense(2, nn.Tanh), WIDTHS[:-1], x, {"w_var": 1.5, "b_var": 0.1}),
        "cnn, relu": (cnn, [16, 32, 64, 128, 256], images, {"w_var": 2.0, "seeds": 128}),
    }
    for twin in (False, True):
        spec = GradientDescent(y, steps=300, every=50, twin=twin)
        options: dict[str, Any] = {"w_var": 1.5, "b_var": 0.1, "seeds": 8, "train": spec}
        begun = "f₀ = 0" if twin else "f₀ as drawn"
        studies[f"two hidden layers, tanh, trained from {begun}"] = (dense(2, nn.Tanh), WIDTHS[:5], x, options)
    result = {}
    for name, (factory, sizes, inputs, options) in studies.items():
        start = time.perf_counter()
        found = convergence(factory, sizes, inputs, **{"seeds": 32} | options)
        result[name] = told(name, found, time.perf_counter() - start)
    plots.draw_convergence(found).savefig(RESULTS / "infinite_width.png", dpi=110)
    return result


def depths() -> dict[str, Any]:
    torch.manual_seed(0)
    x, z = (F.normalize(torch.randn(n, 50)) * 50**0.5 for n in (60, 40))
    y, result = torch.randn(60).sign(), {}
    for activation, b_var, high in ((Erf(), 0.05, 4.0), (Relu(), 0.0, 4.0)):
        start = time.perf_counter()
        w_vars = torch.linspace(0.2, high, 39).tolist()
        found = tg.studies.trainability(
            x, list(range(1, 101)), w_vars, b_var=b_var, activation=activation, x_test=z, y=y
        )
        seconds = time.perf_counter() - start
        print(f"{found.activation}: boundary at σ_w² = {found.critical:.4f}, {seconds:.1f} s", flush=True)
        rows = zip(w_vars, found.kappa[-1].tolist(), found.predictor[-1].tolist(), strict=True)
        result[found.activation] = {
            "b_var": b_var,
            "boundary": found.critical,
            "seconds": round(seconds, 1),
            "w_var, kappa, predictor at depth 100": [" ".join(f"{v:.4g}" for v in row) for row in rows],
        }
        if isinstance(activation, Erf):
            plots.draw_phase(found).savefig(RESULTS / "infinite_phase.png", dpi=110)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    save(
        {"width": widths(), "depth": depths()},
        RESULTS / "infinite_width.json",
        "python -m benchmarks.studies.infinite_width",
    )
