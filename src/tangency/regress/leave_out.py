"""What ridge regression says of each sample when it is not among those that it was fitted to; none of the fits is made.

With M = (K + reg·W⁻¹)⁻¹ and a = M (y − f₀), the fit without the samples g misses them by M_gg⁻¹ a_g.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result
from .._base.types import FilePath, Float, Memory, Numbers
from ..errors import DidNotConverge, InputError
from ..linalg.eigen import Spectrum
from .groups import GroupLabels, by_size, checked_groups, with_outputs
from .inverse import Inverse, factor_inverse, spectral_inverse
from .model import Decomposable, Problem
from .samples import SampleWeights

# Groups with samples of weight zero that are followed at a time (heuristic): a product with K serves all of them.
FOLLOWED = 64


@dataclass(frozen=True, eq=False, repr=False)
class LeftOut(Result):
    """Each sample as the fit without it (or without its group) sees it.

    `predictions` (f₀ included) and `errors` = y − predictions have the shape of y. `leverage` [n]: the diagonal of the
    hat matrix H, with f = f₀ + H (y − f₀), the mean over the outputs for a full kernel; of each sample by itself, also
    where groups are left out; 0 for a sample of weight 0, which is in no fit. `residual`: of the fit to all, measured.
    """

    predictions: Float[Tensor, "..."]
    errors: Float[Tensor, "..."]
    leverage: Float[Tensor, " n"]
    reg: float
    solver: str
    residual: float

    def __repr__(self) -> str:
        return (
            f"LeftOut({tuple(self.predictions.shape)} predictions, reg {self.reg:g}, mean square error "
            f"{float(self.errors.square().mean()):.4g}, {self.solver}, residual {self.residual:.1e})"
        )

    def margins(self, labels: Numbers) -> Tensor:
        """The prediction of the given class minus the largest of the others, [n], for targets [n, c] of c classes.

        `labels`: integers from 0 on, [n]. Below zero: without the sample, the fit says another class.

        >>> import tangency as tg
        >>> x, labels = torch.randn(30, 4).double(), torch.arange(30) % 3
        >>> left = tg.regress.leave_out(x @ x.T, torch.eye(3).double()[labels], reg=0.1)
        >>> left.margins(labels).shape
        torch.Size([30])
        """
        f, given = self.predictions, tree.numbers(labels, "labels")
        if f.dim() != 2 or f.shape[1] < 2:
            raise InputError(f"the targets have shape {tuple(f.shape)}; margins need a column for each class, [n, c].")
        if given.shape != f.shape[:1] or given.is_floating_point() or given.is_complex():
            raise InputError(
                f"labels are {given.dtype} of shape {tuple(given.shape)}; needed: a class for each sample, "
                f"[{len(f)}], as integers from 0."
            )
        given = given.to(f.device).long()
        if int(given.min()) < 0 or int(given.max()) >= f.shape[1]:
            raise InputError(
                f"labels are from {int(given.min())} to {int(given.max())}; needed: from 0 to {f.shape[1] - 1}, as the "
                "targets have columns."
            )
        return margins(f, given)


def margins(scores: Tensor, labels: Tensor) -> Tensor:
    """The score of the class given minus the largest of the others, [n], from scores [n, c] of all classes."""
    column = labels[:, None]
    others = scores.scatter(1, column, -torch.inf).amax(1)
    return scores.gather(1, column)[:, 0] - others


def leave_out(
    K: Decomposable,
    y: Numbers,
    *,
    reg: float,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
    groups: GroupLabels = None,
    memory: Memory = None,
    scratch: FilePath | None = None,
    progress: bool = True,
) -> LeftOut:
    """e_g = M_gg⁻¹ a_g with M = (K + reg·W⁻¹)⁻¹, a = M (y − f₀): how far `ridge` without g misses y_g, for every g.

    K [n, n] with y [n] or [n, q] (K⊗I), or a full kernel [n, c, n, c] with y [n, c], whose samples are left out with
    all their outputs; in memory or on disk, or a `Spectrum`, which serves many regs. `groups`: a label for each sample,
    an integer or a string (its subject, its source): all of a group are left out together; default: each sample by
    itself. A sample of weight 0 is in no fit; it is predicted by the one without the others of its group. `reg=0` needs
    a K that can be inverted.

    The work is done in the wider type of K and y, on K's device; a Gram on disk is worked on where y lies. `memory`:
    for the Cholesky factor, n² numbers (default: half of this machine's, or what is free on the GPU); `scratch`: a
    folder for it where it does not fit. Golub, Heath & Wahba 1979. Cost: 2/3 n³ operations, twice a fit; from a
    `Spectrum` n².

    >>> import tangency as tg
    >>> x, y = torch.randn(30, 4).double(), torch.randn(30).double()
    >>> left = tg.regress.leave_out(x @ x.T, y, reg=0.1)
    >>> one = tg.regress.ridge((x @ x.T)[1:, 1:], y[1:], reg=0.1).predict((x @ x.T)[:1, 1:])  # without the first
    >>> torch.allclose(left.predictions[:1], one)
    True
    """
    problem = Problem.of(K, y, f0, sample_weights)
    reg = checks.nonnegative(reg, "reg")
    labels = checked_groups(groups, problem.shape[0], problem.target.device)
    inverse: Inverse
    if isinstance(problem.matrix, Spectrum):
        inverse = spectral_inverse(problem.spectrum(), reg)
    else:
        inverse = factor_inverse(problem.matrix, reg, problem.target, memory, scratch, progress)
    solved = inverse.solve(problem.target)
    c = problem.rows // problem.shape[0]
    inside = labels if problem.kept is None else labels[problem.kept[::c] // c]
    off, leverage = torch.empty_like(solved.value), torch.empty_like(solved.value[:, 0])
    for rows, block in inverse.blocks([with_outputs(m, c) for m in by_size(inside)], progress):
        # What the fit without these misses them by (Sherman–Morrison–Woodbury).
        off[rows] = torch.linalg.solve(block, solved.value[rows])
        leverage[rows] = 1 - reg * block.diagonal(dim1=1, dim2=2)
    # √w (y − f₀) was fitted, so √w (y − f) was found.
    errors = off if problem.root is None else off / problem.root
    if problem.kept is not None:
        errors = _with_weightless(problem, inverse, labels, off, solved.value)
        leverage = leverage.new_zeros(problem.rows).index_copy(0, problem.kept, leverage)
    errors = errors.reshape(problem.shape)
    mean = leverage.reshape(-1, c).mean(1)
    left = LeftOut(problem.y - errors, errors, mean, reg, inverse.solver, solved.residual)
    return _checked_residual(left, isinstance(problem.matrix, Spectrum))


def _checked_residual(left: LeftOut, by_spectrum: bool) -> LeftOut:
    """Refuse a residual as `ridge` would; a spectrum is searched over many regs, and each of them has its figure."""
    limit = 1e-6 if left.errors.dtype == torch.float64 else 1e-3  # as of tg.linalg.solve
    if not by_spectrum and not left.residual <= limit:
        raise DidNotConverge(
            f"{left.solver} left the relative residual {left.residual:.2e}; needed: {limit:.0e}. K is ill-conditioned "
            f"beside reg: give a larger reg= (it was {left.reg:g}), or y in float64; .solution holds what was found.",
            left,
        )
    return left


def _with_weightless(problem: Problem, inverse: Inverse, labels: Tensor, off: Tensor, b: Tensor) -> Tensor:
    """Errors [n·c, q] of all samples, from those of positive weight.

    `off`: theirs, times √w; `b`: the coefficients, divided by √w. Without a group g the coefficients are
    a − M_·g M_gg⁻¹ a_g, and a sample of g that has no weight sees them through its row of K.
    """
    assert problem.kept is not None
    assert problem.root is not None
    c = problem.rows // problem.shape[0]
    flat = problem.y.reshape(problem.rows, -1)
    fitted = problem.image(problem.dual(b))
    errors = flat - (fitted if problem.f0 is None else fitted + problem.f0)
    errors[problem.kept] = off / problem.root
    rows_of = labels.repeat_interleave(c)  # the group of each row
    weightless = torch.ones_like(rows_of, dtype=torch.bool)
    weightless[problem.kept] = False
    inside = rows_of[problem.kept]
    both = [g for g in rows_of[weightless].unique().tolist() if bool((inside == g).any())]
    for part in (both[i : i + FOLLOWED] for i in range(0, len(both), FOLLOWED)):
        right = torch.cat([off * (inside == g)[:, None] for g in part], 1)  # a group each, q columns
        moved = problem.image(problem.dual(inverse.solve(right).value)).reshape(problem.rows, len(part), -1)
        for k, g in enumerate(part):
            rows = weightless & (rows_of == g)
            errors[rows] += moved[rows, k]
    return errors
