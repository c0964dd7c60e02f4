"""Which limit is taken: every operation says so, `k.limits(x)` by layer, `k.spec()` what the module alone decides."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from tangency._base.types import WORDS
from tangency.infinite.moments.core import DEPTHWISE, EXACT, GAIN, GROUPED, ROWS, RUNNING, WEIGHTS, Op
from tangency.infinite.moments.gated import Gates
from tangency.infinite.moments.ops import Add, BatchNormalize, Mix, Multiply, Normalize
from tangency.infinite.moments.sequences import Attend
from tangency.infinite.moments.windowed import Windowed


def operations(of: type[Op] = Op) -> Iterator[type[Op]]:
    """Every class of operations."""
    for kind in of.__subclasses__():
        yield kind
        yield from operations(kind)


@pytest.mark.parametrize("kind", [k for k in operations() if k.__module__.startswith("tangency.")])
def test_every_operation_says_its_limit(kind: type[Op]) -> None:
    """By `what` and `limit`, inherited where positions only move, or by a `taken` of its own."""
    own = kind.taken is not Op.taken
    assert own or kind.what, f"{kind.__name__} does not say what it is"
    limit = own or kind.limit
    assert limit, f"{kind.__name__} does not say which limit it takes"


def images(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 6, 6, generator=torch.Generator().manual_seed(0))


class Everything(nn.Module):
    """Layers of many kinds; what the module alone cannot tell is in forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.deep, self.group = nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 16, 1, groups=2)
        self.pool, self.gate = nn.MaxPool2d(2), nn.Linear(16, 16)
        self.scale, self.out = nn.Parameter(torch.full((16,), 0.5)), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.group(self.deep(torch.relu(self.norm(self.stem(x)))))).mean((2, 3))
        return self.out(self.scale * (F.silu(self.gate(x)) * x))


def test_every_kind_of_layer_is_told() -> None:
    k = tg.infinite_ntk(Everything().eval(), samples=64)
    found = k.limits(images())
    said = {row.layer: row for row in found.rows}
    assert said["stem"].limits[-1] == WEIGHTS.limit
    assert said["norm"].limits == (RUNNING.limit,)
    assert said["relu"].what == "Relu"
    assert said["relu"].how == "closed form"
    assert said["deep"].limits == (DEPTHWISE.limit,)
    assert said["group"].limits == (GROUPED.limit,)
    assert said["pool"].limits == (Windowed.limit,)
    assert said["pool"].how == "drawn, 64 points"
    assert said["mean"].limits == ()
    assert said["silu"].how == "Hermite expansion"
    assert said["mul"].limits == (Multiply.limit,)
    assert said["mul_1"].limits[0] == GAIN.limit
    assert [row.layer for row in found.rows] == list(said), "one row for each layer"
    modules = ["stem", "norm", "deep", "group", "pool", "gate", "out"]
    assert [row.layer for row in found.rows if row.layer in modules] == modules, "in the order of reading"


def test_it_prints_as_a_table_and_becomes_json() -> None:
    found = tg.infinite_ntk(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))).limits(torch.eye(3))
    lines = str(found).splitlines()
    assert lines[0] == "infinite ntk of Sequential"
    assert lines[1].split() == ["layer", "what", "limit", "computed"]
    assert lines[2].split() == ["0", "input,", "weights", "1,", "2", "exact"]
    assert lines[3].split() == ["1", "Relu", "3", "closed", "form"]
    assert lines[4].split() == ["2", "weights", "2", "exact"]
    assert [line[:2] for line in lines[5:8]] == ["1:", "2:", "3:"]
    assert lines[8:] == ["–: the same at every width."]
    assert found.table() == str(found)
    assert repr(found).startswith("Limits(kernel='infinite ntk of Sequential', rows=(LimitRow")
    made = json.loads(json.dumps(found.to_dict()))
    assert made["rows"][1]["limits"] == list(found.rows[1].limits)
    assert made["environment"]["tangency"] == tg.__version__


