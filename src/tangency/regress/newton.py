"""Newton's method for logistic losses of logits that are linear in their coefficients, in float64.

What the coefficients multiply is a `Design`: features in memory, or a Gram that may stream from disk. The objective is
convex, the steps are solved by preconditioned conjugate gradients. The answer carries the norm of its gradient and,
since that says little where the objective is flat (separated classes, small reg), how far the next step would lead.

Samples that are classified with certainty have 1 − p far below rounding of p; they decide where the optimum is if the
classes are separated. So p − y, p(1 − p) and the losses are computed without taking differences from 1.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base.progress import bar
from ..errors import DidNotConverge, InputError
from ..linalg.systems import conjugate

# Below this loss per sample the classes are separated: without reg there is no answer, only a direction to infinity.
SEPARATED = 1e-7
SEPARATION = "the classes are separated: with reg=0 the loss falls for ever and has no minimum. Give reg > 0."
# An answer is no further from the optimum than this part of itself, or `tol` where that is larger.
DISTANCE = 1e-6
# A step is solved for at most this exactly (heuristic: it then gains four digits, and stays clear of rounding).
EXACT = 1e-4
Lead = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Chances:
    """Of logits [n, q], the sigmoid of one or the softmax of more: p, and 1 − p to all digits."""

    p: Tensor
    rest: Tensor

    @staticmethod
    def of(z: Tensor) -> "Chances":
        if z.shape[1] == 1:
            return Chances(torch.sigmoid(z), torch.sigmoid(-z))
        p = torch.softmax(z, 1)
        most = z.argmax(1, keepdim=True)  # 1 − p cancels in no other class
        return Chances(p, (1 - p).scatter(1, most, p.scatter(1, most, 0).sum(1, keepdim=True)))

    def less(self, labels: Tensor) -> Tensor:
        """p − labels."""
        return (1 - labels) * self.p - labels * self.rest

    def curved(self, dz: Tensor) -> Tensor:
        """The Hessian of a sample's loss in z, times dz [n, q]."""
        if dz.shape[1] == 1:
            return self.p * self.rest * dz
        dz = dz - dz.gather(1, self.p.argmax(1, keepdim=True))  # a mean of differences, none of which cancels
        return self.p * (dz - (self.p * dz).sum(1, keepdim=True))


def losses(z: Tensor, labels: Tensor, w: Tensor) -> Tensor:
    """Σ_i w_i loss(z_i, labels_i)."""
    if z.shape[1] == 1:
        each = -(1 - labels) * F.logsigmoid(-z) - labels * F.logsigmoid(z)
    else:
        below, most = z - z.amax(1, keepdim=True), z.argmax(1, keepdim=True)
        others = below.exp().scatter(1, most, 0).sum(1, keepdim=True)
        each = torch.log1p(others) - (labels * below).sum(1, keepdim=True)
    return (w * each).sum()


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
    def preconditioner(self, bends: Tensor, reg: float) -> Lead:
        """About H⁻¹ on coefficients and bias, where the losses' second derivatives in the logits are `bends` [n, q]."""


@dataclass(frozen=True, eq=False)
class Dense(Design):
    """Features: [n, r] has a column of coefficients per logit; [n, c, r] has one vector for all logits."""

    phi: Tensor

    def zeros(self, q: int) -> Tensor:
        return self.phi.new_zeros(self.phi.shape[-1], *([q] if self.phi.dim() == 2 else []))

    def forward(self, theta: Tensor) -> Tensor:
        return self.phi @ theta

    def adjoint(self, g: Tensor) -> Tensor:
        return self.phi.T @ g if self.phi.dim() == 2 else torch.einsum("ncr,nc->r", self.phi, g)

    def bound(self) -> float:
        return float(self.phi.norm())

    def norm(self, theta: Tensor, image: Tensor) -> float:
        return float(theta.norm())

    def preconditioner(self, bends: Tensor, reg: float) -> Lead:
        """The Hessian's diagonal."""
        # Squares weighted without a copy of phi's size.
        if self.phi.dim() == 2:
            sizes = torch.einsum("nr,nr,nc->rc", self.phi, self.phi, bends)
        else:
            sizes = torch.einsum("ncr,ncr,nc->r", self.phi, self.phi, bends)
        tiny = torch.finfo(sizes.dtype).tiny
        bound, total = (sizes + reg).clamp_min(tiny), bends.sum(0).clamp_min(tiny)
        return lambda theta, b: (theta / bound, b / total)


