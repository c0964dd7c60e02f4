"""Weights on few inputs: their sum is not Gaussian unless they are, and torch's default initialisation is uniform.

Widths go to infinity, the number of inputs does not. So what a first layer gives has the law of a few weights' sum. For
a dense layer of few inputs, an activation's moments are means over quasi-random weights of their true law. Elsewhere
values are taken for Gaussian, and a warning says how far they are from it.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import TangencyWarning
from .core import Grid, Here, Input, Law, Moments, Op, RandomAffine, Taken, channel_products, drawn_with
from .ops import Drawn, SameRow
from .positions import Window
from .recursion import Node

# Inputs, and positions, up to which moments are means over weights: beyond, sums are close to Gaussian, and positions
# make it dear (heuristic).
INPUTS, POSITIONS = 16, 32
# Points for each of the kernel's samples: for one or two inputs, and for more.
POINTS = 4, 16
# The excess kurtosis of a uniform variable, and what is taken for close to Gaussian: kernels of two-layer
# tanh and ReLU networks were off by at most a sixth of it, of √(k(x, x) k(y, y)), so this is 1 %.
UNIFORM, CLOSE = -1.2, 0.06
# Numbers of one tensor [positions, points, samples] at a time (heuristic).
VALUES = 1 << 21


@dataclass(frozen=True)
class Doubt:
    """How values that are taken for Gaussian differ: their excess kurtosis (NaN: not known), and the layer."""

    excess: float
    where: str
    laws: tuple[str, str]
    exact: "WeightedInput | None" = None  # what they are instead, where that is simple
    node: int = -1  # the values that `exact` is for

    def text(self) -> str:
        """The warning."""
        # NaN is the only number that differs from itself.
        if self.excess != self.excess:
            size = "how far they are from it is not known"
        else:
            size = f"their excess kurtosis is {self.excess:.1g} at worst, so kernels are off by up to about "
            size += f"{-self.excess / 6:.0%}"
        return (
            f"{self.where} was initialised by other than normal numbers ({', '.join(self.laws)}), of which few add up, "
            f"so its values are not Gaussian in the limit; w_var='init' takes them for Gaussian here: {size}. "
            "Initialise it with normal weights and biases (nn.init.normal_), or give w_var and b_var as numbers."
        )


@dataclass(frozen=True)
class WeightedInput:
    """W x + b of known x [*grid, c, n], times `factor`: the law of one channel."""

    slot: int
    grid: Grid
    channels: int
    affine: RandomAffine
    factor: float = 1.0

    def points(self, count: int, seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Quasi-random weights [points, c] and biases [points]; with each point its mirror image."""
        variances = [self.affine.w_var / self.channels] * self.channels + [self.affine.b_var]
        standard = _points(max(1, count // 2), self.channels, self.affine.laws, seed).to(like.device)
        scaled = self.factor * standard * torch.tensor(variances, dtype=torch.float64, device=like.device).sqrt()
        # Mirror images make odd moments vanish exactly, as they do for symmetric laws.
        scaled = scaled.to(like)
        return torch.cat([scaled[:, :-1], -scaled[:, :-1]]), torch.cat([scaled[:, -1], -scaled[:, -1]])


@lru_cache(maxsize=8)
def _points(count: int, channels: int, laws: tuple[Law, Law], seed: int) -> Tensor:
    """Of unit variance [count, channels + 1], turned a little so that no two of them are correlated.

    What is linear in the weights then has its exact moments, and the error of the rest is less.
    """
    engine = torch.quasirandom.SobolEngine(channels + 1, scramble=True, seed=seed)
    u = engine.draw(count, dtype=torch.float64).clamp(1e-15, 1 - 1e-15)
    uniform = torch.tensor([law == "uniform" for law in laws]).repeat_interleave(torch.tensor([channels, 1]))
    # √3 makes the variance of a uniform number on [−√3, √3] one.
    drawn = torch.where(uniform, (2 * u - 1) * 3**0.5, torch.special.ndtri(u))
    # Too few points: their covariance may be singular, and turning them would blow up their noise.
    if count < 4 * channels:
        return drawn
    values, vectors = torch.linalg.eigh(drawn.T @ drawn / count)
    return drawn @ (vectors * values.rsqrt()) @ vectors.T


@dataclass(frozen=True)
class FewActivation(Op):
    """φ(W x + b) of few inputs: cov' = E[φ(u)φ(v)], ntk' = E[φ'(u)φ'(v)]·ntk, as means over the weights' own law.

    Positive semidefinite as it stands: it is a product of features.
    """

    of: WeightedInput
    fn: Callable[[Tensor], Tensor] = field(repr=False)
    inner: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)  # ψ, as Activation has it
    rate: float = 0.0
    samples: int = 4096
    seed: int = 0
    what: ClassVar[str] = "activation of few weights"
    limit: ClassVar[str] = "channels → ∞; their few weights each have the law of the module's, which is not Gaussian"
    featured: ClassVar[bool] = True

    def taken(self) -> Taken:
        """As `Op.taken`, with the number of points."""
        return Taken(self.what, self.limit, drawn_with(self.samples * POINTS[self.of.channels > 2]))

    def rounds(self) -> bool:
        """Yes: means over points are matrix products."""
        return True

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        x, y = here.known(self.of.slot)
        # Weights cost less than draws of heads or of several fields, so there are more of them.
        count = self.samples * POINTS[self.of.channels > 2]
        w, b = self.of.points(count, self.seed, x)
        step = max(1, VALUES // (max(1, prod(self.of.grid)) * max(x.shape[-1], y.shape[-1])))
        parts = [self._sums(x, y, w[k : k + step], b[k : k + step], s, here) for k in range(0, len(w), step)]
        cov, slope, more = (sum((p[k] for p in parts), start=x.new_zeros(())) / len(w) for k in range(3))
        ntk = None if s.ntk is None else s.ntk * slope
        if self.rate and here.tangent:
            ntk = self.rate * more if ntk is None else ntk + self.rate * more
        return replace(s, cov=cov, ntk=ntk, gap=None)

    def _sums(
        self, x: Tensor, y: Tensor, w: Tensor, b: Tensor, s: Moments, here: Here
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Over these points: of φφ', of its slopes, and of ψψ'."""
        slope, alone = s.ntk is not None, here.pairs.same or x is y
        u = w @ x + b.unsqueeze(-1)  # [*grid, points, n]
        v = u if alone else w @ y + b.unsqueeze(-1)
        left = _values(self.fn, u, slope)
        right = left if alone else _values(self.fn, v, slope)

        def met(a: Tensor, c: Tensor) -> Tensor:
            """Products of both sides' values, summed over the draws."""
            return _products(a, c, len(self.of.grid), s.whole, here.pairs.zipped)

        zero = x.new_zeros(())
        slopes = met(left[1], right[1]) if left[1] is not None and right[1] is not None else zero
        more = met(self.inner(u), self.inner(v)) if self.inner is not None and self.rate and here.tangent else zero
        return met(left[0], right[0]), slopes, more


def _products(a: Tensor, b: Tensor, d: int, whole: bool, zipped: bool) -> Tensor:
    # Not `channel_products`, which takes the norm of a sample with itself: that rounds otherwise than a sum.
    return (a * b).sum(d) if zipped and not whole else channel_products(a, b, d, whole, zipped)


def _values(fn: Callable[[Tensor], Tensor], u: Tensor, slope: bool) -> tuple[Tensor, Tensor | None]:
    """φ and φ'."""
    if not slope:
        return fn(u), None
    # Where the caller differentiates, the slope must be differentiable again; else no graph is kept.
    follow = torch.is_grad_enabled() and u.requires_grad
    known = u if follow else u.detach().requires_grad_()
    with torch.enable_grad():
        out = fn(known)
        (grad,) = torch.autograd.grad(out.sum(), known, create_graph=follow, allow_unused=True)
    grad = torch.zeros_like(u) if grad is None else grad
    return out if follow else out.detach(), grad


def find_doubt(
    nodes: Sequence[Node], known: Mapping[int, Tensor], at: int, few: bool, op: RandomAffine, where: str
) -> Doubt | None:
    """What sets the output of weights on the values of node `at` apart from Gaussian ones; None if nothing does.

    `few`: those values have a fixed number of channels (inputs), so that it does not go away as widths grow.
    """
    # A parameter of variance zero is constant, whatever it was drawn from.
    weight, bias = (law if v else "normal" for law, v in zip(op.laws, (op.w_var, op.b_var), strict=True))
    if bias == "normal" and (weight == "normal" or not few):
        return None
    laws = (f"weights: {weight}", f"biases: {bias}")
    here = nodes[at].op
    if "other" in ((weight, bias) if few else (bias,)):
        return Doubt(float("nan"), where, laws)
    if not few:  # a sum of infinitely many, of order one, with a bias
        return _noted(UNIFORM * (op.b_var / (op.w_var + op.b_var)) ** 2, where, laws)
    exact: WeightedInput | None = None
    # By independence, the fourth cumulant of Σ w_k x_k is κ₄(w) Σ x_k⁴, and its variance σ² Σ x_k².
    if isinstance(here, Input):
        if here.channels <= INPUTS and prod(here.grid) <= POSITIONS:
            exact = WeightedInput(here.slot, here.grid, here.channels, op)
        square, fourth = _means(known[here.slot], len(here.grid))
    elif isinstance(here, Window) and isinstance(before := nodes[nodes[at].inputs[0]].op, Input):
        square, fourth = (here.apply(v, before.grid, False) for v in _means(known[before.slot], len(before.grid)))
        here = before
    elif isinstance(here, (SameRow, Drawn)):
        return _noted(UNIFORM, where, laws)
    else:
        return Doubt(float("nan"), where, laws)
    variance = op.w_var * square + op.b_var
    excess = UNIFORM * (
        op.w_var**2 * fourth / here.channels * (weight == "uniform") + op.b_var**2 * (bias == "uniform")
    )
    # The smallest is the worst: uniform laws have negative excess. A sample that is zero has none.
    worst = float((excess / variance.clamp(min=1e-300).square()).nan_to_num().min())
    # `len(nodes)` is the node that the weights are about to become.
    return Doubt(worst, where, laws, exact, len(nodes)) if exact else _noted(worst, where, laws)


def _means(x: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Of x² and x⁴ over the channels: [*grid, n]."""
    x = x.detach()
    return x.square().mean(d), x.pow(4).mean(d)


def _noted(excess: float, where: str, laws: tuple[str, str]) -> Doubt | None:
    return Doubt(excess, where, laws) if excess < -CLOSE else None


def first_doubt(doubts: Sequence[Doubt | None]) -> Doubt | None:
    """Of several values that are joined: the first, no longer exact."""
    return next((replace(d, exact=None) for d in doubts if d is not None), None)


def warn_once(doubt: Doubt, warned: set[object]) -> None:
    """Say, once for each layer of a kernel, that its values are taken for Gaussian."""
    if ("doubt", doubt.where) not in warned:
        warned.add(("doubt", doubt.where))
        warnings.warn(doubt.text(), TangencyWarning, stacklevel=2)
