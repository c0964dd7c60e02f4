"""Fully connected networks."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._base.checks import choice

Parametrization = Literal["standard", "ntk"]
Net = TypeVar("Net", bound=nn.Module)


class Scale(nn.Module):
    """x / √width: what makes the sum over `width` standard normal weights of the next layer one of order 1.

    >>> Scale(4)(torch.ones(2))
    tensor([0.5000, 0.5000])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, kept."""
        return x / self.width**0.5

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"1/√{self.width}"


def scaled(parametrization: str) -> bool:
    """Whether the parametrisation is the NTK's."""
    return choice(parametrization, "parametrization", get_args(Parametrization)) == "ntk"


def standard_normal(model: Net) -> Net:
    """The model, all its weights and biases drawn anew from N(0, 1)."""
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def mlp(
    sizes: Sequence[int],
    activation: Callable[[], nn.Module] = nn.ReLU,
    bias: bool = True,
    *,
    parametrization: Parametrization = "standard",
) -> nn.Sequential:
    """Linear layers from `sizes[0]` inputs to `sizes[-1]` outputs, with an activation between each two.

    "standard" is PyTorch's initialisation. "ntk": weights and biases from N(0, 1), and σ(z) / √width in place of σ(z),
    so that the outputs and the kernel at initialisation have a limit as the widths grow (Jacot, Gabriel and Hongler,
    2018). With ReLU this is relu(z / √width), as Engel et al. (2024) write it: 784-100-100-100-1 for two classes.
    Its weights are larger than the standard ones, and so is the rate that trains it: often about 1 instead of 0.05.

    >>> print(mlp([784, 100, 1], parametrization="ntk"))
    Sequential(
      (0): Linear(in_features=784, out_features=100, bias=True)
      (1): ReLU()
      (2): Scale(1/√100)
      (3): Linear(in_features=100, out_features=1, bias=True)
    )
    """
    ntk = scaled(parametrization)
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o, bias=bias), activation()]
        layers += [Scale(o)] if ntk else []
    model = nn.Sequential(*layers[: -2 if ntk else -1])  # the last linear layer's outputs are the network's
    return standard_normal(model) if ntk else model


class TwoLayer(nn.Module):
    """f(x) = v·σ(W x / √d) / √h with standard normal W [h, d] and v [h]: the NTK parametrisation, without biases."""

    def __init__(self, inputs: int, width: int, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(width, inputs))
        self.v = nn.Parameter(torch.randn(width))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [n, d] to outputs [n, 1]."""
        h, d = self.W.shape
        hidden = self.activation(F.linear(x, self.W) / d**0.5) / h**0.5
        outputs: Tensor = F.linear(hidden, self.v)
        return outputs.unsqueeze(-1)


def two_layer(inputs: int, width: int, activation: Callable[[Tensor], Tensor] = torch.tanh) -> TwoLayer:
    """A network of one hidden layer and one output, whose kernel has a closed form as the width grows.

    >>> two_layer(3, 100)(torch.randn(5, 3)).shape
    torch.Size([5, 1])
    """
    return TwoLayer(inputs, width, activation)
