"""Least squares: ridge, ridgeless by pseudo-inverse, and the same fit through the features."""

import torch

from .._base import checks, tree
from .._base.types import Numbers
from ..errors import InputError
from ..gram.gram import Gram
from ..linalg.decompose import singular
from ..linalg.eigen import Spectrum
from ..linalg.matrix import Matrix, targets
from ..linalg.systems import Solver, solve
from .model import Decomposable, KernelModel, Problem, checked_f0
from .samples import SampleWeights, checked_weights


def ridge(
    K: Matrix,
    y: Numbers,
    *,
    reg: float,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
    solver: Solver | None = None,
    tol: float | None = None,
) -> KernelModel:
    """f = f₀ + k(·, X)·a with a = (K + reg·W⁻¹)⁻¹ (y − f₀): minimises Σ_i w_i (f(x_i) − y_i)² + reg·‖f − f₀‖².

    K [n, n] with y [n] or [n, q] (one fit per column, K⊗I), or a full kernel [n, c, n, c] with y [n, c]. `reg` is
    absolute: Nλ where the loss is a mean. `reg=0` needs a K that can be inverted; else see `ridgeless`.
    `solver`, `tol`: as for `tg.linalg.solve`.

    >>> import tangency as tg
    >>> model, x, y = torch.nn.Linear(3, 1).double(), torch.randn(8, 3).double(), torch.randn(8).double()
    >>> k = tg.trace_ntk(model)
    >>> fit = tg.regress.ridge(tg.compute(k, x), y, reg=0.1)
    >>> fit.predict(tg.compute(k, torch.randn(2, 3).double(), x)).shape
    torch.Size([2])
    """
    problem = Problem.of(K, y, f0, sample_weights)
    reg = checks.nonnegative(reg, "reg")
    if isinstance(problem.matrix, Spectrum):
        raise InputError("ridge takes the Gram itself; with a spectrum at hand use ridgeless or cross_validate.")
    solved = solve(problem.matrix, problem.target, reg=reg, solver=solver, tol=tol)
    return problem.model(solved.value, reg=reg, solver=solved.solver, steps=solved.steps, residual=solved.residual)


def ridgeless(
    K: Decomposable,
    y: Numbers,
    *,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
    cutoff: float | None = None,
) -> KernelModel:
    """f = f₀ + k(·, X) W^½ (W^½ K W^½)⁺ W^½ (y − f₀): the limit reg → 0, of least norm.

    The pseudo-inverse keeps eigenvalues above `cutoff`·λ_1 (default n·ε); the model says how many (`rank`), and its
    `residual` is against what they can reach. Qadeer et al. 2023 (13), (14). Takes a `Spectrum`, too.

    >>> import tangency as tg
    >>> K = torch.tensor([[1.0, 1.0], [1.0, 1.0]])  # the same sample twice
    >>> fit = ridgeless(K, torch.tensor([1.0, 3.0]))
    >>> fit.rank, [round(v, 3) for v in fit.fitted.tolist()]
    (1, [2.0, 2.0])
    """
    problem = Problem.of(K, y, f0, sample_weights)
    whole = problem.spectrum()
    part = whole.kept(cutoff)
    inside = part.vectors.T @ problem.target
    b = part.vectors @ (inside / part.values[:, None])
    residual = whole.residual  # of the eigenpairs; the Gram itself, where it is there, says more
    if isinstance(problem.matrix, Gram):
        reached = part.vectors @ inside
        residual = float((problem.matrix @ b - reached).norm() / reached.norm().clamp_min(torch.finfo(b.dtype).tiny))
    return problem.model(
        b, reg=0.0, solver=f"pseudo-inverse ({whole.solver})", steps=whole.steps, residual=residual, rank=len(part),
        cutoff=whole.cutoff(cutoff),
    )  # fmt: skip


def least_squares(
    features: Numbers,
    y: Numbers,
    *,
    reg: float = 0.0,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
    cutoff: float | None = None,
) -> KernelModel:
    """γ = argmin Σ_i w_i (φ(x_i)·γ − y_i + f₀)² + reg·‖γ‖², by singular values.

    The same fit as by ridge or ridgeless, better conditioned: K = ΦΦᵀ squares the singular values (CKJ in Qadeer et al.
    2023, App. B). `features`: [n, p], or [n, c, p] for a full kernel; `kernel.features(x)` gives them. With reg = 0,
    singular values up to `cutoff`·σ_1 (default max(n, p)·ε) are left out; with reg > 0 those that are rounding, 4ε·σ_1.
    Of more than 8,192 rows and features those up to 6e-8·σ_1: they are found by eigenvectors then.

    >>> import tangency as tg
    >>> model, x = tg.models.mlp([3, 9, 1]), torch.randn(20, 3)
    >>> phi = tg.conjugate_kernel(model).features(x)
    >>> least_squares(phi, torch.randn(20)).predict(phi).shape
    torch.Size([20])
    """
    phi = tree.numbers(features, "features")
    if phi.dim() not in (2, 3) or not phi.is_floating_point() or 0 in phi.shape:
        raise InputError(f"features have shape {tuple(phi.shape)}, {phi.dtype}; needed: real [n, p] or [n, c, p].")
    checks.finite(phi, "features")
    reg = checks.nonnegative(reg, "reg")
    rounding = max(phi.shape[:-1].numel(), phi.shape[-1]) * torch.finfo(phi.dtype).eps
    cutoff = rounding if cutoff is None else checks.fraction(cutoff, "cutoff")
    y = targets(y, phi.shape[:-1], phi.dtype, phi.device)
    rows = phi.shape[:-1].numel()
    flat, kind = y.reshape(rows, -1), y.dtype
    begin = None if f0 is None else checked_f0(f0, y, "f0").reshape(rows, -1)
    t = flat if begin is None else flat - begin
    matrix = phi.reshape(rows, -1).to(kind)
    w = checked_weights(sample_weights, len(phi), flat)
    root = None if w is None else w.sqrt().repeat_interleave(rows // len(phi))[:, None]
    # Rows times √w: least squares of what is left is the weighted problem.
    a, t = (matrix, t) if root is None else (matrix * root, t * root)
    s, v, inside, unknown = singular(a, t)
    # What is rounding has singular vectors by chance; a reg far below it would let them decide.
    limit = float(s[0]) * max(unknown, cutoff if reg == 0 else 4 * torch.finfo(phi.dtype).eps)
    keep = int((s > limit).sum())
    s, v, inside = s[:keep], v[:, :keep], inside[:keep]
    # Σ_i v_i σ_i/(σ_i² + reg) u_iᵀ t: with reg = 0 the pseudo-inverse, of least norm.
    gamma = v @ ((s / (s.square() + reg))[:, None] * inside)
    out = matrix @ gamma
    # The gradient of the objective, relative to that at γ = 0: small also where y cannot be reached.
    normal = a.T @ (a @ gamma - t) + reg * gamma
    residual = float(normal.norm() / (a.T @ t).norm().clamp_min(torch.finfo(kind).tiny))
    return KernelModel(
        gamma.reshape(-1, *y.shape[1:]) if phi.dim() == 2 else gamma[:, 0],
        (out if begin is None else out + begin).reshape(y.shape),
        float(gamma.norm()), reg, "singular values of the features", 1, residual, f0 is not None, phi.dim() == 3,
        *((keep, limit) if reg == 0 else ()),
    )  # fmt: skip
