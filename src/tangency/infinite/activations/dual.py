"""What a dual is: an activation φ and its Gaussian moments; and the duals of functions with a kink or a jump at 0.

They share an arc: for (u, v) ~ N(0, [[p, c], [c, q]]) with cos θ = c/√(pq), the probability of equal signs is 1 − θ/π
(Cho and Saul 2009, "Kernel methods for deep learning").
"""

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..._base.types import Spec

Pair = tuple[Tensor, Tensor | None]
HALF_PI, TWO_PI = math.pi / 2, 2 * math.pi


class Dual(ABC):
    """An elementwise function φ and its Gaussian moments.

    ```python
    value, slope = Relu().both(c, p, q)   # E[φ(u)φ(v)], E[φ'(u)φ'(v)]
    ```
    """

    exact: ClassVar[bool] = False  # both() gives own() for equal inputs, to the last bit
    homogeneous: ClassVar[bool] = False  # φ(λx) = λφ(x) for λ > 0

    @abstractmethod
    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """E[φ(u)φ(v)] and E[φ'(u)φ'(v)] (None without `slope`); p and q broadcast against c.

        At zero variance u is 0, and at a kink the slope there is the mean of both sides.
        """

    @abstractmethod
    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """E[φ(u)²] and E[φ'(u)²] for u ~ N(0, p): `both` at c = p = q, without a rounded angle."""

    @abstractmethod
    def mean(self, p: Tensor) -> Tensor:
        """E[φ(u)] for u ~ N(0, p)."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """φ itself, elementwise."""

    def module(self) -> nn.Module:
        """A finite module that applies φ."""
        return Pointwise(self)

    def normalizer(self) -> float:
        """c with E[φ(z)²] = 1/c for z ~ N(0, 1)."""
        return 1.0 / float(self.own(torch.ones((), dtype=torch.float64), slope=False)[0])

    def centered(self) -> bool:
        """Whether E φ(u) = 0 (an odd function)."""
        return _centered(self)

    def how(self) -> str:
        """By what its moments are computed, in a word or two."""
        return "closed form"

    def spec(self) -> Spec:
        """Name and fields, for JSON."""
        return {"name": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]

    def gap(self, g: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """From g = (p + q)/2 − c: the new gap, E[φφ] and E[φ'φ'] without cancellation; None where not known."""
        return None


@lru_cache(maxsize=256)
def _centered(dual: Dual) -> bool:
    return float(dual.mean(torch.ones((), dtype=torch.float64)).abs()) < 1e-12


class Pointwise(nn.Module):
    """The module of a dual for which torch has none."""

    def __init__(self, dual: Dual) -> None:
        super().__init__()
        self.dual = dual

    def forward(self, x: Tensor) -> Tensor:
        """φ(x)."""
        return self.dual(x)

    def extra_repr(self) -> str:
        """The dual."""
        return repr(self.dual)


def root(x: Tensor) -> Tensor:
    """√max(x, 0) with gradient 0 instead of ∞ where x ≤ 0."""
    # Two `where`s: the gradient of the branch not taken is 0·∞ = NaN unless its argument is made harmless.
    live = x > 0
    return torch.where(live, torch.where(live, x, 1.0).sqrt(), 0.0)


def recording(*tensors: Tensor) -> bool:
    """Whether autograd follows an operation on these."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def attach(value: Tensor, slope: Tensor, c: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Give a value that was computed with ρ held constant its gradient through ρ: √(pq)·E[φ'φ'], by Price's theorem.

    Through the angle, autograd would multiply 0 by ∞ at ρ = ±1. Right to first order only.
    """
    if not recording(c, p, q):
        return value
    # Value unchanged, gradient added: each difference is zero, and has the gradient that is wanted.
    still = slope.detach()
    value = value + still * (c - c.detach())
    for variance in (p, q):
        live = torch.where(variance > 0, variance, 1.0).detach()
        value = value - still * c.detach() * (variance - variance.detach()) / (2 * live)
    return value


def where_number(mask: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """torch.where of two numbers, in the precision of `like` (torch itself would round them to float32)."""
    return torch.where(mask, torch.full_like(like, yes), torch.full_like(like, no))


def determinant(c: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """max(pq − c², 0). Two rounded products, never a fused one: exactly 0 for c = p = q."""
    return (p * q - c * c).clamp(min=0.0)


def dead_pairs(p: Tensor, q: Tensor) -> Tensor | None:
    """Where a variance is 0; None when nowhere. On a GPU the mask is always made: asking would wait for the device."""
    # A tile without dead pairs, as most are, is spared a mask and two passes over it.
    if not p.is_cuda and p.numel() and q.numel() and float(p.detach().amin()) > 0 and float(q.detach().amin()) > 0:
        return None
    return (p <= 0) | (q <= 0)


def at_rest(a: float, f: float) -> float:
    """a − fπ/2, what is a square, without a rounding below 0: the slopes at zero variance."""
    return max(0.0, a - f * HALF_PI)


def _arc_values(c: Tensor, p: Tensor, q: Tensor, dead: Tensor | None, a: float, f: float) -> tuple[Tensor, Tensor]:
    """f s + (a − fθ)c and a − fθ, in place on temporaries. s = √(pq − c²), θ = atan2(s, c).

    atan2 and not acos: it needs no division by √(pq), is accurate at both ends, and took 0.78 of the time.
    """
    # In place on what was just made: a tile is read from memory as few times as possible.
    square = c * c
    s = torch.sub(p * q, square, out=square).clamp_(min=0.0).sqrt_()
    theta = torch.atan2(s, c)
    slope = torch.rsub(theta, a, alpha=f)
    value = s.mul_(f).addcmul_(slope, c)
    if dead is not None:
        slope.masked_fill_(dead, at_rest(a, f))
        value.masked_fill_(dead, 0.0)
    return value, slope


class _Arc(torch.autograd.Function):
    """The arc-cosine pair of order 1 and 0, its gradient by formula: autograd's own would cancel near ρ = 1."""

    @staticmethod
    def forward(c: Tensor, p: Tensor, q: Tensor, dead: Tensor | None, a: float, f: float) -> tuple[Tensor, Tensor]:
        """The two values."""
        return _arc_values(c, p, q, dead, a, f)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the inputs for `backward`."""
        c, p, q, dead, ctx.a, ctx.f = inputs
        ctx.save_for_backward(c, p, q, dead)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """By ∂value/∂c = slope and ∂slope/∂c = f/s; both vanish where s does."""
        (c, p, q, dead), (by_value, by_slope), f = ctx.saved_tensors, grads, ctx.f
        s = root(p * q - c * c)
        live = s > 0 if dead is None else (s > 0) & ~dead
        # At s = 0 the slope of the angle is infinite; gradients there are taken as 0.
        over = torch.where(live, 0.5 * f / torch.where(live, s, 1.0), 0.0)  # f / 2s
        # By the function itself, so that second derivatives follow.
        slope = _Arc.apply(c, p, q, dead, ctx.a, f)[1]
        common = (by_value * (0.5 * f) * s - by_slope * over * c) * live
        p, q = torch.where(live, p, 1.0), torch.where(live, q, 1.0)
        return by_value * slope + 2 * by_slope * over, common / p, common / q, None, None, None


def arc(c: Tensor, p: Tensor, q: Tensor, a: float, f: float) -> tuple[Tensor, Tensor]:
    """f√(pq − c²) + (a − fθ)c and a − fθ, where cos θ = c/√(pq); θ = π/2 at zero variance."""
    dead = dead_pairs(p, q)
    if not (_covers(c, p) and _covers(c, q)):
        c = c.expand(torch.broadcast_shapes(c.shape, p.shape, q.shape))
    if recording(c, p, q):
        return _Arc.apply(c, p.expand_as(c), q.expand_as(c), dead, a, f)
    return _arc_values(c, p, q, dead, a, f)


def _covers(c: Tensor, p: Tensor) -> bool:
    """Whether p broadcasts to c's own shape (torch.broadcast_shapes takes as long as a small tile)."""
    return p.dim() <= c.dim() and all(a in (1, b) for a, b in zip(reversed(p.shape), reversed(c.shape), strict=False))


