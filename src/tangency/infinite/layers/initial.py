"""Which initialisation a weight tensor was drawn from, told by its statistics."""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from ..moments.core import Law

# A sample variance may lie this many of its standard errors from a named one to be taken for it.
SIGMAS = 4.0
# Weights from which on their kurtosis tells uniform from normal ones.
TELLING = 100


@dataclass(frozen=True)
class Detected:
    """The variance of an initialisation, its name ("measured" if it is none of those known), and its law.

    The law counts where few weights are added up: sums of many are Gaussian whatever it is.
    """

    variance: float
    label: str
    law: Law = "normal"


def candidates(tensor: Tensor, weight: Tensor | None) -> list[tuple[str, float, bool]]:
    """(name, variance, uniform?) of torch's initialisations for a tensor of this shape, or for such a weight's bias."""
    shaped = tensor if weight is None else weight
    fan_in, fan_out = fans(shaped)
    default = [
        ("torch's default", 1 / (3 * fan_in), True),
        ("torch's default of RNNs", 1 / (3 * shaped.shape[0]), True),
    ]
    if weight is not None:
        return default
    named = [("xavier_uniform_ of queries, keys and values", 2 / (fan_in + 3 * fan_out), True)]
    for kind, uniform in (("normal", False), ("uniform", True)):
        named += [
            (f"kaiming_{kind}_, fan_in", 2 / fan_in, uniform),
            (f"kaiming_{kind}_, fan_out", 2 / fan_out, uniform),
            (f"kaiming_{kind}_, linear", 1 / fan_in, uniform),
            (f"xavier_{kind}_", 2 / (fan_in + fan_out), uniform),
            (f"xavier_{kind}_, relu", 4 / (fan_in + fan_out), uniform),
        ]
    return [*default, *named, ("normal_(0, 1)", 1.0, False), ("normal_(0, 0.02)", 0.02**2, False)]


def fans(tensor: Tensor) -> tuple[int, int]:
    """Fan-in and fan-out as nn.init has them."""
    if tensor.dim() < 2:
        return max(1, tensor.numel()), max(1, tensor.numel())
    window = tensor[0, 0].numel()
    return tensor.shape[1] * window, tensor.shape[0] * window


def detect_init(tensor: Tensor, weight: Tensor | None = None) -> Detected:
    """The named initialisation that the tensor's statistics fit, else its mean square; `weight`: it is its bias.

    >>> layer = torch.nn.Linear(300, 400)
    >>> detect_init(layer.weight).label
    "torch's default"
    """
    with torch.no_grad():
        v = tensor.detach().double().flatten()
        square = float(v.square().mean())
        if square == 0:
            return Detected(0.0, "zeros")
        if len(v) > 1 and float(v.max() - v.min()) == 0:
            return Detected(square, f"constant {float(v[0]):g}", "other")
        largest, count = float(v.abs().max()), len(v)
        law = _law(v, square)
    best: tuple[float, Detected] | None = None
    for name, variance, uniform in candidates(tensor, weight):
        # Several named variances may lie close to the sample's: the nearest by its standard error is taken, unless one
        # earlier in the list, which is more usual, is about as near.
        spread = sqrt((0.8 if uniform else 2.0) / count)  # of the sample variance, relative: kurtosis − 1
        off = abs(square / variance - 1) / spread
        # A uniform variable has a largest value; a normal sample goes beyond it, unless it is small (heuristic: 20).
        bounded = largest <= sqrt(3 * variance) * (1 + 1e-6)
        shaped = bounded if uniform else not bounded or count < 20
        shaped = shaped and (count < TELLING or law == ("uniform" if uniform else "normal"))
        if shaped and off < SIGMAS and (best is None or off < best[0] - 1):
            best = (off, Detected(variance, name, "uniform" if uniform else "normal"))
    return best[1] if best else Detected(square, "measured", law)


def _law(v: Tensor, square: float) -> Law:
    """The law of weights by their kurtosis, 3 of normal ones and 1.8 of uniform ones, and their largest.

    A sample's own kurtosis spreads by √(24/n) about 3, and by 1.15/√n about 1.8 (simulated).
    """
    count = len(v)
    kurtosis, largest = float(v.pow(4).mean()) / square**2, float(v.abs().max()) / sqrt(3 * square)
    if abs(kurtosis - 1.8) < SIGMAS * 1.15 / sqrt(count) and largest < 1 + 2.5 / sqrt(count):
        return "uniform" if count >= TELLING or kurtosis < 2.4 else "normal"
    return "normal" if count < TELLING or abs(kurtosis - 3) < 5 * sqrt(24 / count) else "other"
