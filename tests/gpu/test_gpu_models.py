"""Models on the GPU that are more than layers: routing by data, derived weights, recurrence; nothing is touched."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from on_device import CUDA, DEVICE, F64, QUIET, Errors, cosine_error, error
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from zoo import Net, parameter

import tangency as tg
from tangency.testing import ModelState

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(q) for q in QUIET)]


class Experts(nn.Module):
    """Each sample goes through the expert that its gate chooses; the rows of an expert are picked by index."""

    def __init__(self, top: int = 1) -> None:
        super().__init__()
        self.gate, self.out, self.top = nn.Linear(4, 3), nn.Linear(6, 2), top
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        share, choice = self.gate(x).softmax(1).topk(self.top, 1)
        total = x.new_zeros(len(x), 6)
        for k, expert in enumerate(self.experts):
            row, place = (choice == k).nonzero(as_tuple=True)
            total = total.index_add(0, row, expert(x[row]) * share[row, place, None])
        return self.out(total.tanh())


def indexed_experts() -> nn.Module:
    """All experts in one tensor, of which each sample takes its own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        weight = net.experts[net.gate(x).argmax(1)]
        return net.out(torch.bmm(weight, x[:, :, None])[:, :, 0].tanh())

    return Net(forward, gate=nn.Linear(4, 3), experts=parameter(3, 5, 4), out=nn.Linear(5, 2))


def branches() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        high = x[:, 0] > 0
        return net.out(torch.where(high[:, None], net.high(x).tanh(), net.low(x).relu()))

    return Net(forward, high=nn.Linear(4, 5), low=nn.Linear(4, 5), out=nn.Linear(5, 2))


def low_rank() -> nn.Module:
    """A weight that is a product of two, beside a frozen one (LoRA)."""
    base = nn.Linear(4, 6)
    base.weight.requires_grad_(False)
    return Net(
        lambda net, x: net.out((net.base(x) + F.linear(x, net.up @ net.down)).tanh()),
        base=base,
        up=parameter(6, 2),
        down=parameter(2, 4),
        out=nn.Linear(6, 2),
    )


def masked_weight() -> nn.Module:
    model = Net(
        lambda net, x: net.out(F.linear(x, net.weight * net.mask).tanh()), weight=parameter(5, 4), out=nn.Linear(5, 2)
    )
    model.register_buffer("mask", (torch.arange(20).reshape(5, 4) % 3 > 0).float())
    return model


def standardised() -> nn.Module:
    """Weight standardisation: the convolution sees the weight less its mean, over its deviation."""

    def forward(net: Any, x: Tensor) -> Tensor:
        w = net.weight
        w = (w - w.mean((1, 2), keepdim=True)) / w.std((1, 2), keepdim=True)
        return net.out(F.conv1d(x[:, None], w).tanh().mean(2))

    return Net(forward, weight=parameter(5, 1, 3), out=nn.Linear(5, 2))


def hypernetwork() -> nn.Module:
    """Every sample's own weight, made by another network."""
    return Net(lambda net, x: torch.bmm(net.maker(x).view(-1, 3, 4), x[:, :, None])[:, :, 0], maker=nn.Linear(4, 12))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    prune.random_unstructured(model[0], "weight", 0.4)
    return model


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    width = 6 if options.get("bidirectional") else 3
    return lambda: Net(
        lambda net, x: net.out(net.body(x[:, :, None])[0][:, -1]),
        body=kind(1, 3, batch_first=True, **options),
        out=nn.Linear(width, 2),
    )


def shared() -> nn.Module:
    once = nn.Linear(4, 4)
    return nn.Sequential(once, nn.Tanh(), once, nn.Linear(4, 2))


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))


def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "experts, two each": lambda: Experts(2),
    "experts by index": indexed_experts,
    "branches": branches,
    "low rank": low_rank,
    "masked weight": masked_weight,
    "standardised": standardised,
    "hypernetwork": hypernetwork,
    "weight_norm": weight_normed,
    "old weight_norm": old_weight_norm,
    "spectral_norm": spectral,
    "orthogonal": orthogonal,
    "pruned": pruned,
    "lstm": recurrent(nn.LSTM),
    "lstm, two layers, both ways": recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": recurrent(nn.GRU),
    "rnn": recurrent(nn.RNN),
    "shared": shared,
}
# torch's CUDA kernel of weight_norm (docs/limitations.md).
BOUNDS = {"weight_norm": 1e-7, "old weight_norm": 1e-7}


