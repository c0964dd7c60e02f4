"""A table of moments, in polar coordinates, for functions whose only kink is at 0.

Their moments are analytic in (√p, √q, θ), cos θ = ρ, up to θ = 0 and π. So they are integrated once, on a Chebyshev
grid of these three, and interpolated for every pair.
"""

import functools
import math

import torch
from torch import Tensor

from .dual import HALF_PI, TWO_PI, Pair, attach, recording, root
from .rules import REACH, Function, angle, composite_rule, derivative, line

# Pairs integrated at once: the points of one angle of them stay in the cache.
_POLAR_PAIRS = 512
# Chebyshev points in √p for φ².
_SQUARED = 48
# Chebyshev points in √p and in θ; heuristic: 1e-10 for ELU, 1e-7 for Softsign, at p ≤ 4.
_SIDE, _TURN = 20, 24


def polar(fn: Function, kinks: tuple[float, ...], nodes: int, c: Tensor, p: Tensor, q: Tensor, slope: bool) -> Pair:
    """1/2π ∫dt ∫dr r exp(−r²/2) φ(√p r cos t)φ(√q r cos(t − θ)), and with φ'; in chunks of pairs."""
    c, p, q = torch.broadcast_tensors(c, p, q)
    theta, a, b = (v.reshape(-1).split(_POLAR_PAIRS) for v in (angle(c, p, q), root(p), root(q)))
    parts = [_polar_chunk(fn, kinks, nodes, *chunk, slope=slope) for chunk in zip(theta, a, b, strict=True)]
    value, second = (torch.cat(chunk).reshape(c.shape) for chunk in zip(*parts, strict=True))
    return value, second if slope else None


def _polar_chunk(
    fn: Function, kinks: tuple[float, ...], nodes: int, theta: Tensor, a: Tensor, b: Tensor, slope: bool
) -> tuple[Tensor, Tensor]:
    """Angles split where a kink line goes to infinity or two of them cross; radii where a ray meets a kink line."""
    cos, sin = torch.cos(theta), torch.sin(theta)
    u = [t / a.clamp(min=1e-150) for t in kinks if t]
    v = [t / b.clamp(min=1e-150) for t in kinks if t]
    turns = [torch.full_like(theta, t) for t in (-math.pi, -HALF_PI, HALF_PI, math.pi)]
    turns += [theta - HALF_PI, torch.where(theta > HALF_PI, theta - 3 * HALF_PI, theta + HALF_PI)]
    # Directions in which a kink line of u and one of v cross.
    turns += [torch.atan2(y - cos * x, sin * x) for x in u for y in v]
    breaks = torch.stack(turns, -1).sort(-1).values
    if u:  # the weight of a strip that goes to infinity dies like exp(−1/cos²): smooth, but not analytic
        breaks = torch.cat([breaks, (breaks[:, 1:] + breaks[:, :-1]) / 2], -1).sort(-1).values
    angles, turning = composite_rule(breaks, nodes)
    value, second = torch.zeros_like(theta), torch.zeros_like(theta)
    ends = [torch.full_like(theta, r) for r in (0.0, 0.8, 3.0, REACH)]
    # Angle by angle: all radii of all pairs of one angle stay in the cache.
    for t, turn in zip(angles.unbind(-1), turning.unbind(-1), strict=True):
        across, along = t.cos(), (t - theta).cos()
        cuts = [_cut(h, across) for h in u] + [_cut(h, along) for h in v]
        r, w = composite_rule(torch.stack(ends + cuts, -1).sort(-1).values, nodes)
        w = w * r * torch.exp(-r * r / 2) * (turn / TWO_PI).unsqueeze(-1)
        x = torch.stack([(a * across)[:, None] * r, (b * along)[:, None] * r])
        value = value + (w * fn(x).prod(0)).sum(-1)
        if slope:
            second = second + (w * derivative(fn, x).prod(0)).sum(-1)
    return value, second


def _cut(height: Tensor, cosine: Tensor) -> Tensor:
    """The radius at which a ray reaches a kink line, clamped to the reach; the reach where it never does."""
    meets = height * cosine > 0
    return torch.where(meets, (height / torch.where(meets, cosine, 1.0)).clamp(max=REACH), REACH)


def _chebyshev(points: int) -> tuple[Tensor, Tensor]:
    """Chebyshev points on [−1, 1] and the matrix from values there to coefficients."""
    k = torch.arange(points, dtype=torch.float64)
    at = (k + 0.5) * math.pi / points
    back = torch.cos(k[:, None] * at) * (2 / points)
    back[0] /= 2
    return at.cos(), back


