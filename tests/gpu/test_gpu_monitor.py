"""A training on the GPU watched: samples and targets from the CPU, a log that is resumed, random numbers untouched."""

from pathlib import Path

import torch
from on_device import CUDA, DEVICE
from torch import nn
from torch.nn import functional as F

import tangency as tg


def test_a_training_on_the_gpu_is_watched_from_samples_on_the_cpu(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 2)).to(DEVICE)
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    record = list(tg.dynamics.QUANTITIES)
    options = {"y": y, "loss": F.cross_entropy, "record": record, "log": tmp_path / "run.jsonl", "every": 1}
    monitor = tg.dynamics.Monitor(tg.trace_ntk(net), x, **options)
    state = torch.get_rng_state(), torch.cuda.get_rng_state(DEVICE) if CUDA else None
    monitor.step(0)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert state[1] is None or torch.equal(torch.cuda.get_rng_state(DEVICE), state[1])
    assert net.training
    with torch.no_grad():
        for p in net.parameters():
            p += 0.1 * torch.randn_like(p)
    again = tg.dynamics.Monitor(tg.trace_ntk(net), x, resume=True, **options)
    again.step(1)
    found = again.history()
    assert float(found["change"][1]) > 0.01
    assert float(found["moved"][1]) > 0.1
    assert all(bool(column.isfinite().all()) for column in found.values.values())
