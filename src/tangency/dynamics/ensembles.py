"""What an ensemble of wide networks, each trained from its own initialisation, predicts."""

from collections.abc import Sequence

import torch

from .._base import checks
from .._base.types import Numbers
from ..errors import InputError
from ..linalg.eigen import spectrum
from ..linalg.matrix import Matrix, between, flattened, square, targets
from ..regress.gp import Posterior


def ensemble(
    ntk: Sequence[Matrix],
    nngp: Sequence[Matrix],
    y: Numbers,
    *,
    t: float = float("inf"),
    lr: float = 1.0,
    weight: float = 1.0,
    reg: float = 0.0,
) -> Posterior:
    """Mean A y and covariance κ + A Q Aᵀ − A qᵀ − q Aᵀ at time t, with A = k (K + reg)⁻¹ (1 − e^{−lr·w·(K + reg)·t}).

    `ntk` = (K, k): the Grams of the training samples with themselves and of the new samples with them. `nngp` =
    (Q, q, κ): the same of the kernel at initialisation, and that of the new samples with themselves. The loss is
    ½·`weight`·Σ_i ‖f(x_i) − y_i‖²; reg = 0 needs a K that can be inverted. With the last layer alone trained, ntk is
    nngp, and at t = ∞ this is the Gaussian process. Lee et al. 2019, "Wide neural networks of any depth…", (16).

    >>> import tangency as tg
    >>> net, x, z = tg.models.mlp([3, 64, 1]).double(), torch.randn(9, 3).double(), torch.randn(2, 3).double()
    >>> ntk, ck = tg.trace_ntk(net), tg.conjugate_kernel(net)
    >>> wide = tg.dynamics.ensemble((ntk(x), ntk(z, x)), (ck(x), ck(z, x), ck(z)), x[:, 0], reg=0.1)
    >>> wide.mean.shape, wide.covariance.shape
    (torch.Size([2]), torch.Size([2, 2]))
    """
    _check_grams(ntk, "ntk", 2, "(K, k): training samples with themselves, new ones with them")
    _check_grams(nngp, "nngp", 3, "(Q, q, κ): training samples with themselves, new ones with them and with themselves")
    tangent, prior = square(ntk[0], "the ntk"), square(nngp[0], "the nngp")
    side = tangent.shape[: len(tangent.shape) // 2]
    y = targets(y, side, tangent.dtype, tangent.device)
    whole = spectrum(tangent, dtype=y.dtype, device=y.device)
    values = whole.values + checks.nonnegative(reg, "reg")
    # A at t = ∞ is k (K + reg)⁻¹; eigenvalues of rounding would be inverted too.
    if t < 0 or float(values[-1]) <= whole.cutoff():
        raise InputError(
            f"t={t}, smallest eigenvalue of K + reg {float(values[-1]):.3g}; needed: t at least 0 and a K + reg that "
            "can be inverted. Give reg > 0."
        )
    grams = between(ntk[1]), prior, between(nngp[1]), between(nngp[2])
    k, prior_train, q, prior_new = (flattened(gram, y.dtype, y.device) for gram in grams)
    # How much of each mode is learned by t; expm1 keeps its digits where that is little.
    done = -torch.expm1(-checks.nonnegative(lr, "lr") * checks.nonnegative(weight, "weight") * values * t)
    # An ensemble member ends at f_∞(z) = f_0(z) + A (y − f_0(X)), with f_0 ~ GP(0, nngp): mean and covariance follow.
    a = (k @ whole.vectors * (done / values)) @ whole.vectors.T
    mean = a @ y.reshape(a.shape[1], -1)
    cross = a @ q.T
    covariance = prior_new + a @ prior_train @ a.T - cross - cross.T
    outer = ntk[1].shape[: len(ntk[1].shape) // 2]
    return Posterior(mean.reshape(outer[0], *y.shape[1:]), covariance.reshape(*outer, *outer))


def _check_grams(given: object, name: str, count: int, needed: str) -> None:
    """So many Grams: whatever else is given could only fail on the way."""
    if not isinstance(given, (tuple, list)) or len(given) != count:
        what = f"has {len(given)} Grams" if isinstance(given, (tuple, list)) else f"is a {type(given).__name__}"
        raise InputError(f"{name} {what}; needed: {count} Grams {needed}.")
