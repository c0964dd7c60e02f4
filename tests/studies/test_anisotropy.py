"""Mixed derivatives by products, anisotropy directions, and the data sets D(u)."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import tangency as tg
from tangency.errors import InputError, ModelError, TangencyWarning
from tangency.models import Recipe, initialized, lenet5, mlp, resnet18
from tangency.studies import MixedDerivative, anisotropy, learn, separable

DOUBLE = torch.float64


def dense(model: nn.Module, x: Tensor) -> Tensor:
    """E_x[∂²f/∂θ∂x], [p, d], by torch.func, entry by entry: the obvious reference."""
    params = {k: v.detach() for k, v in model.named_parameters()}

    def mean(p: dict[str, Tensor], shift: Tensor) -> Tensor:
        return functional_call(model, p, (x + shift,)).mean(0).sum()

    zero = torch.zeros_like(x[0])
    with sdpa_kernel(SDPBackend.MATH):  # the fused one has one derivative
        rows = jacrev(grad(mean, argnums=0), argnums=1)(params, zero)
    return torch.cat([rows[k].reshape(params[k].numel(), -1) for k in params])


def small_conv() -> nn.Module:
    layers = nn.Conv2d(1, 3, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 1)
    return nn.Sequential(*layers)


class Attention(nn.Module):
    """Positions that look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(x, x, x, need_weights=False)[0].mean(1))


MODELS = {
    "attention": (lambda: Attention().eval(), (3, 4)),
    "mlp": (lambda: mlp([5, 7, 6, 1], activation=nn.GELU), (5,)),
    "conv": (small_conv, (1, 4, 4)),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).eval(), (4,)),
}


def made(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    factory, shape = MODELS[name]
    return initialized(factory, seed=0).double(), shape


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


# Products


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [0, 5])
def test_products_equal_the_dense_matrix(name: str, n: int) -> None:
    """At the origin and averaged over samples, in one batch and in several."""
    model, shape = made(name)
    x = draw(n, *shape) if n else torch.zeros(1, *shape, dtype=DOUBLE)
    M = dense(model, x)
    for batch in (64, 2):
        found = MixedDerivative(model, x if n else shape, batch=batch)
        assert found.size == tuple(M.shape)
        v, u = draw(M.shape[1], 3), draw(M.shape[0], seed=1)
        torch.testing.assert_close(found.times(v[:, 0]), M @ v[:, 0], atol=1e-10, rtol=0)
        torch.testing.assert_close(found.transposed_times(u), M.T @ u, atol=1e-10, rtol=0)
        torch.testing.assert_close(found.gram_times(v), M.T @ M @ v, atol=1e-10, rtol=0)


@given(seed=st.integers(0, 2**30), name=st.sampled_from(list(MODELS)))
@settings(max_examples=15, deadline=None)
def test_the_two_products_are_adjoint(seed: int, name: str) -> None:
    model, shape = made(name)
    M = MixedDerivative(model, draw(2, *shape, seed=3))
    p, d = M.size
    v, u = draw(d, seed=seed), draw(p, seed=seed + 1)
    torch.testing.assert_close(M.times(v) @ u, v @ M.transposed_times(u), rtol=1e-9, atol=1e-9)


def test_some_parameters_and_one_of_several_outputs() -> None:
    model = initialized(lambda: mlp([4, 6, 2], activation=nn.GELU), seed=0).double()
    last = MixedDerivative(model, (4,), trainable="2", head=1)
    single = nn.Sequential(model, nn.Linear(2, 1, bias=False).double())
    with torch.no_grad():
        single[1].weight.copy_(torch.tensor([[0.0, 1.0]]))
    M = dense(single, torch.zeros(1, 4, dtype=DOUBLE))
    names = [k for k, p in single.named_parameters() for _ in range(p.numel())]
    rows = [k for k, name in enumerate(names) if name.startswith("0.2.")]
    v = draw(4)
    torch.testing.assert_close(last.times(v), M[rows] @ v, atol=1e-10, rtol=0)
    with pytest.raises(InputError, match="the model has 2 outputs; needed: one function. Say which: head=0"):
        MixedDerivative(model, (4,))


# Directions


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_singular_vectors_by_projection(name: str) -> None:
    model, shape = made(name)
    M = dense(model, torch.zeros(1, *shape, dtype=DOUBLE))
    _, s, vt = torch.linalg.svd(M, full_matrices=False)
    found = anisotropy(model, shape, 3, progress=False)
    torch.testing.assert_close(found.values, s[:3], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.alignment, s[:3].square(), rtol=1e-6, atol=1e-9)
    mine = found.directions.flatten(1)
    torch.testing.assert_close(mine.T @ mine, vt[:3].T @ vt[:3], atol=1e-6, rtol=0)
    assert found.kinks == ()
    assert found.residual < 1e-8


def test_another_road_to_the_alignment() -> None:
    model, shape = made("conv")
    found = anisotropy(model, shape, 2, progress=False)
    for value, u in zip(found.alignment, found.directions, strict=True):
        alpha = tg.spectra.linear_alignment(tg.trace_ntk(model), u, x=torch.zeros(1, *shape, dtype=DOUBLE))
        torch.testing.assert_close(alpha, value[None], rtol=1e-6, atol=1e-12)


def test_alignment_is_what_theorem_1_says() -> None:
    """‖M u‖² with M averaged over Gaussian samples is α(x ↦ uᵀx) = E[uᵀx Θ(x, x') uᵀx'], up to sampling."""
    model = initialized(lambda: mlp([3, 16, 1], activation=nn.Tanh), seed=0).double()
    x = draw(3000, 3)
    found = anisotropy(model, x, 3, batch=5000, progress=False)
    for value, u in zip(found.alignment, found.directions, strict=True):
        out = model(x)[:, 0]
        mean = torch.autograd.grad((out * (x @ u)).mean(), list(model.parameters()))
        assert float(sum(g.square().sum() for g in mean)) == pytest.approx(float(value), rel=0.25, abs=0.02)


