"""Which depths and weight variances a network can be trained and generalise at, by its limit alone.

Xiao, Pennington and Schoenholz 2020, "Disentangling trainability and generalization in deep neural networks". Networks
are fully connected, f = W φ(… φ(W x + b) …) + b with `depth` activations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._base import checks, tree
from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Array, Float, Numbers
from ..errors import InputError
from ..infinite.activations.dual import Dual
from .phases import Activation, Phase, boundary, find_dual, phase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# λ_min below this multiple of n·ε·λ_max is what rounding leaves after many layers (heuristic: measured about 10).
LOST = 64


@dataclass(frozen=True, eq=False, repr=False)
class Condition(Result):
    """κ(Θ^(l)) = λ_max/λ_min and the mean predictor's size by depth l.

    κ is inf and the predictor nan where λ_min is lost in float64's rounding (below 64 n·ε·λ_max); both are nan where
    Θ overflows.

    >>> import tangency as tg
    >>> tg.studies.condition(torch.eye(3), [0], w_var=3.0, activation="relu").kappa
    tensor([1.], dtype=torch.float64)
    """

    depths: tuple[int, ...]
    largest: Float[Tensor, " d"]
    smallest: Float[Tensor, " d"]
    kappa: Float[Tensor, " d"]
    predictor: Float[Tensor, " d"]

    UNITS: ClassVar[Mapping[str, str]] = {"depths": "activations"}

    def table(self) -> str:
        """A line for each depth: λ_max, λ_min, κ and the mean predictor's size."""
        columns = (v.tolist() for v in (self.largest, self.smallest, self.kappa, self.predictor))
        return text_table(["depth", "λ_max", "λ_min", "κ", "predictor"], zip(self.depths, *columns, strict=True))


@dataclass(frozen=True, eq=False, repr=False)
class Trainability(Result):
    """κ(Θ^(l)) [depths, w_vars] and the mean predictor's size, beside the phase of each σ_w² and the boundary.

    `critical`: σ_w² of the boundary at this σ_b²; `edge`: (σ_b², σ_w²) along it.
    """

    activation: str
    b_var: float
    w_vars: tuple[float, ...]
    depths: tuple[int, ...]
    kappa: Float[Tensor, "d w"]
    predictor: Float[Tensor, "d w"]
    phases: tuple[Phase, ...]
    critical: float
    edge: tuple[Tensor, Tensor]

    UNITS: ClassVar[Mapping[str, str]] = {"depths": "activations"}

    def table(self) -> str:
        """κ(Θ) by depth and σ_w², the phase of each σ_w² below."""
        rows = [[str(depth), *row.tolist()] for depth, row in zip(self.depths, self.kappa, strict=True)]
        rows.append(["phase", *(p.phase for p in self.phases)])
        return text_table(["depth", *(f"σ_w²={w:g}" for w in self.w_vars)], rows)

    def plot(self) -> "Figure":
        """Order and chaos in the plane of variances, κ(Θ) and the mean predictor over depth and σ_w²."""
        from ..plots import draw_phase

        return draw_phase(self)


def condition(
    x: Array,  # [n, i]
    depths: Sequence[int],
    *,
    w_var: float,
    b_var: float = 0.0,
    activation: Activation,
    x_test: Array | None = None,  # [m, i]
    y: Numbers | None = None,
    progress: bool = True,
) -> Condition:
    """κ(Θ^(l)) = λ_max/λ_min, how hard it is to train, and ‖P(Θ^(l)) y‖, P = Θ_test,train Θ_train,train⁻¹, by depth l.

    Θ^(l) is the NTK of the network with l activations, as `infinite_ntk` has it. `predictor`: the root mean square of
    P(Θ) y over `x_test`, over that of the centred labels y; without y, the largest of all centred labels. It needs
    x_test, and is nan without. Asymptotically (Xiao et al., table 1, smooth φ, n samples of equal norm): ordered,
    κ ~ 1/(l χ₁^l) and P stays; critical, κ → (n + 2)/2 and P ~ 1/l; chaotic, κ → 1 and P ~ l (χ_c*/χ₁)^l.
    Cost: one pass over the depth, O((n + m) n) a layer, an eigendecomposition at each of `depths`.

    >>> from tangency.infinite import Erf
    >>> from tangency.studies import condition
    >>> x = torch.nn.functional.normalize(torch.randn(8, 20)) * 20**0.5
    >>> float(condition(x, [60], w_var=4.0, activation=Erf()).kappa[0])  # chaotic
    1.0000...
    """
    dual, samples = find_dual(activation), _Samples.checked(x, x_test, y)
    spectra = _deepen(samples, depths, [w_var], b_var, dual, progress)
    return Condition(tuple(depths), *(v[:, 0] for v in spectra))


