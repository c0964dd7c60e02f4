"""How large the penalty of a last layer is: by samples that a fit has not seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.progress import bar
from .._base.results import Result, text_table
from ..errors import InputError
from .head_fit import HeadProblem, newton_steps, solve_head

# The largest reg that is tried, beside the largest squared singular value of the features; and how far down Newton's
# method goes, a decade at a time (heuristics). A ridge goes down to where singular values are rounding.
MOST, DECADES = 10.0, 9
FOLDS = 5
# A larger loss by this is worse for good; by less, the features that count may be those of small size (heuristic).
WORSE = 1.1
ROUGH = 1e-5  # how exact the answers are by which regs are compared (heuristic)
# A sample whose own share in its prediction is as near to 1 as this cannot be predicted without it.
ALONE = 1e-12


@dataclass(frozen=True, eq=False, repr=False)
class Choice(Result):
    """Regs that were tried, largest first, and the mean loss of samples that each fit had not seen; `by`: which."""

    regs: Tensor
    risks: Tensor
    by: str

    @property
    def best(self) -> float:
        """The reg of least loss; the larger of two that are equal."""
        return float(self.regs[self.risks.argmin()])

    def table(self) -> str:
        """A line for each reg."""
        return text_table(["reg", f"loss ({self.by})"], zip(self.regs.tolist(), self.risks.tolist(), strict=True))


def choose_reg(problem: HeadProblem, held: HeadProblem | None, seed: int, progress: bool) -> Choice:
    """By samples held out by the user; else by leaving out each once (square loss), or a fifth of them at a time."""
    problem.check_classes()
    s = problem.axes[1]
    # A feature far smaller than others may still be all that counts.
    smallest = float(s[-1] / s[0]) if len(s) else 1.0
    least = problem.rounding if smallest >= problem.rounding else smallest / 10
    most, halves = MOST * problem.scale, math.ceil(-4 * math.log10(least))
    regs = [most * 10 ** (-k / 2) for k in (range(halves + 3) if problem.square else range(0, 2 * DECADES, 2))]
    if held is None:
        risks, by = _leave_one_out(problem, regs) if problem.square else _folds(problem, regs, seed, progress)
    elif problem.square:
        risks, by = [held.risk(held.moved(*solve_head(problem, reg))) for reg in regs], "held-out samples"
    else:
        risks, by = _descend(regs, [_Path(problem, held, problem.axes[2])], progress), "held-out samples"
    return Choice(problem.w.new_tensor(regs[: len(risks)]), problem.w.new_tensor(risks), by)


def _leave_one_out(problem: HeadProblem, regs: Sequence[float]) -> tuple[list[float], str]:
    """e_i = (y_i − f_i) / (1 − H_ii) for all regs, of one decomposition; Golub, Heath & Wahba 1979."""
    (u, s, _), w, (_, t) = problem.axes, problem.w, problem.centred_off
    inside, squares = u.T @ t, u.square()
    risks = []
    for reg in regs:
        shrunk = s.square() / (s.square() + reg)
        share = squares @ shrunk + (w / w.sum() if problem.bias else 0.0)  # the bias takes a share of its own
        errors = (t - u @ (shrunk[:, None] * inside)) / (1 - share).clamp_min(ALONE)[:, None]
        risks.append(float(errors.square().mean(1).sum() / w.sum()))
    return risks, "leave-one-out"


def _folds(problem: HeadProblem, regs: Sequence[float], seed: int, progress: bool) -> tuple[list[float], str]:
    """Every fold predicted by a fit to the others, the classes in each as in all."""
    labels = problem.targets.argmax(1) if problem.targets.shape[1] > 1 else problem.targets[:, 0].long()
    counts = torch.bincount(labels)
    least = int(counts[counts > 0].min())
    if least < 2:
        raise InputError(
            f"class {int((counts == 1).nonzero()[0, 0])} has one sample, so no fold can do without it; needed to "
            "choose reg by folds: at least 2 of each class. Give reg=…, or validation=(x, y)."
        )
    folds, generator = min(FOLDS, least), torch.Generator().manual_seed(seed)
    place = torch.empty_like(labels)
    for c in counts.nonzero()[:, 0].tolist():
        index = (labels == c).nonzero()[:, 0]
        order = torch.randperm(len(index), generator=generator).to(index.device)
        place[index[order]] = torch.arange(len(index), device=index.device) % folds
    parts = [((place != k).nonzero()[:, 0], (place == k).nonzero()[:, 0]) for k in range(folds)]
    paths = [_Path(problem.select(known), problem.select(asked), problem.axes[2]) for known, asked in parts]
    return _descend(regs, paths, progress, (folds - 1) / folds), f"{folds} folds"


class _Path:
    """Logistic fits to some samples for falling regs, each from the one before, and their losses on others."""

    def __init__(self, known: HeadProblem, asked: HeadProblem, vt: Tensor) -> None:
        known.check_classes()
        self.known, self.asked, mean = known, asked, known.mean
        self.inside, self.outside = (known.phi - mean) @ vt.T, (asked.phi - mean) @ vt.T
        self.at: tuple[Tensor, Tensor] | None = None

    def loss(self, reg: float) -> float:
        """Of the samples asked about, a weighted sum."""
        self.at, _ = newton_steps(self.known, self.inside, reg, ROUGH, self.at)
        theta, b = self.at
        z = self.asked.begin + self.outside @ theta + b
        return float((self.asked.w * self.asked.losses(z)).sum())


def _descend(regs: Sequence[float], paths: Sequence[_Path], progress: bool, part: float = 1.0) -> list[float]:
    """The mean loss for each reg, until two in a row are far worse than the best; a fit has `part` of the samples."""
    weight = sum(float(path.asked.w.sum()) for path in paths)
    risks: list[float] = []
    with bar(len(regs) * len(paths), "choosing reg", "fit", show=progress) as tick:
        for reg in regs:
            total = 0.0
            for path in paths:
                total += path.loss(reg * part)  # as large beside the loss of fewer samples
                tick()
            risks.append(total / weight)
            if len(risks) > 2 and min(risks[-2:]) > WORSE * min(risks):
                break
    return risks
