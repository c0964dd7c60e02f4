"""Two kinds of samples in one list of margins: right labels, and wrong ones below zero.

Margins of right labels have a long tail towards zero (samples that are hard), so theirs is a skew normal distribution;
those of wrong labels are about normal, about as far below zero as the others lie above it, or nearer where a network
has learned its wrong labels. What network, kernel and data are decides where; so both are found by the likelihood.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Margins that the parameters are found from, at most; more add digits that nobody needs.
MOST = 100_000
# How firmly the two kinds are held where they are expected (heuristics, from networks at all stages of learning on
# digits and Fashion-MNIST with 0 to 40 % wrong labels): wrong ones 0.9 ± 0.3 times as far below zero as right ones lie
# above it, with the weight of so many samples as this part of all; half as wide, within a factor e^±½; the skewness.
DEPTH, DEPTH_WIDTH, FIRMNESS = 0.9, 0.3, 0.01
NARROWER, NARROWER_WIDTH, SKEWNESS = 0.7, 0.5, 5.0
# With fewer samples than this there is nothing to tell two kinds by.
FEWEST = 20


class Kinds(NamedTuple):
    """`wrong` [n]: the probability that a label is wrong. `evidence`: log of how much likelier two kinds are than one.

    `single`: whether one kind explains the margins as well as two.
    """

    wrong: Tensor
    evidence: float

    @property
    def single(self) -> bool:
        """Whether there is no sign of wrong labels."""
        return self.evidence <= 0


def tell_apart(margins: Tensor) -> Kinds:
    """The probability that a label is wrong, by its margin alone: never less for a smaller margin."""
    m = margins.detach().cpu().double()
    n, spread = len(m), float(m.std()) if len(m) > 1 else 0.0
    if n < FEWEST or not spread > 0 or not bool((m > 0).any()):
        return Kinds(torch.zeros_like(m), -math.inf)
    # In units of their spread, so that the search is the same for every scale of the kernel.
    some = m if n <= MOST else m[torch.randperm(n, generator=torch.Generator().manual_seed(0))[:MOST]]
    some = some / spread
    alone = _alone(some)
    together, theta = _together(some)
    if not (math.isfinite(alone) and math.isfinite(together)):  # few values, as of a kernel that tells nothing
        return Kinds(torch.zeros_like(m), -math.inf)
    # Three more parameters, at the price of Akaike's information criterion.
    evidence = alone - together - 3
    wrong, right = _terms(m / spread, theta)
    p = torch.sigmoid(wrong - right)
    # Where the others agree with a label it is not more likely wrong than right, whatever the heaps say.
    agreed = m >= 0
    p = torch.where(agreed, p.clamp_max(0.5), p)
    # Nor are there more wrong labels than contradicted ones.
    room = float((~agreed).sum() - p[~agreed].sum())
    p = torch.where(agreed, p * min(1.0, room / max(float(p[agreed].sum()), 1e-12)), p)
    # Far out both tails are guesses; a smaller margin is never less suspicious.
    order = m.argsort(descending=True)
    p[order] = p[order].cummax(0).values
    return Kinds(p * torch.sigmoid(torch.tensor(evidence)).item(), evidence)


def _skew_normal(m: Tensor, theta: Tensor) -> Tensor:
    """Log density, of place, log width and slant (Azzalini 1985)."""
    z = (m - theta[0]) / theta[1].exp()
    return math.log(2) - theta[1] - z.square() / 2 - math.log(2 * math.pi) / 2 + torch.special.log_ndtr(theta[2] * z)


def _mean(theta: Tensor) -> Tensor:
    """Of right labels, above zero."""
    slant = theta[5]
    shift = theta[4].exp() * slant / (1 + slant.square()).sqrt() * math.sqrt(2 / math.pi)
    return (theta[3] + shift).abs().clamp_min(1e-9)


def _terms(m: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Log of part times density, of wrong and of right labels.

    theta: log-odds of being wrong, log of how far below zero these lie beside how far above it the others do, so that
    they are never above it, log width; place, log width and slant of the others.
    """
    z = (m + theta[1].exp() * _mean(theta)) / theta[2].exp()
    wrong = F.logsigmoid(theta[0]) - theta[2] - z.square() / 2 - math.log(2 * math.pi) / 2
    return wrong, F.logsigmoid(-theta[0]) + _skew_normal(m, theta[3:])


def _alone(m: Tensor) -> float:
    """Less the log likelihood of one kind, at its best."""
    found = []
    for slant in (-4.0, -1.0):
        theta = torch.tensor([float(m.quantile(0.8)), math.log(1.3), slant]).double()
        found.append(_least(lambda t: -_skew_normal(m, t).sum() + _slanted(t[2]), theta)[0])
    return min(found)


def _together(m: Tensor) -> tuple[float, Tensor]:
    """Less the log likelihood of two kinds, at its best, and where that is."""
    n, above = len(m), m[m > 0]
    found: list[tuple[float, Tensor]] = []

    def objective(t: Tensor) -> Tensor:
        """With what is expected of the two kinds."""
        expected = FIRMNESS * n * ((t[1].exp() - DEPTH) / DEPTH_WIDTH).square() / 2
        narrow = ((t[2] - t[4] + NARROWER) / NARROWER_WIDTH).square() / 2
        return -torch.logaddexp(*_terms(m, t)).sum() + expected + narrow + _slanted(t[5])

    for slant in (-4.0, -1.0):
        for cut in (0.0, float(m.quantile(0.02))):
            below = m[m < cut]
            below = below if len(below) > 3 else m.topk(max(3, n // 50), largest=False).values
            part = min(max(len(below) / n, 1 / n), 0.45)
            wide = float(above.std()) if len(above) > 1 else 1.0
            depth = -float(below.median()) / max(float(above.mean()), 1e-9)
            start = [
                math.log(part / (1 - part)), math.log(min(max(depth, 0.1), 2.0)), math.log(float(below.std()) + 0.02),
                float(above.quantile(0.8)), math.log(1.5 * wide + 1e-3), slant,
            ]  # fmt: skip
            found.append(_least(objective, torch.tensor(start).double()))
    return min(found, key=lambda pair: pair[0])


def _slanted(slant: Tensor) -> Tensor:
    """A slant has no upper bound by the likelihood; this one it gets."""
    return (slant / SKEWNESS).square() / 2


def _least(objective: Callable[[Tensor], Tensor], theta: Tensor) -> tuple[float, Tensor]:
    """The least value that a search from here finds (infinite where it leaves the numbers), and where."""
    theta = theta.requires_grad_(True)
    search = torch.optim.LBFGS(
        [theta], max_iter=300, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        value = objective(theta)
        value.backward()
        return value

    with torch.enable_grad():
        search.step(closure)
    with torch.no_grad():
        value = float(objective(theta))
    return (value if math.isfinite(value) else math.inf), theta.detach()