def test_sequences_attention_and_norms() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cell = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True)
            self.attend, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
            self.out = nn.Linear(16, 1)

        def forward(self, index: Tensor) -> Tensor:
            h = self.words(index)
            a, _ = self.attend(h, h, h, need_weights=False)
            return self.out(torch.cat([self.norm(h + a), self.cell(h)[0]], -1)[:, -1])

    k = tg.infinite_ntk(Reader(), samples=64)
    said = {row.layer: row for row in k.limits(torch.tensor([[1, 2, 3], [4, 5, 6]])).rows}
    assert said["words"].limits == (ROWS.limit,)
    assert said["cell"].what == "LSTM"
    assert said["cell"].limits == (Gates.limit,)
    assert said["attend"].limits == (f"{Attend.limit}; scores q·k/√d, which are Gaussian",)
    assert said["add"].limits == (Add.limit,)
    assert said["norm"].limits[0] == Normalize.limit
    assert said["cat"].limits[-1] == Mix.limit


def test_scores_are_told_by_their_factor() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1)
            return self.out(weights @ self.v(x)).mean(1)

    said = tg.infinite_ntk(Raw(), samples=64).limits(torch.randn(2, 3, 4)).sentences()
    assert any("scores 2·q·k/√d" in sentence for sentence in said)  # √d of this module, whose scores are not scaled


def test_the_limit_over_a_batch() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    assert any(r.limits == (BatchNormalize.limit,) for r in tg.infinite_ntk(net).limits(torch.randn(4, 3)).rows)
    assert tg.infinite_ntk(net).spec()[WORDS]["1"] == BatchNormalize.limit
    assert tg.infinite_ntk(net.eval()).spec()[WORDS]["1"] == RUNNING.limit


def test_inputs_that_do_not_fit_are_refused() -> None:
    k = tg.infinite_ntk(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    with pytest.raises(tg.errors.InputError, match=r"layer 0 \(Linear\): takes 3 features or channels; it was given 5"):
        k.limits(torch.randn(2, 5))
    with pytest.raises(tg.errors.TangencyError, match="nan|finite"):
        k.limits(torch.full((2, 3), float("nan")))
    with pytest.raises(tg.errors.UnsupportedModule, match="running statistics"):
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        net(torch.randn(9, 3))
        tg.infinite_ntk(net.eval()).limits(torch.randn(2, 3))


def test_the_spec_says_what_the_module_alone_decides() -> None:
    says = tg.infinite_ntk(Everything().eval()).spec()[WORDS]
    assert isinstance(says, dict)
    assert says["stem"] == says["gate"] == says["out"] == WEIGHTS.limit
    assert says["deep"] == DEPTHWISE.limit
    assert says["group"] == GROUPED.limit
    assert says["pool"] == Windowed.limit
    assert "relu" not in says


class Said(tg.Kernel):
    """A kernel whose words may change, and a number that may not."""

    words: ClassVar[str] = "one"
    power: ClassVar[int] = 2

    def prepare(self, x: Tensor, memory: int | None = None) -> Tensor:
        return x

    def pair(self, a: Tensor, b: Tensor, workspace: int | None = None) -> Tensor:
        return (1 + a @ b.T) ** 2

    def spec(self) -> dict[str, object]:
        return {"kernel": "said", "power": self.power, WORDS: {"0": self.words}}


def test_stores_do_not_compare_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores from before there were words, and from before they were changed, stay valid; numbers are compared."""
    x = torch.randn(4, 3)
    tg.compute(Said(), x, store=tmp_path / "k", progress=False)
    monkeypatch.setattr(Said, "words", "two")
    tg.compute(Said(), x, store=tmp_path / "k", progress=False)
    monkeypatch.setattr(Said, "power", 3)
    with pytest.raises(tg.errors.StoreMismatch, match=r"kernel\.power"):
        tg.compute(Said(), x, store=tmp_path / "k", progress=False)


def test_a_store_of_an_infinite_kernel_without_words_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, k = torch.randn(4, 3), tg.infinite_ntk(nn.Linear(3, 1))
    with monkeypatch.context() as before:
        before.setattr(type(k.layer), "says", lambda self: {})
        assert WORDS not in k.spec()
        tg.compute(k, x, store=tmp_path / "k", progress=False)
    assert WORDS in k.spec()
    stored = tg.compute(k, x, store=tmp_path / "k", progress=False)
    assert torch.equal(torch.as_tensor(stored[:]), k(x))


def test_what_is_exact_is_said_once() -> None:
    assert EXACT.startswith("none")
    row = (
        tg.infinite_ntk(nn.Sequential(nn.Conv1d(2, 3, 1), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(6, 1)))
        .limits(torch.randn(2, 2, 4))
        .rows[1]
    )
    assert (row.layer, row.what, row.limits, row.how) == ("1", "pooling", (), "exact")
