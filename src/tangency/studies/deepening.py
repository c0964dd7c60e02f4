"""Tangent kernels of deeper and deeper networks, and what their eigenvalues say: the work behind `trainability`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._base import checks, tree
from .._base.progress import bar
from .._base.types import Numbers
from ..errors import InputError
from ..infinite import Infinite, infinite_ntk
from ..infinite.activations.dual import Dual
from ..infinite.compose import Composable

# What makes the network of a depth and a weight variance: a module, layers, or its kernel.
Network = Callable[[int, float], Composable | Infinite]
# λ_min below this multiple of n·ε·λ_max is what rounding leaves after many layers (heuristic: measured about 10).
LOST = 64


class Spectra(NamedTuple):
    """What is said of Θ at each depth and σ_w², [depths, w_vars] each (or [w_vars], at one depth)."""

    largest: Tensor
    smallest: Tensor
    kappa: Tensor
    predictor: Tensor


def deepen(
    samples: "Samples", depths: Sequence[int], w_vars: Sequence[float], b_var: float, dual: Dual, progress: bool
) -> Spectra:
    """One recursion over the depth for all σ_w²."""
    wanted, x = _depths(depths), samples.x
    # [w, 1], so that all σ_w² go through each layer at once.
    w = torch.tensor([checks.nonnegative(v, "w_var") for v in w_vars], dtype=x.dtype, device=x.device)[:, None]
    b = checks.nonnegative(b_var, "b_var")
    points = x if samples.test is None else torch.cat([x, samples.test])
    own = w * points.square().mean(1) + b  # [w, n + m]: each sample with itself
    # Each sample with itself is kept apart: among others its angle would be rounded in every layer.
    gram = _Grams(_with_diagonal(w[:, :, None] * (points @ x.T / x.shape[1]) + b, own), own)
    at: dict[int, Spectra] = {}
    with bar(wanted[-1], "depth", "layer", show=progress) as tick:
        for depth in range(wanted[-1] + 1):
            if depth:
                gram.deepen(dual, w, b)
                tick()
            if depth in wanted:
                at[depth] = spectra(gram.ntk, len(x), samples.y)
    return Spectra(*(torch.stack([at[d][k] for d in depths]) for k in range(4)))


def deepen_networks(
    samples: "Samples", depths: Sequence[int], w_vars: Sequence[float], b_var: float, network: Network, progress: bool
) -> Spectra:
    """A kernel of its own for each depth and σ_w², by `infinite_ntk`."""
    wanted = _depths(depths)
    variances = [checks.nonnegative(v, "w_var") for v in w_vars]
    b = checks.nonnegative(b_var, "b_var")
    at: dict[int, Spectra] = {}
    with bar(len(wanted) * len(variances), "networks", "kernel", show=progress) as tick:
        for depth in wanted:
            grams = []
            for w in variances:
                grams.append(_gram(network, depth, w, b, samples))
                tick()
            at[depth] = spectra(torch.stack(grams), len(samples.x), samples.y)
    return Spectra(*(torch.stack([at[d][k] for d in depths]) for k in range(4)))


def _gram(network: Network, depth: int, w_var: float, b_var: float, samples: "Samples") -> Tensor:
    """Θ of all samples [n + m] with the training samples [n], of one network with one output."""
    made = network(depth, w_var)
    kernel = made if isinstance(made, Infinite) else infinite_ntk(made, w_var=w_var, b_var=b_var)
    train = kernel(samples.x)
    if train.dim() != 2:
        raise InputError(
            f"network({depth}, {w_var:g}) has outputs with positions: its kernel is {tuple(train.shape)}; needed: "
            "[n, n], one output a sample. End it in a pooling or nn.Flatten, and nn.Linear."
        )
    return train if samples.test is None else torch.cat([train, kernel(samples.test, samples.x)])


class _Grams:
    """K and Θ of all samples [w, n + m] with the training samples [n], at one depth; own values beside them."""

    def __init__(self, cov: Tensor, own: Tensor) -> None:
        self.cov, self.ntk, self.own, self.own_ntk = cov, cov, own, own  # of a linear layer both are the same

    def deepen(self, dual: Dual, w: Tensor, b: float) -> None:
        """K ← σ_w² E[φφ] + σ_b², Θ ← K + σ_w² E[φ'φ'] Θ."""
        n = self.cov.shape[-1]
        value, slope = dual.both(self.cov, self.own[:, :, None], self.own[:, None, :n])
        own_value, own_slope = dual.own(self.own)
        assert slope is not None
        assert own_slope is not None
        # The order counts: the new K is in the new Θ, the old Θ as well.
        self.own, before = w * own_value + b, self.own_ntk
        self.own_ntk = self.own + w * own_slope * before
        self.cov = _with_diagonal(w[:, :, None] * value + b, self.own)
        self.ntk = _with_diagonal(self.cov + w[:, :, None] * slope * self.ntk, self.own_ntk)


def _with_diagonal(gram: Tensor, own: Tensor) -> Tensor:
    """The same with each training sample's own value on the diagonal."""
    n = gram.shape[-1]
    gram = gram.clone()
    gram[:, :n].diagonal(dim1=1, dim2=2).copy_(own[:, :n])
    return gram


