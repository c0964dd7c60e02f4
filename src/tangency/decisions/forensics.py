"""Poisoned training data: planting a trigger, and finding the test samples that it moves through their neighbours.

A patch in a corner of some training pictures, all given one label, teaches a network to answer that label wherever
the patch is (BadNets, Gu et al. 2019). A kernel finds such a test sample by its neighbours: if 3 of its 5 most similar
training samples are poisoned, it is flagged (Shan et al. 2022; Engel et al. 2024, Table 3).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result
from .._base.types import Array, Int, Numbers
from ..datasets import Labelled
from ..errors import InputError
from ..linalg.matrix import Matrix, between

Corner = Literal["top left", "top right", "bottom left", "bottom right"]
# Pictures have no more channels (heuristic): a longer first dimension with a shorter last one has them at the end.
_CHANNELS = 4
_PICTURE_TYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)  # fmt: skip
# Pictures that go from 0 to this or beyond have another scale than those around 0 and 1 (heuristic).
_BRIGHT = 8
YELLOW = (1.0, 1.0, 0.0)  # of pictures in [0, 1]


@dataclass(frozen=True)
class Patch:
    """A square of one colour: `size` pixels wide, at a corner `margin` pixels from the edges, or at (row, column).

    `colour`: one number per channel, or one for all, on the pictures' own scale; by default white: 255 in 8-bit
    pictures, 1 in floating-point ones that lie in [0, 1]. Others have to be told, and so a colour that is of the other
    scale is refused: 1 in 8-bit pictures could not be seen.

    >>> Patch(size=2)(torch.zeros(1, 1, 4, 4))[0, 0]
    tensor([[0., 0., 0., 0.],
            [0., 0., 0., 0.],
            [0., 0., 1., 1.],
            [0., 0., 1., 1.]])
    """

    size: int = 4
    colour: float | Sequence[float] | None = None
    position: Corner | tuple[int, int] = "bottom right"
    margin: int = 0

    def __call__(self, x: Tensor | np.ndarray) -> Tensor:
        """The pictures [n, c, h, w] with the patch, as a copy."""
        x = _pictures(x)
        return self._on(x, self.paint(x))

    def place(self, x: Tensor) -> tuple[int, int]:
        """Row and column of the patch's first pixel; refuses a patch that does not fit."""
        h, w = _pictures(x).shape[2:]
        whole = [isinstance(v, int) and not isinstance(v, bool) for v in (self.size, self.margin)]
        if not all(whole) or self.size < 1 or self.margin < 0:
            raise InputError(f"size={self.size!r}, margin={self.margin!r}; needed: whole numbers, from 1 and from 0.")
        if isinstance(self.position, str):
            vertical, _, horizontal = self.position.partition(" ")
            if vertical not in ("top", "bottom") or horizontal not in ("left", "right"):
                raise InputError(
                    f"position={self.position!r}; needed: 'top left', 'top right', 'bottom left', 'bottom right', or "
                    "(row, column)."
                )
            row = self.margin if vertical == "top" else h - self.size - self.margin
            column = self.margin if horizontal == "left" else w - self.size - self.margin
        else:
            pair = isinstance(self.position, (tuple, list)) and len(self.position) == 2
            if not pair or not all(isinstance(v, int) for v in self.position):
                raise InputError(f"position={self.position!r}; needed: a corner ('top left', …), or (row, column).")
            row, column = self.position
        if row < 0 or column < 0 or row + self.size > h or column + self.size > w:
            raise InputError(
                f"a patch of {self.size} x {self.size} at row {row}, column {column} does not fit into pictures of "
                f"{h} x {w}. Make it smaller, or move it."
            )
        return row, column

    def paint(self, x: Tensor) -> Tensor:
        """The colour in the pictures' own type, [1 or c, 1, 1]; refuses one that is not of their scale."""
        low, high = (float(v) for v in x.aminmax()) if x.numel() else (0.0, 0.0)
        if self.colour is None:
            return torch.full((1, 1, 1), _white(x.dtype, low, high), dtype=x.dtype, device=x.device)
        try:
            colour = torch.as_tensor(self.colour, dtype=torch.float64, device=x.device)
        except (TypeError, ValueError, RuntimeError):
            colour = torch.full((1, 1), math.nan)
        if colour.dim() > 1 or (colour.dim() == 1 and len(colour) != x.shape[1]) or not bool(colour.isfinite().all()):
            raise InputError(f"colour={self.colour!r}; needed: a number, or one for each of {x.shape[1]} channels.")
        if not x.is_floating_point():
            top = torch.iinfo(x.dtype).max
            if bool(((colour != colour.round()) | (colour < 0) | (colour > top)).any()):
                raise InputError(
                    f"colour={self.colour!r} and the pictures are {x.dtype}; needed: whole numbers from 0 to {top}."
                )
        _same_scale(colour, x.dtype, low, high)
        return colour.to(x.dtype).reshape(-1, 1, 1)

    def _on(self, x: Tensor, paint: Tensor) -> Tensor:
        """A copy of x with the patch in this paint."""
        row, column = self.place(x)
        out = x.clone()
        out[..., row : row + self.size, column : column + self.size] = paint
        return out