def test_the_model_stays_as_it_was() -> None:
    model = initialized(lambda: resnet18(1, width=2, activation=nn.GELU), seed=0).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = anisotropy(model, (3, 8, 8), 2, tol=1e-3, progress=False)
    assert found.directions.shape == (2, 3, 8, 8)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_reference_networks_can_be_smooth() -> None:
    for model in (
        lenet5(1, 1, 12, activation=nn.GELU, pool=nn.AvgPool2d, padding=2),
        resnet18(1, width=2, activation=nn.Tanh),
    ):
        kinds = {type(m) for m in model.modules()}
        assert not kinds & {nn.ReLU, nn.MaxPool2d}
    names = [name for name, _ in resnet18(1, width=2).named_parameters()]
    assert names == [name for name, _ in resnet18(1, width=2, activation=nn.GELU).named_parameters()]


def test_a_network_with_kinks_gets_a_warning() -> None:
    for model, word in ((lenet5(1, 1, 16), "ReLU, max pooling"), (mlp([4, 6, 1], activation=nn.ReLU), "ReLU")):
        shape = (1, 16, 16) if word != "ReLU" else (4,)
        with pytest.warns(TangencyWarning, match=f"the network has {word}, without a second derivative.*nn.GELU"):
            assert anisotropy(model, draw(3, *shape).float(), 1, tol=1e-2, progress=False).kinks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anisotropy(made("mlp")[0], (5,), 1, progress=False)


# D(u)


def test_data_of_a_direction_have_the_stated_moments() -> None:
    u = torch.nn.functional.normalize(draw(2, 3).flatten(), dim=0).view(2, 3)
    data = separable(3 * u, 20_000, epsilon=0.7, sigma=2.0)
    x, flat = data.x.flatten(1), u.flatten()
    sign = 2.0 * data.y - 1
    torch.testing.assert_close(x @ flat, 0.7 * sign.double(), atol=1e-12, rtol=0)  # no noise along u
    noise = x - (x @ flat)[:, None] * flat
    torch.testing.assert_close(noise.T @ noise / len(x), 4 * (torch.eye(6) - flat[:, None] * flat), atol=0.1, rtol=0)
    assert abs(float(sign.mean())) < 0.03
    assert torch.equal(separable(u, 5).x, separable(u, 5).x)
    assert not torch.equal(separable(u, 5).x, separable(u, 5, seed=1).x)


class Fading(nn.Module):
    """Inputs that matter less and less, whatever the weights."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.logspace(0, -3, x.shape[1])


def test_easy_directions_are_learned_and_hard_ones_not() -> None:
    net = initialized(lambda: nn.Sequential(Fading(), *mlp([30, 32, 1], activation=nn.GELU)), seed=0)
    found = anisotropy(net, (30,), 30, progress=False)
    tasks = found.tasks([0, 29], train=300, test=200)
    result = learn(net, tasks, recipe=Recipe(epochs=5, batch=50, lr=0.05), linear=False, progress=False)
    assert result.network[0].accuracy > 0.95
    assert result.network[1].accuracy < 0.8


# Refusals and pictures


def test_pictures_are_of_images() -> None:
    found = anisotropy(made("conv")[0], (1, 4, 4), 3, progress=False)
    assert len(found.plot().axes) == 6
    assert len(found.plot(2).axes) == 4
    assert found.table().splitlines()[0].split()[0] == "index"
    colour = tg.studies.Anisotropy(torch.ones(1), torch.randn(1, 3, 4, 4), 0.0, ())
    assert len(colour.plot().axes) == 2
    with pytest.raises(InputError, match=r"the inputs' shape is \(5,\); needed: images \[h, w\]"):
        anisotropy(made("mlp")[0], (5,), 1, progress=False).plot()


def test_what_is_refused() -> None:
    model, shape = made("mlp")
    with pytest.raises(InputError, match=r"count=6; needed: from 1 to 5, the numbers in an input of shape \(5,\)"):
        anisotropy(model, shape, 6)
    M = MixedDerivative(model, shape)
    with pytest.raises(InputError, match=rf"v has shape \(4,\); needed: \[5\]. M is \[{M.size[0]}, 5\]"):
        M.times(torch.ones(4))
    with pytest.raises(InputError, match=r"u has shape \(5, 1\); needed"):
        M.transposed_times(torch.ones(5, 1))
    with pytest.raises(InputError, match="at='here'; needed: samples"):
        anisotropy(model, "here")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"Call model.eval\(\) first"):
        anisotropy(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)), (4,))
    with pytest.raises(ModelError, match=r"random and has no kernel. Call model.eval\(\)"):
        anisotropy(nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 1)), (4,))
    with (
        pytest.warns(TangencyWarning, match="the network has ReLU"),
        pytest.raises(ModelError, match="the mixed derivative is zero.*Give samples"),
    ):
        anisotropy(mlp([4, 6, 1], bias=False), (4,), 1)  # all at the kink, where autograd says 0
    with pytest.raises(InputError, match="index 7; needed: 0 to 2"):
        next(anisotropy(model, shape, 3, progress=False).tasks([7]))
    with pytest.raises(InputError, match="u is zero; needed: a direction"):
        separable(torch.zeros(3), 4)
    with pytest.raises(InputError, match="u is list; needed: a tensor of real numbers"):
        separable([1.0], 4)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="n=0; needed: samples, at least 1"):
        separable(torch.ones(3), 0)
