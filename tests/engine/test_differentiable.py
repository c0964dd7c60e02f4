"""Kernels are differentiable in x (data distillation needs it)."""

from collections.abc import Callable

import pytest
import torch
from reference import jacobians_loop, trace
from torch import nn

import tangency as tg
from tangency.models import mlp

F64 = torch.float64
MODELS = {
    "dense": (lambda: mlp([4, 5, 2], nn.Tanh), (3, 4)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 16, 2)),
        (2, 2, 3, 3),
    ),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 2)), (3, 4)),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 5, activation="gelu", batch_first=True), nn.Flatten(), nn.Linear(8, 2)
        ),
        (2, 2, 4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["trace", "full", "pseudo", "cosine", "ck"])
@pytest.mark.every(7)
def test_gradcheck(name: str, kind: str) -> None:
    make, shape = MODELS[name]
    model = make().double().eval()
    x = torch.randn(*shape, dtype=F64, requires_grad=True)
    kernel = {
        "trace": tg.trace_ntk,
        "full": tg.full_ntk,
        "pseudo": tg.pseudo_ntk,
        "cosine": lambda m: tg.cosine(tg.trace_ntk(m)),
        "ck": tg.conjugate_kernel,
    }[kind](model)
    assert torch.autograd.gradcheck(kernel, x, atol=1e-6, fast_mode=True)
    y = torch.randn(*shape, dtype=F64)
    assert torch.autograd.gradcheck(lambda v: kernel(v, y), x, atol=1e-6, fast_mode=True)
    torch.testing.assert_close(kernel(x).detach(), kernel(x.detach()), rtol=1e-11, atol=1e-13)


class Scaled(nn.Module):
    """A linear layer and a parameter that meets its outputs in a function of the two."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.body, self.power, self.function = nn.Linear(3, 2), nn.Parameter(torch.tensor([0.3, 0.5])), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(torch.tanh(self.body(x)), self.power)


def test_the_fallback_is_differentiable_too() -> None:
    model = Scaled(lambda h, p: torch.nn.functional.cosine_similarity(h, p[None], -1)).double()
    x = torch.randn(3, 3, dtype=F64, requires_grad=True)
    with pytest.warns(tg.PerformanceWarning, match="power"):
        assert torch.autograd.gradcheck(tg.trace_ntk(model), x)


@pytest.mark.parametrize(
    "function", [lambda h, p: h * torch.exp(p), lambda h, p: h / p, lambda h, p: h @ torch.outer(p, p), torch.minimum]
)
def test_weights_made_of_parameters_are_differentiable_too(function: Callable[..., torch.Tensor]) -> None:
    model, x = Scaled(function).double(), torch.randn(3, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(tg.trace_ntk(model), x)


def test_no_grad_means_no_graph() -> None:
    model, x = mlp([4, 5, 2]).double(), torch.randn(3, 4, dtype=F64, requires_grad=True)
    with torch.no_grad():
        assert not tg.trace_ntk(model)(x).requires_grad
    assert not tg.compute(tg.trace_ntk(model), x, progress=False).dense().requires_grad
    with torch.no_grad():
        j = jacobians_loop(model, x.detach())
    torch.testing.assert_close(tg.trace_ntk(model)(x).detach(), trace(j, j), rtol=1e-11, atol=1e-13)
