"""Linearised networks against explicit Jacobians, Taylor remainders and kernel regression."""

import copy
import io
import math
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from zoo import ZOO, Net, build

import tangency as tg

CASES = {case.name: case for case in ZOO}
SMOOTH = ["one_output", "hundred_outputs", "two_layer_ntk", "layer_norm", "rms_norm", "weight_normed", "vit"]
SMOOTH += [
    "attention_cross",
    "bert",
    "llama",
    "lstm",
    "gru",
    "fixed_point",
    "tied_transpose",
    "embedding_bag",
    "matmul",
]
pytestmark = pytest.mark.filterwarnings("ignore:.*batching rule.*:UserWarning")


def error(got: Tensor, want: Tensor) -> float:
    assert got.numel() == want.numel()
    return float((got.detach().double().flatten() - want.flatten()).norm() / want.norm())


def value(model: nn.Module, x: Any) -> Tensor:
    """The model's outputs, picked."""
    args, kwargs = reference.arguments(x)
    out = model(*args, **kwargs)
    return getattr(out, "logits", out)


@torch.no_grad()
def move(net: tg.Linearized, scale: float = 0.1) -> dict[str, Tensor]:
    """θ ← θ0 + a random step, which is returned."""
    steps = {name: scale * torch.randn_like(v) for name, v in net.anchor.items()}
    for name, v in net.anchor.items():
        net.model.get_parameter(name).copy_(v + steps[name])
    return {name: (net.model.get_parameter(name) - v).detach() for name, v in net.anchor.items()}


def jacobians(model: nn.Module, x: Any, **options: Any) -> dict[str, Tensor]:
    """[n·c, p] by parameter."""
    return {k: reference.matrix(j).flatten(0, 1) for k, j in reference.jacobians(model, x, **options).items()}


def small() -> tuple[nn.Module, Tensor]:
    return tg.models.mlp([3, 5, 4, 2], nn.Tanh).double(), torch.randn(6, 3, dtype=torch.float64)


# Values and gradients.


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(5, 1)
def test_first_order_is_the_jacobian_product(name: str) -> None:
    model, x = build(CASES[name], 3)
    start, j = value(model, x).detach(), jacobians(model, x)
    net = tg.linearize(model)
    got = value(net, x)
    assert got.shape == start.shape
    assert error(got, start) < 1e-13
    steps = move(net)
    out = value(net, x)
    assert error(out, start.flatten() + sum(j[k] @ v.flatten() for k, v in steps.items())) < 1e-10
    u = torch.randn_like(out)
    out.backward(u)
    want = {k: u.flatten() @ v for k, v in j.items()}
    scale = max(float(v.norm()) for v in want.values())
    for k, v in want.items():
        grad = net.model.get_parameter(k).grad
        assert float((v if grad is None else grad.flatten() - v).norm()) < 1e-10 * scale, k


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.every(5)
def test_remainder_is_of_the_next_order(name: str, order: int) -> None:
    model, x = build(CASES[name], 2)
    net = tg.linearize(model, order)
    direction = {k: torch.randn_like(v) for k, v in net.anchor.items()}
    length = math.sqrt(sum(float(v.square().sum()) for v in direction.values()))
    remainders = []
    for size in (0.02, 0.01):
        point = {k: v + size / length * direction[k] for k, v in net.anchor.items()}
        with torch.no_grad():
            for k, v in point.items():
                net.model.get_parameter(k).copy_(v)
            args, kwargs = reference.arguments(x)
            truth = functional_call(model, point, args, kwargs)
            remainders.append(float((value(net, x) - getattr(truth, "logits", truth)).norm()))
    assert remainders[1] > 1e-13  # else this would be about rounding
    assert abs(math.log2(remainders[0] / remainders[1]) - (order + 1)) < 0.1


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", ["layer_norm", "encoder", "lstm", "weight_normed", "tied_linears"])
@pytest.mark.every(7)
def test_gradients_of_higher_orders(name: str, order: int) -> None:
    """The derivative of the value along a direction, by central differences."""
    model, x = build(CASES[name], 2)
    net = tg.linearize(model, order)
    move(net)
    u = torch.randn_like(value(net, x))
    (value(net, x) * u).sum().backward()
    here = {k: net.model.get_parameter(k) for k in net.names}
    direction = {k: torch.randn_like(p) for k, p in here.items()}
    slope = sum(float((p.grad * direction[k]).sum()) for k, p in here.items())
    ends = []
    with torch.no_grad():
        for h in (1e-5, -2e-5):
            for k, p in here.items():
                p.add_(direction[k], alpha=h)
            ends.append(float((value(net, x) * u).sum()))
    assert abs((ends[0] - ends[1]) / 2e-5 - slope) < 1e-7 * max(1, abs(slope))


