"""BatchNorm in training mode at infinite width: exact moments of normalised Gaussian pre-activations.

One channel's pre-activations over a batch of B samples are h ~ N(0, Σ). With G = I − 11ᵀ/B, g = Gh and
ρ² = ‖g‖² + Bε, BatchNorm gives z = √B g/ρ. Every moment here is an E[f(g)/ρ²ᵏ] with f homogeneous, and

    ρ⁻²ᵏ = 1/Γ(k) ∫ sᵏ⁻¹ e^{−sρ²} ds,    E[e^{−s‖g‖²} f(g)] = det(I + 2sS)^{−½} E_{N(0, C)}[f],    C = S(I + 2sS)⁻¹,

S = GΣG: Gaussian moments under a damped covariance, in closed form, and one integral over s; ε > 0 only adds e^{−sBε}.
Yang, Pennington, Rao, Sohl-Dickstein, Schoenholz 2019, "A Mean Field Theory of Batch Normalization".
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..._base.types import Float
from ...errors import InputError

_STEP = 0.22  # of the trapezoidal rule; its error falls as e^{−c/step}, and is rounding here (tests halve it)
_TAIL = 41.0  # what is smaller than the largest term by e^{−41} ≈ 2e-18 is left out
_ENTRIES = 2**21  # entries of the matrices that one step of the loop over nodes holds: a heuristic, 16 MB each


class NormalizedMoments(NamedTuple):
    """E[y yᵀ] and E[J Θ Jᵀ] (None where no Θ was given), [n, n] each."""

    cov: Tensor
    ntk: Tensor | None


def normalized(cov: Tensor, ntk: Tensor | None = None, *, relu: bool, eps: float = 1e-5) -> NormalizedMoments:
    """E[y yᵀ] and E[J Θ Jᵀ] for y = φ(z), z = Gh/√(‖Gh‖²/n + ε), J = ∂y/∂h, h ~ N(0, Σ); φ is ReLU or the identity.

    `cov` is Σ, the covariance of one channel over the n samples of the batch; `ntk` is Θ, its tangent kernel, or None;
    scale and shift are 1 and 0 (trained, they add the first moment returned, and `slopes`), the variance is the biased
    one, as torch.nn.BatchNorm1d in training mode. ε is treated exactly. With ε = 0 the tangent kernel is infinite where
    GΣG has rank 1 or 2 (so for up to three samples), as E[1/‖Gh‖²] is; ε > 0 makes it finite, and decides it.
    Eigenvalues of GΣG up to 8n·(rounding of Σ's type)·max Σ_ii count as 0, so equal samples are equal; a sample that is
    the mean of its batch so far has z = 0, where ReLU has slope 0, as in torch. Computed in float64, given in Σ's type.
    Differentiable in Θ, and in Σ where the eigenvalues of GΣG are distinct.

    Cost: O(n³) for each of 40 to 200 nodes (ReLU), or once (identity); relative error about 1e-13.

    >>> import torch
    >>> y, _ = normalized(torch.eye(4, dtype=torch.float64), relu=False, eps=0.0)
    >>> print([round(v, 12) for v in y.diagonal().tolist()])
    [1.0, 1.0, 1.0, 1.0]
    """
    batch = _centred(cov, eps)
    if ntk is None:
        return NormalizedMoments(_forward(batch, relu).to(cov.dtype), None)
    _check_ntk(cov, ntk, batch, eps)
    theta = _centre(ntk.double()) / batch.scale
    tangent = _relu_tangent(batch, theta) if relu else _linear_tangent(batch, theta)
    return NormalizedMoments(_forward(batch, relu).to(cov.dtype), _symmetric(tangent).to(cov.dtype))


def slopes(cov: Tensor, *, relu: bool) -> Float[Tensor, "n n"]:
    """E[φ'(z) φ'(z)ᵀ]: (π − angle)/2π of Gh for ReLU, which needs its signs alone, whatever ε is; 1 for the identity.

    >>> import torch
    >>> print(slopes(torch.eye(2, dtype=torch.float64), relu=False).tolist())
    [[1.0, 1.0], [1.0, 1.0]]
    """
    batch = _centred(cov, 0.0)
    if not relu:
        return torch.ones_like(cov)
    angle = _angles(batch.vectors * batch.values.sqrt())[0]
    return ((math.pi - angle) / (2 * math.pi) * batch.alive).to(cov.dtype)


@dataclass(frozen=True, eq=False)
class _Batch:
    """GΣG/scale = Σ_k values_k vectors_k vectors_kᵀ with trace 1, its range only; eps is Bε on the same scale."""

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "n k"]
    scale: Tensor  # the trace of GΣG
    eps: Tensor
    alive: Float[Tensor, "n n"]  # 0 for pairs with a sample that equals the batch's mean, else 1


def _centred(cov: Tensor, eps: float) -> _Batch:
    if cov.dim() != 2 or cov.shape[0] != cov.shape[1] or not cov.is_floating_point():
        raise InputError(
            f"cov is {cov.dtype} of shape {list(cov.shape)}; needed: the real covariance [n, n] of one channel over "
            "the n samples of a batch."
        )
    n = cov.shape[0]
    if n < 2:
        raise InputError("BatchNorm over a batch of 1 sample is 0/0. Give a batch of at least 2 samples.")
    if not (eps >= 0 and math.isfinite(eps)):
        raise InputError(f"eps={eps}; needed: a finite number ≥ 0, such as torch's 1e-5.")
    if not bool(cov.isfinite().all()):
        raise InputError("cov holds NaN or infinite entries. Check the layers before BatchNorm.")
    # In float64 whatever the input: eigenvalues near 0 decide how many directions count.
    values, vectors = torch.linalg.eigh(_centre(_symmetric(cov.double())))
    lowest, highest = values.detach()[[0, -1]].tolist()
    noise = 8 * n * torch.finfo(cov.dtype).eps * float(cov.detach().diagonal().abs().max())  # of what should be 0
    if lowest < -max(noise, (1e-6 if cov.dtype == torch.float64 else 1e-3) * highest):
        raise InputError(
            f"cov is indefinite: the eigenvalues of GΣG go from {lowest:.3g} to {highest:.3g}, so it is no covariance. "
            "Check how it was made; in float32, compute it in float64."
        )
    # Only the range: damped eigenvalues of 0 stay 0 and would only cost.
    kept = values > noise
    if not bool(kept.any()):
        raise InputError(
            f"the {n} samples have the same pre-activations up to rounding, so BatchNorm divides 0 by 0 (or by √eps). "
            "Give a batch of different samples."
        )
    # Scaled to trace 1, so that the nodes below do not depend on the size of the inputs.
    values, vectors = values[kept], vectors[:, kept]
    scale = values.sum()
    here = ((vectors**2 * values).sum(1) > noise).double()
    return _Batch(values / scale, vectors, scale, n * eps / scale, here[:, None] * here)


def _check_ntk(cov: Tensor, ntk: Tensor, batch: _Batch, eps: float) -> None:
    if ntk.shape != cov.shape or not ntk.is_floating_point():
        raise InputError(
            f"ntk is {ntk.dtype} of shape {list(ntk.shape)}; needed: the real tangent kernel of the pre-activations, "
            f"of cov's shape {list(cov.shape)}."
        )
    rank = len(batch.values)
    if eps == 0 and rank < 3:
        raise InputError(
            f"with eps=0 the tangent kernel through BatchNorm is infinite: the centred pre-activations of these "
            f"{len(cov)} samples have rank {rank}, and E[1/variance] is finite from rank 3. Give at least 4 different "
            "samples, or eps > 0 as torch has."
        )


def _centre(k: Tensor) -> Tensor:
    k = k - k.mean(0, keepdim=True)
    return k - k.mean(1, keepdim=True)


def _symmetric(k: Tensor) -> Tensor:
    return (k + k.mT) / 2


def _nodes(batch: _Batch, tangent: bool) -> tuple[Tensor, Tensor]:
    """s and weights such that Σ weight·f(s) = ∫ det(I + 2sS)^{−½} e^{−sBε} f(s) ds, f bounded by 1 (or by ‖C‖).

    The integrand is analytic in τ = log s for |Im τ| < π/2, so the trapezoidal rule converges exponentially. It has
    features between 1/(trace + Bε) and 1/(smallest eigenvalue), or where e^{−sBε} ends it: there the nodes are even in
    τ. Outside it falls as a power of s; there τ runs away exponentially.
    """
    values, eps = batch.values.detach(), float(batch.eps.detach())
    low = -2.0 - math.log1p(eps)
    high = 1.0 + (math.log(_TAIL / eps) if eps else -math.log(float(values[0])))
    start, stop = low - math.log(2 * _TAIL), high + math.log(4 * _TAIL)
    t = torch.arange(start, stop, _STEP, dtype=values.dtype, device=values.device)
    tau = t + torch.exp(t - high) - torch.exp(low - t)
    jump = tau + torch.log1p(torch.exp(t - high) + torch.exp(low - t)) + math.log(_STEP)
    s = tau.exp()
    log = jump - torch.log1p(2 * s[:, None] * batch.values).sum(1) / 2 - s * batch.eps
    # The forward integrand has one more factor C, which falls as 1/s.
    size = log.detach() if tangent else log.detach() - torch.log1p(2 * s * values[-1])
    kept = size > size.max() - _TAIL
    return s[kept], log[kept].exp()


def _damped(batch: _Batch, s: Tensor) -> Tensor:
    """The eigenvalues [q, k] of C = S(I + 2sS)⁻¹ at the nodes s."""
    return batch.values / (1 + 2 * s[:, None] * batch.values)


def _chunks(batch: _Batch, tangent: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Nodes, weights [q, 1, 1] and damped eigenvalues [q, 1, k], a few nodes at a time."""
    s, weight = _nodes(batch, tangent)
    size = max(1, _ENTRIES // batch.alive.numel())
    for part, w in zip(s.split(size), weight.split(size), strict=True):
        yield part[:, None, None], w[:, None, None], _damped(batch, part)[:, None]


def _forward(batch: _Batch, relu: bool) -> Tensor:
    """E[y yᵀ] = B ∫ … E_C[φ(g) φ(g)ᵀ] ds."""
    n = len(batch.vectors)
    if not relu:
        s, weight = _nodes(batch, tangent=False)
        return _symmetric(n * (batch.vectors * (weight @ _damped(batch, s))) @ batch.vectors.mT)
    # A loop over a few nodes at a time: all n² pairs of all nodes at once would not fit.
    total = torch.zeros_like(batch.alive)
    for _, weight, damped in _chunks(batch, tangent=False):
        root = batch.vectors * damped.sqrt()
        total = total + (weight * _arccos(root)[0]).sum(0)
    return _symmetric(n * total * batch.alive)


def _linear_tangent(batch: _Batch, theta: Tensor) -> Tensor:
    """E[J Θ Jᵀ] = B ∫ … {Θ − s(ΘC + CΘ) + s²/2 (tr(ΘC) C + 2 CΘC)} ds, in the eigenbasis of S: no loop over nodes."""
    vectors = batch.vectors
    s, weight = _nodes(batch, tangent=True)
    damped = _damped(batch, s)  # [q, k]
    inner = vectors.mT @ theta @ vectors
    first = (theta @ vectors * ((weight * s) @ damped)) @ vectors.mT
    pairs = (damped * (weight * s**2)[:, None]).mT @ damped  # [k, k]
    second = pairs * inner + torch.diag(pairs @ inner.diagonal()) / 2
    return len(theta) * (theta * weight.sum() - first - first.mT + vectors @ second @ vectors.mT)


def _relu_tangent(batch: _Batch, theta: Tensor) -> Tensor:
    """E[J Θ Jᵀ] = B ∫ … E_C[1_i 1_j {Θ_ij − s (g_i (Θg)_j + (Θg)_i g_j) + s²/2 g_i g_j gᵀΘg}] ds, 1_i = [g_i > 0].

    By parts, with e_ij = E[g_i⁺ δ(g_j)] = √(C_ii/C_jj) sin/2π, p = E[1_i 1_j] and a = E[g_i⁺ g_j⁺]:
      E[1_i 1_j g_i (Θg)_j]    = (CΘ)_ij p + (CΘ)_jj e_ij,
      E[1_i 1_j g_i g_j gᵀΘg]  = tr(ΘC) a + 2 (CΘC)_ij p + (CΘC)_jj e_ij + (CΘC)_ii e_ji,
    regular for equal samples, too. The sum below is such that its symmetric part is this one.
    """
    vectors, across = batch.vectors, theta @ batch.vectors
    inner = vectors.mT @ across
    total = torch.zeros_like(theta)
    for s, weight, damped in _chunks(batch, tangent=True):
        product, positive, edge = _arccos(vectors * damped.sqrt())
        first = (vectors * damped) @ across.mT  # CΘ
        second = (vectors * damped) @ inner @ (vectors * damped).mT  # CΘC
        trace = (damped * inner.diagonal()).sum(-1, keepdim=True)
        once = first * positive + first.diagonal(dim1=-2, dim2=-1)[:, None] * edge
        twice = trace / 2 * product + second * positive + second.diagonal(dim1=-2, dim2=-1)[:, None] * edge
        total = total + (weight * (theta * positive - 2 * s * once + s**2 * twice)).sum(0)
    return len(theta) * total * batch.alive


def _arccos(root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E[g_i⁺ g_j⁺], P(g_i, g_j > 0) and E[g_i⁺ δ(g_j)] for g ~ N(0, root·rootᵀ), root [q, n, k] (Cho, Saul 2009)."""
    angle, sine, cosine = _angles(root)
    size = root.norm(dim=-1)
    ahead = (math.pi - angle) / (2 * math.pi)
    edge = sine / (2 * math.pi)
    product = size[..., :, None] * size[..., None, :] * (edge + ahead * cosine)
    return product, ahead, edge * size[..., :, None] / torch.where(size > 0, size, torch.inf)[..., None, :]


def _angles(root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The angles between the rows of root, their sine and cosine; exact for rows that (almost) agree or oppose."""
    unit = torch.nn.functional.normalize(root, dim=-1, eps=torch.finfo(root.dtype).tiny)
    cosine = (unit @ unit.mT).clamp(-1, 1)
    same = torch.eye(cosine.shape[-1], dtype=torch.bool, device=cosine.device)
    gap = (1 - cosine.abs()).masked_fill(same, 0)
    close = (gap.detach() < 1e-3) & ~same  # where 1 − |cos| loses more than three digits: |u ∓ v|²/2 is the same
    where = close.nonzero(as_tuple=True)
    if len(where[0]):
        gap = gap.index_put(where, _gap(unit, cosine, where))
    apart = gap > 0
    sine = torch.where(apart, gap * (2 - gap), 1).sqrt() * apart  # no infinite slope at 0
    cosine = torch.where(close | same, torch.copysign(1 - gap, cosine), cosine)
    return torch.atan2(sine, cosine), sine, cosine


def _gap(unit: Tensor, cosine: Tensor, where: tuple[Tensor, ...]) -> Tensor:
    """|u_i ∓ u_j|²/2 for the pairs listed in `where`, a bounded number at a time."""
    rows, columns = where[:-2] + where[-2:-1], where[:-2] + where[-1:]
    sign = cosine.detach()[where].sign()
    gaps = []
    for part in torch.arange(len(sign), device=sign.device).split(max(1, _ENTRIES // unit.shape[-1])):
        u, v = unit[tuple(k[part] for k in rows)], unit[tuple(k[part] for k in columns)]
        gaps.append((u - sign[part, None] * v).square().sum(-1) / 2)
    return torch.cat(gaps)