@dataclass(frozen=True, eq=False)
class Answer:
    """`gradient`: ‖∇‖ relative to that at zero (if this is not rounding).

    `distance`: `Task.distance` of the next step; None if none was made.
    """

    theta: Tensor
    b: Tensor
    steps: int
    gradient: float
    distance: float | None

    def shortfall(self, tol: float) -> str:
        """What the answer lacks of `tol`, in words; nothing if it is as exact as that."""
        if not self.gradient <= tol:
            return f"the relative gradient {self.gradient:.2e} in {self.steps} steps; asked for: {tol:.1e}"
        if self.distance is not None and not self.distance <= reach(tol):
            return (
                f"the relative gradient {self.gradient:.2e} in {self.steps} steps, but the optimum is still about "
                f"{self.distance:.2e} of the answer away (the objective is flat: reg is small, or the classes are "
                f"separated); asked for: {reach(tol):.1e}"
            )
        return ""


def reach(tol: float) -> float:
    """How far from the optimum an answer may be, relative to itself."""
    return max(tol, DISTANCE)


@dataclass(frozen=True, eq=False)
class Task:
    """Σ_i w_i loss(begin_i + forward(θ)_i + b, labels_i) + (reg/2)·‖θ‖², to be minimised."""

    design: Design
    labels: Tensor  # [n, q]
    begin: Tensor  # [n, q]
    w: Tensor  # [n, 1]
    reg: float
    bias: bool

    def logits(self, theta: Tensor, b: Tensor) -> Tensor:
        return self.begin + self.design.forward(theta) + b

    def losses(self, z: Tensor) -> Tensor:
        """Σ_i w_i loss_i."""
        return losses(z, self.labels, self.w)

    def objective(self, z: Tensor, theta: Tensor) -> float:
        return float(self.losses(z) + self.reg / 2 * theta.square().sum())

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

    def rounding(self) -> float:
        """About what rounding makes of the gradient at zero, were it to vanish."""
        chances = Chances.of(self.begin)
        residuals = float((self.w * ((1 - self.labels) * chances.p + self.labels * chances.rest)).norm())
        return torch.finfo(self.begin.dtype).eps * (self.design.bound() + len(self.w) ** 0.5) * residuals

    def distance(self, theta: Tensor, b: Tensor, z: Tensor, d: Tensor, db: Tensor, dz: Tensor) -> float:
        """The length of a step relative to where it starts: of the function or of the logits, whichever is longer.

        Logits that are small count as of size one: below that, what the gradient says is enough.
        """
        moved = z - self.begin
        inside, room = moved - b, z.numel() ** 0.5
        scale, size = self.design.norm(theta, inside), float(inside.norm())
        function = self.design.norm(d, dz - db) / scale * min(1.0, size / room) if scale else 0.0
        return max(function, float(_centred(dz).norm()) / max(float(_centred(moved).norm()), room))

    def newton(self, tol: float, max_steps: int, progress: bool = False) -> Answer:
        """Steps until the gradient is below `tol` of that at zero, and the next step below `reach(tol)`."""
        if not tol > 0 or max_steps < 1:
            raise InputError(f"max_steps={max_steps}, tol={tol}; needed: at least 1, above 0.")
        with bar(None, "surrogate", "step", show=progress) as step:
            return self._newton(tol, max_steps, step)

    def _newton(self, tol: float, max_steps: int, step: Callable[..., None]) -> Answer:
        q = self.labels.shape[1]
        theta, b, first = self.design.zeros(q), self.labels.new_zeros(q), 0.0
        z = self.begin.clone()
        distance: float | None = None
        for steps in range(max_steps + 1):
            chances = Chances.of(z)
            g, gb = self.gradient(theta, chances)
            size = _length(g, gb)
            # A gradient at zero that is rounding, as where the optimum is at zero, is nothing to compare with.
            first = first or max(size, self.rounding() / max(tol, torch.finfo(z.dtype).eps))
            relative = size / first if first else 0.0
            step(note=f"gradient {relative:.1e}")
            if relative == 0:
                distance = 0.0
                break
            if steps == max_steps and relative > tol:
                break
            d, db, left = self._direction(chances, g, gb, min(0.1, max(relative**0.5, EXACT)))
            dz = self.design.forward(d) + db
            if relative <= tol:  # a step that is not solved for says nothing
                distance = self.distance(theta, b, z, d, db, dz) if left <= 0.1 else float("inf")
                if distance <= reach(tol) or steps == max_steps:
                    break
                if self.reg == 0 and float(_centred(dz).abs().max()) > 1e-3:  # vanishes on the way to infinity
                    raise DidNotConverge(SEPARATION)
            slope = float((g * d).sum() + (gb * db).sum())
            rate = self._rate(theta, z, d, dz, slope)
            theta, b = theta + rate * d, b + rate * db
            z = self.logits(theta, b) if relative <= tol else z + rate * dz  # sums of steps collect rounding
            if self.reg == 0 and float(self.losses(z)) < SEPARATED * float(self.w.sum()):
                raise DidNotConverge(SEPARATION)
        if q > 1:  # softmax does not see a shift of all logits; without penalty it would be left to chance
            b = b - b.mean()
            theta = theta - theta.mean(1, keepdim=True) if theta.dim() == 2 else theta
        return Answer(theta, b, steps, relative, distance)

    def _rate(self, theta: Tensor, z: Tensor, d: Tensor, dz: Tensor, slope: float) -> float:
        """How much of a step to take (Armijo). At the end the objective no longer shows what the gradient does."""
        value, rate = self.objective(z, theta), 1.0
        while rate > 1e-10:
            if self.objective(z + rate * dz, theta + rate * d) <= value + 1e-4 * rate * slope + 1e-14 * abs(value):
                break
            rate /= 2
        return rate

    def _direction(self, chances: Chances, g: Tensor, gb: Tensor, tol: float) -> tuple[Tensor, Tensor, float]:
        """−H⁻¹ g by preconditioned conjugate gradients, to a tolerance that tightens as Newton's method converges.

        With it comes how large the residual still is, beside g.
        """

        def parts(v: Tensor) -> tuple[Tensor, Tensor]:
            return v[: g.numel(), 0].reshape(g.shape), v[g.numel() :, 0]

        def column(d: Tensor, db: Tensor) -> Tensor:
            return torch.cat([d.flatten(), db])[:, None]

        def hessian(v: Tensor) -> Tensor:
            d, db = parts(v)
            dz = self.w * chances.curved(self.design.forward(d) + db)
            return column(self.design.adjoint(dz) + self.reg * d, dz.sum(0) if self.bias else torch.zeros_like(db))

        lead = self.design.preconditioner(self.w * chances.p * chances.rest, self.reg)
        energies: list[float] = []  # rᵀM⁻¹r of the residuals: where H is flat, unlike ‖r‖, it says how far x is off

        def led(r: Tensor) -> Tensor:
            d, db = lead(*parts(r))
            # Softmax does not see a shift of all logits: there H is zero, for the bias, and rounding must not lead.
            d, db = d if d.dim() == 1 else _centred(d), _centred(db[None])[0]
            out = column(d, db)
            energies.append(float((r * out).sum()))
            return out

        target = column(-g, -gb)
        x, iterates = torch.zeros_like(target), conjugate(hessian, led, torch.zeros_like(target), target)
        # At most 2000 (heuristic): Newton's method forgives a direction that is not exact.
        for x, _ in itertools.islice(iterates, 2000):  # noqa: B007 - the last one counts
            if energies[-1] <= tol**2 * energies[0]:
                break
        return *parts(x), (max(energies[-1], 0.0) / energies[0]) ** 0.5 if energies[0] > 0 else float("inf")


def _centred(z: Tensor) -> Tensor:
    """Of several logits [n, q] (coefficients, biases) what softmax sees: not a shift of all."""
    return z if z.shape[1] == 1 else z - z.mean(1, keepdim=True)


def _length(g: Tensor, gb: Tensor) -> float:
    """The norm of a gradient by coefficients and bias."""
    return float((g.square().sum() + gb.square().sum()).sqrt())
