"""Quadrature rules for Gaussian moments of any function: in one dimension, and over v given u, then over u.

`nested` is the rule for every pair that nothing faster serves: its pieces end at kinks and at 1/2, 2, 8, 32, … from 0,
so they see what φ does near 0 at any variance, and, in u, what v does there at any correlation.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .dual import HALF_PI, TWO_PI, Pair, attach, recording, root

Function = Callable[[Tensor], Tensor]
# Standard deviations: the weight beyond is 1e-20, so a growth like x⁴ is still below rounding.
REACH = 9.5
# Pairs at once in `nested`: some 1e5 values of φ.
_NARROW, _WIDE = 16, 4
_BREAKS = tuple(0.5 * 4.0**k for k in range(20))
# A standard deviation in which φ is nearly a parabola: 20 points of the trapezoidal rule.
_THIN = 0.5


def derivative(fn: Function, x: Tensor) -> Tensor:
    """φ'(x), elementwise; differentiable again where x is."""
    track = recording(x)
    with torch.enable_grad():
        # A graph of its own where the caller keeps none.
        at = x if track else x.detach().requires_grad_()
        y = fn(at)
        if not y.requires_grad:
            return torch.zeros_like(x)
        slope = torch.autograd.grad(y.sum(), at, create_graph=track, allow_unused=True)[0]
    return torch.zeros_like(x) if slope is None else slope


@functools.lru_cache(maxsize=32)
def _legendre(nodes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Gauss–Legendre points and weights on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    return torch.from_numpy((x + 1) / 2).to(device, dtype), torch.from_numpy(w / 2).to(device, dtype)


def composite_rule(breaks: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Points and weights [..., pieces × nodes] of the composite rule between sorted breaks [..., pieces + 1]."""
    x, w = _legendre(nodes, breaks.dtype, breaks.device)
    width = breaks.diff(dim=-1).unsqueeze(-1)
    return (breaks[..., :-1, None] + width * x).flatten(-2), (width * w).flatten(-2)


def line(kinks: tuple[float, ...], p: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Points √p z and normal weights [..., points] of a composite rule in one dimension."""
    sd = root(p)
    breaks = [torch.full_like(p, z) for z in (-REACH, -4.0, -1.5, 0.0, 1.5, 4.0, REACH)]
    # Where √p is large, φ's features near 0 are narrow in z: more breaks there.
    near = [sign * t for t in _below(REACH * sd, 2 * REACH) for sign in (-1.0, 1.0)]
    breaks += [(t / sd.clamp(min=1e-100)).clamp(-REACH, REACH) for t in (*near, *kinks) if t]
    z, w = composite_rule(torch.stack(breaks, dim=-1).sort(dim=-1).values, nodes)
    return sd.unsqueeze(-1) * z, w * _normal(z)


def _below(bound: Tensor, least: float = 0.0) -> list[float]:
    """1/2, 2, 8, … below the largest bound; none where that is at most `least`."""
    # By the largest of the pairs done together; pieces that are empty for the others have no weight.
    top = float(bound.detach().max()) if bound.numel() else 0.0
    return [t for t in _BREAKS if t < top] if top > least else []


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
    # u with the larger variance: v given u is then the narrower one.
    theta, a, b = angle(c, p, q), root(torch.maximum(p, q)), root(torch.minimum(p, q))
    second = functools.partial(derivative, fn)
    if recording(c, p, q):
        # Price's theorem gives the gradient through ρ; autograd would divide by sin θ.
        value = _sorted((fn,), kinks, nodes, theta.detach(), a, b)[0]
        steep = _sorted((second,), kinks, nodes, theta, a, b)[0]
        return attach(value, steep, c, p, q), steep if slope else None
    moments = _sorted((fn, second) if slope else (fn,), kinks, nodes, theta, a, b)
    return moments[0], moments[1] if slope else None


def _sorted(
    fs: tuple[Function, ...], kinks: tuple[float, ...], nodes: int, theta: Tensor, a: Tensor, b: Tensor
) -> list[Tensor]:
    """Narrow ones first, then by variance, since pairs done together have the same number of pieces."""
    if not len(a):
        return [a for _ in fs]
    wide = (b * theta.sin()).detach() > _THIN
    order = torch.argsort(a.detach() + wide * (a.detach().max() + 1.0))
    narrow = len(wide) - int(wide.sum())
    parts = [part for part in (*order[:narrow].split(_NARROW), *order[narrow:].split(_WIDE)) if len(part)]
    chunks = [_nested_chunk(fs, kinks, nodes, theta[part], a[part], b[part]) for part in parts]
    back = torch.argsort(order)
    return [torch.cat(chunk)[back] for chunk in zip(*chunks, strict=True)]


def _nested_chunk(
    fs: tuple[Function, ...], kinks: tuple[float, ...], nodes: int, theta: Tensor, a: Tensor, b: Tensor
) -> list[Tensor]:
    """E[f(az)f(bz cos θ + by sin θ)]: pieces in z times pieces in y."""
    lean, sd, zero = b * theta.cos(), b * theta.sin(), torch.zeros_like(a)
    breaks = [zero + z for z in (-REACH, -4.0, -1.5, 0.0, 1.5, 4.0, REACH)]
    safe, slant = a.clamp(min=1e-100), torch.where(lean.abs() > 1e-100, lean, 1e-100)
    breaks += [t / safe for far in _below(REACH * a) for t in (-far, far)] + [t / safe for t in kinks]
    # E[φ(v)|u] bends where the mean of v passes a kink, over some standard deviations of v.
    breaks += [(t + k * sd) / slant for t in kinks for k in (-7.0, -2.5, 0.0, 2.5, 7.0)]
    pair, z, w = _live(breaks, REACH, nodes)
    pair, z, w = pair[:, None].expand_as(z).reshape(-1), z.reshape(-1), w.reshape(-1)
    mean, sd = lean[pair] * z, sd[pair]
    thin = float(sd.detach().max()) <= _THIN
    if thin and not kinks and float(b.detach().min()) >= 1.0:
        # Half-integers times 0.8: symmetric, and without 0.
        y = torch.arange(-9.5, 10.0, dtype=a.dtype, device=a.device) * 0.8
        row, weights = torch.arange(len(z), device=a.device), _normal(y) / _normal(y).sum()
    else:
        safe, end = sd.clamp(min=1e-100), 8.0
        breaks = [torch.full_like(mean, at) for at in (-end, -2.5, 2.5, end)] + [(t - mean) / safe for t in kinks]
        far = [] if thin else [0.0, *(t for edge in _below(mean.abs() + end * sd) for t in (-edge, edge))]
        row, y, weights = _live(breaks + [(t - mean) / safe for t in far], end, nodes)
    u, v = a[pair] * z, mean[row, None] + sd[row, None] * y
    return [zero.index_add(0, pair[row], (w * f(u))[row] * (f(v) * weights).sum(-1)) for f in fs]


def _live(breaks: list[Tensor], end: float, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pieces between breaks [rows] in [−end, end] that are not empty: their rows, points and normal weights."""
    ends = torch.stack([at.clamp(-end, end) for at in breaks], -1).sort(-1).values
    # Different pairs have different numbers of pieces, so those that are not empty are listed one after the other.
    row, at = (ends.detach().diff(dim=-1) > 1e-12).nonzero(as_tuple=True)
    x, w = _legendre(nodes, ends.dtype, ends.device)
    left = ends[row, at][:, None]
    width = ends[row, at + 1][:, None] - left
    points = left + width * x
    return row, points, width * w * _normal(points)
