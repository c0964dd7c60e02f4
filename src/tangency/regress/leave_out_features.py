"""Leave-one-out of ridge regression through features, which may stream from disk: two passes over them.

With S = Φᵀ W Φ + reg·I the fit without the samples g misses them by (I − Φ_g S⁻¹ Φ_gᵀ W_g)⁻¹ r_g, where r are the
residuals of the fit to all: p² numbers and a block of rows are all that is held.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.progress import Tick, bar
from .._base.types import Numbers
from ..errors import InputError, NotPositiveDefinite
from ..linalg.factor import substitute
from ..linalg.matrix import targets
from ..projection.features import StoredFeatures
from .groups import GroupLabels, by_size, checked_groups
from .leave_out import LeftOut, leave_out
from .model import checked_f0
from .samples import SampleWeights, checked_weights

# Numbers of features that are held at a time (heuristic): 128 MiB in float64.
HELD = 1 << 24


def leave_out_features(
    features: Numbers | StoredFeatures,
    y: Numbers,
    *,
    reg: float,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
    groups: GroupLabels = None,
    progress: bool = True,
) -> LeftOut:
    """e_g = (I − Φ_g S⁻¹ Φ_gᵀ W_g)⁻¹ (y − f)_g with S = Φᵀ W Φ + reg·I: `leave_out` with the kernel Φ Φᵀ.

    Features [n, p], or [n, c, p] of a full kernel, in memory or stored (`tg.projection.open_features`), which are read
    twice, block by block; with groups whose samples are scattered, the second time by groups. In float64, where y lies
    for stored ones. Where there are no more rows than features it goes through Φ Φᵀ. `reg=0` needs features that are
    independent, also without any one of the groups. Golub, Heath & Wahba 1979. Cost: n p² + p³/3 multiply–adds, and p²
    numbers.

    >>> x, y = torch.randn(30, 4).double(), torch.randn(30).double()
    >>> left = leave_out_features(x, y, reg=0.1)
    >>> torch.allclose(left.predictions, leave_out(x @ x.T, y, reg=0.1).predictions)
    True
    """
    phi = features if isinstance(features, StoredFeatures) else tree.numbers(features, "features")
    if len(phi.shape) not in (2, 3) or not phi.dtype.is_floating_point or 0 in phi.shape:
        raise InputError(f"features have shape {tuple(phi.shape)}, {phi.dtype}; needed: real [n, p] or [n, c, p].")
    reg = checks.nonnegative(reg, "reg")
    y = targets(y, phi.shape[:-1], torch.float64, phi.device if isinstance(phi, Tensor) else None)
    labels = checked_groups(groups, len(phi), y.device)
    w = checked_weights(sample_weights, len(phi), y)
    begin = None if f0 is None else checked_f0(f0, y, "f0")
    if phi.shape[:-1].numel() <= phi.shape[-1]:
        held = phi.tensor().to(y) if isinstance(phi, StoredFeatures) else phi.to(y)
        checks.finite(held, "features")
        K = torch.tensordot(held, held, dims=([-1], [-1]))
        return leave_out(K, y, reg=reg, f0=begin, sample_weights=w, groups=labels, progress=progress)
    t = (y if begin is None else y - begin).reshape(len(phi), phi.shape[:-1].numel() // len(phi), -1)
    rows = _Rows(phi, t, torch.ones_like(t[:, 0, 0]) if w is None else w)
    errors, leverage = torch.empty_like(t), torch.empty_like(t[:, 0, 0])
    with bar(2 * len(phi), "leave out", "sample", show=progress) as tick:
        fit = _normal_fit(rows, reg, tick)
        for members, x in rows.groups(labels):
            off, diagonal = _left(fit, x, t[members].flatten(1, 2), rows.spread[members].flatten(1, 2), reg)
            errors[members] = off.reshape(*members.shape, *t.shape[1:])
            leverage[members] = diagonal.reshape(*members.shape, -1).mean(-1)
            tick(members.numel())
    errors = errors.reshape(y.shape)
    return LeftOut(y - errors, errors, leverage, reg, "Cholesky of the features", fit.residual)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Features by blocks of samples, beside their targets t [n, c, q] and weights w [n]."""

    phi: Tensor | StoredFeatures
    t: Tensor
    w: Tensor

    @property
    def spread(self) -> Tensor:
        """The weights, [n, c, 1]: the outputs of a sample share its weight."""
        return self.w[:, None, None].expand(*self.t.shape[:2], 1)

    @property
    def step(self) -> int:
        """Samples of a block."""
        return max(1, HELD // self.phi.shape[1:].numel())

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """(samples, features [m, c, p] in the type of the work) in the order in which they lie."""
        whole = self.phi.blocks() if isinstance(self.phi, StoredFeatures) else [(slice(0, len(self.phi)), self.phi)]
        for samples, block in whole:
            for start in range(0, len(block), self.step):
                part = block[start : start + self.step].to(self.t)
                first = samples.start + start
                yield slice(first, first + len(part)), part.reshape(len(part), -1, part.shape[-1])

    def groups(self, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(members [g, m], features [g, m·c, p]) of all groups."""
        sizes = by_size(labels)
        if len(sizes) == 1 and sizes[0].shape[1] == 1:  # single samples, as they lie
            for samples, x in self.pieces():
                yield torch.arange(samples.start, samples.stop, device=labels.device)[:, None], x
            return
        for members in sizes:
            for part in members.split(max(1, self.step // members.shape[1])):
                index = part.flatten()
                x = self.phi[index.cpu() if isinstance(self.phi, StoredFeatures) else index.to(self.phi.device)]
                yield part, x.to(self.t).reshape(len(part), -1, x.shape[-1])


@dataclass(frozen=True, eq=False)
class _NormalFit:
    """γ [p, q] of S γ = Φᵀ W t, S with its Cholesky factor, and ‖S γ − Φᵀ W t‖ / ‖Φᵀ W t‖."""

    gamma: Tensor
    normal: Tensor
    lower: Tensor
    residual: float


def _normal_fit(rows: _Rows, reg: float, tick: Tick) -> _NormalFit:
    """One pass over the features."""
    p = rows.phi.shape[-1]
    normal, right = rows.t.new_zeros(p, p), rows.t.new_zeros(p, rows.t.shape[2])
    for samples, x in rows.pieces():
        if not bool(x.sum().isfinite()):
            checks.finite(x, f"features[{samples.start}:{samples.stop}]")
        flat, weighted = x.flatten(0, 1), (x * rows.spread[samples]).flatten(0, 1)
        normal += flat.T @ weighted
        right += weighted.T @ rows.t[samples].flatten(0, 1)
        tick(len(x))
    diagonal = normal.diagonal().clone()
    normal.diagonal().add_(reg)
    lower, failed = torch.linalg.cholesky_ex(normal)
    # A pivot of rounding alone, as in linalg/factor.py: no larger than the errors of sums of this size (heuristic).
    if failed or bool((lower.diagonal().square() <= _rounding(p) * (diagonal + reg)).any()):
        raise NotPositiveDefinite(
            f"Φᵀ W Φ + {reg:g}·I is not positive definite: the {p} features depend on each other beyond rounding. Give "
            f"a larger reg (a start: {1e-6 * float(diagonal.max()):.1g}), or leave out features that are combinations "
            "of others."
        )
    gamma = substitute(lower, right)
    residual = float((normal @ gamma - right).norm() / right.norm().clamp_min(torch.finfo(right.dtype).tiny))
    return _NormalFit(gamma, normal, lower, residual)


def _rounding(p: int) -> float:
    return 30 * p**0.5 * torch.finfo(torch.float64).eps


def _left(fit: _NormalFit, x: Tensor, t: Tensor, w: Tensor, reg: float) -> tuple[Tensor, Tensor]:
    """Errors [g, s, q] without these groups, and the hat matrix's diagonal [g, s]; x [g, s, p], t, w [g, s, 1]."""
    s, p = x.shape[1:]
    r, root = t - x @ fit.gamma, w.sqrt()
    half = torch.linalg.solve_triangular(fit.lower, x.reshape(-1, p).T, upper=False).T.reshape(x.shape)
    diagonal = w[..., 0] * half.square().sum(2)
    # (I − P W)⁻¹ = I + P √W (I − √W P √W)⁻¹ √W, P = X S⁻¹ Xᵀ: symmetric inside, and W may have zeros.
    if s <= p:
        half_w = half * root
        inner = torch.eye(s, dtype=x.dtype, device=x.device) - half_w @ half_w.mT
        lower, failed = torch.linalg.cholesky_ex(inner)
        _check_left(lower, failed, inner.new_ones(()), reg)
        return r + half @ (half_w.mT @ torch.cholesky_solve(root * r, lower)), diagonal
    # More rows than features: what is left of S, once they are gone, is the smaller matrix. = I + X (S − Xᵀ W X)⁻¹ Xᵀ W
    rest = fit.normal - x.mT @ (w * x)
    lower, failed = torch.linalg.cholesky_ex(rest)
    _check_left(lower, failed, fit.normal.diagonal(), reg)
    return r + x @ torch.cholesky_solve(x.mT @ (w * r), lower), diagonal


def _check_left(lower: Tensor, failed: Tensor, scale: Tensor, reg: float) -> None:
    """Refuse groups without which the others do not determine the fit, beyond rounding."""
    least = lower.diagonal(dim1=1, dim2=2).square()
    if bool(failed.any()) or bool((least <= _rounding(lower.shape[1]) * scale).any()):
        raise NotPositiveDefinite(
            f"with reg={reg:g} the samples that stay do not determine the fit beyond rounding once one of the groups "
            "(or samples) is left out: some features are seen in it alone. Give a larger reg, or the kernel itself: "
            "tg.regress.leave_out(features @ features.T, …)."
        )