def trainability(
    x: Array,  # [n, i]
    depths: Sequence[int],
    w_vars: Sequence[float],
    *,
    b_var: float = 0.0,
    activation: Activation,
    x_test: Array | None = None,  # [m, i]
    y: Numbers | None = None,
    progress: bool = True,
) -> Trainability:
    """κ(Θ^(l)) and ‖P(Θ^(l)) y‖ over a grid of depths l and weight variances σ_w²: order and chaos in one picture.

    Options and cost as for `condition`, all σ_w² in the same pass.

    >>> from tangency.infinite import Erf
    >>> from tangency.studies import trainability
    >>> grid = trainability(torch.randn(6, 9), [1, 8, 16], [0.5, 2.0], b_var=0.05, activation=Erf())
    >>> grid.kappa.shape, [p.phase for p in grid.phases]
    (torch.Size([3, 2]), ['ordered', 'chaotic'])
    """
    dual = find_dual(activation)
    if not len(w_vars):
        raise InputError("w_vars is empty; needed: one weight variance or more.")
    phases = tuple(phase(dual, w_var=w, b_var=b_var) for w in w_vars)
    spectra = _deepen(_Samples.checked(x, x_test, y), depths, w_vars, b_var, dual, progress)
    high = max(2 * float(b_var), 1.0)
    at = high * torch.linspace(0, 1, 41, dtype=torch.float64) ** 3  # it begins as a cube root
    critical = float(boundary(dual, [b_var])[0])
    name = str(dual.spec().get("name", type(dual).__name__))
    edge = (at, boundary(dual, at))
    return Trainability(
        activation=name,
        b_var=float(b_var),
        w_vars=tuple(map(float, w_vars)),
        depths=tuple(depths),
        kappa=spectra.kappa,
        predictor=spectra.predictor,
        phases=phases,
        critical=critical,
        edge=edge,
    )


class _Spectra(NamedTuple):
    """What is said of Θ at each depth and σ_w², [depths, w_vars] each (or [w_vars], at one depth)."""

    largest: Tensor
    smallest: Tensor
    kappa: Tensor
    predictor: Tensor


def _deepen(
    samples: "_Samples", depths: Sequence[int], w_vars: Sequence[float], b_var: float, dual: Dual, progress: bool
) -> _Spectra:
    """One recursion over the depth for all σ_w²."""
    wanted, x = _depths(depths), samples.x
    # [w, 1], so that all σ_w² go through each layer at once.
    w = torch.tensor([checks.nonnegative(v, "w_var") for v in w_vars], dtype=x.dtype, device=x.device)[:, None]
    b = checks.nonnegative(b_var, "b_var")
    points = x if samples.test is None else torch.cat([x, samples.test])
    own = w * points.square().mean(1) + b  # [w, n + m]: each sample with itself
    # Each sample with itself is kept apart: among others its angle would be rounded in every layer.
    gram = _Grams(_with_diagonal(w[:, :, None] * (points @ x.T / x.shape[1]) + b, own), own)
    at: dict[int, _Spectra] = {}
    with bar(wanted[-1], "depth", "layer", show=progress) as tick:
        for depth in range(wanted[-1] + 1):
            if depth:
                gram.deepen(dual, w, b)
                tick()
            if depth in wanted:
                at[depth] = _spectra(gram.ntk, len(x), samples.y)
    return _Spectra(*(torch.stack([at[d][k] for d in depths]) for k in range(4)))


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


def _spectra(ntk: Tensor, n: int, y: Tensor | None) -> _Spectra:
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
    return _Spectra(largest, smallest, kappa, size)


def _predictor_size(predictor: Tensor, y: Tensor | None) -> Tensor:
    """The root mean square of P y over that of y; of the worst centred y where none is given."""
    m, n = predictor.shape[1:]
    if y is None:
        # Centred labels only: P (1 − 11ᵀ/n), whose spectral norm is the worst case.
        centred = predictor - predictor.mean(2, keepdim=True)
        return torch.linalg.matrix_norm(centred, 2) * (n / m) ** 0.5
    return (predictor @ y).flatten(1).norm(dim=1) / y.norm() * (n / m) ** 0.5


@dataclass(frozen=True, eq=False)
class _Samples:
    """Training samples x [n, i] in float64, test samples [m, i] and centred labels y [n, c], where there are any."""

    x: Tensor
    test: Tensor | None
    y: Tensor | None

    @classmethod
    def checked(cls, x: object, x_test: object, y: Numbers | None) -> "_Samples":
        """Refuse what Θ cannot be computed or judged for."""
        x = tree.from_array(x, "x") if isinstance(x, np.ndarray) else x
        x_test = tree.from_array(x_test, "x_test") if isinstance(x_test, np.ndarray) else x_test
        if not isinstance(x, Tensor) or x.dim() != 2 or len(x) < 2:
            raise InputError(f"x is {_shape(x)}; needed: a tensor [n, i] of two samples or more. Flatten images.")
        checks.finite(x, "x")
        test: Tensor | None = None
        if x_test is not None:
            if not isinstance(x_test, Tensor) or x_test.shape[1:] != x.shape[1:] or not len(x_test):
                raise InputError(f"x_test is {_shape(x_test)}; needed: a tensor [m, {x.shape[1]}], as x has.")
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
