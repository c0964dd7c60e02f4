"""A network by a number of its module: what a program sets there does not travel with the class."""

import torch
from torch import Tensor

SCALE = 1.0


class Net(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE
