"""Reference networks, small enough to read and common enough to compare with the literature."""

from tangency.models.conv import ResNet, lenet5, resnet18
from tangency.models.dense import TwoLayer, mlp, two_layer

__all__ = ["ResNet", "TwoLayer", "lenet5", "mlp", "resnet18", "two_layer"]
