"""Which kernel, and which reg: by what leave-one-out says."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float
from ..regress import LeftOut
from .machine import Machine

# Times the mean of k(x, x). For labels not below 3: a network that has learned its wrong labels has them in its kernel,
# and a smaller reg follows them there, with less leave-one-out loss (benchmarks/studies/wrong_labels.py).
FACTORS, TARGET_FACTORS = (3.0, 10.0, 30.0), (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
# Regs for which the rounding of the kernel may move the mean square error by more than this part of itself are passed
# over: single errors then move by some percent, and the CPU's answer is not the GPU's (as `regress.validate.UNSURE`).
UNSURE = 1e-3
# Of real targets the largest errors do not count: those of wrong targets are any size, and would decide alone.
COUNTED = 0.75


@dataclass(frozen=True, eq=False, repr=False)
class Choice(Result):
    """The kernel and reg of least leave-one-out square loss, of all that were tried (targets: of the smallest 75 %).

    `uncertainty`: about how far the rounding of the kernel's entries moves that loss, at most, relative to it. Where
    that is above 0.1 % the reg is not taken, unless it is so of all: other machines, which round differently, would
    say other samples.
    """

    kernel: str
    reg: float
    losses: dict[str, Float[Tensor, " r"]]  # by kernel, for each of its regs
    regs: dict[str, Float[Tensor, " r"]]
    uncertainty: dict[str, Float[Tensor, " r"]]

    def __repr__(self) -> str:
        return f"Choice({self.kernel}, reg {self.reg:.4g}, of {sum(map(len, self.regs.values()))} tried)"

    def table(self) -> str:
        """A line for each kernel and reg."""
        rows = [(name, reg, loss, unsure, self._word(name, reg, unsure)) for name, reg, loss, unsure in self._tried()]
        return text_table(["kernel", "reg", "leave-one-out loss", "uncertainty", ""], rows)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What rounding has decided, or kept from being taken."""
        known = {(name, reg): (loss, unsure) for name, reg, loss, unsure in self._tried()}
        loss, unsure = known[self.kernel, self.reg]
        fix = "Compute the kernel in float64: kernel=tg.trace_ntk(model, dtype='float64')."
        if unsure > UNSURE:
            return (
                f"with every reg that was tried, the rounding of the kernel's entries moves the leave-one-out errors "
                f"(by about {unsure:.1%} of their mean square), so another machine may say other samples. {fix}",
            )
        better = [(name, reg) for (name, reg), (other, _) in known.items() if other < loss]
        if not better:
            return ()
        name, reg = better[0]
        return (
            f"{name} with reg {reg:.3g} has less leave-one-out loss than what was taken, but with so small a reg the "
            f"rounding of the kernel's entries moves it (by about {known[name, reg][1]:.1%}). {fix}",
        )

    def _tried(self) -> Iterator[tuple[str, float, float, float]]:
        """Kernel, reg, loss and uncertainty of each."""
        for name in self.regs:
            columns = (v[name].tolist() for v in (self.regs, self.losses, self.uncertainty))
            for reg, loss, unsure in zip(*columns, strict=True):
                yield name, reg, loss, unsure

    def _word(self, name: str, reg: float, unsure: float) -> str:
        if (name, reg) == (self.kernel, self.reg):
            return "taken"
        return "decided by rounding" if unsure > UNSURE else ""


def choose(
    machines: Mapping[str, Machine],
    targets: Tensor,
    factors: tuple[float, ...],
    groups: Tensor | None,
    step: Callable[[], None],
    counted: float = 1.0,
    kept: Tensor | None = None,
) -> tuple[Choice, LeftOut]:
    """The best of all kernels and regs, and what it says of each sample without it; `step` is called for each.

    `counted`: the part of the samples, those with the smallest losses, that the mean is over. `kept`: a mask of those
    that take part.
    """
    losses, regs, uncertainty = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    best: tuple[tuple[float, float], str, LeftOut] | None = None
    for name, machine in machines.items():
        tried = [factor * float(machine.squares.mean()) for factor in factors]
        found, unsure = [], []
        for reg in tried:
            left = machine.left_out(targets, reg, groups, kept)
            each = left.errors.square().reshape(machine.n, -1).mean(1)
            each = (each if kept is None else each[kept.to(each.device)]).sort().values
            found.append(float(each[: max(1, round(counted * len(each)))].mean()))
            unsure.append(machine.uncertainty(left, kept))
            # What rounding decides comes after all that it does not; among itself, the least uncertain first.
            order = (max(0.0, unsure[-1] - UNSURE), found[-1])
            if best is None or order < best[0]:
                best = (order, name, left)
            step()
        losses[name], regs[name], uncertainty[name] = (
            torch.tensor(v, dtype=torch.float64) for v in (found, tried, unsure)
        )
    assert best is not None
    return Choice(best[1], best[2].reg, losses, regs, uncertainty), best[2]
