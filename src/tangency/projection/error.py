"""How far a projected kernel is from the exact one, how far it should be, and what a smaller error would cost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result, text_table
from .._base.types import Float, Inputs
from ..errors import InputError
from ..kernels.kernel import Kernel
from .kernel import Projected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Kinds whose variance follows from the kernel alone.
PREDICTED = ("rademacher", "gaussian", "sparse", "hadamard")


@dataclass(frozen=True, eq=False, repr=False)
class ProjectionError(Result):
    """Residuals (k̂ − k) / √(k(x, x) k(y, y)) of all pairs i < j of samples, and of samples with themselves.

    `predicted` is the standard deviation of each residual over seeds, by Johnson and Lindenstrauss's argument; None for
    kinds whose error depends on more than the kernel (kronecker, random-mask).
    """

    kind: str
    dim: int
    residuals: Float[Tensor, " pairs"]
    predicted: Float[Tensor, " pairs"] | None
    own: Float[Tensor, " n"]  # residuals of k(x, x)

    UNITS: ClassVar[Mapping[str, str]] = dict.fromkeys(("residuals", "predicted", "own"), "√(k(x, x) k(y, y))")

    @property
    def rms(self) -> float:
        """The root of the mean square of the residuals."""
        return float(self.residuals.square().mean().sqrt())

    @property
    def expected_rms(self) -> float | None:
        """What `rms` should be; None where it cannot be predicted."""
        return None if self.predicted is None else float(self.predicted.square().mean().sqrt())

    @property
    def largest(self) -> float:
        """The largest residual of a pair, in size."""
        return float(self.residuals.abs().max())

    def quantile(self, probability: float) -> float:
        """The error below which this part of the pairs lies."""
        return float(torch.quantile(self.residuals.abs().double(), probability))

    def dimension(self, error: float, probability: float = 0.95, *, every: bool = False) -> int:
        """Dimensions for which a pair's error stays below `error` with this probability; `every`: all pairs at once.

        From the standard deviation σ at the present dimension (predicted, or measured where it cannot be), by the
        normal tail: z σ √(k / k') = error. Of the pairs, the worst predicted. A Kronecker projection's error falls with
        the fourth root of its dimension. That of a random mask has no such law: a few entries decide it.
        """
        if self.kind == "random-mask":
            raise InputError(
                "kind='random-mask': which few entries it picks decides its error, so no dimension can be promised "
                "from one measurement. Use kind='sparse', or measure at the dimension itself."
            )
        if not _number(error) or not 0 < error < float("inf"):
            raise InputError(f"error={error}; needed: a positive number, relative to √(k(x, x) k(y, y)).")
        if not _number(probability) or not 0 < probability < 1:
            raise InputError(f"probability={probability}; needed: a number between 0 and 1.")
        spread = float(self.predicted.max()) if self.predicted is not None else self.rms
        # For all pairs at once: each may fail with a part of the probability (a union bound).
        tail = (1 - probability) / (len(self.residuals) if every else 1)
        z = -NormalDist().inv_cdf(tail / 2)
        power = 4 if self.kind == "kronecker" else 2
        return max(1, math.ceil(self.dim * (z * spread / error) ** power))

    def table(self) -> str:
        """Parts of the pairs, and the error below which each part lies."""
        parts = (0.5, 0.9, 0.95, 0.99, 1.0)
        return text_table(["pairs", "error below"], [[f"{part:.0%}", self.quantile(part)] for part in parts])

    def plot(self) -> "Figure":
        """The sizes of the residuals beside the prediction."""
        from ..plots import draw_projection

        return draw_projection([self])

    def __repr__(self) -> str:
        """Its figures, which say more than the shapes of its tensors."""
        expected = "" if self.expected_rms is None else f" (predicted {self.expected_rms:.3g})"
        return (
            f"ProjectionError(kind={self.kind!r}, dim={self.dim}, rms={self.rms:.3g}{expected}, "
            f"95 %: {self.quantile(0.95):.3g}, largest={self.largest:.3g}, pairs={len(self.residuals)})"
        )


def _number(v: object) -> bool:
    return isinstance(v, (int, float)) and not isinstance(v, bool)


def projection_error(kernel: Kernel, projected: Projected, x: Inputs) -> ProjectionError:
    """Residuals of `projected` against the exact `kernel` on the samples x, the prediction, and the dimension needed.

    Some hundred samples say enough. Cost: the exact Gram matrix of x, for several outputs full over them.

    >>> import torch, tangency as tg
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 500), torch.nn.Tanh(), torch.nn.Linear(500, 2))
    >>> k, x = tg.pseudo_ntk(model), torch.randn(20, 3)
    >>> error = tg.projection_error(k, tg.projected(k, dim=1024), x)
    >>> error.rms < 0.15, error.dimension(0.01) > 10_000
    (True, True)
    """
    if not isinstance(projected, Projected):
        raise InputError(f"projected is a {type(projected).__name__}; needed: tg.projected(kernel, …).")
    if not isinstance(kernel, Kernel) or isinstance(kernel, Projected):
        raise InputError(f"kernel is a {type(kernel).__name__}; needed: the exact kernel that was projected.")
    # How the tiles are contracted ("method") changes rounding only.
    was, now = projected.base.spec(), kernel.spec()
    different = [k for k in was if k != "method" and was[k] != now.get(k)]
    if different:
        raise InputError(
            f"the projected kernel was made from another one: {checks.some(different)} differ. Give the kernel that "
            "was passed to tg.projected."
        )
    layers = _by_group(projected, x)
    full = torch.stack([tile for _, tile in layers]).sum(0)
    n, c = full.shape[:2]
    if n < 2:
        raise InputError("x has one sample; needed: at least two, to have a pair.")
    if projected.base.trace:
        exact, near = full.diagonal(dim1=1, dim2=3).sum(2), projected(x).double()
    else:  # every entry of a pair's [c, d] block is a residual of its own
        exact, near = full.reshape(n * c, n * c), projected(x).double().reshape(n * c, n * c)
        layers = [(k, tile.reshape(n * c, 1, n * c, 1)) for k, tile in layers]
    size = exact.diagonal()
    if not bool((size > 0).all()):
        raise InputError(f"k(x, x) is 0 for sample {int((size <= 0).nonzero()[0]) // max(1, len(size) // n)}.")
    norms = (size[:, None] * size).sqrt()
    # Each pair once: the lower half is the same, and the diagonal is told apart.
    i, j = torch.triu_indices(len(size), len(size), 1, device=size.device)
    residuals = (near - exact) / norms
    predicted = None
    if projected.projector.sketch.kind in PREDICTED:
        # Groups of parameters have independent matrices, so their variances add up.
        variance = torch.stack([_variance(tile, k, projected.projector.joint) for k, tile in layers]).sum(0)
        predicted = (variance.sqrt() / norms)[i, j].float()
    return ProjectionError(
        projected.projector.sketch.kind,
        projected.projector.dim,
        residuals[i, j].float(),
        predicted,
        residuals.diagonal().float(),
    )


def _by_group(projected: Projected, x: Inputs) -> list[tuple[int, Tensor]]:
    """(dimensions, the exact kernel full over outputs) of all parameters that share dimensions."""
    # The variance of a trace needs the cross terms between outputs, too.
    full = replace(projected.base, trace=False)
    if projected.projector.budget == "global":
        return [(projected.projector.dim, full(x).double())]
    parts = full.parts(x)
    groups = projected.projector.groups(projected.projector.shapes(full.ready(x))).values()
    return [(g.count, torch.stack([parts[name] for name in g.names]).sum(0).double()) for g in groups]


def _variance(full: Float[Tensor, "n c m d"], k: int, joint: bool) -> Tensor:
    """Of ⟨Sx, Sy⟩ summed over outputs: (‖M‖² + tr M²) / k with M = Σ_c g_c(y) g_c(x)ᵀ, from the full kernel.

    With one output: (k(x, x) k(y, y) + k(x, y)²) / k. Where outputs are projected together, Σ_c k_cc plays k's part.
    """
    n = len(full)
    if joint:
        full = full.diagonal(dim1=1, dim2=3).sum(2)[:, None, :, None]
    itself = full[range(n), :, range(n)].flatten(1)  # [n, c·c] of each sample with itself
    cross = full.permute(0, 2, 1, 3)
    return (itself @ itself.T + (cross * cross.transpose(2, 3)).sum((2, 3))) / k