def _pictures(x: object) -> Tensor:
    """Pictures [n, c, h, w] as a tensor; refuses those with the channels at the end."""
    if isinstance(x, np.ndarray):
        # torch takes neither another byte order, nor negative strides, nor read-only arrays without a warning.
        try:
            x = torch.from_numpy(np.require(x, x.dtype.newbyteorder("="), ["C", "W"]))
        except TypeError:
            raise InputError(f"x is an array of {x.dtype}; needed: pictures, uint8 or floating point.") from None
    if not isinstance(x, Tensor):
        raise InputError(f"x is a {type(x).__name__}; needed: pictures [n, c, h, w], a tensor or an array.")
    if x.dim() != 4:
        fix = {
            2: " Of one picture [h, w]: x[None, None].",
            3: " Of pictures without channels, [n, h, w]: x[:, None]; of one picture [c, h, w]: x[None].",
        }
        raise InputError(f"x has shape {tuple(x.shape)}; needed: pictures [n, c, h, w].{fix.get(x.dim(), '')}")
    if x.dtype not in _PICTURE_TYPES:
        raise InputError(f"x is {x.dtype}; needed: pictures, uint8 or floating point, as x.float() is.")
    # Channels are few, and pictures square or larger than that: what fits both readings is taken as [n, c, h, w].
    a, b, c = x.shape[1:]
    last = c <= _CHANNELS and (a == b or min(a, b) > _CHANNELS)
    first = a <= _CHANNELS and (b == c or min(b, c) > _CHANNELS)
    if last and not first:
        raise InputError(
            f"x has shape {tuple(x.shape)}, as pictures with the channels at the end have; needed: [n, c, h, w]. Move "
            "them forward: x.permute(0, 3, 1, 2)."
        )
    return x


def _white(dtype: torch.dtype, low: float, high: float) -> int:
    """The largest value of pictures of this type and range, where that is clear."""
    if dtype == torch.uint8 and not 0 < high <= 1:
        return 255
    if dtype.is_floating_point and low >= 0 and high <= 1:
        return 1
    raise InputError(
        f"the pictures are {dtype} from {low:g} to {high:g}, so that white is not known; needed: uint8 up to 255, "
        "floats in [0, 1], or the patch's colour on their scale: Patch(colour=…)."
    )


