"""Steps recorded and replayed: on a CPU the same path without a graph, beside steps that Python takes one by one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.errors import InputError, PerformanceWarning
from tangency.models import train
from tangency.models.recorded import FIRST, Recorded

CPU = torch.device("cpu")


def data(n: int = 50) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] + x[:, 1] > 0).long()


def network() -> nn.Module:
    layers = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))  # noqa: E731
    return tg.models.initialized(layers, seed=1)


def linearised() -> nn.Module:
    return tg.linearize(network().eval())


RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0},
    "momentum, falling": {"nesterov": False, "schedule": "onecycle", "warmup": 0.0, "weight_decay": 1e-3},
    "nesterov": {"schedule": "cosine"},
    "adam": {"optimizer": "adam", "warmup": 0.3},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
}


@pytest.mark.parametrize("make", [network, linearised])
@pytest.mark.parametrize("name", RECIPES)
def test_the_same_training_to_the_bit(name: str, make: Any) -> None:
    x, y = data()
    runs = []
    for captured in (False, True):
        net = make()
        recipe = tg.models.Recipe(epochs=4, batch=16, lr=0.02, captured=captured, **RECIPES[name])
        runs.append((net, tg.models.fit(net, x, y, recipe, test=(x, y), seed=3)))
    (plain, one), (other, two) = runs
    for a, b in zip(plain.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.batch_loss, two.batch_loss)
    assert torch.equal(one.loss, two.loss)
    assert one.test_accuracy is not None
    assert two.test_accuracy is not None
    assert torch.equal(one.test_accuracy, two.test_accuracy)
    assert all(p.grad is None for p in other.parameters())


def test_the_loss_of_each_batch() -> None:
    x, y = data()
    net = network()
    before = copy.deepcopy(net).train()
    past = tg.models.fit(net, x, y, epochs=3, batch=len(x))
    assert past.batch_loss.shape == (3,)
    assert torch.equal(past.batch_loss, past.loss)  # one batch is an epoch
    first = nn.functional.binary_cross_entropy_with_logits(before(x)[:, 0], y.float())
    assert float(past.batch_loss[0]) == pytest.approx(float(first.detach()), rel=1e-6)
    sizes = torch.tensor([17.0, 17.0, 16.0], dtype=torch.float64)
    uneven = tg.models.fit(network(), x, y, epochs=2, batch=20)
    torch.testing.assert_close(uneven.loss, uneven.batch_loss.view(2, 3) @ sizes / 50)


def test_each_size_of_batch_is_recorded_once() -> None:
    places: list[int] = []

    def step(rows: Tensor) -> Tensor:
        places.append(rows.data_ptr())
        return rows.sum(dtype=torch.float64)[None]

    take = Recorded(step, CPU)
    batches = [torch.arange(k, k + 4 - (k % 2)) for k in range(20)]
    found = [float(take(rows)) for rows in batches]
    assert found == [float(rows.sum()) for rows in batches]
    replayed = places[2 * FIRST :]  # at one address for each size
    assert len(set(replayed)) == 2
    assert sorted(take.replays) == [3, 4]
    assert torch.equal(batches[-1], torch.arange(19, 22))  # the given rows are not written to


def test_what_cannot_be_recorded_is_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Recorded(lambda rows: rows[:1], CPU)

    def refusing(place: Tensor) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(take, "_recorded", refusing)
    with pytest.warns(PerformanceWarning, match=r"cannot be recorded .*\(operation not permitted when stream is captu"):
        found = [int(take(torch.tensor([k]))) for k in range(6)]
    assert found == list(range(6))


@pytest.mark.parametrize("lr", [0.02, 1e30])
def test_nothing_recorded_outlives_the_training(lr: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python may throw a graph away while another is recorded, which CUDA does not permit."""
    made: list[Recorded] = []

    class Watched(Recorded):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(train, "Recorded", Watched)
    recorded = []
    monkeypatch.setattr(Watched, "forget", lambda self: (recorded.append(len(self.replays)), Recorded.forget(self)))
    x, y = data()
    try:
        tg.models.fit(network(), x, y, epochs=2, batch=10, lr=lr, captured=True)
    except tg.DidNotConverge:
        assert lr > 1
    assert recorded == [1]
    assert not made[0].replays


def test_what_a_graph_would_repeat_is_refused() -> None:
    options: tuple[tuple[dict[str, Any], str], ...] = (
        ({"augment": "flip_crop"}, "augment= draws other changes at every step"),
        ({"optimizer": torch.optim.SGD}, "optimizer= is a function"),
        ({"precision": "float16"}, "precision='float16' looks at the gradients"),
    )
    for option, reason in options:
        with pytest.raises(InputError, match=f"captured=True records one step.*{reason}.*Leave one of the two out"):
            tg.models.Recipe(captured=True, **option)
