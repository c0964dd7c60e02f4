"""What logistic regression says of each sample when it is not among those that it was fitted to.

Exactly, by fits that start from the one to all; or by one Newton step from there, in closed form, with its error
measured where it moves furthest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._base import checks
from .._base.progress import bar
from .._base.results import Result
from .._base.types import Float, Numbers
from ..errors import DidNotConverge, InputError
from .curvature import curvature
from .groups import GroupLabels, by_size, checked_groups, every_class_left
from .leave_out import margins
from .logistic_loss import (
    Fitted,
    LogisticModel,
    class_probabilities,
    fit_features,
    fit_gram,
    labelled_features,
    labelled_gram,
)
from .model import Decomposable
from .newton import Chances, Objective
from .samples import SampleWeights, both_columns

# Up to this many groups (samples, without groups) all fits are made where nobody says (heuristic: seconds).
EXACT_UP_TO = 200
# Groups that are fitted without to measure the error of one Newton step: those whose probabilities it moves furthest.
CHECKED = 8


@dataclass(frozen=True, eq=False, repr=False)
class LeftOutLogistic(Result):
    """Each sample as the fit without it (or without its group) sees it.

    `logits`: as of `LogisticModel.logits`, f₀ and bias included. `margins` [n]: the logit of the given class (the
    likeliest of given probabilities) minus the largest other; for two classes the log-odds of the given one. `exact`:
    every fit was made; else one Newton step towards it, and `checked` is the largest error of a probability among the
    8 groups that it moves furthest, for which the fits were made: no bound for the others.
    `fit`: the one to all samples.
    """

    logits: Float[Tensor, "..."]
    probabilities: Float[Tensor, "n classes"]
    margins: Float[Tensor, " n"]
    exact: bool
    checked: float | None
    fit: LogisticModel

    def __repr__(self) -> str:
        how = "exact" if self.exact else f"one Newton step, probabilities within {self.checked:.1e} where checked"
        wrong = float((self.margins < 0).double().mean())
        return f"LeftOutLogistic({len(self.margins)} samples, {wrong:.1%} in another class, {how})"


def leave_out_logistic(
    K: Decomposable,
    y: Numbers,
    *,
    reg: float,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
    bias: bool = False,
    classes: int | None = None,
    cutoff: float | None = None,
    groups: GroupLabels = None,
    exact: bool | None = None,
    tol: float = 1e-10,
    max_steps: int = 200,
    progress: bool = True,
) -> LeftOutLogistic:
    """z_g + (I − P D)⁻¹ P (p − y)_g, P = Φ_g H⁻¹ Φ_gᵀ, D its losses' Hessian: `logistic` without g, by a Newton step.

    Options as of `logistic`; `reg` above 0. `groups`: a label for each sample; all of a group are left out together.
    `exact`: True makes every fit, each beginning from that to all, False takes one Newton step from there (Rad & Maleki
    2020) and measures its error on a few; None: exact for up to 200 groups. In float64. Cost beyond the fit: of the
    steps, a factor of the Hessian, at most about 3 q n³ for q logits; of the fits, a few products n·rank·q each.

    >>> import tangency as tg
    >>> x = torch.randn(40, 3).double()
    >>> left = tg.regress.leave_out_logistic(x @ x.T, (x[:, 0] > 0).long(), reg=0.1, exact=False)
    >>> left.probabilities.shape, left.checked < 0.1
    (torch.Size([40, 2]), True)
    """
    gram, labels, w = labelled_gram(K, y, sample_weights, bias, classes)
    reg, numbers = _checked(labels, w, reg, bias, groups)
    fitted = fit_gram(gram, labels, w, f0, reg, bias, cutoff, tol, max_steps)
    return _leave_out(fitted, numbers, exact, tol, max_steps, progress)


def leave_out_logistic_features(
    features: Numbers,
    y: Numbers,
    *,
    reg: float,
    f0: Numbers | None = None,
    sample_weights: SampleWeights = None,
    bias: bool = False,
    classes: int | None = None,
    groups: GroupLabels = None,
    exact: bool | None = None,
    tol: float = 1e-10,
    max_steps: int = 200,
    progress: bool = True,
) -> LeftOutLogistic:
    """z_g + (I − P D)⁻¹ P (p − y)_g: `leave_out_logistic` through features [n, p], or [n, c, p] of a full kernel.

    >>> x = torch.randn(40, 3).double()
    >>> left = leave_out_logistic_features(x, (x[:, 0] > 0).long(), reg=0.1, bias=True)
    >>> left.exact, left.margins.shape
    (True, torch.Size([40]))
    """
    phi, labels, w = labelled_features(features, y, sample_weights, bias, classes)
    reg, numbers = _checked(labels, w, reg, bias, groups)
    return _leave_out(
        fit_features(phi, labels, w, f0, reg, bias, tol, max_steps), numbers, exact, tol, max_steps, progress
    )


def _checked(labels: Tensor, w: Tensor, reg: float, bias: bool, groups: GroupLabels) -> tuple[float, Tensor]:
    """reg and the number of each sample's group, before anything is computed."""
    if (reg := checks.nonnegative(reg, "reg")) == 0:
        raise InputError("reg=0; needed: above 0, since classes may be separated once a sample is left out.")
    numbers = checked_groups(groups, len(labels), labels.device)
    if bias:
        every_class_left(both_columns(labels), w, numbers)
    return reg, numbers


