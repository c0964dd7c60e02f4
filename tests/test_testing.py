"""The conformance suite finds kernels that are none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from zoo import Net

import tangency as tg
from tangency.kernels.empirical import Empirical

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, eq=False)
class Spoiled(Empirical):
    """A good kernel with a fault in its tiles."""

    spoil: Callable[[Tensor], Tensor] = torch.clone

    def pair(self, a: object, b: object, workspace: int | None = None) -> Tensor:
        return self.spoil(super().pair(a, b, workspace))  # type: ignore[arg-type]


def spoiled(spoil: Callable[[Tensor], Tensor]) -> Spoiled:
    torch.manual_seed(0)
    good = tg.trace_ntk(tg.models.mlp([4, 6, 2]).double())
    return Spoiled(good.name, good.feature_map, good.trace, None, spoil)


def calls() -> Callable[[Tensor], Tensor]:
    count = [0]

    def drift(k: Tensor) -> Tensor:
        count[0] += 1
        return k * (1 + 1e-14 * count[0])

    return drift


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda k: k + torch.triu(torch.ones_like(k), 1), "symmetry"),
        (lambda k: k - 100 * torch.eye(*k.shape, dtype=k.dtype), "not positive semidefinite"),
        (lambda k: 2 * k, "diag"),
        (lambda k: k[:, :-1], "must be square"),
        (lambda k: k + 0.1 * torch.outer(torch.arange(len(k)), torch.arange(k.shape[1])), "diag|block|permutation"),
        (calls(), "different numbers"),
    ],
)
def test_faults_are_found(spoil: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        tg.testing.check_kernel(spoiled(spoil), X)


def test_the_unspoiled_one_passes() -> None:
    tg.testing.check_kernel(spoiled(torch.clone), X)
    with pytest.raises(AssertionError, match="at least three"):
        tg.testing.check_kernel(spoiled(torch.clone), X[:2])


# Every clause of the contract, broken in a kernel that a user might have written.


class Quadratic(tg.Kernel):
    def prepare(self, x: Tensor, memory: int | None = None) -> Tensor:
        return x

    def pair(self, a: Tensor, b: Tensor, workspace: int | None = None) -> Tensor:
        return (1 + a @ b.T) ** 2

    def spec(self) -> dict[str, object]:  # type: ignore[override]
        return {"kernel": "quadratic"}


def counted(self: Any) -> dict[str, object]:
    self.count = getattr(self, "count", 0) + 1
    return {"kernel": "quadratic", "count": self.count}


def with_memory(self: Any, x: Tensor, memory: int | None = None) -> Tensor:
    return x if memory is None else 2 * x


def with_workspace(self: Any, a: Tensor, b: Tensor, workspace: int | None = None) -> Tensor:
    return (1 + a @ b.T) ** (2 if workspace is None else 3)


def spends_its_batch(self: Any, a: Tensor, b: Tensor, workspace: int | None = None) -> Tensor:
    k = (1 + a @ b.T) ** 2
    if len(a) == len(b) == len(X):
        a *= 0.5
    return k


def drifts(self: Any, x: Tensor, name: str = "x") -> Tensor:
    tg._base.tree.check(x, name)
    return x + 1e-13


def complains(self: Any, a: Tensor) -> None:
    raise tg.NonFiniteError("sample 0 is not finite", 0, "")


def doubled_when_unpickled(self: Any, state: Any) -> None:
    self.pair = lambda a, b, workspace=None: 2 * (1 + a @ b.T) ** 2


BROKEN = {
    "spec\\(\\) must be JSON": {"spec": counted},
    'the kernel\'s name under "kernel"': {"spec": lambda self: {"name": "quadratic"}},
    "with bounds on memory": {"prepare": with_memory},
    "two prepared batches of the same samples": {"pair": with_workspace},
    "a prepared batch serves twice|inputs were changed|different numbers|diag": {"pair": spends_its_batch},
    "leave what is ready as it is": {"ready": drifts},
    "an empty batch must be refused": {"ready": lambda self, x, name="x": x},
    "batches of different kinds": {
        "alike": lambda self, x1, x2: None,
        "pair": lambda self, a, b, workspace=None: (1 + a.flatten(1) @ b.flatten(1).T) ** 2,
    },
    "footprint": {"footprint": lambda self, x: (-1, 0)},
    "two numbers of bytes": {"footprint": lambda self, x: (8.5, 0)},
    "device must be": {"device": property(lambda self: "cpu")},
    "but what is ready lies on": {"device": property(lambda self: torch.device("meta"))},
    "outputs": {"outputs": lambda self, x: torch.zeros(2, 3)},
    "diag\\(x\\) is the diagonal": {"diag": lambda self, x: torch.ones(len(x), dtype=x.dtype)},
    "diag": {"prepared_diag": lambda self, a: torch.ones(len(a), dtype=a.dtype)},
    "prepared_diag is": {
        "prepared_diag": lambda self, a: torch.ones(len(a), dtype=a.dtype),
        "diag": lambda self, x: (1 + x.square().sum(1)) ** 2,
    },
    "parts sum to the whole": {"parts": lambda self, x1, x2=None: {"all": torch.zeros(5, 5, dtype=x1.dtype)}},
    "diagnose\\(\\) complains": {"diagnose": complains},
    "a tile that is not finite": {"finite": lambda self, k, a, b: k},
    "a pickled copy": {"__setstate__": doubled_when_unpickled, "__getstate__": lambda self: {"some": "state"}},
}


def test_a_kernel_of_three_methods_passes() -> None:
    tg.testing.check_kernel(Quadratic(), X)
    tg.testing.check_kernel(tg.cosine(Quadratic()), X)
    tg.testing.check_kernel(tg.sum(Quadratic(), tg.scale(Quadratic(), 2.0)), X)


@pytest.mark.parametrize("message", BROKEN)
def test_each_clause_is_checked(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fault in BROKEN[message].items():
        monkeypatch.setattr(Quadratic, name, fault, raising=False)
    with pytest.raises(AssertionError, match=message):
        tg.testing.check_kernel(Quadratic(), X.clone())


def test_only_the_suite_is_public() -> None:
    assert set(tg.testing.__all__) == {"ModelState", "by_autograd", "check_kernel"}


# Faults of the engine that once were there, put back in: the suite must see each of them on a user's model.


def shared() -> nn.Module:
    c = nn.Linear(4, 4)
    return nn.Sequential(c, nn.Tanh(), c, nn.Linear(4, 2)).double()


def test_a_model_that_is_spoilt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def by_name(model: nn.Module, values: Any, empty: Any = ()) -> Iterator[None]:
        with _reparametrize_module(model, dict(values), tie_weights=True):  # what torch.func.functional_call does
            yield

    tg.testing.check_kernel(tg.trace_ntk(shared()), X)
    monkeypatch.setattr(tg.engine.network, "borrowed", by_name)
    model = shared()
    with pytest.raises(AssertionError, match="_parameters has changed|is another tensor"):
        tg.testing.check_kernel(tg.trace_ntk(model, params=model.state_dict()), X)


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_rows_by_their_count_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = x.reshape(-1, 2)
        mine = (h[:, 0] > 0).nonzero()[:, 0]
        y = torch.zeros(len(h), 3, dtype=x.dtype).index_add(0, mine, m.expert(h[mine]).tanh())
        return m.head(y.reshape(len(x), 2, 3)).flatten(1)

    def by_count(out: Tensor, edges: Any, rules: Any, layouts: Any, narrowest: Any) -> Any:
        return [layout or tg.engine.layout.Layout(0) for layout in layouts]

    torch.manual_seed(0)
    model = Net(forward, expert=nn.Linear(2, 3), head=nn.Linear(3, 2)).double()
    x = torch.tensor([[1.0, 2, -1, 3], [2, -1, -2, 1], [1, 2, 3, 1], [-2, 1, -1, 1]], dtype=torch.float64)
    tg.testing.check_kernel(tg.trace_ntk(model), x)
    monkeypatch.setattr(tg.engine.capture, "measure_layouts", by_count)
    with pytest.raises(AssertionError, match="block|permutation|plain autograd"):
        tg.testing.check_kernel(tg.trace_ntk(model), x)


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_a_wrong_fallback_that_nobody_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.cosine_similarity(m.f(x)[:, None], m.p[None], -1)

    model = Net(forward, f=nn.Linear(4, 3), p=nn.Parameter(torch.randn(2, 3))).double()
    real = tg.engine.fallback.jacobian_vmap
    tg.testing.check_kernel(tg.trace_ntk(model), X)
    monkeypatch.setattr(tg.engine.fallback, "jacobian_vmap", lambda *a: {k: 3 * g for k, g in real(*a).items()})
    with pytest.raises(AssertionError, match="plain autograd"):  # the probe's own is left right
        tg.testing.check_kernel(tg.trace_ntk(model), X)


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_gradients_of_one_sample_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.out(m.norm(m.stem(x)).flatten(2).transpose(1, 2).tanh()).mean(1),
        stem=nn.Conv2d(2, 6, 3, padding=1),
        norm=nn.BatchNorm2d(6),
        out=nn.Linear(6, 3, bias=False),
    ).double()
    nn.init.uniform_(model.norm.running_var, 0.5, 2)
    nn.init.normal_(model.norm.weight)
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    tg.testing.check_kernel(tg.trace_ntk(model.eval()), x)
    tg.testing.check_kernel(tg.trace_ntk(model, trainable="stem"), x)
    every = {"stem.weight": "forced", "stem.bias": "forced"}

    def alone(network: Any, state: Any, pair: Any, plan: Any, *rest: Any) -> Any:
        return replace(plan, fallback=every, looped=frozenset(every), company=False)

    monkeypatch.setattr(tg.engine.probe, "verified", alone)
    with pytest.raises(AssertionError, match="block|plain autograd"):
        tg.testing.check_kernel(tg.trace_ntk(model, trainable="stem"), x)


def test_what_a_forward_pass_leaves_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.table, self.cache = nn.Linear(4, 3), nn.Parameter(torch.randn(3)), {}

        def forward(self, x: Tensor) -> Tensor:
            if "made" not in self.cache:
                self.cache["made"] = self.table.exp()
            return self.f(x) * self.cache["made"]

    model = Cached().double()
    tg.testing.check_kernel(tg.trace_ntk(model), X)
    real = tg.engine.network.Snapshot._keep

    def all_but_the_cache(self: Any, value: Any, *rest: Any, **options: Any) -> None:
        if value is not model.cache:
            real(self, value, *rest, **options)

    monkeypatch.setattr(tg.engine.network.Snapshot, "_keep", all_but_the_cache)
    with pytest.raises((AssertionError, tg.ModelError), match="cache"):
        tg.testing.check_kernel(tg.trace_ntk(model), X)


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_plans_of_another_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(m: Any, x: Tensor, turned: bool = False) -> Tensor:
        x = x.view(-1, 3, 4)
        return m.g(m.f(x.transpose(0, 1)).tanh()).sum(0) if turned else m.g(m.f(x).tanh()).sum(1)

    torch.manual_seed(0)
    model, x = Net(forward, f=nn.Linear(4, 4), g=nn.Linear(4, 2)).double(), torch.randn(3, 12, dtype=torch.float64)
    tg.testing.check_kernel(tg.trace_ntk(model), {"x": x, "turned": True})
    kernel = tg.trace_ntk(model)
    kernel({"x": x, "turned": False})
    monkeypatch.setattr(tg.engine.features.Jacobian, "_key", lambda self, x: "always the same")
    (plan,) = kernel.feature_map.plans.values()
    kernel.feature_map.plans["always the same"] = plan
    found = tg.engine.recorder.Recorder.__torch_function__

    def blind(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = found(self, *args, **kwargs)
        self.calls = plan.calls
        return out

    monkeypatch.setattr(tg.engine.recorder.Recorder, "__torch_function__", blind)
    with pytest.raises(AssertionError, match="block|diag|permutation|plain autograd"):
        tg.testing.check_kernel(kernel, {"x": x, "turned": True})


def test_random_models_are_refused() -> None:
    class DropPath(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            keep = float(torch.rand(()) > 0.02) if self.training else 1.0
            return x + keep * super().forward(x)

    for seed in range(20):
        torch.manual_seed(seed)
        with pytest.raises(tg.ModelError, match="random numbers in training mode"):
            tg.testing.check_kernel(tg.trace_ntk(DropPath(4, 4).double()), X)
