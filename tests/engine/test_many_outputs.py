"""Networks of many outputs: what is compared with autograd, and how often."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from reference import jacobians_loop, trace
from torch import Tensor, nn
from zoo import Net

import tangency as tg
from tangency.engine import blocks, capture
from tangency.engine.directions import FEW, Outputs, Probes, Spread, signs
from tangency.engine.rules import LinearRule

F64 = torch.float64
X = torch.randn(5, 4, dtype=F64, generator=torch.Generator().manual_seed(0))


def net(c: int, width: int = 6) -> nn.Sequential:
    torch.manual_seed(c)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, c)).double()


def want(model: nn.Module, x: Tensor = X) -> Tensor:
    j = jacobians_loop(model, x)
    return trace(j, j)


class Counted:
    def __init__(self) -> None:
        self.forward = self.backward = 0


@contextmanager
def counted(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Forward passes of the model, and backward passes of anything, while the context lasts."""
    count, real = Counted(), torch.autograd.grad

    def grad(*args: object, **options: object) -> object:
        count.backward += 1
        return real(*args, **options)  # type: ignore[arg-type]

    def forward(*_: object) -> None:
        count.forward += 1

    hook = model.register_forward_pre_hook(forward)
    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd, "grad", grad)
        yield count
    hook.remove()


def test_directions_are_linear_maps_of_outputs() -> None:
    out = torch.randn(3, 40, dtype=F64, generator=torch.Generator().manual_seed(1))
    eye = torch.eye(40, dtype=F64)
    for directions in (Outputs(7, 12), Probes(5, 3), Spread()):
        v = directions(eye).T
        torch.testing.assert_close(directions(out), out @ v.T)
    v = Spread()(eye).T
    assert v.shape == (FEW, 40)
    assert (v[:3].sum(1) == 1).all()
    assert v[0, 0] == v[2, -1] == 1
    torch.testing.assert_close(v.norm(dim=1), torch.ones(FEW, dtype=F64))
    assert (v[3:] != 0).all()  # no output is left out
    assert torch.equal(Spread()(out[:, :FEW]), out[:, :FEW])


def test_signs_are_balanced_reproducible_and_nested() -> None:
    v = signs(64, 1000, 5)
    assert torch.equal(v.abs(), torch.ones_like(v))
    assert torch.equal(v[:8], signs(8, 1000, 5))
    assert not torch.equal(v, signs(64, 1000, 6))
    assert abs(float(v.mean())) < 4 / 64000**0.5
    off = v.T @ v / 64 - torch.eye(1000, dtype=F64)
    assert abs(float(off.square().mean().sqrt()) * 8 - 1) < 0.05  # uncorrelated outputs: 1/√k


def test_a_first_call_takes_a_few_backward_passes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to take all outputs of two samples once more, and to form their gradients."""
    largest = 0
    real = blocks.OuterBlock.expand

    def expand(self: blocks.OuterBlock) -> Tensor:
        nonlocal largest
        largest = max(largest, self.c)
        return real(self)

    monkeypatch.setattr(blocks.OuterBlock, "expand", expand)
    passes = {}
    for c in (10, 80):
        model = net(c)
        with counted(model, monkeypatch) as count:
            k = tg.trace_ntk(model)(X)
        passes[c] = (count.forward, count.backward - c)
        torch.testing.assert_close(k, want(model))
    assert passes[10] == passes[80]
    assert passes[80][1] <= 4 + FEW  # two of autograd, two that look what the model does
    assert largest == 1


def test_wrong_rules_are_found_among_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any output: outputs shifted by one, one output lost, a factor on one of them."""
    model = net(50)
    real = capture._Cotangents.add

    def shifted(self: capture._Cotangents, j: int, grad: Tensor, n: int) -> None:
        real(self, (j + 1) % self.c, grad, n)

    def lost(self: capture._Cotangents, j: int, grad: Tensor, n: int) -> None:
        real(self, j, grad * (j != 2), n)

    for fault in (shifted, lost):
        with monkeypatch.context() as patched:
            patched.setattr(capture._Cotangents, "add", fault)
            with pytest.warns(tg.PerformanceWarning, match="its rule disagrees with autograd"):
                torch.testing.assert_close(tg.trace_ntk(model)(X), want(model))

    def row(self: LinearRule, d: Tensor) -> Tensor:  # a rule that is wrong at one of the 50 outputs alone
        d = d.reshape(*d.shape[:2], -1, 1, d.shape[-1])
        return d if d.shape[-1] != 50 else d * (1 + (torch.arange(50) == 31))

    monkeypatch.setattr(LinearRule, "d", row)
    with pytest.warns(tg.PerformanceWarning, match=r"2\.weight \(its rule disagrees with autograd\)"):
        torch.testing.assert_close(tg.trace_ntk(model)(X), want(model))


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_the_fallback_is_compared_in_a_few_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(
        lambda m, x: torch.cosine_similarity(m.f(x)[:, None], m.p[None], -1),
        f=nn.Linear(4, 3),
        p=nn.Parameter(torch.randn(30, 3, generator=torch.Generator().manual_seed(2))),
    ).double()
    from tangency.engine import verify

    real, seen = verify.jacobian_vmap, []

    def watched(*args: object) -> dict[str, Tensor]:
        made = real(*args)  # type: ignore[arg-type]
        seen.extend(v.shape[1] for v in made.values())
        return made

    monkeypatch.setattr(verify, "jacobian_vmap", watched)
    torch.testing.assert_close(tg.trace_ntk(model)(X), want(model))
    assert seen
    assert max(seen) == FEW