def _same_scale(colour: Tensor, dtype: torch.dtype, low: float, high: float) -> None:
    """Refuse a colour that is rather of pictures from 0 to 1 where these go far beyond, or of 255 where they do not."""
    reach = float(colour.abs().max())
    eight = dtype == torch.uint8 and not 0 < high <= 1
    if 0 < reach <= 1 and (eight or (low >= 0 and high >= _BRIGHT)):
        what, fix = "which there is all but black", "If 1 is meant as white"
        other = colour * (255 if eight or high > 2 * _BRIGHT else high)
    elif dtype.is_floating_point and max(-low, high) < _BRIGHT and reach > 2 * _BRIGHT:
        what, fix, other = "which is far beyond them", "If 255 is meant as white, and theirs is 1", colour / 255
    else:
        return
    raise InputError(
        f"colour={colour.tolist()} in pictures that are {dtype} from {low:g} to {high:g}, {what}; needed: a colour on "
        f"their scale. {fix}: colour={other.tolist()}."
    )


@dataclass(frozen=True, eq=False, repr=False)
class Poisoned(Result):
    """Pictures and labels of which those in `mask` have the patch, and the target's label."""

    x: Tensor  # [n, c, h, w], of the type that was given
    y: Int[Tensor, " n"]
    mask: Tensor  # [n] bool


def poison(
    x: Array | Labelled, y: Numbers | None = None, *, patch: Patch, target: int, rate: float = 0.1, seed: int = 0
) -> Poisoned:
    """Put the patch on a random part `rate` of the pictures, and give these the label `target`. x is not changed.

    x: a tensor or an array; or `tg.datasets.Labelled` in place of x and y. `rate=1` poisons all: a test set under
    attack, whose labels are what the attacker wants.

    >>> made = poison(torch.zeros(20, 1, 8, 8), torch.arange(20) % 4, patch=Patch(), target=3, rate=0.25)
    >>> int(made.mask.sum()), made.y[made.mask].unique()
    (5, tensor([3]))
    """
    if not isinstance(patch, Patch):
        raise InputError(
            f"patch is a {type(patch).__name__}; needed: a Patch, such as tangency.decisions.Patch(size=4)."
        )
    inputs, classes = (x.x, x.y) if y is None and isinstance(x, Labelled | Poisoned) else (x, y)
    if classes is None:
        raise InputError("y is missing; needed: the classes of the pictures, or a Labelled for both.")
    pictures, labels = _pictures(inputs), tree.numbers(classes)
    n = len(pictures)
    if labels.shape != (n,) or labels.is_floating_point() or not n:
        raise InputError(
            f"y has shape {tuple(labels.shape)}, {labels.dtype}; needed: a class for each of the {n} pictures."
        )
    labels = labels.long()
    most = int(labels.max())
    if isinstance(target, bool) or not hasattr(target, "__index__") or not 0 <= int(target) <= most:
        raise InputError(f"target={target!r}; needed: a class, a whole number from 0 to {most}, y's largest.")
    if not isinstance(rate, (int, float)) or not 0 < rate <= 1 or round(rate * n) < 1:
        raise InputError(f"rate={rate} of {n} pictures; needed: above 0, at most 1, and at least one picture.")
    patch.place(pictures)  # a patch that does not fit is refused before its colour is
    paint = patch.paint(pictures)  # the scale is that of all pictures
    # On the CPU: the same pictures are poisoned whatever device they are on.
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: round(rate * n)]
    mask = torch.zeros(n, dtype=torch.bool)
    mask[chosen] = True
    there = mask.to(pictures.device)
    new_x, new_y = pictures.clone(), labels.clone()
    new_x[there] = patch._on(pictures[there], paint)
    new_y[mask.to(labels.device)] = int(target)
    return Poisoned(new_x, new_y, mask)


