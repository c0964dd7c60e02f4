"""How linear a wide network's training is: what is measured, beside what theory says it cannot exceed."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.results import Result, text_table
from .._base.types import Array, Float, Numbers, Trainable
from ..errors import InputError
from ..kernels.empirical import Empirical
from ..kernels.ntk import trace_ntk
from .linearized import Linearized, linearize
from .training import train


class _BoundFields(NamedTuple):
    measured: Tensor
    limit: Tensor


class Bound(Result, _BoundFields):
    """What was measured at each recorded step [t], and the limit that theory says it cannot exceed [t]."""


@dataclass(frozen=True, eq=False, repr=False)
class LazyRun(Result):
    """A run of gradient descent on ½ Σ_i (f(x_i) − y_i)², by recorded step, with the same run's linearisation.

    `gap`: the largest |f − f_lin| at the same parameters, over training and test samples. `moved`: ‖θ_t − θ_0‖.
    `drift`: ‖Θ_t − Θ_0‖ (spectral). `error`: ‖f − y‖. `smallest`: σ_min(J_t). `bounds()` holds each beside its bound.

    >>> import tangency as tg
    >>> net, x = tg.models.two_layer(3, 64), torch.nn.functional.normalize(torch.randn(5, 3)) * 3**0.5
    >>> net.v.data = net.v.data.sign()
    >>> run = tg.dynamics.linearization_quality(net, x, x[:, 0], width=64, beta=0.7698, lr=0.1, steps=20, trainable="W")
    >>> bound = run.bounds()["linearization"]
    >>> bool((bound.measured <= bound.limit + 1e-6).all())
    True
    """

    steps: Float[Tensor, " t"]
    gap: Float[Tensor, " t"]
    moved: Float[Tensor, " t"]
    drift: Float[Tensor, " t"]
    error: Float[Tensor, " t"]
    smallest: Float[Tensor, " t"]
    lipschitz: float  # K of Cagnetta et al. 2023 (18), measured: max of ‖J_t‖_F and √m·‖J_t − J_0‖_F/‖θ_t − θ_0‖
    lr: float
    width: int
    reach: float  # β·max‖x‖²·max|a|

    def bounds(self) -> Mapping[str, Bound]:
        """What was measured, and its limit, at each recorded step.

        "linearization": |f − f_lin| ≤ β/(2√m)·‖w − w_0‖² (Sutherland 2023; one hidden layer, it alone trained).
        "movement": ‖w_t − w_0‖ ≤ ‖f_0 − y‖/σ_min(Φ), σ_min the smallest on the way (Sutherland 2023).
        "loss", "parameters", "kernel": Cagnetta et al. 2023 (18) in the NTK parametrisation, R_0 = ‖f_0 − y‖, with K as
        measured:
        ‖f_t − y‖² ≤ e^{−2·lr·λ·t/3} R_0², ‖θ_t − θ_0‖ ≤ 3KR_0/λ·(1 − e^{−lr·λ·t/3}), ‖Θ_t − Θ_0‖ ≤ 6K³R_0/λ·m^{−½},
        λ = λ_min(Θ_0). These three are for wide networks: "large m, with high probability".
        """
        start, low = float(self.error[0]), float(self.smallest[0]) ** 2
        return {
            "linearization": Bound(self.gap, self.reach / (2 * self.width**0.5) * self.moved**2),
            "movement": Bound(self.moved, (start / self.smallest.min()).expand_as(self.moved)),
            **lazy_bounds(self.lr * self.steps, self.error, self.moved, self.drift, low, self.lipschitz, self.width),
        }

    def table(self) -> str:
        """A line for each bound: what was measured at the end, and the limit there."""
        rows = [(name, float(bound.measured[-1]), float(bound.limit[-1])) for name, bound in self.bounds().items()]
        return text_table(["bound", "measured", "limit"], rows)


def lazy_bounds(
    time: Tensor, error: Tensor, moved: Tensor, drift: Tensor, low: float, lipschitz: float, width: int
) -> dict[str, Bound]:
    """Cagnetta et al. 2023 (18) at each time lr·t.

    `error`: ‖f_t − y‖ from t = 0 on, `low`: λ_min, `lipschitz`: K.

    >>> flat = torch.zeros(2)
    >>> float(lazy_bounds(torch.tensor([0.0, 3.0]), flat + 1, flat, flat, 1.0, 1.0, 4)["kernel"].limit[0])
    3.0
    """
    start, k, decay = error[0], lipschitz, torch.exp(-low * time / 3)
    return {
        "loss": Bound(error**2, decay**2 * start**2),
        "parameters": Bound(moved, 3 * k * start / low * (1 - decay)),
        "kernel": Bound(drift, (6 * k**3 * start / low * width**-0.5).expand_as(drift)),
    }


def _tensor(x: Array, model: nn.Module, name: str) -> Tensor:
    """Samples in one tensor, in the type of the model's parameters."""
    made = tree.suited(x, model, name)
    if not isinstance(made, Tensor):
        raise InputError(f"{name} is a {type(x).__name__}; needed: a tensor or an array, one sample a row.")
    return made


