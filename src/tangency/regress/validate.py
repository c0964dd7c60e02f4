"""How well a ridge fit will do on new data, from the training data alone, for every reg from one eigendecomposition."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._progress import bar
from .._types import Float
from ..eigen import Spectrum, spectrum
from ..errors import InputError, NotPositiveDefinite
from ..matrix import Matrix, between, square, targets
from .model import Array, Decomposable, Problem, same_shape


@dataclass(frozen=True, eq=False)
class Risks:
    """Mean square errors (over samples and outputs) by reg: `train`, and two predictions of that on new data."""

    regs: Float[Tensor, " l"]
    train: Float[Tensor, " l"]
    gcv: Float[Tensor, " l"]  # generalised cross-validation
    loo: Float[Tensor, " l"]  # leave one sample out, exactly
    degrees: Float[Tensor, " l"]  # effective degrees of freedom, tr K (K + reg)⁻¹

    def best(self, by: Literal["loo", "gcv"] = "loo") -> float:
        """The reg of least predicted error."""
        if by not in ("loo", "gcv"):
            raise InputError(f"by={by!r}; needed: 'loo' or 'gcv'.")
        return float(self.regs[getattr(self, by).argmin()])


def cross_validate(K: Decomposable, y: Array, regs: Sequence[float] | Array, *, f0: Array | None = None) -> Risks:
    """Leave-one-out ‖a_i / (K + reg)⁻¹_ii‖² and GCV ‖y − f‖² / (1 − tr H/n)² of `ridge`, for all `regs` at once.

    Both from one eigendecomposition, none of the n fits is made. For a full kernel a sample is left out with all its
    outputs. Golub, Heath & Wahba 1979; Wei, Hu & Steinhardt 2022, "More than a toy". Cost: about 9 n³, whatever regs.

    >>> import tangency as tg
    >>> x, y = torch.randn(30, 4).double(), torch.randn(30).double()
    >>> risks = tg.regress.cross_validate(x @ x.T, y, [0.01, 0.1, 1, 10])
    >>> risks.best() in (0.01, 0.1, 1, 10)
    True
    """
    problem = Problem.of(K, y, f0)
    whole = problem.spectrum()
    if not whole.complete:
        raise InputError(f"only {len(whole)} eigenpairs were given; needed: all of them (tg.solve.spectrum).")
    grid = _regs(regs, whole)
    inside = whole.vectors.T @ problem.target  # [r, q]
    n, c = whole.shape[0], problem.rows // whole.shape[0]
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    squared = whole.vectors.square() if c == 1 else None
    for reg in grid:
        inverse = 1 / (whole.values + reg)
        a = whole.vectors @ (inverse[:, None] * inside)  # (K + reg)⁻¹ t; the error on the training samples is reg·a
        if squared is not None:
            out = a / (squared @ inverse)[:, None]
        else:
            v = whole.vectors.reshape(n, c, -1)
            blocks = torch.einsum("icr,r,idr->icd", v, inverse, v)
            out = torch.linalg.solve(blocks, a.reshape(n, c, -1)).reshape(a.shape)
        train = (reg * a).square().mean()
        rows.append(
            (train, train / (reg * inverse.mean()).square(), out.square().mean(), (whole.values * inverse).sum())
        )
    return Risks(grid, *(torch.stack(column) for column in zip(*rows, strict=True)))


def _regs(regs: Any, whole: Spectrum) -> Tensor:
    grid = torch.as_tensor(regs, dtype=whole.dtype, device=whole.device).reshape(-1)
    if not len(grid) or not bool(((grid > 0) & grid.isfinite()).all()):
        raise InputError(f"regs={grid.tolist()}; needed: one or more positive numbers.")
    if float(whole.values[-1] + grid.min()) <= 0:
        raise NotPositiveDefinite(
            f"K has the eigenvalue {float(whole.values[-1]):.3g}, so K + {float(grid.min()):.3g}·I is not positive "
            "definite. Leave out regs below that, or compute the kernel in float64."
        )
    return grid


@dataclass(frozen=True, eq=False)
class RiskStudy:
    """Predicted and measured mean square errors, each [sizes, repeats, regs]; `plots.risk` draws them."""

    sizes: tuple[int, ...]
    regs: Float[Tensor, " l"]
    train: Float[Tensor, "s r l"]
    gcv: Float[Tensor, "s r l"]
    loo: Float[Tensor, "s r l"]
    measured: Float[Tensor, "s r l"]  # on the test samples

    def error(self, by: Literal["loo", "gcv"] = "gcv") -> Tensor:
        """|predicted − measured| / measured, [sizes, repeats, regs]."""
        return (getattr(self, by) - self.measured).abs() / self.measured


def risk_study(
    K: Matrix,
    y: Array,
    cross: Matrix,
    y_test: Array,
    *,
    sizes: Sequence[int],
    regs: Sequence[float] | Array,
    repeats: int = 1,
    f0: Array | None = None,
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
    gram = square(K)
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
        y, y_test = y - same_shape(f0, y, "f0"), y_test - same_shape(f0_test, y_test, "f0_test")
    elif f0 is not None or f0_test is not None:
        raise InputError("give f0 and f0_test both, or neither.")
    cross = between(cross)
    y, y_test = y.reshape(n, -1), y_test.reshape(len(y_test), -1)
    if cross.shape != (len(y_test), n) or y_test.shape[1] != y.shape[1]:
        raise InputError(
            f"cross has shape {tuple(cross.shape)}, y_test {tuple(y_test.shape)}; needed: [m, {n}] and "
            f"[m, {y.shape[1]}]."
        )
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[Tensor, ...]] = []
    with bar(len(sizes) * repeats, "risk study", "fit", show=progress) as step:
        for size in sizes:
            for _ in range(repeats):
                index = torch.randperm(n, generator=generator)[:size]
                whole = spectrum(gram.select(index, index), dtype=y.dtype)
                risks = cross_validate(whole, y[index], regs)
                ahead = cross.select(None, index).dense().to(y) @ whole.vectors
                inside = whole.vectors.T @ y[index]
                off = [(ahead @ (inside / (whole.values + r)[:, None]) - y_test).square().mean() for r in risks.regs]
                found.append((risks.train, risks.gcv, risks.loo, torch.stack(off)))
                step()
    each = [torch.stack(column).unflatten(0, (len(sizes), repeats)) for column in zip(*found, strict=True)]
    return RiskStudy(tuple(sizes), risks.regs, *each)
