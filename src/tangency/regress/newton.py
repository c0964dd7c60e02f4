"""Newton's method for logistic losses of logits that are linear in their coefficients, in float64.

What the coefficients multiply is a `Design`: features in memory, or a Gram that may stream from disk. The `Objective`
is convex; its `newton` solves the steps by preconditioned conjugate gradients. The `Answer` carries the norm of its
gradient and, since that says little where the objective is flat (separated classes, small reg), how far the next step
would lead.

Samples that are classified with certainty have 1 − p far below rounding of p; they decide where the optimum is if the
classes are separated. So p − y, p(1 − p) and the losses are computed without taking differences from 1.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base.progress import bar
from ..errors import DidNotConverge, InputError
from ..gram.gram import Gram
from ..linalg.systems import conjugate

# Below this loss per sample the classes are separated: without reg there is no answer, only a direction to infinity.
SEPARATED = 1e-7
SEPARATION = "the classes are separated: with reg=0 the loss falls for ever and has no minimum. Give reg > 0."
OVERFLOW = "The samples are too far apart in size for floating point: scale the features, or give a larger reg."
# An answer is no further from the optimum than this part of itself, or `tol` where that is larger.
DISTANCE = 1e-6
# A step is solved for at most this exactly (heuristic: it then gains four digits, and stays clear of rounding).
STEP_TOLERANCE = 1e-4
# A step whose residual is larger than this, relative to the gradient, says nothing of the distance to the optimum.
UNSOLVED = 0.1
# Steps of conjugate gradients for one direction (heuristic): Newton's method forgives one that is not exact.
MAX_INNER_STEPS = 2000
# Where all samples are certain, and some of them wrong, no loss bends: a bias then moves by about so many times the
# largest logit at most in a step (heuristic; what sees to it vanishes with the gradient).
REACH = 100
# Features of at most so many columns, and so many numbers in the factors of all logits, have the Hessian of each logit
# factored as a preconditioner (heuristics): products of matrices, where an iteration is a product with a vector.
FACTORED, FACTORS = 512, 1 << 24
# What a preconditioner is: about H⁻¹, of coefficients and bias.
Lead = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Chances:
    """Of logits [n, q], the sigmoid of one or the softmax of more: p, and 1 − p to all digits."""

    p: Tensor
    rest: Tensor

    @staticmethod
    def of(z: Tensor) -> "Chances":
        """Of logits [n, q]."""
        if z.shape[1] == 1:
            return Chances(torch.sigmoid(z), torch.sigmoid(-z))
        p = torch.softmax(z, 1)
        most = z.argmax(1, keepdim=True)  # 1 − p cancels in no other class
        # For the likeliest class, 1 − p is the sum of the others' p.
        return Chances(p, (1 - p).scatter(1, most, p.scatter(1, most, 0).sum(1, keepdim=True)))

    def less(self, labels: Tensor) -> Tensor:
        """p − labels."""
        return (1 - labels) * self.p - labels * self.rest

    def curved(self, dz: Tensor) -> Tensor:
        """The Hessian of a sample's loss in z, times dz [n, q]."""
        # diag(p) − p pᵀ for softmax, p(1 − p) for one logit.
        if dz.shape[1] == 1:
            return self.p * self.rest * dz
        dz = dz - dz.gather(1, self.p.argmax(1, keepdim=True))  # a mean of differences, none of which cancels
        return self.p * (dz - (self.p * dz).sum(1, keepdim=True))


def logistic_loss(z: Tensor, labels: Tensor, w: Tensor) -> Tensor:
    """Σ_i w_i loss(z_i, labels_i), of logits and labels [n, q] and weights [n, 1]."""
    if z.shape[1] == 1:
        losses = -(1 - labels) * F.logsigmoid(-z) - labels * F.logsigmoid(z)
    else:
        below, most = z - z.amax(1, keepdim=True), z.argmax(1, keepdim=True)
        others = below.exp().scatter(1, most, 0).sum(1, keepdim=True)
        # log Σ_c e^{z_c} − z_most = log(1 + others): exact where the others are far below rounding of 1
        losses = torch.log1p(others) - (labels * below).sum(1, keepdim=True)
    return (w * losses).sum()


