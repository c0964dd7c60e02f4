"""The conformance suite finds kernels that are none."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import Net

import tangency as tg
from tangency.kernels.kernel import Empirical

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
    return Spoiled(good.name, good.features, good.trace, None, spoil)


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


# Faults of the engine that once were there, put back in: the suite must see each of them on a user's model.


def shared() -> nn.Module:
    c = nn.Linear(4, 4)
    return nn.Sequential(c, nn.Tanh(), c, nn.Linear(4, 2)).double()


def test_a_model_that_is_spoilt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_name(model: nn.Module, values: Any, args: Any, kwargs: Any, empty: Any = ()) -> Any:
        return torch.func.functional_call(model, dict(values), args, kwargs)

    tg.testing.check_kernel(tg.trace_ntk(shared()), X)
    monkeypatch.setattr(tg.engine.borrow, "run", by_name)
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
    monkeypatch.setattr(tg.engine.capture, "measured", by_count)
    with pytest.raises(AssertionError, match="block|permutation|plain autograd"):
        tg.testing.check_kernel(tg.trace_ntk(model), x)


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_a_wrong_fallback_that_nobody_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.cosine_similarity(m.f(x)[:, None], m.p[None], -1)

    model = Net(forward, f=nn.Linear(4, 3), p=nn.Parameter(torch.randn(2, 3))).double()
    real = tg.engine.jacobian.jacobian_vmap
    tg.testing.check_kernel(tg.trace_ntk(model), X)
    monkeypatch.setattr(tg.engine.jacobian, "jacobian_vmap", lambda *a: {k: 3 * g for k, g in real(*a).items()})
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
    tg.testing.check_kernel(tg.trace_ntk(model, train="stem"), x)
    every = {"stem.weight": "forced", "stem.bias": "forced"}

    def alone(network: Any, state: Any, pair: Any, plan: Any, *rest: Any) -> Any:
        return replace(plan, fallback=every, looped=frozenset(every), company=False)

    monkeypatch.setattr(tg.engine.probe, "_verified", alone)
    with pytest.raises(AssertionError, match="block|plain autograd"):
        tg.testing.check_kernel(tg.trace_ntk(model, train="stem"), x)


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
    real = tg.engine.borrow.Snapshot._keep

    def all_but_the_cache(self: Any, value: Any, *rest: Any, **options: Any) -> None:
        if value is not model.cache:
            real(self, value, *rest, **options)

    monkeypatch.setattr(tg.engine.borrow.Snapshot, "_keep", all_but_the_cache)
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
    (plan,) = kernel.features.plans.values()
    kernel.features.plans["always the same"] = plan
    found = tg.engine.jacobian.Recorder.__torch_function__

    def blind(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = found(self, *args, **kwargs)
        self.calls = plan.calls
        return out

    monkeypatch.setattr(tg.engine.jacobian.Recorder, "__torch_function__", blind)
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
