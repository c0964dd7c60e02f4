"""One peer's random projection of gradients held in memory, in a process of its own: features, time and memory.

Run with the environment of requirements-projection.txt:

    .venv-projection/bin/python benchmarks/peers/run_projection.py --grads G.npy --peer trak-rademacher --dim 4096 \
        --seed 0 --out F.npy --threads 2
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from dattri.func.projection import random_project
from torch import Tensor
from trak.projectors import BasicProjector, ProjectionType

from benchmarks.peers import common

# dattri's other kinds, sjlt and grass, exist on CUDA devices only: random_project(device="cpu") refuses them.
PEERS = ["trak-rademacher", "trak-normal", "dattri-rademacher", "dattri-normal", "dattri-random_mask"]
Project = Callable[[Tensor], Tensor]


def trak(kind: str, grads: Tensor, dim: int, seed: int) -> tuple[Project, float]:
    """The projector that TRAK takes on a CPU, and the factor it leaves out: its matrix has entries of variance 1."""
    projector = BasicProjector(
        grad_dim=grads.shape[1], proj_dim=dim, seed=seed, proj_type=ProjectionType(kind), device=torch.device("cpu")
    )
    return lambda rows: projector.project(rows, model_id=0), 1 / math.sqrt(dim)


def dattri(kind: str, grads: Tensor, dim: int, seed: int) -> tuple[Project, float]:
    """dattri's projection, and the factor it leaves out: none, but for random_mask, which only picks coordinates."""
    project = random_project(
        grads,
        len(grads),
        proj_dim=dim,
        proj_max_batch_size=32,  # has no effect on a CPU
        proj_seed=seed,
        proj_type=kind,
        device="cpu",
    )
    return project, math.sqrt(grads.shape[1] / dim) if kind == "random_mask" else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grads", type=Path, required=True, help="float32 [n, p], one gradient a row")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="for the features F [n, dim]: F Fᵀ estimates G Gᵀ")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1, help="runs of which the fastest counts")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    library, kind = args.peer.split("-")
    grads = torch.from_numpy(np.load(args.grads))
    before = common.current_rss()

    start = time.perf_counter()
    project, factor = {"trak": trak, "dattri": dattri}[library](kind, grads, args.dim, args.seed)
    setup = time.perf_counter() - start
    seconds: list[float] = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        features = project(grads)
        seconds.append(time.perf_counter() - start)
    peak = common.peak_rss()

    np.save(args.out, (features * factor).numpy())
    report = {
        "peer": args.peer,
        "dim": args.dim,
        "n": grads.shape[0],
        "p": grads.shape[1],
        "threads": args.threads,
        "seconds": min(seconds),
        "setup_seconds": setup,  # making the projector; with more than 100 dimensions its work is done again later
        "peak_rss": peak,
        "rss_before": before,
        "extra_rss": peak - before,
        "versions": {name: version(name) for name in ("torch", "traker", "dattri")},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