def _sine_gap(theta: Tensor) -> Tensor:
    """sin θ − θ cos θ, by its series for θ < 1: Σ (−1)^(k+1) 2k θ^(2k+1)/(2k+1)!."""
    # sin θ − θ cos θ ~ θ³/3 cancels for small angles; nine terms are exact to rounding below 1.
    small = theta < 1.0
    x = torch.where(small, theta, 1.0)
    square, total = x * x, torch.zeros_like(x)
    for k in range(9, 0, -1):
        total = total * square + (-1) ** (k + 1) * 2 * k / math.factorial(2 * k + 1)
    return torch.where(small, total * square * x, theta.sin() - theta * theta.cos())


class Rectifier(Dual):
    """φ = negative·min(x, 0) + positive·max(x, 0): the positively homogeneous functions of degree one."""

    exact: ClassVar[bool] = True
    homogeneous: ClassVar[bool] = True

    @property
    @abstractmethod
    def sides(self) -> tuple[float, float]:
        """The slopes left and right of 0."""

    @property
    def constants(self) -> tuple[float, float]:
        """(n² + m²)/2 and (m − n)²/2π for slopes n and m: value and slope are those of `arc`."""
        negative, positive = self.sides
        return (negative**2 + positive**2) / 2, (positive - negative) ** 2 / TWO_PI

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """By the arc: a = (n² + m²)/2, f = (m − n)²/2π for slopes n and m."""
        value, second = arc(c, p, q, *self.constants)
        return value, second if slope else None

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """a·p, and a: the angle is 0."""
        a, f = self.constants
        return a * p.clamp(min=0.0), where_number(p > 0, a, at_rest(a, f), p) if slope else None

    def mean(self, p: Tensor) -> Tensor:
        """(m − n)√(p/2π)."""
        negative, positive = self.sides
        return (positive - negative) / math.sqrt(TWO_PI) * root(p)

    def __call__(self, x: Tensor) -> Tensor:
        negative, positive = self.sides
        # At 0 the slope is the left one, as torch's relu and leaky_relu have it; of two clamps it would be the sum.
        return torch.where(x > 0, positive * x, negative * x) if negative else positive * torch.relu(x)

    def gap(self, g: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 1 − cos θ, which the gap gives without cancellation."""
        a, f = self.constants
        scale, total = root(p * q), root(p) + root(q)
        # As (p − q)/(√p + √q): roots of nearly equal numbers would cancel.
        apart = (p - q) ** 2 / torch.where(total > 0, total, 1.0) ** 2  # (√p − √q)²
        live = scale > 0
        # 1 − cos θ, from the gap less what is due to different norms.
        versine = torch.where(live, (g - apart / 2) / torch.where(live, scale, 1.0), 1.0).clamp(0.0, 2.0)
        theta = 2 * root(versine / 2).asin()
        bend = _sine_gap(theta)
        value = scale * (a * (1 - versine) + f * bend)
        return a * apart / 2 + scale * (a * versine - f * bend), value, a - f * theta


@dataclass(frozen=True)
class ABRelu(Rectifier):
    """negative·min(x, 0) + positive·max(x, 0)."""

    negative: float
    positive: float

    @property
    def sides(self) -> tuple[float, float]:
        """As given."""
        return self.negative, self.positive


@dataclass(frozen=True)
class Relu(Rectifier):
    """max(x, 0): the arc-cosine kernel of order 1 (Cho and Saul 2009)."""

    @property
    def sides(self) -> tuple[float, float]:
        """0 and 1."""
        return 0.0, 1.0

    def module(self) -> nn.Module:
        """torch's own."""
        return nn.ReLU()


@dataclass(frozen=True)
class LeakyRelu(Rectifier):
    """max(x, 0) + negative_slope·min(x, 0)."""

    negative_slope: float = 0.01

    @property
    def sides(self) -> tuple[float, float]:
        """The negative slope, and 1."""
        return self.negative_slope, 1.0

    def module(self) -> nn.Module:
        """torch's own."""
        return nn.LeakyReLU(self.negative_slope)


@dataclass(frozen=True)
class Abs(Rectifier):
    """|x|."""

    @property
    def sides(self) -> tuple[float, float]:
        """−1 and 1."""
        return -1.0, 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x.abs()


class Jump(Dual):
    """A function with one value left of 0, one at 0 and one right of it; its slope is 0 almost everywhere."""

    exact: ClassVar[bool] = True

    @property
    @abstractmethod
    def levels(self) -> tuple[float, float, float]:
        """The values left of 0, at 0, right of 0."""

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """By the probability of equal signs, and 0."""
        left, _, right = self.levels
        value = arc(c, p, q, (left**2 + right**2) / 2, (right - left) ** 2 / TWO_PI)[1]
        dead = dead_pairs(p, q)
        if dead is not None:  # u is 0 and v alone varies; both 0: the square of the middle level
            value = torch.where(dead, self.mean(p) * self.mean(q), value)
        return value, torch.zeros_like(value) if slope else None

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """The mean square of the levels, and 0."""
        left, middle, right = self.levels
        value = where_number(p > 0, (left**2 + right**2) / 2, middle**2, p)
        return value, torch.zeros_like(p) if slope else None

    def mean(self, p: Tensor) -> Tensor:
        """The mean of the levels."""
        left, middle, right = self.levels
        return where_number(p > 0, (left + right) / 2, middle, p)

    def __call__(self, x: Tensor) -> Tensor:
        left, middle, right = self.levels
        return torch.where(x > 0, torch.full_like(x, right), where_number(x < 0, left, middle, x))


@dataclass(frozen=True)
class Sign(Jump):
    """−1, 0 or 1."""

    @property
    def levels(self) -> tuple[float, float, float]:
        """−1, 0, 1."""
        return -1.0, 0.0, 1.0


@dataclass(frozen=True)
class Step(Jump):
    """1 where x > 0, else 0: the arc-cosine kernel of order 0."""

    @property
    def levels(self) -> tuple[float, float, float]:
        """0, 0, 1."""
        return 0.0, 0.0, 1.0
