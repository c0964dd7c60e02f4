"""Several candidates at once, each chosen after those before it, so that none says again what another says."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._base.types import Float, Int, Numbers
from ..datasets.accepted import whole
from ..errors import InputError
from .lookahead import Indices, LookAhead, Measure, without_repeats

Products = Callable[[int], Tensor]


def greedy_changes(
    machine: LookAhead,
    candidates: Indices,
    count: int,
    *,
    probabilities: Numbers | None = None,
    measure: Measure = "norm",
) -> Int[Tensor, " k"]:
    """Candidates one after the other, each that of the largest change once the machine has learned those before it.

    What it learns of them is the class that it finds likeliest. `probabilities`: the expected change by these, in place
    of that by the likeliest class. The changes counted are those on all candidates. Cost: `count` · u² multiply–adds,
    and labels · u² once; where u² numbers do not fit into the machine's memory, the latter for each sample.

    >>> import tangency as tg
    >>> x = torch.randn(30, 4).double()
    >>> ahead = tg.active.look_ahead(x @ x.T, [0, 1, 2], [0, 1, 1])
    >>> len(tg.active.greedy_changes(ahead, ahead.candidates, 5).unique())
    5
    """
    candidates = machine.places(candidates, "candidates")
    without_repeats(candidates, "candidates")
    if not whole(count, 1, len(candidates)):
        raise InputError(f"count={count!r}; needed: a whole number from 1 to {len(candidates)}, the candidates.")
    weights = None if probabilities is None else machine.weights(probabilities)
    left, picked = candidates, list[Tensor]()
    held = machine.covariance(candidates, left) if 16 * (len(left) * machine.block) ** 2 <= machine.budget else None
    for _ in range(count):
        if weights is None:
            likeliest = machine.outputs[left].argmax(1, keepdim=True)
            change = machine.score(left, candidates, measure, likeliest, held)[:, 0]
        else:
            change = (machine.score(left, candidates, measure, None, held) * weights[left]).sum(1)
        best = int(change.argmax())
        chosen, keep = left[best : best + 1], torch.arange(len(left), device=left.device) != best
        more = machine.add(chosen, machine.outputs[chosen].argmax(1))
        if held is not None:
            # L⁻¹ k(X, ·) has a row more, whose products are taken from the covariance: it is not computed again.
            new = more.half[len(machine.half) :]
            held = held[:, machine.flat(keep.nonzero()[:, 0])]
            held -= new[:, machine.flat(candidates)].T @ new[:, machine.flat(left[keep])]
        picked.append(chosen)
        machine, left = more, left[keep]
    return torch.cat(picked)


def spread_at_random(
    diagonal: Float[Tensor, " n"], products: Products, candidates: Int[Tensor, " u"], count: int, draw: torch.Generator
) -> Int[Tensor, " k"]:
    """k-means++: the longest first, then each with a probability in proportion to its squared distance from the others.

    Vectors are given by the products of one with all, and by their squared lengths. Arthur & Vassilvitskii 2007; Ash et
    al. 2020, whose first one is the longest too.
    """
    picked = [int(candidates[diagonal[candidates].argmax()])]
    nearest = _squared(diagonal, products, picked[0])[candidates]
    for _ in range(count - 1):
        weights = nearest.masked_fill(torch.isin(candidates, torch.tensor(picked, device=candidates.device)), 0)
        if not bool(weights.sum() > 0):  # all that are left lie on one that was picked
            weights = (~torch.isin(candidates, torch.tensor(picked, device=candidates.device))).double()
        # Drawn on the CPU: the same on every device.
        picked.append(int(candidates[int(torch.multinomial(weights.double().cpu(), 1, generator=draw))]))
        nearest = torch.minimum(nearest, _squared(diagonal, products, picked[-1])[candidates])
    return torch.tensor(picked, device=candidates.device)


def farthest(
    diagonal: Float[Tensor, " n"],
    products: Products,
    known: Int[Tensor, " m"],
    candidates: Int[Tensor, " u"],
    count: int,
) -> Int[Tensor, " k"]:
    """Each the candidate that is farthest from its nearest sample with a label, or picked before (k-centre greedy).

    Sener & Savarese 2018.
    """
    nearest = torch.full_like(diagonal[candidates], torch.inf)
    for i in known.tolist():
        nearest = torch.minimum(nearest, _squared(diagonal, products, i)[candidates])
    picked = list[int]()
    for _ in range(count):
        best = int(nearest.argmax())
        picked.append(int(candidates[best]))
        nearest = torch.minimum(nearest, _squared(diagonal, products, picked[-1])[candidates])
        nearest[best] = -1  # not again, where all lie on one that was picked
    return torch.tensor(picked, device=candidates.device)


def _squared(diagonal: Tensor, products: Products, i: int) -> Tensor:
    """‖x − x_i‖² for all x; rounding alone leads below zero."""
    return (diagonal + diagonal[i] - 2 * products(i)).clamp_min(0)