def _leave_out(
    fitted: Fitted, groups: Tensor, exact: bool | None, tol: float, max_steps: int, progress: bool
) -> LeftOutLogistic:
    """By fits or by steps, from the fit to all samples."""
    objective, answer = fitted.objective, fitted.answer
    count = int(groups.max()) + 1
    exact = count <= EXACT_UP_TO if exact is None else exact
    error: float | None = None
    start = (answer.theta, answer.b)
    if exact:
        z = answer.logits.clone()
        _refit(objective, start, z, groups, range(count), tol, max_steps, progress)
    else:
        z = _step(objective, answer.logits, groups, progress)
        change = (class_probabilities(z) - class_probabilities(answer.logits)).abs().sum(1)
        moved = z.new_zeros(count).index_add_(0, groups, change)
        some, again = moved.topk(min(CHECKED, count)).indices.tolist(), z.clone()
        _refit(objective, start, again, groups, some, tol, max_steps, progress)
        error = float((class_probabilities(again) - class_probabilities(z)).abs().max())
    both = torch.cat([torch.zeros_like(z), z], 1) if z.shape[1] == 1 else z
    margin = margins(both, both_columns(objective.labels).argmax(1))
    logits = z.reshape(fitted.model.model.fitted.shape)
    return LeftOutLogistic(logits, class_probabilities(z), margin, exact, error, fitted.model)


def _refit(
    objective: Objective,
    start: tuple[Tensor, Tensor],
    z: Tensor,
    groups: Tensor,
    some: Sequence[int],
    tol: float,
    max_steps: int,
    progress: bool,
) -> None:
    """Logits of some groups, each by the fit without it, in place of theirs in z."""
    with bar(len(some), "leave out", "fit", show=progress) as tick:
        for group in some:
            rows = groups == group
            # Weight zero takes samples out of the fit, which still says what their logits are.
            without = replace(objective, w=objective.w.masked_fill(rows[:, None], 0))
            answer = without.newton(tol, max_steps, start=start)
            if answer.shortfall:
                which = checks.some([str(i) for i in rows.nonzero()[:, 0].tolist()])
                raise DidNotConverge(
                    f"without sample {which}, Newton's method reached {answer.shortfall}. Give a larger reg= (it was "
                    f"{objective.reg:g}), more max_steps or a larger tol.",
                    answer,
                )
            z[rows] = answer.logits[rows]
            tick()


def _step(objective: Objective, z: Tensor, groups: Tensor, progress: bool) -> Tensor:
    """Logits [n, q] after one Newton step of the problem without each sample's group, from the optimum with it."""
    q, chances, out = z.shape[1], Chances.of(z), z.clone()
    force = objective.w * chances.less(objective.labels)  # what the sample itself adds to the gradient
    bend = -chances.p[:, :, None] * chances.p[:, None, :] if q > 1 else z.new_zeros(len(z), 1, 1)
    bend.diagonal(dim1=1, dim2=2).copy_(chances.p * chances.rest)
    bend = bend * objective.w[:, :, None]
    bent = curvature(objective, z)
    with bar(len(z), "leave out", "sample", show=progress) as tick:
        for members in by_size(groups):
            m = members.shape[1]
            for part in members.split(max(1, bent.step // m)):
                P = bent.block(part)
                d = P.new_zeros(len(part), m, q, m, q)
                for k in range(m):
                    d[:, k, :, k] = bend[part[:, k]]
                system = torch.eye(m * q, dtype=P.dtype, device=P.device) - P @ d.reshape(P.shape)
                moved = torch.linalg.solve(system, P @ force[part].reshape(len(part), -1, 1))
                out[part] += moved.reshape(*part.shape, q)
                tick(part.numel())
    return out
