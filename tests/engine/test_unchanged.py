"""Nothing of the user's model is left changed, also after an exception or Ctrl-C."""

import copy
import io
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import tangency as tg
from tangency.testing import ModelState


class Interrupting(nn.Module):
    """Works until `fuse` calls, then raises. The count lies outside of the model, which is left as it was."""

    def __init__(self, error: type[BaseException], fuse: int) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.error = error
        FUSE[0] = fuse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        FUSE[0] -= 1
        self.calls = getattr(self, "calls", 0) + 1
        h = self.norm(self.first(x))
        if FUSE[0] == 0:
            raise self.error("stop")
        return self.second(torch.relu_(h))


FUSE = [0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fuse", [1, 3, 6, 7, 8])
def test_after_an_exception(error: type[BaseException], fuse: int) -> None:
    model = Interrupting(error, fuse).eval()
    x = torch.randn(6, 4)
    before, modes = ModelState.of(model), (torch.is_grad_enabled(), torch.backends.cudnn.allow_tf32)
    with pytest.raises(error, match="stop"):
        for _ in range(8):
            tg.trace_ntk(model)(x)
    before.check(model)
    assert modes == (torch.is_grad_enabled(), torch.backends.cudnn.allow_tf32)
    FUSE[0] = -1
    assert tg.trace_ntk(model)(x).shape == (6, 6)  # and the recorder is gone: the model works as before
    assert torch.overrides._get_current_function_mode() is None


def test_after_all_kernels() -> None:
    model = tg.models.lenet5().eval()
    model[0].weight.requires_grad_(False)
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    grads = {k: p.grad for k, p in model.named_parameters()}
    x = torch.randn(3, 3, 32, 32)
    before, given = ModelState.of(model), x.clone()
    for kernel in (tg.full_ntk, tg.trace_ntk, tg.pseudo_ntk, tg.conjugate_kernel, tg.embedding_kernel):
        kernel(model)(x)
        kernel(model)(x.clone().requires_grad_())
        tg.compute(kernel(model), x, progress=False)
    before.check(model)
    assert all(p.grad is grads[k] for k, p in model.named_parameters())
    assert torch.equal(x, given)


def test_layer_hooks_are_removed_after_an_error() -> None:
    model = Interrupting(RuntimeError, 2).eval()
    with pytest.raises(RuntimeError, match="stop"):
        for _ in range(3):
            tg.embedding_kernel(model, layers=["first"])(torch.randn(3, 4))
    assert not model.first._forward_hooks


def shared() -> nn.Module:
    """One module under two names: restoring the second name put the borrowed tensor back for good."""
    c = nn.Linear(4, 4)
    return nn.Sequential(c, nn.Tanh(), c, nn.Linear(4, 2))


def counting() -> nn.Module:
    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            self.seen = [*getattr(self, "seen", []), x]
            return super().forward(x)

    return nn.Sequential(Counting(4, 3), nn.Tanh(), nn.Linear(3, 2))


def counting_buffer() -> nn.Module:
    class Counting(nn.Linear):
        def __init__(self, i: int, o: int) -> None:
            super().__init__(i, o)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    return nn.Sequential(Counting(4, 3), nn.Tanh(), nn.Linear(3, 2))


def casting() -> nn.Module:
    class Casting(nn.Module):
        """As Switch Transformers' router does; setting the type of a borrowed view crashed the interpreter."""

        def __init__(self) -> None:
            super().__init__()
            self.c, self.out = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.c = self.c.to(torch.float32)
            return self.out(self.c(x.float()).tanh().to(x.dtype))

    return Casting()


def hooked() -> nn.Module:
    model = shared()
    model[0].register_forward_hook(lambda m, args, out: 2 * out)
    model[1].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    return model


def max_norm() -> nn.Module:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4, max_norm=0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table((x.abs() * 3).long().clamp(max=6)).sum(1)

    return Lookup()


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    prune.random_unstructured(model[0], "weight", 0.4)
    return model


ODD = [
    shared,
    counting,
    counting_buffer,
    casting,
    hooked,
    max_norm,
    old_weight_norm,
    pruned,
    lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)),
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)),
    lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2)),
    lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), Last(nn.LSTM(1, 3, batch_first=True)), nn.Linear(3, 2)),
]


class Last(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)[0][:, -1]


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
@pytest.mark.parametrize("make", ODD)
@pytest.mark.every(3)
def test_models_that_change_themselves(make) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = make().double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    before = ModelState.of(model)
    for kernel in (tg.trace_ntk(model), tg.pseudo_ntk(model)):
        assert torch.equal(kernel(x), kernel(x))
        kernel.parts(x)
        before.check(model)
    if make is casting:
        with pytest.raises(tg.ModelError, match=r"changes the type of the parameter c\.weight"):
            tg.linearize(model)(x)
    else:
        tg.linearize(model)(x)
    tg.projected(tg.pseudo_ntk(model), dim=8).features(x)
    before.check(model)
    tg.testing.check_kernel(tg.trace_ntk(model), x, tolerance=1e-6 if make is casting else None)


def test_copies_work_after_a_call_as_before() -> None:
    """Hooks of old-style reparametrisations leave a weight with a graph behind, which cannot be copied."""
    for make in (shared, pruned, lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 3)))):
        model = make().eval()
        with torch.no_grad():
            model(torch.randn(2, 4))
        copy.deepcopy(model)
        tg.trace_ntk(model)(torch.randn(3, 4))
        copy.deepcopy(model)
        pickle.loads(pickle.dumps(model))
        torch.save(model.state_dict(), io.BytesIO())


def test_training_goes_on_with_a_shared_module() -> None:
    torch.manual_seed(0)
    model, x = shared(), torch.randn(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tg.trace_ntk(model)(x)
    before = model[0].weight.detach().clone()
    model(x).square().sum().backward()
    optimizer.step()
    assert isinstance(model[0].weight, nn.Parameter)
    assert not torch.equal(model[0].weight, before)


def test_ctrl_c_while_the_model_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst moment: half of it is back, half is not."""
    real, count = tg.engine.network._put_back, [0]

    def interrupted(now: object, before: object) -> None:
        count[0] += 1
        if count[0] == 7:
            raise KeyboardInterrupt
        real(now, before)

    monkeypatch.setattr(tg.engine.network, "_put_back", interrupted)
    model = counting().eval()
    before = ModelState.of(model)
    with pytest.raises(KeyboardInterrupt):
        tg.trace_ntk(model)(torch.randn(3, 4))
    before.check(model)


def test_inputs_are_not_written_to() -> None:
    class Centring(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x -= 0.5
            return super().forward(x)

    model, x = Centring(4, 2).double(), torch.randn(5, 4, dtype=torch.float64)
    given, plain = x.clone(), nn.Linear(4, 2).double()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(tg.trace_ntk(model)(x), tg.trace_ntk(plain)(x - 0.5), rtol=1e-12, atol=1e-12)
    assert torch.equal(x, given)


def test_two_threads_on_one_model() -> None:
    """It is lent to one at a time; neither sees the other's parameters."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    other = {k: v + 1 for k, v in model.state_dict().items()}
    x = torch.randn(5, 4, dtype=torch.float64)
    kernels = [tg.trace_ntk(model), tg.trace_ntk(model, params=other)]
    want, before = [k(x) for k in kernels], ModelState.of(model)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda j: (j % 2, kernels[j % 2](x)), range(60)))
    for j, k in found:
        assert torch.equal(k, want[j])
    before.check(model)
