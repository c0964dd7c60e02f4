"""Why the fit through the features (CKJ) is orders below the Gram's on f₁ and f₂, and level with it on f₃.

    python -m benchmarks.studies.ckj [--seeds 3]

Networks of three hidden layers of 128, tanh, trained as in Qadeer et al. 2023 (Adam 1e-3, 2400 epochs, 201 nodes),
drawn in three ways. After 1000 and 2400 epochs the same last layer is fitted: by the Gram (CK), by the features (CKJ),
by the features with singular values cut where the Gram's rounding cuts them ("cut", √(nε)), by features in float32
("single"); and all on a grid twice as fine to train on. "slope": the largest |∂z/∂x| of the last layer on the test
grid; a feature of slope s turns over within 1/s, the grid has Δx = 0.01. Writes results/ckj.json.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, save
from tangency.studies import FUNCTIONS, Grid, Grids
from tangency.studies.conjugate import regression_moment

GRIDS = {200: Grids(Grid((200,)), (3,)), 400: Grids(Grid((400,)), (3,))}
SIZES = [1, 128, 128, 128, 1]


def torchs() -> nn.Module:
    """Uniform in ±1/√fan-in, biases, too."""
    return tg.models.mlp(SIZES, nn.Tanh)


def glorot() -> nn.Module:
    """Glorot's uniform, no biases: TensorFlow's and Keras' way."""
    net = torchs()
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return net


def tangents() -> nn.Module:
    """N(0, 1), activations divided by the root of the width."""
    return tg.models.mlp(SIZES, nn.Tanh, parametrization="ntk")


DRAWN: dict[str, Callable[[], nn.Module]] = {"torch": torchs, "Glorot": glorot, "NTK": tangents}


def through_features(net: nn.Module, want: Tensor, grids: Grids) -> dict[str, float]:
    """The last layer by its features, cut as the Gram is, and in float32."""
    x, z, w, v = grids.train.nodes(), grids.test.nodes(), grids.train.weights(), grids.test.weights()
    kernel = tg.conjugate_kernel(net)
    a, b = kernel.features(x), kernel.features(z)
    y = grids.coarse(want)
    cut = (len(x) * torch.finfo(torch.float64).eps) ** 0.5
    fits = {
        "cut": tg.regress.least_squares(a, y, sample_weights=w, cutoff=cut).predict(b),
        "single": tg.regress.least_squares(a.float(), y.float(), sample_weights=w.float()).predict(b.float()).double(),
    }
    slope = float((b.diff(dim=0) / grids.test.steps[0]).abs().max())
    return {name: float((v * (p - want).square()).sum().sqrt()) for name, p in fits.items()} | {"slope": slope}


def one(drawn: str, name: str, seed: int) -> list[dict[str, Any]]:
    """A network, after 1000 and after 2400 epochs, on both grids."""
    net = tg.models.initialized(DRAWN[drawn], seed)
    rows, f = [], FUNCTIONS[name]
    for epochs in (1000, 2400):
        # Adam's state is not kept between studies, so each begins anew; the training is the same one.
        trained = tg.studies.conjugate_regression(net, f, epochs=epochs, progress=False).network
        for n, grids in GRIDS.items():
            want = f(grids.test.nodes())
            moment = regression_moment(trained, want, grids, epochs)
            more = through_features(trained, want, grids)
            row = {"drawn": drawn, "f": name, "seed": seed, "epochs": epochs, "N": n}
            rows.append(row | dict(moment.test) | more | {"CKJ train": moment.train["CKJ"]})
    return rows


def middle(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the seeds."""
    keys = ("drawn", "f", "epochs", "N")
    out = []
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        same = [row for row in rows if tuple(row[k] for k in keys) == key]
        numbers = [k for k in same[0] if k not in (*keys, "seed")]
        out.append(dict(zip(keys, key, strict=True)) | {k: sorted(r[k] for r in same)[len(same) // 2] for k in numbers})
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in FUNCTIONS:
        for drawn in DRAWN:
            for seed in range(args.seeds):
                rows += one(drawn, name, seed)
            for row in middle([r for r in rows if r["f"] == name and r["drawn"] == drawn]):
                print({k: f"{v:.1e}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    result = {"seeds": args.seeds, "medians": middle(rows), "runs": rows}
    save(result, RESULTS / "ckj.json", f"python -m benchmarks.studies.ckj --seeds {args.seeds}")


if __name__ == "__main__":
    main()
