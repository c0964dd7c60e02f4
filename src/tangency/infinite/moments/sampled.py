"""Elementwise functions of several independent Gaussian fields: ReLU(ReLU(u) + z), as post-activation ResNets have.

Their expectation over pairs has no closed form; it is a mean over quasi-random points, always the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ..activations.dual import root
from .core import Here, Moments, Need, Op, Taken, drawn_with

# Numbers of one tensor [points, *pairs] at a time (heuristic: a few of them lie in the cache of a core).
NUMBERS = 1 << 17

Factors = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Sampled(Op):
    """g(u₁, …, u_r) of independent Gaussian u_j: cov' = E[g(u)g(v)], ntk' = Σ_j E[∂_j g(u) ∂_j g(v)]·ntk_j.

    u = √p(a e₁ + b e₂) and v = √q(a e₁ − b e₂) with a² = (1 + ρ)/2, b² = (1 − ρ)/2: exchanging the samples only turns
    the sign of e₂, and with every point its mirror image is taken.
    """

    fn: Callable[..., Tensor] = field(repr=False)
    label: str
    gains: tuple[float, ...]  # the rates of scales of each channel's own before it
    samples: int
    seed: int
    limit: ClassVar[str] = "channels → ∞: a function of several independent Gaussian values of one channel"
    own: ClassVar[Need] = Need.DIAGONAL

    def taken(self) -> Taken:
        """As `Op.taken`, with the functions' names."""
        return Taken(self.label, self.limit, drawn_with(self.samples))

    def alone(self) -> bool:
        """Yes: alone, ρ is exactly 1."""
        return True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        first = inputs[0]
        alone = here.pairs.same and not first.whole
        sides = []
        for k, s in enumerate(inputs):
            p, q = (s.cov, s.cov) if alone else here.pairs.spread(*here.own(k), len(s.grid), s.whole)
            sides.append(normal_factors(s.cov, p, q))
        # Half of the samples: each point is used with both signs of its second coordinates.
        shape, points = first.cov.shape, _normal_points(self.samples // 2, len(inputs), self.seed, first.cov)
        step = max(1, NUMBERS // max(1, first.cov.numel()))
        cov = torch.zeros_like(first.cov)
        slopes = [torch.zeros_like(first.cov) if s.ntk is not None else None for s in inputs]
        gained = torch.zeros_like(first.cov)
        # Slopes cost a backward pass for each chunk of points; they are taken only where something is trained below.
        slope = here.tangent and (any(self.gains) or any(d is not None for d in slopes))
        for start in range(0, len(points), step):
            part = points[start : start + step]
            for sign in (1.0, -1.0):
                left, right = _values(sides, part, sign, len(shape))
                value, changes, more = self._sums(left, right, slope)
                cov, gained = cov + value, gained + more
                slopes = [
                    None if d is None or change is None else d + change
                    for d, change in zip(slopes, changes, strict=True)
                ]
        count = 2 * len(points)
        ntks = [d * s.ntk / count for d, s in zip(slopes, inputs, strict=True) if d is not None and s.ntk is not None]
        ntks += [gained / count] if any(self.gains) and here.tangent else []
        ntk = torch.stack(ntks).sum(0) if ntks else None
        return replace(first, cov=cov / count, ntk=ntk, gap=None)

    def _sums(
        self, left: list[Tensor], right: list[Tensor], slope: bool
    ) -> tuple[Tensor, list[Tensor] | list[None], Tensor]:
        """The sums over these points: of g g', of each ∂_j g ∂_j g', and of the scales' parts."""
        if not slope:
            value = (self.fn(*left) * self.fn(*right)).sum(0)
            return value, [None] * len(left), value.new_zeros(())
        pair = []
        for values in (left, right):
            # Where the caller differentiates, slopes must be differentiable again; else no graph is kept.
            if torch.is_grad_enabled() and any(v.requires_grad for v in values):
                known = values
            else:
                known = [v.detach().requires_grad_() for v in values]
            with torch.enable_grad():
                out = self.fn(*known)
                grads = torch.autograd.grad(out.sum(), known, create_graph=known is values, allow_unused=True)
            pair.append((out if known is values else out.detach(), grads))
        (g, dg), (h, dh) = pair
        # g does not depend on a field that it ignores: autograd gives None there.
        products = [0.0 * g if a is None or b is None else a * b for a, b in zip(dg, dh, strict=True)]
        scaled = [
            rate * (d * u * v).sum(0) for rate, d, u, v in zip(self.gains, products, left, right, strict=True) if rate
        ]
        more = sum(scaled, start=g.new_zeros(()))
        return (g * h).sum(0), [d.sum(0) for d in products], more


def normal_factors(c: Tensor, p: Tensor, q: Tensor) -> Factors:
    """√p·a, √p·b, √q·a, √q·b."""
    # At zero variance ρ has no meaning; 0 keeps values and gradients finite.
    live = (p > 0) & (q > 0)
    scale = torch.where(live, p * q, 1.0).sqrt()
    rho = torch.where(live, c / scale, 0.0).clamp(-1.0, 1.0)
    a, b = root((1 + rho) / 2), root((1 - rho) / 2)
    p, q = root(p), root(q)
    return p * a, p * b, q * a, q * b


def _values(sides: list[Factors], points: Tensor, sign: float, dims: int) -> tuple[list[Tensor], list[Tensor]]:
    """u_j and v_j at these points [points, *pairs], the second of each two coordinates with this sign."""
    left, right = [], []
    for j, (pa, pb, qa, qb) in enumerate(sides):
        first, second = (points[:, 2 * j + k].view(-1, *[1] * dims) for k in (0, 1))
        left.append(pa * first + sign * pb * second)
        right.append(qa * first - sign * qb * second)
    return left, right


def _normal_points(count: int, sources: int, seed: int, like: Tensor) -> Tensor:
    """Quasi-random standard normal points [count, 2·sources]."""
    return _points(max(1, count), sources, seed).to(like)


@lru_cache(maxsize=8)
def _points(count: int, sources: int, seed: int) -> Tensor:
    engine = torch.quasirandom.SobolEngine(2 * sources, scramble=True, seed=seed)
    uniform = engine.draw(count, dtype=torch.float64).clamp(1e-15, 1 - 1e-15)  # 0 would become −∞
    return torch.special.ndtri(uniform)
