"""Order and chaos: which depths and weight variances a network can be trained and generalise at, by its limit alone.

Poole et al. 2016, "Exponential expressivity…"; Schoenholz et al. 2017, "Deep information propagation"; Xiao, Pennington
and Schoenholz 2020, "Disentangling trainability and generalization in deep neural networks". Networks are fully
connected, f = W φ(… φ(W x + b) …) + b with `depth` activations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._base import checks
from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Float
from ..errors import InputError
from ..infinite.activations.duals import Dual
from ..infinite.activations.recognize import recognize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Activation = Dual | nn.Module | Callable[[Tensor], Tensor] | str
# Variances looked through for a fixed point: 1 multiplied or divided by this factor, step by step; what comes to none
# of them dies out or grows without end (heuristic; quadrature is costly for large variances).
FACTOR, LEAST, MOST = 1.5, 1e-30, 1e4
# χ₁ this near to 1 counts as critical: two evaluations of the same number differ less (heuristic).
CRITICAL = 1e-6
# λ_min below this multiple of n·ε·λ_max is what rounding leaves after many layers (heuristic: measured about 10).
LOST = 64


@dataclass(frozen=True, repr=False)
class Phase(Result):
    """Where a deep network's signals go: q* = σ_w² E[φ(√q* z)²] + σ_b², χ₁ = σ_w² E[φ'(√q* z)²], and c*.

    `q`: the variance that they reach (inf: they grow without end). `c`: the correlation of two inputs' signals (nan
    where q* is 0, or inf unless φ(λx) = λφ(x)). `chi`: χ₁, what a small difference is multiplied by in a layer; below 1
    is "ordered", above "chaotic". `depth`: ξ = −1/log χ_c*, layers in which correlations approach c* by a factor e (inf
    where they do so more slowly). `gradient_depth`: 1/|log χ₁|, those in which gradients shrink or grow by it.

    >>> import tangency as tg
    >>> tg.studies.phase("relu", w_var=1.0, b_var=0.5)
    Phase(w_var=1, b_var=0.5, q=1, c=1, chi=0.5, chi_c=0.5, phase='ordered')
    """

    w_var: float
    b_var: float
    q: float
    c: float
    chi: float
    chi_c: float
    phase: Literal["ordered", "critical", "chaotic"]

    @property
    def depth(self) -> float:
        """ξ = 1/|log χ_c*|."""
        return _depth_scale(self.chi_c)

    @property
    def gradient_depth(self) -> float:
        """1/|log χ₁|."""
        return _depth_scale(self.chi)


def _depth_scale(chi: float) -> float:
    """Layers in which what is multiplied by χ in each changes by a factor e."""
    if chi <= 0:
        return 0.0
    return math.inf if abs(chi - 1) < CRITICAL else 1 / abs(math.log(chi))


@dataclass(frozen=True)
class Layers:
    """The maps of one layer at infinite width, for numbers."""

    dual: Dual
    w_var: float
    b_var: float

    def variance(self, q: float) -> float:
        """σ_w² E[φ(√q z)²] + σ_b²."""
        return self.w_var * float(self.dual.own(_number(q), slope=False)[0]) + self.b_var

    def chi(self, q: float) -> float:
        """σ_w² E[φ'(√q z)²]."""
        slope = self.dual.own(_number(q))[1]
        assert slope is not None
        return self.w_var * float(slope)

    def correlation(self, c: float, q: float) -> tuple[float, float]:
        """The next correlation of two signals of variance q with correlation c, and χ_c = σ_w² E[φ'(u)φ'(v)]."""
        value, slope = self.dual.both(_number(c * q), _number(q), _number(q))
        assert slope is not None
        return (self.w_var * float(value) + self.b_var) / self.variance(q), self.w_var * float(slope)


def _number(value: float) -> Tensor:
    return torch.full((1,), value, dtype=torch.float64)


def phase(activation: Activation, *, w_var: float, b_var: float = 0.0) -> Phase:
    """q*, c* and χ₁ = σ_w² E[φ'(√q* z)²] of deep networks: "ordered" (χ₁ < 1), "critical" or "chaotic" (χ₁ > 1).

    `activation`: one of `tangency.infinite` (`Erf()`, `Quadrature(torch.tanh)`), or torch's (`nn.Tanh()`, "relu"). q*
    is the fixed point that the variance comes to from 1. Cost: some hundred evaluations of the activation's moments.

    >>> from tangency.infinite import Erf
    >>> from tangency.studies import phase
    >>> deep = phase(Erf(), w_var=2.0, b_var=0.0)
    >>> deep.phase, round(deep.c, 3)
    ('chaotic', 0.0)
    """
    layers = _layers(activation, w_var, b_var)
    q = _fixed(layers.variance)
    chi = layers.chi(min(max(q, LEAST), MOST))  # at a kink, what counts is the limit from q > 0
    kind: Literal["ordered", "critical", "chaotic"] = "ordered" if chi < 1 else "chaotic"
    kind = "critical" if abs(chi - 1) < CRITICAL else kind
    c, chi_c = math.nan, chi if q == 0 else math.nan
    if 0 < q < math.inf or (q and layers.dual.homogeneous):
        c, chi_c = _meeting(layers, min(q, 1e12))  # so large that biases do not count
    return Phase(layers.w_var, layers.b_var, q, c, chi, chi_c, kind)


def _fixed(step: Callable[[float], float]) -> float:
    """The fixed point that lies next to 1 in the direction in which the map goes from there."""
    up = step(1.0) >= 1.0
    factor = FACTOR if up else 1 / FACTOR
    near = far = 1.0
    while (step(far) >= far) == up:
        near, far = far, far * factor
        if far > MOST:
            return 1.0 if abs(step(1.0) - 1) < 1e-12 else math.inf  # every variance is fixed: ReLU at σ_w² = 2
        if far < LEAST:
            return 0.0
    low, high = min(near, far), max(near, far)
    return _bisect(lambda q: step(q) - q, low, high)


def _bisect(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f, positive (or 0) at `low` and negative at `high`, changes sign."""
    while abs(high - low) > 1e-15 * max(1e-3, abs(high)):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if f(middle) >= 0 else (low, middle)
    return low


def _meeting(layers: Layers, q: float) -> tuple[float, float]:
    """c* and χ_c*. The map of correlations is convex on [0, 1] and fixes 1, so there is at most one other one."""
    slope = layers.correlation(1.0, q)[1]
    steep = slope * q / layers.variance(q)  # its derivative at 1; χ₁ itself unless q still grows
    if steep <= 1 + CRITICAL:
        return 1.0, steep
    gap = 0.5
    while gap > 1e-12 and layers.correlation(1 - gap, q)[0] >= 1 - gap:
        gap /= 2
    c = _bisect(lambda c: layers.correlation(c, q)[0] - c, 0.0, 1 - gap)
    return c, layers.correlation(c, q)[1] * q / layers.variance(q)


def boundary(activation: Activation, b_vars: Sequence[float] | Tensor) -> Float[Tensor, " b"]:
    """σ_w²(σ_b²) where χ₁ = 1: between order (below) and chaos (above); nan where there is none.

    A fixed point q on it has σ_w² = 1/E[φ'(√q z)²] and σ_b² = q − σ_w² E[φ(√q z)²], so one pass over q finds all. The
    fixed point must be stable; of several, that with the smallest σ_w² counts.

    >>> from tangency.infinite import Erf, Relu
    >>> from tangency.studies import boundary
    >>> boundary(Relu(), [0.0, 1.0]).tolist()
    [2.0, 2.0]
    >>> float(boundary(Erf(), [0.0])[0])  # π/4
    0.785398...
    """
    dual = _dual(activation)
    targets = [checks.nonnegative(float(b), "b_vars") for b in b_vars]
    if dual.homogeneous:
        return torch.full((len(targets),), 1 / Layers(dual, 1.0, 0.0).chi(1.0), dtype=torch.float64)
    q = torch.cat([torch.zeros(1), torch.logspace(-8, 4, 481)]).double()
    value, slope = dual.own(q)
    assert slope is not None
    edge = torch.where(slope > 0, q - value / torch.where(slope > 0, slope, 1.0), math.nan)
    return torch.tensor([_edge(dual, q, edge, target) for target in targets], dtype=torch.float64)


def _edge(dual: Dual, q: Tensor, edge: Tensor, target: float) -> float:
    """The smallest σ_w² of a stable critical point with this σ_b²; `edge` is the σ_b² of each q."""

    def bias(at: float) -> float:
        plain = Layers(dual, 1.0, 0.0)
        return at - plain.variance(at) / plain.chi(at)

    above = edge > target + 1e-15
    points = [LEAST] if target == 0 and float(edge[0]) == 0 else []  # φ(0) = 0: signals that die are a fixed point
    for k in (above[1:] & ~above[:-1] & ~edge[:-1].isnan()).nonzero().flatten().tolist():
        points.append(_bisect(lambda v: target - bias(v), float(q[k]), float(q[k + 1])))
    variances = [(1 / Layers(dual, 1.0, 0.0).chi(at), at) for at in points]
    stable = [w for w, at in variances if _stable(Layers(dual, w, target), at)]
    return min(stable) if stable else math.nan


def _stable(layers: Layers, q: float) -> bool:
    """Whether variances a little off q come nearer."""
    off = 1e-2 * q + 1e-3
    return layers.variance(q + off) - layers.variance(q) <= off * (1 + 1e-6)


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
    x: Float[Tensor, "n i"],
    depths: Sequence[int],
    *,
    w_var: float,
    b_var: float = 0.0,
    activation: Activation,
    x_test: Float[Tensor, "m i"] | None = None,
    y: Tensor | None = None,
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
    dual, samples = _dual(activation), _Samples.checked(x, x_test, y)
    spectra = _deepen(samples, depths, [w_var], b_var, dual, progress)
    return Condition(tuple(depths), *(v[:, 0] for v in spectra))


def trainability(
    x: Float[Tensor, "n i"],
    depths: Sequence[int],
    w_vars: Sequence[float],
    *,
    b_var: float = 0.0,
    activation: Activation,
    x_test: Float[Tensor, "m i"] | None = None,
    y: Tensor | None = None,
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
    dual = _dual(activation)
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
    w = torch.tensor([checks.nonnegative(v, "w_var") for v in w_vars], dtype=x.dtype, device=x.device)[:, None]
    b = checks.nonnegative(b_var, "b_var")
    points = x if samples.test is None else torch.cat([x, samples.test])
    own = w * points.square().mean(1) + b  # [w, n + m]: each sample with itself
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
    finite = ntk.isfinite().flatten(1).all(1)
    ntk = torch.where(finite[:, None, None], ntk, 0.0)
    values, vectors = torch.linalg.eigh(ntk[:, :n])
    largest, smallest = values[:, -1], values[:, 0]
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
    def checked(cls, x: object, x_test: object, y: object) -> "_Samples":
        """Refuse what Θ cannot be computed or judged for."""
        if not isinstance(x, Tensor) or x.dim() != 2 or len(x) < 2:
            raise InputError(f"x is {_shape(x)}; needed: a tensor [n, i] of two samples or more. Flatten images.")
        checks.finite(x, "x")
        test: Tensor | None = None
        if x_test is not None:
            if not isinstance(x_test, Tensor) or x_test.shape[1:] != x.shape[1:] or not len(x_test):
                raise InputError(f"x_test is {_shape(x_test)}; needed: a tensor [m, {x.shape[1]}], as x has.")
            checks.finite(x_test, "x_test")
            test = x_test.to(x.device, torch.float64)
        return cls(x.double(), test, None if y is None else _centred_labels(torch.as_tensor(y), x))


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


def _layers(activation: Activation, w_var: float, b_var: float) -> Layers:
    dual = _dual(activation)
    return Layers(dual, checks.nonnegative(w_var, "w_var"), checks.nonnegative(b_var, "b_var"))


def _dual(activation: Activation) -> Dual:
    dual = recognize(activation) if isinstance(activation, (Dual, nn.Module, str)) or callable(activation) else None
    if dual is None:
        raise InputError(
            f"activation={activation!r}; needed: one of tangency.infinite, such as Erf(), Relu() or "
            "Quadrature(torch.tanh), or an activation of torch, such as nn.Tanh() or 'relu'."
        )
    return dual
