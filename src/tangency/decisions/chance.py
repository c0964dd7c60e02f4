"""The τ_K that chance gives: of surrogates fitted to shuffled labels, which know the kernel but not the answers."""

import torch
from torch import Tensor

from .._base.types import Float, Int
from ..errors import DidNotConverge
from ..gram.gram import Gram
from ..surrogate import Interval, Surrogate, default_reg, fit, kendall, log_odds

# How many are fitted, to how many training samples, and compared on how many test samples, at most (heuristics: the
# cost is bounded, a second or so for five kernels, however large the data; fewer samples give a wider range).
SHUFFLES, TRAINING, TEST = 9, 200, 2000
# A baseline is good to two digits: its fits stop far from the optimum (heuristic).
TOLERANCE = 0.05


def shuffled(
    gram: Gram,
    cross: Gram,
    network: Float[Tensor, "m c"],
    y: Int[Tensor, " n"],
    y_test: Int[Tensor, " m"],
    *,
    reg_factor: float = 1.0,
    ties: float = 0.0,
    seed: int = 0,
) -> Interval:
    """min and max of τ_K(network, surrogate of π(y)) over 9 random orders π of the labels of 200 training samples.

    All samples where there are fewer. What a kernel machine that has seen no answers reaches: about 0, and above it
    where classes are uneven and both know which is frequent. `gram` [n, n] and `cross` [m, n]: the kernel's.
    `network`: logits of the test samples. `reg_factor`, `ties`: as the surrogate's own.

    >>> x, y = torch.randn(60, 3).double(), torch.arange(60) % 3
    >>> import tangency as tg
    >>> K, cross = (tg.linalg.matrix.between(v) for v in (x[:40] @ x[:40].T, x[40:] @ x[:40].T))
    >>> interval = shuffled(K, cross, torch.randn(20, 3).double(), y[:40], y[40:])
    >>> interval.low < 0.5 and interval.high > -0.5
    True
    """
    order = torch.Generator().manual_seed(seed)
    some, asked = _of_each_class(y.cpu(), order), torch.randperm(len(y_test), generator=order)[:TEST]
    part = gram.select(some, some).dense().double()
    rows = cross.select(asked, some).dense().to(part.device).double()
    labels, truth = y.cpu()[some], y_test.cpu()[asked]
    odds = log_odds(network[asked.to(network.device)].cpu().double(), truth, outputs_are="logits")
    reg, classes = reg_factor * default_reg(part), network.shape[1]
    taus = []
    for _ in range(SHUFFLES):
        mixed = labels[torch.randperm(len(labels), generator=order)].to(part.device)
        try:
            found = fit(part, mixed, reg=reg, classes=classes, tol=TOLERANCE, progress=False)
        except DidNotConverge as e:  # for a baseline, what was found is enough
            if not isinstance(e.solution, Surrogate):
                raise
            found = e.solution
        theirs = log_odds(found.logits(rows).cpu(), truth, outputs_are="logits")
        taus.append(kendall(odds, theirs, ties=ties))
    every = torch.stack(taus)
    # One that says the same of every sample orders nothing: as much as chance, 0.
    low, high = (float(v) for v in every.nan_to_num(0.0).aminmax())
    return Interval(low, high)


def _of_each_class(y: Tensor, order: torch.Generator) -> Tensor:
    """Numbers of random samples, about TRAINING, of each class an equal part and at least one."""
    if len(y) <= TRAINING:
        return torch.arange(len(y))
    part = TRAINING / len(y)
    chosen = []
    for c in y.unique().tolist():
        own = (y == c).nonzero()[:, 0]
        chosen.append(own[torch.randperm(len(own), generator=order)[: max(1, round(part * len(own)))]])
    return torch.cat(chosen).sort().values
