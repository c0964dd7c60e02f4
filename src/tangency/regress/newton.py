"""Newton's method for logistic losses of logits that are linear in their coefficients, in float64.

What the coefficients multiply is a `Design`: features in memory, or a Gram that may stream from disk. The objective is
convex, the steps are solved by preconditioned conjugate gradients, and the answer carries the norm of its gradient.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._progress import bar
from ..errors import DidNotConverge
from ..solve import conjugate

# Below this loss per sample the classes are separated: without reg there is no answer, only a direction to infinity.
SEPARATED = 1e-7
SEPARATION = "the classes are separated: with reg=0 the loss falls for ever and has no minimum. Give reg > 0."
Lead = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def probabilities(z: Tensor) -> Tensor:
    """Of logits [n, q]: the sigmoid of one, the softmax of more."""
    return torch.sigmoid(z) if z.shape[1] == 1 else torch.softmax(z, 1)


def losses(z: Tensor, labels: Tensor, w: Tensor) -> Tensor:
    """Σ_i w_i loss(z_i, labels_i)."""
    if z.shape[1] == 1:
        each = F.softplus(z) - labels * z
    else:
        each = torch.logsumexp(z, 1, keepdim=True) - (labels * z).sum(1, keepdim=True)
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
    def preconditioner(self, p: Tensor, w: Tensor, reg: float) -> Lead:
        """About H⁻¹ for the Hessian at probabilities p [n, q] with weights w [n, 1], on coefficients and bias."""


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

    def preconditioner(self, p: Tensor, w: Tensor, reg: float) -> Lead:
        """The diagonal of an upper bound of the Hessian (Böhning 1992)."""
        curvature = 0.25 if p.shape[1] == 1 else 0.5
        # Squares weighted without a copy of phi's size.
        if self.phi.dim() == 2:
            sizes = torch.einsum("nr,nr,n->r", self.phi, self.phi, w[:, 0])[:, None]
        else:
            sizes = torch.einsum("ncr,ncr,n->r", self.phi, self.phi, w[:, 0])
        bound = (curvature * sizes + reg).clamp_min(torch.finfo(sizes.dtype).tiny)
        total = w.sum()
        return lambda theta, b: (theta / bound, b / total)


@dataclass(frozen=True, eq=False)
class Answer:
    theta: Tensor
    b: Tensor
    steps: int
    gradient: float


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

    def curved(self, p: Tensor, dz: Tensor) -> Tensor:
        """The Hessian of the losses in z, times dz."""
        if p.shape[1] == 1:
            return self.w * p * (1 - p) * dz
        return self.w * p * (dz - (p * dz).sum(1, keepdim=True))

    def gradient(self, theta: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Of the objective, at probabilities p, by coefficients and bias."""
        g = self.w * (p - self.labels)
        return self.design.adjoint(g) + self.reg * theta, g.sum(0) if self.bias else torch.zeros_like(g[0])

    def certificate(self, theta: Tensor, b: Tensor) -> float:
        """‖∇‖ at these coefficients relative to that at zero."""
        start = self.design.zeros(self.labels.shape[1])
        here, first = (
            _length(*self.gradient(at, probabilities(z)))
            for at, z in ((theta, self.logits(theta, b)), (start, self.begin))  # at zero without a product
        )
        return here / max(first, torch.finfo(b.dtype).tiny)

    def newton(self, tol: float, max_steps: int, progress: bool = False) -> Answer:
        with bar(None, "surrogate", "step", show=progress) as step:
            return self._newton(tol, max_steps, step)

    def _newton(self, tol: float, max_steps: int, step: Callable[..., None]) -> Answer:
        q = self.labels.shape[1]
        theta, b, first = self.design.zeros(q), self.labels.new_zeros(q), 0.0
        z = self.begin.clone()
        for steps in range(max_steps + 1):
            p = probabilities(z)
            g, gb = self.gradient(theta, p)
            size = _length(g, gb)
            first = first or size
            relative = size / first if first else 0.0
            step(note=f"gradient {relative:.1e}")
            value = float(self.losses(z) + self.reg / 2 * theta.square().sum())
            if steps == max_steps or (relative <= tol and self.reg > 0):
                break
            d, db = self._direction(p, g, gb, min(0.1, relative**0.5))
            slope = float((g * d).sum() + (gb * db).sum())
            dz, rate = self.design.forward(d) + db, 1.0
            if relative <= tol:
                ahead = dz if q == 1 else dz - dz.mean(1, keepdim=True)
                if float(ahead.abs().max()) > 1e-3:  # the gradient vanishes on the way to infinity
                    raise DidNotConverge(SEPARATION)
                break
            while rate > 1e-10:  # Armijo; at the end the objective no longer shows progress that the gradient does
                new = float(self.losses(z + rate * dz) + self.reg / 2 * (theta + rate * d).square().sum())
                if new <= value + 1e-4 * rate * slope + 1e-14 * abs(value):
                    break
                rate /= 2
            theta, b, z = theta + rate * d, b + rate * db, z + rate * dz
            if self.reg == 0 and float(self.losses(z)) < SEPARATED * float(self.w.sum()):
                raise DidNotConverge(SEPARATION)
        if q > 1:  # softmax does not see a shift of all logits; without penalty it would be left to chance
            b = b - b.mean()
            theta = theta - theta.mean(1, keepdim=True) if theta.dim() == 2 else theta
        return Answer(theta, b, steps, relative)

    def _direction(self, p: Tensor, g: Tensor, gb: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        """−H⁻¹ g by preconditioned conjugate gradients, to a tolerance that tightens as Newton's method converges."""

        def parts(v: Tensor) -> tuple[Tensor, Tensor]:
            return v[: g.numel(), 0].reshape(g.shape), v[g.numel() :, 0]

        def column(d: Tensor, db: Tensor) -> Tensor:
            return torch.cat([d.flatten(), db])[:, None]

        def hessian(v: Tensor) -> Tensor:
            d, db = parts(v)
            dz = self.curved(p, self.design.forward(d) + db)
            return column(self.design.adjoint(dz) + self.reg * d, dz.sum(0) if self.bias else torch.zeros_like(db))

        lead = self.design.preconditioner(p, self.w, self.reg)
        target = column(-g, -gb)
        x, length = torch.zeros_like(target), float(target.norm())
        iterates = conjugate(hessian, lambda r: column(*lead(*parts(r))), x, target)
        # At most 2000 (heuristic): Newton's method forgives a direction that is not exact.
        for x, left in itertools.islice(iterates, 2000):  # noqa: B007 - the last one counts
            if left <= tol * length:
                break
        return parts(x)


def _length(g: Tensor, gb: Tensor) -> float:
    """The norm of a gradient by coefficients and bias."""
    return float((g.square().sum() + gb.square().sum()).sqrt())
