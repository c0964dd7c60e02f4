"""Gaussian duals of activations: E[φ(u)φ(v)] and E[φ'(u)φ'(v)] in closed form for (u, v) ~ N(0, [[p, c], [c, q]]).

All are differentiable in c, p and q, with finite gradients also at ρ = ±1 and at zero variance. By Price's theorem
∂E[φ(u)φ(v)]/∂c = E[φ'(u)φ'(v)], so the second value is the derivative of the first. Sources: Cho and Saul 2009 (arc
cosines), Williams 1997 (erf), Daniely et al. 2016 (duals, Hermite), Tsuchida et al. 2020 (GELU), Han et al. 2022
(survey of closed forms).
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .dual import (
    HALF_PI,
    TWO_PI,
    ABRelu,
    Abs,
    Dual,
    Jump,
    LeakyRelu,
    Pair,
    Rectifier,
    Relu,
    Sign,
    Step,
    arc,
    dead_pairs,
    determinant,
    root,
    where_number,
)

__all__ = [
    "ABRelu",
    "Abs",
    "Cos",
    "Dual",
    "Erf",
    "Exp",
    "Gabor",
    "Gaussian",
    "Gelu",
    "Hermite",
    "Identity",
    "Jump",
    "LeakyRelu",
    "Monomial",
    "Polynomial",
    "Powers",
    "Rbf",
    "RectifiedMonomial",
    "Rectifier",
    "Relu",
    "SigmoidLike",
    "Sign",
    "Sin",
    "Step",
    "Wave",
]  # fmt: skip


@dataclass(frozen=True)
class Identity(Dual):
    """x."""

    exact: ClassVar[bool] = True
    homogeneous: ClassVar[bool] = True

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """c and 1."""
        return c, torch.ones_like(c) if slope else None

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """p and 1."""
        return p, torch.ones_like(p) if slope else None

    def mean(self, p: Tensor) -> Tensor:
        """0."""
        return torch.zeros_like(p)

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def module(self) -> nn.Module:
        """torch's own."""
        return nn.Identity()

    def gap(self, g: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same gap."""
        return g, (p + q) / 2 - g, torch.ones_like(g)


@dataclass(frozen=True)
class Erf(Dual):
    """a·erf(bx) + c (Williams 1997)."""

    a: float = 1.0
    b: float = 1.0
    c: float = 0.0

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """By the arc sine of the scaled correlation (Williams 1997)."""
        # erf(bx) of variance p is erf(x/√2) of variance 2b²p; the determinant below is exactly 0 for equal inputs.
        c, p, q = 2 * self.b**2 * c, 2 * self.b**2 * p, 2 * self.b**2 * q
        s = (1 + (p + q) + determinant(c, p, q)).sqrt()
        value = self.a**2 * 2 / math.pi * torch.atan2(c, s) + self.c**2
        return value, 4 / math.pi * (self.a * self.b) ** 2 / s if slope else None

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """`both` at c = p = q, where the determinant is exactly 0."""
        return self.both(p, p, p, slope)

    def mean(self, p: Tensor) -> Tensor:
        """c: erf is odd."""
        return torch.full_like(p, self.c)

    def __call__(self, x: Tensor) -> Tensor:
        return self.a * torch.erf(self.b * x) + self.c


def SigmoidLike() -> Erf:  # noqa: N802
    """½ erf(x/2.402…) + ½, the erf nearest to the sigmoid on [−5, 5]; the constant is neural-tangents'."""
    return Erf(0.5, 1 / 2.4020563531719796, 0.5)


@dataclass(frozen=True)
class RectifiedMonomial(Dual):
    """x^degree where x ≥ 0, else 0: the arc-cosine kernel of this order, by a recurrence.

    E₀ = ½ − θ/2π, E₁ = s/2π + cE₀, Eₙ₊₁ = (2n + 1)cEₙ + n²(pq − c²)Eₙ₋₁, from the differential equation that the
    generating function (π − θ)/sin θ fulfils in cos θ; no division, so right also at ρ = ±1. The slope is n²Eₙ₋₁.
    """

    degree: int

    def __post_init__(self) -> None:
        _check_whole(self)

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """By the recurrence above."""
        now, before = arc(c, p, q, 0.5, 1 / TWO_PI)
        if self.degree == 0:
            dead = dead_pairs(p, q)
            # arc's convention θ = π/2 at zero variance is not that of a step, which is 1 at 0.
            before = before if dead is None else torch.where(dead, self.mean(p) * self.mean(q), before)
            return before, torch.zeros_like(before) if slope else None
        square = determinant(c, p, q)
        for n in range(1, self.degree):
            now, before = (2 * n + 1) * c * now + n**2 * square * before, now
        return now, self.degree**2 * before if slope else None

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """`both` at c = p = q, where θ is exactly 0."""
        return self.both(p, p, p, slope)

    def mean(self, p: Tensor) -> Tensor:
        """Half of E|u|^degree."""
        if self.degree == 0:
            return where_number(p > 0, 0.5, 1.0, p)
        return (
            2 ** (self.degree / 2 - 1) * math.gamma((self.degree + 1) / 2) / math.sqrt(math.pi) * root(p) ** self.degree
        )

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(x >= 0, torch.relu(x) ** self.degree, 0.0)  # clamp's slope at 0 would be 1, torch's is 0


def _check_whole(dual: "RectifiedMonomial | Monomial | Hermite") -> None:
    if dual.degree != int(dual.degree) or dual.degree < 0:
        raise ValueError(f"{type(dual).__name__}: the degree must be a whole number ≥ 0, not {dual.degree}")


class Powers(Dual):
    """φ = Σ xʲ·terms[j]: E[φφ] = Σ_l R_l(p)R_l(q)cˡ, R_l(p) = Σ_i terms[2i + l](2i + l)!/(2ⁱ i! √l!)·pⁱ."""

    @property
    @abstractmethod
    def terms(self) -> tuple[float, ...]:
        """The coefficients, that of 1 first."""

    def _factor(self, order: int, p: Tensor) -> Tensor:
        total = torch.zeros_like(p)
        # Horner's rule in p, from the highest power down.
        for i in range((len(self.terms) - 1 - order) // 2, -1, -1):
            j = 2 * i + order
            ratio = math.factorial(j) / (2**i * math.factorial(i) * math.sqrt(math.factorial(order)))
            total = total * p + self.terms[j] * ratio
        return total

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """By Horner's rule in c."""
        value = second = torch.zeros_like(c)
        for order in range(len(self.terms) - 1, -1, -1):
            # The factors depend on p and on q alone: [n, 1] and [1, m], so this is cheap beside the powers of c.
            product = self._factor(order, p) * self._factor(order, q)
            if slope and order:
                second = second * c + order * product
            value = value * c + product
        return value, second if slope else None

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """`both` at c = p = q."""
        return self.both(p, p, p, slope)

    def mean(self, p: Tensor) -> Tensor:
        """R_0(p)."""
        return self._factor(0, p) if self.terms else torch.zeros_like(p)

    def __call__(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for term in reversed(self.terms):
            total = total * x + term
        return total


@dataclass(frozen=True)
class Polynomial(Powers):
    """Σ coefficients[j] xʲ."""

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", tuple(float(value) for value in self.coefficients))

    @property
    def terms(self) -> tuple[float, ...]:
        """As given."""
        return self.coefficients


@dataclass(frozen=True)
class Monomial(Powers):
    """x^degree."""

    degree: int

    def __post_init__(self) -> None:
        _check_whole(self)

    @property
    def terms(self) -> tuple[float, ...]:
        """1 at the degree."""
        return (0.0,) * self.degree + (1.0,)


@dataclass(frozen=True)
class Hermite(Powers):
    """The probabilists' Hermite polynomial over √(degree!): E[φφ] = c^degree at p = q = 1; right for any variance."""

    degree: int

    def __post_init__(self) -> None:
        _check_whole(self)

    @property
    def terms(self) -> tuple[float, ...]:
        """The coefficients of the normalised polynomial."""
        n, coefficients = self.degree, [0.0] * (self.degree + 1)
        for i in range(n // 2 + 1):
            ratio = math.factorial(n) // (math.factorial(i) * math.factorial(n - 2 * i) * 2**i)
            coefficients[n - 2 * i] = (-1) ** i * ratio / math.sqrt(math.factorial(n))
        return tuple(coefficients)


@dataclass(frozen=True)
class Gelu(Dual):
    """xΦ(x), the exact form (Tsuchida, Pearce et al. 2020). With d = √((1 + p)(1 + q) − c²), the slope is ∂/∂c."""

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """In closed form: ¼ + arctan(c/d)/2π and rational terms."""
        a, b = 1 / (1 + p), 1 / (1 + q)
        # (1 + p)(1 + q) − c², in an order in which pq − c² is exactly 0 for equal inputs.
        square = determinant(c, p, q).add(1 + p).add_(q)  # sums in place where autograd keeps no operand
        d = square.sqrt()
        over, quarter = c / (TWO_PI * d), torch.atan2(c, d).mul(1 / TWO_PI).add_(0.25)
        value = quarter * c
        value += (over * c * a).mul(b).addcmul_(d * (p * a / TWO_PI), q * b)
        if not slope:
            return value, None
        return value, (1 / square).add_(a).add_(b).mul(over).add_(quarter)

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """`both` at c = p = q."""
        return self.both(p, p, p, slope)

    def mean(self, p: Tensor) -> Tensor:
        """p/√(2π(1 + p))."""
        return p / (TWO_PI * (1 + p)).sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x)

    def module(self) -> nn.Module:
        """torch's own."""
        return nn.GELU()


class Wave(Dual):
    """scale·sin(frequency·x + phase)."""

    @property
    @abstractmethod
    def wave(self) -> tuple[float, float, float]:
        """scale, frequency, phase."""

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """By E exp(ib(u ± v)), which is exp(−b²(p + q ± 2c)/2)."""
        scale, b, phase = self.wave
        # sin(u)sin(v) = (cos(u − v) − cos(u + v))/2.
        half, middle = scale**2 / 2, (p + q) / 2
        apart = (b**2 * (c - middle)).exp()
        along = math.cos(2 * phase) * (-(b**2) * (c + middle)).exp()
        return half * (apart - along), half * b**2 * (apart + along) if slope else None

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """With expm1, so that small variances keep their digits."""
        scale, b, phase = self.wave
        half, along = scale**2 / 2, math.cos(2 * phase) * torch.expm1(-2 * b**2 * p)
        value = half * (2 * math.sin(phase) ** 2 - along)
        return value, half * b**2 * (2 * math.cos(phase) ** 2 + along) if slope else None

    def mean(self, p: Tensor) -> Tensor:
        """scale·sin(phase)·exp(−b²p/2)."""
        scale, b, phase = self.wave
        return scale * math.sin(phase) * (-(b**2) / 2 * p).exp()

    def __call__(self, x: Tensor) -> Tensor:
        scale, b, phase = self.wave
        return scale * torch.sin(b * x + phase)


@dataclass(frozen=True)
class Sin(Wave):
    """a·sin(bx + c)."""

    a: float = 1.0
    b: float = 1.0
    c: float = 0.0

    @property
    def wave(self) -> tuple[float, float, float]:
        """As given."""
        return self.a, self.b, self.c


@dataclass(frozen=True)
class Cos(Wave):
    """a·cos(bx + c)."""

    a: float = 1.0
    b: float = 1.0
    c: float = 0.0

    @property
    def wave(self) -> tuple[float, float, float]:
        """A quarter of a turn ahead of the sine."""
        return self.a, self.b, self.c + HALF_PI


@dataclass(frozen=True)
class Rbf(Wave):
    """√2·sin(√(2γ)x + π/4): E[φφ] = exp(−γ(p + q − 2c)), the squared exponential kernel."""

    gamma: float = 1.0

    @property
    def wave(self) -> tuple[float, float, float]:
        """√2, √(2γ), π/4."""
        return math.sqrt(2), math.sqrt(2 * self.gamma), math.pi / 4

    def gap(self, g: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """1 − exp(−2γg), with expm1."""
        value = (-2 * self.gamma * g).exp()
        return -torch.expm1(-2 * self.gamma * g), value, 2 * self.gamma * value


@dataclass(frozen=True)
class Exp(Dual):
    """a·exp(bx)."""

    a: float = 1.0
    b: float = 1.0

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """a² exp(b²(p + q + 2c)/2), and b² times that."""
        value = self.a**2 * (self.b**2 * ((p + q) / 2 + c)).exp()
        return value, self.b**2 * value if slope else None

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """`both` at c = p = q."""
        return self.both(p, p, p, slope)

    def mean(self, p: Tensor) -> Tensor:
        """a·exp(b²p/2)."""
        return self.a * (self.b**2 / 2 * p).exp()

    def __call__(self, x: Tensor) -> Tensor:
        return self.a * torch.exp(self.b * x)


@dataclass(frozen=True)
class Gaussian(Dual):
    """a·exp(bx²), b ≤ 0."""

    a: float = 1.0
    b: float = -1.0

    def __post_init__(self) -> None:
        if self.b > 0:
            raise ValueError(
                f"Gaussian: b must be ≤ 0, not {self.b}: E[φ²] is infinite for variances from {0.25 / self.b}"
            )

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """By the determinant of I − 2bΣ."""
        square = 1 - 2 * self.b * (p + q) + 4 * self.b**2 * determinant(c, p, q)
        value = self.a**2 / square.sqrt()
        return value, 4 * self.b**2 * c * value / square if slope else None

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """`both` at c = p = q."""
        return self.both(p, p, p, slope)

    def mean(self, p: Tensor) -> Tensor:
        """a/√(1 − 2bp)."""
        return self.a / (1 - 2 * self.b * p).sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        return self.a * torch.exp(self.b * x * x)


@dataclass(frozen=True)
class Gabor(Dual):
    """exp(−x²)·sin x."""

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """As for sines, under the density that exp(−u² − v²) narrows."""
        four = 4 * determinant(c, p, q)
        # Under exp(−u² − v²) the pair has the covariance (Σ⁻¹ + 2I)⁻¹ and the weight 1/√below.
        top, below = p + q + four, 1 + 2 * (p + q) + four
        minus, plus = (top - 2 * c) / below, (top + 2 * c) / below
        apart, along = (-minus / 2).exp(), (-plus / 2).exp()
        value = (apart - along) / (2 * below.sqrt())
        if not slope:
            return value, None
        return value, (apart * (0.5 + 4 * c - 2 * c * minus) + along * (0.5 - 4 * c + 2 * c * plus)) / below**1.5

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """`both` at c = p = q."""
        return self.both(p, p, p, slope)

    def mean(self, p: Tensor) -> Tensor:
        """0: it is odd."""
        return torch.zeros_like(p)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.exp(-x * x) * torch.sin(x)