def spectra(ntk: Tensor, n: int, y: Tensor | None) -> Spectra:
    """λ_max, λ_min, κ and the predictor's size of each Θ in [w, n + m, n]."""
    # Chaotic kernels overflow at great depths; eigh refuses infinite entries.
    finite = ntk.isfinite().flatten(1).all(1)
    ntk = torch.where(finite[:, None, None], ntk, 0.0)
    values, vectors = torch.linalg.eigh(ntk[:, :n])
    largest, smallest = values[:, -1], values[:, 0]
    # Below, the smallest eigenvalue is rounding, and its inverse would be noise.
    sound = smallest > LOST * n * torch.finfo(values.dtype).eps * largest
    kappa = torch.where(sound, largest / smallest, torch.where(finite, math.inf, math.nan))
    size = torch.full_like(largest, math.nan)
    if ntk.shape[1] > n:
        inverse = (vectors / torch.where(sound[:, None], values, 1.0)[:, None]) @ vectors.mT
        size = torch.where(sound, _predictor_size(ntk[:, n:] @ inverse, y), size)
    return Spectra(largest, smallest, kappa, size)


def _predictor_size(predictor: Tensor, y: Tensor | None) -> Tensor:
    """The root mean square of P y over that of y; of the worst centred y where none is given."""
    m, n = predictor.shape[1:]
    if y is None:
        # Centred labels only: P (1 − 11ᵀ/n), whose spectral norm is the worst case.
        centred = predictor - predictor.mean(2, keepdim=True)
        return torch.linalg.matrix_norm(centred, 2) * (n / m) ** 0.5
    return (predictor @ y).flatten(1).norm(dim=1) / y.norm() * (n / m) ** 0.5


@dataclass(frozen=True, eq=False)
class Samples:
    """Training samples x [n, …] in float64, test samples [m, …] and centred labels y [n, c], where there are any."""

    x: Tensor
    test: Tensor | None
    y: Tensor | None

    @classmethod
    def checked(cls, x: object, x_test: object, y: Numbers | None, flat: bool = True) -> "Samples":
        """Refuse what Θ cannot be computed or judged for; `flat`: samples are vectors."""
        x = tree.from_array(x, "x") if isinstance(x, np.ndarray) else x
        x_test = tree.from_array(x_test, "x_test") if isinstance(x_test, np.ndarray) else x_test
        if not isinstance(x, Tensor) or x.dim() < 2 or len(x) < 2 or (flat and x.dim() != 2):
            what = "[n, i] of two samples or more. Flatten images" if flat else "of two samples or more, [n, …]"
            raise InputError(f"x is {_shape(x)}; needed: a tensor {what}.")
        checks.finite(x, "x")
        test: Tensor | None = None
        if x_test is not None:
            if not isinstance(x_test, Tensor) or x_test.shape[1:] != x.shape[1:] or not len(x_test):
                raise InputError(f"x_test is {_shape(x_test)}; needed: a tensor {_like(x)}, as x has.")
            checks.finite(x_test, "x_test")
            test = x_test.to(x.device, torch.float64)
        return cls(x.double(), test, None if y is None else _centred_labels(tree.numbers(y), x))


def _centred_labels(y: Tensor, x: Tensor) -> Tensor:
    labels = y.to(x.device, torch.float64)
    if len(labels) != len(x) or labels.dim() > 2:
        raise InputError(f"y is {_shape(labels)}; needed: [{len(x)}] or [{len(x)}, c], a row for each sample of x.")
    labels = labels.reshape(len(x), -1)
    labels = labels - labels.mean(0)
    if float(labels.norm()) == 0:
        raise InputError("y is constant; needed: labels that differ, since they are centred. Give one-hot rows or ±1.")
    return labels


def _like(x: Tensor) -> str:
    return f"[m, {', '.join(map(str, x.shape[1:]))}]"


def _shape(value: object) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _depths(depths: object) -> list[int]:
    """The depths in rising order, each once."""
    counts = list(depths) if isinstance(depths, Sequence) else []
    if not counts or not all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in counts):
        raise InputError(
            f"depths={depths!r}; needed: a list of numbers of activations, at least 0, such as [1, 10, 100]."
        )
    return sorted(set(counts))
