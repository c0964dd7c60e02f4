"""How a kernel or a weight matrix lies with respect to targets, features and other subspaces.

What is said of one vector y [n] holds for several, Y [n, q], with Frobenius norms; for a full kernel y is [n, c].
Classes [n] (integers, booleans, names, categories) are one-hot columns less 1/c, for two classes ±½: what a class is
called, or which number it has, changes nothing. `targets`: "classes" or "real", where y are floats that may be either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.results import Result, text_table
from .._base.targets import Kind, columns_of
from .._base.types import Array, Float, Numbers
from ..errors import InputError
from ..gram.gram import Gram
from ..gram.indices import on_device
from ..linalg.eigen import Spectrum, top
from ..linalg.matrix import Matrix, flat_rows, square
from ..linalg.matrix import targets as checked_targets

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Energy(Result):
    """How much of the targets lies in the span of the first k eigenvectors, k = 1 … K."""

    parts: Float[Tensor, " k"]  # ‖Φ_k y‖ / ‖y‖
    values: Float[Tensor, " k"]  # the eigenvalues

    @property
    def concentration(self) -> float:
        """‖Φ_K y‖ / ‖y‖ on all K."""
        return float(self.parts[-1])

    def table(self) -> str:
        """At powers of two, and at K."""
        shown = sorted({2**j for j in range(20) if 2**j <= len(self.parts)} | {len(self.parts)})
        return text_table(
            ["K", "‖Φ y‖/‖y‖", "eigenvalue"], [[k, float(self.parts[k - 1]), float(self.values[k - 1])] for k in shown]
        )

    def plot(self) -> "Figure":
        """The part of the targets by the number of eigenvectors."""
        from .pictures import draw_energy

        return draw_energy(self.parts)


def energy(
    K: Matrix | Spectrum, y: Numbers | Sequence[str], count: int, *, targets: Kind | None = None, progress: bool = True
) -> Energy:
    """‖Φ_K y‖ / ‖y‖, Φ_K the projection on the eigenvectors of the `count` largest eigenvalues.

    `K`: a Gram, in memory or on disk, or its `Spectrum`. `y`: real targets, or classes, which count as one-hot less 1/c
    (`targets` says which of floats that may be either). Eigenvectors of eigenvalues that are 0 up to rounding are
    anything, and add nothing. Cost: `tg.linalg.top(K, count)`. Ortiz-Jiménez, Moosavi-Dezfooli & Frossard 2021, "What
    can linearized neural networks actually say about generalization?", E.2.

    >>> import tangency as tg
    >>> K = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> tg.spectra.energy(K, [3.0, 4.0, 0.0], 2, progress=False).parts
    tensor([0.6000, 1.0000])
    """
    source = K if isinstance(K, Spectrum) else square(K)
    rows = source.shape[: len(source.shape) // 2]
    aim = _aimed(y, rows, source.device, targets)
    pairs = _pairs(source, count, aim.device, progress)
    aim = aim.to(pairs.device)
    each = (pairs.vectors[:, :count].T @ aim.to(pairs.vectors)).square().sum(1)
    rank = numerical_rank(pairs.values)
    if not rank:
        raise InputError("K has no eigenvalue above 0, so no eigenvectors to project on; needed: a kernel that has.")
    each[rank:] = 0
    parts = each.cumsum(0).sqrt()
    return Energy(parts.clamp_max(1.0), pairs.values[:count])


def label_alignment(
    K: Matrix | Spectrum, y: Numbers | Sequence[str], *, targets: Kind | None = None, progress: bool = True
) -> float:
    """|yᵀ v₁| / ‖y‖, v₁ the first eigenvector of a Gram: 1 if the kernel's first direction is the targets.

    `y`, `targets`: as for `energy`. Where the largest eigenvalue is repeated v₁ is any vector of its space; take
    `energy` over all of them. Cost: one eigenpair. Wang et al. 2024, "Spectral evolution and invariance in linear-width
    neural networks", Fig. 20.

    >>> import tangency as tg
    >>> y = torch.tensor([1.0, -1.0, 1.0])
    >>> round(tg.spectra.label_alignment(torch.outer(y, y) + torch.eye(3), y), 4)
    1.0
    """
    return energy(K, y, 1, targets=targets, progress=progress).concentration


def weight_alignment(W: Array, beta: Numbers, *, side: str = "inputs") -> float:
    """|βᵀ u₁| / ‖β‖, u₁ the first singular vector of a weight matrix [o, i] in its inputs: did it find the feature β?

    `side="outputs"` takes the other singular vector. A convolution's weight [o, i, …] is the matrix [o, i·…], β of an
    input patch's shape. Several features [i, k]: ‖Bᵀ u₁‖ / ‖B‖; `principal_angles` compares the spaces.
    Cost: a singular value decomposition. Wang et al. 2024, Fig. 20; Ba et al. 2022.

    >>> import tangency as tg
    >>> beta = torch.tensor([1.0, 0.0, 0.0])
    >>> round(tg.spectra.weight_alignment(torch.outer(torch.ones(5), beta), beta), 4)
    1.0
    """
    checks.choice(side, "side", ("inputs", "outputs"))
    w = tree.numbers(W, "W")
    if w.dim() < 2 or 0 in w.shape or not w.is_floating_point():
        raise InputError(f"W has shape {tuple(w.shape)} and type {w.dtype}; needed: a real matrix [o, i].")
    checks.finite(w, "W")
    w = w.flatten(1).cpu().double()
    feature = tree.numbers(beta, "beta").cpu().double()
    size = w.shape[1] if side == "inputs" else w.shape[0]
    feature = feature.reshape(size, -1) if feature.numel() == size else feature
    if feature.dim() != 2 or len(feature) != size:
        raise InputError(
            f"W has {size} {side} and beta has shape {tuple(feature.shape)}; needed: [{size}] or [{size}, k]."
        )
    left, sizes, right = torch.linalg.svd(w, full_matrices=False)
    if not float(sizes[0]) > 0:
        raise InputError("W is 0, so it has no first direction; needed: a matrix that is not.")
    return float(((right[0] if side == "inputs" else left[:, 0]) @ _unit(feature, "beta")).norm().clamp_max(1.0))


def target_alignment(
    K: Matrix, y: Numbers | Sequence[str], *, centred: bool = False, targets: Kind | None = None
) -> float:
    """⟨K, y yᵀ⟩ / (‖K‖_F ‖y yᵀ‖_F): kernel target alignment; `centred` with H K H, H = 1 − 11ᵀ/n, in place of K.

    `y`, `targets`: as for `energy`. Streams over the tiles of a Gram on disk: once, or twice if centred. Sums are in
    float64. Cristianini et al. 2001; centred: Cortes, Mohri & Rostamizadeh 2012, "Algorithms for learning kernels based
    on centered alignment", which does not count that a kernel is large everywhere.

    >>> import tangency as tg
    >>> y = torch.tensor([1.0, 1.0, -1.0, -1.0])
    >>> tg.spectra.target_alignment(torch.outer(y, y), y), tg.spectra.target_alignment(torch.eye(4), y)
    (1.0, 0.5)
    """
    gram = square(K)
    if centred and len(gram.shape) == 4 and gram.shape[1] > 1:
        raise InputError(
            f"K is full over {gram.shape[1]} outputs; centring needs one row for each sample. Use the trace kernel, or "
            "centred=False."
        )
    aim = _aimed(y, gram.shape[: len(gram.shape) // 2], gram.device, targets)
    if centred:
        mean = aim.mean(0)
        if float((aim - mean).norm()) <= 1e-12:
            raise InputError("y is constant, so nothing of it is left when it is centred; needed: different targets.")
        aim = _unit(aim - mean, "y")
    inner, size = _moments(gram, aim, centred)
    if not size > 0:
        raise InputError(
            f"K is {'constant' if centred else '0'}, so it has no alignment; needed: a kernel that varies."
        )
    # ‖Y Yᵀ‖_F from the small side.
    return inner / (size * float((aim.T @ aim).norm()))


def cka(K: Matrix, other: Matrix, *, centred: bool = True) -> float:
    """⟨HKH, HLH⟩ / (‖HKH‖ ‖HLH‖): how alike two kernels on the same samples are; 1 up to a factor.

    Kornblith et al. 2019, "Similarity of neural network representations revisited". Cost: both Grams in float64.

    >>> import tangency as tg
    >>> tg.spectra.cka(torch.eye(3), 2 * torch.eye(3))
    1.0
    """
    a, b = normed(K, centred, "K"), normed(other, centred, "other")
    if a.shape != b.shape:
        raise InputError(f"the Grams have {len(a)} and {len(b)} rows; needed: kernels on the same samples.")
    # 1 − ½‖a − b‖² has all digits where they are nearly the same.
    return 1 - float((a - b).square().sum()) / 2


def numerical_rank(values: Float[Tensor, " k"]) -> int:
    """How many eigenvalues, largest first, are more than rounding beside the first, in single precision.

    A Gram in double precision may have been computed in single.

    >>> numerical_rank(torch.tensor([2.0, 1.0, 1e-9]))
    2
    """
    limit = len(values) * torch.finfo(torch.float32).eps * float(values[0].clamp_min(0)) if len(values) else 0.0
    return int((values > max(limit, 0.0)).sum())


def principal_angles(A: Array, B: Array) -> Float[Tensor, " k"]:
    """θ_i, cos θ_i the singular values of Q_Aᵀ Q_B: angles between the spans of the columns [n, k], [n, l], ascending.

    Small angles by their sines, which keep the digits that cosines lose. In radians, min(k, l) of them. Vectors [n]
    are one column. Björck & Golub 1973.

    >>> import tangency as tg
    >>> tg.spectra.principal_angles(torch.eye(3)[:, :2], torch.eye(3)[:, 1:]).round(decimals=4)
    tensor([0.0000, 1.5708])
    """
    a, b = _basis(A, "A"), _basis(B, "B")
    if len(a) != len(b):
        raise InputError(f"A has {len(a)} rows and B {len(b)}; needed: vectors of one space.")
    if a.shape[1] < b.shape[1]:
        a, b = b, a
    cosines = torch.linalg.svdvals(a.T @ b).clamp(0, 1)  # descending
    sines = torch.linalg.svdvals(b - a @ (a.T @ b)).clamp(0, 1).flip(0)  # ascending
    angles = torch.where(cosines.square() >= 0.5, sines.asin(), cosines.acos())
    kinds = [v.dtype for v in (A, B) if isinstance(v, Tensor) and v.is_floating_point()]
    return angles.to(max(kinds, key=lambda k: torch.finfo(k).bits) if kinds else torch.float64)


def normed(K: Matrix, centred: bool, name: str) -> Float[Tensor, "n n"]:
    """K (centred) of norm 1 in float64."""
    gram = square(K, name)
    k = gram.dense().detach().double().reshape(flat_rows(gram.shape), -1)
    k = k / k.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    if centred:
        if len(gram.shape) == 4 and gram.shape[1] > 1:
            raise InputError(f"{name} is full over {gram.shape[1]} outputs; centring needs one row for each sample.")
        k = k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()
    size = k.norm()
    if not float(size) > 1e-12:
        raise InputError(
            f"{name} is constant or 0, so it is like nothing; needed: a kernel that varies over the samples."
        )
    return k / size


def _pairs(K: Gram | Spectrum, count: int, where: torch.device, progress: bool) -> Spectrum:
    """At least `count` eigenpairs; of a Gram on disk `where` the targets lie."""
    checks.positive(count, "count", "a number of eigenvectors")
    if isinstance(K, Spectrum):
        if count > len(K):
            raise InputError(f"count={count}, and the spectrum holds {len(K)} eigenpairs; needed: at most that many.")
        return K
    n = flat_rows(K.shape)
    if count > n:
        raise InputError(f"count={count}; K has {n} rows. Needed: at most as many eigenvectors.")
    return top(K, count, device=K.device or where, progress=progress)


def _aimed(
    y: Numbers | Sequence[str], side: torch.Size, device: torch.device | None, kind: Kind | None
) -> Float[Tensor, "r q"]:
    """Targets as columns of total norm 1, in float64; refused on another device than K's, where K lies on one."""
    numbers = columns_of(y, side[1] if len(side) == 2 else None, targets=kind)
    aim = checked_targets(numbers, side, torch.float64, device)
    aim = aim.reshape(side.numel(), -1) if len(side) == 2 else aim.reshape(len(aim), -1)
    return _unit(aim.double(), "y")


