"""Which depths and weight variances a network can be trained and generalise at, by its limit alone.

Xiao, Pennington and Schoenholz 2020, "Disentangling trainability and generalization in deep neural networks". Networks
are fully connected, f = W φ(… φ(W x + b) …) + b with `depth` activations, or whatever `network(depth, w_var)` makes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypedDict

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Array, Float, Numbers
from ..errors import InputError
from .deepening import Network, Samples, Spectra, deepen, deepen_networks
from .phases import Activation, Phase, boundary, find_dual, phase

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    `critical`: σ_w² of the boundary at this σ_b²; `edge`: (σ_b², σ_w²) along it. Of networks without `activation=`, no
    phases are known: `phases` is empty and `critical` nan.
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
        if self.phases:
            rows.append(["phase", *(p.phase for p in self.phases)])
        return text_table(["depth", *(f"σ_w²={w:g}" for w in self.w_vars)], rows)

    def plot(self) -> "Figure":
        """κ(Θ) and the mean predictor over depth and σ_w², with the plane of variances where the phases are known."""
        if not self.phases:
            from .student_pictures import draw_trainability

            return draw_trainability(self)
        from ..plots import draw_phase

        return draw_phase(self)


def condition(
    x: Array,  # [n, i]; with `network`, what it takes
    depths: Sequence[int],
    *,
    w_var: float,
    b_var: float = 0.0,
    activation: Activation | None = None,
    network: Network | None = None,
    x_test: Array | None = None,  # [m, i]
    y: Numbers | None = None,
    progress: bool = True,
) -> Condition:
    """κ(Θ^(l)) = λ_max/λ_min, how hard it is to train, and ‖P(Θ^(l)) y‖, P = Θ_test,train Θ_train,train⁻¹, by depth l.

    Θ^(l) is the NTK of the network with l activations, as `infinite_ntk` has it. `predictor`: the root mean square of
    P(Θ) y over `x_test`, over that of the centred labels y; without y, the largest of all centred labels. It needs
    x_test, and is nan without. Asymptotically (Xiao et al., table 1, smooth φ, n samples of equal norm): ordered,
    κ ~ 1/(l χ₁^l) and P stays; critical, κ → (n + 2)/2 and P ~ 1/l; chaotic, κ → 1 and P ~ l (χ_c*/χ₁)^l.
    `activation` has the fully connected network of it; `network(depth, w_var)` any other: it returns an nn.Module or
    layers of `tangency.infinite` that `infinite_ntk` reads with w_var and b_var, or a kernel, taken as it is.
    Cost: one pass over the depth, O((n + m) n) a layer, an eigendecomposition at each of `depths`; with `network`, a
    kernel for each.

    >>> from tangency.infinite import Erf
    >>> from tangency.studies import condition
    >>> x = torch.nn.functional.normalize(torch.randn(8, 20)) * 20**0.5
    >>> float(condition(x, [60], w_var=4.0, activation=Erf()).kappa[0])  # chaotic
    1.0000...
    """
    found = _spectra(
        Samples.checked(x, x_test, y, network is None), depths, [w_var], b_var, activation, network, progress
    )
    return Condition(tuple(depths), *(v[:, 0] for v in found))


def _spectra(
    samples: Samples,
    depths: Sequence[int],
    w_vars: Sequence[float],
    b_var: float,
    activation: Activation | None,
    network: Network | None,
    progress: bool,
) -> Spectra:
    """Of the networks that were asked for, [depths, w_vars]."""
    if network is not None:
        if not callable(network):
            raise InputError(f"network is a {type(network).__name__}; needed: a function of (depth, w_var).")
        return deepen_networks(samples, depths, w_vars, b_var, network, progress)
    if activation is None:
        raise InputError(
            "neither activation nor network is given; needed: the activation of a fully connected network, such as "
            "'tanh', or a function of (depth, w_var) that returns an nn.Module."
        )
    return deepen(samples, depths, w_vars, b_var, find_dual(activation), progress)


def trainability(
    x: Array,  # [n, i]; with `network`, what it takes
    depths: Sequence[int],
    w_vars: Sequence[float],
    *,
    b_var: float = 0.0,
    activation: Activation | None = None,
    network: Network | None = None,
    x_test: Array | None = None,  # [m, i]
    y: Numbers | None = None,
    progress: bool = True,
) -> Trainability:
    """κ(Θ^(l)) and ‖P(Θ^(l)) y‖ over a grid of depths l and weight variances σ_w²: order and chaos in one picture.

    Options and cost as for `condition`, all σ_w² in the same pass. With both, `network` decides Θ, `activation` the
    phases beside it: those of convolutions and of residual branches by themselves are those of its dense network.

    >>> from tangency.infinite import Erf
    >>> from tangency.studies import trainability
    >>> grid = trainability(torch.randn(6, 9), [1, 8, 16], [0.5, 2.0], b_var=0.05, activation=Erf())
    >>> grid.kappa.shape, [p.phase for p in grid.phases]
    (torch.Size([3, 2]), ['ordered', 'chaotic'])

    >>> from torch import nn
    >>> def pooled(depth, w_var):
    ...     body = [m for _ in range(depth) for m in (nn.Conv1d(3, 3, 3, padding=1), nn.Tanh())]
    ...     return nn.Sequential(*body, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 1))
    >>> trainability(torch.randn(4, 3, 6), [1, 4], [1.5], network=pooled).kappa.shape
    torch.Size([2, 1])
    """
    if not len(w_vars):
        raise InputError("w_vars is empty; needed: one weight variance or more.")
    found = _spectra(
        Samples.checked(x, x_test, y, network is None), depths, w_vars, b_var, activation, network, progress
    )
    plane = _plane(activation, tuple(map(float, w_vars)), b_var)
    return Trainability(
        **plane,
        b_var=float(b_var),
        w_vars=tuple(map(float, w_vars)),
        depths=tuple(depths),
        kappa=found.kappa,
        predictor=found.predictor,
    )


class _Plane(TypedDict):
    """What is said of the plane of variances."""

    activation: str
    phases: tuple[Phase, ...]
    critical: float
    edge: tuple[Tensor, Tensor]


def _plane(activation: Activation | None, w_vars: Sequence[float], b_var: float) -> _Plane:
    """Phases, boundary and name of an activation; nothing where there is none."""
    if activation is None:
        none = torch.zeros(0, dtype=torch.float64)
        return {"activation": "", "phases": (), "critical": math.nan, "edge": (none, none)}
    dual = find_dual(activation)
    high = max(2 * float(b_var), 1.0)
    at = high * torch.linspace(0, 1, 41, dtype=torch.float64) ** 3  # it begins as a cube root
    return {
        "activation": str(dual.spec().get("name", type(dual).__name__)),
        "phases": tuple(phase(dual, w_var=w, b_var=b_var) for w in w_vars),
        "critical": float(boundary(dual, [b_var])[0]),
        "edge": (at, boundary(dual, at)),
    }
