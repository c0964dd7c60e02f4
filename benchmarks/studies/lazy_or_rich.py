"""What `Monitor` measures of networks that are known to be lazy or rich: where the thresholds of its verdict come from.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.lazy_or_rich [--seeds 3] [--first 1] [--out FILE]

MLPs by width: in the NTK parametrisation with one hidden layer and SGD (lazy as they get wide: Jacot et al. 2018), in
the standard one with two hidden layers and Adam (rich), on digits with cross-entropy by Adam and by SGD; and one MLP
fitted to targets of several sizes (large ones are rich: Chizat et al. 2019). About two minutes.

The thresholds were chosen by eye on seed 0 of these very networks; so seeds from 1 are measured, with other data,
weights and digits, which had no part in the choice. The families are the same: of others nothing is said.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, save


class Case(NamedTuple):
    """A network to be trained."""

    kind: str
    of: float  # width, or size of the targets
    net: nn.Module
    x: Tensor
    y: Tensor
    optimizer: Any
    steps: int


def half_rate(net: nn.Module, x: Tensor) -> partial[torch.optim.SGD]:
    """SGD at half the largest rate for the mean square loss."""
    return partial(torch.optim.SGD, lr=tg.dynamics.max_learning_rate(tg.trace_ntk(net)(x), curvature=2 / len(x)) / 2)


def cases(seed: int) -> Iterator[Case]:
    draws = torch.Generator().manual_seed(seed)
    x = F.normalize(torch.randn(60, 8, generator=draws)) * 8**0.5
    y = torch.tanh(2 * x[:, :1] * x[:, 1:2])

    def mlp(sizes: list[int], parametrization: Any = "standard") -> nn.Module:
        return tg.models.initialized(lambda: tg.models.mlp(sizes, parametrization=parametrization), seed=seed)

    for width in (16, 64, 256, 1024, 4096):
        net = mlp([8, width, 1], "ntk")
        yield Case("NTK parametrisation, SGD", width, net, x, y, half_rate(net, x), 400)
    for width in (16, 64, 256, 1024):
        net = mlp([8, width, width, 1])
        yield Case("standard, two hidden layers, Adam", width, net, x, y, partial(torch.optim.Adam, lr=3e-3), 300)
    data, _ = tg.datasets.digits()
    assert isinstance(data.x, Tensor)
    z, labels = data.x.flatten(1)[80 * seed : 80 * seed + 80], data.y[80 * seed : 80 * seed + 80]
    for name, rule in (("Adam", partial(torch.optim.Adam, lr=3e-3)), ("SGD", partial(torch.optim.SGD, lr=0.1))):
        for width in (16, 64, 256, 1024):
            yield Case(f"digits, cross-entropy, {name}", width, mlp([64, width, 10]), z, labels, rule, 100)
    for size in (0.1, 1.0, 4.0, 20.0):
        net = mlp([8, 256, 1], "ntk")
        yield Case("targets of a size", size, net, x, size * y, half_rate(net, x), 400)


def measured(case: Case) -> dict[str, Any]:
    """The last record of a training."""
    loss: Any = F.mse_loss if case.y.is_floating_point() else F.cross_entropy
    monitor = tg.dynamics.Monitor(tg.trace_ntk(case.net), case.x, y=case.y, loss=loss)
    options = {"loss": loss, "optimizer": case.optimizer, "steps": case.steps, "every": case.steps, "progress": False}
    tg.dynamics.train(case.net, case.x, case.y, watch=monitor, **options)
    found = monitor.history()
    names = ("change", "rotation", "cosine", "centred_alignment", "loss")
    verdict = found.verdict()
    assert verdict is not None
    return {name: float(found[name][-1]) for name in names} | {"verdict": verdict.kind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=1, help="the first seed; the thresholds were chosen on 0")
    parser.add_argument("--out", type=Path, default=RESULTS / "lazy_or_rich.json")
    args = parser.parse_args()
    rows: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for seed in range(args.first, args.first + args.seeds):
        for case in cases(seed):
            rows.setdefault((case.kind, case.of), []).append(measured(case))
    table = []
    for (kind, of), found in rows.items():
        middle = {name: median(row[name] for row in found) for name in ("change", "rotation", "cosine", "loss")}
        table.append({"kind": kind, "of": of, **middle, "verdicts": [row["verdict"] for row in found]})
        print(f"{kind:36s} {of:6g}  change {middle['change']:8.4f}  rotation {middle['rotation']:5.1f}", end="  ")
        print(f"loss {middle['loss']:.2g}  {', '.join(table[-1]['verdicts'])}", flush=True)
    result: dict[str, Any] = {"medians": table, "seeds": list(range(args.first, args.first + args.seeds))}
    save(result, args.out, "python -m benchmarks.studies.lazy_or_rich " + " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
