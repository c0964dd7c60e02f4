"""The reference that nothing may fool: rules and fallback against autograd on two samples, for each plan."""

import copy
import pickle
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import jacobians_loop, trace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import Net, parameter

import tangency as tg
from tangency import jacobian
from tangency.testing import by_autograd

F64 = torch.float64
X = torch.randn(5, 4, dtype=F64, generator=torch.Generator().manual_seed(0))


def want(model: nn.Module, x: Any = X) -> Tensor:
    j = jacobians_loop(model, x)
    return trace(j, j)


def two(kernel: Any, x: Any) -> Tensor:
    return by_autograd(kernel.features.network, x, trace=True)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def prototypes() -> nn.Module:
    """`p` has no rule: it meets data in a cosine."""
    torch.manual_seed(0)
    return Net(
        lambda m, x: F.cosine_similarity(m.f(x)[:, None], m.p[None], -1), f=nn.Linear(4, 3), p=parameter(2, 3)
    ).double()


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_a_fallback_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be compared with itself."""
    real = jacobian.jacobian_vmap
    model = prototypes()

    def threefold(*args: Any) -> dict[str, Tensor]:
        return {k: 3 * g for k, g in real(*args).items()}

    monkeypatch.setattr("tangency.probe.jacobian_vmap", threefold)
    monkeypatch.setattr("tangency.jacobian.jacobian_vmap", threefold)
    kernel = tg.trace_ntk(model)
    close(kernel(X), want(model))
    (plan,) = kernel.features.plans.values()
    assert plan.looped == {"p"}
    loop = jacobian.jacobian_loop
    monkeypatch.setattr("tangency.probe.jacobian_loop", lambda *a, **k: {n: 3 * g for n, g in loop(*a, **k).items()})
    with pytest.raises(tg.ModelError, match="two ways to take the gradient of p"):
        tg.trace_ntk(model)(X)


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_torch_func_is_used_where_it_is_right() -> None:
    kernel = tg.trace_ntk(prototypes())
    kernel(X)
    (plan,) = kernel.features.plans.values()
    assert set(plan.fallback) == {"p"}
    assert not plan.looped


def test_autograd_on_one_sample_is_not_trusted() -> None:
    """torch's own batch norm in evaluation mode has a wrong derivative for one sample whose gradient is transposed."""
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.out(m.norm(m.stem(x)).flatten(2).transpose(1, 2).tanh()).mean(1),
        stem=nn.Conv2d(2, 6, 3, padding=1),
        norm=nn.BatchNorm2d(6),
        out=nn.Linear(6, 3, bias=False),
    ).double()
    nn.init.normal_(model.norm.running_mean)
    nn.init.uniform_(model.norm.running_var, 0.5, 2)
    nn.init.normal_(model.norm.weight)
    x = torch.randn(4, 2, 5, 5, dtype=F64)
    kernel = tg.trace_ntk(model.eval())
    got = kernel(x)
    (plan,) = kernel.features.plans.values()
    assert not plan.fallback
    close(got, by_autograd(kernel.features.network, x, trace=True))
    close(torch.cat([kernel(x[k : k + 1], x) for k in range(4)]), got)  # nor in batches of one of our own
    e, i = 1e-6, (0, 0, 1, 1)  # and with finite differences
    w = model.stem.weight
    with torch.no_grad():
        w[i] += e
        up = model(x)
        w[i] -= 2 * e
        down = model(x)
        w[i] += e
    flat = sum(v * s for v, s in zip(i, w.stride(), strict=True))
    column = kernel.features(x)["stem.weight"].expand()[:, :, flat]
    torch.testing.assert_close(column, (up - down) / (2 * e), rtol=1e-6, atol=1e-7)


