"""An audit on the device says what it says on the CPU, from Grams in memory, on disk, and from projected features."""

import copy
from pathlib import Path

import pytest
import torch
from on_device import DEVICE

import tangency as tg

pytestmark = pytest.mark.gpu


def samples(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return torch.randn(n, 3, generator=g) + 3 * torch.eye(3)[y], y


@pytest.mark.parametrize("how", ["memory", "disk", "features", "targets"])
def test_an_audit_is_the_same_everywhere(how: str, tmp_path: Path) -> None:
    (x, y), (z, y_test) = samples(120, 0), samples(30, 1)
    y[:6] = (y[:6] + 1) % 3
    net = tg.models.mlp([3, 32, 3])
    tg.models.fit(net, x, y, epochs=8, lr=1e-2, optimizer="adam", progress=False)
    found = []
    for device in ("cpu", DEVICE):
        here = copy.deepcopy(net).eval().to(device)
        kernel = tg.cosine(tg.projected(tg.trace_ntk(here), dim=40)) if how == "features" else "trNTK"
        store = tmp_path / str(len(found)) if how == "disk" else None
        given = (x[:, :3] ** 2, z[:, :3] ** 2) if how == "targets" else (y, y_test)
        train, test = ((v.to(device), t) for v, t in zip((x, z), given, strict=True))
        found.append(tg.audit(here, train, test, kernel=kernel, store=store, progress=False))
    for name in ("margin", "wrong"):
        torch.testing.assert_close(*(getattr(f.suspects, name).cpu().double() for f in found), rtol=1e-3, atol=1e-3)
    assert [f.choice.kernel for f in found] == [found[0].choice.kernel] * 2
    torch.testing.assert_close(*(f.cleaning.dropped.cpu() for f in found if f.cleaning), rtol=1e-2, atol=2e-2)
