"""MobileNetV2 for small images."""

from torch import Tensor, nn

# (expansion, channels, repeats, stride of the first) of Sandler et al. (2018), table 2, but for one stride, see below.
STAGES = [(1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]


def unit(i: int, o: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution, its batch norm and ReLU6."""
    convolution = nn.Conv2d(i, o, size, stride, padding=size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(o), nn.ReLU6(inplace=True)]


class InvertedResidual(nn.Module):
    """Expand the channels, convolve each alone, project back without a ReLU; a shortcut where the shape is kept."""

    def __init__(self, i: int, o: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = expansion * i
        layers = unit(i, wide, 1) if expansion > 1 else []
        layers += unit(wide, wide, 3, stride, groups=wide)
        layers += unit(wide, o, 1)[:-1]
        self.body = nn.Sequential(*layers)
        self.shortcut = i == o and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, i, t, s] to [n, o, t / stride, s / stride]."""
        y: Tensor = self.body(x)
        return x + y if self.shortcut else y


class MobileNetV2(nn.Module):
    """A 3x3 stem, the inverted residuals of `STAGES`, a 1x1 convolution, a global average, dropout, a linear layer."""

    def __init__(self, outputs: int, width: float | int) -> None:
        super().__init__()
        i, last = max(1, int(32 * width)), int(1280 * max(1, width))
        self.stem = nn.Sequential(*unit(3, i, 3))
        blocks: list[nn.Module] = []
        for expansion, channels, repeats, stride in STAGES:
            o = max(1, int(channels * width))
            for k in range(repeats):
                blocks.append(InvertedResidual(i, o, expansion, stride if k == 0 else 1))
                i = o
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(*unit(i, last, 1))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(last, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, 3, t, s] to outputs [n, c]."""
        y: Tensor = self.last(self.blocks(self.stem(x)))
        outputs: Tensor = self.head(self.dropout(y.mean((-2, -1))))
        return outputs


def mobilenet_v2(outputs: int = 10, width: float | int = 1.0) -> MobileNetV2:
    """MobileNetV2 for 3x32x32 images (2.24M parameters at width 1), which its last stage sees as 4x4.

    For images of this size the stem and the stage of 24 channels have stride 1 instead of 2, as is common for CIFAR-10;
    strides carry no parameters, so it is otherwise the network of Sandler et al. (2018). `width` multiplies all
    channels, rounded down; the last 1x1 convolution keeps at least its 1280.

    >>> import torch
    >>> mobilenet_v2(10, width=0.1).eval()(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """
    return MobileNetV2(outputs, width)