def linearization_quality(
    model: nn.Module,
    x: Array,
    y: Numbers,
    *,
    width: int,
    beta: float,
    lr: float,
    steps: int,
    x_test: Array | None = None,
    every: int = 10,
    norm: float = 1.0,
    readout: float = 1.0,
    trainable: Trainable = None,
) -> LazyRun:
    """Train a copy of a network by gradient descent on ½ Σ_i (f(x_i) − y_i)² and measure what is bounded.

    `width`: m. `beta`: the largest |σ''| of its activation (tanh: 4/(3√3) = 0.7698). `norm`: the largest ‖x‖ as it
    enters the hidden layer; `readout`: the largest |a_j| of f = Σ_j a_j σ(w_j·x)/√m. `trainable`: which parameters move
    (Sutherland 2023: the hidden weights alone). Cost: a Jacobian of all samples at each recorded step.
    """
    x, x_test = _tensor(x, model, "x"), None if x_test is None else _tensor(x_test, model, "x_test")
    y = tree.cast_tensor(tree.numbers(y), x.dtype, "y").reshape(len(x), -1)
    if y.shape[1] != 1:
        raise InputError(f"y has shape {tuple(y.shape)}; needed: one output per sample, [n].")
    moving = copy.deepcopy(model)
    names = checks.trained(moving, trainable)
    for name, p in moving.named_parameters():
        p.requires_grad_(name in names)
    # Two functions at the parameters of one run: the network, and its first Taylor polynomial.
    tangent = linearize(model, trainable=list(names))
    kernel = trace_ntk(moving, trainable=list(names))
    points = x if x_test is None else torch.cat([x, x_test])
    watch = _Watch(moving, tangent, kernel, x, y, points, width)
    train(
        moving, x, y, loss=_half_square, optimizer=lambda p: torch.optim.SGD(p, lr=lr), steps=steps, every=every,
        watch=watch, progress=False,
    )  # fmt: skip
    at, gap, moved, drift, error, smallest = torch.tensor(watch.rows, dtype=torch.float64).unbind(1)
    return LazyRun(at, gap, moved, drift, error, smallest, watch.lipschitz, lr, width, beta * norm**2 * readout)


def _half_square(f: Tensor, target: Tensor) -> Tensor:
    """½ Σ_i (f_i − y_i)²: the loss of the theory, a sum and halved, so that its gradient in f is f − y."""
    return (f.reshape(target.shape) - target).square().sum() / 2


@dataclass(eq=False)
class _Watch:
    """Measures everything that is bounded, called with the step as training goes on."""

    moving: nn.Module
    tangent: Linearized
    kernel: Empirical
    x: Tensor
    y: Tensor  # [n, 1]
    points: Tensor  # where network and linearisation are compared
    width: int
    lipschitz: float = 0.0
    first: Tensor | None = None  # J_0
    rows: list[tuple[float, ...]] = field(default_factory=list)  # in the order of LazyRun's fields

    def __call__(self, step: int) -> None:
        with torch.no_grad():  # the linearisation goes where the network went: same parameters, two functions
            for name in self.tangent.names:
                self.tangent.model.get_parameter(name).copy_(self.moving.get_parameter(name))
        jacobian = self.kernel.features(self.x)
        first = self.first = jacobian if self.first is None else self.first
        moved = float(self.tangent.displacement().detach())
        # K of (18) bounds ‖J‖, and √m times J's Lipschitz constant; this is the largest that the run has shown of both.
        change = (jacobian - first).norm()
        slope = self.width**0.5 * float(change) / moved if moved else 0.0
        self.lipschitz = max(self.lipschitz, float(jacobian.norm()), slope)
        with torch.no_grad():
            gap = float((self.moving(self.points) - self.tangent(self.points)).abs().max())
            error = float((self.moving(self.x).reshape(self.y.shape) - self.y).norm())
        drift = torch.linalg.matrix_norm(jacobian @ jacobian.T - first @ first.T, 2)
        self.rows.append((float(step), gap, moved, float(drift), error, float(torch.linalg.svdvals(jacobian)[-1])))
