"""Neural collapse: how far samples have drawn together at the means of their classes (Papyan, Han & Donoho 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result, text_table
from .._base.targets import by_name, column, read_targets
from .._base.types import Array, Float, Int, Numbers
from ..errors import InputError
from ..linalg.decompose import svd
from .components import Rows, held, moments


@dataclass(frozen=True, eq=False, repr=False)
class Collapse(Result):
    """NC1 to NC4 of one layer; all are 0 where it has collapsed.

    With μ_c the mean of class c, μ the mean of these, m_c = μ_c − μ, and every class counting alike:

    `nc1`: tr(Σ_W Σ_B⁺)/C, the variance within classes over that between them. `nc2_norms`: the spread of ‖m_c‖ over
    their mean. `nc2_angles`: the spread of the cosines of m_c and m_d. `nc2_simplex`: the mean of |cosine + 1/(C − 1)|.
    `nc3`: ‖W/‖W‖ − M/‖M‖‖², the last layer's weights against the m_c. `nc4`: the share of samples that the network
    gives another class than that of the nearest mean. None where no weights or decisions are known.
    """

    nc1: float
    nc2_norms: float
    nc2_angles: float
    nc2_simplex: float
    nc3: float | None = None
    nc4: float | None = None

    def table(self) -> str:
        """Each with what it compares."""
        rows = [
            ("NC1", "variance within classes / between", self.nc1),
            ("NC2", "class means: spread of lengths", self.nc2_norms),
            ("NC2", "class means: spread of cosines", self.nc2_angles),
            ("NC2", "class means: |cosine + 1/(C − 1)|", self.nc2_simplex),
            ("NC3", "weights against class means", self.nc3),
            ("NC4", "decisions other than the nearest mean's", self.nc4),
        ]
        return text_table(["", "", "value"], [row for row in rows if row[2] is not None])


def collapse(features: Array, labels: Numbers, weights: Array | None = None, bias: Array | None = None) -> Collapse:
    """tr(Σ_W Σ_B⁺)/C and its companions for features [n, …] of n samples with these classes.

    `weights` [c, p] and `bias` [c] of the layer that follows add NC3 and NC4; of a network with one output, [1, p] and
    [1]. Features are taken as they are, flattened; on a GPU they stay there. Cost: O(n p c).

    >>> means = torch.eye(3).repeat(20, 1)  # 20 samples of 3 classes, all at the corners of a simplex
    >>> found = collapse(means, torch.arange(60) % 3, torch.eye(3) - 1 / 3)
    >>> round(found.nc1, 6), round(found.nc2_simplex, 6), round(found.nc3, 6), found.nc4
    (0.0, 0.0, 0.0, 0.0)
    """
    features = _real(features, "features")
    if features.dim() < 2 or not features.numel():
        raise InputError(f"features have the shape {tuple(features.shape)}; needed: [n, …], numbers for each sample.")
    flat = features.flatten(1)
    y, classes = checked_classes(labels, len(flat))
    y = y.to(flat.device)
    checks.finite(flat, "features")
    w, b, decisions = None, None, None
    if weights is not None:
        w, b = _last_layer(weights, bias, flat, classes)
        decisions = torch.cat([(part.double() @ w.T + b).argmax(1) for part in flat.split(4096)])
    elif bias is not None:
        raise InputError("bias is given without weights; needed: both of the layer that follows, or neither.")
    rows = held(flat)
    return of_rows(rows, y, moments(rows, y, classes).means, w, decisions)


def of_rows(
    rows: Rows, y: Int[Tensor, " n"], means: Float[Tensor, "c p"], weights: Tensor | None, decisions: Tensor | None
) -> Collapse:
    """As `collapse`, of features that pass by in blocks; `means`: of the classes."""
    c = len(means)
    centred = means - means.mean(0)
    _, lengths, directions = svd(centred)
    # c centred means span c − 1 dimensions; rounding leaves the last one a length.
    lengths = lengths[: c - 1]
    kept = lengths > max(centred.shape) * torch.finfo(torch.float64).eps * float(means.abs().max()) * c**0.5
    if not bool(kept.any()):
        raise InputError("the classes have equal means in this layer, so nothing lies between them. Look at another.")
    directions, places = directions[: c - 1][kept], centred.square().sum(1)
    counts = torch.bincount(y, minlength=c).to(means)
    within, differ = means.new_zeros(c, len(directions)), 0
    for at, block in rows.blocks():
        z, own = block.double() - means.mean(0), y[at].to(means.device)
        within.index_add_(0, own, ((z - centred[own]) @ directions.T).square())
        if decisions is not None:
            nearest = (places - 2 * z @ centred.T).argmin(1)
            differ += int((nearest != decisions[at].to(nearest.device)).sum())
    # Σ_B⁺ has c / length² along each direction, which cancels the C that the trace is divided by.
    nc1 = float(((within / counts[:, None]).mean(0) / lengths[kept].square()).sum())
    size = places.sqrt()
    cosines = (centred @ centred.T / (size[:, None] * size).clamp_min(1e-300))[
        ~torch.eye(c, dtype=torch.bool, device=means.device)
    ]
    return Collapse(
        nc1,
        float(size.std(correction=0) / size.mean()),
        float(cosines.std(correction=0)),
        float((cosines + 1 / (c - 1)).abs().mean()),
        None if weights is None else float((weights / weights.norm() - centred / centred.norm()).square().sum()),
        None if decisions is None else differ / rows.n,
    )


def checked_classes(labels: Numbers, n: int) -> tuple[Int[Tensor, " n"], int]:
    """One class for each of n samples, and how many classes there are: two or more, each with samples."""
    y = read_targets(labels, "labels").values if by_name(labels) else tree.numbers(column(labels), "labels")
    if y.dim() != 1 or y.is_floating_point() or y.is_complex() or len(y) != n:
        raise InputError(f"labels are {y.dtype} of shape {tuple(y.shape)}; needed: a class, from 0, for each of {n}.")
    y = y.long()
    low, most = (int(y.min()), int(y.max())) if n else (0, 0)
    if low < 0 or most < 1:
        raise InputError(f"labels go from {low} to {most}; needed: two classes or more, numbered from 0.")
    counts = torch.bincount(y)
    if not bool(counts.all()):
        raise InputError(f"no sample is of class {int(counts.argmin())}; needed: samples of every class from 0.")
    if n == len(counts):
        raise InputError(f"each of the {n} classes has one sample, so nothing varies within them; needed: more.")
    return y, len(counts)


def _real(given: Array, name: str) -> Tensor:
    value = tree.numbers(given)
    if not value.is_floating_point():
        raise InputError(f"{name} are {value.dtype}; needed: floating-point numbers.")
    return value


def _last_layer(weights: Array, bias: Array | None, flat: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """[c, p] and [c] in double precision; one output is the difference of two logits."""
    w = _real(weights, "weights")
    checks.beside(w, flat.device, "weights", "features")
    b = w.new_zeros(len(w)) if bias is None else _real(bias, "bias")
    checks.beside(b, flat.device, "bias", "features")
    if w.shape == (1, flat.shape[1]) and classes == 2 and b.shape == (1,):
        w, b = torch.cat([-w, w]) / 2, torch.cat([-b, b]) / 2
    if w.shape != (classes, flat.shape[1]) or b.shape != (classes,):
        raise InputError(
            f"weights have the shape {tuple(w.shape)} and the bias {tuple(b.shape)}; needed: "
            f"{(classes, flat.shape[1])} and {(classes,)}, for {classes} classes and {flat.shape[1]} features."
        )
    checks.finite(w, "weights")
    checks.finite(b, "bias")
    return w.double(), b.double()
