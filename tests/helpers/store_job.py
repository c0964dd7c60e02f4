"""A job that other processes run: `tests/gram/test_store.py` starts, kills and restarts it."""

import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import nn

import tangency as tg
from tangency.gram import sweep

TILE, N = 16, 200


def kernel(seed: int = 0) -> tg.Kernel:
    torch.manual_seed(seed)
    return tg.trace_ntk(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(N, 6, generator=torch.Generator().manual_seed(seed))


def run(store: str, log: str, pause: float, most: int | None = None) -> None:
    """Compute into the store, writing the name of every tile to the log as it is made, `pause` seconds each.

    After `most` tiles it waits to be killed: however late the killer comes, the job has not finished.
    """
    torch.set_num_threads(1)
    tiles, made = sweep.Sweep.tiles, count()

    def slow(self: sweep.Sweep, task: Any) -> Iterator[Any]:
        with open(log, "a", encoding="utf-8") as f:
            for i, j, tile in tiles(self, task):
                f.write(f"{i} {j}\n")
                f.flush()
                if next(made) == most:  # of all tasks
                    threading.Event().wait()
                time.sleep(pause)
                yield i, j, tile

    sweep.Sweep.tiles = slow  # type: ignore[method-assign]
    tg.compute(kernel(), inputs(), store=store, tile=TILE, progress=False)
