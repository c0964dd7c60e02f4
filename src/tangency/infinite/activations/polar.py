"""Moments of a function with kinks by quadrature: over v given u, then over u; and a table, in polar coordinates.

`nested` is the rule for every pair that nothing faster serves: its pieces end at kinks and at 1/2, 2, 8, 32, … from 0,
so they see what φ does near 0 at any variance, and, in u, what v does there at any correlation.

A function whose only kink is at 0 has moments that are analytic in (√p, √q, θ), cos θ = ρ, up to θ = 0 and π. So they
are integrated once, on a Chebyshev grid of these three, and interpolated for every pair.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .dual import HALF_PI, TWO_PI, Pair, attach, recording, root

Function = Callable[[Tensor], Tensor]
REACH = 9.5  # standard deviations: the weight beyond is 1e-20, so a growth like x⁴ is still below rounding
_PAIRS = 512  # pairs integrated at once: the points of one angle of them stay in the cache
_NARROW, _WIDE = 16, 4  # pairs at once in `nested`: some 1e5 values of φ
_BREAKS = tuple(0.5 * 4.0**k for k in range(20))
_THIN = 0.5  # a standard deviation in which φ is nearly a parabola: 20 points of the trapezoidal rule
_OWN = 48  # Chebyshev points in √p for φ²
_SIDE, _TURN = 20, 24  # Chebyshev points in √p and in θ; heuristic: 1e-10 for ELU, 1e-7 for Softsign, at p ≤ 4


def derivative(fn: Function, x: Tensor) -> Tensor:
    """φ'(x), elementwise; differentiable again where x is."""
    track = recording(x)
    with torch.enable_grad():
        at = x if track else x.detach().requires_grad_()
        y = fn(at)
        if not y.requires_grad:
            return torch.zeros_like(x)
        found = torch.autograd.grad(y.sum(), at, create_graph=track, allow_unused=True)[0]
    return torch.zeros_like(x) if found is None else found