def test_single_samples_are_verified_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(8)
    kernel, passes = tg.trace_ntk(model), []
    for i in (0, 0, 1, 2, 1, 3):
        with counted(model, monkeypatch) as count:
            k = kernel(X[i : i + 1])
        passes.append((count.forward, count.backward))
        torch.testing.assert_close(k, want(model, X[i : i + 1]))
    first, again, second, *rest = passes
    # Alone, it cannot be known whether a sample depends on others: the second one shows it, and nothing is left open.
    assert again == (1, 8)
    assert first[0] > 2
    assert second == first
    assert rest == [(1, 8)] * 3


def test_what_mixes_samples_is_found_when_a_second_single_sample_comes() -> None:
    kernel = tg.trace_ntk(Net(lambda m, x: m.f(x) - m.f(x).mean(0), f=nn.Linear(4, 3)).double())
    with pytest.raises(tg.ModelError, match="depends on the other samples"):
        for i in range(2):
            kernel(X[i : i + 1])


def test_a_second_single_sample_is_named_by_its_own_number() -> None:
    kernel = tg.trace_ntk(net(3))
    kernel(X[:1])
    x = X[1:2].clone()
    x[0, 0] = torch.nan
    with pytest.raises(tg.NonFiniteError, match="sample 0"):
        kernel(x)


class Attention(nn.Module):
    """One head. Softmax does not see what is added to all scores of a query, so the keys' bias does nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k_proj, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k_proj(x).transpose(1, 2) / 8**0.5
        return self.out((torch.softmax(scores, -1) @ self.v(x)).mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("zero", [False, True])
def test_gradients_all_of_whose_terms_cancel_make_a_kernel_of_zeros(dtype: torch.dtype, zero: bool) -> None:
    """It used to be refused as not deterministic: rounding differs from rounding."""
    model = Attention().to(dtype)
    if zero:
        nn.init.zeros_(model.k_proj.bias)
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = tg.trace_ntk(model)(x)
    k = tg.trace_ntk(model, trainable=["k_proj.bias"])(x)
    assert float(k.abs().max()) <= (100 * torch.finfo(dtype).eps) ** 2 * float(whole.abs().max())


def test_a_rule_that_is_wrong_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all terms cancel, a rule that leaves a hundredth of one is found out all the same."""
    real = LinearRule.bias

    def part(self: LinearRule, d: Tensor) -> blocks.GradientBlock:
        g = real(self, d)
        assert isinstance(g, blocks.DenseBlock)
        return blocks.DenseBlock(g.g + 0.01 * self.d(d)[:, :, 0].flatten(2))

    monkeypatch.setattr(LinearRule, "bias", part)
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    with pytest.warns(tg.PerformanceWarning, match="its rule disagrees"):
        k = tg.trace_ntk(Attention(), trainable=["k_proj.bias"])(x)
    assert float(k.abs().max()) < 1e-12
