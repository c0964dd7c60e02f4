"""How a kernel turns between checkpoints: angles of its top eigenspaces, and how fast it changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result, text_table
from .._base.types import Float, Numbers
from ..errors import InputError
from ..linalg.eigen import top
from ..linalg.matrix import Matrix, flat_rows, square
from .alignment import normed, numerical_rank, principal_angles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Rotation(Result):
    """Kernels on the same samples at several steps, each held against the first and the one before."""

    steps: Float[Tensor, " t"]
    angles: Float[Tensor, "t k"]  # principal angles of the top k eigenvectors with the first ones, in radians
    change: Float[Tensor, " t"]  # 1 − CKA with the first
    velocity: Float[Tensor, " t"]  # (1 − CKA with the one before) per step; 0 at the start

    def table(self) -> str:
        """A line for each checkpoint."""
        rows = zip(
            *(v.tolist() for v in (self.steps, self.angles[:, 0], self.angles[:, -1], self.change, self.velocity)),
            strict=True,
        )
        return text_table(["step", "smallest angle", "largest angle", "1 − CKA", "velocity"], rows)

    def plot(self) -> "Figure":
        """Angles, change and velocity over the steps."""
        from .pictures import draw_rotation

        return draw_rotation(self.steps, self.angles, self.change, self.velocity)


def rotation(
    grams: Sequence[Matrix],
    *,
    count: int = 10,
    steps: Numbers | None = None,
    centred: bool = True,
    progress: bool = True,
) -> Rotation:
    """1 − CKA(Θ_t, Θ_0), (1 − CKA(Θ_t, Θ_{t−1}))/Δt and the principal angles of the top `count` eigenvectors.

    `grams`: kernels of checkpoints on the same samples, in memory or on disk; `steps`: when (default: 0, 1, …). Full
    kernels need centred=False. Of kernels of a lower rank as many eigenvectors as that; where eigenvalue `count` and
    the next are the same the space is not determined.
    Cost: `tg.linalg.top` of each, and two Grams in float64. Fort et al. 2020, "Deep learning versus kernel learning",
    for the velocity; Ortiz-Jiménez et al. 2021 for the rotation.

    >>> import tangency as tg
    >>> a, b = torch.diag(torch.tensor([3.0, 1.0, 0.0])), torch.diag(torch.tensor([1.0, 3.0, 0.0]))
    >>> tg.spectra.rotation([a, b], count=1, progress=False).angles[:, 0].round(decimals=4)  # radian
    tensor([0.0000, 1.5708], dtype=torch.float64)
    """
    if isinstance(grams, Tensor) or not isinstance(grams, Sequence) or len(grams) < 2:
        raise InputError("grams must be a list of at least two Grams of the same samples, one for each checkpoint.")
    checks.positive(count, "count", "a number of eigenvectors")
    squares = [square(g, f"grams[{k}]") for k, g in enumerate(grams)]
    sizes = {flat_rows(g.shape) for g in squares}
    if len(sizes) > 1:
        raise InputError(f"the Grams have {sorted(sizes)} rows; needed: the same samples at every checkpoint.")
    if count > (n := sizes.pop()):
        raise InputError(f"count={count}; the Grams have {n} rows. Needed: at most as many eigenvectors.")
    when = torch.arange(len(squares)).double() if steps is None else tree.numbers(steps, "steps").cpu().double()
    if when.shape != (len(squares),) or not bool((when.diff() > 0).all()):
        raise InputError(
            f"steps has {tuple(when.shape)} numbers for {len(squares)} Grams; needed: one for each, growing."
        )
    first = normed(squares[0], centred, "grams[0]")
    pairs = [top(gram, count, progress=progress) for gram in squares]
    # Eigenvectors of what is 0 up to rounding are anything, and turn by anything.
    count = max(1, min(numerical_rank(p.values) for p in pairs))
    before, rows, start = first, [], pairs[0].vectors[:, :count].double()
    for k, gram in enumerate(squares):
        now = first if k == 0 else normed(gram, centred, f"grams[{k}]")
        vectors = pairs[k].vectors[:, :count].double()
        far, step = (float((now - other).square().sum()) / 2 for other in (first, before))
        speed = step / float(when[k] - when[k - 1]) if k else 0.0
        rows.append((principal_angles(start, vectors).cpu(), far, speed))
        before = now
    angles = torch.stack([a for a, _, _ in rows])
    change, velocity = (torch.tensor([r[j] for r in rows], dtype=torch.float64) for j in (1, 2))
    return Rotation(when, angles, change, velocity)