class Design(ABC):
    """A linear map from coefficients to logits [n, q]."""

    @abstractmethod
    def zeros(self, q: int) -> Tensor:
        """Coefficients that are zero, for q logits."""

    @abstractmethod
    def forward(self, theta: Tensor) -> Tensor:
        """Logits [n, q]."""

    @abstractmethod
    def adjoint(self, g: Tensor) -> Tensor:
        """The transpose of `forward`."""

    @abstractmethod
    def bound(self) -> float:
        """At least the largest factor by which `forward` lengthens coefficients."""

    @abstractmethod
    def norm(self, theta: Tensor, image: Tensor) -> float:
        """Of the function that has these coefficients and logits, in the kernel's Hilbert space."""

    @abstractmethod
    def preconditioner(self, bends: Tensor, reg: float, stiff: Tensor) -> Lead:
        """About H⁻¹ on coefficients and bias, where the losses' second derivatives in the logits are `bends` [n, q].

        `stiff` [q]: what is added to the biases' part of H.
        """


@dataclass(frozen=True, eq=False)
class FeatureDesign(Design):
    """Logits φ·θ. Features [n, r] have a column of coefficients per logit; [n, c, r] have one vector for all logits."""

    phi: Tensor

    def zeros(self, q: int) -> Tensor:
        """[r, q], or [r] for all logits together."""
        return self.phi.new_zeros(self.phi.shape[-1], *([q] if self.phi.dim() == 2 else []))

    def forward(self, theta: Tensor) -> Tensor:
        """φ θ."""
        return self.phi @ theta

    def adjoint(self, g: Tensor) -> Tensor:
        """φᵀ g."""
        return self.phi.T @ g if self.phi.dim() == 2 else torch.einsum("ncr,nc->r", self.phi, g)

    def bound(self) -> float:
        """‖φ‖, which is at least its largest singular value."""
        return float(self.phi.norm())

    def norm(self, theta: Tensor, image: Tensor) -> float:
        """‖θ‖."""
        return float(theta.norm())

    def preconditioner(self, bends: Tensor, reg: float, stiff: Tensor) -> Lead:
        """The inverse of the Hessian's blocks for each logit where these are small, else of its diagonal."""
        r, tiny = self.phi.shape[-1], torch.finfo(bends.dtype).tiny
        total = (bends.sum(0) + stiff).clamp_min(tiny)  # of the biases, which are left to the iteration to couple
        if reg > 0 and self.phi.dim() == 2 and 0 < r <= FACTORED and bends.shape[1] * r**2 <= FACTORS:
            ridge = torch.full_like(self.phi[0], reg)
            factors = torch.stack([_factored(self.phi.T @ (self.phi * d[:, None]), ridge) for d in bends.T])
            return lambda theta, b: (torch.cholesky_solve(theta.T[..., None], factors)[..., 0].T, b / total)
        # Squares weighted without a copy of phi's size.
        if self.phi.dim() == 2:
            sizes = torch.einsum("nr,nr,nc->rc", self.phi, self.phi, bends)
        else:
            sizes = torch.einsum("ncr,ncr,nc->r", self.phi, self.phi, bends)
        bound = (sizes + reg).clamp_min(tiny)
        return lambda theta, b: (theta / bound, b / total)


