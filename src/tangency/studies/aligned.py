"""How far a trained two-layer network points where its teacher does, and at which learning rate it begins to.

Wang, Engel, Sarwate, Dumitriu and Chiang, "Spectral evolution and invariance in linear-width neural networks"
(arXiv:2211.06506), section 4; kernel target alignment: Cristianini et al. 2001.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float
from ..errors import DidNotConverge, InputError
from ..linalg import top as top_pairs
from ..spectra import label_alignment, principal_angles, target_alignment
from .students import Optimizer, train_two_layer
from .teachers import Taught
from .two_layer import TwoLayer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Above the Marchenko–Pastur edge by so many of its fluctuations, an eigenvalue of W Wᵀ/d is an outlier: one random W in
# a thousand has its largest above 3.3 of them (Tracy and Widom's law for real matrices).
FLUCTUATIONS = 4.0


@dataclass(frozen=True, eq=False, repr=False)
class Alignments(Result):
    """Where the first directions of W, of the CK and of the NTK point.

    `largest`: λ₁ of W Wᵀ/d, of both kernels. `feature`: ‖β u₁‖, |βᵀu₁|/‖β‖ of a single direction, u₁ the first right
    singular vector of W. `labels`: |yᵀv₁|/‖y‖, v₁ the kernel's first eigenvector. `kta`: ⟨K, y yᵀ⟩/(‖K‖_F ‖y‖²).
    `angles`: between the span of the teacher's directions and that of the first right singular vectors of W.
    """

    largest: Mapping[str, float]
    feature: float
    labels: Mapping[str, float]
    kta: Mapping[str, float]
    angles: Float[Tensor, " k"]

    UNITS: ClassVar[Mapping[str, str]] = {"angles": "radian"}

    def table(self) -> str:
        """A line for W, the CK and the NTK."""
        rows = [["W", self.largest["weights"], self.feature, ""]]
        rows += [[name.upper(), self.largest[name], self.labels[name], self.kta[name]] for name in ("ck", "ntk")]
        return text_table(["", "λ₁", "aligned", "KTA"], rows)


def alignments(net: TwoLayer, data: Taught, *, top: int = 100) -> Alignments:
    """|βᵀu₁|/‖β‖, |yᵀv₁|/‖y‖, KTA and principal angles with the `top` first directions of W, on the training samples.

    `tg.spectra` has each of them for any kernel and weights. Cost: an eigenpair of both kernels, an SVD of W.

    >>> from tangency.studies import alignments, teacher, two_layer
    >>> found = alignments(two_layer(30, 90), teacher(60, 30), top=5)
    >>> sorted(found.kta), found.angles.shape
    (['ck', 'ntk'], torch.Size([1]))
    """
    u = torch.linalg.svd(net.w.double(), full_matrices=False)
    largest = {"weights": float(u.S[0]) ** 2 / net.w.shape[1]}
    labels, kta = {}, {}
    for name, kernel in (("ck", net.ck(data.x)), ("ntk", net.ntk(data.x))):
        first = top_pairs(kernel, 1, progress=False)
        largest[name] = float(first.values[0])
        labels[name] = label_alignment(first, data.y)
        kta[name] = target_alignment(kernel, data.y)
    feature = float((data.beta.double() @ u.Vh[0]).norm())
    return Alignments(largest, feature, labels, kta, principal_angles(data.beta.double().T, u.Vh[:top].T))


def follow(data: Taught, *, top: int = 100) -> Callable[[TwoLayer], dict[str, float]]:
    """For `train_two_layer(watch=…)`: R², |βᵀu₁|, KTA of the CK, principal angles with `top` directions, at each look.

    >>> from tangency.studies import Optimizer, follow, train_two_layer, teacher, two_layer
    >>> data = teacher(60, 30)
    >>> gd, seen = Optimizer("gd", 5.0), follow(data)
    >>> run = train_two_layer(two_layer(30, 90), data, gd, epochs=3, watch=seen, progress=False)
    >>> sorted(run.seen[0])
    ['angle 1', 'epoch', 'feature', 'kta', 'r2']
    """

    def look(net: TwoLayer) -> dict[str, float]:
        """What is followed, of the network as it is now."""
        rows = torch.linalg.eigh(net.w.T @ net.w)[1].flip(1).T[:top]
        a = net.hidden(data.x)
        # ⟨AAᵀ, yyᵀ⟩ = ‖Aᵀy‖² and ‖AAᵀ‖_F = ‖AᵀA‖_F: no [n, n].
        kta = (a.T @ data.y).square().sum() / ((a.T @ a).norm() * data.y.square().sum())
        angles = {f"angle {i + 1}": float(v) for i, v in enumerate(principal_angles(data.beta.T, rows.T))}
        first = float((data.beta @ rows[0]).norm())
        return {"r2": data.r2(net(data.x_test)), "feature": first, "kta": float(kta), **angles}

    return look


def outlier_edge(h: int, d: int) -> float:
    """What an eigenvalue of W Wᵀ/d must exceed to be no part of a random W's bulk, W [h, d] of N(0, 1).

    (√h + √d)²/d and 4 fluctuations, (√h + √d)(h^−½ + d^−½)^⅓/d each (Johnstone 2001).
    """
    both = h**0.5 + d**0.5
    return (both**2 + FLUCTUATIONS * both * (h**-0.5 + d**-0.5) ** (1 / 3)) / d


@dataclass(frozen=True, eq=False, repr=False)
class Transition(Result):
    """What SGD leaves at each learning rate: λ₁ of W Wᵀ/d and of the CK, alignments, R² and test error (nan: diverged).

    `edge`: above it, an eigenvalue of W Wᵀ/d is an outlier. `threshold`: the learning rate between the last without
    outlier and the first from which on all have one (geometric mean; nan where there is none).
    """

    batch: int | None
    lrs: tuple[float, ...]
    weights: Float[Tensor, " r"]
    ck: Float[Tensor, " r"]
    feature: Float[Tensor, " r"]
    labels_ck: Float[Tensor, " r"]
    labels_ntk: Float[Tensor, " r"]
    r2: Float[Tensor, " r"]
    error: Float[Tensor, " r"]
    edge: float
    initial: Alignments
    threshold: float

    UNITS: ClassVar[Mapping[str, str]] = {"error": "mean square"}

    def table(self) -> str:
        """A line for each learning rate."""
        columns = (v.tolist() for v in (self.weights, self.ck, self.feature, self.labels_ck, self.labels_ntk,
                                        self.r2, self.error))  # fmt: skip
        head = ["lr", "λ₁(W Wᵀ/d)", "λ₁(CK)", "|βᵀu₁|", "|yᵀv₁| CK", "|yᵀv₁| NTK", "R²", "test error"]
        rows = zip(self.lrs, *columns, strict=True)
        return text_table(head, [[lr, *(f"{v:.3f}" for v in row)] for lr, *row in rows])

    def plot(self) -> "Figure":
        """λ₁, alignments and the test error over the learning rate, the threshold marked."""
        from .student_pictures import draw_transition

        return draw_transition(self)


def transition(
    net: TwoLayer,
    data: Taught,
    lrs: Sequence[float],
    *,
    batch: int | None = 16,
    until: float = 1e-5,
    epochs: int = 20_000,
    progress: bool = True,
) -> Transition:
    """|βᵀu₁|, λ₁ and the test error after SGD at each learning rate, the same network and samples: where spikes begin.

    Each is trained until L < `until`; at most `epochs`. What diverges is nan. Cost: a training for each.

    >>> from tangency.studies import teacher, transition, two_layer
    >>> found = transition(two_layer(30, 45), teacher(60, 30), [1.0, 4.0], epochs=50, progress=False)
    >>> found.feature.shape
    torch.Size([2])
    """
    rising = sorted(float(lr) for lr in lrs)
    if not rising or rising[0] <= 0:
        raise InputError(f"lrs={list(lrs)}; needed: learning rates above 0, such as [1, 2, 4, 8, 16].")
    rows = [rate_row(net, data, lr, batch=batch, until=until, epochs=epochs, progress=progress) for lr in rising]
    return gathered(net, data, batch, rising, rows)


def rate_row(
    net: TwoLayer, data: Taught, lr: float, *, batch: int | None, until: float, epochs: int, progress: bool
) -> list[float]:
    """λ₁ of W Wᵀ/d and of the CK, the three alignments, R² and test error of one training; nan where it diverges."""
    try:
        run = train_two_layer(net, data, Optimizer("sgd", lr, batch), until=until, epochs=epochs, progress=progress)
    except DidNotConverge:
        return [math.nan] * 7
    a = alignments(run.network, data, top=1)
    return [a.largest["weights"], a.largest["ck"], a.feature, a.labels["ck"], a.labels["ntk"], run.r2, run.error]


def gathered(
    net: TwoLayer, data: Taught, batch: int | None, lrs: Sequence[float], rows: Sequence[Sequence[float]]
) -> Transition:
    """The rows of `rate_row` for rising learning rates, and where outliers begin."""
    edge = outlier_edge(*net.w.shape)
    weights, ck, feature, labels_ck, labels_ntk, r2, error = torch.tensor(rows, dtype=torch.float64).T
    return Transition(
        batch=batch,
        lrs=tuple(lrs),
        weights=weights,
        ck=ck,
        feature=feature,
        labels_ck=labels_ck,
        labels_ntk=labels_ntk,
        r2=r2,
        error=error,
        edge=edge,
        initial=alignments(net, data, top=1),
        threshold=_threshold(lrs, weights, edge),
    )


def _threshold(lrs: Sequence[float], largest: Tensor, edge: float) -> float:
    """Between the last learning rate without outlier and the next."""
    known = [(lr, value > edge) for lr, value in zip(lrs, largest.tolist(), strict=True) if value == value]
    below = [k for k, (_, out) in enumerate(known) if not out]
    if not below or below[-1] + 1 >= len(known):
        return math.nan
    return math.sqrt(known[below[-1]][0] * known[below[-1] + 1][0])