def test_polynomials_are_reproduced() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    for layers in (1, 2, 3):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).double()
        for order in (1, 2, 3):
            net = tg.linearize(model, order)
            move(net, 1.0)
            exact = error(net(x), net.model(x).detach()) < 1e-12
            assert exact == (order >= layers), (layers, order)


def test_float32_recurrence_has_a_forward_mode() -> None:
    """oneDNN's LSTM, which torch takes for float32 on a CPU, has none."""
    before = torch._C._get_mkldnn_enabled()
    for name in ("lstm", "gru"):
        model, x = build(CASES[name], 3, torch.float32)
        net = tg.linearize(model)
        steps = move(net)
        j = jacobians(*build(CASES[name], 3))
        want = value(model, x).detach().double().flatten()
        assert error(net(x), want + sum(j[k] @ v.double().flatten() for k, v in steps.items())) < 1e-5
    assert torch._C._get_mkldnn_enabled() == before


def test_inputs_have_gradients() -> None:
    model, x = small()
    net = tg.linearize(model, 2)
    move(net)
    assert torch.autograd.gradcheck(net, x.requires_grad_())


def test_without_a_graph() -> None:
    for name in ("mlp_relu", "no_grad_backbone", "encoder"):
        model, x = build(CASES[name], 3)
        net = tg.linearize(model)
        move(net)
        want = value(net, x)
        with torch.no_grad():
            got = value(net, x)
        assert not got.requires_grad
        assert torch.equal(got, want)
        with torch.inference_mode():
            assert torch.equal(value(net, x), want)
            made = tg.linearize(model)
        torch.testing.assert_close(value(made, x), model(x))
    model, x = small()
    with torch.no_grad():
        assert not tg.linearize(model)(x.requires_grad_()).requires_grad


# The kernel of the linearised network, and training.


@pytest.mark.parametrize("name", ["mlp_relu", "conv_strided", "tied_embedding", "encoder", "embedding_padded", "prelu"])
def test_tangent_kernel_is_the_network_s_everywhere(name: str) -> None:
    model, x = build(CASES[name], 3)
    net = tg.linearize(model)
    move(net, 1.0)
    gram = sum(j @ j.T for j in jacobians(net, x).values())
    assert error(gram, tg.full_ntk(model)(x)) < 1e-10


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_the_explicit_linear_model(name: str) -> None:
    model, x = small()
    y, j, start = torch.randn(12).double(), jacobians(model, x), model(x).detach().flatten()
    net = tg.linearize(model)
    explicit = {k: torch.zeros_like(v, requires_grad=True) for k, v in net.anchor.items()}

    def train(f: Callable[[], Tensor], parameters: Any) -> list[float]:
        optimizer = OPTIMIZERS[name](parameters)
        losses = []

        def closure() -> float:
            optimizer.zero_grad()
            loss = (f() - y).square().mean()
            loss.backward()
            losses.append(loss.item())
            return losses[-1]

        for _ in range(20):
            optimizer.step(closure)
        return losses

    got = train(lambda: net(x).flatten(), net.parameters())
    want = train(lambda: start + sum(j[k] @ v.flatten() for k, v in explicit.items()), explicit.values())
    assert got[-1] < 0.7 * got[0]
    assert got == pytest.approx(want, rel=1e-6)
    for k, v in explicit.items():
        assert error(net.model.get_parameter(k) - net.anchor[k], v.detach()) < 1e-5, k
    assert net.displacement().item() == pytest.approx(float(torch.cat([v.flatten() for v in explicit.values()]).norm()))


