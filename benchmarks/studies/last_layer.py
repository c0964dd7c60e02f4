"""Refitting the last layer on the functions of Qadeer et al. 2023 (71): test errors before and after.

    python -m benchmarks.studies.last_layer [SEEDS]

e^{sin 2πx}, e^{3x} and cos e^{3x} on [-1, 1], 201 training and 601 test points with trapezoid weights, tanh networks of
three hidden layers of 128 in float64, Adam at 1e-3, 2400 epochs of the whole set, as published.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tangency as tg

from ..record import RESULTS, save

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "e^{sin 2πx}": lambda x: torch.exp(torch.sin(2 * math.pi * x)),
    "e^{3x}": lambda x: torch.exp(3 * x),
    "cos e^{3x}": lambda x: torch.cos(torch.exp(3 * x)),
}
TRAIN, TEST, WIDTH, EPOCHS, RATE = 200, 600, 128, 2400, 1e-3


def grid(intervals: int) -> tuple[Tensor, Tensor]:
    """Points [n + 1, 1] on [-1, 1], and the weights of the trapezoidal rule."""
    x = torch.linspace(-1, 1, intervals + 1, dtype=torch.float64)[:, None]
    w = torch.full((intervals + 1,), 2 / intervals, dtype=torch.float64)
    w[[0, -1]] /= 2
    return x, w


def train(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> None:
    """Adam on Σ w (f − y)², all points at once."""
    rule = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        rule.zero_grad()
        (w * (model(x) - y)[:, 0].square()).sum().backward()
        rule.step()


def measure(name: str, seed: int) -> dict[str, Any]:
    """L2 test errors of one network: as trained, at the optimum of its last layer, and with reg by leave-one-out."""
    (x, w), (z, v), f = grid(TRAIN), grid(TEST), FUNCTIONS[name]
    sizes = [1, WIDTH, WIDTH, WIDTH, 1]
    model = tg.models.initialized(lambda: tg.models.mlp(sizes, activation=nn.Tanh).double(), seed=seed)
    train(model, x, f(x), w)

    def error(of: nn.Module) -> float:
        with torch.no_grad():
            return float((v * (of(z) - f(z))[:, 0].square()).sum().sqrt())

    row: dict[str, Any] = {"function": name, "seed": seed, "network": error(model)}
    for key, reg in (("reg 0", 0.0), ("leave-one-out", None)):
        found = tg.refit_last_layer(model, (x, f(x)), reg=reg, sample_weights=w, progress=False)
        assert found.train.loss.after <= found.train.loss.before
        row |= {key: error(found.model), f"{key}: training": [found.train.loss.before, found.train.loss.after]}
    return row


def main() -> None:
    """Every function with every seed."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows = []
    for seed in range(seeds):
        for name in FUNCTIONS:
            rows.append(measure(name, seed))
            print(rows[-1], flush=True)
            orders = {n: [math.log10(r["network"] / r["reg 0"]) for r in rows if r["function"] == n] for n in FUNCTIONS}
            save({"rows": rows, "orders of magnitude gained, reg 0": orders}, RESULTS / "last_layer.json",
                 f"python -m benchmarks.studies.last_layer {seeds}")  # fmt: skip


if __name__ == "__main__":
    main()