@functools.lru_cache(maxsize=32)
def _legendre(nodes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Gauss–Legendre points and weights on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    return torch.from_numpy((x + 1) / 2).to(device, dtype), torch.from_numpy(w / 2).to(device, dtype)


def pieces(breaks: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Points and weights [..., pieces × nodes] of the composite rule between sorted breaks [..., pieces + 1]."""
    x, w = _legendre(nodes, breaks.dtype, breaks.device)
    width = breaks.diff(dim=-1).unsqueeze(-1)
    return (breaks[..., :-1, None] + width * x).flatten(-2), (width * w).flatten(-2)


def line(kinks: tuple[float, ...], p: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Points √p z and normal weights [..., points] of a composite rule in one dimension."""
    sd = root(p)
    breaks = [torch.full_like(p, each) for each in (-REACH, -4.0, -1.5, 0.0, 1.5, 4.0, REACH)]
    near = [sign * each for each in _below(REACH * sd, 2 * REACH) for sign in (-1.0, 1.0)]
    breaks += [(t / sd.clamp(min=1e-100)).clamp(-REACH, REACH) for t in (*near, *kinks) if t]
    z, w = pieces(torch.stack(breaks, dim=-1).sort(dim=-1).values, nodes)
    return sd.unsqueeze(-1) * z, w * _normal(z)


def _below(bound: Tensor, least: float = 0.0) -> list[float]:
    """1/2, 2, 8, … below the largest bound; none where that is at most `least`."""
    top = float(bound.detach().max()) if bound.numel() else 0.0
    return [each for each in _BREAKS if each < top] if top > least else []


def _normal(z: Tensor) -> Tensor:
    return torch.exp(-z * z / 2) / math.sqrt(TWO_PI)


def angle(c: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """θ with cos θ = c/√(pq), gradient 0 at its ends; π/2 at zero variance."""
    live = (p > 0) & (q > 0)
    return torch.where(live, torch.atan2(root(p * q - c * c), torch.where(live, c, 1.0)), HALF_PI)


def nested(fn: Function, kinks: tuple[float, ...], nodes: int, c: Tensor, p: Tensor, q: Tensor, slope: bool) -> Pair:
    """E[φ(u)E[φ(v)|u]], and with φ', for flat c, p, q; u is the one with the larger variance.

    Cost: some thousand evaluations of φ per pair where √(q(1 − ρ²)) ≤ 1/2, ten times as many elsewhere.
    """
    theta, a, b = angle(c, p, q), root(torch.maximum(p, q)), root(torch.minimum(p, q))
    second = functools.partial(derivative, fn)
    if recording(c, p, q):
        value = _sorted((fn,), kinks, nodes, theta.detach(), a, b)[0]
        steep = _sorted((second,), kinks, nodes, theta, a, b)[0]
        return attach(value, steep, c, p, q), steep if slope else None
    found = _sorted((fn, second) if slope else (fn,), kinks, nodes, theta, a, b)
    return found[0], found[1] if slope else None


def _sorted(
    fs: tuple[Function, ...], kinks: tuple[float, ...], nodes: int, theta: Tensor, a: Tensor, b: Tensor
) -> list[Tensor]:
    """Narrow ones first, then by variance, since pairs done together have the same number of pieces."""
    if not len(a):
        return [a for _ in fs]
    wide = (b * theta.sin()).detach() > _THIN
    order = torch.argsort(a.detach() + wide * (a.detach().max() + 1.0))
    narrow = len(wide) - int(wide.sum())
    parts = [each for each in (*order[:narrow].split(_NARROW), *order[narrow:].split(_WIDE)) if len(each)]
    found = [_nested_chunk(fs, kinks, nodes, theta[part], a[part], b[part]) for part in parts]
    back = torch.argsort(order)
    return [torch.cat(each)[back] for each in zip(*found, strict=True)]


def _nested_chunk(
    fs: tuple[Function, ...], kinks: tuple[float, ...], nodes: int, theta: Tensor, a: Tensor, b: Tensor
) -> list[Tensor]:
    """E[f(az)f(bz cos θ + by sin θ)]: pieces in z times pieces in y."""
    lean, sd, zero = b * theta.cos(), b * theta.sin(), torch.zeros_like(a)
    breaks = [zero + each for each in (-REACH, -4.0, -1.5, 0.0, 1.5, 4.0, REACH)]
    safe, slant = a.clamp(min=1e-100), torch.where(lean.abs() > 1e-100, lean, 1e-100)
    breaks += [t / safe for each in _below(REACH * a) for t in (-each, each)] + [t / safe for t in kinks]
    breaks += [(t + k * sd) / slant for t in kinks for k in (-7.0, -2.5, 0.0, 2.5, 7.0)]
    pair, z, w = _live(breaks, REACH, nodes)
    pair, z, w = pair[:, None].expand_as(z).reshape(-1), z.reshape(-1), w.reshape(-1)
    mean, sd = lean[pair] * z, sd[pair]
    thin = float(sd.detach().max()) <= _THIN
    if thin and not kinks and float(b.detach().min()) >= 1.0:
        y = torch.arange(-9.5, 10.0, dtype=a.dtype, device=a.device) * 0.8
        row, weights = torch.arange(len(z), device=a.device), _normal(y) / _normal(y).sum()
    else:
        safe, end = sd.clamp(min=1e-100), 8.0
        breaks = [torch.full_like(mean, each) for each in (-end, -2.5, 2.5, end)] + [(t - mean) / safe for t in kinks]
        far = [] if thin else [0.0, *(t for each in _below(mean.abs() + end * sd) for t in (-each, each))]
        row, y, weights = _live(breaks + [(t - mean) / safe for t in far], end, nodes)
    u, v = a[pair] * z, mean[row, None] + sd[row, None] * y
    return [zero.index_add(0, pair[row], (w * f(u))[row] * (f(v) * weights).sum(-1)) for f in fs]


def _live(breaks: list[Tensor], end: float, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pieces between breaks [rows] in [−end, end] that are not empty: their rows, points and normal weights."""
    ends = torch.stack([each.clamp(-end, end) for each in breaks], -1).sort(-1).values
    row, at = (ends.detach().diff(dim=-1) > 1e-12).nonzero(as_tuple=True)
    x, w = _legendre(nodes, ends.dtype, ends.device)
    left = ends[row, at][:, None]
    width = ends[row, at + 1][:, None] - left
    points = left + width * x
    return row, points, width * w * _normal(points)


def polar(fn: Function, kinks: tuple[float, ...], nodes: int, c: Tensor, p: Tensor, q: Tensor, slope: bool) -> Pair:
    """1/2π ∫dt ∫dr r exp(−r²/2) φ(√p r cos t)φ(√q r cos(t − θ)), and with φ'; in chunks of pairs."""
    c, p, q = torch.broadcast_tensors(c, p, q)
    theta, a, b = (each.reshape(-1).split(_PAIRS) for each in (angle(c, p, q), root(p), root(q)))
    parts = [_polar_chunk(fn, kinks, nodes, *each, slope=slope) for each in zip(theta, a, b, strict=True)]
    value, second = (torch.cat(each).reshape(c.shape) for each in zip(*parts, strict=True))
    return value, second if slope else None


def _polar_chunk(
    fn: Function, kinks: tuple[float, ...], nodes: int, theta: Tensor, a: Tensor, b: Tensor, slope: bool
) -> tuple[Tensor, Tensor]:
    """Angles split where a kink line goes to infinity or two of them cross; radii where a ray meets a kink line."""
    cos, sin = torch.cos(theta), torch.sin(theta)
    u = [t / a.clamp(min=1e-150) for t in kinks if t]
    v = [t / b.clamp(min=1e-150) for t in kinks if t]
    turns = [torch.full_like(theta, each) for each in (-math.pi, -HALF_PI, HALF_PI, math.pi)]
    turns += [theta - HALF_PI, torch.where(theta > HALF_PI, theta - 3 * HALF_PI, theta + HALF_PI)]
    turns += [torch.atan2(y - cos * x, sin * x) for x in u for y in v]
    breaks = torch.stack(turns, -1).sort(-1).values
    if u:  # the weight of a strip that goes to infinity dies like exp(−1/cos²): smooth, but not analytic
        breaks = torch.cat([breaks, (breaks[:, 1:] + breaks[:, :-1]) / 2], -1).sort(-1).values
    angles, turning = pieces(breaks, nodes)
    value, second = torch.zeros_like(theta), torch.zeros_like(theta)
    ends = [torch.full_like(theta, each) for each in (0.0, 0.8, 3.0, REACH)]
    for t, turn in zip(angles.unbind(-1), turning.unbind(-1), strict=True):
        across, along = t.cos(), (t - theta).cos()
        cuts = [_cut(h, across) for h in u] + [_cut(h, along) for h in v]
        r, w = pieces(torch.stack(ends + cuts, -1).sort(-1).values, nodes)
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
    i, j = torch.triu_indices(_SIDE, _SIDE).unbind()
    rho = torch.cos((turn + 1) * HALF_PI)[:, None]
    scale = (p[i] * p[j]).sqrt()
    with torch.no_grad():
        value, slope = polar(fn, (0.0,), nodes, rho * scale, p[i], p[j], True)
    value = value / scale if _vanishes(fn) else value
    full = torch.empty(2, _TURN, _SIDE, _SIDE, dtype=torch.float64)
    for k, each in enumerate((value, slope)):
        assert each is not None
        full[k][:, i, j] = full[k][:, j, i] = each
    table = torch.einsum("mt,ia,jb,ktab->kmij", to_turn, to_side, to_side, full)
    side, to_side = _chebyshev(_OWN)
    p = ((side + 1) / 2) ** 2 * level
    x, w = line((0.0,), p, 2 * nodes)
    own = torch.stack([(w * each.square()).sum(-1) for each in (fn(x), derivative(fn, x))])
    own[0] = own[0] / p if _vanishes(fn) else own[0]
    at, signs = _powers(side, _SIDE), 1.0 - 2.0 * (torch.arange(_TURN, dtype=torch.float64) % 2)
    return table, (own - torch.einsum("ai,aj,kmij,m->ka", at, at, table, signs)) @ to_side.T


def _vanishes(fn: Function) -> bool:
    """φ(0) = 0. Then E[φφ]/√(pq) is interpolated, so that small variances keep their relative accuracy."""
    return float(fn(torch.zeros(1, dtype=torch.float64))) == 0.0


def _powers(x: Tensor, terms: int) -> Tensor:
    """T_0(x) … T_{terms−1}(x) in a new last dimension."""
    found = [torch.ones_like(x), x]
    while len(found) < terms:
        found.append(2 * x * found[-1] - found[-2])
    return torch.stack(found, dim=-1)


def interpolate(fn: Function, nodes: int, level: float, c: Tensor, p: Tensor, q: Tensor, slope: bool) -> Pair:
    """The moments of a function with its only kink at 0, from the table for variances up to `level`."""
    table, lacking = (each.to(c) for each in _table(fn, nodes, level))
    x, y = (_powers(2 * (root(each) / math.sqrt(level)).clamp(max=1.0) - 1, _OWN) for each in (p, q))
    lack = [(x @ each + y @ each) / 2 for each in lacking]
    x, y = x[..., :_SIDE], y[..., :_SIDE]
    theta = angle(c, p, q) / HALF_PI - 1
    outer = p.ndim > 1 and q.ndim > 1 and p.shape[-1] == 1 and q.shape[-2] == 1
    x, y = (x.squeeze(-2), y.squeeze(-3).mT) if outer else (x, y)
    sums = []
    record = recording(c, p, q)
    for k in range(2 if slope or record else 1):
        at = theta if k else theta.detach()
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
