"""Many outputs on the GPU: in groups, in 16 bits, by probes with their error; the same answers as on the CPU."""

from pathlib import Path

import pytest
import torch
from on_device import DEVICE, F64, QUIET, Errors, error
from torch import Tensor, nn

import tangency as tg
from tangency.engine import features

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(q) for q in QUIET)]
BOUNDS = {torch.float32: 1e-5, F64: 1e-12, torch.float16: 2e-3}


def case(c: int = 150) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 36, c),
    )  # fmt: skip
    return model.eval(), torch.randn(24, 3, 16, 16)


def on_cpu(probes: int | None) -> Tensor:
    model, x = case()
    return tg.trace_ntk(model.double(), probes=probes)(x.double())


@pytest.fixture
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "WHOLE", 0)
    monkeypatch.setattr(features, "GROUP", 1 << 18)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("probes", [None, 16])
@pytest.mark.usefixtures("in_groups")
def test_groups_and_probes_are_those_of_the_cpu(
    dtype: torch.dtype, probes: int | None, tmp_path: Path, errors: Errors
) -> None:
    model, x = case()
    want = on_cpu(probes)
    kernel = tg.trace_ntk(model.to(DEVICE), dtype=dtype, probes=probes)
    if probes is None:
        assert kernel.feature_map.groups(kernel.ready(x.to(DEVICE)))
    name = f"{str(dtype).removeprefix('torch.')}, {'exact' if probes is None else 'probes'}"
    errors.below(name, error(kernel(x.to(DEVICE)).cpu(), want), BOUNDS[dtype])
    # In tiles, three row blocks at a time meeting a column block; within a budget; in a store.
    made = tg.compute(kernel, x, tile=5, progress=False).dense().cpu()
    errors.below(name, error(made, want), BOUNDS[dtype], "in tiles")
    stored = tg.compute(kernel, x, store=tmp_path / "k", memory="4GiB", progress=False).dense()
    errors.below(name, error(stored.cpu(), want), BOUNDS[dtype], "in a store")


def test_the_error_of_probes_is_that_of_the_cpu(errors: Errors) -> None:
    model, x = case()
    want = tg.probe_error(tg.trace_ntk(model.double(), probes=16), x.double())
    got = tg.probe_error(tg.trace_ntk(model.to(DEVICE), probes=16), x.double().to(DEVICE))
    errors.below("standard error", error(got.standard_error.cpu(), want.standard_error), 1e-9)


@pytest.mark.usefixtures("in_groups")
def test_full_kernels_are_put_together_from_groups(errors: Errors) -> None:
    model, x = case(12)
    want = tg.full_ntk(model.double())(x.double())
    errors.below("full", error(tg.full_ntk(model.to(DEVICE))(x.double().to(DEVICE)).cpu(), want), 1e-10)
