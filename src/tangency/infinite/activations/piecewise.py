"""The dual of a continuous, piecewise linear function (ReLU6, Hardtanh, clamp …); and of one that is straight far out.

Tanh, SiLU, ELU are straight lines but for a stretch around 0. At a large variance that stretch is a narrow one, where
neither an expansion nor a rule made for the normal density sees it. `split_lines` takes the lines away, whose moments
are known; the rest is integrated where it lives, on points that do not depend on the variance.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .dual import TWO_PI, Dual, Pair, attach, recording, root, where_number
from .rules import angle, composite_rule, derivative, nested

# Points, and how they crowd (like y³) to the end ρ. Measured for E[φ'φ'] of Hardtanh at worst: 3e-10 up to the variance
# 4 with the first, which leaves 2e-7 at 1e4; the second 2e-10 up to there.
_RULE, _WIDE_RULE, _USUAL = (64, 3), (96, 5), 4.0
_CACHED_PAIRS = 8192
# Values of the density at once: 1 MB.
_BATCH = 2**17
# Of the trapezoidal rule for a smooth rest.
_STEPS = (0.8, 0.6, 0.45, 0.35, 0.25, 0.18, 0.125)
# Standard deviations with a rule of their own; below, `nested` is as fast.
_NARROW = (2.0, 1.0, 0.5)
# What is not straight beyond is not split.
_FAR = 60.0


@dataclass(frozen=True)
class PiecewiseLinear(Dual):
    """φ with slopes[0] left of kinks[0], slopes[j] right of kinks[j − 1], and φ(kinks[0]) = start.

    φ'' is Σ κ_j δ(x − t_j), so by Price's theorem, applied twice, E[φφ] and E[φ'φ'] are what they are at c = 0 plus
    integrals over c of normal densities at the pairs of kinks (Plackett 1954). With c = √(pq) sin α and
    w = tan((π/2 − α)/2) these integrals have rational, bounded integrands up to ρ = ±1.
    Cost for a tile: 64·kinks² passes of exp, 96·kinks² with variances above 4.
    """

    kinks: tuple[float, ...]
    slopes: tuple[float, ...]
    start: float = 0.0

    def __post_init__(self) -> None:
        if not self.kinks or len(self.slopes) != len(self.kinks) + 1 or list(self.kinks) != sorted(set(self.kinks)):
            raise ValueError(
                f"PiecewiseLinear needs rising kinks and one slope more than kinks, not kinks {self.kinks} and slopes "
                f"{self.slopes}"
            )

    def how(self) -> str:
        """As `Dual.how`: integrals of bounded functions."""
        return "quadrature"

    def __call__(self, x: Tensor) -> Tensor:
        total = self.start + self.slopes[0] * (x - self.kinks[0])
        for t, before, after in zip(self.kinks, self.slopes, self.slopes[1:], strict=False):
            total = total + (after - before) * (x - t).clamp(min=0.0)
        return total

    def _turns(self, p: Tensor) -> list[tuple[float, Tensor]]:
        """The change of slope at each kink, and the kink in standard deviations: at most 1e3."""
        # Beyond 1e3 standard deviations a kink has no weight; the bound keeps squares from overflowing.
        sd = root(p)
        changes = [after - before for before, after in zip(self.slopes, self.slopes[1:], strict=False)]
        return [(k, t / sd.clamp(min=1e-3 * abs(t) or 1.0)) for k, t in zip(changes, self.kinks, strict=True)]

    def _rise(self, p: Tensor) -> Tensor:
        """E[φ'(u)]."""
        return self.slopes[0] + sum((k * _above(h) for k, h in self._turns(p)), torch.zeros_like(p))

    def mean(self, p: Tensor) -> Tensor:
        """E[φ(u)], by the normal density and distribution at the kinks."""
        total, sd = torch.full_like(p, self.start - self.slopes[0] * self.kinks[0]), root(p)
        for (k, h), t in zip(self._turns(p), self.kinks, strict=True):
            total = total + k * (sd * torch.exp(-h * h / 2) / math.sqrt(TWO_PI) - t * _above(h))
        return total

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """By the integrals over c above."""
        shape = torch.broadcast_shapes(c.shape, p.shape, q.shape)
        usual = all(bool((variance <= _USUAL).all()) for variance in (p, q))
        rule = _RULE if usual else _WIDE_RULE
        if recording(c, p, q):
            value, second = self._pairs(rule, c, p, q)
        else:  # in parts that stay in the cache
            flat = (v.expand(shape).reshape(-1).split(_CACHED_PAIRS) for v in (c, p, q))
            parts = [self._pairs(rule, *part) for part in zip(*flat, strict=True)]
            value, second = (torch.cat(part).reshape(shape) for part in zip(*parts, strict=True))
        return value, second if slope else None

    def _pairs(self, rule: tuple[int, int], c: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        scale = root(p * q)  # not √p√q: exactly p for p = q
        live = scale > 0
        size, safe = c.abs().minimum(scale), torch.where(live, scale, 1.0)
        # ρ < 0 is ρ > 0 for (u, −v): only the integrals' sign and the kinks of v change.
        sign = where_number(c < 0, -1.0, 1.0, c)
        end = root(safe * safe - size * size) / (safe + size)  # tan of half the angle between ρ and ±1
        end = torch.where(live & (size < scale), end, where_number(live, 0.0, 1.0, scale))
        bend, slide = self._integrals(rule, sign, end, p, q)
        if recording(c, p, q):
            slide = self._integrals(rule, sign, end.detach(), p, q)[1]
        rise, rho = self._rise(p) * self._rise(q), sign * (size / safe).detach()
        second = rise + sign * bend
        return attach(self.mean(p) * self.mean(q) + scale * (rho * rise + slide), second, c, p, q), second

    def _integrals(
        self, rule: tuple[int, int], sign: Tensor, end: Tensor, p: Tensor, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Σ κκ' ∫ exp(−Q/2)dα/2π, and the same with the weight |ρ| − sin α."""
        nodes, grade = rule
        # Graded: y^grade crowds points to the end where the integrand is steep.
        x, weights = np.polynomial.legendre.leggauss(nodes)
        y, weights = (x + 1) / 2, weights / 2
        bend, slide, still = torch.zeros_like(end), torch.zeros_like(end), end * end
        near = [
            (k * m / math.pi, (h - sign * g) ** 2 / -8, sign * h * g / -2)
            for k, h in self._turns(p)
            for m, g in self._turns(q)
        ]
        for at, dy in zip(y**grade, weights * grade * y ** (grade - 1), strict=True):
            w = end + (1 - end) * at
            square = w * w
            one = 1 + square
            ratio, density = one * one / square, torch.zeros_like(w)
            for k, a, b in near:  # clamped: exp of what underflows takes six times as long
                density = density + k * torch.exp((a * ratio + b * one).clamp(min=-200.0))
            density = density * ((1 - end) * dy) / one
            bend = bend + density
            slide = slide + density * (2 * (square - still) / (one * (1 + still)))
        return bend, slide

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """`both` at c = p = q: the integrals are then complete."""
        return self.both(p, p, p, slope)


def _above(h: Tensor) -> Tensor:
    """P(z > h)."""
    return torch.special.erfc(h / math.sqrt(2)) / 2


# Straight far out.


@dataclass(frozen=True, eq=False)
class FarLines:
    """f(x) = A + Bx + C·sign*(x) + D·|x|* + r(x); * is the mean over x + ξ, ξ ~ N(0, 1), and r ends at |x| ≈ 60.

    The moments of the lines are those of sign and |x| at variances larger by 1. `points` and `rest` (r times weights)
    are a rule for r alone. `form` [3, M] and `product` are one for r(u)r(v): u², uv, v² and r(u)r(v) times weights,
    without what is too small to count, and (−u, −v) with (u, v). Right where the standard deviation of u given v, and
    of v given u, is at least `narrowest`.
    """

    lines: tuple[float, float, float, float]
    points: Tensor
    rest: Tensor
    form: Tensor
    product: Tensor
    narrowest: float

    def moment(self, c: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """E[f(u)f(v)] for flat c, p, q. Cost: len(product) exponentials per pair, some thousand."""
        size = max(1, _BATCH // max(1, len(self.product)))
        parts = [self._part(*part) for part in zip(c.split(size), p.split(size), q.split(size), strict=True)]
        return torch.cat(parts) if parts else torch.zeros_like(c)

    def _part(self, c: Tensor, p: Tensor, q: Tensor) -> Tensor:
        # Lines with lines in closed form, rest with rest by the rule for two variables, lines with rest by one for one.
        total, det = self._straight(c, p, q), p * q - c * c
        power = torch.stack([q / -2, c, p / -2], -1) / (math.log(2) * det)[:, None] @ self.form.to(c)
        power = power.clamp(min=-120.0) if recording(c, p, q) else power.clamp_(min=-120.0)
        total = total + torch.exp2(power) @ self.product.to(c) / (TWO_PI * det.sqrt())  # exp takes twice as long
        x, rest = self.points.to(c), self.rest.to(c)
        for here, there in ((p, q), (q, p)):  # E[lines | rest at x]
            density = torch.exp(x * x / (-2 * here[:, None])) * rest
            mean = _lines(self.lines, (c / here)[:, None] * x, (there - c * c / here + 1.0)[:, None])
            total = total + (density * mean).sum(-1) / (TWO_PI * here).sqrt()
        return total

    def _straight(self, c: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """The moment of the lines. Even and odd ones are uncorrelated."""
        level, rise, jump, bend = self.lines
        p, q, g = p + 1.0, q + 1.0, math.sqrt(2 / math.pi)
        s = (p * q - c * c).sqrt()
        arc = torch.atan2(c, s)
        even = level**2 + level * bend * g * (p.sqrt() + q.sqrt()) + bend**2 * g * g * (s + c * arc)
        return even + rise**2 * c + rise * jump * g * c * (p.rsqrt() + q.rsqrt()) + jump**2 * g * g * arc


def _lines(lines: tuple[float, float, float, float], x: Tensor, noise: Tensor) -> Tensor:
    """A + Bx + C·E[sign(x + ξ)] + D·E|x + ξ|, ξ ~ N(0, noise)."""
    level, rise, jump, bend = lines
    double = 2 * noise
    sign = torch.special.erf(x / double.sqrt())
    size = x * sign + (double / math.pi).sqrt() * torch.exp(-x * x / double) if bend else 0.0
    return level + rise * x + jump * sign + bend * size


def split_lines(f: Callable[[Tensor], Tensor], kinks: tuple[float, ...], narrow: float) -> FarLines | None:
    """Lines and rest of f, which may have kinks (given), for standard deviations down to `narrow` or less.

    None if it is not straight beyond ±60.
    """
    # The lines are read off where everything else has died away, if it does.
    far = torch.tensor([100.0, 200.0, -100.0, -200.0], dtype=torch.float64)
    y = f(far)
    right, left = (y[1] - y[0]) / 100, (y[2] - y[3]) / 100
    above, below = y[0] - 100 * right, y[2] + 100 * left
    lines = tuple(float(v) / 2 for v in (above + below, right + left, above - below, right - left))
    level, rise, jump, bend = lines
    one = torch.ones((), dtype=torch.float64)

    def rest(x: Tensor) -> Tensor:
        """What is left of f without its lines: it falls off on both sides."""
        return f(x) - _lines((level, rise, jump, bend), x, one)

    x = torch.arange(3200, dtype=torch.float64) / 8
    size = torch.maximum(rest(x).abs(), rest(-x).abs())
    rounding = 2e-15 * (abs(level) + abs(jump) + (abs(rise) + abs(bend)) * x)
    live = x[~(size <= 1e-14 * size.max() + rounding)]
    reach = float(live[-1]) + 0.5 if len(live) else 1.0
    if reach > _FAR:
        return None
    points, weights, narrowest = _graded(kinks, reach, narrow) if kinks else _even(rest, reach, narrow)
    return _rule((level, rise, jump, bend), points, rest(points) * weights, narrowest)


def _rule(lines: tuple[float, float, float, float], x: Tensor, rest: Tensor, narrowest: float) -> FarLines:
    """The rule for one and for two variables from points that are symmetric about 0, without 0."""
    # (u, v) and (−u, −v) have the same density, so half of the points carry both products.
    mirror, right = rest.flip(0), x > 0
    product = rest[right, None] * rest + mirror[right, None] * mirror
    u, v = torch.broadcast_tensors(x[right, None], x)
    keep = product.abs() > 1e-12 * product.abs().max()
    form = torch.stack([(u * u)[keep], (u * v)[keep], (v * v)[keep]])
    live = rest.abs() > 1e-15 * rest.abs().max()
    return FarLines(lines, x[live], rest[live], form, product[keep], narrowest)


def _even(rest: Callable[[Tensor], Tensor], reach: float, narrow: float) -> tuple[Tensor, Tensor, float]:
    """Trapezoidal rule: the largest step that gives ∫r² to 1e-10."""

    def points(step: float) -> Tensor:
        """Points of the midpoint rule with this step."""
        half = math.ceil(reach / step)
        return (torch.arange(-half, half, dtype=torch.float64) + 0.5) * step

    finest = _STEPS[-1]
    # The trapezoidal rule converges exponentially for an analytic rest: the first step that agrees will do.
    energy = finest * rest(points(finest)).square().sum()
    near = [step for step in _STEPS if abs(step * rest(points(step)).square().sum() - energy) <= 1e-10 * energy]
    step = min(near[0] if near else finest, narrow / 2.5)
    return points(step), torch.full_like(points(step), step), 2.5 * step


def _graded(kinks: tuple[float, ...], reach: float, narrow: float) -> tuple[Tensor, Tensor, float]:
    """Pieces between kinks, of 1.5 standard deviations near 0 and growing outward."""
    breaks, narrowest = [0.0], min(narrow, 1.0)
    while breaks[-1] < reach:
        breaks.append(breaks[-1] + narrowest * max(1.5, 0.5 * (breaks[-1] - 3.0)))
    side = sorted({*breaks, *(abs(t) for t in kinks if abs(t) < breaks[-1])})
    mirrored = sorted({*side, *(-t for t in side)})
    return *composite_rule(torch.tensor(mirrored, dtype=torch.float64), 8), narrowest


@functools.lru_cache(maxsize=256)
def _splits(
    fn: Callable[[Tensor], Tensor], kinks: tuple[float, ...], narrow: float
) -> tuple[FarLines, FarLines] | None:
    """Of φ and φ'."""
    with torch.no_grad():
        value, slope = split_lines(fn, kinks, narrow), split_lines(functools.partial(derivative, fn), kinks, narrow)
    return None if value is None or slope is None else (value, slope)


def integrate_pairs(
    fn: Callable[[Tensor], Tensor], kinks: tuple[float, ...], nodes: int, slope: bool, c: Tensor, p: Tensor, q: Tensor
) -> Pair:
    """Flat pairs by quadrature, at any variance: `FarLines` where φ is straight far out, but `nested` near ρ = ±1."""
    # In float64, whatever the input: the rules are made for its precision.
    kind, c, p, q = c.dtype, c.double(), p.double(), q.double()
    with torch.no_grad():
        wide = torch.minimum(p, q) * angle(c, p, q).sin().square()  # the smaller conditional variance
    value, second, left = torch.zeros_like(c), torch.zeros_like(c), torch.ones_like(wide, dtype=torch.bool)
    for narrow in _NARROW:
        if not bool((left & (wide >= _NARROW[-1] ** 2)).any()) or (rules := _splits(fn, kinks, narrow)) is None:
            break
        at = (left & (wide >= max(rule.narrowest for rule in rules) ** 2)).nonzero().squeeze(-1)
        left[at] = False
        value = value.index_put((at,), rules[0].moment(c[at], p[at], q[at]))
        second = second.index_put((at,), rules[1].moment(c[at], p[at], q[at])) if slope else second
    at = left.nonzero().squeeze(-1)
    if len(at):
        rest = nested(fn, kinks, nodes, c[at], p[at], q[at], slope)
        value = value.index_put((at,), rest[0])
        second = second if rest[1] is None else second.index_put((at,), rest[1])
    return value.to(kind), second.to(kind) if slope else None
