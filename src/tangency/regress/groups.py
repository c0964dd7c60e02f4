"""Which samples are left out together: each by itself, or all of a group (a subject, a source)."""

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .._base import checks
from .._base.types import Array
from ..errors import InputError

# A label for each sample, integers or strings; None: every sample is a group of its own.
GroupLabels = Sequence[int] | Sequence[str] | Array | None


def checked_groups(groups: GroupLabels, n: int, device: torch.device) -> Tensor:
    """The number of each sample's group, [n], from 0 on."""
    if groups is None:
        return torch.arange(n, device=device)
    labels = _labels(groups)
    if labels.dtype.kind not in "biuUS":
        raise InputError(
            f"groups are {labels.dtype}; needed: a label for each sample, integers or strings, such as its subject."
        )
    if labels.shape != (n,):
        raise InputError(
            f"groups have shape {tuple(labels.shape)}; needed: a label for each of the {n} samples, [{n}]."
        )
    names, number = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise InputError(
            f"all {n} samples are of group {names[0]!s}; needed: at least two groups: a fit is made of the others."
        )
    return torch.from_numpy(number.reshape(-1)).to(device)


def _labels(groups: object) -> np.ndarray:
    """As an array; of numbers and strings together, which are different groups (1 is not '1'), their numbers.

    >>> _labels([1, "1", 1])
    array([0, 1, 0])
    """
    if isinstance(groups, Tensor):
        return groups.detach().cpu().numpy()
    if isinstance(groups, (list, tuple)):
        values = list(groups)
    else:
        array = np.asarray(groups)
        if array.dtype.kind != "O" or array.ndim != 1:
            return array
        values = array.tolist()  # a column of pandas, say
    if len({isinstance(v, str) for v in values}) < 2:
        with contextlib.suppress(ValueError):  # lists of several lengths
            return np.asarray(values)
    wrong = [v for v in values if not isinstance(v, (str, int, np.integer))]
    if wrong:
        raise InputError(
            f"groups hold {wrong[0]!r}; needed: a label for each sample, integers or strings, such as its subject."
        )
    number = {v: k for k, v in enumerate(dict.fromkeys(values))}
    return np.array([number[v] for v in values])


def by_size(labels: Tensor) -> list[Tensor]:
    """The members of all groups, as positions in `labels`: [groups, size] for each size that there is.

    >>> by_size(torch.tensor([0, 1, 1, 2]))
    [tensor([[0],
            [3]]), tensor([[1, 2]])]
    """
    order = labels.argsort(stable=True)
    counts = torch.unique_consecutive(labels[order], return_counts=True)[1]
    starts = counts.cumsum(0) - counts
    found = []
    for size in counts.unique().tolist():
        members = order[starts[counts == size][:, None] + torch.arange(size, device=order.device)]
        # By where they begin: columns of L⁻¹ are zero above that, so that neighbours cost less together.
        found.append(members[members[:, 0].argsort()])
    return found


def with_outputs(members: Tensor, c: int) -> Tensor:
    """Rows [groups, size·c] of a matrix that has c of them for each sample."""
    if c == 1:
        return members
    return (members[..., None] * c + torch.arange(c, device=members.device)).flatten(1)


def every_class_left(labels: Tensor, w: Tensor, groups: Tensor) -> None:
    """Refuse a class [n, classes] whose samples of positive weight are all of one group: without it there is none."""
    share = labels.new_zeros(int(groups.max()) + 1, labels.shape[1]).index_add_(0, groups, w * labels)
    # Counted and not subtracted: a difference of sums would leave rounding where there is nothing.
    alone = ((share > 0).sum(0) == 1).nonzero()[:, 0].tolist()
    if alone:
        names = checks.some([str(c) for c in alone])
        raise InputError(
            f"class {names} (of {labels.shape[1]}) has samples in one group only (without groups= each sample is one). "
            "Left out, nothing would hold its bias: add samples of it, leave the class out, or fit with bias=False."
        )
