"""The dual of a continuous, piecewise linear function: ReLU6, Hardtanh, Hardsigmoid, Softshrink, clamp."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .dual import TWO_PI, Dual, Pair, attach, choose, recording, root

_NODES, _GRADE = 64, 3  # heuristic: 64 points, crowded like y³ to the end ρ, left 5e-11 at worst in E[φ'φ'] (Hardtanh)

_PAIRS = 8192


@dataclass(frozen=True)
class PiecewiseLinear(Dual):
    """φ with slopes[0] left of kinks[0], slopes[j] right of kinks[j − 1], and φ(kinks[0]) = start.

    φ'' is Σ κ_j δ(x − t_j), so by Price's theorem, applied twice, E[φφ] and E[φ'φ'] are what they are at c = 0 plus
    integrals over c of normal densities at the pairs of kinks (Plackett 1954). With c = √(pq) sin α and
    w = tan((π/2 − α)/2) these integrals have rational, bounded integrands up to ρ = ±1.
    Cost for a tile: `_NODES`·kinks² passes of exp.
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

    def __call__(self, x: Tensor) -> Tensor:
        total = self.start + self.slopes[0] * (x - self.kinks[0])
        for t, before, after in zip(self.kinks, self.slopes, self.slopes[1:], strict=False):
            total = total + (after - before) * (x - t).clamp(min=0.0)
        return total

    def _turns(self, p: Tensor) -> list[tuple[float, Tensor]]:
        """The change of slope at each kink, and the kink in standard deviations: at most 1e3."""
        sd = root(p)
        changes = [after - before for before, after in zip(self.slopes, self.slopes[1:], strict=False)]
        return [(k, t / sd.clamp(min=1e-3 * abs(t) or 1.0)) for k, t in zip(changes, self.kinks, strict=True)]

    def _rise(self, p: Tensor) -> Tensor:
        """E[φ'(u)]."""
        return self.slopes[0] + sum((k * _above(h) for k, h in self._turns(p)), torch.zeros_like(p))

    def mean(self, p: Tensor) -> Tensor:
        total, sd = torch.full_like(p, self.start - self.slopes[0] * self.kinks[0]), root(p)
        for (k, h), t in zip(self._turns(p), self.kinks, strict=True):
            total = total + k * (sd * torch.exp(-h * h / 2) / math.sqrt(TWO_PI) - t * _above(h))
        return total

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        shape = torch.broadcast_shapes(c.shape, p.shape, q.shape)
        if recording(c, p, q):
            value, second = self._pairs(c, p, q)
        else:  # in parts that stay in the cache
            flat = (each.expand(shape).reshape(-1).split(_PAIRS) for each in (c, p, q))
            parts = [self._pairs(*each) for each in zip(*flat, strict=True)]
            value, second = (torch.cat(each).reshape(shape) for each in zip(*parts, strict=True))
        return value, second if slope else None

    def _pairs(self, c: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        scale = root(p * q)  # not √p√q: exactly p for p = q
        live = scale > 0
        size, safe = c.abs().minimum(scale), torch.where(live, scale, 1.0)
        sign = choose(c < 0, -1.0, 1.0, c)
        end = root(safe * safe - size * size) / (safe + size)  # tan of half the angle between ρ and ±1
        end = torch.where(live & (size < scale), end, choose(live, 0.0, 1.0, scale))
        bend, slide = self._integrals(sign, end, p, q)
        if recording(c, p, q):
            slide = self._integrals(sign, end.detach(), p, q)[1]
        rise, rho = self._rise(p) * self._rise(q), sign * (size / safe).detach()
        second = rise + sign * bend
        return attach(self.mean(p) * self.mean(q) + scale * (rho * rise + slide), second, c, p, q), second

    def _integrals(self, sign: Tensor, end: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Σ κκ' ∫ exp(−Q/2)dα/2π, and the same with the weight |ρ| − sin α."""
        x, weights = np.polynomial.legendre.leggauss(_NODES)
        y, weights = (x + 1) / 2, weights / 2
        bend, slide, still = torch.zeros_like(end), torch.zeros_like(end), end * end
        near = [
            (k * m / math.pi, (h - sign * g) ** 2 / -8, sign * h * g / -2)
            for k, h in self._turns(p)
            for m, g in self._turns(q)
        ]
        for at, dy in zip(y**_GRADE, weights * _GRADE * y ** (_GRADE - 1), strict=True):
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
        return self.both(p, p, p, slope)


def _above(h: Tensor) -> Tensor:
    """P(z > h)."""
    return torch.special.erfc(h / math.sqrt(2)) / 2
