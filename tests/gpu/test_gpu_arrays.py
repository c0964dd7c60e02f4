"""Grams on the GPU where other libraries want arrays; samples in arrays for a model on the GPU."""

import numpy as np
import torch
from on_device import DEVICE
from torch import nn

import tangency as tg


def test_a_gram_on_the_gpu_comes_to_the_cpu_for_numpy_and_stays_for_torch() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE)
    x = np.random.default_rng(0).normal(size=(9, 3))
    gram = tg.compute(tg.trace_ntk(model), x)
    assert gram.device is not None
    for made in (gram, gram.cosine(), gram.select([3, 1], [0])):
        assert torch.as_tensor(made).device.type == torch.asarray(made).device.type == gram.device.type
        assert torch.equal(torch.as_tensor(made), made.dense())
        np.testing.assert_array_equal(np.asarray(made), made.dense().cpu().numpy())
        np.testing.assert_array_equal(made.numpy(), np.asarray(made))


def test_summands_on_the_gpu_each_get_their_own_type() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE)
    x = torch.randn(7, 3, dtype=torch.float64, device=DEVICE)
    narrow, wide = tg.trace_ntk(model), tg.trace_ntk(model, dtype="float64")
    torch.testing.assert_close((narrow + wide)(x), narrow(x).double() + wide(x), rtol=1e-6, atol=1e-6)
