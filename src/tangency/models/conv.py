"""Convolutional networks for small images."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "none"]


def lenet5(outputs: int = 10, channels: int = 3, size: int = 32) -> nn.Sequential:
    """LeNet-5 for square images, with ReLU and max pooling."""
    side = ((size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side**2, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, outputs),
    )


def conv(i: int, o: int, size: int, stride: int, norm: Norm) -> nn.Sequential:
    """A convolution that keeps the image's size up to its stride, then its norm, or a bias where there is none."""
    layers: list[nn.Module] = [nn.Conv2d(i, o, size, stride, padding=size // 2, bias=norm == "none")]
    if norm == "batch":
        layers.append(nn.BatchNorm2d(o))
    return nn.Sequential(*layers)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut around them, projected where the shape changes."""

    def __init__(self, i: int, o: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = conv(i, o, 3, stride, norm)
        self.second = conv(o, o, 3, 1, norm)
        self.shortcut = nn.Identity() if i == o and stride == 1 else conv(i, o, 1, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, i, t, s] to [n, o, t / stride, s / stride]."""
        y = self.second(F.relu(self.first(x), inplace=True))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """ResNet-18 for 3x32x32 images: a 3x3 stem without pooling, four stages of two blocks, a global average."""

    def __init__(self, outputs: int, norm: Norm, width: int) -> None:
        super().__init__()
        self.stem = conv(3, width, 3, 1, norm)
        blocks: list[nn.Module] = []
        i = width
        for o, stride in [(width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)]:
            blocks += [Block(i, o, stride, norm), Block(o, o, 1, norm)]
            i = o
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(i, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, 3, t, s] to outputs [n, c]."""
        y: Tensor = self.blocks(F.relu(self.stem(x), inplace=True))
        outputs: Tensor = self.head(y.mean((-2, -1)))
        return outputs


def resnet18(outputs: int = 10, norm: Norm = "batch", width: int = 64) -> ResNet:
    """ResNet-18 for 3x32x32 images (11.17M parameters at width 64); without norms, its convolutions have biases."""
    if norm not in ("batch", "none"):
        raise ValueError(f"norm must be 'batch' or 'none', not {norm!r}")
    return ResNet(outputs, norm, width)
