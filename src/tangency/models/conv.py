"""Convolutional networks for small images."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

from torch import Tensor, nn

from .._base.checks import choice
from ..errors import InputError
from .dense import Parametrization, Scale, mlp, scaled, standard_normal

Norm = Literal["batch", "none"]
MakesModule = Callable[[], nn.Module]
RELU = partial(nn.ReLU, inplace=True)


def lenet5(
    outputs: int = 10,
    channels: int = 3,
    size: int = 32,
    *,
    activation: MakesModule = nn.ReLU,
    pool: Callable[[int], nn.Module] = nn.MaxPool2d,
    padding: int = 0,
) -> nn.Sequential:
    """LeNet-5 for square images, by default with ReLU and max pooling.

    `activation=nn.GELU, pool=nn.AvgPool2d` make it smooth in images and weights; `padding=2` keeps the size of an image
    in its convolutions. With average pooling and padding it is the network of Ortiz-Jiménez et al. (2021).

    >>> import torch
    >>> lenet5(10, channels=1, size=28)(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    >>> lenet5(1, activation=nn.GELU, pool=nn.AvgPool2d, padding=2)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 1])
    """
    lost = 4 - 2 * padding
    side = ((size - lost) // 2 - lost) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        activation(),
        pool(2),
        nn.Conv2d(6, 16, 5, padding=padding),
        activation(),
        pool(2),
        nn.Flatten(),
        nn.Linear(16 * side**2, 120),
        activation(),
        nn.Linear(120, 84),
        activation(),
        nn.Linear(84, outputs),
    )


def small_cnn(
    outputs: int = 1,
    channels: int = 1,
    size: int = 28,
    width: int = 8,
    hidden: Sequence[int] = (128, 64),
    *,
    parametrization: Parametrization = "ntk",
) -> nn.Sequential:
    """Three 3x3 convolutions of 8w, 4w and w channels, each with ReLU and 2x2 average pooling, then linear layers.

    The CNN of the two-class experiments of Engel et al. (2024), for square images of `size` 8 or more. "ntk": weights
    and biases from N(0, 1); what a convolution of o channels puts out is divided by √(9 o) and what a hidden linear
    layer of width o puts out by √o, so that the outputs at initialisation keep their variance as the width grows.
    "standard": PyTorch's initialisation, nothing divided.

    >>> import torch
    >>> small_cnn(width=2)(torch.randn(5, 1, 28, 28)).shape
    torch.Size([5, 1])
    """
    if size < 8:
        raise InputError(f"size={size}; needed: 8 or more, since the image is halved three times.")
    ntk = scaled(parametrization)
    layers: list[nn.Module] = []
    for i, o in pairwise([channels, 8 * width, 4 * width, width]):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU()]
        layers += [Scale(9 * o)] if ntk else []
        layers += [nn.AvgPool2d(2)]
    head = mlp([width * (size // 8) ** 2, *hidden, outputs], parametrization=parametrization)
    model = nn.Sequential(*layers, nn.Flatten(), *head)
    return standard_normal(model) if ntk else model


def forensics_cnn(outputs: int = 10, width: int = 32) -> nn.Sequential:
    """Six 3x3 convolutions of w, w, 2w, 2w, 4w, 4w channels, pooled after each two, and three linear layers.

    The network of Shan et al.'s poison forensics (2022), in which Engel et al. (2024) trace poisoned samples, for
    3x32x32 images (0.82M parameters at width 32). Each convolution and hidden linear layer is followed by ReLU, then a
    batch norm with ε = 0.001 and momentum 0.01, the defaults of the library that it was first written for.

    >>> import torch
    >>> forensics_cnn(10, width=2).eval()(torch.randn(5, 3, 32, 32)).shape
    torch.Size([5, 10])
    """

    def normed(layer: nn.Module, norm: type[nn.BatchNorm1d] | type[nn.BatchNorm2d], features: int) -> list[nn.Module]:
        """The layer, ReLU, and a batch norm with Keras's defaults."""
        return [layer, nn.ReLU(), norm(features, eps=1e-3, momentum=0.01)]

    layers: list[nn.Module] = []
    for i, o in pairwise([3, width, 2 * width, 4 * width]):
        layers += normed(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d, o)
        layers += normed(nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d, o)
        layers += [nn.MaxPool2d(2)]
    # The original takes the largest of each four of the flattened [4w, 4, 4] features: those are its rows.
    layers += [nn.MaxPool2d((1, 4)), nn.Flatten(), nn.Dropout(0.2)]
    features = 16 * width
    for _ in range(2):
        layers += normed(nn.Linear(features, features), nn.BatchNorm1d, features)
    return nn.Sequential(*layers, nn.Linear(features, outputs))


# 3x3 convolutions before each pooling.
MYRTLE = {5: (2, 1, 1), 7: (2, 2, 2), 10: (3, 3, 3)}