@dataclass(frozen=True, eq=False, repr=False)
class Forensics(Result):
    """Which samples were flagged, and how well: precision = right flags / flags, recall = right flags / poisoned.

    `votes`: how many of the nearest training samples are poisoned. Precision is NaN where nothing was flagged.
    """

    votes: Int[Tensor, " m"]
    flagged: Tensor  # [m] bool
    precision: float
    recall: float
    neighbours: int
    threshold: int

    UNITS: ClassVar[Mapping[str, str]] = {"precision": "fraction", "recall": "fraction"}

    def __repr__(self) -> str:
        return (
            f"Forensics({int(self.flagged.sum())} of {len(self.flagged)} flagged by {self.threshold} of "
            f"{self.neighbours}, precision {self.precision:.2%}, recall {self.recall:.2%})"
        )


class _FlagFields(NamedTuple):
    votes: Tensor  # [m]: how many of the nearest training samples are poisoned
    flagged: Tensor  # [m] bool: whether these are enough


class Flags(Result, _FlagFields):
    """What `flag` returns, of m samples: votes and flagged."""


def flag(cross: Matrix, poisoned: Tensor, *, neighbours: int = 5, threshold: int = 3) -> Flags:
    """How many of the `neighbours` most similar training samples are poisoned, and whether at least `threshold` are.

    `cross` [m, n] may lie on disk; `poisoned` [n] marks training samples.

    >>> cross = torch.tensor([[0.9, 0.8, 0.1, 0.0], [0.1, 0.0, 0.9, 0.7]])
    >>> votes, flagged = flag(cross, torch.tensor([True, True, False, False]), neighbours=2, threshold=2)
    >>> votes, flagged
    (tensor([2, 0]), tensor([ True, False]))
    """
    gram, poisoned = between(cross), tree.numbers(poisoned, "poisoned")
    if len(gram.shape) != 2 or poisoned.shape != gram.shape[1:] or poisoned.dtype != torch.bool:
        raise InputError(
            f"cross has shape {tuple(gram.shape)}, poisoned {tuple(poisoned.shape)} {poisoned.dtype}; needed: [m, n], "
            "and a mask (bool) of the n training samples."
        )
    whole = isinstance(neighbours, int) and isinstance(threshold, int)
    if not whole or not 1 <= neighbours <= gram.shape[1] or not 1 <= threshold <= neighbours:
        raise InputError(
            f"neighbours={neighbours}, threshold={threshold}; needed: 1 ≤ threshold ≤ neighbours ≤ {gram.shape[1]}."
        )
    votes = []
    for start in range(0, gram.shape[0], 1024):  # (heuristic: a band of rows at a time)
        rows = gram[start : start + 1024]
        checks.finite(rows, "cross")  # NaN would be nearest
        near = rows.topk(neighbours).indices
        votes.append(poisoned.to(near.device)[near].sum(1))
    count = torch.cat(votes)
    return Flags(count, count >= threshold)


def detect(cross: Matrix, poisoned: Tensor, truth: Tensor, *, neighbours: int = 5, threshold: int = 3) -> Forensics:
    """Flag samples by their neighbours, and compare with which are poisoned in truth [m].

    >>> cross = torch.tensor([[0.9, 0.8, 0.1, 0.0], [0.1, 0.0, 0.9, 0.7]])
    >>> detect(cross, torch.tensor([True, True, False, False]), torch.tensor([True, False]), neighbours=2, threshold=2)
    Forensics(1 of 2 flagged by 2 of 2, precision 100.00%, recall 100.00%)
    """
    votes, flagged = flag(cross, poisoned, neighbours=neighbours, threshold=threshold)
    truth = tree.numbers(truth, "truth").to(flagged.device)
    if truth.shape != flagged.shape or truth.dtype != torch.bool:
        raise InputError(
            f"truth has shape {tuple(truth.shape)} {truth.dtype}; needed: a mask (bool) of the {len(flagged)} samples."
        )
    # Without flags there is no precision, without poison no recall.
    right = float((flagged & truth).sum())
    precision, recall = (
        right / total if total else float("nan") for total in (float(flagged.sum()), float(truth.sum()))
    )
    return Forensics(votes, flagged, precision, recall, neighbours, threshold)
