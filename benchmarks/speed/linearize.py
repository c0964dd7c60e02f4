"""What a training step of a linearised network costs, in steps of the network itself: one CPU thread, float32.

    python -m benchmarks.speed.linearize [--out benchmarks/results/linearize.json] [--repeats 15]

A step is zero_grad, forward, cross-entropy, backward and SGD. The network is in evaluation mode, as its linearisation
is; the two take turns, and the best of the repeats counts. By operations 5/3 is to be expected: for each product with a
weight, the network has one forward and two backward; the linearisation has the primal, two tangents and two backward.
"""

import argparse
import copy
import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS
from benchmarks.speed.cases import CASES
from benchmarks.speed.cpu import environment
from benchmarks.speed.store import clock

BATCH = {"mlp": 128, "lenet5": 128, "resnet18": 32, "transformer": 64}


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def measure(name: str, repeats: int) -> dict[str, Any]:
    model, x = CASES[name].model(), CASES[name].inputs()[: BATCH[name]]
    y = torch.randint(model(x).shape[1], (len(x),))
    nets = {"network": copy.deepcopy(model), "linearised": tg.linearize(model)}
    optimizers = {kind: torch.optim.SGD(net.parameters(), 1e-3) for kind, net in nets.items()}
    times: dict[str, list[float]] = {kind: [] for kind in nets}
    for _ in range(repeats + 1):
        for kind, net in nets.items():
            times[kind].append(clock(partial(step, net, optimizers[kind], x, y)))
    best = {kind: min(t[1:]) for kind, t in times.items()}  # without the first, which warms up
    middle = {kind: median(t[1:]) for kind, t in times.items()}
    return {
        "title": CASES[name].title,
        "batch": len(x),
        "network_s": best["network"],
        "linearised_s": best["linearised"],
        "ratio": best["linearised"] / best["network"],
        "ratio_of_medians": middle["linearised"] / middle["network"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "linearize.json")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)  # two would wait for each other wherever something else runs
    cases = {}
    print("| network | batch | step, ms | linearised, ms | ratio |\n|---|---|---|---|---|")
    for name in BATCH:
        found = cases[name] = measure(name, args.repeats)
        ms = [f"{1e3 * found[k]:.2f}" for k in ("network_s", "linearised_s")]
        print(f"| {found['title']} | {found['batch']} | {ms[0]} | {ms[1]} | {found['ratio']:.2f} |", flush=True)
    result = {"environment": environment() | {"threads": torch.get_num_threads()}, "cases": cases}
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
