"""Probes of layers on the GPU: the same as on the CPU, nothing brought back but results."""

import pytest
import torch
from on_device import DEVICE, QUIET

import tangency as tg
from tangency.demo import network
from tangency.representations import collapse, layer_outputs, probe

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(q) for q in QUIET)]


def test_a_probe_on_the_gpu_is_that_on_the_cpu() -> None:
    train, test = tg.datasets.digits()
    train, test = train.take(300), test.take(200)
    net = tg.models.initialized(network, seed=0)
    tg.models.fit(net, train, epochs=3, lr=3e-3, batch=50, optimizer="adam", progress=False)
    options = {"layers": ["1", "6"], "dims": (1, 5, 20, 100), "progress": False}
    here = probe(net, train, test, **options)
    net.to(DEVICE)
    for data in ((train, test), tuple(part.with_x(part.x.to(DEVICE)) for part in (train, test))):
        there = probe(net, *data, **options, memory="1MB")
        for a, b in zip(here.layers, there.layers, strict=True):
            for kind, curve in a.accuracy.items():
                torch.testing.assert_close(b.accuracy[kind], curve, atol=0.02, rtol=0)
            assert b.collapse.nc1 == pytest.approx(a.collapse.nc1, rel=1e-2)
            assert b.explained.device.type == "cpu"


def test_features_on_the_gpu() -> None:
    train, _ = tg.datasets.digits()
    net = tg.models.initialized(network, seed=0).eval().to(DEVICE)
    z = layer_outputs(net, train, "6", progress=False)["6"]
    head = net[7]
    there = collapse(z, train.y, head.weight, head.bias)
    here = collapse(z.cpu(), train.y, head.weight.cpu(), head.bias.cpu())
    assert there.nc1 == pytest.approx(here.nc1, rel=1e-6)
    assert there.nc3 == pytest.approx(here.nc3, rel=1e-6)