def test_trained_to_the_end_it_is_kernel_regression() -> None:
    """f(x*) + K(x*, x) K(x, x)⁻¹ (y − f(x)): gradient descent ends at the solution nearest to θ0."""
    model, x = small()
    x, test, y = x[:4], torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    net = tg.linearize(model)
    optimizer = torch.optim.LBFGS(
        net.parameters(), max_iter=500, tolerance_grad=1e-13, tolerance_change=0, history_size=50
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    k = tg.full_ntk(model)
    weights = torch.linalg.solve(k(x).reshape(8, 8), (y - model(x)).detach().flatten())
    want = model(test).detach().flatten() + k(test, x).reshape(10, 8) @ weights
    assert error(net(test), want) < 1e-6


def test_displacement_and_reset() -> None:
    model, x = small()
    net = tg.linearize(model)
    assert net.displacement() == 0
    steps = move(net)
    assert net.displacement().item() == pytest.approx(math.sqrt(sum(float(v.square().sum()) for v in steps.values())))
    (grad,) = torch.autograd.grad(net.displacement(), net.model.get_parameter("0.weight"))
    assert error(grad, steps["0.weight"] / net.displacement().detach()) < 1e-12
    net.reset()
    assert net.displacement() == 0
    assert error(net(x), model(x).detach()) < 1e-13


# What stays as it was.


def test_batch_norm_is_frozen_and_dropout_off() -> None:
    body, x = build(CASES["resnet_batch"], 4)
    model = nn.Sequential(body, nn.Dropout(0.5)).eval()
    want = model(x).detach()
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    net = tg.linearize(model.train())
    assert net.training
    assert error(net.train()(x), want) < 1e-13
    assert torch.equal(net(x), net(x))
    assert not any(m.training for m in net.model.modules())
    for owner in (model, net.model):
        assert all(torch.equal(v, buffers[k]) for k, v in owner.named_buffers())


def test_buffers_that_a_forward_writes_to_stay() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.seen += 1
        return net.body(x) * net.seen

    model = Net(forward, body=nn.Linear(3, 2)).double()
    model.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
    net, x = tg.linearize(model), torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(net(x), net(x))
    assert net.model.seen == 0


def test_the_model_is_untouched() -> None:
    model, x = build(CASES["frozen_and_unused"], 3)
    model.train()
    before = {k: (v.clone(), v.requires_grad) for k, v in model.named_parameters()}
    net = tg.linearize(model, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(x).square().sum().backward()
    optimizer.step()
    assert net.displacement() > 0
    assert model.training
    for k, p in model.named_parameters():
        assert p.grad is None
        assert torch.equal(p, before[k][0])
        assert p.requires_grad == before[k][1]


def test_state_dicts_copies_and_pickles() -> None:
    model, x = small()
    net = tg.linearize(model)
    move(net)
    want = net(x).detach()
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other = tg.linearize(small()[0])
    assert error(other(x), want) > 1e-2
    other.load_state_dict(torch.load(file))  # θ0 comes along
    for again in (other, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(again(x), want)
    twin = copy.deepcopy(net)
    move(twin)
    assert torch.equal(net(x), want)
    single = copy.deepcopy(net).to(torch.float32)
    assert single(x.float()).dtype == torch.float32
    assert error(single(x.float()), want) < 1e-5


def test_tied_parameters_stay_tied() -> None:
    model, _ = build(CASES["tied_linears"], 3)
    net = tg.linearize(model)
    assert list(net.anchor) == [k for k, _ in model.named_parameters()]
    assert net.model[2].weight is net.model[0].weight


@pytest.mark.parametrize("form", ["name", "module", "predicate", "list"])
def test_a_part_of_the_parameters(form: str) -> None:
    model, x = small()
    forms: dict[str, Any] = {"name": "2", "module": model[2], "predicate": lambda name, p: name[0] == "2"}
    forms["list"] = ["2.bias", "2.weight"]
    net = tg.linearize(model, trainable=forms[form])
    assert list(net.anchor) == ["2.weight", "2.bias"]
    assert [k for k, p in net.named_parameters() if p.requires_grad] == ["model.2.weight", "model.2.bias"]
    steps, j = move(net), jacobians(model, x, names=net.anchor)
    out = net(x)
    want = model(x).detach().flatten() + sum(j[k] @ v.flatten() for k, v in steps.items())
    assert error(out, want) < 1e-12
    out.sum().backward()
    assert {k for k, p in net.model.named_parameters() if p.grad is not None} == set(net.anchor)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(net.model[0].weight, model[0].weight)


def test_frozen_parameters_can_be_trained_on_request() -> None:
    model, x = small()
    model.requires_grad_(False)
    net = tg.linearize(model, trainable="0.bias")
    net(x).sum().backward()
    assert net.model[0].bias.grad is not None
    assert not model[0].bias.requires_grad


def test_outputs_are_picked() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    model = Net(lambda net, x, scale=1: {"a": net.body(x) * scale, "b": x}, body=nn.Linear(3, 2)).double()
    assert torch.equal(tg.linearize(model, outputs="a")(x, scale=2), 2 * model.body(x))
    assert torch.equal(tg.linearize(model, outputs=lambda r: r["a"].sum())(x), model.body(x).sum())
    with pytest.raises(tg.InputError, match="outputs='key'"):
        tg.linearize(model)(x)
    with pytest.raises(tg.ModelError, match="torch.int64"):
        tg.linearize(model, outputs=lambda r: r["a"].argmax(1))(x)


# Where forward mode and autograd differ, or forward mode is missing.


def test_no_grad_and_detach_stop_tangents() -> None:
    """The same layer with and without gradients: J is that of autograd, though forward mode would not stop."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = net.body(x)
        return net.body(x).tanh() * target + net.body(x).detach()

    model, x = Net(forward, body=nn.Linear(3, 2)).double(), torch.randn(4, 3, dtype=torch.float64)
    net = tg.linearize(model)
    steps = move(net)
    j = {k: reference.matrix(v).flatten(0, 1) for k, v in reference.jacobians_loop(model, x).items()}
    want = model(x).detach().flatten() + sum(j[k] @ v.flatten() for k, v in steps.items())
    assert error(net(x), want) < 1e-12
    with torch.no_grad():
        assert error(net(x), want) < 1e-12
    assert torch._C._is_fwd_grad_enabled()


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
@pytest.mark.parametrize("padding", [None, -1])
def test_embedding_bags(mode: str, weighted: bool, padding: int | None) -> None:
    def forward(net: Any, ids: Tensor) -> Tensor:
        shares = torch.linspace(0, 1, 12, dtype=torch.float64).view(3, 4) if weighted else None
        return F.embedding_bag(ids, net.weight, mode=mode, per_sample_weights=shares, padding_idx=padding)

    model = Net(forward, weight=nn.Parameter(torch.randn(5, 3, dtype=torch.float64)))
    ids = torch.tensor([[0, 4, 4, 4], [2, 2, 1, 3], [4, 4, 4, 4]])
    net = tg.linearize(model)
    move(net, 1.0)
    assert error(net(ids), net.model(ids).detach()) < 1e-13  # linear in its weight


IDS = torch.tensor([[0, 1, 1, 1], [2, 0, 1, 4]])
EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "by frequency": lambda: nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True), nn.Flatten()),
    "sparse": lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten()),
    "bag by frequency": lambda: nn.EmbeddingBag(5, 3, mode="mean", scale_grad_by_freq=True),
    "bag, sparse": lambda: nn.EmbeddingBag(5, 3, mode="sum", sparse=True),
    "by hand": lambda: Net(
        lambda net, ids: torch.embedding(net.weight, ids, -1, True, False).flatten(1),
        weight=nn.Parameter(torch.randn(5, 3)),
    ),
}


@torch.no_grad()
def slopes(model: nn.Module, x: Tensor, h: float = 1e-5) -> dict[str, Tensor]:
    """The Jacobian [n·c, p] by parameter, by central differences: no derivative of torch's has a part in it."""
    found = {}
    for name, p in model.named_parameters():
        columns, flat = [], p.view(-1)
        for i in range(p.numel()):
            here = flat[i].clone()
            ends = []
            for sign in (1, -1):
                flat[i] = here + sign * h
                ends.append(model(x).flatten().clone())
            flat[i] = here
            columns.append((ends[0] - ends[1]) / (2 * h))
        found[name] = torch.stack(columns, 1)
    return found


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_derivative_of_an_embedding_is_that_of_the_function(name: str, backwards: bool) -> None:
    """scale_grad_by_freq and sparse say what a backward pass shall leave, not what the function is."""
    model = nn.Sequential(EMBEDDINGS[name](), nn.Tanh(), nn.LazyLinear(2)).double()
    start = model(IDS).detach()
    j = slopes(copy.deepcopy(model), IDS)
    net = tg.linearize(model)
    net._backwards = backwards
    steps = move(net)
    assert error(net(IDS), start.flatten() + sum(j[k] @ v.flatten() for k, v in steps.items())) < 1e-9
    u = torch.randn_like(start)
    (net(IDS) * u).sum().backward()
    for k, p in net.model.named_parameters():
        assert p.grad is not None
        assert not p.grad.is_sparse
        assert error(p.grad, u.flatten() @ j[k]) < 1e-8, k


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_rows_that_are_too_long_are_shortened_without_writing_to_the_weight(kind: Any, norm: float, order: int) -> None:
    """As in autograd, where the factor is a constant; but there the weight is changed in place, and θ0 must not be."""
    model = nn.Sequential(kind(5, 3, max_norm=0.7, norm_type=norm), nn.Flatten(), nn.LazyLinear(2)).double()
    before = {k: v.clone() for k, v in model.state_dict().items() if not isinstance(v, nn.UninitializedParameter)}
    twin = copy.deepcopy(model)
    twin(IDS)  # shortens its rows
    model[2] = copy.deepcopy(twin[2])
    net = tg.linearize(model, order=order)
    steps = move(net)
    theta0 = {k: v.clone() for k, v in net.anchor.items()}
    j = jacobians(twin, IDS)
    want = twin(IDS).detach().flatten() + sum(j[k] @ v.flatten() for k, v in steps.items())
    if order == 2:  # bilinear in the rows and the head
        rows = steps["0.weight"][IDS]
        want += (rows.flatten(1) if kind is nn.Embedding else rows.mean(1)).matmul(steps["2.weight"].T).flatten()
    for _ in range(2):
        assert error(net(IDS), want) < 1e-12
    assert all(torch.equal(v, theta0[k]) for k, v in net.anchor.items())
    assert torch.equal(model[0].weight, before["0.weight"])


class Caches(nn.Module):
    """Keeps what it computed, as models do that are looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), {}

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.kept["all"] = [self.last]
        return self.last.tanh()


def pruned() -> nn.Module:
    return nn.utils.prune.random_unstructured(nn.Linear(4, 4), "weight", 0.3)


HISTORIES: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "pruned": pruned,
    "caches": Caches,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", HISTORIES)
def test_models_that_keep_tensors_with_a_history_are_copied(name: str) -> None:
    """torch's deepcopy refuses them after a forward pass with gradients."""
    model, x = nn.Sequential(HISTORIES[name](), nn.Tanh(), nn.Linear(4, 2)).double().eval(), torch.randn(5, 4).double()
    start = model(x)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    held = {k: v for k, v in vars(model[0]).items() if isinstance(v, Tensor)}
    assert held
    every = dict(model.named_parameters())
    rows = [torch.autograd.grad(v, list(every.values()), retain_graph=True) for v in start.flatten()]
    net = tg.linearize(model)
    steps = move(net)
    want = torch.stack([sum((g * steps[k]).sum() for k, g in zip(every, row, strict=True)) for row in rows])
    got = net(x)
    assert error(got, start.detach().flatten() + want) < 1e-12
    got.sum().backward()  # what the model kept does not stand in the way
    assert all(vars(model[0])[k] is v for k, v in held.items())  # the model is as it was
    again = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert torch.equal(again(x), net(x))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(2, 1)
    model.lock = threading.Lock()
    with pytest.raises(tg.ModelError, match=r"cannot be copied \(TypeError: .*lock.*Take out of the model"):
        tg.linearize(model)


@pytest.mark.parametrize("order", [1, 2])
def test_modules_that_occur_twice(order: int) -> None:
    """One module under two names has one set of parameters, and is as it was afterwards."""
    shared = nn.Linear(4, 4)
    model, x = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 2)).double(), torch.randn(5, 4).double()
    twin, net = copy.deepcopy(model), tg.linearize(model, order=order)
    steps = {k: 0.1 * torch.randn_like(v) for k, v in net.anchor.items()}
    with torch.no_grad():
        for k, v in steps.items():
            net.model.get_parameter(k).add_(v)
    assert set(steps) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    # f(θ0 + tδ) as plain operations on the twin's parameters
    theta = dict(twin.named_parameters())

    def along(t: Tensor) -> Tensor:
        w, b, v, c = (theta[k] + t * steps[k] for k in ("0.weight", "0.bias", "3.weight", "3.bias"))
        return F.linear(F.linear(torch.tanh(F.linear(x, w, b)), w, b), v, c)

    zero = torch.zeros((), dtype=torch.float64)
    first = torch.autograd.functional.jacobian(along, zero, create_graph=True)
    want = along(zero) + first
    if order == 2:
        bend = lambda t: torch.autograd.functional.jacobian(along, t, create_graph=True)  # noqa: E731
        want = want + torch.autograd.functional.jacobian(bend, zero) / 2
    for _ in range(2):
        assert error(net(x), want.detach().flatten()) < 1e-12
    assert net.model[0] is net.model[2]
    assert isinstance(net.model[0].weight, nn.Parameter)
    assert model[0] is model[2]
    assert torch.equal(model(x), twin(x))


class Cube(torch.autograd.Function):
    """x³ without a forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Once(Cube):
    backward = staticmethod(once_differentiable(Cube.backward))


class Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


def test_functions_without_a_forward_mode_in_inference_mode() -> None:
    """By two backward passes, for which tensors that were made in that mode would not do (found by an adversary)."""
    model, x = nn.Sequential(nn.Linear(3, 2), Apply(Cube)).double(), torch.randn(4, 3, dtype=torch.float64)
    with torch.inference_mode():
        net = tg.linearize(model)
        with pytest.warns(tg.PerformanceWarning, match="two backward passes"):
            net(x)
    move(net)
    want = value(net, x)
    with torch.inference_mode():
        torch.testing.assert_close(value(net, x), want)
        torch.testing.assert_close(value(net, x.clone()), want)


def test_without_forward_mode_it_goes_backwards_twice() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Apply(Cube), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    j = {k: reference.matrix(v).flatten(0, 1) for k, v in reference.jacobians_loop(model, x).items()}
    net = tg.linearize(model)
    steps = move(net)
    with pytest.warns(tg.PerformanceWarning, match=r"module 1 \(Apply\).*exact, but slower") as said:
        net(x)
    assert said[0].filename == __file__
    out = net(x)  # says nothing; a warning would be an error
    assert error(out, model(x).detach().flatten() + sum(j[k] @ v.flatten() for k, v in steps.items())) < 1e-12
    u = torch.randn_like(out)
    out.backward(u)
    for k, v in j.items():
        assert error(net.model.get_parameter(k).grad, u.flatten() @ v) < 1e-12
    with torch.no_grad():
        assert torch.equal(net(x), out)
    assert torch.autograd.gradcheck(net, x.requires_grad_())
    with pytest.raises(tg.ModelError, match=r"module 1 \(Apply\) in forward mode .*which order=2 needs.*order=1"):
        tg.linearize(model, 2)(x)


def test_without_any_derivative_it_says_so() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Apply(Once))
    with pytest.raises(tg.ModelError, match="neither in forward mode nor twice backwards"):
        tg.linearize(model)(torch.randn(2, 3))
    with pytest.raises(tg.ModelError, match=r"_embedding_bag_backward.*Replace that operation"):
        tg.linearize(nn.EmbeddingBag(5, 3, mode="max"))(torch.randint(5, (2, 3)))


def test_samples_that_do_not_fit_are_said_in_words() -> None:
    for order in (1, 2):
        with pytest.raises(tg.InputError, match=r"^Linear '0' takes 3 features, x has 4: x is torch.float64"):
            tg.linearize(small()[0], order)(torch.randn(2, 4, dtype=torch.float64))


class Square(torch.autograd.Function):
    """x², whose forward mode is right once and wrong twice."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.x = inputs[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return 2 * ctx.x.detach() * t


def test_wrong_second_derivatives_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Apply(Square))
    x = torch.randn(2, 3)
    random = torch.get_rng_state()
    tg.linearize(model)(x)
    with pytest.raises(tg.ModelError, match="wrong derivatives of order 2 .*Use order=1"):
        tg.linearize(model, 2)(x)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_norms_have_second_derivatives(affine: bool, shape: tuple[int, ...]) -> None:
    """torch's own are wrong, so these are replaced."""
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    for norm in (nn.LayerNorm(shape, elementwise_affine=affine), nn.InstanceNorm1d(4, affine=affine)):
        model = nn.Sequential(nn.Linear(5, 5), norm).double()
        net = tg.linearize(model, 3)
        assert error(net(x), model(x).detach()) < 1e-13
        move(net, 1e-3)
        assert error(net(x), net.model(x).detach()) < 1e-8