def _unit(v: Float[Tensor, "r q"], name: str) -> Float[Tensor, "r q"]:
    """v of norm 1, also of huge and tiny numbers."""
    checks.finite(v, name)
    largest = float(v.abs().max())
    if not largest > 0:
        raise InputError(f"{name} is 0 everywhere, so it has no direction; needed: at least one number that is not.")
    v = v / largest
    return v / v.norm()


def _basis(given: Array, name: str) -> Float[Tensor, "n k"]:
    v = tree.numbers(given, name)
    v = v[:, None] if v.dim() == 1 else v
    if v.dim() != 2 or 0 in v.shape or v.is_complex() or v.shape[1] > v.shape[0]:
        raise InputError(f"{name} has shape {tuple(v.shape)}; needed: real columns [n, k] with k at most n.")
    v = v.double()
    checks.finite(v, name)
    # Columns of norm 1: what is dependent is so whatever their scales.
    v = v / v.abs().amax(0).clamp_min(torch.finfo(v.dtype).tiny)
    v = v / v.norm(dim=0).clamp_min(torch.finfo(v.dtype).tiny)
    left, s, _ = torch.linalg.svd(v, full_matrices=False)
    rank = int((s > 1e-10 * s[0]).sum()) if float(s[0]) > 0 else 0
    if rank < v.shape[1]:
        raise InputError(f"the {v.shape[1]} columns of {name} span {rank} dimensions; needed: independent columns.")
    return left


def _moments(gram: Gram, aim: Float[Tensor, "n q"], centred: bool) -> tuple[float, float]:
    """⟨K, Y Yᵀ⟩ and ‖K‖_F, of H K H if centred (Y is, then), by tiles in float64, in a common unit."""
    n, half = flat_rows(gram.shape), len(gram.shape) // 2
    ones = torch.ones(n, 1, dtype=torch.float64, device=aim.device)
    rows = (gram @ ones)[:, 0] / n if centred else ones[:, 0] * 0
    unit = max(float(gram.diag().abs().max()), torch.finfo(torch.float64).tiny)  # no entry of a kernel is larger
    total, inner, square_sum = rows.mean(), 0.0, 0.0
    per = gram.shape[1:half].numel()
    for i, j, tile in gram.tiles():
        a, b = (on_device(index, aim.device) for index in (i, j))
        left, right = (aim.unflatten(0, (-1, per))[k].flatten(0, 1) for k in (a, b))
        k = tile.to(aim.device, torch.float64).reshape(len(left), len(right)) / unit
        if centred:
            k = k - (rows[a][:, None] + rows[b] - total) / unit
        inner += float((left * (k @ right)).sum())
        square_sum += float(k.square().sum())
    return inner, square_sum**0.5