class Cached(nn.Module):
    """A bias that is gathered once in evaluation mode, as LeViT, TinyViT and EfficientFormer do."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.table, self.cache = nn.Linear(4, 3), parameter(5), {}
        self.register_buffer("index", torch.tensor([0, 3, 1]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.f(x).tanh() * self.table[self.index]
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.table[self.index]
        return self.f(x).tanh() * self.cache["cpu"]


@pytest.mark.parametrize("filled", [False, True])
def test_weights_that_a_model_caches(filled: bool) -> None:
    torch.manual_seed(0)
    model = Cached().double().eval()
    other = {k: v + 0.3 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    plain = copy.deepcopy(model).train()  # does not cache
    if filled:
        with torch.no_grad():
            model(X)
    before = model(X) if filled else None
    close(tg.trace_ntk(model)(X), want(plain))
    k = tg.trace_ntk(model, params=other)
    plain.load_state_dict(other)
    close(k(X), want(plain))
    assert list(model.cache) == (["cpu"] if filled else [])
    if before is not None:
        close(model(X), before)


def test_a_cache_of_other_weights_is_refused() -> None:
    model = Cached().double().eval()
    with torch.no_grad():
        model(X)
        model.table += 1
    with pytest.raises(tg.ModelError, match=r"cache keeps values that were computed with other parameters.*train\(\)"):
        tg.trace_ntk(model)(X)


def test_weights_made_in_eval_are_refused() -> None:
    class Made(Cached):
        def train(self, mode: bool = True) -> "Made":
            super().train(mode)
            if not mode:
                self.ab = self.table[self.index].detach()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.f(x).tanh() * (self.table[self.index] if self.training else self.ab)

    model = Made().double().eval()
    with pytest.raises(tg.ModelError, match="do not depend on the parameter table, but its module keeps a tensor ab"):
        tg.trace_ntk(model)(X)
    assert tg.trace_ntk(model, train="f")(X).shape == (5, 5)


class Flagged(nn.Module):
    """A flag, among the inputs or an attribute, decides where the samples lie."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.turned = nn.Linear(4, 4), nn.Linear(4, 2), False

    def forward(self, x: Tensor, turned: bool = False) -> Tensor:
        x = x.view(-1, 2, 4)
        if turned or self.turned:
            return self.g(self.f(x.transpose(0, 1)).tanh()).sum(0)
        return self.g(self.f(x).tanh()).sum(1) * 2


def test_plans_belong_to_flags() -> None:
    torch.manual_seed(0)
    model, x = Flagged().double(), torch.randn(2, 8, dtype=F64)
    kernel = tg.trace_ntk(model)
    for given in ((x, False), (x, True), x, {"x": x, "turned": True}, {"x": x, "turned": False}):
        close(kernel(given), two(kernel, given))
    model.turned = True
    close(kernel(x), two(kernel, x))


WAY = ["straight"]


def test_a_change_that_no_attribute_shows() -> None:
    """A global: the sequence of calls gives it away."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 4)
        if WAY[0] == "turned":
            return m.g(m.f(x.transpose(0, 1)).tanh()).sum(0)
        return m.g(m.f(x).tanh()).sum(1)

    torch.manual_seed(0)
    model, x = Net(forward, f=nn.Linear(4, 4), g=nn.Linear(4, 2)).double(), torch.randn(2, 8, dtype=F64)
    kernel = tg.trace_ntk(model)
    for way in ("straight", "turned", "straight"):
        WAY[0] = way
        close(kernel(x), want(model, x))


def test_plans_stay_in_their_process() -> None:
    kernel = tg.trace_ntk(nn.Linear(4, 2).double())
    kernel(X)
    assert kernel.features.plans
    assert not pickle.loads(pickle.dumps(kernel)).features.plans


class DropPath(nn.Module):
    """Stochastic depth: in most runs of two samples nothing is dropped."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.body, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.body(x)
        return x + self.body(x) * float(self.draw() > 0.02)


@pytest.mark.parametrize(
    "draw", [lambda: float(torch.rand(())), random.random, lambda: __import__("numpy").random.rand()]
)
def test_stochastic_depth_in_training_mode_is_always_refused(draw: Any) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        random.seed(seed)
        model = nn.Sequential(DropPath(draw), DropPath(draw)).double()
        with pytest.raises(tg.ModelError, match="draws random numbers in training mode"):
            tg.trace_ntk(model)(X)
        close(tg.trace_ntk(model.eval())(X), want(model))


def test_draws_without_effect_are_harmless_in_evaluation_mode() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        torch.rand(())  # as older libraries do before they look at self.training
        return m.f(x)

    model = Net(forward, f=nn.Linear(4, 2)).double().eval()
    close(tg.trace_ntk(model)(X), want(model))


def test_the_callers_autocast_is_left_outside() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), X.float()
    k = tg.trace_ntk(model)(x)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(tg.trace_ntk(model)(x), k)
        assert torch.equal(tg.compute(tg.trace_ntk(model), x, progress=False).dense(), k)


def test_the_models_own_autocast_is_its_own() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            h = m.f(x).tanh()
        return m.g(h.float())

    torch.manual_seed(0)
    model, x = Net(forward, f=nn.Linear(4, 6), g=nn.Linear(6, 2)), X.float()
    torch.testing.assert_close(tg.trace_ntk(model)(x), want(model, x), rtol=2e-2, atol=2e-2)


