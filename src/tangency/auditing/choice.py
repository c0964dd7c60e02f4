"""Which kernel, and which reg: by what leave-one-out says."""

from collections.abc import Callable, Mapping
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
# Of real targets the largest errors do not count: those of wrong targets are any size, and would decide alone.
COUNTED = 0.75


@dataclass(frozen=True, eq=False, repr=False)
class Choice(Result):
    """The kernel and reg of least leave-one-out square loss, of all that were tried (targets: of the smallest 75 %)."""

    kernel: str
    reg: float
    losses: dict[str, Float[Tensor, " r"]]  # by kernel, for each of its regs
    regs: dict[str, Float[Tensor, " r"]]

    def __repr__(self) -> str:
        return f"Choice({self.kernel}, reg {self.reg:.4g}, of {sum(map(len, self.regs.values()))} tried)"

    def table(self) -> str:
        """A line for each kernel and reg."""
        rows = [
            (name, reg, loss, "taken" if (name, reg) == (self.kernel, self.reg) else "")
            for name in self.regs
            for reg, loss in zip(self.regs[name].tolist(), self.losses[name].tolist(), strict=True)
        ]
        return text_table(["kernel", "reg", "leave-one-out loss", ""], rows)


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
    losses, regs = dict[str, Tensor](), dict[str, Tensor]()
    best: tuple[float, str, LeftOut] | None = None
    for name, machine in machines.items():
        tried = [factor * float(machine.squares.mean()) for factor in factors]
        found = []
        for reg in tried:
            left = machine.left_out(targets, reg, groups, kept)
            each = left.errors.square().reshape(machine.n, -1).mean(1)
            each = (each if kept is None else each[kept.to(each.device)]).sort().values
            found.append(float(each[: max(1, round(counted * len(each)))].mean()))
            if best is None or found[-1] < best[0]:
                best = (found[-1], name, left)
            step()
        losses[name], regs[name] = torch.tensor(found).double(), torch.tensor(tried).double()
    assert best is not None
    return Choice(best[1], best[2].reg, losses, regs), best[2]