def myrtle(depth: int = 5, outputs: int = 10, channels: int = 3, width: int = 64) -> nn.Sequential:
    """Myrtle-5, -7 or -10: 3x3 convolutions with ReLU, 2x2 average pooling twice, a global average, a linear layer.

    Of Shankar et al. (2020), "Neural kernels without tangents", whose kernels of infinite width these are for: one
    width throughout, no biases, for images of any size of 4 or more. `tg.infinite_ntk(myrtle(10))` is the kernel.

    >>> import torch
    >>> myrtle(5, width=4)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    if depth not in MYRTLE:
        raise InputError(f"depth={depth!r}; needed: one of {sorted(MYRTLE)}.")
    first, second, third = MYRTLE[depth]
    layers = [*_relu_convs(channels, width, first), nn.AvgPool2d(2), *_relu_convs(width, width, second)]
    layers += [nn.AvgPool2d(2), *_relu_convs(width, width, third)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs, bias=False))


def conv_stack(
    depth: int = 11, outputs: int = 10, channels: int = 3, width: int = 64, *, size: int | None = None
) -> nn.Sequential:
    """`depth` 3x3 convolutions with ReLU and without biases, a global average, a linear layer.

    The network whose kernel of infinite width is Arora et al.'s (2019) CNTK with global average pooling. Given the
    `size` of square images, they are flattened instead of averaged (their CNTK without pooling).

    >>> import torch
    >>> conv_stack(3, width=4)(torch.randn(2, 3, 8, 8)).shape, conv_stack(3, width=4, size=8)[-1].in_features
    (torch.Size([2, 10]), 256)
    """
    if depth < 1:
        raise InputError(f"depth={depth}; needed: at least one convolution.")
    pool = [nn.AdaptiveAvgPool2d(1)] if size is None else []
    head = nn.Linear(width * (1 if size is None else size**2), outputs, bias=False)
    return nn.Sequential(*_relu_convs(channels, width, depth), *pool, nn.Flatten(), head)


def _relu_convs(channels: int, width: int, count: int) -> list[nn.Module]:
    """So many 3x3 convolutions of one width, each with ReLU."""
    layers: list[nn.Module] = []
    for k in range(count):
        layers += [nn.Conv2d(width if k else channels, width, 3, padding=1, bias=False), nn.ReLU()]
    return layers


def conv_norm(i: int, o: int, size: int, stride: int, norm: Norm) -> nn.Sequential:
    """A convolution that keeps the image's size up to its stride, then its norm, or a bias where there is none."""
    layers: list[nn.Module] = [nn.Conv2d(i, o, size, stride, padding=size // 2, bias=norm == "none")]
    if norm == "batch":
        layers.append(nn.BatchNorm2d(o))
    return nn.Sequential(*layers)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut around them, projected where the shape changes."""

    def __init__(self, i: int, o: int, stride: int, norm: Norm, activation: MakesModule = RELU) -> None:
        super().__init__()
        self.activation = activation()
        self.first = conv_norm(i, o, 3, stride, norm)
        self.second = conv_norm(o, o, 3, 1, norm)
        self.shortcut = nn.Identity() if i == o and stride == 1 else conv_norm(i, o, 1, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, i, t, s] to [n, o, t / stride, s / stride]."""
        y = self.second(self.activation(self.first(x)))
        y += self.shortcut(x)
        out: Tensor = self.activation(y)
        return out


class ResNet(nn.Module):
    """A ResNet for 3x32x32 images: a 3x3 stem without pooling, stages of `blocks` blocks, a global average.

    Each stage after the first halves the image and doubles the channels. (2, 2, 2, 2) is ResNet-18.
    """

    def __init__(
        self, outputs: int, norm: Norm, width: int, blocks: Sequence[int] = (2, 2, 2, 2), activation: MakesModule = RELU
    ) -> None:
        super().__init__()
        self.activation = activation()
        choice(norm, "norm", get_args(Norm))
        self.stem = conv_norm(3, width, 3, 1, norm)
        built: list[nn.Module] = []
        i = width
        for stage, repeats in enumerate(blocks):
            o = width * 2**stage
            built += [Block(i, o, 1 if stage == 0 else 2, norm, activation)]
            built += [Block(o, o, 1, norm, activation) for _ in range(repeats - 1)]
            i = o
        self.blocks = nn.Sequential(*built)
        self.head = nn.Linear(i, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, 3, t, s] to outputs [n, c]."""
        y: Tensor = self.blocks(self.activation(self.stem(x)))
        outputs: Tensor = self.head(y.mean((-2, -1)))
        return outputs


def resnet18(outputs: int = 10, norm: Norm = "batch", width: int = 64, *, activation: MakesModule = RELU) -> ResNet:
    """ResNet-18 for 3x32x32 images (11.17M parameters at width 64); without norms, its convolutions have biases.

    `activation=nn.GELU` makes it smooth.

    >>> import torch
    >>> resnet18(10, width=4).eval()(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """
    return ResNet(outputs, norm, width, activation=activation)


def resnet34(outputs: int = 10, norm: Norm = "batch", width: int = 64, *, activation: MakesModule = RELU) -> ResNet:
    """ResNet-34 for 3x32x32 images (21.28M parameters at width 64): stages of 3, 4, 6 and 3 blocks.

    >>> import torch
    >>> resnet34(10, width=2).eval()(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """
    return ResNet(outputs, norm, width, (3, 4, 6, 3), activation)