def test_mixed_types() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x: m.g(m.f(x.float()).tanh().double()), f=nn.Linear(4, 3), g=nn.Linear(3, 2).double())
    got = tg.trace_ntk(model)(X)
    assert got.dtype == F64
    j = {k: v.double() for k, v in jacobians_loop(model, X).items()}
    torch.testing.assert_close(got, trace(j, j), rtol=1e-6, atol=1e-6)


def test_checkpointed_blocks() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model = Net(
        lambda m, x: m.out(checkpoint(m.block, x, use_reentrant=False)), block=block, out=nn.Linear(3, 2)
    ).double()
    close(tg.trace_ntk(model)(X), want(model))
    model = Net(
        lambda m, x: m.out(checkpoint(m.block, x + 0 * m.p, use_reentrant=True)),
        block=block,
        out=nn.Linear(3, 2),
        p=parameter(4),
    ).double()
    with pytest.raises(tg.ModelError, match="use_reentrant=False"):
        tg.trace_ntk(model)(X)


def test_in_place_forms_that_autograd_trains() -> None:
    def after_a_sum(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        y = h + m.p
        h *= 2
        return y.tanh() + h

    def biases_alone(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).tanh()
        y = m.b(h)
        h += y
        return h

    torch.manual_seed(0)
    model = Net(after_a_sum, a=nn.Linear(4, 3), p=parameter(3)).double()
    close(tg.trace_ntk(model)(X), want(model))
    model = Net(biases_alone, a=nn.Linear(4, 3), b=nn.Linear(3, 3)).double()
    for p in (*model.a.parameters(), model.b.weight):
        p.requires_grad_(False)
    close(tg.trace_ntk(model)(X), want(model))


def test_wrappers_are_opened() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    k = tg.trace_ntk(inner)(X)
    parallel = nn.DataParallel(inner)
    assert torch.equal(tg.trace_ntk(parallel)(X), k)
    assert torch.equal(tg.trace_ntk(parallel, params=parallel.state_dict())(X), k)
    assert torch.equal(tg.trace_ntk(parallel, train="module.2")(X), tg.trace_ntk(inner, train="2")(X))
    part = Net(lambda m, x: m.b(m.a(x)), a=torch.compile(inner, backend="eager"), b=nn.Linear(2, 2).double())
    plain = Net(lambda m, x: m.b(m.a(x)), a=inner, b=part.b)
    close(tg.trace_ntk(part)(X), tg.trace_ntk(plain)(X))


def test_nested_inputs() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor, state: tuple[Tensor, Tensor], more: dict[str, Any]) -> Tensor:
        h, c = (s.transpose(0, 1).contiguous() for s in state)
        return m.rnn(x[:, :, None], (h, c))[0][:, -1] * more["scale"]["by"]

    model = Net(forward, rnn=nn.LSTM(1, 3, batch_first=True)).double()
    x = (X, (torch.randn(5, 1, 3, dtype=F64), torch.randn(5, 1, 3, dtype=F64)), {"scale": {"by": 2.0}, "flag": None})
    kernel = tg.trace_ntk(model)
    close(kernel(x), two(kernel, x))
    close(tg.compute(kernel, x, tile=2, progress=False).dense(), two(kernel, x))
    with pytest.raises(tg.InputError, match=r"x\[1\]\[0\].*: 1"):
        kernel((X, (torch.randn(1, 5, 3, dtype=F64), torch.randn(1, 5, 3, dtype=F64)), {"scale": {"by": 1.0}}))


def test_tensors_without_values() -> None:
    with pytest.raises(tg.InputError, match="weight is on the meta device"):
        tg.trace_ntk(nn.Linear(4, 2, device="meta"))


def test_a_parameter_that_forward_changes_is_refused() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = Clipped(4, 2).double()
    before = model.weight.detach().clone()
    with pytest.raises(tg.ModelError, match="forward\\(\\) changes the parameter weight in place"):
        tg.trace_ntk(model)(X)
    assert torch.equal(model.weight, before)


def test_an_attribute_that_forward_changes_is_refused() -> None:
    class Running(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.mean = torch.zeros(4, dtype=F64)

        def forward(self, x: Tensor) -> Tensor:
            self.mean += x.mean(0)
            return super().forward(x + self.mean)

    model = Running().double()
    with pytest.raises(tg.ModelError, match="forward\\(\\) changes the tensor mean in place"):
        tg.trace_ntk(model)(X)
    assert torch.equal(model.mean, torch.zeros(4, dtype=F64))
