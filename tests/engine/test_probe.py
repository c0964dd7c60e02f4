"""The reference that nothing may fool: rules and fallback against autograd on two samples, for each plan."""

import copy
import itertools
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
from tangency.engine import fallback, features
from tangency.engine.capture_plan import Unfamiliar
from tangency.testing import by_autograd

F64 = torch.float64
X = torch.randn(5, 4, dtype=F64, generator=torch.Generator().manual_seed(0))


def want(model: nn.Module, x: Any = X) -> Tensor:
    j = jacobians_loop(model, x)
    return trace(j, j)


def two(kernel: Any, x: Any) -> Tensor:
    return by_autograd(kernel.feature_map.network, x, trace=True)


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
    real = fallback.jacobian_vmap
    model = prototypes()

    def threefold(*args: Any) -> dict[str, Tensor]:
        return {k: 3 * g for k, g in real(*args).items()}

    monkeypatch.setattr("tangency.engine.verify.jacobian_vmap", threefold)
    monkeypatch.setattr("tangency.engine.fallback.jacobian_vmap", threefold)
    kernel = tg.trace_ntk(model)
    close(kernel(X), want(model))
    (plan,) = kernel.feature_map.plans.values()
    assert plan.looped == {"p"}
    loop = fallback.jacobian_loop
    monkeypatch.setattr(
        "tangency.engine.verify.jacobian_loop", lambda *a, **k: {n: 3 * g for n, g in loop(*a, **k).items()}
    )
    with pytest.raises(tg.ModelError, match="two ways to take the gradient of p"):
        tg.trace_ntk(model)(X)


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_torch_func_that_fails_later_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prototypes()
    kernel = tg.trace_ntk(model)
    kernel(X[:2])

    def fails(*args: Any) -> dict[str, Tensor]:
        raise RuntimeError("inconsistent configuration")

    monkeypatch.setattr("tangency.engine.fallback.jacobian_vmap", fails)
    close(kernel(X), want(model))


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_torch_func_is_used_where_it_is_right() -> None:
    kernel = tg.trace_ntk(prototypes())
    kernel(X)
    (plan,) = kernel.feature_map.plans.values()
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
    (plan,) = kernel.feature_map.plans.values()
    assert not plan.fallback
    close(got, by_autograd(kernel.feature_map.network, x, trace=True))
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
    column = kernel.feature_map(x)["stem.weight"].expand()[:, :, flat]
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
    with pytest.raises(tg.ModelError, match=r"dict 'cache' keeps values that were computed with .*train\(\)"):
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
    assert tg.trace_ntk(model, trainable="f")(X).shape == (5, 5)


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
    assert kernel.feature_map.plans
    assert not pickle.loads(pickle.dumps(kernel)).feature_map.plans


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
@pytest.mark.every(3)
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
    assert torch.equal(tg.trace_ntk(parallel, trainable="module.2")(X), tg.trace_ntk(inner, trainable="2")(X))
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


# A parameter on another road than its module's attribute; found by an adversary.


class Roads(nn.Module):
    def __init__(self, road: str) -> None:
        super().__init__()
        self.a, self.o, self.road = nn.Linear(4, 4), nn.Linear(4, 4), road
        if road == "list":
            self.kept = [self.a.weight]
        elif road == "dict":
            self.kept = {0: self.a.weight}
        elif road == "closure":
            weight = self.a.weight
            self.kept = lambda: weight
        elif road == "view":
            self.kept = self.a.weight.t()
        elif road == "made":
            self.kept = self.a.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        w = self.kept() if self.road == "closure" else self.kept[0] if self.road in ("list", "dict") else self.kept
        return F.linear(torch.tanh(self.a(x)), w) + self.o(x)


