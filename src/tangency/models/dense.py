"""Fully connected networks."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    """Linear layers from `sizes[0]` inputs to `sizes[-1]` outputs, with an activation between each two."""
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


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
    """A network of one hidden layer and one output, whose kernel has a closed form as the width grows."""
    return TwoLayer(inputs, width, activation)
