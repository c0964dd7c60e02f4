"""How finite networks come to their limit as they grow wider: at the start, and over training.

Cagnetta et al. 2023, §2.2.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.progress import bar
from .._base.results import Result
from .._base.types import Float, Inputs
from ..dynamics.bounds import Bound, lazy_bounds
from ..dynamics.gradient_flow import max_learning_rate
from ..dynamics.training import train as descend
from ..errors import InputError
from ..infinite.finite import Scaled, check_variances, draw, materialized, network_outputs, readout_nngp, scales
from ..infinite.layers.twin import Twin
from ..infinite.layers.weights import Number, Parametrization
from ..infinite.make import infinite_ntk

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEANING = {
    "ntk": "‖Θ_m − Θ‖/‖Θ‖ at the start",
    "nngp": "‖K_m − K‖/‖K‖ at the start",
    "sup": "sup_t ‖Θ_t − Θ‖/‖Θ‖",
    "drift": "sup_t ‖Θ_t − Θ_0‖/‖Θ‖",
    "moved": "‖θ_T − θ_0‖",
    "moved_part": "‖θ_T − θ_0‖/‖θ_0‖",
}


@dataclass(frozen=True, repr=False)
class Slope(Result):
    """log(value) = slope·log(width) + const by least squares, value a root mean square over seeds; `error`: standard.

    >>> str(Slope(-0.5012, 0.0211))
    '-0.501 ± 0.021'
    """

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


@dataclass(frozen=True, eq=False)
class GradientDescent:
    """Gradient descent on ½ Σ_i (f(x_i) − y_i)² in the parameters of the chosen parametrisation, `steps` of size `lr`.

    lr=None: 1/λ_max(Θ), half of the largest stable one and within Cagnetta et al. 2023 (18)'s. `every`: at which steps
    the kernel is looked at. twin=True: (f − copy of f)/√2, zero at the start as Cagnetta et al. 2023, §2.2 supposes.

    >>> GradientDescent(torch.ones(4), steps=10).every
    20
    """

    y: Tensor = field(repr=False)
    steps: int = 200
    lr: float | None = None
    every: int = 20
    twin: bool = False

    def checked(self, n: int) -> Tensor:
        """The targets as [n, 1] in float64; refuses what cannot be trained on."""
        y = tree.numbers(self.y)
        if y.shape not in ((n,), (n, 1)):
            raise InputError(f"train.y has shape {tuple(y.shape)}; needed: one number per sample, [{n}].")
        for name, value in (("steps", self.steps), ("every", self.every)):
            checks.positive(value, f"train.{name}", "a whole number")
        if self.lr is not None and checks.nonnegative(self.lr, "train.lr") == 0:
            raise InputError("train.lr=0; needed: more than 0, or None for 1/λ_max(Θ).")
        checks.finite(y, "train.y")
        return y.double().reshape(n, 1)


@dataclass(frozen=True, eq=False, repr=False)
class Trained(Result):
    """What training did, by width and seed, in the parameters θ of the parametrisation; norms of matrices Frobenius's.

    `bounds`: the largest measured/bound over training of Cagnetta et al. 2023 (18), with λ_min of the limit and K as
    measured (max of ‖J_t‖_F and √m·‖J_t − J_0‖_F/‖θ_t − θ_0‖), R_0 = ‖f_0 − y‖: "loss" ‖f_t − y‖², "parameters"
    ‖θ_t − θ_0‖, "kernel" ‖Θ_t − Θ_0‖, "limit" ‖Θ_t − Θ‖ (spectral norms); empty if λ_min is 0. At most 1 where they
    hold.
    """

    lr: float
    smallest: float  # λ_min(Θ)
    sup: Float[Tensor, "w s"]
    drift: Float[Tensor, "w s"]
    moved: Float[Tensor, "w s"]
    moved_part: Float[Tensor, "w s"]
    left: Float[Tensor, "w s"]  # ‖f_T − y‖/‖f_0 − y‖
    lipschitz: Float[Tensor, "w s"]  # K
    bounds: Mapping[str, Float[Tensor, "w s"]]


@dataclass(frozen=True, eq=False, repr=False)
class Convergence(Result):
    """‖Θ_m − Θ‖_F/‖Θ‖_F and the same of the NNGP, by width and seed; `training` if it was asked. Prints as a table.

    `slopes` fits each against the width on logarithmic axes. Expected: −½ for what fluctuates as a mean over m units
    (`ntk`, `nngp`, `sup`); 0 for `moved` in the NTK parametrisation (Cagnetta et al. 2023 (18) has another
    m^-½, that of the weights).
    For `drift`, (18) bounds it by m^-½; random signs of the last layer cancel, and then it falls as m^-1. `moved_part`:
    −½ with one hidden layer, −1 with more, whose parameters are m² in number.

    >>> from tangency.studies import Convergence
    >>> fall = torch.tensor([[0.2], [0.1]])
    >>> print(str(Convergence((16, 64), (0,), torch.eye(2), fall, fall).slopes["ntk"]))
    -0.500 ± nan
    """

    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    limit: Float[Tensor, "n n"]
    ntk: Float[Tensor, "w s"]
    nngp: Float[Tensor, "w s"]
    training: Trained | None = None

    MEANING: ClassVar[Mapping[str, str]] = MEANING  # what each measured quantity is, for tables and pictures

    def measured(self) -> dict[str, Tensor]:
        """Everything that has a slope, [widths, seeds] each."""
        measured = {"ntk": self.ntk, "nngp": self.nngp}
        if self.training is not None:
            measured |= {name: getattr(self.training, name) for name in ("sup", "drift", "moved", "moved_part")}
        return measured

    @property
    def slopes(self) -> dict[str, Slope]:
        """The fitted exponents of the width."""
        return {name: fit_slope(self.widths, values) for name, values in self.measured().items()}

    def table(self) -> str:
        """Root mean squares over seeds by width, the slopes below."""
        rows, slopes = self.measured(), self.slopes
        lines = ["width".rjust(8) + "".join(name.rjust(18) for name in rows)]
        for k, width in enumerate(self.widths):
            lines.append(f"{width:8d}" + "".join(f"{float(typical(values)[k]):18.4g}" for values in rows.values()))
        lines.append("slope".rjust(8) + "".join(str(slopes[name]).rjust(18) for name in rows))
        lines += [f"{name}: {MEANING[name]}" for name in rows]
        if self.training is not None:
            for name, ratio in self.training.bounds.items():
                lines.append(f"Cagnetta et al. (18), {name}: measured at most {float(ratio.max()):.3g} of the bound")
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """Distances to the limit over the width with their slopes, and what training did."""
        from ..plots import draw_convergence

        return draw_convergence(self)

    def __str__(self) -> str:
        return self.table()


def typical(values: Float[Tensor, "w s"]) -> Float[Tensor, " w"]:
    """√(mean over seeds of v²): for a mean over m units its square is exactly const/m, as that of |v| or log v is not.

    >>> typical(torch.tensor([[3.0, 4.0]]))
    tensor([3.5355])
    """
    return values.square().mean(1).sqrt()


def fit_slope(widths: Sequence[int], values: Float[Tensor, "w s"]) -> Slope:
    """slope = Cov(log m, log v)/Var(log m), v the root mean square over seeds; nan where a value is not above 0.

    Its standard error from the spread over seeds, pooled over widths; with one seed from the residuals.

    >>> fit_slope([4, 16, 64], torch.tensor([[0.5], [0.25], [0.125]]))
    Slope(value=-0.5, error=0)
    """
    v = values.double().cpu()
    if not bool((v > 0).all()):
        return Slope(math.nan, math.nan)
    # Least squares on logarithmic axes, both centred.
    a, b = torch.tensor(widths, dtype=torch.float64).log(), typical(v).log()
    a, b = a - a.mean(), b - b.mean()
    slope = float(a @ b / (a @ a))
    count, free = v.shape[1], len(a) - 2
    if count > 1:  # the variance of log √(mean v²) is that of v² over 4·(mean v²)²·seeds
        variance = float((v.square().var(1) / typical(v) ** 4).mean()) / (4 * count)
    else:
        variance = float((b - slope * a).square().sum()) / free if free else math.nan
    return Slope(slope, math.sqrt(variance / float(a @ a)))


def convergence(
    module_factory: Callable[[int], nn.Module],
    widths: Sequence[int],
    x: Inputs,
    *,
    w_var: Number = 2.0,
    b_var: Number = 0.0,
    parametrization: Parametrization = "ntk",
    seeds: int | Sequence[int] = 8,
    train: GradientDescent | None = None,
    progress: bool = True,
) -> Convergence:
    """‖Θ_m − Θ‖ ~ m^-½: networks `module_factory(m)` of growing widths m against their limit, at the start and trained.

    Each network's weights are drawn anew (`draw`) for each seed; the NNGP is the covariance of the outputs over the
    last layer's weights (`readout_nngp`). `seeds`: how many, or which. `train=GradientDescent(y, …)` trains each and
    measures sup_t ‖Θ_t − Θ‖, ‖Θ_t − Θ_0‖ and the parameters' movement, beside the bounds of Cagnetta et al. 2023 (18).
    In float64.
    Cost: per width and seed, a tangent kernel; with training, `steps` passes and one kernel more at each look.
    Cagnetta et al. 2023 (12)–(18); Jacot et al. 2018; Lee et al. 2019.

    >>> import tangency as tg
    >>> net = lambda m: nn.Sequential(nn.Linear(3, m), nn.Tanh(), nn.Linear(m, 1))
    >>> study = tg.studies.convergence(net, [64, 256, 1024], torch.randn(5, 3), w_var=1.5)
    >>> -0.7 < study.slopes["ntk"].value < -0.3
    True
    """
    check_variances(w_var, b_var, parametrization)
    sizes, chosen = _widths(widths), _seeds(seeds)
    if not callable(module_factory) or isinstance(module_factory, nn.Module):
        raise InputError(
            f"module_factory is a {type(module_factory).__name__}; needed: a function of the width that returns a "
            "module. Write lambda width: nn.Sequential(…)."
        )
    x = tree.cast(tree.given(x), torch.float64)
    study = _Study(x, w_var, b_var, parametrization, train, None if train is None else train.checked(tree.size(x)))
    before = 0
    with bar(len(sizes) * len(chosen), "convergence", "network", show=progress) as tick:
        for width in sizes:
            module = materialized(module_factory, width, x)
            before = _grown(module, width, before)
            kernel = study.take(module)
            for seed in chosen:
                study.measure(module, kernel, width, seed)
                tick(note=f"width {width}")
    return study.result(sizes, chosen)


def _widths(widths: object) -> tuple[int, ...]:
    sizes = list(widths) if isinstance(widths, (Sequence, Tensor)) else [widths]
    whole = [m for m in sizes if isinstance(m, int) and not isinstance(m, bool) and m > 0]
    if len(sizes) < 2 or len(whole) < len(sizes) or any(b <= a for a, b in pairwise(whole)):
        raise InputError(
            f"widths={widths!r}; needed: two or more whole numbers, each larger than the one before, such as "
            "[64, 256, 1024]: a slope is fitted through them."
        )
    return tuple(whole)


def _seeds(seeds: object) -> tuple[int, ...]:
    every = range(seeds) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds
    if not isinstance(every, Sequence) or not len(every) or not all(isinstance(s, int) for s in every):
        raise InputError(f"seeds={seeds!r}; needed: how many, at least 1, or a list of seeds.")
    return tuple(every)


def _grown(module: nn.Module, width: int, before: int) -> int:
    count = sum(p.numel() for p in module.parameters())
    if count <= before:
        raise InputError(
            f"module_factory({width}) has {count} parameters, the narrower network before it {before}; needed: more as "
            "the width grows. Use the width in it."
        )
    return count


@dataclass
class _Study:
    """The measurements, as they come."""

    x: Inputs
    w_var: Number
    b_var: Number
    parametrization: Parametrization
    train: GradientDescent | None
    y: Tensor | None
    nngp: Tensor = field(default_factory=lambda: torch.zeros(0))
    limit: Tensor = field(default_factory=lambda: torch.zeros(0))
    lr: float = 0.0
    smallest: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)

    def take(self, module: nn.Module) -> Scaled:
        """The limit and the kernel of this network, which follows its weights as they are drawn anew."""
        # The NTK parametrisation has one limit for all widths; in the standard one the width enters it.
        if not self.rows or self.parametrization != "ntk":
            self._limit(module)
        return Scaled.of(module, self.x, scales(module, self.w_var, self.b_var, self.parametrization))

    def _limit(self, module: nn.Module) -> None:
        kernel = infinite_ntk(module, w_var=self.w_var, b_var=self.b_var, parametrization=self.parametrization)
        self.nngp, self.limit = kernel.both(self.x)
        if self.limit.dim() != 2:
            raise InputError(
                f"the limit's kernel has shape {tuple(self.limit.shape)}, so the outputs have positions; needed: "
                "[n, n]. Pool or flatten them before the last layer."
            )
        if self.train is not None and self.y is not None:
            self.y = self.y.to(self.limit.device)
            most = max_learning_rate(self.limit)
            self.lr = most / 2 if self.train.lr is None else self.train.lr
            values = torch.linalg.eigvalsh(self.limit)
            # Below n·ε·λ_max an eigenvalue is rounding: then the bounds, which divide by it, are left out.
            self.smallest = float(values[0]) if values[0] > len(values) * 2.3e-16 * values[-1] else 0.0
            if self.lr >= most:
                raise InputError(f"train.lr={self.lr:g}; needed: below 2/λ_max(Θ) = {most:g}, or training diverges.")

    def measure(self, module: nn.Module, kernel: Scaled, width: int, seed: int) -> None:
        """One network: drawn, its kernels at the start, then trained if that was asked."""
        # A large odd factor, so that (seed, width) pairs do not share draws.
        draw(module, w_var=self.w_var, b_var=self.b_var, seed=seed * 1_000_003 + width)
        now = kernel.prepare(self.x)
        ntk = kernel.between(now, now)
        nngp = readout_nngp(module, self.x, w_var=self.w_var, b_var=self.b_var)
        row = {"ntk": _distance(ntk, self.limit), "nngp": _distance(nngp, self.nngp)}
        if self.train is not None and self.y is not None:
            run = _Run(Twin(copy.deepcopy(module)) if self.train.twin else module, self, width)
            row |= run.go()
        self.rows.append(row)

    def result(self, widths: tuple[int, ...], seeds: tuple[int, ...]) -> Convergence:
        """The rows as [widths, seeds]."""
        shape = (len(widths), len(seeds))
        columns = {name: torch.tensor([row[name] for row in self.rows]).reshape(shape) for name in self.rows[0]}
        ntk, nngp = columns.pop("ntk"), columns.pop("nngp")
        if self.train is None:
            return Convergence(widths, seeds, self.limit, ntk, nngp)
        bounds = {name.partition(" ")[2]: columns.pop(name) for name in list(columns) if name.startswith("bound ")}
        trained = Trained(self.lr, self.smallest, **columns, bounds=bounds)
        return Convergence(widths, seeds, self.limit, ntk, nngp, trained)


def _distance(kernel: Tensor, limit: Tensor) -> float:
    return float((kernel - limit).norm() / limit.norm())


@dataclass(frozen=True)
class _Look:
    """The network at one moment of training; `near` and `away` are spectral, the parts relative to ‖Θ‖_F."""

    moved: float  # ‖θ − θ_0‖
    change: float  # ‖J − J_0‖_F
    jacobian: float  # ‖J‖_F
    near: float  # ‖Θ_t − Θ_0‖
    away: float  # ‖Θ_t − Θ‖
    near_part: float
    away_part: float


class _Run:
    """One network in training: its parameters and its kernel against those of the start."""

    def __init__(self, module: nn.Module, study: _Study, width: int) -> None:
        outputs = network_outputs(module, tree.take(study.x, slice(0, 1)))
        if outputs.numel() != 1:
            raise InputError(f"the network has {outputs.numel()} outputs; needed for training: one, as y has.")
        self.module, self.study, self.width = module, study, width
        self.scale = scales(module, study.w_var, study.b_var, study.parametrization)
        self.kernel = Scaled.of(module, study.x, self.scale)
        # The network as it started: distances are measured from it.
        self.still = copy.deepcopy(module)
        still = Scaled.of(self.still, study.x, self.scale)
        self.first = still.prepare(study.x)
        self.start = still.between(self.first, self.first)
        self.seen: list[_Look] = []

    def go(self) -> dict[str, float]:
        """Trains; what of it has one number."""
        s = self.study
        assert s.train is not None
        assert s.y is not None
        # Descent in the parameters of the parametrisation: each weight's own rate is lr times its scale.
        groups = [{"params": [self.module.get_parameter(k)], "lr": s.lr * v} for k, v in self.scale.items() if v]
        past = descend(
            self.module, s.x, s.y, loss=_square, optimizer=lambda p: torch.optim.SGD(groups, lr=s.lr),
            steps=s.train.steps, every=s.train.every, watch=self.look, progress=False,
        )  # fmt: skip
        error = (past.train.reshape(len(past.steps), -1, 1) - s.y).flatten(1).norm(dim=1).cpu()
        last = self.seen[-1].moved
        # K bounds both ‖J‖ and √m times the Lipschitz constant of J (Cagnetta et al. 2023).
        lipschitz = max(max(v.jacobian, self.width**0.5 * v.change / v.moved if v.moved else 0.0) for v in self.seen)
        numbers = {
            "sup": max(v.away_part for v in self.seen),
            "drift": max(v.near_part for v in self.seen),
            "moved": last,
            "moved_part": last / self._norm(self.still),
            "left": float(error[-1] / error[0]),
            "lipschitz": lipschitz,
        }
        bounded = s.smallest and s.parametrization == "ntk"
        return numbers | (self._bounds(s.lr * past.steps.cpu(), error, lipschitz) if bounded else {})

    def look(self, step: int) -> None:
        """‖J − J_0‖² = tr(JJᵀ) + tr(J_0J_0ᵀ) − 2 tr(JJ_0ᵀ): no Jacobian is formed."""
        a, limit = self.kernel.prepare(self.study.x), self.study.limit
        now, cross = self.kernel.between(a, a), self.kernel.between(a, self.first)
        change = float((now.trace() + self.start.trace() - 2 * cross.trace()).clamp_min(0)) ** 0.5
        near, away = now - self.start, now - limit
        spectral = [float(torch.linalg.matrix_norm(v, 2)) for v in (near, away)]
        parts = [float(v.norm() / limit.norm()) for v in (near, away)]
        moved = self._norm(self.module, self.still)
        self.seen.append(_Look(moved, change, float(now.trace()) ** 0.5, *spectral, *parts))

    def _bounds(self, time: Tensor, error: Tensor, lipschitz: float) -> dict[str, float]:
        """The largest measured/bound over training, each under its name with "bound " before it."""
        columns = [[v.moved, v.near, v.away] for v in self.seen]
        moved, near, away = torch.tensor(columns, dtype=torch.float64).unbind(1)
        bounds = lazy_bounds(time, error, moved, near, self.study.smallest, lipschitz, self.width)
        # At t = 0 measured and limit are equal, whatever comes later
        bounds = {name: Bound(bound.measured[1:], bound.limit[1:]) for name, bound in bounds.items()}
        bounds["limit"] = Bound(away, bounds["kernel"].limit[0].expand_as(away))
        return {f"bound {name}": float((bound.measured / bound.limit).max()) for name, bound in bounds.items()}

    def _norm(self, module: nn.Module, other: nn.Module | None = None) -> float:
        """‖θ‖, or ‖θ − other‖, in the parametrisation: each parameter over the root of its scale."""
        total = 0.0
        for name, scale in self.scale.items():
            # Frozen, or of variance zero: no parameter of the parametrisation.
            if scale:
                p = module.get_parameter(name).detach()
                p = p if other is None else p - other.get_parameter(name).detach()
                total += float(p.square().sum()) / scale
        return float(total**0.5)


def _square(f: Tensor, target: Tensor) -> Tensor:
    return (f.reshape(target.shape) - target).square().sum() / 2