def both(name: str) -> tuple[nn.Module, Tensor, nn.Module, Tensor]:
    """The model and its inputs on the CPU and on the device."""
    found: list[Any] = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(0)
        model = MODELS[name]().double().eval()
        found += [model.to(device), torch.randn(9, 4, dtype=F64).to(device)]
    return tuple(found)  # type: ignore[return-value]


@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_is_that_of_plain_autograd(name: str, errors: Errors) -> None:
    near, x, far, y = both(name)
    bound = BOUNDS.get(name, 1e-8)
    before = ModelState.of(far)
    j = reference.jacobians_loop(near, x)
    full, trace = tg.full_ntk(far), tg.trace_ntk(far)
    errors.below("odd models float64", error(full(y), reference.full(j, j)), bound, "full")
    errors.below("odd models float64", error(trace(y), reference.trace(j, j)), bound, "trace")
    errors.below("odd models float64", error(tg.pseudo_ntk(far)(y), reference.pseudo(j, j)), bound, "pseudo")
    errors.below("odd models float64", error(trace(y[:2], y[4:]), trace(y)[:2, 4:]), bound, "two sides")
    before.check(far)


@pytest.mark.parametrize("dtype", ["float32", "float16", "tf32"])
@pytest.mark.parametrize("name", MODELS)
def test_narrow_precisions_are_close(name: str, dtype: str, errors: Errors) -> None:
    near, x, far, y = both(name)
    before = ModelState.of(far)
    bound = {"float32": 1e-4, "float16": 2e-3, "tf32": 2e-2}[dtype]
    got = tg.trace_ntk(far, dtype=dtype)(y)
    errors.below(f"odd models {dtype}", cosine_error(got, tg.trace_ntk(near)(x)), bound)
    before.check(far)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_the_model_is_touched(name: str) -> None:
    _, _, model, x = both(name)
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN's recurrent layers have no backward pass in eval()
        model(x).sum().backward()
    before, given = ModelState.of(model), x.clone()
    for kernel in (tg.trace_ntk(model), tg.pseudo_ntk(model)):
        kernel.parts(x)
        kernel.diag(x)
        tg.compute(kernel, x, tile=4, progress=False)
        before.check(model)
    tg.projected(tg.pseudo_ntk(model), dim=8).features(x)
    tg.conjugate_kernel(model)(x)
    tg.linearize(model)(x)
    before.check(model)
    assert torch.equal(x, given)


@pytest.mark.parametrize("name", ["experts", "weight_norm", "low rank"])
def test_conformance(name: str) -> None:
    _, _, model, x = both(name)
    tg.testing.check_kernel(tg.trace_ntk(model), x, tolerance=1e-7 if name in BOUNDS else None)


@pytest.mark.parametrize("name", ["experts", "lstm", "weight_norm"])
def test_after_an_exception(name: str) -> None:
    """A failure in the middle of a pass leaves the model, and torch's switches, as they were."""
    _, _, model, x = both(name)
    before = ModelState.of(model)

    def failing(out: Tensor) -> Tensor:
        raise KeyError("in the head")

    with pytest.raises(KeyError, match="in the head"):
        tg.head_ntk(model, failing)(x)
    before.check(model)
    assert tg.trace_ntk(model)(x).shape == (9, 9)


def test_a_model_and_inputs_in_different_places() -> None:
    _, x, model, _ = both("branches")
    if not CUDA:
        pytest.skip("there is only one place on a CPU")
    with pytest.raises(tg.InputError, match="cuda"):
        tg.trace_ntk(model)(x)
    assert tg.compute(tg.trace_ntk(model), x, progress=False).shape == (9, 9)  # takes inputs from anywhere


def test_gradients_in_the_inputs(errors: Errors) -> None:
    near, x, far, y = both("branches")
    grads = []
    for model, z in ((near, x), (far, y)):
        z = z.clone().requires_grad_()
        tg.trace_ntk(model)(z, z.detach()[:3]).sum().backward()
        assert z.grad is not None
        grads.append(z.grad)
    errors.below("gradients in the inputs", error(grads[1], grads[0]), 1e-8)
