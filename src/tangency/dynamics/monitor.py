"""Whether a network trains in the NTK regime: does the kernel stay where it was?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float, Inputs
from ..errors import InputError
from ..gram.compute import compute
from ..kernels.empirical import Empirical

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Regime(Result):
    """How far the kernel went from where it began, by step."""

    steps: Float[Tensor, " t"]
    change: Float[Tensor, " t"]  # ‖Θ_t − Θ_0‖ / ‖Θ_0‖, Frobenius
    cosine: Float[Tensor, " t"]  # ⟨Θ_t, Θ_0⟩ / (‖Θ_t‖ ‖Θ_0‖)
    velocity: Float[Tensor, " t"]  # (1 − cosine of Θ_t with the one before) per step; 0 at the start
    moved: Float[Tensor, " t"]  # ‖θ_t − θ_0‖ of the parameters that count

    def table(self) -> str:
        """A line for each step."""
        columns = (self.steps, self.change, self.cosine, self.velocity, self.moved)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return text_table(["step", "change", "cosine", "velocity", "moved"], rows)

    def plot(self) -> "Figure":
        """Change, cosine and velocity over the steps; `plots.draw_regime` draws several runs together."""
        from ..plots import draw_regime

        return draw_regime(self)


class Monitor:
    """Call it with the step number as training goes on; `regime()` is what it saw.

    The kernel must read its model live (no `params=`). Cost: a Gram of the probe samples at each call; two are kept.
    Fort et al. 2020, "Deep learning versus kernel learning", for the velocity.

    >>> import tangency as tg
    >>> net, x = tg.models.mlp([3, 8, 1]), torch.randn(20, 3)
    >>> monitor = tg.dynamics.Monitor(tg.trace_ntk(net), x)
    >>> sgd = lambda p: torch.optim.SGD(p, lr=0.1)
    >>> past = tg.dynamics.train(
    ...     net, x, x[:, :1], loss=torch.nn.functional.mse_loss, optimizer=sgd, steps=10, every=5, watch=monitor
    ... )
    >>> monitor.regime().steps.tolist()
    [0.0, 5.0, 10.0]
    """

    def __init__(self, kernel: Empirical, x: Inputs) -> None:
        if not isinstance(kernel, Empirical):
            raise InputError(f"kernel is a {type(kernel).__name__}; needed: one of a network: tg.trace_ntk(model).")
        if kernel.feature_map.network.params is not None:
            raise InputError("the kernel was made with params=, so it never changes; make it without them.")
        self.kernel, self.x = kernel, x
        self.rows: list[tuple[float, float, float, float, float]] = []
        self._first: tuple[Tensor, list[Tensor]] | None = None
        self._last: tuple[int, Tensor] | None = None

    def __call__(self, step: int) -> None:
        """Compute the kernel as it is now and keep how far it is from the first one; steps must grow."""
        if self._last is not None and step <= self._last[0]:
            raise InputError(f"step {step} comes after step {self._last[0]}; needed: growing numbers.")
        # In float64: 1 − cosine of kernels that hardly differ would be rounding in float32.
        now = compute(self.kernel, self.x, progress=False).dense().double().flatten()
        network = self.kernel.feature_map.network
        theta = [network.model.get_parameter(name).detach().double().clone() for name in network.trainable]
        # The first call compares the kernel with itself: change 0, cosine 1, velocity 0.
        if self._first is None or self._last is None:
            self._first, self._last = (now, theta), (step, now)
        first, start = self._first
        before, last = self._last
        moved = torch.stack([(p - q).square().sum() for p, q in zip(theta, start, strict=True)]).sum().sqrt()
        velocity = (1 - _cosine(now, last)) / (step - before) if step > before else 0.0
        change = float((now - first).norm() / first.norm())
        self.rows.append((float(step), change, _cosine(now, first), velocity, float(moved)))
        self._last = (step, now)

    def regime(self) -> Regime:
        """What was seen so far."""
        if not self.rows:
            raise InputError("nothing was watched yet; call the monitor at the start and as training goes on.")
        return Regime(*torch.tensor(self.rows, dtype=torch.float64).T)


def _cosine(a: Tensor, b: Tensor) -> float:
    """Of two kernels as vectors: 1 where they agree up to a factor."""
    return float(a @ b / (a.norm() * b.norm()))