@dataclass(frozen=True, eq=False)
class GramDesign(Design):
    """Logits K θ. The Hessian K D K + reg is inverted exactly on the span of `vectors`, and taken for reg elsewhere."""

    gram: Gram
    vectors: Tensor  # [n, r], eigenvectors of K
    values: Tensor  # [r]

    def zeros(self, q: int) -> Tensor:
        """[n, q]."""
        return self.vectors.new_zeros(self.gram.shape[0], q)

    def forward(self, theta: Tensor) -> Tensor:
        """K θ; a Gram on disk streams."""
        return self.gram @ theta

    def adjoint(self, g: Tensor) -> Tensor:
        """K g, since K is symmetric."""
        return self.gram @ g

    def bound(self) -> float:
        """tr K, which is at least its largest eigenvalue."""
        return float(self.gram.diag().double().abs().sum())

    def norm(self, theta: Tensor, image: Tensor) -> float:
        """√(θᵀ K θ)."""
        return float((theta * image).sum().abs().sqrt())

    def preconditioner(self, bends: Tensor, reg: float, stiff: Tensor) -> Lead:
        """A Cholesky factor per logit of the Hessian on the eigenvectors and the bias."""
        r = len(self.values)
        image = torch.cat([self.vectors * self.values, torch.ones_like(bends[:, :1])], 1)  # the bias sees ones
        ridge = torch.full_like(image[0], reg)
        factors = image.new_empty(bends.shape[1], r + 1, r + 1)
        for c in range(bends.shape[1]):  # the coupling between classes is left to the iteration
            small = image.T @ (image * bends[:, c, None])
            ridge[-1] = (
                1e-10 * small.diagonal()[-1] + stiff[c] + torch.finfo(small.dtype).tiny
            )  # the bias has no penalty
            factors[c] = _factored(small, ridge)

        # H⁻¹ = V S⁻¹ Vᵀ + (1 − V Vᵀ)/reg: exact on the span, reg on what is orthogonal to it.
        def lead(theta: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            """About H⁻¹ of coefficients [n, q] and bias [q]."""
            inside = self.vectors.T @ theta
            right = torch.cat([inside, b[None]])
            solved = torch.cholesky_solve(right.T[..., None], factors)[..., 0].T
            return self.vectors @ (solved[:r] - inside / reg) + theta / reg, solved[r]

        return lead


def _factored(small: Tensor, ridge: Tensor) -> Tensor:
    """The Cholesky factor of a matrix with a diagonal added; a larger one where rounding asks for it."""
    for more in (0.0, 1e-15, 1e-14, 1e-13, 1e-12, 1e-10):
        lower, failed = torch.linalg.cholesky_ex(small + torch.diag(ridge + more * small.diagonal().max()))
        if not failed:
            return lower
    return torch.diag((small.diagonal() + ridge).sqrt())  # a preconditioner may be rough; the iteration is exact


@dataclass(frozen=True, eq=False)
class Answer:
    """Coefficients and bias, what they give on the training samples, and how exact they are.

    `gradient`: ‖∇‖ relative to that at zero (if this is not rounding). `distance`: `Objective.distance` of the next
    step; None if none was made. `shortfall`: what the answer lacks of the tolerance, in words; empty if it is as exact.
    """

    theta: Tensor
    b: Tensor
    logits: Tensor  # [n, q]
    loss: float  # Σ_i w_i loss_i, without the penalty
    steps: int
    gradient: float
    distance: float | None
    shortfall: str


@dataclass(frozen=True, eq=False)
class Objective:
    """Σ_i w_i loss(begin_i + forward(θ)_i + b, labels_i) + (reg/2)·‖θ‖², to be minimised."""

    design: Design
    labels: Tensor  # [n, q]
    begin: Tensor  # [n, q]
    w: Tensor  # [n, 1]
    reg: float
    bias: bool

    def logits(self, theta: Tensor, b: Tensor) -> Tensor:
        """[n, q] of the training samples."""
        return self.begin + self.design.forward(theta) + b

    def loss(self, z: Tensor) -> Tensor:
        """Σ_i w_i loss_i, without the penalty."""
        return logistic_loss(z, self.labels, self.w)

    def value(self, z: Tensor, theta: Tensor) -> float:
        """The loss and the penalty."""
        return float(self.loss(z) + self.reg / 2 * theta.square().sum())

    def gradient(self, theta: Tensor, chances: Chances) -> tuple[Tensor, Tensor]:
        """Of the objective, by coefficients and bias."""
        g = self.w * chances.less(self.labels)
        return self.design.adjoint(g) + self.reg * theta, g.sum(0) if self.bias else torch.zeros_like(g[0])

    def certificate(self, theta: Tensor, b: Tensor) -> float:
        """‖∇‖ at these coefficients relative to that at zero."""
        start = self.design.zeros(self.labels.shape[1])
        here, first = (
            _length(*self.gradient(at, Chances.of(z)))
            for at, z in ((theta, self.logits(theta, b)), (start, self.begin))  # at zero without a product
        )
        return here / max(first, torch.finfo(b.dtype).tiny)

    def answer(
        self, theta: Tensor, b: Tensor, steps: int, gradient: float, distance: float | None, tol: float
    ) -> Answer:
        """These coefficients as an answer, held against `tol` (its distance against `DISTANCE` if that is larger)."""
        shortfall, allowed = "", max(tol, DISTANCE)
        if not gradient <= tol:
            shortfall = f"the relative gradient {gradient:.2e} in {steps} steps; asked for: {tol:.1e}"
        elif distance is not None and not distance <= allowed:
            shortfall = (
                f"the relative gradient {gradient:.2e} in {steps} steps, but the optimum is still about "
                f"{distance:.2e} of the answer away (the objective is flat: reg is small, or the classes are "
                f"separated); asked for: {allowed:.1e}"
            )
        z = self.logits(theta, b)
        return Answer(theta, b, z, float(self.loss(z)), steps, gradient, distance, shortfall)

    def rounding(self) -> float:
        """About what rounding makes of the gradient at zero, were it to vanish."""
        # |p − y| with no cancellation, so that rounding of each sample's share is counted, not what is left of the sum.
        chances = Chances.of(self.begin)
        residuals = float((self.w * ((1 - self.labels) * chances.p + self.labels * chances.rest)).norm())
        return torch.finfo(self.begin.dtype).eps * (self.design.bound() + len(self.w) ** 0.5) * residuals

    def distance(self, theta: Tensor, b: Tensor, z: Tensor, d: Tensor, db: Tensor, dz: Tensor) -> float:
        """The length of a step relative to where it starts: of the function or of the logits, whichever is longer.

        Logits that are small count as of size one: below that, what the gradient says is enough.
        """
        # `inside` is the function's own part of the logits, without the bias; `room` the norm of logits of size one.
        moved = z - self.begin
        inside, room = moved - b, z.numel() ** 0.5
        scale, size = self.design.norm(theta, inside), float(inside.norm())
        function = self.design.norm(d, dz - db) / scale * min(1.0, size / room) if scale else 0.0
        return max(function, float(_centred(dz).norm()) / max(float(_centred(moved).norm()), room))

    def newton(
        self, tol: float, max_steps: int, progress: bool = False, start: tuple[Tensor, Tensor] | None = None
    ) -> Answer:
        """Steps until the gradient is below `tol` of that at zero, and the next step below `DISTANCE` (or `tol`).

        `start`: coefficients and bias to begin with, where an answer to a problem nearby is known; else zero.
        """
        if not tol > 0 or max_steps < 1:
            raise InputError(f"max_steps={max_steps}, tol={tol}; needed: at least 1, above 0.")
        with bar(None, "surrogate", "step", show=progress) as step:
            return self._newton(tol, max_steps, step, start)

    def _newton(
        self, tol: float, max_steps: int, step: Callable[..., None], start: tuple[Tensor, Tensor] | None
    ) -> Answer:
        """Damped Newton steps from `start`, or from zero; `step` moves the progress bar on."""
        q = self.labels.shape[1]
        theta, b, first = self.design.zeros(q), self.labels.new_zeros(q), 0.0
        z = self.begin.clone()
        if start is not None:  # the gradient is compared with that at zero wherever one begins
            first = self._first(_length(*self.gradient(theta, Chances.of(z))), tol)
            theta, b = start
            z = self.logits(theta, b)
        distance: float | None = None
        for steps in range(max_steps + 1):
            chances = Chances.of(z)
            g, gb = self.gradient(theta, chances)
            size = _length(g, gb)
            first = first or self._first(size, tol)
            relative = size / first if first else 0.0
            step(note=f"gradient {relative:.1e}")
            if relative == 0:
                distance = 0.0
                break
            if not math.isfinite(relative):
                raise DidNotConverge(f"the gradient is {relative} after {steps} steps. {OVERFLOW}")
            if steps == max_steps and relative > tol:
                break
            # A tolerance of √relative is enough to converge faster than linearly (Nocedal & Wright 2006, 7.1).
            reach = REACH * (1 + float(z.abs().max()))
            d, db, left = self._direction(chances, g, gb, min(0.1, max(relative**0.5, STEP_TOLERANCE)), reach)
            dz = self.design.forward(d) + db
            if relative <= tol:  # a step that is not solved for says nothing
                distance = self.distance(theta, b, z, d, db, dz) if left <= UNSOLVED else float("inf")
                if distance <= max(tol, DISTANCE) or steps == max_steps:
                    break
                if self.reg == 0 and float(_centred(dz).abs().max()) > 1e-3:  # vanishes on the way to infinity
                    raise DidNotConverge(SEPARATION)
            slope = float((g * d).sum() + (gb * db).sum())
            rate = self._rate(theta, z, d, dz, slope)
            theta, b = theta + rate * d, b + rate * db
            z = self.logits(theta, b) if relative <= tol else z + rate * dz  # sums of steps collect rounding
            if self.reg == 0 and float(self.loss(z)) < SEPARATED * float(self.w.sum()):
                raise DidNotConverge(SEPARATION)
        if q > 1:  # softmax does not see a shift of all logits; without penalty it would be left to chance
            b = b - b.mean()
            theta = theta - theta.mean(1, keepdim=True) if theta.dim() == 2 else theta
        return self.answer(theta, b, steps, relative, distance, tol)

    def _first(self, size: float, tol: float) -> float:
        """What gradients are compared with: that at zero, whose norm is `size`."""
        # One that is rounding, as where the optimum is at zero, is nothing to compare with.
        return max(size, self.rounding() / max(tol, torch.finfo(self.begin.dtype).eps))

    def _rate(self, theta: Tensor, z: Tensor, d: Tensor, dz: Tensor, slope: float) -> float:
        """How much of a step to take (Armijo). At the end the objective no longer shows what the gradient does."""
        # 1e-4 as in Nocedal & Wright 2006; 1e-14 is what rounding leaves of the objective.
        value, rate = self.value(z, theta), 1.0
        while rate > 1e-10:
            if self.value(z + rate * dz, theta + rate * d) <= value + 1e-4 * rate * slope + 1e-14 * abs(value):
                break
            rate /= 2
        return rate

    def _direction(
        self, chances: Chances, g: Tensor, gb: Tensor, tol: float, reach: float
    ) -> tuple[Tensor, Tensor, float]:
        """−H⁻¹ g by preconditioned conjugate gradients, to a tolerance that tightens as Newton's method converges.

        With it comes how large the residual still is, beside g. Each bias has its gradient over `reach` added to H.
        """
        stiff = gb.abs() / reach

        # Conjugate gradients take columns: coefficients and bias go as one, [numel + q, 1].
        def parts(v: Tensor) -> tuple[Tensor, Tensor]:
            """Coefficients and bias of a column."""
            return v[: g.numel(), 0].reshape(g.shape), v[g.numel() :, 0]

        def column(d: Tensor, db: Tensor) -> Tensor:
            """The way back."""
            return torch.cat([d.flatten(), db])[:, None]

        def hessian(v: Tensor) -> Tensor:
            """H v, by one product with the design and one with its transpose."""
            d, db = parts(v)
            dz = self.w * chances.curved(self.design.forward(d) + db)
            return column(self.design.adjoint(dz) + self.reg * d, dz.sum(0) + stiff * db if self.bias else 0 * db)

        lead = self.design.preconditioner(self.w * chances.p * chances.rest, self.reg, stiff)
        energies: list[float] = []  # rᵀM⁻¹r of the residuals: where H is flat, unlike ‖r‖, it says how far x is off

        def led(r: Tensor) -> Tensor:
            """The preconditioner, without what softmax does not see."""
            d, db = lead(*parts(r))
            # Softmax does not see a shift of all logits: there H is zero, for the bias, and rounding must not lead.
            d, db = d if d.dim() == 1 else _centred(d), _centred(db[None])[0]
            out = column(d, db)
            energies.append(float((r * out).sum()))
            return out

        target = column(-g, -gb)
        x, iterates = torch.zeros_like(target), conjugate(hessian, led, torch.zeros_like(target), target)
        for x, _ in itertools.islice(iterates, MAX_INNER_STEPS):  # noqa: B007 - the last one counts
            if not energies[-1] > tol**2 * energies[0]:  # there, or no number
                break
        return *parts(x), (max(energies[-1], 0.0) / energies[0]) ** 0.5 if energies[0] > 0 else float("inf")


def _centred(z: Tensor) -> Tensor:
    """Of several logits [n, q] (coefficients, biases) what softmax sees: not a shift of all."""
    return z if z.shape[1] == 1 else z - z.mean(1, keepdim=True)


def _length(g: Tensor, gb: Tensor) -> float:
    """The norm of a gradient by coefficients and bias."""
    return float((g.square().sum() + gb.square().sum()).sqrt())
