"""What the experiments of Ortiz-Jiménez et al. (2021) share: their networks, as they draw them, and their data.

The paper is silent on some of this; then the authors' released code is followed: weights of variance 1/fan-in and
biases of zero, LeNet with average pooling and padded convolutions, channels standardised, a rate that falls linearly,
CIFAR2 as CIFAR-10's first five classes against its last five.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..datasets import Labelled, TrainTest, cifar10, digits, mnist
from ..errors import InputError
from ..models import Recipe, initialized, lenet5, mlp, resnet18
from ..models.conv import MakesModule
from .cntk import balanced, standardised
from .table import Options

Shape = tuple[int, ...]  # of an image, [c, h, w]
# The largest deviation that is drawn, and what the cut takes from the standard deviation of a normal law.
CUT, SHRUNK = 2.0, 0.87962566
WORK = 12 << 30  # bytes beside a Gram on a GPU (heuristic)


def two_hidden(shape: Shape, activation: MakesModule) -> nn.Module:
    """Two hidden layers of 100 on flattened images."""
    return nn.Sequential(nn.Flatten(), *mlp([torch.Size(shape).numel(), 100, 100, 1], activation=activation))


def lenet(shape: Shape, activation: MakesModule) -> nn.Module:
    """LeNet-5 with average pooling and convolutions that keep the size."""
    return lenet5(1, shape[0], shape[1], activation=activation, pool=nn.AvgPool2d, padding=2)


LEARNERS: dict[str, Callable[[Shape, MakesModule], nn.Module]] = {
    "mlp": two_hidden,
    "lenet": lenet,
    "resnet18": lambda shape, activation: resnet18(1, activation=activation),
    "narrow": lambda shape, activation: resnet18(1, width=8, activation=activation),
}
TITLES = {"mlp": "MLP", "lenet": "LeNet", "resnet18": "ResNet18", "narrow": "ResNet18, width 8"}


def learner(name: str, shape: Shape, seed: int, activation: MakesModule = nn.ReLU) -> nn.Module:
    """A network of one output in evaluation mode: weights of variance 1/fan-in, a normal law cut at ±2σ, biases 0."""

    def made() -> nn.Module:
        """Drawn by torch, then drawn again."""
        model = LEARNERS[name](shape, activation)
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                deviation = module.weight[0].numel() ** -0.5 / SHRUNK
                nn.init.trunc_normal_(module.weight, std=deviation, a=-CUT * deviation, b=CUT * deviation)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        return model

    return initialized(made, seed=seed).eval()


def affordable(recipe: Recipe, name: str, options: Options) -> Recipe:
    """The recipe; for ResNet18 on a GPU in 16 bits, in which it is several times faster."""
    if name == "resnet18" and options.device != "cpu":
        return recipe.but(precision="bfloat16", channels_last=True)
    return recipe


def room(result: int, options: Options) -> int | None:
    """Bytes for computing a Gram of so many: on a GPU not all that is free, since trainings share it."""
    return None if options.device == "cpu" else result + WORK


def chosen(options: Options, default: Sequence[str]) -> tuple[str, ...]:
    """The networks that were asked for, all of them known."""
    names = options.learned.networks or tuple(default)
    for name in names:
        if name not in LEARNERS:
            raise InputError(f"--networks {name}; needed: some of {', '.join(LEARNERS)}.")
    return names


def small_digits() -> TrainTest:
    """The bundled digits [3, 8, 8], for --quick: three channels, as every network takes them."""

    def coloured(data: Labelled) -> Labelled:
        """The same in every channel."""
        assert isinstance(data.x, Tensor)
        return data.with_x(data.x.repeat(1, 3, 1, 1))

    known, asked = digits()
    return TrainTest(coloured(known), coloured(asked))


def read_set(name: str, options: Options) -> TrainTest:
    """All images of a set."""
    if options.quick:
        return small_digits()
    if name == "mnist":
        return mnist(options.folder("MNIST in its official IDX files"))
    if name == "cifar10":
        return cifar10(options.folder("CIFAR-10 in its binary version (cifar-10-batches-bin)"))
    raise InputError(f"--sets {name}; needed: mnist, cifar10.")


def some_images(name: str, options: Options, n: int, m: int) -> TrainTest:
    """n training and m test images, classes alike, each channel standardised by the training images."""
    known, asked = read_set(name, options)
    for what, data, count in (("samples", known, n), ("test", asked, m)):
        if count > len(data):
            raise InputError(f"--{what} {count}; needed: at most {len(data)}, as many as {data.name} has.")
    known, asked = known.select(balanced(known.y, n)), asked.select(balanced(asked.y, m))
    assert isinstance(known.x, Tensor)
    assert isinstance(asked.x, Tensor)
    x, z = standardised(known.x, asked.x)
    return TrainTest(known.with_x(x), asked.with_x(z))


def halves(data: Labelled) -> Labelled:
    """The same samples in two classes: the first half of the classes (1) against the others (0), as CIFAR2 is made."""
    first = data.y < len(data.classes) // 2
    return Labelled(data.x, first.long(), ("last", "first"), show=data.show, name=f"{data.name} in two")
