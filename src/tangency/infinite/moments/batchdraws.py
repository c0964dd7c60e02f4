"""BatchNorm in training mode followed by any activation: moments by quasi-random points.

The pre-activations of one channel over a batch of B numbers (samples, or samples with their positions) are N(0, Σ).
`batchnorm.py` has the exact moments for ReLU and for no activation.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from .draws import joint_roots
from .points import normal_points

NUMBERS = 1 << 20  # of one tensor [B, points] at a time (heuristic)


class DrawnMoments(NamedTuple):
    """E[y yᵀ], E[J Θ Jᵀ], and the same with ∂y/∂γ and ∂y/∂β for the norm's scale and shift: [B, B] each."""

    cov: Tensor
    ntk: Tensor
    scale: Tensor
    shift: Tensor


def drawn_normalized(
    cov: Tensor, ntk: Tensor, fn: Callable[[Tensor], Tensor], eps: float, samples: int, seed: int
) -> DrawnMoments:
    """Moments of y = φ(z), z = g/σ with g = Gh, σ² = |g|²/B + ε, h ~ N(0, Σ), G = I − 11ᵀ/B.

    J = diag φ'(z) (G − zzᵀ/B)/σ: all means are products of matrices [B, points]. Cost: O(samples·B²), and a root of Σ.
    """
    size = len(cov)
    if size < 2:
        raise InputError("BatchNorm over one number is 0/0. Give at least 2 samples, or positions.")
    centred = _centred(cov.double())
    values = torch.linalg.eigvalsh(centred)
    rank = int((values > 1e-10 * values[-1]).sum())
    if rank < 3 and bool(ntk.any()):
        raise InputError(
            f"the centred pre-activations of these {size} numbers have rank {rank}: E[1/variance], and with it the "
            "tangent kernel through BatchNorm, is decided by eps and cannot be drawn. Give inputs that span 3 "
            "dimensions or more, or ReLU after it, which is exact."
        )
    root = joint_roots(centred.unsqueeze(0), None, 1.0, 0.0, 1.0)[1][0]
    theta = _centred(ntk.double())
    points = normal_points(max(1, -(-samples // 2)), (size,), seed)[0].to(root)
    count = 2 * points.shape[1]
    total = [torch.zeros_like(root) for _ in range(6)]
    for x in torch.cat([points, -points], 1).split(max(1, NUMBERS // size), 1):
        total = [t + v for t, v in zip(total, _sums(root @ x, theta, fn, eps), strict=True)]
    value, slopes, once, twice, scale, shift = (t / count for t in total)
    tangent = slopes * theta - (once + once.mT) / size + twice / size**2
    return DrawnMoments(*(v.to(cov.dtype) for v in (value, tangent, scale, shift)))


def _sums(g: Tensor, theta: Tensor, fn: Callable[[Tensor], Tensor], eps: float) -> list[Tensor]:
    """Over these points: of yyᵀ, ddᵀ, (dz)(dΘz)ᵀ, (zᵀΘz)(dz)(dz)ᵀ with d = φ'(z)/σ; of (φ'z)(φ'z)ᵀ and φ'φ'ᵀ."""
    sigma = (g.square().mean(0) + eps).sqrt()
    z = (g / sigma).requires_grad_()
    with torch.enable_grad():
        y = fn(z)
        (slope,) = torch.autograd.grad(y.sum(), z)
    y, z = y.detach(), z.detach()
    d, across = slope / sigma, theta @ z
    a = d * z
    pairs = ((y, y), (d, d), (a, d * across), (a * (z * across).sum(0), a), (slope * z, slope * z), (slope, slope))
    return [u @ v.mT for u, v in pairs]


def _centred(k: Tensor) -> Tensor:
    k = k - k.mean(0, keepdim=True)
    return k - k.mean(1, keepdim=True)
