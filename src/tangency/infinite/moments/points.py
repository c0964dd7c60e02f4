"""Quasi-random points, always the same ones for a seed, over which expectations without a closed form are means."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=32)
def normal_points(count: int, sizes: tuple[int, ...], seed: int) -> tuple[Tensor, ...]:
    """Standard normal points [size, count], each part turned so that its covariance is one.

    With all signs, what is linear or quadratic in them then has its exact mean.
    """
    engine = torch.quasirandom.SobolEngine(sum(sizes), scramble=True, seed=seed)
    u = engine.draw(count, dtype=torch.float64).clamp(1e-15, 1 - 1e-15)  # 0 would become −∞
    return tuple(_whitened(part).T.contiguous() for part in torch.special.ndtri(u).split(list(sizes), 1))


def _whitened(drawn: Tensor) -> Tensor:
    # Too few points: their covariance may be singular, and turning them would blow up their noise.
    if len(drawn) < 4 * drawn.shape[1] or not drawn.shape[1]:
        return drawn
    values, vectors = torch.linalg.eigh(drawn.T @ drawn / len(drawn))
    return drawn @ (vectors * values.rsqrt()) @ vectors.T
