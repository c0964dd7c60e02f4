"""What protects the numbers when a rule does not fit: faults injected into the engine."""

import pytest
import torch
from reference import jacobians_loop, trace
from torch import nn

import tangency as tg
from tangency.engine import readers as structured
from tangency.engine import rules

F64 = torch.float64


def want(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    j = jacobians_loop(model, x)
    return trace(j, j)


def test_a_wrong_rule_is_found_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randn(4, 2, 3, 3, dtype=F64)
    real = rules.ConvRule.a
    monkeypatch.setattr(rules.ConvRule, "a", lambda self, x: real(self, x).flip(1))  # positions mixed up
    with pytest.warns(tg.PerformanceWarning, match=r"0\.weight \(its rule disagrees with autograd\)"):
        got = tg.trace_ntk(model)(x)
    torch.testing.assert_close(got, want(model, x), rtol=1e-10, atol=1e-12)


def test_a_rule_that_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    x = torch.randn(4, 4, dtype=F64)

    def broken(self: object, x: torch.Tensor, d: torch.Tensor) -> None:
        raise rules.NoRule

    monkeypatch.setattr(rules.NormRule, "weight", broken)
    with pytest.warns(tg.PerformanceWarning, match=r"1\.weight \(its rule does not fit\)"):
        got = tg.trace_ntk(model)(x)
    torch.testing.assert_close(got, want(model, x), rtol=1e-10, atol=1e-12)


def test_torch_func_itself_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """vmap(jacrev(prelu)) is silently wrong when n = c (torch 2.13): without its rule, plain autograd takes over."""
    for function in (torch.prelu, nn.functional.prelu, torch.Tensor.prelu):
        monkeypatch.delitem(structured.READERS, function, raising=False)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.PReLU(3), nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randn(2, 2, 3, 3, dtype=F64)
    with pytest.warns(tg.PerformanceWarning, match=r"1\.weight \(used by prelu\)"):
        got = tg.trace_ntk(model)(x)
    torch.testing.assert_close(got, want(model, x), rtol=1e-10, atol=1e-12)


def test_custom_autograd_functions() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, w)
            return nn.functional.linear(x, w)

        @staticmethod
        def backward(ctx, d):  # type: ignore[no-untyped-def]
            x, w = ctx.saved_tensors
            return d @ w, d.T @ x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.last = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(Double.apply(x, self.w)))

    model, x = Net().double(), torch.randn(5, 3, dtype=F64)
    with pytest.warns(tg.PerformanceWarning, match="w "):
        got = tg.trace_ntk(model)(x)
    torch.testing.assert_close(got, want(model, x), rtol=1e-10, atol=1e-12)
