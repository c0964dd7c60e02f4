"""How well a ridge fit will do on new data, from the training data alone, for every reg from one eigendecomposition."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Array, Float, Numbers
from ..errors import InputError, NotPositiveDefinite, TangencyWarning
from ..linalg.eigen import Spectrum, spectrum
from ..linalg.matrix import Matrix, between, square, targets
from .inverse import diagonal_blocks, rounding_of, settled
from .model import Decomposable, Problem, checked_f0

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Regs = Sequence[float] | Array | float
# Leave-one-out errors that rounding may move by more than this, relative to them, are warned of.
UNSURE = 1e-3


@dataclass(frozen=True, eq=False, repr=False)
class Risks(Result):
    """Mean square errors (over samples and outputs) by reg: `train`, and two predictions of that on new data.

    `uncertainty`: about how far the rounding of K's entries moves `loo`, relative to it, to first order. It grows as
    reg falls towards the rounding of K: what a sample left out shows is then decided by digits that K does not have.
    """

    regs: Float[Tensor, " l"]
    train: Float[Tensor, " l"]
    gcv: Float[Tensor, " l"]  # generalised cross-validation
    loo: Float[Tensor, " l"]  # leave one sample out, exactly
    degrees: Float[Tensor, " l"]  # effective degrees of freedom, tr K (K + reg)⁻¹
    uncertainty: Float[Tensor, " l"]

    def best(self, by: Literal["loo", "gcv"] = "loo") -> float:
        """The reg of least predicted error."""
        if by not in ("loo", "gcv"):
            raise InputError(f"by={by!r}; needed: 'loo' or 'gcv'.")
        return float(self.regs[getattr(self, by).argmin()])

    def table(self) -> str:
        """A line for each reg."""
        columns = (self.regs, self.train, self.gcv, self.loo, self.degrees, self.uncertainty)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return text_table(["reg", "train", "gcv", "loo", "degrees", "uncertainty"], rows)


def cross_validate(K: Decomposable, y: Numbers, regs: Regs, *, f0: Numbers | None = None) -> Risks:
    """Leave-one-out ‖a_i / (K + reg)⁻¹_ii‖² and GCV ‖y − f‖² / (1 − tr H/n)² of `ridge`, for all `regs` at once.

    Both from one eigendecomposition, none of the n fits is made. For a full kernel a sample is left out with all its
    outputs. Eigenvalues within the rounding of K count as zero; `Risks.uncertainty` says how far that rounding may move
    `loo`, and above 0.1 % it is warned of (unless K is a `Spectrum`). Golub, Heath & Wahba 1979; Wei, Hu & Steinhardt
    2022, "More than a toy". Cost: about 9 n³, whatever regs.

    >>> import tangency as tg
    >>> x, y = torch.randn(30, 4).double(), torch.randn(30).double()
    >>> risks = tg.regress.cross_validate(x @ x.T, y, [0.01, 0.1, 1, 10])
    >>> risks.best() in (0.01, 0.1, 1, 10)
    True
    """
    problem = Problem.of(K, y, f0)
    whole = problem.spectrum()
    values = settled(whole)
    grid, (_, entry) = _check_regs(regs, whole), rounding_of(whole)
    inside = whole.vectors.T @ problem.target  # [r, q]
    n, c = whole.shape[0], problem.rows // whole.shape[0]
    rows: list[tuple[Tensor, ...]] = []
    for reg in grid:
        inverse = 1 / (values + reg)
        a = whole.vectors @ (inverse[:, None] * inside)  # (K + reg)⁻¹ t; the error on the training samples is reg·a
        # Blocks [n, c, c] on the diagonals of M = (K + reg)⁻¹ and M², one for each sample.
        once, twice = (diagonal_blocks(whole.vectors, inverse**k, n) for k in (1, 2))
        # What the fit without sample i misses it by is M_ii⁻¹ a_i (Sherman–Morrison–Woodbury).
        out = torch.linalg.solve(once, a.reshape(n, c, -1))
        moved = entry * _estimate_shift(once, twice, a, whole.vectors @ (inverse.square()[:, None] * inside), out)
        train, loo = (reg * a).square().mean(), out.square().mean()
        shift = (2 * out.flatten(1).norm(dim=1) * moved + moved.square()).sum() / out.numel()
        rows.append(
            (
                train, train / (reg * inverse.mean()).square(), loo, (values * inverse).sum(),
                torch.where(loo > 0, shift / loo, torch.zeros_like(loo)),
            )
        )  # fmt: skip
    risks = Risks(grid, *(torch.stack(column) for column in zip(*rows, strict=True)))
    if not isinstance(K, Spectrum):  # who decomposes K himself searches over many regs, and has the figures
        _warn_if_unsure(risks)
    return risks


def _estimate_shift(once: Tensor, twice: Tensor, a: Tensor, again: Tensor, out: Tensor) -> Tensor:
    """How far out_i moves, for each sample [n], when K moves by E with random entries of size one, to first order.

    With U = M e_i the columns of M = (K + reg)⁻¹ for sample i and m = e_iᵀ M e_i, out_i = m⁻¹ a_i moves by
    −m⁻¹ Uᵀ E (a − U out_i), in which a − U out_i are the coefficients of the fit without the sample. `once`, `twice`:
    m and UᵀU; `again`: M a.
    """
    inverse = torch.linalg.inv(once)
    slope = (inverse @ twice @ inverse).diagonal(dim1=1, dim2=2).sum(1)
    rest = a.square().sum() - 2 * (out * again.reshape(out.shape)).sum((1, 2)) + (out * (twice @ out)).sum((1, 2))
    return (slope.clamp_min(0) * rest.clamp_min(0)).sqrt()


def _warn_if_unsure(risks: Risks) -> None:
    """Name the regs for which the digits of K do not decide the leave-one-out error."""
    unsure = risks.uncertainty > UNSURE
    if bool(unsure.any()):
        worst = int(risks.uncertainty.argmax())
        below = float(risks.regs[unsure].max())
        warnings.warn(
            f"reg up to {below:.3g} is so small beside K that the rounding of K alone may move the leave-one-out error "
            f"by more than {UNSURE:.1%} (at {float(risks.regs[worst]):.3g} by {float(risks.uncertainty[worst]):.1%}). "
            "Give larger regs, or compute the kernel in float64; .uncertainty has the figure for each reg.",
            TangencyWarning,
            stacklevel=3,
        )


def _check_regs(regs: Regs, whole: Spectrum) -> Tensor:
    """The regs [l] as K is, each positive and large enough for K + reg to be positive definite."""
    grid = torch.as_tensor(regs, dtype=whole.dtype, device=whole.device).reshape(-1)
    if not len(grid) or not bool(((grid > 0) & grid.isfinite()).all()):
        raise InputError(f"regs={grid.tolist()}; needed: one or more positive numbers.")
    if float(whole.values[-1] + grid.min()) <= 0:
        raise NotPositiveDefinite(
            f"K has the eigenvalue {float(whole.values[-1]):.3g}, so K + {float(grid.min()):.3g}·I is not positive "
            "definite. Leave out regs below that, or compute the kernel in float64."
        )
    return grid


@dataclass(frozen=True, eq=False, repr=False)
class RiskStudy(Result):
    """Predicted and measured mean square errors of ridge regression, each [sizes, repeats, regs]."""

    sizes: tuple[int, ...]
    regs: Float[Tensor, " l"]
    train: Float[Tensor, "s r l"]
    gcv: Float[Tensor, "s r l"]
    loo: Float[Tensor, "s r l"]
    measured: Float[Tensor, "s r l"]  # on the test samples

    def error(self, by: Literal["loo", "gcv"] = "gcv") -> Tensor:
        """|predicted − measured| / measured, [sizes, repeats, regs]."""
        return (getattr(self, by) - self.measured).abs() / self.measured

    def table(self) -> str:
        """A line for each size and reg, means over the repeats."""
        errors = [v.mean(1).tolist() for v in (self.train, self.gcv, self.loo, self.measured)]
        rows = (
            (size, reg, *(error[i][j] for error in errors))
            for i, size in enumerate(self.sizes)
            for j, reg in enumerate(self.regs.tolist())
        )
        return text_table(["samples", "reg", "train", "gcv", "loo", "measured"], rows)

    def plot(self) -> "Figure":
        """Predicted against measured error, over reg for each size, and all fits together."""
        from ..plots import draw_risk

        return draw_risk(self)


def risk_study(
    K: Matrix,
    y: Numbers,
    cross: Matrix,
    y_test: Array,
    *,
    sizes: Sequence[int],
    regs: Regs,
    repeats: int = 1,
    f0: Numbers | None = None,
    f0_test: Array | None = None,
    seed: int = 0,
    progress: bool = True,
) -> RiskStudy:
    """Predicted against measured risk of ridge regression, over random training sets of each size and all `regs`.

    K [n, n]: the Gram of the training samples; `cross` [m, n]: of the test samples with them. Sutherland's lecture,
    "Predicting generalization" (Wei, Hu & Steinhardt 2022, Fig. 1). Cost: an eigendecomposition per size and repeat.

    >>> x, z = torch.randn(40, 5).double(), torch.randn(9, 5).double()
    >>> study = risk_study(x @ x.T, x[:, 0], z @ x.T, z[:, 0], sizes=[10, 40], regs=[0.1, 1.0])
    >>> study.error("loo").shape
    torch.Size([2, 1, 2])
    """
    gram, cross = square(K), between(cross)
    if len(gram.shape) != 2:
        raise InputError(f"K has shape {tuple(gram.shape)}; needed: [n, n], one kernel for all outputs.")
    n = gram.shape[0]
    if any(not 2 <= size <= n for size in sizes) or not len(sizes):
        raise InputError(f"sizes={list(sizes)}; needed: one or more numbers of samples from 2 to {n}.")
    if repeats < 1:
        raise InputError(f"repeats={repeats}; needed: at least 1.")
    y = targets(y, torch.Size([n]), gram.dtype, gram.device)
    y_test = targets(y_test, torch.Size([len(y_test)]), gram.dtype, gram.device, "y_test").to(y)
    if f0 is not None and f0_test is not None:
        y, y_test = y - checked_f0(f0, y, "f0"), y_test - checked_f0(f0_test, y_test, "f0_test")
    elif f0 is not None or f0_test is not None:
        raise InputError("give f0 and f0_test both, or neither.")
    y, y_test = y.reshape(n, -1), y_test.reshape(len(y_test), -1)
    if cross.shape != (len(y_test), n) or y_test.shape[1] != y.shape[1]:
        raise InputError(
            f"cross has shape {tuple(cross.shape)}, y_test {tuple(y_test.shape)}; needed: [m, {n}] and "
            f"[m, {y.shape[1]}]."
        )
    generator = torch.Generator().manual_seed(seed)
    errors: list[tuple[Tensor, ...]] = []
    with bar(len(sizes) * repeats, "risk study", "fit", show=progress) as step:
        for size in sizes:
            for _ in range(repeats):
                # Subsets of one Gram, so that the kernel is computed once for all sizes.
                index = torch.randperm(n, generator=generator)[:size]
                whole = spectrum(gram.select(index, index), dtype=y.dtype, device=y.device)
                risks = cross_validate(whole, y[index], regs)
                measured = _measure(whole, cross.select(None, index).dense().to(y), y[index], y_test, risks.regs)
                errors.append((risks.train, risks.gcv, risks.loo, measured))
                step()
    by_size = [torch.stack(column).unflatten(0, (len(sizes), repeats)) for column in zip(*errors, strict=True)]
    return RiskStudy(tuple(sizes), risks.regs, *by_size)


def _measure(whole: Spectrum, cross: Tensor, y: Tensor, y_test: Tensor, regs: Tensor) -> Tensor:
    """Mean square errors on the test samples by reg, [l], each from the eigenpairs of the training samples' Gram."""
    ahead, inside = cross @ whole.vectors, whole.vectors.T @ y
    errors = [(ahead @ (inside / (whole.values + reg)[:, None]) - y_test).square().mean() for reg in regs]
    return torch.stack(errors)
