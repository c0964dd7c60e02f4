"""Trainings whose steps are CUDA graphs, beside those that Python starts one by one.

cuDNN's backward passes add up with atomics, in any order: two trainings of a ResNet18 of width 4 from one seed, both
started from Python, are 1.3e-2 apart after 24 steps on an H200. So every network is compared under torch's
deterministic algorithms, where a recorded training is the other to the last bit.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_device import CUDA, DEVICE, Errors, error
from torch import Tensor, nn

import tangency as tg
from tangency.errors import PerformanceWarning

pytestmark = pytest.mark.gpu


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), *tg.models.mlp([192, 32, 32, 1]))


def lenet() -> nn.Module:
    return tg.models.lenet5(1, 3, 8, pool=nn.AvgPool2d, padding=2)


def resnet() -> nn.Module:
    return tg.models.resnet18(1, width=4)


def linearised(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: tg.linearize(make().eval())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "lenet": lenet,
    "resnet": resnet,
    "linearised perceptron": linearised(perceptron),
    "linearised lenet": linearised(lenet),
    "linearised resnet": linearised(resnet),
}
RECIPES: dict[str, dict[str, Any]] = {
    "momentum": {"nesterov": False, "schedule": "onecycle", "warmup": 0.0},
    "nesterov": {"weight_decay": 1e-3},
    "plain": {"momentum": 0.0},
    "adam": {"optimizer": "adam", "schedule": "cosine"},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
}


def trained(make: Callable[[], nn.Module], **changes: Any) -> tuple[nn.Module, tg.models.Training]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, 8, 8, generator=generator)
    y = (x.mean((1, 2, 3)) > 0).long()
    net = tg.models.initialized(make, seed=1).to(DEVICE)
    options = {"lr": 0.005, **changes}
    # Batches of 33 and 34: both sizes are recorded.
    return net, tg.models.fit(net, x, y, epochs=4, batch=34, test=(x[:50], y[:50]), seed=2, progress=False, **options)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's deterministic algorithms, and afterwards what there was."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def flat(net: nn.Module) -> Tensor:
    return torch.cat([v.flatten().double() for v in net.state_dict().values()])


@pytest.mark.filterwarnings("error::tangency.PerformanceWarning")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["perceptron", "linearised lenet"])
def test_the_same_training(name: str, recipe: str, errors: Errors) -> None:
    (plain, one), (other, two) = (trained(NETWORKS[name], captured=c, **RECIPES[recipe]) for c in (False, True))
    errors.below("recorded steps, weights", error(flat(other), flat(plain)), 1e-4)
    errors.below("recorded steps, losses", error(two.batch_loss, one.batch_loss), 1e-3)


@pytest.mark.filterwarnings("error::tangency.PerformanceWarning")
@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network(name: str) -> None:
    """Bit for bit."""
    (plain, one), (other, two) = (trained(NETWORKS[name], captured=c) for c in (False, True))
    assert torch.equal(flat(other), flat(plain))
    assert torch.equal(two.batch_loss, one.batch_loss)
    assert one.test_accuracy is not None
    assert two.test_accuracy is not None
    assert one.batch_loss.shape == two.batch_loss.shape == (24,)


@pytest.mark.filterwarnings("error::tangency.PerformanceWarning")
def test_in_16_bits(errors: Errors) -> None:
    if not CUDA:
        pytest.skip("bfloat16 is for CUDA alone")
    runs = [trained(resnet, captured=c, precision="bfloat16", channels_last=True)[1] for c in (False, True)]
    errors.below("recorded steps, bfloat16", error(runs[1].batch_loss, runs[0].batch_loss), 0.1)


class Asking(nn.Module):
    """Waits for a number from the GPU, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (1.0 if float(x.detach().norm()) >= 0 else 2.0)


@pytest.mark.filterwarnings("error::tangency.PerformanceWarning")
def test_one_training_after_another() -> None:
    """A graph that an earlier training left to Python must not be thrown away while the next is recorded."""
    for _ in range(8):
        trained(perceptron, captured=True)
        trained(lenet, captured=True)


def test_what_cannot_be_recorded() -> None:
    if not CUDA:
        pytest.skip("on a CPU everything can be repeated")
    here = torch.cuda.current_stream()
    with pytest.warns(PerformanceWarning, match="cannot be recorded as a CUDA graph"):
        net, _ = trained(Asking, captured=True)
    assert torch.cuda.current_stream() == here
    plain, _ = trained(Asking)
    assert torch.allclose(flat(net), flat(plain), atol=1e-5)
    trained(perceptron, captured=True)  # the next one can be recorded
