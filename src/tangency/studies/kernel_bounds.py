"""What the errors of two kernel machines, one in the span of the other, promise of each other: the bounds and whether
they hold.

Qadeer et al. 2023 (arXiv:2310.18612), sections 4 and 5, with the constants of its proofs. CK ⊂ NTK are projections of f
on nested spans, or the optima of logistic losses over them. As printed three of the constants are too small, and
rounding is left out; every such inequality has a mended one beside it (`docs/conjugate.md` has the proofs):

- (37), (48), (49) lack a factor (b − a): printed 2(b − a)²L²/N², proved (b − a)³L²/N². On [−1, 1] they are the same.
- (59), (61), (65), (68) count the test points near a training point as τ₁τ₂; there are up to (2τ₁ + 1)(2τ₂ + 1).
  (68) leaves even τ₁τ₂ out.
- (38) and (52) need spans that lie within each other to the last digit, and an optimum. A pseudo-inverse leaves small
  eigenvalues out; logistic losses of separated classes have no optimum, so a penalty is needed.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float
from ..errors import InputError
from .grids import Grids, need_axes, on_test

# Both sides are sums of a few hundred terms in float64: what rounding makes of them relative to f, with margin.
ROUNDING = 1e-12
# An optimum is where Newton's method ends: its objective is above the least by this part of itself at most (heuristic).
CONVERGED = 1e-9


@dataclass(frozen=True, repr=False)
class Bound(Result):
    """left ≤ right, on one run. `assumed`: whether what the inequality assumes is so here; else it promises nothing."""

    name: str
    left: float
    right: float
    assumed: bool
    mended: bool = False  # not as printed
    rounding: float = 0.0  # of either side

    @property
    def holds(self) -> bool:
        """Whether left ≤ right, up to rounding."""
        return self.left <= self.right * (1 + ROUNDING) + self.rounding

    @property
    def violated(self) -> bool:
        """Promised, and false."""
        return self.assumed and not self.holds

    @property
    def says(self) -> str:
        """In words."""
        if self.assumed:
            return "holds" if self.holds else "VIOLATED"
        return "holds, not promised" if self.holds else "fails, not promised"


@dataclass(frozen=True, repr=False)
class Bounds(Result):
    """Inequalities on one run."""

    rows: tuple[Bound, ...]

    @property
    def violations(self) -> int:
        """How many are promised on this run, and false: 0, or there is an error somewhere."""
        return sum(row.violated for row in self.rows)

    @property
    def fails(self) -> tuple[str, ...]:
        """Those that are false, promised or not."""
        return tuple(row.name for row in self.rows if not row.holds)

    def __getitem__(self, name: str) -> Bound:
        for row in self.rows:
            if row.name == name:
                return row
        raise InputError(f"no bound {name!r}; there are {', '.join(row.name for row in self.rows)}.")

    def table(self) -> str:
        """A line for each."""
        return text_table(["bound", "left", "right", ""], [[r.name, r.left, r.right, r.says] for r in self.rows])


@dataclass(frozen=True, eq=False, repr=False)
class RegressionFit(Result):
    """A fit of least squares as the bounds need it: its values on the test nodes, its coefficients, what was cut off.

    `norm`: ‖γ‖ of the fit γ·φ. `cut`: what is known to bound the singular values that were left out, of the features
    times √w. `rounded`: how far its values on the training nodes are from the projection's, ‖·‖₀. 0: exact.
    """

    values: Float[Tensor, " m"]
    norm: float = 0.0
    cut: float = 0.0
    rounded: float = 0.0


def regression_bounds(
    grids: Grids, f: Float[Tensor, " m"], ck: RegressionFit, ntk: RegressionFit, *, nested: bool = True
) -> Bounds:
    """(38), (45), (48), (49) of fits on an interval: f and both fits by their values on the test grid.

    `nested`: whether the span of `ck` lies in that of `ntk` to rounding. (38*), (48*): what holds whether or not, with
    what was cut off: ‖f − f_NTK‖₀ ≤ ‖f − f_CK‖₀ + σ‖γ_CK‖. (49*) is (49) with ‖f − f_CK‖₀ ≤ ‖f‖₀ in place of Lemma 4.4,
    which is always the smaller. Lipschitz constants are those on the test grid, which is all that the proofs use.

    >>> from tangency.studies import Grid, Grids
    >>> grids = Grids(Grid((4,)), (2,))
    >>> f = grids.test.nodes()[:, 0] ** 2
    >>> best = RegressionFit(torch.full_like(f, 0.375))  # the constant that is nearest in the norm of the training grid
    >>> regression_bounds(grids, f, best, RegressionFit(f)).violations
    0
    """
    need_axes(grids, 1, "one, for the bounds of regression.")
    f = on_test(grids, f, "f")
    if not isinstance(ck, RegressionFit) or not isinstance(ntk, RegressionFit):
        raise InputError("ck and ntk are fits; needed: tg.studies.RegressionFit(values, norm) of each.")
    tau, n, long = grids.ratio[0], grids.train.cells[0], grids.train.high - grids.train.low
    coarse, fine = (g.weights(f.device) for g in (grids.train, grids.test))
    gaps = {k: f - on_test(grids, fit.values, f"{k} values") for k, fit in (("CK", ck), ("NTK", ntk))}
    zero = {k: float((coarse * grids.coarse(g).square()).sum().sqrt()) for k, g in gaps.items()}
    one = {k: float((fine * g.square()).sum().sqrt()) for k, g in gaps.items()}
    slope = {k: float(g.diff().abs().max()) / grids.test.steps[0] for k, g in gaps.items()}
    size = float((coarse * grids.coarse(f).square()).sum().sqrt())
    # 1 − β = (1 − β²)/(1 + β): without taking numbers near 1 from each other.
    part = min(1.0, (zero["NTK"] / size) ** 2) if size else 1.0
    less = part / (1 + math.sqrt(1 - part))
    more = 1 / less if less else math.inf
    some, even = less > 0 and nested, all(monotone(grids, g) for g in gaps.values())
    slack = ntk.cut * ck.norm + ntk.rounded + ck.rounded
    printed, proved = ({k: c * (slope[k] / n) ** 2 for k in slope} for c in (8 * long**2, 4 * long**3))
    left, right = 4 * tau * one["CK"] ** 2, 4 * tau * (more * one["NTK"]) ** 2
    off = ROUNDING * size
    return Bounds((
        Bound("(38)", zero["NTK"], zero["CK"], nested, rounding=off),
        Bound("(38*)", zero["NTK"], zero["CK"] + slack, True, True, off),
        Bound("(45) NTK", one["NTK"], math.sqrt(2 * tau) * one["CK"], nested and even, rounding=off),
        Bound("(45) CK", one["CK"], math.sqrt(2 * tau) * more * one["NTK"], some and even, rounding=off),
        Bound("(48)", one["NTK"] ** 2, left + printed["NTK"], nested, rounding=off**2),
        Bound("(48*)", one["NTK"] ** 2, 4 * (tau**0.5 * one["CK"] + slack) ** 2 + proved["NTK"], True, True, off**2),
        Bound("(49)", one["CK"] ** 2, right + printed["CK"], some, rounding=off**2),
        Bound("(49*)", one["CK"] ** 2, 4 * (size + ck.rounded) ** 2 + proved["CK"], True, True, off**2),
    ))  # fmt: skip


def monotone(grids: Grids, g: Float[Tensor, " m"]) -> bool:
    """Whether g [m] only rises, or only falls, up to rounding, between each two neighbours of the training grid."""
    tau = grids.ratio[0]
    moves = g.diff().reshape(-1, tau)
    flat = ROUNDING * float(g.abs().max())  # neighbours that are equal but for rounding neither rise nor fall
    return bool(((moves >= -flat).all(1) | (moves <= flat).all(1)).all())


@dataclass(frozen=True, eq=False, repr=False)
class ClassificationFit(Result):
    """A logistic fit as the bounds need it: ψ on the test nodes (log-odds of class 1), and ‖β‖² under the penalty."""

    logits: Float[Tensor, " m"]
    square: float = 0.0


def classification_bounds(
    grids: Grids,
    labels: Tensor,
    ck: ClassificationFit,
    ntk: ClassificationFit,
    *,
    reg: float = 0.0,
    optimal: bool = True,
) -> Bounds:
    """(52), (65), (68) of logistic fits on a rectangle, both by their logits on the test grid; `labels` [m] are 0 or 1.

    Printed: C₁ = τ₁τ₂, C₂ = τ₁τ₂ω, D₁ = e^{hL_NTK}, D₂ = ω e^{hL_CK}. Mended (*): (2τ₁ + 1)(2τ₂ + 1) in place of τ₁τ₂,
    also in D, and the penalty (reg/2)·‖β‖² of both fits. `optimal`: whether they have an optimum without it.
    """
    need_axes(grids, 2, "two, for the bounds of classification.")
    if not bool(((on_test(grids, labels, "labels") == 0) | (labels == 1)).all()):
        raise InputError("labels has others than 0 and 1; needed: the class of each node of the test grid.")
    psi = {k: on_test(grids, fit.logits, f"{k} logits") for k, fit in (("CK", ck), ("NTK", ntk))}
    signed = {k: torch.where(labels.bool(), -p, p) for k, p in psi.items()}
    zero = {k: float(F.softplus(grids.coarse(s)).sum()) for k, s in signed.items()}
    one = {k: float(F.softplus(s).sum()) for k, s in signed.items()}
    omega = float((grids.coarse(signed["CK"]) - grids.coarse(signed["NTK"])).max().exp())
    lean = reg / 2 * (ck.square - ntk.square)
    seen = [Corners.of(grids, psi[k], labels) for k in ("CK", "NTK")]
    grow = {k: math.exp(min(corners.rise, 700.0)) for k, corners in zip(psi, seen, strict=True)}
    top = all(Corners.of(grids, s, labels).top for s in signed.values())
    matching = seen[0].matching
    few, many = math.prod(grids.ratio), math.prod(2 * t + 1 for t in grids.ratio)
    first, atleast = max(one["CK"] + lean, 0.0), max(1.0, omega)
    off = CONVERGED * (zero["CK"] + reg / 2 * ck.square)  # of what Newton's method was asked for
    return Bounds((
        Bound("(52)", zero["NTK"], zero["CK"], optimal, rounding=off),
        Bound("(52*)", zero["NTK"], zero["CK"] + lean, True, True, off),
        Bound("(65) NTK", one["NTK"], few * one["CK"], top and optimal, rounding=off),
        Bound("(65) CK", one["CK"], few * omega * one["NTK"], top and omega >= 1),
        Bound("(65*) NTK", one["NTK"], many * first, top, True, off),
        Bound("(65*) CK", one["CK"], many * atleast * one["NTK"], top, True),
        Bound("(68) NTK", one["NTK"], grow["NTK"] * one["CK"], matching and optimal, rounding=off),
        Bound("(68) CK", one["CK"], omega * grow["CK"] * one["NTK"], matching and omega >= 1),
        Bound("(68*) NTK", one["NTK"], many * grow["NTK"] * first, matching, True, off),
        Bound("(68*) CK", one["CK"], many * atleast * grow["CK"] * one["NTK"], matching, True),
    ))  # fmt: skip


@dataclass(frozen=True)
class Corners:
    """What the nodes of the test grid have to do with the corners of the training cells that they lie in.

    `rise`: h·L, with L the Lipschitz constant between nodes and those corners. `top`: no node is above all corners of
    a cell that it lies in, by more than rounding. `matching`: every node has the label of a corner of such a cell.
    """

    rise: float
    top: bool
    matching: bool

    @staticmethod
    def of(grids: Grids, values: Tensor, labels: Tensor) -> "Corners":
        """Cell by cell: each is a block of (τ₁ + 1)(τ₂ + 1) nodes with a corner at each end."""
        t1, t2 = grids.ratio
        v, eta, at = (
            u.reshape(*grids.test.shape, -1) for u in (values, labels.bool(), grids.test.nodes(values.device))
        )
        rise, top, tied = 0.0, True, ROUNDING * float(v.abs().max())
        matched = torch.zeros(grids.test.shape, dtype=torch.bool, device=values.device)
        for i, j in itertools.product(*(range(n) for n in grids.train.cells)):
            block = (slice(i * t1, (i + 1) * t1 + 1), slice(j * t2, (j + 1) * t2 + 1))
            inside, places, classes = v[block].flatten(), at[block].reshape(-1, 2), eta[block].flatten()
            ends = torch.tensor([0, t2, t1 * (t2 + 1), (t1 + 1) * (t2 + 1) - 1], device=values.device)
            far = torch.cdist(places, places[ends])
            steep = (inside[:, None] - inside[ends]).abs() / far.where(far > 0, torch.inf)
            rise = max(rise, float(steep.max()))
            top = top and float(inside.max()) <= float(inside[ends].max()) + tied
            matched[block] |= (classes[:, None] == classes[ends]).any(1).reshape(t1 + 1, t2 + 1)
        return Corners(math.hypot(*grids.train.steps) * rise, top, bool(matched.all()))