@functools.lru_cache(maxsize=32)
def _table(fn: Function, nodes: int, level: float) -> tuple[Tensor, Tensor]:
    """Chebyshev coefficients [2 (φ, φ'), θ, √p, √q] of the moments for variances up to `level`; and a correction.

    The correction [2, √p] is what the table lacks at θ = 0, p = q: with half of it for p and half for q a copy has
    exactly its own moments, and the matrix of near copies stays positive semidefinite.
    """
    side, to_side = _chebyshev(_SIDE)
    turn, to_turn = _chebyshev(_TURN)
    p = ((side + 1) / 2) ** 2 * level
    # Symmetric in p and q: half of the grid.
    i, j = torch.triu_indices(_SIDE, _SIDE).unbind()
    rho = torch.cos((turn + 1) * HALF_PI)[:, None]
    scale = (p[i] * p[j]).sqrt()
    with torch.no_grad():
        value, slope = polar(fn, (0.0,), nodes, rho * scale, p[i], p[j], True)
    # √(pq) is the size of E[φφ] where φ(0) = 0: what is left is smooth down to zero variance.
    value = value / scale if _vanishes(fn) else value
    full = torch.empty(2, _TURN, _SIDE, _SIDE, dtype=torch.float64)
    for k, moment in enumerate((value, slope)):
        assert moment is not None
        full[k][:, i, j] = full[k][:, j, i] = moment
    # Side by side, not in one einsum, which makes the outer product of the three matrices first.
    table = to_side @ torch.einsum("mt,ktab->kmab", to_turn, full) @ to_side.T
    side, to_side = _chebyshev(_SQUARED)
    p = ((side + 1) / 2) ** 2 * level
    x, w = line((0.0,), p, 2 * nodes)
    own = torch.stack([(w * y.square()).sum(-1) for y in (fn(x), derivative(fn, x))])
    own[0] = own[0] / p if _vanishes(fn) else own[0]
    at, signs = _powers(side, _SIDE), 1.0 - 2.0 * (torch.arange(_TURN, dtype=torch.float64) % 2)
    return table, (own - torch.einsum("ai,aj,kmij,m->ka", at, at, table, signs)) @ to_side.T


def _vanishes(fn: Function) -> bool:
    """φ(0) = 0. Then E[φφ]/√(pq) is interpolated, so that small variances keep their relative accuracy."""
    return float(fn(torch.zeros(1, dtype=torch.float64))) == 0.0


def _powers(x: Tensor, terms: int) -> Tensor:
    """T_0(x) … T_{terms−1}(x) in a new last dimension."""
    powers = [torch.ones_like(x), x]
    while len(powers) < terms:
        powers.append(2 * x * powers[-1] - powers[-2])
    return torch.stack(powers, dim=-1)


def interpolate(fn: Function, nodes: int, level: float, c: Tensor, p: Tensor, q: Tensor, slope: bool) -> Pair:
    """The moments of a function with its only kink at 0, from the table for variances up to `level`."""
    table, lacking = (t.to(c.device) for t in _table(fn, nodes, level))
    # What is of each sample alone is computed in float64, then rounded to the type of the pairs.
    sides = [2 * (root(variance.double()) / math.sqrt(level)).clamp(max=1.0) - 1 for variance in (p, q)]
    x, y = (_powers(side, _SQUARED) for side in sides)
    lack = [((x @ row + y @ row) / 2).to(c) for row in lacking]
    table, x, y = table.to(c), x.to(c), y.to(c)
    x, y = x[..., :_SIDE], y[..., :_SIDE]
    theta = angle(c, p, q) / HALF_PI - 1
    # A tile [n, m] with p [n, 1] and q [1, m]: matrix products instead of one sum for each pair.
    outer = p.ndim > 1 and q.ndim > 1 and p.shape[-1] == 1 and q.shape[-2] == 1
    x, y = (x.squeeze(-2), y.squeeze(-3).mT) if outer else (x, y)
    sums = []
    record = recording(c, p, q)
    for k in range(2 if slope or record else 1):
        at = theta if k else theta.detach()
        # Chebyshev polynomials of θ by their recurrence, so that no table of them is kept.
        before, now = torch.ones_like(at), at
        total = torch.zeros_like(at)
        for m in range(_TURN):
            part = x @ table[k, m] @ y if outer else ((x @ table[k, m]) * y).sum(-1)
            total = total + part * before if record else total.addcmul_(part, before)
            before, now = now, 2 * at * now - before
        sums.append(total + lack[k])
    if _vanishes(fn):
        sums[0] = sums[0] * (root(p) * root(q))
    return attach(sums[0], sums[-1], c, p, q), sums[1] if slope else None
