"""Reference networks, small enough to read and common enough to compare with the literature, and how to train them."""

from .augment import flip_crop
from .conv import ResNet, conv_stack, forensics_cnn, lenet5, myrtle, resnet18, resnet34, small_cnn
from .dense import Scale, TwoLayer, mlp, two_layer
from .evaluate import accuracy, outputs
from .mobile import MobileNetV2, mobilenet_v2
from .recipe import Recipe
from .seeds import initialized, seeded
from .train import Training, fit

__all__ = [
    "MobileNetV2",
    "Recipe",
    "ResNet",
    "Scale",
    "Training",
    "TwoLayer",
    "accuracy",
    "conv_stack",
    "fit",
    "flip_crop",
    "forensics_cnn",
    "initialized",
    "lenet5",
    "mlp",
    "mobilenet_v2",
    "myrtle",
    "outputs",
    "resnet18",
    "resnet34",
    "seeded",
    "small_cnn",
    "two_layer",
]