@pytest.mark.parametrize("road", ["list", "dict", "closure", "view", "made"])
def test_parameters_count_on_every_road(road: str) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(F64)
    try:
        model = Roads(road)
    finally:
        torch.set_default_dtype(torch.float32)
    rows = []
    for i in range(5):
        out = model(X[[i, (i + 1) % 5]])[0]
        for v in out:
            grads = torch.autograd.grad(v, list(model.parameters()), retain_graph=True, allow_unused=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
    j = torch.stack(rows).view(5, 4, -1)
    close(tg.trace_ntk(model)(X), torch.einsum("ncp,mcp->nm", j, j))
    with pytest.raises(tg.ModelError, match=r"reaches the parameter a\.weight, or a tensor made of it earlier"):
        tg.trace_ntk(model, params={k: v + 1 for k, v in model.state_dict().items()})(X)
    with pytest.raises(tg.ModelError, match="on another road than its module's attribute"):
        tg.linearize(model)(X)


def test_forward_that_looks_at_the_parameter_itself() -> None:
    def typed(m: Any, x: Tensor) -> Tensor:
        assert isinstance(m.get_parameter("w"), nn.Parameter)
        return x @ m.w * (2 if isinstance(m.w, nn.Parameter) else 1) * m.w.scale * m.table.get(m.w, 1.0)

    torch.manual_seed(0)
    model = Net(typed, w=parameter(4, 3)).double()
    model.w.scale, model.table = 3.0, {model.w: 5.0}
    plain = Net(lambda m, x: 30 * (x @ m.w), w=model.w)
    close(tg.trace_ntk(model)(X), tg.trace_ntk(plain)(X))


def test_gradient_hooks_of_parameters_do_not_count() -> None:
    model = nn.Linear(4, 2).double()
    k = tg.trace_ntk(model)(X)
    model.weight.register_hook(lambda g: 2 * g)
    close(tg.trace_ntk(model)(X), k)
    exp = Net(lambda m, x: x * m.w.exp(), w=parameter(4)).double()
    k = tg.trace_ntk(exp)(X)
    exp.w.register_hook(lambda g: 2 * g)
    close(tg.trace_ntk(exp)(X), k)


def test_parameters_that_forward_makes() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = parameter(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "late"):
                self.late = nn.Linear(4, 3).double()
                nn.init.constant_(self.late.weight, 0.3)
            return self.late(torch.tanh(x @ self.w))

    model = Lazy().double()
    with pytest.raises((tg.InputError, tg.ModelError), match="makes the parameter late.weight"):
        tg.trace_ntk(model)(X)
    model(X)
    close(tg.trace_ntk(model)(X), want(model))


def test_checkpoints_with_other_parameters() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model = Net(lambda m, x: m.g(checkpoint(m.f, x, use_reentrant=False)), f=block, g=nn.Linear(3, 2)).double()
    plain = Net(lambda m, x: m.g(m.f(x)), f=block, g=model.g)
    other = {k: v + 0.1 for k, v in model.state_dict().items()}
    for options in ({"trainable": "f.0"}, {"trainable": "f.2.weight"}, {"params": other}, {"dtype": torch.float32}):
        torch.testing.assert_close(tg.trace_ntk(model, **options)(X), tg.trace_ntk(plain, **options)(X))


def test_one_weight_for_convolutions_of_several_sizes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.conv1d(x[:, None], m.w.view(4, 1, 4)).sum(-1) + F.conv1d(x[:, :, None], m.w.view(4, 4, 1)).sum(-1)
        return y + F.linear(x.view(-1, 2, 2).sum(1), m.w.view(8, 2)).view(-1, 2, 4).sum(1) * (x @ m.w)

    torch.manual_seed(0)
    model = Net(forward, w=parameter(4, 4)).double()
    close(tg.trace_ntk(model)(X), want(model))


def slope(q: Tensor, w: Tensor) -> Tensor:
    """One step of training inside of the model."""
    return torch.autograd.grad(torch.tanh(q @ w).sum(), w, create_graph=True)[0]


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: F.conv1d(x.T[None], m.w[:2, :, None])[0].T,  # the batch as a spatial axis
        lambda m, x: (torch.complex(x, x) @ torch.complex(m.w, m.v)).abs(),
        lambda m, x: torch.zeros(len(x), 4).double().index_add(
            0, (x[:, 0] > 0).nonzero()[:, 0], (torch.complex(x, x)[x[:, 0] > 0] @ torch.complex(m.w, m.v)).abs()
        ),
        lambda m, x: torch.vmap(torch.func.grad(lambda q: torch.tanh(q @ m.w).sum()))(x),
        lambda m, x: torch.func.jvp(lambda q: torch.tanh(q @ m.w), (x,), (x,))[1],
        lambda m, x: torch.stack([q @ (m.w - slope(q, m.w)) for q in x]),
        lambda m, x: torch.sparse.mm(torch.eye(4).double().to_sparse(), (x @ m.w).T).T,
    ],
)  # fmt: skip
def test_what_has_no_rule_or_cannot_be_recorded(forward: Any) -> None:
    torch.manual_seed(0)
    model = Net(forward, w=parameter(4, 4), v=parameter(4, 4)).double()
    j = {}
    for name, p in model.named_parameters():
        rows = [torch.autograd.grad(v, p, retain_graph=True, allow_unused=True)[0] for v in model(X).flatten()]
        j[name] = torch.stack([torch.zeros_like(p) if g is None else g for g in rows]).view(5, -1, *p.shape)
    close(tg.trace_ntk(model)(X), trace(j, j))


