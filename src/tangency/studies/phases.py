"""Order and chaos: where the signals of a deep network go, by its limit alone.

Poole et al. 2016, "Exponential expressivity in deep neural networks through transient chaos"; Schoenholz et al. 2017,
"Deep information propagation". Networks are fully connected, f = W φ(… φ(W x + b) …) + b.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .._base import checks
from .._base.results import Result
from .._base.types import Float
from ..errors import InputError
from ..infinite.activations.dual import Dual
from ..infinite.activations.recognize import recognize

Activation = Dual | nn.Module | Callable[[Tensor], Tensor] | str
# Variances looked through for a fixed point: 1 multiplied or divided by this factor, step by step; what comes to none
# of them dies out or grows without end (heuristic; quadrature is costly for large variances).
FACTOR, LEAST, MOST = 1.5, 1e-30, 1e4
# χ₁ this near to 1 counts as critical: two evaluations of the same number differ less (heuristic).
CRITICAL = 1e-6


@dataclass(frozen=True, repr=False)
class Phase(Result):
    """Where a deep network's signals go: q* = σ_w² E[φ(√q* z)²] + σ_b², χ₁ = σ_w² E[φ'(√q* z)²], and c*.

    `q`: the variance that they reach (inf: they grow without end). `c`: the correlation of two inputs' signals (nan
    where q* is 0, or inf unless φ(λx) = λφ(x)). `chi`: χ₁, what a small difference is multiplied by in a layer; below 1
    is "ordered", above "chaotic". `depth`: ξ = −1/log χ_c*, layers in which correlations approach c* by a factor e (inf
    where they do so more slowly). `gradient_depth`: 1/|log χ₁|, those in which gradients shrink or grow by it.

    >>> import tangency as tg
    >>> tg.studies.phase("relu", w_var=1.0, b_var=0.5)
    Phase(w_var=1, b_var=0.5, q=1, c=1, chi=0.5, chi_c=0.5, phase='ordered')
    """

    w_var: float
    b_var: float
    q: float
    c: float
    chi: float
    chi_c: float
    phase: Literal["ordered", "critical", "chaotic"]

    @property
    def depth(self) -> float:
        """ξ = 1/|log χ_c*|."""
        return _depth_scale(self.chi_c)

    @property
    def gradient_depth(self) -> float:
        """1/|log χ₁|."""
        return _depth_scale(self.chi)


def _depth_scale(chi: float) -> float:
    """Layers in which what is multiplied by χ in each changes by a factor e."""
    if chi <= 0:
        return 0.0
    return math.inf if abs(chi - 1) < CRITICAL else 1 / abs(math.log(chi))


@dataclass(frozen=True)
class _Layers:
    """The maps of one layer at infinite width, for numbers."""

    dual: Dual
    w_var: float
    b_var: float

    def variance(self, q: float) -> float:
        """σ_w² E[φ(√q z)²] + σ_b²."""
        return self.w_var * float(self.dual.own(_number(q), slope=False)[0]) + self.b_var

    def chi(self, q: float) -> float:
        """σ_w² E[φ'(√q z)²]."""
        slope = self.dual.own(_number(q))[1]
        assert slope is not None
        return self.w_var * float(slope)

    def correlation(self, c: float, q: float) -> tuple[float, float]:
        """The next correlation of two signals of variance q with correlation c, and χ_c = σ_w² E[φ'(u)φ'(v)]."""
        value, slope = self.dual.both(_number(c * q), _number(q), _number(q))
        assert slope is not None
        return (self.w_var * float(value) + self.b_var) / self.variance(q), self.w_var * float(slope)


def _number(value: float) -> Tensor:
    return torch.full((1,), value, dtype=torch.float64)


def phase(activation: Activation, *, w_var: float, b_var: float = 0.0) -> Phase:
    """q*, c* and χ₁ = σ_w² E[φ'(√q* z)²] of deep networks: "ordered" (χ₁ < 1), "critical" or "chaotic" (χ₁ > 1).

    `activation`: one of `tangency.infinite` (`Erf()`, `Quadrature(torch.tanh)`), or torch's (`nn.Tanh()`, "relu"). q*
    is the fixed point that the variance comes to from 1. Cost: some hundred evaluations of the activation's moments.

    >>> from tangency.infinite import Erf
    >>> from tangency.studies import phase
    >>> deep = phase(Erf(), w_var=2.0, b_var=0.0)
    >>> deep.phase, round(deep.c, 3)
    ('chaotic', 0.0)
    """
    dual = find_dual(activation)
    layers = _Layers(dual, checks.nonnegative(w_var, "w_var"), checks.nonnegative(b_var, "b_var"))
    q = _fixed(layers.variance)
    chi = layers.chi(min(max(q, LEAST), MOST))  # at a kink, what counts is the limit from q > 0
    kind: Literal["ordered", "critical", "chaotic"] = "ordered" if chi < 1 else "chaotic"
    kind = "critical" if abs(chi - 1) < CRITICAL else kind
    c, chi_c = math.nan, chi if q == 0 else math.nan
    if 0 < q < math.inf or (q and layers.dual.homogeneous):
        c, chi_c = _meeting(layers, min(q, 1e12))  # so large that biases do not count
    return Phase(layers.w_var, layers.b_var, q, c, chi, chi_c, kind)


def _fixed(step: Callable[[float], float]) -> float:
    """The fixed point that lies next to 1 in the direction in which the map goes from there."""
    # The variance of normalised inputs is 1: the fixed point that they come to lies on the side to which it moves.
    up = step(1.0) >= 1.0
    factor = FACTOR if up else 1 / FACTOR
    near = far = 1.0
    while (step(far) >= far) == up:
        near, far = far, far * factor
        if far > MOST:
            return 1.0 if abs(step(1.0) - 1) < 1e-12 else math.inf  # every variance is fixed: ReLU at σ_w² = 2
        if far < LEAST:
            return 0.0
    low, high = min(near, far), max(near, far)
    return _bisect(lambda q: step(q) - q, low, high)


def _bisect(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f, positive (or 0) at `low` and negative at `high`, changes sign."""
    # Bisection: no derivative is at hand, and evaluations are cheap.
    while abs(high - low) > 1e-15 * max(1e-3, abs(high)):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if f(middle) >= 0 else (low, middle)
    return low


def _meeting(layers: _Layers, q: float) -> tuple[float, float]:
    """c* and χ_c*. The map of correlations is convex on [0, 1] and fixes 1, so there is at most one other one."""
    slope = layers.correlation(1.0, q)[1]
    steep = slope * q / layers.variance(q)  # its derivative at 1; χ₁ itself unless q still grows
    if steep <= 1 + CRITICAL:
        return 1.0, steep
    # Start below the other fixed point: at 1 − gap the map must lie under the diagonal.
    gap = 0.5
    while gap > 1e-12 and layers.correlation(1 - gap, q)[0] >= 1 - gap:
        gap /= 2
    c = _bisect(lambda c: layers.correlation(c, q)[0] - c, 0.0, 1 - gap)
    return c, layers.correlation(c, q)[1] * q / layers.variance(q)


def boundary(activation: Activation, b_vars: Sequence[float] | Tensor) -> Float[Tensor, " b"]:
    """σ_w²(σ_b²) where χ₁ = 1: between order (below) and chaos (above); nan where there is none.

    A fixed point q on it has σ_w² = 1/E[φ'(√q z)²] and σ_b² = q − σ_w² E[φ(√q z)²], so one pass over q finds all. The
    fixed point must be stable; of several, that with the smallest σ_w² counts.

    >>> from tangency.infinite import Erf, Relu
    >>> from tangency.studies import boundary
    >>> boundary(Relu(), [0.0, 1.0]).tolist()
    [2.0, 2.0]
    >>> float(boundary(Erf(), [0.0])[0])  # π/4
    0.785398...
    """
    dual = find_dual(activation)
    targets = [checks.nonnegative(float(b), "b_vars") for b in b_vars]
    # χ₁ does not depend on the variance then, so neither does the boundary on σ_b².
    if dual.homogeneous:
        return torch.full((len(targets),), 1 / _Layers(dual, 1.0, 0.0).chi(1.0), dtype=torch.float64)
    # From variances that are as good as 0 to those that quadrature still takes.
    q = torch.cat([torch.zeros(1), torch.logspace(-8, 4, 481)]).double()
    value, slope = dual.own(q)
    assert slope is not None
    edge = torch.where(slope > 0, q - value / torch.where(slope > 0, slope, 1.0), math.nan)
    return torch.tensor([_edge(dual, q, edge, target) for target in targets], dtype=torch.float64)


def _edge(dual: Dual, q: Tensor, edge: Tensor, target: float) -> float:
    """The smallest σ_w² of a stable critical point with this σ_b²; `edge` is the σ_b² of each q."""

    def bias(at: float) -> float:
        """The bias variance for which this variance is the fixed point at the edge."""
        plain = _Layers(dual, 1.0, 0.0)
        return at - plain.variance(at) / plain.chi(at)

    # Where σ_b²(q) rises through the target; whether the fixed point is stable is asked of each below.
    above = edge > target + 1e-15
    points = [LEAST] if target == 0 and float(edge[0]) == 0 else []  # φ(0) = 0: signals that die are a fixed point
    for k in (above[1:] & ~above[:-1] & ~edge[:-1].isnan()).nonzero().flatten().tolist():
        points.append(_bisect(lambda v: target - bias(v), float(q[k]), float(q[k + 1])))
    variances = [(1 / _Layers(dual, 1.0, 0.0).chi(at), at) for at in points]
    stable = [w for w, at in variances if _stable(_Layers(dual, w, target), at)]
    return min(stable) if stable else math.nan


def _stable(layers: _Layers, q: float) -> bool:
    """Whether variances a little off q come nearer."""
    # Some way off: at χ₁ = 1 the derivative itself may decide nothing.
    off = 1e-2 * q + 1e-3
    return layers.variance(q + off) - layers.variance(q) <= off * (1 + 1e-6)


def find_dual(activation: Activation) -> Dual:
    """The activation's dual; refuses what has none."""
    dual = recognize(activation) if isinstance(activation, (Dual, nn.Module, str)) or callable(activation) else None
    if dual is None:
        raise InputError(
            f"activation={activation!r}; needed: one of tangency.infinite, such as Erf(), Relu() or "
            "Quadrature(torch.tanh), or an activation of torch, such as nn.Tanh() or 'relu'."
        )
    return dual