# Bad input.


def test_errors() -> None:
    model, _ = small()
    for order in (0, 4, "1", None):
        with pytest.raises(tg.InputError, match=f"order={order!r}; needed: 1 .* 2 or 3"):
            tg.linearize(model, order)
    with pytest.raises(tg.InputError, match="model is a function; needed: a torch.nn.Module"):
        tg.linearize(lambda x: x)
    with pytest.raises(tg.InputError, match="lazy module"):
        tg.linearize(nn.LazyLinear(3))
    with pytest.raises(tg.InputError, match="trainable='weigth' names no parameter.*"):
        tg.linearize(model, trainable="weigth")
    with pytest.raises(tg.InputError, match="trainable=.* selects none"):
        tg.linearize(model, trainable=lambda name, p: False)
    with pytest.raises(tg.InputError, match="every parameter is frozen .* trainable='…'"):
        tg.linearize(copy.deepcopy(model).requires_grad_(False))
    with pytest.raises(tg.InputError, match="has no parameters"):
        tg.linearize(nn.Tanh())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(tg.InputError, match="scripted modules"):
        tg.linearize(scripted)


# Work.


def test_a_training_step_costs_at_most_two_of_the_network_s() -> None:
    """In counted operations of its products; benchmarks/speed/linearize.py has the times."""
    model = tg.models.lenet5(10).eval()
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    nets = [copy.deepcopy(model), tg.linearize(model)]

    def step(net: nn.Module) -> int:
        net(x)  # what is done once, before the first step
        with FlopCounterMode(display=False) as counted:
            F.cross_entropy(net(x), y).backward()
        return counted.get_total_flops()

    own, linearised = map(step, nets)
    assert own < linearised <= 2 * own