def test_hooks_on_activations() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.f(x)
        h.register_hook(lambda g: g)
        h.retain_grad()
        return h.tanh()

    model = Net(forward, f=nn.Linear(4, 3)).double()
    close(tg.trace_ntk(model)(X), want(model))


def test_an_expert_that_the_first_samples_do_not_reach() -> None:
    torch.manual_seed(0)
    model = Net(
        lambda m, x: torch.stack([q @ (m.w if q[0] > 0 else m.v) for q in x]), w=parameter(4, 3), v=parameter(4, 3)
    ).double()
    x = X.clone()
    x[:, 0] = torch.tensor([-1.0, -1, 1, 1, -1])
    j = {"w": jacobians_loop(model, x)["w"]}
    close(tg.trace_ntk(model, trainable="w")(x), trace(j, j))
    close(tg.trace_ntk(model, trainable="w")(x.flip(0)), trace(j, j).flip(0, 1))


@pytest.mark.parametrize("sample", [0, 1, 3])
def test_nan_names_its_sample_wherever_it_is(sample: int) -> None:
    x = X.clone()
    x[sample, 0] = float("nan")
    with pytest.raises(tg.NonFiniteError, match=f"output for sample {sample} is not finite"):
        tg.trace_ntk(nn.Linear(4, 2).double())(x)


def test_gradients_that_are_zero_up_to_rounding() -> None:
    model = Net(lambda m, x: (x * m.c) / m.c + 0 * m.d, c=parameter(4), d=parameter(4)).double()
    assert float(tg.trace_ntk(model)(X).abs().max()) < 1e-25


def test_a_model_that_changes_after_its_kernel_was_made() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    kernel = tg.trace_ntk(model)
    kernel(X)
    model[2].weight = model[0].weight
    with pytest.raises(tg.InputError, match=r"no longer has the parameter 2\.weight"):
        kernel(X)
    with pytest.raises(tg.ModelError, match="no outputs"):
        tg.trace_ntk(nn.Linear(4, 0).double())(X)


def test_random_numbers_of_another_thread_are_not_the_models() -> None:
    """The generators belong to the process: a draw between two looks must come from the model each time."""
    drawn = []

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not drawn:  # as if another thread had drawn just now
                drawn.append(torch.rand(1))
            return self.layer(x)

    x = torch.randn(4, 3)
    model = Beside()
    k = tg.trace_ntk(model)(x)
    assert drawn
    torch.testing.assert_close(k, 2 * (x @ x.T + 1))


def test_a_model_that_calls_something_else_every_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def never_the_same(*_: object) -> None:
        raise Unfamiliar(next(calls))

    monkeypatch.setattr(features, "ATTEMPTS", 3)
    monkeypatch.setattr(features.Jacobian, "_blocks", never_the_same)
    with pytest.raises(tg.ModelError, match=r"forward\(\) calls other functions of torch each time .*\(3 times\)"):
        tg.trace_ntk(nn.Linear(3, 2))(torch.randn(4, 3))
    assert next(calls) == 3
