"""Nothing of the user's model is left changed, also after an exception or Ctrl-C."""

import pytest
import torch
from torch import nn

import tangency as tg


class Interrupting(nn.Module):
    """Works until `fuse` calls, then raises."""

    def __init__(self, error: type[BaseException], fuse: int) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.error, self.fuse = error, fuse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fuse -= 1
        h = self.norm(self.first(x))
        if self.fuse == 0:
            raise self.error("stop")
        return self.second(torch.relu_(h))


def snapshot(model: nn.Module) -> list[object]:
    found: list[object] = []
    for name, m in model.named_modules():
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        found.append((name, m.training, [len(h) for h in hooks], sorted(m.__dict__)))
    for name, p in model.named_parameters():
        found.append((name, id(p), p.requires_grad, p.grad is None, p._version, p.detach().clone()))
    for name, b in model.named_buffers():
        found.append((name, id(b), b._version, b.clone()))
    return found


def same(a: list[object], b: list[object]) -> bool:
    def equal(v: object, w: object) -> bool:
        if isinstance(v, torch.Tensor):
            return torch.equal(v, w)  # type: ignore[arg-type]
        if isinstance(v, tuple):
            return all(equal(p, q) for p, q in zip(v, w, strict=True))  # type: ignore[call-overload]
        return v == w

    return all(equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fuse", [1, 3, 6, 7, 8])
def test_after_an_exception(error: type[BaseException], fuse: int) -> None:
    model = Interrupting(error, fuse).eval()
    x = torch.randn(6, 4)
    before, modes = snapshot(model), (torch.is_grad_enabled(), torch.backends.cudnn.allow_tf32)
    with pytest.raises(error, match="stop"):
        for _ in range(8):
            tg.trace_ntk(model)(x)
    assert same(before, snapshot(model))
    assert modes == (torch.is_grad_enabled(), torch.backends.cudnn.allow_tf32)
    model.fuse = -1
    assert tg.trace_ntk(model)(x).shape == (6, 6)  # and the recorder is gone: the model works as before
    assert torch.overrides._get_current_function_mode() is None


def test_after_all_kernels() -> None:
    model = tg.models.lenet5().eval()
    model[0].weight.requires_grad_(False)
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    grads = {k: p.grad for k, p in model.named_parameters()}
    x = torch.randn(3, 3, 32, 32)
    before, given = snapshot(model), x.clone()
    for kernel in (tg.full_ntk, tg.trace_ntk, tg.pseudo_ntk, tg.conjugate_kernel, tg.embedding_kernel):
        kernel(model)(x)
        kernel(model)(x.clone().requires_grad_())
        tg.compute(kernel(model), x, progress=False)
    assert same(before, snapshot(model))
    assert all(p.grad is grads[k] for k, p in model.named_parameters())
    assert torch.equal(x, given)


def test_layer_hooks_are_removed_after_an_error() -> None:
    model = Interrupting(RuntimeError, 2).eval()
    with pytest.raises(RuntimeError, match="stop"):
        for _ in range(3):
            tg.embedding_kernel(model, layers=["first"])(torch.randn(3, 4))
    assert not model.first._forward_hooks
