"""Sums over all channels: an inner product of two branches (DeepONet, two towers), or of Gaussian values with ones.

Σ_c b_c t_c of independent values, b Gaussian with mean zero, is Gaussian as the width n grows, of covariance n·B·T, and
b stands for the weights of a read-out: gradients through t are those through independent weights, those through b see
t. The tangent kernel is n·(Θ_B·T + B·Θ_T). n is the module's own width: a plain sum grows with it.
"""

from dataclasses import replace

from .core import RandomAffine
from .fields import Builder
from .values import Field, Random


def read_out(build: Builder, value: Random, axes: tuple[int, ...]) -> Field | None:
    """The sum over the channels, `axes` those of the field's shape that it is over; None if it has no such limit."""
    f = build.settled(value)
    if axes != (f.channel,) or not (f.node in build.memory.dotted or (f.gaussian and f.centered)):
        return None
    shape = (*f.shape[: f.channel], 1, *f.shape[f.channel + 1 :])  # an only channel stays: it is the output
    total = build.apply(RandomAffine(float(f.width)), f, shape=shape)
    return replace(total, gaussian=True, centered=True)
