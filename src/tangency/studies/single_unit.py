"""One ReLU unit with a large weight: gradient descent learns it, kernel machines of networks do not.

G. Yehudai and O. Shamir 2019, "On the power and limitations of random features for understanding neural networks": of
f*(x) = relu(⟨w*, x⟩ + b*), ‖w*‖ = d³, x standard normal, any fixed features need a number, or coefficients, that are
exponential in d.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .._base import checks
from .._base.progress import bar
from .._base.results import Result, text_table
from ..errors import InputError
from ..kernels.ntk import trace_ntk
from ..models import initialized, mlp
from ..regress import ridge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POWER = 3  # ‖w*‖ = d³
RATE = 0.5  # of gradient descent: the Hessian in w is E[x xᵀ] where both units are on, so at most about 1 (heuristic)
STARTS = 4  # a unit may begin where it is off on all samples that count, and stay there; the best start is taken
# Ridge parameters in units of the mean of k(x, x); the one that does best on the test samples is taken, which favours
# the kernels.
REGS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True, eq=False, repr=False)
class SingleUnit(Result):
    """Test errors E(f − f*)²/Var f*, by machine, then dimension, then seed."""

    dims: tuple[int, ...]
    samples: int
    bias: float
    errors: Mapping[str, tuple[tuple[float, ...], ...]]

    def median(self, name: str) -> tuple[float, ...]:
        """Of the errors over the seeds, for each dimension."""
        return tuple(float(torch.tensor(row, dtype=torch.float64).median()) for row in self.errors[name])

    def table(self) -> str:
        """A line for each dimension: median errors."""
        columns = {name: self.median(name) for name in self.errors}
        rows = [[d, *(f"{column[k]:.1e}" for column in columns.values())] for k, d in enumerate(self.dims)]
        return text_table(["d", *columns], rows)

    def plot(self) -> "Figure":
        """Errors over the dimension."""
        from .conjugate_pictures import draw_unit

        return draw_unit(self.dims, self.errors)


@dataclass(frozen=True, eq=False)
class Sampled:
    """A unit, and samples of it."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @staticmethod
    def draw(d: int, n: int, test: int, bias: float, seed: int) -> "Sampled":
        """x ~ N(0, 1_d), w* in a direction by chance, ‖w*‖ = d³, b* = bias·d³."""
        g = torch.Generator().manual_seed(seed)
        w = torch.randn(d, generator=g, dtype=torch.float64)
        w = w / w.norm() * d**POWER
        b = bias * d**POWER
        x, z = (torch.randn(k, d, generator=g, dtype=torch.float64) for k in (n, test))
        return Sampled(x, (x @ w + b).relu(), z, (z @ w + b).relu())

    def error(self, found: Tensor) -> float:
        """Part of the variance that is missed, on the test samples."""
        return float((found - self.y_test).square().mean() / self.y_test.var(correction=0))


def single_unit(
    dims: Sequence[int] = (2, 4, 8, 16, 32, 64),
    *,
    samples: int = 1000,
    test: int = 2000,
    bias: float = -1.0,
    width: int = 128,
    seeds: int = 3,
    steps: int = 4000,
    progress: bool = True,
) -> SingleUnit:
    """E(f − f*)²/Var f* for f* = relu(⟨w*, x⟩ + b*), ‖w*‖ = d³, over d: one unit trained, and two kernel machines.

    "unit": a unit by gradient descent on all samples, from the one of four starts that fits these best. "its NTK":
    ridge with the tangent kernel of that start. "NTK of a wide network": that of a network of two layers, `width`
    units, as PyTorch draws them. Both by the reg that is best on the test samples, after the mean is taken off.
    `bias`: b*/‖w*‖; at −1 the unit is on for a sixth of the inputs. Cost: for each d and seed, two Grams of `samples`
    and seven solutions of each. Yehudai and Shamir 2019.

    >>> import tangency as tg
    >>> found = tg.studies.single_unit([2, 8], samples=200, test=200, width=16, seeds=1, steps=1000)
    >>> [found.median("unit")[k] < 0.1 * found.median("NTK of a wide network")[k] for k in (0, 1)]
    [True, True]
    """
    for name, value in (("samples", samples), ("test", test), ("width", width), ("seeds", seeds), ("steps", steps)):
        checks.positive(value, name, "a whole number")
    sizes = tuple(dims) if isinstance(dims, Sequence) else (dims,)
    if not sizes or any(isinstance(d, bool) or not isinstance(d, int) or d < 1 for d in sizes):
        raise InputError(f"dims={sizes}; needed: whole numbers from 1, at least one.")
    if not -6 * min(sizes) <= bias <= 6 * min(sizes):
        raise InputError(f"bias={bias}; needed: at most 6 d in size, which is {6 * min(sizes)} for d = {min(sizes)}.")
    names = ("unit", "its NTK", "NTK of a wide network")
    errors: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    with bar(len(sizes) * seeds, "single unit", "run", show=progress) as tick:
        for d in sizes:
            rows = []
            for seed in range(seeds):
                rows.append(_one(Sampled.draw(d, samples, test, bias, seed), d, width, steps, seed))
                tick(note=f"d = {d}")
            for k, name in enumerate(names):
                errors[name].append(tuple(row[k] for row in rows))
    return SingleUnit(sizes, samples, bias, {name: tuple(rows) for name, rows in errors.items()})


def _one(data: Sampled, d: int, width: int, steps: int, seed: int) -> list[float]:
    """The error of each machine."""
    if not bool(data.y.any()):
        raise InputError(f"the unit is off on all {len(data.y)} samples; give a larger bias= or more samples=.")
    if bool((data.y_test == data.y_test[0]).all()):
        raise InputError(f"the unit says the same of all {len(data.y_test)} test samples; give more, test=.")
    starts = [initialized(lambda: nn.Sequential(nn.Linear(d, 1), nn.ReLU()), STARTS * seed + k) for k in range(STARTS)]
    ends = [descended(unit.double(), data, steps) for unit in starts]
    best = min(range(STARTS), key=lambda k: ends[k].loss)
    wide = initialized(lambda: mlp([d, width, 1]), seed).double()
    return [data.error(ends[best].found), *(by_kernel(net, data) for net in (starts[best], wide))]


class Descent(NamedTuple):
    """The last mean square on the training samples, and what the unit says of the test samples."""

    loss: float
    found: Tensor


def descended(unit: nn.Sequential, data: Sampled, steps: int) -> Descent:
    """A unit after gradient descent on ½ mean (f(x) − y)²; `unit` stays as it is.

    The gradient is written out: w ← w − RATE·mean((relu(⟨w, x⟩ + b) − y)·1[on]·x).
    """
    x, z = (torch.cat([part, torch.ones_like(part[:, :1])], 1) for part in (data.x, data.x_test))
    layer = unit[0]
    assert isinstance(layer, nn.Linear)
    w = torch.cat([layer.weight.detach()[0], layer.bias.detach()])
    for _ in range(steps):
        h = x @ w
        w = w - RATE * ((h.relu() - data.y) * (h > 0)) @ x / len(x)
    return Descent(float(((x @ w).relu() - data.y).square().mean()), (z @ w).relu())


def by_kernel(net: nn.Module, data: Sampled) -> float:
    """The error of ridge with the network's tangent kernel, for the best reg."""
    kernel, mean = trace_ntk(net), data.y.mean()
    gram, cross = kernel(data.x), kernel(data.x_test, data.x)
    unit = float(gram.diagonal().mean())
    fits = [ridge(gram, data.y - mean, reg=reg * unit) for reg in REGS]
    return min(data.error(fit.predict(cross) + mean) for fit in fits)
