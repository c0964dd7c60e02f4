"""Linearised networks on the GPU against the CPU: values, gradients and training, in float64."""

from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from on_device import CASES, CUDA, DEVICE, Errors, error, there
from torch import Tensor, nn
from zoo import build

import tangency as tg
from tangency.testing import ModelState

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*batching rule.*:UserWarning")]
RECURRENT = ("lstm", "gru")
FIRST = [name for name in CASES if name not in RECURRENT]
HIGHER = ["one_output", "two_layer_ntk", "layer_norm", "rms_norm", "weight_normed", "vit", "attention_cross", "bert"]
HIGHER += ["fixed_point", "tied_transpose", "embedding_bag", "matmul", "conv_circular", "instance_norm"]
BOUND = 1e-7


def value(model: nn.Module, x: Any) -> Tensor:
    args, kwargs = reference.arguments(x)
    out = model(*args, **kwargs)
    return getattr(out, "logits", out)


@torch.no_grad()
def move(net: tg.Linearized) -> None:
    """θ ← θ0 + a step that is the same on every device."""
    steps = torch.Generator().manual_seed(1)
    for name, v in net.anchor.items():
        step = 0.1 * torch.randn(v.shape, generator=steps, dtype=v.dtype)
        net.model.get_parameter(name).copy_(v + step.to(v.device))


def evaluated(net: tg.Linearized, x: Any) -> tuple[Tensor, Tensor]:
    """The value and the gradient of a sum of its outputs, on the CPU."""
    move(net)
    out = value(net, x)
    u = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype).to(out.device)
    out.backward(u)
    every = [net.model.get_parameter(k) for k in net.names]
    grads = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in every]
    return out.detach().cpu(), torch.cat(grads).cpu()


def compare(name: str, order: int, errors: Errors) -> None:
    (near, x), (far, y) = build(CASES[name], 3), build(CASES[name], 3)
    far, y = far.to(DEVICE), there(y)
    before = ModelState.of(far)
    want, got = evaluated(tg.linearize(near, order), x), evaluated(tg.linearize(far, order), y)
    errors.below(f"linearize order {order}, values", error(got[0], want[0]), BOUND)
    errors.below(f"linearize order {order}, gradients", error(got[1], want[1]), BOUND)
    before.check(far)


@pytest.mark.parametrize("name", FIRST)
def test_first_order_is_that_of_the_cpu(name: str, errors: Errors) -> None:
    compare(name, 1, errors)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", HIGHER)
def test_higher_orders_are_those_of_the_cpu(name: str, order: int, errors: Errors) -> None:
    compare(name, order, errors)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")
def test_recurrent_layers_go_backwards_twice(name: str, errors: Errors) -> None:
    compare(name, 1, errors)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_say_so(name: str) -> None:
    """docs/limitations.md: once for order 1; orders 2 and 3 are refused. On a CPU they work."""
    model, x = build(CASES[name], 3)
    model, x = model.to(DEVICE), there(x)
    net = tg.linearize(model)
    if not CUDA:
        assert torch.equal(net(x), net(x))
        assert tg.linearize(model, 2)(x).shape == net(x).shape
        return
    with pytest.warns(tg.PerformanceWarning, match="two backward passes"):
        first = net(x)
    assert torch.equal(net(x), first)  # a second warning would be an error
    for order in (2, 3):
        with pytest.raises(tg.ModelError, match=f"order={order} needs"):
            tg.linearize(model, order)(x)


@pytest.mark.parametrize("name", ["mlp_relu", "conv_strided", "encoder", "tied_embedding"])
def test_the_kernel_is_the_network_s(name: str, errors: Errors) -> None:
    model, x = build(CASES[name], 3)
    model, x = model.to(DEVICE), there(x)
    net = tg.linearize(model)
    move(net)
    j = [reference.matrix(v).flatten(0, 1) for v in reference.jacobians_loop(net, x).values()]
    want = sum(v @ v.T for v in j)
    assert isinstance(want, Tensor)
    got = tg.full_ntk(model)(x).flatten(2).flatten(0, 1)
    errors.below("kernel of the linearised network", error(got, want), 1e-10)


def test_training_is_that_of_the_cpu(errors: Errors) -> None:
    ends = []
    for device in (torch.device("cpu"), DEVICE):
        model, x = build(CASES["lenet"], 6)
        net, x = tg.linearize(model.to(device)), x.to(device)
        y = torch.randn(6, net(x).shape[1], generator=torch.Generator().manual_seed(4), dtype=x.dtype).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(20):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
        ends.append(net(x))
    errors.below("training of the linearised network", error(ends[1], ends[0]), 1e-8)


def test_moving_it_afterwards(errors: Errors) -> None:
    """Linearised on the CPU, then moved with its anchor."""
    model, x = build(CASES["vit"], 3)
    want = evaluated(tg.linearize(model), x)
    got = evaluated(tg.linearize(model).to(DEVICE), there(x))
    errors.below("linearize, moved", max(error(a, b) for a, b in zip(got, want, strict=True)), 1e-10)
